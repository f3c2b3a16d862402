"""Losses in blocks of rows: peak memory at B = 8,192 within 256 MiB, time against one piece: python
benchmarks/blockwise.py

D = 128, float32 on the CPU, 4 items per class, forward and backward. Memory: the rise of the process's peak resident
memory over what it used before, in a separate process whose allocator returns freed blocks at once. Time: the
better of two steps at B = 4,096 after a warm-up, in blocks of 256 MiB and in one piece, by turns in one process.
`python benchmarks/blockwise.py NAME` for one loss. Linux only.
"""

import argparse
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch

import measure
from nearkin import losses

D, LARGE, TIMED, BOUND = 128, 8192, 4096, 2**28
LOSSES = {
    "ContrastiveLoss": "ContrastiveLoss(**m)",
    "MarginLoss, all pairs": "MarginLoss(selection='all', **m)",
    "MarginLoss, distance-weighted": "MarginLoss(**m)",
    "MultiSimilarityLoss": "MultiSimilarityLoss(**m)",
    "CircleLoss": "CircleLoss(**m)",
    "SupConLoss": "SupConLoss(**m)",
    "InfoNCELoss": "InfoNCELoss(**m)",
    "NPairLoss": "NPairLoss(**m)",
    "LiftedStructureLoss": "LiftedStructureLoss(**m)",
    "TripletLoss, batch-hard": "TripletLoss(selection='batch_hard', **m)",
    "TripletLoss, semi-hard": "TripletLoss(**m)",
    "TripletLoss, all": "TripletLoss(selection='all', **m)",
    "LosslessTripletLoss": "LosslessTripletLoss(**m)",
    "LogRatioLoss": "LogRatioLoss(**m)",
    "FastAPLoss": "FastAPLoss(**m)",
    "SmoothAPLoss": "SmoothAPLoss(**m)",
}


def step_of(name: str, size: int, max_memory: int):
    """One step of a loss, forward and backward; returns value and gradient."""
    torch.manual_seed(0)
    loss = eval(LOSSES[name], vars(losses) | {"m": {"max_memory": max_memory}})  # of the table above, nothing else
    x, y = torch.randn(size, D, requires_grad=True), torch.arange(size) // 4
    y = y.float() if "LogRatio" in name else y

    def step():
        x.grad = None
        value = loss(x, y)
        value.backward()
        return value.detach(), x.grad

    return step


def peak(name: str) -> float:
    """MiB that a step at B = 8,192 adds, in this process."""
    step_of(name, 64, 900_000)()  # in blocks: what torch loads at its first checkpoint, 150 MiB, is not the loss's
    return measure.peak_mib(step_of(name, LARGE, BOUND), "cpu")


def times(name: str) -> tuple[float, float, float]:
    """Milliseconds in blocks and in one piece at B = 4,096, and how far their gradients are apart, relatively."""
    tiled, dense = step_of(name, TIMED, BOUND), step_of(name, TIMED, 2**34)
    torch.manual_seed(1)
    _, a = tiled()
    torch.manual_seed(1)  # where pairs are drawn, the same
    _, b = dense()
    apart = float((a - b).abs().max() / b.abs().max())
    seconds_by_form: tuple[list[float], list[float]] = ([], [])
    for _ in range(2):
        for step, taken in zip((tiled, dense), seconds_by_form, strict=True):
            begun = time.perf_counter()
            step()
            taken.append((time.perf_counter() - begun) * 1e3)
    return min(seconds_by_form[0]), min(seconds_by_form[1]), apart


def main(chosen: list[str]) -> None:
    rows = []
    print(f"{'loss':32}{'MiB, B=8192':>12}{'blocks ms':>12}{'one piece ms':>14}{'ratio':>8}{'apart':>10}")
    for name in chosen:
        done = subprocess.run(
            [sys.executable, __file__, "--peak", name], capture_output=True, text=True, env=measure.frugal_environment()
        )
        if done.returncode:
            raise RuntimeError(done.stderr)
        mib = float(done.stdout)
        tiled, dense, apart = times(name)
        print(f"{name:32}{mib:>12.1f}{tiled:>12.0f}{dense:>14.0f}{tiled / dense:>8.2f}{apart:>10.1e}", flush=True)
        figures = [f"{mib:.1f}", BOUND >> 20, f"{tiled:.0f}", f"{dense:.0f}", f"{tiled / dense:.2f}", f"{apart:.1e}"]
        rows.append([name, f"{platform.machine()} cpu, {os.cpu_count()} cores", torch.get_num_threads(), D, *figures])
        if len(chosen) == len(LOSSES):  # the file grows with each loss: all of them take a quarter of an hour
            header = ["loss", "machine", "threads", "D", "mib_at_8192", "bound_mib", "blocks_ms_at_4096"]
            header += ["one_piece_ms_at_4096", "ratio", "gradient_apart"]
            measure.write_csv(Path(__file__).parent / "results" / "blockwise_cpu.csv", header, rows)
    over = [row[0] for row in rows if float(str(row[4])) > BOUND / 2**20]
    if over:
        sys.exit(f"over the bound: {', '.join(map(str, over))}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("losses", nargs="*", metavar="NAME", help="all losses without one")
    parser.add_argument("--peak", metavar="NAME", help="print the MiB of one loss; meant for a separate process")
    options = parser.parse_args()
    if options.peak:
        print(peak(options.peak))
    else:
        main(options.losses or list(LOSSES))
