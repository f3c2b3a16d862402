"""Retrieval after re-ranking: which rows search which, and who finds the first items of a query."""

import torch

from nearkin.core import checks
from nearkin.dist.group import ProcessGroup
from nearkin.evaluation.arrays import Array, Progress, takes_arrays
from nearkin.evaluation.retrieval import expansion, knn
from nearkin.evaluation.retrieval.exact import Space
from nearkin.evaluation.retrieval.k_reciprocal import Ranker
from nearkin.evaluation.retrieval.knn import Neighbours
from nearkin.evaluation.retrieval.rerank_settings import (
    DBA,
    AlphaQE,
    KReciprocal,
    Rerank,
    check_similarity,
    settings_of,
)

__all__ = ["rerank", "space_for"]


@takes_arrays
def rerank(
    queries: Array,
    gallery: Array | None = None,
    *,
    k: int,
    method: "Rerank | str" = "k-reciprocal",
    similarity: str = "cosine",
    budget: int = knn.BUDGET,
    progress: Progress | None = None,
) -> Neighbours:
    """The first k gallery items of each query after re-ranking, as `Neighbours(indices, similarity)`, (Q, k) each.

    queries, gallery, similarity, budget: as in `nearest`; without a gallery the queries search one another, and no row
    finds itself. method: `KReciprocal`, `AlphaQE` or `DBA` with their settings, or a name as "k-reciprocal" or
    "k-reciprocal:k1=10". The similarity is -d* of k-reciprocal re-ranking, or the cosine of the expanded rows. With
    "k-reciprocal" all queries of the call are neighbours too, as in its authors' code, though they are not found.
    """
    checks.rows("queries", queries)
    checks.integer("k", k, 1)
    if gallery is not None:
        checks.rows("gallery", gallery)
        checks.same_device("gallery", gallery, queries, "queries")
        checks.dimensions("gallery", gallery, queries.shape[1], "queries have")
    settings = settings_of(method)
    check_similarity(settings, similarity)
    space = space_for(queries, gallery, similarity, budget, settings, progress)
    space.drop_duplicates(k)
    if isinstance(settings, KReciprocal):
        ranker = Ranker(space, settings, budget // 2, progress)
        indices, distances = knn.search_all(space, k, search=ranker)
        return Neighbours(indices, -distances)
    indices, values = knn.search_all(space, k)
    return Neighbours(indices, knn.cosines(indices, values))


def space_for(
    queries: torch.Tensor,
    gallery: torch.Tensor | None,
    similarity: str,
    budget: int,
    settings: Rerank | None,
    progress: Progress | None = None,
    group: ProcessGroup | None = None,
) -> Space:
    """The rows that search and are searched: with expanded queries, an augmented gallery, or as they are.

    k-reciprocal re-ranking has half of the budget for itself.
    """
    if isinstance(settings, KReciprocal):
        return Space(queries, gallery, similarity, max(budget // 2, 1))
    if isinstance(settings, AlphaQE):
        rows = expansion.expanded(queries, gallery, settings, budget, progress, group)
        return Space(
            rows, _typed(queries if gallery is None else gallery, rows), similarity, budget, own=gallery is None
        )
    if isinstance(settings, DBA):
        rows = expansion.expanded(queries if gallery is None else gallery, None, settings, budget, progress, group)
        return Space(_typed(queries, rows), rows, similarity, budget, own=gallery is None)
    return Space(queries, gallery, similarity, budget)


def _typed(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return rows.detach().to(like.dtype)
