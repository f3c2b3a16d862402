"""Pairwise matrices of anchors with references, (B, R): exact at 0, safe in half precision and under autocast.

`references=None` means the batch itself. Half-precision input is computed in float32 and returns float32. Coordinates
are clamped to the cube root of the type's largest number (7e12 in float32), so that no square overflows. Of a batch
with itself every matrix is symmetric to the bit and distances are 0 on the diagonal, however a machine rounds products.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import hardtanh, threshold

from nearkin.core import checks, devices, near, symmetric
from nearkin.core.autograd import HandGradient, full_precision, traced

__all__ = ["WideRows", "between", "cosine", "dot", "euclidean", "freely_read", "length", "picked", "squared_euclidean"]
__all__ += ["unit", "unit_rows", "unit_slope", "units", "upcast", "wide", "wide_rows"]

_EPS = torch.finfo(torch.float64).eps


def wide(x: Tensor) -> torch.dtype:
    """The widest type of the tensor's device, for sums that must not cancel, overflow or vanish."""
    return torch.float64 if devices.has_float64(x.device) else torch.float32


def upcast(x: Tensor) -> Tensor:
    """Half precision to float32, with coordinates clamped so that squares stay finite."""
    if x.dtype in (torch.float16, torch.bfloat16):
        x = x.float()
    bound = torch.finfo(x.dtype).max ** (1 / 3)
    if freely_read(x) and x.numel():  # the common case: nothing to clamp
        low, high = torch.aminmax(x.detach())
        if -bound <= float(low) and float(high) <= bound:
            return x
    return hardtanh(x, -bound, bound)  # as clamp, whose gradient takes five operations


def freely_read(x: Tensor) -> bool:
    """Whether values may be read to choose a faster path: on the CPU, which has no queue to wait for."""
    return x.is_cpu and checks.reads_values(x)


def unit(x: Tensor) -> Tensor:
    """Rows scaled to length 1, for any length a float can hold; a zero row stays zero and has no gradient."""
    return units(x, _result_type(x, None))[0]


def length(x: Tensor, kind: torch.dtype | None = None) -> Tensor:
    """Euclidean length of each row, (B,), in type `kind` or that of the rows; 0 has gradient 0."""
    wider = upcast(x).to(wide(x))
    squared = (wider * wider).sum(1)
    alive = squared > 0
    return torch.where(alive, torch.where(alive, squared, 1.0).sqrt(), 0.0).to(kind or _result_type(x, None))


def dot(x: Tensor, references: Tensor | None = None) -> Tensor:
    """Inner products <x_i, r_j>, (B, R)."""
    return _product(upcast(x), None if references is None else upcast(references))


def cosine(x: Tensor, references: Tensor | None = None) -> Tensor:
    """Cosine similarities, (B, R); a zero row is at cosine 0 of everything."""
    return _product(unit(x), None if references is None else unit(references))


def squared_euclidean(x: Tensor, references: Tensor | None = None, *, normalize: bool = False) -> Tensor:
    """||x_i - r_j||^2, (B, R), of unit rows with `normalize`; exactly 0 on the diagonal and between duplicates."""
    return between(wide_rows(x, references, normalize), root=False)


def euclidean(x: Tensor, references: Tensor | None = None, *, normalize: bool = False) -> Tensor:
    """||x_i - r_j||, (B, R), of unit rows with `normalize`; where it is 0 its gradient is 0."""
    return between(wide_rows(x, references, normalize), root=True)


class WideRows(NamedTuple):
    """Anchors and references in the wide type, their squared lengths (B, 1), and the type of their distances."""

    anchors: Tensor
    squares: Tensor
    references: Tensor | None
    reference_squares: Tensor | None
    normalized: bool
    kind: torch.dtype


def wide_rows(x: Tensor, references: Tensor | None, normalize: bool) -> WideRows:
    """The rows that distances are taken of, made once for several uses."""
    a, left = _wide_rows(x, normalize)
    b, right = (None, None) if references is None else _wide_rows(references, normalize)
    return WideRows(a, left, b, right, normalize, _result_type(x, references))


def picked(rows: WideRows, columns: Tensor, *, root: bool) -> Tensor:
    """Euclidean distances to (B, T) columns of the references, or their squares, by differences: nothing (B, R)."""
    others = rows.anchors if rows.references is None else rows.references
    squared = (rows.anchors[:, None, :] - others[columns]).square().sum(2)
    if root:
        apart = squared > 0
        squared = torch.where(apart, torch.where(apart, squared, 1.0).sqrt(), 0.0)
    return squared.to(rows.kind)


def between(rows: WideRows, *, root: bool) -> Tensor:
    """Euclidean distances of all anchors and references, (B, R), or their squares."""
    a, left, b, right, normalized, kind = rows
    if traced():
        return _plain_distances(a, b, left, normalized, root, kind)
    narrow = kind == torch.float32 and near.serves(a)
    result: Tensor = _Distances.call(a, b, left, right, normalized, root, kind, narrow)
    return result


def _plain_distances(a: Tensor, b: Tensor | None, left: Tensor, units: bool, root: bool, kind: torch.dtype) -> Tensor:
    """`_Distances` in autograd's steps."""
    own = a.square().sum(1, keepdim=True)
    across = own if b is None else b.square().sum(1, keepdim=True)
    if devices.has_float64(a.device):
        with full_precision(a):
            squared = (own + across.T) - 2 * (a @ (a if b is None else b).T)  # (B, R)
    else:  # a compiler makes no (B, R, D) of it
        squared = (a[:, None] - (a if b is None else b)[None]).square().sum(2)
    rounding = 2 * a.shape[1] * _EPS
    apart = squared > (rounding if units else left * (1.25 * rounding))
    squared = torch.where(apart, squared, 1.0)
    result = torch.where(apart, squared.sqrt() if root else squared, 0.0).to(kind)
    return symmetric.mirrored(result) if b is None else result


class _Distances(HandGradient):
    """Distances of wide rows, squared or not, with a hand-written gradient: Σ_j slope_ij (x_i - r_j), one product.

    n_i + n_j - 2<x_i, x_j> loses half the digits to cancellation: 1e-3 of a distance in float32. So its sums are in
    float64 (float32 on devices without it), and a result within their rounding is 0. Only the distances are saved for
    the gradient, whose sums cancel as much and are wide too.
    """

    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        b: Tensor | None,
        left: Tensor,
        right: Tensor | None,
        units: bool,
        root: bool,
        kind: torch.dtype,
        narrow: bool,
    ) -> Tensor:
        references, reference_squares = a if b is None else b, left if right is None else right
        with full_precision(a):
            if narrow:
                squared = near.squared_distances(a, b)  # (B, R)
            else:
                squared = torch.add(left, reference_squares.T).addmm_(a, references.T, alpha=-2)
        rounding = 2 * a.shape[1] * _EPS
        if units:
            squared = torch.threshold_(squared, rounding, 0.0)
        elif kind == a.dtype:  # relative to the anchor's length: two rows within rounding of each other have the same
            squared = torch.where(squared > left * (1.25 * rounding), squared, 0.0)
        elif not a.is_cpu:
            squared = squared.masked_fill_(squared <= left * (1.25 * rounding), 0.0)
        else:  # the same in place; of narrow rows no quotient overflows, and no square is below 1e-90
            size = torch.where(left > 0, left, 1e-90)
            squared = torch.threshold_(squared.div_(size), 1.25 * rounding, 0.0).mul_(size)
        if root and not units and not (left.numel() and freely_read(left) and float(left.min()) > 1e-20):
            result = squared.sqrt_().to(kind)  # a square may be too small for the narrow type
        else:
            result = squared.to(kind)
            result = result.sqrt_() if root else result
        if b is None:
            result = symmetric.mirrored(result)
        ctx.root, ctx.narrow = root, narrow
        ctx.save_for_backward(a, b, result)
        return result

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        a, b, result = ctx.saved_tensors
        if ctx.root and not a.is_cpu and not torch.is_grad_enabled():
            slope = torch.where(result > 0, slope / result, 0.0)
        else:
            apart = result.sign()  # 1, or 0 where two rows are equal
            slope = (slope * apart).div_((1 - apart).add_(result)) if ctx.root else (slope * apart).mul_(2)
        close = near.near_pairs(result, ctx.root, a, a if b is None else b) if ctx.narrow else None
        with full_precision(a):
            if b is None:
                both = slope.T.contiguous().add_(slope) if a.is_cpu else slope + slope.T
                return (_pulled(both, a, a, close), *(None,) * 7)
            slope = slope if ctx.narrow else slope.to(a.dtype)
            by_a = _pulled(slope, a, b, close) if ctx.needs_input_grad[0] else None
            by_b = _pulled(slope.T, b, a, None if close is None else close.T) if ctx.needs_input_grad[1] else None
        return (by_a, by_b, *(None,) * 6)


def _pulled(slope: Tensor, a: Tensor, b: Tensor, close: Tensor | None) -> Tensor:
    """Σ_j slope_ij (a_i - b_j), (B, D); close: the near pairs, where products are of float32."""
    if close is not None:
        return near.pulled(slope, a, b, close)
    slope = slope.to(a.dtype)
    return torch.addmm(a * slope.sum(1, keepdim=True), slope, b, alpha=-1)


def _wide_rows(x: Tensor, normalize: bool) -> tuple[Tensor, Tensor]:
    """Rows in the wide type, of unit length with `normalize`, and their squared lengths (B, 1), without gradient."""
    if not normalize:
        x = upcast(x).to(wide(x))
        return x, x.detach().square().sum(1, keepdim=True)
    rows, inverse = units(x, wide(x))
    alive = inverse > 0
    return torch.where(alive, rows, 0.0), alive.to(rows.dtype)  # a NaN row taints no other distances


def units(x: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows of length 1 in type `kind`, and 1 / their lengths (B, 1); both 0 if too short for a finite gradient."""
    if traced():
        x = _unclamped(x)
        exact = x.to(wide(x))
        squared = (exact * exact).sum(1, keepdim=True)
        alive = squared > _least(x.dtype)
        inverse = torch.where(alive, torch.where(alive, squared, 1.0).rsqrt(), 0.0)
        return (exact * inverse).to(kind), inverse.detach()
    result: tuple[Tensor, Tensor] = _Units.call(_unclamped(x), kind)
    return result


def _unclamped(x: Tensor) -> Tensor:
    """`upcast` of rows whose squares are summed in the wide type: those of a narrow one stay finite there."""
    x = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    return x if x.dtype != wide(x) else upcast(x)


def _least(kind: torch.dtype) -> float:
    """The squared length that a row must exceed for a finite gradient."""
    return float((torch.finfo(kind).tiny * 1e6) ** 2)


def unit_rows(x: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """`units` of rows that are upcast, without a gradient of its own."""
    lengths = torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=wide(x))  # sums in the wide type
    inverse = threshold(lengths, _least(x.dtype) ** 0.5, torch.inf).reciprocal()
    return (x * inverse.to(kind)).to(kind), inverse


def unit_slope(slope: Tensor, rows: Tensor, inverse: Tensor) -> Tensor:
    """The gradient by the rows of which `unit_rows` made `rows`: its part perpendicular to each row."""
    along = (slope * rows).sum(1, keepdim=True)
    return torch.addcmul(slope, along, rows, value=-1).mul_(inverse.to(rows.dtype))


class _Units(HandGradient):
    """With a hand-written gradient, the part perpendicular to each row: a third of autograd's time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
        rows, inverse = unit_rows(x, kind)
        ctx.save_for_backward(x, rows, inverse)
        ctx.mark_non_differentiable(inverse)
        ctx.set_materialize_grads(False)
        return rows, inverse

    @staticmethod
    def backward(ctx: Any, slope: Tensor | None, _: None) -> tuple[Tensor | None, None]:
        if slope is None:
            return None, None
        x, rows, inverse = ctx.saved_tensors
        if torch.is_grad_enabled():  # for a second derivative: through the rows before scaling
            squared = x.to(wide(x)).square().sum(1, keepdim=True)
            alive = squared > _least(x.dtype)
            inverse = torch.where(alive, torch.where(alive, squared, 1.0).rsqrt(), 0.0)
            rows = (x * inverse).to(rows.dtype)
            along = (slope * rows).sum(1, keepdim=True)
            return (torch.addcmul(slope, along, rows, value=-1) * inverse.to(rows.dtype)).to(x.dtype), None
        return unit_slope(slope, rows, inverse).to(x.dtype), None


def _product(x: Tensor, references: Tensor | None) -> Tensor:
    if references is None:
        return symmetric.product(x)
    kind = torch.promote_types(x.dtype, references.dtype)
    with full_precision(x):
        return x.to(kind) @ references.to(kind).T


def _result_type(x: Tensor, references: Tensor | None) -> torch.dtype:
    kind = x.dtype if references is None else torch.promote_types(x.dtype, references.dtype)
    return torch.float64 if kind == torch.float64 else torch.float32
