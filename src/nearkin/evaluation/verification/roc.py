"""The ROC curve of scored pairs: counts of both kinds along the scores, rates, and operating points.

Scores are similarities: larger is more alike, and a pair counts as the same from the threshold on, score >= t.

    FAR(t) = impostors with score >= t / impostors        TAR(t) = genuine with score >= t / genuine
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin.core import checks
from nearkin.evaluation.arrays import Counts, Ends, Floats
from nearkin.evaluation.statistics import binomial

__all__ = [
    "FARS", "OperatingPoint", "Roc", "check_pairs", "cumulative_counts", "eer", "far_entries", "far_reaches_frr",
    "measurable", "most_accepted", "point", "points_at", "require_both_kinds", "shuffled_by_kind", "vector",
]  # fmt: skip

FARS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)


class Roc(NamedTuple):
    """The curve, one point per distinct score, falling, after a first point (0, 0) at threshold +inf."""

    threshold: Floats
    far: Floats
    tar: Floats


class OperatingPoint(NamedTuple):
    """A threshold to use, "same" at score >= threshold, with the rates measured there and their binomial intervals.

    The intervals (Clopper-Pearson) are for independent pairs. The threshold was chosen on the same impostors; it is an
    order statistic of them, so its true FAR has a beta distribution, which the interval covers.
    """

    wanted_far: float
    threshold: float
    far: float
    far_interval: Ends
    tar: float
    tar_interval: Ends
    confidence: float


def check_pairs(scores: object, same: object) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Scores in float32 or float64 and which pairs are the same; both kinds present, all finite, -0 made 0."""
    values, genuine = vector("scores", scores), vector("same", same)
    if not values.is_floating_point():
        raise TypeError(f"scores must be floating point, got {values.dtype}")
    if genuine.is_floating_point() or genuine.is_complex():
        raise TypeError(f"same must be bool or 0/1 whole numbers, got {genuine.dtype}")
    if len(values) != len(genuine):
        raise ValueError(f"same must have one entry per score: {len(values)} scores, {len(genuine)} entries")
    invalid = (genuine != 0) & (genuine != 1)
    if bool(invalid.any()):
        raise ValueError(f"same must be bool or 0/1 whole numbers, got {int(genuine[invalid][0])}")
    wrong = int((~values.isfinite()).sum())
    if wrong:
        raise ValueError(f"scores must be finite, got NaN or Inf in {wrong} of {len(values)} pairs")
    require_both_kinds(int(genuine.sum()), len(genuine) - int(genuine.sum()))
    if values.dtype not in (torch.float32, torch.float64):
        values = values.float()
    return values.numpy() + values.new_zeros(()).numpy(), genuine.bool().numpy()


def require_both_kinds(genuine: int, impostors: int) -> None:
    """TAR needs genuine pairs, FAR impostors."""
    if genuine < 1 or impostors < 1:
        raise ValueError(
            f"verification needs at least one genuine and one impostor pair, got {genuine} genuine and "
            f"{impostors} impostors"
        )


def vector(name: str, value: object) -> Tensor:
    if not isinstance(value, Tensor | np.ndarray):
        raise TypeError(f"{name} must be a torch tensor or a NumPy array, got {type(value).__name__}")
    if value.ndim != 1:
        raise ValueError(f"{name} must have shape (pairs,), got {tuple(value.shape)}")
    return torch.as_tensor(value if isinstance(value, Tensor) else np.array(value)).detach().cpu()


def shuffled_by_kind(genuine: NDArray[np.bool_], seed: int) -> NDArray[np.intp]:
    """A shuffled order of the pairs, genuine first: taking every k-th splits both kinds evenly."""
    draw = np.random.default_rng(seed)
    return np.concatenate([draw.permutation(np.flatnonzero(genuine)), draw.permutation(np.flatnonzero(~genuine))])


def cumulative_counts(values: NDArray[Any], genuine: NDArray[np.bool_]) -> tuple[NDArray[Any], Counts, Counts]:
    """Distinct scores, falling, and the genuine and impostors at or above each; preceded by (inf, 0, 0)."""
    order = np.argsort(-values, kind="stable")
    falling = values[order]
    last = np.append(np.flatnonzero(falling[1:] != falling[:-1]), len(falling) - 1)  # of every run of equals
    tp = np.cumsum(genuine[order], dtype=np.int64)[last]
    start = np.zeros(1, np.int64)
    threshold = np.concatenate([np.full(1, np.inf, values.dtype), falling[last]])
    return threshold, np.concatenate([start, tp]), np.concatenate([start, last + 1 - tp])


def measurable(fars: Iterable[float], impostors: int) -> list[float]:
    """The FARs that this many impostors can show, largest first."""
    distinct = sorted({float(far) for far in fars}, reverse=True)
    for far in distinct:
        checks.between("fars", far, 0, 1)
    return [far for far in distinct if far >= 1 / impostors]


def most_accepted(far: float, impostors: int) -> int:
    """The largest number k of impostors with k / impostors <= far, as floats compare."""
    k = int(far * impostors) + 1
    while k / impostors > far:
        k -= 1
    return k


def far_reaches_frr(tp: Counts, fp: Counts, genuine: int, impostors: int) -> NDArray[np.bool_]:
    """Where FAR >= FRR."""
    return np.asarray(fp / impostors >= (genuine - tp) / genuine)


def eer(tp: Sequence[int] | Counts, fp: Sequence[int] | Counts, genuine: int, impostors: int) -> float:
    """FAR = FRR on the line between the last point before the crossing and the first one from there on."""
    # In whole numbers: d = FAR - FRR in units of 1 / (genuine · impostors).
    (tp0, tp1), (fp0, fp1) = map(int, tp), map(int, fp)
    d0 = fp0 * genuine - (genuine - tp0) * impostors
    d1 = fp1 * genuine - (genuine - tp1) * impostors
    return (fp0 * d1 - fp1 * d0) / ((d1 - d0) * impostors)


def point(
    far: float, threshold: float, tp: int, fp: int, genuine: int, impostors: int, confidence: float
) -> OperatingPoint:
    """The rates at a threshold, from counts, with their intervals."""
    counts = ((fp, impostors), (tp, genuine))
    far_interval, tar_interval = (binomial.binomial(accepted, pairs, confidence) for accepted, pairs in counts)
    return OperatingPoint(far, threshold, fp / impostors, far_interval, tp / genuine, tar_interval, confidence)


def points_at(
    curve: NDArray[Any], tp: Counts, fp: Counts, fars: Iterable[float], confidence: float
) -> list[OperatingPoint]:
    """The operating points at the FARs that can be measured, from the counts along a curve."""
    genuine, impostors = int(tp[-1]), int(fp[-1])
    points = []
    for far in measurable(fars, impostors):
        cut = int(np.searchsorted(fp, most_accepted(far, impostors), side="right")) - 1  # the last point within the FAR
        above = float(np.nextafter(curve[cut + 1], np.inf, dtype=curve.dtype))
        points.append(point(far, above, int(tp[cut]), int(fp[cut]), genuine, impostors, confidence))
    return points


def far_entries(fars: Iterable[float], points: list[OperatingPoint]) -> dict[str, Any]:
    """The entries of a result for the FARs in question, measurable or not."""
    tar, fars = {reached.wanted_far: reached.tar for reached in points}, [float(far) for far in fars]
    entries: dict[str, Any] = {f"tar@far={far}": tar.get(far) for far in fars}
    return entries | {"not_measurable": [far for far in fars if far not in tar], "operating_points": points}
