"""The Triton twin of `core.class_anchors`: the kernels of the class softmax, with tiles reduced over anchors."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nearkin.core import class_anchors as plain
from nearkin.core import class_softmax as rules
from nearkin.core.autograd import HandGradient
from nearkin.core.class_anchors import Negatives
from nearkin.kernels import class_softmax_ops as fused

__all__ = ["class_anchors"]


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
    @once_differentiable
    def backward(ctx: Any, _: Tensor, by_rest: Tensor, by_own: Tensor, __: Tensor) -> tuple[Tensor | None, ...]:
        *saved, ids, level, share = ctx.saved_tensors
        operands = fused._kernels().Operands(*saved, *ctx.choices)
        wants, kind = ctx.needs_input_grad[0], ctx.kind if ctx.needs_input_grad[1] else None
        by = fused.gradients(operands, level, by_rest * share, (ids, by_own), True, wants, kind, ctx.max_memory)
        return fused.query_gradient(by[0], operands), by[1], *[None] * 5
