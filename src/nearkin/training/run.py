"""A whole run: from a recipe to a folder with a trained, measured encoder; and going on with one that was stopped.

recipe.toml  model.safetensors  encoder.json  metrics.jsonl  results.json  data.json  checkpoints/
"""

import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from nearkin import models
from nearkin.core import files
from nearkin.training import cached, defaults, judging
from nearkin.training import folder as run_folder
from nearkin.training.checkpoint import Checkpoints
from nearkin.training.feed import Feed, Material, embed
from nearkin.training.journal import Journal
from nearkin.training.loop import Watch, fit
from nearkin.training.monitor import Monitor
from nearkin.training.objective import build_loss, build_sampler, takes_targets
from nearkin.training.optimizers import Rate, groups, optimizer
from nearkin.training.prepare import Prepared, augmentation_of, build_encoder, prepare
from nearkin.training.recipe import Recipe
from nearkin.training.trainer import PRECISIONS, State, Trainer, seed_everything

__all__ = ["Outcome", "assemble", "raw", "resume", "train"]

_PIXELS = 32  # side to which pictures are reduced before their pixels are compared


@dataclass(frozen=True)
class Outcome:
    """What a run has come to: its folder, and what a report shows of it."""

    folder: Path
    recipe: Recipe
    results: dict[str, Any]
    history: list[dict[str, Any]]
    prepared: Prepared
    test: judging.Held
    embeddings: Tensor  # of the test items, the gallery's after the queries'
    notes: list[str]


def train(recipe: Recipe, out: str | Path, watch: Watch = lambda _: None) -> Outcome:
    """Trains as the recipe says into a new folder. `watch` is told everything that happens."""
    folder = Path(out)
    _new_folder(folder)
    prepared = prepare(recipe, watch)
    trainer = assemble(prepared, folder)  # whatever is wrong with the recipe is said before there is a folder
    _begin(trainer, prepared, watch)
    return _finish(trainer, prepared, watch)


def resume(folder: str | Path, watch: Watch = lambda _: None) -> Outcome:
    """Goes on from the newest whole checkpoint of a run, to the same weights as if it had never stopped."""
    folder = Path(folder)
    prepared = prepare(run_folder.recipe_of(folder), watch)
    run_folder.check(folder, prepared)
    trainer = assemble(prepared, folder)
    if not any((folder / "checkpoints").glob("*.safetensors")):  # it ended before it had begun
        _begin(trainer, prepared, watch)
        return _finish(trainer, prepared, watch)
    for note in trainer.restore():
        trainer.state.notes.append(note)
        watch({"event": "note", "text": note})
    state = trainer.state
    watch({"event": "resumed", "epoch": state.epoch + 1, "step": state.step, "finished": state.finished})
    return _finish(trainer, prepared, watch)


def _begin(trainer: Trainer, prepared: Prepared, watch: Watch) -> None:
    """The folder, with all that a run needs to be resumed from its first step."""
    run_folder.write(trainer.out, prepared)
    trainer.state.notes += [*prepared.notes, *_chunk_note(trainer)]
    for note in trainer.state.notes:
        watch({"event": "note", "text": note})
    trainer.save()


def assemble(prepared: Prepared, folder: Path) -> Trainer:
    """The trainer at its first step."""
    recipe, items, train_part = prepared.recipe, prepared.items, prepared.parts.train
    on, graded = defaults.device(recipe), takes_targets(recipe)
    seed_everything(recipe.training.seed)
    encoder = build_encoder(prepared).to(on)
    dim = encoder.dim
    labels = classes = targets = None
    if items.labels is not None and not graded:
        present, labels = np.unique(items.labels[train_part], return_inverse=True)
        labels, classes = labels.astype(np.int64), len(present)
    if graded:
        if items.targets is None:
            raise ValueError(f'loss "{recipe.loss["name"]}" needs continuous targets, {items.name} has none')
        targets = items.targets[train_part]
    width = None if targets is None else (1 if targets.ndim == 1 else targets.shape[1])
    loss = build_loss(recipe, classes, dim, recipe.training.seed, width).to(on)
    with warnings.catch_warnings(record=True) as heard:  # a note of the run, not a line of Python's among the bars
        warnings.simplefilter("always")
        sampler = build_sampler(recipe, labels, targets)
    known = torch.from_numpy(targets if graded else labels).to(on)
    assert recipe.training.epochs is not None
    steps = optimizer(recipe, groups(recipe, encoder.backbone, encoder.head, loss))
    average = None
    if recipe.training.ema:
        ema: Any = get_ema_multi_avg_fn
        average = AveragedModel(encoder, multi_avg_fn=ema(recipe.training.ema))
    material = Material(prepared.rows, on, recipe.data.size)
    return Trainer(
        recipe=recipe,
        out=folder,
        device=on,
        encoder=encoder,
        average=average,
        loss=loss,
        optimizer=steps,
        rate=Rate(recipe, len(sampler), recipe.training.epochs),
        scaler=torch.amp.GradScaler(on.type, enabled=recipe.training.precision == "fp16"),
        sampler=sampler,
        feed=Feed(material, train_part, sampler, recipe.training.workers),
        material=material,
        known=known if graded else known.long(),
        augmentation=augmentation_of(recipe),
        held=prepared.held("val"),
        graded=graded,
        monitor=Monitor(classes, dim, recipe.training.on_collapse),
        journal=Journal(folder / "metrics.jsonl", recipe.training.tensorboard),
        epochs=recipe.training.epochs,
        state=State(notes=[str(one.message) for one in heard]),
    )


def _finish(trainer: Trainer, prepared: Prepared, watch: Watch) -> Outcome:
    """Trains what is left, then: the best weights, the test, the files."""
    started = time.monotonic()
    fit(trainer, watch)
    recipe, state, held = trainer.recipe, trainer.state, prepared.held("test")
    assert state.best_file is not None
    tensors, facts = Checkpoints(trainer.out / "checkpoints").best(state.best_file)
    encoder = trainer.encoder
    encoder.load_state_dict({k.removeprefix("encoder."): v for k, v in tensors.items() if k.startswith("encoder.")})
    way_out = f"training is done and saved: make room, then nearkin train --resume {trainer.out}"
    with files.explained(f"{trainer.out}: the encoder", way_out):
        models.save(encoder, trainer.out, prepared.preparation)
    rows: dict[str, Tensor] = {}
    for name, made in _contenders(trainer, prepared, held).items():
        watch({"event": "testing", "what": name})
        rows[name] = made()
    options: dict[str, Any] = {"ks": recipe.evaluation.ks, "interval": recipe.evaluation.interval}
    options["seed"] = recipe.training.seed
    tested = {name: judging.test(x, held, trainer.graded, trainer.device, **options) for name, x in rows.items()}
    results = {
        "nearkin": version("nearkin"),
        "source": recipe.data.source,
        "protocol": prepared.parts.note,
        "test": tested,
        "baseline": prepared.baseline,
        "val": facts["val"] | {"epoch": facts["epoch"], "step": facts["step"]},
        "items": {name: len(part) for name, part in prepared.sizes().items()},
        "classes": prepared.class_counts(),
        "device": torch.cuda.get_device_name() if trainer.device.type == "cuda" else "cpu",
        "epochs": state.epoch,
        "steps": state.step,
        "seconds": state.seconds,
        "peak_bytes": _peak(trainer.device),
        "notes": state.notes,
    }
    results |= judging.more(rows["trained"], held, prepared.test_pairs(), recipe, trainer.device)
    with files.explained(f"{trainer.out}: results.json", way_out):
        files.write_json(trainer.out / "results.json", results)
    watch({"event": "tested", "results": results, "seconds": time.monotonic() - started})
    return Outcome(
        trainer.out, recipe, results, trainer.journal.read(), prepared, held, rows["trained"], list(state.notes)
    )


def _contenders(trainer: Trainer, prepared: Prepared, held: judging.Held) -> dict[str, Callable[[], Tensor]]:
    """What is tested: the trained encoder, the same one untrained, and what could be had without training."""
    recipe, material, indices = trainer.recipe, trainer.material, held.everything
    precision = PRECISIONS[recipe.training.precision or "fp32"]

    def trained() -> Tensor:
        return embed(trainer.encoder, material, indices, precision=precision)

    def untrained() -> Tensor:
        return embed(build_encoder(prepared).to(trainer.device), material, indices, precision=precision)

    def baseline() -> Tensor:
        if prepared.baseline == "frozen backbone":
            fresh = build_encoder(prepared).to(trainer.device)
            return embed(fresh, material, indices, precision=precision, features=True)
        return raw(material, indices)

    return {"trained": trained, "untrained": untrained, "baseline": baseline}


def raw(material: Material, indices: NDArray[np.int64]) -> Tensor:
    """The items themselves as vectors: pixels, of large pictures reduced ones."""
    parts = []
    for start in range(0, len(indices), 256):
        seen = material.plain(material.gather(indices[start : start + 256])).float()
        if seen.dim() == 4 and seen.shape[-1] > 2 * _PIXELS:
            seen = torch.nn.functional.interpolate(seen, size=(_PIXELS, _PIXELS), mode="area")
        parts.append(seen.flatten(1).cpu())
    return torch.cat(parts)


def _chunk_note(trainer: Trainer) -> list[str]:
    chunk, batch = trainer.recipe.training.chunk, trainer.recipe.sampler["batch"]
    if chunk is None or chunk >= batch or not cached.meets(trainer.encoder):
        return []
    return [
        f"batch norm takes its statistics from chunks of {chunk}, not from the batch of {batch}; "
        f"encoder.freeze_norms=true makes the gradient that of the whole batch"
    ]


def _new_folder(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        what = "is not empty" if folder.is_dir() else "is a file"
        begun = (folder / "recipe.toml").is_file()
        more = f", or go on with nearkin train --resume {folder}" if begun else ""
        raise ValueError(f"{folder}: {what}; choose another --out{more}")
    above = next(parent for parent in [folder, *folder.absolute().parents] if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):  # said before anything long begins
        raise ValueError(f"{folder}: cannot be written ({above} is {'no folder' if above.is_file() else 'read-only'})")


def _peak(on: torch.device) -> int:
    if on.type == "cuda":
        return torch.cuda.max_memory_allocated(on)
    import resource
    import sys

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
