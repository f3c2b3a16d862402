"""Vectors: embeddings that are already computed, with labels or targets, read from a file; and as items of a set.

`nearkin.data.vector_files` knows the formats. A split is `split` beside the embeddings: names (train, val, test, query,
gallery), or 0, 1, 2 for train, val, test where a file has numbers only.
"""

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin.core.labels import UNKNOWN
from nearkin.data import vector_files
from nearkin.data.folders import SPLIT_NAMES, numbered
from nearkin.data.item_set import Items

__all__ = ["Vectors", "class_ids", "items", "read"]

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_CHUNK = 1 << 14  # rows checked at once

Labels = NDArray[Any]  # (N,), int64 or strings; (N, L) bool


class Vectors(NamedTuple):
    """Embeddings (N, D), finite floats; labels (N,) int64 or strings, (N, L) bool; targets (N,) or (N, K) float64.

    names (N,): what each row is called, where the file says so.
    """

    name: str
    embeddings: Tensor
    labels: Labels | None = None
    targets: Tensor | None = None
    names: list[str] | None = None


def read(
    path: str | Path, labels: str | Path | None = None, targets: str | Path | None = None, *, several: bool = False
) -> Vectors:
    """Reads embeddings and what is said of them; `labels` and `targets` are files that go before those in `path`.

    several: 0/1 rows of labels, (N, L), are welcome too.
    """
    path = vector_files.present(Path(path), vector_files.READABLE, "embeddings")
    found = vector_files.contents(path)
    embeddings = _embeddings(path, found["embeddings"])
    rows = len(embeddings)
    names, numbers = found.get("labels"), found.get("targets")
    source = target_source = str(path)
    if labels is not None:
        names, source = vector_files.column_beside(Path(labels), "labels", rows), str(labels)
    if targets is not None:
        numbers, target_source = vector_files.column_beside(Path(targets), "targets", rows), str(targets)
    return Vectors(
        str(path),
        embeddings,
        None if names is None else _labels(source, names, rows, several),
        None if numbers is None else _targets(target_source, numbers, rows),
        _names(found["names"], rows) if "names" in found else None,
    )


def class_ids(*several: Labels) -> tuple[list[Tensor], list[str]]:
    """Class ids (N,) of each set of labels, and the names of the classes.

    Strings become their place in the sorted order of all the strings there are, the same in each set. Whole numbers
    stay as they are; -1 is unknown, and no class.
    """
    kinds = {"strings" if names.dtype.kind == "U" else "whole numbers" for names in several}
    if len(kinds) > 1:
        raise ValueError("labels of embeddings and gallery must be of one kind, got strings and whole numbers")
    everyone = np.unique(np.concatenate(several))
    if kinds == {"strings"}:
        ids = [torch.from_numpy(np.searchsorted(everyone, names).astype(np.int64)) for names in several]
        return ids, [str(name) for name in everyone]
    return [torch.from_numpy(names) for names in several], [str(name) for name in everyone if name != UNKNOWN]


def items(path: Path, name: str, labelled: bool = True) -> Items:
    """Every row an item; rows whose class is unknown (-1) are left out and counted."""
    found = read(path)
    if found.labels is None and found.targets is None and labelled:
        raise ValueError(f"{name}: it must hold labels or targets beside its vectors, or there is nothing to learn")
    rows = len(found.embeddings)
    split = _split(path, name, rows)
    classes, labels = numbered([str(label) for label in found.labels]) if found.labels is not None else ([], None)
    if found.labels is not None and found.labels.dtype.kind == "i":
        whole = np.unique(found.labels)  # whole numbers keep their order: 2 before 10
        classes, labels = [str(label) for label in whole], np.searchsorted(whole, found.labels).astype(np.int64)
    every = Items(
        name=name,
        names=[f"row {i}" for i in range(rows)] if found.names is None else _told_apart(found.names),
        classes=classes,
        labels=labels,
        targets=None if found.targets is None else found.targets.double().numpy(),
        split=split,
        vectors=found.embeddings.float().numpy(),
        note=f"{name}: " + ("its own split" if split else "no split of its own"),
    )
    return _known(every)


def _told_apart(names: list[str]) -> list[str]:
    """What the rows are called; one that is called as another, or not at all, says which row it is."""
    often = Counter(names)
    return [name if name and often[name] == 1 else f"{name} (row {i})".strip() for i, name in enumerate(names)]


def _known(items: Items) -> Items:
    unknown = str(UNKNOWN)
    if unknown not in items.classes or items.labels is None:
        return items
    place = items.classes.index(unknown)
    kept = items.take(items.labels != place)
    assert kept.labels is not None
    labels = kept.labels - (kept.labels > place)
    gone = f"{len(items) - len(kept)} rows whose class is unknown (-1)"
    return Items(
        **{
            key: getattr(kept, key) for key in Items.__dataclass_fields__ if key not in ("classes", "labels", "ignored")
        },
        classes=[kind for kind in items.classes if kind != unknown],
        labels=labels,
        ignored=[*items.ignored, gone],
    )


def _split(path: Path, name: str, rows: int) -> list[str] | None:
    value = vector_files.split_of(path)
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
        raise ValueError(f"{path}: embeddings must be finite, got NaN or Inf in {_some(bad, len(rows))}")
    return rows


def _labels(source: str, value: Any, rows: int, several: bool) -> Labels:
    names = np.asarray(value.tolist() if isinstance(value, Tensor) else value)
    if names.dtype.kind == "S":
        names = np.char.decode(names, "utf-8", "replace")
    if names.dtype.kind not in "biuU":
        got = str(value.dtype).removeprefix("torch.")
        way = "; real-valued ones are called targets" if names.dtype.kind == "f" else ""
        raise ValueError(f"{source}: labels must be whole numbers or strings, got {got}{way}")
    if several and names.ndim == 2 and names.dtype.kind in "biu" and ((names == 0) | (names == 1)).all():
        _one_a_row(source, "labels", len(names), rows)
        return names.astype(bool)
    if names.ndim != 1:
        rows_too = ", or be 0/1 rows (rows, labels)" if several else ""
        raise ValueError(f"{source}: labels must have shape (rows,){rows_too}, got {names.shape}")
    _one_a_row(source, "labels", len(names), rows)
    if names.dtype.kind == "u" and int(names.max()) > np.iinfo(np.int64).max:
        raise ValueError(f"{source}: labels must be below 2**63, got {int(names.max())}")
    return names if names.dtype.kind == "U" else names.astype(np.int64)


def _targets(source: str, value: Any, rows: int) -> Tensor:
    numbers = _tensor(value)
    if numbers is None or numbers.dtype == torch.bool or numbers.is_complex():
        raise ValueError(f"{source}: targets must be numbers")
    if numbers.dim() == 2 and numbers.shape[1] == 1:
        numbers = numbers[:, 0]
    if numbers.dim() not in (1, 2) or 0 in numbers.shape[1:]:
        raise ValueError(f"{source}: targets must have shape (rows,) or (rows, K), got {tuple(numbers.shape)}")
    _one_a_row(source, "targets", len(numbers), rows)
    bad = _not_finite(numbers.double().reshape(rows, -1), 0)
    if bad:
        raise ValueError(f"{source}: targets must be finite, got NaN or Inf in {_some(bad, rows)}")
    return numbers.double()


def _names(value: Any, rows: int) -> list[str] | None:
    """What the rows are called. Something else that somebody has stored under this key is nothing to us."""
    names = np.asarray(value)
    if names.dtype.kind == "S":
        names = np.char.decode(names, "utf-8", "replace")
    return [str(name) for name in names.tolist()] if names.dtype.kind in "Uiu" and names.shape == (rows,) else None


def _one_a_row(source: str, what: str, got: int, rows: int) -> None:
    if got != rows:
        raise ValueError(f"{source}: {what} must have one entry per row of embeddings: {rows} rows, {got} {what}")


def _tensor(value: Any) -> Tensor | None:
    """What torch can hold of an array, in the byte order of this machine."""
    if isinstance(value, Tensor):
        return value
    if value.dtype.kind not in "biufc" or (value.dtype.itemsize > 8 and value.dtype.kind == "f"):
        return None
    return torch.from_numpy(np.require(value, value.dtype.newbyteorder("="), ["C", "W"]))


def _not_finite(rows: Tensor, first: int) -> list[int]:
    return [first + int(i) for i in (~rows.isfinite()).any(1).nonzero().flatten()]


def _some(places: list[int], rows: int) -> str:
    """How many rows, and the first of them, counted from 0."""
    shown = ", ".join(str(place) for place in places[:3]) + (", …" if len(places) > 3 else "")
    return f"{len(places)} of {rows} rows ({'row' if len(places) == 1 else 'rows'} {shown}, counted from 0)"
