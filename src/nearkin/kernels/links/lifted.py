# mypy: ignore-errors
"""Lifted structure: a positive pair against the negatives of both its ends. settings: margin.

Two passes: THREATS makes the log-sum-exp of each row's negatives, LINK the terms of positive pairs from those of anchor
and reference. With references of their own both run from either side.
"""

from nearkin.kernels.links.link import HIGH, Link, saved, store_pairs
from nearkin.kernels.numerics import (
    load,
    logaddexp,
    row_sum,
    sigmoid,
    store,
    stream_add,
    stream_close,
    stream_init,
    tl,
    triton,
)

THREAT, PEAK, SHARE, PUSH = saved(4)


@triton.jit
def add_threats(state, tile, reference, facts, settings, SELF: tl.constexpr, FLAG: tl.constexpr, ACTIVE: tl.constexpr):
    value, _positive, negative = tile
    return stream_add(state, settings[0] - value, negative)


@triton.jit
def close_threats(stats, at, anchor, state, facts, settings, SELF: tl.constexpr, FLAG: tl.constexpr,
                  ACTIVE: tl.constexpr):  # fmt: skip
    threat, peak, share = stream_close(state)
    store(stats, THREAT, at, threat)
    store(stats, PEAK, at, peak)
    store(stats, SHARE, at, share)


@triton.jit
def facts(extra, stats, at, settings, SELF: tl.constexpr, BETA: tl.constexpr, M: tl.constexpr):
    return load(stats, THREAT, at), load(stats, SHARE, at)


@triton.jit
def column(extra, at, SELF: tl.constexpr):
    return (load(extra, THREAT, at),)


@triton.jit
def init(M: tl.constexpr, N: tl.constexpr):
    return tl.zeros((M, N), tl.float32), tl.zeros((M, N), tl.int32), tl.zeros((M, N), tl.float32)


@triton.jit
def add(state, tile, reference, facts, settings, SELF: tl.constexpr, FLAG: tl.constexpr, ACTIVE: tl.constexpr):
    paid, positives, slopes = state
    value, positive, _negative = tile
    threat = facts[0][:, None]
    reference_threat = reference[2][0][None, :]
    cost = tl.where(positive, tl.maximum(logaddexp(threat, reference_threat) + value, 0.0), 0.0)
    positives += positive.to(tl.int32) + tl.where(cost * cost * 0.5 > 0, HIGH, 0)
    paid += cost * cost * 0.5
    slopes += cost * sigmoid(threat - reference_threat)
    return paid, positives, slopes


@triton.jit
def close(stats, at, anchor, state, facts, settings, SELF: tl.constexpr, FLAG: tl.constexpr, ACTIVE: tl.constexpr):
    paid, positives, slopes = state
    store_pairs(stats, at, paid, positives)
    store(stats, PUSH, at, row_sum(slopes) * facts[1])


@triton.jit
def slope(tile, anchor, reference, scales, settings, SELF: tl.constexpr, FLAG: tl.constexpr):
    value, positive, negative = tile
    threat, peak, _share, push = anchor
    reference_threat, reference_peak, _reference_share, reference_push = reference
    pull = tl.maximum(logaddexp(threat, reference_threat) + value, 0.0)
    pushed = push * tl.exp(settings[0] - value - peak) + reference_push * tl.exp(settings[0] - value - reference_peak)
    return scales[0] * tl.where(positive, pull, tl.where(negative, -pushed, 0.0))


THREATS = Link(stream_init, add_threats, close_threats, slope, saved=4, measure="distance")
LINK = Link(init, add, close, slope, 4, "distance", facts, column, positives_only=True, paired=True)
