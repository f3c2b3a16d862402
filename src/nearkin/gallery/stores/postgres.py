"""The gallery in PostgreSQL with pgvector: the same rows, the same answers; the server searches.

The tables stand in a schema of their own, nearkin_NAME, so that a database may hold several galleries. Each writing
call is one transaction under an advisory lock: one writer at a time. Up to 100,000 rows every search is exact; beyond,
once `reindex` has made it, pgvector's HNSW proposes. What is returned is proved by its checksum and scored in float64.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from nearkin.gallery import facts as facts_of
from nearkin.gallery.facts import Facts
from nearkin.gallery.schema import Fields, Filter, Floats, Row, checksum, picture_checksum
from nearkin.gallery.stores import hnsw as graphs
from nearkin.gallery.stores import postgres_search as search
from nearkin.gallery.stores.contract import Added, Report, merged, planned, said_damaged, said_lost
from nearkin.gallery.stores.postgres_link import Link, vector, whole

__all__ = ["PostgresStore"]

LOADED = 4096
WIDEST = 16_000  # dimensions of pgvector's type
OLDEST = (0, 8)  # of pgvector: searches on where a filter lets few pass
INDEXED = 2_000  # dimensions its HNSW takes
# The checksum of `rows.checksum`, computed where the rows are.
SUM = (
    "substring(sha256(int8send(id) || int4send(octet_length(label)) || int4send(octet_length(name)) ||"
    " int4send(octet_length(metadata)) || convert_to(label, 'UTF8') || convert_to(name, 'UTF8') ||"
    " convert_to(metadata, 'UTF8') || content || vector_send(vector)) from 1 for 8)"
)


class PostgresStore:
    """See `store.Store`, which says what each method does."""

    kind = "postgres"

    def __init__(self, url: str, timeout: float) -> None:
        self.link = Link(url, timeout)
        self.where, self.schema = self.link.where, f"nearkin_{self.link.name}"
        self.table = f"{self.schema}.items"
        self.damaged: dict[int, str] = {}
        self.lost = 0
        self.index_state = ""
        self._proved, self._state = 0, (-1, -1, -1)
        self._counted: tuple[str, dict[int, int]] = "", {}

    # --- opening

    def facts(self) -> Facts | None:
        with self.link.asking() as cursor:
            return self._read_facts(cursor)

    def create(self, facts: Facts) -> None:
        if facts.dim > WIDEST:
            raise ValueError(f"{self.where}: pgvector keeps up to {WIDEST:,} dimensions, got {facts.dim:,}")
        with self.link.locked(self.schema) as cursor:
            if self._read_facts(cursor) is not None:
                return
            for statement in (
                "CREATE EXTENSION IF NOT EXISTS vector",
                f"CREATE SCHEMA IF NOT EXISTS {self.schema}",
                f"CREATE TABLE {self.schema}.facts (copy int PRIMARY KEY, said text NOT NULL, sum bytea NOT NULL)",
                f"CREATE TABLE {self.table} (id bigint PRIMARY KEY, content bytea NOT NULL UNIQUE,"
                " label text NOT NULL, name text NOT NULL, metadata text NOT NULL,"
                f" vector vector({facts.dim}) NOT NULL, sum bytea NOT NULL)",
                f"CREATE INDEX items_label ON {self.table} (label)",
                f"CREATE TABLE {self.schema}.thumbnails (id bigint PRIMARY KEY, bytes bytea NOT NULL,"
                " sum bytea NOT NULL)",
            ):
                cursor.execute(statement)
            found = cursor.execute("SELECT extversion FROM pg_extension WHERE extname = 'vector'").fetchone()[0]
            if tuple(map(int, found.split(".")[:2])) < OLDEST:
                raise ValueError(f"{self.where}: needs pgvector {'.'.join(map(str, OLDEST))} or newer, got {found}")
            self._write_facts(cursor, facts)

    def close(self) -> None:
        self.link.close()

    # --- writing

    def known(self, contents: Sequence[bytes]) -> dict[bytes, tuple[int, str]]:
        with self.link.asking() as cursor:
            return self._known(cursor, contents)

    def add(self, rows: Sequence[Fields], keep: bool, sources: Sequence[str] = ()) -> list[Added]:
        with self.transaction() as (cursor, facts):
            there = self._known(cursor, [row.content for row in rows])
            plan = planned(rows, there, facts.next_id, keep)
            self.link.copy(
                cursor, self.table, [(whole(i), *texts, vector(v), total) for i, *texts, v, total in plan.items]
            )
            self.link.copy(cursor, f"{self.schema}.thumbnails", [(whole(i), *rest) for i, *rest in plan.thumbnails])
            known = merged(facts.sources, sources)
            if plan.items or known != facts.sources:
                count = facts.rows + len(plan.items)
                self._write_facts(cursor, facts.but(next_id=plan.next_id, rows=count, sources=known))
        return plan.added

    def remove(self, ids: Sequence[int]) -> int:
        with self.transaction() as (cursor, facts):
            cursor.execute(f"DELETE FROM {self.table} WHERE id = ANY(%s)", (list(ids),))
            gone: int = cursor.rowcount
            cursor.execute(f"DELETE FROM {self.schema}.thumbnails WHERE id = ANY(%s)", (list(ids),))
            if gone:
                self._write_facts(cursor, facts.but(rows=facts.rows - gone, changes=facts.changes + gone))
        return gone

    def relabel(self, ids: Sequence[int], label: str) -> int:
        with self.transaction() as (cursor, facts):
            rows, _ = self._fetch(cursor, ids)
            update = f"UPDATE {self.table} SET label = %s, sum = %s WHERE id = %s"
            for row in rows.values():
                cursor.execute(update, (label, checksum(*row._replace(label=label)), row.id))
            if rows:
                self._write_facts(cursor, facts.but(changes=facts.changes + len(rows)))
        return len(rows)

    def adopt(self, fingerprint: str, run: str) -> None:
        with self.transaction() as (cursor, facts):
            if facts.rows == 0 and facts.fingerprint is None:
                self._write_facts(cursor, facts.but(fingerprint=fingerprint, run=run))

    # --- reading

    def nearest(self, query: Floats, k: int, filter: Filter | None) -> list[tuple[Row, float]]:
        where, values = search.condition(filter)
        with self.link.asking() as cursor:
            facts = self._prove(cursor)
            search.choose_road(cursor, self.table, facts, k, where, values)
            return search.rank(cursor, self.table, query, k, where, values, self.damaged, self._put_aside)

    def rows(self, ids: Sequence[int]) -> dict[int, Row]:
        with self.link.asking() as cursor:
            rows, bad = self._fetch(cursor, ids)
            self._put_aside(bad)
            return rows

    def thumbnail(self, id: int) -> bytes:
        with self.link.asking() as cursor:
            found = cursor.execute(f"SELECT bytes, sum FROM {self.schema}.thumbnails WHERE id = %s", (id,)).fetchone()
        if found is None or picture_checksum(id, found[0]) != found[1]:
            return b""
        return bytes(found[0])

    def counts(self) -> dict[str, int]:
        with self.link.asking() as cursor:
            self._prove(cursor)
            query = f"SELECT label, count(*) FROM {self.table} WHERE id <> ALL(%s) GROUP BY label ORDER BY min(id)"
            return dict(cursor.execute(query, (list(self.damaged),)).fetchall())

    def sizes(self) -> dict[int, int]:
        with self.link.asking() as cursor:
            facts = self._prove(cursor)
            state = f"{facts.next_id} {facts.changes} {len(self.damaged)}"
            if self._counted[0] != state:
                each = f"SELECT count(*) AS size FROM {self.table} WHERE id <> ALL(%s) GROUP BY label"
                query = f"SELECT size, count(*) FROM ({each}) AS each GROUP BY size"
                self._counted = state, dict(cursor.execute(query, (list(self.damaged),)).fetchall())
            return self._counted[1]

    def examples(self, labels: Sequence[str]) -> dict[str, int]:
        with self.link.asking() as cursor:
            query = f"SELECT label, count(*) FROM {self.table} WHERE label = ANY(%s) GROUP BY label"
            return dict(cursor.execute(query, (list(labels),)).fetchall())

    def scan(self) -> Iterator[Row]:
        last, query = 0, f"SELECT {search.COLUMNS} FROM {self.table} WHERE id > %s ORDER BY id LIMIT {LOADED}"
        while True:
            with self.link.asking() as cursor:
                rows, bad = search.read(cursor.execute(query, (last,)))
                self._put_aside(bad)
            yield from rows
            if len(rows) + len(bad) < LOADED:
                return
            last = max([row.id for row in rows] + list(bad))

    # --- is it whole

    def _prove(self, cursor: Any) -> Facts:
        """Every row is checked by the server before it is first searched; counts must be right."""
        facts = self._read_facts(cursor)
        if facts is None:
            raise ValueError(f"{self.where}: no such gallery")
        state = (facts.next_id, facts.rows, facts.changes)
        if state == self._state:
            return facts
        query = f"SELECT id FROM {self.table} WHERE id >= %s AND sum <> {SUM}"
        self._put_aside({i: "not as it was written" for (i,) in cursor.execute(query, (self._proved,)).fetchall()})
        there = {i for (i,) in cursor.execute(f"SELECT id FROM {self.table} WHERE id = ANY(%s)", (list(self.damaged),))}
        self.damaged = {i: why for i, why in self.damaged.items() if i in there}
        count = cursor.execute(f"SELECT count(*) FROM {self.table}").fetchone()[0]
        if facts.rows - count != self.lost:
            self.lost = facts.rows - count
            if self.lost:
                said_lost(self.where, self.lost)
        self._proved, self._state = facts.next_id, state
        return facts

    def _put_aside(self, bad: dict[int, str]) -> None:
        new = {i: why for i, why in bad.items() if i not in self.damaged}
        self.damaged |= new
        if new:
            said_damaged(self.where, list(new))

    def check(self, progress: Callable[[int, int], None] | None = None) -> Report:
        with self.link.asking() as cursor:
            facts = self._read_facts(cursor)
            if facts is None:
                raise ValueError(f"{self.where}: no such gallery")
            count = cursor.execute(f"SELECT count(*) FROM {self.table}").fetchone()[0]
            wrong = cursor.execute(f"SELECT id FROM {self.table} WHERE sum <> {SUM} ORDER BY id").fetchall()
            bad = {i: "not as it was written" for (i,) in wrong}
            whole = "substring(sha256(int8send(id) || bytes) from 1 for 8)"
            torn = cursor.execute(f"SELECT count(*) FROM {self.schema}.thumbnails WHERE sum <> {whole}").fetchone()[0]
            notes = [f"{torn} thumbnails are damaged"] if torn else []
            copies = cursor.execute(f"SELECT DISTINCT said FROM {self.schema}.facts").fetchall()
            notes += ["one copy of what the gallery says of itself is damaged"] if len(copies) != 1 else []
        if "hnsw" in facts.beyond and self._recall(int(facts.beyond["hnsw"]["depth"])) < graphs.WANTED - 0.01:
            notes.append("the index finds less than it should; nearkin gallery reindex makes it again")
        return Report(facts.rows, count - len(bad), bad, facts.rows - count, notes)

    def repair(self) -> tuple[int, Any]:
        """Damaged rows go to a table beside; what is left is counted again."""
        with self.transaction() as (cursor, facts):
            cursor.execute(f"CREATE TABLE IF NOT EXISTS {self.schema}.damaged (LIKE {self.table})")
            wrong = f"FROM {self.table} WHERE sum <> {SUM}"
            cursor.execute(f"INSERT INTO {self.schema}.damaged SELECT * {wrong}")
            cursor.execute(f"DELETE {wrong}")
            torn = "sum <> substring(sha256(int8send(id) || bytes) from 1 for 8)"
            cursor.execute(f"DELETE FROM {self.schema}.thumbnails WHERE {torn}")
            count = cursor.execute(f"SELECT count(*) FROM {self.table}").fetchone()[0]
            self._write_facts(cursor, facts.but(rows=count, changes=facts.changes + 1))
        self.damaged, self.lost, self._state = {}, 0, (-1, -1, -1)
        return int(count), f"{self.schema}.damaged"

    # --- the search index

    def warm(self, progress: Callable[[int, int], None] | None = None) -> None:
        with self.link.asking() as cursor:
            facts = self._prove(cursor)
            index = f"{self.schema}.items_near"
            query = "SELECT coalesce((SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass(%s)), false)"
            there = cursor.execute(query, (index,)).fetchone()[0]
        if facts.rows <= graphs.EXACT:
            self.index_state = f"exact, up to {graphs.EXACT:,} rows"
        elif facts.dim > INDEXED:
            self.index_state = f"exact: pgvector's HNSW takes up to {INDEXED:,} dimensions"
        elif not there or "hnsw" not in facts.beyond:
            self.reindex(progress)
        else:
            self.index_state = f"HNSW, recall@10 {facts.beyond['hnsw']['recall']:.3f} when it was built"

    def reindex(self, progress: Callable[[int, int], None] | None = None) -> None:
        with self.transaction() as (cursor, facts):
            cursor.execute(f"DROP INDEX IF EXISTS {self.schema}.items_near")
            self._write_facts(cursor, facts.but(beyond={}))
            if facts.rows <= graphs.EXACT or facts.dim > INDEXED:
                self.index_state = "exact"
                return
            cursor.execute("SELECT set_config('maintenance_work_mem', '1GB', true)")
            settings = f"WITH (m = 16, ef_construction = {graphs.WIDTH})"
            on = f"{self.table} USING hnsw (vector vector_ip_ops) {settings}"
            cursor.execute(f"CREATE INDEX items_near ON {on}")
        for depth in search.DEPTHS:
            recall = self._recall(depth)
            if recall >= graphs.WANTED:
                break
        else:
            self.index_state = f"exact: HNSW stays below a recall@10 of {graphs.WANTED} among these rows"
            return
        with self.transaction() as (cursor, facts):
            self._write_facts(cursor, facts.but(beyond={"hnsw": {"depth": depth, "recall": recall}}))
        self.index_state = f"HNSW, recall@10 {recall:.3f} when it was built"

    def _recall(self, depth: int) -> float:
        with self.link.asking() as cursor:
            return search.recall(cursor, self.table, depth, self.damaged)

    # --- PostgreSQL

    @contextmanager
    def transaction(self) -> Iterator[tuple[Any, Facts]]:
        with self.link.locked(self.schema) as cursor:
            facts = self._read_facts(cursor)
            if facts is None:
                raise ValueError(f"{self.where}: no such gallery")
            yield cursor, facts

    def _read_facts(self, cursor: Any) -> Facts | None:
        if cursor.execute("SELECT to_regclass(%s)", (f"{self.schema}.facts",)).fetchone()[0] is None:
            return None
        copies = cursor.execute(f"SELECT said, sum FROM {self.schema}.facts ORDER BY copy").fetchall()
        return facts_of.first_sound(self.where, copies)

    def _write_facts(self, cursor: Any, facts: Facts) -> None:
        insert = f"INSERT INTO {self.schema}.facts VALUES (%s, %s, %s)"
        insert += " ON CONFLICT (copy) DO UPDATE SET said = excluded.said, sum = excluded.sum"
        for copy in (1, 2):
            cursor.execute(insert, (copy, *facts.written()))

    def _known(self, cursor: Any, contents: Sequence[bytes]) -> dict[bytes, tuple[int, str]]:
        query = f"SELECT content, id, label FROM {self.table} WHERE content = ANY(%s)"
        return {content: (i, label) for content, i, label in cursor.execute(query, (list(contents),)).fetchall()}

    def _fetch(self, cursor: Any, ids: Sequence[int]) -> tuple[dict[int, Row], dict[int, str]]:
        query = f"SELECT {search.COLUMNS} FROM {self.table} WHERE id = ANY(%s)"
        rows, bad = search.read(cursor.execute(query, (list(ids),)))
        return {row.id: row for row in rows}, bad
