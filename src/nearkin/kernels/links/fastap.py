# mypy: ignore-errors
"""Fast-AP: average precision from soft histograms of squared distance. settings: bins, which FLAG is too.

A distance is a place p on an axis of bins + 1 centres l = 0 … bins. Its share of centre l is max(0, 1 - |p - l|), its
share of all centres up to l is min(max(l + 1 - p, 0), 1). The pass sums the first of positives and the second of
negatives.
"""

from nearkin.kernels import pair_ops
from nearkin.kernels.links.link import SCALES, Link, store_term
from nearkin.kernels.numerics import add_column, column, store, tl, triton

CENTRES = tl.constexpr(pair_ops.MOST_BINS + 1)


@triton.jit
def init(M: tl.constexpr, N: tl.constexpr):
    return tl.zeros((M, CENTRES), tl.float64), tl.zeros((M, CENTRES), tl.float64), tl.zeros((M,), tl.int32)


@triton.jit
def add(state, tile, reference, facts, settings, SELF: tl.constexpr, FLAG: tl.constexpr, ACTIVE: tl.constexpr):
    positives, negatives, number = state
    value, positive, negative = tile
    place = tl.minimum(value, 4.0) * (settings[0] * 0.25)
    beyond = tl.where(negative, place, FLAG + 1.0)
    shares = tl.zeros(negatives.shape, tl.float32)
    for centre in tl.static_range(FLAG + 1):
        shares = add_column(shares, centre, tl.sum(tl.minimum(tl.maximum(centre + 1.0 - beyond, 0.0), 1.0), 1))
    negatives += shares
    in_tile = tl.sum(positive.to(tl.int32), 1)
    if tl.max(in_tile, 0) > 0:
        beside = tl.where(positive, place, -2.0)
        shares = tl.zeros(negatives.shape, tl.float32)
        for centre in tl.static_range(FLAG + 1):
            shares = add_column(shares, centre, tl.sum(tl.maximum(1.0 - tl.abs(beside - centre), 0.0), 1))
        positives += shares
    return positives, negatives, number + in_tile


@triton.jit
def close(stats, at, anchor, state, facts, settings, SELF: tl.constexpr, FLAG: tl.constexpr, ACTIVE: tl.constexpr):
    positives, negatives, number = state
    missed = tl.zeros(number.shape, tl.float64)
    among_positives = missed
    for centre in tl.static_range(FLAG + 1):
        of_positives, up_to_here = column(positives, centre), column(negatives, centre)
        among_positives += of_positives
        missed += of_positives * up_to_here / _divisor(among_positives + up_to_here)
    divisor = tl.maximum(number, 1).to(tl.float64)
    counted = store_term(stats, at, number > 0, (missed / divisor).to(tl.float32), ACTIVE)
    # A table of the slopes of a positive, and of a negative, between each two centres.
    scale = tl.where(counted, settings[0] * 0.25 / divisor, 0.0)
    of_positives, up_to_here = column(positives, 0), column(negatives, 0)
    among_positives = of_positives
    for centre in tl.static_range(FLAG):
        among_all = _divisor(among_positives + up_to_here)
        share, per_rank = up_to_here / among_all, of_positives / among_all
        by_negative = -per_rank * (among_positives / among_all)
        of_positives, up_to_here = column(positives, centre + 1), column(negatives, centre + 1)
        among_positives += of_positives
        next_share = up_to_here / _divisor(among_positives + up_to_here)
        store(stats + 2, SCALES + centre, at, scale * (next_share - share + per_rank * share))
        store(stats + 2, SCALES + FLAG + centre, at, scale * by_negative)


@triton.jit
def _divisor(among_all):
    return tl.where(among_all == 0.0, 1.0, among_all)


@triton.jit
def slope(tile, anchor, reference, scales, settings, SELF: tl.constexpr, FLAG: tl.constexpr):
    value, positive, negative = tile
    table, at = anchor
    AXIS: tl.constexpr = 0 if at.shape[0] == 1 else 1
    place = tl.minimum(value, 4.0) * (settings[0] * 0.25)
    interval = tl.minimum(tl.maximum(place.to(tl.int32), 0), FLAG - 1)
    slopes = tl.gather(table, tl.where(positive, interval, interval + FLAG), AXIS)
    return scales[0] * tl.where(positive | negative, slopes, 0.0)


def link(bins: int) -> Link:
    rows = max(32, triton.next_power_of_2(2 * bins))  # of fewer than a warp's threads triton 3.6 gathers nothing
    return Link(init, add, close, slope, saved=0, measure="squared", table=rows)
