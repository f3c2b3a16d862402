# mypy: ignore-errors
"""Triton, and device functions that kernels share: softplus and sigmoid."""

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
