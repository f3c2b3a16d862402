"""Center loss: softmax over classes, with every item drawn to the running centre of its class."""

from __future__ import annotations  # torch 2.6 compiles no function within one whose annotations it evaluates

from collections.abc import Callable

import torch
from torch import Tensor, nn

from nearkin.core import distances, reduce
from nearkin.core.autograd import refuse_transforms
from nearkin.losses import class_shards, logits
from nearkin.losses.class_shards import Shard
from nearkin.losses.classes import ClassCall, ClassLoss, function_of
from nearkin.losses.settings import Range, setting

__all__ = ["CenterLoss", "center_loss", "center_update"]


class CenterLoss(ClassLoss):
    r"""Softmax separates the classes, the centres keep each one together.

    l_i = -log softmax_y(W x_i + b) + λ/2 |x_i - c_y|²,   λ = `center_weight`

    W (C, D) and b (C,) are learned; the centres (C, D), a buffer, get no gradient: each training step moves them by
    `center_update`. They begin at 0, to which they draw the embeddings at first, or with start="first" at the mean of
    the class's items in the first batch that has any; no run told the two apart (docs/measured/losses.md). Both terms
    are reduced alike. All else as in `NormalizedSoftmaxLoss`.
    Wen et al. 2016, eq. 5; λ 0.003 and α 0.5 from there (the released code: λ 0.008).
    """

    kernel = None  # type: ignore[assignment]  # it knows no biases
    tensors = ("weight", "bias", "centers")
    unit_anchors = unit_weights = False

    center_weight: float = setting(
        default=0.003,
        at_least=0,
        kw_only=False,
        was="pull",
        search=Range(1e-4, 0.1, log=True),
        text="λ, of the distances to the centres; 0.003: the paper's",
    )
    alpha: float = setting(
        default=0.5, at_least=0, kw_only=False, only="class", text="α, how fast the centres move; 0.5: the paper's"
    )

    start: str = setting(
        default="zeros",
        choices=("zeros", "first"),
        fixed=True,
        only="class",
        text='where a centre begins: "zeros", the paper\'s; "first": at the mean of the class\'s first items',
    )

    def make(self) -> None:
        super().make()
        self.bias = nn.Parameter(torch.zeros(len(self.weight)))
        self.register_buffer("centers", torch.zeros_like(self.weight, requires_grad=False))
        shares = {"weight": 1, "bias": 1, "centers": 1}
        if self.start == "first":
            self.register_buffer("seen", torch.zeros(len(self.weight), dtype=torch.bool))
            shares["seen"] = 1
        class_shards.register(self, **shares)

    def value(self, call: ClassCall) -> Tensor:
        rivals = call.rivals()
        value = call.entropy(rivals, rivals.own)
        return call.reduced(value + self.center_weight / 2 * self._distance(call))

    def _distance(self, call: ClassCall) -> Tensor:
        """|x_i - c_y|², (B,), from the process that holds the centre."""
        centers, shard, ids = call.tensors["centers"].detach(), call.given["shard"], call.ids
        if call.labels is not call.given["labels"]:  # classes are sampled
            ids = class_shards.local_ids(call.embeddings, call.given["labels"], centers, shard)[0]
        distance = (distances.upcast(call.x) - centers[class_shards.clamped(shard, ids)]).square().sum(1)
        if shard is None:
            return distance
        return class_shards.sum_over_processes(shard, torch.where(ids < shard.number, distance, 0.0))[0]

    def prepare(self, call: ClassCall) -> None:
        if self.training:
            refuse_transforms("CenterLoss")
        if self.training and self.start == "first":
            self._begin(call)

    @torch.no_grad()
    def _begin(self, call: ClassCall) -> None:
        """Puts the centres of classes that are met for the first time in the middle of their items."""
        total, number = _sums(call.embeddings, call.given["labels"], self.centers, call.given["shard"])
        first = (number > 0) & ~self.seen
        self.centers = torch.where(first[:, None], total / number.clamp(min=1)[:, None], self.centers)
        self.seen = self.seen | first
        call.tensors = {**call.tensors, "centers": self.centers}
        class_shards.mark(self)

    def learn(self, call: ClassCall) -> None:
        task = (call.embeddings, call.given["labels"], self.centers)
        self.centers = center_update(*task, alpha=self.alpha, shard=call.given["shard"])
        class_shards.mark(self)

    def get_logits(self, embeddings: Tensor) -> Tensor:
        """W x + b of every class, (B, C); differentiable."""
        return distances.dot(logits.checked(self, embeddings, self.weight), self.weight) + self.bias

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> CenterLoss:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        class_shards.mark(self)  # a buffer that is moved or cast is another tensor
        return self


@torch.no_grad()
def center_update(
    embeddings: Tensor, labels: Tensor, centers: Tensor, *, alpha: float = 0.5, shard: Shard | None = None
) -> Tensor:
    r"""The centres after one step: c_j - α Σ_{i of j} (c_j - x_i) / (1 + n_j).

    Not the gradient: it knows no λ, is divided by 1 + n_j, and has its own rate. Rows with NaN or Inf do not count.
    Wen et al. 2016, eq. 4; α 0.5 from there.
    """
    total, number = _sums(embeddings, labels, centers, shard)
    return centers + alpha * (total - number[:, None] * centers) / (1 + number)[:, None]


def _sums(embeddings: Tensor, labels: Tensor, centers: Tensor, shard: Shard | None) -> tuple[Tensor, Tensor]:
    """The sum of each class's items of the batch, (C, D), and their number, (C,)."""
    ids, known, _ = class_shards.local_ids(embeddings, labels, centers, shard)
    known = known & (labels < (shard.total if shard else centers.shape[0])) & (labels >= 0) & (ids < centers.shape[0])
    ids = class_shards.clamped(shard, ids)
    x = distances.upcast(embeddings).to(centers.dtype)
    known = known & ~reduce.any_in_row(~(x.isfinite() & embeddings.isfinite()))
    total = torch.zeros_like(centers).index_add_(0, ids, torch.where(known[:, None], x, 0.0))
    return total, torch.zeros_like(centers[:, 0]).index_add_(0, ids, known.to(centers.dtype))


center_loss = function_of(CenterLoss, "center_loss")
