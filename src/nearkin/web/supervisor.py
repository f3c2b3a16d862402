"""`nearkin serve --workers N`: starts N workers on one listening socket, restarts, reloads and ends them.

The supervisor answers no request. It is the one process that writes a gallery in a file: workers send it what they have
encoded, and read the file themselves, so that each sees a row as soon as its enrolment is acknowledged. In PostgreSQL
every worker writes for itself. It is also the one that learns from the labels of a gallery when these have changed.
"""

import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from nearkin.core.errors import QueueFull, ReloadRefused, StoreUnavailable
from nearkin.gallery import Gallery
from nearkin.web import connections, metrics, writer
from nearkin.web.enrolment import Enrolment
from nearkin.web.learner import Learner
from nearkin.web.process import REST, WAIT, Settings, close_gallery
from nearkin.web.process_link import Link
from nearkin.web.reload import log_reload, refusal

__all__ = ["MAX_WORKERS", "Supervisor", "check_workers"]

MAX_WORKERS = 64
MAX_DEATHS, WITHIN = 5, 60.0  # of one worker in so many seconds; then it is not started again
PAUSE = 1.0  # seconds before a worker that has died twice is started again
LAST = 12.0  # seconds after which workers that were told to end are killed
WAKE = 0.5  # seconds until a signal is heard that the system gave to another thread than the waiting one
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def check_workers(workers: int) -> None:
    if not isinstance(workers, int) or isinstance(workers, bool) or not 1 <= workers <= MAX_WORKERS:
        raise ValueError(f"workers must be an integer from 1 to {MAX_WORKERS}, got {workers!r}")
    if workers > 1 and sys.platform == "win32":
        raise ValueError(f"workers must be 1 on Windows, where processes cannot share a socket so, got {workers}")


@contextmanager
def _blocked() -> Iterator[None]:
    """A process that is started now does not hear Ctrl-C, nor that the terminal is gone: these are for us."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Worker:
    """One process. sentence: why it could not start."""

    def __init__(self, number: int, generation: int) -> None:
        self.number, self.generation = number, generation
        self.ready, self.sentence = False, ""
        self.process: subprocess.Popen[bytes]
        self.link: Link


class Supervisor:
    """source_of(gallery): the enrolment of a folder, which takes place in this process; None where there is none."""

    def __init__(
        self,
        settings: Settings,
        workers: int,
        bound: socket.socket,
        log: logging.Logger,
        source_of: Callable[[Gallery], Enrolment | None],
    ) -> None:
        self._settings, self._count, self._bound, self._log = settings, workers, bound, log
        self._counters = tempfile.TemporaryFile()  # noqa: SIM115  # closed in `run`
        self._counters.truncate(metrics.nbytes(workers + 1))
        self._metrics = metrics.Metrics(workers + 1, 0, self._counters.fileno())
        self._workers: dict[int, _Worker] = {}
        self._deaths: dict[int, list[float]] = {}
        self._events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._generation, self._ending = 0, False
        self._reloading, self._writing = threading.Lock(), threading.Lock()
        self._gallery = settings.open_gallery()  # made, checked and migrated once, before any worker
        try:
            self._enrolment = source_of(self._gallery)
        except BaseException:
            self._gallery.close()
            raise
        self._writer = writer.LocalWriter(self._gallery)
        if self._enrolment is not None:
            self._enrolment.changed = self._tell_progress
            self._enrolment.count_added = self._metrics.count_enrolled
        elif self._remote:  # workers write; learning from labels needs no encoder
            self._gallery.close()
            self._gallery = Gallery.open(settings.place, timeout=WAIT)
        self._learner = Learner(self._learn, log)

    @property
    def _remote(self) -> bool:
        return "://" in self._settings.place

    @property
    def _writes(self) -> bool:
        return not self._remote or self._enrolment is not None

    def run(self, ready: Callable[[], None]) -> bool:
        """Until a signal; whether all processes have ended in order. ready: called once requests are accepted."""
        sentence = ""
        try:
            with self._signals():
                connections.listen(self._bound)
                self._start(1)  # alone: where there is an index to build, the others read it
                sentence = self._supervise(ready)
                in_order = self._drain()
        finally:
            self._ending = True
            for worker in self._workers.values():
                worker.process.kill()
            stopped = self._enrolment is None or self._enrolment.stop(REST)
            self._learner.close(REST)
            closed = close_gallery(self._gallery)
            self._counters.close()
        if sentence:
            raise ChildProcessError(sentence)
        return in_order and stopped and closed

    def _supervise(self, ready: Callable[[], None]) -> str:
        """Until the end of the service; returns why it could not go on, "" after a signal."""
        announced = False
        while True:
            try:
                event, value = self._events.get(timeout=WAKE)
            except queue.Empty:
                continue
            if event == "end":
                return ""
            if event == "hangup":
                threading.Thread(target=self._reload_quietly, name="reload", daemon=True).start()
            elif event == "start":
                self._start(value)
            elif event == "ready":
                if not announced:
                    announced = True
                    ready()
                    for number in range(2, self._count + 1):
                        self._start(number)
                    self._start_enrolment()
                if value.generation != self._generation:
                    threading.Thread(target=self._catch_up_later, args=(value,), daemon=True).start()
            elif event == "exit":
                if not announced:
                    return value.sentence or f"the first worker ended with status {value.process.returncode}"
                self._replace(value)
                if not self._workers:
                    return "every worker has died too often; the log has the reasons"

    # --- workers

    def _start(self, number: int) -> None:
        worker = _Worker(number, self._generation)
        ours, theirs = socket.socketpair()
        numbers = (theirs.fileno(), self._bound.fileno(), self._counters.fileno())
        arguments = [number, *numbers, self._count + 1]
        threads = str(self._threads)
        with theirs, _blocked():
            worker.process = subprocess.Popen(
                [sys.executable, "-m", "nearkin.web.worker", *map(str, arguments)],
                pass_fds=numbers,
                stdin=subprocess.DEVNULL,
                env={**dict.fromkeys(THREADS, threads), **os.environ},
            )
        self._workers[number] = worker
        worker.link = Link(ours, lambda name, given: self._answer(worker, name, given), lambda: None, self._log)
        threading.Thread(target=self._watch, args=(worker,), name=f"watch {number}", daemon=True).start()

    @property
    def _threads(self) -> int:
        """Of torch in each worker: the cores, divided."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return int(os.environ.get("OMP_NUM_THREADS", "") or max(1, cores // self._count))

    def _watch(self, worker: _Worker) -> None:
        worker.process.wait()
        worker.ready = False
        self._metrics.forget(worker.number)
        worker.link.close()
        self._events.put(("exit", worker))

    def _replace(self, worker: _Worker) -> None:
        """Starts another one for it, unless that has died too often."""
        del self._workers[worker.number]
        now = time.monotonic()
        deaths = [at for at in self._deaths.get(worker.number, []) if now - at < WITHIN] + [now]
        self._deaths[worker.number] = deaths
        fields: dict[str, Any] = {"worker": worker.number, "status": worker.process.returncode}
        if worker.sentence:
            fields["text"] = worker.sentence
        self._log.error("worker died", extra={"fields": fields})
        if len(deaths) > MAX_DEATHS:
            text = f"died {len(deaths)} times within {WITHIN:g} seconds and is not started again"
            self._log.error("worker given up", extra={"fields": {"worker": worker.number, "text": text}})
            return
        self._metrics.add("nearkin_worker_restarts_total")
        if len(deaths) == 1:
            self._start(worker.number)
            return
        self._workers[worker.number] = worker  # its place is kept
        timer = threading.Timer(PAUSE, self._events.put, (("start", worker.number),))
        timer.daemon = True
        timer.start()

    def _drain(self) -> bool:
        """Tells workers to end, and ends those that do not; whether all did in order."""
        self._ending = True
        self._bound.close()
        until = time.monotonic() + LAST
        if self._enrolment is not None:
            self._enrolment.stop(0)
        workers = [one for one in self._workers.values() if one.process.poll() is None]
        for worker in workers:
            worker.link.tell("drain")
        while running := [one for one in workers if one.process.poll() is None]:
            try:
                event, _ = self._events.get(timeout=max(0.0, min(0.1, until - time.monotonic())))
            except queue.Empty:
                event = ""
            if event == "end" or time.monotonic() >= until:  # a second Ctrl-C
                for worker in running:
                    worker.process.kill()
                    worker.process.wait()
                return False
        return all(one.process.returncode in (0, -signal.SIGTERM) for one in workers)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM end the service, SIGHUP reads the run again."""
        before = {
            number: signal.signal(number, lambda *_: self._events.put(("end", None)))
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        hung_up = connections.on_hangup(
            lambda: self._events.put(("hangup", None)), lambda: self._events.put(("end", None))
        )
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, lambda *_: hung_up())
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    # --- calls of workers

    def _answer(self, worker: _Worker, name: str, arguments: dict[str, Any]) -> Any:
        if name == "settings":
            enrolling = None if self._enrolment is None else self._enrolment.state
            if enrolling is not None and not self._enrolment_started:
                enrolling["running"] = True  # it begins when the first worker is there
            return {"settings": self._settings._asdict(), "threads": self._threads, "enrolling": enrolling}
        if name == "ready":
            worker.ready = True
            self._events.put(("ready", worker))
        elif name == "failed":
            worker.sentence = arguments["text"]
        elif name == "changed":
            self._tell_all("changed", but=worker)
            self._learner.look()
        elif name == "reload":
            return log_reload(self._reload, self._log, self._metrics)
        else:
            with self._writing:
                return writer.answer(self._writer, name, arguments)
        return None

    def _tell_all(self, name: str, but: _Worker | None = None, **arguments: Any) -> None:
        for worker in list(self._workers.values()):
            if worker is not but and worker.ready:
                worker.link.tell(name, **arguments)

    # --- reloading

    def _reload_quietly(self) -> None:
        with suppress(ReloadRefused, QueueFull):  # it is in the log
            log_reload(self._reload, self._log, self._metrics)

    def _reload(self) -> dict[str, Any]:
        if self._enrolment is not None and self._enrolment.is_alive():
            raise ReloadRefused("a folder is being enrolled; the run can be read again when that is done")
        return self._reload_workers()

    def _reload_workers(self) -> dict[str, Any]:
        """Every worker opens the run, then all of them answer by it: all or none."""
        if not self._reloading.acquire(blocking=False):
            raise QueueFull("a reload is under way; try again later")
        try:
            started = time.monotonic()
            workers = [worker for worker in self._workers.values() if worker.ready]
            try:
                encoders = {worker.link.call("prepare") for worker in workers}
                if len(encoders) != 1:
                    raise ValueError("the run was changed while the workers were reading it; try again")
                gallery = self._settings.open_gallery() if self._writes else None
            except (ReloadRefused, ValueError, OSError) as error:
                for worker in workers:
                    worker.link.tell("abandon")
                raise error if isinstance(error, ReloadRefused) else refusal(error) from None
            self._generation += 1
            for worker in workers:
                self._swap(worker)
            for worker in list(self._workers.values()):  # that have begun meanwhile, perhaps with the run before
                if worker.ready:
                    self._catch_up(worker)
            with self._writing:
                if gallery is not None:
                    self._gallery.close()
                    self._gallery, self._writer = gallery, writer.LocalWriter(gallery)
            return {"encoder": encoders.pop(), "seconds": round(time.monotonic() - started, 3)}
        finally:
            self._reloading.release()

    def _swap(self, worker: _Worker) -> None:
        worker.generation = self._generation
        with suppress(StoreUnavailable):  # it has died, and the next one opens the run as it is now
            worker.link.call("swap")

    def _catch_up_later(self, worker: _Worker) -> None:
        with self._reloading:
            self._catch_up(worker)

    def _catch_up(self, worker: _Worker) -> None:
        """A worker that was starting during a reload may have opened the run before it."""
        if worker.generation == self._generation:
            return
        try:
            worker.link.call("prepare")
            self._swap(worker)
        except (ReloadRefused, StoreUnavailable) as error:
            self._log.error("reload refused", extra={"fields": {"worker": worker.number, "text": str(error)}})

    # --- the enrolment of a folder, and what is learned from labels

    @property
    def _enrolment_started(self) -> bool:
        return self._enrolment is not None and self._enrolment.ident is not None

    def _start_enrolment(self) -> None:
        if self._enrolment is None:
            self._learner.start()
            return
        self._enrolment.start()
        threading.Thread(target=self._finish_enrolment, name="enrolment's end", daemon=True).start()

    def _tell_progress(self) -> None:
        if self._enrolment is not None:
            self._tell_all("enrolling", state=self._enrolment.state)

    def _finish_enrolment(self) -> None:
        assert self._enrolment is not None
        self._enrolment.join()
        self._tell_progress()
        if not self._ending:
            self._tell_all("learned")
            self._learner.start()

    def _learn(self) -> str:
        """Of the labels, where these have changed; the workers take it up."""
        if self._gallery.calibration_is_current:
            return ""
        note = self._gallery.calibrate_if_changed()
        if not note:
            self._tell_all("learned")
        return note
