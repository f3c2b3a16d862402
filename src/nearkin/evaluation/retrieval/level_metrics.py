"""Retrieval at coarser levels of classes: the neighbour of a warbler need not be the same warbler to be a bird."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nearkin.core.relations import UNKNOWN
from nearkin.evaluation.retrieval import retrieval_metrics
from nearkin.evaluation.statistics import cluster_bootstrap

__all__ = ["KS", "METRICS", "by_level"]

METRICS, KS = ("recall", "map@r"), (1,)


def by_level(
    embeddings: Tensor,
    labels: Tensor,
    levels: Mapping[str, Tensor],
    gallery: Tensor | None = None,
    gallery_levels: Mapping[str, Tensor] | None = None,
    *,
    interval: bool = False,
    **options: Any,
) -> dict[str, dict[str, Any]]:
    """{"family": {"recall@1", "map@r", "classes", "intervals"}, …}: items of one coarser class are positives there.

    labels (Q,): the finest classes. levels: class ids (Q,) of each level, gallery_levels (G,) of the gallery. The 95 %
    intervals are over the choice of the finest classes: those are what a split holds out, within coarser classes that
    stay the same. options: those of `per_query`, as similarity, budget and group.
    """
    result: dict[str, dict[str, Any]] = {}
    for name, ids in levels.items():
        others = None if gallery_levels is None else gallery_levels[name]
        values = retrieval_metrics.per_query(embeddings, ids, gallery, others, ks=KS, metrics=METRICS, **options)
        valid = values.pop("positives") > 0
        count = int(valid.sum())
        figures: dict[str, Any] = {
            metric: math.fsum(value[valid].tolist()) / count if count else math.nan for metric, value in values.items()
        }
        figures["classes"] = len(torch.unique(ids[ids != UNKNOWN]))
        if interval:
            groups = labels.cpu()
            ends = {metric: cluster_bootstrap.share_interval(value, groups) for metric, value in values.items()}
            figures["intervals"] = ends
        result[name] = figures
    return result
