"""Runs jobs in this process or in a pool of processes, and the searches of all losses side by side.

Each process opens the setup itself, and every training on a CPU has one thread: the number of processes changes
nothing but the time.
"""

import multiprocessing as mp
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol

import torch

from nearkin.compare import final_evaluation, trial
from nearkin.compare.loss_search import JobGenerator, LossResult
from nearkin.compare.protocol import Job, Setup, TestSet, open_setup
from nearkin.compare.study import Study
from nearkin.core.errors import OutOfTime
from nearkin.training.config.recipe import Recipe

__all__ = ["Executor", "InProcess", "ProcessPool", "Schedule", "make_executor", "run_all"]

Callback = Callable[[dict[str, Any]], None]


class Executor(Protocol):
    """Takes jobs and returns their results in any order."""

    def submit(self, job: Job) -> None: ...
    def free(self) -> int:
        """How many jobs could start at once."""

    def wait(self, deadline: float | None) -> list[tuple[Job, Any]]:
        """Some finished jobs; `OutOfTime` if the clock (`time.monotonic`) passes the deadline first."""

    def close(self) -> None: ...


def make_executor(setup: Setup, models: Path, jobs: int | None) -> tuple[Executor, int]:
    """This process for one job at a time, a pool for more; by default one process per core or per GPU."""
    device = setup.requested.device
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts; worker processes inherit it
    on_gpu = 1 if device.type == "mps" else torch.cuda.device_count()
    count = jobs or (_available_cores() if device.type == "cpu" else on_gpu)
    if count == 1:
        return InProcess(setup, models), 1
    recipe = setup.requested
    plain = recipe.model_dump(exclude_unset=True)
    arguments = _WorkerArguments(plain, str(models), device.type == "cuda", recipe.allow_outside)
    return ProcessPool(count, arguments), count


def _available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class InProcess:
    """This process, one job after the other."""

    def __init__(self, setup: Setup, models: Path) -> None:
        self._worker, self._waiting = _Worker(setup, models), deque[Job]()

    def submit(self, job: Job) -> None:
        self._waiting.append(job)

    def free(self) -> int:
        return 1 - len(self._waiting)

    def wait(self, deadline: float | None) -> list[tuple[Job, Any]]:
        def check_time() -> None:
            if deadline is not None and time.monotonic() > deadline:
                raise OutOfTime

        check_time()
        job = self._waiting.popleft()
        with _one_thread():
            return [(job, self._worker.run(job, check_time))]

    def close(self) -> None:
        self._waiting.clear()


class _WorkerArguments(NamedTuple):
    """What a worker process needs to open the setup: plain values."""

    recipe: dict[str, Any]
    models: str
    cuda: bool
    allow_outside: bool = False


class ProcessPool:
    """`concurrent.futures` processes that end with this one, however it ends."""

    def __init__(self, count: int, arguments: _WorkerArguments) -> None:
        context = mp.get_context("spawn")
        stop, self._stop = context.Pipe(duplex=False)  # closing our end stops workers in the middle of a job
        number = context.Value("i", 0)
        self._pool = futures.ProcessPoolExecutor(count, context, _start_worker, (arguments, stop, number))
        self._count, self._running = count, dict[futures.Future[Any], Job]()

    def submit(self, job: Job) -> None:
        try:
            self._running[self._pool.submit(_run_job, job)] = job
        except BrokenProcessPool:
            _raise_lost_worker()

    def free(self) -> int:
        return self._count - len(self._running)

    def wait(self, deadline: float | None) -> list[tuple[Job, Any]]:
        seconds = None if deadline is None else max(0.0, deadline - time.monotonic())
        finished = futures.wait(self._running, seconds, futures.FIRST_COMPLETED).done
        if not finished:
            raise OutOfTime
        try:
            return [(self._running.pop(future), future.result()) for future in finished]
        except BrokenProcessPool:
            _raise_lost_worker()

    def close(self) -> None:
        self._stop.close()
        self._pool.shutdown(cancel_futures=True)


def _raise_lost_worker() -> NoReturn:
    raise ValueError(
        "a worker process died (killed, or out of memory); finished trainings are saved: "
        "the same command continues, with fewer --jobs if memory was short"
    ) from None


class _Worker:
    """The setup, and the test items once they are needed."""

    def __init__(self, setup: Setup, models: Path) -> None:
        self.setup, self.models = setup, models
        self.test_set: TestSet | None = None

    def run(self, job: Job, check_time: Callable[[], None] = lambda: None) -> Any:
        if job.stage == "measure":
            return trial.measure(self.setup, job)
        if job.stage == "test":
            if self.test_set is None:
                self.test_set = self.setup.open_test_set()
            return final_evaluation.evaluate_models(self.setup, self.test_set, job, self.models)
        folder = final_evaluation.model_folder(self.models, job) if job.stage == "final" else None
        return trial.train(self.setup, job, folder, check_time)


_worker: _Worker | Exception | None = None  # of a pool's process, where it is set once by `_start_worker`


def _start_worker(arguments: _WorkerArguments, stop: Any, number: Any) -> None:
    """Initializes a process of the pool; an error is raised by its first job, as the pool would hide it here."""
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the main process
    threading.Thread(target=_exit_with_parent, args=(mp.parent_process(), stop), daemon=True).start()
    if arguments.cuda:
        with number.get_lock():
            torch.cuda.set_device(number.value % torch.cuda.device_count())
            number.value += 1
    else:
        torch.set_num_threads(1)
    try:
        recipe = Recipe.model_validate(arguments.recipe).allowing_outside(arguments.allow_outside)
        _worker = _Worker(open_setup(recipe), Path(arguments.models))
    except Exception as error:
        _worker = error


def _run_job(job: Job) -> Any:
    if not isinstance(_worker, _Worker):
        raise _worker or RuntimeError("the process has no setup")
    try:
        return _worker.run(job)
    except OSError as error:  # a file that is gone, a full disk: input errors here
        raise ValueError(str(error)) from None


def _exit_with_parent(parent: Any, stop: Any) -> None:
    """Ends the process when the main one is killed or closes the pool; its training would go on for hours."""
    connection.wait([parent.sentinel, stop])
    os._exit(1)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_all(executor: Executor, jobs: list[Job], deadline: float | None = None) -> Iterator[tuple[Job, Any]]:
    """Every job with its result, in the order in which they end."""
    waiting, running = deque(jobs), 0
    while waiting or running:
        while waiting and executor.free():
            executor.submit(waiting.popleft())
            running += 1
        for job, result in executor.wait(deadline):
            running -= 1
            yield job, result


class Schedule:
    """Runs the searches of all losses to their end. A result is saved in the study first, then sent to its search."""

    def __init__(self, searches: dict[str, JobGenerator], study: Study, total: int, callback: Callback) -> None:
        self.searches, self.study, self.total, self.callback = searches, study, total, callback
        self.finished: dict[str, LossResult] = {}
        self.done = 0
        self._batch: dict[str, list[Job]] = {}  # per loss the jobs that its search waits for
        self._results: dict[str, dict[int, Any]] = {}
        self._queue: deque[tuple[str, int]] = deque()

    def run(self, executor: Executor, deadline: float | None) -> bool:
        """Whether everything is done; False where time ran out."""
        for loss in self.searches:
            self._advance(loss, None)
        self.callback({"event": "begun", "done": self.done, "total": self.total})
        running: dict[tuple[str, int], Job] = {}
        try:
            while self._queue or running:
                while self._queue and executor.free():
                    place = self._queue.popleft()
                    running[place] = self._batch[place[0]][place[1]]
                    executor.submit(running[place])
                for job, result in executor.wait(deadline):
                    place = next(place for place, submitted in running.items() if submitted == job)
                    del running[place]
                    self._add(place, job, result)
        except OutOfTime:
            return False
        return True

    def _add(self, place: tuple[str, int], job: Job, result: Any) -> None:
        loss, i = place
        self.study.add_result(job, result)
        self._results[loss][i] = result
        self.done += 1
        self.callback({"event": "trained", "job": job, "result": result, "done": self.done, "total": self.total})
        if len(self._results[loss]) == len(self._batch[loss]):
            self._advance(loss, [self._results[loss][k] for k in range(len(self._batch[loss]))])

    def _advance(self, loss: str, results: list[Any] | None) -> None:
        """The next jobs of a search; those that the study knows are answered at once."""
        while True:
            try:
                jobs = next(self.searches[loss]) if results is None else self.searches[loss].send(results)
            except StopIteration as end:
                self.finished[loss] = end.value
                self.callback({"event": "chosen", "result": end.value})
                return
            known = {i: result for i, job in enumerate(jobs) if (result := self.study.result(job)) is not None}
            self.done += len(known)
            self._batch[loss], self._results[loss] = jobs, known
            self._queue.extend((loss, i) for i in range(len(jobs)) if i not in known)
            if len(known) < len(jobs):
                return
            results = [known[i] for i in range(len(jobs))]
