"""FAISS beside a gallery beyond memory: the stage `faiss` of gallery_disk.py.

IVF-PQ and IVF-SQ8 have the lists of the gallery's own index; HNSW-SQ8 has its graph (M = 16, efConstruction = 100).
Each is written to a file, opened again mapped into memory, as far as FAISS can, and searched in one thread. FAISS alone
has no labels, no filters and nothing durable, and its scores are those of its codes. "Rescored" is what a gallery would
make of it: FAISS proposes 50 rows, which are read from the gallery, verified and scored in float64.
"""

import gc
import time
from pathlib import Path
from typing import Any

import numpy as np

from gallery_disk import CHUNK, Floats, K, chunk_of_rows, memory, queries_of, truth_in
from nearkin.gallery import Gallery
from nearkin.gallery.schema import unpack
from nearkin.gallery.stores.matrix import similarities

PROPOSED = 50
Lines = list[tuple[str, float, str]]


def beside(place: Path, rows: int, dim: int, kind: str, count: int, hnsw: bool) -> Lines:
    import faiss

    queries, truth = queries_of(rows, dim, kind, count), truth_in(place.with_suffix(".truth.npz"))["none"]
    lines: Lines = []
    with Gallery.open(place) as gallery:
        gallery.search(queries[0], K)
        lists = gallery._store.index._lists  # type: ignore[attr-defined]
        centroids, starts, probes = np.array(lists.centroids), np.array(lists.starts), lists.probes
        list_of = np.empty(len(lists), np.int64)
        list_of[np.array(lists.ids) - 1] = np.repeat(np.arange(len(centroids)), np.diff(starts))
        for name in ("HNSW-SQ8",) if hnsw else (f"IVF-PQ{dim // 2}", "IVF-SQ8"):
            file = place.with_suffix(".faiss")
            begun = time.perf_counter()
            index = made(name, dim, centroids)
            fill(index, rows, dim, kind, None if hnsw else list_of)
            lines.append(
                (f"FAISS {name}: build" + ("" if hnsw else " (lists given)"), time.perf_counter() - begun, "s")
            )
            faiss.write_index(index, str(file))
            del index
            gc.collect()
            lines.append((f"FAISS {name}: file", file.stat().st_size / 2**30, "GiB"))
            before = memory()["VmRSS"]
            mapped = faiss.read_index(str(file), faiss.IO_FLAG_MMAP_IFC if hnsw else faiss.IO_FLAG_MMAP)
            for depth in (64, 128, 256) if hnsw else (probes, 2 * probes, 4 * probes):
                lines += searched(f"FAISS {name}", mapped, depth, gallery, queries, truth)
            lines.append((f"FAISS {name}: resident after searches", memory()["VmRSS"] - before, "GiB"))
            del mapped
            gc.collect()
            file.unlink()
    return lines


def made(name: str, dim: int, centroids: Floats) -> Any:
    import faiss

    metric = faiss.METRIC_INNER_PRODUCT
    if name.startswith("HNSW"):
        index = faiss.IndexHNSWSQ(dim, faiss.ScalarQuantizer.QT_8bit, 16, metric)
        index.hnsw.efConstruction = 100
        return index
    quantizer = faiss.IndexFlatIP(dim)
    quantizer.add(centroids)
    if name.startswith("IVF-PQ"):
        index = faiss.IndexIVFPQ(quantizer, dim, len(centroids), dim // 2, 8, metric)
    else:
        index = faiss.IndexIVFScalarQuantizer(quantizer, dim, len(centroids), faiss.ScalarQuantizer.QT_8bit, metric)
    return index


def fill(index: Any, rows: int, dim: int, kind: str, list_of: Any) -> None:
    """With both cores; list_of: the list of each row, where the index has lists."""
    import faiss

    faiss.omp_set_num_threads(2)
    index.train(chunk_of_rows(0, dim, kind))
    for number in range(-(-rows // CHUNK)):
        part = chunk_of_rows(number, dim, kind, min(CHUNK, rows - number * CHUNK))
        if list_of is None:
            index.add(part)
            continue
        at = np.ascontiguousarray(list_of[number * CHUNK : number * CHUNK + len(part)])
        index.add_core(len(part), faiss.swig_ptr(part), None, faiss.swig_ptr(at))
    faiss.omp_set_num_threads(1)


def searched(
    name: str, index: Any, depth: int, gallery: Gallery, queries: Floats, truth: list[set[int]]
) -> list[tuple[str, float, str]]:
    if hasattr(index, "hnsw"):
        index.hnsw.efSearch = depth
    else:
        index.nprobe = min(depth, index.nlist)
    lines: Lines = []
    for how, wanted in (("", K), (", rescored", PROPOSED)):
        times, hits = [], 0
        for q, query in enumerate([*queries[:20], *queries], -20):
            begun = time.perf_counter()
            _, found = index.search(query[None], wanted)
            ids = [int(i) + 1 for i in found[0] if i >= 0]
            if how:
                ids = rescored(gallery, query, ids)
            times.append((time.perf_counter() - begun) * 1e3)
            hits += len(truth[q] & set(ids)) if 0 <= q < len(truth) else 0
        lines.append((f"{name}: p50 at {depth}{how}", float(np.median(times[20:])), "ms"))
        lines.append((f"{name}: recall@10 at {depth}{how}", hits / (K * min(len(truth), len(queries))), ""))
    return lines


def rescored(gallery: Gallery, query: Floats, ids: list[int]) -> list[int]:
    rows = gallery._store.rows(ids)
    cosines = similarities(unpack([row.vector for row in rows.values()], gallery.dim), query)
    return [id for _, id in sorted(zip((-cosines).tolist(), rows, strict=True))[:K]]
