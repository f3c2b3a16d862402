# mypy: ignore-errors
"""Sigmoid: every pair by itself, a binary decision. settings: -; `extra` has scale and bias, both learned."""

from nearkin.kernels.links.link import Link, saved, store_term
from nearkin.kernels.numerics import row_sum, sigmoid, softplus, store, tl, triton

SCALE, BIAS, BY_SCALE, BY_BIAS = saved(4)


@triton.jit
def facts(extra, stats, at, settings, SELF: tl.constexpr, BETA: tl.constexpr, M: tl.constexpr):
    zero = tl.zeros((M,), tl.float32)
    return zero + tl.load(extra), zero + tl.load(extra + 1)


@triton.jit
def init(M: tl.constexpr, N: tl.constexpr):
    paid, by_scale = tl.zeros((M, N), tl.float32), tl.zeros((M, N), tl.float32)
    return paid, by_scale, tl.zeros((M, N), tl.float32), tl.zeros((M, N), tl.int32)


@triton.jit
def add(state, tile, reference, facts, settings, SELF: tl.constexpr, FLAG: tl.constexpr, ACTIVE: tl.constexpr):
    paid, by_scale, by_bias, pairs = state
    value, positive, negative = tile
    sign = tl.where(positive, -1.0, 1.0)
    cost = sign * (facts[0][:, None] * value + facts[1][:, None])
    pair = positive | negative
    slope = tl.where(pair, sign * sigmoid(cost), 0.0)
    paid += tl.where(pair, softplus(cost), 0.0)
    return paid, by_scale + slope * value, by_bias + slope, pairs + pair.to(tl.int32)


@triton.jit
def close(stats, at, anchor, state, facts, settings, SELF: tl.constexpr, FLAG: tl.constexpr, ACTIVE: tl.constexpr):
    paid, by_scale, by_bias, pairs = state
    # Of an inactive anchor every slope is 0 as well.
    store_term(stats, at, tl.sum(pairs, 1) > 0, row_sum(paid), ACTIVE)
    store(stats, SCALE, at, facts[0])
    store(stats, BIAS, at, facts[1])
    store(stats, BY_SCALE, at, row_sum(by_scale))
    store(stats, BY_BIAS, at, row_sum(by_bias))


@triton.jit
def slope(tile, anchor, reference, scales, settings, SELF: tl.constexpr, FLAG: tl.constexpr):
    value, positive, negative = tile
    sign = tl.where(positive, -1.0, 1.0)
    by_value = sign * anchor[0] * sigmoid(sign * (anchor[0] * value + anchor[1]))
    return scales[0] * tl.where(positive | negative, by_value, 0.0)


LINK = Link(init, add, close, slope, saved=4, facts=facts, symmetric=True)
