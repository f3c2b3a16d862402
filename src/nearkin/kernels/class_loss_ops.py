"""Softmax over class weights with margin, cross-entropy and reduction: one node of the graph, few launches.

The passes over the classes are those of `class_softmax_ops`. In bfloat16 the own class is part of them: in the backward
pass its entry is the derivative by its own logit, so both its gradients come from the same products. In float32 it is
left out: it outweighs all others together, and beside it a sum in float32 would lose their digits.
"""

import functools
import math
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nearkin.core import checks
from nearkin.core import class_softmax as plain
from nearkin.core.autograd import HandGradient
from nearkin.kernels import class_softmax_ops as passes
from nearkin.kernels import eligible, launch

__all__ = ["Annealing", "Form", "gradients", "loss", "readable", "readable_statistics", "serves"]


class Annealing(NamedTuple):
    """max(floor, start / (1 + decay · steps)), computed where it is used."""

    steps: Tensor  # a scalar
    start: float
    decay: float
    floor: float


class Form(NamedTuple):
    """How the own class is treated. scale: of the cosines; a scalar tensor is read on its device."""

    scale: float | Tensor | Annealing = 1.0  # SphereFace: its annealing
    margin: float = 0.0
    kind: str = "cosine"  # or "angle", "sphere", "adaptive", "magnitude"; "none": the own class is like the others
    straight: bool = False  # an angle's slope is that of the plain cosine
    centers: int = 1
    lost: float = 0.0  # the score of a weight without a direction
    needs_others: bool = False  # an anchor counts only if there are others
    soft: bool = True  # the own class is in the sum too
    raw: bool = False  # embeddings keep their length; SphereFace's always do
    bounds: tuple[float, ...] = ()  # AdaFace: h; MagFace: the upper margin, lower and upper length
    statistics: tuple[float | Tensor, float | Tensor] | None = None  # AdaFace: mean and deviation of the lengths

    @property
    def normalize(self) -> bool:
        return not self.raw and self.kind != "sphere"

    @property
    def by_length(self) -> bool:
        """Whether the own class's score has a slope by the length of rows that are scaled to unit length."""
        return self.kind == "magnitude"

    def numbers(self) -> tuple[float, float, float, float]:
        """What the kernels take beside the scale: margin, cosine and sine of it, and the score of a weight without a
        direction; AdaFace: margin, h, -, -; MagFace: lower and upper margin, lower and upper length."""
        if self.bounds:
            first, *others = map(float, (self.margin, *self.bounds, 0.0, 0.0))
            return first, others[0], others[1], others[2]
        return float(self.margin), math.cos(self.margin), math.sin(self.margin), float(self.lost)

    def statistics_tensor(self, x: Tensor) -> Tensor | None:
        """Mean and deviation, (2,) on the device of x."""
        if self.statistics is None:
            return None
        parts = [
            part.to(x.device, torch.float32).reshape(())
            if isinstance(part, Tensor)
            else torch.full((), part, dtype=torch.float32, device=x.device)
            for part in self.statistics
        ]
        return torch.stack(parts)


def serves(embeddings: Tensor, labels: Any, weight: Tensor, form: Form, reduction: str, max_memory: int | None) -> bool:
    """Whether `loss` computes it: what the passes serve, class ids, one value, no learned scale, no transform."""
    return (
        reduction in eligible.REDUCTIONS
        and not form.raw
        and not isinstance(form.scale, Annealing)
        and type(embeddings) in (Tensor, nn.Parameter)
        and type(weight) in (Tensor, nn.Parameter)
        and embeddings.dim() == weight.dim() == 2
        and embeddings.shape[1] == weight.shape[1] > 0
        and weight.shape[0] >= form.centers
        and isinstance(labels, Tensor)
        and labels.dtype in eligible.IDS
        and labels.shape == embeddings.shape[:1]
        and labels.device == embeddings.device
        and (not isinstance(form.scale, Tensor) or readable(form.scale, embeddings))
        and readable_statistics(form, embeddings)
        and passes.serves(embeddings, weight, form.centers, max_memory)
    )


def readable(scale: Tensor, embeddings: Tensor) -> bool:
    """Whether the kernels may read a scale on the device: a scalar that does not learn."""
    return scale.numel() == 1 and scale.is_floating_point() and scale.device == embeddings.device and not (
        scale.requires_grad and torch.is_grad_enabled()
    )  # fmt: skip


def readable_statistics(form: Form, embeddings: Tensor) -> bool:
    """The same of AdaFace's mean and deviation."""
    return form.statistics is None or all(
        not isinstance(part, Tensor) or readable(part, embeddings) for part in form.statistics
    )


def loss(
    embeddings: Tensor, labels: Tensor, weight: Tensor, form: Form, reduction: str, max_memory: int | None
) -> Tensor:
    """The loss of a batch that the kernels can serve; labels in 0..C-1, -1 is left out."""
    if checks.reads_values(labels):
        checks.in_range(labels, weight.shape[0] // form.centers)
    with launch.device_of(embeddings):
        value: Tensor = _Loss.call(embeddings, weight, labels, form, reduction, max_memory)
    return value


@functools.cache
def _row_kernels() -> ModuleType:
    from nearkin.kernels import class_row_kernels

    return class_row_kernels


class _Loss(HandGradient):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, form: Form, reduction: str, max_memory: int | None
    ) -> Tensor:
        class_kernels, row_kernels = passes._kernels(), _row_kernels()
        x, weight_rows = x.contiguous(), weight.contiguous()
        assert not isinstance(form.scale, Annealing)
        inverse = class_kernels.lengths(weight_rows)  # first: the longest before the scan, and the GPU may be idle
        scale, scale_tensor = (1.0, form.scale) if isinstance(form.scale, Tensor) else (form.scale, None)
        times = int(form.margin) if form.kind == "sphere" else 1
        numbers = (float(scale), *form.numbers())
        choices = (numbers, form.kind, form.straight, times, form.centers, class_kernels.halves(x, weight_rows))
        read = form.statistics_tensor(x) if form.statistics else scale_tensor
        rows, places, facts, stats = row_kernels.prepare(x, weight_rows, labels.contiguous(), read, *choices)
        bounded = (
            not isinstance(form.scale, Tensor)
            and form.kind != "sphere"
            and max(form.scale, form.lost) <= class_kernels.BOUND
        )
        constants = (form.centers, form.lost / math.log(2), False, passes.precision(), True, bounded)
        operands = class_kernels.Operands(rows, stats[0], weight_rows, inverse, places[0], *constants)
        peaks, sums = class_kernels.scan(operands, passes._part_size(rows, weight_rows, max_memory))
        classes = weight_rows.shape[0] // form.centers
        value, gain = row_kernels.settle(peaks, sums, facts, stats, classes, form.needs_others, form.soft, reduction)
        ctx.save_for_backward(x, weight_rows, rows, inverse, places, facts, stats, gain)
        ctx.constants, ctx.max_memory = constants, max_memory
        ctx.normalize, ctx.by_length = form.normalize, form.by_length
        ctx.kind = plain.gradient_kind(weight)
        result: Tensor = value
        return result

    @staticmethod
    @launch.once
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return *gradients(ctx, upstream), None, None, None, None


def gradients(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """By embeddings and class weights, from what `_Loss` or a loss of the same buffers has saved."""
    x, weight, rows, inverse, places, facts, stats, gain, *of_classes = ctx.saved_tensors
    class_kernels = passes._kernels()
    factor, level, pull, push, _ = stats
    ids, picks = places
    operands = class_kernels.Operands(rows, factor, weight, inverse, ids, *ctx.constants)
    if operands.columns:
        level, pull = of_classes
    wants, kind = ctx.needs_input_grad[0], ctx.kind if ctx.needs_input_grad[1] else None
    with launch.device_of(x):
        if class_kernels.halves(rows, weight):
            within, apart, by_own = class_kernels.Own(picks, push, gain, upstream), None, None
        else:
            scale_up, picked = gain * upstream, picks[: len(x)].long()
            within, (by_own, by_theirs) = None, _own(operands, picked, push[: len(x)] * scale_up)
            apart, pull = (picked, by_theirs), pull * scale_up
            if not operands.columns:
                pull = pull / factor  # the pass multiplies by it
        by_rows, by_weight = passes.gradients(operands, level, pull, apart, True, wants, kind, ctx.max_memory, within)
        if by_rows is None:
            return None, by_weight
        if by_own is not None:
            by_rows += by_own
        row_kernels = _row_kernels()
        choices = (ctx.normalize, ctx.by_length)
        return row_kernels.input_gradient(by_rows, x, facts, stats, gain, upstream, *choices), by_weight


def _own(operands: Any, picks: Tensor, push: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients by anchors and by the weights of their own classes, (B, D) each, of Σ push · <row, unit weight>."""
    rows, inverse = operands.rows.double(), operands.inverse[picks].double()[:, None]
    unit = operands.weight[picks].double() * inverse
    push = push.double()[:, None]
    across = rows - (rows * unit).sum(1, keepdim=True) * unit
    return (push * unit).float(), (push * inverse * across).float()
