"""CUDA graphs of a whole step, or of the encoder: one launch instead of hundreds, if every batch has the same shape."""

import gc
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["GraphedEncoder", "GraphedStep"]

WARMUP = 3  # steps of a shape before it is captured: kernels are compiled, and the optimiser has made its state
SYNCHRONIZES = "called a synchronizing CUDA operation"

Step = Callable[..., tuple[Tensor, ...]]


class GraphedStep:
    """A training step, tensors → tensors, that is run a few times, then captured, and from then on replayed.

    step: changes parameters, buffers and the optimiser's state; its numbers are the same whether it is run or replayed.
    The runs before the capture are training steps like all others, and capturing executes nothing: no step is taken
    and no number is drawn that would not be without a graph. A batch of another shape is run. modules: whose buffers
    the step changes; generators: what it draws from, besides torch's own.
    The next step overwrites what was returned. `reason`: why the step cannot be captured, if it cannot.
    """

    def __init__(self, step: Step, modules: Iterable[nn.Module], generators: Iterable[torch.Generator] = ()) -> None:
        self.step, self.modules, self.generators = step, list(modules), list(generators)
        self.reason: str | None = None
        self._captured_for: object = None
        self._stream: Any = None  # of all runs and of the capture, so that nothing of autograd is tied to another one
        _allow_other_streams()
        self.reset()

    def refresh(self) -> None:
        """Forgets the graph if other weights learn than before, a module's mode has changed, or a tensor's address."""
        mode = [part.training for module in self.modules for part in module.modules()]
        learns = [(p.requires_grad, p.data_ptr()) for module in self.modules for p in module.parameters()]
        buffers = [buffer.data_ptr() for module in self.modules for buffer in module.buffers()]
        if self._captured_for != (mode, learns, buffers):
            self.reset()
            self._captured_for = (mode, learns, buffers)

    def reset(self) -> None:
        """Forgets the graph; the next steps are run, and the one after them is captured."""
        if self.reason is None:
            self._graph: Any = None  # one that failed stays: the allocator may still ask it
        self._replay: Callable[[], tuple[Tensor, ...]] | None = None
        self._inputs: tuple[Tensor, ...] = ()
        self._shapes: object = None
        self._runs = 0

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        shapes = [(x.shape, x.dtype) for x in inputs]
        if self._replay is None and self.reason is None:
            self._runs = self._runs + 1 if shapes == self._shapes else 1
            self._shapes = shapes
            if self._runs > WARMUP:
                self._capture(inputs)
        if self._replay is None or self.reason is not None or shapes != self._shapes:
            return self._run(*inputs)
        for static, x in zip(self._inputs, inputs, strict=True):
            static.copy_(x, non_blocking=True)
        return self._replay()

    def _run(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        device = inputs[0].device
        if device.type != "cuda":
            return self._step_in_place(*inputs)
        self._stream = self._stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        last = self._replay is None and self._runs == WARMUP  # before the capture, which it shows to be possible or not
        with torch.cuda.stream(self._stream), _synchronizations(last) as waits:
            outputs = self._step_in_place(*inputs)
        torch.cuda.current_stream(device).wait_stream(self._stream)
        self.reason = self.reason or next(iter(waits), None)
        return outputs

    def _step_in_place(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The step, after which every buffer has its old address, with the new value: a graph knows addresses."""
        before = [
            (part, name, buffer)
            for module in self.modules
            for part in module.modules()
            for name, buffer in part._buffers.items()
            if buffer is not None
        ]
        after: list[Tensor | None] = []
        try:
            outputs = self.step(*inputs)
            after = [part._buffers[name] for part, name, _ in before]
        finally:
            for part, name, buffer in before:
                part._buffers[name] = buffer
        with torch.no_grad():
            for (part, name, buffer), value in zip(before, after, strict=True):
                if value is None or value.shape != buffer.shape or value.dtype != buffer.dtype:
                    part._buffers[name] = value
                    self.reason = f"buffer {name} of {type(part).__name__} changes its shape"
                elif value is not buffer:
                    buffer.copy_(value)
        return outputs

    def _capture(self, inputs: tuple[Tensor, ...]) -> None:
        static = tuple(x.clone() for x in inputs)
        try:
            self._replay, self._inputs = self._record(static), static
        except Exception as error:  # whatever a step does that a graph cannot: it is run instead
            first = error.__context__ if isinstance(error.__context__, Exception) else error
            self.reason = str(first).strip().partition("\n")[0] or type(first).__name__

    def _record(self, inputs: tuple[Tensor, ...]) -> Callable[[], tuple[Tensor, ...]]:
        """The step of these very tensors as a graph. Raises what the step raises, and then leaves all as it was."""
        index = inputs[0].device.index or 0
        generators = [torch.cuda.default_generators[index], *self.generators]
        states = [generator.clone_state() for generator in generators]
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        self._graph = graph
        for generator in self.generators:
            graph.register_generator_state(generator)
        torch.cuda.synchronize(index)
        gc.collect()
        torch.cuda.empty_cache()  # of the runs: a graph has memory of its own
        try:
            with torch.cuda.stream(self._stream):
                # Only this thread is watched: others gather batches, and may allocate pinned memory.
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    outputs = self._step_in_place(*inputs)
                finally:
                    graph.capture_end()
        except Exception:
            for generator, state in zip(generators, states, strict=True):
                generator.graphsafe_set_state(state)  # the former one waits for the end of the capture
            with suppress(AttributeError, RuntimeError):  # "not recording", where the capture could be ended
                torch._C._cuda_endAllocateToPool(index, pool)
            raise
        if self.reason is not None:
            raise ValueError(self.reason)

        def replay() -> tuple[Tensor, ...]:
            graph.replay()
            return outputs

        return replay


@contextmanager
def _synchronizations(watched: bool) -> Iterator[list[str]]:
    """A list that gets a sentence for each line that waited for the device. Other warnings are passed on."""
    waits: list[str] = []
    if not watched:
        yield waits
        return
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            yield waits
    finally:
        torch.cuda.set_sync_debug_mode(before)
    for warning in caught:
        if SYNCHRONIZES in str(warning.message):
            waits.append(f"{Path(warning.filename).name}, line {warning.lineno}, waits for the device")
        elif "Synchronization debug mode" not in str(warning.message):
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def _allow_other_streams() -> None:
    """A graph must be captured on a stream of its own, of which torch would warn at the first step."""
    quiet = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", None)
    if quiet is not None:
        quiet(False)


class GraphedEncoder:
    """Encodes batches through graphs, captured at the first batch and again whenever shape or mode have changed.

    For steps that cannot be captured as a whole. The numbers are those of the encoder itself. Graphs read the weights
    in place, so they follow an optimiser that updates them in place. The next batch overwrites what was returned.
    """

    def __init__(self, encoder: nn.Module, precision: torch.dtype | None) -> None:
        self.encoder, self.precision = encoder, precision
        self._parameters = list(encoder.parameters())
        self._captured: object = None
        self._replay: Callable[[Tensor], Tensor] | None = None
        _allow_other_streams()

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
