"""Loss-augmented inference of facility location: which items are medoids, by greedy choice and exchange (PAM).

All sums are of integers: distances as multiples of a power of two, n log n as multiples of 2⁻⁴⁰. They are exact in any
order, so that both searches here, and the kernel, choose the same items, ties included. `search` reads no values;
`search_on_cpu` looks only at the few items that would move, and works in one thread: for a few thousand entries torch's
threads wait for each other longer than they work.
"""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from nearkin.core import distances
from nearkin.core.labels import UNKNOWN

__all__ = ["FAR", "FINE", "Problem", "agreement", "disagreement", "entropy_table", "owners", "problem"]
__all__ += ["search", "search_on_cpu"]

FINE = 2**40  # n log n is counted in parts of 1 / FINE
FAR = 2**62  # the key of a missing medoid
ONE_THREAD = 2**15 - 1  # up to so many entries torch works in one thread
TOGETHER = 2**18  # entries of the matrix whose movers are found together


class Problem(NamedTuple):
    """A batch as the searches see it.

    keys (B, B) int64: distance of medoid (row) and item (column) times 2^bits, plus the medoid's index: the smallest
    key of a column is the nearest medoid, the first of equals. The diagonal is below all others: a medoid is its own.
    """

    keys: Tensor
    bits: int
    unit: Tensor  # what one step of a distance is worth, a power of two
    kinds: Tensor  # (B,) each item's class, named by its first item; -1 unknown
    table: Tensor  # (B + 1,) n log n in parts of FINE
    num_medoids: Tensor
    total: Tensor  # n log n of all known items
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
    num_medoids = leads.sum()
    if num_clusters is not None:
        num_medoids = num_medoids.clamp(max=num_clusters)
    table = entropy_table(size, distance.device)
    classes = torch.where(leads, table[same.sum(1)], 0).sum()
    unit = above * 2.0 ** (bits - 61)
    kinds, total = torch.where(known, first, UNKNOWN), table.gather(0, known.sum()[None])[0]
    return Problem(keys, bits, unit, kinds, table, num_medoids, total, classes)


@functools.lru_cache(maxsize=16)  # a captured graph must not copy from the host
def entropy_table(size: int, device: torch.device) -> Tensor:
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
    """The key of each item's medoid, (B,)."""
    return p.keys.masked_fill(~chosen[:, None], FAR).amin(0)


def agreement(p: Problem, joint: Tensor, clusters: Tensor) -> Tensor:
    """NMI, I / sqrt(H H'), from Σ n log n of cells (cluster, class) and of clusters.

    1 if both are one group, 0 if only one of them is.
    """
    wide = p.unit.dtype
    shared = (joint - clusters - p.classes + p.total).to(wide)  # as many times each quantity as there are items
    ours, theirs = ((p.total - part).clamp(min=0).to(wide) for part in (clusters, p.classes))
    split = ours * theirs
    tiny = 1e-6 * p.total.to(wide)  # a second group of one item in 100,000 is still far above this
    defined = split > tiny * tiny
    # Not sqrt, for which torch wakes all CPU threads even for a hundred entries.
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
    """Σ n log n over groups, from the (B, B) mask of items in the same group."""
    index = torch.arange(group.shape[0], device=group.device)
    leads = (group.to(torch.uint8).argmax(1) == index) & known
    return torch.where(leads, p.table[group.sum(1)], 0).sum()


def objective(p: Problem, spent: Tensor, joint: Tensor, clusters: Tensor, gamma: Tensor) -> Tensor:
    """F + γ (1 - NMI); -inf where γ is NaN."""
    return (gamma * (1 - agreement(p, joint, clusters)) - spent.to(p.unit.dtype) * p.unit).nan_to_num(nan=-torch.inf)


def search(p: Problem, gamma: Tensor, sweeps: int, steps: int) -> Tensor:
    """The key of each item's medoid, (B,): greedy, then `sweeps` rounds in which a medoid may be exchanged.

    An exchange is scored with the full objective and made only if better. steps: at least the number of medoids;
    further steps change nothing. Reads no values.
    """
    index = torch.arange(len(p.keys), device=p.keys.device)
    chosen = torch.zeros_like(index, dtype=torch.bool)
    picks = []
    for step in range(steps):
        best = _scores(p, chosen, gamma).argmax()
        grows = step < p.num_medoids
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
    """F + γ (1 - NMI) after adding each item to the chosen ones, (B,); -inf for items that cannot be added.

    Row i of every (B, B) matrix below is the clustering after i is added. The items that move to i leave their old
    cells (cluster, class) and fill new ones; only sums of n log n over cells are needed, which follow from the number
    of items that left each cell.
    """
    known = p.kinds >= 0
    near = owners(p, chosen)
    moves = (p.keys < near) & known  # (B candidates, B items)
    spent = (torch.where(moves, p.keys, near) >> p.bits).clamp(min=0).mul(known).sum(1)
    owner, kind = near & (2**p.bits - 1), p.kinds.clamp(min=0)
    cell = _first_of_equals(owner * len(near) + kind)
    stays = (known & chosen.any()).long()
    weight = moves.long()
    joint = _entropy_after_leaving(p, cell, stays, weight) + p.table[_pooled(kind, weight)].sum(1)
    clusters = _entropy_after_leaving(p, owner, stays, weight) + p.table[weight.sum(1)]
    return objective(p, spent, joint, clusters, gamma).masked_fill(chosen | ~known, -torch.inf)


def _entropy_after_leaving(p: Problem, group: Tensor, stays: Tensor, weight: Tensor) -> Tensor:
    """Σ n log n over groups after the movers of each row have left them, (B,)."""
    before = torch.zeros_like(stays).index_add_(0, group, stays)
    return p.table[before[None, :] - _pooled(group, weight * stays)].sum(1)


def _pooled(group: Tensor, weight: Tensor) -> Tensor:
    """Row-wise sums of weight by group of the column, (B, B)."""
    return torch.zeros_like(weight).index_add_(1, group, weight)


def _first_of_equals(ids: Tensor) -> Tensor:
    """For each entry the index of the first entry equal to it: dense group ids without a sort."""
    return (ids[:, None] == ids[None, :]).to(torch.uint8).argmax(1)


class _Known(NamedTuple):
    """The known items alone: rows in their order, columns by class, so that a row's movers come class by class."""

    keys: Tensor  # (n, n)
    kinds: Tensor  # (n,) of the columns, 0, 1, …
    number: int  # of classes


def search_on_cpu(p: Problem, gamma: Tensor, sweeps: int) -> Tensor:
    """`search` where values may be read; ends when a full sweep changes nothing."""
    number = int(p.num_medoids)
    rows = (p.kinds >= 0).nonzero()[:, 0]
    columns = rows[p.kinds[rows].argsort(stable=True)]
    keys = p.keys[rows[:, None], columns]
    names, kinds = p.kinds[columns].unique_consecutive(return_inverse=True)  # type: ignore[no-untyped-call]
    known = _Known(keys, kinds, len(names))
    row_of = torch.full_like(p.kinds, 0).scatter_(0, rows, torch.arange(len(rows)))  # of a medoid, its row
    near = keys.new_full((len(rows),), FAR)
    picks: list[int] = []
    while len(picks) < number:
        picks.append(int(_known_scores(p, known, near, row_of, gamma).argmax()))
        near = torch.minimum(near, keys[picks[-1]])
    quiet, step = 0, 0
    while step < sweeps * number and quiet < number:
        slot = step % number
        without = _without(keys, near, picks, slot)
        score = _known_scores(p, known, without, row_of, gamma)
        best, current = int(score.argmax()), picks[slot]
        if not score[best] > score[current]:
            best = current
        quiet = quiet + 1 if best == current else 0
        picks[slot], near, step = best, torch.minimum(without, keys[best]), step + 1
    chosen = torch.zeros_like(p.kinds, dtype=torch.bool)
    chosen[rows[picks]] = True
    return owners(p, chosen)


def _without(keys: Tensor, near: Tensor, picks: list[int], slot: int) -> Tensor:
    """`near` without the medoid in `slot`: its items go to the next nearest."""
    orphans = (near == keys[picks[slot]]).nonzero().squeeze(1)
    other_picks = torch.tensor(picks[:slot] + picks[slot + 1 :], dtype=torch.long)
    far = keys.new_full((1, len(orphans)), FAR)
    their_keys = keys.index_select(1, orphans).index_select(0, other_picks)  # (others, orphans)
    return near.index_copy(0, orphans, torch.cat([their_keys, far]).amin(0))


def _known_scores(p: Problem, known: _Known, near: Tensor, place: Tensor, gamma: Tensor) -> Tensor:
    """The scores of the known items as candidates; near (n,): the keys of the columns' medoids."""
    rows_at_once = max(1, TOGETHER // len(near))
    parts = [_scores_of_rows(p, known, keys, near, place, gamma) for keys in torch.split(known.keys, rows_at_once)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _scores_of_rows(p: Problem, known: _Known, keys: Tensor, near: Tensor, place: Tensor, gamma: Tensor) -> Tensor:
    """The same for the candidates of some rows, `keys` (rows, n): one entry per item that moves."""
    (rows, size), classes = keys.shape, known.number
    if near[0] == FAR:  # no medoid yet: all items move to any candidate
        joint = _entropies(p, torch.bincount(known.kinds)).sum()
        return objective(p, _distances_of(p, keys).sum(1), joint, p.table[size], gamma)
    pairs = _movers(keys, near)
    row = pairs // size
    item = pairs - row * size
    moved = torch.bincount(row, minlength=rows)
    kind = known.kinds.index_select(0, item)
    arrived, by_class = (row * classes + kind).unique_consecutive(return_counts=True)  # type: ignore[no-untyped-call]
    joint = _sums_by_row(rows, arrived // classes, _entropies(p, by_class))
    stay = _distances_of(p, near)
    closer = _distances_of(p, keys.view(-1).index_select(0, pairs)) - stay.index_select(0, item)
    spent = stay.sum() + _sums_by_row(rows, row, closer)
    owner = place.index_select(0, near & (2**p.bits - 1))
    names, cell, counts = (owner * classes + known.kinds).unique(return_inverse=True, return_counts=True)  # type: ignore[no-untyped-call]
    left = (row * len(names) + cell.index_select(0, item)).sort().values
    joint += _after_leaving(p, rows, left, counts)
    row = left // len(names)
    left = row * size + (names // classes).index_select(0, left - row * len(names))  # cells come owner by owner
    clusters = _entropies(p, moved) + _after_leaving(p, rows, left, torch.bincount(owner, minlength=size))
    return objective(p, spent, joint, clusters, gamma).masked_fill(moved == 0, -torch.inf)


def _distances_of(p: Problem, keys: Tensor) -> Tensor:
    """The distances in `keys`, >= 0."""
    return (keys >> p.bits).clamp_(min=0)


def _movers(keys: Tensor, near: Tensor) -> Tensor:
    """Where a key is below that of the item's medoid, as places in the flat (n, n) matrix, in order."""
    size = len(near)
    rows = max(1, ONE_THREAD // size)  # parts too small for torch to wake its other threads
    parts = [(part < near).view(-1).nonzero().squeeze(1) for part in torch.split(keys, rows)]
    return parts[0] if len(parts) == 1 else torch.cat([part + i * rows * size for i, part in enumerate(parts)])


def _after_leaving(p: Problem, size: int, left: Tensor, before: Tensor) -> Tensor:
    """Σ n log n over groups after items have left them, (n,); left, sorted: row · groups + group, one per item."""
    places, gone = left.unique_consecutive(return_counts=True)  # type: ignore[no-untyped-call]
    row = places // len(before)
    count = before.index_select(0, places - row * len(before))
    change = _entropies(p, count - gone) - _entropies(p, count)
    return _entropies(p, before).sum() + _sums_by_row(size, row, change)


def _entropies(p: Problem, count: Tensor) -> Tensor:
    return p.table.index_select(0, count)  # indexing would wake all threads for a few thousand entries


def _sums_by_row(size: int, row: Tensor, values: Tensor) -> Tensor:
    return values.new_zeros(size).index_add_(0, row, values)
