"""Rows in memory, searched exactly: whole numbers of 8 bits propose, float64 decides.

A row x and a query q, both of length 1, are rounded to whole numbers times a scale. The product of the rounded ones is
off by at most |x - x'| + |q - q'| · |x'|, which is known for every row. So each row that could be among the k nearest
is proposed, and the answer is that of float64 over all rows, at a fraction of the memory to be read.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nearkin.evaluation.retrieval.knn import kth_floor
from nearkin.gallery.schema import Floats

__all__ = ["Matrix", "among", "similarities"]

Ids = NDArray[np.int64]
Mask = NDArray[np.bool_]
FEW = 2048  # rows that are scored at once, without proposals
TOGETHER = 8192  # rows scored at a time
ROUNDED = 512  # rows rounded at a time: they stay in the processor's cache
SPARE = 1024
SPARSE = 6  # one row in so many may be found: they are gathered
LOWEST = 1e30  # minus this is below every product


def among(codes: NDArray[np.int32], wanted: Sequence[int]) -> Mask:
    """Which codes are wanted; many times as fast as np.isin for the one value that is mostly asked for."""
    if len(wanted) == 1:
        return np.asarray(codes == wanted[0])
    table = np.zeros(max([*wanted, int(codes.max(initial=0))]) + 1, bool)
    table[list(wanted)] = True
    return np.asarray(table[codes])


def similarities(rows: Floats, query: Floats) -> NDArray[np.float64]:
    """Cosines of rows (n, D) and a query (D,), of length 1 each: in float64, each row summed by itself, so that the
    number is the same whoever its neighbours are."""
    wide, starts = query.astype(np.float64), range(0, len(rows), TOGETHER)
    parts = [(rows[start : start + TOGETHER] * wide).sum(1) for start in starts]
    return np.clip(np.concatenate(parts), -1.0, 1.0) if parts else np.empty(0)


class Matrix:
    """Vectors with ids and labels; ids ascend. Removed rows stay as holes until there are many. room: rows to come."""

    def __init__(self, dim: int, room: int = 0) -> None:
        self.dim, self.count, self.dead = dim, 0, 0
        self.rows: Floats = np.empty((0, dim), np.float32)
        self.ids: Ids = np.empty(0, np.int64)
        self.codes: NDArray[np.int32] = np.empty(0, np.int32)
        self.alive: Mask = np.empty(0, bool)
        self.labels: dict[str, int] = {}
        self.tally: Ids = np.empty(0, np.int64)  # rows of each code, and room for more codes
        self._small = torch.empty(0, dim, dtype=torch.int8)
        self._scale = torch.empty(0)
        self._off = 0.0  # the largest |x - x'|
        self._whole = _multiplies_whole_numbers()
        self._reserve(room)

    def append(self, ids: Sequence[int], labels: Sequence[str], rows: Floats) -> None:
        if not len(ids):
            return
        self._reserve(self.count + len(ids))
        new = slice(self.count, self.count + len(ids))
        self.rows[new], self.ids[new], self.alive[new] = rows, ids, True
        self.codes[new] = [self.labels.setdefault(label, len(self.labels)) for label in labels]
        self._count(self.codes[new], 1)
        small_rows, scales = self._small.numpy(), self._scale.numpy()
        for start in range(new.start, new.stop, ROUNDED):
            part = slice(start, min(start + ROUNDED, new.stop))
            small_rows[part], scales[part], off = _rounded(self.rows[part])
            self._off = max(self._off, float(off.max()))
        self.count = new.stop

    def places(self, ids: Ids) -> Ids:
        """Where these ids stand, those that are gone left out."""
        at = np.searchsorted(self.ids[: self.count], ids)
        at, ids = at[at < self.count], ids[at < self.count]
        there: Ids = at[(self.ids[at] == ids) & self.alive[at]]
        return there

    def place(self, id: int) -> int | None:
        found = self.places(np.array([id]))
        return int(found[0]) if len(found) else None

    def drop(self, id: int) -> None:
        if (at := self.place(id)) is not None:
            self.dead += 1
            self.alive[at] = False
            self._count(self.codes[at : at + 1], -1)

    def relabel(self, id: int, label: str) -> None:
        if (at := self.place(id)) is not None:
            self._count(self.codes[at : at + 1], -1)
            self.codes[at] = self.labels.setdefault(label, len(self.labels))
            self._count(self.codes[at : at + 1], 1)

    def _count(self, codes: NDArray[np.int32], by: int) -> None:
        if len(self.labels) > len(self.tally):
            self.tally = np.concatenate([self.tally, np.zeros(len(self.labels) + SPARE, np.int64)])
        some, times = np.unique(codes, return_counts=True)
        self.tally[some] += by * times

    def close_holes(self) -> None:
        kept = np.flatnonzero(self.alive[: self.count])
        for name in ("rows", "ids", "codes"):
            setattr(self, name, getattr(self, name)[kept])
        places = torch.from_numpy(kept)
        self._small, self._scale = self._small[places], self._scale[places]
        self.alive, self.count, self.dead = np.ones(len(kept), bool), len(kept), 0

    def having(self, labels: Sequence[str]) -> Mask:
        """Which places have one of these labels."""
        return among(self.codes[: self.count], [self.labels[label] for label in labels if label in self.labels])

    def counts(self) -> dict[str, int]:
        return {label: int(self.tally[code]) for label, code in self.labels.items() if self.tally[code]}

    def search(self, query: Floats, k: int, allowed: Mask | None = None, start: int = 0) -> Ids:
        """Places that hold the k nearest from place `start` on, maybe with others; `best` orders them."""
        if self.dead:
            alive = self.alive[start : self.count]
            allowed = alive if allowed is None else allowed & alive
        if allowed is not None and np.count_nonzero(allowed) <= FEW:
            return np.flatnonzero(allowed) + start
        if self.count - start <= FEW:
            return np.arange(start, self.count)
        return self._proposed(query, k, allowed, start) + start

    def best(self, query: Floats, k: int, places: Ids) -> tuple[Ids, NDArray[np.float64]]:
        """Ids and similarities of the k nearest among these places, nearest first, equals by id."""
        if len(places) > 4 * k + FEW:  # float32 is near enough to leave most of them out
            near = self.rows[places] @ query
            slack = 4 * self.dim * np.finfo(np.float32).eps
            places = places[near >= np.partition(near, len(near) - k)[len(near) - k] - slack]
        score = similarities(self.rows[places], query)
        order = np.lexsort((self.ids[places], -score))[:k]
        return self.ids[places[order]], score[order]

    def _proposed(self, query: Floats, k: int, allowed: Mask | None, start: int) -> Ids:
        """Places, counted from `start`."""
        size, few = self.count - start, None
        if allowed is not None and SPARSE * np.count_nonzero(allowed) <= size:  # fewer bytes to read than a mask saves
            few, allowed = np.flatnonzero(allowed), None
        with _one_thread():
            near, slack = self._products(query, slice(start, self.count) if few is None else few + start)
            if allowed is not None:
                near.masked_fill_(torch.from_numpy(~allowed), -torch.inf)
            floor = max(float(kth_floor(near[None], k)) - 2 * slack, -LOWEST)  # what is not allowed stays below
            found = np.flatnonzero(near.numpy() >= floor)  # five times as fast as torch's nonzero
        return found if few is None else few[found]

    def _products(self, query: Floats, places: slice | Ids) -> tuple[torch.Tensor, float]:
        """Cosines, all times one number, and how far off they can be."""
        if not self._whole:
            return torch.from_numpy(self.rows[places] @ query), 2 * self.dim * float(np.finfo(np.float32).eps)
        rows, scales = self._small, self._scale
        if isinstance(places, slice):
            rows, scales = rows[places], scales[places]
        else:
            at = torch.from_numpy(places)
            rows, scales = rows.index_select(0, at), scales.index_select(0, at)
        small, scale, off = _rounded(query[None])
        column = torch.from_numpy(small[0])[:, None].contiguous()
        near = torch._int_mm(rows, column).view(-1).float().mul_(scales)
        return near, (self._off + float(off[0]) * (1 + self._off) + 1e-5) / float(scale[0])

    def _reserve(self, size: int) -> None:
        """Room for so many rows, a quarter more than asked where it grows, so that appending stays cheap."""
        if size <= len(self.ids):
            return
        room = max(size, self.count + self.count // 4 + SPARE)
        for name in ("rows", "ids", "codes", "alive"):
            old = getattr(self, name)
            new = np.empty((room, *old.shape[1:]), old.dtype)
            new[: self.count] = old[: self.count]
            setattr(self, name, new)
        for name in ("_small", "_scale"):
            before = getattr(self, name)
            after = torch.empty((room, *before.shape[1:]), dtype=before.dtype)
            after[: self.count] = before[: self.count]
            setattr(self, name, after)


def _rounded(rows: Floats) -> tuple[NDArray[np.int8], Floats, NDArray[np.float64]]:
    """Whole numbers (n, D), the scale of each row, and how far it was moved, with a hair for float32's own error."""
    scale = np.maximum(np.abs(rows).max(1), np.float32(1e-30)) / np.float32(127)
    small = np.rint(rows / scale[:, None])
    moved = np.sqrt(((rows - small * scale[:, None]).astype(np.float64) ** 2).sum(1)) + 1e-6
    return small.astype(np.int8), scale, moved


def _multiplies_whole_numbers() -> bool:
    """Whether this torch has the product of 8-bit numbers on the CPU, and it is right."""
    product: Any = getattr(torch, "_int_mm", None)
    if product is None:
        return False
    left = torch.arange(-60, 60, dtype=torch.int8).view(40, 3)
    right = torch.tensor([[127], [-127], [5]], dtype=torch.int8)
    try:
        return bool((product(left, right) == left.int() @ right.int()).all())
    except RuntimeError:
        return False


@contextmanager
def _one_thread() -> Iterator[None]:
    """One query is too little work to be shared: threads that wait for one another cost more on a busy machine."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
