"""Significance: intervals, ranks and verdicts from the figures per query.

There are two sources of chance. The choice of test classes: they are resampled, as everywhere in nearkin. The training:
models of the same seed and fold had the same classes, batches and first weights under every loss, so their differences
are paired. A loss is called worse than the best only if both agree, after Holm's correction for several comparisons.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nearkin.compare.final_evaluation import METRICS
from nearkin.evaluation.statistics import binomial, cluster_bootstrap

__all__ = [
    "FORMS",
    "MAIN",
    "Floats",
    "against_best",
    "by_model",
    "figures_of",
    "mean_of",
    "plain_mean",
    "ranks",
    "student_interval",
]

Floats = NDArray[np.float64]
FORMS = ("separated", "concatenated")
MAIN = METRICS[0]
_SAMPLES = 10_000


def mean_of(tests: Sequence[Mapping[str, Floats]], form: str) -> Floats:
    """(Q, M): the mean over seeds, and over folds for separated models."""
    parts = [one[form] if form == "concatenated" else one[form].mean(0) for one in tests]
    return np.asarray(np.mean(parts, axis=0), np.float64)


def plain_mean(values: Floats) -> float:
    counted = values[~np.isnan(values)]
    return math.fsum(counted.tolist()) / len(counted) if len(counted) else 0.0


def figures_of(values: Floats, groups: torch.Tensor) -> dict[str, dict[str, float | None]]:
    figures: dict[str, dict[str, float | None]] = {}
    for i, metric in enumerate(METRICS):
        low, high = cluster_bootstrap.share_interval(torch.from_numpy(values[:, i].copy()), groups)
        figures[metric] = {"value": plain_mean(values[:, i]), "low": _number(low), "high": _number(high)}
    return figures


def by_model(tests: Sequence[Mapping[str, Floats]], form: str) -> list[float]:
    """The main metric of every model, by seed and fold; of concatenated ones, by seed."""
    if form == "concatenated":
        return [plain_mean(one[form][:, 0]) for one in tests]
    return [plain_mean(fold[:, 0]) for one in tests for fold in one[form]]


def student_interval(values: Sequence[float]) -> list[float | None]:
    """Student's 95 % interval of the mean of independent values; [None, None] for a single value."""
    n = len(values)
    if n < 2:
        return [None, None]
    middle = math.fsum(values) / n
    deviation = math.sqrt(math.fsum((v - middle) ** 2 for v in values) / (n - 1))
    half = binomial.student(n - 1) * deviation / math.sqrt(n)
    return [middle - half, middle + half]


def ranks(rows: list[dict[str, Any]], values: Sequence[Floats], groups: torch.Tensor, form: str) -> None:
    """The rank of each loss, and its range in 95 of 100 resamples of the test classes."""
    class_ids = torch.unique(groups, return_inverse=True)[1].numpy()
    table = np.stack([np.nan_to_num(v) for v in values], axis=1)  # (Q, L)
    counted = ~np.isnan(values[0])
    sums = np.stack([np.bincount(class_ids, table[:, i]) for i in range(table.shape[1])], axis=1)  # (C, L)
    counts = np.bincount(class_ids, counted.astype(float))
    samples = []
    for drawn in cluster_bootstrap.resamples(len(counts), 1000, 0):
        means = (drawn @ sums) / np.maximum(drawn @ counts, 1e-12)[:, None]
        samples.append(1 + (means[:, None, :] > means[:, :, None]).sum(2))
    sampled_ranks = np.concatenate(samples)  # (samples, L)
    plain = [plain_mean(v) for v in values]
    for i, row in enumerate(rows):
        low, high = np.quantile(sampled_ranks[:, i], [0.025, 0.975], method="nearest")
        row[form]["rank"], row[form]["ranks"] = 1 + sum(v > plain[i] for v in plain), [int(low), int(high)]


def against_best(
    rows: list[dict[str, Any]],
    values: Mapping[str, Floats],
    figures: Mapping[str, list[dict[str, Floats]]],
    groups: torch.Tensor,
    form: str,
) -> None:
    """The difference of each loss to the best, over classes and over models, and the verdict."""
    best = max(rows, key=lambda row: row[form][MAIN]["value"])["loss"]
    comparisons = {}
    for loss in values:
        if loss != best:
            a, b = (torch.from_numpy(values[name].copy()) for name in (best, loss))
            comparisons[loss] = cluster_bootstrap.compare(a, b, groups, samples=_SAMPLES)
    adjusted = _holm({loss: one["p"] for loss, one in comparisons.items()})
    for row in rows:
        loss = row["loss"]
        if loss == best:
            row[form]["against"] = {"difference": 0.0, "interval": None, "models": None, "p": None, "verdict": "best"}
            continue
        one = comparisons[loss]
        pairs = zip(by_model(figures[best], form), by_model(figures[loss], form), strict=True)
        models = student_interval([a - b for a, b in pairs])
        low = one["interval"][0]
        worse = adjusted[loss] <= 0.05 and low > 0 and (models[0] is None or models[0] > 0)
        row[form]["against"] = {
            "difference": -one["difference"],
            "interval": [_number(-end) for end in reversed(one["interval"])],
            "models": None if models[0] is None or models[1] is None else [-models[1], -models[0]],
            "p": adjusted[loss],
            "verdict": "worse" if worse else "undecided",
        }


def _holm(ps: Mapping[str, float]) -> dict[str, float]:
    """Holm 1979: the probability of any false verdict is at most that of a single test."""
    adjusted, least = {}, 0.0
    for i, (name, p) in enumerate(sorted(ps.items(), key=lambda pair: pair[1])):
        least = max(least, min(1.0, (len(ps) - i) * p))
        adjusted[name] = least
    return adjusted


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
