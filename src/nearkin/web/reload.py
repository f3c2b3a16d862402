"""The run read again while the service answers: requests under way finish on the one before."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from nearkin.core.errors import QueueFull, ReloadRefused
from nearkin.web.app import Version
from nearkin.web.metrics import Metrics
from nearkin.web.middleware import GuardMiddleware

__all__ = ["Reloader", "log_reload", "refusal"]

REST = 5.0  # seconds that threads of the run before get, after its last request was answered


class Reloader:
    """open: opens the gallery with the run as it is now, ready to answer; raises a ValueError where that is bad.

    check: raises where this is no time to reload.
    """

    def __init__(
        self,
        guard: GuardMiddleware,
        version: Version,
        open: Callable[[], Version],
        log: logging.Logger,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._guard, self.version, self._open, self._log, self._check = guard, version, open, log, check
        self._next: Version | None = None
        self._one = threading.Lock()
        self.loop: asyncio.AbstractEventLoop | None = None  # of the server, once it runs

    def reload(self) -> dict[str, Any]:
        """Prepares and swaps, in one process. Called in a thread."""
        return log_reload(self._reload, self._log, self._guard.metrics)

    def _reload(self) -> dict[str, Any]:
        if not self._one.acquire(blocking=False):
            raise QueueFull("a reload is under way; try again later")
        try:
            self._check()
            started = time.monotonic()
            encoder = self.prepare()
            self.swap()
            return {"encoder": encoder, "seconds": round(time.monotonic() - started, 3)}
        finally:
            self._one.release()

    def prepare(self) -> str | None:
        """Opens the run beside the one that answers; returns the fingerprint of its encoder."""
        self.abandon()
        try:
            self._next = self._open()
        except (ValueError, OSError, TimeoutError) as error:
            raise refusal(error) from None
        return self._next.gallery.fingerprint

    def swap(self) -> None:
        """From now on requests go to what was prepared; returns when that is so."""
        prepared, self._next = self._next, None
        if prepared is None or self.loop is None:
            raise ReloadRefused("nothing was prepared, or the service is not yet there; the run before goes on")
        before, self.version = self.version, prepared
        done = threading.Event()

        def replace() -> None:
            self._guard.replace(prepared.app, prepared.service, lambda: _retire(before))
            done.set()

        self.loop.call_soon_threadsafe(replace)
        done.wait(60)

    def abandon(self) -> None:
        """Closes what was prepared."""
        prepared, self._next = self._next, None
        if prepared is not None:
            _close(prepared)


def refusal(error: Exception) -> ReloadRefused:
    sentence = " ".join(str(error).split())
    return ReloadRefused(f"the run was not read again, the one before goes on: {sentence}")


def log_reload(reload: Callable[[], dict[str, Any]], log: logging.Logger, metrics: Metrics) -> dict[str, Any]:
    """Counts and logs a reload, or its refusal, which is raised."""
    try:
        done = reload()
    except (ReloadRefused, QueueFull) as error:
        metrics.add("nearkin_reloads_refused_total")
        log.error("reload refused", extra={"fields": {"text": str(error)}})
        raise
    metrics.add("nearkin_reloads_total")
    log.info("reloaded", extra={"fields": done})
    return done


def _retire(version: Version) -> None:
    """In a thread: the event loop does not wait for threads that end."""
    threading.Thread(target=_close, args=(version,), name="retiring", daemon=True).start()


def _close(version: Version) -> None:
    version.service.close(REST)
    version.service.learner.join()  # it may be at a large gallery, which it has open
    if version.service.ended:  # else its thread still reads; the gallery is closed with the process
        version.gallery.close()
