"""Connections of a gallery to PostgreSQL: its address, one reader and one writer, errors as one sentence each."""

import re
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple
from urllib.parse import unquote

from nearkin.core.errors import StoreUnreachable, TablesExchanged
from nearkin.gallery.stores.postgres_watchdog import Watchdog

__all__ = ["Address", "Connections", "bigint_bytes", "parse_address", "shown", "vector_bytes"]

SCHEMES = ("postgresql://", "postgres://")
OWN_OPTIONS = ("gallery", "search")  # of an address, which the server does not get
SEARCHES = ("index", "exact")
ON_DEMAND = 10**9  # statements are prepared where the call asks for it
# A transaction that reads sees the rows of its beginning, but PostgreSQL looks up names as they are now: after an
# exchange a name is that of new tables, of which it sees no row. The first is the schema of the beginning, the second
# that of now.
TABLES = "SELECT (SELECT oid FROM pg_namespace WHERE nspname = %s), to_regnamespace(%s)::oid"
HOST = r"(\[[^\]]*\]|[^:\[\]]*)(:\d*)?"  # and its port, a number: anything else may be part of a password


class Address(NamedTuple):
    """url: for PostgreSQL. name: of the gallery. shown: for messages and logs. secrets: what no message may contain.

    exact: every search compares all rows, whatever index there is.
    """

    url: str
    name: str
    shown: str
    secrets: list[str]
    exact: bool = False


def parse_address(url: str) -> Address:
    """As PostgreSQL reads it: user and password end at the first @ before a /, and + is not a space."""
    scheme, _, rest = url.partition("://")
    user, _, rest = ("", "", rest) if "@" not in rest.partition("/")[0] else rest.partition("@")
    base, _, query = rest.partition("?")
    options = [part.partition("=") for part in query.split("&") if part]
    hosts = base.partition("/")[0].split(",")
    if "@" in base or not all(re.fullmatch(HOST, host) for host in hosts) or not all(part[1] for part in options):
        raise ValueError(
            "a gallery in PostgreSQL is postgresql://USER:PASSWORD@HOST:PORT/DATABASE?OPTION=VALUE; in a user or "
            "password @ : / ? # and % are written %40 %3A %2F %3F %23 and %25"
        )
    name = next((unquote(value) for key, _, value in options if unquote(key) == "gallery"), "gallery")
    if not re.fullmatch(r"[a-z0-9_]{1,40}", name):
        raise ValueError(f'gallery must be 1 to 40 small letters, digits and _, got "{name}"')
    search = next((unquote(value) for key, _, value in options if unquote(key) == "search"), "index")
    if search not in SEARCHES:
        raise ValueError(f'search must be {" or ".join(SEARCHES)}, got "{search}"')
    user_name, _, password = user.partition(":")
    secrets = [password, *(value for key, _, value in options if _is_secret(key))]
    secrets = [text for secret in secrets for text in {secret, unquote(secret)} if text]
    head = f"{scheme}://"
    for_server = [part for part in options if unquote(part[0]) not in OWN_OPTIONS]
    for_messages = [part for part in options if not _is_secret(part[0])]
    return Address(
        head + (f"{user}@" if user else "") + _with_options(base, for_server),
        name,
        head + (f"{user_name}@" if user_name else "") + _with_options(base, for_messages),
        sorted(secrets, key=len, reverse=True),
        search == "exact",
    )


def shown(place: object) -> str:
    """Any place of a gallery, without a password."""
    text = str(place)
    if text.startswith(SCHEMES):
        return parse_address(text).shown
    return re.sub(r"://.*@", "://…@", text)


def _is_secret(key: str) -> bool:
    return "pass" in unquote(key).lower()


def _with_options(base: str, options: list[tuple[str, str, str]]) -> str:
    return base + ("?" + "&".join("".join(part) for part in options) if options else "")


class Connections:
    """One to read and one to write, made on first use and again after they broke. Thread-safe.

    timeout: seconds for a connection, for a lock of another process, and until a silent server is asked whether it is
    still up; one that is busy with a long query is, and is waited for.
    """

    def __init__(self, url: str, timeout: float) -> None:
        self.psycopg = _psycopg()
        self._address: Address = parse_address(url)
        self.name, self.where, self.timeout = self._address.name, self._address.shown, timeout
        self.schema = f"nearkin_{self.name}"
        self._tables: int | None = None  # number of the schema when it was last looked up
        self.exact = self._address.exact
        self._read_lock, self._write_lock = threading.RLock(), threading.RLock()
        self._reader: Any = None
        self._writer: Any = None
        self._closed = False
        self._watchdog = Watchdog(max(timeout, 1.0), self._is_up)

    def close(self) -> None:
        self._closed = True
        with self._read_lock, self._write_lock:
            for connection in (self._reader, self._writer):
                if connection is not None:
                    connection.close()
            self._reader = self._writer = None

    def _connection(self, writing: bool) -> Any:
        if self._closed:
            raise ValueError(f"{self.where}: the gallery is closed; open it again")
        connection = self._writer if writing else self._reader
        if connection is not None and not (connection.closed or connection.broken):
            return connection
        try:
            connection = self._connect()
        except (self.psycopg.Error, UnicodeError) as error:
            raise StoreUnreachable(f"{self.where}: cannot be reached ({self._reason(error)})") from None
        with self._watchdog.watching(connection):
            self._prepare(connection, max(1, int(self.timeout * 1000)))
        if writing:
            self._writer = connection
        else:
            connection.isolation_level = self.psycopg.IsolationLevel.REPEATABLE_READ
            connection.read_only = True
            self._reader = connection
        return connection

    @staticmethod
    def _prepare(connection: Any, lock_timeout: int) -> None:
        """Where a server has synchronous_commit off, acknowledged rows can be lost. Outside of `reading` each statement
        must see the state of its own moment. Other processes take a while to start, so only long searches get them."""
        connection.execute(
            "SET synchronous_commit = on; SET default_transaction_isolation = 'read committed'; SET jit = off;"
            f" SET client_min_messages = warning; SET parallel_setup_cost = 20000; SET lock_timeout = {lock_timeout}"
        )

    @contextmanager
    def reading(self, checked: bool = True) -> Iterator[Any]:
        """A cursor that sees one state of the gallery.

        checked: a `TablesExchanged` at the end where others took the place of its tables meanwhile, whatever was read.
        """
        with self._read_lock, self.errors():
            connection = self._connection(False)
            if connection.info.transaction_status:  # within another call of ours
                with connection.cursor(binary=True) as cursor:
                    yield cursor
                return
            errors = self.psycopg.errors
            try:
                with (
                    self._watchdog.watching(connection),
                    connection.transaction(),
                    connection.cursor(binary=True) as cursor,
                ):
                    try:
                        yield cursor
                    except Exception:
                        if checked and connection.info.transaction_status == self.psycopg.pq.TransactionStatus.INTRANS:
                            self.check_exchanged(cursor)
                        raise
                    if checked:
                        self.check_exchanged(cursor)
            except (errors.UndefinedTable, errors.UndefinedFunction, errors.InvalidSchemaName):
                if checked and self._exchanged_since(connection):
                    raise TablesExchanged(self.where) from None
                raise

    def read_together(self, statements: Sequence[tuple[str, Sequence[Any]]]) -> list[list[Any]] | None:
        """What each of these statements selects, sent at once: one round trip where `reading` takes one per statement
        and two for its transaction. They share the settings of a transaction, but each sees the state of its own
        moment. None where `reading` must be used: within another call, or where the server refuses a statement."""
        idle = self.psycopg.pq.TransactionStatus.IDLE
        with self._read_lock, self.errors():
            connection = self._connection(False)
            if connection.info.transaction_status != idle or not self.psycopg.Pipeline.is_supported():
                return None
            try:
                with self._watchdog.watching(connection), connection.pipeline():
                    cursors = [connection.cursor(binary=True).execute(*one, prepare=True) for one in statements]
                return [cursor.fetchall() for cursor in cursors]
            except self.psycopg.Error as error:  # such as of other tables, in which vectors have another length
                if connection.closed or isinstance(error, self.psycopg.errors.LockNotAvailable):
                    raise
                return None
            finally:
                if connection.info.transaction_status != idle:  # interrupted: answers may be on their way
                    connection.close()

    def check_exchanged(self, cursor: Any) -> None:
        """Raises `TablesExchanged` where the tables are not those of the transaction's beginning any more."""
        began, self._tables = cursor.execute(TABLES, (self.schema, self.schema), prepare=True).fetchone()
        if began != self._tables:
            raise TablesExchanged(self.where)

    def _exchanged_since(self, connection: Any) -> bool:
        """The same after an error, which has ended the transaction: since the last look."""
        known, (_, self._tables) = self._tables, connection.execute(TABLES, (self.schema, self.schema)).fetchone()
        return known is not None and known != self._tables

    @contextmanager
    def writing(self, key: str) -> Iterator[Any]:
        """A cursor of the only writer of `key`; everything within is committed, or nothing."""
        with self._write_lock, self.errors():
            connection = self._connection(True)
            with (
                self._watchdog.watching(connection),
                connection.transaction(),
                connection.cursor(binary=True) as cursor,
            ):
                cursor.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (key,))
                yield cursor

    @contextmanager
    def building(self, key: str) -> Iterator[Any]:
        """A connection of its own that waits for no lock's timeout; None where another one has the same `key`."""
        with self.errors():
            try:
                connection = self._connect()
            except self.psycopg.Error as error:
                raise StoreUnreachable(f"{self.where}: cannot be reached ({self._reason(error)})") from None
            with connection:
                self._prepare(connection, 0)
                lock = "SELECT pg_try_advisory_lock(hashtextextended(%s, 0))"
                try:
                    yield connection if connection.execute(lock, (key,)).fetchone()[0] else None
                finally:
                    with suppress(self.psycopg.Error):  # a server notices the end of a connection a little later
                        connection.execute("SELECT pg_advisory_unlock_all()")

    def maintain(self, statements: Sequence[str]) -> None:
        """Statements that PostgreSQL runs outside of transactions only."""
        with self._write_lock, self.errors():
            connection = self._connection(True)
            for statement in statements:
                with self._watchdog.watching(connection):
                    connection.execute(statement)

    @staticmethod
    def copy(cursor: Any, table: str, rows: Sequence[Sequence[Any]]) -> None:
        """In PostgreSQL's binary format: the bytes of a vector are those of its checksum."""
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

    def _connect(self) -> Any:
        options: dict[str, Any] = {"autocommit": True, "client_encoding": "utf8", "prepare_threshold": ON_DEMAND}
        return self.psycopg.connect(self._address.url, connect_timeout=max(2, int(self.timeout)), **options)

    def _is_up(self) -> bool:
        """Whether the server accepts another connection."""
        try:
            self._connect().close()
        except self.psycopg.Error as error:
            return "FATAL" in str(error)  # a server that refuses is up
        return True

    def _reason(self, error: Exception) -> str:
        """The first line of the error, without a password."""
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        for secret in self._address.secrets:
            text = text.replace(secret, "…")
        return text

    @contextmanager
    def errors(self) -> Iterator[None]:
        """PostgreSQL's errors as one sentence each."""
        errors = self.psycopg.errors
        try:
            yield
        except errors.LockNotAvailable:
            waited = f"waited {self.timeout:g} s"
            raise TimeoutError(f"{self.where}: another process is writing to it; {waited}, try again later") from None
        except (errors.UndefinedTable, errors.InvalidSchemaName) as error:
            raise ValueError(f"{self.where}: no such gallery ({self._reason(error)})") from None
        except errors.ReadOnlySqlTransaction:
            raise ValueError(f"{self.where}: is a read replica, which cannot be written; use the primary") from None
        except (errors.FeatureNotSupported, errors.UndefinedFile) as error:
            raise ValueError(f"{self.where}: the server has no pgvector ({self._reason(error)})") from None
        except self.psycopg.Error as error:
            raise StoreUnreachable(f"{self.where}: cannot be used ({self._reason(error)})") from None


def bigint_bytes(number: int) -> bytes:
    return struct.pack(">q", number)


def vector_bytes(content: bytes) -> bytes:
    """A row's vector in pgvector's binary format."""
    return struct.pack(">hh", len(content) // 4, 0) + content


def _psycopg() -> Any:
    try:
        import psycopg
    except ImportError:
        raise ModuleNotFoundError("a gallery in PostgreSQL needs psycopg: pip install 'nearkin[postgres]'") from None
    return psycopg
