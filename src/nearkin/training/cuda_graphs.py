"""The encoder's passes as CUDA graphs: one launch instead of hundreds, where every batch has the same shape."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Graphed"]


class Graphed:
    """Encodes batches through graphs, captured at the first batch and again whenever what they hold has changed.

    The numbers are those of the encoder itself. Weights are read where they are, so an optimiser that moves them in
    place moves the graphs with them. What is returned is written over by the next batch.
    """

    def __init__(self, encoder: nn.Module, precision: torch.dtype | None) -> None:
        self.encoder, self.precision = encoder, precision
        self._parameters = list(encoder.parameters())
        self._holds: object = None
        self._replay: Callable[[Tensor], Tensor] | None = None
        # A graph is captured on a stream of its own, as it must be: torch would warn of this at the first step.
        quiet = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", None)
        if quiet is not None:
            quiet(False)

    def __call__(self, seen: Tensor) -> Tensor:
        learning = tuple(p.requires_grad for p in self._parameters)
        holds = (seen.shape, seen.dtype, learning, self.encoder.training)
        if self._replay is None or holds != self._holds:
            self._replay = None  # its memory goes first
            self._replay, self._holds = self._capture(seen), holds
        return self._replay(seen)

    def _capture(self, seen: Tensor) -> Callable[[Tensor], Tensor]:
        """Capturing runs the encoder a few times: running statistics and chance are put back as they were."""
        kept = [buffer.clone() for buffer in self.encoder.buffers()]
        chance = torch.cuda.get_rng_state(seen.device)
        replay: Any = torch.cuda.make_graphed_callables(
            _Pass(self.encoder, self.precision), (seen.detach().clone(),), allow_unused_input=True
        )
        with torch.no_grad():
            for buffer, before in zip(self.encoder.buffers(), kept, strict=True):
                buffer.copy_(before)
        torch.cuda.set_rng_state(chance, seen.device)
        return replay  # type: ignore[no-any-return]


class _Pass(nn.Module):
    """The encoder under its precision: a module of its own, for a graph takes a module's forward over."""

    def __init__(self, encoder: nn.Module, precision: torch.dtype | None) -> None:
        super().__init__()
        self.encoder, self.precision = encoder, precision
        self.training = encoder.training

    def forward(self, seen: Tensor) -> Tensor:
        # Without autocast's cache of cast weights, which a graph would keep for ever.
        with torch.autocast(seen.device.type, self.precision, enabled=self.precision is not None, cache_enabled=False):
            result: Tensor = self.encoder(seen)
        return result
