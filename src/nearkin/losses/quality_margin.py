"""Class softmax whose margin follows the length of the embedding, the quality of an item: AdaFace, MagFace.

Embeddings keep their length: the encoder must not scale them to unit length.
"""

from __future__ import annotations  # torch 2.6 compiles no function within one whose annotations it evaluates

import math
from typing import Any

import torch
from torch import Tensor

from nearkin.core import checks, distances, reduce
from nearkin.core.autograd import differentiable_once, refuse_transforms
from nearkin.core.labels import UNKNOWN
from nearkin.losses import class_shards
from nearkin.losses.angular import SCALES, turned
from nearkin.losses.classes import ClassCall, ClassLoss, Own, function_of
from nearkin.losses.settings import Range, setting

__all__ = ["AdaFaceLoss", "MagFaceLoss", "adaface_loss", "adaface_statistics", "magface_loss"]

EPSILON = 1e-3  # of AdaFace: how near to 0 and π an angle may come, and what is added to the deviation
SHORTEST, LONGEST = 1e-3, 100.0  # to which AdaFace clips lengths


class AdaFaceLoss(ClassLoss):
    r"""The margin follows the length: long embeddings (good items) learn most where hard, short ones where easy.

    z = clip(h (|x| - mean) / (std + ε), -1, 1),   |x| clipped to [0.001, 100], without gradient
    l_i = -log softmax_y of s cos θ_c, but of the own class   s (cos(clip(θ_y - m z, ε, π - ε)) - m z - m)

    z -1 is ArcFace, 0 CosFace, 1 a negative angular margin beside a cosine margin of 2 m. mean and std: those of the
    lengths so far, two buffers: each training step moves them first (`adaface_statistics`) and then uses them; in
    evaluation they stay. On several processes they are those of the global batch. The function form takes them as
    numbers or scalars. h = `concentration`, ε = 0.001. Where an angle is clipped the own class has no slope. Cosines
    are not clipped, which in the released code takes the gradient of items nearer than 2.6° to a class. Class weights
    (C, D), all else as in `NormalizedSoftmaxLoss`. Kim et al. 2022, arXiv:2204.00964, section 3.3; m 0.4, h 0.333, s 64
    from there, mean 20 and std 100 at the start from its released code.
    """

    reads_length = True

    mean: Any = setting(default=20.0, tensor=True, only="function", text="of the lengths, or a scalar")
    std: Any = setting(default=100.0, tensor=True, only="function", text="of the lengths, or a scalar")
    margin: float = setting(
        default=0.4,
        rule=checks.angle,
        kw_only=False,
        search=Range(0.05, 0.6),
        text="m, an angle in radians and a cosine; 0.4: the paper's",
    )
    scale: float = setting(
        default=64.0, above=0, kw_only=False, search=SCALES, text="s, what cosines are multiplied by; 64: the paper's"
    )
    concentration: float = setting(
        default=0.333,
        at_least=0,
        search=Range(0.1, 1.0, log=True),
        text="h, how much of the lengths' spread the margins cover; 0.333: the paper's, 0: CosFace",
    )
    momentum: float = setting(
        default=0.01,
        only="class",
        rule=lambda name, value: _check_momentum(value),
        text="weight of a batch in the running mean and deviation of the lengths; 0.01: the paper's",
    )

    def make(self) -> None:
        super().make()
        self.register_buffer("mean", torch.tensor(20.0))
        self.register_buffer("std", torch.tensor(100.0))

    def prepare(self, call: ClassCall) -> None:
        if self.training:
            refuse_transforms("AdaFaceLoss")
            moved = adaface_statistics(call.embeddings, call.labels, self.mean, self.std, momentum=self.momentum)
            self.mean, self.std = moved
        call.given |= {"mean": self.mean, "std": self.std}

    def own(self, own: Own) -> Tensor:
        """cos(clip(θ - m z, ε, π - ε)) - m z - m."""
        cos, sin, given, m = own.cos, own.sin, own.call.given, self.margin
        with torch.no_grad():
            length = own.length.clamp(SHORTEST, LONGEST)
            quality = (self.concentration * (length - given["mean"]) / (given["std"] + EPSILON)).clamp(-1, 1)
            turn = -m * quality
            below = (turn < EPSILON) & (cos >= (EPSILON - turn).cos())  # θ + turn <= ε
            beyond = (turn > -EPSILON) & (cos <= -(EPSILON + turn).cos())
        bent = torch.where(below | beyond, 0.0, cos * turn.cos() - sin * turn.sin())
        clipped = torch.where(below, math.cos(EPSILON), torch.where(beyond, -math.cos(EPSILON), 0.0))
        target = bent + clipped - (m + m * quality)
        return differentiable_once(target, "AdaFaceLoss, whose margins are constants in its gradient,")


@torch.no_grad()
def adaface_statistics(
    embeddings: Tensor, labels: Tensor, mean: Tensor, std: Tensor, *, momentum: float = 0.01
) -> tuple[Tensor, Tensor]:
    r"""Running mean and deviation of the lengths after one batch: each moves by `momentum` towards the batch's own.

    Lengths are clipped to [0.001, 100], the deviation is that of a sample (n - 1). Rows of label -1 and rows with NaN
    or Inf do not count; one row alone moves the mean and not the deviation. momentum 0.01: the paper's α 0.99.
    """
    checks.rows("embeddings", embeddings)
    checks.class_ids("labels", labels, embeddings)
    _check_momentum(momentum)
    counts = (labels != UNKNOWN) & embeddings.isfinite().all(1)
    length = torch.where(counts, distances.length(embeddings, distances.wide(embeddings)).clamp(SHORTEST, LONGEST), 0.0)
    number = counts.sum().to(length.dtype)
    batch_mean = length.sum() / number.clamp(min=1)
    apart = torch.where(counts, length - batch_mean, 0.0)
    batch_std = ((apart * apart).sum() / (number - 1).clamp(min=1)).sqrt()
    moved_mean = torch.where(number > 0, momentum * batch_mean + (1 - momentum) * mean.to(length.dtype), mean)
    moved_std = torch.where(number > 1, momentum * batch_std + (1 - momentum) * std.to(length.dtype), std)
    return moved_mean.to(mean), moved_std.to(std)


def _check_momentum(momentum: float) -> None:
    checks.number("momentum", momentum)
    if not 0 <= momentum <= 1:
        raise ValueError(f"momentum must be in [0, 1], got {momentum}")


class MagFaceLoss(ClassLoss):
    r"""The longer an embedding, the larger its margin of angle; a penalty draws those that can afford it to be long.

    l_i = ArcFace's of margin m(a_i) + λ g(a_i),   a = |x|, g(a) = a / u_a² + 1 / a,
    m(a) straight from m = l_m at a = l_a to u_m at u_a, and level beyond both

    The gradient flows into the length by m and by g. Beyond u_a, where its slope is 0, g is level; below l_a it goes on
    along its tangent, so that short embeddings grow: the paper keeps a within [l_a, u_a], and its released code gives
    a shorter one no gradient by its length. Beyond θ = π - m as in `ArcFaceLoss`. Class weights (C, D), all else as in
    `NormalizedSoftmaxLoss`. Meng et al. 2021, arXiv:2103.06627, section 3; l_m 0.45, u_m 0.8, l_a 10, u_a 110,
    λ = `length_weight` 35 and s 64 from its experiments.
    """

    reads_length = True

    lower_margin: float = setting(
        default=0.45,
        rule=checks.angle,
        kw_only=False,
        search=Range(0.05, 0.5),
        text="l_m in radians, the margin at `lower_length` and below; 0.45: the paper's",
    )
    upper_margin: float = setting(
        default=0.8,
        rule=checks.angle,
        kw_only=False,
        search=Range(0.5, 1.0),
        text="u_m in radians, the margin at `upper_length` and beyond; 0.8: the paper's",
    )
    scale: float = setting(
        default=64.0, above=0, kw_only=False, search=SCALES, text="s, what cosines are multiplied by; 64: the paper's"
    )
    lower_length: float = setting(
        default=10.0, above=0, text="l_a, the length below which embeddings are drawn out; 10: the paper's"
    )
    upper_length: float = setting(
        default=110.0, text="u_a, the length from which the penalty is level; 110: the paper's"
    )
    length_weight: float = setting(
        default=35.0,
        at_least=0,
        was="penalty",
        search=Range(3.0, 100.0, log=True),
        text="λ, the weight of g(a) = a / u_a² + 1 / a; 35: the paper's",
    )

    def check_together(self) -> None:
        checks.at_least("upper_margin", self.upper_margin, self.lower_margin)
        if not self.upper_length > self.lower_length:
            raise ValueError(f"upper_length must be > lower_length = {self.lower_length:g}, got {self.upper_length:g}")

    def own(self, own: Own) -> Tensor:
        rate = (self.upper_margin - self.lower_margin) / (self.upper_length - self.lower_length)
        within = own.length.clamp(self.lower_length, self.upper_length)
        return turned(own.cos, own.sin, self.lower_margin + rate * (within - self.lower_length))

    def value(self, call: ClassCall) -> Tensor:
        if self.length_weight and call.reduction == "active":
            call.reduction = "mean"  # every term is above 0
        value = super().value(call)
        if not self.length_weight:
            return value
        x = call.x if call.shard is None else class_shards.replicated(call.shard, call.x)
        length, long = distances.length(x, distances.wide(x)), self.upper_length
        within = length.clamp(self.lower_length, long)
        slope = 1 / long**2 - 1 / self.lower_length**2
        cost = within / long**2 + 1 / within + slope * (length - self.lower_length).clamp(max=0)
        known = call.labels != UNKNOWN
        return value + self.length_weight * reduce.terms(cost.to(value.dtype), known, call.reduction)


adaface_loss = function_of(AdaFaceLoss, "adaface_loss")
magface_loss = function_of(MagFaceLoss, "magface_loss")
