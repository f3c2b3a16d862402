"""Intervals of rates: exact binomial ones, also for means over classes, and Student's t.

Beta quantiles are computed here because intervals are part of a plain install, which has no scipy. The tests compare
them with scipy.
"""

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from nearkin.core import checks
from nearkin.evaluation.arrays import Ends

__all__ = [
    "MIN_CLASSES", "NONE", "binomial", "freedom_of", "normal_tail", "share", "student", "student_p",
]  # fmt: skip

MIN_CLASSES = 5  # fewer show too little of how classes differ: docs/measured/evaluation.md has the coverage
_LARGE = 10_000  # of both kinds: from here on the score interval is used

NONE: Ends = (math.nan, math.nan)  # no interval


def binomial(successes: int, trials: int, confidence: float = 0.95) -> Ends:
    """Clopper-Pearson interval of a rate, from `successes` out of `trials`.

    Its ends are beta quantiles, found by bisection on the regularised incomplete beta function. With 10,000 or more of
    both kinds the Wilson score interval with continuity correction is used; there it differs by about 1e-3 of the
    width at most. Clopper, Pearson 1934; Newcombe 1998, method 4. Trials are taken as independent.
    """
    checks.integer("trials", trials, 1)
    checks.integer("successes", successes, 0)
    checks.between("confidence", confidence, 0, 1)
    if successes > trials:
        raise ValueError(f"successes must be at most trials: {trials}, got {successes}")
    return _exact(successes, trials, (1 - confidence) / 2)


def share(value: float, variance: float, *, freedom: float, classes: int, confidence: float = 0.95) -> Ends:
    """Interval of a value in [0, 1], a mean over `classes` whose variance has `freedom` degrees of freedom.

    Clopper-Pearson with the effective number of trials: as many as give a binomial rate this variance, reduced by the
    square of normal / Student quantile (Korn, Graubard 1998, Survey Methodology 24, 193-201). It is never empty, stays
    within [0, 1] and is skewed as shares are. A value of 0 or 1 shows no spread: each class counts as one trial, and
    the interval is one-sided, from (1 - confidence) ** (1 / classes) to 1 or the mirror image of it.
    """
    if value <= 0 or value >= 1:
        end = (1 - confidence) ** (1 / classes)
        return (end, 1.0) if value >= 1 else (0.0, 1 - end)
    trials = float(classes)
    if variance > 0:
        ratio = _normal_quantile((1 + confidence) / 2) / student(freedom, confidence)
        trials = value * (1 - value) / variance * ratio**2
    return _exact(value * trials, trials, (1 - confidence) / 2)


@lru_cache(maxsize=4096)
def student(freedom: float, confidence: float = 0.95) -> float:
    """The t such that a Student variable lies within -t … t with this probability."""
    x = _beta_quantile(1 - confidence, freedom / 2, 0.5)
    return math.sqrt(freedom * (1 - x) / x)


def student_p(t: float, freedom: float) -> float:
    """The two-sided p-value of t: the probability of a Student variable at least as far from 0."""
    return _beta_cdf(freedom / (freedom + t * t), freedom / 2, 0.5) if math.isfinite(t) else 0.0


def normal_tail(z: float) -> float:
    """The probability of a normal variable above z."""
    return math.erfc(z / math.sqrt(2)) / 2


def freedom_of(influence: NDArray[np.float64], classes: int | None = None) -> float:
    """Degrees of freedom of a variance over C classes, from what each adds: fewer where a few make most of it.

    A sample variance of C values varies as a chi-square with 2 C / (kurtosis - 1) degrees (Satterthwaite's match of
    its first two moments); for normal values that is C, and no more than C - 1 are claimed. `influence` may cover a
    subset of the classes.
    """
    size, squares = classes or len(influence), influence**2
    total = float(squares.sum())
    if not total > 0:
        return float(size - 1)
    kurtosis = len(influence) * float((squares**2).sum()) / total**2
    return float(min(size - 1, max(1.0, 2 * size / max(kurtosis - 1, 1e-9))))


def _exact(successes: float, trials: float, tail: float) -> Ends:
    if successes > trials - successes:  # the nearer end is the accurate one
        low, high = _exact(trials - successes, trials, tail)
        return 1 - high, 1 - low
    if successes >= _LARGE:
        return _score(successes, trials, tail)
    low = 0.0 if successes == 0 else _beta_quantile(tail, successes, trials - successes + 1)
    return low, _beta_quantile(1 - tail, successes + 1, trials - successes)


def _score(k: float, n: float, tail: float) -> Ends:
    z = _normal_quantile(1 - tail)
    rate, square = k / n, z * z
    middle = 2 * k + square
    low = middle - 1 - z * math.sqrt(square - 2 - 1 / n + 4 * rate * (n - k + 1))
    high = middle + 1 + z * math.sqrt(square + 2 - 1 / n + 4 * rate * (n - k - 1))
    return max(low / (2 * (n + square)), 0.0), min(high / (2 * (n + square)), 1.0)


def _normal_quantile(p: float) -> float:
    low, high = -40.0, 40.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if math.erfc(-middle / math.sqrt(2)) / 2 < p else (low, middle)
    return (low + high) / 2


@lru_cache(maxsize=4096)
def _beta_quantile(p: float, a: float, b: float) -> float:
    """Bisection of the logarithm, so that rates of 1e-9 keep their digits."""
    low, high = -745.0, 0.0
    for _ in range(64):
        middle = (low + high) / 2
        low, high = (middle, high) if _beta_cdf(math.exp(middle), a, b) < p else (low, middle)
    return math.exp((low + high) / 2)


def _beta_cdf(x: float, a: float, b: float) -> float:
    """Regularised incomplete beta function I_x(a, b) by its continued fraction (Lentz's evaluation)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _beta_tail(1 - x, math.log1p(-x), math.log(x), b, a)
    return _beta_tail(x, math.log(x), math.log1p(-x), a, b)


def _beta_tail(x: float, log_x: float, log_rest: float, a: float, b: float) -> float:
    front = math.exp(a * log_x + b * log_rest - _log_beta(a, b)) / a
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    fraction = d
    for m in range(1, 100_000):
        for factor in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / (1 + factor * d)
            c = 1 + factor / c
            fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return front * fraction


def _log_beta(a: float, b: float) -> float:
    """log B(a, b); for a large argument from Stirling's series, since a difference of two log-gammas loses digits."""
    a, b = min(a, b), max(a, b)
    if b < 1e6:
        return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    ratio = a * math.log(b) + (a + b - 0.5) * math.log1p(a / b) - a + (1 / (a + b) - 1 / b) / 12  # Γ(a + b) / Γ(b)
    return math.lgamma(a) - ratio
