# mypy: ignore-errors
"""The pass of all pair losses, forward and backward, and how large its tiles are; `links` has what differs by loss.

A program holds the statistics of a few anchors in registers while all references pass by: one slot per entry of a tile,
merged once after the last. What the gradient needs of an anchor later are a few numbers (`links.link`); it makes every
tile of distances or similarities again, in the same order, so that both passes see the same. The functions of a link
are constants of the kernels and inlined: a loss runs as if it had kernels of its own.
"""

import functools
from typing import NamedTuple

import torch

from nearkin import kernels
from nearkin.kernels import digit_kernels, links, row_kernels
from nearkin.kernels.launch import CachedLauncher
from nearkin.kernels.links import margin, npair, sigmoid
from nearkin.kernels.links.link import SAVED, SCALES, STATISTICS
from nearkin.kernels.numerics import load, store, tl, triton
from nearkin.kernels.row_kernels import (
    SQUARED,
    TAINT,
    class_ids,
    fact,
    inner_products,
    pair_masks,
    squared_distances,
    store_gradient,
)

ROUNDING = tl.constexpr(2 * row_kernels.EPS)


class Tile(NamedTuple):
    """Rows per program, rows that pass by per step, coordinates per product; warps per program, steps in flight."""

    rows: int
    columns: int
    step: int
    warps: int
    stages: int


# By the most rows of the batch; few rows need small blocks to fill the device.
FORWARD = {2048: Tile(16, 64, 128, 8, 3), 8192: Tile(32, 64, 128, 8, 3), 2**31: Tile(64, 64, 128, 8, 2)}
BACKWARD = {2048: Tile(16, 64, 128, 8, 2), 2**31: Tile(32, 64, 128, 8, 2)}
# Of rows as digits, within the 99 KiB of shared memory that consumer cards have.
DIGIT_FORWARD = {2048: Tile(16, 64, 128, 8, 2), 2**31: Tile(32, 64, 128, 8, 2)}
DIGIT_BACKWARD = {2048: Tile(16, 64, 128, 8, 2), 2**31: Tile(32, 64, 128, 8, 2)}
INTERPRETED = Tile(32, 32, 32, 4, 1)  # small, so that small tests have several tiles and ragged ends
CHUNK = 256  # coordinates of a gradient that one program sums; longer rows are served in chunks
SHORT = 128  # coordinates up to which the tables were chosen
FINISHED = 1024  # anchors at a time in the last reduction


@triton.jit
def _rows(a, i, axis, PAD: tl.constexpr, D: tl.constexpr):
    """Coordinates of prepared rows that exist, (M, D) float64."""
    at = i.to(tl.int64)[:, None] * PAD + axis[None, :]
    if PAD % D == 0:
        rows = tl.load(a + at)
    else:
        rows = tl.load(a + at, mask=(axis < PAD)[None, :], other=0.0)
    return rows


@triton.jit
def _whole(a, i, PAD: tl.constexpr, K: tl.constexpr, ONCE: tl.constexpr):
    """The rows i as a product takes them, where it takes them at once."""
    if a.dtype.element_ty == tl.int8:
        rows = digit_kernels.planes(a, i, 0, PAD, K)
    elif ONCE:
        rows = _rows(a, i, tl.arange(0, PAD), PAD, PAD)
    else:
        rows = 0.0
    return rows


@triton.jit
def _products(a, b, anchors, i, j, PAD: tl.constexpr, K: tl.constexpr, ONCE: tl.constexpr):
    """Inner products (M, N) of prepared rows, K coordinates at a time, or at once with the rows `anchors` of a."""
    if a.dtype.element_ty == tl.int8:
        inner = digit_kernels.products(a, b, anchors, i, j, PAD, K)
    elif ONCE:
        inner = tl.dot(anchors, tl.trans(_rows(b, j, tl.arange(0, PAD), PAD, PAD)), out_dtype=tl.float64)
    else:
        inner = inner_products(a, b, i, j, PAD, K)
    return inner


@triton.jit
def _measure(a, b, inner, left, right, i, j, dim, MEASURE: tl.constexpr, SELF: tl.constexpr, CENTRED: tl.constexpr,
             PAD: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """Distances or similarities in float32 ("product": float64), also distances whose squares float32 does not hold.
    And, of distances of digits, which pairs are near."""
    EUCLID: tl.constexpr = MEASURE == "distance" or MEASURE == "squared"
    near = False
    if a.dtype.element_ty == tl.int8:
        if EUCLID or CENTRED:
            high, low, unit, near = digit_kernels.distances(inner, a, b, i, j, PAD, N, SELF and EUCLID, EUCLID)
        if MEASURE == "distance":
            value = tl.sqrt(high + low) * unit
        elif MEASURE == "squared":
            value = (high + low) * unit * unit
        elif CENTRED:  # of unit rows: half their squared lengths, 1 or 0, less half the squared distance
            if MEASURE == "product":
                squared = (high.to(tl.float64) + low.to(tl.float64)) * (unit * unit).to(tl.float64)
                value = 0.5 * (left[:, None] + right[None, :]) - 0.5 * squared
            else:
                half = (0.5 * left).to(tl.float32)[:, None] + (0.5 * right).to(tl.float32)[None, :]
                half_unit = unit * unit * 0.5
                value = (half - high * half_unit) - low * half_unit
        else:
            scale = (
                digit_kernels.header(a, i, digit_kernels.SCALE, PAD)[:, None]
                * digit_kernels.header(b, j, digit_kernels.SCALE, PAD)[None, :]
            )
            value = (inner[0] + inner[1]) * scale
    elif MEASURE == "product":
        value = inner
    elif MEASURE == "similarity":
        value = inner.to(tl.float32)
    else:
        squared = squared_distances(inner, left, right, i, j, tl.full((), ROUNDING, tl.float64) * dim, SELF)
        if MEASURE == "squared":
            value = squared.to(tl.float32)
        else:
            small = squared < 1e-18
            scaled = tl.where(small, squared * 1208925819614629174706176.0, squared)  # 2^80
            root = tl.sqrt(scaled.to(tl.float32))
            value = tl.where(small, root * 9.094947017729282e-13, root)  # 2^-40
    return value, near


@triton.jit
def _pass(a, b, extra, row_ids, left, anchors, i, mask_m, size, others, dim, facts, settings, INIT: tl.constexpr,
          ADD: tl.constexpr, COLUMN: tl.constexpr, POSITIVES_ONLY: tl.constexpr, MEASURE: tl.constexpr,
          SELF: tl.constexpr, FLAG: tl.constexpr, ACTIVE: tl.constexpr, CENTRED: tl.constexpr, PAD: tl.constexpr,
          K: tl.constexpr, ONCE: tl.constexpr, M: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """The state of a link after all references."""
    safe = tl.minimum(i, size - 1)
    state = INIT(M, N)
    for start in range(0, others, N):
        j = start + tl.arange(0, N)
        mask_n = j < others
        column_ids = class_ids(b, j, mask_n, others, PAD)
        positive, negative = pair_masks(row_ids, column_ids, i, j, mask_m, mask_n, SELF)
        needed = True
        if POSITIVES_ONLY:
            needed = tl.max(tl.max(positive.to(tl.int32), 1), 0) > 0
        if needed:
            passing = tl.minimum(j, others - 1)
            inner = _products(a, b, anchors, safe, passing, PAD, K, ONCE)
            right = fact(b, SQUARED, j, mask_n, others, PAD)
            value, _near = _measure(a, b, inner, left, right, safe, passing, dim, MEASURE, SELF, CENTRED, PAD, N)
            column = ()
            if COLUMN is not None:
                column = COLUMN(extra, (j, mask_n, others), SELF)
            reference = (mask_n & (column_ids != -1), right, column)
            state = ADD(state, (value, positive, negative), reference, facts, settings, SELF, FLAG, ACTIVE)
    return state


@triton.jit
def _forward(a, b, extra, stats, size, others, dim, p, q, u, s, SURVEY_INIT: tl.constexpr, SURVEY_ADD: tl.constexpr,
             SURVEY_CLOSE: tl.constexpr, FACTS: tl.constexpr, COLUMN: tl.constexpr, INIT: tl.constexpr,
             ADD: tl.constexpr, CLOSE: tl.constexpr, POSITIVES_ONLY: tl.constexpr, MEASURE: tl.constexpr,
             SELF: tl.constexpr, FLAG: tl.constexpr, ACTIVE: tl.constexpr, BETA: tl.constexpr, CENTRED: tl.constexpr,
             PAD: tl.constexpr, K: tl.constexpr, ONCE: tl.constexpr, M: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """Statistics of M anchors, rows of a, from all references, rows of b. p, q, u, s: the settings of the link."""
    i = tl.program_id(0) * M + tl.arange(0, M)
    mask_m = i < size
    row_ids = class_ids(a, i, mask_m, size, PAD)
    left = fact(a, SQUARED, i, mask_m, size, PAD)
    anchors = _whole(a, tl.minimum(i, size - 1), PAD, K, ONCE)
    settings = (p, q, u, s)
    facts = ()
    if FACTS is not None:
        facts = FACTS(extra, stats, (i, mask_m, size), settings, SELF, BETA, M)
    if SURVEY_INIT is not None:
        state = _pass(a, b, extra, row_ids, left, anchors, i, mask_m, size, others, dim, facts, settings, SURVEY_INIT,
                      SURVEY_ADD, None, False, MEASURE, SELF, FLAG, ACTIVE, CENTRED, PAD, K, ONCE, M, N)  # fmt: skip
        facts = SURVEY_CLOSE(state, settings)
    state = _pass(a, b, extra, row_ids, left, anchors, i, mask_m, size, others, dim, facts, settings, INIT, ADD, COLUMN,
                  POSITIVES_ONLY, MEASURE, SELF, FLAG, ACTIVE, CENTRED, PAD, K, ONCE, M, N)  # fmt: skip
    CLOSE(stats, (i, mask_m, size), (row_ids, left), state, facts, settings, SELF, FLAG, ACTIVE)


@triton.jit
def _firsts(a, stats, size, PAD: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """For N-pair in a batch alone: 1 for items that have no positive before them."""
    i = tl.program_id(0) * M + tl.arange(0, M)
    mask_m = i < size
    row_ids = class_ids(a, i, mask_m, size, PAD)
    before = tl.zeros((M, N), tl.int32)
    for start in range(0, tl.minimum(tl.program_id(0) * M + M, size), N):
        j = start + tl.arange(0, N)
        mask_n = j < size
        positive, _negative = pair_masks(row_ids, class_ids(a, j, mask_n, size, PAD), i, j, mask_m, mask_n, True)
        before += (positive & (j[None, :] < i[:, None])).to(tl.int32)
    store(stats, npair.FIRST, (i, mask_m, size), (tl.sum(before, 1) == 0))


@triton.jit
def _taint(a, size, PAD: tl.constexpr, N: tl.constexpr):
    """0, or NaN if a prepared row is not finite."""
    taint = tl.zeros((N,), tl.float64)
    for start in range(0, size, N):
        i = start + tl.arange(0, N)
        taint += fact(a, TAINT, i, i < size, size, PAD)
    return tl.sum(taint, 0)


@triton.jit
def _finish(a, b, stats, value, size, others, option, TALLY: tl.constexpr, MEAN: tl.constexpr, SELF: tl.constexpr,
            PAD: tl.constexpr, REDUCTION: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """The loss from its anchors' statistics, and the scales of the gradient. option: the link's fourth setting."""
    zero = tl.zeros((N,), tl.float64)
    sums = (zero, zero, zero, zero)
    for start in range(0, size, N):
        i = start + tl.arange(0, N)
        sums = TALLY(sums, stats, (i, i < size, size), option, REDUCTION)
    taint = _taint(a, size, PAD, N)
    if not SELF:
        taint += _taint(b, others, PAD, N)
    loss, scale, other_scale = MEAN(sums, stats, size, option, REDUCTION)
    tl.store(value, (loss + taint).to(tl.float32))
    tl.store(stats + SCALES * size, scale.to(tl.float32))
    tl.store(stats + SCALES * size + 1, other_scale.to(tl.float32))


@triton.jit
def _saved(stats, i, mask_m, size, AXIS: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr, TABLE: tl.constexpr):
    """COUNT rows of statistics from FIRST on, as a tuple, along AXIS of a tile; or the TABLE, and indices along it."""
    rows = ()
    if TABLE > 0:
        entry, at = tl.expand_dims(tl.arange(0, TABLE), 1 - AXIS), tl.expand_dims(i, AXIS)
        table = tl.load(stats + 2 + (SCALES + entry) * size + at, mask=tl.expand_dims(mask_m, AXIS), other=0.0)
        rows = (table, at)
    for k in tl.static_range(COUNT):
        row = load(stats, FIRST + k, (i, mask_m, size))
        rows = rows + (tl.expand_dims(row, AXIS),)  # noqa: RUF005  triton 3.4 knows no unpacking
    return rows


@triton.jit
def _from_digits(summed, a, i, axis, size, EUCLID: tl.constexpr, CENTRED: tl.constexpr, PAD: tl.constexpr):
    """The gradient (M, D) by prepared rows from sums of weighted rows and of weights, and these rows; float64."""
    high, low, weights = summed
    gradient = high.to(tl.float64) + low.to(tl.float64)
    rows = digit_kernels.exact_rows(a, i, axis, PAD)
    if EUCLID:
        gradient = weights[:, None] * rows - gradient
    elif CENTRED:
        gradient += weights[:, None] * digit_kernels.centre(a, axis, size, PAD)[None, :]
    return gradient, rows


@triton.jit
def _backward(x, a, b, stats, column, upstream, by_x, by_beta, size, others, dim, p, q, u, s, SLOPE: tl.constexpr,
              ROW_SLOPE: tl.constexpr, COUNT: tl.constexpr, FIRST: tl.constexpr, TABLE: tl.constexpr,
              MEASURE: tl.constexpr, SYMMETRIC: tl.constexpr, PAIRED: tl.constexpr, ROLE: tl.constexpr,
              APART: tl.constexpr, FLAG: tl.constexpr, NORMALIZE: tl.constexpr, TRANSFORM: tl.constexpr,
              ONE_CHUNK: tl.constexpr, BETA: tl.constexpr, CENTRED: tl.constexpr, PAD: tl.constexpr, K: tl.constexpr,
              ONCE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """D coordinates of the gradient by M rows of x, prepared in a: all rows of b pass by, as references (ROLE
    "anchors"), as anchors ("references") or as both ("self"). APART: row i of a and of b are the same item, whose pair
    with itself is left out. stats are of a, column of b."""
    i = tl.program_id(0) * M + tl.arange(0, M)
    mask_m = i < size
    axis = tl.program_id(1) * D + tl.arange(0, D)
    row_ids = class_ids(a, i, mask_m, size, PAD)
    left = fact(a, SQUARED, i, mask_m, size, PAD)
    safe = tl.minimum(i, size - 1)
    DIGITS: tl.constexpr = a.dtype.element_ty == tl.int8
    if DIGITS:
        rows = _whole(a, safe, PAD, K, ONCE)
    else:
        rows = _rows(a, safe, axis, PAD, D)
    scales_at = column + SCALES * others if ROLE == "references" else stats + SCALES * size
    above = tl.load(upstream).to(tl.float32)
    scales = (above * tl.load(scales_at), above * tl.load(scales_at + 1))
    if BETA:  # every program stores the same
        tl.store(by_beta, scales[1])
    SELF: tl.constexpr = ROLE == "self"
    EUCLID: tl.constexpr = MEASURE == "distance" or MEASURE == "squared"
    settings = (p, q, u, s)
    row_stats = ()
    if ROLE != "references" or PAIRED:
        row_stats = _saved(stats, i, mask_m, size, 1, FIRST, COUNT, TABLE)
    if DIGITS:
        summed = digit_kernels.weighted_init(M, D)
    else:
        gradient = tl.zeros((M, D), tl.float64)
        weight = tl.zeros((M, N), tl.float64)
    for start in range(0, others, N):
        j = start + tl.arange(0, N)
        mask_n = j < others
        positive, negative = pair_masks(row_ids, class_ids(b, j, mask_n, others, PAD), i, j, mask_m, mask_n, APART)
        passing = tl.minimum(j, others - 1)
        if DIGITS:
            inner = digit_kernels.products(a, b, rows, safe, passing, PAD, K)
        else:
            passing_rows = _rows(b, passing, axis, PAD, D)
            if ONCE:
                inner = tl.dot(rows, tl.trans(passing_rows), out_dtype=tl.float64)
            else:
                inner = inner_products(a, b, safe, passing, PAD, K)
        right = fact(b, SQUARED, j, mask_n, others, PAD)
        value, near = _measure(a, b, inner, left, right, safe, passing, dim, MEASURE, APART, CENTRED, PAD, N)
        tile = (value, positive, negative)
        column_stats = ()
        if ROLE != "anchors" or PAIRED:
            column_stats = _saved(column, j, mask_n, others, 0, FIRST, COUNT, TABLE)
        if ROLE != "references":
            slope = SLOPE(tile, row_stats, column_stats, scales, settings, SELF, FLAG)
        if SYMMETRIC and SELF:
            slope += slope
        elif ROLE != "anchors":
            back = SLOPE(tile, column_stats, row_stats, scales, settings, SELF, FLAG)
            slope = slope + back if SELF else back
        if MEASURE == "distance":
            slope = slope / tl.where(value > 0, value, 1.0)
        elif MEASURE == "squared":
            slope = 2.0 * slope
        if EUCLID:
            slope = tl.where(value > 0, slope, 0.0)
        if DIGITS:
            if EUCLID:
                summed = digit_kernels.near_add(
                    summed, slope, near & mask_n[None, :], a, b, safe, passing, axis, PAD, N
                )
                slope = tl.where(near, 0.0, slope)
            summed = digit_kernels.weighted_add(summed, slope, b, passing, start, axis, others, PAD, N, D)
        else:
            slope = slope.to(tl.float64)
            if EUCLID and not NORMALIZE:
                weight += slope
            gradient = tl.dot(slope, passing_rows, gradient, out_dtype=tl.float64)
    if DIGITS:
        gradient, rows = _from_digits(summed, a, safe, axis, size, EUCLID, CENTRED, PAD)
    else:
        if not ONCE:
            rows = _rows(a, safe, axis, PAD, D)
        if EUCLID:  # of unit rows, what points along the row changes nothing
            gradient = tl.sum(weight, 1)[:, None] * rows - gradient
    if ROW_SLOPE is not None:
        gradient += ROW_SLOPE((row_ids != -1)[:, None], row_stats, scales, settings, ROLE).to(tl.float64) * rows
    if ONE_CHUNK:
        store_gradient(x, a, by_x, gradient, i, mask_m, axis, size, dim, PAD, TRANSFORM, NORMALIZE)
    else:
        out = i.to(tl.int64)[:, None] * dim + axis[None, :]
        tl.store(by_x + out, gradient, mask=mask_m[:, None] & (axis < dim)[None, :])


@functools.cache
def _tile(stage: str, size: int, dim: int, kind: torch.dtype) -> tuple[Tile, dict]:
    """The tile, and the constants and options that follow from it. kind: of prepared rows."""
    tables = (DIGIT_FORWARD, DIGIT_BACKWARD) if kind == torch.int8 else (FORWARD, BACKWARD)
    table = tables[stage == "backward"]
    tile = INTERPRETED if kernels.interpreted() else next(tile for most, tile in table.items() if size <= most)
    pad = row_kernels.padded(dim)
    long, steps = (digit_kernels.length(dim), (32, 64, 128)) if kind == torch.int8 else (pad, (16, 32, 64, 128, 256))
    step = max(step for step in steps if step <= tile.step and long % step == 0)
    chunk = min(triton.next_power_of_2(pad), 32 if kernels.interpreted() else CHUNK)
    if chunk > SHORT and stage == "backward":  # sums and rows twice as long
        tile = tile._replace(columns=tile.columns // 2)
    constants = {"PAD": pad, "K": step, "ONCE": step == long, "M": tile.rows, "N": tile.columns}
    if stage == "backward":
        constants["D"] = chunk
    return tile, constants | {"num_warps": tile.warps, "num_stages": tile.stages, **row_kernels.options()}


class Passes(NamedTuple):
    """The kernels of a loss, in their order; rows: of a program; statistics: rows of them, with those of a table."""

    rows: int
    statistics: int
    firsts: CachedLauncher
    threats: CachedLauncher
    main: CachedLauncher
    finish: CachedLauncher


@functools.cache
def _passes(
    kind: str,
    flag: int,
    size: int,
    dim: int,
    alone: bool,
    batch_first: bool,
    reduction: str,
    beta: str,
    rows: torch.dtype,
) -> Passes:
    tile, constants = _tile("forward", size, dim, rows)
    pad, options = constants["PAD"], row_kernels.options()
    link = links.of(kind, flag)

    def main(link):
        survey = link.survey or (None, None, None)
        functions = dict(zip(("SURVEY_INIT", "SURVEY_ADD", "SURVEY_CLOSE"), survey, strict=True))
        functions |= {"INIT": link.init, "ADD": link.add, "CLOSE": link.close, "FACTS": link.facts}
        functions |= {"COLUMN": link.column, "POSITIVES_ONLY": link.positives_only, "MEASURE": link.measure}
        choices = {"SELF": alone or batch_first, "FLAG": flag, "ACTIVE": reduction == "active", "BETA": beta}
        choices["CENTRED"] = link.centred
        return CachedLauncher(_forward, **functions, **choices, **constants)

    finish = {"TALLY": link.tally, "MEAN": link.mean, "SELF": alone, "PAD": pad, "REDUCTION": reduction}
    return Passes(
        tile.rows,
        STATISTICS + link.table,
        CachedLauncher(_firsts, PAD=pad, M=16, N=256, **options),
        main(links.of("lifted threats", False)),
        main(link),
        CachedLauncher(_finish, N=FINISHED, **finish, **options),
    )


def forward(kind, rows, columns, sizes, beta, settings, flag, reduction, batch_first):
    """The value (), and the statistics of anchors and of references (the same where these have none).

    rows, columns: prepared anchors and references, the same where the batch is alone; sizes: B, R and D. beta: None, a
    scalar or (B,). batch_first: the first references are the anchors."""
    size, others, dim = sizes
    alone = rows is columns
    beta_kind = "number" if beta is None else "anchor" if beta.dim() else "scalar"
    passes = _passes(kind, flag, size, dim, alone, batch_first, reduction, beta_kind, rows.dtype)
    stats = torch.empty(passes.statistics * size + 2, device=rows.device, dtype=torch.float32)
    value = torch.empty((), device=rows.device, dtype=torch.float32)
    anchors = (-(-size // passes.rows), 1, 1)
    column = extra = stats
    if beta is not None:
        extra = beta
    if kind == "npair" and alone:
        passes.firsts(((size + 15) // 16, 1, 1), rows, stats, size)
    if kind == "lifted":
        passes.threats(anchors, rows, columns, stats, stats, size, others, dim, *settings)
        if not alone:
            references = (-(-others // passes.rows), 1, 1)
            column = extra = torch.empty(STATISTICS * others, device=rows.device, dtype=torch.float32)
            passes.threats(references, columns, rows, column, column, others, size, dim, *settings)
            passes.main(references, columns, rows, stats, column, others, size, dim, *settings)
    passes.main(anchors, rows, columns, extra, stats, size, others, dim, *settings)
    passes.finish((1, 1, 1), rows, columns, stats, value, size, others, settings[3])
    return value, stats, column


def beta_slopes_and_scales(stats, size):
    """From the statistics of the margin loss: the slopes by each anchor's β (B,), and the two scales."""
    first = margin.BETA_SLOPE.value * size
    return stats[first : first + size], stats[STATISTICS * size :]


def scale_and_bias_slopes(stats, size):
    """From the statistics of the sigmoid loss: the slopes by its scale and its bias, (2,)."""
    first = sigmoid.BY_SCALE.value * size
    sums = stats[first : first + 2 * size].view(2, size).sum(1, dtype=torch.float64)
    return sums.float() * stats[STATISTICS * size]


@functools.cache
def _last_pass(
    kind, flag, size, dim, role, apart, normalize, transform, beta, rows
) -> tuple[Tile, int, CachedLauncher]:
    tile, constants = _tile("backward", size, dim, rows)
    link = links.of(kind, flag)
    functions = {"SLOPE": link.slope, "ROW_SLOPE": link.row_slope, "COUNT": link.saved, "FIRST": SAVED}
    functions |= {"MEASURE": link.measure, "SYMMETRIC": link.symmetric, "PAIRED": link.paired, "TABLE": link.table}
    choices = {"ROLE": role, "APART": apart, "FLAG": flag, "NORMALIZE": normalize, "TRANSFORM": transform, "BETA": beta}
    choices["CENTRED"] = link.centred
    choices["ONE_CHUNK"] = dim <= constants["D"]
    return tile, constants["D"], CachedLauncher(_backward, **functions, **choices, **constants)


def backward(
    kind, role, x, rows, stats, columns, column, others, upstream, by_beta, settings, flag, normalize, transform,
    apart=None, dtype=None,
):  # fmt: skip
    """The gradient by `x`, in its type; `by_beta` () is filled with that by a scalar β where there is one.

    rows: x prepared, and its statistics; columns: the `others` rows it is compared with, and theirs. apart: whether
    rows and columns of the same place are the same item; without it, where they are the batch itself."""
    size, dim = x.shape
    apart = role == "self" if apart is None else apart
    choices = (role, apart, normalize, transform, by_beta is not None, rows.dtype)
    tile, chunk, main = _last_pass(kind, flag, size, dim, *choices)
    dtype = dtype or x.dtype
    one_chunk = dim <= chunk
    # The interpreter cuts numbers to bfloat16 where it should round them.
    by_x = torch.empty_like(x, dtype=torch.float32 if kernels.interpreted() else dtype)
    out = by_x if one_chunk else torch.empty_like(x, dtype=torch.float64)
    slot = stats if by_beta is None else by_beta
    grid = (-(-size // tile.rows), -(-dim // chunk), 1)
    main(grid, x, rows, columns, stats, column, upstream, out, slot, size, others, dim, *settings)
    if not one_chunk:
        row_kernels.long_gradient(x, rows, out, by_x, normalize, transform)
    return by_x if by_x.dtype == dtype else by_x.to(dtype)


def backward_batch_first(
    kind, x, rows, stats, columns, column, others, upstream, by_beta, settings, flag, normalize, transform
):
    """`backward` by a batch that is anchors and first references at once, with the same arguments."""
    size = x.shape[0]
    choices = (settings, flag, normalize, transform, True, torch.float32)
    by_anchors = backward(kind, "anchors", x, rows, stats, columns, column, others, upstream, by_beta, *choices)
    if column is not stats:  # the statistics of the first references
        column = column[: STATISTICS * others].view(STATISTICS, others)[:, :size].flatten()
    by_references = backward(kind, "references", x, rows, column, rows, stats, size, upstream, None, *choices)
    return by_anchors.add_(by_references).to(x.dtype)
