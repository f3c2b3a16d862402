"""Proxy-Anchor with all similarities in memory: one node of the graph, three launches and three products."""

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from nearkin.core import checks
from nearkin.core import class_softmax as plain
from nearkin.core.autograd import HandGradient, gradients_again
from nearkin.kernels import class_dense_ops, eligible, launch
from nearkin.kernels.class_dense_ops import Again

__all__ = ["loss"]


def loss(embeddings: Tensor, labels: Tensor, proxies: Tensor, scale: float, margin: float, again: Again) -> Tensor:
    """`losses.proxy_anchor_loss` of a batch that `eligible.class_weights` admits; again: the same in plain torch."""
    if checks.reads_values(labels):
        checks.class_batch(embeddings, labels, *proxies.shape)
    with launch.device_of(embeddings):
        back = eligible.learns(embeddings, proxies)
        value: Tensor = _Loss.call(embeddings, proxies, labels, float(scale), float(margin), back, again)
    return value


@functools.cache
def _kernels() -> tuple[ModuleType, ModuleType]:
    from nearkin.kernels import class_dense_kernels, proxy_anchor_kernels

    return class_dense_kernels, proxy_anchor_kernels


class _Loss(HandGradient):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, proxies: Tensor, labels: Tensor, scale: float, margin: float, back: bool, again: Again
    ) -> Tensor:
        dense, kernels = _kernels()
        prepared = dense.prepare(x.contiguous(), proxies.contiguous())
        few = class_dense_ops._few(x, proxies)
        # (B, C); computed by cuBLAS, those of a proxy are a line in memory
        scores = (
            prepared.empty_scores() if few else prepared._replace(rows=prepared.units, units=prepared.rows).scores().t()
        )
        value: Tensor = kernels.loss(prepared, scores, labels.contiguous(), scale, margin, back, few)
        if back:
            ctx.save_for_backward(x, proxies, scores, *prepared[:3])
            ctx.kinds, ctx.again, ctx.few = (x.dtype, plain.gradient_kind(proxies)), again, few
        return value

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, proxies, slopes, *prepared = ctx.saved_tensors
        wants = ctx.needs_input_grad[:2]
        if torch.is_grad_enabled():
            return *gradients_again(ctx.again, (x, proxies, None), (*wants, False), upstream), *[None] * 4
        dense, _ = _kernels()
        kinds = [kind if wanted else None for kind, wanted in zip(ctx.kinds, wants, strict=True)]
        operands = dense.Prepared(*prepared, True), x.contiguous(), proxies.contiguous()
        with launch.device_of(x):
            by = (dense.tile_gradients if ctx.few else dense.gradients)(*operands, slopes, upstream, kinds)
        return by[0], by[1], *[None] * 5
