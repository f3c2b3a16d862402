"""Angles between unit rows, exact near 0 and π, and SphereFace's function of them."""

import math
from typing import Any

import torch
from torch import Tensor

from nearkin.core import distances
from nearkin.core.autograd import HandGradient, traced

__all__ = ["cos_sin", "psi_and_slope"]


def psi_and_slope(cos: Tensor, margin: int) -> tuple[Tensor, Tensor]:
    """SphereFace's ψ(θ) = (-1)^k cos(mθ) - 2k on [kπ/m, (k+1)π/m] from cos θ, and its slope by that.

    It falls from 1 to 1 - 2m. By Chebyshev's polynomials of the second kind: T_m = U_m - c U_{m-1}, of slope m U_{m-1}.
    """
    twice = 2 * cos
    before, now = torch.ones_like(cos), twice
    for _ in range(margin - 1):
        before, now = now, twice * now - before
    turns = torch.zeros_like(cos)
    for j in range(1, margin):
        turns += cos.detach() < math.cos(j * math.pi / margin)
    sign = 1 - 2 * (turns % 2)
    return sign * (now - cos * before) - 2 * turns, (margin * sign) * before


def cos_sin(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of the angle between unit rows, (B,), from their difference and sum: exact near 0 and π.

    A zero row is at a right angle to everything.
    """
    kind = torch.promote_types(x.dtype, w.dtype)
    x, w = x.to(kind), w.to(kind)
    if traced():
        *_, cos, sin = _between(x - w, x + w)
        return cos.to(kind), sin.to(kind)
    result: tuple[Tensor, Tensor] = _CosSin.call(x, w)
    return result


class _CosSin(HandGradient):
    """With a hand-written gradient: a few passes over (B, D), where autograd makes forty."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        difference, total = x - w, x + w
        apart, along, upright, cos, sin = _between(difference, total)
        ctx.save_for_backward(x, w, difference, total, apart, along, upright)
        return cos.to(x.dtype), sin.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, by_cos: Tensor, by_sin: Tensor) -> tuple[Tensor, Tensor]:
        x, w, difference, total, apart, along, upright = ctx.saved_tensors
        if torch.is_grad_enabled():  # for a second derivative: through the rows
            difference, total = x - w, x + w
            apart, along, upright, *_ = _between(difference, total)
        by_cos, by_sin = by_cos[:, None], torch.where(upright, 0.0, by_sin)
        steep, flat = (_over(by_sin * a, 2 * b)[:, None].to(x.dtype) for a, b in ((along, apart), (apart, along)))
        toward, away = flat * total, steep * difference
        return by_cos * w + toward + away, by_cos * x + toward - away


def _between(difference: Tensor, total: Tensor) -> tuple[Tensor, ...]:
    """|x - w|, |x + w|, whether one of the rows is 0, and cos and sin, (B,) each, from x - w and x + w of unit rows."""
    difference, total = (rows.to(distances.wide(rows)) for rows in (difference, total))
    near, far = (difference * difference).sum(1), (total * total).sum(1)
    upright = near + far < 3  # 4, but 2 or 0 with a zero row
    apart, along = _root(near), _root(far)
    return apart, along, upright, (far - near) / 4, torch.where(upright, 1.0, apart * along / 2)


def _root(x: Tensor) -> Tensor:
    """Its square root, with no slope at 0."""
    return torch.where(x > 0, torch.where(x > 0, x, 1.0).sqrt(), x * 0.0)


def _over(a: Tensor, b: Tensor) -> Tensor:
    """a / b, 0 where b is 0."""
    return torch.where(b > 0, a / torch.where(b > 0, b, 1.0), 0.0)
