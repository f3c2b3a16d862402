"""Angles between unit rows, exact near 0 and π, and SphereFace's function of them."""

import math
from typing import Any

import torch
from torch import Tensor

from nearkin.core.autograd import HandGradient, gradients_again, traced

__all__ = ["psi", "sine"]


def psi(cos: Tensor, margin: int) -> Tensor:
    """SphereFace's ψ(θ) = (-1)^k cos(mθ) - 2k on [kπ/m, (k+1)π/m] from cos θ: it falls from 1 to 1 - 2m.

    cos(mθ) is Chebyshev's polynomial of cos θ, so that only k, which has no slope, takes an arc cosine.
    """
    k = (cos.detach().clamp(-1, 1).acos() * (margin / math.pi)).floor()
    before: float | Tensor = 1.0
    now, twice = cos, 2 * cos
    for _ in range(margin - 1):
        before, now = now, twice * now - before
    return (1 - 2 * (k % 2)) * now - 2 * k


def sine(cos: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """The sine of the angle between unit rows, (B,), from its cosine: the length of x - w cos θ, finite at 0 and π.

    A zero row is at a right angle to everything.
    """
    value: Tensor = (_plain_sine if traced() else _Sine.call)(cos, x, w)
    return value


class _Sine(HandGradient):
    """With a hand-written gradient: four passes over (B, D), where autograd makes eight."""

    @staticmethod
    def forward(ctx: Any, cos: Tensor, x: Tensor, w: Tensor) -> Tensor:
        apart = torch.addcmul(x, w, cos[:, None], value=-1)
        length = torch.linalg.vector_norm(apart, dim=1)
        alone = _alone(cos, length)
        inverse = torch.where((length > 0) & ~alone, length.reciprocal(), 0.0)
        ctx.save_for_backward(cos, x, w, apart, inverse)
        return torch.where(alone, 1.0, length)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        cos, x, w, apart, inverse = ctx.saved_tensors
        if torch.is_grad_enabled():  # for a second derivative
            return tuple(gradients_again(_plain_sine, (cos, x, w), ctx.needs_input_grad, upstream))
        by_x = apart * (upstream * inverse)[:, None]
        return (by_x * w).sum(1).neg_(), by_x, by_x * -cos[:, None]


def _plain_sine(cos: Tensor, x: Tensor, w: Tensor) -> Tensor:
    length = torch.linalg.vector_norm(x - w * cos[:, None], dim=1)
    return torch.where(_alone(cos.detach(), length.detach()), 1.0, length)


def _alone(cos: Tensor, length: Tensor) -> Tensor:
    """Whether one of the rows is 0: else the squares sum to 1."""
    return torch.addcmul(cos * cos, length, length) < 0.5
