"""The SQLite file of a gallery: connections to it, whether it is still the file that was opened, rows read from it.

SQLite pairs a file with its write-ahead log by their names alone. A log that a killed process left, or that a process
still has open, would be applied to whatever file has that name now. So every writing transaction increments SQLite's
`user_version`, which is in the header of the file and, in the log, in every copy of its first page: a log belongs to a
file if it continues from the version of the file, or contains it.

SQLite also writes older states into an open file, as a restore. So every writing transaction leaves a random number:
rows in memory follow a file that has the number of the state they were read in, and are read again from any other.
"""

import os
import sqlite3
import struct
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from secrets import randbelow, randbits
from types import TracebackType
from typing import Any, TypeAlias

from nearkin.core.errors import StoreUnavailable
from nearkin.gallery.schema import KnownRows, Row, bytes_checksum
from nearkin.gallery.stores import wal_repair

__all__ = [
    "APPLICATION_ID",
    "BATCH",
    "FileId",
    "TimedLock",
    "Transaction",
    "close",
    "connect",
    "count_transaction",
    "fetch",
    "file_id",
    "follows",
    "last_transaction",
    "look_up",
    "overwritten",
    "page_size",
    "read_after",
    "read_batches",
    "salvage",
    "snapshot",
]

APPLICATION_ID = 0x6E6B6731  # tells a gallery from other SQLite databases
PRAGMAS = ("journal_mode = WAL", "synchronous = FULL", "cell_size_check = ON", "cache_size = -65536")
VERSION_OFFSET = 60  # of user_version in the header of the file
LOG_HEAD, FRAME_HEAD = struct.Struct(">8I"), struct.Struct(">6I")
ROWS_PER_PAGE, SMALLEST_PAGE, LARGEST_PAGE = 4, 4096, 65_536
BATCH = 4096  # rows read at a time
MAX_VALUES = 500  # ids or hashes per statement
# Texts as bytes: they are checked before they are decoded, and SQLite returns them faster so.
COLUMNS = "id, content, CAST(label AS BLOB), CAST(name AS BLOB), CAST(metadata AS BLOB), vector, sum"
TRANSACTIONS = 10_000  # of which the numbers are kept; who has missed more reads all rows again
FileId: TypeAlias = tuple[int, int]
Transaction: TypeAlias = tuple[int, int | None]  # its number and what was drawn for it


# --- connections


@dataclass
class _OpenFile:
    """A file that this process has open. Its header is read without SQLite, through a separate descriptor, which is
    closed last: a process that closes any descriptor of a file loses SQLite's locks on it (POSIX)."""

    descriptor: int
    connections: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    checked: tuple[int, int] | None = None  # size and modification time when it was last checked


_open_files: dict[FileId, _OpenFile] = {}
_opening = threading.Lock()


class TimedLock:
    """A reentrant lock that raises a TimeoutError."""

    def __init__(self, where: str, timeout: float) -> None:
        self.where, self.timeout, self._lock = where, timeout, threading.RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(timeout=min(self.timeout, threading.TIMEOUT_MAX)):
            waited = f"waited {self.timeout:g} s, try again later"
            raise TimeoutError(f"{self.where}: busy with another call of this process; {waited}")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._lock.release()


def file_id(path: Path) -> FileId | None:
    """Which file has this name; None where there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def page_size(dim: int) -> int:
    """Bytes of a page in a new file: room for a few vectors.

    Into a page of 4 KiB goes one row of 512 numbers, and half of the page stays empty.
    """
    wanted = ROWS_PER_PAGE * 4 * dim
    return min(max(1 << (wanted - 1).bit_length(), SMALLEST_PAGE), LARGEST_PAGE)


def connect(path: Path, timeout: float, writing: bool, dim: int | None = None) -> tuple[Any, FileId]:
    """A connection, and the file it belongs to. dim: of the rows, for a file that this call makes."""
    before = file_id(path)
    if before is not None:
        _register(path, before)
    elif not writing:
        raise ValueError(f"{path}: no such gallery")
    try:
        connection = _connect(path, timeout, writing, dim)
    except BaseException:
        if before is not None:
            _unregister(before)
        raise
    now = file_id(path)
    if before is None and now is not None:
        _register(path, now, made_here=True)
    elif now is None or now != before:
        connection.close()
        if before is not None:
            _unregister(before)
        raise StoreUnavailable(f"{path}: the file was replaced while it was being opened; try again")
    return connection, now


def close(connection: Any, file: FileId) -> None:
    connection.close()
    _unregister(file)


def _register(path: Path, file: FileId, made_here: bool = False) -> None:
    """Counts one more connection to a file; refused where the log beside it belongs to another file.

    made_here: the connection is open already and has made the file. Its log is not read then: to close -shm or the file
    again would end SQLite's locks on them, and another process would cut the -shm that this one has mapped.
    """
    with _opening:
        try:
            opened = _open_files.get(file) or _OpenFile(os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0)))
        except OSError as error:
            raise ValueError(f"{path}: cannot be read ({error.strerror or error})") from None
        if not opened.connections and not made_here and (sentence := wal_repair.repair_log(path)):
            warnings.warn(sentence, RuntimeWarning, stacklevel=2)
        if not opened.connections and not _owns_log(opened, path, None):
            os.close(opened.descriptor)
            raise ValueError(
                f"{path}: {path.name}-wal is not the log of this file, and would corrupt it; the file was replaced "
                f"while a process had it open, or after one was killed. Move {path.name}-wal and {path.name}-shm away "
                "to use the file as it is, or restore the file that they belong to"
            )
        opened.connections += 1
        _open_files[file] = opened


def _unregister(file: FileId) -> None:
    with _opening:
        opened = _open_files[file]
        opened.connections -= 1
        if not opened.connections:
            os.close(_open_files.pop(file).descriptor)


def overwritten(connection: Any, path: Path, file: FileId) -> bool:
    """Whether another program has written into the file since. The caller is within a transaction."""
    opened = _open_files[file]
    status = os.fstat(opened.descriptor)
    changed = status.st_size, status.st_mtime_ns
    if changed == opened.checked:
        return False
    for _ in range(3):  # another process may be about to restart its log
        if _owns_log(opened, path, connection.execute("PRAGMA user_version").fetchone()[0]):
            opened.checked = changed
            return False
        time.sleep(0.02)
    return True


def _owns_log(file: _OpenFile, path: Path, version: int | None) -> bool:
    """Whether the log beside a file is its own. version: of the state that file and log make together."""
    with file.lock:
        os.lseek(file.descriptor, VERSION_OFFSET, os.SEEK_SET)
        head = os.read(file.descriptor, 4)
    in_file = int.from_bytes(head, "big")
    if len(head) == 4 and not in_file:
        return True  # no transaction has counted yet
    in_log, complete = _versions_in_log(Path(f"{path}-wal"))
    if in_log:
        return complete or in_file in (in_log[0] - 1, *in_log)
    return version is None or in_file == version


def _versions_in_log(log: Path) -> tuple[list[int], bool]:
    """The versions in a write-ahead log, and whether its first transaction writes every page, as a backup does."""
    versions: list[int] = []
    pages: set[int] = set()
    complete, first = False, True
    with suppress(FileNotFoundError), log.open("rb", buffering=0) as file:
        head = file.read(LOG_HEAD.size)
        if len(head) < LOG_HEAD.size:
            return [], False
        _, _, page_size, _, *salts, _, _ = LOG_HEAD.unpack(head)
        while len(frame := file.read(FRAME_HEAD.size)) == FRAME_HEAD.size:
            page, size, *frame_salts, _, _ = FRAME_HEAD.unpack(frame)
            if frame_salts != salts:
                break  # left from before the log was restarted
            start = file.tell()
            if page == 1:
                file.seek(VERSION_OFFSET, os.SEEK_CUR)
                versions.append(int.from_bytes(file.read(4), "big"))
            if first:
                pages.add(page)
                complete, first = len(pages) >= size - 1, not size  # one page, at 1 GiB, is never written
            file.seek(start + page_size)
    return versions, complete


def _connect(path: Path, timeout: float, writing: bool, dim: int | None) -> Any:
    try:
        return _connect_to(path, str(path), timeout, dim)
    except sqlite3.OperationalError:
        if writing or _writable(path.parent):
            raise
        return _connect_read_only(path, timeout)


def _connect_to(path: Path, address: str, timeout: float, dim: int | None = None) -> Any:
    uri = address.startswith("file:")
    connection = sqlite3.connect(address, timeout=timeout, isolation_level=None, check_same_thread=False, uri=uri)
    connection.text_factory = _decode_text
    try:
        if dim is not None:
            connection.execute(
                f"PRAGMA page_size = {page_size(dim)}"
            )  # before the log: a file that has pages keeps them
        for pragma in PRAGMAS:
            connection.execute(f"PRAGMA {pragma}")
        application_id = connection.execute("PRAGMA application_id").fetchone()[0]
        tables = "SELECT count(*) FROM sqlite_master"
        if application_id != APPLICATION_ID and connection.execute(tables).fetchone()[0]:
            raise ValueError(f"{path}: an SQLite file, but not a gallery")
        # A view in place of a table may never end, and a trigger changes what was acknowledged.
        if connection.execute(f"{tables} WHERE type NOT IN ('table', 'index') OR rootpage = 0").fetchone()[0]:
            raise ValueError(f"{path}: has a view, a trigger or a virtual table, which no gallery has; drop it first")
    except BaseException:
        connection.close()
        raise
    return connection


def _connect_read_only(path: Path, timeout: float) -> Any:
    """In a read-only folder: the file is opened as one that never changes, which needs no log."""
    if (log := Path(f"{path}-wal")).exists() and log.stat().st_size:
        raise ValueError(
            f"{path}: its folder is read-only, and {log.name} has rows that are not in the file yet; "
            "open it once where both can be written"
        )
    return _connect_to(path, f"{path.resolve().as_uri()}?immutable=1", timeout)


def _writable(folder: Path) -> bool:
    return os.access(folder, os.W_OK, effective_ids=os.access in os.supports_effective_ids)


def _decode_text(content: bytes) -> str:
    """A flipped byte that is not UTF-8 must cost its row, not the reading of all."""
    return content.decode("utf-8", "surrogateescape")


def count_transaction(writer: Any) -> None:
    """Once within every transaction that writes: see above."""
    version = writer.execute("PRAGMA user_version").fetchone()[0]
    writer.execute(f"PRAGMA user_version = {(version + 1) % 2**31 or 1 if version else 1 + randbelow(2**30)}")
    writer.execute("CREATE TABLE IF NOT EXISTS transactions (number INTEGER PRIMARY KEY, random INTEGER NOT NULL)")
    number = last_transaction(writer)[0] + 1
    writer.execute("INSERT INTO transactions VALUES (?, ?)", (number, randbits(62)))
    writer.execute("DELETE FROM transactions WHERE number <= ?", (number - TRANSACTIONS,))


def last_transaction(reader: Any) -> Transaction:
    """(0, None) in a file of an earlier version, before its next transaction."""
    if not reader.execute("SELECT 1 FROM sqlite_master WHERE name = 'transactions'").fetchone():
        return 0, None
    last = reader.execute("SELECT number, random FROM transactions ORDER BY number DESC LIMIT 1").fetchone()
    return last or (0, None)


def follows(reader: Any, seen: Transaction) -> bool:
    """Whether the file came, by transactions of ours alone, from the state in which `seen` was the last one.

    The caller has found that the file changed. It did by another program where no transaction is new.
    """
    number, random = seen
    now = last_transaction(reader)
    if now == seen or not now[0]:
        return False
    row = reader.execute("SELECT random FROM transactions WHERE number = ?", (number,)).fetchone()
    return bool(row == (None if random is None else (random,)))


@contextmanager
def snapshot(reader: Any) -> Iterator[None]:
    """All reads within see one state of the file."""
    with suppress(sqlite3.Error):
        if reader.in_transaction:  # the previous call was interrupted on its way out
            reader.execute("ROLLBACK")
    reader.execute("BEGIN")
    try:
        yield
    finally:
        with suppress(sqlite3.Error):
            if reader.in_transaction:
                reader.execute("ROLLBACK")


# --- rows, each verified by its checksum


def look_up(connection: Any, contents: Sequence[bytes]) -> KnownRows:
    """Id and label of enrolled items, by content."""
    known: KnownRows = {}
    ordered = sorted(contents)  # as the index has them: each page is read once
    for start in range(0, len(ordered), MAX_VALUES):
        part = ordered[start : start + MAX_VALUES]
        query = f"SELECT content, id, label FROM items WHERE content IN ({','.join('?' * len(part))})"
        known.update((content, (i, label)) for content, i, label in connection.execute(query, part))
    return known


def fetch(connection: Any, ids: Sequence[int]) -> tuple[dict[int, Row], dict[int, str]]:
    """Rows by id, and what is wrong with damaged ones."""
    rows: dict[int, Row] = {}
    damaged: dict[int, str] = {}
    for start in range(0, len(ids), MAX_VALUES):
        part = ids[start : start + MAX_VALUES]
        query = f"SELECT {COLUMNS} FROM items WHERE id IN ({','.join('?' * len(part))})"
        intact, damaged_part, _ = _check_rows(connection.execute(query, part))
        rows.update((row.id, row) for row in intact)
        damaged |= damaged_part
    return rows, damaged


def read_after(connection: Any, last: int) -> tuple[list[Row], dict[int, str], int | None]:
    """The next rows by ascending id, and the last id that was read; None at the end."""
    query = f"SELECT {COLUMNS} FROM items WHERE id > ? ORDER BY id LIMIT {BATCH}"
    rows, damaged, count = _check_rows(connection.execute(query, (last,)))
    rows = _without_repeats(rows, last)
    if count < BATCH:
        return rows, damaged, None
    reached = max([row.id for row in rows] or damaged)  # a damaged row may have a damaged id
    if reached <= last:
        raise sqlite3.DatabaseError("rows come in no order")
    return rows, damaged, reached


def read_batches(connection: Any, last: int) -> Iterator[tuple[list[Row], dict[int, str]]]:
    """All rows with larger ids, in batches."""
    end: int | None = last
    while end is not None:
        rows, damaged, end = read_after(connection, end)
        yield rows, damaged


def salvage(connection: Any, next_id: int) -> Iterator[tuple[Row | None, str, int]]:
    """Every row, or what is wrong with it; where reading fails, each remaining id is tried by itself."""
    last: int | None = 0
    while last is not None:
        try:
            rows, damaged, end = read_after(connection, last)
        except sqlite3.DatabaseError:
            break
        yield from ((row, "", row.id) for row in rows)
        yield from ((None, why, i) for i, why in damaged.items())
        last = end
    for i in range(last + 1, next_id) if last is not None else ():
        try:
            by_id, damaged = fetch(connection, [i])
        except sqlite3.DatabaseError as error:
            by_id, damaged = {}, {i: str(error)}
        yield from ((row, "", i) for row in by_id.values())
        yield from ((None, why, i) for why in damaged.values())


def _check_rows(fetched: Iterable[Sequence[Any]]) -> tuple[list[Row], dict[int, str], int]:
    """Rows that match their checksum, what is wrong with the others, and how many there were together."""
    rows: list[Row] = []
    damaged: dict[int, str] = {}
    count = 0
    for id, content, label, name, metadata, vector, total in fetched:
        count += 1
        try:
            if bytes_checksum(id, content, label, name, metadata, vector) == total:
                rows.append(Row(id, content, label.decode(), name.decode(), metadata.decode(), vector))
            else:
                damaged[id] = "not as it was written"
        except Exception as error:
            # A flipped type, such as a number instead of text, or one beyond its range: it costs this row only.
            damaged[id] = f"not as it was written ({type(error).__name__})"
    return rows, damaged, count


def _without_repeats(rows: list[Row], last: int) -> list[Row]:
    """A damaged tree that names a page twice returns its rows twice."""
    ascending = []
    for row in rows:
        if row.id > last:
            ascending.append(row)
            last = row.id
    return ascending
