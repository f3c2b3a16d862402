"""Center loss: softmax over classes, with every item drawn to the running centre of its class."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from nearkin.core import checks, distances, reduce
from nearkin.losses.settings import hold, show

__all__ = ["CenterLoss", "center_loss", "center_update"]


def center_loss(
    embeddings: Tensor,
    labels: Tensor,
    weight: Tensor,
    bias: Tensor,
    centers: Tensor,
    *,
    pull: float = 0.003,
    reduction: str = "mean",
) -> Tensor:
    r"""Softmax tells the classes apart, the centres keep each one together.

    l_i = -log softmax_y(W x_i + b) + λ/2 |x_i - c_y|²,   λ = `pull`

    embeddings (B, D), labels (B,) in 0..C-1, -1 left out; weight (C, D), bias (C,), centers (C, D). Both terms are
    reduced alike. O(B·D) beside the softmax. Centres get no gradient: they move by `center_update`.
    Wen et al. 2016, eq. 5; λ 0.003 from there (the released code: 0.008).
    """
    ids, known, spoilt = checks.classes(embeddings, labels, *weight.shape)
    checks.at_least("pull", pull, 0)
    x = distances.upcast(embeddings)
    logits = distances.dot(x, weight) + bias  # (B, C)
    apart = (x - centers.detach()[ids]).square().sum(1)
    value = cross_entropy(logits, ids, reduction="none") + spoilt.to(logits.dtype) + pull / 2 * apart
    return reduce.terms(value, known, reduction) + reduce.taint(embeddings, weight, bias)


@torch.no_grad()
def center_update(embeddings: Tensor, labels: Tensor, centers: Tensor, *, alpha: float = 0.5) -> Tensor:
    r"""The centres after one step: c_j - α Σ_{i of j} (c_j - x_i) / (1 + n_j).

    Not the gradient: it knows no λ, is divided by 1 + n_j, and has its own rate. Rows with NaN or Inf do not count.
    Wen et al. 2016, eq. 4; α 0.5 from there.
    """
    ids, known, _ = checks.classes(embeddings, labels, *centers.shape)
    known = known & (labels < centers.shape[0]) & (labels >= 0)
    x = distances.upcast(embeddings).to(centers.dtype)
    known = known & x.isfinite().all(1) & embeddings.isfinite().all(1)
    towards = torch.where(known[:, None], x - centers[ids], 0.0)
    step = torch.zeros_like(centers).index_add_(0, ids, towards)
    number = torch.zeros_like(centers[:, 0]).index_add_(0, ids, known.to(centers.dtype))
    return centers + alpha * step / (1 + number)[:, None]


class CenterLoss(nn.Module):
    """`center_loss` with its classifier (weight, bias), and centres, a buffer that each training step moves."""

    lr_scale = 1.0
    settings: dict[str, Any]
    centers: Tensor

    def __init__(
        self, num_classes: int, dim: int, pull: float = 0.003, alpha: float = 0.5, *, reduction: str = "mean"
    ) -> None:
        super().__init__()
        checks.whole("num_classes", num_classes, 1)
        checks.whole("dim", dim, 1)
        checks.at_least("alpha", alpha, 0)
        self.weight = nn.Parameter(torch.randn(num_classes, dim) / math.sqrt(dim))
        self.bias = nn.Parameter(torch.zeros(num_classes))
        self.register_buffer("centers", torch.zeros(num_classes, dim))
        self.alpha = alpha
        hold(self, center_loss, self.weight, self.bias, self.centers, pull=pull, reduction=reduction)

    extra_repr = show

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        value = center_loss(embeddings, labels, self.weight, self.bias, self.centers, **self.settings)
        if self.training:
            self.centers = center_update(embeddings, labels, self.centers, alpha=self.alpha)
        return value
