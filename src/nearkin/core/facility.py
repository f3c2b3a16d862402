"""Loss-augmented inference of facility location: which items are medoids, by greedy choice and exchange (PAM).

It runs on the host, as each of its many small steps needs the one before: distances on a GPU are waited for. All sums
are of integers: distances as multiples of a power of two, n log n as multiples of 2⁻⁴⁰. So they are exact in any order.
Distances are counted in steps far coarser than a machine's rounding, and scores within the error of that are equal: of
equals the first is chosen on every machine.
"""

import functools
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin.core import distances
from nearkin.core.labels import UNKNOWN

__all__ = ["FINE", "STEPS", "Found", "entropy_table", "search", "smallest", "step"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FINE = 2**40  # n log n is counted in parts of 1 / FINE
FAR = 2**62  # the key of a missing medoid
STEPS = 2.0**31  # in the largest power of two among the distances: half the digits of float64
TOGETHER = 2**18  # movers that are looked at together


class Found(NamedTuple):
    """What a search has chosen: the medoids (B,) bool, each item's medoid (B,), and 1 - NMI."""

    chosen: Tensor
    owner: Tensor
    disagreement: Tensor


def search(
    distance: Tensor, labels: Tensor, gamma: float | Tensor, sweeps: int, num_clusters: int | None = None
) -> Found:
    """Greedy choice, then `sweeps` rounds in which a medoid may be exchanged; ends when a full round changes nothing.

    distance (B, B) of items (rows) to medoids (columns), B > 0; labels (B,), -1 unknown. An exchange is scored with the
    full objective and made only if better. 1 - NMI is 0 where no item is known.
    """
    host, names = distance.detach().cpu(), labels.cpu().numpy()
    weight = float(gamma.detach() if isinstance(gamma, Tensor) else gamma)
    size, bits, unit = len(host), len(host).bit_length(), step(host)
    spread = host.T.contiguous().nan_to_num(nan=0.0).clamp(min=0)
    steps = spread.to(unit.dtype, copy=True).div_(unit).add_(0.5).long()  # (B, B), to the nearest
    keys = steps.fill_diagonal_(-1).mul_(2**bits).add_(torch.arange(size)[:, None]).numpy()
    rows = np.flatnonzero(names != UNKNOWN)
    kinds = np.unique(names[rows], return_inverse=True)[1].astype(np.int64)
    columns = np.argsort(kinds, kind="stable")
    classes = int(kinds.max(initial=-1)) + 1
    number = classes if num_clusters is None else min(classes, num_clusters)
    task = _Search(keys[np.ix_(rows, rows[columns])], kinds[columns], bits, float(unit), size * float(unit), weight)
    medoids = rows[task.exchanged(task.greedy(number), sweeps)] if number else rows
    owner = keys[medoids].min(0, initial=FAR) & (2**bits - 1)
    chosen = np.zeros(size, dtype=bool)
    chosen[medoids] = True
    differs = 1 - float(task.agreement(*task.entropies(owner[rows[columns]]))) if number else 0.0
    return Found(
        torch.from_numpy(chosen).to(distance.device, non_blocking=True),
        torch.from_numpy(owner).to(distance.device, non_blocking=True),
        torch.full((), differs, dtype=distance.dtype, device=distance.device),
    )


def smallest(kind: torch.dtype) -> float:
    """The least largest distance: a step of it is still a normal number."""
    return torch.finfo(kind).tiny * 2 * STEPS


def step(distance: Tensor) -> Tensor:
    """What distances (B, B) are counted in, a power of two: the largest of them has 2³¹ to 2³² steps."""
    wide = distances.wide(distance)
    top = distance.detach().nan_to_num(nan=0.0).amax().to(wide).clamp(min=smallest(wide))
    return top * (0.5 / STEPS) / torch.frexp(top).mantissa


@functools.lru_cache(maxsize=16)
def entropy_table(size: int) -> Ints:
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
    return np.array([n * log for n, log in enumerate(logs)])


class _Search:
    """The known items, n of them: rows of `keys` are candidates in their order, columns are items, class by class.

    keys (n, n): distance of candidate and item times 2^bits, plus the candidate's index: the smallest key of a column
    is the nearest medoid, the first of equals. An item's own key is below all others: a medoid is its own.
    kinds (n,): the classes of the columns. unit: what one step of a distance is worth. Scores as near to each other as
    `slack` are equal. A clustering is given by `near` (n,), the key of each item's medoid; all are FAR without one.
    """

    def __init__(self, keys: Ints, kinds: Ints, bits: int, unit: float, slack: float, gamma: float) -> None:
        self.keys, self.kinds, self.bits, self.unit, self.slack, self.gamma = keys, kinds, bits, unit, slack, gamma
        self.size, self.flat = len(keys), keys.reshape(-1)
        self.table = entropy_table(self.size)
        self.total = self.table[self.size]  # n log n of all items
        self.of_classes = self.table[np.bincount(kinds)].sum()  # Σ n log n over classes

    def greedy(self, number: int) -> list[int]:
        """The rows of `number` medoids, each of which adds most to those before."""
        picks: list[int] = []
        near, parts = np.full(self.size, FAR), list[Ints]()
        while len(picks) < number:
            picks.append(self._first_best(self._scores(near, parts)))
            near = np.minimum(near, self.keys[picks[-1]])
            # An item that would not move to a row never will.
            parts = self._still(parts, near) if len(picks) > 1 else self._movers(near)
        return picks

    def exchanged(self, picks: list[int], sweeps: int) -> list[int]:
        """The medoids after `sweeps` rounds of exchanges."""
        near, second, parts = self._two_nearest(picks)
        quiet = 0
        for place in range(sweeps * len(picks)):
            slot = place % len(picks)
            if quiet == len(picks):
                break
            lost = near == self.keys[picks[slot]]
            without = np.where(lost, second, near)
            scores = self._scores(without, self._still(parts, without))
            quiet += 1
            if scores.max() > scores[picks[slot]] + self.slack:
                picks = [*picks[:slot], self._first_best(scores), *picks[slot + 1 :]]
                near, second, parts = self._two_nearest(picks)
                quiet = 0
        return picks

    def agreement(self, joint: Any, clusters: Any) -> Any:
        """NMI, I / sqrt(H H'), from Σ n log n of cells (cluster, class) and of clusters.

        1 if both are one group, 0 if only one of them is.
        """
        shared = np.float64(joint - clusters - self.of_classes + self.total)  # n times each quantity
        ours, theirs = (np.float64(np.maximum(self.total - part, 0)) for part in (clusters, self.of_classes))
        split = ours * theirs
        tiny = 1e-6 * self.total  # a second group of one item in 100,000 is still far above this
        defined = split > tiny * tiny
        nmi = np.where(defined, shared, 0.0) * (1 / np.sqrt(np.where(defined, split, 1.0)))
        return np.where((ours <= tiny) & (theirs <= tiny), 1.0, np.clip(nmi, 0, 1))

    def entropies(self, owner: Ints) -> tuple[Any, Any]:
        """Σ n log n over cells and over clusters, items with the same `owner` (n,)."""
        cells = np.unique(owner * self.size + self.kinds, return_counts=True)[1]
        return self.table[cells].sum(), self.table[np.bincount(owner)].sum()

    def _objective(self, spent: Any, joint: Any, clusters: Any) -> Floats:
        """F + γ (1 - NMI); -inf where γ is NaN."""
        with np.errstate(all="ignore"):
            score = self.gamma * (1 - self.agreement(joint, clusters)) - np.float64(spent) * self.unit
        result: Floats = np.nan_to_num(score, nan=-np.inf)
        return result

    def _first_best(self, scores: Floats) -> int:
        """The place of the highest score, of equals the first."""
        return int((scores >= scores.max() - self.slack).argmax())

    def _two_nearest(self, picks: list[int]) -> tuple[Ints, Ints, list[Ints]]:
        """The keys of each item's medoid and of the next nearest, and who would move from that one."""
        theirs = self.keys[picks]  # (medoids, n)
        near = theirs.min(0)
        second = np.where(theirs == near, FAR, theirs).min(0)
        return near, second, self._movers(second) if second[0] < FAR else []

    def _movers(self, near: Ints) -> list[Ints]:
        """Where a key is below that of the item's medoid, as places in the flat matrix; in parts of whole rows."""
        rows = max(1, TOGETHER // self.size)
        blocks = ((start, self.keys[start : start + rows]) for start in range(0, self.size, rows))
        return _joined([np.flatnonzero(keys < near) + start * self.size for start, keys in blocks])

    def _still(self, parts: list[Ints], near: Ints) -> list[Ints]:
        """Those of the movers that would move from `near` too."""
        return _joined([part[self.flat[part] < near[part % self.size]] for part in parts])

    def _scores(self, near: Ints, parts: list[Ints]) -> Floats:
        """The score after each row is added to the medoids, (n,); -inf for rows that nothing moves to."""
        if near[0] == FAR:  # everything moves to any row
            return self._objective(self._distance(self.keys).sum(1), self.of_classes, self.total)
        names, cell, counts = np.unique(
            (near & (2**self.bits - 1)) * self.size + self.kinds, return_inverse=True, return_counts=True
        )
        cluster = _places(names // self.size)
        score = np.full(self.size, -np.inf)
        for part in parts:
            if len(part):
                rows, values = self._scores_of(part, near, cell, counts, cluster)
                score[rows] = values
        return score

    def _scores_of(self, pairs: Ints, near: Ints, cell: Ints, counts: Ints, cluster: Ints) -> tuple[Ints, Floats]:
        """The rows that items move to, and their scores.

        cell (n,): each item's (cluster, class); counts and cluster: how many items a cell has, and its cluster. The
        items that move to a row leave their cells and clusters and fill new ones, so only n log n of these change.
        """
        row = pairs // self.size
        item = pairs - row * self.size
        begins = _begins(row)
        rows, moved = row[begins], _lengths(begins, len(row))
        stay = self._distance(near)
        spent = stay.sum() + np.add.reduceat(self._distance(self.flat[pairs]) - stay[item], begins)
        kinds = row * self.size + self.kinds[item]  # sorted, as items are class by class
        first = _begins(kinds)
        joint = _by_row(row[first], self.table[_lengths(first, len(kinds))]) + self.table[counts].sum()
        left = np.sort(row * len(counts) + cell[item])
        first = _begins(left)
        row, gone = left[first] // len(counts), _lengths(first, len(left))
        place = left[first] - row * len(counts)
        joint += _by_row(row, self.table[counts[place] - gone] - self.table[counts[place]])
        sizes = np.bincount(cluster, counts).astype(np.int64)
        left = row * len(sizes) + cluster[place]
        first = _begins(left)
        gone, before = np.add.reduceat(gone, first), sizes[cluster[place][first]]
        clusters = _by_row(row[first], self.table[before - gone] - self.table[before])
        clusters += self.table[moved] + self.table[sizes].sum()
        return rows, self._objective(spent, joint, clusters)

    def _distance(self, keys: Ints) -> Ints:
        """The distances in `keys`, >= 0."""
        steps: Ints = np.maximum(keys >> self.bits, 0)
        return steps


def _joined(parts: list[Ints]) -> list[Ints]:
    return [np.concatenate(parts)] if len(parts) > 1 and sum(map(len, parts)) <= TOGETHER else parts


def _begins(ids: Ints) -> Ints:
    """Where each run of equal entries begins, of at least one entry."""
    new = np.empty(len(ids), dtype=bool)
    new[0] = True
    np.not_equal(ids[1:], ids[:-1], out=new[1:])
    return np.flatnonzero(new)


def _places(ids: Ints) -> Ints:
    """The number of each entry's run: 0, 1, …"""
    return np.cumsum(np.diff(ids, prepend=ids[:1]) != 0)


def _lengths(begins: Ints, end: int) -> Ints:
    lengths: Ints = np.diff(begins, append=end)
    return lengths


def _by_row(row: Ints, values: Ints) -> Ints:
    """Sums of the values of each row, in the rows' order."""
    sums: Ints = np.add.reduceat(values, _begins(row))
    return sums
