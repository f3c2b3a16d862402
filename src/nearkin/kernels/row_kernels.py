# mypy: ignore-errors
"""What the kernels of pair and triplet losses share: prepared rows, tiles of products and distances, input gradients.

Rows are prepared once: in float64, clamped, of unit length where the loss normalizes, so that a tile is loads and
products and nothing else. Products are of float64, since the device multiplies it on its matrix units
(`kernels.has_float64_units`): as in `core.distances` nothing is lost to cancellation, and it is as fast as three
products of TF32. Imported when the first kernel is launched.
"""

import functools

import torch

from nearkin import kernels
from nearkin.kernels.launch import CachedLauncher
from nearkin.kernels.numerics import tl, triton

BOUND = torch.finfo(torch.float32).max ** (1 / 3)  # where coordinates are clamped, as in `core.distances`
TINY = torch.finfo(torch.float32).tiny * 1e6  # a row not longer than this has no direction
EPS = torch.finfo(torch.float64).eps
BOUND_, TINY_ = tl.constexpr(BOUND), tl.constexpr(TINY)


@triton.jit
def clamped(x):
    """Coordinates in float32, clamped so that no square overflows; NaN stays NaN."""
    x = x.to(tl.float32)
    return tl.where(x != x, x, tl.minimum(tl.maximum(x, -BOUND_), BOUND_))


@triton.jit
def inverse_lengths(squared):
    """1 / length, 0 for a row too short to have a direction; float64 (M,) → (M,)."""
    has_direction = squared > TINY_ * TINY_
    return tl.where(has_direction, 1.0 / tl.sqrt(tl.where(has_direction, squared, 1.0)), 0.0)


@triton.jit
def pair_masks(row_ids, column_ids, i, j, mask_m, mask_n, SELF: tl.constexpr):
    """Which pairs of a tile are positive and which negative, from class ids (M,) and (N,) where -1 is unknown."""
    valid = (mask_m & (row_ids != -1))[:, None] & (mask_n & (column_ids != -1))[None, :]
    if SELF:
        valid = valid & (i[:, None] != j[None, :])
    same = row_ids[:, None] == column_ids[None, :]
    return valid & same, valid & (row_ids[:, None] != column_ids[None, :])


# Prepared rows are one float64 buffer, addressed by offsets, since a view costs more than a kernel. First the rows,
# padded with zeros to `padded(D)` coordinates; then these facts, one entry per row: its squared length (1 or 0 after
# normalization), 1 / length (1 without normalization), 0 or NaN if it is not finite, and the bits of its class id.
SQUARED, INVERSE, TAINT, ID = (tl.constexpr(place) for place in range(4))


def options() -> dict:
    return {} if kernels.interpreted() else {"enable_fp_fusion": True}  # explicit, since the default changes


def padded(dim: int) -> int:
    return -(-dim // 16) * 16


@triton.jit
def _prepare(x, ids, out, size, dim, PAD: tl.constexpr, TRANSFORM: tl.constexpr, NORMALIZE: tl.constexpr,
             M: tl.constexpr, D: tl.constexpr):  # fmt: skip
    i = tl.program_id(0) * M + tl.arange(0, M)
    mask_m = i < size
    at = i.to(tl.int64)
    squared = tl.zeros((M,), tl.float64)
    taint = tl.zeros((M,), tl.float32)
    for start in range(0, dim, D):
        axis = start + tl.arange(0, D)
        mask = mask_m[:, None] & (axis < dim)[None, :]
        value = tl.load(x + at[:, None] * dim + axis[None, :], mask=mask, other=0.0).to(tl.float32)
        taint += tl.sum(value * 0.0, 1)
        value = tl.where(mask, into_range(value, TRANSFORM), 0.0)
        squared += tl.sum(value * value, 1)
    inverse = tl.full((M,), 1.0, tl.float64)
    if NORMALIZE:
        inverse = inverse_lengths(squared)
        squared = tl.where(squared > TINY_ * TINY_, 1.0, squared * 0.0)  # NaN stays NaN
    facts = out + tl.cast(size, tl.int64) * PAD + at
    tl.store(facts + SQUARED * size, squared, mask=mask_m)
    tl.store(facts + INVERSE * size, inverse, mask=mask_m)
    tl.store(facts + TAINT * size, taint.to(tl.float64), mask=mask_m)
    row_ids = tl.load(ids + i, mask=mask_m, other=0).to(tl.int64)
    tl.store(facts + ID * size, row_ids.to(tl.float64, bitcast=True), mask=mask_m)
    for start in range(0, PAD, D):
        axis = start + tl.arange(0, D)
        mask = mask_m[:, None] & (axis < dim)[None, :]
        value = tl.load(x + at[:, None] * dim + axis[None, :], mask=mask, other=0.0).to(tl.float32)
        value = tl.where(mask, into_range(value, TRANSFORM) * inverse[:, None], 0.0)
        tl.store(out + at[:, None] * PAD + axis[None, :], value, mask=mask_m[:, None] & (axis < PAD)[None, :])


@triton.jit
def into_range(value, TRANSFORM: tl.constexpr):
    """Coordinates in float64: clamped so that no square overflows, or brought into the unit cube."""
    if TRANSFORM == "sigmoid":
        value = (1.0 / (1.0 + tl.exp(-value.to(tl.float64)))).to(tl.float32)
    elif TRANSFORM == "cube":
        value = tl.where(value != value, value, tl.minimum(tl.maximum(value, 0.0), 1.0))
    else:
        value = clamped(value)
    return value.to(tl.float64)


def prepare(x: torch.Tensor, ids: torch.Tensor, normalize: bool, transform: str = "clamp") -> torch.Tensor:
    """The buffer of prepared rows of x (B, D) and their class ids (B,)."""
    size, dim = x.shape
    pad, start = _preparing(dim, normalize, transform)
    out = torch.empty(size * (pad + 4), device=x.device, dtype=torch.float64)
    start(((size + 7) // 8, 1, 1), x, ids, out, size, dim)
    return out


@functools.cache
def _preparing(dim, normalize, transform):
    pad = padded(dim)
    block = min(triton.next_power_of_2(pad), 256)
    return pad, CachedLauncher(_prepare, PAD=pad, TRANSFORM=transform, NORMALIZE=normalize, M=8, D=block, **options())


@triton.jit
def fact(rows, place: tl.constexpr, i, mask_m, size, PAD: tl.constexpr):
    """One of SQUARED, INVERSE, TAINT of rows i."""
    return tl.load(rows + tl.cast(size, tl.int64) * PAD + place * size + i, mask=mask_m, other=0.0)


@triton.jit
def class_ids(rows, i, mask_m, size, PAD: tl.constexpr):
    return fact(rows, ID, i, mask_m, size, PAD).to(tl.int64, bitcast=True)


@triton.jit
def inner_products(a, b, i, j, PAD: tl.constexpr, K: tl.constexpr):
    """Inner products (M, N) in float64 of prepared rows i of `a` and j of `b`; indices must be of rows that exist."""
    total = tl.zeros((i.shape[0], j.shape[0]), tl.float64)
    axis = tl.arange(0, K)
    a += i.to(tl.int64)[:, None] * PAD + axis[None, :]
    b += j.to(tl.int64)[None, :] * PAD + axis[:, None]
    for _ in range(0, PAD, K):
        total = tl.dot(tl.load(a), tl.load(b), total, out_dtype=tl.float64)
        a += K
        b += K
    return total


@triton.jit
def squared_distances(inner, left, right, i, j, rounding, SELF: tl.constexpr):
    """(M, N) squared distances in float64 from inner products and squared lengths (M,), (N,); exactly 0 where rounding
    hides the difference. rounding: 2 · D · EPS."""
    squared = left[:, None] + right[None, :] - 2.0 * inner
    far = (squared > (left * rounding)[:, None]) & (squared > (right * rounding)[None, :])
    if SELF:
        far = far & (i[:, None] != j[None, :])
    return tl.where(far, squared, 0.0)


@triton.jit
def input_gradient(x, rows, gradient, along, i, mask_m, axis, size, dim, PAD: tl.constexpr, TRANSFORM: tl.constexpr,
                   NORMALIZE: tl.constexpr):  # fmt: skip
    """The gradient (M, D) by `x` from that by prepared rows. along (M,): its part along each unit row."""
    at = i.to(tl.int64)[:, None]
    mask = mask_m[:, None] & (axis < dim)[None, :]
    value = tl.load(x + at * dim + axis[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORMALIZE:
        unit = tl.load(rows + at * PAD + axis[None, :], mask=mask, other=0.0)
        gradient = (gradient - along[:, None] * unit) * fact(rows, INVERSE, i, mask_m, size, PAD)[:, None]
    if TRANSFORM == "sigmoid":
        inside = tl.load(rows + at * PAD + axis[None, :], mask=mask, other=0.0)
        gradient = gradient * (inside * (1.0 - inside))
    elif TRANSFORM == "cube":
        gradient = tl.where((value >= 0) & (value <= 1), gradient, 0.0)
    else:
        gradient = tl.where((value <= BOUND_) & (value >= -BOUND_), gradient, 0.0)  # a clamped one has no slope
    return gradient.to(tl.float32)


@triton.jit
def store_gradient(x, rows, by_x, gradient, i, mask_m, axis, size, dim, PAD: tl.constexpr, TRANSFORM: tl.constexpr,
                   NORMALIZE: tl.constexpr):  # fmt: skip
    """Stores the gradient by `x` from that by prepared rows (M, D), float64, all coordinates at once."""
    along = tl.zeros((i.shape[0],), tl.float64)
    mask_d = axis < dim
    if NORMALIZE:
        mask = mask_m[:, None] & mask_d[None, :]
        unit = tl.load(rows + i.to(tl.int64)[:, None] * PAD + axis[None, :], mask=mask, other=0.0)
        along = tl.sum(tl.where(mask, gradient * unit, 0.0), 1)
    gradient = input_gradient(x, rows, gradient, along, i, mask_m, axis, size, dim, PAD, TRANSFORM, NORMALIZE)
    tl.store(by_x + i.to(tl.int64)[:, None] * dim + axis[None, :], gradient, mask=mask_m[:, None] & mask_d[None, :])


@triton.jit
def _chunks(x, rows, by_rows, by_x, size, dim, PAD: tl.constexpr, TRANSFORM: tl.constexpr, NORMALIZE: tl.constexpr,
            M: tl.constexpr, D: tl.constexpr):  # fmt: skip
    i = tl.program_id(0) * M + tl.arange(0, M)
    mask_m = i < size
    at = i.to(tl.int64)[:, None]
    along = tl.zeros((M,), tl.float64)
    if NORMALIZE:
        for start in range(0, dim, D):
            axis = start + tl.arange(0, D)
            mask = mask_m[:, None] & (axis < dim)[None, :]
            unit = tl.load(rows + at * PAD + axis[None, :], mask=mask, other=0.0)
            along += tl.sum(unit * tl.load(by_rows + at * dim + axis[None, :], mask=mask, other=0.0), 1)
    for start in range(0, dim, D):
        axis = start + tl.arange(0, D)
        mask = mask_m[:, None] & (axis < dim)[None, :]
        gradient = tl.load(by_rows + at * dim + axis[None, :], mask=mask, other=0.0)
        gradient = input_gradient(x, rows, gradient, along, i, mask_m, axis, size, dim, PAD, TRANSFORM, NORMALIZE)
        tl.store(by_x + at * dim + axis[None, :], gradient, mask=mask)


def long_gradient(x, rows, by_rows, by_x, normalize, transform="clamp"):
    """`store_gradient` for rows too long for one program: from `by_rows` (B, D), float64, into `by_x`."""
    (size, dim), pad = x.shape, padded(x.shape[1])
    arguments = (x, rows, by_rows, by_x, size, dim)
    constants = {"PAD": pad, "TRANSFORM": transform, "NORMALIZE": normalize, "M": 8, "D": 128, **options()}
    _chunks[((size + 7) // 8,)](*arguments, **constants)
