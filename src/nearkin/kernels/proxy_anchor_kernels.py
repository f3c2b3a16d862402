# mypy: ignore-errors
"""The kernels of `proxy_anchor_ops` between its products: terms and derivatives of each proxy, and their sum."""

import functools

import torch

from nearkin.kernels.class_dense_kernels import TAINT, options, padded, row_fact
from nearkin.kernels.launch import CachedLauncher
from nearkin.kernels.numerics import LOG_ZERO, sigmoid, softplus, tl, triton

NUMBERS = ("num_anchors", "num_proxies")  # not to be compiled for again
LONGEST = 2048  # anchors that a program has in registers
SUMMED = 1024  # proxies, or anchors, at a time in the last kernel
PULL, PUSH, PRESENT = (tl.constexpr(row) for row in range(3))  # rows of `terms`, float64, one entry per proxy


@triton.jit
def _entries(scores, labels, start, proxy, num_anchors, N: tl.constexpr):
    """Similarities of a run of anchors with a proxy, their labels, and which of them are its own, and others'."""
    i = start + tl.arange(0, N)
    exists = i < num_anchors
    label = tl.load(labels + i, mask=exists, other=-1).to(tl.int64)
    value = tl.load(scores + i, mask=exists, other=0.0)
    return i, exists, value, label, label == proxy, (label != -1) & (label != proxy)


@triton.jit
def _logsumexp(peaks, totals, scale):
    """From a peak and a sum of e^(scale · (value - peak)) per slot: the peak of all, their sum and its logarithm."""
    peak = tl.max(peaks, 0)
    some = peak > float("-inf")
    level = tl.where(some, peak, 0.0)
    total = tl.sum(totals.to(tl.float64) * tl.exp(scale * (peaks - level)).to(tl.float64), 0)
    total = tl.where(some, total, 1.0)
    return level, total, tl.where(some, tl.log(total), LOG_ZERO), some


@triton.jit(do_not_specialize=NUMBERS)
def _terms(scores, labels, terms, num_anchors, stride, num_proxies, scale, margin, BACK: tl.constexpr,
           N: tl.constexpr):  # fmt: skip
    """Both terms of a proxy, and in place of its similarities the derivatives; those of its own anchors are to be
    divided by the number of proxies that have one."""
    proxy = tl.program_id(0)
    scores += proxy.to(tl.int64) * stride
    own_peak = tl.full((N,), float("-inf"), tl.float32)  # of negated similarities
    own_total = tl.zeros((N,), tl.float32)
    other_peak = tl.full((N,), float("-inf"), tl.float32)
    other_total = tl.zeros((N,), tl.float32)
    taint = tl.zeros((N,), tl.float32)
    for start in range(0, num_anchors, N):
        i, exists, value, label, own, other = _entries(scores, labels, start, proxy, num_anchors, N)
        taint += value * 0.0 + tl.where((label < -1) | (label >= num_proxies), float("nan"), 0.0)
        peak = tl.maximum(own_peak, tl.where(own, -value, float("-inf")))
        level = tl.where(peak > float("-inf"), peak, 0.0)
        own_total = own_total * tl.exp(scale * (own_peak - level)) + tl.where(
            own, tl.exp(scale * (-value - level)), 0.0
        )
        own_peak = peak
        peak = tl.maximum(other_peak, tl.where(other, value, float("-inf")))
        level = tl.where(peak > float("-inf"), peak, 0.0)
        other_total = other_total * tl.exp(scale * (other_peak - level)) + tl.where(
            other, tl.exp(scale * (value - level)), 0.0
        )
        other_peak = peak
    own_level, own_total, own_log, present = _logsumexp(own_peak, own_total, scale)
    other_level, other_total, other_log, others = _logsumexp(other_peak, other_total, scale)
    wide = tl.full((), 0.0, tl.float64) + scale
    pull = own_log + wide * (own_level.to(tl.float64) + margin)
    push = other_log + wide * (other_level.to(tl.float64) + margin)
    tl.store(terms + PULL * num_proxies + proxy, tl.where(present, softplus(pull), 0.0) + tl.sum(taint, 0))
    tl.store(terms + PUSH * num_proxies + proxy, tl.where(others, softplus(push), 0.0))
    tl.store(terms + PRESENT * num_proxies + proxy, tl.where(present, 1.0, 0.0).to(tl.float64))
    if BACK:
        by_own = (-wide * sigmoid(pull) / own_total).to(tl.float32)
        by_other = (wide * sigmoid(push) / (other_total * num_proxies)).to(tl.float32)
        for start in range(0, num_anchors, N):
            i, exists, value, label, own, other = _entries(scores, labels, start, proxy, num_anchors, N)
            slope = tl.where(own, by_own * tl.exp(scale * (-value - own_level)), 0.0)
            slope = tl.where(other, by_other * tl.exp(scale * (value - other_level)), slope)
            tl.store(scores + i, slope, mask=exists)


@triton.jit(do_not_specialize=NUMBERS)
def _total(scores, labels, terms, facts, value, num_anchors, stride, num_proxies, BACK: tl.constexpr,
           N: tl.constexpr):  # fmt: skip
    """The loss; and the derivatives by the anchors' own proxies divided by the number of those that are present."""
    pulls = tl.zeros((N,), tl.float64)
    pushes = tl.zeros((N,), tl.float64)
    present = tl.zeros((N,), tl.float64)
    for start in range(0, num_proxies, N):
        c = start + tl.arange(0, N)
        pulls += tl.load(terms + PULL * num_proxies + c, mask=c < num_proxies, other=0.0)
        pushes += tl.load(terms + PUSH * num_proxies + c, mask=c < num_proxies, other=0.0)
        present += tl.load(terms + PRESENT * num_proxies + c, mask=c < num_proxies, other=0.0)
    number = tl.maximum(tl.sum(present, 0), 1.0)
    if tl.program_id(0) == 0:
        taints = tl.zeros((N,), tl.float64)
        for start in range(0, num_anchors, N):
            i = start + tl.arange(0, N)
            taints += tl.load(row_fact(facts, TAINT, stride) + i, mask=i < num_anchors, other=0.0)
        total = tl.sum(pulls, 0) / number + tl.sum(pushes, 0) / num_proxies + tl.sum(taints, 0)
        tl.store(value, total.to(tl.float32))
    if BACK:
        i = tl.program_id(0) * N + tl.arange(0, N)
        label = tl.load(labels + i, mask=i < num_anchors, other=-1).to(tl.int64)
        own = (label >= 0) & (label < num_proxies)
        at = scores + label * stride + i
        tl.store(at, (tl.load(at, mask=own, other=0.0) / number).to(tl.float32), mask=own)


def loss(scores, labels, facts, scale, margin, back):
    """The loss; `back`: the derivatives take the place of the similarities (C, B). facts: of `class_dense_kernels`."""
    num_proxies, num_anchors = scores.shape
    terms = torch.empty(3, num_proxies, device=scores.device, dtype=torch.float64)
    value = torch.empty((), device=scores.device, dtype=torch.float32)
    start_terms, start_total = _launchers(min(LONGEST, max(32, triton.next_power_of_2(num_anchors))), back)
    sizes = (num_anchors, padded(num_anchors), num_proxies)  # in the middle: the length of a line of scores, and facts
    start_terms((num_proxies, 1, 1), scores, labels, terms, *sizes, scale, margin)
    grid = (-(-num_anchors // SUMMED) if back else 1, 1, 1)
    start_total(grid, scores, labels, terms, facts, value, *sizes)
    return value


@functools.cache
def _launchers(width, back):
    warps = max(1, min(8, width // 256))
    terms = CachedLauncher(_terms, BACK=back, N=width, num_warps=warps, **options())
    return terms, CachedLauncher(_total, BACK=back, N=SUMMED, num_warps=8, **options())
