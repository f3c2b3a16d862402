"""Retrieval metrics, from the ranks of the kin of each query and nothing else.

A query's kin stand at ranks r_1 < r_2 < … < r_R among everything it is compared with. The ranks are counted exactly:
how many strangers are nearer than each of its kin, by the rule of `search` (equal similarities in the order of their
index, a query never meets itself). Every metric is a function of these numbers:

    recall@k      1 if r_1 <= k                     (a hit rate)
    precision@1   1 if r_1 = 1
    r_precision   #{j: r_j <= R} / R
    map@r         1/R sum_{j: r_j <= R} j / r_j     (Musgrave et al. 2020, arXiv:2003.08505, section 3)
    map           1/R sum_j j / r_j
    mrr           1 / r_1
    ndcg@k        sum_{j: r_j <= k} 1/log2(1 + r_j) / sum_{i <= min(k, R)} 1/log2(1 + i)
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from nearkin.core import checks, relations
from nearkin.core.relations import UNKNOWN, Labels, Relation
from nearkin.evaluation import search, uncertainty

METRICS = ("recall", "precision@1", "r_precision", "map@r", "map", "mrr", "ndcg")
DEFAULT = ("recall", "precision@1", "r_precision", "map@r")
_BEYOND = 2**40  # a rank nobody has


class Retrieval(dict[str, float]):
    """Metrics by name, with the counts "queries", "without_kin" and "unknown".

    without_kin: indices of the queries that have no kin to find. intervals: (low, high) of each metric, if asked for.
    """

    without_kin: list[int]
    intervals: dict[str, tuple[float, float]]


def retrieval(
    embeddings: Tensor,
    labels: Labels,
    gallery: Tensor | None = None,
    gallery_labels: Tensor | None = None,
    *,
    ks: Sequence[int] = (1, 2, 4, 8),
    metrics: Sequence[str] = DEFAULT,
    without_kin: str = "skip",
    similarity: str = "cosine",
    budget: int = search.BUDGET,
    backend: str = "torch",
    progress: search.Progress | None = None,
    interval: bool = False,
    seed: int = 0,
) -> Retrieval:
    """How well the nearest items are kin: {"recall@1", …, "precision@1", "r_precision", "map@r"}, means over queries.

    embeddings (Q, D) search the gallery (G, D), or one another without it, each left out of its own search by index.
    labels: class ids, where -1 is unknown: neither a query nor part of any ranking; multi-label bool rows, kin if they
    share a label; or a `Relation` (Q, G), whose pairs in neither mask are left out of that query's ranking.

    metrics: of "recall" and "ndcg" (at each of ks), "precision@1", "r_precision", "map@r", "map", "mrr". The last two
    need the rank of every kin however far, and take longer where kin are far. without_kin: a query that has nothing
    to find is left out of the means ("skip") or counts as 0 ("miss"); the result names these queries either way.
    similarity: "cosine", "dot", "euclidean". budget: bytes beyond the embeddings and a float32 copy of them. backend
    "faiss" lets faiss propose neighbours; no value depends on it, on the budget, the threads or the device.
    interval: also the 95 % interval of each metric, as `.intervals[name]`, from 1,000 resamples of the query classes by
    `uncertainty.bootstrap`; of the queries where there are no classes: multi-label rows, a `Relation` without ids.
    """
    checks.one_of("without_kin", without_kin, ("skip", "miss"))
    values = per_query(
        embeddings,
        labels,
        gallery,
        gallery_labels,
        ks=ks,
        metrics=metrics,
        similarity=similarity,
        budget=budget,
        backend=backend,
        progress=progress,
    )
    kin = values.pop("kin")
    known, some = kin != UNKNOWN, kin > 0
    counted = int((some if without_kin == "skip" else known).sum())
    result = Retrieval()
    for name, value in values.items():
        result[name] = math.fsum(value[some].tolist()) / counted if counted else math.nan
    result.without_kin = (known & ~some).nonzero().flatten().tolist()
    result["queries"], result["without_kin"] = int(known.sum()), len(result.without_kin)
    result["unknown"] = int((~known).sum())
    result.intervals = {}
    if interval:
        groups = uncertainty.classes_of(labels, len(kin))
        for name, value in values.items():
            missed = value if without_kin == "skip" else torch.where(known & ~some, 0.0, value)
            result.intervals[name] = uncertainty.bootstrap(missed, groups, seed=seed)
    return result


def per_query(
    embeddings: Tensor,
    labels: Labels,
    gallery: Tensor | None = None,
    gallery_labels: Tensor | None = None,
    *,
    ks: Sequence[int] = (1, 2, 4, 8),
    metrics: Sequence[str] = DEFAULT,
    similarity: str = "cosine",
    budget: int = search.BUDGET,
    backend: str = "torch",
    progress: search.Progress | None = None,
) -> dict[str, Tensor]:
    """The metrics of `retrieval` query by query, (Q,) float64 on the CPU, NaN where there is nothing to find.

    "kin" (Q,) int64: how many kin each query has, -1 where its own label is unknown.
    """
    gallery, others = _checked(embeddings, labels, gallery, gallery_labels)
    checks.one_of("backend", backend, search.BACKENDS)
    for name in metrics:
        checks.one_of("metrics", name, METRICS)
    for k in ks:
        checks.whole("ks", k, 1)
    asked, index = _known(embeddings, labels, gallery, others)
    space = search.Space(asked.queries, asked.gallery, similarity, budget)
    kinship = _Kinship(asked, space)
    searcher = search.Searcher(space, backend) if backend != "torch" else None
    nothing = torch.full((len(embeddings),), math.nan, dtype=torch.float64)
    found = {name: nothing.clone() for name in _names(ks, metrics)}
    order = kinship.number.argsort(stable=True)  # blocks of queries with about as many kin
    everything = bool({"map", "mrr"} & set(metrics))
    for block in space.blocks(extra=kinship.cost):
        rows = order[block]
        number = kinship.number[rows]
        limit = len(space.gallery) if everything else max(*ks, int(number.max()), 1)
        ranks = _count(space, kinship, rows, limit) if searcher is None else _read(searcher, kinship, rows, limit)
        for name, value in _metrics(ranks.cpu(), number.cpu(), ks, metrics).items():
            found[name][index[rows].cpu()] = value
        if progress is not None:
            progress(block.stop, len(order))
    found["kin"] = torch.full((len(embeddings),), UNKNOWN)
    found["kin"][index.cpu()] = kinship.number.cpu()
    return found


class _Asked(NamedTuple):
    queries: Tensor
    labels: Labels
    gallery: Tensor | None
    gallery_labels: Tensor | None


def _checked(
    embeddings: Tensor, labels: Labels, gallery: Tensor | None, gallery_labels: Tensor | None
) -> tuple[Tensor | None, Labels | None]:
    """The checks of a batch with references, under the names these arguments have here."""
    try:
        return checks.batch(embeddings, labels, gallery, gallery_labels)
    except (TypeError, ValueError) as error:
        sentence = str(error).replace("reference_labels", "gallery_labels").replace("references", "gallery")
        raise type(error)(sentence) from None


def _known(
    embeddings: Tensor, labels: Labels, gallery: Tensor | None, gallery_labels: Labels | None
) -> tuple[_Asked, Tensor]:
    """What remains without the items of unknown class, and the indices of the remaining queries."""
    everyone = torch.arange(len(embeddings), device=embeddings.device)
    assert gallery_labels is None or isinstance(gallery_labels, Tensor)
    if isinstance(labels, Tensor) and labels.dtype == torch.bool and gallery is not None and gallery_labels is None:
        labels = relations.explicit(labels)
    if not isinstance(labels, Tensor) or labels.dtype == torch.bool:
        return _Asked(embeddings, labels, gallery, gallery_labels), everyone
    if gallery is not None and gallery_labels is not None:
        there = gallery_labels != UNKNOWN
        if not bool(there.all()):
            gallery, gallery_labels = gallery[there], gallery_labels[there]
    here = labels != UNKNOWN
    if bool(here.all()):
        return _Asked(embeddings, labels, gallery, gallery_labels), everyone
    return _Asked(embeddings[here], labels[here], gallery, gallery_labels), everyone[here]


class _Kinship:
    """Which gallery items are kin to each query: number (Q,), and their columns for some queries at a time."""

    def __init__(self, asked: _Asked, space: search.Space) -> None:
        self.own, self.size, self.labels = space.own, len(space.gallery), asked.labels
        self.others = asked.labels if asked.gallery_labels is None else asked.gallery_labels
        if isinstance(self.labels, Tensor) and self.labels.dtype != torch.bool:
            assert isinstance(self.others, Tensor)
            classes, self.sorted = self.others.long().sort(stable=True)  # columns, class after class
            self.first = torch.searchsorted(classes, self.labels.long().contiguous())
            self.number = (
                torch.searchsorted(classes, self.labels.long().contiguous(), right=True) - self.first - int(self.own)
            )
            self.cost = 64 * (int(self.number.max()) + 1 if len(self.number) else 0)  # bytes a query
            return
        rows = torch.arange(len(space.queries), device=space.queries.device)
        parts = [self._masks(rows[block])[0].sum(1) for block in space.blocks()]
        self.number = torch.cat([rows.new_zeros(0), *parts])
        self.cost = 64 * (int(self.number.max()) if len(self.number) else 0) + 24 * self.size

    def columns(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """(q, m) columns of the kin, -1 where there are no more; and (q, G) which pairs are left out, if any are."""
        if isinstance(self.labels, Tensor) and self.labels.dtype != torch.bool:
            place = torch.arange(int(self.number[rows].max()) + int(self.own), device=rows.device)
            cols = self.sorted[(self.first[rows, None] + place).clamp_(max=max(self.size - 1, 0))]
            real = place < (self.number[rows, None] + int(self.own))
            if self.own:
                real = real & (cols != rows[:, None])
            return cols.masked_fill_(~real, -1), None
        kin, left_out = self._masks(rows)
        place = torch.arange(int(self.number[rows].max()), device=rows.device)
        cols = kin.to(torch.uint8).sort(dim=1, descending=True, stable=True).indices[:, : len(place)]
        return cols.masked_fill(place >= self.number[rows, None], -1), left_out

    def _masks(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        if isinstance(self.labels, Relation):
            kin, strangers = self.labels.positive[rows], self.labels.negative[rows]
            left_out: Tensor | None = ~(kin | strangers)
        else:
            assert isinstance(self.labels, Tensor) and isinstance(self.others, Tensor)
            kin, left_out = relations.multilabel(self.labels[rows], self.others).positive, None
        if self.own:
            kin.scatter_(1, rows[:, None], False)
        return kin, left_out


def _count(space: search.Space, kinship: _Kinship, rows: Tensor, limit: int) -> Tensor:
    """Ranks of the kin of some queries, (q, m) ascending; those beyond `limit` are only known to be beyond it."""
    kin, left_out = kinship.columns(rows)
    real = kin >= 0
    if not bool(real.any()):
        return torch.full((len(rows), 1), _BEYOND, device=rows.device)
    tile = space.tile(rows)  # (q, G)
    if left_out is not None:
        tile.masked_fill_(left_out, -torch.inf)
    proposed = tile.gather(1, kin.clamp(min=0)).masked_fill_(~real, torch.inf)
    row, slot = real.nonzero(as_tuple=True)
    tile[row, kin[row, slot]] = -torch.inf  # strangers remain
    error = space.error[rows, None]
    low = torch.maximum(search.kth_floor(tile, limit), proposed.amin(1, keepdim=True))
    found = search.above(tile, low - 5 * error, space.budget)
    del tile
    if found is None:
        halves = [_count(space, kinship, half, limit) for half in rows.chunk(2)]
        width = max(half.shape[1] for half in halves)
        return torch.cat([pad(half, (0, width - half.shape[1]), value=_BEYOND) for half in halves])
    values, cols = found
    values, order = values.neg_().sort(dim=1)
    cols = cols.gather(1, order)
    nearer = torch.searchsorted(values, -(proposed + 2 * error))  # surely
    perhaps = torch.searchsorted(values, -(proposed - 2 * error), right=True)
    unsure = real & (perhaps > nearer) & (nearer < limit)
    row, slot = unsure.nonzero(as_tuple=True)
    start, number = nearer[row, slot], (perhaps - nearer)[row, slot]
    nearer[row, slot] += _decide(space, rows[row], kin[row, slot], cols, row, start, number)
    nearer = nearer.masked_fill_(~real, _BEYOND).sort(dim=1).values  # as many strangers before the first kin, …
    return nearer + torch.arange(1, nearer.shape[1] + 1, device=rows.device)


def _decide(
    space: search.Space, query: Tensor, kin: Tensor, cols: Tensor, row: Tensor, start: Tensor, number: Tensor
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
        theirs, own = space.exact(query[each], stranger), space.exact(query[part], kin[part])
        own = own.repeat_interleave(number[part])
        nearer = (theirs > own) | ((theirs == own) & (stranger < kin[each]))
        result += torch.bincount(each[nearer], minlength=len(number))
    return result


def _read(searcher: search.Searcher, kinship: _Kinship, rows: Tensor, limit: int) -> Tensor:
    """The same ranks, read off a list of the `limit` nearest."""
    kin, left_out = kinship.columns(rows)
    if left_out is not None and bool(left_out.any()):
        checks.impossible("backend", "faiss", "the relation leaves pairs out", ("torch",))
    member = torch.zeros(len(rows), kinship.size + 1, dtype=torch.bool, device=rows.device)  # the last column: nobody
    member.scatter_(1, torch.where(kin >= 0, kin, kinship.size), True)[:, -1] = False
    nearest, _ = searcher(rows, min(limit, max(kinship.size, 1)))
    hit = member.gather(1, torch.where(nearest >= 0, nearest, kinship.size))
    place = torch.arange(1, hit.shape[1] + 1, device=rows.device)
    return torch.where(hit, place, _BEYOND).sort(dim=1).values


def _names(ks: Sequence[int], metrics: Sequence[str]) -> list[str]:
    return [name for m in metrics for name in ([f"{m}@{k}" for k in ks] if m in ("recall", "ndcg") else [m])]


def _metrics(ranks: Tensor, number: Tensor, ks: Sequence[int], metrics: Sequence[str]) -> dict[str, Tensor]:
    """Ranks (q, m) ascending, beyond everything where there are no more, and how many kin (q,): metrics, each (q,)."""
    some, kin = number > 0, number.double()
    places = torch.arange(1, ranks.shape[1] + 1)
    share = torch.where(ranks < _BEYOND, places / ranks.double(), 0.0)  # j / r_j
    within = ranks <= number[:, None]
    first = ranks[:, 0]
    discount = _discounts(max(ks, default=1) if "ndcg" in metrics else 0)
    plain = {
        "precision@1": lambda: (first == 1).double(),
        "r_precision": lambda: within.sum(1) / kin,
        "map@r": lambda: _sum(torch.where(within, share, 0.0)) / kin,
        "map": lambda: _sum(share) / kin,
        "mrr": lambda: 1 / first.double(),
    }
    result: dict[str, Tensor] = {}
    for name in _names(ks, metrics):
        if name in plain:
            value = plain[name]()
        elif name.startswith("recall@"):
            value = (first <= int(name[7:])).double()
        else:
            k = int(name[5:])
            best = torch.where(places <= number.clamp(max=k)[:, None], places, 0)
            value = _sum(discount[torch.where(ranks <= k, ranks, 0)]) / _sum(discount[best])
        result[name] = torch.where(some, value, math.nan)
    return result


def _discounts(most: int) -> Tensor:
    """1/log2(1 + r) at index r, 0 at 0: a table, since the last digit of a vectorised logarithm depends on its lane."""
    return torch.tensor([0.0, *(1 / math.log2(1 + r) for r in range(1, most + 1))], dtype=torch.float64)


def _sum(x: Tensor) -> Tensor:
    """Sums of rows, neighbour with neighbour: zeros behind a row, as many as there are, leave every digit in place."""
    while x.shape[1] > 1:
        x = pad(x, (0, x.shape[1] % 2))
        x = x[:, ::2] + x[:, 1::2]
    return x.squeeze(1)
