# mypy: ignore-errors
"""The kernels of `class_softmax_ops`, and how large their tiles are. Imported when the first of them is launched.

Scores are factor_i · inverse_c · <x_i, w_c>: rows are multiplied as they are stored and scaled afterwards, so that a
bfloat16 weight is never rounded again and no copy of the weights is made. `scan` is a matrix product whose tiles are
reduced to a peak and a sum; `parts` is the same product again, whose tiles become the derivative by the scores, for a
run of classes. Two further products make the gradients: one by cuBLAS, one here or by cuBLAS (`gradient`, `finish`).
"""

import functools
from typing import NamedTuple

import torch

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError as error:
    raise ImportError('impl="triton" needs triton 3.4 or newer: pip install triton') from error

from nearkin import kernels
from nearkin.kernels.launch import DESCRIPTORS, CachedLauncher

DESCRIPTORS.add(TensorDescriptor)


class Tile(NamedTuple):
    """A tile of a product: its height and width, the depth of a step, warps per program, steps in flight.

    Height × width are anchors × class weights in SCAN, class weights × anchors in PARTS and × coordinates in GRADIENT.
    `copies`: whether the bulk copy engine brings the operands, where it can.
    """

    height: int
    width: int
    depth: int
    warps: int
    stages: int
    copies: bool = True
    registers: int | None = None  # at most per thread, so that more programs share a multiprocessor


# By the bytes of a number in a product. Those of 2 bytes are the fastest on an H200 at C = 1,000,000, B = 1,024 and
# D = 512, those of 4 and 8 bytes are chosen by the compiler's report for Hopper: `benchmarks/class_softmax.py --tune`
# tries CANDIDATES on a GPU and prints lines for these tables; its `--compile` needs none.
SCAN = {2: Tile(128, 128, 64, 4, 3), 4: Tile(64, 128, 32, 4, 3), 8: Tile(64, 128, 32, 8, 3)}
PARTS = {2: Tile(128, 128, 64, 4, 3), 4: Tile(64, 128, 32, 4, 3), 8: Tile(64, 128, 32, 8, 3)}
GRADIENT = {2: Tile(128, 128, 64, 4, 3)}
PLAIN = Tile(64, 128, 16, 8, 3, copies=False)  # float32 without matrix units: larger ones, or bulk copies, spill
FINISH = Tile(32, 256, 0, 4, 1)
INTERPRETED = Tile(16, 32, 16, 4, 1)  # small, so that small tests have several tiles and ragged ends
CANDIDATES = [
    Tile(128, 128, 64, 4, 3),
    Tile(128, 128, 64, 4, 2),
    Tile(128, 128, 128, 4, 2),
    Tile(128, 128, 64, 8, 3, registers=128),
    Tile(128, 64, 64, 4, 3),
    Tile(128, 256, 64, 8, 3),
    Tile(256, 128, 64, 8, 3),
    Tile(256, 128, 64, 8, 4),
]
GROUP = 16  # tiles of anchors that share class weights in the cache before the next ones
NORM_CLASSES = 32
BOUND = 80.0  # e^80 · 2^31 fits into float32, as does e^-80
INTERPRETS = kernels.interpreted()  # triton reads it at import, too
TINY = torch.finfo(torch.float32).tiny * 1e6  # shorter rows have no direction, as in `distances.unit`


class Operands(NamedTuple):
    """Arguments of every pass over the scores: rows (B, D), factor (B,), weight (C·K, D), inverse (C·K,), ids (B,)."""

    rows: torch.Tensor
    factor: torch.Tensor
    weight: torch.Tensor
    inverse: torch.Tensor
    ids: torch.Tensor  # the own class, which is left out; below 0 all of the anchor is
    centers: int = 1
    lost: float = 0.0  # the score of a class weight without a direction
    columns: bool = False  # whether sums are over anchors per class, instead of over classes per anchor
    precision: str = "ieee"
    two: bool = False  # whether the factors include log2 e: peaks and sums are then those of powers of 2
    bounded: bool = False  # whether no score exceeds BOUND in size, so that their powers need no peak


@triton.jit
def _lengths(weight, out, num_weights, dim, TINY: tl.constexpr, EVEN: tl.constexpr, C: tl.constexpr, D: tl.constexpr):
    columns = tl.program_id(0).to(tl.int64) * C + tl.arange(0, C)
    squared = tl.zeros((C,), tl.float64)
    for d in range(0, dim, D):
        axis = d + tl.arange(0, D)
        mask = (columns < num_weights)[:, None]
        if not EVEN:
            mask = mask & (axis < dim)[None, :]
        w = tl.load(weight + columns[:, None] * dim + axis[None, :], mask=mask, other=0.0).to(tl.float32)
        # Sums of eight squares in float32, which a thread has side by side; only these are widened.
        squared += tl.sum(tl.sum(tl.reshape(w * w, (C, D // 8, 8)), 2).to(tl.float64), 1)
    if tl.max(tl.where((squared > 1e-25) & (squared < 1e35), 0, 1)) > 0:  # squares that float32 may not hold
        squared = tl.zeros((C,), tl.float64)
        for d in range(0, dim, D):
            axis = d + tl.arange(0, D)
            mask = (columns < num_weights)[:, None] & (axis < dim)[None, :]
            w = tl.load(weight + columns[:, None] * dim + axis[None, :], mask=mask, other=0.0).to(tl.float32)
            squared += tl.sum(w.to(tl.float64) * w.to(tl.float64), 1)
    has_direction = squared > TINY * TINY
    length = tl.sqrt(tl.where(has_direction, squared, 1.0))
    inverse = tl.where(has_direction, 1.0 / length, 0.0) + squared * 0.0  # NaN where the row is not finite
    tl.store(out + columns, inverse.to(tl.float32), mask=columns < num_weights)


@triton.jit
def _power(x, TWO: tl.constexpr):
    return tl.exp2(x) if TWO else tl.exp(x)


@triton.jit
def _place(tiles_down, tiles_across, GROUP: tl.constexpr):
    """Row and column of this program's tile, so that programs that run together share operands in the cache."""
    pid = tl.program_id(0)
    first = pid // (GROUP * tiles_across) * GROUP
    height = tl.minimum(tiles_down - first, GROUP)
    inside = pid % (GROUP * tiles_across)
    return first + inside % height, inside // height


@triton.jit
def _products(
    left, right, i0, j0, lefts, rights, dim, DOT: tl.constexpr, PRECISION: tl.constexpr, COPIES: tl.constexpr,
    EVEN: tl.constexpr, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """Inner products of the rows of two matrices, a tile (H, W); beyond the last rows the values are undefined."""
    SUM: tl.constexpr = DOT if DOT.primitive_bitwidth == 64 else tl.float32
    acc = tl.zeros((H, W), SUM)
    if COPIES:
        for k in range(0, dim, D):
            x = left.load([i0, k])
            y = right.load([j0, k])
            acc = tl.dot(x.to(DOT), tl.trans(y.to(DOT)), acc, input_precision=PRECISION, out_dtype=SUM)
    else:
        axis = tl.arange(0, D)
        # Only the start of a tile needs 64 bits. Rows beyond the end repeat the last one, which needs no mask.
        across = tl.minimum(tl.arange(0, H), lefts - 1 - i0)
        down = tl.minimum(tl.arange(0, W), rights - 1 - j0)
        a = left + i0.to(tl.int64) * dim + across[:, None] * dim + axis[None, :]
        b = right + j0.to(tl.int64) * dim + down[:, None] * dim + axis[None, :]
        for k in range(0, dim, D):
            if EVEN:
                x = tl.load(a)
                y = tl.load(b)
            else:
                x = tl.load(a, mask=(axis < dim - k)[None, :], other=0.0)
                y = tl.load(b, mask=(axis < dim - k)[None, :], other=0.0)
            acc = tl.dot(x.to(DOT), tl.trans(y.to(DOT)), acc, input_precision=PRECISION, out_dtype=SUM)
            a += D
            b += D
    return acc.to(tl.float32)


@triton.jit
def _scan(
    rows, factor, weight, inverse, ids, peaks, sums, lost, anchors, num_weights, dim, part_size, LOST: tl.constexpr,
    TWO: tl.constexpr, BOUNDED: tl.constexpr, CENTERS: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    COPIES: tl.constexpr, EVEN: tl.constexpr, GROUP: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    D: tl.constexpr):  # fmt: skip
    """Peak and sum of e^{score - peak} per anchor over `part_size` weights; the peak is 0 for BOUNDED scores."""
    row, part = _place(tl.cdiv(anchors, H), tl.cdiv(num_weights, part_size), GROUP)
    i0 = row * H
    i = i0 + tl.arange(0, H)
    own = tl.load(ids + i, mask=i < anchors, other=-1).to(tl.int32) * CENTERS  # its first centre
    scale = tl.load(factor + i, mask=i < anchors, other=0.0)
    peak = tl.full((H,), float("-inf"), tl.float32)
    total = tl.zeros((H,), tl.float32)
    first = part * part_size
    for step in range(0, tl.minimum(part_size, num_weights - first), W):
        c0 = first + step
        c = c0 + tl.arange(0, W)
        b = tl.load(inverse + c, mask=c < num_weights, other=0.0)
        score = _products(rows, weight, i0, c0, anchors, num_weights, dim, DOT, PRECISION, COPIES, EVEN, H, W, D)
        absent = tl.where(c < num_weights, 0.0, float("-inf"))
        if LOST:
            absent += tl.where(b == 0, lost, 0.0)
        score = score * b[None, :] * scale[:, None] + absent[None, :]  # the weight first: it may be long
        if CENTERS > 1:
            best = tl.argmax(tl.reshape(score, (H, W // CENTERS, CENTERS)), 2)
            hit = best[:, :, None] == tl.arange(0, CENTERS)[None, None, :]
            score = tl.where(tl.reshape(hit, (H, W)), score, float("-inf"))
        if tl.max(tl.where((own > c0 - CENTERS) & (own < c0 + W), 1, 0)) > 0:  # few tiles contain an anchor's own class
            score = tl.where((c // CENTERS * CENTERS)[None, :] == own[:, None], float("-inf"), score)
        if BOUNDED:
            total += tl.sum(_power(score, TWO), 1)
        else:
            top = tl.maximum(peak, tl.max(score, 1))
            level = tl.where(top == float("-inf"), 0.0, top)
            total = total * _power(peak - level, TWO) + tl.sum(_power(score - level[:, None], TWO), 1)
            peak = top
        if CENTERS > 1:
            total += tl.sum(b * 0.0)  # a centre that is not finite may not have been the best
    out = part.to(tl.int64) * anchors + i
    tl.store(peaks + out, tl.zeros((H,), tl.float32) if BOUNDED else peak, mask=i < anchors)
    tl.store(sums + out, total, mask=i < anchors)


@triton.jit
def _scan_columns(
    rows, factor, weight, inverse, ids, peaks, sums, anchors, num_weights, dim, TWO: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr, COPIES: tl.constexpr, EVEN: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    D: tl.constexpr):  # fmt: skip
    """Peak and sum of e^{score - peak} per class over all anchors. Class weights are the rows of the tile, so that
    sums over anchors stay within a thread."""
    c0 = tl.program_id(0) * H
    c = c0 + tl.arange(0, H)
    b = tl.load(inverse + c, mask=c < num_weights, other=0.0)
    peak = tl.full((H,), float("-inf"), tl.float32)
    total = tl.zeros((H,), tl.float32)
    for step in range(0, anchors, W):
        i0 = tl.minimum(step, anchors)  # the interpreter counts in Python: this is a tensor
        i = i0 + tl.arange(0, W)
        own = tl.load(ids + i, mask=i < anchors, other=-1).to(tl.int32)
        scale = tl.load(factor + i, mask=i < anchors, other=0.0)
        score = _products(weight, rows, c0, i0, num_weights, anchors, dim, DOT, PRECISION, COPIES, EVEN, H, W, D)
        absent = tl.where(own < 0, float("-inf"), 0.0)
        score = score * b[:, None] * scale[None, :] + absent[None, :]
        if tl.max(tl.where((own >= c0) & (own < c0 + H), 1, 0)) > 0:  # few tiles contain an anchor's own class
            score = tl.where(c[:, None] == own[None, :], float("-inf"), score)
        top = tl.maximum(peak, tl.max(score, 1))
        level = tl.where(top == float("-inf"), 0.0, top)
        total = total * _power(peak - level, TWO) + tl.sum(_power(score - level[:, None], TWO), 1)
        peak = top
    tl.store(peaks + c, peak, mask=c < num_weights)
    tl.store(sums + c, total, mask=c < num_weights)


@triton.jit
def _derive(
    products, b, c, c0, row, i0, factor, ids, level, pull, picks, push, gain, out, stride, anchors, num_weights,
    OWN: tl.constexpr, TWO: tl.constexpr, COLUMNS: tl.constexpr, CENTERS: tl.constexpr, COPIES: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr):  # fmt: skip
    """Stores the derivatives of a tile (class weights, anchors) of products; their part along each weight, (H,)."""
    i = i0 + tl.arange(0, W)
    mask_i = i < anchors
    products = products * b[:, None]
    own = tl.load(ids + i, mask=mask_i, other=-1).to(tl.int32) * CENTERS
    scale = tl.load(factor + i, mask=mask_i, other=0.0)
    if COLUMNS:
        peak = tl.load(level + c, mask=c < num_weights, other=0.0)
        share = tl.load(pull + c, mask=c < num_weights, other=0.0) * gain * b
        part = _power(products * scale[None, :] - peak[:, None], TWO) * share[:, None] * scale[None, :]
        part = tl.where((own < 0)[None, :], 0.0, part)
    else:
        peak = tl.load(level + i, mask=mask_i, other=0.0)
        share = tl.load(pull + i, mask=mask_i, other=0.0) * gain
        if not OWN:
            share *= scale
        part = _power(products * scale[None, :] - peak[None, :], TWO) * share[None, :] * b[:, None]
    if CENTERS > 1:
        best = tl.argmax(tl.reshape(products * scale[None, :], (H // CENTERS, CENTERS, W)), 1)
        hit = best[:, None, :] == tl.arange(0, CENTERS)[None, :, None]
        part = tl.where(tl.reshape(hit, (H, W)), part, 0.0)
    if tl.max(tl.where((own > c0 - CENTERS) & (own < c0 + H), 1, 0)) > 0:  # few tiles contain an anchor's own class
        part = tl.where((c // CENTERS * CENTERS)[:, None] == own[None, :], 0.0, part)
        if OWN:
            picked = tl.load(picks + i, mask=mask_i, other=-1)
            drawn = tl.load(push + i, mask=mask_i, other=0.0) * gain
            part = tl.where(c[:, None] == picked[None, :], drawn[None, :] * b[:, None], part)
    if COPIES:
        part = part.to(out.dtype)
        out.store([row * H, i0], part)
    else:
        part = part.to(out.dtype.element_ty)
        at = (row * H).to(tl.int64) * stride + tl.arange(0, H)[:, None] * stride + i[None, :]
        tl.store(out + at, part, mask=mask_i[None, :])
    # From the stored values, so that what rounding removed has no part along the weight either.
    return tl.sum(part.to(tl.float32) * products, 1)


@triton.jit
def _parts(
    rows, factor, weight, inverse, ids, level, pull, picks, push, gain, upstream, out, along, anchors, num_weights, dim,
    start, run_size, stride, OWN: tl.constexpr, HALVES: tl.constexpr, TWO: tl.constexpr, COLUMNS: tl.constexpr,
    CENTERS: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, COPIES: tl.constexpr, EVEN: tl.constexpr,
    GROUP: tl.constexpr, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """The derivative by each score of a run of classes, times factor_i · inverse_c; its part along each class weight.

    Class weights are the rows of the tile: sums over anchors then stay within a thread. OWN: `pull` and `push` include
    the factor, are multiplied by `gain` and `upstream`, and the own class receives `push`.
    """
    column, row = _place(tl.cdiv(anchors, W), tl.cdiv(tl.minimum(num_weights - start, run_size), H), GROUP)
    i0 = column * W
    c0 = start + row * H
    scale_up = 1.0
    if OWN:
        scale_up = tl.load(gain) * tl.load(upstream)
    products = _products(weight, rows, c0, i0, num_weights, anchors, dim, DOT, PRECISION, COPIES, EVEN, H, W, D)
    c = c0 + tl.arange(0, H)
    b = tl.load(inverse + c, mask=c < num_weights, other=0.0)
    if HALVES:  # one half after the other, to save registers
        first, second = tl.split(tl.permute(tl.reshape(products, (H, 2, W // 2)), (0, 2, 1)))
        along_weight = _derive(
            first, b, c, c0, row, i0, factor, ids, level, pull, picks, push, scale_up, out, stride, anchors,
            num_weights, OWN, TWO, COLUMNS, CENTERS, COPIES, H, W // 2)  # fmt: skip
        along_weight += _derive(
            second, b, c, c0, row, i0 + W // 2, factor, ids, level, pull, picks, push, scale_up, out, stride, anchors,
            num_weights, OWN, TWO, COLUMNS, CENTERS, COPIES, H, W // 2)  # fmt: skip
    else:
        along_weight = _derive(
            products, b, c, c0, row, i0, factor, ids, level, pull, picks, push, scale_up, out, stride, anchors,
            num_weights, OWN, TWO, COLUMNS, CENTERS, COPIES, H, W)  # fmt: skip
    tl.store(along + column * run_size + row * H + tl.arange(0, H), along_weight)


@triton.jit
def _write(
    gradient, weight, inverse, along, picks, order, bounds, by_own, by_weight, num_weights, dim, start, run_size,
    column, c0, d0, heights, OWN: tl.constexpr, PROJECT: tl.constexpr, COPIES: tl.constexpr, H: tl.constexpr,
    W: tl.constexpr):  # fmt: skip
    """The last step of a tile of the gradient: removes the part along the weights, adds that of the own classes."""
    c = c0 + tl.arange(0, H)
    d = d0 + tl.arange(0, W)
    inside = (c < num_weights)[:, None] & (d < dim)[None, :]
    at = c0.to(tl.int64) * dim + tl.arange(0, H)[:, None] * dim + d[None, :]
    if PROJECT:
        if COPIES:
            w = weight.load([c0, d0]).to(tl.float32)
        else:
            w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
        along_weight = tl.zeros((H,), tl.float32)
        for r in range(0, heights):
            along_weight += tl.load(
                along + r * run_size + (c0 - start) + tl.arange(0, H), mask=c < num_weights, other=0.0
            )
        # The weight first: `along_weight` includes one inverse length, and the square of a large one overflows float32.
        direction = w * tl.load(inverse + c, mask=c < num_weights, other=0.0)[:, None]
        gradient -= along_weight[:, None] * direction
    if OWN:
        for j in range(tl.load(bounds + column), tl.load(bounds + column + 1)):  # its anchors, in a fixed order
            anchor = tl.load(order + j)
            pick = tl.load(picks + anchor)
            pulled = tl.load(by_own + anchor * dim + d, mask=d < dim, other=0.0)
            gradient += tl.where((c == pick)[:, None], pulled[None, :], 0.0)
    if COPIES:
        by_weight.store([c0, d0], gradient.to(by_weight.dtype))
    else:
        tl.store(by_weight + at, gradient.to(by_weight.dtype.element_ty), mask=inside)


@triton.jit
def _gradient(
    parts, rows, weight, inverse, along, picks, order, bounds, by_own, by_weight, anchors, num_weights, dim, start,
    run_size, stride, heights, OWN: tl.constexpr, PROJECT: tl.constexpr, DOT: tl.constexpr, COPIES: tl.constexpr,
    EVEN: tl.constexpr, H: tl.constexpr, W: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """A tile (class weights, coordinates) of parts · rows, finished."""
    tiles_across = tl.cdiv(dim, W)
    column = tl.program_id(0) // tiles_across
    d0 = tl.program_id(0) % tiles_across * W
    d = d0 + tl.arange(0, W)
    acc = tl.zeros((H, W), tl.float32)
    if COPIES:
        for k in range(0, anchors, D):
            p = parts.load([column * H, k])
            x = rows.load([k, d0])
            acc = tl.dot(p.to(DOT), x.to(DOT), acc)
    else:
        axis = tl.arange(0, D)
        a = parts + (column * H).to(tl.int64) * stride + tl.arange(0, H)[:, None] * stride + axis[None, :]
        b = rows + axis[:, None] * dim + tl.minimum(d, dim - 1)[None, :]
        for k in range(0, anchors, D):
            if EVEN:
                p = tl.load(a)
                x = tl.load(b)
            else:
                p = tl.load(a, mask=(axis < anchors - k)[None, :], other=0.0)
                x = tl.load(b, mask=(axis < anchors - k)[:, None], other=0.0)
            acc = tl.dot(p.to(DOT), x.to(DOT), acc)
            a += D
            b += D * dim
    c0 = start + column * H
    column = c0 // H
    _write(
        acc, weight, inverse, along, picks, order, bounds, by_own, by_weight, num_weights, dim, start, run_size, column,
        c0, d0, heights, OWN, PROJECT, COPIES, H, W)  # fmt: skip


@triton.jit
def _finish(
    product, weight, inverse, along, picks, order, bounds, by_own, by_weight, num_weights, dim, start, run_size,
    heights, OWN: tl.constexpr, PROJECT: tl.constexpr, COPIES: tl.constexpr, H: tl.constexpr,
    W: tl.constexpr):  # fmt: skip
    """The same from a product (class weights of the run, D) that was computed elsewhere."""
    tiles_across = tl.cdiv(dim, W)
    column = tl.program_id(0) // tiles_across
    d0 = tl.program_id(0) % tiles_across * W
    d = d0 + tl.arange(0, W)
    c0 = start + column * H
    at = (column.to(tl.int64) * H + tl.arange(0, H))[:, None] * dim + d[None, :]
    inside = (c0 + tl.arange(0, H) < num_weights)[:, None] & (d < dim)[None, :]
    gradient = tl.load(product + at, mask=inside, other=0.0)
    column = c0 // H
    _write(
        gradient, weight, inverse, along, picks, order, bounds, by_own, by_weight, num_weights, dim, start, run_size,
        column, c0, d0, heights, OWN, PROJECT, COPIES, H, W)  # fmt: skip


def _blocks(num_weights, size):
    """⌈number / size⌉; triton's own takes a hundred times as long on the host."""
    return -(-num_weights // size)


def inverse_lengths(weight, normalize):
    """1 / |w_c| (C,), 0 for a row too short to have a direction; all 1 if not `normalize`; and 0 or NaN for all."""
    inverse = lengths(weight)
    return (inverse if normalize else torch.ones_like(inverse)), (inverse * 0).sum()


def lengths(weight):
    """1 / |w_c| (C,), 0 for a row too short to have a direction, NaN for one that is not finite."""
    num_weights, dim = weight.shape
    inverse = torch.empty(num_weights, device=weight.device, dtype=torch.float32)
    pad = max(16, min(1 << (dim - 1).bit_length(), 256))  # what a warp loads of a row at once, 16 bytes per thread
    sizes = {"TINY": TINY, "EVEN": dim % pad == 0, "C": NORM_CLASSES, "D": pad}
    arguments = (weight, inverse, num_weights, dim)
    start_kernel(_lengths, _blocks(num_weights, NORM_CLASSES), arguments, sizes | _options())
    return inverse


def scan(operands, part_size, tile=None):
    """Peaks and sums: (S, B) of S parts of `part_size` class weights, or, by columns, (1, C)."""
    (anchors, dim), num_weights = operands.rows.shape, operands.weight.shape[0]
    tile = tile or chosen(PARTS if operands.columns else SCAN, operands)
    sources, constants = _sources_and_constants(operands, tile, upright=operands.columns)
    part_size = _blocks(min(part_size, num_weights), tile.width) * tile.width
    shape = (1, num_weights) if operands.columns else (_blocks(num_weights, part_size), anchors)
    peaks = torch.empty(shape, device=operands.rows.device, dtype=torch.float32)
    sums = torch.empty_like(peaks)
    arguments = (*sources, operands.ids, peaks, sums)
    if operands.columns:
        for name in ("COLUMNS", "CENTERS", "GROUP"):
            del constants[name]
        start_kernel(
            _scan_columns, _blocks(num_weights, tile.height), (*arguments, anchors, num_weights, dim), constants
        )
        return peaks, sums
    del constants["COLUMNS"]
    constants |= {"LOST": operands.lost != 0, "BOUNDED": operands.bounded}
    sizes = (float(operands.lost), anchors, num_weights, dim, part_size)
    start_kernel(_scan, _blocks(anchors, tile.height) * shape[0], (*arguments, *sizes), constants)
    return peaks, sums


class Own(NamedTuple):
    """The own classes in `parts`: the row that represents each anchor's, and the derivative by its score times the
    factor; `gain` and `upstream`: scalars that multiply all derivatives."""

    picks: torch.Tensor
    push: torch.Tensor
    gain: torch.Tensor
    upstream: torch.Tensor


def parts(operands, level, pull, begin, out, along, own=None, tile=None, descriptors=None):
    """Fills `out` (run, B) and `along` (anchor tiles, run) for the run of classes from `begin` on.

    descriptors: a dict that caches tensor descriptors from one run to the next.
    """
    (anchors, dim), num_weights, run_size = operands.rows.shape, operands.weight.shape[0], out.shape[0]
    tile = tile or chosen(PARTS, operands)
    sources, constants = _sources_and_constants(operands, tile, True, descriptors)
    split = tile.width > 64
    filled = (
        _described(out, tile.height, tile.width // 2 if split else tile.width, descriptors)
        if constants["COPIES"]
        else out
    )
    programs = _blocks(anchors, tile.width) * _blocks(min(num_weights - begin, run_size), tile.height)
    arguments = (level, pull, *(own or (pull, pull, pull, pull)))
    sizes = (filled, along, anchors, num_weights, dim, begin, run_size, out.stride(0))
    constants |= {"OWN": own is not None, "HALVES": split}
    start_kernel(_parts, programs, (*sources, operands.ids, *arguments, *sizes), constants)
    if INTERPRETS and halves(operands.rows, operands.weight):
        out.copy_(out.bfloat16())  # the interpreter truncates to bfloat16


class Ends(NamedTuple):
    """The own classes in the gradient of a run: anchors sorted by the row that represents them, and their gradients."""

    picks: torch.Tensor
    order: torch.Tensor
    bounds: torch.Tensor
    by_own: torch.Tensor


def ends(picks, by_own, num_weights, tile):
    """`bounds`: where in the order the anchors of each tile of classes begin."""
    if by_own is None:
        return None
    rows, order = picks.sort(stable=True)
    starts = torch.arange(0, num_weights + tile.height, tile.height, device=picks.device)
    return Ends(picks, order, torch.searchsorted(rows, starts), by_own.contiguous())


def gradient(operands, derivatives, along, end, by_weight, begin, project, tile=None, descriptors=None):
    """Fills the run from `begin` of `by_weight`, each entry once and rounded once: derivatives · rows, finished."""
    rows = operands.rows
    (anchors, dim), num_weights, run_size = rows.shape, operands.weight.shape[0], derivatives.shape[0]
    tile = tile or chosen(GRADIENT, operands)
    out = _rounded_later(by_weight)
    weight, filled = operands.weight, out
    copies = tile.copies and all(map(_copied, (derivatives, rows, weight, out)))
    sources = derivatives, rows
    if copies:
        sources = (
            _described(derivatives, tile.height, tile.depth, descriptors),
            _described(rows, tile.depth, tile.width, descriptors),
        )
        weight, filled = (_described(each, tile.height, tile.width, descriptors) for each in (weight, out))
    run = min(num_weights - begin, run_size)
    even = anchors % tile.depth == 0
    constants = {"H": tile.height, "W": tile.width, "D": tile.depth, "COPIES": copies, "EVEN": even, "DOT": _dot(rows)}
    constants |= {"OWN": end is not None, "PROJECT": project} | _launch(tile)
    ends = end or Ends(along, along, along, along)
    sizes = (anchors, num_weights, dim, begin, run_size, derivatives.stride(0), along.shape[0])
    arguments = (*sources, weight, operands.inverse, along, *ends, filled, *sizes)
    start_kernel(_gradient, _blocks(run, tile.height) * _blocks(dim, tile.width), arguments, constants)
    _round(out, by_weight, begin, run)


def finish(operands, product, along, end, by_weight, begin, project):
    """The same where the product (run, D) was computed elsewhere, in float32."""
    num_weights, dim = operands.weight.shape
    tile = finishing()
    run = product.shape[0]
    out = _rounded_later(by_weight)
    constants = {"OWN": end is not None, "PROJECT": project, "COPIES": False, "H": tile.height, "W": tile.width}
    ends = end or Ends(along, along, along, along)
    sizes = (num_weights, dim, begin, along.shape[1], along.shape[0])
    arguments = (product, operands.weight, operands.inverse, along, *ends, out, *sizes)
    start_kernel(_finish, _blocks(run, tile.height) * _blocks(dim, tile.width), arguments, constants | _launch(tile))
    _round(out, by_weight, begin, run)


def start_kernel(kernel, programs, arguments, constants):
    """Launches a kernel. constants: those of the kernel and the compiler's options."""
    _launcher(kernel, tuple(constants.items()))((programs, 1, 1), *arguments)


@functools.cache
def _launcher(kernel, constants):
    return CachedLauncher(kernel, **dict(constants))


def chosen(table, operands):
    if INTERPRETS:
        return INTERPRETED
    if halves(operands.rows, operands.weight):
        tile = table[2]
    elif exact(operands):
        tile = table[8]
    else:
        tile = PLAIN if operands.precision == "ieee" else table[4]
    if operands.rows.shape[0] > 64:
        return tile
    if table is SCAN:
        return tile._replace(height=64, warps=4) if tile.height > 64 else tile
    return tile._replace(width=64) if table is PARTS else tile


def finishing():
    return INTERPRETED if INTERPRETS else FINISH


def halves(rows, weight):
    """Whether the products are of bfloat16."""
    return rows.dtype == weight.dtype == torch.bfloat16


def exact(operands):
    """Whether float32 numbers are multiplied as float64: on the matrix units that have it, for no more time.

    Not for weights of two bytes, which triton 3.6 cannot lay out for these units (compilation fails).
    """
    return (
        operands.precision == "ieee"
        and operands.weight.dtype == torch.float32
        and kernels.has_float64_units(operands.rows)
    )


def _sources_and_constants(operands, tile, upright=False, descriptors=None):
    """Rows, factors, weights and inverse lengths as the kernel takes them, and its constants."""
    dim = operands.rows.shape[1]
    copies = tile.copies and _copied(operands.rows) and _copied(operands.weight)
    rows, weight = operands.rows, operands.weight
    if copies:
        across, down = (tile.width, tile.height) if upright else (tile.height, tile.width)
        rows, weight = (
            _described(rows, across, tile.depth, descriptors),
            _described(weight, down, tile.depth, descriptors),
        )
    dot = (
        _dot(operands.rows) if halves(operands.rows, operands.weight) else tl.float64 if exact(operands) else tl.float32
    )
    constants = {"COLUMNS": operands.columns, "CENTERS": operands.centers, "DOT": dot, "PRECISION": operands.precision}
    constants |= {"COPIES": copies, "EVEN": dim % tile.depth == 0, "GROUP": GROUP, "TWO": operands.two}
    constants |= {"H": tile.height, "W": tile.width, "D": tile.depth}
    return (rows, operands.factor, weight, operands.inverse), constants | _launch(tile)


def _copied(tensor):
    """Whether the copy engine can read it: rows and their beginning at multiples of 16 bytes."""
    return tensor.data_ptr() % 16 == 0 and tensor.stride(0) * tensor.element_size() % 16 == 0


def _described(tensor, rows, columns, descriptors=None):
    """The descriptor for the copy engine; it refers to the tensor, so the id stays unique while it is cached."""
    name = id(tensor), rows, columns
    descriptor = None if descriptors is None else descriptors.get(name)
    if descriptor is None:
        descriptor = TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [rows, columns])
        if descriptors is not None:
            descriptors[name] = descriptor
    return descriptor


def _dot(rows):
    # The interpreter stores bfloat16 as integers and cannot multiply them; their products are exact in float32.
    return tl.bfloat16 if rows.dtype == torch.bfloat16 and not INTERPRETS else tl.float32


def _launch(tile):
    bound = {} if tile.registers is None else {"maxnreg": tile.registers}
    return {"num_warps": tile.warps, "num_stages": tile.stages} | bound | _options()


def _options():
    return {} if INTERPRETS else {"enable_fp_fusion": True}  # explicit, since the default changes


def _rounded_later(by_weight):
    """The interpreter truncates to bfloat16: there the kernel writes float32."""
    return by_weight.float() if INTERPRETS else by_weight


def _round(out, by_weight, start, run):
    if out is not by_weight:
        by_weight[start : start + run] = out[start : start + run]
