"""Vectors: embeddings that are already computed, with labels or targets, read from a file; and as items of a set.

`nearkin.data.vector_files` knows the formats. A split is `split` beside the embeddings: names (train, val, test, query,
gallery), or 0, 1, 2 for train, val, test where a file has numbers only.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin.core.labels import UNKNOWN
from nearkin.data import vector_files
from nearkin.data.folders import SPLIT_NAMES, numbered
from nearkin.data.groups import IGNORED, UNUSED
from nearkin.data.item_set import Items
from nearkin.data.levels import levels_of

__all__ = ["Vectors", "class_ids", "items", "level_columns", "read"]

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_CHUNK = 1 << 14  # rows checked at once

Labels = NDArray[Any]  # (N,), int64 or strings; (N, L) bool


class Vectors(NamedTuple):
    """Embeddings (N, D), finite floats; labels (N,) int64 or strings, (N, L) bool; targets (N,) or (N, K) float64.

    names (N,): of the rows, if the file has them. groups (N,) int64 or strings, where -1 and "" share theirs with none.
    levels: of each coarser level (N,) strings.
    """

    name: str
    embeddings: Tensor
    labels: Labels | None = None
    targets: Tensor | None = None
    names: list[str] | None = None
    groups: Labels | None = None
    levels: dict[str, NDArray[np.str_]] | None = None


def read(
    path: str | Path,
    labels: str | Path | None = None,
    targets: str | Path | None = None,
    groups: str | Path | None = None,
    *,
    multi_label: bool = False,
    group_column: str | None = None,
    levels: Sequence[str] = (),
) -> Vectors:
    """Reads embeddings with labels, targets and groups; separate files for these take precedence over those in `path`.

    group_column: the entry of `path` that has the groups; "none" ignores them.

    multi_label: also takes 0/1 rows of labels, (N, L). levels: names of entries that group the classes.
    """
    path = vector_files.present(Path(path), vector_files.READABLE, "embeddings")
    arrays = vector_files.contents(path)
    embeddings = _embeddings(path, arrays["embeddings"])
    rows = len(embeddings)
    names, numbers = arrays.get("labels"), arrays.get("targets")
    source = target_source = str(path)
    if labels is not None:
        names, source = vector_files.column_beside(Path(labels), "labels", rows), str(labels)
    if targets is not None:
        numbers, target_source = vector_files.column_beside(Path(targets), "targets", rows), str(targets)
    grouped, group_source = _group_entry(path, arrays, group_column), str(path)
    if groups is not None:
        grouped, group_source = vector_files.column_beside(Path(groups), "groups", rows), str(groups)
    return Vectors(
        str(path),
        embeddings,
        None if names is None else _labels(source, names, rows, multi_label),
        None if numbers is None else _targets(target_source, numbers, rows),
        _names(arrays["names"], rows) if "names" in arrays else None,
        None if grouped is None else _labels(group_source, grouped, rows, False, "groups"),
        level_columns(path, levels, rows) if levels else None,
    )


def _group_entry(path: Path, arrays: dict[str, Any], asked: str | None) -> Any:
    """The groups of a file: its own, or the entry asked for."""
    if asked == IGNORED and "groups" not in arrays:
        raise ValueError(f"{path}: group_column would have no effect: there are no groups to ignore")
    if asked in (None, IGNORED, UNUSED):
        return arrays.get("groups") if asked is None else None
    value = arrays[asked] if asked in arrays else vector_files.entry(path, asked)
    if value is None:
        raise ValueError(f'{path}: it has no entry "{asked}" for group_column')
    return value if isinstance(value, Tensor) else np.asarray(value)


def class_ids(*label_sets: Labels) -> tuple[list[Tensor], list[str]]:
    """Class ids (N,) of each set of labels, and the names of the classes.

    Strings become their position in the sorted list of all strings, the same in each set. Integers stay as they are;
    -1 is unknown, and not a class.
    """
    kinds = {"strings" if names.dtype.kind == "U" else "whole numbers" for names in label_sets}
    if len(kinds) > 1:
        raise ValueError("labels of embeddings and gallery must be of one kind, got strings and whole numbers")
    distinct = np.unique(np.concatenate(label_sets))
    if kinds == {"strings"}:
        ids = [torch.from_numpy(np.searchsorted(distinct, names).astype(np.int64)) for names in label_sets]
        return ids, [str(name) for name in distinct]
    return [torch.from_numpy(names) for names in label_sets], [str(name) for name in distinct if name != UNKNOWN]


def items(
    path: Path, name: str, labelled: bool = True, levels: Sequence[str] = (), group_column: str | None = None
) -> Items:
    """One item per row; rows whose class is unknown (-1) are left out and counted.

    levels: names of entries of the file, one value per row, that group the classes.
    """
    vectors = read(path, group_column=group_column)
    if vectors.labels is None and vectors.targets is None and labelled:
        raise ValueError(f"{name}: it must hold labels or targets beside its vectors, or there is nothing to learn")
    rows = len(vectors.embeddings)
    split = _split(path, name, rows)
    classes, labels = numbered([str(label) for label in vectors.labels]) if vectors.labels is not None else ([], None)
    if vectors.labels is not None and vectors.labels.dtype.kind == "i":
        numbers = np.unique(vectors.labels)  # integers keep their order: 2 before 10
        classes, labels = [str(label) for label in numbers], np.searchsorted(numbers, vectors.labels).astype(np.int64)
    every = Items(
        name=name,
        names=[f"row {i}" for i in range(rows)] if vectors.names is None else _unique_names(vectors.names),
        classes=classes,
        labels=labels,
        targets=None if vectors.targets is None else vectors.targets.double().numpy(),
        split=split,
        vectors=vectors.embeddings.float().numpy(),
        note=f"{name}: " + ("its own split" if split else "no split of its own"),
        groups=None if vectors.groups is None else _group_names(vectors.groups),
    )
    known = _without_unknown(every)
    if not levels:
        return known
    if known.labels is None:
        raise ValueError(f"{name}: levels need classes, and there are no labels")
    assert vectors.labels is not None
    kept = np.array([str(label) != str(UNKNOWN) for label in vectors.labels])
    columns = {level: column[kept].tolist() for level, column in level_columns(path, levels, rows).items()}
    return replace(known, levels=levels_of(name, known.classes, known.labels, columns))


def level_columns(path: Path, names: Sequence[str], rows: int) -> dict[str, NDArray[np.str_]]:
    """Entries of a file that group the classes of its rows, (N,) strings each."""
    columns = {}
    for name in names:
        value = vector_files.entry(path, name)
        if value is None:
            raise ValueError(f'{path}: no "{name}" in it for the level of that name')
        column = np.asarray(value)
        if column.ndim != 1 or column.dtype.kind not in "biuU":
            raise ValueError(f"{path}: {name} must be whole numbers or strings of shape (rows,), got {column.dtype}")
        _one_per_row(str(path), name, len(column), rows)
        columns[name] = column.astype(str)
    return columns


def _group_names(groups: Labels) -> list[str]:
    return ["" if groups.dtype.kind == "i" and group == UNKNOWN else str(group) for group in groups.tolist()]


def _unique_names(names: list[str]) -> list[str]:
    """The names of the rows; a duplicate or empty name gets its row number."""
    count = Counter(names)
    return [name if name and count[name] == 1 else f"{name} (row {i})".strip() for i, name in enumerate(names)]


def _without_unknown(items: Items) -> Items:
    unknown = str(UNKNOWN)
    if unknown not in items.classes or items.labels is None:
        return items
    place = items.classes.index(unknown)
    known = items.take(items.labels != place)
    assert known.labels is not None
    labels = known.labels - (known.labels > place)
    ignored = f"{len(items) - len(known)} rows whose class is unknown (-1)"
    classes = [kind for kind in items.classes if kind != unknown]
    return replace(known, classes=classes, labels=labels, ignored=[*items.ignored, ignored])


def _split(path: Path, name: str, rows: int) -> list[str] | None:
    value = vector_files.entry(path, "split")
    if value is None:
        return None
    marks = [str(mark) for mark in np.asarray(value).reshape(-1).tolist()]
    if len(marks) != rows:
        raise ValueError(f"{name}: split must have one entry per row of embeddings: {rows} rows, {len(marks)} entries")
    known = {**SPLIT_NAMES, "0": "train", "1": "val", "2": "test"}
    wrong = [mark for mark in marks if mark.lower() not in known]
    if wrong:
        allowed = ", ".join(dict.fromkeys(SPLIT_NAMES.values()))
        raise ValueError(f'{name}: split must be {allowed} (or 0, 1, 2), got "{wrong[0]}" in {len(wrong)} rows')
    return [known[mark.lower()] for mark in marks]


def _embeddings(path: Path, value: Any) -> Tensor:
    rows = _tensor(value)
    if rows is None or rows.dtype not in FLOATS:
        known = ", ".join(str(kind).removeprefix("torch.") for kind in FLOATS)
        raise ValueError(f"{path}: embeddings must be {known}, got {str(value.dtype).removeprefix('torch.')}")
    if rows.dim() != 2 or 0 in rows.shape:
        raise ValueError(f"{path}: embeddings must have shape (rows, dimensions), got {tuple(rows.shape)}")
    bad = [i for at in range(0, len(rows), _CHUNK) for i in _not_finite(rows[at : at + _CHUNK], at)]
    if bad:
        raise ValueError(f"{path}: embeddings must be finite, got NaN or Inf in {_row_list(bad, len(rows))}")
    return rows


def _labels(source: str, value: Any, rows: int, multi_label: bool, what: str = "labels") -> Labels:
    names = np.asarray(value.tolist() if isinstance(value, Tensor) else value)
    if names.dtype.kind == "S":
        names = np.char.decode(names, "utf-8", "replace")
    if names.dtype.kind not in "biuU":
        got = str(value.dtype).removeprefix("torch.")
        hint = "; real-valued ones are called targets" if names.dtype.kind == "f" and what == "labels" else ""
        raise ValueError(f"{source}: {what} must be whole numbers or strings, got {got}{hint}")
    if multi_label and names.ndim == 2 and names.dtype.kind in "biu" and ((names == 0) | (names == 1)).all():
        _one_per_row(source, "labels", len(names), rows)
        return names.astype(bool)
    if names.ndim != 1:
        rows_too = ", or be 0/1 rows (rows, labels)" if multi_label else ""
        raise ValueError(f"{source}: {what} must have shape (rows,){rows_too}, got {names.shape}")
    _one_per_row(source, what, len(names), rows)
    if names.dtype.kind == "u" and int(names.max()) > np.iinfo(np.int64).max:
        raise ValueError(f"{source}: {what} must be below 2**63, got {int(names.max())}")
    return names if names.dtype.kind == "U" else names.astype(np.int64)


def _targets(source: str, value: Any, rows: int) -> Tensor:
    numbers = _tensor(value)
    if numbers is None or numbers.dtype == torch.bool or numbers.is_complex():
        raise ValueError(f"{source}: targets must be numbers")
    if numbers.dim() == 2 and numbers.shape[1] == 1:
        numbers = numbers[:, 0]
    if numbers.dim() not in (1, 2) or 0 in numbers.shape[1:]:
        raise ValueError(f"{source}: targets must have shape (rows,) or (rows, K), got {tuple(numbers.shape)}")
    _one_per_row(source, "targets", len(numbers), rows)
    bad = _not_finite(numbers.double().reshape(rows, -1), 0)
    if bad:
        raise ValueError(f"{source}: targets must be finite, got NaN or Inf in {_row_list(bad, rows)}")
    return numbers.double()


def _names(value: Any, rows: int) -> list[str] | None:
    """The names of the rows; None if the array has another type or shape."""
    names = np.asarray(value)
    if names.dtype.kind == "S":
        names = np.char.decode(names, "utf-8", "replace")
    return [str(name) for name in names.tolist()] if names.dtype.kind in "Uiu" and names.shape == (rows,) else None


def _one_per_row(source: str, what: str, got: int, rows: int) -> None:
    if got != rows:
        raise ValueError(f"{source}: {what} must have one entry per row of embeddings: {rows} rows, {got} {what}")


def _tensor(value: Any) -> Tensor | None:
    """The array as a tensor, in the byte order of this machine; None if torch has no such type."""
    if isinstance(value, Tensor):
        return value
    if value.dtype.kind not in "biufc" or (value.dtype.itemsize > 8 and value.dtype.kind == "f"):
        return None
    return torch.from_numpy(np.require(value, value.dtype.newbyteorder("="), ["C", "W"]))


def _not_finite(rows: Tensor, first: int) -> list[int]:
    return [first + int(i) for i in (~rows.isfinite()).any(1).nonzero().flatten()]


def _row_list(places: list[int], rows: int) -> str:
    """How many rows, and the first three, counted from 0."""
    shown = ", ".join(str(place) for place in places[:3]) + (", …" if len(places) > 3 else "")
    return f"{len(places)} of {rows} rows ({'row' if len(places) == 1 else 'rows'} {shown}, counted from 0)"
