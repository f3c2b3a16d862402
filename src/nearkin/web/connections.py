"""Connections: how many, how long one may be silent, and who must go when there are more than can be held."""

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any

from nearkin.web.middleware import Limits
from nearkin.web.request_log import Journal

__all__ = ["AT_ONCE", "listen", "protocol", "server"]

AT_ONCE = 16  # connections that are taken in one turn of the event loop
WAITING = 1024  # that the system may hold before they are taken
# Files that connections leave to others: the gallery, its index, what torch has open, and connections of four turns,
# as it takes that long from taking one to another's being closed.
RESERVE = 4 * AT_ONCE + 64
FEWEST = 16
_FULL = json.dumps({"error": "there are more connections than can be held; come again a little later"}).encode()
FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%s" % (len(_FULL), _FULL)
)


def listen(bound: socket.socket) -> None:
    bound.listen(WAITING)


def most(wanted: int) -> int:
    """Connections that may be held; the process may open as many files as that takes, where the system lets it."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    endless = resource.RLIM_INFINITY
    needed = wanted + RESERVE
    if soft != endless and soft < needed:
        raised = needed if hard == endless else min(hard, needed)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
        except (OSError, ValueError):
            pass  # then there are fewer connections
    return wanted if soft == endless else max(FEWEST, min(wanted, soft - RESERVE))


def protocol(limits: Limits, journal: Journal) -> Any:
    """What uvicorn makes for each connection: HTTP/1.1 with a time for the head of a request and for taking an answer.

    Beyond the most connections the one that has been without a request for longest makes room for the new one.
    """
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    cap = most(limits.connections)
    everybody: set[Any] = set()
    idle: dict[Any, None] = {}  # without a request, the longest first
    loud = _Rarely(journal, cap)

    class Connection(H11Protocol):
        head: asyncio.TimerHandle | None = None
        taking: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            everybody.add(self)
            if len(everybody) > cap:
                loud()
                first = next(iter(idle), None)
                if first is None:
                    transport.write(FULL)
                    transport.close()
                    return
                first.cut()
            idle[self] = None
            self.head = self.loop.call_later(limits.headers, self.cut)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self.watch()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self.watch(begun=False)

        def watch(self, begun: bool = True) -> None:
            """Between requests? Then it may be cut, and a head that has begun must come to its end in time."""
            if self.conn.their_state is not h11.IDLE or self not in everybody:
                idle.pop(self, None)
                _cancel(self.head)
                self.head = None
                return
            idle.setdefault(self)
            if begun and self.head is None:
                self.head = self.loop.call_later(limits.headers, self.cut)

        def pause_writing(self) -> None:
            super().pause_writing()
            self.taking = self.taking or self.loop.call_later(limits.seconds, self.cut)

        def resume_writing(self) -> None:
            super().resume_writing()
            _cancel(self.taking)
            self.taking = None

        def cut(self) -> None:
            self.forget()
            self.transport.abort()

        def forget(self) -> None:
            everybody.discard(self)
            idle.pop(self, None)
            _cancel(self.head, self.taking)
            self.head = self.taking = None

        def connection_lost(self, exc: Exception | None) -> None:
            self.forget()
            super().connection_lost(exc)

    return Connection


def server(settings: Any, end: Callable[[], None], patience: float) -> Any:
    """uvicorn's server; `end` is called when requests have had so many seconds after a signal."""
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets=sockets)
            for bound in sockets or ():
                listen(bound)  # asyncio takes one number for what waits and for what it takes at once

        async def shutdown(self, sockets: Any = None) -> None:
            timer = asyncio.get_running_loop().call_later(patience, end)
            try:
                await super().shutdown(sockets=sockets)
            finally:
                timer.cancel()

    return Server(settings)


class _Rarely:
    """Says that connections are cut, once a minute at most."""

    def __init__(self, journal: Journal, cap: int) -> None:
        self._journal, self._cap, self._next = journal, cap, 0.0

    def __call__(self) -> None:
        now = asyncio.get_running_loop().time()
        if now >= self._next:
            self._next = now + 60
            self._journal.say("crowded", "warning", connections=self._cap, text="the longest silent are cut")


def _cancel(*timers: asyncio.TimerHandle | None) -> None:
    for timer in timers:
        if timer is not None:
            timer.cancel()
