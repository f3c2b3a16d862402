"""Checks of the arguments of samplers, and their error messages."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin.core import checks
from nearkin.core.random import Ints

Split = Literal["classes", "items"]
Labels = Sequence[int] | NDArray[Any] | Tensor
Targets = Sequence[float] | Sequence[Sequence[float]] | NDArray[Any] | Tensor
Embeddings = NDArray[Any] | Tensor
_ROWS = 16_384  # of lists of neighbours, checked at a time


def labels(values: Labels) -> Ints:
    """Class ids as int64, -1 for unknown."""
    array = _array(values)
    if array.ndim != 1:
        raise ValueError(f"labels must be one-dimensional, got shape {array.shape}")
    ids = _ids("labels", array, "unknown")
    if not (ids >= 0).any():
        raise ValueError(f"labels must hold at least one item of a known class, got {ids.size} items and no class")
    return ids


def groups(values: Labels, items: int) -> Ints:
    """Groups of the items as int64, -1 for an item that shares its group with none."""
    array = _array(values)
    if array.shape != (items,):
        raise ValueError(f"groups must have one entry per item: {items} items, got shape {array.shape}")
    return _ids("groups", array, "none")


def targets(values: Targets) -> NDArray[np.float64]:
    """Real-valued targets as float64 columns, (K, N)."""
    array = _array(values)
    if array.ndim not in (1, 2) or 0 in array.shape[1:]:
        raise ValueError(f"targets must have shape (items,) or (items, K), got {array.shape}")
    if array.dtype.kind not in "iuf":
        raise TypeError(f"targets must be real numbers, got {array.dtype}")
    rows = (array[:, None] if array.ndim == 1 else array).astype(np.float64)
    checks.finite("targets", torch.from_numpy(rows), "items")
    return np.ascontiguousarray(rows.T)


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
        found_by = f"evaluation.nearest_negatives(embeddings, labels, k={k})"
        raise ValueError(f"neighbours must be lists of {k} items, as {found_by} finds them, got None")
    array, shape = _array(lists), (len(of_labels), k)
    if array.shape != shape or array.dtype.kind not in "iu":
        raise ValueError(f"neighbours must be whole numbers of shape {shape}, got {array.dtype} {array.shape}")
    low, high = int(array.min()), int(array.max())
    if low < -1 or high >= len(array):
        worst = low if low < -1 else high
        raise ValueError(f"neighbours must be items in 0..{len(array) - 1}, or -1 for none, got {worst}")
    for start in range(0, len(array), _ROWS):
        part, own = array[start : start + _ROWS], of_labels[start : start + _ROWS, None]
        other = of_labels[part]
        wrong = ((part >= 0) & ((other == own) | (other < 0))).any(1)
        if wrong.any():
            row = start + int(wrong.argmax())
            raise ValueError(f"neighbours must be of known classes other than their item's, got others for item {row}")
    return array.astype(np.int32)


def warn(concerned: int, classes: int, words: str, rank: int) -> None:
    """Warns whoever makes the sampler, once over all ranks, if the words concern a class."""
    if concerned and rank == 0:
        warnings.warn(f"{concerned} of {classes} classes have {words}", stacklevel=3)


def _ids(name: str, array: NDArray[Any], absent: str) -> Ints:
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got {array.dtype}")
    ids = array.astype(np.int64)
    if ids.size and ids.min() < -1:
        raise ValueError(f"{name} must be >= 0, or -1 for {absent}, got {ids.min()}")
    return ids


def _array(values: Labels | Targets) -> NDArray[Any]:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
