# mypy: ignore-errors
"""The kernel of `soft_triple_ops` between its products: cross-entropy of each anchor over classes of several centres,
how far the centres of each class are apart, and the sum. `center_ops` uses it with one centre per class and a bias.

Similarities and unit centres are in the order of `class_dense_kernels.ranked`: those with the first centre of every
class come first, so that a program reads them in lines and has all centres of a class in one thread.
"""

import functools

import torch

from nearkin.kernels.class_dense_kernels import (
    COUNT,
    COUNTED,
    GAIN,
    SLOPE,
    TAINT,
    TARGET,
    TILE,
    chunk,
    kind_of,
    options,
    padded,
    row_fact,
    step,
    tile_scores,
)
from nearkin.kernels.launch import CachedLauncher
from nearkin.kernels.numerics import sigmoid, softplus, tl, triton

NUMBERS = ("num_rows", "classes", "num_parts")  # not to be compiled for again
CLASSES = 256  # at a time
LARGEST = 4096  # coordinates of the centres of a class that a program has in registers
PROGRAMS = 1056  # over the centres of classes: each counts the labels once
SUMMED = 1024  # anchors, or labels, at a time


@triton.jit
def _means(line, bias, start, classes, sharpness, K: tl.constexpr, BIAS: tl.constexpr, N: tl.constexpr):
    """Of a run of classes: which exist, the highest similarity of each, Σ e^(sharpness · (similarity - highest)), and
    how far the mean of its similarities under this softmax is below the highest."""
    c = start + tl.arange(0, N)
    exists = c < classes
    top = tl.load(line + c, mask=exists, other=0.0)
    if BIAS:
        top += tl.load(bias + c, mask=exists, other=0.0).to(tl.float32)
    total = tl.full((N,), 1.0, tl.float32)
    below = tl.zeros((N,), tl.float32)
    if K > 1:
        for k in tl.static_range(1, K):
            top = tl.maximum(top, tl.load(line + k * classes + c, mask=exists, other=0.0))
        total = tl.zeros((N,), tl.float32)
        for k in tl.static_range(0, K):
            gap = tl.load(line + k * classes + c, mask=exists, other=0.0) - top
            share = tl.exp(gap * sharpness)
            total += share
            below += share * gap
        below = below / total
    return c, exists, top, total, below


@triton.jit
def _entropy(line, label, bias, facts, row, width, classes, scale, margin, sharpness, BIAS: tl.constexpr,
             ACTIVE: tl.constexpr, BACK: tl.constexpr, K: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """The term of an anchor, and in place of its similarities the derivatives, before the reduction. BIAS: of each
    class; the term has then another part, which is in place of the slope."""
    target = tl.zeros((N,), tl.float32)
    peak = tl.full((N,), float("-inf"), tl.float32)
    total = tl.zeros((N,), tl.float32)
    taint = tl.zeros((N,), tl.float32)
    for start in range(0, classes, N):
        c, exists, top, shares, below = _means(line, bias, start, classes, sharpness, K, BIAS, N)
        mean = top + below
        taint += mean * 0.0
        target += tl.where(c == label, mean, 0.0)
        other = exists & (c != label)
        top = tl.maximum(peak, tl.where(other, mean, float("-inf")))
        level = tl.where(top > float("-inf"), top, 0.0)
        total = total * tl.exp(scale * (peak - level)) + tl.where(other, tl.exp(scale * (mean - level)), 0.0)
        peak = top
    highest = tl.max(peak, 0)
    others = highest > float("-inf")
    level = tl.where(others, highest, 0.0)
    number = tl.sum(total.to(tl.float64) * tl.exp(scale * (peak - level)).to(tl.float64), 0)
    number = tl.where(others, number, 1.0)
    wide = tl.full((), 0.0, tl.float64) + scale
    ahead = wide * (level.to(tl.float64) - tl.sum(target.to(tl.float64), 0) + margin) + tl.log(number)
    term = tl.where(others, softplus(ahead), 0.0)
    pull = tl.where(others, sigmoid(ahead) * wide, 0.0)
    if BIAS:
        term += tl.load(row_fact(facts, SLOPE, width) + row)
    counted = label != -1
    if ACTIVE:
        counted = counted & ((term > 0) | (term != term))
    out_of_range = tl.where((label < -1) | (label >= classes), float("nan"), 0.0)
    term = tl.where(counted, term, 0.0) + tl.load(row_fact(facts, TAINT, width) + row)
    tl.store(row_fact(facts, TARGET, width) + row, term + out_of_range + tl.sum(taint, 0))
    tl.store(row_fact(facts, COUNTED, width) + row, tl.where(counted, 1.0, 0.0).to(tl.float64))
    if BACK:
        pull = tl.where(counted, pull, 0.0)
        by_target = -pull.to(tl.float32)
        by_other = (pull / number).to(tl.float32)
        for start in range(0, classes, N):
            c, exists, top, shares, below = _means(line, bias, start, classes, sharpness, K, BIAS, N)
            slope = tl.where(c == label, by_target, by_other * tl.exp(scale * (top + below - level)))
            if K > 1:
                slope = slope / shares
                for k in tl.static_range(0, K):
                    at = line + k * classes + c
                    gap = tl.load(at, mask=exists, other=0.0) - top
                    tl.store(at, slope * tl.exp(gap * sharpness) * (1.0 + (gap - below) * sharpness), mask=exists)
            else:
                tl.store(line + c, slope, mask=exists)


@triton.jit
def _within(units, labels, by_units, parts, part, num_parts, num_rows, classes, dim, weight, BACK: tl.constexpr,
            ONE: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, D: tl.constexpr, S: tl.constexpr):  # fmt: skip
    """Sums of `weight` · √(|w - w'|² + 1e-5) over the pairs of centres of each class; and the gradient by unit centres,
    times the number of known labels, since each of their terms contains all of these. ONE: a run has all dimensions."""
    number = tl.full((), 1.0, tl.float32)
    if BACK:
        known = tl.zeros((S,), tl.int32)
        for start in range(0, num_rows, S):
            i = start + tl.arange(0, S)
            known += (tl.load(labels + i, mask=i < num_rows, other=-1).to(tl.int64) != -1).to(tl.int32)
        number = tl.sum(known, 0).to(tl.float32)
    k = tl.arange(0, KP)
    total = tl.zeros((KP,), tl.float64)
    for c in range(part, classes, num_parts):
        rows = (k.to(tl.int64) * classes + c)[:, None] * dim
        if ONE:
            d = tl.arange(0, D)
            mask = (k < K)[:, None] & (d < dim)[None, :]
            unit = tl.load(units + rows + d[None, :], mask=mask, other=0.0)
            gradient = tl.zeros((KP, D), tl.float32)
            for j in range(0, K):
                away = unit - _beside(units, j, classes, c, d, dim)[None, :]
                apart = tl.sqrt(tl.sum(away * away, 1) + 1e-5)
                total += tl.where(k < j, apart, 0.0).to(tl.float64)
                gradient += away * (1.0 / apart)[:, None]  # 0 beside itself
            if BACK:
                tl.store(by_units + rows + d[None, :], gradient * (number * weight), mask=mask)
        else:
            inverse = tl.zeros((KP, KP), tl.float32)
            for j in range(0, K):
                squared = tl.zeros((KP,), tl.float32)
                for start in range(0, dim, D):
                    d = start + tl.arange(0, D)
                    mask = (k < K)[:, None] & (d < dim)[None, :]
                    away = tl.load(units + rows + d[None, :], mask=mask, other=0.0)
                    away -= _beside(units, j, classes, c, d, dim)[None, :]
                    squared += tl.sum(away * away, 1)
                apart = tl.sqrt(squared + 1e-5)
                total += tl.where(k < j, apart, 0.0).to(tl.float64)
                inverse = tl.where((k == j)[None, :], (1.0 / apart)[:, None], inverse)
            if BACK:
                for start in range(0, dim, D):
                    d = start + tl.arange(0, D)
                    mask = (k < K)[:, None] & (d < dim)[None, :]
                    unit = tl.load(units + rows + d[None, :], mask=mask, other=0.0)
                    gradient = tl.zeros((KP, D), tl.float32)
                    for j in range(0, K):
                        of_pair = tl.sum(tl.where((k == j)[None, :], inverse, 0.0), 1)
                        gradient += of_pair[:, None] * (unit - _beside(units, j, classes, c, d, dim)[None, :])
                    tl.store(by_units + rows + d[None, :], gradient * (number * weight), mask=mask)
    tl.store(parts + part, tl.sum(total, 0) * weight)


@triton.jit
def _beside(units, j, classes, c, d, dim):
    """Coordinates d of the unit centre j of class c."""
    return tl.load(units + (tl.cast(j, tl.int64) * classes + c) * dim + d, mask=d < dim, other=0.0)


@triton.jit
def _total(facts, parts, value, num_rows, width, num_parts, MEAN: tl.constexpr, S: tl.constexpr):
    """The loss and the factor of all derivatives. parts: numbers whose sum is in each anchor's term."""
    total = tl.zeros((S,), tl.float64)
    counted = tl.zeros((S,), tl.float64)
    apart = tl.zeros((S,), tl.float64)
    for start in range(0, num_rows, S):
        i = start + tl.arange(0, S)
        mask = i < num_rows
        total += tl.load(row_fact(facts, TARGET, width) + i, mask=mask, other=0.0, cache_modifier=".cg")
        counted += tl.load(row_fact(facts, COUNTED, width) + i, mask=mask, other=0.0, cache_modifier=".cg")
    for start in range(0, num_parts, S):
        i = start + tl.arange(0, S)
        apart += tl.load(parts + i, mask=i < num_parts, other=0.0, cache_modifier=".cg")
    number = tl.sum(counted, 0)
    scale = tl.full((), 1.0, tl.float64)
    if MEAN:
        scale = 1.0 / tl.maximum(number, 1.0)
    tl.store(value, ((tl.sum(total, 0) + tl.sum(apart, 0) * number) * scale).to(tl.float32))
    tl.store(facts + GAIN, scale)


@triton.jit(do_not_specialize=NUMBERS)
def _settle(rows, scores, labels, bias, units, by_units, facts, parts, value, num_rows, num_parts, width, stride,
            classes, dim, scale, margin, sharpness, weight, BIAS: tl.constexpr, ACTIVE: tl.constexpr,
            MEAN: tl.constexpr, BACK: tl.constexpr, BY_UNITS: tl.constexpr, WITHIN: tl.constexpr, ONE: tl.constexpr,
            PRODUCT: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, N: tl.constexpr, W: tl.constexpr,
            S: tl.constexpr, R: tl.constexpr, D: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    """A program per part of the classes, then one per R anchors; the one that is done last sums. PRODUCT: similarities
    are still to be computed."""
    program = tl.program_id(0)
    if program < num_parts:
        if WITHIN:
            _within(units, labels, by_units, parts, program, num_parts, num_rows, classes, dim, weight, BY_UNITS, ONE,
                    K, KP, W, S)  # fmt: skip
    else:
        first = (program - num_parts) * R
        if PRODUCT:
            tile_scores(rows, units, scores, first, num_rows, classes * K, stride, dim, R, D, STEP)
        for row in range(first, tl.minimum(first + R, num_rows)):
            line = scores + tl.cast(row, tl.int64) * stride
            label = tl.load(labels + row).to(tl.int64)
            _entropy(line, label, bias, facts, row, width, classes, scale, margin, sharpness, BIAS, ACTIVE, BACK, K, N)
    if tl.atomic_add(facts + COUNT, 1.0, sem="acq_rel") == tl.num_programs(0) - 1:
        _total(facts, parts, value, num_rows, width, num_parts, MEAN, S)


def loss(prepared, scores, labels, numbers, reduction, *, bias=None, centers=1, weight=0.0, by_units=None, back=True,
         product=False):  # fmt: skip
    """The loss from similarities (B, C·K), which become the derivatives by them if `back`; the factor of these goes
    into the facts.

    prepared: of `class_dense_kernels`. numbers: scale, margin and 1 / γ. weight: of the distances within a class;
    by_units: is filled with the gradient of these. bias: (C,); the terms then have a part in place of the slope.
    product: the similarities are still missing.
    """
    rows, units, facts = prepared[:3]
    (num_rows, dim), classes, device = rows.shape, units.shape[0] // centers, rows.device
    within = weight > 0
    num_parts = min(classes, PROGRAMS) if within else 0
    value = torch.empty((), device=device, dtype=torch.float32)
    parts = torch.empty(num_parts, device=device, dtype=torch.float64) if within else facts
    # A term with distances between centres in it is always active.
    active = reduction == "active" and not within
    choices = (bias is not None, active, reduction != "sum", back, by_units is not None, within, product, centers)
    tensors = (facts if bias is None else bias, units, facts if by_units is None else by_units)
    programs = num_parts - (-num_rows // (TILE if product else 1))
    _settling(*choices, min(CLASSES, max(32, 1 << (classes - 1).bit_length())), chunk(dim))(
        (programs, 1, 1),
        rows, scores, labels, *tensors, facts, parts, value, num_rows, num_parts, padded(num_rows), scores.stride(0),
        classes, dim, *numbers, weight, key=(dim, rows.get_device(), kind_of(labels), kind_of(bias)))  # fmt: skip
    return value


@functools.cache
def _settling(bias, active, mean, back, by_units, within, product, centers, run, dims):
    choices = {"BIAS": bias, "ACTIVE": active, "MEAN": mean, "BACK": back, "BY_UNITS": by_units, "WITHIN": within}
    each = 1 << (centers - 1).bit_length()
    one = each * dims <= LARGEST
    choices |= {"ONE": one, "PRODUCT": product, "K": centers, "KP": each, "N": run, "W": dims if one else 128}
    choices |= {"S": SUMMED, "R": TILE if product else 1, "D": dims, "STEP": step(dims)}
    return CachedLauncher(_settle, **choices, num_warps=4, **options())
