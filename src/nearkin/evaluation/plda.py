"""Probabilistic linear discriminant analysis (PLDA): how classes scatter, learned from some, used to group others.

The two-covariance model (Ioffe 2006, "Probabilistic linear discriminant analysis"; Brümmer and de Villiers 2010, "The
speaker partitioning problem"): the mean of a class is drawn from a Gaussian with covariance `between`, its items
around it with covariance `within`, both the same for all classes. In coordinates in which `within` is the identity and
`between` diagonal (b_1 … b_K), the evidence of n items with sum s as one class, beside that of no class at all, is

    E(n, s) = sum_k  b_k s_k^2 / (2 (1 + n b_k)) - log(1 + n b_k) / 2

Two groups are joined while E(n + m, s + t) - E(n, s) - E(m, t) is positive: the joint class explains them better than
two classes do. Unlike a mean cosine this counts items: the means of two large groups are known well, and a small
difference between them tells two classes apart.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nearkin.core import checks
from nearkin.evaluation.arrays import Array, Counts, Floats, Ids, Progress, takes_arrays
from nearkin.evaluation.group_agreement import bcubed_values

__all__ = ["LEAST", "PLDA", "discriminants", "evidence", "fit_plda"]

SHRINK = 0.1  # of the within-class covariance towards a multiple of the identity
SPREADS = (1.0, 1.4, 2.0, 2.8, 4.0)  # tried on the validation classes
SPREAD = 2.0  # without any
MOST = 20_000  # items that are grouped to choose it
LEAST = 1e-3  # between / within: dimensions below tell nothing
_CELLS = 2**20  # numbers at a time


class PLDA(NamedTuple):
    """What `fit_plda` returns.

    mean (D,), basis (D, K), between (K,): (x - mean) @ basis has the identity within classes and `between` as the
    variances between them. spread: by how much the within-class covariance of new classes exceeds that of the classes
    the model was fitted on; basis and between have it. tried: (spread, B-cubed F on the validation classes).
    """

    mean: Floats
    basis: Floats
    between: Floats
    spread: float
    tried: list[tuple[float, float]]

    def rows(self, embeddings: Floats) -> Floats:
        """(N, K): the coordinates of unit rows (N, D)."""
        result: Floats = (embeddings - self.mean) @ self.basis
        return result

    def near(self, rows: Floats) -> Floats:
        """(N, K): rows whose cosines order pairs about as the likelihood ratio of being one class does."""
        result: Floats = rows * np.sqrt(self.between / (1 + 2 * self.between))
        return result

    def evidence(self, counts: Floats, sums: Floats) -> Floats:
        """E(n, s) of groups (G,): counts (G,), sums (G, K)."""
        return evidence(self.between, counts, sums)

    def gains(self, counts: Floats, sums: Floats, evidence: Floats, first: Counts, second: Counts) -> Floats:
        """By how much the evidence rises if the groups `first` and `second` are joined, for many pairs."""
        values, step = np.empty(len(first)), max(1, _CELLS // max(sums.shape[1], 1))
        for start in range(0, len(first), step):
            a, b = first[start : start + step], second[start : start + step]
            together = self.evidence(counts[a] + counts[b], sums[a] + sums[b])
            values[start : start + step] = together - evidence[a] - evidence[b]
        return values

    def spread_by(self, factor: float) -> "PLDA":
        """The model of classes whose items scatter more by this factor (of variances)."""
        return self._replace(
            basis=self.basis / np.sqrt(factor), between=self.between / factor, spread=self.spread * factor
        )


@takes_arrays
def fit_plda(
    embeddings: Array,
    labels: Ids,
    *,
    validation: Array | None = None,
    validation_labels: Ids | None = None,
    shrink: float = SHRINK,
    progress: Progress | None = None,
) -> PLDA:
    """How the classes of labelled embeddings (N, D) scatter, for `group(x, method="plda", model=...)` of other classes.

        model = evaluation.fit_plda(train, train_labels, validation=val, validation_labels=val_labels)
        evaluation.group(test, method="plda", model=model)

    An encoder has learned from its training classes, and the items of new ones scatter more. Of the factors 1 to 4 the
    one is taken with which the validation classes, which it has not learned from, are grouped best (B-cubed F) among
    the others, of which there may be many; of equally good ones the smallest. Without them it is 2. shrink: the share
    of a multiple of the identity in the within-class covariance. Items without a label (-1) are left out; there must be
    two classes, and one of two items. progress(done, total) counts the factors.
    """
    from nearkin.evaluation.grouping import group, unit_rows  # which calls this module

    checks.rows("embeddings", embeddings)
    checks.number("shrink", shrink)
    if not 0 < shrink <= 1:
        raise ValueError(f"shrink must be > 0 and <= 1, got {shrink:g}")
    known = labels.cpu().numpy() >= 0
    plain = _fitted(unit_rows(embeddings)[known], labels.cpu().numpy()[known], shrink)
    if validation is None or validation_labels is None:
        return plain.spread_by(SPREAD)
    checks.dimensions("validation", validation, embeddings.shape[1], "embeddings have")
    some = _first_classes(labels, MOST - len(validation))
    together = torch.cat([validation, embeddings[some].to(validation)])
    classes = torch.cat([validation_labels, labels[some] + validation_labels.max() + 1])
    tried = []
    for done, spread in enumerate(SPREADS):
        groups = group(together, method="plda", model=plain.spread_by(spread)).assignment
        shares = [np.nanmean(values[: len(validation)]) for values in bcubed_values(classes, groups)]
        tried.append((spread, float(2 * shares[0] * shares[1] / (shares[0] + shares[1]))))
        if progress is not None:
            progress(done + 1, len(SPREADS))
    best = max(tried, key=lambda one: (one[1], -one[0]))[0]
    return plain.spread_by(best)._replace(tried=tried)


def _first_classes(labels: torch.Tensor, most: int) -> torch.Tensor:
    """The indices of the items of the first classes that have at most so many items together."""
    sizes = torch.bincount(labels.clamp(min=0), weights=(labels >= 0).double())
    return ((labels >= 0) & (sizes.cumsum(0)[labels.clamp(min=0)] <= most)).nonzero()[:, 0]


def _fitted(rows: Floats, labels: Counts, shrink: float) -> PLDA:
    _, label, counts = np.unique(labels, return_inverse=True, return_counts=True)
    if len(counts) < 2 or counts.max() < 2:
        raise ValueError(f"labels must have two classes, one of them of two items or more, got {len(counts)} classes")
    means = np.zeros((len(counts), rows.shape[1]))
    np.add.at(means, label, rows)
    means /= counts[:, None]
    inner = rows - means[label]
    within = inner.T @ inner / (len(rows) - len(counts))
    mean = means.mean(0)
    between = (means - mean).T @ (means - mean) / (len(counts) - 1) - within * (1 / counts).mean()
    basis, ratios = discriminants(within, between, shrink)
    chosen = ratios > LEAST
    if not chosen.any():
        raise ValueError("the classes of the labels cannot be told apart: their means differ less than their items")
    return PLDA(mean, basis[:, chosen], ratios[chosen], 1.0, [])


def evidence(between: Floats, counts: NDArray[Any], sums: Floats) -> Floats:
    """E(n, s) of groups (G,): counts (G,), sums (G, K)."""
    scale = 1 + np.outer(counts, between)
    return np.asarray((between * sums**2 / scale - np.log(scale)).sum(1) / 2)


def discriminants(within: Floats, between: Floats, shrink: float) -> tuple[Floats, Floats]:
    """basis (D, D), between (D,) rising: coordinates with the shrunk `within` as the identity, `between` diagonal."""
    size = len(within)
    within = (1 - shrink) * within + np.eye(size) * max(shrink * np.trace(within) / size, 1e-12)
    root = torch.from_numpy(np.linalg.cholesky(within))
    half = torch.linalg.solve_triangular(root, torch.from_numpy(between), upper=False)
    ratios, directions = np.linalg.eigh(torch.linalg.solve_triangular(root, half.T, upper=False).numpy())
    return torch.linalg.solve_triangular(root.T, torch.from_numpy(directions), upper=True).numpy(), ratios
