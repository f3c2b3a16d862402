"""Exact float64 similarities that decide, and products that propose, with a bound on their difference.

Products are of float32, or of float64 where that bound leaves too much in doubt (`Space.sharpen`).

Memory: a copy of the rows that propose counts towards the budget. A copy that would take more than half of it is not
made; its parts are computed when they are needed.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from nearkin.core import checks
from nearkin.evaluation.retrieval import duplicate_rows

__all__ = ["CELL", "LISTED", "SIMILARITIES", "Space", "require_float64", "slices"]

SIMILARITIES = ("cosine", "dot", "euclidean")

CELL = 16  # bytes that a (query, gallery) cell of a tile needs,
LISTED = 96  # and one that is a candidate
_BLOCK, _WIDTH = 512, 2**16  # queries and columns of a tile: more gains nothing


class Space:
    """Prepared queries and gallery. Queries and gallery items are named by their index everywhere.

    own: the gallery has the items of the queries, as other rows (`expansion`): query i does not find item i.
    """

    def __init__(
        self, queries: Tensor, gallery: Tensor | None, similarity: str, budget: int, *, own: bool = False
    ) -> None:
        checks.one_of("similarity", similarity, SIMILARITIES)
        checks.integer("budget", budget, 1)
        require_float64(queries.device)
        self.queries, self.same_rows = queries.detach(), gallery is None
        self.self_search = self.same_rows or own
        self.gallery = self.queries if gallery is None else gallery.detach()
        self.similarity, self.budget, self._full_budget = similarity, budget, budget
        self._extra = 2 if similarity == "euclidean" else 0  # columns
        self.active: Tensor | None = None  # gallery items that take part, ascending; all where None
        self.labels: Tensor | None = None  # (G,) of a set that searches itself for items of other classes
        self._left = _squared_lengths("embeddings" if self.same_rows else "queries", self.queries)  # (Q,) float64
        self._right = self._left if self.same_rows else _squared_lengths("gallery", self.gallery)
        longest = max(_top(self._left), _top(self._right))
        self._scale = 2.0 ** -_exponent(longest) if similarity != "cosine" else 1.0  # a power of two: exact
        self._propose_in(torch.float32)

    def _propose_in(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._copy()
        # |computed - exact| <= (n + 2) u sum|a b| for inner products of n rounded numbers; Cauchy-Schwarz; some spare.
        # Sums in float64 differ from those of `exact` by as much again, since that one rounds too.
        reach = float(self._reach(self._right).max()) if len(self.gallery) else 0.0
        roundings = (self.queries.shape[1] + 33) * (2 if dtype == torch.float64 else 1)
        spread = self._reach(self._left) * (1.0001 * reach * torch.finfo(dtype).eps / 2 * roundings)
        self.error = spread.to(dtype) + 1e-30  # (Q,)

    def sharpen(self, extra: int) -> None:
        """Proposes in float64 from now on: twice the time of a product, and hardly anything but ties is in doubt."""
        self._propose_in(torch.float64)
        self.blocks(extra)  # without the copies, where they leave too little

    def _copy(self) -> None:
        """Copies as many rows as fit into half the budget: of both sides, of the queries, or none."""
        width = self.dtype.itemsize * (self.queries.shape[1] + self._extra)
        first, second = width * len(self.queries), 0 if self.same_rows else width * len(self.gallery)
        self.lefts: Tensor | None = None  # (Q, D) rows that propose
        self.rights: Tensor | None = None  # (G, D), where the gallery is another set
        if first <= self._full_budget // 2:
            self.lefts = self._proposing(self.queries, self._left, query=True)
            if not self.same_rows and first + second <= self._full_budget // 2:
                self.rights = self._proposing(self.gallery, self._right, query=False)
        spent = first * (self.lefts is not None) + second * (self.rights is not None)
        self.budget = max(self._full_budget - spent, 1)

    def release(self) -> None:
        """Frees the copies; rows that propose are then computed when they are needed."""
        self.lefts, self.rights, self.budget = None, None, self._full_budget

    @property
    def size(self) -> int:
        """How many gallery items take part; a tile has as many columns."""
        return len(self.gallery) if self.active is None else len(self.active)

    def drop_duplicates(self, k: int) -> None:
        """Drops the gallery items that cannot be among the k nearest of any query: k equal rows precede them."""
        copies = duplicate_rows.earlier_copies(self.gallery)
        active = (copies < k + int(self.self_search)).nonzero().flatten()  # one of the equal rows may be the query
        if len(active) < len(copies):
            self.active = active

    def items(self, cols: Tensor) -> Tensor:
        """Gallery items of columns; -1 (none) stays -1."""
        return cols if self.active is None else torch.where(cols < 0, cols, self.active[cols])

    def items_of(self, columns: slice) -> Tensor | slice:
        """Gallery items of a range of columns."""
        return columns if self.active is None else self.active[columns]

    def column(self, items: Tensor) -> Tensor:
        """Columns of gallery items, -1 for those that take no part."""
        if self.active is None:
            return items
        at = torch.searchsorted(self.active, items).clamp_(max=len(self.active) - 1)
        return torch.where(self.active[at] == items, at, -1)

    def blocks(self, extra: int = 0) -> list[slice]:
        """Slices of the queries whose tiles, with `extra` bytes per row, stay within the budget."""
        least = len(self.gallery) * (CELL + LISTED) + extra
        if least > self.budget:  # the memory of the copies is needed for tiles
            self.release()
        if least > self.budget:
            raise ValueError(f"budget must hold one query against the gallery: {least} bytes, got {self.budget}")
        step = max(1, min(_BLOCK, self.budget // 2 // max(min(len(self.gallery), _WIDTH) * CELL + extra, 1)))
        return slices(len(self.queries), step)

    def tile(self, left: Tensor, right: Tensor, out: Tensor) -> Tensor:
        """Proposing similarities of rows from `left` and `right`, (q, g), written to `out`."""
        with _plain_float32(out.device):
            return torch.mm(left, right.T, out=out)

    def left(self, rows: Tensor | slice) -> Tensor:
        """Rows of some queries that propose, from the copy or computed now."""
        if self.lefts is not None:
            return self.lefts[rows]
        return self._proposing(self.queries[rows], self._left[rows], query=True)

    def right(self, piece: Tensor | slice) -> Tensor:
        """The same for some columns."""
        if self.active is not None:
            piece = self.active[piece]
        copy = self.lefts if self.same_rows else self.rights
        if copy is None:
            return self._proposing(self.gallery[piece], self._right[piece], query=False)
        return _swapped(copy[piece]) if self.same_rows and self.similarity == "euclidean" else copy[piece]

    def proposed(self, rows: Tensor, items: Tensor) -> Tensor:
        """Proposing similarities of queries (n,) with some gallery items of each, (n, m); anything where items are -1.

        Item by item where they are few, else from tiles: a product with everything costs a twentieth per pair.
        """
        out = torch.full(items.shape, torch.inf, device=rows.device)
        step = max(1, min(self.budget // 8, 2**24) // max(8 * items.shape[1] * (self.queries.shape[1] + 2), 1))
        if not items.numel():
            return out
        if items.shape[1] * 16 > self.size or step < 16:
            self._proposed_by_tiles(rows, items, out)
            return out
        for part in slices(len(rows), step):
            cols = self.column(items[part]).clamp(min=0)
            right = self.right(cols.flatten()).view(*cols.shape, self.queries.shape[1] + self._extra)
            with _plain_float32(out.device):
                out[part] = torch.einsum("nd,nmd->nm", self.left(rows[part]), right)
        return out

    def _proposed_by_tiles(self, rows: Tensor, items: Tensor, out: Tensor) -> None:
        step = max(1, min(1024, self.budget // (8 * CELL * min(4096, max(self.size, 1)))))
        cols = self.column(items)
        for piece in slices(self.size, 4096):
            right = self.right(piece)
            for part in slices(len(rows), step):
                tile = self.tile(self.left(rows[part]), right, right.new_empty(part.stop - part.start, len(right)))
                row, slot = ((cols[part] >= piece.start) & (cols[part] < piece.stop)).nonzero(as_tuple=True)
                out[part][row, slot] = tile[row, cols[part][row, slot] - piece.start]

    def range_of(self, rows: Tensor, proposed: Tensor) -> tuple[Tensor, Tensor]:
        """Between which two numbers the exact similarities lie, (n,) float64, of proposed ones of queries (n,)."""
        error = self.error[rows].double()
        ends = proposed.double() - error, proposed.double() + error
        if self.similarity == "cosine":
            low, high = (end * end.abs() for end in ends)
        else:
            unit = (2.0 if self.similarity == "euclidean" else 1.0) / self._scale**2
            low, high = (end * unit for end in ends)
        return low, high

    def exact(self, rows: Tensor, items: Tensor) -> Tensor:
        """The similarity that decides, float64, of pairs (P,) of queries and gallery items.

        cosine: c|c|, c = <a, b> / (|a| |b|), which has the order of c and needs no root, so that multiples of one row
        tie; 0 for a zero row. dot: <a, b>. euclidean: -|a - b|².
        """
        dim = self.queries.shape[1]
        chunk = max(1, min(self.budget // (64 * dim), (2**18 if rows.device.type == "cpu" else 2**26) // dim))
        parts = [self._exact(r, c) for r, c in zip(torch.split(rows, chunk), torch.split(items, chunk), strict=True)]
        return torch.cat(parts) if parts else rows.new_zeros(0, dtype=torch.float64)

    def _exact(self, rows: Tensor, items: Tensor) -> Tensor:
        a, b = self.queries[rows].double(), self.gallery[items].double()
        if self.similarity == "euclidean":
            return -_sum((a - b).square())
        dot = _sum(a * b)
        if self.similarity == "dot":
            return dot
        lengths = self._left[rows] * self._right[items]
        return torch.where(lengths > 0, dot * dot.abs() / lengths, 0.0)

    def _reach(self, squared: Tensor) -> Tensor:
        """Lengths of the rows that propose, float64."""
        if self.similarity == "cosine":
            return (squared > 0).double()
        scaled = squared * self._scale**2
        return scaled.sqrt() if self.similarity == "dot" else (scaled + (scaled / 2).square() + 1.0).sqrt()

    def _proposing(self, x: Tensor, squared: Tensor, query: bool) -> Tensor:
        """Rows whose inner products have the order of the similarity, the same either way round.

        Euclidean: <a, b> - |a|²/2 - |b|²/2 through two more columns.
        """
        out = x.new_empty(x.shape[0], x.shape[1] + self._extra, dtype=self.dtype)
        for i in range(0, len(x), 8192):
            part, lengths = x[i : i + 8192].double(), squared[i : i + 8192, None]
            if self.similarity == "cosine":
                part = part * torch.where(lengths > 0, lengths.rsqrt(), 0.0)
            out[i : i + 8192, : x.shape[1]] = part * self._scale
        if self._extra:
            out[:, -2 if query else -1] = squared * (-0.5 * self._scale**2)
            out[:, -1 if query else -2] = 1.0
        return out


def slices(number: int, step: int) -> list[slice]:
    return [slice(i, min(i + step, number)) for i in range(0, number, step)]


def require_float64(device: torch.device) -> None:
    """Refuses a device without float64, in which ties are decided."""
    try:
        torch.empty(0, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError, AssertionError):
        raise ValueError(
            f"embeddings must be on a device with float64, in which ties are decided, got {device.type}; use .cpu()"
        ) from None


def _swapped(rows: Tensor) -> Tensor:
    """Rows of queries as rows of a gallery: the two columns of the Euclidean distance change places."""
    out = rows.clone()
    out[:, -2:] = rows[:, -2:].flip(1)
    return out


def _sum(x: Tensor) -> Tensor:
    """Sums of rows by halving: additions of entire columns, which no device or thread count can reorder."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        rest = x[..., 2 * half :]
        x = x[..., :half] + x[..., half : 2 * half]
        x = torch.cat([x, rest], dim=-1) if rest.shape[-1] else x
    return x.squeeze(-1)


def _squared_lengths(name: str, x: Tensor) -> Tensor:
    """(N,) in float64; refuses rows that are not finite, on any device."""
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
    """Products in true float32, whatever shortcuts (TF32, bfloat16) the program allows elsewhere."""
    previous = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(previous)
