"""Softmax over class weights whole, margin, cross-entropy and reduction included: one node of the graph, few launches.

The passes over the classes are those of `kernels.class_softmax`. Of bfloat16 the own class takes part in them: in the
backward pass its place holds the derivative by its own logit, so both gradients of it come out of the same products. Of
float32 it does not: it outweighs all others together, and beside it a sum in float32 would lose their digits.
"""

import functools
import math
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from nearkin.core import checks
from nearkin.core import class_softmax as plain
from nearkin.core.autograd import HandGradient
from nearkin.kernels import class_softmax_ops as passes
from nearkin.kernels import eligible, launch


class Form(NamedTuple):
    """What is asked of the own class. scale: of the cosines; a scalar tensor is read where it lies."""

    scale: float | Tensor = 1.0  # SphereFace: its annealing
    margin: float = 0.0
    kind: str = "cosine"  # or "angle", "sphere"
    straight: bool = False  # an angle's slope is that of the plain cosine
    centers: int = 1
    lost: float = 0.0  # what a weight without a direction scores
    told: bool = False  # an anchor counts only if there are others
    soft: bool = True  # the own class is in the sum too


def serves(embeddings: Tensor, labels: Any, weight: Tensor, form: Form, reduction: str, max_memory: int | None) -> bool:
    """Whether `loss` computes it: what the passes serve, class ids, one value, no scale that learns, no transform."""
    return (
        reduction in eligible.REDUCTIONS
        and type(embeddings) in (Tensor, nn.Parameter)
        and type(weight) in (Tensor, nn.Parameter)
        and embeddings.dim() == weight.dim() == 2
        and embeddings.shape[1] == weight.shape[1] > 0
        and weight.shape[0] >= form.centers
        and isinstance(labels, Tensor)
        and labels.dtype in eligible.IDS
        and labels.shape == embeddings.shape[:1]
        and labels.device == embeddings.device
        and (not isinstance(form.scale, Tensor) or _readable(form.scale, embeddings))
        and passes.serves(embeddings, weight, form.centers, max_memory)
    )


def _readable(scale: Tensor, embeddings: Tensor) -> bool:
    return scale.numel() == 1 and scale.is_floating_point() and scale.device == embeddings.device and not (
        scale.requires_grad and torch.is_grad_enabled()
    )  # fmt: skip


def loss(
    embeddings: Tensor, labels: Tensor, weight: Tensor, form: Form, reduction: str, max_memory: int | None
) -> Tensor:
    """The loss of a batch that `serves` has found to be one for the kernels; labels in 0..C-1, -1 left out."""
    if checks.reads_values(labels):
        checks.in_range(labels, weight.shape[0] // form.centers)
    with launch.device_of(embeddings):
        value: Tensor = _Loss.call(embeddings, weight, labels, form, reduction, max_memory)
    return value


@functools.cache
def _rows() -> ModuleType:
    from nearkin.kernels import class_row_kernels

    return class_row_kernels


class _Loss(HandGradient):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, form: Form, reduction: str, max_memory: int | None
    ) -> Tensor:
        tiles, over = passes._tiles(), _rows()
        x, whole = x.contiguous(), weight.contiguous()
        scale, given = (1.0, form.scale) if isinstance(form.scale, Tensor) else (form.scale, None)
        times = int(form.margin) if form.kind == "sphere" else 1
        numbers = tuple(map(float, (scale, form.margin, math.cos(form.margin), math.sin(form.margin), form.lost)))
        way = (numbers, form.kind, form.straight, times, form.centers, tiles.halves(x, whole))
        rows, places, facts, stats = over.prepare(x, whole, labels.contiguous(), given, *way)
        inverse = tiles.lengths(whole)
        more = (form.centers, form.lost / math.log(2), False, passes.precision(), True)
        operands = tiles.Operands(rows, stats[0], whole, inverse, places[0], *more)
        peaks, sums = tiles.scan(operands, passes._a_part(rows, whole, max_memory))
        classes = whole.shape[0] // form.centers
        value, gain = over.settle(peaks, sums, facts, stats, classes, form.told, form.soft, reduction)
        ctx.save_for_backward(x, whole, rows, inverse, places, facts, stats, gain)
        ctx.more, ctx.normalize, ctx.max_memory = more, form.kind != "sphere", max_memory
        ctx.kind = plain.gradient_kind(weight)
        result: Tensor = value
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rows, inverse, places, facts, stats, gain = ctx.saved_tensors
        tiles = passes._tiles()
        factor, level, pull, push, _ = stats
        ids, picks = places
        given = tiles.Operands(rows, factor, weight, inverse, ids, *ctx.more)
        wants, kind = ctx.needs_input_grad[0], ctx.kind if ctx.needs_input_grad[1] else None
        with launch.device_of(x):
            if tiles.halves(rows, weight):
                within, apart, by_own = tiles.Own(picks, push, gain, upstream), None, None
            else:
                grown, mine = gain * upstream, picks[: len(x)].long()
                within, (by_own, by_theirs) = None, _own(given, mine, push[: len(x)] * grown)
                apart, pull = (mine, by_theirs), pull * grown / factor  # a power of two, which the pass multiplies with
            by_rows, by_weight = passes.gradients(given, level, pull, apart, True, wants, kind, ctx.max_memory, within)
            if by_rows is not None and by_own is not None:
                by_rows += by_own
            by_x = _rows().returned(by_rows, x, facts, stats, gain, upstream, ctx.normalize) if wants else None
        return by_x, by_weight, None, None, None, None


def _own(given: Any, picks: Tensor, push: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients by anchors and by their own classes' weights, (B, D) each, of Σ push · <row, unit weight>."""
    rows, inverse = given.rows.double(), given.inverse[picks].double()[:, None]
    unit = given.weight[picks].double() * inverse
    push = push.double()[:, None]
    across = rows - (rows * unit).sum(1, keepdim=True) * unit
    return (push * unit).float(), (push * inverse * across).float()
