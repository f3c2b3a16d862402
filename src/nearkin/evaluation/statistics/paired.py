"""Paired comparison: which of two embeddings of the same items retrieves better."""

from typing import Any

from nearkin.core import checks
from nearkin.evaluation.arrays import Array, Ids, takes_arrays
from nearkin.evaluation.retrieval import knn, retrieval_metrics
from nearkin.evaluation.retrieval.retrieval_metrics import AT_KS
from nearkin.evaluation.statistics import cluster_bootstrap

__all__ = ["compare"]


@takes_arrays
def compare(
    embeddings_a: Array,
    embeddings_b: Array,
    labels: Ids,
    *,
    metric: str = "map@r",
    samples: int = 10_000,
    seed: int = 0,
    confidence: float = 0.95,
    similarity: str = "cosine",
    budget: int = knn.BUDGET,
    groups: Ids | None = None,
) -> dict[str, Any]:
    """Whether embeddings_a (N, D) or embeddings_b (N, D') of the same items is better by a metric of `retrieval`.

    metric: "map@r", "r_precision", "precision@1", "map", "mrr", "minp", or "recall@k", "cmc@k" and "ndcg@k" with a
    number for k. groups: as in `retrieval`. Returns what `cluster_bootstrap.compare` returns for the values per query:
    "a", "b", "difference", its "interval", "p", "classes", "queries" and "verdict": "a", "b" or "undecided". Classes
    are the unit of chance; with multi-label rows or a `Relation` without ids, items.
    """
    for name, embeddings in (("embeddings_a", embeddings_a), ("embeddings_b", embeddings_b)):
        checks.rows(name, embeddings)
    if len(embeddings_a) != len(embeddings_b):
        raise ValueError(
            f"embeddings_b must have the items of embeddings_a: {len(embeddings_a)} rows, got {len(embeddings_b)}"
        )
    name, ks = _parsed(metric)
    options: dict[str, Any] = {"ks": ks, "metrics": (name,), "similarity": similarity, "budget": budget}
    options["groups"] = groups
    a, b = (retrieval_metrics.per_query(x, labels, **options)[metric] for x in (embeddings_a, embeddings_b))
    classes = cluster_bootstrap.classes_of(labels, len(a))
    return cluster_bootstrap.compare(a, b, classes, samples=samples, seed=seed, confidence=confidence)


def _parsed(metric: str) -> tuple[str, tuple[int, ...]]:
    """The name of the metric and its k, if it has one."""
    name, at, k = metric.partition("@")
    if name in AT_KS and at and k.isdecimal() and int(k) > 0 and k == str(int(k)):
        return name, (int(k),)
    known = [f"{name}@{k}" for name in AT_KS for k in (1, 10)]
    checks.one_of("metric", metric, [name for name in retrieval_metrics.METRICS if name not in AT_KS] + known)
    return metric, ()
