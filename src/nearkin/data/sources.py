"""The source of items by one argument: a built-in name, a benchmark set, a folder or a file."""

import difflib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from nearkin.core import checks
from nearkin.data import file_tree, folders, glyphs, groups, hf_datasets, map_dataset, tables, vector_files, vectors
from nearkin.data import webdataset_shards as shards
from nearkin.data.benchmarks import BENCHMARKS
from nearkin.data.benchmarks import read as read_benchmark
from nearkin.data.folder_layout import AS_BEFORE
from nearkin.data.item_set import Arrays, Items
from nearkin.data.levels import check_names, levels_of, refuse

__all__ = ["AS_BEFORE", "PLAIN", "Reading", "Source", "load", "sources"]

FILES = tuple(dict.fromkeys((*tables.KINDS, *vector_files.READABLE, *file_tree.KINDS)))


class Reading(NamedTuple):
    """How a source is read: what folders are, where paths may lead, and which code may run."""

    split_folders: Sequence[str] | None = None
    leaf_classes: bool = False
    allow_outside: bool = False
    own_source: str | None = None  # the source that a run or gallery has recorded, typed again: it may be code

    def for_load(self) -> dict[str, Any]:
        """The arguments of `load`."""
        return {key: value for key, value in self._asdict().items() if key != "own_source"}


PLAIN = Reading()


class Source(NamedTuple):
    """A line of `sources()`: what to type, what it is, what it needs."""

    name: str
    line: str
    needs: str


def sources() -> list[Source]:
    """Everything `load` can read."""
    sets = [Source(name, facts.line, f"--root: {facts.layout}") for name, (facts, _) in BENCHMARKS.items()]
    return [
        Source(
            "glyphs", "letters and symbols in twelve typefaces, drawn here (the default)", "the extra nearkin[glyphs]"
        ),
        Source("FOLDER", "class folders, also under train, val, test", "FOLDER/heron/1.jpg (also in a .zip or .tar)"),
        Source("TABLE", "a .csv, .tsv or .parquet", "path,label[,split][,group], or path and numeric targets"),
        Source(
            "VECTORS",
            "an .npz, .safetensors or .parquet",
            "embeddings with labels or targets; split, groups if you like",
        ),
        Source("hf-dataset:NAME", "a Hugging Face dataset, by name or from a folder", "the extra nearkin[datasets]"),
        Source(
            "webdataset:FOLDER", "WebDataset shards, also train-{000..012}.tar", "1.jpg with 1.cls or 1.json in .tar"
        ),
        Source(
            "dataset:MODULE:NAME", "a map-style dataset of (picture, label), as torchvision's", "an importable module"
        ),
        *sets,
    ]


def load(
    source: str | Path = "glyphs",
    *,
    root: str | Path | None = None,
    seed: int = 0,
    partial: bool = False,
    labelled: bool = True,
    levels: Sequence[str] = (),
    group_pattern: str | None = None,
    group_column: str | None = None,
    split_folders: Sequence[str] | None = None,
    leaf_classes: bool = False,
    allow_outside: bool = False,
) -> Items:
    """The items of a source.

    root: the folder of a benchmark set, or where the paths of a table start. seed: of the drawings of `glyphs`.
    partial: read an incomplete benchmark set and say so in `note`; otherwise its counts must be the published ones.
    labelled: False also takes images without class folders, and tables and vectors without labels, as `embed` does.
    levels: names of coarser levels of the classes, the finest first: columns of a table, entries of a file of vectors,
    the folders around class folders from the inside out, "script" of `glyphs`, "alphabet" of `omniglot`.
    group_pattern: where the group of an item (burst, camera, writer) is in its name, as "*_c{group}_*". group_column:
    of a table or a file of vectors; by default "group" ("groups" beside vectors) if there is one; "none" ignores it.
    split_folders: of a folder or an archive, which folders are the parts of its split: ("train", "more/val"), or
    ("fold1=train", …); all else is left out. ("none",): none is a part. By default the first folders, if all are called
    so; a folder that may be read in two ways is refused. leaf_classes: a class is a folder that holds images, named by
    its path, and not the first folder. allow_outside: the paths of a table or a Hugging Face dataset may lead out of
    its folder (of a table, out of `root`).
    """
    checks.integer("seed", seed, 0)
    if group_pattern is not None and group_column is not None:
        raise ValueError("group_pattern and group_column exclude each other, got both")
    column = groups.UNUSED if group_pattern is not None else group_column
    items = _load(
        source, root, seed, partial, labelled, levels, column, Reading(split_folders, leaf_classes, allow_outside)
    )
    return items if group_pattern is None else groups.by_pattern(items, group_pattern)


def _load(
    source: str | Path,
    root: str | Path | None,
    seed: int,
    partial: bool,
    labelled: bool,
    levels: Sequence[str],
    group_column: str | None,
    reading: Reading,
) -> Items:
    name, base = os.fspath(source), None if root is None else Path(root).expanduser()
    check_names(name, levels)
    if (
        name == "glyphs"
        or name in BENCHMARKS
        or name.startswith((hf_datasets.PREFIX, shards.PREFIX, map_dataset.PREFIX))
    ):
        _refuse_layout(name, reading)
    if name.startswith((hf_datasets.PREFIX, shards.PREFIX)):
        _refuse_root(name, base)
        if name.startswith(shards.PREFIX):
            return shards.read(name, labelled, levels, group_column)
        return hf_datasets.read(name, labelled, levels, group_column, reading.allow_outside)
    table = Path(name).suffix.lower() in (*tables.KINDS, *vector_files.READABLE) and not Path(name).is_dir()
    if group_column not in (None, groups.UNUSED) and (name == "glyphs" or name in BENCHMARKS or not table):
        raise ValueError(
            f'{name}: group_column is for tables and files of vectors, got "{group_column}"; '
            "group_pattern finds groups in file names"
        )
    if name.startswith(map_dataset.PREFIX):
        return map_dataset.read(name, base, levels)
    if name == "glyphs":
        _refuse_root(name, base)
        return _with_levels(_glyphs(seed), levels)
    if name in BENCHMARKS:
        return _with_levels(read_benchmark(name, base, partial), levels)
    path = Path(name).expanduser()
    try:
        exists, folder = path.exists(), path.is_dir()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f'source "{name[:80]}" cannot be examined ({reason})') from None
    if not name or not exists:
        raise _unknown(name, path)
    if folder:
        _refuse_root(name, base)
        return folders.read(path, name, labelled, levels, reading.split_folders, reading.leaf_classes)
    return _file(path, name, base, labelled, levels, group_column, reading)


def _file(
    path: Path,
    name: str,
    root: Path | None,
    labelled: bool,
    levels: Sequence[str],
    group_column: str | None,
    reading: Reading,
) -> Items:
    ending = path.suffix.lower()
    if path.name.lower().endswith((*file_tree.KINDS, *file_tree.COMPRESSED)):
        _refuse_root(name, root)
        return folders.read(
            path, name, labelled, levels, reading.split_folders, reading.leaf_classes
        )  # refuses a compressed archive, with advice
    _refuse_layout(name, reading)
    if ending not in FILES:
        what = f'"{path.suffix}"' if ending else "no ending"
        raise ValueError(f"{name}: a source must be a folder or a file that ends in {', '.join(FILES)}, got {what}")
    if not os.access(path, os.R_OK):
        raise ValueError(f"{name}: its permissions do not allow reading it")
    if ending in vector_files.READABLE and not (ending == ".parquet" and _has_paths(path)):
        _refuse_root(name, root)
        return vectors.items(path, name, labelled, levels, group_column)
    return tables.read(path, name, root, labelled, levels, group_column, reading.allow_outside)


def _has_paths(path: Path) -> bool:
    """Whether a Parquet file lists pictures; True if it cannot be read, for the reader to say why."""
    try:
        pyarrow, parquet = vector_files.arrow(path, "reading")
    except ValueError:
        return True
    try:
        return "path" in {column.strip().lower() for column in parquet.read_schema(path).names}
    except (pyarrow.ArrowException, OSError):
        return True


def _glyphs(seed: int) -> Items:
    drawn = glyphs.load(seed)
    trained = set(drawn.split()[0].characters)
    per_class = len(drawn.labels) // len(drawn.characters)
    characters = [drawn.characters[label] for label in drawn.labels]
    return Items(
        name="glyphs",
        names=[f"U+{ord(c):04X} {c} #{i % per_class}" for i, c in enumerate(characters)],
        classes=list(drawn.characters),
        labels=drawn.labels,
        split=["train" if c in trained else "test" for c in characters],
        pictures=Arrays(drawn.images),
        note=f"glyphs: {len(drawn.characters)} characters, {per_class} drawings each; half to train, half to test",
    )


def _with_levels(items: Items, names: Sequence[str]) -> Items:
    """The levels that follow from the names of a set's classes: of glyphs their script, of Omniglot their alphabet."""
    known = {"glyphs": ("script", glyphs.script), "omniglot": ("alphabet", lambda kind: kind.split("/")[0])}
    name, coarser = known.get(items.name, ("", str))
    refuse(items.name, names, [name] if name else [])
    if not names or items.labels is None:
        return items
    column = [coarser(items.classes[label]) for label in items.labels]
    return replace(items, levels=levels_of(items.name, items.classes, items.labels, {name: column}))


def _refuse_layout(name: str, reading: Reading) -> None:
    given = [key for key in ("split_folders", "leaf_classes") if getattr(reading, key)]
    if given and reading.split_folders != AS_BEFORE:
        raise ValueError(f"{name}: {given[0]} is for folders and archives of pictures; leave it out")


def _refuse_root(name: str, root: Path | None) -> None:
    if root is not None:
        known = ", ".join(BENCHMARKS)
        raise ValueError(f"{name}: root is for benchmark sets ({known}) and tables, got {root}")


def _unknown(name: str, path: Path) -> ValueError:
    """The error for a missing path or an unknown name, with the nearest existing one."""
    looks_like_path = len(path.parts) > 1 or name.endswith(("/", os.sep)) or path.suffix.lower() in FILES
    parent = path.parent
    try:
        beside = sorted(entry for entry in os.listdir(parent) if not entry.startswith("."))
    except OSError:
        beside = []
    if looks_like_path:
        if not parent.is_dir():
            return ValueError(f"{name}: no such folder or file; {parent} is not a folder either")
        near = difflib.get_close_matches(path.name, beside, 1)
        hint = f'; did you mean "{parent / near[0]}"?' if near else ""
        return ValueError(f"{name}: no such folder or file{hint}")
    known = ["glyphs", *BENCHMARKS]
    near = difflib.get_close_matches(name, known, 1) or difflib.get_close_matches(name, beside, 1)
    hint = f'; did you mean "{near[0]}"?' if near else ";"
    return ValueError(f'unknown source "{name}"{hint} known: {", ".join(known)}; or give a folder or a file')
