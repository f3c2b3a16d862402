"""The door of the service: who may enter, how much he may bring, and a line in the log for each who came."""

import asyncio
import json
import time
import traceback
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any, NamedTuple

from nearkin.core.errors import RefusedBody
from nearkin.web.access import Access
from nearkin.web.request_log import Journal

__all__ = ["Door", "Limits"]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LINGER, LINGER_BYTES = 1.0, 64 * 2**20  # how long and how far a refused body is still read: its sender shall hear why
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
]

NOT_KEPT = (b"cache-control", b"no-store")


class Limits(NamedTuple):
    """What a request may cost. Everything beyond is a clear 4xx, or 503 where it is the service that is full."""

    body: int = 16 * 2**20  # bytes of a request, counted as they arrive
    json: int = 2**20  # bytes of one that is no upload
    seconds: float = 30.0  # until a body must be there
    held: int = 256 * 2**20  # bytes of all bodies together
    requests: int = 256  # at a time
    pictures: int = 32  # of one request
    pixels: int = 50_000_000  # of one picture
    decoded: int = 192 * 2**20  # bytes of all pixels of a request: width × height × bytes a pixel
    batch: int = 32  # pictures that are encoded together
    queue: int = 128  # pictures that may wait for the encoder
    answer: float = 30.0  # seconds until a request is answered; the map and the diagnosis may take ten times as long
    stuck: float = 60.0  # seconds of work on one request after which health is no longer "ok"
    headers: float = 10.0  # seconds until the head of a request must be there
    connections: int = 2048  # at a time; as many less as the system has files


ENDING = "the service is ending; ask again when it is back"
GONE = 499  # in the log: who asked has hung up, and nobody is answered


class _Visit:
    """One request: what came of its body, what was answered."""

    def __init__(self) -> None:
        self.id, self.start = uuid.uuid4().hex[:12], time.perf_counter()
        self.bytes, self.status = 0, 0
        self.whole = False  # its body is there, or nobody sends any more
        self.refusal: tuple[int, str] | None = None


class Door:
    """Around the app (ASGI): token, origin, bytes, time, number of requests; headers that keep browsers careful."""

    def __init__(self, app: App, access: Access, limits: Limits, journal: Journal) -> None:
        self._app, self._access, self._limits, self._journal = app, access, limits, journal
        self.held = self.inside = 0
        self.at_rest: Callable[[], bool] = lambda: True  # whether no work is left; told by whoever builds the service
        self._visits: dict[asyncio.Task[Any] | None, _Visit] = {}
        self._ending = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        visit, task = _Visit(), asyncio.current_task()
        self._visits[task] = visit
        self.inside += 1
        try:
            visit.refusal = self._access.refusal(scope) or self._full() or self._announced(scope)
            if visit.refusal is not None:
                await self._refuse(visit, receive, send)
            else:
                await self._enter(visit, scope, receive, send)
        finally:
            del self._visits[task]
            self.inside -= 1
            self.held -= visit.bytes
            self._log(visit, scope)

    def end(self) -> None:
        """Whoever still waits is told so, and nobody more is let in."""
        self._ending = True
        for task, visit in self._visits.items():
            if task is not None and not visit.status:
                visit.refusal = 503, ENDING
                task.cancel()

    async def _enter(self, visit: _Visit, scope: Scope, receive: Receive, send: Send) -> None:
        limit = self._limit(scope)
        deadline = visit.start + self._limits.seconds

        async def counted() -> Message:
            if visit.whole:
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), max(0.001, deadline - time.perf_counter()))
            except asyncio.TimeoutError:
                visit.refusal = 408, f"the body was not there after {self._limits.seconds:g} seconds"
                raise RefusedBody from None
            size = len(message.get("body", b""))
            visit.bytes += size
            self.held += size
            visit.whole = message["type"] != "http.request" or not message.get("more_body")
            if message["type"] == "http.disconnect":
                visit.refusal = GONE, ""
            elif visit.bytes > limit:
                visit.refusal = 413, _too_much(limit)
            elif self.held > self._limits.held:
                visit.refusal = 503, "there are more uploads than can be held; come again a little later"
            if visit.refusal is not None:
                raise RefusedBody
            return message

        async def answered(message: Message) -> None:
            if visit.refusal is not None:
                return  # whatever the app makes of a body that ended early; ours is sent below
            if message["type"] == "http.response.start" and message["status"] == 500:
                visit.refusal = 500, f"something broke here; the log has it under {visit.id}"
                return
            if message["type"] == "http.response.start":
                visit.status = message["status"]
                given = list(message.get("headers", []))
                kept = [] if any(key.lower() == b"cache-control" for key, _ in given) else [NOT_KEPT]
                message["headers"] = [*given, *kept, *HEADERS, (b"x-request-id", visit.id.encode())]
            await send(message)

        scope["visit"] = visit.id
        try:
            await self._app(scope, counted, answered)
        except RefusedBody:
            pass
        except asyncio.CancelledError:
            if not self._ending or visit.refusal is None:
                raise
            getattr(asyncio.current_task(), "uncancel", lambda: 0)()  # Python 3.10 does not count
        except Exception:
            trace = traceback.format_exc()
            self._journal.say("failed", "error", id=visit.id, path=scope["path"][:200], trace=trace)
        if visit.refusal is not None and visit.refusal[0] == GONE:
            visit.status = GONE
        elif visit.refusal is not None and not visit.status:
            await self._refuse(visit, receive, send)

    async def _refuse(self, visit: _Visit, receive: Receive, send: Send) -> None:
        assert visit.refusal is not None
        visit.status, sentence = visit.refusal
        content = json.dumps({"error": sentence}).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(content)).encode()),
            (b"x-request-id", visit.id.encode()),
            NOT_KEPT,
            *HEADERS,
        ]
        if visit.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if visit.status == 503:
            headers.append((b"retry-after", b"1"))
        if not visit.whole:
            headers.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": visit.status, "headers": headers})
        await send({"type": "http.response.body", "body": content, "more_body": True})
        if not visit.whole:
            await self._linger(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _linger(self, receive: Receive) -> None:
        """Reads on for a moment and forgets: to close at once would reset the connection and lose the answer."""
        until, size = time.perf_counter() + LINGER, 0
        with suppress(asyncio.TimeoutError):
            while (left := until - time.perf_counter()) > 0 and size < LINGER_BYTES:
                message = await asyncio.wait_for(receive(), left)
                size += len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body"):
                    return

    def _full(self) -> tuple[int, str] | None:
        if self._ending:
            return 503, ENDING
        if self.inside <= self._limits.requests:
            return None
        return 503, f"more than {self._limits.requests} requests at a time; come again a little later"

    def _announced(self, scope: Scope) -> tuple[int, str] | None:
        """A body that says beforehand that it is too large, or that two readers would end at two places."""
        names = [key for key, _ in scope["headers"]]
        if b"transfer-encoding" in names and b"content-length" in names:
            return 400, "Content-Length and Transfer-Encoding must not come together"
        said = next((value for key, value in scope["headers"] if key == b"content-length"), b"0")
        limit = self._limit(scope)
        return (413, _too_much(limit)) if said.isdigit() and int(said[:20]) > limit else None

    def _limit(self, scope: Scope) -> int:
        kind = next((value for key, value in scope["headers"] if key == b"content-type"), b"")
        upload = kind.lower().startswith(b"multipart/")
        return self._limits.body if upload else self._limits.json

    def _log(self, visit: _Visit, scope: Scope) -> None:
        self._journal.say(
            "request",
            "error" if visit.status == 500 else "info",
            id=visit.id,
            method=scope["method"],
            path=scope["path"][:200],
            status=visit.status,
            ms=round((time.perf_counter() - visit.start) * 1000, 1),
            bytes=visit.bytes,
            client=(scope.get("client") or ("",))[0],
        )


def _too_much(limit: int) -> str:
    return f"the body must have at most {limit:,} bytes"
