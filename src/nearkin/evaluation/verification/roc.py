"""Counting pairs of both kinds along their scores: the curve, its rates, and thresholds to ship.

Scores are similarities: larger is more alike, and a pair counts as the same from the threshold on, score >= t.

    FAR(t) = impostors with score >= t / impostors        TAR(t) = genuine with score >= t / genuine
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin.core import checks
from nearkin.evaluation.statistics import binomial

FARS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)

Floats: TypeAlias = NDArray[np.float64]
Counts: TypeAlias = NDArray[np.int64]
Values: TypeAlias = Tensor | NDArray[Any]
Ends: TypeAlias = tuple[float, float]


class Verified(dict[str, Any]):
    """What `verification` and `all_pairs` found, by name; `intervals`: (low, high) by the same names, if asked for."""

    intervals: dict[str, Ends]

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        super().__init__(values or {})
        self.intervals = {}


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


def checked(scores: object, same: object) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Scores in float32 or float64 and who is kin, on the CPU; both kinds present, all finite, -0 made 0."""
    values, kin = vector("scores", scores), vector("same", same)
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


def vector(name: str, value: object) -> Tensor:
    if not isinstance(value, Tensor | np.ndarray):
        raise TypeError(f"{name} must be a torch tensor or a NumPy array, got {type(value).__name__}")
    if value.ndim != 1:
        raise ValueError(f"{name} must have shape (pairs,), got {tuple(value.shape)}")
    return torch.as_tensor(value if isinstance(value, Tensor) else np.array(value)).detach().cpu()


def deal(kin: NDArray[np.bool_], seed: int) -> NDArray[np.intp]:
    """A shuffled order of the pairs, genuine first: every k-th of it has its share of both kinds."""
    draw = np.random.default_rng(seed)
    return np.concatenate([draw.permutation(np.flatnonzero(kin)), draw.permutation(np.flatnonzero(~kin))])


def counted(values: NDArray[Any], kin: NDArray[np.bool_]) -> tuple[NDArray[Any], Counts, Counts]:
    """Distinct scores, falling, and the genuine and impostors at or above each; all after a point of none."""
    order = np.argsort(-values, kind="stable")
    falling = values[order]
    last = np.append(np.flatnonzero(falling[1:] != falling[:-1]), len(falling) - 1)  # of every run of equals
    tp = np.cumsum(kin[order], dtype=np.int64)[last]
    start = np.zeros(1, np.int64)
    threshold = np.concatenate([np.full(1, np.inf, values.dtype), falling[last]])
    return threshold, np.concatenate([start, tp]), np.concatenate([start, last + 1 - tp])


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
        binomial.binomial(fp, impostors, confidence),
        tp / genuine,
        binomial.binomial(tp, genuine, confidence),
        confidence,
    )


def points_at(
    curve: NDArray[Any], tp: Counts, fp: Counts, fars: Iterable[float], confidence: float
) -> list[OperatingPoint]:
    genuine, impostors = int(tp[-1]), int(fp[-1])
    points = []
    for far in measurable(fars, impostors):
        cut = int(np.searchsorted(fp, most_accepted(far, impostors), side="right")) - 1  # the last point within the FAR
        above = float(np.nextafter(curve[cut + 1], np.inf, dtype=curve.dtype))
        points.append(point(far, above, int(tp[cut]), int(fp[cut]), genuine, impostors, confidence))
    return points


def at_fars(fars: Iterable[float], points: list[OperatingPoint]) -> dict[str, Any]:
    """The part of a report that lists the wanted FARs, measurable or not."""
    tar = {found.wanted_far: found.tar for found in points}
    wanted = [float(far) for far in fars]
    found: dict[str, Any] = {f"tar@far={far}": tar.get(far) for far in wanted}
    return found | {"not_measurable": [far for far in wanted if far not in tar], "operating_points": points}
