# mypy: ignore-errors
"""The kernels of `kernels.class_loss` that are over anchors alone: own class and margin, value, sum, and the way back.

What an anchor is known by are rows of two buffers, B entries each: of `facts`, float64, the logit of the own class, its
slope by the plain score, its slope by the anchor's length, 0 or NaN, what `rows` is of x, the factor that makes scores
of products, whether it counts, and 1 / |x|; of `stats`, float32, what `class_tiles` takes: the factor times
log2 e, the level, and the derivatives by the others' scores, by the own one and by the length.
"""

import torch

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError('impl="triton" needs triton 3.4 or newer: pip install triton') from error

from nearkin.kernels.class_kernels import INTERPRETS, TINY, _blocks, _options
from nearkin.kernels.numerics import sigmoid, softplus

FACTS, STATS = 8, 5
ROWS = 4  # anchors a program prepares or takes back
SETTLED = 16  # anchors a program settles
SUMMED = 1024  # anchors at a time in the last sum
BOUND = tl.constexpr(torch.finfo(torch.float32).max ** (1 / 3))  # as `distances.upcast` has it
SHORT = tl.constexpr(TINY * TINY)
LN2 = tl.constexpr(0.6931471805599453)
PI = tl.constexpr(3.141592653589793)
STEEPEST = tl.constexpr(2.0**23)  # of the sine by the cosine: float32 tells no nearer angles apart


@triton.jit
def _held(x):
    """Coordinates in float64, those that no square in float32 could survive at the bound; NaN stays NaN."""
    x = x.to(tl.float64)
    return tl.where(x > BOUND, BOUND, tl.where(x < -BOUND, -BOUND, x))


@triton.jit
def _psi(cos, MARGIN: tl.constexpr):
    """SphereFace's ψ from cos θ, and its slope: `core.angles.psi_and_slope`."""
    before = cos * 0.0 + 1.0
    now = cos
    slope_before = cos * 0.0
    slope = slope_before + 1.0
    turns = cos * 0.0
    for j in tl.static_range(1, MARGIN):
        later = 2.0 * cos * now - before
        later_slope = 2.0 * now + 2.0 * cos * slope - slope_before
        before = now
        slope_before = slope
        now = later
        slope = later_slope
        turns += tl.where(cos < tl.cos(cos * 0.0 + PI * j / MARGIN), 1.0, 0.0)
    sign = 1.0 - 2.0 * (turns - 2.0 * tl.floor(turns / 2.0))
    return sign * now - 2.0 * turns, sign * slope


@triton.jit
def _prepare(x, weight, labels, given, rows, places, facts, stats, number, width, dim, classes, scale, margin, along,
             across, lost, GIVEN: tl.constexpr, MARGIN: tl.constexpr, STRAIGHT: tl.constexpr, TIMES: tl.constexpr,
             HALF: tl.constexpr, CENTERS: tl.constexpr, M: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """Rows for the products, own classes, and the logits of these with their slopes."""
    i = tl.program_id(0) * M + tl.arange(0, M)
    there = i < number
    at = i.to(tl.int64)[:, None] * dim
    label = tl.load(labels + i, mask=there, other=-1).to(tl.int64)
    own = tl.minimum(tl.maximum(label, 0), classes - 1)
    squared = tl.zeros((M,), tl.float64)
    spoilt = tl.where((label < -1) | (label >= classes), float("nan"), 0.0).to(tl.float64)
    for start in range(0, dim, D):
        axis = start + tl.arange(0, D)
        value = tl.load(x + at + axis[None, :], mask=there[:, None] & (axis < dim)[None, :], other=0.0).to(tl.float64)
        spoilt += tl.sum(value * 0.0, 1)
        value = _held(value)
        squared += tl.sum(value * value, 1)
    alive = squared > SHORT
    some = squared > 0
    length = tl.sqrt(tl.where(some, squared, 1.0))
    inverse = tl.where(alive, 1.0 / length, 0.0)
    exponent = (length.to(tl.int64, bitcast=True) >> 52) - 1023
    number_given = tl.full((), 0.0, tl.float64) + scale
    if GIVEN:
        number_given = tl.load(given).to(tl.float64)
    power = ((1023 - exponent) << 52).to(tl.float64, bitcast=True)  # brings the row to a length from 1 to 2
    factor = 1.0 / power
    if HALF:  # a power of two rounds nothing
        if MARGIN != "sphere":
            factor = number_given / tl.where(alive, length * power, 1.0)
    else:  # each coordinate is rounded by itself, and the factor in `stats` not at all
        power = power / LN2
        factor = factor * LN2
        if MARGIN != "sphere":
            power = number_given * inverse / LN2
            factor = inverse * 0.0 + LN2
    for start in range(0, dim, D):
        axis = start + tl.arange(0, D)
        mask = there[:, None] & (axis < dim)[None, :]
        value = _held(tl.load(x + at + axis[None, :], mask=mask, other=0.0)) * power[:, None]
        tl.store(rows + at + axis[None, :], value.to(tl.float32).to(rows.dtype.element_ty), mask=mask)
    cos = tl.full((M,), float("-inf"), tl.float64)
    pick = own * CENTERS
    inverse_own = tl.zeros((M,), tl.float64)
    for k in tl.static_range(0, CENTERS):  # of several centres the nearest speaks
        beside = (own * CENTERS + k)[:, None] * dim
        inner = tl.zeros((M,), tl.float64)
        size = tl.zeros((M,), tl.float64)
        for start in range(0, dim, D):
            axis = start + tl.arange(0, D)
            mask = there[:, None] & (axis < dim)[None, :]
            value = _held(tl.load(x + at + axis[None, :], mask=mask, other=0.0))
            w = tl.load(weight + beside + axis[None, :], mask=mask, other=0.0).to(tl.float64)
            inner += tl.sum(value * w, 1)
            size += tl.sum(w * w, 1)
        spoilt += size * 0.0
        inverse_this = tl.where(size > SHORT, 1.0 / tl.sqrt(tl.where(size > SHORT, size, 1.0)), 0.0)
        this = inner * inverse * inverse_this
        better = this > cos
        pick = tl.where(better, own * CENTERS + k, pick)
        inverse_own = tl.where(better, inverse_this, inverse_own)
        cos = tl.where(better, this, cos)
    upright = ~alive | (inverse_own == 0)
    by_length = tl.zeros((M,), tl.float64)
    if MARGIN == "sphere":
        psi, slope = _psi(cos, TIMES)
        psi = (number_given * cos + psi) / (1.0 + number_given)
        slope = tl.where(alive, (number_given + slope) / (1.0 + number_given), 0.0)
        target = tl.where(some, length, 0.0) * psi
        by_length = psi - cos * slope
    else:
        if MARGIN == "angle":
            far = tl.zeros((M,), tl.float64)  # the sine, exact near 0 and π: how far the unit row is from cos θ · w
            beside = pick[:, None] * dim
            for start in range(0, dim, D):
                axis = start + tl.arange(0, D)
                mask = there[:, None] & (axis < dim)[None, :]
                value = _held(tl.load(x + at + axis[None, :], mask=mask, other=0.0)) * inverse[:, None]
                w = tl.load(weight + beside + axis[None, :], mask=mask, other=0.0).to(tl.float64)
                value -= cos[:, None] * (w * inverse_own[:, None])
                far += tl.sum(value * value, 1)
            sin = tl.where(upright, 1.0, tl.sqrt(far))
            steep = tl.where(sin > 1e-14, cos / tl.where(sin > 1e-14, sin, 1.0), 0.0)
            steep = tl.minimum(tl.maximum(steep, -STEEPEST), STEEPEST)
            within = cos > -along
            target = number_given * tl.where(within, cos * along - sin * across, cos - margin * across)
            slope = tl.where(within, along + across * steep, 1.0)
            if STRAIGHT:
                slope = slope * 0.0 + 1.0
        else:
            target = number_given * (cos - margin) + tl.where(inverse_own == 0, lost, 0.0)
            slope = cos * 0.0 + 1.0
    tl.store(places + i, own.to(tl.int32), mask=there)
    tl.store(places + width + i, pick.to(tl.int32), mask=there)
    tl.store(facts + i, target, mask=there)
    tl.store(facts + width + i, slope, mask=there)
    tl.store(facts + 2 * width + i, by_length, mask=there)
    tl.store(facts + 3 * width + i, spoilt, mask=there)
    tl.store(facts + 4 * width + i, power, mask=there)
    tl.store(facts + 5 * width + i, factor, mask=there)
    tl.store(facts + 6 * width + i, tl.where(label != -1, 1.0, 0.0), mask=there)
    tl.store(facts + 7 * width + i, inverse, mask=there)
    tl.store(stats + i, (factor / LN2).to(tl.float32), mask=there)


@triton.jit
def _settle(peaks, sums, facts, stats, number, width, parts, classes, TOLD: tl.constexpr, SOFT: tl.constexpr,
            ACTIVE: tl.constexpr, M: tl.constexpr, S: tl.constexpr):  # fmt: skip
    """Cross-entropies from partial peaks and sums, and the derivatives: TOLD: only if there are others; SOFT: the own
    class is in the sum too."""
    i = tl.program_id(0) * M + tl.arange(0, M)
    there = i < number
    peak = tl.full((M,), float("-inf"), tl.float32)
    for start in range(0, parts, S):
        s = start + tl.arange(0, S)
        mask = (s < parts)[:, None] & there[None, :]
        found = tl.load(peaks + s.to(tl.int64)[:, None] * number + i[None, :], mask=mask, other=float("-inf"))
        peak = tl.maximum(peak, tl.max(found, 0))
    level = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.zeros((M,), tl.float64)
    for start in range(0, parts, S):
        s = start + tl.arange(0, S)
        mask = (s < parts)[:, None] & there[None, :]
        here = s.to(tl.int64)[:, None] * number + i[None, :]
        found = tl.load(peaks + here, mask=mask, other=float("-inf"))
        each = tl.load(sums + here, mask=mask, other=0.0) * tl.exp2(found - level[None, :])
        total += tl.sum(each.to(tl.float64), 0)
    target = tl.load(facts + i, mask=there, other=0.0)
    factor = tl.load(facts + 5 * width + i, mask=there, other=0.0)
    counts = tl.load(facts + 6 * width + i, mask=there, other=0.0) > 0
    others = total > 0
    log = (level.to(tl.float64) + tl.log2(tl.where(others, total, 1.0))) * LN2 - target
    if SOFT:
        value = tl.where(others, softplus(log), 0.0)
        share = tl.where(others, sigmoid(log), 0.0)
    else:
        value = log
        share = tl.where(others, 1.0, 0.0)
    if TOLD:
        counts = counts & (classes > 1)
    if ACTIVE:
        counts = counts & ((value > 0) | (value != value))
    taint = tl.load(facts + 3 * width + i, mask=there, other=0.0) + (total + target) * 0.0
    share = tl.where(counts, share, 0.0)
    tl.store(facts + i, tl.where(counts, value, 0.0), mask=there)
    tl.store(facts + 3 * width + i, taint, mask=there)
    tl.store(facts + 6 * width + i, tl.where(counts, 1.0, 0.0), mask=there)
    pull = share / tl.where(others, total, 1.0) * factor
    push = -share * tl.load(facts + width + i, mask=there, other=0.0) * factor
    by_length = -share * tl.load(facts + 2 * width + i, mask=there, other=0.0)
    tl.store(stats + width + i, level, mask=there)
    tl.store(stats + 2 * width + i, pull.to(tl.float32), mask=there)
    tl.store(stats + 3 * width + i, push.to(tl.float32), mask=there)
    tl.store(stats + 4 * width + i, by_length.to(tl.float32), mask=there)


@triton.jit
def _sum(facts, value, gain, number, width, MEAN: tl.constexpr, N: tl.constexpr):
    """The loss, and what every derivative is to be multiplied with. One program: the same sum every time."""
    total = tl.zeros((N,), tl.float64)
    counted = tl.zeros((N,), tl.float64)
    for start in range(0, number, N):
        i = start + tl.arange(0, N)
        there = i < number
        total += tl.load(facts + i, mask=there, other=0.0) + tl.load(facts + 3 * width + i, mask=there, other=0.0)
        counted += tl.load(facts + 6 * width + i, mask=there, other=0.0)
    scale = tl.full((), 1.0, tl.float64)
    if MEAN:
        scale = 1.0 / tl.maximum(tl.sum(counted), 1.0)
    tl.store(value, (tl.sum(total) * scale).to(tl.float32))
    tl.store(gain, scale.to(tl.float32))


@triton.jit
def _return(by_rows, x, facts, stats, gain, upstream, by_x, number, width, dim, NORMALIZE: tl.constexpr,
            M: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """A gradient by `rows` as one by the embeddings."""
    i = tl.program_id(0) * M + tl.arange(0, M)
    there = i < number
    at = i.to(tl.int64)[:, None] * dim
    power = tl.load(facts + 4 * width + i, mask=there, other=0.0)
    inverse = tl.load(facts + 7 * width + i, mask=there, other=0.0)
    lying = tl.zeros((M,), tl.float64)  # the part along the unit row, which it is to have no more
    if NORMALIZE:
        power = tl.where(inverse == 0, 0.0, power)
        for start in range(0, dim, D):
            axis = start + tl.arange(0, D)
            mask = there[:, None] & (axis < dim)[None, :]
            value = _held(tl.load(x + at + axis[None, :], mask=mask, other=0.0)) * inverse[:, None]
            lying += tl.sum(tl.load(by_rows + at + axis[None, :], mask=mask, other=0.0).to(tl.float64) * value, 1)
        lying *= power
    else:
        grown = (tl.load(gain) * tl.load(upstream)).to(tl.float64)
        lying -= grown * tl.load(stats + 4 * width + i, mask=there, other=0.0).to(tl.float64)
    for start in range(0, dim, D):
        axis = start + tl.arange(0, D)
        mask = there[:, None] & (axis < dim)[None, :]
        value = tl.load(x + at + axis[None, :], mask=mask, other=0.0).to(tl.float64)
        held = _held(value)
        gradient = tl.load(by_rows + at + axis[None, :], mask=mask, other=0.0).to(tl.float64) * power[:, None]
        gradient = tl.where(held == value, gradient - lying[:, None] * (held * inverse[:, None]), 0.0)
        tl.store(by_x + at + axis[None, :], gradient.to(tl.float32).to(by_x.dtype.element_ty), mask=mask)


def _chunk(dim):
    return max(16, min(1 << (dim - 1).bit_length(), 512))


def prepare(x, weight, labels, given, numbers, margin, straight, times, centers, halves):
    """Rows (B, D) for the products, own classes and their rows (2, B'), and the buffers; B' is B or a little more.

    numbers: scale (SphereFace: its annealing), margin, cosine and sine of it, and what a class without a direction
    scores. given: a tensor that takes the place of the first.
    """
    number, dim = x.shape
    width = _blocks(number, 16) * 16  # rows of the buffers begin where wide loads can
    rows = torch.empty(number, dim, device=x.device, dtype=torch.bfloat16 if halves else torch.float32)
    places = torch.empty(2, width, device=x.device, dtype=torch.int32)
    facts = torch.empty(FACTS, width, device=x.device, dtype=torch.float64)
    stats = torch.empty(STATS, width, device=x.device, dtype=torch.float32)
    wanted = {"GIVEN": given is not None, "MARGIN": margin, "STRAIGHT": straight, "TIMES": times}
    wanted |= {"HALF": halves, "CENTERS": centers}
    read = (x, weight, labels, stats if given is None else given)
    sizes = (number, width, dim, weight.shape[0] // centers)
    _prepare[(_blocks(number, ROWS),)](
        *read, rows, places, facts, stats, *sizes, *numbers, **wanted, M=ROWS, D=_chunk(dim), **_options()
    )
    return rows, places, facts, stats


def settle(peaks, sums, facts, stats, classes, told, soft, reduction):
    """The loss, and what its derivatives are to be multiplied with: two scalars."""
    parts, number = peaks.shape
    width = facts.shape[1]
    grid = (_blocks(number, SETTLED),)
    wanted = {"TOLD": told, "SOFT": soft, "ACTIVE": reduction == "active"}
    _settle[grid](peaks, sums, facts, stats, number, width, parts, classes, **wanted, M=SETTLED, S=64, **_options())
    value, gain = (torch.empty((), device=facts.device, dtype=torch.float32) for _ in range(2))
    _sum[(1,)](facts, value, gain, number, width, MEAN=reduction != "sum", N=SUMMED, **_options())
    return value, gain


def returned(by_rows, x, facts, stats, gain, upstream, normalize):
    """The gradient by the embeddings, in their type, from that by `rows`."""
    number, dim = x.shape
    by_x = torch.empty_like(x, dtype=torch.float32 if INTERPRETS else x.dtype)
    given = (by_rows, x, facts, stats, gain, upstream, by_x, number, facts.shape[1], dim)
    _return[(_blocks(number, ROWS),)](*given, NORMALIZE=normalize, M=ROWS, D=_chunk(dim), **_options())
    return by_x.to(x.dtype)  # the interpreter cuts to bfloat16, unrounded
