"""Checks of the arguments of samplers, and their error messages."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin.core import checks
from nearkin.core.random import Ints

__all__ = [
    "Embeddings",
    "Labels",
    "Split",
    "Targets",
    "at_most",
    "between_epochs",
    "class_rows",
    "classes_for_pairs",
    "finite",
    "groups",
    "labels",
    "negatives",
    "ranks",
    "ratio",
    "targets",
    "warn_repeated_items",
    "warn_single_groups",
    "wrong_state",
]

Split = Literal["classes", "items"]
Labels = Sequence[int] | NDArray[Any] | Tensor
Targets = Sequence[float] | Sequence[Sequence[float]] | NDArray[Any] | Tensor
Embeddings = NDArray[Any] | Tensor


def labels(values: Labels) -> Ints:
    """Class ids as int64, -1 for unknown."""
    array = _array(values)
    if array.ndim != 1:
        raise ValueError(f"labels must be one-dimensional, got shape {array.shape}")
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"labels must be integers, got {array.dtype}")
    array = array.astype(np.int64)
    if not (array >= 0).any():
        raise ValueError(f"labels must hold at least one item of a known class, got {array.size} items and no class")
    if array.min() < -1:
        raise ValueError(f"labels must be >= 0, or -1 for unknown, got {array.min()}")
    return array


def groups(values: Labels, items: int) -> Ints:
    """Groups of the items as int64, -1 for an item that shares its group with none."""
    array = _array(values)
    if array.ndim != 1 or len(array) != items:
        raise ValueError(f"groups must have one entry per item: {items} items, got shape {array.shape}")
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"groups must be integers, got {array.dtype}")
    array = array.astype(np.int64)
    if array.min() < -1:
        raise ValueError(f"groups must be >= 0, or -1 for none, got {array.min()}")
    return array


def targets(values: Targets) -> NDArray[np.float64]:
    """Real-valued targets as float64 columns, (K, N)."""
    array = _array(values)
    if array.ndim not in (1, 2) or 0 in array.shape[1:]:
        raise ValueError(f"targets must have shape (items,) or (items, K), got {array.shape}")
    if array.dtype.kind not in "iuf":
        raise TypeError(f"targets must be real numbers, got {array.dtype}")
    columns = np.ascontiguousarray(array.reshape(len(array), -1).T, dtype=np.float64)
    if not np.isfinite(columns).all():
        raise ValueError(f"targets must be finite, got NaN or Inf in {(~np.isfinite(columns)).any(0).sum()} items")
    return columns


def at_most(name: str, value: int, most: int, what: str) -> None:
    if value > most:
        raise ValueError(f"{name} must be at most {what}: {most}, got {value}")


def ratio(value: float) -> None:
    if not 0 < value <= 1:
        raise ValueError(f"ratio must be in (0, 1], got {value}")


def ranks(rank: int, world_size: int, split: str, shared: Mapping[str, tuple[str, int]]) -> None:
    """`shared`: for each possible split, the name and the number of what is divided evenly over the ranks."""
    checks.integer("world_size", world_size, 1)
    checks.integer("rank", rank, 0)
    if rank >= world_size:
        raise ValueError(f"rank must be below world_size: {world_size}, got {rank}")
    checks.one_of("split", split, shared)
    name, count = shared[split]
    if count % world_size:
        raise ValueError(f'{name} must be a multiple of world_size with split="{split}": {world_size}, got {count}')


def classes_for_pairs(counts: Ints) -> None:
    """Positive pairs need a class of two items, and negatives a second class."""
    if len(counts) < 2 or counts.max() < 2:
        received = f"{len(counts)} classes, the largest of {counts.max()} items"
        raise ValueError(f"labels must hold at least 2 classes, one of them with 2 items or more, got {received}")


def class_rows(name: str, values: Embeddings, rows: int, what: str) -> Tensor:
    """Embeddings, one row per class or item."""
    if isinstance(values, np.ndarray):
        values = torch.from_numpy(np.require(values, requirements=["C", "W"]))
    array = checks.rows(name, values).detach()
    if len(array) != rows:
        raise ValueError(f"{name} must have one row per {what}: {rows}, got {len(array)}")
    return array


def negatives(lists: Ints | Tensor | None, of_labels: Ints, k: int) -> NDArray[np.int32] | None:
    """Lists (N, k) of items of other classes, one per item, -1 where there are no more; None where k is 0."""
    if k == 0:
        if lists is not None:
            raise ValueError("neighbours must be left out of refresh where the sampler has neighbours=0, got lists")
        return None
    if lists is None:
        raise ValueError(
            f"neighbours must be lists of {k} items, as evaluation.nearest_negatives(embeddings, labels, k={k}) "
            f"finds them, got None"
        )
    array = _array(lists)
    shape = (len(of_labels), k)
    if array.shape != shape or array.dtype.kind not in "iu":
        raise ValueError(f"neighbours must be whole numbers of shape {shape}, got {array.dtype} {array.shape}")
    for start in range(0, len(array), 16_384):
        part, own = array[start : start + 16_384], of_labels[start : start + 16_384, None]
        if part.size and (part.min() < -1 or part.max() >= len(array)):
            worst = part.min() if part.min() < -1 else part.max()
            raise ValueError(f"neighbours must be items in 0..{len(array) - 1}, or -1 for none, got {worst}")
        other = of_labels[part]
        wrong = (part >= 0) & ((other == own) | (other < 0))
        if wrong.any():
            row = start + int(wrong.any(1).argmax())
            raise ValueError(f"neighbours must be of known classes other than their item's, got others for item {row}")
    return array.astype(np.int32)


def finite(name: str, values: Tensor, what: str = "classes") -> None:
    bad = ~values.isfinite().all(1)
    if bool(bad.any()):
        raise ValueError(f"{name} must be finite, got NaN or Inf in {int(bad.sum())} {what}")


def between_epochs(epoch: int, drawn: int, batches: int) -> None:
    if 0 < drawn < batches:
        raise ValueError(
            f"refresh must come between epochs, got it after batch {drawn} of {batches} of epoch {epoch}; "
            f"call set_epoch({epoch + 1}) first to leave this epoch, or set batches= for shorter epochs"
        )


def wrong_state(name: str) -> NoReturn:
    raise ValueError(
        f"state must come from a {name} with the same labels, seed and settings, got the state of a different one"
    )


def warn_repeated_items(counts: Ints, per_class: int, rank: int) -> None:
    small = int((counts < per_class).sum())
    if small and rank == 0:
        warnings.warn(
            f"{small} of {len(counts)} classes have fewer than {per_class} items; their items are repeated in a batch",
            stacklevel=3,
        )


def warn_single_groups(single: int, classes: int, rank: int) -> None:
    if single and rank == 0:
        warnings.warn(
            f"{single} of {classes} classes have items of one group only; their positives are of the same group",
            stacklevel=3,
        )


def _array(values: Labels | Targets) -> NDArray[Any]:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
