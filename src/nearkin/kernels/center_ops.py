"""Softmax over classes and the pull of their centres as one node of the graph, and the step of the centres."""

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from nearkin.core import checks
from nearkin.core import class_softmax as plain
from nearkin.core.autograd import HandGradient, gradients_again
from nearkin.kernels import class_dense_ops, eligible, launch
from nearkin.kernels.class_dense_ops import Again

__all__ = ["loss", "serves", "stepped"]


def serves(impl: str, embeddings: Any, labels: Any, weight: Tensor, *others: Tensor) -> bool:
    """Whether the kernels take this batch. others: what the classes have besides, one row each."""
    return eligible.class_weights(impl, embeddings, labels, weight) and all(
        type(each) in (Tensor, nn.Parameter)
        and each.dtype in eligible.FLOATS
        and each.device == weight.device
        and each.shape == weight.shape[: each.dim()]
        for each in others
    )


def loss(
    embeddings: Tensor,
    labels: Tensor,
    weight: Tensor,
    bias: Tensor,
    centers: Tensor,
    pull: float,
    reduction: str,
    again: Again,
) -> Tensor:
    """`losses.center_loss` of a batch that the kernels can serve; again: the same in plain torch."""
    if checks.reads_values(labels):
        checks.class_batch(embeddings, labels, *weight.shape)
    with launch.device_of(embeddings):
        back = eligible.learns(embeddings, weight, bias)
        choices = (float(pull), reduction, back, again)
        value: Tensor = _Loss.call(embeddings, weight, bias, labels, centers.detach(), *choices)
    return value


def stepped(embeddings: Tensor, labels: Tensor, centers: Tensor, alpha: float) -> Tensor:
    """`losses.center_update` of a batch that the kernels can serve; of float32 centres."""
    if checks.reads_values(labels):
        checks.class_batch(embeddings, labels, *centers.shape)
    with launch.device_of(embeddings):
        moved: Tensor = _kernels()[1].stepped(
            embeddings.contiguous(), labels.contiguous(), centers.contiguous(), float(alpha)
        )
    return moved


@functools.cache
def _kernels() -> tuple[ModuleType, ModuleType, ModuleType]:
    from nearkin.kernels import center_kernels, class_dense_kernels, soft_triple_kernels

    return class_dense_kernels, center_kernels, soft_triple_kernels


class _Loss(HandGradient):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        labels: Tensor,
        centers: Tensor,
        pull: float,
        reduction: str,
        back: bool,
        again: Again,
    ) -> Tensor:
        dense, center_kernels, entropy_kernels = _kernels()
        labels, centers = labels.contiguous(), centers.contiguous()
        rows, weight_rows, facts = center_kernels.operands(x.contiguous(), weight.contiguous(), labels, centers, pull)
        prepared = dense.Prepared(rows, weight_rows, facts, False)
        few = class_dense_ops._few(x, weight)
        scores = prepared.empty_scores() if few else prepared.scores()
        choices: dict[str, Any] = {"bias": bias.contiguous(), "back": back, "product": few}
        value: Tensor = entropy_kernels.loss(prepared, scores, labels, (1.0, 0.0, 1.0), reduction, **choices)
        if back:
            ctx.save_for_backward(x, weight, bias, labels, centers, rows, weight_rows, scores, facts)
            ctx.kinds = (x.dtype, plain.gradient_kind(weight), plain.gradient_kind(bias))
            ctx.pull, ctx.again, ctx.few = pull, again, few
        return value

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, labels, centers, rows, weight_rows, slopes, facts = ctx.saved_tensors
        wants = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():
            return *gradients_again(ctx.again, (x, weight, bias), wants, upstream), *[None] * 6
        kinds = [kind if wanted else None for kind, wanted in zip(ctx.kinds, wants, strict=True)]
        products = (rows, weight_rows)  # the kernel multiplies itself
        if not ctx.few:
            launch.enter_thread(slopes)
            by_rows = torch.mm(slopes, weight_rows, out=torch.empty_like(rows)) if wants[0] else facts
            products = (by_rows, torch.mm(slopes.t(), rows, out=torch.empty_like(weight_rows)) if wants[1] else facts)
        operands = (*products, slopes, x.contiguous(), weight.contiguous(), labels, centers, facts)
        with launch.device_of(x):
            by = _kernels()[1].gradients(*operands, upstream, kinds, ctx.pull, ctx.few)
        return *by, *[None] * 6
