"""One training of the canon's comparison: what a job is, what it is trained and judged on, what it gives.

A job is plain values, and what it gives is a function of these and of the files: a comparison that was cut off goes on
where it was. A final is the training that `nearkin train --recipe` makes of the same recipe, without what that keeps
and draws: the same batches, the same weights, the same figures.
"""

import dataclasses
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from canon_rows import base_of
from nearkin import data, evaluation
from nearkin.core.errors import Diverged
from nearkin.data.item_set import Items
from nearkin.data.splits import Parts
from nearkin.training import loop
from nearkin.training.config.defaults import settle, settle_source, settle_split, split_items
from nearkin.training.config.recipe import Recipe, read
from nearkin.training.final_test import full_metrics, raw
from nearkin.training.loader import ItemStore, embed
from nearkin.training.prepare import Prepared, item_rows
from nearkin.training.trainer import PRECISIONS, Trainer, assemble
from nearkin.training.validation import quick_metrics

__all__ = ["Desk", "Job", "content_of", "key", "recipe_of"]

HELD = {"cub200": (75, 100), "best": (75, 100), "fashion-mnist": (3, 5)}  # classes that settings are chosen on
SEEN = {"cub200": 100, "best": 100, "fashion-mnist": 5}  # classes that are not tested
KS = (1, 2, 4, 8)
WARM, TIMED = 30, 100  # steps before the clock runs, and while it does
_ATTRIBUTES = "attributes/class_attribute_labels_continuous.txt"


class Job(NamedTuple):
    """stage: "frozen", "search" (trained and judged on training classes), "final" (tested), "speed"."""

    subject: str
    stage: str
    row: str
    setting: dict[str, Any]
    seed: int = 0


def key(job: Job) -> str:
    return json.dumps(job._asdict(), sort_keys=True)


def content_of(job: Job) -> dict[str, dict[str, Any]]:
    """The recipe of a job as it is written into a file: nothing settled by the data yet, and no seed."""
    content = {section: dict(part) for section, part in base_of(job.subject).items()}
    setting = dict(job.setting)
    if job.stage == "search" and job.subject == "fashion-mnist" and "sampler.per_class" not in setting:
        setting["sampler.per_class"] = content["sampler"]["batch"] // HELD[job.subject][0]  # fewer classes, same batch
    for name, value in setting.items():
        section, _, inner = name.partition(".")
        content.setdefault(section, {})[inner] = value
    if content["encoder"]["name"] == "small-cnn":
        content.pop("finetune", None)  # it has no pretrained weights
    if content["sampler"]["name"] == "label-neighbours":
        del content["sampler"]["per_class"]
        content["sampler"] = {"anchors": 1, "neighbours": 5} | content["sampler"]  # as docs/benchmarks.md was made
    content["training"]["every"] = content["training"]["epochs"]  # validated at the end only: the last weights count
    return content


def recipe_of(job: Job, root: str, partial: bool = False) -> Recipe:
    content = content_of(job)
    content["data"] |= {"root": root} | ({"partial": True} if partial else {})
    content["training"]["seed"] = job.seed
    return read(base=content)


class Desk:
    """What a process needs for its jobs, read once: the items, and their pixels at each stored size."""

    def __init__(self, root: str, partial: bool = False) -> None:
        self.root, self.partial = root, partial
        self._items: dict[str, Items] = {}
        self._rows: dict[tuple[str, int | None], NDArray[Any]] = {}

    def do(self, job: Job) -> dict[str, Any]:
        """The figures of a job; a training that diverges has none, and says why."""
        began = time.monotonic()
        prepared = self.prepared(job)
        try:
            with loop.deterministic(True):
                result = _STAGES[job.stage](prepared, job)
        except Diverged as error:
            result = {"diverged": str(error).partition(":")[0]}
        return result | {"seconds": time.monotonic() - began}

    def store(self, job: Job) -> None:
        """The pictures decoded into the cache, from which other processes map them; no GPU is touched."""
        recipe = recipe_of(job, self.root, self.partial)
        items = self._loaded(recipe)
        self._pixels(settle_source(recipe, items)[0], items)

    def prepared(self, job: Job) -> Prepared:
        """As `nearkin train` prepares the recipe; a search has the classes to choose on, and nothing of the test."""
        recipe = recipe_of(job, self.root, self.partial)
        items = self._targeted(recipe)
        recipe, notes = settle_source(recipe, items)
        rows = self._pixels(recipe, items)
        parts = self._parts(job, recipe, items)
        recipe = settle(recipe, items, parts, split=False)
        return Prepared(recipe, items, parts, rows, {}, "", notes)

    def _loaded(self, recipe: Recipe) -> Items:
        source = recipe.data.source
        if source not in self._items:
            self._items[source] = data.load(source, root=Path(self.root), partial=self.partial)
        return self._items[source]

    def _targeted(self, recipe: Recipe) -> Items:
        """For log-ratio the attributes of a bird's class, 312 numbers, are its target."""
        items = self._loaded(recipe)
        if recipe.loss.get("name") != "logratio":
            return items
        assert items.labels is not None
        return dataclasses.replace(items, targets=_attributes(Path(self.root))[items.labels])

    def _pixels(self, recipe: Recipe, items: Items) -> NDArray[Any]:
        place = (recipe.data.source, recipe.data.stored)
        if place not in self._rows:
            self._rows[place] = item_rows(items, recipe)[0]
        return self._rows[place]

    def _parts(self, job: Job, recipe: Recipe, items: Items) -> Parts:
        assert items.labels is not None and items.split is not None
        labels, trained = items.labels, np.array(items.split) == "train"
        first, last = HELD[job.subject]
        nothing = np.empty(0, np.int64)
        closed = job.subject == "fashion-mnist"  # its own split divides the pictures of every class
        if job.stage == "search":
            held_out = (labels >= first) & (labels < last) & (~trained if closed else True)
            return Parts(np.flatnonzero(trained & (labels < first)), np.flatnonzero(held_out), nothing)
        if closed:
            seen = SEEN[job.subject]
            tested = np.flatnonzero(~trained & (labels >= seen))
            return Parts(np.flatnonzero(trained & (labels < seen)), nothing, tested)
        parts = split_items(items, recipe, [])
        settle_split(recipe, items, parts)
        return parts


def _attributes(root: Path) -> NDArray[np.float64]:
    from nearkin.data.benchmarks.layout import by_mark
    from nearkin.data.benchmarks.photos import CUB200

    tree, _ = by_mark(CUB200, root, "image_class_labels.txt")
    lines = tree.read(_ATTRIBUTES).decode().split()
    return np.array(lines, np.float64).reshape(200, 312) / 100


def _trained(prepared: Prepared) -> Trainer:
    """Trained to the last step; nothing is kept on the way."""
    trainer = assemble(prepared, Path(os.devnull))
    state = trainer.state
    while state.epoch < trainer.epochs:
        trainer.begin_epoch()
        for batch in trainer.loader.epoch(state.epoch, 0):
            _step(trainer, batch)
        trainer.check()
        if hasattr(trainer.sampler, "refresh") and state.epoch + 1 < trainer.epochs:
            raise ValueError(f"sampler {trainer.recipe.sampler['name']} mines classes, which this loop does not do")
        state.epoch, state.batch = state.epoch + 1, 0
    return trainer


def _step(trainer: Trainer, batch: Any) -> None:
    state = trainer.state
    trainer.lr_schedule.set(trainer.optimizer, state.step)
    value, _, _ = trainer.train_step(batch, measure=False)
    trainer.window += value
    state.counted, state.batch, state.step = state.counted + 1, batch.number + 1, state.step + 1


def _embedded(trainer: Trainer, indices: NDArray[np.int64]) -> torch.Tensor:
    precision = PRECISIONS[trainer.recipe.training.precision or "fp32"]
    rows = embed(trainer.best_encoder, trainer.store, indices, precision=precision)
    if not bool(rows.isfinite().all()):
        raise Diverged(f"the embeddings are not finite at step {trainer.state.step}")
    return rows


def _search(prepared: Prepared, job: Job) -> dict[str, Any]:
    trainer = _trained(prepared)
    held_out = prepared.held_out("val")
    rows = _embedded(trainer, held_out.everything)
    return {"val": quick_metrics(rows, held_out, False, trainer.device), "steps": trainer.state.step}


def _final(prepared: Prepared, job: Job) -> dict[str, Any]:
    began = time.monotonic()
    trainer = _trained(prepared)
    took = time.monotonic() - began
    rows = _embedded(trainer, prepared.held_out("test").everything)
    scores = _tested(prepared, rows, trainer.device, job.seed)
    exact = _exact(prepared, lambda store, of: embed(trainer.best_encoder, store, of, precision=trainer.precision))
    return exact | {
        "test": scores,
        "steps": trainer.state.step,
        "training_seconds": took,
        "peak_bytes": _peak(trainer.device),
    }


def _frozen(prepared: Prepared, job: Job) -> dict[str, Any]:
    """What could be had for nothing: the features of the encoder as it was bought, or the pixels."""
    trainer = assemble(prepared, Path(os.devnull))

    def embedded(store: ItemStore, indices: NDArray[np.int64]) -> torch.Tensor:
        if prepared.baseline != "frozen backbone":
            return raw(store, indices)
        return embed(trainer.encoder, store, indices, precision=trainer.precision, features=True)

    rows = embedded(trainer.store, prepared.held_out("test").everything)
    return _exact(prepared, embedded) | {"test": _tested(prepared, rows, trainer.device, job.seed)}


def _exact(prepared: Prepared, embedded: Callable[[ItemStore, NDArray[np.int64]], torch.Tensor]) -> dict[str, Any]:
    """The same on the middle of the photos pixel by pixel, as the peer was tested, where ours looks a little wider.

    98 of 112 pixels reduced to 96 are softer than 96 of them: the frozen encoder notices.
    """
    size, held_out = prepared.recipe.data.size, prepared.held_out("test")
    start = (prepared.rows.shape[1] - size) // 2 if size is not None else 0
    if size is None or start <= 0:
        return {}
    middle = np.ascontiguousarray(prepared.rows[held_out.indices, start : start + size, start : start + size])
    device = prepared.recipe.device
    rows = embedded(ItemStore(middle, device, size), np.arange(len(middle)))
    scores = _tested(prepared, rows, device, prepared.recipe.training.seed, interval=False)
    return {"exact": {name: one["value"] for name, one in scores.items()}}


def _tested(
    prepared: Prepared, rows: torch.Tensor, device: torch.device, seed: int, interval: bool = True
) -> dict[str, Any]:
    """Every figure with its 95 % interval over the choice of classes."""
    held_out = prepared.held_out("test")
    scores: dict[str, Any] = full_metrics(rows, held_out, False, device, ks=KS, interval=interval, seed=seed)
    assert held_out.labels is not None
    labels = torch.from_numpy(held_out.labels).to(device)
    clusters = evaluation.clustering(rows.to(device), labels, seed, interval=interval)
    if not interval:
        return scores | {"nmi": {"value": float(clusters["nmi"])}}
    low, high = clusters.intervals["nmi"]
    return scores | {"nmi": {"value": float(clusters["nmi"]), "low": float(low), "high": float(high)}}


def _speed(prepared: Prepared, job: Job) -> dict[str, Any]:
    """Images a second of whole steps, after some to warm up; alone on the machine it is a measurement."""
    trainer = assemble(prepared, Path(os.devnull))
    trainer.begin_epoch()
    batches = iter(batch for epoch in range(trainer.epochs) for batch in trainer.loader.epoch(epoch, 0))
    total = trainer.recipe.training.batches or 1
    warm, timed = (WARM, TIMED) if total * trainer.epochs >= WARM + TIMED else (1, total * trainer.epochs - 1)
    for _ in range(warm):
        _step(trainer, next(batches))
    began = _now(trainer.device)
    for _ in range(timed):
        _step(trainer, next(batches))
    took = _now(trainer.device) - began
    return {"images_per_second": timed * trainer.recipe.sampler["batch"] / took, "peak_bytes": _peak(trainer.device)}


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _peak(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak


_STAGES = {"frozen": _frozen, "search": _search, "final": _final, "speed": _speed}
