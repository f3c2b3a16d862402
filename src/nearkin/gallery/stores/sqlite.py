"""The gallery in one SQLite file: the rows on the disk are the truth, what is in memory follows them.

A writing call is one transaction (WAL, synchronous=FULL): it has returned, so it is on the disk. Several processes may
read while one writes; another writer waits for its turn.
"""

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from nearkin.core.errors import StoreUnavailable
from nearkin.gallery import facts as facts_of
from nearkin.gallery.facts import Facts
from nearkin.gallery.schema import Fields, Filter, Floats, Row, checksum, picture_checksum
from nearkin.gallery.stores import repair, sqlite_file, sqlite_read
from nearkin.gallery.stores.contract import Added, Report, merged, planned
from nearkin.gallery.stores.matrix import Matrix
from nearkin.gallery.stores.memory_index import Follower

__all__ = ["SqliteStore"]

SCHEMA = (
    # Twice, so that one damaged page does not cost what cannot be counted again.
    "CREATE TABLE facts (copy INTEGER PRIMARY KEY, said TEXT NOT NULL, sum BLOB NOT NULL)",
    "CREATE TABLE items (id INTEGER PRIMARY KEY, content BLOB NOT NULL UNIQUE, label TEXT NOT NULL, name TEXT NOT NULL,"
    " metadata TEXT NOT NULL, vector BLOB NOT NULL, sum BLOB NOT NULL)",
    "CREATE TABLE thumbnails (id INTEGER PRIMARY KEY, bytes BLOB NOT NULL, sum BLOB NOT NULL)",
    "CREATE TABLE changes (seq INTEGER PRIMARY KEY, id INTEGER NOT NULL)",
)


class SqliteStore:
    """See `store.Store`, which says what each method does."""

    kind = "sqlite"

    def __init__(self, path: Path, timeout: float) -> None:
        self.path, self.where, self.timeout = path, str(path), timeout
        self.reading, self.writing = sqlite_file.Turn(self.where, timeout), sqlite_file.Turn(self.where, timeout)
        self._reader: Any = None
        self._writer: Any = None
        self._file: sqlite_file.Identity | None = None  # which one was opened, and which gallery was in it
        self._gallery: str | None = None
        self._closed = False
        self.follower = self._fresh()

    def _fresh(self) -> Follower:
        return Follower(self.where, self.path.with_name(self.path.name + ".hnsw"))

    @property
    def damaged(self) -> dict[int, str]:
        return self.follower.damaged

    @property
    def lost(self) -> int:
        return self.follower.lost

    @property
    def index_state(self) -> str:
        return self.follower.index_state

    # --- opening

    def facts(self) -> Facts | None:
        if self.path.is_dir():
            raise ValueError(f"{self.where}: a gallery is a file, this is a folder")
        if self._reader is None and self._writer is None:
            repair.finish_repair(self.path, self.timeout)
            if not self.path.exists() or self.path.stat().st_size == 0:
                return None
        with self.reading, self.explained():
            return self._read_facts(self.connection(False))

    def create(self, facts: Facts) -> None:
        if not self.path.parent.is_dir():
            raise ValueError(f"{self.where}: the folder {self.path.parent} does not exist")
        with self._begun() as writer:
            if self._read_facts(writer) is not None:
                return  # another process was first
            for statement in SCHEMA:
                writer.execute(statement)
            writer.execute(f"PRAGMA application_id = {sqlite_file.MARK}")
            self.write_facts(writer, facts)

    def close(self) -> None:
        with self.reading, self.writing:
            self.release()
            self._closed = True

    def release(self) -> None:
        """Lets go of the file and of what is in memory; the next call opens it again. Its caller holds both locks."""
        for connection in (self._reader, self._writer):
            if connection is not None and self._file is not None:
                sqlite_file.close(connection, self._file)
        self._reader = self._writer = self._file = None
        self.follower = self._fresh()

    # --- writing

    def known(self, contents: Sequence[bytes]) -> dict[bytes, tuple[int, str]]:
        with self.reading, self.explained():
            return sqlite_read.known(self.connection(False), contents)

    def add(self, rows: Sequence[Fields], keep: bool, sources: Sequence[str] = ()) -> list[Added]:
        with self.transaction() as (writer, facts):
            there = sqlite_read.known(writer, [row.content for row in rows])
            plan = planned(rows, there, facts.next_id, keep)
            writer.executemany("INSERT INTO items VALUES (?, ?, ?, ?, ?, ?, ?)", plan.items)
            writer.executemany("INSERT INTO thumbnails VALUES (?, ?, ?)", plan.thumbnails)
            known = merged(facts.sources, sources)
            if plan.items or known != facts.sources:
                count = facts.rows + len(plan.items)
                self.write_facts(writer, facts.but(next_id=plan.next_id, rows=count, sources=known))
        return plan.added

    def remove(self, ids: Sequence[int]) -> int:
        with self.transaction() as (writer, facts):
            gone = []
            for i in dict.fromkeys(ids):
                if writer.execute("DELETE FROM items WHERE id = ?", (i,)).rowcount:
                    writer.execute("DELETE FROM thumbnails WHERE id = ?", (i,))
                    gone.append(i)
            self._note(writer, facts.but(rows=facts.rows - len(gone)), gone)
        return len(gone)

    def relabel(self, ids: Sequence[int], label: str) -> int:
        with self.transaction() as (writer, facts):
            rows, _ = sqlite_read.fetch(writer, list(dict.fromkeys(ids)))
            for row in rows.values():
                total = checksum(*row._replace(label=label))
                writer.execute("UPDATE items SET label = ?, sum = ? WHERE id = ?", (label, total, row.id))
            self._note(writer, facts, list(rows))
        return len(rows)

    def adopt(self, fingerprint: str, run: str) -> None:
        with self.transaction() as (writer, facts):
            if facts.rows == 0 and facts.fingerprint is None:
                self.write_facts(writer, facts.but(fingerprint=fingerprint, run=run))

    def _note(self, writer: Any, facts: Facts, ids: Sequence[int]) -> None:
        """What readers must look at again."""
        if ids:
            noted = [(facts.changes + n, i) for n, i in enumerate(ids, 1)]
            writer.executemany("INSERT INTO changes VALUES (?, ?)", noted)
            self.write_facts(writer, facts.but(changes=noted[-1][0]))

    # --- reading

    def nearest(self, query: Floats, k: int, filter: Filter | None) -> list[tuple[Row, float]]:
        with self._followed() as (reader, _):
            return self.follower.nearest(reader, self.sure_facts, query, k, filter)

    def rows(self, ids: Sequence[int]) -> dict[int, Row]:
        with self.reading, self.explained():
            rows, bad = sqlite_read.fetch(self.connection(False), ids)
            self.follower.put_aside(bad)
            return rows

    def thumbnail(self, id: int) -> bytes:
        with self.reading, self.explained():
            query = "SELECT bytes, sum FROM thumbnails WHERE id = ?"
            found = self.connection(False).execute(query, (id,)).fetchone()
        if found is None or not isinstance(found[0], bytes) or picture_checksum(id, found[0]) != found[1]:
            return b""
        return found[0]

    def counts(self) -> dict[str, int]:
        with self._followed() as (_, matrix):
            return matrix.counts()

    def sizes(self) -> dict[int, int]:
        with self._followed() as (_, matrix):
            number = np.bincount(matrix.tally)
            return {int(rows): int(number[rows]) for rows in np.flatnonzero(number) if rows}

    def examples(self, labels: Sequence[str]) -> dict[str, int]:
        with self._followed() as (_, matrix):
            return {label: int(matrix.tally[matrix.labels[label]]) for label in labels if label in matrix.labels}

    @contextmanager
    def _followed(self) -> Iterator[tuple[Any, Matrix]]:
        """A reader of one state of the file, and the rows in memory as that state has them."""
        with self.reading, self.explained():
            reader = self.connection(False)
            with sqlite_file.snapshot(reader):
                self._same(reader)
                yield reader, self.follower.look(reader, self.sure_facts)

    def scan(self) -> Iterator[Row]:
        last: int | None = 0
        while last is not None:
            with self.reading, self.explained():
                rows, bad, last = sqlite_read.after(self.connection(False), last)
                self.follower.put_aside(bad)
            yield from rows

    # --- keeping

    def warm(self, progress: Callable[[int, int], None] | None = None) -> None:
        with self.reading:
            with self._followed() as (reader, matrix):
                facts = self.sure_facts(reader)
            self.follower.warm(matrix, facts, progress)

    def reindex(self, progress: Callable[[int, int], None] | None = None) -> None:
        with self.reading:
            self.follower.forget_index()
            self.warm(progress)

    def check(self, progress: Callable[[int, int], None] | None = None) -> Report:
        return repair.check(self, progress)

    def repair(self) -> tuple[int, Any]:
        return repair.repair(self)

    # --- SQLite

    def connection(self, writing: bool) -> Any:
        """To the file that was opened first: another that has its name since is neither read nor written."""
        if self._closed:
            raise ValueError(f"{self.where}: the gallery is closed; open it again")
        if self._file is not None and sqlite_file.identity(self.path) != self._file:
            raise self._replaced()
        kept = self._writer if writing else self._reader
        if kept is None:
            repair.finish_repair(self.path, self.timeout)
            kept, file = sqlite_file.connect(self.path, self.timeout, writing)
            if self._file not in (None, file):
                sqlite_file.close(kept, file)
                raise self._replaced()
            self._file = file
            if writing:
                self._writer = kept
            else:
                self._reader = kept
        return kept

    def _same(self, connection: Any) -> None:
        if self._file is not None and sqlite_file.overwritten(connection, self.path, self._file):
            raise StoreUnavailable(
                f"{self.where}: other bytes were copied into the file while the gallery was open, nothing was written; "
                f"close it everywhere, move {self.path.name}-wal and {self.path.name}-shm away, and open it again"
            )

    def _replaced(self, written: str = "nothing was written") -> StoreUnavailable:
        what = f"the file was replaced or deleted while the gallery was open, {written}"
        return StoreUnavailable(f"{self.where}: {what}; open the gallery again (restart the service)")

    @contextmanager
    def transaction(self) -> Iterator[tuple[Any, Facts]]:
        with self._begun() as writer:
            yield writer, self.sure_facts(writer)

    @contextmanager
    def _begun(self) -> Iterator[Any]:
        """All or nothing of what is done within."""
        with self.writing, self.explained():
            writer = self.connection(True)
            try:
                if writer.in_transaction:  # whoever was here before was stopped while leaving
                    writer.execute("ROLLBACK")
                writer.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as error:
                if "locked" not in str(error):
                    raise
                waited = f"waited {self.timeout:g} s"
                raise TimeoutError(
                    f"{self.where}: another process is writing to it; {waited}, try again later"
                ) from None
            try:
                self._same(writer)
                before = writer.total_changes
                yield writer
                if writer.total_changes != before:
                    sqlite_file.count_up(writer)
                writer.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    if writer.in_transaction:
                        writer.execute("ROLLBACK")
                raise
            if sqlite_file.identity(self.path) != self._file:
                raise self._replaced("and what was just written went into the file that is gone")

    def sure_facts(self, connection: Any) -> Facts:
        facts = self._read_facts(connection)
        if facts is None:
            raise ValueError(f"{self.where}: no such gallery")
        return facts

    def _read_facts(self, connection: Any) -> Facts | None:
        if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'facts'").fetchone():
            return None
        copies = connection.execute("SELECT said, sum FROM facts ORDER BY copy").fetchall()
        facts = facts_of.first_sound(self.where, copies)
        if self._gallery not in (None, facts.gallery):
            raise StoreUnavailable(f"{self.where}: holds another gallery than the one that was opened; open it again")
        self._gallery = facts.gallery
        return facts

    @staticmethod
    def write_facts(writer: Any, facts: Facts) -> None:
        for copy in (1, 2):
            writer.execute("INSERT OR REPLACE INTO facts VALUES (?, ?, ?)", (copy, *facts.written()))

    @contextmanager
    def explained(self) -> Iterator[None]:
        """What SQLite says, as one sentence."""
        try:
            yield
        except sqlite3.OperationalError as error:
            said = str(error)
            if "locked" in said:
                raise TimeoutError(f"{self.where}: another process holds it; waited {self.timeout:g} s") from None
            raise ValueError(f"{self.where}: cannot be used ({said})") from None
        except sqlite3.DatabaseError as error:
            if "not a database" in str(error):
                raise ValueError(f"{self.where}: not a gallery, or its first bytes are damaged") from None
            way_out = f"nearkin gallery check {self.where} --repair saves the rows that are whole"
            raise ValueError(f"{self.where}: the file is damaged ({error}); {way_out}") from None
