"""How many strangers are nearer than each kin of each query, exactly and without lists of neighbours.

The kin's similarities are known first. A tile of products then concerns a query only where it exceeds the lowest of
them that still matters; each such stranger is counted where it surely belongs, by a search among the query's kin, and
where the bound on the error leaves a doubt, the exact similarity decides. A set that is its own gallery needs half of
the products: one tile serves its rows and its columns.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from nearkin.dist.group import ProcessGroup
from nearkin.evaluation.retrieval.exact import Space, slices
from nearkin.evaluation.retrieval.relevance import Kinship

BEYOND = 2**40  # a rank nobody has
_GROUP = 16  # cells of a tile of which first only the largest is looked at
_SIDE = {"cpu": 2048}  # rows and columns of a tile at most: what a cache holds
_FOUND = 128  # bytes of working memory for a cell that is looked at, or for a pair in doubt


class Ranked(NamedTuple):
    rows: Tensor  # (q,)
    ranks: Tensor  # (q, m) of their kin, ascending; BEYOND where there are no more


class Limits(NamedTuple):
    """Ranks that matter: of the nearest kin, and of the others; and in any case those up to the number of kin."""

    first: int
    others: int


def ranks(
    space: Space,
    kinship: Kinship,
    limits: Limits,
    progress: Callable[[int, int], None] | None = None,
    group: ProcessGroup | None = None,
) -> Iterator[Ranked]:
    """Ranks of the kin, for some queries at a time; BEYOND for those beyond their limit.

    A group shares the queries, or where one tile serves two ways the tiles; each of it answers for some queries.
    """
    total = len(space.queries)
    step = max(1, space.budget // 8 // kinship.cost)
    everyone = torch.arange(total, device=space.queries.device)
    order = everyone if total <= step else kinship.number.argsort(stable=True)  # as many kin: as long rows
    mirrored = space.own and total <= step and space.taking is None
    if group is not None and not mirrored:
        order = order[group.rank :: group.size]
        total = len(order)
    for rows_here in slices(total, step):
        rows = order[rows_here]
        counter = Counter(space, kinship, rows, limits)
        for done, of in _pass(space, counter, mirrored, group if mirrored else None):
            if progress is not None:
                progress(min(total, rows_here.start + (rows_here.stop - rows_here.start) * done // of), total)
        if group is None or not mirrored:
            yield Ranked(rows, counter.ranks())
        else:
            counter.add_up(group)
            own = group.share(total)
            yield Ranked(rows[own], counter.ranks()[own])


class Counter:
    """The kin of some queries, by ascending proposed similarity, and how many strangers were nearer so far."""

    def __init__(self, space: Space, kinship: Kinship, rows: Tensor, limits: Limits) -> None:
        self.space, self.kinship, self.rows = space, kinship, rows
        kin = kinship.items(rows)
        kin = kin.masked_fill(space.column(kin) < 0, -1)  # those left out stand beyond any limit
        proposed = space.proposed(rows, kin).masked_fill_(kin < 0, torch.inf)
        self.proposed, order = proposed.sort(dim=1)  # (n, m)
        self.kin = kin.gather(1, order)
        self.width = kin.shape[1]
        self.doubt = 2 * space.error[rows]  # two errors: the kin's and the stranger's
        self.above = torch.zeros(len(rows), self.width + 1, dtype=torch.int32, device=rows.device)  # j kin surely below
        self.decided = torch.zeros(len(rows), self.width, dtype=torch.int32, device=rows.device)
        self.exact = torch.full(kin.shape, torch.nan, dtype=torch.float64, device=rows.device)  # of kin, once needed
        self.open = self.kin >= 0  # (n, m) whose rank may be within its limit
        best = self.proposed.masked_fill(~self.open, -torch.inf).amax(1) if self.width else self.doubt
        leading = self.proposed >= (best - self.doubt)[:, None]  # one of these is the nearest kin
        wide, narrow = (kinship.number[rows].clamp(min=most)[:, None] for most in limits)
        self.limit = torch.where(leading, wide, narrow).int()
        self.pending: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self.waiting = self.fresh = 0
        self.floor = rows.new_full((len(rows),), torch.inf, dtype=torch.float32)
        self._raise_floor()

    def take(self, query: Tensor, item: Tensor, value: Tensor) -> None:
        """Counts gallery items (P,) for queries (P,), places in `rows`, by their proposed similarities."""
        stranger = self.kinship.strangers(self.rows[query], item).nonzero().flatten()
        query, item, value = query[stranger], item[stranger], value[stranger]
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
        if self.fresh > self.above.numel() or self.waiting > max(256, min(2**18, self.space.budget // 8 // _FOUND)):
            self.settle()

    def settle(self) -> None:
        """Decides what is in doubt, and leaves alone what is beyond the limit by now."""
        pending, self.pending, self.waiting, self.fresh = self.pending, [], 0, 0
        self._raise_floor()
        if not pending:
            return
        query, item, value, low = (torch.cat(parts) for parts in zip(*pending, strict=True))
        number = self._below(query, value + self.doubt[query], equal=True) - low  # kin in doubt
        most = max(1, self.space.budget // 8 // _FOUND)
        group = number.cumsum(0) // most
        for part in torch.split(torch.arange(len(number), device=query.device), torch.bincount(group).tolist()):
            if len(part):
                self._decide(query[part], item[part], low[part], number[part])
        self._raise_floor()

    def add_up(self, group: ProcessGroup) -> None:
        """Counts of all ranks, each of which has met other tiles.

        Whom one of them left alone has on that rank alone as many strangers before it as its limit.
        """
        self.settle()
        if self.width:
            self.decided = group.total(self._counts())
            self.above.zero_()

    def _decide(self, query: Tensor, item: Tensor, low: Tensor, number: Tensor) -> None:
        """Pairs (P,) of a query and a stranger, each in doubt with `number` kin from the slot `low` on."""
        each = torch.arange(len(query), device=query.device).repeat_interleave(number)
        slot = low[each] + torch.arange(len(each), device=query.device) - (number.cumsum(0) - number)[each]
        flat = query[each] * self.width + slot
        matters = self.open.view(-1)[flat].nonzero().flatten()
        each, flat = each[matters], flat[matters]
        asked = torch.zeros(len(query), dtype=torch.bool, device=query.device)
        asked[each] = True
        stranger = torch.zeros(len(query), dtype=torch.float64, device=query.device)
        stranger[asked] = self.space.exact(self.rows[query[asked]], item[asked])
        self._know(flat)
        kin, own, theirs = self.kin.view(-1)[flat], self.exact.view(-1)[flat], stranger[each]
        nearer = (theirs > own) | ((theirs == own) & (item[each] < kin))
        self.decided.view(-1).scatter_add_(0, flat, nearer.int())

    def _know(self, flat: Tensor) -> None:
        """Exact similarities of kin, each worked out once."""
        wanted = torch.zeros(self.exact.numel(), dtype=torch.bool, device=flat.device)
        wanted[flat] = True
        new = (wanted & self.exact.view(-1).isnan()).nonzero().flatten()
        row = torch.div(new, self.width, rounding_mode="floor")
        self.exact.view(-1)[new] = self.space.exact(self.rows[row], self.kin.view(-1)[new])

    def _raise_floor(self) -> None:
        """What a stranger must exceed to matter: the lowest kin whose rank may be within the limit."""
        if not self.width:
            return
        self.open &= self._counts() < self.limit
        some, lowest = self.open.max(1)
        floor = self.proposed.gather(1, lowest[:, None]).squeeze(1) - self.doubt
        self.floor.copy_(torch.where(some, floor, torch.inf))

    def _counts(self) -> Tensor:
        """(n, m) strangers known to be nearer than each kin."""
        return self.above[:, 1:].flip(1).cumsum(1, dtype=torch.int32).flip(1) + self.decided

    def _below(self, query: Tensor, value: Tensor, equal: bool) -> Tensor:
        """(P,) how many of the query's kin have a proposed similarity < value, or <= value; by halving."""
        at, kin = torch.zeros_like(query), self.proposed.view(-1)
        first, step = query * self.width, 1 << self.width.bit_length() >> 1
        while step:
            probe = kin[first + (at + (step - 1)).clamp_(max=self.width - 1)]
            under = (probe <= value) if equal else (probe < value)
            at += step * (under & (at + step <= self.width))
            step //= 2
        return at

    def ranks(self) -> Tensor:
        """(n, m), at least one column."""
        self.settle()
        if not self.width:
            return torch.full((len(self.rows), 1), BEYOND, device=self.rows.device)
        self._raise_floor()
        nearer = self._counts().long().masked_fill_(~self.open, BEYOND).sort(dim=1).values
        return nearer + torch.arange(1, self.width + 1, device=nearer.device)  # as many strangers before the first, …


def _pass(space: Space, counter: Counter, mirrored: bool, group: ProcessGroup | None) -> Iterator[tuple[int, int]]:
    """Shows every tile to the counter, or a group's tiles in turn; yields how many tiles are done, of how many."""
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
            _show(counter, tile, block, piece, across=False)
            if mirrored and block != piece:
                _show(counter, tile, piece, block, across=True)
            yield done, of


def _sides(space: Space, rows: Tensor, mirrored: bool) -> tuple[int, int]:
    """Rows and columns of a tile, in whole groups: square where it serves both ways or a cache is to hold it."""
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


def _show(counter: Counter, tile: Tensor, queries: slice, items: slice, across: bool) -> None:
    """The cells above the floor of their query, which is a row of the tile, or a column where `across`.

    Of each group of cells first the largest is compared: nearly all groups end there.
    """
    height, width = tile.shape
    if across:
        cells = tile.view(height // _GROUP, _GROUP, width)
    else:
        cells = tile.view(height, _GROUP, width // _GROUP)
    best = cells.amax(1)  # (groups, queries) or (queries, groups)
    floor = best.new_full((width if across else height,), torch.inf)
    number = queries.stop - queries.start
    most = max(1, counter.space.budget // 4 // _FOUND // _GROUP)
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
            _look(counter, cells, a, b, queries.start, items.start, across)


def _look(
    counter: Counter, cells: Tensor, first: Tensor, second: Tensor, queries: int, items: int, across: bool
) -> None:
    """Groups of cells (P,), by their places in the first and last dimension of `cells`, one by one."""
    if not len(first):
        return
    values = cells[first, :, second]  # (P, _GROUP)
    query = (second if across else first) + queries
    which, within = (values > counter.floor[query][:, None]).nonzero(as_tuple=True)
    first, second = first[which], second[which]
    column = (first * _GROUP + within if across else within * cells.shape[2] + second) + items
    counter.take(query[which], counter.space.items(column), values[which, within])
