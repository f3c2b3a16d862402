"""Squared distances from products of float32, for devices whose float64 is slow or missing.

|a|² + |b|² - 2<a, b> of rows in float32 loses the digits of pairs that are near for their lengths. Rows that share an
offset are near only because of it, so the batch's centre is taken off first; pairs that are near even then are compared
once more, by their differences. What is left is within 7e-7 of the squared distance.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from nearkin.core import devices

__all__ = ["near_pairs", "pulled", "serves", "squared_distances"]

ORIGIN = 16  # rows whose mean is the centre
NEAR = 1 / 16  # of the squared lengths of both rows: a squared distance below it is taken from differences
SMALLEST = torch.finfo(torch.float32).tiny * 1e12  # below it products of float32 lose digits that no length shows
LISTED = 2**22  # coordinates of near pairs at a time


def serves(x: Tensor) -> bool:
    """Whether distances are computed so where the tensor is, now.

    A CUDA graph cannot list near pairs, whose number the host must know, and products may be rounded further, to TF32:
    then they are of float64, as under a compiler.
    """
    if devices.has_float64_units(x) or devices.is_capturing(x):
        return False
    return not x.is_cuda or torch.get_float32_matmul_precision() == "highest"


def squared_distances(a: Tensor, b: Tensor | None) -> Tensor:
    """Squared distances (B, R) of rows, in their type; of a batch alone (b None) above the diagonal.

    Waits for the device, to list the near pairs.
    """
    others = a if b is None else b
    left, right = _narrow(a, others)
    sizes = _sizes(left, right)
    squared = torch.addmm(sizes, left, right.T, alpha=-2)
    near = squared <= sizes.mul_(NEAR).clamp_(min=SMALLEST)
    squared = squared.to(a.dtype)
    for i, j in _listed(near.triu_(1) if b is None else near, a.shape[1]):
        squared[i, j] = (a[i] - others[j]).square().sum(1)
    return squared


def near_pairs(distance: Tensor, root: bool, a: Tensor, b: Tensor) -> Tensor:
    """Which pairs (B, R) are near, by their distances or, not `root`, the squares; not equal ones: no gradient."""
    distance = distance.detach()
    most = _sizes(*_narrow(a.detach(), b.detach())).mul_(NEAR).clamp_(min=SMALLEST)
    return ((distance.square() if root else distance) <= most) & (distance > 0)


def pulled(slope: Tensor, a: Tensor, b: Tensor, near: Tensor) -> Tensor:
    """Σ_j slope_ij (a_i - b_j), (B, D): by products of float32, of near pairs (B, R) by their differences."""
    left, right = _narrow(a, b)
    far = slope.masked_fill(near, 0.0)
    total = (left * far.sum(1, keepdim=True) - far @ right).to(a.dtype)
    for i, j in _listed(near, a.shape[1]):
        total.index_put_((i,), slope[i, j, None] * (a[i] - b[j]), accumulate=True)  # in a fixed order
    return total


def _narrow(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of both sides in float32, less the mean of the first anchors where that makes them shorter.

    Where the mean is not half as long as they, it would lengthen some, and is left on.
    """
    first = a.detach()[:ORIGIN]  # with a NaN among them the comparison is false, and nothing is taken off
    number = max(len(first), 1)
    middle = first.sum(0) / number
    middle = torch.where(middle.square().sum() > 0.25 * first.square().sum() / number, middle, 0.0)
    left = (a - middle).float()
    return left, left if b is a else (b - middle).float()


def _sizes(left: Tensor, right: Tensor) -> Tensor:
    return left.square().sum(1, keepdim=True) + right.square().sum(1)


def _listed(near: Tensor, dim: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The pairs, some at a time: as many as a list, and their differences, may hold at once."""
    lines, most = max(1, LISTED // max(1, near.shape[1])), max(1, LISTED // max(1, dim))
    for start in range(0, len(near), lines):
        for pairs in torch.split(near[start : start + lines].nonzero(), most):
            yield pairs[:, 0] + start, pairs[:, 1]
