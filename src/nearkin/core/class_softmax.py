"""Softmax over many class weights without storing its logits: block by block, recomputed for the gradient.

The pass leaves the own class out: its score, with whatever margin, needs only (B, D) tensors and plain autograd. So one
pass serves every margin; its log-sum-exp and the score of the own class are joined at the end, in `cross_entropy`.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearkin.core import checks, distances, reduce
from nearkin.core.autograd import HandGradient, device_type, gradients_again, traced

__all__ = ["Rivals", "block", "class_softmax", "cross_entropy", "finished", "fits", "gradient_kind", "kind_of"]
__all__ += ["own_cosine", "own_rows", "scaled_anchors", "spread", "with_own"]

AUTOMATIC = 2**25  # default bytes of a block: larger ones leave the processor's caches
ON_DEVICE = 2**28  # the same on a GPU, where launching costs more than the caches save
DENSE = 2**28  # default bytes that the dense form may take,
DENSE_ON_DEVICE = 2**31  # and on a GPU, where blocks took four times as long
PAIR = 40  # bytes per anchor and class weight of the dense form, float32: logits, their softmax, the gradients of both
COORDINATE = 64  # bytes per coordinate of a normalised row: wide copies and their gradients


class Rivals(NamedTuple):
    """The scores of all other classes for each anchor, and the weights of its own class.

    The log-sum-exp of the others is peak + rest: two tensors, because their sum would lose the digits of a small loss.
    """

    peak: Tensor  # (B,) the highest score, a constant: the gradient is all in `rest`
    rest: Tensor  # (B,) log Σ e^{score - peak}; `reduce.log_zero` where there are no others
    anchors: Tensor  # (B, D) the embeddings: the gradient of a target made from them is rounded once, with the rest
    own: Tensor  # (B, D) the class weight of the own class; of several rows the nearest
    taint: Tensor  # 0, or NaN if a class weight is not finite


def class_softmax(
    embeddings: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    scale: float | Tensor = 1.0,
    normalize: tuple[bool, bool] = (True, True),
    sub_centers: int = 1,
    lost: float = 0.0,
    max_memory: int | None = None,
) -> Rivals:
    """The log-sum-exp of s <x_i, w_c> over all classes c but ids[i], and what the own class's score is made of.

    embeddings (B, D), weight (C·K, D), ids (B,) in 0..C-1, or C for an anchor whose class is not among these: then all
    are its rivals and `own` means nothing. normalize: whether to scale the anchors, and the weights, to unit length.
    sub_centers: K rows per class, of which the best is the class's score. lost: the score of a weight too short to be
    scaled to unit length. Memory: B·D and a block of `max_memory` bytes beside the gradients; float32 sums (float64 for
    float64). The forward pass also computes the mean class weight under the softmax, which is the gradient by the
    anchors; the backward pass recomputes the scores for the gradient by the weights. A second derivative stores all.
    """
    anchors = embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))
    scaled = scaled_anchors(anchors, weight, scale, normalize[0])
    picks = own_rows(scaled, weight, ids, sub_centers, normalize[1])
    size = block(embeddings, weight, sub_centers, max_memory)
    settings = normalize[1], sub_centers, lost, size
    if traced():
        wants = torch.is_grad_enabled() and scaled.requires_grad
        peak, rest, own, taint, *_ = _compiled_scan(scaled, weight, ids, picks, *settings, wants)
    else:
        peak, rest, own, taint = _Pass.call(scaled, weight, ids, picks, *settings)
    return Rivals(peak, rest, anchors, own, taint)


def own_cosine(rivals: Rivals) -> Tensor:
    """The cosine of each anchor and its own class, (B,), rounded once: a scale would enlarge a second rounding."""
    anchors, own = (distances.units(rows, distances.wide(rows))[0] for rows in (rivals.anchors, rivals.own))
    return (anchors * own).sum(1).to(rivals.rest.dtype)


def cross_entropy(rivals: Rivals, target: Tensor) -> Tensor:
    """-log of the own class's part of the softmax, (B,), from its score (B,)."""
    return reduce.softplus(rivals.peak - target + rivals.rest)


def scaled_anchors(embeddings: Tensor, weight: Tensor, scale: float | Tensor, normalize: bool) -> Tensor:
    """Anchors to multiply by class weights, (B, D): of length `scale`, or `scale` times as long; rounded once."""
    if normalize:
        rows, _ = distances.units(embeddings, distances.wide(embeddings))
    else:
        rows = distances.upcast(embeddings).to(distances.wide(embeddings))
    return (scale * rows).to(kind_of(embeddings, weight))


def kind_of(embeddings: Tensor, weight: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(embeddings.dtype, weight.dtype), torch.float32)


@torch.no_grad()
def own_rows(scaled: Tensor, weight: Tensor, ids: Tensor, sub_centers: int, normalize: bool) -> Tensor:
    """The row of the weights that scores each anchor's own class, (B,)."""
    if sub_centers == 1:
        return ids.clamp(max=weight.shape[0] - 1)  # a new tensor: a compiler wants no argument twice
    ids = ids.clamp(max=weight.shape[0] // sub_centers - 1)
    every = ids[:, None] * sub_centers + torch.arange(sub_centers, device=ids.device)  # (B, K)
    rows = _rows(weight[every.flatten()], normalize, scaled.dtype).view(*every.shape, weight.shape[1])
    nearest = (rows * scaled[:, None, :]).sum(2).argmax(1, keepdim=True)
    return every.gather(1, nearest).squeeze(1)


def fits(embeddings: Tensor, weight: Tensor, max_memory: int | None) -> bool:
    """Whether the dense form stays within `max_memory` bytes, or the default."""
    if max_memory is not None:
        checks.integer("max_memory", max_memory, 1)
    wide = 2 if kind_of(embeddings, weight) == torch.float64 else 1
    (number, dim), rows = embeddings.shape, weight.shape[0]
    needed = wide * PAIR * number * rows + COORDINATE * dim * (number + rows)
    if max_memory is None:
        max_memory = DENSE if embeddings.is_cpu else DENSE_ON_DEVICE
    return needed <= max_memory


def block(embeddings: Tensor, weight: Tensor, sub_centers: int, max_memory: int | None) -> int:
    """Rows of the weights per block, a multiple of `sub_centers`."""
    number, dim = embeddings.shape
    item = 8 if kind_of(embeddings, weight) == torch.float64 else 4
    class_bytes = sub_centers * (item * 3 * number + COORDINATE * dim)
    if max_memory is None:
        room = AUTOMATIC if embeddings.device.type == "cpu" else ON_DEVICE
        return max(1, room // class_bytes) * sub_centers
    checks.integer("max_memory", max_memory, 1)
    fixed = COORDINATE * dim * number
    checks.enough("max_memory", max_memory, fixed + class_bytes, "what the anchors and one class take in bytes")
    return (max_memory - fixed) // class_bytes * sub_centers


def _rows(weight: Tensor, normalize: bool, kind: torch.dtype) -> Tensor:
    return (distances.unit(weight) if normalize else distances.upcast(weight)).to(kind)


def _through_rows(weight: Tensor, by_rows: Tensor, normalize: bool) -> Tensor:
    """The gradient by the weights from that by `_rows`: 0 along a row of unit length and for clamped coordinates."""
    bounded = distances.upcast(weight)
    gradient = by_rows.to(distances.wide(weight))
    if normalize:
        rows, inverse = distances.units(weight, distances.wide(weight))
        gradient = (gradient - (gradient * rows).sum(1, keepdim=True) * rows) * inverse
    return torch.where(bounded == weight, gradient, 0.0).to(bounded.dtype)


def _scores(
    scaled: Tensor, rows: Tensor, ids: Tensor, start: int, sub_centers: int, lost: float
) -> tuple[Tensor, Tensor | None]:
    """Scores of a block of classes, (B, n), -inf for the own class; and the sub-centre of each, if several."""
    scores, best = _of_classes(scaled, rows, sub_centers, lost)
    place = (ids - start // sub_centers)[:, None]
    column = place.clamp(0, scores.shape[1] - 1)
    scores.scatter_(1, column, scores.gather(1, column).masked_fill_(place == column, -torch.inf))
    return scores, best


def _of_classes(scaled: Tensor, rows: Tensor, sub_centers: int, lost: float) -> tuple[Tensor, Tensor | None]:
    """The same with that of the own class."""
    scores = scaled @ rows.T
    if lost:
        scores += torch.where(reduce.any_in_row(rows != 0), 0.0, lost)
    if sub_centers == 1:
        return scores, None
    best: tuple[Tensor, Tensor] = scores.view(len(scaled), rows.shape[0] // sub_centers, sub_centers).max(2)
    return best


def spread(parts: Tensor, best: Tensor | None, sub_centers: int) -> Tensor:
    """The entry of each class moved to the row that scored it: (B, n) → (B, n·K)."""
    if best is None:
        return parts
    every = parts.new_zeros(*parts.shape, sub_centers)
    return every.scatter_(2, best[:, :, None], parts[:, :, None]).flatten(1)


def _blocks(weight: Tensor, size: int) -> Iterator[tuple[int, Tensor]]:
    for start in range(0, weight.shape[0], size):
        yield start, weight[start : start + size]


def finished(total: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Of sums of e^{score - peak}: their logarithms, and their inverses, 0 where there are none; typed as `like`."""
    positive = total > 0
    rest = torch.where(total == 0, reduce.log_zero(like), torch.where(positive, total, 1.0).log()).to(like.dtype)
    share = torch.where(positive, torch.where(positive, total, 1.0).reciprocal(), 0.0).to(like.dtype)
    return torch.where(total.isnan(), torch.nan, rest), share


def with_own(gradient: Tensor, picks: Tensor, by_own: Tensor, start: int) -> Tensor:
    """Adds to the gradient by a block of class weights that by the anchors' own rows, `picks`, in place."""
    inside = (picks >= start) & (picks < start + len(gradient))
    place = torch.where(inside, picks - start, 0)
    return gradient.index_add_(0, place, torch.where(inside[:, None], by_own, 0.0).to(gradient.dtype))


def _scan(
    scaled: Tensor,
    weight: Tensor,
    ids: Tensor,
    picks: Tensor,
    normalize: bool,
    centers: int,
    lost: float,
    size: int,
    wants_mean: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Peak, rest, own rows and taint of `Rivals`; 1 / Σ e^{score - peak} (B,), and the mean row under the softmax."""
    kind, wide = scaled.dtype, distances.wide(scaled)
    peak = scaled.new_full((len(ids),), -torch.inf)
    total = torch.zeros_like(peak, dtype=wide)
    mean = torch.zeros_like(scaled, dtype=wide) if wants_mean else None
    taint = torch.zeros((), device=scaled.device)
    with torch.autocast(device_type(scaled), enabled=False):
        for start, part in _blocks(weight, size):
            rows = _rows(part, normalize, kind)
            scores, best = _scores(scaled, rows, ids, start, centers, lost)
            top = torch.maximum(peak, scores.amax(1))
            level = torch.where(top == -torch.inf, 0.0, top)
            shrink, peak = (peak - level).exp(), top
            parts = scores.sub_(level[:, None]).exp_()
            total = total * shrink + parts.sum(1)
            if mean is not None:
                mean = mean.mul_(shrink[:, None]).add_(spread(parts, best, centers) @ rows)
            taint = taint + reduce.taint(part)
    rest, share = finished(total, scaled)
    mean_row = scaled.new_empty(0) if mean is None else (mean * share[:, None]).to(kind)
    return torch.where(peak == -torch.inf, 0.0, peak), rest, weight[picks].to(kind, copy=True), taint, share, mean_row


def _weight_gradient(
    scaled: Tensor,
    weight: Tensor,
    ids: Tensor,
    picks: Tensor,
    level: Tensor,
    pull: Tensor,
    by_own: Tensor,
    normalize: bool,
    centers: int,
    lost: float,
    size: int,
    kind: torch.dtype,
) -> Tensor:
    """The gradient by the weights, (C·K, D), from recomputed scores. pull: the gradient by rest, times share."""
    by_weight = torch.empty_like(weight, dtype=kind)
    with torch.autocast(device_type(scaled), enabled=False):
        for start, part in _blocks(weight, size):
            rows = _rows(part, normalize, scaled.dtype)
            scores, best = _scores(scaled, rows, ids, start, centers, lost)
            parts = scores.sub_(level[:, None]).exp_().mul_(pull[:, None])
            gradient = _through_rows(part, spread(parts, best, centers).T @ scaled, normalize)
            by_weight[start : start + len(part)] = with_own(gradient, picks, by_own, start)
    return by_weight


def _plain(
    scaled: Tensor, weight: Tensor, others: Sequence[Tensor], settings: tuple[bool, int, float, int]
) -> tuple[Tensor, Tensor]:
    """The rest and the own rows of `_scan` in autograd's steps, which store all scores."""
    (ids, picks, peak), (normalize, centers, lost, size) = others, settings
    total = torch.zeros_like(peak, dtype=distances.wide(scaled))
    with torch.autocast(device_type(scaled), enabled=False):
        for start, part in _blocks(weight, size):
            scores, _ = _of_classes(scaled, _rows(part, normalize, scaled.dtype), centers, lost)
            own = ids[:, None] - start // centers == torch.arange(scores.shape[1], device=ids.device)
            total = total + torch.where(own, -torch.inf, scores - peak[:, None]).exp().sum(1)
    return finished(total, scaled)[0], weight[picks].to(scaled.dtype)


class _Pass(HandGradient):
    @staticmethod
    def forward(
        ctx: Any,
        scaled: Tensor,
        weight: Tensor,
        ids: Tensor,
        picks: Tensor,
        normalize: bool,
        centers: int,
        lost: float,
        size: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wants = ctx.needs_input_grad[0]
        peak, rest, own, taint, share, mean = _scan(scaled, weight, ids, picks, normalize, centers, lost, size, wants)
        ctx.settings = normalize, centers, lost, size, gradient_kind(weight)
        ctx.save_for_backward(scaled, weight, ids, picks, peak, share, mean)
        ctx.mark_non_differentiable(peak, taint)
        return peak, rest, own, taint

    @staticmethod
    def backward(ctx: Any, _: Tensor, by_rest: Tensor, by_own: Tensor, __: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # for a second derivative
            scaled, weight, *others, _, _ = ctx.saved_tensors
            plain = partial(_plain, others=others, settings=ctx.settings[:4])
            by = gradients_again(plain, (scaled, weight), ctx.needs_input_grad[:2], (by_rest, by_own))
            return *by, *[None] * 6
        return *_gradients(ctx, by_rest, by_own, _weight_gradient), *[None] * 6


def _gradients(
    ctx: Any, by_rest: Tensor, by_own: Tensor, weight_gradient: Callable[..., Tensor]
) -> tuple[Tensor | None, Tensor | None]:
    """By the anchors, which the forward pass has computed up to a factor, and by the weights."""
    *inputs, peak, share, mean = ctx.saved_tensors
    by_scaled = by_rest[:, None] * mean if ctx.needs_input_grad[0] else None
    by_weight = None
    if ctx.needs_input_grad[1]:
        by_weight = weight_gradient(*inputs, peak, by_rest * share, by_own, *ctx.settings)
    return by_scaled, by_weight


# Under torch.compile the same passes are two opaque operators: unrolled, many classes would be thousands of blocks.
_SETTINGS = "bool normalize, int centers, float lost, int size"
_compiled_scan = torch.library.custom_op(
    "nearkin::class_scan",
    _scan,
    mutates_args=(),
    schema=f"(Tensor scaled, Tensor weight, Tensor ids, Tensor picks, {_SETTINGS}, bool wants_mean)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
_compiled_weight_gradient = torch.library.custom_op(
    "nearkin::class_weight_gradient",
    _weight_gradient,
    mutates_args=(),
    schema="(Tensor scaled, Tensor weight, Tensor ids, Tensor picks, Tensor level, Tensor pull, Tensor by_own, "
    f"{_SETTINGS}, ScalarType kind) -> Tensor",
)


@_compiled_scan.register_fake
def _(scaled: Tensor, weight: Tensor, ids: Tensor, picks: Tensor, *settings: Any) -> tuple[Tensor, ...]:
    anchor, taint = scaled.new_empty(len(ids)), scaled.new_empty((), dtype=torch.float32)
    mean = torch.empty_like(scaled) if settings[-1] else scaled.new_empty(0)
    return anchor, torch.empty_like(anchor), torch.empty_like(scaled), taint, torch.empty_like(anchor), mean


@_compiled_weight_gradient.register_fake
def _(scaled: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(weight, dtype=_[-1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    peak, _, _, taint, share, mean = output
    ctx.save_for_backward(*inputs[:4], peak, share, mean)
    ctx.settings = (*inputs[4:8], inputs[1].dtype)
    ctx.mark_non_differentiable(peak, taint, share, mean)


def _compiled_backward(ctx: Any, _: Any, by_rest: Tensor, by_own: Tensor, *__: Any) -> tuple[Tensor | None, ...]:
    return *_gradients(ctx, by_rest, by_own, _compiled_weight_gradient), *[None] * 7


_compiled_scan.register_autograd(_compiled_backward, setup_context=_save)


def gradient_kind(weight: Tensor) -> torch.dtype:
    """The type of the gradient by the weights: theirs, unless `weight.grad_dtype` says otherwise."""
    chosen = getattr(weight, "grad_dtype", None) if weight.is_leaf else None
    return chosen or weight.dtype
