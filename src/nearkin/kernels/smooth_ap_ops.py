"""Smooth-AP, forward and backward, without a matrix of anchors × references in memory: `smooth_ap_passes`."""

import functools
from types import ModuleType
from typing import Any

from torch import Tensor

from nearkin import kernels
from nearkin.core import blockwise
from nearkin.core.autograd import HandGradient
from nearkin.kernels import eligible, launch

__all__ = ["loss", "room"]

AUTOMATIC = 192 * 2**20  # default bytes of prepared rows, copies of references and tables
LEAST = 2 * 16 * 5 * 4  # bytes per anchor of two tables of 16 positives


def room(batch: blockwise.Batch, max_memory: int | None) -> int:
    """Bytes for the tables of positives within `max_memory`; 0 where there is none."""
    x, _, references, _ = batch
    size, dim = x.shape
    others = 0 if references is None else references.shape[0]
    left = AUTOMATIC if max_memory is None else max_memory
    row = 8 * (-(-dim // 16) * 16 + 4) if kernels.has_float64_units(x) else 12 * (-(-dim // 32) * 32 + 8)
    left -= (size + others) * row + 4 * others * dim + 56 * size  # prepared rows, and statistics
    if max_memory is None:
        return max(left, AUTOMATIC // 4)
    return left if left >= LEAST * size else 0


def loss(
    batch: blockwise.Batch, temperature: float, max_positives: int | None, reduction: str, table_bytes: int
) -> Tensor:
    """The loss of a batch that the pair kernels can serve (`pair_ops.serves`).

    max_positives: an anchor with more makes the loss NaN; None: any number. table_bytes: as `room` says.
    """
    (x, labels, references, reference_labels), batch_first = eligible.without_batch_first(batch)
    slots = x.shape[0] if references is None else references.shape[0]
    slots = slots if max_positives is None else min(slots, max_positives)
    choices = (batch_first, float(temperature), slots, reduction, table_bytes)
    with launch.device_of(x):
        value: Tensor = _Loss.call(x, references, labels, reference_labels, choices)
    return value


@functools.cache
def _kernels() -> tuple[ModuleType, ModuleType]:
    from nearkin.kernels import row_kernels, smooth_ap_passes

    return smooth_ap_passes, row_kernels


class _Loss(HandGradient):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        references: Tensor | None,
        labels: Tensor,
        reference_labels: Tensor | None,
        choices: tuple[Any, ...],
    ) -> Tensor:
        passes, row_kernels = _kernels()
        x = x.contiguous()
        rows = columns = row_kernels.prepare(x, labels.contiguous(), True, centre=x)
        num_columns = x.shape[0]
        if references is not None and reference_labels is not None:
            references = references.contiguous()
            num_columns = references.shape[0]
            columns = row_kernels.prepare(references, reference_labels.contiguous(), True, centre=x)
        task = passes.Task((x.shape[0], num_columns, x.shape[1]), references is None, *choices)
        value, table, stats = passes.forward(task, rows, columns)
        wants = ctx.needs_input_grad
        inputs = (x if wants[0] else None, references if wants[1] else None)  # a queue may change before the backward
        ctx.save_for_backward(*inputs, rows, columns, table, stats)
        ctx.task = task
        result: Tensor = value
        return result

    @staticmethod
    @launch.once
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        passes, _ = _kernels()
        x, references, rows, columns, table, stats = ctx.saved_tensors
        sides = (x, references, rows, columns)
        by_x, by_references = passes.backward(ctx.task, *sides, table, stats, upstream)
        return by_x, by_references, None, None, None
