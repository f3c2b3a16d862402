# mypy: ignore-errors
"""The kernel of `proxy_anchor_ops` between its products: terms and derivatives of each proxy, and their sum."""

import functools

import torch

from nearkin.kernels.class_dense_kernels import COUNT, TAINT, options, padded, row_fact
from nearkin.kernels.launch import CachedLauncher
from nearkin.kernels.numerics import LOG_ZERO, sigmoid, softplus, tl, triton

NUMBERS = ("num_anchors", "num_proxies")  # not to be compiled for again
LONGEST = 4096  # anchors that a program has in registers
SUMMED = 1024  # proxies, or anchors, at a time in the last sum
PULL, PUSH, PRESENT = (tl.constexpr(row) for row in range(3))  # rows of `terms`, float64, one entry per proxy


@triton.jit
def _entries(scores, labels, start, proxy, num_anchors, N: tl.constexpr):
    """Of a run of anchors: similarities with a proxy, negated where it is theirs; which are its own, and others'."""
    i = start + tl.arange(0, N)
    exists = i < num_anchors
    label = tl.load(labels + i, mask=exists, other=-1).to(tl.int64)
    value = tl.load(scores + i, mask=exists, other=0.0)
    own = label == proxy
    return i, exists, label, tl.where(own, -value, value), own, (label != -1) & (label != proxy)


@triton.jit
def _peaks(value, own, other):
    return tl.where(own, value, float("-inf")), tl.where(other, value, float("-inf"))


@triton.jit
def _level(peak):
    return tl.where(peak > float("-inf"), peak, 0.0)


@triton.jit
def _share(value, own, own_level, other_level, scale):
    """e^(scale · (value - the highest of its kind))."""
    return tl.exp(scale * (value - tl.where(own, own_level, other_level)))


@triton.jit
def _term(peak, total, scale, margin):
    """log(1 + Σ e^(scale · (value + margin))) from the highest value and the sum below it, and its sigmoid."""
    some = peak > float("-inf")
    wide = tl.full((), 0.0, tl.float64) + scale
    log = tl.where(some, tl.log(tl.where(some, total, 1.0)) + wide * (_level(peak).to(tl.float64) + margin), LOG_ZERO)
    return tl.where(some, softplus(log), 0.0), tl.where(some, wide * sigmoid(log) / tl.where(some, total, 1.0), 0.0)


@triton.jit
def _finish(scores, labels, terms, facts, value, num_anchors, stride, num_proxies, BACK: tl.constexpr,
            S: tl.constexpr):  # fmt: skip
    """The loss; and the derivatives by the anchors' own proxies divided by the number of those that are present."""
    pulls = tl.zeros((S,), tl.float64)
    pushes = tl.zeros((S,), tl.float64)
    present = tl.zeros((S,), tl.float64)
    for start in range(0, num_proxies, S):
        c = start + tl.arange(0, S)
        mask = c < num_proxies
        pulls += tl.load(terms + PULL * num_proxies + c, mask=mask, other=0.0, cache_modifier=".cg")
        pushes += tl.load(terms + PUSH * num_proxies + c, mask=mask, other=0.0, cache_modifier=".cg")
        present += tl.load(terms + PRESENT * num_proxies + c, mask=mask, other=0.0, cache_modifier=".cg")
    number = tl.maximum(tl.sum(present, 0), 1.0)
    taints = tl.zeros((S,), tl.float64)
    for start in range(0, num_anchors, S):
        i = start + tl.arange(0, S)
        taints += tl.load(row_fact(facts, TAINT, stride) + i, mask=i < num_anchors, other=0.0)
        if BACK:
            label = tl.load(labels + i, mask=i < num_anchors, other=-1).to(tl.int64)
            own = (label >= 0) & (label < num_proxies)
            at = scores + label * stride + i
            slope = tl.load(at, mask=own, other=0.0, cache_modifier=".cg")
            tl.store(at, (slope / number).to(tl.float32), mask=own)
    total = tl.sum(pulls, 0) / number + tl.sum(pushes, 0) / num_proxies + tl.sum(taints, 0)
    tl.store(value, total.to(tl.float32))


@triton.jit(do_not_specialize=NUMBERS)
def _terms(scores, labels, terms, facts, value, num_anchors, stride, num_proxies, scale, margin, BACK: tl.constexpr,
           ONE: tl.constexpr, N: tl.constexpr, S: tl.constexpr):  # fmt: skip
    """Both terms of a proxy, and in place of its similarities the derivatives; those of its own anchors are divided at
    the end, by the program that is done last. ONE: a run has all anchors."""
    proxy = tl.program_id(0)
    line = scores + proxy.to(tl.int64) * stride
    if ONE:
        i, exists, label, entry, own, other = _entries(line, labels, 0, proxy, num_anchors, N)
        taint = entry * 0.0 + tl.where((label < -1) | (label >= num_proxies), float("nan"), 0.0)
        own_peaks, other_peaks = _peaks(entry, own, other)
        own_peak, other_peak = tl.max(own_peaks, 0), tl.max(other_peaks, 0)
        share = _share(entry, own, _level(own_peak), _level(other_peak), scale)
        own_total = tl.sum(tl.where(own, share, 0.0).to(tl.float64), 0)
        other_total = tl.sum(tl.where(other, share, 0.0).to(tl.float64), 0)
    else:
        own_peaks = tl.full((N,), float("-inf"), tl.float32)
        other_peaks = own_peaks
        taint = tl.zeros((N,), tl.float32)
        for start in range(0, num_anchors, N):
            i, exists, label, entry, own, other = _entries(line, labels, start, proxy, num_anchors, N)
            taint += entry * 0.0 + tl.where((label < -1) | (label >= num_proxies), float("nan"), 0.0)
            run_own, run_other = _peaks(entry, own, other)
            own_peaks, other_peaks = tl.maximum(own_peaks, run_own), tl.maximum(other_peaks, run_other)
        own_peak, other_peak = tl.max(own_peaks, 0), tl.max(other_peaks, 0)
        own_totals = tl.zeros((N,), tl.float64)
        other_totals = tl.zeros((N,), tl.float64)
        for start in range(0, num_anchors, N):
            i, exists, label, entry, own, other = _entries(line, labels, start, proxy, num_anchors, N)
            share = _share(entry, own, _level(own_peak), _level(other_peak), scale)
            own_totals += tl.where(own, share, 0.0).to(tl.float64)
            other_totals += tl.where(other, share, 0.0).to(tl.float64)
        own_total, other_total = tl.sum(own_totals, 0), tl.sum(other_totals, 0)
    pull, by_own = _term(own_peak, own_total, scale, margin)
    push, by_other = _term(other_peak, other_total, scale, margin)
    tl.store(terms + PULL * num_proxies + proxy, pull + tl.sum(taint, 0))
    tl.store(terms + PUSH * num_proxies + proxy, push)
    tl.store(terms + PRESENT * num_proxies + proxy, tl.where(own_peak > float("-inf"), 1.0, 0.0).to(tl.float64))
    if BACK:
        by_own = -by_own.to(tl.float32)
        by_other = (by_other / num_proxies).to(tl.float32)
        if ONE:
            slope = share * tl.where(own, by_own, tl.where(other, by_other, 0.0))
            tl.store(line + i, tl.where(own | other, slope, 0.0), mask=exists)
        else:
            for start in range(0, num_anchors, N):
                i, exists, label, entry, own, other = _entries(line, labels, start, proxy, num_anchors, N)
                share = _share(entry, own, _level(own_peak), _level(other_peak), scale)
                slope = share * tl.where(own, by_own, tl.where(other, by_other, 0.0))
                tl.store(line + i, tl.where(own | other, slope, 0.0), mask=exists)
    tl.debug_barrier()  # all threads have stored
    if tl.atomic_add(facts + COUNT, 1.0, sem="acq_rel") == num_proxies - 1:
        _finish(scores, labels, terms, facts, value, num_anchors, stride, num_proxies, BACK, S)


def loss(scores, labels, facts, scale, margin, back):
    """The loss; `back`: the derivatives take the place of the similarities (C, B). facts: of `class_dense_kernels`."""
    num_proxies, num_anchors = scores.shape
    terms = torch.empty(3 * num_proxies, device=scores.device, dtype=torch.float64)
    value = torch.empty((), device=scores.device, dtype=torch.float32)
    width = padded(num_anchors)  # of a line of scores, and of facts
    _settling(min(LONGEST, max(32, 1 << (num_anchors - 1).bit_length())), num_anchors <= LONGEST, back)(
        (num_proxies, 1, 1), scores, labels, terms, facts, value, num_anchors, width, num_proxies, scale, margin
    )
    return value


@functools.cache
def _settling(run, one, back):
    warps = max(4, min(8, run // 256))
    return CachedLauncher(_terms, BACK=back, ONE=one, N=run, S=SUMMED, num_warps=warps, **options())
