"""Hugging Face datasets: `hf-dataset:NAME`, or `hf-dataset:FOLDER` of one that `save_to_disk` wrote.

    hf-dataset:cifar100?label=fine_label        the column of classes, where several could be meant
    hf-dataset:birds/?image=photo&group=camera  … of pictures, of groups
    hf-dataset:food101?split=train              one split of it; config= names a configuration

Pictures stay in their Arrow files and are decoded by us: a broken one is reported like any other.
"""

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nearkin.core import checks
from nearkin.core.errors import NotAllowed
from nearkin.core.paths import homes, is_inside
from nearkin.data.byte_limit import check_bytes, read_file
from nearkin.data.file_tree import printable
from nearkin.data.folders import SPLIT_NAMES, numbered
from nearkin.data.groups import UNUSED
from nearkin.data.item_set import Items, Several
from nearkin.data.levels import levels_of

__all__ = ["PREFIX", "ArrowPictures", "read"]

PREFIX = "hf-dataset:"
OPTIONS = ("image", "label", "group", "split", "config")


class ArrowPictures:
    """The pictures of a column, as bytes; `rows` are rows of the dataset."""

    def __init__(
        self, dataset: Any, column: str, rows: NDArray[np.int64] | None = None, home: tuple[str, ...] | None = None
    ) -> None:
        """home: `homes` of the folders that the paths of pictures must stay within; None: they may be anywhere."""
        self.dataset, self.column, self.home = dataset, column, home
        self.rows = np.arange(len(dataset)) if rows is None else rows
        self._arrow = dataset.with_format("arrow")
        states = [os.stat(file["filename"]) for file in dataset.cache_files]
        self._stamp = f"{dataset._fingerprint}\n{[(state.st_size, state.st_mtime_ns) for state in states]}"

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, i: int) -> bytes:
        [cells] = self._arrow[int(self.rows[i])].column(self.column).chunks  # nothing is copied yet
        kept, path = cells.field("bytes"), cells.field("path")
        if cells.null_count or (kept.null_count and path.null_count):
            raise ValueError(f"row {self.rows[i]} has no picture")
        if kept.null_count:
            return read_file(self._inside(path[0].as_py(), f"row {self.rows[i]}"))
        check_bytes(importlib.import_module("pyarrow.compute").binary_length(kept)[0].as_py())
        content: bytes = kept[0].as_py()
        return content

    def _inside(self, path: str, row: str) -> str:
        if self.home is not None and not is_inside(path, self.home):
            raise NotAllowed(
                f"{row} names a file outside of the dataset's folder, {printable(path)}; --allow-outside "
                "(allow_outside=True) reads it"
            )
        return path

    def stamp(self, i: int) -> str:
        return f"{self._stamp}\n{self.column} {self.rows[i]}"

    def take(self, indices: ArrayLike) -> "ArrowPictures":
        return ArrowPictures(self.dataset, self.column, self.rows[checks.indices(indices, len(self))], self.home)


def read(
    source: str,
    labelled: bool = True,
    levels: Sequence[str] = (),
    group_column: str | None = None,
    allow_outside: bool = False,
) -> Items:
    """One item per row, of every split; levels and group_column are columns of it."""
    place, _, query = source.removeprefix(PREFIX).partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    if unknown := sorted(set(options) - set(OPTIONS)):
        raise ValueError(f'{source}: options must be {", ".join(OPTIONS)}, got "{unknown[0]}"')
    if group_column not in (None, UNUSED):
        options["group"] = str(group_column)
    parts = _opened(source, place, options)
    home = None if allow_outside else _home(source, place, parts)
    image, features = _image_column(source, parts, options), next(iter(parts.values())).features
    label = _label_column(source, features, image, options) if labelled or "label" in options else None
    group = None if group_column == UNUSED else options.get("group")
    for column in (group, *levels):
        _require(source, features, column)
    columns = {c: _texts(parts, c) for c in (label, group, *levels) if c is not None}
    names = [f"{part} row {i}" for part, rows in parts.items() for i in range(len(rows))]
    split = [SPLIT_NAMES[part] for part, rows in parts.items() for _ in range(len(rows))] if len(parts) > 1 else None
    classes, labels = ([], None) if label is None else numbered(columns[label])
    if levels and labels is None:
        raise ValueError(f"{source}: levels need classes, and no column of them was found")
    undecoded = [rows.cast_column(image, _library(source).Image(decode=False)) for rows in parts.values()]
    return Items(
        name=source,
        names=names,
        classes=classes,
        labels=labels,
        split=split,
        pictures=Several([ArrowPictures(rows, image, home=home) for rows in undecoded]),
        groups=None if group is None else columns[group],
        note=f"{source}: " + (f"its own split ({', '.join(sorted(set(split)))})" if split else "no split of its own"),
        ignored=[f'column "{c}", which is not used' for c in features if c not in (image, *columns)],
        levels=[] if labels is None else levels_of(source, classes, labels, {c: columns[c] for c in levels}),
    )


def _opened(source: str, place: str, options: dict[str, str]) -> dict[str, Any]:
    """The splits by name."""
    datasets = _library(source)
    if not place:
        raise ValueError(f"{source}: the name of a dataset or a folder must follow {PREFIX}")
    folder = Path(place).expanduser()
    try:
        if folder.is_dir():
            opened = datasets.load_from_disk(os.fspath(folder))
        else:
            opened = datasets.load_dataset(place, options.get("config"), trust_remote_code=False)
    except Exception as error:  # the library has many kinds of them
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise ValueError(f"{source}: it cannot be opened ({reason})") from None
    parts = dict(opened) if isinstance(opened, dict) else {"all": opened}
    if (wanted := options.get("split")) is not None:
        if wanted not in parts:
            raise ValueError(f'{source}: split must be {", ".join(parts)}, got "{wanted}"')
        parts = {wanted: parts[wanted]}
    unknown = [name for name in parts if name.lower() not in SPLIT_NAMES]
    if len(parts) > 1 and unknown:
        raise ValueError(
            f'{source}: its split "{unknown[0]}" is none of {", ".join(SPLIT_NAMES)}; '
            f"choose one: {PREFIX}{place}?split=…"
        )
    if not sum(map(len, parts.values())):
        raise ValueError(f"{source}: it has no rows")
    return {name.lower(): rows for name, rows in parts.items()}


def _home(source: str, place: str, parts: dict[str, Any]) -> tuple[str, ...]:
    """Where the files of a dataset may be: its folder, or the library's caches."""
    folder = Path(place).expanduser()
    if not folder.is_dir():
        config, hub = importlib.import_module("datasets").config, importlib.import_module("huggingface_hub").constants
        return homes(config.HF_DATASETS_CACHE, config.DOWNLOADED_DATASETS_PATH, hub.HF_HUB_CACHE)
    for file in (file["filename"] for rows in parts.values() for file in rows.cache_files):
        if not is_inside(file, homes(folder)):
            raise NotAllowed(
                f"{source}: its {printable(file)} is outside of it, which --allow-outside (allow_outside=True) allows"
            )
    return homes(folder)


def _library(source: str) -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError:
        raise ValueError(f"{source}: reading it needs the package datasets: pip install 'nearkin[datasets]'") from None


def _require(source: str, features: Any, column: str | None) -> None:
    if column is not None and column not in features:
        raise ValueError(f'{source}: it has no column "{column}"; its columns: {", ".join(features)}')


def _image_column(source: str, parts: dict[str, Any], options: dict[str, str]) -> str:
    features = next(iter(parts.values())).features
    if other := [name for name, rows in parts.items() if rows.features != features]:
        raise ValueError(f'{source}: its splits must have the same columns, "{other[0]}" has others')
    images = [name for name, kind in features.items() if isinstance(kind, _library(source).Image)]
    column = options.get("image")
    _require(source, features, column)
    if column is not None and column not in images:
        raise ValueError(f'{source}: column "{column}" holds no pictures (datasets.Image), got {features[column]}')
    if column is None and len(images) != 1:
        found = ", ".join(images) or f"none among {', '.join(features)}"
        raise ValueError(f"{source}: it must have one column of pictures (datasets.Image), found {found}; ?image=NAME")
    return column or images[0]


def _label_column(source: str, features: Any, image: str, options: dict[str, str]) -> str:
    column = options.get("label")
    _require(source, features, column)
    if column is not None:
        return column
    found = [name for name in ("label", "labels") if name in features]
    found = found or [name for name, kind in features.items() if isinstance(kind, _library(source).ClassLabel)]
    if len(found) != 1:
        others = ", ".join(name for name in features if name != image) or "no other column"
        raise ValueError(f"{source}: which column has the classes? name it: ?label=NAME; there are {others}")
    return found[0]


def _texts(parts: dict[str, Any], column: str) -> list[str]:
    """A column as text; of a ClassLabel its names."""
    texts: list[str] = []
    for rows in parts.values():
        kind, values = rows.features[column], rows.with_format(None)[column]
        names = getattr(kind, "names", None)
        missing = [i for i, value in enumerate(values) if value is None or (names and value == -1)]
        if missing:
            raise ValueError(f'column "{column}" has no value in {len(missing)} rows, the first {missing[0]}')
        texts += [printable(names[value] if names else str(value)) for value in values]
    return texts
