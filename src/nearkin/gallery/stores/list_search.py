"""Search in the index file: rows lie in lists around centroids; the lists nearest to a query are scored, and a bound
tells whether another list, or a row that was left out, could have changed the answer.

A row x of a list is at an angle to its centroid c between the list's smallest and largest one. So its angle to a query
is at least the distance of the query's angle to c from that range, and the list has no cosine above that of this angle.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearkin.gallery.schema import Floats
from nearkin.gallery.stores.filter_columns import Column
from nearkin.gallery.stores.matrix import Ids, Mask, one_thread
from nearkin.gallery.stores.stored_forms import EPSILON, Coded, Part, parse_form, take

__all__ = ["Candidates", "Lists"]

BLOCK = 65_536  # rows scored at a time
GATHERED = 8192  # rows of shorter lists are scored together: a call per list takes longer than its rows
SPARSE = 6  # where at most one row in so many is allowed, the allowed rows are gathered
FIRST = 8  # lists that an exact search scores before all others
LEAST = 32  # rows that a coarse form leaves, beyond k


class Candidates(NamedTuple):
    """Rows that may be among the nearest, the likeliest first. upper: what their cosines are at most. rest: what the
    cosine of any row that is not among them is at most."""

    positions: Ids
    upper: Floats
    rest: float


class _Best:
    """Keeps every row whose upper bound reaches the k-th largest lower bound so far."""

    def __init__(self, k: int, floor: float) -> None:
        self.k, self.floor = k, floor
        self._rows: list[tuple[Ids, Floats, Floats]] = []  # positions, near, upper
        self._lower = np.empty(0, np.float32)  # the k largest

    def add(self, positions: Ids, near: Floats, error: Floats) -> None:
        self._rows.append((positions, near, near + error))
        lower = np.concatenate([self._lower, near - error])
        if len(lower) > self.k:
            lower = np.partition(lower, len(lower) - self.k)[len(lower) - self.k :]
        self._lower = lower
        if len(lower) == self.k:
            self.floor = max(self.floor, float(lower.min()))

    def result(self, rest: float) -> Candidates:
        if not self._rows:
            return Candidates(np.empty(0, np.int64), np.empty(0, np.float32), rest)
        positions, near, upper = (np.concatenate(column) for column in zip(*self._rows, strict=True))
        reach = upper >= self.floor
        positions, near, upper = positions[reach], near[reach], upper[reach]
        order = np.argsort(-near, kind="stable")
        return Candidates(positions[order], upper[order], rest)


class Lists:
    """The rows of an index file. dead: positions that are not searched any more; None: all are."""

    def __init__(self, head: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        self.head, self.dim = dict(head), int(head["dim"])
        self.form = parse_form(head["stored"], self.dim)
        self.ids: Ids = arrays["ids"]
        self.starts: Ids = arrays["starts"]
        self.centroids: Floats = arrays["centroids"]
        self.angles: NDArray[np.float64] = arrays["angles"]  # (lists, 2): smallest and largest to the centroid
        self.sorted_ids: Ids = arrays["sorted_ids"]
        self.by_id: NDArray[np.int32] = arrays["by_id"]
        self.fine = Coded(self.form.fine, self.dim, _section(arrays, "fine"))
        self.coarse = Coded(self.form.coarse, self.form.dim, _section(arrays, "coarse")) if self.form.coarse else None
        self.label_text, self.label_offsets = arrays["labels/text"], arrays["labels/offsets"]
        self.columns = {key: Column(_section(arrays, f"column {i}")) for i, key in enumerate(head["keys"])}
        self.dead: Mask | None = None
        self.dead_count = 0
        self.probes, self.keep = int(head["probes"]), int(head["keep"])

    def __len__(self) -> int:
        return len(self.ids)

    # --- rows that are gone

    def positions(self, ids: Ids) -> Ids:
        """Of these ids, without those that are not there."""
        at = np.searchsorted(self.sorted_ids, ids)
        at, ids = at[at < len(self)], ids[at < len(self)]
        present: Ids = self.by_id[at[self.sorted_ids[at] == ids]].astype(np.int64)
        return present if self.dead is None else present[~self.dead[present]]

    def remove(self, ids: Ids) -> Ids:
        """Leaves these rows out of every search; returns the positions that were there."""
        positions = self.positions(np.unique(ids))
        if len(positions):
            if self.dead is None:
                self.dead = np.zeros(len(self), bool)
            self.dead[positions] = True
            self.dead_count += len(positions)
        return positions

    # --- searching

    def near_lists(self, query: Floats, count: int) -> tuple[Ids, Floats]:
        """The lists whose centroids are nearest, nearest first; and the largest cosine that a row of each list, in
        their order, can have."""
        near = np.einsum("nd,d->n", self.centroids, query)  # in a third of the time of a matrix product of BLAS
        slack = 4 * self.dim * EPSILON  # of a product in float32
        most, least = (np.arccos(np.clip(near + sign * slack, -1, 1).astype(np.float64)) for sign in (-1, 1))
        off = np.maximum(np.maximum(self.angles[:, 0] - most, least - self.angles[:, 1]), 0.0)
        bound = (np.cos(off) + 2e-6).astype(np.float32)
        bound[self.starts[1:] == self.starts[:-1]] = -np.inf
        nearest = np.argpartition(-near, count)[:count] if count < len(near) else np.arange(len(near))
        return nearest[np.argsort(-near[nearest], kind="stable")], bound

    def probe(self, query: Floats, k: int, floor: float, probes: int, keep: int) -> Candidates:
        """From the nearest lists; `rest` tells what the others may have."""
        inside, bound = self.near_lists(query, probes)
        bound[inside] = -np.inf
        rest = float(bound.max(initial=-np.inf))
        pieces = _merged(map(self._rows_of, np.sort(inside)))
        if self.coarse is None:
            return self._scored(self.fine, query, k, floor, pieces, rest)
        return self._coarse_first(self.coarse, query, k, floor, pieces, keep, rest)

    def _rows_of(self, number: Any) -> slice:
        return slice(int(self.starts[number]), int(self.starts[number + 1]))

    def exact(self, query: Floats, k: int, floor: float) -> Candidates:
        """Every list that can have a row among the nearest, the nearest first."""
        first, bound = self.near_lists(query, FIRST)

        def slices() -> Iterator[Part]:
            yield [self._rows_of(i) for i in first]  # scored before the others are chosen: they make the floor high
            reach = bound >= best.floor
            reach[first] = False
            yield from _merged(map(self._rows_of, np.flatnonzero(reach)))

        best = _Best(k, floor)
        return self._scored(self.fine, query, k, floor, slices(), -np.inf, best)

    def among(self, query: Floats, k: int, floor: float, positions: Ids) -> Candidates:
        """Every row of these positions, ascending."""
        if SPARSE * len(positions) <= len(self):
            parts = [positions[start : start + BLOCK] for start in range(0, len(positions), BLOCK)]
            return self._scored(self.fine, query, k, floor, iter(parts), -np.inf)
        allowed = np.zeros(len(self), bool)
        allowed[positions] = True
        return self._scored(self.fine, query, k, floor, iter([slice(0, len(self))]), -np.inf, allowed=allowed)

    def _scored(
        self,
        coded: Coded,
        query: Floats,
        k: int,
        floor: float,
        pieces: Iterator[Part],
        rest: float,
        best: _Best | None = None,
        allowed: Mask | None = None,
    ) -> Candidates:
        best, prepared = best or _Best(k, floor), coded.query(query)
        with one_thread():
            for part in _blocks(pieces):
                near, error = coded.scores(prepared, part)
                self._keep(best, part, near, error, allowed)
        return best.result(rest)

    def _keep(self, best: _Best, part: Part, near: Floats, error: Floats, allowed: Mask | None) -> None:
        reach = near + error >= best.floor
        if allowed is not None:
            reach &= take(allowed, part)
        if self.dead is not None:
            reach &= ~take(self.dead, part)
        local = np.flatnonzero(reach)
        if len(local):
            best.add(_positions(part, local), near[local], error[local])

    def _coarse_first(
        self, coarse: Coded, query: Floats, k: int, floor: float, pieces: Iterator[Part], keep: int, rest: float
    ) -> Candidates:
        """The rows that score best in the coarse form, scored again in the fine one."""
        prepared = coarse.query(query)
        all_near, all_upper, all_positions = [], [], []
        with one_thread():
            for part in _blocks(pieces):
                near, error = coarse.scores(prepared, part)
                alive = np.ones(len(near), bool) if self.dead is None else ~take(self.dead, part)
                all_near.append(near[alive])
                all_upper.append((near + error)[alive])
                all_positions.append(_positions(part, np.flatnonzero(alive)))
        if not all_near:
            return Candidates(np.empty(0, np.int64), np.empty(0, np.float32), rest)
        near, upper, positions = np.concatenate(all_near), np.concatenate(all_upper), np.concatenate(all_positions)
        count = max(keep, k + LEAST)
        if len(near) > count:
            order = np.argpartition(-near, count)
            rest = max(rest, float(upper[order[count:]].max()))
            positions = np.sort(positions[order[:count]])
        return self._scored(self.fine, query, k, floor, iter([positions]), rest)


def _section(arrays: Mapping[str, NDArray[Any]], name: str) -> dict[str, NDArray[Any]]:
    return {key[len(name) + 1 :]: array for key, array in arrays.items() if key.startswith(f"{name}/")}


def _merged(slices: Iterator[slice]) -> Iterator[slice]:
    """Slices that touch one another, as one."""
    last: slice | None = None
    for piece in slices:
        if last is not None and last.stop == piece.start:
            last = slice(last.start, piece.stop)
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last


def _blocks(pieces: Iterator[Part]) -> Iterator[Part]:
    """The same rows, so many at a time; a list of slices is scored before the next piece is asked for."""
    short: list[slice] = []
    count = 0  # of their rows
    for piece in pieces:
        if isinstance(piece, list):
            yield piece
        elif not isinstance(piece, slice):
            yield from (piece[start : start + BLOCK] for start in range(0, len(piece), BLOCK))
        elif piece.stop - piece.start >= GATHERED:
            yield from (slice(i, min(i + BLOCK, piece.stop)) for i in range(piece.start, piece.stop, BLOCK))
        else:
            short.append(piece)
            count += piece.stop - piece.start
            if count >= GATHERED:
                yield short
                short, count = [], 0
    if short:
        yield short


def _positions(part: Part, local: Ids) -> Ids:
    """In the file, of rows of a part."""
    if isinstance(part, np.ndarray):
        chosen: Ids = part[local]
        return chosen
    part = part if isinstance(part, list) else [part]
    ends = np.cumsum([one.stop - one.start for one in part])
    shifts: Ids = np.array([one.stop for one in part]) - ends
    return local + shifts[np.searchsorted(ends, local, "right")]
