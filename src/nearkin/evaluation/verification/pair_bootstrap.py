"""How far rates over pairs can be trusted: resampling the classes that the pairs join.

A resample draws as many classes as there are, with replacement. A genuine pair counts as often as its class was drawn,
an impostor pair as often as its two classes meet: the product of both numbers (the vertex bootstrap of Snijders,
Borgatti 1999). Two impostor pairs that share a class then move together, as they do in truth. What two classes have
between them alone, however, is counted three times, E[(mn)²] - 1 = 3 for numbers of mean and variance 1, and once is
right. Weighting the pairs of classes on their own shows how much that is, and the variance is reduced by twice this
part (the dyadic variance of Fafchamps, Gubert 2007; never to less than a third). Not so for the TAR at a wanted FAR:
its threshold moves with the few closest pairs of classes, and in simulations (docs/evaluation.md) the whole variance
is what covers. The interval is that of a share with this variance, `intervals.share`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearkin.core import random
from nearkin.evaluation.statistics import binomial
from nearkin.evaluation.statistics.cluster_bootstrap import resamples
from nearkin.evaluation.verification.roc import Counts, Ends, Floats, OperatingPoint, Verified, most_accepted

SAMPLES = 1000
CLASS_PAIRS = 4  # that a FAR must let in, of those there are, for its TAR to have an interval
_OWN = 200  # resamples from which a variance is taken
_LEFT_OUT = 64  # classes, one at a time, that show how evenly classes add to a variance
_CELLS = 2**20  # weights at a time: 8 MiB

Measure = Callable[[Floats, Floats], Floats]  # weights of the cells (S, P) and (S, Q) to values (S, K)
Progress = Callable[[int, int], None]  # done, of how many


class Cells(NamedTuple):
    """What has a weight: genuine pairs, or sums of them, of a class each (P,); impostors of two classes each (Q, 2).

    both (Q,): which impostors are of the same two classes, numbered from 0.
    """

    classes: int
    genuine: Counts
    impostor: Counts
    both: Counts


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
    """Intervals (low, high) of what `measure` gives, shares in [0, 1], resampling classes.

    steep: the columns that are TARs at a wanted FAR. A resample without genuine or impostor pairs is left out. Of fewer
    than 5 classes too little can be said: (nan, nan).
    """
    genuine, impostors = len(cells.genuine), len(cells.impostor)
    here = measure(np.ones((1, genuine)), np.ones((1, impostors)))
    if cells.classes < binomial.MIN_CLASSES:
        return [binomial.NONE] * here.shape[1]
    left_out = min(cells.classes, _LEFT_OUT)
    told = _Told(samples + min(samples, _OWN) + left_out, progress)
    step = max(1, _CELLS // (genuine + impostors))
    first, second = cells.impostor.T.copy()
    second[first == second] = cells.classes  # within one group of classes: drawn with it, not squared

    def weighted(several: Iterator[Floats]) -> Floats:
        parts = []
        for some in _few(several, step):
            times = np.concatenate([some, np.ones((len(some), 1))], axis=1)
            strange = np.stack([row.take(first) * row.take(second) for row in times])
            parts.append(measure(times.take(cells.genuine, axis=1), strange))
            told.more(len(some))
        return np.concatenate(parts)

    drawn, own = weighted(resamples(cells.classes, samples, seed)), []
    for some in _few(_coins(int(cells.both.max()) + 1, min(samples, _OWN), seed), step):
        own.append(measure(np.ones((len(some), genuine)), some.take(cells.both, axis=1)))
        told.more(len(some))
    whole, alone = _variance(drawn), _variance(np.concatenate(own))
    variance = np.maximum(whole - 2 * alone, whole / 3)
    freedom = _freedoms(weighted(_without(cells.classes, left_out, seed)), cells.classes)
    variance[list(steep)], freedom[list(steep)] = whole[list(steep)], cells.classes - 1
    return _ends(here[0], variance, freedom, cells.classes, confidence)


def only_shown(found: Verified, fars: Sequence[float], pairs: int) -> None:
    """Takes back the intervals of TARs at FARs that so many pairs of classes cannot show, and says so in "notes".

    Below 4 pairs of classes let in, the threshold is the score of the closest two or three, which no resample varies as
    new classes would.
    """
    without = [far for far in fars if far * pairs < CLASS_PAIRS * (1 - 1e-9)]
    for far in without:
        found.intervals[f"tar@far={far}"] = binomial.NONE
    named = ", ".join(f"{far:g}" for far in without)
    found["notes"] = [
        f"no interval of the TAR at FAR {named}: it takes {CLASS_PAIRS} / FAR pairs of different classes, got {pairs:,}"
    ] * bool(without)


def by_pairs(
    measure: Measure,
    cells: Cells,
    *,
    samples: int,
    seed: int,
    confidence: float,
    progress: Progress | None = None,
) -> list[Ends]:
    """The same where nobody knows whose the pairs are: each kind of pair is resampled as if all were independent."""
    genuine, impostors = len(cells.genuine), len(cells.impostor)
    here = measure(np.ones((1, genuine)), np.ones((1, impostors)))
    told, drawn = _Told(samples, progress), []
    kin = resamples(genuine, samples, seed, random.Stream.GENUINE_PAIRS)
    strange = resamples(impostors, samples, seed, random.Stream.IMPOSTOR_PAIRS)
    for one, other in zip(_few(kin, 1), _few(strange, 1), strict=True):
        drawn.append(measure(one, other))
        told.more(1)
    least = min(genuine, impostors)
    if least < binomial.MIN_CLASSES:
        return [binomial.NONE] * here.shape[1]
    freedom = np.full(here.shape[1], least - 1.0)
    return _ends(here[0], _variance(np.concatenate(drawn)), freedom, least, confidence)


class SortedPairs:
    """A list of pairs by falling score, ready to be counted with weights; exact, ties and all.

    `genuine`, `impostors`: the places in the list of each kind, falling; weights are given in this order.
    """

    def __init__(self, values: NDArray[Any], kin: NDArray[np.bool_]) -> None:
        order = np.argsort(-values, kind="stable")
        falling, sorted_kin = values[order], kin[order]
        last = np.append(np.flatnonzero(falling[1:] != falling[:-1]), len(falling) - 1)  # of every run of equals
        self.genuine, self.impostors = order[sorted_kin], order[~sorted_kin]
        self.levels = falling[last].astype(np.float64)
        self.tp = np.append(0, np.cumsum(sorted_kin)[last])  # how many genuine are at or above each level
        self.fp = np.append(0, last + 1) - self.tp
        level = np.repeat(np.arange(1, len(last) + 1), np.diff(self.tp))  # of each genuine pair
        self.above, self.reached = self.fp[level - 1], self.fp[level]  # impostors above it, and with its equals

    def cells(self, ids: Counts | None) -> Cells:
        """The pairs with their identities (M, 2) of the list; without these nobody's."""
        if ids is None:
            return Cells(0, np.zeros(len(self.genuine), np.int64), np.zeros((len(self.impostors), 2), np.int64),
                         np.arange(len(self.impostors)))  # fmt: skip
        names, place = np.unique(ids, return_inverse=True)
        place = np.sort(place.reshape(ids.shape), axis=1)
        strange = place[self.impostors]
        both = np.unique(strange[:, 0] * len(names) + strange[:, 1], return_inverse=True)[1]
        return Cells(len(names), place[self.genuine, 0], strange, both)

    def cut(self, threshold: float) -> int:
        """The place on the curve of accepting from this threshold on."""
        return int(np.searchsorted(-self.levels, -threshold, side="right"))

    def rates(self, genuine: Floats, impostors: Floats, fars: Sequence[float], cuts: Sequence[int]) -> list[float]:
        """EER, AUC, the best TAR within each FAR, then FAR and TAR at each place of `cuts`, by whole-number weights."""
        kin, strange = (np.append(0.0, np.cumsum(weights)) for weights in (genuine, impostors))
        of, others = kin[-1], strange[-1]
        if not of or not others:
            return [math.nan] * (2 + len(fars) + 2 * len(cuts))

        def apart(place: int) -> float:  # FAR - FRR, in parts of all
            return float(strange[self.fp[place]] * of - (of - kin[self.tp[place]]) * others)

        at = _first(lambda place: apart(place) >= 0, len(self.tp))
        d0, d1 = apart(at - 1), apart(at)
        crossing = (strange[self.fp[at - 1]] * d1 - strange[self.fp[at]] * d0) / ((d1 - d0) * others)
        passed = np.dot(genuine, strange.take(self.above) + strange.take(self.reached)) / 2
        found = [crossing, 1 - passed / (of * others)]
        for far in fars:
            most = most_accepted(far, int(others))
            seen = int(np.searchsorted(strange, most, side="right")) - 1  # so many impostors may be let in
            within = int(np.searchsorted(self.fp, seen, side="right")) - 1
            found.append(kin[self.tp[within]] / of)
        found += [strange[self.fp[cut]] / others for cut in cuts]
        return found + [kin[self.tp[cut]] / of for cut in cuts]


def widened(points: Sequence[OperatingPoint], ends: Sequence[Ends]) -> list[OperatingPoint]:
    """Each rate with the wider of its interval and the one found: of all FARs first, then of all TARs.

    A resample cannot hold an impostor that nobody has seen: of a few pairs the binomial interval is the honest one.
    """
    found = []
    for point, far, tar in zip(points, ends[: len(points)], ends[len(points) :], strict=True):
        far = far if 0 < point.far < 1 else binomial.NONE
        found.append(
            point._replace(far_interval=_wider(point.far_interval, far), tar_interval=_wider(point.tar_interval, tar))
        )
    return found


def _wider(one: Ends, other: Ends) -> Ends:
    return float(np.fmin(one[0], other[0])), float(np.fmax(one[1], other[1]))  # NaN is no end


def _first(reached: Callable[[int], Any], places: int) -> int:
    """The first place from 1 on where it is true, of what stays true; the last one in any case."""
    low, high = 1, places - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(middle) else (middle + 1, high)
    return low


def _few(several: Iterator[Floats], step: int) -> Iterator[Floats]:
    for times in several:
        for at in range(0, len(times), step):
            yield times[at : at + step]


def _coins(number: int, samples: int, seed: int) -> Iterator[Floats]:
    """Weights 0 or 2 by the toss of a coin, of mean and variance 1, one sample at a time."""
    for sample in range(samples):
        words = random.words(-(-number // 64), seed, random.Stream.COIN_WEIGHTS, sample)
        yield 2 * np.unpackbits(words.astype("<u8").view(np.uint8), count=number)[None].astype(np.float64)


def _variance(drawn: Floats) -> Floats:
    usable = drawn[~np.isnan(drawn).any(axis=1)]
    return np.asarray(usable.var(axis=0)) if len(usable) else np.zeros(drawn.shape[1])


def _without(classes: int, number: int, seed: int) -> Iterator[Floats]:
    """All classes but one, for so many of them."""
    for place in random.shuffled(random.words(classes, seed, random.Stream.LEFT_OUT_CLASSES))[:number]:
        times = np.ones((1, classes))
        times[0, place] = 0
        yield times


def _freedoms(left: Floats, classes: int) -> Floats:
    """Degrees of freedom of each column, from the values without a class each."""
    usable = left[~np.isnan(left).any(axis=1)]
    if len(usable) < 2:
        return np.full(left.shape[1], classes - 1.0)
    return np.array([binomial.freedom_of(column - column.mean(), classes) for column in usable.T])


def _ends(here: Floats, variance: Floats, freedom: Floats, classes: int, confidence: float) -> list[Ends]:
    return [
        binomial.share(float(value), float(spread), freedom=float(known), classes=classes, confidence=confidence)
        for value, spread, known in zip(here, variance, freedom, strict=True)
    ]


class _Told:
    """Counts resamples for whoever wants to know."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.done, self.total, self.progress = 0, total, progress

    def more(self, number: int) -> None:
        self.done += number
        if self.progress is not None:
            self.progress(self.done, self.total)
