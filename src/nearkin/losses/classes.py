"""What the losses over class weights share when classes are many: which road they take, and sampled classes."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nearkin import kernels
from nearkin.core import checks, class_softmax
from nearkin.core.class_softmax import Rivals
from nearkin.kernels import class_loss
from nearkin.kernels import class_softmax as fused
from nearkin.kernels.class_loss import Form
from nearkin.losses.settings import show

# B · C from which bfloat16 takes the kernels on a GPU; None: never. At B · C = 10⁷ ArcFace took 2.2 ms on an H200, the
# dense form 7.4. float32 has not been timed there, so it must be asked for.
KERNEL_FROM: int | None = 2**23


def route(
    impl: str, embeddings: Tensor, weight: Tensor, max_memory: int | None, sub_centers: int = 1
) -> Callable[..., Rivals] | None:
    """The pass that never holds the logits, or None where the dense form is small enough.

    impl="torch" and "triton" always pass; what the kernel cannot serve, plain torch does. "auto" is dense within
    `max_memory` if that is given; else the kernel from KERNEL_FROM on, dense where small, and plain torch.
    """
    road = roads(impl, embeddings, weight, max_memory, sub_centers)
    return {"dense": None, "torch": class_softmax.class_softmax, "triton": fused.class_softmax}[road]


def roads(impl: str, embeddings: Tensor, weight: Tensor, max_memory: int | None, sub_centers: int = 1) -> str:
    """Which of "dense", "torch" and "triton" a loss over class weights takes."""
    kernels.check(impl)
    if impl != "auto":
        return impl
    fits = class_softmax.fits(embeddings, weight, max_memory)
    if fits and max_memory is not None:
        return "dense"
    if _wins(embeddings, weight) and fused.serves(embeddings, weight, sub_centers, max_memory):
        return "triton"
    return "dense" if fits else "torch"


def whole(
    impl: str, embeddings: Tensor, labels: Tensor, weight: Tensor, form: Form, reduction: str, max_memory: int | None
) -> Tensor | None:
    """The loss from the kernels that compute all of it, or None where another road is taken, or they cannot serve."""
    kernels.check(impl)
    if impl == "torch" or not isinstance(embeddings, Tensor) or not (impl == "triton" or embeddings.is_cuda):
        return None
    if not class_loss.serves(embeddings, labels, weight, form, reduction, max_memory):
        return None
    if roads(impl, embeddings, weight, max_memory, form.centers) != "triton":
        return None
    return class_loss.loss(embeddings, labels, weight, form, reduction, max_memory)


def _wins(embeddings: Tensor, weight: Tensor) -> bool:
    if KERNEL_FROM is None or not embeddings.is_cuda or torch.compiler.is_compiling():
        return False
    halves = embeddings.dtype == weight.dtype == torch.bfloat16
    return halves and embeddings.shape[0] * weight.shape[0] >= KERNEL_FROM


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


def sample(module: nn.Module, embeddings: Tensor, labels: Tensor, sub_centers: int = 1) -> tuple[Tensor, Tensor]:
    """Labels and class weights of a training step: all of them, or every class of the batch and others at random.

    ⌈rate · C⌉ classes, or as many as the batch has rows if that is more, so that the number does not depend on the
    labels; drawn from torch's generator of the device.
    """
    weight: Tensor = module.weight  # type: ignore[assignment]
    rate: float = module.sample_rate  # type: ignore[assignment]
    classes = weight.shape[0] // sub_centers
    if not module.training or rate == 1:
        return labels, weight
    ids, known, _ = checks.classes(embeddings, labels, classes, weight.shape[1])
    number = min(classes, max(math.ceil(rate * classes), len(ids)))
    if number == classes:
        return labels, weight
    fair = known & (labels.long() == ids)  # an id out of range, where values are not read, must stay out of it
    turn = torch.rand(classes, device=weight.device)
    turn = turn.scatter_reduce(0, ids, torch.where(fair, 2.0, 0.0), "amax")
    chosen = turn.topk(number, sorted=False).indices.sort().values
    places = torch.searchsorted(chosen, ids)
    rows = chosen
    if sub_centers > 1:
        rows = (chosen[:, None] * sub_centers + torch.arange(sub_centers, device=chosen.device)).flatten()
    return torch.where(fair, places, labels.long()), weight.index_select(0, rows)
