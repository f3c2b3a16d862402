"""Class weights split over processes: which process holds which classes, and how their parts of a loss are joined.

Every process compares the embeddings of all with its own classes and computes one log-sum-exp per anchor. These and the
terms of the own class, a few numbers per anchor, are exchanged, never scores. All processes then have the same loss.
The gradient by its own class weights is complete on each; that by the embeddings is a part, which
`collectives.gather_partial` sums.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nearkin.core import checks, class_blocks, distances, reduce
from nearkin.core.autograd import HandGradient, refuse_second_derivative
from nearkin.core.class_scores import Rivals
from nearkin.dist import collectives

__all__ = [
    "Shard",
    "before",
    "clamped",
    "gather_batch",
    "init_weight",
    "join",
    "layout",
    "local_ids",
    "make_shard",
    "mark",
    "no_rivals",
    "register",
    "replicated",
    "sum_over_processes",
    "taint",
]

DRAWN = 2**20  # numbers that are drawn at once for class weights
_SHARED = "a loss whose class weights processes share (shard=True)"


class Shard(NamedTuple):
    """The classes first..last-1 of `total`, which this process holds; all of them in a world of one.

    The loss functions take it as `shard`, with the class weights of these classes alone and the batch of all processes,
    from `gather_batch`. averaged: whether the processes' gradients are averaged afterwards, as by
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


def make_shard(shard: bool, num_classes: int) -> Shard | None:
    """This process's part of the classes, or None with shard=False; parts differ by one class at the most."""
    if not isinstance(shard, bool):
        raise TypeError(f"shard must be True or False, got {shard!r}")
    if not shard:
        return None
    checks.integer("num_classes", num_classes, 1)
    size, rank = collectives.size(), collectives.rank()
    checks.enough("num_classes", num_classes, size, "the number of processes that share them (shard=True)")
    return Shard(rank * num_classes // size, (rank + 1) * num_classes // size, num_classes, size)


def init_weight(
    rows: int, dim: int, fill: Callable[[Tensor], Tensor], shard: Shard | None, per_class: int = 1
) -> nn.Parameter:
    """Class weights (rows, dim) as `fill` makes them from an empty tensor, or the shard's part of the very same.

    A shard is drawn in blocks: torch's normal numbers on the CPU are the same in blocks of multiples of sixteen.
    """
    checks.integer("num_classes", rows, 1)
    checks.integer("dim", dim, 1)
    if shard is None or shard.processes == 1:
        return nn.Parameter(fill(torch.empty(rows, dim)))
    first, last = shard.first * per_class, shard.last * per_class
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


def register(module: nn.Module, **per_class: int) -> None:
    """Marks the tensors of which a module has only the shard's rows, `per_class` rows per class, for saving and
    averaging.

    A parameter has `sharded` = True, `rows` = (first, last) and `total`, counted in rows; `layout` knows buffers too.
    A state dict may contain the shard's rows, or all rows, of which the shard's are taken.
    """
    if module.held is None:
        return
    module.shares = per_class  # type: ignore[assignment]
    mark(module)
    module.register_load_state_dict_pre_hook(_load_own_rows)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_post_hook(mark)  # type: ignore[no-untyped-call]


def mark(module: nn.Module, *_: Any) -> None:
    """Sets `sharded`, `rows` and `total` on each sharded tensor of this module."""
    for name, (first, last, total) in _own_rows(module).items():
        tensor: Any = getattr(module, name)
        tensor.sharded, tensor.rows, tensor.total = True, (first, last), total


def layout(module: nn.Module) -> dict[str, tuple[int, int, int]]:
    """For each sharded entry of the module's state dict: its first row, the row after its last, and the total.

    Also of a module around a loss, and of a copy, whose tensors have lost their marks.
    """
    every = module.named_modules()
    return {f"{path}.{name}".lstrip("."): rows for path, part in every for name, rows in _own_rows(part).items()}


def before(module: nn.Module) -> dict[str, str | None]:
    """What entries of the module's state dict of earlier versions are called now; None: nobody reads it."""
    every = [(path, part.before()) for path, part in module.named_modules() if hasattr(part, "before")]
    named = [(path, was, now) for path, names in every for was, now in names.items()]
    return {f"{path}.{was}".lstrip("."): now and f"{path}.{now}".lstrip(".") for path, was, now in named}


def _own_rows(module: nn.Module) -> dict[str, tuple[int, int, int]]:
    shard, shares = getattr(module, "held", None), getattr(module, "shares", {})
    if not isinstance(shard, Shard):
        return {}
    return {name: (shard.first * each, shard.last * each, shard.total * each) for name, each in shares.items()}


def _load_own_rows(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, (first, last, total) in _own_rows(module).items():
        entry = state.get(prefix + name)
        if entry is None:
            continue
        rows = entry.shape[0] if entry.dim() else 0
        if rows == total:
            state[prefix + name] = entry[first:last]
        elif rows != last - first:
            raise ValueError(
                f"{prefix}{name} must have {total} rows, or the {last - first} of this process, {first} to {last - 1}, "
                f"got {tuple(entry.shape)}"
            )


def gather_batch(
    shard: Shard | None, embeddings: Tensor, labels: Any, dim: int, relation: bool = False
) -> tuple[Tensor, Any, Shard | None]:
    """The batch of all processes, in the order of their ranks, and the shard if there are several processes.

    relation: labels may be more than class ids. A fault in the batch of one process is raised by all.
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


def local_ids(
    embeddings: Tensor, labels: Any, weight: Tensor, shard: Shard | None, per_class: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """What `checks.classes` returns, with ids as indices among the shard's classes; their number for other classes."""
    if shard is None:
        return checks.classes(embeddings, labels, weight.shape[0] // per_class, weight.shape[1])
    ids, known, addend = checks.classes(embeddings, labels, shard.total, weight.shape[1])
    local = (ids >= shard.first) & (ids < shard.last)
    return torch.where(local, ids - shard.first, shard.number), known, addend


def clamped(shard: Shard | None, ids: Tensor) -> Tensor:
    """Ids from `local_ids` that are safe to index with: a class of another process gets some local one, unused."""
    return ids if shard is None else ids.clamp(max=max(0, shard.number - 1))


def no_rivals(x: Tensor, weight: Tensor) -> Rivals:
    """The scores of no classes for anchors (B, D); on the graph, so that all processes go backward together."""
    zero = (x.sum(1) * 0).to(torch.promote_types(x.dtype, weight.dtype)) + weight.sum().to(x.dtype) * 0
    return Rivals(torch.zeros_like(zero), zero + reduce.log_zero(zero), zero)


def join(
    shard: Shard | None, ids: Tensor, peak: Tensor, rest: Tensor, term: Tensor, taint: Tensor | float
) -> tuple[Tensor, Tensor, Tensor, Tensor | float]:
    """The rivals of all processes, a term (B,) of the own class from the process that holds it, and every taint."""
    if shard is None:
        return peak, rest, term, taint
    term = torch.where(ids < shard.number, term, 0.0).to(rest.dtype)
    joined: tuple[Tensor, Tensor, Tensor, Tensor] = _Join.call(
        shard.group, peak, rest, term, torch.as_tensor(taint, dtype=torch.float32, device=rest.device)
    )
    return joined


class _Join(HandGradient):
    """The log-sum-exp over the processes, and sums of the other tensors; in backward each process takes its part."""

    @staticmethod
    def forward(ctx: Any, group: collectives.Group, peak: Tensor, rest: Tensor, *terms: Tensor) -> tuple[Tensor, ...]:
        none = peak + rest <= reduce.log_zero(rest) / 2
        top = torch.where(none, -torch.inf, peak)
        top = collectives.largest(top, group) if top.numel() else top
        top = torch.where(top == -torch.inf, 0.0, top)
        share = torch.where(none, 0.0, (peak - top).to(distances.wide(rest)) + rest).exp()
        share = torch.where(none, 0.0, share)
        total, *sums = _sums(group, share, *terms)
        rest, _ = class_blocks.finished(total, rest)
        ctx.save_for_backward((share / torch.where(total == 0, 1.0, total)).to(rest.dtype))
        ctx.mark_non_differentiable(top)
        return top, rest, *sums

    @staticmethod
    def backward(ctx: Any, _: Tensor, by_rest: Tensor, *by_terms: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative(_SHARED)
        return None, None, by_rest * ctx.saved_tensors[0], *by_terms


def sum_over_processes(shard: Shard | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Sums of tensors of which each process has a part."""
    if shard is None:
        return tensors
    sums: tuple[Tensor, ...] = _Sum.call(shard.group, *tensors)
    return sums


def taint(shard: Shard | None, *tensors: Tensor) -> Tensor:
    """`reduce.taint` of tensors that are split over processes."""
    return sum_over_processes(shard, torch.as_tensor(reduce.taint(*tensors)))[0]


class _Sum(HandGradient):
    @staticmethod
    def forward(ctx: Any, group: collectives.Group, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(_sums(group, *tensors))

    @staticmethod
    def backward(ctx: Any, *by: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative(_SHARED)
        return None, *by


def _sums(group: collectives.Group, *tensors: Tensor) -> list[Tensor]:
    """Sums over the processes, of all tensors in one exchange."""
    kind = distances.wide(tensors[0])
    flat = torch.cat([tensor.flatten().to(kind) for tensor in tensors])
    flat = collectives.total(flat, group) if flat.numel() else flat
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view(like.shape).to(like.dtype) for part, like in zip(parts, tensors, strict=True)]


def replicated(shard: Shard, x: Tensor) -> Tensor:
    """The tensor for a computation that every process repeats: its gradient counts once, not once per process."""
    x = x.view_as(x)
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient / shard.processes)  # type: ignore[no-untyped-call]
    return x
