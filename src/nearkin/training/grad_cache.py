"""Cached gradients: the exact gradient of a whole batch, with the activations of one chunk in memory at a time.

The loss needs all embeddings at once, the encoder does not. So the batch is encoded twice: first without a graph, all
chunks; the loss gives the gradient of each embedding; then chunk by chunk with a graph, through which that gradient is
sent back. Chance (dropout) is replayed, so both passes compute the same function. Gao et al. 2021, arXiv:2101.06983.

An encoder whose rows do not meet one another (no batch norm, or a frozen one) gets the gradient of the whole batch to
rounding. Batch norm in training takes its statistics from a chunk then, as several GPUs would; it updates its running
statistics once.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

__all__ = ["backward", "meets"]

_MEETS = (nn.modules.batchnorm._BatchNorm,)


def meets(encoder: nn.Module) -> bool:
    """Whether rows of a batch influence one another as the encoder stands: batch norm that takes batch statistics."""
    return any(isinstance(part, _MEETS) and (part.training or part.running_mean is None) for part in encoder.modules())


def backward(
    encode: Callable[[slice], Tensor],
    size: int,
    chunk: int,
    objective: Callable[[Tensor], Tensor],
    encoder: nn.Module,
    scale: Callable[[Tensor], Tensor] = lambda value: value,
    passes: int | None = None,
    apart: Callable[[bool], AbstractContextManager[None]] = lambda last: nullcontext(),
) -> tuple[Tensor, Tensor]:
    """Adds the gradient of objective(encode(all)) to the parameters; returns the loss and the embeddings, detached.

    encode: embeddings of a slice of the batch of `size` items, under whatever precision the caller uses. scale: what is
    multiplied to the loss before its gradient is taken (a gradient scaler's). passes: into how many chunks the batch is
    cut, some of them maybe empty, where ranks that exchange something in each must make as many. apart(last): entered
    around each pass with a gradient, so that ranks exchange theirs once, in the last.
    """
    chunks = [slice(i, min(i + chunk, size)) for i in range(0, size, chunk)]
    if passes is not None:
        chunks = [slice(size * i // passes, size * (i + 1) // passes) for i in range(passes)]
    device = next((p.device for p in encoder.parameters()), torch.device("cpu"))
    places, parts = [], []
    with torch.no_grad(), _without_statistics(encoder):
        for some in chunks:
            places.append(_chance(device))
            parts.append(encode(some))
    embeddings = torch.cat(parts).detach().requires_grad_()
    value = objective(embeddings)
    scale(value).backward()  # type: ignore[no-untyped-call]
    gradient = embeddings.grad
    after = _chance(device)
    for some, place in zip(chunks, places, strict=True):
        if gradient is None:
            break
        _replay(place)
        with apart(some is chunks[-1]):
            again = encode(some)
            if again.requires_grad:
                again.backward(gradient[some].to(again.dtype))  # type: ignore[no-untyped-call]
    _replay(after)
    return value.detach(), embeddings.detach()


@contextmanager
def _without_statistics(encoder: nn.Module) -> Iterator[None]:
    """Batch norm uses the batch's statistics and leaves its running ones alone."""
    norms = [part for part in encoder.modules() if isinstance(part, _MEETS) and part.training]
    kept = [(part, part.track_running_stats) for part in norms]
    for part in norms:
        part.track_running_stats = False
    try:
        yield
    finally:
        for part, tracked in kept:
            part.track_running_stats = tracked


def _chance(device: torch.device) -> tuple[Tensor, Tensor | None, torch.device]:
    on_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), on_gpu, device


def _replay(place: tuple[Tensor, Tensor | None, torch.device]) -> None:
    torch.set_rng_state(place[0])
    if place[1] is not None:
        torch.cuda.set_rng_state(place[1], place[2])
