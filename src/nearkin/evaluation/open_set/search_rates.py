"""FNIR at FPIR, DIR, AUROC and OSCR of searches with and without a mate, with intervals over identities.

FPIR(t): the share of searches without a mate whose best label scores t or more. FNIR(t): the share of searches with a
mate that is not at rank 1 or scores below t (NIST FRVT 1:N, at rank 1). DIR = 1 - FNIR.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearkin.evaluation.arrays import Counts, Ends, Floats
from nearkin.evaluation.statistics import binomial
from nearkin.evaluation.statistics.cluster_bootstrap import resamples
from nearkin.evaluation.verification.roc import most_accepted

__all__ = [
    "SAMPLES", "Point", "Trials", "auroc", "curve", "figures", "intervals", "of_galleries", "operating_point", "oscr",
    "quotable", "resampled_share", "smallest_fpir",
]  # fmt: skip

SAMPLES = 1000  # resamples of the classes
LEVELS = 240  # thresholds at which resamples are counted
IDENTITIES = 4  # unknown classes that must be accepted at a threshold for it to have an interval
POINTS = 60  # of a curve
_NEW_GALLERY = 1.2  # as in cluster_bootstrap: new classes are also another gallery
_FEW_LABELS = 20.0  # of AUROC: a gallery of five labels varies as much as the searches (studies/open_set_holds.py)
_BLOCK = 2**22  # cells of a (samples, classes, levels) product at a time


class Trials(NamedTuple):
    """Searches (n,): the best score, whether the mate is at rank 1, whether there is a mate, and the class from 0."""

    score: Floats
    first: NDArray[np.bool_]
    mated: NDArray[np.bool_]
    classes: Counts


class Point(NamedTuple):
    """At the smallest threshold whose FPIR does not exceed the one asked for."""

    threshold: float
    fpir: float
    fnir: float


def smallest_fpir(searches: int, confidence: float = 0.95) -> float:
    """The smallest rate that so many searches without a mate can show: none of them accepted (the rule of three)."""
    return min(1.0, -math.log1p(-confidence) / max(searches, 1))


def operating_point(trials: Trials, fpir: float) -> Point:
    """Exact, also with ties. The threshold is the next float above the best score that must be refused."""
    unknown = np.sort(trials.score[~trials.mated])[::-1]
    accepted = most_accepted(fpir, len(unknown))
    threshold = -math.inf if accepted >= len(unknown) else float(np.nextafter(unknown[accepted], math.inf))
    known = trials.mated & trials.first
    fnir = 1 - np.count_nonzero(trials.score[known] >= threshold) / np.count_nonzero(trials.mated)
    return Point(threshold, float(np.count_nonzero(unknown >= threshold)) / len(unknown), float(fnir))


def auroc(trials: Trials) -> float:
    """The probability that a search with a mate scores higher than one without; ties count one half."""
    return float(_unknown_below(trials, trials.mated).mean())


def oscr(trials: Trials) -> float:
    """The area under the share of searches with a mate that are at rank 1 and reach the threshold, over FPIR (Dhamija
    et al. 2018, arXiv:1811.04110): as AUROC, but a search that is not at rank 1 counts 0."""
    return float(_unknown_below(trials, trials.mated & trials.first).sum() / np.count_nonzero(trials.mated))


def _unknown_below(trials: Trials, which: NDArray[np.bool_]) -> Floats:
    """Per search, the share of searches without a mate that score lower; ties count one half."""
    unknown = np.sort(trials.score[~trials.mated])
    below, reached = (np.searchsorted(unknown, trials.score[which], side=side) for side in ("left", "right"))
    return (below + reached) / 2 / len(unknown)


def curve(trials: Trials, smallest: float) -> list[dict[str, float]]:
    """FNIR over FPIR, from the smallest FPIR that can be shown to 1."""
    rates = np.geomspace(max(smallest, 1e-12), 1.0, POINTS)
    points = {point.fpir: point for point in (operating_point(trials, float(rate)) for rate in rates)}
    return [{"fpir": point.fpir, "fnir": point.fnir} for point in points.values() if point.fpir >= smallest]


def quotable(fpirs: Sequence[float], nonmated: int) -> tuple[list[float], str]:
    """The rates that so many searches without a mate can show, and a sentence where they cannot show some."""
    smallest = smallest_fpir(nonmated)
    shown = [f for f in fpirs if f >= smallest]
    if len(shown) == len(fpirs):
        return shown, ""
    below = ", ".join(f"{f:g}" for f in fpirs if f < smallest)
    return shown, (
        f"FPIR {below} is not quoted: {nonmated:,} searches of unknown classes can show {smallest:.2g} at the "
        f"least; {min(fpirs):g} needs {math.ceil(-math.log(0.05) / min(fpirs)):,}"
    )


def figures(
    trials: Trials, fpirs: Sequence[float], quoted: Sequence[float], smallest: float, seed: int, interval: bool
) -> tuple[dict[str, Any], Any]:
    """What a result has of such searches, None at rates that are not `quoted`; and the `fnirs` of the resamples."""
    result: dict[str, Any] = {}
    points = {f: operating_point(trials, f) if f in quoted else None for f in fpirs}
    for f, point in points.items():
        result[f"fnir@fpir={f:g}"] = None if point is None else point.fnir
        result[f"dir@fpir={f:g}"] = None if point is None else 1 - point.fnir
        result[f"threshold@fpir={f:g}"] = None if point is None else point.threshold
    result["identification"] = float(trials.first[trials.mated].mean())
    result |= {"auroc": auroc(trials), "oscr": oscr(trials)}
    fnirs = None
    if interval:
        spread = intervals(trials, quoted, seed=seed)
        fnirs, ends = spread.fnirs, {"auroc": spread.auroc, "oscr": spread.oscr}
        for f, fnir, fpir in zip(quoted, spread.fnir, spread.fpir, strict=True):
            ends |= {f"fnir@fpir={f:g}": fnir, f"dir@fpir={f:g}": (1 - fnir[1], 1 - fnir[0]), f"fpir@fpir={f:g}": fpir}
        result["intervals"] = ends
    result["curve"] = curve(trials, smallest)
    return result, fnirs


class Intervals(NamedTuple):
    """Ends of FNIR and of the FPIR itself at each rate asked for, of AUROC and OSCR; fnirs (S, rates): of the
    resamples."""

    fnir: list[Ends]
    fpir: list[Ends]
    auroc: Ends
    oscr: Ends
    fnirs: Floats


def intervals(trials: Trials, fpirs: Sequence[float], *, seed: int, confidence: float = 0.95) -> Intervals:
    """95 % intervals over identities: classes are resampled, and with them the thresholds.

    A class counts as often as it is drawn, in both of its roles. The interval is that of a share with the variance of
    the resamples, a fifth added for the new gallery (`binomial.share`). None (NaN) with fewer than 5 classes, and where
    fewer than 4 unknown classes were accepted: resampling three does not show what others would do.
    """
    table = _Table(trials)
    if min(table.identities) < binomial.MIN_CLASSES:
        none = [binomial.NONE] * len(fpirs)
        return Intervals(none, none, binomial.NONE, binomial.NONE, np.full((1, len(fpirs)), math.nan))
    fnirs, at, areas, named = table.resampled(trials, fpirs, seed)
    known, unknown = table.identities
    ends, own = [], []
    for column, fpir in enumerate(fpirs):
        point = operating_point(trials, fpir)
        enough = len(np.unique(trials.classes[~trials.mated & (trials.score >= point.threshold)])) >= IDENTITIES
        ends.append(resampled_share(point.fnir, fnirs[:, column], known) if enough else binomial.NONE)
        own.append(resampled_share(point.fpir, at[:, column], unknown))
    few = min(known, unknown)
    factor = of_galleries(few)
    over_fpir = resampled_share(auroc(trials), areas, few, factor), resampled_share(oscr(trials), named, few, factor)
    return Intervals(ends, own, *over_fpir, fnirs)


def of_galleries(classes: int) -> float:
    """By how much the variance of a figure over searches grows where the gallery is of few other classes."""
    return _NEW_GALLERY + _FEW_LABELS / classes


def resampled_share(value: float, drawn: Floats, classes: int, factor: float = _NEW_GALLERY) -> Ends:
    """The interval of a share whose resamples over classes are `drawn`."""
    variance = factor * float(np.nanvar(drawn))
    return binomial.share(value, variance, freedom=classes - 1, classes=classes)


class _Table:
    """Per class and threshold, how many searches are accepted: what a resample of the classes is counted from."""

    def __init__(self, trials: Trials) -> None:
        unknown = np.sort(trials.score[~trials.mated])[::-1]
        ranks = np.unique(np.round(np.geomspace(1, len(unknown), LEVELS)).astype(np.int64)) - 1
        rising = np.unique(unknown[ranks])
        self.levels = np.append(rising, np.nextafter(rising[-1], math.inf))
        self.number = int(trials.classes.max()) + 1
        self.without, self.known, self.right = (
            self._accepted(trials, mask) for mask in (~trials.mated, trials.mated, trials.mated & trials.first)
        )
        self.known_all = np.bincount(trials.classes[trials.mated], minlength=self.number).astype(np.float64)
        self.unknown_all = np.bincount(trials.classes[~trials.mated], minlength=self.number).astype(np.float64)
        first = trials.classes[trials.mated & trials.first]
        self.first_all = np.bincount(first, minlength=self.number).astype(np.float64)
        self.identities = int((self.known_all > 0).sum()), int((self.unknown_all > 0).sum())

    def _accepted(self, trials: Trials, mask: NDArray[np.bool_]) -> Floats:
        """(C, T): the searches of each class at or above each level."""
        width = len(self.levels) + 1
        place = np.searchsorted(self.levels, trials.score[mask], side="right") + trials.classes[mask] * width
        counts = np.bincount(place, minlength=self.number * width).reshape(self.number, width)
        return counts[:, :0:-1].cumsum(1)[:, ::-1].astype(np.float64)

    def resampled(self, trials: Trials, fpirs: Sequence[float], seed: int) -> tuple[Floats, Floats, Floats, Floats]:
        """(S, F) FNIR at each FPIR of the resample; (S, F) FPIR at the threshold of the sample itself; (S,) AUROC and
        OSCR."""
        thresholds = np.array([operating_point(trials, f).threshold for f in fpirs], np.float64)
        fixed = np.minimum(np.searchsorted(self.levels, thresholds), len(self.levels) - 1)
        parts: list[tuple[Any, ...]] = []
        for drawn in self._samples(seed):
            known, unknown = drawn @ self.known_all, drawn @ self.unknown_all
            usable = (known > 0) & (unknown > 0)
            drawn, known, unknown = drawn[usable], known[usable, None], unknown[usable, None]
            fpir, found = drawn @ self.without / unknown, drawn @ self.known / known
            right, first = drawn @ self.right / known, (drawn @ self.first_all)[:, None] / known
            fnir = np.empty((len(drawn), len(fpirs)))
            for column, f in enumerate(fpirs):
                at = (fpir <= f * (1 + 1e-9)).argmax(1)  # the first: levels rise
                fnir[:, column] = 1 - right[np.arange(len(drawn)), at]
            parts.append((fnir, fpir[:, fixed], _area(fpir, found, np.ones_like(first)), _area(fpir, right, first)))
        return tuple(np.concatenate(column) for column in zip(*parts, strict=True))  # type: ignore[return-value]

    def _samples(self, seed: int) -> Iterator[Floats]:
        step = max(1, _BLOCK // (self.number + 3 * len(self.levels)))
        for part in resamples(self.number, SAMPLES, seed):
            for at in range(0, len(part), step):
                yield part[at : at + step]


def _area(fpir: Floats, found: Floats, last: Floats) -> Floats:
    """Under detection over FPIR, by trapezoids between the levels, from the corner (0, 0) to (1, last)."""
    x = np.concatenate([np.ones((len(fpir), 1)), fpir, np.zeros((len(fpir), 1))], axis=1)
    y = np.concatenate([last, found, np.zeros((len(fpir), 1))], axis=1)
    return np.asarray(((x[:, :-1] - x[:, 1:]) * (y[:, :-1] + y[:, 1:]) / 2).sum(1))
