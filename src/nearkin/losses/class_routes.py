"""What the losses over class weights share when classes are many: which road they take, and sampled classes."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nearkin import kernels
from nearkin.core import checks, class_softmax
from nearkin.core.autograd import traced
from nearkin.core.class_softmax import Rivals
from nearkin.dist import collectives
from nearkin.kernels import class_loss_ops
from nearkin.kernels import class_softmax_ops as fused
from nearkin.kernels.class_loss_ops import Form
from nearkin.losses import class_shards
from nearkin.losses.class_shards import Shard
from nearkin.losses.settings import show

# B · C from which the kernels are taken on a GPU; None: never. At B · C = 10⁷ ArcFace of bfloat16 took 2.2 ms on an
# H200, the dense form 5.0; with weights of float32 3.3 and 4.8. Not timed, and so to be asked for: other weights,
# float32 that may be rounded to TF32, and GPUs without float64 on their matrix units.
KERNEL_FROM: int | None = 2**23
WORD = 2**48  # of the numbers by which classes are sampled


def route(
    impl: str,
    embeddings: Tensor,
    weight: Tensor,
    max_memory: int | None,
    sub_centers: int = 1,
    shard: Shard | None = None,
) -> Callable[..., Rivals] | None:
    """The pass that never holds the logits, or None where the dense form is small enough.

    impl="torch" and "triton" always pass, and so does a shard; what the kernel cannot serve, plain torch does. "auto"
    is dense within `max_memory` if that is given; else the kernel from KERNEL_FROM on, dense where small, and plain
    torch.
    """
    road = roads(impl, embeddings, weight, max_memory, sub_centers, shard)
    if shard is not None and shard.number == 0:  # none of the sampled classes
        return class_shards.nobody
    return {"dense": None, "torch": class_softmax.class_softmax, "triton": fused.class_softmax}[road]


def roads(
    impl: str,
    embeddings: Tensor,
    weight: Tensor,
    max_memory: int | None,
    sub_centers: int = 1,
    shard: Shard | None = None,
    dense_first: bool = False,
) -> str:
    """Which of "dense", "torch" and "triton" a loss over class weights takes.

    dense_first: its kernel wins only where the dense form is too large.
    """
    kernels.check(impl)
    if impl != "auto":
        return impl
    fits = shard is None and class_softmax.fits(embeddings, weight, max_memory)
    if fits and (dense_first or max_memory is not None):
        return "dense"
    if _wins(embeddings, weight) and fused.serves(embeddings, weight, sub_centers, max_memory):
        return "triton"
    return "dense" if fits else "torch"


def whole(
    impl: str,
    embeddings: Tensor,
    labels: Tensor,
    weight: Tensor,
    form: Form,
    reduction: str,
    max_memory: int | None,
    shard: Shard | None = None,
) -> Tensor | None:
    """The loss from the kernels that compute all of it, or None where another road is taken, or they cannot serve."""
    kernels.check(impl)
    if (
        shard is not None
        or impl == "torch"
        or not isinstance(embeddings, Tensor)
        or not (impl == "triton" or embeddings.is_cuda)
    ):
        return None
    if not class_loss_ops.serves(embeddings, labels, weight, form, reduction, max_memory):
        return None
    if roads(impl, embeddings, weight, max_memory, form.centers) != "triton":
        return None
    return class_loss_ops.loss(embeddings, labels, weight, form, reduction, max_memory)


def _wins(embeddings: Tensor, weight: Tensor) -> bool:
    if KERNEL_FROM is None or not embeddings.is_cuda or traced():
        return False
    if embeddings.shape[0] * weight.shape[0] < KERNEL_FROM:
        return False
    if weight.dtype == torch.float32:
        return fused.precision() == "ieee" and kernels.has_float64_units(weight)
    return embeddings.dtype == weight.dtype == torch.bfloat16


def given(impl: str) -> dict[str, Any]:
    """A choice that nobody made is not a setting."""
    kernels.check(impl)
    return {} if impl == "auto" else {"impl": impl}


def sampling(rate: float) -> float:
    checks.number("sample_rate", rate)
    if not 0 < rate <= 1:
        raise ValueError(f"sample_rate must be > 0 and <= 1, got {rate}")
    return rate


def show_sampled(module: nn.Module) -> str:
    return show(module) + (f", sample_rate={module.sample_rate}" if module.sample_rate != 1 else "")


def sample(
    module: nn.Module, embeddings: Tensor, labels: Tensor, shard: Shard | None = None, sub_centers: int = 1
) -> tuple[Tensor, Tensor, Shard | None]:
    """Labels, class weights and shard of a training step: all, or every class of the batch and others at random.

    ⌈rate · C⌉ classes, or as many as the batch has rows if that is more, so that the number does not depend on the
    labels. Which they are follows from one number of torch's generator of the device: processes that share the classes
    take the first one's, and choose as one process would.
    """
    weight: Tensor = module.weight  # type: ignore[assignment]
    rate: float = module.sample_rate  # type: ignore[assignment]
    classes = weight.shape[0] // sub_centers if shard is None else shard.total
    if not module.training or rate == 1:
        return labels, weight, shard
    ids, known, _ = checks.classes(embeddings, labels, classes, weight.shape[1])
    number = min(classes, max(math.ceil(rate * classes), len(ids)))
    if number == classes:
        return labels, weight, shard
    fair = known & (labels.long() == ids)  # an id out of range, where values are not read, must stay out of it
    own = shard or Shard(0, classes, classes)
    seed = torch.randint(WORD, (), device=weight.device)
    turn = _turns(collectives.broadcast(seed, shard.group) if shard else seed, own)
    here = fair & (ids >= own.first) & (ids < own.last)
    turn = turn.scatter_reduce(0, torch.where(here, ids - own.first, 0), torch.where(here, WORD, 0), "amax")
    if shard is None:
        chosen = turn.topk(number, sorted=False).indices.sort().values
    else:
        chosen = (turn >= _least(turn, number, shard)).nonzero().squeeze(1)
        counts = collectives.counts(chosen, shard.group)
        first = sum(counts[: collectives.rank(shard.group)])
        shard = own._replace(first=first, last=first + len(chosen), total=number)
    places = torch.searchsorted(chosen, ids - own.first)
    if shard is not None:  # a class held elsewhere is before the own ones, or after them
        places = torch.where(ids < own.first, 0, (places + shard.first).clamp(max=number - 1))
    rows = chosen
    if sub_centers > 1:
        rows = (chosen[:, None] * sub_centers + torch.arange(sub_centers, device=chosen.device)).flatten()
    return torch.where(fair, places, labels.long()), weight.index_select(0, rows), shard


def _turns(seed: Tensor, own: Shard) -> Tensor:
    """A number below WORD for each class of the shard, no two alike, in an order that the seed decides."""
    turn = torch.arange(own.first, own.last, device=seed.device) * 0x9E3779B97F4B + seed
    for odd in (0xD6E8FEB86659, 0xC2B2AE3D27D5):  # a product with what is odd can be undone, so no two meet
        turn = turn & (WORD - 1)
        turn = (turn ^ (turn >> 23)) * odd
    turn = turn & (WORD - 1)
    return turn ^ (turn >> 25)


def _least(turn: Tensor, number: int, shard: Shard) -> Tensor:
    """The `number`-th largest of the numbers of all processes: each says how many of its own reach 4096 marks, then
    4096 between the right two of these, down to single numbers."""
    ordered = turn.sort().values
    least = torch.ones_like(turn[:1])
    for bits in (36, 24, 12, 0):
        marks = least + (torch.arange(4096, device=turn.device) << bits)
        reached = collectives.total(len(ordered) - torch.searchsorted(ordered, marks), shard.group)
        least = marks[(reached >= number).sum() - 1][None]
    return least
