"""Intervals of rates over pairs, by resampling the classes of the pairs.

A resample draws as many classes as there are, with replacement. A genuine pair counts as often as its class was drawn,
an impostor pair as often as its two classes occur together: the product of both numbers (the vertex bootstrap of
Snijders, Borgatti 1999). Two impostor pairs that share a class then move together, as they do in truth. The part of the
variance that belongs to single pairs of classes, however, is counted three times, E[(mn)²] - 1 = 3 for numbers of mean
and variance 1, and once is right. Weighting the pairs of classes independently shows how large it is, and the variance
is reduced by twice this part (the dyadic variance of Fafchamps, Gubert 2007; never to less than a third). Not so for
the TAR at a FAR: its threshold moves with the few closest pairs of classes, and in simulations
(docs/measured/evaluation.md) the full variance is what covers. The interval is that of a share with this variance,
`binomial.share`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearkin.core import checks, random
from nearkin.evaluation.arrays import Counts, Ends, Floats, Progress, Scores
from nearkin.evaluation.statistics import binomial
from nearkin.evaluation.statistics.cluster_bootstrap import coin_flips, resamples
from nearkin.evaluation.verification.roc import OperatingPoint, most_accepted

__all__ = [
    "SAMPLES", "Cells", "SortedPairs", "by_classes", "by_pairs", "drop_unsupported", "only_with_interval",
    "with_wider_intervals",
]  # fmt: skip

SAMPLES = 1000
CLASS_PAIRS = 4  # that a FAR must accept for its TAR to have an interval
_INDEPENDENT = 200  # resamples of pairs of classes, from which their variance is taken
_LEFT_OUT = 64  # classes, left out one at a time, that show how evenly classes add to a variance
_CELLS = 2**20  # weights at a time: 8 MiB

Measure = Callable[[Floats, Floats], Floats]  # weights of the cells (S, P) and (S, Q) to values (S, K)


class Cells(NamedTuple):
    """The classes of what has a weight: genuine pairs, or sums of them (P,), and impostors, of two classes each (Q, 2).

    class_pair (Q,): the number of the pair of classes of each impostor, from 0.
    """

    classes: int
    genuine: Counts
    impostor: Counts
    class_pair: Counts


def by_classes(
    measure: Measure,
    cells: Cells,
    *,
    samples: int,
    seed: int,
    confidence: float,
    steep: Sequence[int] = (),
    progress: Progress | None = None,
) -> list[Ends]:
    """Intervals (low, high) of the values of `measure`, shares in [0, 1], resampling classes.

    steep: the columns that are TARs at a FAR. A resample without genuine or impostor pairs is dropped. Fewer than 5
    classes show too little: (nan, nan).
    """
    genuine, impostors = len(cells.genuine), len(cells.impostor)
    values = measure(np.ones((1, genuine)), np.ones((1, impostors)))
    if cells.classes < binomial.MIN_CLASSES:
        return [binomial.NONE] * values.shape[1]
    left_out = min(cells.classes, _LEFT_OUT)
    report = _Reporter(samples + min(samples, _INDEPENDENT) + left_out, progress)
    step = max(1, _CELLS // (genuine + impostors))
    first, second = cells.impostor.T.copy()
    second[first == second] = cells.classes  # within one group of classes: drawn with it, not squared

    def weighted(samples: Iterator[Floats]) -> Floats:
        parts = []
        for some in _in_steps(samples, step):
            times = np.concatenate([some, np.ones((len(some), 1))], axis=1)
            of_impostors = np.stack([row.take(first) * row.take(second) for row in times])
            parts.append(measure(times.take(cells.genuine, axis=1), of_impostors))
            report.advance(len(some))
        return np.concatenate(parts)

    drawn, pairwise = weighted(resamples(cells.classes, samples, seed)), []
    flips = coin_flips(int(cells.class_pair.max()) + 1, min(samples, _INDEPENDENT), seed, random.Stream.COIN_WEIGHTS)
    for some in _in_steps((2 * flip.astype(np.float64) for flip in flips), step):  # weights of mean and variance 1
        pairwise.append(measure(np.ones((len(some), genuine)), some.take(cells.class_pair, axis=1)))
        report.advance(len(some))
    full, of_pairs = _variance(drawn), _variance(np.concatenate(pairwise))
    variance = np.maximum(full - 2 * of_pairs, full / 3)
    freedom = _freedoms(weighted(_without(cells.classes, left_out, seed)), cells.classes)
    variance[list(steep)], freedom[list(steep)] = full[list(steep)], cells.classes - 1
    return _ends(values[0], variance, freedom, cells.classes, confidence)


def only_with_interval(interval: bool, **settings: object) -> None:
    """Refuses settings of the resamples where there are none."""
    for name, value in settings.items():
        if not interval and value is not None:
            checks.no_effect(name, "interval is False")


def drop_unsupported(result: Scores[Any], fars: Sequence[float], pairs: int) -> None:
    """Drops the intervals of TARs at FARs for which there are too few pairs of classes, with a line in the notes.

    With fewer than 4 pairs of classes accepted, the threshold is the score of the closest two or three, which no
    resample varies as new classes would.
    """
    without = [far for far in fars if far * pairs < CLASS_PAIRS * (1 - 1e-9)]
    for far in without:
        result.intervals[f"tar@far={far}"] = binomial.NONE
    shown = ", ".join(f"{far:g}" for far in without)
    result.notes += [
        f"no interval of the TAR at FAR {shown}: it takes {CLASS_PAIRS} / FAR pairs of different classes, got {pairs:,}"
    ] * bool(without)
    result["notes"] = result.notes


def by_pairs(
    measure: Measure,
    cells: Cells,
    *,
    samples: int,
    seed: int,
    confidence: float,
    progress: Progress | None = None,
) -> list[Ends]:
    """The same where the classes are unknown: each kind of pair is resampled as if all were independent."""
    genuine, impostors = len(cells.genuine), len(cells.impostor)
    values = measure(np.ones((1, genuine)), np.ones((1, impostors)))
    report, drawn = _Reporter(samples, progress), []
    of_genuine = resamples(genuine, samples, seed, random.Stream.GENUINE_PAIRS)
    of_impostors = resamples(impostors, samples, seed, random.Stream.IMPOSTOR_PAIRS)
    for weights in zip(_in_steps(of_genuine, 1), _in_steps(of_impostors, 1), strict=True):
        drawn.append(measure(*weights))
        report.advance(1)
    least = min(genuine, impostors)
    if least < binomial.MIN_CLASSES:
        return [binomial.NONE] * values.shape[1]
    freedom = np.full(values.shape[1], least - 1.0)
    return _ends(values[0], _variance(np.concatenate(drawn)), freedom, least, confidence)


class SortedPairs:
    """A list of pairs by falling score, ready to be counted with weights; exact, also with ties.

    `genuine`, `impostors`: the indices of each kind in the list, by falling score; weights are in this order.
    """

    def __init__(self, values: NDArray[Any], is_genuine: NDArray[np.bool_]) -> None:
        order = np.argsort(-values, kind="stable")
        falling, is_genuine = values[order], is_genuine[order]
        last = np.append(np.flatnonzero(falling[1:] != falling[:-1]), len(falling) - 1)  # of every run of equals
        self.genuine, self.impostors = order[is_genuine], order[~is_genuine]
        self.levels = falling[last].astype(np.float64)
        self.tp = np.append(0, np.cumsum(is_genuine)[last])  # genuine pairs at or above each level
        self.fp = np.append(0, last + 1) - self.tp
        level = np.repeat(np.arange(1, len(last) + 1), np.diff(self.tp))  # of each genuine pair
        self.above, self.reached = self.fp[level - 1], self.fp[level]  # impostors above it, and with its equals

    def cells(self, ids: Counts | None) -> Cells:
        """The pairs with their identities (M, 2), in the order of the list; None where they are unknown."""
        if ids is None:
            return Cells(0, np.zeros(len(self.genuine), np.int64), np.zeros((len(self.impostors), 2), np.int64),
                         np.arange(len(self.impostors)))  # fmt: skip
        classes, number = np.unique(ids, return_inverse=True)
        number = np.sort(number.reshape(ids.shape), axis=1)
        impostor = number[self.impostors]
        class_pair = np.unique(impostor[:, 0] * len(classes) + impostor[:, 1], return_inverse=True)[1]
        return Cells(len(classes), number[self.genuine, 0], impostor, class_pair)

    def cut(self, threshold: float) -> int:
        """The index on the curve of accepting from this threshold on."""
        return int(np.searchsorted(-self.levels, -threshold, side="right"))

    def rates(self, genuine: Floats, impostors: Floats, fars: Sequence[float], cuts: Sequence[int]) -> list[float]:
        """EER, AUC, the best TAR within each FAR, then FAR and TAR at each index of `cuts`, by whole-number weights."""
        tp, fp = (np.append(0.0, np.cumsum(weights)) for weights in (genuine, impostors))  # by pairs, not by levels
        positives, negatives = tp[-1], fp[-1]
        if not positives or not negatives:
            return [math.nan] * (2 + len(fars) + 2 * len(cuts))

        def gap(level: int) -> float:  # FAR - FRR, in units of 1 / (positives · negatives)
            return float(fp[self.fp[level]] * positives - (positives - tp[self.tp[level]]) * negatives)

        at = _first(lambda level: gap(level) >= 0, len(self.tp))
        d0, d1 = gap(at - 1), gap(at)
        crossing = (fp[self.fp[at - 1]] * d1 - fp[self.fp[at]] * d0) / ((d1 - d0) * negatives)
        passed = np.dot(genuine, fp.take(self.above) + fp.take(self.reached)) / 2
        rates = [crossing, 1 - passed / (positives * negatives)]
        for far in fars:
            accepted = int(np.searchsorted(fp, most_accepted(far, int(negatives)), side="right")) - 1
            within = int(np.searchsorted(self.fp, accepted, side="right")) - 1
            rates.append(tp[self.tp[within]] / positives)
        rates += [fp[self.fp[cut]] / negatives for cut in cuts]
        return rates + [tp[self.tp[cut]] / positives for cut in cuts]


def with_wider_intervals(points: Sequence[OperatingPoint], ends: Sequence[Ends]) -> list[OperatingPoint]:
    """Each rate with the wider of its binomial interval and that of `ends`: of all FARs first, then of all TARs.

    A resample never contains an impostor that was not in the sample: with few pairs the binomial interval is right.
    """
    result = []
    for point, far, tar in zip(points, ends[: len(points)], ends[len(points) :], strict=True):
        far = far if 0 < point.far < 1 else binomial.NONE
        result.append(
            point._replace(far_interval=_wider(point.far_interval, far), tar_interval=_wider(point.tar_interval, tar))
        )
    return result


def _wider(a: Ends, b: Ends) -> Ends:
    return float(np.fmin(a[0], b[0])), float(np.fmax(a[1], b[1]))  # NaN is no end


def _first(reached: Callable[[int], bool], number: int) -> int:
    """The first index from 1 on where `reached` is true, which stays true; the last one in any case."""
    low, high = 1, number - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(middle) else (middle + 1, high)
    return low


def _in_steps(samples: Iterator[Floats], step: int) -> Iterator[Floats]:
    for part in samples:
        for at in range(0, len(part), step):
            yield part[at : at + step]


def _variance(drawn: Floats) -> Floats:
    usable = drawn[~np.isnan(drawn).any(axis=1)]
    return np.asarray(usable.var(axis=0)) if len(usable) else np.zeros(drawn.shape[1])


def _without(classes: int, number: int, seed: int) -> Iterator[Floats]:
    """All classes but one, for `number` of them."""
    for left_out in random.shuffled(random.words(classes, seed, random.Stream.LEFT_OUT_CLASSES))[:number]:
        times = np.ones((1, classes))
        times[0, left_out] = 0
        yield times


def _freedoms(values: Floats, classes: int) -> Floats:
    """Degrees of freedom of each column, from the values without one class each."""
    usable = values[~np.isnan(values).any(axis=1)]
    if len(usable) < 2:
        return np.full(values.shape[1], classes - 1.0)
    return np.array([binomial.freedom_of(column - column.mean(), classes) for column in usable.T])


def _ends(values: Floats, variance: Floats, freedom: Floats, classes: int, confidence: float) -> list[Ends]:
    return [
        binomial.share(float(value), float(spread), freedom=float(degrees), classes=classes, confidence=confidence)
        for value, spread, degrees in zip(values, variance, freedom, strict=True)
    ]


class _Reporter:
    """Counts resamples and reports progress."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.done, self.total, self.progress = 0, total, progress

    def advance(self, number: int) -> None:
        self.done += number
        if self.progress is not None:
            self.progress(self.done, self.total)
