# mypy: ignore-errors
"""The kernels of the log-ratio loss: a block of anchors at a time against all references, value and gradient together.

Of a row of ratios x the loss needs, for every reference, the number and the sum of those at the same label distance.
Where labels are numbers, references are sorted by them once for all anchors: the label distance of an anchor falls and
rises along the row, so the tied ones are at most two runs of neighbours, found by binary search with the exact distance
in float64. Where each row has its own label distances, each row has its own order. The sum of a run is the difference
of two running sums, which start anew with each tile of T references; `sums` has those of whole tiles. Imported when the
first kernel is launched.

stats: rows of float64, one entry per anchor. runs: of sorted references, then of anchors apart from them (`total` of
both), where the run of their equals starts and where it ends, and for anchors how many references differ.
"""

from nearkin.kernels.numerics import tl, triton
from nearkin.kernels.pair_kernels import ROUNDING, _products, _rows, _taint
from nearkin.kernels.row_kernels import ID, SQUARED, fact, input_gradient, squared_distances

LN2 = tl.constexpr(0.6931471805599453)
MEAN, FACTOR, VALUE, PAIRS = (tl.constexpr(row) for row in range(4))  # rows of stats
STATISTICS = 4


@triton.jit
def _log(v):
    """Logarithms of positive float64, as exact as float32 makes that of the leading digits."""
    small = v < 2.2250738585072014e-308
    bits = tl.where(small, v * 18446744073709551616.0, v).to(tl.int64, bitcast=True)  # 2^64
    exponent = (bits >> 52).to(tl.int32) - tl.where(small, 1087, 1023)
    leading = ((bits & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000).to(tl.float64, bitcast=True)
    return exponent.to(tl.float64) * LN2 + tl.log(leading.to(tl.float32)).to(tl.float64)


@triton.jit
def _label(labels, i, mask):
    return tl.load(labels + i, mask=mask, other=0).to(tl.float64)


@triton.jit(do_not_specialize=["others", "size", "total"])
def _ranks(labels, anchor_labels, values, order, runs, others, size, total, ALONE: tl.constexpr, M: tl.constexpr,
           N: tl.constexpr):  # fmt: skip
    """Sorts labels by counting, and fills `runs`; not-a-numbers come last, as in torch."""
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
    first, number = tl.sum(smaller, 1), tl.sum(equal, 1)
    place = tl.where(i < others, first + tl.sum(earlier, 1), i)
    tl.store(runs + place, first, mask=mask_m)
    tl.store(runs + total + place, first + number, mask=mask_m)
    anchor = place - (total - size)
    tl.store(runs + 2 * total + anchor, others - number, mask=mask_m & (anchor >= 0))
    tl.store(values + place, y, mask=i < others)
    tl.store(order + place, i, mask=i < others)


@triton.jit(do_not_specialize=["first", "skip", "count", "size", "tiles", "span"])
def _ratios(a, b, gaps, ratios, inverse, sums, first, skip, count, size, others, dim, tiles, span, epsilon,
            MATRIX: tl.constexpr, RUNNING: tl.constexpr, PAD: tl.constexpr, K: tl.constexpr, ONCE: tl.constexpr,
            M: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """x = log(d² + ε) - 2 log gap of M anchors and `span` references: its running sums in each tile and the sums of
    the tiles (RUNNING), or x itself; and 1 / (d² + ε), 0 where that has no slope, from row `skip` of `inverse` on.
    MATRIX: gaps are given (count, R)."""
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
        slope = tl.where(valid & (squared > 0), 1.0 / near.to(tl.float32), 0.0)
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


@triton.jit(do_not_specialize=["first", "total", "size", "tiles"])
def _means(sums, runs, stats, first, total, size, tiles, N: tl.constexpr):
    """The running sums over the tiles of one row, and its mean."""
    row = tl.program_id(0).to(tl.int64)
    i = first + tl.program_id(0)
    number = tl.load(runs + 2 * total + i)
    mean = _accumulate(sums + row * (tiles + 1), tiles, N) / tl.maximum(number, 1).to(tl.float64)
    tl.store(stats + MEAN * size + i, mean)


@triton.jit
def _search(values, y, bound, low, high, width, STRICT: tl.constexpr):
    """The first index from low to high whose value less y is at least `bound` (STRICT: above it), or high. width: a
    power of two above the number of values."""
    low -= 1
    while width > 1:
        width = width // 2
        middle = low + width
        difference = tl.load(values + middle, mask=middle < high, other=float("inf")) - y
        if STRICT:
            before = (middle < high) & (difference <= bound)
        else:
            before = (middle < high) & (difference < bound)
        low = tl.where(before, middle, low)
    return low + 1


@triton.jit
def _sum_before(running, sums, j, mask, T: tl.constexpr):
    """The sum of the entries of a row before j."""
    inside = tl.load(running + j - 1, mask=mask & (j % T != 0), other=0.0)
    return inside + tl.load(sums + j // T, mask=mask, other=0.0)


@triton.jit
def _tied(values, runs, running, sums, y, signed, ratio, j, valid, zero, beyond, total, others, width,
          OWN_ORDER: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """The number and the sum of the entries at the label distance of entry j, itself among them.

    signed: its value less y, whose size is the distance. zero to beyond: the references at distance 0."""
    if OWN_ORDER:
        low, high = j * 0, j * 0 + others
        start, end = j, j + 1
    else:
        rising = j >= beyond
        low, high = tl.where(rising, beyond, 0), tl.where(rising, others, zero)
        start = tl.load(runs + j, mask=valid, other=0)
        end = tl.load(runs + total + j, mask=valid, other=0)
    # Neighbours whose labels differ, and yet their distances are the same number.
    before, after = valid & (start > low), valid & (end < high)
    wider = before & (tl.load(values + start - 1, mask=before, other=0.0) - y == signed)
    wider = wider | (after & (tl.load(values + end, mask=after, other=0.0) - y == signed))
    if tl.max(wider.to(tl.int32), 0) > 0:
        start = tl.where(wider, _search(values, y, signed, low, high, width, False), start)
        end = tl.where(wider, _search(values, y, signed, low, high, width, True), end)
    several = valid & (end - start > 1)
    summed = _sum_before(running, sums, end, several, T) - _sum_before(running, sums, start, several, T)
    summed = tl.where(several, summed, ratio)
    number = tl.where(valid, end - start, 0)
    if not OWN_ORDER:
        low, high = tl.where(rising, 0, beyond), tl.where(rising, zero, others)  # the other side
        start = _search(values, y, -signed, low, high, width, False)
        found = valid & (start < high)
        found = found & (tl.load(values + start, mask=found, other=0.0) - y == -signed)
        if tl.max(found.to(tl.int32), 0) > 0:
            end = tl.load(runs + total + start, mask=found, other=0)
            after = found & (end < high)
            wider = after & (tl.load(values + end, mask=after, other=0.0) - y == -signed)
            if tl.max(wider.to(tl.int32), 0) > 0:
                end = tl.where(wider, _search(values, y, -signed, low, high, width, True), end)
            summed += _sum_before(running, sums, end, found, T) - _sum_before(running, sums, start, found, T)
            number += tl.where(found, end - start, 0)
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


@triton.jit(do_not_specialize=["first", "skip", "total", "size", "tiles", "span", "width"])
def _slopes(a, values, order, runs, running, sums, inverse, stats, terms, weights, first, skip, total, size, others,
            tiles, span, width, MATRIX: tl.constexpr, TIES: tl.constexpr, BACK: tl.constexpr, WHOLE: tl.constexpr,
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
    zero = 0
    beyond = 0
    y = tl.zeros((), tl.float64)
    number = tl.load(runs + 2 * total + i).to(tl.float64)
    if MATRIX:
        values += start
        order += start
    else:
        zero = tl.load(runs + total - size + i)
        beyond = tl.load(runs + 2 * total - size + i)
        y = fact(a, ID, i, True, size, PAD)
    if WHOLE:
        mean = _accumulate(sums, tiles, T) / tl.maximum(number, 1.0)
        tl.debug_barrier()  # other threads read these sums
    else:
        mean = tl.load(stats + MEAN * size + i)
    totals = tl.zeros((N,), tl.float64)
    untied_pairs = tl.zeros((N,), tl.float64)
    begin = tl.program_id(1) * span
    for first_j in range(begin, tl.minimum(begin + span, others), N):
        j = first_j + tl.arange(0, N)
        mask = j < others
        signed = tl.load(values + j, mask=mask, other=0.0) - y
        valid = mask & (signed != 0) & (tl.abs(signed) < float("inf"))
        ratio = tl.load(running + j, mask=mask, other=0.0)
        ratio -= tl.load(running + j - 1, mask=mask & (j % T != 0), other=0.0)
        off = tl.where(valid, ratio - mean, 0.0)
        if TIES:
            tied, summed = _tied(values, runs, running, sums, y, signed, ratio, j, valid, zero, beyond, total, others,
                                 width, MATRIX, T)  # fmt: skip
            untied = tl.where(valid, number - tied, 0.0)
            slope = untied * off + tl.where(valid, summed - tied * mean, 0.0)
        else:
            untied = tl.where(valid, number - 1.0, 0.0)
            slope = number * off
        totals += slope * off
        untied_pairs += untied
        if BACK:
            place = j
            if MATRIX and TIES:
                place = tl.load(order + j, mask=mask, other=0)
            scale = tl.load(inverse + place, mask=mask, other=0.0).to(tl.float64)
            slope = slope * scale / tl.maximum(number * number, 1.0)
            tl.store(inverse + place, slope.to(tl.float32), mask=mask)
    if WHOLE:
        _conclude(stats, weights, i, True, tl.sum(totals, 0), tl.sum(untied_pairs, 0), number, size, WEIGHTED)
    else:
        segment = row * tl.num_programs(1) + tl.program_id(1)
        tl.store(terms + 2 * segment, tl.sum(totals, 0))
        tl.store(terms + 2 * segment + 1, tl.sum(untied_pairs, 0))


@triton.jit(do_not_specialize=["first", "total", "count", "size", "segments"])
def _close(terms, runs, stats, weights, first, total, count, size, segments, WEIGHTED: tl.constexpr, M: tl.constexpr,
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
    number = tl.load(runs + 2 * total + i, mask=mask_m, other=0).to(tl.float64)
    _conclude(stats, weights, i, mask_m, tl.sum(totals, 1), tl.sum(untied, 1), number, size, WEIGHTED)


@triton.jit
def _factors(stats, i, mask, size):
    return tl.load(stats + FACTOR * size + i, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["own_first", "count", "passing_first", "passing_count", "span", "out_first", "out_rows",
                               "size"])  # fmt: skip
def _gradient(own, passing, slopes, stats, out, own_first, count, passing_first, passing_count, stride, passing_stride,
              span, out_first, out_rows, size, dim, ROLE: tl.constexpr, ADD: tl.constexpr, PAD: tl.constexpr,
              M: tl.constexpr, N: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """D coordinates of the gradient by M prepared rows `own`, from the slopes of their pairs with `span` rows that pass
    by, added to `out` (ADD), or stored there, a part of it for each span. ROLE: own rows are "anchors", "references",
    or "self", both."""
    k = tl.program_id(0) * M + tl.arange(0, M)
    mask_m = k < count
    axis = tl.program_id(2) * D + tl.arange(0, D)
    gradient = tl.zeros((M, D), tl.float64)
    weight = tl.zeros((M, N), tl.float64)
    own_factor = _factors(stats, own_first + k, mask_m & (ROLE != "references"), size)
    begin = tl.program_id(1) * span
    for start in range(begin, tl.minimum(begin + span, passing_count), N):
        p = start + tl.arange(0, N)
        mask_n = p < passing_count
        mask = mask_m[:, None] & mask_n[None, :]
        at = k.to(tl.int64)[:, None] * stride + p.to(tl.int64)[None, :] * passing_stride
        slope = tl.load(slopes + at, mask=mask, other=0.0).to(tl.float64)
        if ROLE == "self":
            back = k.to(tl.int64)[:, None] * passing_stride + p.to(tl.int64)[None, :] * stride
            back_slope = tl.load(slopes + back, mask=mask, other=0.0).to(tl.float64)
            slope = slope * own_factor[:, None] + back_slope * _factors(stats, p, mask_n, size)[None, :]
        elif ROLE == "references":
            slope *= _factors(stats, passing_first + p, mask_n, size)[None, :]
        weight += slope
        rows = _rows(passing, passing_first + tl.minimum(p, passing_count - 1), axis, PAD, D)
        gradient = tl.dot(slope, rows, gradient, out_dtype=tl.float64)
    rows = _rows(own, own_first + tl.minimum(k, count - 1), axis, PAD, D)
    gradient = tl.sum(weight, 1)[:, None] * rows - gradient
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
            unit = tl.load(rows + i.to(tl.int64)[:, None] * PAD + axis[None, :], mask=mask, other=0.0)
            at = i.to(tl.int64)[:, None] * dim + axis[None, :]
            along += tl.sum(unit * tl.load(by_rows + at, mask=mask, other=0.0), 1)
    for start in range(0, dim, D):
        axis = start + tl.arange(0, D)
        mask = mask_m[:, None] & (axis < dim)[None, :]
        gradient = tl.load(by_rows + i.to(tl.int64)[:, None] * dim + axis[None, :], mask=mask, other=0.0) * scale
        gradient = input_gradient(x, rows, gradient, along * scale, i, mask_m, axis, size, dim, PAD, "clamp", NORMALIZE)
        tl.store(out + place.to(tl.int64)[:, None] * dim + axis[None, :], gradient, mask=mask)
