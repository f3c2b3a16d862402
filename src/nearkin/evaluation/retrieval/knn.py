"""Exact nearest neighbours in bounded memory: the same answer for every tile size, thread count, device and backend.

The rule. The similarity of a pair is a float64 number whose operations and their order are fixed: products of the
coordinates, summed by halving (`Space.exact`). Larger is nearer, equals stand in the order of their index, and a set
that is its own gallery leaves each query out by its index. Identical rows therefore tie exactly.

The speed. Float32 products, by tiles, only propose. Their distance from the exact value is at most `Space.error`
whatever the order of summation, so each item that could be among the nearest is kept, and the exact similarity decides.

Memory: the embeddings, what is returned, a few numbers a row, and `budget` bytes, in which a float32 copy of the
embeddings is counted.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearkin.core import checks
from nearkin.evaluation.arrays import Array, takes_arrays
from nearkin.evaluation.retrieval.exact import CELL, LISTED, SIMILARITIES, Space, slices

__all__ = ["BACKENDS", "BUDGET", "SIMILARITIES", "Neighbours", "Progress", "Searcher", "nearest"]

BUDGET = 512 * 2**20
BACKENDS = ("torch", "faiss")
Progress = Callable[[int, int], None]  # rows done, rows in all


class Neighbours(NamedTuple):
    """The k nearest of each query, nearest first.

    indices (Q, k) int64 into the gallery, -1 where the gallery has no more; similarity (Q, k) float64: the cosine, the
    inner product, or minus the squared Euclidean distance; -inf where there is none.
    """

    indices: Tensor
    similarity: Tensor


@takes_arrays
def nearest(
    queries: Array,
    gallery: Array | None = None,
    *,
    k: int,
    similarity: str = "cosine",
    budget: int = BUDGET,
    backend: str = "torch",
    progress: Progress | None = None,
) -> Neighbours:
    """The k nearest gallery items of each query, exactly; without a gallery the queries search one another.

    queries (Q, D), gallery (G, D), of any float type. similarity: "cosine", "dot" or "euclidean". backend: who
    proposes, "torch" on the embeddings' device or "faiss" on the CPU; the answer is the same. progress(done, of) is
    called after each block of queries.
    """
    checks.rows("queries", queries)
    checks.integer("k", k, 1)
    checks.one_of("backend", backend, BACKENDS)
    if gallery is not None:
        checks.rows("gallery", gallery)
        checks.same_device("gallery", gallery, queries, "queries")
        checks.dimensions("gallery", gallery, queries.shape[1], "queries have")
    space = Space(queries, gallery, similarity, budget)
    space.leave_crowds(k)
    indices = torch.full((len(queries), k), -1, device=queries.device)
    values = torch.full((len(queries), k), -torch.inf, dtype=torch.float64, device=queries.device)
    searched = Searcher(space, backend)
    for block in space.blocks():
        rows = torch.arange(block.start, block.stop, device=queries.device)
        indices[block], values[block] = searched(rows, k)
        if progress is not None:
            progress(block.stop, len(queries))
    if similarity == "cosine":
        values = torch.where(indices < 0, values, values.sign() * values.abs().sqrt())
    return Neighbours(indices, values)


class Searcher:
    """Answers some queries at a time; holds the index of the backend."""

    def __init__(self, space: Space, backend: str) -> None:
        self.space, self.index = space, _faiss_index(space) if backend == "faiss" else None

    def __call__(self, rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """(q, k) each: the nearest items of the queries `rows`, -1 where there are no more, and similarities."""
        cols = _propose(self.space, rows, k) if self.index is None else _ask(self.index, self.space, rows, k)  # (q, w)
        if cols is None:
            halves = [self(half, k) for half in rows.chunk(2)]
            return torch.cat([indices for indices, _ in halves]), torch.cat([values for _, values in halves])
        cols = self.space.items(torch.nn.functional.pad(cols, (0, max(0, k - cols.shape[1])), value=-1))
        score = torch.full(cols.shape, -torch.inf, dtype=torch.float64, device=cols.device)
        at = cols >= 0
        score[at] = self.space.exact(rows[:, None].expand_as(cols)[at], cols[at])
        score, order = score.sort(dim=1, descending=True, stable=True)  # columns ascend: equals by index
        return cols.gather(1, order)[:, :k], score[:, :k]


def kth_floor(tile: Tensor, k: int) -> Tensor:
    """(q, 1): a number that at least k entries of the row reach; -inf where that is not known.

    The k-th largest of the maxima of disjoint groups of columns: a fraction of the work of selecting k of the row.
    """
    size = tile.shape[1]
    if k >= size:
        return tile.new_full((tile.shape[0], 1), -torch.inf)
    groups = size // max(1, min(64, size // (4 * k)))
    best: Tensor = tile[:, : size // groups * groups].view(len(tile), -1, groups).amax(1)
    return best.topk(k, sorted=False).values.amin(1, keepdim=True)


def above(tile: Tensor, low: Tensor, budget: int) -> tuple[Tensor, Tensor] | None:
    """Entries of each row above `low` (q, 1): values (q, w), -inf where none, and columns ascending, -1 where none.

    None where so many tie that lists of several rows would not fit into half the budget: the caller takes fewer rows.
    """
    most, mask = budget // 2 // LISTED if len(tile) > 1 else tile.numel(), tile > low
    if int(mask.count_nonzero()) > most:
        return None
    row, col = mask.nonzero(as_tuple=True)
    number = torch.bincount(row, minlength=len(tile))
    width = int(number.max()) if len(number) else 0
    if width * len(tile) > most:
        return None
    slot = torch.arange(len(row), device=row.device) - (number.cumsum(0) - number)[row]
    values = tile.new_full((len(tile), width), -torch.inf)
    values[row, slot] = tile[row, col]
    cols = torch.full(values.shape, -1, device=tile.device)
    cols[row, slot] = col
    return values, cols


def _propose(space: Space, rows: Tensor, k: int) -> Tensor | None:
    """Columns that may be among the k nearest, (q, w), ascending but for -1; None where they are beyond the budget."""
    size, error, left = space.size, 2 * space.error[rows, None], space.left(rows)
    width = max(1, min(size, space.budget // 2 // (CELL * max(len(rows), 1))))
    floor = left.new_full((len(rows), 1), -torch.inf)
    values, cols = left.new_zeros(len(rows), 0), rows.new_zeros(len(rows), 0)
    room = left.new_empty(len(rows) * width)
    for piece in slices(size, width):
        tile = room[: len(rows) * (piece.stop - piece.start)].view(len(rows), -1)
        _fill(space, rows, left, piece, tile)
        floor = torch.maximum(floor, kth_floor(tile, k))
        found = above(tile, floor - error, space.budget)
        if found is None:
            return None
        values = torch.cat([values, found[0]], 1)
        cols = torch.cat([cols, found[1] + piece.start * (found[1] >= 0)], 1)
        if width < size and values.shape[1] > k:
            floor = torch.maximum(floor, values.topk(k, sorted=False).values.amin(1, keepdim=True))
            kept = above(values, floor - error, space.budget)
            if kept is None:
                return None
            values, cols = kept[0], torch.where(kept[1] < 0, -1, cols.gather(1, kept[1].clamp(min=0)))
    return cols


def whole_rows(space: Space, rows: Tensor) -> Tensor:
    """Proposing similarities of some queries with everything, (q, G) float32; -inf between a query and itself."""
    left = space.left(rows)
    tile = left.new_empty(len(rows), space.size)
    _fill(space, rows, left, slice(0, space.size), tile)
    return tile


def _fill(space: Space, rows: Tensor, left: Tensor, piece: slice, tile: Tensor) -> None:
    """Products straight into their place, in strips that a cache holds: a third less time."""
    for part in slices(tile.shape[1], 4096 if tile.device.type == "cpu" else 2**18):
        right = space.right(slice(piece.start + part.start, piece.start + part.stop))
        space.tile(left, right, tile[:, part])
    if space.own:
        at = space.column(rows) - piece.start
        row = ((at >= 0) & (at < tile.shape[1])).nonzero().flatten()
        tile[row, at[row]] = -torch.inf


def _faiss_index(space: Space) -> Any:
    import faiss

    index = faiss.IndexFlatIP(space.gallery.shape[1] + 2 * (space.similarity == "euclidean"))
    for piece in slices(space.size, 2**16):
        index.add(space.right(piece).cpu().numpy())
    return index


def _ask(index: Any, space: Space, rows: Tensor, k: int) -> Tensor | None:
    """As many as it takes: the last one proposed must be too far to belong. None where that is beyond the budget."""
    size, error = space.size, space.error[rows].cpu()
    wanted = min(size, k + space.own + 16)
    while wanted > 0:
        if len(rows) > 1 and len(rows) * wanted * LISTED > space.budget // 2:
            return None
        values, cols = (torch.from_numpy(part) for part in index.search(space.left(rows).cpu().numpy(), wanted))
        kth = values[:, min(k + space.own, wanted) - 1]
        if wanted == size or bool((values[:, -1] < kth - 2 * error).all()):
            break
        wanted = min(size, 2 * wanted)
    else:
        return rows.new_zeros(len(rows), 0)
    cols = cols.to(rows.device)
    if space.own:
        cols = cols.masked_fill(cols == space.column(rows)[:, None], size)
    cols = cols.sort(dim=1).values
    return cols.masked_fill(cols == size, -1)
