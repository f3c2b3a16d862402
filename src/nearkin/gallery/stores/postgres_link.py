"""How a gallery talks to PostgreSQL: one connection to read, one to write, and what goes wrong as one sentence."""

import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from nearkin.core.errors import StoreUnreachable
from nearkin.gallery.stores.postgres_url import Address, address

__all__ = ["Link", "vector", "whole"]


class Link:
    """Connections are made when they are needed, and again when they broke. Safe to use from several threads.

    timeout: seconds for a connection, for a lock that another holds, and until a server that says nothing is asked
    whether it is still there; one that is busy with a long question is, and is waited for.
    """

    def __init__(self, url: str, timeout: float) -> None:
        self.psycopg = _psycopg()
        self._address: Address = address(url)
        self.name, self.where, self.timeout = self._address.name, self._address.shown, timeout
        self._reading, self._writing = threading.RLock(), threading.RLock()
        self._reader: Any = None
        self._writer: Any = None
        self._closed = False

    def close(self) -> None:
        self._closed = True
        with self._reading, self._writing:
            for connection in (self._reader, self._writer):
                if connection is not None:
                    connection.close()
            self._reader = self._writer = None

    def _connection(self, writing: bool) -> Any:
        if self._closed:
            raise ValueError(f"{self.where}: the gallery is closed; open it again")
        kept = self._writer if writing else self._reader
        if kept is not None and not (kept.closed or kept.broken):
            return kept
        try:
            made = self._connected()
        except (self.psycopg.Error, UnicodeError) as error:
            raise StoreUnreachable(f"{self.where}: cannot be reached ({self._reason(error)})") from None
        with self._watched(made):
            made.execute("SET synchronous_commit = on")  # a server may have it off: what is acknowledged would be lost
            made.execute("SET jit = off")
            made.execute("SET client_min_messages = warning")
            made.execute(f"SET lock_timeout = {max(1, int(self.timeout * 1000))}")
        if writing:
            self._writer = made
        else:
            self._reader = made
        return made

    @contextmanager
    def asking(self) -> Iterator[Any]:
        """A cursor that sees one state of the gallery until it is left."""
        with self._reading, self._explained():
            connection = self._connection(False)
            if connection.info.transaction_status:  # within another call of ours
                with connection.cursor(binary=True) as cursor:
                    yield cursor
                return
            with self._watched(connection), connection.transaction(), connection.cursor(binary=True) as cursor:
                cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
                yield cursor

    @contextmanager
    def locked(self, key: str) -> Iterator[Any]:
        """A cursor of the one writer of `key`; all or nothing of what is done with it."""
        with self._writing, self._explained():
            connection = self._connection(True)
            with self._watched(connection), connection.transaction(), connection.cursor(binary=True) as cursor:
                cursor.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (key,))
                yield cursor

    @staticmethod
    def copy(cursor: Any, table: str, rows: Sequence[Sequence[Any]]) -> None:
        """In PostgreSQL's own binary form: the bytes of a vector are those that the checksum was taken of."""
        if not rows:
            return
        parts = [b"PGCOPY\n\xff\r\n\0" + struct.pack(">ii", 0, 0)]
        for row in rows:
            parts.append(struct.pack(">h", len(row)))
            for value in row:
                content = value.encode() if isinstance(value, str) else value
                parts += (struct.pack(">i", len(content)), content)
        parts.append(struct.pack(">h", -1))
        with cursor.copy(f"COPY {table} FROM STDIN (FORMAT BINARY)") as copy:
            copy.write(b"".join(parts))

    def _connected(self) -> Any:
        # Never prepared: a plan that the server keeps would outlive the choice between exact and by the index.
        options: dict[str, Any] = {"autocommit": True, "client_encoding": "utf8", "prepare_threshold": None}
        return self.psycopg.connect(self._address.url, connect_timeout=max(2, int(self.timeout)), **options)

    @contextmanager
    def _watched(self, connection: Any) -> Iterator[None]:
        """Cuts the connection, so that its call ends, where the server does not even take another one."""
        done, cutting, wait = threading.Event(), threading.Lock(), max(self.timeout, 1.0)

        def watch() -> None:
            while not done.is_set():
                try:
                    self._connected().close()
                except self.psycopg.Error as error:
                    if "FATAL" not in str(error):  # a server that refuses is there
                        break
                done.wait(wait)
            with cutting:
                if not done.is_set():
                    _cut(connection)

        watcher = threading.Timer(wait, watch)
        watcher.daemon = True
        watcher.start()
        try:
            yield
        finally:
            watcher.cancel()
            with cutting:
                done.set()

    def _reason(self, error: Exception) -> str:
        """The first line of what went wrong, without a password."""
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        for secret in self._address.secrets:
            text = text.replace(secret, "…")
        return text

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """What PostgreSQL says, as one sentence."""
        errors = self.psycopg.errors
        try:
            yield
        except errors.LockNotAvailable:
            waited = f"waited {self.timeout:g} s"
            raise TimeoutError(f"{self.where}: another process is writing to it; {waited}, try again later") from None
        except (errors.FeatureNotSupported, errors.UndefinedFile) as error:
            raise ValueError(f"{self.where}: the server has no pgvector ({self._reason(error)})") from None
        except self.psycopg.Error as error:
            raise StoreUnreachable(f"{self.where}: cannot be used ({self._reason(error)})") from None


def whole(number: int) -> bytes:
    """A bigint as PostgreSQL takes it."""
    return struct.pack(">q", number)


def vector(content: bytes) -> bytes:
    """A row's vector as pgvector takes it."""
    return struct.pack(">hh", len(content) // 4, 0) + content


def _cut(connection: Any) -> None:
    """Whoever waits for it hears that it is broken; it is not closed, which would be unsafe from another thread."""
    with suppress(Exception):
        shared = socket.socket(fileno=connection.fileno())
        try:
            shared.shutdown(socket.SHUT_RDWR)
        finally:
            shared.detach()


def _psycopg() -> Any:
    try:
        import psycopg
    except ImportError:
        raise ModuleNotFoundError("a gallery in PostgreSQL needs psycopg: pip install 'nearkin[postgres]'") from None
    return psycopg
