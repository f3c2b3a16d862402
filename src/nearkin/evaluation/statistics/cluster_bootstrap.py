"""Intervals of means over queries, and paired tests: the classes are the random sample, not the items.

Queries of one class succeed and fail together, so items are not independent: what counts is how classes differ
(Davison, Hinkley 1997, section 3.8). A metric is reported for unseen classes, and the interval shows their spread. A
new sample of classes also brings other classes to tell them from, which moves all queries at once; in simulations
(docs/measured/evaluation.md) this adds up to a fifth to the variance over the query classes, and a fifth is added. The
embeddings are fixed: the interval does not cover the randomness of training.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin.core import checks, random
from nearkin.core.relations import UNKNOWN, Labels, Relation
from nearkin.evaluation.arrays import Array, Ends, Floats, Ids, Scores, takes_arrays
from nearkin.evaluation.statistics import binomial
from nearkin.evaluation.statistics.binomial import MIN_CLASSES

__all__ = [
    "bootstrap", "classes_of", "coin_flips", "compare", "explain_missing", "percentiles", "resamples",
    "share_interval", "too_few",
]  # fmt: skip

_CELLS = 2**21  # (sample, class) cells at a time: some 50 MiB
_EXACT = 16  # classes up to which all 2^16 signs are tried
_NEW_GALLERY = 1.2  # variance with new gallery classes as well, relative to that over query classes alone


@takes_arrays
def share_interval(values: Array, groups: Ids, *, confidence: float = 0.95) -> Ends:
    """Interval of the mean of `values` (Q,), each in [0, 1], over the choice of the classes `groups` (Q,).

    Values that are NaN or of class -1 do not count. The variance is that of the jackknife over classes, and a fifth for
    the other classes in the gallery, and at least that of as many independent queries, right or wrong; the interval is
    `binomial.share`. With fewer than 5 classes too little is known of their spread: (nan, nan).
    docs/measured/evaluation.md has its coverage in simulations, for new classes and galleries.
    """
    values = _checked("values", values, groups)
    checks.between("confidence", confidence, 0, 1)
    value, variance, freedom, classes = _spread(values, groups)
    if classes < MIN_CLASSES:
        return binomial.NONE
    queries = int((~values.isnan() & (groups.cpu() != UNKNOWN)).sum())
    variance = max(variance, value * (1 - value) / queries)
    return binomial.share(value, variance, freedom=freedom, classes=classes, confidence=confidence)


@takes_arrays
def bootstrap(values: Array, groups: Ids, *, samples: int = 1000, seed: int = 0, confidence: float = 0.95) -> Ends:
    """Percentile interval of the mean of any `values` (Q,), resampling the classes `groups` (Q,).

    Values that are NaN or of class -1 do not count; classes without a value are not drawn. The percentiles are widened
    for few classes, as Student's t is (Hesterberg 2015, section 5.2.3): where class means are normal, 95 in 100
    intervals contain the truth with any number of classes. With fewer than 5 classes: (nan, nan). For values in [0, 1]
    `share_interval` is better.
    """
    values = _checked("values", values, groups)
    checks.integer("samples", samples, 1)
    checks.integer("seed", seed, 0)
    checks.between("confidence", confidence, 0, 1)
    sums, counts = _by_class(values, groups)
    return _interval(sums, counts, samples, seed, confidence)


def too_few(classes: int) -> str:
    """The note in place of intervals where there are too few classes for one."""
    got = f"{classes} class{'' if classes == 1 else 'es'}"
    if classes >= MIN_CLASSES:  # some of them have nothing to find
        got += ", too few of them with something to find"
    return f"no 95 % intervals: they take at least {MIN_CLASSES} classes, which show how classes differ; got {got}"


def explain_missing(result: Scores[Any], classes: Tensor) -> None:
    """Notes why no interval of the result exists, where none does. classes: the ids that were to be resampled."""
    if result.intervals and all(math.isnan(low) for low, _ in result.intervals.values()):
        result.notes[:] = [too_few(len(torch.unique(classes[classes != UNKNOWN])))]


@takes_arrays
def compare(
    a: Array,
    b: Array,
    groups: Ids,
    *,
    samples: int = 10_000,
    seed: int = 0,
    confidence: float = 0.95,
    fewest: int = MIN_CLASSES,
) -> dict[str, Any]:
    """Whether the mean of a (Q,) or of b (Q,) is larger, values of the same queries of classes `groups` (Q,).

    "a", "b", "difference" (a - b), means over the queries where both count; "interval": of the difference, by Student's
    t over the classes (variance and degrees of freedom as in `share_interval`; NaN with fewer than `fewest` classes);
    "classes", "queries": how many were compared. "p": the larger of two p-values. One is of this t, which allows for
    the other classes in the gallery. The other is of a sign-flip test, for few classes, where any two that agree would
    look certain: how often the difference is as far from 0 when a and b are swapped in each class by a coin flip; all
    2^C flips up to 16 classes that differ, beyond that `samples` of them and the observed one. "verdict": "a" or "b"
    where p <= 1 - confidence, else "undecided".
    """
    a, b = _checked("a", a, groups), _checked("b", b, groups)
    checks.same_shape("b", b, a, "a")
    checks.integer("samples", samples, 1)
    checks.integer("seed", seed, 0)
    checks.between("confidence", confidence, 0, 1)
    checks.integer("fewest", fewest, 2)
    valid = ~(a.isnan() | b.isnan()) & (groups.cpu() != UNKNOWN)
    a, b, groups = a[valid], b[valid], groups.cpu()[valid]
    difference, variance, freedom, classes = _spread(a - b, groups)
    low, high = binomial.NONE
    p = _sign_flips(_by_class(a - b, groups)[0], samples, seed)
    if classes >= fewest:
        low, high = _student_interval(difference, variance, freedom, classes, confidence)
        p = max(p, binomial.student_p(difference / math.sqrt(variance), freedom) if variance > 0 else 0.0)
    better = "a" if low > 0 else "b" if high < 0 else "undecided"
    return {
        "a": _mean(a),
        "b": _mean(b),
        "difference": _mean(a - b),
        "interval": (low, high),
        "p": p,
        "classes": classes,
        "queries": len(a),
        "verdict": better if p <= 1 - confidence else "undecided",
    }


def classes_of(labels: Labels, queries: int) -> Tensor:
    """What to resample, (Q,) on the CPU: the classes, also those of a relation; else each query by itself."""
    ids = labels.ids if isinstance(labels, Relation) else labels
    if isinstance(ids, Tensor) and ids.dtype != torch.bool:
        return ids.detach().long().cpu()
    return torch.arange(queries)


def resamples(
    classes: int, samples: int, seed: int, stream: random.Stream = random.Stream.RESAMPLES
) -> Iterator[Floats]:
    """How often each class is drawn, some samples at a time (S, C); each sample has random words of its own."""
    for words in _words(classes, classes, samples, seed, stream):
        drawn = ((words >> np.uint64(11)) * 2.0**-53 * classes).astype(np.int64)
        drawn += np.arange(len(words))[:, None] * classes
        yield np.bincount(drawn.ravel(), minlength=words.size).reshape(words.shape).astype(np.float64)


def coin_flips(number: int, samples: int, seed: int, stream: random.Stream) -> Iterator[NDArray[np.uint8]]:
    """0 or 1 with even chances, some samples at a time (S, number)."""
    for words in _words(-(-number // 64), number, samples, seed, stream):
        yield np.unpackbits(words.astype("<u8").view(np.uint8), axis=1, count=number)


def _words(width: int, cells: int, samples: int, seed: int, stream: random.Stream) -> Iterator[random.Words]:
    """Random words (S, width) of some samples at a time, whose `cells` per sample fit the memory."""
    step = max(1, _CELLS // cells)
    for start in range(0, samples, step):
        some = range(start, min(start + step, samples))
        yield np.stack([random.words(width, seed, stream, sample) for sample in some])


def percentiles(values: Floats, confidence: float) -> Ends:
    """The middle `confidence` of the values of the resamples."""
    low, high = np.quantile(values, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def _checked(name: str, values: Tensor, groups: Tensor) -> Tensor:
    if not isinstance(values, Tensor) or not values.is_floating_point() or values.dim() != 1:
        got = f"{values.dtype} {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        raise TypeError(f"{name} must be a floating point tensor of shape (queries,), got {got}")
    checks.class_ids("groups", groups, values, name)
    return values.detach().double().cpu()


def _by_class(values: Tensor, groups: Tensor) -> tuple[Floats, Floats]:
    """Sums and counts (C,) of the values that count, in the order of the class ids."""
    groups = groups.cpu()
    counted = ~values.isnan() & (groups != UNKNOWN)
    place = torch.unique(groups[counted], return_inverse=True)[1].numpy()
    sums, counts = np.bincount(place, values[counted].numpy()), np.bincount(place)
    return sums.astype(np.float64), counts.astype(np.float64)


def _spread(values: Tensor, groups: Tensor) -> tuple[float, float, float, int]:
    """Mean, its variance over new classes and galleries, the degrees of freedom of that, and the number of classes.

    The variance is at least that of as many independent queries: classes may agree by chance.
    """
    sums, counts = _by_class(values, groups)
    classes = len(sums)
    if classes < 2:
        return math.nan, math.nan, math.nan, classes
    counted = values[~values.isnan() & (groups.cpu() != UNKNOWN)]
    total, mean = counts.sum(), _mean(counted)
    influence = (sums - mean * counts) / (total - counts)  # the change of the mean without a class
    variance = (classes - 1) / classes * float((influence**2).sum())
    independent = float(((counted - mean) ** 2).mean()) / len(counted)
    return mean, max(_NEW_GALLERY * variance, independent), binomial.freedom_of(influence), classes


def _student_interval(value: float, variance: float, freedom: float, classes: int, confidence: float) -> Ends:
    """Student's interval; one-sided where all queries agree: as if the classes that such a sample may have missed (all
    but (1 - confidence) ** (1 / classes) of them) had the opposite value.
    """
    if variance > 0:
        half = binomial.student(freedom, confidence) * math.sqrt(variance)
        return value - half, value + half
    end = value * (2 * (1 - confidence) ** (1 / classes) - 1)
    return min(value, end), max(value, end)


def _interval(sums: Floats, counts: Floats, samples: int, seed: int, confidence: float) -> Ends:
    classes = len(sums)
    if classes < MIN_CLASSES:
        return binomial.NONE
    table = np.stack([sums, counts], axis=1)  # (C, 2)
    totals = np.concatenate([drawn @ table for drawn in resamples(classes, samples, seed)])  # (samples, 2)
    wide = binomial.student(classes - 1, confidence) * math.sqrt(classes / (classes - 1))
    return percentiles(totals[:, 0] / totals[:, 1], 1 - 2 * binomial.normal_tail(wide))


def _sign_flips(sums: Floats, samples: int, seed: int) -> float:
    """How often a sum with random signs is at least as far from 0 as the sum itself."""
    sums = sums[sums != 0]
    observed = abs(math.fsum(sums)) - 1e-12 * float(np.abs(sums).sum())  # rounding does not decide
    if len(sums) <= _EXACT:
        every = np.zeros(1)
        for part in sums:
            every = np.concatenate([every + part, every - part])
        return float((np.abs(every) >= observed).mean())
    reached = 1
    for flips in coin_flips(len(sums), samples, seed, random.Stream.SIGN_FLIPS):
        reached += int((np.abs((1 - 2.0 * flips) @ sums) >= observed).sum())
    return reached / (samples + 1)


def _mean(values: Tensor) -> float:
    return math.fsum(values.tolist()) / len(values) if len(values) else math.nan
