"""The SQLite file of a gallery: connections to it, whether it is still the file that was opened, whose log lies beside.

SQLite pairs a file with its write-ahead log by their names alone. A log that a killed process left, or that a process
still has open, would be written into whatever file has the name since. So every writing transaction counts up
SQLite's `user_version`, which stands in the header of the file and, in the log, in every copy of its first page: a log
belongs to a file where it goes on from the file's count, or has it.
"""

import os
import sqlite3
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from secrets import randbelow
from types import TracebackType
from typing import Any, TypeAlias

from nearkin.core.errors import StoreUnavailable

__all__ = ["Turn", "close", "connect", "count_up", "identity", "overwritten", "snapshot"]

MARK = 0x6E6B6731  # SQLite's application_id: tells a gallery from other databases
PRAGMAS = ("journal_mode = WAL", "synchronous = FULL", "cell_size_check = ON", "cache_size = -65536")
COUNT_AT = 60  # bytes of the file's header before user_version
LOG_HEAD, FRAME_HEAD = struct.Struct(">8I"), struct.Struct(">6I")
Identity: TypeAlias = tuple[int, int]


@dataclass
class _Open:
    """A file that this process has open. Its header is read past SQLite, through a descriptor of its own that is closed
    last: a process that closes any descriptor of a file loses SQLite's locks on it (POSIX)."""

    descriptor: int
    connections: int = 0
    turn: threading.Lock = field(default_factory=threading.Lock)
    checked: tuple[int, int] | None = None  # size and time of the last change when it was found to be the same


_files: dict[Identity, _Open] = {}
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
    before = identity(path)
    if before is not None:
        _take(path, before)
    elif not writing:
        raise ValueError(f"{path}: no such gallery")
    try:
        made = _connected_somehow(path, timeout, writing)
    except BaseException:
        if before is not None:
            _leave(before)
        raise
    now = identity(path)
    if before is None and now is not None:
        _take(path, now)
    elif now is None or now != before:
        made.close()
        if before is not None:
            _leave(before)
        raise StoreUnavailable(f"{path}: the file was replaced while it was being opened; try again")
    return made, now


def close(connection: Any, file: Identity) -> None:
    connection.close()
    _leave(file)


def _take(path: Path, file: Identity) -> None:
    """One connection more to a file, which is refused where a log lies beside it that is not its own."""
    with _opening:
        try:
            opened = _files.get(file) or _Open(os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0)))
        except OSError as error:
            raise ValueError(f"{path}: cannot be read ({error.strerror or error})") from None
        if not opened.connections and not _has_log(opened, path, None):
            os.close(opened.descriptor)
            raise ValueError(
                f"{path}: {path.name}-wal is not the log of this file, and would spoil it; the file was replaced while "
                f"a process had it open, or after one was killed. Move {path.name}-wal and {path.name}-shm away to use "
                "the file as it is, or put the file back that they belong to"
            )
        opened.connections += 1
        _files[file] = opened


def _leave(file: Identity) -> None:
    with _opening:
        opened = _files[file]
        opened.connections -= 1
        if not opened.connections:
            os.close(_files.pop(file).descriptor)


def overwritten(connection: Any, path: Path, file: Identity) -> bool:
    """Whether another program has put other bytes into the file since. Its caller is within a transaction."""
    opened = _files[file]
    status = os.fstat(opened.descriptor)
    changed = status.st_size, status.st_mtime_ns
    if changed == opened.checked:
        return False
    for _ in range(3):  # another process may be about to begin its log anew
        if _has_log(opened, path, connection.execute("PRAGMA user_version").fetchone()[0]):
            opened.checked = changed
            return False
        time.sleep(0.02)
    return True


def _has_log(file: _Open, path: Path, count: int | None) -> bool:
    """Whether the log beside a file is its own. count: that of the state which file and log make together."""
    with file.turn:
        os.lseek(file.descriptor, COUNT_AT, os.SEEK_SET)
        head = os.read(file.descriptor, 4)
    in_file = int.from_bytes(head, "big")
    if len(head) == 4 and not in_file:
        return True  # nothing was counted yet
    in_log, complete = _counts_of_log(Path(f"{path}-wal"))
    if in_log:
        return complete or in_file in (in_log[0] - 1, *in_log)
    return count is None or in_file == count


def _connected_somehow(path: Path, timeout: float, to_write: bool) -> Any:
    try:
        return _connected(path, str(path), timeout)
    except sqlite3.OperationalError:
        if to_write or _writable(path.parent):
            raise
        return _connected_read_only(path, timeout)


def _connected(path: Path, address: str, timeout: float) -> Any:
    uri = address.startswith("file:")
    made = sqlite3.connect(address, timeout=timeout, isolation_level=None, check_same_thread=False, uri=uri)
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
    """Once within every transaction that writes: see above."""
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


def _counts_of_log(log: Path) -> tuple[list[int], bool]:
    """The counts in a write-ahead log, and whether its first transaction writes every page, as a backup does."""
    counts: list[int] = []
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
                break  # left from before the log was begun anew
            start = file.tell()
            if page == 1:
                file.seek(COUNT_AT, os.SEEK_CUR)
                counts.append(int.from_bytes(file.read(4), "big"))
            if first:
                pages.add(page)
                complete, first = len(pages) >= size - 1, not size  # one page, at 1 GiB, is never written
            file.seek(start + page_size)
    return counts, complete


def _text(content: bytes) -> str:
    """A flipped byte that is no UTF-8 any more must spoil its row, not the reading of all."""
    return content.decode("utf-8", "surrogateescape")
