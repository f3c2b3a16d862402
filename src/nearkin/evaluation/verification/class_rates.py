"""False-accept rates (FAR) on unseen classes: the class, not the pair, is the unit of sampling.

F(a, b; t) is the share of pairs of an item of class a and one of class b whose similarity reaches t. The FAR on new
classes is the mean over all pairs of classes, and two pairs that share a
class are not independent. Its variance is therefore that of leaving out one class at a time (jackknife; Efron, Stein
1981: on average no smaller than the true one). The few classes that are confused make the rate skewed, as rare events
do, and the bound is a gamma quantile (Fay, Feuer 1997) that assumes one more event: a pair of classes confused in every
item, or a class as bad as the worst of the sample, whichever is more. With no false accept at all it is the rule of
three over the pairs of classes.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nearkin.evaluation.arrays import Counts, Ends, Floats
from nearkin.evaluation.statistics import binomial

__all__ = [
    "Rates", "accepts", "classes_needed", "gamma_quantile", "genuine_groups", "impostor_rates", "mean_interval",
    "most_others", "others_of", "smallest_far", "true_accepts",
]  # fmt: skip

Groups = Sequence[Counts]  # the rows of each class


class Rates(NamedTuple):
    """At each of the rising thresholds: the mean over pairs of classes, its 95 % interval, and a bound for new classes.

    bound: with `confidence` the rate on new classes is not larger, at this threshold and at all above it.
    """

    far: Floats
    low: Floats
    high: Floats
    bound: Floats


def impostor_rates(sums: Floats, confidence: float = 0.95) -> Rates:
    """The false-accept rates of the sums (T, C) of `accepts`."""
    count = sums.shape[1]
    total, pairs = sums.sum(1) / 2, count * (count - 1)  # each ordered pair counts for both of its classes
    far = total / pairs
    without = (total[:, None] - sums) / ((count - 1) * (count - 2))
    variance = (count - 1) / count * ((without - without.mean(1, keepdims=True)) ** 2).sum(1)
    event = np.maximum(2.0, sums.max(1)) / pairs
    with_event = far + event, variance + event**2
    two_sided = (1 - confidence) / 2
    bound = np.minimum(gamma_quantile(confidence, *with_event), 1.0)
    return Rates(
        far,
        gamma_quantile(two_sided, far, variance),
        np.minimum(gamma_quantile(1 - two_sided, *with_event), 1.0),
        np.maximum.accumulate(bound[::-1])[::-1],
    )


def smallest_far(classes: int, confidence: float = 0.95) -> float:
    """The smallest rate that this many classes can show: no false accept in any pair of them."""
    return min(1.0, -math.log1p(-confidence) / (classes * (classes - 1) / 2))


def classes_needed(far: float, confidence: float = 0.95) -> int:
    """The fewest classes that can show this rate; rates below 1e-18 count as 1e-18."""
    pairs = -math.log1p(-confidence) / max(far, 1e-18)
    return math.ceil((1 + math.sqrt(1 + 8 * pairs)) / 2 - 1e-9)


def accepts(rows: NDArray[np.float32], groups: Groups, thresholds: Floats) -> Floats:
    """(T, C): the sum of F(a, b; t) over all ordered pairs that contain class c. rows have length 1.

    Each item is a query. Memory: items of a class times all items.
    """
    references = rows[np.concatenate(groups)].T
    number = np.array([len(group) for group in groups])
    owner = np.repeat(np.arange(len(groups)), number)
    bins = len(thresholds) + 1
    sums = np.zeros((len(thresholds), len(groups)))
    for a, group in enumerate(groups):
        reached = np.searchsorted(thresholds, rows[group] @ references, side="right") + owner * bins
        counts = np.bincount(reached.ravel(), minlength=len(groups) * bins).reshape(len(groups), bins)
        rate = counts[:, :0:-1].cumsum(1)[:, ::-1] / (len(group) * number)[:, None]  # (C, T)
        rate[a] = 0
        sums[:, a] += rate.sum(0)
        sums += rate.T
    return sums


def others_of(group: Counts, item: int, bursts: Counts | None) -> NDArray[np.bool_]:
    """Which items of a class an item of it is compared with: all others, or those of other bursts."""
    mine = np.arange(len(group)) == item if bursts is None else bursts[group] == bursts[group[item]]
    return np.asarray(~mine, dtype=bool)


def most_others(group: Counts, bursts: Counts | None) -> int:
    """With how many items of its class an item can be compared, of the one with the most."""
    if bursts is None:
        return len(group) - 1
    return len(group) - int(np.unique(bursts[group], return_counts=True)[1].min())


def genuine_groups(rows: NDArray[np.float32], groups: Groups, bursts: Counts | None = None) -> list[Floats]:
    """Per class, the similarities of its items to each of its others, of which there must be one.

    bursts: of the rows; items of one class and burst are not compared.
    """
    result = []
    for group in groups:
        near = rows[group] @ rows[group].T
        scores = [near[item][others_of(group, item, bursts)] for item in range(len(group))]
        result.append(np.concatenate(scores).astype(np.float64))
    return result


def true_accepts(scores: Sequence[Floats], thresholds: Floats) -> Floats:
    """(C, T): per class, the share of its scores at or above each threshold."""
    return np.stack([1 - np.searchsorted(np.sort(part), thresholds) / len(part) for part in scores])


def mean_interval(shares: Floats, confidence: float = 0.95) -> Ends:
    """The interval of the mean of shares (C,), one per class.

    The binomial interval of as many items as would vary like the classes (Korn, Graubard 1998).
    """
    rate, count = float(shares.mean()), len(shares)
    variance = float(shares.var(ddof=1)) / count
    trials = max(1, math.floor(rate * (1 - rate) / variance)) if variance > 0 else count
    low = binomial.binomial(math.floor(rate * trials + 1e-9), trials, confidence)[0]
    return low, binomial.binomial(math.ceil(rate * trials - 1e-9), trials, confidence)[1]


def gamma_quantile(level: float, mean: Floats, variance: Floats) -> Floats:
    """The quantile of the gamma distribution of this mean and variance, by bisection; the mean where nothing varies."""
    fixed = (mean <= 0) | (variance <= 0)
    shape = torch.from_numpy(np.where(fixed, 1.0, mean**2 / np.where(fixed, 1.0, variance)))
    low, high = torch.zeros_like(shape), shape + 40 * shape.sqrt() + 40
    for _ in range(70):
        middle = (low + high) / 2
        below = torch.special.gammainc(shape, middle) < level
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    quantile = high.numpy() * np.where(fixed, 1.0, variance) / np.where(fixed, 1.0, mean)
    return np.where(fixed, mean, quantile)
