# mypy: ignore-errors
"""The kernels of `class_dense_ops`: a program passes over the line of scores of each of its anchors, twice.

The other classes are summed without the own one, beside which a small loss would lose its digits. The second pass
writes the derivatives over the scores. The last program to finish sums the terms, always in the same order.
"""

import functools

import torch

from nearkin.kernels.class_dense_kernels import (
    BY_LENGTH,
    COUNT,
    COUNTED,
    GAIN,
    INTERPRETS,
    MEDIAN,
    NUMBERS,
    OTHERS,
    PICK,
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
    weight_facts,
)
from nearkin.kernels.launch import CachedLauncher
from nearkin.kernels.numerics import LOG_ZERO, sigmoid, softplus, tl, triton

SUMMED = 512  # anchors at a time in the last sum
LARGEST = 16 if INTERPRETS else 2048  # scores at a time; twice as many, by twice the threads, of several centres
HALF_ROOT = tl.constexpr(0.7071067811865476)  # cos π/4


@triton.jit
def _class_scores(line, c, mask, stride, times, bias, inverses, lost, LOST: tl.constexpr, BIAS: tl.constexpr,
                  CENTERS: tl.constexpr, K: tl.constexpr):  # fmt: skip
    """Scores (N,) of the classes c, NaN if one of its centres is; and which of the centres it is."""
    if CENTERS == 1:
        best = c * 0
        score = tl.where(mask, tl.load(line + c, mask=c < stride, other=0.0), 0.0)  # lines are padded for wide loads
    else:
        k = tl.arange(0, K)
        exists = mask[:, None] & (k < CENTERS)[None, :]
        tile = tl.load(line + c[:, None] * CENTERS + k[None, :], mask=exists, other=float("-inf"))
        score = tl.max(tile, 1)
        best = tl.min(tl.where(tile == score[:, None], k[None, :], K), 1)  # the first of equals
        score = tl.where(mask, score, 0.0) + tl.sum(tl.where(exists, tile * 0.0, 0.0), 1)
    score = score * times
    if LOST:
        score += tl.where(tl.load(inverses + c, mask=mask, other=1.0) == 0.0, lost, 0.0)
    if BIAS:
        addend = tl.load(bias + c, mask=mask, other=0.0).to(tl.float32)
        score += addend + addend * 0.0  # NaN if it is infinite
    return score, best


@triton.jit
def _others(line, own, classes, stride, times, bias, inverses, lost, LOST: tl.constexpr, BIAS: tl.constexpr,
            CENTERS: tl.constexpr, K: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """The highest score of the other classes, and the sum of e^(score - that) in float64; 0 and 0 if there are none."""
    peaks = tl.full((N,), LOG_ZERO, tl.float32)
    sums = tl.zeros((N,), tl.float32)
    for start in range(0, classes, N):
        c = start + tl.arange(0, N)
        mask = c < classes
        score, _ = _class_scores(line, c, mask, stride, times, bias, inverses, lost, LOST, BIAS, CENTERS, K)
        other = mask & (c != own)
        top = tl.maximum(peaks, tl.where(other, score, LOG_ZERO))
        sums = sums * tl.exp(peaks - top) + tl.where(other, tl.exp(score - top), 0.0)
        peaks = top
    level = tl.max(peaks, 0)
    total = tl.sum((sums * tl.exp(peaks - level)).to(tl.float64), 0)
    return tl.where(total == 0, 0.0, level), total


@triton.jit
def _derivatives(line, own, pick, classes, stride, times, level, pull, push, bias, inverses, lost, LOST: tl.constexpr,
                 BIAS: tl.constexpr, CENTERS: tl.constexpr, K: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """pull · e^(score - level) in place of the others' scores, push in place of the own one."""
    for start in range(0, classes, N):
        c = start + tl.arange(0, N)
        mask = c < classes
        score, best = _class_scores(line, c, mask, stride, times, bias, inverses, lost, LOST, BIAS, CENTERS, K)
        slope = tl.where(c == own, push, pull * tl.exp(score - level))
        if CENTERS == 1:
            tl.store(line + c, slope, mask=c < stride)
        else:
            k = tl.arange(0, K)
            chosen = tl.where(c == own, (pick - own * CENTERS).to(tl.int32), best)
            slopes = tl.where(k[None, :] == chosen[:, None], slope[:, None], 0.0)
            tl.debug_barrier()  # a thread may store what another has loaded
            tl.store(line + c[:, None] * CENTERS + k[None, :], slopes, mask=mask[:, None] & (k < CENTERS)[None, :])


@triton.jit
def _last(facts, number):
    """Whether all programs but this one are done; what they stored can then be loaded, past the nearest cache."""
    return tl.atomic_add(facts + COUNT, 1.0, sem="acq_rel") == number - 1


@triton.jit
def _sum(facts, value, num_rows, width, MEAN: tl.constexpr, S: tl.constexpr):
    """The loss, and the factor of every derivative."""
    total = tl.zeros((S,), tl.float64)
    counted = tl.zeros((S,), tl.float64)
    for start in range(0, num_rows, S):
        i = start + tl.arange(0, S)
        mask = i < num_rows
        total += tl.load(row_fact(facts, TARGET, width) + i, mask=mask, other=0.0, cache_modifier=".cg")
        total += tl.load(row_fact(facts, TAINT, width) + i, mask=mask, other=0.0, cache_modifier=".cg")
        counted += tl.load(row_fact(facts, COUNTED, width) + i, mask=mask, other=0.0, cache_modifier=".cg")
    gain = tl.full((), 1.0, tl.float64)
    if MEAN:
        gain = 1.0 / tl.maximum(tl.sum(counted, 0), 1.0)
    tl.store(value, (tl.sum(total, 0) * gain).to(tl.float32))
    tl.store(facts + GAIN, gain)


@triton.jit
def _anchor(scores, bias, facts, i, times, classes, stride, width, lost, LOST: tl.constexpr, BIAS: tl.constexpr,
            SOFT: tl.constexpr, NEEDS_OTHERS: tl.constexpr, ACTIVE: tl.constexpr, SLOPES: tl.constexpr,
            APART: tl.constexpr, CENTERS: tl.constexpr, K: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """The cross-entropy of anchor i, and its derivatives."""
    line = scores + i.to(tl.int64) * stride
    inverses = weight_facts(facts, width)
    pick = tl.load(row_fact(facts, PICK, width) + i).to(tl.int64)
    own = pick // CENTERS
    target = tl.load(row_fact(facts, TARGET, width) + i) * times
    level, total = _others(line, own, classes, stride, times, bias, inverses, lost, LOST, BIAS, CENTERS, K, N)
    others = total != 0  # NaN is one
    log = level.to(tl.float64) + tl.log(tl.where(others, total, 1.0)) - target
    counts = tl.load(row_fact(facts, COUNTED, width) + i) > 0
    if SOFT:
        term = tl.where(others, softplus(log), 0.0)
        share = tl.where(others, sigmoid(log), 0.0)
    else:
        term = log
        share = tl.where(others, 1.0, 0.0)
    if NEEDS_OTHERS:
        counts = counts & (classes > 1)
    if ACTIVE:
        counts = counts & ((term.to(tl.float32) > 0) | (term != term))
    taint = tl.load(row_fact(facts, TAINT, width) + i) + (total + target) * 0.0
    share = tl.where(counts, share, 0.0)
    by_length = -share * tl.load(row_fact(facts, BY_LENGTH, width) + i)
    push = -share * tl.load(row_fact(facts, SLOPE, width) + i) * times
    pull = (share / tl.where(others, total, 1.0) * times).to(tl.float32)
    tl.store(row_fact(facts, BY_LENGTH, width) + i, by_length)
    tl.store(row_fact(facts, SLOPE, width) + i, push)
    tl.store(row_fact(facts, TARGET, width) + i, tl.where(counts, term, 0.0))
    tl.store(row_fact(facts, TAINT, width) + i, taint)
    tl.store(row_fact(facts, COUNTED, width) + i, tl.where(counts, 1.0, 0.0))
    if SLOPES:
        if APART:
            push = push * 0.0
        _derivatives(line, own, pick, classes, stride, times, level, pull, push.to(tl.float32), bias, inverses, lost,
                     LOST, BIAS, CENTERS, K, N)  # fmt: skip


@triton.jit(do_not_specialize=NUMBERS)
def _entropy(rows, units, scores, bias, scale, facts, value, num_rows, num_weights, stride, width, dim, lost,
             ADAPTED: tl.constexpr, LOST: tl.constexpr, BIAS: tl.constexpr, SOFT: tl.constexpr,
             NEEDS_OTHERS: tl.constexpr, ACTIVE: tl.constexpr, MEAN: tl.constexpr, SLOPES: tl.constexpr,
             PRODUCT: tl.constexpr, APART: tl.constexpr, CENTERS: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
             S: tl.constexpr, R: tl.constexpr, D: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    """Cross-entropies of R anchors per program, and their sum. ADAPTED: scores are cosines, to be multiplied by
    `scale`; SOFT: the own class is in the sum too; NEEDS_OTHERS: an anchor counts only if there are other classes;
    SLOPES: derivatives are wanted, APART: but not by the own class; PRODUCT: the scores are still to be computed."""
    first = tl.program_id(0) * R
    if PRODUCT:
        tile_scores(rows, units, scores, first, num_rows, num_weights, stride, dim, R, D, STEP)
    times = tl.full((), 1.0, tl.float32)
    if ADAPTED:
        times = tl.load(scale).to(tl.float32)
    for r in range(0, R):
        if first + r < num_rows:
            _anchor(scores, bias, facts, first + r, times, num_weights // CENTERS, stride, width, lost, LOST, BIAS,
                    SOFT, NEEDS_OTHERS, ACTIVE, SLOPES, APART, CENTERS, K, N)  # fmt: skip
    if _last(facts, tl.cdiv(num_rows, R)):
        _sum(facts, value, num_rows, width, MEAN, S)


@triton.jit
def _median(facts, i, cos, num_rows, width, S: tl.constexpr):
    """Stores the own cosine of this anchor if its angle is the lower median of all anchors that count."""
    before = tl.zeros((S,), tl.int32)
    counted = tl.zeros((S,), tl.int32)
    for start in range(0, num_rows, S):
        j = start + tl.arange(0, S)
        mask = j < num_rows
        other = tl.load(row_fact(facts, TARGET, width) + j, mask=mask, other=0.0)
        known = mask & (tl.load(row_fact(facts, COUNTED, width) + j, mask=mask, other=0.0) > 0) & (other == other)
        counted += known.to(tl.int32)
        before += (known & ((other > cos) | ((other == cos) & (j < i)))).to(tl.int32)
    if tl.sum(before, 0) == (tl.sum(counted, 0) - 1) // 2:
        tl.store(facts + MEDIAN, cos)


@triton.jit(do_not_specialize=NUMBERS)
def _adapt(rows, units, scores, scale, adapted, facts, num_rows, num_weights, stride, width, dim,
           PRODUCT: tl.constexpr, N: tl.constexpr, S: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
           STEP: tl.constexpr):  # fmt: skip
    """AdaCos's next scale from cosines: ln(mean sum of e^(scale · cosine) of the others) / cos(min(π/4, median))."""
    first = tl.program_id(0) * R
    if PRODUCT:
        tile_scores(rows, units, scores, first, num_rows, num_weights, stride, dim, R, D, STEP)
    times = tl.load(scale).to(tl.float32)
    for r in range(0, R):
        i = first + r
        if i < num_rows:
            pick = tl.load(row_fact(facts, PICK, width) + i).to(tl.int64)
            line = scores + i.to(tl.int64) * stride
            level, total = _others(
                line, pick, num_weights, stride, times, scale, scale, 0.0, False, False, 1, 1, N)  # fmt: skip
            tl.store(row_fact(facts, OTHERS, width) + i, level.to(tl.float64) + tl.log(total))
            if tl.load(row_fact(facts, COUNTED, width) + i) > 0:
                _median(facts, i, tl.load(row_fact(facts, TARGET, width) + i), num_rows, width, S)
    if _last(facts, tl.cdiv(num_rows, R)):
        _next_scale(scale, adapted, facts, num_rows, width, S)
        tl.store(facts + COUNT, 0.0)


@triton.jit
def _next_scale(scale, adapted, facts, num_rows, width, S: tl.constexpr):
    peak = tl.full((), float("-inf"), tl.float64)
    for start in range(0, num_rows, S):
        i = start + tl.arange(0, S)
        known = tl.load(row_fact(facts, COUNTED, width) + i, mask=i < num_rows, other=0.0) > 0
        log = tl.load(row_fact(facts, OTHERS, width) + i, mask=known, other=float("-inf"), cache_modifier=".cg")
        peak = tl.maximum(peak, tl.max(log, 0))
    total = tl.zeros((S,), tl.float64)
    counted = tl.zeros((S,), tl.float64)
    for start in range(0, num_rows, S):
        i = start + tl.arange(0, S)
        known = tl.load(row_fact(facts, COUNTED, width) + i, mask=i < num_rows, other=0.0) > 0
        log = tl.load(row_fact(facts, OTHERS, width) + i, mask=known, other=0.0, cache_modifier=".cg")
        total += tl.where(known, tl.exp(log - peak), 0.0)
        counted += known.to(tl.float64)
    before = tl.load(scale)
    median = tl.load(facts + MEDIAN, cache_modifier=".cg")
    following = (peak + tl.log(tl.sum(total, 0) / tl.sum(counted, 0))) / tl.maximum(tl.minimum(median, 1.0), HALF_ROOT)
    sound = (following > 0) & (following < float("inf"))  # not with NaN, nor without a known label
    tl.store(adapted, tl.where(sound, following.to(tl.float32), before.to(tl.float32)))


def entropy(prepared, scores, form, reduction, bias=None, adapted=None, slopes=True, product=False, apart=False):
    """The loss, a scalar; `scores` become the derivatives by them. adapted: a scale of cosines in `scores`; product:
    these are still empty; apart: the derivatives by the own classes are not among them but in SLOPE."""
    rows, units, facts = prepared[:3]
    (anchors, dim), weights, centers = rows.shape, units.shape[0], form.centers
    value = torch.empty((), device=scores.device)
    choices = (adapted is not None, form.lost != 0, bias is not None, form.soft, form.needs_others)
    operands = (rows, units, scores, facts if bias is None else bias, facts if adapted is None else adapted)
    _settling(*choices, reduction, slopes, product, apart, centers, _block(weights // centers, centers), chunk(dim))(
        (-(-anchors // TILE) if product else anchors, 1, 1),
        *operands, facts, value, anchors, weights, scores.stride(0), padded(anchors), dim, float(form.lost),
        key=(dim, rows.get_device(), kind_of(bias), kind_of(adapted))
    )  # fmt: skip
    return value


@functools.cache
def _settling(adapted, lost, bias, soft, needs_others, reduction, slopes, product, apart, centers, block, dims):
    choices = {"ADAPTED": adapted, "LOST": lost, "BIAS": bias, "SOFT": soft, "NEEDS_OTHERS": needs_others}
    choices |= {"ACTIVE": reduction == "active", "MEAN": reduction != "sum", "SLOPES": slopes, "CENTERS": centers}
    choices |= {"PRODUCT": product, "APART": apart} | _tile(product, dims)
    choices |= {"K": 1 << (centers - 1).bit_length(), "N": block, "S": SUMMED}
    return CachedLauncher(_entropy, **choices, **_warps(block * choices["K"], product), **options())


def adapt(prepared, scores, scale, adapted, product=False):
    """Fills `adapted` with the next scale from cosines (B, C) and the scale before."""
    rows, units, facts = prepared[:3]
    (anchors, dim), classes = rows.shape, units.shape[0]
    sizes = (anchors, classes, scores.stride(0), padded(anchors), dim)
    _adapting(product, _block(classes, 1), chunk(dim))(
        (-(-anchors // TILE) if product else anchors, 1, 1), rows, units, scores, scale, adapted, facts, *sizes,
        key=(dim, rows.get_device(), kind_of(scale), kind_of(adapted))
    )  # fmt: skip


@functools.cache
def _adapting(product, block, dims):
    choices = {"PRODUCT": product, "N": block, "S": SUMMED} | _tile(product, dims)
    return CachedLauncher(_adapt, **choices, **_warps(block, product), **options())


def _tile(product, dims):
    return {"R": TILE, "D": dims, "STEP": step(dims)} if product else {"R": 1, "D": 16, "STEP": 16}


def _block(classes, centers):
    """Classes at a time, a power of two. Triton's own function for that takes as long as a launch."""
    centers = 1 << (centers - 1).bit_length()
    most = max(1, (LARGEST if centers == 1 else 2 * LARGEST) // centers)
    return max(1, min(1 << (classes - 1).bit_length(), most), 0 if INTERPRETS else 128 // centers)


def _warps(entries, product):
    return {"num_warps": 4, "num_stages": 2} if product else {"num_warps": max(1, min(16, entries // 256))}
