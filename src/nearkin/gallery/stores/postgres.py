"""The gallery in PostgreSQL with pgvector: the same rows, the same answers; the server searches.

The tables are in a separate schema, nearkin_NAME, so that a database may have several galleries. Each writing call is
one transaction under an advisory lock: one writer at a time. Up to 100,000 rows every search is exact; beyond, once
`reindex` has built it, pgvector's HNSW proposes. The server's float32 proposes, float64 decides; every returned row is
verified by its checksum.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

from nearkin.core.errors import EncoderChanged
from nearkin.gallery import schema
from nearkin.gallery.schema import Facts, Filter, Floats, KnownRows, NewRow, Renewed, Row
from nearkin.gallery.stores import (
    Added,
    Decide,
    Loader,
    Report,
    Rewrite,
    check_encoder,
    hnsw,
    merge_sources,
    plan_insert,
    postgres_bulk,
    postgres_rewrite,
    warn_damaged,
    warn_lost,
)
from nearkin.gallery.stores.matrix import similarities
from nearkin.gallery.stores.postgres_connection import Connections, bigint_bytes, vector_bytes

__all__ = ["PostgresStore"]

BATCH = 4096  # rows read at a time
SPARE = 16  # rows proposed beyond k
MAX_DIM = 16_000  # of pgvector's type
MAX_INDEXED_DIM = 2_000  # of its HNSW
DEPTHS = (64, 128, 256, 512, 1000)  # hnsw.ef_search; pgvector takes no more
OLDEST = (0, 8)  # of pgvector: it continues a search where a filter lets few rows pass
COLUMNS = "id, content, label, name, metadata, vector_send(vector), sum"
# The checksums of `schema.checksum` and `schema.thumbnail_checksum`, computed by the server.
THUMBNAIL_CHECKSUM = "substring(sha256(int8send(id) || bytes) from 1 for 8)"
CHECKSUM = (
    "substring(sha256(int8send(id) || int4send(octet_length(label)) || int4send(octet_length(name)) ||"
    " int4send(octet_length(metadata)) || convert_to(label, 'UTF8') || convert_to(name, 'UTF8') ||"
    " convert_to(metadata, 'UTF8') || content || vector_send(vector)) from 1 for 8)"
)


class PostgresStore:
    """The methods of `stores.Store` are documented there."""

    kind = "postgres"

    def __init__(self, url: str, timeout: float) -> None:
        self.connections = Connections(url, timeout)
        self.where, self.schema = self.connections.where, f"nearkin_{self.connections.name}"
        self.table = f"{self.schema}.items"
        self.damaged: dict[int, str] = {}
        self.fingerprint: str | None = None
        self.lost = 0
        self.index_state = ""
        self._checked_ids, self._state = 0, (-1, -1, -1)  # ids below are checked, in this state of the facts
        self._label_sizes: tuple[str, dict[int, int]] = "", {}  # by state

    # --- opening

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

    def close(self) -> None:
        self.connections.close()

    # --- writing

    def look_up(self, contents: Sequence[bytes]) -> KnownRows:
        with self.connections.reading() as cursor:
            return self._look_up(cursor, contents)

    def add(
        self, rows: Sequence[NewRow], keep: bool, sources: Sequence[str] = (), encoder: str | None = None
    ) -> list[Added]:
        with self.transaction() as (cursor, facts):
            check_encoder(self.where, facts, encoder)
            known = self._look_up(cursor, [row.content for row in rows])
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

    def bridged(self, after: int, limit: int) -> list[Row]:
        with self.connections.reading() as cursor:
            return postgres_rewrite.bridged(self, cursor, after, limit)

    def encoders(self) -> dict[str, int]:
        with self.connections.reading() as cursor:
            return postgres_rewrite.encoders(self, cursor)

    # --- reading

    def nearest(self, query: Floats, k: int, filter: Filter | None) -> list[tuple[Row, float]]:
        where, values = _where_clause(filter)
        with self.connections.reading() as cursor:
            facts = self._check_new_rows(cursor)
            if len(query) != facts.dim:
                raise EncoderChanged(self.where)
            self._choose_search(cursor, facts, k, where, values)
            return self._nearest(cursor, query, k, where, values)

    def rows(self, ids: Sequence[int]) -> dict[int, Row]:
        with self.connections.reading() as cursor:
            rows, damaged = self.fetch(cursor, ids)
            self._exclude(damaged)
            return rows

    def thumbnail(self, id: int) -> bytes:
        with self.connections.reading() as cursor:
            row = cursor.execute(f"SELECT bytes, sum FROM {self.schema}.thumbnails WHERE id = %s", (id,)).fetchone()
        if row is None or schema.thumbnail_checksum(id, row[0]) != row[1]:
            return b""
        return bytes(row[0])

    def counts(self) -> dict[str, int]:
        with self.connections.reading() as cursor:
            self._check_new_rows(cursor)
            query = f"SELECT label, count(*) FROM {self.table} WHERE id <> ALL(%s) GROUP BY label ORDER BY min(id)"
            return dict(cursor.execute(query, (list(self.damaged),)).fetchall())

    def label_sizes(self) -> dict[int, int]:
        with self.connections.reading() as cursor:
            facts = self._check_new_rows(cursor)
            state = f"{facts.next_id} {facts.changes} {len(self.damaged)}"
            if self._label_sizes[0] != state:
                per_label = f"SELECT count(*) AS size FROM {self.table} WHERE id <> ALL(%s) GROUP BY label"
                query = f"SELECT size, count(*) FROM ({per_label}) AS per_label GROUP BY size ORDER BY size"
                self._label_sizes = state, dict(cursor.execute(query, (list(self.damaged),)).fetchall())
            return self._label_sizes[1]

    def counts_of(self, labels: Sequence[str]) -> dict[str, int]:
        with self.connections.reading() as cursor:
            query = f"SELECT label, count(*) FROM {self.table} WHERE label = ANY(%s) GROUP BY label"
            return dict(cursor.execute(query, (list(labels),)).fetchall())

    def scan(self) -> Iterator[Row]:
        last, query = 0, f"SELECT {COLUMNS} FROM {self.table} WHERE id > %s ORDER BY id LIMIT {BATCH}"
        while True:
            with self.connections.reading() as cursor:
                rows, damaged = read_rows(cursor.execute(query, (last,)))
                self._exclude(damaged)
            yield from rows
            if len(rows) + len(damaged) < BATCH:
                return
            last = max([row.id for row in rows] + list(damaged))

    # --- searching

    def _choose_search(self, cursor: Any, facts: Facts, k: int, where: str, values: list[Any]) -> None:
        """Exact, or by the index: not where a filter leaves so few rows that comparing each of them is fast enough.

        With a filter the index is searched twice as deep, and on until enough rows pass.
        """
        by_index = "hnsw" in facts.beyond
        if by_index and where:
            passing = f"SELECT 1 FROM {self.table} WHERE {where} LIMIT {hnsw.EXACT + 1}"
            query = f"SELECT count(*) FROM ({passing}) AS passing"
            by_index = cursor.execute(query, values).fetchone()[0] > hnsw.EXACT
        depth = max(int(facts.beyond["hnsw"]["depth"]) * (1 + bool(where)), k + SPARE) if by_index else None
        _use_index(cursor, depth)

    def _nearest(self, cursor: Any, query: Floats, k: int, where: str, values: list[Any]) -> list[tuple[Row, float]]:
        """The k nearest. More and more rows are proposed until the last one is too far to be among them."""
        count, slack = k + SPARE, 8 * len(query) * float(np.finfo(np.float32).eps)
        text = "[" + ",".join(f"{number:.9g}" for number in query.tolist()) + "]"
        while True:
            damaged = list(self.damaged)
            conditions = " AND ".join([*([where] if where else []), *(["id <> ALL(%s)"] if damaged else [])])
            inner = (
                f"SELECT id FROM {self.table} {'WHERE ' + conditions if conditions else ''}"
                " ORDER BY vector <#> %s::vector, id LIMIT %s"
            )
            # The bytes of a vector are only selected for near rows: PostgreSQL would make them of all.
            parameters = [*values, *([damaged] if damaged else []), text, count]
            ids = [i for (i,) in cursor.execute(inner, parameters).fetchall()]
            rows, newly_damaged = self.fetch(cursor, ids)
            if newly_damaged:
                self._exclude(newly_damaged)
                continue
            near = list(rows.values())
            score = similarities(schema.unpack([row.vector for row in near], len(query)), query)
            order = np.lexsort((np.array([row.id for row in near], np.int64), -score))[:k]
            if len(near) < count or score[order[-1]] - score.min() > slack:
                return [(near[i], float(score[i])) for i in order]
            count *= 2

    # --- damage

    def _check_new_rows(self, cursor: Any) -> Facts:
        """The server verifies the checksum of every row before it is first searched, and the number of rows."""
        facts = self.read_facts(cursor)
        if facts is None:
            raise ValueError(f"{self.where}: no such gallery")
        state = (facts.next_id, facts.rows, facts.changes)
        if state == self._state:
            return facts
        query = f"SELECT id FROM {self.table} WHERE id >= %s AND sum <> {CHECKSUM}"
        self._exclude({i: "not as it was written" for (i,) in cursor.execute(query, (self._checked_ids,)).fetchall()})
        query = f"SELECT id FROM {self.table} WHERE id = ANY(%s)"
        present = {i for (i,) in cursor.execute(query, (list(self.damaged),))}
        self.damaged = {i: why for i, why in self.damaged.items() if i in present}
        count = cursor.execute(f"SELECT count(*) FROM {self.table}").fetchone()[0]
        if facts.rows - count != self.lost:
            self.lost = facts.rows - count
            if self.lost:
                warn_lost(self.where, self.lost)
        self._checked_ids, self._state = facts.next_id, state
        return facts

    def _exclude(self, damaged: dict[int, str]) -> None:
        new = {i: why for i, why in damaged.items() if i not in self.damaged}
        self.damaged |= new
        if new:
            warn_damaged(self.where, list(new))

    def check(self, progress: Callable[[int, int], None] | None = None) -> Report:
        with self.connections.reading() as cursor:
            facts = self.read_facts(cursor)
            if facts is None:
                raise ValueError(f"{self.where}: no such gallery")
            count = cursor.execute(f"SELECT count(*) FROM {self.table}").fetchone()[0]
            wrong = cursor.execute(f"SELECT id FROM {self.table} WHERE sum <> {CHECKSUM} ORDER BY id").fetchall()
            bad = {i: "not as it was written" for (i,) in wrong}
            query = f"SELECT count(*) FROM {self.schema}.thumbnails WHERE sum <> {THUMBNAIL_CHECKSUM}"
            thumbnails = cursor.execute(query).fetchone()[0]
            notes = [f"{thumbnails} thumbnails are damaged"] if thumbnails else []
            copies = cursor.execute(f"SELECT DISTINCT said FROM {self.schema}.facts").fetchall()
            notes += ["one copy of the gallery's description is damaged"] if len(copies) != 1 else []
        if "hnsw" in facts.beyond and self._recall(int(facts.beyond["hnsw"]["depth"])) < hnsw.TARGET_RECALL - 0.01:
            notes.append("the index finds less than it should; nearkin gallery reindex makes it again")
        return Report(facts.rows, count - len(bad), bad, facts.rows - count, notes)

    def repair(self) -> tuple[int, Any]:
        """Moves damaged rows to another table, and counts the others again."""
        with self.transaction() as (cursor, facts):
            cursor.execute(f"CREATE TABLE IF NOT EXISTS {self.schema}.damaged (LIKE {self.table})")
            wrong = f"FROM {self.table} WHERE sum <> {CHECKSUM}"
            cursor.execute(f"INSERT INTO {self.schema}.damaged SELECT * {wrong}")
            cursor.execute(f"DELETE {wrong}")
            cursor.execute(f"DELETE FROM {self.schema}.thumbnails WHERE sum <> {THUMBNAIL_CHECKSUM}")
            count = cursor.execute(f"SELECT count(*) FROM {self.table}").fetchone()[0]
            self.write_facts(cursor, facts.replace(rows=count, changes=facts.changes + 1))
        self.damaged, self.lost, self._state = {}, 0, (-1, -1, -1)
        return int(count), f"{self.schema}.damaged"

    def migrate(self, number: int, changed: Callable[[Facts], tuple[list[str], Facts]]) -> None:
        postgres_bulk.migrate(self, number, changed)

    def vacuum(self) -> tuple[int, int]:
        return postgres_bulk.vacuum(self)

    @contextmanager
    def snapshot(self) -> Iterator[postgres_bulk.PostgresSnapshot]:
        with self.connections.reading() as cursor:
            facts = self.read_facts(cursor)
            if facts is None:
                raise ValueError(f"{self.where}: no such gallery")
            yield postgres_bulk.PostgresSnapshot(cursor, self.schema, facts)

    def load(self, facts: Facts, overwrite: bool) -> AbstractContextManager[Loader]:
        return postgres_bulk.load(self, facts, overwrite)

    # --- the search index

    def warm(self, progress: Callable[[int, int], None] | None = None) -> None:
        with self.connections.reading() as cursor:
            facts = self._check_new_rows(cursor)
            index = f"{self.schema}.items_near"
            query = "SELECT coalesce((SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass(%s)), false)"
            valid = cursor.execute(query, (index,)).fetchone()[0]
        if facts.rows <= hnsw.EXACT:
            self.index_state = f"exact, up to {hnsw.EXACT:,} rows"
        elif facts.dim > MAX_INDEXED_DIM:
            self.index_state = f"exact: pgvector's HNSW takes up to {MAX_INDEXED_DIM:,} dimensions"
        elif not valid or "hnsw" not in facts.beyond:
            self.reindex(progress)
        else:
            self.index_state = f"HNSW, recall@10 {facts.beyond['hnsw']['recall']:.3f} when it was built"

    def reindex(self, progress: Callable[[int, int], None] | None = None) -> None:
        with self.transaction() as (cursor, facts):
            cursor.execute(f"DROP INDEX IF EXISTS {self.schema}.items_near")
            self.write_facts(cursor, facts.replace(beyond={}))
            if facts.rows <= hnsw.EXACT or facts.dim > MAX_INDEXED_DIM:
                self.index_state = "exact"
                return
            cursor.execute("SELECT set_config('maintenance_work_mem', '1GB', true)")
            settings = f"WITH (m = 16, ef_construction = {hnsw.WIDTH})"
            cursor.execute(f"CREATE INDEX items_near ON {self.table} USING hnsw (vector vector_ip_ops) {settings}")
        for depth in DEPTHS:
            recall = self._recall(depth)
            if recall >= hnsw.TARGET_RECALL:
                break
        else:
            self.index_state = f"exact: HNSW stays below a recall@10 of {hnsw.TARGET_RECALL} among these rows"
            return
        with self.transaction() as (cursor, facts):
            self.write_facts(cursor, facts.replace(beyond={"hnsw": {"depth": depth, "recall": recall}}))
        self.index_state = f"HNSW, recall@10 {recall:.3f} when it was built"

    def _recall(self, depth: int) -> float:
        """recall@10 of the index against exact search, on queries near some of the rows."""
        with self.connections.reading() as cursor:
            rows, _ = read_rows(cursor.execute(f"SELECT {COLUMNS} FROM {self.table} WHERE id %% 997 = 1 LIMIT 100", ()))
            if not rows:
                return 1.0
            vectors = schema.unpack([row.vector for row in rows], len(rows[0].vector) // 4)
            noise = np.random.default_rng(0).normal(size=vectors.shape) / vectors.shape[1] ** 0.5
            queries, ids = schema.unit(vectors + 0.3 * noise), []
            for by_index in (None, depth):
                _use_index(cursor, by_index)
                hits = [self._nearest(cursor, query, 10, "", []) for query in queries]
                ids.append([{row.id for row, _ in one} for one in hits])
        return sum(len(exact & near) for exact, near in zip(*ids, strict=True)) / sum(map(len, ids[0]))

    # --- PostgreSQL

    @contextmanager
    def transaction(self) -> Iterator[tuple[Any, Facts]]:
        with self.connections.writing(self.schema) as cursor:
            facts = self.read_facts(cursor)
            if facts is None:
                raise ValueError(f"{self.where}: no such gallery")
            yield cursor, facts

    def read_facts(self, cursor: Any) -> Facts | None:
        if cursor.execute("SELECT to_regclass(%s)", (f"{self.schema}.facts",)).fetchone()[0] is None:
            return None
        copies = cursor.execute(f"SELECT said, sum FROM {self.schema}.facts ORDER BY copy").fetchall()
        facts = schema.read_facts(self.where, copies)
        self.fingerprint = facts.fingerprint
        return facts

    def write_facts(self, cursor: Any, facts: Facts, schema: str = "") -> None:
        insert = f"INSERT INTO {schema or self.schema}.facts VALUES (%s, %s, %s)"
        insert += " ON CONFLICT (copy) DO UPDATE SET said = excluded.said, sum = excluded.sum"
        for copy in (1, 2):
            cursor.execute(insert, (copy, *facts.serialized()))

    def _look_up(self, cursor: Any, contents: Sequence[bytes]) -> KnownRows:
        query = f"SELECT content, id, label FROM {self.table} WHERE content = ANY(%s)"
        return {content: (i, label) for content, i, label in cursor.execute(query, (list(contents),)).fetchall()}

    def fetch(self, cursor: Any, ids: Sequence[int]) -> tuple[dict[int, Row], dict[int, str]]:
        query = f"SELECT {COLUMNS} FROM {self.table} WHERE id = ANY(%s)"
        rows, damaged = read_rows(cursor.execute(query, (list(ids),)))
        return {row.id: row for row in rows}, damaged


def read_rows(cursor: Any) -> tuple[list[Row], dict[int, str]]:
    """Rows that match their checksum, vectors without pgvector's head of 4 bytes, and what is wrong with the others."""
    rows, damaged = [], {}
    for id, content, label, name, metadata, vector, total in cursor.fetchall():
        row = Row(id, content, label, name, metadata, vector[4:])
        try:
            difference = "" if schema.checksum(*row) == total else "not as it was written"
        except Exception as error:  # a number beyond its range
            difference = f"not as it was written ({type(error).__name__})"
        if difference:
            damaged[id] = difference
        else:
            rows.append(row)
    return rows, damaged


def _where_clause(filter: Filter | None) -> tuple[str, list[Any]]:
    """A filter as SQL, and its values."""
    parts: list[str] = []
    values: list[Any] = []
    if filter is not None and filter.labels is not None:
        parts.append("label = ANY(%s)")
        values.append(list(filter.labels))
    for key, allowed in filter.keys.items() if filter is not None else ():
        parts.append("metadata::jsonb -> %s = ANY(%s::jsonb[])")
        values += [key, list(allowed)]
    return " AND ".join(parts), values


def _use_index(cursor: Any, depth: int | None) -> None:
    """For the rest of the transaction; None: exact search, without an index on the vectors."""
    cursor.execute("SELECT set_config('enable_indexscan', %s, true)", ("off" if depth is None else "on",))
    if depth is not None:
        cursor.execute("SELECT set_config('enable_seqscan', 'off', true)")
        cursor.execute("SELECT set_config('hnsw.ef_search', %s, true)", (str(min(depth, DEPTHS[-1])),))
        cursor.execute("SELECT set_config('hnsw.iterative_scan', 'strict_order', true)")
    else:
        cursor.execute("SELECT set_config('enable_seqscan', 'on', true)")
