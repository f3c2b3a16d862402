# mypy: ignore-errors
"""Multi-similarity: a soft maximum of an anchor's positives and one of its negatives.

settings: α, β, base, ε. FLAG: only pairs that are hard among the anchor's others are selected.
"""

from nearkin.kernels.links.link import Link, Survey, saved, store_term, valid_pairs
from nearkin.kernels.numerics import (
    LOG_ZERO,
    sigmoid,
    softplus,
    store,
    stream_add,
    stream_close,
    stream_init,
    tl,
    triton,
)

PEAK, SHARE, NEGATIVE_PEAK, NEGATIVE_SHARE, POSITIVE_BOUND, NEGATIVE_BOUND = saved(6)


@triton.jit
def init_bounds(M: tl.constexpr, N: tl.constexpr):
    return tl.full((M, N), LOG_ZERO, tl.float32), tl.full((M, N), -LOG_ZERO, tl.float32)


@triton.jit
def add_bounds(state, tile, reference, facts, settings, SELF: tl.constexpr, FLAG: tl.constexpr, ACTIVE: tl.constexpr):
    farthest, nearest = state
    value, positive, negative = tile
    distance = 1.0 - value
    farthest = tl.where(positive, tl.maximum(farthest, distance), farthest)
    return farthest, tl.where(negative, tl.minimum(nearest, distance), nearest)


@triton.jit
def close_bounds(state, settings):
    """Beyond the first a positive is selected, below the second a negative."""
    farthest, nearest = state
    return tl.min(nearest, 1) - settings[3], tl.max(farthest, 1) + settings[3]


@triton.jit
def init(M: tl.constexpr, N: tl.constexpr):
    return stream_init(M, N), stream_init(M, N), tl.zeros((N,), tl.int32)


@triton.jit
def add(state, tile, reference, facts, settings, SELF: tl.constexpr, FLAG: tl.constexpr, ACTIVE: tl.constexpr):
    stream, negative_stream, references = state
    value, positive, negative = tile
    alpha, beta, base, _epsilon = settings
    references += reference[0].to(tl.int32)
    if FLAG:
        positive = positive & (1.0 - value > facts[0][:, None])
        negative = negative & (1.0 - value < facts[1][:, None])
    stream = stream_add(stream, -alpha * (value - base), positive)
    return stream, stream_add(negative_stream, beta * (value - base), negative), references


@triton.jit
def close(stats, at, anchor, state, facts, settings, SELF: tl.constexpr, FLAG: tl.constexpr, ACTIVE: tl.constexpr):
    stream, negative_stream, references = state
    logsumexp, peak, share = stream_close(stream)
    negative_logsumexp, negative_peak, negative_share = stream_close(negative_stream)
    logsumexp, negative_logsumexp = logsumexp.to(tl.float32), negative_logsumexp.to(tl.float32)
    counted = valid_pairs(references, anchor[0], SELF) > 0
    paid = softplus(logsumexp) / settings[0] + softplus(negative_logsumexp) / settings[1]
    store_term(stats, at, counted, paid, ACTIVE)
    store(stats, PEAK, at, peak)
    store(stats, SHARE, at, share * sigmoid(logsumexp))
    store(stats, NEGATIVE_PEAK, at, negative_peak)
    store(stats, NEGATIVE_SHARE, at, negative_share * sigmoid(negative_logsumexp))
    if FLAG:
        store(stats, POSITIVE_BOUND, at, facts[0])
        store(stats, NEGATIVE_BOUND, at, facts[1])


@triton.jit
def slope(tile, anchor, reference, scales, settings, SELF: tl.constexpr, FLAG: tl.constexpr):
    value, positive, negative = tile
    peak, share, negative_peak, negative_share, positive_bound, negative_bound = anchor
    alpha, beta, base, _epsilon = settings
    if FLAG:
        positive = positive & (1.0 - value > positive_bound)
        negative = negative & (1.0 - value < negative_bound)
    pull = share * tl.exp(-alpha * (value - base) - peak)
    push = negative_share * tl.exp(beta * (value - base) - negative_peak)
    return scales[0] * tl.where(positive, -pull, tl.where(negative, push, 0.0))


ALL = Link(init, add, close, slope, saved=6)
SELECTED = ALL._replace(survey=Survey(init_bounds, add_bounds, close_bounds))
