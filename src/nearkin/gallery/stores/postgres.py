"""The gallery in PostgreSQL with pgvector: the same rows, the same answers; the server searches.

The tables are in a separate schema, nearkin_NAME, so that a database may have several galleries. Each writing call is
one transaction under an advisory lock: one writer at a time. Up to 10,000 rows every search is exact; beyond, once
`warm` or `reindex` has built it, pgvector's HNSW proposes, unless the address says search=exact. The server proposes,
float64 decides; every returned row is verified by its checksum. Where other tables take the place of the gallery's (an
upgrade, a restore, a copy over it), a reading call that they came into begins again.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from nearkin.core.errors import EncoderChanged, FactsChanged, TablesExchanged
from nearkin.gallery import schema
from nearkin.gallery.schema import Facts, Filter, Floats, KnownRows, NewRow, Renewed, Row
from nearkin.gallery.stores import (
    Added,
    Decide,
    Loader,
    Report,
    Rewrite,
    check_encoder,
    merge_sources,
    plan_insert,
    postgres_bulk,
    postgres_check,
    postgres_filters,
    postgres_index,
    postgres_rewrite,
    warn_damaged,
)
from nearkin.gallery.stores.label_table import Project
from nearkin.gallery.stores.postgres_connection import Connections, bigint_bytes, vector_bytes
from nearkin.gallery.stores.postgres_search import COLUMNS, Read, Search, Statement, by_cursor, read_rows

__all__ = ["PostgresStore"]

BATCH = 4096  # rows read at a time
MAX_DIM = 16_000  # of pgvector's type
OLDEST = (0, 8)  # of pgvector: it continues a search where a filter lets few rows pass
ATTEMPTS = 5  # of a reading call: an exchange takes much longer than a call
P = ParamSpec("P")
T = TypeVar("T")


def _again(
    read: "Callable[Concatenate[PostgresStore, P], T]",
) -> "Callable[Concatenate[PostgresStore, P], T]":
    """A reading call that begins again where other tables took the place of the gallery's."""

    @wraps(read)
    def reading(store: "PostgresStore", /, *args: P.args, **kwargs: P.kwargs) -> T:
        for _ in range(ATTEMPTS - 1):
            try:
                return read(store, *args, **kwargs)
            except TablesExchanged:  # noqa: PERF203
                store.forget()
        return read(store, *args, **kwargs)

    return reading


def _known_rows(selected: Iterable[Any]) -> KnownRows:
    return {content: (i, label) for content, i, label in selected}


class PostgresStore:
    """The methods of `stores.Store` are documented there."""

    kind = "postgres"

    def __init__(self, url: str, timeout: float) -> None:
        self.connections = Connections(url, timeout)
        self.where, self.schema = self.connections.where, self.connections.schema
        self.table = f"{self.schema}.items"
        self._facts_query = f"SELECT said, sum FROM {self.schema}.facts ORDER BY copy"
        self._rows_query = f"SELECT {COLUMNS} FROM {self.table} WHERE id = ANY(%s)"
        self._look_up_query = f"SELECT content, id, label FROM {self.table} WHERE content = ANY(%s)"
        self.fingerprint: str | None = None
        self._facts_read: tuple[Any, Facts | None] = None, None  # as stored, and parsed
        self.forget()

    def forget(self) -> None:
        """What is known of the rows, where there are others now."""
        self.damaged: dict[int, str] = {}
        self.lost = 0
        self.search = Search(self.schema, self.connections.exact)
        self._verified = postgres_check.Verified()
        self._label_sizes: tuple[str, dict[int, int]] = "", {}  # by state

    # --- opening

    @_again
    def facts(self) -> Facts | None:
        with self.connections.reading() as cursor:
            return self.read_facts(cursor)

    def create(self, facts: Facts) -> None:
        with self.connections.writing(self.schema) as cursor:
            if self.read_facts(cursor) is not None:
                return
            self.make_tables(cursor, self.schema, facts)
            self.write_facts(cursor, facts)

    def make_tables(self, cursor: Any, schema: str, facts: Facts) -> None:
        """Empty ones."""
        if facts.dim > MAX_DIM:
            raise ValueError(f"{self.where}: pgvector stores up to {MAX_DIM:,} dimensions, got {facts.dim:,}")
        for statement in (
            "CREATE EXTENSION IF NOT EXISTS vector",
            f"CREATE SCHEMA IF NOT EXISTS {schema}",
            f"CREATE TABLE {schema}.facts (copy int PRIMARY KEY, said text NOT NULL, sum bytea NOT NULL)",
            f"CREATE TABLE {schema}.items (id bigint PRIMARY KEY, content bytea NOT NULL UNIQUE,"
            " label text NOT NULL, name text NOT NULL, metadata text NOT NULL,"
            f" vector vector({facts.dim}) NOT NULL, sum bytea NOT NULL)",
            f"CREATE INDEX items_label ON {schema}.items (label)",
            f"CREATE TABLE {schema}.thumbnails (id bigint PRIMARY KEY, bytes bytea NOT NULL, sum bytea NOT NULL)",
        ):
            cursor.execute(statement)
        version = cursor.execute("SELECT extversion FROM pg_extension WHERE extname = 'vector'").fetchone()[0]
        if tuple(map(int, version.split(".")[:2])) < OLDEST:
            raise ValueError(f"{self.where}: needs pgvector {'.'.join(map(str, OLDEST))} or newer, got {version}")

    def label_table(self, key: str, project: Project, since: int | None = None) -> None:
        """Rows are on the server."""

    def project_labels(self, key: str, project: Project, most: int) -> bool:
        return True

    def close(self) -> None:
        self.connections.close()

    # --- writing

    @_again
    def look_up(self, contents: Sequence[bytes]) -> KnownRows:
        return _known_rows(self._select(self._look_up_query, (list(contents),)))

    def add(
        self, rows: Sequence[NewRow], keep: bool, sources: Sequence[str] = (), encoder: str | None = None
    ) -> list[Added]:
        with self.transaction() as (cursor, facts):
            check_encoder(self.where, facts, encoder)
            known = _known_rows(cursor.execute(self._look_up_query, ([row.content for row in rows],)))
            plan = plan_insert(rows, known, facts.next_id, keep)
            items = [(bigint_bytes(i), *texts, vector_bytes(v), total) for i, *texts, v, total in plan.items]
            self.connections.copy(cursor, self.table, items)
            thumbnails = [(bigint_bytes(i), *rest) for i, *rest in plan.thumbnails]
            self.connections.copy(cursor, f"{self.schema}.thumbnails", thumbnails)
            all_sources = merge_sources(facts.sources, sources)
            if plan.items or all_sources != facts.sources:
                count = facts.rows + len(plan.items)
                self.write_facts(cursor, facts.replace(next_id=plan.next_id, rows=count, sources=all_sources))
        return plan.added

    def remove(self, ids: Sequence[int]) -> int:
        with self.transaction() as (cursor, facts):
            cursor.execute(f"DELETE FROM {self.table} WHERE id = ANY(%s)", (list(ids),))
            removed: int = cursor.rowcount
            cursor.execute(f"DELETE FROM {self.schema}.thumbnails WHERE id = ANY(%s)", (list(ids),))
            if removed:
                self.write_facts(cursor, facts.replace(rows=facts.rows - removed, changes=facts.changes + removed))
        return removed

    def relabel(self, ids: Sequence[int], label: str) -> int:
        with self.transaction() as (cursor, facts):
            rows, _ = self.fetch(cursor, ids)
            update = f"UPDATE {self.table} SET label = %s, sum = %s WHERE id = %s"
            for row in rows.values():
                cursor.execute(update, (label, schema.checksum(*row._replace(label=label)), row.id))
            if rows:
                self.write_facts(cursor, facts.replace(changes=facts.changes + len(rows)))
        return len(rows)

    @_again
    def note(self, key: str) -> str:
        with self.connections.reading() as cursor:
            return self._read_note(cursor, key)

    def _read_note(self, cursor: Any, key: str) -> str:
        """Galleries without a note have no table of them."""
        if cursor.execute("SELECT to_regclass(%s)", (f"{self.schema}.notes",)).fetchone()[0] is None:
            return ""
        row = cursor.execute(f"SELECT content, sum FROM {self.schema}.notes WHERE key = %s", (key,)).fetchone()
        return "" if row is None or schema.note_checksum(key, row[0]) != row[1] else str(row[0])

    def edit(self, key: str, decide: Decide) -> None:
        with self.transaction() as (cursor, facts):

            def labels_of(ids: Sequence[int]) -> dict[int, str]:
                return {row.id: row.label for row in self.fetch(cursor, ids)[0].values()}

            labels, text = decide(self._read_note(cursor, key), labels_of)
            rows, _ = self.fetch(cursor, list(labels))
            update = f"UPDATE {self.table} SET label = %s, sum = %s WHERE id = %s"
            for row in rows.values():
                total = schema.checksum(*row._replace(label=labels[row.id]))
                cursor.execute(update, (labels[row.id], total, row.id))
            if rows:
                self.write_facts(cursor, facts.replace(changes=facts.changes + len(rows)))
            columns = postgres_bulk.NOTES_COLUMNS
            cursor.execute(f"CREATE TABLE IF NOT EXISTS {self.schema}.notes ({columns})")
            insert = f"INSERT INTO {self.schema}.notes VALUES (%s, %s, %s)"
            insert += " ON CONFLICT (key) DO UPDATE SET content = excluded.content, sum = excluded.sum"
            cursor.execute(insert, (key, text, schema.note_checksum(key, text)))

    def adopt(self, fingerprint: str, run: str) -> None:
        with self.transaction() as (cursor, facts):
            if facts.rows == 0 and facts.fingerprint is None:
                self.write_facts(cursor, facts.replace(fingerprint=fingerprint, run=run))

    def rewrite(self, plan: Rewrite, progress: Callable[[int, int], None] | None = None) -> str:
        return postgres_rewrite.rewrite(self, plan, progress)

    def renew(self, rows: Sequence[Renewed], encoder: str) -> int:
        return postgres_rewrite.renew(self, rows, encoder)

    @_again
    def bridged(self, after: int, limit: int) -> list[Row]:
        with self.connections.reading() as cursor:
            return postgres_rewrite.bridged(self, cursor, after, limit)

    @_again
    def encoders(self) -> dict[str, int]:
        with self.connections.reading() as cursor:
            return postgres_rewrite.encoders(self, cursor)

    # --- reading

    @_again
    def nearest(self, query: Floats, k: int, filter: Filter | None) -> list[tuple[Row, float]]:
        def excluded(damaged: dict[int, str]) -> list[int]:
            self.exclude(damaged)
            return list(self.damaged)

        copies, known = self._facts_read
        if known is not None and self._verified.state == postgres_check.state_of(known) and len(query) == known.dim:
            with suppress(FactsChanged):
                return self.search.nearest(self._reading_at(copies), known, query, k, filter, excluded)
        with self.connections.reading() as cursor:
            facts = self._check_new_rows(cursor)
            if len(query) != facts.dim:
                raise EncoderChanged(self.where)
            return self.search.nearest(by_cursor(cursor), facts, query, k, filter, excluded)

    def _select(self, query: str, values: Sequence[Any]) -> list[Any]:
        """One statement, which sees one state by itself."""
        selected = self.connections.read_together([(query, values)])
        if selected is not None:
            return selected[0]
        with self.connections.reading() as cursor:
            return by_cursor(cursor)([(query, values)])

    def _reading_at(self, copies: Any) -> Read:
        """Reads with one round trip, and raises `FactsChanged` where the facts are not these any more.

        Every change of rows changes the facts, which are read last: if they are as they were before, so were the rows.
        """

        def read(statements: Sequence[Statement]) -> list[Any]:
            selected = self.connections.read_together([*statements, (self._facts_query, ())])
            if selected is None or selected[-1] != copies:
                raise FactsChanged
            return selected[-2]

        return read

    @_again
    def rows(self, ids: Sequence[int]) -> dict[int, Row]:
        rows, damaged = read_rows(self._select(self._rows_query, (list(ids),)))
        self.exclude(damaged)
        return {row.id: row for row in rows}

    @_again
    def thumbnail(self, id: int) -> bytes:
        query = f"SELECT bytes, sum FROM {self.schema}.thumbnails WHERE id = %s"
        intact = [
            content for content, total in self._select(query, (id,)) if schema.thumbnail_checksum(id, content) == total
        ]
        return bytes(intact[0]) if intact else b""

    @_again
    def counts(self) -> dict[str, int]:
        with self.connections.reading() as cursor:
            self._check_new_rows(cursor)
            query = f"SELECT label, count(*) FROM {self.table} WHERE id <> ALL(%s) GROUP BY label ORDER BY min(id)"
            return dict(cursor.execute(query, (list(self.damaged),)).fetchall())

    @_again
    def stored_counts(self) -> dict[str, int]:
        return dict(self._select(f"SELECT label, count(*) FROM {self.table} GROUP BY label", ()))

    @_again
    def label_sizes(self) -> dict[int, int]:
        copies, known = self._facts_read
        counted = known is not None and self._label_sizes[0] == self._label_state(known)
        if counted and self._select(self._facts_query, ()) == copies:
            return self._label_sizes[1]
        with self.connections.reading() as cursor:
            facts = self._check_new_rows(cursor)
            state = self._label_state(facts)
            if self._label_sizes[0] != state:
                per_label = f"SELECT count(*) AS size FROM {self.table} WHERE id <> ALL(%s) GROUP BY label"
                query = f"SELECT size, count(*) FROM ({per_label}) AS per_label GROUP BY size ORDER BY size"
                self._label_sizes = state, dict(cursor.execute(query, (list(self.damaged),)).fetchall())
            return self._label_sizes[1]

    def _label_state(self, facts: Facts) -> str:
        return f"{facts.next_id} {facts.changes} {len(self.damaged)}"

    @_again
    def counts_of(self, labels: Sequence[str]) -> dict[str, int]:
        query = f"SELECT label, count(*) FROM {self.table} WHERE label = ANY(%s) GROUP BY label"
        return dict(self._select(query, (list(labels),)))

    def scan(self) -> Iterator[Row]:
        last, query = 0, f"SELECT {COLUMNS} FROM {self.table} WHERE id > %s ORDER BY id LIMIT {BATCH}"
        while True:
            rows, damaged = self._scanned(query, last)
            yield from rows
            if len(rows) + len(damaged) < BATCH:
                return
            last = max([row.id for row in rows] + list(damaged))

    @_again
    def _scanned(self, query: str, after: int) -> tuple[list[Row], dict[int, str]]:
        with self.connections.reading() as cursor:
            rows, damaged = read_rows(cursor.execute(query, (after,)))
            self.exclude(damaged)
            return rows, damaged

    # --- damage

    def _check_new_rows(self, cursor: Any) -> Facts:
        facts = self.existing_facts(cursor)
        postgres_check.verify_new_rows(self, cursor, facts, self._verified)
        return facts

    def exclude(self, damaged: dict[int, str]) -> None:
        new = {i: why for i, why in damaged.items() if i not in self.damaged}
        self.damaged |= new
        if new:
            warn_damaged(self.where, list(new))

    @_again
    def check(self, progress: Callable[[int, int], None] | None = None) -> Report:
        return postgres_check.check(self)

    def repair(self) -> tuple[int, Any]:
        """Moves damaged rows to another table, and counts the others again."""
        count, table = postgres_check.repair(self)
        self.damaged, self.lost, self._verified = {}, 0, postgres_check.Verified()
        return count, table

    def migrate(self, number: int, changed: Callable[[Facts], tuple[list[str], Facts]]) -> None:
        postgres_bulk.migrate(self, number, changed)

    @_again
    def vacuum(self) -> tuple[int, int]:
        return postgres_bulk.vacuum(self)

    @contextmanager
    def snapshot(self) -> Iterator[postgres_bulk.PostgresSnapshot]:
        with self.connections.reading(checked=False) as cursor:
            yield postgres_bulk.PostgresSnapshot(cursor, self)

    def load(self, facts: Facts, overwrite: bool) -> AbstractContextManager[Loader]:
        return postgres_bulk.load(self, facts, overwrite)

    # --- the search index

    @property
    def index_state(self) -> str:
        facts = self._facts_read[1]
        if facts is None or self.search.exact:
            return "exact, as its address says" if self.search.exact else ""
        return postgres_index.state(facts)

    @_again
    def warm(self, progress: Callable[[int, int], None] | None = None) -> None:
        with self.connections.reading() as cursor:
            facts = self._check_new_rows(cursor)
            replica = cursor.execute("SELECT pg_is_in_recovery()").fetchone()[0]
            current = replica or self.search.exact or postgres_index.is_current(cursor, self, facts)
        if not current:
            postgres_index.build(self, progress)

    @_again
    def reindex(
        self, progress: Callable[[int, int], None] | None = None, filter_keys: Sequence[str] | None = None
    ) -> None:
        keys = None if filter_keys is None else postgres_filters.check_keys(filter_keys)
        postgres_index.build(self, progress, anew=keys is None, keys=keys)

    # --- PostgreSQL

    @contextmanager
    def transaction(self) -> Iterator[tuple[Any, Facts]]:
        with self.connections.writing(self.schema) as cursor:
            yield cursor, self.existing_facts(cursor)

    def existing_facts(self, cursor: Any) -> Facts:
        facts = self.read_facts(cursor, exists=self._facts_read[1] is not None)
        if facts is None:
            raise ValueError(f"{self.where}: no such gallery")
        return facts

    def read_facts(self, cursor: Any, exists: bool = False) -> Facts | None:
        """exists: it was there before, so that one statement is enough."""
        regclass = "SELECT to_regclass(%s)"
        if not exists and cursor.execute(regclass, (f"{self.schema}.facts",)).fetchone()[0] is None:
            return None
        copies = cursor.execute(self._facts_query, prepare=exists).fetchall()
        if self._facts_read[1] is None or copies != self._facts_read[0]:
            facts = schema.read_facts(self.where, copies)
            self._facts_read, self.fingerprint = (copies, facts), facts.fingerprint
        return self._facts_read[1]

    def write_facts(self, cursor: Any, facts: Facts, schema: str = "") -> None:
        insert = f"INSERT INTO {schema or self.schema}.facts VALUES (%s, %s, %s)"
        insert += " ON CONFLICT (copy) DO UPDATE SET said = excluded.said, sum = excluded.sum"
        for copy in (1, 2):
            cursor.execute(insert, (copy, *facts.serialized()))

    def fetch(self, cursor: Any, ids: Sequence[int]) -> tuple[dict[int, Row], dict[int, str]]:
        rows, damaged = read_rows(cursor.execute(self._rows_query, (list(ids),)))
        return {row.id: row for row in rows}, damaged
