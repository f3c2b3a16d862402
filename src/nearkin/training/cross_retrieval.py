"""Retrieval across two encoders: queries by one among rows by another, where no query finds its own item."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearkin.core import devices
from nearkin.evaluation.graded import per_query as graded_per_query
from nearkin.evaluation.retrieval import retrieval_metrics
from nearkin.training.validation import METRICS, HeldOut, groups_of, query_and_gallery

__all__ = ["CROSS", "cross_metrics", "cross_per_query"]

CROSS = "old_"  # before the name of a metric: new queries among the rows of an old run
_QUICK = {False: ("map@r", "recall@1"), True: ("ndcg@10",)}


def cross_metrics(rows: Tensor, old: Tensor, held_out: HeldOut, graded: bool, device: torch.device) -> dict[str, float]:
    """A few metrics as means over the queries; rows and old as in `cross_per_query`."""
    values = cross_per_query(rows, old, held_out, graded, device, ks=(10,) if graded else (1,))
    means = {CROSS + name: float(values[name].nanmean()) for name in _QUICK[graded]}
    return {name: value for name, value in means.items() if np.isfinite(value)}


def cross_per_query(
    rows: Tensor, old: Tensor, held_out: HeldOut, graded: bool, device: torch.device, ks: Sequence[int]
) -> dict[str, Tensor]:
    """The metrics of each query (Q,) float64, NaN where it has nothing to find.

    rows (n, D), old (n, D_old): those of `held_out.everything`; the first D_old dimensions are compared, by cosine.
    """
    rows = rows[:, : old.shape[1]]
    if graded:
        return _graded(rows, old, held_out, devices.exact(device), ks)
    queries, labels, gallery, gallery_labels = query_and_gallery(rows, held_out, device)
    options: dict[str, Any] = {"ks": ks, "metrics": METRICS}
    if gallery is not None:
        groups = groups_of(held_out, device)
        values = retrieval_metrics.per_query(
            queries, labels, old[len(queries) :].to(queries), gallery_labels, **groups, **options
        )
    else:
        ids = _groups(held_out).to(queries.device)
        options |= {"groups": ids, "gallery_groups": ids}
        values = retrieval_metrics.per_query(queries, labels, old.to(queries), labels, **options)
    del values["positives"]
    return values


def _groups(held_out: HeldOut) -> Tensor:
    """A row of the query's class and group is not ranked: every item is a group, or in its own one."""
    ids = torch.arange(len(held_out.indices))
    if held_out.groups is None:
        return ids
    groups = torch.from_numpy(held_out.groups).to(ids)
    return torch.where(groups < 0, int(groups.max()) + 1 + ids, groups)


def _graded(rows: Tensor, old: Tensor, held_out: HeldOut, device: torch.device, ks: Sequence[int]) -> dict[str, Tensor]:
    """nDCG@k. Without a gallery of its own, every second item searches the others, and these search those."""
    assert held_out.targets is not None
    count, targets = len(held_out.indices), torch.from_numpy(held_out.targets)
    sides = [(torch.arange(count), torch.arange(count, len(rows)))]
    if held_out.gallery is None:
        halves = torch.arange(0, count, 2), torch.arange(1, count, 2)
        sides = [halves, halves[::-1]]
    else:
        assert held_out.gallery_targets is not None
        targets = torch.cat([targets, torch.from_numpy(held_out.gallery_targets)])
    names = [f"ndcg@{k}" for k in ks]
    values = {name: torch.full((count,), torch.nan, dtype=torch.float64) for name in names}
    for queries, searched in sides:
        gallery: dict[str, Any] = {"gallery": old[searched].to(device)}
        gallery["gallery_targets"] = targets[searched].to(device)
        if len(queries) and len(searched):
            part = graded_per_query(
                rows[queries].to(device), targets[queries].to(device), ks, distance="cosine", **gallery
            )
            for name in names:
                values[name][queries] = part[name].cpu()
    return values
