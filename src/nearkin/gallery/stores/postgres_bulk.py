"""Whole galleries in PostgreSQL: read in one snapshot, written in one transaction that is seen whole or not at all."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from nearkin.gallery.schema import Facts, StoredRow, note_checksum, read_facts, thumbnail_checksum
from nearkin.gallery.stores import (
    IdArray,
    RowBatch,
    SumArray,
    postgres_index,
    sound_notes,
    stored_rows,
    sum_array,
)
from nearkin.gallery.stores.postgres_connection import bigint_bytes, vector_bytes

if TYPE_CHECKING:
    from nearkin.gallery.stores.postgres import PostgresStore

__all__ = ["PostgresLoader", "PostgresSnapshot", "load", "migrate", "vacuum"]

SUMS = 65_536  # ids and checksums read at a time
ROWS, BATCH_BYTES = 4096, 1 << 24  # rows, and bytes of their vectors, read at a time
TABLES = ("facts", "items", "thumbnails")
FIELDS = (
    "SELECT i.id, i.content, i.label, i.name, i.metadata, vector_send(i.vector), i.sum, t.bytes, t.sum"
    " FROM {schema}.items AS i LEFT JOIN {schema}.thumbnails AS t ON t.id = i.id"
)
NOTES_COLUMNS = "key text PRIMARY KEY, content text NOT NULL, sum bytea NOT NULL"
SIZE = (  # of tables and indexes, without the maps of free space that a vacuum makes
    "SELECT coalesce(sum(pg_relation_size(oid) + pg_indexes_size(oid) + CASE WHEN reltoastrelid = 0 THEN 0"
    " ELSE pg_relation_size(reltoastrelid) END), 0) FROM pg_class WHERE relkind = 'r'"
    " AND relnamespace = to_regnamespace(%s)"
)


class PostgresSnapshot:
    """The methods of `stores.Snapshot` are documented there. The cursor is within a transaction.

    It may take hours, and others may take the place of its tables meanwhile: it follows them to their new name.
    """

    def __init__(self, cursor: Any, store: "PostgresStore") -> None:
        self._cursor = cursor
        # Of the transaction's beginning, as the rows: `to_regnamespace` would be of now.
        query = "SELECT oid FROM pg_namespace WHERE nspname = %s"
        self._tables = cursor.execute(query, (store.schema,)).fetchone()
        if self._tables is None:
            raise ValueError(f"{store.where}: no such gallery")
        self.facts = read_facts(store.where, self._read("SELECT said, sum FROM {schema}.facts ORDER BY copy"))
        query = "SELECT key, content, sum FROM {schema}.notes ORDER BY key"
        self.notes = sound_notes(self._read(query)) if _has_notes(cursor, self._name()) else {}
        self._batch = max(1, min(ROWS, BATCH_BYTES // (4 * self.facts.dim)))

    def _name(self) -> str:
        """Of the schema, now."""
        return str(self._cursor.execute("SELECT %s::oid::regnamespace::text", self._tables).fetchone()[0])

    def _read(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        """Under the name that the tables had before and after: in between it would be that of others."""
        while True:
            name = self._name()
            rows: list[Any] = self._cursor.execute(query.format(schema=name), values).fetchall()
            if self._name() == name:
                return rows

    def sums(self) -> Iterator[tuple[IdArray, SumArray]]:
        query, last = f"SELECT id, sum FROM {{schema}}.items WHERE id > %s ORDER BY id LIMIT {SUMS}", 0
        while part := self._read(query, (last,)):
            yield np.array([id for id, _ in part], np.int64), sum_array([total for _, total in part])
            last = part[-1][0]

    def rows(self) -> Iterator[RowBatch]:
        query, last = f"{FIELDS} WHERE i.id > %s ORDER BY i.id LIMIT {self._batch}", 0
        while part := self._read(query, (last,)):
            last = part[-1][0]
            yield stored_rows(map(_as_bytes, part))

    def fetch(self, ids: Sequence[int]) -> RowBatch:
        rows = self._read(f"{FIELDS} WHERE i.id = ANY(%s) ORDER BY i.id", (list(ids),))
        return stored_rows(map(_as_bytes, rows))


def _as_bytes(row: Sequence[Any]) -> tuple[Any, ...]:
    """Texts encoded, vectors without pgvector's head of 4 bytes."""
    id, content, label, name, metadata, vector, *rest = row
    return id, content, label.encode(), name.encode(), metadata.encode(), vector[4:], *rest


class PostgresLoader:
    """The methods of `stores.Loader` are documented there."""

    def __init__(self, store: "PostgresStore", cursor: Any, schema: str, facts: Facts) -> None:
        self._store, self.cursor, self._schema, self.count, self.finished = store, cursor, schema, 0, False
        self.previous = ""  # where the gallery that was there is, at the end
        store.make_tables(cursor, schema, facts)

    def remove(self, ids: Sequence[int]) -> None:
        with self._store.connections.errors():
            for table in ("thumbnails", "items"):
                self.cursor.execute(f"DELETE FROM {self._schema}.{table} WHERE id = ANY(%s)", (list(ids),))
            self.count -= self.cursor.rowcount

    def add(self, rows: Sequence[StoredRow]) -> None:
        # The texts are bytes already.
        items = [(bigint_bytes(row.id), *row[1:5], vector_bytes(row.vector), row.sum) for row in rows]
        thumbnails = [
            (bigint_bytes(row.id), row.thumbnail, thumbnail_checksum(row.id, row.thumbnail))
            for row in rows
            if row.thumbnail
        ]
        connections = self._store.connections
        with connections.errors():
            connections.copy(self.cursor, f"{self._schema}.items", items)
            connections.copy(self.cursor, f"{self._schema}.thumbnails", thumbnails)
        self.count += len(rows)

    def finish(self, facts: Facts, notes: Mapping[str, str]) -> None:
        with self._store.connections.errors():
            if notes:
                self.cursor.execute(f"CREATE TABLE {self._schema}.notes ({NOTES_COLUMNS})")
            for key, text in notes.items():
                insert = f"INSERT INTO {self._schema}.notes VALUES (%s, %s, %s)"
                self.cursor.execute(insert, (key, text, note_checksum(key, text)))
            self._store.write_facts(self.cursor, facts, self._schema)
        self.finished = True


@contextmanager
def load(store: "PostgresStore", facts: Facts, overwrite: bool) -> Iterator[PostgresLoader]:
    """See `stores.Store.load`. A gallery that is there stays readable until the new one is complete."""
    with store.connections.writing(store.schema) as cursor:
        exists = store.read_facts(cursor) is not None
        if exists and not overwrite:
            raise ValueError(
                f"{store.where}: exists already; choose another place, or --overwrite, which keeps it beside"
            )
        schema = f"{store.schema}_new" if exists else store.schema
        loader = PostgresLoader(store, cursor, schema, facts)
        yield loader
        if not loader.finished:
            raise store.connections.psycopg.Rollback
        if exists:
            loader.previous = _free_schema(cursor, f"{store.schema}_previous")
            cursor.execute(f"ALTER SCHEMA {store.schema} RENAME TO {loader.previous}")
            cursor.execute(f"ALTER SCHEMA {schema} RENAME TO {store.schema}")


def _has_notes(cursor: Any, schema: str) -> bool:
    """Galleries without a note have no table of them."""
    return cursor.execute("SELECT to_regclass(%s)", (f"{schema}.notes",)).fetchone()[0] is not None


def _free_schema(cursor: Any, name: str) -> str:
    """The first of NAME_1, NAME_2, … that does not exist."""
    query = "SELECT to_regnamespace(%s)"
    names = (f"{name}_{n}" for n in range(1, 10_000))
    return next(one for one in names if cursor.execute(query, (one,)).fetchone()[0] is None)


def vacuum(store: "PostgresStore") -> tuple[int, int]:
    """The server frees the space of removed rows for later ones, and counts anew; readers and writers go on."""
    sizes = []
    for measured_last in (False, True):
        if measured_last:
            store.connections.maintain([f"VACUUM (ANALYZE) {store.schema}.{table}" for table in TABLES])
        with store.connections.reading() as cursor:
            sizes.append(int(cursor.execute(SIZE, (store.schema,)).fetchone()[0]))
    return sizes[0], sizes[1]


def migrate(store: "PostgresStore", number: int, changed: Callable[[Facts], tuple[list[str], Facts]]) -> None:
    """See `stores.Store.migrate`. The copy, NAME_format_N_1, is a gallery that the older version opens."""
    with store.transaction() as (cursor, facts):
        if facts.format >= number:
            return  # another process was first
        statements, new = changed(facts)
        kept = _free_schema(cursor, f"{store.schema}_format_{facts.format}")
        cursor.execute(f"CREATE SCHEMA {kept}")
        for table in (*TABLES, *(("notes",) if _has_notes(cursor, store.schema) else ())):
            cursor.execute(f"CREATE TABLE {kept}.{table} (LIKE {store.schema}.{table} INCLUDING ALL)")
            postgres_index.drop_all(cursor, kept)
            cursor.execute(f"INSERT INTO {kept}.{table} SELECT * FROM {store.schema}.{table}")
        for statement in statements:
            cursor.execute(statement.format(schema=store.schema))
        store.write_facts(cursor, new)
