"""Metrics of an encoder on held-out items: a few for validation in the loop, all with intervals for the test."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin import evaluation
from nearkin.evaluation.statistics import cluster_bootstrap

__all__ = ["MAIN", "HeldOut", "extra_metrics", "graded_query_and_gallery", "main_metric", "no_interval", "number"]
__all__ += ["full_metrics", "query_and_gallery", "quick_metrics", "unverifiable"]

MAIN = {False: "map@r", True: "ndcg@10"}  # what validation maximises: classes, continuous targets
KS = {False: (1, 2, 4, 8), True: (1, 5, 10)}
_METRICS = ("recall", "precision@1", "r_precision", "map@r")


class HeldOut(NamedTuple):
    """Held-out items: their indices in the source, their labels or targets.

    gallery: items that are searched and are no queries, as in In-Shop; None: the items search one another.
    """

    indices: NDArray[np.int64]
    labels: NDArray[np.int64] | None
    targets: NDArray[np.float64] | None
    gallery: NDArray[np.int64] | None = None
    gallery_labels: NDArray[np.int64] | None = None
    gallery_targets: NDArray[np.float64] | None = None

    @property
    def everything(self) -> NDArray[np.int64]:
        return self.indices if self.gallery is None else np.concatenate([self.indices, self.gallery])


def main_metric(graded: bool) -> str:
    return MAIN[graded]


def quick_metrics(rows: Tensor, held_out: HeldOut, graded: bool, device: torch.device) -> dict[str, float]:
    """A few metrics, fast: the main metric and recall@1 or its like. rows (n, D): those of `held_out.everything`.

    A metric that is undefined for so few items, as the rank correlation of two, is left out.
    """
    if graded:
        metrics: Any = _graded(rows, held_out, device, ks=(10,))
        names = ("ndcg@10", "label_distance@10", "spearman")
    else:
        queries, labels, gallery, gallery_labels = query_and_gallery(rows, held_out, device)
        metrics = evaluation.retrieval(queries, labels, gallery, gallery_labels, ks=(1,), metrics=_METRICS)
        names = ("map@r", "recall@1", "r_precision")
    return {name: float(metrics[name]) for name in names if np.isfinite(metrics[name])}


def full_metrics(
    rows: Tensor,
    held_out: HeldOut,
    graded: bool,
    device: torch.device,
    *,
    ks: Sequence[int] | None,
    interval: bool,
    seed: int,
) -> dict[str, dict[str, float | None]]:
    """Every metric with its 95 % interval: {"recall@1": {"value", "low", "high"}, …}."""
    ks = tuple(ks or KS[graded])
    if graded:
        metrics: Any = _graded(rows, held_out, device, ks=ks, interval=interval, seed=seed)
    else:
        queries, labels, gallery, gallery_labels = query_and_gallery(rows, held_out, device)
        options: dict[str, Any] = {"ks": ks, "metrics": _METRICS, "interval": interval}
        metrics = evaluation.retrieval(queries, labels, gallery, gallery_labels, **options)
    result = {}
    for name, value in metrics.items():
        if name in ("queries", "without_positives", "unknown", "spearman_skipped"):
            continue
        low, high = metrics.intervals.get(name, (None, None)) if interval else (None, None)
        result[name] = {"value": number(value), "low": number(low), "high": number(high)}
    return result


def no_interval(tested: dict[str, dict[str, float | None]], held_out: HeldOut) -> str | None:
    """Why the metrics of `full_metrics` have no intervals, where none of them has one."""
    if any(figure["low"] is not None for figure in tested.values()):
        return None
    items, labels = held_out.indices, held_out.labels
    return cluster_bootstrap.too_few(len(items) if labels is None else len(np.unique(labels)))


def _graded(rows: Tensor, held_out: HeldOut, device: torch.device, **options: Any) -> Any:
    queries, targets, gallery = graded_query_and_gallery(rows, held_out, device)
    return evaluation.graded(queries, targets, **gallery, **options)


def graded_query_and_gallery(
    rows: Tensor, held_out: HeldOut, device: torch.device
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Queries, their targets, and as keyword arguments the gallery and its targets, where there is one."""
    assert held_out.targets is not None
    count, targets = len(held_out.indices), torch.from_numpy(held_out.targets).to(device)
    if held_out.gallery is None:
        return rows[:count].to(device), targets, {}
    assert held_out.gallery_targets is not None
    gallery_targets = torch.from_numpy(held_out.gallery_targets).to(device)
    return rows[:count].to(device), targets, {"gallery": rows[count:].to(device), "gallery_targets": gallery_targets}


def query_and_gallery(
    rows: Tensor, held_out: HeldOut, device: torch.device
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Queries and their labels, gallery and its labels where there is one."""
    assert held_out.labels is not None
    count = len(held_out.indices)
    queries, labels = rows[:count].to(device), torch.from_numpy(held_out.labels).to(device)
    if held_out.gallery is None:
        return queries, labels, None, None
    assert held_out.gallery_labels is not None
    return queries, labels, rows[count:].to(device), torch.from_numpy(held_out.gallery_labels).to(device)


def number(value: Any) -> float | None:
    """A value as JSON has it: None for NaN and infinity."""
    if value is None:
        return None
    return float(value) if np.isfinite(float(value)) else None


def extra_metrics(rows: Tensor, held_out: HeldOut, pairs: Any, recipe: Any, device: torch.device) -> dict[str, Any]:
    """Clustering on request, and verification of the source's own pairs."""
    metrics: dict[str, Any] = {}
    if recipe.evaluation.clustering:
        if held_out.labels is None:
            raise ValueError("evaluation.clustering needs class labels, the source has none")
        labels = torch.from_numpy(held_out.labels).to(device)
        clusters: Any = evaluation.clustering(
            rows[: len(held_out.indices)].to(device), labels, seed=recipe.training.seed
        )
        metrics["clustering"] = {name: number(clusters[name]) for name in ("nmi", "ami", "f1")}
    if pairs is not None and unverifiable(pairs) is None:
        verified = _verified(rows, pairs)
        names = ("accuracy", "accuracy_error", "threshold", "eer", "auc")
        metrics["verification"] = {name: number(verified[name]) for name in names}
        metrics["verification"] |= {name: number(v) for name, v in verified.items() if name.startswith("tar@")}
    return metrics


def unverifiable(pairs: Any) -> str | None:
    """Why the source's own pairs of test items cannot be verified; None if they can.

    Random vectors are verified, so that it is known before training.
    """
    if pairs is None:
        return None
    generator = torch.Generator().manual_seed(0)
    try:
        _verified(torch.randn(int(pairs.items.max()) + 1, 2, generator=generator), pairs)
    except ValueError as error:
        return str(error)
    return None


def _verified(rows: Tensor, pairs: Any) -> Any:
    same, folds = torch.from_numpy(pairs.same), torch.from_numpy(pairs.fold)
    return evaluation.verification(embeddings=rows, pairs=torch.from_numpy(pairs.items), same=same, folds=folds)
