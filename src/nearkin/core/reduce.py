"""Masked sums, means, maxima and log-sum-exps, and the last step of a loss. A batch without signal is exactly 0."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from nearkin.core import checks, distances
from nearkin.core.autograd import HandGradient, traced

__all__ = [
    "REDUCTIONS",
    "any_in_row",
    "argmax",
    "count_in_row",
    "highest",
    "hinges",
    "largest",
    "log_zero",
    "logsumexp",
]
__all__ += ["mean", "softplus", "taint", "terms", "total"]

REDUCTIONS = ("mean", "active", "sum", "none")


def mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of the masked entries of each row, (B,); 0 for a row without any."""
    return torch.where(mask, values, 0.0).sum(1) / count_in_row(mask).clamp(min=1)


def log_zero(values: Tensor) -> float:
    """In place of the logarithm of 0: lower than any score, yet safe to add to and to differentiate."""
    return torch.finfo(values.dtype).min / 4


def logsumexp(values: Tensor, mask: Tensor, dim: int = 1) -> Tensor:
    """log of the sum of exp over the masked entries along `dim`; `log_zero` where there are none."""
    if values.shape[dim] == 0:
        return values.sum(dim) + log_zero(values)
    if not values.is_cpu and not traced():  # fewer operations, one more pass over the entries
        return torch.where(mask, values, log_zero(values)).logsumexp(dim)
    masked = torch.where(mask, values, -torch.inf)
    top = masked.detach().amax(dim, keepdim=True).clamp(min=log_zero(values))
    # At least 1 where there is an entry; 0 where there is none, whose logarithm vanishes beside `top`.
    total = (masked - top).exp().sum(dim, keepdim=True).clamp(min=0.5)
    return (total.log() + top).squeeze(dim)


def hinges(
    values: Tensor, mask: Tensor, *, start: float = 0.0, falling: bool = False, squared: bool = False
) -> tuple[Tensor, Tensor]:
    """Sum over the masked entries of each row of [v - start]_+, or [start - v]_+, or its square: (B,); and the hinges.

    The hinges, (B, R), 0 where masked out, have no gradient: they are only for counting.
    """
    if traced():
        hinged = _hinged(values, mask, start, falling)
        return (hinged.square() if squared else hinged).sum(1), hinged.detach()
    result: tuple[Tensor, Tensor] = _Hinges.call(values, mask, start, falling, squared)
    return result


class _Hinges(HandGradient):
    """With a hand-written gradient: a hinge is the mask of its derivative, so one pass is enough."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, mask: Tensor, start: float, falling: bool, squared: bool
    ) -> tuple[Tensor, Tensor]:
        hinged = _hinged(values, mask, start, falling)
        ctx.shape = start, falling, squared
        ctx.set_materialize_grads(False)  # of the hinges, which have no gradient
        ctx.mark_non_differentiable(hinged)
        ctx.save_for_backward(values, mask, hinged)
        return (hinged.square() if squared else hinged).sum(1), hinged

    @staticmethod
    def backward(ctx: Any, slope: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if slope is None:
            return (None,) * 5
        values, mask, hinged = ctx.saved_tensors
        start, falling, squared = ctx.shape
        if torch.is_grad_enabled():  # for a second derivative: through the values
            hinged = _hinged(values, mask, start, falling)
        slope = (-slope if falling else slope)[:, None]
        return (hinged * (2 * slope) if squared else hinged.sign() * slope), None, None, None, None


def _hinged(values: Tensor, mask: Tensor, start: float, falling: bool) -> Tensor:
    if falling or start:
        values = start - values if falling else values - start
    return torch.where(mask, values, 0.0).relu_()


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), exact for every x: torch.nn.functional.softplus is linear above 20, which is 2e-9 off."""
    return -logsigmoid(-x)


def count_in_row(mask: Tensor) -> Tensor:
    """How many entries of each row of a (B, R) mask are set, (B,): `sum(1)`, at half its memory on the CPU."""
    if traced() or not mask.is_cpu:  # torch 2.6 cannot compile the narrower sum
        return mask.sum(1)
    return mask.sum(1, dtype=torch.int32).long()


def any_in_row(mask: Tensor, dim: int = 1, keepdim: bool = False) -> Tensor:
    """Which rows of a (B, R) mask have an entry set, (B,): `any(1)`, which is slow on the CPU.

    A compiler gets a sum of integers: its reductions of 8-bit types were wrong on CPUs without AVX-512.
    """
    if traced():
        return mask.sum(dim, keepdim) > 0
    if mask.shape[dim] == 0 or not mask.is_cpu:
        return mask.any(dim, keepdim)
    return mask.view(torch.uint8).amax(dim, keepdim).bool()


def highest(values: Tensor, mask: Tensor) -> Tensor:
    """The largest masked entry of each row, (B,), without gradient; `log_zero` where there are none."""
    if values.shape[1] == 0:
        return largest(values.detach(), mask)[0]
    top = torch.where(mask, values.detach(), -torch.inf).amax(1)
    return torch.where(top == -torch.inf, log_zero(values), top)


def largest(values: Tensor, mask: Tensor, dim: int = 1) -> tuple[Tensor, Tensor]:
    """The largest masked entry along `dim` and its index, the first of equals; `log_zero` and 0 if none."""
    if values.shape[dim] == 0:
        flat = values.sum(dim)
        return flat + log_zero(values), torch.zeros_like(flat, dtype=torch.long)
    # -inf marks what is masked out; NaN wins, as in torch, so that a tainted row stays visible.
    masked = torch.where(mask, values.detach(), -torch.inf)
    index = masked.argmax(dim, keepdim=True)
    any_entry = masked.gather(dim, index).squeeze(dim) != -torch.inf
    best = values.gather(dim, index).squeeze(dim)
    return torch.where(any_entry, best, log_zero(values)), index.squeeze(dim)


def argmax(values: Tensor, mask: Tensor) -> Tensor:
    """The index of the largest masked entry of each row, (B,), the first of equals; 0 if there is none."""
    if values.shape[1] == 0:
        return torch.zeros(values.shape[0], dtype=torch.long, device=values.device)
    return torch.where(mask, values.detach(), -torch.inf).argmax(1)


def terms(values: Tensor, mask: Tensor, reduction: str) -> Tensor:
    """Reduces the masked terms of a loss: (B,) for one per anchor, (B, T) for several.

    "mean" over all of them, "active" over those above 0, "sum", or "none": one value per anchor, the sum of its terms.
    """
    if reduction == "mean" and distances.freely_read(mask) and values.numel() and bool(mask.all()):
        return values.mean()  # the common case: nothing is masked out
    if reduction == "active":
        mask = mask & ~(values <= 0)  # a NaN is never inactive
    masked = torch.where(mask, values, 0.0)
    if masked.dim() == 1:
        return total(masked, mask, mask, reduction)
    counts = count_in_row(mask)
    return total(masked.sum(1), counts, counts, reduction)


def total(sums: Tensor, counts: Tensor, active: Tensor, reduction: str) -> Tensor:
    """The same from each anchor's sum of terms, number of terms and number of active terms, each (B,)."""
    checks.one_of("reduction", reduction, REDUCTIONS)
    if reduction == "none":
        return sums
    if reduction == "sum":
        return sums.sum()
    if reduction == "mean":
        return sums.sum() / counts.sum().clamp(min=1)  # without terms their sum is 0
    terms = active.sum()
    return torch.where(terms > 0, sums.sum() / terms.clamp(min=1), 0.0)


def taint(*tensors: Tensor | None) -> Tensor | float:
    """0, or NaN if one of the tensors has NaN or Inf: added to a loss last, so that no mask can hide it."""
    taints = [_taint(x.detach()) for x in tensors if x is not None]
    return sum(taints[1:], start=taints[0]) if taints else 0.0


def _taint(x: Tensor) -> Tensor | float:
    if not x.numel():
        return 0.0
    if distances.freely_read(x):
        low, high = torch.aminmax(x)  # NaN is both
        return float(low) * 0.0 + float(high) * 0.0
    largest: Tensor = torch.linalg.vector_norm(x, torch.inf)
    return (largest * 0.0).float()  # else a float64 target would make the value float64
