"""SoftTriple: softmax over classes of several centres each, the near ones weighted most."""

from __future__ import annotations  # torch 2.6 compiles no function within one whose annotations it evaluates

from typing import Any

import torch
from torch import Tensor

from nearkin.core import class_blocks, class_scores, distances
from nearkin.core.autograd import HandGradient, full_precision, gradients_again, recomputed, traced
from nearkin.core.class_blocks import Form
from nearkin.losses import class_shards, logits
from nearkin.losses.classes import ClassCall, function_of
from nearkin.losses.proxy import ProxyLoss
from nearkin.losses.settings import Range, setting

__all__ = ["SoftTripleLoss", "soft_triple_loss"]

NEVER_ZERO = 1e-5  # added to a squared distance of centres, as in the released code


class SoftTripleLoss(ProxyLoss):
    r"""Softmax over classes of several centres, the near ones weighted most.

    S_ic = Σ_k softmax_k(s_ick / γ) s_ick,   l_i = -log softmax_y( λ (S_ic - δ [c = y]) )  + τ R,   s = cosine
    R = Σ_c Σ_{k<k'} |w_ck - w_ck'| / (C K (K-1)), which draws the centres of a class together

    Centres (C·K, D), K in a row for each class; labels (B,) in 0..C-1, -1 left out. λ = `scale`, δ = `margin`,
    γ = `temperature`, τ = `spread_weight`. Each distance in R is √(|w - w'|² + 1e-5), as in the released code; R is
    once in each item's term. All else as in `NormalizedSoftmaxLoss`. `lr_scale` 100 from the released code.
    Qian et al. 2019, arXiv:1909.05235, eq. 7-10; K 10, λ 20, γ 0.1, δ 0.01, τ 0.2 from there.
    """

    lr_scale = 100.0
    weight_was = "centers"
    kernel = None  # type: ignore[assignment]  # it knows one centre of a class

    margin: float = setting(
        default=0.01, kw_only=False, search=Range(0.001, 0.2, log=True), text="δ, a margin of cosine; 0.01: the paper's"
    )
    scale: float = setting(
        default=20.0, above=0, kw_only=False, search=Range(8.0, 64.0, log=True), text="λ; 20: the paper's"
    )
    centers_per_class: int = setting(default=10, whole=True, fixed=True, text="K; 10: the paper's")
    temperature: float = setting(
        default=0.1,
        above=0,
        was="gamma",
        search=Range(0.03, 0.5, log=True),
        text="γ, between a class's centres; 0.1: the paper's",
    )
    spread_weight: float = setting(
        default=0.2, at_least=0, was="tau", text="τ, of what draws a class's centres together; 0.2: the paper's"
    )

    @property
    def per_class(self) -> int:  # type: ignore[override]
        return self.centers_per_class

    def value(self, call: ClassCall) -> Tensor:
        rivals = call.rivals(self.scale, several="soft", temperature=self.temperature)
        value = call.entropy(rivals, self.scale * (rivals.own - self.margin))
        if self.spread_weight and self.per_class > 1:
            part = 1.0 if call.shard is None else call.shard.number / call.shard.total
            drawn = class_shards.sum_over_processes(call.shard, self._spread(call) * part)[0]
            value = value + self.spread_weight * drawn
        return call.reduced(value)

    def _spread(self, call: ClassCall) -> Tensor:
        """The R of these centres; in blocks of classes each is recomputed for its gradient."""
        if call.fits():
            rows = call.rows[1]
            return _within_class(rows.view(-1, self.per_class, rows.shape[1]))
        number = len(call.weight)
        size = class_blocks.block(call.x, call.weight, Form(centers=self.per_class, several="soft"), self.max_memory)

        def block(part: Tensor) -> Tensor:
            rows = distances.unit(part).view(-1, self.per_class, part.shape[1])
            return _within_class(rows) * (len(part) / number)

        parts = [recomputed(block, part) for part in torch.split(call.weight, size)]
        return torch.stack(parts).sum() if parts else call.weight.sum()

    def get_logits(self, embeddings: Tensor) -> Tensor:
        """λ S of every class, (B, C), its centres weighed as in the loss, without the margin; differentiable."""
        x = logits.checked(self, embeddings, self.weight)
        products = class_scores.cosines(distances.unit(x), distances.unit(self.weight), self.per_class)
        similarity = class_scores.soft_maximum(products, self.temperature)
        return similarity * self.scale + logits.nan_rows(x)


def _within_class(w: Tensor) -> Tensor:
    """Mean distance of unit centres (C, K, D) to the others of their class, halved."""
    value: Tensor = _plain_within_class(w) if traced() else _WithinClass.call(w)
    return value


def _plain_within_class(w: Tensor) -> Tensor:
    """`_WithinClass` in autograd's steps."""
    classes, centers, _ = w.shape
    with full_precision(w):
        gram = w @ w.mT  # (C, K, K)
    upper = torch.ones(centers, centers, dtype=torch.bool, device=w.device).triu(1)
    square = (w * w).sum(2)  # not the diagonal: a compiler may overwrite a matrix while a view of it is still used
    squared = (square[:, :, None] + square[:, None, :] - 2 * gram).clamp(min=0)
    apart = torch.where(upper, squared + NEVER_ZERO, 1.0).sqrt()
    return torch.where(upper, apart, 0.0).sum() / (classes * centers * (centers - 1))


class _WithinClass(HandGradient):
    """With a hand-written gradient: by a centre the sum of its directions from the others, two products."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        classes, centers, _ = w.shape
        square = (w * w).sum(2)
        with full_precision(w):
            squared = torch.baddbmm(square[:, :, None] + square[:, None, :], w, w.mT, alpha=-2)  # (C, K, K)
        apart = squared.clamp_(min=0).add_(NEVER_ZERO).sqrt_()
        ctx.save_for_backward(w, apart)
        return (apart.sum() - apart.diagonal(dim1=1, dim2=2).sum()) / (2 * classes * centers * (centers - 1))

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        w, apart = ctx.saved_tensors
        if torch.is_grad_enabled():  # for a second derivative
            return gradients_again(_plain_within_class, (w,), (True,), upstream)[0]  # type: ignore[return-value]
        classes, centers, _ = w.shape
        inverse = apart.reciprocal()
        inverse.diagonal(dim1=1, dim2=2).zero_()
        with full_precision(w):
            by_centers: Tensor = torch.baddbmm(w * inverse.sum(2, keepdim=True), inverse, w, alpha=-1)
        return by_centers.mul_(upstream / (classes * centers * (centers - 1)))


soft_triple_loss = function_of(SoftTripleLoss, "soft_triple_loss")
