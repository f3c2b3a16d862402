# mypy: ignore-errors
"""The kernels of `class_loss_ops` over anchors alone: own class and margin, value, sum, and the gradient by anchors.

They share two buffers, whose rows have one entry per anchor. Rows of `facts`, float64: the logit of the own class
(later the term), its slope by the plain score, its slope by the anchor's length, 0 or NaN, the ratio of `rows` to x,
the factor from products to scores, whether the anchor counts, 1 / |x|. Rows of `stats`, float32, as in `class_kernels`:
the factor times log2 e, the level, and the derivatives by the others' scores, by the own one and by the length.
"""

import torch

from nearkin.kernels.class_kernels import INTERPRETS, _blocks, _options, start_kernel
from nearkin.kernels.class_own_kernels import SHORT, clamped, own_cosine, own_score
from nearkin.kernels.numerics import sigmoid, softplus, tl, triton

FACTS, STATS = 8, 5
TARGET, SLOPE, LENGTH_SLOPE, TAINT, POWER, FACTOR, COUNTED, INVERSE = map(tl.constexpr, range(FACTS))  # of `facts`
STAT_FACTOR, LEVEL, PULL, PUSH, BY_LENGTH = map(tl.constexpr, range(STATS))  # of `stats`
ROWS = 4  # anchors per program that prepares rows or makes their gradient
SETTLED = 16  # anchors per program of the cross-entropy
SUMMED = 1024  # anchors at a time in the last sum
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _prepare(x, weight, labels, scale_tensor, rows, own_classes, facts, stats, num_rows, width, dim, classes, scale,
             margin, along, across, lost, SCALE_TENSOR: tl.constexpr, MARGIN: tl.constexpr, STRAIGHT: tl.constexpr,
             TIMES: tl.constexpr, HALF: tl.constexpr, CENTERS: tl.constexpr, M: tl.constexpr,
             D: tl.constexpr):  # fmt: skip
    """Rows for the products, own classes, and the logits of these with their slopes."""
    i = tl.program_id(0) * M + tl.arange(0, M)
    mask_m = i < num_rows
    at = i.to(tl.int64)[:, None] * dim
    label = tl.load(labels + i, mask=mask_m, other=-1).to(tl.int64)
    own = tl.minimum(tl.maximum(label, 0), classes - 1)
    squared = tl.zeros((M,), tl.float64)
    taints = tl.where((label < -1) | (label >= classes), float("nan"), 0.0).to(tl.float64)
    for start in range(0, dim, D):
        axis = start + tl.arange(0, D)
        value = tl.load(x + at + axis[None, :], mask=mask_m[:, None] & (axis < dim)[None, :], other=0.0).to(tl.float64)
        taints += tl.sum(value * 0.0, 1)
        value = clamped(value)
        squared += tl.sum(value * value, 1)
    has_direction = squared > SHORT
    some = squared > 0
    length = tl.sqrt(tl.where(some, squared, 1.0))
    inverse = tl.where(has_direction, 1.0 / length, 0.0)
    exponent = (length.to(tl.int64, bitcast=True) >> 52) - 1023
    scale_value = tl.full((), 0.0, tl.float64) + scale
    if SCALE_TENSOR:
        scale_value = tl.load(scale_tensor).to(tl.float64)
    power = ((1023 - exponent) << 52).to(tl.float64, bitcast=True)  # brings the row to a length from 1 to 2
    factor = 1.0 / power
    if HALF:  # a power of two rounds nothing
        if MARGIN != "sphere":
            factor = scale_value / tl.where(has_direction, length * power, 1.0)
    else:  # each coordinate is rounded by itself, and the factor in `stats` not at all
        power = power / LN2
        factor = factor * LN2
        if MARGIN != "sphere":
            power = scale_value * inverse / LN2
            factor = inverse * 0.0 + LN2
    for start in range(0, dim, D):
        axis = start + tl.arange(0, D)
        mask = mask_m[:, None] & (axis < dim)[None, :]
        value = clamped(tl.load(x + at + axis[None, :], mask=mask, other=0.0)) * power[:, None]
        tl.store(rows + at + axis[None, :], value.to(tl.float32).to(rows.dtype.element_ty), mask=mask)
    pick, cos, inverse_own, own_taints = own_cosine(x, weight, at, own, inverse, mask_m, dim, CENTERS, M, D)
    taints += own_taints
    third, fourth = across, lost
    if MARGIN == "adaptive":  # the tensor has mean and deviation of the lengths
        third, fourth = tl.load(scale_tensor).to(tl.float64), tl.load(scale_tensor + 1).to(tl.float64)
    target, slope, by_length = own_score(
        x, weight, at, pick, cos, inverse, inverse_own, tl.where(some, length, 0.0), scale_value, margin, along, third,
        fourth, mask_m, dim, MARGIN, STRAIGHT, TIMES, M, D)  # fmt: skip
    tl.store(own_classes + i, own.to(tl.int32), mask=mask_m)
    tl.store(own_classes + width + i, pick.to(tl.int32), mask=mask_m)
    tl.store(facts + TARGET * width + i, target, mask=mask_m)
    tl.store(facts + SLOPE * width + i, slope, mask=mask_m)
    tl.store(facts + LENGTH_SLOPE * width + i, by_length, mask=mask_m)
    tl.store(facts + TAINT * width + i, taints, mask=mask_m)
    tl.store(facts + POWER * width + i, power, mask=mask_m)
    tl.store(facts + FACTOR * width + i, factor, mask=mask_m)
    tl.store(facts + COUNTED * width + i, tl.where(label != -1, 1.0, 0.0), mask=mask_m)
    tl.store(facts + INVERSE * width + i, inverse, mask=mask_m)
    tl.store(stats + STAT_FACTOR * width + i, (factor / LN2).to(tl.float32), mask=mask_m)


@triton.jit
def _settle(peaks, sums, facts, stats, num_rows, width, parts, classes, NEEDS_OTHERS: tl.constexpr, SOFT: tl.constexpr,
            ACTIVE: tl.constexpr, M: tl.constexpr, S: tl.constexpr):  # fmt: skip
    """Cross-entropies from partial peaks and sums, and the derivatives. NEEDS_OTHERS: only if there are other classes;
    SOFT: the own class is in the sum too."""
    i = tl.program_id(0) * M + tl.arange(0, M)
    mask_m = i < num_rows
    peak = tl.full((M,), float("-inf"), tl.float32)
    for start in range(0, parts, S):
        s = start + tl.arange(0, S)
        mask = (s < parts)[:, None] & mask_m[None, :]
        partial_peaks = tl.load(peaks + s.to(tl.int64)[:, None] * num_rows + i[None, :], mask=mask, other=float("-inf"))
        peak = tl.maximum(peak, tl.max(partial_peaks, 0))
    level = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.zeros((M,), tl.float64)
    for start in range(0, parts, S):
        s = start + tl.arange(0, S)
        mask = (s < parts)[:, None] & mask_m[None, :]
        at_part = s.to(tl.int64)[:, None] * num_rows + i[None, :]
        partial_peaks = tl.load(peaks + at_part, mask=mask, other=float("-inf"))
        each = tl.load(sums + at_part, mask=mask, other=0.0) * tl.exp2(partial_peaks - level[None, :])
        total += tl.sum(each.to(tl.float64), 0)
    target = tl.load(facts + TARGET * width + i, mask=mask_m, other=0.0)
    factor = tl.load(facts + FACTOR * width + i, mask=mask_m, other=0.0)
    counts = tl.load(facts + COUNTED * width + i, mask=mask_m, other=0.0) > 0
    others = total > 0
    log = (level.to(tl.float64) + tl.log2(tl.where(others, total, 1.0))) * LN2 - target
    if SOFT:
        value = tl.where(others, softplus(log), 0.0)
        share = tl.where(others, sigmoid(log), 0.0)
    else:
        value = log
        share = tl.where(others, 1.0, 0.0)
    if NEEDS_OTHERS:
        counts = counts & (classes > 1)
    if ACTIVE:
        counts = counts & ((value > 0) | (value != value))
    taint = tl.load(facts + TAINT * width + i, mask=mask_m, other=0.0) + (total + target) * 0.0
    share = tl.where(counts, share, 0.0)
    tl.store(facts + TARGET * width + i, tl.where(counts, value, 0.0), mask=mask_m)
    tl.store(facts + TAINT * width + i, taint, mask=mask_m)
    tl.store(facts + COUNTED * width + i, tl.where(counts, 1.0, 0.0), mask=mask_m)
    pull = share / tl.where(others, total, 1.0) * factor
    push = -share * tl.load(facts + SLOPE * width + i, mask=mask_m, other=0.0) * factor
    by_length = -share * tl.load(facts + LENGTH_SLOPE * width + i, mask=mask_m, other=0.0)
    tl.store(stats + LEVEL * width + i, level, mask=mask_m)
    tl.store(stats + PULL * width + i, pull.to(tl.float32), mask=mask_m)
    tl.store(stats + PUSH * width + i, push.to(tl.float32), mask=mask_m)
    tl.store(stats + BY_LENGTH * width + i, by_length.to(tl.float32), mask=mask_m)


@triton.jit
def _sum(facts, value, gain, num_rows, width, MEAN: tl.constexpr, N: tl.constexpr):
    """The loss, and the factor of every derivative. One program: the same sum every time."""
    total = tl.zeros((N,), tl.float64)
    counted = tl.zeros((N,), tl.float64)
    for start in range(0, num_rows, N):
        i = start + tl.arange(0, N)
        mask_m = i < num_rows
        total += tl.load(facts + TARGET * width + i, mask=mask_m, other=0.0) + tl.load(
            facts + TAINT * width + i, mask=mask_m, other=0.0
        )
        counted += tl.load(facts + COUNTED * width + i, mask=mask_m, other=0.0)
    scale = tl.full((), 1.0, tl.float64)
    if MEAN:
        scale = 1.0 / tl.maximum(tl.sum(counted), 1.0)
    tl.store(value, (tl.sum(total) * scale).to(tl.float32))
    tl.store(gain, scale.to(tl.float32))


@triton.jit
def _input_gradient(by_rows, x, facts, stats, gain, upstream, by_x, num_rows, width, dim, NORMALIZE: tl.constexpr,
                    LENGTH: tl.constexpr, M: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """The gradient by the embeddings from that by `rows`."""
    i = tl.program_id(0) * M + tl.arange(0, M)
    mask_m = i < num_rows
    at = i.to(tl.int64)[:, None] * dim
    power = tl.load(facts + POWER * width + i, mask=mask_m, other=0.0)
    inverse = tl.load(facts + INVERSE * width + i, mask=mask_m, other=0.0)
    along_row = tl.zeros((M,), tl.float64)  # the part along the unit row, which is removed
    if NORMALIZE:
        power = tl.where(inverse == 0, 0.0, power)
        for start in range(0, dim, D):
            axis = start + tl.arange(0, D)
            mask = mask_m[:, None] & (axis < dim)[None, :]
            value = clamped(tl.load(x + at + axis[None, :], mask=mask, other=0.0)) * inverse[:, None]
            along_row += tl.sum(tl.load(by_rows + at + axis[None, :], mask=mask, other=0.0).to(tl.float64) * value, 1)
        along_row *= power
    if LENGTH:
        scale_up = (tl.load(gain) * tl.load(upstream)).to(tl.float64)
        along_row -= scale_up * tl.load(stats + BY_LENGTH * width + i, mask=mask_m, other=0.0).to(tl.float64)
    for start in range(0, dim, D):
        axis = start + tl.arange(0, D)
        mask = mask_m[:, None] & (axis < dim)[None, :]
        value = tl.load(x + at + axis[None, :], mask=mask, other=0.0).to(tl.float64)
        bounded = clamped(value)
        gradient = tl.load(by_rows + at + axis[None, :], mask=mask, other=0.0).to(tl.float64) * power[:, None]
        gradient = tl.where(bounded == value, gradient - along_row[:, None] * (bounded * inverse[:, None]), 0.0)
        tl.store(by_x + at + axis[None, :], gradient.to(tl.float32).to(by_x.dtype.element_ty), mask=mask)


def _chunk(dim):
    return max(16, min(1 << (dim - 1).bit_length(), 512))


def prepare(x, weight, labels, scale_tensor, numbers, margin, straight, times, centers, halves):
    """Rows (B, D) for the products, own classes and their rows (2, B'), and the buffers; B' is B or a little more.

    numbers: scale (SphereFace: its annealing), and the four of `Form.numbers`. scale_tensor: replaces the first number;
    AdaFace: mean and deviation of the lengths, (2,).
    """
    num_rows, dim = x.shape
    width = _blocks(num_rows, 16) * 16  # rows of the buffers are aligned for wide loads
    rows = torch.empty(num_rows, dim, device=x.device, dtype=torch.bfloat16 if halves else torch.float32)
    own_classes = torch.empty(2, width, device=x.device, dtype=torch.int32)
    facts = torch.empty(FACTS, width, device=x.device, dtype=torch.float64)
    stats = torch.empty(STATS, width, device=x.device, dtype=torch.float32)
    scaled = scale_tensor is not None and margin != "adaptive"
    choices = {"SCALE_TENSOR": scaled, "MARGIN": margin, "STRAIGHT": straight, "TIMES": times}
    choices |= {"HALF": halves, "CENTERS": centers, "M": ROWS, "D": _chunk(dim)} | _options()
    read = (x, weight, labels, stats if scale_tensor is None else scale_tensor)
    sizes = (num_rows, width, dim, weight.shape[0] // centers)
    arguments = (*read, rows, own_classes, facts, stats, *sizes, *numbers)
    start_kernel(_prepare, _blocks(num_rows, ROWS), arguments, choices)
    return rows, own_classes, facts, stats


def settle(peaks, sums, facts, stats, classes, needs_others, soft, reduction):
    """The loss, and the factor of its derivatives: two scalars."""
    parts, num_rows = peaks.shape
    width = facts.shape[1]
    choices = {"NEEDS_OTHERS": needs_others, "SOFT": soft, "ACTIVE": reduction == "active", "M": SETTLED, "S": 64}
    arguments = (peaks, sums, facts, stats, num_rows, width, parts, classes)
    start_kernel(_settle, _blocks(num_rows, SETTLED), arguments, choices | _options())
    value, gain = (torch.empty((), device=facts.device, dtype=torch.float32) for _ in range(2))
    choices = {"MEAN": reduction != "sum", "N": SUMMED}
    start_kernel(_sum, 1, (facts, value, gain, num_rows, width), choices | _options())
    return value, gain


def input_gradient(by_rows, x, facts, stats, gain, upstream, normalize, by_length):
    """The gradient by the embeddings, in their type, from that by `rows`. by_length: also of unit rows the own class's
    score has a slope by the length of x."""
    num_rows, dim = x.shape
    by_x = torch.empty_like(x, dtype=torch.float32 if INTERPRETS else x.dtype)
    arguments = (by_rows, x, facts, stats, gain, upstream, by_x, num_rows, facts.shape[1], dim)
    choices = {"NORMALIZE": normalize, "LENGTH": by_length or not normalize, "M": ROWS, "D": _chunk(dim)}
    start_kernel(_input_gradient, _blocks(num_rows, ROWS), arguments, choices | _options())
    return by_x.to(x.dtype)  # the interpreter truncates to bfloat16
