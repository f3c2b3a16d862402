"""Pair and structured losses whole, forward and backward, without a matrix of anchors × references in memory.

One kernel passes over the references for the statistics of each anchor, one reduces these to the loss, one makes the
gradient. What they do not serve (`serves`), the losses compute in plain torch, with the same result.
"""

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from nearkin.core import blockwise
from nearkin.core.autograd import HandGradient
from nearkin.kernels import eligible

KINDS = (
    "contrastive",
    "margin",
    "multi_similarity",
    "circle",
    "lifted",
    "npair",
    "supcon",
    "infonce",
    "lossless",
)
LARGEST = 10**6 - 1  # rows; a slot of a tile counts to 2^15 tiles


def serves(impl: str, batch: blockwise.Batch, reduction: str, max_memory: int | None = None) -> bool:
    """Whether the kernels compute the loss of this batch."""
    return eligible.served(impl, batch, reduction, max_memory, LARGEST)


def loss(
    kind: str,
    batch: blockwise.Batch,
    settings: tuple[float, ...],
    reduction: str,
    *,
    flag: bool = False,
    normalize: bool = True,
    beta: Tensor | None = None,
) -> Tensor:
    """The loss of a batch that `serves` has found to be one for the kernels.

    settings: up to four numbers, in the order that `pair_tiles` says beside each kind; flag: its yes or no. normalize:
    rows of unit length. beta: the margin loss's, float32, a scalar or one an anchor (B,), where it is not a number.
    """
    x, labels, references, reference_labels = batch
    enter = "held" if kind != "lossless" else "sigmoid" if flag else "cube"
    numbers = (*map(float, settings), *[0.0] * (4 - len(settings)))
    with eligible.device_of(x):
        way = (kind, numbers, flag, reduction, normalize, enter)
        value: Tensor = _Loss.call(x, references, beta, labels, reference_labels, way)
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
        way: tuple[Any, ...],
    ) -> Tensor:
        pair_tiles, row_tiles = _kernels()
        kind, numbers, flag, reduction, normalize, enter = way
        x = x.contiguous()
        own = other = row_tiles.prepare(x, labels.contiguous(), normalize, enter)  # keeps the labels too
        others = x.shape[0]
        if references is not None and reference_labels is not None:
            references = references.contiguous()
            others = references.shape[0]
            other = row_tiles.prepare(references, reference_labels.contiguous(), normalize, enter)
        sizes = (x.shape[0], others, x.shape[1])
        beta = None if beta is None else beta.contiguous()
        value, stats, column = pair_tiles.forward(kind, own, other, sizes, beta, numbers, flag, reduction)
        wants = ctx.needs_input_grad
        kept = (x if wants[0] else None, references if wants[1] else None)  # a queue may move on before the gradient
        ctx.save_for_backward(*kept, own, other, stats, column)
        ctx.way, ctx.sizes, ctx.alone = way, sizes, references is None
        ctx.scalar = beta is not None and beta.dim() == 0
        result: Tensor = value
        return result

    @staticmethod
    @eligible.once
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        pair_tiles, _ = _kernels()
        x, references, own, other, stats, column = ctx.saved_tensors
        kind, numbers, flag, _, normalize, enter = ctx.way
        number, others, _ = ctx.sizes
        wants = ctx.needs_input_grad
        by_x = by_references = by_beta = None
        way = (numbers, flag, normalize, enter)
        if wants[2] and ctx.scalar and wants[0]:
            by_beta = torch.empty((), device=stats.device, dtype=torch.float32)
        elif wants[2]:
            scales = stats[pair_tiles.STATISTICS * number :] * upstream
            by_beta = scales[1] if ctx.scalar else stats[7 * number : 8 * number] * scales[0]
        if wants[0]:
            role, slot = "self" if ctx.alone else "anchors", by_beta if ctx.scalar else None
            given = (own, stats, other, column, others, upstream, slot)
            by_x = pair_tiles.backward(kind, role, x, *given, *way)
        if wants[1]:
            given = (other, column, own, stats, number, upstream, None)
            by_references = pair_tiles.backward(kind, "references", references, *given, *way)
        return by_x, by_references, by_beta, None, None, None
