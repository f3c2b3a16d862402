# mypy: ignore-errors
"""The kernels of the log-ratio loss: a block of anchors at a time against all references, value and gradient together.

Of a row of ratios x the loss needs, for every reference, the number and the sum of those at the same label distance.
Where labels are numbers, references are sorted by them once for all anchors: the label distance of an anchor falls and
rises along the row, so the tied ones are at most two runs of neighbours, found by binary search with the exact distance
in float64. Where each row has its own label distances, each row has its own order. The sum of a run is the difference
of two running sums, which start anew with each tile of T references; `sums` has those of whole tiles. Imported when the
first kernel is launched.
"""

from nearkin.kernels.numerics import tl, triton
from nearkin.kernels.pair_kernels import ROUNDING, _products, _rows, _taint
from nearkin.kernels.row_kernels import ID, SQUARED, fact, squared_distances

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _log(v):
    """Logarithms of positive float64, as exact as float32 makes that of the leading digits."""
    small = v < 2.2250738585072014e-308
    bits = tl.where(small, v * 18446744073709551616.0, v).to(tl.int64, bitcast=True)  # 2^64
    exponent = (bits >> 52).to(tl.int32) - tl.where(small, 1087, 1023)
    leading = ((bits & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000).to(tl.float64, bitcast=True)
    return exponent.to(tl.float64) * LN2 + tl.log(leading.to(tl.float32)).to(tl.float64)


@triton.jit
def _search(values, y, gap, low, high, rising, steps, STRICT: tl.constexpr):
    """The first index from low to high where the label distance to y reaches `gap` (STRICT: passes it), rising or
    falling along the sorted values; high where none does."""
    for _ in range(steps):
        middle = (low + high) // 2
        inside = low < high
        there = tl.abs(y - tl.load(values + middle, mask=inside, other=0.0))
        if STRICT:
            beyond = tl.where(rising, there > gap, there < gap)
        else:
            beyond = tl.where(rising, there >= gap, there <= gap)
        high = tl.where(inside & beyond, middle, high)
        low = tl.where(inside & (beyond == 0), middle + 1, low)
    return high


@triton.jit(do_not_specialize=["size", "shift", "others", "steps"])
def _runs(queries, values, starts, ends, number, size, shift, others, steps, N: tl.constexpr):
    """Where each query would begin and end among the sorted values; from `shift` on, how many values differ from it."""
    i = tl.program_id(0) * N + tl.arange(0, N)
    mask = i < size
    y = tl.load(queries + i, mask=mask, other=0.0)
    different = tl.zeros((N,), tl.int32) + others
    for END in tl.static_range(2):
        low = tl.zeros((N,), tl.int32)
        high = low + others
        for _ in range(steps):
            middle = (low + high) // 2
            inside = low < high
            value = tl.load(values + middle, mask=inside, other=0.0)
            beyond = value > y if END else value >= y
            high = tl.where(inside & beyond, middle, high)
            low = tl.where(inside & (beyond == 0), middle + 1, low)
        tl.store((ends if END else starts) + i, high, mask=mask)
        different = different - high if END else different + high
    tl.store(number + i - shift, different, mask=mask & (i >= shift))


@triton.jit(do_not_specialize=["first", "count", "size", "tiles", "span"])
def _ratios(a, b, gaps, ratios, inverse, sums, first, count, size, others, dim, tiles, span, epsilon,
            MATRIX: tl.constexpr, RUNNING: tl.constexpr, PAD: tl.constexpr, K: tl.constexpr, ONCE: tl.constexpr,
            M: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """x = log(d² + ε) - 2 log gap of M anchors and `span` references: its running sums in each tile and the sums of
    the tiles (RUNNING), or x itself; and 1 / (d² + ε), 0 where that has no slope. MATRIX: gaps are given (count, R)."""
    k = tl.program_id(0) * M + tl.arange(0, M)
    mask_m = k < count
    i = first + tl.minimum(k, count - 1)
    label = fact(a, ID, i, mask_m, size, PAD)
    left = fact(a, SQUARED, i, mask_m, size, PAD)
    anchors = 0.0
    if ONCE:
        anchors = _rows(a, i, tl.arange(0, PAD), PAD, PAD)
    begin = tl.program_id(1) * span
    for start in range(begin, tl.minimum(begin + span, others), T):
        j = start + tl.arange(0, T)
        mask_n = j < others
        passing = tl.minimum(j, others - 1)
        at = k.to(tl.int64)[:, None] * others + j[None, :]
        mask = mask_m[:, None] & mask_n[None, :]
        inner = _products(a, b, anchors, i, passing, PAD, K, ONCE)
        right = fact(b, SQUARED, j, mask_n, others, PAD)
        squared = squared_distances(inner, left, right, i, j, tl.full((), ROUNDING, tl.float64) * dim, False)
        if MATRIX:
            gap = tl.load(gaps + at, mask=mask, other=0.0)
        else:
            gap = tl.abs(label[:, None] - fact(b, ID, j, mask_n, others, PAD)[None, :])
        valid = mask & (gap > 0) & (gap < float("inf"))
        near = squared + epsilon
        ratio = tl.where(valid, _log(near) - 2.0 * _log(tl.where(valid, gap, 1.0)), 0.0)
        tl.store(inverse + at, tl.where(valid & (squared > 0), 1.0 / near.to(tl.float32), 0.0), mask=mask)
        if RUNNING:
            tl.store(ratios + at, tl.cumsum(ratio, 1), mask=mask)
            tl.store(sums + k.to(tl.int64) * (tiles + 1) + start // T + 1, tl.sum(ratio, 1), mask=mask_m)
        else:
            tl.store(ratios + at, ratio, mask=mask)


@triton.jit(do_not_specialize=["tiles"])
def _running(ratios, order, running, sums, others, tiles, R: tl.constexpr, T: tl.constexpr):
    """The running sums of a row in its own order, and the sums of R tiles."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1) * R + tl.arange(0, R)
    j = tile[:, None] * T + tl.arange(0, T)[None, :]
    source = tl.load(order + row * others + j, mask=j < others, other=0)
    ratio = tl.load(ratios + row * others + source, mask=j < others, other=0.0)
    tl.store(running + row * others + j, tl.cumsum(ratio, 1), mask=j < others)
    tl.store(sums + row * (tiles + 1) + tile + 1, tl.sum(ratio, 1), mask=tile < tiles)


@triton.jit(do_not_specialize=["first", "tiles"])
def _offsets(sums, mean, number, first, tiles, N: tl.constexpr):
    """Sums of tiles become running sums over all tiles of a row, from 0; and the mean of the row."""
    row = tl.program_id(0).to(tl.int64)
    sums += row * (tiles + 1)
    tl.store(sums, 0.0)
    total = tl.zeros((), tl.float64)
    for start in range(0, tiles, N):
        tile = start + tl.arange(0, N)
        value = tl.load(sums + 1 + tile, mask=tile < tiles, other=0.0)
        tl.store(sums + 1 + tile, total + tl.cumsum(value, 0), mask=tile < tiles)
        total += tl.sum(value, 0)
    tl.store(mean + row, total / tl.maximum(tl.load(number + first + row), 1).to(tl.float64))


@triton.jit
def _sum_before(running, sums, j, mask, T: tl.constexpr):
    """The sum of the entries of a row before j."""
    inside = tl.load(running + j - 1, mask=mask & (j % T != 0), other=0.0)
    return inside + tl.load(sums + j // T, mask=mask, other=0.0)


@triton.jit
def _tied(values, starts, ends, running, sums, y, gap, ratio, j, valid, zero, beyond, others, steps,
          OWN_ORDER: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """The number and the sum of the entries at the label distance of entry j, itself among them.

    zero to beyond: the references at distance 0; left of them distances fall, right of them they rise."""
    if OWN_ORDER:
        rising = valid | True
        low, high = j * 0, j * 0 + others
        start, end = j, j + 1
    else:
        rising = j >= beyond
        low, high = tl.where(rising, beyond, 0), tl.where(rising, others, zero)
        start = tl.load(starts + j, mask=valid, other=0)
        end = tl.load(ends + j, mask=valid, other=0)
    # Neighbours whose labels differ, and yet their distances are the same number.
    before, after = valid & (start > low), valid & (end < high)
    wider = before & (tl.abs(y - tl.load(values + start - 1, mask=before, other=0.0)) == gap)
    wider = wider | (after & (tl.abs(y - tl.load(values + end, mask=after, other=0.0)) == gap))
    if tl.max(wider.to(tl.int32), 0) > 0:
        start = tl.where(wider, _search(values, y, gap, low, high, rising, steps, False), start)
        end = tl.where(wider, _search(values, y, gap, low, high, rising, steps, True), end)
    several = valid & (end - start > 1)
    total = _sum_before(running, sums, end, several, T) - _sum_before(running, sums, start, several, T)
    total = tl.where(several, total, ratio)
    number = tl.where(valid, end - start, 0)
    if not OWN_ORDER:
        low, high = tl.where(rising, 0, beyond), tl.where(rising, zero, others)  # the other side
        start = _search(values, y, gap, low, high, rising == 0, steps, False)
        found = valid & (start < high)
        found = found & (tl.abs(y - tl.load(values + start, mask=found, other=0.0)) == gap)
        if tl.max(found.to(tl.int32), 0) > 0:
            end = tl.load(ends + start, mask=found, other=0)
            after = found & (end < high)
            wider = after & (tl.abs(y - tl.load(values + end, mask=after, other=0.0)) == gap)
            if tl.max(wider.to(tl.int32), 0) > 0:
                end = tl.where(wider, _search(values, y, gap, low, high, rising == 0, steps, True), end)
            total += _sum_before(running, sums, end, found, T) - _sum_before(running, sums, start, found, T)
            number += tl.where(found, end - start, 0)
    return number.to(tl.float64), total


@triton.jit(do_not_specialize=["first", "shift", "size", "tiles", "steps"])
def _slopes(a, values, order, starts, ends, running, sums, mean, number, inverse, terms, first, shift, size, others,
            tiles, steps, MATRIX: tl.constexpr, TIES: tl.constexpr, BACK: tl.constexpr, PAD: tl.constexpr,
            T: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """Of one anchor and N references: the terms of the value, the number of untied pairs, each from either side, and
    in place of `inverse` the slopes by squared distances, but for a factor of the anchor. shift: where the anchors'
    entries of `starts` and `ends` begin. MATRIX: values are of each row, sorted with the order if TIES."""
    row = tl.program_id(0).to(tl.int64)
    i = first + tl.program_id(0)
    start = row * others
    j = tl.program_id(1) * N + tl.arange(0, N)
    mask = j < others
    zero = 0
    beyond = 0
    y = tl.zeros((), tl.float64)
    if MATRIX:
        values += start
    else:
        zero = tl.load(starts + shift + i)
        beyond = tl.load(ends + shift + i)
        y = fact(a, ID, i, True, size, PAD)
    gap = tl.abs(y - tl.load(values + j, mask=mask, other=0.0))
    valid = mask & (gap > 0) & (gap < float("inf"))
    running += start
    ratio = tl.load(running + j, mask=mask, other=0.0)
    ratio -= tl.load(running + j - 1, mask=mask & (j % T != 0), other=0.0)
    average = tl.load(mean + row)
    valid_number = tl.load(number + i).to(tl.float64)
    off = tl.where(valid, ratio - average, 0.0)
    if TIES:
        tied, total = _tied(values, starts, ends, running, sums + row * (tiles + 1), y, gap, ratio, j, valid, zero,
                            beyond, others, steps, MATRIX, T)  # fmt: skip
        untied = tl.where(valid, valid_number - tied, 0.0)
        slope = untied * off + tl.where(valid, total - tied * average, 0.0)
    else:
        untied = tl.where(valid, valid_number - 1.0, 0.0)
        slope = valid_number * off
    segment = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(terms + 2 * segment, tl.sum(slope * off, 0))
    tl.store(terms + 2 * segment + 1, tl.sum(untied, 0))
    if BACK:
        place = j.to(tl.int64)
        if MATRIX and TIES:
            place = tl.load(order + start + j, mask=mask, other=0)
        scale = tl.load(inverse + start + place, mask=mask, other=0.0).to(tl.float64)
        slope = slope * scale / tl.maximum(valid_number * valid_number, 1.0)
        tl.store(inverse + start + place, slope.to(tl.float32), mask=mask)


@triton.jit(do_not_specialize=["first", "count", "segments"])
def _close(terms, number, weights, value, pairs, factor, first, count, segments, WEIGHTED: tl.constexpr,
           M: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """Value and number of pairs of M anchors from their segments, and the factor of their slopes."""
    k = tl.program_id(0) * M + tl.arange(0, M)
    mask_m = k < count
    totals = tl.zeros((M, N), tl.float64)
    untied = tl.zeros((M, N), tl.float64)
    for start in range(0, segments, N):
        segment = start + tl.arange(0, N)
        at = 2 * (k.to(tl.int64)[:, None] * segments + segment[None, :])
        mask = mask_m[:, None] & (segment < segments)[None, :]
        totals += tl.load(terms + at, mask=mask, other=0.0)
        untied += tl.load(terms + at + 1, mask=mask, other=0.0)
    i = first + k
    num_pairs = tl.sum(untied, 1) * 0.5
    divisor = tl.maximum(num_pairs, 1.0)
    all_valid = tl.load(number + i, mask=mask_m, other=0).to(tl.float64)
    tl.store(value + i, tl.where(num_pairs > 0, tl.sum(totals, 1) / divisor, 0.0), mask=mask_m)
    tl.store(pairs + i, num_pairs, mask=mask_m)
    # 2 of the square of a difference, 2 of the squared distance
    slope = tl.where(num_pairs > 0, 4.0 * all_valid * all_valid / divisor, 0.0)
    if WEIGHTED:
        slope *= tl.load(weights + i, mask=mask_m, other=0.0).to(tl.float64)
    tl.store(factor + k, slope, mask=mask_m)


@triton.jit(do_not_specialize=["own_first", "count", "passing_first", "passing_count", "span", "out_first", "out_rows"])
def _gradient(own, passing, slopes, factor, out, own_first, count, passing_first, passing_count, stride, passing_stride,
              span, out_first, out_rows, dim, ANCHORS: tl.constexpr, ADD: tl.constexpr, PAD: tl.constexpr,
              M: tl.constexpr, N: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """D coordinates of the gradient by M prepared rows `own`, from the slopes of their pairs with `span` rows that pass
    by, added to `out` (ADD), or stored there, a part of it for each span. ANCHORS: own rows are the anchors."""
    k = tl.program_id(0) * M + tl.arange(0, M)
    mask_m = k < count
    axis = tl.program_id(2) * D + tl.arange(0, D)
    gradient = tl.zeros((M, D), tl.float64)
    weight = tl.zeros((M, N), tl.float64)
    begin = tl.program_id(1) * span
    for start in range(begin, tl.minimum(begin + span, passing_count), N):
        p = start + tl.arange(0, N)
        mask_n = p < passing_count
        at = k.to(tl.int64)[:, None] * stride + p.to(tl.int64)[None, :] * passing_stride
        slope = tl.load(slopes + at, mask=mask_m[:, None] & mask_n[None, :], other=0.0).to(tl.float64)
        if not ANCHORS:
            slope *= tl.load(factor + p, mask=mask_n, other=0.0)[None, :]
        weight += slope
        rows = _rows(passing, passing_first + tl.minimum(p, passing_count - 1), axis, PAD, D)
        gradient = tl.dot(slope, rows, gradient, out_dtype=tl.float64)
    rows = _rows(own, own_first + tl.minimum(k, count - 1), axis, PAD, D)
    gradient = tl.sum(weight, 1)[:, None] * rows - gradient
    if ANCHORS:
        gradient *= tl.load(factor + k, mask=mask_m, other=0.0)[:, None]
    at = (tl.program_id(1).to(tl.int64) * out_rows + out_first + k)[:, None] * dim + axis[None, :]
    mask = mask_m[:, None] & (axis < dim)[None, :]
    if ADD:
        gradient += tl.load(out + at, mask=mask, other=0.0)
    tl.store(out + at, gradient, mask=mask)


@triton.jit(do_not_specialize=["size", "others"])
def _finish(a, b, values, value, pairs, loss, facts, size, others, MATRIX: tl.constexpr, SELF: tl.constexpr,
            PAD: tl.constexpr, REDUCTION: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """The loss from the anchors' values; as facts the factor of its gradient, and 0 or NaN if inputs are not finite."""
    total = tl.zeros((N,), tl.float64)
    terms = tl.zeros((N,), tl.float64)
    taint = tl.zeros((N,), tl.float64)
    for start in range(0, size, N):
        i = start + tl.arange(0, N)
        mask = i < size
        term = tl.load(value + i, mask=mask, other=0.0)
        counts = tl.load(pairs + i, mask=mask, other=0.0) > 0
        if REDUCTION == "active":
            counts = counts & ((term <= 0) == 0)  # a NaN is never inactive
        total += tl.where(counts, term, 0.0)
        terms += counts.to(tl.float64)
        if not MATRIX:  # not-a-numbers come last in the order
            y = fact(a, ID, i, mask, size, PAD)
            farthest = tl.abs(y - tl.load(values)) * 0.0 + tl.abs(y - tl.load(values + others - 1)) * 0.0
            taint += tl.where(mask, farthest, 0.0)
    tainted = tl.sum(taint, 0) + _taint(a, size, PAD, N)
    if not SELF:
        tainted += _taint(b, others, PAD, N)
    number = tl.sum(terms, 0)
    share = tl.where(number > 0, 1.0 / tl.maximum(number, 1.0), 0.0)
    if REDUCTION == "sum":
        share = share * 0.0 + 1.0
    tl.store(loss, (tl.sum(total, 0) * share + tainted).to(tl.float32))
    tl.store(facts, share.to(tl.float32))
    tl.store(facts + 1, tainted.to(tl.float32))
