"""How far a mean over queries can be trusted, and whether two differ: classes are what chance drew, not items.

Queries of one class succeed and fail together, so that items must not be taken as independent: what counts is how
classes differ (Davison, Hinkley 1997, section 3.8). Unseen classes are what a metric is reported for, and this is their
spread. A new draw of classes also brings other classes to tell them from, which moves all queries at once; in
simulations (docs/evaluation.md) this adds up to a fifth to the variance over the query classes, and a fifth is added.
The embeddings stay as they are: of the network's training the interval says nothing.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin.core import checks, random
from nearkin.core.relations import UNKNOWN, Labels, Relation
from nearkin.evaluation.arrays import Array, Ids, takes_arrays
from nearkin.evaluation.statistics import binomial
from nearkin.evaluation.statistics.binomial import MIN_CLASSES, Ends

Floats = NDArray[np.float64]

_CELLS = 2**21  # (sample, class) cells at a time: some 50 MiB
_EXACT = 16  # classes whose 2^16 signs are all tried
_OTHERS = 1.2  # variance with new classes in the gallery, too, in parts of that over query classes alone


class Scores(dict[str, float]):
    """Metrics by name; `intervals`: 95 % intervals by the same names, where they were asked for."""

    intervals: dict[str, tuple[float, float]]

    def __init__(self, values: Mapping[str, float] | None = None) -> None:
        super().__init__(values or {})
        self.intervals = {}


@takes_arrays
def share_interval(values: Array, groups: Ids, *, confidence: float = 0.95) -> Ends:
    """Interval of the mean of `values` (Q,), each in [0, 1], over the choice of the classes `groups` (Q,).

    A value that is NaN does not count, nor one of class -1. The variance is the jackknife's over classes, with a fifth
    for the other classes in the gallery, at least that of as many independent queries, right or wrong; the interval is
    `intervals.share`. With fewer than 5 classes too little is known of their spread: (nan, nan). How often it held the
    truth of new classes and galleries in simulations stands in docs/evaluation.md.
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
    """Percentile interval of the mean of any `values` (Q,), resampling the classes `groups` (Q,) (see also
    `share_interval`, which is better for values in [0, 1]).

    A value that is NaN does not count, nor one of class -1; classes without a value are not drawn. The percentiles are
    those that make up for few classes, as Student's t does (Hesterberg 2015, section 5.2.3): where class means are
    normal, 95 in 100 hold the truth with any number of classes. With fewer than 5 classes: (nan, nan).
    """
    values = _checked("values", values, groups)
    checks.integer("samples", samples, 1)
    checks.integer("seed", seed, 0)
    checks.between("confidence", confidence, 0, 1)
    sums, counts = _by_class(values, groups)
    return _interval(sums, counts, samples, seed, confidence)


def too_few(classes: int) -> str:
    """The sentence that stands in place of intervals where there are too few classes for one."""
    got = f"{classes} class{'' if classes == 1 else 'es'}"
    if classes >= MIN_CLASSES:  # of those, some have nothing to find
        got += ", too few of them with something to find"
    return f"no 95 % intervals: they take at least {MIN_CLASSES} classes, which show how classes differ; got {got}"


@takes_arrays
def compare(
    a: Array,
    b: Array,
    groups: Ids,
    *,
    samples: int = 10_000,
    seed: int = 0,
    confidence: float = 0.95,
) -> dict[str, Any]:
    """Whether the mean of a (Q,) or of b (Q,) is larger, values of the same queries of classes `groups` (Q,).

    "a", "b", "difference" (a - b), means over the queries where both count; "interval": of the difference, by Student's
    t over the classes (variance and degrees of freedom as in `share_interval`; NaN with fewer than 5 classes);
    "classes", "queries": how many were compared. "p": the larger of two. That of this t, which allows for the other
    classes in the gallery; and how often the difference is as far from 0, either side, when a and b trade places in
    every class by the toss of a coin: all 2^C tosses up to 16 classes that differ, beyond that `samples` of them, the
    one seen included, which is for few classes: any two that agree look certain, and prove nothing. "verdict": "a" or
    "b" where p <= 1 - confidence, else "undecided".
    """
    a, b = _checked("a", a, groups), _checked("b", b, groups)
    checks.same_shape("b", b, a, "a")
    checks.integer("samples", samples, 1)
    checks.integer("seed", seed, 0)
    checks.between("confidence", confidence, 0, 1)
    both = ~(a.isnan() | b.isnan()) & (groups.cpu() != UNKNOWN)
    a, b, groups = a[both], b[both], groups.cpu()[both]
    difference, variance, freedom, classes = _spread(a - b, groups)
    low, high = binomial.NONE
    p = _sign_flips(_by_class(a - b, groups)[0], samples, seed)
    if classes >= MIN_CLASSES:
        low, high = _around(difference, variance, freedom, classes, confidence)
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
    """What to resample, (Q,) on the CPU: the classes, also of a relation that has them, else each query on its own."""
    ids = labels.ids if isinstance(labels, Relation) else labels
    if isinstance(ids, Tensor) and ids.dtype != torch.bool:
        return ids.detach().long().cpu()
    return torch.arange(queries)


def resamples(
    classes: int, samples: int, seed: int, stream: random.Stream = random.Stream.RESAMPLES
) -> Iterator[Floats]:
    """How often each class is drawn, (some samples, C), until all samples were; each sample has a stream of its own."""
    step = max(1, _CELLS // classes)
    for start in range(0, samples, step):
        some = range(start, min(start + step, samples))
        words = np.stack([random.words(classes, seed, stream, sample) for sample in some])
        drawn = ((words >> np.uint64(11)) * 2.0**-53 * classes).astype(np.int64)
        drawn += np.arange(len(some))[:, None] * classes
        yield np.bincount(drawn.ravel(), minlength=len(some) * classes).reshape(len(some), classes).astype(np.float64)


def percentiles(found: Floats, confidence: float) -> tuple[float, float]:
    """The middle `confidence` of what the resamples gave."""
    low, high = np.quantile(found, [(1 - confidence) / 2, (1 + confidence) / 2])
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
    """Mean, its variance over new classes and galleries, the degrees of freedom of that, and how many classes.

    The variance is at least that of as many independent queries: classes may agree by luck.
    """
    sums, counts = _by_class(values, groups)
    classes = len(sums)
    if classes < 2:
        return math.nan, math.nan, math.nan, classes
    counted = values[~values.isnan() & (groups.cpu() != UNKNOWN)]
    total, mean = counts.sum(), _mean(counted)
    influence = (sums - mean * counts) / (total - counts)  # what leaving a class out changes
    variance = (classes - 1) / classes * float((influence**2).sum())
    alone = float(((counted - mean) ** 2).mean()) / len(counted)
    return mean, max(_OTHERS * variance, alone), binomial.freedom_of(influence), classes


def _around(value: float, variance: float, freedom: float, classes: int, confidence: float) -> Ends:
    """Student's interval. Where all queries agree: one-sided, as if the classes that so many may have missed (all but
    (1 - confidence) ** (1 / classes) of them) had the opposite value.
    """
    if variance > 0:
        half = binomial.student(freedom, confidence) * math.sqrt(variance)
        return value - half, value + half
    other = value * (2 * (1 - confidence) ** (1 / classes) - 1)
    return min(value, other), max(value, other)


def _interval(sums: Floats, counts: Floats, samples: int, seed: int, confidence: float) -> Ends:
    classes = len(sums)
    if classes < MIN_CLASSES:
        return binomial.NONE
    table = np.stack([sums, counts], axis=1)  # (C, 2)
    totals = np.concatenate([drawn @ table for drawn in resamples(classes, samples, seed)])  # (samples, 2)
    wide = binomial.student(classes - 1, confidence) * math.sqrt(classes / (classes - 1))
    return percentiles(totals[:, 0] / totals[:, 1], 1 - 2 * binomial.normal_tail(wide))


def _sign_flips(sums: Floats, samples: int, seed: int) -> float:
    """How often a sum with random signs is as far from 0 as the sum itself."""
    sums = sums[sums != 0]
    seen = abs(math.fsum(sums)) - 1e-12 * float(np.abs(sums).sum())  # rounding does not decide
    if len(sums) <= _EXACT:
        every = np.zeros(1)
        for part in sums:
            every = np.concatenate([every + part, every - part])
        return float((np.abs(every) >= seen).mean())
    reached, step = 1, max(1, _CELLS // len(sums))
    for start in range(0, samples, step):
        some = range(start, min(start + step, samples))
        words = np.stack([random.words(-(-len(sums) // 64), seed, random.Stream.SIGN_FLIPS, sample) for sample in some])
        bits = np.unpackbits(words.astype("<u8").view(np.uint8), axis=1, count=len(sums))
        reached += int((np.abs((1 - 2.0 * bits) @ sums) >= seen).sum())
    return reached / (samples + 1)


def _mean(values: Tensor) -> float:
    return math.fsum(values.tolist()) / len(values) if len(values) else math.nan
