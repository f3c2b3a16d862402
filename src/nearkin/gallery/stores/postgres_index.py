"""Builds the index of a gallery in PostgreSQL, without blocking readers or writers.

Segments: a partial HNSW per range of ids, so that enrolment never waits for it. New rows get a segment of their own,
which takes in older ones as long as these have less than four times as many rows. Every index is built CONCURRENTLY;
one that was not finished is recognised as invalid and dropped, one that was finished after its client's end is used.
"""

import json
import re
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from nearkin.core.errors import TablesExchanged
from nearkin.gallery.schema import Facts
from nearkin.gallery.stores import hnsw, postgres_filters, postgres_recall
from nearkin.gallery.stores.postgres_filters import Part
from nearkin.gallery.stores.postgres_search import IndexFacts, between

if TYPE_CHECKING:
    from nearkin.gallery.stores.postgres import PostgresStore

__all__ = ["EXACT", "build", "drop_all", "exact_rows", "is_current", "state"]

EXACT = 10_000  # rows up to which every search compares all of them; newer rows that wait for a segment
LINKS, WIDTH = 24, 100  # of HNSW: links per row, candidates while building
GROWTH = 4  # a segment takes in an older one with up to so many times its rows
KEYS = "filter_keys"  # of the gallery's description: those whose values have indexes of their own
POLL = 0.5  # seconds between two looks at the progress
LEAST_MEMORY, MOST_MEMORY = 64, 2048  # MiB of maintenance_work_mem; more where the server has more
TERMS_INDEX = "items_terms"
BUILD = {
    "half": "((vector::halfvec({dim})) halfvec_ip_ops)",
    "bit": "((binary_quantize(vector)::bit({dim})) bit_hamming_ops)",
}
# A hash per key and plain value of the metadata: equal values have equal hashes, 1 and 1.0 too.
TERMS = """CREATE OR REPLACE FUNCTION {schema}.terms(metadata text) RETURNS bigint[]
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS $$
    SELECT coalesce(array_agg(hashtextextended(key || E'\\n' || CASE jsonb_typeof(value)
        WHEN 'number' THEN trim_scale(value::numeric)::text ELSE value::text END, 0)), '{{}}')
    FROM jsonb_each(metadata::jsonb) WHERE jsonb_typeof(value) NOT IN ('object', 'array')
$$"""
TABLES = "SELECT to_regnamespace(%s)::oid"
Progress = Callable[[int, int], None]


def exact_rows() -> int:
    """Rows up to which every search is exact."""
    return min(EXACT, hnsw.EXACT)


def state(facts: Facts) -> str:
    """How a gallery is searched, in words."""
    index, stored = IndexFacts.of(facts), facts.beyond.get("hnsw", {})
    if index is not None:
        keys = ", ".join(facts.beyond.get(KEYS, []))
        return f"HNSW, recall@10 {index.recall:.3f} when it was built" + (
            f"; also for filters by {keys}" if keys else ""
        )
    if facts.rows <= exact_rows():
        return f"exact, up to {exact_rows():,} rows"
    if "too_low" in stored:
        return f"exact: HNSW stays below a recall@10 of {hnsw.TARGET_RECALL} among these rows ({stored['too_low']:.3f})"
    return "exact, until it is warmed (nearkin enrol, reindex and serve do)"


def is_current(cursor: Any, store: "PostgresStore", facts: Facts) -> bool:
    """Whether no segment is missing, unfinished or due."""
    indexes, index, stored = _indexes(cursor, store.schema), IndexFacts.of(facts), facts.beyond.get("hnsw", {})
    if index is None and "too_low" in stored:
        return bool(facts.rows <= 2 * stored["rows"]) and all(indexes.values())
    bounds = (1,) if index is None else index.bounds
    present = all(indexes.values()) and set(_own_names(stored)) <= set(indexes)
    return present and bounds == _chain(indexes) == _wanted(facts, bounds)


def build(
    store: "PostgresStore", progress: Progress | None = None, anew: bool = False, keys: Sequence[str] | None = None
) -> None:
    """Brings the index up to date; anew: one segment, built again. Where another process builds it, that one goes on.

    keys: whose values get indexes of their own from now on; None: as before. An interruption cancels the server's work
    and leaves the index as it was.
    """
    with store.connections.building(f"{store.schema}:index") as connection:
        if connection is None:
            return
        with store.connections.reading() as cursor:
            facts = store.existing_facts(cursor)
        tables = connection.execute(TABLES, (store.schema,)).fetchone()
        keys = facts.beyond.get(KEYS, []) if keys is None else keys
        indexes = _dropped(connection, store.schema, lambda _, sound: not sound)
        bounds = _wanted(facts, (1,) if anew else _chain(indexes))
        if len(bounds) > 1:
            _make_terms(connection, store.schema, indexes, anew)
        ranges = [Part(first, end, "", "", end - first) for first, end in pairwise(bounds)]
        parts = postgres_filters.wanted(connection, store.table, keys, bounds)
        due = [one for one in [*ranges, *parts] if anew or _part_name(one) not in indexes]
        builder = _Builder(store, connection, facts, sum(one.rows for one in due), progress)
        for one in due:
            builder.make(one, _part_name(one) in indexes)
        measured = {}
        if len(bounds) > 1:
            connection.execute(f"ANALYZE {store.table}")
            measured = postgres_recall.measured(store, facts, bounds, parts)
        with store.transaction() as (cursor, now):
            if cursor.execute(TABLES, (store.schema,)).fetchone() != tables:
                raise TablesExchanged(store.where)  # the index is that of the tables before
            others = {key: value for key, value in now.beyond.items() if key not in ("hnsw", KEYS)}
            others |= {KEYS: list(keys)} if keys else {}
            store.write_facts(cursor, now.replace(beyond=others | ({"hnsw": measured} if measured else {})))
        used = [TERMS_INDEX, *(_name(*one) for one in pairwise(measured.get("bounds", ()))), *_own_names(measured)]
        _dropped(connection, store.schema, lambda name, _: name not in used)


def _part_name(part: Part) -> str:
    return part.name if part.key else _name(part.first, part.end)


def _own_names(stored: dict[str, Any]) -> list[str]:
    """Of the indexes of filters that the gallery's description has."""
    own = stored.get("own", {}).items()
    return [postgres_filters.name_of(*one, *json.loads(slot)) for slot, has in own for one in has["segments"]]


def _name(first: int, end: int) -> str:
    return f"items_near_{first}_{end}"


def _indexes(cursor: Any, gallery_schema: str) -> dict[str, bool]:
    """Those that `build` makes, by name, and whether they are finished."""
    query = (
        "SELECT c.relname, i.indisvalid FROM pg_index AS i JOIN pg_class AS c ON c.oid = i.indexrelid"
        " JOIN pg_am AS a ON a.oid = c.relam WHERE i.indrelid = to_regclass(%s) AND a.amname IN ('hnsw', 'gin')"
    )
    return dict(cursor.execute(query, (f"{gallery_schema}.items",)).fetchall())


def _dropped(connection: Any, gallery_schema: str, which: Callable[[str, bool], bool]) -> dict[str, bool]:
    """The indexes that are left."""
    indexes = _indexes(connection, gallery_schema)
    for name in [name for name, sound in indexes.items() if which(name, sound)]:
        connection.execute(f'DROP INDEX CONCURRENTLY IF EXISTS {gallery_schema}."{name}"')
        del indexes[name]
    return indexes


def drop_all(cursor: Any, gallery_schema: str) -> None:
    """Of a copy of the table, within a transaction."""
    for name in _indexes(cursor, gallery_schema):
        cursor.execute(f'DROP INDEX {gallery_schema}."{name}"')


def _chain(indexes: dict[str, bool]) -> tuple[int, ...]:
    """The bounds of finished segments that follow one another from id 1 on."""
    names = (re.fullmatch(r"items_near_(\d+)_(\d+)", name) for name, sound in indexes.items() if sound)
    pairs = sorted((int(name[1]), int(name[2])) for name in names if name)
    bounds = [1]
    while ends := [end for first, end in pairs if first == bounds[-1] < end]:
        bounds.append(max(ends))
    return tuple(bounds)


def _wanted(facts: Facts, bounds: tuple[int, ...]) -> tuple[int, ...]:
    """The bounds with a segment for newer rows, where these are many."""
    if facts.rows <= exact_rows():
        return (1,)
    first, end = bounds[-1], facts.next_id
    if end - first <= exact_rows():
        return bounds
    older = list(bounds[:-1])
    while older and first - older[-1] < GROWTH * (end - first):
        first = older.pop()
    return (*older, first, end)


def _make_terms(connection: Any, gallery_schema: str, indexes: dict[str, bool], anew: bool) -> None:
    if TERMS_INDEX not in indexes:
        connection.execute(TERMS.format(schema=gallery_schema))
        items = f"{gallery_schema}.items USING gin ({gallery_schema}.terms(metadata))"
        connection.execute(f"CREATE INDEX CONCURRENTLY {TERMS_INDEX} ON {items}")
    elif anew:
        connection.execute(f"REINDEX INDEX CONCURRENTLY {gallery_schema}.{TERMS_INDEX}")


class _Builder:
    """Builds segments on a connection of its own, in a thread, while this one reports the progress."""

    def __init__(
        self, store: "PostgresStore", connection: Any, facts: Facts, total: int, progress: Progress | None
    ) -> None:
        self._store, self._connection, self._dim = store, connection, facts.dim
        self._done, self._total, self._progress = 0, total, progress
        self.form = postgres_recall.form_of(facts.dim)

    def make(self, part: Part, again: bool) -> None:
        """again: it exists, and serves until the new one is finished."""
        connection, name = self._connection, _part_name(part)
        self._set_memory(part.rows)
        if again:
            statement = f"REINDEX INDEX CONCURRENTLY {self._store.schema}.{name}"
        else:
            what = f"{self._store.table} USING hnsw {BUILD[self.form].format(dim=self._dim)}"
            where = between(part.first, part.end)
            where += f" AND {postgres_filters.clause(part.key, part.value)}" if part.key else ""
            settings = f"WITH (m = {LINKS}, ef_construction = {WIDTH})"
            statement = f"CREATE INDEX CONCURRENTLY {name} ON {what} {settings} WHERE {where}"
        try:
            self._run(statement, part.rows)
        except self._store.connections.psycopg.errors.DiskFull:  # of /dev/shm, which is small in a container
            _dropped(connection, self._store.schema, lambda _, sound: not sound)
            connection.execute("SET max_parallel_maintenance_workers = 0")
            self._run(statement, part.rows)
        self._done += part.rows

    def _set_memory(self, rows: int) -> None:
        """The graph must fit, or building takes many times as long."""
        needed = rows * (2 * self._dim + 1200) // 2**20 + LEAST_MEMORY
        query = "SELECT set_config('maintenance_work_mem', greatest(pg_size_bytes(current_setting("
        query += "'maintenance_work_mem')) / 1024, %s)::text || 'kB', false)"
        self._connection.execute(query, (min(needed, MOST_MEMORY) * 1024,))

    def _run(self, statement: str, rows: int) -> None:
        failed: list[BaseException] = []

        def work() -> None:
            try:
                self._connection.execute(statement)
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        try:
            while thread.is_alive():
                thread.join(POLL)
                self._report(rows)
        except BaseException:
            self._connection.cancel()
            thread.join()
            _dropped(self._connection, self._store.schema, lambda _, sound: not sound)
            raise
        if failed:
            raise failed[0]

    def _report(self, rows: int) -> None:
        if self._progress is None:
            return
        query = "SELECT phase, blocks_done, blocks_total FROM pg_stat_progress_create_index WHERE pid = %s"
        with self._store.connections.reading() as cursor:
            line = cursor.execute(query, (self._connection.info.backend_pid,)).fetchone()
        if line is not None and line[0].startswith("building index") and line[2]:
            self._progress(self._done + rows * line[1] // line[2], self._total)
