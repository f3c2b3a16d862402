"""Rows with their neighbours added: α query expansion and database-side augmentation, in bounded memory."""

import numpy as np
import torch
from torch import Tensor

from nearkin.dist.group import ProcessGroup
from nearkin.evaluation.arrays import Progress
from nearkin.evaluation.retrieval import knn
from nearkin.evaluation.retrieval.exact import Space, slices
from nearkin.evaluation.retrieval.rerank_settings import DBA, AlphaQE

__all__ = ["expanded", "expanded_rows"]


def expanded(
    queries: Tensor,
    gallery: Tensor | None,
    settings: AlphaQE | DBA,
    budget: int,
    progress: Progress | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """(Q, D) x + Σ_j max(cos(x, y_j), 0)^α y_j over the nearest gallery items j of each query x, of unit rows.

    Without a gallery the queries are one another's. In the type of the queries, or float32 where that is shorter;
    summed in float64, nearest last, in a fixed order.
    """
    space = Space(queries, gallery, "cosine", budget)
    space.drop_duplicates(settings.neighbours)
    indices, values = knn.search_all(space, settings.neighbours, progress, group, "neighbours")
    return expanded_rows(space.queries, space.gallery, indices, knn.cosines(indices, values), settings.alpha, budget)


def expanded_rows(
    queries: Tensor, gallery: Tensor, indices: Tensor, cosines: Tensor, alpha: float, budget: int = knn.BUDGET
) -> Tensor:
    """The sum for neighbours (Q, n) that are known, with their cosines; an index of -1 adds nothing."""
    base = np.maximum(cosines.cpu().numpy(), 0.0)
    weight = torch.from_numpy(np.power(base, alpha) * (indices.cpu().numpy() >= 0)).to(queries.device)
    dtype = queries.dtype if queries.dtype in (torch.float32, torch.float64) else torch.float32
    result = torch.empty(queries.shape, dtype=dtype, device=queries.device)
    for block in slices(len(queries), max(1, min(4096, budget // (64 * max(queries.shape[1], 1))))):
        total = torch.zeros_like(queries[block], dtype=torch.float64)
        for slot in reversed(range(indices.shape[1])):
            total += weight[block, slot, None] * _unit(gallery[indices[block, slot].clamp(min=0)])
        result[block] = _unit(total + _unit(queries[block]))
    return result


def _unit(rows: Tensor) -> Tensor:
    """Rows of length 1 in float64; a zero row stays."""
    wide = rows.double()
    length = wide.square().sum(1, keepdim=True).sqrt()
    return wide / torch.where(length > 0, length, 1.0)
