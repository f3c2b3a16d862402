"""Class softmax with a margin: by cosine (CosFace), by angle (ArcFace), by a multiple of the angle (SphereFace)."""

from __future__ import annotations  # torch 2.6 compiles no function within one whose annotations it evaluates

import math
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nearkin.core import angles, checks, class_dense, class_softmax, distances
from nearkin.core.autograd import differentiable_once
from nearkin.core.class_dense import OwnScore
from nearkin.core.errors import NearPole
from nearkin.losses import class_sampling, class_shards, logits
from nearkin.losses.call import PLAIN, Annealing, ClassCall, Form, again_plainly
from nearkin.losses.class_shards import Shard
from nearkin.losses.module import LossModule
from nearkin.losses.softmax import class_weight

__all__ = [
    "ArcFaceLoss",
    "CosFaceLoss",
    "SphereFaceLoss",
    "arcface_loss",
    "cosface_loss",
    "sphereface_loss",
]

NEAR_POLE = 0.9  # the cosine from which an angle is too near to 0 or π for its cosine to give its sine


def cosface_loss(
    embeddings: Tensor,
    labels: Tensor,
    weight: Tensor,
    *,
    margin: float = 0.35,
    scale: float = 64.0,
    reduction: str = "mean",
    impl: str = "auto",
    max_memory: int | None = None,
    shard: Shard | None = None,
) -> Tensor:
    r"""The own class must win by a margin of cosine.

    l_i = -log( e^{s (cos_iy - m)} / (e^{s (cos_iy - m)} + Σ_{c != y} e^{s cos_ic}) )

    Arguments, impl, max_memory and shard as `normalized_softmax_loss`. Wang et al. 2018, arXiv:1801.09414, eq. 4;
    m 0.35 and s 64 from there.
    """
    checks.number("margin", margin)
    checks.positive("scale", scale)
    call = ClassCall(embeddings, labels, weight, reduction, impl, max_memory, shard)
    again = partial(again_plainly, cosface_loss, labels, margin=margin, scale=scale, reduction=reduction)
    if (value := call.kernel(Form(scale, margin), again)) is not None:
        return value
    call.check_labels()
    if (rivals := call.rivals(scale=scale)) is not None:
        return call.streamed(rivals, scale * (class_softmax.own_cosine(rivals) - margin))
    bend = partial(_cosine_target, shift=scale * margin)
    value = class_dense.cross_entropy(embeddings, weight, call.ids, scale=scale, own_score=bend, normalize=True)
    return call.dense(value)


def _cosine_target(score: Tensor, _: Tensor, shift: float) -> OwnScore:
    return OwnScore(score - shift)


def arcface_loss(
    embeddings: Tensor,
    labels: Tensor,
    weight: Tensor,
    *,
    margin: float = 0.5,
    scale: float = 64.0,
    sub_centers: int = 1,
    straight_through: bool = False,
    reduction: str = "mean",
    impl: str = "auto",
    max_memory: int | None = None,
    shard: Shard | None = None,
) -> Tensor:
    r"""The own class must win by a margin of angle.

    l_i = -log softmax_y of s cos θ_c, but of the own class   s cos(θ_y + m) while θ_y < π - m,
    beyond it s (cos θ_y - m sin m), which goes on falling

    Arguments as `normalized_softmax_loss`; m in radians. weight (C·K, D) with K = sub_centers rows per class: only
    the nearest scores for its class and learns. Near 0 and π sin and cos of θ_y come from |x - w| and |x + w|, so value
    and gradient are exact and finite from θ = 0 to π. The gradient is the true one; `straight_through=True` gives the
    target the slope s of a plain cosine, as InsightFace's PyTorch code does. Deng et al. 2019, arXiv:1801.07698, eq. 3;
    m 0.5, s 64 from there; sub-centres Deng et al. 2020.
    """
    checks.integer("sub_centers", sub_centers, 1)
    checks.positive("scale", scale)
    checks.angle("margin", margin)
    call = ClassCall(embeddings, labels, weight, reduction, impl, max_memory, shard, sub_centers)
    again = partial(again_plainly, arcface_loss, labels, margin=margin, scale=scale, sub_centers=sub_centers)
    again = partial(again, straight_through=straight_through, reduction=reduction)
    if (value := call.kernel(Form(scale, margin, "angle", straight_through, sub_centers), again)) is not None:
        return value
    call.check_labels()
    if (rivals := call.rivals(scale=scale)) is not None:
        x, own = distances.unit(rivals.anchors), distances.unit(rivals.own)
        return call.streamed(rivals, scale * _cos_plus_margin(x, own, margin, straight_through))
    options: dict[str, Any] = {"scale": scale, "centers": sub_centers}
    if len(embeddings) and distances.freely_read(embeddings):
        bend = partial(_arc_target, margin=margin, scale=scale, straight_through=straight_through)
        with suppress(NearPole):
            return call.dense(
                class_dense.cross_entropy(embeddings, weight, call.ids, own_score=bend, normalize=True, **options)
            )
    x, w = distances.unit(embeddings), distances.unit(weight)
    own_rows = class_softmax.own_rows(x, w, call.ids, sub_centers, normalize=False)
    target = scale * _cos_plus_margin(x, w[own_rows], margin, straight_through)
    return call.dense(class_dense.cross_entropy(x, w, call.ids, target, **options))


def _arc_target(score: Tensor, _: Tensor, margin: float, scale: float, straight_through: bool) -> OwnScore:
    """s cos(θ + m) from s cos θ, and its slope; a `NearPole` where these would be wrong."""
    cos = score / scale
    # Of the forward pass: the steps for a second derivative are of the same batch.
    first = not torch.is_grad_enabled() and distances.freely_read(cos)
    if first and not float(cos.abs().max()) < NEAR_POLE:
        raise NearPole
    sin = (1 - cos * cos).sqrt()
    target = scale * _add_margin(cos, sin, margin)
    if straight_through:
        return OwnScore(_straight(score, target))
    slope = math.cos(margin) + cos / sin * math.sin(margin)
    return OwnScore(target, torch.where(cos > -math.cos(margin), slope, 1.0))


def _cos_plus_margin(x: Tensor, own: Tensor, margin: float, straight_through: bool) -> Tensor:
    """`_add_margin` of unit rows, (B,)."""
    cos, sin = angles.cos_sin(x, own)
    target = _add_margin(cos, sin, margin)
    return _straight(cos, target) if straight_through else target


def _straight(score: Tensor, target: Tensor) -> Tensor:
    """The target with the slope of the plain score."""
    return differentiable_once(score + (target - score).detach(), "ArcFaceLoss(straight_through=True)")


def _add_margin(cos: Tensor, sin: Tensor, margin: float) -> Tensor:
    """cos(θ + m), and beyond π - m, where it would rise again, cos θ - m sin m."""
    beyond = cos - margin * math.sin(margin)
    return torch.where(cos > -math.cos(margin), cos * math.cos(margin) - sin * math.sin(margin), beyond)


def sphereface_loss(
    embeddings: Tensor,
    labels: Tensor,
    weight: Tensor,
    *,
    margin: int = 4,
    annealing: float | Tensor = 5.0,
    reduction: str = "mean",
    impl: str = "auto",
    max_memory: int | None = None,
    shard: Shard | None = None,
) -> Tensor:
    r"""The own class must win at a multiple of the angle; embeddings keep their length.

    target logit |x| (λ cos θ_y + ψ(θ_y)) / (1 + λ), others |x| cos θ_c, ψ(θ) = (-1)^k cos(mθ) - 2k on [kπ/m, (k+1)π/m]

    λ = `annealing`; 0 is the bare loss. cos(mθ) is the Chebyshev polynomial of cos θ, so there is no arc cosine and the
    gradient is exact everywhere. Other arguments as `normalized_softmax_loss`. Liu et al. 2017, arXiv:1704.08063,
    eq. 7; m 4 from there, final λ 5 from its released code.
    """
    checks.integer("margin", margin, 1)
    if not isinstance(annealing, Tensor):
        checks.at_least("annealing", annealing, 0)
    call = ClassCall(embeddings, labels, weight, reduction, impl, max_memory, shard)
    again = partial(again_plainly, sphereface_loss, labels, margin=margin, annealing=annealing, reduction=reduction)
    if (value := call.kernel(Form(annealing, margin, "sphere"), again)) is not None:
        return value
    call.check_labels()
    if (rivals := call.rivals(normalize=(False, True))) is not None:
        psi, _ = _annealed(class_softmax.own_cosine(rivals), margin, annealing)
        return call.streamed(rivals, distances.length(rivals.anchors) * psi)
    bend = partial(_sphere_target, margin=margin, annealing=annealing)
    x, w = distances.upcast(embeddings), distances.unit(weight)
    return call.dense(class_dense.cross_entropy(x, w, call.ids, own_score=bend))


def _sphere_target(score: Tensor, x: Tensor, margin: int, annealing: float | Tensor) -> OwnScore:
    """The target logit of `sphereface_loss` from |x| cos θ, (B, 1)."""
    length = distances.length(x)[:, None]
    alive = length > 0
    cos = torch.where(alive, score / torch.where(alive, length, 1.0), 0.0)
    psi, slope = _annealed(cos, margin, annealing)
    slope = torch.where(alive, slope, 0.0)
    return OwnScore(length * psi, slope, torch.where(alive, (psi - cos * slope) / torch.where(alive, length, 1.0), 0.0))


def _annealed(cos: Tensor, margin: int, annealing: float | Tensor) -> tuple[Tensor, Tensor]:
    """(λ cos θ + ψ(θ)) / (1 + λ) from cos θ, and its slope."""
    psi, slope = angles.psi_and_slope(cos, margin)
    return (annealing * cos + psi) / (1 + annealing), (annealing + slope) / (1 + annealing)


class CosFaceLoss(LossModule, function=cosface_loss):
    """`cosface_loss` with its class weights (C, D); sample_rate and shard as in `NormalizedSoftmaxLoss`."""

    def __init__(
        self,
        num_classes: int,
        dim: int,
        margin: float = 0.35,
        scale: float = 64.0,
        *,
        reduction: str = "mean",
        sample_rate: float = 1.0,
        impl: str = "auto",
        max_memory: int | None = None,
        shard: bool = False,
    ) -> None:
        super().__init__()
        self.shard = class_shards.make_shard(shard, num_classes)
        self.weight = class_weight(num_classes, dim, self.shard)
        class_shards.register(self, weight=1)
        self.num_classes, self.dim, self.margin, self.scale = num_classes, dim, margin, scale
        self.reduction, self.sample_rate, self.impl, self.max_memory = reduction, sample_rate, impl, max_memory
        self.finish_init()

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        embeddings, labels, shard = class_shards.gather_batch(self.shard, embeddings, labels, self.weight.shape[1])
        labels, weight, shard = class_sampling.sample(self, embeddings, labels, shard)
        return cosface_loss(embeddings, labels, weight, shard=shard, **self.arguments())

    def get_logits(self, embeddings: Tensor) -> Tensor:
        """s cos of every class, (B, C), without the margin; differentiable."""
        return logits.of_cosines(self, embeddings, self.weight, self.scale)


class ArcFaceLoss(LossModule, function=arcface_loss):
    """`arcface_loss` with its class weights (C·K, D), K = sub_centers in a row for each class.

    sample_rate and shard as in `NormalizedSoftmaxLoss`; a class is sampled, and sharded, with all its centres.
    """

    def __init__(
        self,
        num_classes: int,
        dim: int,
        margin: float = 0.5,
        scale: float = 64.0,
        sub_centers: int = 1,
        *,
        straight_through: bool = False,
        reduction: str = "mean",
        sample_rate: float = 1.0,
        impl: str = "auto",
        max_memory: int | None = None,
        shard: bool = False,
    ) -> None:
        super().__init__()
        checks.integer("sub_centers", sub_centers, 1)
        self.shard = class_shards.make_shard(shard, num_classes)
        self.weight = class_weight(num_classes * sub_centers, dim, self.shard, sub_centers)
        class_shards.register(self, weight=sub_centers)
        self.num_classes, self.dim, self.margin, self.scale = num_classes, dim, margin, scale
        self.sub_centers, self.straight_through, self.reduction = sub_centers, straight_through, reduction
        self.sample_rate, self.impl, self.max_memory = sample_rate, impl, max_memory
        self.finish_init()

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        embeddings, labels, shard = class_shards.gather_batch(self.shard, embeddings, labels, self.weight.shape[1])
        labels, weight, shard = class_sampling.sample(self, embeddings, labels, shard, self.sub_centers)
        return arcface_loss(embeddings, labels, weight, shard=shard, **self.arguments())

    def get_logits(self, embeddings: Tensor) -> Tensor:
        """s cos of every class, (B, C), without the margin; of sub-centres the nearest counts. Differentiable."""
        return logits.of_cosines(self, embeddings, self.weight, self.scale, self.sub_centers)


class SphereFaceLoss(LossModule, function=sphereface_loss):
    """`sphereface_loss` with its class weights (C, D) and annealing.

    λ_t = max(floor, start / (1 + decay t)), t the training steps so far, counted in a buffer; without annealing the
    loss does not converge. 1000, 0.12 and 5 from the released code. shard as in `NormalizedSoftmaxLoss`.
    """

    steps: Tensor

    def __init__(
        self,
        num_classes: int,
        dim: int,
        margin: int = 4,
        *,
        start: float = 1000.0,
        decay: float = 0.12,
        floor: float = 5.0,
        reduction: str = "mean",
        impl: str = "auto",
        max_memory: int | None = None,
        shard: bool = False,
    ) -> None:
        super().__init__()
        self.shard = class_shards.make_shard(shard, num_classes)
        self.weight = class_weight(num_classes, dim, self.shard)
        class_shards.register(self, weight=1)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.num_classes, self.dim, self.margin = num_classes, dim, margin
        self.start, self.decay, self.floor = start, decay, floor
        self.reduction, self.impl, self.max_memory = reduction, impl, max_memory
        self.finish_init()

    def check_settings(self) -> None:
        for name, value in (("start", self.start), ("decay", self.decay), ("floor", self.floor)):
            checks.at_least(name, value, 0)
        super().check_settings()

    @property
    def annealing(self) -> Tensor:
        """The present λ."""
        return self._annealing(self.steps)

    def _annealing(self, steps: Tensor) -> Tensor:
        return (self.start / (1 + self.decay * steps.to(distances.wide(steps)))).clamp(min=self.floor)

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        embeddings, labels, shard = class_shards.gather_batch(self.shard, embeddings, labels, self.weight.shape[1])
        steps, weight, settings = self.steps, self.weight, self.arguments()
        call = ClassCall(embeddings, labels, weight, self.reduction, self.impl, self.max_memory, shard)
        form = Form(Annealing(steps, self.start, self.decay, self.floor), self.margin, "sphere")

        def again(x: Tensor, weight: Tensor, _: Tensor | None) -> Tensor:
            annealing = self._annealing(steps)
            return sphereface_loss(x, labels, weight, annealing=annealing, **settings | {"impl": PLAIN})

        value = call.kernel(form, again)
        if value is None:
            annealing = self._annealing(steps)
            value = sphereface_loss(embeddings, labels, weight, annealing=annealing, shard=shard, **settings)
        if self.training:
            self.steps = steps + 1  # a new tensor: a backward may still read the old one
        return value

    def get_logits(self, embeddings: Tensor) -> Tensor:
        """|x| cos of every class, (B, C), without margin and annealing; differentiable."""
        x = logits.checked(self, embeddings, self.weight)
        return distances.dot(x, distances.unit(self.weight))
