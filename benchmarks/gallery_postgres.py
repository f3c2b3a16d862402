"""A gallery in PostgreSQL beside FAISS and plain pgvector, in one run: python benchmarks/gallery_postgres.py

Rows and queries are those of clustered.py; recall@10 is against float64 over every row that the filter allows. nearkin:
`Gallery.search`: facts, search, rows with metadata, checksums. Plain pgvector is what its manual shows: an HNSW index
with its defaults, metadata as jsonb, the k nearest in one statement of a connection that stays open. FAISS has the
vectors alone, in this process: HNSW, beyond 100,000 rows IVF, with the smallest setting that reaches a recall of 0.99.
The server has shared_buffers of 4 GB, so that its indexes are in memory, as PostgreSQL's manual advises.

    --rows N --kind clustered|uniform   of the gallery
    --url URL                           a server that runs already; tables stay there, and are measured as they are
    --filter-keys KEY,…                 of nearkin also with indexes of their own for these (two, ten, hundred), where
                                        5,000 rows or more have the value; only those that are measured are built
    --prepare                           makes the tables at that URL and measures nothing
    --peers faiss,plain                 beside nearkin, or none
    --ahead                             while searches are timed, this process and its backend come before all others of
                                        the machine (SCHED_FIFO; Linux, root): for a machine that is not idle
    --partitions                        instead: plain tables in 1, 2 and 4 partitions by the hash of the label
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

import clustered
import measure

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import postgres_server
from nearkin.gallery import Gallery
from nearkin.gallery.stores import hnsw, postgres_filters
from nearkin.gallery.stores.postgres_search import query_text

DIM, K, GOAL = 128, 10, 0.99
HEADER = ["who", "rows", "kind", "filter", "passing", "setting", "p50_ms", "p99_ms", "recall@10", "times_faiss"]
STEPS = {
    "none": (1, 0),
    "50 %": (2, 1),
    "10 %": (10, 3),
    "1 %": (100, 7),
    "0.1 %": (1000, 7),
}  # row % step == remainder
KEYS = {"50 %": "two", "10 %": "ten", "1 %": "hundred", "0.1 %": "thousand"}


def metadata(row: int) -> dict[str, int]:
    return {key: row % STEPS[name][0] for name, key in KEYS.items()}


AHEAD: list[bool] = []  # whether --ahead was given


@contextmanager
def ahead(backend: int | None) -> Iterator[None]:
    processes = [os.getpid(), *([] if backend is None else [backend])] if AHEAD else []
    for process in processes:
        os.sched_setscheduler(process, os.SCHED_FIFO, os.sched_param(10))
    try:
        yield
    finally:
        for process in processes:
            os.sched_setscheduler(process, os.SCHED_OTHER, os.sched_param(0))


def timed(
    search: Callable[[Any], list[int]], queries: Any, judged: Any, backend: int | None = None
) -> tuple[float, float, float]:
    """p50 and p99 in ms, and recall@10; search returns positions of rows. backend: the process of its connection."""
    times, hits = [], 0
    with ahead(backend):
        for query in queries[:20]:
            search(query)
        for query, exact in zip(queries, judged, strict=True):
            begun = time.perf_counter()
            found = search(query)
            times.append((time.perf_counter() - begun) * 1e3)
            hits += len(set(found[:K]) & set(exact.tolist()))
    return *np.percentile(times, [50, 99]).tolist(), hits / judged.size


def enrolled(gallery: Gallery, count: int, kind: str, keys: list[str]) -> None:
    """Prints the rate, and the times of the indexes."""
    if gallery.stats()["rows"] != count:
        begun, done = time.perf_counter(), 0
        for first, block in clustered.blocks(count, DIM, kind):
            places = range(first, first + len(block))
            labels = [f"class {clustered.class_of(row)}" for row in places]
            gallery.enrol(block, labels, [metadata(row) for row in places])
            done += len(block)
        print(f"enrolled {done / (time.perf_counter() - begun):.0f} rows per second", flush=True)
    begun = time.perf_counter()
    gallery.warm(lambda at, of: print(f"index: {at:,} of {of:,}", end="\r", flush=True))
    print(f"warm after {time.perf_counter() - begun:.1f} s: {gallery.stats()['index']}", flush=True)
    facts = gallery._store.facts()
    if keys and facts is not None and facts.beyond.get("filter_keys") != keys:
        begun = time.perf_counter()
        with measured_values():
            gallery.reindex(lambda at, of: print(f"for filters: {at:,} of {of:,}", end="\r", flush=True), keys)
        print(f"for filters by {', '.join(keys)} after {time.perf_counter() - begun:.1f} s", flush=True)


@contextmanager
def measured_values() -> Iterator[None]:
    """Of the indexes for filters only those that are measured are built."""
    wanted, values = postgres_filters.wanted, {(KEYS[name], str(STEPS[name][1])) for name in KEYS}
    postgres_filters.wanted = lambda *args: [one for one in wanted(*args) if (one.key, one.value) in values]
    try:
        yield
    finally:
        postgres_filters.wanted = wanted


@contextmanager
def without_own_indexes() -> Iterator[None]:
    single, postgres_filters.single = postgres_filters.single, lambda _: None
    try:
        yield
    finally:
        postgres_filters.single = single


def of_nearkin(gallery: Gallery, name: str) -> Callable[[Any], list[int]]:
    filter = {KEYS[name]: STEPS[name][1]} if name in KEYS else None
    return lambda query: [hit.id - 1 for hit in gallery.search(query, K, filter)]


def plain_table(connection: Any, count: int, kind: str) -> str:
    table = f"plain_{kind}_{count}"
    if connection.execute("SELECT to_regclass(%s)", (table,)).fetchone()[0] is not None:
        return table
    connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
    columns = f"id bigint PRIMARY KEY, label text, metadata jsonb, embedding vector({DIM})"
    connection.execute(f"CREATE TABLE {table} ({columns})")
    with connection.cursor().copy(f"COPY {table} FROM STDIN") as copy:
        for first, block in clustered.blocks(count, DIM, kind):
            for row, vector in enumerate(block, first):
                label = f"class {clustered.class_of(row)}"
                copy.write_row((row, label, json.dumps(metadata(row)), query_text(vector)))
    connection.execute("SET maintenance_work_mem = '1GB'")
    connection.execute(f"CREATE INDEX ON {table} USING hnsw (embedding vector_cosine_ops)")
    connection.execute(f"ANALYZE {table}")
    return table


def of_plain(connection: Any, table: str, name: str) -> Callable[[Any], list[int]]:
    where = f"WHERE metadata @> '{json.dumps({KEYS[name]: STEPS[name][1]})}'" if name in KEYS else ""
    text = f"SELECT id, label, metadata FROM {table} {where} ORDER BY embedding <=> %s::vector LIMIT {K}"
    return lambda query: [row[0] for row in connection.execute(text, (query_text(query),)).fetchall()]


class Faiss:
    def __init__(self, count: int, kind: str) -> None:
        self.faiss = hnsw.load_faiss()
        rows, product = clustered.rows(count, DIM, kind), self.faiss.METRIC_INNER_PRODUCT
        if count <= 100_000:
            self.index = self.faiss.IndexHNSWFlat(DIM, 32, product)
        else:
            self.index = self.faiss.IndexIVFFlat(self.faiss.IndexFlatIP(DIM), DIM, 1024, product)
            self.index.train(rows[:: max(1, count // 50_000)])
        self.index.add(rows)
        self.count, self.graph = count, count <= 100_000

    def search(self, name: str, setting: int) -> Callable[[Any], list[int]]:
        step, remainder = STEPS[name]
        places = np.arange(remainder, self.count, step)
        only = {"sel": self.faiss.IDSelectorBatch(places)} if name in KEYS else {}
        if self.graph:
            options = self.faiss.SearchParametersHNSW(efSearch=setting, **only)
        else:
            options = self.faiss.SearchParametersIVF(nprobe=setting, **only)
        return lambda query: self.index.search(query[None], K, params=options)[1][0].tolist()


def compared(url: str, count: int, kind: str, tries: int, peers: list[str], keys: list[str]) -> list[list[object]]:
    import psycopg

    queries, lines, base = clustered.queries(tries, count, DIM, kind), [], {}
    judged = {name: clustered.exact_ids(count, queries, K, DIM, kind, 0, *STEPS[name]) for name in STEPS}

    def line(who: str, name: str, setting: object, measured: tuple[float, float, float]) -> None:
        p50, p99, recall = measured
        times = f"{p50 / base[name]:.2f}" if name in base else ""
        passing = len(range(STEPS[name][1], count, STEPS[name][0]))
        lines.append([who, count, kind, name, passing, setting, f"{p50:.2f}", f"{p99:.2f}", f"{recall:.4f}", times])
        print(*(f"{value!s:>15}" for value in lines[-1]), flush=True)

    if "faiss" in peers:
        faiss = Faiss(count, kind)
        for name in STEPS:
            for setting in (16, 32, 64, 128, 256, 512, 1024):
                measured = timed(faiss.search(name, setting), queries, judged[name])
                if measured[2] >= GOAL:
                    break
            base[name] = measured[0]
            line("faiss", name, setting, measured)
        del faiss
    with Gallery.open(f"{url}&gallery={kind}_{count}", dim=DIM) as gallery:
        enrolled(gallery, count, kind, keys)
        gallery.search(queries[0])
        backend = gallery._store.connections._reader.info.backend_pid
        for name in STEPS:
            with without_own_indexes():
                line("nearkin", name, "HNSW", timed(of_nearkin(gallery, name), queries, judged[name], backend))
            if KEYS.get(name) in keys:
                measured = timed(of_nearkin(gallery, name), queries, judged[name], backend)
                line("nearkin", name, "its own HNSW", measured)
    if "plain" in peers:
        with psycopg.connect(url, autocommit=True) as connection:
            table, backend = plain_table(connection, count, kind), connection.info.backend_pid
            for name in STEPS:
                measured = timed(of_plain(connection, table, name), queries, judged[name], backend)
                line("plain pgvector", name, "defaults", measured)
    return lines


def prepare(url: str, count: int, kind: str, peers: list[str], keys: list[str]) -> None:
    import psycopg

    with Gallery.open(f"{url}&gallery={kind}_{count}", dim=DIM) as gallery:
        enrolled(gallery, count, kind, keys)
    if "plain" in peers:
        with psycopg.connect(url, autocommit=True) as connection:
            begun = time.perf_counter()
            table = plain_table(connection, count, kind)
            print(f"{table} after {time.perf_counter() - begun:.1f} s", flush=True)


def partitioned_table(connection: Any, parts: int, count: int, kind: str) -> str:
    """By the hash of the label; each part has its own HNSW."""
    table = f"parts_{kind}_{count}_{parts}"
    if connection.execute("SELECT to_regclass(%s)", (table,)).fetchone()[0] is not None:
        return table
    columns = f"id bigint, label text, embedding vector({DIM})"
    connection.execute(f"CREATE TABLE {table} ({columns}) PARTITION BY HASH (label)")
    for part in range(parts):
        modulus = f"FOR VALUES WITH (MODULUS {parts}, REMAINDER {part})"
        connection.execute(f"CREATE TABLE {table}_{part} PARTITION OF {table} {modulus}")
    with connection.cursor().copy(f"COPY {table} FROM STDIN") as copy:
        for first, block in clustered.blocks(count, DIM, kind):
            for row, vector in enumerate(block, first):
                copy.write_row((row, f"class {clustered.class_of(row)}", query_text(vector)))
    connection.execute("SET maintenance_work_mem = '512MB'")
    half = f"((embedding::halfvec({DIM})) halfvec_ip_ops) WITH (m = 24, ef_construction = 100)"
    connection.execute(f"CREATE INDEX ON {table} USING hnsw {half}")
    connection.execute(f"ANALYZE {table}")
    return table


def partitions(url: str, count: int, kind: str, tries: int) -> list[list[object]]:
    """All parts are asked: the label of a query is not known."""
    import psycopg

    queries, lines = clustered.queries(tries, count, DIM, kind), []
    judged = clustered.exact_ids(count, queries, K, DIM, kind)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
        for parts in (1, 2, 4):
            table = partitioned_table(connection, parts, count, kind)
            connection.execute("SET hnsw.ef_search = 64; SET enable_sort = off")
            order = f"embedding::halfvec({DIM}) <#> %s::vector({DIM})::halfvec({DIM})"
            text = f"SELECT id, label FROM {table} ORDER BY {order} LIMIT {K + 4}"

            def search(query: Any, text: str = text) -> list[int]:
                rows = connection.execute(text, (query_text(query),), prepare=True).fetchall()
                return [row[0] for row in rows]

            p50, p99, recall = timed(search, queries, judged, connection.info.backend_pid)
            figures = [f"{p50:.2f}", f"{p99:.2f}", f"{recall:.4f}", ""]
            lines.append([f"{parts} partitions", count, kind, "none", count, "ef 64", *figures])
            print(*(f"{value!s:>15}" for value in lines[-1]), flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--kind", choices=clustered.KINDS, default="clustered")
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--url", default="")
    parser.add_argument("--filter-keys", default="")
    parser.add_argument("--prepare", action="store_true")
    parser.add_argument("--peers", default="faiss,plain")
    parser.add_argument("--ahead", action="store_true")
    parser.add_argument("--partitions", action="store_true")
    arguments = parser.parse_args()
    keys, peers = ([one for one in text.split(",") if one] for text in (arguments.filter_keys, arguments.peers))
    AHEAD[:] = [True] if arguments.ahead else []
    if arguments.prepare:
        prepare(arguments.url, arguments.rows, arguments.kind, peers, keys)
        return
    print(*(f"{name:>15}" for name in HEADER))
    with nullcontext() if arguments.url else postgres_server.Server("4GB") as server:
        url = arguments.url or server.url
        if arguments.partitions:
            lines = partitions(url, arguments.rows, arguments.kind, arguments.queries)
        else:
            lines = compared(url, arguments.rows, arguments.kind, arguments.queries, peers, keys)
    ending = "_partitions" if arguments.partitions else ""
    name = f"gallery_postgres_{arguments.kind}_{arguments.rows}{ending}.csv"
    measure.write_csv(Path(__file__).parent / "results" / name, HEADER, lines)


if __name__ == "__main__":
    main()
