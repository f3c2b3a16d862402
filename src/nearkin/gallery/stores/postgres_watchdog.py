"""Ends calls to a server that no longer answers: one thread for all calls of a gallery, none while there are none."""

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

__all__ = ["Watchdog"]

IDLE = 30.0  # seconds without a call after which the thread ends


class Watchdog:
    """Asks `is_up` about every call that takes longer than `wait` seconds, and again after as many; where it is not,
    the connection is shut down, so that the call ends. A thread per call would take as long as a short search."""

    def __init__(self, wait: float, is_up: Callable[[], bool]) -> None:
        self._wait, self._is_up = wait, is_up
        self._changed = threading.Condition(threading.Lock())
        self._calls: dict[int, tuple[float, Any]] = {}  # when it is asked about, and its connection
        self._numbers, self._idle = itertools.count(), False
        self._thread: threading.Thread | None = None

    @contextmanager
    def watching(self, connection: Any) -> Iterator[None]:
        with self._changed:
            number = next(self._numbers)
            self._calls[number] = time.monotonic() + self._wait, connection
            if self._thread is None or not self._thread.is_alive():  # or it was left behind by a fork
                self._thread = threading.Thread(target=self._watch, daemon=True)
                self._thread.start()
            elif self._idle:
                self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._calls.pop(number, None)

    def _watch(self) -> None:
        while True:
            with self._changed:
                if not self._calls:
                    self._idle = True
                    self._changed.wait(IDLE)
                    self._idle = False
                    if not self._calls:
                        self._thread = None
                        return
                now = time.monotonic()
                due = [number for number, (when, _) in self._calls.items() if when <= now]
                if not due:
                    # Later calls are due later, so none has to wake it.
                    self._changed.wait(min(when for when, _ in self._calls.values()) - now)
                    continue
            up = self._is_up()
            with self._changed:
                for number in due:
                    if number not in self._calls:
                        continue
                    connection = self._calls.pop(number)[1]
                    if up:
                        self._calls[number] = time.monotonic() + self._wait, connection
                    else:
                        _shut_down(connection)


def _shut_down(connection: Any) -> None:
    """Breaks the connection for the thread that waits on it; closing it from another thread would be unsafe."""
    with suppress(Exception):
        shared = socket.socket(fileno=connection.fileno())
        try:
            shared.shutdown(socket.SHUT_RDWR)
        finally:
            shared.detach()
