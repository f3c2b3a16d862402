"""The folder of a run: claimed by one process, with the recipe and the items it was started with."""

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nearkin.core import files
from nearkin.core.files import Lock
from nearkin.core.spreadsheet import csv_text
from nearkin.data.benchmarks import BENCHMARKS
from nearkin.training import exclusions
from nearkin.training.checkpoint.checkpoints import is_checkpoint_file
from nearkin.training.config import recipe as recipes
from nearkin.training.config.recipe import Recipe
from nearkin.training.metrics_log import MetricsLog
from nearkin.training.prepare import Prepared

__all__ = [
    "CHECKPOINTS",
    "LOCK",
    "PRETRAINING",
    "Claim",
    "check_not_started",
    "check_unchanged",
    "is_half_written",
    "recipe_of",
]
__all__ += ["same_launch", "start_of", "write"]

LOCK, CHECKPOINTS, PRETRAINING = ".lock", "checkpoints", "pretraining"
_FILES = ["recipe.toml", "data.json", "untrained.safetensors", "metrics.jsonl", "model.safetensors", "encoder.json"]
_FILES += ["results.json", "report.html", "near_duplicates.csv", "pretraining.jsonl", "tracking.json"]
_FILES += ["old_embeddings.safetensors"]
_HALF_WRITTEN = re.compile(files.TEMPORARY % "|".join(map(re.escape, _FILES)))


_NONE: Mapping[str, str] = {}


class Claim:
    """A folder that this process alone writes a run into, until `close`.

    new: it must be new or empty. It is created here, so that a folder that cannot be written is known before anything
    long starts; if it is still empty at the end, it is removed. A symbolic link in place of a file or folder of the run
    is refused: its target may belong to another.
    """

    def __init__(self, folder: Path, new: bool) -> None:
        self._created: list[Path] = []
        self._lock: Lock | None = None
        try:
            if new:
                if _used(folder) and not (folder / LOCK).exists():
                    raise _not_new(folder)
                self._make(folder)
            _refuse_links(folder)
            self._lock = Lock(folder / LOCK, f"{folder}: a training is running in it already")
            if new and _used(folder):
                raise _not_new(folder)
        except OSError as error:
            self.close()
            raise ValueError(f"{folder}: cannot be written ({error.strerror or error})") from None
        except ValueError:
            self.close()
            raise

    def _make(self, folder: Path) -> None:
        parents = [folder, *folder.absolute().parents]
        missing = [part for part in parents if not part.exists()]
        if (above := parents[len(missing)]).is_file():
            raise ValueError(f"{folder}: cannot be written ({above} is no folder)")
        for part in reversed(missing):
            part.mkdir(exist_ok=True)
            self._created.append(part)

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
        for part in reversed(self._created):
            with suppress(OSError):  # a run is in it
                part.rmdir()


def _used(folder: Path) -> bool:
    """Whether something other than a lock is there."""
    return folder.exists() and (not folder.is_dir() or any(path.name != LOCK for path in folder.iterdir()))


def _refuse_links(folder: Path) -> None:
    """The folder itself may be a link: then all of the run is elsewhere."""
    paths = [folder / name for name in (LOCK, CHECKPOINTS, PRETRAINING, "tensorboard", "mlflow.db", "wandb", *_FILES)]
    for checkpoints in (folder / CHECKPOINTS, folder / PRETRAINING):
        if checkpoints.is_dir() and not files.is_link(checkpoints):
            paths += [path for path in checkpoints.iterdir() if is_checkpoint_file(path.name)]
    for path in paths:
        if files.is_link(path):
            raise ValueError(
                f"{path}: is a link to {os.path.realpath(path)}; a run writes only into files of its own: put a copy "
                f"in the place of the link (the whole folder of a run may be a link)"
            )


def is_half_written(name: str) -> bool:
    """Whether a file name is that of a run's file, half written by a process that was killed."""
    return _HALF_WRITTEN.fullmatch(name) is not None


def _not_new(folder: Path) -> ValueError:
    state = "is not empty" if folder.is_dir() else "is a file"
    resume = f", or resume it with nearkin train --resume {folder}" if (folder / "recipe.toml").is_file() else ""
    return ValueError(f"{folder}: {state}; choose another --out{resume}")


def write(folder: Path, prepared: Prepared) -> None:
    """recipe.toml and data.json."""
    start: dict[str, Any] = {
        "fingerprint": prepared.fingerprint,
        "recipe": prepared.recipe.digest(),
        "keep_start": prepared.recipe.training.keep_start,
        "began_in": str(Path.cwd()),
    }
    if _launch() is not None:
        start["launch"] = _launch()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        prepared.own.write_initial(folder)
        files.write_text(folder / "recipe.toml", prepared.recipe.to_toml())
        files.write_json(folder / "data.json", prepared.report | start)
        pairs = prepared.report.get("near_duplicates", {}).get("shown")
        if pairs:
            files.write_text(folder / "near_duplicates.csv", _table(pairs))
    except OSError as error:
        raise ValueError(f"{folder}: cannot be written ({error.strerror})") from None


def _table(pairs: list[dict[str, Any]]) -> str:
    """The pairs as CSV; its `path` is what `--without` reads."""
    return csv_text([exclusions.COLUMNS, *([pair[key] for key in exclusions.COLUMNS] for pair in pairs)])


def same_launch(folder: Path) -> bool:
    """Whether the torchrun that started this process also started the run: it may bring new machines to it."""
    return _launch() is not None and start_of(folder).get("launch") == _launch()


def recipe_of(folder: Path, typed: Mapping[str, str] = _NONE) -> Recipe:
    """The recipe of a run. A relative path that does not exist is looked up where the run was started.

    typed: its sources, by "data.source" and "unlabelled.folder", that the user has typed again, as one that is code
    must be; others than the run has recorded are refused.
    """
    if not (folder / "recipe.toml").is_file():
        raise ValueError(f"{folder}: not a run: there is no recipe.toml in it; nearkin runs lists the runs")
    recipe = recipes.read(folder / "recipe.toml", stored=True)
    for key, text in typed.items():
        recorded = recipe.data.source if key == "data.source" else recipe.unlabelled.folder
        if text != recorded:
            raise ValueError(f"{folder}: its {key} is {recorded}, as the run has recorded it, and no other; got {text}")
    recipe = recipe.recorded(*typed.values())
    start = start_of(folder).get("began_in")
    for section, key in (("data", "source"), ("data", "root"), ("unlabelled", "folder"), ("compatible", "run")):
        path = getattr(getattr(recipe, section), key)
        if path is None or start is None or path in ("glyphs", *BENCHMARKS) or Path(path).exists():
            continue
        if (there := Path(start) / path).exists():
            recipe = recipe.with_(section, **{key: str(there)})
    return recipe


def check_unchanged(folder: Path, prepared: Prepared) -> None:
    """Raises where a run would resume with other items, or another recipe, than it started with."""
    start = start_of(folder)
    if start.get("fingerprint", prepared.fingerprint) != prepared.fingerprint:
        raise ValueError(f"{folder}: {prepared.items.name} has changed since the run started; start a new run")
    before, now = start.get("unlabelled"), prepared.report.get("unlabelled")
    if before is not None and now is not None and before["fingerprint"] != now["fingerprint"]:
        name = prepared.recipe.unlabelled.folder or prepared.items.name
        raise ValueError(
            f"{folder}: the pictures without labels of {name} have changed since the run started; start a new run"
        )
    current = prepared.recipe.digest()
    if start.get("recipe", current) != current:
        file = folder / "recipe.toml"
        raise ValueError(
            f"{file} has changed since the run started: undo the change, or start a new run with --recipe {file}"
        )


def check_not_started(folder: Path) -> None:
    """Raises where a run has no checkpoint left although it had passed its first one."""
    lines = MetricsLog(folder / "metrics.jsonl").read()
    reached = f"step {lines[-1]['step']}" if lines else None
    left = [name for name in ("metrics.jsonl", "model.safetensors", "results.json") if _has_content(folder / name)]
    left += [f"{CHECKPOINTS}/{path.name}" for path in (folder / CHECKPOINTS).glob("best-*") if path.is_file()]
    if left:
        raise ValueError(
            f"{folder}: all checkpoints of this run are missing, although {left[0]} shows that it had reached "
            f"{reached or 'a later step'}; restore them, or start a new run with --recipe {folder / 'recipe.toml'}"
        )


def _has_content(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def start_of(folder: Path) -> dict[str, Any]:
    """data.json; empty where a run ended before writing it."""
    path = folder / "data.json"
    if not path.is_file():
        return {}
    try:
        start = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: corrupt ({error}); start a new run") from None
    if not isinstance(start, dict):
        raise ValueError(f"{path}: corrupt (no JSON object); start a new run")
    return start


def _launch() -> str | None:
    """The id that torchrun gives to everything it starts, if any."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    return None if name in (None, "", "none") else name
