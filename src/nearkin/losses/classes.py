"""What the losses over class weights share when classes are many: which road they take, and sampled classes."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nearkin import kernels
from nearkin.core import checks, class_softmax
from nearkin.core.class_softmax import Rivals
from nearkin.kernels import class_softmax as fused
from nearkin.losses.settings import show


def route(impl: str, embeddings: Tensor, weight: Tensor, max_memory: int | None) -> Callable[..., Rivals] | None:
    """The pass that never holds the logits, or None where the dense form is small enough.

    impl="torch" and "triton" always pass; what the kernel cannot serve, plain torch does. "auto" takes plain torch: it
    will choose the kernel where that has been measured to be better, which it has not.
    """
    kernels.check(impl)
    if impl == "triton":
        return fused.class_softmax
    fits = class_softmax.fits(embeddings, weight, max_memory)
    return None if impl == "auto" and fits else class_softmax.class_softmax


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
    ids, known, _ = checks.classes(embeddings, labels, classes, weight.shape[1])
    number = min(classes, max(math.ceil(rate * classes), len(ids)))
    if not module.training or number == classes:
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
