# mypy: ignore-errors
"""Margin: distances below or above a boundary β by a margin. settings: margin, ν, β where it is a number."""

from nearkin.kernels.links.link import ACTIVE_TERMS, HIGH, PAID, TERMS, Link, one_mean, saved, tally, valid_pairs
from nearkin.kernels.numerics import load, row_sum, store, tl, triton

BETA_ROW, BETA_SLOPE = saved(2)


@triton.jit
def facts(extra, stats, at, settings, SELF: tl.constexpr, BETA: tl.constexpr, M: tl.constexpr):
    """β: a number, a scalar, or one per anchor."""
    beta = tl.zeros((M,), tl.float32) + settings[2]
    if BETA == "scalar":
        beta = tl.zeros((M,), tl.float32) + tl.load(extra)
    if BETA == "anchor":
        beta = tl.load(extra + at[0], mask=at[1], other=0.0)
    return (beta,)


@triton.jit
def init(M: tl.constexpr, N: tl.constexpr):
    positives, pushed = tl.zeros((M, N), tl.int32), tl.zeros((M, N), tl.int32)
    return tl.zeros((M, N), tl.float32), positives, pushed, tl.zeros((N,), tl.int32)


@triton.jit
def add(state, tile, reference, facts, settings, SELF: tl.constexpr, FLAG: tl.constexpr, ACTIVE: tl.constexpr):
    paid, positives, pushed, references = state
    value, positive, negative = tile
    beta = facts[0][:, None]
    pull = tl.where(positive, tl.maximum(settings[0] + value - beta, 0.0), 0.0)
    push = tl.where(negative, tl.maximum(settings[0] - value + beta, 0.0), 0.0)
    references += reference[0].to(tl.int32)
    paid += pull + push
    positives += positive.to(tl.int32) + tl.where(pull > 0, HIGH, 0)
    pushed += (push > 0).to(tl.int32)
    return paid, positives, pushed, references


@triton.jit
def close(stats, at, anchor, state, facts, settings, SELF: tl.constexpr, FLAG: tl.constexpr, ACTIVE: tl.constexpr):
    paid, positives, pushed, references = state
    beta, nu = facts[0], settings[1]
    pulled = tl.sum(positives // HIGH, 1)
    pushed = tl.sum(pushed, 1)
    positives = tl.sum(positives & (HIGH - 1), 1).to(tl.float32)
    store(stats, PAID, at, row_sum(paid) + nu * beta * positives)
    store(stats, TERMS, at, valid_pairs(references, anchor[0], SELF))
    store(stats, ACTIVE_TERMS, at, pulled + pushed)
    store(stats, BETA_ROW, at, beta)
    store(stats, BETA_SLOPE, at, (pushed - pulled).to(tl.float32) + nu * positives)


@triton.jit
def slope(tile, anchor, reference, scales, settings, SELF: tl.constexpr, FLAG: tl.constexpr):
    value, positive, negative = tile
    pull = positive & (settings[0] + value - anchor[0] > 0)
    push = negative & (settings[0] - value + anchor[0] > 0)
    return tl.where(pull, scales[0], tl.where(push, -scales[0], 0.0))


@triton.jit
def tally_beta(sums, stats, at, option, REDUCTION: tl.constexpr):
    total, terms, beta_slope, beta_taint = tally(sums, stats, at, option, REDUCTION)
    beta_slope += load(stats, BETA_SLOPE, at).to(tl.float64)
    beta_taint += (load(stats, BETA_ROW, at) * 0.0).to(tl.float64)
    return total, terms, beta_slope, beta_taint


@triton.jit
def mean_beta(sums, stats, size, option, REDUCTION: tl.constexpr):
    """The second scale is the slope by a scalar β; a β that is not finite makes the value NaN."""
    value, share, _share = one_mean(sums, stats, size, option, REDUCTION)
    return value + tl.sum(sums[3], 0), share, share * tl.sum(sums[2], 0)


LINK = Link(init, add, close, slope, saved=2, measure="distance", facts=facts, tally=tally_beta, mean=mean_beta)
