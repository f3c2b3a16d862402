"""The processes that share a step: who they are, and their rows brought together in the order of their ranks.

Every function takes `group`, a torch.distributed process group (None: all processes). In a world of one, which is also
what a program without torch.distributed lives in, each returns its input: nothing is copied, sent or waited for.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nearkin.core.autograd import HandGradient

Group = Any  # a torch.distributed.ProcessGroup, whose class some builds of torch lack

_KINDS = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
_DIMS = 6  # dimensions beside the rows that a message can speak of
_WIDTH = 3 + _DIMS  # numbers a tensor: rows, kind, dimensions, and the dimensions themselves
_WORDS = 40  # int64 words of text, 320 bytes
_BLOCK = 2**20  # words that are mixed at once
_SEEDS = (-7046029254386353131, 0x2545F4914F6C)


def size(group: Group = None) -> int:
    """How many processes there are; 1 without torch.distributed."""
    if not (dist.is_available() and dist.is_initialized()):
        return 1
    number = dist.get_world_size(group)
    if number < 1:
        raise ValueError(f"group must have this process in it, got a group without rank {dist.get_rank()}")
    return number


def rank(group: Group = None) -> int:
    """The place of this process among them, from 0; 0 without torch.distributed."""
    return dist.get_rank(group) if size(group) > 1 else 0


def counts(tensor: Tensor, group: Group = None) -> tuple[int, ...]:
    """How many rows each rank holds. One small exchange, and on a GPU one wait for it."""
    return meet(group, tensor=tensor)["tensor"]


def meet(group: Group = None, fault: str | None = None, **tensors: Tensor | None) -> dict[str, tuple[int, ...]]:
    """How many rows of each tensor every rank holds, after all ranks have said what they hold.

    One exchange of a fixed size, so it ends whatever the ranks hold. If the ranks differ in which tensors there are, in
    a kind or in a dimension beside the rows, each of them raises the same sentence. `fault`: what is wrong with this
    rank's own input; then every rank raises it and names the rank, where otherwise the others would wait for ever.
    """
    named = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    world = size(group)
    if world == 1:
        if fault is not None:
            raise ValueError(fault)
        return {name: (tensor.shape[0],) for name, tensor in named.items()}
    try:
        said = [number for tensor in tensors.values() for number in _said(tensor)]
    except TypeError as error:
        fault, said = fault or str(error), [0] * _WIDTH * len(tensors)
    mine = torch.tensor([*_text(fault or ""), *said], device=_home(group))
    # The host must know the shapes before it can make room for the rows: the one place where it waits for a device.
    table = _all_gather(mine, group).to("cpu")
    for number, words in enumerate(table[:, :_WORDS]):
        if bool(words.any()):
            raise ValueError(f"rank {number} of {world}: {_read(words)}")
    table = table[:, _WORDS:].view(world, len(tensors), _WIDTH)
    for column, name in enumerate(tensors):
        _agree(name, table[:, column])
    rows = {name: table[:, column, 0] for column, name in enumerate(tensors) if name in named}
    return {name: tuple(int(number) for number in column) for name, column in rows.items()}


def gather(
    tensor: Tensor, group: Group = None, counts: Sequence[int] | None = None, *, averaged: bool = True
) -> Tensor:
    """The rows of all ranks, in the order of the ranks; ranks may hold different numbers of them, also none.

    For a loss that every rank computes whole: each rank's gradient of its own rows is then complete, and backward takes
    these, with no exchange. They are multiplied by the world size because DistributedDataParallel and FSDP average over
    ranks what one process would sum; `averaged=False` where gradients are summed. counts: how many rows each rank
    holds, where this is known; without it the ranks tell each other first.
    """
    return _gather(tensor, group, counts, averaged, partial=False)


def gather_partial(
    tensor: Tensor, group: Group = None, counts: Sequence[int] | None = None, *, averaged: bool = True
) -> Tensor:
    """The same rows for a loss of which every rank computes a part, as of its own shard of the classes.

    Backward first sums the gradient of all rows over the ranks, in float32 or wider; so every rank must run it, and in
    the same order among other exchanges.
    """
    return _gather(tensor, group, counts, averaged, partial=True)


@torch.no_grad()
def total(tensor: Tensor, group: Group = None) -> Tensor:
    """The sum over ranks of tensors of one shape, without gradient; equal bit for bit on all of them."""
    return tensor if size(group) == 1 else _reduced(tensor, group, dist.ReduceOp.SUM)


@torch.no_grad()
def largest(tensor: Tensor, group: Group = None) -> Tensor:
    """The largest over ranks, entry by entry, without gradient."""
    return tensor if size(group) == 1 else _reduced(tensor, group, dist.ReduceOp.MAX)


@torch.no_grad()
def share(tensor: Tensor, group: Group = None, source: int = 0) -> Tensor:
    """Writes the values that rank `source` of the group has into the tensor, and returns it."""
    if size(group) > 1 and tensor.numel() > 0:
        held = _sendable(tensor.detach().contiguous(), group)
        dist.broadcast(_bytes(held), source if group is None else dist.get_global_rank(group, source), group)
        if held.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(held)
    return tensor


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """128 bits that stand for a tensor's bytes, shape and kind: (2,) int64 on its device.

    For telling tensors apart, not for secrets: each 8 bytes are mixed with their place, and the results added up.
    """
    held = _bytes(tensor.detach().contiguous())
    if held.storage_offset() % 8:  # a slice that begins amid a word
        held = held.clone()
    whole = len(held) // 8 * 8
    said = torch.tensor([*_said(tensor if tensor.dim() else tensor[None]), tensor.dim()], device=held.device)
    last = torch.nn.functional.pad(held[whole:], (0, 8 - len(held) + whole)).view(torch.int64)
    found, place = held.new_zeros(2, dtype=torch.int64), 1
    for words in (said, last, *torch.split(held[:whole].view(torch.int64), _BLOCK)):
        at = torch.arange(place, place + len(words), device=held.device)
        found = found + torch.stack([_mix(_mix(words + seed) ^ at * seed).sum() for seed in _SEEDS])
        place += len(words)
    return found


def same(tensor: Tensor, group: Group = None) -> bool:
    """Whether all ranks hold the same bytes in the same shape. Waits for the device."""
    if size(group) == 1:
        return True
    found = _all_gather(digest(tensor), group)
    return bool((found == found[0]).all())


def _mix(words: Tensor) -> Tensor:
    """Integers spread over all 64 bits (multiplications wrap around)."""
    words = (words ^ (words >> 29)) * -4658895280553007687
    return (words ^ (words >> 32)) * -7723592293110705685


class _Gather(HandGradient):
    """Rows of all ranks; what comes back for the own ones, or the sum over ranks of what comes back for them."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group, counts: Sequence[int], factor: int, partial: bool) -> Tensor:
        ctx.group, ctx.counts, ctx.factor, ctx.partial, ctx.kind = group, counts, factor, partial, tensor.dtype
        return _rows(tensor, group, counts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.partial:
            wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
            gradient = _reduced(wide, ctx.group, dist.ReduceOp.SUM)
        here = rank(ctx.group)
        own = gradient.narrow(0, sum(ctx.counts[:here]), ctx.counts[here]) * ctx.factor
        return own.to(ctx.kind), None, None, None, None


def _gather(tensor: Tensor, group: Group, counted: Sequence[int] | None, averaged: bool, partial: bool) -> Tensor:
    world = size(group)
    if world == 1:
        return tensor
    if counted is None:
        counted = counts(tensor, group)
    elif len(counted) != world or counted[rank(group)] != tensor.shape[0]:
        raise ValueError(
            f"counts must say the rows of each of {world} ranks, rank {rank(group)} with {tensor.shape[0]} rows, "
            f"got {tuple(counted)}"
        )
    rows: Tensor = _Gather.call(tensor, group, counted, world if averaged else 1, partial)
    return rows


def _rows(tensor: Tensor, group: Group, counts: Sequence[int]) -> Tensor:
    """All ranks' rows, exchanged as bytes because not every backend knows every kind, padded to the largest count."""
    most = max(counts)
    held = tensor.detach().contiguous()
    if most > len(held):
        held = torch.cat([held, held.new_zeros(most - len(held), *held.shape[1:])])
    if held.numel() == 0:
        return held.new_zeros(sum(counts), *held.shape[1:])
    found = _all_gather(_bytes(held), group).view(held.dtype).view(len(counts), *held.shape)  # (world, most, ...)
    if min(counts) == most:
        return found.flatten(0, 1)
    return torch.cat([part[:number] for part, number in zip(found, counts, strict=True)])


def _all_gather(flat: Tensor, group: Group) -> Tensor:
    """(n,) of every rank as (world, n)."""
    held = _sendable(flat, group)
    found = held.new_empty(size(group), len(held))
    # torch 2.13 has a new name for it.
    exchange: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    exchange(found.view(-1), held, group=group)
    return found.to(flat.device)


def _reduced(tensor: Tensor, group: Group, how: Any) -> Tensor:
    held = _sendable(tensor.detach().clone(memory_format=torch.contiguous_format), group)
    dist.all_reduce(held, how, group)
    return held.to(tensor.device)


def _sendable(tensor: Tensor, group: Group) -> Tensor:
    """Where the backend can reach it: NCCL sends nothing that lies on the host."""
    return tensor if tensor.is_cuda else tensor.to(_home(group))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _home(group: Group) -> torch.device:
    """Where messages are written: on the host, unless the backend knows GPUs only."""
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


def _said(tensor: Tensor | None) -> list[int]:
    """What a rank says of a tensor: rows, kind and dimensions, or only -1 where there is none."""
    if tensor is None:
        return [-1] + [0] * (_WIDTH - 1)
    if not isinstance(tensor, Tensor):
        raise TypeError(f"what is exchanged must be a torch tensor, got {type(tensor).__name__}")
    if tensor.dtype not in _KINDS or not 1 <= tensor.dim() <= _DIMS + 1:
        raise TypeError(
            f"a tensor to exchange must have 1 to {_DIMS + 1} dimensions and a common kind, "
            f"got {tensor.dtype} {tuple(tensor.shape)}"
        )
    rest = [*tensor.shape[1:], *[0] * (_DIMS + 1 - tensor.dim())]
    return [tensor.shape[0], _KINDS.index(tensor.dtype), tensor.dim() - 1, *rest]


def _agree(name: str, said: Tensor) -> None:
    """All ranks said (world, _WIDTH) the same of this tensor, but for its rows."""
    for number in range(1, len(said)):
        if bool((said[number, 1:] != said[0, 1:]).any()) or bool((said[number, 0] < 0) != (said[0, 0] < 0)):
            raise ValueError(
                f"{name} must be of one kind and shape on all ranks but for the rows: "
                f"{_shape(said[0])} on rank 0, {_shape(said[number])} on rank {number}"
            )


def _shape(said: Tensor) -> str:
    if int(said[0]) < 0:
        return "None"
    dims = ", ".join(str(int(dim)) for dim in (said[0], *said[3 : 3 + int(said[2])]))
    return f"{_KINDS[int(said[1])]} ({dims})"


def _text(sentence: str) -> list[int]:
    """A sentence as a fixed number of words; what is longer is cut."""
    letters = sentence.encode()[: _WORDS * 8].ljust(_WORDS * 8, b"\0")
    return [int.from_bytes(letters[at : at + 8], "little", signed=True) for at in range(0, len(letters), 8)]


def _read(words: Tensor) -> str:
    letters = b"".join(int(word).to_bytes(8, "little", signed=True) for word in words)
    return letters.rstrip(b"\0").decode(errors="ignore")
