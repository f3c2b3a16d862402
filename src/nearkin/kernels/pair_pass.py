# mypy: ignore-errors
"""One pass for all pair losses: what a loss adds to it are the functions of its link (`links/`)."""

import functools

import torch
import triton
import triton.language as tl

from nearkin import kernels
from nearkin.kernels import pair_kernels, row_kernels
from nearkin.kernels.launch import CachedLauncher
from nearkin.kernels.links import supcon
from nearkin.kernels.pair_kernels import SCALES, _inner, _measured, _rows
from nearkin.kernels.row_kernels import SQUARED, class_ids, dots, fact, kinship, whole_gradient

LINKS = {"supcon": supcon}
STATISTICS = pair_kernels.STATISTICS
SAVED = tl.constexpr(4)
FIRST = tl.constexpr(6)


@triton.jit
def _load(stats, i, there, number, AXIS: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """COUNT rows of statistics from FIRST on, as a tuple, along AXIS of a tile."""
    rows = ()
    for k in tl.static_range(COUNT):
        row = tl.load(stats + (FIRST + k) * number + i, mask=there, other=0.0)
        rows = rows + (tl.expand_dims(row, AXIS),)
    return rows


@triton.jit
def _forward(a, b, stats, number, others, dim, p, q, u, s, INIT: tl.constexpr, ADD: tl.constexpr, CLOSE: tl.constexpr,
             SELF: tl.constexpr, ACTIVE: tl.constexpr, EUCLID: tl.constexpr, ROOT: tl.constexpr, PAD: tl.constexpr,
             K: tl.constexpr, ONCE: tl.constexpr, M: tl.constexpr, N: tl.constexpr):  # fmt: skip
    i = tl.program_id(0) * M + tl.arange(0, M)
    there = i < number
    own = class_ids(a, i, there, number, PAD)
    left = fact(a, SQUARED, i, there, number, PAD)
    safe = tl.minimum(i, number - 1)
    mine = 0.0
    if ONCE:
        mine = _rows(a, safe, tl.arange(0, PAD), PAD, PAD)
    settings = (p, q, u, s)
    state = INIT(M, N)
    for start in range(0, others, N):
        j = start + tl.arange(0, N)
        real = j < others
        positive, negative = kinship(own, class_ids(b, j, real, others, PAD), i, j, there, real, SELF)
        inner = _inner(a, b, mine, safe, tl.minimum(j, others - 1), PAD, K, ONCE)
        right = fact(b, SQUARED, j, real, others, PAD)
        value = _measured(inner, left, right, i, j, dim, EUCLID, ROOT, SELF)
        state = ADD(state, value, positive, negative, settings)
    rows = CLOSE(state, settings, ACTIVE)
    for k in tl.static_range(len(rows)):
        place = k if k < 3 else k + 3
        tl.store(stats + place * number + i, rows[k].to(tl.float32), mask=there)


@triton.jit
def _backward(x, a, b, stats, column, upstream, by_x, number, others, dim, p, q, u, s, SLOPE: tl.constexpr,
              ROLE: tl.constexpr, EUCLID: tl.constexpr, ROOT: tl.constexpr, NORMALIZE: tl.constexpr,
              ENTER: tl.constexpr, WHOLE: tl.constexpr, PAD: tl.constexpr, K: tl.constexpr, ONCE: tl.constexpr,
              M: tl.constexpr, N: tl.constexpr, D: tl.constexpr):  # fmt: skip
    i = tl.program_id(0) * M + tl.arange(0, M)
    there = i < number
    axis = tl.program_id(1) * D + tl.arange(0, D)
    own = class_ids(a, i, there, number, PAD)
    left = fact(a, SQUARED, i, there, number, PAD)
    safe = tl.minimum(i, number - 1)
    mine = _rows(a, safe, axis, PAD, D)
    scales = column + SCALES * others if ROLE == "references" else stats + SCALES * number
    scale = tl.load(upstream).to(tl.float32) * tl.load(scales)
    SELF: tl.constexpr = ROLE == "self"
    settings = (p, q, u, s)
    if ROLE != "references":
        anchors = _load(stats, i, there, number, 1, FIRST, SAVED)
    gradient = tl.zeros((M, D), tl.float64)
    weight = tl.zeros((M, N), tl.float64)
    for start in range(0, others, N):
        j = start + tl.arange(0, N)
        real = j < others
        positive, negative = kinship(own, class_ids(b, j, real, others, PAD), i, j, there, real, SELF)
        passing = tl.minimum(j, others - 1)
        rows = _rows(b, passing, axis, PAD, D)
        if ONCE:
            inner = tl.dot(mine, tl.trans(rows), out_dtype=tl.float64)
        else:
            inner = dots(a, b, safe, passing, PAD, K)
        right = fact(b, SQUARED, j, real, others, PAD)
        value = _measured(inner, left, right, i, j, dim, EUCLID, ROOT, SELF)
        if ROLE != "references":
            slope = SLOPE(value, positive, negative, anchors, settings, scale)
        if ROLE != "anchors":
            passers = _load(column, j, real, others, 0, FIRST, SAVED)
            back = SLOPE(value, positive, negative, passers, settings, scale)
            slope = slope + back if SELF else back
        if EUCLID:
            if ROOT:
                slope = slope / tl.where(value > 0, value, 1.0)
            else:
                slope = 2.0 * slope
            slope = tl.where(value > 0, slope, 0.0)
        slope = slope.to(tl.float64)
        if EUCLID and not NORMALIZE:
            weight += slope
        gradient = tl.dot(slope, rows, gradient, out_dtype=tl.float64)
    if not ONCE:
        mine = _rows(a, safe, axis, PAD, D)
    if EUCLID:
        gradient = tl.sum(weight, 1)[:, None] * mine - gradient
    if WHOLE:
        whole_gradient(x, a, by_x, gradient, i, there, axis, number, dim, PAD, ENTER, NORMALIZE)
    else:
        out = i.to(tl.int64)[:, None] * dim + axis[None, :]
        tl.store(by_x + out, gradient, mask=there[:, None] & (axis < dim)[None, :])


def _options(stage, kind, flag, number, dim):
    shape, way = pair_kernels._way(stage, kind, flag, number, dim)
    way = {name: choice for name, choice in way.items() if name not in ("KIND", "FLAG")}
    return shape, way | {"ROOT": True}


@functools.cache
def _passes(kind, flag, number, dim, alone, reduction):
    shape, way = _options("forward", kind, flag, number, dim)
    link, more = LINKS[kind], row_kernels.options()
    functions = {"INIT": link.init, "ADD": link.add, "CLOSE": link.close}
    return (
        shape.rows,
        CachedLauncher(_forward, SELF=alone, ACTIVE=reduction == "active", **functions, **way),
        CachedLauncher(pair_kernels._finish, KIND=kind, SELF=alone, PAD=way["PAD"], REDUCTION=reduction, N=1024, **more),
    )


def forward(kind, own, other, sizes, beta, settings, flag, reduction):
    number, others, dim = sizes
    stats = torch.empty(pair_kernels.STATISTICS * number + 2, device=own.device, dtype=torch.float32)
    value = torch.empty((), device=own.device, dtype=torch.float32)
    rows, start, finish = _passes(kind, flag, number, dim, own is other, reduction)
    start((-(-number // rows), 1, 1), own, other, stats, number, others, dim, *settings)
    finish((1, 1, 1), own, other, stats, value, number, others, settings[3])
    return value, stats, stats


@functools.cache
def _last_pass(kind, flag, number, dim, role, normalize, enter):
    shape, way = _options("backward", kind, flag, number, dim)
    given = {"ROLE": role, "NORMALIZE": normalize, "ENTER": enter, "WHOLE": dim <= way["D"]}
    return shape, way["D"], CachedLauncher(_backward, SLOPE=LINKS[kind].slope, **given, **way)


def backward(kind, role, x, own, stats, other, column, others, upstream, by_beta, settings, flag, normalize, enter):
    number, dim = x.shape
    shape, chunk, start = _last_pass(kind, flag, number, dim, role, normalize, enter)
    whole = dim <= chunk
    by_x = torch.empty_like(x, dtype=torch.float32 if kernels.interpreted() else x.dtype)
    out = by_x if whole else torch.empty_like(x, dtype=torch.float64)
    grid = (-(-number // shape.rows), -(-dim // chunk), 1)
    start(grid, x, own, other, stats, column, upstream, out, number, others, dim, *settings)
    if not whole:
        row_kernels.long_gradient(x, own, out, by_x, normalize, enter)
    return by_x if by_x.dtype == x.dtype else by_x.to(x.dtype)
