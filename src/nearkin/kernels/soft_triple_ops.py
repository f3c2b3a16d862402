"""SoftTriple with all similarities in memory: one node of the graph, three launches and three products."""

import functools
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearkin.core import checks
from nearkin.core import class_softmax as plain
from nearkin.core.autograd import HandGradient, gradients_again
from nearkin.kernels import class_dense_ops, eligible, launch
from nearkin.kernels.class_dense_ops import Again

__all__ = ["MOST", "MOST_CENTERS", "Settings", "loss"]

MOST = 2**31  # bytes that all of it may take without max_memory: in blocks it takes many times as long
MOST_CENTERS = 32  # per class, whose pairs a program has in registers


class Settings(NamedTuple):
    centers_per_class: int
    scale: float
    gamma: float
    margin: float
    tau: float
    reduction: str


def loss(embeddings: Tensor, labels: Tensor, centers: Tensor, settings: Settings, again: Again) -> Tensor:
    """`losses.soft_triple_loss` of a batch that `eligible.class_weights` admits; again: the same in plain torch."""
    if checks.reads_values(labels):
        checks.class_batch(embeddings, labels, centers.shape[0] // settings.centers_per_class, centers.shape[1])
    with launch.device_of(embeddings):
        back = eligible.learns(embeddings, centers)
        value: Tensor = _Loss.call(embeddings, centers, labels, settings, back, again)
    return value


@functools.cache
def _kernels() -> tuple[ModuleType, ModuleType]:
    from nearkin.kernels import class_dense_kernels, soft_triple_kernels

    return class_dense_kernels, soft_triple_kernels


class _Loss(HandGradient):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, centers: Tensor, labels: Tensor, settings: Settings, back: bool, again: Again
    ) -> Tensor:
        dense, kernels = _kernels()
        each, scale, gamma, margin, tau, reduction = settings
        prepared = dense.prepare(x.contiguous(), centers.contiguous(), group=each)
        few = class_dense_ops._few(x, centers)
        scores = prepared.empty_scores() if few else prepared.scores()
        numbers = (float(scale), float(margin), 1.0 / gamma)
        choices: dict[str, Any] = {"centers": each, "back": back, "product": few}
        by_units = None
        if tau and each > 1:
            by_units = torch.empty_like(prepared.units) if back and ctx.needs_input_grad[1] else None
            choices |= {"by_units": by_units, "weight": tau / (len(centers) * (each - 1))}
        value: Tensor = kernels.loss(prepared, scores, labels.contiguous(), numbers, reduction, **choices)
        if back:
            ctx.save_for_backward(x, centers, scores, by_units, *prepared[:3])
            ctx.kinds, ctx.again = (x.dtype, plain.gradient_kind(centers)), again
            ctx.few, ctx.each = few, each
        return value

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, centers, slopes, by_units, *prepared = ctx.saved_tensors
        wants = ctx.needs_input_grad[:2]
        if torch.is_grad_enabled():
            return *gradients_again(ctx.again, (x, centers, None), (*wants, False), upstream), *[None] * 3
        dense, _ = _kernels()
        kinds = [kind if wanted else None for kind, wanted in zip(ctx.kinds, wants, strict=True)]
        operands = dense.Prepared(*prepared, True), x.contiguous(), centers.contiguous()
        with launch.device_of(x):
            gradients = dense.tile_gradients if ctx.few else dense.gradients
            by = gradients(*operands, slopes, upstream, kinds, plus=by_units, group=ctx.each)
        return by[0], by[1], *[None] * 4
