"""Log-likelihood ratio of same class to other class as a function of the similarity, increasing and piecewise linear.

Logistic regression on a linear spline with non-negative slopes. Beyond the data the line keeps its last slope: a
similarity larger than any that was measured has a larger ratio, never a smaller one.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearkin.evaluation.arrays import Floats

__all__ = ["LogRatio", "fit"]

_RIDGE = 1e-3  # on differences of neighbouring slopes: without data a slope equals the one before it
_LEAST = 1e-2  # the smallest slope: the line rises everywhere
_STEPS = 200


class LogRatio(NamedTuple):
    """The line through (similarity, value), natural logarithm; its ends are at -1 and 1, the range of a cosine."""

    similarity: tuple[float, ...]
    value: tuple[float, ...]

    def at(self, similarity: NDArray[np.floating] | float) -> Floats:
        return np.asarray(np.interp(similarity, self.similarity, self.value), np.float64)

    def reaches(self, value: float) -> float:
        """The smallest similarity whose log ratio is `value`; +inf where there is none."""
        if value > self.value[-1]:
            return float("inf")
        return float(np.interp(value, self.value, self.similarity))


def fit(similarity: Floats, same: Floats, other: Floats, knots: Sequence[float]) -> LogRatio:
    """similarity (n,): centres of bins, rising; same, other (n,): the weight of both kinds in each; knots within."""
    valid = same + other > 0
    x, hits, weight = similarity[valid], same[valid], (same + other)[valid]
    inner = np.array([knot for knot in sorted(set(knots)) if x[0] < knot < x[-1]])
    starts, stops = np.append(x[0], inner), np.append(inner, np.inf)
    spread = x[-1] - x[0] or 1.0
    basis = np.stack([np.ones_like(x), *((np.clip(x, a, b) - a) / spread for a, b in zip(starts, stops, strict=True))])
    line = _maximum(basis.T, hits, weight, np.log(same.sum() / other.sum()))
    ends = np.concatenate([[-1.0], starts[starts > -1], [1.0]])
    slopes = line[1:] / spread
    steps = np.clip(ends[:, None], starts, np.append(inner, 2.0)) - starts
    before = np.minimum(ends - x[0], 0) * slopes[0]
    values = line[0] + steps @ slopes + before - np.log(same.sum() / other.sum())
    return LogRatio(tuple(ends.tolist()), tuple(values.tolist()))


def _maximum(basis: Floats, hits: Floats, weight: Floats, start: float) -> Floats:
    """Newton steps, halved until they improve the likelihood; slopes stay at `_LEAST` or more."""
    count = basis.shape[1]
    bend = np.diff(np.eye(count)[1:], axis=0)
    ridge = _RIDGE * bend.T @ bend

    def gain(line: Floats) -> float:
        z = basis @ line
        return float((hits * z - weight * np.logaddexp(0, z)).sum() - line @ ridge @ line / 2)

    line = np.append(start - 5.0, np.full(count - 1, 10.0))
    now = gain(line)
    for _ in range(_STEPS):
        p = 1 / (1 + np.exp(-np.clip(basis @ line, -500, 500)))
        slope = basis.T @ (hits - weight * p) - ridge @ line
        curve = (basis * (weight * p * (1 - p))[:, None]).T @ basis + ridge + 1e-6 * np.eye(count)
        free = np.append(True, (line[1:] > _LEAST) | (slope[1:] > 0))
        step = np.zeros(count)
        step[free] = np.linalg.solve(curve[np.ix_(free, free)], slope[free])
        size = 1.0
        while True:
            ahead = line + size * step
            ahead[1:] = np.maximum(ahead[1:], _LEAST)
            then = gain(ahead)
            if then >= now or size < 1e-9:
                break
            size /= 2
        if then - now < 1e-7 * (1 + abs(now)):
            return ahead if then >= now else line
        line, now = ahead, then
    return line
