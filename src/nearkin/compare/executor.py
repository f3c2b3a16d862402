"""Who does the jobs: this process, or several of its own making. Each opens the bench itself, and every training on a
CPU has one thread, so that how many there are changes nothing but the time."""

import multiprocessing as mp
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from nearkin.compare import test_stage, trial
from nearkin.compare.protocol import Bench, Job, Opened, open_bench
from nearkin.core.errors import OutOfTime
from nearkin.training.config.recipe import Recipe

__all__ = ["Hands", "Here", "Many", "hands"]

_ERRORS: dict[str, type[Exception]] = {"ValueError": ValueError, "TypeError": TypeError, "OSError": ValueError}


class Hands(Protocol):
    """Takes jobs, gives results in whatever order they come."""

    def submit(self, job: Job) -> None: ...
    def free(self) -> int:
        """How many jobs can be submitted that would begin at once."""

    def wait(self, deadline: float | None) -> list[tuple[Job, Any]]:
        """Some finished jobs; `OutOfTime` when the clock (`time.monotonic`) passes the deadline first."""

    def close(self) -> None: ...


class Place(NamedTuple):
    """What a worker needs to open the bench: plain values."""

    recipe: dict[str, Any]
    models: str


def hands(bench: Bench, models: Path, jobs: int | None) -> tuple[Hands, int]:
    """This process for one job at a time, others for more; without a wish one a core, or one a GPU."""
    on = bench.asked.device
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts; workers inherit it
    count = jobs or (torch.cuda.device_count() if on.type == "cuda" else _cores())
    if count == 1:
        return Here(bench, models), 1
    return Many(count, Place(bench.asked.model_dump(exclude_unset=True), str(models)), on.type == "cuda"), count


def _cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Here:
    """This process, one job after the other."""

    def __init__(self, bench: Bench, models: Path) -> None:
        self._desk, self._waiting = _Desk(bench, models), deque[Job]()

    def submit(self, job: Job) -> None:
        self._waiting.append(job)

    def free(self) -> int:
        return 1 - len(self._waiting)

    def wait(self, deadline: float | None) -> list[tuple[Job, Any]]:
        def alive() -> None:
            if deadline is not None and time.monotonic() > deadline:
                raise OutOfTime

        alive()
        job = self._waiting.popleft()
        with _one_thread():
            return [(job, self._desk.done(job, alive))]

    def close(self) -> None:
        self._waiting.clear()


class Many:
    """Processes that were started for this and end with it, whatever ends it."""

    def __init__(self, count: int, place: Place, cuda: bool) -> None:
        context = mp.get_context("spawn")
        self._busy: dict[Any, Job | None] = {}
        self._processes = []
        for i in range(count):
            ours, theirs = context.Pipe()
            gpu = i % torch.cuda.device_count() if cuda else None
            process = context.Process(target=_work, args=(theirs, place, gpu), daemon=True)
            process.start()
            theirs.close()
            self._busy[ours] = None
            self._processes.append(process)

    def submit(self, job: Job) -> None:
        pipe = next(pipe for pipe, busy in self._busy.items() if busy is None)
        self._busy[pipe] = job
        try:
            pipe.send(job)
        except (BrokenPipeError, ConnectionError):
            self._lost()

    def free(self) -> int:
        return sum(job is None for job in self._busy.values())

    def wait(self, deadline: float | None) -> list[tuple[Job, Any]]:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        found = []
        ready: Any = connection.wait([pipe for pipe, job in self._busy.items() if job is not None], left)
        for pipe in ready:
            job = self._busy[pipe]
            assert job is not None
            try:
                kind, result = pipe.recv()
            except (EOFError, ConnectionError):
                self._lost()
            if kind != "done":
                raise _ERRORS.get(kind, RuntimeError)(result)
            self._busy[pipe] = None
            found.append((job, result))
        if not found:
            raise OutOfTime
        return found

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()
        for pipe in self._busy:
            pipe.close()

    def _lost(self) -> None:
        raise ValueError(
            "a worker process ended by itself (killed, or out of memory); what was finished is kept: "
            "use fewer --jobs, and the same command goes on"
        )


class _Desk:
    """The bench, and the test items once they are asked for."""

    def __init__(self, bench: Bench, models: Path) -> None:
        self.bench, self.models = bench, models
        self.opened: Opened | None = None

    def done(self, job: Job, alive: Callable[[], None] = lambda: None) -> Any:
        if job.stage == "measure":
            return trial.measure(self.bench, job)
        if job.stage == "test":
            if self.opened is None:
                self.opened = self.bench.opened()
            return test_stage.test(self.bench, self.opened, job, self.models)
        kept = test_stage.model_folder(self.models, job) if job.stage == "final" else None
        return trial.train(self.bench, job, kept, alive)


def _work(pipe: Any, place: Place, gpu: int | None) -> None:
    """The life of a worker: opens the bench, does jobs until nobody sends any."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one who started us
    threading.Thread(target=_end_with, args=(mp.parent_process(),), daemon=True).start()
    if gpu is not None:
        torch.cuda.set_device(gpu)
    else:
        torch.set_num_threads(1)
    try:
        desk = _Desk(open_bench(Recipe.model_validate(place.recipe)), Path(place.models))
        while True:
            pipe.send(("done", desk.done(pipe.recv())))
    except (EOFError, BrokenPipeError, ConnectionError):
        return
    except Exception as error:
        pipe.send((type(error).__name__, str(error)))


def _end_with(parent: Any) -> None:
    """A parent that was killed tells nobody: its worker would train on for hours."""
    connection.wait([parent.sentinel])
    os._exit(1)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
