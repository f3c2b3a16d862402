"""Re-ranking in a gallery: the nearest rows are a shortlist, and the new order is made among these."""

from collections.abc import Mapping

import numpy as np
import torch

from nearkin.core import checks
from nearkin.evaluation.retrieval.expansion import expanded_rows
from nearkin.evaluation.retrieval.rerank_settings import AlphaQE, KReciprocal, Rerank, has_settings, settings_of
from nearkin.evaluation.retrieval.reranked import rerank
from nearkin.gallery.mixed_search import Searched
from nearkin.gallery.schema import Filter, Floats, Row, unit, unpack
from nearkin.gallery.stores.matrix import similarities

__all__ = ["MOST", "method_for", "search"]

MOST = 100  # neighbours that a method may ask for
TIMES = 10  # rows of the shortlist per neighbour


def method_for(text: "Rerank | str", label_sizes: Mapping[int, int]) -> Rerank:
    """The method with its settings; without any they follow the median number of rows per label.

    label_sizes: how many labels have 1, 2, … rows. k1 is that median, `neighbours` a quarter of it, both at most 100.
    """
    method = settings_of(text)
    if not has_settings(text) and label_sizes:
        sizes = np.repeat(list(label_sizes), list(label_sizes.values()))
        median = float(np.median(sizes)) * (1.0 if isinstance(method, KReciprocal) else 0.25)
        method = type(method)(max(1, min(round(median), MOST)))
    checks.at_most(*_reach(method), MOST, "a search re-ranks a shortlist")
    return method


def search(
    store: Searched, query: Floats, k: int, filter: Filter | None, method: Rerank, dim: int
) -> list[tuple[Row, float]]:
    """The first k rows after re-ranking, with their cosines to the query, which need not descend.

    k-reciprocal and dba see the 10 nearest rows per neighbour that they ask for, k at least, and no others. alpha-qe
    searches the gallery twice.
    """
    _, neighbours = _reach(method)
    if isinstance(method, AlphaQE):
        near = store.nearest(query, neighbours, filter)
        if not near:
            return []
        rows, cosines = _vectors(near, dim), np.array([[cosine for _, cosine in near]])
        indices = torch.arange(len(near))[None]
        again = expanded_rows(torch.from_numpy(query)[None], rows, indices, torch.from_numpy(cosines), method.alpha)
        found = store.nearest(unit(again.numpy())[0], k, filter)
        cosines = similarities(_vectors(found, dim).numpy(), query)
        return [(row, float(cosine)) for (row, _), cosine in zip(found, cosines, strict=True)]
    near = store.nearest(query, max(k, TIMES * neighbours), filter)
    if not near:
        return []
    order = rerank(torch.from_numpy(query)[None], _vectors(near, dim), k=min(k, len(near)), method=method).indices
    return [near[int(place)] for place in order[0]]


def _reach(method: Rerank) -> tuple[str, int]:
    return ("k1", method.k1) if isinstance(method, KReciprocal) else ("neighbours", method.neighbours)


def _vectors(near: list[tuple[Row, float]], dim: int) -> torch.Tensor:
    return torch.from_numpy(unpack([row.vector for row, _ in near], dim))
