"""Connections: their number, their timeouts, and which one is closed when there are too many."""

import asyncio
import json
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nearkin.web.metrics import Metrics
from nearkin.web.middleware import Limits

__all__ = ["ACCEPTED_AT_ONCE", "listen", "on_hangup", "protocol", "server"]

ACCEPTED_AT_ONCE = 2  # connections per turn of the event loop: a worker leaves the next ones to the others
BACKLOG = 1024  # connections that the system holds before they are accepted
# Open files that connections leave to the gallery, its index and torch, and to the connections accepted in a few turns:
# it takes that long until another one is closed.
RESERVE = 128
MIN_CONNECTIONS = 16
_FULL = json.dumps({"error": "too many connections; try again later"}).encode()
FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%s" % (len(_FULL), _FULL)
)


def listen(bound: socket.socket) -> None:
    bound.listen(BACKLOG)


def allowed_connections(requested: int) -> int:
    """The number of connections; raises the limit of open files for it, where the system permits."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return requested
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    needed = requested + RESERVE
    if soft != unlimited and soft < needed:
        raised = needed if hard == unlimited else min(hard, needed)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
        except (OSError, ValueError):
            pass  # fewer connections then
    return requested if soft == unlimited else max(MIN_CONNECTIONS, min(requested, soft - RESERVE))


def protocol(limits: Limits, log: logging.Logger, metrics: Metrics | None = None) -> Any:
    """uvicorn's HTTP/1.1 protocol with timeouts for the head of a request and for reading an answer.

    At the maximum number of connections a new one replaces the one that has been idle for longest.
    """
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    maximum, counted = allowed_connections(limits.connections), metrics or Metrics()
    connections: set[Any] = set()
    idle: dict[Any, None] = {}  # without a request, the longest first
    warn = _CrowdedWarning(log, maximum)

    class Connection(H11Protocol):
        head_timer: asyncio.TimerHandle | None = None
        write_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            connections.add(self)
            counted.connected(len(connections))
            if len(connections) > maximum:
                warn()
                longest_idle = next(iter(idle), None)
                if longest_idle is None:
                    counted.add("nearkin_rejected_total")
                    transport.write(FULL)
                    transport.close()
                    return
                longest_idle.abort()
            idle[self] = None
            self.head_timer = self.loop.call_later(limits.headers, self.abort)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self.update_idle()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self.update_idle(begun=False)

        def update_idle(self, begun: bool = True) -> None:
            """Between requests a connection may be replaced, and a head that has begun must arrive in time."""
            if self.conn.their_state is not h11.IDLE or self not in connections:
                idle.pop(self, None)
                _cancel(self.head_timer)
                self.head_timer = None
                return
            idle.setdefault(self)
            if begun and self.head_timer is None:
                self.head_timer = self.loop.call_later(limits.headers, self.abort)

        def pause_writing(self) -> None:
            super().pause_writing()
            self.write_timer = self.write_timer or self.loop.call_later(limits.seconds, self.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            _cancel(self.write_timer)
            self.write_timer = None

        def abort(self) -> None:
            self.forget()
            self.transport.abort()

        def forget(self) -> None:
            connections.discard(self)
            counted.connected(len(connections))
            idle.pop(self, None)
            _cancel(self.head_timer, self.write_timer)
            self.head_timer = self.write_timer = None

        def connection_lost(self, exc: Exception | None) -> None:
            self.forget()
            super().connection_lost(exc)

    return Connection


def server(
    settings: Any,
    end: Callable[[], None],
    patience: float,
    started: Callable[[asyncio.AbstractEventLoop], None] = lambda _: None,
    interrupted: bool = True,
) -> Any:
    """uvicorn's server; `end` is called `patience` seconds after a signal, `started` once requests are accepted.

    interrupted: Ctrl-C ends it; not so in a worker, whose supervisor tells it when to end.
    """
    import uvicorn

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            with super().capture_signals():
                if not interrupted and threading.current_thread() is threading.main_thread():
                    signal.signal(signal.SIGINT, signal.SIG_IGN)
                yield

        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets=sockets)
            for bound in sockets or ():
                listen(bound)  # asyncio uses one number for the backlog and for connections per turn
            started(asyncio.get_running_loop())

        async def shutdown(self, sockets: Any = None) -> None:
            timer = asyncio.get_running_loop().call_later(patience, end)
            try:
                await super().shutdown(sockets=sockets)
            finally:
                timer.cancel()

    return Server(settings)


def on_hangup(reload: Callable[[], None], end: Callable[[], None]) -> Callable[[], None]:
    """What SIGHUP does: `reload`; or `end`, where it says that the terminal from which the service runs is gone."""
    terminal = _has_terminal()
    return lambda: reload() if not terminal or _has_terminal() else end()


def _has_terminal() -> bool:
    try:
        os.close(os.open(os.ctermid(), os.O_RDWR))
    except (OSError, AttributeError):  # Windows has no such thing
        return False
    return True


class _CrowdedWarning:
    """Logs that connections are closed, once per minute at most."""

    def __init__(self, log: logging.Logger, maximum: int) -> None:
        self._log, self._maximum, self._next = log, maximum, 0.0

    def __call__(self) -> None:
        now = asyncio.get_running_loop().time()
        if now >= self._next:
            self._next = now + 60
            fields = {"connections": self._maximum, "text": "the longest idle connections are closed"}
            self._log.warning("crowded", extra={"fields": fields})


def _cancel(*timers: asyncio.TimerHandle | None) -> None:
    for timer in timers:
        if timer is not None:
            timer.cancel()
