"""Class softmax whose margin follows the length of the embedding, the quality of an item: AdaFace, MagFace.

Embeddings keep their length: the encoder must not scale them to unit length.
"""

import math
from functools import partial

import torch
from torch import Tensor

from nearkin.core import angles, checks, class_dense, distances, reduce
from nearkin.core.autograd import differentiable_once, refuse_transforms
from nearkin.core.labels import UNKNOWN
from nearkin.losses import class_sampling, class_shards, logits
from nearkin.losses.call import ClassCall, Form, again_plainly, many_in_bfloat16
from nearkin.losses.class_shards import Shard
from nearkin.losses.module import LossModule
from nearkin.losses.softmax import class_weight

__all__ = ["AdaFaceLoss", "MagFaceLoss", "adaface_loss", "adaface_statistics", "magface_loss"]

EPSILON = 1e-3  # of AdaFace: how near to 0 and π an angle may come, and what is added to the deviation
SHORTEST, LONGEST = 1e-3, 100.0  # to which AdaFace clips lengths


def adaface_loss(
    embeddings: Tensor,
    labels: Tensor,
    weight: Tensor,
    *,
    mean: float | Tensor = 20.0,
    std: float | Tensor = 100.0,
    margin: float = 0.4,
    concentration: float = 0.333,
    scale: float = 64.0,
    reduction: str = "mean",
    impl: str = "auto",
    max_memory: int | None = None,
    shard: Shard | None = None,
) -> Tensor:
    r"""The margin follows the length: long embeddings (good items) learn most where hard, short ones where easy.

    z = clip(h (|x| - mean) / (std + ε), -1, 1),   |x| clipped to [0.001, 100], without gradient
    l_i = -log softmax_y of s cos θ_c, but of the own class   s (cos(clip(θ_y - m z, ε, π - ε)) - m z - m)

    z -1 is ArcFace, 0 CosFace, 1 a negative angular margin beside a cosine margin of 2 m. mean and std: those of the
    lengths so far (`adaface_statistics`), numbers or scalars. h = `concentration`, ε = 0.001. Where an angle is clipped
    the own class has no slope. Cosines are not clipped, which in the released code takes the gradient of items nearer
    than 2.6° to a class. Other arguments as `normalized_softmax_loss`. Kim et al. 2022, arXiv:2204.00964, section 3.3;
    m 0.4, h 0.333, s 64 from there, mean 20 and std 100 at the start from its released code.
    """
    checks.positive("scale", scale)
    checks.angle("margin", margin)
    checks.at_least("concentration", concentration, 0)
    call = ClassCall(embeddings, labels, weight, reduction, impl, max_memory, shard)
    again = partial(again_plainly, adaface_loss, labels, mean=mean, std=std, margin=margin, scale=scale)
    again = partial(again, concentration=concentration, reduction=reduction)
    form = Form(scale, margin, "adaptive", bounds=(concentration,), statistics=(mean, std))
    if (value := call.kernel(form, again)) is not None:
        return value
    call.check_labels()
    with torch.no_grad():
        length = _length(embeddings).clamp(SHORTEST, LONGEST)
        quality = (concentration * (length - mean) / (std + EPSILON)).clamp(-1, 1)  # z, (B,)
    if (rivals := call.rivals(scale=scale)) is not None:
        x, own = distances.unit(rivals.anchors), distances.unit(rivals.own)
        return call.streamed(rivals, scale * _adaptive_target(x, own, quality, margin))
    x, w = distances.unit(embeddings), distances.unit(weight)
    target = scale * _adaptive_target(x, w[call.ids], quality, margin)
    return call.dense(class_dense.cross_entropy(x, w, call.ids, target, scale=scale))


def _adaptive_target(x: Tensor, own: Tensor, quality: Tensor, margin: float) -> Tensor:
    """cos(clip(θ - m z, ε, π - ε)) - m z - m of unit rows and z (B,)."""
    cos, sin = angles.cos_sin(x, own)
    turn = -margin * quality
    below = (turn < EPSILON) & (cos >= (EPSILON - turn).cos())  # θ + turn <= ε
    beyond = (turn > -EPSILON) & (cos <= -(EPSILON + turn).cos())
    bent = torch.where(below | beyond, 0.0, cos * turn.cos() - sin * turn.sin())
    clipped = torch.where(below, math.cos(EPSILON), torch.where(beyond, -math.cos(EPSILON), 0.0))
    target = bent + clipped - (margin + margin * quality)
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
    length = torch.where(counts, _length(embeddings).clamp(SHORTEST, LONGEST), 0.0)
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


def magface_loss(
    embeddings: Tensor,
    labels: Tensor,
    weight: Tensor,
    *,
    lower_margin: float = 0.45,
    upper_margin: float = 0.8,
    scale: float = 64.0,
    lower_length: float = 10.0,
    upper_length: float = 110.0,
    penalty: float = 35.0,
    reduction: str = "mean",
    impl: str = "auto",
    max_memory: int | None = None,
    shard: Shard | None = None,
) -> Tensor:
    r"""The longer an embedding, the larger its margin of angle; a penalty draws those that can afford it to be long.

    l_i = ArcFace's of margin m(a_i) + λ g(a_i),   a = |x|, g(a) = a / u_a² + 1 / a,
    m(a) straight from m = l_m at a = l_a to u_m at u_a, and level beyond both

    The gradient flows into the length by m and by g. Beyond u_a, where its slope is 0, g is level; below l_a it goes on
    along its tangent, so that short embeddings grow: the paper keeps a within [l_a, u_a], and its released code gives
    a shorter one no gradient by its length. Other arguments as `normalized_softmax_loss`; beyond θ = π - m as
    `arcface_loss`. Meng et al. 2021, arXiv:2103.06627, section 3; l_m 0.45, u_m 0.8, l_a 10, u_a 110, λ = `penalty` 35
    and s 64 from its experiments.
    """
    checks.positive("scale", scale)
    checks.angle("lower_margin", lower_margin)
    checks.angle("upper_margin", upper_margin)
    checks.at_least("upper_margin", upper_margin, lower_margin)
    checks.positive("lower_length", lower_length)
    checks.number("upper_length", upper_length)
    if not upper_length > lower_length:
        raise ValueError(f"upper_length must be > lower_length = {lower_length:g}, got {upper_length:g}")
    checks.at_least("penalty", penalty, 0)
    if penalty and reduction == "active":
        reduction = "mean"  # every term is above 0
    bounds = (lower_margin, upper_margin, lower_length, upper_length)
    x = embeddings
    if penalty and isinstance(x, Tensor) and x.is_floating_point() and not many_in_bfloat16(x, weight):
        x = x.to(torch.promote_types(x.dtype, torch.float32))  # both parts of the gradient are rounded together
    value = _magnitude_entropy(x, labels, weight, bounds, scale, reduction, impl, max_memory, shard)
    if not penalty:
        return value
    length = _length(x if shard is None else class_shards.replicated(shard, x))
    within = length.clamp(lower_length, upper_length)
    slope = 1 / upper_length**2 - 1 / lower_length**2
    cost = within / upper_length**2 + 1 / within + slope * (length - lower_length).clamp(max=0)
    return value + penalty * reduce.terms(cost.to(value.dtype), labels != UNKNOWN, reduction)


def _magnitude_entropy(
    embeddings: Tensor,
    labels: Tensor,
    weight: Tensor,
    bounds: tuple[float, float, float, float],
    scale: float,
    reduction: str,
    impl: str,
    max_memory: int | None,
    shard: Shard | None,
) -> Tensor:
    """`magface_loss` without its penalty."""
    lower, upper, short, long = bounds
    call = ClassCall(embeddings, labels, weight, reduction, impl, max_memory, shard)
    again = partial(again_plainly, magface_loss, labels, lower_margin=lower, upper_margin=upper, scale=scale)
    again = partial(again, lower_length=short, upper_length=long, penalty=0.0, reduction=reduction)
    if (value := call.kernel(Form(scale, lower, "magnitude", bounds=bounds[1:]), again)) is not None:
        return value
    call.check_labels()
    rate = (upper - lower) / (long - short)
    if (rivals := call.rivals(scale=scale)) is not None:
        x, own = distances.unit(rivals.anchors), distances.unit(rivals.own)
        margin = lower + rate * (_length(rivals.anchors).clamp(short, long) - short)
        return call.streamed(rivals, scale * _magnitude_target(x, own, margin))
    x, w = distances.unit(embeddings), distances.unit(weight)
    margin = lower + rate * (_length(embeddings).clamp(short, long) - short)  # (B,)
    target = scale * _magnitude_target(x, w[call.ids], margin)
    return call.dense(class_dense.cross_entropy(x, w, call.ids, target, scale=scale))


def _magnitude_target(x: Tensor, own: Tensor, margin: Tensor) -> Tensor:
    """cos(θ + m) of unit rows and margins (B,), and beyond π - m cos θ - m sin m."""
    cos, sin = angles.cos_sin(x, own)
    along, across = margin.cos(), margin.sin()
    return torch.where(cos > -along, cos * along - sin * across, cos - margin * across)


def _length(x: Tensor) -> Tensor:
    return distances.length(x, distances.wide(x))


class AdaFaceLoss(LossModule, function=adaface_loss, learned=("mean", "std")):
    """`adaface_loss` with its class weights (C, D), and the running mean and deviation of the lengths, two buffers.

    Each training step moves these first, by `momentum`, and then uses them; in evaluation they stay. On several
    processes they are those of the global batch. sample_rate and shard as in `NormalizedSoftmaxLoss`.
    """

    reads_length = True
    mean: Tensor
    std: Tensor

    def __init__(
        self,
        num_classes: int,
        dim: int,
        margin: float = 0.4,
        scale: float = 64.0,
        *,
        concentration: float = 0.333,
        momentum: float = 0.01,
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
        self.register_buffer("mean", torch.tensor(20.0))
        self.register_buffer("std", torch.tensor(100.0))
        self.num_classes, self.dim, self.margin, self.scale = num_classes, dim, margin, scale
        self.concentration, self.momentum, self.reduction = concentration, momentum, reduction
        self.sample_rate, self.impl, self.max_memory = sample_rate, impl, max_memory
        self.finish_init()

    def check_settings(self) -> None:
        _check_momentum(self.momentum)
        super().check_settings()

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        if self.training:
            refuse_transforms("AdaFaceLoss")
        embeddings, labels, shard = class_shards.gather_batch(self.shard, embeddings, labels, self.weight.shape[1])
        if self.training:
            dim = self.weight.shape[1]  # fewer in `MatryoshkaLoss`
            checks.class_batch(embeddings, labels, self.num_classes, dim)  # before a bad batch is learned from
            self.mean, self.std = adaface_statistics(embeddings, labels, self.mean, self.std, momentum=self.momentum)
        labels, weight, shard = class_sampling.sample(self, embeddings, labels, shard)
        arguments = self.arguments() | {"mean": self.mean, "std": self.std}
        return adaface_loss(embeddings, labels, weight, shard=shard, **arguments)

    def get_logits(self, embeddings: Tensor) -> Tensor:
        """s cos of every class, (B, C), without the margin; differentiable."""
        return logits.of_cosines(self, embeddings, self.weight, self.scale)


class MagFaceLoss(LossModule, function=magface_loss):
    """`magface_loss` with its class weights (C, D); sample_rate and shard as in `NormalizedSoftmaxLoss`."""

    reads_length = True

    def __init__(
        self,
        num_classes: int,
        dim: int,
        lower_margin: float = 0.45,
        upper_margin: float = 0.8,
        scale: float = 64.0,
        *,
        lower_length: float = 10.0,
        upper_length: float = 110.0,
        penalty: float = 35.0,
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
        self.num_classes, self.dim, self.scale = num_classes, dim, scale
        self.lower_margin, self.upper_margin = lower_margin, upper_margin
        self.lower_length, self.upper_length, self.penalty = lower_length, upper_length, penalty
        self.reduction, self.sample_rate, self.impl, self.max_memory = reduction, sample_rate, impl, max_memory
        self.finish_init()

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        embeddings, labels, shard = class_shards.gather_batch(self.shard, embeddings, labels, self.weight.shape[1])
        labels, weight, shard = class_sampling.sample(self, embeddings, labels, shard)
        return magface_loss(embeddings, labels, weight, shard=shard, **self.arguments())

    def get_logits(self, embeddings: Tensor) -> Tensor:
        """s cos of every class, (B, C), without the margin; differentiable."""
        return logits.of_cosines(self, embeddings, self.weight, self.scale)
