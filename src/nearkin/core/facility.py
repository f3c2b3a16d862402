"""Loss-augmented inference of facility location: which items are medoids, by greedy choice and exchange (PAM).

All sums are of integers: distances as multiples of a power of two, n log n as multiples of 2⁻⁴⁰. They are exact in any
order, so that `search` here, which reads no values, that of `facility_cpu` and the kernel choose the same items.
Distances are counted in steps far coarser than a machine's rounding, and scores within the error of that are equal: of
equals the first is chosen on every machine.
"""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from nearkin.core import distances
from nearkin.core.labels import UNKNOWN

__all__ = ["FAR", "FINE", "STEPS", "Problem", "agreement", "disagreement", "entropy_table", "first_best", "objective"]
__all__ += ["owners", "problem", "search", "smallest", "step"]

FINE = 2**40  # n log n is counted in parts of 1 / FINE
FAR = 2**62  # the key of a missing medoid
STEPS = 2.0**31  # in the largest power of two among the distances: half the digits of float64


class Problem(NamedTuple):
    """A batch as the searches see it.

    keys (B, B) int64: distance of medoid (row) and item (column) times 2^bits, plus the medoid's index: the smallest
    key of a column is the nearest medoid, the first of equals. The diagonal is below all others: a medoid is its own.
    """

    keys: Tensor
    bits: int
    unit: Tensor  # what one step of a distance is worth, a power of two
    slack: Tensor  # scores so near to each other are equal
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
    unit = step(distance)
    spread = distance.detach().T.contiguous().nan_to_num(nan=0.0).clamp(min=0)
    steps = spread.to(wide, copy=True).div_(unit).add_(0.5).long()  # (B, B), to the nearest
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
    kinds, total = torch.where(known, first, UNKNOWN), table.gather(0, known.sum()[None])[0]
    return Problem(keys, bits, unit, size * unit, kinds, table, num_medoids, total, classes)


def smallest(kind: torch.dtype) -> float:
    """The least largest distance: a step of it is still a normal number."""
    return torch.finfo(kind).tiny * 2 * STEPS


def step(distance: Tensor) -> Tensor:
    """What distances (B, B) are counted in, a power of two: the largest of them has 2³¹ to 2³² steps."""
    wide = distances.wide(distance)
    top = distance.detach().nan_to_num(nan=0.0).amax().to(wide).clamp(min=smallest(wide))
    return top * (0.5 / STEPS) / torch.frexp(top).mantissa


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


def first_best(p: Problem, scores: Tensor) -> Tensor:
    """The place of the highest score, of equals the first."""
    return (scores >= scores.amax() - p.slack).to(torch.uint8).argmax()


def search(p: Problem, gamma: Tensor, sweeps: int, steps: int) -> Tensor:
    """The key of each item's medoid, (B,): greedy, then `sweeps` rounds in which a medoid may be exchanged.

    An exchange is scored with the full objective and made only if better. steps: at least the number of medoids;
    further steps change nothing. Reads no values.
    """
    index = torch.arange(len(p.keys), device=p.keys.device)
    chosen = torch.zeros_like(index, dtype=torch.bool)
    picks = []
    for step in range(steps):
        best = first_best(p, _scores(p, chosen, gamma))
        grows = step < p.num_medoids
        chosen = chosen | (index == best) & grows
        picks.append(torch.where(grows, best, -1))
    for _ in range(sweeps):
        for slot, pick in enumerate(picks):
            without = chosen & (index != pick)
            score = _scores(p, without, gamma)
            current = pick.clamp(min=0)
            better = score.amax() > score.gather(0, current[None])[0] + p.slack
            best = torch.where(better, first_best(p, score), current)
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
