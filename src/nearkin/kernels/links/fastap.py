# mypy: ignore-errors
"""Fast-AP: average precision from soft histograms of squared distance. settings: bins, which FLAG is too.

A distance is a place p on an axis of bins + 1 centres l = 0 … bins. Its share of centre l is max(0, 1 - |p - l|), its
share of all centres up to l is min(max(l + 1 - p, 0), 1): of positives the pass sums the first, of negatives the second.
"""

from nearkin.kernels import pair_ops
from nearkin.kernels.links.link import SCALES, Link, store_term
from nearkin.kernels.numerics import store, tl, triton

CENTRES = tl.constexpr(pair_ops.MOST_BINS + 1)


@triton.jit
def init(M: tl.constexpr, N: tl.constexpr):
    sums = ()
    for _ in tl.static_range(CENTRES):  # those beyond FLAG stay 0, and the compiler drops them
        sums = sums + (tl.zeros((M,), tl.float64),)  # noqa: RUF005  triton 3.4 knows no unpacking
    return sums, sums, tl.zeros((M,), tl.int32)


@triton.jit
def add(state, tile, reference, facts, settings, SELF: tl.constexpr, FLAG: tl.constexpr, ACTIVE: tl.constexpr):
    positives, negatives, number = state
    value, positive, negative = tile
    place = tl.minimum(value, 4.0) * (settings[0] * 0.25)
    beyond = tl.where(negative, place, FLAG + 1.0)
    sums = ()
    for centre in tl.static_range(CENTRES):
        total = negatives[centre]
        if centre <= FLAG:
            total += tl.sum(tl.minimum(tl.maximum(centre + 1.0 - beyond, 0.0), 1.0), 1).to(tl.float64)
        sums = sums + (total,)  # noqa: RUF005
    found = tl.sum(positive.to(tl.int32), 1)
    if tl.max(found, 0) > 0:
        positives = _add_positives(positives, tl.where(positive, place, -2.0), FLAG)
    return positives, sums, number + found


@triton.jit
def _add_positives(positives, place, FLAG: tl.constexpr):
    sums = ()
    for centre in tl.static_range(CENTRES):
        total = positives[centre]
        if centre <= FLAG:
            total += tl.sum(tl.maximum(1.0 - tl.abs(place - centre), 0.0), 1).to(tl.float64)
        sums = sums + (total,)  # noqa: RUF005
    return sums


@triton.jit
def close(stats, at, anchor, state, facts, settings, SELF: tl.constexpr, FLAG: tl.constexpr, ACTIVE: tl.constexpr):
    positives, negatives, number = state
    missed = positives[0] * 0.0
    among_positives = missed
    for centre in tl.static_range(FLAG + 1):
        among_positives += positives[centre]
        missed += positives[centre] * negatives[centre] / _divisor(among_positives + negatives[centre])
    divisor = tl.maximum(number, 1).to(tl.float64)
    counted = store_term(stats, at, number > 0, (missed / divisor).to(tl.float32), ACTIVE)
    # A table of the slopes of a positive, and of a negative, between each two centres.
    scale = tl.where(counted, settings[0] * 0.25 / divisor, 0.0)
    among_positives = positives[0]
    for centre in tl.static_range(FLAG):
        among_all = _divisor(among_positives + negatives[centre])
        following = among_positives + positives[centre + 1]
        share = negatives[centre] / among_all
        next_share = negatives[centre + 1] / _divisor(following + negatives[centre + 1])
        per_rank = positives[centre] / among_all
        store(stats + 2, SCALES + centre, at, scale * (next_share - share + per_rank * share))
        store(stats + 2, SCALES + FLAG + centre, at, -scale * per_rank * (among_positives / among_all))
        among_positives = following


@triton.jit
def _divisor(among_all):
    return tl.where(among_all == 0.0, 1.0, among_all)


@triton.jit
def slope(tile, anchor, reference, scales, settings, SELF: tl.constexpr, FLAG: tl.constexpr):
    value, positive, negative = tile
    stats, i, size = anchor
    place = tl.minimum(value, 4.0) * (settings[0] * 0.25)
    interval = tl.minimum(tl.maximum(place.to(tl.int32), 0), FLAG - 1)
    row = SCALES + tl.where(positive, interval, interval + FLAG)
    return scales[0] * tl.load(stats + 2 + row * size + i, mask=positive | negative, other=0.0)


def link(bins: int) -> Link:
    return Link(init, add, close, slope, saved=0, measure="squared", table=2 * bins)
