"""The library's one Triton kernel, the softmax over very many classes (`many_classes`), and where it serves.

Nothing here imports triton before the kernel is launched.
"""

import importlib.util
import re
import sys
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from nearkin.core.autograd import traced
from nearkin.core.class_blocks import COORDINATE

__all__ = ["installed", "missing", "run"]

FROM = 2**23  # anchors · classes from which the kernel takes less time than plain torch
RUN, STEP = 32_768, 128  # class weights whose derivatives are held at once, a multiple of the latter


def _recent() -> bool:
    """Whether Triton, if it is there, is one that the kernel was written for: 3.4, which torch 2.8 brings."""
    try:
        numbers = re.findall(r"\d+", version("triton"))
    except PackageNotFoundError:  # part of another package: the kernel's own import tells
        return True
    return tuple(int(number) for number in numbers[:2]) >= (3, 4)


RECENT = _recent()  # looked up here, since a compiled loss cannot


def installed() -> bool:
    there = "triton" in sys.modules or importlib.util.find_spec("triton") is not None  # the search takes its time
    return there and RECENT


def missing() -> str | None:
    """Why the kernel cannot be had on this machine, and the way out; None where it can."""
    if installed():
        return None
    if not RECENT:
        return f"triton {version('triton')} is installed, 3.4 or newer is needed, which comes with torch 2.8"
    return "triton is not installed (pip install triton)"


def run(embeddings: Tensor, weight: Tensor, max_memory: int | None) -> int:
    """How many class weights a run of the kernel has within `max_memory` bytes; 0 where it does not serve."""
    (number, dim), classes = embeddings.shape, weight.shape[0]
    serves = (
        embeddings.is_cuda
        and embeddings.dtype == weight.dtype == torch.bfloat16
        and number * classes >= FROM
        and weight.is_contiguous()
        and weight.data_ptr() % 16 == 0
        and dim % 8 == 0
        and not traced()
        and installed()
    )
    if not serves or max_memory is None:
        return RUN if serves else 0
    room = 2 * number + 4 * dim  # derivatives, and their product with the anchors
    return min(RUN, max(0, max_memory - COORDINATE * dim * number) // room // STEP * STEP)
