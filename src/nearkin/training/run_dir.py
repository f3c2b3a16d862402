"""What the folder of a run says of its beginning: by which recipe, on which items, and where its paths start."""

import hashlib
import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from nearkin.core import files
from nearkin.core.files import Lock
from nearkin.data.benchmarks import BENCHMARKS
from nearkin.training.checkpoint import sharded
from nearkin.training.config import recipe as recipes
from nearkin.training.config.recipe import Recipe
from nearkin.training.metrics_log import Journal
from nearkin.training.prepare import Prepared

__all__ = ["CHECKPOINTS", "LOCK", "Claim", "beginning", "check", "check_unbegun", "digest", "is_half_written"]
__all__ += ["origin", "recipe_of", "same_launch", "write"]

LOCK, CHECKPOINTS = ".lock", "checkpoints"
_FILES = ["recipe.toml", "data.json", "untrained.safetensors", "metrics.jsonl", "model.safetensors", "encoder.json"]
_FILES += ["results.json", "report.html"]
_HALF_WRITTEN = re.compile(files.TEMPORARY % "|".join(map(re.escape, _FILES)))

# What may be changed by hand in recipe.toml before a run goes on: where things are, not what is learned.
_FREE = {"data": ("source", "root"), "training": ("device", "workers", "strategy"), "loss": ("shard",)}


class Claim:
    """A folder that this process alone writes a run into, until `close`.

    new: it must be new or empty. It is made here, so that one that cannot be written to is known before anything long
    begins; what is still empty at the end goes again. What a run writes must be its own: a symbolic link in place of a
    file or of a folder is refused, as what it leads to may be another's.
    """

    def __init__(self, folder: Path, new: bool) -> None:
        self._made: list[Path] = []
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
            self._made.append(part)

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
        for part in reversed(self._made):
            with suppress(OSError):  # a run is in it
                part.rmdir()


def _used(folder: Path) -> bool:
    """Whether something other than a lock is there."""
    return folder.exists() and (not folder.is_dir() or any(path.name != LOCK for path in folder.iterdir()))


def _refuse_links(folder: Path) -> None:
    """The folder itself may be a link: then all of the run is elsewhere."""
    inside = folder / CHECKPOINTS
    own = [folder / name for name in (LOCK, CHECKPOINTS, "tensorboard", *_FILES)]
    if inside.is_dir() and not files.is_link(inside):
        own += [path for path in inside.iterdir() if sharded.is_own_name(path.name)]
    for path in own:
        if files.is_link(path):
            raise ValueError(
                f"{path}: is a link to {os.path.realpath(path)}; a run writes only into files of its own: put a copy "
                f"in the place of the link (the whole folder of a run may be a link)"
            )


def is_half_written(name: str) -> bool:
    """Whether a file is named as one of a run's, half written by a process that was killed."""
    return _HALF_WRITTEN.fullmatch(name) is not None


def _not_new(folder: Path) -> ValueError:
    what = "is not empty" if folder.is_dir() else "is a file"
    more = f", or go on with nearkin train --resume {folder}" if (folder / "recipe.toml").is_file() else ""
    return ValueError(f"{folder}: {what}; choose another --out{more}")


def write(folder: Path, prepared: Prepared) -> None:
    """recipe.toml and data.json."""
    begun: dict[str, Any] = {
        "fingerprint": prepared.fingerprint,
        "recipe": digest(prepared.recipe),
        "began_in": str(Path.cwd()),
    }
    if _launch() is not None:
        begun["launch"] = _launch()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        prepared.own.write(folder)
        files.write_text(folder / "recipe.toml", recipes.written(prepared.recipe))
        files.write_json(folder / "data.json", prepared.report | begun)
    except OSError as error:
        raise ValueError(f"{folder}: cannot be written ({error.strerror})") from None


def same_launch(folder: Path) -> bool:
    """Whether the torchrun that has started this process has begun the run: it may bring new machines to it."""
    return _launch() is not None and beginning(folder).get("launch") == _launch()


def recipe_of(folder: Path) -> Recipe:
    """The recipe of a run. A relative path that is not here is looked for where the run began."""
    if not (folder / "recipe.toml").is_file():
        raise ValueError(f"{folder}: not a run: there is no recipe.toml in it")
    recipe = recipes.read(folder / "recipe.toml")
    start, found = beginning(folder).get("began_in"), {}
    for key, path in (("source", recipe.data.source), ("root", recipe.data.root)):
        if path is None or start is None or path in ("glyphs", *BENCHMARKS) or Path(path).exists():
            continue
        if (there := Path(start) / path).exists():
            found[key] = str(there)
    return recipe.with_("data", **found)


def check(folder: Path, prepared: Prepared) -> None:
    """Raises where a run would go on with other items, or by another recipe, than it began with."""
    begun = beginning(folder)
    if begun.get("fingerprint", prepared.fingerprint) != prepared.fingerprint:
        raise ValueError(f"{folder}: {prepared.items.name} is not what it was when the run began; train anew")
    ours = digest(prepared.recipe)
    if begun.get("recipe", ours) != ours:
        file = folder / "recipe.toml"
        raise ValueError(
            f"{file} is not what it was when the run began: undo the change, or train anew with --recipe {file}"
        )


def check_unbegun(folder: Path) -> None:
    """Raises where a run has no checkpoint left though it had come further than its first one."""
    lines = Journal(folder / "metrics.jsonl").read()
    reached = f"step {lines[-1]['step']}" if lines else None
    left = [name for name in ("metrics.jsonl", "model.safetensors", "results.json") if _has_content(folder / name)]
    left += [f"{CHECKPOINTS}/{path.name}" for path in (folder / CHECKPOINTS).glob("best-*") if path.is_file()]
    if left:
        raise ValueError(
            f"{folder}: all checkpoints of this run are gone, though {left[0]} shows that it had reached "
            f"{reached or 'a later step'}; put them back, or train anew with --recipe {folder / 'recipe.toml'}"
        )


def _has_content(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def origin(prepared: Prepared) -> dict[str, str]:
    """What a checkpoint says of its run."""
    return {"recipe": digest(prepared.recipe), "data": prepared.fingerprint}


def beginning(folder: Path) -> dict[str, Any]:
    """data.json; empty where a run ended before it was written."""
    path = folder / "data.json"
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: damaged ({error}); train anew") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: damaged (no JSON object); train anew")
    return found


def _launch() -> str | None:
    """What torchrun calls all that it starts, where that says anything."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    return None if name in (None, "", "none") else name


def digest(recipe: Recipe) -> str:
    """Of all that decides what is learned."""
    kept = {
        section: {key: value for key, value in part.items() if key not in _FREE.get(section, ())}
        for section, part in recipe.plain().items()
    }
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()
