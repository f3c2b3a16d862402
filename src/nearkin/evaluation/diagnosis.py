"""What is wrong with an embedding: distances of its pairs, how much of its space it uses, which classes it confuses.

Only the direction of rows counts: d is the Euclidean distance of unit rows, d² = 2 - 2 cos, in [0, 2]. A zero row has
cosine 0 with everything. Statistics of pairs are over all pairs i < j, in float64 and tiles of a fixed size, so that
no value depends on the budget.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearkin.core import checks, distances
from nearkin.core.relations import UNKNOWN
from nearkin.evaluation.arrays import Array, Counts, Ids, takes_arrays
from nearkin.evaluation.retrieval import knn, retrieval_metrics

__all__ = ["diagnose", "effective_rank"]

CLOSE = 0.1  # mean distance of pairs of two classes below which everything is in one spot (6°)
FLAT = 2.0  # effective rank below which everything is on one line
SHOWN = 10  # worst classes, confused pairs and hubs listed
_TILE = 512  # rows per side; fixed, since a matrix product rounds differently in another shape
_FEWEST = 3  # neighbours that can outvote a label


@takes_arrays
def diagnose(
    embeddings: Array,
    labels: Ids,
    *,
    k: int = 10,
    bins: int = 50,
    agreement: float = 0.8,
    budget: int = knn.BUDGET,
) -> dict[str, Any]:
    """Diagnoses embeddings (N, D) with class ids (N,), -1 left out; plain numbers and lists, ready for JSON.

    "intra_histogram", "inter_histogram": {"edges" (bins + 1), "counts" (bins)} of d over pairs of one class and of two;
    "intra_mean", "inter_mean" of d. "alignment": mean d² of pairs of one class; "uniformity": log of the mean of
    exp(-2 d²) over all pairs, lower is more uniform (Wang, Isola 2020, arXiv:2005.10242, alpha = 2, t = 2).
    "effective_rank": see `effective_rank`, of the centred unit rows.
    "hubness": skewness of how often an item is among the k nearest of others (Radovanović et al. 2010), "hubs": the
    items most often there. "collapse": {"collapsed", "why"}: mean d of pairs of two classes below 0.1; or effective
    rank below 2 with at least 3 dimensions and 4 classes, since C classes well apart still need C - 1.
    "worst_classes": by R-precision, then recall@1; "confused_pairs": pairs of classes by how often an item's first
    min(k, R) neighbours, R its positives, are of the other class: a perfect embedding has none. "label_errors": items
    whose neighbours are of one other class in at least the share `agreement`, surest first, larger classes before
    smaller. The neighbours are the k nearest, or as many as that class has items if those are fewer, but at least 3;
    and the item's own class must have less than half of the nearest positions that it could fill. What is undefined
    (with one class there are no pairs of two) is None.
    """
    checks.class_ids("labels", labels, checks.rows("embeddings", embeddings))
    checks.integer("k", k, 1)
    checks.integer("bins", bins, 1)
    checks.number("agreement", agreement)
    if not 0.5 < agreement <= 1:
        raise ValueError(f"agreement must be > 0.5 and <= 1, got {agreement}")
    checks.enough("budget", budget, _needed(embeddings.shape[1]), "the bytes of a tile and a covariance")
    items = (labels != UNKNOWN).nonzero().squeeze(1)
    if len(items) < 2:
        raise ValueError(f"labels must be known of at least 2 items, got {len(items)}")
    x = embeddings.detach()[items]
    ids, number = torch.unique(labels[items].long(), return_inverse=True)  # classes are 0 … C - 1 from here on
    near = knn.nearest(x, k=min(k, len(x) - 1), budget=budget).indices.cpu().numpy()  # (N, k)
    result = {"items": len(x), "classes": len(ids), "k": near.shape[1], **_pairs(x, number, bins)}
    result["effective_rank"] = _effective_rank(x)
    result["collapse"] = _collapse(result, x.shape[1])
    names, classes, indices = ids.tolist(), number.cpu().numpy(), items.tolist()
    result |= _hubs(near, indices)
    result["worst_classes"] = _worst(x, number, names, budget)
    result["confused_pairs"] = _confused(near, classes, names)
    result["label_errors"] = _label_errors(near, classes, names, indices, agreement)
    return result


def _needed(dim: int) -> int:
    return _TILE * (64 * dim + 64 * _TILE) + 32 * dim * dim


def _unit(x: Tensor) -> Tensor:
    return distances.unit(x.double())


def _pairs(x: Tensor, number: Tensor, bins: int) -> dict[str, Any]:
    """Statistics of all pairs: histograms, means, alignment, uniformity."""
    counts = torch.zeros(2 * bins, dtype=torch.long, device=x.device)  # inter, intra
    parts: list[list[float]] = []  # sums of a tile: d of two classes, of one; d² of one; exp(-2 d²)
    for squared, same in _tiles(x, number):
        far = squared.sqrt()
        cell = (far * (bins / 2)).long().clamp_(max=bins - 1)
        counts += torch.bincount(cell + bins * same, minlength=2 * bins)
        sums = (far[~same].sum(), far[same].sum(), squared[same].sum(), (-2 * squared).exp().sum())
        parts.append(torch.stack(sums).tolist())
    inter, intra, square, near = (math.fsum(column) for column in zip(*parts, strict=True))
    table = counts.view(2, bins).tolist()
    inter_pairs, intra_pairs = sum(table[0]), sum(table[1])
    edges = [2 * i / bins for i in range(bins + 1)]
    return {
        "intra_histogram": {"edges": edges, "counts": table[1]},
        "inter_histogram": {"edges": list(edges), "counts": table[0]},
        "intra_mean": intra / intra_pairs if intra_pairs else None,
        "inter_mean": inter / inter_pairs if inter_pairs else None,
        "alignment": square / intra_pairs if intra_pairs else None,
        "uniformity": math.log(near / (inter_pairs + intra_pairs)),  # exp(-8) at the least: nothing underflows
    }


def _tiles(x: Tensor, number: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """d² of all pairs i < j, tile by tile, and which are of one class: flat, of one length."""
    for top in range(0, len(x), _TILE):
        rows = _unit(x[top : top + _TILE])
        for left in range(top, len(x), _TILE):
            columns = rows if left == top else _unit(x[left : left + _TILE])
            squared = (2 - 2 * (rows @ columns.T)).clamp_(0, 4)
            same = number[top : top + _TILE, None] == number[None, left : left + _TILE]
            if left == top:
                i, j = torch.triu_indices(len(rows), len(rows), 1, device=x.device)
                yield squared[i, j], same[i, j]
            else:
                yield squared.flatten(), same.flatten()


def _effective_rank(x: Tensor) -> float:
    """From the eigenvalues of the D x D covariance, which are the squares of the singular values."""
    blocks = [slice(i, i + _TILE) for i in range(0, len(x), _TILE)]
    mean = sum((_unit(x[block]).sum(0) for block in blocks), x.new_zeros(x.shape[1], dtype=torch.float64)) / len(x)
    covariance = torch.zeros(x.shape[1], x.shape[1], dtype=torch.float64, device=x.device)
    for block in blocks:
        rows = _unit(x[block]) - mean
        covariance += rows.T @ rows / len(x)
    return effective_rank(torch.linalg.eigvalsh(covariance))


def effective_rank(variances: Tensor) -> float:
    """exp of the entropy of the singular values, normalised to sum to 1: how many directions are in use.

    variances (D,): the eigenvalues of the covariance, squares of the singular values; those within rounding of 0 count
    as 0. n directions used equally give n, one gives 1, none 0. Roy, Vetterli 2007, The effective rank, EUSIPCO, eq. 3.
    """
    values = variances.double().clamp(min=0)
    if float(values.sum()) < 1e-20:
        return 0.0
    rounding = len(values) * torch.finfo(torch.float64).eps * values.max()
    singular = torch.where(values > rounding, values, 0).sqrt()
    return float(torch.special.entr(singular / singular.sum()).sum().exp())


def _collapse(result: dict[str, Any], dim: int) -> dict[str, Any]:
    why = []
    if result["inter_mean"] is not None and result["inter_mean"] < CLOSE:
        why.append(f"different classes are {result['inter_mean']:.2g} apart on average, less than {CLOSE:g}: one spot")
    if dim >= 3 and result["classes"] >= 4 and result["effective_rank"] < FLAT:
        why.append(f"the effective rank is {result['effective_rank']:.3g}, less than {FLAT:g}: one line")
    return {"collapsed": bool(why), "why": why}


def _hubs(near: Counts, indices: list[int]) -> dict[str, Any]:
    times = np.bincount(near.ravel(), minlength=len(near))
    away = times - times.mean()
    spread = math.sqrt(float((away**2).mean()))
    most = np.argsort(-times, kind="stable")[:SHOWN]
    return {
        "hubness": float((away**3).mean()) / spread**3 if spread else 0.0,
        "hubs": [{"item": indices[i], "times": int(times[i])} for i in most.tolist()],
    }


def _worst(x: Tensor, number: Tensor, names: list[int], budget: int) -> list[dict[str, Any]]:
    values = retrieval_metrics.per_query(x, number, ks=(1,), metrics=("r_precision", "recall"), budget=budget)
    classes, positives = number.cpu(), values["positives"]
    sizes = classes.bincount().tolist()
    valid = positives > 0  # an item alone in its class has nothing to find
    hits = (values["r_precision"] * positives).round()  # whole numbers, whose sums are exact: equals tie
    total, first = (classes[valid].bincount(n[valid], len(names)).tolist() for n in (hits, values["recall@1"]))
    rows = [
        {"class": names[c], "items": n, "r_precision": total[c] / (n * (n - 1)), "recall@1": first[c] / n}
        for c, n in enumerate(sizes)
        if n > 1
    ]
    return sorted(rows, key=lambda row: (row["r_precision"], row["recall@1"], row["class"]))[:SHOWN]


def _confused(near: Counts, classes: Counts, names: list[int]) -> list[dict[str, Any]]:
    """Counts per pair of classes how many of the first min(k, R) neighbours are of the other class; R: positives."""
    sizes = np.bincount(classes)
    depth = np.minimum(sizes - 1, near.shape[1])  # neighbours of an item that count, by its class
    of_item = np.repeat(classes[:, None], near.shape[1], axis=1)
    wrong = (np.arange(near.shape[1]) < depth[of_item]) & (classes[near] != of_item)
    pairs, counts = np.unique(of_item[wrong] * len(names) + classes[near][wrong], return_counts=True)
    table: dict[tuple[int, int], list[int]] = {}
    for pair, count in zip(pairs.tolist(), counts.tolist(), strict=True):
        a, b = divmod(pair, len(names))
        table.setdefault((min(a, b), max(a, b)), [0, 0])[a > b] = count
    most = sorted(table.items(), key=lambda entry: (-sum(entry[1]), entry[0]))[:SHOWN]
    places = sizes * depth
    return [
        {
            "classes": [names[a], names[b]],
            "neighbours": sum(n),
            "of_each": n,
            "share": sum(n) / int(places[[a, b]].sum()),
        }
        for (a, b), n in most
    ]


def _label_errors(
    near: Counts, classes: Counts, names: list[int], indices: list[int], agreement: float
) -> list[dict[str, Any]]:
    """Each other class is counted in as many of the nearest positions as it could fill; the largest share wins."""
    size, k = near.shape
    of_neighbour, of_item = classes[near], classes[:, None]  # (N, k), (N, 1)
    depth = np.minimum(np.bincount(classes), k)  # (C,)
    counted = (of_neighbour != of_item) & (np.arange(k) < depth[of_neighbour]) & (depth[of_neighbour] >= _FEWEST)
    votes, counts = np.unique((np.arange(size)[:, None] * len(names) + of_neighbour)[counted], return_counts=True)
    item, suggested = np.divmod(votes, len(names))
    share = counts / depth[suggested]
    room = np.minimum(np.bincount(classes) - 1, k)[classes]  # (N,) positions that positives could fill
    confirmed = ((of_neighbour == of_item) & (np.arange(k) < room[:, None])).sum(1) * 2 >= np.maximum(room, 1)
    wrong = (share >= agreement) & ~confirmed[item]
    order = np.lexsort((suggested, item, -depth[suggested], -share))
    order = order[wrong[order]]
    order = order[np.sort(np.unique(item[order], return_index=True)[1])]  # the best of each item
    return [
        {"item": indices[i], "class": names[classes[i]], "suggested": names[c], "agreement": a}
        for i, c, a in zip(item[order].tolist(), suggested[order].tolist(), share[order].tolist(), strict=True)
    ]
