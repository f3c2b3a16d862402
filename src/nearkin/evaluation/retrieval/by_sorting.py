"""The positions of `by_counting` where positives are a good part of the gallery: candidate negatives are sorted."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from nearkin.dist.group import ProcessGroup
from nearkin.evaluation.arrays import Progress
from nearkin.evaluation.retrieval import knn
from nearkin.evaluation.retrieval.by_counting import BEYOND, Positions
from nearkin.evaluation.retrieval.exact import CELL, LISTED, Space, slices
from nearkin.evaluation.retrieval.relevance import Relevance

__all__ = ["positions"]

_DOUBTS = 0.01  # decisions per cell from which on float64 proposes: a decision takes a hundred times as long as a cell
_PROBE = 64  # queries of the first block
_WORTH = 2  # times as many decisions as cells from which on every cell is scored


def positions(
    space: Space,
    relevance: Relevance,
    limit: int,
    progress: Progress | None = None,
    group: ProcessGroup | None = None,
) -> Iterator[Positions]:
    """Positions of the positives, for some queries at a time; those beyond the limit are only known to be beyond it.

    A group takes turns: each process yields some queries.
    """
    order = relevance.counts.argsort(stable=True)  # blocks of queries with about as many positives
    if group is not None:
        order = order[group.rank :: group.size]
    extra = relevance.list_bytes + relevance.mask_bytes
    space.blocks(extra)  # refuses a budget that is too small
    tiled, listed = (space.budget // 2 // (cell * relevance.size + extra) for cell in (CELL, LISTED))
    step = max(1, min(512, tiled), min(2048, listed))  # the larger the blocks the better, while all fits into lists
    first = min(_PROBE, step, len(order))  # a small block, which may show that float64 is needed
    for block in [slice(0, first), *(slice(first + b.start, first + b.stop) for b in slices(len(order) - first, step))]:
        rows = order[block]
        yield Positions(rows, _count(space, relevance, rows, max(limit, int(relevance.counts[rows].max()))))
        if progress is not None:
            progress(block.stop, len(order))


def _count(space: Space, relevance: Relevance, rows: Tensor, limit: int) -> Tensor:
    positive = space.column(relevance.positives(rows))  # those left out are beyond the limit
    real = positive >= 0
    if not bool(real.any()):
        return torch.full((len(rows), 1), BEYOND, device=rows.device)
    tile = knn.proposed_rows(space, rows)  # (q, G)
    left_out = relevance.left_out(rows)
    if left_out is not None:
        tile.masked_fill_(left_out if space.active is None else left_out[:, space.active], -torch.inf)
    proposed = tile.gather(1, positive.clamp(min=0)).masked_fill_(~real, torch.inf)
    row, slot = real.nonzero(as_tuple=True)
    tile[row, positive[row, slot]] = -torch.inf  # negatives remain
    doubt = 2 * space.error[rows, None]
    low = torch.maximum(knn.kth_floor(tile, limit), proposed.amin(1, keepdim=True))
    candidates = knn.entries_above(tile, low - 2.5 * doubt, space.budget)
    del tile
    if candidates is None:
        halves = [_count(space, relevance, half, limit) for half in rows.chunk(2)]
        width = max(half.shape[1] for half in halves)
        return torch.cat([pad(half, (0, width - half.shape[1]), value=BEYOND) for half in halves])
    values, order = candidates[0].neg_().sort(dim=1)
    cols = candidates[1].gather(1, order)
    nearer = torch.searchsorted(values, -(proposed + doubt))  # surely
    following = pad(values, (0, 1), value=torch.inf).gather(1, nearer)
    unsure = real & (following <= doubt - proposed) & (nearer < limit)
    perhaps = torch.searchsorted(values, doubt - proposed, right=True) if bool(unsure.any()) else nearer
    row, slot = unsure.nonzero(as_tuple=True)
    start, number = nearer[row, slot], (perhaps - nearer)[row, slot]
    doubts = int(number.sum())
    if space.dtype == torch.float32 and doubts > _DOUBTS * len(rows) * space.size:
        space.sharpen(relevance.list_bytes + relevance.mask_bytes)
        return _count(space, relevance, rows, limit)
    if doubts > _WORTH * (cols.numel() + positive.numel()):
        nearer = _score_all(space, rows, positive, real, cols)
    else:
        nearer[row, slot] += _decide(space, rows[row], positive[row, slot], cols, row, start, number)
    nearer = nearer.masked_fill_(~real, BEYOND).sort(dim=1).values  # as many negatives before the first, …
    return nearer + torch.arange(1, nearer.shape[1] + 1, device=rows.device)


def _score_all(space: Space, rows: Tensor, positive: Tensor, real: Tensor, cols: Tensor) -> Tensor:
    """How many of the negatives cols (q, w) are nearer than each positive (q, m), each scored exactly once.

    Where embeddings lie close together nearly everything is in doubt, and deciding pair by pair would score a negative
    as often as the query has positives.
    """
    every = torch.cat([positive, cols], 1)
    there = torch.cat([real, cols >= 0], 1)
    score = torch.full(every.shape, -torch.inf, dtype=torch.float64, device=rows.device)
    score[there] = space.exact(rows[:, None].expand_as(every)[there], space.items(every[there]))
    order = torch.where(there, every, space.size).argsort(dim=1, stable=True)  # by index, then by similarity: ties stay
    order = order.gather(1, score.gather(1, order).argsort(dim=1, descending=True, stable=True))
    negative = torch.cat([torch.zeros_like(real), cols >= 0], 1).gather(1, order)
    before = torch.empty_like(every).scatter_(1, order, negative.cumsum(1))
    return before[:, : positive.shape[1]].contiguous()


def _decide(
    space: Space, query: Tensor, positive: Tensor, cols: Tensor, row: Tensor, start: Tensor, number: Tensor
) -> Tensor:
    """For pairs (P,) of a query and a positive, how many of cols[row, start : start + number] are nearer."""
    result = torch.zeros_like(number)
    group = number.cumsum(0) // max(1, space.budget // 256)
    for part in torch.split(torch.arange(len(number), device=row.device), torch.bincount(group).tolist()):
        if not len(part):
            continue
        each = part.repeat_interleave(number[part])
        before = (number[part].cumsum(0) - number[part]).repeat_interleave(number[part])
        negative = cols[row[each], start[each] + torch.arange(len(each), device=row.device) - before]
        of_negative = space.exact(query[each], space.items(negative))
        of_positive = space.exact(query[part], space.items(positive[part])).repeat_interleave(number[part])
        nearer = (of_negative > of_positive) | ((of_negative == of_positive) & (negative < positive[each]))
        result += torch.bincount(each[nearer], minlength=len(number))
    return result
