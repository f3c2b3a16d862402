# mypy: ignore-errors
"""The kernel of `proxy_anchor_ops` between its products: terms and derivatives of each proxy, and their sum."""

import functools

import torch

from nearkin.kernels.class_dense_kernels import (
    COUNT,
    TAINT,
    TILE,
    chunk,
    kind_of,
    options,
    padded,
    row_fact,
    step,
    tile,
)
from nearkin.kernels.launch import CachedLauncher
from nearkin.kernels.numerics import LOG_ZERO, sigmoid, softplus, tl, triton

NUMBERS = ("num_anchors", "num_proxies")  # not to be compiled for again
LONGEST = 4096  # anchors that a program has in registers
PER_WARP = 512  # anchors; with 256 the kernel took a quarter longer
PROGRAMS = 1056  # at the most, each with some of the proxies
SUMMED = 1024  # proxies, or anchors, at a time in the last sum
PULL, PUSH, PRESENT = (tl.constexpr(row) for row in range(3))  # rows of `terms`, float64, one entry per proxy


@triton.jit
def _products(units, rows, scores, first, num_proxies, num_anchors, by_proxy, by_anchor, dim, C: tl.constexpr,
              D: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    """The similarities of C proxies with all anchors, products of float64; stored, for all threads to read."""
    c = first + tl.arange(0, C)
    for start in range(0, num_anchors, STEP):
        i = start + tl.arange(0, STEP)
        total = tl.zeros((C, STEP), tl.float64)
        for d in range(0, dim, D):
            axis = d + tl.arange(0, D)
            left = tile(units, c, num_proxies, dim, axis, dim)
            total = tl.dot(left, tl.trans(tile(rows, i, num_anchors, dim, axis, dim)), total, out_dtype=tl.float64)
        at = c.to(tl.int64)[:, None] * by_proxy + i.to(tl.int64)[None, :] * by_anchor
        mask = (c < num_proxies)[:, None] & (i < num_anchors)[None, :]
        tl.store(scores + at, total.to(tl.float32), mask=mask)
    tl.debug_barrier()


@triton.jit
def _entries(line, labels, start, proxy, num_anchors, by_anchor, N: tl.constexpr):
    """Of a run of anchors: similarities with a proxy, negated where it is theirs; which are its own, and others'."""
    i = start + tl.arange(0, N)
    exists = i < num_anchors
    label = tl.load(labels + i, mask=exists, other=-1).to(tl.int32)
    value = tl.load(line + i * by_anchor, mask=exists, other=0.0)
    own = label == proxy
    return i, exists, tl.where(own, -value, value), own, (label != -1) & (label != proxy)


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
def _finish(scores, labels, terms, facts, value, num_anchors, width, num_proxies, by_proxy, by_anchor,
            BACK: tl.constexpr, S: tl.constexpr):  # fmt: skip
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
        label = tl.load(labels + i, mask=i < num_anchors, other=-1).to(tl.int64)
        taints += tl.load(row_fact(facts, TAINT, width) + i, mask=i < num_anchors, other=0.0)
        taints += tl.where((label < -1) | (label >= num_proxies), float("nan"), 0.0)
        if BACK:
            own = (label >= 0) & (label < num_proxies)
            at = scores + label * by_proxy + i.to(tl.int64) * by_anchor
            slope = tl.load(at, mask=own, other=0.0, cache_modifier=".cg")
            tl.store(at, (slope / number).to(tl.float32), mask=own)
    total = tl.sum(pulls, 0) / number + tl.sum(pushes, 0) / num_proxies + tl.sum(taints, 0)
    tl.store(value, total.to(tl.float32))


@triton.jit
def _store_terms(terms, proxy, num_proxies, own_peak, pull, push, taint):
    tl.store(terms + PULL * num_proxies + proxy, pull + taint)
    tl.store(terms + PUSH * num_proxies + proxy, push)
    tl.store(terms + PRESENT * num_proxies + proxy, tl.where(own_peak > float("-inf"), 1.0, 0.0).to(tl.float64))


@triton.jit
def _slopes(share, own, other, by_own, by_other, num_proxies):
    slope = share * tl.where(own, -by_own.to(tl.float32), (by_other / num_proxies).to(tl.float32))
    return tl.where(own | other, slope, 0.0)


@triton.jit
def _short(scores, labels, terms, first, last, hop, num_anchors, num_proxies, by_proxy, by_anchor, scale, margin,
           BACK: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """Both terms of proxies first, first + hop, …, and in place of their similarities the derivatives; all anchors at
    once, and those of the next proxy are loaded ahead."""
    i = tl.arange(0, N)
    exists = i < num_anchors
    label = tl.load(labels + i, mask=exists, other=-1).to(tl.int32)
    at = scores + i * by_anchor
    ahead = tl.cast(first, tl.int64)
    following = tl.load(at + ahead * by_proxy, mask=i < tl.where(ahead < last, num_anchors, 0), other=0.0)
    for proxy in range(first, last, hop):
        value = following
        ahead = tl.cast(proxy, tl.int64) + hop
        following = tl.load(at + ahead * by_proxy, mask=i < tl.where(ahead < last, num_anchors, 0), other=0.0)
        own = label == proxy
        other = (label != -1) & (label != proxy)
        entry = tl.where(own, -value, value)
        own_peaks, other_peaks = _peaks(entry, own, other)
        own_peak, other_peak = tl.max(own_peaks, 0), tl.max(other_peaks, 0)
        share = _share(entry, own, _level(own_peak), _level(other_peak), scale)
        pull, by_own = _term(own_peak, tl.sum(tl.where(own, share, 0.0), 0).to(tl.float64), scale, margin)
        push, by_other = _term(other_peak, tl.sum(tl.where(other, share, 0.0), 0).to(tl.float64), scale, margin)
        _store_terms(terms, proxy, num_proxies, own_peak, pull, push, tl.sum(value * 0.0, 0))
        if BACK:
            slope = _slopes(share, own, other, by_own, by_other, num_proxies)
            tl.store(at + tl.cast(proxy, tl.int64) * by_proxy, slope, mask=exists)


@triton.jit
def _long(scores, labels, terms, first, last, hop, num_anchors, num_proxies, by_proxy, by_anchor, scale, margin,
          BACK: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """The same for more anchors than a program has in registers."""
    for proxy in range(first, last, hop):
        line = scores + tl.cast(proxy, tl.int64) * by_proxy
        own_peaks = tl.full((N,), float("-inf"), tl.float32)
        other_peaks = own_peaks
        taint = tl.zeros((N,), tl.float32)
        for start in range(0, num_anchors, N):
            i, exists, entry, own, other = _entries(line, labels, start, proxy, num_anchors, by_anchor, N)
            taint += entry * 0.0
            run_own, run_other = _peaks(entry, own, other)
            own_peaks, other_peaks = tl.maximum(own_peaks, run_own), tl.maximum(other_peaks, run_other)
        own_peak, other_peak = tl.max(own_peaks, 0), tl.max(other_peaks, 0)
        own_total = tl.zeros((N,), tl.float32)
        other_total = tl.zeros((N,), tl.float32)
        for start in range(0, num_anchors, N):
            i, exists, entry, own, other = _entries(line, labels, start, proxy, num_anchors, by_anchor, N)
            share = _share(entry, own, _level(own_peak), _level(other_peak), scale)
            own_total += tl.where(own, share, 0.0)
            other_total += tl.where(other, share, 0.0)
        pull, by_own = _term(own_peak, tl.sum(own_total.to(tl.float64), 0), scale, margin)
        push, by_other = _term(other_peak, tl.sum(other_total.to(tl.float64), 0), scale, margin)
        _store_terms(terms, proxy, num_proxies, own_peak, pull, push, tl.sum(taint, 0))
        if BACK:
            for start in range(0, num_anchors, N):
                i, exists, entry, own, other = _entries(line, labels, start, proxy, num_anchors, by_anchor, N)
                share = _share(entry, own, _level(own_peak), _level(other_peak), scale)
                slope = _slopes(share, own, other, by_own, by_other, num_proxies)
                tl.store(line + i * by_anchor, slope, mask=exists)


@triton.jit(do_not_specialize=NUMBERS)
def _settle(units, rows, scores, labels, terms, facts, value, num_anchors, num_proxies, width, by_proxy, by_anchor, dim,
            scale, margin, BACK: tl.constexpr, ONE: tl.constexpr, PRODUCT: tl.constexpr, N: tl.constexpr,
            S: tl.constexpr, C: tl.constexpr, D: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    """Terms and derivatives of some proxies; the program that is done last sums. ONE: a run has all anchors; PRODUCT:
    the similarities are still to be computed, by each program those of C proxies."""
    first = tl.program_id(0)
    last = num_proxies
    hop = tl.num_programs(0)
    if PRODUCT:
        first = first * C
        last = tl.minimum(first + C, num_proxies)
        hop = 1
        _products(units, rows, scores, first, num_proxies, num_anchors, by_proxy, by_anchor, dim, C, D, STEP)
    if ONE:
        _short(scores, labels, terms, first, last, hop, num_anchors, num_proxies, by_proxy, by_anchor, scale, margin,
               BACK, N)  # fmt: skip
    else:
        _long(scores, labels, terms, first, last, hop, num_anchors, num_proxies, by_proxy, by_anchor, scale, margin,
              BACK, N)  # fmt: skip
    tl.debug_barrier()  # all threads have stored
    if tl.atomic_add(facts + COUNT, 1.0, sem="acq_rel") == tl.num_programs(0) - 1:
        _finish(scores, labels, terms, facts, value, num_anchors, width, num_proxies, by_proxy, by_anchor, BACK, S)


def loss(prepared, scores, labels, scale, margin, back, product):
    """The loss; `back`: the derivatives take the place of the similarities (B, C). product: these are still missing."""
    rows, units, facts = prepared[:3]
    (num_anchors, dim), num_proxies = rows.shape, units.shape[0]
    terms = torch.empty(3 * num_proxies, device=scores.device, dtype=torch.float64)
    value = torch.empty((), device=scores.device, dtype=torch.float32)
    programs = -(-num_proxies // TILE) if product else min(num_proxies, PROGRAMS)
    run = min(LONGEST, max(32, 1 << (num_anchors - 1).bit_length()))
    by_anchor, by_proxy = scores.stride()
    _settling(run, num_anchors <= LONGEST, back, product, chunk(dim))(
        (programs, 1, 1),
        units, rows, scores, labels, terms, facts, value, num_anchors, num_proxies, padded(num_anchors), by_proxy,
        by_anchor, dim, scale, margin, key=(dim, rows.get_device(), kind_of(labels)))  # fmt: skip
    return value


@functools.cache
def _settling(run, one, back, product, dims):
    choices = {"BACK": back, "ONE": one, "PRODUCT": product, "N": run, "S": SUMMED}
    choices |= {"C": TILE, "D": dims, "STEP": step(dims)}
    return CachedLauncher(_settle, **choices, num_warps=max(4, min(16, run // PER_WARP)), **options())
