# mypy: ignore-errors
"""The kernels of `triplet_ops`, and how large their tiles are. Imported when the first of them is launched.

An anchor has few positives: a program lists those of its anchors, finds a negative for each, four at a time, in one
pass over the references, and stores what the gradient needs: an int32 buffer of rows of B, in this order,

    0   how many positives an anchor has             3 + 0 C + s   column of the positive of slot s
    1   slope of its terms by its boundary (float)   3 + 1 C + s   column of its negative, -1 for none; for "all",
    2   how many of its positives come before it                   how far one must be to cost nothing (float)
                                                     3 + 2 C + s   weight of the pair of anchor and positive (float)
                                                     3 + 3 C + s   weight of the pair of anchor and negative (float)

with room for C slots, written as far as there are positives. Where every weight is 2 or 0 (hinges of squared distances)
none are stored: pairs without a negative have 0. The gradient of a row gathers the pairs it is the anchor of, and finds
those it is the reference of by comparing columns, tile by tile. No sum is atomic.

Nothing is reduced across a tile inside a pass: each slot of the tile remembers its best value, and where. Distances are
compared as in `mining`, rounded to float32, and at last packed with their column into one integer: the smaller wins, of
equals the first. Those of listed pairs come from the same products: equal rows are equally far.
"""

import functools
import struct
from typing import NamedTuple

import torch

from nearkin import kernels
from nearkin.kernels import digit_kernels
from nearkin.kernels.launch import CachedLauncher
from nearkin.kernels.numerics import tl, triton
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
POSITIVES, BOUNDARY_SLOPE, BEFORE, FIRST = (tl.constexpr(row) for row in range(4))  # rows of the lists
HARD, SEMIHARD, ALL, RANDOM, WEIGHTED = (tl.constexpr(n) for n in range(5))
HINGE, SOFT, MARGIN, CONTRASTIVE = (tl.constexpr(n) for n in range(4))
ROUNDS = tl.constexpr(7)  # of Philox: enough according to its authors
SELECTIONS = ("hard", "semihard", "all", "random", "distance_weighted", "batch_hard", "easy_positive")
FALLBACKS = {"semihard_or_hardest": 1, "semihard_or_skip": 2}  # 0: the farthest replaces a missing semi-hard negative
HARDEST, LEFT_OUT = tl.constexpr(1), tl.constexpr(2)
TOGETHER = tl.constexpr(2)  # positives and negatives are one mean; 1: reduced apart, 0: there are triplets alone
LOSSES = ("hinge", "soft", "margin", "contrastive")
REDUCTIONS = ("sum", "mean", "active")
# Sums of a program: of its terms, their number, how many are active; the same of negatives by themselves; 0 or NaN. The
# two shares of the gradient follow.
SUM, TERMS, ACTIVE, NEGATIVE_SUM, NEGATIVE_TERMS, NEGATIVE_ACTIVE, TAINTED, SHARES = map(tl.constexpr, range(8))
CHUNK = 256  # coordinates of a gradient per program; longer rows are served in chunks
MANY = 16384  # rows from which on most tiles of the gradient are empty
FEW = tl.constexpr(4)  # pairs of a row in a tile of the gradient that are added one by one, where rows are digits


class Tile(NamedTuple):
    """Rows per program, rows that pass by per step (at least four times as many), warps, steps in flight."""

    rows: int
    columns: int
    warps: int
    stages: int


# By the most rows. With 32 rows per program the forward pass would spill registers.
FORWARD = {2**31: Tile(16, 128, 8, 2)}
BACKWARD = {8192: Tile(16, 64, 4, 2), 2**31: Tile(32, 64, 8, 2)}
LONG = Tile(16, 64, 8, 1)  # backward, with more than 128 coordinates of a gradient per program
LABELS = 256  # labels compared at a time
FINISH = 1024
INTERPRETED = Tile(16, 64, 4, 1)  # small, so that small tests have several tiles and ragged ends


def tile(table, num_rows: int) -> Tile:
    if kernels.interpreted():
        return INTERPRETED
    return next(size for most, size in table.items() if num_rows <= most)


@triton.jit
def _tile(x, r, i, j, left, right, rounding, ROOT: tl.constexpr, SELF: tl.constexpr, PAD: tl.constexpr,
          K: tl.constexpr):  # fmt: skip
    """Squared distances in float32, or distances (ROOT), as `core.distances` rounds them; rows i and j must exist."""
    if x.dtype.element_ty == tl.int8:
        inner = digit_kernels.products(x, r, digit_kernels.planes(x, i, 0, PAD, K), i, j, PAD, K)
        high, low, unit, _ = digit_kernels.distances(inner, x, r, i, j, PAD, j.shape[0], SELF, True)
        measured = tl.sqrt_rn(high + low) * unit if ROOT else (high + low) * (unit * unit)
    else:
        squared = squared_distances(inner_products(x, r, i, j, PAD, K), left, right, i, j, rounding, SELF)
        measured = tl.sqrt(squared).to(tl.float32) if ROOT else squared.to(tl.float32)
    return measured


@triton.jit
def _distances(x, r, row_ids, i, mask_m, left, start, num_columns, rounding, ROOT: tl.constexpr, SELF: tl.constexpr,
               PAD: tl.constexpr, N: tl.constexpr, K: tl.constexpr):  # fmt: skip
    """A tile of distances from reference `start` on, and which of them are to positives and to negatives."""
    j = start + tl.arange(0, N)
    mask_n = j < num_columns
    j = tl.minimum(j, num_columns - 1)
    measured = _tile(x, r, i, j, left, fact(r, LENGTH, j, mask_n, num_columns, PAD), rounding, ROOT, SELF, PAD, K)
    positive, negative = pair_masks(row_ids, class_ids(r, j, mask_n, num_columns, PAD), i, j, mask_m, mask_n, SELF)
    return measured, positive, negative


@triton.jit
def _list(r, lists, i, mask_m, row_ids, num_rows, num_columns, SELF: tl.constexpr, PAD: tl.constexpr, L: tl.constexpr):
    """Lists an anchor's positives in order; how many they are, and how many negatives there are."""
    positives = tl.zeros(i.shape, tl.int32)
    negatives = tl.zeros(i.shape, tl.int32)
    before = tl.zeros(i.shape, tl.int32)
    for start in range(0, num_columns, L):
        j = start + tl.arange(0, L)
        mask_n = j < num_columns
        positive, negative = pair_masks(row_ids, class_ids(r, j, mask_n, num_columns, PAD), i, j, mask_m, mask_n, SELF)
        flags = positive.to(tl.int32)
        added = tl.sum(flags, 1)
        negatives += tl.sum(negative.to(tl.int32), 1)
        if tl.sum(added) > 0:
            slot = positives[:, None] + tl.cumsum(flags, 1) - 1
            at = (FIRST + slot) * num_rows + i[:, None]
            tl.store(lists + at, tl.broadcast_to(j[None, :], (i.shape[0], L)), mask=positive)
            before += tl.sum((positive & (j[None, :] < i[:, None])).to(tl.int32), 1)
            positives += added
    tl.store(lists + POSITIVES * num_rows + i, positives, mask=mask_m)
    tl.store(lists + BEFORE * num_rows + i, before, mask=mask_m)
    return positives, negatives


@triton.jit
def _listed_distances(x, r, lists, region, i, left, slot, num_rows, num_columns, rounding, ROOT: tl.constexpr,
                      SELF: tl.constexpr, PAD: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
                      K: tl.constexpr):  # fmt: skip
    """Distances of the anchors to what they list in four slots of a region, (M,) each.

    The listed rows of all M anchors form one tile, of which each anchor reads its part.
    """
    n = tl.arange(0, N)
    turn = n // M
    owner = tl.program_id(0) * M + n % M
    room = (turn < 4) & (owner < num_rows)
    room = room & (slot + turn < tl.load(lists + POSITIVES * num_rows + owner, mask=room, other=0))
    column = tl.load(lists + (region + slot + turn) * num_rows + owner, mask=room, other=0)
    column = tl.maximum(column, 0)
    right = fact(r, LENGTH, column, room, num_columns, PAD)
    measured = _tile(x, r, i, column, left, right, rounding, ROOT, SELF, PAD, K)
    belongs = (i[:, None] == owner[None, :]) & room[None, :]
    first = tl.sum(tl.where(belongs & (turn == 0)[None, :], measured, 0.0), 1)
    second = tl.sum(tl.where(belongs & (turn == 1)[None, :], measured, 0.0), 1)
    third = tl.sum(tl.where(belongs & (turn == 2)[None, :], measured, 0.0), 1)
    fourth = tl.sum(tl.where(belongs & (turn == 3)[None, :], measured, 0.0), 1)
    return first, second, third, fourth


@triton.jit
def _comparable(measured, ROOT: tl.constexpr):
    """Distances as selections compare them, from what `_tile` makes."""
    return measured if ROOT else tl.sqrt_rn(measured)


@triton.jit
def _keep_less(best, at, value, mask, start):
    """Each slot of a tile remembers the smallest value, of equals the first, and in which tile."""
    better = mask & (value < best)
    return tl.where(better, value, best), tl.where(better, start, at)


@triton.jit
def _keep_more(best, at, value, mask, start):
    better = mask & (value > best)
    return tl.where(better, value, best), tl.where(better, start, at)


@triton.jit
def _least(best, at, N: tl.constexpr):
    """Column of the least of each row, none below 0, of equals the first; -1 where there was none. And the least."""
    column = (at + tl.arange(0, N)[None, :]).to(tl.int64)
    key = tl.min(tl.where(at >= 0, best.to(tl.int32, bitcast=True).to(tl.int64) << 32 | column, NONE), 1)
    least = (key >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return tl.where(key == NONE, -1, key & LAST).to(tl.int32), least


@triton.jit
def _top(best, at, N: tl.constexpr):
    """Column of the largest of each row, of equals the first; -1 where there was none."""
    largest = tl.max(best, 1)
    column = at + tl.arange(0, N)[None, :]
    first = tl.min(tl.where((at >= 0) & (best == largest[:, None]), column, LAST), 1)
    return tl.where(first == LAST, -1, first)


@triton.jit
def _farthest(x, r, row_ids, i, mask_m, left, num_columns, rounding, ROOT: tl.constexpr, SELF: tl.constexpr,
              PAD: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):  # fmt: skip
    """Column of the farthest negative."""
    best = tl.full((M, N), -1.0, tl.float32)
    at = tl.full((M, N), -1, tl.int32)
    for start in range(0, num_columns, N):
        measured, _, negative = _distances(
            x, r, row_ids, i, mask_m, left, start, num_columns, rounding, ROOT, SELF, PAD, N, K
        )
        best, at = _keep_more(best, at, _comparable(measured, ROOT), negative, start)
    return _top(best, at, N)


@triton.jit
def _semihard(x, r, row_ids, i, mask_m, left, level0, level1, level2, level3, num_columns, rounding,
              NEAREST: tl.constexpr, ROOT: tl.constexpr, SELF: tl.constexpr, PAD: tl.constexpr, M: tl.constexpr,
              N: tl.constexpr, K: tl.constexpr):  # fmt: skip
    """Columns of the nearest negatives strictly farther than each of four levels (NEAREST: of the nearest of all)."""
    best0 = tl.full((M, N), float("inf"), tl.float32)
    best1 = best0
    best2 = best0
    best3 = best0
    at0 = tl.full((M, N), -1, tl.int32)
    at1 = at0
    at2 = at0
    at3 = at0
    for start in range(0, num_columns, N):
        measured, _, negative = _distances(
            x, r, row_ids, i, mask_m, left, start, num_columns, rounding, ROOT, SELF, PAD, N, K
        )
        measured = tl.where(negative, _comparable(measured, ROOT), -1.0)
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
def _arrival(bits, log_weight, WEIGHTED: tl.constexpr):
    """How early a negative arrives in a race: the largest is a draw by weight, or with equal weights.

    -log(E), E of the exponential distribution, is added to a log weight; any falling function of E does without.
    """
    v = (bits.to(tl.float32) + 0.5) * 2.0**-32
    if not WEIGHTED:
        return -v
    small = v * (1.0 + v * (0.5 + v * 0.33333334))  # -log(1 - v), which cancels near 0
    late = tl.where(v < 0.005, small, -tl.log(tl.maximum(1.0 - v, 1e-30)))
    return log_weight - tl.log(late)


@triton.jit
def _draw(x, r, row_ids, seed, i, mask_m, left, limit, slot, num_columns, rounding, power, bend, most,
          WEIGHTED: tl.constexpr, ROOT: tl.constexpr, SELF: tl.constexpr, PAD: tl.constexpr, M: tl.constexpr,
          N: tl.constexpr, K: tl.constexpr):  # fmt: skip
    """Columns of negatives drawn for four slots: by the density of distances within the limit, or uniformly.

    What a pair draws depends on the seed, its two rows and the slot, and on nothing else.
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
    for start in range(0, num_columns, N):
        j = start + tl.arange(0, N)
        weight = tl.zeros((M, N), tl.float32)
        if WEIGHTED:
            squared, _, negative = _distances(
                x, r, row_ids, i, mask_m, left, start, num_columns, rounding, ROOT, SELF, PAD, N, K
            )
            negative = negative & (squared < limit[:, None])
            # -log q(d), as in `mining.distance_weighted`, from d².
            weight = power * tl.log(tl.maximum(squared, 1e-24)) - bend * tl.log(tl.maximum(1.0 - squared * 0.25, 1e-12))
            weight = tl.minimum(weight, most)
        else:
            mask_n = j < num_columns
            _, negative = pair_masks(row_ids, class_ids(r, j, mask_n, num_columns, PAD), i, j, mask_m, mask_n, SELF)
        bits0, bits1, bits2, bits3 = tl.philox(seed, none + i[:, None], none + j[None, :], none + slot, none, ROUNDS)
        best0, at0 = _keep_more(best0, at0, _arrival(bits0, weight, WEIGHTED), negative, start)
        best1, at1 = _keep_more(best1, at1, _arrival(bits1, weight, WEIGHTED), negative, start)
        best2, at2 = _keep_more(best2, at2, _arrival(bits2, weight, WEIGHTED), negative, start)
        best3, at3 = _keep_more(best3, at3, _arrival(bits3, weight, WEIGHTED), negative, start)
    return _top(best0, at0, N), _top(best1, at1, N), _top(best2, at2, N), _top(best3, at3, N)


@triton.jit
def _plain(measured, SQUARED: tl.constexpr, ROOT: tl.constexpr):
    """The distances of the loss: squared, or not."""
    if SQUARED or ROOT:
        return measured
    return tl.sqrt_rn(measured)


@triton.jit
def _slope(distance, SQUARED: tl.constexpr):
    """The factor from the gradient by a distance to that by the difference of the rows; 0 at 0."""
    if SQUARED:
        return tl.full(distance.shape, 2.0, tl.float32)
    return tl.where(distance > 0, 1.0 / tl.where(distance > 0, distance, 1.0), 0.0)


@triton.jit
def _level(measured, positives, slot, margin, SQUARED: tl.constexpr, ROOT: tl.constexpr):
    """How far a negative must be to cost nothing beside the positive of a slot; -inf without one."""
    return tl.where(slot < positives, _plain(measured, SQUARED, ROOT) + margin, float("-inf"))


@triton.jit
def _all_hinges(x, r, row_ids, i, mask_m, left, near0, near1, near2, near3, level0, level1, level2, level3, num_columns,
                rounding, SQUARED: tl.constexpr, ROOT: tl.constexpr, SELF: tl.constexpr, PAD: tl.constexpr,
                M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):  # fmt: skip
    """Hinges of four slots with all negatives: their sum but for the margins, and how many of each slot are active."""
    total = tl.zeros((M, N), tl.float64)
    count01 = tl.zeros((M, N), tl.int32)  # two counts of 16 bits: a place sees few tiles
    count23 = tl.zeros((M, N), tl.int32)
    for start in range(0, num_columns, N):
        distance, _, negative = _distances(
            x, r, row_ids, i, mask_m, left, start, num_columns, rounding, ROOT, SELF, PAD, N, K
        )
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
def _store_entry(lists, region, slot, i, value, num_rows, mask):
    """Stores one entry per anchor; floats as the integer of the same bits."""
    value = value.to(tl.int32, bitcast=True) if value.dtype == tl.float32 else value
    tl.store(lists + (region + slot) * num_rows + i, value, mask=mask)


@triton.jit
def _store_levels(
    lists, i, positives, slot, num_rows, capacity, count, near, level, SQUARED: tl.constexpr, ROOT: tl.constexpr
):
    """Stores what the gradient of all triplets needs of a slot."""
    inside = slot < positives
    weight = count.to(tl.float32) * _slope(_plain(near, SQUARED, ROOT), SQUARED)
    _store_entry(lists, FIRST + capacity, slot, i, level, num_rows, inside)
    _store_entry(lists, FIRST + 2 * capacity, slot, i, weight, num_rows, inside)


@triton.jit
def _term(lists, i, positives, slot, num_rows, capacity, near, negative_column, far, edge, margin, extra, sums, terms,
          active, negative_sums, pushed, slope, LOSS: tl.constexpr, SQUARED: tl.constexpr,
          ROOT: tl.constexpr):  # fmt: skip
    """Adds the terms of a slot, and stores its pairs and their weights. `extra`: see `triplet_ops.Plan`."""
    PLAIN: tl.constexpr = SQUARED and LOSS < MARGIN
    near = _plain(near, PLAIN, ROOT)
    far = _plain(far, PLAIN, ROOT)
    valid = (slot < positives) & (negative_column >= 0)
    unit = tl.where(valid, 1.0, 0.0)
    pull = _slope(near, PLAIN)
    push = _slope(far, PLAIN)
    terms += valid.to(tl.int64)
    if LOSS == HINGE:
        value = tl.maximum(near - far + margin, 0.0)
        steep = tl.where(value > 0, unit, 0.0)
        sums += (value * unit).to(tl.float64)
        active += (steep > 0).to(tl.int64)
        pull *= steep
        push *= steep
    elif LOSS == SOFT:
        gap = near.to(tl.float64) - far.to(tl.float64)
        tail = tl.exp(-tl.abs(gap))
        shifted = 1.0 + tail
        # log(1 + t) of a small t, with the digits that 1 + t has lost.
        rest = tl.where(shifted == 1.0, tail, tl.log(shifted) * (tail / tl.where(shifted == 1.0, 1.0, shifted - 1.0)))
        value = tl.where(valid, tl.maximum(gap, 0.0) + rest, 0.0).to(tl.float32)
        steep = (tl.where(gap >= 0, 1.0, tail) / shifted).to(tl.float32) * unit
        sums += value.to(tl.float64)
        active += (value > 0).to(tl.int64)
        pull *= steep
        push *= steep
    elif LOSS == MARGIN:
        inner = tl.where(valid, tl.maximum(margin + near - edge, 0.0), 0.0)
        outer = tl.where(valid, tl.maximum(margin - far + edge, 0.0), 0.0)
        sums += inner.to(tl.float64) + outer.to(tl.float64) + (extra * edge * unit).to(tl.float64)
        terms += valid.to(tl.int64)
        active += (inner > 0).to(tl.int64) + (outer > 0).to(tl.int64)
        pull = tl.where(inner > 0, pull, 0.0)
        push = tl.where(outer > 0, push, 0.0)
        slope += tl.where(outer > 0, 1.0, 0.0) - tl.where(inner > 0, 1.0, 0.0) + extra * unit
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
        negative_sums += outer.to(tl.float64)
    inside = slot < positives
    _store_entry(lists, FIRST + capacity, slot, i, tl.where(valid & (push != 0), negative_column, -1), num_rows, inside)
    if not PLAIN or LOSS != HINGE:
        _store_entry(lists, FIRST + 2 * capacity, slot, i, pull * unit, num_rows, inside)
        _store_entry(lists, FIRST + 3 * capacity, slot, i, push * unit, num_rows, inside)
    return sums, terms, active, negative_sums, pushed, slope


@triton.jit
def _taint(x, r, i, mask_m, num_rows, num_columns, SELF: tl.constexpr, PAD: tl.constexpr, M: tl.constexpr):
    """0 or NaN for the program's anchors, and for its share of the references that are not anchors."""
    taint = fact(x, TAINT, i, mask_m, num_rows, PAD)
    first = 0
    if SELF:
        first = num_rows
    for start in range(first + tl.program_id(0) * M, num_columns, tl.num_programs(0) * M):
        j = start + tl.arange(0, M)
        taint += fact(r, TAINT, j, j < num_columns, num_columns, PAD)
    return tl.sum(taint)


@triton.jit
def _store_sum(sums, kind, value):
    """Stores one sum of this program, beside the same sum of the other programs."""
    tl.store(sums + kind * tl.num_programs(0) + tl.program_id(0), value.to(tl.float64))


@triton.jit(do_not_specialize=["capacity"])
def _select(x, r, boundary, seeds, lists, stats, num_rows, num_columns, capacity, stride, margin, extra, cutoff, power,
            bend, most, rounding, SELECTION: tl.constexpr, LOSS: tl.constexpr, SQUARED: tl.constexpr,
            ROOT: tl.constexpr, SELF: tl.constexpr, PAD: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
            K: tl.constexpr, L: tl.constexpr, FALLBACK: tl.constexpr, FITTED: tl.constexpr):  # fmt: skip
    """Selections over every positive of an anchor: lists, negatives, terms. FITTED: `power` points to all three
    numbers of the density, which the host does not know."""
    if FITTED:
        bend = tl.load(power + 1)
        most = tl.load(power + 2)
        power = tl.load(power)
    place = tl.program_id(0) * M + tl.arange(0, M)
    mask_m = place < num_rows
    i = tl.minimum(place, num_rows - 1)
    row_ids = class_ids(x, i, mask_m, num_rows, PAD)
    left = fact(x, LENGTH, i, mask_m, num_rows, PAD)
    taint = _taint(x, r, i, mask_m, num_rows, num_columns, SELF, PAD, M)
    edge = tl.zeros((M,), tl.float32)
    limit = edge + cutoff
    if LOSS == MARGIN:
        edge = tl.load(boundary + i * stride, mask=mask_m, other=0.0)
        taint += tl.sum(edge * 0.0).to(tl.float64)
        limit += edge
    limit = tl.maximum(limit, 0.0)
    limit = limit * limit
    positives, negatives = _list(r, lists, i, mask_m, row_ids, num_rows, num_columns, SELF, PAD, L)
    positives = tl.where(mask_m, positives, 0)
    tl.debug_barrier()  # what other threads have listed is read from here on
    sums = tl.zeros((M,), tl.float64)
    negative_sums = tl.zeros((M,), tl.float64)
    terms = tl.zeros((M,), tl.int64)
    active = tl.zeros((M,), tl.int64)
    pushed = tl.zeros((M,), tl.int64)
    slope = tl.zeros((M,), tl.float32)
    for slot in range(0, tl.max(positives), 4):
        near0, near1, near2, near3 = _listed_distances(x, r, lists, FIRST, i, left, slot, num_rows, num_columns,
                                                       rounding, ROOT, SELF, PAD, M, N, K)  # fmt: skip
        if SELECTION == ALL:
            level0 = _level(near0, positives, slot, margin, SQUARED, ROOT)
            level1 = _level(near1, positives, slot + 1, margin, SQUARED, ROOT)
            level2 = _level(near2, positives, slot + 2, margin, SQUARED, ROOT)
            level3 = _level(near3, positives, slot + 3, margin, SQUARED, ROOT)
            gaps, count0, count1, count2, count3 = _all_hinges(
                x, r, row_ids, i, mask_m, left, _plain(near0, SQUARED, ROOT), _plain(near1, SQUARED, ROOT),
                _plain(near2, SQUARED, ROOT), _plain(near3, SQUARED, ROOT), level0, level1, level2, level3, num_columns,
                rounding, SQUARED, ROOT, SELF, PAD, M, N, K)  # fmt: skip
            counts = count0 + count1 + count2 + count3
            active += counts.to(tl.int64)
            # The margin in float64, of two float32: hinges may be much smaller than what it is rounded by.
            sums += gaps + counts.to(tl.float64) * (sums * 0.0 + margin + extra)
            _store_levels(lists, i, positives, slot, num_rows, capacity, count0, near0, level0, SQUARED, ROOT)
            _store_levels(lists, i, positives, slot + 1, num_rows, capacity, count1, near1, level1, SQUARED, ROOT)
            _store_levels(lists, i, positives, slot + 2, num_rows, capacity, count2, near2, level2, SQUARED, ROOT)
            _store_levels(lists, i, positives, slot + 3, num_rows, capacity, count3, near3, level3, SQUARED, ROOT)
        else:
            if SELECTION >= RANDOM:
                seed = tl.load(seeds)
                column0, column1, column2, column3 = _draw(
                    x, r, row_ids, seed, i, mask_m, left, limit, slot, num_columns, rounding, power, bend, most,
                    SELECTION == WEIGHTED, ROOT, SELF, PAD, M, N, K)  # fmt: skip
                if SELECTION == WEIGHTED:
                    lost = (slot < positives) & (negatives > 0)
                    lost = lost & ((column0 < 0) | (column1 < 0) | (column2 < 0) | (column3 < 0))
                    if tl.max(lost.to(tl.int32)) > 0:  # all negatives are beyond the limit
                        any0, any1, any2, any3 = _draw(
                            x, r, row_ids, seed, i, mask_m, left, limit, slot, num_columns, rounding, power, bend, most,
                            False, ROOT, SELF, PAD, M, N, K)  # fmt: skip
                        column0 = tl.where(column0 < 0, any0, column0)
                        column1 = tl.where(column1 < 0, any1, column1)
                        column2 = tl.where(column2 < 0, any2, column2)
                        column3 = tl.where(column3 < 0, any3, column3)
            else:
                column0, column1, column2, column3 = _semihard(
                    x, r, row_ids, i, mask_m, left, _comparable(near0, ROOT), _comparable(near1, ROOT),
                    _comparable(near2, ROOT), _comparable(near3, ROOT), num_columns, rounding, SELECTION == HARD, ROOT,
                    SELF, PAD, M, N, K)  # fmt: skip
                if SELECTION == SEMIHARD and FALLBACK != LEFT_OUT:
                    none = (column0 < 0) | ((column1 < 0) & (slot + 1 < positives))
                    none = none | ((column2 < 0) & (slot + 2 < positives)) | ((column3 < 0) & (slot + 3 < positives))
                    none = none & (slot < positives) & (negatives > 0)
                    if tl.max(none.to(tl.int32)) > 0:  # a positive farther than every negative
                        if FALLBACK == HARDEST:
                            column, _, _, _ = _semihard(x, r, row_ids, i, mask_m, left, edge, edge, edge, edge,
                                                        num_columns, rounding, True, ROOT, SELF, PAD, M, N,
                                                        K)  # fmt: skip
                        else:
                            column = _farthest(
                                x, r, row_ids, i, mask_m, left, num_columns, rounding, ROOT, SELF, PAD, M, N, K
                            )
                        column0 = tl.where(column0 < 0, column, column0)
                        column1 = tl.where(column1 < 0, column, column1)
                        column2 = tl.where(column2 < 0, column, column2)
                        column3 = tl.where(column3 < 0, column, column3)
            _store_entry(lists, FIRST + capacity, slot, i, column0, num_rows, slot < positives)
            _store_entry(lists, FIRST + capacity, slot + 1, i, column1, num_rows, slot + 1 < positives)
            _store_entry(lists, FIRST + capacity, slot + 2, i, column2, num_rows, slot + 2 < positives)
            _store_entry(lists, FIRST + capacity, slot + 3, i, column3, num_rows, slot + 3 < positives)
            tl.debug_barrier()
            far0, far1, far2, far3 = _listed_distances(x, r, lists, FIRST + capacity, i, left, slot, num_rows,
                                                       num_columns, rounding, ROOT, SELF, PAD, M, N, K)  # fmt: skip
            tl.debug_barrier()
            sums, terms, active, negative_sums, pushed, slope = _term(
                lists, i, positives, slot, num_rows, capacity, near0, column0, far0, edge, margin, extra, sums, terms,
                active, negative_sums, pushed, slope, LOSS, SQUARED, ROOT)  # fmt: skip
            sums, terms, active, negative_sums, pushed, slope = _term(
                lists, i, positives, slot + 1, num_rows, capacity, near1, column1, far1, edge, margin, extra, sums,
                terms, active, negative_sums, pushed, slope, LOSS, SQUARED, ROOT)  # fmt: skip
            sums, terms, active, negative_sums, pushed, slope = _term(
                lists, i, positives, slot + 2, num_rows, capacity, near2, column2, far2, edge, margin, extra, sums,
                terms, active, negative_sums, pushed, slope, LOSS, SQUARED, ROOT)  # fmt: skip
            sums, terms, active, negative_sums, pushed, slope = _term(
                lists, i, positives, slot + 3, num_rows, capacity, near3, column3, far3, edge, margin, extra, sums,
                terms, active, negative_sums, pushed, slope, LOSS, SQUARED, ROOT)  # fmt: skip
    if SELECTION == ALL:
        terms = positives.to(tl.int64) * negatives.to(tl.int64)
    if LOSS == MARGIN:
        tl.store(lists + BOUNDARY_SLOPE * num_rows + i, slope.to(tl.int32, bitcast=True), mask=mask_m)
    _store_sum(stats, SUM, tl.sum(sums))
    _store_sum(stats, TERMS, tl.sum(terms))
    _store_sum(stats, ACTIVE, tl.sum(active))
    if LOSS == CONTRASTIVE:
        _store_sum(stats, NEGATIVE_SUM, tl.sum(negative_sums))
        _store_sum(stats, NEGATIVE_TERMS, tl.sum(terms))
        _store_sum(stats, NEGATIVE_ACTIVE, tl.sum(pushed))
    _store_sum(stats, TAINTED, taint)


@triton.jit
def _extremes(x, r, lists, stats, num_rows, num_columns, margin, rounding, EASY: tl.constexpr, LOSS: tl.constexpr,
              SQUARED: tl.constexpr, ROOT: tl.constexpr, SELF: tl.constexpr, PAD: tl.constexpr, M: tl.constexpr,
              N: tl.constexpr, K: tl.constexpr):  # fmt: skip
    """One triplet per anchor, in its only slot: farthest positive and nearest negative; EASY: nearest, semi-hard."""
    place = tl.program_id(0) * M + tl.arange(0, M)
    mask_m = place < num_rows
    i = tl.minimum(place, num_rows - 1)
    row_ids = class_ids(x, i, mask_m, num_rows, PAD)
    left = fact(x, LENGTH, i, mask_m, num_rows, PAD)
    taint = _taint(x, r, i, mask_m, num_rows, num_columns, SELF, PAD, M)
    best_positive = tl.full((M, N), float("inf") if EASY else -1.0, tl.float32)
    positive_at = tl.full((M, N), -1, tl.int32)
    level = tl.full((M,), -1.0, tl.float32)
    if EASY:
        for start in range(0, num_columns, N):
            j = start + tl.arange(0, N)
            mask_n = j < num_columns
            positive, _ = pair_masks(row_ids, class_ids(r, j, mask_n, num_columns, PAD), i, j, mask_m, mask_n, SELF)
            if tl.max(tl.max(positive.to(tl.int32), 1)) > 0:
                measured, positive, _ = _distances(
                    x, r, row_ids, i, mask_m, left, start, num_columns, rounding, ROOT, SELF, PAD, N, K
                )
                best_positive, positive_at = _keep_less(
                    best_positive, positive_at, _comparable(measured, ROOT), positive, start
                )
        column, level = _least(best_positive, positive_at, N)
    best = tl.full((M, N), float("inf"), tl.float32)
    at = tl.full((M, N), -1, tl.int32)
    for start in range(0, num_columns, N):
        measured, positive, negative = _distances(
            x, r, row_ids, i, mask_m, left, start, num_columns, rounding, ROOT, SELF, PAD, N, K
        )
        measured = _comparable(measured, ROOT)
        if EASY:
            best, at = _keep_less(best, at, measured, negative & (measured > level[:, None]), start)
        else:
            best, at = _keep_less(best, at, measured, negative, start)
            best_positive, positive_at = _keep_more(best_positive, positive_at, measured, positive, start)
    negative_column, _ = _least(best, at, N)
    if EASY:
        if tl.max(((negative_column < 0) & (column >= 0)).to(tl.int32)) > 0:
            other = _farthest(x, r, row_ids, i, mask_m, left, num_columns, rounding, ROOT, SELF, PAD, M, N, K)
            negative_column = tl.where(negative_column < 0, other, negative_column)
    else:
        column = _top(best_positive, positive_at, N)
    positives = (mask_m & (column >= 0)).to(tl.int32)
    tl.store(lists + POSITIVES * num_rows + i, positives, mask=mask_m)
    _store_entry(lists, FIRST, 0, i, column, num_rows, mask_m)
    _store_entry(lists, FIRST + 1, 0, i, negative_column, num_rows, mask_m)
    tl.debug_barrier()
    near, _, _, _ = _listed_distances(
        x, r, lists, FIRST, i, left, 0, num_rows, num_columns, rounding, ROOT, SELF, PAD, M, N, K
    )
    far, _, _, _ = _listed_distances(
        x, r, lists, FIRST + 1, i, left, 0, num_rows, num_columns, rounding, ROOT, SELF, PAD, M, N, K
    )
    tl.debug_barrier()
    zero_sum = tl.zeros((M,), tl.float64)
    zero_count = tl.zeros((M,), tl.int64)
    sums, terms, active, _, _, _ = _term(lists, i, positives, 0, num_rows, 1, near, negative_column, far, near, margin,
                                         0.0, zero_sum, zero_count, zero_count, zero_sum, zero_count, level, LOSS,
                                         SQUARED, ROOT)  # fmt: skip
    _store_sum(stats, SUM, tl.sum(sums))
    _store_sum(stats, TERMS, tl.sum(terms))
    _store_sum(stats, ACTIVE, tl.sum(active))
    _store_sum(stats, TAINTED, taint)


@triton.jit
def _total(values, num_rows, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, num_rows, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(values + at, mask=at < num_rows, other=0.0)
    return tl.sum(total)


@triton.jit
def _reduced(sums, terms, active, REDUCTION: tl.constexpr):
    """A reduced sum and the share of each of its terms: 0 where nothing counts."""
    if REDUCTION == 0:
        return sums, sums * 0.0 + 1.0
    many = terms if REDUCTION == 1 else active
    each = tl.where(many > 0, 1.0 / tl.maximum(many, 1.0), 0.0)
    return tl.where(many > 0, sums / tl.maximum(many, 1.0), 0.0), each


@triton.jit(do_not_specialize=["programs"])
def _finish(stats, loss, programs, HALVES: tl.constexpr, REDUCTION: tl.constexpr, BLOCK: tl.constexpr):
    """The loss; and behind the programs' sums, the share of a pair of each kind."""
    sums = _total(stats + SUM * programs, programs, BLOCK)
    terms = _total(stats + TERMS * programs, programs, BLOCK)
    active = _total(stats + ACTIVE * programs, programs, BLOCK)
    taint = _total(stats + TAINTED * programs, programs, BLOCK)
    value, pull = _reduced(sums, terms, active, REDUCTION)
    push = pull
    if HALVES:
        sums = _total(stats + NEGATIVE_SUM * programs, programs, BLOCK)
        terms = _total(stats + NEGATIVE_TERMS * programs, programs, BLOCK)
        active = _total(stats + NEGATIVE_ACTIVE * programs, programs, BLOCK)
        if HALVES == TOGETHER:
            near = _total(stats + SUM * programs, programs, BLOCK)
            both_terms = terms + _total(stats + TERMS * programs, programs, BLOCK)
            both_active = active + _total(stats + ACTIVE * programs, programs, BLOCK)
            value, pull = _reduced(near, both_terms, both_active, REDUCTION)
            negative_value, push = _reduced(sums, both_terms, both_active, REDUCTION)
        else:
            negative_value, push = _reduced(sums, terms, active, REDUCTION)
        value = (value + negative_value) * 0.5
        pull = pull * 0.5
        push = push * 0.5
    tl.store(loss, (value + taint).to(tl.float32))
    tl.store(stats + SHARES * programs, pull + taint)  # a tainted batch has no sound gradient either
    tl.store(stats + SHARES * programs + 1, push + taint)


@triton.jit
def _entry(lists, region, slot, at, anchors, mask):
    return tl.load(lists + (region + slot) * anchors + at, mask=mask, other=-1)


@triton.jit
def _float(lists, region, slot, at, anchors, mask):
    return tl.load(lists + (region + slot) * anchors + at, mask=mask, other=0).to(tl.float32, bitcast=True)


@triton.jit
def _pull(lists, slot, at, anchors, capacity, mask, STORED: tl.constexpr):
    """The weight of the pair of an anchor and its positive of a slot."""
    if STORED:
        return _float(lists, FIRST + 2 * capacity, slot, at, anchors, mask)
    return tl.where(_entry(lists, FIRST + capacity, slot, at, anchors, mask) >= 0, 2.0, 0.0)


@triton.jit
def _push(lists, slot, at, anchors, capacity, mask, STORED: tl.constexpr):
    """The weight of the pair of an anchor and its negative of a slot, where it has one."""
    if STORED:
        return _float(lists, FIRST + 3 * capacity, slot, at, anchors, mask)
    return tl.where(mask, 2.0, 0.0)


@triton.jit
def _gather(summed, a, b, i, column, weight, axis, PAD: tl.constexpr):
    """Adds weight · row of each anchor's listed column, and the weight."""
    if b.dtype.element_ty == tl.int8:
        summed = digit_kernels.gathered_add(summed, weight, a, b, i, column, axis, PAD)
    else:
        acc, total = summed
        mask_m = column >= 0
        weight = tl.where(mask_m, weight, 0.0).to(tl.float64)
        at = column.to(tl.int64)[:, None] * PAD + axis[None, :]
        row = tl.load(b + at, mask=mask_m[:, None] & (axis < PAD)[None, :], other=0.0)
        summed = (acc + weight[:, None] * row, total + weight)
    return summed


@triton.jit(do_not_specialize=["capacity", "programs"])
def _backward(x, a, b, lists, stats, upstream, out, by_edge, num_rows, num_columns, anchors, dim, capacity, programs,
              rounding, OWN: tl.constexpr, OTHER: tl.constexpr, EVERY: tl.constexpr, ONE: tl.constexpr,
              STORED: tl.constexpr, EDGE: tl.constexpr, SQUARED: tl.constexpr, NORMALIZE: tl.constexpr,
              SELF: tl.constexpr, FUSED: tl.constexpr, SKIP: tl.constexpr, PAD: tl.constexpr, M: tl.constexpr,
              N: tl.constexpr, K: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """The gradient by rows i of `x`, as anchors (OWN), as references (OTHER), or both. a: x prepared; b: the others.

    Each pair contributes weight · (a_i - b_j): the weights are summed, and the weighted rows. ONE: an anchor has one
    slot, and need not be among the positives of its positive.
    """
    ROOT: tl.constexpr = not SQUARED
    LISTED: tl.constexpr = SELF and not ONE  # positives list each other
    place = tl.program_id(0) * M + tl.arange(0, M)
    mask_m = place < num_rows
    i = tl.minimum(place, num_rows - 1)
    axis = tl.program_id(1) * D + tl.arange(0, D)
    upper = tl.load(upstream).to(tl.float64)
    pull_share = (tl.load(stats + SHARES * programs) * upper).to(tl.float32)
    push_share = (tl.load(stats + SHARES * programs + 1) * upper).to(tl.float32)
    DIGITS: tl.constexpr = a.dtype.element_ty == tl.int8
    if DIGITS:
        summed = digit_kernels.weighted_init(M, D)
    else:
        summed = (tl.zeros((M, D), tl.float64), tl.zeros((M,), tl.float64))
    positives = tl.zeros((M,), tl.int32)
    if OWN:
        positives = tl.load(lists + POSITIVES * anchors + i, mask=mask_m, other=0)
        before = tl.load(lists + BEFORE * anchors + i, mask=mask_m, other=0)
        for slot in range(0, tl.max(positives)):
            mask = slot < positives
            column = _entry(lists, FIRST, slot, i, anchors, mask)
            weight = _pull(lists, slot, i, anchors, capacity, mask, STORED)
            if LISTED:  # the same pair with its roles exchanged
                other = before - (column < i).to(tl.int32)
                weight += _pull(lists, other, column, anchors, capacity, mask, STORED)
            summed = _gather(summed, a, b, i, column, weight * pull_share, axis, PAD)
            if not EVERY:
                column = _entry(lists, FIRST + capacity, slot, i, anchors, mask)
                weight = _push(lists, slot, i, anchors, capacity, mask, STORED)
                summed = _gather(summed, a, b, i, column, weight * -push_share, axis, PAD)
    if OTHER or EVERY:
        left = fact(a, LENGTH, i, mask_m, num_rows, PAD)
        row_ids = class_ids(a, i, mask_m, num_rows, PAD)
        if EVERY and OWN:
            low = float("-inf")
            level0 = tl.where(positives > 0, _float(lists, FIRST + capacity, 0, i, anchors, positives > 0), low)
            level1 = tl.where(positives > 1, _float(lists, FIRST + capacity, 1, i, anchors, positives > 1), low)
            level2 = tl.where(positives > 2, _float(lists, FIRST + capacity, 2, i, anchors, positives > 2), low)
            level3 = tl.where(positives > 3, _float(lists, FIRST + capacity, 3, i, anchors, positives > 3), low)
        if not DIGITS:
            acc, total = summed
            sums = tl.zeros((M, N), tl.float64)
        for start in range(0, num_columns, N):
            j = start + tl.arange(0, N)
            mask_n = j < num_columns
            j = tl.minimum(j, num_columns - 1)
            weight = tl.zeros((M, N), tl.float32)
            if EVERY:
                distance, _, negative = _distances(
                    a, b, row_ids, i, mask_m, left, start, num_columns, rounding, ROOT, SELF, PAD, N, K
                )
                distance = tl.where(negative, _plain(distance, SQUARED, ROOT), float("inf"))
                pushes = tl.zeros((M, N), tl.float32)
                if OWN:
                    pushes += tl.where(distance < level0[:, None], 1.0, 0.0)
                    pushes += tl.where(distance < level1[:, None], 1.0, 0.0)
                    pushes += tl.where(distance < level2[:, None], 1.0, 0.0)
                    pushes += tl.where(distance < level3[:, None], 1.0, 0.0)
                    for slot in range(4, tl.max(positives)):
                        level = _float(lists, FIRST + capacity, slot, i, anchors, slot < positives)
                        pushes += tl.where((slot < positives)[:, None] & (distance < level[:, None]), 1.0, 0.0)
            if OTHER:
                listed = tl.load(lists + POSITIVES * anchors + j, mask=mask_n, other=0)
                for first in range(0, tl.max(listed), 4):
                    for turn in tl.static_range(4):
                        slot = first + turn
                        mask = slot < listed
                        if not LISTED:
                            column = _entry(lists, FIRST, slot, j, anchors, mask)
                            pull = _pull(lists, slot, j, anchors, capacity, mask, STORED) * pull_share
                            weight += tl.where(i[:, None] == column[None, :], pull[None, :], 0.0)
                        if EVERY:
                            level = _float(lists, FIRST + capacity, slot, j, anchors, mask)
                            level = tl.where(mask, level, float("-inf"))
                            pushes += tl.where(distance < level[None, :], 1.0, 0.0)
                        else:
                            column = _entry(lists, FIRST + capacity, slot, j, anchors, mask)
                            push = _push(lists, slot, j, anchors, capacity, mask, STORED) * push_share
                            weight -= tl.where(i[:, None] == column[None, :], push[None, :], 0.0)
            if EVERY:
                push = pushes * _slope(distance, SQUARED) * push_share
                weight -= tl.where(pushes > 0, push, 0.0)
            weight = tl.where(mask_m[:, None], weight, 0.0)
            if DIGITS:
                if EVERY:
                    near = digit_kernels.close_pairs(distance, a, b, i, j, PAD, SQUARED) & (weight != 0)
                else:  # all of them, where a row has few
                    near = weight != 0
                    near = near & (tl.max(tl.sum(near.to(tl.int32), 1), 0) <= FEW)
                summed = digit_kernels.near_add(summed, weight, near, a, b, i, j, axis, PAD, N)
                weight = tl.where(near, 0.0, weight)
                if tl.max(tl.max((weight != 0).to(tl.int32), 1)) > 0:
                    summed = digit_kernels.weighted_add(summed, weight, b, j, start, axis, num_columns, PAD, N, D)
            else:
                sums += weight.to(tl.float64)
                rows = b + j.to(tl.int64)[:, None] * PAD + axis[None, :]
                inside = tl.broadcast_to((axis < PAD)[None, :], (N, D))
                any_weight = True
                if SKIP:
                    any_weight = tl.max(tl.max((weight != 0).to(tl.int32), 1)) > 0
                if any_weight:
                    acc = tl.dot(weight.to(tl.float64), tl.load(rows, mask=inside, other=0.0), acc,
                                 out_dtype=tl.float64)  # fmt: skip
        if not DIGITS:
            summed = (acc, total + tl.sum(sums, 1))
    inside = mask_m[:, None] & (axis < dim)[None, :]
    if DIGITS:
        high, low, weights = summed
        gradient = weights[:, None] * digit_kernels.exact_rows(a, i, axis, PAD) - high.to(tl.float64)
        gradient = gradient - low.to(tl.float64)
    else:
        acc, total = summed
        row = tl.load(a + i.to(tl.int64)[:, None] * PAD + axis[None, :], mask=inside, other=0.0)
        gradient = total[:, None] * row - acc
    if FUSED:
        store_gradient(x, a, out, gradient, i, mask_m, axis, num_rows, dim, PAD, "clamp", NORMALIZE)
    else:
        tl.store(out + i.to(tl.int64)[:, None] * dim + axis[None, :], gradient, mask=inside)
    if EDGE and tl.program_id(1) == 0:
        slope = tl.load(lists + BOUNDARY_SLOPE * anchors + i, mask=mask_m, other=0).to(tl.float32, bitcast=True)
        tl.store(by_edge + i, slope * pull_share, mask=mask_m)


class Saved(NamedTuple):
    """What the gradient needs of the forward pass, beside the raw rows."""

    anchors: torch.Tensor  # prepared rows: `row_kernels.prepare`
    references: torch.Tensor | None
    num_rows: int  # anchors
    num_columns: int  # references
    lists: torch.Tensor  # int32, see the top of the file
    stats: torch.Tensor  # float64: the programs' sums, and two shares
    capacity: int
    programs: int


class Passes(NamedTuple):
    """The kernels of a selection and a loss over it, in their order; rows: of a program."""

    rows: int
    select: CachedLauncher
    finish: CachedLauncher


@functools.cache
def _passes(num_rows, dim, alone, selection, loss, squared, reduction, balance, kind, fitted=False) -> Passes:
    size = tile(FORWARD, num_rows)
    root = not squared and selection != "distance_weighted"
    constants = {"LOSS": LOSSES.index(loss), "SQUARED": squared, "ROOT": root, "SELF": alone}
    constants |= {"num_warps": size.warps, "num_stages": size.stages} | _form(dim, size, kind) | options()
    if selection in ("batch_hard", "easy_positive"):
        select = CachedLauncher(_extremes, EASY=selection == "easy_positive", **constants)
    else:
        fallback, selection = FALLBACKS.get(selection, 0), "semihard" if selection in FALLBACKS else selection
        select = CachedLauncher(
            _select,
            SELECTION=SELECTIONS.index(selection),
            L=LABELS,
            FALLBACK=fallback,
            FITTED=fitted,
            **constants,
        )
    sums = {
        "HALVES": (1 if balance else 2) if loss == "contrastive" else 0,
        "REDUCTION": REDUCTIONS.index(reduction),
        "BLOCK": FINISH,
    }
    return Passes(size.rows, select, CachedLauncher(_finish, **sums, **options()))


def forward(x, ids, r, other_ids, boundary, seed, capacity, plan, batch_first, fitted=None):
    """The loss, and what its gradient needs. Without r the batch itself; boundary: (B, 1) of any stride, or ().

    fitted: (3,) what `plan.density` has, where only the device knows it.
    batch_first: the first rows of r are those of x, and no pair with themselves."""
    num_rows, dim = x.shape
    anchors = prepare(x, ids, plan.normalize, centre=x)
    references = None if r is None else prepare(r, other_ids, plan.normalize, centre=x)
    num_columns = num_rows if r is None else r.shape[0]
    task = (plan.selection, plan.loss, plan.squared, plan.reduction, plan.balance)
    start = _passes(num_rows, dim, r is None or batch_first, *task, anchors.dtype, fitted is not None)
    programs = -(-num_rows // start.rows)
    regions = 3 if plan.selection == "all" else 4 if _stores_weights(plan) else 2
    lists = torch.empty((FIRST.value + regions * capacity) * num_rows, device=x.device, dtype=torch.int32)
    stats = torch.empty(SHARES.value * programs + 2, device=x.device, dtype=torch.float64)
    loss = torch.empty((), device=x.device, dtype=torch.float32)
    saved = Saved(anchors, references, num_rows, num_columns, lists, stats, capacity, programs)
    sides = (anchors, anchors if r is None else references)
    rounding = 2 * dim * EPS
    grid = (programs, 1, 1)
    if plan.selection in ("batch_hard", "easy_positive"):
        start.select(grid, *sides, lists, stats, num_rows, num_columns, plan.margin, rounding)
    else:
        edge = stats if boundary is None else boundary
        stride = boundary.stride(0) if boundary is not None and boundary.dim() else 0
        density = plan.density if fitted is None else (fitted, 0.0, 0.0)
        extra = plan.margin - _float32(plan.margin) if plan.selection == "all" else plan.extra
        start.select(grid, *sides, edge, stats if seed is None else seed, lists, stats, num_rows, num_columns, capacity,
                     stride, plan.margin, extra, plan.cutoff, *density, rounding)  # fmt: skip
    start.finish((1, 1, 1), stats, loss, programs)
    return loss, saved


def _float32(value):
    return struct.unpack("f", struct.pack("f", value))[0]


def _form(dim, size, kind):
    """How prepared rows of this type are read: their padded length, and coordinates at a time."""
    pad = padded(dim)
    step = 16 if pad % 32 else 32
    if kind == torch.int8:
        step = max(step for step in (32, 64) if digit_kernels.length(dim) % step == 0)
    return {"PAD": pad, "K": step, "M": size.rows, "N": size.columns}


def _stores_weights(plan):
    """Whether pairs have weights of their own."""
    return not (plan.squared and plan.loss == "hinge" and plan.selection != "all")


@functools.cache
def _last_pass(
    num_rows, dim, role, every, unit, stored, edge, squared, normalize, skip, kind
) -> tuple[int, int, CachedLauncher]:
    """Rows per program, coordinates of a gradient per program, and the kernel."""
    fused = dim <= CHUNK
    block = max(16, triton.next_power_of_2(dim)) if fused else 128
    size = tile(BACKWARD if block <= 128 else {2**31: LONG}, num_rows)
    constants = {"OWN": role != "references", "OTHER": role != "anchors", "EVERY": every, "ONE": unit, "STORED": stored}
    constants |= {"EDGE": edge, "SQUARED": squared, "NORMALIZE": normalize, "SELF": role == "self", "FUSED": fused}
    constants |= {"SKIP": skip, "D": block, "num_warps": size.warps, "num_stages": size.stages}
    return size.rows, block, CachedLauncher(_backward, **constants, **_form(dim, size, kind), **options())


def backward(saved, x, upstream, plan, role, edge=False, dtype=None):
    """The gradient by anchors ("self", "anchors") or by references ("references"), and by each boundary (B,)."""
    num_rows, dim = x.shape
    dtype = dtype or x.dtype
    a = saved.references if role == "references" else saved.anchors
    b = saved.references if role == "anchors" else saved.anchors
    num_columns = saved.num_columns if role == "anchors" else saved.num_rows
    kinds = (plan.selection == "all", saved.capacity == 1, _stores_weights(plan), edge, plan.squared, plan.normalize)
    rows, block, start = _last_pass(num_rows, dim, role, *kinds, num_columns > MANY, a.dtype)
    fused = dim <= block
    kind = torch.float32 if kernels.interpreted() else dtype  # the interpreter cuts to bfloat16, unrounded
    out = torch.empty_like(x, dtype=kind)
    by_rows = out if fused else torch.empty_like(x, dtype=torch.float64)
    by_edge = torch.empty(num_rows, device=x.device, dtype=torch.float32) if edge else None
    start((-(-num_rows // rows), -(-dim // block), 1), x, a, b, saved.lists, saved.stats, upstream, by_rows,
          by_edge if edge else saved.stats, num_rows, num_columns, saved.num_rows, dim, saved.capacity, saved.programs,
          2 * dim * EPS)  # fmt: skip
    if not fused:
        long_gradient(x, a, by_rows, out, plan.normalize)
    return out if kind == dtype else out.to(dtype), by_edge


def add_first_references(saved, x, by_x, upstream, plan):
    """Adds to the gradient by anchors, float32, that by the first references, which are the same rows; in x's type."""
    saved = saved._replace(references=saved.anchors)
    by_references, _ = backward(saved, x, upstream, plan, "references", dtype=torch.float32)
    return by_x.add_(by_references).to(x.dtype)
