"""What the studies that kill have in common: a run's progress by its log, a kill at a chosen moment, ranks, data."""

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np


def logged(folder: Path) -> int:
    """The step of the last complete line of a run's log."""
    log = folder / "metrics.jsonl"
    lines = [line for line in log.read_text().splitlines() if line.endswith("}")] if log.exists() else []
    return int(json.loads(lines[-1])["step"]) if lines else 0


def killed(arguments: list[str], progress: Callable[[Path], int], folder: Path, point: int, after: float) -> bool:
    """Whether a command was still running when it was killed: some seconds after the progress of its folder."""
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and progress(folder) < point:
        time.sleep(0.001)
    time.sleep(after)
    running = process.poll() is None
    process.kill()
    process.wait()
    return running


def vectors(path: Path) -> Path:
    """20 small classes, which a CPU learns in no time."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(20), 8)
    rows = rng.normal(size=(20, 12))[labels] + 0.7 * rng.normal(size=(len(labels), 12))
    np.savez(path, embeddings=rows.astype(np.float32), labels=labels)
    return path


def ranks_of(agent: int) -> dict[int, int]:
    """The processes of the ranks that torchrun has started."""
    ranks = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            settings = (path / "environ").read_text().split("\0") if parent == agent else []
        except (OSError, ValueError):
            continue
        for text in settings:
            if text.startswith("RANK="):
                ranks[int(text[5:])] = int(path.name)
    return ranks
