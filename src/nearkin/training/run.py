"""A whole run: from a recipe to a folder with a trained, measured encoder; and going on with one that was stopped.

recipe.toml  model.safetensors  encoder.json  metrics.jsonl  results.json  data.json  checkpoints/
"""

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from nearkin import models
from nearkin.dist import parallel, sync_batchnorm
from nearkin.dist.group import ALONE, ProcessGroup
from nearkin.dist.rendezvous import join
from nearkin.training import final_test, grad_cache
from nearkin.training import run_dir as run_folder
from nearkin.training.build import build_loss, build_sampler
from nearkin.training.checkpoint import state
from nearkin.training.checkpoint.checkpoints import Checkpoints
from nearkin.training.config import registry
from nearkin.training.config.recipe import Recipe
from nearkin.training.final_test import raw
from nearkin.training.loader import BatchLoader, ItemStore
from nearkin.training.loop import Callback, deterministic, fit
from nearkin.training.metrics_log import MetricsLog
from nearkin.training.monitor import Monitor
from nearkin.training.optimizers import LRSchedule, build_optimizer, parameter_groups
from nearkin.training.own_objects import NONE, Own
from nearkin.training.prepare import Prepared, build_encoder, prepare
from nearkin.training.run_dir import check_not_started, check_unchanged
from nearkin.training.trainer import Trainer, seed_everything
from nearkin.training.validation import HeldOut

__all__ = ["Outcome", "assemble", "raw", "resume", "train"]


@dataclass(frozen=True)
class Outcome:
    """What a run has come to: its folder, and what a report shows of it."""

    folder: Path
    recipe: Recipe
    results: dict[str, Any]
    history: list[dict[str, Any]]
    prepared: Prepared
    test: HeldOut
    embeddings: Tensor  # of the test items, the gallery's after the queries'
    notes: list[str]
    report: Path | None = None  # the page, where it was written


def train(
    recipe: Recipe,
    out: str | Path,
    callback: Callback = lambda _: None,
    own: Own = NONE,
    group: ProcessGroup | None = None,
) -> Outcome:
    """Trains as the recipe says into a new folder. `callback` is told everything that happens.

    Under torchrun all processes train together; every one returns the outcome, and the first has written it. One that
    torchrun has started again goes on with the folder, if it is of this recipe.
    """
    folder = Path(out)
    with join() if group is None else nullcontext(group) as group:
        restarted = group.restarted()
        if group.on_rank0("looking", lambda: _again(folder, restarted)):
            with _held(folder, group):
                return _resumed(recipe, folder, callback, group, own)
        with _held(folder, group, new=True):  # and gone again where anything is wrong with the recipe
            prepared = _prepared(recipe, callback, group, own)
            trainer = assemble(prepared, folder, group)
            _begin(trainer, prepared, callback)
            return _finish(trainer, prepared, callback)


def resume(
    folder: str | Path, callback: Callback = lambda _: None, own: Own = NONE, group: ProcessGroup | None = None
) -> Outcome:
    """Goes on from the newest whole checkpoint of a run, to the same weights as if it had never stopped.

    On any number of processes: a checkpoint holds what each of them needs.
    """
    folder = Path(folder)
    with join() if group is None else nullcontext(group) as group:
        recipe = run_folder.recipe_of(folder)
        own.check(recipe, f"{folder}: ")
        with _held(folder, group):
            return _resumed(recipe, folder, callback, group, own)


@contextmanager
def _held(folder: Path, group: ProcessGroup, new: bool = False) -> Iterator[None]:
    """One training at a time writes into a folder; that of several ranks is held by the first."""
    claims: list[run_folder.Claim] = []
    group.on_rank0("claiming", lambda: claims.append(run_folder.Claim(folder, new)))
    try:
        yield
    finally:
        for claim in claims:
            claim.close()


def _resumed(recipe: Recipe, folder: Path, callback: Callback, group: ProcessGroup, own: Own) -> Outcome:
    prepared = _prepared(recipe, callback, group, own)
    prepared.own.read_initial(folder)
    check_unchanged(folder, prepared)
    trainer = assemble(prepared, folder, group)
    if not group.on_rank0("looking", trainer.checkpoints.any_written):
        group.on_rank0("looking", lambda: check_not_started(folder))
        callback({"event": "note", "text": "this run ended before its first checkpoint, so it begins anew"})
        _begin(trainer, prepared, callback)
        return _finish(trainer, prepared, callback)
    for note in trainer.restore():
        trainer.state.notes.append(note)
        callback({"event": "note", "text": note})
    with deterministic(recipe.training.deterministic):
        trainer.replace_lost_best()
    state = trainer.state
    callback({"event": "resumed", "epoch": state.epoch + 1, "step": state.step, "finished": state.finished})
    return _finish(trainer, prepared, callback)


def _again(folder: Path, restarted: bool) -> bool:
    """Whether torchrun has started this training again, and it had come as far as a folder."""
    begun = (folder / "recipe.toml").is_file()
    if restarted and folder.is_dir() and not begun:
        for path in folder.iterdir():
            if run_folder.is_half_written(path.name):
                path.unlink()
    return begun and (restarted or run_folder.same_launch(folder))


def _prepared(recipe: Recipe, callback: Callback, group: ProcessGroup, own: Own = NONE) -> Prepared:
    """One rank after the other where there is something to store; all must find the same items."""
    prepared = group.first_on_machine("preparing", lambda: prepare(recipe, callback, own), rank0_first=True)
    found = group.values([prepared.fingerprint, prepared.recipe.digest()])
    for rank, other in enumerate(found):
        for what, ours, theirs in zip(("items", "settings"), found[0], other, strict=True):
            if ours != theirs:
                raise ValueError(
                    f"{recipe.data.source}: all ranks must find the same {what}, rank {rank} finds others than rank 0"
                )
    return prepared


def _begin(trainer: Trainer, prepared: Prepared, callback: Callback) -> None:
    """The folder, with all that a run needs to be resumed from its first step."""
    trainer.group.on_rank0("beginning", lambda: run_folder.write(trainer.out, prepared))
    trainer.state.notes += [*prepared.notes, *_pairs_note(prepared), *_chunk_note(trainer), *_rank_notes(trainer)]
    for note in trainer.state.notes:
        callback({"event": "note", "text": note})
    trainer.save()


def assemble(prepared: Prepared, folder: Path, group: ProcessGroup = ALONE) -> Trainer:
    """The trainer at its first step."""
    recipe, items, train_part = prepared.recipe, prepared.items, prepared.parts.train
    on, graded = group.device(recipe.device), recipe.takes_targets
    seed_everything(recipe.training.seed)
    encoder = (prepared.own.wrapped or build_encoder(prepared)).to(on)
    if recipe.training.sync_norms and group.size > 1:
        sync_batchnorm.sync(encoder, on)
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
    loss = build_loss(recipe, classes, dim, recipe.training.seed, width, len(train_part), prepared.own).to(on)
    with warnings.catch_warnings(record=True) as heard:  # a note of the run, not a line of Python's among the bars
        warnings.simplefilter("always")
        sampler = build_sampler(recipe, labels, targets)
    known = torch.from_numpy(targets if graded else labels).to(on)
    assert recipe.training.epochs is not None
    average = plain = None
    if recipe.training.ema:
        ema: Any = get_ema_multi_avg_fn
        average = AveragedModel(encoder, multi_avg_fn=ema(recipe.training.ema))
    if recipe.training.strategy == "fsdp" and group.size > 1:
        plain = parallel.shard(encoder, on)
        if average is not None:
            parallel.shard(average.module, on)
    steps = build_optimizer(recipe, parameter_groups(recipe, encoder.backbone, encoder.head, loss))
    state.seed_rank(recipe.training.seed, group)
    store = ItemStore(prepared.rows, on, recipe.data.size)
    return Trainer(
        recipe=recipe,
        out=folder,
        checkpoints=Checkpoints(folder / run_folder.CHECKPOINTS, prepared.origin, group),
        device=on,
        encoder=encoder,
        average=average,
        loss=loss,
        optimizer=steps,
        rate=LRSchedule(recipe, len(sampler), recipe.training.epochs),
        scaler=(torch.amp.GradScaler if group.size == 1 else parallel.Scaler)(
            on.type, enabled=recipe.training.precision == "fp16"
        ),
        sampler=sampler,
        loader=BatchLoader(store, train_part, sampler, recipe.training.workers, group),
        store=store,
        known=known if graded else known.long(),
        augmentation=registry.augmentation_of(recipe),
        held=prepared.held_out("val"),
        graded=graded,
        monitor=Monitor(classes, dim, recipe.training.on_collapse),
        journal=MetricsLog(folder / "metrics.jsonl", recipe.training.tensorboard, group.first),
        epochs=recipe.training.epochs,
        state=state.State(notes=[str(one.message) for one in heard]),
        group=group,
        plain=plain,
    )


def _finish(trainer: Trainer, prepared: Prepared, callback: Callback) -> Outcome:
    """Trains what is left, then: the best weights, the test, the files."""
    started = time.monotonic()
    fit(trainer, callback)
    recipe, state, held, group = trainer.recipe, trainer.state, prepared.held_out("test"), trainer.group
    assert state.best_file is not None
    with group.work("opening"):
        tensors, facts = trainer.checkpoints.open(state.best_file)
        encoder = trainer.encoder if trainer.plain is None else trainer.plain
        encoder.load_state_dict(tensors.section("encoder"))
    with final_test.explained(trainer, "the encoder"):
        group.on_rank0(
            "writing",
            lambda: models.save(final_test.unwrapped(encoder, prepared), trainer.out, prepared.preparation),
        )
    rows: dict[str, Tensor] = {}
    for name, made in final_test.contenders(trainer, encoder, prepared, held).items():
        callback({"event": "testing", "what": name})
        rows[name] = made()
    results = group.on_rank0("testing", lambda: final_test.results(trainer, prepared, held, rows, facts))
    callback({"event": "tested", "results": results, "seconds": time.monotonic() - started})
    return Outcome(
        trainer.out, recipe, results, trainer.journal.read(), prepared, held, rows["trained"], list(state.notes)
    )


def _chunk_note(trainer: Trainer) -> list[str]:
    chunk, batch = trainer.recipe.training.chunk, trainer.recipe.sampler["batch"]
    if chunk is None or chunk >= batch or not grad_cache.uses_batch_statistics(trainer.encoder):
        return []
    return [
        f"batch norm takes its statistics from chunks of {chunk}, not from the batch of {batch}; "
        f"encoder.freeze_norms=true makes the gradient that of the whole batch"
    ]


def _pairs_note(prepared: Prepared) -> list[str]:
    why = final_test.unverifiable(prepared.test_pairs())
    return [] if why is None else [f"the source's pairs are not verified: {why}"]


def _rank_notes(trainer: Trainer) -> list[str]:
    """What several ranks do otherwise than one process would."""
    size, options = trainer.group.size, trainer.recipe.training
    if size == 1:
        return []
    notes = [f"trained on {size} ranks, with the loss of all their items"]
    if options.graphs:
        notes.append("several ranks do not use CUDA graphs")
    if grad_cache.uses_batch_statistics(trainer.encoder) and not options.sync_norms:
        share = trainer.recipe.sampler["batch"] // size
        notes.append(
            f"batch norm takes its statistics from the {share} items of each rank; training.sync_norms=true takes "
            f"them from all, as one process would, and encoder.freeze_norms=true needs none"
        )
    return notes
