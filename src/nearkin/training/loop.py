"""The loop: batches in, weights moved, held-out classes measured, everything kept. It reads downward."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from nearkin.core.errors import Stopped
from nearkin.training.own_objects import how_to_resume
from nearkin.training.trainer import Trainer

__all__ = ["Callback", "deterministic", "fit"]

Callback = Callable[[dict[str, Any]], None]  # is told everything that happens, as dictionaries with an "event"


def fit(trainer: Trainer, callback: Callback) -> None:
    """Trains from wherever the trainer's state is to the end. Ctrl-C or SIGTERM: saves, then raises `Stopped`."""
    state, options, group = trainer.state, trainer.recipe.training, trainer.group
    trainer.clock = trainer.logged_at = time.monotonic()
    with _asked_to_stop() as asked, deterministic(options.deterministic):
        while not state.finished:
            before = trainer.begin_epoch()
            for batch in trainer.loader.epoch(state.epoch, state.batch):
                if group.size > 1:  # they stop and save together, so they ask each other first
                    group.propose(asked[0] if asked else 0, _due(trainer))
                trainer.lr_schedule.set(trainer.optimizer, state.step)
                value, embeddings = trainer.forward_backward(batch)
                trainer.window += value
                trainer.epoch_loss += value
                state.counted, state.batch, state.step = state.counted + 1, batch.number + 1, state.step + 1
                state.epoch_steps += 1
                look = state.step % options.log_steps == 0 or state.step == 1
                norm = trainer.optimizer_step(measure=look)
                callback({"event": "step_end", "epoch": state.epoch + 1, "step": state.step, "items": len(batch.items)})
                if look:
                    _tell(trainer, callback, trainer.log_line(norm, embeddings))
                stop, save = group.decision() if group.size > 1 else (asked[0] if asked else 0, _due(trainer))
                if stop or save:
                    trainer.save()
                    callback({"event": "saved", "step": state.step})
                if stop:
                    raise Stopped(stop, state.step, how_to_resume(trainer.recipe, trainer.out))
            _tell(trainer, callback, trainer.end_epoch(before))
            trainer.save()
            stop = max(group.values(asked[0] if asked else 0))
            if stop:
                raise Stopped(stop, state.step, how_to_resume(trainer.recipe, trainer.out))


def _due(trainer: Trainer) -> bool:
    return time.monotonic() - trainer.saved_at > 60 * trainer.recipe.training.save_minutes


def _tell(trainer: Trainer, callback: Callback, line: dict[str, Any]) -> None:
    """Into the journal, to whoever watches, and warnings into the state, so that the report has them."""
    notes = line.pop("notes")
    trainer.state.notes += notes
    trainer.metrics_log.write(line)
    callback(line)
    for note in notes:
        callback({"event": "note", "text": note})


@contextmanager
def _asked_to_stop() -> Iterator[list[int]]:
    """A list that fills with the signal's number at the first Ctrl-C or SIGTERM; a second one ends at once.

    A signal that whoever started us wants ignored (a job in the background) stays ignored.
    """
    asked: list[int] = []

    def ask(number: int, _: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    heard = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, ask) for number in heard}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """Equal runs give equal bits on one machine: kernels whose order of summation varies are not used."""
    if not on:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    fill, benchmark = memory.fill_uninitialized_memory, torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = fill
        torch.backends.cudnn.benchmark = benchmark
