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
    if not (eligible.possible(x.device, kernels.interpreted()) and kernels.has_float64_units(x)):
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
def _kernels() -> tuple[ModuleType, ModuleType]:
    from nearkin.kernels import ratio_pass, row_kernels

    return ratio_pass, row_kernels


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
        ctx.settings, ctx.kinds = settings, [None if t is None else t.dtype for t in inputs[:2]]
        wants = ctx.needs_input_grad[:2]
        if settings.reduction == "none":
            own = [t if t is None or settings.distances else t.clone() for t in inputs[2:]]  # labels may be overwritten
            ctx.save_for_backward(*inputs[:2], *own)
            wants = (False, False)
        value, share, *gradients = _computed(inputs, settings, wants)
        if settings.reduction != "none":
            ctx.save_for_backward(share, *gradients)
        result: Tensor = value
        return result

    @staticmethod
    @launch.once
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        saved, settings = ctx.saved_tensors, ctx.settings
        if settings.reduction == "none":
            _, _, *gradients = _computed(saved, settings, ctx.needs_input_grad[:2], upstream.contiguous())
        else:
            scale = saved[0] * upstream
            gradients = [None if gradient is None else gradient * scale for gradient in saved[1:]]
        typed = zip(gradients, ctx.kinds, strict=True)
        by_x, by_references = (None if gradient is None else gradient.to(kind) for gradient, kind in typed)
        return by_x, by_references, None, None, None


def _computed(
    inputs: tuple[Any, ...], settings: Settings, wants: tuple[bool, bool], weights: Tensor | None = None
) -> tuple[Any, ...]:
    """The loss, the factor of its gradients, and these in float32 where wanted; weights: of each anchor's value."""
    ratio_pass, row_kernels = _kernels()
    x, references, labels, _ = inputs
    alone, order = references is None, None
    if settings.distances or labels.dim() == 2:
        task = ratio_pass.matrix_task(*inputs, settings)
    else:
        task, order = ratio_pass.sorted_task(*inputs, settings)
    anchor_order = order if alone else None
    weights = weights if weights is None or anchor_order is None else weights[anchor_order]
    totals = [torch.zeros_like(t, dtype=torch.float64) if w else None for t, w in zip(inputs, wants, strict=False)]
    value, pairs, taint = ratio_pass.run(task, weights, totals[0], totals[0] if alone else totals[1])
    loss, facts = ratio_pass.finish(task, value, pairs, taint, settings.reduction)
    if settings.reduction == "none":
        loss = _unsorted(value.float() + facts[1], anchor_order)
    gradients: list[Tensor | None] = [None, None]
    sides = ((x, task.rows, anchor_order), (references, task.columns, order))
    for k, (total, (own, rows, own_order)) in enumerate(zip(totals, sides, strict=True)):
        if total is not None:
            own = own if own_order is None else own.index_select(0, own_order)
            gradient = torch.empty_like(total, dtype=torch.float32)
            row_kernels.long_gradient(own, rows, total, gradient, settings.normalize)
            gradients[k] = _unsorted(gradient, own_order)
    return loss, facts[0], *gradients


def _unsorted(rows: Tensor, order: Tensor | None) -> Tensor:
    return rows if order is None else torch.empty_like(rows).index_copy_(0, order, rows)
