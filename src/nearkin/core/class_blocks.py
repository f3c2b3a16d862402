"""The softmax over many class weights without storing its logits: block by block, recomputed for the gradient.

The pass leaves the own class out, whose score needs only (B, D) tensors and plain autograd: so one pass serves every
margin. Gradients by embeddings and weights are written block by block, in place. Two opaque operators, so that a
compiler does not unroll thousands of blocks; a second derivative is refused.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearkin.core import checks, distances, reduce
from nearkin.core.autograd import differentiable_once, full_precision
from nearkin.core.class_scores import cosines, is_best

__all__ = ["Form", "Pass", "block", "finished", "fits", "gradient_kind", "own_rows", "scan"]

AUTOMATIC = 2**25  # default bytes of a block: larger ones leave the processor's caches
ON_DEVICE = 2**28  # the same on a GPU, where launching costs more than the caches save
WHOLE = 2**27  # default bytes that all scores may take,
WHOLE_ON_DEVICE = 2**32  # and on a GPU, where blocks take several times as long
PAIR = 16  # bytes per anchor and class weight with all scores in memory, float32: scores, softmax, gradients (10 to 15)
COORDINATE = 64  # bytes per coordinate of a normalised row: wide copies and their gradients
ONCE = "a loss over class weights in blocks of classes (beyond max_memory, or a modest size without it)"


class Form(NamedTuple):
    """How a class scores by its weights, K in a row: the product with the row, of several rows as `several` says."""

    normalize: bool = True  # rows are scaled to length 1
    centers: int = 1  # K
    several: str = "max"  # "max"; "soft": Σ_k softmax_k(c / γ) c_k; "sum": log Σ_k e^c_k
    temperature: float = 1.0  # γ
    lost: float = 0.0  # added to the score of a row that is 0
    by_class: bool = False  # the log-sum-exp runs over the items of other classes, of each class


class Pass(NamedTuple):
    peak: Tensor  # (B,) the highest score of the other classes, a constant; by_class (C,)
    rest: Tensor  # (B,) log Σ e^{score - peak}; `reduce.log_zero` where there are none
    own: Tensor  # (B, P, D) the rows that `own_rows` picked
    taint: Tensor  # 0, or NaN if a class weight is not finite


def scan(
    x: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, picks: Tensor, form: Form, max_memory: int | None
) -> Pass:
    """The log-sum-exp of <x_i, w_c> + b_c over all classes c but ids[i], or by class over all items but its own.

    x (B, D): anchors as they are multiplied, of float32 or wider. weight (C·K, D), bias (C,). ids (B,) in 0..C-1, C for
    an anchor whose class is not among these, and -1, by class, for an unknown one. picks (B, P): `own_rows`.
    Memory: a block of `max_memory` bytes beside the gradients.
    """
    size = block(x, weight, form, max_memory)
    peak, rest, own, taint = _scan(x, weight, bias, ids, picks, *form, size)
    return Pass(peak, differentiable_once(rest, ONCE), own, taint)


@torch.no_grad()
def own_rows(x: Tensor, weight: Tensor, ids: Tensor, form: Form) -> Tensor:
    """The rows of each anchor's own class, (B, P): the one that scores highest, or all where all count."""
    ids = ids.clamp(0, weight.shape[0] // form.centers - 1)
    every = ids[:, None] * form.centers + torch.arange(form.centers, device=ids.device)  # (B, K)
    if form.centers == 1 or form.several == "soft":
        return every
    rows = _rows(weight.index_select(0, every.flatten()), form.normalize, x.dtype)[0]
    scores = (rows.view(*every.shape, x.shape[1]) * x[:, None, :]).sum(2)
    if form.lost:
        scores = scores + torch.where(reduce.any_in_row(rows != 0), 0.0, form.lost).view(scores.shape)
    return every.gather(1, scores.argmax(1, keepdim=True))


def fits(embeddings: Tensor, weight: Tensor, max_memory: int | None) -> bool:
    """Whether all scores stay within `max_memory` bytes, or the default."""
    wide = 2 if torch.promote_types(embeddings.dtype, weight.dtype) == torch.float64 else 1
    (number, dim), rows = embeddings.shape, weight.shape[0]
    if max_memory is None:
        max_memory = WHOLE if embeddings.is_cpu else WHOLE_ON_DEVICE
    return wide * PAIR * number * rows + COORDINATE * dim * (number + rows) <= max_memory


def block(x: Tensor, weight: Tensor, form: Form, max_memory: int | None) -> int:
    """Rows of the weights per block, a multiple of the centres of a class."""
    number, dim = x.shape
    matrices = 3 if form.several == "max" else 5
    class_bytes = form.centers * (x.element_size() * matrices * number + COORDINATE * dim)
    if max_memory is None:
        room = AUTOMATIC if x.device.type == "cpu" else ON_DEVICE
        return max(1, room // class_bytes) * form.centers
    fixed = COORDINATE * dim * number
    checks.enough("max_memory", max_memory, fixed + class_bytes, "what the anchors and one class take in bytes")
    return (max_memory - fixed) // class_bytes * form.centers


def _rows(weight: Tensor, normalize: bool, kind: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Class weights as they are multiplied, and the inverses of their lengths."""
    bounded = distances.upcast(weight)
    return distances.unit_rows(bounded.to(kind), kind) if normalize else (bounded.to(kind), None)


def _exact(run: Callable[..., tuple[Tensor, ...]]) -> Callable[..., Any]:
    """A pass whose products are never of half precision under autocast."""

    def exact(x: Tensor, *others: Any) -> tuple[Tensor, ...]:
        with full_precision(x):
            return run(x, *others)

    return exact


class _Block:
    """The scores of some classes, and what their derivatives are by the products with each row."""

    def __init__(self, x: Tensor, part: Tensor, bias: Tensor | None, ids: Tensor, start: int, form: Form) -> None:
        self.form, self.classes = form, slice(start // form.centers, (start + len(part)) // form.centers)
        self.rows, self.inverse = _rows(part, form.normalize, x.dtype)
        lost = torch.where(reduce.any_in_row(self.rows != 0), 0.0, form.lost) if form.lost else None
        if form.centers == 1:
            self.scores = x @ self.rows.T
            self.scores += 0.0 if lost is None else lost
        else:
            self.products = cosines(x, self.rows, form.centers)  # (B, K, n)
            self.products += 0.0 if lost is None else lost.view(-1, form.centers).T
            self.scores = self._of_several()
        if bias is not None:
            self.scores += bias[self.classes]
        if form.by_class:
            self.scores.masked_fill_((ids < 0)[:, None], -torch.inf)
        place = (ids - self.classes.start)[:, None]
        column = place.clamp(0, self.scores.shape[1] - 1)
        self.scores.scatter_(1, column, self.scores.gather(1, column).masked_fill_(place == column, -torch.inf))

    def _of_several(self) -> Tensor:
        if self.form.several == "max":
            return self.products.amax(1)
        top = self.products.amax(1, keepdim=True)
        self.share = (self.products - top).div_(self.form.temperature).exp_()
        total = self.share.sum(1, keepdim=True)
        self.share /= total
        if self.form.several == "sum":
            return total.log_().add_(top).squeeze(1)
        return (self.share * self.products).sum(1)

    def by_products(self, parts: Tensor) -> Tensor:
        """The derivative by the product with each row, (B, K·n), centre by centre, from that by the scores."""
        if self.form.centers == 1:
            return parts
        slopes = is_best(self.products) if self.form.several == "max" else self.share
        if self.form.several == "soft":
            mean = (slopes * self.products).sum(1, keepdim=True)
            slopes = slopes * (1 + (self.products - mean).div_(self.form.temperature))
        return (slopes * parts[:, None]).flatten(1)

    def gradients(self, x: Tensor, parts: Tensor) -> tuple[Tensor, Tensor]:
        """By the anchors, and by the class weights of the block."""
        parts, (number, dim), centers = self.by_products(parts), self.rows.shape, self.form.centers
        first = self.rows.view(-1, centers, dim).transpose(0, 1).reshape(number, dim)
        by_rows = (parts.T @ x).view(centers, -1, dim).transpose(0, 1).reshape(number, dim)
        if self.inverse is not None:
            by_rows = distances.unit_slope(by_rows, self.rows, self.inverse)
        return parts @ first, by_rows


def _blocks(weight: Tensor, size: int) -> Iterator[tuple[int, Tensor]]:
    for start in range(0, weight.shape[0], size):
        yield start, weight[start : start + size]


@_exact
def _run_scan(
    x: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, picks: Tensor, *settings: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *settings, size = settings  # type: ignore[assignment]
    form, wide = Form(*settings), distances.wide(x)
    number = weight.shape[0] // form.centers if form.by_class else len(ids)
    peak = x.new_full((number,), -torch.inf)
    total, taint = torch.zeros_like(peak, dtype=wide), torch.zeros((), device=x.device)
    for start, part in _blocks(weight, size):
        one = _Block(x, part, bias, ids, start, form)
        if form.by_class:
            here = one.classes
            peak[here] = one.scores.amax(0) if len(x) else -torch.inf
            total[here] = one.scores.sub_(_level(peak[here])).exp_().sum(0, dtype=wide)
        else:
            top = torch.maximum(peak, one.scores.amax(1))
            total = total * (peak - _level(top)).exp() + one.scores.sub_(_level(top)[:, None]).exp_().sum(1)
            peak = top
        taint = taint + reduce.taint(part)
    rest, _ = finished(total, x)
    own = weight.index_select(0, picks.flatten()).to(x.dtype, copy=True)
    return _level(peak), rest, own.view(*picks.shape, weight.shape[1]), taint


def finished(total: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Of sums of e^{score - peak}: their logarithms, and their inverses, 0 where there are none; typed as `like`."""
    positive = total > 0
    safe = torch.where(positive, total, 1.0)
    rest = torch.where(positive, safe.log(), reduce.log_zero(like)).to(like.dtype)
    return torch.where(total.isnan(), torch.nan, rest), torch.where(positive, safe.reciprocal(), 0.0).to(like.dtype)


def _level(peak: Tensor) -> Tensor:
    return torch.where(peak == -torch.inf, 0.0, peak)


@_exact
def _run_gradients(
    x: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, picks: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """By anchors, weights and biases. pull: the gradient by rest, times e^-rest."""
    level, pull, by_own, kind, *settings, size = others
    form = Form(*settings)
    by_x, by_weight = torch.zeros_like(x, dtype=distances.wide(x)), torch.empty_like(weight, dtype=kind)
    by_bias = x.new_empty(0 if bias is None else len(bias))
    flat, by_own = picks.flatten(), by_own.flatten(0, 1)
    for start, part in _blocks(weight, size):
        one = _Block(x, part, bias, ids, start, form)
        here = (None, one.classes) if form.by_class else (slice(None), None)
        parts = one.scores.sub_(level[here]).exp_().mul_(pull[here])
        by_rows, by_part = one.gradients(x, parts)
        by_x += by_rows
        if bias is not None:
            by_bias[one.classes] = parts.sum(0)
        _add_own(by_part, flat - start, by_own)
        by_weight[start : start + len(part)] = by_part
    return by_x.to(x.dtype, copy=True), by_weight, by_bias


def _add_own(by_part: Tensor, places: Tensor, by_own: Tensor) -> None:
    """Adds the gradients by rows of the anchors' own classes that are in this block."""
    inside = (places >= 0) & (places < len(by_part))
    if places.is_cpu:
        chosen = inside.nonzero().squeeze(1)
        by_part.index_add_(0, places[chosen], by_own[chosen])
    else:
        by_part.index_add_(0, torch.where(inside, places, 0), torch.where(inside[:, None], by_own, 0.0))


_TENSORS = "Tensor x, Tensor weight, Tensor? bias, Tensor ids, Tensor picks"
_FORM = "bool normalize, int centers, str several, float temperature, float lost, bool by_class, int size"
_scan = torch.library.custom_op(
    "nearkin::class_scan",
    _run_scan,
    mutates_args=(),
    schema=f"({_TENSORS}, {_FORM}) -> (Tensor, Tensor, Tensor, Tensor)",
)
_gradients = torch.library.custom_op(
    "nearkin::class_gradients",
    _run_gradients,
    mutates_args=(),
    schema=f"({_TENSORS}, Tensor level, Tensor pull, Tensor by_own, ScalarType kind, {_FORM})"
    " -> (Tensor, Tensor, Tensor)",
)


@_scan.register_fake
def _(x: Tensor, weight: Tensor, _: Any, ids: Tensor, picks: Tensor, *settings: Any) -> tuple[Tensor, ...]:
    form = Form(*settings[:-1])
    peak = x.new_empty(weight.shape[0] // form.centers if form.by_class else len(ids))
    own = x.new_empty(*picks.shape, x.shape[1])
    return peak, torch.empty_like(peak), own, x.new_empty((), dtype=torch.float32)


@_gradients.register_fake
def _(x: Tensor, weight: Tensor, bias: Any, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    by_bias = x.new_empty(0 if bias is None else len(bias))
    return torch.empty_like(x), torch.empty_like(weight, dtype=others[5]), by_bias


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    peak, rest, _, taint = output
    ctx.save_for_backward(*inputs[:5], peak, rest)
    ctx.settings = (gradient_kind(inputs[1]), *inputs[5:])
    ctx.mark_non_differentiable(peak, taint)


def _backward(ctx: Any, _: Any, by_rest: Tensor, by_own: Tensor, __: Any) -> tuple[Tensor | None, ...]:
    *inputs, peak, rest = ctx.saved_tensors
    pull = torch.where(rest > reduce.log_zero(rest) / 2, by_rest * (-rest).exp(), 0.0)
    by_x, by_weight, by_bias = _gradients(*inputs, peak, pull, by_own, *ctx.settings)
    return by_x, by_weight, None if inputs[2] is None else by_bias, *[None] * (len(ctx.settings) + 1)


_scan.register_autograd(_backward, setup_context=_save)


def gradient_kind(weight: Tensor) -> torch.dtype:
    """The type of the gradient by the weights: theirs, unless `weight.grad_dtype` says otherwise."""
    chosen = getattr(weight, "grad_dtype", None) if weight.is_leaf else None
    return chosen or weight.dtype
