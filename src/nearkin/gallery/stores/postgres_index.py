"""Builds the index of a gallery in PostgreSQL, without blocking readers or writers.

Segments: a partial HNSW per range of ids, so that enrolment never waits for it. New rows get a segment of their own,
which takes in older ones as long as these have less than four times as many rows. Every index is built CONCURRENTLY;
one that was not finished is recognised as invalid and dropped, one that was finished after its client's end is used.
"""

import re
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nearkin.gallery import schema
from nearkin.gallery.schema import Facts, Floats
from nearkin.gallery.stores import hnsw
from nearkin.gallery.stores.postgres_search import COLUMNS, DEEPEST, IndexFacts, best, between, read_rows

if TYPE_CHECKING:
    from nearkin.gallery.stores.postgres import PostgresStore

__all__ = ["EXACT", "build", "drop_all", "exact_rows", "is_current", "measured_recall", "state"]

EXACT = 10_000  # rows up to which every search compares all of them; newer rows that wait for a segment
MAX_HALF, LINKS, WIDTH = 4_000, 24, 100  # dimensions of HNSW over halfvec; its links per row, candidates while building
DEPTHS = (40, 64, 100, 160, 250, 400, 640, DEEPEST)
GROWTH = 4  # a segment takes in an older one with up to so many times its rows
DEEP_RECALL = 0.99  # recall@100 that decides about searches with a filter
QUERIES, NOISE = 100, 0.3  # that measure recall: rows with noise
COMPARED = 8192  # rows at a time
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
Progress = Callable[[int, int], None]


def exact_rows() -> int:
    """Rows up to which every search is exact."""
    return min(EXACT, hnsw.EXACT)


def state(facts: Facts) -> str:
    """How a gallery is searched, in words."""
    index, stored = IndexFacts.of(facts), facts.beyond.get("hnsw", {})
    if index is not None:
        return f"HNSW, recall@10 {index.recall:.3f} when it was built"
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
    return all(indexes.values()) and bounds == _chain(indexes) == _wanted(facts, bounds)


def build(store: "PostgresStore", progress: Progress | None = None, anew: bool = False) -> None:
    """Brings the index up to date; anew: one segment, built again. Where another process builds it, that one goes on.

    An interruption cancels the server's work and leaves the index as it was.
    """
    with store.connections.building(f"{store.schema}:index") as connection:
        if connection is None:
            return
        with store.connections.reading() as cursor:
            facts = store.existing_facts(cursor)
        indexes = _dropped(connection, store.schema, lambda _, sound: not sound)
        bounds = _wanted(facts, (1,) if anew else _chain(indexes))
        segments = [one for one in pairwise(bounds) if anew or _name(*one) not in indexes]
        if len(bounds) > 1:
            _make_terms(connection, store.schema, indexes, anew)
        builder = _Builder(store, connection, facts, sum(end - first for first, end in segments), progress)
        for first, end in segments:
            builder.segment(first, end, _name(first, end) in indexes)
        measured = {}
        if len(bounds) > 1:
            connection.execute(f"ANALYZE {store.table}")
            measured = _measured(store, facts, bounds)
        with store.transaction() as (cursor, now):
            others = {key: value for key, value in now.beyond.items() if key != "hnsw"}
            store.write_facts(cursor, now.replace(beyond=others | ({"hnsw": measured} if measured else {})))
        used = [TERMS_INDEX, *(_name(*one) for one in pairwise(measured.get("bounds", ())))]
        _dropped(connection, store.schema, lambda name, _: name not in used)


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
        self.form = form_of(facts.dim)

    def segment(self, first: int, end: int, again: bool) -> None:
        """again: it exists, and serves until the new one is finished."""
        connection, name = self._connection, f"{self._store.schema}.{_name(first, end)}"
        self._set_memory(end - first)
        if again:
            statement = f"REINDEX INDEX CONCURRENTLY {name}"
        else:
            what = f"{self._store.table} USING hnsw {BUILD[self.form].format(dim=self._dim)}"
            settings = f"WITH (m = {LINKS}, ef_construction = {WIDTH})"
            statement = (
                f"CREATE INDEX CONCURRENTLY {_name(first, end)} ON {what} {settings} WHERE {between(first, end)}"
            )
        try:
            self._run(statement, end - first)
        except self._store.connections.psycopg.errors.DiskFull:  # of /dev/shm, which is small in a container
            _dropped(connection, self._store.schema, lambda _, sound: not sound)
            connection.execute("SET max_parallel_maintenance_workers = 0")
            self._run(statement, end - first)
        self._done += end - first

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


def form_of(dim: int) -> str:
    """halfvec where pgvector indexes so many dimensions, else signs."""
    return "half" if dim <= MAX_HALF else "bit"


# --- recall


def _measured(store: "PostgresStore", facts: Facts, bounds: tuple[int, ...]) -> dict[str, Any]:
    """What the gallery's description says of the index: with the smallest depths that reach the target recall."""
    with store.connections.reading() as cursor:
        queries = _queries(cursor, store.table, facts)
        exact = _exact_ids(cursor, store.table, queries, 100)
        index = IndexFacts(form_of(facts.dim), bounds, DEEPEST, DEEPEST, 0.0)
        for depth in DEPTHS:
            recall = _recall(cursor, store, index, queries, exact, 10, depth)
            if recall >= hnsw.TARGET_RECALL:
                break
        else:
            return {"too_low": recall, "rows": facts.rows}
        deep = (d for d in DEPTHS if d > depth and _recall(cursor, store, index, queries, exact, 100, d) >= DEEP_RECALL)
        return index._replace(depth=depth, deep=next(deep, DEEPEST), recall=recall).stored()


def measured_recall(store: "PostgresStore", facts: Facts, index: IndexFacts) -> float:
    """recall@10 of the index against float32 over all rows, on queries near some of the rows."""
    with store.connections.reading() as cursor:
        queries = _queries(cursor, store.table, facts)
        return _recall(cursor, store, index, queries, _exact_ids(cursor, store.table, queries, 10), 10, index.depth)


def _recall(
    cursor: Any, store: "PostgresStore", index: IndexFacts, queries: Floats, exact: list[list[int]], k: int, depth: int
) -> float:
    found = 0
    for query, ids in zip(queries, exact, strict=True):
        rows, _ = store.search.by_index(cursor, len(query), index, query, k + max(4, k // 4), depth)
        found += len({row.id for row, _ in best(rows, query, k)[0]} & set(ids[:k]))
    return found / max(1, sum(len(ids[:k]) for ids in exact))


def _queries(cursor: Any, table: str, facts: Facts) -> Floats:
    draw = np.random.default_rng(0)
    ids = draw.integers(1, max(2, facts.next_id), 4 * QUERIES).tolist()
    rows, _ = read_rows(cursor.execute(f"SELECT {COLUMNS} FROM {table} WHERE id = ANY(%s) LIMIT {QUERIES}", (ids,)))
    vectors = schema.unpack([row.vector for row in rows], facts.dim)
    return schema.unit(vectors + NOISE * draw.normal(size=vectors.shape) / facts.dim**0.5)


def _exact_ids(cursor: Any, table: str, queries: Floats, k: int) -> list[list[int]]:
    """Ids of the nearest rows, nearest first, from one pass over all of them."""
    ids = np.zeros((len(queries), 0), np.int64)
    score = np.zeros((len(queries), 0), np.float32)
    for some, vectors in _all_vectors(cursor, table, queries.shape[1]):
        score = np.concatenate([score, queries @ vectors.T], 1)
        ids = np.concatenate([ids, np.broadcast_to(some, (len(queries), len(some)))], 1)
        if score.shape[1] > k:
            top = np.argpartition(-score, k - 1, axis=1)[:, :k]
            score, ids = np.take_along_axis(score, top, 1), np.take_along_axis(ids, top, 1)
    order = np.argsort(-score, axis=1, kind="stable")
    nearest: list[list[int]] = np.take_along_axis(ids, order, 1).tolist()
    return nearest


def _all_vectors(cursor: Any, table: str, dim: int) -> Iterator[tuple[NDArray[np.int64], Floats]]:
    """In PostgreSQL's binary format of COPY: a head of 19 bytes, then records of one size."""
    record = np.dtype(
        [("fields", ">i2"), ("a", ">i4"), ("id", ">i8"), ("b", ">i4"), ("head", ">i4"), ("vector", ">f4", (dim,))]
    )
    waiting, first = bytearray(), True
    with cursor.copy(f"COPY (SELECT id, vector FROM {table}) TO STDOUT (FORMAT BINARY)") as copy:
        for data in copy:
            waiting += bytes(data)[19:] if first else data
            first = False
            if (count := len(waiting) // record.itemsize) >= COMPARED:
                yield _records(waiting, record, count)
                del waiting[: count * record.itemsize]
    yield _records(waiting, record, len(waiting) // record.itemsize)


def _records(content: bytearray, record: np.dtype[Any], count: int) -> tuple[NDArray[np.int64], Floats]:
    rows = np.frombuffer(bytes(content), record, count)
    return rows["id"].astype(np.int64), rows["vector"].astype(np.float32)
