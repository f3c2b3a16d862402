"""Random numbers that are the same on every machine: counter-based words, and one list of what they are drawn for.

Only the raw words of NumPy's Philox are used: their stream is guaranteed, that of `permutation` or `choice` is not.
Where a device computes its own random numbers, an integer hash of tensors takes their place.
"""

from enum import IntEnum, unique
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nearkin.core import checks

__all__ = ["GOLDEN", "Ints", "Salt", "Stream", "Words", "closest", "mix", "salted", "shuffled", "signed", "words"]

Ints = NDArray[np.int64]
Words = NDArray[np.uint64]
GOLDEN = 0x9E3779B97F4A7C15  # the odd number nearest to 2^64 over the golden ratio: multiples of it are far apart


@unique
class Stream(IntEnum):
    """What random words are drawn for: two purposes never share a stream. A number, once used, keeps its meaning."""

    # samplers
    ITEMS = 0
    CLASSES = 1
    COLUMNS = 2
    ORDER = 3
    SIZES = 4
    MINING = 5
    ANCHORS = 6
    REST = 7
    PAIRS = 8
    NEGATIVES = 9
    UNLABELLED = 10
    # evaluation
    KMEANS = 16
    EPISODES = 17
    RESAMPLES = 18
    SIGN_FLIPS = 19
    CLUSTERING_PARTS = 20
    GENUINE_PAIRS = 21
    IMPOSTOR_PAIRS = 22
    COIN_WEIGHTS = 23
    CLASS_GROUPS = 24
    LEFT_OUT_CLASSES = 25
    OPEN_SET_CLASSES = 32
    OPEN_SET_ITEMS = 33
    OPEN_SET_COHORT = 34
    # models
    LORA = 48
    PROJECTION = 49
    # report
    DIAGNOSIS = 100
    QUERIES = 101
    MAP = 102
    WORST = 103


@unique
class Salt(IntEnum):
    """What a number stands for in the hash of an augmented picture."""

    EPOCH = 1
    STEP = 2
    SEED = 3
    VIEWS = 4  # of pictures without labels


def words(count: int, seed: int, stream: Stream, *place: int) -> Words:
    """`count` random 64-bit words at a place of at most three numbers, such as (pass, batch)."""
    key = np.array([seed, stream], dtype=np.uint64)
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


def mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele et al. 2014) of int64, which wraps around; shifts are made logical."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * signed(0x94D049BB133111EB)
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def salted(value: int, salt: Salt) -> int:
    """A whole number >= 0 of any size as an int64 addend, far from those of its neighbours and of other salts."""
    checks.integer(salt.name.lower(), value, 0)
    return signed((value * GOLDEN + salt * 0xD1342543DE82EF95) % 2**64)


def signed(value: int) -> int:
    """The int64 of the same bits."""
    return value - 2**64 if value >= 2**63 else value
