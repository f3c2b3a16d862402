"""Triplet selections and the losses over them, forward and backward, without a matrix of anchors × references.

One kernel lists each anchor's positives, finds their negatives and computes the terms, one reduces these to the loss,
one computes the gradient. What they do not serve (`serves`), the losses compute in plain torch, with the same result;
only random draws differ: they come from the same generator and have the same distribution.
"""

import functools
import math
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearkin import kernels
from nearkin.core import blockwise
from nearkin.core.autograd import HandGradient
from nearkin.kernels import eligible, launch

__all__ = ["SELECTIONS", "Plan", "loss", "serves"]

SELECTIONS = (
    *("all", "hard", "semihard", "semihard_or_hardest", "semihard_or_skip", "batch_hard", "easy_positive"),
    *("random", "distance_weighted"),
)
ROOM = 2**26  # listed positives: up to as many pairs all may be positive; beyond, the largest class is looked up
ROOM_BESIDE_REFERENCES = ROOM // 8  # a queue is long, and few of its items are positives
CLIP, CUTOFF = 0.5, 1.4  # of `mining.distance_weighted`


class Plan(NamedTuple):
    """What is computed: selection and loss ("hinge", "soft", "margin", "contrastive") with their numbers."""

    selection: str
    loss: str
    margin: float
    squared: bool
    normalize: bool
    reduction: str
    extra: float = 0.0  # ν of the margin loss, the positives' margin of the contrastive one
    cutoff: float = CUTOFF  # of drawn negatives, beside the boundary of each anchor, where there is one
    density: tuple[float, float, float] = (0.0, 0.0, 0.0)  # of distances: power, bend, largest log weight
    balance: bool = True  # positives and negatives of the contrastive loss are reduced apart


def serves(
    impl: str, batch: blockwise.Batch, selection: object, reduction: str, normalize: bool, max_memory: int | None = None
) -> bool:
    """Whether the kernels compute a loss of this batch over this selection."""
    kernels.check(impl)
    if selection not in SELECTIONS or (selection == "distance_weighted" and not (normalize and batch[0].shape[1] > 1)):
        return False
    return eligible.served(impl, batch, reduction, max_memory, ROOM, batch_first=True)


def loss(
    batch: blockwise.Batch,
    plan: Plan,
    dim: int | Tensor,
    *,
    boundary: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor | None:
    """The loss of a batch that the kernels can serve; None where its lists would be too long.

    dim: of the sphere that distance-weighted sampling supposes; a scalar tensor is read by the kernel, on the device.
    boundary: β of the margin loss, of each anchor (B, 1), or one for all ().
    """
    batch, batch_first = eligible.without_batch_first(batch)
    x = batch.embeddings
    with launch.device_of(x):
        capacity = _capacity(batch, plan.selection)
        if capacity is None:
            return None
        seed = fitted = None
        if plan.selection in ("random", "distance_weighted"):
            seed = torch.empty(1, dtype=torch.int64, device=x.device).random_(generator=generator)
            if isinstance(dim, Tensor):
                fitted = torch.stack(_density(dim.to(x.device, torch.float32)))  # (3,)
            else:
                plan = plan._replace(density=_density(dim))
        arguments = (batch.labels, batch.reference_labels, seed, capacity, plan, batch_first, fitted)
        value: Tensor = _Loss.call(x, batch.references, boundary, *arguments)
    return value


def _capacity(batch: blockwise.Batch, selection: str) -> int | None:
    """How many positives of an anchor have room in the lists; None where so many cannot be listed.

    For a batch of ordinary size all references, so that the host need not wait for the device.
    """
    if selection in ("batch_hard", "easy_positive"):
        return 1
    labels = batch.labels if batch.reference_labels is None else batch.reference_labels
    assert isinstance(labels, Tensor)
    num_rows, num_columns = batch.embeddings.shape[0], labels.shape[0]
    if num_rows * num_columns <= (ROOM if batch.references is None else ROOM_BESIDE_REFERENCES):
        return num_columns
    if labels.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    known = labels.sort().values
    ends = torch.searchsorted(known, known, right=True) - torch.searchsorted(known, known)
    largest = int(ends.max())
    return largest if num_rows * largest <= ROOM else None


def _density(dim: Any) -> Any:
    """Of log weights of drawn negatives, as `mining.distance_weighted` has them: powers of d² and of 1 - d²/4, clip."""
    power, bend = (2 - dim) / 2, (dim - 3) / 2
    return power, bend, 2 * power * math.log(CLIP) - bend * math.log(1 - CLIP**2 / 4)


@functools.cache
def _kernels() -> ModuleType:
    from nearkin.kernels import triplet_kernels

    return triplet_kernels


class _Loss(HandGradient):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        references: Tensor | None,
        boundary: Tensor | None,
        labels: Tensor,
        reference_labels: Tensor | None,
        seed: Tensor | None,
        capacity: int,
        plan: Plan,
        batch_first: bool,
        fitted: Tensor | None,
    ) -> Tensor:
        x, ids = x.contiguous(), labels.contiguous()
        references = None if references is None else references.contiguous()
        num_columns = None if reference_labels is None else reference_labels.contiguous()
        arguments = (boundary, seed, capacity, plan, batch_first, fitted)
        value, ctx.forward_state = _kernels().forward(x, ids, references, num_columns, *arguments)
        wants = ctx.needs_input_grad
        # Rows are saved as the kernels have prepared them: a queue may change before the backward pass.
        ctx.save_for_backward(x if wants[0] or wants[2] else None, references if wants[1] else None)
        ctx.plan, ctx.together, ctx.batch_first = plan, references is None, batch_first
        ctx.single = boundary is not None and boundary.dim() == 0
        return value  # type: ignore[no-any-return]

    @staticmethod
    @launch.once
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, references = ctx.saved_tensors
        wants = ctx.needs_input_grad
        gradients: list[Tensor | None] = [None, None, None]
        with launch.device_of(upstream):
            if wants[0] or wants[2]:
                role = "self" if ctx.together else "anchors"
                dtype = torch.float32 if ctx.batch_first else x.dtype
                by_x, by_edge = _kernels().backward(ctx.forward_state, x, upstream, ctx.plan, role, wants[2], dtype)
                if wants[0] and ctx.batch_first:
                    by_x = _kernels().add_first_references(ctx.forward_state, x, by_x, upstream, ctx.plan)
                gradients[0] = by_x if wants[0] else None
                if wants[2]:
                    gradients[2] = by_edge.sum() if ctx.single else by_edge[:, None]
            if wants[1]:
                gradients[1], _ = _kernels().backward(ctx.forward_state, references, upstream, ctx.plan, "references")
        return *gradients, *[None] * 7
