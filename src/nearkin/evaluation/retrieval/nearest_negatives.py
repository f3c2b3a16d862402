"""The nearest items of other classes, exactly: the search of `knn`, in which items of a query's class take no part."""

import torch
from torch import Tensor

from nearkin.core import checks
from nearkin.dist.group import ProcessGroup
from nearkin.evaluation.arrays import Array, Ids, Progress, takes_arrays
from nearkin.evaluation.retrieval.exact import Space
from nearkin.evaluation.retrieval.knn import BUDGET, Neighbours, cosines, search_all

__all__ = ["nearest_negatives"]


@takes_arrays
def nearest_negatives(
    embeddings: Array,
    labels: Ids,
    *,
    k: int,
    similarity: str = "cosine",
    budget: int = BUDGET,
    progress: Progress | None = None,
    group: ProcessGroup | None = None,
) -> Neighbours:
    """The k nearest items of other classes of each item, exactly, as `Neighbours(indices, similarity)`, (N, k) each.

        lists = evaluation.nearest_negatives(embeddings, labels, k=32).indices
        samplers.HardNegatives(labels, neighbours=32).refresh(embeddings, lists)

    embeddings (N, D), labels (N,): class ids; -1 is unknown, never found, and finds nothing. Exact, with ties, memory
    and `similarity` as in `nearest`: -1 with similarity -inf where there are fewer than k. progress(done, total) counts
    items. group: processes that share the items, all of which call this with the same arguments and get all rows.
    """
    checks.rows("embeddings", embeddings)
    checks.class_ids("labels", labels, embeddings)
    checks.integer("k", k, 1)
    known = (labels >= 0).nonzero().flatten()
    rows = embeddings if len(known) == len(labels) else embeddings[known]
    if group is not None and group.size > 1:
        group.agree(embeddings=embeddings, labels=labels)
    indices, values = _search(rows, labels[known], k, similarity, budget, progress, group)
    if len(known) == len(labels):
        return Neighbours(indices, values)
    everything = torch.full((len(labels), k), -1, device=indices.device)
    scores = torch.full((len(labels), k), -torch.inf, dtype=torch.float64, device=indices.device)
    everything[known] = torch.where(indices < 0, indices, known[indices.clamp(min=0)]) if len(known) else indices
    scores[known] = values
    return Neighbours(everything, scores)


def _search(
    rows: Tensor,
    labels: Tensor,
    k: int,
    similarity: str,
    budget: int,
    progress: Progress | None,
    group: ProcessGroup | None,
) -> tuple[Tensor, Tensor]:
    """(N, k) each, of items whose classes are all known."""
    space = Space(rows, None, similarity, budget)
    space.labels = labels
    if len(rows):  # of equal rows as many may be of the query's own class as the class has items
        space.drop_duplicates(k + int(torch.unique(labels, return_counts=True)[1].max()))
    found, values = search_all(space, k, progress, group, "mining")
    return found, cosines(found, values) if similarity == "cosine" else values
