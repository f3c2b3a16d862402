"""Which devices multiply float64 fast, and the setting that makes all compute as if they did not."""

import functools
import os

import torch
from torch import Tensor

from nearkin.core import checks

__all__ = ["capability", "exact", "float64_units", "has_float64", "has_float64_units", "is_capturing"]
__all__ += ["set_float64_units"]

_FLOAT64_UNITS = ((8, 0), (9, 0), (10, 0))  # compute capabilities: A100, H100 and H200, B200


def _from_environment() -> str | bool:
    word = os.environ.get("NEARKIN_FLOAT64_UNITS", "auto")
    checks.one_of("NEARKIN_FLOAT64_UNITS", word, ("auto", "0"))
    return "auto" if word == "auto" else False


_setting: str | bool = _from_environment()


def set_float64_units(setting: str | bool) -> None:
    """For tests and measurements: False makes every device compute as one without float64 on its matrix units.

    "auto": each as it is. The environment variable NEARKIN_FLOAT64_UNITS ("auto" or "0") sets the same at the start.
    """
    global _setting
    if setting is not False:
        checks.one_of("float64_units", setting, ("auto",))
    _setting = setting


def float64_units() -> str | bool:
    """What `set_float64_units` has set."""
    return _setting


def has_float64(device: torch.device) -> bool:
    """Whether a device has float64 at all: Apple's GPUs (mps) do not."""
    return device.type != "mps"


def exact(device: torch.device) -> torch.device:
    """Where metrics are computed, which decide in float64: the device itself, or the CPU beside one without."""
    return device if has_float64(device) else torch.device("cpu")


def has_float64_units(tensor: Tensor) -> bool:
    """Whether products of float64 are fast where the tensor is: on CPUs and on data-centre GPUs."""
    if _setting is False or not has_float64(tensor.device):
        return False
    return not tensor.is_cuda or _has_units(tensor.device)


def _has_units(device: torch.device) -> bool:
    return capability(device) in _FLOAT64_UNITS


# What torch.compiler.assume_constant_result does, which would import the compiler, and triton, with this module.
_has_units._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a GPU."""
    return torch.cuda.get_device_capability(device)


def is_capturing(tensor: Tensor) -> bool:
    """Whether a CUDA graph is being captured, so that nothing may be read."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
