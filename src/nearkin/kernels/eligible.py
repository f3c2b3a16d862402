"""Which batches the kernels of pair, triplet and class losses can serve."""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from nearkin import kernels
from nearkin.core import blockwise
from nearkin.core.autograd import traced
from nearkin.core.labels import BatchFirst

__all__ = ["FLOATS", "IDS", "REDUCTIONS", "possible", "served", "without_batch_first"]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
IDS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
REDUCTIONS = ("mean", "active", "sum")
LONGEST = 2**14  # coordinates of a row


def served(
    impl: str, batch: blockwise.Batch, reduction: str, max_memory: int | None, most: int, batch_first: bool = False
) -> bool:
    """Whether kernels can serve this batch: class ids, not float64, up to `most` rows, on CUDA, not under compilation.

    impl="auto" needs a GPU; "triton" accepts the interpreter too. The memory bound is checked as for plain torch, which
    needs more. batch_first: whether they know references that start with the batch itself.
    """
    kernels.check(impl)
    x, labels, references, reference_labels = batch
    if impl == "torch" or not (x.is_cuda or impl == "triton") or traced():
        return False
    if batch_first and isinstance(reference_labels, BatchFirst):
        reference_labels = reference_labels.ids
    sides = ((x, labels),) if references is None else ((x, labels), (references, reference_labels))
    if reduction not in REDUCTIONS or not all(_plain(*side, most) for side in sides):
        return False
    if not possible(x.device, kernels.interpreted()):
        return False
    if max_memory is not None:
        blockwise.block(batch, max_memory)
    return True


def without_batch_first(batch: blockwise.Batch) -> tuple[blockwise.Batch, bool]:
    """The batch with plain class ids of its references, and whether these start with the batch itself.

    If so they have no gradient of their own: it is part of the batch's.
    """
    x, labels, references, reference_labels = batch
    if not isinstance(reference_labels, BatchFirst) or references is None:
        return batch, False
    return blockwise.Batch(x, labels, references.detach(), reference_labels.ids), True


def _plain(x: Tensor, labels: Any, most: int) -> bool:
    return (
        type(x) in (Tensor, nn.Parameter)
        and x.dtype in FLOATS
        and 0 < x.shape[0] <= most
        and x.shape[1] <= LONGEST
        and isinstance(labels, Tensor)
        and labels.dim() == 1
        and labels.dtype in IDS
    )


@functools.cache
def possible(device: torch.device, interpreted: bool) -> bool:
    """Cached per device: the check takes longer than a kernel."""
    tensor = torch.empty(0, device=device)
    return kernels.can_run(tensor) and (kernels.has_float64_units(tensor) or kernels.can_split(tensor))
