"""Graded relevance: how well the order of the embeddings follows real-valued labels."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from nearkin.core import checks, distances
from nearkin.dist.group import ProcessGroup
from nearkin.evaluation.arrays import Array, Ids, takes_arrays
from nearkin.evaluation.retrieval.knn import BUDGET
from nearkin.evaluation.statistics.cluster_bootstrap import Scores, bootstrap, share_interval

DISTANCES = ("euclidean", "cosine")


@takes_arrays
def graded(
    embeddings: Array,
    targets: Array,
    ks: Sequence[int] = (1, 5, 10),
    *,
    gallery: Array | None = None,
    gallery_targets: Array | None = None,
    distance: str = "euclidean",
    budget: int = BUDGET,
    interval: bool = False,
    classes: Ids | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
    group: ProcessGroup | None = None,
) -> Scores:
    """Rankings by embedding distance, judged by label distance; means over queries.

    embeddings (N, D), targets (N,) or (N, K); label distances d are Euclidean. Without a gallery every item is asked
    against all others; with `gallery` (R, D) and `gallery_targets` against those. `distance`: "euclidean" of the rows
    as they are, as log-ratio training leaves them, or "cosine". Ties in the ranking go to the lowest index.

    "ndcg@k"                 sum over ranks i <= k of 1/(1 + d_i) / log2(i + 1), divided by the same sum of the best
                             order (Kim et al. 2019, arXiv:1904.09626, section 5: gain 2^(-log2(d + 1)))
    "label_distance@k"       mean d of the nearest k; "best_label_distance@k" the least it can be
    "spearman"               rank correlation of embedding distances with label distances over all items of the
                             gallery, ties at their mean rank; a query at one distance from everything counts 0
    "spearman_skipped"       how many queries have one label distance to everything; they say nothing and do not count
                             (NaN where that is all of them)
    `interval` adds 95 % intervals by `bootstrap` as `.intervals`: over `classes` (N,) of the queries where these are
    given, -1 not counting; else over queries, which is too narrow where these come in groups.
    progress(done, of): queries. Where k is larger than the gallery, the whole of it is taken. Everything in float64,
    exactly, in tiles of queries within `budget` bytes. ranks: who shares the queries, as in `retrieval`.
    """
    if classes is not None:
        checks.class_ids("classes", classes, checks.rows("embeddings", embeddings))
    options = {"gallery": gallery, "gallery_targets": gallery_targets, "distance": distance, "budget": budget}
    values = per_query(embeddings, targets, ks, **options, progress=progress, group=group)  # type: ignore[arg-type]
    result = Scores({name: float(value.nanmean()) for name, value in values.items()})
    if interval:
        groups = torch.arange(len(embeddings)) if classes is None else classes.cpu()
        for name, value in values.items():
            perfect = name.startswith("ndcg") and result[name] == 1  # resamples would be perfect, too
            result.intervals[name] = share_interval(value, groups) if perfect else bootstrap(value, groups, seed=seed)
    result["spearman_skipped"] = float(values["spearman"].isnan().sum())
    return result


def per_query(
    embeddings: Tensor,
    targets: Tensor,
    ks: Sequence[int] = (1, 5, 10),
    *,
    gallery: Tensor | None = None,
    gallery_targets: Tensor | None = None,
    distance: str = "euclidean",
    budget: int = BUDGET,
    progress: Callable[[int, int], None] | None = None,
    group: ProcessGroup | None = None,
) -> dict[str, Tensor]:
    """The metrics of `graded` query by query, (Q,) float64 on the CPU; "spearman" is NaN where it says nothing."""
    _check(ks, distance, budget)
    a, t = _items("embeddings", embeddings, "targets", targets)  # (N, D), (N, K) in float64
    b, u = _gallery(a, t, gallery, gallery_targets)
    table = _per_query((a, t, b, u), gallery is None, ks, distance, budget, progress, group)
    names = [f"{name}@{k}" for name in ("ndcg", "label_distance", "best_label_distance") for k in ks]
    return dict(zip([*names, "spearman"], table, strict=True))


def _per_query(
    sets: tuple[Tensor, Tensor, Tensor, Tensor],
    own: bool,
    ks: Sequence[int],
    distance: str,
    budget: int,
    progress: Callable[[int, int], None] | None,
    group: ProcessGroup | None,
) -> Tensor:
    """Every metric of every query, (metrics, Q) on the CPU; the last is Spearman's, NaN where it says nothing.

    Queries, their targets, what they search and its targets in `sets`. A team shares whole tiles of queries.
    """
    a, t, b, u = sets
    found, step = len(b) - own, max(1, budget // (128 * len(b)))
    mine = slice(0, len(a))
    if group is not None and group.size > 1:
        group.agree(embeddings=a, targets=t, gallery=b, gallery_targets=u)
        step = min(step, -(-len(a) // group.size))
        mine = group.share(len(a), step)
    tables = [a.new_empty(3 * len(ks) + 1, 0)]
    with nullcontext(progress) if group is None else group.work("graded", progress, len(a)) as told:
        for at in range(mine.start, mine.stop, step):
            away = _away(a[at : at + step], b, distance)  # (q, R)
            apart = _euclidean(t[at : at + step], u)  # (q, R)
            if own:
                for matrix in (away, apart):
                    matrix.diagonal(at).fill_(torch.inf)  # oneself stands last, and is cut off
            near, order = (part[:, :found] for part in away.sort(dim=1, stable=True))
            best, best_order = (part[:, :found] for part in apart.sort(dim=1))
            top = _top(apart.gather(1, order), best, ks).flatten(0, 1)
            ranks, label_ranks = _centred_ranks(near, order, away), _centred_ranks(best, best_order, apart)
            rho, valid = _spearman(ranks, label_ranks)
            tables.append(torch.cat([top, torch.where(valid, rho, torch.nan)[None]]))
            if told is not None:
                told(min(at + step, mine.stop) - mine.start, mine.stop - mine.start)
    table = torch.cat(tables, 1).cpu()
    return table if group is None else group.rows(table.T.contiguous()).T.contiguous()  # means add up in one order


def _check(ks: Sequence[int], distance: str, budget: int) -> None:
    if len(ks) == 0:
        raise ValueError("ks must hold at least one k, got none")
    for k in ks:
        checks.integer("ks", k, 1)
    checks.one_of("distance", distance, DISTANCES)
    checks.integer("budget", budget, 1)


def _items(name: str, rows: Tensor, targets_name: str, targets: Tensor | None) -> tuple[Tensor, Tensor]:
    """Embeddings (N, D) and targets (N, K) in float64, finite and of as many rows."""
    checks.rows(name, rows)
    if not isinstance(targets, Tensor) or targets.dtype == torch.bool or targets.is_complex():
        got = targets.dtype if isinstance(targets, Tensor) else type(targets).__name__
        raise TypeError(f"{targets_name} must be real-valued, (rows,) or (rows, K), got {got}")
    if targets.dim() not in (1, 2) or targets.shape[0] != rows.shape[0]:
        raise ValueError(
            f"{targets_name} must be (rows,) or (rows, K), one entry per row of {name}: {rows.shape[0]} rows, "
            f"got {tuple(targets.shape)}"
        )
    checks.same_device(targets_name, targets, rows, name)
    wide = distances.wide(rows)
    columns = (targets[:, None] if targets.dim() == 1 else targets).detach().to(wide)
    for what, values in ((name, rows), (targets_name, columns)):
        checks.finite(what, values)
    return distances.upcast(rows.detach().to(wide)), columns


def _gallery(
    queries: Tensor, targets: Tensor, gallery: Tensor | None, gallery_targets: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The items that are ranked: the gallery's, or the queries themselves."""
    if gallery is None:
        if gallery_targets is not None:
            raise ValueError("gallery_targets need a gallery, got None")
        checks.enough("embeddings", queries.shape[0], 2, "two rows where there is no gallery")
        return queries, targets
    rows, columns = _items("gallery", gallery, "gallery_targets", gallery_targets)
    checks.same_device("gallery", rows, queries)
    checks.dimensions("gallery", rows, queries.shape[1], "embeddings have")
    checks.enough("embeddings", queries.shape[0], 1, "one row")
    checks.enough("gallery", rows.shape[0], 1, "one row")
    if columns.shape[1] != targets.shape[1]:
        raise ValueError(
            f"gallery_targets must have as many columns as targets: {targets.shape[1]}, got {columns.shape[1]}"
        )
    return rows, columns


def _away(queries: Tensor, gallery: Tensor, distance: str) -> Tensor:
    """What is ranked, (Q, R), smaller first. Cosines are cut to 12 decimals, so that equal ones are equal."""
    if distance == "euclidean":
        return _euclidean(queries, gallery)
    return (distances.cosine(queries, gallery) * -(2.0**40)).round_()


def _euclidean(x: Tensor, y: Tensor) -> Tensor:
    """By differences, not by products: duplicates are at exactly the same distance from everything."""
    return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")


def _top(nearest: Tensor, best: Tensor, ks: Sequence[int]) -> Tensor:
    """nDCG, mean label distance and the least possible one at each k, of each query: (3, ks, Q).

    Label distances in the order of the ranking and in the best order, (Q, R) each.
    """
    ranks = torch.arange(1, nearest.shape[1] + 1, dtype=nearest.dtype, device=nearest.device)
    ends = torch.tensor([min(k, nearest.shape[1]) - 1 for k in ks], device=nearest.device)
    reach = max(min(max(ks), nearest.shape[1]), 1)
    nearest, best, ranks = nearest[:, :reach], best[:, :reach], ranks[:reach]
    discount = 1 / (ranks + 1).log2()
    gained, possible = ((discount / (1 + d)).cumsum(1)[:, ends] for d in (nearest, best))
    shown, least = ((d.cumsum(1) / ranks)[:, ends] for d in (nearest, best))
    return torch.stack([gained / possible, shown, least]).transpose(1, 2)


def _spearman(ranks: Tensor, label_ranks: Tensor) -> tuple[Tensor, Tensor]:
    """Rank correlation of each query, (Q,), and whether its label distances differ at all; 0 where they do not."""
    spread, label_spread = ranks.square().sum(1), label_ranks.square().sum(1)
    valid = label_spread > 0
    both = valid & (spread > 0)
    size = torch.where(both, spread.sqrt() * label_spread.sqrt(), 1.0)
    return torch.where(both, (ranks * label_ranks).sum(1) / size, 0.0), valid


def _centred_ranks(ordered: Tensor, order: Tensor, matrix: Tensor) -> Tensor:
    """Ranks less their mean, ties at their mean rank, in the shape of the ordered `matrix`; 0 where cut off."""
    place = torch.arange(ordered.shape[1], device=ordered.device)
    edge = torch.ones(ordered.shape[0], ordered.shape[1] + 1, dtype=torch.bool, device=ordered.device)
    edge[:, 1:-1] = ordered[:, 1:] != ordered[:, :-1]
    first = torch.where(edge[:, :-1], place, -1).cummax(1).values  # of the ties that each place belongs to
    last = torch.where(edge[:, 1:], place, len(place)).flip(1).cummin(1).values.flip(1)
    ranks = (first + last).to(ordered.dtype) / 2 - (len(place) - 1) / 2
    return torch.zeros_like(matrix).scatter_(1, order, ranks)
