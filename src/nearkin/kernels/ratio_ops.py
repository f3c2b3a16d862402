"""The log-ratio loss, forward and backward, without a matrix of anchors × references in memory.

Value and gradient are made together, a block of anchors at a time, since tied label distances need a whole row of
ratios: only where each anchor's value has an upstream of its own does the backward pass make the blocks again. Batches
that the kernels cannot serve (`serves`) are computed in plain torch, with the same result.
"""

import functools
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nearkin import kernels
from nearkin.core import blockwise
from nearkin.core.autograd import HandGradient, traced
from nearkin.core.labels import LabelDistance
from nearkin.kernels import eligible, launch

__all__ = ["Settings", "loss", "serves"]

LARGEST = 10**6 - 1  # rows


def serves(impl: str, batch: blockwise.Batch, reduction: str, max_memory: int | None = None) -> bool:
    """Whether the kernels compute the loss of this batch: not float64, on CUDA or interpreted, not under compilation.

    The memory bound is checked as for plain torch, which needs more.
    """
    x, labels, references, _ = batch
    if impl == "torch" or not (x.is_cuda or impl == "triton") or traced():
        return False
    if reduction not in (*eligible.REDUCTIONS, "none") or not isinstance(labels, Tensor | LabelDistance):
        return False
    if not all(_plain(rows) for rows in (x, references) if rows is not None):
        return False
    if not eligible.possible(x.device, kernels.interpreted()):
        return False
    if max_memory is not None:
        blockwise.block(batch, max_memory)
    return True


def _plain(rows: Tensor) -> bool:
    return (
        type(rows) in (Tensor, nn.Parameter)
        and rows.dtype in eligible.FLOATS
        and 0 < rows.shape[0] <= LARGEST
        and rows.shape[1] <= eligible.LONGEST
    )


class Settings(NamedTuple):
    """ties: pairs of references at the same label distance are left out."""

    epsilon: float
    ties: bool
    normalize: bool
    reduction: str
    most: int = 2**31  # anchors per block
    distances: bool = False  # labels are label distances (B, R)


def loss(batch: blockwise.Batch, settings: Settings, max_memory: int | None = None) -> Tensor:
    """The loss of a batch that the kernels can serve."""
    x, labels, references, reference_labels = batch
    most = settings.most if max_memory is None else blockwise.block(batch, max_memory)
    distances = isinstance(labels, LabelDistance)
    settings = settings._replace(epsilon=float(settings.epsilon), most=most, distances=distances)
    with launch.device_of(x):
        targets = labels.distance if isinstance(labels, LabelDistance) else labels
        value: Tensor = _Loss.call(x, references, targets, reference_labels, settings)
    return value


@functools.cache
def _kernels() -> ModuleType:
    from nearkin.kernels import ratio_pass

    return ratio_pass


class _Loss(HandGradient):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        references: Tensor | None,
        labels: Tensor,
        reference_labels: Tensor | None,
        settings: Settings,
    ) -> Tensor:
        inputs = (x.contiguous(), None if references is None else references.contiguous(), labels, reference_labels)
        each, wants = settings.reduction == "none", ctx.needs_input_grad[:2]
        value, facts, sides = _computed(inputs, settings, (False, False) if each else wants)
        ctx.settings, ctx.shared = settings, len(sides)
        if not each:
            ctx.save_for_backward(facts, *(tensor for side in sides for tensor in side))
        elif any(wants):  # each anchor's value has an upstream of its own: the blocks are made again
            own = [t if t is None or settings.distances else t.clone() for t in inputs[2:]]  # may be overwritten
            ctx.save_for_backward(*inputs[:2], *own)
        return value

    @staticmethod
    @launch.once
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        settings, facts = ctx.settings, None
        if settings.reduction == "none":
            _, _, sides = _computed(ctx.saved_tensors, settings, ctx.needs_input_grad[:2], upstream.contiguous())
        else:
            facts, *saved = ctx.saved_tensors
            sides = [saved[4 * k : 4 * k + 4] for k in range(ctx.shared)]
        ratio_pass = _kernels()
        gradients = [
            None if side[2] is None else ratio_pass.by_input(*side, upstream, facts, settings.normalize)
            for side in sides
        ]
        return (*gradients, *[None] * (5 - len(gradients)))


def _computed(
    inputs: tuple[Any, ...], settings: Settings, wants: tuple[bool, bool], weights: Tensor | None = None
) -> tuple[Tensor, Tensor, list[tuple[Tensor | None, ...]]]:
    """The loss, with the factor of its gradient; and of anchors, and of references apart from them, what the gradient
    is made of: the rows, prepared, the gradient by these if wanted, their order if they have one. weights: of each
    anchor's value."""
    ratio_pass = _kernels()
    x, references, labels, _ = inputs
    alone, order, in_order = references is None, None, None
    if settings.distances or labels.dim() == 2:
        task = ratio_pass.matrix_task(*inputs, settings)
    else:
        task, order, in_order = ratio_pass.sorted_task(*inputs, settings)
    is_sorted = alone and order is not None
    weights = weights[order] if is_sorted and weights is not None else weights
    stats, gradients, taint = ratio_pass.run(task, weights, wants)
    loss, facts = ratio_pass.finish(task, stats, taint)
    if settings.reduction == "none":
        loss = ratio_pass.anchor_values(task, stats).float() + facts[1]
        loss = torch.empty_like(loss).index_copy_(0, order.long(), loss) if order is not None and alone else loss
    sides = [(in_order, task.rows, gradients[0], order) if is_sorted else (x, task.rows, gradients[0], None)]
    if not alone:
        sides.append((references if order is None else in_order, task.columns, gradients[1], order))
    return loss, facts, [side if side[2] is not None else (None,) * 4 for side in sides]
