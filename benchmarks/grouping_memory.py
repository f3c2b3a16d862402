"""Time and peak memory of grouping many vectors: smoothing, the exact neighbour graph, linkage.

    python benchmarks/grouping_memory.py --items 100000 --dim 128

Vectors of random classes of 20; one process, as many threads as OMP_NUM_THREADS says. The peak is that of the process,
with torch and the vectors.
"""

import argparse
import resource
import time

import numpy as np
import torch

from nearkin import evaluation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--noise", type=float, default=1.2)
    parser.add_argument("--plain", action="store_true", help="a similarity of 0.25, without smoothing")
    parser.add_argument("--plda", action="store_true", help="by a model of 500 other classes")
    chosen = parser.parse_args()
    draw = np.random.default_rng(0)
    labels = np.repeat(np.arange(chosen.items // 20), 20)
    centres = draw.standard_normal((chosen.items // 20, chosen.dim), dtype=np.float32)
    rows = torch.from_numpy(centres[labels])
    rows += chosen.noise * torch.from_numpy(draw.standard_normal(rows.shape, dtype=np.float32))
    model = None
    if chosen.plda:
        others = np.repeat(draw.standard_normal((500, chosen.dim), dtype=np.float32), 20, 0)
        others += chosen.noise * draw.standard_normal(others.shape, dtype=np.float32)
        model = evaluation.fit_plda(others, np.repeat(np.arange(500), 20))
    before, begun, used = peak(), time.perf_counter(), time.process_time()
    if model is not None:
        groups = evaluation.group(rows, method="plda", model=model)
    elif chosen.plain:
        groups = evaluation.group(rows, similarity=0.25)
    else:
        smooth = evaluation.smoothed(rows)
        print(f"smoothed after {time.perf_counter() - begun:.0f} s, {peak():,.0f} MiB", flush=True)
        groups = evaluation.group(smooth, similarity=0.8)
    elapsed, cpu = time.perf_counter() - begun, time.process_time() - used
    number = int(groups.assignment.max()) + 1
    agreement = evaluation.bcubed(torch.from_numpy(labels), groups.assignment)["f"]
    spent = f"{elapsed:.0f} s ({cpu:.0f} s of one core)"
    print(f"{chosen.items:,} x {chosen.dim}: {spent}, peak {peak():,.0f} MiB, {before:,.0f} before")
    print(f"{groups.edges:,} edges, {groups.capped:,} items capped, {number:,} groups, B-cubed F {agreement:.3f}")


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
