"""Validation in the loop: a few metrics of the encoder on held-out items."""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin import evaluation
from nearkin.core import devices
from nearkin.evaluation.graded import per_query as graded_per_query
from nearkin.evaluation.retrieval import retrieval_metrics

__all__ = ["KS", "MAIN", "METRICS", "WRITTEN", "HeldOut", "chance_units", "graded_metrics", "graded_query_and_gallery"]
__all__ += [
    "figure",
    "groups_of",
    "main_per_query",
    "number",
    "points",
    "query_and_gallery",
    "quick_metrics",
]

MAIN = {False: "map@r", True: "ndcg@10"}  # what validation maximises: classes, continuous targets
KS = {False: (1, 2, 4, 8), True: (1, 5, 10)}
WRITTEN = {"map@r": "MAP@R", "ndcg@10": "nDCG@10"}
METRICS = ("recall", "precision@1", "r_precision", "map@r")


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
    groups: NDArray[np.int64] | None = None
    gallery_groups: NDArray[np.int64] | None = None

    @property
    def everything(self) -> NDArray[np.int64]:
        return self.indices if self.gallery is None else np.concatenate([self.indices, self.gallery])


def quick_metrics(rows: Tensor, held_out: HeldOut, graded: bool, device: torch.device) -> dict[str, float]:
    """A few metrics, fast: the main metric and recall@1 or its like. rows (n, D): those of `held_out.everything`.

    A metric that is undefined for so few items, as the rank correlation of two, is left out.
    """
    if graded:
        metrics: Any = graded_metrics(rows, held_out, device, ks=(10,))
        names = ("ndcg@10", "label_distance@10", "spearman")
    else:
        queries, labels, gallery, gallery_labels = query_and_gallery(rows, held_out, device)
        options: dict[str, Any] = {"ks": (1,), "metrics": METRICS, **groups_of(held_out, device)}
        metrics = evaluation.retrieval(queries, labels, gallery, gallery_labels, **options)
        names = ("map@r", "recall@1", "r_precision")
    return {name: float(metrics[name]) for name in names if np.isfinite(metrics[name])}


def graded_metrics(rows: Tensor, held_out: HeldOut, device: torch.device, **options: Any) -> Any:
    queries, targets, gallery = graded_query_and_gallery(rows, held_out, device)
    return evaluation.graded(queries, targets, **gallery, **options)


def graded_query_and_gallery(
    rows: Tensor, held_out: HeldOut, device: torch.device
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Queries, their targets, and as keyword arguments the gallery and its targets, where there is one."""
    assert held_out.targets is not None
    device = devices.exact(device)
    count, targets = len(held_out.indices), torch.from_numpy(held_out.targets).to(device)
    if held_out.gallery is None:
        return rows[:count].to(device), targets, {}
    assert held_out.gallery_targets is not None
    gallery_targets = torch.from_numpy(held_out.gallery_targets).to(device)
    return rows[:count].to(device), targets, {"gallery": rows[count:].to(device), "gallery_targets": gallery_targets}


def groups_of(held_out: HeldOut, device: torch.device) -> dict[str, Any]:
    """The groups of queries and gallery as `evaluation.retrieval` takes them; nothing where there are none."""
    sides = {"groups": held_out.groups, "gallery_groups": held_out.gallery_groups}
    device = devices.exact(device)
    return {name: torch.from_numpy(ids).to(device) for name, ids in sides.items() if ids is not None}


def query_and_gallery(
    rows: Tensor, held_out: HeldOut, device: torch.device
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Queries and their labels, gallery and its labels where there is one."""
    assert held_out.labels is not None
    device = devices.exact(device)
    count = len(held_out.indices)
    queries, labels = rows[:count].to(device), torch.from_numpy(held_out.labels).to(device)
    if held_out.gallery is None:
        return queries, labels, None, None
    assert held_out.gallery_labels is not None
    return queries, labels, rows[count:].to(device), torch.from_numpy(held_out.gallery_labels).to(device)


def main_per_query(rows: Tensor, held_out: HeldOut, graded: bool, device: torch.device) -> Tensor:
    """The main metric of each query (Q,); NaN where it has nothing to find."""
    if graded:
        queries, targets, gallery = graded_query_and_gallery(rows, held_out, device)
        return graded_per_query(queries, targets, (10,), **gallery)[MAIN[True]]
    sides = query_and_gallery(rows, held_out, device)
    return retrieval_metrics.per_query(*sides, metrics=(MAIN[False],), **groups_of(held_out, device))[MAIN[False]]


def chance_units(held_out: HeldOut, graded: bool) -> tuple[Tensor, str]:
    """The unit of chance of each query (Q,), and its name: its class; with continuous targets the item itself."""
    if held_out.labels is not None and not graded:
        return torch.from_numpy(held_out.labels).long(), "classes"
    return torch.arange(len(held_out.indices)), "items"


def figure(value: Any, ends: tuple[Any, Any]) -> dict[str, Any]:
    """A value and its interval as JSON has them: None for NaN and infinity."""
    return {"value": number(value), "low": number(ends[0]), "high": number(ends[1])}


def number(value: Any) -> float | None:
    """A value as JSON has it: None for NaN and infinity."""
    if value is None:
        return None
    return float(value) if np.isfinite(float(value)) else None


def points(difference: float) -> str:
    """A difference of two shares in points, signed."""
    return f"{100 * difference:+.1f}".replace("-", "−")
