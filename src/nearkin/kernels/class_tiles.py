# mypy: ignore-errors
"""The kernels of `kernels.class_softmax`, and how large their tiles are. Imported when the first of them is wanted.

Scores are factor_i · inverse_c · <x_i, w_c>: rows are multiplied as they are stored and scaled afterwards, so that a
bfloat16 weight is never rounded again and no copy of the weights is made. The forward kernel is attention in which the
class weights are both keys and values; its output, the mean class weight, is the gradient by the anchors.
"""

from typing import NamedTuple

import torch

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError('impl="triton" needs triton: pip install triton') from error

from nearkin import kernels


class Tile(NamedTuple):
    """Anchors and classes a step of a kernel works on, warps a program, steps in flight."""

    anchors: int
    classes: int
    warps: int
    stages: int


# By the bytes of a number in a product and the most coordinates of a padded row. Chosen by what the compiler says of
# Hopper (registers spilt, and 227 KB of shared memory at most), not yet by time: `benchmarks/class_softmax.py --tune`
# tries CANDIDATES on a GPU and prints lines for these tables; its `--compile` needs none.
FORWARD = {
    (2, 512): Tile(64, 64, 8, 2),
    (2, 256): Tile(64, 64, 8, 2),
    (2, 128): Tile(128, 64, 8, 3),
    (2, 64): Tile(128, 128, 8, 3),
    (4, 256): Tile(64, 32, 8, 2),
    (4, 128): Tile(64, 32, 8, 2),
    (4, 64): Tile(64, 64, 4, 2),
}
BACKWARD = {
    (2, 512): Tile(64, 64, 8, 2),
    (2, 256): Tile(64, 64, 8, 2),
    (2, 128): Tile(64, 128, 8, 3),
    (2, 64): Tile(128, 128, 8, 3),
    (4, 256): Tile(32, 64, 8, 2),
    (4, 128): Tile(32, 64, 8, 2),
    (4, 64): Tile(64, 64, 4, 2),
}
CANDIDATES = [
    Tile(anchors, classes, warps, stages)
    for anchors, classes in ((32, 32), (32, 64), (64, 32), (64, 64), (64, 128), (128, 64), (128, 128))
    for warps in (4, 8)
    for stages in (1, 2, 3, 4)
]
INTERPRETED = Tile(16, 32, 4, 1)  # small, so that small tests have several tiles and ragged ends
NORM_CLASSES = 32


def tile(table, item: int, dim: int) -> Tile:
    if kernels.interpreted():
        return INTERPRETED
    fitting = [size for (bytes_each, size) in table if bytes_each == item and size >= dim]
    return table[item, min(fitting)]


@triton.jit
def _lengths(weight, out, number, dim, TINY: tl.constexpr, C: tl.constexpr, D: tl.constexpr):
    columns = tl.program_id(0).to(tl.int64) * C + tl.arange(0, C)
    squared = tl.zeros((C,), tl.float64)
    for d in range(0, dim, D):
        axis = d + tl.arange(0, D)
        mask = (columns < number)[:, None] & (axis < dim)[None, :]
        w = tl.load(weight + columns[:, None] * dim + axis[None, :], mask=mask, other=0.0).to(tl.float32)
        squared += tl.sum(w.to(tl.float64) * w.to(tl.float64), 1)
    alive = squared > TINY * TINY
    length = tl.sqrt(tl.where(alive, squared, 1.0))
    inverse = tl.where(alive, 1.0 / length, 0.0) + squared * 0.0  # NaN where the row is not finite
    tl.store(out + columns, inverse.to(tl.float32), mask=columns < number)


@triton.jit
def _product(a, b, acc, DOT: tl.constexpr, TERMS: tl.constexpr, PRECISION: tl.constexpr):
    """acc + a b, a of float32: rounded to as many bfloat16 terms as are wanted where the products are of bfloat16."""
    if TERMS == 0:
        acc = tl.dot(a, b.to(tl.float32), acc, input_precision=PRECISION)
    else:
        high = a.to(tl.bfloat16)
        acc = tl.dot(high.to(DOT), b.to(DOT), acc)
        if TERMS == 2:
            low = (a - high.to(tl.float32)).to(tl.bfloat16)
            acc = tl.dot(low.to(DOT), b.to(DOT), acc)
    return acc


@triton.jit
def _forward(
    rows,
    factor,
    weight,
    inverse,
    ids,
    peaks,
    sums,
    means,
    anchors,
    number,
    dim,
    a_part,
    MEAN: tl.constexpr,
    DOT: tl.constexpr,
    TERMS: tl.constexpr,
    PRECISION: tl.constexpr,
    B: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Anchors B·pid0…, classes a_part·pid1…: their peak and sum, and the sum of class weights for chunk pid2."""
    part = tl.program_id(1)
    chunk = tl.program_id(2)
    i = tl.program_id(0) * B + tl.arange(0, B)
    there = i < anchors
    rows += tl.program_id(0).to(tl.int64) * B * dim  # only where a tile starts takes 64 bits
    across = tl.arange(0, B)[:, None] * dim
    down = tl.arange(0, C)[:, None] * dim
    own = tl.load(ids + i, mask=there, other=-1)
    scale = tl.load(factor + i, mask=there, other=0.0)
    axis = tl.arange(0, D)
    if CHUNKS == 1:
        x = tl.load(rows + across + axis[None, :], mask=there[:, None] & (axis < dim)[None, :], other=0.0)
        x = x.to(DOT)
    peak = tl.full((B,), float("-inf"), tl.float32)
    total = tl.zeros((B,), tl.float32)
    mean = tl.zeros((B, D), tl.float32)
    first = part * a_part
    last = tl.minimum(first + a_part, number)
    here = weight + first.to(tl.int64) * dim
    for start in range(first, last, C):
        c = start + tl.arange(0, C)
        real = c < last
        score = tl.zeros((B, C), tl.float32)
        for k in tl.static_range(CHUNKS):
            at = k * D + axis
            inside = at < dim
            w = tl.load(here + down + at[None, :], mask=real[:, None] & inside[None, :], other=0.0)
            if CHUNKS > 1:
                x = tl.load(rows + across + at[None, :], mask=there[:, None] & inside[None, :], other=0.0)
                x = x.to(DOT)
            score = tl.dot(x, tl.trans(w.to(DOT)), score, input_precision=PRECISION)
        b = tl.load(inverse + c, mask=real, other=0.0)
        score = score * scale[:, None] * b[None, :]
        score = tl.where(real[None, :] & (c[None, :] != own[:, None]), score, float("-inf"))
        top = tl.maximum(peak, tl.max(score, 1))
        level = tl.where(top == float("-inf"), 0.0, top)
        shrink = tl.exp(peak - level)
        share = tl.exp(score - level[:, None])
        total = total * shrink + tl.sum(share, 1)
        peak = top
        if MEAN:
            if CHUNKS > 1:
                at = chunk * D + axis
                mask = real[:, None] & (at < dim)[None, :]
                w = tl.load(here + down + at[None, :], mask=mask, other=0.0)
            mean = mean * shrink[:, None]
            mean = _product(share * b[None, :], w, mean, DOT, TERMS, PRECISION)
        here += C * dim
    out = part.to(tl.int64) * anchors + i
    if chunk == 0:
        tl.store(peaks + out, peak, mask=there)
        tl.store(sums + out, total, mask=there)
    if MEAN:
        at = chunk * D + axis
        tl.store(means + out[:, None] * dim + at[None, :], mean, mask=there[:, None] & (at < dim)[None, :])


@triton.jit
def _backward(
    rows,
    factor,
    weight,
    inverse,
    ids,
    level,
    pull,
    by_own,
    order,
    bounds,
    by_weight,
    anchors,
    number,
    dim,
    NORMALIZE: tl.constexpr,
    DOT: tl.constexpr,
    TERMS: tl.constexpr,
    PRECISION: tl.constexpr,
    B: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Classes C·pid0…, chunk pid1 of their gradient: all anchors pass by."""
    first = tl.program_id(0) * C
    chunk = tl.program_id(1)
    c = first + tl.arange(0, C)
    real = c < number
    weight += first.to(tl.int64) * dim  # only where a tile starts takes 64 bits
    by_weight += first.to(tl.int64) * dim
    across = tl.arange(0, B)[:, None] * dim
    down = tl.arange(0, C)[:, None] * dim
    axis = tl.arange(0, D)
    mine = chunk * D + axis
    b = tl.load(inverse + c, mask=real, other=0.0)
    if CHUNKS == 1:
        w = tl.load(weight + down + axis[None, :], mask=real[:, None] & (axis < dim)[None, :], other=0.0)
    gradient = tl.zeros((C, D), tl.float32)
    along = tl.zeros((C,), tl.float32)
    here = rows
    for begin in range(0, anchors, B):
        i = begin + tl.arange(0, B)
        there = i < anchors
        score = tl.zeros((C, B), tl.float32)
        for k in tl.static_range(CHUNKS):
            at = k * D + axis
            inside = at < dim
            x = tl.load(here + across + at[None, :], mask=there[:, None] & inside[None, :], other=0.0)
            if CHUNKS > 1:
                w = tl.load(weight + down + at[None, :], mask=real[:, None] & inside[None, :], other=0.0)
            score = tl.dot(w.to(DOT), tl.trans(x.to(DOT)), score, input_precision=PRECISION)
        own = tl.load(ids + i, mask=there, other=-1)
        scale = tl.load(factor + i, mask=there, other=0.0)
        peak = tl.load(level + i, mask=there, other=0.0)
        share = tl.load(pull + i, mask=there, other=0.0)
        score = score * scale[None, :] * b[:, None]
        valid = there[None, :] & real[:, None] & (c[:, None] != own[None, :])
        part = tl.where(valid, tl.exp(tl.where(valid, score - peak[None, :], 0.0)) * share[None, :], 0.0)
        if CHUNKS > 1:
            along += tl.sum(part * score, 1)
            x = tl.load(here + across + mine[None, :], mask=there[:, None] & (mine < dim)[None, :], other=0.0)
        gradient = _product(part * scale[None, :], x, gradient, DOT, TERMS, PRECISION)
        here += B * dim
    inside = real[:, None] & (mine < dim)[None, :]
    if NORMALIZE:  # what points along the weight changes nothing
        if CHUNKS > 1:
            w = tl.load(weight + down + mine[None, :], mask=inside, other=0.0)
        direction = w.to(tl.float32) * b[:, None]
        if CHUNKS == 1:
            along = tl.sum(gradient * direction, 1)
        gradient = (gradient - along[:, None] * direction) * b[:, None]
    begin = tl.load(bounds + first)
    end = tl.load(bounds + tl.minimum(first + C, number))
    for j in range(begin, end):  # the anchors of these classes, in a fixed order
        row = tl.load(order + j)
        class_of = tl.load(ids + row)
        own_part = tl.load(by_own + row * dim + mine, mask=mine < dim, other=0.0)
        gradient += tl.where((c == class_of)[:, None], own_part[None, :], 0.0)
    tl.store(by_weight + down + mine[None, :], gradient, mask=inside)


def inverse_lengths(weight, normalize):
    """1 / |w_c| (C,), 0 for a row too short to have a direction; all 1 if not wanted; and 0 or NaN for the whole."""
    number, dim = weight.shape
    inverse = torch.empty(number, device=weight.device, dtype=torch.float32)
    tiny = torch.finfo(torch.float32).tiny * 1e6  # as `distances.unit` has it
    pad = max(16, min(triton.next_power_of_2(dim), 512))
    grid = (triton.cdiv(number, NORM_CLASSES),)
    _lengths[grid](weight, inverse, number, dim, TINY=tiny, C=NORM_CLASSES, D=pad, **_options())
    return (inverse if normalize else torch.ones_like(inverse)), (inverse * 0).sum()


def _way(rows, weight, dim, terms, precision, whole):
    """What both kernels are compiled for: how products are made, the padded row, the chunks it is served in."""
    halves = rows.dtype == weight.dtype == torch.bfloat16
    pad = max(16, min(triton.next_power_of_2(dim), whole if halves else whole // 2))
    # The interpreter keeps bfloat16 as whole numbers and cannot multiply them; their products are exact in float32.
    dot = tl.bfloat16 if halves and not kernels.interpreted() else tl.float32
    way = {"DOT": dot, "TERMS": terms if halves else 0, "PRECISION": precision}
    return 2 if halves else 4, way | {"D": pad, "CHUNKS": triton.cdiv(dim, pad)}


def _sizes(shape):
    sizes = {"B": shape.anchors, "C": shape.classes, "num_warps": shape.warps, "num_stages": shape.stages}
    return sizes | _options()


def _options():
    return {} if kernels.interpreted() else {"enable_fp_fusion": True}  # said aloud: its default changes


def forward(rows, factor, weight, inverse, ids, parts, wants_mean, *, terms, precision, whole, chosen=None):
    """Peaks and sums (S, B) of `parts` runs of classes, and the sums of class weights (S, B, D) or None."""
    (anchors, dim), number = rows.shape, weight.shape[0]
    item, way = _way(rows, weight, dim, terms, precision, whole)
    shape = chosen or tile(FORWARD, item, way["D"])
    a_part = triton.cdiv(triton.cdiv(number, shape.classes), parts) * shape.classes
    parts = triton.cdiv(number, a_part)
    peaks = torch.empty(parts, anchors, device=rows.device, dtype=torch.float32)
    sums = torch.empty_like(peaks)
    means = torch.empty(parts, anchors, dim, device=rows.device, dtype=torch.float32) if wants_mean else None
    grid = (triton.cdiv(anchors, shape.anchors), parts, way["CHUNKS"] if wants_mean else 1)
    given = (rows, factor, weight, inverse, ids, peaks, sums, sums if means is None else means)
    _forward[grid](*given, anchors, number, dim, a_part, MEAN=wants_mean, **way, **_sizes(shape))
    return peaks, sums, means


def backward(
    rows,
    factor,
    weight,
    inverse,
    ids,
    level,
    pull,
    by_own,
    by_weight,
    normalize,
    *,
    terms,
    precision,
    whole,
    chosen=None,
):
    """Fills `by_weight` (C, D), each entry once, rounded to its type once."""
    (anchors, dim), number = rows.shape, weight.shape[0]
    item, way = _way(rows, weight, dim, terms, precision, whole)
    shape = chosen or tile(BACKWARD, item, way["D"])
    classes, order = ids.sort(stable=True)
    bounds = torch.searchsorted(classes, torch.arange(number + 1, device=ids.device))
    grid = (triton.cdiv(number, shape.classes), way["CHUNKS"])
    out = by_weight.float() if kernels.interpreted() else by_weight  # the interpreter cuts to bfloat16, unrounded
    given = (rows, factor, weight, inverse, ids, level, pull, by_own.contiguous(), order, bounds, out)
    _backward[grid](*given, anchors, number, dim, NORMALIZE=normalize, **way, **_sizes(shape))
    if out is not by_weight:
        by_weight.copy_(out)
