"""VICReg: positives close, and neither collapse nor redundancy, by the variance and covariance of each side."""

from __future__ import annotations  # torch 2.6 compiles no function within one whose annotations it evaluates

import torch
from torch import Tensor

from nearkin.core import blockwise, checks, distances, reduce
from nearkin.core.autograd import device_type
from nearkin.core.relations import Labels, Relation
from nearkin.losses.call import PairCall
from nearkin.losses.module import LossModule

__all__ = ["VICRegLoss", "vicreg_loss"]


def vicreg_loss(
    embeddings: Tensor,
    labels: Labels,
    references: Tensor | None = None,
    reference_labels: Labels | None = None,
    *,
    invariance: float = 25.0,
    variance: float = 25.0,
    covariance: float = 1.0,
    deviation: float = 1.0,
    epsilon: float = 1e-4,
) -> Tensor:
    r"""Positives at the same place, every dimension spread out, no two dimensions alike; no negatives are needed.

    L = λ mean |z_i - z_p|² / D + μ/2 [v(Z) + v(Z')] + ν [c(Z) + c(Z')],  v(Z) = mean_j [γ - √(Var_j + ε)]₊,
    c(Z) = Σ_{j≠k} Cov_jk² / D

    The mean is over positive pairs. Z are the anchors, Z' the references, or the batch itself where there are none: one
    view as embeddings and the other as references, under a label per item, is the paper's setting. Embeddings of free
    length: on the unit sphere no dimension reaches γ. Items without a positive do not count. Var and Cov divide by
    n - 1. c grows with the fourth power of lengths; what float32 cannot hold, from lengths of 1e9 on, is cut to 4e37.
    Needs two items per class, or references. See also `infonce_loss`. Bardes et al. 2022, arXiv:2105.04906, eq. 1 to 6;
    λ = μ = 25, ν = 1, and the factors 1/D and 1/2, from its released code.
    """
    for name, weight in (("invariance", invariance), ("variance", variance), ("covariance", covariance)):
        checks.at_least(name, weight, 0)
    checks.positive("deviation", deviation)
    checks.positive("epsilon", epsilon)
    call = PairCall(embeddings, labels, references, reference_labels, "mean")
    batch, dim = call.batch, max(1, embeddings.shape[1])

    def rows(x: Tensor, references: Tensor | None, relation: Relation) -> tuple[Tensor, ...]:
        apart = distances.squared_euclidean(x, references) / dim
        return blockwise.sums_and_counts(apart, relation.positive, "mean")

    def any_positive(_: Tensor, __: Tensor | None, relation: Relation) -> tuple[Tensor]:
        return (reduce.any_in_row(relation.positive),)

    sums, counts, _ = call.run(rows)
    value = invariance * reduce.total(sums, counts, counts, "mean")
    sides = [(batch.embeddings, counts > 0)]
    if batch.references is not None:
        [used] = blockwise.run(any_positive, blockwise.transposed(batch), max_memory=None)
        sides.append((batch.references, used))
    for x, used in sides:
        spread, redundancy = _statistics(x, used, deviation, epsilon)
        part = variance * spread / 2 + covariance * redundancy
        most = torch.finfo(value.dtype).max / 8  # the fourth power of a length may not fit the type of the loss
        value = value + part.clamp(max=most).to(value.dtype) * (2 // len(sides))
    return value + call.taint()


def _statistics(x: Tensor, used: Tensor, deviation: float, epsilon: float) -> tuple[Tensor, Tensor]:
    """v and c of the used rows; 0 where there are none."""
    narrow, kind = distances.upcast(x), distances.wide(x)
    bound = torch.finfo(kind).max ** (1 / 6)  # squares of covariances stay finite
    wide = narrow.to(kind).clamp(-bound, bound)
    number = used.sum()
    mean = torch.where(used[:, None], wide, 0.0).sum(0) / number.clamp(min=1)
    centred = torch.where(used[:, None], wide - mean, 0.0)  # (n, D)
    degrees = (number - 1).clamp(min=1)
    hinge = (deviation - (centred.square().sum(0) / degrees + epsilon).sqrt()).relu()
    dim = max(1, x.shape[1])
    with torch.autocast(device_type(x), enabled=False):
        square = centred.to(narrow.dtype)
        square = square.T @ square / degrees.to(narrow.dtype)  # (D, D)
    size = square.detach().abs().sum().clamp(min=torch.finfo(square.dtype).tiny)  # of which squares are finite
    alike = (square / size).square() * ~torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
    spread, redundancy = hinge.sum() / dim, alike.sum() * size.to(kind).square() / dim
    return torch.where(number > 0, spread, 0.0), torch.where(number > 0, redundancy, 0.0)


class VICRegLoss(LossModule, function=vicreg_loss):
    """Holds the settings of `vicreg_loss`; computes nothing itself."""

    takes_batch_first = False  # which references are used is asked of each of them

    def __init__(
        self,
        invariance: float = 25.0,
        variance: float = 25.0,
        covariance: float = 1.0,
        *,
        deviation: float = 1.0,
        epsilon: float = 1e-4,
    ) -> None:
        super().__init__()
        self.invariance, self.variance, self.covariance = invariance, variance, covariance
        self.deviation, self.epsilon = deviation, epsilon
        self.finish_init()
