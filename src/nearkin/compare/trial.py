"""One training of one setting on one fold: a function of its job and the bench, so that a killed study can go on."""

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nearkin import models
from nearkin.compare.protocol import Bench, Job
from nearkin.core.errors import Diverged
from nearkin.training.loop import deterministic
from nearkin.training.trainer import Trainer, assemble
from nearkin.training.validation import quick_metrics

__all__ = ["ENDS", "PATIENCE", "marks", "measure", "train"]

VALIDATIONS = 10  # a training, at the most
APART = 25  # steps between two validations, so that short trainings do not spend their time being validated
FEWEST = 4
PATIENCE = 4  # validations without a better one before it stops
ENDS = ("end", "early", "hopeless")  # anything else: it broke off
_WARM, _TIMED = 3, 0.5  # steps that do not count, and seconds of steps that do, when the rate is measured


def marks(steps: int) -> list[int]:
    """The steps after which a training is validated: four to ten, evenly spread, the last step among them."""
    count = min(VALIDATIONS, max(FEWEST, steps // APART), steps)
    return [steps * (i + 1) // count for i in range(count)]


def train(bench: Bench, job: Job, models_at: Path | None = None, alive: Callable[[], None] = lambda: None) -> Any:
    """Trains, validates at the marks, stops early or where it is hopeless; the best encoder into `models_at`.

    {"value": best MAP@R on the validation classes, "step": when, "curve": [[step, value], …], "steps": trained,
    "seconds": of training alone, "ended": "end", "early", "hopeless" or why it broke off}. `alive` may raise.
    """
    prepared = bench.prepared(job)
    trainer = assemble(prepared, Path(os.devnull))  # it writes nothing
    curve: list[tuple[int, float]] = []
    best = _copied(trainer) if models_at is not None else {}  # a training that breaks off at once has learned nothing
    ended, waited, step, clock = "end", 0, 0, _Clock(trainer.device)
    try:
        with deterministic(True):
            for step in _steps(trainer, job.steps, marks(job.steps), clock):
                alive()
                if step not in marks(job.steps):
                    continue
                value = _validated(trainer)
                better = not curve or value > max(v for _, v in curve)
                curve.append((step, value))
                waited = 0 if better else waited + 1
                if better and models_at is not None:
                    best = _copied(trainer)
                if waited >= PATIENCE:
                    ended = "early"
                elif _hopeless(curve, job.bar):
                    ended = "hopeless"
                if ended != "end":
                    break
                clock.start()
    except Diverged as error:
        ended = str(error).partition(":")[0]
    if models_at is not None:
        trainer.best_encoder.load_state_dict(best)
        models.save(trainer.best_encoder, models_at, prepared.preparation)
    value, at = max(((v, -s) for s, v in curve), default=(0.0, 0))
    return {
        "value": value,
        "step": -at,
        "curve": [list(point) for point in curve],
        "steps": step,
        "seconds": clock.seconds,
        "ended": ended,
    }


def measure(bench: Bench, job: Job) -> dict[str, float]:
    """How long it takes: {"setup", "step", "validation"} in seconds, from a few steps that nothing remembers."""
    began = time.monotonic()
    trainer = assemble(bench.prepared(job), Path(os.devnull))
    setup, clock, timed = time.monotonic() - began, _Clock(trainer.device), 0
    with deterministic(True):
        for step in _steps(trainer, job.steps, [], clock):
            if step == _WARM:
                clock = _Clock(trainer.device)
                clock.start()
            if step > _WARM:
                timed = step - _WARM
                clock.stop()
                if clock.seconds > _TIMED:
                    break
                clock.start()
        clock.stop()
        rate = clock.seconds / max(1, timed)
        began = time.monotonic()
        _validated(trainer)
    return {"setup": setup, "step": rate, "validation": time.monotonic() - began}


class _Clock:
    """Seconds between `start` and `stop`, the device's queue empty at both."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds, self.since = device, 0.0, 0.0

    def start(self) -> None:
        self.since = self._now()

    def stop(self) -> None:
        self.seconds += self._now() - self.since

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.monotonic()


def _steps(trainer: Trainer, steps: int, looks: list[int], clock: _Clock) -> Any:
    """Trains, and gives the number of each step done; the clock stands still at those of `looks`."""
    trainer.begin_epoch()
    clock.start()
    for batch in trainer.loader.epoch(0, 0):
        step = batch.number + 1
        trainer.lr_schedule.set(trainer.optimizer, batch.number)
        value, embeddings = trainer.forward_backward(batch)
        trainer.window += value
        trainer.state.counted, trainer.state.batch, trainer.state.step = trainer.state.counted + 1, step, step
        look = step in looks
        norm = trainer.optimizer_step(measure=look)
        if look:
            clock.stop()
            trainer.log_line(norm, embeddings)
            trainer.check()
        yield step
        if step == steps:
            return


def _copied(trainer: Trainer) -> dict[str, Tensor]:
    return {name: part.detach().clone() for name, part in trainer.best_encoder.state_dict().items()}


def _validated(trainer: Trainer) -> float:
    rows = trainer.embed(trainer.held_out.everything)
    if not bool(rows.isfinite().all()):
        raise Diverged(f"the embeddings are not finite at step {trainer.state.step}")
    value = quick_metrics(rows, trainer.held_out, trainer.graded, trainer.device).get("map@r", 0.0)
    return value if math.isfinite(value) else 0.0


def _hopeless(curve: list[tuple[int, float]], bar: list[float] | None) -> bool:
    """Whether the best so far is below the bar of this validation."""
    return bar is not None and max(value for _, value in curve) < bar[len(curve) - 1]
