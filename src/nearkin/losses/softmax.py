"""Class softmax on the sphere without a margin: normalised, heated-up, and with an adaptive scale."""

from __future__ import annotations  # torch 2.6 compiles no function within one whose annotations it evaluates

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm

from nearkin.core import checks, distances, reduce
from nearkin.core.autograd import differentiable_once, refuse_transforms
from nearkin.losses import class_shards, logits
from nearkin.losses.class_shards import Shard
from nearkin.losses.classes import ClassCall, ClassLoss, function_of
from nearkin.losses.settings import Range, setting

__all__ = [
    "AdaCosLoss",
    "HeatedSoftmaxLoss",
    "NormalizedSoftmaxLoss",
    "adacos_loss",
    "adacos_scale",
    "heated_softmax_loss",
    "normalized_softmax_loss",
]


class NormalizedSoftmaxLoss(ClassLoss):
    r"""Softmax over scaled cosines to the class weights.

    l_i = -log( e^{s cos_iy} / Σ_c e^{s cos_ic} )

    embeddings (B, D), labels (B,) in 0..C-1, -1 left out, class weights (C, D). Beyond `max_memory` bytes (without it,
    beyond a modest size) the scores are never stored: blocks of classes pass by. See also `ProxyNCALoss`, whose softmax
    form is this with s = 2·scale², and `SphereFaceLoss` with margin 1, where embeddings keep their length.

    sample_rate below 1: each training step compares with the classes of the batch and others drawn at random, together
    that part of all (Partial FC, An et al. 2022, arXiv:2203.15565). Evaluation compares with all.

    shard=True: each process of torch.distributed holds its part of the classes, and calls the loss with its own items,
    all processes together; loss and gradients are those of one process with all of them (the embeddings' times the
    number of processes, over which DistributedDataParallel averages). `losses/class_shards.py` says what is exchanged.
    The function form takes `shard`, which classes its weights are, with the batch of all processes.

    Wang et al. 2017 (NormFace), Zhai and Wu 2018, arXiv:1811.12649; scale 20 = their temperature 0.05.
    """

    scale: float = setting(
        default=20.0,
        above=0,
        tensor=True,
        kw_only=False,
        search=Range(5.0, 100.0, log=True),
        text="s, what cosines are multiplied by; 20: temperature 0.05 of Zhai and Wu",
    )


class HeatedSoftmaxLoss(ClassLoss):
    r"""Normalised softmax with biases, trained warm and finished hot (a smaller scale).

    l_i = -log softmax_y( α <w_c/|w_c|, x> + b_c ),   x of unit length, or as norm="batch" makes it

    After `heat_after` training steps the scale drops from `scale` to `heated_scale` for good (the paper: the last
    quarter of training, at a tenth of the learning rate); None never does. Steps are counted in a buffer.
    norm="batch" standardises the embeddings over the batch instead of scaling them to unit length, and divides the
    scale by √D, about the length of such an embedding. Class weights (C, D) and biases (C,); all else as in
    `NormalizedSoftmaxLoss`. The function form takes the present scale, and embeddings as they are with normalize=False.
    Zhang et al. 2018, arXiv:1809.04157; scale 16, then 4 for the last quarter, from its released code.
    """

    along_dim = ("weight", "running_mean", "running_var")
    kernel = None  # type: ignore[assignment]  # it knows no biases
    tensors = ("weight", "bias")

    def _scale_now(self) -> Tensor:
        """The scale now: warm before the heat, hot after it. Setting it changes the warm one."""
        heated = torch.zeros_like(self.steps, dtype=torch.bool)
        if self.heat_after is not None:
            heated = self.steps >= self.heat_after
        return torch.where(heated, self.heated_scale, self.__dict__["scale"]).to(distances.wide(self.steps))

    scale: float = setting(
        default=16.0,
        above=0,
        tensor=True,
        kw_only=False,
        search=Range(8.0, 64.0, log=True),
        now=_scale_now,
        text="α before the heat; 16: the released code's",
    )
    heated_scale: float = setting(
        default=4.0,
        above=0,
        kw_only=False,
        only="class",
        search=Range(1.0, 16.0, log=True),
        text="α after it; 4: the released code's",
    )
    heat_after: int | None = setting(
        default=None,
        optional=True,
        kw_only=False,
        only="class",
        rule=lambda name, value: checks.integer(name, value, 0),
        text="training steps before the scale drops; None: never",
    )
    norm: str = setting(
        default="l2",
        only="class",
        choices=("l2", "batch"),
        fixed=True,
        text='"l2": embeddings of unit length; "batch": standardised over the batch',
    )
    normalize: bool = setting(default=True, only="function", text="embeddings are scaled to unit length first")

    def make(self) -> None:
        super().make()
        self.bias = nn.Parameter(torch.zeros(len(self.weight)))
        class_shards.register(self, weight=1, bias=1)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        if self.norm == "batch":
            self.register_buffer("running_mean", torch.zeros(self.dim))
            self.register_buffer("running_var", torch.ones(self.dim))

    def prepare(self, call: ClassCall) -> None:
        scale = self.__dict__["scale"] if self.heat_after is None else self.scale
        if self.norm == "batch":
            call.anchors = self._standardised(call.x)
            scale = scale / math.sqrt(self.weight.shape[1])
        call.given |= {"scale": scale}

    def value(self, call: ClassCall) -> Tensor:
        rivals = call.rivals(call.given.get("scale", self.__dict__["scale"]))
        return call.reduced(call.entropy(rivals, rivals.own))

    def learn(self, call: ClassCall) -> None:
        self.steps = self.steps + 1

    def _standardised(self, embeddings: Tensor) -> Tensor:
        if self.training:
            refuse_transforms('HeatedSoftmaxLoss(norm="batch")')
        x = distances.upcast(embeddings)
        learns = False
        if self.training and x.shape[0] > 1:  # a single row has no spread to learn from
            learns = True  # set apart for a compiler, to which the number of rows may be a symbol
        mean, var = self.running_mean.to(x.dtype, copy=True), self.running_var.to(x.dtype, copy=True)
        y = batch_norm(x, mean, var, training=learns)
        if learns:
            self.running_mean, self.running_var = mean.to(self.running_mean), var.to(self.running_var)
        return y

    def get_logits(self, embeddings: Tensor) -> Tensor:
        """α cos + b of every class, (B, C), with the present scale; norm="batch" by the statistics learned so far."""
        x = logits.checked(self, embeddings, self.weight)
        present: Any = self.scale
        scale: Tensor = present.to(x.dtype)
        if self.norm == "l2":
            return logits.of_cosines(self, x, self.weight, scale) + self.bias
        y = batch_norm(distances.upcast(x), self.running_mean.to(x.dtype), self.running_var.to(x.dtype))
        each = distances.dot(y, distances.unit(self.weight))
        return scale / math.sqrt(self.weight.shape[1]) * each + self.bias

    def before(self) -> dict[str, str | None]:
        return dict.fromkeys(name for name in ("running_mean", "running_var") if name not in self._buffers)


class AdaCosLoss(ClassLoss):
    r"""Normalised softmax whose scale follows from the number of classes, or from the batch.

    l_i = -log( e^{s cos_iy} / Σ_c e^{s cos_ic} ),   s = √2 ln(C - 1), or as `adacos_scale` adapts it

    dynamic=True adapts the scale, part of the state dict, to each batch in training; the function form takes `scale`,
    None: √2 ln(C - 1). Needs three classes or more: two give scale 0. Class weights (C, D), all else as in
    `NormalizedSoftmaxLoss`. Zhang et al. 2019, arXiv:1905.00292, eq. 12 (fixed) and 15 (dynamic).
    """

    scale: Any = setting(
        default=None, above=0, tensor=True, optional=True, only="function", text="s; None: √2 ln(C - 1)"
    )
    dynamic: bool = setting(
        default=True,
        only="class",
        text="the scale follows each batch (eq. 15); False: fixed at √2 ln(C - 1) (eq. 12)",
    )

    def make(self) -> None:
        self.register_buffer("scale", torch.tensor(_fixed_scale(self.num_classes)))
        super().make()

    def prepare(self, call: ClassCall) -> None:
        if self.dynamic and self.training:
            refuse_transforms("AdaCosLoss")
            self.scale = _next_scale(call, self.scale)
        call.given |= {"scale": self.scale}

    def value(self, call: ClassCall) -> Tensor:
        scale = call.given["scale"]
        call.given |= {"scale": _fixed_scale(call.number) if scale is None else scale}
        value = super().value(call)
        if self.dynamic and self.training:
            differentiable_once(value, "AdaCosLoss in training, whose scale is a constant in its gradient,")
        return value


def adacos_scale(
    embeddings: Tensor,
    labels: Tensor,
    weight: Tensor,
    scale: Tensor,
    *,
    max_memory: int | None = None,
    shard: Shard | None = None,
) -> Tensor:
    r"""The next dynamic scale: ln(B_avg) / cos(min(π/4, θ_med)).

    B_avg = 1/N Σ_i Σ_{c != y_i} e^{s cos_ic} with the last scale s; θ_med: lower median of the angles to the own class.
    A batch without known items leaves the scale as it was.
    """
    loss = AdaCosLoss.bare(max_memory=max_memory)
    return _next_scale(ClassCall(loss, embeddings, labels, {"weight": weight}, shard), scale)


@torch.no_grad()
def _next_scale(call: ClassCall, scale: Tensor) -> Tensor:
    call = copy.copy(call)  # what it keeps of this pass has no gradient
    rivals = call.rivals(scale)
    peak, rest, own, _ = class_shards.join(call.shard, call.ids, rivals.peak, rivals.rest, rivals.own, call.taint)
    present = call.known & (rest > reduce.log_zero(rest))
    flat = reduce.logsumexp((peak + rest)[None], present[None]).squeeze(0)
    middle = torch.where(call.known, own.clamp(-1, 1).acos(), torch.nan).nanmedian()
    following = (flat - call.known.sum().clamp(min=1).to(own.dtype).log()) / middle.clamp(max=math.pi / 4).cos()
    return torch.where(following.isfinite() & (following > 0), following, scale).to(scale.dtype)


def _fixed_scale(num_classes: int) -> float:
    checks.integer("num_classes", num_classes, 3)  # two would have scale 0
    return math.sqrt(2) * math.log(num_classes - 1)


normalized_softmax_loss = function_of(NormalizedSoftmaxLoss, "normalized_softmax_loss")
heated_softmax_loss = function_of(HeatedSoftmaxLoss, "heated_softmax_loss")
adacos_loss = function_of(AdaCosLoss, "adacos_loss")
