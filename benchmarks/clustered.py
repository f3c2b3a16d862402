"""Rows for benchmarks of galleries: clustered as an encoder makes them, or uniform on the sphere, the hard case.

Clustered: 1,000 families have a centre each, a class adds its own offset to the centre of a random family, an item adds
noise to its class; 10 items per class. All three are normal with a standard deviation that falls as 1 / sqrt(1 + i / 8)
along direction i of a random rotation, as the spectrum of embeddings does, and weigh 1 : 1 : 0.6 before the rows are
scaled to length 1. Every block of 64,000 rows is a function of (seed, block) alone, so that any number of rows can be
made in little memory, and a larger gallery begins with the rows of a smaller one.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

__all__ = ["BLOCK", "KINDS", "PER_CLASS", "blocks", "class_of", "exact_ids", "queries", "rows"]

KINDS = ("clustered", "uniform")
BLOCK, PER_CLASS, FAMILIES, NOISE = 64_000, 10, 1_000, 0.6
CLASSES = BLOCK // PER_CLASS  # per block
Floats = NDArray[np.float32]


def class_of(row: int) -> int:
    """The class of row 0, 1, …; those of one class are far apart in their block, as in a gallery that grew."""
    return row // BLOCK * CLASSES + row % CLASSES


def blocks(count: int, dim: int = 128, kind: str = "clustered", seed: int = 0) -> Iterator[tuple[int, Floats]]:
    """(first, rows) of each block of the first `count` rows, each of length 1."""
    for first in range(0, count, BLOCK):
        yield first, _block(first // BLOCK, dim, kind, seed)[: count - first]


def rows(count: int, dim: int = 128, kind: str = "clustered", seed: int = 0) -> Floats:
    return np.concatenate([block for _, block in blocks(count, dim, kind, seed)])


def queries(number: int, count: int, dim: int = 128, kind: str = "clustered", seed: int = 0) -> Floats:
    """New items of random classes of the first `count` rows; uniform: those rows with noise of length 0.3."""
    draw = np.random.default_rng((seed, 2**32))
    chosen = np.sort(draw.integers(0, count, number))
    if kind == "uniform":
        noise = 0.3 * draw.normal(size=(number, dim)).astype(np.float32) / dim**0.5
        near = [_block(b, dim, kind, seed)[chosen[chosen // BLOCK == b] % BLOCK] for b in np.unique(chosen // BLOCK)]
        return _unit(np.concatenate(near) + noise)[draw.permutation(number)]
    centres = [_centres(b, dim, seed)[chosen[chosen // BLOCK == b] % CLASSES] for b in np.unique(chosen // BLOCK)]
    noise = NOISE * _normal(draw, number, dim)
    return _unit((np.concatenate(centres) + noise) @ _rotation(dim, seed))[draw.permutation(number)]


def exact_ids(
    count: int,
    asked: Floats,
    k: int = 10,
    dim: int = 128,
    kind: str = "clustered",
    seed: int = 0,
    step: int = 1,
    remainder: int = 0,
) -> NDArray[np.int64]:
    """(n, k) positions of the nearest rows by float64, ties by position; only rows with row % step == remainder."""
    wide = asked.astype(np.float64)
    best = np.full((len(asked), k), -np.inf)
    positions = np.full((len(asked), k), np.iinfo(np.int64).max)
    for first, block in blocks(count, dim, kind, seed):
        at = np.arange(first, first + len(block))
        at = at[at % step == remainder]
        score = np.concatenate([best, wide @ block[at - first].astype(np.float64).T], 1)
        places = np.concatenate([positions, np.broadcast_to(at, (len(asked), len(at)))], 1)
        order = np.lexsort((places, -score))[:, :k]
        best, positions = np.take_along_axis(score, order, 1), np.take_along_axis(places, order, 1)
    return positions


def _block(number: int, dim: int, kind: str, seed: int) -> Floats:
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind}")
    draw = np.random.default_rng((seed, number, 1))
    if kind == "uniform":
        return _unit(draw.standard_normal((BLOCK, dim), np.float32))
    noise = NOISE * _normal(draw, BLOCK, dim)
    return _unit((_centres(number, dim, seed)[np.arange(BLOCK) % CLASSES] + noise) @ _rotation(dim, seed))


def _centres(number: int, dim: int, seed: int) -> Floats:
    """(CLASSES, D) of a block, before the rotation."""
    families = _normal(np.random.default_rng((seed, 2**32 + 1)), FAMILIES, dim)
    draw = np.random.default_rng((seed, number, 0))
    return families[draw.integers(0, FAMILIES, CLASSES)] + _normal(draw, CLASSES, dim)


def _normal(draw: np.random.Generator, count: int, dim: int) -> Floats:
    spread = 1 / np.sqrt(1 + np.arange(dim, dtype=np.float32) / 8)
    return np.asarray(draw.standard_normal((count, dim), np.float32) * spread, np.float32)


def _rotation(dim: int, seed: int) -> Floats:
    square = np.random.default_rng((seed, 2**32 + 2)).normal(size=(dim, dim))
    return np.asarray(np.linalg.qr(square)[0], np.float32)


def _unit(values: NDArray[np.float32]) -> Floats:
    return np.asarray(values / np.linalg.norm(values, axis=1, keepdims=True), np.float32)
