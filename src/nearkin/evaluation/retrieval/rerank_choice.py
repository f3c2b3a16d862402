"""Does re-ranking help? Its settings chosen on validation classes, its result beside the plain one, paired by query."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearkin.core import checks
from nearkin.core.relations import UNKNOWN
from nearkin.dist.group import ProcessGroup
from nearkin.evaluation.arrays import Array, Ids, Progress, takes_arrays
from nearkin.evaluation.retrieval import knn, retrieval_metrics
from nearkin.evaluation.retrieval.rerank_settings import (
    DBA,
    METHODS,
    AlphaQE,
    KReciprocal,
    Rerank,
    check_similarity,
    fields,
)
from nearkin.evaluation.statistics import cluster_bootstrap

__all__ = ["ChosenRerank", "candidates", "choose_rerank", "figures"]

_FACTORS = {KReciprocal: (0.25, 0.5, 1.0, 1.5, 2.0), AlphaQE: (0.05, 0.1, 0.25, 0.5), DBA: (0.05, 0.1, 0.25, 0.5)}
_COMPARED = {"map@r": ("map@r", "MAP@R"), "recall@1": ("precision@1", "R@1")}  # key, metric, written


class ChosenRerank(NamedTuple):
    """What `choose_rerank` returns: the best settings, and MAP@R of all that were tried and of the plain order."""

    settings: Rerank
    plain: float
    tried: list[tuple[Rerank, float]]


@takes_arrays
def choose_rerank(
    embeddings: Array,
    labels: Ids,
    method: str = "k-reciprocal",
    *,
    groups: Ids | None = None,
    similarity: str = "cosine",
    budget: int = knn.BUDGET,
    progress: Progress | None = None,
    group: ProcessGroup | None = None,
) -> ChosenRerank:
    """The settings of a method with the best MAP@R on validation items: classes that are not those of the test.

    embeddings (N, D), labels (N,) class ids: of the validation items, which search one another. What is tried follows
    the median class size m: k1 = 0.25 to 2 (m - 1) with k2 = 0.3 k1 and λ = 0.3; for "alpha-qe" and "dba" 0.05 to
    0.5 (m - 1) neighbours with α = 3. The first of equal ones is taken. groups, similarity, budget, group: as in
    `retrieval`.
    """
    checks.one_of("method", method, METHODS)
    check_similarity(METHODS[method](), similarity)
    options: dict[str, Any] = {"metrics": ("map@r",), "ks": (), "similarity": similarity, "budget": budget}
    options |= {"groups": groups, "group": group}
    tried = candidates(labels, method)

    def measured(rerank: Rerank | None) -> float:
        values = retrieval_metrics.per_query(embeddings, labels, rerank=rerank, **options)["map@r"]
        counted = values[~values.isnan()].tolist()
        return math.fsum(counted) / len(counted) if counted else math.nan

    plain, results = measured(None), []
    for done, rerank in enumerate(tried):
        results.append((rerank, measured(rerank)))
        if progress is not None:
            progress(done + 1, len(tried))
    if math.isnan(plain):
        raise ValueError("labels must have a class of two items or more, so that there is something to find; got none")
    return ChosenRerank(max(results, key=lambda result: result[1])[0], plain, results)


def candidates(labels: Tensor, method: str) -> list[Rerank]:
    """Settings that follow the median class size, each once."""
    known = labels[labels != UNKNOWN]
    if not len(known) or labels.dim() != 1:
        raise ValueError("labels must be class ids, one per row and some of them known, to choose settings by")
    others = float(torch.unique(known, return_counts=True)[1].double().median()) - 1
    kind = METHODS[method]
    sizes = dict.fromkeys(max(1, min(round(factor * others), len(known) - 1)) for factor in _FACTORS[kind])
    return [kind(size) for size in sizes]


def figures(
    embeddings: Tensor,
    labels: Any,
    gallery: Tensor | None,
    gallery_labels: Tensor | None,
    rerank: Rerank,
    *,
    interval: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """{"method", "settings", metrics, "intervals", "against", "sentence"}: the new order beside the plain one.

    "against": for MAP@R and R@1 what `cluster_bootstrap.compare` says, the re-ranked minus the plain value. options:
    those of `retrieval`.
    """
    sides = embeddings, labels, gallery, gallery_labels
    values = {
        name: retrieval_metrics.per_query(*sides, rerank=way, **options)
        for name, way in (("plain", None), ("reranked", rerank))
    }
    scores = retrieval_metrics.summary(dict(values["reranked"]), labels, interval=interval)
    result: dict[str, Any] = {"method": rerank.name, "settings": fields(rerank), **scores}
    for count in ("queries", "without_positives", "unknown"):
        result.pop(count)
    if interval:
        result["intervals"] = dict(scores.intervals)
    classes = cluster_bootstrap.classes_of(labels, len(embeddings))
    against: dict[str, Any] = {}
    for name, (metric, _) in _COMPARED.items():
        if metric in values["plain"]:
            test = cluster_bootstrap.compare(values["reranked"][metric], values["plain"][metric], classes)
            low, high = test["interval"]
            verdict = {"a": "better", "b": "worse"}.get(test["verdict"], "undecided")
            against[name] = {"plain": test["b"], "reranked": test["a"], "difference": test["difference"]}
            against[name] |= {"low": low, "high": high, "p": test["p"], "verdict": verdict}
    return result | {"against": against, "sentence": sentence(against)}


def sentence(against: Mapping[str, Mapping[str, Any]]) -> str:
    """Whether it helps, by MAP@R, and what happens to R@1."""
    main, first = (against.get(name, {}).get("verdict") for name in _COMPARED)
    opening = {"better": "helps", "worse": "harms", "undecided": "may or may not help"}[str(main)]
    if (main, first) == ("better", "worse"):
        opening = "helps MAP@R and harms R@1"
    parts = []
    for name, (_, written) in _COMPARED.items():
        if name not in against:
            continue
        one = against[name]
        low, high = one["low"], one["high"]
        ends = "" if math.isnan(low) else f", 95 % interval {_points(low)} to {_points(high)}"
        change = f"{_points(one['difference'])} points{ends}, {one['verdict']}"
        parts.append(f"{written} {100 * one['plain']:.1f} % becomes {100 * one['reranked']:.1f} % ({change})")
    return f"Re-ranking {opening}: {'; '.join(parts)}."


def _points(share: float) -> str:
    return f"{100 * share:+.1f}".replace("-", "−")
