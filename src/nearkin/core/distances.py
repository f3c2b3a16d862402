"""Pairwise matrices of anchors with references, (B, R): exact at 0, safe in half precision and under autocast.

`references=None` means the batch itself. Half-precision input is computed in float32 and returns float32. Coordinates
beyond the cube root of the type's largest number (7e12 in float32) are held there, so that no square overflows.
"""

import torch
from torch import Tensor


def wide(x: Tensor) -> torch.dtype:
    """The widest type of the tensor's device, for sums that must not cancel, overflow or vanish."""
    return torch.float32 if x.device.type == "mps" else torch.float64


def upcast(x: Tensor) -> Tensor:
    """Half precision to float32; coordinates that no square could survive are held at the bound."""
    if x.dtype in (torch.float16, torch.bfloat16):
        x = x.float()
    bound = torch.finfo(x.dtype).max ** (1 / 3)
    return x.clamp(-bound, bound)


def unit(x: Tensor) -> Tensor:
    """Rows scaled to length 1, for any length a float can hold; a zero row stays zero and has no gradient."""
    return _wide_unit(x)[0].to(_result_type(x, None))


def length(x: Tensor) -> Tensor:
    """Euclidean length of each row, (B,); 0 has gradient 0."""
    squared, alive = _squared_length(upcast(x).to(wide(x)))
    return torch.where(alive, squared.sqrt(), 0.0).squeeze(1).to(_result_type(x, None))


def dot(x: Tensor, references: Tensor | None = None) -> Tensor:
    """Inner products <x_i, r_j>, (B, R)."""
    return _product(upcast(x), None if references is None else upcast(references))


def cosine(x: Tensor, references: Tensor | None = None) -> Tensor:
    """Cosine similarities, (B, R); a zero row is at cosine 0 of everything."""
    return _product(unit(x), None if references is None else unit(references))


def squared_euclidean(x: Tensor, references: Tensor | None = None, *, normalize: bool = False) -> Tensor:
    """||x_i - r_j||^2, (B, R), of unit rows with `normalize`; exactly 0 on the diagonal and between duplicates."""
    squared, apart = _squared(x, references, normalize)
    return torch.where(apart, squared.to(_result_type(x, references)), 0.0)


def euclidean(x: Tensor, references: Tensor | None = None, *, normalize: bool = False) -> Tensor:
    """||x_i - r_j||, (B, R), of unit rows with `normalize`; where it is 0 its gradient is 0."""
    squared, apart = _squared(x, references, normalize)
    return torch.where(apart, torch.where(apart, squared, 1.0).sqrt().to(_result_type(x, references)), 0.0)


def _squared(x: Tensor, references: Tensor | None, normalize: bool) -> tuple[Tensor, Tensor]:
    """Squared distances, and where they are told from 0.

    n_i + n_j - 2<x_i, x_j> loses half the digits to cancellation: 1e-3 of a distance in float32. Its sums are
    therefore taken in float64 (float32 where a device has no more), and what lies within their rounding is 0.
    """
    a, left = _wide_rows(x, normalize)
    b, right = (a, left) if references is None else _wide_rows(references, normalize)
    right = right.T
    with torch.autocast(x.device.type, enabled=False):
        squared = torch.addmm(left, a, b.T, alpha=-2).add_(right)  # (B, R)
    rounding = 2 * x.shape[1] * torch.finfo(a.dtype).eps
    apart = (squared > left.detach() * rounding) & (squared > right.detach() * rounding)
    return squared, apart.fill_diagonal_(False) if references is None else apart


def _wide_rows(x: Tensor, normalize: bool) -> tuple[Tensor, Tensor]:
    """Rows in the wide type, of unit length with `normalize`, and their squared lengths (B, 1)."""
    if not normalize:
        x = upcast(x).to(wide(x))
        return x, x.square().sum(1, keepdim=True)
    rows, alive = _wide_unit(x)
    return rows, alive.to(rows.dtype)  # 1 or 0 whatever x is: nothing to differentiate


def _wide_unit(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of length 1 in the wide type, and (B, 1) which are. Those too short for a finite gradient are zero."""
    x = upcast(x)
    tiny = torch.finfo(x.dtype).tiny * 1e6
    x = x.to(wide(x))
    squared, alive = _squared_length(x, tiny)
    return x * torch.where(alive, squared.rsqrt(), 0.0), alive


def _squared_length(x: Tensor, tiny: float = 0.0) -> tuple[Tensor, Tensor]:
    """(B, 1) squared lengths, 1 where not above `tiny`, and where they are above it."""
    squared = x.square().sum(1, keepdim=True)
    alive = squared > tiny**2
    return torch.where(alive, squared, 1.0), alive


def _product(x: Tensor, references: Tensor | None) -> Tensor:
    r = x if references is None else references
    kind = torch.promote_types(x.dtype, r.dtype)
    with torch.autocast(x.device.type, enabled=False):
        return x.to(kind) @ r.to(kind).T


def _result_type(x: Tensor, references: Tensor | None) -> torch.dtype:
    kind = x.dtype if references is None else torch.promote_types(x.dtype, references.dtype)
    return torch.float64 if kind == torch.float64 else torch.float32
