"""How a gallery talks to PostgreSQL: one connection to read, one to write, and what goes wrong as one sentence."""

import re
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qsl, urlencode

__all__ = ["Link", "vector", "whole"]


class Link:
    """Connections are made when they are needed, and again when they broke. Safe to use from several threads."""

    def __init__(self, url: str, timeout: float) -> None:
        self.psycopg = _psycopg()
        self.url, self.name = _split(url)
        self.where, self.timeout = _shown(url), timeout
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
            wait = max(2, int(self.timeout))
            # Never prepared: a plan that the server keeps would outlive the choice between exact and by the index.
            options: dict[str, Any] = {"autocommit": True, "client_encoding": "utf8", "prepare_threshold": None}
            made = self.psycopg.connect(self.url, connect_timeout=wait, **options)
        except self.psycopg.Error as error:
            raise ValueError(f"{self.where}: cannot be reached ({_first_line(error)})") from None
        made.execute("SET synchronous_commit = on")  # a server may have it off: what is acknowledged would be lost
        made.execute("SET jit = off")
        made.execute("SET client_min_messages = warning")
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
            with connection.transaction(), connection.cursor(binary=True) as cursor:
                cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
                yield cursor

    @contextmanager
    def locked(self, key: str) -> Iterator[Any]:
        """A cursor of the one writer of `key`; all or nothing of what is done with it."""
        with self._writing, self._explained():
            connection = self._connection(True)
            with connection.transaction(), connection.cursor(binary=True) as cursor:
                cursor.execute("SELECT set_config('lock_timeout', %s, true)", (f"{int(self.timeout * 1000)}ms",))
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
            raise ValueError(f"{self.where}: the server has no pgvector ({_first_line(error)})") from None
        except self.psycopg.Error as error:
            raise ValueError(f"{self.where}: cannot be used ({_first_line(error)})") from None


def whole(number: int) -> bytes:
    """A bigint as PostgreSQL takes it."""
    return struct.pack(">q", number)


def vector(content: bytes) -> bytes:
    """A row's vector as pgvector takes it."""
    return struct.pack(">hh", len(content) // 4, 0) + content


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _split(url: str) -> tuple[str, str]:
    """The address for PostgreSQL, and the name of the gallery, which is ours."""
    base, _, query = url.partition("?")
    options = parse_qsl(query, keep_blank_values=True)
    name = dict(options).get("gallery", "gallery")
    if not re.fullmatch(r"[a-z0-9_]{1,40}", name):
        raise ValueError(f'gallery must be 1 to 40 small letters, digits and _, got "{name}"')
    rest = urlencode([(key, value) for key, value in options if key != "gallery"])
    return base + ("?" + rest if rest else ""), name


def _shown(url: str) -> str:
    """Without a password: it goes into sentences and logs."""
    base, _, query = url.partition("?")
    base = re.sub(r"//([^/:@]*):[^/@]*@", r"//\1@", base)
    rest = urlencode([(key, value) for key, value in parse_qsl(query) if key != "password"], safe="/")
    return base + ("?" + rest if rest else "")


def _psycopg() -> Any:
    try:
        import psycopg
    except ImportError:
        raise ModuleNotFoundError("a gallery in PostgreSQL needs psycopg: pip install 'nearkin[postgres]'") from None
    return psycopg
