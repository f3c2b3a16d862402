"""Groups of unlabelled embeddings: neighbours at a similarity, joined by average linkage so that chains do not grow.

The graph has an edge between two items whose cosine reaches the threshold. Its connected components are what single
linkage finds: one pair that looks alike by chance joins two groups. Average linkage joins two groups only while the
mean cosine over all their pairs reaches the threshold. That mean is the inner product of the means of their unit rows,
so no matrix of N x N is needed.

Nothing is lost by looking at edges only: the mean over the pairs of two groups is a weighted mean over those of their
parts, so where it reaches the threshold, that of two parts does, down to a pair of items, which is an edge. Two groups
that are each other's nearest may be joined at once, in any order, because average linkage is reducible (Murtagh 1983,
"A survey of recent advances in hierarchical clustering algorithms", section 3). The result is therefore that of
average linkage over all pairs, cut at the threshold, unless an item has more neighbours than the graph lists.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin.core import checks
from nearkin.evaluation.arrays import Array, Floats, Progress, takes_arrays
from nearkin.evaluation.retrieval.knn import BUDGET, nearest

__all__ = ["METHODS", "NEIGHBOURS", "SMOOTHED", "Grouping", "group", "smoothed"]

METHODS = ("average", "components", "hdbscan")
NEIGHBOURS = 64  # listed per item
SMOOTHED = 0.8  # the similarity for smoothed rows: chosen on validation classes, docs/grouping.md
_ROUNDING = 1e-12  # of a mean cosine in float64
_CELLS = 2**22  # numbers that are multiplied at a time: 32 MiB

Ints = NDArray[np.int64]


class Grouping(NamedTuple):
    """What `group` returns.

    assignment (N,) int64: the group of each item, 0 the largest, of equal ones that of the first item; an item that
    nothing is near to is a group by itself. edges: pairs in the graph, None for hdbscan. capped: items with more
    neighbours at the similarity than were listed; with 0 the groups are those of all pairs.
    """

    assignment: Tensor
    edges: int | None
    capped: int


@takes_arrays
def group(
    embeddings: Array,
    *,
    similarity: float | None = None,
    method: str = "average",
    neighbours: int = NEIGHBOURS,
    least: int = 2,
    budget: int = BUDGET,
    progress: Progress | None = None,
) -> Grouping:
    """Groups of items that are alike, without labels and without knowing how many there are.

        groups = evaluation.group(embeddings, similarity=0.7)
        groups.assignment    # (N,), 0 is the largest group

    embeddings (N, D), tensors or NumPy arrays, compared by their cosine. similarity: from which on two items are
    neighbours; a run's calibration knows it (`gallery.group_source`), for `smoothed` rows 0.8 is a good one.
    neighbours: the nearest so many of an item are listed; memory grows with N x (neighbours + D), never with
    N x N. budget and exactness as in `nearest`.

    method: "average" joins groups while the mean cosine over all their pairs reaches `similarity`. "components" takes
    the connected components of the graph: one chance pair joins two groups, so chains grow; for comparison. "hdbscan"
    is scikit-learn's (the `report` extra), with `least` items per cluster; items that it calls noise are groups by
    themselves. progress(done, total) counts items whose neighbours are known.
    """
    checks.rows("embeddings", embeddings)
    checks.one_of("method", method, METHODS)
    checks.integer("neighbours", neighbours, 1)
    checks.integer("least", least, 2)
    if similarity is not None:
        checks.number("similarity", similarity)
        if not -1 <= similarity <= 1:
            raise ValueError(f"similarity must be between -1 and 1, a cosine, got {similarity:g}")
    if method == "hdbscan" and similarity is not None:
        raise ValueError(f'similarity is for the other methods; "hdbscan" has none, got {similarity:g}')
    if method != "hdbscan" and similarity is None:
        raise ValueError(
            f'similarity must be given for method "{method}": from which cosine on two items are neighbours'
        )
    if method != "hdbscan" and least != 2:
        raise ValueError(f'least is for method "hdbscan", got {least} with "{method}"')
    size = len(embeddings)
    if method == "hdbscan":
        return Grouping(_by_size(_hdbscan(embeddings, least)), None, 0)
    assert similarity is not None
    if size < 2:
        return Grouping(torch.zeros(size, dtype=torch.int64), 0, 0)
    first, second, value, capped = _graph(embeddings, similarity, neighbours, budget, progress)
    if method == "components":
        parts = _components(size, first, second)
    else:
        parts = _average_linkage(_unit(embeddings), first, second, value, similarity)
    return Grouping(_by_size(parts), len(first), capped)


@takes_arrays
def smoothed(
    embeddings: Array,
    *,
    neighbours: int | None = None,
    rounds: int = 2,
    budget: int = BUDGET,
    progress: Progress | None = None,
) -> Tensor:
    """Embeddings (N, D) float64 of length 1, each moved towards its mutual neighbours: groups become denser.

    The mean over all rows is subtracted first, so that 0 is the cosine of unrelated items also for features that are
    all positive. Then, `rounds` times, x_i becomes the direction of x_i + sum_j max(cos_ij, 0)^3 x_j over the items j
    among the nearest `neighbours` of i that have i among theirs. neighbours: 10 by default, a twentieth of the items
    where they are fewer than 200; about the size of a group is best. Cosines of the result have no calibration: use
    `group(smoothed(x), similarity=0.8)`. The mean of neighbours in place of a row is the database augmentation of
    Turcot and Lowe 2009, the cubed cosines as weights those of Radenovic et al. 2018 (arXiv:1711.02512).
    """
    checks.rows("embeddings", embeddings)
    checks.integer("rounds", rounds, 1)
    size = len(embeddings)
    count = min(10, max(1, round(size / 20))) if neighbours is None else neighbours
    checks.integer("neighbours", count, 1)
    rows = _unit(embeddings)
    if size < 2:
        return torch.from_numpy(rows)
    rows = _unit(torch.from_numpy(rows - rows.mean(0)))
    for number in range(rounds):
        step = None if progress is None else _later(progress, number, rounds)
        listed = nearest(torch.from_numpy(rows).float(), k=min(count, size - 1), budget=budget, progress=step)
        rows = _moved(rows, listed.indices.numpy(), listed.similarity.numpy())
    return torch.from_numpy(rows)


def _later(progress: Progress, number: int, rounds: int) -> Progress:
    return lambda done, total: progress(number * total + done, rounds * total)


def _moved(rows: Floats, near: Ints, cosines: Floats) -> Floats:
    """One round. near, cosines (N, k): the neighbours of each."""
    size, k = near.shape
    forth = (np.arange(size)[:, None] * size + near).ravel()
    back = (near * size + np.arange(size)[:, None]).ravel()
    listed = np.sort(forth)
    mutual = listed[np.searchsorted(listed, back).clip(max=len(listed) - 1)] == back
    weight = np.where(mutual.reshape(size, k) & (near >= 0), np.maximum(cosines, 0.0) ** 3, 0.0)
    moved, step = rows.copy(), max(1, _CELLS // max(k * rows.shape[1], 1))
    for start in range(0, size, step):
        part = slice(start, start + step)
        moved[part] += np.einsum("nk,nkd->nd", weight[part], rows[near[part]])
    return _unit(torch.from_numpy(moved))


def _graph(
    embeddings: Tensor, similarity: float, neighbours: int, budget: int, progress: Progress | None
) -> tuple[Ints, Ints, Floats, int]:
    """Edges, each once with the lower item first, their cosines, and the number of items that have more."""
    size = len(embeddings)
    listed = nearest(embeddings, k=min(neighbours, size - 1), budget=budget, progress=progress)
    near = (listed.similarity >= similarity - _ROUNDING) & (listed.indices >= 0)
    capped = int(near[:, -1].sum()) if listed.indices.shape[1] < size - 1 else 0
    item, slot = near.nonzero(as_tuple=True)
    other, value = listed.indices[item, slot], listed.similarity[item, slot]
    keys = (torch.minimum(item, other) * size + torch.maximum(item, other)).cpu().numpy()
    keys, at = np.unique(keys, return_index=True)
    return keys // size, keys % size, value.cpu().numpy()[at], capped


def _unit(embeddings: Tensor) -> Floats:
    """Rows of length 1 in float64; a zero row stays zero, and has cosine 0 with everything."""
    rows = embeddings.detach().cpu().double().numpy().copy()
    scale = np.abs(rows).max(1, keepdims=True)
    rows /= np.where(scale > 0, scale, 1.0)
    length = np.sqrt(np.einsum("nd,nd->n", rows, rows))[:, None]
    rows /= np.where(length > 0, length, 1.0)
    return rows


def _components(size: int, first: Ints, second: Ints) -> Ints:
    """The lowest item of each item's component: labels are lowered along edges, then along labels, until none falls."""
    label = np.arange(size)
    while True:
        low = np.minimum(label[first], label[second])
        lowered = label.copy()
        for end in (first, second):
            np.minimum.at(lowered, end, low)
            np.minimum.at(lowered, label[end], low)
        while not np.array_equal(lowered, shorter := lowered[lowered]):
            lowered = shorter
        if np.array_equal(lowered, label):
            return label
        label = lowered


def _average_linkage(sums: Floats, first: Ints, second: Ints, value: Floats, similarity: float) -> Ints:
    """The group of each item, named by its lowest item. sums: unit rows, which become the sums of the groups."""
    size = len(sums)
    label, counts = np.arange(size), np.ones(size)
    while len(first):
        low, high = _mutual_nearest(size, first, second, value)
        sums[low] += sums[high]
        counts[low] += counts[high]
        merged = np.arange(size)
        merged[high] = low
        label = merged[label]
        changed = np.zeros(size, bool)
        changed[low] = True
        first, second = merged[first], merged[second]
        apart = first != second
        first, second, value = first[apart], second[apart], value[apart]
        keys, at = np.unique(np.minimum(first, second) * size + np.maximum(first, second), return_index=True)
        first, second, value = keys // size, keys % size, value[at]
        stale = np.flatnonzero(changed[first] | changed[second])
        value[stale] = _mean_cosines(sums, counts, first[stale], second[stale])
        near = value >= similarity - _ROUNDING
        first, second, value = first[near], second[near], value[near]
    return label


def _mutual_nearest(size: int, first: Ints, second: Ints, value: Floats) -> tuple[Ints, Ints]:
    """Pairs of groups that are each other's nearest, the lower one first; of equally near ones the lowest counts.

    There is always one: of the nearest pairs of all, that of the lowest group.
    """
    source, target, near = np.append(first, second), np.append(second, first), np.append(value, value)
    order = np.argsort(source, kind="stable")
    source, target, near = source[order], target[order], near[order]
    starts = np.flatnonzero(np.append(True, source[1:] != source[:-1]))
    best = np.repeat(np.maximum.reduceat(near, starts), np.diff(np.append(starts, len(source))))
    nearest_group = np.full(size, -1)
    nearest_group[source[starts]] = np.minimum.reduceat(np.where(near == best, target, size), starts)
    groups = source[starts]
    mutual = groups[(nearest_group[nearest_group[groups]] == groups) & (groups < nearest_group[groups])]
    return mutual, nearest_group[mutual]


def _mean_cosines(sums: Floats, counts: Floats, first: Ints, second: Ints) -> Floats:
    """The mean cosine over all pairs of two groups, for many pairs of groups."""
    means, step = np.empty(len(first)), max(1, _CELLS // max(sums.shape[1], 1))
    for start in range(0, len(first), step):
        a, b = first[start : start + step], second[start : start + step]
        means[start : start + step] = np.einsum("pd,pd->p", sums[a], sums[b]) / (counts[a] * counts[b])
    return means


def _hdbscan(embeddings: Tensor, least: int) -> Ints:
    try:
        from sklearn.cluster import HDBSCAN  # type: ignore[import-untyped]
    except ImportError:
        raise ModuleNotFoundError("method hdbscan needs scikit-learn 1.3: pip install 'nearkin[report]'") from None
    size = len(embeddings)
    if size <= least:
        return np.arange(size)
    found = HDBSCAN(min_cluster_size=least, copy=True).fit_predict(_unit(embeddings))
    return np.where(found < 0, size + np.arange(size), found).astype(np.int64)


def _by_size(parts: Ints) -> Tensor:
    """Groups numbered from 0 on, the largest first, of equal ones that of the first item."""
    _, at, label, counts = np.unique(parts, return_index=True, return_inverse=True, return_counts=True)
    place = np.empty(len(at), np.int64)
    place[np.lexsort((at, -counts))] = np.arange(len(at))
    return torch.from_numpy(place[label])
