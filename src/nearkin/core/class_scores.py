"""The softmax over class weights with the own class apart, all scores in memory: any margin, any derivative.

The own class's score, with whatever margin, needs only (B,) numbers; the log-sum-exp of the others knows no margin. In
one sum they would cost the digits of a small loss. `core.class_blocks` gives the same numbers block by block.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from nearkin.core import reduce
from nearkin.core.autograd import HandGradient, device_type, full_precision, gradients_again, traced

__all__ = ["Rivals", "cosines", "cross_entropy", "is_best", "of_classes", "product", "rivals", "soft_maximum"]


class Rivals(NamedTuple):
    """How the other classes score for each anchor; their log-sum-exp is peak + rest, whose sum would lose digits."""

    peak: Tensor  # (B,) the highest score, a constant: the gradient is all in `rest`
    rest: Tensor  # (B,) log Σ e^{score - peak}; `reduce.log_zero` where there are no others
    own: Tensor  # (B,) the score of the own class, not yet multiplied by `scale`


def cosines(x: Tensor, rows: Tensor, centers: int) -> Tensor:
    """Products of unit rows with K centres of each class, (B, K, C): classes last, where machines reduce fastest."""
    kind, classes = torch.promote_types(x.dtype, rows.dtype), len(rows) // centers
    first = rows.to(kind).view(classes, centers, rows.shape[1]).transpose(0, 1).reshape(rows.shape)
    return product(x.to(kind), first).view(len(x), centers, classes)


def product(x: Tensor, rows: Tensor) -> Tensor:
    """Products of all anchors with all rows, (B, C): never of half precision, forward and backward, under autocast."""
    if not traced() and torch.is_autocast_enabled(device_type(x)):
        value: Tensor = _Product.call(x, rows)
        return value
    return _plain_product(x, rows)


def _plain_product(x: Tensor, rows: Tensor) -> Tensor:
    with full_precision(x):
        return x @ rows.T


class _Product(HandGradient):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(x, rows)
        return _plain_product(x, rows)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        x, rows = ctx.saved_tensors
        with full_precision(x):
            by_x = slope @ rows if ctx.needs_input_grad[0] else None
            return by_x, slope.T @ x if ctx.needs_input_grad[1] else None


def of_classes(products: Tensor, several: str, temperature: float) -> Tensor:
    """The scores of classes (B, C) by those of their K centres (B, K, C): the nearest, softly so, or their sum."""
    if several == "soft":
        return soft_maximum(products, temperature)
    if several == "sum":
        return products.logsumexp(1)
    if traced():
        return products.amax(1)  # whose gradient a compiler fuses
    best: Tensor = _Best.call(products) if products.is_cpu else products.max(1).values
    return best


def is_best(products: Tensor) -> Tensor:
    """1 for the best of (B, K, C) along K, else 0; of equals their share. In passes that a CPU makes in vectors."""
    best = (products - products.amax(1, keepdim=True)).sign_().add_(1)
    return best.div_(best.sum(1, keepdim=True))


class _Best(HandGradient):
    """The largest along K, without its index, for which a CPU takes fifteen times as long."""

    @staticmethod
    def forward(ctx: Any, products: Tensor) -> Tensor:
        ctx.save_for_backward(products)
        return products.amax(1)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        return is_best(ctx.saved_tensors[0]) * upstream[:, None]


def soft_maximum(products: Tensor, temperature: float) -> Tensor:
    """Σ_k softmax_k(c / γ) c_k over the second of (B, K, C)."""
    if traced():
        return ((products / temperature).softmax(1) * products).sum(1)
    value: Tensor = _SoftMaximum.call(products, temperature)
    return value


class _SoftMaximum(HandGradient):
    """With the gradient by hand, p (1 + (c - S) / γ): less than half of autograd's time."""

    @staticmethod
    def forward(ctx: Any, products: Tensor, temperature: float) -> Tensor:
        share = (products - products.amax(1, keepdim=True)).div_(temperature).exp_()
        total = share.sum(1)
        value = (share * products).sum(1) / total
        ctx.save_for_backward(products, share, total, value)
        ctx.temperature = temperature
        return value

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        products, share, total, value = ctx.saved_tensors
        if torch.is_grad_enabled():  # for a second derivative: through the products
            share = torch.softmax(products / ctx.temperature, 1)
            value = (share * products).sum(1, keepdim=True)
            return (1 + (products - value) / ctx.temperature) * share * upstream[:, None], None
        rise = (products - value[:, None]).mul_(share).add_(share, alpha=ctx.temperature)
        return rise.mul_((upstream / (total * ctx.temperature))[:, None]), None


def rivals(
    scores: Tensor, ids: Tensor, scale: float | Tensor = 1.0, *, some: bool = False, by_class: bool = False
) -> Rivals:
    """The log-sum-exp of scale · scores (B, C) over all classes but ids[i], (B,).

    by_class: over all items but those of the class, (C,); an unknown item has ids[i] = -1.

    The scores must be of the caller's own making: they are written to, and are what they were afterwards. some: the
    classes are some of all; an anchor of another has ids[i] = C, all are its rivals and `own` means nothing.
    """
    if isinstance(scale, Tensor) and scale.requires_grad:  # it learns through the scores of the others
        of_others = rivals(scores * (scale / scale.detach()), ids, scale.detach(), some=some, by_class=by_class)
        column = ids.clamp(0, scores.shape[1] - 1)[:, None]
        return of_others._replace(own=scores.gather(1, column).squeeze(1))
    own, peak, rest = (_plain if traced() else _Others.call)(scores, ids, scale, some, 0 if by_class else 1)
    return Rivals(peak, rest, own)


def cross_entropy(peak: Tensor, rest: Tensor, target: Tensor, soft: bool = True) -> Tensor:
    """-log of the own class's part of the softmax, (B,), from its score; soft=False: it is not in the sum itself."""
    lead = target - peak - rest
    return -logsigmoid(lead) if soft else -lead


class _Others(HandGradient):
    """One matrix beside the scores, where autograd makes five."""

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, ids: Tensor, scale: float | Tensor, some: bool, dim: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        column, last = ids[:, None], scores.shape[1] - 1
        here = column <= last if some else None
        column = column.clamp(0, last) if some or dim == 0 else column
        own = scores.gather(1, column)
        same = scores.data  # written to and restored before anyone reads it: no version of the graph
        same.scatter_(1, column, -torch.inf if here is None else own.masked_fill(here, -torch.inf))
        if dim == 0:
            same.masked_fill_((ids < 0)[:, None], -torch.inf)
        top = same.amax(dim, keepdim=True) if len(ids) or dim else same.new_full((1, last + 1), -torch.inf)
        alone = last == 0 or dim == 0  # there may be no others
        if alone:
            top = torch.where(top == -torch.inf, 0.0, top)
        peak = top * scale
        if isinstance(scale, Tensor):
            share = torch.addcmul(-peak, same, scale.to(same.dtype)).exp_()
        else:
            share = torch.add(-peak, same, alpha=scale).exp_()
        same.scatter_(1, column, own)
        total = share.sum(dim, keepdim=True)
        rest = total.log()
        if alone:
            rest = torch.where(total == 0, reduce.log_zero(rest), rest)
            total = torch.where(total == 0, 1.0, total)
        ctx.save_for_backward(scores, ids, column, share, total)
        ctx.settings = scale, some, dim
        ctx.mark_non_differentiable(peak)
        ctx.set_materialize_grads(False)
        return own.squeeze(1), peak.squeeze(dim), rest.squeeze(dim)

    @staticmethod
    def backward(ctx: Any, by_own: Tensor | None, _: Any, by_rest: Tensor | None) -> tuple[Tensor | None, ...]:
        scores, ids, column, share, total = ctx.saved_tensors
        scale, some, dim = ctx.settings
        by_rest = torch.zeros_like(total).squeeze(dim) if by_rest is None else by_rest
        if torch.is_grad_enabled():  # for a second derivative
            upstream = (torch.zeros_like(ids, dtype=share.dtype) if by_own is None else by_own, by_rest)
            again = gradients_again(lambda s: _plain(s, ids, scale, some, dim)[::2], (scores,), (True,), upstream)
            return again[0], *[None] * 4
        by_scores = share * (by_rest.unsqueeze(dim) * scale / total)
        if by_own is not None:
            by_scores.scatter_add_(1, column, by_own[:, None])
        return by_scores, *[None] * 4


def _plain(scores: Tensor, ids: Tensor, scale: float | Tensor, some: bool, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """`_Others` in autograd's steps."""
    others = torch.arange(scores.shape[1], device=ids.device) != ids[:, None]
    column = ids.clamp(0, scores.shape[1] - 1) if some or dim == 0 else ids
    own = scores.gather(1, column[:, None]).squeeze(1)
    others = others & (ids >= 0)[:, None] if dim == 0 else others
    masked = torch.where(others, scores, -torch.inf)
    top = masked.detach().amax(dim) if len(ids) or dim else masked.new_full(masked.shape[1:], -torch.inf)
    top = torch.where(top == -torch.inf, 0.0, top)
    total = (scale * (masked - top.unsqueeze(dim))).exp().sum(dim)
    rest = torch.where(total == 0, reduce.log_zero(total), torch.where(total == 0, 1.0, total).log())
    return own, top * scale, rest
