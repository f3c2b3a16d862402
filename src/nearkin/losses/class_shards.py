"""Class weights split over processes: who holds which classes, and how their parts of a loss become one.

Every process meets the embeddings of all with its own classes and makes a log-sum-exp an anchor; these and the terms of
the own class, a few numbers an anchor, are exchanged, never scores. All processes then have the same loss. The gradient
by its own class weights is complete on each; that by the embeddings is a part, which `world.gather_partial` sums.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from nearkin.core import checks, class_softmax, distances, reduce
from nearkin.core.autograd import HandGradient
from nearkin.core.class_softmax import Rivals
from nearkin.dist import collectives

DRAWN = 2**20  # numbers that are drawn at once for class weights


class Shard(NamedTuple):
    """The classes first..last-1 of `total`, which this process holds; all of them in a world of one.

    The losses' functions take it as `shard`, with the class weights of these classes alone and the batch of all
    processes, from `gather`. averaged: whether the processes' gradients are averaged afterwards, as by
    DistributedDataParallel, or summed.
    """

    first: int
    last: int
    total: int
    processes: int = 1
    group: collectives.Group = None
    averaged: bool = True

    @property
    def number(self) -> int:
        """How many classes these are."""
        return self.last - self.first


def split(shard: bool, num_classes: int) -> Shard | None:
    """This process's part of the classes, or None where they are not to be shared; parts differ by one at the most."""
    if not isinstance(shard, bool):
        raise TypeError(f"shard must be True or False, got {shard!r}")
    if not shard:
        return None
    checks.integer("num_classes", num_classes, 1)
    size, rank = collectives.size(), collectives.rank()
    checks.enough("num_classes", num_classes, size, "the number of processes that share them (shard=True)")
    return Shard(rank * num_classes // size, (rank + 1) * num_classes // size, num_classes, size)


def draw(rows: int, dim: int, fill: Callable[[Tensor], Tensor], shard: Shard | None, each: int = 1) -> nn.Parameter:
    """Class weights (rows, dim) as `fill` makes them of an empty tensor, or the shard's part of the very same.

    A shard is drawn a block at a time: torch's normal numbers on the CPU are the same in blocks of whole sixteens.
    """
    checks.integer("num_classes", rows, 1)
    checks.integer("dim", dim, 1)
    if shard is None or shard.processes == 1:
        return nn.Parameter(fill(torch.empty(rows, dim)))
    first, last = shard.first * each, shard.last * each
    own = torch.empty(last - first, dim)
    step = max(1, DRAWN // dim // 16) * 16 if own.device.type == "cpu" else rows
    start = 0
    while start < rows:
        end = rows if rows - start < 2 * step else start + step
        part = fill(torch.empty(end - start, dim))
        low, high = max(first, start), min(last, end)
        if low < high:
            own[low - first : high - first] = part[low - start : high - start]
        start = end
    return nn.Parameter(own)


def keep(module: nn.Module, **each: int) -> None:
    """Marks what a module holds of its own classes only, `each` rows a class, for those who save or average it.

    A parameter has `sharded` = True, `rows` = (first, last) and `total`, counted in rows; `layout` knows buffers too.
    A state dict may hold the own rows, or all of which the own are taken.
    """
    shard: Shard | None = module.shard  # type: ignore[assignment]
    if shard is None:
        return
    module.shares = each  # type: ignore[assignment]
    mark(module)
    module.register_load_state_dict_pre_hook(_take_own)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_post_hook(mark)  # type: ignore[no-untyped-call]


def mark(module: nn.Module, *_: Any) -> None:
    """Says of each sharded tensor of this module that it is one."""
    for name, (first, last, total) in _own(module).items():
        tensor: Any = getattr(module, name)
        tensor.sharded, tensor.rows, tensor.total = True, (first, last), total


def layout(module: nn.Module) -> dict[str, tuple[int, int, int]]:
    """Of each entry of the module's state dict that is a shard: its first row, the row after its last, and of how many.

    Also of a module around a loss, and of a copy, whose tensors have lost their marks.
    """
    every = module.named_modules()
    return {f"{path}.{name}".lstrip("."): rows for path, part in every for name, rows in _own(part).items()}


def _own(module: nn.Module) -> dict[str, tuple[int, int, int]]:
    shard, shares = getattr(module, "shard", None), getattr(module, "shares", {})
    if not isinstance(shard, Shard):
        return {}
    return {name: (shard.first * each, shard.last * each, shard.total * each) for name, each in shares.items()}


def _take_own(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, (first, last, total) in _own(module).items():
        given = state.get(prefix + name)
        if given is None:
            continue
        rows = given.shape[0] if given.dim() else 0
        if rows == total:
            state[prefix + name] = given[first:last]
        elif rows != last - first:
            raise ValueError(
                f"{prefix}{name} must have {total} rows, or the {last - first} of this process, {first} to {last - 1}, "
                f"got {tuple(given.shape)}"
            )


def gather(
    shard: Shard | None, embeddings: Tensor, labels: Any, dim: int, relation: bool = False
) -> tuple[Tensor, Any, Shard | None]:
    """The batch of all processes, in the order of their ranks, and the shard if there is more than one.

    relation: whether labels are not only class ids. What is wrong with the batch of one process is said by all.
    """
    if shard is None:
        return embeddings, labels, None
    if collectives.size(shard.group) != shard.processes:
        raise ValueError(
            "a loss with shard=True must be made after torch.distributed is started, in the world it is used in: "
            f"made for {shard.processes} processes, got {collectives.size(shard.group)}"
        )
    if shard.processes == 1:
        return embeddings, labels, None
    fault = None
    try:
        if not relation:
            checks.classes(embeddings, labels, shard.total, dim)
        else:
            if not isinstance(labels, Tensor):  # a relation of items with each other cannot be split by rows
                raise TypeError(f"labels must be a tensor where shard=True, got {type(labels).__name__}")
            checks.batch(embeddings, labels, None, None)
            checks.dimensions("embeddings", embeddings, dim, "the proxies have")
    except (TypeError, ValueError) as error:
        fault = str(error)
    tensors = {"embeddings": embeddings, "labels": labels} if fault is None else {"embeddings": None, "labels": None}
    counts = collectives.row_counts(shard.group, fault, **tensors)
    labels = collectives.gather(labels, shard.group, counts["labels"])
    embeddings = collectives.gather_partial(embeddings, shard.group, counts["embeddings"], averaged=shard.averaged)
    return embeddings, labels, shard


def classified(
    embeddings: Tensor, labels: Any, weight: Tensor, shard: Shard | None, each: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """What `checks.classes` gives; ids are places among the own classes, their number for a class held elsewhere."""
    if shard is None:
        return checks.classes(embeddings, labels, weight.shape[0] // each, weight.shape[1])
    ids, known, spoilt = checks.classes(embeddings, labels, shard.total, weight.shape[1])
    here = (ids >= shard.first) & (ids < shard.last)
    return torch.where(here, ids - shard.first, shard.number), known, spoilt


def held(shard: Shard | None, ids: Tensor) -> Tensor:
    """Ids from `classified` that may index: a class held elsewhere has that of some own one, and no say."""
    return ids if shard is None else ids.clamp(max=max(0, shard.number - 1))


def nobody(embeddings: Tensor, weight: Tensor, ids: Tensor, **_: Any) -> Rivals:
    """What a pass over no classes finds; on the graph, so that all processes go back together."""
    anchors = embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))
    kind = class_softmax.kind_of(embeddings, weight)
    still = (anchors.sum(1) * 0).to(kind) + weight.sum().to(kind) * 0
    own = still[:, None].expand(anchors.shape)
    return Rivals(torch.zeros_like(still), still + reduce.log_zero(still), anchors, own, still.new_zeros(()).detach())


def joined(shard: Shard | None, ids: Tensor, found: Rivals, term: Tensor) -> tuple[Rivals, Tensor]:
    """The rivals of all processes, and a term (B,) of the own class from where it is held."""
    if shard is None:
        return found, term
    peak, rest, term, taint = _joined(shard, ids, found.peak, found.rest, term, found.taint)
    return found._replace(peak=peak, rest=rest, taint=taint), term


def pushed(shard: Shard | None, ids: Tensor, push: Tensor, term: Tensor) -> tuple[Tensor, Tensor]:
    """The same where the rivals' log-sum-exp is one tensor (B,), `reduce.nothing` where there are none."""
    if shard is None:
        return push, term
    peak, rest, term = _joined(shard, ids, push.detach(), push - push.detach(), term)
    return peak + rest, term


def cross_entropy(shard: Shard | None, logits: Tensor, ids: Tensor) -> Tensor:
    """-log of the own class's part of the softmax, (B,), from logits (B, C) of all classes, or of those held here."""
    if shard is None:
        return torch.nn.functional.cross_entropy(logits, ids, reduction="none")
    others = ids[:, None] != torch.arange(logits.shape[1], device=ids.device)
    target = logits.gather(1, held(shard, ids)[:, None]).squeeze(1)
    push, target = pushed(shard, ids, reduce.logsumexp(logits, others), target)
    return reduce.softplus(push - target)


def _joined(shard: Shard, ids: Tensor, peak: Tensor, rest: Tensor, term: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
    term = torch.where(ids < shard.number, term, 0.0).to(rest.dtype)
    found: tuple[Tensor, ...] = _Join.call(shard.group, peak, rest, term, *more)
    return found


class _Join(HandGradient):
    """Log-sum-exps of all processes as one, and sums of what else there is; each takes back its own part."""

    @staticmethod
    def forward(ctx: Any, group: collectives.Group, peak: Tensor, rest: Tensor, *terms: Tensor) -> tuple[Tensor, ...]:
        none = peak + rest <= reduce.log_zero(rest) / 2
        top = torch.where(none, -torch.inf, peak)
        top = collectives.largest(top, group) if top.numel() else top
        top = torch.where(top == -torch.inf, 0.0, top)
        own = torch.where(none, 0.0, (peak - top).to(distances.wide(rest)) + rest).exp()
        own = torch.where(none, 0.0, own)
        total, *terms_found = _sums(group, own, *terms)
        rest, _ = class_softmax.finished(total, rest)
        ctx.save_for_backward((own / torch.where(total == 0, 1.0, total)).to(rest.dtype))
        ctx.mark_non_differentiable(top)
        return top, rest, *terms_found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor, by_rest: Tensor, *by_terms: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, by_rest * ctx.saved_tensors[0], *by_terms


def everywhere(shard: Shard | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Sums over the processes of what each has a part of."""
    if shard is None:
        return tensors
    found: tuple[Tensor, ...] = _Sum.call(shard.group, *tensors)
    return found


class _Sum(HandGradient):
    @staticmethod
    def forward(ctx: Any, group: collectives.Group, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(_sums(group, *tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *by: Tensor) -> tuple[Tensor | None, ...]:
        return None, *by


def _sums(group: collectives.Group, *tensors: Tensor) -> list[Tensor]:
    """Sums over the processes, of all tensors in one exchange."""
    kind = distances.wide(tensors[0])
    flat = torch.cat([tensor.flatten().to(kind) for tensor in tensors])
    flat = collectives.total(flat, group) if flat.numel() else flat
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view(like.shape).to(like.dtype) for part, like in zip(parts, tensors, strict=True)]


def alike(shard: Shard, x: Tensor) -> Tensor:
    """The tensor for a computation that all processes do alike: its gradient counts once, not once a process."""
    x = x.view_as(x)
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient / shard.processes)  # type: ignore[no-untyped-call]
    return x
