"""The Triton twin of `core.facility.search`: one launch, and the host need not know how many medoids there are."""

import functools
from types import ModuleType

from torch import Tensor

from nearkin import kernels
from nearkin.core.facility import Problem

__all__ = ["search", "serves"]

LARGEST = 4096  # items: a program has a row of them in registers


def serves(p: Problem) -> bool:
    return kernels.can_run(p.keys) and 0 < len(p.keys) <= LARGEST


def search(p: Problem, gamma: Tensor, sweeps: int) -> Tensor:
    """The key of each item's medoid, (B,), as `core.facility.search` finds it."""
    return _kernels().search(p, gamma, sweeps)  # type: ignore[no-any-return]


@functools.cache
def _kernels() -> ModuleType:
    from nearkin.kernels import facility_kernels

    return facility_kernels
