"""The test of a run that is compatible with an old one: old among old rows, new among old, new among new."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nearkin import evaluation
from nearkin.evaluation.retrieval import retrieval_metrics
from nearkin.evaluation.statistics import cluster_bootstrap
from nearkin.training.validation import KS, METRICS, HeldOut, chance_units, cross_sides, figure, points

__all__ = ["PAIRS", "compatible_results"]

PAIRS = ("old_old", "new_old", "new_new")  # queries by the first, rows by the second
_METRIC, _SAMPLES = "map@r", 1000


def compatible_results(
    new: Tensor, old: Tensor, held_out: HeldOut, record: Mapping[str, Any], recipe: Any, device: torch.device
) -> dict[str, Any]:
    """Every metric of `PAIRS` with its 95 % interval, and a paired verdict on each other pair beside old among old.

    new (n, D), old (n, D_old): of `held_out.everything`. New among new are compared in all D dimensions.
    """
    options = recipe.evaluation
    ks = tuple(options.ks or KS[False])
    test, values = {}, {}
    for pair, (queries, rows) in dict(zip(PAIRS, ((old, old), (new, old), (new, new)), strict=True)).items():
        sides, groups = cross_sides(queries, rows, held_out, device)
        measured: Any = evaluation.retrieval(*sides, ks=ks, metrics=METRICS, interval=options.interval, **groups)
        names = [name for name in measured if name not in ("queries", "without_positives", "unknown")]
        ends = measured.intervals if options.interval else {}
        test[pair] = {name: figure(measured[name], ends.get(name, (None, None))) for name in names}
        values[pair] = retrieval_metrics.per_query(*sides, metrics=(_METRIC,), **groups)[_METRIC]
    classes, _ = chance_units(held_out, False)
    seed = recipe.training.seed
    against = {pair: _compared(values[pair], values["old_old"], classes, seed) for pair in PAIRS[1:]}
    sentence = _sentence(against["new_old"], str(record["run"]))
    return {**record, "test": test, "metric": _METRIC, "against": against, "sentence": sentence}


def _compared(a: Tensor, b: Tensor, classes: Tensor, seed: int) -> dict[str, Any]:
    test = cluster_bootstrap.compare(a, b, classes, samples=_SAMPLES, seed=seed)
    word = {"a": "better", "b": "worse"}.get(test["verdict"], "undecided")
    return figure(test["difference"], test["interval"]) | {"p": test["p"], "verdict": word}


def _sentence(difference: Mapping[str, Any], run: str) -> str:
    if difference["value"] is None:
        return f"It cannot be told whether new queries find more among the rows of {run}: there is nothing to find."
    low, high = difference["low"], difference["high"]
    inside = "" if low is None or high is None else f" (95 % interval {points(low)} to {points(high)})"
    told = {"better": "find more", "worse": "find less", "undecided": "find neither more nor less beyond chance"}
    return (
        f"Among the rows of {run}, new queries {told[difference['verdict']]} than its own: a difference of "
        f"{points(difference['value'])} points of MAP@R{inside}."
    )
