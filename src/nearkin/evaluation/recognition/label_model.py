"""How well a query fits each label: the two-covariance model (PLDA) of a gallery's own rows.

Rows enter by the signed square root of their coordinates, which evens out pooled activations, and in their principal
directions. There the within-class scatter is shrunk, and a label with n rows of sum s scores

    log p(query t | with these rows) - log p(query t | a new class) = E(n + 1, s + t) - E(n, s) - E(1, t)

with the evidence E of `plda`. Everything is made of sums over rows: they are streamed once for the directions and once
for the labels, and a model without some rows, which judges these rows honestly, is the same sums less theirs.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nearkin.evaluation.arrays import Counts, Floats
from nearkin.evaluation.plda import LEAST, discriminants, evidence

__all__ = ["DIRECTIONS", "Directions", "LabelFit", "LabelModel", "LabelScores", "LabelSums", "Scatter", "powered"]

DIRECTIONS = 512  # principal ones at most
SHRINK = 0.5  # of the within-class covariance towards a multiple of the identity
LABELS = 8192  # at a time
NOTHING = -1e6  # the score of a label without rows
Rows = NDArray[np.floating[Any]]
Vectors = NDArray[np.float32]


def powered(rows: Rows) -> Vectors:
    """Signed square roots of the coordinates, at length 1, in float32."""
    size = np.abs(rows.astype(np.float32, copy=False))
    roots = np.sqrt(size)
    roots /= np.maximum(np.sqrt(size.sum(1, keepdims=True)), 1e-12)
    return np.asarray(np.copysign(roots, rows))


class Directions(NamedTuple):
    """The principal directions of rows: mean (D,), basis (D, K)."""

    mean: Rows
    basis: Rows

    def rows(self, rows: Rows) -> Vectors:
        """(n, K) coordinates of rows (n, D)."""
        basis = self.basis.astype(np.float32, copy=False)
        return np.asarray(powered(rows) @ basis - (self.mean @ self.basis).astype(np.float32))


class Scatter:
    """The sums of which `Directions` are made; rows are added in parts."""

    def __init__(self, dim: int) -> None:
        self.count, self.sum, self.squares = 0, np.zeros(dim), np.zeros((dim, dim))

    def add(self, rows: Rows) -> None:
        roots = powered(rows)
        self.count += len(roots)
        self.sum += roots.sum(0, dtype=np.float64)
        self.squares += roots.T @ roots

    def directions(self, most: int = DIRECTIONS) -> Directions:
        mean = self.sum / max(self.count, 1)
        keep = max(1, min(most, self.count - 1, len(mean)))
        vectors = np.linalg.eigh(self.squares - self.count * np.outer(mean, mean))[1]
        return Directions(mean, np.ascontiguousarray(vectors[:, ::-1][:, :keep]).astype(np.float32))


class LabelSums(NamedTuple):
    """Rows per label: counts (C,), and the sums of their coordinates (C, K)."""

    counts: Counts
    sums: Floats

    @classmethod
    def none(cls, labels: int, size: int) -> "LabelSums":
        return cls(np.zeros(labels, np.int64), np.zeros((labels, size)))

    @classmethod
    def of(cls, rows: Rows, codes: Counts, labels: int) -> "LabelSums":
        sums = cls.none(labels, rows.shape[1])
        sums.add(rows, codes)
        return sums

    def add(self, rows: Rows, codes: Counts, sign: int = 1) -> None:
        """In place; many times as fast as `np.add.at`."""
        where = torch.from_numpy(codes.astype(np.int64, copy=False))
        torch.from_numpy(self.sums).index_add_(0, where, torch.from_numpy(rows).double(), alpha=sign)
        self.counts[:] += sign * np.bincount(codes, minlength=len(self.counts))

    def take(self, labels: Counts) -> "LabelSums":
        return LabelSums(self.counts[labels], self.sums[labels])


class _Terms(NamedTuple):
    """What the two covariances are made of, of some labels: each is a sum over them."""

    rows: float
    labels: float
    inverse: float  # of the counts
    means: Floats
    squares: Floats  # of the means
    within: Floats  # of the sums, each divided by its count

    @classmethod
    def of(cls, counts: Counts, sums: Floats) -> "_Terms":
        """Some labels at a time: many together are larger than everything else that is kept of them."""
        size = sums.shape[1]
        terms = cls(0.0, 0.0, 0.0, np.zeros(size), np.zeros((size, size)), np.zeros((size, size)))
        for start in range(0, len(counts), LABELS):
            live = np.flatnonzero(counts[start : start + LABELS]) + start
            n, s = counts[live].astype(np.float64), sums[live]
            means = s / n[:, None]
            terms = terms.plus(cls(n.sum(), len(n), (1 / n).sum(), means.sum(0), means.T @ means, s.T @ means))
        return terms

    def plus(self, more: "_Terms", sign: int = 1) -> "_Terms":
        sums: list[Any] = [one + sign * np.asarray(other) for one, other in zip(self, more, strict=True)]
        return _Terms(*sums)


class LabelFit:
    """Fits models of the same labels, with and without some rows. squares (K, K): the sum of t tᵀ over all rows."""

    def __init__(self, sums: LabelSums, squares: Floats) -> None:
        self.all, self.squares = sums, squares
        self._terms = _Terms.of(*sums)

    def without(self, labels: Counts, squares: Floats) -> "LabelModel":
        """A model that knows nothing of some labels. squares: of their rows."""
        return self._model(self._terms.plus(_Terms.of(*self.all.take(labels)), -1), self.squares - squares)

    def less(self, rows: Rows, codes: Counts) -> "LabelModel":
        """A model that knows nothing of some rows, by the numbers of their labels."""
        labels, places = np.unique(codes, return_inverse=True)
        before, sums = self.all.take(labels), LabelSums.of(rows, places, len(labels))
        after = _Terms.of(before.counts - sums.counts, before.sums - sums.sums)
        return self._model(self._terms.plus(_Terms.of(*before), -1).plus(after), self.squares - rows.T @ rows)

    def model(self) -> "LabelModel":
        return self._model(self._terms, self.squares)

    @staticmethod
    def _model(terms: _Terms, squares: Floats) -> "LabelModel":
        free = terms.rows - terms.labels
        mean = terms.means / terms.labels
        spread = terms.squares / terms.labels - np.outer(mean, mean)
        if free >= 3:
            within = (squares - terms.within) / free
        else:  # one row per label shows no scatter within
            within = spread / 3
        between = spread * (terms.labels / max(terms.labels - 1, 1)) - within * (terms.inverse / terms.labels)
        basis, ratios = discriminants(within, between, SHRINK)
        chosen = (ratios > LEAST) | (ratios >= ratios[-1])  # labels that cannot be told apart keep one direction
        return LabelModel(mean, basis[:, chosen], np.maximum(ratios[chosen], LEAST))


class LabelModel(NamedTuple):
    """mean (K,), basis (K, K'), between (K',): as those of `PLDA`, in principal directions."""

    mean: Floats
    basis: Floats
    between: Floats

    def rows(self, rows: Rows) -> Floats:
        return np.asarray((rows - self.mean) @ self.basis)

    def scores(self, labels: LabelSums) -> "LabelScores":
        sums = (labels.sums - labels.counts[:, None] * self.mean) @ self.basis
        return LabelScores(self.between, labels.counts, sums)


class LabelScores:
    """Scores queries against all labels of a gallery at once. basis (K, K'), between (K',): of the model."""

    def __init__(self, between: Floats, counts: Counts, sums: Floats) -> None:
        self.between, self.counts, self.sums = between, counts, sums
        self._sizes: dict[int, int] = {}  # a row of `_square` per number of rows that a label has
        self._square = np.zeros((0, len(between)))
        self._constant, self._size_of = np.zeros(0), np.zeros(0, np.int64)
        self._linear = np.zeros((0, len(between)), np.float32)
        self.update(counts, sums, np.arange(len(counts)))

    def update(self, counts: Counts, sums: Floats, changed: Counts) -> None:
        """The labels as they are now, of which those of these numbers have changed; there may be more than before."""
        self.counts, self.sums, more = counts, sums, len(counts) - len(self._constant)
        if more:
            self._constant = np.concatenate([self._constant, np.zeros(more)])
            self._size_of = np.concatenate([self._size_of, np.zeros(more, np.int64)])
            self._linear = np.concatenate([self._linear, np.zeros((more, self._linear.shape[1]), np.float32)])
        for size in np.unique(counts[changed]).tolist():
            same = changed[counts[changed] == size]
            now, then = 1 + size * self.between, 1 + (size + 1) * self.between
            scale = self.between / then / 2
            if size not in self._sizes:
                self._sizes[size] = len(self._square)
                self._square = np.concatenate([self._square, scale[None]])
            self._size_of[same] = self._sizes[size]
            gain = sums[same] ** 2 @ (scale - self.between / now / 2)
            self._constant[same] = gain + (np.log(now) - np.log(then)).sum() / 2
            self._linear[same] = 2 * scale * sums[same]

    def __call__(self, queries: Rows) -> Floats:
        """(Q, C) log ratios; `NOTHING` for a label without rows."""
        new = evidence(self.between, np.ones(len(queries)), queries.astype(np.float64, copy=False))
        scores = (queries.astype(np.float32, copy=False) @ self._linear.T).astype(np.float64)
        scores += (queries.astype(np.float64, copy=False) ** 2 @ self._square.T)[:, self._size_of]
        scores += self._constant - new[:, None]
        scores[:, self.counts == 0] = NOTHING
        return np.asarray(scores)

    def without(self, queries: Floats, codes: Counts, rows: LabelSums) -> Floats:
        """(Q,) log ratios of each query and its label, less some rows of that label: one row of `rows` per query."""
        n, s = self.counts[codes] - rows.counts, self.sums[codes] - rows.sums
        together = evidence(self.between, n + 1, s + queries) - evidence(self.between, n, s)
        alone = evidence(self.between, np.ones(len(queries)), queries)
        return np.where(n > 0, together - alone, NOTHING)
