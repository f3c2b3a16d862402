"""Triton twins of what the rank losses do with a row of scores: smooth ranks of its positives, soft histograms."""

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nearkin import kernels

LARGEST = 8192  # references: a program keeps an anchor's row in registers


def serves(matrix: Tensor) -> bool:
    """Whether the kernels can have a (B, R) matrix such as this."""
    rows, columns = matrix.shape
    sound = matrix.dtype == torch.float32 and rows > 0 and 0 < columns <= LARGEST
    return sound and kernels.can_run(matrix) and not torch.compiler.is_compiling()


def precisions(scores: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    """Σ over an anchor's positives of (smooth rank among positives) / (among all), (B,); scores, masks (B, R).

    As many rounds an anchor as it has positives, whose number the host need not know.
    """
    found: Tensor = _Precisions.apply(scores.contiguous(), positive, negative)  # type: ignore[no-untyped-call]
    return found


def histogram_precisions(place: Tensor, positive: Tensor, negative: Tensor, bins: int) -> Tensor:
    """Σ_l h⁺_l H⁺_l / H_l of FastAP, (B,), from places in 0..bins on the axis of the centres, (B, R)."""
    found: Tensor = _Histograms.apply(place.contiguous(), positive, negative, bins)  # type: ignore[no-untyped-call]
    return found


@functools.cache
def _tiles() -> ModuleType:
    from nearkin.kernels import rank_tiles

    return rank_tiles


def _bytes(mask: Tensor) -> Tensor:
    return mask.contiguous().view(torch.uint8)


class _Precisions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        positive, negative = _bytes(positive), _bytes(negative)
        ctx.save_for_backward(scores, positive, negative)
        out: Tensor = _tiles().precisions(scores, positive, negative)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        return _tiles().precisions(*ctx.saved_tensors, slope.contiguous()), None, None


class _Histograms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, place: Tensor, positive: Tensor, negative: Tensor, bins: int) -> Tensor:
        positive, negative = _bytes(positive), _bytes(negative)
        out, counts = _tiles().histograms(place, positive, negative, bins)
        ctx.save_for_backward(place, positive, negative, counts)
        ctx.bins = bins
        return out  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        return _tiles().histograms_back(*ctx.saved_tensors, ctx.bins, slope.contiguous()), None, None, None
