# mypy: ignore-errors
"""The kernels of `center_ops` around its products: clamped operands, gradients, and the step of the centres."""

import functools

import torch

from nearkin import kernels
from nearkin.kernels.class_dense_kernels import (
    COUNT,
    COUNTED,
    GAIN,
    ROW_FACTS,
    SCALARS,
    SLOPE,
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
from nearkin.kernels.class_own_kernels import BOUND
from nearkin.kernels.launch import CachedLauncher
from nearkin.kernels.numerics import tl, triton

NUMBERS = ("num_rows", "classes", "anchor_programs")  # not to be compiled for again
ROWS = 4  # per program
COLUMNS = 8  # classes per program: as many derivatives are 32 bytes, which are read at once
SUMMED = 256  # anchors at a time in the gradient by a bias
BESIDE = 32  # anchors at a time in the step of a centre


@triton.jit
def clamped(x):
    """Coordinates in float32, clamped so that no square overflows; NaN stays NaN."""
    x = x.to(tl.float32)
    return tl.where(x != x, x, tl.minimum(tl.maximum(x, -BOUND), BOUND))


@triton.jit(do_not_specialize=NUMBERS)
def _operands(x, weight, labels, centers, rows, weight_rows, facts, num_rows, width, classes, dim, pull,
              M: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """Clamped rows, NaN where a class is not finite; and the pull of each anchor's centre in place of the slope."""
    first = tl.cdiv(num_rows, M)
    program = tl.program_id(0)
    if program < first:
        if program == 0:
            tl.store(facts + COUNT, 0.0)
        i = program * M + tl.arange(0, M)
        mask_m = i < num_rows
        at = i.to(tl.int64)[:, None] * dim
        label = tl.load(labels + i, mask=mask_m, other=0).to(tl.int64)
        own = tl.minimum(tl.maximum(label, 0), classes - 1)[:, None] * dim
        taints = tl.zeros((M,), tl.float32)
        squared = tl.zeros((M,), tl.float64)
        for start in range(0, dim, D):
            d = start + tl.arange(0, D)
            mask = mask_m[:, None] & (d < dim)[None, :]
            value = tl.load(x + at + d[None, :], mask=mask, other=0.0).to(tl.float32)
            taints += tl.sum(value * 0.0, 1)
            value = clamped(value)
            tl.store(rows + at + d[None, :], value, mask=mask)
            away = value - tl.load(centers + own + d[None, :], mask=mask, other=0.0).to(tl.float32)
            squared += tl.sum(away.to(tl.float64) * away, 1)
        tl.store(row_fact(facts, SLOPE, width) + i, squared * (pull * 0.5), mask=mask_m)
        tl.store(row_fact(facts, TAINT, width) + i, taints.to(tl.float64), mask=mask_m)
    else:
        c = (program - first) * M + tl.arange(0, M)
        mask_c = c < classes
        at = c.to(tl.int64)[:, None] * dim
        for start in range(0, dim, D):
            d = start + tl.arange(0, D)
            mask = mask_c[:, None] & (d < dim)[None, :]
            value = tl.load(weight + at + d[None, :], mask=mask, other=0.0).to(tl.float32)
            tl.store(weight_rows + at + d[None, :], clamped(value) + value * 0.0, mask=mask)


@triton.jit
def _by_anchors(by_rows, weight_rows, slopes, x, labels, centers, facts, by_x, up, program, num_rows, width, stride,
                classes, dim, pull, PRODUCT: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
                STEP: tl.constexpr):  # fmt: skip
    i = program * M + tl.arange(0, M)
    mask_m = i < num_rows
    at = i.to(tl.int64)[:, None] * dim
    label = tl.load(labels + i, mask=mask_m, other=0).to(tl.int64)
    own = tl.minimum(tl.maximum(label, 0), classes - 1)[:, None] * dim
    counted = tl.load(row_fact(facts, COUNTED, width) + i, mask=mask_m, other=0.0) > 0
    for start in range(0, dim, D):
        d = start + tl.arange(0, D)
        mask = mask_m[:, None] & (d < dim)[None, :]
        value = tl.load(x + at + d[None, :], mask=mask, other=0.0).to(tl.float32)
        away = clamped(value) - tl.load(centers + own + d[None, :], mask=mask, other=0.0).to(tl.float32)
        if PRODUCT:
            total = tl.zeros((M, D), tl.float64)
            for c0 in range(0, classes, STEP):
                c = c0 + tl.arange(0, STEP)
                left = tile(slopes, i, num_rows, stride, c, classes)
                total = tl.dot(left, tile(weight_rows, c, classes, dim, d, dim), total, out_dtype=tl.float64)
            slope = total.to(tl.float32)
        else:
            slope = tl.load(by_rows + at + d[None, :], mask=mask, other=0.0)
        slope += tl.where(counted[:, None], pull * away, 0.0)
        slope = tl.where((value <= BOUND) & (value >= -BOUND), slope * up, 0.0)
        tl.store(by_x + at + d[None, :], slope.to(by_x.dtype.element_ty), mask=mask)


@triton.jit
def _by_classes(by_weight_rows, rows, slopes, weight, by_weight, by_bias, up, program, num_rows, stride, classes, dim,
                OF_WEIGHT: tl.constexpr, OF_BIAS: tl.constexpr, PRODUCT: tl.constexpr, C: tl.constexpr,
                D: tl.constexpr, S: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    c = program * C + tl.arange(0, C)
    mask_c = c < classes
    at = c.to(tl.int64)[:, None] * dim
    if OF_BIAS:
        sums = tl.zeros((S, C), tl.float32)
        for start in range(0, num_rows, S):
            j = start + tl.arange(0, S)
            here = slopes + j.to(tl.int64)[:, None] * stride + c[None, :]
            sums += tl.load(here, mask=(j < num_rows)[:, None] & mask_c[None, :], other=0.0)
        tl.store(by_bias + c, (tl.sum(sums, 0) * up).to(by_bias.dtype.element_ty), mask=mask_c)
    if OF_WEIGHT:
        for start in range(0, dim, D):
            d = start + tl.arange(0, D)
            mask = mask_c[:, None] & (d < dim)[None, :]
            value = tl.load(weight + at + d[None, :], mask=mask, other=0.0).to(tl.float32)
            if PRODUCT:
                total = tl.zeros((C, D), tl.float64)
                for i0 in range(0, num_rows, STEP):
                    i = i0 + tl.arange(0, STEP)
                    left = tl.trans(tile(slopes, i, num_rows, stride, c, classes))
                    total = tl.dot(left, tile(rows, i, num_rows, dim, d, dim), total, out_dtype=tl.float64)
                slope = total.to(tl.float32) * up
            else:
                slope = tl.load(by_weight_rows + at + d[None, :], mask=mask, other=0.0) * up
            slope = tl.where((value <= BOUND) & (value >= -BOUND), slope, 0.0)
            tl.store(by_weight + at + d[None, :], slope.to(by_weight.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=NUMBERS)
def _gradients(by_rows, by_weight_rows, slopes, x, weight, labels, centers, facts, upstream, by_x, by_weight, by_bias,
               num_rows, width, stride, classes, dim, pull, anchor_programs, OF_WEIGHT: tl.constexpr,
               OF_BIAS: tl.constexpr, PRODUCT: tl.constexpr, M: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
               S: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    """The gradients by embeddings, class weights and biases from those by the operands. A clamped coordinate has none.
    anchor_programs: the programs over anchors, 0 where their gradient is not wanted. PRODUCT: instead of the gradients
    by the operands, the operands themselves."""
    up = (tl.load(facts + GAIN) * tl.load(upstream)).to(tl.float32)
    program = tl.program_id(0)
    if program < anchor_programs:
        _by_anchors(by_rows, by_weight_rows, slopes, x, labels, centers, facts, by_x, up, program, num_rows, width,
                    stride, classes, dim, pull, PRODUCT, M, D, STEP)  # fmt: skip
    else:
        _by_classes(by_weight_rows, by_rows, slopes, weight, by_weight, by_bias, up, program - anchor_programs,
                    num_rows, stride, classes, dim, OF_WEIGHT, OF_BIAS, PRODUCT, C, D, S, STEP)  # fmt: skip


@triton.jit(do_not_specialize=NUMBERS)
def _step(x, labels, centers, moved, num_rows, classes, dim, alpha, M: tl.constexpr, N: tl.constexpr,
          D: tl.constexpr):  # fmt: skip
    """The step of a centre, by the first anchor of its class, over all of them in the batch's order."""
    i = tl.program_id(0)
    label = tl.load(labels + i).to(tl.int64)
    before = tl.zeros((M,), tl.int32)
    for start in range(0, i, M):
        j = start + tl.arange(0, M)
        before += ((tl.load(labels + j, mask=j < i, other=-1).to(tl.int64) == label) & (j < i)).to(tl.int32)
    if (label >= 0) & (label < classes) & (tl.sum(before, 0) == 0):
        for low in range(0, dim, D):
            axis = low + tl.arange(0, D)
            center = tl.load(centers + label * dim + axis, mask=axis < dim, other=0.0)
            step = tl.zeros((D,), tl.float32)
            number = tl.zeros((), tl.float32)
            for start in range(i, num_rows, N):
                j = start + tl.arange(0, N)
                same = (tl.load(labels + j, mask=j < num_rows, other=-1).to(tl.int64) == label) & (j < num_rows)
                if tl.sum(same.to(tl.int32), 0) > 0:
                    taint = tl.zeros((N,), tl.float32)
                    for d0 in range(0, dim, D):
                        d = d0 + tl.arange(0, D)
                        mask = same[:, None] & (d < dim)[None, :]
                        at = x + j.to(tl.int64)[:, None] * dim + d[None, :]
                        taint += tl.sum(tl.load(at, mask=mask, other=0.0).to(tl.float32) * 0.0, 1)
                    counts = same & (taint == 0.0)
                    mask = counts[:, None] & (axis < dim)[None, :]
                    at = x + j.to(tl.int64)[:, None] * dim + axis[None, :]
                    value = clamped(tl.load(at, mask=mask, other=0.0))
                    step += tl.sum(tl.where(mask, value - center[None, :], 0.0), 0)
                    number += tl.sum(counts.to(tl.float32), 0)
            tl.store(moved + label * dim + axis, center + alpha * step / (1.0 + number), mask=axis < dim)


def operands(x, weight, labels, centers, pull):
    """Rows (B, D) and (C, D) for the products, and the facts that `soft_triple_kernels.loss` reads."""
    (num_rows, dim), classes = x.shape, weight.shape[0]
    rows = torch.empty(num_rows, dim, device=x.device, dtype=torch.float32)
    weight_rows = torch.empty(classes, dim, device=x.device, dtype=torch.float32)
    width = padded(num_rows)
    facts = torch.empty(SCALARS.value + ROW_FACTS.value * width, device=x.device, dtype=torch.float64)
    written = (rows, weight_rows, facts)
    grid = (-(-num_rows // ROWS) + -(-classes // ROWS), 1, 1)
    read = (x, weight, labels, centers)
    key = (dim, x.get_device(), *map(kind_of, read))
    _preparing(_width(dim))(grid, *read, *written, num_rows, width, classes, dim, pull, key=key)
    return written


def gradients(by_rows, by_weight_rows, slopes, x, weight, labels, centers, facts, upstream, kinds, pull, product):
    """The gradients by embeddings, class weights and biases, each in its type of `kinds`, or None without one.

    From the gradients by the operands (B, D) and (C, D); product: from the operands.
    """
    (num_rows, dim), classes = x.shape, weight.shape[0]
    shapes = (x.shape, weight.shape, (classes,))
    stored = kinds if not kernels.interpreted() else [kind and torch.float32 for kind in kinds]  # it truncates bfloat16
    outs = [
        None if kind is None else torch.empty(shape, device=x.device, dtype=kind)
        for shape, kind in zip(shapes, stored, strict=True)
    ]
    of_x, of_weight, of_bias = (out is not None for out in outs)
    rows, columns = (TILE, TILE) if product else (ROWS, COLUMNS)
    anchor_programs = -(-num_rows // rows) if of_x else 0
    programs = anchor_programs + (-(-classes // columns) if of_weight or of_bias else 0)
    written = [facts if out is None else out for out in outs]
    sizes = (num_rows, padded(num_rows), slopes.stride(0), classes, dim, pull, anchor_programs)
    read = (x, weight, labels, centers)
    key = (dim, x.get_device(), *map(kind_of, read), kind_of(upstream), *kinds)
    _finishing(chunk(dim) if product else _width(dim), rows, columns, of_weight, of_bias, product)(
        (programs, 1, 1), by_rows, by_weight_rows, slopes, *read, facts, upstream, *written, *sizes, key=key
    )
    return [None if out is None else out.to(kind) for out, kind in zip(outs, kinds, strict=True)]


def stepped(x, labels, centers, alpha):
    """The centres after one step."""
    num_rows, dim = x.shape
    moved = centers.clone()
    _stepping(_width(dim))((num_rows, 1, 1), x, labels, centers, moved, num_rows, centers.shape[0], dim, alpha)
    return moved


@functools.cache
def _preparing(width):
    return CachedLauncher(_operands, M=ROWS, D=width, **options())


@functools.cache
def _finishing(width, rows, columns, of_weight, of_bias, product):
    sizes = {
        "M": rows,
        "C": columns,
        "D": width,
        "S": 64 if product else SUMMED,
        "STEP": step(width),
        "PRODUCT": product,
    }
    return CachedLauncher(
        _gradients,
        OF_WEIGHT=of_weight,
        OF_BIAS=of_bias,
        **sizes,
        num_warps=8 if product else 4,
        num_stages=2,
        **options(),
    )


def _width(dim):
    return min(128, max(16, 1 << (dim - 1).bit_length()))


@functools.cache
def _stepping(width):
    return CachedLauncher(_step, M=1024, N=BESIDE, D=width, num_warps=4, **options())
