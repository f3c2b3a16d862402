"""Evaluation at the size of Stanford Online Products beside a plain faiss search: python benchmarks/evaluation.py

60,502 × 512 float32, leave-one-out, recall@{1,10,100,1000} and MAP@R, against a faiss-cpu flat search of the same k
(extra `ann`) in the same run; with --clustering k-means with 11,316 clusters; then 10,000 queries against a gallery of
1,000,000 × 128. On a GPU the same without faiss. Memory: what the call adds at its peak to what was allocated before;
on a CPU in a separate process that gives freed memory back at once, since what the allocator keeps is no need of ours.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

import measure
from nearkin import evaluation

ITEMS, DIM, CLASSES = 60_502, 512, 11_316
KS = (1, 10, 100, 1000)
REPEATS = {"cpu": range(1), "cuda": range(5)}  # the median is written


def items(number: int, dim: int, classes: int, device: str) -> tuple[Tensor, Tensor]:
    """Unit vectors loosely around class means, about as hard as a trained embedding: recall@1 well below 1."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(number) % classes
    means = torch.randn(classes, dim, generator=generator)
    x = means[labels].add_(torch.randn(number, dim, generator=generator), alpha=2.0)
    return torch.nn.functional.normalize(x).to(device), labels.to(device)


def with_bar(call: Callable[..., object]) -> object:
    columns = BarColumn(), TextColumn("{task.completed} of {task.total} queries"), TimeRemainingColumn()
    with Progress(*columns, transient=True) as bars:
        bar = bars.add_task("search")
        return call(progress=lambda done, total: bars.update(bar, completed=done, total=total))


def timed(call: Callable[[], object], device: str) -> tuple[float, float, Any]:
    """Seconds, MiB and the result of one call."""
    results: list[Any] = []
    if device == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    mib = measure.peak_mib(lambda: results.append(call()), device)
    return time.perf_counter() - begun, mib, results[0]


def faiss_seconds(x: Tensor, queries: Tensor, k: int) -> float | None:
    try:
        import faiss
    except ImportError:
        print("faiss is not installed: no comparison (pip install faiss-cpu)")
        return None
    faiss.omp_set_num_threads(torch.get_num_threads())
    begun = time.perf_counter()
    index = faiss.IndexFlatIP(x.shape[1])
    index.add(x.numpy())
    index.search(queries.numpy(), k)
    return time.perf_counter() - begun


def compares(device: str) -> bool:
    return device == "cpu" and "--memory" not in sys.argv


def leave_one_out(device: str, clustering: bool) -> Iterator[list[object]]:
    """The test half of Stanford Online Products, in size."""
    x, y = items(ITEMS, DIM, CLASSES, device)
    evaluation.retrieval(x[:2000], y[:2000])  # libraries load on the first call
    peer = faiss_seconds(x, x, KS[-1] + 1) if compares(device) else None
    yield ["retrieval, leave-one-out", f"{ITEMS} x {DIM}", *measured(device, peer, x, y, ks=KS)]
    if clustering:
        seconds, mib, scores = timed(lambda: evaluation.clustering(x, y, seed=0), device)
        nmi = f"nmi {scores['nmi']:.4f}"
        yield ["clustering", f"{ITEMS} x {DIM} in {CLASSES}", f"{seconds:.2f}", f"{mib:.0f}", "", "", nmi]


def large_gallery(device: str) -> Iterator[list[object]]:
    gallery, labels = items(1_000_000, 128, 100_000, device)
    noise = torch.randn(10_000, 128, generator=torch.Generator().manual_seed(1)).to(device)
    queries, query_labels = gallery[:10_000] + 0.02 * noise, labels[:10_000]
    peer = faiss_seconds(gallery, queries, 11) if compares(device) else None
    settings = {"gallery": gallery, "gallery_labels": labels, "ks": (1, 10)}
    yield ["retrieval, gallery", "10000 in 1000000 x 128", *measured(device, peer, queries, query_labels, **settings)]


def measured(device: str, peer: float | None, x: Tensor, y: Tensor, **settings: Any) -> list[object]:
    """Seconds, MiB, faiss's seconds, their ratio, and what came out."""
    if "--memory" in sys.argv:
        print(f"{measure.peak_mib(lambda: evaluation.retrieval(x, y, **settings), device):.0f}")
        sys.exit()
    runs = [timed(lambda: with_bar(partial(evaluation.retrieval, x, y, **settings)), device) for _ in REPEATS[device]]
    seconds, mib, scores = sorted(runs, key=lambda run: run[0])[len(runs) // 2]
    if device == "cpu":
        name = "gallery" if "gallery" in settings else "leave-one-out"
        child = [sys.executable, __file__, "--memory", name]
        child_run = subprocess.run(child, env=measure.frugal_environment(), check=True, capture_output=True, text=True)
        mib = float(child_run.stdout.split()[-1])
    note = f"recall@1 {scores['recall@1']:.4f}, map@r {scores['map@r']:.4f}"
    against = ["", ""] if peer is None else [f"{peer:.2f}", f"{seconds / peer:.2f}"]
    return [f"{seconds:.2f}", f"{mib:.0f}", *against, note]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--clustering", action="store_true", help="k-means too: about ten minutes on a CPU")
    parser.add_argument("--memory", choices=["leave-one-out", "gallery"], help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="default: results/evaluation_cpu.csv or evaluation_gpu.csv")
    arguments = parser.parse_args()
    device = arguments.device
    if device == "cpu":
        torch.set_num_threads(2)
    hardware = torch.cuda.get_device_name() if device == "cuda" else "cpu, 2 threads"
    if arguments.memory == "gallery":
        next(large_gallery(device))
    rows = []
    for row in chain(leave_one_out(device, arguments.clustering), large_gallery(device)):
        print(*row, sep=" | ", flush=True)
        rows.append([row[0], hardware, *row[1:]])
    name = "evaluation_cpu.csv" if device == "cpu" else "evaluation_gpu.csv"
    header = ["what", "device", "size", "seconds", "extra_mib", "faiss_seconds", "ratio", "note"]
    measure.write_csv(arguments.out or Path(__file__).parent / "results" / name, header, rows)


if __name__ == "__main__":
    main()
