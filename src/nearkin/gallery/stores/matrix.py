"""Vectors in memory, searched exactly: 8-bit integers propose, float64 decides.

A row x and a query q, both of length 1, are rounded to integers times a scale. The product of the rounded vectors is
off by at most |x - x'| + |q - q'| · |x'|, which is known for every row. So every row that could be among the k nearest
is proposed, and the result is that of float64 over all rows, at a fraction of the memory traffic.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nearkin.evaluation.retrieval.knn import kth_floor
from nearkin.gallery.schema import Floats
from nearkin.gallery.stores.label_table import LabelTable, Project, RowSums

__all__ = ["BLOCK", "Ids", "Mask", "Matrix", "has_int8_matmul", "isin", "one_thread", "round_rows", "similarities"]

Ids = NDArray[np.int64]
Mask = NDArray[np.bool_]
FEW = 2048  # rows that are scored directly, without proposals
BLOCK = 8192  # rows scored at a time
ROUNDED = 512  # rows rounded at a time: they stay in the processor's cache
SPARE = 1024
SPARSE = 6  # where at most one row in so many is allowed, the allowed rows are gathered
LOWEST = 1e30  # minus this is below every product


def isin(codes: NDArray[np.int32], values: Sequence[int]) -> Mask:
    """np.isin for small codes; many times as fast for a single value, the usual case."""
    if len(values) == 1:
        return np.asarray(codes == values[0])
    table = np.zeros(max([*values, int(codes.max(initial=0))]) + 1, bool)
    table[list(values)] = True
    return np.asarray(table[codes])


def similarities(rows: Floats, query: Floats) -> NDArray[np.float64]:
    """Cosines of unit rows (n, D) and a unit query (D,) in float64; each row is summed by itself, so that its value
    does not depend on the other rows."""
    wide, starts = query.astype(np.float64), range(0, len(rows), BLOCK)
    parts = [(rows[start : start + BLOCK] * wide).sum(1) for start in starts]
    return np.clip(np.concatenate(parts), -1.0, 1.0) if parts else np.empty(0)


class Matrix:
    """Vectors with ids and labels, ids ascending. Removed rows stay as holes until `compact`. room: rows to come."""

    def __init__(self, dim: int, room: int = 0) -> None:
        self.dim, self.count, self.removed = dim, 0, 0
        self.rows: Floats = np.empty((0, dim), np.float32)
        self.ids: Ids = np.empty(0, np.int64)
        self.label_codes: NDArray[np.int32] = np.empty(0, np.int32)
        self.alive: Mask = np.empty(0, bool)
        self.labels: dict[str, int] = {}  # code by label
        self.label_counts: Ids = np.empty(0, np.int64)  # rows per code, with room for more codes
        self._row_sums: list[RowSums] = []  # of the model that is in use, and of the next one
        self._rounded = torch.empty(0, dim, dtype=torch.int8)
        self._scales = torch.empty(0)
        self._error = 0.0  # the largest |x - x'|
        self._int8 = has_int8_matmul()
        self._reserve(room)

    def append(self, ids: Sequence[int], labels: Sequence[str], rows: Floats) -> None:
        if not len(ids):
            return
        self._reserve(self.count + len(ids))
        new = slice(self.count, self.count + len(ids))
        self.rows[new], self.ids[new], self.alive[new] = rows, ids, True
        self.label_codes[new] = [self.labels.setdefault(label, len(self.labels)) for label in labels]
        self._count_labels(self.label_codes[new], 1)
        rounded, scales = self._rounded.numpy(), self._scales.numpy()
        for start in range(new.start, new.stop, ROUNDED):
            part = slice(start, min(start + ROUNDED, new.stop))
            rounded[part], scales[part], error = round_rows(self.rows[part])
            self._error = max(self._error, float(error.max()))
        self.count = new.stop

    def positions(self, ids: Ids) -> Ids:
        """Of these ids, without those that are not there."""
        at = np.searchsorted(self.ids[: self.count], ids)
        at, ids = at[at < self.count], ids[at < self.count]
        present: Ids = at[(self.ids[at] == ids) & self.alive[at]]
        return present

    def position(self, id: int) -> int | None:
        present = self.positions(np.array([id]))
        return int(present[0]) if len(present) else None

    def remove(self, id: int) -> None:
        if (at := self.position(id)) is not None:
            self.removed += 1
            self.alive[at] = False
            self._count_labels(self.label_codes[at : at + 1], -1)
            self._add_sums(at, -1)

    def relabel(self, id: int, label: str) -> None:
        if (at := self.position(id)) is not None:
            self._count_labels(self.label_codes[at : at + 1], -1)
            self._add_sums(at, -1)
            self.label_codes[at] = self.labels.setdefault(label, len(self.labels))
            self._count_labels(self.label_codes[at : at + 1], 1)
            self._add_sums(at, 1)

    def replace(self, at: int, vector: Floats) -> None:
        """Another vector (1, D) at a position."""
        rounded, scale, error = round_rows(vector)
        self._add_sums(at, -1)
        self.rows[at : at + 1] = vector
        self._add_sums(at, 1)
        self._rounded[at : at + 1], self._scales[at : at + 1] = torch.from_numpy(rounded), torch.from_numpy(scale)
        self._error = max(self._error, float(error.max()))

    def _count_labels(self, codes: NDArray[np.int32], by: int) -> None:
        if len(self.labels) > len(self.label_counts):
            self.label_counts = np.concatenate([self.label_counts, np.zeros(len(self.labels) + SPARE, np.int64)])
        unique, times = np.unique(codes, return_counts=True)
        self.label_counts[unique] += by * times

    def compact(self) -> None:
        """Closes the holes of removed rows."""
        alive = np.flatnonzero(self.alive[: self.count])
        for sums in self._row_sums:
            sums.done = int(np.searchsorted(alive, sums.done))
        for name in ("rows", "ids", "label_codes"):
            setattr(self, name, getattr(self, name)[alive])
        positions = torch.from_numpy(alive)
        self._rounded, self._scales = self._rounded[positions], self._scales[positions]
        self.alive, self.count, self.removed = np.ones(len(alive), bool), len(alive), 0

    def project_labels(self, key: str, project: Project, most: int | None = None) -> bool:
        """Adds up each label's rows in the coordinates of `project`, named by `key`, at most so many rows that are not
        in the sums yet; whether all are now."""
        sums = self._sums_of(key, project)
        until = self.count if most is None else min(self.count, sums.done + most)
        new = np.flatnonzero(self.alive[sums.done : until]) + sums.done
        for start in range(0, len(new), BLOCK):
            some = new[start : start + BLOCK]
            sums.add(self.rows[some], self.label_codes[some])
        sums.done = until
        return until == self.count

    def label_table(self, key: str, project: Project, since: int | None) -> LabelTable:
        """The sums of `project_labels`, of all rows; see `RowSums.table`."""
        if all(sums.key != key for sums in self._row_sums):
            since = None
        self.project_labels(key, project)
        return self._sums_of(key, project).table(self.labels, self.label_counts, since)

    def _sums_of(self, key: str, project: Project) -> RowSums:
        for sums in self._row_sums:
            if sums.key == key:
                return sums
        self._row_sums = [*self._row_sums[-1:], RowSums(key, project)]
        return self._row_sums[-1]

    def _add_sums(self, at: int, sign: int) -> None:
        for sums in self._row_sums:
            if at < sums.done:
                sums.add(self.rows[at : at + 1], self.label_codes[at : at + 1], sign)

    def has_label(self, labels: Sequence[str]) -> Mask:
        """Which positions have one of these labels."""
        return isin(self.label_codes[: self.count], [self.labels[label] for label in labels if label in self.labels])

    def counts(self) -> dict[str, int]:
        return {label: int(self.label_counts[code]) for label, code in self.labels.items() if self.label_counts[code]}

    def counts_of(self, labels: Sequence[str]) -> dict[str, int]:
        return {label: int(self.label_counts[self.labels[label]]) for label in labels if label in self.labels}

    def label_sizes(self) -> dict[int, int]:
        """How many labels have 1, 2, … rows."""
        labels = np.bincount(self.label_counts)
        return {int(rows): int(labels[rows]) for rows in np.flatnonzero(labels) if rows}

    def propose(self, query: Floats, k: int, allowed: Mask | None = None, start: int = 0) -> Ids:
        """Positions from `start` on that include the k nearest; `top_k` orders them."""
        if self.removed:
            alive = self.alive[start : self.count]
            allowed = alive if allowed is None else allowed & alive
        if allowed is not None and np.count_nonzero(allowed) <= FEW:
            return np.flatnonzero(allowed) + start
        if self.count - start <= FEW:
            return np.arange(start, self.count)
        return self._proposed(query, k, allowed, start) + start

    def top_k(self, query: Floats, k: int, positions: Ids) -> tuple[Ids, NDArray[np.float64]]:
        """Ids and similarities of the k nearest among these positions, nearest first, ties by id."""
        if len(positions) > 4 * k + FEW:  # float32 is accurate enough to exclude most of them
            near = self.rows[positions] @ query
            slack = 4 * self.dim * np.finfo(np.float32).eps
            positions = positions[near >= np.partition(near, len(near) - k)[len(near) - k] - slack]
        score = similarities(self.rows[positions], query)
        order = np.lexsort((self.ids[positions], -score))[:k]
        return self.ids[positions[order]], score[order]

    def _proposed(self, query: Floats, k: int, allowed: Mask | None, start: int) -> Ids:
        """Positions, counted from `start`."""
        size, gathered = self.count - start, None
        if allowed is not None and SPARSE * np.count_nonzero(allowed) <= size:  # fewer bytes to read than a mask saves
            gathered, allowed = np.flatnonzero(allowed), None
        with one_thread():
            near, slack = self._products(query, slice(start, self.count) if gathered is None else gathered + start)
            if allowed is not None:
                near.masked_fill_(torch.from_numpy(~allowed), -torch.inf)
            floor = max(float(kth_floor(near[None], k)) - 2 * slack, -LOWEST)  # what is not allowed stays below
            proposed = np.flatnonzero(near.numpy() >= floor)  # five times as fast as torch's nonzero
        return proposed if gathered is None else gathered[proposed]

    def _products(self, query: Floats, positions: slice | Ids) -> tuple[torch.Tensor, float]:
        """Cosines, all times one number, and by how much they can be off."""
        if not self._int8:
            return torch.from_numpy(self.rows[positions] @ query), 2 * self.dim * float(np.finfo(np.float32).eps)
        rows, scales = self._rounded, self._scales
        if isinstance(positions, slice):
            rows, scales = rows[positions], scales[positions]
        else:
            at = torch.from_numpy(positions)
            rows, scales = rows.index_select(0, at), scales.index_select(0, at)
        rounded, scale, error = round_rows(query[None])
        column = torch.from_numpy(rounded[0])[:, None].contiguous()
        near = torch._int_mm(rows, column).view(-1).float().mul_(scales)
        return near, (self._error + float(error[0]) * (1 + self._error) + 1e-5) / float(scale[0])

    def _reserve(self, size: int) -> None:
        """Room for so many rows; it grows by at least a quarter, so that appending stays cheap."""
        if size <= len(self.ids):
            return
        room = max(size, self.count + self.count // 4 + SPARE)
        for name in ("rows", "ids", "label_codes", "alive"):
            old = getattr(self, name)
            new = np.empty((room, *old.shape[1:]), old.dtype)
            new[: self.count] = old[: self.count]
            setattr(self, name, new)
        for name in ("_rounded", "_scales"):
            before = getattr(self, name)
            after = torch.empty((room, *before.shape[1:]), dtype=before.dtype)
            after[: self.count] = before[: self.count]
            setattr(self, name, after)


def round_rows(rows: Floats) -> tuple[NDArray[np.int8], Floats, NDArray[np.float64]]:
    """Integers (n, D), the scale of each row, and |x - x'| with a margin for float32's own error."""
    scale = np.maximum(np.abs(rows).max(1), np.float32(1e-30)) / np.float32(127)
    rounded = np.rint(rows / scale[:, None])
    error = np.sqrt(((rows - rounded * scale[:, None]).astype(np.float64) ** 2).sum(1)) + 1e-6
    return rounded.astype(np.int8), scale, error


def has_int8_matmul() -> bool:
    """Whether this torch multiplies 8-bit integers on the CPU, correctly."""
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
def one_thread() -> Iterator[None]:
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
