"""One training of one setting on one fold, a function of its job and the setup: a killed study can continue."""

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nearkin import models
from nearkin.compare.protocol import Job, Setup
from nearkin.core.errors import Diverged
from nearkin.training.cuda_graphs import WARMUP
from nearkin.training.loop import deterministic
from nearkin.training.trainer import Trainer, assemble
from nearkin.training.validation import quick_metrics

__all__ = ["ENDS", "PATIENCE", "measure", "train", "validation_steps"]

MAX_VALIDATIONS, MIN_VALIDATIONS = 10, 4  # per training
STEPS_BETWEEN = 25  # two validations, at least: short trainings should not spend their time on validation
PATIENCE = 4  # validations without improvement before it stops
ENDS = ("end", "early", "hopeless")  # any other end: the training failed
# Warm-up steps (a CUDA graph is captured in the last) and timed seconds when the speed is measured.
_WARM, _TIMED = WARMUP + 1, 0.5


def validation_steps(steps: int) -> list[int]:
    """The steps after which a training is validated: four to ten, evenly spaced, the last step included."""
    count = min(MAX_VALIDATIONS, max(MIN_VALIDATIONS, steps // STEPS_BETWEEN), steps)
    return [steps * (i + 1) // count for i in range(count)]


def train(setup: Setup, job: Job, folder: Path | None = None, check_time: Callable[[], None] = lambda: None) -> Any:
    """Trains and validates; stops early or where it is hopeless; saves the best encoder in `folder`.

    {"value": best MAP@R on the validation classes, "step": when, "curve": [[step, value], …], "steps": trained,
    "seconds": of training alone, "ended": "end", "early", "hopeless" or why it failed}. `check_time` may raise.
    """
    prepared = setup.prepared(job)
    trainer = assemble(prepared, Path(os.devnull))  # nothing is written
    curve: list[tuple[int, float]] = []
    best = _weights(trainer) if folder is not None else {}  # of a training that fails at once, the first weights
    ended, stale, step, clock = "end", 0, 0, _Clock(trainer.device)
    try:
        with deterministic(True):
            for step in _steps(trainer, job.steps, validation_steps(job.steps), clock):
                check_time()
                if step not in validation_steps(job.steps):
                    continue
                value = _validate(trainer)
                better = not curve or value > max(v for _, v in curve)
                curve.append((step, value))
                stale = 0 if better else stale + 1
                if better and folder is not None:
                    best = _weights(trainer)
                if stale >= PATIENCE:
                    ended = "early"
                elif _hopeless(curve, job.bar):
                    ended = "hopeless"
                if ended != "end":
                    break
                clock.start()
    except Diverged as error:
        ended = str(error).partition(":")[0]
    if folder is not None:
        trainer.best_encoder.load_state_dict(best)
        models.save(trainer.best_encoder, folder, prepared.preparation)
    value, at = max(((v, -s) for s, v in curve), default=(0.0, 0))
    return {
        "value": value,
        "step": -at,
        "curve": [list(point) for point in curve],
        "steps": step,
        "seconds": clock.seconds,
        "ended": ended,
    }


def measure(setup: Setup, job: Job) -> dict[str, float]:
    """Seconds: {"setup", "step", "validation"}, from a few steps that are then discarded."""
    began = time.monotonic()
    trainer = assemble(setup.prepared(job), Path(os.devnull))
    setup_seconds, clock, timed = time.monotonic() - began, _Clock(trainer.device), 0
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
        _validate(trainer)
    return {"setup": setup_seconds, "step": rate, "validation": time.monotonic() - began}


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


def _steps(trainer: Trainer, steps: int, validated: list[int], clock: _Clock) -> Any:
    """Trains and yields the number of each step; the clock is stopped at those of `validated`."""
    trainer.begin_epoch()
    clock.start()
    for batch in trainer.loader.epoch(0, 0):
        step = batch.number + 1
        trainer.lr_schedule.set(trainer.optimizer, batch.number)
        logged = step in validated
        value, embeddings, norm = trainer.train_step(batch, measure=logged)
        trainer.window += value
        trainer.state.counted, trainer.state.batch, trainer.state.step = trainer.state.counted + 1, step, step
        if logged:
            clock.stop()
            trainer.log_line(norm, embeddings)
            trainer.check()
        yield step
        if step == steps:
            return


def _weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: part.detach().clone() for name, part in trainer.best_encoder.state_dict().items()}


def _validate(trainer: Trainer) -> float:
    rows = trainer.embed(trainer.held_out.everything)
    if not bool(rows.isfinite().all()):
        raise Diverged(f"the embeddings are not finite at step {trainer.state.step}")
    value = quick_metrics(rows, trainer.held_out, trainer.graded, trainer.device).get("map@r", 0.0)
    return value if math.isfinite(value) else 0.0


def _hopeless(curve: list[tuple[int, float]], bar: list[float] | None) -> bool:
    """Whether the best value so far is below the bar of this validation."""
    return bar is not None and max(value for _, value in curve) < bar[len(curve) - 1]
