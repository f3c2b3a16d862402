"""Center loss: softmax over classes, with every item drawn to the running centre of its class."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from nearkin.core import checks, distances, reduce
from nearkin.core.autograd import refuse_transforms
from nearkin.losses import call, class_shards, logits
from nearkin.losses.class_shards import Shard
from nearkin.losses.module import LossModule
from nearkin.losses.softmax import class_weight

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
    impl: str = "auto",
    shard: Shard | None = None,
) -> Tensor:
    r"""Softmax separates the classes, the centres keep each one together.

    l_i = -log softmax_y(W x_i + b) + λ/2 |x_i - c_y|²,   λ = `pull`

    embeddings (B, D), labels (B,) in 0..C-1, -1 left out; weight (C, D), bias (C,), centers (C, D). Both terms are
    reduced alike. O(B·D) beside the softmax. Centres get no gradient: they move by `center_update`.
    impl and shard as in `normalized_softmax_loss`, the shard of biases and centres too; all logits are in memory.
    Wen et al. 2016, eq. 5; λ 0.003 from there (the released code: 0.008).
    """
    checks.at_least("pull", pull, 0)

    def again(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        inputs = (x, labels, w, bias if b is None else b, centers)
        return center_loss(*inputs, pull=pull, reduction=reduction, impl=call.PLAIN)

    task = (embeddings, labels, weight, bias, centers, pull, reduction, impl, shard)
    if (fused := call.center_kernel(*task, again)) is not None:
        return fused
    ids, known, addend = class_shards.local_ids(embeddings, labels, weight, shard)
    x = distances.upcast(embeddings)
    scores = distances.dot(x, weight) + bias  # (B, C)
    distance = (x - centers.detach()[class_shards.clamped(shard, ids)]).square().sum(1)
    if shard is not None:
        distance = torch.where(ids < shard.number, distance, 0.0)
    distance, taint = class_shards.sum_over_processes(shard, distance, torch.as_tensor(reduce.taint(weight, bias)))
    value = class_shards.cross_entropy(shard, scores, ids) + addend.to(scores.dtype) + pull / 2 * distance
    return reduce.terms(value, known, reduction) + reduce.taint(embeddings) + taint


@torch.no_grad()
def center_update(
    embeddings: Tensor,
    labels: Tensor,
    centers: Tensor,
    *,
    alpha: float = 0.5,
    impl: str = "auto",
    shard: Shard | None = None,
) -> Tensor:
    r"""The centres after one step: c_j - α Σ_{i of j} (c_j - x_i) / (1 + n_j).

    Not the gradient: it knows no λ, is divided by 1 + n_j, and has its own rate. Rows with NaN or Inf do not count.
    Wen et al. 2016, eq. 4; α 0.5 from there.
    """
    if (moved := call.center_step_kernel(embeddings, labels, centers, alpha, impl, shard)) is not None:
        return moved
    ids, known, _ = class_shards.local_ids(embeddings, labels, centers, shard)
    known = known & (labels < (shard.total if shard else centers.shape[0])) & (labels >= 0) & (ids < centers.shape[0])
    ids = class_shards.clamped(shard, ids)
    x = distances.upcast(embeddings).to(centers.dtype)
    known = known & ~reduce.any_in_row(~(x.isfinite() & embeddings.isfinite()))
    towards = torch.where(known[:, None], x - centers[ids], 0.0)
    step = torch.zeros_like(centers).index_add_(0, ids, towards)
    number = torch.zeros_like(centers[:, 0]).index_add_(0, ids, known.to(centers.dtype))
    return centers + alpha * step / (1 + number)[:, None]


class CenterLoss(LossModule, function=center_loss):
    """`center_loss` with its classifier (weight, bias), and centres, a buffer that each training step moves.

    shard as in `NormalizedSoftmaxLoss`.
    """

    centers: Tensor

    def __init__(
        self,
        num_classes: int,
        dim: int,
        pull: float = 0.003,
        alpha: float = 0.5,
        *,
        reduction: str = "mean",
        impl: str = "auto",
        shard: bool = False,
    ) -> None:
        super().__init__()
        self.shard = class_shards.make_shard(shard, num_classes)
        self.weight = class_weight(num_classes, dim, self.shard)
        self.bias = nn.Parameter(torch.zeros(len(self.weight)))
        self.register_buffer("centers", torch.zeros_like(self.weight, requires_grad=False))
        class_shards.register(self, weight=1, bias=1, centers=1)
        self.num_classes, self.dim, self.pull, self.alpha = num_classes, dim, pull, alpha
        self.reduction, self.impl = reduction, impl
        self.finish_init()

    def check_settings(self) -> None:
        checks.at_least("alpha", self.alpha, 0)
        super().check_settings()

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        if self.training:
            refuse_transforms("CenterLoss")
        embeddings, labels, shard = class_shards.gather_batch(self.shard, embeddings, labels, self.weight.shape[1])
        learned = (self.weight, self.bias, self.centers)
        value = center_loss(embeddings, labels, *learned, shard=shard, **self.arguments())
        if self.training:
            self.centers = center_update(
                embeddings, labels, self.centers, alpha=self.alpha, impl=self.impl, shard=shard
            )
            class_shards.mark(self)
        return value

    def get_logits(self, embeddings: Tensor) -> Tensor:
        """W x + b of every class, (B, C); differentiable."""
        return distances.dot(logits.checked(self, embeddings, self.weight), self.weight) + self.bias

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "CenterLoss":
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        class_shards.mark(self)  # a buffer that is moved or cast is another tensor
        return self
