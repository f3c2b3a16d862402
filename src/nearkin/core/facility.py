"""Loss-augmented inference of facility location: which items are medoids, by greedy choice and exchange (PAM).

All that is summed is whole numbers: distances as multiples of a power of two, n log n as multiples of 2⁻⁴⁰. Sums are
then exact in any order, so that every way of searching here, and the kernel, chooses the same items, ties included.
"""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from nearkin.core import distances
from nearkin.core.labels import UNKNOWN

FINE = 2**40  # parts of 1 in which n log n is counted
FAR = 2**62  # the key of a medoid that is not there
ALONE = 2**15 - 1  # entries that torch works on in one thread
MANY = 2**18  # entries of the matrix whose movers are looked at together


class Problem(NamedTuple):
    """A batch as the searches see it.

    keys (B, B) int64: distance of medoid (row) and item (column) times 2^bits, plus the medoid's index: the smallest
    key of a column is the nearest medoid, of equals the first. The diagonal is below all others: a medoid is its own.
    """

    keys: Tensor
    bits: int
    unit: Tensor  # what one step of a distance is worth, a power of two
    kinds: Tensor  # (B,) each item's class, named by its first item; -1 unknown
    table: Tensor  # (B + 1,) n log n in parts of FINE
    wanted: Tensor  # how many medoids
    whole: Tensor  # n log n of all known items
    classes: Tensor  # Σ n log n over classes


def problem(distance: Tensor, labels: Tensor, num_clusters: int | None = None) -> Problem:
    """distance (B, B) of items (rows) to medoids (columns), B > 0; labels (B,), -1 unknown."""
    size = distance.shape[0]
    bits = size.bit_length()
    index = torch.arange(size, device=distance.device)
    wide = distances.wide(distance)
    spread = distance.detach().T.contiguous().nan_to_num(nan=0.0).clamp(min=0)
    top = spread.amax().to(wide)
    above = torch.where(top > 0, top / torch.frexp(top).mantissa, 1.0).clamp(min=2.0**-60)  # the next power of two
    steps = spread.to(wide, copy=True).mul_(2.0 ** (61 - bits) / above).add_(0.5).long()  # (B, B), to the nearest
    keys = steps.fill_diagonal_(-1).mul_(2**bits).add_(index[:, None])
    known = labels != UNKNOWN
    same = (labels[:, None] == labels[None, :]) & known[:, None]
    first = same.to(torch.uint8).argmax(1)
    leads = (first == index) & known
    wanted = leads.sum()
    if num_clusters is not None:
        wanted = wanted.clamp(max=num_clusters)
    table = _entropy_table(size, distance.device)
    classes = torch.where(leads, table[same.sum(1)], 0).sum()
    unit = above * 2.0 ** (bits - 61)
    return Problem(
        keys,
        bits,
        unit,
        torch.where(known, first, UNKNOWN),
        table,
        wanted,
        table.gather(0, known.sum()[None])[0],
        classes,
    )


@functools.lru_cache(maxsize=16)  # a captured graph must not copy from the host
def _entropy_table(size: int, device: torch.device) -> Tensor:
    """n log n, 0 to `size`, in parts of FINE.

    A logarithm is the sum of those of its prime factors to the last digit: sums that are equal on paper are equal here.
    """
    factor = list(range(size + 1))
    for f in range(2, math.isqrt(size) + 1):
        if factor[f] == f:
            factor[f * f :: f] = [min(f, least) for least in factor[f * f :: f]]
    logs = [0] * (size + 1)
    for n in range(2, size + 1):
        logs[n] = round(math.log(n) * FINE) if factor[n] == n else logs[factor[n]] + logs[n // factor[n]]
    return torch.tensor([n * log for n, log in enumerate(logs)]).to(device, non_blocking=True)


def owners(p: Problem, chosen: Tensor) -> Tensor:
    """Of each item the key of its medoid, (B,)."""
    return p.keys.masked_fill(~chosen[:, None], FAR).amin(0)


def agreement(p: Problem, joint: Tensor, clusters: Tensor) -> Tensor:
    """NMI, I / sqrt(H H'), from Σ n log n of cells (cluster, class) and of clusters.

    1 if both are one group, 0 if only one of them is.
    """
    wide = p.unit.dtype
    shared = (joint - clusters - p.classes + p.whole).to(wide)  # as many times each quantity as there are items
    ours, theirs = ((p.whole - part).clamp(min=0).to(wide) for part in (clusters, p.classes))
    split = ours * theirs
    tiny = 1e-6 * p.whole.to(wide)  # a second group of one item in 100,000 is still far above this
    defined = split > tiny * tiny
    # Not sqrt, for which a CPU wakes all its threads, be it for a hundred entries.
    nmi = torch.where(defined, shared, 0.0) * torch.where(defined, split, 1.0).rsqrt()
    return torch.where((ours <= tiny) & (theirs <= tiny), 1.0, nmi.clamp(0, 1))


def disagreement(p: Problem, owner: Tensor) -> Tensor:
    """1 - NMI of the clustering, items with the same `owner` (B,), with the classes; 0 where none are known."""
    known = p.kinds >= 0
    together = (owner[:, None] == owner[None, :]) & known
    cell = together & (p.kinds[:, None] == p.kinds[None, :])
    joint, clusters = (_entropy(p, group, known) for group in (cell, together))
    return torch.where(known.any(), 1 - agreement(p, joint, clusters), 0.0)


def _entropy(p: Problem, group: Tensor, known: Tensor) -> Tensor:
    """Σ n log n over groups, from who is with whom, (B, B)."""
    index = torch.arange(group.shape[0], device=group.device)
    leads = (group.to(torch.uint8).argmax(1) == index) & known
    return torch.where(leads, p.table[group.sum(1)], 0).sum()


def objective(p: Problem, spent: Tensor, joint: Tensor, clusters: Tensor, gamma: Tensor) -> Tensor:
    """F + γ (1 - NMI); a γ that is no number makes no choice."""
    return (gamma * (1 - agreement(p, joint, clusters)) - spent.to(p.unit.dtype) * p.unit).nan_to_num(nan=-torch.inf)


def search(p: Problem, gamma: Tensor, sweeps: int, steps: int) -> Tensor:
    """The key of each item's medoid, (B,): greedy, then `sweeps` rounds in which a medoid may change places.

    An exchange is scored with the whole objective and taken only when better. `steps`: at least the number of medoids;
    those beyond it change nothing. Reads no value.
    """
    index = torch.arange(len(p.keys), device=p.keys.device)
    chosen = torch.zeros_like(index, dtype=torch.bool)
    picks = []
    for step in range(steps):
        best = _scores(p, chosen, gamma).argmax()
        grows = step < p.wanted
        chosen = chosen | (index == best) & grows
        picks.append(torch.where(grows, best, -1))
    for _ in range(sweeps):
        for slot, pick in enumerate(picks):
            without = chosen & (index != pick)
            score = _scores(p, without, gamma)
            current = pick.clamp(min=0)
            best = score.argmax()
            better = score.gather(0, best[None])[0] > score.gather(0, current[None])[0]
            best = torch.where(better, best, current)
            idle = pick < 0
            chosen = torch.where(idle, chosen, without | (index == best))
            picks[slot] = torch.where(idle, pick, best)
    return owners(p, chosen)


def _scores(p: Problem, chosen: Tensor, gamma: Tensor) -> Tensor:
    """F + γ (1 - NMI) after adding each item to the chosen ones, (B,); -inf for what cannot be added.

    Row i of every (B, B) matrix below is the world in which i has been added. The items that move to i leave their old
    cells (cluster, class) and fill new ones; only sums of n log n over cells are needed, and those follow from the
    number of items that left each cell.
    """
    known = p.kinds >= 0
    near = owners(p, chosen)
    moves = (p.keys < near) & known  # (B candidates, B items)
    spent = (torch.where(moves, p.keys, near) >> p.bits).clamp(min=0).mul(known).sum(1)
    owner, kind = near & (2**p.bits - 1), p.kinds.clamp(min=0)
    cell = _first_of_equals(owner * len(near) + kind)
    stays = (known & chosen.any()).long()
    weight = moves.long()
    joint = _left(p, cell, stays, weight) + p.table[_pooled(kind, weight)].sum(1)
    clusters = _left(p, owner, stays, weight) + p.table[weight.sum(1)]
    return objective(p, spent, joint, clusters, gamma).masked_fill(chosen | ~known, -torch.inf)


def _left(p: Problem, group: Tensor, stays: Tensor, weight: Tensor) -> Tensor:
    """Σ n log n over groups after the movers of each row have left them, (B,)."""
    before = torch.zeros_like(stays).index_add_(0, group, stays)
    return p.table[before[None, :] - _pooled(group, weight * stays)].sum(1)


def _pooled(group: Tensor, weight: Tensor) -> Tensor:
    """Row-wise sums of weight by group of the column, (B, B)."""
    return torch.zeros_like(weight).index_add_(1, group, weight)


def _first_of_equals(ids: Tensor) -> Tensor:
    """For each entry the index of the first entry equal to it: dense group names without a sort or a dictionary."""
    return (ids[:, None] == ids[None, :]).to(torch.uint8).argmax(1)


class _Known(NamedTuple):
    """The known items alone: rows in their order, columns by class, so that a row's movers come class by class."""

    keys: Tensor  # (n, n)
    kinds: Tensor  # (n,) of the columns, 0, 1, …
    number: int  # of classes


def search_on_cpu(p: Problem, gamma: Tensor, sweeps: int) -> Tensor:
    """`core.facility.search` where values may be read; ends when nothing has changed since each medoid was tried."""
    number = int(p.wanted)
    rows = (p.kinds >= 0).nonzero()[:, 0]
    columns = rows[p.kinds[rows].argsort(stable=True)]
    keys = p.keys[rows[:, None], columns]
    names, kinds = p.kinds[columns].unique_consecutive(return_inverse=True)  # type: ignore[no-untyped-call]
    known = _Known(keys, kinds, len(names))
    place = torch.full_like(p.kinds, 0).scatter_(0, rows, torch.arange(len(rows)))  # of a medoid, its row
    near = keys.new_full((len(rows),), FAR)
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
    return owners(p, chosen)


def _without(keys: Tensor, near: Tensor, picks: list[int], slot: int) -> Tensor:
    """`near` where the medoid in `slot` is gone and its items are with the next nearest."""
    orphans = (near == keys[picks[slot]]).nonzero().squeeze(1)
    others = torch.tensor(picks[:slot] + picks[slot + 1 :], dtype=torch.long)
    far = keys.new_full((1, len(orphans)), FAR)
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
    if near[0] == FAR:  # nobody has been chosen: all move, whoever comes
        joint = _entropies(p, torch.bincount(known.kinds)).sum()
        return objective(p, _spread(p, keys).sum(1), joint, p.table[size], gamma)
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
    return objective(p, spent, joint, clusters, gamma).masked_fill(moved == 0, -torch.inf)


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
