"""Pair and structured losses, forward and backward, without a matrix of anchors × references in memory.

One kernel passes over the references for the statistics of each anchor, one reduces these to the loss, one computes the
gradient; `links/` has what differs by loss. Batches that the kernels cannot serve (`serves`) are computed in plain
torch, with the same result.
"""

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from nearkin.core import blockwise
from nearkin.core.autograd import HandGradient
from nearkin.kernels import eligible, launch

__all__ = ["MOST_BINS", "loss", "serves"]

MOST_BINS = 31  # of Fast-AP: a program has the sums of its 32 centres in registers
LARGEST = 10**6 - 1  # rows; a slot of a tile counts up to 2^15 tiles


def serves(impl: str, batch: blockwise.Batch, reduction: str, max_memory: int | None = None) -> bool:
    """Whether the kernels compute the loss of this batch."""
    return eligible.served(impl, batch, reduction, max_memory, LARGEST, batch_first=True)


def loss(
    kind: str,
    batch: blockwise.Batch,
    settings: tuple[float, ...],
    reduction: str,
    *,
    flag: int = False,
    normalize: bool = True,
    beta: Tensor | None = None,
) -> Tensor:
    """The loss of a batch that the kernels can serve.

    settings: up to four numbers, as the link of each kind names them (`links/`); flag: its yes or no, of N-pair whether
    the batch is alone, of Fast-AP its number of bins. normalize: rows of unit length. beta: of the margin loss,
    float32, a scalar or one per anchor (B,), where it is not a number; of the sigmoid loss its scale and bias, (2,).
    """
    (x, labels, references, reference_labels), batch_first = eligible.without_batch_first(batch)
    transform = "clamp" if kind != "lossless" else "sigmoid" if flag else "cube"
    numbers = (*map(float, settings), *[0.0] * (4 - len(settings)))
    with launch.device_of(x):
        choices = (kind, numbers, flag, reduction, normalize, transform, batch_first)
        value: Tensor = _Loss.call(x, references, beta, labels, reference_labels, choices)
    return value


@functools.cache
def _kernels() -> tuple[ModuleType, ModuleType]:
    from nearkin.kernels import pair_kernels, row_kernels

    return pair_kernels, row_kernels


class _Loss(HandGradient):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        references: Tensor | None,
        beta: Tensor | None,
        labels: Tensor,
        reference_labels: Tensor | None,
        choices: tuple[Any, ...],
    ) -> Tensor:
        pair_kernels, row_kernels = _kernels()
        kind, numbers, flag, reduction, normalize, transform, batch_first = choices
        x = x.contiguous()
        centre = x if pair_kernels.links.of(kind, flag).centred else None
        rows = columns = row_kernels.prepare(x, labels.contiguous(), normalize, transform, centre)  # copies the labels
        num_columns = x.shape[0]
        if references is not None and reference_labels is not None:
            references = references.contiguous()
            num_columns = references.shape[0]
            columns = row_kernels.prepare(references, reference_labels.contiguous(), normalize, transform, centre)
        sizes = (x.shape[0], num_columns, x.shape[1])
        beta = None if beta is None else beta.contiguous()
        options = (numbers, flag, reduction, batch_first)
        value, stats, column_stats = pair_kernels.forward(kind, rows, columns, sizes, beta, *options)
        wants = ctx.needs_input_grad
        inputs = (x if wants[0] else None, references if wants[1] else None)  # a queue may change before the backward
        ctx.save_for_backward(*inputs, rows, columns, stats, column_stats)
        ctx.choices, ctx.sizes, ctx.alone = choices, sizes, references is None
        ctx.scalar = beta is not None and beta.dim() == 0
        result: Tensor = value
        return result

    @staticmethod
    @launch.once
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        pair_kernels, _ = _kernels()
        x, references, rows, columns, stats, column_stats = ctx.saved_tensors
        kind, numbers, flag, _, normalize, transform, batch_first = ctx.choices
        num_rows, num_columns, _ = ctx.sizes
        wants = ctx.needs_input_grad
        by_x = by_references = by_beta = None
        choices = (numbers, flag, normalize, transform)
        if wants[2] and ctx.scalar and wants[0]:
            by_beta = torch.empty((), device=stats.device, dtype=torch.float32)
        elif wants[2] and kind == "sigmoid":
            by_beta = pair_kernels.scale_and_bias_slopes(stats, num_rows) * upstream
        elif wants[2]:
            beta_slopes, scales = pair_kernels.beta_slopes_and_scales(stats, num_rows)
            by_beta = scales[1] * upstream if ctx.scalar else beta_slopes * (scales[0] * upstream)
        if wants[0]:
            role, slot = "self" if ctx.alone else "anchors", by_beta if ctx.scalar else None
            operands = (rows, stats, columns, column_stats, num_columns, upstream, slot)
            if batch_first:
                by_x = pair_kernels.backward_batch_first(kind, x, *operands, *choices)
            else:
                by_x = pair_kernels.backward(kind, role, x, *operands, *choices)
        if wants[1]:
            operands = (columns, column_stats, rows, stats, num_rows, upstream, None)
            by_references = pair_kernels.backward(kind, "references", references, *operands, *choices)
        return by_x, by_references, by_beta, None, None, None
