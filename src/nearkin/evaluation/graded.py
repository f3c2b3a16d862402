"""Graded relevance: how well the order of the embeddings follows real-valued labels."""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from nearkin.core import checks, distances
from nearkin.dist.group import ProcessGroup
from nearkin.evaluation.arrays import Array, Ids, Progress, Scores, takes_arrays
from nearkin.evaluation.retrieval.knn import BUDGET
from nearkin.evaluation.statistics.cluster_bootstrap import bootstrap, explain_missing, share_interval
from nearkin.evaluation.verification.pair_bootstrap import only_with_interval

__all__ = ["DISTANCES", "graded", "per_query"]

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
    seed: int | None = None,
    progress: Progress | None = None,
    group: ProcessGroup | None = None,
) -> Scores[float]:
    """Rankings by embedding distance, compared with label distance; means over queries.

    embeddings (N, D), targets (N,) or (N, K); label distances d are Euclidean. Without a gallery every item is a query
    against all others; with `gallery` (R, D) and `gallery_targets` against those. `distance`: "euclidean" of the rows
    as they are, which suits log-ratio training, or "cosine". Ties in the ranking go to the lowest index.

    "ndcg@k"                 sum over positions i <= k of 1/(1 + d_i) / log2(i + 1), divided by the same sum of the best
                             order (Kim et al. 2019, arXiv:1904.09626, section 5: gain 2^(-log2(d + 1)))
    "label_distance@k"       mean d of the nearest k; "best_label_distance@k" the smallest possible
    "spearman"               rank correlation of embedding distances with label distances over all items of the
                             gallery, ties at their mean rank; a query at one distance from everything counts 0
    "spearman_skipped"       how many queries have one label distance to everything; they are left out
                             (NaN where that is all of them)
    `interval` adds 95 % intervals by `bootstrap` with `seed` (0) as `.intervals`: over `classes` (N,) of the queries
    where these are passed, without -1; else over queries, which is too narrow where these come in groups.
    progress(done, total) is called with queries. Where k is larger than the gallery, all of it is taken. Everything in
    float64, exactly, in tiles of queries within `budget` bytes. group: processes that share the queries, as in
    `retrieval`.
    """
    only_with_interval(interval, seed=seed, classes=classes)
    if classes is not None:
        checks.class_ids("classes", classes, checks.rows("embeddings", embeddings))
    options = {"gallery": gallery, "gallery_targets": gallery_targets, "distance": distance, "budget": budget}
    values = per_query(embeddings, targets, ks, **options, progress=progress, group=group)  # type: ignore[arg-type]
    result = Scores({name: float(value.nanmean()) for name, value in values.items()})
    if interval:
        groups, seed = torch.arange(len(embeddings)) if classes is None else classes.cpu(), seed or 0
        for name, value in values.items():
            perfect = name.startswith("ndcg") and result[name] == 1  # resamples would be perfect, too
            result.intervals[name] = share_interval(value, groups) if perfect else bootstrap(value, groups, seed=seed)
        explain_missing(result, groups)
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
    progress: Progress | None = None,
    group: ProcessGroup | None = None,
) -> dict[str, Tensor]:
    """The metrics of `graded` for each query, (Q,) float64 on the CPU; "spearman" is NaN where it is undefined."""
    if len(ks) == 0:
        raise ValueError("ks must hold at least one k, got none")
    for k in ks:
        checks.integer("ks", k, 1)
    checks.one_of("distance", distance, DISTANCES)
    checks.integer("budget", budget, 1)
    a, t = _items("embeddings", embeddings, "targets", targets)  # (N, D), (N, K) in float64
    b, u = _gallery(a, t, gallery, gallery_targets)
    self_search = gallery is None
    ranked, step = len(b) - self_search, max(1, budget // (128 * len(b)))
    share = slice(0, len(a))  # entire tiles of queries, in a group
    if group is not None and group.size > 1:
        group.agree(embeddings=a, targets=t, gallery=b, gallery_targets=u)
        step = min(step, -(-len(a) // group.size))
        share = group.share(len(a), step)
    tables = [a.new_empty(3 * len(ks) + 1, 0)]
    with nullcontext(progress) if group is None else group.work("graded", progress, len(a)) as report:
        for at in range(share.start, share.stop, step):
            away = _away(a[at : at + step], b, distance)  # (q, R)
            apart = _euclidean(t[at : at + step], u)  # (q, R)
            if self_search:
                for matrix in (away, apart):
                    matrix.diagonal(at).fill_(torch.inf)  # the query itself comes last, and is cut off
            near, order = (part[:, :ranked] for part in away.sort(dim=1, stable=True))
            best, best_order = (part[:, :ranked] for part in apart.sort(dim=1))
            top = _top(apart.gather(1, order), best, ks).flatten(0, 1)
            ranks, label_ranks = _centred_ranks(near, order, away), _centred_ranks(best, best_order, apart)
            rho, valid = _spearman(ranks, label_ranks)
            tables.append(torch.cat([top, torch.where(valid, rho, torch.nan)[None]]))
            if report is not None:
                report(min(at + step, share.stop) - share.start, share.stop - share.start)
    table = torch.cat(tables, 1).cpu()  # (metrics, Q)
    table = table if group is None else group.rows(table.T.contiguous()).T.contiguous()  # means add up in one order
    names = [f"{name}@{k}" for name in ("ndcg", "label_distance", "best_label_distance") for k in ks]
    return dict(zip([*names, "spearman"], table, strict=True))


def _items(name: str, rows: Tensor, targets_name: str, targets: Tensor | None) -> tuple[Tensor, Tensor]:
    """Embeddings (N, D) and targets (N, K) in float64, finite and with as many rows."""
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
    """Distances to rank by, (Q, R), smaller first. Cosines are rounded to 12 decimals, so that equal ones are equal."""
    if distance == "euclidean":
        return _euclidean(queries, gallery)
    return (distances.cosine(queries, gallery) * -(2.0**40)).round_()


def _euclidean(x: Tensor, y: Tensor) -> Tensor:
    """By differences, not by products: duplicates are at exactly the same distance from everything."""
    return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")


def _top(nearest: Tensor, best: Tensor, ks: Sequence[int]) -> Tensor:
    """nDCG, mean label distance and the smallest possible one at each k, per query: (3, ks, Q).

    Label distances in the order of the ranking and in the best order, (Q, R) each.
    """
    positions = torch.arange(1, nearest.shape[1] + 1, dtype=nearest.dtype, device=nearest.device)
    ends = torch.tensor([min(k, nearest.shape[1]) - 1 for k in ks], device=nearest.device)
    reach = max(min(max(ks), nearest.shape[1]), 1)
    nearest, best, positions = nearest[:, :reach], best[:, :reach], positions[:reach]
    discount = 1 / (positions + 1).log2()
    gained, possible = ((discount / (1 + d)).cumsum(1)[:, ends] for d in (nearest, best))
    mean, least = ((d.cumsum(1) / positions)[:, ends] for d in (nearest, best))
    return torch.stack([gained / possible, mean, least]).transpose(1, 2)


def _spearman(ranks: Tensor, label_ranks: Tensor) -> tuple[Tensor, Tensor]:
    """Rank correlation of each query, (Q,), and whether its label distances differ; 0 where they do not."""
    spread, label_spread = ranks.square().sum(1), label_ranks.square().sum(1)
    valid = label_spread > 0
    both = valid & (spread > 0)
    size = torch.where(both, spread.sqrt() * label_spread.sqrt(), 1.0)
    return torch.where(both, (ranks * label_ranks).sum(1) / size, 0.0), valid


def _centred_ranks(ordered: Tensor, order: Tensor, matrix: Tensor) -> Tensor:
    """Ranks less their mean, ties at their mean rank, in the shape of the ordered `matrix`; 0 where cut off."""
    index = torch.arange(ordered.shape[1], device=ordered.device)
    edge = torch.ones(ordered.shape[0], ordered.shape[1] + 1, dtype=torch.bool, device=ordered.device)
    edge[:, 1:-1] = ordered[:, 1:] != ordered[:, :-1]
    first = torch.where(edge[:, :-1], index, -1).cummax(1).values  # of the ties that each entry belongs to
    last = torch.where(edge[:, 1:], index, len(index)).flip(1).cummin(1).values.flip(1)
    ranks = (first + last).to(ordered.dtype) / 2 - (len(index) - 1) / 2
    return torch.zeros_like(matrix).scatter_(1, order, ranks)
