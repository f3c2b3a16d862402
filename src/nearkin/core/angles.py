"""Angles between unit rows, exact near 0 and π, and SphereFace's function of them."""

import math

import torch
from torch import Tensor

__all__ = ["cos_sin", "psi"]


def psi(cos: Tensor, margin: int) -> Tensor:
    """SphereFace's ψ(θ) = (-1)^k cos(mθ) - 2k on [kπ/m, (k+1)π/m] from cos θ: it falls from 1 to 1 - 2m.

    By Chebyshev's polynomials of the second kind: T_m = U_m - c U_{m-1}.
    """
    twice = 2 * cos
    before, now = torch.ones_like(cos), twice
    for _ in range(margin - 1):
        before, now = now, twice * now - before
    turns = torch.zeros_like(cos)
    for j in range(1, margin):
        turns += cos.detach() < math.cos(j * math.pi / margin)
    return (1 - 2 * (turns % 2)) * (now - cos * before) - 2 * turns


def cos_sin(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of the angle between unit rows, (B,), from |x - w| and |x + w|: exact near 0 and π.

    A zero row is at a right angle to everything.
    """
    near, far = (x - w).square().sum(1), (x + w).square().sum(1)
    alone = near + far < 3  # 4, but 2 or 0 with a zero row
    product = torch.where(alone, 4.0, (near * far).clamp(min=torch.finfo(x.dtype).tiny))  # no slope where it is 0
    return (far - near) / 4, product.sqrt() / 2
