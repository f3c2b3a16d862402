"""Softmax over many class weights without its logits: blocks of classes pass by, and the gradient makes them again.

The own class is left out of the pass: what it scores, with whatever margin, is a matter of (B, D) tensors and of plain
autograd. So one pass serves every margin, and its log-sum-exp meets the target only at the end, in `cross_entropy`.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nearkin.core import checks, distances, reduce
from nearkin.core.autograd import HandGradient, device_type, traced

AUTOMATIC = 2**25  # bytes of a block where nobody said: larger ones leave the processor's caches
ON_DEVICE = 2**28  # the same where launching costs more than the caches give
DENSE = 2**28  # bytes that the dense form may take where nobody said,
DENSE_ON_DEVICE = 2**31  # and on a GPU, where blocks took four times as long
PAIR = 40  # bytes an anchor and class weight in the dense form, float32: logits, their softmax, the gradients of both
COORDINATE = 64  # bytes a coordinate of a row that is normalised: wide copies and their gradients


class Rivals(NamedTuple):
    """How all other classes score for each anchor, and the weights of its own.

    The log-sum-exp of the others is peak + rest: kept apart, for their sum would lose the digits of a small loss.
    """

    peak: Tensor  # (B,) the highest score, a constant: the gradient is all in `rest`
    rest: Tensor  # (B,) log Σ e^{score - peak}; `reduce.nothing` where there are no others
    anchors: Tensor  # (B, D) the embeddings: a target made from these has its gradient rounded with the rest, once
    own: Tensor  # (B, D) the rows of the own class, as they are in the class weights; of several the nearest
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

    embeddings (B, D), weight (C·K, D), ids (B,) in 0..C-1, or C for an anchor whose class is not among these: all are
    its rivals, and what is said of its own class means nothing. normalize: whether the anchors, and the weights, are
    scaled to unit length. With K = sub_centers rows a class the best of them is the class's score. `lost`: what a
    weight too short to have a direction scores, if it is to be scaled to unit length. B·D memory and a block of
    `max_memory` bytes beside the gradients; float32 sums (float64 for float64). The forward pass also takes the mean
    class weight under the softmax, which is the gradient by the anchors; the backward pass makes the scores once more,
    for the gradient by the weights. It can be differentiated once.
    """
    anchors = embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))
    asked = queries(anchors, weight, scale, normalize[0])
    picks = own_rows(asked, weight, ids, sub_centers, normalize[1])
    size = block(embeddings, weight, sub_centers, max_memory)
    way = normalize[1], sub_centers, lost, size
    if traced():
        wants = torch.is_grad_enabled() and asked.requires_grad
        peak, rest, own, taint, *_ = _compiled_scan(asked, weight, ids, picks, *way, wants)
    else:
        peak, rest, own, taint = _Pass.call(asked, weight, ids, picks, *way)
    return Rivals(peak, rest, anchors, own, taint)


def own_cosine(found: Rivals) -> Tensor:
    """The cosine of each anchor and its own class, (B,), rounded once: a scale would enlarge what is lost."""
    anchors, own = (distances.units(rows, distances.wide(rows))[0] for rows in (found.anchors, found.own))
    return (anchors * own).sum(1).to(found.rest.dtype)


def cross_entropy(found: Rivals, target: Tensor) -> Tensor:
    """-log of the own class's part of the softmax, (B,), from its score (B,)."""
    return reduce.softplus(found.peak - target + found.rest)


def queries(embeddings: Tensor, weight: Tensor, scale: float | Tensor, normalize: bool) -> Tensor:
    """Anchors as the class weights meet them, (B, D): of length `scale`, or `scale` times as long; rounded once."""
    if normalize:
        rows, _ = distances.units(embeddings, distances.wide(embeddings))
    else:
        rows = distances.upcast(embeddings).to(distances.wide(embeddings))
    return (scale * rows).to(kind_of(embeddings, weight))


def kind_of(embeddings: Tensor, weight: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(embeddings.dtype, weight.dtype), torch.float32)


@torch.no_grad()
def own_rows(asked: Tensor, weight: Tensor, ids: Tensor, sub_centers: int, normalize: bool) -> Tensor:
    """Which row of the weights speaks for each anchor's own class, (B,)."""
    if sub_centers == 1:
        return ids.clamp(max=weight.shape[0] - 1)  # a compiler wants arguments that are different tensors
    ids = ids.clamp(max=weight.shape[0] // sub_centers - 1)
    every = ids[:, None] * sub_centers + torch.arange(sub_centers, device=ids.device)  # (B, K)
    rows = _rows(weight[every.flatten()], normalize, asked.dtype).view(*every.shape, weight.shape[1])
    nearest = (rows * asked[:, None, :]).sum(2).argmax(1, keepdim=True)
    return every.gather(1, nearest).squeeze(1)


def fits(embeddings: Tensor, weight: Tensor, max_memory: int | None) -> bool:
    """Whether the dense form stays within `max_memory` bytes, or within what is taken without asking."""
    if max_memory is not None:
        checks.integer("max_memory", max_memory, 1)
    wide = 2 if kind_of(embeddings, weight) == torch.float64 else 1
    (number, dim), rows = embeddings.shape, weight.shape[0]
    needed = wide * PAIR * number * rows + COORDINATE * dim * (number + rows)
    if max_memory is None:
        max_memory = DENSE if embeddings.is_cpu else DENSE_ON_DEVICE
    return needed <= max_memory


def block(embeddings: Tensor, weight: Tensor, sub_centers: int, max_memory: int | None) -> int:
    """How many rows of the weights pass at once: whole classes."""
    number, dim = embeddings.shape
    item = 8 if kind_of(embeddings, weight) == torch.float64 else 4
    a_class = sub_centers * (item * 3 * number + COORDINATE * dim)
    if max_memory is None:
        room = AUTOMATIC if embeddings.device.type == "cpu" else ON_DEVICE
        return max(1, room // a_class) * sub_centers
    checks.integer("max_memory", max_memory, 1)
    fixed = COORDINATE * dim * number
    checks.enough("max_memory", max_memory, fixed + a_class, "what the anchors and one class take in bytes")
    return (max_memory - fixed) // a_class * sub_centers


def _rows(weight: Tensor, normalize: bool, kind: torch.dtype) -> Tensor:
    return (distances.unit(weight) if normalize else distances.upcast(weight)).to(kind)


def _through_rows(weight: Tensor, by_rows: Tensor, normalize: bool) -> Tensor:
    """A gradient by `_rows` as one by the weights: none along a row of unit length, nor where a coordinate is held."""
    held = distances.upcast(weight)
    gradient = by_rows.to(distances.wide(weight))
    if normalize:
        rows, inverse = distances.units(weight, distances.wide(weight))
        gradient = (gradient - (gradient * rows).sum(1, keepdim=True) * rows) * inverse
    return torch.where(held == weight, gradient, 0.0).to(held.dtype)


def _scores(
    asked: Tensor, rows: Tensor, ids: Tensor, start: int, sub_centers: int, lost: float
) -> tuple[Tensor, Tensor | None]:
    """Scores of a block of classes, (B, n), -inf for the own class; which centre each is of, if there is a choice."""
    scores = asked @ rows.T
    if lost:
        scores += torch.where(reduce.any_in_row(rows != 0), 0.0, lost)
    best = None
    if sub_centers > 1:
        scores, best = scores.view(len(ids), rows.shape[0] // sub_centers, sub_centers).max(2)
    place = (ids - start // sub_centers)[:, None]
    column = place.clamp(0, scores.shape[1] - 1)
    scores.scatter_(1, column, scores.gather(1, column).masked_fill_(place == column, -torch.inf))
    return scores, best


def spread(parts: Tensor, best: Tensor | None, sub_centers: int) -> Tensor:
    """What each class has, given to the row that spoke for it: (B, n) → (B, n·K)."""
    if best is None:
        return parts
    every = parts.new_zeros(*parts.shape, sub_centers)
    return every.scatter_(2, best[:, :, None], parts[:, :, None]).flatten(1)


def _blocks(weight: Tensor, size: int) -> Iterator[tuple[int, Tensor]]:
    for start in range(0, weight.shape[0], size):
        yield start, weight[start : start + size]


def finished(total: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Of sums of e^{score - peak}: their logarithms, and their inverses, 0 where there are none; typed as `like`."""
    found = total > 0
    rest = torch.where(total == 0, reduce.log_zero(like), torch.where(found, total, 1.0).log()).to(like.dtype)
    share = torch.where(found, torch.where(found, total, 1.0).reciprocal(), 0.0).to(like.dtype)
    return torch.where(total.isnan(), torch.nan, rest), share


def with_own(gradient: Tensor, picks: Tensor, by_own: Tensor, start: int) -> Tensor:
    """The gradient by a block of class weights with what the anchors gave their own rows, `picks`, in place."""
    inside = (picks >= start) & (picks < start + len(gradient))
    place = torch.where(inside, picks - start, 0)
    return gradient.index_add_(0, place, torch.where(inside[:, None], by_own, 0.0).to(gradient.dtype))


def _scan(
    asked: Tensor,
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
    kind, wide = asked.dtype, distances.wide(asked)
    peak = asked.new_full((len(ids),), -torch.inf)
    total = torch.zeros_like(peak, dtype=wide)
    mean = torch.zeros_like(asked, dtype=wide) if wants_mean else None
    taint = torch.zeros((), device=asked.device)
    with torch.autocast(device_type(asked), enabled=False):
        for start, part in _blocks(weight, size):
            rows = _rows(part, normalize, kind)
            scores, best = _scores(asked, rows, ids, start, centers, lost)
            top = torch.maximum(peak, scores.amax(1))
            level = torch.where(top == -torch.inf, 0.0, top)
            shrink, peak = (peak - level).exp(), top
            parts = scores.sub_(level[:, None]).exp_()
            total = total * shrink + parts.sum(1)
            if mean is not None:
                mean = mean.mul_(shrink[:, None]).add_(spread(parts, best, centers) @ rows)
            taint = taint + reduce.taint(part)
    rest, share = finished(total, asked)
    made = asked.new_empty(0) if mean is None else (mean * share[:, None]).to(kind)
    return torch.where(peak == -torch.inf, 0.0, peak), rest, weight[picks].to(kind, copy=True), taint, share, made


def _weight_gradient(
    asked: Tensor,
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
    """The gradient by the weights, (C·K, D): the scores are made once more. pull: the gradient by rest, times share."""
    by_weight = torch.empty_like(weight, dtype=kind)
    with torch.autocast(device_type(asked), enabled=False):
        for start, part in _blocks(weight, size):
            rows = _rows(part, normalize, asked.dtype)
            scores, best = _scores(asked, rows, ids, start, centers, lost)
            parts = scores.sub_(level[:, None]).exp_().mul_(pull[:, None])
            gradient = _through_rows(part, spread(parts, best, centers).T @ asked, normalize)
            by_weight[start : start + len(part)] = with_own(gradient, picks, by_own, start)
    return by_weight


class _Pass(HandGradient):
    @staticmethod
    def forward(
        ctx: Any,
        asked: Tensor,
        weight: Tensor,
        ids: Tensor,
        picks: Tensor,
        normalize: bool,
        centers: int,
        lost: float,
        size: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wants = ctx.needs_input_grad[0]
        peak, rest, own, taint, share, mean = _scan(asked, weight, ids, picks, normalize, centers, lost, size, wants)
        ctx.way = normalize, centers, lost, size, gradient_kind(weight)
        ctx.save_for_backward(asked, weight, ids, picks, peak, share, mean)
        ctx.mark_non_differentiable(peak, taint)
        return peak, rest, own, taint

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor, by_rest: Tensor, by_own: Tensor, __: Tensor) -> tuple[Tensor | None, ...]:
        return *_gradients(ctx, by_rest, by_own, _weight_gradient), *[None] * 6


def _gradients(
    ctx: Any, by_rest: Tensor, by_own: Tensor, weight_gradient: Callable[..., Tensor]
) -> tuple[Tensor | None, Tensor | None]:
    """By the anchors, which the forward pass has made but for a factor, and by the weights."""
    *met, peak, share, mean = ctx.saved_tensors
    by_asked = by_rest[:, None] * mean if ctx.needs_input_grad[0] else None
    by_weight = None
    if ctx.needs_input_grad[1]:
        by_weight = weight_gradient(*met, peak, by_rest * share, by_own, *ctx.way)
    return by_asked, by_weight


# Under torch.compile the same passes are two opaque operators: unrolled, many classes would be thousands of blocks.
_WAY = "bool normalize, int centers, float lost, int size"
_compiled_scan = torch.library.custom_op(
    "nearkin::class_scan",
    _scan,
    mutates_args=(),
    schema=f"(Tensor asked, Tensor weight, Tensor ids, Tensor picks, {_WAY}, bool wants_mean)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
_compiled_weight_gradient = torch.library.custom_op(
    "nearkin::class_weight_gradient",
    _weight_gradient,
    mutates_args=(),
    schema="(Tensor asked, Tensor weight, Tensor ids, Tensor picks, Tensor level, Tensor pull, Tensor by_own, "
    f"{_WAY}, ScalarType kind) -> Tensor",
)


@_compiled_scan.register_fake
def _(asked: Tensor, weight: Tensor, ids: Tensor, picks: Tensor, *way: Any) -> tuple[Tensor, ...]:
    anchor, taint = asked.new_empty(len(ids)), asked.new_empty((), dtype=torch.float32)
    mean = torch.empty_like(asked) if way[-1] else asked.new_empty(0)
    return anchor, torch.empty_like(anchor), torch.empty_like(asked), taint, torch.empty_like(anchor), mean


@_compiled_weight_gradient.register_fake
def _(asked: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(weight, dtype=_[-1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    peak, _, _, taint, share, mean = output
    ctx.save_for_backward(*inputs[:4], peak, share, mean)
    ctx.way = (*inputs[4:8], inputs[1].dtype)
    ctx.mark_non_differentiable(peak, taint, share, mean)


def _compiled_backward(ctx: Any, _: Any, by_rest: Tensor, by_own: Tensor, *__: Any) -> tuple[Tensor | None, ...]:
    return *_gradients(ctx, by_rest, by_own, _compiled_weight_gradient), *[None] * 7


_compiled_scan.register_autograd(_compiled_backward, setup_context=_keep)


def gradient_kind(weight: Tensor) -> torch.dtype:
    """The type that the weights want their gradient in: their own, unless `weight.grad_dtype` says another."""
    wanted = getattr(weight, "grad_dtype", None) if weight.is_leaf else None
    return wanted or weight.dtype
