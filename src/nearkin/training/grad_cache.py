"""Cached gradients: the exact gradient of a large batch, with the activations of one chunk in memory at a time.

The loss needs all embeddings at once, the encoder does not. So the batch is encoded twice: first without a graph, all
chunks; the loss gives the gradient of each embedding; then chunk by chunk with a graph, through which that gradient is
propagated. Random states (dropout) are replayed, so both passes compute the same function. Gao et al. 2021,
arXiv:2101.06983.

An encoder without cross-sample operations (no trainable BatchNorm) gets the gradient of the whole batch up to rounding.
BatchNorm in training takes its statistics from a chunk, as several GPUs would; it updates its running statistics once.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

__all__ = ["backward", "uses_batch_statistics"]

_CROSS_SAMPLE = (nn.modules.batchnorm._BatchNorm,)


def uses_batch_statistics(encoder: nn.Module) -> bool:
    """Whether rows of a batch influence one another in the encoder's present mode: BatchNorm in training."""
    return any(
        isinstance(part, _CROSS_SAMPLE) and (part.training or part.running_mean is None) for part in encoder.modules()
    )


def backward(
    encode: Callable[[slice], Tensor],
    size: int,
    chunk: int,
    objective: Callable[[Tensor], Tensor],
    encoder: nn.Module,
    scale: Callable[[Tensor], Tensor] = lambda value: value,
    passes: int | None = None,
    sync_gradients: Callable[[bool], AbstractContextManager[None]] = lambda last: nullcontext(),
) -> tuple[Tensor, Tensor]:
    """Adds the gradient of objective(encode(all)) to the parameters; returns the loss and the embeddings, detached.

    encode: embeddings of a slice of the batch of `size` items, in the caller's precision. scale: multiplies the loss
    before its gradient is taken (as a gradient scaler does). passes: into how many chunks the batch is cut, some of
    them perhaps empty, where all ranks must make as many exchanges. sync_gradients(last): entered around each backward
    pass, so that ranks exchange their gradients once, in the last.
    """
    chunks = [slice(i, min(i + chunk, size)) for i in range(0, size, chunk)]
    if passes is not None:
        chunks = [slice(size * i // passes, size * (i + 1) // passes) for i in range(passes)]
    device = next((p.device for p in encoder.parameters()), torch.device("cpu"))
    states, parts = [], []
    with torch.no_grad(), _without_statistics(encoder):
        for part in chunks:
            states.append(_random_state(device))
            parts.append(encode(part))
    embeddings = torch.cat(parts).detach().requires_grad_()
    value = objective(embeddings)
    scale(value).backward()  # type: ignore[no-untyped-call]
    gradient = embeddings.grad
    after = _random_state(device)
    for part, state in zip(chunks, states, strict=True):
        if gradient is None:
            break
        _set_random_state(state)
        with sync_gradients(part is chunks[-1]):
            again = encode(part)
            if again.requires_grad:
                again.backward(gradient[part].to(again.dtype))  # type: ignore[no-untyped-call]
    _set_random_state(after)
    return value.detach(), embeddings.detach()


@contextmanager
def _without_statistics(encoder: nn.Module) -> Iterator[None]:
    """BatchNorm uses the statistics of the batch and does not update its running ones."""
    norms = [part for part in encoder.modules() if isinstance(part, _CROSS_SAMPLE) and part.training]
    before = [(part, part.track_running_stats) for part in norms]
    for part in norms:
        part.track_running_stats = False
    try:
        yield
    finally:
        for part, tracked in before:
            part.track_running_stats = tracked


def _random_state(device: torch.device) -> tuple[Tensor, Tensor | None, torch.device]:
    on_gpu = None
    if device.type in ("cuda", "mps"):
        on_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.mps.get_rng_state()
    return torch.get_rng_state(), on_gpu, device


def _set_random_state(state: tuple[Tensor, Tensor | None, torch.device]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None and state[2].type == "mps":
        torch.mps.set_rng_state(state[1])
    elif state[1] is not None:
        torch.cuda.set_rng_state(state[1], state[2])
