# mypy: ignore-errors
"""Lossless triplet: -log of how near positives and how far negatives are, in the unit cube.

settings: 1 / dimensions, ε. FLAG: coordinates enter the cube by a sigmoid.
"""

from nearkin.kernels.links.link import PAID, Link, saved, valid_pairs
from nearkin.kernels.numerics import load, row_sum, store, tl, triton

POSITIVES, NEGATIVES = saved(2)


@triton.jit
def init(M: tl.constexpr, N: tl.constexpr):
    paid, negative_paid = tl.zeros((M, N), tl.float32), tl.zeros((M, N), tl.float32)
    return paid, negative_paid, tl.zeros((M, N), tl.int32), tl.zeros((N,), tl.int32)


@triton.jit
def add(state, tile, reference, facts, settings, SELF: tl.constexpr, FLAG: tl.constexpr, ACTIVE: tl.constexpr):
    paid, negative_paid, positives, references = state
    value, positive, negative = tile
    share = value * settings[0]
    references += reference[0].to(tl.int32)
    positives += positive.to(tl.int32)
    cost = -tl.log(tl.where(positive, tl.maximum(1.0 - share, 0.0), share) + settings[1])
    paid += tl.where(positive, cost, 0.0)
    negative_paid += tl.where(negative, cost, 0.0)
    return paid, negative_paid, positives, references


@triton.jit
def close(stats, at, anchor, state, facts, settings, SELF: tl.constexpr, FLAG: tl.constexpr, ACTIVE: tl.constexpr):
    paid, negative_paid, positives, references = state
    positives = tl.sum(positives, 1)
    negatives = valid_pairs(references, anchor[0], SELF) - positives
    triplets_paid = row_sum(paid) * negatives.to(tl.float64) + row_sum(negative_paid) * positives.to(tl.float64)
    store(stats, PAID, at, triplets_paid)
    store(stats, POSITIVES, at, positives)
    store(stats, NEGATIVES, at, negatives)


@triton.jit
def slope(tile, anchor, reference, scales, settings, SELF: tl.constexpr, FLAG: tl.constexpr):
    value, positive, negative = tile
    positives, negatives = anchor
    share = value * settings[0]
    pull = tl.where(share <= 1.0, negatives / (tl.maximum(1.0 - share, 0.0) + settings[1]), 0.0)
    push = positives / (share + settings[1])
    return scales[0] * settings[0] * tl.where(positive, pull, tl.where(negative, -push, 0.0))


@triton.jit
def tally_triplets(sums, stats, at, option, REDUCTION: tl.constexpr):
    total, terms, third, fourth = sums
    terms += load(stats, POSITIVES, at).to(tl.float64) * load(stats, NEGATIVES, at).to(tl.float64)
    return total + load(stats, PAID, at).to(tl.float64), terms, third, fourth


LINK = Link(init, add, close, slope, saved=2, measure="squared", tally=tally_triplets)
