"""Cross-entropy over class weights with its logits held, from products to gradients as one node of the graph.

For classes few enough; for many `core.class_softmax` lets them pass by in blocks.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearkin.core import distances, reduce
from nearkin.core.autograd import HandGradient, device_type, traced
from nearkin.core.class_softmax import spread

__all__ = ["Bend", "Bent", "cross_entropy"]


class Bent(NamedTuple):
    """What an own class is made to score, (B, 1), its slope by the plain score, and by the anchor apart from that:
    that part of the gradient is `stretch` times the anchor. None: a slope of 1, and no such part."""

    score: Tensor
    slope: Tensor | None = None
    stretch: Tensor | None = None


Bend = Callable[[Tensor, Tensor], Bent]  # of plain scores (B, 1) and the anchors (B, D)


def cross_entropy(
    asked: Tensor,
    rows: Tensor,
    ids: Tensor,
    target: Tensor | None = None,
    *,
    scale: float | Tensor = 1.0,
    bend: Bend | None = None,
    centers: int = 1,
    lost: float = 0.0,
    soft: bool = True,
) -> Tensor:
    """-log of the own class's part of the softmax of scale · <asked_i, rows_c>, (B,): logits held, in few passes.

    target: what the own class scores, (B,); without it the product, or what `bend` makes of it. Of `centers` rows a
    class the best speaks. lost: what a row of zeros scores. soft=False: the own class is not in the sum that it is
    compared with. Can be differentiated twice.
    """
    kind = torch.promote_types(asked.dtype, rows.dtype)
    if isinstance(scale, Tensor):
        asked, scale = scale * asked, 1.0
    bias = None
    if lost:
        empty = ~reduce.any_in_row(rows.detach() != 0)
        if not distances.freely_read(rows) or bool(empty.any()):
            bias = torch.where(empty, lost, 0.0).to(kind)
    target = None if target is None else target.to(kind)
    way = _Way(scale, bend, centers, soft)
    asked, rows = asked.to(kind), rows.to(kind)
    value: Tensor = (_plain if traced() else _Dense.call)(asked, rows, ids, target, bias, way)
    return value


class _Way(NamedTuple):
    scale: float
    bend: Bend | None
    centers: int
    soft: bool


class _Dense(HandGradient):
    """Products, softmax and the way back as one node: two matrices are made, where autograd makes five."""

    @staticmethod
    def forward(
        ctx: Any, asked: Tensor, rows: Tensor, ids: Tensor, target: Tensor | None, bias: Tensor | None, way: _Way
    ) -> Tensor:
        own, best = ids[:, None], None
        with torch.autocast(device_type(asked), enabled=False):
            share = torch.addmm(asked.new_zeros(()), asked, rows.T, beta=0, alpha=way.scale)
        if bias is not None:
            share += bias
        if way.centers > 1:
            share, best = share.view(len(ids), len(rows) // way.centers, way.centers).max(2)
        if target is not None:
            bent = Bent(target[:, None])
        else:
            bent = Bent(share.gather(1, own))
            bent = bent if way.bend is None else way.bend(bent.score, asked)
        score = bent.score
        share.scatter_(1, own, -torch.inf)  # beside the own class the others would lose the digits of a small loss
        alone = share.shape[1] == 1
        top = torch.zeros_like(score) if alone else share.amax(1, keepdim=True)
        total = share.sub_(top).exp_().sum(1, keepdim=True)
        rest = total.log() - (score - top)
        ctx.save_for_backward(
            asked, rows, ids, target, bias, share, best, total + 1 if alone else total, rest, *bent[1:]
        )
        ctx.way = way
        return (reduce.softplus(rest) if way.soft else rest).squeeze(1)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        asked, rows, ids, target, bias, share, best, total, rest, slope, stretch = ctx.saved_tensors
        scale, _, centers, soft = ctx.way
        if torch.is_grad_enabled():  # a gradient of the gradient is wanted
            return (*_again(asked, rows, ids, target, bias, ctx.way, upstream), None, None)
        pull = upstream[:, None] * rest.sigmoid() if soft else upstream[:, None]
        parts = share * (scale * pull / total)
        if target is None:
            parts.scatter_(1, ids[:, None], -scale * pull if slope is None else -scale * pull * slope)
        parts = spread(parts, best, centers)
        with torch.autocast(device_type(asked), enabled=False):
            by_asked = parts @ rows if ctx.needs_input_grad[0] else None
            by_rows = parts.T @ asked if ctx.needs_input_grad[1] else None
        if by_asked is not None and stretch is not None:
            by_asked.addcmul_(pull * stretch, asked, value=-1)
        return by_asked, by_rows, None, None if target is None else -pull.squeeze(1), None, None


def _plain(asked: Tensor, rows: Tensor, ids: Tensor, target: Tensor | None, bias: Tensor | None, way: _Way) -> Tensor:
    """`_Dense` in autograd's own steps."""
    with torch.autocast(device_type(asked), enabled=False):
        logits = way.scale * (asked @ rows.T) + (0.0 if bias is None else bias)
    if way.centers > 1:
        logits = logits.view(len(ids), len(rows) // way.centers, way.centers).max(2).values
    score = target
    if score is None:
        score = logits.gather(1, ids[:, None])
        score = (score if way.bend is None else way.bend(score, asked).score).squeeze(1)
    others = torch.arange(logits.shape[1], device=ids.device) != ids[:, None]
    # Peak and rest are kept apart: their sum would lose the digits of a small loss.
    masked = torch.where(others, logits, -torch.inf)
    top = masked.detach().amax(1) if logits.shape[1] > 1 else torch.zeros_like(score)
    total = (masked - top[:, None]).exp().sum(1)
    rest = torch.where(total == 0, reduce.log_zero(total), torch.where(total == 0, 1.0, total).log()) - (score - top)
    return reduce.softplus(rest) if way.soft else rest


def _again(
    asked: Tensor, rows: Tensor, ids: Tensor, target: Tensor | None, bias: Tensor | None, way: _Way, upstream: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients of `cross_entropy` through autograd's own steps, for a gradient of them."""
    value = _plain(asked, rows, ids, target, bias, way)
    given = [t for t in (asked, rows, target) if t is not None and t.requires_grad]
    found = iter(torch.autograd.grad(value, given, upstream, create_graph=True))
    by_asked, by_rows, by_target = (
        next(found) if t is not None and t.requires_grad else None for t in (asked, rows, target)
    )
    return by_asked, by_rows, None, by_target
