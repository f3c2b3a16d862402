"""What the benchmark scripts share: a median time, a peak of memory, a result file that is whole or absent."""

import csv
import os
import time
from collections.abc import Callable, Iterable
from datetime import date
from pathlib import Path

import torch


def frugal_environment() -> dict[str, str]:
    """For a process whose allocator returns freed blocks at once, so that its peaks are real ones."""
    return os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def status(key: str) -> int:
    """KiB of this process, as the kernel counts them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1])


def peak_mib(step: Callable[[], object], device: str) -> float:
    """MiB that one call holds at its peak beyond what was held before."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    step()
    return max(status("VmHWM") - before, 0) / 1024


def median_ms(step: Callable[[], object], device: str, seconds: float = 1.0, least: int = 3) -> float:
    """Median of repeated calls after a warm-up, with device events where there is a device."""
    step()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < least or (time.perf_counter() < end and len(times) < 200):
        if device == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            step()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop))
        else:
            begun = time.perf_counter()
            step()
            times.append((time.perf_counter() - begun) * 1e3)
    return sorted(times)[len(times) // 2]


def write_csv(path: Path, header: list[str], rows: Iterable[list[object]]) -> None:
    """Rows with the torch version and the date, to a temporary name first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    with part.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*header, "torch", "date"])
        writer.writerows([*row, torch.__version__, date.today().isoformat()] for row in rows)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
