"""Calls between the processes of the service: JSON over a pair of sockets, in both directions."""

import itertools
import json
import logging
import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from typing import Any

from nearkin.core.errors import (
    LabelConflict,
    MissingRow,
    QueueFull,
    ReloadRefused,
    StaleGroups,
    StoreUnavailable,
    StoreUnreachable,
)

__all__ = ["Link"]

HEAD = struct.Struct(">I")
# What a call may raise at its caller, the first class that fits; any other error is an internal one.
ERRORS: tuple[type[Exception], ...] = (
    LabelConflict,
    StaleGroups,
    MissingRow,
    ReloadRefused,
    QueueFull,
    StoreUnreachable,
    StoreUnavailable,
    TimeoutError,
    TypeError,
    ValueError,
)
GONE = "the other process of the service has ended; try again"


class Link:
    """One end. answer(name, arguments): called in a thread of its own for every call of the other end.

    ended: called once when the other end is gone.
    """

    def __init__(
        self,
        end: socket.socket,
        answer: Callable[[str, dict[str, Any]], Any],
        ended: Callable[[], None],
        log: logging.Logger,
    ) -> None:
        self._socket, self._answer, self._ended, self._log = end, answer, ended, log
        self._sending, self._numbers = threading.Lock(), itertools.count()
        self._calls: dict[int, Future[Any]] = {}
        self._closed = False
        threading.Thread(target=self._receive_all, name="link", daemon=True).start()

    def call(self, name: str, seconds: float | None = None, **arguments: Any) -> Any:
        """The answer of the other end. A StoreUnavailable where that is gone, a TimeoutError after so many seconds."""
        number, future = next(self._numbers), Future[Any]()
        self._calls[number] = future
        try:
            if self._closed:
                raise StoreUnavailable(GONE)
            self._send({"call": number, "name": name, "arguments": arguments})
            return future.result(seconds)
        except FutureTimeout:  # not TimeoutError in Python 3.10
            if future.done():
                raise
            raise TimeoutError(f"there was no answer of another process within {seconds:g} seconds") from None
        finally:
            del self._calls[number]

    def tell(self, name: str, **arguments: Any) -> None:
        """A call without an answer; nothing happens where the other end is gone."""
        with suppress(StoreUnavailable):
            self._send({"name": name, "arguments": arguments})

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _send(self, message: dict[str, Any]) -> None:
        content = json.dumps(message).encode()
        try:
            with self._sending:
                self._socket.sendall(HEAD.pack(len(content)) + content)
        except OSError:
            raise StoreUnavailable(GONE) from None

    def _receive_all(self) -> None:
        try:
            while (message := self._receive()) is not None:
                if "reply" in message:
                    self._resolve(message)
                else:
                    threading.Thread(target=self._respond, args=(message,), name="call", daemon=True).start()
        finally:
            self._closed = True
            for future in list(self._calls.values()):
                with suppress(Exception):  # it has its answer already
                    future.set_exception(StoreUnavailable(GONE))
            self._socket.close()
            self._ended()

    def _receive(self) -> dict[str, Any] | None:
        head = self._read(HEAD.size)
        content = None if head is None else self._read(HEAD.unpack(head)[0])
        if content is None:
            return None
        message: dict[str, Any] = json.loads(content)
        return message

    def _read(self, size: int) -> bytes | None:
        """None where the other end is gone."""
        parts = bytearray()
        while len(parts) < size:
            try:
                part = self._socket.recv(min(2**20, size - len(parts)))
            except OSError:
                return None
            if not part:
                return None
            parts += part
        return bytes(parts)

    def _respond(self, message: dict[str, Any]) -> None:
        reply: dict[str, Any] = {"reply": message.get("call")}
        try:
            reply["result"] = self._answer(message["name"], message["arguments"])
        except Exception as error:
            kind = next((i for i, one in enumerate(ERRORS) if isinstance(error, one)), None)
            reply["error"] = [kind, str(error)]
            if kind is None:
                self._log.exception("failed", extra={"fields": {"call": message["name"]}})
        if "call" in message:
            with suppress(StoreUnavailable):
                self._send(reply)

    def _resolve(self, message: dict[str, Any]) -> None:
        future = self._calls.get(message["reply"])
        if future is None:
            return  # nobody waits for it any more
        if "error" not in message:
            future.set_result(message["result"])
            return
        kind, sentence = message["error"]
        if kind is None:
            future.set_exception(RuntimeError(f"internal error of another process: {sentence}"))
        else:  # without __init__, which would make the sentence again
            future.set_exception(ERRORS[kind].__new__(ERRORS[kind], sentence))
