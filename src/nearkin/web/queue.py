"""A bounded queue before worker threads: blocking work off the event loop, items of several requests in one batch."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from nearkin.core import checks
from nearkin.core.errors import QueueFull

__all__ = ["BatchQueue"]

T = TypeVar("T")
BatchFunction = Callable[[list[Any]], list[Any]]


class _Job(NamedTuple):
    items: Sequence[Any]
    then: Callable[[list[Any]], Any]
    loop: asyncio.AbstractEventLoop
    future: "asyncio.Future[Any]"

    @property
    def size(self) -> int:
        return max(1, len(self.items))


class BatchQueue:
    """Jobs wait in order; a job that finds the queue full is refused at once, so that no request waits for long.

    process: maps the items of several jobs, in one call, to the inputs of their `then`; an exception in its result is
    raised for that job only. Without it every job runs by itself. batch: items per call of `process`; queue: items that
    may wait. seconds: time for an answer.
    """

    def __init__(
        self,
        name: str,
        process: BatchFunction | None = None,
        *,
        batch: int = 1,
        queue: int = 128,
        threads: int = 1,
        seconds: float | None = None,
    ) -> None:
        for key, value in (("batch", batch), ("queue", queue), ("threads", threads)):
            checks.integer(key, value, 1)
        self.name, self._seconds = name, seconds
        self._process, self._batch, self._queue = process, batch, queue
        self._jobs: deque[_Job] = deque()
        self._waiting, self._closed = 0, False
        self._change = threading.Condition()
        self._since: dict[int, float] = {}  # thread → when it began its current job
        self._threads = [threading.Thread(target=self._work, name=f"{name} {i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        """Number of waiting items."""
        return self._waiting

    @property
    def busy_for(self) -> float:
        """Seconds since the longest running job began."""
        return max((time.monotonic() - since for since in list(self._since.values())), default=0.0)

    def check_room(self, size: int) -> None:
        """Raises `QueueFull` if `size` more items would be refused."""
        if self._closed or self._waiting + size > self._queue:
            raise QueueFull("too many requests at once; try again later")

    async def submit(self, then: Callable[[list[Any]], T], items: Sequence[Any] = ()) -> T:
        """The result of `then`, called with the processed items in a thread of the queue."""
        loop = asyncio.get_running_loop()
        job = _Job(items, then, loop, loop.create_future())
        with self._change:
            self.check_room(job.size)
            self._jobs.append(job)
            self._waiting += job.size
            self._change.notify()
        try:
            result: T = await asyncio.wait_for(job.future, self._seconds)
        except asyncio.TimeoutError:
            if not job.future.cancelled():
                raise  # of the job itself: another process is writing
            reason = f"there was no answer within {self._seconds:g} seconds; the request may still be carried out"
            raise QueueFull(reason) from None
        return result

    def close(self, seconds: float | None = None) -> bool:
        """Accepts no more jobs and gives waiting ones `seconds`. Returns whether all threads have ended."""
        until = None if seconds is None else time.monotonic() + seconds
        with self._change:
            self._closed = True
            self._change.notify_all()
        for thread in self._threads:
            thread.join(None if until is None else max(0.0, until - time.monotonic()))
        with self._change:
            self._jobs.clear()
        return self.ended

    @property
    def ended(self) -> bool:
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        thread = threading.get_ident()
        while jobs := self._next_batch():
            self._since[thread] = time.monotonic()
            for job, inputs in zip(jobs, self._process_items(jobs), strict=True):
                self._since[thread] = time.monotonic()
                _finish(job, inputs)
            del self._since[thread]

    def _next_batch(self) -> list[_Job]:
        """The next jobs, up to one batch; empty once the queue is closed."""
        with self._change:
            while not self._jobs and not self._closed:
                self._change.wait()
            batch: list[_Job] = []
            size = 0
            while self._jobs and (not batch or size + self._jobs[0].size <= self._batch):
                batch.append(self._jobs.popleft())
                size += batch[-1].size
            self._waiting -= size
            return batch

    def _process_items(self, jobs: Sequence[_Job]) -> list[Any]:
        """For each job the list of its processed items, or the first exception among them."""
        if self._process is None:
            return [list(job.items) for job in jobs]
        items = [item for job in jobs for item in job.items]
        try:
            processed = self._process(items) if items else []
        except BaseException as error:  # the thread must survive any error
            processed = [error] * len(items)
        inputs: list[Any] = []
        for job in jobs:
            part, processed = processed[: len(job.items)], processed[len(job.items) :]
            inputs.append(next((value for value in part if isinstance(value, BaseException)), part))
        return inputs


def _finish(job: _Job, inputs: Any) -> None:
    """Runs `then` and hands its result to the waiting event loop; a cancelled job is skipped."""
    if job.future.cancelled():
        return
    error: BaseException | None = inputs if isinstance(inputs, BaseException) else None
    result = None
    if error is None:
        try:
            result = job.then(inputs)
        except BaseException as raised:
            error = raised
    with suppress(RuntimeError):  # the loop is closed
        job.loop.call_soon_threadsafe(_resolve, job.future, result, error)


def _resolve(future: "asyncio.Future[Any]", result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
