# mypy: ignore-errors
"""What the kernels of pair and triplet losses share: prepared rows, tiles of products and distances, and the way back.

Rows are prepared once: in float64, held, of unit length where that is wanted, so that a tile is loads and products and
nothing else. Products are of float64 where the device multiplies those on its matrix units (`kernels.wide`), as
`core.distances` has them: nothing is lost to cancellation, and it is as fast as three products of TF32. Imported when a
kernel is wanted.
"""

import functools

import torch

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError('impl="triton" needs triton: pip install triton') from error

from nearkin import kernels
from nearkin.kernels.launch import CachedLauncher

BOUND = torch.finfo(torch.float32).max ** (1 / 3)  # where coordinates are held, as `core.distances` holds them
TINY = torch.finfo(torch.float32).tiny * 1e6  # a row not longer than this has no direction
EPS = torch.finfo(torch.float64).eps
BOUND_, TINY_ = tl.constexpr(BOUND), tl.constexpr(TINY)


@triton.jit
def held(x):
    """Coordinates in float32, held where no square overflows."""
    x = x.to(tl.float32)
    return tl.where(x != x, x, tl.minimum(tl.maximum(x, -BOUND_), BOUND_))


@triton.jit
def inverse_lengths(squared):
    """1 / length, 0 for a row too short to have a direction; float64 (M,) → (M,)."""
    alive = squared > TINY_ * TINY_
    return tl.where(alive, 1.0 / tl.sqrt(tl.where(alive, squared, 1.0)), 0.0)


@triton.jit
def kinship(own, other, i, j, there, real, SELF: tl.constexpr):
    """Which pairs of a tile are kin and which are strangers, from class ids (M,) and (N,) where -1 is unknown."""
    valid = (there & (own != -1))[:, None] & (real & (other != -1))[None, :]
    if SELF:
        valid = valid & (i[:, None] != j[None, :])
    same = own[:, None] == other[None, :]
    return valid & same, valid & (own[:, None] != other[None, :])


# Prepared rows: one float64 buffer, addressed by offsets, for a view costs more than a kernel. First the rows, padded
# with zeros to `padded(D)` coordinates; then an entry a row each: its squared length (1 or 0 where rows are of unit
# length), 1 / length (1 where they stay as they are), 0 or NaN if it is not finite, and the bits of its class id.
SQUARED, INVERSE, TAINT, ID = (tl.constexpr(place) for place in range(4))


def options() -> dict:
    return {} if kernels.interpreted() else {"enable_fp_fusion": True}  # said aloud: its default changes


def padded(dim: int) -> int:
    return -(-dim // 16) * 16


@triton.jit
def _prepare(x, ids, out, number, dim, PAD: tl.constexpr, ENTER: tl.constexpr, NORMALIZE: tl.constexpr,
             M: tl.constexpr, D: tl.constexpr):  # fmt: skip
    i = tl.program_id(0) * M + tl.arange(0, M)
    there = i < number
    at = i.to(tl.int64)
    squared = tl.zeros((M,), tl.float64)
    spoilt = tl.zeros((M,), tl.float32)
    for start in range(0, dim, D):
        axis = start + tl.arange(0, D)
        mask = there[:, None] & (axis < dim)[None, :]
        value = tl.load(x + at[:, None] * dim + axis[None, :], mask=mask, other=0.0).to(tl.float32)
        spoilt += tl.sum(value * 0.0, 1)
        value = tl.where(mask, entered(value, ENTER), 0.0)
        squared += tl.sum(value * value, 1)
    inverse = tl.full((M,), 1.0, tl.float64)
    if NORMALIZE:
        inverse = inverse_lengths(squared)
        squared = tl.where(squared > TINY_ * TINY_, 1.0, squared * 0.0)  # NaN stays NaN
    facts = out + tl.cast(number, tl.int64) * PAD + at
    tl.store(facts, squared, mask=there)
    tl.store(facts + number, inverse, mask=there)
    tl.store(facts + 2 * number, spoilt.to(tl.float64), mask=there)
    own = tl.load(ids + i, mask=there, other=0).to(tl.int64)
    tl.store(facts + 3 * number, own.to(tl.float64, bitcast=True), mask=there)
    for start in range(0, PAD, D):
        axis = start + tl.arange(0, D)
        inside = there[:, None] & (axis < dim)[None, :]
        value = tl.load(x + at[:, None] * dim + axis[None, :], mask=inside, other=0.0).to(tl.float32)
        value = tl.where(inside, entered(value, ENTER) * inverse[:, None], 0.0)
        tl.store(out + at[:, None] * PAD + axis[None, :], value, mask=there[:, None] & (axis < PAD)[None, :])


@triton.jit
def entered(value, ENTER: tl.constexpr):
    """Coordinates in float64: held where no square overflows, or brought into the unit cube."""
    if ENTER == "sigmoid":
        value = (1.0 / (1.0 + tl.exp(-value.to(tl.float64)))).to(tl.float32)
    elif ENTER == "cube":
        value = tl.where(value != value, value, tl.minimum(tl.maximum(value, 0.0), 1.0))
    else:
        value = held(value)
    return value.to(tl.float64)


def prepare(x: torch.Tensor, ids: torch.Tensor, normalize: bool, enter: str = "held") -> torch.Tensor:
    """The buffer of prepared rows of x (B, D) and their class ids (B,)."""
    number, dim = x.shape
    pad, start = _preparing(dim, normalize, enter)
    out = torch.empty(number * (pad + 4), device=x.device, dtype=torch.float64)
    start(((number + 7) // 8, 1, 1), x, ids, out, number, dim)
    return out


@functools.cache
def _preparing(dim, normalize, enter):
    pad = padded(dim)
    block = min(triton.next_power_of_2(pad), 256)
    return pad, CachedLauncher(_prepare, PAD=pad, ENTER=enter, NORMALIZE=normalize, M=8, D=block, **options())


@triton.jit
def fact(rows, place: tl.constexpr, i, there, number, PAD: tl.constexpr):
    """One of SQUARED, INVERSE, TAINT of rows i."""
    return tl.load(rows + tl.cast(number, tl.int64) * PAD + place * number + i, mask=there, other=0.0)


@triton.jit
def class_ids(rows, i, there, number, PAD: tl.constexpr):
    return fact(rows, ID, i, there, number, PAD).to(tl.int64, bitcast=True)


@triton.jit
def dots(a, b, i, j, PAD: tl.constexpr, K: tl.constexpr):
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
def apart(inner, left, right, i, j, rounding, SELF: tl.constexpr):
    """(M, N) squared distances in float64, exactly 0 where they cannot be told from it, from inner products and squared
    lengths (M,), (N,). rounding: 2 · D · EPS."""
    squared = left[:, None] + right[None, :] - 2.0 * inner
    far = (squared > (left * rounding)[:, None]) & (squared > (right * rounding)[None, :])
    if SELF:
        far = far & (i[:, None] != j[None, :])
    return tl.where(far, squared, 0.0)


@triton.jit
def returned(x, rows, gradient, along, i, there, axis, number, dim, PAD: tl.constexpr, ENTER: tl.constexpr,
             NORMALIZE: tl.constexpr):  # fmt: skip
    """A gradient (M, D) by prepared rows as one by `x`. along (M,): its part along each unit row."""
    at = i.to(tl.int64)[:, None]
    mask = there[:, None] & (axis < dim)[None, :]
    value = tl.load(x + at * dim + axis[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORMALIZE:
        unit = tl.load(rows + at * PAD + axis[None, :], mask=mask, other=0.0)
        gradient = (gradient - along[:, None] * unit) * fact(rows, INVERSE, i, there, number, PAD)[:, None]
    if ENTER == "sigmoid":
        inside = tl.load(rows + at * PAD + axis[None, :], mask=mask, other=0.0)
        gradient = gradient * (inside * (1.0 - inside))
    elif ENTER == "cube":
        gradient = tl.where((value >= 0) & (value <= 1), gradient, 0.0)
    else:
        gradient = tl.where((value <= BOUND_) & (value >= -BOUND_), gradient, 0.0)  # a held one has no slope
    return gradient.to(tl.float32)


@triton.jit
def whole_gradient(x, rows, by_x, gradient, i, there, axis, number, dim, PAD: tl.constexpr, ENTER: tl.constexpr,
                   NORMALIZE: tl.constexpr):  # fmt: skip
    """Stores the gradient by `x` from that by whole prepared rows (M, D), float64."""
    along = tl.zeros((i.shape[0],), tl.float64)
    inside = axis < dim
    if NORMALIZE:
        mask = there[:, None] & inside[None, :]
        unit = tl.load(rows + i.to(tl.int64)[:, None] * PAD + axis[None, :], mask=mask, other=0.0)
        along = tl.sum(tl.where(mask, gradient * unit, 0.0), 1)
    gradient = returned(x, rows, gradient, along, i, there, axis, number, dim, PAD, ENTER, NORMALIZE)
    tl.store(by_x + i.to(tl.int64)[:, None] * dim + axis[None, :], gradient, mask=there[:, None] & inside[None, :])


@triton.jit
def _chunks(x, rows, by_rows, by_x, number, dim, PAD: tl.constexpr, ENTER: tl.constexpr, NORMALIZE: tl.constexpr,
            M: tl.constexpr, D: tl.constexpr):  # fmt: skip
    i = tl.program_id(0) * M + tl.arange(0, M)
    there = i < number
    at = i.to(tl.int64)[:, None]
    along = tl.zeros((M,), tl.float64)
    if NORMALIZE:
        for start in range(0, dim, D):
            axis = start + tl.arange(0, D)
            mask = there[:, None] & (axis < dim)[None, :]
            unit = tl.load(rows + at * PAD + axis[None, :], mask=mask, other=0.0)
            along += tl.sum(unit * tl.load(by_rows + at * dim + axis[None, :], mask=mask, other=0.0), 1)
    for start in range(0, dim, D):
        axis = start + tl.arange(0, D)
        mask = there[:, None] & (axis < dim)[None, :]
        gradient = tl.load(by_rows + at * dim + axis[None, :], mask=mask, other=0.0)
        gradient = returned(x, rows, gradient, along, i, there, axis, number, dim, PAD, ENTER, NORMALIZE)
        tl.store(by_x + at * dim + axis[None, :], gradient, mask=mask)


def long_gradient(x, rows, by_rows, by_x, normalize, enter="held"):
    """`whole_gradient` for rows too long for one program: from `by_rows` (B, D), float64, into `by_x`."""
    (number, dim), pad = x.shape, padded(x.shape[1])
    given = (x, rows, by_rows, by_x, number, dim)
    way = {"PAD": pad, "ENTER": enter, "NORMALIZE": normalize, "M": 8, "D": 128, **options()}
    _chunks[((number + 7) // 8,)](*given, **way)
