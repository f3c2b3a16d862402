"""Retrieval metrics, from the positions of the positives of each query and nothing else.

The positives of a query are at positions r_1 < r_2 < … < r_R among all items it is compared with. The positions are
counted exactly: how many negatives are nearer than each positive, by the rule of `knn` (ties in the order of their
index, a query never finds itself). Every metric is a function of these numbers:

    recall@k      1 if r_1 <= k                     (a hit rate)
    precision@1   1 if r_1 = 1
    r_precision   #{j: r_j <= R} / R
    map@r         1/R sum_{j: r_j <= R} j / r_j     (Musgrave et al. 2020, arXiv:2003.08505, section 3)
    map           1/R sum_j j / r_j
    mrr           1 / r_1
    cmc@k         as recall@k: re-identification's name for it, read beside `groups`
    minp          R / r_R                           (Ye et al. 2020, arXiv:2001.04193, section 4)
    ndcg@k        sum_{j: r_j <= k} 1/log2(1 + r_j) / sum_{i <= min(k, R)} 1/log2(1 + i)
"""

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from nearkin.core import checks
from nearkin.core.relations import UNKNOWN, Labels, Relation
from nearkin.dist.group import ProcessGroup
from nearkin.evaluation.arrays import Array, Ids, Progress, Scores, takes_arrays
from nearkin.evaluation.retrieval import by_counting, by_sorting, knn
from nearkin.evaluation.retrieval.by_counting import BEYOND
from nearkin.evaluation.retrieval.exact import Space
from nearkin.evaluation.retrieval.k_reciprocal import Ranker
from nearkin.evaluation.retrieval.knn import Searcher
from nearkin.evaluation.retrieval.relevance import Relevance, check_groups, with_known_labels
from nearkin.evaluation.retrieval.rerank_settings import KReciprocal, Rerank, check_similarity, settings_of
from nearkin.evaluation.retrieval.reranked import space_for
from nearkin.evaluation.statistics import cluster_bootstrap

__all__ = ["AT_KS", "DEFAULT", "METRICS", "Retrieval", "per_query", "retrieval", "summary"]

METRICS = ("recall", "precision@1", "r_precision", "map@r", "map", "mrr", "ndcg", "cmc", "minp")
DEFAULT = ("recall", "precision@1", "r_precision", "map@r")
AT_KS = ("recall", "ndcg", "cmc")
KS = (1, 2, 4, 8)


class Retrieval(Scores[float]):
    """Metrics by name, with the counts "queries", "without_positives" and "unknown".

    without_positives: indices of the queries that have no positive to find.
    """

    without_positives: list[int]


@takes_arrays
def retrieval(
    embeddings: Array,
    labels: Ids,
    gallery: Array | None = None,
    gallery_labels: Ids | None = None,
    *,
    ks: Sequence[int] | None = None,
    metrics: Sequence[str] = DEFAULT,
    without_positives: str = "skip",
    similarity: str = "cosine",
    budget: int = knn.BUDGET,
    backend: str = "torch",
    progress: Progress | None = None,
    interval: bool = False,
    group: ProcessGroup | None = None,
    groups: Ids | None = None,
    gallery_groups: Ids | None = None,
    rerank: Rerank | str | None = None,
) -> Retrieval:
    """How well the nearest items match: {"recall@1", …, "precision@1", "r_precision", "map@r"}, means over queries.

    embeddings (Q, D) search the gallery (G, D), or one another without it; then no row finds itself.
    labels: class ids, where -1 is unknown and such an item is neither a query nor ranked; multi-label bool rows,
    positive if they share a label; or a `Relation` (Q, G), whose pairs in neither mask are not ranked for that query.

    groups (Q,), gallery_groups (G,): of the items (camera, burst, writer), ids or names; -1 shares its group with none.
    An item of the query's class and group is neither positive nor negative for it and is not ranked, as in
    re-identification. Without a gallery `groups` are those of both sides.

    metrics: of "recall", "cmc" and "ndcg" (at each of ks: 1, 2, 4 and 8 unless set), "precision@1", "r_precision",
    "map@r", "map", "mrr", "minp". The last three need the position of every positive and take longer where positives
    are far.
    without_positives: a query with nothing to find is left out of the means ("skip") or counts as 0 ("miss"); the
    result names these queries either way.
    similarity: "cosine", "dot", "euclidean". budget: bytes beyond the embeddings and the result. backend "faiss" lets
    faiss propose neighbours; no value depends on it, on the budget, the threads or the device.
    interval: also the 95 % interval of each metric over the choice of classes, as `.intervals[name]`, by
    `cluster_bootstrap.share_interval`; over the choice of queries where there are no classes: multi-label rows, a
    `Relation` without ids. (nan, nan) with fewer than 5 classes, as `.notes` then says; one-sided where the metric is 0
    or 1.
    group: a `dist.ProcessGroup` of processes that share the search. All of them call this with the same arguments, and
    all get the result, which is that of one process. Without it a process works alone, even under torchrun.
    rerank: `KReciprocal`, `AlphaQE` or `DBA`, or a name as "k-reciprocal:k1=20": the order after re-ranking is
    measured. It reads no label; items of unknown class take no part in it. Exact, as `evaluation.rerank` is.
    """
    checks.one_of("without_positives", without_positives, ("skip", "miss"))
    options: dict[str, Any] = {"ks": ks, "metrics": metrics, "similarity": similarity, "budget": budget}
    options |= {"backend": backend, "progress": progress, "group": group}
    options |= {"groups": groups, "gallery_groups": gallery_groups, "rerank": rerank}
    values = per_query(embeddings, labels, gallery, gallery_labels, **options)
    return summary(values, labels, without_positives, interval)


def summary(
    values: dict[str, Tensor], labels: Labels, without_positives: str = "skip", interval: bool = False
) -> Retrieval:
    """The result of `retrieval` from what `per_query` returns, which it takes apart."""
    positives = values.pop("positives")
    known, valid = positives != UNKNOWN, positives > 0
    counted = int((valid if without_positives == "skip" else known).sum())
    result = Retrieval()
    for name, value in values.items():
        result[name] = math.fsum(value[valid].tolist()) / counted if counted else math.nan
    result.without_positives = (known & ~valid).nonzero().flatten().tolist()
    result["queries"], result["without_positives"] = int(known.sum()), len(result.without_positives)
    result["unknown"] = int((~known).sum())
    if interval:
        classes = cluster_bootstrap.classes_of(labels, len(positives))
        for name, value in values.items():
            missed = value if without_positives == "skip" else torch.where(known & ~valid, 0.0, value)
            result.intervals[name] = cluster_bootstrap.share_interval(missed, classes)
        cluster_bootstrap.explain_missing(result, classes)
    return result


@takes_arrays
def per_query(
    embeddings: Array,
    labels: Ids,
    gallery: Array | None = None,
    gallery_labels: Ids | None = None,
    *,
    ks: Sequence[int] | None = None,
    metrics: Sequence[str] = DEFAULT,
    similarity: str = "cosine",
    budget: int = knn.BUDGET,
    backend: str = "torch",
    progress: Progress | None = None,
    group: ProcessGroup | None = None,
    groups: Ids | None = None,
    gallery_groups: Ids | None = None,
    rerank: Rerank | str | None = None,
) -> dict[str, Tensor]:
    """The metrics of `retrieval` for each query, (Q,) float64 on the CPU, NaN where there is nothing to find.

    "positives" (Q,) int64: how many positives each query has, -1 where its own label is unknown.
    """
    itself = gallery is embeddings
    gallery, item_labels = _checked(embeddings, labels, gallery, gallery_labels)
    if itself and gallery is None and gallery_groups is groups:
        gallery_groups = None
    check_groups(embeddings, labels, gallery, groups, gallery_groups)
    checks.one_of("backend", backend, knn.BACKENDS)
    for name in metrics:
        checks.one_of("metrics", name, METRICS)
    ks = _cut_offs(ks, metrics)
    method = _method(rerank, similarity, backend)
    group = None if group is None or group.size == 1 else group
    if group is not None:  # all processes have the same items
        tensors = {"labels": labels} if isinstance(labels, Tensor) else labels._asdict()
        tensors |= {"groups": groups, "gallery_groups": gallery_groups}
        group.agree(embeddings=embeddings, **tensors, gallery=gallery, gallery_labels=gallery_labels)
    sets, index = with_known_labels(embeddings, labels, gallery, item_labels, groups, gallery_groups)
    space = space_for(sets.queries, sets.gallery, similarity, budget, method, progress, group)
    space.blocks()  # refuses a budget that is too small
    relevance = Relevance(sets, space)
    limits = _limits(len(space.gallery), ks, metrics)
    most_positives = int(relevance.counts.max()) if len(relevance.counts) else 0
    if not isinstance(sets.labels, Relation):  # a relation may exclude the equal rows before one
        junk = 0 if relevance.junk is None or not len(index) else int(relevance.junk.max())  # equal rows not ranked
        space.drop_duplicates(max(*limits, most_positives) + junk)

    search: Searcher | Ranker | None = Searcher(space, backend) if backend != "torch" else None
    if isinstance(method, KReciprocal):
        search = Ranker(space, method, max(budget // 2, 1), progress, group)

    def parts(report: Progress | None) -> Iterator[by_counting.Positions]:
        if search is not None:
            return _from_lists(space, relevance, search, max(limits), report, group)
        if 64 * most_positives > len(space.gallery):
            return by_sorting.positions(space, relevance, max(limits), report, group)
        return by_counting.positions(space, relevance, limits, report, group)

    empty = torch.full((len(embeddings),), math.nan, dtype=torch.float64)
    values = {name: empty.clone() for name in _names(ks, metrics)}
    done: list[Tensor] = []
    with nullcontext(progress) if group is None else group.work("retrieval", progress, len(index)) as report:
        for rows, positions in parts(report):
            done.append(index[rows].cpu())
            for name, value in _metrics(positions.cpu(), relevance.counts[rows].cpu(), ks, metrics).items():
                values[name][done[-1]] = value
    if group is not None:
        _merge(values, torch.cat([index[:0].cpu(), *done]), group)
    values["positives"] = torch.full((len(embeddings),), UNKNOWN)
    values["positives"][index.cpu()] = relevance.counts.cpu()
    return values


def _merge(values: dict[str, Tensor], done: Tensor, group: ProcessGroup) -> None:
    """Adds the values of the other processes to those of this one, which has those of the queries `done`."""
    table = torch.stack([value[done] for value in values.values()], 1)  # (n, metrics)
    rows, table = group.rows(done), group.rows(table)
    for value, column in zip(values.values(), table.T, strict=True):
        value[rows] = column


_NAMES = {"references": "gallery", "reference_labels": "gallery_labels"}


def _checked(
    embeddings: Tensor, labels: Labels, gallery: Tensor | None, gallery_labels: Tensor | None
) -> tuple[Tensor | None, Labels | None]:
    """The checks of a batch with references, with the names of these arguments in the messages."""
    try:
        return checks.batch(embeddings, labels, gallery, gallery_labels)
    except (TypeError, ValueError) as error:
        sentence = re.sub(r"\b(reference_labels|references)\b", lambda word: _NAMES[word[0]], str(error))
        raise type(error)(sentence) from None


def _limits(size: int, ks: Sequence[int], metrics: Sequence[str]) -> by_counting.Limits:
    """Up to which positions these metrics need; those up to the number of positives are needed anyway."""
    deepest = max(ks, default=1)
    others = size if {"map", "minp"} & set(metrics) else deepest if "ndcg" in metrics else 1
    return by_counting.Limits(size if {"map", "mrr", "minp"} & set(metrics) else deepest, others)


def _from_lists(
    space: Space,
    relevance: Relevance,
    search: Searcher | Ranker,
    limit: int,
    progress: Progress | None,
    group: ProcessGroup | None,
) -> Iterator[by_counting.Positions]:
    """The same positions, read off lists of the first items."""
    size = max(relevance.size, 1)
    order = relevance.counts.argsort(stable=True)  # blocks of queries with about as many positives
    blocks = space.blocks(extra=relevance.list_bytes + relevance.mask_bytes)
    for block in blocks if group is None else blocks[group.rank :: group.size]:
        rows = order[block]
        left_out = relevance.left_out(rows)
        if isinstance(search, Searcher) and relevance.junk is None and left_out is not None and bool(left_out.any()):
            checks.impossible("backend", "faiss", "the relation leaves pairs out", ("torch",))
        items = relevance.positives(rows)
        junk = 0 if left_out is None else int(left_out.sum(1).max())
        positive = torch.zeros(len(rows), size + 1, dtype=torch.bool, device=rows.device)  # the last column: no item
        positive.scatter_(1, torch.where(items >= 0, items, size), True)[:, -1] = False
        nearest, _ = search(rows, min(max(limit, int(relevance.counts[rows].max())) + junk, size))
        hit = positive.gather(1, torch.where(nearest >= 0, nearest, size))
        ranked = torch.ones_like(hit) if left_out is None else ~left_out.gather(1, nearest.clamp(min=0))
        position = ranked.cumsum(1)
        yield by_counting.Positions(rows, torch.where(hit, position, BEYOND).sort(dim=1).values)
        if progress is not None:
            progress(block.stop, len(order))


def _cut_offs(ks: Sequence[int] | None, metrics: Sequence[str]) -> Sequence[int]:
    """The k at which to measure; refuses those at which nothing is."""
    measured = any(name in AT_KS for name in metrics)
    if ks is None:
        return KS if measured else ()
    for k in ks:
        checks.integer("ks", k, 1)
    if measured and not len(ks):
        raise ValueError("ks must name at least one k for recall, ndcg and cmc, got none")
    if len(ks) and not measured:
        checks.no_effect("ks", f"of the metrics only {', '.join(AT_KS)} have a k, got {', '.join(metrics) or 'none'}")
    return ks


def _method(rerank: Rerank | str | None, similarity: str, backend: str) -> Rerank | None:
    if rerank is None:
        return None
    method = settings_of(rerank)
    check_similarity(method, similarity)
    if backend != "torch":
        checks.impossible("backend", backend, "re-ranking searches by itself", ("torch",))
    return method


def _names(ks: Sequence[int], metrics: Sequence[str]) -> list[str]:
    return [name for m in metrics for name in ([f"{m}@{k}" for k in ks] if m in AT_KS else [m])]


def _metrics(positions: Tensor, counts: Tensor, ks: Sequence[int], metrics: Sequence[str]) -> dict[str, Tensor]:
    """Metrics, each (q,), from positions (q, m), ascending and BEYOND where there are no more, and counts (q,)."""
    valid, total = counts > 0, counts.double()
    order = torch.arange(1, positions.shape[1] + 1)
    share = torch.where(positions < BEYOND, order / positions.double(), 0.0)  # j / r_j
    within = positions <= counts[:, None]
    first = positions[:, 0]
    discount = _discounts(max(ks, default=1) if "ndcg" in metrics else 0)
    plain = {
        "precision@1": lambda: (first == 1).double(),
        "r_precision": lambda: within.sum(1) / total,
        "map@r": lambda: _sum(torch.where(within, share, 0.0)) / total,
        "map": lambda: _sum(share) / total,
        "mrr": lambda: 1 / first.double(),
        "minp": lambda: total / positions.gather(1, (counts - 1).clamp(min=0)[:, None]).squeeze(1).double(),
    }
    result: dict[str, Tensor] = {}
    for name in _names(ks, metrics):
        if name in plain:
            value = plain[name]()
        elif name.startswith(("recall@", "cmc@")):
            value = (first <= int(name.partition("@")[2])).double()
        else:
            k = int(name[5:])
            best = torch.where(order <= counts.clamp(max=k)[:, None], order, 0)
            value = _sum(discount[torch.where(positions <= k, positions, 0)]) / _sum(discount[best])
        result[name] = torch.where(valid, value, math.nan)
    return result


def _discounts(most: int) -> Tensor:
    """1/log2(1 + r) at index r, 0 at 0: a table, since the last digit of a vectorised log2 depends on its SIMD lane."""
    return torch.tensor([0.0, *(1 / math.log2(1 + r) for r in range(1, most + 1))], dtype=torch.float64)


def _sum(x: Tensor) -> Tensor:
    """Sums of rows, neighbour with neighbour: any number of zeros appended to a row leaves every digit as it is."""
    while x.shape[1] > 1:
        x = pad(x, (0, x.shape[1] % 2))
        x = x[:, ::2] + x[:, 1::2]
    return x.squeeze(1)
