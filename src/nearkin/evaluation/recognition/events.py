"""Three events of a query, learned from a gallery: its best label is right, another label is, or none is.

A multinomial regression on features of the evidence, each relative to those of strangers, so that weights learned
elsewhere carry over; where a gallery is small, its own weights are pulled towards these.
"""

from typing import NamedTuple

import numpy as np

from nearkin.evaluation.arrays import Counts, Floats
from nearkin.evaluation.verification.class_rates import gamma_quantile

__all__ = [
    "DEFAULT", "EVENTS", "FEATURES", "NONE", "OTHER", "PRIOR", "RIGHT", "SINGLE", "SURE", "Far", "far_curve",
    "features", "fit_events",
]  # fmt: skip

EVENTS = RIGHT, OTHER, NONE = range(3)
FEATURES = ("log ratio", "its margin", "cosine", "ratio of distances")
PRIOR = 0.3  # of the queries are of nobody in the gallery, unless the caller knows better
SURE = 0.7  # probability from which on a label is named, or a query called unknown
RIDGE = 5.0  # of the weights towards the defaults; questions weigh 1 in the mean
FREE = 1e-2  # of the constants without defaults
FARTHEST = 8.0  # standard deviations of strangers beyond which a feature says no more
CONFIDENCE = 0.95
_STEPS = 50

# Rows: a constant, then `FEATURES`; columns: `EVENTS`. Made by studies/identify_defaults.py from generated sets.
# SINGLE: of a gallery of one row per label, which cannot ask itself about known items.
DEFAULT = np.array(
    [[-0.29, -0.74, 1.03], [0.52, -0.14, -0.38], [0.42, -0.36, -0.06], [-0.13, 0.08, 0.05], [-0.02, -0.05, 0.06]]
)
SINGLE = np.array(
    [[-0.52, -0.15, 0.67], [0.41, -0.2, -0.21], [0.11, -0.09, -0.02], [-0.03, 0.06, -0.03], [-0.01, -0.01, 0.01]]
)


def features(best: Floats, second: Floats, near: Floats, next_: Floats) -> Floats:
    """(Q, F). best, second (Q,): the two largest log ratios. near, next_ (Q,): the cosines of the nearest row of the
    best label, and of that of any other."""
    ratio = np.log(np.maximum(1 - near, 1e-4) / np.maximum(1 - next_, 1e-4))
    return np.stack([best, best - second, near, ratio], 1)


def fit_events(x: Floats, event: Counts, weight: Floats, defaults: Floats | None = None) -> Floats:
    """Coefficients (F, 3) of the multinomial regression of events on x (n, F), by Newton's method."""
    width = x.shape[1]
    start = np.zeros((width, 3)) if defaults is None else defaults
    penalty = np.full((width, 1), RIDGE)
    penalty[0] = RIDGE if defaults is not None else FREE
    target, coefficients = np.eye(3)[event], start.copy()

    def value(b: Floats) -> float:
        logits = x @ b
        logits -= logits.max(1, keepdims=True)
        log = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        return float(-(weight[:, None] * target * log).sum() + 0.5 * (penalty * (b - start) ** 2).sum())

    current = value(coefficients)
    for _ in range(_STEPS):
        p = softmax(x @ coefficients)
        gradient = x.T @ (weight[:, None] * (p - target)) + penalty * (coefficients - start)
        hessian = np.diag(np.repeat(penalty[:, 0], 3))
        for a in range(3):
            for b in range(3):
                part = weight * p[:, a] * ((a == b) - p[:, b])
                hessian[a::3, b::3] += x.T @ (part[:, None] * x)
        step = np.linalg.solve(hessian, gradient.ravel()).reshape(width, 3)
        scale = 1.0
        while (tried := value(coefficients - scale * step)) > current and scale > 1e-6:
            scale /= 2
        coefficients = coefficients - scale * step
        if current - tried < 1e-9 * (1 + abs(current)):
            break
        current = tried
    return coefficients


def softmax(logits: Floats) -> Floats:
    p = np.exp(logits - logits.max(1, keepdims=True))
    return np.asarray(p / p.sum(1, keepdims=True))


class Far(NamedTuple):
    """Per rising score: the expected share of strangers above it, and the bound that holds with 95 % confidence."""

    score: Floats
    expected: Floats
    at_most: Floats
    classes: int

    def at(self, rate: float) -> int | None:
        """The first score whose expected share is within the rate; None where so few classes cannot show it."""
        within = np.flatnonzero(self.expected <= rate)
        return int(within[0]) if len(within) else None


def far_curve(score: Floats, classes: Counts, most: int = 512) -> Far:
    """Of the scores of strangers and their classes; conformal over classes: the next one may be above every score.

    A share is a mean over classes, of which each weighs the same.
    """
    _, codes, sizes = np.unique(classes, return_inverse=True, return_counts=True)
    order = np.sort(np.unique(score))
    tried = order[np.unique(np.linspace(0, len(order) - 1, min(most, len(order))).astype(int))]
    tried = np.concatenate([[tried[0] - 1e-9], tried])  # below all: named whatever it is
    count = len(sizes)
    rows = np.argsort(score)
    above = np.zeros((len(tried), count))
    for i, cut in enumerate(tried):
        above[i] = np.bincount(codes[rows[np.searchsorted(score[rows], cut, side="right") :]], minlength=count) / sizes
    expected = (above.sum(1) + 1) / (count + 1)
    mean, variance = above.mean(1) + 1 / count, above.var(1, ddof=1) / count + 1 / count**2
    at_most = np.minimum(gamma_quantile(CONFIDENCE, mean, variance), 1.0)
    return Far(tried, expected, at_most, count)
