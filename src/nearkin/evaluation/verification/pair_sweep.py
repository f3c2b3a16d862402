"""The whole curve over all pairs of a labelled set, exact and in bounded memory.

TAR changes at the scores of genuine pairs only, so that area and best accuracy follow from the impostors between them.
The distinct genuine scores are collected from the lowest up, as many as memory allows, in one pass over the tiles with
genuine pairs; one pass over all pairs then counts the impostors below, at and between these scores. Where there are
more, the next range follows.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nearkin.evaluation.verification.pair_scan import Scan
from nearkin.evaluation.verification.roc import Counts, Roc

_LEAST, _MOST = -(2**63), 2**63 - 1  # numbers that no finite score has
KEY_BYTES = 160  # of working memory a distinct genuine score takes, merging and counting included


class Stretch(NamedTuple):
    """Some distinct genuine scores, rising, as numbers; pairs of both kinds at each and at or above each."""

    key: Counts
    genuine: Counts
    impostors: Counts
    tp: Counts
    fp: Counts


class Swept(NamedTuple):
    """Area under the curve; the best balanced accuracy and the number of the score from which on to accept for it."""

    auc: float
    balanced: float
    key: int


class Levels:
    """Picks the scores nearest to wanted rates as stretches pass: half of them even in TAR, half even in log FAR."""

    def __init__(self, points: int, genuine: int, impostors: int) -> None:
        half = max(points // 2, 1)
        self.tar = np.ceil(np.linspace(1 / half, 1, half) * genuine)  # at least so many accepted
        self.far = np.floor(np.geomspace(1, impostors, max(points - half, 1)))  # at most so many
        self.found = np.zeros((3, len(self.tar) + len(self.far)), np.int64)  # key, tp, fp
        self.known = np.zeros(self.found.shape[1], dtype=bool)

    def meet(self, stretch: Stretch) -> None:
        table = np.stack([stretch.key, stretch.tp, stretch.fp])
        split = len(self.tar)
        at = np.searchsorted(-stretch.tp, -self.tar, side="right") - 1  # the highest score that accepts enough
        some = np.flatnonzero(at >= 0)
        self.found[:, some], self.known[some] = table[:, at[some]], True
        at = np.searchsorted(-stretch.fp, -self.far, side="left")  # the lowest that accepts no more
        some = np.flatnonzero((at < len(stretch.key)) & ~self.known[split:])
        self.found[:, split + some], self.known[split + some] = table[:, at[some]], True

    def keys(self) -> Counts:
        """The numbers of the scores, rising."""
        return np.unique(self.found[0, self.known])

    def roc(self, scan: Scan) -> Roc:
        """The curve at these scores, falling, after a first point (0, 0) at +inf; ends where all genuine are in."""
        picked = np.unique(self.found[:, self.known], axis=1)[:, ::-1]
        threshold = np.array([np.inf, *(scan.score(int(key)) for key in picked[0])])
        tar, far = (np.append(0, row) / of for row, of in ((picked[1], scan.genuine), (picked[2], scan.impostors)))
        return Roc(threshold, far, tar)


def sweep(scan: Scan, capacity: int, levels: list[Levels]) -> Swept:
    """Goes through the curve once, `capacity` distinct genuine scores at a time.

    The best accuracy is always reached at a genuine score, since a higher threshold only loses and a lower one down to
    the next only lets impostors in; of equally good scores the highest is taken.
    """
    area, best = 0.0, (-1, 0)  # best: TAR - FAR in parts of genuine · impostors, and its score
    for stretch in _stretches(scan, capacity):
        for level in levels:
            level.meet(stretch)
        below = scan.impostors - stretch.fp + stretch.impostors / 2  # ties count half
        area += float((stretch.genuine * below).sum())
        gain = stretch.tp / scan.genuine - stretch.fp / scan.impostors
        for place in np.flatnonzero(gain >= gain.max() - 1e-12):  # floats choose the few, whole numbers among them
            exact = int(stretch.tp[place]) * scan.impostors - int(stretch.fp[place]) * scan.genuine
            best = max(best, (exact, int(stretch.key[place])))
    whole = scan.genuine * scan.impostors
    return Swept(area / whole, 0.5 + best[0] / (2 * whole), best[1])


def _stretches(scan: Scan, capacity: int) -> Iterator[Stretch]:
    low, kin, strange = _LEAST, 0, 0  # genuine and impostors below
    while low < _MOST:
        if low != _LEAST:
            scan.passes += 1
        keys, counts, high = _collect(scan, low, capacity)
        table = _between(scan, keys, low, high)
        genuine, impostors = counts.cpu().numpy(), table[1::2]
        tp = scan.genuine - kin - np.cumsum(genuine) + genuine
        fp = scan.impostors - strange - np.cumsum(table)[:-1:2]
        yield Stretch(keys.cpu().numpy(), genuine, impostors, tp, fp)
        low, kin, strange = high, kin + int(genuine.sum()), strange + int(table.sum())


def _collect(scan: Scan, low: int, capacity: int) -> tuple[Tensor, Tensor, int]:
    """The lowest distinct genuine numbers from `low` on, how many pairs have each, and where the next would begin."""
    keys = counts = torch.empty(0, dtype=torch.long, device=scan.order.device)
    high, waiting, size = _MOST, [keys], 0

    def merged() -> tuple[Tensor, Tensor, int]:
        new = torch.cat(waiting)
        every, place = torch.unique(torch.cat([keys, new]), return_inverse=True)
        total = torch.zeros_like(every).index_add_(0, place, torch.cat([counts, torch.ones_like(new)]))
        if len(every) <= capacity:
            return every, total, high
        return every[:capacity].clone(), total[:capacity].clone(), int(every[capacity])

    for key, one, other in scan.tiles(genuine_only=True):
        key = key[~scan.strange(one, other)]
        key = key[(key >= low) & (key < high)]
        waiting.append(key)
        size += len(key)
        if size > capacity:
            keys, counts, high = merged()
            waiting, size = [], 0
    return merged() if waiting else (keys, counts, high)


def _between(scan: Scan, keys: Tensor, low: int, high: int) -> Counts:
    """Impostors below the first number, at it, between it and the second, …, above the last: (2 K + 1,)."""
    table = torch.zeros(2 * len(keys) + 1, dtype=torch.long, device=keys.device)
    for key, one, other in scan.tiles():
        key = key[scan.strange(one, other)]
        if low != _LEAST or high != _MOST:
            key = key[(key >= low) & (key < high)]
        place = torch.searchsorted(keys, key)
        place = 2 * place + (keys[place.clamp(max=len(keys) - 1)] == key)
        table.index_add_(0, place, torch.ones_like(place))
    return scan.summed(table)
