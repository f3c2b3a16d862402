"""Matrices of a set with itself, symmetric to the bit on every machine.

No library of products promises that <x, y> and <y, x> are rounded alike: they may fall into tiles of different shapes.
So one half is computed and both are that half.
"""

from typing import Any

from torch import Tensor

from nearkin.core.autograd import HandGradient, full_precision, traced

__all__ = ["mirrored", "product"]


def mirrored(matrix: Tensor) -> Tensor:
    """The part of a square matrix above the diagonal, on both sides of a diagonal of 0."""
    if traced() or not matrix.is_cpu:
        upper = matrix.triu(1)
        return upper + upper.T
    upper = matrix.triu_(1)
    return upper.T.contiguous().add_(upper)


def product(x: Tensor) -> Tensor:
    """Inner products of rows with one another, (B, B)."""
    if not traced():
        result: Tensor = _Product.call(x)
        return result
    with full_precision(x):
        full = x @ x.T
    return full.triu() + full.triu(1).T


class _Product(HandGradient):
    """With a hand-written gradient: one product, where autograd takes two."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        with full_precision(x):
            full = x @ x.T
        if not x.is_cpu:  # fewer launches
            return (full + full.T).mul_(0.5)
        own = full.diagonal().clone()
        result = mirrored(full)
        result.diagonal().copy_(own)
        return result

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        with full_precision(x):
            by_x: Tensor = (slope + slope.T) @ x
        return by_x
