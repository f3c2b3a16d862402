"""The recall of a gallery's index in PostgreSQL, measured against a comparison with all rows; it decides the depths."""

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nearkin.gallery import schema
from nearkin.gallery.schema import Facts, Floats
from nearkin.gallery.stores import hnsw, postgres_filters
from nearkin.gallery.stores.postgres_filters import Part
from nearkin.gallery.stores.postgres_search import COLUMNS, DEEPEST, IndexFacts, best, by_cursor, read_rows
from nearkin.gallery.stores.recall_queries import NEAR, like_new_items

if TYPE_CHECKING:
    from nearkin.gallery.stores.postgres import PostgresStore

__all__ = ["form_of", "measured", "measured_recall"]

MAX_HALF = 4_000  # dimensions of HNSW over halfvec
DEPTHS = (40, 50, 64, 80, 100, 125, 160, 200, 250, 320, 400, 500, 640, 800, DEEPEST)
DEEP_RECALL = 0.995  # recall@100 that decides about searches with a filter
QUERIES = 400  # that measure recall: where a search fails, it mostly misses all of a class
PROBED = 160  # depth at which the rows that make a query are searched for
COMPARED = 8192  # rows at a time


def form_of(dim: int) -> str:
    """halfvec where pgvector indexes so many dimensions, else signs."""
    return "half" if dim <= MAX_HALF else "bit"


def measured(store: "PostgresStore", facts: Facts, bounds: tuple[int, ...], parts: Sequence[Part]) -> dict[str, Any]:
    """What the gallery's description says of the index: with depths that reach the target recall."""
    with store.connections.reading() as cursor:
        index = IndexFacts(form_of(facts.dim), bounds, DEEPEST, DEEPEST, 0.0)
        queries = _queries(cursor, store, facts, index)
        exact = _exact_ids(cursor, store.table, queries, 100)
        for depth in DEPTHS:
            recall = _recall(cursor, store, index, queries, exact, 10, depth)
            if recall >= hnsw.TARGET_RECALL:
                break
        else:
            return {"too_low": recall, "rows": facts.rows}
        depth = _next(depth)
        deep = (d for d in DEPTHS if d > depth and _recall(cursor, store, index, queries, exact, 100, d) >= DEEP_RECALL)
        index = index._replace(depth=depth, deep=next(deep, DEEPEST), recall=recall)
        return index._replace(own=_measured_own(cursor, store, index, queries, parts)).stored()


def _measured_own(
    cursor: Any, store: "PostgresStore", index: IndexFacts, queries: Floats, parts: Sequence[Part]
) -> dict[str, Any]:
    """Of filters with indexes of their own: their segments, and a depth that reaches the target recall."""
    own: dict[str, Any] = {}
    for part in parts:
        has = own.setdefault(postgres_filters.slot(part.key, part.value), {"segments": [], "depth": index.depth})
        has["segments"].append([part.first, part.end])
    for slot in list(own):
        key, value = json.loads(slot)
        passing = f"{store.table} WHERE {postgres_filters.rare_clause(store.schema, key, value)}"
        nearest = [set(ids) for ids in _exact_ids(cursor, passing, queries, 10)]
        for depth in DEPTHS:
            found = 0
            for query, ids in zip(queries, nearest, strict=True):
                proposed = store.search.by_own_index(
                    by_cursor(cursor), len(query), index._replace(own=own), query, 14, key, value, depth=depth
                )
                rows = [] if proposed is None else proposed[0]
                found += len({row.id for row, _ in best(rows, query, 10)[0]} & ids)
            if found >= hnsw.TARGET_RECALL * sum(map(len, nearest)):
                own[slot]["depth"] = _next(depth)
                break
        else:
            del own[slot]
    return own


def _next(depth: int) -> int:
    """One step deeper than the first that was enough, since so few queries measured it."""
    return min(deeper for deeper in (*DEPTHS, DEEPEST) if deeper > depth or deeper == DEEPEST)


def measured_recall(store: "PostgresStore", facts: Facts, index: IndexFacts) -> float:
    """recall@10 of the index against float32 over all rows."""
    with store.connections.reading() as cursor:
        queries = _queries(cursor, store, facts, index)
        return _recall(cursor, store, index, queries, _exact_ids(cursor, store.table, queries, 10), 10, index.depth)


def _recall(
    cursor: Any, store: "PostgresStore", index: IndexFacts, queries: Floats, exact: list[list[int]], k: int, depth: int
) -> float:
    found = 0
    for query, ids in zip(queries, exact, strict=True):
        rows, _ = store.search.by_index(by_cursor(cursor), len(query), index, query, k + max(4, k // 4), depth)
        found += len({row.id for row, _ in best(rows, query, k)[0]} & set(ids[:k]))
    return found / max(1, sum(len(ids[:k]) for ids in exact))


def _queries(cursor: Any, store: "PostgresStore", facts: Facts, index: IndexFacts) -> Floats:
    draw = np.random.default_rng(0)
    ids = draw.integers(1, max(2, facts.next_id), 4 * QUERIES).tolist()
    rows, _ = read_rows(cursor.execute(f"SELECT {COLUMNS} FROM {store.table} WHERE id = ANY(%s)", (ids,)))
    # Of all ages: rows that were indexed first have the most links.
    some = [rows[place].vector for place in draw.permutation(len(rows))[:QUERIES]]

    def nearest(row: Floats) -> Floats:
        proposed, _ = store.search.by_index(by_cursor(cursor), facts.dim, index, row, NEAR + 4, PROBED)
        return schema.unpack([one.vector for one, _ in best(proposed, row, NEAR)[0]], facts.dim)

    return like_new_items(schema.unpack(some, facts.dim), nearest, draw)


def _exact_ids(cursor: Any, rows: str, queries: Floats, k: int) -> list[list[int]]:
    """Ids of the nearest rows, nearest first, from one pass over all of them. rows: a table, and a condition."""
    ids = np.zeros((len(queries), 0), np.int64)
    score = np.zeros((len(queries), 0), np.float32)
    for some, vectors in _all_vectors(cursor, rows, queries.shape[1]):
        score = np.concatenate([score, queries @ vectors.T], 1)
        ids = np.concatenate([ids, np.broadcast_to(some, (len(queries), len(some)))], 1)
        if score.shape[1] > k:
            top = np.argpartition(-score, k - 1, axis=1)[:, :k]
            score, ids = np.take_along_axis(score, top, 1), np.take_along_axis(ids, top, 1)
    order = np.argsort(-score, axis=1, kind="stable")
    nearest: list[list[int]] = np.take_along_axis(ids, order, 1).tolist()
    return nearest


def _all_vectors(cursor: Any, rows: str, dim: int) -> Iterator[tuple[NDArray[np.int64], Floats]]:
    """In PostgreSQL's binary format of COPY: a head of 19 bytes, then records of one size."""
    record = np.dtype(
        [("fields", ">i2"), ("a", ">i4"), ("id", ">i8"), ("b", ">i4"), ("head", ">i4"), ("vector", ">f4", (dim,))]
    )
    waiting, first = bytearray(), True
    with cursor.copy(f"COPY (SELECT id, vector FROM {rows}) TO STDOUT (FORMAT BINARY)") as copy:
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
