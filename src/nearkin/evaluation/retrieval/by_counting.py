"""Positions of positives by counting: how many negatives are nearer than each positive of each query, exactly.

The similarities of the positives are computed first. A tile of products then matters to a query only where it exceeds
the lowest of them that can still be within its limit. Each such negative is counted by a search among the query's
positives; where the error bound leaves a doubt, the exact similarity decides. No list of neighbours is built. A set
that is its own gallery needs half of the products: one tile serves its rows and its columns.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from nearkin.dist.group import ProcessGroup
from nearkin.evaluation.arrays import Progress
from nearkin.evaluation.retrieval.exact import Space, slices
from nearkin.evaluation.retrieval.relevance import Relevance

__all__ = ["BEYOND", "Limits", "Positions", "positions"]

BEYOND = 2**40  # larger than any position
_GROUP = 16  # cells of a tile of which first only the largest is looked at
_SIDE = {"cpu": 2048}  # rows and columns of a tile at most: what a cache holds
_PAIR_BYTES = 128  # working memory for a cell that is looked at, or for a pair in doubt


class Positions(NamedTuple):
    """Some queries, and where their positives are in the order of similarity, from 1."""

    rows: Tensor  # (q,)
    positions: Tensor  # (q, m) ascending; BEYOND where there are no more


class Limits(NamedTuple):
    """Positions that matter: of the nearest positive, and of the others; always those up to the number of positives."""

    first: int
    others: int


def positions(
    space: Space,
    relevance: Relevance,
    limits: Limits,
    progress: Progress | None = None,
    group: ProcessGroup | None = None,
) -> Iterator[Positions]:
    """Positions of the positives, for some queries at a time; BEYOND for those beyond their limit.

    A group shares the queries, or the tiles where one tile serves both directions; each process yields some queries.
    """
    total = len(space.queries)
    step = max(1, space.budget // 8 // relevance.list_bytes)
    order = torch.arange(total, device=space.queries.device)
    if total > step:
        order = relevance.counts.argsort(stable=True)  # as many positives: as long rows
    mirrored = space.same_rows and total <= step and space.active is None
    if group is not None and not mirrored:
        order = order[group.rank :: group.size]
        total = len(order)
    for part in slices(total, step):
        rows = order[part]
        counter = Counter(space, relevance, rows, limits)
        for done, of in _pass(space, counter, mirrored, group if mirrored else None):
            if progress is not None:
                progress(min(total, part.start + (part.stop - part.start) * done // of), total)
        if group is None or not mirrored:
            yield Positions(rows, counter.positions())
        else:
            counter.add_up(group)
            share = group.share(total)
            yield Positions(rows[share], counter.positions()[share])


class Counter:
    """The positives of some queries, by ascending proposed similarity, and how many negatives were nearer so far."""

    def __init__(self, space: Space, relevance: Relevance, rows: Tensor, limits: Limits) -> None:
        self.space, self.relevance, self.rows = space, relevance, rows
        items = relevance.positives(rows)
        items = items.masked_fill(space.column(items) < 0, -1)  # those left out are beyond any limit
        proposed = space.proposed(rows, items).masked_fill_(items < 0, torch.inf)
        self.proposed, order = proposed.sort(dim=1)  # (n, m)
        self.positives = items.gather(1, order)
        self.width = items.shape[1]
        self.doubt = 2 * space.error[rows]  # two errors: the positive's and the negative's
        self.above = torch.zeros(len(rows), self.width + 1, dtype=torch.int32, device=rows.device)  # j surely below
        self.decided = torch.zeros(len(rows), self.width, dtype=torch.int32, device=rows.device)
        self.exact = torch.full(items.shape, torch.nan, dtype=torch.float64, device=rows.device)  # once needed
        self.open = self.positives >= 0  # (n, m) whose position may be within its limit
        best = self.proposed.masked_fill(~self.open, -torch.inf).amax(1) if self.width else self.doubt
        leading = self.proposed >= (best - self.doubt)[:, None]  # one of these is the nearest positive
        wide, narrow = (relevance.counts[rows].clamp(min=most)[:, None] for most in limits)
        self.limit = torch.where(leading, wide, narrow).int()
        self.pending: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self.waiting = self.fresh = 0
        self.floor = rows.new_full((len(rows),), torch.inf, dtype=torch.float32)
        self._raise_floor()

    def take(self, query: Tensor, item: Tensor, value: Tensor) -> None:
        """Counts gallery items (P,) for queries (P,), indices into `rows`, by their proposed similarities."""
        negative = self.relevance.is_negative(self.rows[query], item).nonzero().flatten()
        query, item, value = query[negative], item[negative], value[negative]
        doubt = self.doubt[query]
        low = self._below(query, value - doubt, equal=False)
        place = query * (self.width + 1) + low
        self.above.view(-1).scatter_add_(0, place, torch.ones_like(place, dtype=torch.int32))
        following = self.proposed.view(-1)[(query * self.width + low).clamp_(max=self.proposed.numel() - 1)]
        unsure = ((low < self.width) & (following <= value + doubt)).nonzero().flatten()
        self.fresh += len(query)
        if len(unsure):
            self.pending.append((query[unsure], item[unsure], value[unsure], low[unsure]))
            self.waiting += len(unsure)
        if self.fresh > self.above.numel() or self.waiting > max(
            256, min(2**18, self.space.budget // 8 // _PAIR_BYTES)
        ):
            self.settle()

    def settle(self) -> None:
        """Decides what is in doubt and skips what is beyond the limit by now."""
        pending, self.pending, self.waiting, self.fresh = self.pending, [], 0, 0
        self._raise_floor()
        if not pending:
            return
        query, item, value, low = (torch.cat(parts) for parts in zip(*pending, strict=True))
        number = self._below(query, value + self.doubt[query], equal=True) - low  # positives in doubt
        most = max(1, self.space.budget // 8 // _PAIR_BYTES)
        group = number.cumsum(0) // most
        for part in torch.split(torch.arange(len(number), device=query.device), torch.bincount(group).tolist()):
            if len(part):
                self._decide(query[part], item[part], low[part], number[part])
        self._raise_floor()

    def add_up(self, group: ProcessGroup) -> None:
        """Adds the counts of all processes, each of which has seen other tiles.

        A positive that one process skipped has, on that process alone, as many negatives before it as its limit.
        """
        self.settle()
        if self.width:
            self.decided = group.total(self._counts())
            self.above.zero_()

    def _decide(self, query: Tensor, item: Tensor, low: Tensor, number: Tensor) -> None:
        """Pairs (P,) of a query and a negative, each in doubt with `number` positives from the slot `low` on."""
        each = torch.arange(len(query), device=query.device).repeat_interleave(number)
        slot = low[each] + torch.arange(len(each), device=query.device) - (number.cumsum(0) - number)[each]
        flat = query[each] * self.width + slot
        matters = self.open.view(-1)[flat].nonzero().flatten()
        each, flat = each[matters], flat[matters]
        needed = torch.zeros(len(query), dtype=torch.bool, device=query.device)
        needed[each] = True
        similarity = torch.zeros(len(query), dtype=torch.float64, device=query.device)
        similarity[needed] = self.space.exact(self.rows[query[needed]], item[needed])
        self._compute_exact(flat)
        positive = self.positives.view(-1)[flat]
        of_positive, of_negative = self.exact.view(-1)[flat], similarity[each]
        nearer = (of_negative > of_positive) | ((of_negative == of_positive) & (item[each] < positive))
        self.decided.view(-1).scatter_add_(0, flat, nearer.int())

    def _compute_exact(self, flat: Tensor) -> None:
        """Fills in the exact similarities of these positives, each once."""
        needed = torch.zeros(self.exact.numel(), dtype=torch.bool, device=flat.device)
        needed[flat] = True
        new = (needed & self.exact.view(-1).isnan()).nonzero().flatten()
        row = torch.div(new, self.width, rounding_mode="floor")
        self.exact.view(-1)[new] = self.space.exact(self.rows[row], self.positives.view(-1)[new])

    def _raise_floor(self) -> None:
        """What a negative must exceed to matter: the lowest positive whose position may be within the limit."""
        if not self.width:
            return
        self.open &= self._counts() < self.limit
        some, lowest = self.open.max(1)
        floor = self.proposed.gather(1, lowest[:, None]).squeeze(1) - self.doubt
        self.floor.copy_(torch.where(some, floor, torch.inf))

    def _counts(self) -> Tensor:
        """(n, m) negatives known to be nearer than each positive."""
        return self.above[:, 1:].flip(1).cumsum(1, dtype=torch.int32).flip(1) + self.decided

    def _below(self, query: Tensor, value: Tensor, equal: bool) -> Tensor:
        """(P,) how many of the query's positives have a proposed similarity < value, or <= value; by bisection."""
        at, proposed = torch.zeros_like(query), self.proposed.view(-1)
        first, step = query * self.width, 1 << self.width.bit_length() >> 1
        while step:
            probe = proposed[first + (at + (step - 1)).clamp_(max=self.width - 1)]
            under = (probe <= value) if equal else (probe < value)
            at += step * (under & (at + step <= self.width))
            step //= 2
        return at

    def positions(self) -> Tensor:
        """(n, m), at least one column."""
        self.settle()
        if not self.width:
            return torch.full((len(self.rows), 1), BEYOND, device=self.rows.device)
        self._raise_floor()
        nearer = self._counts().long().masked_fill_(~self.open, BEYOND).sort(dim=1).values
        return nearer + torch.arange(1, self.width + 1, device=nearer.device)  # as many negatives before the first, …


def _pass(space: Space, counter: Counter, mirrored: bool, group: ProcessGroup | None) -> Iterator[tuple[int, int]]:
    """Passes every tile to the counter, or every n-th in a group; yields how many tiles are done, of how many."""
    height, width = _sides(space, counter.rows, mirrored)
    pieces, blocks = slices(space.size, width), slices(len(counter.rows), height)
    if not counter.width or not pieces:
        return
    room = counter.proposed.new_empty(height * width)
    done, of = 0, len(pieces) * (len(pieces) + 1) // 2 if mirrored else len(pieces) * len(blocks)
    for piece in pieces:
        right = None
        for block in blocks:
            if mirrored and block.start > piece.start:
                break
            done += 1
            if group is not None and done % group.size != group.rank:
                continue
            right = space.right(piece) if right is None else right
            left = space.left(block if mirrored else counter.rows[block])
            tile = _padded(room, len(left), len(right))
            space.tile(left, right, tile[: len(left), : len(right)])
            _count_tile(counter, tile, block, piece, across=False)
            if mirrored and block != piece:
                _count_tile(counter, tile, piece, block, across=True)
            yield done, of


def _sides(space: Space, rows: Tensor, mirrored: bool) -> tuple[int, int]:
    """Rows and columns of a tile, in whole groups: square where it serves both directions or must fit a cache."""
    cells = space.budget // 15
    side = max(1, min(_SIDE.get(rows.device.type, 8192), math.isqrt(cells)) // _GROUP) * _GROUP
    if mirrored or rows.device.type in _SIDE:
        return side, side
    height = max(1, min(-(-len(rows) // _GROUP), 4 * side // _GROUP)) * _GROUP  # the fewer tiles the better
    return height, max(1, min(cells // height, 2**16) // _GROUP) * _GROUP


def _padded(room: Tensor, height: int, width: int) -> Tensor:
    """A tile in reused memory whose sides are whole groups; -inf beyond what will be filled."""
    sides = [-(-side // _GROUP) * _GROUP for side in (height, width)]
    tile = room[: sides[0] * sides[1]].view(sides[0], sides[1])
    tile[height:].fill_(-torch.inf)
    tile[:, width:].fill_(-torch.inf)
    return tile


def _count_tile(counter: Counter, tile: Tensor, queries: slice, items: slice, across: bool) -> None:
    """Counts the cells above the floor of their query, which is a row of the tile, or a column where `across`.

    The largest of each group of cells is compared first: nearly all groups end there.
    """
    height, width = tile.shape
    if across:
        cells = tile.view(height // _GROUP, _GROUP, width)
    else:
        cells = tile.view(height, _GROUP, width // _GROUP)
    best = cells.amax(1)  # (groups, queries) or (queries, groups)
    floor = best.new_full((width if across else height,), torch.inf)
    number = queries.stop - queries.start
    most = max(1, counter.space.budget // 4 // _PAIR_BYTES // _GROUP)
    groups = [slice(0, best.shape[0 if across else 1])]
    while groups:
        part = groups.pop()
        floor[:number] = counter.floor[queries]
        mask = best[part] > floor if across else best[:, part] > floor[:, None]
        first, second = mask.nonzero(as_tuple=True)
        if len(first) > most and part.stop - part.start > 1:
            middle = (part.start + part.stop) // 2
            groups += [slice(middle, part.stop), slice(part.start, middle)]
            continue
        first, second = (first + part.start, second) if across else (first, second + part.start)
        for a, b in zip(torch.split(first, most), torch.split(second, most), strict=True):
            _count_groups(counter, cells, a, b, queries.start, items.start, across)


def _count_groups(
    counter: Counter, cells: Tensor, first: Tensor, second: Tensor, queries: int, items: int, across: bool
) -> None:
    """Counts the cells of some groups (P,), named by their indices in the first and last dimension of `cells`."""
    if not len(first):
        return
    values = cells[first, :, second]  # (P, _GROUP)
    query = (second if across else first) + queries
    which, within = (values > counter.floor[query][:, None]).nonzero(as_tuple=True)
    first, second = first[which], second[which]
    column = (first * _GROUP + within if across else within * cells.shape[2] + second) + items
    counter.take(query[which], counter.space.items(column), values[which, within])
