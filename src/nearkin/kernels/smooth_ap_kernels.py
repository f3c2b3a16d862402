# mypy: ignore-errors
"""The kernels of Smooth-AP: ranks of an anchor's positives among all references, and the gradient.

A table has the positives of each anchor, in the order of the references: `width` of them from the `first` on, a window.
Within a window a few positives at a time are compared with all references. `smooth_ap_passes` launches them.
"""

from nearkin.kernels import digit_kernels
from nearkin.kernels.links.link import ACTIVE_TERMS, PAID, SAVED, SCALES, TERMS, mean, tally
from nearkin.kernels.numerics import add_column, column, load, store, tl, triton
from nearkin.kernels.pair_kernels import _from_digits, _measure, _products, _rows, _whole
from nearkin.kernels.row_kernels import SQUARED, class_ids, fact, inner_products, pair_masks, store_gradient

# Rows of the table, of `width` · B entries each: a positive's logit, its index among the references, the factors of the
# slopes of positives and negatives that are compared with it, and its own slope.
LOGIT, PLACE, BY_POSITIVE, BY_NEGATIVE, OWN = (tl.constexpr(row) for row in range(5))
ROWS = 5
NUMBER = tl.constexpr(SAVED)  # row of statistics: how many positives an anchor has
AT_ONCE = tl.constexpr(4)  # positives


@triton.jit
def _entry(table, row: tl.constexpr, k, i, exists, size, width, other):
    """One entry of the table per anchor i, of its positive k in the window."""
    return tl.load(table + (row * width + k) * size + i, mask=exists, other=other)


@triton.jit
def _logits(a, b, inner, left, i, j, dim, others, sharpness, PAD: tl.constexpr, N: tl.constexpr):
    """Similarities by temperature, for powers of 2, of rows that exist. left: squared lengths of rows i."""
    if a.dtype.element_ty == tl.int8:
        right = fact(b, SQUARED, j, j >= 0, others, PAD)
        inner, _near = _measure(a, b, inner, left, right, i, j, dim, "similarity", False, True, PAD, N)
    return (inner * sharpness).to(tl.float32)


@triton.jit
def _before(own, logits):
    """σ: by how much each logit ranks before `own`."""
    return 1.0 / (1.0 + tl.exp2(own - logits))


@triton.jit
def _collect(a, b, anchors, row_ids, lengths, i, mask_m, table, size, others, dim, first, width, sharpness,
             SELF: tl.constexpr, PAD: tl.constexpr, K: tl.constexpr, ONCE: tl.constexpr, M: tl.constexpr,
             N: tl.constexpr):  # fmt: skip
    """Fills the first two rows of the table; how many positives each anchor has, in all windows, (M,)."""
    safe = tl.minimum(i, size - 1)
    number = tl.zeros((M,), tl.int32)
    for start in range(0, others, N):
        j = start + tl.arange(0, N)
        mask_n = j < others
        positive, _negative = pair_masks(row_ids, class_ids(b, j, mask_n, others, PAD), i, j, mask_m, mask_n, SELF)
        in_tile = tl.sum(positive.to(tl.int32), 1)
        if tl.max(in_tile, 0) > 0:
            passing = tl.minimum(j, others - 1)
            inner = _products(a, b, anchors, safe, passing, PAD, K, ONCE)
            logits = _logits(a, b, inner, lengths, safe, passing, dim, others, sharpness, PAD, N)
            k = number[:, None] + tl.cumsum(positive.to(tl.int32), 1) - 1 - first
            inside = positive & (k >= 0) & (k < width)
            entry = table + k * size + i[:, None]
            tl.store(entry, logits, mask=inside)
            place = tl.broadcast_to(j[None, :], (M, N)).to(tl.float32, bitcast=True)
            tl.store(entry + PLACE * width * size, place, mask=inside)
            number += in_tile
    return number


@triton.jit
def _compare(sums, owns, logits):
    """Adds, of some of the references, σ and σ(1 - σ) to the two sums of each of the anchors' positives."""
    added = tl.zeros(sums.shape, tl.float32)
    for k in tl.static_range(AT_ONCE):
        before = _before(owns[k][:, None], logits)
        added = add_column(added, k, tl.sum(before, 1))
        added = add_column(added, AT_ONCE + k, tl.sum(before * (1.0 - before), 1))
    return sums + added


@triton.jit
def ranks(a, b, table, stats, size, others, dim, first, width, sharpness, temperature, slots, SELF: tl.constexpr,
          VALUE: tl.constexpr, LATER: tl.constexpr, PAD: tl.constexpr, K: tl.constexpr, ONCE: tl.constexpr,
          M: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """The table of M anchors, and their terms with VALUE. slots: anchors with more positives are NaN. LATER: than the
    first window, so that the number of positives is known."""
    i = tl.program_id(0) * M + tl.arange(0, M)
    mask_m = i < size
    at = (i, mask_m, size)
    if LATER:  # noqa: SIM102  a constant
        if tl.max(load(stats, NUMBER, at), 0) <= first:
            return
    row_ids = class_ids(a, i, mask_m, size, PAD)
    lengths = fact(a, SQUARED, i, mask_m, size, PAD)
    safe = tl.minimum(i, size - 1)
    anchors = _whole(a, safe, PAD, K, ONCE)
    number = _collect(a, b, anchors, row_ids, lengths, i, mask_m, table, size, others, dim, first, width, sharpness,
                      SELF, PAD, K, ONCE, M, N)  # fmt: skip
    tl.debug_barrier()  # other threads wrote what this one reads
    left = tl.minimum(number - first, width)
    divisor = tl.maximum(number, 1).to(tl.float64)
    factor = tl.where(number <= slots, 1.0 / (divisor * temperature), 0.0)
    missed = tl.zeros((M,), tl.float64)
    for some in range(0, tl.max(left, 0), AT_ONCE):
        owns = ()
        for k in tl.static_range(AT_ONCE):
            exists = some + k < left
            owns = owns + (_entry(table, LOGIT, some + k, i, exists, size, width, float("inf")),)  # noqa: RUF005
        positives = tl.zeros((M, 2 * AT_ONCE), tl.float64)
        negatives = tl.zeros((M, 2 * AT_ONCE), tl.float64)
        for start in range(0, others, N):
            j = start + tl.arange(0, N)
            mask_n = j < others
            column_ids = class_ids(b, j, mask_n, others, PAD)
            positive, negative = pair_masks(row_ids, column_ids, i, j, mask_m, mask_n, SELF)
            passing = tl.minimum(j, others - 1)
            inner = _products(a, b, anchors, safe, passing, PAD, K, ONCE)
            logits = _logits(a, b, inner, lengths, safe, passing, dim, others, sharpness, PAD, N)
            negatives = _compare(negatives, owns, tl.where(negative, logits, float("-inf")))
            if tl.max(tl.max(positive.to(tl.int32), 1), 0) > 0:
                positives = _compare(positives, owns, tl.where(positive, logits, float("-inf")))
        for k in tl.static_range(AT_ONCE):
            exists = some + k < left
            among_positives = column(positives, k) + 0.5  # with itself, which contributed σ(0) = 1/2
            among_negatives = column(negatives, k)
            among_all = among_positives + among_negatives
            missed += tl.where(exists, 1.0 - among_positives / among_all, 0.0)
            by_positive = -factor * among_negatives / (among_all * among_all)
            by_negative = factor * among_positives / (among_all * among_all)
            own = by_positive * column(positives, AT_ONCE + k) + by_negative * column(negatives, AT_ONCE + k)
            entry = table + (some + k) * size + i
            tl.store(entry + BY_POSITIVE * width * size, by_positive.to(tl.float32), mask=exists)
            tl.store(entry + BY_NEGATIVE * width * size, by_negative.to(tl.float32), mask=exists)
            tl.store(entry + OWN * width * size, -own.to(tl.float32), mask=exists)
    if VALUE:
        paid = (missed / divisor).to(tl.float32)
        if LATER:
            paid += load(stats, PAID, at)
        paid = tl.where(number <= slots, paid, float("nan"))
        counted = number > 0
        active = counted & ((paid > 0) | (paid != paid))
        store(stats, PAID, at, tl.where(counted, paid, 0.0))
        store(stats, TERMS, at, counted)
        store(stats, ACTIVE_TERMS, at, active)
        store(stats, NUMBER, at, number)


@triton.jit
def tally_ranks(sums, stats, at, option, REDUCTION: tl.constexpr):
    """The sums of the terms, and the most positives of an anchor."""
    total, terms, most, fourth = tally(sums, stats, at, option, REDUCTION)
    return total, terms, tl.maximum(most, load(stats, NUMBER, at).to(tl.float64)), fourth


@triton.jit
def mean_ranks(sums, stats, size, option, REDUCTION: tl.constexpr):
    total, terms, most, _fourth = sums
    value, share = mean(tl.sum(total, 0), tl.sum(terms, 0), REDUCTION)
    return value, share, tl.max(most, 0)


@triton.jit
def _positives(table, some, i, left, size, width, AXIS: tl.constexpr):
    """Of AT_ONCE positives of anchors i, along AXIS of a tile: logits and both factors."""
    entries = ()
    for k in tl.static_range(AT_ONCE):
        exists = some + k < left
        logit = _entry(table, LOGIT, some + k, i, exists, size, width, float("inf"))
        by_positive = _entry(table, BY_POSITIVE, some + k, i, exists, size, width, 0.0)
        by_negative = _entry(table, BY_NEGATIVE, some + k, i, exists, size, width, 0.0)
        entry = (tl.expand_dims(logit, AXIS), tl.expand_dims(by_positive, AXIS), tl.expand_dims(by_negative, AXIS))
        entries = entries + (entry,)  # noqa: RUF005
    return entries


@triton.jit
def _compared(slope, entries, logits, positive):
    """Adds the slopes of references that were compared with an anchor's positives."""
    for k in tl.static_range(AT_ONCE):
        before = _before(entries[k][0], logits)
        slope += before * (1.0 - before) * tl.where(positive, entries[k][1], entries[k][2])
    return slope


@triton.jit
def _own_slopes(slope, table, some, i, j, left, size, width, AXIS: tl.constexpr):
    """Adds those of the positives themselves: i anchors along AXIS, j references along the other axis."""
    for k in tl.static_range(AT_ONCE):
        exists = some + k < left
        place = _entry(table, PLACE, some + k, i, exists, size, width, 0.0).to(tl.int32, bitcast=True)
        own = _entry(table, OWN, some + k, i, exists, size, width, 0.0)
        place = tl.where(exists, place, -1)
        same = tl.expand_dims(place, AXIS) == tl.expand_dims(j, 1 - AXIS)
        slope += tl.where(same, tl.expand_dims(own, AXIS), 0.0)
    return slope


@triton.jit
def slopes(x, a, b, row_table, row_stats, column_table, column_stats, upstream, by_x, size, others, dim, first,
           width, sharpness, ROLE: tl.constexpr, APART: tl.constexpr, LATER: tl.constexpr, ONE_CHUNK: tl.constexpr,
           PAD: tl.constexpr, K: tl.constexpr, ONCE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
           D: tl.constexpr):  # fmt: skip
    """D coordinates of the gradient by M rows of x, prepared in a: all rows of b pass by, as references (ROLE
    "anchors"), as anchors ("references") or as both ("self"). APART: row i of a and of b are the same item. LATER: adds
    to what earlier windows stored."""
    scales = column_stats + SCALES * others if ROLE == "references" else row_stats + SCALES * size
    most = tl.minimum(tl.load(scales + 1).to(tl.int32) - first, width)
    if LATER:  # noqa: SIM102
        if most <= 0:
            return
    i = tl.program_id(0) * M + tl.arange(0, M)
    mask_m = i < size
    axis = tl.program_id(1) * D + tl.arange(0, D)
    row_ids = class_ids(a, i, mask_m, size, PAD)
    safe = tl.minimum(i, size - 1)
    lengths = fact(a, SQUARED, i, mask_m, size, PAD)
    DIGITS: tl.constexpr = a.dtype.element_ty == tl.int8
    if DIGITS:
        rows = _whole(a, safe, PAD, K, ONCE)
        gradient = digit_kernels.weighted_init(M, D)
    else:
        rows = _rows(a, safe, axis, PAD, D)
        gradient = tl.zeros((M, D), tl.float64)
    row_left = tl.zeros((M,), tl.int32)
    if ROLE != "references":
        row_left = tl.minimum(load(row_stats, NUMBER, (i, mask_m, size)).to(tl.int32) - first, width)
    for some in range(0, most, AT_ONCE):
        entries = ()
        if ROLE != "references":
            entries = _positives(row_table, some, i, row_left, size, width, 1)
        for start in range(0, others, N):
            j = start + tl.arange(0, N)
            mask_n = j < others
            positive, negative = pair_masks(row_ids, class_ids(b, j, mask_n, others, PAD), i, j, mask_m, mask_n, APART)
            passing = tl.minimum(j, others - 1)
            if DIGITS:
                inner = digit_kernels.products(a, b, rows, safe, passing, PAD, K)
            else:
                passing_rows = _rows(b, passing, axis, PAD, D)
                if ONCE:
                    inner = tl.dot(rows, tl.trans(passing_rows), out_dtype=tl.float64)
                else:
                    inner = inner_products(a, b, safe, passing, PAD, K)
            logits = _logits(a, b, inner, lengths, safe, passing, dim, others, sharpness, PAD, N)
            slope = tl.zeros((M, N), tl.float32)
            any_positive = tl.max(tl.max(positive.to(tl.int32), 1), 0) > 0
            if ROLE != "references":
                slope = _compared(slope, entries, logits, positive)
                if any_positive:
                    slope = _own_slopes(slope, row_table, some, i, j, row_left, size, width, 1)
            if ROLE != "anchors":
                number = load(column_stats, NUMBER, (j, mask_n, others)).to(tl.int32)
                left = tl.minimum(number - first, width)
                columns = _positives(column_table, some, j, left, others, width, 0)
                slope = _compared(slope, columns, logits, positive)
                if any_positive:
                    slope = _own_slopes(slope, column_table, some, j, i, left, others, width, 0)
            slope = tl.where(positive | negative, slope, 0.0)
            if DIGITS:
                gradient = digit_kernels.weighted_add(gradient, slope, b, passing, start, axis, others, PAD, N, D)
            else:
                gradient = tl.dot(slope.to(tl.float64), passing_rows, gradient, out_dtype=tl.float64)
    if DIGITS:
        gradient, _numbers = _from_digits(gradient, a, safe, axis, size, False, True, PAD)
    gradient = gradient * (tl.load(upstream).to(tl.float32) * tl.load(scales)).to(tl.float64)
    if ONE_CHUNK:
        store_gradient(x, a, by_x, gradient, i, mask_m, axis, size, dim, PAD, "clamp", True, LATER)
    else:
        out = by_x + i.to(tl.int64)[:, None] * dim + axis[None, :]
        inside = mask_m[:, None] & (axis < dim)[None, :]
        if LATER:
            gradient += tl.load(out, mask=inside, other=0.0)
        tl.store(out, gradient, mask=inside)
