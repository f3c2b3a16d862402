"""Verification over all pairs of a labelled set, exact, without holding the pairs."""

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
from nearkin.evaluation.arrays import Array, Ids, takes_arrays
from nearkin.evaluation.verification import pair_bootstrap, pair_scan, pair_sweep
from nearkin.evaluation.verification.pair_scan import Scan, Search
from nearkin.evaluation.verification.roc import (
    FARS,
    Counts,
    Floats,
    Verified,
    at_fars,
    both,
    crossed,
    eer,
    measurable,
    most_accepted,
    point,
)

__all__ = ["all_pairs"]

_GROUPS = 64  # of classes, drawn as one where there are more classes
_GRID = 1024  # scores at which the curve of every resample is known
_CELLS = 4 * 8 * (_GROUPS * (_GROUPS + 3) // 2) * (_GRID + 64)  # bytes to count these and to draw from them


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
    samples: int = pair_bootstrap.SAMPLES,
    seed: int = 0,
    progress: pair_scan.Progress | None = None,
    group: ProcessGroup | None = None,
) -> Verified:
    """Verifies every pair i < j of embeddings (N, D): genuine where labels (N,) are equal; label -1 is left out.

    `similarity` is "cosine" or "dot", computed in float32, or in float64 for float64 embeddings. Returns "genuine",
    "impostors", "auc", "eer", "tar@far=…", "not_measurable" and "operating_points" as `verification` does from the list
    of all these scores, and equal to it. "balanced_accuracy" is the largest (TAR + 1 - FAR) / 2 of any threshold, and
    "balanced_threshold" the highest score from which on to accept for it; plain accuracy, where nearly all pairs are
    impostors, would praise whoever refuses everyone, and accuracy over folds is a protocol of pair lists. With `points`
    also "roc", a `Roc` of exact counts at about so many scores, half of them even in TAR, half even in log FAR.

    interval: also `.intervals` of "auc", "eer", "balanced_accuracy" and each TAR, resampling classes as `verification`
    does, from the counts of every two of at most 64 groups of classes at about 1,024 scores; "notes" says which TARs
    have none, (nan, nan), since there are too few pairs of classes. The operating points then carry the wider of this
    interval and the binomial one, which takes pairs as independent and is too narrow alone.

    `budget` bounds the bytes of working memory beside the embeddings; a smaller one means more passes, never another
    result. progress(done, of) is called with pairs, over all passes. ranks: who shares the pairs, as in `retrieval`.
    """
    scan = _checked(embeddings, labels, similarity, group)
    tile, needed = pair_scan.tile_bytes(embeddings.shape[1]), pair_scan.TABLE + interval * _CELLS
    what = "a tile, a table and the counts of the groups" if interval else "a tile and a table"
    checks.enough("budget", budget, tile + needed, f"{what}, in bytes")
    checks.integer("points", points, 0)
    settings = {"samples": samples, "seed": seed, "confidence": confidence}
    pairs = scan.genuine + scan.impostors
    with (
        nullcontext(progress) if scan.team is None else scan.team.work("verification", progress, pairs) as scan.progress
    ):
        return _found(scan, fars, budget - tile, points, interval, settings)


def _found(
    scan: Scan, fars: Sequence[float], budget: int, points: int, interval: bool, settings: dict[str, Any]
) -> Verified:
    wanted = measurable(fars, scan.impostors)
    crossing = Search(lambda tp, fp: crossed(tp, fp, scan.genuine, scan.impostors))
    refusals = [Search(partial(_too_many, most_accepted(far, scan.impostors))) for far in wanted]
    at_once = budget // pair_scan.TABLE
    scan.passes = pair_scan.passes_of(scan, 1 + len(wanted), at_once) + 1 + interval
    pair_scan.run(scan, [crossing, *refusals], at_once)
    counts = scan.genuine, scan.impostors
    ready = [
        point(far, scan.next_above(search.block), *search.above, *counts, settings["confidence"])
        for far, search in zip(wanted, refusals, strict=True)
    ]
    curve, grid = (pair_sweep.Levels(number, *counts) for number in (max(points, 1), _GRID))
    swept = pair_sweep.sweep(scan, budget // pair_sweep.KEY_BYTES, [curve, grid])
    tp, fp = zip(crossing.above, crossing.within, strict=True)
    found = Verified({"genuine": counts[0], "impostors": counts[1], "auc": swept.auc, "eer": eer(tp, fp, *counts)})
    found |= {"balanced_accuracy": swept.balanced, "balanced_threshold": scan.score(swept.key)}
    found.update(at_fars(fars, ready))
    if points:
        found["roc"] = curve.roc(scan)
    if interval:
        _add_intervals(found, scan, grid.keys(), settings)
    return found


def _checked(embeddings: Tensor, labels: Tensor, similarity: str, group: ProcessGroup | None) -> Scan:
    checks.rows("embeddings", embeddings)
    checks.class_ids("labels", labels, embeddings)
    checks.one_of("similarity", similarity, ("cosine", "dot"))
    checks.finite("embeddings", embeddings)
    scan = Scan(embeddings, labels.long(), similarity, group=group)
    both(scan.genuine, scan.impostors)
    if scan.team is not None:
        scan.team.agree(embeddings=embeddings, labels=labels)
    return scan


def _too_many(most: int, tp: Counts, fp: Counts) -> NDArray[np.bool_]:
    return np.asarray(fp > most)


def _add_intervals(found: Verified, scan: Scan, keys: Counts, settings: dict[str, Any]) -> None:
    """Fills `intervals`, and those of the operating points."""
    ready = found["operating_points"]
    cuts = [scan.key(one.threshold) for one in ready]
    grid = np.unique(np.concatenate([keys, np.array(cuts, np.int64)]))
    kin, strange, cells = _counted(scan, grid, settings["seed"])
    places = [len(grid) - int(np.searchsorted(grid, key)) for key in cuts]
    fars = [one.wanted_far for one in ready]

    def measure(genuine: Floats, impostors: Floats) -> Floats:
        rows = zip(genuine @ kin, impostors @ strange, strict=True)
        return np.array([_rates(tp, fp, fars, places) for tp, fp in rows])

    names = ["balanced_accuracy", "eer", "auc", *(f"tar@far={far}" for far in fars)]
    here = measure(np.ones((1, len(kin))), np.ones((1, len(strange))))[0]
    ends = pair_bootstrap.by_classes(measure, cells, steep=range(3, len(names)), **settings)
    pairs = len(scan.classes) * (len(scan.classes) - 1) // 2
    for name, value, (low, high) in zip(names, here, ends, strict=False):
        off = found[name] - value  # the grid leaves out what lies between its scores
        found.intervals[name] = float(np.maximum(low + off, 0.0)), float(np.minimum(high + off, 1.0))
    pair_bootstrap.only_shown(found, fars, pairs)
    found["operating_points"] = pair_bootstrap.widened(ready, ends[len(names) :])


def _counted(scan: Scan, grid: Counts, seed: int) -> tuple[Floats, Floats, pair_bootstrap.Cells]:
    """Genuine pairs of each group of classes, and impostors of each two, at or above each score of the grid from the
    highest down, after a column of none and before one of all: (G, T + 2), (G (G + 1) / 2, T + 2).
    """
    classes = len(scan.classes)
    groups = min(classes, _GROUPS)
    dealt = np.empty(classes, np.int64)
    dealt[random.shuffled(random.words(classes, seed, random.Stream.CLASS_GROUPS))] = np.arange(classes) % groups
    group = torch.from_numpy(dealt).to(scan.order.device)[scan.number]  # of each row
    one, other = np.triu_indices(groups)
    cell = np.empty((groups, groups), np.int64)
    cell[one, other] = cell[other, one] = np.arange(len(one))
    cell_of = torch.from_numpy(cell).to(group.device)
    levels, width = torch.from_numpy(grid).to(group.device), len(grid) + 1
    table = torch.zeros((len(one) + groups) * width, dtype=torch.long, device=group.device)
    for key, first, second in scan.tiles():
        a, b = group[first], group[second]
        row = torch.where(scan.strange(first, second), cell_of[a, b] + groups, a)
        place = row * width + torch.searchsorted(levels, key, right=True)
        table.index_add_(0, place, torch.ones_like(place))
    falling = scan.summed(table).reshape(-1, width)[:, ::-1].cumsum(1).astype(np.float64)
    falling = np.concatenate([np.zeros((len(falling), 1)), falling], axis=1)
    pairs = np.stack([one, other], axis=1)
    return (
        falling[:groups],
        falling[groups:],
        pair_bootstrap.Cells(groups, np.arange(groups), pairs, np.arange(len(one))),
    )


def _rates(tp: Floats, fp: Floats, fars: Sequence[float], places: Sequence[int]) -> list[float]:
    """Balanced accuracy, EER, AUC, TAR at each FAR, then FAR and TAR at each place, straight between the scores."""
    if not tp[-1] or not fp[-1]:
        return [np.nan] * (3 + len(fars) + 2 * len(places))
    tar, far = tp / tp[-1], fp / fp[-1]
    gap = far - (1 - tar)
    at = max(int(np.argmax(gap >= 0)), 1)
    part = -gap[at - 1] / (gap[at] - gap[at - 1])
    crossing = far[at - 1] + part * (far[at] - far[at - 1])
    area = np.dot(np.diff(far), tar[1:] + tar[:-1]) / 2
    last = np.append(np.flatnonzero(np.diff(far)), len(far) - 1)  # the best TAR of each FAR
    best = np.interp(fars, far[last], tar[last]).tolist()
    balanced = 0.5 + (tar - far).max() / 2
    return [balanced, crossing, area, *best, *(far[place] for place in places), *(tar[place] for place in places)]
