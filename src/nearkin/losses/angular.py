"""Class softmax on the sphere: normalised and heated-up softmax, SphereFace, CosFace, ArcFace, AdaCos."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm, cross_entropy

from nearkin.core import checks, distances, reduce
from nearkin.losses.settings import hold, show

__all__ = [
    "AdaCosLoss",
    "ArcFaceLoss",
    "CosFaceLoss",
    "HeatedSoftmaxLoss",
    "NormalizedSoftmaxLoss",
    "SphereFaceLoss",
    "adacos_loss",
    "adacos_scale",
    "arcface_loss",
    "cosface_loss",
    "heated_softmax_loss",
    "normalized_softmax_loss",
    "sphereface_loss",
]


def normalized_softmax_loss(
    embeddings: Tensor, labels: Tensor, weight: Tensor, *, scale: float | Tensor = 20.0, reduction: str = "mean"
) -> Tensor:
    r"""Softmax over scaled cosines to the class weights.

    l_i = -log( e^{s cos_iy} / Σ_c e^{s cos_ic} )

    embeddings (B, D), labels (B,) in 0..C-1, -1 left out, weight (C, D). Kin: `proxy_nca_loss` in its softmax form,
    which is this with s = 2·scale². Wang et al. 2017 (NormFace), Zhai and Wu 2018, arXiv:1811.12649; scale 20 = their
    temperature 0.05.
    """
    ids, known, spoilt = checks.classes(embeddings, labels, *weight.shape)
    if not isinstance(scale, Tensor):
        checks.positive("scale", scale)
    logits = scale * distances.cosine(embeddings, weight)  # (B, C)
    return _classify(logits, ids, known, spoilt, reduction) + reduce.taint(embeddings, weight)


def heated_softmax_loss(
    embeddings: Tensor,
    labels: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    scale: float | Tensor = 16.0,
    normalize: bool = True,
    reduction: str = "mean",
) -> Tensor:
    r"""Normalised softmax with biases, trained warm and finished hot (a smaller scale).

    l_i = -log softmax_y( α <w_c/|w_c|, x> + b_c ),   x of unit length (normalize=True), or as given

    Zhang et al. 2018, arXiv:1809.04157; scale 16, then 4 for the last quarter, from its released code.
    """
    ids, known, spoilt = checks.classes(embeddings, labels, *weight.shape)
    if not isinstance(scale, Tensor):
        checks.positive("scale", scale)
    x = distances.unit(embeddings) if normalize else embeddings
    logits = scale * distances.dot(x, distances.unit(weight)) + bias  # (B, C)
    return _classify(logits, ids, known, spoilt, reduction) + reduce.taint(embeddings, weight, bias)


def cosface_loss(
    embeddings: Tensor,
    labels: Tensor,
    weight: Tensor,
    *,
    margin: float = 0.35,
    scale: float = 64.0,
    reduction: str = "mean",
) -> Tensor:
    r"""The own class must win by a margin of cosine.

    l_i = -log( e^{s (cos_iy - m)} / (e^{s (cos_iy - m)} + Σ_{c != y} e^{s cos_ic}) )

    Arguments as `normalized_softmax_loss`. Wang et al. 2018, arXiv:1801.09414, eq. 4; m 0.35 and s 64 from there.
    """
    ids, known, spoilt = checks.classes(embeddings, labels, *weight.shape)
    checks.positive("scale", scale)
    cosine = distances.cosine(embeddings, weight)  # (B, C)
    target = cosine.gather(1, ids[:, None]) - margin
    value = _classify(scale * cosine.scatter(1, ids[:, None], target), ids, known, spoilt, reduction)
    return value + reduce.taint(embeddings, weight)


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
) -> Tensor:
    r"""The own class must win by a margin of angle.

    target logit s cos(θ_y + m) while θ_y < π - m, beyond it s (cos θ_y - m sin m), which goes on falling

    Arguments as `normalized_softmax_loss`; m in radians. weight (C·K, D) with K = sub_centers rows a class: the nearest
    speaks for its class and alone learns. sin and cos of θ_y come from |x - w| and |x + w|, so value and gradient are
    exact and finite from θ = 0 to π. The gradient is the true one; `straight_through=True` gives the target the slope s
    of a plain cosine, as InsightFace's PyTorch code does. Deng et al. 2019, arXiv:1801.07698, eq. 3; m 0.5, s 64 from
    there; sub-centres Deng et al. 2020.
    """
    checks.whole("sub_centers", sub_centers, 1)
    num_classes = weight.shape[0] // sub_centers
    ids, known, spoilt = checks.classes(embeddings, labels, num_classes, weight.shape[1])
    checks.positive("scale", scale)
    if not 0 <= margin < math.pi:
        raise ValueError(f"margin must be an angle in [0, π) radians, got {margin}")
    x, w = distances.unit(embeddings), distances.unit(weight)
    every = distances.dot(x, w).view(x.shape[0], num_classes, sub_centers)  # (B, C, K)
    cosine, nearest = every.max(2)
    own = w[ids * sub_centers + nearest.gather(1, ids[:, None]).squeeze(1)]  # (B, D)
    cos, sin = _cos_sin(x, own)
    target = torch.where(
        cos > -math.cos(margin),
        cos * math.cos(margin) - sin * math.sin(margin),
        cos - margin * math.sin(margin),
    )
    if straight_through:
        target = cos + (target - cos).detach()
    logits = scale * cosine.scatter(1, ids[:, None], target[:, None].to(cosine.dtype))
    return _classify(logits, ids, known, spoilt, reduction) + reduce.taint(embeddings, weight)


def sphereface_loss(
    embeddings: Tensor,
    labels: Tensor,
    weight: Tensor,
    *,
    margin: int = 4,
    annealing: float | Tensor = 5.0,
    reduction: str = "mean",
) -> Tensor:
    r"""The own class must win at a multiple of the angle; embeddings keep their length.

    target logit |x| (λ cos θ_y + ψ(θ_y)) / (1 + λ), others |x| cos θ_c, ψ(θ) = (-1)^k cos(mθ) - 2k on [kπ/m, (k+1)π/m]

    λ = `annealing`; 0 is the bare loss. cos(mθ) is the Chebyshev polynomial of cos θ, so there is no arc cosine and the
    gradient is exact everywhere. Other arguments as `normalized_softmax_loss`. Liu et al. 2017, arXiv:1704.08063,
    eq. 7; m 4 from there, final λ 5 from its released code.
    """
    ids, known, spoilt = checks.classes(embeddings, labels, *weight.shape)
    checks.whole("margin", margin, 1)
    if not isinstance(annealing, Tensor):
        checks.at_least("annealing", annealing, 0)
    w = distances.unit(weight)
    logits = distances.dot(embeddings, w)  # (B, C), |x| cos θ
    cos, _ = _cos_sin(distances.unit(embeddings), w[ids])
    target = distances.length(embeddings) * (annealing * cos + sphereface_psi(cos, margin)) / (1 + annealing)
    logits = logits.scatter(1, ids[:, None], target[:, None].to(logits.dtype))
    return _classify(logits, ids, known, spoilt, reduction) + reduce.taint(embeddings, weight)


def sphereface_psi(cos: Tensor, margin: int) -> Tensor:
    """ψ(θ) of `sphereface_loss` from cos θ: falls monotonically from 1 to 1 - 2m."""
    before, now = torch.ones_like(cos), cos
    for _ in range(margin - 1):
        before, now = now, 2 * cos * now - before  # T_{m+1} = 2 c T_m - T_{m-1}
    turns = torch.zeros_like(cos)
    for j in range(1, margin):
        turns = turns + (cos.detach() < math.cos(j * math.pi / margin)).to(cos.dtype)
    return (1 - 2 * (turns % 2)) * now - 2 * turns


def adacos_loss(
    embeddings: Tensor, labels: Tensor, weight: Tensor, *, scale: float | Tensor | None = None, reduction: str = "mean"
) -> Tensor:
    r"""Normalised softmax whose scale follows from the number of classes, or from the batch.

    scale √2 ln(C - 1) unless given; `adacos_scale` gives the dynamic one. Needs three classes
    or more: two give scale 0.
    Zhang et al. 2019, arXiv:1905.00292, eq. 12 (fixed) and 15 (dynamic).
    """
    fixed = _fixed_scale(weight.shape[0])
    return normalized_softmax_loss(
        embeddings, labels, weight, scale=fixed if scale is None else scale, reduction=reduction
    )


@torch.no_grad()
def adacos_scale(embeddings: Tensor, labels: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    r"""The next dynamic scale: ln(B_avg) / cos(min(π/4, θ_med)).

    B_avg = 1/N Σ_i Σ_{c != y_i} e^{s cos_ic} with the last scale s; θ_med: lower median of the angles to the own class.
    A batch that says nothing leaves the scale as it was.
    """
    ids, known, _ = checks.classes(embeddings, labels, *weight.shape)
    cosine = distances.cosine(embeddings, weight)  # (B, C)
    own = torch.zeros_like(cosine, dtype=torch.bool).scatter_(1, ids[:, None], True)
    flat = reduce.logsumexp((scale * cosine).flatten()[None], (known[:, None] & ~own).flatten()[None])
    angle = cosine.gather(1, ids[:, None]).squeeze(1).clamp(-1, 1).acos()
    middle = torch.where(known, angle, torch.nan).nanmedian()
    following = (flat.squeeze(0) - known.sum().clamp(min=1).to(angle.dtype).log()) / middle.clamp(max=math.pi / 4).cos()
    return torch.where(following.isfinite() & (following > 0), following, scale).to(scale.dtype)


def _fixed_scale(num_classes: int) -> float:
    if num_classes < 3:
        raise ValueError(f"num_classes must be >= 3 for AdaCos, whose scale √2 ln(C - 1) is 0 for 2, got {num_classes}")
    return math.sqrt(2) * math.log(num_classes - 1)


def _cos_sin(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of the angle between unit rows, (B,), from their difference and sum: exact near 0 and π.

    A zero row stands at a right angle to everything.
    """
    x, w = x.to(torch.promote_types(x.dtype, w.dtype)), w.to(torch.promote_types(x.dtype, w.dtype))
    apart, along = distances.length(x - w), distances.length(x + w)
    upright = ~(x.any(1) & w.any(1))
    return (along.square() - apart.square()) / 4, torch.where(upright, 1.0, apart * along / 2)


def _classify(logits: Tensor, ids: Tensor, known: Tensor, spoilt: Tensor, reduction: str) -> Tensor:
    value = cross_entropy(logits, ids, reduction="none") + spoilt.to(logits.dtype)
    return reduce.terms(value, known, reduction)


def _weight(rows: int, dim: int) -> nn.Parameter:
    """Class weights in random directions."""
    checks.whole("num_classes", rows, 1)
    checks.whole("dim", dim, 1)
    return nn.Parameter(torch.randn(rows, dim) / math.sqrt(dim))


class NormalizedSoftmaxLoss(nn.Module):
    """`normalized_softmax_loss` with its class weights (C, D)."""

    lr_scale = 1.0
    settings: dict[str, Any]

    def __init__(self, num_classes: int, dim: int, scale: float = 20.0, *, reduction: str = "mean") -> None:
        super().__init__()
        self.weight = _weight(num_classes, dim)
        hold(self, scale=scale, reduction=reduction)

    extra_repr = show

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return normalized_softmax_loss(embeddings, labels, self.weight, **self.settings)


class HeatedSoftmaxLoss(nn.Module):
    """`heated_softmax_loss` with class weights and biases, and its schedule.

    After `heat_after` training steps the scale drops from `scale` to `heated_scale` for good (the paper: the last
    quarter of training, at a tenth of the learning rate); None never does. Steps are counted in a buffer.
    norm="batch" standardises the embeddings over the batch instead of scaling them to unit length, and divides the
    scale by √D, about the length of such an embedding.
    """

    lr_scale = 1.0
    settings: dict[str, Any]
    steps: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(
        self,
        num_classes: int,
        dim: int,
        scale: float = 16.0,
        heated_scale: float = 4.0,
        heat_after: int | None = None,
        *,
        norm: str = "l2",
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        checks.positive("scale", scale)
        checks.positive("heated_scale", heated_scale)
        checks.one_of("norm", norm, ("l2", "batch"))
        if heat_after is not None:
            checks.whole("heat_after", heat_after, 0)
        self.weight = _weight(num_classes, dim)
        self.bias = nn.Parameter(torch.zeros(num_classes))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("running_mean", torch.zeros(dim))
        self.register_buffer("running_var", torch.ones(dim))
        self.norm, self.heat_after, self.scales = norm, heat_after, (scale, heated_scale)
        hold(self, reduction=reduction)

    extra_repr = show

    @property
    def scale(self) -> Tensor:
        """The scale now: warm before the heat, hot after it."""
        warm, hot = self.scales
        heated = torch.zeros_like(self.steps, dtype=torch.bool)
        if self.heat_after is not None:
            heated = self.steps >= self.heat_after
        return torch.where(heated, hot, warm).to(distances.wide(self.steps))

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        checks.classes(embeddings, labels, *self.weight.shape)
        scale, x = self.scale, embeddings
        if self.norm == "batch":
            scale = scale / math.sqrt(self.weight.shape[1])
            x = self._standardised(embeddings)
        if self.training:
            self.steps = self.steps + 1
        normalize = self.norm == "l2"
        return heated_softmax_loss(
            x, labels, self.weight, self.bias, scale=scale, normalize=normalize, **self.settings
        ) + reduce.taint(embeddings)

    def _standardised(self, embeddings: Tensor) -> Tensor:
        x = distances.upcast(embeddings)
        learns = self.training and x.shape[0] > 1  # a single row has no spread to learn from
        mean, var = self.running_mean.to(x.dtype, copy=True), self.running_var.to(x.dtype, copy=True)
        y = batch_norm(x, mean, var, training=learns)
        if learns:
            self.running_mean, self.running_var = mean.to(self.running_mean), var.to(self.running_var)
        return y


class CosFaceLoss(nn.Module):
    """`cosface_loss` with its class weights (C, D)."""

    lr_scale = 1.0
    settings: dict[str, Any]

    def __init__(
        self, num_classes: int, dim: int, margin: float = 0.35, scale: float = 64.0, *, reduction: str = "mean"
    ) -> None:
        super().__init__()
        self.weight = _weight(num_classes, dim)
        hold(self, margin=margin, scale=scale, reduction=reduction)

    extra_repr = show

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return cosface_loss(embeddings, labels, self.weight, **self.settings)


class ArcFaceLoss(nn.Module):
    """`arcface_loss` with its class weights (C·K, D), K = sub_centers in a row for each class."""

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
    ) -> None:
        super().__init__()
        checks.whole("sub_centers", sub_centers, 1)
        self.weight = _weight(num_classes * sub_centers, dim)
        hold(
            self,
            margin=margin,
            scale=scale,
            sub_centers=sub_centers,
            straight_through=straight_through,
            reduction=reduction,
        )

    extra_repr = show

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return arcface_loss(embeddings, labels, self.weight, **self.settings)


class SphereFaceLoss(nn.Module):
    """`sphereface_loss` with its class weights (C, D) and annealing.

    λ_t = max(floor, start / (1 + decay t)), t the training steps so far, counted in a buffer; without annealing the
    loss does not converge. 1000, 0.12 and 5 from the released code.
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
    ) -> None:
        super().__init__()
        for name, value in (("start", start), ("decay", decay), ("floor", floor)):
            checks.at_least(name, value, 0)
        self.weight = _weight(num_classes, dim)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.schedule = (start, decay, floor)
        hold(self, margin=margin, reduction=reduction)

    extra_repr = show

    @property
    def annealing(self) -> Tensor:
        """λ now."""
        start, decay, floor = self.schedule
        return (start / (1 + decay * self.steps.to(distances.wide(self.steps)))).clamp(min=floor)

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        annealing = self.annealing
        value = sphereface_loss(embeddings, labels, self.weight, annealing=annealing, **self.settings)
        if self.training:
            self.steps = self.steps + 1  # a new tensor: a compiled backward may still read the old one
        return value


class AdaCosLoss(nn.Module):
    """`adacos_loss` with its class weights (C, D); dynamic=True adapts the scale, kept in the state dict, to each batch
    in training."""

    lr_scale = 1.0
    settings: dict[str, Any]
    scale: Tensor

    def __init__(self, num_classes: int, dim: int, *, dynamic: bool = True, reduction: str = "mean") -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(_fixed_scale(num_classes)))
        self.weight = _weight(num_classes, dim)
        self.dynamic = dynamic
        hold(self, reduction=reduction)

    extra_repr = show

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        if self.dynamic and self.training:
            self.scale = adacos_scale(embeddings, labels, self.weight, self.scale)
        return adacos_loss(embeddings, labels, self.weight, scale=self.scale, **self.settings)
