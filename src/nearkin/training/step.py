"""The parts of a training step: a batch on the device, embeddings, loss and gradient, the optimiser; or all as a graph.

`before` and `after` are the host's work at each step; what lies between them may be replayed by a CUDA graph.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from nearkin.data import augment
from nearkin.dist import parallel
from nearkin.dist.global_batch import average_gradients
from nearkin.training.cuda_graphs import GraphedStep
from nearkin.training.loader import Batch, on_device

if TYPE_CHECKING:
    from nearkin.training.trainer import Trainer

__all__ = ["DeviceRates", "after", "augmented", "before", "encode", "graph_note", "graphed", "learn", "load", "loss_of"]
__all__ += ["optimize", "update_average"]


def load(trainer: "Trainer", batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rows and numbers of this rank's items, on the device, and keys for their augmentation, on the CPU."""
    rows = on_device(batch.rows, trainer.device)
    items = torch.from_numpy(batch.items[batch.part]).to(trainer.device, non_blocking=True)
    if trainer.augmentation is None:
        return rows, items, None
    # Of all ranks' items: one that occurs twice is augmented twice.
    return rows, items, augment.keys(trainer.state.epoch, batch.number, torch.from_numpy(batch.items))[batch.part]


def augmented(trainer: "Trainer", rows: Tensor, keys: Tensor | None) -> Tensor:
    size = trainer.store.size
    if size is None:
        return rows
    if trainer.augmentation is None or keys is None:
        return augment.centre(rows, size)
    return augment.warp(rows, keys, size=size, augmentation=trainer.augmentation, seed=trainer.augment_seed)


def encode(trainer: "Trainer", inputs: Tensor) -> Tensor:
    """Embeddings in float32 at least."""
    if trainer.graphed is not None:
        embeddings = trainer.graphed(inputs)
    else:
        with torch.autocast(trainer.device.type, trainer.precision, enabled=trainer.precision is not None):
            embeddings = trainer.parallel(inputs)
    trainer.group.advance()
    return embeddings.float() if trainer.precision is not None else embeddings


def loss_of(trainer: "Trainer", embeddings: Tensor, items: Tensor, counts: Sequence[int]) -> Tensor:
    labels = trainer.labels[items]
    item_ids = {"items": items} if trainer.takes_items else {}  # for a loss that learns something per training item
    across = {} if trainer.group.size == 1 else {"counts": counts}
    value: Tensor = trainer.global_loss(embeddings, labels, **across, **item_ids)
    if trainer.old_term is not None:
        value = value + trainer.old_term(embeddings, labels, items=items, **across)
    return value


def learn(trainer: "Trainer", inputs: Tensor, items: Tensor, counts: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
    """Adds the gradient of a batch to the parameters; returns loss and embeddings, detached."""
    embeddings = encode(trainer, inputs)
    value = loss_of(trainer, embeddings, items, counts)
    trainer.scaler.scale(value).backward()  # type: ignore[no-untyped-call]
    return value.detach(), embeddings.detach()


def before(trainer: "Trainer") -> None:
    if trainer.rates is not None:
        trainer.rates.update()


def optimize(trainer: "Trainer", measure: bool) -> Tensor | None:
    """Clips the gradient, moves the weights and their average; returns the gradient's norm if asked for or clipped."""
    norm, clip = None, trainer.recipe.optimizer.clip
    several = trainer.group.size > 1
    if several:
        trainer.group.advance()
        average_gradients(trainer.loss, trainer.group.world)
        parallel.average_norms(trainer.encoder, trainer.group)
    if clip or measure:
        trainer.scaler.unscale_(trainer.optimizer)
        if several:
            norm = parallel.global_norm(trainer.parameters, trainer.group)
            if clip:
                parallel.clip(trainer.parameters, clip, norm)
        else:
            with_gradient = [p for p in trainer.parameters if p.grad is not None]
            norm = nn.utils.get_total_norm([p.grad for p in with_gradient if p.grad is not None])
            if clip:
                nn.utils.clip_grads_with_norm_(with_gradient, clip, norm)
    with nullcontext() if trainer.rates is None else trainer.rates.in_groups():
        trainer.scaler.step(trainer.optimizer)
    trainer.scaler.update()
    trainer.optimizer.zero_grad(set_to_none=True)
    if trainer.average is not None:
        update_average(trainer.average, trainer.encoder)
    return norm


def after(trainer: "Trainer") -> None:
    if trainer.average is not None:
        trainer.average.n_averaged += 1


class DeviceRates:
    """The learning rates of an optimiser on its device, where a captured step reads them: a graph repeats numbers.

    Steps that are not captured read them there too, so that both compute the same: kernels get them in float32.
    For torch's optimisers, which count their steps on the device too; one that does either on the host has no use of
    this, and cannot be captured.
    """

    @staticmethod
    def serve(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
        return device.type == "cuda" and type(optimizer) in (torch.optim.AdamW, torch.optim.RMSprop, torch.optim.SGD)

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self.optimizer = optimizer
        self.rates = torch.zeros(len(optimizer.param_groups), device=device)
        for group in optimizer.param_groups:
            if "capturable" in group:
                group["capturable"] = True

    def update(self) -> None:
        """Copies the rates of the groups to the device, without waiting for it."""
        rates = torch.tensor([group["lr"] for group in self.optimizer.param_groups])
        self.rates.copy_(rates, non_blocking=True)

    @contextmanager
    def in_groups(self) -> Iterator[None]:
        """The groups have the rates on the device as theirs; a checkpoint must find numbers again."""
        numbers = [group["lr"] for group in self.optimizer.param_groups]
        for group, rate in zip(self.optimizer.param_groups, self.rates.unbind(), strict=True):
            group["lr"] = rate
        try:
            yield
        finally:
            for group, number in zip(self.optimizer.param_groups, numbers, strict=True):
                group["lr"] = number


@torch.no_grad()
def update_average(average: AveragedModel, encoder: nn.Module) -> None:
    """`average.update_parameters(encoder)` without counting, for which a captured step has no host: add 1 to
    `average.n_averaged` after each step."""
    weights: list[Tensor] = list(average.module.parameters())
    current: list[Tensor] = list(encoder.parameters())
    if average.n_averaged == 0:
        for weight, now in zip(weights, current, strict=True):
            weight.copy_(now)
    elif weights:
        assert average.multi_avg_fn is not None
        average.multi_avg_fn(weights, current, average.n_averaged)
    pairs = list(zip(average.module.buffers(), encoder.buffers(), strict=True))
    for dtype in {buffer.dtype for buffer, _ in pairs}:
        same = [pair for pair in pairs if pair[0].dtype == dtype]
        torch._foreach_copy_([buffer for buffer, _ in same], [now for _, now in same])


def graphed(trainer: "Trainer") -> GraphedStep:
    """`learn` and `optimize` of (inputs, items) as a graph, once it is captured: loss, embeddings and gradient norm."""

    owner: Any = weakref.proxy(trainer)  # which holds the graph: its memory is free when the trainer is gone

    def step(inputs: Tensor, items: Tensor) -> tuple[Tensor, ...]:
        value, embeddings = learn(owner, inputs, items)
        norm = optimize(owner, measure=True)
        assert norm is not None
        return value, embeddings, norm

    generators = (getattr(part, "generator", None) for part in trainer.loss.modules())
    return GraphedStep(step, [trainer.encoder, trainer.loss], {g for g in generators if g is not None})


def graph_note(trainer: "Trainer") -> list[str]:
    """Why the steps of one process on a GPU are not graphs, where that was not the user's choice."""
    recipe, options = trainer.recipe, trainer.recipe.training
    chosen = "training.graphs" in recipe.explicit_keys or options.graphs is True
    if chosen or trainer.device.type != "cuda" or trainer.group.size > 1:
        return []
    reason = f"it is not known whether a graph can repeat encoder {recipe.encoder['name']}; training.graphs=true tries"
    if options.chunk is not None:
        reason = "training.chunk encodes a batch in parts"
    elif options.graphs == "encoder":
        reason = "a graph does not repeat the Python code of your own loss; training.graphs=true tries"
    return [f"steps are no CUDA graphs: {reason}"]
