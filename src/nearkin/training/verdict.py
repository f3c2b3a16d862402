"""The verdict on a run: whether training helped, by the test and by validation, and what may help where it did not."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearkin.data.splits import LEAST
from nearkin.evaluation.statistics import cluster_bootstrap
from nearkin.training.prepare import Prepared
from nearkin.training.validation import MAIN, WRITTEN, HeldOut, chance_units, main_per_query, number, points

__all__ = ["START", "TRAINED", "concluded", "frozen_kept", "remedy", "verdict"]

TRAINED = "trained"
START = "start"  # the encoder before its training, where validation has chosen it
_SAMPLES = 1000  # resamples of the test classes
_FEW = 6  # test classes; of fewer no difference is shown: all may agree by chance


def verdict(
    rows: Mapping[str, Tensor], held_out: HeldOut, graded: bool, device: torch.device, *, baseline: str, seed: int
) -> dict[str, Any]:
    """Whether training helped: rows["trained"] against rows["untrained"] and rows["baseline"] by the main metric.

    "helped": True where training is better than both, False where it is worse than one of them, None where neither can
    be shown; better and worse as in `cluster_bootstrap.compare`, which resamples test classes. "against": its figures
    for each of the two, differences as trained minus the other. "sentence": the same in words. baseline: its name.
    """
    metric = MAIN[graded]
    values = {name: main_per_query(x, held_out, graded, device) for name, x in rows.items()}
    groups, unit = chance_units(held_out, graded)
    names = {"untrained": "the untrained encoder", "baseline": f"the {baseline}"}
    against: dict[str, Any] = {}
    for other in names:
        test = cluster_bootstrap.compare(values["trained"], values[other], groups, samples=_SAMPLES, seed=seed)
        low, high = test["interval"] or (None, None)
        figures = {"trained": test["a"], "other": test["b"], "difference": test["difference"]}
        figures |= {"low": low, "high": high, "p": test["p"]}
        against[other] = {key: number(value) for key, value in figures.items()}
        word = {"a": "better", "b": "worse"}.get(test["verdict"], "undecided")
        against[other] |= {"classes": test["classes"], "verdict": word}
    words = [figures["verdict"] for figures in against.values()]
    helped = False if "worse" in words else True if set(words) == {"better"} else None
    decisive = {True: "better", False: "worse", None: "undecided"}[helped]
    strongest = max(
        (other for other in names if against[other]["verdict"] == decisive),
        key=lambda other: float(against[other]["other"] or 0),  # 0 where no query has a value
    )
    sentence = _sentence(helped, WRITTEN[metric], against[strongest], names[strongest], unit)
    return {"helped": helped, "metric": metric, "sentence": sentence, "against": against}


def _sentence(helped: bool | None, metric: str, figures: Mapping[str, Any], other: str, unit: str) -> str:
    if figures["difference"] is None:
        return f"It cannot be told whether training helped: no test item has anything to find, so there is no {metric}."
    low, high = figures["low"], figures["high"]
    inside = f" (95 % interval {points(low)} to {points(high)})" if low is not None and high is not None else ""
    values = f"{metric} {100 * figures['trained']:.1f} % beside {100 * figures['other']:.1f} % of {other}"
    values += f", a difference of {points(figures['difference'])} points{inside}"
    if helped is None:
        few = f"; {figures['classes']} test {unit} are too few to tell" if figures["classes"] < _FEW else ""
        return f"It cannot be told whether training helped: {values}{few}."
    return f"Training {'helped' if helped else 'did not help'}: {values}."


def frozen_kept(verdict: Mapping[str, Any]) -> dict[str, Any]:
    """The verdict on a run that saves the frozen encoder: it is its own baseline, so there is nothing to compare."""
    value = verdict["against"]["baseline"]["other"]
    figure = "" if value is None else f", with {WRITTEN[verdict['metric']]} {100 * value:.1f} %"
    return {"helped": None, "sentence": f"Training changed nothing: the saved encoder is the frozen backbone{figure}."}


def concluded(
    verdict: Mapping[str, Any], start: Mapping[str, Any] | None, prepared: Prepared, *, graded: bool
) -> dict[str, Any]:
    """The verdict with what validation has found, and with a remedy where training did not prove itself.

    start: as `start.choose_start` returns it; None: validation was not asked. "below": whether test or validation
    finds the saved encoder below the untrained one or the baseline.
    """
    helped, sentence, against = verdict["helped"], verdict["sentence"], verdict["against"]
    below, kept = any((figures["difference"] or 0) < 0 for figures in against.values()), False
    if start is not None and start[START] is not None:
        baseline, metric = f"the {prepared.baseline}", WRITTEN[start["metric"]]
        kept = start["chosen"] == START
        if kept:
            helped, test = None, against["baseline"]
            sentence = (
                f"Training changed nothing: {_unproven(start, metric)}, so that one is saved; in the test it has "
                f"{metric} {_percent(test['trained'])}, {baseline} {_percent(test['other'])}."
            )
        if higher := _higher(start, {START: "the encoder before training", "baseline": baseline}):
            below = True
            sentence += f" In validation it is below {higher}: {metric} {_percent(start[start['chosen']])}."
    few = helped is None and against["untrained"]["classes"] < _FEW
    said = [sentence, *remedy(prepared, graded, below or kept, few)]
    return {"helped": helped, "sentence": " ".join(said), "below": below}


def _unproven(start: Mapping[str, Any], metric: str) -> str:
    """Why the start was chosen."""
    gain, values = start["gain"], f"{metric} {_percent(start[TRAINED])} beside {_percent(start[START])}"
    inside = ""
    if None not in (gain["low"], gain["high"]):
        inside = f", a difference of {points(gain['value'])} points, 95 % interval {points(gain['low'])} to "
        inside += points(gain["high"])
    return (
        f"on {start['classes']:,} validation {start['unit']} the trained encoder is not shown better than the one "
        f"before training ({values}{inside})"
    )


def _higher(start: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """What validation finds better than the trained encoder, with its figures."""
    figures = {name: start[key] for key, name in names.items() if start[key] is not None}
    return " and ".join(
        f"{name} ({_percent(value)})" for name, value in figures.items() if value > (start[start["chosen"]] or 0)
    )


def remedy(prepared: Prepared, graded: bool, below: bool, few: bool) -> list[str]:
    """What may help an encoder that is below what was to be had without training, or what would tell more."""
    if not below and not few:
        return []
    labels, what = prepared.items.labels, "items" if prepared.items.pictures is None else "pictures"
    known, ways = prepared.known_classes, []
    if labels is None or graded:
        ways = ["more items"]
    else:
        ways = [f"more {what} of each class" if known and below else "more classes"]
        if not known and (np.bincount(labels) >= 3 * LEAST).sum() >= LEAST:
            ways.append(f"--closed, which asks about new {what} of known classes")
    if below and prepared.baseline == "pixels":
        ways.append("a pretrained encoder (nearkin encoders)")
    return [f"What {'may help' if below else 'would tell'}: {'; '.join(ways)}."]


def _percent(value: float | None) -> str:
    return "no value" if value is None else f"{100 * value:.1f} %"
