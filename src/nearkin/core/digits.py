"""Distances by exact products of digits, for devices whose products of float64 are slow or missing.

A row, less the batch's centre, is a power of two times 31-bit numbers, each of four digits of 8 bits. Products of
digits are whole numbers that float32 sums exactly, however a device rounds its operands (TF32 holds 8 bits) and in any
order. So equal rows are at distance exactly 0, and others have an error of 2⁻³⁰ of the length of centred rows: too
large for rows that are nearly equal, which are listed and compared once more, by their differences.
`kernels.digit_kernels` does the same with 8-bit integers.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearkin.core import symmetric
from nearkin.core.autograd import HandGradient, device_type

__all__ = ["Distances", "compiled_distances"]

EXACT = 1024  # products of two digits whose sum float32 holds
ORIGIN = 16  # rows whose mean is the centre
SMALLEST = 2.0**-126
NEAR = 2.0**-9  # squared distance, by the sum of squared lengths of centred rows
ROUNDING = 2 * torch.finfo(torch.float64).eps  # per coordinate, of squared lengths: what is nearer is equal
LISTED = 2**22  # coordinates of listed pairs at a time


class Digits(NamedTuple):
    """Rows (B, K): number_k · scale · 2⁻³⁰, of digits of 8 bits, the first weighing 2²⁴."""

    planes: tuple[Tensor, ...]  # four of (B, K), int8
    scale: Tensor  # (B, 1), float32

    def part(self, start: int, stop: int) -> list[Tensor]:
        """Some columns of each plane, in float32."""
        return [plane[:, start:stop].float() for plane in self.planes]


def centre(rows: Tensor) -> Tensor:
    """The mean of the first rows (D,), as float32 rounds it, in their type; 0 where it is not half as long as they."""
    first = rows[:ORIGIN].nan_to_num(0.0, 0.0, 0.0)
    middle = first.sum(0).div_(max(len(first), 1))
    far = middle.square().sum() > 0.25 * first.square().sum() / max(len(first), 1)
    return torch.where(far, middle, 0.0).float().to(rows.dtype)


def split(rows: Tensor, sizes: Tensor) -> Digits:
    """Rows as digits. sizes: (B, 1), no entry of a row is larger."""
    scale = sizes.log2().floor().add(1).exp2().clamp(min=SMALLEST)  # a power of two
    number = (rows / scale).mul_(2.0**30).add_(0.5).floor_().to(torch.int32)
    planes = []
    for _ in range(3):
        low = ((number + 128) & 255) - 128
        planes.append(low.to(torch.int8))
        number = (number - low) >> 8
    return Digits((number.to(torch.int8), *reversed(planes)), scale.float())


def _sums(a: Digits, b: Digits, places: int, multiply: Any) -> Iterator[Tensor]:
    """Sums of products of two digits by the sum of their places, from 0 on."""
    number = a.planes[0].shape[1]
    for place in range(places):
        total = None
        for start in range(0, max(number, 1), EXACT):
            left, right = a.part(start, start + EXACT), b.part(start, start + EXACT)
            for k in range(max(0, place - 3), min(place, 3) + 1):
                part = multiply(left[k], right[place - k])
                total = part if total is None else total.add_(part)
        assert total is not None
        yield total


def _joined(sums: Iterator[Tensor]) -> tuple[Tensor, Tensor]:
    """Two float32 whose sum is the exact one but for 1e-12: a row's with an equal row are its own to the last bit."""
    high = next(sums).mul_(256).add_(next(sums))
    third = next(sums)
    carry = (third / 256).floor_()
    high.add_(carry)
    low, weight = third.sub_(carry.mul_(256)).mul_(65536), 256.0
    for rest in sums:
        low.add_(rest, alpha=weight)
        weight /= 256
    return high.mul_(2.0**-20), low.mul_(2.0**-44)


def _across(a: Tensor, b: Tensor) -> Tensor:
    return a @ b.T


def _own(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(1)


def squared_distances(a: Digits, b: Digits) -> tuple[Tensor, Tensor, Tensor]:
    """(B, R) squared distances of rows in a length, these lengths, and which pairs are near."""
    high, low = _joined(_sums(a, b, 7, _across))
    left, right = a.scale, b.scale.T
    shrink_left, shrink_right = (left / right).clamp_(max=1), (right / left).clamp_(max=1)
    both = shrink_left * shrink_right * -2
    shrink_left, shrink_right = shrink_left.square_(), shrink_right.square_()
    high_a, low_a = _joined(_sums(a, a, 7, _own))
    high_b, low_b = (high_a, low_a) if b is a else _joined(_sums(b, b, 7, _own))
    lengths = (high_a[:, None] * shrink_left).add_(high_b * shrink_right)
    low = (low_a[:, None] * shrink_left).add_(low_b * shrink_right).add_(low.mul_(both))
    squared = high.mul_(both).add_(lengths).add_(low)
    return squared, torch.maximum(left, right), squared < lengths.mul_(NEAR)


def weighted(weights: Tensor, rows: Digits, kind: torch.dtype) -> Tensor:
    """weights (B, R) times rows (R, D), in type `kind`; exact to 2⁻³⁰ of the largest addend of each sum."""
    if not weights.numel():
        return torch.zeros(weights.shape[0], rows.planes[0].shape[1], device=weights.device, dtype=kind)
    scaled = weights * rows.scale.T
    factors = split(scaled, scaled.abs().amax(1, keepdim=True).clamp(min=SMALLEST))
    total = torch.zeros(weights.shape[0], rows.planes[0].shape[1], device=weights.device, dtype=kind)
    for start in range(0, weights.shape[1], EXACT):
        part = Digits(tuple(plane[:, start : start + EXACT] for plane in factors.planes), factors.scale)
        other = Digits(tuple(plane[start : start + EXACT].T for plane in rows.planes), rows.scale)
        for place, addend in enumerate(_sums(part, other, 4, _across)):
            total.add_(addend, alpha=2.0 ** (-12 - 8 * place))
    return total.mul_(factors.scale.to(kind))


class _Prepared(NamedTuple):
    """Rows less the batch's centre, as they are and as digits; the same twice where a batch is alone."""

    anchors: Tensor
    references: Tensor
    rows: Digits
    columns: Digits


def _prepared(a: Tensor, b: Tensor | None) -> _Prepared:
    middle = centre(a)
    anchors = a - middle
    rows = split(anchors, anchors.norm(dim=1, keepdim=True))
    if b is None:
        return _Prepared(anchors, anchors, rows, rows)
    references = b - middle
    return _Prepared(anchors, references, rows, split(references, references.norm(dim=1, keepdim=True)))


def _near_pairs(near: Tensor, alone: bool) -> Tensor:
    """Near pairs (P, 2); an item is not its own."""
    return (near.fill_diagonal_(False) if alone else near).nonzero()


def _measured(
    a: Tensor, b: Tensor | None, left: Tensor, right: Tensor | None, root: bool, kind: torch.dtype
) -> tuple[Tensor, _Prepared, Tensor]:
    """Distances (B, R), squared or not, what they are made of, and the near pairs. left, right: squared lengths."""
    with torch.autocast(device_type(a), enabled=False):
        prepared = _prepared(a, b)
        squared, length, near = squared_distances(prepared.rows, prepared.columns)
    distance = torch.where(squared > 0, squared, 0.0).sqrt_().mul_(length)
    result = (distance if root else squared.mul_(length).mul_(length)).to(kind)
    pairs = _near_pairs(near, b is None)
    for part in torch.split(pairs, max(1, LISTED // max(1, a.shape[1]))):
        i, j = part.unbind(1)
        exact = (prepared.anchors[i] - prepared.references[j]).square().sum(1)
        distance[i, j] = exact.sqrt().to(distance.dtype)
        result[i, j] = (exact.sqrt() if root else exact).to(kind)
    hidden = torch.maximum(left, (left if right is None else right).T)
    result = torch.where(distance > (hidden * (ROUNDING * a.shape[1])).sqrt().to(distance.dtype), result, 0.0)
    return (symmetric.mirrored(result) if b is None else result), prepared, pairs


def _slopes(slope: Tensor, result: Tensor, root: bool) -> Tensor:
    """The factors of differences of rows in the gradient; 0 where two rows are equal."""
    apart = result.sign()
    return (slope * apart).div_((1 - apart).add_(result)) if root else (slope * apart).mul_(2)


def _gradients(
    slope: Tensor, prepared: _Prepared, pairs: Tensor, alone: bool, wants: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """By both sides, where wanted, from the factors of differences."""
    anchors, references, rows, columns = prepared
    if alone:
        slope = slope.T.contiguous().add_(slope)
    by_a = _pulled(slope, anchors, references, columns, pairs) if wants[0] else None
    if alone or not wants[1]:
        return by_a, None
    return by_a, _pulled(slope.T, references, anchors, rows, pairs.flip(1))


class Distances(HandGradient):
    """`distances._Distances` by digits: distances of wide rows, squared or not, with a hand-written gradient.

    left, right: squared lengths (B, 1), (R, 1)."""

    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor | None, left: Tensor, right: Tensor | None, root: bool, kind: torch.dtype
    ) -> Tensor:
        result, (anchors, references, *ctx.digits), pairs = _measured(a, b, left, right, root, kind)
        ctx.root = root
        ctx.save_for_backward(a, b, anchors, references, result, pairs)
        return result

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        a, b, anchors, references, result, pairs = ctx.saved_tensors
        slope = _slopes(slope, result, ctx.root)
        with torch.autocast(device_type(a), enabled=False):
            if torch.is_grad_enabled():  # for a second derivative
                return *_plain_gradient(slope, a, b), None, None, None, None
            prepared = _Prepared(anchors, references, *ctx.digits)
            by_a, by_b = _gradients(slope, prepared, pairs, b is None, ctx.needs_input_grad[:2])
        return by_a, by_b, None, None, None, None


# Under torch.compile distances are one opaque operator, and their gradient another, which makes the digits again: how
# many pairs are near, no compiler knows.
_ROWS = "Tensor a, Tensor? b, Tensor left, Tensor? right"


def _distances(
    a: Tensor, b: Tensor | None, left: Tensor, right: Tensor | None, root: bool, kind: torch.dtype
) -> Tensor:
    return _measured(a, b, left, right, root, kind)[0]


def _distance_gradients(slope: Tensor, result: Tensor, a: Tensor, b: Tensor | None, root: bool) -> list[Tensor]:
    with torch.autocast(device_type(a), enabled=False):
        prepared = _prepared(a, b)
        near = squared_distances(prepared.rows, prepared.columns)[2]
        pairs = _near_pairs(near, b is None)
        gradients = _gradients(_slopes(slope, result, root), prepared, pairs, b is None, (True, True))
    return [gradient for gradient in gradients if gradient is not None]


compiled_distances = torch.library.custom_op(
    "nearkin::digit_distances",
    _distances,
    mutates_args=(),
    schema=f"({_ROWS}, bool root, ScalarType kind) -> Tensor",
)
_compiled_gradients = torch.library.custom_op(
    "nearkin::digit_distance_gradients",
    _distance_gradients,
    mutates_args=(),
    schema="(Tensor slope, Tensor result, Tensor a, Tensor? b, bool root) -> Tensor[]",
)


@compiled_distances.register_fake
def _(a: Tensor, b: Tensor | None, left: Tensor, right: Tensor | None, root: bool, kind: torch.dtype) -> Tensor:
    return a.new_empty(a.shape[0], (a if b is None else b).shape[0], dtype=kind)


@_compiled_gradients.register_fake
def _(slope: Tensor, result: Tensor, a: Tensor, b: Tensor | None, root: bool) -> list[Tensor]:
    return [torch.empty_like(rows) for rows in (a, b) if rows is not None]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.root = inputs[4]
    ctx.save_for_backward(output, *inputs[:2])


def _compiled_backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
    result, a, b = ctx.saved_tensors
    gradients = _compiled_gradients(slope, result, a, b, ctx.root)
    return gradients[0], None if b is None else gradients[1], None, None, None, None


compiled_distances.register_autograd(_compiled_backward, setup_context=_save)


def _pulled(slope: Tensor, rows: Tensor, others: Tensor, digits: Digits, pairs: Tensor) -> Tensor:
    """Σ_j slope_ij (rows_i - others_j): by digits of the others, and of near pairs (P, 2) by their differences."""
    i, j = pairs.unbind(1)
    near = slope[i, j].to(rows.dtype)
    slope = slope.index_put((i, j), slope.new_zeros(()))
    total = rows * slope.sum(1, keepdim=True, dtype=rows.dtype) - weighted(slope, digits, rows.dtype)
    size = max(1, LISTED // max(1, rows.shape[1]))
    for part, pull in zip(torch.split(pairs, size), torch.split(near, size), strict=True):
        i, j = part.unbind(1)
        total.index_put_((i,), pull[:, None] * (rows[i] - others[j]), accumulate=True)  # in a fixed order
    return total


def _plain_gradient(slope: Tensor, a: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor | None]:
    slope = slope.to(a.dtype)
    if b is None:
        both = slope + slope.T
        return a * both.sum(1, keepdim=True) - both @ a, None
    return a * slope.sum(1, keepdim=True) - slope @ b, b * slope.sum(0)[:, None] - slope.T @ a
