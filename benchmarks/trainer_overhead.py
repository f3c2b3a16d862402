"""What the trainer adds to a step: logging, monitoring, feeding, signals; against the same step written by hand.

    python benchmarks/trainer_overhead.py [--device cuda] [--encoder efficientnet-lite0] [--steps 40] [--rounds 5]

All loops train the same encoder on the same pictures with the same warp, loss, optimiser and batches, by turns in one
process: by hand, and the trainer, on a GPU also with other settings of `training.graphs`. The medians over rounds are
printed and written to results/trainer_overhead.csv. The trainer's time runs from its first step to its last within an
epoch: validation and checkpoints between epochs are not steps. small-cnn sees glyphs, EfficientNet-Lite0 drawn photos
at 96 px, and its weights are random; --freeze-norms: batch norm as it is usual for pretrained ones.
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image

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


def photos(folder: Path, classes: int = 48, each: int = 40) -> Path:
    rng = np.random.default_rng(0)
    for label in range(classes):
        (folder / str(label)).mkdir(parents=True)
        for i in range(each):
            coarse = Image.fromarray(rng.integers(0, 256, (12, 12, 3), np.uint8))
            coarse.resize((112, 112), Image.Resampling.BICUBIC).save(folder / str(label) / f"{i}.jpg", quality=90)
    return folder


def settings(arguments: argparse.Namespace, folder: Path) -> list[str]:
    sets = [f"training.batches={arguments.steps}", f"training.epochs={arguments.rounds + 2}", "training.patience=999"]
    sets += [f"loss.name={arguments.loss}", f"training.device={arguments.device}", "training.every=999"]
    sets += ["training.deterministic=false", "training.on_collapse=warn"]
    if arguments.encoder == "efficientnet-lite0":
        sets += [f"data.source={photos(folder / 'photos')}", "data.size=96", "sampler.batch=128"]
        sets += ["encoder.name=efficientnet-lite0", "encoder.pretrained=false"]
        sets += [f"encoder.freeze_norms={str(arguments.freeze_norms).lower()}"]
    return sets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--encoder", default="small-cnn", choices=("small-cnn", "efficientnet-lite0"))
    parser.add_argument("--freeze-norms", action="store_true")
    parser.add_argument("--loss", default="supcon")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    results = Path(__file__).parent / "results" / "trainer_overhead.csv"
    parser.add_argument("--out", type=Path, default=results)
    arguments = parser.parse_args()
    on = torch.device(arguments.device)
    modes = [True, "encoder", False] if on.type == "cuda" else [False]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sets = settings(arguments, folder)
        loops = {}
        prepared = prepare(read(None, sets))
        for graphs in modes:
            title = "trainer" if on.type == "cpu" else f"trainer, graphs={graphs}"
            recipe = prepared.recipe.with_("training", graphs=graphs)
            trainer, loops[title] = by_trainer(replace(prepared, recipe=recipe), folder / str(graphs))
        if arguments.loss == "supcon":
            batches = [trainer.sampler.batch(0, i) for i in range(arguments.steps)]
            loops["by hand"] = by_hand(prepared, on, trainer.precision, batches)
        times: dict[str, list[float]] = {title: [] for title in loops}
        for number in range(arguments.rounds + 1):  # the first round warms up
            for title, epoch in loops.items():
                value = epoch()
                if number:
                    times[title].append(1e3 * value)
    medians = {title: statistics.median(each) for title, each in times.items()}
    device = torch.cuda.get_device_name() if on.type == "cuda" else "cpu"
    batch, rows = prepared.recipe.sampler["batch"], []
    for title, ms in medians.items():
        ratio = ms / medians.get("by hand", ms)
        row = [device, arguments.encoder, arguments.loss, batch, prepared.recipe.training.precision]
        row += [arguments.steps * arguments.rounds, title, f"{ms:.3f}", f"{1e3 * batch / ms:.0f}", f"{ratio:.4f}"]
        rows.append(row)
        print(f"{device}, {arguments.encoder}: {title} {ms:.2f} ms per step, {1e3 * batch / ms:,.0f} items per second")
    header = ["device", "encoder", "loss", "batch", "precision", "steps", "loop", "ms", "items_per_second", "ratio"]
    measure.write_csv(arguments.out, header, rows)


if __name__ == "__main__":
    main()
