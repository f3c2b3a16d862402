"""Class softmax with a margin: by cosine (CosFace), by angle (ArcFace), by a multiple of the angle (SphereFace)."""

from __future__ import annotations  # torch 2.6 compiles no function within one whose annotations it evaluates

import math
from typing import Any

import torch
from torch import Tensor

from nearkin.core import angles, checks, distances
from nearkin.core.autograd import differentiable_once
from nearkin.losses import logits
from nearkin.losses.classes import ClassCall, ClassLoss, Own, function_of
from nearkin.losses.settings import Choices, Range, setting

__all__ = [
    "ArcFaceLoss",
    "CosFaceLoss",
    "SphereFaceLoss",
    "arcface_loss",
    "class_margins",
    "cosface_loss",
    "sphereface_loss",
    "turned",
]

SCALES = Range(8.0, 256.0, log=True)


def turned(cos: Tensor, sin: Tensor, margin: float | Tensor) -> Tensor:
    """cos(θ + m), and beyond π - m, where it would rise again, cos θ - m sin m."""
    along, across = (margin.cos(), margin.sin()) if isinstance(margin, Tensor) else (math.cos(margin), math.sin(margin))
    return torch.where(cos > -along, cos * along - sin * across, cos - margin * across)


def class_margins(counts: Tensor, *, rare: float = 0.5, common: float = 0.05, power: float = 0.25) -> Tensor:
    """A margin of angle per class, (C,), larger for the rarer ones: m_c = rare · n_c^(-power) + common.

    counts (C,): the training items n_c of each class, at least 1; `torch.bincount(labels)` counts them. For
    `ArcFaceLoss(margin=)`. Ha et al. 2020, arXiv:2010.05350, whose a 0.5, b 0.05 and λ 1/4 these are.
    On a long tail it moved accuracy from common classes to rare ones (docs/measured/losses.md).
    """
    for name, value in (("rare", rare), ("common", common), ("power", power)):
        checks.at_least(name, value, 0)
    checks.angle("rare + common", rare + common)
    if not isinstance(counts, Tensor) or counts.dim() != 1 or bool((counts < 1).any()):
        raise ValueError(f"counts must be a tensor (C,) of whole numbers >= 1, one per class, got {counts!r}")
    return rare * counts.to(torch.get_default_dtype()) ** -power + common


def _angles(name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        checks.angle(name, value)
    elif value.dim() != 1 or not value.is_floating_point():
        raise ValueError(f"{name} must be an angle, or a tensor (C,) of them, got {value.dtype} {tuple(value.shape)}")
    elif checks.reads_values(value) and bool(((value < 0) | (value >= math.pi) | value.isnan()).any()):
        raise ValueError(f"{name} must be angles in [0, π) radians, got {value}")


class CosFaceLoss(ClassLoss):
    r"""The own class must win by a margin of cosine.

    l_i = -log( e^{s (cos_iy - m)} / (e^{s (cos_iy - m)} + Σ_{c != y} e^{s cos_ic}) )

    Class weights (C, D); batches, blocks of classes, sampled and shared classes as in `NormalizedSoftmaxLoss`. Wang et
    al. 2018, arXiv:1801.09414, eq. 4; m 0.35 and s 64 from there.
    """

    margin: float = setting(
        default=0.35, kw_only=False, search=Range(0.02, 0.65), text="m, a margin of cosine; 0.35: the paper's"
    )
    scale: float = setting(
        default=64.0, above=0, kw_only=False, search=SCALES, text="s, what cosines are multiplied by; 64: the paper's"
    )

    def own(self, own: Own) -> Tensor:
        return own.cos - self.margin


class ArcFaceLoss(ClassLoss):
    r"""The own class must win by a margin of angle.

    l_i = -log softmax_y of s cos θ_c, but of the own class   s cos(θ_y + m) while θ_y < π - m,
    beyond it s (cos θ_y - m sin m), which goes on falling

    m in radians. Class weights (C·K, D), K = sub_centers in a row for each class: only the nearest scores for its class
    and learns; a class is sampled, and shared, with all its centres. The sine of θ_y is the length of
    x - w cos θ_y, so value and gradient are exact and finite from θ = 0 to π. The gradient is the true one;
    `straight_through=True` gives the target the slope s of a plain cosine, as InsightFace's PyTorch code does. See also
    `NormalizedSoftmaxLoss`. Deng et al. 2019, arXiv:1801.07698, eq. 3; m 0.5, s 64 from there; sub-centres Deng et al.
    2020.
    """

    margin: float | Tensor = setting(
        default=0.5,
        rule=lambda name, value: _angles(name, value),
        kw_only=False,
        search=Range(0.05, 0.6),
        text="m, a margin of angle in radians, or one per class, (C,), as of `class_margins`; 0.5: the paper's",
    )
    scale: float = setting(
        default=64.0, above=0, kw_only=False, search=SCALES, text="s, what cosines are multiplied by; 64: the paper's"
    )
    sub_centers: int = setting(
        default=1, whole=True, fixed=True, kw_only=False, text="K, centres of each class; 1: the paper's"
    )
    straight_through: bool = setting(
        default=False, text="the target has the slope of a plain cosine, as in InsightFace's PyTorch code"
    )

    @property
    def per_class(self) -> int:  # type: ignore[override]
        return self.sub_centers

    def make(self) -> None:
        super().make()
        if isinstance(self.margin, Tensor):  # a buffer: it goes where the loss goes
            margins = self.__dict__.pop("margin").detach().clone()
            if len(margins) != self.num_classes:
                raise ValueError(f"margin must have one entry per class: {self.num_classes}, got {len(margins)}")
            self.register_buffer("margin", margins)

    def own(self, own: Own) -> Tensor:
        margin = self.margin
        if isinstance(margin, Tensor):
            labels = own.call.given["labels"].clamp(0, len(margin) - 1).long()
            margin = margin.to(own.cos.dtype).index_select(0, labels)  # (B,)
        target = turned(own.cos, own.sin, margin)
        if self.straight_through:
            straight = own.cos + (target - own.cos).detach()
            target = differentiable_once(straight, "ArcFaceLoss(straight_through=True)")
        return target


class SphereFaceLoss(ClassLoss):
    r"""The own class must win at a multiple of the angle; embeddings keep their length.

    target logit |x| (λ cos θ_y + ψ(θ_y)) / (1 + λ), others |x| cos θ_c, ψ(θ) = (-1)^k cos(mθ) - 2k on [kπ/m, (k+1)π/m]

    λ_t = max(floor, start / (1 + decay t)), t the training steps so far, counted in a buffer: without annealing the
    loss does not converge. The function form takes λ = `annealing`; 0 is the bare loss. cos(mθ) is the Chebyshev
    polynomial of cos θ, so there is no arc cosine and the gradient is exact everywhere. With m 1 this is the modified
    softmax (A-Softmax without a margin). Class weights (C, D), all else as in `NormalizedSoftmaxLoss`. Liu et al. 2017,
    arXiv:1704.08063, eq. 7; m 4 from there; 1000, 0.12 and 5 from its released code.
    """

    reads_length = True
    unit_anchors = False

    def _annealing(self) -> Tensor:
        """The present λ."""
        return (self.start / (1 + self.decay * self.steps.to(distances.wide(self.steps)))).clamp(min=self.floor)

    annealing: float | Tensor = setting(
        default=5.0, at_least=0, tensor=True, only="function", now=_annealing, text="λ, a number or a scalar"
    )
    margin: int = setting(
        default=4, whole=True, kw_only=False, search=Choices((2, 3, 4)), text="m, an integer; 4: the paper's"
    )
    start: float = setting(
        default=1000.0, at_least=0, only="class", text="λ at the first step; 1000: the released code's"
    )
    decay: float = setting(
        default=0.12, at_least=0, only="class", text="how fast λ falls with the steps; 0.12: the released code's"
    )
    floor: float = setting(
        default=5.0,
        at_least=0,
        only="class",
        search=Range(1.0, 20.0, log=True),
        text="the least λ; 5: the released code's, 0 ends in the bare loss",
    )

    def make(self) -> None:
        super().make()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def prepare(self, call: ClassCall) -> None:
        call.given |= {"annealing": self.annealing}

    def own(self, own: Own) -> Tensor:
        length = own.length
        cos = own.cos / length.clamp(min=torch.finfo(length.dtype).tiny)  # of |x| cos θ
        share: Tensor = own.call.given["annealing"]  # of the plain cosine
        return length * (share * cos + angles.psi(cos, self.margin)) / (1 + share)

    def learn(self, call: ClassCall) -> None:
        self.steps = self.steps + 1  # a new tensor: a backward may still read the old one

    def get_logits(self, embeddings: Tensor) -> Tensor:
        """|x| cos of every class, (B, C), without margin and annealing; differentiable."""
        x = logits.checked(self, embeddings, self.weight)
        return distances.dot(x, distances.unit(self.weight))


cosface_loss = function_of(CosFaceLoss, "cosface_loss")
arcface_loss = function_of(ArcFaceLoss, "arcface_loss")
sphereface_loss = function_of(SphereFaceLoss, "sphereface_loss")
