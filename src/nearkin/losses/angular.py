"""Class softmax with a margin: by cosine (CosFace), by angle (ArcFace), by a multiple of the angle (SphereFace)."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nearkin.core import angles, checks, class_dense, class_softmax, distances, reduce
from nearkin.core.class_dense import OwnScore
from nearkin.kernels.class_loss_ops import Form
from nearkin.losses import class_shards, logits
from nearkin.losses.class_routes import given, route, sample, sampling, show_sampled, whole
from nearkin.losses.class_shards import Shard
from nearkin.losses.settings import hold, show
from nearkin.losses.softmax import class_weight, classify, classify_streamed

__all__ = [
    "ArcFaceLoss",
    "CosFaceLoss",
    "SphereFaceLoss",
    "arcface_loss",
    "cosface_loss",
    "sphereface_loss",
]


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
    value = whole(impl, embeddings, labels, weight, Form(scale, margin), reduction, max_memory, shard)
    if value is not None:
        return value
    ids, known, spoilt = class_shards.classified(embeddings, labels, weight, shard)
    streams = route(impl, embeddings, weight, max_memory, shard=shard)
    if streams is not None:
        found = streams(embeddings, weight, ids, scale=scale, max_memory=max_memory)
        own = class_softmax.own_cosine(found)
        found, target = class_shards.joined(shard, ids, found, scale * (own - margin))
        return classify_streamed(found, target, known, spoilt, reduction) + reduce.taint(embeddings)
    x, w = distances.unit(embeddings), distances.unit(weight)
    value = class_dense.cross_entropy(x, w, ids, scale=scale, own_score=lambda s, _: OwnScore(s - scale * margin))
    return classify(value, known, spoilt, reduction) + reduce.taint(embeddings, weight)


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

    Arguments as `normalized_softmax_loss`; m in radians. weight (C·K, D) with K = sub_centers rows a class: the nearest
    speaks for its class and alone learns. Near 0 and π sin and cos of θ_y come from |x - w| and |x + w|, so value and
    gradient are exact and finite from θ = 0 to π. The gradient is the true one; `straight_through=True` gives the
    target the slope s of a plain cosine, as InsightFace's PyTorch code does. Deng et al. 2019, arXiv:1801.07698, eq. 3;
    m 0.5, s 64 from there; sub-centres Deng et al. 2020.
    """
    checks.integer("sub_centers", sub_centers, 1)
    checks.positive("scale", scale)
    checks.angle("margin", margin)
    form = Form(scale, margin, "angle", straight_through, sub_centers)
    value = whole(impl, embeddings, labels, weight, form, reduction, max_memory, shard)
    if value is not None:
        return value
    ids, known, spoilt = class_shards.classified(embeddings, labels, weight, shard, sub_centers)
    streams = route(impl, embeddings, weight, max_memory, sub_centers, shard)
    if streams is not None:
        found = streams(embeddings, weight, ids, scale=scale, sub_centers=sub_centers, max_memory=max_memory)
        target = scale * _widened(distances.unit(found.anchors), distances.unit(found.own), margin, straight_through)
        found, target = class_shards.joined(shard, ids, found, target)
        return classify_streamed(found, target, known, spoilt, reduction) + reduce.taint(embeddings)
    x, w = distances.unit(embeddings), distances.unit(weight)
    picks = class_softmax.own_rows(x, w, ids, sub_centers, normalize=False)
    if _far_from_poles(x, w, picks):
        bend = partial(_bent, margin=margin, scale=scale, straight_through=straight_through)
        value = class_dense.cross_entropy(x, w, ids, scale=scale, own_score=bend, centers=sub_centers)
    else:
        target = scale * _widened(x, w[picks], margin, straight_through)
        value = class_dense.cross_entropy(x, w, ids, target, scale=scale, centers=sub_centers)
    return classify(value, known, spoilt, reduction) + reduce.taint(embeddings, weight)


def _far_from_poles(x: Tensor, w: Tensor, picks: Tensor) -> bool:
    """Whether every angle to an own class is such that its cosine gives its sine; only asked where values are read."""
    if not len(picks) or not distances.freely_read(x):
        return False
    with torch.no_grad():
        return float((x * w[picks]).sum(1).abs().max()) < 0.9


def _bent(score: Tensor, _: Tensor, margin: float, scale: float, straight_through: bool) -> OwnScore:
    """s cos(θ + m) from s cos θ, and its slope, where `_far_from_poles` holds."""
    cos = score / scale
    sin = (1 - cos * cos).sqrt()
    bent = scale * _turned(cos, sin, margin)
    if straight_through:
        return OwnScore(score + (bent - score).detach())
    slope = math.cos(margin) + cos / sin * math.sin(margin)
    return OwnScore(bent, torch.where(cos > -math.cos(margin), slope, 1.0))


def _widened(x: Tensor, own: Tensor, margin: float, straight_through: bool) -> Tensor:
    """`_turned` of unit rows, (B,)."""
    cos, sin = angles.cos_sin(x, own)
    target = _turned(cos, sin, margin)
    return cos + (target - cos).detach() if straight_through else target


def _turned(cos: Tensor, sin: Tensor, margin: float) -> Tensor:
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
    value = whole(impl, embeddings, labels, weight, Form(annealing, margin, "sphere"), reduction, max_memory, shard)
    if value is not None:
        return value
    ids, known, spoilt = class_shards.classified(embeddings, labels, weight, shard)
    streams = route(impl, embeddings, weight, max_memory, shard=shard)
    if streams is not None:
        found = streams(embeddings, weight, ids, normalize=(False, True), max_memory=max_memory)
        psi, _ = _annealed(class_softmax.own_cosine(found), margin, annealing)
        target = distances.length(found.anchors) * psi
        found, target = class_shards.joined(shard, ids, found, target)
        return classify_streamed(found, target, known, spoilt, reduction) + reduce.taint(embeddings)
    bend = partial(_multiplied, margin=margin, annealing=annealing)
    value = class_dense.cross_entropy(distances.upcast(embeddings), distances.unit(weight), ids, own_score=bend)
    return classify(value, known, spoilt, reduction) + reduce.taint(embeddings, weight)


def _multiplied(score: Tensor, x: Tensor, margin: int, annealing: float | Tensor) -> OwnScore:
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


class CosFaceLoss(nn.Module):
    """`cosface_loss` with its class weights (C, D); sample_rate and shard as in `NormalizedSoftmaxLoss`."""

    lr_scale = 1.0
    settings: dict[str, Any]

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
        self.shard = class_shards.split(shard, num_classes)
        self.weight = class_weight(num_classes, dim, self.shard)
        class_shards.keep(self, weight=1)
        self.sample_rate = sampling(sample_rate)
        hold(
            self,
            cosface_loss,
            self.weight,
            margin=margin,
            scale=scale,
            reduction=reduction,
            max_memory=max_memory,
            **given(impl),
        )

    extra_repr = show_sampled

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        embeddings, labels, shard = class_shards.gather(self.shard, embeddings, labels, self.weight.shape[1])
        labels, weight, shard = sample(self, embeddings, labels, shard)
        return cosface_loss(embeddings, labels, weight, shard=shard, **self.settings)

    def get_logits(self, embeddings: Tensor) -> Tensor:
        """s cos of every class, (B, C), without the margin; differentiable."""
        return logits.of_cosines(self, embeddings, self.weight, self.settings["scale"])


class ArcFaceLoss(nn.Module):
    """`arcface_loss` with its class weights (C·K, D), K = sub_centers in a row for each class.

    sample_rate and shard as in `NormalizedSoftmaxLoss`; a class is drawn, and held, with all its centres.
    """

    lr_scale = 1.0
    settings: dict[str, Any]

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
        self.shard = class_shards.split(shard, num_classes)
        self.weight = class_weight(num_classes * sub_centers, dim, self.shard, sub_centers)
        class_shards.keep(self, weight=sub_centers)
        self.sample_rate = sampling(sample_rate)
        hold(
            self,
            arcface_loss,
            self.weight,
            margin=margin,
            scale=scale,
            sub_centers=sub_centers,
            straight_through=straight_through,
            reduction=reduction,
            max_memory=max_memory,
            **given(impl),
        )

    extra_repr = show_sampled

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        embeddings, labels, shard = class_shards.gather(self.shard, embeddings, labels, self.weight.shape[1])
        labels, weight, shard = sample(self, embeddings, labels, shard, self.settings["sub_centers"])
        return arcface_loss(embeddings, labels, weight, shard=shard, **self.settings)

    def get_logits(self, embeddings: Tensor) -> Tensor:
        """s cos of every class, (B, C), without the margin; of sub-centres the nearest counts. Differentiable."""
        scale, each = self.settings["scale"], self.settings["sub_centers"]
        return logits.of_cosines(self, embeddings, self.weight, scale, each)


class SphereFaceLoss(nn.Module):
    """`sphereface_loss` with its class weights (C, D) and annealing.

    λ_t = max(floor, start / (1 + decay t)), t the training steps so far, counted in a buffer; without annealing the
    loss does not converge. 1000, 0.12 and 5 from the released code. shard as in `NormalizedSoftmaxLoss`.
    """

    lr_scale = 1.0
    settings: dict[str, Any]
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
        for name, value in (("start", start), ("decay", decay), ("floor", floor)):
            checks.at_least(name, value, 0)
        self.shard = class_shards.split(shard, num_classes)
        self.weight = class_weight(num_classes, dim, self.shard)
        class_shards.keep(self, weight=1)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.schedule = (start, decay, floor)
        hold(
            self,
            sphereface_loss,
            self.weight,
            margin=margin,
            reduction=reduction,
            max_memory=max_memory,
            **given(impl),
        )

    extra_repr = show

    @property
    def annealing(self) -> Tensor:
        """λ now."""
        start, decay, floor = self.schedule
        return (start / (1 + decay * self.steps.to(distances.wide(self.steps)))).clamp(min=floor)

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        embeddings, labels, shard = class_shards.gather(self.shard, embeddings, labels, self.weight.shape[1])
        annealing = self.annealing
        value = sphereface_loss(embeddings, labels, self.weight, annealing=annealing, shard=shard, **self.settings)
        if self.training:
            self.steps = self.steps + 1  # a new tensor: a compiled backward may still read the old one
        return value

    def get_logits(self, embeddings: Tensor) -> Tensor:
        """|x| cos of every class, (B, C), without margin and annealing; differentiable."""
        x = logits.checked(self, embeddings, self.weight)
        return distances.dot(x, distances.unit(self.weight))
