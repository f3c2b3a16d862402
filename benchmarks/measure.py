"""What the benchmark scripts share: a median time, a peak of memory, a result file that is complete or absent."""

import csv
import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
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
    """MiB that one call allocates at its peak beyond what was allocated before."""
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


def once_ms(step: Callable[[], object], device: str) -> float:
    """One call, by device events where there is a device."""
    if device == "cuda":
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop)
    begun = time.perf_counter()
    step()
    return (time.perf_counter() - begun) * 1e3


def busy_ms(step: Callable[[], object], steps: int = 8) -> float:
    """A step's time on a GPU that never waits for the host: a pause holds it until all steps are queued.

    So it is in training, where the encoder's work keeps the device behind. Only for steps that read nothing back.
    """
    begun = time.perf_counter()
    step()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - begun) * steps * 1.5 + 0.01
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(seconds * 2e9))  # cycles
    start.record()
    for _ in range(steps):
        step()
    stop.record()
    if start.query():
        raise RuntimeError("the steps were queued too slowly, or one of them waits for the device")
    stop.synchronize()
    return start.elapsed_time(stop) / steps


def median_ms(
    step: Callable[[], object], device: str, seconds: float = 1.0, least: int = 3, *, warm: bool = False
) -> float:
    """Median of repeated calls after a warm-up, which a `warm` step has had."""
    if not warm:
        step()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < least or (time.perf_counter() < end and len(times) < 200):
        times.append(once_ms(step, device))
    return sorted(times)[len(times) // 2]


def medians_by_turns(
    steps: Sequence[Callable[[], object]], device: str, seconds: float = 1.0, least: int = 3
) -> list[float]:
    """The medians of several warm steps that follow each other round by round: other load hits all of them alike.

    In a round a quick step has several calls, a slow one only one.
    """
    times: list[list[float]] = [[] for _ in steps]
    end = time.perf_counter() + seconds * len(steps)
    rounds = 0
    while rounds < least or (time.perf_counter() < end and rounds < 200):
        rounds += 1
        for step, taken in zip(steps, times, strict=True):
            spent = 0.0
            while spent < 20:
                taken.append(once_ms(step, device))
                spent += taken[-1]
    return [sorted(taken)[len(taken) // 2] for taken in times]


def machine(device: str) -> str:
    """The machine, as a result file names it."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{platform.machine()} cpu, {torch.get_num_threads()} threads"


def write_csv(path: Path, header: list[str], rows: Iterable[list[object]], kept: Iterable[list[str]] = ()) -> None:
    """Rows with the torch version and the date, to a temporary name first. kept: those of earlier runs, with theirs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    with part.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*header, "torch", "date"])
        writer.writerows(kept)
        writer.writerows([*row, torch.__version__, date.today().isoformat()] for row in rows)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
