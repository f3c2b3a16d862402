# mypy: ignore-errors
"""The softmax over very many classes in bfloat16, whose scores are never stored: the library's one kernel.

A score is factor_i · inverse_c · <x_i, w_c>: rows are multiplied as they are stored and scaled afterwards, so that a
bfloat16 weight is never rounded again and no copy of the weights is made. `_scan` is a matrix product whose tiles are
reduced to a peak and a sum. `_slopes` is the same product, whose tiles become the derivative by the scores, of one run
of classes after the other; two products by torch make the gradients of it, and `_finish` takes away the part along the
class weights. Imported where it serves (`core.class_blocks`), since it needs triton.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nearkin.core import class_blocks, distances
from nearkin.core.autograd import HandGradient, full_precision, refuse_second_derivative
from nearkin.kernels import RUN

__all__ = ["rivals"]

H, W, D = 128, 128, 64  # anchors and class weights of a tile, coordinates of a step
PROGRAMS = 1056  # of `_scan`: four waves on 132 multiprocessors, two on each
ROWS = 8  # class weights of a program of `_lengths` and `_finish`
SHORTEST = tl.constexpr(torch.finfo(torch.float32).tiny * 1e6)  # a shorter row has no direction (`distances.unit`)


@triton.jit
def _lengths(weight, inverse, classes, dim, R: tl.constexpr, D: tl.constexpr):
    """1 / |w_c|; 0 for a row too short to have a direction, NaN for one that is not finite."""
    c = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    largest = tl.zeros((R,), tl.float32)
    squares = tl.zeros((R,), tl.float32)
    for d in range(0, dim, D):
        axis = d + tl.arange(0, D)[None, :]
        w = tl.load(weight + c[:, None] * dim + axis, mask=(c < classes)[:, None] & (axis < dim), other=0.0)
        w = w.to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(w), 1))
        squares += tl.sum(w * w, 1)
    length = tl.sqrt(squares)
    if tl.min(((squares > 1e-25) & (squares < 1e35)).to(tl.int32)) == 0:  # squares that float32 may not hold
        shrink = tl.where(largest > 0, 1.0 / largest, 0.0)
        squares = tl.zeros((R,), tl.float32)
        for d in range(0, dim, D):
            axis = d + tl.arange(0, D)[None, :]
            w = tl.load(weight + c[:, None] * dim + axis, mask=(c < classes)[:, None] & (axis < dim), other=0.0)
            w = w.to(tl.float32) * shrink[:, None]
            squares += tl.sum(w * w, 1)
        length = largest * tl.sqrt(squares)
    tl.store(inverse + c, tl.where(length > SHORTEST, 1.0 / length, length * 0.0), mask=c < classes)


@triton.jit
def _scores(
    rows, factor, weight, inverse, ids, i0, c0, anchors, classes, dim, lost, H: tl.constexpr, W: tl.constexpr,
    D: tl.constexpr):  # fmt: skip
    """Scores of a tile, -inf for the own class and beyond the last one, with their factors and inverse lengths."""
    i = i0 + tl.arange(0, H)
    c = c0 + tl.arange(0, W)
    products = tl.zeros((H, W), tl.float32)
    for k in range(0, dim, D):
        products = tl.dot(rows.load([i0, k]), tl.trans(weight.load([c0, k])), products)
    scale = tl.load(factor + i, mask=i < anchors, other=0.0)
    short = tl.load(inverse + c, mask=c < classes, other=0.0)
    scores = products * short[None, :] * scale[:, None]  # the weight first: it may be long
    scores += tl.where(c < classes, tl.where(short == 0, lost, 0.0), float("-inf"))[None, :]
    own = tl.load(ids + i, mask=i < anchors, other=-1)
    if tl.max(((own >= c0) & (own < c0 + W)).to(tl.int32)) > 0:  # few tiles hold an anchor's own class
        scores = tl.where(c[None, :] == own[:, None], float("-inf"), scores)
    return scores, scale, short


@triton.jit
def _scan(
    rows, factor, weight, inverse, ids, lost, peaks, sums, anchors, classes, dim, part, H: tl.constexpr,
    W: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """Peak and sum of e^(score - peak) per anchor over `part` class weights."""
    down = tl.cdiv(anchors, H)
    i0 = tl.program_id(0) % down * H
    place = tl.program_id(0) // down
    i = i0 + tl.arange(0, H)
    peak = tl.full((H,), float("-inf"), tl.float32)
    total = tl.zeros((H,), tl.float32)
    for step in range(0, tl.minimum(part, classes - place * part), W):
        c0 = place * part + step
        scores, _, _ = _scores(rows, factor, weight, inverse, ids, i0, c0, anchors, classes, dim, lost, H, W, D)
        top = tl.maximum(peak, tl.max(scores, 1))
        level = tl.where(top == float("-inf"), 0.0, top)
        total = total * tl.exp(peak - level) + tl.sum(tl.exp(scores - level[:, None]), 1)
        peak = top
    at = place.to(tl.int64) * anchors + i
    tl.store(peaks + at, peak, mask=i < anchors)
    tl.store(sums + at, total, mask=i < anchors)


@triton.jit
def _slopes(
    rows, factor, weight, inverse, ids, lost, level, pull, out, anchors, classes, dim, start, stride,
    H: tl.constexpr, W: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """pull_i e^(score - level_i) factor_i inverse_c of the classes from `start` on, a tile of `out` (anchors, run)."""
    down = tl.cdiv(anchors, H)
    i0 = tl.program_id(0) % down * H
    column = tl.program_id(0) // down * W
    scores, scale, short = _scores(
        rows, factor, weight, inverse, ids, i0, start + column, anchors, classes, dim, lost, H, W, D)  # fmt: skip
    i = i0 + tl.arange(0, H)
    peak = tl.load(level + i, mask=i < anchors, other=0.0)
    share = tl.load(pull + i, mask=i < anchors, other=0.0) * scale
    part = tl.exp(scores - peak[:, None]) * share[:, None] * short[None, :]
    at = i.to(tl.int64)[:, None] * stride + (column + tl.arange(0, W))[None, :]
    tl.store(out + at, part.to(out.dtype.element_ty), mask=(i < anchors)[:, None])


@triton.jit
def _finish(
    product, weight, inverse, by_weight, classes, dim, start, PROJECT: tl.constexpr, R: tl.constexpr,
    D: tl.constexpr):  # fmt: skip
    """The gradient by R class weights: the product, for PROJECT without its part along them, rounded once."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    c = start + row
    short = tl.load(inverse + c, mask=c < classes, other=0.0)[:, None]
    source = product + row.to(tl.int64)[:, None] * dim
    at = c.to(tl.int64)[:, None] * dim
    along = tl.zeros((R,), tl.float32)
    if PROJECT:
        for d in range(0, dim, D):
            axis = d + tl.arange(0, D)[None, :]
            inside = (c < classes)[:, None] & (axis < dim)
            direction = tl.load(weight + at + axis, mask=inside, other=0.0).to(tl.float32) * short
            along += tl.sum(tl.load(source + axis, mask=inside, other=0.0) * direction, 1)
    for d in range(0, dim, D):
        axis = d + tl.arange(0, D)[None, :]
        inside = (c < classes)[:, None] & (axis < dim)
        value = tl.load(source + axis, mask=inside, other=0.0)
        if PROJECT:
            direction = tl.load(weight + at + axis, mask=inside, other=0.0).to(tl.float32) * short
            value -= along[:, None] * direction
        tl.store(by_weight + at + axis, value.to(by_weight.dtype.element_ty), mask=inside)


class Operands(NamedTuple):
    """What the scores are made of: rows (B, D), factor (B,), weight (C, D), inverse (C,), ids (B,), lost."""

    rows: Tensor
    factor: Tensor
    weight: Tensor
    inverse: Tensor
    ids: Tensor
    lost: float

    def scores(self) -> tuple:
        """The same as `_scores` takes it: the copy engine brings the rows."""
        x, w = (
            TensorDescriptor(each, list(each.shape), list(each.stride()), [size, D])
            for each, size in ((self.rows, self.height), (self.weight, W))
        )
        return x, self.factor, w, self.inverse, self.ids, self.lost

    @property
    def height(self) -> int:
        return H if len(self.rows) > 64 else 64

    @property
    def tile(self) -> dict:
        return {"H": self.height, "W": W, "D": D, "num_warps": 4, "num_stages": 3}

    @property
    def tiles_down(self) -> int:
        return -(-len(self.rows) // self.height)


def rivals(
    embeddings: Tensor,
    scaled: Tensor,
    weight: Tensor,
    ids: Tensor,
    normalize: bool,
    lost: float,
    run: int = RUN,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Peak, rest, own rows and taint of `core.class_blocks.Pass`.

    embeddings (B, D) bfloat16, and `scaled`, the same rows as they are multiplied by class weights. run: class weights
    of which derivatives are held at once, a multiple of W. Products are of bfloat16, sums float32; the derivative by
    a score is rounded to bfloat16 once, before it is multiplied with anchors and weights.
    """
    rows, factor = _operands(embeddings, scaled)
    return _Pass.call(scaled, weight, ids, rows, factor, normalize, lost, run)


@torch.no_grad()
def _operands(embeddings: Tensor, scaled: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (B, D) for the products and one factor per row (B,), which together are `scaled`.

    The rows are only multiplied by a power of two, which rounds nothing; the factor is the rest, from 1/2 to 1.
    """
    wide = embeddings.double()
    ratio = (wide * scaled).sum(1) / wide.square().sum(1)  # scaled = ratio · embeddings, by projection
    alive = embeddings.any(1) & (ratio != 0)
    factor, power = torch.frexp(torch.where(alive, ratio, 1.0))
    rows = torch.where(alive[:, None], torch.ldexp(wide, power[:, None]), 0.0)
    return rows.to(embeddings.dtype).contiguous(), factor.float()


class _Pass(HandGradient):
    @staticmethod
    def forward(ctx, scaled, weight, ids, rows, factor, normalize, lost, run):
        inverse = lengths(weight)
        taint = (inverse * 0).sum()
        operands = Operands(rows, factor, weight, inverse if normalize else torch.ones_like(inverse), ids, lost)
        level, total = scan(operands)
        rest, share = class_blocks.finished(total, scaled)
        ctx.save_for_backward(*operands[:5], level, share)
        ctx.settings, ctx.kind = (lost, normalize, run), class_blocks.gradient_kind(weight)
        ctx.mark_non_differentiable(level, taint)
        return level, rest, weight[ids.clamp(max=len(weight) - 1)].float(), taint

    @staticmethod
    def backward(ctx, _, by_rest, by_own, __):
        refuse_second_derivative(class_blocks.ONCE)
        *tensors, level, share = ctx.saved_tensors
        lost, normalize, run = ctx.settings
        operands = Operands(*tensors, lost)
        by = gradients(operands, level, by_rest * share, by_own, normalize, ctx.needs_input_grad[:2], ctx.kind, run)
        return *by, *[None] * 6


def lengths(weight: Tensor) -> Tensor:
    """1 / |w_c| (C,), 0 for a row too short to have a direction, NaN for one that is not finite."""
    classes, dim = weight.shape
    inverse = torch.empty(classes, device=weight.device)
    _lengths[(-(-classes // ROWS),)](weight, inverse, classes, dim, R=ROWS, D=_across(dim))
    return inverse


def scan(operands: Operands) -> tuple[Tensor, Tensor]:
    """Of each anchor's scores, without its own class: the peak and Σ e^(score - peak), (B,)."""
    (anchors, dim), classes = operands.rows.shape, len(operands.weight)
    down = operands.tiles_down
    part = -(-classes // max(1, PROGRAMS // down) // W) * W or W
    parts = -(-classes // part)
    peaks = operands.factor.new_empty(parts, anchors)
    sums = torch.empty_like(peaks)
    sizes = anchors, classes, dim, part
    _scan[(down * parts,)](*operands.scores(), peaks, sums, *sizes, **operands.tile)
    peak = peaks.amax(0)
    level = torch.where(peak == -torch.inf, 0.0, peak)
    return level, (sums * (peaks - level).exp()).sum(0, dtype=distances.wide(sums))


def gradients(
    operands: Operands,
    level: Tensor,
    pull: Tensor,
    by_own: Tensor,
    normalize: bool,
    wanted: tuple[bool, bool],
    kind: torch.dtype,
    run: int,
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of Σ pull e^(score - level) by `scaled` and, with `by_own` for the own rows, by the weights."""
    rows, weight, ids = operands.rows, operands.weight, operands.ids
    (anchors, dim), classes = rows.shape, len(weight)
    run = min(run, -(-classes // W) * W)
    by_rows = torch.zeros(rows.shape, device=rows.device)  # and a thread of autograd enters the device here
    by_weight = torch.empty_like(weight, dtype=kind) if wanted[1] else None
    slopes = rows.new_empty(anchors, run)
    scores = operands.scores()
    with full_precision(rows):
        for start in range(0, classes, run):
            size = min(run, classes - start)
            grid = (operands.tiles_down * -(-size // W),)
            sizes = anchors, classes, dim, start, slopes.stride(0)
            _slopes[grid](*scores, level, pull, slopes, *sizes, **operands.tile)
            part = slopes[:, :size]
            if wanted[0]:
                by_rows += _product(part, weight[start : start + size])
            if by_weight is not None:
                made = _product(part.T, rows), weight, operands.inverse, by_weight, classes, dim, start
                _finish[(-(-size // ROWS),)](*made, PROJECT=normalize, R=ROWS, D=_across(dim))
    if by_weight is not None:
        own = ids.clamp(max=classes - 1)
        # Anchors of one class all write the sum of their gradients: the same, whichever comes last.
        together = (own[:, None] == own).float() @ torch.where((ids < classes)[:, None], by_own, 0.0)
        by_weight[own] = (by_weight[own] + together).to(kind)
    return by_rows / operands.factor[:, None] if wanted[0] else None, by_weight


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a b in float32, of bfloat16 factors without widening them where torch can."""
    if a.is_cuda and a.dtype == torch.bfloat16 and hasattr(torch.ops.aten.mm, "dtype"):
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _across(dim: int) -> int:
    return min(512, max(16, triton.next_power_of_2(dim)))
