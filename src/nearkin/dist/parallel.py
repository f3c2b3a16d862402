"""How several ranks train one encoder: replicated, with gradients averaged (DDP), or sharded (FSDP).

Both average gradients over ranks. The loss multiplies the gradient of a rank's own rows by the number of ranks
(`dist.GlobalBatch`), so the average is the gradient of one process with the whole batch.
"""

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from nearkin.dist import collectives
from nearkin.dist.group import ProcessGroup

__all__ = ["Parallel", "Scaler", "average_norms", "clip", "global_norm", "shard", "shards_on_cpu"]

Module = TypeVar("Module", bound=nn.Module)


class Parallel:
    """The encoder as a step calls it: itself in a group of one, else under DistributedDataParallel, or sharded.

    Which weights are trainable may change between epochs (`schedule.frozen_epochs`): `refresh` then wraps the encoder
    again, because DDP only synchronises those that were trainable when it was made.
    """

    def __init__(self, encoder: nn.Module, strategy: str, group: ProcessGroup, unused: bool) -> None:
        self.encoder, self.strategy, self.group, self.unused = encoder, strategy, group, unused
        self.wrapped: Any = encoder
        self._trainable: object = None

    def refresh(self) -> None:
        trainable = tuple(p.requires_grad for p in self.encoder.parameters())
        if self.group.size == 1 or self.strategy != "ddp" or trainable == self._trainable:
            return
        self._trainable, self.wrapped = trainable, self.encoder
        if any(trainable):
            supported = inspect.signature(nn.parallel.DistributedDataParallel).parameters
            buffers = "forward_sync_buffers" if "forward_sync_buffers" in supported else "broadcast_buffers"
            options: dict[str, Any] = {buffers: False}  # `average_norms` keeps them equal
            self.wrapped = nn.parallel.DistributedDataParallel(
                self.encoder,
                process_group=self.group.world,
                gradient_as_bucket_view=True,
                find_unused_parameters=self.unused,
                **options,
            )

    def __call__(self, batch: Tensor) -> Tensor:
        result: Tensor = self.wrapped(batch)
        return result

    def all_finite(self, parameters: list[Tensor]) -> bool:
        """Whether this rank's parts of the parameters are finite. Waits for the device."""
        return bool(torch.stack([_local(p.detach()).isfinite().all() for p in parameters]).all())

    @contextmanager
    def sync_gradients(self, last: bool) -> Iterator[None]:
        """Averages gradients over ranks in the last of several backward passes only."""
        if self.strategy == "fsdp" and self.group.size > 1:
            self.wrapped.set_requires_gradient_sync(last)
            yield
            return
        ddp = isinstance(self.wrapped, nn.parallel.DistributedDataParallel)
        with self.wrapped.no_sync() if ddp and not last else nullcontext():
            yield


def shard(encoder: Module, device: torch.device, group: ProcessGroup) -> Module:
    """Shards the weights over the ranks, each block of layers by itself, so that one is complete at a time.

    Returns an unsharded copy, to be filled with complete weights for evaluation and saving.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if device.type == "cpu" and not shards_on_cpu():
        raise ValueError(f"training.strategy=fsdp needs torch 2.7 or newer on a CPU, got {torch.__version__}")
    plain = copy.deepcopy(encoder).requires_grad_(False)
    mesh = init_device_mesh(device.type, (group.size,))
    for block in list(_blocks(encoder)):
        fully_shard(block, mesh=mesh)
    fully_shard(encoder, mesh=mesh)
    return plain


def shards_on_cpu() -> bool:
    """Whether torch's FSDP runs without a GPU: that of 2.6 records events that its CPU streams do not have."""
    return hasattr(torch.cpu.Stream, "record_event")


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The layers of every outermost sequence: what a forward pass goes through one after the other."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.Sequential) and len(child) > 1:
            yield from (block for block in child if any(True for _ in block.parameters()))
        else:
            yield from _blocks(child)


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor: a view of its own rows, or all."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _is_sharded(parameter: Tensor) -> bool:
    """Whether each rank holds its own rows of it."""
    return hasattr(parameter, "to_local") or bool(getattr(parameter, "sharded", False))


@torch.no_grad()
def global_norm(parameters: list[Tensor], group: ProcessGroup) -> Tensor:
    """The norm of the gradient of all parameters together, sharded ones included."""
    replicated = [_local(p.grad) for p in parameters if p.grad is not None and not _is_sharded(p)]
    sharded = [_local(p.grad) for p in parameters if p.grad is not None and _is_sharded(p)]
    norm = nn.utils.get_total_norm(replicated)
    if not any(_is_sharded(p) for p in parameters):
        return norm
    squares = nn.utils.get_total_norm(sharded).square() if sharded else torch.zeros_like(norm)
    return (norm.to(squares).square() + collectives.total(squares, group.world)).sqrt()


@torch.no_grad()
def clip(parameters: list[Tensor], most: float, norm: Tensor) -> None:
    """Scales the gradient to this norm where it is larger, as torch does for one process."""
    factor = (most / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = _local(parameter.grad)
            gradient.mul_(factor.to(gradient))


@torch.no_grad()
def average_norms(encoder: nn.Module, group: ProcessGroup) -> None:
    """Averages the running statistics of batch norm over ranks: each has seen its own part of the batch."""
    norms = [part for part in encoder.modules() if isinstance(part, _BatchNorm) and part.training]
    buffers = [b for part in norms for b in (part.running_mean, part.running_var) if b is not None]
    if not buffers or group.size == 1:
        return
    flat = collectives.total(torch.cat([b.flatten() for b in buffers]), group.world) / group.size
    for buffer, mean in zip(buffers, torch.split(flat, [b.numel() for b in buffers]), strict=True):
        buffer.copy_(mean.view_as(buffer))


class Scaler(torch.amp.GradScaler):
    """A gradient scaler that skips a step on every rank when the gradient of one is not finite."""

    def __init__(self, device: str, *, group: ProcessGroup, **options: Any) -> None:
        super().__init__(device, **options)
        self.group = group

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._enabled:
            return
        super().unscale_(optimizer)
        flags = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        for flag in flags.values():
            dist.all_reduce(flag, dist.ReduceOp.MAX, self.group.world)
