"""Whole SQLite galleries: read in one snapshot, written under a temporary name and renamed, freed of unused space."""

import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nearkin.core import files
from nearkin.gallery.schema import Facts, StoredRow, note_checksum, thumbnail_checksum
from nearkin.gallery.stores import IdArray, RowBatch, SumArray, repair, sound_notes, sqlite_file, stored_rows, sum_array

if TYPE_CHECKING:
    from nearkin.gallery.stores.sqlite import SqliteStore

__all__ = ["SqliteLoader", "SqliteSnapshot", "load", "migrate", "vacuum"]

SUMS = 65_536  # ids and checksums read at a time
BATCH_BYTES = 1 << 24  # of vectors read at a time
READER_WAIT = 500  # milliseconds
FIELDS = (
    "SELECT i.id, i.content, CAST(i.label AS BLOB), CAST(i.name AS BLOB), CAST(i.metadata AS BLOB), i.vector, i.sum,"
    " t.bytes, t.sum FROM items AS i LEFT JOIN thumbnails AS t ON t.id = i.id"
)
# The file is of no use before it is complete, and flushed then.
LOADING = ("journal_mode = OFF", "synchronous = OFF", "locking_mode = EXCLUSIVE", "cache_size = -131072")


class SqliteSnapshot:
    """The methods of `stores.Snapshot` are documented there. The reader is within a transaction."""

    def __init__(self, reader: Any, facts: Facts) -> None:
        self._reader, self.facts = reader, facts
        has_notes = reader.execute("SELECT 1 FROM sqlite_master WHERE name = 'notes'").fetchone()
        self.notes = (
            sound_notes(reader.execute("SELECT key, content, sum FROM notes ORDER BY key")) if has_notes else {}
        )
        self._batch = max(1, min(sqlite_file.BATCH, BATCH_BYTES // (4 * facts.dim)))

    def sums(self) -> Iterator[tuple[IdArray, SumArray]]:
        cursor, last = self._reader.execute("SELECT id, sum FROM items ORDER BY id"), 0
        while part := cursor.fetchmany(SUMS):
            ids = np.array([id for id, _ in part], np.int64)
            last = _ascending(ids, last)
            yield ids, sum_array([total for _, total in part])

    def rows(self) -> Iterator[RowBatch]:
        cursor, last = self._reader.execute(f"{FIELDS} ORDER BY i.id"), 0
        while part := cursor.fetchmany(self._batch):
            last = _ascending(np.array([row[0] for row in part], np.int64), last)
            yield stored_rows(part)

    def fetch(self, ids: Sequence[int]) -> RowBatch:
        rows: list[Any] = []
        for start in range(0, len(ids), sqlite_file.MAX_VALUES):
            part = ids[start : start + sqlite_file.MAX_VALUES]
            rows += self._reader.execute(f"{FIELDS} WHERE i.id IN ({','.join('?' * len(part))}) ORDER BY i.id", part)
        return stored_rows(rows)


def _ascending(ids: IdArray, last: int) -> int:
    """The last id; a damaged tree that returns rows twice or in no order is an error."""
    if ids[0] <= last or (np.diff(ids) <= 0).any():
        raise sqlite3.DatabaseError("rows come in no order")
    return int(ids[-1])


class SqliteLoader:
    """The methods of `stores.Loader` are documented there."""

    def __init__(self, part: Path, dim: int, where: str) -> None:
        from nearkin.gallery.stores.sqlite import SCHEMA

        self.count, self.finished, self._where = 0, False, where
        with self._errors():
            self._connection: Any = sqlite3.connect(part, isolation_level=None)
            pragmas = (f"page_size = {sqlite_file.page_size(dim)}", *LOADING)
            for statement in (*(f"PRAGMA {pragma}" for pragma in pragmas), "BEGIN", *SCHEMA):
                self._connection.execute(statement)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise ValueError(f"{self._where}: could not be written ({error}); nothing was changed") from None

    def remove(self, ids: Sequence[int]) -> None:
        rows = [(id,) for id in ids]
        with self._errors():
            self.count -= self._connection.executemany("DELETE FROM items WHERE id = ?", rows).rowcount
            self._connection.executemany("DELETE FROM thumbnails WHERE id = ?", rows)

    def add(self, rows: Sequence[StoredRow]) -> None:
        items = (
            (row.id, row.content, row.label.decode(), row.name.decode(), row.metadata.decode(), row.vector, row.sum)
            for row in rows
        )
        thumbnails = [
            (row.id, row.thumbnail, thumbnail_checksum(row.id, row.thumbnail)) for row in rows if row.thumbnail
        ]
        with self._errors():
            self._connection.executemany("INSERT INTO items VALUES (?, ?, ?, ?, ?, ?, ?)", items)
            self._connection.executemany("INSERT INTO thumbnails VALUES (?, ?, ?)", thumbnails)
        self.count += len(rows)

    def finish(self, facts: Facts, notes: Mapping[str, str]) -> None:
        from nearkin.gallery.stores.sqlite import NOTES, SqliteStore

        with self._errors():
            if notes:
                self._connection.execute(NOTES)
                rows = [(key, text, note_checksum(key, text)) for key, text in notes.items()]
                self._connection.executemany("INSERT INTO notes VALUES (?, ?, ?)", rows)
            SqliteStore.write_facts(self._connection, facts)
            self._connection.execute(f"PRAGMA application_id = {sqlite_file.APPLICATION_ID}")
            sqlite_file.count_transaction(self._connection)
            self._connection.execute("COMMIT")
        self.finished = True

    def close(self) -> None:
        self._connection.close()


@contextmanager
def load(path: Path, dim: int, overwrite: bool, timeout: float) -> Iterator[SqliteLoader]:
    """See `stores.Store.load`."""
    repair.finish_replacement(path, timeout)
    _check_place(path, overwrite, timeout)
    lock = files.Lock(path.with_name(f".{path.name}.load-lock"), f"{path}: another process is writing a gallery there")
    part = path.with_name(f".{path.name}.load")
    try:
        repair.unlink(part)  # of a process that was killed
        loader = SqliteLoader(part, dim, str(path))
        try:
            yield loader
        finally:
            loader.close()
        if loader.finished:
            with files.explained(str(path), "make room, or choose another place"):
                _put_in_place(part, path, overwrite, timeout)
    finally:
        repair.unlink(part)
        lock.close()


def _check_place(path: Path, overwrite: bool, timeout: float) -> None:
    if path.is_dir():
        raise ValueError(f"{path}: a gallery is a file, this is a folder")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: the folder {path.parent} does not exist")
    if _exists(path):
        if not overwrite:
            raise ValueError(f"{path}: exists already; choose another place, or --overwrite, which keeps it beside")
        if not _is_gallery(path, timeout):
            raise ValueError(f"{path}: is no gallery, and is not overwritten; move it away")
    elif (log := Path(f"{path}-wal")).exists() and log.stat().st_size:
        raise ValueError(f"{path}: {log.name} lies there without its file; move it away first")


def _is_gallery(path: Path, timeout: float) -> bool:
    """By the file's first bytes, which may still be in the log: a gallery that is damaged elsewhere may be replaced."""
    from nearkin.gallery.stores.sqlite import SqliteStore

    with path.open("rb") as file:
        head = file.read(72)
    if head.startswith(b"SQLite format 3\0") and head[68:] == sqlite_file.APPLICATION_ID.to_bytes(4, "big"):
        return True
    with closing(SqliteStore(path, timeout)) as store:
        try:
            return store.facts() is not None
        except ValueError:
            return False


def _exists(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _put_in_place(part: Path, path: Path, overwrite: bool, timeout: float) -> None:
    """Flushed, then renamed: a gallery that was there goes to NAME.previous-N, also if this is killed between."""
    _flush(part)
    if _exists(path):
        if not overwrite:
            raise ValueError(f"{path}: another process has made a gallery there meanwhile; nothing was changed")
        os.replace(part, repair.replacement_path(path, "restored"))
        repair.finish_replacement(path, timeout)
    else:
        os.replace(part, path)
    files.flush_folder(path.resolve().parent)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDWR | getattr(os, "O_BINARY", 0))
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def vacuum(store: "SqliteStore") -> tuple[int, int]:
    """SQLite writes the used pages to the log, then back: a kill leaves the old state or the new one.

    The record of changes goes with it: a reader that has missed some of it reads all rows again.
    """
    with store.write_lock, store.sqlite_errors():
        before = _size(store.path)
        with store.transaction() as (writer, _):
            writer.execute("DELETE FROM changes")
        writer = store.connection(True)
        writer.execute("VACUUM")
        # A reader in the middle of a long call keeps the log: the file becomes smaller at a later checkpoint then.
        writer.execute(f"PRAGMA busy_timeout = {READER_WAIT}")
        try:
            writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        finally:
            writer.execute(f"PRAGMA busy_timeout = {int(store.timeout * 1000)}")
    return before, _size(store.path)


def _size(path: Path) -> int:
    sizes = (Path(f"{path}{ending}") for ending in ("", "-wal"))
    return sum(file.stat().st_size for file in sizes if file.exists())


def migrate(store: "SqliteStore", number: int, changed: Callable[[Facts], tuple[list[str], Facts]]) -> None:
    """See `stores.Store.migrate`. The copy, NAME.format-N, is a gallery that the older version opens."""
    with store.transaction() as (writer, facts):
        if facts.format >= number:
            return  # another process was first
        statements, new = changed(facts)
        kept = store.path.with_name(f"{store.path.name}.format-{facts.format}")
        part = kept.with_name(f".{kept.name}")
        with files.explained(f"{kept}, a copy of the gallery before its format changes,", "make room"):
            repair.unlink(part)
            try:
                with closing(sqlite3.connect(part)) as target:
                    store.connection(False).backup(target)  # nobody writes while this transaction is open
                _flush(part)
                os.replace(part, kept)
            finally:
                repair.unlink(part)
        for statement in statements:
            writer.execute(statement)
        store.write_facts(writer, new)
