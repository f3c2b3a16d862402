"""`core.facility.search` where values may be read: only items that would move, and exchanges that may be better.

Works in one thread: for a few thousand entries torch's threads wait for each other longer than they work. All exchanges
of one state are bounded at once, from each item's nearest and second nearest medoid (as in FastPAM, Schubert and
Rousseeuw 2019, arXiv:1810.05691); only those whose bound is above the present score are scored.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nearkin.core.facility import FAR, Problem, agreement, first_best, objective, owners

__all__ = ["search"]

ONE_THREAD = 2**15 - 1  # up to so many entries torch works in one thread
TOGETHER = 2**18  # entries of the matrix whose movers are found together
ROUNDING = 1e-9  # of NMI, far above that of float64
FEW = 6  # medoids, of which most can be exchanged: bounds would cost more than they save


class _Known(NamedTuple):
    """The known items alone: rows in their order, columns by class, so that a row's movers come class by class."""

    keys: Tensor  # (n, n)
    kinds: Tensor  # (n,) of the columns, 0, 1, …
    number: int  # of classes
    row_of: Tensor  # (B,) of a medoid, its row


class _State(NamedTuple):
    picks: list[int]  # rows of the medoids
    near: Tensor  # (n,) the key of each column's medoid
    second: Tensor  # (n,) and of the next nearest
    score: Tensor


def search(p: Problem, gamma: Tensor, sweeps: int) -> Tensor:
    """The key of each item's medoid, (B,); ends when a full sweep changes nothing."""
    number = int(p.num_medoids)
    rows = (p.kinds >= 0).nonzero()[:, 0]
    columns = rows[p.kinds[rows].argsort(stable=True)]
    keys = p.keys[rows[:, None], columns]
    names, kinds = p.kinds[columns].unique_consecutive(return_inverse=True)  # type: ignore[no-untyped-call]
    row_of = torch.full_like(p.kinds, 0).scatter_(0, rows, torch.arange(len(rows)))
    known = _Known(keys, kinds, len(names), row_of)
    state = _greedy(p, known, gamma, number)
    step = 0
    while step < sweeps * number and not gamma.isnan():  # a score of NaN is not above another
        slots = [(step + next_step) % number for next_step in range(min(number, sweeps * number - step))]
        exchange = _first_exchange(p, known, state, slots, gamma)
        if exchange is None:
            break
        tried, row, score = exchange
        picks = list(state.picks)
        picks[slots[tried]] = row
        state = _State(picks, *_two_nearest(keys, picks), score)
        step += tried + 1
    chosen = torch.zeros_like(p.kinds, dtype=torch.bool)
    chosen[rows[state.picks]] = True
    return owners(p, chosen)


def _greedy(p: Problem, known: _Known, gamma: Tensor, number: int) -> _State:
    near = second = known.keys.new_full((len(known.keys),), FAR)
    tries = {2**power for power in range(32)}  # after so many steps: are few enough movers left for a list?
    picks: list[int] = []
    score, pairs = gamma, None
    while len(picks) < number:
        if pairs is not None:  # an item that would not move to a row never will
            pairs = pairs[known.keys.view(-1).index_select(0, pairs) < near.index_select(0, pairs % len(near))]
        elif len(picks) in tries:
            pairs = _movers(known.keys, near)
            pairs = pairs if len(pairs) <= TOGETHER else None
        scores = _scores(p, known, known.keys, near[None], None, gamma, pairs)
        picks.append(int(first_best(p, scores)))
        row, score = known.keys[picks[-1]], scores[picks[-1]]
        near, second = torch.minimum(near, row), torch.minimum(second, torch.maximum(near, row))
    return _State(picks, near, second, score)


def _two_nearest(keys: Tensor, picks: list[int]) -> tuple[Tensor, Tensor]:
    theirs = keys.index_select(0, torch.tensor(picks))  # (medoids, n)
    near = theirs.amin(0)
    return near, theirs.masked_fill_(theirs == near, FAR).amin(0)


def _first_exchange(
    p: Problem, known: _Known, state: _State, slots: list[int], gamma: Tensor
) -> tuple[int, int, Tensor] | None:
    """The first of `slots` whose medoid can be exchanged for a better score: its place there, the row, the score."""
    slot = _slots(p, known, state.picks, state.near)
    if len(state.picks) <= FEW:
        for nth, place in enumerate(slots):
            near = torch.where(slot == place, state.second, state.near)
            score = _scores(p, known, known.keys, near[None], None, gamma)
            best = int(first_best(p, score))
            if score.amax() > state.score + p.slack:
                return nth, best, score[best]
        return None
    order = torch.tensor(slots)
    hopeful = _hopeful(p, known, state, gamma)  # (medoids, n)
    tried, rows = hopeful.index_select(0, order).nonzero().unbind(1)
    ends = torch.bincount(tried, minlength=len(slots)).cumsum(0)
    start = first = 0
    while start < len(rows):  # as many medoids at once as have n rows to score
        last = int(torch.searchsorted(ends, min(start + len(known.keys), len(rows))))
        part = slice(start, int(ends[last]))
        near = torch.where(slot == order[first : last + 1, None], state.second, state.near)
        score = _scores(p, known, known.keys[rows[part]], near, tried[part] - first, gamma)
        better = (score > state.score + p.slack).nonzero()
        if len(better):
            winner = tried[part][better[0]]
            score = score.masked_fill(tried[part] != winner, -torch.inf)
            at = first_best(p, score)
            return int(winner), int(rows[part][at]), score[at]
        start, first = part.stop, last + 1
    return None


def _slots(p: Problem, known: _Known, picks: list[int], keys: Tensor) -> Tensor:
    """Which of the medoids each key is of."""
    slot_of = torch.zeros(len(known.keys), dtype=torch.long)
    slot_of[picks] = torch.arange(len(picks))
    return slot_of.index_select(0, known.row_of.index_select(0, keys & (2**p.bits - 1)))


def _hopeful(p: Problem, known: _Known, state: _State, gamma: Tensor) -> Tensor:
    """Which rows may be better than each medoid, (medoids, n): a bound of the score is above the present one.

    The distances are exact. n log n of cells shrinks by at most its growth in the largest cell with each item that
    leaves, and that of clusters by nothing; NMI rises with the first and falls with the second.
    """
    number, size = len(state.picks), len(known.keys)
    slot, next_slot = (_slots(p, known, state.picks, keys) for keys in (state.near, state.second))
    joint, largest = _without(p, slot, next_slot, known.kinds, known.number, number)
    clusters, _ = _without(p, slot, next_slot, torch.zeros_like(slot), 1, number)
    parts = torch.split(known.keys, max(1, TOGETHER // size))
    cost, moved = (torch.cat(column) for column in zip(*(_moves(p, state, keys, slot) for keys in parts), strict=True))
    growth = p.table[largest] - p.table[largest - 1]  # of n log n
    arrived = _entropies(p, moved.view(-1)).view_as(moved)
    least = agreement(p, joint - moved * growth, clusters + arrived)
    bound = (gamma * (1 + ROUNDING - least)).relu() - cost.to(p.unit.dtype) * p.unit
    hopeful = (bound > state.score) & (moved > 0)
    hopeful[state.picks, torch.arange(number)] = False
    return hopeful.T


def _without(p: Problem, slot: Tensor, next_slot: Tensor, kind: Tensor, kinds: int, number: int) -> tuple[Tensor, int]:
    """Σ n log n over the groups (medoid, kind) without each medoid, (medoids,), and the size of the largest group."""
    groups = number * kinds
    counts = torch.bincount(slot * kinds + kind, minlength=groups)
    places, come = ((slot * number + next_slot) * kinds + kind).unique(return_counts=True)  # type: ignore[no-untyped-call]
    medoid = places // groups
    before = counts.index_select(0, places - medoid * groups)
    change = _entropies(p, before + come) - _entropies(p, before)
    change = _sums_by_row(number, medoid, change) - _entropies(p, counts).view(number, kinds).sum(1)
    return _entropies(p, counts).sum() + change, max(int(counts.max()), int((before + come).max()))


def _moves(p: Problem, state: _State, keys: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
    """For some rows as candidates in place of each medoid, (rows, medoids): distance of all items; how many move.

    An item that loses its medoid goes to the second nearest unless the candidate is nearer.
    """
    (rows, size), number = keys.shape, len(state.picks)
    pairs = _movers(keys, state.second)
    row = pairs // size
    item = pairs - row * size
    key = keys.view(-1).index_select(0, pairs)
    first, second = (_distances_of(p, medoid) for medoid in (state.near, state.second))
    own, other, new = first.index_select(0, item), second.index_select(0, item), _distances_of(p, key)
    nearer = (key < state.near.index_select(0, item)).long()
    saved = _sums_by_row(rows, row, (own - new) * nearer)
    place = row * number + slot.index_select(0, item)
    saved_too = _sums_by_row(rows * number, place, other - torch.maximum(new, own))
    cost = first.sum() + _sums_by_row(number, slot, second - first) - saved[:, None] - saved_too.view(rows, number)
    moved = _sums_by_row(rows * number, place, 1 - nearer).view(rows, number)
    return cost, moved + _sums_by_row(rows, row, nearer)[:, None]


def _scores(
    p: Problem,
    known: _Known,
    keys: Tensor,
    near: Tensor,
    block: Tensor | None,
    gamma: Tensor,
    pairs: Tensor | None = None,
) -> Tensor:
    """The scores of candidates, `keys` (rows, n), each with the medoids whose keys are a row of `near` (blocks, n).

    pairs: `_movers` of all rows, if known.
    """
    rows_at_once = max(1, TOGETHER // near.shape[1]) if pairs is None else max(1, len(keys))
    block = torch.zeros(len(keys), dtype=torch.long) if block is None else block
    parts = zip(torch.split(keys, rows_at_once), torch.split(block, rows_at_once), strict=True)
    scores = [_scores_of_rows(p, known, *part, near, gamma, pairs) for part in parts]
    return scores[0] if len(scores) == 1 else torch.cat(scores)


def _scores_of_rows(
    p: Problem, known: _Known, keys: Tensor, block: Tensor, near: Tensor, gamma: Tensor, pairs: Tensor | None
) -> Tensor:
    """The same for some rows: one entry per item that moves."""
    (rows, size), classes, blocks = keys.shape, known.number, len(near)
    if near[0, 0] == FAR:  # no medoid: all items move to any candidate
        joint = _entropies(p, torch.bincount(known.kinds)).sum()
        return objective(p, _distances_of(p, keys).sum(1), joint, p.table[size], gamma)
    if pairs is None:
        pairs = _movers(keys, near[0] if blocks == 1 else near.index_select(0, block))
    row = pairs // size
    item = pairs - row * size
    moved = torch.bincount(row, minlength=rows)
    kind = known.kinds.index_select(0, item)
    arrived, by_class = (row * classes + kind).unique_consecutive(return_counts=True)  # type: ignore[no-untyped-call]
    joint = _sums_by_row(rows, arrived // classes, _entropies(p, by_class))
    at = item if blocks == 1 else block.index_select(0, row) * size + item
    stay = _distances_of(p, near)
    closer = _distances_of(p, keys.view(-1).index_select(0, pairs)) - stay.view(-1).index_select(0, at)
    spent = _of_rows(stay.sum(1), block) + _sums_by_row(rows, row, closer)
    owner = known.row_of.index_select(0, (near & (2**p.bits - 1)).view(-1)).view_as(near)
    if blocks > 1:
        owner += torch.arange(0, blocks * size, size)[:, None]
    names, cell, counts = (owner * classes + known.kinds).unique(return_inverse=True, return_counts=True)  # type: ignore[no-untyped-call]
    left = (row * len(names) + cell.view(-1).index_select(0, at)).sort().values
    before = _entropies(p, counts)
    before = before.sum()[None] if blocks == 1 else _sums_by_row(blocks, names // (classes * size), before)
    joint += _after_leaving(p, rows, left, counts) + _of_rows(before, block)
    row = left // len(names)
    left = row * (blocks * size) + (names // classes).index_select(0, left - row * len(names))  # owner by owner
    counts = torch.bincount(owner.view(-1), minlength=blocks * size)
    before = _entropies(p, counts).view(blocks, size).sum(1)
    clusters = _entropies(p, moved) + _after_leaving(p, rows, left, counts) + _of_rows(before, block)
    return objective(p, spent, joint, clusters, gamma).masked_fill(moved == 0, -torch.inf)


def _of_rows(values: Tensor, block: Tensor) -> Tensor:
    return values if len(values) == 1 else values.index_select(0, block)


def _distances_of(p: Problem, keys: Tensor) -> Tensor:
    """The distances in `keys`, >= 0."""
    return (keys >> p.bits).clamp_(min=0)


def _movers(keys: Tensor, near: Tensor) -> Tensor:
    """Where a key is below that of the item's medoid, (n,) or by row, as places in the flat matrix, in order."""
    size = keys.shape[1]
    rows = max(1, ONE_THREAD // size)  # parts too small for torch to wake its other threads
    both = zip(torch.split(keys, rows), torch.split(near.expand_as(keys), rows), strict=True)
    parts = [(part < theirs).view(-1).nonzero().squeeze(1) for part, theirs in both]
    return parts[0] if len(parts) == 1 else torch.cat([part + i * rows * size for i, part in enumerate(parts)])


def _after_leaving(p: Problem, size: int, left: Tensor, counts: Tensor) -> Tensor:
    """What Σ n log n over groups gains, by row, when items leave them; left, sorted: row · groups + group, per item."""
    places, gone = left.unique_consecutive(return_counts=True)  # type: ignore[no-untyped-call]
    row = places // len(counts)
    count = counts.index_select(0, places - row * len(counts))
    return _sums_by_row(size, row, _entropies(p, count - gone) - _entropies(p, count))


def _entropies(p: Problem, count: Tensor) -> Tensor:
    return p.table.index_select(0, count)  # indexing would wake all threads for a few thousand entries


def _sums_by_row(size: int, row: Tensor, values: Tensor) -> Tensor:
    return values.new_zeros(size).index_add_(0, row, values)
