"""Facility location on a GPU: from distances to clustering and loss in one launch.

The host need not know how many medoids there are.
"""

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from nearkin import kernels
from nearkin.core.autograd import HandGradient

__all__ = ["loss", "serves", "solve"]

LARGEST = 4096  # items: a program has a row of them in registers


def serves(distance: Tensor) -> bool:
    return kernels.can_run(distance) and 0 < len(distance) <= LARGEST


def solve(
    distance: Tensor, labels: Tensor, gamma: float | Tensor, sweeps: int, num_clusters: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, score and 1 - NMI (3,); each item's medoid and that of its class (2, B); chosen items (B,) bool.

    The medoids are those that `core.facility.search` finds.
    """
    if isinstance(gamma, Tensor):
        gamma = gamma.to(distance.device)
    else:
        gamma = torch.full((), gamma, dtype=torch.float64, device=distance.device)
    distance, labels = distance.detach().contiguous(), labels.contiguous()
    return _kernels().solve(distance, labels, gamma.detach(), sweeps, num_clusters)  # type: ignore[no-any-return]


def loss(
    distance: Tensor, labels: Tensor, gamma: float | Tensor, sweeps: int, num_clusters: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss, with gradients, and what `solve` finds."""
    result: tuple[Tensor, Tensor, Tensor, Tensor] = _Loss.call(distance, gamma, labels, sweeps, num_clusters)
    return result


@functools.cache
def _kernels() -> ModuleType:
    from nearkin.kernels import facility_kernels

    return facility_kernels


class _Loss(HandGradient):
    """The clustering is constant, so the gradient is 1 at an item's true medoid and -1 at the chosen one."""

    @staticmethod
    def forward(
        ctx: Any, distance: Tensor, gamma: float | Tensor, labels: Tensor, sweeps: int, num_clusters: int | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        values, indices, chosen = solve(distance, labels, gamma, sweeps, num_clusters)
        ctx.mark_non_differentiable(values, indices, chosen)
        ctx.set_materialize_grads(False)  # no zeros for those
        ctx.save_for_backward(distance, labels, values, indices)
        return values[0], values, indices, chosen

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        distance, labels, values, indices = ctx.saved_tensors
        by_distance = by_gamma = None
        if ctx.needs_input_grad[1]:
            by_gamma = upstream * values[2] * (values[0] > 0)
        if ctx.needs_input_grad[0]:
            again = torch.is_grad_enabled()  # the gradient itself depends on the upstream gradient alone
            slopes = _kernels().slopes(
                distance.detach(),
                labels.contiguous(),
                values,
                indices,
                torch.ones_like(upstream) if again else upstream,
            )
            by_distance = slopes * upstream if again else slopes
        return by_distance, by_gamma, None, None, None
