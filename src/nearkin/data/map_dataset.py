"""Any map-style dataset of (picture, label), as torchvision has them: `from_dataset`, or `dataset:MODULE:NAME`.

NAME is a dataset, or a function that makes one; it is called with the root where one is given. A dictionary
{"train": …, "test": …} of datasets is a split.
"""

import hashlib
import importlib
import inspect
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nearkin.core import checks
from nearkin.core.errors import NotAllowed
from nearkin.data.file_tree import printable
from nearkin.data.folders import SPLIT_NAMES
from nearkin.data.item_set import Items, Several

__all__ = ["PREFIX", "DatasetPictures", "check_typed", "from_dataset", "read"]

PREFIX = "dataset:"


class DatasetPictures:
    """The first of each dataset[i]: a Pillow image, pixels (H, W) or (H, W, C), or a tensor (C, H, W)."""

    def __init__(self, dataset: Any, rows: NDArray[np.int64] | None = None) -> None:
        self.dataset = dataset
        self.rows = np.arange(len(dataset)) if rows is None else rows

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, i: int) -> NDArray[np.uint8]:
        row = int(self.rows[i])
        try:
            return _pixels(self.dataset[row][0])
        except ValueError:
            raise
        except Exception as error:  # whatever the user's code raises
            raise ValueError(f"dataset[{row}] failed ({type(error).__name__}: {str(error)[:100]})") from None

    def stamp(self, i: int) -> str:
        """Of a dataset that lists its files, as torchvision's folders do, the file's; else the pixels'."""
        files = getattr(self.dataset, "samples", None) or getattr(self.dataset, "imgs", None)
        path = files[int(self.rows[i])][0] if files else None
        if isinstance(path, str | Path) and os.path.isfile(path):
            state = os.stat(path)
            return f"{os.path.abspath(path)}\n{state.st_size}\n{state.st_mtime_ns}"
        pixels = np.ascontiguousarray(self.read(i))
        return f"{hashlib.sha256(pixels.tobytes()).hexdigest()} {pixels.shape}"

    def take(self, indices: ArrayLike) -> "DatasetPictures":
        return DatasetPictures(self.dataset, self.rows[checks.indices(indices, len(self))])


def _pixels(picture: Any) -> NDArray[np.uint8]:
    if hasattr(picture, "detach"):  # a tensor: channels first
        values = picture.detach().cpu().numpy()
        values = values.transpose(1, 2, 0) if values.ndim == 3 else values
        if values.dtype != np.uint8:
            if not (values.min() >= 0 and values.max() <= 1):
                raise ValueError("a picture as a float tensor must be within 0 to 1; leave Normalize to the encoder")
            values = np.rint(values * 255).astype(np.uint8)
    else:
        if getattr(picture, "mode", "RGB") not in ("L", "RGB"):
            picture = picture.convert("RGB")
        values = np.asarray(picture)
    if values.ndim == 3 and values.shape[2] == 1:
        values = values[..., 0]
    if values.dtype != np.uint8 or not (values.ndim == 2 or (values.ndim == 3 and values.shape[2] == 3)):
        raise ValueError(f"a picture must be uint8 (H, W) or (H, W, 3), got {values.dtype} {values.shape}")
    return np.ascontiguousarray(values)


def from_dataset(dataset: Any, name: str = "dataset") -> Items:
    """The items of a map-style dataset of (picture, label), or of a dictionary of them by part.

    Labels are `dataset.targets` or `dataset.labels`, where it has them, else the second of each dataset[i], read once.
    `dataset.classes` names them. Without a transform that draws at random: each picture is read once and cached.
    """
    parts = dict(dataset) if isinstance(dataset, Mapping) else {"all": dataset}
    for part, rows in parts.items():
        if not (hasattr(rows, "__getitem__") and hasattr(rows, "__len__")):
            raise ValueError(f"{name}: it must have len() and [i], as a map-style dataset, got {type(rows).__name__}")
        if len(parts) > 1 and part not in SPLIT_NAMES:
            raise ValueError(f'{name}: parts must be {", ".join(SPLIT_NAMES)}, got "{part}"')
        if len(rows) == 0:
            raise ValueError(f"{name}: it has no items" + (f' in "{part}"' if len(parts) > 1 else ""))
    values = np.concatenate([_labels(name, rows) for rows in parts.values()])
    ids, labels = np.unique(values, return_inverse=True)
    known = getattr(next(iter(parts.values())), "classes", None)
    if known is not None and ids.dtype.kind in "iu" and ids[0] >= 0 and ids[-1] < len(known):
        classes = [printable(str(known[i])) for i in ids]
    else:
        classes = [printable(str(i)) for i in ids]
    split = [SPLIT_NAMES[part] for part, rows in parts.items() for _ in range(len(rows))] if len(parts) > 1 else None
    return Items(
        name=name,
        names=[f"{part} item {i}" for part, rows in parts.items() for i in range(len(rows))],
        classes=classes,
        labels=labels.astype(np.int64),
        split=split,
        pictures=Several([DatasetPictures(rows) for rows in parts.values()]),
        note=f"{name}: " + (f"its own split ({', '.join(sorted(set(split)))})" if split else "no split of its own"),
    )


def _labels(name: str, dataset: Any) -> NDArray[Any]:
    values = next((getattr(dataset, key) for key in ("targets", "labels") if hasattr(dataset, key)), None)
    if values is None or len(values) != len(dataset):
        try:
            values = [dataset[i][1] for i in range(len(dataset))]
        except (TypeError, IndexError):
            raise ValueError(f"{name}: dataset[i] must be (picture, label), got {type(dataset[0]).__name__}") from None
    labels = np.asarray(values.cpu() if hasattr(values, "cpu") else [_number(value) for value in values])
    if labels.ndim != 1 or labels.dtype.kind not in "iuUS":
        raise ValueError(f"{name}: a label must be a whole number or text, got {labels.dtype} {labels.shape}")
    return labels


def _number(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def check_typed(recorded: str, typed: Iterable[str | None], where: str, option: str = "--source") -> None:
    """Refuses a source that is code and comes from a file, unless the user has typed the very text."""
    if recorded.startswith(PREFIX) and recorded not in typed:
        raise NotAllowed(
            f"{where}: its source {printable(recorded)} is code that would be imported and run, which no file can ask "
            f"for; if you trust it, type it too: {option} {printable(recorded)}"
        )


def read(source: str, root: Path | None = None, levels: Sequence[str] = ()) -> Items:
    """The dataset that a source names. The module is imported: name only code you trust."""
    if levels:
        raise ValueError(f"{source}: levels are for folders, tables and vectors, got {', '.join(levels)}")
    module, _, attribute = source.removeprefix(PREFIX).partition(":")
    if not module or not attribute:
        raise ValueError(f"{source}: it must be {PREFIX}MODULE:NAME, as {PREFIX}mypackage.data:birds")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{source}: it cannot be imported ({error})") from None
    made = inspect.isclass(found) or inspect.isfunction(found) or inspect.ismethod(found)
    if not made and root is not None:
        raise ValueError(f"{source}: root is for a function that makes the dataset, got {root}")
    try:
        dataset = (found() if root is None else found(root)) if made else found
    except Exception as error:  # whatever the user's code raises
        raise ValueError(f"{source}: {attribute} failed ({type(error).__name__}: {str(error)[:200]})") from None
    return from_dataset(dataset, source)
