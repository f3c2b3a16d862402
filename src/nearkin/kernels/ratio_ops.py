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

from nearkin.core import blockwise
from nearkin.core.autograd import HandGradient, traced
from nearkin.core.labels import LabelDistance
from nearkin.kernels import eligible, interpreted, launch

__all__ = ["loss", "serves"]

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
    if not eligible.possible(x.device, interpreted()):
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


def loss(
    batch: blockwise.Batch,
    reduction: str,
    *,
    epsilon: float,
    ties: bool,
    normalize: bool,
    max_memory: int | None = None,
) -> Tensor:
    """The loss of a batch that the kernels can serve. ties: pairs at the same label distance are left out."""
    most = 2**31 if max_memory is None else blockwise.block(batch, max_memory)
    x, labels, references, reference_labels = batch
    distances = isinstance(labels, LabelDistance)
    settings = _Settings(float(epsilon), ties, normalize, reduction, most, distances)
    with launch.device_of(x):
        targets = labels.distance if isinstance(labels, LabelDistance) else labels
        value: Tensor = _Loss.call(x, references, targets, reference_labels, settings)
    return value


@functools.cache
def _kernels() -> tuple[ModuleType, ModuleType]:
    from nearkin.kernels import ratio_pass, row_kernels

    return ratio_pass, row_kernels


class _Settings(NamedTuple):
    epsilon: float
    ties: bool
    normalize: bool
    reduction: str
    most: int  # anchors per block
    distances: bool  # labels are label distances (B, R)


class _Loss(HandGradient):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        references: Tensor | None,
        labels: Tensor,
        reference_labels: Tensor | None,
        settings: _Settings,
    ) -> Tensor:
        inputs = (x.contiguous(), None if references is None else references.contiguous(), labels, reference_labels)
        ctx.settings, ctx.kinds = settings, [None if t is None else t.dtype for t in inputs[:2]]
        wants = ctx.needs_input_grad[:2]
        if settings.reduction == "none":
            own = [t if t is None or settings.distances else t.clone() for t in inputs[2:]]  # labels may be overwritten
            ctx.save_for_backward(*inputs[:2], *own)
            wants = (False, False)
        loss, share, *gradients = _computed(inputs, settings, wants)
        if settings.reduction != "none":
            ctx.save_for_backward(share, *gradients)
        return loss

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
    inputs: tuple[Any, ...], settings: _Settings, wants: tuple[bool, bool], weights: Tensor | None = None
) -> tuple[Any, ...]:
    """The loss, the factor of its gradients, and these in float32 where wanted; weights: of each anchor's value."""
    ratio_pass, row_kernels = _kernels()
    x, references, labels, _ = inputs
    epsilon, ties, normalize, reduction, most, distances = settings
    alone, order = references is None, None
    if distances or labels.dim() == 2:
        task = ratio_pass.matrix_task(*inputs, settings)
    else:
        task, order = ratio_pass.sorted_task(*inputs, settings)
        weights = weights[order] if alone and weights is not None else weights
    sums = [
        torch.zeros(rows.shape, device=x.device, dtype=torch.float64) if want else None
        for rows, want in zip((x, references), wants, strict=True)
    ]
    value, pairs, taint = ratio_pass.run(task, weights, sums[0], sums[0] if alone else sums[1])
    loss, facts = ratio_pass.finish(task, value, pairs, taint, reduction)
    if reduction == "none":
        loss = value.float() + facts[1]
        loss = torch.empty_like(loss).index_copy_(0, order, loss) if alone and order is not None else loss
    gradients: list[Tensor | None] = [None, None]
    for k, (total, rows) in enumerate(zip(sums, (task.rows, task.columns), strict=True)):
        if total is None:
            continue
        is_sorted = order is not None and (alone or k == 1)
        own = inputs[k].index_select(0, order) if is_sorted else inputs[k]
        gradient = torch.empty_like(total, dtype=torch.float32)
        row_kernels.long_gradient(own, rows, total, gradient, normalize)
        gradients[k] = torch.empty_like(gradient).index_copy_(0, order, gradient) if is_sorted else gradient
    return loss, facts[0], *gradients
