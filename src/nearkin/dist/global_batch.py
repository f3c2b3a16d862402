"""The global batch: a loss over the items of all ranks, exactly as one process would compute it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from nearkin.core import checks
from nearkin.core.relations import LabelDistance, Relation
from nearkin.dist import collectives

__all__ = ["GlobalBatch", "average_gradients", "share_state"]


def __dir__() -> list[str]:
    return __all__


_RANDOM_SELECTIONS = ("random", "random_semihard", "distance_weighted")


class GlobalBatch(nn.Module):
    """A loss that every rank computes over the global batch: the items of all ranks, in the order of the ranks.

        encoder = DistributedDataParallel(encoder)
        loss = GlobalBatch(losses.TripletLoss())
        value = loss(encoder(images), labels)  # the same number on every rank
        value.backward()                       # DistributedDataParallel averages the encoder's gradients
        average_gradients(loss)                # and this those of proxies, class weights, β, where the loss has any

    Gradients are those of one process with the whole batch, for every loss and selection: embeddings and labels are
    gathered, every rank computes the whole loss, and keeps the gradient of its own rows, with no exchange in backward.
    Ranks may hold different numbers of items, also none. A `CrossBatchMemory` belongs inside; it then stores the global
    batch and is the same everywhere, as are all other buffers. A loss with `shard=True` does its own exchanges and gets
    the rank's own batch. With `reduction="none"` the terms of the global batch are returned, and every rank must do the
    same with all of them. In a world of one this is the loss itself.

    The first call gives all ranks the parameters and buffers of rank 0, as DistributedDataParallel does. A random
    selection, or sampled classes, are on every rank what rank 0 draws from its generator.

    group: the process group, all processes unless given. averaged: whether the ranks' gradients are averaged
    afterwards, as by DistributedDataParallel and FSDP, or summed (False).
    """

    def __init__(self, loss: nn.Module, group: collectives.Group = None, *, averaged: bool = True) -> None:
        super().__init__()
        if not isinstance(loss, nn.Module):
            raise TypeError(f"loss must be a torch module, got {type(loss).__name__}")
        self.loss, self.group, self.averaged = loss, group, averaged
        self._synced = False
        self._takes_references = "references" in signature(loss.forward).parameters
        held: Any = getattr(loss, "held", None)
        if held:  # its own exchanges go by the same group and the same factor
            if group is not None and collectives.size(group) != collectives.size():
                raise ValueError("group must be all processes for a loss with shard=True, got a part of them")
            loss.held = held._replace(group=group, averaged=averaged)

    @property
    def lr_scale(self) -> float:
        """That of the loss, whose parameters are the only ones."""
        return float(getattr(self.loss, "lr_scale", 1.0))

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        references: Tensor | None = None,
        reference_labels: Tensor | None = None,
        *,
        items: Tensor | None = None,
        order: Tensor | None = None,
        counts: Sequence[int] | None = None,
    ) -> Tensor:
        """The loss of the global batch; each argument is this rank's part of it.

        labels: class ids, multi-label rows or targets, one per row. references: a second view, or the `stored` of a
        memory; gathered too, with their gradient. items: (B,) ids of the rows, for a loss that learns something per
        item (`MarginLoss(num_items=)`). order: (B,) numbers by which the global batch is sorted, such as each
        item's position in it, where the loss depends on positions: it draws, or an item's position in its class counts
        (`NPairLoss`). Views of as many rows are sorted with it. counts: the rows of every rank where they are known
        (of references as well); it saves the exchange of shapes, but then other ranks do not learn of this one's fault.
        """
        single = collectives.size(self.group) == 1
        if (single and order is None) or getattr(self.loss, "held", None):
            return self._loss([embeddings, labels, references, reference_labels], items)
        if self._refers_to_itself(embeddings, labels, references, reference_labels):
            references = reference_labels = None
        batch = {"embeddings": embeddings, "labels": labels, "references": references}
        batch |= {"reference_labels": reference_labels, "items": items, "order": order}
        if not single:
            batch = self._gathered(batch, counts)
        order = batch.pop("order")
        if order is not None:
            permutation = order.argsort(stable=True)
            batch = {name: _permuted(value, permutation) for name, value in batch.items()}
        items = batch.pop("items")
        with _same_draws(self.loss, embeddings.device, self.group):
            return self._loss(list(batch.values()), items)

    def _loss(self, arguments: list[Tensor | None], items: Tensor | None) -> Tensor:
        """The loss, without trailing arguments that are None: class losses take two, memories three."""
        keywords = {} if items is None else {"items": items}
        while arguments[-1] is None and len(arguments) > 2:
            arguments.pop()
        value: Tensor = self.loss(*arguments, **keywords)
        return value

    def _refers_to_itself(self, embeddings: Any, labels: Any, references: Any, reference_labels: Any) -> bool:
        """Whether a batch is its own references, which a loss knows by identity; gathered tensors are others."""
        is_itself = references is embeddings and (reference_labels is None or reference_labels is labels)
        return is_itself and self._takes_references

    def _gathered(self, local: dict[str, Tensor | None], counts: Sequence[int] | None) -> dict[str, Tensor | None]:
        """The arguments of all ranks, after a check that they fit together; at the first call, their states too."""
        fault = _input_error(local)
        if counts is None:
            rows = collectives.row_counts(self.group, fault, **local)
        elif fault is None:
            rows = {name: tuple(counts) for name in local}
        else:
            raise ValueError(fault)
        if not self._synced:
            share_state(self.loss, self.group)
            self._synced = True
        gathered = dict(local)
        for name, value in local.items():
            if value is not None:
                gathered[name] = collectives.gather(value, self.group, rows[name], averaged=self.averaged)
        return gathered


def average_gradients(module: nn.Module, group: collectives.Group = None) -> None:
    """Replaces the gradients of a loss's parameters by their mean over the ranks, equal bit for bit on all of them.

    For proxies, class weights, β and all other replicated parameters, after backward and before the optimiser's step,
    where DistributedDataParallel does not synchronise them. Each rank has computed the whole gradient already: the mean
    only removes differences of rounding. Parameters of which each rank holds its own rows (`parameter.sharded`) are
    left alone. A parameter without a gradient on all ranks keeps none; on some, it counts as 0 there.
    """
    if collectives.size(group) == 1:
        return
    replicated = [p for p in module.parameters() if p.requires_grad and not getattr(p, "sharded", False)]
    for dtype, device in dict.fromkeys((p.dtype, p.device) for p in replicated):
        _average([p for p in replicated if (p.dtype, p.device) == (dtype, device)], group)


def _average(parameters: list[nn.Parameter], group: collectives.Group) -> None:
    """One exchange for all; its last numbers count the ranks on which each parameter has a gradient."""
    with torch.no_grad():
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        has_gradient = [float(p.grad is not None) for p in parameters]
        flat = torch.cat([*(part.flatten() for part in parts), parts[0].new_tensor(has_gradient)])
        flat = collectives.total(flat.to(torch.promote_types(flat.dtype, torch.float32)), group)
        counted = flat[len(flat) - len(parameters) :]
        mean = torch.split(flat / collectives.size(group), [*(p.numel() for p in parameters), len(parameters)])
        for number, parameter in enumerate(parameters):
            if parameter.grad is not None:
                parameter.grad.copy_(mean[number].view_as(parameter))
            elif bool(counted[number] > 0):  # read only here: a rank with a gradient knows
                parameter.grad = mean[number].view_as(parameter).to(parameter.dtype, copy=True)


def share_state(module: nn.Module, group: collectives.Group = None) -> None:
    """Gives every rank the parameters and buffers that rank 0 has; sharded ones are left alone."""
    if collectives.size(group) == 1:
        return
    tensors = {name: value for name, value in _state(module) if not getattr(value, "sharded", False)}
    layout = "\n".join(f"{name} {value.dtype} {tuple(value.shape)}" for name, value in tensors.items())
    if not collectives.same(torch.tensor(list(layout.encode()), dtype=torch.uint8), group):
        raise ValueError(
            f"{type(module).__name__} must have parameters and buffers of the same names, shapes and dtypes on all "
            f"ranks; on rank {collectives.rank(group)}: {layout.replace(chr(10), ', ')}"
        )
    for tensor in tensors.values():
        collectives.broadcast(tensor, group)


def _state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _input_error(arguments: dict[str, Tensor | None]) -> str | None:
    """What is wrong with this rank's own arguments, found before other ranks wait for it."""
    try:
        embeddings = checks.rows("embeddings", arguments["embeddings"])
        _check_labels("labels", arguments["labels"], embeddings, "embeddings")
        references = arguments["references"]
        if references is not None:
            checks.rows("references", references)
            if arguments["reference_labels"] is not None:
                _check_labels("reference_labels", arguments["reference_labels"], references, "references")
            elif isinstance(arguments["labels"], Tensor) and arguments["labels"].dtype == torch.bool:
                raise ValueError("reference_labels must be given with references and multi-label rows, got None")
        elif arguments["reference_labels"] is not None:
            raise ValueError("reference_labels need references, got None")
        for name in ("items", "order"):
            if arguments[name] is not None:
                checks.class_ids(name, arguments[name], embeddings)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def _check_labels(name: str, labels: Any, items: Tensor, of_name: str) -> None:
    """Refuses labels that are not one per item of this rank."""
    if isinstance(labels, (Relation, LabelDistance)):
        raise TypeError(
            f"{name} must be ids, rows or targets here, got a {type(labels).__name__}, which does not describe other "
            "ranks' items; a memory goes inside: GlobalBatch(CrossBatchMemory(loss, ...))"
        )
    if not isinstance(labels, Tensor):
        raise TypeError(f"{name} must be a torch tensor, got {type(labels).__name__}")
    if labels.dim() == 0 or labels.shape[0] != items.shape[0]:
        raise ValueError(f"{name} must have one entry per row of {of_name}: {len(items)} rows, {labels.numel()} labels")
    checks.same_device(name, labels, items, of_name)


def _permuted(value: Tensor | None, permutation: Tensor) -> Tensor | None:
    return value.index_select(0, permutation) if value is not None and len(value) == len(permutation) else value


@contextmanager
def _same_draws(loss: nn.Module, device: torch.device, group: collectives.Group) -> Iterator[None]:
    """All ranks draw the same: from rank 0's generator, while those of the others keep their state."""
    if collectives.size(group) == 1 or not any(_draws(module) for module in loss.modules()):
        yield
        return
    for generator in _generators(loss):
        generator.set_state(collectives.broadcast(generator.get_state(), group))
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices, enabled=collectives.rank(group) > 0):
        torch.set_rng_state(collectives.broadcast(torch.get_rng_state(), group))
        if devices:
            torch.cuda.set_rng_state(collectives.broadcast(torch.cuda.get_rng_state(device), group), device)
        yield


def _draws(module: nn.Module) -> bool:
    """Whether a module may draw: some selections and sampled classes do; a module of other origin might."""
    settings = getattr(module, "settings", None)
    if not isinstance(settings, Mapping):
        home = type(module).__module__.split(".")[0]
        return home not in ("nearkin", "torch") or isinstance(module, nn.modules.dropout._DropoutNd)
    selection = settings.get("selection", "all")
    rate = settings.get("sample_rate", getattr(module, "sample_rate", 1))
    return rate != 1 or not isinstance(selection, str) or selection in _RANDOM_SELECTIONS


def _generators(loss: nn.Module) -> list[torch.Generator]:
    settings_of = (getattr(module, "settings", {}) for module in loss.modules())
    generators = (settings.get("generator") for settings in settings_of if isinstance(settings, Mapping))
    return [generator for generator in generators if generator is not None]
