"""How far a counted rate can be trusted: the exact binomial interval, without scipy."""

import math
from functools import lru_cache

from nearkin.core import checks

_LARGE = 10_000  # of both kinds: from here the score interval takes over


def binomial(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Clopper-Pearson interval of a rate of which `successes` out of `trials` were seen.

    Its ends are beta quantiles, found by bisection on the regularised incomplete beta function. With 10,000 or more of
    both kinds the Wilson score interval with continuity correction stands in; there it differs by about 1e-3 of the
    width at most. Clopper, Pearson 1934; Newcombe 1998, method 4. Trials are taken as independent.
    """
    checks.whole("trials", trials, 1)
    checks.whole("successes", successes, 0)
    checks.between("confidence", confidence, 0, 1)
    if successes > trials:
        raise ValueError(f"successes must be at most trials: {trials}, got {successes}")
    if successes > trials - successes:  # the nearer end is the accurate one
        low, high = binomial(trials - successes, trials, confidence)
        return 1 - high, 1 - low
    tail = (1 - confidence) / 2
    if successes >= _LARGE:
        return _score(successes, trials, tail)
    low = 0.0 if successes == 0 else _beta_quantile(tail, successes, trials - successes + 1)
    return low, _beta_quantile(1 - tail, successes + 1, trials - successes)


def _score(k: int, n: int, tail: float) -> tuple[float, float]:
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
    """Bisection in the logarithm, so that rates of 1e-9 keep their digits."""
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
