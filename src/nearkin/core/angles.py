"""Angles between unit rows, exact near 0 and π, and SphereFace's function of them."""

import math

import torch
from torch import Tensor

__all__ = ["psi", "sine"]


def psi(cos: Tensor, margin: int) -> Tensor:
    """SphereFace's ψ(θ) = (-1)^k cos(mθ) - 2k on [kπ/m, (k+1)π/m] from cos θ: it falls from 1 to 1 - 2m.

    cos(mθ) is Chebyshev's polynomial of cos θ, so that only k, which has no slope, takes an arc cosine.
    """
    k = (cos.detach().clamp(-1, 1).acos() * (margin / math.pi)).floor()
    before, now, twice = 1.0, cos, 2 * cos
    for _ in range(margin - 1):
        before, now = now, twice * now - before
    return (1 - 2 * (k % 2)) * now - 2 * k


def sine(cos: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """The sine of the angle between unit rows, (B,), from its cosine: the length of x - w cos θ, exact near 0 and π.

    A zero row is at a right angle to everything.
    """
    length = torch.linalg.vector_norm(torch.addcmul(x, w, cos[:, None], value=-1), dim=1)
    with torch.no_grad():
        alone = torch.addcmul(cos * cos, length, length) < 0.5  # 1, but 0 or |x - 0| with a zero row
    return torch.where(alone, 1.0, length)
