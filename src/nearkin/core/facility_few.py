"""Facility location's search on the CPU: of all candidates and items it looks only at the few items that would move.

What it calls works in one thread: for a few thousand entries torch's threads wait for each other longer than they work.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nearkin.core import facility
from nearkin.core.facility import Problem

ALONE = 2**15 - 1  # entries that torch works on in one thread
MANY = 2**18  # entries of the matrix whose movers are looked at together


class _Known(NamedTuple):
    """The known items alone: rows in their order, columns by class, so that a row's movers come class by class."""

    keys: Tensor  # (n, n)
    kinds: Tensor  # (n,) of the columns, 0, 1, …
    number: int  # of classes


def search(p: Problem, gamma: Tensor, sweeps: int) -> Tensor:
    """`core.facility.search` where values may be read; ends when nothing has changed since each medoid was tried."""
    number = int(p.wanted)
    rows = (p.kinds >= 0).nonzero()[:, 0]
    columns = rows[p.kinds[rows].argsort(stable=True)]
    keys = p.keys[rows[:, None], columns]
    names, kinds = p.kinds[columns].unique_consecutive(return_inverse=True)  # type: ignore[no-untyped-call]
    known = _Known(keys, kinds, len(names))
    place = torch.full_like(p.kinds, 0).scatter_(0, rows, torch.arange(len(rows)))  # of a medoid, its row
    near = keys.new_full((len(rows),), facility.FAR)
    picks: list[int] = []
    while len(picks) < number:
        picks.append(int(_few(p, known, near, place, gamma).argmax()))
        near = torch.minimum(near, keys[picks[-1]])
    quiet, step = 0, 0
    while step < sweeps * number and quiet < number:
        slot = step % number
        without = _without(keys, near, picks, slot)
        score = _few(p, known, without, place, gamma)
        best, current = int(score.argmax()), picks[slot]
        if not score[best] > score[current]:
            best = current
        quiet = quiet + 1 if best == current else 0
        picks[slot], near, step = best, torch.minimum(without, keys[best]), step + 1
    chosen = torch.zeros_like(p.kinds, dtype=torch.bool)
    chosen[rows[picks]] = True
    return facility.owners(p, chosen)


def _without(keys: Tensor, near: Tensor, picks: list[int], slot: int) -> Tensor:
    """`near` where the medoid in `slot` is gone and its items are with the next nearest."""
    orphans = (near == keys[picks[slot]]).nonzero().squeeze(1)
    others = torch.tensor(picks[:slot] + picks[slot + 1 :], dtype=torch.long)
    far = keys.new_full((1, len(orphans)), facility.FAR)
    theirs = keys.index_select(1, orphans).index_select(0, others)  # (others, orphans)
    return near.index_copy(0, orphans, torch.cat([theirs, far]).amin(0))


def _few(p: Problem, known: _Known, near: Tensor, place: Tensor, gamma: Tensor) -> Tensor:
    """The scores of the known items, near (n,) the keys of the medoids of the columns: one entry an item that moves."""
    some = max(1, MANY // len(near))
    parts = [_few_rows(p, known, keys, near, place, gamma) for keys in torch.split(known.keys, some)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _few_rows(p: Problem, known: _Known, keys: Tensor, near: Tensor, place: Tensor, gamma: Tensor) -> Tensor:
    """The same of the candidates whose `keys` (rows, n) are given."""
    (rows, size), classes = keys.shape, known.number
    if near[0] == facility.FAR:  # nobody has been chosen: all move, whoever comes
        joint = _entropies(p, torch.bincount(known.kinds)).sum()
        return facility.objective(p, _spread(p, keys).sum(1), joint, p.table[size], gamma)
    pairs = _movers(keys, near)
    row = pairs // size
    item = pairs - row * size
    moved = torch.bincount(row, minlength=rows)
    kind = known.kinds.index_select(0, item)
    arrived, by_class = (row * classes + kind).unique_consecutive(return_counts=True)  # type: ignore[no-untyped-call]
    joint = _added(rows, arrived // classes, _entropies(p, by_class))
    stay = _spread(p, near)
    closer = _spread(p, keys.view(-1).index_select(0, pairs)) - stay.index_select(0, item)
    spent = stay.sum() + _added(rows, row, closer)
    owner = place.index_select(0, near & (2**p.bits - 1))
    names, cell, counts = (owner * classes + known.kinds).unique(return_inverse=True, return_counts=True)  # type: ignore[no-untyped-call]
    left = (row * len(names) + cell.index_select(0, item)).sort().values
    joint += _departed(p, rows, left, counts)
    row = left // len(names)
    left = row * size + (names // classes).index_select(0, left - row * len(names))  # cells come owner by owner
    clusters = _entropies(p, moved) + _departed(p, rows, left, torch.bincount(owner, minlength=size))
    return facility.objective(p, spent, joint, clusters, gamma).masked_fill(moved == 0, -torch.inf)


def _spread(p: Problem, keys: Tensor) -> Tensor:
    """The distances that keys stand for, no less than 0."""
    return (keys >> p.bits).clamp_(min=0)


def _movers(keys: Tensor, near: Tensor) -> Tensor:
    """Where a key is below that of the item's medoid, as places in the flat (n, n) matrix, in order.

    In parts for which torch does not wake its other threads: they have less to do than they wait for each other.
    """
    size = len(near)
    rows = max(1, ALONE // size)
    parts = [(part < near).view(-1).nonzero().squeeze(1) for part in torch.split(keys, rows)]
    return parts[0] if len(parts) == 1 else torch.cat([part + i * rows * size for i, part in enumerate(parts)])


def _departed(p: Problem, size: int, left: Tensor, before: Tensor) -> Tensor:
    """Σ n log n over groups once items have left them, (n,); left, sorted: row · groups + group, an entry an item."""
    places, gone = left.unique_consecutive(return_counts=True)  # type: ignore[no-untyped-call]
    row = places // len(before)
    count = before.index_select(0, places - row * len(before))
    change = _entropies(p, count - gone) - _entropies(p, count)
    return _entropies(p, before).sum() + _added(size, row, change)


def _entropies(p: Problem, count: Tensor) -> Tensor:
    return p.table.index_select(0, count)  # indexing would wake all threads for a few thousand entries


def _added(size: int, row: Tensor, values: Tensor) -> Tensor:
    return values.new_zeros(size).index_add_(0, row, values)
