"""Triton twins of core passes: same name, same arguments, same result. What a kernel cannot serve, core does.

Nothing here imports triton before a kernel is wanted.
"""

import importlib.util
import os

from torch import Tensor

from nearkin.core import checks

IMPLEMENTATIONS = ("auto", "torch", "triton")


def installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Whether Triton runs kernels as NumPy, on tensors of the CPU (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET", "0") in ("1", "true", "on", "yes", "y")


def check(impl: object) -> None:
    """`impl` is known, and can be had on this machine."""
    checks.one_of("impl", impl, IMPLEMENTATIONS)
    if impl == "triton" and not installed():
        because = "triton is not installed (pip install triton)"
        checks.impossible("impl", impl, because, IMPLEMENTATIONS[:2])


def can_run(tensor: Tensor) -> bool:
    """Whether a kernel can be had for tensors such as this one."""
    return installed() and (tensor.is_cuda or (tensor.device.type == "cpu" and interpreted()))
