# mypy: ignore-errors
"""The kernels of `rank_ops`: one program per anchor, with its row in registers. Imported when the first is launched."""

import torch

from nearkin.kernels.numerics import tl, triton


def _shape(matrix):
    rows, columns = matrix.shape
    padded = max(32, triton.next_power_of_2(columns))
    return rows, columns, {"P": padded, "num_warps": min(16, max(1, padded // 512)), "enable_fp_fusion": True}


def precisions(scores, positive, negative, slope=None):
    """(B,), or with the `slope` of that (B,) the gradient by the scores (B, R)."""
    rows, columns, constants = _shape(scores)
    out = (
        torch.empty_like(scores)
        if slope is not None
        else torch.empty_like(scores[:, 0], memory_format=torch.contiguous_format)
    )
    upstream = scores if slope is None else slope  # unused without a gradient
    with torch.cuda.device_of(scores):
        _precisions[(rows,)](scores, positive, negative, upstream, out, columns, BACK=slope is not None, **constants)
    return out


@triton.jit
def _precisions(scores, positive, negative, slope, out, columns, BACK: tl.constexpr, P: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = row * columns
    j = tl.arange(0, P)
    mask_j = j < columns
    score = tl.load(scores + start + j, mask=mask_j, other=0.0)
    is_positive = tl.load(positive + start + j, mask=mask_j, other=0) != 0
    is_negative = tl.load(negative + start + j, mask=mask_j, other=0) != 0
    left = tl.sum(is_positive.to(tl.int32), 0)
    last = left * 0 - 1
    total = tl.zeros((P,), tl.float32)
    while left > 0:
        current = tl.min(tl.where(is_positive & (j > last), j, P), 0)
        own_score = tl.sum(tl.where(j == current, score, 0.0), 0)
        before = 1.0 / (1.0 + tl.exp(own_score - score))
        # The positive itself contributes σ(0) = 1/2 to both sums; the other half makes its 1.
        among_positives = tl.sum(tl.where(is_positive, before, 0.0), 0) + 0.5
        among_all = among_positives + tl.sum(tl.where(is_negative, before, 0.0), 0)
        ratio = among_positives / among_all
        if BACK:
            pull = tl.where(is_positive, 1.0 - ratio, tl.where(is_negative, -ratio, 0.0)) / among_all
            pull = pull * before * (1.0 - before)
            total += pull - tl.where(j == current, tl.sum(pull, 0), 0.0)
        else:
            total += tl.where(j == 0, ratio, 0.0)
        last = current
        left -= 1
    if BACK:
        tl.store(out + start + j, total * tl.load(slope + row), mask=mask_j)
    else:
        tl.store(out + row, tl.sum(total, 0))


def histograms(place, positive, negative, bins):
    """(B,), and the histograms of positives and negatives (B, 2, bins + 1)."""
    rows, columns, constants = _shape(place)
    out = torch.empty(rows, device=place.device)
    counts = torch.empty(rows, 2, bins + 1, device=place.device)
    with torch.cuda.device_of(place):
        _histograms[(rows,)](place, positive, negative, counts, out, columns, bins, **constants)
    return out, counts


@triton.jit
def _histograms(place, positive, negative, counts, out, columns, bins, P: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = row * columns
    counts += row * 2 * (bins + 1)
    j = tl.arange(0, P)
    mask_j = j < columns
    at = tl.load(place + start + j, mask=mask_j, other=0.0)
    is_positive = tl.load(positive + start + j, mask=mask_j, other=0) != 0
    is_negative = tl.load(negative + start + j, mask=mask_j, other=0) != 0
    taint = tl.sum(tl.where(is_positive | is_negative, at * 0.0, 0.0), 0)
    negatives = taint
    among_all = taint
    total = taint
    for centre in range(0, bins + 1):
        share = tl.maximum(1.0 - tl.abs(at - centre), 0.0)
        positives = tl.sum(tl.where(is_positive, share, 0.0), 0)
        negatives_at = tl.sum(tl.where(is_negative, share, 0.0), 0)
        tl.store(counts + centre, positives)
        tl.store(counts + bins + 1 + centre, negatives_at)
        negatives += negatives_at
        among_all += positives + negatives_at
        total += tl.where(among_all == 0.0, 0.0, positives * negatives / tl.where(among_all == 0.0, 1.0, among_all))
    tl.store(out + row, total)


def histograms_back(place, positive, negative, counts, bins, slope):
    """The gradient by the places, (B, R)."""
    rows, columns, constants = _shape(place)
    out = torch.empty_like(place)
    with torch.cuda.device_of(place):
        _histograms_back[(rows,)](place, positive, negative, counts, slope, out, columns, bins, **constants)
    return out


@triton.jit
def _histograms_back(place, positive, negative, counts, slope, out, columns, bins, P: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = row * columns
    counts += row * 2 * (bins + 1)
    j = tl.arange(0, P)
    mask_j = j < columns
    at = tl.load(place + start + j, mask=mask_j, other=0.0)
    is_positive = tl.load(positive + start + j, mask=mask_j, other=0) != 0
    is_negative = tl.load(negative + start + j, mask=mask_j, other=0) != 0
    lower = tl.minimum(tl.floor(at), bins - 1.0)
    # What one more positive, or negative, in a centre does to all ratios from there on: sums, less those passed, in
    # float64, as the differences are small.
    up = tl.load(slope + row).to(tl.float64)
    by_positive = up * 0.0
    by_negative = up * 0.0
    among_positives = up * 0.0
    among_all = up * 0.0
    for centre in range(0, bins + 1):
        positives = tl.load(counts + centre).to(tl.float64)
        among_positives += positives
        among_all += positives + tl.load(counts + bins + 1 + centre).to(tl.float64)
        divisor = tl.where(among_all == 0.0, 1.0, among_all)
        by_positive += positives * (divisor - among_positives) / (divisor * divisor)
        by_negative += positives * among_positives / (divisor * divisor)
    among_positives = up * 0.0
    among_all = up * 0.0
    total = tl.zeros((P,), tl.float32)
    for centre in range(0, bins + 1):
        positives = tl.load(counts + centre).to(tl.float64)
        among_positives += positives
        among_all += positives + tl.load(counts + bins + 1 + centre).to(tl.float64)
        divisor = tl.where(among_all == 0.0, 1.0, among_all)
        side = tl.where(lower == centre - 1.0, 1.0, tl.where(lower == centre, -1.0, 0.0))
        of_positive = (up * ((among_all - among_positives) / divisor - by_positive)).to(tl.float32)
        of_negative = (up * by_negative).to(tl.float32)
        total += side * tl.where(is_positive, of_positive, tl.where(is_negative, of_negative, 0.0))
        by_positive -= positives * (divisor - among_positives) / (divisor * divisor)
        by_negative -= positives * among_positives / (divisor * divisor)
    tl.store(out + start + j, total, mask=mask_j)


def spreads(squared, gaps, order, epsilon, slopes):
    """Values and numbers of pairs, (B,) each, and with `slopes` the derivative of each value by its row, (B, R)."""
    rows, columns, constants = _shape(squared)
    value = torch.empty(rows, device=squared.device)
    pairs = torch.empty(rows, device=squared.device, dtype=torch.int64)
    slope = torch.empty_like(squared) if slopes else None
    choices = {"TIES": order is not None, "BACK": slopes, "EPSILON": epsilon}
    constants["num_warps"] = min(16, max(1, constants["P"] // 256))
    operands = (squared, gaps, gaps if order is None else order, value, pairs, value if slope is None else slope)
    with torch.cuda.device_of(squared):
        _spreads[(rows,)](*operands, columns, **choices, **constants)
    return value, pairs, slope


@triton.jit
def _run_on(sum_a, number_a, first_a, sum_b, number_b, first_b):
    """Sums and numbers since the last entry that is the first of its group."""
    return (
        tl.where(first_b > 0, sum_b, sum_a + sum_b),
        tl.where(first_b > 0, number_b, number_a + number_b),
        tl.maximum(first_a, first_b),
    )


@triton.jit
def _spreads(squared, gaps, order, value, pairs, slope, columns, TIES: tl.constexpr, BACK: tl.constexpr,
             EPSILON: tl.constexpr, P: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start = row * columns
    j = tl.arange(0, P)
    mask_j = j < columns
    gap = tl.load(gaps + start + j, mask=mask_j, other=float("inf"))
    valid = gap < float("inf")
    at = j.to(tl.int64)
    if TIES:  # gaps come sorted
        at = tl.load(order + start + j, mask=mask_j, other=0)
    near = tl.load(squared + start + at, mask=mask_j, other=0.0).to(tl.float64) + EPSILON
    ratio = tl.log(near) - 2.0 * tl.log(tl.where(valid, gap, 1.0))
    number = tl.sum(tl.where(valid, 1.0, 0.0).to(tl.float64), 0)
    mean = tl.sum(tl.where(valid, ratio, 0.0), 0) / tl.maximum(number, 1.0)
    off = tl.where(valid, ratio - mean, 0.0)
    if TIES:
        # Two runs, from either end, meet in every entry: together they have all of its group, and itself twice.
        divisor = tl.where(valid, 1.0, 0.0).to(tl.float64)
        before = tl.load(gaps + start + j - 1, mask=mask_j & (j > 0), other=-1.0)
        after = tl.load(gaps + start + j + 1, mask=j + 1 < columns, other=-1.0)
        first, last = (gap != before).to(tl.int32), (gap != after).to(tl.int32)
        sum_up, number_up, _ = tl.associative_scan((off, divisor, first), 0, _run_on)
        sum_down, number_down, _ = tl.associative_scan((off, divisor, last), 0, _run_on, reverse=True)
        of_group = sum_up + sum_down - off
        others = number - (number_up + number_down - divisor)
    else:
        of_group = off * 0.0
        others = off * 0.0 + number
    untied = tl.sum(tl.where(valid, others, 0.0), 0)  # each pair from either side
    if not TIES:
        untied -= number
    least = tl.maximum(untied * 0.5, 1.0)
    total = tl.sum(tl.where(valid, (others * off + of_group) * off, 0.0), 0)
    tl.store(value + row, (total / least).to(tl.float32))
    tl.store(pairs + row, (untied * 0.5).to(tl.int64))
    if BACK:
        by_squared = tl.where(valid, 2.0 * (others * off + of_group) / (least * near), 0.0)
        tl.store(slope + start + at, by_squared.to(tl.float32), mask=mask_j)
