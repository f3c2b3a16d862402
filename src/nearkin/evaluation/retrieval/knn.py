"""Exact nearest neighbours in bounded memory: the same answer for every tile size, thread count, device and backend.

The rule. The similarity of a pair is a float64 number whose operations and their order are fixed: products of the
coordinates, summed by halving (`Space.exact`). Larger is nearer, ties are in the order of their index, and in a set
that is its own gallery each query is excluded by its index. Identical rows therefore tie exactly.

The speed. Float32 products, by tiles, only propose. They differ from the exact value by at most `Space.error`,
whatever the order of summation, so each item that could be among the nearest is a candidate, and the exact similarity
decides.

Memory: the embeddings, the result, a few numbers per row, and `budget` bytes, which include a float32 copy of the
embeddings.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearkin.core import checks
from nearkin.dist.group import ProcessGroup
from nearkin.evaluation.arrays import Array, Progress, takes_arrays
from nearkin.evaluation.retrieval.exact import CELL, LISTED, SIMILARITIES, Space, slices

__all__ = [
    "BACKENDS", "BUDGET", "SIMILARITIES", "Neighbours", "Searcher", "cosines", "entries_above", "kth_floor", "nearest",
    "proposed_rows", "search_all",
]  # fmt: skip

BUDGET = 512 * 2**20
BACKENDS = ("torch", "faiss")


class Neighbours(NamedTuple):
    """The k nearest gallery items of each query, nearest first: what `nearest` returns.

    indices (Q, k) int64 into the gallery; -1 where the gallery has fewer than k items.
    similarity (Q, k) float64: the cosine, the inner product, or minus the squared Euclidean distance; -inf where the
    index is -1.
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
    """The k nearest gallery items of each query, exactly, as `Neighbours(indices, similarity)` of shape (Q, k) each.

        neighbours = evaluation.nearest(queries, gallery, k=5)
        neighbours.indices[0]       # rows of the gallery, nearest first
        neighbours.similarity[0]    # their cosines, float64

    queries (Q, D) and gallery (G, D): tensors on one device or NumPy arrays, of any float type; all values finite.
    Without a gallery the queries search one another, and no row finds itself. With fewer than k items to find, the
    rest is -1 with similarity -inf.

    similarity: "cosine" (a zero row has cosine 0 with everything), "dot" or "euclidean" (reported as minus the squared
    distance, so that larger is nearer).

    Exact: similarities are compared in float64 with a fixed order of operations, and ties go to the lower index. The
    result depends neither on the budget, the number of threads, the device nor the backend, and duplicate rows tie.

    budget: bytes of working memory beyond the embeddings and the result; a float32 copy of the embeddings counts
    towards it. A small budget takes longer and never changes the result; one that cannot hold a single query
    against the gallery, about 112 bytes per gallery item, is refused. Nothing of size Q x G is ever in memory.

    backend: "torch" searches on the device of the embeddings; "faiss" (the `ann` extra) proposes candidates on the CPU
    and the exact similarity decides. progress(done, total) is called with queries after each block of them.
    """
    checks.rows("queries", queries)
    checks.integer("k", k, 1)
    checks.one_of("backend", backend, BACKENDS)
    if gallery is not None:
        checks.rows("gallery", gallery)
        checks.same_device("gallery", gallery, queries, "queries")
        checks.dimensions("gallery", gallery, queries.shape[1], "queries have")
    space = Space(queries, gallery, similarity, budget)
    space.drop_duplicates(k)
    indices = torch.full((len(queries), k), -1, device=queries.device)
    values = torch.full((len(queries), k), -torch.inf, dtype=torch.float64, device=queries.device)
    search = Searcher(space, backend)
    for block in space.blocks():
        rows = torch.arange(block.start, block.stop, device=queries.device)
        indices[block], values[block] = search(rows, k)
        if progress is not None:
            progress(block.stop, len(queries))
    return Neighbours(indices, cosines(indices, values) if similarity == "cosine" else values)


def search_all(
    space: Space,
    k: int,
    progress: Progress | None = None,
    group: ProcessGroup | None = None,
    what: str = "searching",
    search: Callable[[Tensor, int], tuple[Tensor, Tensor]] | None = None,
) -> Neighbours:
    """The k nearest items of every query, (Q, k) each, as `nearest` has them; processes of a group share the queries.

    Similarities as `Space.exact` compares them. search: another way to find k items of some queries than the nearest.
    """
    blocks, number, device = space.blocks(), len(space.queries), space.queries.device
    step = blocks[0].stop if blocks else 1
    share = slice(0, number)
    if group is not None and group.size > 1:
        step = min(step, -(-number // group.size)) or 1
        share = group.share(number, step)
    indices = torch.full((share.stop - share.start, k), -1, device=device)
    values = torch.full(indices.shape, -torch.inf, dtype=torch.float64, device=device)
    search = search or Searcher(space, "torch")
    with nullcontext(progress) if group is None else group.work(what, progress, number) as report:
        for block in slices(len(indices), step):
            rows = torch.arange(share.start + block.start, share.start + block.stop, device=device)
            indices[block], values[block] = search(rows, k)
            if report is not None:
                report(block.stop, len(indices))
    return Neighbours(indices, values) if group is None else Neighbours(group.rows(indices), group.rows(values))


def cosines(indices: Tensor, values: Tensor) -> Tensor:
    """Cosines of signed squares, which `Space.exact` compares; -inf stays where there is no item."""
    return torch.where(indices < 0, values, values.sign() * values.abs().sqrt())


class Searcher:
    """Searches for some queries at a time; owns the index of the backend."""

    def __init__(self, space: Space, backend: str) -> None:
        self.space, self.index = space, _faiss_index(space) if backend == "faiss" else None

    def __call__(self, rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """(q, k) each: the nearest items of the queries `rows`, -1 where there are no more, and similarities."""
        proposed = (
            _propose(self.space, rows, k) if self.index is None else _faiss_propose(self.index, self.space, rows, k)
        )
        if proposed is None:
            halves = [self(half, k) for half in rows.chunk(2)]
            return torch.cat([indices for indices, _ in halves]), torch.cat([values for _, values in halves])
        items = self.space.items(torch.nn.functional.pad(proposed, (0, max(0, k - proposed.shape[1])), value=-1))
        score = torch.full(items.shape, -torch.inf, dtype=torch.float64, device=items.device)  # (q, w)
        valid = items >= 0
        score[valid] = self.space.exact(rows[:, None].expand_as(items)[valid], items[valid])
        score, order = score.sort(dim=1, descending=True, stable=True)  # columns ascend: ties by index
        return items.gather(1, order)[:, :k], score[:, :k]


def kth_floor(tile: Tensor, k: int) -> Tensor:
    """(q, 1): a number that at least k entries of the row reach; -inf where none is known.

    The k-th largest of the maxima of disjoint groups of columns, for a fraction of the work of a top-k of the row.
    """
    size = tile.shape[1]
    if k >= size:
        return tile.new_full((tile.shape[0], 1), -torch.inf)
    groups = size // max(1, min(64, size // (4 * k)))
    best: Tensor = tile[:, : size // groups * groups].view(len(tile), -1, groups).amax(1)
    return best.topk(k, sorted=False).values.amin(1, keepdim=True)


def entries_above(tile: Tensor, low: Tensor, budget: int) -> tuple[Tensor, Tensor] | None:
    """Entries of each row above `low` (q, 1): values (q, w), -inf where none, and columns ascending, -1 where none.

    None where lists of several rows would not fit into half the budget, because of ties: the caller takes fewer rows.
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
        entries = entries_above(tile, floor - error, space.budget)
        if entries is None:
            return None
        values = torch.cat([values, entries[0]], 1)
        cols = torch.cat([cols, entries[1] + piece.start * (entries[1] >= 0)], 1)
        if width < size and values.shape[1] > k:
            floor = torch.maximum(floor, values.topk(k, sorted=False).values.amin(1, keepdim=True))
            entries = entries_above(values, floor - error, space.budget)
            if entries is None:
                return None
            values, cols = entries[0], torch.where(entries[1] < 0, -1, cols.gather(1, entries[1].clamp(min=0)))
    return cols


def proposed_rows(space: Space, rows: Tensor) -> Tensor:
    """Proposing similarities of some queries with everything, (q, G); -inf between a query and itself."""
    left = space.left(rows)
    tile = left.new_empty(len(rows), space.size)
    _fill(space, rows, left, slice(0, space.size), tile)
    return tile


def _fill(space: Space, rows: Tensor, left: Tensor, piece: slice, tile: Tensor) -> None:
    """Products written to the tile in strips that fit a cache: a third less time."""
    for part in slices(tile.shape[1], 4096 if tile.device.type == "cpu" else 2**18):
        right = space.right(slice(piece.start + part.start, piece.start + part.stop))
        space.tile(left, right, tile[:, part])
    if space.self_search:
        self_column = space.column(rows) - piece.start
        row = ((self_column >= 0) & (self_column < tile.shape[1])).nonzero().flatten()
        tile[row, self_column[row]] = -torch.inf
    if space.labels is not None:
        own = space.labels[rows, None]
        for part in slices(tile.shape[1], 4096):
            columns = slice(piece.start + part.start, piece.start + part.stop)
            tile[:, part].masked_fill_(own == space.labels[space.items_of(columns)], -torch.inf)


def _faiss_index(space: Space) -> Any:
    import faiss

    index = faiss.IndexFlatIP(space.gallery.shape[1] + 2 * (space.similarity == "euclidean"))
    for piece in slices(space.size, 2**16):
        index.add(space.right(piece).cpu().numpy())
    return index


def _faiss_propose(index: Any, space: Space, rows: Tensor, k: int) -> Tensor | None:
    """As many as it takes: the last one proposed must be too far to be among the k; None beyond the budget."""
    size, error = space.size, space.error[rows].cpu()
    number = min(size, k + space.self_search + 16)
    while number > 0:
        if len(rows) > 1 and len(rows) * number * LISTED > space.budget // 2:
            return None
        values, cols = (torch.from_numpy(part) for part in index.search(space.left(rows).cpu().numpy(), number))
        kth = values[:, min(k + space.self_search, number) - 1]
        if number == size or bool((values[:, -1] < kth - 2 * error).all()):
            break
        number = min(size, 2 * number)
    else:
        return rows.new_zeros(len(rows), 0)
    cols = cols.to(rows.device)
    if space.self_search:
        cols = cols.masked_fill(cols == space.column(rows)[:, None], size)
    cols = cols.sort(dim=1).values
    return cols.masked_fill(cols == size, -1)
