"""Each class weight as an anchor of the whole batch, without the (B, C) matrix: blocks of classes pass by, twice.

The transpose of `core.class_softmax`: a class gathers the log-sum-exp over the items of other classes. What it makes of
its own items is a matter of (B, D) tensors and of plain autograd.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nearkin.core import class_softmax, distances, reduce
from nearkin.core.autograd import HandGradient, device_type, traced


class Strangers(NamedTuple):
    """How the items of other classes score for each class; the log-sum-exp is peak + rest, as in `Rivals`."""

    peak: Tensor  # (C,) the highest score, a constant
    rest: Tensor  # (C,) log Σ e^{score - peak}; `reduce.nothing` where there are none
    anchors: Tensor  # (B, D) the embeddings
    own: Tensor  # (B, D) the class weight of each item's own class
    taint: Tensor  # 0, or NaN if a class weight is not finite


def class_anchors(
    embeddings: Tensor, weight: Tensor, ids: Tensor, known: Tensor, *, scale: float, max_memory: int | None = None
) -> Strangers:
    """The log-sum-exp of s cos(x_i, w_c) over the known items i with ids[i] != c, for every class c.

    embeddings (B, D), weight (C, D), ids (B,) in 0..C-1, or C for an item of none of these classes,
    known (B,). Memory and types as `class_softmax`.
    """
    anchors = embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))
    asked = class_softmax.queries(anchors, weight, scale, True)
    met = torch.where(known, ids, -1)
    size = class_softmax.block(embeddings, weight, 1, max_memory)
    picks = ids.clamp(max=weight.shape[0] - 1)
    if traced():
        peak, rest, own, taint, _ = _compiled_scan(asked, weight, picks, met, size)
    else:
        peak, rest, own, taint = _Pass.call(asked, weight, picks, met, size)
    return Strangers(peak, rest, anchors, own, taint)


def _scores(asked: Tensor, rows: Tensor, met: Tensor, start: int) -> Tensor:
    """Scores of a block of classes, (B, n), -inf for the own class and for those nobody knows."""
    scores = (asked @ rows.T).masked_fill_((met < 0)[:, None], -torch.inf)
    place = (met - start)[:, None]
    column = place.clamp(0, scores.shape[1] - 1)
    return scores.scatter_(1, column, scores.gather(1, column).masked_fill_(place == column, -torch.inf))


def _scan(
    asked: Tensor, weight: Tensor, ids: Tensor, met: Tensor, size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Peak, rest, own weights and taint of `Strangers`, and 1 / Σ e^{score - peak}, (C,)."""
    peak, total = asked.new_zeros(len(weight)), asked.new_zeros(len(weight), dtype=distances.wide(asked))
    taint = torch.zeros((), device=asked.device)
    with torch.autocast(device_type(asked), enabled=False):
        for start, part in class_softmax._blocks(weight, size):
            rows = class_softmax._rows(part, True, asked.dtype)
            scores = _scores(asked, rows, met, start)
            top = scores.amax(0) if len(scores) else scores.new_full(scores.shape[1:], -torch.inf)
            top = torch.where(top == -torch.inf, 0.0, top)
            peak[start : start + len(part)] = top
            total[start : start + len(part)] = scores.sub_(top).exp_().sum(0, dtype=total.dtype)
            taint = taint + reduce.taint(part)
    rest, share = class_softmax.finished(total, asked)
    return peak, rest, weight[ids].to(asked.dtype, copy=True), taint, share


def _gradients(
    asked: Tensor,
    weight: Tensor,
    ids: Tensor,
    met: Tensor,
    peak: Tensor,
    pull: Tensor,
    by_own: Tensor,
    size: int,
    kind: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """The gradients by the anchors and, in type `kind`, by the weights; without a type an empty one."""
    by_asked = torch.zeros_like(asked, dtype=distances.wide(asked))
    by_weight = weight.new_empty(0) if kind is None else torch.empty_like(weight, dtype=kind)
    with torch.autocast(device_type(asked), enabled=False):
        for start, part in class_softmax._blocks(weight, size):
            rows = class_softmax._rows(part, True, asked.dtype)
            mine = slice(start, start + len(part))
            parts = _scores(asked, rows, met, start).sub_(peak[mine]).exp_().mul_(pull[mine])
            by_asked += parts @ rows
            if kind is not None:
                gradient = class_softmax._through_rows(part, parts.T @ asked, True)
                by_weight[mine] = class_softmax.with_own(gradient, ids, by_own, start)
    return by_asked.to(asked.dtype, copy=True), by_weight


class _Pass(HandGradient):
    @staticmethod
    def forward(
        ctx: Any, asked: Tensor, weight: Tensor, ids: Tensor, met: Tensor, size: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        peak, rest, own, taint, share = _scan(asked, weight, ids, met, size)
        ctx.save_for_backward(asked, weight, ids, met, peak, share)
        ctx.way = size, class_softmax.gradient_kind(weight)
        ctx.mark_non_differentiable(peak, taint)
        return peak, rest, own, taint

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor, by_rest: Tensor, by_own: Tensor, __: Tensor) -> tuple[Tensor | None, ...]:
        asked, weight, ids, met, peak, share = ctx.saved_tensors
        size, kind = ctx.way
        wants = ctx.needs_input_grad[1]
        by = _gradients(asked, weight, ids, met, peak, by_rest * share, by_own, size, kind if wants else None)
        return by[0], by[1] if wants else None, None, None, None


# Under torch.compile the same passes are two opaque operators, as in `core.class_softmax`.
_compiled_scan = torch.library.custom_op(
    "nearkin::class_anchors_scan",
    _scan,
    mutates_args=(),
    schema="(Tensor asked, Tensor weight, Tensor ids, Tensor met, int size)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
_compiled_gradients = torch.library.custom_op(
    "nearkin::class_anchors_gradients",
    _gradients,
    mutates_args=(),
    schema="(Tensor asked, Tensor weight, Tensor ids, Tensor met, Tensor peak, Tensor pull, Tensor by_own, int size, "
    "ScalarType? kind) -> (Tensor, Tensor)",
)


@_compiled_scan.register_fake
def _(asked: Tensor, weight: Tensor, ids: Tensor, met: Tensor, size: int) -> tuple[Tensor, ...]:
    of_class, taint = asked.new_empty(len(weight)), asked.new_empty((), dtype=torch.float32)
    return of_class, torch.empty_like(of_class), torch.empty_like(asked), taint, torch.empty_like(of_class)


@_compiled_gradients.register_fake
def _(asked: Tensor, weight: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
    kind = more[-1]
    return torch.empty_like(asked), weight.new_empty(0) if kind is None else torch.empty_like(weight, dtype=kind)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    peak, _, _, taint, share = output
    ctx.save_for_backward(*inputs[:4], peak, share)
    ctx.size = inputs[4]
    ctx.mark_non_differentiable(peak, taint, share)


def _compiled_backward(ctx: Any, _: Any, by_rest: Tensor, by_own: Tensor, *__: Any) -> tuple[Tensor | None, ...]:
    *given, peak, share = ctx.saved_tensors
    wants = ctx.needs_input_grad[1]
    kind = given[1].dtype if wants else None
    by = _compiled_gradients(*given, peak, by_rest * share, by_own, ctx.size, kind)
    return by[0], by[1] if wants else None, None, None, None


_compiled_scan.register_autograd(_compiled_backward, setup_context=_keep)
