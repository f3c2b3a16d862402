# mypy: ignore-errors
"""What the kernels of pair and triplet losses share: prepared rows, tiles of products and distances, input gradients.

Rows are prepared once: clamped, of unit length where the loss normalizes, so that a tile is loads and products and
nothing else. Products are of float64 where the device multiplies it on its matrix units (`kernels.has_float64_units`):
as in `core.distances` nothing is lost to cancellation, and it is as fast as three products of TF32. Elsewhere rows are
prepared as digits (`digit_kernels`), and what follows takes either: it looks at the type of the buffer. Imported when
the first kernel is launched.
"""

import functools

import torch

from nearkin import kernels
from nearkin.kernels import digit_kernels
from nearkin.kernels.digit_kernels import ORIGIN, SMALLEST, digit, facts_at, joined
from nearkin.kernels.launch import CachedLauncher
from nearkin.kernels.numerics import tl, triton

BOUND = torch.finfo(torch.float32).max ** (1 / 3)  # where coordinates are clamped, as in `core.distances`
TINY = torch.finfo(torch.float32).tiny * 1e6  # a row not longer than this has no direction
EPS = torch.finfo(torch.float64).eps
BOUND_, TINY_, EPS_ = tl.constexpr(BOUND), tl.constexpr(TINY), tl.constexpr(EPS)


@triton.jit
def clamped(x):
    """Coordinates in float32, clamped so that no square overflows; NaN stays NaN."""
    x = x.to(tl.float32)
    return tl.where(x != x, x, tl.minimum(tl.maximum(x, -BOUND_), BOUND_))


@triton.jit
def inverse_lengths(squared):
    """1 / length, 0 for a row too short to have a direction; float64 (M,) → (M,)."""
    has_direction = squared > TINY_ * TINY_
    return tl.where(has_direction, 1.0 / tl.sqrt(tl.where(has_direction, squared, 1.0)), 0.0)


@triton.jit
def pair_masks(row_ids, column_ids, i, j, mask_m, mask_n, SELF: tl.constexpr):
    """Which pairs of a tile are positive and which negative, from class ids (M,) and (N,) where -1 is unknown."""
    valid = (mask_m & (row_ids != -1))[:, None] & (mask_n & (column_ids != -1))[None, :]
    if SELF:
        valid = valid & (i[:, None] != j[None, :])
    same = row_ids[:, None] == column_ids[None, :]
    return valid & same, valid & (row_ids[:, None] != column_ids[None, :])


# Prepared rows of float64 are one buffer, addressed by offsets, since a view costs more than a kernel. First the rows,
# padded with zeros to `padded(D)` coordinates; then these facts, one entry per row: its squared length (1 or 0 after
# normalization), 1 / length (1 without normalization), 0 or NaN if it is not finite, and the bits of its class id.
SQUARED, INVERSE, TAINT, ID = (tl.constexpr(place) for place in range(4))


def options() -> dict:
    return {} if kernels.interpreted() else {"enable_fp_fusion": True}  # explicit, since the default changes


def padded(dim: int) -> int:
    return -(-dim // 16) * 16


@triton.jit
def _squared_lengths(x, i, mask_m, dim, TRANSFORM: tl.constexpr, D: tl.constexpr):
    """Squared lengths (M,) in float64, and 0 or NaN for rows that are not finite."""
    squared = tl.zeros(i.shape, tl.float64)
    taint = tl.zeros(i.shape, tl.float32)
    for start in range(0, dim, D):
        axis = start + tl.arange(0, D)
        mask = mask_m[:, None] & (axis < dim)[None, :]
        value = tl.load(x + i.to(tl.int64)[:, None] * dim + axis[None, :], mask=mask, other=0.0).to(tl.float32)
        taint += tl.sum(value * 0.0, 1)
        value = tl.where(mask, into_range(value, TRANSFORM), 0.0)
        squared += tl.sum(value * value, 1)
    return squared, taint


@triton.jit
def _scaled(x, inverse, i, mask_m, axis, dim, TRANSFORM: tl.constexpr):
    """Coordinates (M, D) of rows times `inverse` (M,), float64."""
    mask = mask_m[:, None] & (axis < dim)[None, :]
    value = tl.load(x + i.to(tl.int64)[:, None] * dim + axis[None, :], mask=mask, other=0.0).to(tl.float32)
    return tl.where(mask, into_range(value, TRANSFORM) * inverse[:, None], 0.0)


@triton.jit
def _store_facts(facts, ids, i, mask_m, size, squared, inverse, taint):
    at = facts + i.to(tl.int64)
    tl.store(at + SQUARED * size, squared, mask=mask_m)
    tl.store(at + INVERSE * size, inverse, mask=mask_m)
    tl.store(at + TAINT * size, taint.to(tl.float64), mask=mask_m)
    row_ids = tl.load(ids + i, mask=mask_m, other=0).to(tl.int64)
    tl.store(at + ID * size, row_ids.to(tl.float64, bitcast=True), mask=mask_m)


@triton.jit
def _prepare(x, ids, out, size, dim, PAD: tl.constexpr, TRANSFORM: tl.constexpr, NORMALIZE: tl.constexpr,
             M: tl.constexpr, D: tl.constexpr):  # fmt: skip
    i = tl.program_id(0) * M + tl.arange(0, M)
    mask_m = i < size
    squared, taint = _squared_lengths(x, i, mask_m, dim, TRANSFORM, D)
    inverse = tl.full((M,), 1.0, tl.float64)
    if NORMALIZE:
        inverse = inverse_lengths(squared)
        squared = tl.where(squared > TINY_ * TINY_, 1.0, squared * 0.0)  # NaN stays NaN
    _store_facts(out + tl.cast(size, tl.int64) * PAD, ids, i, mask_m, size, squared, inverse, taint)
    for start in range(0, PAD, D):
        axis = start + tl.arange(0, D)
        value = _scaled(x, inverse, i, mask_m, axis, dim, TRANSFORM)
        at = out + i.to(tl.int64)[:, None] * PAD + axis[None, :]
        tl.store(at, value, mask=mask_m[:, None] & (axis < PAD)[None, :])


@triton.jit
def _shares(origin, origins, dim, TRANSFORM: tl.constexpr, NORMALIZE: tl.constexpr, D: tl.constexpr):
    """Of the first rows of `origin`: the factors (ORIGIN,) by which their sum is the centre.

    All 0 where their mean is not half as long as they are: away from it rows would be no shorter, and small rows beside
    large ones would lose digits."""
    o = tl.arange(0, ORIGIN)
    squared, taint = _squared_lengths(origin, o, o < origins, dim, TRANSFORM, D)
    sound = (o < origins) & (taint == 0)
    squared = tl.where(sound, squared, 0.0)
    share = tl.where(sound, 1.0, 0.0).to(tl.float64)
    share = share / tl.maximum(tl.sum(share, 0), 1.0)
    mean_square = tl.sum(share * squared, 0)
    if NORMALIZE:
        mean_square = tl.sum(share, 0)
        share = share * tl.where(sound, inverse_lengths(squared), 0.0)
    long = tl.sum(share, 0) * 0.0
    for start in range(0, dim, D):
        middle = tl.sum(_scaled(origin, share, o, share > 0, start + tl.arange(0, D), dim, TRANSFORM), 0)
        long += tl.sum(middle * middle, 0)
    return tl.where(long > 0.25 * mean_square, share, 0.0)


@triton.jit
def _centred(x, origin, inverse, shares, i, mask_m, axis, origins, dim, TRANSFORM: tl.constexpr, CENTRE: tl.constexpr):
    """Coordinates (M, D) of rows less the centre, float64, and the centre (D,)."""
    value = _scaled(x, inverse, i, mask_m, axis, dim, TRANSFORM)
    middle = tl.zeros(axis.shape, tl.float64)
    if CENTRE:
        o = tl.arange(0, ORIGIN)
        first = _scaled(origin, shares, o, (o < origins) & (shares > 0), axis, dim, TRANSFORM)
        middle = tl.sum(first, 0).to(tl.float32).to(tl.float64)
    return value - middle[None, :], middle


@triton.jit
def _prepare_digits(x, origin, ids, out, size, origins, dim, PAD: tl.constexpr, TRANSFORM: tl.constexpr,
                    NORMALIZE: tl.constexpr, CENTRE: tl.constexpr, M: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """Rows as `digit_kernels` has them, less the mean of the first rows of `origin` where CENTRE."""
    P: tl.constexpr = (PAD + 31) // 32 * 32
    i = tl.program_id(0) * M + tl.arange(0, M)
    mask_m = i < size
    squared, taint = _squared_lengths(x, i, mask_m, dim, TRANSFORM, D)
    inverse = tl.full((M,), 1.0, tl.float64)
    if NORMALIZE:
        inverse = inverse_lengths(squared)
        squared = tl.where(squared > TINY_ * TINY_, 1.0, squared * 0.0)
    shares = inverse
    if CENTRE:
        shares = _shares(origin, origins, dim, TRANSFORM, NORMALIZE, D)
    longest = tl.zeros((M,), tl.float64)
    for start in range(0, P, D):
        axis = start + tl.arange(0, D)
        value, _ = _centred(x, origin, inverse, shares, i, mask_m, axis, origins, dim, TRANSFORM, CENTRE)
        longest += tl.sum(value * value, 1)
    exponent = (tl.sqrt(longest).to(tl.int64, bitcast=True) >> 52) + 1  # a power of two above the length
    scale = tl.maximum((exponent << 52).to(tl.float64, bitcast=True), SMALLEST)
    scale = tl.where(taint == 0, scale, 1.0)
    first, across = digit_kernels.transposed_at(size, PAD)
    zero = tl.zeros((M,), tl.int32)
    total = (zero, zero, zero, zero, zero, zero, zero)
    record = out + i.to(tl.int64)[:, None] * (8 * P + digit_kernels.HEADER)
    hidden = tl.sqrt(squared * (2.0 * EPS_ * dim)).to(tl.float32)
    for start in range(0, P, D):
        axis = start + tl.arange(0, D)
        value, middle = _centred(x, origin, inverse, shares, i, mask_m, axis, origins, dim, TRANSFORM, CENTRE)
        value = value / scale[:, None] * 1073741824.0
        number = tl.floor(value + 0.5)
        rest = tl.floor((value - number) * 4294967296.0).to(tl.int32)
        number = number.to(tl.int32)
        d3, number = digit(number)
        d2, number = digit(number)
        d1, number = digit(number)
        digits = (number.to(tl.int8), d1, d2, d3)
        total = _squares(total, digits)
        mask = mask_m[:, None] & (axis < P)[None, :]
        for place in tl.static_range(4):
            tl.store(record + place * P + axis[None, :], digits[place], mask=mask)
            column = out + first + (place * P + axis).to(tl.int64)[None, :] * across + i[:, None]
            tl.store(column, digits[place], mask=mask)
        rest_at = (record + 4 * P + digit_kernels.HEADER + 4 * axis[None, :]).to(tl.pointer_type(tl.int32))
        tl.store(rest_at, rest, mask=mask)
        if tl.program_id(0) == 0:
            at = digit_kernels.centre_at(out, size, PAD).to(tl.pointer_type(tl.float32)) + axis
            tl.store(at, middle.to(tl.float32), mask=axis < P)
    high, low = joined(total)
    scale = tl.where(taint == 0, scale, taint.to(tl.float64)).to(tl.float32)
    header = (out + i.to(tl.int64) * (8 * P + digit_kernels.HEADER) + 4 * P).to(tl.pointer_type(tl.float32))
    tl.store(header, high, mask=mask_m)
    tl.store(header + 1, low, mask=mask_m)
    tl.store(header + 2, scale, mask=mask_m)
    tl.store(header + 3, 1.0 / scale, mask=mask_m)
    tl.store(header + 4, hidden, mask=mask_m)
    if not CENTRE:  # the length that `inner_products` gives a row with itself
        squared = (high.to(tl.float64) + low.to(tl.float64)) * (scale.to(tl.float64) * scale.to(tl.float64))
    _store_facts(facts_at(out, size, PAD), ids, i, mask_m, size, squared, inverse, taint)


@triton.jit
def _squares(total, digits):
    """Adds the squares of rows as `digit_kernels` adds products."""
    t0, t1, t2, t3, t4, t5, t6 = total
    a, b, c, d = digits
    a, b, c, d = a.to(tl.int32), b.to(tl.int32), c.to(tl.int32), d.to(tl.int32)
    t0 += tl.sum(a * a, 1)
    t1 += tl.sum(2 * a * b, 1)
    t2 += tl.sum(2 * a * c + b * b, 1)
    t3 += tl.sum(2 * a * d + 2 * b * c, 1)
    t4 += tl.sum(2 * b * d + c * c, 1)
    t5 += tl.sum(2 * c * d, 1)
    t6 += tl.sum(d * d, 1)
    return t0, t1, t2, t3, t4, t5, t6


@triton.jit
def into_range(value, TRANSFORM: tl.constexpr):
    """Coordinates in float64: clamped so that no square overflows, or brought into the unit cube."""
    if TRANSFORM == "sigmoid":
        value = (1.0 / (1.0 + tl.exp(-value.to(tl.float64)))).to(tl.float32)
    elif TRANSFORM == "cube":
        value = tl.where(value != value, value, tl.minimum(tl.maximum(value, 0.0), 1.0))
    else:
        value = clamped(value)
    return value.to(tl.float64)


def prepare(
    x: torch.Tensor,
    ids: torch.Tensor,
    normalize: bool,
    transform: str = "clamp",
    centre: torch.Tensor | None = None,
) -> torch.Tensor:
    """The buffer of prepared rows of x (B, D) and their class ids (B,): float64, or int8 (`digit_kernels`).

    centre: of digits, rows are less the mean of the first rows of this tensor, the same for all that are compared:
    exact to more digits where a batch is far from 0, but only for distances (`inner_products` has centred ones)."""
    size, dim = x.shape
    if kernels.has_float64_units(x):
        pad, start = _preparing(dim, normalize, transform)
        out = torch.empty(size * (pad + 4), device=x.device, dtype=torch.float64)
        start(((size + 7) // 8, 1, 1), x, ids, out, size, dim)
        return out
    start = _preparing_digits(dim, normalize, transform, centre is not None)
    origin = x if centre is None else centre
    out = torch.empty(digit_kernels.size_in_bytes(size, dim), device=x.device, dtype=torch.int8)
    start(((size + 7) // 8, 1, 1), x, origin, ids, out, size, origin.shape[0], dim)
    return out


@functools.cache
def _preparing(dim, normalize, transform):
    pad = padded(dim)
    block = min(triton.next_power_of_2(pad), 256)
    return pad, CachedLauncher(_prepare, PAD=pad, TRANSFORM=transform, NORMALIZE=normalize, M=8, D=block, **options())


@functools.cache
def _preparing_digits(dim, normalize, transform, centre):
    constants = {"PAD": padded(dim), "TRANSFORM": transform, "NORMALIZE": normalize, "CENTRE": centre}
    block = min(triton.next_power_of_2(digit_kernels.length(dim)), 128)
    return CachedLauncher(_prepare_digits, M=8, D=block, **constants, **options())


@triton.jit
def fact(rows, place: tl.constexpr, i, mask_m, size, PAD: tl.constexpr):
    """One of SQUARED, INVERSE, TAINT of rows i, float64."""
    if rows.dtype.element_ty == tl.int8:
        first = facts_at(rows, size, PAD)
    else:
        first = rows + tl.cast(size, tl.int64) * PAD
    return tl.load(first + place * size + i, mask=mask_m, other=0.0)


@triton.jit
def class_ids(rows, i, mask_m, size, PAD: tl.constexpr):
    return fact(rows, ID, i, mask_m, size, PAD).to(tl.int64, bitcast=True)


@triton.jit
def inner_products(a, b, i, j, PAD: tl.constexpr, K: tl.constexpr):
    """Inner products (M, N) in float64 of prepared rows i of `a` and j of `b`; indices must be of rows that exist."""
    if a.dtype.element_ty == tl.int8:
        high, low = digit_kernels.products(a, b, digit_kernels.planes(a, i, 0, PAD, 32), i, j, PAD, 32)
        scale = (
            digit_kernels.header(a, i, digit_kernels.SCALE, PAD)[:, None]
            * digit_kernels.header(b, j, digit_kernels.SCALE, PAD)[None, :]
        )
        total = (high.to(tl.float64) + low.to(tl.float64)) * scale.to(tl.float64)
    else:
        total = tl.zeros((i.shape[0], j.shape[0]), tl.float64)
        axis = tl.arange(0, K)
        a += i.to(tl.int64)[:, None] * PAD + axis[None, :]
        b += j.to(tl.int64)[None, :] * PAD + axis[:, None]
        for _ in range(0, PAD, K):
            total = tl.dot(tl.load(a), tl.load(b), total, out_dtype=tl.float64)
            a += K
            b += K
    return total


@triton.jit
def squared_distances(inner, left, right, i, j, rounding, SELF: tl.constexpr):
    """(M, N) squared distances in float64 from inner products and squared lengths (M,), (N,); exactly 0 where rounding
    hides the difference. rounding: 2 · D · EPS."""
    squared = left[:, None] + right[None, :] - 2.0 * inner
    far = (squared > (left * rounding)[:, None]) & (squared > (right * rounding)[None, :])
    if SELF:
        far = far & (i[:, None] != j[None, :])
    return tl.where(far, squared, 0.0)


@triton.jit
def original(x, rows, i, mask_m, axis, size, dim, PAD: tl.constexpr, TRANSFORM: tl.constexpr):
    """Coordinates of rows before they were centred or cut into digits, float64, 0 where there are none."""
    if rows.dtype.element_ty == tl.int8:
        original = _scaled(x, fact(rows, INVERSE, i, mask_m, size, PAD), i, mask_m, axis, dim, TRANSFORM)
    else:
        mask = mask_m[:, None] & (axis < dim)[None, :]
        original = tl.load(rows + i.to(tl.int64)[:, None] * PAD + axis[None, :], mask=mask, other=0.0)
    return original


@triton.jit
def input_gradient(x, rows, gradient, along, i, mask_m, axis, size, dim, PAD: tl.constexpr, TRANSFORM: tl.constexpr,
                   NORMALIZE: tl.constexpr):  # fmt: skip
    """The gradient (M, D) by `x` from that by prepared rows. along (M,): its part along each unit row."""
    at = i.to(tl.int64)[:, None]
    mask = mask_m[:, None] & (axis < dim)[None, :]
    value = tl.load(x + at * dim + axis[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORMALIZE:
        unit = original(x, rows, i, mask_m, axis, size, dim, PAD, TRANSFORM)
        gradient = (gradient - along[:, None] * unit) * fact(rows, INVERSE, i, mask_m, size, PAD)[:, None]
    if TRANSFORM == "sigmoid":
        inside = original(x, rows, i, mask_m, axis, size, dim, PAD, TRANSFORM)
        gradient = gradient * (inside * (1.0 - inside))
    elif TRANSFORM == "cube":
        gradient = tl.where((value >= 0) & (value <= 1), gradient, 0.0)
    else:
        gradient = tl.where((value <= BOUND_) & (value >= -BOUND_), gradient, 0.0)  # a clamped one has no slope
    return gradient.to(tl.float32)


@triton.jit
def store_gradient(x, rows, by_x, gradient, i, mask_m, axis, size, dim, PAD: tl.constexpr, TRANSFORM: tl.constexpr,
                   NORMALIZE: tl.constexpr, ADDS: tl.constexpr = False):  # fmt: skip
    """Stores the gradient by `x` from that by prepared rows (M, D), float64, all coordinates at once. ADDS: to what is
    there."""
    along = tl.zeros((i.shape[0],), tl.float64)
    mask_d = axis < dim
    if NORMALIZE:
        unit = original(x, rows, i, mask_m, axis, size, dim, PAD, TRANSFORM)
        along = tl.sum(tl.where(mask_m[:, None] & mask_d[None, :], gradient * unit, 0.0), 1)
    gradient = input_gradient(x, rows, gradient, along, i, mask_m, axis, size, dim, PAD, TRANSFORM, NORMALIZE)
    out, inside = by_x + i.to(tl.int64)[:, None] * dim + axis[None, :], mask_m[:, None] & mask_d[None, :]
    if ADDS:
        gradient += tl.load(out, mask=inside, other=0.0)
    tl.store(out, gradient, mask=inside)


@triton.jit
def _chunks(x, rows, by_rows, by_x, size, dim, PAD: tl.constexpr, TRANSFORM: tl.constexpr, NORMALIZE: tl.constexpr,
            M: tl.constexpr, D: tl.constexpr):  # fmt: skip
    i = tl.program_id(0) * M + tl.arange(0, M)
    mask_m = i < size
    at = i.to(tl.int64)[:, None]
    along = tl.zeros((M,), tl.float64)
    if NORMALIZE:
        for start in range(0, dim, D):
            axis = start + tl.arange(0, D)
            mask = mask_m[:, None] & (axis < dim)[None, :]
            unit = original(x, rows, i, mask_m, axis, size, dim, PAD, TRANSFORM)
            along += tl.sum(unit * tl.load(by_rows + at * dim + axis[None, :], mask=mask, other=0.0), 1)
    for start in range(0, dim, D):
        axis = start + tl.arange(0, D)
        mask = mask_m[:, None] & (axis < dim)[None, :]
        gradient = tl.load(by_rows + at * dim + axis[None, :], mask=mask, other=0.0)
        gradient = input_gradient(x, rows, gradient, along, i, mask_m, axis, size, dim, PAD, TRANSFORM, NORMALIZE)
        tl.store(by_x + at * dim + axis[None, :], gradient, mask=mask)


def long_gradient(x, rows, by_rows, by_x, normalize, transform="clamp"):
    """`store_gradient` for rows too long for one program: from `by_rows` (B, D), float64, into `by_x`."""
    (size, dim), pad = x.shape, padded(x.shape[1])
    arguments = (x, rows, by_rows, by_x, size, dim)
    constants = {"PAD": pad, "TRANSFORM": transform, "NORMALIZE": normalize, "M": 8, "D": 128, **options()}
    _chunks[((size + 7) // 8,)](*arguments, **constants)
