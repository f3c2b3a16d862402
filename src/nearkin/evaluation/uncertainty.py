"""How far a mean over queries can be trusted, and whether two differ: classes are what chance drew, not items.

Queries of one class succeed and fail together, so that resampling items would promise too much. A resample draws as
many classes as there are, with replacement, and each brings all its queries (the cluster bootstrap; Davison, Hinkley
1997, section 3.8). Unseen classes are what a metric is reported for, and this is their spread. The embeddings and
their rankings stay as they are: of the network's training the interval says nothing.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin.core import checks
from nearkin.core.relations import UNKNOWN, Labels, Relation
from nearkin.evaluation.arrays import Array, Ids, takes_arrays
from nearkin.samplers import draws

Floats = NDArray[np.float64]

_RESAMPLES, _FLIPS = 18, 19  # streams of words beside those the samplers draw from
_CELLS = 2**21  # (sample, class) cells at a time: some 50 MiB
_EXACT = 16  # classes whose 2^16 signs are all tried


class Scores(dict[str, float]):
    """Metrics by name; `intervals`: 95 % intervals by the same names, where they were asked for."""

    intervals: dict[str, tuple[float, float]]

    def __init__(self, values: Mapping[str, float] | None = None) -> None:
        super().__init__(values or {})
        self.intervals = {}


@takes_arrays
def bootstrap(
    values: Array, groups: Ids, *, samples: int = 1000, seed: int = 0, confidence: float = 0.95
) -> tuple[float, float]:
    """Percentile interval of the mean of `values` (Q,), resampling the classes `groups` (Q,).

    A value that is NaN does not count, nor one of class -1; classes without a value are not drawn. With fewer than two
    classes nothing is known of their spread: (nan, nan). With few classes it is too narrow, as percentiles are: of 95 %
    intervals, where class means are normal, about 95 in 100 hold the truth with 100 classes, 94 with 30, 89 with 10.
    """
    values = _checked("values", values, groups)
    checks.whole("samples", samples, 1)
    checks.whole("seed", seed, 0)
    checks.between("confidence", confidence, 0, 1)
    sums, counts = _by_class(values, groups)
    return _interval(sums, counts, samples, seed, confidence)


@takes_arrays
def compare(
    a: Array,
    b: Array,
    groups: Ids,
    *,
    samples: int = 10_000,
    seed: int = 0,
    confidence: float = 0.95,
) -> dict[str, Any]:
    """Whether the mean of a (Q,) or of b (Q,) is larger, values of the same queries of classes `groups` (Q,).

    "a", "b", "difference" (a - b), means over the queries where both count; "interval": of the difference, both taken
    in the same resample of classes; "p": how often the difference is as far from 0, either side, when a and b trade
    places in every class by the toss of a coin: all 2^C tosses up to 16 classes that differ, beyond that `samples` of
    them, the one seen included. "classes", "queries": how many were compared. "verdict": "a" or "b" where the interval
    leaves out 0 and p <= 1 - confidence, else "undecided". The second condition is for few classes: any two that agree
    leave out 0, and prove nothing.
    """
    a, b = _checked("a", a, groups), _checked("b", b, groups)
    checks.same_shape("b", b, a, "a")
    checks.whole("samples", samples, 1)
    checks.whole("seed", seed, 0)
    checks.between("confidence", confidence, 0, 1)
    both = ~(a.isnan() | b.isnan()) & (groups.cpu() != UNKNOWN)
    a, b, groups = a[both], b[both], groups.cpu()[both]
    sums, counts = _by_class(a - b, groups)
    low, high = _interval(sums, counts, samples, seed, confidence)
    p = _sign_flips(sums, samples, seed)
    better = "a" if low > 0 else "b" if high < 0 else "undecided"
    return {
        "a": _mean(a),
        "b": _mean(b),
        "difference": _mean(a - b),
        "interval": (low, high),
        "p": p,
        "classes": len(sums),
        "queries": len(a),
        "verdict": better if p <= 1 - confidence else "undecided",
    }


def classes_of(labels: Labels, queries: int) -> Tensor:
    """What to resample, (Q,) on the CPU: the classes, also of a relation that has them, else each query on its own."""
    ids = labels.ids if isinstance(labels, Relation) else labels
    if isinstance(ids, Tensor) and ids.dtype != torch.bool:
        return ids.detach().long().cpu()
    return torch.arange(queries)


def resamples(classes: int, samples: int, seed: int, stream: int = _RESAMPLES) -> Iterator[Floats]:
    """How often each class is drawn, (some samples, C), until all samples were; each sample has a stream of its own."""
    step = max(1, _CELLS // classes)
    for start in range(0, samples, step):
        some = range(start, min(start + step, samples))
        words = np.stack([draws.words(classes, seed, stream, sample) for sample in some])
        drawn = ((words >> np.uint64(11)) * 2.0**-53 * classes).astype(np.int64)
        drawn += np.arange(len(some))[:, None] * classes
        yield np.bincount(drawn.ravel(), minlength=len(some) * classes).reshape(len(some), classes).astype(np.float64)


def percentiles(found: Floats, confidence: float) -> tuple[float, float]:
    """The middle `confidence` of what the resamples gave."""
    low, high = np.quantile(found, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def _checked(name: str, values: Tensor, groups: Tensor) -> Tensor:
    if not isinstance(values, Tensor) or not values.is_floating_point() or values.dim() != 1:
        got = f"{values.dtype} {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        raise TypeError(f"{name} must be a floating point tensor of shape (queries,), got {got}")
    checks.class_ids("groups", groups, values, name)
    return values.detach().double().cpu()


def _by_class(values: Tensor, groups: Tensor) -> tuple[Floats, Floats]:
    """Sums and counts (C,) of the values that count, in the order of the class ids."""
    groups = groups.cpu()
    counted = ~values.isnan() & (groups != UNKNOWN)
    place = torch.unique(groups[counted], return_inverse=True)[1].numpy()
    sums, counts = np.bincount(place, values[counted].numpy()), np.bincount(place)
    return sums.astype(np.float64), counts.astype(np.float64)


def _interval(sums: Floats, counts: Floats, samples: int, seed: int, confidence: float) -> tuple[float, float]:
    if len(sums) < 2:
        return math.nan, math.nan
    table = np.stack([sums, counts], axis=1)  # (C, 2)
    totals = np.concatenate([drawn @ table for drawn in resamples(len(sums), samples, seed)])  # (samples, 2)
    return percentiles(totals[:, 0] / totals[:, 1], confidence)


def _sign_flips(sums: Floats, samples: int, seed: int) -> float:
    """How often a sum with random signs is as far from 0 as the sum itself."""
    sums = sums[sums != 0]
    seen = abs(math.fsum(sums)) - 1e-12 * float(np.abs(sums).sum())  # rounding does not decide
    if len(sums) <= _EXACT:
        every = np.zeros(1)
        for part in sums:
            every = np.concatenate([every + part, every - part])
        return float((np.abs(every) >= seen).mean())
    reached, step = 1, max(1, _CELLS // len(sums))
    for start in range(0, samples, step):
        some = range(start, min(start + step, samples))
        words = np.stack([draws.words(-(-len(sums) // 64), seed, _FLIPS, sample) for sample in some])
        bits = np.unpackbits(words.astype("<u8").view(np.uint8), axis=1, count=len(sums))
        reached += int((np.abs((1 - 2.0 * bits) @ sums) >= seen).sum())
    return reached / (samples + 1)


def _mean(values: Tensor) -> float:
    return math.fsum(values.tolist()) / len(values) if len(values) else math.nan
