"""What an encoder is worth on items it has not learned from: validation in the loop, the test at the end."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin import evaluation
from nearkin.evaluation.statistics import cluster_bootstrap

__all__ = ["MAIN", "Held", "graded_sides", "judge", "main_metric", "no_interval", "number", "sides", "test"]

MAIN = {False: "map@r", True: "ndcg@10"}  # what validation maximises: classes, continuous targets
KS = {False: (1, 2, 4, 8), True: (1, 5, 10)}
_METRICS = ("recall", "precision@1", "r_precision", "map@r")


class Held(NamedTuple):
    """The held-out items to be judged: where they stand in the store, and what is known of them.

    gallery: items that are searched and do not ask, as In-Shop has them; None: the items search one another.
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


def judge(rows: Tensor, held: Held, graded: bool, device: torch.device) -> dict[str, float]:
    """A few figures, fast: the main metric and recall@1 or its like. rows (n, D): those of `held.everything`.

    A figure that so few items do not have, as the rank correlation of two, is left out.
    """
    if graded:
        found: Any = _graded(rows, held, device, ks=(10,))
        names = ("ndcg@10", "label_distance@10", "spearman")
    else:
        queries, labels, gallery, gallery_labels = sides(rows, held, device)
        found = evaluation.retrieval(queries, labels, gallery, gallery_labels, ks=(1,), metrics=_METRICS)
        names = ("map@r", "recall@1", "r_precision")
    return {name: float(found[name]) for name in names if np.isfinite(found[name])}


def test(
    rows: Tensor, held: Held, graded: bool, device: torch.device, *, ks: Sequence[int] | None, interval: bool, seed: int
) -> dict[str, dict[str, float | None]]:
    """Every figure with its 95 % interval: {"recall@1": {"value", "low", "high"}, …}."""
    ks = tuple(ks or KS[graded])
    if graded:
        found: Any = _graded(rows, held, device, ks=ks, interval=interval, seed=seed)
    else:
        queries, labels, gallery, gallery_labels = sides(rows, held, device)
        options: dict[str, Any] = {"ks": ks, "metrics": _METRICS, "interval": interval}
        found = evaluation.retrieval(queries, labels, gallery, gallery_labels, **options)
    result = {}
    for name, value in found.items():
        if name in ("queries", "without_positives", "unknown", "spearman_skipped"):
            continue
        low, high = found.intervals.get(name, (None, None)) if interval else (None, None)
        result[name] = {"value": number(value), "low": number(low), "high": number(high)}
    return result


def no_interval(tested: dict[str, dict[str, float | None]], held: Held) -> str | None:
    """Why the figures of `test` have no intervals, where none of them has one."""
    if any(figure["low"] is not None for figure in tested.values()):
        return None
    return cluster_bootstrap.too_few(len(held.indices) if held.labels is None else len(np.unique(held.labels)))


def _graded(rows: Tensor, held: Held, device: torch.device, **options: Any) -> Any:
    queries, targets, gallery = graded_sides(rows, held, device)
    return evaluation.graded(queries, targets, **gallery, **options)


def graded_sides(rows: Tensor, held: Held, device: torch.device) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Queries, their targets, and as options the gallery's where there is one."""
    assert held.targets is not None
    count, targets = len(held.indices), torch.from_numpy(held.targets).to(device)
    if held.gallery is None:
        return rows[:count].to(device), targets, {}
    assert held.gallery_targets is not None
    found = torch.from_numpy(held.gallery_targets).to(device)
    return rows[:count].to(device), targets, {"gallery": rows[count:].to(device), "gallery_targets": found}


def sides(rows: Tensor, held: Held, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Queries and labels, gallery and its labels where there is one."""
    assert held.labels is not None
    count = len(held.indices)
    queries, labels = rows[:count].to(device), torch.from_numpy(held.labels).to(device)
    if held.gallery is None:
        return queries, labels, None, None
    assert held.gallery_labels is not None
    return queries, labels, rows[count:].to(device), torch.from_numpy(held.gallery_labels).to(device)


def number(value: Any) -> float | None:
    """A figure as JSON has it: None for one that is no number."""
    if value is None:
        return None
    number = float(value)
    return number if np.isfinite(number) else None


def more(rows: Tensor, held: Held, pairs: Any, recipe: Any, device: torch.device) -> dict[str, Any]:
    """What else the test items can show of the trained encoder: clustering on request, the source's own pairs."""
    found: dict[str, Any] = {}
    if recipe.evaluation.clustering:
        if held.labels is None:
            raise ValueError("evaluation.clustering needs class labels, the source has none")
        labels = torch.from_numpy(held.labels).to(device)
        clusters: Any = evaluation.clustering(rows[: len(held.indices)].to(device), labels, seed=recipe.training.seed)
        found["clustering"] = {name: number(clusters[name]) for name in ("nmi", "ami", "f1")}
    if pairs is not None and unverifiable(pairs) is None:
        verified = _verified(rows, pairs)
        names = ("accuracy", "accuracy_error", "threshold", "eer", "auc")
        found["verification"] = {name: number(verified[name]) for name in names}
        found["verification"] |= {name: number(v) for name, v in verified.items() if name.startswith("tar@")}
    return found


def unverifiable(pairs: Any) -> str | None:
    """Why the source's own pairs, as far as they are test items, cannot be verified; None if they can.

    Found by verifying random vectors, so that it is known before training.
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
