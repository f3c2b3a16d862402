"""Verification metrics: are two items the same? Rates and thresholds from scores of genuine and impostor pairs.

Scores are similarities: larger is more alike, and a pair counts as the same from the threshold on, score >= t.

    FAR(t) = impostors with score >= t / impostors        TAR(t) = genuine with score >= t / genuine

Everything but the thresholds depends on the order of the scores alone, and all counting is exact.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin.core import checks, distances
from nearkin.core.relations import UNKNOWN
from nearkin.evaluation.arrays import Array, Counts, Floats, Ids, Progress, Scores, Values, group_numbers, takes_arrays
from nearkin.evaluation.statistics.binomial import MIN_CLASSES
from nearkin.evaluation.statistics.cluster_bootstrap import explain_missing
from nearkin.evaluation.verification import pair_bootstrap
from nearkin.evaluation.verification.roc import (
    FARS,
    OperatingPoint,
    Roc,
    check_pairs,
    cumulative_counts,
    eer,
    far_entries,
    far_reaches_frr,
    points_at,
    shuffled_by_kind,
    vector,
)

__all__ = ["of_other_groups", "operating_point", "pair_scores", "roc", "verification"]

_CHUNK = 1 << 16  # pairs whose embeddings are gathered at once


@takes_arrays
def verification(
    scores: Values | None = None,
    same: Values | None = None,
    *,
    embeddings: Array | None = None,
    pairs: Array | None = None,
    labels: Ids | None = None,
    similarity: str = "cosine",
    fars: Sequence[float] = FARS,
    folds: int | Values = 10,
    seed: int = 0,
    confidence: float = 0.95,
    interval: bool = False,
    classes: Values | None = None,
    samples: int | None = None,
    progress: Progress | None = None,
    groups: Ids | None = None,
) -> Scores[Any]:
    """How well scores (M,) tell same from different pairs; `same` (M,) is bool or 0/1.

    Instead of scores: embeddings (N, D) with pairs (M, 2) of row numbers, scored by `pair_scores`; with `labels` (N,)
    `same` is not needed, and with `groups` (N,) beside them pairs of the same class and group are left out
    ("left_out": how many). Returns

    - "eer": where FAR and FRR = 1 - TAR cross on the straight lines between the curve's points; "auc": its area, ties
      counting half; "genuine", "impostors": how many pairs;
    - "tar@far=0.001", one per FAR f, written as Python writes f: the best TAR over all thresholds with FAR <= f.
      Nothing is interpolated. An f below 1/impostors cannot be measured: its value is None and f is in
      "not_measurable";
    - "operating_points": the measurable ones as `OperatingPoint`, least strict first;
    - "accuracy", "accuracy_error": mean over folds and its standard error, the threshold of each fold chosen for
      accuracy on the others (the protocol of LFW, Huang et al. 2007); "fold_thresholds". `folds` is one fold number per
      pair, or how many folds to make with `seed`, each kind split evenly (fewer where there are fewer pairs);
    - "threshold": chosen for accuracy on all pairs, halfway between two neighbouring scores. Of equally accurate cuts
      the middle one is taken, and the stricter of two middle ones.

    Accuracy and its threshold depend on the share of genuine pairs; TAR, FAR and EER do not.

    interval: also the interval of "eer", "auc", "accuracy" and each TAR, as `.intervals[name]`, from `samples` (1,000)
    resamples of the classes of the pairs (see `pair_bootstrap`): `classes` (M, 2), the ids of both sides, taken from
    `labels` where these are passed. Without either, pairs are resampled as if they were independent, which pairs that
    share a person are not. A TAR at a FAR that accepts fewer than 4 pairs of classes has none, and "notes" says so. The
    folds keep their thresholds, which makes the interval of accuracy a little too narrow. The rates of operating points
    then have the wider of this interval and the binomial one.
    """
    pair_bootstrap.only_with_interval(interval, samples=samples, classes=classes)
    if labels is not None and classes is not None:
        raise ValueError("classes are taken from labels; pass one of them, got both")
    if labels is not None and embeddings is None:
        raise ValueError("labels need embeddings and pairs; beside scores, pass classes (pairs, 2)")
    if embeddings is not None or pairs is not None:
        if scores is not None or embeddings is None or pairs is None:
            raise ValueError("verification needs either scores, or embeddings and pairs; got a mixture")
        scores, left_out = pair_scores(embeddings, pairs, similarity), 0
        if labels is not None:
            checks.class_ids("labels", labels, embeddings)
            sides: Tensor = labels.detach().cpu()[pairs.long().cpu()]
            classes, same = sides, sides[:, 0] == sides[:, 1] if same is None else same
            if groups is not None:
                counted = of_other_groups(embeddings, pairs, sides, groups)
                scores, same, classes = scores[counted], torch.as_tensor(same)[counted], sides[counted]
                folds = folds if isinstance(folds, int) else torch.as_tensor(folds)[counted]
                left_out = int((~counted).sum())
    if groups is not None and (embeddings is None or labels is None):
        raise ValueError("groups need embeddings, pairs and labels: a pair of the same class and group is left out")
    values, is_genuine = check_pairs(scores, same)
    curve, tp, fp = cumulative_counts(values, is_genuine)
    genuine, impostors = int(tp[-1]), int(fp[-1])
    result: Scores[Any] = Scores({"genuine": genuine, "impostors": impostors})
    if groups is not None:
        result["left_out"] = left_out
    result["auc"] = float(np.dot(np.diff(fp), tp[1:] + tp[:-1]) / (2 * genuine * impostors))
    crossing = int(np.argmax(far_reaches_frr(tp, fp, genuine, impostors)))  # never 0
    result["eer"] = eer(tp[crossing - 1 : crossing + 1], fp[crossing - 1 : crossing + 1], genuine, impostors)
    result.update(far_entries(fars, points_at(curve, tp, fp, fars, confidence)))
    fold = _folds(folds, is_genuine, seed)
    rates, thresholds, right = _fold_accuracies(values, is_genuine, fold)
    result["accuracy"] = float(rates.mean())
    result["accuracy_error"] = float(rates.std(ddof=1) / len(rates) ** 0.5)
    result["fold_thresholds"] = thresholds
    result["threshold"] = _most_accurate(values, is_genuine)
    if interval:
        ids = None if classes is None else _identities(classes, is_genuine)
        samples = pair_bootstrap.SAMPLES if samples is None else samples
        checks.integer("samples", samples, 1)
        settings = {"samples": samples, "seed": seed, "confidence": confidence, "progress": progress}
        _add_intervals(result, values, is_genuine, ids, fold, right, settings)
    return result


def roc(scores: Values, same: Values) -> Roc:
    """The complete curve: every distinct score is a point."""
    threshold, tp, fp = cumulative_counts(*check_pairs(scores, same))
    return Roc(threshold.astype(np.float64), fp / fp[-1], tp / tp[-1])


def operating_point(scores: Values, same: Values, far: float = 1e-3, *, confidence: float = 0.95) -> OperatingPoint:
    """The least strict threshold whose measured FAR is within `far`: just above the best impostor to reject."""
    points = points_at(*cumulative_counts(*check_pairs(scores, same)), (far,), confidence)
    if not points:
        impostors = int((~check_pairs(scores, same)[1]).sum())
        raise ValueError(f"far must be >= 1/impostors = 1/{impostors} to be measurable, got {far}")
    return points[0]


@takes_arrays
def pair_scores(embeddings: Array, pairs: Array, similarity: str = "cosine") -> Tensor:
    """Similarities (M,), "cosine" or "dot", in the widest type, of embeddings (N, D) at pairs (M, 2) of row numbers.

    The cosine of rows of one direction is exactly 1, so that rounding does not order such pairs.
    """
    checks.rows("embeddings", embeddings)
    checks.one_of("similarity", similarity, ("cosine", "dot"))
    if not isinstance(pairs, Tensor) or pairs.dtype == torch.bool or pairs.is_floating_point() or pairs.is_complex():
        got = pairs.dtype if isinstance(pairs, Tensor) else type(pairs).__name__
        raise TypeError(f"pairs must be a torch tensor of row numbers, got {got}")
    if pairs.dim() != 2 or pairs.shape[1] != 2:
        raise ValueError(f"pairs must have shape (pairs, 2), got {tuple(pairs.shape)}")
    wrong = (pairs < 0) | (pairs >= embeddings.shape[0])
    if bool(wrong.any()):
        raise ValueError(f"pairs must be rows 0..{embeddings.shape[0] - 1} of embeddings, got {int(pairs[wrong][0])}")
    parts = []
    prepare = distances.unit if similarity == "cosine" else distances.upcast
    pairs = pairs.long().to(embeddings.device)
    for start in range(0, len(pairs), _CHUNK):
        chunk = pairs[start : start + _CHUNK]
        left, right = (prepare(embeddings[side].to(distances.wide(embeddings))) for side in chunk.unbind(1))
        score = (left * right).sum(1)
        if similarity == "cosine":
            score = torch.where((left == right).all(1) & (score > 0.5), 1.0, score)
        parts.append(score)
    return torch.cat(parts) if parts else embeddings.new_zeros(0)


def of_other_groups(embeddings: Tensor, pairs: Tensor, classes: Tensor, groups: Tensor) -> Tensor:
    """(M,) which pairs are counted: those of different classes or groups."""
    checks.class_ids("groups", groups, embeddings)
    sides = group_numbers(groups.cpu())[pairs.long().cpu()]
    return torch.ne(classes[:, 0], classes[:, 1]) | torch.ne(sides[:, 0], sides[:, 1])


def _most_accurate(values: NDArray[Any], genuine: NDArray[np.bool_]) -> float:
    threshold, tp, fp = cumulative_counts(values, genuine)
    right = tp - fp  # up to a constant, the pairs classified correctly
    best = np.flatnonzero(right == right.max())
    cut = int(best[(len(best) - 1) // 2])
    if cut == len(threshold) - 1:
        return float(threshold[cut])
    if cut == 0:
        return float(np.nextafter(threshold[1], np.inf, dtype=threshold.dtype))
    high, low = float(threshold[cut]), float(threshold[cut + 1])
    middle = low / 2 + high / 2
    return middle if low < middle <= high else high


def _folds(folds: int | Values, genuine: NDArray[np.bool_], seed: int) -> Counts:
    """The fold of each pair, as passed or made."""
    pairs = len(genuine)
    if isinstance(folds, int):
        checks.integer("folds", folds, 2)
        fold = np.empty(pairs, np.int64)
        fold[shuffled_by_kind(genuine, seed)] = np.arange(pairs) % min(folds, pairs)
        return fold
    numbers = vector("folds", folds)
    if numbers.is_floating_point() or len(numbers) != pairs:
        raise ValueError(
            f"folds must be one whole number per pair: {pairs} pairs, got {len(numbers)} of {numbers.dtype}"
        )
    fold = np.asarray(numbers.long().numpy(), dtype=np.int64)
    if len(np.unique(fold)) < 2:
        raise ValueError("folds must name at least 2 folds, got 1")
    return fold


def _fold_accuracies(
    values: NDArray[Any], genuine: NDArray[np.bool_], fold: Counts
) -> tuple[Floats, list[float], NDArray[np.bool_]]:
    """Accuracy and threshold of each fold, and which pairs were classified correctly."""
    rates, thresholds = [], []
    right = np.empty(len(genuine), dtype=bool)
    for name in np.unique(fold):
        test = fold == name
        thresholds.append(_most_accurate(values[~test], genuine[~test]))
        right[test] = (values[test].astype(np.float64) >= thresholds[-1]) == genuine[test]
        rates.append(right[test].mean())
    return np.array(rates, dtype=np.float64), thresholds, right


def _identities(classes: Values, genuine: NDArray[np.bool_]) -> Counts:
    """Both identities of each pair, (M, 2), equal for genuine pairs and only there."""
    if not isinstance(classes, Tensor | np.ndarray):
        raise TypeError(f"classes must be a torch tensor or a NumPy array, got {type(classes).__name__}")
    ids = np.asarray(classes.detach().cpu().numpy() if isinstance(classes, Tensor) else classes)
    if ids.dtype.kind not in "iu":
        raise TypeError(f"classes must be whole numbers, got {ids.dtype}")
    if ids.shape != (len(genuine), 2):
        raise ValueError(f"classes must have shape (pairs, 2) = ({len(genuine)}, 2), got {ids.shape}")
    if (ids == UNKNOWN).any():
        unknown = int((ids == UNKNOWN).any(axis=1).sum())
        raise ValueError(
            f"classes must be known to be resampled, got -1 (unknown) in {unknown} of {len(genuine)} pairs"
        )
    wrong = int(((ids[:, 0] == ids[:, 1]) != genuine).sum())
    if wrong:
        raise ValueError(f"classes must be equal where pairs are the same and only there, got {wrong} pairs otherwise")
    return ids.astype(np.int64)


def _add_intervals(
    result: Scores[Any],
    values: NDArray[Any],
    is_genuine: NDArray[np.bool_],
    ids: Counts | None,
    fold: Counts,
    right: NDArray[np.bool_],
    settings: dict[str, Any],
) -> None:
    """Fills in `intervals`, and those of the operating points."""
    pairs = pair_bootstrap.SortedPairs(values, is_genuine)
    points: list[OperatingPoint] = result["operating_points"]
    fars, cuts = [point.wanted_far for point in points], [pairs.cut(point.threshold) for point in points]
    number = np.unique(fold, return_inverse=True)[1]
    folds = int(number.max()) + 1
    outcomes = [(number * 2 + right)[kind] for kind in (pairs.genuine, pairs.impostors)]

    def measure(genuine: Floats, impostors: Floats) -> Floats:
        rows = []
        for weights in zip(genuine, impostors, strict=True):
            sums = sum(np.bincount(*kind, minlength=2 * folds) for kind in zip(outcomes, weights, strict=True))
            wrong, hits = np.reshape(sums, (folds, 2)).T
            valid = wrong + hits > 0
            accuracy = (hits[valid] / (wrong + hits)[valid]).mean() if valid.any() else np.nan
            rows.append([accuracy, *pairs.rates(*weights, fars, cuts)])
        return np.array(rows)

    names, cells = ["accuracy", "eer", "auc", *(f"tar@far={far}" for far in fars)], pairs.cells(ids)
    if ids is None:
        ends = pair_bootstrap.by_pairs(measure, cells, **settings)
    else:
        ends = pair_bootstrap.by_classes(measure, cells, steep=range(3, len(names)), **settings)
    result.intervals = dict(zip(names, ends, strict=False))
    pair_bootstrap.drop_unsupported(result, fars, int(cells.class_pair.max()) + 1)
    if ids is not None:
        explain_missing(result, torch.from_numpy(ids))
    elif min(result["genuine"], result["impostors"]) < MIN_CLASSES:
        counts = f"{result['genuine']} genuine and {result['impostors']} impostors"
        result.notes[:] = [f"no intervals: they take at least {MIN_CLASSES} pairs of each kind; got {counts}"]
    result["operating_points"] = pair_bootstrap.with_wider_intervals(points, ends[len(names) :])
