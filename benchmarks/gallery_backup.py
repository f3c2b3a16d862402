"""Backup, restore and copy of a gallery beside a plain copy of its file: python benchmarks/gallery_backup.py

1,000,000 × 128 by default, in groups of 10 with a label each. Each call is made in a process of its own: `seconds` is
its time, `ratio` that divided by the time of copying the file and flushing the copy, right before it on the same disk;
`peak_mib` is what the process used at most beyond what it has after importing nearkin. `part` is a backup after 1,000
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

HEADER = ["what", "rows", "dim", "file_mib", "seconds", "copy_s", "ratio", "peak_mib"]
CHILD = """
import json, resource, sys, time
from nearkin import gallery
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
name, arguments = sys.argv[1], sys.argv[2:]
begun = time.perf_counter()
getattr(gallery, name)(*arguments)
seconds = time.perf_counter() - begun
print(json.dumps([seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024]))
"""


def copied(path: Path) -> float:
    """Seconds of a flushed copy."""
    begun, target = time.perf_counter(), path.with_name("copied")
    shutil.copyfile(path, target)
    with target.open("rb+") as file:
        os.fsync(file.fileno())
    seconds = time.perf_counter() - begun
    target.unlink()
    return seconds


def measured(what: str, path: Path, rows: int, *call: object) -> list[object]:
    copy_seconds = copied(path)
    command = [sys.executable, "-c", CHILD, *map(str, call)]
    seconds, peak = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    size = path.stat().st_size / 2**20
    line = [what, rows, DIM, f"{size:.0f}", f"{seconds:.1f}", f"{copy_seconds:.2f}", f"{seconds / copy_seconds:.1f}"]
    print(*(f"{value!s:>10}" for value in [*line, f"{peak:.0f}"]), flush=True)
    return [*line, f"{peak:.0f}"]


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
