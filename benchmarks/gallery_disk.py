"""A gallery beyond memory, with FAISS beside it: benchmarks/gallery_disk.py --rows 10000000 --folder BIG --stage …

Stages, each in a process of its own: `enrol` (continues where it stopped, up to --seconds), `truth` (the exact answers,
in float64), `build`, `search` (opening, searches, memory), `faiss` (`gallery_disk_faiss.py`; with --hnsw HNSW-SQ).
Rows are `families` (classes of 10 rows, 100 classes around each of many centres: cosines of about 0.7 within a class,
0.35 within a family), `groups` (the classes without families) or `uniform` (no structure at all). Queries are new
items of these classes. Memory is that of the process, by /proc: what it allocated, and the pages of mapped files. The
gallery is opened with none of its pages in the system's cache, and the first searches are timed so, too.
"""

import argparse
import csv
import os
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import measure
from nearkin.gallery import Gallery

CHUNK, K = 100_000, 10
CALL = 5  # chunks enrolled by one call
JUDGED = 200  # queries
FILTERS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "label": {"label": "class 77"},
    "0.1 %": {"thousand": 7},
    "10 %": {"ten": 3},
}
HEADER = ["what", "rows", "dim", "kind", "value", "unit"]
Floats = NDArray[np.float32]


def chunk_of_rows(number: int, dim: int, kind: str, count: int = CHUNK) -> Floats:
    """A pure function of its number."""
    scatter, centres = _drawn(number, dim, kind)
    return _unit(scatter + centres[np.arange(CHUNK) // 10])[:count]


def _drawn(number: int, dim: int, kind: str) -> tuple[Floats, Floats]:
    """How far the rows of a chunk are from the centres of their classes, and these centres."""
    draw = np.random.default_rng([7, number])
    scatter = draw.standard_normal((CHUNK, dim), np.float32)
    if kind == "uniform":
        return scatter, np.zeros((CHUNK // 10, dim), np.float32)
    centres = draw.standard_normal((CHUNK // 10, dim), np.float32)
    if kind == "families":
        families = draw.standard_normal((CHUNK // 1000, dim), np.float32)
        centres = (centres + families[np.arange(len(centres)) // 100]) * np.float32(0.5**0.5)
    return 0.6 * scatter, centres


def _unit(rows: Any) -> Floats:
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), np.float32)


def queries_of(rows: int, dim: int, kind: str, wanted: int) -> Floats:
    """New items of the rows' classes: the first so many of 500, or more if more are wanted. Every stage has the same
    ones."""
    draw, count = np.random.default_rng(8), max(500, wanted)
    chosen = np.sort(draw.integers(0, rows, count))
    numbers = np.unique(chosen // CHUNK)
    centres = [_drawn(int(i), dim, kind)[1][chosen[chosen // CHUNK == i] % CHUNK // 10] for i in numbers]
    scatter = draw.standard_normal((count, dim), np.float32) * (1.0 if kind == "uniform" else 0.6)
    return _unit(scatter + np.concatenate(centres))[draw.permutation(count)][:wanted]


def truth_of(rows: int, dim: int, kind: str, queries: Floats) -> dict[str, NDArray[np.int64]]:
    """Ids of the nearest, per filter: 30 of each chunk by float32, then by float64."""
    best: dict[str, list[list[tuple[float, int]]]] = {name: [[] for _ in queries] for name in FILTERS}
    for number in range(-(-rows // CHUNK)):
        part = chunk_of_rows(number, dim, kind, min(CHUNK, rows - number * CHUNK))
        at = np.arange(number * CHUNK, number * CHUNK + len(part))
        for name, passes in (("none", at >= 0), ("0.1 %", at % 1000 == 7), ("10 %", at % 10 == 3)):
            allowed = np.flatnonzero(passes)
            near = torch.from_numpy(queries) @ torch.from_numpy(part[allowed]).T
            for q, places in enumerate(near.topk(min(30, len(allowed)), 1).indices.numpy()):
                cosines = part[allowed[places]].astype(np.float64) @ queries[q].astype(np.float64)
                ids = (at[allowed[places]] + 1).tolist()
                best[name][q] = sorted([*best[name][q], *zip((-cosines).tolist(), ids, strict=True)])[:K]
    best["label"] = [[(0.0, i + 1) for i in range(770, 780)] for _ in queries]  # the rows of class 77
    return {name: np.array([[id for _, id in one] for one in several]) for name, several in best.items()}


def truth_in(file: Path) -> dict[str, list[set[int]]]:
    with np.load(file) as arrays:
        return {name: [set(one) for one in arrays[name].tolist()] for name in arrays}


def memory() -> dict[str, float]:
    """GiB of this process now."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith(("VmRSS", "RssAnon", "RssFile"))}
    return {name: int(value) / 2**20 for name, value in fields.items()}


def enrol(place: Path, rows: int, dim: int, kind: str, stored: str, seconds: float) -> list[tuple[str, float, str]]:
    begun, times = time.perf_counter(), 0.0
    gallery = Gallery.open(place, dim=dim, stored=stored)
    start = now = gallery.row_count
    while now < rows and time.perf_counter() - begun < seconds:
        numbers = range(now // CHUNK, min(now // CHUNK + CALL, -(-rows // CHUNK)))
        part = np.concatenate([chunk_of_rows(i, dim, kind, min(CHUNK, rows - i * CHUNK)) for i in numbers])
        ids = range(now, now + len(part))
        labels = [f"class {i // 10}" for i in ids]
        metadata = [{"ten": i % 10, "thousand": i % 1000} for i in ids]
        tick = time.perf_counter()
        gallery.enrol(part, labels, metadata)
        spent = time.perf_counter() - tick
        times, now = times + spent, now + len(part)
        print(f"{now:,} rows, {len(part) / spent:,.0f} per second in the last call", flush=True)
    tick = time.perf_counter()
    gallery.close()  # the rest of the log is written back
    times += time.perf_counter() - tick
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    what = f"enrolled up to {now}"
    return [(what, (now - start) / max(times, 1e-9), "rows/s"), (f"{what}, peak resident", peak, "GiB")]


def build(place: Path) -> list[tuple[str, float, str]]:
    with Gallery.open(place) as gallery:
        begun = time.perf_counter()
        gallery.reindex(_printed())
        spent = time.perf_counter() - begun
        stats = gallery.stats()
    print(stats["index"], flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    sizes = [("gallery file", place.stat().st_size / 2**30, "GiB"), ("index file", stats["index_bytes"] / 2**30, "GiB")]
    return [
        ("build", spent, "s"),
        ("build, peak resident", peak, "GiB"),
        ("stated recall", stats["recall@10"], ""),
        *sizes,
    ]


def _printed() -> Any:
    last = [0.0]

    def progress(done: int, total: int) -> None:
        if time.perf_counter() - last[0] > 20:
            last[0] = time.perf_counter()
            print(f"{done:,} of {total:,}", flush=True)

    return progress


def search(place: Path, rows: int, dim: int, kind: str, count: int) -> list[tuple[str, float, str]]:
    queries, truth = queries_of(rows, dim, kind, count), truth_in(place.with_suffix(".truth.npz"))
    empty_cache(place)
    before, lines = memory(), list[tuple[str, float, str]]()
    begun = time.perf_counter()
    gallery = Gallery.open(place)
    gallery.search(queries[0], K)
    lines.append(("opened, with the first search", time.perf_counter() - begun, "s"))
    lines.append(("p50, first 50 searches", timed(gallery, queries[-50:], None, False, warm=0)[0], "ms"))
    for name, filter in FILTERS.items():
        tried = count if name in ("none", "label") else min(count, 50)
        p50, p99, answers = timed(gallery, queries[:tried], filter, False)
        lines += [(f"p50, filter {name}", p50, "ms"), (f"p99, filter {name}", p99, "ms")]
        lines.append((f"recall@10, filter {name}", recall_of(truth[name], answers), ""))
        if name == "none":
            lines.append(("answers proved", float(np.mean([proved for _, proved in answers])), ""))
            lines += [(f"{field} after searches", value, "GiB") for field, value in memory().items()]
    p50, _, answers = timed(gallery, queries[:30], None, True)
    lines += [("p50, exact=True", p50, "ms"), ("recall@10, exact=True", recall_of(truth["none"], answers), "")]
    lines += [(f"{field} at the end", value, "GiB") for field, value in memory().items()]
    lines += [(f"{field} before opening", value, "GiB") for field, value in before.items()]
    gallery.close()
    return lines


def empty_cache(place: Path) -> None:
    """The next reader of the files reads the disk."""
    for file in (place, place.with_name(place.name + ".codes")):
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def recall_of(truth: list[set[int]], answers: list[tuple[set[int], bool]]) -> float:
    judged = list(zip(truth, answers, strict=False))
    return sum(len(expected & found) for expected, (found, _) in judged) / (K * len(judged))


def timed(
    gallery: Any, queries: Floats, filter: Any, exact: bool, warm: int = 20
) -> tuple[float, float, list[tuple[set[int], bool]]]:
    times, answers = [], []
    for query in queries[:warm]:
        gallery.search(query, K, filter, exact=exact)
    for query in queries:
        begun = time.perf_counter()
        hits = gallery.search(query, K, filter, exact=exact)
        times.append((time.perf_counter() - begun) * 1e3)
        answers.append(({hit.id for hit in hits}, hits.proved))
    p50, p99 = np.percentile(times, [50, 99])
    return float(p50), float(p99), answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--kind", choices=["families", "groups", "uniform"], default="families")
    parser.add_argument("--stored", default="int8")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--stage", choices=["enrol", "truth", "build", "search", "faiss"], required=True)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--queries", type=int, default=500)
    parser.add_argument("--hnsw", action="store_true")
    a = parser.parse_args()
    place, shape = a.folder / f"{a.kind}-{a.rows}-{a.dim}.gallery", (a.rows, a.dim, a.kind)
    if a.stage == "truth":
        np.savez(place.with_suffix(".truth.npz"), **truth_of(a.rows, a.dim, a.kind, queries_of(*shape, JUDGED)))
        return
    if a.stage == "enrol":
        lines = enrol(place, *shape, a.stored, a.seconds)
    elif a.stage == "build":
        with Gallery.open(place) as gallery:
            gallery._store.store_as(a.stored)  # type: ignore[attr-defined]
        lines = build(place)
    elif a.stage == "search":
        lines = search(place, *shape, a.queries)
    else:
        from gallery_disk_faiss import beside

        lines = beside(place, *shape, a.queries, a.hnsw)
    write(a, lines)


def write(a: argparse.Namespace, lines: list[tuple[str, float, str]]) -> None:
    """In place of the lines of an earlier run."""
    results = Path(__file__).parent / "results" / "gallery_disk.csv"
    old: list[list[str]] = []
    if results.exists():
        with results.open(newline="") as file:
            old = list(csv.reader(file))[1:]
    new: list[list[object]] = [
        [what if "FAISS" in what else f"{a.stored}: {what}", str(a.rows), str(a.dim), a.kind, f"{value:.4g}", unit]
        for what, value, unit in lines
    ]
    for line in new:
        print(*line, flush=True)
    keys = {tuple(line[:4]) for line in new}
    measure.write_csv(results, HEADER, new, [line for line in old if tuple(line[:4]) not in keys])


if __name__ == "__main__":
    main()
