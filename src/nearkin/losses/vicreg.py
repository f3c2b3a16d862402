"""VICReg: positives close, and neither collapse nor redundancy, by the variance and covariance of each side."""

from __future__ import annotations  # torch 2.6 compiles no function within one whose annotations it evaluates

import torch
from torch import Tensor

from nearkin.core import blockwise, distances, reduce
from nearkin.core.autograd import full_precision
from nearkin.losses.engine import Call, PairLoss, Rows, function_of
from nearkin.losses.settings import Range, setting

__all__ = ["VICRegLoss", "vicreg_loss"]


class VICRegLoss(PairLoss):
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

    takes_batch_first = False  # which references are used is asked of each of them
    measure = "squared"

    invariance_weight: float = setting(
        was="invariance",
        default=25.0,
        at_least=0,
        kw_only=False,
        search=Range(1.0, 100.0, log=True),
        text="λ, the weight of the distance between positives; 25: the paper's",
    )
    variance_weight: float = setting(
        was="variance",
        default=25.0,
        at_least=0,
        kw_only=False,
        search=Range(1.0, 100.0, log=True),
        text="μ, the weight of the dimensions' deviations below γ; 25: the paper's",
    )
    covariance_weight: float = setting(
        was="covariance",
        default=1.0,
        at_least=0,
        kw_only=False,
        search=Range(0.1, 10.0, log=True),
        text="ν, the weight of the covariances between dimensions; 1: the paper's",
    )
    deviation: float = setting(
        default=1.0, above=0, text="γ, the standard deviation that every dimension is to reach; 1: the paper's"
    )
    epsilon: float = setting(default=1e-4, above=0, text="ε, added to variances under the root; 1e-4: the paper's")
    reduction = max_memory = None  # type: ignore[assignment]

    def value(self, call: Call) -> Tensor:
        batch, dim = call.batch, max(1, call.batch.embeddings.shape[1])

        def rows(rows: Rows) -> tuple[Tensor, ...]:
            return blockwise.sums_and_counts(rows.all() / dim, rows.positive, "mean")

        sums, counts, _ = call.run(rows)
        value = self.invariance_weight * reduce.total(sums, counts, counts, "mean")
        sides = [(batch.embeddings, counts > 0)]
        if batch.references is not None:
            [used] = call.across(lambda rows: (reduce.any_in_row(rows.positive),))
            sides.append((batch.references, used))
        for x, used in sides:
            spread, redundancy = _statistics(x, used, self.deviation, self.epsilon)
            part = self.variance_weight * spread / 2 + self.covariance_weight * redundancy
            most = torch.finfo(value.dtype).max / 8  # the fourth power of a length may not fit the type of the loss
            value = value + part.clamp(max=most).to(value.dtype) * (2 // len(sides))
        return value + call.taint()


vicreg_loss = function_of(VICRegLoss, "vicreg_loss")


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
    with full_precision(x):
        square = centred.to(narrow.dtype)
        square = square.T @ square / degrees.to(narrow.dtype)  # (D, D)
    size = square.detach().abs().sum().clamp(min=torch.finfo(square.dtype).tiny)  # of which squares are finite
    alike = (square / size).square() * ~torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
    spread, redundancy = hinge.sum() / dim, alike.sum() * size.to(kind).square() / dim
    return torch.where(number > 0, spread, 0.0), torch.where(number > 0, redundancy, 0.0)
