"""Sigmoid loss: every pair is a decision of its own, positive or not, with a learned scale and bias.

`max_memory` (bytes) is what a loss may hold beside its arguments and gradients, in blocks of rows: `core/blockwise.py`.
"""

from __future__ import annotations  # torch 2.6 compiles no function within one whose annotations it evaluates

import math
from typing import Any

import torch
from torch import Tensor, nn

from nearkin.core import checks, distances, reduce
from nearkin.core.relations import Labels, Relation
from nearkin.losses.call import PairCall
from nearkin.losses.module import LossModule, without_impl

__all__ = ["SigmoidLoss", "sigmoid_loss"]

LOG_TEN = math.log(10.0)


@without_impl
def sigmoid_loss(
    embeddings: Tensor,
    labels: Labels,
    references: Tensor | None = None,
    reference_labels: Labels | None = None,
    *,
    log_scale: Tensor | float = LOG_TEN,
    bias: Tensor | float = -10.0,
    reduction: str = "mean",
    max_memory: int | None = None,
) -> Tensor:
    r"""Each pair by itself: positives above a boundary, negatives below it, which is learned with its steepness.

    l_i = Σ_j log(1 + e^{-z_ij (e^{t'} s_ij + b)}),   s = cosine, z_ij = 1 for a positive of i, -1 for a negative

    The mean is over anchors, as in the paper: a sum over all pairs, divided by B. t' = `log_scale` and b = `bias`,
    numbers or scalar tensors. Every item of the anchor's class is a positive, and an item has no pair with itself;
    another view of the batch as `references` is the paper's setting. There is no softmax: an anchor's pairs do not
    compete, so the gradient of a pair needs no other one. Anchors without any pair do not count. See also
    `infonce_loss`. Zhai et al. 2023, arXiv:2303.15343, section 3; t' log 10 and b -10 at the start from there.
    """
    call = PairCall(embeddings, labels, references, reference_labels, reduction, max_memory)
    kind = torch.promote_types(embeddings.dtype, torch.float32)
    if call.batch.references is not None:
        kind = torch.promote_types(kind, call.batch.references.dtype)
    log, shift = (_scalar(name, v, embeddings, kind) for name, v in (("log_scale", log_scale), ("bias", bias)))
    learned = torch.stack([log.exp(), shift])  # (2,)
    per_anchor = learned.expand(embeddings.shape[0], 2)

    def rows(x: Tensor, references: Tensor | None, relation: Relation, learned: Tensor) -> tuple[Tensor, ...]:
        logits = learned[:, :1] * distances.cosine(x, references) + learned[:, 1:]  # (B, R)
        cost = reduce.softplus(torch.where(relation.positive, -logits, logits))
        pairs = relation.positive | relation.negative
        return torch.where(pairs, cost, 0.0).sum(1), reduce.any_in_row(pairs)

    return call.terms(*call.run(rows, per_anchor), learned)


def _scalar(name: str, value: Tensor | float, embeddings: Tensor, kind: torch.dtype) -> Tensor:
    if not isinstance(value, Tensor):
        checks.number(name, value)
        return torch.full((), value, dtype=kind, device=embeddings.device)
    if value.dim() or not value.is_floating_point():
        raise ValueError(f"{name} must be a number or a floating point scalar, got {value.dtype} {tuple(value.shape)}")
    checks.same_device(name, value, embeddings)
    return value.to(kind)


class SigmoidLoss(LossModule, function=sigmoid_loss, learned=("log_scale", "bias")):
    """`sigmoid_loss` with its learned scale, as its logarithm, and bias.

    The bias starts at -10 since nearly all pairs are negative: without it the first steps would only unlearn that.
    """

    def __init__(
        self,
        log_scale: float = LOG_TEN,
        bias: float = -10.0,
        *,
        reduction: str = "mean",
        max_memory: int | None = None,
    ) -> None:
        super().__init__()
        checks.number("log_scale", log_scale)
        checks.number("bias", bias)
        self.reduction, self.max_memory = reduction, max_memory
        self.log_scale = nn.Parameter(torch.tensor(float(log_scale)))
        self.bias = nn.Parameter(torch.tensor(float(bias)))
        self.finish_init()

    def forward(
        self,
        embeddings: Tensor,
        labels: Labels,
        references: Tensor | None = None,
        reference_labels: Labels | None = None,
    ) -> Tensor:
        learned: dict[str, Any] = {"log_scale": self.log_scale, "bias": self.bias}
        return sigmoid_loss(embeddings, labels, references, reference_labels, **learned, **self.arguments())
