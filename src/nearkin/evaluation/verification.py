"""Verification: are two items the same? Rates and thresholds from scores of genuine and impostor pairs.

Scores are similarities: larger is more alike, and a pair counts as the same from the threshold on, score >= t.

    FAR(t) = impostors with score >= t / impostors        TAR(t) = genuine with score >= t / genuine

Everything but the thresholds depends on the order of the scores alone, and all counting is exact.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin.core import checks, distances
from nearkin.evaluation import intervals

__all__ = ["FARS", "OperatingPoint", "Roc", "operating_point", "pair_scores", "roc", "verification"]

FARS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
_CHUNK = 1 << 16  # pairs whose embeddings are gathered at once

Floats: TypeAlias = NDArray[np.float64]
Counts: TypeAlias = NDArray[np.int64]
Values: TypeAlias = Tensor | NDArray[Any]


class Roc(NamedTuple):
    """The curve, one point a distinct score, falling, after a first point (0, 0) at threshold +inf."""

    threshold: Floats
    far: Floats
    tar: Floats


class OperatingPoint(NamedTuple):
    """A threshold to ship: "same" at score >= threshold, and what was measured there, with binomial intervals.

    The intervals (Clopper-Pearson) hold for independent pairs. The threshold was chosen on the same impostors; being
    an order statistic of them, its true FAR has a beta law that the interval covers.
    """

    wanted_far: float
    threshold: float
    far: float
    far_interval: tuple[float, float]
    tar: float
    tar_interval: tuple[float, float]
    confidence: float


def verification(
    scores: Values | None = None,
    same: Values | None = None,
    *,
    embeddings: Tensor | None = None,
    pairs: Tensor | None = None,
    fars: Sequence[float] = FARS,
    folds: int | Values = 10,
    seed: int = 0,
    confidence: float = 0.95,
) -> dict[str, Any]:
    """How well scores (M,) tell same from different pairs; `same` (M,) is bool or 0/1.

    In place of scores: embeddings (N, D) with pairs (M, 2) of row numbers, scored by `pair_scores`. Returns

    - "eer": where FAR and FRR = 1 - TAR cross on the straight lines between the curve's points; "auc": its area, ties
      counting half; "genuine", "impostors": how many pairs;
    - "tar@far=0.001", one a FAR f, written as Python writes f: the best TAR over all thresholds with FAR <= f. Nothing
      is interpolated. An f below 1/impostors cannot be measured: its value is None and f is in "not_measurable";
    - "operating_points": the rest as `OperatingPoint`, least strict first;
    - "accuracy", "accuracy_error": mean over folds and its standard error, the threshold of each fold chosen for
      accuracy on the others (the protocol of LFW, Huang et al. 2007); "fold_thresholds". `folds` is a fold number a
      pair, or how many folds to deal with `seed`, each kind evenly (fewer where there are fewer pairs);
    - "threshold": chosen for accuracy on all pairs, halfway between two neighbouring scores. Of equally accurate cuts
      the middle one is taken, the stricter of two middle ones.

    Accuracy and its threshold depend on the share of genuine pairs; TAR, FAR and EER do not.
    """
    if embeddings is not None or pairs is not None:
        if scores is not None or embeddings is None or pairs is None:
            raise ValueError("verification needs either scores, or embeddings and pairs; got a mixture")
        scores = pair_scores(embeddings, pairs)
    values, kin = checked(scores, same)
    curve, tp, fp = _curve(values, kin)
    genuine, impostors = int(tp[-1]), int(fp[-1])
    found: dict[str, Any] = {"genuine": genuine, "impostors": impostors}
    found["auc"] = float(np.dot(np.diff(fp), tp[1:] + tp[:-1]) / (2 * genuine * impostors))
    crossing = int(np.argmax(crossed(tp, fp, genuine, impostors)))  # never 0
    found["eer"] = eer(tp[crossing - 1 : crossing + 1], fp[crossing - 1 : crossing + 1], genuine, impostors)
    found |= at_fars(fars, _points(curve, tp, fp, fars, confidence))
    fold = _folds(folds, kin, seed)
    rates, thresholds = _fold_accuracies(values, kin, fold)
    found["accuracy"] = float(rates.mean())
    found["accuracy_error"] = float(rates.std(ddof=1) / len(rates) ** 0.5)
    found["fold_thresholds"] = thresholds
    found["threshold"] = _most_accurate(values, kin)
    return found


def roc(scores: Values, same: Values) -> Roc:
    """The whole curve: every distinct score is a point, none is dropped."""
    threshold, tp, fp = _curve(*checked(scores, same))
    return Roc(threshold.astype(np.float64), fp / fp[-1], tp / tp[-1])


def operating_point(scores: Values, same: Values, far: float = 1e-3, *, confidence: float = 0.95) -> OperatingPoint:
    """The least strict threshold whose measured FAR is within `far`: just above the best impostor it must refuse."""
    points = _points(*_curve(*checked(scores, same)), (far,), confidence)
    if not points:
        impostors = int((~checked(scores, same)[1]).sum())
        raise ValueError(f"far must be >= 1/impostors = 1/{impostors} to be measurable, got {far}")
    return points[0]


def pair_scores(embeddings: Tensor, pairs: Tensor) -> Tensor:
    """Cosine similarities (M,), in the widest type, of embeddings (N, D) at pairs (M, 2) of row numbers."""
    checks.rows("embeddings", embeddings)
    if not isinstance(pairs, Tensor) or pairs.dtype == torch.bool or pairs.is_floating_point() or pairs.is_complex():
        got = pairs.dtype if isinstance(pairs, Tensor) else type(pairs).__name__
        raise TypeError(f"pairs must be a torch tensor of row numbers, got {got}")
    if pairs.dim() != 2 or pairs.shape[1] != 2:
        raise ValueError(f"pairs must have shape (pairs, 2), got {tuple(pairs.shape)}")
    wrong = (pairs < 0) | (pairs >= embeddings.shape[0])
    if bool(wrong.any()):
        raise ValueError(f"pairs must be rows 0..{embeddings.shape[0] - 1} of embeddings, got {int(pairs[wrong][0])}")
    parts = []
    pairs = pairs.long().to(embeddings.device)
    for start in range(0, len(pairs), _CHUNK):
        chunk = pairs[start : start + _CHUNK]
        one, other = (distances.unit(embeddings[side].to(distances.wide(embeddings))) for side in chunk.unbind(1))
        parts.append((one * other).sum(1))
    return torch.cat(parts) if parts else embeddings.new_zeros(0)


def checked(scores: object, same: object) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Scores in float32 or float64 and who is kin, on the CPU; both kinds present, all finite, -0 made 0."""
    values, kin = _vector("scores", scores), _vector("same", same)
    if not values.is_floating_point():
        raise TypeError(f"scores must be floating point, got {values.dtype}")
    if kin.is_floating_point() or kin.is_complex():
        raise TypeError(f"same must be bool or 0/1 whole numbers, got {kin.dtype}")
    if len(values) != len(kin):
        raise ValueError(f"same must have one entry a score: {len(values)} scores, {len(kin)} entries")
    if bool(((kin != 0) & (kin != 1)).any()):
        raise ValueError(f"same must be bool or 0/1 whole numbers, got {int(kin[(kin != 0) & (kin != 1)][0])}")
    wrong = int((~values.isfinite()).sum())
    if wrong:
        raise ValueError(f"scores must be finite, got NaN or Inf in {wrong} of {len(values)} pairs")
    both(int(kin.sum()), len(kin) - int(kin.sum()))
    if values.dtype not in (torch.float32, torch.float64):
        values = values.float()
    return values.numpy() + values.new_zeros(()).numpy(), kin.bool().numpy()


def both(genuine: int, impostors: int) -> None:
    """Neither rate exists without its kind of pair."""
    if genuine < 1 or impostors < 1:
        raise ValueError(
            f"verification needs at least one genuine and one impostor pair, got {genuine} genuine and "
            f"{impostors} impostors"
        )


def measurable(fars: Iterable[float], impostors: int) -> list[float]:
    """The FARs that so many impostors can show, largest first."""
    known = sorted({float(far) for far in fars}, reverse=True)
    for far in known:
        checks.between("fars", far, 0, 1)
    return [far for far in known if far >= 1 / impostors]


def most_accepted(far: float, impostors: int) -> int:
    """The largest number k of impostors with k / impostors <= far, as floats compare."""
    k = int(far * impostors) + 1
    while k / impostors > far:
        k -= 1
    return k


def crossed(tp: Counts, fp: Counts, genuine: int, impostors: int) -> NDArray[np.bool_]:
    """Where FAR has reached FRR."""
    return np.asarray(fp / impostors >= (genuine - tp) / genuine)


def eer(tp: Sequence[int] | Counts, fp: Sequence[int] | Counts, genuine: int, impostors: int) -> float:
    """Where the line between the last point before the crossing and the first point from it on has FAR = FRR."""
    # In whole numbers: d = FAR - FRR in units of 1 / (genuine · impostors).
    (tp0, tp1), (fp0, fp1) = map(int, tp), map(int, fp)
    d0 = fp0 * genuine - (genuine - tp0) * impostors
    d1 = fp1 * genuine - (genuine - tp1) * impostors
    return (fp0 * d1 - fp1 * d0) / ((d1 - d0) * impostors)


def point(
    far: float, threshold: float, tp: int, fp: int, genuine: int, impostors: int, confidence: float
) -> OperatingPoint:
    """What was counted at a threshold, with the intervals of both rates."""
    return OperatingPoint(
        far,
        threshold,
        fp / impostors,
        intervals.binomial(fp, impostors, confidence),
        tp / genuine,
        intervals.binomial(tp, genuine, confidence),
        confidence,
    )


def at_fars(fars: Iterable[float], points: list[OperatingPoint]) -> dict[str, Any]:
    """The part of a report that lists the wanted FARs, measurable or not."""
    tar = {found.wanted_far: found.tar for found in points}
    wanted = [float(far) for far in fars]
    found: dict[str, Any] = {f"tar@far={far}": tar.get(far) for far in wanted}
    return found | {"not_measurable": [far for far in wanted if far not in tar], "operating_points": points}


def deal(kin: NDArray[np.bool_], seed: int) -> NDArray[np.intp]:
    """A shuffled order of the pairs, genuine first: every k-th of it has its share of both kinds."""
    draw = np.random.default_rng(seed)
    return np.concatenate([draw.permutation(np.flatnonzero(kin)), draw.permutation(np.flatnonzero(~kin))])


def _vector(name: str, value: object) -> Tensor:
    if not isinstance(value, Tensor | np.ndarray):
        raise TypeError(f"{name} must be a torch tensor or a NumPy array, got {type(value).__name__}")
    if value.ndim != 1:
        raise ValueError(f"{name} must have shape (pairs,), got {tuple(value.shape)}")
    return torch.as_tensor(value if isinstance(value, Tensor) else np.array(value)).detach().cpu()


def _curve(values: NDArray[Any], kin: NDArray[np.bool_]) -> tuple[NDArray[Any], Counts, Counts]:
    """Distinct scores, falling, and the genuine and impostors at or above each; all after a point of none."""
    order = np.argsort(-values, kind="stable")
    falling = values[order]
    last = np.append(np.flatnonzero(falling[1:] != falling[:-1]), len(falling) - 1)  # of every run of equals
    tp = np.cumsum(kin[order], dtype=np.int64)[last]
    start = np.zeros(1, np.int64)
    threshold = np.concatenate([np.full(1, np.inf, values.dtype), falling[last]])
    return threshold, np.concatenate([start, tp]), np.concatenate([start, last + 1 - tp])


def _points(
    curve: NDArray[Any], tp: Counts, fp: Counts, fars: Iterable[float], confidence: float
) -> list[OperatingPoint]:
    genuine, impostors = int(tp[-1]), int(fp[-1])
    points = []
    for far in measurable(fars, impostors):
        cut = int(np.searchsorted(fp, most_accepted(far, impostors), side="right")) - 1  # the last point within the FAR
        above = float(np.nextafter(curve[cut + 1], np.inf, dtype=curve.dtype))
        points.append(point(far, above, int(tp[cut]), int(fp[cut]), genuine, impostors, confidence))
    return points


def _most_accurate(values: NDArray[Any], kin: NDArray[np.bool_]) -> float:
    threshold, tp, fp = _curve(values, kin)
    right = tp - fp  # up to a constant, the pairs judged rightly
    best = np.flatnonzero(right == right.max())
    cut = int(best[(len(best) - 1) // 2])
    if cut == len(threshold) - 1:
        return float(threshold[cut])
    if cut == 0:
        return float(np.nextafter(threshold[1], np.inf, dtype=threshold.dtype))
    high, low = float(threshold[cut]), float(threshold[cut + 1])
    middle = low / 2 + high / 2
    return middle if low < middle <= high else high


def _folds(folds: int | Values, kin: NDArray[np.bool_], seed: int) -> NDArray[np.int64]:
    if isinstance(folds, int):
        checks.whole("folds", folds, 2)
        fold = np.empty(len(kin), np.int64)
        fold[deal(kin, seed)] = np.arange(len(kin)) % min(folds, len(kin))
        return fold
    given = _vector("folds", folds)
    if given.is_floating_point() or len(given) != len(kin):
        raise ValueError(f"folds must be a whole number a pair: {len(kin)} pairs, got {len(given)} of {given.dtype}")
    fold = np.asarray(given.long().numpy(), dtype=np.int64)
    if len(np.unique(fold)) < 2:
        raise ValueError("folds must name at least 2 folds, got 1")
    return fold


def _fold_accuracies(
    values: NDArray[Any], kin: NDArray[np.bool_], fold: NDArray[np.int64]
) -> tuple[Floats, list[float]]:
    rates, thresholds = [], []
    for name in np.unique(fold):
        held = fold == name
        thresholds.append(_most_accurate(values[~held], kin[~held]))
        rates.append(((values[held].astype(np.float64) >= thresholds[-1]) == kin[held]).mean())
    return np.array(rates, dtype=np.float64), thresholds
