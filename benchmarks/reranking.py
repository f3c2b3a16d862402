"""k-reciprocal re-ranking from neighbour lists beside a dense one: python benchmarks/reranking.py

60,502 × 512 float32 (Stanford Online Products' test set), `evaluation.retrieval` without and with rerank; and a dense
version with N × N float32 matrices, as public implementations have it, at the sizes of --dense, where both are timed in
the same run. Memory: what a call adds at its peak, in a process of its own that gives freed memory back at once.
Processor seconds are written beside those of the clock: the machine may be shared.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import measure
from evaluation import CLASSES, DIM, ITEMS, items
from nearkin import evaluation

Matrix = NDArray[np.float32]


def dense(x: Matrix, k1: int, k2: int, share: float) -> Matrix:
    """d* (N, N) of a set that searches itself: distances, ranks, weights and averages are matrices of all pairs."""
    distance = np.maximum(2 - 2 * (x @ x.T), 0)
    distance /= distance.max(1, keepdims=True)
    order = np.argsort(distance, 1).astype(np.int32)
    half = round(k1 / 2)
    weights = np.zeros_like(distance)

    def reciprocal(i: int, k: int) -> NDArray[np.int32]:
        near = order[i, : k + 1]
        return near[(order[near, : k + 1] == i).any(1)]

    for i in range(len(x)):
        near = reciprocal(i, k1)
        sets = [near]
        for j in near:
            others = reciprocal(j, half)
            if 3 * len(np.intersect1d(others, near)) > 2 * len(others):
                sets.append(others)
        wide = np.unique(np.concatenate(sets))
        weight = np.exp(-distance[i, wide])
        weights[i, wide] = weight / weight.sum()
    averaged = np.stack([weights[order[i, :k2]].mean(0) for i in range(len(x))])
    columns = [np.flatnonzero(averaged[:, j]) for j in range(len(x))]
    result = np.empty_like(distance)
    for i in range(len(x)):
        overlap = np.zeros(len(x), np.float32)
        for j in np.flatnonzero(averaged[i]):
            overlap[columns[j]] += np.minimum(averaged[i, j], averaged[columns[j], j])
        result[i] = (1 - share) * (1 - overlap / (2 - overlap)) + share * distance[i]
    return result


def map_at_r(distance: Matrix, labels: NDArray[np.int64]) -> float:
    np.fill_diagonal(distance, np.inf)
    values = []
    for row, label in zip(distance, labels, strict=True):
        positives = int((labels == label).sum()) - 1
        first = np.argsort(row)[:positives]
        hit = labels[first] == label
        values.append((hit * np.cumsum(hit) / np.arange(1, positives + 1)).sum() / positives if positives else np.nan)
    return float(np.nanmean(values))


def worker(what: str, number: int, k1: int, k2: int) -> dict[str, Any]:
    x, labels = items(number, DIM, max(2, number * CLASSES // ITEMS), "cpu")
    scores: list[float] = []
    calls: dict[str, Callable[[], object]] = {
        "plain": lambda: scores.append(evaluation.retrieval(x, labels)["map@r"]),
        "lists": lambda: scores.append(evaluation.retrieval(x, labels, rerank=evaluation.KReciprocal(k1, k2))["map@r"]),
        "dense": lambda: scores.append(map_at_r(dense(x.numpy(), k1, k2, 0.3), labels.numpy())),
    }
    begun, busy = time.perf_counter(), time.process_time()
    mib = measure.peak_mib(calls[what], "cpu")
    seconds, busy = time.perf_counter() - begun, time.process_time() - busy
    row = {
        "what": what,
        "N": number,
        "D": DIM,
        "k1": k1 if what != "plain" else "",
        "k2": k2 if what != "plain" else "",
    }
    row |= {"seconds": round(seconds, 1), "processor_seconds": round(busy, 1), "extra_mib": round(mib)}
    return row | {"map@r": round(scores[0], 6)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=ITEMS)
    parser.add_argument("--dense", type=int, nargs="*", default=[2000, 4000])
    parser.add_argument("--k1", type=int, default=20)
    parser.add_argument("--k2", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "reranking_cpu.csv")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(worker(options.worker, options.items, options.k1, options.k2)))
        return
    rows = []
    cells = [(what, number) for number in options.dense for what in ("dense", "lists")]
    for what, number in [*cells, ("plain", options.items), ("lists", options.items)]:
        command = [sys.executable, __file__, "--worker", what, "--items", str(number)]
        command += ["--k1", str(options.k1), "--k2", str(options.k2)]
        text = subprocess.run(command, env=measure.frugal_environment(), capture_output=True, text=True, check=True)
        rows.append(json.loads(text.stdout) | {"threads": torch.get_num_threads()})
        print(rows[-1], flush=True)
        measure.write_csv(options.out, list(rows[-1]), [list(row.values()) for row in rows])


if __name__ == "__main__":
    main()
