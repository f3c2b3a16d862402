"""Proxy-Anchor over many classes, as one node of the graph, and the Triton twin of `core.class_anchors`.

Both are the kernels of the class softmax, with tiles reduced over anchors.
"""

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from nearkin.core import checks
from nearkin.core import class_anchors as plain
from nearkin.core import class_softmax as rules
from nearkin.core.autograd import HandGradient
from nearkin.core.class_anchors import Negatives
from nearkin.kernels import class_loss_ops, launch
from nearkin.kernels import class_softmax_ops as fused

__all__ = ["class_anchors", "loss"]


def loss(
    embeddings: Tensor, labels: Tensor, weight: Tensor, margin: float, scale: float, max_memory: int | None
) -> Tensor:
    """Proxy-Anchor as one node of the graph, where `class_loss_ops.serves` it; labels in 0..C-1, -1 is left out."""
    if checks.reads_values(labels):
        checks.in_range(labels, weight.shape[0])
    with launch.device_of(embeddings):
        value: Tensor = _Loss.call(embeddings, weight, labels, margin, scale, max_memory)
    return value


@functools.cache
def _kernels() -> ModuleType:
    from nearkin.kernels import class_anchor_kernels

    return class_anchor_kernels


class _Loss(HandGradient):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, margin: float, scale: float, max_memory: int | None
    ) -> Tensor:
        class_kernels, row_kernels, kernels = fused._kernels(), class_loss_ops._row_kernels(), _kernels()
        x, weight_rows = x.contiguous(), weight.contiguous()
        inverse = class_kernels.lengths(weight_rows)
        halves = class_kernels.halves(x, weight_rows)
        numbers = (float(scale), float(margin), 1.0, 0.0, 0.0)
        rows, places, facts, stats = row_kernels.prepare(
            x, weight_rows, labels.contiguous(), None, numbers, "cosine", False, 1, 1, halves
        )
        kernels.positives(places, facts, stats, len(x))
        constants = (1, 0.0, True, fused.precision(), True)
        operands = class_kernels.Operands(rows, stats[0], weight_rows, inverse, places[0], *constants)
        level, pull = class_kernels.scan(operands, 1)
        partial = kernels.negatives(level, pull, inverse, scale * margin)
        value, gain = kernels.total(facts, stats, partial, len(x), len(weight_rows))
        ctx.save_for_backward(x, weight_rows, rows, inverse, places, facts, stats, gain, level[0], pull[0])
        ctx.constants, ctx.max_memory = constants, max_memory
        ctx.normalize, ctx.by_length = True, False
        ctx.kind = rules.gradient_kind(weight)
        result: Tensor = value
        return result

    @staticmethod
    @launch.once
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return *class_loss_ops.gradients(ctx, upstream), None, None, None, None


def class_anchors(
    embeddings: Tensor, weight: Tensor, ids: Tensor, known: Tensor, *, scale: float, max_memory: int | None = None
) -> Negatives:
    """`core.class_anchors.class_anchors` by kernels; by core itself where they cannot serve, as in `class_softmax`.

    Memory: the gradients, about 0.1 · B bytes per class for partial sums, and `max_memory` bytes.
    """
    if not fused.serves(embeddings, weight, 1, max_memory):
        return plain.class_anchors(embeddings, weight, ids, known, scale=scale, max_memory=max_memory)
    anchors = embeddings.float()
    scaled = rules.scaled_anchors(anchors, weight, scale, True)
    rows, factor = fused._operands(embeddings, weight, scaled)
    met = torch.where(known, ids, -1)
    picks = ids.clamp(max=weight.shape[0] - 1)
    peak, rest, own, taint = _Pass.call(scaled, weight, picks, met, rows, factor, max_memory)
    return Negatives(peak, rest, anchors, own, taint)


class _Pass(HandGradient):
    @staticmethod
    def forward(
        ctx: Any,
        scaled: Tensor,
        weight: Tensor,
        ids: Tensor,
        met: Tensor,
        rows: Tensor,
        factor: Tensor,
        max_memory: int | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        class_kernels, weight_rows = fused._kernels(), weight.contiguous()
        inverse, taint = class_kernels.inverse_lengths(weight_rows, True)
        operands = class_kernels.Operands(
            rows, factor, weight_rows, inverse, met, columns=True, precision=fused.precision()
        )
        level, rest, share = fused.merged(*class_kernels.scan(operands, 1))
        ctx.save_for_backward(*operands[:5], ids, level, share)
        ctx.choices, ctx.max_memory, ctx.kind = operands[5:], max_memory, rules.gradient_kind(weight)
        ctx.mark_non_differentiable(level, taint)
        return level, rest, weight_rows[ids].float(), taint

    @staticmethod
    @launch.once
    def backward(ctx: Any, _: Tensor, by_rest: Tensor, by_own: Tensor, __: Tensor) -> tuple[Tensor | None, ...]:
        *saved, ids, level, share = ctx.saved_tensors
        operands = fused._kernels().Operands(*saved, *ctx.choices)
        wants, kind = ctx.needs_input_grad[0], ctx.kind if ctx.needs_input_grad[1] else None
        by = fused.gradients(operands, level, by_rest * share, (ids, by_own), True, wants, kind, ctx.max_memory)
        return fused.query_gradient(by[0], operands), by[1], *[None] * 5
