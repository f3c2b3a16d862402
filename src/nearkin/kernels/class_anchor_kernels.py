# mypy: ignore-errors
"""The kernels of Proxy-Anchor beside those of the class softmax: each class's own items, its others, and the sum.

They share the buffers of `class_row_kernels.prepare`: an item's logit is α (cos - δ).
"""

import torch

from nearkin.kernels.class_kernels import _blocks, _options, start_kernel
from nearkin.kernels.class_row_kernels import COUNTED, FACTOR, LENGTH_SLOPE, LN2, PUSH, SLOPE, SUMMED, TAINT, TARGET
from nearkin.kernels.numerics import sigmoid, softplus, tl, triton

ITEMS = 16  # per program of `positives`
CLASSES = 1024  # per program of `negatives`
VALUE, FIRST = LENGTH_SLOPE, SLOPE  # what these rows of `facts` hold from here on: a class's term, at its first item


@triton.jit
def _positives(own_classes, facts, stats, num_rows, width, M: tl.constexpr, N: tl.constexpr):
    """log(1 + Σ e^{-logit}) over the items of each item's class, and the derivative by each; unknown ids become -1."""
    i = tl.program_id(0) * M + tl.arange(0, M)
    mask_m = i < num_rows
    known = tl.load(facts + COUNTED * width + i, mask=mask_m, other=0.0) > 0
    own = tl.load(own_classes + width + i, mask=mask_m, other=-1)
    far = -tl.load(facts + TARGET * width + i, mask=mask_m, other=0.0)
    top = tl.full((M,), float("-inf"), tl.float64)
    first = tl.full((M,), 2147483647, tl.int32)
    for begin in range(0, num_rows, N):
        j = begin + tl.arange(0, N)
        mask_n = j < num_rows
        there = tl.load(facts + COUNTED * width + j, mask=mask_n, other=0.0) > 0
        same = (own[:, None] == tl.load(own_classes + width + j, mask=mask_n, other=-2)[None, :]) & there[None, :]
        other = -tl.load(facts + TARGET * width + j, mask=mask_n, other=0.0)
        top = tl.maximum(top, tl.max(tl.where(same, other[None, :], float("-inf")), 1))
        first = tl.minimum(first, tl.min(tl.where(same, j[None, :], 2147483647), 1))
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros((M,), tl.float64)
    for begin in range(0, num_rows, N):
        j = begin + tl.arange(0, N)
        mask_n = j < num_rows
        there = tl.load(facts + COUNTED * width + j, mask=mask_n, other=0.0) > 0
        same = (own[:, None] == tl.load(own_classes + width + j, mask=mask_n, other=-2)[None, :]) & there[None, :]
        other = -tl.load(facts + TARGET * width + j, mask=mask_n, other=0.0)
        total += tl.sum(tl.where(same, tl.exp(other[None, :] - top[:, None]), 0.0), 1)
    log = top + tl.log(tl.where(known, total, 1.0))
    leads = known & (first == i)
    push = -sigmoid(log) * tl.exp(far - log) * tl.load(facts + FACTOR * width + i, mask=mask_m, other=0.0)
    tl.store(facts + VALUE * width + i, tl.where(leads, softplus(log), 0.0), mask=mask_m)
    tl.store(facts + FIRST * width + i, tl.where(leads, 1.0, 0.0), mask=mask_m)
    tl.store(stats + PUSH * width + i, tl.where(known, push, 0.0).to(tl.float32), mask=mask_m)
    tl.store(own_classes + i, tl.where(known, own, -1), mask=mask_m)


@triton.jit
def _negatives(peaks, sums, inverse, partial, num_weights, shift, share, N: tl.constexpr):
    """Σ log(1 + e^{log-sum-exp + shift}) over a block of classes; their peaks become levels, their sums derivatives."""
    c = tl.program_id(0) * N + tl.arange(0, N)
    mask = c < num_weights
    peak = tl.load(peaks + c, mask=mask, other=float("-inf"))
    total = tl.load(sums + c, mask=mask, other=0.0).to(tl.float64)
    level = tl.where(peak == float("-inf"), 0.0, peak)
    others = total != 0  # or NaN
    log = (level.to(tl.float64) + tl.log2(tl.where(others, total, 1.0))) * LN2 + shift
    value = tl.where(others, softplus(log), 0.0) + tl.load(inverse + c, mask=mask, other=0.0) * 0.0
    pull = tl.where(others, sigmoid(log) / tl.where(others, total, 1.0), 0.0) * (share * LN2)
    tl.store(peaks + c, level, mask=mask)
    tl.store(sums + c, pull.to(tl.float32), mask=mask)
    tl.store(partial + tl.program_id(0), tl.sum(tl.where(mask, value, 0.0)))


@triton.jit
def _total(facts, stats, partial, value, gain, num_rows, width, blocks, share, N: tl.constexpr):
    """The loss; the derivatives by own classes are divided by the number of these. One program."""
    pulls = tl.zeros((N,), tl.float64)
    number = tl.zeros((N,), tl.float64)
    for begin in range(0, num_rows, N):
        i = begin + tl.arange(0, N)
        mask = i < num_rows
        pulls += tl.load(facts + VALUE * width + i, mask=mask, other=0.0)
        pulls += tl.load(facts + TAINT * width + i, mask=mask, other=0.0)
        number += tl.load(facts + FIRST * width + i, mask=mask, other=0.0)
    pushes = tl.zeros((N,), tl.float64)
    for begin in range(0, blocks, N):
        j = begin + tl.arange(0, N)
        pushes += tl.load(partial + j, mask=j < blocks, other=0.0)
    each = 1.0 / tl.maximum(tl.sum(number), 1.0)
    for begin in range(0, num_rows, N):
        i = begin + tl.arange(0, N)
        push = tl.load(stats + PUSH * width + i, mask=i < num_rows, other=0.0)
        tl.store(stats + PUSH * width + i, (push * each).to(tl.float32), mask=i < num_rows)
    tl.store(value, (tl.sum(pulls) * each + tl.sum(pushes) * share).to(tl.float32))
    tl.store(gain, 1.0)


def positives(own_classes, facts, stats, num_rows):
    """Own classes' terms into `facts`, their derivatives into `stats`; own classes of unknown items become -1."""
    arguments = (own_classes, facts, stats, num_rows, facts.shape[1])
    start_kernel(_positives, _blocks(num_rows, ITEMS), arguments, {"M": ITEMS, "N": 128} | _options())


def negatives(peaks, sums, inverse, shift):
    """In place of peaks and sums (1, C) their levels and derivatives; the terms, summed by blocks."""
    num_weights = inverse.shape[0]
    partial = torch.empty(_blocks(num_weights, CLASSES), device=inverse.device, dtype=torch.float64)
    arguments = (peaks, sums, inverse, partial, num_weights, float(shift), 1.0 / num_weights)
    start_kernel(_negatives, len(partial), arguments, {"N": CLASSES} | _options())
    return partial


def total(facts, stats, partial, num_rows, num_weights):
    """The loss and 1, two scalars."""
    value, gain = (torch.empty((), device=facts.device, dtype=torch.float32) for _ in range(2))
    arguments = (facts, stats, partial, value, gain, num_rows, facts.shape[1], len(partial), 1.0 / num_weights)
    start_kernel(_total, 1, arguments, {"N": SUMMED} | _options())
    return value, gain
