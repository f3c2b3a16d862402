"""Each class weight as an anchor of the batch, without the (B, C) matrix: two passes over blocks of classes.

The transpose of `core.class_softmax`: for each class, the log-sum-exp over the items of other classes. The class's own
items need only (B, D) tensors and plain autograd.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearkin.core import class_softmax, distances, reduce
from nearkin.core.autograd import HandGradient, device_type, gradients_again, traced

__all__ = ["Negatives", "class_anchors"]


class Negatives(NamedTuple):
    """How the items of other classes score for each class; the log-sum-exp is peak + rest, as in `Rivals`."""

    peak: Tensor  # (C,) the highest score, a constant
    rest: Tensor  # (C,) log Σ e^{score - peak}; `reduce.log_zero` where there are none
    anchors: Tensor  # (B, D) the embeddings
    own: Tensor  # (B, D) the class weight of each item's own class
    taint: Tensor  # 0, or NaN if a class weight is not finite


def class_anchors(
    embeddings: Tensor, weight: Tensor, ids: Tensor, known: Tensor, *, scale: float, max_memory: int | None = None
) -> Negatives:
    """The log-sum-exp of s cos(x_i, w_c) over the known items i with ids[i] != c, for every class c.

    embeddings (B, D), weight (C, D), ids (B,) in 0..C-1, or C for an item of none of these classes, known (B,).
    Memory and types as in `class_softmax`.
    """
    anchors = embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))
    scaled = class_softmax.scaled_anchors(anchors, weight, scale, True)
    known_ids = torch.where(known, ids, -1)
    size = class_softmax.block(embeddings, weight, 1, max_memory)
    picks = ids.clamp(max=weight.shape[0] - 1)
    if traced():
        peak, rest, own, taint, _ = _compiled_scan(scaled, weight, picks, known_ids, size)
    else:
        peak, rest, own, taint = _Pass.call(scaled, weight, picks, known_ids, size)
    return Negatives(peak, rest, anchors, own, taint)


def _scores(scaled: Tensor, rows: Tensor, known_ids: Tensor, start: int) -> Tensor:
    """Scores of a block of classes, (B, n), -inf for the own class and for unknown items."""
    scores = (scaled @ rows.T).masked_fill_((known_ids < 0)[:, None], -torch.inf)
    place = (known_ids - start)[:, None]
    column = place.clamp(0, scores.shape[1] - 1)
    return scores.scatter_(1, column, scores.gather(1, column).masked_fill_(place == column, -torch.inf))


def _scan(
    scaled: Tensor, weight: Tensor, ids: Tensor, known_ids: Tensor, size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Peak, rest, own weights and taint of `Negatives`, and 1 / Σ e^{score - peak}, (C,)."""
    peak, total = scaled.new_zeros(len(weight)), scaled.new_zeros(len(weight), dtype=distances.wide(scaled))
    taint = torch.zeros((), device=scaled.device)
    with torch.autocast(device_type(scaled), enabled=False):
        for start, part in class_softmax._blocks(weight, size):
            rows = class_softmax._rows(part, True, scaled.dtype)
            scores = _scores(scaled, rows, known_ids, start)
            top = scores.amax(0) if len(scores) else scores.new_full(scores.shape[1:], -torch.inf)
            top = torch.where(top == -torch.inf, 0.0, top)
            peak[start : start + len(part)] = top
            total[start : start + len(part)] = scores.sub_(top).exp_().sum(0, dtype=total.dtype)
            taint = taint + reduce.taint(part)
    rest, share = class_softmax.finished(total, scaled)
    return peak, rest, weight[ids].to(scaled.dtype, copy=True), taint, share


def _gradients(
    scaled: Tensor,
    weight: Tensor,
    ids: Tensor,
    known_ids: Tensor,
    peak: Tensor,
    pull: Tensor,
    by_own: Tensor,
    size: int,
    kind: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """The gradients by the scaled anchors and, in type `kind`, by the weights; empty without a type."""
    by_scaled = torch.zeros_like(scaled, dtype=distances.wide(scaled))
    by_weight = weight.new_empty(0) if kind is None else torch.empty_like(weight, dtype=kind)
    with torch.autocast(device_type(scaled), enabled=False):
        for start, part in class_softmax._blocks(weight, size):
            rows = class_softmax._rows(part, True, scaled.dtype)
            block = slice(start, start + len(part))
            parts = _scores(scaled, rows, known_ids, start).sub_(peak[block]).exp_().mul_(pull[block])
            by_scaled += parts @ rows
            if kind is not None:
                gradient = class_softmax._through_rows(part, parts.T @ scaled, True)
                by_weight[block] = class_softmax.with_own(gradient, ids, by_own, start)
    return by_scaled.to(scaled.dtype, copy=True), by_weight


def _plain(scaled: Tensor, weight: Tensor, others: Sequence[Tensor], size: int) -> tuple[Tensor, Tensor]:
    """The rest and the own weights of `_scan` in autograd's steps, which store all scores."""
    (ids, known_ids, peak), sums = others, []
    with torch.autocast(device_type(scaled), enabled=False):
        for start, part in class_softmax._blocks(weight, size):
            scores = scaled @ class_softmax._rows(part, True, scaled.dtype).T
            classes = torch.arange(start, start + len(part), device=ids.device)
            counts = (known_ids[:, None] != classes) & (known_ids >= 0)[:, None]
            parts = torch.where(counts, scores - peak[classes], -torch.inf).exp()
            sums.append(parts.sum(0, dtype=distances.wide(scaled)))
    return class_softmax.finished(torch.cat(sums), scaled)[0], weight[ids].to(scaled.dtype)


class _Pass(HandGradient):
    @staticmethod
    def forward(
        ctx: Any, scaled: Tensor, weight: Tensor, ids: Tensor, known_ids: Tensor, size: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        peak, rest, own, taint, share = _scan(scaled, weight, ids, known_ids, size)
        ctx.save_for_backward(scaled, weight, ids, known_ids, peak, share)
        ctx.settings = size, class_softmax.gradient_kind(weight)
        ctx.mark_non_differentiable(peak, taint)
        return peak, rest, own, taint

    @staticmethod
    def backward(ctx: Any, _: Tensor, by_rest: Tensor, by_own: Tensor, __: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # for a second derivative
            scaled, weight, *others, _ = ctx.saved_tensors
            plain = partial(_plain, others=others, size=ctx.settings[0])
            again = gradients_again(plain, (scaled, weight), ctx.needs_input_grad[:2], (by_rest, by_own))
            return *again, None, None, None
        scaled, weight, ids, known_ids, peak, share = ctx.saved_tensors
        size, kind = ctx.settings
        wants = ctx.needs_input_grad[1]
        by = _gradients(scaled, weight, ids, known_ids, peak, by_rest * share, by_own, size, kind if wants else None)
        return by[0], by[1] if wants else None, None, None, None


# Under torch.compile the same passes are two opaque operators, as in `core.class_softmax`.
_compiled_scan = torch.library.custom_op(
    "nearkin::class_anchors_scan",
    _scan,
    mutates_args=(),
    schema="(Tensor scaled, Tensor weight, Tensor ids, Tensor known_ids, int size)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
_compiled_gradients = torch.library.custom_op(
    "nearkin::class_anchors_gradients",
    _gradients,
    mutates_args=(),
    schema="(Tensor scaled, Tensor weight, Tensor ids, Tensor known_ids, Tensor peak, Tensor pull, Tensor by_own, "
    "int size, ScalarType? kind) -> (Tensor, Tensor)",
)


@_compiled_scan.register_fake
def _(scaled: Tensor, weight: Tensor, ids: Tensor, known_ids: Tensor, size: int) -> tuple[Tensor, ...]:
    of_class, taint = scaled.new_empty(len(weight)), scaled.new_empty((), dtype=torch.float32)
    return of_class, torch.empty_like(of_class), torch.empty_like(scaled), taint, torch.empty_like(of_class)


@_compiled_gradients.register_fake
def _(scaled: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    kind = others[-1]
    return torch.empty_like(scaled), weight.new_empty(0) if kind is None else torch.empty_like(weight, dtype=kind)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    peak, _, _, taint, share = output
    ctx.save_for_backward(*inputs[:4], peak, share)
    ctx.size = inputs[4]
    ctx.mark_non_differentiable(peak, taint, share)


def _compiled_backward(ctx: Any, _: Any, by_rest: Tensor, by_own: Tensor, *__: Any) -> tuple[Tensor | None, ...]:
    *inputs, peak, share = ctx.saved_tensors
    wants = ctx.needs_input_grad[1]
    kind = inputs[1].dtype if wants else None
    by = _compiled_gradients(*inputs, peak, by_rest * share, by_own, ctx.size, kind)
    return by[0], by[1] if wants else None, None, None, None


_compiled_scan.register_autograd(_compiled_backward, setup_context=_save)
