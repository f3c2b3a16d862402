"""How well a query fits each label: the two-covariance model (PLDA) of a gallery's own rows.

Rows enter by the signed square root of their coordinates, which evens out pooled activations, and in their principal
directions. There the within-class scatter is shrunk, and a label with n rows of sum s scores

    log p(query t | with these rows) - log p(query t | a new class) = E(n + 1, s + t) - E(n, s) - E(1, t)

with the evidence E of `plda`. Everything is made of sums over rows: they are streamed once for the directions and once
for the labels, and a model without some rows, which judges these rows honestly, is the same sums less theirs.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearkin.evaluation.arrays import Counts, Floats
from nearkin.evaluation.plda import LEAST, discriminants, evidence

__all__ = ["DIRECTIONS", "Directions", "LabelFit", "LabelModel", "LabelScores", "LabelSums", "Scatter", "powered"]

DIRECTIONS = 512  # principal ones at most
SHRINK = 0.5  # of the within-class covariance towards a multiple of the identity
NOTHING = -1e6  # the score of a label without rows
Rows = NDArray[np.floating]


def powered(rows: Rows) -> Floats:
    """Signed square roots of the coordinates, at length 1 in float64."""
    roots = np.sqrt(np.abs(rows, dtype=np.float64))
    roots /= np.maximum(np.sqrt((roots * roots).sum(1, keepdims=True)), 1e-12)
    return np.asarray(np.copysign(roots, rows))


class Directions(NamedTuple):
    """The principal directions of rows: mean (D,), basis (D, K)."""

    mean: Floats
    basis: Floats

    def rows(self, rows: Rows) -> Floats:
        """(n, K) coordinates of rows (n, D)."""
        return np.asarray((powered(rows) - self.mean) @ self.basis)


class Scatter:
    """The sums of which `Directions` are made; rows are added in parts."""

    def __init__(self, dim: int) -> None:
        self.count, self.sum, self.squares = 0, np.zeros(dim), np.zeros((dim, dim))

    def add(self, rows: Rows) -> None:
        roots = powered(rows)
        self.count += len(roots)
        self.sum += roots.sum(0)
        self.squares += roots.T @ roots

    def directions(self, most: int = DIRECTIONS) -> Directions:
        mean = self.sum / max(self.count, 1)
        keep = max(1, min(most, self.count - 1, len(mean)))
        vectors = np.linalg.eigh(self.squares - self.count * np.outer(mean, mean))[1]
        return Directions(mean, np.ascontiguousarray(vectors[:, ::-1][:, :keep]))


class LabelSums(NamedTuple):
    """Rows per label: counts (C,), and the sums of their coordinates (C, K)."""

    counts: Counts
    sums: Floats

    @classmethod
    def of(cls, rows: Floats, codes: Counts, labels: int) -> "LabelSums":
        sums = np.zeros((labels, rows.shape[1]))
        np.add.at(sums, codes, rows)
        return cls(np.bincount(codes, minlength=labels), sums)


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
        live = counts > 0
        n, s = counts[live].astype(np.float64), sums[live]
        means = s / n[:, None]
        return cls(n.sum(), len(n), (1 / n).sum(), means.sum(0), means.T @ means, s.T @ means)

    def replaced(self, before: "_Terms", after: "_Terms") -> "_Terms":
        return _Terms(*(all_ - old + new for all_, old, new in zip(self, before, after, strict=True)))


class LabelFit:
    """Fits models of the same labels, with and without some rows. squares (K, K): the sum of t tᵀ over all rows."""

    def __init__(self, sums: LabelSums, squares: Floats) -> None:
        self.all, self.squares = sums, squares
        self._terms = _Terms.of(*sums)

    def model(self, less: LabelSums | None = None, less_squares: Floats | None = None) -> "LabelModel":
        """less: rows that the model must not know."""
        terms, squares = self._terms, self.squares
        if less is not None and less_squares is not None:
            changed = less.counts > 0
            before = self.all.counts[changed], self.all.sums[changed]
            after = before[0] - less.counts[changed], before[1] - less.sums[changed]
            terms, squares = terms.replaced(_Terms.of(*before), _Terms.of(*after)), squares - less_squares
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

    def rows(self, rows: Floats) -> Floats:
        return np.asarray((rows - self.mean) @ self.basis)

    def scores(self, labels: LabelSums) -> "LabelScores":
        sums = (labels.sums - labels.counts[:, None] * self.mean) @ self.basis
        return LabelScores(self.between, labels.counts, sums)


class LabelScores:
    """Scores queries against all labels of a gallery at once. basis (K, K'), between (K',): of the model."""

    def __init__(self, between: Floats, counts: Counts, sums: Floats) -> None:
        self.between, self.counts, self.sums = between, counts, sums
        self._sizes, self._size_of = np.unique(counts, return_inverse=True)
        scale = between / (1 + np.outer(self._sizes + 1, between)) / 2  # (U, K')
        per_label = scale[self._size_of]
        constant = (per_label * sums**2).sum(1)
        constant -= np.log1p(np.outer(self._sizes + 1, between)).sum(1)[self._size_of] / 2
        self._constant = constant - evidence(between, counts, sums)
        self._linear, self._square = 2 * per_label * sums, scale

    def __call__(self, queries: Floats) -> Floats:
        """(Q, C) log ratios; `NOTHING` for a label without rows."""
        new = evidence(self.between, np.ones(len(queries)), queries)
        scores = queries @ self._linear.T + (queries**2 @ self._square.T)[:, self._size_of]
        scores += self._constant - new[:, None]
        return np.where(self.counts > 0, scores, NOTHING)

    def without(self, queries: Floats, codes: Counts, rows: LabelSums) -> Floats:
        """(Q,) log ratios of each query and its label, less some rows of that label: one row of `rows` per query."""
        n, s = self.counts[codes] - rows.counts, self.sums[codes] - rows.sums
        together = evidence(self.between, n + 1, s + queries) - evidence(self.between, n, s)
        alone = evidence(self.between, np.ones(len(queries)), queries)
        return np.where(n > 0, together - alone, NOTHING)
