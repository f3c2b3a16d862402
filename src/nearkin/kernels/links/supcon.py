# mypy: ignore-errors
"""SupCon: each anchor classifies its positives against all items it meets. settings: temperature."""

import triton
import triton.language as tl

from nearkin.kernels.pair_kernels import NOTHING, _settle, _stream, _sum


@triton.jit
def init(M: tl.constexpr, N: tl.constexpr):
    near = tl.zeros((M, N), tl.float32)
    kin = tl.zeros((M, N), tl.int32)
    peak = tl.full((M, N), NOTHING, tl.float32)
    total = tl.zeros((M, N), tl.float32)
    return near, kin, peak, total


@triton.jit
def add(state, value, positive, negative, settings):
    near, kin, peak, total = state
    logits = value / settings[0]
    kin += positive.to(tl.int32)
    near += tl.where(positive, logits, 0.0)
    peak, total = _stream(peak, total, logits, positive | negative)
    return near, kin, peak, total


@triton.jit
def close(state, settings, ACTIVE: tl.constexpr):
    """The rows PAID, TERMS, ACTIVE, then what `slope` is given."""
    near, kin, peak, total = state
    rest, top, part = _settle(peak, total)
    positives = tl.sum(kin, 1)
    counts = positives > 0
    each = tl.maximum(positives, 1).to(tl.float64)
    paid = (rest - _sum(near) / each).to(tl.float32)
    active = counts & (paid > 0)
    if ACTIVE:
        counts = active
    return tl.where(counts, paid, 0.0), counts, active, top, 1.0 / each, counts, part


@triton.jit
def slope(value, positive, negative, anchor, settings, scale):
    top, each, counts, part = anchor
    met = (positive | negative) & (counts > 0)
    share = part * tl.exp(value / settings[0] - top) - tl.where(positive, each, 0.0)
    return scale / settings[0] * tl.where(met, share, 0.0)
