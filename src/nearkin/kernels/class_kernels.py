# mypy: ignore-errors
"""The kernels of `kernels.class_softmax`, and how large their tiles are. Imported when the first of them is wanted.

Scores are factor_i · inverse_c · <x_i, w_c>: rows are multiplied as they are stored and scaled afterwards, so that a
bfloat16 weight is never rounded again and no copy of the weights is made. `scan` is a matrix product whose tiles end as
a peak and a sum; `parts` is the same product again, whose tiles end as the derivative by the scores, for a run of
classes. Two further products make the gradients of it: one by cuBLAS, one here or by cuBLAS (`gradient`, `finish`).
"""

from typing import NamedTuple

import torch

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError as error:
    raise ImportError('impl="triton" needs triton 3.4 or newer: pip install triton') from error

from nearkin import kernels


class Tile(NamedTuple):
    """A tile of a product: its height and width, the depth of a step, warps a program, steps in flight.

    Height × width are anchors × class weights in SCAN, class weights × anchors in PARTS and × coordinates in GRADIENT.
    `copies`: whether the bulk copy engine brings the operands, where it can.
    """

    height: int
    width: int
    depth: int
    warps: int
    stages: int
    copies: bool = True
    registers: int | None = None  # the most a thread may have, so that more programs share a multiprocessor


# By the bytes of a number in a product. Those of 2 bytes are the fastest on an H200 at C = 1,000,000, B = 1,024 and
# D = 512, of 4 and 8 bytes what the compiler says of Hopper: `benchmarks/class_softmax.py --tune` tries CANDIDATES on a
# GPU and prints lines for these tables; its `--compile` needs none.
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
GROUP = 16  # tiles of anchors that meet the same class weights before others come by
NORM_CLASSES = 32
INTERPRETS = kernels.interpreted()  # which triton asks when it is imported, too
TINY = torch.finfo(torch.float32).tiny * 1e6  # shorter rows have no direction, as `distances.unit` has it


class Operands(NamedTuple):
    """What every pass over the scores takes: rows (B, D), factor (B,), weight (C·K, D), inverse (C·K,), ids (B,)."""

    rows: torch.Tensor
    factor: torch.Tensor
    weight: torch.Tensor
    inverse: torch.Tensor
    ids: torch.Tensor  # the own class, which is left out; below 0 the whole anchor is
    centers: int = 1
    lost: float = 0.0  # what a class weight without a direction scores
    columns: bool = False  # whether each class weighs the anchors, instead of each anchor the classes
    precision: str = "ieee"
    two: bool = False  # whether the factors have log2 e in them: peaks and sums are then those of powers of 2


@triton.jit
def _lengths(weight, out, number, dim, TINY: tl.constexpr, EVEN: tl.constexpr, C: tl.constexpr, D: tl.constexpr):
    columns = tl.program_id(0).to(tl.int64) * C + tl.arange(0, C)
    squared = tl.zeros((C,), tl.float64)
    for d in range(0, dim, D):
        axis = d + tl.arange(0, D)
        mask = (columns < number)[:, None]
        if not EVEN:
            mask = mask & (axis < dim)[None, :]
        w = tl.load(weight + columns[:, None] * dim + axis[None, :], mask=mask, other=0.0).to(tl.float32)
        # Sums of eight squares in float32, which a thread has side by side; only these are widened.
        squared += tl.sum(tl.sum(tl.reshape(w * w, (C, D // 8, 8)), 2).to(tl.float64), 1)
    if tl.max(tl.where((squared > 1e-25) & (squared < 1e35), 0, 1)) > 0:  # squares that float32 may not hold
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
def _power(x, TWO: tl.constexpr):
    return tl.exp2(x) if TWO else tl.exp(x)


@triton.jit
def _place(tall, wide, GROUP: tl.constexpr):
    """Row and column of this program's tile, so that programs that run together share operands in the cache."""
    pid = tl.program_id(0)
    first = pid // (GROUP * wide) * GROUP
    height = tl.minimum(tall - first, GROUP)
    inside = pid % (GROUP * wide)
    return first + inside % height, inside // height


@triton.jit
def _products(
    left,
    right,
    i0,
    j0,
    lefts,
    rights,
    dim,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    COPIES: tl.constexpr,
    EVEN: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    D: tl.constexpr,
):
    """Inner products of the rows of two matrices, a tile (H, W); beyond the last rows the values mean nothing."""
    SUM: tl.constexpr = DOT if DOT.primitive_bitwidth == 64 else tl.float32
    acc = tl.zeros((H, W), SUM)
    if COPIES:
        for k in range(0, dim, D):
            x = left.load([i0, k])
            y = right.load([j0, k])
            acc = tl.dot(x.to(DOT), tl.trans(y.to(DOT)), acc, input_precision=PRECISION, out_dtype=SUM)
    else:
        axis = tl.arange(0, D)
        # Only where a tile starts takes 64 bits. Rows beyond the end are the last one again, which needs no mask.
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
    rows,
    factor,
    weight,
    inverse,
    ids,
    peaks,
    sums,
    lost,
    anchors,
    number,
    dim,
    a_part,
    LOST: tl.constexpr,
    TWO: tl.constexpr,
    COLUMNS: tl.constexpr,
    CENTERS: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    COPIES: tl.constexpr,
    EVEN: tl.constexpr,
    GROUP: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    D: tl.constexpr,
):
    """Peak and sum of e^{score - peak}: an anchor over `a_part` class weights, or a class over a tile of anchors."""
    row, part = _place(tl.cdiv(anchors, H), tl.cdiv(number, a_part), GROUP)
    i0 = row * H
    i = i0 + tl.arange(0, H)
    own = tl.load(ids + i, mask=i < anchors, other=-1).to(tl.int32) * CENTERS  # its first centre
    scale = tl.load(factor + i, mask=i < anchors, other=0.0)
    peak = tl.full((H,), float("-inf"), tl.float32)
    total = tl.zeros((H,), tl.float32)
    first = part * a_part
    for step in range(0, tl.minimum(a_part, number - first), W):
        c0 = first + step
        c = c0 + tl.arange(0, W)
        b = tl.load(inverse + c, mask=c < number, other=0.0)
        score = _products(rows, weight, i0, c0, anchors, number, dim, DOT, PRECISION, COPIES, EVEN, H, W, D)
        absent = tl.where(c < number, 0.0, float("-inf"))
        if LOST:
            absent += tl.where(b == 0, lost, 0.0)
        score = score * b[None, :] * scale[:, None] + absent[None, :]  # the weight first: it may be a long one
        if CENTERS > 1:
            best = tl.argmax(tl.reshape(score, (H, W // CENTERS, CENTERS)), 2)
            hit = best[:, :, None] == tl.arange(0, CENTERS)[None, None, :]
            score = tl.where(tl.reshape(hit, (H, W)), score, float("-inf"))
        if tl.max(tl.where((own > c0 - CENTERS) & (own < c0 + W), 1, 0)) > 0:  # few tiles hold an anchor's own class
            score = tl.where((c // CENTERS * CENTERS)[None, :] == own[:, None], float("-inf"), score)
        if COLUMNS:
            score = tl.where((own < 0)[:, None], float("-inf"), score)
            top = tl.max(score, 0)
            level = tl.where(top == float("-inf"), 0.0, top)
            out = row.to(tl.int64) * number + c
            tl.store(peaks + out, top, mask=c < number)
            tl.store(sums + out, tl.sum(_power(score - level[None, :], TWO), 0), mask=c < number)
        else:
            top = tl.maximum(peak, tl.max(score, 1))
            level = tl.where(top == float("-inf"), 0.0, top)
            total = total * _power(peak - level, TWO) + tl.sum(_power(score - level[:, None], TWO), 1)
            if CENTERS > 1:
                total += tl.sum(b * 0.0)  # a centre that is not finite may not have been the best
            peak = top
    if not COLUMNS:
        out = part.to(tl.int64) * anchors + i
        tl.store(peaks + out, peak, mask=i < anchors)
        tl.store(sums + out, total, mask=i < anchors)


@triton.jit
def _derive(
    found,
    b,
    c,
    c0,
    row,
    i0,
    factor,
    ids,
    level,
    pull,
    picks,
    push,
    gain,
    out,
    stride,
    anchors,
    number,
    OWN: tl.constexpr,
    TWO: tl.constexpr,
    COLUMNS: tl.constexpr,
    CENTERS: tl.constexpr,
    COPIES: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
):
    """Stores the derivatives of a tile (class weights, anchors) of products; their part along each weight, (H,)."""
    i = i0 + tl.arange(0, W)
    there = i < anchors
    found = found * b[:, None]
    own = tl.load(ids + i, mask=there, other=-1).to(tl.int32) * CENTERS
    scale = tl.load(factor + i, mask=there, other=0.0)
    if COLUMNS:
        peak = tl.load(level + c, mask=c < number, other=0.0)
        share = tl.load(pull + c, mask=c < number, other=0.0) * b
        part = _power(found * scale[None, :] - peak[:, None], TWO) * share[:, None] * scale[None, :]
        part = tl.where((own < 0)[None, :], 0.0, part)
    else:
        peak = tl.load(level + i, mask=there, other=0.0)
        share = tl.load(pull + i, mask=there, other=0.0) * gain
        if not OWN:
            share *= scale
        part = _power(found * scale[None, :] - peak[None, :], TWO) * share[None, :] * b[:, None]
    if CENTERS > 1:
        best = tl.argmax(tl.reshape(found * scale[None, :], (H // CENTERS, CENTERS, W)), 1)
        hit = best[:, None, :] == tl.arange(0, CENTERS)[None, :, None]
        part = tl.where(tl.reshape(hit, (H, W)), part, 0.0)
    if tl.max(tl.where((own > c0 - CENTERS) & (own < c0 + H), 1, 0)) > 0:  # few tiles hold an anchor's own class
        part = tl.where((c // CENTERS * CENTERS)[:, None] == own[None, :], 0.0, part)
        if OWN:
            mine = tl.load(picks + i, mask=there, other=-1)
            drawn = tl.load(push + i, mask=there, other=0.0) * gain
            part = tl.where(c[:, None] == mine[None, :], drawn[None, :] * b[:, None], part)
    if COPIES:
        part = part.to(out.dtype)
        out.store([row * H, i0], part)
    else:
        part = part.to(out.dtype.element_ty)
        here = (row * H).to(tl.int64) * stride + tl.arange(0, H)[:, None] * stride + i[None, :]
        tl.store(out + here, part, mask=there[None, :])
    # From what is stored, so that what is rounded away has no part along the weight either.
    return tl.sum(part.to(tl.float32) * found, 1)


@triton.jit
def _parts(
    rows,
    factor,
    weight,
    inverse,
    ids,
    level,
    pull,
    picks,
    push,
    gain,
    upstream,
    out,
    along,
    anchors,
    number,
    dim,
    start,
    a_run,
    stride,
    OWN: tl.constexpr,
    HALVES: tl.constexpr,
    TWO: tl.constexpr,
    COLUMNS: tl.constexpr,
    CENTERS: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    COPIES: tl.constexpr,
    EVEN: tl.constexpr,
    GROUP: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    D: tl.constexpr,
):
    """The derivative by each score of a run of classes, times factor_i · inverse_c; its part along each class weight.

    Class weights stand upright here: what is summed over anchors then lies within a thread. OWN: `pull` and `push`
    have the factor in them, are to be multiplied by `gain` and `upstream`, and the own class is given what `push` has.
    """
    column, row = _place(tl.cdiv(anchors, W), tl.cdiv(tl.minimum(number - start, a_run), H), GROUP)
    i0 = column * W
    c0 = start + row * H
    grown = 1.0
    if OWN:
        grown = tl.load(gain) * tl.load(upstream)
    found = _products(weight, rows, c0, i0, number, anchors, dim, DOT, PRECISION, COPIES, EVEN, H, W, D)
    c = c0 + tl.arange(0, H)
    b = tl.load(inverse + c, mask=c < number, other=0.0)
    if HALVES:  # one half after the other, for want of registers
        first, second = tl.split(tl.permute(tl.reshape(found, (H, 2, W // 2)), (0, 2, 1)))
        lying = _derive(
            first, b, c, c0, row, i0, factor, ids, level, pull, picks, push, grown, out, stride, anchors, number,
            OWN, TWO, COLUMNS, CENTERS, COPIES, H, W // 2,
        )  # fmt: skip
        lying += _derive(
            second, b, c, c0, row, i0 + W // 2, factor, ids, level, pull, picks, push, grown, out, stride, anchors,
            number, OWN, TWO, COLUMNS, CENTERS, COPIES, H, W // 2,
        )  # fmt: skip
    else:
        lying = _derive(
            found, b, c, c0, row, i0, factor, ids, level, pull, picks, push, grown, out, stride, anchors, number,
            OWN, TWO, COLUMNS, CENTERS, COPIES, H, W,
        )  # fmt: skip
    tl.store(along + column * a_run + row * H + tl.arange(0, H), lying)


@triton.jit
def _write(
    gradient,
    weight,
    inverse,
    along,
    picks,
    order,
    bounds,
    by_own,
    by_weight,
    number,
    dim,
    start,
    a_run,
    column,
    c0,
    d0,
    heights,
    OWN: tl.constexpr,
    PROJECT: tl.constexpr,
    COPIES: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
):
    """The last step of a tile of the gradient: off what lies along the weights, in what the own classes have."""
    c = c0 + tl.arange(0, H)
    d = d0 + tl.arange(0, W)
    inside = (c < number)[:, None] & (d < dim)[None, :]
    here = c0.to(tl.int64) * dim + tl.arange(0, H)[:, None] * dim + d[None, :]
    if PROJECT:
        if COPIES:
            w = weight.load([c0, d0]).to(tl.float32)
        else:
            w = tl.load(weight + here, mask=inside, other=0.0).to(tl.float32)
        lying = tl.zeros((H,), tl.float32)
        for r in range(0, heights):
            lying += tl.load(along + r * a_run + (c0 - start) + tl.arange(0, H), mask=c < number, other=0.0)
        # The weight first: `lying` has one inverse length in it, and the square of a large one leaves float32.
        direction = w * tl.load(inverse + c, mask=c < number, other=0.0)[:, None]
        gradient -= lying[:, None] * direction
    if OWN:
        for j in range(tl.load(bounds + column), tl.load(bounds + column + 1)):  # its anchors, in a fixed order
            anchor = tl.load(order + j)
            pick = tl.load(picks + anchor)
            pulled = tl.load(by_own + anchor * dim + d, mask=d < dim, other=0.0)
            gradient += tl.where((c == pick)[:, None], pulled[None, :], 0.0)
    if COPIES:
        by_weight.store([c0, d0], gradient.to(by_weight.dtype))
    else:
        tl.store(by_weight + here, gradient.to(by_weight.dtype.element_ty), mask=inside)


@triton.jit
def _gradient(
    parts,
    rows,
    weight,
    inverse,
    along,
    picks,
    order,
    bounds,
    by_own,
    by_weight,
    anchors,
    number,
    dim,
    start,
    a_run,
    stride,
    heights,
    OWN: tl.constexpr,
    PROJECT: tl.constexpr,
    DOT: tl.constexpr,
    COPIES: tl.constexpr,
    EVEN: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    D: tl.constexpr,
):
    """A tile (class weights, coordinates) of parts · rows, finished."""
    wide = tl.cdiv(dim, W)
    column = tl.program_id(0) // wide
    d0 = tl.program_id(0) % wide * W
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
        acc,
        weight,
        inverse,
        along,
        picks,
        order,
        bounds,
        by_own,
        by_weight,
        number,
        dim,
        start,
        a_run,
        column,
        c0,
        d0,
        heights,
        OWN,
        PROJECT,
        COPIES,
        H,
        W,
    )


@triton.jit
def _finish(
    product,
    weight,
    inverse,
    along,
    picks,
    order,
    bounds,
    by_own,
    by_weight,
    number,
    dim,
    start,
    a_run,
    heights,
    OWN: tl.constexpr,
    PROJECT: tl.constexpr,
    COPIES: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
):
    """The same from a product (class weights of the run, D) that somebody else has made."""
    wide = tl.cdiv(dim, W)
    column = tl.program_id(0) // wide
    d0 = tl.program_id(0) % wide * W
    d = d0 + tl.arange(0, W)
    c0 = start + column * H
    here = (column.to(tl.int64) * H + tl.arange(0, H))[:, None] * dim + d[None, :]
    inside = (c0 + tl.arange(0, H) < number)[:, None] & (d < dim)[None, :]
    gradient = tl.load(product + here, mask=inside, other=0.0)
    column = c0 // H
    _write(
        gradient,
        weight,
        inverse,
        along,
        picks,
        order,
        bounds,
        by_own,
        by_weight,
        number,
        dim,
        start,
        a_run,
        column,
        c0,
        d0,
        heights,
        OWN,
        PROJECT,
        COPIES,
        H,
        W,
    )


def _blocks(number, size):
    """⌈number / size⌉; triton's own takes a hundred times as long on the host."""
    return -(-number // size)


def inverse_lengths(weight, normalize):
    """1 / |w_c| (C,), 0 for a row too short to have a direction; all 1 if not wanted; and 0 or NaN for the whole."""
    inverse = lengths(weight)
    return (inverse if normalize else torch.ones_like(inverse)), (inverse * 0).sum()


def lengths(weight):
    """1 / |w_c| (C,), 0 for a row too short to have a direction, NaN for one that is not finite."""
    number, dim = weight.shape
    inverse = torch.empty(number, device=weight.device, dtype=torch.float32)
    pad = max(16, min(1 << (dim - 1).bit_length(), 256))  # what a warp loads of a row at once, 16 bytes a thread
    grid = (_blocks(number, NORM_CLASSES),)
    sizes = {"EVEN": dim % pad == 0, "C": NORM_CLASSES, "D": pad}
    _lengths[grid](weight, inverse, number, dim, TINY=TINY, **sizes, **_options())
    return inverse


def scan(given, a_part, tile=None):
    """Peaks and sums: (S, B) of S runs of `a_part` class weights, or, by columns, (S, C) of S tiles of anchors."""
    (anchors, dim), number = given.rows.shape, given.weight.shape[0]
    tile = tile or chosen(SCAN, given)
    a_part = _blocks(min(a_part, number), tile.width) * tile.width
    heights = _blocks(anchors, tile.height)
    shape = (heights, number) if given.columns else (_blocks(number, a_part), anchors)
    peaks = torch.empty(shape, device=given.rows.device, dtype=torch.float32)
    sums = torch.empty_like(peaks)
    operands, way = _way(given, tile)
    grid = (heights * _blocks(number, a_part),)
    _scan[grid](
        *operands, given.ids, peaks, sums, given.lost, anchors, number, dim, a_part, LOST=given.lost != 0, **way
    )
    return peaks, sums


class Own(NamedTuple):
    """What the own classes are given in `parts`: the row that speaks for each anchor's, and the derivative by its score
    times the factor; `gain` and `upstream`: scalars to multiply all derivatives with."""

    picks: torch.Tensor
    push: torch.Tensor
    gain: torch.Tensor
    upstream: torch.Tensor


def parts(given, level, pull, start, out, along, own=None, tile=None, shelf=None):
    """Fills `out` (run, B) and `along` (anchor tiles, run) with what the run of classes from `start` has.

    shelf: a dict that keeps what describes the tensors from one run to the next.
    """
    (anchors, dim), number, a_run = given.rows.shape, given.weight.shape[0], out.shape[0]
    tile = tile or chosen(PARTS, given)
    operands, way = _way(given, tile, True, shelf)
    split = tile.width > 64
    filled = _described(out, tile.height, tile.width // 2 if split else tile.width, shelf) if way["COPIES"] else out
    grid = (_blocks(anchors, tile.width) * _blocks(min(number - start, a_run), tile.height),)
    more = (level, pull, *(own or (pull, pull, pull, pull)))
    sizes = (filled, along, anchors, number, dim, start, a_run, out.stride(0))
    _parts[grid](*operands, given.ids, *more, *sizes, OWN=own is not None, HALVES=split, **way)
    if INTERPRETS and halves(given.rows, given.weight):
        out.copy_(out.bfloat16())  # the interpreter would cut to bfloat16, unrounded


class Ends(NamedTuple):
    """What the gradient of a run ends with: the anchors sorted by the row that speaks for them, and what they pull."""

    picks: torch.Tensor
    order: torch.Tensor
    bounds: torch.Tensor
    by_own: torch.Tensor


def ends(picks, by_own, number, tile):
    """`bounds`: where in the order the anchors of each tile of classes begin."""
    if by_own is None:
        return None
    rows, order = picks.sort(stable=True)
    starts = torch.arange(0, number + tile.height, tile.height, device=picks.device)
    return Ends(picks, order, torch.searchsorted(rows, starts), by_own.contiguous())


def gradient(given, made, along, end, by_weight, start, project, tile=None, shelf=None):
    """Fills the run from `start` of `by_weight`, each entry once, rounded to its type once: made · rows, finished."""
    rows = given.rows
    (anchors, dim), number, a_run = rows.shape, given.weight.shape[0], made.shape[0]
    tile = tile or chosen(GRADIENT, given)
    out = _rounded_later(by_weight)
    weight, filled = given.weight, out
    copies = tile.copies and all(map(_copied, (made, rows, weight, out)))
    operands = made, rows
    if copies:
        operands = _described(made, tile.height, tile.depth, shelf), _described(rows, tile.depth, tile.width, shelf)
        weight, filled = (_described(each, tile.height, tile.width, shelf) for each in (weight, out))
    run = min(number - start, a_run)
    grid = (_blocks(run, tile.height) * _blocks(dim, tile.width),)
    even = anchors % tile.depth == 0
    sizes = {"H": tile.height, "W": tile.width, "D": tile.depth, "COPIES": copies, "EVEN": even, "DOT": _dot(rows)}
    wanted = {"OWN": end is not None, "PROJECT": project}
    given_ends = end or Ends(along, along, along, along)
    more = (weight, given.inverse, along, *given_ends, filled, anchors, number, dim, start, a_run, made.stride(0))
    _gradient[grid](*operands, *more, along.shape[0], **wanted, **sizes, **_launch(tile))
    _round(out, by_weight, start, run)


def finish(given, product, along, end, by_weight, start, project):
    """The same where the product (run, D) has been made elsewhere, in float32."""
    number, dim = given.weight.shape
    tile = finishing()
    run = product.shape[0]
    grid = (_blocks(run, tile.height) * _blocks(dim, tile.width),)
    out = _rounded_later(by_weight)
    wanted = {"OWN": end is not None, "PROJECT": project}
    given_ends = end or Ends(along, along, along, along)
    more = (given.weight, given.inverse, along, *given_ends, out, number, dim, start, along.shape[1])
    sizes = {"COPIES": False, "H": tile.height, "W": tile.width}
    _finish[grid](product, *more, along.shape[0], **wanted, **sizes, **_launch(tile))
    _round(out, by_weight, start, run)


def chosen(table, given):
    if INTERPRETS:
        return INTERPRETED
    if halves(given.rows, given.weight):
        tile = table[2]
    elif exact(given):
        tile = table[8]
    else:
        tile = PLAIN if given.precision == "ieee" else table[4]
    if given.rows.shape[0] > 64:
        return tile
    if table is SCAN:
        return tile._replace(height=64, warps=4) if tile.height > 64 else tile
    return tile._replace(width=64) if table is PARTS else tile


def finishing():
    return INTERPRETED if INTERPRETS else FINISH


def halves(rows, weight):
    """Whether the products are of bfloat16."""
    return rows.dtype == weight.dtype == torch.bfloat16


def exact(given):
    """Whether float32 numbers are multiplied as float64: on the matrix units that have it, for no more time.

    Not weights of two bytes, which triton 3.6 cannot lay out for these units (it stops compiling).
    """
    return given.precision == "ieee" and given.weight.dtype == torch.float32 and kernels.has_float64_units(given.rows)


def _way(given, tile, upright=False, shelf=None):
    """Rows, factors, weights and inverse lengths as the kernel takes them, and what it is compiled for."""
    dim = given.rows.shape[1]
    copies = tile.copies and _copied(given.rows) and _copied(given.weight)
    rows, weight = given.rows, given.weight
    if copies:
        across, down = (tile.width, tile.height) if upright else (tile.height, tile.width)
        rows, weight = _described(rows, across, tile.depth, shelf), _described(weight, down, tile.depth, shelf)
    dot = _dot(given.rows) if halves(given.rows, given.weight) else tl.float64 if exact(given) else tl.float32
    way = {"COLUMNS": given.columns, "CENTERS": given.centers, "DOT": dot, "PRECISION": given.precision}
    way |= {"COPIES": copies, "EVEN": dim % tile.depth == 0, "GROUP": GROUP, "TWO": given.two}
    way |= {"H": tile.height, "W": tile.width, "D": tile.depth}
    return (rows, given.factor, weight, given.inverse), way | _launch(tile)


def _copied(tensor):
    """Whether the copy engine can read it: rows and their beginning at multiples of 16 bytes."""
    return tensor.data_ptr() % 16 == 0 and tensor.stride(0) * tensor.element_size() % 16 == 0


def _described(tensor, rows, columns, shelf=None):
    """What the copy engine goes by; it holds the tensor, so nothing else can have its id while it is on the shelf."""
    name = id(tensor), rows, columns
    found = None if shelf is None else shelf.get(name)
    if found is None:
        found = TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [rows, columns])
        if shelf is not None:
            shelf[name] = found
    return found


def _dot(rows):
    # The interpreter keeps bfloat16 as whole numbers and cannot multiply them; their products are exact in float32.
    return tl.bfloat16 if rows.dtype == torch.bfloat16 and not INTERPRETS else tl.float32


def _launch(tile):
    bound = {} if tile.registers is None else {"maxnreg": tile.registers}
    return {"num_warps": tile.warps, "num_stages": tile.stages} | bound | _options()


def _options():
    return {} if INTERPRETS else {"enable_fp_fusion": True}  # said aloud: its default changes


def _rounded_later(by_weight):
    """The interpreter cuts to bfloat16, unrounded: there the kernel writes float32."""
    return by_weight.float() if INTERPRETS else by_weight


def _round(out, by_weight, start, run):
    if out is not by_weight:
        by_weight[start : start + run] = out[start : start + run]
