"""Stated probabilities of the three events beside what took place: gain, reliability and verdicts, over classes.

Searches with a mate are as many as those without: each kind counts half, as a prior of one half states.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nearkin.evaluation.arrays import Ends, Floats
from nearkin.evaluation.open_set.search_rates import SAMPLES, Trials, of_galleries, resampled_share
from nearkin.evaluation.recognition import NONE, RIGHT
from nearkin.evaluation.statistics import binomial
from nearkin.evaluation.statistics.cluster_bootstrap import resamples, share_interval

__all__ = ["BINS", "Reliability", "event_figures", "oracle", "reliability", "verdict_shares"]

BINS = 10  # of a reliability diagram
Mask = NDArray[np.bool_]


class Reliability(NamedTuple):
    """error: the mean difference between the stated probability and the share that came true, over bins (ECE). bins:
    {"from", "to", "stated", "observed", "interval", "share", "searches"}, those that are not empty."""

    error: float
    interval: Ends
    bins: list[dict[str, Any]]


def event_figures(trials: Trials, shares: Floats, seed: int, interval: bool) -> dict[str, Any]:
    """shares (n, 3): of the events at even prior.

    "gain": the share of right decisions, where the likeliest event decides: a search with a mate is given its label, or
    one without is called unknown. "oracle": the best gain of any threshold on the score. "ece_unknown", "ece_named":
    errors of P(none), and of P(right) where that is the likeliest event; "reliability": their bins.
    """
    event = shares.argmax(1)
    named = event == RIGHT
    right = np.where(trials.mated, named & trials.first, event == NONE)
    of_class = _OfClasses(trials, seed, interval)
    gain, ends = of_class.mean(right.astype(np.float64))
    unknown = reliability(of_class, shares[:, NONE], ~trials.mated, np.ones_like(named))
    sure = reliability(of_class, shares[:, RIGHT], trials.first & trials.mated, named)
    return {
        "gain": gain,
        "oracle": oracle(trials),
        "ece_unknown": unknown.error,
        "ece_named": sure.error,
        "intervals": {"gain": ends, "ece_unknown": unknown.interval, "ece_named": sure.interval},
        "reliability": {"unknown": unknown.bins, "named": sure.bins},
    }


def oracle(trials: Trials) -> float:
    """The largest gain of any threshold: named from it on, else unknown."""
    weight = np.where(trials.mated, 0.5 / trials.mated.sum(), 0.5 / (~trials.mated).sum())
    order = np.argsort(-trials.score, kind="stable")
    gained = np.cumsum(np.where(trials.mated, trials.first, -1.0)[order] * weight[order])
    last = np.append(np.diff(trials.score[order]) != 0, True)  # a threshold takes all equal scores
    return float(0.5 + max(0.0, gained[last].max()))


def reliability(of_class: "_OfClasses", stated: Floats, came: Mask, which: Mask) -> Reliability:
    """Of the probabilities `stated` (n,) of what `came` (n,) true, in the searches `which`."""
    place = np.minimum((stated * BINS).astype(np.int64), BINS - 1)
    columns = [
        of_class.sums(values * which, place) for values in (np.ones(len(stated)), stated, came.astype(np.float64))
    ]
    weight, expected, observed = (of_class.even(column) for column in columns)
    weights, expecteds, observeds = (of_class.resampled(column) for column in columns)
    if not which.any():
        return Reliability(float("nan"), binomial.NONE, [])
    error = float(np.abs(expected - observed).sum() / weight.sum())
    errors = _ratio(np.abs(expecteds - observeds).sum(1), weights.sum(1))
    bins = []
    for b in np.flatnonzero(weight > 0):
        inside = which & (place == b)
        value = float(observed[b] / weight[b])
        around = of_class.interval(value, _ratio(observeds[:, b], weights[:, b]), inside)
        bins.append({
            "from": float(b / BINS), "to": float((b + 1) / BINS), "stated": float(expected[b] / weight[b]),
            "observed": value, "interval": around, "share": float(weight[b]), "searches": int(inside.sum()),
        })  # fmt: skip
    return Reliability(error, of_class.interval(error, errors, which), bins)


def _ratio(part: Floats, whole: Floats) -> Floats:
    """NaN where there is nothing, as in a resample without the classes of a bin."""
    return np.asarray(np.divide(part, whole, out=np.full(len(whole), np.nan), where=whole > 0))


def verdict_shares(
    trials: Trials, shares: Floats, prior: float, sure: float, interval: bool
) -> dict[str, dict[str, Any]]:
    """What becomes of the "known", who have a mate, and of "strangers", who have none: an event is the verdict where
    its probability at the prior is `sure`."""
    at = shares * [(1 - prior) / 0.5, (1 - prior) / 0.5, prior / 0.5]
    at /= at.sum(1, keepdims=True)
    named = at[:, RIGHT] >= sure
    unknown = ~named & (at[:, NONE] >= sure)
    kinds = {
        "known": (trials.mated, {"right": named & trials.first, "wrong": named & ~trials.first}),
        "strangers": (~trials.mated, {"named": named}),
    }
    result: dict[str, dict[str, Any]] = {}
    for kind, (which, masks) in kinds.items():
        masks |= {"unsure": ~named & ~unknown, "unknown": unknown}
        result[kind] = {name: float(mask[which].mean()) for name, mask in masks.items()}
        if interval:
            result[kind]["intervals"] = {
                name: share_of(mask[which], trials.classes[which]) for name, mask in masks.items()
            }
    return result


def share_of(mask: Mask, classes: NDArray[np.int64]) -> Ends:
    return share_interval(torch.from_numpy(mask.astype(np.float64)), torch.from_numpy(classes))


class _OfClasses:
    """Sums over the searches of each class, those with a mate and those without apart, and their resamples."""

    def __init__(self, trials: Trials, seed: int, interval: bool) -> None:
        self.trials, self._classes = trials, int(trials.classes.max()) + 1
        self._role = trials.classes * 2 + trials.mated
        counts = np.bincount(self._role, minlength=2 * self._classes).reshape(self._classes, 2)
        self._counts = counts.astype(np.float64)
        self._seed, self._samples = seed, interval and (counts > 0).sum(0).min() >= binomial.MIN_CLASSES

    def sums(self, values: Floats, place: NDArray[np.int64]) -> Floats:
        """(C, 2, B)"""
        cells = np.bincount(self._role * BINS + place, values, minlength=2 * self._classes * BINS)
        return cells.reshape(self._classes, 2, BINS).astype(np.float64)

    def even(self, sums: Floats) -> Floats:
        """(B,) shares of all searches, of which each kind is half."""
        return np.asarray((sums.sum(0) / self._counts.sum(0)[:, None]).sum(0) / 2)

    def resampled(self, sums: Floats) -> Floats:
        """(S, B) the same in resamples of the classes, a class in both of its roles; (0, B) without intervals."""
        parts = [np.empty((0, sums.shape[2]))]
        for drawn in resamples(self._classes, SAMPLES, self._seed) if self._samples else ():
            counts = drawn @ self._counts
            drawn, counts = drawn[(counts > 0).all(1)], counts[(counts > 0).all(1)]
            of_roles = np.einsum("sc,crb->srb", drawn, sums, optimize=True) / counts[:, :, None]
            parts.append(of_roles.sum(1) / 2)
        return np.concatenate(parts)

    def interval(self, value: float, drawn: Floats, which: Mask) -> Ends:
        """Of a share of the searches `which`, by its resamples; of so many classes as these are of."""
        classes = len(np.unique(self.trials.classes[which]))
        if not self._samples or classes < binomial.MIN_CLASSES:
            return binomial.NONE
        return resampled_share(value, drawn, classes)

    def mean(self, values: Floats) -> tuple[float, Ends]:
        """Of values (n,), and its interval."""
        sums = self.sums(values, np.zeros(len(values), np.int64))
        value, classes = float(self.even(sums)[0]), len(np.unique(self.trials.classes[self.trials.mated]))
        if not self._samples:
            return value, binomial.NONE
        return value, resampled_share(value, self.resampled(sums)[:, 0], classes, of_galleries(classes))
