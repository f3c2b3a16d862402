"""The Triton twin of `core.class_softmax`: scores live in registers, a tile at a time, forward and backward."""

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nearkin import kernels
from nearkin.core import class_softmax as plain
from nearkin.core import distances, reduce
from nearkin.core.class_softmax import Rivals

WHOLE_DIM = 512  # coordinates a program keeps sums for, half of it in float32; longer rows are served in chunks
TERMS = 2  # bfloat16 numbers that stand for a float32 factor of a product: 1 is faster and good to 3 digits, 2 to 5
WAVES = 2  # programs a multiprocessor that the forward pass is cut into, where there are few anchors
PARTIAL = 2**26  # bytes of partial sums of the forward pass where nobody said


def class_softmax(
    embeddings: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    scale: float | Tensor = 1.0,
    normalize: tuple[bool, bool] = (True, True),
    sub_centers: int = 1,
    max_memory: int | None = None,
) -> Rivals:
    """`core.class_softmax.class_softmax` by kernels; by core itself where they cannot serve.

    They serve float32, bfloat16 and float16 on CUDA and one centre a class. Sums are float32; products are of bfloat16
    where both sides are, else of float32 (of TF32 where `torch.get_float32_matmul_precision()` is not "highest").
    """
    if not serves(embeddings, weight, sub_centers):
        given = {"normalize": normalize, "sub_centers": sub_centers, "max_memory": max_memory}
        return plain.class_softmax(embeddings, weight, ids, scale=scale, **given)  # type: ignore[arg-type]
    anchors = embeddings.float()
    asked = plain.queries(anchors, weight, scale, normalize[0])
    rows, factor = _operands(embeddings, weight, asked)
    peak, rest, own, taint = _Pass.apply(asked, weight, ids, rows, factor, normalize[1], max_memory)  # type: ignore[no-untyped-call]
    return Rivals(peak, rest, anchors, own, taint)


def serves(embeddings: Tensor, weight: Tensor, sub_centers: int) -> bool:
    halves = (torch.float32, torch.bfloat16, torch.float16)
    return (
        kernels.can_run(embeddings)
        and weight.device == embeddings.device
        and sub_centers == 1
        and embeddings.dtype in halves
        and weight.dtype in halves
        and embeddings.shape[0] > 0
        and 0 < weight.shape[0] < 2**31
    )


@torch.no_grad()
def _operands(embeddings: Tensor, weight: Tensor, asked: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (B, D) for the products and a factor a row (B,), which together are `asked`.

    bfloat16 rows stay as they came but for a power of two, which rounds nothing and keeps products in range.
    """
    if not embeddings.dtype == weight.dtype == torch.bfloat16:
        return asked.contiguous(), torch.ones_like(asked[:, 0])
    top = embeddings.abs().amax(1, keepdim=True).float()
    _, power = torch.frexp(torch.where((top > 0) & top.isfinite(), top, 1.0))
    rows = torch.ldexp(embeddings.double(), -power)  # in [-1, 1]
    inner = (rows * asked).sum(1) / rows.square().sum(1).clamp(min=0.25)  # asked = factor · rows, by projection
    return rows.to(embeddings.dtype).contiguous(), inner.float()


@functools.cache
def _tiles() -> ModuleType:
    from nearkin.kernels import class_tiles

    return class_tiles


def _precision() -> str:
    """How float32 tiles are multiplied: in three TF32 products, which is as good as float32, unless torch may round."""
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        asked: Tensor,
        weight: Tensor,
        ids: Tensor,
        rows: Tensor,
        factor: Tensor,
        normalize: bool,
        max_memory: int | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        weight = weight.contiguous()
        inverse, taint = _tiles().inverse_lengths(weight, normalize)
        parts, wants = _splits(asked, max_memory), ctx.needs_input_grad[0]
        way = {"terms": TERMS, "precision": _precision(), "whole": WHOLE_DIM}
        peaks, sums, means = _tiles().forward(rows, factor, weight, inverse, ids, parts, wants, **way)
        peak = peaks.amax(0)  # (S, B) → (B,)
        level = torch.where(peak == -torch.inf, 0.0, peak)
        shrink = (peaks - level).exp()
        total = (sums * shrink).sum(0, dtype=distances.wide(sums))
        found = total > 0
        rest = torch.where(total == 0, reduce.nothing(asked), torch.where(found, total, 1.0).log()).float()
        rest = torch.where(total.isnan(), torch.nan, rest)
        share = torch.where(found, 1 / total, 0.0).float()
        mean = (means * (shrink * share)[:, :, None]).sum(0) if wants else None
        ctx.save_for_backward(weight, ids, rows, factor, inverse, level, share, mean)
        ctx.way, ctx.kind, ctx.normalize = way, plain.gradient_kind(weight), normalize
        ctx.mark_non_differentiable(level, taint)
        return level, rest, weight[ids].float(), taint

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor, by_rest: Tensor, by_own: Tensor, __: Tensor) -> tuple[Tensor | None, ...]:
        weight, ids, rows, factor, inverse, level, share, mean = ctx.saved_tensors
        by_asked = None if mean is None else by_rest[:, None] * mean
        by_weight = None
        if ctx.needs_input_grad[1]:
            by_weight = torch.empty_like(weight, dtype=ctx.kind)
            pull = by_rest * share
            _tiles().backward(
                rows, factor, weight, inverse, ids, level, pull, by_own, by_weight, ctx.normalize, **ctx.way
            )
        return by_asked, by_weight, *[None] * 5


def _splits(asked: Tensor, max_memory: int | None) -> int:
    """Into how many runs of classes the forward pass is cut, so that few anchors still fill the device."""
    number, dim = asked.shape
    processors = torch.cuda.get_device_properties(asked.device).multi_processor_count if asked.is_cuda else 1
    wanted = -(-WAVES * processors * 64 // max(number, 1))
    room = (PARTIAL if max_memory is None else max_memory) // max(1, 4 * number * dim)
    return max(1, min(wanted, room, 256))
