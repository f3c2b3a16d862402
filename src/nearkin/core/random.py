"""Chance and order that are the same on every machine.

Only the raw words of NumPy's Philox are used: its stream is guaranteed, that of `permutation` or `choice` is not.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Words = NDArray[np.uint64]

# What a stream of words is for: two purposes never share one.
ITEMS, CLASSES, COLUMNS, ORDER, SIZES, MINING, ANCHORS, REST, PAIRS, NEGATIVES = range(10)


def words(count: int, seed: int, purpose: int, *place: int) -> Words:
    """`count` random 64-bit words at a place of at most three numbers, such as (pass, batch)."""
    key = np.array([seed, purpose], dtype=np.uint64)
    counter = np.array([0, *place, *[0] * (3 - len(place))], dtype=np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(count)


def shuffled(keys: Words) -> Ints:
    """A random order of 0 … len(keys) - 1."""
    return np.argsort(keys, kind="stable")


def closest(distance: NDArray[Any], count: int) -> Ints:
    """The places of the `count` smallest distances, nearest first, ties by the lowest place; NaN is never chosen."""
    if count == 0:
        return np.empty(0, np.int64)
    edge = np.partition(distance, count - 1)[count - 1]
    inside = np.flatnonzero(distance < edge)
    ties = np.flatnonzero(distance == edge)[: count - inside.size]
    chosen = np.concatenate([inside, ties])
    return chosen[np.argsort(distance[chosen], kind="stable")]
