"""SoftTriple: softmax over classes of several centres each, the near ones weighted most."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from nearkin.core import checks, class_softmax, distances, reduce
from nearkin.core.autograd import HandGradient, device_type, gradients_again, recomputed, traced
from nearkin.losses import class_shards, logits
from nearkin.losses.call import ClassCall, again_plainly
from nearkin.losses.class_shards import Shard
from nearkin.losses.module import LossModule
from nearkin.losses.proxy import init_proxies

__all__ = ["SoftTripleLoss", "soft_triple_loss"]

NEVER_ZERO = 1e-5  # added to a squared distance of centres, as in the released code


def soft_triple_loss(
    embeddings: Tensor,
    labels: Tensor,
    centers: Tensor,
    *,
    centers_per_class: int = 10,
    scale: float = 20.0,
    gamma: float = 0.1,
    margin: float = 0.01,
    tau: float = 0.2,
    reduction: str = "mean",
    impl: str = "auto",
    max_memory: int | None = None,
    shard: Shard | None = None,
) -> Tensor:
    r"""Softmax over classes of several centres, the near ones weighted most.

    S_ic = Σ_k softmax_k(s_ick / γ) s_ick,   l_i = -log softmax_y( λ (S_ic - δ [c = y]) )  + τ R,   s = cosine
    R = Σ_c Σ_{k<k'} |w_ck - w_ck'| / (C K (K-1)), which draws the centres of a class together

    centers (C·K, D), K in a row for each class; labels (B,) in 0..C-1, -1 left out. λ = `scale`, δ = `margin`.
    Qian et al. 2019, arXiv:1909.05235, eq. 7-10; K 10, λ 20, γ 0.1, δ 0.01, τ 0.2 from there. Each
    distance in R is √(|w - w'|² + 1e-5), as in the released code; R is once in each item's term. Beyond
    `max_memory` bytes (without it, beyond a modest size) blocks of classes pass by, and again for the gradient. impl:
    "triton" takes kernels where all similarities fit, "auto" does on a GPU, "torch" never. shard as in
    `normalized_softmax_loss`.
    """
    checks.integer("centers_per_class", centers_per_class, 1)
    checks.positive("scale", scale)
    checks.positive("gamma", gamma)
    checks.number("margin", margin)
    checks.at_least("tau", tau, 0)
    call = ClassCall(embeddings, labels, centers, reduction, impl, max_memory, shard, centers_per_class)
    settings: dict[str, Any] = {"scale": scale, "gamma": gamma, "margin": margin, "tau": tau}
    choices: dict[str, Any] = {"centers_per_class": centers_per_class, "reduction": reduction}
    again = partial(again_plainly, soft_triple_loss, labels, **settings, **choices)
    if (fused := call.soft_triple_kernel(**settings, again=again)) is not None:
        return fused
    call.check_labels()
    ids, known, addend = call.ids, call.known, call.addend
    if not class_softmax.fits(embeddings, centers, max_memory):
        size = class_softmax.block(embeddings, centers, centers_per_class, max_memory)
        numbers = (centers_per_class, scale, gamma, margin)
        value, drawn = _soft_triple_blocks(embeddings, ids, centers, *numbers, size, shard)
    else:
        w = distances.unit(centers)
        similarity = _soft_maximum(distances.unit(embeddings), w, centers_per_class, gamma)  # (B, C)
        own = class_shards.clamped(shard, ids)[:, None]
        plain = similarity.gather(1, own)
        target = plain - margin if shard is None else torch.where(ids[:, None] < shard.number, plain - margin, plain)
        value = class_shards.cross_entropy(shard, scale * similarity.scatter(1, own, target), ids)
        drawn = _within_class(w.view(-1, centers_per_class, w.shape[1])) if centers_per_class > 1 else w.new_zeros(())
    value = value + addend.to(value.dtype)
    if tau and centers_per_class > 1:
        part = 1.0 if shard is None else shard.number / shard.total
        value = value + tau * class_shards.sum_over_processes(shard, drawn * part)[0]
    return reduce.terms(value, known, reduction) + reduce.taint(embeddings) + class_shards.taint(shard, centers)


def _soft_maximum(x: Tensor, w: Tensor, per_class: int, gamma: float) -> Tensor:
    """S_ic of `soft_triple_loss`, (B, C), from unit rows."""
    classes = len(w) // per_class
    if traced():
        cosine = distances.dot(x, w).view(len(x), classes, per_class)  # (B, C, K)
        return ((cosine / gamma).softmax(2) * cosine).sum(2)
    # Classes last: a CPU sums over so few centres in vectors of classes, and over the last of (B, C, K) one by one.
    first_centers_first = w.view(classes, per_class, w.shape[1]).transpose(0, 1).reshape(w.shape)
    cosine = distances.dot(x, first_centers_first).view(len(x), per_class, classes)  # (B, K, C)
    value: Tensor = _SoftMaximum.call(cosine, gamma)
    return value


class _SoftMaximum(HandGradient):
    """Σ_k softmax_k(c / γ) c_k over the second of (B, K, C), with the gradient by hand: p (1 + (c - S) / γ)."""

    @staticmethod
    def forward(ctx: Any, cosine: Tensor, gamma: float) -> Tensor:
        share = (cosine - cosine.amax(1, keepdim=True)).div_(gamma).exp_()
        total = share.sum(1)
        value = (share * cosine).sum(1) / total
        ctx.save_for_backward(cosine, share, total, value)
        ctx.gamma = gamma
        return value

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        cosine, share, total, value = ctx.saved_tensors
        if torch.is_grad_enabled():  # a gradient of the gradient is wanted: through the cosines
            share = torch.softmax(cosine / ctx.gamma, 1)
            value = (share * cosine).sum(1, keepdim=True)
            return (1 + (cosine - value) / ctx.gamma) * share * upstream[:, None], None
        rise = (cosine - value[:, None]).mul_(share).add_(share, alpha=ctx.gamma)
        return rise.mul_((upstream / (total * ctx.gamma))[:, None]), None


def _soft_triple_blocks(
    embeddings: Tensor,
    ids: Tensor,
    centers: Tensor,
    per_class: int,
    scale: float,
    gamma: float,
    margin: float,
    size: int,
    shard: Shard | None,
) -> tuple[Tensor, Tensor]:
    """The terms (B,) of `soft_triple_loss` and the R of these centres; a block is recomputed for its gradient."""
    x, classes = distances.unit(embeddings), len(centers) // per_class

    def block(x: Tensor, part: Tensor, start: int) -> tuple[Tensor, Tensor]:
        w = distances.unit(part)
        scores = scale * _soft_maximum(x, w, per_class, gamma)
        others = (ids - start)[:, None] != torch.arange(scores.shape[1], device=ids.device)
        parts = w.view(-1, per_class, w.shape[1])
        drawn = _within_class(parts) * (len(parts) / classes) if per_class > 1 else w.new_zeros(())
        return reduce.logsumexp(scores, others), drawn

    blocks, start = [], 0
    for part in torch.split(centers, size):
        blocks.append(recomputed(block, x, part, start))
        start += len(part) // per_class
    push = torch.stack([rivals for rivals, _ in blocks], 1)  # (B, blocks)
    push = reduce.logsumexp(push, push.detach() > reduce.log_zero(push))
    rows = class_shards.clamped(shard, ids)[:, None] * per_class + torch.arange(per_class, device=ids.device)
    own = distances.unit(centers[rows.flatten()]).view(len(ids), per_class, x.shape[1])
    cosine = (own * x[:, None, :]).sum(2)  # (B, K)
    target = scale * (((cosine / gamma).softmax(1) * cosine).sum(1) - margin)
    push, target = class_shards.join_logsumexp(shard, ids, push, target)
    return reduce.softplus(push - target), torch.stack([drawn for _, drawn in blocks]).sum()


def _within_class(w: Tensor) -> Tensor:
    """Mean distance of unit centres (C, K, D) to the others of their class, halved."""
    value: Tensor = _plain_within_class(w) if traced() else _WithinClass.call(w)
    return value


def _plain_within_class(w: Tensor) -> Tensor:
    """`_WithinClass` in autograd's steps."""
    classes, centers, _ = w.shape
    with torch.autocast(device_type(w), enabled=False):
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
        with torch.autocast(device_type(w), enabled=False):
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
        with torch.autocast(device_type(w), enabled=False):
            by_centers: Tensor = torch.baddbmm(w * inverse.sum(2, keepdim=True), inverse, w, alpha=-1)
        return by_centers.mul_(upstream / (classes * centers * (centers - 1)))


class SoftTripleLoss(LossModule, function=soft_triple_loss):
    """`soft_triple_loss` with its centres (C·K, D). `lr_scale` 100 from the released code.

    shard as in `NormalizedSoftmaxLoss`.
    """

    lr_scale = 100.0

    def __init__(
        self,
        num_classes: int,
        dim: int,
        margin: float = 0.01,
        scale: float = 20.0,
        *,
        centers_per_class: int = 10,
        gamma: float = 0.1,
        tau: float = 0.2,
        reduction: str = "mean",
        impl: str = "auto",
        max_memory: int | None = None,
        shard: bool = False,
    ) -> None:
        super().__init__()
        checks.integer("centers_per_class", centers_per_class, 1)
        self.shard = class_shards.make_shard(shard, num_classes)
        self.centers = init_proxies(num_classes * centers_per_class, dim, self.shard, centers_per_class)
        class_shards.register(self, centers=centers_per_class)
        self.num_classes, self.dim, self.margin, self.scale = num_classes, dim, margin, scale
        self.centers_per_class, self.gamma, self.tau = centers_per_class, gamma, tau
        self.reduction, self.impl, self.max_memory = reduction, impl, max_memory
        self.finish_init()

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        embeddings, labels, shard = class_shards.gather_batch(self.shard, embeddings, labels, self.centers.shape[1])
        return soft_triple_loss(embeddings, labels, self.centers, shard=shard, **self.arguments())

    def get_logits(self, embeddings: Tensor) -> Tensor:
        """λ S of every class, (B, C), its centres weighed as in the loss, without the margin; differentiable."""
        x = logits.checked(self, embeddings, self.centers)
        centers = distances.unit(self.centers)
        similarity = _soft_maximum(distances.unit(x), centers, self.centers_per_class, self.gamma)
        return similarity * self.scale + logits.nan_rows(x)
