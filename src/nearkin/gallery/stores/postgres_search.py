"""Searching a gallery in PostgreSQL: the server's float32 proposes, float64 decides, as everywhere in nearkin."""

from collections.abc import Callable
from typing import Any

import numpy as np

from nearkin.gallery.facts import Facts
from nearkin.gallery.schema import Filter, Floats, Row, unit, unpacked
from nearkin.gallery.stores import hnsw as graphs
from nearkin.gallery.stores.contract import proved
from nearkin.gallery.stores.matrix import similarities

__all__ = ["COLUMNS", "DEPTHS", "choose_road", "condition", "rank", "read", "recall"]

SPARE = 16  # rows asked for beyond k
DEPTHS = (64, 128, 256, 512, 1000)  # hnsw.ef_search; pgvector takes no more
COLUMNS = "id, content, label, name, metadata, vector_send(vector), sum"
Ranked = list[tuple[Row, float]]


def read(cursor: Any) -> tuple[list[Row], dict[int, str]]:
    """Rows that proved whole, their vectors without pgvector's head of 4 bytes."""
    return proved((*fields, vector[4:], total) for *fields, vector, total in cursor.fetchall())


def condition(filter: Filter | None) -> tuple[str, list[Any]]:
    """A filter as SQL and its values."""
    parts: list[str] = []
    values: list[Any] = []
    if filter is not None and filter.labels is not None:
        parts.append("label = ANY(%s)")
        values.append(list(filter.labels))
    for key, wanted in filter.keys.items() if filter is not None else ():
        parts.append("metadata::jsonb -> %s = ANY(%s::jsonb[])")
        values += [key, list(wanted)]
    return " AND ".join(parts), values


def choose_road(cursor: Any, table: str, facts: Facts, k: int, where: str, values: list[Any]) -> None:
    """Exact, or by the index: not where a filter leaves so few rows that looking at each of them is fast enough.

    With a filter the index is searched twice as deep, and on until there are enough rows that the filter lets pass.
    """
    serves = "hnsw" in facts.beyond
    if serves and where:
        query = f"SELECT count(*) FROM (SELECT 1 FROM {table} WHERE {where} LIMIT {graphs.EXACT + 1}) AS passing"
        serves = cursor.execute(query, values).fetchone()[0] > graphs.EXACT
    if not serves:
        by_index(cursor, None)
        return
    by_index(cursor, max(int(facts.beyond["hnsw"]["depth"]) * (1 + bool(where)), k + SPARE))


def by_index(cursor: Any, depth: int | None) -> None:
    """For the rest of the transaction; None: exact, with no index on the vectors."""
    cursor.execute("SELECT set_config('enable_indexscan', %s, true)", ("off" if depth is None else "on",))
    if depth is not None:
        cursor.execute("SELECT set_config('enable_seqscan', 'off', true)")
        cursor.execute("SELECT set_config('hnsw.ef_search', %s, true)", (str(min(depth, DEPTHS[-1])),))
        cursor.execute("SELECT set_config('hnsw.iterative_scan', 'strict_order', true)")
    else:
        cursor.execute("SELECT set_config('enable_seqscan', 'on', true)")


def rank(
    cursor: Any,
    table: str,
    query: Floats,
    k: int,
    where: str,
    values: list[Any],
    damaged: dict[int, str],
    put_aside: Callable[[dict[int, str]], None],
) -> Ranked:
    """The k nearest. As many are proposed as it takes: the last one must be too far to belong."""
    wanted, slack = k + SPARE, 8 * len(query) * float(np.finfo(np.float32).eps)
    text = "[" + ",".join(f"{number:.9g}" for number in query.tolist()) + "]"
    while True:
        sound = " AND ".join([*([where] if where else []), *(["id <> ALL(%s)"] if damaged else [])])
        inner = (
            f"SELECT id FROM {table} {'WHERE ' + sound if sound else ''} ORDER BY vector <#> %s::vector, id LIMIT %s"
        )
        given = [*values, *([list(damaged)] if damaged else []), text, wanted]
        # The bytes of a vector are only asked of those that are near: PostgreSQL would make them of all.
        ids = [i for (i,) in cursor.execute(inner, given).fetchall()]
        rows, bad = read(cursor.execute(f"SELECT {COLUMNS} FROM {table} WHERE id = ANY(%s)", (ids,)))
        if bad:
            put_aside(bad)
            continue
        score = similarities(unpacked([row.vector for row in rows], len(query)), query)
        order = np.lexsort((np.array([row.id for row in rows], np.int64), -score))[:k]
        if len(rows) < wanted or score[order[-1]] - score.min() > slack:
            return [(rows[i], float(score[i])) for i in order]
        wanted *= 2


def recall(cursor: Any, table: str, depth: int, damaged: dict[int, str]) -> float:
    """recall@10 of the index against exact search, on queries near some of the rows."""
    rows, _ = read(cursor.execute(f"SELECT {COLUMNS} FROM {table} WHERE id %% 997 = 1 LIMIT 100", ()))
    if not rows:
        return 1.0
    vectors = unpacked([row.vector for row in rows], len(rows[0].vector) // 4)
    noise = np.random.default_rng(0).normal(size=vectors.shape) / vectors.shape[1] ** 0.5
    queries, found = unit(vectors + 0.3 * noise), []
    for road in (None, depth):
        by_index(cursor, road)
        ranked = [rank(cursor, table, query, 10, "", [], damaged, lambda _: None) for query in queries]
        found.append([{row.id for row, _ in one} for one in ranked])
    return sum(len(a & b) for a, b in zip(*found, strict=True)) / sum(map(len, found[0]))
