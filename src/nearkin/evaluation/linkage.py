"""Linkage along the edges of a graph: connected components, average linkage, and linkage by a likelihood."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from nearkin.evaluation.arrays import Floats
from nearkin.evaluation.plda import PLDA

__all__ = ["ROUNDING", "average_linkage", "components", "likelihood_linkage"]

ROUNDING = 1e-12  # of a mean cosine in float64
_CELLS = 2**22  # numbers that are multiplied at a time: 32 MiB

Ints = NDArray[np.int64]


def components(size: int, first: Ints, second: Ints) -> Ints:
    """The lowest item of each item's component: labels are lowered along edges, then along labels, until none falls."""
    label = np.arange(size)
    while True:
        low = np.minimum(label[first], label[second])
        lowered = label.copy()
        for end in (first, second):
            np.minimum.at(lowered, end, low)
            np.minimum.at(lowered, label[end], low)
        while not np.array_equal(lowered, shorter := lowered[lowered]):
            lowered = shorter
        if np.array_equal(lowered, label):
            return label
        label = lowered


def average_linkage(sums: Floats, first: Ints, second: Ints, value: Floats, similarity: float) -> Ints:
    """The group of each item, named by its lowest item. sums: unit rows, which become the sums of the groups."""
    counts = np.ones(len(sums))

    def join(low: Ints, high: Ints) -> None:
        sums[low] += sums[high]
        counts[low] += counts[high]

    def measure(first: Ints, second: Ints) -> Floats:
        return _mean_cosines(sums, counts, first, second)

    return _linked(len(sums), (first, second, value), similarity - ROUNDING, join, measure, drop=True)


def likelihood_linkage(sums: Floats, first: Ints, second: Ints, model: PLDA) -> Ints:
    """As `average_linkage`, while the evidence rises; two groups may gain by it only after others have joined them.

    Nearest are those that gain most per item of the smaller group; by the gain itself, two large groups that are
    somewhat alike would come before two items that are much alike. sums: rows of the model.
    """
    counts = np.ones(len(sums))
    evidence = model.evidence(counts, sums)

    def join(low: Ints, high: Ints) -> None:
        sums[low] += sums[high]
        counts[low] += counts[high]
        evidence[low] = model.evidence(counts[low], sums[low])

    def measure(first: Ints, second: Ints) -> Floats:
        gains = model.gains(counts, sums, evidence, first, second)
        values: Floats = gains / np.minimum(counts[first], counts[second])
        return values

    return _linked(len(sums), (first, second, measure(first, second)), ROUNDING, join, measure, drop=False)


def _linked(
    size: int,
    edges: tuple[Ints, Ints, Floats],
    least: float,
    join: Callable[[Ints, Ints], None],
    measure: Callable[[Ints, Ints], Floats],
    drop: bool,
) -> Ints:
    """Joins groups that are each other's nearest while their value reaches `least`; groups are named by a lowest item.

    join(low, high) puts groups into others, measure(first, second) returns the values of pairs of groups. drop: a pair
    below `least` stays below.
    """
    (first, second, value), label = edges, np.arange(size)
    while True:
        near = value >= least
        if not near.any():
            return label
        if drop:
            first, second, value = first[near], second[near], value[near]
            near = np.ones(len(value), bool)
        low, high = _mutual_nearest(size, first[near], second[near], value[near])
        join(low, high)
        merged = np.arange(size)
        merged[high] = low
        label = merged[label]
        changed = np.zeros(size, bool)
        changed[low] = True
        first, second = merged[first], merged[second]
        apart = first != second
        first, second, value = first[apart], second[apart], value[apart]
        keys, at = np.unique(np.minimum(first, second) * size + np.maximum(first, second), return_index=True)
        first, second, value = keys // size, keys % size, value[at]
        stale = np.flatnonzero(changed[first] | changed[second])
        value[stale] = measure(first[stale], second[stale])


def _mutual_nearest(size: int, first: Ints, second: Ints, value: Floats) -> tuple[Ints, Ints]:
    """Pairs of groups that are each other's nearest, the lower one first; of equally near ones the lowest counts.

    There is always one: of the nearest pairs of all, that of the lowest group.
    """
    source, target, near = np.append(first, second), np.append(second, first), np.append(value, value)
    order = np.argsort(source, kind="stable")
    source, target, near = source[order], target[order], near[order]
    starts = np.flatnonzero(np.append(True, source[1:] != source[:-1]))
    best = np.repeat(np.maximum.reduceat(near, starts), np.diff(np.append(starts, len(source))))
    nearest_group = np.full(size, -1)
    nearest_group[source[starts]] = np.minimum.reduceat(np.where(near == best, target, size), starts)
    groups = source[starts]
    mutual = groups[(nearest_group[nearest_group[groups]] == groups) & (groups < nearest_group[groups])]
    return mutual, nearest_group[mutual]


def _mean_cosines(sums: Floats, counts: Floats, first: Ints, second: Ints) -> Floats:
    """The mean cosine over all pairs of two groups, for many pairs of groups."""
    means, step = np.empty(len(first)), max(1, _CELLS // max(sums.shape[1], 1))
    for start in range(0, len(first), step):
        a, b = first[start : start + step], second[start : start + step]
        means[start : start + step] = np.einsum("pd,pd->p", sums[a], sums[b]) / (counts[a] * counts[b])
    return means
