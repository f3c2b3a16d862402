"""Calibration of scores: the probability that a pair is the same, by isotonic regression, tested on other pairs."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin.core import checks
from nearkin.evaluation.arrays import Array, Floats, Values, tensor
from nearkin.evaluation.verification.roc import check_pairs, shuffled_by_kind

__all__ = ["Calibration", "calibrate", "expected_error", "isotonic"]


@dataclass(frozen=True)
class Calibration:
    """A rising curve through (scores, probabilities), linear between its knots and constant beyond them.

    `error` is the expected calibration error on `judged_on` pairs, none of which were among the `fitted_on`.
    """

    scores: tuple[float, ...]
    probabilities: tuple[float, ...]
    error: float
    fitted_on: int
    judged_on: int

    def probability(self, scores: Array) -> Tensor:
        """The probability that a pair of this score is the same; any shape, on the device of the scores."""
        scores = tensor("scores", scores)
        if not isinstance(scores, Tensor) or not scores.is_floating_point():
            got = scores.dtype if isinstance(scores, Tensor) else type(scores).__name__
            raise TypeError(f"scores must be a torch tensor of floats, got {got}")
        dtype = torch.float64 if scores.dtype == torch.float64 else torch.float32
        values = np.interp(scores.detach().to("cpu", torch.float64).numpy(), self.scores, self.probabilities)
        return torch.as_tensor(values, dtype=dtype).to(scores.device)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and lists, ready for JSON."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "Calibration":
        """The inverse of `to_dict`; refuses a curve that decreases."""
        needed = [field.name for field in fields(cls)]
        if set(plain) != set(needed):
            raise ValueError(f"a calibration must have {', '.join(needed)}, got {', '.join(sorted(plain))}")
        x, y = np.array(plain["scores"], np.float64), np.array(plain["probabilities"], np.float64)
        if x.ndim != 1 or x.shape != y.shape or x.size == 0:
            raise ValueError(f"scores and probabilities must be lists of one length, got {x.shape} and {y.shape}")
        if not (np.isfinite(x).all() and (np.diff(x) > 0).all()):
            raise ValueError("scores must be finite and rise")
        if not ((y >= 0).all() and (y <= 1).all() and (np.diff(y) >= 0).all()):
            raise ValueError("probabilities must be in [0, 1] and not fall")
        counts = int(plain["fitted_on"]), int(plain["judged_on"])
        return cls(tuple(x.tolist()), tuple(y.tolist()), float(plain["error"]), *counts)


def calibrate(scores: Values, same: Values, *, held_out: float = 0.5, bins: int = 15, seed: int = 0) -> Calibration:
    """Fits P(same | score) on a `held_out` share of the pairs, and measures its error on the rest.

    scores (M,), same (M,) as in `verification`; at least 2 genuine and 2 impostor pairs, since both kinds are split,
    with `seed`. The error is the expected calibration error over `bins` equal intervals of [0, 1] (Guo et al. 2017,
    eq. 3). The probability is for the share of genuine pairs in these: with more impostors, more scores are falsely
    "same". Isotonic regression of scores: Zadrozny, Elkan 2002.
    """
    values, is_genuine = check_pairs(scores, same)
    checks.between("held_out", held_out, 0, 1)
    checks.integer("bins", bins, 1)
    genuine, impostors = int(is_genuine.sum()), int((~is_genuine).sum())
    if min(genuine, impostors) < 2:
        raise ValueError(f"calibration needs at least 2 genuine and 2 impostor pairs, got {genuine} and {impostors}")
    fit = np.zeros(len(values), dtype=bool)
    order = shuffled_by_kind(is_genuine, seed)
    for kind in (order[:genuine], order[genuine:]):
        fit[kind[: min(max(round(len(kind) * held_out), 1), len(kind) - 1)]] = True
    x, y = isotonic(values[fit], is_genuine[fit])
    tested = is_genuine[~fit]
    error = expected_error(np.interp(values[~fit], x, y), tested, ~tested, len(tested), bins)
    return Calibration(tuple(x.tolist()), tuple(y.tolist()), error, int(fit.sum()), int((~fit).sum()))


def isotonic(values: NDArray[Any], genuine: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Knots of the least-squares rising curve through 0/1 outcomes: first and last score of every level.

    Pools adjacent violators over the distinct scores, comparing in whole numbers. O(M log M) for the sort, O(M) after.
    """
    distinct, index = np.unique(values.astype(np.float64), return_inverse=True)
    number = np.bincount(index)
    hits = np.bincount(index[genuine], minlength=len(distinct))
    blocks: list[tuple[int, int, int]] = []  # first distinct score, hits, pairs
    for first, (hit, pairs) in enumerate(zip(hits.tolist(), number.tolist(), strict=True)):
        while blocks and blocks[-1][1] * pairs >= hit * blocks[-1][2]:
            first, hit, pairs = blocks[-1][0], blocks[-1][1] + hit, blocks[-1][2] + pairs
            blocks.pop()
        blocks.append((first, hit, pairs))
    start = np.array([block[0] for block in blocks])
    stop = np.append(start[1:], len(distinct)) - 1
    level = np.array([hit / pairs for _, hit, pairs in blocks])
    ends = np.stack([start, stop], axis=1).ravel()
    keep = np.append(True, ends[1:] != ends[:-1])  # a level of one score is one knot
    return distinct[ends[keep]], np.repeat(level, 2)[keep]


def expected_error(probability: Floats, same: NDArray[Any], other: NDArray[Any], total: float, bins: int = 15) -> float:
    """Expected calibration error of P(same): Guo et al. 2017, eq. 3.

    same, other: how many pairs of each kind, or their weights, have each probability; together `total`.
    """
    bin_of = np.minimum((probability * bins).astype(np.int64), bins - 1)
    weight = np.add(same, other, dtype=np.float64)
    gap = np.bincount(bin_of, weights=probability * weight - same, minlength=bins)  # per bin, weighted
    return float(np.abs(gap).sum() / total)
