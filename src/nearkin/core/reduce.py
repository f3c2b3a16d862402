"""Masked sums, means, maxima and log-sum-exps, and the last step of a loss. No signal is exactly 0, on the graph."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from nearkin.core import checks

REDUCTIONS = ("mean", "active", "sum", "none")


def mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of the masked entries of each row, (B,); 0 for a row without any."""
    return torch.where(mask, values, 0.0).sum(1) / mask.sum(1).clamp(min=1)


def nothing(values: Tensor) -> float:
    """Stands for the logarithm of 0: lower than any score, yet safe to add to and to differentiate."""
    return torch.finfo(values.dtype).min / 4


def logsumexp(values: Tensor, mask: Tensor, dim: int = 1) -> Tensor:
    """log of the sum of exp over the masked entries along `dim`; `nothing` where there are none."""
    if values.shape[dim] == 0:
        return values.sum(dim) + nothing(values)
    top = values.detach().masked_fill(~mask, -torch.inf).amax(dim, keepdim=True)
    top = torch.where(top == -torch.inf, 0.0, top)
    total = (values - top).masked_fill(~mask, -torch.inf).exp().sum(dim)
    found = mask.any(dim)
    return torch.where(found, torch.where(found, total, 1.0).log() + top.squeeze(dim), nothing(values))


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), exact for every x: torch's own turns linear at 20, which is 2e-9 off."""
    return -logsigmoid(-x)


def largest(values: Tensor, mask: Tensor, dim: int = 1) -> tuple[Tensor, Tensor]:
    """The largest masked entry along `dim` and its index, of equals the first; `nothing` and 0 where there are none."""
    if values.shape[dim] == 0:
        flat = values.sum(dim)
        return flat + nothing(values), torch.zeros_like(flat, dtype=torch.long)
    # -inf marks what is masked out; NaN wins, as it does in torch, so that a spoilt row cannot look sound.
    index = values.detach().masked_fill(~mask, -torch.inf).argmax(dim, keepdim=True)
    best = values.gather(dim, index).squeeze(dim)
    return torch.where(mask.any(dim), best, nothing(values)), index.squeeze(dim)


def terms(values: Tensor, mask: Tensor, reduction: str) -> Tensor:
    """Reduces the masked terms of a loss: (B,) for one an anchor, (B, T) for several.

    "mean" over all of them, "active" over those above 0, "sum", or "none": one value an anchor, the sum of its terms.
    """
    if reduction == "active":
        mask = mask & ~(values <= 0)  # a NaN is never inactive
    kept = torch.where(mask, values, 0.0)
    if kept.dim() == 1:
        return total(kept, mask, mask, reduction)
    number = mask.sum(1)
    return total(kept.sum(1), number, number, reduction)


def total(sums: Tensor, counts: Tensor, active: Tensor, reduction: str) -> Tensor:
    """The same from each anchor's sum of terms, number of terms and number of active terms, each (B,)."""
    checks.one_of("reduction", reduction, REDUCTIONS)
    if reduction == "none":
        return sums
    if reduction == "sum":
        return sums.sum()
    number = (counts if reduction == "mean" else active).sum()
    return torch.where(number > 0, sums.sum() / number.clamp(min=1), 0.0)


def taint(*tensors: Tensor | None) -> Tensor | float:
    """0, or NaN if one of the tensors holds NaN or Inf: added to a loss last, so that no mask can hide it."""
    return sum((x.detach() * 0).sum(dtype=torch.float32) for x in tensors if x is not None)
