# mypy: ignore-errors
"""The kernels of `soft_triple_ops` between its products: cross-entropy of each anchor over classes of several centres,
and how far the centres of each class are apart. `center_ops` uses the first with one centre per class."""

import functools

import torch

from nearkin.kernels.class_dense_kernels import COUNTED, GAIN, SLOPE, TAINT, TARGET, options, padded, row_fact
from nearkin.kernels.launch import CachedLauncher
from nearkin.kernels.numerics import sigmoid, softplus, tl, triton

NUMBERS = ("num_rows", "classes", "num_parts")  # not to be compiled for again
ENTRIES = 2048  # similarities of an anchor that a program has in registers
PROGRAMS = 1056  # over classes: each counts the labels once
SUMMED = 1024  # anchors, or labels, at a time


@triton.jit
def _classes(scores, start, classes, sharpness, K: tl.constexpr, KP: tl.constexpr, N: tl.constexpr):
    """Of a run of classes: where their similarities are and which exist, 0 or NaN, the derivative of each class's mean
    by its similarities, and that mean, summed below the highest of them to lose nothing."""
    c = start + tl.arange(0, N)
    k = tl.arange(0, KP)
    at = scores + c[:, None] * K + k[None, :]
    exists = (c < classes)[:, None] & (k < K)[None, :]
    value = tl.load(at, mask=exists, other=float("-inf"))
    taint = tl.sum(tl.where(exists, value * 0.0, 0.0), 1)
    mean = tl.where(c < classes, tl.max(value, 1), 0.0)
    slope = tl.where(exists, 1.0, 0.0)
    if K > 1:
        below = tl.where(exists, value - mean[:, None], 0.0)
        share = tl.where(exists, tl.exp(below * sharpness), 0.0)
        share = share / tl.where(c < classes, tl.sum(share, 1), 1.0)[:, None]
        drop = tl.sum(share * below, 1)
        mean += drop
        slope = share * (1.0 + (below - drop[:, None]) * sharpness)
    return c, at, exists, taint, slope, mean


@triton.jit(do_not_specialize=NUMBERS)
def _entropy(scores, labels, facts, width, stride, classes, scale, margin, sharpness, PULLED: tl.constexpr,
             ACTIVE: tl.constexpr, BACK: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
             N: tl.constexpr):  # fmt: skip
    """The term of an anchor, and in place of its similarities the derivatives, before the reduction. PULLED: the term
    has another part, which is in place of the slope."""
    row = tl.program_id(0)
    scores += row.to(tl.int64) * stride
    label = tl.load(labels + row).to(tl.int64)
    target = tl.zeros((N,), tl.float32)
    peak = tl.full((N,), float("-inf"), tl.float32)
    total = tl.zeros((N,), tl.float32)
    taint = tl.zeros((N,), tl.float32)
    for start in range(0, classes, N):
        c, at, exists, bad, slope, mean = _classes(scores, start, classes, sharpness, K, KP, N)
        taint += bad
        target += tl.where(c == label, mean, 0.0)
        other = (c < classes) & (c != label)
        top = tl.maximum(peak, tl.where(other, mean, float("-inf")))
        level = tl.where(top > float("-inf"), top, 0.0)
        total = total * tl.exp(scale * (peak - level)) + tl.where(other, tl.exp(scale * (mean - level)), 0.0)
        peak = top
    top = tl.max(peak, 0)
    others = top > float("-inf")
    level = tl.where(others, top, 0.0)
    number = tl.sum(total.to(tl.float64) * tl.exp(scale * (peak - level)).to(tl.float64), 0)
    number = tl.where(others, number, 1.0)
    wide = tl.full((), 0.0, tl.float64) + scale
    gap = wide * (level.to(tl.float64) - tl.sum(target.to(tl.float64), 0) + margin) + tl.log(number)
    term = tl.where(others, softplus(gap), 0.0)
    pull = tl.where(others, sigmoid(gap), 0.0)
    if PULLED:
        term += tl.load(row_fact(facts, SLOPE, width) + row)
    counted = label != -1
    if ACTIVE:
        counted = counted & ((term > 0) | (term != term))
    out_of_range = tl.where((label < -1) | (label >= classes), float("nan"), 0.0)
    term = tl.where(counted, term, 0.0) + tl.load(row_fact(facts, TAINT, width) + row)
    term += out_of_range + tl.sum(taint, 0)
    tl.store(row_fact(facts, TARGET, width) + row, term)
    tl.store(row_fact(facts, COUNTED, width) + row, tl.where(counted, 1.0, 0.0).to(tl.float64))
    if BACK:
        pull = tl.where(counted, pull * wide, 0.0)
        by_target = -pull.to(tl.float32)
        by_other = (pull / number).to(tl.float32)
        for start in range(0, classes, N):
            c, at, exists, bad, slope, mean = _classes(scores, start, classes, sharpness, K, KP, N)
            by_mean = tl.where(c == label, by_target, by_other * tl.exp(scale * (mean - level)))
            tl.store(at, by_mean[:, None] * slope, mask=exists)


@triton.jit(do_not_specialize=NUMBERS)
def _within(units, labels, by_units, parts, num_rows, classes, dim, weight, BACK: tl.constexpr, K: tl.constexpr,
            KP: tl.constexpr, D: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """Sums of `weight` · √(|w - w'|² + 1e-5) over the pairs of centres of each class; and the gradient by unit centres,
    times the number of known labels, since each of their terms contains all of these."""
    number = tl.full((), 1.0, tl.float32)
    if BACK:
        known = tl.zeros((N,), tl.int32)
        for start in range(0, num_rows, N):
            i = start + tl.arange(0, N)
            known += (tl.load(labels + i, mask=i < num_rows, other=-1).to(tl.int64) != -1).to(tl.int32)
        number = tl.sum(known, 0).to(tl.float32)
    k = tl.arange(0, KP)
    total = tl.zeros((KP,), tl.float64)
    for c in range(tl.program_id(0), classes, tl.num_programs(0)):
        first = units + tl.cast(c, tl.int64) * K * dim
        inverse = tl.zeros((KP, KP), tl.float32)
        for j in range(0, K):
            squared = tl.zeros((KP,), tl.float32)
            for start in range(0, dim, D):
                d = start + tl.arange(0, D)
                mask = (k < K)[:, None] & (d < dim)[None, :]
                rows = tl.load(first + k[:, None] * dim + d[None, :], mask=mask, other=0.0)
                beside = tl.load(first + j * dim + d, mask=d < dim, other=0.0)
                away = tl.where(mask, rows - beside[None, :], 0.0)
                squared += tl.sum(away * away, 1)
            apart = tl.sqrt(squared + 1e-5)
            total += tl.where(k < j, apart, 0.0).to(tl.float64)
            inverse = tl.where(((k < K) & (k != j))[:, None] & (k == j)[None, :], (1.0 / apart)[:, None], inverse)
        if BACK:
            for start in range(0, dim, D):
                d = start + tl.arange(0, D)
                mask = (k < K)[:, None] & (d < dim)[None, :]
                rows = tl.load(first + k[:, None] * dim + d[None, :], mask=mask, other=0.0)
                gradient = tl.zeros((KP, D), tl.float32)
                for j in range(0, K):
                    beside = tl.load(first + j * dim + d, mask=d < dim, other=0.0)
                    of_pair = tl.sum(tl.where((k == j)[None, :], inverse, 0.0), 1)
                    gradient += of_pair[:, None] * (rows - beside[None, :])
                at = by_units + tl.cast(c, tl.int64) * K * dim + k[:, None] * dim + d[None, :]
                tl.store(at, gradient * (number * weight), mask=mask)
    tl.store(parts + tl.program_id(0), tl.sum(total, 0) * weight)


@triton.jit(do_not_specialize=NUMBERS)
def _total(facts, parts, value, num_rows, width, num_parts, MEAN: tl.constexpr, N: tl.constexpr):
    """The loss and the factor of all derivatives. parts: numbers whose sum is in each anchor's term."""
    total = tl.zeros((N,), tl.float64)
    counted = tl.zeros((N,), tl.float64)
    apart = tl.zeros((N,), tl.float64)
    for start in range(0, num_rows, N):
        i = start + tl.arange(0, N)
        total += tl.load(row_fact(facts, TARGET, width) + i, mask=i < num_rows, other=0.0)
        counted += tl.load(row_fact(facts, COUNTED, width) + i, mask=i < num_rows, other=0.0)
    for start in range(0, num_parts, N):
        i = start + tl.arange(0, N)
        apart += tl.load(parts + i, mask=i < num_parts, other=0.0)
    number = tl.sum(counted, 0)
    scale = tl.full((), 1.0, tl.float64)
    if MEAN:
        scale = 1.0 / tl.maximum(number, 1.0)
    tl.store(value, ((tl.sum(total, 0) + tl.sum(apart, 0) * number) * scale).to(tl.float32))
    tl.store(facts + GAIN, scale)


def entropies(scores, labels, facts, numbers, *, centers=1, pulled=False, active=False, back=True):
    """Each anchor's term and whether it counts, in `facts` as `class_dense_kernels` has them; `back`: derivatives take
    the place of the similarities (B, C·K). numbers: scale, margin and 1 / γ."""
    num_rows, columns = scores.shape
    start = _entropies(min(ENTRIES, triton.next_power_of_2(columns)), centers, pulled, active, back)
    sizes = (padded(num_rows), scores.stride(0), columns // centers)
    start((num_rows, 1, 1), scores, labels, facts, *sizes, *numbers)


@functools.cache
def _entropies(entries, centers, pulled, active, back):
    each = triton.next_power_of_2(centers)
    sizes = {"K": centers, "KP": each, "N": max(16, entries // each)}
    warps = max(1, min(8, sizes["N"] * each // 256))
    return CachedLauncher(_entropy, PULLED=pulled, ACTIVE=active, BACK=back, **sizes, num_warps=warps, **options())


def within(units, labels, centers, weight, back):
    """Parts (P,) of the sum over the pairs of centres of a class, and the gradient by the unit centres, or None."""
    num_centers, dim = units.shape
    classes = num_centers // centers
    programs = min(classes, PROGRAMS)
    parts = torch.empty(programs, device=units.device, dtype=torch.float64)
    by_units = torch.empty_like(units) if back else None
    sizes = (labels.shape[0], classes, dim)
    start = _withins(centers, min(128, max(16, triton.next_power_of_2(dim))), back)
    start((programs, 1, 1), units, labels, by_units if back else parts, parts, *sizes, weight)
    return parts, by_units


@functools.cache
def _withins(centers, width, back):
    each = triton.next_power_of_2(centers)
    sizes = {"K": centers, "KP": each, "D": width, "N": SUMMED}
    return CachedLauncher(_within, BACK=back, **sizes, num_warps=4 if each <= 16 else 8, **options())


def total(facts, parts, num_rows, reduction):
    """The loss; the factor of all derivatives goes into `facts`."""
    value = torch.empty((), device=facts.device, dtype=torch.float32)
    number = 0 if parts is None else parts.shape[0]
    start = _totals(reduction != "sum")
    start((1, 1, 1), facts, facts if parts is None else parts, value, num_rows, padded(num_rows), number)
    return value


@functools.cache
def _totals(mean):
    return CachedLauncher(_total, MEAN=mean, N=SUMMED, num_warps=8, **options())
