"""What the trainer adds to a step: logging, monitoring, feeding, signals; against the same step written by hand.

    python benchmarks/trainer_overhead.py [--device cuda] [--steps 40] [--rounds 5]

Both loops train the same encoder on the same glyphs with the same warp, loss, optimiser and batches, by turns in one
process; the ratio of the medians over rounds is printed and written to results/trainer_overhead.csv. The trainer's time
runs from its first step to its last within an epoch: validation and checkpoints between epochs are not steps.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

import measure
from nearkin import losses
from nearkin.data import augment
from nearkin.training import loop
from nearkin.training.config.recipe import read
from nearkin.training.prepare import build_encoder, prepare
from nearkin.training.trainer import assemble


def by_hand(prepared, on: torch.device, precision: torch.dtype | None, batches: list[list[int]]):
    """The loop a careful person writes: pixels in memory, one warp, one loss, one step."""
    recipe = prepared.recipe
    encoder = build_encoder(prepared).to(on).train()
    loss = losses.SupConLoss(temperature=recipe.loss["temperature"])
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=recipe.optimizer.lr, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(batches))
    part = prepared.parts.train
    pixels = torch.from_numpy(prepared.rows[part]).to(on)
    labels = torch.from_numpy(prepared.items.labels[part]).to(on)
    augmentation = augment.PRESETS[recipe.augment["preset"]]

    def epoch() -> float:
        start = None
        for step, batch in enumerate(batches):
            items = torch.tensor(batch)
            where = items.to(on)
            images = augment.warp(
                pixels[where], augment.keys(0, step, items), size=recipe.data.size, augmentation=augmentation
            )
            with torch.autocast(on.type, precision, enabled=precision is not None):
                embeddings = encoder(images)
            loss(embeddings.float(), labels[where]).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
            if start is None:
                start = now(on)
        return (now(on) - start) / (len(batches) - 1)

    return epoch


def by_trainer(prepared, folder: Path):
    trainer = assemble(prepared, folder)
    folder.mkdir(exist_ok=True)
    steps = len(trainer.sampler)
    on = trainer.device

    def epoch() -> float:
        trainer.state.finished, marks = False, []

        def callback(event: dict) -> None:
            if event["event"] == "step_end" and event["step"] % steps in (1, 0):
                marks.append(now(on))
            if event["event"] == "epoch":
                trainer.state.finished = True

        loop.fit(trainer, callback)
        return (marks[1] - marks[0]) / (steps - 1)

    return trainer, epoch


def now(on: torch.device) -> float:
    if on.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    results = Path(__file__).parent / "results" / "trainer_overhead.csv"
    parser.add_argument("--out", type=Path, default=results)
    arguments = parser.parse_args()
    sets = [f"training.batches={arguments.steps}", f"training.epochs={arguments.rounds + 2}", "training.patience=999"]
    sets += [
        "loss.name=supcon",
        f"training.device={arguments.device}",
        "training.every=999",
        "training.deterministic=false",
    ]
    prepared = prepare(read(None, sets))
    on = torch.device(arguments.device)
    with tempfile.TemporaryDirectory() as folder:
        trainer, ours = by_trainer(prepared, Path(folder) / "run")
        batches = [trainer.sampler.batch(0, i) for i in range(arguments.steps)]
        hand = by_hand(prepared, on, trainer.precision, batches)
        times: dict[str, list[float]] = {"hand": [], "trainer": []}
        for number in range(arguments.rounds + 1):  # the first round warms up
            for name, epoch in (("hand", hand), ("trainer", ours)):
                value = epoch()
                if number:
                    times[name].append(1e3 * value)
    hand_ms, trainer_ms = (statistics.median(times[name]) for name in ("hand", "trainer"))
    ratio = trainer_ms / hand_ms
    name = torch.cuda.get_device_name() if on.type == "cuda" else "cpu"
    row = [name, prepared.recipe.sampler["batch"], prepared.recipe.training.precision]
    row += [arguments.steps * arguments.rounds, f"{hand_ms:.3f}", f"{trainer_ms:.3f}", f"{ratio:.4f}"]
    print(f"{name}: by hand {hand_ms:.2f} ms per step, trainer {trainer_ms:.2f} ms, ratio {ratio:.3f}")
    header = ["device", "batch", "precision", "steps", "hand_ms", "trainer_ms", "ratio"]
    measure.write_csv(arguments.out, header, [row])


if __name__ == "__main__":
    main()
