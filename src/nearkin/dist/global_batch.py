"""Many processes, one batch: a loss of the items of all ranks, exactly as one process would take it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from nearkin.core import checks
from nearkin.dist import collectives
from nearkin.core.relations import LabelDistance, Relation

__all__ = ["GlobalBatch", "average_gradients", "share_state"]


def __dir__() -> list[str]:
    return __all__


_DRAWN = ("random", "distance_weighted")  # selections that are drawn


class GlobalBatch(nn.Module):
    """A loss that every rank takes of the global batch: the items of all ranks, in the order of the ranks.

        encoder = DistributedDataParallel(encoder)
        loss = GlobalBatch(losses.TripletLoss())
        value = loss(encoder(images), labels)  # the same number on every rank
        value.backward()                       # DistributedDataParallel averages the encoder's gradients
        average_gradients(loss)                # and this those of proxies, class weights, β, where the loss has any

    Gradients are those of one process with the whole batch, for every loss and selection: embeddings and labels are
    gathered, every rank computes the whole loss, and its own rows take their gradient, with no exchange in backward.
    Ranks may hold different numbers of items, also none. A `CrossBatchMemory` belongs inside; it then stores the global
    batch and is the same everywhere, as are all other buffers. A loss with `shard=True` does its own exchanges and gets
    the rank's own batch. With `reduction="none"` the terms of the global batch come back, and every rank must make the
    same of all of them. In a world of one this is the loss itself.

    The first call gives all ranks the parameters and buffers of rank 0, as DistributedDataParallel does. A selection
    that draws, or sampled classes, draw on every rank what rank 0 draws, from its generator.

    group: the process group, all processes unless given. averaged: whether the ranks' gradients are averaged
    afterwards, as by DistributedDataParallel and FSDP, or summed (False).
    """

    def __init__(self, loss: nn.Module, group: collectives.Group = None, *, averaged: bool = True) -> None:
        super().__init__()
        if not isinstance(loss, nn.Module):
            raise TypeError(f"loss must be a torch module, got {type(loss).__name__}")
        self.loss, self.group, self.averaged = loss, group, averaged
        self._met = False
        shard: Any = getattr(loss, "shard", None)
        if shard:  # its own exchanges go by the same group and the same factor
            if group is not None and collectives.size(group) != collectives.size():
                raise ValueError("group must be all processes for a loss with shard=True, got a part of them")
            loss.shard = shard._replace(group=group, averaged=averaged)

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

        labels: class ids, multi-label rows or targets, one a row. references: a second view, or the `stored` of a
        memory; gathered too, with their gradient. items: (B,) ids of the rows, for a loss that learns something per
        item (`MarginLoss(num_items=)`). order: (B,) numbers by which the global batch is sorted, such as each
        item's place in it, where the loss cares about places: it draws, or an item's place in its class means something
        (`NPairLoss`). Views of as many rows are sorted with it. counts: the rows of every rank where they are known
        (of references as well); it spares the exchange of shapes, but then other ranks do not hear of this one's fault.
        """
        single = collectives.size(self.group) == 1
        if (single and order is None) or getattr(self.loss, "shard", None):
            return self._taken([embeddings, labels, references, reference_labels], items)
        if self._meets_itself(embeddings, labels, references, reference_labels):
            references = reference_labels = None
        whole = {"embeddings": embeddings, "labels": labels, "references": references}
        whole |= {"reference_labels": reference_labels, "items": items, "order": order}
        if not single:
            whole = self._gathered(whole, counts)
        order = whole.pop("order")
        if order is not None:
            place = order.argsort(stable=True)
            whole = {name: _placed(value, place) for name, value in whole.items()}
        items = whole.pop("items")
        with _same_draws(self.loss, embeddings.device, self.group):
            return self._taken(list(whole.values()), items)

    def _taken(self, arguments: list[Tensor | None], items: Tensor | None) -> Tensor:
        """The loss, without the last arguments if nobody gave them: class losses take two, memories three."""
        more = {} if items is None else {"items": items}
        while arguments[-1] is None and len(arguments) > 2:
            arguments.pop()
        value: Tensor = self.loss(*arguments, **more)
        return value

    def _meets_itself(self, embeddings: Any, labels: Any, references: Any, reference_labels: Any) -> bool:
        """A batch given as its own references, which a loss knows by identity, and gathered tensors are others."""
        if references is not embeddings or (reference_labels is not None and reference_labels is not labels):
            return False
        return "references" in signature(self.loss.forward).parameters

    def _gathered(self, own: dict[str, Tensor | None], counts: Sequence[int] | None) -> dict[str, Tensor | None]:
        """The arguments over all ranks, once these have found that they fit together; at first, their states too."""
        fault = _fault(own)
        if counts is None:
            rows = collectives.meet(self.group, fault, **own)
        elif fault is None:
            rows = {name: tuple(counts) for name in own}
        else:
            raise ValueError(fault)
        if not self._met:
            share_state(self.loss, self.group)
            self._met = True
        whole = dict(own)
        for name, value in own.items():
            if value is not None:
                whole[name] = collectives.gather(value, self.group, rows[name], averaged=self.averaged)
        return whole


def average_gradients(module: nn.Module, group: collectives.Group = None) -> None:
    """Replaces the gradients of a loss's parameters by their mean over the ranks, equal bit for bit on all of them.

    For proxies, class weights, β and all else that every rank holds whole, after backward and before the optimiser's
    step, where DistributedDataParallel does not look after them. Each rank has computed the whole gradient already: the
    mean only takes out what rounding may have set apart. Parameters of which each rank holds its own rows
    (`parameter.sharded`) are left alone. One without a gradient on all ranks keeps none; on some, it counts as 0 there.
    """
    if collectives.size(group) == 1:
        return
    held = [p for p in module.parameters() if p.requires_grad and not getattr(p, "sharded", False)]
    for kind, place in dict.fromkeys((p.dtype, p.device) for p in held):
        _average([p for p in held if (p.dtype, p.device) == (kind, place)], group)


def _average(parameters: list[nn.Parameter], group: collectives.Group) -> None:
    """One exchange for all; its last numbers say on how many ranks each parameter has a gradient."""
    with torch.no_grad():
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        there = [float(p.grad is not None) for p in parameters]
        flat = torch.cat([*(part.flatten() for part in parts), parts[0].new_tensor(there)])
        flat = collectives.total(flat.to(torch.promote_types(flat.dtype, torch.float32)), group)
        counted = flat[len(flat) - len(parameters) :]
        mean = torch.split(flat / collectives.size(group), [*(p.numel() for p in parameters), len(parameters)])
        for number, parameter in enumerate(parameters):
            if parameter.grad is not None:
                parameter.grad.copy_(mean[number].view_as(parameter))
            elif bool(counted[number] > 0):  # read only here: with a gradient of its own a rank knows
                parameter.grad = mean[number].view_as(parameter).to(parameter.dtype, copy=True)


def share_state(module: nn.Module, group: collectives.Group = None) -> None:
    """Gives every rank the parameters and buffers that rank 0 has; sharded ones are left alone."""
    if collectives.size(group) == 1:
        return
    held = {name: value for name, value in _state(module) if not getattr(value, "sharded", False)}
    said = "\n".join(f"{name} {value.dtype} {tuple(value.shape)}" for name, value in held.items())
    if not collectives.same(torch.tensor(list(said.encode()), dtype=torch.uint8), group):
        raise ValueError(
            f"{type(module).__name__} must have parameters and buffers of the same names, shapes and kinds on all "
            f"ranks; here, on rank {collectives.rank(group)}: {said.replace(chr(10), ', ')}"
        )
    for tensor in held.values():
        collectives.share(tensor, group)


def _state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _fault(given: dict[str, Tensor | None]) -> str | None:
    """What is wrong with this rank's own arguments, before it makes others wait for it."""
    try:
        embeddings = checks.rows("embeddings", given["embeddings"])
        _described("labels", given["labels"], embeddings, "embeddings")
        references = given["references"]
        if references is not None:
            checks.rows("references", references)
            if given["reference_labels"] is not None:
                _described("reference_labels", given["reference_labels"], references, "references")
            elif isinstance(given["labels"], Tensor) and given["labels"].dtype == torch.bool:
                raise ValueError("reference_labels must be given with references and multi-label rows, got None")
        elif given["reference_labels"] is not None:
            raise ValueError("reference_labels need references, got None")
        for name in ("items", "order"):
            if given[name] is not None:
                checks.class_ids(name, given[name], embeddings)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def _described(name: str, labels: Any, items: Tensor, of_name: str) -> None:
    """Labels that say something of this rank's items, one by one."""
    if isinstance(labels, (Relation, LabelDistance)):
        raise TypeError(
            f"{name} must be ids, rows or targets here, got a {type(labels).__name__}, which says nothing of other "
            "ranks' items; a memory goes inside: GlobalBatch(CrossBatchMemory(loss, ...))"
        )
    if not isinstance(labels, Tensor):
        raise TypeError(f"{name} must be a torch tensor, got {type(labels).__name__}")
    if labels.dim() == 0 or labels.shape[0] != items.shape[0]:
        raise ValueError(f"{name} must have one entry per row of {of_name}: {len(items)} rows, {labels.numel()} labels")
    checks.same_device(name, labels, items, of_name)


def _placed(value: Tensor | None, place: Tensor) -> Tensor | None:
    return value.index_select(0, place) if value is not None and len(value) == len(place) else value


@contextmanager
def _same_draws(loss: nn.Module, device: torch.device, group: collectives.Group) -> Iterator[None]:
    """What a loss draws, all ranks draw alike: from rank 0's generator, while the others keep their own place."""
    if collectives.size(group) == 1 or not any(_draws(module) for module in loss.modules()):
        yield
        return
    for generator in _generators(loss):
        generator.set_state(collectives.share(generator.get_state(), group))
    host, there = torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    torch.set_rng_state(collectives.share(host.clone(), group))
    if there is not None:
        torch.cuda.set_rng_state(collectives.share(there.clone(), group), device)
    try:
        yield
    finally:
        if collectives.rank(group) > 0:
            torch.set_rng_state(host)
            if there is not None:
                torch.cuda.set_rng_state(there, device)


def _draws(module: nn.Module) -> bool:
    """Whether a module may draw: some selections and sampled classes do; of another's module nothing is known."""
    settings = getattr(module, "settings", None)
    if not isinstance(settings, dict):
        home = type(module).__module__.split(".")[0]
        return home not in ("nearkin", "torch") or isinstance(module, nn.modules.dropout._DropoutNd)
    selection = settings.get("selection", "all")
    rate = settings.get("sample_rate", getattr(module, "sample_rate", 1))
    return rate != 1 or not isinstance(selection, str) or selection in _DRAWN


def _generators(loss: nn.Module) -> list[torch.Generator]:
    held = (getattr(module, "settings", {}) for module in loss.modules())
    found = (settings.get("generator") for settings in held if isinstance(settings, dict))
    return [generator for generator in found if generator is not None]
