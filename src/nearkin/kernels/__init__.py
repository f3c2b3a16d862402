"""Triton kernels of losses over class weights. What they cannot serve, core does.

Nothing here imports triton before a kernel is launched.
"""

import importlib.util
import os
import re
import sys
from importlib.metadata import PackageNotFoundError, version

from torch import Tensor

from nearkin.core import checks, devices
from nearkin.core.autograd import traced

__all__ = ["IMPLEMENTATIONS", "can_run", "check", "has_float64_units", "installed", "interpreted"]

IMPLEMENTATIONS = ("auto", "torch", "triton")


def _recent() -> bool:
    """Whether Triton, if it is there, is one that the kernels were written for: 3.4, which torch 2.8 brings."""
    try:
        numbers = re.findall(r"\d+", version("triton"))
    except PackageNotFoundError:  # part of another package: the kernels' own import tells
        return True
    return tuple(int(number) for number in numbers[:2]) >= (3, 4)


RECENT = _recent()  # looked up here, since a compiled loss cannot


def installed() -> bool:
    there = "triton" in sys.modules or importlib.util.find_spec("triton") is not None  # the search takes its time
    return there and RECENT


def interpreted() -> bool:
    """Whether Triton runs kernels as NumPy, on tensors of the CPU (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET", "0") in ("1", "true", "on", "yes", "y")


def check(impl: object) -> None:
    """`impl` is known, and can be had on this machine."""
    checks.one_of("impl", impl, IMPLEMENTATIONS)
    if impl == "triton" and not installed():
        because = "triton is not installed (pip install triton)"
        if not RECENT:
            because = f"triton {version('triton')} is installed, 3.4 or newer is needed, which comes with torch 2.8"
        checks.impossible("impl", impl, because, IMPLEMENTATIONS[:2])


def has_float64_units(tensor: Tensor) -> bool:
    """Whether the tensor's device multiplies float64 on its matrix units, as data-centre GPUs do, or is interpreted."""
    return devices.has_float64_units(tensor) and (tensor.is_cuda or interpreted())


def can_run(tensor: Tensor) -> bool:
    """Whether a kernel can be had for tensors such as this one, now: no compiler or transform looks into one."""
    return installed() and (tensor.is_cuda or (tensor.device.type == "cpu" and interpreted())) and not traced()
