"""Proxy-Anchor with all similarities in memory: one node of the graph, five launches and two products."""

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from nearkin.core import checks
from nearkin.core import class_softmax as plain
from nearkin.core.autograd import HandGradient
from nearkin.kernels import eligible, launch

__all__ = ["loss"]


def loss(embeddings: Tensor, labels: Tensor, proxies: Tensor, scale: float, margin: float) -> Tensor:
    """`losses.proxy_anchor_loss` of a batch that `eligible.class_matrix` admits."""
    if checks.reads_values(labels):
        checks.classes(embeddings, labels, proxies.shape[0], proxies.shape[1])
    with launch.device_of(embeddings):
        value: Tensor = _Loss.call(
            embeddings, proxies, labels, float(scale), float(margin), eligible.learns(embeddings, proxies)
        )
    return value


@functools.cache
def _kernels() -> tuple[ModuleType, ModuleType]:
    from nearkin.kernels import class_dense_kernels, proxy_anchor_kernels

    return class_dense_kernels, proxy_anchor_kernels


class _Loss(HandGradient):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, proxies: Tensor, labels: Tensor, scale: float, margin: float, back: bool
    ) -> Tensor:
        dense, kernels = _kernels()
        ctx.kinds = (x.dtype, plain.gradient_kind(proxies))
        x, proxies, labels = x.contiguous(), proxies.contiguous(), labels.contiguous()
        prepared = dense.prepare(x, proxies)
        scores = torch.empty(len(proxies), len(x), device=x.device, dtype=torch.float32)
        torch.mm(prepared.units, prepared.rows.t(), out=scores)  # `out`: autocast lets it be
        value: Tensor = kernels.loss(scores, labels, prepared.facts, scale, margin, back)
        if back:
            ctx.save_for_backward(x, proxies, scores, *prepared[:3])
        return value

    @staticmethod
    @launch.once
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, proxies, slopes, *prepared = ctx.saved_tensors
        dense, _ = _kernels()
        kinds = [kind if wanted else None for kind, wanted in zip(ctx.kinds, ctx.needs_input_grad, strict=False)]
        with launch.device_of(x):
            by = dense.gradients(dense.Prepared(*prepared, True), x, proxies, slopes.t(), upstream, kinds)
        return by[0], by[1], None, None, None, None
