"""Collectives: rows of all ranks gathered in the order of their ranks, sums, maxima, broadcasts and digests.

Every function takes `group`, a torch.distributed process group (None: all processes). In a world of one, or without
torch.distributed, each returns its input: nothing is copied, sent or waited for.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nearkin.core.autograd import HandGradient, refuse_second_derivative

__all__ = [
    *("Group", "broadcast", "counts", "digest", "gather", "gather_partial", "largest", "rank", "row_counts", "same"),
    *("size", "summed", "total"),
]

Group = Any  # a torch.distributed.ProcessGroup, whose class some builds of torch lack

_KINDS = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
_DIMS = 6  # dimensions beside the rows that a message can describe
_TEXT, _DESCRIPTION = 320, 72  # bytes of a message: of a sentence, and of each tensor
_FAULT = "!"  # begins a message that is a sentence


def size(group: Group = None) -> int:
    """How many processes there are; 1 without torch.distributed."""
    if not (dist.is_available() and dist.is_initialized()):
        return 1
    number = dist.get_world_size(group)
    if number < 1:
        raise ValueError(f"group must have this process in it, got a group without rank {dist.get_rank()}")
    return number


def rank(group: Group = None) -> int:
    """The number of this process among them, from 0; 0 without torch.distributed."""
    return dist.get_rank(group) if size(group) > 1 else 0


def counts(tensor: Tensor, group: Group = None) -> tuple[int, ...]:
    """How many rows each rank holds. One small exchange, and on a GPU one wait for it."""
    return row_counts(group, tensor=tensor)["tensor"]


def row_counts(group: Group = None, fault: str | None = None, **tensors: Tensor | None) -> dict[str, tuple[int, ...]]:
    """How many rows of each tensor every rank holds, after all ranks have described theirs.

    One exchange of a fixed size, so it ends whatever the ranks hold. If the ranks differ in which tensors there are, in
    a dtype or in a dimension beside the rows, each of them raises the same sentence. `fault`: what is wrong with this
    rank's own input; then every rank raises it and names the rank. Without it the others would wait for ever.
    """
    named = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    world = size(group)
    if world == 1:
        if fault is not None:
            raise ValueError(fault)
        return {name: (tensor.shape[0],) for name, tensor in named.items()}
    try:
        described = [_described(tensor) for tensor in tensors.values()]
    except TypeError as error:
        fault, described = fault or str(error), []
    text = _FAULT.encode() + fault.encode()[: _TEXT - 1] if fault else json.dumps(described).encode()
    room = _TEXT + _DESCRIPTION * len(tensors)
    message = torch.frombuffer(bytearray(text.ljust(room)[:room]), dtype=torch.uint8)
    # The host must know the shapes before it can allocate the rows: the one place where it waits for a device.
    texts = [bytes(row.numpy()).decode(errors="ignore").rstrip() for row in _all_gather(message, group)]
    for number, sentence in enumerate(texts):
        if sentence.startswith(_FAULT):
            raise ValueError(f"rank {number} of {world}: {sentence[1:]}")
    by_tensor = dict(zip(tensors, zip(*map(json.loads, texts), strict=True), strict=True))
    for name, descriptions in by_tensor.items():
        _check_equal(name, descriptions)
    return {name: tuple(shape[0] for _, shape in by_tensor[name]) for name in named}


def gather(
    tensor: Tensor, group: Group = None, counts: Sequence[int] | None = None, *, averaged: bool = True
) -> Tensor:
    """The rows of all ranks, in the order of the ranks; ranks may hold different numbers of them, also none.

    For a loss that every rank computes in full: each rank's gradient of its own rows is then complete, and backward
    returns it with no exchange. It is multiplied by the world size because DDP and FSDP average over ranks
    what one process would sum; `averaged=False` where gradients are summed. counts: how many rows each rank
    holds, where this is known; without it the ranks exchange the counts first.
    """
    return _gather(tensor, group, counts, averaged, partial=False)


def gather_partial(
    tensor: Tensor, group: Group = None, counts: Sequence[int] | None = None, *, averaged: bool = True
) -> Tensor:
    """The same rows for a loss of which every rank computes a part, such as its own shard of the classes.

    Backward first sums the gradient of all rows over the ranks, in float32 or wider; so every rank must run it, and in
    the same order among other exchanges.
    """
    return _gather(tensor, group, counts, averaged, partial=True)


@torch.no_grad()
def total(tensor: Tensor, group: Group = None) -> Tensor:
    """The sum over ranks of tensors of one shape, without gradient; equal bit for bit on all of them."""
    return tensor if size(group) == 1 else _reduced(tensor, group, dist.ReduceOp.SUM)


def summed(tensor: Tensor, group: Group = None) -> Tensor:
    """The sum over ranks with its gradient, for a loss of which every rank computes a part; all must run backward.

    As torch.distributed.nn.functional.all_reduce, which torch 2.13 calls deprecated in favour of a private function.
    """
    result: Tensor = tensor if size(group) == 1 else _Sum.call(tensor, group)
    return result


@torch.no_grad()
def largest(tensor: Tensor, group: Group = None) -> Tensor:
    """The largest over ranks, entry by entry, without gradient."""
    return tensor if size(group) == 1 else _reduced(tensor, group, dist.ReduceOp.MAX)


@torch.no_grad()
def broadcast(tensor: Tensor, group: Group = None, source: int = 0) -> Tensor:
    """Writes the values that rank `source` of the group has into the tensor, and returns it."""
    if size(group) > 1 and tensor.numel() > 0:
        sent = _sendable(tensor.detach().contiguous(), group)
        dist.broadcast(_bytes(sent), source if group is None else dist.get_global_rank(group, source), group)
        if sent.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(sent)
    return tensor


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """A digest of a tensor's bytes, shape and dtype: (32,) uint8 on the CPU."""
    described = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    described.update(_bytes(tensor.detach().cpu().contiguous()).numpy().data)
    return torch.frombuffer(bytearray(described.digest()), dtype=torch.uint8)


def same(tensor: Tensor, group: Group = None) -> bool:
    """Whether all ranks hold the same bytes in the same shape. Waits for the device."""
    if size(group) == 1:
        return True
    digests = _all_gather(digest(tensor), group)
    return bool((digests == digests[0]).all())


class _Sum(HandGradient):
    """The sum over ranks; so is its gradient, and that one's."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _reduced(tensor, group, dist.ReduceOp.SUM)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return summed(gradient, ctx.group), None


class _Gather(HandGradient):
    """Rows of all ranks. Backward: the gradient of this rank's own rows, or its sum over ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group, counts: Sequence[int], factor: int, partial: bool) -> Tensor:
        ctx.group, ctx.counts, ctx.factor, ctx.partial, ctx.kind = group, counts, factor, partial, tensor.dtype
        return _rows(tensor, group, counts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("a batch gathered from several processes")  # each knows its own part of it alone
        if ctx.partial:
            wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
            gradient = _reduced(wide, ctx.group, dist.ReduceOp.SUM)
        own_rank = rank(ctx.group)
        own_rows = gradient.narrow(0, sum(ctx.counts[:own_rank]), ctx.counts[own_rank]) * ctx.factor
        return own_rows.to(ctx.kind), None, None, None, None


def _gather(tensor: Tensor, group: Group, counted: Sequence[int] | None, averaged: bool, partial: bool) -> Tensor:
    world = size(group)
    if world == 1:
        return tensor
    if counted is None:
        counted = counts(tensor, group)
    elif len(counted) != world or counted[rank(group)] != tensor.shape[0]:
        raise ValueError(
            f"counts must be the rows of each of {world} ranks, rank {rank(group)} with {tensor.shape[0]} rows, "
            f"got {tuple(counted)}"
        )
    rows: Tensor = _Gather.call(tensor, group, counted, world if averaged else 1, partial)
    return rows


def _rows(tensor: Tensor, group: Group, counts: Sequence[int]) -> Tensor:
    """All ranks' rows, exchanged as bytes because not every backend knows every dtype, padded to the largest count."""
    most = max(counts)
    padded = tensor.detach().contiguous()
    if most > len(padded):
        padded = torch.cat([padded, padded.new_zeros(most - len(padded), *padded.shape[1:])])
    if padded.numel() == 0:
        return padded.new_zeros(sum(counts), *padded.shape[1:])
    gathered = (
        _all_gather(_bytes(padded), group).view(padded.dtype).view(len(counts), *padded.shape)
    )  # (world, most, ...)
    if min(counts) == most:
        return gathered.flatten(0, 1)
    return torch.cat([part[:number] for part, number in zip(gathered, counts, strict=True)])


def _all_gather(flat: Tensor, group: Group) -> Tensor:
    """(n,) of every rank as (world, n)."""
    sent = _sendable(flat, group)
    gathered = sent.new_empty(size(group), len(sent))
    # torch 2.13 has renamed it.
    exchange: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    exchange(gathered.view(-1), sent, group=group)
    return gathered.to(flat.device)


def _reduced(tensor: Tensor, group: Group, how: Any) -> Tensor:
    reduced = _sendable(tensor.detach().clone(memory_format=torch.contiguous_format), group)
    dist.all_reduce(reduced, how, group)
    return reduced.to(tensor.device)


def _sendable(tensor: Tensor, group: Group) -> Tensor:
    """On a device that the backend can send from: NCCL sends nothing that is on the host."""
    return tensor if tensor.is_cuda else tensor.to(_message_device(group))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _message_device(group: Group) -> torch.device:
    """Where messages are made: on the host, unless the backend knows GPUs only."""
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


def _described(tensor: Tensor | None) -> tuple[str, list[int]] | None:
    """The dtype and the shape of a tensor, as a message has them."""
    if tensor is None:
        return None
    if not isinstance(tensor, Tensor):
        raise TypeError(f"what is exchanged must be a torch tensor, got {type(tensor).__name__}")
    if tensor.dtype not in _KINDS or not 1 <= tensor.dim() <= _DIMS + 1:
        raise TypeError(
            f"a tensor to exchange must have 1 to {_DIMS + 1} dimensions and a common dtype, "
            f"got {tensor.dtype} {tuple(tensor.shape)}"
        )
    return str(tensor.dtype), list(tensor.shape)


def _check_equal(name: str, descriptions: Sequence[Any]) -> None:
    """Refuses descriptions of a tensor, one of each rank, that differ in more than its rows."""
    kinds = [None if part is None else (part[0], part[1][1:]) for part in descriptions]
    for number, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise ValueError(
                f"{name} must have one dtype and shape on all ranks but for the rows: "
                f"{_shape(descriptions[0])} on rank 0, {_shape(descriptions[number])} on rank {number}"
            )


def _shape(description: Any) -> str:
    return "None" if description is None else f"{description[0]} ({', '.join(map(str, description[1]))})"
