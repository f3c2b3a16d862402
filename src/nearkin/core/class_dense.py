"""Cross-entropy over class weights with all logits in memory: one node of the graph, from products to gradients.

For few classes; for many, `core.class_softmax` computes them block by block.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearkin.core import distances, reduce
from nearkin.core.autograd import HandGradient, device_type, gradients_again, traced
from nearkin.core.class_softmax import spread

__all__ = ["OwnScore", "OwnScoreFunction", "cross_entropy"]


class OwnScore(NamedTuple):
    """The score of each anchor's own class after its margin."""

    score: Tensor  # (B, 1)
    slope: Tensor | None = None  # (B, 1) derivative by the plain score; None is 1
    stretch: Tensor | None = None  # (B, 1) the gradient by the anchor apart from that is `stretch` times the anchor


OwnScoreFunction = Callable[[Tensor, Tensor], OwnScore]  # of plain scores (B, 1) and the anchors (B, D)


def cross_entropy(
    anchors: Tensor,
    rows: Tensor,
    ids: Tensor,
    target: Tensor | None = None,
    *,
    scale: float | Tensor = 1.0,
    own_score: OwnScoreFunction | None = None,
    centers: int = 1,
    lost: float = 0.0,
    soft: bool = True,
    normalize: bool = False,
) -> Tensor:
    """-log of the own class's part of the softmax of scale · <anchors_i, rows_c>, (B,), in few passes.

    target: the score of the own class, (B,); without it the product, after `own_score` if there is one. centers: rows
    per class, of which the best is the class's score. lost: the score of a row of zeros. soft=False: the sum leaves
    the own class out. normalize: scales anchors and rows to length 1 first. Can be differentiated twice.
    """
    if normalize:
        normalize = not (traced() or isinstance(scale, Tensor) or lost)  # within the node
        prepared = distances.upcast if normalize else distances.unit
        anchors, rows = prepared(anchors), prepared(rows)
    kind = torch.promote_types(anchors.dtype, rows.dtype)
    if isinstance(scale, Tensor):
        anchors, scale = scale * anchors, 1.0
    bias = None
    if lost:
        empty = ~reduce.any_in_row(rows.detach() != 0)
        if not distances.freely_read(rows) or bool(empty.any()):
            bias = torch.where(empty, lost, 0.0).to(kind)
    target = None if target is None else target.to(kind)
    form = _Form(scale, own_score, centers, soft, normalize)
    anchors, rows = anchors.to(kind), rows.to(kind)
    value: Tensor = (_plain if traced() else _Dense.call)(anchors, rows, ids, target, bias, form)
    return value


class _Form(NamedTuple):
    scale: float
    own_score: OwnScoreFunction | None
    centers: int
    soft: bool
    normalize: bool


class _Dense(HandGradient):
    """Products, softmax and gradient as one node: two matrices, where autograd makes five."""

    @staticmethod
    def forward(
        ctx: Any, anchors: Tensor, rows: Tensor, ids: Tensor, target: Tensor | None, bias: Tensor | None, form: _Form
    ) -> Tensor:
        own_column, best, inverses = ids[:, None], None, (None, None)
        given = anchors, rows
        if form.normalize:
            pairs = [distances.unit_rows(one, one.dtype) for one in given]
            (anchors, rows), inverses = zip(*pairs, strict=True)
        with torch.autocast(device_type(anchors), enabled=False):
            share = torch.addmm(anchors.new_zeros(()), anchors, rows.T, beta=0, alpha=form.scale)
        if bias is not None:
            share += bias
        if form.centers > 1:
            share, best = share.view(len(ids), len(rows) // form.centers, form.centers).max(2)
        if target is not None:
            score, slope, stretch = OwnScore(target[:, None])
        else:
            score, slope, stretch = OwnScore(share.gather(1, own_column))
            if form.own_score is not None:
                score, slope, stretch = form.own_score(score, anchors)
        share.scatter_(1, own_column, -torch.inf)  # in one sum the own class would cost the digits of a small loss
        alone = share.shape[1] == 1
        top = torch.zeros_like(score) if alone else share.amax(1, keepdim=True)
        total = share.sub_(top).exp_().sum(1, keepdim=True)
        rest = total.log() - (score - top)
        total = total + 1 if alone else total
        kept = share, best, total, rest, slope, stretch
        ctx.save_for_backward(*given, ids, target, bias, anchors, rows, *inverses, *kept)
        ctx.form = form
        return (reduce.softplus(rest) if form.soft else rest).squeeze(1)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        given_anchors, given_rows, ids, target, bias, anchors, rows, *kept = ctx.saved_tensors
        inverse, row_inverse, share, best, total, rest, slope, stretch = kept
        scale, _, centers, soft, normalize = ctx.form
        if torch.is_grad_enabled():  # for a second derivative
            inputs, wanted = (given_anchors, given_rows, target), (*ctx.needs_input_grad[:2], ctx.needs_input_grad[3])
            by_anchors, by_rows, by_target = gradients_again(
                lambda a, r, t: _plain(a, r, ids, t, bias, ctx.form), inputs, wanted, upstream
            )
            return by_anchors, by_rows, None, by_target, None, None
        pull = upstream[:, None] * rest.sigmoid() if soft else upstream[:, None]
        parts = share * (scale * pull / total)
        if target is None:
            parts.scatter_(1, ids[:, None], -scale * pull if slope is None else -scale * pull * slope)
        parts = spread(parts, best, centers)
        with torch.autocast(device_type(anchors), enabled=False):
            by_anchors = parts @ rows if ctx.needs_input_grad[0] else None
            by_rows = parts.T @ anchors if ctx.needs_input_grad[1] else None
        if by_anchors is not None and stretch is not None:
            by_anchors.addcmul_(pull * stretch, anchors, value=-1)
        if normalize:
            by_anchors = None if by_anchors is None else distances.unit_slope(by_anchors, anchors, inverse)
            by_rows = None if by_rows is None else distances.unit_slope(by_rows, rows, row_inverse)
        return by_anchors, by_rows, None, None if target is None else -pull.squeeze(1), None, None


def _plain(
    anchors: Tensor, rows: Tensor, ids: Tensor, target: Tensor | None, bias: Tensor | None, form: _Form
) -> Tensor:
    """`_Dense` in autograd's steps."""
    if form.normalize:
        anchors, rows = distances.unit(anchors), distances.unit(rows)
    with torch.autocast(device_type(anchors), enabled=False):
        logits = form.scale * (anchors @ rows.T) + (0.0 if bias is None else bias)
    if form.centers > 1:
        logits = logits.view(len(ids), len(rows) // form.centers, form.centers).max(2).values
    score = target
    if score is None:
        score = logits.gather(1, ids[:, None])
        score = (score if form.own_score is None else form.own_score(score, anchors).score).squeeze(1)
    others = torch.arange(logits.shape[1], device=ids.device) != ids[:, None]
    # Peak and rest stay apart: their sum would lose the digits of a small loss.
    masked = torch.where(others, logits, -torch.inf)
    top = masked.detach().amax(1) if logits.shape[1] > 1 else torch.zeros_like(score)
    total = (masked - top[:, None]).exp().sum(1)
    rest = torch.where(total == 0, reduce.log_zero(total), torch.where(total == 0, 1.0, total).log()) - (score - top)
    return reduce.softplus(rest) if form.soft else rest
