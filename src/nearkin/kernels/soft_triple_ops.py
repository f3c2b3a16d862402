"""SoftTriple with all similarities in memory: one node of the graph, five launches and three products."""

import functools
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor

from nearkin.core import checks
from nearkin.core import class_softmax as plain
from nearkin.core.autograd import HandGradient
from nearkin.kernels import eligible, launch

__all__ = ["MOST_CENTERS", "Settings", "loss"]

MOST_CENTERS = 32  # per class, whose pairs a program has in registers


class Settings(NamedTuple):
    centers_per_class: int
    scale: float
    gamma: float
    margin: float
    tau: float
    reduction: str


def loss(embeddings: Tensor, labels: Tensor, centers: Tensor, settings: Settings) -> Tensor:
    """`losses.soft_triple_loss` of a batch that `eligible.class_matrix` admits."""
    if checks.reads_values(labels):
        checks.classes(embeddings, labels, centers.shape[0] // settings.centers_per_class, centers.shape[1])
    with launch.device_of(embeddings):
        value: Tensor = _Loss.call(embeddings, centers, labels, settings, eligible.learns(embeddings, centers))
    return value


@functools.cache
def _kernels() -> tuple[ModuleType, ModuleType]:
    from nearkin.kernels import class_dense_kernels, soft_triple_kernels

    return class_dense_kernels, soft_triple_kernels


class _Loss(HandGradient):
    @staticmethod
    def forward(ctx: Any, x: Tensor, centers: Tensor, labels: Tensor, settings: Settings, back: bool) -> Tensor:
        dense, kernels = _kernels()
        each, scale, gamma, margin, tau, reduction = settings
        ctx.kinds = (x.dtype, plain.gradient_kind(centers))
        x, centers, labels = x.contiguous(), centers.contiguous(), labels.contiguous()
        prepared = dense.prepare(x, centers)
        parts = by_units = None
        if tau and each > 1:
            weight = tau / (len(centers) * (each - 1))
            parts, by_units = kernels.within(prepared.units, labels, each, weight, back and ctx.needs_input_grad[1])
        scores = prepared.scores()
        numbers = (float(scale), float(margin), 1.0 / gamma)
        # A term with distances between centres in it is always active.
        active = reduction == "active" and parts is None
        kernels.entropies(scores, labels, prepared.facts, numbers, centers=each, active=active, back=back)
        value: Tensor = kernels.total(prepared.facts, parts, len(x), reduction)
        if back:
            ctx.save_for_backward(x, centers, scores, by_units, *prepared[:3])
        return value

    @staticmethod
    @launch.once
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, centers, slopes, by_units, *prepared = ctx.saved_tensors
        dense, _ = _kernels()
        kinds = [kind if wanted else None for kind, wanted in zip(ctx.kinds, ctx.needs_input_grad, strict=False)]
        with launch.device_of(x):
            by = dense.gradients(
                dense.Prepared(*prepared, True), x, centers, slopes, upstream, kinds, by_units=by_units
            )
        return by[0], by[1], None, None, None
