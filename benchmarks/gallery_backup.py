"""Backup, restore and copy of a gallery beside a plain copy of its file: python benchmarks/gallery_backup.py

1,000,000 × 128 by default, in groups of 10 with a label each. Each call is made in a process of its own: `seconds` is
its time, `ratio` that divided by the time of copying the file and flushing the copy, right before it on the same disk;
`cpu_s` and `copy_cpu_s` are what each of them computed, which a busy machine changes less; `peak_mib` is what the
process used at most beyond what it has after importing nearkin. `part` is a backup after 1,000
rows were added, 1,000 removed and 1,000 relabelled.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import measure
from gallery import DIM, random_rows
from nearkin.gallery import Gallery

HEADER = ["what", "rows", "dim", "file_mib", "seconds", "copy_s", "ratio", "cpu_s", "copy_cpu_s", "peak_mib"]
CHILD = """
import json, sys, time
import measure
from nearkin import gallery

def call():
    name, *arguments = sys.argv[1:]
    getattr(gallery, name)(*arguments)

gallery.Gallery  # everything is imported before
begun, worked = time.perf_counter(), time.process_time()
peak = measure.peak_mib(call, "cpu")
print(json.dumps([time.perf_counter() - begun, time.process_time() - worked, peak]))
"""


def copied(path: Path) -> tuple[float, float]:
    """Seconds of a flushed copy, and of them those that this process computed."""
    begun, worked, target = time.perf_counter(), time.process_time(), path.with_name("copied")
    shutil.copyfile(path, target)
    with target.open("rb+") as file:
        os.fsync(file.fileno())
    seconds, busy = time.perf_counter() - begun, time.process_time() - worked
    target.unlink()
    return seconds, busy


def measured(what: str, path: Path, rows: int, *call: object) -> list[object]:
    copy_seconds, copy_busy = copied(path)
    command = [sys.executable, "-c", CHILD, *map(str, call)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
    seconds, busy, peak = json.loads(output)
    times = [seconds, copy_seconds, seconds / copy_seconds, busy, copy_busy]
    line = [what, rows, DIM, f"{path.stat().st_size / 2**20:.0f}", *(f"{value:.2f}" for value in times), f"{peak:.0f}"]
    print(*(f"{value!s:>10}" for value in line), flush=True)
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    count = parser.parse_args().rows
    lines = []
    with tempfile.TemporaryDirectory() as scratch:
        path, kept = Path(scratch) / "g.gallery", Path(scratch) / "kept"
        with Gallery.open(path, dim=DIM) as gallery:
            for start in range(0, count, 100_000):
                size = min(100_000, count - start)
                rows = random_rows(size, "groups", seed=start)
                gallery.enrol(rows, [f"group {(start + i) // 10}" for i in range(size)])
        print(*(f"{name:>10}" for name in HEADER))
        lines.append(measured("full", path, count, "backup", path, kept))
        with Gallery.open(path, dim=DIM) as gallery:
            gallery.enrol(random_rows(1000, "random", seed=1), "new")
            gallery.remove(list(range(1, 1001)))
            gallery.relabel(list(range(1001, 2001)), "moved")
        lines.append(measured("part", path, count, "backup", path, kept))
        lines.append(measured("check", path, count, "check_backup", kept))
        lines.append(measured("restore", path, count, "restore", kept, Path(scratch) / "restored"))
        lines.append(measured("copy", path, count, "copy", path, Path(scratch) / "copy"))
    measure.write_csv(Path(__file__).parent / "results" / "gallery_backup.csv", HEADER, lines)


if __name__ == "__main__":
    main()
