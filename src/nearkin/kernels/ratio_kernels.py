# mypy: ignore-errors
"""The kernels of the log-ratio loss: a block of anchors at a time against all references, value and gradient together.

Of a row of ratios x the loss needs, for every reference, the number and the sum of those at the same label distance.
Where labels are numbers, references are sorted by them once for all anchors: the label distance of an anchor falls and
rises along the row, so the tied ones are at most two runs of neighbours, found by binary search with the exact distance
in float64. Where each row has its own label distances, each row has its own order. The sum of a run is the difference
of two running sums, which start anew with each tile of T references; `sums` has those of whole tiles. Imported when the
first kernel is launched.

stats: rows of float64, one entry per anchor. runs: for each sorted reference where the run of its equals starts, and
where it ends, (2, R). number: how many references count for each anchor, (B,).

Of rows as digits (`digit_kernels`) the last bit of `inverse`, and of the slope that takes its place, says whether the
pair is near: the gradient takes such pairs by their differences.
"""

from nearkin.kernels import digit_kernels
from nearkin.kernels.numerics import tl, triton
from nearkin.kernels.pair_kernels import ROUNDING, _products, _rows, _taint, _whole
from nearkin.kernels.row_kernels import ID, SQUARED, fact, input_gradient, original, squared_distances

LN2 = tl.constexpr(0.6931471805599453)
INFINITE = tl.constexpr(0x7FF0000000000000)  # bits of float64
MEAN, FACTOR, VALUE, PAIRS = (tl.constexpr(row) for row in range(4))  # rows of stats
STATISTICS = 4


@triton.jit
def _log_ratio(near, gap_bits):
    """log(near) - 2 log(gap) of positive float64, gap as bits: exact to float32's last digit of that of the leading
    digits, between log 1/4 and log 2."""
    small = gap_bits < 0x10000000000000  # too small to have an exponent
    gap_bits = tl.where(small, (gap_bits.to(tl.float64, bitcast=True) * 2.0**64).to(tl.int64, bitcast=True), gap_bits)
    near_bits = near.to(tl.int64, bitcast=True)
    exponent = (near_bits >> 52).to(tl.int32) - 2 * (gap_bits >> 52).to(tl.int32) + tl.where(small, 1151, 1023)
    leading = _leading(gap_bits)
    return exponent.to(tl.float64) * LN2 + tl.log(_leading(near_bits) / (leading * leading)).to(tl.float64)


@triton.jit
def _leading(bits):
    """The digits of float64 bits as a number from 1 to 2, float32."""
    return ((bits & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000).to(tl.float64, bitcast=True).to(tl.float32)


@triton.jit
def _marked(slope, near):
    """Float32 whose last bit is `near` (1 or 0)."""
    return ((slope.to(tl.int32, bitcast=True) & -2) | near).to(tl.float32, bitcast=True)


@triton.jit
def _mark(slope):
    """The last bit of float32."""
    return slope.to(tl.int32, bitcast=True) & 1


@triton.jit
def _label(labels, i, mask):
    return tl.load(labels + i, mask=mask, other=0).to(tl.float64)


@triton.jit(do_not_specialize=["others", "total"])
def _ranks(labels, anchor_labels, x, values, order, runs, number, in_order, others, total, dim, ALONE: tl.constexpr,
           M: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """Sorts labels by counting, and the rows of x with them; fills `runs` and `number`. Not-a-numbers come last, as in
    torch."""
    i = tl.program_id(0) * M + tl.arange(0, M)
    mask_m = i < total
    y = _label(labels, i, i < others)
    if not ALONE:
        y = tl.where(i < others, y, _label(anchor_labels, i - others, (i >= others) & mask_m))
    key = tl.where(y != y, float("inf"), y)[:, None]
    smaller = tl.zeros((M, N), tl.int32)
    equal = tl.zeros((M, N), tl.int32)
    earlier = tl.zeros((M, N), tl.int32)
    for start in range(0, others, N):
        k = start + tl.arange(0, N)
        mask_n = (k < others)[None, :]
        other = _label(labels, k, k < others)
        other = tl.where(other != other, float("inf"), other)[None, :]
        same = mask_n & (other == key)
        smaller += (mask_n & (other < key)).to(tl.int32)
        equal += same.to(tl.int32)
        earlier += (same & (k[None, :] < i[:, None])).to(tl.int32)
    first, equals = tl.sum(smaller, 1), tl.sum(equal, 1)
    place = first + tl.sum(earlier, 1)
    mask = i < others
    tl.store(runs + place, first, mask=mask)
    tl.store(runs + others + place, first + equals, mask=mask)
    tl.store(values + place, y, mask=mask)
    tl.store(order + place, i, mask=mask)
    anchor = place if ALONE else i - others
    tl.store(number + anchor, others - equals, mask=mask_m & (anchor >= 0))
    for start in range(0, dim, N):
        axis = start + tl.arange(0, N)
        inside = mask[:, None] & (axis < dim)[None, :]
        row = tl.load(x + i.to(tl.int64)[:, None] * dim + axis[None, :], mask=inside)
        tl.store(in_order + place.to(tl.int64)[:, None] * dim + axis[None, :], row, mask=inside)


@triton.jit(do_not_specialize=["first", "skip", "count", "size", "tiles", "span"])
def _ratios(a, b, gaps, ratios, inverse, sums, first, skip, count, size, others, dim, tiles, span, epsilon,
            MATRIX: tl.constexpr, RUNNING: tl.constexpr, SELF: tl.constexpr, PAD: tl.constexpr, K: tl.constexpr,
            ONCE: tl.constexpr, M: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """x = log(d² + ε) - 2 log gap of M anchors and `span` references: its running sums in each tile and the sums of
    the tiles (RUNNING), or x itself; and 1 / (d² + ε), 0 where that has no slope, from row `skip` of `inverse` on.
    MATRIX: gaps are given (count, R). SELF: anchors and references are the same rows."""
    k = tl.program_id(0) * M + tl.arange(0, M)
    mask_m = k < count
    i = first + tl.minimum(k, count - 1)
    label = fact(a, ID, i, mask_m, size, PAD)
    left = fact(a, SQUARED, i, mask_m, size, PAD)
    DIGITS: tl.constexpr = a.dtype.element_ty == tl.int8
    anchors = _whole(a, i, PAD, K, ONCE)
    begin = tl.program_id(1) * span
    for start in range(begin, tl.minimum(begin + span, others), T):
        j = start + tl.arange(0, T)
        mask_n = j < others
        passing = tl.minimum(j, others - 1)
        at = k.to(tl.int64)[:, None] * others + j[None, :]
        mask = mask_m[:, None] & mask_n[None, :]
        inner = _products(a, b, anchors, i, passing, PAD, K, ONCE)
        if DIGITS:
            high, low, unit, close = digit_kernels.distances(inner, a, b, i, passing, PAD, T, SELF, True)
            squared = (high.to(tl.float64) + low.to(tl.float64)) * unit.to(tl.float64) * unit.to(tl.float64)
        else:
            right = fact(b, SQUARED, j, mask_n, others, PAD)
            squared = squared_distances(inner, left, right, i, j, tl.full((), ROUNDING, tl.float64) * dim, False)
        if MATRIX:
            gap = tl.load(gaps + at, mask=mask, other=0.0)
        else:
            gap = tl.abs(label[:, None] - fact(b, ID, j, mask_n, others, PAD)[None, :])
        gap_bits = gap.to(tl.int64, bitcast=True)
        valid = mask & (gap_bits > 0) & (gap_bits < INFINITE)
        near = squared + epsilon
        ratio = tl.where(valid, _log_ratio(near, gap_bits), 0.0)
        slope = tl.where(valid & (squared > 0), 1.0 / near.to(tl.float32), 0.0)
        if DIGITS:
            slope = _marked(slope, close.to(tl.int32))
        tl.store(inverse + tl.cast(skip, tl.int64) * others + at, slope, mask=mask)
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


@triton.jit
def _accumulate(sums, tiles, N: tl.constexpr):
    """Sums of tiles become running sums over all tiles of a row, from 0; the sum of the row."""
    tl.store(sums, 0.0)
    total = tl.zeros((), tl.float64)
    for start in range(0, tiles, N):
        tile = start + tl.arange(0, N)
        value = tl.load(sums + 1 + tile, mask=tile < tiles, other=0.0)
        tl.store(sums + 1 + tile, total + tl.cumsum(value, 0), mask=tile < tiles)
        total += tl.sum(value, 0)
    return total


@triton.jit(do_not_specialize=["first", "size", "tiles"])
def _means(sums, number, stats, first, size, tiles, N: tl.constexpr):
    """The running sums over the tiles of one row, and its mean."""
    row = tl.program_id(0).to(tl.int64)
    i = first + tl.program_id(0)
    total = _accumulate(sums + row * (tiles + 1), tiles, N)
    mean = total / tl.maximum(tl.load(number + i), 1).to(tl.float64)
    tl.store(stats + MEAN * size + i, mean)


@triton.jit
def _search(values, y, bound, first, length, STRICT: tl.constexpr):
    """The first index, from `first` to first + length, whose value less y is at least `bound` (STRICT: above it)."""
    first = tl.zeros(bound.shape, tl.int32) + first
    length = tl.zeros((), tl.int32) + length
    while length > 0:
        half = (length + 1) // 2
        difference = tl.load(values + first + half - 1) - y
        if STRICT:
            before = difference <= bound
        else:
            before = difference < bound
        first = tl.where(before, first + half, first)
        length -= half
    return first


@triton.jit
def _search_one(values, y, bound, length, N: tl.constexpr):
    """The same for one bound among the first `length` values, N of them at a time."""
    first = tl.zeros((), tl.int32)
    length = tl.zeros((), tl.int32) + length
    while length > 0:
        step = (length + N - 1) // N
        last = (tl.arange(0, N) + 1) * step - 1
        before = tl.load(values + first + last, mask=last < length, other=float("inf")) - y < bound
        passed = tl.sum((before & (last < length)).to(tl.int32), 0) * step
        first += passed
        length = tl.minimum(length - passed, step - 1)
    return first


@triton.jit
def _sum_before(running, sums, j, mask, T: tl.constexpr):
    """The sum of the entries of a row before j."""
    inside = tl.load(running + j - 1, mask=mask & (j % T != 0), other=0.0)
    return inside + tl.load(sums + j // T, mask=mask, other=0.0)


@triton.jit
def _tied(values, runs, running, sums, y, signed, ratio, j, valid, mirror, mirror_length, others,
          OWN_ORDER: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """The number and the sum of the entries at the label distance of entry j, itself among them.

    signed: its value less y, whose size is the distance. mirror: where the values begin among which those on the other
    side of y are."""
    start, end = j, j + 1
    if not OWN_ORDER:
        start = tl.load(runs + j, mask=valid, other=0)
        end = tl.load(runs + others + j, mask=valid, other=0)
    # Neighbours whose labels differ, and yet their distances are the same number.
    before, after = valid & (start > 0), valid & (end < others)
    wider = before & (tl.load(values + start - 1, mask=before, other=0.0) - y == signed)
    wider = wider | (after & (tl.load(values + end, mask=after, other=0.0) - y == signed))
    if tl.max(wider.to(tl.int32), 0) > 0:
        start = tl.where(wider, _search(values, y, signed, 0, others, False), start)
        end = tl.where(wider, _search(values, y, signed, 0, others, True), end)
    several = valid & (end - start > 1)
    summed = _sum_before(running, sums, end, several, T) - _sum_before(running, sums, start, several, T)
    summed = tl.where(several, summed, ratio)
    number = tl.where(valid, end - start, 0)
    if not OWN_ORDER:
        start = _search(values, y, -signed, mirror, mirror_length, False)
        mirrored = valid & (start < others)
        mirrored = mirrored & (tl.load(values + start, mask=mirrored, other=0.0) - y == -signed)
        if tl.max(mirrored.to(tl.int32), 0) > 0:
            end = tl.load(runs + others + start, mask=mirrored, other=0)
            after = mirrored & (end < others)
            wider = after & (tl.load(values + end, mask=after, other=0.0) - y == -signed)
            if tl.max(wider.to(tl.int32), 0) > 0:
                end = tl.where(wider, _search(values, y, -signed, 0, others, True), end)
            summed += _sum_before(running, sums, end, mirrored, T) - _sum_before(running, sums, start, mirrored, T)
            number += tl.where(mirrored, end - start, 0)
    return number.to(tl.float64), summed


@triton.jit
def _conclude(stats, weights, i, mask, totals, untied, number, size, WEIGHTED: tl.constexpr):
    """Value, number of pairs and factor of the slopes of anchors, from sums over their references."""
    pairs = untied * 0.5  # each was seen from either side
    divisor = tl.maximum(pairs, 1.0)
    # 2 of the square of a difference, 2 of the squared distance
    factor = tl.where(pairs > 0, 4.0 * number * number / divisor, 0.0)
    if WEIGHTED:
        factor *= tl.load(weights + i, mask=mask, other=0.0).to(tl.float64)
    tl.store(stats + VALUE * size + i, tl.where(pairs > 0, totals / divisor, 0.0), mask=mask)
    tl.store(stats + PAIRS * size + i, pairs, mask=mask)
    tl.store(stats + FACTOR * size + i, factor, mask=mask)


@triton.jit(do_not_specialize=["first", "skip", "size", "tiles", "span"])
def _slopes(a, values, order, runs, number, running, sums, inverse, stats, terms, weights, first, skip, size, others,
            tiles, span, MATRIX: tl.constexpr, TIES: tl.constexpr, BACK: tl.constexpr, WHOLE: tl.constexpr,
            WEIGHTED: tl.constexpr, PAD: tl.constexpr, T: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """Of one anchor and `span` references: the terms of the value, the number of untied pairs, each from either side,
    and in place of `inverse` the slopes by squared distances, but for a factor of the anchor. WHOLE: these are all of
    its references, and the value is concluded. MATRIX: values are of each row, sorted with the order if TIES."""
    row = tl.program_id(0).to(tl.int64)
    i = first + tl.program_id(0)
    start = row * others
    inverse += (skip + row) * others
    running += start
    sums += row * (tiles + 1)
    y = tl.zeros((), tl.float64)
    valid_number = tl.load(number + i).to(tl.float64)
    if MATRIX:
        values += start
        order += start
    else:
        y = fact(a, ID, i, True, size, PAD)
    if WHOLE:
        mean = _accumulate(sums, tiles, 128) / tl.maximum(valid_number, 1.0)
        tl.debug_barrier()  # other threads read these sums
    else:
        mean = tl.load(stats + MEAN * size + i)
    totals = tl.zeros((N,), tl.float64)
    untied_pairs = tl.zeros((N,), tl.float64)
    begin = tl.program_id(1) * span
    end = tl.minimum(begin + span, others)
    mirror_end = tl.zeros((), tl.int32) + others
    for first_j in range(begin, end, N):
        j = first_j + tl.arange(0, N)
        mask = j < others
        signed = tl.load(values + j, mask=mask, other=0.0) - y
        valid = mask & (signed != 0) & (tl.abs(signed) < float("inf"))
        ratio = tl.load(running + j, mask=mask, other=0.0)
        ratio -= tl.load(running + j - 1, mask=mask & (j % T != 0), other=0.0)
        off = tl.where(valid, ratio - mean, 0.0)
        if TIES:
            mirror = mirror_end * 0
            if not MATRIX:  # the other side of y is passed from its end
                last = tl.load(values + tl.minimum(first_j + N, others) - 1)
                mirror = _search_one(values, y, y - last, mirror_end, N)
            tied, summed = _tied(values, runs, running, sums, y, signed, ratio, j, valid, mirror, mirror_end - mirror,
                                 others, MATRIX, T)  # fmt: skip
            mirror_end = mirror
            untied = tl.where(valid, valid_number - tied, 0.0)
            slope = untied * off + tl.where(valid, summed - tied * mean, 0.0)
        else:
            untied = tl.where(valid, valid_number - 1.0, 0.0)
            slope = valid_number * off
        totals += slope * off
        untied_pairs += untied
        if BACK:
            place = j
            if MATRIX and TIES:
                place = tl.load(order + j, mask=mask, other=0)
            scale = tl.load(inverse + place, mask=mask, other=0.0)
            slope = slope * scale.to(tl.float64) / tl.maximum(valid_number * valid_number, 1.0)
            slope = slope.to(tl.float32)
            if a.dtype.element_ty == tl.int8:
                slope = _marked(slope, _mark(scale))
            tl.store(inverse + place, slope, mask=mask)
    if WHOLE:
        _conclude(stats, weights, i, True, tl.sum(totals, 0), tl.sum(untied_pairs, 0), valid_number, size, WEIGHTED)
    else:
        segment = row * tl.num_programs(1) + tl.program_id(1)
        tl.store(terms + 2 * segment, tl.sum(totals, 0))
        tl.store(terms + 2 * segment + 1, tl.sum(untied_pairs, 0))


@triton.jit(do_not_specialize=["first", "count", "size", "segments"])
def _close(terms, number, stats, weights, first, count, size, segments, WEIGHTED: tl.constexpr, M: tl.constexpr,
           N: tl.constexpr):  # fmt: skip
    """Concludes M anchors from the terms of their segments."""
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
    valid_number = tl.load(number + i, mask=mask_m, other=0).to(tl.float64)
    _conclude(stats, weights, i, mask_m, tl.sum(totals, 1), tl.sum(untied, 1), valid_number, size, WEIGHTED)


@triton.jit
def _factors(stats, i, mask, size):
    return tl.load(stats + FACTOR * size + i, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["own_first", "count", "passing_first", "passing_count", "span", "out_first", "out_rows",
                               "size", "passing_rows"])  # fmt: skip
def _gradient(own, passing, slopes, stats, out, own_first, count, passing_first, passing_count, stride, passing_stride,
              span, out_first, out_rows, size, passing_rows, dim, ROLE: tl.constexpr, ADD: tl.constexpr,
              PAD: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """D coordinates of the gradient by M prepared rows `own`, from the slopes of their pairs with `span` rows that pass
    by, added to `out` (ADD), or stored there, a part of it for each span. ROLE: own rows are "anchors", "references",
    or "self", both. passing_rows: how many the others are in all."""
    k = tl.program_id(0) * M + tl.arange(0, M)
    mask_m = k < count
    axis = tl.program_id(2) * D + tl.arange(0, D)
    own_rows = own_first + tl.minimum(k, count - 1)
    DIGITS: tl.constexpr = own.dtype.element_ty == tl.int8
    if DIGITS:
        summed = digit_kernels.weighted_init(M, D)
    else:
        gradient = tl.zeros((M, D), tl.float64)
        weight = tl.zeros((M, N), tl.float64)
    own_factor = _factors(stats, own_first + k, mask_m & (ROLE != "references"), size)
    begin = tl.program_id(1) * span
    for start in range(begin, tl.minimum(begin + span, passing_count), N):
        p = start + tl.arange(0, N)
        mask_n = p < passing_count
        mask = mask_m[:, None] & mask_n[None, :]
        at = k.to(tl.int64)[:, None] * stride + p.to(tl.int64)[None, :] * passing_stride
        stored = tl.load(slopes + at, mask=mask, other=0.0)
        near = _mark(stored)
        slope = stored.to(tl.float64)
        if ROLE == "self":
            back = k.to(tl.int64)[:, None] * passing_stride + p.to(tl.int64)[None, :] * stride
            stored = tl.load(slopes + back, mask=mask, other=0.0)
            near = near | _mark(stored)
            slope = slope * own_factor[:, None] + stored.to(tl.float64) * _factors(stats, p, mask_n, size)[None, :]
        elif ROLE == "references":
            slope *= _factors(stats, passing_first + p, mask_n, size)[None, :]
        j = passing_first + tl.minimum(p, passing_count - 1)
        if DIGITS:
            near = mask & (near != 0)
            slope = slope.to(tl.float32)
            summed = digit_kernels.near_add(summed, slope, near, own, passing, own_rows, j, axis, PAD, N)
            slope = tl.where(near, 0.0, slope)
            summed = digit_kernels.weighted_add(
                summed, slope, passing, j, passing_first + start, axis, passing_rows, PAD, N, D
            )
        else:
            weight += slope
            gradient = tl.dot(slope, _rows(passing, j, axis, PAD, D), gradient, out_dtype=tl.float64)
    if DIGITS:
        high, low, weights = summed
        gradient = weights[:, None] * digit_kernels.exact_rows(own, own_rows, axis, PAD) - high.to(tl.float64)
        gradient -= low.to(tl.float64)
    else:
        gradient = tl.sum(weight, 1)[:, None] * _rows(own, own_rows, axis, PAD, D) - gradient
    if ROLE == "anchors":
        gradient *= own_factor[:, None]
    at = (tl.program_id(1).to(tl.int64) * out_rows + out_first + k)[:, None] * dim + axis[None, :]
    mask = mask_m[:, None] & (axis < dim)[None, :]
    if ADD:
        gradient += tl.load(out + at, mask=mask, other=0.0)
    tl.store(out + at, gradient, mask=mask)


@triton.jit(do_not_specialize=["size", "others"])
def _finish(a, b, values, stats, loss, facts, size, others, MATRIX: tl.constexpr, SELF: tl.constexpr,
            PAD: tl.constexpr, REDUCTION: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """The loss from the anchors' values; as facts the factor of its gradient, and 0 or NaN if inputs are not finite."""
    total = tl.zeros((N,), tl.float64)
    terms = tl.zeros((N,), tl.float64)
    taint = tl.zeros((N,), tl.float64)
    for start in range(0, size, N):
        i = start + tl.arange(0, N)
        mask = i < size
        term = tl.load(stats + VALUE * size + i, mask=mask, other=0.0)
        counts = tl.load(stats + PAIRS * size + i, mask=mask, other=0.0) > 0
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


@triton.jit(do_not_specialize=["size"])
def _by_input(x, rows, by_rows, order, upstream, facts, out, size, dim, SORTED: tl.constexpr, SCALED: tl.constexpr,
              NORMALIZE: tl.constexpr, PAD: tl.constexpr, M: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """The gradient by x from that by prepared rows; SORTED: both are in an order, from which the gradient is taken back
    again. SCALED: times the upstream and the loss's factor."""
    i = tl.program_id(0) * M + tl.arange(0, M)
    mask_m = i < size
    scale = tl.full((), 1.0, tl.float64)
    if SCALED:
        scale = tl.load(upstream).to(tl.float64) * tl.load(facts).to(tl.float64)
    place = i
    if SORTED:
        place = tl.load(order + i, mask=mask_m, other=0)
    along = tl.zeros((M,), tl.float64)
    if NORMALIZE:
        for start in range(0, dim, D):
            axis = start + tl.arange(0, D)
            mask = mask_m[:, None] & (axis < dim)[None, :]
            unit = original(x, rows, i, mask_m, axis, size, dim, PAD, "clamp")
            at = i.to(tl.int64)[:, None] * dim + axis[None, :]
            along += tl.sum(unit * tl.load(by_rows + at, mask=mask, other=0.0), 1)
    for start in range(0, dim, D):
        axis = start + tl.arange(0, D)
        mask = mask_m[:, None] & (axis < dim)[None, :]
        gradient = tl.load(by_rows + i.to(tl.int64)[:, None] * dim + axis[None, :], mask=mask, other=0.0) * scale
        gradient = input_gradient(x, rows, gradient, along * scale, i, mask_m, axis, size, dim, PAD, "clamp", NORMALIZE)
        tl.store(out + place.to(tl.int64)[:, None] * dim + axis[None, :], gradient, mask=mask)
