# mypy: ignore-errors
"""InfoNCE: each positive pair by itself against the anchor's negatives. settings: temperature."""

from nearkin.kernels.links.link import HIGH, Link, Survey, saved, store_pairs
from nearkin.kernels.numerics import (
    row_sum,
    sigmoid,
    softplus,
    store,
    stream_add,
    stream_close,
    stream_init,
    tl,
    triton,
)

PEAK, SHARE, LOG_SUM_EXP = saved(3)


@triton.jit
def add_negatives(state, tile, reference, facts, settings, SELF: tl.constexpr, FLAG: tl.constexpr,
                  ACTIVE: tl.constexpr):  # fmt: skip
    value, _positive, negative = tile
    return stream_add(state, value / settings[0], negative)


@triton.jit
def close_negatives(state, settings):
    return stream_close(state)


@triton.jit
def init(M: tl.constexpr, N: tl.constexpr):
    return tl.zeros((M, N), tl.float32), tl.zeros((M, N), tl.int32), tl.zeros((M, N), tl.float32)


@triton.jit
def add(state, tile, reference, facts, settings, SELF: tl.constexpr, FLAG: tl.constexpr, ACTIVE: tl.constexpr):
    paid, positives, slopes = state
    value, positive, _negative = tile
    gap = facts[0].to(tl.float32)[:, None] - value / settings[0]
    cost = softplus(gap)
    paid += tl.where(positive, cost, 0.0)
    positives += positive.to(tl.int32) + tl.where(positive & (cost > 0), HIGH, 0)
    slopes += tl.where(positive, sigmoid(gap), 0.0)
    return paid, positives, slopes


@triton.jit
def close(stats, at, anchor, state, facts, settings, SELF: tl.constexpr, FLAG: tl.constexpr, ACTIVE: tl.constexpr):
    paid, positives, slopes = state
    logsumexp, peak, share = facts
    store_pairs(stats, at, paid, positives)
    store(stats, PEAK, at, peak)
    store(stats, SHARE, at, row_sum(slopes) * share)
    store(stats, LOG_SUM_EXP, at, logsumexp)


@triton.jit
def slope(tile, anchor, reference, scales, settings, SELF: tl.constexpr, FLAG: tl.constexpr):
    value, positive, negative = tile
    peak, share, logsumexp = anchor
    logits = value / settings[0]
    pull = sigmoid(logsumexp - logits)
    push = share * tl.exp(logits - peak)
    return scales[0] / settings[0] * tl.where(positive, -pull, tl.where(negative, push, 0.0))


LINK = Link(
    init, add, close, slope, saved=3, survey=Survey(stream_init, add_negatives, close_negatives), positives_only=True
)
