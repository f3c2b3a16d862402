"""Which way of scoring labels finds most of these data: each against the plain nearest item, paired by class."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from nearkin.evaluation.arrays import Ends, Floats
from nearkin.evaluation.open_set.search_rates import Trials, operating_point
from nearkin.evaluation.statistics import binomial, cluster_bootstrap

__all__ = ["PLAIN", "choose", "described", "sentence"]

PLAIN = "nearest"
SAMPLES = 2000  # sign flips: enough for 0.05 / 8
LEVEL = 0.05  # probability of any wrong decision among all methods
_NAMES = {"nearest": "the nearest item", "template": "the template", "weighted": "the quality-weighted template"}
_KINDS = {"as-norm": "AS-norm", "csls": "CSLS"}


def choose(
    trials: Mapping[str, Trials], fnirs: Mapping[str, Floats], fpirs: Sequence[float], fpir: float, seed: int
) -> dict[str, Any]:
    """The DIR of every method against that of the nearest item at an FPIR, one of `fpirs`.

    Two tests must agree. `cluster_bootstrap.compare` pairs the searches with a mate, class by class, each method at its
    own threshold. The resamples of `fnirs` (S, F) draw known and unknown classes together, so thresholds move too. Both
    at 1 - 0.05 / methods (Bonferroni), so that the best of many is not best by luck.

    "best" is the method with the largest DIR among those that are shown better than the nearest item, else "nearest".
    """
    column = list(fpirs).index(fpir)
    others = [name for name in trials if name != PLAIN]
    found = {name: _found(part, fpir) for name, part in trials.items()}
    groups = torch.from_numpy(trials[PLAIN].classes[trials[PLAIN].mated])
    confidence = 1 - LEVEL / max(1, len(others))
    against = {}
    for name in others:
        test = cluster_bootstrap.compare(
            found[name], found[PLAIN], groups, samples=SAMPLES, seed=seed, confidence=confidence
        )
        ends = _resampled(test["difference"], fnirs[PLAIN][:, column] - fnirs[name][:, column], test, confidence)
        better = test["verdict"] == "a" and ends[0] > 0
        worse = test["verdict"] == "b" and ends[1] < 0
        against[name] = {
            "dir": test["a"],
            "difference": test["difference"],
            "interval": ends,
            "p": min(1.0, test["p"] * len(others)),
            "classes": test["classes"],
            "verdict": "better" if better else "worse" if worse else "undecided",
        }
    shown = [name for name in others if against[name]["verdict"] == "better"]
    best = max(shown, key=lambda name: float(against[name]["dir"])) if shown else PLAIN
    choice = {"fpir": fpir, "best": best, "dir": float(found[PLAIN].mean()), "against": against}
    return choice | {"sentence": sentence(choice)}


def sentence(choice: Mapping[str, Any]) -> str:
    """The verdict in words."""
    against, best, at = choice["against"], choice["best"], f"at FPIR {choice['fpir']:g}"
    plain = f"DIR {100 * choice['dir']:.1f} % {at}"
    if not against:
        return f"Only the nearest item was measured: {plain}."
    if best == PLAIN:
        worse = [name for name, figures in against.items() if figures["verdict"] == "worse"]
        tail = f"; shown worse: {', '.join(worse)}" if worse else ""
        return f"No method of {len(against)} is shown better than the nearest item ({plain}){tail}."
    figures = against[best]
    low, high = figures["interval"]
    return (
        f"Best is {described(best)}: DIR {100 * figures['dir']:.1f} % beside {100 * choice['dir']:.1f} % of the "
        f"nearest item {at}, {100 * figures['difference']:+.1f} points ({100 * low:+.1f} to {100 * high:+.1f})."
    )


def described(name: str) -> str:
    scoring, _, kind = name.partition("+")
    return _NAMES[scoring] + (f" with {_KINDS[kind]}" if kind else "")


def _found(trials: Trials, fpir: float) -> torch.Tensor:
    threshold = operating_point(trials, fpir).threshold
    return torch.from_numpy((trials.first & (trials.score >= threshold))[trials.mated].astype(np.float64))


def _resampled(difference: float, drawn: Floats, test: Mapping[str, Any], confidence: float) -> Ends:
    """The wider of the interval of the paired test and that of the resamples."""
    low, high = test["interval"]
    spread = float(np.nanstd(drawn)) if not np.isnan(drawn).all() else math.nan
    half = binomial.student(max(1, test["classes"] - 1), confidence) * math.sqrt(1.2) * spread
    return min(low, difference - half), max(high, difference + half)
