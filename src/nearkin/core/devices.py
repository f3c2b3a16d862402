"""Which devices have float64, and which multiply it fast."""

import functools

import torch
from torch import Tensor

__all__ = ["capability", "exact", "has_float64", "has_float64_units", "is_capturing"]

_FLOAT64_UNITS = ((8, 0), (9, 0), (10, 0))  # compute capabilities: A100, H100 and H200, B200


def has_float64(device: torch.device) -> bool:
    """Whether a device has float64 at all: Apple's GPUs (mps) do not."""
    return device.type != "mps"


def exact(device: torch.device) -> torch.device:
    """Where metrics are computed, which decide in float64: the device itself, or the CPU beside one without."""
    return device if has_float64(device) else torch.device("cpu")


def has_float64_units(tensor: Tensor) -> bool:
    """Whether products of float64 are fast where the tensor is: on CPUs and on data-centre GPUs."""
    if not has_float64(tensor.device):
        return False
    return not tensor.is_cuda or capability(tensor.device) in _FLOAT64_UNITS


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a GPU."""
    return torch.cuda.get_device_capability(device)


def is_capturing(tensor: Tensor) -> bool:
    """Whether a CUDA graph is being captured, so that nothing may be read."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
