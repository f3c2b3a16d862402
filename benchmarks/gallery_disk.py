"""A gallery beyond memory, with FAISS beside it: benchmarks/gallery_disk.py --rows 10000000 --folder BIG --stage …

Stages, each in a process of its own: `enrol` (continues where it stopped, up to --seconds), `build`, `search`
(opening, searches, memory), `faiss` (IVF-PQ and IVF-SQ8 with the same lists; with --hnsw HNSW-SQ). Rows are `families`
(classes of 10 rows, 100 classes around each of many centres: cosines of about 0.7 within a class and 0.35 within a
family), `groups` (the classes without families) or `uniform` (no structure at all). Queries are rows with noise;
recall@10 is against float64. Memory is that of the process, by /proc: what it allocated, and the pages of mapped files.
"""

import argparse
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
HEADER = ["what", "rows", "dim", "kind", "value", "unit"]
Floats = NDArray[np.float32]


def chunk_of_rows(number: int, dim: int, kind: str, count: int = CHUNK) -> Floats:
    """A pure function of its number."""
    draw = np.random.default_rng([7, number])
    rows = draw.standard_normal((CHUNK, dim), np.float32)
    if kind != "uniform":
        centres = draw.standard_normal((CHUNK // 10, dim), np.float32)
        if kind == "families":
            families = draw.standard_normal((CHUNK // 1000, dim), np.float32)
            centres = (centres + families[np.arange(len(centres)) // 100]) * np.float32(0.5**0.5)
        rows = 0.6 * rows + centres[np.arange(CHUNK) // 10]
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), np.float32)[:count]


def queries_of(rows: int, dim: int, kind: str, wanted: int) -> Floats:
    """The first so many of 500, or more if more are wanted: every stage has the same ones."""
    draw, count = np.random.default_rng(8), max(500, wanted)
    chosen = np.sort(draw.integers(0, rows, count))
    parts = [chunk_of_rows(int(i), dim, kind)[chosen[chosen // CHUNK == i] % CHUNK] for i in np.unique(chosen // CHUNK)]
    noisy = np.concatenate(parts) + 0.3 * draw.standard_normal((count, dim)) / dim**0.5
    noisy = noisy[draw.permutation(count)][:wanted]
    return np.asarray(noisy / np.linalg.norm(noisy, axis=1, keepdims=True), np.float32)


def truth_of(rows: int, dim: int, kind: str, queries: Floats) -> list[set[int]]:
    """Ids of the nearest: 30 of each chunk by float32, then by float64."""
    best: list[list[tuple[float, int]]] = [[] for _ in queries]
    for number in range(-(-rows // CHUNK)):
        part = chunk_of_rows(number, dim, kind, min(CHUNK, rows - number * CHUNK))
        near = (torch.from_numpy(queries) @ torch.from_numpy(part).T).topk(min(30, len(part)), 1).indices.numpy()
        for q, places in enumerate(near):
            cosines = part[places].astype(np.float64) @ queries[q].astype(np.float64)
            best[q] += [(-c, number * CHUNK + int(i) + 1) for c, i in zip(cosines.tolist(), places, strict=True)]
            best[q] = sorted(best[q])[:K]
    return [{id for _, id in one} for one in best]


def memory() -> dict[str, float]:
    """GiB of this process now."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith(("VmRSS", "RssAnon", "RssFile"))}
    return {name: int(value) / 2**20 for name, value in fields.items()}


def enrol(place: Path, rows: int, dim: int, kind: str, stored: str, seconds: float) -> list[tuple[str, float, str]]:
    begun, times, added = time.perf_counter(), 0.0, 0
    with Gallery.open(place, dim=dim, stored=stored) as gallery:
        facts = gallery._store.facts()
        assert facts is not None
        start = facts.rows
        while start + added < rows and time.perf_counter() - begun < seconds:
            number = (start + added) // CHUNK
            part = chunk_of_rows(number, dim, kind, min(CHUNK, rows - start - added))
            ids = range(start + added, start + added + len(part))
            labels = [f"class {i // 10}" for i in ids]
            metadata = [{"ten": i % 10, "thousand": i % 1000} for i in ids]
            tick = time.perf_counter()
            gallery.enrol(part, labels, metadata)
            spent = time.perf_counter() - tick
            times, added = times + spent, added + len(part)
            print(f"{start + added:,} rows, {len(part) / spent:,.0f} per second in the last chunk", flush=True)
    print(f"{added:,} rows at {added / max(times, 1e-9):,.0f} per second", flush=True)
    return [(f"enrolled up to {start + added}", added / max(times, 1e-9), "rows/s")]


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
    queries = queries_of(rows, dim, kind, count)
    judged = min(count, 200)
    truth_file = place.with_suffix(".truth.npy")
    if truth_file.exists():
        truth = [set(one) for one in np.load(truth_file).tolist()]
    else:
        truth = truth_of(rows, dim, kind, queries[:judged])
        np.save(truth_file, np.array([sorted(one) for one in truth]))
    before, lines = memory(), list[tuple[str, float, str]]()
    begun = time.perf_counter()
    gallery = Gallery.open(place)
    gallery.search(queries[0], K)
    lines.append(("opened, with the first search", time.perf_counter() - begun, "s"))
    filters: dict[str, dict[str, Any] | None] = {"none": None, "label": {"label": "class 77"}, "0.1 %": {"thousand": 7}}
    filters["10 %"] = {"ten": 3}
    for name, filter in filters.items():
        tried = count if name in ("none", "label") else min(count, 50)
        p50, p99, answers = timed(gallery, queries[:tried], filter, False)
        lines += [(f"p50, filter {name}", p50, "ms"), (f"p99, filter {name}", p99, "ms")]
        if name == "none":
            recall = sum(len(a & b[0]) for a, b in zip(truth, answers, strict=False)) / (K * len(truth))
            lines += [("recall@10", recall, ""), ("answers proved", np.mean([proved for _, proved in answers]), "")]
            lines += [(f"{field} after searches", value, "GiB") for field, value in memory().items()]
    p50, _, answers = timed(gallery, queries[:30], None, True)
    recall = sum(len(a & b[0]) for a, b in zip(truth, answers, strict=False)) / (K * len(answers))
    lines += [("p50, exact=True", p50, "ms"), ("recall@10, exact=True", recall, "")]
    lines += [(f"{field} at the end", value, "GiB") for field, value in memory().items()]
    lines += [(f"{field} before opening", value, "GiB") for field, value in before.items()]
    gallery.close()
    return lines


def timed(gallery: Any, queries: Floats, filter: Any, exact: bool) -> tuple[float, float, list[tuple[set[int], bool]]]:
    times, answers = [], []
    for query in queries[:20]:
        gallery.search(query, K, filter, exact=exact)
    for query in queries:
        begun = time.perf_counter()
        hits = gallery.search(query, K, filter, exact=exact)
        times.append((time.perf_counter() - begun) * 1e3)
        answers.append(({hit.id for hit in hits}, hits.proved))
    p50, p99 = np.percentile(times, [50, 99])
    return float(p50), float(p99), answers


def faiss_beside(place: Path, rows: int, dim: int, kind: str, count: int, hnsw: bool) -> list[tuple[str, float, str]]:
    """FAISS alone: no rows on the disk, no labels, no filters, nothing durable; recall without rescoring."""
    import faiss

    faiss.omp_set_num_threads(1)
    queries = queries_of(rows, dim, kind, count)
    truth = [set(one) for one in np.load(place.with_suffix(".truth.npy")).tolist()]
    with Gallery.open(place) as gallery:
        gallery.search(queries[0], K)
        lists = gallery._store.index._lists  # type: ignore[attr-defined]
        centroids, starts, probes = np.array(lists.centroids), np.array(lists.starts), lists.probes
        list_of = np.empty(len(lists), np.int64)
        list_of[np.array(lists.ids) - 1] = np.repeat(np.arange(len(centroids)), np.diff(starts))
    quantizer = faiss.IndexFlatIP(dim)
    quantizer.add(centroids)
    metric = faiss.METRIC_INNER_PRODUCT
    made = {
        f"FAISS IVF-PQ{dim // 2}": faiss.IndexIVFPQ(quantizer, dim, len(centroids), dim // 2, 8, metric),
        "FAISS IVF-SQ8": faiss.IndexIVFScalarQuantizer(
            quantizer, dim, len(centroids), faiss.ScalarQuantizer.QT_8bit, metric
        ),
    }
    if hnsw:
        made = {"FAISS HNSW-SQ8": faiss.IndexHNSWSQ(dim, faiss.ScalarQuantizer.QT_8bit, 32, metric)}
        made["FAISS HNSW-SQ8"].hnsw.efConstruction = 200
        faiss.omp_set_num_threads(2)
    lines: list[tuple[str, float, str]] = []
    for name, index in made.items():
        begun = time.perf_counter()
        index.train(chunk_of_rows(0, dim, kind))
        for number in range(-(-rows // CHUNK)):
            part = chunk_of_rows(number, dim, kind, min(CHUNK, rows - number * CHUNK))
            if hnsw:
                index.add(part)
                continue
            at = np.ascontiguousarray(list_of[number * CHUNK : number * CHUNK + len(part)])
            index.add_core(len(part), faiss.swig_ptr(part), None, faiss.swig_ptr(at))
        lines.append((f"{name}: build (lists given)", time.perf_counter() - begun, "s"))
        file = place.with_suffix(".faiss")
        faiss.write_index(index, str(file))
        lines.append((f"{name}: file", file.stat().st_size / 2**30, "GiB"))
        file.unlink()
        faiss.omp_set_num_threads(1)
        for depth in (64, 128, 256) if hnsw else (probes, 2 * probes, 4 * probes):
            if hnsw:
                index.hnsw.efSearch = depth
            else:
                index.nprobe = min(depth, len(centroids))
            times, hits = [], 0
            for q, query in enumerate(queries):
                begun = time.perf_counter()
                _, ids = index.search(query[None], K)
                times.append((time.perf_counter() - begun) * 1e3)
                hits += len(truth[q] & {int(i) + 1 for i in ids[0]}) if q < len(truth) else 0
            lines.append((f"{name}: p50 at {depth}", float(np.median(times)), "ms"))
            lines.append((f"{name}: recall@10 at {depth}", hits / (K * len(truth)), ""))
        del index
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--kind", choices=["families", "groups", "uniform"], default="families")
    parser.add_argument("--stored", default="int8")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--stage", choices=["enrol", "build", "search", "faiss"], required=True)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--queries", type=int, default=500)
    parser.add_argument("--hnsw", action="store_true")
    a = parser.parse_args()
    place = a.folder / f"{a.kind}-{a.rows}-{a.dim}.gallery"
    if a.stage == "enrol":
        lines = enrol(place, a.rows, a.dim, a.kind, a.stored, a.seconds)
    elif a.stage == "build":
        with Gallery.open(place) as gallery:
            changed = gallery._store.facts().beyond.get("stored") != a.stored  # type: ignore[union-attr]
            if changed:
                gallery._store.store_as(a.stored)  # type: ignore[attr-defined]
        lines = build(place)
    elif a.stage == "search":
        lines = search(place, a.rows, a.dim, a.kind, a.queries)
    else:
        lines = faiss_beside(place, a.rows, a.dim, a.kind, a.queries, a.hnsw)
    results = Path(__file__).parent / "results" / "gallery_disk.csv"
    old = [line.split(",") for line in results.read_text().splitlines()[1:]] if results.exists() else []
    new = [
        [f"{a.stored}: {what}" if "FAISS" not in what else what, a.rows, a.dim, a.kind, f"{value:.4g}", unit]
        for what, value, unit in lines
    ]
    for line in new:
        print(*line, flush=True)
    keys = {(line[0], str(line[1]), str(line[2]), line[3]) for line in new}
    kept = [line[: len(HEADER)] for line in old if tuple(line[:4]) not in keys]
    measure.write_csv(results, HEADER, [*kept, *new])


if __name__ == "__main__":
    main()
