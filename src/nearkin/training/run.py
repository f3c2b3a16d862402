"""A run: what `nearkin train` does, as a function. From a source to a folder with a trained, tested encoder.

recipe.toml  model.safetensors  encoder.json  metrics.jsonl  results.json  data.json  checkpoints/  report.html
"""

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nearkin import models
from nearkin.data.map_dataset import PREFIX as CODE
from nearkin.dist.group import ProcessGroup
from nearkin.dist.rendezvous import join
from nearkin.training import final_test, interpolation, pretraining, run_dir, step
from nearkin.training.checkpoint.checkpoints import Checkpoints
from nearkin.training.config import recipe as recipes
from nearkin.training.config.recipe import Recipe
from nearkin.training.config.registry import matryoshka_dims
from nearkin.training.config.unlabelled import without_labels
from nearkin.training.final_test import raw
from nearkin.training.loop import Callback, deterministic, fit
from nearkin.training.old_rows import old_rows
from nearkin.training.own_objects import PREFIX, Own, own_objects
from nearkin.training.prepare import Prepared, prepare
from nearkin.training.rerank_test import validation_rows
from nearkin.training.run_notes import chunk_note, old_note, pairs_note, rank_notes
from nearkin.training.start import choose_start, is_asked
from nearkin.training.tracking import Tracker, tracked
from nearkin.training.trainer import Trainer, assemble
from nearkin.training.validation import HeldOut
from nearkin.training.verdict import START

__all__ = ["Outcome", "assemble", "raw", "resume", "train"]

Settings = Mapping[str, Any] | Iterable[str]
_SHARED = ("items", "pictures without labels", "settings", "weights of the old encoder")  # by all ranks


@dataclass(frozen=True)
class Outcome:
    """The result of a run: its folder, and what a report shows of it."""

    folder: Path
    recipe: Recipe
    results: dict[str, Any]
    history: list[dict[str, Any]]
    prepared: Prepared
    test: HeldOut
    embeddings: Tensor  # of the test items, the gallery's after the queries'
    notes: list[str]
    report: Path | None = None  # the page, if it was written


def train(
    source: Any = None,
    out: str | Path | None = None,
    callback: Callback | None = None,
    *,
    loss: str | nn.Module | None = None,
    encoder: str | nn.Module | None = None,
    compatible_with: str | Path | None = None,
    recipe: Recipe | str | Path | None = None,
    settings: Settings = (),
    resume: str | Path | None = None,
    progress: bool = False,
    report: bool | None = None,
    group: ProcessGroup | None = None,
    allow_outside: bool = False,
) -> Outcome:
    """Trains an encoder, tests it on classes that it was not trained on (of fewer than 20 classes, on new items of
    each), and writes everything into a folder.

    source: a folder of class folders, a table, a file of vectors, a name that `nearkin sources` lists ("glyphs" by
    default); a `torch.utils.data.Dataset` of (tensor, label); or a complete `Recipe`.
    out: a new folder, by default runs/SOURCE. loss, encoder: names, or modules of your own (see docs/training.md).
    compatible_with: an old run, whose rows the new embeddings are to search (see docs/compatible.md).
    recipe: a TOML file, or a `Recipe`. settings: any keys of a recipe, which override the recipe's own:
    {"training.epochs": 5}, {"training": {"epochs": 5}}, or as on the command line, ["training.epochs=5"].
    resume: resumes this run instead; with objects of your own, pass these again, and nothing else but a source that is
    code ("dataset:…"), which no run can ask for.
    progress: bars and lines on stderr. callback: is called with every event, a dictionary with an "event".
    report: writes report.html; by default, unless `source` is a `Recipe`.
    allow_outside: paths of a table or dataset may lead out of its folder; no recipe and no run can say so itself.

    Under torchrun all processes train together; every one returns the outcome, and the first has written it. A run that
    torchrun has started again is resumed. group: that of `dist.join`, if the caller has joined already.
    """
    own = own_objects(source, encoder, loss)
    reports = report if report is not None else not isinstance(source, Recipe)
    with (
        join() if group is None else nullcontext(group) as group,
        _with_progress(progress and group.first, _of_rank(callback, group)) as callback,
    ):
        if reports and group.first:
            _rehearse_report()
        if resume is not None:
            named: list[Any] = [encoder if own.encoder is None else None, loss if own.loss is None else None]
            named += [out, compatible_with, recipe]
            typed = _typed_again(source if own.dataset is None else None, settings)
            if any(choice is not None for choice in named) or typed is None:
                raise ValueError("resume takes the recipe of the run; leave all other choices out")
            folder = Path(resume)
            callback({"event": "folder", "folder": str(folder)})
            full_recipe = run_dir.recipe_of(folder, typed)
            own.check(full_recipe, f"{folder}: ")
            full_recipe = full_recipe.allowing_outside(allow_outside)
            outcome = _resume(full_recipe, folder, callback, own, group)
        else:
            full_recipe = without_labels(_recipe_of(source, own, loss, encoder, recipe, settings, compatible_with))
            full_recipe = full_recipe.allowing_outside(allow_outside or full_recipe.allow_outside)
            restarted = group.restarted()
            folder = Path(out or group.on_rank0("folder", lambda: str(_free_folder(full_recipe, restarted))))
            callback({"event": "folder", "folder": str(folder)})
            if group.on_rank0("looking", lambda: _is_restart(folder, restarted)):
                outcome = _resume(full_recipe, folder, callback, own, group)
            else:
                outcome = _train(full_recipe, folder, callback, own, group)
        reports = reports and not outcome.recipe.unlabelled.only  # which has nothing to show
        return _with_report(outcome, callback, group) if reports else outcome


def resume(
    folder: str | Path,
    callback: Callback | None = None,
    *,
    dataset: Any = None,
    encoder: nn.Module | None = None,
    loss: nn.Module | None = None,
    progress: bool = False,
    report: bool = False,
    group: ProcessGroup | None = None,
    allow_outside: bool = False,
    source: str | None = None,
) -> Outcome:
    """Resumes a run from its newest intact checkpoint, to the same weights as if it had never stopped.

    On any number of processes. dataset, encoder, loss: the objects of your own that the run was started with, if any.
    allow_outside: as in `train`, once more. source: that of the run, once more, where it is code ("dataset:…").
    """
    if source is not None and dataset is not None:
        raise ValueError("dataset and source are both the source of the run; leave one of them out")
    options: dict[str, Any] = {"progress": progress, "report": report, "group": group, "allow_outside": allow_outside}
    return train(
        source if dataset is None else dataset, callback=callback, encoder=encoder, loss=loss, resume=folder, **options
    )


def _train(recipe: Recipe, folder: Path, callback: Callback, own: Own, group: ProcessGroup) -> Outcome:
    with _claimed(folder, group, new=True):  # and removed if anything is wrong with the recipe
        prepared = _prepare(recipe, callback, own, group)
        if recipe.pretrains or recipe.compatible.run is not None:
            group.on_rank0("starting", lambda: run_dir.write(folder, prepared))
        return _from_start(prepared, folder, callback, group)


def _from_start(prepared: Prepared, folder: Path, callback: Callback, group: ProcessGroup) -> Outcome:
    """The run from its pretraining, if it has one, or from its first step; a pretraining goes on where it was."""
    weights, notes = None, list[str]()
    if prepared.recipe.pretrains:
        notes = pretraining.pretrain(prepared, folder, callback, group)
        if prepared.recipe.unlabelled.only:
            return _finish_unlabelled(prepared, folder, callback, group, notes)
        weights = pretraining.pretrained_weights(folder, group)
    trainer = assemble(prepared, folder, group, weights, old_rows(prepared, folder, callback, group))
    trainer.state.notes += notes
    _start(trainer, prepared, callback)
    return _finish(trainer, prepared, callback)


def _resume(recipe: Recipe, folder: Path, callback: Callback, own: Own, group: ProcessGroup) -> Outcome:
    with _claimed(folder, group):
        start = group.on_rank0("looking", lambda: run_dir.start_of(folder))
        begun = group.on_rank0("looking", Checkpoints(folder / run_dir.CHECKPOINTS).any_written)
        prepared = _prepare(recipe, callback, own, group, start, pretrained=begun)
        prepared.own.read_initial(folder)
        run_dir.check_unchanged(folder, prepared)
        if not begun:
            if not recipe.unlabelled.only:  # which has no other checkpoints than those of its pretraining
                group.on_rank0("looking", lambda: run_dir.check_not_started(folder))
            if not recipe.pretrains:
                callback({"event": "note", "text": "this run ended before its first checkpoint, so it starts again"})
            return _from_start(prepared, folder, callback, group)
        trainer = assemble(prepared, folder, group, old=old_rows(prepared, folder, callback, group))
        for note in trainer.restore():
            trainer.state.notes.append(note)
            callback({"event": "note", "text": note})
        with deterministic(recipe.training.deterministic):
            trainer.replace_lost_best()
        state = trainer.state
        callback({"event": "resumed", "epoch": state.epoch + 1, "step": state.step, "finished": state.finished})
        return _finish(trainer, prepared, callback)


@contextmanager
def _claimed(folder: Path, group: ProcessGroup, new: bool = False) -> Iterator[None]:
    """One training at a time writes into a folder; the first of several ranks holds the claim."""
    claims: list[run_dir.Claim] = []
    group.on_rank0("claiming", lambda: claims.append(run_dir.Claim(folder, new)))
    try:
        yield
    finally:
        for claim in claims:
            claim.close()


def _is_restart(folder: Path, restarted: bool) -> bool:
    """Whether torchrun has started this training again, and it had written its folder."""
    started = (folder / "recipe.toml").is_file()
    if restarted and folder.is_dir() and not started:
        for path in folder.iterdir():
            if run_dir.is_half_written(path.name):
                path.unlink()
    return started and (restarted or run_dir.same_launch(folder))


def _prepare(
    recipe: Recipe,
    callback: Callback,
    own: Own,
    group: ProcessGroup,
    start: Mapping[str, Any] | None = None,
    pretrained: bool = False,
) -> Prepared:
    """One rank after the other where there is something to cache; all must find the same items."""
    prepared = group.first_on_machine(
        "preparing", lambda: prepare(recipe, callback, own, start, pretrained), rank0_first=True
    )
    unlabelled = prepared.report.get("unlabelled", {}).get("fingerprint")
    old = prepared.report.get("compatible", {}).get("encoder")
    first, *others = group.values([prepared.fingerprint, unlabelled, prepared.recipe.digest(), old])
    for rank, other in enumerate(others, 1):
        for what, ours, theirs in zip(_SHARED, first, other, strict=True):
            if ours != theirs:
                raise ValueError(
                    f"{recipe.data.source}: all ranks must find the same {what}, rank {rank} finds others than rank 0"
                )
    return prepared


def _start(trainer: Trainer, prepared: Prepared, callback: Callback) -> None:
    """Writes the folder, with all that a run needs to be resumed from its first step."""
    trainer.group.on_rank0("starting", lambda: run_dir.write(trainer.out, prepared))
    trainer.state.notes += [*prepared.notes, *pairs_note(prepared), *chunk_note(trainer), *rank_notes(trainer)]
    trainer.state.notes += [*step.graph_note(trainer), *old_note(trainer)]
    for note in trainer.state.notes:
        callback({"event": "note", "text": note})
    trainer.save()


def _finish(trainer: Trainer, prepared: Prepared, callback: Callback) -> Outcome:
    with tracked(trainer, callback) as callback:
        return _fit_and_test(trainer, prepared, callback)


def _fit_and_test(trainer: Trainer, prepared: Prepared, callback: Callback) -> Outcome:
    """Trains to the end; then loads the best weights, of a pretrained encoder interpolates them, tests and saves."""
    started = time.monotonic()
    fit(trainer, callback)
    state, held_out, group = trainer.state, prepared.held_out("test"), trainer.group
    assert state.best_file is not None
    with group.work("opening"):
        tensors, facts = trainer.checkpoints.open(state.best_file)
        encoder = models.merge_lora(trainer.encoder if trainer.unsharded is None else trainer.unsharded)
        encoder.load_state_dict(tensors.section("encoder"))
    plain = encoder if group.size == 1 else final_test.unwrapped(encoder, prepared)
    if trainer.recipe.finetune.interpolate:
        with deterministic(trainer.recipe.training.deterministic):
            plain, facts["interpolation"] = interpolation.choose(trainer, prepared, plain, callback)
        encoder = plain
    elif is_asked(trainer.recipe):
        with deterministic(trainer.recipe.training.deterministic):
            plain, facts["start"] = choose_start(trainer, prepared, plain)
        if facts["start"]["chosen"] == START:
            encoder, facts = plain, facts | {"epoch": 0, "step": 0, "val": facts["start"].pop("val")}
    with final_test.explained(trainer, "the encoder"):
        lengths = None if final_test.is_untrained(facts) else matryoshka_dims(trainer.recipe, plain.dim)
        if (old := prepared.report.get("compatible")) is not None and old["dim"] < plain.dim:
            lengths = tuple(sorted({plain.dim, *(lengths or ()), old["dim"]}, reverse=True))
        group.on_rank0(
            "writing", lambda: models.save(plain, trainer.out, prepared.preparation, lengths, compatible=old)
        )
    rows: dict[str, Tensor] = {}

    def embedding(done: int, total: int) -> None:
        callback({"event": "testing", "what": name, "done": done, "total": total})

    for name, embed in final_test.contenders(trainer, encoder, prepared, held_out, embedding).items():
        callback({"event": "testing", "what": name})
        rows[name] = embed()
    val = validation_rows(trainer, encoder, prepared)
    pretrained = None
    if trainer.recipe.pretrains:
        callback({"event": "testing", "what": "pretrained"})
        facts["pretraining"] = pretraining.summary(trainer.out, prepared)
        before = pretraining.pretrained_encoder(prepared, trainer.out, group).to(trainer.device)
        pretrained = final_test.embedded(trainer, before, held_out)
    results = group.on_rank0(
        "testing", lambda: final_test.results(trainer, prepared, held_out, rows, facts, pretrained, val)
    )
    callback({"event": "tested", "results": results, "seconds": time.monotonic() - started})
    history, notes = trainer.metrics_log.read(), list(state.notes)
    return Outcome(trainer.out, trainer.recipe, results, history, prepared, held_out, rows["trained"], notes)


def _finish_unlabelled(
    prepared: Prepared, folder: Path, callback: Callback, group: ProcessGroup, notes: list[str]
) -> Outcome:
    """The end of a run without a labelled source: the pretrained encoder is saved, and nothing can be tested."""
    encoder = pretraining.pretrained_encoder(prepared, folder, group)
    notes = [*prepared.notes, *notes]
    results = group.on_rank0("writing", lambda: pretraining.write_results(prepared, folder, encoder, notes))
    callback({"event": "tested", "results": results, "seconds": results["seconds"]})
    history = pretraining.log_of(folder).read()
    none = prepared.held_out("test")
    return Outcome(folder, prepared.recipe, results, history, prepared, none, torch.empty(0, encoder.dim), notes)


# --- what the caller chooses


def _recipe_of(
    source: Any,
    own: Own,
    loss: Any,
    encoder: Any,
    recipe: Recipe | str | Path | None,
    settings: Settings,
    compatible_with: str | Path | None,
) -> Recipe:
    """One recipe of all choices; settings override the recipe's own."""
    if isinstance(source, Recipe):
        if recipe is not None:
            raise ValueError("source and recipe are both complete recipes; leave one of them out")
        source, recipe = None, source
    choices: dict[str, Any] = {
        "data.source": own.name("dataset") or (None if source is None else str(source)),
        "encoder.name": own.name("encoder") or encoder,
        "loss.name": own.name("loss") or loss,
        "compatible.run": None if compatible_with is None else str(compatible_with),
    }
    sets = [*_assignments({key: value for key, value in choices.items() if value is not None}), *_assignments(settings)]
    if isinstance(recipe, Recipe):
        if not sets:
            return recipe
        changed = recipes.read(None, sets, recipe.model_dump(exclude_unset=True))
        return changed.allowing_outside(recipe.allow_outside)
    return recipes.read(recipe, sets)


def _typed_again(source: Any, settings: Settings) -> dict[str, str] | None:
    """The sources that are code and named beside a run that resumes, by their keys; None where more is chosen.

    They change nothing: they are the user's word that this code may be run.
    """
    sets = [*_assignments({} if source is None else {"data.source": str(source)}), *_assignments(settings)]
    recipe = recipes.read(None, sets)
    typed = {"data.source": recipe.data.source, "unlabelled.folder": str(recipe.unlabelled.folder)}
    keys = recipe.explicit_keys
    only_code = keys <= typed.keys() and all(typed[key].startswith(CODE) for key in keys)
    return {key: typed[key] for key in sorted(keys)} if only_code else None


def _assignments(settings: Settings) -> list[str]:
    """Settings as --set has them; text in quotes, so that a folder called 7 stays a name."""
    if isinstance(settings, str):
        raise TypeError(f"settings must be a dictionary, or a list of section.key=value, got {settings!r}")
    if not isinstance(settings, Mapping):
        return list(settings)
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= {f"{key}.{name}": part for name, part in value.items()} if isinstance(value, Mapping) else {key: value}
    assignments = []
    for key, value in flat.items():
        plain = "none" if value is None else str(value) if isinstance(value, Path) else value
        try:
            assignments.append(f"{key}={json.dumps(plain, ensure_ascii=False, allow_nan=False)}")
        except (TypeError, ValueError):
            raise TypeError(
                f"settings[{key!r}] must be a number, text, true or false, or a list, got {value!r}"
            ) from None
    return assignments


def _free_folder(recipe: Recipe, restarted: bool) -> Path:
    """runs/SOURCE or runs/SOURCE-LOSS, with a number if that exists; `restarted`: the last that exists."""
    parts = [Path(recipe.data.source).stem, *([str(recipe.loss["name"])] if "name" in recipe.loss else [])]
    text = "-".join(part.removeprefix(PREFIX) for part in parts)
    stem = re.sub(r"[^\w-]+", "-", text).strip("-").lower() or "run"
    number, folder, last = 1, Path("runs") / stem, None
    while folder.exists():
        number, last = number + 1, folder
        folder = Path("runs") / f"{stem}-{number}"
    return last if restarted and last is not None else folder


def _rehearse_report() -> None:
    """Tries what the page at the end needs, before anything is trained."""
    from nearkin import report

    report.rehearse()


def _with_report(outcome: Outcome, callback: Callback, group: ProcessGroup) -> Outcome:
    from nearkin import report  # above this room: a complete run has its page too

    callback({"event": "reporting"})
    return replace(outcome, report=Path(group.on_rank0("report", lambda: str(report.of_run(outcome)))))


def _of_rank(callback: Callback | None, group: ProcessGroup) -> Callback | None:
    """The caller's callback; a tracker writes in the first rank only."""
    return None if isinstance(callback, Tracker) and not group.first else callback


@contextmanager
def _with_progress(on: bool, callback: Callback | None) -> Iterator[Callback]:
    """The caller's callback, with the bars of the command line if they are wanted."""
    if not on:
        yield callback or (lambda _: None)
        return
    from nearkin.cli.screen import training_screen  # above this room, as the report is

    with training_screen(False) as screen:

        def both(event: dict[str, Any]) -> None:
            screen(event)
            if callback is not None:
                callback(event)

        yield both
