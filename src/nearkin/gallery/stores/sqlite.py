"""The gallery in one SQLite file: the rows on the disk are the truth, the index in memory follows them.

Every writing call is one transaction (WAL, synchronous=FULL): when it returns, the change is on the disk. Several
processes may read while one writes; a second writer waits.
"""

import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from nearkin.core.errors import EncoderChanged, StoreUnavailable
from nearkin.gallery import schema
from nearkin.gallery.schema import Facts, Filter, Floats, KnownRows, NewRow, Renewed, Row
from nearkin.gallery.stores import (
    Added,
    Decide,
    Loader,
    Neighbours,
    Report,
    Rewrite,
    check_encoder,
    merge_sources,
    plan_insert,
    repair,
    sqlite_bulk,
    sqlite_file,
    sqlite_rewrite,
)
from nearkin.gallery.stores.disk_index import DiskIndex
from nearkin.gallery.stores.hnsw import EXACT
from nearkin.gallery.stores.label_table import LabelTable, Project
from nearkin.gallery.stores.matrix import Matrix
from nearkin.gallery.stores.memory_index import MemoryIndex

__all__ = ["SqliteStore"]

SCHEMA = (
    # Two copies: one damaged page must not cost what cannot be reconstructed.
    "CREATE TABLE facts (copy INTEGER PRIMARY KEY, said TEXT NOT NULL, sum BLOB NOT NULL)",
    "CREATE TABLE items (id INTEGER PRIMARY KEY, content BLOB NOT NULL UNIQUE, label TEXT NOT NULL, name TEXT NOT NULL,"
    " metadata TEXT NOT NULL, vector BLOB NOT NULL, sum BLOB NOT NULL)",
    "CREATE TABLE thumbnails (id INTEGER PRIMARY KEY, bytes BLOB NOT NULL, sum BLOB NOT NULL)",
    "CREATE TABLE changes (seq INTEGER PRIMARY KEY, id INTEGER NOT NULL)",
)

# Every new row changes a page of the index of contents, whose hashes lie in no order. With many rows beyond memory's,
# these pages are cached, and written back from the log after several transactions, each of them once.
MANY = 4096  # rows of a call
COUNTED = 16_384  # rows at a time
CACHE_MANY, LOG_MANY = 768 << 20, 1 << 30  # bytes
CACHE_FEW, LOG_FEW = 64 << 20, 4 << 20
FEW_CHANGES = 1000  # kept beside one for each row
NOTES = "CREATE TABLE IF NOT EXISTS notes (key TEXT PRIMARY KEY, content TEXT NOT NULL, sum BLOB NOT NULL)"


class SqliteStore:
    """The methods of `stores.Store` are documented there."""

    kind = "sqlite"

    def __init__(self, path: Path, timeout: float) -> None:
        self.path, self.where, self.timeout = path, str(path), timeout
        self.read_lock = sqlite_file.TimedLock(self.where, timeout)
        self.write_lock = sqlite_file.TimedLock(self.where, timeout)
        self._reader: Any = None
        self._writer: Any = None
        self._file: sqlite_file.FileId | None = None  # which one was opened, and which gallery was in it
        self._gallery: str | None = None
        self._new_dim: int | None = None  # of the rows of a file that is about to be made
        self.fingerprint: str | None = None
        self._closed = False
        self._stored: str | None = None  # the form of the index on the disk; None: the rows are in memory
        self.index: MemoryIndex | DiskIndex = self._new_index()

    def _new_index(self) -> MemoryIndex | DiskIndex:
        if self._stored is None:
            return MemoryIndex(self.where, self.path.with_name(self.path.name + ".hnsw"))
        return DiskIndex(self.where, self.path.with_name(self.path.name + ".codes"), self._stored)

    @property
    def damaged(self) -> dict[int, str]:
        return self.index.damaged

    @property
    def lost(self) -> int:
        return self.index.lost

    @property
    def index_state(self) -> str:
        return self.index.index_state

    @property
    def stored(self) -> str | None:
        return self._stored

    @property
    def index_figures(self) -> dict[str, Any]:
        """Form, size and recall of an index on the disk."""
        return self.index.figures() if isinstance(self.index, DiskIndex) else {}

    # --- opening

    def facts(self) -> Facts | None:
        if self.path.is_dir():
            raise ValueError(f"{self.where}: a gallery is a file, this is a folder")
        if self._reader is None and self._writer is None:
            repair.finish_replacement(self.path, self.timeout)
            if not self.path.exists() or self.path.stat().st_size == 0:
                return None
        with self.read_lock, self.sqlite_errors():
            return self._read_facts(self.connection(False))

    def create(self, facts: Facts) -> None:
        if not self.path.parent.is_dir():
            raise ValueError(f"{self.where}: the folder {self.path.parent} does not exist")
        self._new_dim = facts.dim
        with self._transaction() as writer:
            if self._read_facts(writer) is not None:
                return  # another process was first
            for statement in SCHEMA:
                writer.execute(statement)
            writer.execute(f"PRAGMA application_id = {sqlite_file.APPLICATION_ID}")
            self.write_facts(writer, facts)

    def close(self) -> None:
        with self.read_lock, self.write_lock:
            self.release()
            self._closed = True

    def release(self) -> None:
        """Closes the file and empties the index; the next call opens it again. The caller holds both locks."""
        for connection in (self._reader, self._writer):
            if connection is not None and self._file is not None:
                sqlite_file.close(connection, self._file)
        self._reader = self._writer = self._file = None
        self.index = self._new_index()

    # --- writing

    def look_up(self, contents: Sequence[bytes]) -> KnownRows:
        with self.read_lock, self.sqlite_errors():
            return sqlite_file.look_up(self.connection(False), contents)

    def add(
        self, rows: Sequence[NewRow], keep: bool, sources: Sequence[str] = (), encoder: str | None = None
    ) -> list[Added]:
        with self.transaction(len(rows) > MANY) as (writer, facts):
            check_encoder(self.where, facts, encoder)
            known = sqlite_file.look_up(writer, [row.content for row in rows])
            plan = plan_insert(rows, known, facts.next_id, keep)
            writer.executemany("INSERT INTO items VALUES (?, ?, ?, ?, ?, ?, ?)", plan.items)
            writer.executemany("INSERT INTO thumbnails VALUES (?, ?, ?)", plan.thumbnails)
            all_sources = merge_sources(facts.sources, sources)
            if plan.items or all_sources != facts.sources:
                count = facts.rows + len(plan.items)
                self.write_facts(writer, facts.replace(next_id=plan.next_id, rows=count, sources=all_sources))
        return plan.added

    def remove(self, ids: Sequence[int]) -> int:
        with self.transaction() as (writer, facts):
            removed = []
            for i in dict.fromkeys(ids):
                if writer.execute("DELETE FROM items WHERE id = ?", (i,)).rowcount:
                    writer.execute("DELETE FROM thumbnails WHERE id = ?", (i,))
                    removed.append(i)
            self.record_changes(writer, facts.replace(rows=facts.rows - len(removed)), removed)
        return len(removed)

    def relabel(self, ids: Sequence[int], label: str) -> int:
        with self.transaction() as (writer, facts):
            rows, _ = sqlite_file.fetch(writer, list(dict.fromkeys(ids)))
            for row in rows.values():
                total = schema.checksum(*row._replace(label=label))
                writer.execute("UPDATE items SET label = ?, sum = ? WHERE id = ?", (label, total, row.id))
            self.record_changes(writer, facts, list(rows))
        return len(rows)

    def note(self, key: str) -> str:
        with self.read_lock, self.sqlite_errors():
            return _read_note(self.connection(False), key)

    def edit(self, key: str, decide: Decide) -> None:
        with self.transaction() as (writer, facts):

            def labels_of(ids: Sequence[int]) -> dict[int, str]:
                return {row.id: row.label for row in sqlite_file.fetch(writer, list(ids))[0].values()}

            labels, text = decide(_read_note(writer, key), labels_of)
            rows, _ = sqlite_file.fetch(writer, list(labels))
            for row in rows.values():
                total = schema.checksum(*row._replace(label=labels[row.id]))
                writer.execute("UPDATE items SET label = ?, sum = ? WHERE id = ?", (labels[row.id], total, row.id))
            self.record_changes(writer, facts, list(rows))
            writer.execute(NOTES)
            note = (key, text, schema.note_checksum(key, text))
            writer.execute("INSERT OR REPLACE INTO notes VALUES (?, ?, ?)", note)

    def adopt(self, fingerprint: str, run: str) -> None:
        with self.transaction() as (writer, facts):
            if facts.rows == 0 and facts.fingerprint is None:
                self.write_facts(writer, facts.replace(fingerprint=fingerprint, run=run))

    def rewrite(self, plan: Rewrite, progress: Callable[[int, int], None] | None = None) -> str:
        return sqlite_rewrite.rewrite(self, plan, progress)

    def renew(self, rows: Sequence[Renewed], encoder: str) -> int:
        return sqlite_rewrite.renew(self, rows, encoder)

    def bridged(self, after: int, limit: int) -> list[Row]:
        with self.read_lock, self.sqlite_errors():
            return sqlite_rewrite.bridged(self.connection(False), after, limit)

    def encoders(self) -> dict[str, int]:
        with self.read_lock, self.sqlite_errors():
            return sqlite_rewrite.encoders(self.connection(False))

    def record_changes(self, writer: Any, facts: Facts, ids: Sequence[int]) -> None:
        """Tells readers which rows to read again."""
        if ids:
            changes = [(facts.changes + n, i) for n, i in enumerate(ids, 1)]
            writer.executemany("INSERT INTO changes VALUES (?, ?)", changes)
            last = changes[-1][0]
            # Who has missed more of them than there are rows reads all rows again.
            writer.execute("DELETE FROM changes WHERE seq <= ?", (last - facts.rows - FEW_CHANGES,))
            self.write_facts(writer, facts.replace(changes=last))

    # --- reading

    def nearest(self, query: Floats, k: int, filter: Filter | None, exact: bool = False) -> Neighbours:
        with self._refreshed() as (reader, rows):
            if len(query) != rows.dim:
                raise EncoderChanged(self.where)
            return self.index.nearest(reader, self.require_facts, query, k, filter, exact)

    def rows(self, ids: Sequence[int]) -> dict[int, Row]:
        with self.read_lock, self.sqlite_errors():
            rows, damaged = sqlite_file.fetch(self.connection(False), ids)
            self.index.exclude(damaged)
            return rows

    def thumbnail(self, id: int) -> bytes:
        with self.read_lock, self.sqlite_errors():
            query = "SELECT bytes, sum FROM thumbnails WHERE id = ?"
            row = self.connection(False).execute(query, (id,)).fetchone()
        if row is None or not isinstance(row[0], bytes) or schema.thumbnail_checksum(id, row[0]) != row[1]:
            return b""
        return row[0]

    def counts(self) -> dict[str, int]:
        with self._refreshed() as (_, rows):
            return rows.counts()

    def label_sizes(self) -> dict[int, int]:
        with self._refreshed() as (_, rows):
            return rows.label_sizes()

    def counts_of(self, labels: Sequence[str]) -> dict[str, int]:
        with self._refreshed() as (_, rows):
            return rows.counts_of(labels)

    def stored_counts(self) -> dict[str, int]:
        counts: Counter[str] = Counter()
        last = 0
        while True:  # searches go on in between
            with self._snapshot() as reader:
                some = "SELECT max(id) FROM (SELECT id FROM items WHERE id > ? ORDER BY id LIMIT ?)"
                until = reader.execute(some, (last, COUNTED)).fetchone()[0]
                if until is None:
                    return dict(counts)
                of = "SELECT label, count(*) FROM items WHERE id > ? AND id <= ? GROUP BY label"
                for label, rows in reader.execute(of, (last, until)):
                    if isinstance(label, str):
                        counts[label] += rows
            last = until

    def label_table(self, key: str, project: Project, since: int | None = None) -> LabelTable | None:
        with self._refreshed() as (_, rows):
            matrix = _searched_exactly(rows)
            return None if matrix is None else matrix.label_table(key, project, since)

    def project_labels(self, key: str, project: Project, most: int) -> bool:
        with self._refreshed() as (_, rows):
            matrix = _searched_exactly(rows)
            return matrix is None or matrix.project_labels(key, project, most)

    @contextmanager
    def _refreshed(self) -> Iterator[tuple[Any, Matrix | DiskIndex]]:
        """A reader with a snapshot of the file, and the rows of that snapshot in the index."""
        with self._snapshot() as reader:
            index = self._current_index(reader)
            rows = index.refresh(reader, self.require_facts)
            if self._current_index(reader) is not index:  # another process has changed the form
                rows = self.index.refresh(reader, self.require_facts)
            yield reader, rows

    def _current_index(self, reader: Any) -> MemoryIndex | DiskIndex:
        """Of the form that the gallery has now."""
        if self._gallery is None:
            self.require_facts(reader)
        if self.index.stored != self._stored:
            self.index = self._new_index()
        return self.index

    @contextmanager
    def _snapshot(self) -> Iterator[Any]:
        with self.read_lock, self.sqlite_errors():
            reader = self.connection(False)
            with sqlite_file.snapshot(reader):
                self._check_not_overwritten(reader)
                yield reader

    def scan(self) -> Iterator[Row]:
        last: int | None = 0
        while last is not None:
            with self.read_lock, self.sqlite_errors():
                rows, damaged, last = sqlite_file.read_after(self.connection(False), last)
                self.index.exclude(damaged)
            yield from rows

    # --- maintenance

    def warm(self, progress: Callable[[int, int], None] | None = None) -> None:
        with self.read_lock:
            with self._snapshot() as reader:
                index = self._current_index(reader)
                if isinstance(index, DiskIndex):
                    index.warm(reader, self.require_facts, progress)
                    return
                matrix, facts = index.refresh(reader, self.require_facts), self.require_facts(reader)
            index.warm(matrix, facts, progress)

    def reindex(
        self, progress: Callable[[int, int], None] | None = None, filter_keys: Sequence[str] | None = None
    ) -> None:
        if filter_keys:
            raise ValueError(f"{self.where}: only a gallery in PostgreSQL has indexes for filters")
        with self.read_lock:
            with self._snapshot() as reader:
                self._current_index(reader).forget_graph()
            self.warm(progress)

    def store_as(self, stored: str | None) -> None:
        """Changes the form of the index: see `stored_forms`; None: the rows are in memory."""
        with self.transaction() as (writer, facts):
            others = {key: value for key, value in facts.beyond.items() if key != "stored"}
            self.write_facts(writer, facts.replace(beyond=others | ({} if stored is None else {"stored": stored})))
        self._stored = stored
        for ending in (".codes", ".hnsw"):
            if ending != (".hnsw" if stored is None else ".codes"):
                self.path.with_name(self.path.name + ending).unlink(missing_ok=True)

    def check(self, progress: Callable[[int, int], None] | None = None) -> Report:
        return repair.check(self, progress)

    def repair(self) -> tuple[int, Any]:
        return repair.repair(self)

    def migrate(self, number: int, changed: Callable[[Facts], tuple[list[str], Facts]]) -> None:
        sqlite_bulk.migrate(self, number, changed)

    def vacuum(self) -> tuple[int, int]:
        return sqlite_bulk.vacuum(self)

    @contextmanager
    def snapshot(self) -> Iterator[sqlite_bulk.SqliteSnapshot]:
        with self._snapshot() as reader:
            yield sqlite_bulk.SqliteSnapshot(reader, self.require_facts(reader))

    def load(self, facts: Facts, overwrite: bool) -> AbstractContextManager[Loader]:
        return sqlite_bulk.load(self.path, facts.dim, overwrite, self.timeout)

    # --- SQLite

    def connection(self, writing: bool) -> Any:
        """To the file that was opened first: another file that has taken its name is neither read nor written."""
        if self._closed:
            raise ValueError(f"{self.where}: the gallery is closed; open it again")
        if self._file is not None and sqlite_file.file_id(self.path) != self._file:
            raise self._replaced_error()
        connection = self._writer if writing else self._reader
        if connection is None:
            repair.finish_replacement(self.path, self.timeout)
            connection, file = sqlite_file.connect(self.path, self.timeout, writing, self._new_dim)
            if self._file not in (None, file):
                sqlite_file.close(connection, file)
                raise self._replaced_error()
            self._file = file
            if writing:
                self._writer = connection
            else:
                self._reader = connection
        return connection

    def _check_not_overwritten(self, connection: Any) -> None:
        if self._file is not None and sqlite_file.overwritten(connection, self.path, self._file):
            raise StoreUnavailable(
                f"{self.where}: other bytes were copied into the file while the gallery was open, nothing was written; "
                f"close it everywhere, move {self.path.name}-wal and {self.path.name}-shm away, and open it again"
            )

    def _replaced_error(self, written: str = "nothing was written") -> StoreUnavailable:
        what = f"the file was replaced or deleted while the gallery was open, {written}"
        return StoreUnavailable(f"{self.where}: {what}; open the gallery again (restart the service)")

    @contextmanager
    def transaction(self, many: bool = False) -> Iterator[tuple[Any, Facts]]:
        """many: of rows, see `MANY`."""
        with self._transaction(many) as writer:
            yield writer, self.require_facts(writer)

    @contextmanager
    def _transaction(self, many: bool = False) -> Iterator[Any]:
        """Everything within is committed, or nothing."""
        with self.write_lock, self.sqlite_errors():
            writer = self.connection(True)
            try:
                if writer.in_transaction:  # the previous call was interrupted on its way out
                    writer.execute("ROLLBACK")
                page = writer.execute("PRAGMA page_size").fetchone()[0]
                writer.execute(f"PRAGMA cache_size = -{(CACHE_MANY if many else CACHE_FEW) >> 10}")
                writer.execute(f"PRAGMA wal_autocheckpoint = {(LOG_MANY if many else LOG_FEW) // page}")
                writer.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as error:
                if "locked" not in str(error):
                    raise
                waited = f"waited {self.timeout:g} s"
                raise TimeoutError(
                    f"{self.where}: another process is writing to it; {waited}, try again later"
                ) from None
            try:
                self._check_not_overwritten(writer)
                before = writer.total_changes
                yield writer
                if writer.total_changes != before:
                    sqlite_file.count_transaction(writer)
                writer.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    if writer.in_transaction:
                        writer.execute("ROLLBACK")
                raise
            if sqlite_file.file_id(self.path) != self._file:
                raise self._replaced_error("and what was just written went into the file that is gone")

    def require_facts(self, connection: Any) -> Facts:
        facts = self._read_facts(connection)
        if facts is None:
            raise ValueError(f"{self.where}: no such gallery")
        return facts

    def _read_facts(self, connection: Any) -> Facts | None:
        if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'facts'").fetchone():
            return None
        copies = connection.execute("SELECT said, sum FROM facts ORDER BY copy").fetchall()
        facts = schema.read_facts(self.where, copies)
        if self._gallery not in (None, facts.gallery):
            raise StoreUnavailable(f"{self.where}: holds another gallery than the one that was opened; open it again")
        self._gallery, self.fingerprint = facts.gallery, facts.fingerprint
        self._stored = facts.beyond.get("stored")
        return facts

    @staticmethod
    def write_facts(writer: Any, facts: Facts) -> None:
        for copy in (1, 2):
            writer.execute("INSERT OR REPLACE INTO facts VALUES (?, ?, ?)", (copy, *facts.serialized()))

    @contextmanager
    def sqlite_errors(self) -> Iterator[None]:
        """SQLite's errors as one sentence each."""
        try:
            yield
        except sqlite3.OperationalError as error:
            if "locked" in str(error):
                raise TimeoutError(f"{self.where}: locked by another process; waited {self.timeout:g} s") from None
            room = "; make room on its disk" if "disk" in str(error) else ""  # SQLite's files beside it need some too
            raise ValueError(f"{self.where}: cannot be used ({error}){room}") from None
        except sqlite3.DatabaseError as error:
            if "not a database" in str(error):
                how = "nearkin gallery restore makes it from a backup"
                raise ValueError(f"{self.where}: not a gallery, or its first bytes are damaged; {how}") from None
            way_out = f"nearkin gallery check {self.where} --repair saves the rows that are intact"
            raise ValueError(f"{self.where}: the file is damaged ({error}); {way_out}") from None


def _searched_exactly(rows: Matrix | DiskIndex) -> Matrix | None:
    """The rows in memory; None where they are on the disk, or more than an exact search reads."""
    return rows if isinstance(rows, Matrix) and rows.count - rows.removed <= EXACT else None


def _read_note(connection: Any, key: str) -> str:
    """Galleries without a note have no table of them."""
    if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'notes'").fetchone():
        return ""
    row = connection.execute("SELECT content, sum FROM notes WHERE key = ?", (key,)).fetchone()
    if row is None or not isinstance(row[0], str) or schema.note_checksum(key, row[0]) != row[1]:
        return ""
    return row[0]
