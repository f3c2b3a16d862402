"""Duplicate rows, found by hashing: collapsed embeddings must not make the search quadratic."""

import torch
from torch import Tensor

__all__ = ["earlier_copies"]

_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def earlier_copies(x: Tensor) -> Tensor:
    """(N,) how many rows before each one have the same bits.

    Rows of one hash are compared with their neighbour, so a collision can only make a count too low.
    """
    if not len(x):
        return torch.zeros(0, dtype=torch.long, device=x.device)
    hashes, order = _hashes(x).sort(stable=True)
    new = torch.ones_like(hashes, dtype=torch.bool)
    new[1:] = hashes[1:] != hashes[:-1]
    for part in torch.split((~new).nonzero().flatten(), 8192):
        new[part] = (x[order[part]] != x[order[part - 1]]).any(1)
    at = torch.arange(len(x), device=x.device)
    first = torch.where(new, at, 0).cummax(0).values
    return torch.empty_like(at).scatter_(0, order, at - first)


def _hashes(x: Tensor) -> Tensor:
    """Sums of the bit patterns with fixed odd weights, modulo 2^64."""
    generator = torch.Generator().manual_seed(0)
    weights = (torch.randint(-(2**62), 2**62, (x.shape[1],), generator=generator) * 2 + 1).to(x.device)
    hashes = torch.empty(len(x), dtype=torch.long, device=x.device)
    for i in range(0, len(x), 8192):
        bits = x[i : i + 8192].detach().contiguous().view(_INTEGER[x.element_size()]).long()
        hashes[i : i + 8192] = ((bits ^ (bits >> 29)) * weights).sum(1)  # upper bits alone would vanish beyond 2^64
    return hashes
