"""k-reciprocal re-ranking (arXiv:1701.08398) from N × k1 neighbour lists: no matrix of all pairs is ever in memory.

N(i, k): item i itself and its k nearest. R(i, k) = {j in N(i, k): i in N(j, k)}. R*(i) = R(i, k1) and R(j, k1/2) for
each j in R(i, k1) that has more than 2/3 of R(j, k1/2) in R(i, k1). V_i has exp(-d_ij) on R*(i), divided by its sum;
then the mean of V_j over the k2 first of N(i, ·). d_J(i, j) = 1 - Σ min(V_i, V_j) / Σ max(V_i, V_j), and
d* = (1 - λ) d_J + λ d.

As in the authors' code, whose figures others compare with: d_ij is the squared distance divided by the largest of i;
the queries of one call are neighbours too, though they are not ranked; V is divided by its sum; "more than" 2/3. The
paper has the squared distance itself, only gallery items, no division, "at least". Itself comes first in N(i, k) here,
also among equal rows; k1/2 is rounded to even; if all items are equal, d is 0.

Why lists are enough. V is sparse, and Σ min runs over inverted lists: which items have a weight at each column. Items
that share no column have d_J = 1, so among them the order is that of d. Each item that is nearer by d than such an item
also is nearer by d*, so the first k by d* are among the k nearest by d and the items with d_J < 1. Ties go to the
nearer item by d, then to the lower index; d* is rounded to 2^-40, so that equal sums tie in whatever order they were
added.

The sparse part is NumPy on the CPU with a fixed order of summation: no budget, thread count or process changes a value.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin.dist.group import ProcessGroup
from nearkin.evaluation.arrays import Floats, Progress
from nearkin.evaluation.retrieval import knn
from nearkin.evaluation.retrieval.exact import Space, slices
from nearkin.evaluation.retrieval.farthest import Farthest
from nearkin.evaluation.retrieval.rerank_settings import KReciprocal

__all__ = ["Ranker"]

Ints = NDArray[np.int32]
_ENTRY = 64  # bytes of working memory per entry that is sorted, or per pair of an inverted list
_STORED = 12  # bytes of a kept entry: column and value


class _Sparse(NamedTuple):
    """Rows (or columns) of a sparse matrix: those of i are at start[i] : start[i + 1], ascending."""

    start: NDArray[np.int64]
    at: Ints
    value: Floats


class Ranker:
    """Finds the first items of some queries by d*; called as `knn.Searcher` is.

    space: the queries and their gallery, or one set that searches itself. budget: bytes beside those of the space; more
    are kept for the lists (N, k1) and V, some 60 per item and neighbour, and a copy of the rows where the gallery is
    another set.
    """

    def __init__(
        self,
        space: Space,
        settings: KReciprocal,
        budget: int,
        progress: Progress | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        assert settings.k2 is not None
        self.space, self.settings, self.budget = space, settings, budget
        self.offset = 0 if space.self_search else len(space.queries)  # of the gallery among all rows
        rows = space.queries if space.self_search else torch.cat([space.queries, space.gallery])
        every = Space(rows, None, space.similarity, budget)
        every.drop_duplicates(settings.k1)
        found = knn.search_all(every, settings.k1, _phase(progress, 0), group, "neighbours")
        itself = np.arange(len(rows), dtype=np.int32)[:, None]
        self.lists: Ints = np.concatenate([itself, found.indices.cpu().numpy().astype(np.int32)], 1)  # (N, k1 + 1)
        del found
        last = knn.search_all(every, 1, _phase(progress, 1), group, "farthest", Farthest(every)).similarity
        largest = _squared(last.flatten().cpu().numpy(), space.similarity)
        self.farthest = np.where(largest > 0, largest, 1.0)  # (N,) squared distance; 1 where all rows are equal
        every.release()
        self.vectors = _vectors(every, self.lists, self.farthest, self.budget)
        self.search = knn.Searcher(space, "torch")
        self.gallery_blocks = self._gallery_blocks()
        self._inverted: tuple[slice, _Sparse] | None = None

    def __call__(self, rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """(q, k) each: the first items of the queries `rows`, -1 where there are no more, and their d*."""
        widest = max(block.stop - block.start for block in self.gallery_blocks)
        step = max(1, min(512, self.budget // (4 * 24 * max(widest, 1))))
        parts = [self._rank(rows[part], k) for part in slices(len(rows), step)]
        empty = rows.new_zeros(0, k), rows.new_zeros(0, k, dtype=torch.float64)
        return torch.cat([empty[0], *(items for items, _ in parts)]), torch.cat([empty[1], *(d for _, d in parts)])

    def _rank(self, rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
        queries, number = rows.cpu().numpy(), len(rows)
        near_rows, similarity = self.search(rows, k)
        near = near_rows.cpu().numpy()  # (q, k) by d
        real = near >= 0
        distance = np.where(real, self._distance(queries, similarity.cpu().numpy()), np.inf)
        shared, near_shared = self._overlaps(queries, near, real)
        share = self.settings.lambda_
        score = np.where(real, _mixed(near_shared, np.where(real, distance, 0.0), share), np.inf)
        least = np.where(real[:, -1], distance[:, -1], 0.0)
        r, j, overlap = self._contenders(rows, k, score, least, *shared)
        pairs = torch.from_numpy(r).to(rows.device), torch.from_numpy(j).to(rows.device)
        d = self._distance(queries[r], self.space.exact(rows[pairs[0]], pairs[1]).cpu().numpy())
        place = np.nonzero(real)
        every_row, every_item = np.concatenate([place[0], r]), np.concatenate([near[place], j])
        every_d = np.concatenate([distance[place], d])
        every_score = np.concatenate([score[place], _mixed(overlap, d, share)])
        order = np.lexsort((every_item, every_d, every_score, every_row))
        counts = np.bincount(every_row, minlength=number)
        position = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
        first = order[position < k]
        items, scores = np.full((number, k), -1, np.int64), np.full((number, k), np.inf)
        items[every_row[first], position[position < k]] = every_item[first]
        scores[every_row[first], position[position < k]] = every_score[first]
        return torch.from_numpy(items).to(rows.device), torch.from_numpy(scores).to(rows.device)

    def _contenders(
        self,
        rows: Tensor,
        k: int,
        score: Floats,
        least: Floats,
        r: NDArray[np.int64],
        j: NDArray[np.int64],
        overlap: Floats,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], Floats]:
        """Those of the items (r, j) with d_J < 1 whose d* may be among the first k, by float32 products.

        score (q, k): d* of the k nearest by d, inf where there are no more items. least (q,): the others have this d or
        a larger one.
        """
        share, number, queries = self.settings.lambda_, len(rows), rows.cpu().numpy()
        may = _mixed(overlap, least[r], share) <= score.max(1, initial=-np.inf)[r]
        r, j, overlap = r[may], j[may], overlap[may]
        counts = np.bincount(r, minlength=number)
        slot = np.arange(len(r)) - np.repeat(np.cumsum(counts) - counts, counts)
        items = torch.full((number, int(counts.max(initial=0))), -1, device=rows.device)
        place = torch.from_numpy(r).to(rows.device), torch.from_numpy(slot).to(rows.device)
        items[place] = torch.from_numpy(j).to(rows.device)
        low, high = self.space.range_of(rows[place[0]], self.space.proposed(rows, items)[place])
        known = (self.space.column(items)[place] >= 0).cpu().numpy()  # a duplicate that takes no part has no product
        nearest = np.where(known, self._distance(queries[r], high.cpu().numpy()), least[r])
        farthest = np.where(known, self._distance(queries[r], low.cpu().numpy()), 1.0)
        surely = np.full(items.shape, np.inf)
        surely[r, slot] = _mixed(overlap, farthest, share)
        bound = np.partition(np.concatenate([score, surely], 1), k - 1, axis=1)[:, k - 1]  # the k-th d* is at most this
        may = _mixed(overlap, nearest, share) <= bound[r]
        return r[may], j[may], overlap[may]

    def _distance(self, queries: NDArray[np.int64], similarity: Floats) -> Floats:
        """d of queries with items, from exact similarities (q,) or (q, k)."""
        far = self.farthest[queries]
        return _squared(similarity, self.space.similarity) / (far if similarity.ndim == 1 else far[:, None])

    def _overlaps(
        self, queries: NDArray[np.int64], near: NDArray[np.int64], real: NDArray[np.bool_]
    ) -> tuple[tuple[NDArray[np.int64], NDArray[np.int64], Floats], Floats]:
        """Σ min(V_q, V_j): where it is > 0, as (row, item, sum), but (q, k) for the items in `near`."""
        mine = _averaged(self.vectors, self.lists[queries, : self.settings.k2])
        rows, items, sums = [], [], []
        of_near = np.zeros(near.shape)
        for block in self.gallery_blocks:
            tile, touched = self._tile(mine, len(queries), block)
            if self.space.self_search:
                own = np.flatnonzero((queries >= block.start) & (queries < block.stop))
                touched[own, queries[own] - block.start] = False
            r, slot = np.nonzero(real & (near >= block.start) & (near < block.stop))
            column = near[r, slot] - block.start
            of_near[r, slot] = tile[r, column]
            touched[r, column] = False
            flat = np.flatnonzero(touched)
            rows.append(flat // tile.shape[1])
            items.append(flat % tile.shape[1] + block.start)
            sums.append(tile.ravel()[flat])
        row = np.concatenate(rows)
        order = np.argsort(row, kind="stable")  # block after block so far
        return (row[order], np.concatenate(items)[order], np.concatenate(sums)[order]), of_near

    def _tile(self, mine: _Sparse, number: int, block: slice) -> tuple[Floats, NDArray[np.bool_]]:
        """(q, g) Σ min of some queries with a block of the gallery, column after column; and where it is > 0."""
        inverted, width = self._columns(block), block.stop - block.start
        length = np.diff(inverted.start)[mine.at]  # of the inverted list of each entry
        per_row = np.bincount(np.repeat(np.arange(number), np.diff(mine.start)), length, number).astype(np.int64)
        most = max(1, self.budget // 4 // _ENTRY)
        tile, touched = np.zeros((number, width)), np.zeros((number, width), np.bool_)
        first = 0
        while first < number:  # whole rows, as many as fit; a row that does not is added piece by piece, in order
            last = max(first + 1, first + int(np.searchsorted(np.cumsum(per_row[first:]), most, side="right")))
            entries = slice(int(mine.start[first]), int(mine.start[last]))
            row = np.repeat(np.arange(first, last), np.diff(mine.start[first : last + 1]))
            for piece in _pieces(length[entries], most):
                part = slice(entries.start + piece.start, entries.start + piece.stop)
                each, place = _ranges(inverted.start[mine.at[part]], length[part])
                weight = np.minimum(mine.value[part][each], inverted.value[place])
                cell = (row[piece] - first)[each] * width + inverted.at[place]
                cells = tile[first:last].reshape(-1)
                touched[first:last].reshape(-1)[cell] = True
                if piece.stop - piece.start == len(row):
                    cells[:] = np.bincount(cell, weight, len(cells))
                else:
                    np.add.at(cells, cell, weight)
            first = last
        return tile, touched

    def _columns(self, block: slice) -> _Sparse:
        """Inverted lists of a block of the gallery, for each column the items of the block that have a weight there."""
        if self._inverted is not None and self._inverted[0] == block:
            return self._inverted[1]
        self._inverted = None
        size = len(self.lists)
        parts = [slice(block.start + part.start, block.start + part.stop) for part in self._row_blocks(block)]
        counts = np.zeros(size, np.int64)
        for part in parts:
            counts += np.bincount(self._gallery_rows(part).at, minlength=size)
        start = np.concatenate([[0], np.cumsum(counts)])
        index, value, free = np.empty(start[-1], np.int32), np.empty(start[-1]), start[:-1].copy()
        for part in parts:
            rows = self._gallery_rows(part)
            item = np.repeat(np.arange(part.start - block.start, part.stop - block.start), np.diff(rows.start))
            order = np.argsort(rows.at, kind="stable")  # items ascend within a column
            column = rows.at[order]
            number = np.bincount(column, minlength=size)
            place = free[column] + np.arange(len(column)) - (np.cumsum(number) - number)[column]
            index[place], value[place] = item[order], rows.value[order]
            free += number
        self._inverted = block, _Sparse(start, index, value)
        return self._inverted[1]

    def _gallery_rows(self, part: slice) -> _Sparse:
        members = self.lists[self.offset + part.start : self.offset + part.stop, : self.settings.k2]
        return _averaged(self.vectors, members)

    def _bounds(self) -> NDArray[np.int64]:
        """(G,) how many entries an averaged row of the gallery has at most."""
        length = np.append(np.diff(self.vectors.start), 0)  # the last: no item, -1
        return np.asarray(length[self.lists[self.offset :, : self.settings.k2]].sum(1))

    def _gallery_blocks(self) -> list[slice]:
        """Blocks of the gallery whose inverted lists fit; one where memory allows: several are made anew per call."""
        self.bounds = self._bounds()
        blocks = _pieces(self.bounds, max(1, self.budget // 2 // _STORED))
        return blocks or [slice(0, 0)]

    def _row_blocks(self, block: slice) -> list[slice]:
        return _pieces(self.bounds[block], max(1, self.budget // 8 // _ENTRY))


def _vectors(space: Space, lists: Ints, farthest: Floats, budget: int) -> _Sparse:
    """V before the average, (N, N) with some entries per row."""
    number, width = lists.shape
    half = round((width - 1) / 2) + 1
    mutual, mutual_half = _mutual(lists, budget), _mutual(lists[:, :half], budget)
    step = max(1, min(512, budget // (4 * (2 * number + 32 * width * half))))
    counts, columns, values = [], [], []
    for block in slices(number, step):
        size = block.stop - block.start
        own, keep = lists[block], mutual[block]
        mark = np.zeros((size, number), np.bool_)  # (b, N) R(i, k1), then R*(i)
        row = np.broadcast_to(np.arange(size)[:, None], own.shape)
        mark[row[keep], own[keep]] = True
        members, inside = lists[own, :half], mutual_half[own] & keep[:, :, None]  # (b, k1 + 1, k1/2 + 1) R(j, k1/2)
        row = np.broadcast_to(np.arange(size)[:, None, None], members.shape)
        common = (mark[row, members] & inside).sum(2)
        inside &= (3 * common > 2 * inside.sum(2))[:, :, None]
        mark[row[inside], members[inside]] = True
        r, c = np.nonzero(mark)
        i, j = (torch.from_numpy(x).to(space.queries.device) for x in (r + block.start, c))
        d = _squared(space.exact(i, j).cpu().numpy(), space.similarity) / farthest[r + block.start]
        weight = np.exp(-np.where(r + block.start == c, 0.0, d))
        counts.append(np.bincount(r, minlength=size))
        columns.append(c.astype(np.int32))
        values.append(weight / np.bincount(r, weight, size)[r])
    start = np.concatenate([[0], np.cumsum(np.concatenate([np.zeros(0, np.int64), *counts]))])
    return _Sparse(start, np.concatenate([lists[0, :0], *columns]), np.concatenate([np.zeros(0), *values]))


def _mutual(lists: Ints, budget: int) -> NDArray[np.bool_]:
    """(N, w): whether an item has the row in its own list."""
    number, width = lists.shape
    result = np.zeros(lists.shape, np.bool_)
    for block in slices(number, max(1, budget // (4 * 8 * width * width))):
        back = lists[lists[block]] == np.arange(block.start, block.stop)[:, None, None]  # (b, w, w)
        result[block] = back.any(2) & (lists[block] >= 0)
    return result


def _averaged(vectors: _Sparse, members: Ints) -> _Sparse:
    """Means (b, N) of the rows `members` (b, k2); -1 is none. Sums run in the order of the members' indices."""
    members = np.sort(members, axis=1)
    real = members >= 0
    row = np.broadcast_to(np.arange(len(members))[:, None], members.shape)[real]
    item = members[real]
    each, place = _ranges(vectors.start[item], np.diff(vectors.start)[item])
    key = row[each] * np.int64(len(vectors.start)) + vectors.at[place]
    order = np.argsort(key, kind="stable")
    key, value = key[order], vectors.value[place[order]]
    new = np.append(True, key[1:] != key[:-1])[: len(key)]
    sums = np.bincount(np.cumsum(new) - 1, value)
    rows, columns = np.divmod(key[new], len(vectors.start))
    start = np.append(0, np.cumsum(np.bincount(rows, minlength=len(members))))
    return _Sparse(start, columns.astype(np.int32), sums / real.sum(1)[rows])


def _mixed(overlap: Floats, d: Floats, share: float) -> Floats:
    """d* from Σ min (rows have sum 1, so Σ max is 2 - Σ min) and d, in steps of 2^-40: rounding decides no tie."""
    exact = (1 - share) * (1 - overlap / (2 - overlap)) + share * d
    return np.asarray(np.rint(exact * 2.0**40) * 2.0**-40)


def _squared(similarity: Floats, kind: str) -> Floats:
    """Squared distances from exact similarities: of unit rows where these are signed squares of cosines."""
    if kind == "euclidean":
        return -similarity
    return np.asarray(np.maximum(2 - 2 * np.sign(similarity) * np.sqrt(np.abs(similarity)), 0.0))


def _ranges(start: NDArray[np.int64], length: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """start[i], …, start[i] + length[i] - 1 for each i in turn: which i, and the number."""
    each = np.repeat(np.arange(len(start)), length)
    return each, np.arange(len(each)) + np.repeat(start - (np.cumsum(length) - length), length)


def _pieces(sizes: NDArray[np.int64], most: int) -> list[slice]:
    """Consecutive pieces, each of a sum of at most `most` or of one element."""
    total, result, first = np.cumsum(sizes), [], 0
    while first < len(sizes):
        before = int(total[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(total, before + most, side="right")))
        result.append(slice(first, last))
        first = last
    return result


def _phase(progress: Progress | None, index: int) -> Progress | None:
    """The part of a bar that a search of all rows has: there are two, and the ranking."""
    return None if progress is None else lambda done, of: progress(index * of + done, 3 * of)
