"""Softmax over class weights with all scores in memory: one node of the graph, a handful of launches.

Of few scores (`_few`) three kernels: rows and weights of unit length with the own class's score; products,
cross-entropy and its sum, with the derivatives written over the scores; and both gradients. Of more, cuBLAS multiplies:
three products of float32, as torch's settings round it, between these kernels; the own classes are then left out of the
products of the gradients, since beside them a sum in float32 loses the digits of all others. Where the scores do not
fit (`fits`), `class_loss_ops` computes them again and again.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from nearkin import kernels
from nearkin.core import checks
from nearkin.core import class_softmax as plain
from nearkin.core.autograd import HandGradient, gradients_again
from nearkin.kernels import eligible, launch
from nearkin.kernels.class_loss_ops import Annealing, Form, readable, readable_statistics

__all__ = ["Again", "fits", "loss", "serves"]

Again = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # of embeddings, weights and biases
MOST = 2**30  # bytes that all of it may take without max_memory
FEW_WEIGHTS, FEW_SCORES, FEW_DIMENSIONS = 2048, 2**22, 256  # up to which kernels multiply, in float64


def serves(
    embeddings: Tensor, labels: Any, weight: Tensor, form: Form, reduction: str, bias: Tensor | None = None
) -> bool:
    """Whether `loss` computes it: class ids, one value, no learned scale, no float64, no transform."""
    return (
        reduction in eligible.REDUCTIONS
        and type(embeddings) in _PLAIN
        and type(weight) in _PLAIN
        and embeddings.dtype in eligible.FLOATS
        and weight.dtype in eligible.FLOATS
        and embeddings.dim() == weight.dim() == 2
        and embeddings.shape[1] == weight.shape[1] > 0
        and embeddings.shape[0] > 0
        and 0 < form.centers <= weight.shape[0]
        and weight.shape[0] % form.centers == 0
        and isinstance(labels, Tensor)
        and labels.dtype in eligible.IDS
        and labels.shape == embeddings.shape[:1]
        and labels.device == weight.device == embeddings.device
        and (bias is None or (bias.dtype in eligible.FLOATS and bias.shape == weight.shape[:1]))
        and (not isinstance(form.scale, Tensor) or readable(form.scale, embeddings))
        and (not isinstance(form.scale, Annealing) or form.scale.steps.device == embeddings.device)
        and readable_statistics(form, embeddings)
        and kernels.can_run(embeddings)
    )


_PLAIN = (Tensor, nn.Parameter)


def fits(embeddings: Tensor, weight: Tensor, max_memory: int | None, most: int | None = None) -> bool:
    """Whether scores, rows, weights and gradients stay within `max_memory` bytes, or the default, `most`."""
    if max_memory is not None:
        checks.integer("max_memory", max_memory, 1)
    (anchors, dim), weights = embeddings.shape, weight.shape[0]
    needed = 4 * anchors * (weights + 15) + (12 * dim + 64) * (anchors + weights) + 2048
    if max_memory is None:
        max_memory = MOST if most is None else most
    return needed <= max_memory


def loss(
    embeddings: Tensor,
    labels: Tensor,
    weight: Tensor,
    form: Form,
    reduction: str,
    again: Again,
    bias: Tensor | None = None,
    adapted: Tensor | None = None,
) -> Tensor:
    """The loss of a batch that the kernels can serve; labels in 0..C-1, -1 is left out.

    again: the same loss in plain torch, for a second derivative. bias: (C,), added to the logits. adapted: a scalar
    tensor that is filled with AdaCos's next scale, by which the loss is computed; `form.scale` is the scale before.
    """
    if checks.reads_values(labels):
        checks.class_batch(embeddings, labels, weight.shape[0] // form.centers, weight.shape[1])
    with launch.device_of(embeddings):
        value: Tensor = _Loss.call(embeddings, weight, bias, labels, (form, reduction, again, adapted))
    return value


def _few(x: Tensor, weight: Tensor) -> bool:
    """Whether launches take longer than products: then kernels multiply, in fewer launches than cuBLAS."""
    weights = weight.shape[0]
    return (
        weights <= FEW_WEIGHTS
        and x.shape[0] * weights <= FEW_SCORES
        and x.shape[1] <= FEW_DIMENSIONS
        and kernels.has_float64_units(x)
    )


@functools.cache
def _kernels() -> tuple[ModuleType, ModuleType]:
    from nearkin.kernels import class_dense_kernels, class_entropy_kernels

    return class_dense_kernels, class_entropy_kernels


class _Loss(HandGradient):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        choices: tuple[Form, str, Again, Tensor | None],
    ) -> Tensor:
        dense, entropy = _kernels()
        form, reduction, again, adapted = choices
        addend = None if bias is None else bias.contiguous()
        own = form if adapted is None else form._replace(scale=1.0)  # the scores are then cosines
        prepared = dense.prepare(x.contiguous(), weight.contiguous(), labels.contiguous(), own, bias=addend)
        few = _few(x, weight)
        scores = prepared.empty_scores() if few else prepared.scores()
        if adapted is not None:
            entropy.adapt(prepared, scores, form.scale, adapted, few)
        slopes, product = any(ctx.needs_input_grad), few and adapted is None
        value: Tensor = entropy.entropy(prepared, scores, form, reduction, addend, adapted, slopes, product, not few)
        ctx.save_for_backward(x, weight, bias, scores, *prepared[:3])
        ctx.few, ctx.lengths, ctx.again = few, (prepared.normalize, prepared.by_length), again
        ctx.kinds = x.dtype, plain.gradient_kind(weight), None if bias is None else bias.dtype
        return value

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, scores, *prepared = ctx.saved_tensors
        wants = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():  # for a second derivative: through autograd's steps
            return *gradients_again(ctx.again, (x, weight, bias), wants, upstream), None, None
        dense, _ = _kernels()
        kinds = [kind if wanted else None for kind, wanted in zip(ctx.kinds, wants, strict=True)]
        gradients = dense.tile_gradients if ctx.few else functools.partial(dense.gradients, own=True)
        prepared = dense.Prepared(*prepared, *ctx.lengths)
        with launch.device_of(x):
            return *gradients(prepared, x.contiguous(), weight.contiguous(), scores, upstream, kinds), None, None
