"""CUDA graphs of the encoder's passes: one launch instead of hundreds, where every batch has the same shape."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["GraphedEncoder"]


class GraphedEncoder:
    """Encodes batches through graphs, captured at the first batch and again whenever shape or mode have changed.

    The numbers are those of the encoder itself. Graphs read the weights in place, so they follow an optimiser that
    updates them in place. The next batch overwrites what was returned.
    """

    def __init__(self, encoder: nn.Module, precision: torch.dtype | None) -> None:
        self.encoder, self.precision = encoder, precision
        self._parameters = list(encoder.parameters())
        self._captured: object = None
        self._replay: Callable[[Tensor], Tensor] | None = None
        # A graph must be captured on a stream of its own, of which torch would warn at the first step.
        quiet = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", None)
        if quiet is not None:
            quiet(False)

    def __call__(self, batch: Tensor) -> Tensor:
        trainable = tuple(p.requires_grad for p in self._parameters)
        needed = (batch.shape, batch.dtype, trainable, self.encoder.training)
        if self._replay is None or needed != self._captured:
            self._replay = None  # frees its memory first
            self._replay, self._captured = self._capture(batch), needed
        return self._replay(batch)

    def _capture(self, batch: Tensor) -> Callable[[Tensor], Tensor]:
        """Capturing runs the encoder a few times: running statistics and the random state are restored."""
        buffers = [buffer.clone() for buffer in self.encoder.buffers()]
        random_state = torch.cuda.get_rng_state(batch.device)
        replay: Any = torch.cuda.make_graphed_callables(
            _Pass(self.encoder, self.precision), (batch.detach().clone(),), allow_unused_input=True
        )
        with torch.no_grad():
            for buffer, before in zip(self.encoder.buffers(), buffers, strict=True):
                buffer.copy_(before)
        torch.cuda.set_rng_state(random_state, batch.device)
        return replay  # type: ignore[no-any-return]


class _Pass(nn.Module):
    """The encoder in its precision: a module of its own, because a graph replaces a module's forward."""

    def __init__(self, encoder: nn.Module, precision: torch.dtype | None) -> None:
        super().__init__()
        self.encoder, self.precision = encoder, precision
        self.training = encoder.training

    def forward(self, batch: Tensor) -> Tensor:
        # Without autocast's cache of cast weights, which a graph would keep for ever.
        with torch.autocast(batch.device.type, self.precision, enabled=self.precision is not None, cache_enabled=False):
            result: Tensor = self.encoder(batch)
        return result
