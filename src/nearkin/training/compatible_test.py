"""The test of a run that is compatible with an old one: old among old rows, new among old, new among new."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nearkin.evaluation.statistics import cluster_bootstrap
from nearkin.training.cross_retrieval import cross_per_query
from nearkin.training.validation import KS, MAIN, WRITTEN, HeldOut, chance_units, figure, points

__all__ = ["PAIRS", "compatible_results"]

PAIRS = ("old_old", "new_old", "new_new")  # queries by the first, rows by the second
_SAMPLES = 1000  # resamples of the test classes


def compatible_results(
    new: Tensor, old: Tensor, held_out: HeldOut, record: Mapping[str, Any], recipe: Any, device: torch.device
) -> dict[str, Any]:
    """Every metric of `PAIRS` with its 95 % interval, and a paired verdict on each other pair beside old among old.

    new (n, D), old (n, D_old): of `held_out.everything`. New among new are compared in all D dimensions.
    """
    graded, seed = recipe.takes_targets, recipe.training.seed
    metric, ks = MAIN[graded], tuple(recipe.evaluation.ks or KS[graded])
    units, _ = chance_units(held_out, graded)
    test, values = {}, {}
    for pair, (queries, rows) in dict(zip(PAIRS, ((old, old), (new, old), (new, new)), strict=True)).items():
        measured = cross_per_query(queries, rows, held_out, graded, device, sorted({*ks, *((10,) if graded else ())}))
        test[pair] = {name: _figure(x, units, recipe.evaluation.interval) for name, x in measured.items()}
        values[pair] = measured[metric]
    against = {pair: _compared(values[pair], values["old_old"], units, seed) for pair in PAIRS[1:]}
    sentence = _sentence(against["new_old"], str(record["run"]), WRITTEN[metric])
    return {**record, "test": test, "metric": metric, "against": against, "sentence": sentence}


def _figure(values: Tensor, units: Tensor, interval: bool) -> dict[str, Any]:
    ends = cluster_bootstrap.share_interval(values, units) if interval else (None, None)
    return figure(values.nanmean(), ends)


def _compared(a: Tensor, b: Tensor, classes: Tensor, seed: int) -> dict[str, Any]:
    test = cluster_bootstrap.compare(a, b, classes, samples=_SAMPLES, seed=seed)
    word = {"a": "better", "b": "worse"}.get(test["verdict"], "undecided")
    return figure(test["difference"], test["interval"]) | {"p": test["p"], "verdict": word}


def _sentence(difference: Mapping[str, Any], run: str, metric: str) -> str:
    if difference["value"] is None:
        return f"It cannot be told whether new queries find more among the rows of {run}: there is nothing to find."
    low, high = difference["low"], difference["high"]
    inside = "" if low is None or high is None else f" (95 % interval {points(low)} to {points(high)})"
    told = {"better": "find more", "worse": "find less", "undecided": "find neither more nor less beyond chance"}
    return (
        f"Among the rows of {run}, new queries {told[difference['verdict']]} than its own: a difference of "
        f"{points(difference['value'])} points of {metric}{inside}."
    )
