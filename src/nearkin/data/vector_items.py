"""Vectors as items: .npz, .safetensors or .parquet with labels or targets, and a split where there is one.

`nearkin.data.vectors` reads the numbers. A split is `split` beside them: names (train, val, test, query, gallery), or
0, 1, 2 for train, val, test where a file holds numbers only.
"""

import importlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from nearkin.core.relations import UNKNOWN
from nearkin.data import vectors
from nearkin.data.folders import SPLIT_NAMES, numbered
from nearkin.data.items import Items

__all__ = ["read"]


def read(path: Path, name: str, labelled: bool = True) -> Items:
    """Every row an item; rows whose class is unknown (-1) are left out and counted."""
    found = vectors.read(path)
    if found.labels is None and found.targets is None and labelled:
        raise ValueError(f"{name}: it must hold labels or targets beside its vectors, or there is nothing to learn")
    rows = len(found.embeddings)
    split = _split(path, name, rows)
    classes, labels = numbered([str(label) for label in found.labels]) if found.labels is not None else ([], None)
    if found.labels is not None and found.labels.dtype.kind == "i":
        whole = np.unique(found.labels)  # whole numbers keep their order: 2 before 10
        classes, labels = [str(label) for label in whole], np.searchsorted(whole, found.labels).astype(np.int64)
    items = Items(
        name=name,
        names=[f"row {i}" for i in range(rows)] if found.names is None else _told_apart(found.names),
        classes=classes,
        labels=labels,
        targets=None if found.targets is None else found.targets.double().numpy(),
        split=split,
        vectors=found.embeddings.float().numpy(),
        note=f"{name}: " + ("its own split" if split else "no split of its own"),
    )
    return _known(items)


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
    value = _stored(path)
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


def _stored(path: Path) -> Any:
    """The entry `split` of a file that `vectors.read` could read, or None."""
    ending = path.suffix.lower()
    if ending == ".npz":
        with np.load(path, allow_pickle=False) as archive:
            try:
                return archive["split"] if "split" in archive.files else None
            except ValueError:
                raise ValueError(
                    f"{path}: split holds Python objects, which are not read; store names as str"
                ) from None
    if ending == ".safetensors":
        from safetensors import safe_open

        with safe_open(str(path), framework="np") as file:
            return file.get_tensor("split") if "split" in file.keys() else None  # noqa: SIM118 - no mapping
    if ending == ".parquet":
        parquet = importlib.import_module("pyarrow.parquet")
        if "split" in parquet.read_schema(path).names:
            return parquet.read_table(path, columns=["split"]).column("split").to_pylist()
    return None
