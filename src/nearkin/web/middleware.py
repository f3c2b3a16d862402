"""Middleware around the app: access, limits of size, time and number, security headers, one log line per request."""

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from nearkin.core.errors import RefusedBody
from nearkin.web.access import Access
from nearkin.web.metrics import Metrics

__all__ = ["GuardMiddleware", "Limits"]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LINGER, LINGER_BYTES = (
    1.0,
    64 * 2**20,
)  # seconds and bytes that a refused body is still read, so that its sender gets the answer
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(self), microphone=(), geolocation=()"),
]

NO_STORE = (b"cache-control", b"no-store")


class Limits(NamedTuple):
    """What a request may cost. Beyond a limit the answer is a 4xx, or 503 where the service itself is full."""

    body: int = 16 * 2**20  # bytes of an upload, counted as they arrive
    json: int = 2**20  # bytes of any other body
    seconds: float = 30.0  # for a body to arrive
    total_body: int = 256 * 2**20  # bytes of all bodies in memory together
    requests: int = 256  # at a time
    pictures: int = 32  # per request
    pixels: int = 50_000_000  # per picture
    decoded: int = 192 * 2**20  # bytes of pixels per request: width × height × bytes per pixel
    batch: int = 32  # pictures encoded together
    queue: int = 128  # pictures that may wait for the encoder
    answer: float = 30.0  # seconds for an answer; the map and the diagnosis may take ten times as long
    stuck: float = 60.0  # seconds of work on one request after which health is no longer "ok"
    headers: float = 10.0  # seconds for the head of a request to arrive
    connections: int = 2048  # at a time, or fewer where the system allows fewer open files


SHUTTING_DOWN = "the service is shutting down; try again when it is back"
CLIENT_CLOSED = 499  # in the log only: the client hung up, so there is no answer
REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")


class _Exchange:
    """One request and its answer."""

    def __init__(self, headers: list[tuple[bytes, bytes]]) -> None:
        named = [value for key, value in headers if key == b"x-request-id"]
        valid = len(named) == 1 and REQUEST_ID.fullmatch(named[0])  # else an id of ours: it goes into the log
        self.id, self.start = named[0].decode() if valid else uuid.uuid4().hex[:12], time.perf_counter()
        self.bytes, self.status = 0, 0
        self.body_complete = False  # or the client hung up
        self.refusal: tuple[int, str] | None = None


class Working(Protocol):
    """The threads behind an app."""

    @property
    def ended(self) -> bool: ...

    @property
    def queue_lengths(self) -> dict[str, int]: ...

    def close(self, seconds: float | None = None) -> None: ...


class _Serving:
    """An app, the requests that it answers, and what happens when it was replaced and has answered the last one."""

    def __init__(self, app: App, service: Working | None) -> None:
        self.app, self.service, self.active = app, service, 0
        self.retired: Callable[[], None] | None = None

    def end_one(self) -> None:
        self.active -= 1
        if self.retired is not None and not self.active:
            self.retired()


class GuardMiddleware:
    """ASGI middleware: checks token and origin, bounds bytes, time and number of requests, adds security headers.

    service: the threads behind the app, which end with it.
    """

    def __init__(
        self,
        app: App,
        access: Access,
        limits: Limits,
        log: logging.Logger,
        metrics: Metrics | None = None,
        service: Working | None = None,
    ) -> None:
        self._serving, self._access, self._limits, self._log = _Serving(app, service), access, limits, log
        self.metrics = metrics or Metrics()
        self.total_body = self.active = 0
        self._exchanges: dict[asyncio.Task[Any] | None, _Exchange] = {}
        self._ending = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._serving.app(scope, receive, send)
            return
        exchange, task, serving = _Exchange(scope["headers"]), asyncio.current_task(), self._serving
        self._exchanges[task] = exchange
        self.active += 1
        serving.active += 1
        self.measure_queues()
        try:
            exchange.refusal = self._access.refusal(scope) or self._capacity_refusal() or self._declared_refusal(scope)
            if exchange.refusal is not None:
                await self._refuse(exchange, receive, send)
            else:
                await self._forward(serving.app, exchange, scope, receive, send)
        finally:
            del self._exchanges[task]
            self.active -= 1
            self.total_body -= exchange.bytes
            self._log_request(exchange, scope)
            self.metrics.observe(scope["path"], exchange.status, time.perf_counter() - exchange.start)
            self.measure_queues()
            serving.end_one()

    def measure_queues(self) -> None:
        service = self._serving.service
        self.metrics.gauge(self.active, {} if service is None else service.queue_lengths)

    def work_ended(self) -> bool:
        """Whether the threads of the service have ended."""
        return self._serving.service is None or self._serving.service.ended

    def close(self, seconds: float) -> None:
        """Ends the threads of the service; waiting requests get so many seconds."""
        if self._serving.service is not None:
            self._serving.service.close(seconds)

    def replace(self, app: App, service: Working, retired: Callable[[], None]) -> None:
        """Later requests go to another app; `retired` is called when the present one has answered its last request."""
        before, self._serving = self._serving, _Serving(app, service)
        before.active += 1
        before.retired = retired
        before.end_one()

    def end(self) -> None:
        """Answers every request under way with 503, and all later ones."""
        self._ending = True
        for task, exchange in self._exchanges.items():
            if task is not None and not exchange.status:
                exchange.refusal = 503, SHUTTING_DOWN
                task.cancel()

    async def _forward(self, app: App, exchange: _Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        limit = self._limit(scope)
        deadline = exchange.start + self._limits.seconds

        async def receive_counted() -> Message:
            if exchange.body_complete:
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), max(0.001, deadline - time.perf_counter()))
            except asyncio.TimeoutError:
                exchange.refusal = 408, f"the body did not arrive within {self._limits.seconds:g} seconds"
                raise RefusedBody from None
            size = len(message.get("body", b""))
            exchange.bytes += size
            self.total_body += size
            exchange.body_complete = message["type"] != "http.request" or not message.get("more_body")
            if message["type"] == "http.disconnect":
                exchange.refusal = CLIENT_CLOSED, ""
            elif exchange.bytes > limit:
                exchange.refusal = 413, _too_much(limit)
            elif self.total_body > self._limits.total_body:
                exchange.refusal = 503, "too many uploads at once; try again later"
            if exchange.refusal is not None:
                raise RefusedBody
            return message

        async def send_guarded(message: Message) -> None:
            if exchange.refusal is not None:
                return  # the app answers a body that ended early; our refusal is sent below
            if message["type"] == "http.response.start" and message["status"] == 500:
                exchange.refusal = 500, f"internal error; the log has it under id {exchange.id}"
                return
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                headers = list(message.get("headers", []))
                cached = any(key.lower() == b"cache-control" for key, _ in headers)
                message["headers"] = [
                    *headers,
                    *([] if cached else [NO_STORE]),
                    *HEADERS,
                    (b"x-request-id", exchange.id.encode()),
                ]
            await send(message)

        scope["request_id"] = exchange.id
        try:
            await app(scope, receive_counted, send_guarded)
        except RefusedBody:
            pass
        except asyncio.CancelledError:
            if not self._ending or exchange.refusal is None:
                raise
            getattr(asyncio.current_task(), "uncancel", lambda: 0)()  # Python 3.10 does not count
        except Exception:
            fields = {"id": exchange.id, "path": scope["path"][:200]}
            self._log.exception("failed", extra={"fields": fields})
        if exchange.refusal is not None and exchange.refusal[0] == CLIENT_CLOSED:
            exchange.status = CLIENT_CLOSED
        elif exchange.refusal is not None and not exchange.status:
            await self._refuse(exchange, receive, send)

    async def _refuse(self, exchange: _Exchange, receive: Receive, send: Send) -> None:
        assert exchange.refusal is not None
        exchange.status, sentence = exchange.refusal
        content = json.dumps({"error": sentence}).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(content)).encode()),
            (b"x-request-id", exchange.id.encode()),
            NO_STORE,
            *HEADERS,
        ]
        if exchange.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if exchange.status == 503:
            headers.append((b"retry-after", b"1"))
        if not exchange.body_complete:
            headers.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": exchange.status, "headers": headers})
        await send({"type": "http.response.body", "body": content, "more_body": True})
        if not exchange.body_complete:
            await self._linger(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _linger(self, receive: Receive) -> None:
        """Reads and drops more of the body: closing at once would reset the connection and lose the answer."""
        until, size = time.perf_counter() + LINGER, 0
        with suppress(asyncio.TimeoutError):
            while (left := until - time.perf_counter()) > 0 and size < LINGER_BYTES:
                message = await asyncio.wait_for(receive(), left)
                size += len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body"):
                    return

    def _capacity_refusal(self) -> tuple[int, str] | None:
        if self._ending:
            return 503, SHUTTING_DOWN
        if self.active <= self._limits.requests:
            return None
        return 503, f"more than {self._limits.requests} requests at a time; try again later"

    def _declared_refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Refuses a body whose declared length is too large or ambiguous (request smuggling)."""
        names = [key for key, _ in scope["headers"]]
        if b"transfer-encoding" in names and b"content-length" in names:
            return 400, "Content-Length and Transfer-Encoding must not come together"
        declared = next((value for key, value in scope["headers"] if key == b"content-length"), b"0")
        limit = self._limit(scope)
        return (413, _too_much(limit)) if declared.isdigit() and int(declared[:20]) > limit else None

    def _limit(self, scope: Scope) -> int:
        kind = next((value for key, value in scope["headers"] if key == b"content-type"), b"")
        upload = kind.lower().startswith(b"multipart/")
        return self._limits.body if upload else self._limits.json

    def _log_request(self, exchange: _Exchange, scope: Scope) -> None:
        fields = {
            "id": exchange.id,
            "method": scope["method"],
            "path": scope["path"][:200],
            "status": exchange.status,
            "ms": round((time.perf_counter() - exchange.start) * 1000, 1),
            "bytes": exchange.bytes,
            "client": (scope.get("client") or ("",))[0],
        }
        self._log.log(logging.ERROR if exchange.status == 500 else logging.INFO, "request", extra={"fields": fields})


def _too_much(limit: int) -> str:
    return f"the body must have at most {limit:,} bytes"
