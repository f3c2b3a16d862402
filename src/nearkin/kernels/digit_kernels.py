# mypy: ignore-errors
"""Products of rows as exact sums of integers, for GPUs that do not multiply float64 on their matrix units.

A row, less the batch's centre, is a power of two times 31-bit numbers, each of four digits of 8 bits. Products of
digits are summed by the integer matrix units, which consumer cards have too, without any rounding: so inner products
are exact but for the last bit of the rows, equal rows are at distance exactly 0, and the order of sums does not matter.
Sums are put together as two float32 numbers. The gradient is a product of the same kind: slopes become four digits.

The buffer of prepared rows is of bytes: a record per row (four planes of digits, a header, and 32 bits more of each
number), the digits once more with rows as columns, the centre (float32), and the facts of `row_kernels` in float64.

31 bits are too few for rows that are nearly equal: in a tile with such pairs (`NEAR`), these are computed again, one
after the other, from differences of 63-bit numbers.
"""

from nearkin.kernels.numerics import tl, triton

# After a row's digits: its squared length in two parts, the power of two, its inverse, and the distance up to which
# rounding hides a difference, as in `core.distances`.
HEADER = tl.constexpr(32)  # bytes
HIGH, LOW, SCALE, INVERSE_SCALE, HIDDEN = (tl.constexpr(place) for place in range(5))
NEAR = tl.constexpr(2.0**-9)  # squared distance, by the sum of squared lengths of centred rows
ORIGIN = tl.constexpr(16)  # rows whose mean is the centre
SMALLEST = tl.constexpr(2.0**-126)  # power of two of a row
COLUMNS = tl.constexpr(128)  # the transposed digits have room for multiples of so many rows


def length(dim: int) -> int:
    """Digits per plane, as the integer units take them."""
    return -(-dim // 32) * 32


def size_in_bytes(size: int, dim: int) -> int:
    """Of the buffer of `size` prepared rows."""
    across = -(-size // COLUMNS.value) * COLUMNS.value
    return size * (8 * length(dim) + HEADER.value) + 4 * length(dim) * (across + 1) + 32 * size


@triton.jit
def _stride(PAD: tl.constexpr):
    return (PAD + 31) // 32 * 256 + HEADER


@triton.jit
def transposed_at(size, PAD: tl.constexpr):
    """Where the transposed digits begin, and how far apart two of their rows are."""
    return tl.cast(size, tl.int64) * _stride(PAD), (tl.cast(size, tl.int64) + COLUMNS - 1) // COLUMNS * COLUMNS


@triton.jit
def centre_at(rows, size, PAD: tl.constexpr):
    first, across = transposed_at(size, PAD)
    return rows + first + (PAD + 31) // 32 * 128 * across


@triton.jit
def centre(rows, axis, size, PAD: tl.constexpr):
    """Coordinates of the centre, float64."""
    at = centre_at(rows, size, PAD).to(tl.pointer_type(tl.float32)) + axis
    return tl.load(at, mask=axis < PAD, other=0.0).to(tl.float64)


@triton.jit
def facts_at(rows, size, PAD: tl.constexpr):
    return (centre_at(rows, size, PAD) + (PAD + 31) // 32 * 128).to(tl.pointer_type(tl.float64))


@triton.jit
def header(rows, i, place: tl.constexpr, PAD: tl.constexpr):
    """HIGH to HIDDEN of rows that exist, float32."""
    at = rows + i.to(tl.int64) * _stride(PAD) + (PAD + 31) // 32 * 128
    return tl.load(at.to(tl.pointer_type(tl.float32)) + place)


@triton.jit
def planes(rows, i, first, PAD: tl.constexpr, K: tl.constexpr):
    """K digits of each plane of rows that exist, four times (M, K)."""
    P: tl.constexpr = (PAD + 31) // 32 * 32
    at = rows + i.to(tl.int64)[:, None] * _stride(PAD) + (first + tl.arange(0, K))[None, :]
    return tl.load(at), tl.load(at + P), tl.load(at + 2 * P), tl.load(at + 3 * P)


@triton.jit
def _columns(rows, j, first, PAD: tl.constexpr, K: tl.constexpr):
    """The same as columns, four times (K, N)."""
    P: tl.constexpr = (PAD + 31) // 32 * 32
    at = rows + j.to(tl.int64)[None, :] * _stride(PAD) + (first + tl.arange(0, K))[:, None]
    return tl.load(at), tl.load(at + P), tl.load(at + 2 * P), tl.load(at + 3 * P)


@triton.jit
def _dot(a, b, total):
    return tl.dot(a, b, total, out_dtype=tl.int32)


@triton.jit
def _multiplied(total, a, b):
    """Adds the products of digits, by their weight: the sum of two places."""
    t0, t1, t2, t3, t4, t5, t6 = total
    a0, a1, a2, a3 = a
    b0, b1, b2, b3 = b
    t0 = _dot(a0, b0, t0)
    t1 = _dot(a1, b0, _dot(a0, b1, t1))
    t2 = _dot(a2, b0, _dot(a1, b1, _dot(a0, b2, t2)))
    t3 = _dot(a3, b0, _dot(a2, b1, _dot(a1, b2, _dot(a0, b3, t3))))
    t4 = _dot(a3, b1, _dot(a2, b2, _dot(a1, b3, t4)))
    t5 = _dot(a3, b2, _dot(a2, b3, t5))
    t6 = _dot(a3, b3, t6)
    return t0, t1, t2, t3, t4, t5, t6


@triton.jit
def joined(total):
    """Two float32 whose sum is the exact one but for 1e-12. Every factor is a power of two, so that the compiler's
    choice of instructions changes nothing: a row's product with an equal row is its squared length to the last bit."""
    t0, t1, t2, t3, t4, t5, t6 = total
    high = (t0 * 256 + t1 + (t2 >> 8)).to(tl.float32) * 2.0**-20
    low = (t2 & 255).to(tl.float32) * 65536.0 + t3.to(tl.float32) * 256.0
    low = low + t4.to(tl.float32) + (t5.to(tl.float32) + t6.to(tl.float32) * 0.00390625) * 0.00390625
    return high, low * 2.0**-44


@triton.jit
def products(a, b, anchors, i, j, PAD: tl.constexpr, K: tl.constexpr):
    """Inner products (M, N) of rows, each divided by its power of two, in two parts: of rows i and j that exist.

    anchors: the planes of rows i, where K digits are all there are."""
    zero = tl.zeros((i.shape[0], j.shape[0]), tl.int32)
    total = (zero, zero, zero, zero, zero, zero, zero)
    P: tl.constexpr = (PAD + 31) // 32 * 32
    if K == P:
        total = _multiplied(total, anchors, _columns(b, j, 0, PAD, K))
    else:
        for first in range(0, P, K):
            total = _multiplied(total, planes(a, i, first, PAD, K), _columns(b, j, first, PAD, K))
    return joined(total)


@triton.jit
def distances(inner, a, b, i, j, PAD: tl.constexpr, N: tl.constexpr, SELF: tl.constexpr, REFINE: tl.constexpr):
    """(M, N) squared distances in two parts, the length they are measured in ((high + low) · length²), and which pairs
    are near: where they are (REFINE), from their differences."""
    high, low = inner
    left, right = header(a, i, SCALE, PAD)[:, None], header(b, j, SCALE, PAD)[None, :]
    inverse_left, inverse_right = header(a, i, INVERSE_SCALE, PAD)[:, None], header(b, j, INVERSE_SCALE, PAD)[None, :]
    shrink_left, shrink_right = tl.minimum(left * inverse_right, 1.0), tl.minimum(right * inverse_left, 1.0)
    both = -2.0 * shrink_left * shrink_right
    shrink_left, shrink_right = shrink_left * shrink_left, shrink_right * shrink_right
    lengths, lost = _two_sum(
        header(a, i, HIGH, PAD)[:, None] * shrink_left, header(b, j, HIGH, PAD)[None, :] * shrink_right
    )
    high, lost_too = _two_sum(lengths, both * high)  # what they lose between rows of different lengths
    low = (header(a, i, LOW, PAD)[:, None] * shrink_left + header(b, j, LOW, PAD)[None, :] * shrink_right) + both * low
    low += lost + lost_too
    near = high + low < NEAR * lengths
    if SELF:
        near = near & (i[:, None] != j[None, :])
    if REFINE:  # noqa: SIM102  a condition of the compiler and one of the tile
        if tl.max(tl.max(near.to(tl.int32), 1), 0) > 0:
            high, low = _refined(high, low, near, a, b, i, j, PAD, N)
    hidden = tl.maximum(header(a, i, HIDDEN, PAD)[:, None], header(b, j, HIDDEN, PAD)[None, :])
    hidden = hidden * tl.minimum(inverse_left, inverse_right)
    far = high + low > hidden * hidden
    if SELF:
        far = far & (i[:, None] != j[None, :])
    return tl.where(far, high, 0.0), tl.where(far, low, 0.0), tl.maximum(left, right), near & far


@triton.jit
def _two_sum(a, b):
    """A sum, and what its rounding has lost."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


@triton.jit
def _first(near, j, N: tl.constexpr):
    """In each row of a tile its first near pair: which it is, and its column, j of the others' rows."""
    n = tl.arange(0, N)[None, :]
    chosen = near & (n == tl.min(tl.where(near, n, N), 1)[:, None])
    return chosen, tl.sum(tl.where(chosen, j[None, :], 0), 1)


@triton.jit
def _refined(high, low, near, a, b, i, j, PAD: tl.constexpr, N: tl.constexpr):
    """Squared distances, those of near pairs by differences."""
    waiting = near
    left = tl.max(tl.max(waiting.to(tl.int32), 1), 0)
    while left > 0:
        chosen, column = _first(waiting, j, N)
        squared = tl.zeros(i.shape, tl.float32)
        for start in range(0, (PAD + 31) // 32 * 32, 32):
            difference, _ = _difference(a, b, i, column, start + tl.arange(0, 32), PAD)
            squared += tl.sum(difference * difference, 1)
        high = tl.where(chosen, squared[:, None], high)
        low = tl.where(chosen, 0.0, low)
        waiting = waiting & (chosen == 0)
        left = tl.max(tl.max(waiting.to(tl.int32), 1), 0)
    return high, low


@triton.jit
def _difference(a, b, i, column, axis, PAD: tl.constexpr):
    """Coordinates of rows `column` of b less rows i of a, (M, D), by the larger of their powers of two, and these."""
    left, right = header(a, i, SCALE, PAD), header(b, column, SCALE, PAD)
    exponent, other = left.to(tl.int32, bitcast=True) >> 23, right.to(tl.int32, bitcast=True) >> 23
    drop = tl.minimum(tl.maximum(other - exponent, 0), 62).to(tl.int64)
    other_drop = tl.minimum(tl.maximum(exponent - other, 0), 62).to(tl.int64)
    number = _long_numbers(a, i, axis, PAD) >> drop[:, None]
    other_number = _long_numbers(b, column, axis, PAD) >> other_drop[:, None]
    return (other_number - number).to(tl.float32) * 2.0**-62, tl.maximum(left, right)


@triton.jit
def _long_numbers(rows, i, axis, PAD: tl.constexpr):
    """Coordinates of rows that exist as 63-bit integers, (M, D)."""
    P: tl.constexpr = (PAD + 31) // 32 * 32
    at = rows + i.to(tl.int64)[:, None] * _stride(PAD) + 4 * P + HEADER + 4 * axis[None, :]
    rest = tl.load(at.to(tl.pointer_type(tl.int32)), mask=(axis < P)[None, :], other=0)
    return (_numbers(rows, i, axis, PAD).to(tl.int64) << 32) + rest.to(tl.int64)


@triton.jit
def near_add(state, weight, near, a, b, i, j, axis, PAD: tl.constexpr, N: tl.constexpr):
    """Adds what near pairs (M, N) contribute to the sums of `weighted_add`: weights times differences of rows, with
    no weight, as the gradient takes the sum of weights times row i from them."""
    total, rest, weights = state
    if tl.max(tl.max(near.to(tl.int32), 1), 0) > 0:
        rest = _near_added(rest, weight, near, a, b, i, j, axis, PAD, N)
    return total, rest, weights


@triton.jit
def _near_added(rest, weight, near, a, b, i, j, axis, PAD: tl.constexpr, N: tl.constexpr):
    left = tl.max(tl.max(near.to(tl.int32), 1), 0)
    while left > 0:
        chosen, column = _first(near, j, N)
        difference, scale = _difference(a, b, i, column, axis, PAD)
        rest += (tl.sum(tl.where(chosen, weight, 0.0), 1) * scale)[:, None] * difference
        near = near & (chosen == 0)
        left = tl.max(tl.max(near.to(tl.int32), 1), 0)
    return rest


@triton.jit
def _power_above(x):
    """The power of two above each positive float32, and its inverse."""
    exponent = tl.minimum(tl.maximum((x.to(tl.int32, bitcast=True) >> 23) + 1, 1), 253)
    return (exponent << 23).to(tl.float32, bitcast=True), ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def digit(number):
    """The lowest digit of integers, -128 to 127, and the integers without it."""
    low = ((number + 128) & 255) - 128
    return low.to(tl.int8), (number - low) >> 8


@triton.jit
def _numbered(weight):
    """Of float32 (M, N): a power of two above each row, and the row as 31-bit integers in parts of it."""
    peak, inverse = _power_above(tl.max(tl.abs(weight), 1))
    return peak, tl.floor(weight * inverse[:, None] * 1073741824.0 + 0.5).to(tl.int32)


@triton.jit
def weighted_init(M: tl.constexpr, D: tl.constexpr):
    """Sums of weighted rows, in two parts, and of weights."""
    return tl.zeros((M, D), tl.float32), tl.zeros((M, D), tl.float32), tl.zeros((M,), tl.float64)


@triton.jit
def weighted_add(state, weight, b, j, start, axis, others, PAD: tl.constexpr, N: tl.constexpr, D: tl.constexpr):
    """Adds weights (M, N) times rows j of b from `start` on, coordinates `axis`. Weights of rows that do not exist: 0.

    Weights are rounded to 30 bits of the largest in each row of the tile; their own sum is exact to as many."""
    total, rest, weights = state
    P: tl.constexpr = (PAD + 31) // 32 * 32
    peak, number = _numbered(weight)
    upper, lower = tl.sum(number >> 15, 1).to(tl.float64), tl.sum(number & 32767, 1).to(tl.float64)
    weights += (upper * 32768.0 + lower) * (peak.to(tl.float64) * 2.0**-30)
    weights += tl.sum(weight * 0.0, 1).to(tl.float64)  # NaN stays NaN
    peak, number = _numbered(weight * header(b, j, SCALE, PAD)[None, :])
    w3, number = digit(number)
    w2, number = digit(number)
    w1, number = digit(number)
    w0 = number.to(tl.int8)
    first, across = transposed_at(others, PAD)
    at = b + first + axis.to(tl.int64)[:, None] * across + (start + tl.arange(0, N))[None, :]
    if P % D == 0:
        x0, x1 = tl.trans(tl.load(at)), tl.trans(tl.load(at + P * across))
        x2, x3 = tl.trans(tl.load(at + 2 * P * across)), tl.trans(tl.load(at + 3 * P * across))
    else:
        inside = (axis < P)[:, None]
        x0 = tl.trans(tl.load(at, mask=inside, other=0))
        x1 = tl.trans(tl.load(at + P * across, mask=inside, other=0))
        x2 = tl.trans(tl.load(at + 2 * P * across, mask=inside, other=0))
        x3 = tl.trans(tl.load(at + 3 * P * across, mask=inside, other=0))
    zero = tl.zeros((weight.shape[0], D), tl.int32)
    t0 = _dot(w0, x0, zero)
    t1 = _dot(w1, x0, _dot(w0, x1, zero))
    t2 = _dot(w2, x0, _dot(w1, x1, _dot(w0, x2, zero)))
    t3 = _dot(w3, x0, _dot(w2, x1, _dot(w1, x2, _dot(w0, x3, zero))))
    factor = (peak * 2.0**-20)[:, None]
    t0 = t0 * 256 + t1
    high = t0.to(tl.float32)
    low = (t0 - high.to(tl.int32)).to(tl.float32)
    low = (low + (t2.to(tl.float32) + t3.to(tl.float32) * 0.00390625) * 0.00390625) * factor
    high = high * factor
    larger = total + high
    part = larger - total
    rest += low + ((total - (larger - part)) + (high - part))
    return larger, rest, weights


@triton.jit
def gathered_add(state, weight, a, b, i, column, axis, PAD: tl.constexpr):
    """Adds weight (M,) times the difference of one row of b, none where the column is below 0, and row i of a: as
    `near_add` does."""
    total, rest, weights = state
    difference, scale = _difference(a, b, i, tl.maximum(column, 0), axis, PAD)
    high = (tl.where(column >= 0, weight, 0.0) * scale)[:, None] * difference
    larger = total + high
    part = larger - total
    rest += (total - (larger - part)) + (high - part)
    return larger, rest, weights


@triton.jit
def close_pairs(distance, a, b, i, j, PAD: tl.constexpr, SQUARED: tl.constexpr):
    """Which pairs of a tile of distances are near, roughly: closer than √NEAR lengths."""
    scale = tl.maximum(header(a, i, SCALE, PAD)[:, None], header(b, j, SCALE, PAD)[None, :])
    return distance < (scale * scale * NEAR if SQUARED else scale * 0.0442)


@triton.jit
def _numbers(rows, i, axis, PAD: tl.constexpr):
    """Coordinates of rows that exist as 31-bit integers, (M, D)."""
    P: tl.constexpr = (PAD + 31) // 32 * 32
    at = rows + i.to(tl.int64)[:, None] * _stride(PAD) + axis[None, :]
    inside = (axis < P)[None, :]
    number = tl.load(at, mask=inside, other=0).to(tl.int32)
    number = number * 256 + tl.load(at + P, mask=inside, other=0).to(tl.int32)
    number = number * 256 + tl.load(at + 2 * P, mask=inside, other=0).to(tl.int32)
    return number * 256 + tl.load(at + 3 * P, mask=inside, other=0).to(tl.int32)


@triton.jit
def exact_rows(rows, i, axis, PAD: tl.constexpr):
    """Coordinates of prepared rows that exist, less the centre, (M, D) float64."""
    number = _numbers(rows, i, axis, PAD)
    return number.to(tl.float64) * (header(rows, i, SCALE, PAD).to(tl.float64) * 2.0**-30)[:, None]
