"""Size and CPU time of the encoders that need no download.

    python benchmarks/encoders.py            # benchmarks/results/encoders_cpu.csv

One picture at a time at the encoder's own size, already decoded; the median of 60 passes after 5, two threads.
"""

import csv
import statistics
import time
from datetime import datetime, timezone
from pathlib import Path

import torch

from nearkin import models

ENCODERS = {"small-cnn": 32, "efficientnet-lite0": 224, "efficientnet-lite1": 240, "efficientnet-lite2": 260}


def build(name: str, size: int) -> torch.nn.Module:
    """An encoder with a head of 128 dimensions; random weights take as long as pretrained ones."""
    settings = {"channels": 3, "size": size} if name == "small-cnn" else {"pretrained": False}
    return models.build(name, dim=128, **settings).eval()


@torch.inference_mode()
def milliseconds(encoders: dict[str, torch.nn.Module]) -> dict[str, float]:
    """Median time of one picture; all encoders take turns, so that other load hits them alike."""
    times: dict[str, list[float]] = {name: [] for name in encoders}
    for _ in range(65):
        for name, encoder in encoders.items():
            picture = torch.rand(1, 3, ENCODERS[name], ENCODERS[name])
            start = time.perf_counter()
            encoder(picture)
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(passes[5:]) for name, passes in times.items()}


def main() -> None:
    """Writes one row per encoder."""
    torch.set_num_threads(2)
    encoders = {name: build(name, size) for name, size in ENCODERS.items()}
    measured = milliseconds(encoders)
    with open(Path(__file__).parent / "results" / "encoders_cpu.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["encoder", "size", "million_weights", "mib", "ms", "threads", "torch", "date"])
        for name, size in ENCODERS.items():
            count = sum(p.numel() for p in encoders[name].parameters())
            row = [name, size, f"{count / 1e6:.2f}", f"{count * 4 / 2**20:.1f}", f"{measured[name]:.1f}"]
            rows.writerow([*row, 2, torch.__version__, datetime.now(timezone.utc).date()])
            print(*row)


if __name__ == "__main__":
    main()
