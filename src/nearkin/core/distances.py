"""Pairwise matrices of anchors with references, (B, R): exact at 0, safe in half precision and under autocast.

`references=None` means the batch itself. Half-precision input is computed in float32 and returns float32. Coordinates
beyond the cube root of the type's largest number (7e12 in float32) are held there, so that no square overflows.
"""

import torch
from torch import Tensor


def wide(x: Tensor) -> torch.dtype:
    """The widest type of the tensor's device, for sums that must not cancel."""
    return torch.float32 if x.device.type == "mps" else torch.float64


def upcast(x: Tensor) -> Tensor:
    """Half precision to float32; coordinates that no square could survive are held at the bound."""
    if x.dtype in (torch.float16, torch.bfloat16):
        x = x.float()
    bound = torch.finfo(x.dtype).max ** (1 / 3)
    return x.clamp(-bound, bound)


def unit(x: Tensor) -> Tensor:
    """Rows scaled to length 1, for any length a float can hold; a zero row stays zero and has no gradient."""
    x = upcast(x)
    # Scaling by the largest coordinate first keeps squares of 1e-30 from vanishing; the result does not depend on the
    # scale, so it needs no gradient. Rows too short for a finite gradient count as zero.
    peak = x.detach().abs().amax(1, keepdim=True)  # (B, 1)
    alive = peak > torch.finfo(x.dtype).tiny * 1e6
    x = torch.where(alive, x, 0.0) / torch.where(alive, peak, 1.0)
    return x / torch.where(alive, x.square().sum(1, keepdim=True), 1.0).sqrt()


def length(x: Tensor) -> Tensor:
    """Euclidean length of each row, (B,); 0 has gradient 0."""
    x = upcast(x)
    peak = x.detach().abs().amax(1)
    alive = peak > torch.finfo(x.dtype).tiny * 1e6
    peak = torch.where(alive, peak, 1.0)
    total = (torch.where(alive[:, None], x, 0.0) / peak[:, None]).square().sum(1)
    return torch.where(alive, torch.where(alive, total, 1.0).sqrt() * peak, 0.0)


def dot(x: Tensor, references: Tensor | None = None) -> Tensor:
    """Inner products <x_i, r_j>, (B, R)."""
    x, r = _pair(upcast(x), None if references is None else upcast(references))
    with torch.autocast(x.device.type, enabled=False):
        return x @ r.T


def cosine(x: Tensor, references: Tensor | None = None) -> Tensor:
    """Cosine similarities, (B, R); a zero row is at cosine 0 of everything."""
    x, r = _pair(unit(x), None if references is None else unit(references))
    with torch.autocast(x.device.type, enabled=False):
        return x @ r.T


def squared_euclidean(x: Tensor, references: Tensor | None = None) -> Tensor:
    """||x_i - r_j||^2, (B, R); exactly 0 on the diagonal of a batch with itself and between duplicates."""
    squared, apart = _squared(x, references)
    return torch.where(apart, squared.to(_result_type(x, references)), 0.0)


def euclidean(x: Tensor, references: Tensor | None = None) -> Tensor:
    """||x_i - r_j||, (B, R); where it is 0 its gradient is 0."""
    squared, apart = _squared(x, references)
    return torch.where(apart, torch.where(apart, squared, 1.0).sqrt().to(_result_type(x, references)), 0.0)


def _squared(x: Tensor, references: Tensor | None) -> tuple[Tensor, Tensor]:
    """Squared distances, and where they are told from 0.

    n_i + n_j - 2<x_i, x_j> loses half the digits to cancellation: 1e-3 of a distance in float32. Its sums are
    therefore taken in float64 (float32 where a device has no more), and what lies within their rounding is 0.
    """
    x, r = _pair(upcast(x), None if references is None else upcast(references))
    a = x.to(wide(x))
    b = a if references is None else r.to(wide(x))
    with torch.autocast(x.device.type, enabled=False):
        left, right = a.square().sum(1)[:, None], b.square().sum(1)[None, :]
        squared = torch.addmm(left, a, b.T, alpha=-2).add_(right)  # (B, R)
    rounding = 2 * x.shape[1] * torch.finfo(a.dtype).eps
    apart = (squared > left.detach() * rounding) & (squared > right.detach() * rounding)
    return squared, apart.fill_diagonal_(False) if references is None else apart


def _pair(x: Tensor, references: Tensor | None) -> tuple[Tensor, Tensor]:
    """Both sides in one type."""
    if references is None:
        return x, x
    kind = torch.promote_types(x.dtype, references.dtype)
    return x.to(kind), references.to(kind)


def _result_type(x: Tensor, references: Tensor | None) -> torch.dtype:
    kind = x.dtype if references is None else torch.promote_types(x.dtype, references.dtype)
    return torch.float64 if kind == torch.float64 else torch.float32
