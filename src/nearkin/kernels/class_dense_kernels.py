# mypy: ignore-errors
"""What losses over class weights with all scores in memory share: rows and weights of unit length, and the gradients.

    prepared = prepare(x, weight, factor=scale)              # one launch; with labels and a Form its own class's score
    scores = prepared.scores()                               # (B, C) float32: factor · cosine, a cuBLAS product
    ...                                                      # a kernel turns `scores` into the derivatives, in place
    by_x, by_weight, _ = gradients(prepared, x, weight, scores, upstream, (x.dtype, weight.dtype, None))

`gradients` takes two products and one launch; it multiplies by `upstream`, a scalar on the device, and by the number at
`facts + GAIN`, which is 1 unless a kernel writes another. x and weight are contiguous; a type of None: not wanted.

`facts` is one float64 buffer, since a view costs more than a kernel. It begins with the scalars COUNT, which is 0, GAIN
and FACTOR; from SCALARS on it has ROW_FACTS rows of one entry per anchor, `padded(B)` long, at `row_fact`; then 1 / |w|
of every weight, 0 for one without a direction, at `weight_facts`. A weight that is not finite is NaN in all scores; of
an anchor that is not finite, TAINT is NaN.
"""

import functools
from typing import NamedTuple

import torch

from nearkin import kernels
from nearkin.kernels.class_loss_ops import Annealing, Form
from nearkin.kernels.class_own_kernels import clamped, inverse_length, own_cosine, own_score
from nearkin.kernels.launch import CachedLauncher, enter_thread
from nearkin.kernels.numerics import tl, triton

SCALARS, ROW_FACTS = tl.constexpr(16), tl.constexpr(8)
COUNT, GAIN, FACTOR, MEDIAN = map(tl.constexpr, range(4))
# Of an anchor: 1 / its length; the gradient along its unit row, apart from that by the scores; 0 or NaN; the own
# class's logit (later the term of the loss) and its slope; the row of its weight; whether the anchor counts; and the
# log-sum-exp of the other classes, for an adaptive scale.
INVERSE, BY_LENGTH, TAINT, TARGET, SLOPE, PICK, COUNTED, OTHERS = map(tl.constexpr, range(8))
ROWS = 4  # anchors or weights per program
TILE = 16  # the same where it multiplies
TILE_ = tl.constexpr(TILE)
INTERPRETS = kernels.interpreted()
NUMBERS = ("num_rows", "num_weights", "classes", "row_programs")  # not to be compiled for again


class Prepared(NamedTuple):
    rows: torch.Tensor  # (B, D) float32, `factor` times the unit rows, or times x
    units: torch.Tensor  # (C, D) float32
    facts: torch.Tensor
    normalize: bool
    by_length: bool = False  # unit rows whose own score has a slope by the length of x, in BY_LENGTH

    def scores(self) -> torch.Tensor:
        """rows · unitsᵀ, (B, C); lines begin at multiples of 64 bytes."""
        weights = self.units.shape[0]
        scores = self.empty_scores()
        if scores.shape[1] != weights:
            scores = scores[:, :weights]
        return torch.mm(self.rows, self.units.t(), out=scores)  # `out`: autocast lets it be

    def empty_scores(self) -> torch.Tensor:
        """(B, C) and a little wider."""
        rows = self.rows
        return torch.empty(rows.shape[0], padded(self.units.shape[0]), device=rows.device)


def padded(number: int) -> int:
    return -(-number // 16) * 16


@triton.jit
def row_fact(facts, fact: tl.constexpr, width):
    """Where the entries of the anchors begin."""
    return facts + SCALARS + fact * width


@triton.jit
def weight_facts(facts, width):
    return facts + SCALARS + ROW_FACTS * width


@triton.jit
def _squares(x, at, mask_m, dim, M: tl.constexpr, D: tl.constexpr):
    """Squared lengths of clamped rows, (M,) float64, and 0 or NaN where they are not finite."""
    squared = tl.zeros((M,), tl.float64)
    taints = tl.zeros((M,), tl.float64)
    for start in range(0, dim, D):
        axis = start + tl.arange(0, D)
        value = tl.load(x + at + axis[None, :], mask=mask_m[:, None] & (axis < dim)[None, :], other=0.0).to(tl.float64)
        taints += tl.sum(value * 0.0, 1)
        value = clamped(value)
        squared += tl.sum(value * value, 1)
    return squared, taints


@triton.jit
def ranked(c, num_weights, GROUP: tl.constexpr):
    """The row of weight c among the unit weights: of GROUP weights per class the first of every class come first, so
    that neighbouring classes have neighbouring scores."""
    return (c % GROUP) * (num_weights // GROUP) + c // GROUP


@triton.jit
def unranked(row, num_weights, GROUP: tl.constexpr):
    """The weight of a row of `ranked`; beyond the last row there is none."""
    return tl.where(
        row < num_weights, row % (num_weights // GROUP) * GROUP + row // (num_weights // GROUP), num_weights
    )


@triton.jit
def _scaled(x, at, out, out_at, times, mask_m, dim, D: tl.constexpr):
    """out = times · x, rounded once."""
    for start in range(0, dim, D):
        axis = start + tl.arange(0, D)
        mask = mask_m[:, None] & (axis < dim)[None, :]
        value = clamped(tl.load(x + at + axis[None, :], mask=mask, other=0.0)) * times[:, None]
        tl.store(out + out_at + axis[None, :], value.to(tl.float32), mask=mask)


@triton.jit(do_not_specialize=NUMBERS)
def _prepare(x, weight, labels, scale_tensor, bias, rows, units, facts, num_rows, num_weights, width, dim, scale,
             margin, along, across, lost, row_programs, SCALE_TENSOR: tl.constexpr, NORMALIZE: tl.constexpr,
             MARGIN: tl.constexpr, STRAIGHT: tl.constexpr, TIMES: tl.constexpr, CENTERS: tl.constexpr,
             ANNEALED: tl.constexpr, BIAS: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr,
             D: tl.constexpr):  # fmt: skip
    pid = tl.program_id(0)
    if pid >= row_programs:
        c = (pid - row_programs) * M + tl.arange(0, M)
        mask_c = c < num_weights
        at = c.to(tl.int64)[:, None] * dim
        squared, taints = _squares(weight, at, mask_c, dim, M, D)
        inverse = inverse_length(squared)
        place = ranked(c, num_weights, GROUP).to(tl.int64)[:, None] * dim
        _scaled(weight, at, units, place, inverse + taints, mask_c, dim, D)
        tl.store(weight_facts(facts, width) + c, inverse, mask=mask_c)
    else:
        if pid == 0:
            tl.store(facts + COUNT, 0.0)
            tl.store(facts + GAIN, 1.0)
            factor = tl.full((), 1.0, tl.float64)
            if MARGIN != "sphere":
                factor = factor * (tl.load(scale_tensor) if SCALE_TENSOR else scale)
            tl.store(facts + FACTOR, factor)
        i = pid * M + tl.arange(0, M)
        mask_m = i < num_rows
        at = i.to(tl.int64)[:, None] * dim
        squared, taints = _squares(x, at, mask_m, dim, M, D)
        inverse = inverse_length(squared)
        scale_value = tl.full((), 0.0, tl.float64) + scale
        if SCALE_TENSOR:
            scale_value = tl.load(scale_tensor).to(tl.float64)
        if ANNEALED:  # the tensor has steps, the numbers are start, decay and floor
            scale_value = tl.maximum(across, scale / (1.0 + along * scale_value))
        times = inverse * 0.0 + 1.0
        if MARGIN != "sphere":
            times = scale_value * (inverse if NORMALIZE else times)
        _scaled(x, at, rows, at, times, mask_m, dim, D)
        if MARGIN != "none":
            classes = num_weights // CENTERS
            label = tl.load(labels + i, mask=mask_m, other=-1).to(tl.int64)
            own = tl.minimum(tl.maximum(label, 0), classes - 1)
            taints += tl.where((label < -1) | (label >= classes), float("nan"), 0.0)
            pick, cos, inverse_own, more = own_cosine(x, weight, at, own, inverse, mask_m, dim, CENTERS, M, D)
            length = tl.where(squared > 0, tl.sqrt(tl.where(squared > 0, squared, 1.0)), 0.0)
            if MARGIN == "cosine" and not NORMALIZE:
                cos = cos * length
            third, fourth = across, lost
            if MARGIN == "adaptive":  # the tensor has mean and deviation of the lengths
                third, fourth = tl.load(scale_tensor).to(tl.float64), tl.load(scale_tensor + 1).to(tl.float64)
            target, slope, by_length = own_score(
                x, weight, at, pick, cos, inverse, inverse_own, length, scale_value, margin, along, third, fourth,
                mask_m, dim, MARGIN, STRAIGHT, TIMES, M, D)  # fmt: skip
            if BIAS:
                target += tl.load(bias + pick, mask=mask_m, other=0.0).to(tl.float64)
            taints += more
            tl.store(row_fact(facts, TARGET, width) + i, target, mask=mask_m)
            tl.store(row_fact(facts, SLOPE, width) + i, slope, mask=mask_m)
            tl.store(row_fact(facts, BY_LENGTH, width) + i, by_length, mask=mask_m)
            tl.store(row_fact(facts, PICK, width) + i, pick.to(tl.float64), mask=mask_m)
            tl.store(row_fact(facts, COUNTED, width) + i, tl.where(label != -1, 1.0, 0.0), mask=mask_m)
        elif not NORMALIZE:
            tl.store(row_fact(facts, BY_LENGTH, width) + i, inverse * 0.0, mask=mask_m)
        tl.store(row_fact(facts, INVERSE, width) + i, inverse, mask=mask_m)
        tl.store(row_fact(facts, TAINT, width) + i, taints, mask=mask_m)


@triton.jit
def tile(source, i, number, stride, axis, size):
    """Entries (rows i, axis) of a matrix in float64, 0 where there are none."""
    mask = (i < number)[:, None] & (axis < size)[None, :]
    return tl.load(source + i.to(tl.int64)[:, None] * stride + axis[None, :], mask=mask, other=0.0).to(tl.float64)


@triton.jit
def tile_scores(rows, units, scores, first, num_rows, num_weights, stride, dim, R: tl.constexpr, D: tl.constexpr,
                STEP: tl.constexpr):  # fmt: skip
    """The scores of R anchors, products of float64; stored, for all threads of the program to read."""
    i = first + tl.arange(0, R)
    for start in range(0, num_weights, STEP):
        c = start + tl.arange(0, STEP)
        total = tl.zeros((R, STEP), tl.float64)
        for d in range(0, dim, D):
            axis = d + tl.arange(0, D)
            left = tile(rows, i, num_rows, dim, axis, dim)
            total = tl.dot(left, tl.trans(tile(units, c, num_weights, dim, axis, dim)), total, out_dtype=tl.float64)
        mask = (i < num_rows)[:, None] & (c < num_weights)[None, :]
        tl.store(scores + i.to(tl.int64)[:, None] * stride + c[None, :], total.to(tl.float32), mask=mask)
    tl.debug_barrier()


@triton.jit
def _settled(gradient, source, by, i, number, dim, times, along, inverse, PROJECT: tl.constexpr, D: tl.constexpr):
    """`_gradient` of rows that are complete in registers, (R, D) float64."""
    axis = tl.arange(0, D)
    value = tile(source, i, number, dim, axis, dim)
    bounded = clamped(value)
    unit = bounded * inverse[:, None]
    if PROJECT:
        along -= tl.sum(gradient * unit, 1) * times
    gradient = tl.where(bounded == value, gradient * times[:, None] + along[:, None] * unit, 0.0)
    mask = (i < number)[:, None] & (axis < dim)[None, :]
    tl.store(by + i.to(tl.int64)[:, None] * dim + axis[None, :], gradient.to(tl.float32).to(by.dtype.element_ty), mask)


@triton.jit(do_not_specialize=NUMBERS)
def _tile_gradients(scores, rows, units, plus, x, weight, facts, upstream, by_x, by_weight, by_bias, num_rows,
                    num_weights, stride, width, dim, row_programs, NORMALIZE: tl.constexpr, BIAS: tl.constexpr,
                    PLUS: tl.constexpr, GROUP: tl.constexpr, LENGTH: tl.constexpr, D: tl.constexpr,
                    STEP: tl.constexpr):  # fmt: skip
    """Products and gradients at once, for few scores: one launch."""
    pid = tl.program_id(0)
    gain = tl.load(facts + GAIN) * tl.load(upstream).to(tl.float64)
    axis = tl.arange(0, D)
    total = tl.zeros((TILE_, D), tl.float64)
    if pid >= row_programs:
        c = (pid - row_programs) * TILE_ + tl.arange(0, TILE_)
        sums = tl.zeros((TILE_,), tl.float64)
        for start in range(0, num_rows, STEP):
            j = start + tl.arange(0, STEP)
            slopes = tile(scores, j, num_rows, stride, c, num_weights)
            sums += tl.sum(slopes, 0)
            total = tl.dot(tl.trans(slopes), tile(rows, j, num_rows, dim, axis, dim), total, out_dtype=tl.float64)
        if PLUS:
            total += tile(plus, c, num_weights, dim, axis, dim)
        c = unranked(c, num_weights, GROUP)
        mask_c = c < num_weights
        inverse = tl.load(weight_facts(facts, width) + c, mask=mask_c, other=0.0)
        _settled(total, weight, by_weight, c, num_weights, dim, gain * inverse, inverse * 0.0, inverse, True, D)
        if BIAS:
            tl.store(by_bias + c, (gain * sums).to(tl.float32).to(by_bias.dtype.element_ty), mask=mask_c)
    else:
        i = pid * TILE_ + tl.arange(0, TILE_)
        for start in range(0, num_weights, STEP):
            c = start + tl.arange(0, STEP)
            slopes = tile(scores, i, num_rows, stride, c, num_weights)
            total = tl.dot(slopes, tile(units, c, num_weights, dim, axis, dim), total, out_dtype=tl.float64)
        mask_m = i < num_rows
        inverse = tl.load(row_fact(facts, INVERSE, width) + i, mask=mask_m, other=0.0)
        times = gain * tl.load(facts + FACTOR)
        along = inverse * 0.0
        if LENGTH:
            along = gain * tl.load(row_fact(facts, BY_LENGTH, width) + i, mask=mask_m, other=0.0)
        if NORMALIZE:
            _settled(total, x, by_x, i, num_rows, dim, times * inverse, along, inverse, True, D)
        else:
            _settled(total, x, by_x, i, num_rows, dim, times + inverse * 0.0, along, inverse, False, D)


@triton.jit
def _slope(product, plus, at, mask, PLUS: tl.constexpr):
    slope = tl.load(product + at, mask=mask, other=0.0)
    if PLUS:
        slope += tl.load(plus + at, mask=mask, other=0.0)
    return slope


@triton.jit
def _gradient(product, plus, place, source, by, at, mask_m, dim, times, along, inverse, PLUS: tl.constexpr,
              PROJECT: tl.constexpr, M: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """times · (product + plus) + along · unit row, 0 where clamped; PROJECT: without its part along the unit row."""
    if PROJECT:
        along_row = tl.zeros((M,), tl.float64)
        for start in range(0, dim, D):
            axis = start + tl.arange(0, D)
            mask = mask_m[:, None] & (axis < dim)[None, :]
            unit = clamped(tl.load(source + at + axis[None, :], mask=mask, other=0.0)) * inverse[:, None]
            along_row += tl.sum(_slope(product, plus, place + axis[None, :], mask, PLUS) * unit, 1)
        along -= along_row * times
    for start in range(0, dim, D):
        axis = start + tl.arange(0, D)
        mask = mask_m[:, None] & (axis < dim)[None, :]
        value = tl.load(source + at + axis[None, :], mask=mask, other=0.0).to(tl.float64)
        bounded = clamped(value)
        gradient = _slope(product, plus, place + axis[None, :], mask, PLUS) * times[:, None]
        gradient = tl.where(bounded == value, gradient + along[:, None] * (bounded * inverse[:, None]), 0.0)
        tl.store(by + at + axis[None, :], gradient.to(tl.float32).to(by.dtype.element_ty), mask=mask)


@triton.jit
def _add_own_rows(product, units, facts, i, mask_m, at, width, dim, D: tl.constexpr):
    """Adds the gradient by prepared rows of their own classes' scores."""
    push = tl.load(row_fact(facts, SLOPE, width) + i, mask=mask_m, other=0.0)
    pick = tl.load(row_fact(facts, PICK, width) + i, mask=mask_m, other=0.0).to(tl.int64)
    for start in range(0, dim, D):
        axis = start + tl.arange(0, D)
        mask = mask_m[:, None] & (axis < dim)[None, :]
        unit = tl.load(units + pick[:, None] * dim + axis[None, :], mask=mask, other=0.0)
        sum = tl.load(product + at + axis[None, :], mask=mask, other=0.0) + push[:, None] * unit
        tl.store(product + at + axis[None, :], sum.to(tl.float32), mask=mask)
    tl.debug_barrier()


@triton.jit
def _add_own_units(product, rows, facts, sums, c, mask_c, at, num_rows, width, dim, BIAS: tl.constexpr,
                   WIDE: tl.constexpr, M: tl.constexpr, D: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    """Adds the gradient by unit weights of the scores that are their anchors' own; by biases too."""
    slopes = tl.zeros((M,), tl.float64)
    for start in range(0, dim, D):
        axis = start + tl.arange(0, D)
        total = tl.zeros((M, D), tl.float64)
        for first in range(0, num_rows, STEP):
            j = first + tl.arange(0, STEP)
            pick = tl.load(row_fact(facts, PICK, width) + j, mask=j < num_rows, other=-1.0).to(tl.int32)
            own = pick[None, :] == c[:, None]
            if tl.max(tl.max(own.to(tl.int32), 1), 0) > 0:
                push = tl.load(row_fact(facts, SLOPE, width) + j, mask=j < num_rows, other=0.0)
                push = tl.where(own, push[None, :], 0.0)
                anchors = tile(rows, j, num_rows, dim, axis, dim)
                if WIDE:
                    total = tl.dot(push, anchors, total, out_dtype=tl.float64)
                else:
                    total += tl.dot(push.to(tl.float32), anchors.to(tl.float32), input_precision="ieee")
                if start == 0:
                    slopes += tl.sum(push, 1)
        mask = mask_c[:, None] & (axis < dim)[None, :]
        sum = tl.load(product + at + axis[None, :], mask=mask, other=0.0) + total
        tl.store(product + at + axis[None, :], sum.to(tl.float32), mask=mask)
    if BIAS:
        sum = tl.load(sums + c, mask=mask_c, other=0.0) + slopes
        tl.store(sums + c, sum.to(tl.float32), mask=mask_c)
    tl.debug_barrier()


@triton.jit(do_not_specialize=NUMBERS)
def _gradients(rows, units, by_rows, by_units, plus, x, weight, sums, facts, upstream, by_x, by_weight, by_bias,
               num_rows, num_weights, width, dim, row_programs, NORMALIZE: tl.constexpr, BIAS: tl.constexpr,
               OWN: tl.constexpr, WIDE: tl.constexpr, PLUS: tl.constexpr, GROUP: tl.constexpr, LENGTH: tl.constexpr,
               M: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """The gradients by x and by the weights from those by prepared rows and unit weights; by biases from sums. OWN: the
    own classes' scores, whose derivatives are in SLOPE, are not yet among these; WIDE: they are multiplied in
    float64."""
    pid = tl.program_id(0)
    gain = tl.load(facts + GAIN) * tl.load(upstream).to(tl.float64)
    if pid >= row_programs:
        c = (pid - row_programs) * M + tl.arange(0, M)
        mask_c = c < num_weights
        at = c.to(tl.int64)[:, None] * dim
        inverse = tl.load(weight_facts(facts, width) + c, mask=mask_c, other=0.0)
        if OWN:
            _add_own_units(by_units, rows, facts, sums, c, mask_c, at, num_rows, width, dim, BIAS, WIDE, M, D, 64)
        place = ranked(c, num_weights, GROUP).to(tl.int64)[:, None] * dim
        _gradient(by_units, plus, place, weight, by_weight, at, mask_c, dim, gain * inverse, inverse * 0.0, inverse,
                  PLUS, True, M, D)  # fmt: skip
        if BIAS:
            by = gain * tl.load(sums + c, mask=mask_c, other=0.0)
            tl.store(by_bias + c, by.to(tl.float32).to(by_bias.dtype.element_ty), mask=mask_c)
    else:
        i = pid * M + tl.arange(0, M)
        mask_m = i < num_rows
        at = i.to(tl.int64)[:, None] * dim
        inverse = tl.load(row_fact(facts, INVERSE, width) + i, mask=mask_m, other=0.0)
        times = gain * tl.load(facts + FACTOR)
        if OWN:
            _add_own_rows(by_rows, units, facts, i, mask_m, at, width, dim, D)
        along = inverse * 0.0
        if LENGTH:
            along = gain * tl.load(row_fact(facts, BY_LENGTH, width) + i, mask=mask_m, other=0.0)
        if NORMALIZE:
            _gradient(by_rows, plus, at, x, by_x, at, mask_m, dim, times * inverse, along, inverse, False, True, M,
                      D)  # fmt: skip
        else:
            _gradient(by_rows, plus, at, x, by_x, at, mask_m, dim, times + inverse * 0.0, along, inverse, False, False,
                      M, D)  # fmt: skip


def prepare(x, weight, labels=None, own=None, *, factor=1.0, normalize=True, bias=None, group=1):
    """Rows and weights for the scores: `factor` times unit rows, or times x, and weights of unit length.

    labels and own, a `class_loss_ops.Form`: also the own class's logit; factor and normalize are then the Form's. bias:
    (C,), added to that logit. group: of so many weights per class the unit weights are in the order of `ranked`.
    """
    form = own or Form(factor, kind="none", raw=not normalize)
    (anchors, dim), weights = x.shape, weight.shape[0]
    device, line = x.device, padded(anchors)
    rows, units = torch.empty(anchors, dim, device=device), torch.empty(weights, dim, device=device)
    facts = torch.empty(16 + 8 * line + padded(weights), device=device, dtype=torch.float64)
    scale, scale_tensor = form.scale, None
    margin, along, across, lost = form.numbers()
    annealed = isinstance(scale, Annealing)
    if annealed:
        scale_tensor, scale, along, across = scale
    elif isinstance(scale, torch.Tensor):
        scale_tensor, scale = scale, 1.0
    times = int(margin) if form.kind == "sphere" else 1
    scaled = scale_tensor is not None
    if form.statistics is not None:
        scale_tensor = form.statistics_tensor(x)
    choices = (scaled, form.normalize, form.kind, form.straight, times, form.centers, annealed)
    programs = -(-anchors // ROWS)
    _preparing(*choices, bias is not None, group, chunk(dim))(
        (programs - (-weights // ROWS), 1, 1),
        x, weight, facts if labels is None else labels, facts if scale_tensor is None else scale_tensor,
        facts if bias is None else bias, rows, units, facts, anchors, weights, line, dim, float(scale), margin,
        float(along), float(across), lost, programs,
        key=(dim, x.get_device(), kind_of(x), kind_of(weight), kind_of(labels), kind_of(scale_tensor), kind_of(bias))
    )  # fmt: skip
    return Prepared(rows, units, facts, form.normalize, form.by_length)


@functools.cache
def _preparing(scale_tensor, normalize, kind, straight, times, centers, annealed, bias, group, dims):
    choices = {"SCALE_TENSOR": scale_tensor, "NORMALIZE": normalize, "MARGIN": kind, "STRAIGHT": straight}
    choices |= {"TIMES": times, "CENTERS": centers, "ANNEALED": annealed, "BIAS": bias, "GROUP": group}
    choices |= {"M": ROWS, "D": dims}
    return CachedLauncher(_prepare, **choices, **options())


def gradients(prepared, x, weight, scores, upstream, kinds, own=False, plus=None, group=1):
    """The gradients by x, by the weights and by biases, in the types `kinds`; None where not wanted.

    scores: by now the derivatives by the scores. own: without those by the own classes' scores, which are in SLOPE; in
    float32 they outweigh all others together, and beside them a sum would lose its digits. plus: what else there is of
    the gradient by the unit weights. group: as for `prepare`.
    """
    rows, units, facts, normalize, by_length = prepared
    (anchors, dim), weights = x.shape, weight.shape[0]
    kind_x, kind_weight, kind_bias = (*kinds, None)[:3]
    by_x = by_weight = by_bias = by_rows = by_units = sums = facts
    programs = weight_programs = 0
    size = TILE if own else ROWS
    enter_thread(scores)
    if kind_x is not None:
        by_rows = torch.mm(scores, units, out=torch.empty_like(rows))
        by_x, programs = _result(x, kind_x), -(-anchors // size)
    if kind_weight is not None or kind_bias is not None:
        by_units = torch.mm(scores.t(), rows, out=torch.empty_like(units))
        by_weight, weight_programs = _result(weight, kind_weight or weight.dtype), -(-weights // size)
    if kind_bias is not None:
        sums = torch.sum(scores, 0)
        by_bias = _result(sums, kind_bias)
    wide = own and kernels.has_float64_units(x)
    length = by_length or not normalize
    _finishing(normalize, length, kind_bias is not None, own, wide, plus is not None, group, size, chunk(dim))(
        (programs + weight_programs, 1, 1),
        rows, units, by_rows, by_units, facts if plus is None else plus, x, weight, sums, facts, upstream, by_x,
        by_weight, by_bias, anchors, weights, padded(anchors), dim, programs,
        key=(dim, x.get_device(), kind_of(x), kind_of(weight), kind_of(upstream), kind_x, kind_weight, kind_bias)
    )  # fmt: skip
    return _typed(by_x, kind_x), _typed(by_weight, kind_weight), _typed(by_bias, kind_bias)


def tile_gradients(prepared, x, weight, scores, upstream, kinds, plus=None, group=1):
    """`gradients` of few scores (`empty_scores`) and dimensions by one kernel."""
    rows, units, facts, normalize, by_length = prepared
    (anchors, dim), weights = x.shape, weight.shape[0]
    kind_x, kind_weight, kind_bias = (*kinds, None)[:3]
    by_x = by_weight = by_bias = facts
    programs = weight_programs = 0
    if kind_x is not None:
        by_x, programs = _result(x, kind_x), -(-anchors // TILE)
    if kind_weight is not None or kind_bias is not None:
        by_weight, weight_programs = _result(weight, kind_weight or weight.dtype), -(-weights // TILE)
    if kind_bias is not None:
        by_bias = torch.empty(weights, device=x.device, dtype=torch.float32 if INTERPRETS else kind_bias)
    length = by_length or not normalize
    _tiling(normalize, length, kind_bias is not None, plus is not None, group, chunk(dim))(
        (programs + weight_programs, 1, 1),
        scores, rows, units, facts if plus is None else plus, x, weight, facts, upstream, by_x, by_weight, by_bias,
        anchors, weights, scores.stride(0), padded(anchors), dim, programs,
        key=(dim, x.get_device(), kind_of(x), kind_of(weight), kind_of(upstream), kind_x, kind_weight, kind_bias)
    )  # fmt: skip
    return _typed(by_x, kind_x), _typed(by_weight, kind_weight), _typed(by_bias, kind_bias)


@functools.cache
def _tiling(normalize, length, bias, plus, group, dims):
    choices = {"NORMALIZE": normalize, "LENGTH": length, "BIAS": bias, "PLUS": plus, "GROUP": group, "D": dims}
    choices["STEP"] = step(dims)
    return CachedLauncher(_tile_gradients, **choices, num_warps=4, num_stages=2, **options())


@functools.cache
def _finishing(normalize, length, bias, own, wide, plus, group, size, dims):
    choices = {"NORMALIZE": normalize, "BIAS": bias, "OWN": own, "WIDE": wide, "PLUS": plus, "GROUP": group, "M": size}
    choices["LENGTH"] = length
    choices["D"] = min(dims, 128) if own else dims
    return CachedLauncher(_gradients, **choices, num_stages=2, **options())


def _result(like, kind):
    return torch.empty_like(like, dtype=torch.float32 if INTERPRETS else kind)


def _typed(result, kind):
    """The interpreter truncates to bfloat16: there the kernel writes float32."""
    if kind is None:
        return None
    return result.to(kind) if INTERPRETS else result


def chunk(dim):
    return max(16, min(1 << (dim - 1).bit_length(), 512))


def kind_of(tensor):
    """What a kernel is compiled for of a tensor that is not a new one, whose address is aligned."""
    return None if tensor is None else (tensor.dtype, tensor.data_ptr() % 16)


def step(dims):
    """Rows that pass by at a time, for their tile to fit into shared memory."""
    return 64 if dims <= 128 else 32


def options():
    return {} if INTERPRETS else {"enable_fp_fusion": True}  # explicit, since the default changes
