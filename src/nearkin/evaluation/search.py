"""Exact nearest neighbours in bounded memory: the same answer for every tile size, thread count, device and backend.

The rule. The similarity of a pair is a float64 number whose operations and their order are fixed: products of the
coordinates, summed by halving (`exact`). Larger is nearer, equals stand in the order of their index, and a set that is
its own gallery leaves each query out by its index. Identical rows therefore tie exactly.

The speed. Float32 products, by tiles, only propose. Their distance from the exact value is at most `Space.error`
whatever the order of summation, so each item that could be among the nearest is kept, and the exact similarity decides.

Memory: the embeddings, what is returned, a few numbers a row, and `budget` bytes, in which a float32 copy of the
embeddings is counted; a copy that would take more than half of it is not made (but for lengths near the ends of
float32's range).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearkin.core import checks

BUDGET = 512 * 2**20
SIMILARITIES = ("cosine", "dot", "euclidean")
BACKENDS = ("torch", "faiss")
Progress = Callable[[int, int], None]  # rows done, rows in all

_ROUNDING = 2.0**-24  # of one float32 operation
_CELL = 16  # bytes that a (query, gallery) cell of a tile needs,
_LISTED = 96  # and one that is a candidate
_BLOCK = 512  # queries a tile: more gains nothing


class Neighbours(NamedTuple):
    """The k nearest of each query, nearest first.

    indices (Q, k) int64 into the gallery, -1 where the gallery has no more; similarity (Q, k) float64: the cosine, the
    inner product, or minus the squared Euclidean distance; -inf where there is none.
    """

    indices: Tensor
    similarity: Tensor


class Space:
    """Queries and a gallery made ready: float32 rows whose inner products propose, and the exact similarity."""

    def __init__(self, queries: Tensor, gallery: Tensor | None, similarity: str, budget: int) -> None:
        checks.one_of("similarity", similarity, SIMILARITIES)
        checks.whole("budget", budget, 1)
        self.queries, self.own = queries.detach(), gallery is None
        self.gallery = self.queries if gallery is None else gallery.detach()
        self.similarity, self.budget, self._whole_budget = similarity, budget, budget
        self._left = _squared_lengths("embeddings" if self.own else "queries", self.queries)  # (Q,) float64
        self._right = self._left if self.own else _squared_lengths("gallery", self.gallery)
        longest = max(_top(self._left), _top(self._right))
        self._scale = 2.0 ** -_exponent(longest) if similarity != "cosine" else 1.0  # a power of two: exact
        mirror = self.own and similarity != "euclidean"
        rows = len(self.queries) + (0 if mirror else len(self.gallery))
        bytes_copied = 4 * rows * (self.queries.shape[1] + 1)
        self.copies: tuple[Tensor, Tensor] | None = None  # (Q, D), (G, D) float32 rows that propose
        if bytes_copied <= budget // 2 or not self._moderate():
            left = self._proposing(self.queries, self._left, query=True)
            self.copies = left, left if mirror else self._proposing(self.gallery, self._right, query=False)
            self.budget = max(budget - bytes_copied, budget // 2)
        # |computed - exact| <= (n + 2) u sum|a b| for inner products of n rounded numbers; Cauchy-Schwarz; some spare.
        reach = float(self._reach(self._right, query=False).max()) if len(self.gallery) else 0.0
        spread = self._reach(self._left, query=True) * (1.0001 * reach * _ROUNDING * (self.queries.shape[1] + 33))
        self.error = spread.float() + 1e-30  # (Q,)

    def blocks(self, extra: int = 0) -> list[slice]:
        """Slices of the queries whose tiles, with `extra` bytes a row, stay within the budget."""
        size = len(self.gallery)
        least = size * (_CELL + _LISTED) + extra
        if least > self.budget and self.copies is not None:  # the room that the copy takes is needed for tiles
            self.copies, self.budget = None if self._moderate() else self.copies, self._whole_budget
        if least > self.budget:
            raise ValueError(f"budget must hold one query against the gallery: {least} bytes, got {self.budget}")
        step = max(1, min(_BLOCK, self.budget // 2 // max(size * _CELL + extra, 1)))
        return [slice(i, min(i + step, len(self.queries))) for i in range(0, len(self.queries), step)]

    def tile(self, rows: Tensor) -> Tensor:
        """Proposing similarities of some queries with the gallery, (q, G) float32; -inf between a query and itself."""
        left = self.proposers(rows)
        tile = left.new_empty(len(rows), len(self.gallery))
        width = 4096 if tile.device.type == "cpu" else 2**18  # pieces that a cache holds: a third less
        with _plain_float32(tile.device):
            for i in range(0, len(self.gallery), width):
                piece = slice(i, i + width)
                if self.copies is not None:
                    torch.mm(left, self.copies[1][piece].T, out=tile[:, piece])  # straight into its place
                else:
                    self._uncopied(left, piece, tile[:, piece])
        if self.own:
            tile.scatter_(1, rows[:, None], -torch.inf)
        return tile

    def proposers(self, rows: Tensor) -> Tensor:
        """The float32 rows of some queries, from the copy or made anew."""
        if self.copies is not None:
            return self.copies[0][rows]
        return self._proposing(self.queries[rows], self._left[rows], query=True)

    def gallery_proposers(self, piece: slice) -> Tensor:
        """The float32 rows of a piece of the gallery, for an index that keeps its own."""
        if self.copies is not None:
            return self.copies[1][piece]
        return self._proposing(self.gallery[piece], self._right[piece], query=False)

    def _uncopied(self, left: Tensor, piece: slice, out: Tensor) -> None:
        """Proposing similarities with a piece of the gallery as it is: scaled after the product, not before it."""
        right, squared = self.gallery[piece].float(), self._right[piece]
        torch.mm(left[:, : right.shape[1]], right.T, out=out)
        if self.similarity == "cosine":
            out.mul_(torch.where(squared > 0, squared.rsqrt(), 0.0).float())
        else:
            out.mul_(self._scale)
        if self.similarity == "euclidean":
            out.add_((squared * (-0.5 * self._scale**2)).float())

    def _moderate(self) -> bool:
        """Whether all lengths are far from the ends of float32's range, so that rows may be multiplied as they are."""
        parts = [part[part > 0] for part in (self._left, self._right)]
        return all(bool((part > 2.0**-60).all() & (part < 2.0**60).all()) for part in parts)

    def _reach(self, squared: Tensor, query: bool) -> Tensor:
        """Lengths of the rows that propose, float64."""
        if self.similarity == "cosine":
            return (squared > 0).double()
        scaled = squared * self._scale**2
        if self.similarity == "dot":
            return scaled.sqrt()
        return (scaled + (1.0 if query else (scaled / 2).square())).sqrt()

    def exact(self, rows: Tensor, cols: Tensor) -> Tensor:
        """The similarity that decides, of pairs (P,) of queries and gallery items, float64.

        cosine: c|c|, c = <a, b> / (|a| |b|), which has the order of c and needs no root, so that multiples of one row
        tie; 0 for a zero row. dot: <a, b>. euclidean: -|a - b|².
        """
        dim = self.queries.shape[1]
        chunk = max(1, min(self.budget // (64 * dim), (2**18 if rows.device.type == "cpu" else 2**26) // dim))
        parts = [self._exact(r, c) for r, c in zip(torch.split(rows, chunk), torch.split(cols, chunk), strict=True)]
        return torch.cat(parts) if parts else rows.new_zeros(0, dtype=torch.float64)

    def _exact(self, rows: Tensor, cols: Tensor) -> Tensor:
        a, b = self.queries[rows].double(), self.gallery[cols].double()
        if self.similarity == "euclidean":
            return -_sum((a - b).square())
        dot = _sum(a * b)
        if self.similarity == "dot":
            return dot
        lengths = self._left[rows] * self._right[cols]
        return torch.where(lengths > 0, dot * dot.abs() / lengths, 0.0)

    def _proposing(self, x: Tensor, squared: Tensor, query: bool) -> Tensor:
        """Rows whose inner products have, for a query, the order of the similarity.

        Euclidean: <a, b> - |b|²/2 through one more column.
        """
        wider = self.similarity == "euclidean"
        out = x.new_empty(x.shape[0], x.shape[1] + wider, dtype=torch.float32)
        for i in range(0, len(x), 8192):
            part, lengths = x[i : i + 8192].double(), squared[i : i + 8192, None]
            if self.similarity == "cosine":
                part = part * torch.where(lengths > 0, lengths.rsqrt(), 0.0)
            out[i : i + 8192, : x.shape[1]] = part * self._scale
        if wider:
            out[:, -1] = 1.0 if query else squared * (-0.5 * self._scale**2)
        return out


def nearest(
    queries: Tensor,
    gallery: Tensor | None = None,
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
    checks.whole("k", k, 1)
    checks.one_of("backend", backend, BACKENDS)
    if gallery is not None:
        checks.rows("gallery", gallery)
        checks.same_device("gallery", gallery, queries, "queries")
        checks.dimensions("gallery", gallery, queries.shape[1], "queries have")
    space = Space(queries, gallery, similarity, budget)
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
        """(q, k) each: columns of the nearest of the queries `rows`, -1 where there are no more, and similarities."""
        cols = _propose(self.space, rows, k) if self.index is None else _ask(self.index, self.space, rows, k)  # (q, w)
        if cols is None:
            halves = [self(half, k) for half in rows.chunk(2)]
            return torch.cat([indices for indices, _ in halves]), torch.cat([values for _, values in halves])
        cols = torch.nn.functional.pad(cols, (0, max(0, k - cols.shape[1])), value=-1)
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
    most, mask = budget // 2 // _LISTED if len(tile) > 1 else tile.numel(), tile > low
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
    tile = space.tile(rows)
    found = above(tile, kth_floor(tile, k) - 2 * space.error[rows, None], space.budget)
    return None if found is None else found[1]


def _faiss_index(space: Space) -> Any:
    import faiss

    index = faiss.IndexFlatIP(space.gallery.shape[1] + (space.similarity == "euclidean"))
    for i in range(0, len(space.gallery), 2**16):
        index.add(space.gallery_proposers(slice(i, i + 2**16)).cpu().numpy())
    return index


def _ask(index: Any, space: Space, rows: Tensor, k: int) -> Tensor | None:
    """As many as it takes: the last one proposed must be too far to belong. None where that is beyond the budget."""
    size, error = len(space.gallery), space.error[rows].cpu()
    wanted = min(size, k + space.own + 16)
    while wanted > 0:
        if len(rows) > 1 and len(rows) * wanted * _LISTED > space.budget // 2:
            return None
        values, cols = (torch.from_numpy(part) for part in index.search(space.proposers(rows).cpu().numpy(), wanted))
        kth = values[:, min(k + space.own, wanted) - 1]
        if wanted == size or bool((values[:, -1] < kth - 2 * error).all()):
            break
        wanted = min(size, 2 * wanted)
    else:
        return rows.new_zeros(len(rows), 0)
    cols = cols.to(rows.device)
    if space.own:
        cols = cols.masked_fill(cols == rows[:, None], size)
    cols = cols.sort(dim=1).values
    return cols.masked_fill(cols == size, -1)


def _sum(x: Tensor) -> Tensor:
    """Sums of rows by halving: additions of whole columns, so that no device or thread count can reorder them."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        rest = x[..., 2 * half :]
        x = x[..., :half] + x[..., half : 2 * half]
        x = torch.cat([x, rest], dim=-1) if rest.shape[-1] else x
    return x.squeeze(-1)


def _squared_lengths(name: str, x: Tensor) -> Tensor:
    """(N,) in float64; rows that are not finite are refused, whatever the device."""
    parts = [_sum(part.double().square()) for part in torch.split(x, 8192)]
    squared = torch.cat(parts) if parts else x.new_zeros(0, dtype=torch.float64)
    wrong = int((~(squared < 1e150)).sum())
    if wrong:
        raise ValueError(f"{name} must be finite (and shorter than 1e75), got {wrong} rows that are not")
    return torch.where(squared > 1e-150, squared, 0.0)  # beyond it a product of two would vanish


def _top(squared: Tensor) -> float:
    return float(squared.max()) if len(squared) else 0.0


def _exponent(squared: float) -> int:
    """e with sqrt(squared) <= 2^e."""
    return int(torch.frexp(torch.tensor(squared, dtype=torch.float64)).exponent + 1) // 2 if squared > 0 else 0


@contextmanager
def _plain_float32(device: torch.device) -> Iterator[None]:
    """Products in float32 proper, whatever shortcuts (TF32, bfloat16) the program allows elsewhere."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
