"""The Triton twin of `core.class_softmax`: matrix products whose tiles of scores are never written to memory.

The forward pass is one product, the backward pass three: the scores once more, one run of classes after the other, and
from their derivatives the gradients by anchors and by class weights. A run is small enough to stay in the cache.
"""

import functools
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from nearkin import kernels
from nearkin.core import class_softmax as plain
from nearkin.core import distances
from nearkin.core.autograd import HandGradient
from nearkin.core.class_softmax import Rivals
from nearkin.kernels import launch

__all__ = ["class_softmax", "gradients", "merged", "precision", "query_gradient", "serves"]

RUN = 67_584  # class weights per run of the backward pass: full waves of tiles on 132 multiprocessors
CHAIN = 4096  # the same where products are summed in float32: beside one large term a longer sum loses the others
ROOM = 9 * 2**24  # bytes of a run, or of the partial sums of the forward pass, without max_memory
WALK = 1  # tiles of classes per program of the forward pass, at the least
PROGRAMS = 1056  # of the forward pass: four waves on 132 multiprocessors, two on each
FUSED = True  # whether the gradient by bfloat16 weights is multiplied by a kernel too, which finishes it before storing
STEP = 256  # every run is a multiple of it: no tile is longer
CENTERS = (1, 2, 4, 8)


def class_softmax(
    embeddings: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    scale: float | Tensor = 1.0,
    normalize: tuple[bool, bool] = (True, True),
    sub_centers: int = 1,
    lost: float = 0.0,
    max_memory: int | None = None,
) -> Rivals:
    """`core.class_softmax.class_softmax` by kernels; by core itself where they cannot serve.

    They serve float32, bfloat16 and float16 on CUDA and 1, 2, 4 or 8 centres per class. Sums are float32; products are
    of bfloat16 where both sides are, of float64 where both are float32 and the GPU has units for it, else of float32
    (of TF32 where `torch.get_float32_matmul_precision()` is not "highest"). With bfloat16 the derivative by a score is
    rounded to it once, before it is multiplied with anchors and weights. Memory: the gradients, 4 bytes per class, and
    `max_memory` bytes.
    """
    if not serves(embeddings, weight, sub_centers, max_memory):
        choices = {"normalize": normalize, "sub_centers": sub_centers, "lost": lost, "max_memory": max_memory}
        return plain.class_softmax(embeddings, weight, ids, scale=scale, **choices)  # type: ignore[arg-type]
    anchors = embeddings.float()
    scaled = plain.scaled_anchors(anchors, weight, scale, normalize[0])
    picks = plain.own_rows(scaled, weight, ids, sub_centers, normalize[1])
    rows, factor = _operands(embeddings, weight, scaled)
    settings = normalize[1], sub_centers, lost, max_memory
    peak, rest, own, taint = _Pass.call(scaled, weight, ids, picks, rows, factor, *settings)
    return Rivals(peak, rest, anchors, own, taint)


def serves(embeddings: Tensor, weight: Tensor, sub_centers: int, max_memory: int | None = None) -> bool:
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    return (
        kernels.can_run(embeddings)
        and weight.device == embeddings.device
        and sub_centers in CENTERS
        and embeddings.dtype in kinds
        and weight.dtype in kinds
        and embeddings.shape[0] > 0
        and 0 < weight.shape[0] < 2**31
        and (max_memory is None or max_memory >= _fixed(embeddings) + STEP * _each(embeddings, weight))
    )


@torch.no_grad()
def _operands(embeddings: Tensor, weight: Tensor, scaled: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (B, D) for the products and one factor per row (B,), which together are `scaled`.

    bfloat16 rows are only multiplied by a power of two, which rounds nothing; the factor is the rest, from 1/2 to 1, so
    that either may be multiplied with the weights alone.
    """
    if not embeddings.dtype == weight.dtype == torch.bfloat16:
        return scaled.contiguous(), torch.ones_like(scaled[:, 0])
    wide = embeddings.double()
    ratio = (wide * scaled).sum(1) / wide.square().sum(1)  # scaled = ratio · embeddings, by projection
    alive = embeddings.any(1) & (ratio != 0)
    factor, power = torch.frexp(torch.where(alive, ratio, 1.0))
    rows = torch.where(alive[:, None], torch.ldexp(wide, power[:, None]), 0.0)
    return rows.to(embeddings.dtype).contiguous(), factor.float()


@functools.cache
def _kernels() -> ModuleType:
    from nearkin.kernels import class_kernels

    return class_kernels


def precision() -> str:
    """How float32 tiles are multiplied: as they are, or wider (`class_kernels.exact`), unless torch may round.

    Three products of TF32 would be faster, but their gradients were off by 2e-6 where plain torch's were by 2e-7.
    """
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


class _Pass(HandGradient):
    @staticmethod
    def forward(
        ctx: Any,
        scaled: Tensor,
        weight: Tensor,
        ids: Tensor,
        picks: Tensor,
        rows: Tensor,
        factor: Tensor,
        normalize: bool,
        centers: int,
        lost: float,
        max_memory: int | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        weight_rows = weight.contiguous()
        inverse, taint = _kernels().inverse_lengths(weight_rows, normalize)
        operands = _kernels().Operands(rows, factor, weight_rows, inverse, ids, centers, lost, False, precision())
        level, rest, share = merged(*_kernels().scan(operands, _part_size(rows, weight_rows, max_memory)))
        ctx.save_for_backward(*operands[:5], picks, level, share)
        ctx.choices, ctx.normalize, ctx.max_memory = operands[5:], normalize, max_memory
        ctx.kind = plain.gradient_kind(weight)
        ctx.mark_non_differentiable(level, taint)
        return level, rest, weight_rows[picks].float(), taint

    @staticmethod
    @launch.once
    def backward(ctx: Any, _: Tensor, by_rest: Tensor, by_own: Tensor, __: Tensor) -> tuple[Tensor | None, ...]:
        *saved, picks, level, share = ctx.saved_tensors
        operands = _kernels().Operands(*saved, *ctx.choices)
        kind = ctx.kind if ctx.needs_input_grad[1] else None
        own = picks, by_own
        wants = ctx.needs_input_grad[0]
        by = gradients(operands, level, by_rest * share, own, ctx.normalize, wants, kind, ctx.max_memory)
        return query_gradient(by[0], operands), by[1], *[None] * 8


def query_gradient(by_rows: Tensor | None, operands: Any) -> Tensor | None:
    """The gradient by `scaled`, which is the rows times their factors."""
    return None if by_rows is None else by_rows / operands.factor[:, None]


def merged(peaks: Tensor, sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of partial peaks and sums (S, n): the peak, the logarithm of the sum beyond it, and 1 / sum, each (n,)."""
    peak = peaks.amax(0)
    level = torch.where(peak == -torch.inf, 0.0, peak)
    total = (sums * (peaks - level).exp()).sum(0, dtype=distances.wide(sums))
    return level, *plain.finished(total, sums)


def gradients(
    operands: Any,
    level: Tensor,
    pull: Tensor,
    own: tuple[Tensor, Tensor] | None,
    normalize: bool,
    wants_queries: bool,
    kind: torch.dtype | None,
    max_memory: int | None,
    inner: Any = None,
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients by `rows` and, in type `kind`, by the weights, of Σ pull e^{score - level}, run by run.

    own: which row of the weights represents each anchor's class, and the gradient by that row. inner: instead of it,
    the own classes as `class_kernels.parts` takes them.
    """
    passes, rows, weight = _kernels(), operands.rows, operands.weight
    anchors, num_weights = rows.shape[0], weight.shape[0]
    fused = FUSED and passes.halves(rows, weight)
    size = _run(rows, weight, max_memory)
    half = passes.halves(rows, weight) and not passes.INTERPRETS
    padded = -(-anchors // 64) * 64  # rows aligned for wide loads
    derivatives = torch.empty(size, padded, device=rows.device, dtype=torch.bfloat16 if half else torch.float32)[
        :, :anchors
    ]
    widths = -(-anchors // passes.chosen(passes.PARTS, operands).width)
    along = torch.empty(widths, size, device=rows.device)
    by_rows, descriptors = None, {}  # type: tuple[Tensor | None, dict[Any, Any]]
    by_weight = None if kind is None else torch.empty_like(weight, dtype=kind)
    end = None
    if by_weight is not None and own is not None:
        tile = passes.chosen(passes.GRADIENT, operands) if fused else passes.finishing()
        end = passes.ends(*own, num_weights, tile)
    autocast = torch.is_autocast_enabled(rows.device.type)  # to leave it takes time
    with torch.autocast(rows.device.type, enabled=False) if autocast else nullcontext():
        for start in range(0, num_weights, size):
            passes.parts(operands, level, pull, start, derivatives, along, inner, descriptors=descriptors)
            run = weight[start : start + size]
            run_derivatives = derivatives[: len(run)]
            if wants_queries:
                by_rows = _added(by_rows, run_derivatives.T, run)
            if by_weight is None:
                continue
            if fused:
                passes.gradient(operands, derivatives, along, end, by_weight, start, normalize, descriptors=descriptors)
            else:
                passes.finish(operands, _product(run_derivatives, rows), along, end, by_weight, start, normalize)
    return by_rows, by_weight


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a b in float32, of bfloat16 factors without widening them where torch can."""
    if a.is_cuda and a.dtype == b.dtype == torch.bfloat16 and hasattr(torch.ops.aten.mm, "dtype"):
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _added(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """total + a b, in place; `_product` where there is no total yet."""
    if total is None:
        return _product(a, b)
    if a.is_cuda and a.dtype == b.dtype == torch.bfloat16 and _adds(a.device):
        return torch.ops.aten.addmm.dtype_out(total, a, b, torch.float32, out=total)  # type: ignore[no-any-return]
    if a.dtype == b.dtype == total.dtype:
        return total.addmm_(a, b)
    return total.add_(_product(a, b))


@functools.cache
def _adds(device: torch.device) -> bool:
    """Whether torch adds a product of bfloat16 to float32 without a copy."""
    half = torch.ones(16, 16, device=device, dtype=torch.bfloat16)
    total = torch.ones(16, 16, device=device)
    try:
        torch.ops.aten.addmm.dtype_out(total, half, half, torch.float32, out=total)
    except (AttributeError, RuntimeError):
        return False
    return True


def _fixed(rows: Tensor) -> int:
    return plain.COORDINATE * rows.shape[0] * rows.shape[1]


def _each(rows: Tensor, weight: Tensor) -> int:
    """Bytes per class weight of a run: derivatives, their part along it, and a product or a wider copy of it."""
    half = rows.dtype == weight.dtype == torch.bfloat16
    wide = 0 if half and FUSED else 4 if half or weight.dtype == torch.float32 else 8
    return (2 if half else 4) * rows.shape[0] + 4 * (rows.shape[0] // 64 + 1) + wide * rows.shape[1]


def _run(rows: Tensor, weight: Tensor, max_memory: int | None) -> int:
    """Class weights per run."""
    if _kernels().INTERPRETS:
        return 64
    room = ROOM if max_memory is None else max_memory - _fixed(rows)
    most = RUN if _kernels().halves(rows, weight) else CHAIN
    if most == RUN and max_memory is None and weight.shape[0] <= 2 * RUN:  # launching a second one takes longer
        return -(-weight.shape[0] // STEP) * STEP
    fitting = max(1, min(most, room // _each(rows, weight)) // STEP)
    blocks = -(-weight.shape[0] // STEP)
    return -(-blocks // -(-blocks // fitting)) * STEP  # all runs as long as the last


def _part_size(rows: Tensor, weight: Tensor, max_memory: int | None) -> int:
    """Class weights per program of the forward pass, so that its partial sums fit into memory."""
    width = _kernels().INTERPRETED.width if _kernels().INTERPRETS else 128
    room = (ROOM if max_memory is None else max(1, max_memory - _fixed(rows))) // 3  # peaks, sums, and to merge them
    parts = max(1, min(room // (4 * rows.shape[0]), PROGRAMS // -(-rows.shape[0] // 128)))
    return max(WALK * width, -(-weight.shape[0] // parts))
