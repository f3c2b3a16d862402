"""The SQLite file of a gallery: connections to it, whether it is still the file that was opened, whose log lies beside.

SQLite pairs a file with its write-ahead log by their names alone. A log that a killed process left, or that a process
still has open, would be written into whatever file has the name since. So every writing transaction counts up
SQLite's `user_version`, which stands in the header of the file and, in the log, in every copy of its first page: a log
belongs to a file where it goes on from the file's count.
"""

import os
import sqlite3
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import randbelow
from types import TracebackType
from typing import Any, TypeAlias

from nearkin.gallery.store import Unavailable

__all__ = ["Turn", "close", "connect", "count_up", "identity", "snapshot"]

MARK = 0x6E6B6731  # SQLite's application_id: tells a gallery from other databases
PRAGMAS = ("journal_mode = WAL", "synchronous = FULL", "cell_size_check = ON", "cache_size = -65536")
COUNT_AT = 60  # bytes of the file's header before user_version
LOG_HEAD, FRAME_HEAD = struct.Struct(">8I"), struct.Struct(">6I")
Identity: TypeAlias = tuple[int, int]

# A process that closes a file loses SQLite's locks on it (POSIX). So the header is read only where none can be held.
_open: Counter[Identity] = Counter()
_opening = threading.Lock()


class Turn:
    """A lock that is not waited for without end. The thread that has it may take it again."""

    def __init__(self, where: str, timeout: float) -> None:
        self.where, self.timeout, self._lock = where, timeout, threading.RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(timeout=min(self.timeout, threading.TIMEOUT_MAX)):
            waited = f"waited {self.timeout:g} s, try again later"
            raise TimeoutError(f"{self.where}: busy with another call of this process; {waited}")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._lock.release()


def identity(path: Path) -> Identity | None:
    """Which file has this name; None where there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def connect(path: Path, timeout: float, writing: bool) -> tuple[Any, Identity]:
    """A connection, and which file it is to."""
    with _opening:
        before = identity(path)
        if before is not None and not _open[before]:
            _refuse_foreign_log(path)
        try:
            made = _connected(path, str(path), timeout)
        except sqlite3.OperationalError:
            if writing or before is None or _writable(path.parent):
                raise
            made = _connected_read_only(path, timeout)
        now = identity(path)
        if now is None or before not in (None, now):
            made.close()
            raise Unavailable(f"{path}: the file was replaced while it was being opened; try again")
        _open[now] += 1
        return made, now


def close(connection: Any, file: Identity) -> None:
    with _opening:
        connection.close()
        _open[file] -= 1


def _connected(path: Path, address: str, timeout: float) -> Any:
    made = sqlite3.connect(
        address, timeout, isolation_level=None, check_same_thread=False, uri=address.startswith("file:")
    )
    made.text_factory = _text
    try:
        for pragma in PRAGMAS:
            made.execute(f"PRAGMA {pragma}")
        mark = made.execute("PRAGMA application_id").fetchone()[0]
        if mark != MARK and made.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            raise ValueError(f"{path}: an SQLite file, but not a gallery")
    except BaseException:
        made.close()
        raise
    return made


def _connected_read_only(path: Path, timeout: float) -> Any:
    """In a folder that may not be written: the file is taken as one that nobody changes, which needs no log."""
    if (log := Path(f"{path}-wal")).exists() and log.stat().st_size:
        raise ValueError(
            f"{path}: its folder may not be written, and {log.name} holds rows that are not in the file yet; "
            "open it once where both may be written"
        )
    return _connected(path, f"{path.resolve().as_uri()}?immutable=1", timeout)


def _writable(folder: Path) -> bool:
    return os.access(folder, os.W_OK, effective_ids=os.access in os.supports_effective_ids)


def count_up(writer: Any) -> None:
    """Within every writing transaction: see above."""
    count = writer.execute("PRAGMA user_version").fetchone()[0]
    writer.execute(f"PRAGMA user_version = {(count + 1) % 2**31 or 1 if count else 1 + randbelow(2**30)}")


@contextmanager
def snapshot(reader: Any) -> Iterator[None]:
    """One state of the file until it is left."""
    with suppress(sqlite3.Error):
        if reader.in_transaction:  # whoever was here before was stopped while leaving
            reader.execute("ROLLBACK")
    reader.execute("BEGIN")
    try:
        yield
    finally:
        with suppress(sqlite3.Error):
            if reader.in_transaction:
                reader.execute("ROLLBACK")


def _refuse_foreign_log(path: Path) -> None:
    log = Path(f"{path}-wal")
    with suppress(FileNotFoundError):
        counts = _counts_of_log(log)
        if not counts:
            return
        with path.open("rb") as file:
            file.seek(COUNT_AT)
            head = file.read(4)
        count = int.from_bytes(head, "big")
        if count and not counts[0] - 1 <= count <= counts[-1]:
            raise ValueError(
                f"{path}: {log.name} is not the log of this file, and would spoil it; the file was replaced while a "
                f"process had it open, or after one was killed. Move {log.name} and {path.name}-shm away to use the "
                "file as it is, or put the file back that they belong to"
            )


def _counts_of_log(log: Path) -> list[int]:
    """The first and the last count in a write-ahead log; empty where it has none."""
    counts: list[int] = []
    with log.open("rb") as file:
        head = file.read(LOG_HEAD.size)
        if len(head) < LOG_HEAD.size:
            return counts
        _, _, page_size, _, *salts, _, _ = LOG_HEAD.unpack(head)
        while len(frame := file.read(FRAME_HEAD.size)) == FRAME_HEAD.size:
            page, _, *frame_salts, _, _ = FRAME_HEAD.unpack(frame)
            if frame_salts != salts:
                break  # left from before the log was begun anew
            start = file.tell()
            if page == 1:
                file.seek(COUNT_AT, os.SEEK_CUR)
                counts[1:] = [int.from_bytes(file.read(4), "big")]
            file.seek(start + page_size)
    return counts


def _text(content: bytes) -> str:
    """A flipped byte that is no UTF-8 any more must spoil its row, not the reading of all."""
    return content.decode("utf-8", "surrogateescape")
