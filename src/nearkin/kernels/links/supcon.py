# mypy: ignore-errors
"""SupCon: each anchor classifies its positives against all items it meets. settings: temperature."""

from nearkin.kernels.links.link import Link, saved, store_term
from nearkin.kernels.numerics import row_sum, store, stream_add, stream_close, stream_init, tl, triton

PEAK, PER_POSITIVE, SHARE, COUNTED = saved(4)


@triton.jit
def init(M: tl.constexpr, N: tl.constexpr):
    return tl.zeros((M, N), tl.float32), tl.zeros((M, N), tl.int32), stream_init(M, N)


@triton.jit
def add(state, tile, reference, facts, settings, SELF: tl.constexpr, FLAG: tl.constexpr, ACTIVE: tl.constexpr):
    positive_logits, positives, stream = state
    value, positive, negative = tile
    logits = value / settings[0]
    positives += positive.to(tl.int32)
    positive_logits += tl.where(positive, logits, 0.0)
    return positive_logits, positives, stream_add(stream, logits, positive | negative)


@triton.jit
def close(stats, at, anchor, state, facts, settings, SELF: tl.constexpr, FLAG: tl.constexpr, ACTIVE: tl.constexpr):
    positive_logits, positives, stream = state
    logsumexp, peak, share = stream_close(stream)
    positives = tl.sum(positives, 1)
    counted = positives > 0
    divisor = tl.maximum(positives, 1).to(tl.float64)
    paid = (logsumexp - row_sum(positive_logits) / divisor).to(tl.float32)
    counted = store_term(stats, at, counted, paid, ACTIVE)
    store(stats, PEAK, at, peak)
    store(stats, PER_POSITIVE, at, 1.0 / divisor)
    store(stats, SHARE, at, share)
    store(stats, COUNTED, at, counted)


@triton.jit
def slope(tile, anchor, reference, scales, settings, SELF: tl.constexpr, FLAG: tl.constexpr):
    value, positive, negative = tile
    peak, per_positive, share, counted = anchor
    softmax = share * tl.exp(value / settings[0] - peak)
    met = (positive | negative) & (counted > 0)
    return scales[0] / settings[0] * tl.where(met, softmax - tl.where(positive, per_positive, 0.0), 0.0)


LINK = Link(init, add, close, slope, saved=4)
