# mypy: ignore-errors
"""Triton, and device functions that kernels share: running log-sum-exps, softplus, sigmoid, rows of statistics."""

import torch

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError('impl="triton" needs triton 3.4 or newer: pip install triton') from error

LOG_ZERO = tl.constexpr(torch.finfo(torch.float32).min / 4)  # as `core.reduce.log_zero`


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """log(1 + e^x), exact to the last digits for every x."""
    small = tl.exp(-tl.abs(x))
    shifted = 1.0 + small
    rest = tl.where(shifted == 1.0, small, tl.log(shifted) * (small / tl.where(shifted == 1.0, 1.0, shifted - 1.0)))
    return tl.maximum(x, 0.0) + rest


@triton.jit
def logaddexp(a, b):
    """log(e^a + e^b)."""
    return tl.maximum(a, b) + softplus(-tl.abs(a - b))


@triton.jit
def row_sum(slots):
    return tl.sum(slots.to(tl.float64), 1)


@triton.jit
def column(columns, at: tl.constexpr):
    """One column (M,) of a tensor (M, L)."""
    return tl.sum(tl.where(tl.arange(0, columns.shape[1])[None, :] == at, columns, 0.0), 1)


@triton.jit
def add_column(columns, at: tl.constexpr, value):
    """A tensor (M, L), with value (M,) added to one column. Sums of rows that are kept so take few registers: a vector
    (M,) is held by every thread of its row."""
    return columns + tl.where(tl.arange(0, columns.shape[1])[None, :] == at, value[:, None], 0.0)


@triton.jit
def stream_init(M: tl.constexpr, N: tl.constexpr):
    """Running log-sum-exps of nothing, one per slot of a tile: a peak, and a sum below it."""
    return tl.full((M, N), LOG_ZERO, tl.float32), tl.zeros((M, N), tl.float32)


@triton.jit
def stream_add(stream, values, mask):
    """Adds a masked value to the running log-sum-exp of each slot."""
    peak, total = stream
    gap = tl.where(mask, values, float("-inf")) - peak
    small = tl.exp(-tl.abs(gap))
    total = tl.where(gap > 0, total * small + 1.0, total + small)
    return tl.where(gap > 0, values, peak), total


@triton.jit
def stream_add_float64(stream, values, mask):
    """The same for float64 values, whose peaks are rounded: exponents as large as a scale of 80 need their digits."""
    peak, total = stream
    gap = tl.where(mask, values, float("-inf")) - peak
    top = values.to(tl.float32)
    risen = total * tl.exp(tl.where(gap > 0, peak - top, 0.0)) + 1.0 + (values - top).to(tl.float32)
    total = tl.where(gap > 0, risen, total + tl.exp(tl.minimum(gap, 0.0).to(tl.float32)))
    return tl.where(gap > 0, top, peak), total


@triton.jit
def stream_close(stream):
    """From slots (M, N) the log-sum-exps (M,) in float64, LOG_ZERO where nothing was added; their peaks; and the factor
    that makes a share of 1 of e^(value - peak): a large log-sum-exp in float32 has too few digits for that."""
    peaks, totals = stream
    peak = tl.max(peaks, 1)
    total = tl.sum(totals.to(tl.float64) * tl.exp(peaks - peak[:, None]).to(tl.float64), 1)
    any_added = total > 0
    total = tl.where(any_added, total, 1.0)
    peak = tl.where(any_added, peak, 0.0)
    logsumexp = tl.where(any_added, tl.log(total) + peak.to(tl.float64), LOG_ZERO)
    return logsumexp, peak, tl.where(any_added, 1.0 / total, 0.0).to(tl.float32)


@triton.jit
def store(stats, row: tl.constexpr, at, value):
    """Writes one row of statistics. at: indices, which of them exist, and how many entries a row has."""
    i, exists, size = at
    tl.store(stats + row * size + i, value.to(tl.float32), mask=exists)


@triton.jit
def load(stats, row: tl.constexpr, at):
    i, exists, size = at
    return tl.load(stats + row * size + i, mask=exists, other=0.0)
