"""Duplicate rows, found by hashing: collapsed embeddings must not make the search quadratic."""

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["earlier_copies", "first_copies"]

_CELLS = 2**21  # numbers looked at at a time
_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def earlier_copies(x: Tensor) -> Tensor:
    """(N,) how many rows before each one are equal to it."""
    order, first = _runs(x)
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(x), device=x.device) - first)


def first_copies(x: Tensor, prepare: Callable[[Tensor], Tensor]) -> Tensor:
    """(N,) the index of the first row that is equal to each one, once `prepare` has made rows of these rows."""
    order, first = _runs(x, prepare)
    return torch.empty_like(order).scatter_(0, order, order[first])


def _runs(x: Tensor, prepare: Callable[[Tensor], Tensor] = Tensor.detach) -> tuple[Tensor, Tensor]:
    """An order in which equal rows are neighbours, and where in it the run of each one begins, (N,) each.

    Rows of one hash are compared with their neighbour, so a collision can only cut a run.
    """
    hashes, order = _hashes(x, prepare).sort(stable=True)
    new = torch.ones_like(hashes, dtype=torch.bool)
    new[1:] = hashes[1:] != hashes[:-1]
    for part in torch.split((~new).nonzero().flatten(), _step(x)):
        new[part] = torch.ne(*(prepare(x[order[at]]) for at in (part, part - 1))).any(1)
    at = torch.arange(len(x), device=x.device)
    return order, torch.where(new, at, 0).cummax(0).values if len(x) else at


def _step(x: Tensor) -> int:
    """How many rows are looked at at a time."""
    return max(1, _CELLS // max(x.shape[1], 1))


def _hashes(x: Tensor, prepare: Callable[[Tensor], Tensor]) -> Tensor:
    """Sums of the bit patterns with fixed odd weights, modulo 2^64."""
    generator = torch.Generator().manual_seed(0)
    weights = (torch.randint(-(2**62), 2**62, (x.shape[1],), generator=generator) * 2 + 1).to(x.device)
    hashes = torch.empty(len(x), dtype=torch.long, device=x.device)
    for i in range(0, len(x), step := _step(x)):
        rows = (prepare(x[i : i + step]) + 0.0).contiguous()  # -0 is 0
        bits = rows.view(_INTEGER[rows.element_size()]).long()
        hashes[i : i + step] = ((bits ^ (bits >> 29)) * weights).sum(1)  # upper bits alone would vanish beyond 2^64
    return hashes
