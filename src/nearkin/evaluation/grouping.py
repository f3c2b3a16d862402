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
from nearkin.evaluation.linkage import ROUNDING, average_linkage, components, likelihood_linkage
from nearkin.evaluation.plda import PLDA
from nearkin.evaluation.retrieval.knn import BUDGET, nearest

__all__ = ["METHODS", "NEIGHBOURS", "SMOOTHED", "Grouping", "group", "smoothed", "unit_rows"]

METHODS = ("average", "components", "hdbscan", "plda")
NEIGHBOURS = 64  # listed per item
SMOOTHED = 0.8  # the similarity for smoothed rows: chosen on validation classes, docs/grouping.md
_CELLS = 2**22  # numbers that are multiplied at a time: 32 MiB

Ints = NDArray[np.int64]


class Grouping(NamedTuple):
    """What `group` returns.

    assignment (N,) int64: the group of each item, 0 the largest, of equal ones that of the first item; an item that
    nothing is near to is a group by itself. edges: pairs in the graph, None for hdbscan. capped: items with more
    neighbours at the similarity than were listed; with 0 the groups are those of all pairs. 0 for hdbscan and plda.
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
    model: PLDA | None = None,
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
    themselves. "plda" joins groups while one class explains them better than two do; `model` is what `fit_plda` learned
    from other, labelled classes. progress(done, total) counts items whose neighbours are known.
    """
    checks.rows("embeddings", embeddings)
    checks.one_of("method", method, METHODS)
    checks.integer("neighbours", neighbours, 1)
    checks.integer("least", least, 2)
    if similarity is not None:
        checks.number("similarity", similarity)
        if not -1 <= similarity <= 1:
            raise ValueError(f"similarity must be between -1 and 1, a cosine, got {similarity:g}")
    _check_method(method, similarity, least, model)
    size = len(embeddings)
    if method == "hdbscan":
        return Grouping(_by_size(_hdbscan(embeddings, least)), None, 0)
    if method == "plda":
        assert model is not None
        checks.dimensions("embeddings", embeddings, len(model.mean), "the model has")
        return _plda(embeddings, model, neighbours, budget, progress)
    assert similarity is not None
    if size < 2:
        return Grouping(torch.zeros(size, dtype=torch.int64), 0, 0)
    first, second, value, capped = _graph(embeddings, similarity, neighbours, budget, progress)
    if method == "components":
        parts = components(size, first, second)
    else:
        parts = average_linkage(unit_rows(embeddings), first, second, value, similarity)
    return Grouping(_by_size(parts), len(first), capped)


def _check_method(method: str, similarity: float | None, least: int, model: PLDA | None) -> None:
    if method in ("hdbscan", "plda") and similarity is not None:
        raise ValueError(f'similarity is for the other methods; "{method}" has none, got {similarity:g}')
    if method not in ("hdbscan", "plda") and similarity is None:
        raise ValueError(
            f'similarity must be given for method "{method}": from which cosine on two items are neighbours'
        )
    if method != "hdbscan" and least != 2:
        raise ValueError(f'least is for method "hdbscan", got {least} with "{method}"')
    if method == "plda" and not isinstance(model, PLDA):
        raise ValueError('model must be given for method "plda": evaluation.fit_plda of labelled embeddings makes it')
    if method != "plda" and model is not None:
        raise ValueError(f'model is for method "plda", got one with "{method}"')


def _plda(embeddings: Tensor, model: PLDA, neighbours: int, budget: int, progress: Progress | None) -> Grouping:
    size, rows = len(embeddings), model.rows(unit_rows(embeddings))
    if size < 2:
        return Grouping(torch.zeros(size, dtype=torch.int64), 0, 0)
    near = torch.from_numpy(model.near(rows)).float()
    first, second, _, _ = _graph(near, -1.0, neighbours, budget, progress)
    return Grouping(_by_size(likelihood_linkage(rows, first, second, model)), len(first), 0)


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
    rows = unit_rows(embeddings)
    if size < 2:
        return torch.from_numpy(rows)
    rows = unit_rows(torch.from_numpy(rows - rows.mean(0)))
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
    return unit_rows(torch.from_numpy(moved))


def _graph(
    embeddings: Tensor, similarity: float, neighbours: int, budget: int, progress: Progress | None
) -> tuple[Ints, Ints, Floats, int]:
    """Edges, each once with the lower item first, their cosines, and the number of items that have more."""
    size = len(embeddings)
    listed = nearest(embeddings, k=min(neighbours, size - 1), budget=budget, progress=progress)
    near = (listed.similarity >= similarity - ROUNDING) & (listed.indices >= 0)
    capped = int(near[:, -1].sum()) if listed.indices.shape[1] < size - 1 else 0
    item, slot = near.nonzero(as_tuple=True)
    other, value = listed.indices[item, slot], listed.similarity[item, slot]
    keys = (torch.minimum(item, other) * size + torch.maximum(item, other)).cpu().numpy()
    keys, at = np.unique(keys, return_index=True)
    return keys // size, keys % size, value.cpu().numpy()[at], capped


def unit_rows(embeddings: Tensor) -> Floats:
    """Rows of length 1 in float64; a zero row stays zero, and has cosine 0 with everything."""
    rows = embeddings.detach().cpu().double().numpy().copy()
    scale = np.abs(rows).max(1, keepdims=True)
    rows /= np.where(scale > 0, scale, 1.0)
    length = np.sqrt(np.einsum("nd,nd->n", rows, rows))[:, None]
    rows /= np.where(length > 0, length, 1.0)
    return rows


def _hdbscan(embeddings: Tensor, least: int) -> Ints:
    try:
        from sklearn.cluster import HDBSCAN  # type: ignore[import-untyped]
    except ImportError:
        raise ModuleNotFoundError("method hdbscan needs scikit-learn 1.3: pip install 'nearkin[report]'") from None
    size = len(embeddings)
    if size <= least:
        return np.arange(size)
    found = HDBSCAN(min_cluster_size=least, copy=True).fit_predict(unit_rows(embeddings))
    return np.where(found < 0, size + np.arange(size), found).astype(np.int64)


def _by_size(parts: Ints) -> Tensor:
    """Groups numbered from 0 on, the largest first, of equal ones that of the first item."""
    _, at, label, counts = np.unique(parts, return_index=True, return_inverse=True, return_counts=True)
    place = np.empty(len(at), np.int64)
    place[np.lexsort((at, -counts))] = np.arange(len(at))
    return torch.from_numpy(place[label])
