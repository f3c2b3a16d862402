"""Triton twins of what rank losses compute per anchor: smooth ranks and histograms.

From a (B, R) matrix and masks, so of any relation. Batches of class ids have passes without a matrix: `smooth_ap_ops`,
and Fast-AP in `pair_ops`.
"""

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from nearkin import kernels
from nearkin.core.autograd import HandGradient
from nearkin.kernels import launch

__all__ = ["histogram_misses", "precisions", "takes"]

LARGEST = 8192  # references: a program has an anchor's row in registers


def takes(impl: str, matrix: Tensor) -> bool:
    """Whether the kernels compute from a (B, R) matrix such as this: `impl` allows them and they can run."""
    if impl == "torch" or (impl == "auto" and not matrix.is_cuda):
        return False
    rows, columns = matrix.shape
    sound = matrix.dtype == torch.float32 and rows > 0 and 0 < columns <= LARGEST
    return sound and kernels.can_run(matrix)


def precisions(scores: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    """Σ over an anchor's positives of (smooth rank among positives) / (among all), (B,); scores, masks (B, R).

    As many rounds per anchor as it has positives, whose number the host need not know.
    """
    precision: Tensor = _Precisions.call(scores.contiguous(), positive, negative)
    return precision


def histogram_misses(place: Tensor, positive: Tensor, negative: Tensor, bins: int) -> Tensor:
    """Σ_l h⁺_l H⁻_l / H_l of FastAP, (B,), from places in 0..bins on the axis of the centres, (B, R)."""
    misses: Tensor = _Histograms.call(place.contiguous(), positive, negative, bins)
    return misses


@functools.cache
def _kernels() -> ModuleType:
    from nearkin.kernels import rank_kernels

    return rank_kernels


def _bytes(mask: Tensor) -> Tensor:
    return mask.contiguous().view(torch.uint8)


class _Precisions(HandGradient):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        positive, negative = _bytes(positive), _bytes(negative)
        ctx.save_for_backward(scores, positive, negative)
        out: Tensor = _kernels().precisions(scores, positive, negative)
        return out

    @staticmethod
    @launch.once
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        return _kernels().precisions(*ctx.saved_tensors, slope.contiguous()), None, None


class _Histograms(HandGradient):
    @staticmethod
    def forward(ctx: Any, place: Tensor, positive: Tensor, negative: Tensor, bins: int) -> Tensor:
        positive, negative = _bytes(positive), _bytes(negative)
        out, counts = _kernels().histograms(place, positive, negative, bins)
        ctx.save_for_backward(place, positive, negative, counts)
        ctx.bins = bins
        return out  # type: ignore[no-any-return]

    @staticmethod
    @launch.once
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        return _kernels().histograms_back(*ctx.saved_tensors, ctx.bins, slope.contiguous()), None, None, None
