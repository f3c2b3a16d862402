"""Work that blocks, off the event loop: a bounded line of jobs before one or more threads, items seen together."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from nearkin.core import checks
from nearkin.core.errors import QueueFull

__all__ = ["Line"]

T = TypeVar("T")
See = Callable[[list[Any]], list[Any]]


class _Job(NamedTuple):
    items: Sequence[Any]
    then: Callable[[list[Any]], Any]
    loop: asyncio.AbstractEventLoop
    future: "asyncio.Future[Any]"

    @property
    def size(self) -> int:
        return max(1, len(self.items))


class Line:
    """Jobs wait in order; who comes when it is full is sent away at once, so that nobody waits for long.

    see: turns the items of several jobs into what their `then` gets, all in one call; an entry of its answer may be an
    exception, which is then that of its job. Without it every job is done by itself. batch: items seen together; queue:
    items that may wait. seconds: until an answer must be there.
    """

    def __init__(
        self,
        name: str,
        see: See | None = None,
        *,
        batch: int = 1,
        queue: int = 128,
        threads: int = 1,
        seconds: float | None = None,
    ) -> None:
        for key, value in (("batch", batch), ("queue", queue), ("threads", threads)):
            checks.integer(key, value, 1)
        self.name, self._seconds = name, seconds
        self._see, self._batch, self._queue = see, batch, queue
        self._jobs: deque[_Job] = deque()
        self._waiting, self._closed = 0, False
        self._change = threading.Condition()
        self._since: dict[int, float] = {}  # thread → when it began what it is doing
        self._threads = [threading.Thread(target=self._work, name=f"{name} {i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        """Items that wait."""
        return self._waiting

    @property
    def busy_for(self) -> float:
        """Seconds that the longest of the jobs under way has taken by now."""
        return max((time.monotonic() - since for since in list(self._since.values())), default=0.0)

    def room_for(self, size: int) -> None:
        """Raises `QueueFull` where so many items more would not be taken."""
        if self._closed or self._waiting + size > self._queue:
            raise QueueFull("there are more requests than can be answered; come again a little later")

    async def ask(self, then: Callable[[list[Any]], T], items: Sequence[Any] = ()) -> T:
        """The answer of `then`, which is called with the seen items in a thread of the line."""
        loop = asyncio.get_running_loop()
        job = _Job(items, then, loop, loop.create_future())
        with self._change:
            self.room_for(job.size)
            self._jobs.append(job)
            self._waiting += job.size
            self._change.notify()
        try:
            found: T = await asyncio.wait_for(job.future, self._seconds)
        except asyncio.TimeoutError:
            if not job.future.cancelled():
                raise  # of the job itself: another process is writing
            why = f"there was no answer within {self._seconds:g} seconds; what was asked for may still be done"
            raise QueueFull(why) from None
        return found

    def close(self, seconds: float | None = None) -> bool:
        """What waits is still done, in so many seconds; nothing more is taken. Whether all has ended."""
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
        me = threading.get_ident()
        while jobs := self._taken():
            self._since[me] = time.monotonic()
            for job, found in zip(jobs, self._seen(jobs), strict=True):
                self._since[me] = time.monotonic()
                _settle(job, found)
            del self._since[me]

    def _taken(self) -> list[_Job]:
        """The next jobs, as many as are seen together; none: the line is closed."""
        with self._change:
            while not self._jobs and not self._closed:
                self._change.wait()
            taken: list[_Job] = []
            size = 0
            while self._jobs and (not taken or size + self._jobs[0].size <= self._batch):
                taken.append(self._jobs.popleft())
                size += taken[-1].size
            self._waiting -= size
            return taken

    def _seen(self, jobs: Sequence[_Job]) -> list[Any]:
        """Of each job the list of its items as seen, or the first thing that went wrong with one."""
        if self._see is None:
            return [list(job.items) for job in jobs]
        many = [item for job in jobs for item in job.items]
        try:
            seen = self._see(many) if many else []
        except BaseException as error:  # whatever it is, the thread goes on
            seen = [error] * len(many)
        found: list[Any] = []
        for job in jobs:
            own, seen = seen[: len(job.items)], seen[len(job.items) :]
            found.append(next((one for one in own if isinstance(one, BaseException)), own))
        return found


def _settle(job: _Job, found: Any) -> None:
    """Does what the job asked for, and hands it to the loop that waits; who has gone away gets nothing."""
    if job.future.cancelled():
        return
    error: BaseException | None = found if isinstance(found, BaseException) else None
    answer = None
    if error is None:
        try:
            answer = job.then(found)
        except BaseException as raised:
            error = raised
    with suppress(RuntimeError):  # the loop is closed: nobody waits any more
        job.loop.call_soon_threadsafe(_tell, job.future, answer, error)


def _tell(future: "asyncio.Future[Any]", answer: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(answer)
