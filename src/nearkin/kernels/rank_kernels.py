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
