"""What every process that answers requests does: opens the gallery, warms it, runs uvicorn until it is told to end."""

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from nearkin.gallery import Gallery
from nearkin.web import connections
from nearkin.web.access import Access
from nearkin.web.app import Version, build_version, guard
from nearkin.web.enrolment import Progressing
from nearkin.web.metrics import Metrics
from nearkin.web.middleware import GuardMiddleware, Limits
from nearkin.web.process_link import Link
from nearkin.web.reload import Reloader
from nearkin.web.writer import RemoteWriter

__all__ = ["PATIENCE", "REST", "WAIT", "Process", "Settings", "close_gallery"]

# A process ends within 10 seconds of a signal: requests under way may finish (PATIENCE), the others get a 503,
# connections are closed (GRACE), threads and the gallery get a last moment (REST).
PATIENCE, GRACE, REST = 5.0, 7, 1.5
WAIT = 5.0  # seconds a writer waits for another process


class Settings(NamedTuple):
    """What a worker is told; all of it is JSON."""

    run: str
    place: str
    host: str
    token: str | None
    dim: int | None
    device: str
    limits: list[Any]
    pictures: bool  # the encoder takes pictures, else vectors only
    drawing: bool
    quiet: bool

    def open_gallery(self) -> Gallery:
        options: dict[str, Any] = {"dim": self.dim, "timeout": WAIT, "device": self.device}
        return Gallery.open(self.place, self.run, **options, max_pixels=Limits(*self.limits).pixels)


class Process:
    """One process that answers requests.

    link: to the supervisor, where this is a worker; it then writes a gallery that is a file. `open` must be called
    first, once; then the app is there.
    """

    def __init__(self, settings: Settings, log: logging.Logger, metrics: Metrics, link: Link | None = None) -> None:
        self.settings, self.log, self.metrics, self.link = settings, log, metrics, link
        self.access, self.limits = Access(settings.token, settings.host), Limits(*settings.limits)
        self.enrolment: Progressing | None = None
        self.guard: GuardMiddleware
        self.reloader: Reloader
        self.server: Any = None

    def open(self, gallery: Gallery, check: Callable[[], None] = lambda: None) -> None:
        """Warms the gallery and makes the app. check: raises where this is no time to reload."""
        version = self._version(gallery)
        self.guard = guard(version, self.access, self.limits, self.log, self.metrics)
        self.reloader = Reloader(self.guard, version, self._reopen, self.log, check)
        version.service.reload = self._reload

    @property
    def gallery(self) -> Gallery:
        """That answers now."""
        return self.reloader.version.gallery

    def run(self, bound: socket.socket, started: Callable[[asyncio.AbstractEventLoop], None], together: int) -> bool:
        """Answers until a signal, or until `end`; whether all threads have ended. together: connections accepted in
        one turn of the event loop."""
        import uvicorn

        settings = uvicorn.Config(
            self.guard,
            http=connections.protocol(self.limits, self.log, self.metrics),
            backlog=together,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=GRACE,
            timeout_keep_alive=15,
        )

        def begun(loop: asyncio.AbstractEventLoop) -> None:
            self.reloader.loop = loop
            self.metrics.begin()
            started(loop)

        self.server = connections.server(settings, self.guard.end, PATIENCE, begun, self.link is None)
        with suppress(KeyboardInterrupt):  # uvicorn has shut down and raises the signal again
            self.server.run(sockets=[bound])
        return self.guard.work_ended()

    def end(self) -> None:
        """As a signal does."""
        if self.server is not None:
            self.server.should_exit = True

    def _reload(self) -> dict[str, Any]:
        if self.link is None:
            return self.reloader.reload()
        done: dict[str, Any] = self.link.call("reload")
        return done

    def _reopen(self) -> Version:
        gallery = self.settings.open_gallery()
        try:
            version = self._version(gallery)
        except BaseException:
            gallery.close()
            raise
        version.service.reload = self._reload
        return version

    def _version(self, gallery: Gallery) -> Version:
        gallery.warm()
        if self.settings.pictures:  # loads the encoder and runs it once before the first request
            gallery.see([np.zeros((8, 8, 3), np.uint8)])
        link = self.link
        writer = None if link is None or "://" in self.settings.place else RemoteWriter(link, gallery)
        return build_version(
            gallery,
            self.access,
            self.limits,
            self.log,
            self.metrics,
            pictures=self.settings.pictures,
            drawing=self.settings.drawing,
            enrolment=self.enrolment,
            writer=writer,
            written=None if link is None else lambda: link.tell("changed"),
        )


def close_gallery(gallery: Gallery) -> bool:
    """Closes it in a thread, as a stuck thread may hold its lock. Returns whether that ended."""
    closing = threading.Thread(target=gallery.close, name="closing", daemon=True)
    closing.start()
    closing.join(REST)
    return not closing.is_alive()
