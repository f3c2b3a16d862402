"""Verification over all pairs of a labelled set, exact, without a list of the pairs."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin.core import checks, random
from nearkin.dist.group import ProcessGroup
from nearkin.evaluation.arrays import Array, Counts, Floats, Ids, Progress, Scores, takes_arrays
from nearkin.evaluation.statistics.cluster_bootstrap import explain_missing
from nearkin.evaluation.verification import pair_bootstrap, pair_scan
from nearkin.evaluation.verification.pair_scan import Scan, Search
from nearkin.evaluation.verification.roc import (
    FARS,
    OperatingPoint,
    eer,
    far_entries,
    far_reaches_frr,
    measurable,
    most_accepted,
    point,
    require_both_kinds,
)

__all__ = ["all_pairs"]

_GROUPS = 64  # of classes, each resampled as one where there are more classes
_GRID = 1024  # scores at which the curve of every resample is known
_CELLS = 4 * 8 * (_GROUPS * (_GROUPS + 3) // 2) * (_GRID + 64)  # bytes to count these and to resample them


@takes_arrays
def all_pairs(
    embeddings: Array,
    labels: Ids,
    *,
    similarity: str = "cosine",
    fars: Sequence[float] = FARS,
    confidence: float = 0.95,
    budget: int = 512 << 20,
    points: int = 0,
    interval: bool = False,
    samples: int | None = None,
    seed: int | None = None,
    progress: Progress | None = None,
    group: ProcessGroup | None = None,
    groups: Ids | None = None,
) -> Scores[Any]:
    """Verifies every pair i < j of embeddings (N, D): genuine where labels (N,) are equal; label -1 is left out.

    `similarity` is "cosine" or "dot", computed in float32, or in float64 for float64 embeddings. Returns "genuine",
    "impostors", "auc", "eer", "tar@far=…", "not_measurable" and "operating_points", as `verification` has them for
    the list of all these scores. "balanced_accuracy" is the largest (TAR + 1 - FAR) / 2 of any threshold, and
    "balanced_threshold" the highest score from which on to accept for it; plain accuracy would reward rejecting every
    pair, since nearly all are impostors, and accuracy over folds is a protocol for pair lists. With `points` also
    "roc", a `Roc` of exact counts at about this many scores, half of them even in TAR, half even in log FAR.

    interval: also `.intervals` of "auc", "eer", "balanced_accuracy" and each TAR, resampling classes as `verification`
    does, from the counts of every two of at most 64 groups of classes at about 1,024 scores; "notes" says which TARs
    have none, (nan, nan), because there are too few pairs of classes. `samples` (1,000 unless set) and `seed` (0 unless
    set) are of the resamples. The rates of operating points then have the wider of this interval and the binomial one,
    which takes pairs as independent and is too narrow by itself.

    `budget` bounds the bytes of working memory beyond the embeddings; a smaller one means more passes and never changes
    a result. progress(done, total) is called with pairs, over all passes. group: processes that share the pairs, as in
    `retrieval`. groups (N,): of the items; a pair of the same class and group is neither genuine nor an impostor, and
    "left_out" says how many there are.
    """
    scan = _checked(embeddings, labels, similarity, group, groups)
    tile, needed = pair_scan.tile_bytes(embeddings.shape[1]), pair_scan.TABLE + interval * _CELLS
    what = "a tile, a table and the counts of the groups" if interval else "a tile and a table"
    checks.enough("budget", budget, tile + needed, f"{what}, in bytes")
    checks.integer("points", points, 0)
    pair_bootstrap.only_with_interval(interval, samples=samples, seed=seed)
    samples, seed = pair_bootstrap.SAMPLES if samples is None else samples, 0 if seed is None else seed
    checks.integer("samples", samples, 1)
    checks.integer("seed", seed, 0)
    settings = {"samples": samples, "seed": seed, "confidence": confidence}
    work = nullcontext(progress) if scan.group is None else scan.group.work("verification", progress, scan.pairs)
    with work as scan.progress:
        return _measure(scan, fars, budget - tile, points, interval, settings)


def _measure(
    scan: Scan, fars: Sequence[float], budget: int, points: int, interval: bool, settings: dict[str, Any]
) -> Scores[Any]:
    reached = measurable(fars, scan.impostors)
    crossing = Search(lambda tp, fp: far_reaches_frr(tp, fp, scan.genuine, scan.impostors))
    rejections = [Search(partial(_too_many, most_accepted(far, scan.impostors))) for far in reached]
    at_once = budget // pair_scan.TABLE
    scan.passes = pair_scan.passes_of(scan, 1 + len(reached), at_once) + 1 + interval
    pair_scan.run(scan, [crossing, *rejections], at_once)
    counts = scan.genuine, scan.impostors
    operating_points = [
        point(far, scan.next_above(search.block), *search.above, *counts, settings["confidence"])
        for far, search in zip(reached, rejections, strict=True)
    ]
    shown, grid = (pair_scan.Levels(number, *counts) for number in (max(points, 1), _GRID))
    curve = pair_scan.sweep(scan, budget // pair_scan.KEY_BYTES, [shown, grid])
    tp, fp = zip(crossing.above, crossing.within, strict=True)
    result: Scores[Any] = Scores({"genuine": counts[0], "impostors": counts[1]})
    if scan.groups is not None:
        result["left_out"] = scan.left_out
    result |= {"auc": curve.auc, "eer": eer(tp, fp, *counts)}
    result |= {"balanced_accuracy": curve.balanced, "balanced_threshold": scan.score(curve.key)}
    result.update(far_entries(fars, operating_points))
    if points:
        result["roc"] = shown.roc(scan)
    if interval:
        _add_intervals(result, scan, grid.keys(), settings)
    return result


def _checked(
    embeddings: Tensor, labels: Tensor, similarity: str, group: ProcessGroup | None, groups: Tensor | None
) -> Scan:
    checks.rows("embeddings", embeddings)
    checks.class_ids("labels", labels, embeddings)
    checks.one_of("similarity", similarity, ("cosine", "dot"))
    checks.finite("embeddings", embeddings)
    if groups is not None:
        checks.class_ids("groups", groups, embeddings)
    scan = Scan(embeddings, labels.long(), similarity, group=group, groups=groups)
    require_both_kinds(scan.genuine, scan.impostors)
    if scan.group is not None:
        scan.group.agree(embeddings=embeddings, labels=labels, groups=groups)
    return scan


def _too_many(most: int, tp: Counts, fp: Counts) -> NDArray[np.bool_]:
    return np.asarray(fp > most)


def _add_intervals(result: Scores[Any], scan: Scan, keys: Counts, settings: dict[str, Any]) -> None:
    """Fills in `intervals`, and those of the operating points."""
    points: list[OperatingPoint] = result["operating_points"]
    thresholds, fars = [scan.key(reached.threshold) for reached in points], [reached.wanted_far for reached in points]
    grid = np.unique(np.concatenate([keys, np.array(thresholds, np.int64)]))
    genuine_counts, impostor_counts, cells = _count_groups(scan, grid, settings["seed"])
    cuts = [len(grid) - int(np.searchsorted(grid, key)) for key in thresholds]

    def measure(genuine: Floats, impostors: Floats) -> Floats:
        rows = zip(genuine @ genuine_counts, impostors @ impostor_counts, strict=True)
        return np.array([_rates(tp, fp, fars, cuts) for tp, fp in rows])

    names = ["balanced_accuracy", "eer", "auc", *(f"tar@far={far}" for far in fars)]
    on_grid = measure(np.ones((1, len(genuine_counts))), np.ones((1, len(impostor_counts))))[0]
    ends = pair_bootstrap.by_classes(measure, cells, steep=range(3, len(names)), **settings)
    pairs = len(scan.classes) * (len(scan.classes) - 1) // 2
    for name, value, (low, high) in zip(names, on_grid, ends, strict=False):
        off = result[name] - value  # the grid omits what lies between its scores
        result.intervals[name] = float(np.maximum(low + off, 0.0)), float(np.minimum(high + off, 1.0))
    pair_bootstrap.drop_unsupported(result, fars, pairs)
    explain_missing(result, scan.classes)
    result["operating_points"] = pair_bootstrap.with_wider_intervals(points, ends[len(names) :])


def _count_groups(scan: Scan, grid: Counts, seed: int) -> tuple[Floats, Floats, pair_bootstrap.Cells]:
    """Genuine pairs of each group of classes, and impostors of each two, at or above each score of the grid from the
    highest down, after a column of none and before one of all: (G, T + 2), (G (G + 1) / 2, T + 2).
    """
    classes = len(scan.classes)
    groups = min(classes, _GROUPS)
    group_of = np.empty(classes, np.int64)
    group_of[random.shuffled(random.words(classes, seed, random.Stream.CLASS_GROUPS))] = np.arange(classes) % groups
    group = torch.from_numpy(group_of).to(scan.order.device)[scan.number]  # of each row
    first, second = np.triu_indices(groups)
    number = np.empty((groups, groups), np.int64)
    number[first, second] = number[second, first] = np.arange(len(first))
    pair_of = torch.from_numpy(number).to(group.device)
    levels, width = torch.from_numpy(grid).to(group.device), len(grid) + 1
    table = torch.zeros((len(first) + groups) * width, dtype=torch.long, device=group.device)
    for key, left, right in scan.tiles():
        a, b = group[left], group[right]
        row = torch.where(scan.is_impostor(left, right), pair_of[a, b] + groups, a)
        cell = row * width + torch.searchsorted(levels, key, right=True)
        table.index_add_(0, cell, torch.ones_like(cell))
    falling = scan.summed(table).reshape(-1, width)[:, ::-1].cumsum(1).astype(np.float64)
    falling = np.concatenate([np.zeros((len(falling), 1)), falling], axis=1)
    pairs = np.stack([first, second], axis=1)
    cells = pair_bootstrap.Cells(groups, np.arange(groups), pairs, np.arange(len(first)))
    return falling[:groups], falling[groups:], cells


def _rates(tp: Floats, fp: Floats, fars: Sequence[float], cuts: Sequence[int]) -> list[float]:
    """Balanced accuracy, EER, AUC, TAR at each FAR, then FAR and TAR at each cut; linear between the scores."""
    if not tp[-1] or not fp[-1]:
        return [np.nan] * (3 + len(fars) + 2 * len(cuts))
    tar, far = tp / tp[-1], fp / fp[-1]
    gap = far - (1 - tar)
    at = max(int(np.argmax(gap >= 0)), 1)
    part = -gap[at - 1] / (gap[at] - gap[at - 1])
    crossing = far[at - 1] + part * (far[at] - far[at - 1])
    area = np.dot(np.diff(far), tar[1:] + tar[:-1]) / 2
    last = np.append(np.flatnonzero(np.diff(far)), len(far) - 1)  # the best TAR of each FAR
    best = np.interp(fars, far[last], tar[last]).tolist()
    balanced = 0.5 + (tar - far).max() / 2
    return [balanced, crossing, area, *best, *(far[cut] for cut in cuts), *(tar[cut] for cut in cuts)]
