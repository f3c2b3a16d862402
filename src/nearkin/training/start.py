"""`training.train`: what the command `nearkin train` does, as a function; the command calls it."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from nearkin.dist.group import ProcessGroup
from nearkin.dist.rendezvous import join
from nearkin.training import run
from nearkin.training.config import recipe as recipes
from nearkin.training.config.recipe import Recipe
from nearkin.training.loop import Callback
from nearkin.training.own_objects import PREFIX, Own, own_objects
from nearkin.training.run import Outcome

__all__ = ["resume", "train"]

Settings = Mapping[str, Any] | Iterable[str]


def train(
    source: Any = None,
    out: str | Path | None = None,
    callback: Callback | None = None,
    *,
    loss: str | nn.Module | None = None,
    encoder: str | nn.Module | None = None,
    recipe: Recipe | str | Path | None = None,
    settings: Settings = (),
    resume: str | Path | None = None,
    progress: bool = False,
    report: bool | None = None,
    group: ProcessGroup | None = None,
) -> Outcome:
    """Trains an encoder, measures it on classes it has never seen, and writes everything into a folder.

    source: a folder of class folders, a table, a file of vectors, a name that `nearkin sources` lists ("glyphs" unless
    given); a `torch.utils.data.Dataset` of (tensor, label); or a whole `Recipe`.
    out: a new folder, runs/SOURCE unless given. loss, encoder: names, or modules of your own (see docs/training.md).
    recipe: a TOML file, or a `Recipe`. settings: any keys of a recipe, before the recipe's own: {"training.epochs": 5},
    {"training": {"epochs": 5}}, or as the command line has them, ["training.epochs=5"].
    resume: goes on with this run instead; of a run with objects of your own, give these again, and nothing else.
    progress: bars and lines on stderr. callback: is told everything that happens, as dictionaries with an "event".
    report: writes report.html; by default, unless `source` is a `Recipe`.

    Under torchrun all processes train together; every one returns the outcome, and the first has written it. group:
    that of `dist.join`, where the caller has joined them already.
    """
    own = own_objects(source, encoder, loss)
    reports = report if report is not None else not isinstance(source, Recipe)
    with join() if group is None else nullcontext(group) as group, _shown(progress and group.first, callback) as told:
        if reports and group.first:
            _rehearse_report()
        if resume is not None:
            named = [source if own.dataset is None else None, encoder if own.encoder is None else None]
            named += [loss if own.loss is None else None, out, recipe, settings or None]
            if any(one is not None for one in named):
                raise ValueError("resume goes on with the recipe of the run; give no other choices beside it")
            told({"event": "folder", "folder": str(resume)})
            outcome = run.resume(resume, told, own, group)
        else:
            asked = _asked(source, own, loss, encoder, recipe, settings)
            again = group.restarted()
            folder = out or group.on_rank0("folder", lambda: str(_free_folder(asked, again)))
            told({"event": "folder", "folder": str(folder)})
            outcome = run.train(asked, folder, told, own, group)
        if reports:
            outcome = _reported(outcome, told, group)
    return outcome


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
) -> Outcome:
    """Goes on from the newest whole checkpoint of a run, to the same weights as if it had never stopped.

    On any number of processes: a checkpoint holds what each of them needs. dataset, encoder, loss: the objects of your
    own that the run began with, where it did.
    """
    more: dict[str, Any] = {"progress": progress, "report": report, "group": group}
    return train(dataset, callback=callback, encoder=encoder, loss=loss, resume=folder, **more)


def _asked(
    source: Any, own: Own, loss: Any, encoder: Any, recipe: Recipe | str | Path | None, settings: Settings
) -> Recipe:
    """One recipe of all that was said; what was said last counts."""
    if isinstance(source, Recipe):
        if recipe is not None:
            raise ValueError("source and recipe are both whole recipes; give one of them")
        source, recipe = None, source
    given: dict[str, Any] = {
        "data.source": own.name("dataset") or (None if source is None else str(source)),
        "encoder.name": own.name("encoder") or encoder,
        "loss.name": own.name("loss") or loss,
    }
    sets = [*_assignments({key: value for key, value in given.items() if value is not None}), *_assignments(settings)]
    if isinstance(recipe, Recipe):
        return recipes.read(None, sets, recipe.model_dump(exclude_unset=True)) if sets else recipe
    return recipes.read(recipe, sets)


def _assignments(settings: Settings) -> list[str]:
    """Settings as --set has them; text in quotes, so that a folder called 7 stays a name."""
    if isinstance(settings, str):
        raise TypeError(f"settings must be a dictionary, or a list of section.key=value, got {settings!r}")
    if not isinstance(settings, Mapping):
        return list(settings)
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= {f"{key}.{name}": part for name, part in value.items()} if isinstance(value, Mapping) else {key: value}
    found = []
    for key, value in flat.items():
        plain = "none" if value is None else str(value) if isinstance(value, Path) else value
        try:
            found.append(f"{key}={json.dumps(plain, ensure_ascii=False, allow_nan=False)}")
        except (TypeError, ValueError):
            raise TypeError(
                f"settings[{key!r}] must be a number, text, true or false, or a list, got {value!r}"
            ) from None
    return found


def _free_folder(recipe: Recipe, again: bool) -> Path:
    """runs/SOURCE or runs/SOURCE-LOSS, with a number behind it where that is taken; `again`: the last that is taken."""
    parts = [Path(recipe.data.source).stem, *([str(recipe.loss["name"])] if "name" in recipe.loss else [])]
    text = "-".join(part.removeprefix(PREFIX) for part in parts)
    stem = re.sub(r"[^\w-]+", "-", text).strip("-").lower() or "run"
    number, folder, taken = 1, Path("runs") / stem, None
    while folder.exists():
        number, taken = number + 1, folder
        folder = Path("runs") / f"{stem}-{number}"
    return taken if again and taken is not None else folder


def _rehearse_report() -> None:
    """What the page at the end needs is tried before anything is trained."""
    from nearkin import report

    report.rehearse()


def _reported(outcome: Outcome, callback: Callback, group: ProcessGroup) -> Outcome:
    from nearkin import report  # above this room: the one who asks for a whole run wants its page too

    callback({"event": "reporting"})
    return replace(outcome, report=Path(group.on_rank0("report", lambda: str(report.of_run(outcome)))))


@contextmanager
def _shown(on: bool, callback: Callback | None) -> Iterator[Callback]:
    """What happens goes to `callback`, and to the screen of the command line where that is wanted."""
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
