"""Siamese verification: a learned weighting of |u - v| says whether two items are the same."""

from __future__ import annotations  # torch 2.6 compiles no function within one whose annotations it evaluates

from typing import Any

import torch
from torch import Tensor, nn

from nearkin.core import blockwise, checks, distances, reduce
from nearkin.core.autograd import HandGradient, full_precision, recomputed, traced
from nearkin.core.labels import Labels
from nearkin.losses.engine import Call, PairLoss, Rows
from nearkin.losses.settings import Range, setting

__all__ = ["SiameseLoss", "siamese_loss"]


class SiameseLoss(PairLoss):
    r"""Logistic regression of "same" on the coordinate-wise distance of every pair.

    z_ij = Σ_d w_d |u_id - v_jd| + b
    L = 1/2 mean_{positive pairs} log(1 + e^{-z}) + 1/2 mean_{negative pairs} log(1 + e^z)

    All pairs of the batch; the two halves weigh the same however many there are of each. The head, w and b, is learned:
    w starts at -1/√D and b at 1: a larger difference means less alike before anything is learned. A pair
    of an item with itself is never one of them. Needs two items per class. `reduction` applies to each half.
    Koch, Zemel, Salakhutdinov 2015, section 3.1.
    """

    along_dim = ("weight",)
    search_rate = Range(1.0, 100.0, log=True)

    dim: int = setting(whole=True, shapes=True, kw_only=False, text="dimensions D of the embeddings")
    max_memory = None

    def make(self) -> None:
        self.weight = nn.Parameter(torch.full((self.dim,), -(self.dim**-0.5)))
        self.bias = nn.Parameter(torch.ones(()))

    def value(self, call: Call) -> Tensor:
        return self._by_head(call, self.weight, self.bias)

    def _by_head(self, call: Call, weight: Tensor, bias: Tensor) -> Tensor:
        checks.dimensions("embeddings", call.batch.embeddings, weight.shape[0], "the weights have")

        def rows(rows: Rows) -> tuple[Tensor, ...]:
            logits = weighted_l1(rows.x, rows.references, weight) + bias  # (B, R)
            pull = blockwise.sums_and_counts(reduce.softplus(-logits), rows.positive, self.reduction)
            return *pull, *blockwise.sums_and_counts(reduce.softplus(logits), rows.negative, self.reduction)

        pull, positives, pulled, *push = call.run(rows, all_rows="it has no blocks")
        return (reduce.total(pull, positives, pulled, self.reduction) + call.total(*push)) / 2

    def probability(self, a: Tensor, b: Tensor) -> Tensor:
        """How likely row i of `a` and row i of `b` are the same, (N,) in [0, 1]."""
        checks.dimensions("a", checks.rows("a", a), self.weight.shape[0], "the weights have")
        checks.same_shape("b", checks.rows("b", b), a, "a")
        difference = (distances.upcast(a) - distances.upcast(b)).abs()
        return ((difference * self.weight).sum(1) + self.bias).sigmoid()


def siamese_loss(
    embeddings: Tensor,
    labels: Labels,
    references: Tensor | None = None,
    reference_labels: Labels | None = None,
    *,
    weight: Tensor,
    bias: Tensor,
    reduction: str = "mean",
) -> Tensor:
    """`SiameseLoss` with a head of the caller's: weight (D,), bias ()."""
    loss = SiameseLoss(weight.shape[0], reduction=reduction)
    call = Call(loss, embeddings, labels, references, reference_labels)
    return loss._by_head(call, weight, bias) + call.taint_of(weight, bias)


def weighted_l1(x: Tensor, references: Tensor | None, weight: Tensor) -> Tensor:
    """Σ_d w_d |x_id - r_jd|, (B, R), in memory for a few dimensions at a time."""
    x = distances.upcast(x)
    r = x.view_as(x) if references is None else distances.upcast(references)
    kind = torch.promote_types(torch.promote_types(x.dtype, r.dtype), weight.dtype)
    x, r, weight = x.to(kind), r.to(kind), weight.to(kind)
    if traced():
        return _plain_l1(x, r, weight)
    with full_precision(x):
        value: Tensor = _WeightedL1.call(x, r, weight)
    return value


def _plain_l1(x: Tensor, r: Tensor, weight: Tensor) -> Tensor:
    """`_WeightedL1` in autograd's own steps; the differences of each slice are made again for the gradient."""

    def part_of(x: Tensor, r: Tensor, weight: Tensor) -> Tensor:
        return ((x[:, None, :] - r[None, :, :]).abs() * weight).sum(2)

    total = x.new_zeros(x.shape[0], r.shape[0])
    for part in _slices(x, r):
        total = total + recomputed(part_of, x[:, part], r[:, part], weight[part])
    return total


class _WeightedL1(HandGradient):
    """Autograd would keep |x - r| of every dimension, (B, R, D); this recomputes it a slice of dimensions at a time."""

    @staticmethod
    def forward(x: Tensor, r: Tensor, weight: Tensor) -> Tensor:
        total = x.new_zeros(x.shape[0], r.shape[0])
        for part in _slices(x, r):
            total = total + _differences(x, r, part).abs_() @ weight[part]
        return total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, r, weight = ctx.saved_tensors
        to_x, to_r, to_weight = [], [], []
        for part in _slices(x, r):
            difference = _differences(x, r, part)
            to_weight.append(torch.einsum("brd,br->d", difference.abs(), grad))
            pull = difference.sign() * grad[:, :, None]
            to_x.append(pull.sum(1) * weight[part])
            to_r.append(-pull.sum(0) * weight[part])
        return torch.cat(to_x, 1), torch.cat(to_r, 1), torch.cat(to_weight)


def _differences(x: Tensor, r: Tensor, part: slice) -> Tensor:
    return x[:, None, part] - r[None, :, part]  # (B, R, d)


def _slices(x: Tensor, r: Tensor) -> list[slice]:
    """As many dimensions at a time as fit about a million differences, at least two."""
    step = max(2, 2**20 // max(x.shape[0] * r.shape[0], 1))
    return [slice(start, start + step) for start in range(0, x.shape[1], step)]
