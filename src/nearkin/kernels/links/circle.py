# mypy: ignore-errors
"""Circle: soft maxima of positives and negatives, each pair weighted by its own distance from the optimum.

settings: margin, scale. Similarities in float64, since exponents are as large as the scale.
"""

from nearkin.kernels.links.link import Link, saved, store_term
from nearkin.kernels.numerics import sigmoid, softplus, store, stream_add_float64, stream_close, stream_init, tl, triton

PEAK, SHARE, NEGATIVE_PEAK, NEGATIVE_SHARE = saved(4)


@triton.jit
def exponents(value, settings):
    """Exponents of positives and of negatives, and their slopes, whose weights carry no gradient; all in float64."""
    margin = tl.cast(settings[0], tl.float64)
    pull = -settings[1] * tl.maximum(1.0 + margin - value, 0.0)
    push = settings[1] * tl.maximum(value + margin, 0.0)
    return pull * (value - (1.0 - margin)), push * (value - margin), pull, push


@triton.jit
def init(M: tl.constexpr, N: tl.constexpr):
    return stream_init(M, N), stream_init(M, N)


@triton.jit
def add(state, tile, reference, facts, settings, SELF: tl.constexpr, FLAG: tl.constexpr, ACTIVE: tl.constexpr):
    stream, negative_stream = state
    value, positive, negative = tile
    exponent, negative_exponent, _pull, _push = exponents(value, settings)
    stream = stream_add_float64(stream, exponent, positive)
    return stream, stream_add_float64(negative_stream, negative_exponent, negative)


@triton.jit
def close(stats, at, anchor, state, facts, settings, SELF: tl.constexpr, FLAG: tl.constexpr, ACTIVE: tl.constexpr):
    stream, negative_stream = state
    logsumexp, peak, share = stream_close(stream)
    negative_logsumexp, negative_peak, negative_share = stream_close(negative_stream)
    counted = (share > 0) & (negative_share > 0)
    exponent = tl.where(counted, logsumexp + negative_logsumexp, 0.0).to(tl.float32)
    factor = tl.where(counted, sigmoid(exponent), 0.0)
    paid = softplus(exponent)
    store_term(stats, at, counted, paid, ACTIVE)
    store(stats, PEAK, at, peak)
    store(stats, SHARE, at, share * factor)
    store(stats, NEGATIVE_PEAK, at, negative_peak)
    store(stats, NEGATIVE_SHARE, at, negative_share * factor)


@triton.jit
def slope(tile, anchor, reference, scales, settings, SELF: tl.constexpr, FLAG: tl.constexpr):
    value, positive, negative = tile
    peak, share, negative_peak, negative_share = anchor
    exponent, negative_exponent, pull, push = exponents(value, settings)
    pull = pull.to(tl.float32) * share * tl.exp((exponent - peak).to(tl.float32))
    push = push.to(tl.float32) * negative_share * tl.exp((negative_exponent - negative_peak).to(tl.float32))
    return scales[0] * tl.where(positive, pull, tl.where(negative, push, 0.0))


LINK = Link(init, add, close, slope, saved=4, measure="product")
