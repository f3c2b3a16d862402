# mypy: ignore-errors
"""Contrastive: positives are pulled, negatives pushed to a margin, each pair by itself.

settings: margin, positive margin, -, 1 for one mean over all pairs (0: one of positives and one of negatives).
FLAG: hinges are squared.
"""

from nearkin.kernels.links.link import (
    HIGH,
    NEGATIVE_ACTIVE_TERMS,
    NEGATIVE_PAID,
    NEGATIVE_TERMS,
    Link,
    mean,
    store_pairs,
    tally,
    valid_pairs,
)
from nearkin.kernels.numerics import load, row_sum, store, tl, triton


@triton.jit
def init(M: tl.constexpr, N: tl.constexpr):
    paid, negative_paid = tl.zeros((M, N), tl.float32), tl.zeros((M, N), tl.float32)
    positives, pushed = tl.zeros((M, N), tl.int32), tl.zeros((M, N), tl.int32)
    return paid, negative_paid, positives, pushed, tl.zeros((N,), tl.int32)


@triton.jit
def add(state, tile, reference, facts, settings, SELF: tl.constexpr, FLAG: tl.constexpr, ACTIVE: tl.constexpr):
    paid, negative_paid, positives, pushed, references = state
    value, positive, negative = tile
    pull = tl.maximum(value - settings[1], 0.0)
    push = tl.maximum(settings[0] - value, 0.0)
    references += reference[0].to(tl.int32)
    positives += positive.to(tl.int32)
    if ACTIVE:
        positives += tl.where(positive & (pull > 0), HIGH, 0)
        pushed += (negative & (push > 0)).to(tl.int32)
    if FLAG:
        pull *= pull
        push *= push
    paid += tl.where(positive, pull, 0.0)
    negative_paid += tl.where(negative, push, 0.0)
    return paid, negative_paid, positives, pushed, references


@triton.jit
def close(stats, at, anchor, state, facts, settings, SELF: tl.constexpr, FLAG: tl.constexpr, ACTIVE: tl.constexpr):
    paid, negative_paid, positives, pushed, references = state
    store_pairs(stats, at, paid, positives)
    store(stats, NEGATIVE_PAID, at, row_sum(negative_paid))
    negatives = valid_pairs(references, anchor[0], SELF) - tl.sum(positives & (HIGH - 1), 1)
    store(stats, NEGATIVE_TERMS, at, negatives)
    store(stats, NEGATIVE_ACTIVE_TERMS, at, tl.sum(pushed, 1))


@triton.jit
def slope(tile, anchor, reference, scales, settings, SELF: tl.constexpr, FLAG: tl.constexpr):
    value, positive, negative = tile
    if FLAG:
        pull = 2.0 * tl.maximum(value - settings[1], 0.0)
        push = 2.0 * tl.maximum(settings[0] - value, 0.0)
    else:
        pull = (value > settings[1]).to(tl.float32)
        push = (value < settings[0]).to(tl.float32)
    return tl.where(positive, scales[0] * pull, tl.where(negative, -scales[1] * push, 0.0))


@triton.jit
def tally_both(sums, stats, at, option, REDUCTION: tl.constexpr):
    total, terms, negative_total, negative_terms = tally(sums, stats, at, option, REDUCTION)
    negative_total += load(stats, NEGATIVE_PAID, at).to(tl.float64)
    if REDUCTION == "active":
        negative_terms += load(stats, NEGATIVE_ACTIVE_TERMS, at).to(tl.float64)
    else:
        negative_terms += load(stats, NEGATIVE_TERMS, at).to(tl.float64)
    return total, terms, negative_total, negative_terms


@triton.jit
def two_means(sums, stats, size, option, REDUCTION: tl.constexpr):
    total, terms, negative_total, negative_terms = sums
    positives, negatives = tl.sum(terms, 0), tl.sum(negative_terms, 0)
    together = tl.where(option > 0, 1.0, 0.0)  # one mean over all pairs: each sum is divided by the number of both
    pulled, share = mean(tl.sum(total, 0), positives + together * negatives, REDUCTION)
    pushed, negative_share = mean(tl.sum(negative_total, 0), negatives + together * positives, REDUCTION)
    return (pulled + pushed) * 0.5, share * 0.5, negative_share * 0.5


LINK = Link(init, add, close, slope, saved=0, measure="distance", symmetric=True, tally=tally_both, mean=two_means)
