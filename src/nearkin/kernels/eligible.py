"""Which batches the kernels of losses over class weights can serve."""

from typing import Any

import torch
from torch import Tensor, nn

from nearkin import kernels

__all__ = ["FLOATS", "IDS", "REDUCTIONS", "class_weights", "learns"]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
IDS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
REDUCTIONS = ("mean", "active", "sum")
LONGEST = 2**14  # coordinates of a row


def class_weights(impl: str, x: Any, labels: Any, weight: Tensor, per_class: int = 1) -> bool:
    """Whether kernels can serve a batch and class weights (C·K, D): class ids, not float64, on CUDA, not under
    compilation. impl="auto" needs a GPU; "triton" accepts the interpreter too."""
    return (
        impl != "torch"
        and type(x) in (Tensor, nn.Parameter)
        and (x.is_cuda or impl == "triton")
        and x.dim() == 2
        and x.dtype in FLOATS
        and 0 < x.shape[0] < 2**31
        and x.shape[1] <= LONGEST
        and isinstance(labels, Tensor)
        and labels.dim() == 1
        and labels.dtype in IDS
        and labels.shape[0] == x.shape[0]
        and type(weight) in (Tensor, nn.Parameter)
        and weight.dtype in FLOATS
        and weight.dim() == 2
        and weight.shape[1] == x.shape[1] > 0
        and per_class <= weight.shape[0] < 2**31
        and weight.shape[0] % per_class == 0
        and x.device == labels.device == weight.device
        and kernels.can_run(x)
    )


def learns(*tensors: Tensor) -> bool:
    """Whether a gradient by one of them may be asked for; inside an autograd function none is."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
