"""Sampled classes (Partial FC): a training step compares with the classes of the batch and others at random."""

import math
from typing import Any

import torch
from torch import Tensor

from nearkin.core import checks
from nearkin.dist import collectives
from nearkin.losses.class_shards import Shard

__all__ = ["check_rate", "sample"]

WORD = 2**48  # the random numbers by which classes are sampled are below it


def check_rate(name: str, rate: float) -> None:
    checks.number(name, rate)
    if not 0 < rate <= 1:
        raise ValueError(f"{name} must be > 0 and <= 1, got {rate}")


def sample(
    loss: Any, embeddings: Tensor, labels: Any, shard: Shard | None = None
) -> tuple[Any, Tensor | None, Shard | None]:
    """Labels, rows of the class weights and shard of a training step: every class of the batch and others at random.

    Rows is None where all classes are compared with.

    ⌈rate · C⌉ classes, or as many as the batch has rows if that is more, so that the number does not depend on the
    labels. One number of torch's generator of the device decides which: processes that share the classes take that of
    the first process, and choose as one process would.
    """
    weight, rate, centers = loss.weight, loss.sample_rate, loss.per_class
    classes = weight.shape[0] // centers if shard is None else shard.total
    if not loss.training or rate == 1:
        return labels, None, shard
    ids, known, _ = checks.classes(embeddings, labels, classes, weight.shape[1])
    number = min(classes, max(math.ceil(rate * classes), len(ids)))
    if number == classes:
        return labels, None, shard
    in_range = known & (labels.long() == ids)  # an id out of range, where values are not read, must stay out of it
    own = shard or Shard(0, classes, classes)
    seed = torch.randint(WORD, (), device=weight.device)
    keys = _random_keys(collectives.broadcast(seed, shard.group) if shard else seed, own)
    local = in_range & (ids >= own.first) & (ids < own.last)
    keys = keys.scatter_reduce(0, torch.where(local, ids - own.first, 0), torch.where(local, WORD, 0), "amax")
    if shard is None:
        chosen = keys.topk(number, sorted=False).indices.sort().values
    else:
        chosen = (keys >= _nth_largest(keys, number, shard)).nonzero().squeeze(1)
        counts = collectives.counts(chosen, shard.group)
        first = sum(counts[: collectives.rank(shard.group)])
        shard = own._replace(first=first, last=first + len(chosen), total=number)
    positions = torch.searchsorted(chosen, ids - own.first)
    if shard is not None:  # a class of another process is before the own ones, or after them
        positions = torch.where(ids < own.first, 0, (positions + shard.first).clamp(max=number - 1))
    rows = chosen
    if centers > 1:
        rows = (chosen[:, None] * centers + torch.arange(centers, device=chosen.device)).flatten()
    return torch.where(in_range, positions, labels.long()), rows, shard


def _random_keys(seed: Tensor, own: Shard) -> Tensor:
    """A number below WORD for each class of the shard, no two equal, in an order that the seed decides."""
    keys = torch.arange(own.first, own.last, device=seed.device) * 0x9E3779B97F4B + seed
    for odd in (0xD6E8FEB86659, 0xC2B2AE3D27D5):  # multiplying by an odd number can be undone, so no two become equal
        keys = keys & (WORD - 1)
        keys = (keys ^ (keys >> 23)) * odd
    keys = keys & (WORD - 1)
    return keys ^ (keys >> 25)


def _nth_largest(keys: Tensor, number: int, shard: Shard) -> Tensor:
    """The `number`-th largest of the keys of all processes: each counts how many of its own reach 4096 marks, then 4096
    between the right two of these, down to single numbers."""
    ordered = keys.sort().values
    least = torch.ones_like(keys[:1])
    for bits in (36, 24, 12, 0):
        marks = least + (torch.arange(4096, device=keys.device) << bits)
        reached = collectives.total(len(ordered) - torch.searchsorted(ordered, marks), shard.group)
        least = marks[(reached >= number).sum() - 1][None]
    return least
