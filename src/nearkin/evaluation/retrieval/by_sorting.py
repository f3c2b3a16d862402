"""The ranks of `counting` where a query's kin are a good part of the gallery: the strangers among them are sorted."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from nearkin.dist.group import ProcessGroup
from nearkin.evaluation.retrieval import knn
from nearkin.evaluation.retrieval.by_counting import BEYOND, Ranked
from nearkin.evaluation.retrieval.exact import Space, slices
from nearkin.evaluation.retrieval.relevance import Kinship

_WORTH = 2  # times as many decisions as cells from which on every cell is scored


def ranks(
    space: Space,
    kinship: Kinship,
    limit: int,
    progress: Callable[[int, int], None] | None = None,
    group: ProcessGroup | None = None,
) -> Iterator[Ranked]:
    """Ranks of the kin, for some queries at a time; those beyond the limit are only known to be beyond it.

    A team takes turns: each of it answers for some queries.
    """
    order = kinship.number.argsort(stable=True)  # blocks of queries with about as many kin
    if group is not None:
        order = order[group.rank :: group.size]
    extra = kinship.cost + kinship.masked
    space.blocks(extra)  # refuses a budget that is too small
    step = max(1, min(512, space.budget // 2 // (16 * kinship.size + extra)))
    for block in slices(len(order), step):
        rows = order[block]
        yield Ranked(rows, _count(space, kinship, rows, max(limit, int(kinship.number[rows].max()))))
        if progress is not None:
            progress(block.stop, len(order))


def _count(space: Space, kinship: Kinship, rows: Tensor, limit: int) -> Tensor:
    kin = space.column(kinship.items(rows))  # those left out stand beyond the limit
    real = kin >= 0
    if not bool(real.any()):
        return torch.full((len(rows), 1), BEYOND, device=rows.device)
    tile = knn.whole_rows(space, rows)  # (q, G)
    left_out = kinship.left_out(rows)
    if left_out is not None:
        tile.masked_fill_(left_out, -torch.inf)
    proposed = tile.gather(1, kin.clamp(min=0)).masked_fill_(~real, torch.inf)
    row, slot = real.nonzero(as_tuple=True)
    tile[row, kin[row, slot]] = -torch.inf  # strangers remain
    doubt = 2 * space.error[rows, None]
    low = torch.maximum(knn.kth_floor(tile, limit), proposed.amin(1, keepdim=True))
    found = knn.above(tile, low - 2.5 * doubt, space.budget)
    del tile
    if found is None:
        halves = [_count(space, kinship, half, limit) for half in rows.chunk(2)]
        width = max(half.shape[1] for half in halves)
        return torch.cat([pad(half, (0, width - half.shape[1]), value=BEYOND) for half in halves])
    values, order = found[0].neg_().sort(dim=1)
    cols = found[1].gather(1, order)
    nearer = torch.searchsorted(values, -(proposed + doubt))  # surely
    perhaps = torch.searchsorted(values, -(proposed - doubt), right=True)
    unsure = real & (perhaps > nearer) & (nearer < limit)
    row, slot = unsure.nonzero(as_tuple=True)
    start, number = nearer[row, slot], (perhaps - nearer)[row, slot]
    if int(number.sum()) > _WORTH * (cols.numel() + kin.numel()):
        nearer = _all_scored(space, rows, kin, real, cols)
    else:
        nearer[row, slot] += _decide(space, rows[row], kin[row, slot], cols, row, start, number)
    nearer = nearer.masked_fill_(~real, BEYOND).sort(dim=1).values  # as many strangers before the first kin, …
    return nearer + torch.arange(1, nearer.shape[1] + 1, device=rows.device)


def _all_scored(space: Space, rows: Tensor, kin: Tensor, real: Tensor, cols: Tensor) -> Tensor:
    """How many of the strangers cols (q, w) are nearer than each kin (q, m), every one scored exactly, once.

    Where embeddings lie close together nearly everything is in doubt, and deciding kin by kin would score a stranger
    as often as the query has kin.
    """
    every = torch.cat([kin, cols], 1)
    there = torch.cat([real, cols >= 0], 1)
    score = torch.full(every.shape, -torch.inf, dtype=torch.float64, device=rows.device)
    score[there] = space.exact(rows[:, None].expand_as(every)[there], space.items(every[there]))
    order = torch.where(there, every, space.size).argsort(dim=1, stable=True)  # by index, then by similarity: ties stay
    order = order.gather(1, score.gather(1, order).argsort(dim=1, descending=True, stable=True))
    stranger = torch.cat([torch.zeros_like(real), cols >= 0], 1).gather(1, order)
    before = torch.empty_like(every).scatter_(1, order, stranger.cumsum(1))
    return before[:, : kin.shape[1]].contiguous()


def _decide(
    space: Space, query: Tensor, kin: Tensor, cols: Tensor, row: Tensor, start: Tensor, number: Tensor
) -> Tensor:
    """For pairs (P,) of a query and a kin, how many of the strangers cols[row, start : start + number] are nearer."""
    result = torch.zeros_like(number)
    group = number.cumsum(0) // max(1, space.budget // 256)
    for part in torch.split(torch.arange(len(number), device=row.device), torch.bincount(group).tolist()):
        if not len(part):
            continue
        each = part.repeat_interleave(number[part])
        before = (number[part].cumsum(0) - number[part]).repeat_interleave(number[part])
        stranger = cols[row[each], start[each] + torch.arange(len(each), device=row.device) - before]
        theirs = space.exact(query[each], space.items(stranger))
        own = space.exact(query[part], space.items(kin[part])).repeat_interleave(number[part])
        nearer = (theirs > own) | ((theirs == own) & (stranger < kin[each]))
        result += torch.bincount(each[nearer], minlength=len(number))
    return result
