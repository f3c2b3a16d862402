"""The training loop: step by step through the batches, validation at the end of an epoch, checkpoints in between."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from nearkin.core.errors import Stopped
from nearkin.training.own_objects import how_to_resume
from nearkin.training.trainer import Trainer

__all__ = ["Callback", "deterministic", "fit"]

Callback = Callable[[dict[str, Any]], None]  # is called with every event, a dictionary with an "event"


def fit(trainer: Trainer, callback: Callback) -> None:
    """Trains from the trainer's present state to the end. Ctrl-C or SIGTERM: saves, then raises `Stopped`."""
    state, options, group = trainer.state, trainer.recipe.training, trainer.group
    trainer.clock = trainer.logged_at = time.monotonic()
    with _stop_signals() as signals, deterministic(options.deterministic):
        while not state.finished:
            before = trainer.begin_epoch()
            for batch in trainer.loader.epoch(state.epoch, state.batch):
                if group.size > 1:  # ranks stop and save together, so they ask each other first
                    group.propose(signals[0] if signals else 0, _save_is_due(trainer))
                trainer.lr_schedule.set(trainer.optimizer, state.step)
                log = (state.step + 1) % options.log_steps == 0 or state.step == 0
                value, embeddings, norm = trainer.train_step(batch, measure=log)
                trainer.window += value
                trainer.epoch_loss += value
                state.counted, state.batch, state.step = state.counted + 1, batch.number + 1, state.step + 1
                state.epoch_steps += 1
                callback({"event": "step_end", "epoch": state.epoch + 1, "step": state.step, "items": len(batch.items)})
                if log:
                    _log(trainer, callback, trainer.log_line(norm, embeddings))
                stop, save = (
                    group.decision() if group.size > 1 else (signals[0] if signals else 0, _save_is_due(trainer))
                )
                if stop or save:
                    trainer.save()
                    callback({"event": "saved", "step": state.step})
                if stop:
                    raise Stopped(stop, state.step, how_to_resume(trainer.recipe, trainer.out))
            _log(trainer, callback, trainer.end_epoch(before, partial(_mining, callback)))
            trainer.save()
            stop = max(group.values(signals[0] if signals else 0))
            if stop:
                raise Stopped(stop, state.step, how_to_resume(trainer.recipe, trainer.out))


def _save_is_due(trainer: Trainer) -> bool:
    return time.monotonic() - trainer.saved_at > 60 * trainer.recipe.training.save_minutes


def _mining(callback: Callback, what: str) -> Callable[[int, int], None]:
    """A progress function of a part of a sampler's refresh, whose calls become events."""
    return lambda done, total: callback({"event": "mining", "what": what, "done": done, "total": total})


def _log(trainer: Trainer, callback: Callback, line: dict[str, Any]) -> None:
    """Writes a line to the metrics log and the callback, and its notes to the state, for the report."""
    notes = line.pop("notes")
    trainer.state.notes += notes
    trainer.metrics_log.write(line)
    callback(line)
    for note in notes:
        callback({"event": "note", "text": note})


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """A list that gets the signal's number at the first Ctrl-C or SIGTERM; a second one ends at once.

    A signal that is ignored already (a job in the background) stays ignored.
    """
    signals: list[int] = []

    def receive(number: int, _: Any) -> None:
        if signals:
            raise KeyboardInterrupt
        signals.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    handled = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, receive) for number in handled}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """Equal runs give equal bits on one machine: avoids kernels whose order of summation varies."""
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
