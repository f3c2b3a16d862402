# mypy: ignore-errors
"""The kernels of `kernels.triplets`, and how large their tiles are. Imported when the first of them is wanted.

An anchor has few positives: a program lists those of its anchors, finds a negative for each, four at a time, in one
pass over the references, and keeps what the gradient needs: an int32 buffer of rows of B, in this order,

    0   how many positives an anchor has             3 + 0 C + s   column of the positive of slot s
    1   slope of its terms by its boundary (float)   3 + 1 C + s   column of its negative, -1 for none; of "all",
    2   how many of its positives stand before it                  how far one must be to cost nothing (float)
                                                     3 + 2 C + s   weight of the pair of anchor and positive (float)
                                                     3 + 3 C + s   weight of the pair of anchor and negative (float)

with C slots of room, written as far as there are positives. Where every weight is 2 or 0 (hinges of squared distances)
none are kept: those without a negative are 0. The gradient of a row gathers the pairs it is the anchor of, and finds
those it is the reference of by comparing columns, tile by tile. No sum is atomic.

Nothing is reduced across a tile inside a pass: each place of the tile keeps the best it has seen, and where. Distances
are compared as `mining` compares them, rounded to float32, and at last packed with their column into one integer: the
smaller, of equals the first. Those of listed pairs are made by the same products: equal rows are equally far.
"""

import functools
import struct
from typing import NamedTuple

import torch

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError('impl="triton" needs triton: pip install triton') from error

from nearkin import kernels
from nearkin.kernels.launch import CachedLauncher
from nearkin.kernels.row_kernels import (
    EPS,
    TAINT,
    class_ids,
    fact,
    inner_products,
    long_gradient,
    options,
    padded,
    pair_masks,
    prepare,
    squared_distances,
    store_gradient,
)
from nearkin.kernels.row_kernels import SQUARED as LENGTH

NONE = tl.constexpr(2**63 - 1)
LAST = tl.constexpr(2**31 - 1)
FIRST = tl.constexpr(3)  # row of the first list
HARD, SEMIHARD, ALL, RANDOM, WEIGHTED = (tl.constexpr(n) for n in range(5))
HINGE, SOFT, MARGIN, CONTRASTIVE = (tl.constexpr(n) for n in range(4))
ROUNDS = tl.constexpr(7)  # of Philox: as many as its authors found to be enough
SELECTIONS = ("hard", "semihard", "all", "random", "distance_weighted", "batch_hard", "easy_positive")
FALLBACKS = {"semihard_or_hardest": 1, "semihard_or_skip": 2}  # 0: the farthest stands in for a semi-hard negative
HARDEST, LEFT_OUT = tl.constexpr(1), tl.constexpr(2)
TOGETHER = tl.constexpr(2)  # positives and negatives are one mean; 1: reduced apart, 0: there are triplets alone
LOSSES = ("hinge", "soft", "margin", "contrastive")
REDUCTIONS = ("sum", "mean", "active")
SUMS = 7  # of a program: sum, number and active number of terms, the same of negatives by themselves, NaN or 0
WHOLE = 256  # coordinates of a gradient a program holds; longer rows come in chunks
MANY = 16384  # rows from which on most tiles of the gradient are empty


class Tile(NamedTuple):
    """Rows a program works for, rows that pass by at a step (at least four times as many), warps, steps in flight."""

    rows: int
    others: int
    warps: int
    stages: int


# By the most rows. With 32 rows a program of the forward pass would spill what its places keep.
FORWARD = {2**31: Tile(16, 128, 8, 2)}
BACKWARD = {8192: Tile(16, 64, 4, 2), 2**31: Tile(32, 64, 8, 2)}
LONG = Tile(16, 64, 8, 1)  # backward, where a program holds more than 128 coordinates of a gradient
LABELS = 256  # labels compared at a time
FINISH = 1024
INTERPRETED = Tile(16, 64, 4, 1)  # small, so that small tests have several tiles and ragged ends


def tile(table, number: int) -> Tile:
    if kernels.interpreted():
        return INTERPRETED
    return next(size for most, size in table.items() if number <= most)


@triton.jit
def _tile(x, r, i, j, left, right, rounding, ROOT: tl.constexpr, SELF: tl.constexpr, PAD: tl.constexpr,
          K: tl.constexpr):  # fmt: skip
    """Squared distances in float32, or distances (ROOT), as `core.distances` rounds them; rows i and j must exist."""
    squared = squared_distances(inner_products(x, r, i, j, PAD, K), left, right, i, j, rounding, SELF)
    return tl.sqrt(squared).to(tl.float32) if ROOT else squared.to(tl.float32)


@triton.jit
def _met(x, r, own, i, there, left, start, others, rounding, ROOT: tl.constexpr, SELF: tl.constexpr, PAD: tl.constexpr,
         N: tl.constexpr, K: tl.constexpr):  # fmt: skip
    """A tile of distances from reference `start` on, and which of them are to kin and to strangers."""
    j = start + tl.arange(0, N)
    real = j < others
    j = tl.minimum(j, others - 1)
    measured = _tile(x, r, i, j, left, fact(r, LENGTH, j, real, others, PAD), rounding, ROOT, SELF, PAD, K)
    positive, negative = pair_masks(own, class_ids(r, j, real, others, PAD), i, j, there, real, SELF)
    return measured, positive, negative


@triton.jit
def _list(r, lists, i, there, own, number, others, SELF: tl.constexpr, PAD: tl.constexpr, L: tl.constexpr):
    """Lists an anchor's positives in order; how many they are, and how many negatives there are."""
    found = tl.zeros(i.shape, tl.int32)
    strangers = tl.zeros(i.shape, tl.int32)
    before = tl.zeros(i.shape, tl.int32)
    for start in range(0, others, L):
        j = start + tl.arange(0, L)
        real = j < others
        positive, negative = pair_masks(own, class_ids(r, j, real, others, PAD), i, j, there, real, SELF)
        here = positive.to(tl.int32)
        more = tl.sum(here, 1)
        strangers += tl.sum(negative.to(tl.int32), 1)
        if tl.sum(more) > 0:
            slot = found[:, None] + tl.cumsum(here, 1) - 1
            at = (FIRST + slot) * number + i[:, None]
            tl.store(lists + at, tl.broadcast_to(j[None, :], (i.shape[0], L)), mask=positive)
            before += tl.sum((positive & (j[None, :] < i[:, None])).to(tl.int32), 1)
            found += more
    tl.store(lists + i, found, mask=there)
    tl.store(lists + 2 * number + i, before, mask=there)
    return found, strangers


@triton.jit
def _measured(x, r, lists, region, i, left, slot, number, others, rounding, ROOT: tl.constexpr, SELF: tl.constexpr,
              PAD: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):  # fmt: skip
    """Distances of the anchors to what they list in four slots of a region, (M,) each.

    The listed rows of all M anchors make one tile, of which each anchor reads its own.
    """
    n = tl.arange(0, N)
    turn = n // M
    owner = tl.program_id(0) * M + n % M
    room = (turn < 4) & (owner < number)
    room = room & (slot + turn < tl.load(lists + owner, mask=room, other=0))
    column = tl.load(lists + (region + slot + turn) * number + owner, mask=room, other=0)
    column = tl.maximum(column, 0)
    right = fact(r, LENGTH, column, room, others, PAD)
    measured = _tile(x, r, i, column, left, right, rounding, ROOT, SELF, PAD, K)
    mine = (i[:, None] == owner[None, :]) & room[None, :]
    first = tl.sum(tl.where(mine & (turn == 0)[None, :], measured, 0.0), 1)
    second = tl.sum(tl.where(mine & (turn == 1)[None, :], measured, 0.0), 1)
    third = tl.sum(tl.where(mine & (turn == 2)[None, :], measured, 0.0), 1)
    fourth = tl.sum(tl.where(mine & (turn == 3)[None, :], measured, 0.0), 1)
    return first, second, third, fourth


@triton.jit
def _ranked(measured, ROOT: tl.constexpr):
    """Distances as selections compare them, from what `_tile` makes."""
    return measured if ROOT else tl.sqrt_rn(measured)


@triton.jit
def _keep_less(best, at, value, mask, start):
    """Each place of a tile keeps the smallest it has seen, of equals the first, and in which tile."""
    better = mask & (value < best)
    return tl.where(better, value, best), tl.where(better, start, at)


@triton.jit
def _keep_more(best, at, value, mask, start):
    better = mask & (value > best)
    return tl.where(better, value, best), tl.where(better, start, at)


@triton.jit
def _least(best, at, N: tl.constexpr):
    """Column of the least of each row, none below 0, of equals the first; -1 where nobody was seen. And the least."""
    column = (at + tl.arange(0, N)[None, :]).to(tl.int64)
    key = tl.min(tl.where(at >= 0, best.to(tl.int32, bitcast=True).to(tl.int64) << 32 | column, NONE), 1)
    least = (key >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return tl.where(key == NONE, -1, key & LAST).to(tl.int32), least


@triton.jit
def _top(best, at, N: tl.constexpr):
    """Column of the largest of each row, of equals the first; -1 where nobody was seen."""
    largest = tl.max(best, 1)
    column = at + tl.arange(0, N)[None, :]
    first = tl.min(tl.where((at >= 0) & (best == largest[:, None]), column, LAST), 1)
    return tl.where(first == LAST, -1, first)


@triton.jit
def _farthest(x, r, own, i, there, left, others, rounding, ROOT: tl.constexpr, SELF: tl.constexpr, PAD: tl.constexpr,
              M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):  # fmt: skip
    """Column of the farthest negative."""
    best = tl.full((M, N), -1.0, tl.float32)
    at = tl.full((M, N), -1, tl.int32)
    for start in range(0, others, N):
        measured, _, negative = _met(x, r, own, i, there, left, start, others, rounding, ROOT, SELF, PAD, N, K)
        best, at = _keep_more(best, at, _ranked(measured, ROOT), negative, start)
    return _top(best, at, N)


@triton.jit
def _semihard(x, r, own, i, there, left, level0, level1, level2, level3, others, rounding, NEAREST: tl.constexpr,
              ROOT: tl.constexpr, SELF: tl.constexpr, PAD: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
              K: tl.constexpr):  # fmt: skip
    """Columns of the nearest negatives strictly farther than each of four levels (NEAREST: of the nearest of all)."""
    best0 = tl.full((M, N), float("inf"), tl.float32)
    best1 = best0
    best2 = best0
    best3 = best0
    at0 = tl.full((M, N), -1, tl.int32)
    at1 = at0
    at2 = at0
    at3 = at0
    for start in range(0, others, N):
        measured, _, negative = _met(x, r, own, i, there, left, start, others, rounding, ROOT, SELF, PAD, N, K)
        measured = tl.where(negative, _ranked(measured, ROOT), -1.0)
        if NEAREST:
            best0, at0 = _keep_less(best0, at0, measured, negative, start)
        else:
            best0, at0 = _keep_less(best0, at0, measured, measured > level0[:, None], start)
            best1, at1 = _keep_less(best1, at1, measured, measured > level1[:, None], start)
            best2, at2 = _keep_less(best2, at2, measured, measured > level2[:, None], start)
            best3, at3 = _keep_less(best3, at3, measured, measured > level3[:, None], start)
    column0, _ = _least(best0, at0, N)
    if NEAREST:
        return column0, column0, column0, column0
    column1, _ = _least(best1, at1, N)
    column2, _ = _least(best2, at2, N)
    column3, _ = _least(best3, at3, N)
    return column0, column1, column2, column3


@triton.jit
def _luck(bits, log_weight, WEIGHTED: tl.constexpr):
    """How early a stranger arrives in a race: the largest is a draw by weight, or with equal weights.

    -log(E), E of the exponential distribution, is added to a log weight; any falling function of E does without.
    """
    v = (bits.to(tl.float32) + 0.5) * 2.0**-32
    if not WEIGHTED:
        return -v
    small = v * (1.0 + v * (0.5 + v * 0.33333334))  # -log(1 - v), which cancels near 0
    late = tl.where(v < 0.005, small, -tl.log(tl.maximum(1.0 - v, 1e-30)))
    return log_weight - tl.log(late)


@triton.jit
def _race(x, r, own, seed, i, there, left, limit, slot, others, rounding, power, bend, most, WEIGHTED: tl.constexpr,
          ROOT: tl.constexpr, SELF: tl.constexpr, PAD: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
          K: tl.constexpr):  # fmt: skip
    """Columns of negatives drawn for four slots: by the density of distances within the limit, or uniformly.

    What a pair draws hangs on the seed, its two rows and the slot, and on nothing else.
    """
    best0 = tl.full((M, N), float("-inf"), tl.float32)
    best1 = best0
    best2 = best0
    best3 = best0
    at0 = tl.full((M, N), -1, tl.int32)
    at1 = at0
    at2 = at0
    at3 = at0
    none = tl.zeros((M, N), tl.int32)
    for start in range(0, others, N):
        j = start + tl.arange(0, N)
        weight = tl.zeros((M, N), tl.float32)
        if WEIGHTED:
            squared, _, negative = _met(x, r, own, i, there, left, start, others, rounding, ROOT, SELF, PAD, N, K)
            negative = negative & (squared < limit[:, None])
            # -log q(d), as `mining.distance_weighted` has it, from d².
            weight = power * tl.log(tl.maximum(squared, 1e-24)) - bend * tl.log(tl.maximum(1.0 - squared * 0.25, 1e-12))
            weight = tl.minimum(weight, most)
        else:
            real = j < others
            _, negative = pair_masks(own, class_ids(r, j, real, others, PAD), i, j, there, real, SELF)
        bits0, bits1, bits2, bits3 = tl.philox(seed, none + i[:, None], none + j[None, :], none + slot, none, ROUNDS)
        best0, at0 = _keep_more(best0, at0, _luck(bits0, weight, WEIGHTED), negative, start)
        best1, at1 = _keep_more(best1, at1, _luck(bits1, weight, WEIGHTED), negative, start)
        best2, at2 = _keep_more(best2, at2, _luck(bits2, weight, WEIGHTED), negative, start)
        best3, at3 = _keep_more(best3, at3, _luck(bits3, weight, WEIGHTED), negative, start)
    return _top(best0, at0, N), _top(best1, at1, N), _top(best2, at2, N), _top(best3, at3, N)


@triton.jit
def _plain(measured, SQUARED: tl.constexpr, ROOT: tl.constexpr):
    """What a loss is made of: squared distances, or distances."""
    if SQUARED or ROOT:
        return measured
    return tl.sqrt_rn(measured)


@triton.jit
def _slope(distance, SQUARED: tl.constexpr):
    """What the gradient by a distance is multiplied with to become one by the difference of the rows; 0 at 0."""
    if SQUARED:
        return tl.full(distance.shape, 2.0, tl.float32)
    return tl.where(distance > 0, 1.0 / tl.where(distance > 0, distance, 1.0), 0.0)


@triton.jit
def _level(measured, found, slot, margin, SQUARED: tl.constexpr, ROOT: tl.constexpr):
    """How far a negative must be to cost nothing beside the positive of a slot; -inf without one."""
    return tl.where(slot < found, _plain(measured, SQUARED, ROOT) + margin, float("-inf"))


@triton.jit
def _every(x, r, own, i, there, left, near0, near1, near2, near3, level0, level1, level2, level3, others, rounding,
           SQUARED: tl.constexpr, ROOT: tl.constexpr, SELF: tl.constexpr, PAD: tl.constexpr, M: tl.constexpr,
           N: tl.constexpr, K: tl.constexpr):  # fmt: skip
    """Hinges of four slots with all negatives: their sum but for the margins, and how many of each slot are active."""
    total = tl.zeros((M, N), tl.float64)
    count01 = tl.zeros((M, N), tl.int32)  # two counts of 16 bits: a place sees few tiles
    count23 = tl.zeros((M, N), tl.int32)
    for start in range(0, others, N):
        distance, _, negative = _met(x, r, own, i, there, left, start, others, rounding, ROOT, SELF, PAD, N, K)
        distance = tl.where(negative, _plain(distance, SQUARED, ROOT), float("inf"))
        active0 = distance < level0[:, None]
        active1 = distance < level1[:, None]
        active2 = distance < level2[:, None]
        active3 = distance < level3[:, None]
        gaps = tl.where(active0, near0[:, None] - distance, 0.0) + tl.where(active1, near1[:, None] - distance, 0.0)
        gaps += tl.where(active2, near2[:, None] - distance, 0.0) + tl.where(active3, near3[:, None] - distance, 0.0)
        total += gaps.to(tl.float64)
        count01 += tl.where(active0, 1, 0) + tl.where(active1, 65536, 0)
        count23 += tl.where(active2, 1, 0) + tl.where(active3, 65536, 0)
    return (tl.sum(total, 1), tl.sum(count01 & 65535, 1), tl.sum(count01 >> 16, 1), tl.sum(count23 & 65535, 1),
            tl.sum(count23 >> 16, 1))  # fmt: skip


@triton.jit
def _put(lists, region, slot, i, value, number, mask):
    """One entry an anchor; floats as the integer of the same bits."""
    value = value.to(tl.int32, bitcast=True) if value.dtype == tl.float32 else value
    tl.store(lists + (region + slot) * number + i, value, mask=mask)


@triton.jit
def _keep_every(lists, i, found, slot, number, capacity, count, near, level, SQUARED: tl.constexpr, ROOT: tl.constexpr):
    """What the gradient of all triplets needs of a slot."""
    inside = slot < found
    weight = count.to(tl.float32) * _slope(_plain(near, SQUARED, ROOT), SQUARED)
    _put(lists, FIRST + capacity, slot, i, level, number, inside)
    _put(lists, FIRST + 2 * capacity, slot, i, weight, number, inside)


@triton.jit
def _term(lists, i, found, slot, number, capacity, near, stranger, far, edge, margin, extra, sums, terms, active, more,
          pushed, slope, LOSS: tl.constexpr, SQUARED: tl.constexpr, ROOT: tl.constexpr):  # fmt: skip
    """Adds the terms of a slot, and keeps its pairs and their weights. `extra`: see `triplets.Plan`."""
    PLAIN: tl.constexpr = SQUARED and LOSS < MARGIN
    near = _plain(near, PLAIN, ROOT)
    far = _plain(far, PLAIN, ROOT)
    valid = (slot < found) & (stranger >= 0)
    one = tl.where(valid, 1.0, 0.0)
    pull = _slope(near, PLAIN)
    push = _slope(far, PLAIN)
    terms += valid.to(tl.int64)
    if LOSS == HINGE:
        value = tl.maximum(near - far + margin, 0.0)
        steep = tl.where(value > 0, one, 0.0)
        sums += (value * one).to(tl.float64)
        active += (steep > 0).to(tl.int64)
        pull *= steep
        push *= steep
    elif LOSS == SOFT:
        gap = near.to(tl.float64) - far.to(tl.float64)
        tail = tl.exp(-tl.abs(gap))
        whole = 1.0 + tail
        # log(1 + t) of a small t: what 1 + t has lost is put back.
        rest = tl.where(whole == 1.0, tail, tl.log(whole) * (tail / tl.where(whole == 1.0, 1.0, whole - 1.0)))
        value = tl.where(valid, tl.maximum(gap, 0.0) + rest, 0.0).to(tl.float32)
        steep = (tl.where(gap >= 0, 1.0, tail) / whole).to(tl.float32) * one
        sums += value.to(tl.float64)
        active += (value > 0).to(tl.int64)
        pull *= steep
        push *= steep
    elif LOSS == MARGIN:
        inner = tl.where(valid, tl.maximum(margin + near - edge, 0.0), 0.0)
        outer = tl.where(valid, tl.maximum(margin - far + edge, 0.0), 0.0)
        sums += inner.to(tl.float64) + outer.to(tl.float64) + (extra * edge * one).to(tl.float64)
        terms += valid.to(tl.int64)
        active += (inner > 0).to(tl.int64) + (outer > 0).to(tl.int64)
        pull = tl.where(inner > 0, pull, 0.0)
        push = tl.where(outer > 0, push, 0.0)
        slope += tl.where(outer > 0, 1.0, 0.0) - tl.where(inner > 0, 1.0, 0.0) + extra * one
    else:
        inner = tl.where(valid, tl.maximum(near - extra, 0.0), 0.0)
        outer = tl.where(valid, tl.maximum(margin - far, 0.0), 0.0)
        active += (inner > 0).to(tl.int64)
        pushed += (outer > 0).to(tl.int64)
        if SQUARED:
            pull *= 2.0 * inner
            push *= 2.0 * outer
            inner *= inner
            outer *= outer
        else:
            pull = tl.where(inner > 0, pull, 0.0)
            push = tl.where(outer > 0, push, 0.0)
        sums += inner.to(tl.float64)
        more += outer.to(tl.float64)
    inside = slot < found
    _put(lists, FIRST + capacity, slot, i, tl.where(valid & (push != 0), stranger, -1), number, inside)
    if not PLAIN or LOSS != HINGE:
        _put(lists, FIRST + 2 * capacity, slot, i, pull * one, number, inside)
        _put(lists, FIRST + 3 * capacity, slot, i, push * one, number, inside)
    return sums, terms, active, more, pushed, slope


@triton.jit
def _spoilt(x, r, i, there, number, others, SELF: tl.constexpr, PAD: tl.constexpr, M: tl.constexpr):
    """0 or NaN for the program's anchors, and for its share of the references."""
    spoilt = fact(x, TAINT, i, there, number, PAD)
    if not SELF:
        for start in range(tl.program_id(0) * M, others, tl.num_programs(0) * M):
            j = start + tl.arange(0, M)
            spoilt += fact(r, TAINT, j, j < others, others, PAD)
    return tl.sum(spoilt)


@triton.jit
def _keep(sums, kind, value):
    """What a program has found, beside the others' of the same kind."""
    tl.store(sums + kind * tl.num_programs(0) + tl.program_id(0), value.to(tl.float64))


@triton.jit(do_not_specialize=["capacity"])
def _rows(x, r, boundary, seeds, lists, stats, number, others, capacity, stride, margin, extra, cutoff, power, bend,
          most, rounding, SELECTION: tl.constexpr, LOSS: tl.constexpr, SQUARED: tl.constexpr, ROOT: tl.constexpr,
          SELF: tl.constexpr, PAD: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
          L: tl.constexpr, FALLBACK: tl.constexpr):  # fmt: skip
    """Selections in which every positive of an anchor has a part: lists, negatives, terms."""
    place = tl.program_id(0) * M + tl.arange(0, M)
    there = place < number
    i = tl.minimum(place, number - 1)
    own = class_ids(x, i, there, number, PAD)
    left = fact(x, LENGTH, i, there, number, PAD)
    spoilt = _spoilt(x, r, i, there, number, others, SELF, PAD, M)
    edge = tl.zeros((M,), tl.float32)
    limit = edge + cutoff
    if LOSS == MARGIN:
        edge = tl.load(boundary + i * stride, mask=there, other=0.0)
        spoilt += tl.sum(edge * 0.0).to(tl.float64)
        limit += edge
    limit = tl.maximum(limit, 0.0)
    limit = limit * limit
    found, strangers = _list(r, lists, i, there, own, number, others, SELF, PAD, L)
    found = tl.where(there, found, 0)
    tl.debug_barrier()  # what other threads have listed is read from here on
    sums = tl.zeros((M,), tl.float64)
    more = tl.zeros((M,), tl.float64)
    terms = tl.zeros((M,), tl.int64)
    active = tl.zeros((M,), tl.int64)
    pushed = tl.zeros((M,), tl.int64)
    slope = tl.zeros((M,), tl.float32)
    for slot in range(0, tl.max(found), 4):
        near0, near1, near2, near3 = _measured(x, r, lists, FIRST, i, left, slot, number, others, rounding, ROOT, SELF,
                                               PAD, M, N, K)  # fmt: skip
        if SELECTION == ALL:
            level0 = _level(near0, found, slot, margin, SQUARED, ROOT)
            level1 = _level(near1, found, slot + 1, margin, SQUARED, ROOT)
            level2 = _level(near2, found, slot + 2, margin, SQUARED, ROOT)
            level3 = _level(near3, found, slot + 3, margin, SQUARED, ROOT)
            gaps, count0, count1, count2, count3 = _every(
                x, r, own, i, there, left, _plain(near0, SQUARED, ROOT), _plain(near1, SQUARED, ROOT),
                _plain(near2, SQUARED, ROOT), _plain(near3, SQUARED, ROOT), level0, level1, level2, level3, others,
                rounding, SQUARED, ROOT, SELF, PAD, M, N, K)  # fmt: skip
            counts = count0 + count1 + count2 + count3
            active += counts.to(tl.int64)
            # The margin in float64, of two float32: hinges may be much smaller than what it is rounded by.
            sums += gaps + counts.to(tl.float64) * (sums * 0.0 + margin + extra)
            _keep_every(lists, i, found, slot, number, capacity, count0, near0, level0, SQUARED, ROOT)
            _keep_every(lists, i, found, slot + 1, number, capacity, count1, near1, level1, SQUARED, ROOT)
            _keep_every(lists, i, found, slot + 2, number, capacity, count2, near2, level2, SQUARED, ROOT)
            _keep_every(lists, i, found, slot + 3, number, capacity, count3, near3, level3, SQUARED, ROOT)
        else:
            if SELECTION >= RANDOM:
                seed = tl.load(seeds)
                column0, column1, column2, column3 = _race(
                    x, r, own, seed, i, there, left, limit, slot, others, rounding, power, bend, most,
                    SELECTION == WEIGHTED, ROOT, SELF, PAD, M, N, K)  # fmt: skip
                if SELECTION == WEIGHTED:
                    lost = (slot < found) & (strangers > 0)
                    lost = lost & ((column0 < 0) | (column1 < 0) | (column2 < 0) | (column3 < 0))
                    if tl.max(lost.to(tl.int32)) > 0:  # all negatives are beyond the limit
                        any0, any1, any2, any3 = _race(
                            x, r, own, seed, i, there, left, limit, slot, others, rounding, power, bend, most, False,
                            ROOT, SELF, PAD, M, N, K)  # fmt: skip
                        column0 = tl.where(column0 < 0, any0, column0)
                        column1 = tl.where(column1 < 0, any1, column1)
                        column2 = tl.where(column2 < 0, any2, column2)
                        column3 = tl.where(column3 < 0, any3, column3)
            else:
                column0, column1, column2, column3 = _semihard(
                    x, r, own, i, there, left, _ranked(near0, ROOT), _ranked(near1, ROOT), _ranked(near2, ROOT),
                    _ranked(near3, ROOT), others, rounding, SELECTION == HARD, ROOT, SELF, PAD, M, N, K)  # fmt: skip
                if SELECTION == SEMIHARD and FALLBACK != LEFT_OUT:
                    none = (column0 < 0) | ((column1 < 0) & (slot + 1 < found))
                    none = none | ((column2 < 0) & (slot + 2 < found)) | ((column3 < 0) & (slot + 3 < found))
                    none = none & (slot < found) & (strangers > 0)
                    if tl.max(none.to(tl.int32)) > 0:  # a positive farther than every negative
                        if FALLBACK == HARDEST:
                            column, _, _, _ = _semihard(x, r, own, i, there, left, edge, edge, edge, edge, others,
                                                        rounding, True, ROOT, SELF, PAD, M, N, K)  # fmt: skip
                        else:
                            column = _farthest(x, r, own, i, there, left, others, rounding, ROOT, SELF, PAD, M, N, K)
                        column0 = tl.where(column0 < 0, column, column0)
                        column1 = tl.where(column1 < 0, column, column1)
                        column2 = tl.where(column2 < 0, column, column2)
                        column3 = tl.where(column3 < 0, column, column3)
            _put(lists, FIRST + capacity, slot, i, column0, number, slot < found)
            _put(lists, FIRST + capacity, slot + 1, i, column1, number, slot + 1 < found)
            _put(lists, FIRST + capacity, slot + 2, i, column2, number, slot + 2 < found)
            _put(lists, FIRST + capacity, slot + 3, i, column3, number, slot + 3 < found)
            tl.debug_barrier()
            far0, far1, far2, far3 = _measured(x, r, lists, FIRST + capacity, i, left, slot, number, others,
                                               rounding, ROOT, SELF, PAD, M, N, K)  # fmt: skip
            tl.debug_barrier()
            sums, terms, active, more, pushed, slope = _term(
                lists, i, found, slot, number, capacity, near0, column0, far0, edge, margin, extra, sums, terms, active,
                more, pushed, slope, LOSS, SQUARED, ROOT)  # fmt: skip
            sums, terms, active, more, pushed, slope = _term(
                lists, i, found, slot + 1, number, capacity, near1, column1, far1, edge, margin, extra, sums, terms,
                active, more, pushed, slope, LOSS, SQUARED, ROOT)  # fmt: skip
            sums, terms, active, more, pushed, slope = _term(
                lists, i, found, slot + 2, number, capacity, near2, column2, far2, edge, margin, extra, sums, terms,
                active, more, pushed, slope, LOSS, SQUARED, ROOT)  # fmt: skip
            sums, terms, active, more, pushed, slope = _term(
                lists, i, found, slot + 3, number, capacity, near3, column3, far3, edge, margin, extra, sums, terms,
                active, more, pushed, slope, LOSS, SQUARED, ROOT)  # fmt: skip
    if SELECTION == ALL:
        terms = found.to(tl.int64) * strangers.to(tl.int64)
    if LOSS == MARGIN:
        tl.store(lists + number + i, slope.to(tl.int32, bitcast=True), mask=there)
    _keep(stats, 0, tl.sum(sums))
    _keep(stats, 1, tl.sum(terms))
    _keep(stats, 2, tl.sum(active))
    if LOSS == CONTRASTIVE:
        _keep(stats, 3, tl.sum(more))
        _keep(stats, 4, tl.sum(terms))
        _keep(stats, 5, tl.sum(pushed))
    _keep(stats, 6, spoilt)


@triton.jit
def _extremes(x, r, lists, stats, number, others, margin, rounding, EASY: tl.constexpr, LOSS: tl.constexpr,
              SQUARED: tl.constexpr, ROOT: tl.constexpr, SELF: tl.constexpr, PAD: tl.constexpr, M: tl.constexpr,
              N: tl.constexpr, K: tl.constexpr):  # fmt: skip
    """One triplet an anchor, in its only slot: farthest positive and nearest negative; EASY: nearest, semi-hard."""
    place = tl.program_id(0) * M + tl.arange(0, M)
    there = place < number
    i = tl.minimum(place, number - 1)
    own = class_ids(x, i, there, number, PAD)
    left = fact(x, LENGTH, i, there, number, PAD)
    spoilt = _spoilt(x, r, i, there, number, others, SELF, PAD, M)
    kin = tl.full((M, N), float("inf") if EASY else -1.0, tl.float32)
    kin_at = tl.full((M, N), -1, tl.int32)
    level = tl.full((M,), -1.0, tl.float32)
    if EASY:
        for start in range(0, others, N):
            j = start + tl.arange(0, N)
            real = j < others
            positive, _ = pair_masks(own, class_ids(r, j, real, others, PAD), i, j, there, real, SELF)
            if tl.max(tl.max(positive.to(tl.int32), 1)) > 0:
                measured, positive, _ = _met(x, r, own, i, there, left, start, others, rounding, ROOT, SELF, PAD, N, K)
                kin, kin_at = _keep_less(kin, kin_at, _ranked(measured, ROOT), positive, start)
        column, level = _least(kin, kin_at, N)
    best = tl.full((M, N), float("inf"), tl.float32)
    at = tl.full((M, N), -1, tl.int32)
    for start in range(0, others, N):
        measured, positive, negative = _met(x, r, own, i, there, left, start, others, rounding, ROOT, SELF, PAD, N, K)
        measured = _ranked(measured, ROOT)
        if EASY:
            best, at = _keep_less(best, at, measured, negative & (measured > level[:, None]), start)
        else:
            best, at = _keep_less(best, at, measured, negative, start)
            kin, kin_at = _keep_more(kin, kin_at, measured, positive, start)
    stranger, _ = _least(best, at, N)
    if EASY:
        if tl.max(((stranger < 0) & (column >= 0)).to(tl.int32)) > 0:
            other = _farthest(x, r, own, i, there, left, others, rounding, ROOT, SELF, PAD, M, N, K)
            stranger = tl.where(stranger < 0, other, stranger)
    else:
        column = _top(kin, kin_at, N)
    found = (there & (column >= 0)).to(tl.int32)
    tl.store(lists + i, found, mask=there)
    _put(lists, FIRST, 0, i, column, number, there)
    _put(lists, FIRST + 1, 0, i, stranger, number, there)
    tl.debug_barrier()
    near, _, _, _ = _measured(x, r, lists, FIRST, i, left, 0, number, others, rounding, ROOT, SELF, PAD, M, N, K)
    far, _, _, _ = _measured(x, r, lists, FIRST + 1, i, left, 0, number, others, rounding, ROOT, SELF, PAD, M, N, K)
    tl.debug_barrier()
    wide = tl.zeros((M,), tl.float64)
    whole = tl.zeros((M,), tl.int64)
    sums, terms, active, _, _, _ = _term(lists, i, found, 0, number, 1, near, stranger, far, near, margin, 0.0, wide,
                                         whole, whole, wide, whole, level, LOSS, SQUARED, ROOT)  # fmt: skip
    _keep(stats, 0, tl.sum(sums))
    _keep(stats, 1, tl.sum(terms))
    _keep(stats, 2, tl.sum(active))
    _keep(stats, 6, spoilt)


@triton.jit
def _total(values, number, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, number, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(values + at, mask=at < number, other=0.0)
    return tl.sum(total)


@triton.jit
def _reduced(sums, terms, active, REDUCTION: tl.constexpr):
    """A reduced sum and what each of its terms counts: 0 where nothing counts."""
    if REDUCTION == 0:
        return sums, sums * 0.0 + 1.0
    many = terms if REDUCTION == 1 else active
    each = tl.where(many > 0, 1.0 / tl.maximum(many, 1.0), 0.0)
    return tl.where(many > 0, sums / tl.maximum(many, 1.0), 0.0), each


@triton.jit(do_not_specialize=["programs"])
def _finish(stats, loss, programs, HALVES: tl.constexpr, REDUCTION: tl.constexpr, BLOCK: tl.constexpr):
    """The loss; and behind the programs' sums, what a pair of each kind counts."""
    sums = _total(stats, programs, BLOCK)
    terms = _total(stats + programs, programs, BLOCK)
    active = _total(stats + 2 * programs, programs, BLOCK)
    spoilt = _total(stats + 6 * programs, programs, BLOCK)
    value, pull = _reduced(sums, terms, active, REDUCTION)
    push = pull
    if HALVES:
        sums = _total(stats + 3 * programs, programs, BLOCK)
        terms = _total(stats + 4 * programs, programs, BLOCK)
        active = _total(stats + 5 * programs, programs, BLOCK)
        if HALVES == TOGETHER:
            near = _total(stats, programs, BLOCK)
            both = terms + _total(stats + programs, programs, BLOCK)
            stirred = active + _total(stats + 2 * programs, programs, BLOCK)
            value, pull = _reduced(near, both, stirred, REDUCTION)
            more, push = _reduced(sums, both, stirred, REDUCTION)
        else:
            more, push = _reduced(sums, terms, active, REDUCTION)
        value = (value + more) * 0.5
        pull = pull * 0.5
        push = push * 0.5
    tl.store(loss, (value + spoilt).to(tl.float32))
    tl.store(stats + 7 * programs, pull + spoilt)  # a spoilt batch has no sound gradient either
    tl.store(stats + 7 * programs + 1, push + spoilt)


@triton.jit
def _entry(lists, region, slot, at, anchors, mask):
    return tl.load(lists + (region + slot) * anchors + at, mask=mask, other=-1)


@triton.jit
def _float(lists, region, slot, at, anchors, mask):
    return tl.load(lists + (region + slot) * anchors + at, mask=mask, other=0).to(tl.float32, bitcast=True)


@triton.jit
def _pull(lists, slot, at, anchors, capacity, mask, KEPT: tl.constexpr):
    """The weight of the pair of an anchor and its positive of a slot."""
    if KEPT:
        return _float(lists, FIRST + 2 * capacity, slot, at, anchors, mask)
    return tl.where(_entry(lists, FIRST + capacity, slot, at, anchors, mask) >= 0, 2.0, 0.0)


@triton.jit
def _push(lists, slot, at, anchors, capacity, mask, KEPT: tl.constexpr):
    """The weight of the pair of an anchor and its negative of a slot, where it has one."""
    if KEPT:
        return _float(lists, FIRST + 3 * capacity, slot, at, anchors, mask)
    return tl.where(mask, 2.0, 0.0)


@triton.jit
def _gather(acc, total, b, column, weight, axis, PAD: tl.constexpr):
    """Adds weight · row of each anchor's listed column, and the weight."""
    there = column >= 0
    weight = tl.where(there, weight, 0.0).to(tl.float64)
    at = column.to(tl.int64)[:, None] * PAD + axis[None, :]
    row = tl.load(b + at, mask=there[:, None] & (axis < PAD)[None, :], other=0.0)
    return acc + weight[:, None] * row, total + weight


@triton.jit(do_not_specialize=["capacity", "programs"])
def _back(x, a, b, lists, stats, upstream, out, by_edge, number, others, anchors, dim, capacity, programs, rounding,
          OWN: tl.constexpr, OTHER: tl.constexpr, EVERY: tl.constexpr, ONE: tl.constexpr, KEPT: tl.constexpr,
          EDGE: tl.constexpr, SQUARED: tl.constexpr, NORMALIZE: tl.constexpr, SELF: tl.constexpr, FUSED: tl.constexpr,
          SKIP: tl.constexpr, PAD: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
          D: tl.constexpr):  # fmt: skip
    """The gradient by rows i of `x`, as anchors (OWN), as references (OTHER), or both; a: they prepared, b: the others.

    Each pair gives weight · (a_i - b_j): the weights are summed, and the rows they are at. ONE: an anchor has one slot,
    and need not be among the positives of its positive.
    """
    ROOT: tl.constexpr = not SQUARED
    LISTED: tl.constexpr = SELF and not ONE  # kin list each other
    place = tl.program_id(0) * M + tl.arange(0, M)
    there = place < number
    i = tl.minimum(place, number - 1)
    axis = tl.program_id(1) * D + tl.arange(0, D)
    upper = tl.load(upstream).to(tl.float64)
    pull_share = (tl.load(stats + 7 * programs) * upper).to(tl.float32)
    push_share = (tl.load(stats + 7 * programs + 1) * upper).to(tl.float32)
    acc = tl.zeros((M, D), tl.float64)
    total = tl.zeros((M,), tl.float64)
    found = tl.zeros((M,), tl.int32)
    if OWN:
        found = tl.load(lists + i, mask=there, other=0)
        before = tl.load(lists + 2 * anchors + i, mask=there, other=0)
        for slot in range(0, tl.max(found)):
            mask = slot < found
            column = _entry(lists, FIRST, slot, i, anchors, mask)
            weight = _pull(lists, slot, i, anchors, capacity, mask, KEPT)
            if LISTED:  # the same pair with its roles exchanged
                other = before - (column < i).to(tl.int32)
                weight += _pull(lists, other, column, anchors, capacity, mask, KEPT)
            acc, total = _gather(acc, total, b, column, weight * pull_share, axis, PAD)
            if not EVERY:
                column = _entry(lists, FIRST + capacity, slot, i, anchors, mask)
                weight = _push(lists, slot, i, anchors, capacity, mask, KEPT)
                acc, total = _gather(acc, total, b, column, weight * -push_share, axis, PAD)
    if OTHER or EVERY:
        left = fact(a, LENGTH, i, there, number, PAD)
        own = class_ids(a, i, there, number, PAD)
        if EVERY and OWN:
            low = float("-inf")
            level0 = tl.where(found > 0, _float(lists, FIRST + capacity, 0, i, anchors, found > 0), low)
            level1 = tl.where(found > 1, _float(lists, FIRST + capacity, 1, i, anchors, found > 1), low)
            level2 = tl.where(found > 2, _float(lists, FIRST + capacity, 2, i, anchors, found > 2), low)
            level3 = tl.where(found > 3, _float(lists, FIRST + capacity, 3, i, anchors, found > 3), low)
        sums = tl.zeros((M, N), tl.float64)
        for start in range(0, others, N):
            j = start + tl.arange(0, N)
            real = j < others
            j = tl.minimum(j, others - 1)
            weight = tl.zeros((M, N), tl.float32)
            if EVERY:
                distance, _, negative = _met(a, b, own, i, there, left, start, others, rounding, ROOT, SELF, PAD, N, K)
                distance = tl.where(negative, _plain(distance, SQUARED, ROOT), float("inf"))
                pushes = tl.zeros((M, N), tl.float32)
                if OWN:
                    pushes += tl.where(distance < level0[:, None], 1.0, 0.0)
                    pushes += tl.where(distance < level1[:, None], 1.0, 0.0)
                    pushes += tl.where(distance < level2[:, None], 1.0, 0.0)
                    pushes += tl.where(distance < level3[:, None], 1.0, 0.0)
                    for slot in range(4, tl.max(found)):
                        level = _float(lists, FIRST + capacity, slot, i, anchors, slot < found)
                        pushes += tl.where((slot < found)[:, None] & (distance < level[:, None]), 1.0, 0.0)
            if OTHER:
                listed = tl.load(lists + j, mask=real, other=0)
                for first in range(0, tl.max(listed), 4):
                    for turn in tl.static_range(4):
                        slot = first + turn
                        mask = slot < listed
                        if not LISTED:
                            column = _entry(lists, FIRST, slot, j, anchors, mask)
                            pull = _pull(lists, slot, j, anchors, capacity, mask, KEPT) * pull_share
                            weight += tl.where(i[:, None] == column[None, :], pull[None, :], 0.0)
                        if EVERY:
                            level = _float(lists, FIRST + capacity, slot, j, anchors, mask)
                            level = tl.where(mask, level, float("-inf"))
                            pushes += tl.where(distance < level[None, :], 1.0, 0.0)
                        else:
                            column = _entry(lists, FIRST + capacity, slot, j, anchors, mask)
                            push = _push(lists, slot, j, anchors, capacity, mask, KEPT) * push_share
                            weight -= tl.where(i[:, None] == column[None, :], push[None, :], 0.0)
            if EVERY:
                push = pushes * _slope(distance, SQUARED) * push_share
                weight -= tl.where(pushes > 0, push, 0.0)
            weight = tl.where(there[:, None], weight, 0.0)
            sums += weight.to(tl.float64)
            rows = b + j.to(tl.int64)[:, None] * PAD + axis[None, :]
            inside = tl.broadcast_to((axis < PAD)[None, :], (N, D))
            if SKIP:
                if tl.max(tl.max((weight != 0).to(tl.int32), 1)) > 0:
                    acc = tl.dot(weight.to(tl.float64), tl.load(rows, mask=inside, other=0.0), acc,
                                 out_dtype=tl.float64)  # fmt: skip
            else:
                acc = tl.dot(weight.to(tl.float64), tl.load(rows, mask=inside, other=0.0), acc, out_dtype=tl.float64)
        total += tl.sum(sums, 1)
    inside = there[:, None] & (axis < dim)[None, :]
    row = tl.load(a + i.to(tl.int64)[:, None] * PAD + axis[None, :], mask=inside, other=0.0)
    gradient = total[:, None] * row - acc
    if FUSED:
        store_gradient(x, a, out, gradient, i, there, axis, number, dim, PAD, "clamp", NORMALIZE)
    else:
        tl.store(out + i.to(tl.int64)[:, None] * dim + axis[None, :], gradient, mask=inside)
    if EDGE and tl.program_id(1) == 0:
        slope = tl.load(lists + anchors + i, mask=there, other=0).to(tl.float32, bitcast=True)
        tl.store(by_edge + i, slope * pull_share, mask=there)


class Kept(NamedTuple):
    """What the gradient needs of the pass before, beside the raw rows."""

    anchors: torch.Tensor  # prepared rows: `row_tiles.prepare`
    references: torch.Tensor | None
    number: int  # anchors
    others: int  # references
    lists: torch.Tensor  # int32, as the top of the file says
    stats: torch.Tensor  # float64: the programs' sums, and two shares
    capacity: int
    programs: int


class Passes(NamedTuple):
    """The kernels of a selection and a loss over it, in their order; rows: of a program."""

    rows: int
    select: CachedLauncher
    finish: CachedLauncher


@functools.cache
def _passes(number, dim, alone, selection, loss, squared, reduction, balance) -> Passes:
    size = tile(FORWARD, number)
    root = not squared and selection != "distance_weighted"
    way = {"LOSS": LOSSES.index(loss), "SQUARED": squared, "ROOT": root, "SELF": alone}
    way |= {"num_warps": size.warps, "num_stages": size.stages} | _form(dim, size) | options()
    if selection in ("batch_hard", "easy_positive"):
        select = CachedLauncher(_extremes, EASY=selection == "easy_positive", **way)
    else:
        fallback, selection = FALLBACKS.get(selection, 0), "semihard" if selection in FALLBACKS else selection
        select = CachedLauncher(_rows, SELECTION=SELECTIONS.index(selection), L=LABELS, FALLBACK=fallback, **way)
    sums = {
        "HALVES": (1 if balance else 2) if loss == "contrastive" else 0,
        "REDUCTION": REDUCTIONS.index(reduction),
        "BLOCK": FINISH,
    }
    return Passes(size.rows, select, CachedLauncher(_finish, **sums, **options()))


def forward(x, ids, r, other_ids, boundary, seed, capacity, plan):
    """The loss, and what its gradient needs. Without r the batch itself; boundary: (B, 1) of any stride, or ()."""
    number, dim = x.shape
    anchors = prepare(x, ids, plan.normalize)
    references = None if r is None else prepare(r, other_ids, plan.normalize)
    others = number if r is None else r.shape[0]
    start = _passes(number, dim, r is None, plan.selection, plan.loss, plan.squared, plan.reduction, plan.balance)
    programs = -(-number // start.rows)
    regions = 3 if plan.selection == "all" else 4 if _kept(plan) else 2
    lists = torch.empty((3 + regions * capacity) * number, device=x.device, dtype=torch.int32)
    stats = torch.empty(SUMS * programs + 2, device=x.device, dtype=torch.float64)
    loss = torch.empty((), device=x.device, dtype=torch.float32)
    kept = Kept(anchors, references, number, others, lists, stats, capacity, programs)
    sides = (anchors, anchors if r is None else references)
    rounding = 2 * dim * EPS
    grid = (programs, 1, 1)
    if plan.selection in ("batch_hard", "easy_positive"):
        start.select(grid, *sides, lists, stats, number, others, plan.margin, rounding)
    else:
        edge = stats if boundary is None else boundary
        stride = boundary.stride(0) if boundary is not None and boundary.dim() else 0
        extra = plan.margin - _float32(plan.margin) if plan.selection == "all" else plan.extra
        start.select(grid, *sides, edge, stats if seed is None else seed, lists, stats, number, others, capacity,
                     stride, plan.margin, extra, plan.cutoff, *plan.density, rounding)  # fmt: skip
    start.finish((1, 1, 1), stats, loss, programs)
    return loss, kept


def _float32(value):
    return struct.unpack("f", struct.pack("f", value))[0]


def _form(dim, size):
    """How prepared rows are read: their padded length, and how many coordinates at a time."""
    pad = padded(dim)
    return {"PAD": pad, "K": 16 if pad % 32 else 32, "M": size.rows, "N": size.others}


def _kept(plan):
    """Whether pairs have weights of their own."""
    return not (plan.squared and plan.loss == "hinge" and plan.selection != "all")


@functools.cache
def _last_pass(number, dim, role, every, one, kept, edge, squared, normalize, skip) -> tuple[int, int, CachedLauncher]:
    """Rows of a program, coordinates of a gradient that it holds, and the kernel."""
    fused = dim <= WHOLE
    block = max(16, triton.next_power_of_2(dim)) if fused else 128
    size = tile(BACKWARD if block <= 128 else {2**31: LONG}, number)
    way = {"OWN": role != "references", "OTHER": role != "anchors", "EVERY": every, "ONE": one, "KEPT": kept}
    way |= {"EDGE": edge, "SQUARED": squared, "NORMALIZE": normalize, "SELF": role == "self", "FUSED": fused}
    way |= {"SKIP": skip, "D": block, "num_warps": size.warps, "num_stages": size.stages}
    return size.rows, block, CachedLauncher(_back, **way, **_form(dim, size), **options())


def backward(kept, x, upstream, plan, role, edge=False):
    """The gradient by anchors ("self", "anchors") or by references ("references"), and by each boundary (B,)."""
    number, dim = x.shape
    a = kept.references if role == "references" else kept.anchors
    b = kept.references if role == "anchors" else kept.anchors
    others = kept.others if role == "anchors" else kept.number
    kinds = (plan.selection == "all", kept.capacity == 1, _kept(plan), edge, plan.squared, plan.normalize)
    rows, block, start = _last_pass(number, dim, role, *kinds, others > MANY)
    fused = dim <= block
    kind = torch.float32 if kernels.interpreted() else x.dtype  # the interpreter cuts to bfloat16, unrounded
    out = torch.empty_like(x, dtype=kind)
    by_rows = out if fused else torch.empty_like(x, dtype=torch.float64)
    by_edge = torch.empty(number, device=x.device, dtype=torch.float32) if edge else None
    start((-(-number // rows), -(-dim // block), 1), x, a, b, kept.lists, kept.stats, upstream, by_rows,
          by_edge if edge else kept.stats, number, others, kept.number, dim, kept.capacity, kept.programs,
          2 * dim * EPS)  # fmt: skip
    if not fused:
        long_gradient(x, a, by_rows, out, plan.normalize)
    return out if kind == x.dtype else out.to(x.dtype), by_edge
