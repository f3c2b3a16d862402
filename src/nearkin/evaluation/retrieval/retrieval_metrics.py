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
import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.functional import pad

from nearkin.core import checks
from nearkin.core.relations import UNKNOWN, Labels, Relation
from nearkin.dist.group import ProcessGroup
from nearkin.evaluation.arrays import Array, Ids, takes_arrays
from nearkin.evaluation.retrieval import by_counting, by_sorting, knn
from nearkin.evaluation.retrieval.by_counting import BEYOND
from nearkin.evaluation.retrieval.exact import Space
from nearkin.evaluation.retrieval.relevance import Kinship, known
from nearkin.evaluation.statistics import cluster_bootstrap

METRICS = ("recall", "precision@1", "r_precision", "map@r", "map", "mrr", "ndcg")
DEFAULT = ("recall", "precision@1", "r_precision", "map@r")


class Retrieval(dict[str, float]):
    """Metrics by name, with the counts "queries", "without_positives" and "unknown".

    without_positives: indices of the queries that have no kin to find. intervals: (low, high) of each metric, if asked.
    """

    without_positives: list[int]
    intervals: dict[str, tuple[float, float]]


@takes_arrays
def retrieval(
    embeddings: Array,
    labels: Ids,
    gallery: Array | None = None,
    gallery_labels: Ids | None = None,
    *,
    ks: Sequence[int] = (1, 2, 4, 8),
    metrics: Sequence[str] = DEFAULT,
    without_positives: str = "skip",
    similarity: str = "cosine",
    budget: int = knn.BUDGET,
    backend: str = "torch",
    progress: knn.Progress | None = None,
    interval: bool = False,
    group: ProcessGroup | None = None,
) -> Retrieval:
    """How well the nearest items are kin: {"recall@1", …, "precision@1", "r_precision", "map@r"}, means over queries.

    embeddings (Q, D) search the gallery (G, D), or one another without it, each left out of its own search by index.
    labels: class ids, where -1 is unknown: neither a query nor part of any ranking; multi-label bool rows, kin if they
    share a label; or a `Relation` (Q, G), whose pairs in neither mask are left out of that query's ranking.

    metrics: of "recall" and "ndcg" (at each of ks), "precision@1", "r_precision", "map@r", "map", "mrr". The last two
    need the rank of every kin however far, and take longer where kin are far. without_positives: a query with nothing
    to find is left out of the means ("skip") or counts as 0 ("miss"); the result names these queries either way.
    similarity: "cosine", "dot", "euclidean". budget: bytes beyond the embeddings and what is returned. backend "faiss"
    lets faiss propose neighbours; no value depends on it, on the budget, the threads or the device.
    interval: also the 95 % interval of each metric over the choice of classes, as `.intervals[name]`, by
    `uncertainty.share_interval`; over the choice of queries where there are no classes: multi-label rows, a `Relation`
    without ids. (nan, nan) with fewer than 5 classes; one-sided where the metric is 0 or 1.
    group: a `dist.ProcessGroup` of processes that share the search; all of them call this with the same arguments, and
    all get the result, which is that of one process. Without it a process works alone, whatever world it is in.
    """
    checks.one_of("without_positives", without_positives, ("skip", "miss"))
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
        group=group,
    )
    kin = values.pop("kin")
    known, some = kin != UNKNOWN, kin > 0
    counted = int((some if without_positives == "skip" else known).sum())
    result = Retrieval()
    for name, value in values.items():
        result[name] = math.fsum(value[some].tolist()) / counted if counted else math.nan
    result.without_positives = (known & ~some).nonzero().flatten().tolist()
    result["queries"], result["without_positives"] = int(known.sum()), len(result.without_positives)
    result["unknown"] = int((~known).sum())
    result.intervals = {}
    if interval:
        groups = cluster_bootstrap.classes_of(labels, len(kin))
        for name, value in values.items():
            missed = value if without_positives == "skip" else torch.where(known & ~some, 0.0, value)
            result.intervals[name] = cluster_bootstrap.share_interval(missed, groups)
    return result


@takes_arrays
def per_query(
    embeddings: Array,
    labels: Ids,
    gallery: Array | None = None,
    gallery_labels: Ids | None = None,
    *,
    ks: Sequence[int] = (1, 2, 4, 8),
    metrics: Sequence[str] = DEFAULT,
    similarity: str = "cosine",
    budget: int = knn.BUDGET,
    backend: str = "torch",
    progress: knn.Progress | None = None,
    group: ProcessGroup | None = None,
) -> dict[str, Tensor]:
    """The metrics of `retrieval` query by query, (Q,) float64 on the CPU, NaN where there is nothing to find.

    "kin" (Q,) int64: how many kin each query has, -1 where its own label is unknown.
    """
    gallery, others = _checked(embeddings, labels, gallery, gallery_labels)
    checks.one_of("backend", backend, knn.BACKENDS)
    for name in metrics:
        checks.one_of("metrics", name, METRICS)
    for k in ks:
        checks.integer("ks", k, 1)
    team = _team(group, embeddings, labels, gallery, gallery_labels)
    asked, index = known(embeddings, labels, gallery, others)
    space = Space(asked.queries, asked.gallery, similarity, budget)
    space.blocks()  # refuses a budget that is too small
    kinship = Kinship(asked, space)
    limits = _limits(len(space.gallery), ks, metrics)
    most_kin = int(kinship.number.max()) if len(kinship.number) else 0
    if not isinstance(asked.labels, Relation):  # which may leave out the equal rows before one
        space.leave_crowds(max(*limits, most_kin))

    def answers(told: knn.Progress | None) -> Iterator[by_counting.Ranked]:
        if backend != "torch":
            return _read(space, kinship, backend, max(limits), told, team)
        if 64 * most_kin > len(space.gallery):
            return by_sorting.ranks(space, kinship, max(limits), told, team)
        return by_counting.ranks(space, kinship, limits, told, team)

    nothing = torch.full((len(embeddings),), math.nan, dtype=torch.float64)
    found = {name: nothing.clone() for name in _names(ks, metrics)}
    done: list[Tensor] = []
    with nullcontext(progress) if team is None else team.work("retrieval", progress, len(index)) as told:
        for rows, places in answers(told):
            done.append(index[rows].cpu())
            for name, value in _metrics(places.cpu(), kinship.number[rows].cpu(), ks, metrics).items():
                found[name][done[-1]] = value
    if team is not None:
        _merge(found, torch.cat([index[:0].cpu(), *done]), team)
    found["kin"] = torch.full((len(embeddings),), UNKNOWN)
    found["kin"][index.cpu()] = kinship.number.cpu()
    return found


def _team(
    group: ProcessGroup | None,
    embeddings: Tensor,
    labels: Labels,
    gallery: Tensor | None,
    gallery_labels: Tensor | None,
) -> ProcessGroup | None:
    """Those who share the work, if there are any; all of them have the same items."""
    if group is None or group.size == 1:
        return None
    both = {"labels": labels} if isinstance(labels, Tensor) else labels._asdict()
    group.agree(embeddings=embeddings, **both, gallery=gallery, gallery_labels=gallery_labels)
    return group


def _merge(found: dict[str, Tensor], done: Tensor, group: ProcessGroup) -> None:
    """What the others found of their queries is written beside what this rank found of its own, `done`."""
    values = torch.stack([value[done] for value in found.values()], 1)  # (n, metrics)
    rows, values = group.rows(done), group.rows(values)
    for value, column in zip(found.values(), values.T, strict=True):
        value[rows] = column


_NAMES = {"references": "gallery", "reference_labels": "gallery_labels"}


def _checked(
    embeddings: Tensor, labels: Labels, gallery: Tensor | None, gallery_labels: Tensor | None
) -> tuple[Tensor | None, Labels | None]:
    """The checks of a batch with references, under the names these arguments have here."""
    try:
        return checks.batch(embeddings, labels, gallery, gallery_labels)
    except (TypeError, ValueError) as error:
        sentence = re.sub(r"\b(reference_labels|references)\b", lambda word: _NAMES[word[0]], str(error))
        raise type(error)(sentence) from None


def _limits(size: int, ks: Sequence[int], metrics: Sequence[str]) -> by_counting.Limits:
    """How far ranks matter to these metrics, which need them up to the number of kin anyway."""
    if {"map", "mrr"} & set(metrics):
        return by_counting.Limits(size, size if "map" in metrics else _deepest("ndcg", ks, metrics))
    return by_counting.Limits(max(ks, default=1), _deepest("ndcg", ks, metrics))


def _deepest(metric: str, ks: Sequence[int], metrics: Sequence[str]) -> int:
    return max(ks, default=1) if metric in metrics else 1


def _read(
    space: Space, kinship: Kinship, backend: str, limit: int, progress: knn.Progress | None, group: ProcessGroup | None
) -> Iterator[by_counting.Ranked]:
    """The same ranks, read off lists of nearest items."""
    searcher, size = knn.Searcher(space, backend), max(kinship.size, 1)
    order = kinship.number.argsort(stable=True)  # blocks of queries with about as many kin
    blocks = space.blocks(extra=kinship.cost + kinship.masked)
    for block in blocks if group is None else blocks[group.rank :: group.size]:
        rows = order[block]
        left_out = kinship.left_out(rows)
        if left_out is not None and bool(left_out.any()):
            checks.impossible("backend", backend, "the relation leaves pairs out", ("torch",))
        kin = kinship.items(rows)
        member = torch.zeros(len(rows), size + 1, dtype=torch.bool, device=rows.device)  # the last column: nobody
        member.scatter_(1, torch.where(kin >= 0, kin, size), True)[:, -1] = False
        nearest, _ = searcher(rows, min(max(limit, int(kinship.number[rows].max())), size))
        hit = member.gather(1, torch.where(nearest >= 0, nearest, size))
        place = torch.arange(1, hit.shape[1] + 1, device=rows.device)
        yield by_counting.Ranked(rows, torch.where(hit, place, BEYOND).sort(dim=1).values)
        if progress is not None:
            progress(block.stop, len(order))


def _names(ks: Sequence[int], metrics: Sequence[str]) -> list[str]:
    return [name for m in metrics for name in ([f"{m}@{k}" for k in ks] if m in ("recall", "ndcg") else [m])]


def _metrics(ranks: Tensor, number: Tensor, ks: Sequence[int], metrics: Sequence[str]) -> dict[str, Tensor]:
    """Ranks (q, m) ascending, beyond everything where there are no more, and how many kin (q,): metrics, each (q,)."""
    some, kin = number > 0, number.double()
    places = torch.arange(1, ranks.shape[1] + 1)
    share = torch.where(ranks < BEYOND, places / ranks.double(), 0.0)  # j / r_j
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
