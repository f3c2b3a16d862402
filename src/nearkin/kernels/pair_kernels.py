# mypy: ignore-errors
"""The kernels of `kernels.pairs`, and how large their tiles are. Imported when the first of them is wanted.

A program keeps the statistics of a few anchors in registers while all references pass by: a slot for each entry of a
tile, merged once after the last. What the gradient needs of an anchor later are a few numbers; it makes every tile of
distances or similarities again, in the same order, so that both passes see the same. Statistics are rows of a float32
buffer, B entries each: 0 to 2 the sum of an anchor's terms, their number, how many are active; 3 to 5 the same of
strangers where these are reduced by themselves; 6 to 11 what the gradient needs, which each kind fills in its own way.
"""

import functools
from typing import NamedTuple

import torch

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError('impl="triton" needs triton: pip install triton') from error

from nearkin import kernels
from nearkin.kernels import row_kernels
from nearkin.kernels.launch import CachedLauncher
from nearkin.kernels.row_kernels import SQUARED, TAINT, apart, class_ids, dots, fact, kinship, whole_gradient

EUCLIDEAN = {"contrastive", "margin", "lifted", "lossless"}  # the others are of inner products
STATISTICS = 12  # rows of the buffer; the scales of the gradient follow them
SCALES = tl.constexpr(STATISTICS)
NOTHING = tl.constexpr(torch.finfo(torch.float32).min / 4)  # as `core.reduce.nothing`
ROUNDING = tl.constexpr(2 * row_kernels.EPS)
HIGH = tl.constexpr(2**16)  # two counts share a slot: one goes by 1, the other by this


class Tile(NamedTuple):
    """Rows a program works for, rows that pass by at a step and coordinates of a product at a time (a whole row at once
    where they are as many); warps a program, steps in flight."""

    rows: int
    others: int
    step: int
    warps: int
    stages: int


# By the most rows of the batch; few rows need small blocks to fill the device.
FORWARD = {2048: Tile(16, 64, 128, 8, 3), 8192: Tile(32, 64, 128, 8, 3), 2**31: Tile(64, 64, 128, 8, 2)}
BACKWARD = {2048: Tile(16, 64, 128, 8, 2), 2**31: Tile(32, 64, 128, 8, 2)}
INTERPRETED = Tile(32, 32, 32, 4, 1)  # small, so that small tests have several tiles and ragged ends
WHOLE = 256  # coordinates of a gradient that one program sums; longer rows are served in chunks
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
def _inner(a, b, mine, i, j, PAD: tl.constexpr, K: tl.constexpr, ONCE: tl.constexpr):
    """Inner products (M, N) of prepared rows, K coordinates at a time, or with rows i as they are at once."""
    if ONCE:
        inner = tl.dot(mine, tl.trans(_rows(b, j, tl.arange(0, PAD), PAD, PAD)), out_dtype=tl.float64)
    else:
        inner = dots(a, b, i, j, PAD, K)
    return inner


@triton.jit
def _measured(inner, left, right, i, j, dim, EUCLID: tl.constexpr, ROOT: tl.constexpr, SELF: tl.constexpr):
    """Distances (squared without ROOT) or similarities in float32, also those whose squares float32 does not hold."""
    if EUCLID:
        squared = apart(inner, left, right, i, j, tl.full((), ROUNDING, tl.float64) * dim, SELF)
        if ROOT:
            small = squared < 1e-18
            scaled = tl.where(small, squared * 1208925819614629174706176.0, squared)  # 2^80
            root = tl.sqrt(scaled.to(tl.float32))
            value = tl.where(small, root * 9.094947017729282e-13, root)  # 2^-40
        else:
            value = squared.to(tl.float32)
    else:
        value = inner.to(tl.float32)
    return value


@triton.jit
def _stream(peak, total, values, mask):
    """Takes a masked value into the running log-sum-exp of each slot: a peak, and a sum below it."""
    gap = tl.where(mask, values, float("-inf")) - peak
    small = tl.exp(-tl.abs(gap))
    total = tl.where(gap > 0, total * small + 1.0, total + small)
    return tl.where(gap > 0, values, peak), total


@triton.jit
def _stream_wide(peak, total, values, mask):
    """The same of float64 values, whose peaks are rounded: exponents as large as a scale of 80 need their digits."""
    gap = tl.where(mask, values, float("-inf")) - peak
    top = values.to(tl.float32)
    risen = total * tl.exp(tl.where(gap > 0, peak - top, 0.0)) + 1.0 + (values - top).to(tl.float32)
    total = tl.where(gap > 0, risen, total + tl.exp(tl.minimum(gap, 0.0).to(tl.float32)))
    return tl.where(gap > 0, top, peak), total


@triton.jit
def _circle(value, margin, scale):
    """Exponents of kin and of strangers, and their slopes, whose weights carry no gradient; all in float64."""
    margin = tl.cast(margin, tl.float64)
    kin = -scale * tl.maximum(1.0 + margin - value, 0.0)
    stranger = scale * tl.maximum(value + margin, 0.0)
    return kin * (value - (1.0 - margin)), stranger * (value - margin), kin, stranger


@triton.jit
def _settle(peaks, totals):
    """From slots (M, N) the log-sum-exps (M,) in float64, NOTHING where nobody passed; their peaks; and what
    e^(value - peak) is to be multiplied with to be a share of 1: a large log-sum-exp in float32 has too few digits."""
    peak = tl.max(peaks, 1)
    total = tl.sum(totals.to(tl.float64) * tl.exp(peaks - peak[:, None]).to(tl.float64), 1)
    found = total > 0
    total = tl.where(found, total, 1.0)
    peak = tl.where(found, peak, 0.0)
    rest = tl.where(found, tl.log(total) + peak.to(tl.float64), NOTHING)
    return rest, peak, tl.where(found, 1.0 / total, 0.0).to(tl.float32)


@triton.jit
def _softplus(x):
    """log(1 + e^x), exact to the last digits for every x."""
    small = tl.exp(-tl.abs(x))
    whole = 1.0 + small
    rest = tl.where(whole == 1.0, small, tl.log(whole) * (small / tl.where(whole == 1.0, 1.0, whole - 1.0)))
    return tl.maximum(x, 0.0) + rest


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _either(a, b):
    """log(e^a + e^b)."""
    return tl.maximum(a, b) + _softplus(-tl.abs(a - b))


@triton.jit
def _sum(slots):
    return tl.sum(slots.to(tl.float64), 1)


@triton.jit
def _keep(stats, place: tl.constexpr, i, there, number, value):
    tl.store(stats + place * number + i, value.to(tl.float32), mask=there)


@triton.jit
def _kept(stats, place: tl.constexpr, i, there, number):
    return tl.load(stats + place * number + i, mask=there, other=0.0)


@triton.jit
def _forward(a, b, extra, stats, number, others, dim, p, q, u, s, KIND: tl.constexpr,
             SELF: tl.constexpr, FLAG: tl.constexpr, ACTIVE: tl.constexpr, BETA: tl.constexpr, EUCLID: tl.constexpr,
             PAD: tl.constexpr, K: tl.constexpr, ONCE: tl.constexpr, M: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """Statistics of M anchors from all references. p, q, u, s: the settings of the kind, FLAG its yes or no."""
    i = tl.program_id(0) * M + tl.arange(0, M)
    there = i < number
    own = class_ids(a, i, there, number, PAD)
    left = fact(a, SQUARED, i, there, number, PAD)
    safe = tl.minimum(i, number - 1)
    mine = 0.0
    if ONCE:
        mine = _rows(a, safe, tl.arange(0, PAD), PAD, PAD)
    ROOT: tl.constexpr = KIND != "lossless"
    near = tl.zeros((M, N), tl.float32)
    far = tl.zeros((M, N), tl.float32)
    kin = tl.zeros((M, N), tl.int32)
    pushed = tl.zeros((M, N), tl.int32)
    peak = tl.full((M, N), NOTHING, tl.float32)
    total = tl.zeros((M, N), tl.float32)
    other_peak = tl.full((M, N), NOTHING, tl.float32)
    other_total = tl.zeros((M, N), tl.float32)
    known = tl.zeros((N,), tl.int32)
    size = tl.zeros((N,), tl.float64)
    if KIND == "margin":  # β: a number, a scalar, or one an anchor
        beta = tl.zeros((M,), tl.float32) + u
        if BETA == "scalar":
            beta = tl.zeros((M,), tl.float32) + tl.load(extra)
        if BETA == "anchor":
            beta = tl.load(extra + i, mask=there, other=0.0)
    if KIND == "npair" and SELF:
        first = _kept(stats, 10, i, there, number) > 0
    if KIND == "multi_similarity" and FLAG:  # who is selected depends on the farthest kin and the nearest stranger
        farthest = tl.full((M, N), NOTHING, tl.float32)
        nearest = tl.full((M, N), -NOTHING, tl.float32)
        for start in range(0, others, N):
            j = start + tl.arange(0, N)
            real = j < others
            positive, negative = kinship(own, class_ids(b, j, real, others, PAD), i, j, there, real, SELF)
            inner = _inner(a, b, mine, safe, tl.minimum(j, others - 1), PAD, K, ONCE)
            value = 1.0 - inner.to(tl.float32)
            farthest = tl.where(positive, tl.maximum(farthest, value), farthest)
            nearest = tl.where(negative, tl.minimum(nearest, value), nearest)
        selects_kin = tl.min(nearest, 1) - s
        selects = tl.max(farthest, 1) + s
    for start in range(0, others, N):
        j = start + tl.arange(0, N)
        real = j < others
        other = class_ids(b, j, real, others, PAD)
        positive, negative = kinship(own, other, i, j, there, real, SELF)
        inner = _inner(a, b, mine, safe, tl.minimum(j, others - 1), PAD, K, ONCE)
        right = fact(b, SQUARED, j, real, others, PAD)
        value = _measured(inner, left, right, i, j, dim, EUCLID, ROOT, SELF)
        if KIND == "contrastive" or KIND == "margin" or KIND == "lossless" or KIND == "multi_similarity":
            known += (real & (other != -1)).to(tl.int32)
        if KIND == "contrastive":  # p margin, q positive margin, s 1 for one mean over all pairs; FLAG: squared
            pull = tl.maximum(value - q, 0.0)
            push = tl.maximum(p - value, 0.0)
            kin += positive.to(tl.int32)
            if ACTIVE:
                kin += tl.where(positive & (pull > 0), HIGH, 0)
                pushed += (negative & (push > 0)).to(tl.int32)
            if FLAG:
                pull *= pull
                push *= push
            near += tl.where(positive, pull, 0.0)
            far += tl.where(negative, push, 0.0)
        elif KIND == "margin":  # p margin, q ν, u β where it is a number
            pull = tl.where(positive, tl.maximum(p + value - beta[:, None], 0.0), 0.0)
            push = tl.where(negative, tl.maximum(p - value + beta[:, None], 0.0), 0.0)
            near += pull + push
            kin += positive.to(tl.int32) + tl.where(pull > 0, HIGH, 0)
            pushed += (push > 0).to(tl.int32)
        elif KIND == "lossless":  # p 1 / dimensions, q ε; FLAG: by a sigmoid
            share = value * p
            kin += positive.to(tl.int32)
            paid = -tl.log(tl.where(positive, tl.maximum(1.0 - share, 0.0), share) + q)
            near += tl.where(positive, paid, 0.0)
            far += tl.where(negative, paid, 0.0)
        elif KIND == "lifted":  # p margin: threats only
            peak, total = _stream(peak, total, p - value, negative)
        elif KIND == "multi_similarity":  # p α, q β, u base, s ε; FLAG: selected
            if FLAG:
                positive = positive & (1.0 - value > selects_kin[:, None])
                negative = negative & (1.0 - value < selects[:, None])
            peak, total = _stream(peak, total, -p * (value - u), positive)
            other_peak, other_total = _stream(other_peak, other_total, q * (value - u), negative)
        elif KIND == "circle":  # p margin, q scale
            pull, push, _, _ = _circle(inner, p, q)
            peak, total = _stream_wide(peak, total, pull, positive)
            other_peak, other_total = _stream_wide(other_peak, other_total, push, negative)
        elif KIND == "infonce":  # p temperature: strangers only
            peak, total = _stream(peak, total, value / p, negative)
        else:  # supcon and npair; p temperature
            if KIND == "npair":
                heard = real & (other != -1)
                if SELF:
                    heard = heard & (_kept(stats, 10, j, real, number) == 0)
                    positive = positive & first[:, None] & heard[None, :]
                    negative = negative & first[:, None] & heard[None, :]
                size += tl.where(heard, right, 0.0)
                known += heard.to(tl.int32)
            logits = value / p
            kin += positive.to(tl.int32)
            near += tl.where(positive, logits, 0.0)
            peak, total = _stream(peak, total, logits, positive | negative)

    if KIND == "contrastive" or KIND == "margin" or KIND == "lossless" or KIND == "multi_similarity":
        valid = tl.sum(known, 0)
        if SELF:
            valid -= 1
        valid = tl.where(own != -1, valid, 0)
    if KIND == "contrastive":
        positives = tl.sum(kin & (HIGH - 1), 1)
        _keep(stats, 0, i, there, number, _sum(near))
        _keep(stats, 1, i, there, number, positives)
        _keep(stats, 2, i, there, number, tl.sum(kin // HIGH, 1))
        _keep(stats, 3, i, there, number, _sum(far))
        _keep(stats, 4, i, there, number, valid - positives)
        _keep(stats, 5, i, there, number, tl.sum(pushed, 1))
    elif KIND == "margin":
        positives = tl.sum(kin & (HIGH - 1), 1).to(tl.float32)
        pulled = tl.sum(kin // HIGH, 1)
        push = tl.sum(pushed, 1)
        _keep(stats, 0, i, there, number, _sum(near) + q * beta * positives)
        _keep(stats, 1, i, there, number, valid)
        _keep(stats, 2, i, there, number, pulled + push)
        _keep(stats, 6, i, there, number, beta)
        _keep(stats, 7, i, there, number, (push - pulled).to(tl.float32) + q * positives)
    elif KIND == "lossless":
        positives = tl.sum(kin, 1)
        negatives = valid - positives
        _keep(stats, 0, i, there, number, _sum(near) * negatives.to(tl.float64) + _sum(far) * positives.to(tl.float64))
        _keep(stats, 6, i, there, number, positives)
        _keep(stats, 7, i, there, number, negatives)
    elif KIND == "lifted":
        rest, top, part = _settle(peak, total)
        _keep(stats, 6, i, there, number, rest)
        _keep(stats, 7, i, there, number, top)
        _keep(stats, 8, i, there, number, part)
    elif KIND == "infonce":
        rest, top, part = _settle(peak, total)
        slope = tl.zeros((M, N), tl.float32)
        for start in range(0, others, N):
            j = start + tl.arange(0, N)
            real = j < others
            positive, negative = kinship(own, class_ids(b, j, real, others, PAD), i, j, there, real, SELF)
            if tl.max(tl.max(positive.to(tl.int32), 1), 0) > 0:
                inner = _inner(a, b, mine, safe, tl.minimum(j, others - 1), PAD, K, ONCE)
                gap = rest.to(tl.float32)[:, None] - inner.to(tl.float32) / p
                paid = _softplus(gap)
                near += tl.where(positive, paid, 0.0)
                kin += positive.to(tl.int32) + tl.where(positive & (paid > 0), HIGH, 0)
                slope += tl.where(positive, _sigmoid(gap), 0.0)
        _keep(stats, 0, i, there, number, _sum(near))
        _keep(stats, 1, i, there, number, tl.sum(kin & (HIGH - 1), 1))
        _keep(stats, 2, i, there, number, tl.sum(kin // HIGH, 1))
        _keep(stats, 6, i, there, number, top)
        _keep(stats, 7, i, there, number, _sum(slope) * part)
        _keep(stats, 8, i, there, number, rest)
    else:  # one term an anchor, which may count or not
        rest, top, part = _settle(peak, total)
        _keep(stats, 6, i, there, number, top)
        if KIND == "multi_similarity" or KIND == "circle":
            other_rest, other_top, other_part = _settle(other_peak, other_total)
            if KIND == "multi_similarity":
                counts = valid > 0
                paid = _softplus(rest.to(tl.float32)) / p + _softplus(other_rest.to(tl.float32)) / q
                part *= _sigmoid(rest.to(tl.float32))
                other_part *= _sigmoid(other_rest.to(tl.float32))
                if FLAG:
                    _keep(stats, 10, i, there, number, selects_kin)
                    _keep(stats, 11, i, there, number, selects)
            else:
                counts = (part > 0) & (other_part > 0)
                whole = tl.where(counts, rest + other_rest, 0.0).to(tl.float32)
                paid = _softplus(whole)
                part *= tl.where(counts, _sigmoid(whole), 0.0)
                other_part *= tl.where(counts, _sigmoid(whole), 0.0)
            _keep(stats, 7, i, there, number, part)
            _keep(stats, 8, i, there, number, other_top)
            _keep(stats, 9, i, there, number, other_part)
        else:
            positives = tl.sum(kin, 1)
            counts = positives > 0
            each = tl.maximum(positives, 1).to(tl.float64)
            paid = (rest - _sum(near) / each).to(tl.float32)
            _keep(stats, 7, i, there, number, 1.0 / each)
            _keep(stats, 9, i, there, number, part)
        active = counts & (paid > 0)
        if ACTIVE and KIND != "npair":
            counts = active
        _keep(stats, 0, i, there, number, tl.where(counts, paid, 0.0))
        _keep(stats, 1, i, there, number, counts.to(tl.float32))
        _keep(stats, 2, i, there, number, active.to(tl.float32))
        if KIND == "npair":  # the mean square of the references that anchors meet is the same for all
            used = tl.sum(known, 0)
            _keep(stats, 3, i, there, number, left)
            _keep(stats, 4, i, there, number, tl.zeros((M,), tl.float64) + tl.sum(size, 0) / tl.maximum(used, 1))
            _keep(stats, 5, i, there, number, tl.zeros((M,), tl.float32) + used)
        if KIND == "supcon":
            _keep(stats, 8, i, there, number, counts.to(tl.float32))


@triton.jit
def _lifted(a, b, stats, column, number, others, dim, SELF: tl.constexpr, PAD: tl.constexpr, K: tl.constexpr,
            ONCE: tl.constexpr, M: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """Sums over the positive pairs of M anchors whose threats, and those of the columns, are known."""
    i = tl.program_id(0) * M + tl.arange(0, M)
    there = i < number
    own = class_ids(a, i, there, number, PAD)
    left = fact(a, SQUARED, i, there, number, PAD)
    safe = tl.minimum(i, number - 1)
    mine = 0.0
    if ONCE:
        mine = _rows(a, safe, tl.arange(0, PAD), PAD, PAD)
    row = _kept(stats, 6, i, there, number)
    part = _kept(stats, 8, i, there, number)
    paid = tl.zeros((M, N), tl.float32)
    kin = tl.zeros((M, N), tl.int32)
    slope = tl.zeros((M, N), tl.float32)
    for start in range(0, others, N):
        j = start + tl.arange(0, N)
        real = j < others
        positive, _negative = kinship(own, class_ids(b, j, real, others, PAD), i, j, there, real, SELF)
        if tl.max(tl.max(positive.to(tl.int32), 1), 0) > 0:
            inner = _inner(a, b, mine, safe, tl.minimum(j, others - 1), PAD, K, ONCE)
            right = fact(b, SQUARED, j, real, others, PAD)
            value = _measured(inner, left, right, i, j, dim, True, True, SELF)
            threat = _kept(column, 6, j, real, others)[None, :]
            cost = tl.where(positive, tl.maximum(_either(row[:, None], threat) + value, 0.0), 0.0)
            kin += positive.to(tl.int32) + tl.where(cost * cost * 0.5 > 0, HIGH, 0)
            paid += cost * cost * 0.5
            slope += cost * _sigmoid(row[:, None] - threat)
    _keep(stats, 0, i, there, number, _sum(paid))
    _keep(stats, 1, i, there, number, tl.sum(kin & (HIGH - 1), 1))
    _keep(stats, 2, i, there, number, tl.sum(kin // HIGH, 1))
    _keep(stats, 9, i, there, number, _sum(slope) * part)


@triton.jit
def _firsts(a, stats, number, PAD: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """For N-pair in a batch alone: 1 for items that have no kin before them."""
    i = tl.program_id(0) * M + tl.arange(0, M)
    there = i < number
    own = class_ids(a, i, there, number, PAD)
    before = tl.zeros((M, N), tl.int32)
    for start in range(0, tl.minimum(tl.program_id(0) * M + M, number), N):
        j = start + tl.arange(0, N)
        real = j < number
        positive, _negative = kinship(own, class_ids(a, j, real, number, PAD), i, j, there, real, True)
        before += (positive & (j[None, :] < i[:, None])).to(tl.int32)
    _keep(stats, 10, i, there, number, (tl.sum(before, 1) == 0).to(tl.float32))


@triton.jit
def _mean(total, number, REDUCTION: tl.constexpr):
    """The value of a sum of `number` terms, and what a term's slope is multiplied with."""
    share = tl.where(number > 0, 1.0 / tl.maximum(number, 1.0), 0.0)
    if REDUCTION == "sum":
        share = share * 0.0 + 1.0
    return total * share, share


@triton.jit
def _spoilt(a, number, PAD: tl.constexpr, N: tl.constexpr):
    """0, or NaN if a prepared row is not finite."""
    taint = tl.zeros((N,), tl.float64)
    for start in range(0, number, N):
        i = start + tl.arange(0, N)
        taint += fact(a, TAINT, i, i < number, number, PAD)
    return tl.sum(taint, 0)


@triton.jit
def _finish(a, b, stats, value, number, others, penalty, KIND: tl.constexpr, SELF: tl.constexpr, PAD: tl.constexpr,
            REDUCTION: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """The loss from its anchors' statistics, and what the gradient of a term is multiplied with."""
    total = tl.zeros((N,), tl.float64)
    terms = tl.zeros((N,), tl.float64)
    far = tl.zeros((N,), tl.float64)
    strangers = tl.zeros((N,), tl.float64)
    for start in range(0, number, N):
        i = start + tl.arange(0, N)
        there = i < number
        paid = _kept(stats, 0, i, there, number).to(tl.float64)
        if KIND == "lossless":
            terms += _kept(stats, 6, i, there, number).to(tl.float64) * _kept(stats, 7, i, there, number).to(tl.float64)
        elif KIND == "npair":
            counts = _kept(stats, 1, i, there, number) > 0
            size = _kept(stats, 3, i, there, number).to(tl.float64) + _kept(stats, 4, i, there, number).to(tl.float64)
            paid += penalty * 0.25 * size
            if REDUCTION == "active":
                counts = counts & (paid > 0)
            _keep(stats, 8, i, there, number, counts.to(tl.float32))
            paid = tl.where(counts, paid, 0.0)
            terms += counts.to(tl.float64)
        elif REDUCTION == "active":
            terms += _kept(stats, 2, i, there, number).to(tl.float64)
        else:
            terms += _kept(stats, 1, i, there, number).to(tl.float64)
        total += paid
        if KIND == "contrastive":
            far += _kept(stats, 3, i, there, number).to(tl.float64)
            if REDUCTION == "active":
                strangers += _kept(stats, 5, i, there, number).to(tl.float64)
            else:
                strangers += _kept(stats, 4, i, there, number).to(tl.float64)
        if KIND == "margin":  # `far` for the slope by β; a β that is not finite spoils the value
            far += _kept(stats, 7, i, there, number).to(tl.float64)
            strangers += (_kept(stats, 6, i, there, number) * 0.0).to(tl.float64)
    spoilt = _spoilt(a, number, PAD, N)
    if not SELF:
        spoilt += _spoilt(b, others, PAD, N)
    whole, share = _mean(tl.sum(total, 0), tl.sum(terms, 0), REDUCTION)
    other_share = share
    if KIND == "contrastive":
        pulled, pushed = tl.sum(terms, 0), tl.sum(strangers, 0)
        both = tl.where(penalty > 0, 1.0, 0.0)  # one mean over all pairs: each counts among the others
        whole, share = _mean(tl.sum(total, 0), pulled + both * pushed, REDUCTION)
        more, other_share = _mean(tl.sum(far, 0), pushed + both * pulled, REDUCTION)
        whole = (whole + more) * 0.5
        share = share * 0.5
        other_share = other_share * 0.5
    if KIND == "npair":
        other_share = share * tl.sum(terms, 0) * penalty * 0.5 / tl.maximum(tl.load(stats + 5 * number), 1.0)
    if KIND == "margin":
        other_share = share * tl.sum(far, 0)
        spoilt += tl.sum(strangers, 0)
    tl.store(value, (whole + spoilt).to(tl.float32))
    tl.store(stats + SCALES * number, share.to(tl.float32))
    tl.store(stats + SCALES * number + 1, other_share.to(tl.float32))


@triton.jit
def _slope(value, positive, negative, q0, q1, q2, q3, q4, q5, o0, o1, o2, c0, c1, p, q, u, KIND: tl.constexpr,
           SELF: tl.constexpr, FLAG: tl.constexpr):  # fmt: skip
    """By how much the loss grows with each entry of a tile. q0 to q5 are of its anchors, o0 to o2 of references."""
    if KIND == "contrastive":
        if FLAG:
            pull = 2.0 * tl.maximum(value - q, 0.0)
            push = 2.0 * tl.maximum(p - value, 0.0)
        else:
            pull = (value > q).to(tl.float32)
            push = (value < p).to(tl.float32)
        return tl.where(positive, c0 * pull, tl.where(negative, -c1 * push, 0.0))
    elif KIND == "margin":
        pull = positive & (p + value - q0 > 0)
        push = negative & (p - value + q0 > 0)
        return tl.where(pull, c0, tl.where(push, -c0, 0.0))
    elif KIND == "lossless":
        share = value * p
        pull = tl.where(share <= 1.0, q1 / (tl.maximum(1.0 - share, 0.0) + q), 0.0)
        push = q0 / (share + q)
        return c0 * p * tl.where(positive, pull, tl.where(negative, -push, 0.0))
    elif KIND == "lifted":
        pull = tl.maximum(_either(q0, o0) + value, 0.0)
        push = q3 * tl.exp(p - value - q1) + o2 * tl.exp(p - value - o1)
        return c0 * tl.where(positive, pull, tl.where(negative, -push, 0.0))
    elif KIND == "multi_similarity":
        if FLAG:
            positive = positive & (1.0 - value > q4)
            negative = negative & (1.0 - value < q5)
        pull = q1 * tl.exp(-p * (value - u) - q0)
        push = q3 * tl.exp(q * (value - u) - q2)
        return c0 * tl.where(positive, -pull, tl.where(negative, push, 0.0))
    elif KIND == "circle":
        near, far, pull, push = _circle(value, p, q)
        pull = pull.to(tl.float32) * q1 * tl.exp((near - q0).to(tl.float32))
        push = push.to(tl.float32) * q3 * tl.exp((far - q2).to(tl.float32))
        return c0 * tl.where(positive, pull, tl.where(negative, push, 0.0))
    elif KIND == "infonce":
        logits = value / p
        pull = _sigmoid(q2 - logits)
        push = q1 * tl.exp(logits - q0)
        return c0 / p * tl.where(positive, -pull, tl.where(negative, push, 0.0))
    else:  # supcon and npair
        met = (positive | negative) & (q2 > 0)
        if KIND == "npair" and SELF:
            met = met & (o0 == 0)
        share = q3 * tl.exp(value / p - q0) - tl.where(positive, q1, 0.0)
        return c0 / p * tl.where(met, share, 0.0)


@triton.jit
def _backward(x, a, b, stats, column, upstream, by_x, by_beta, number, others, dim, p, q, u, s,
              KIND: tl.constexpr, ROLE: tl.constexpr, FLAG: tl.constexpr, EUCLID: tl.constexpr,
              NORMALIZE: tl.constexpr, ENTER: tl.constexpr, WHOLE: tl.constexpr, BETA: tl.constexpr, PAD: tl.constexpr,
              K: tl.constexpr, ONCE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """D coordinates of the gradient by M rows of x, prepared in a: all rows of b pass by, as references (ROLE
    "anchors"), as anchors ("references") or as both ("self"). stats are of a, column of b."""
    i = tl.program_id(0) * M + tl.arange(0, M)
    there = i < number
    axis = tl.program_id(1) * D + tl.arange(0, D)
    own = class_ids(a, i, there, number, PAD)
    left = fact(a, SQUARED, i, there, number, PAD)
    safe = tl.minimum(i, number - 1)
    mine = _rows(a, safe, axis, PAD, D)
    scales = column + SCALES * others if ROLE == "references" else stats + SCALES * number
    above = tl.load(upstream).to(tl.float32)
    c0 = above * tl.load(scales)
    c1 = above * tl.load(scales + 1)
    if BETA:  # every program says the same
        tl.store(by_beta, c1)
    SELF: tl.constexpr = ROLE == "self"
    ROOT: tl.constexpr = KIND != "lossless"
    PAIRED: tl.constexpr = KIND == "lifted" or (KIND == "npair" and SELF)  # what references are like counts too
    PLACE: tl.constexpr = 10 if KIND == "npair" else 6
    if ROLE != "references":
        q0 = _kept(stats, 6, i, there, number)[:, None]
        q1 = _kept(stats, 7, i, there, number)[:, None]
        q2 = _kept(stats, 8, i, there, number)[:, None]
        q3 = _kept(stats, 9, i, there, number)[:, None]
        q4 = _kept(stats, 10, i, there, number)[:, None]
        q5 = _kept(stats, 11, i, there, number)[:, None]
    if PAIRED:
        o0 = _kept(stats, PLACE, i, there, number)[:, None]
        o1 = _kept(stats, 7, i, there, number)[:, None]
        o2 = _kept(stats, 9, i, there, number)[:, None]
    else:
        o0, o1, o2 = 0.0, 0.0, 0.0
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
        value = inner if KIND == "circle" else _measured(inner, left, right, i, j, dim, EUCLID, ROOT, SELF)
        if PAIRED:
            e0 = _kept(column, PLACE, j, real, others)[None, :]
            e1 = _kept(column, 7, j, real, others)[None, :]
            e2 = _kept(column, 9, j, real, others)[None, :]
        else:
            e0, e1, e2 = 0.0, 0.0, 0.0
        if ROLE != "references":
            slope = _slope(value, positive, negative, q0, q1, q2, q3, q4, q5, e0, e1, e2, c0, c1, p, q, u, KIND, SELF,
                           FLAG)  # fmt: skip
        if KIND == "contrastive" and SELF:  # both ways are one
            slope += slope
        elif ROLE != "anchors":
            r0 = _kept(column, 6, j, real, others)[None, :]
            r1 = _kept(column, 7, j, real, others)[None, :]
            r2 = _kept(column, 8, j, real, others)[None, :]
            r3 = _kept(column, 9, j, real, others)[None, :]
            r4 = _kept(column, 10, j, real, others)[None, :]
            r5 = _kept(column, 11, j, real, others)[None, :]
            back = _slope(value, positive, negative, r0, r1, r2, r3, r4, r5, o0, o1, o2, c0, c1, p, q, u, KIND, SELF,
                          FLAG)  # fmt: skip
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
    if EUCLID:  # of unit rows, what points along the row changes nothing
        gradient = tl.sum(weight, 1)[:, None] * mine - gradient
    if KIND == "npair":  # s penalty
        kept = tl.zeros((M,), tl.float32)
        if ROLE != "references":
            kept += c0 * s * 0.5 * _kept(stats, 8, i, there, number)
        if ROLE != "anchors":
            heard = own != -1
            if SELF:
                heard = heard & (_kept(stats, 10, i, there, number) == 0)
            kept += tl.where(heard, c1, 0.0)
        gradient += kept.to(tl.float64)[:, None] * mine
    if WHOLE:
        whole_gradient(x, a, by_x, gradient, i, there, axis, number, dim, PAD, ENTER, NORMALIZE)
    else:
        out = i.to(tl.int64)[:, None] * dim + axis[None, :]
        tl.store(by_x + out, gradient, mask=there[:, None] & (axis < dim)[None, :])


@functools.cache
def _way(stage: str, kind: str, flag: bool, number: int, dim: int) -> tuple[Tile, dict]:
    """The tile, and what the kernels are compiled for."""
    table = FORWARD if stage == "forward" else BACKWARD
    shape = INTERPRETED if kernels.interpreted() else next(shape for most, shape in table.items() if number <= most)
    pad = row_kernels.padded(dim)
    step = max(step for step in (16, 32, 64, 128, 256) if step <= shape.step and pad % step == 0)
    chunk = min(triton.next_power_of_2(pad), 32 if kernels.interpreted() else WHOLE)
    way = {"KIND": kind, "FLAG": flag, "EUCLID": kind in EUCLIDEAN, "PAD": pad, "K": step, "ONCE": step == pad}
    if chunk > SHORT and stage == "backward":  # sums and rows twice as long
        shape = shape._replace(others=shape.others // 2)
    way |= {
        "M": shape.rows,
        "N": shape.others,
        "num_warps": shape.warps,
        "num_stages": shape.stages,
        **row_kernels.options(),
    }
    return shape, way | ({"D": chunk} if stage == "backward" else {})


class Passes(NamedTuple):
    """The kernels of a loss, in their order; rows: of a program."""

    rows: int
    firsts: CachedLauncher
    forward: CachedLauncher
    lifted: CachedLauncher
    finish: CachedLauncher


@functools.cache
def _passes(kind: str, flag: bool, number: int, dim: int, alone: bool, reduction: str, beta: str) -> Passes:
    shape, way = _way("forward", kind, flag, number, dim)
    pad, more = way["PAD"], row_kernels.options()
    paid = {name: choice for name, choice in way.items() if name not in ("KIND", "FLAG", "EUCLID")}
    return Passes(
        shape.rows,
        CachedLauncher(_firsts, PAD=pad, M=16, N=256, **more),
        CachedLauncher(_forward, SELF=alone, ACTIVE=reduction == "active", BETA=beta, **way),
        CachedLauncher(_lifted, SELF=alone, **paid),
        CachedLauncher(_finish, KIND=kind, SELF=alone, PAD=pad, REDUCTION=reduction, N=FINISHED, **more),
    )


def forward(kind, own, other, sizes, beta, settings, flag, reduction):
    """The value (), and the statistics of anchors and of references (the same where these have none).

    own, other: prepared rows, the same where the batch is alone; sizes: B, R and D. beta: None, a scalar or (B,)."""
    number, others, dim = sizes
    alone = own is other
    stats = torch.empty(STATISTICS * number + 2, device=own.device, dtype=torch.float32)
    value = torch.empty((), device=own.device, dtype=torch.float32)
    manner = "number" if beta is None else "anchor" if beta.dim() else "scalar"
    start = _passes(kind, flag, number, dim, alone, reduction, manner)
    anchors, columns = (-(-number // start.rows), 1, 1), (-(-others // start.rows), 1, 1)
    extra = stats if beta is None else beta
    if kind == "npair" and alone:
        start.firsts(((number + 15) // 16, 1, 1), own, stats, number)
    start.forward(anchors, own, other, extra, stats, number, others, dim, *settings)
    column = stats
    if kind == "lifted":
        if not alone:
            column = torch.empty(STATISTICS * others, device=own.device, dtype=torch.float32)
            start.forward(columns, other, own, extra, column, others, number, dim, *settings)
        start.lifted(anchors, own, other, stats, column, number, others, dim)
        if not alone:
            start.lifted(columns, other, own, column, stats, others, number, dim)
    start.finish((1, 1, 1), own, other, stats, value, number, others, settings[3])
    return value, stats, column


@functools.cache
def _last_pass(kind, flag, number, dim, role, normalize, enter, beta) -> tuple[Tile, int, CachedLauncher]:
    shape, way = _way("backward", kind, flag, number, dim)
    whole = dim <= way["D"]
    given = {"ROLE": role, "NORMALIZE": normalize, "ENTER": enter, "WHOLE": whole, "BETA": beta}
    return shape, way["D"], CachedLauncher(_backward, **given, **way)


def backward(kind, role, x, own, stats, other, column, others, upstream, by_beta, settings, flag, normalize, enter):
    """The gradient by the rows of `x`, in their type; `by_beta` () is filled with that by a scalar β where given.

    stats are of these rows, column of the `others` rows that they meet."""
    number, dim = x.shape
    shape, chunk, start = _last_pass(kind, flag, number, dim, role, normalize, enter, by_beta is not None)
    whole = dim <= chunk
    # The interpreter cuts numbers to bfloat16 where it should round them.
    by_x = torch.empty_like(x, dtype=torch.float32 if kernels.interpreted() else x.dtype)
    out = by_x if whole else torch.empty_like(x, dtype=torch.float64)
    slot = stats if by_beta is None else by_beta
    grid = (-(-number // shape.rows), -(-dim // chunk), 1)
    start(grid, x, own, other, stats, column, upstream, out, slot, number, others, dim, *settings)
    if not whole:
        row_kernels.long_gradient(x, own, out, by_x, normalize, enter)
    return by_x if by_x.dtype == x.dtype else by_x.to(x.dtype)
