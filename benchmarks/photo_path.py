"""How many files a photo crosses on its way from `nearkin train photos/` to its report.

    python benchmarks/photo_path.py            # the counts
    python benchmarks/photo_path.py --list     # and every function, in the order in which it is first called

A folder of 48 small photos is trained on for one epoch under a tracer. Counted are the public functions of modules (no
methods, no names with an underscore), each where it is first called: the order in which a reader who follows the run
opens them. "Changes of file" are the places in that order where the next function is in another file.
"""

import argparse
import os
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from PIL import Image

import nearkin

ROOT = str(Path(nearkin.__file__).parent) + os.sep


def photos(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for label in range(8):
        (folder / f"class{label}").mkdir(parents=True)
        for number in range(6):
            pixels = rng.integers(0, 255, (48, 48, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"class{label}" / f"{number}.png")


def first_calls() -> list[tuple[str, str]]:
    """(file, qualified name) of every function of the package that the run calls, in the order of first calls."""
    from nearkin.cli import app

    order: dict[tuple[str, str], None] = {}

    def trace(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT) and code.co_name != "<module>":
            order.setdefault((code.co_filename[len(ROOT) :], code.co_qualname))

    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        photos(Path(folder) / "photos")
        os.chdir(folder)
        sys.setprofile(trace)
        threading.setprofile(trace)
        try:
            app(["train", "photos", "--set", "training.epochs=1", "--out", "run", "--quiet"], standalone_mode=False)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            os.chdir(before)
    return list(order)


def is_public(name: str) -> bool:
    return "." not in name and "<" not in name and not name.startswith("_")


def counts(calls: list[tuple[str, str]]) -> str:
    files = [file for file, _ in calls]
    changes = sum(now != then for now, then in zip(files[1:], files, strict=False))
    return f"{len(calls)} functions in {len(set(files))} files, {changes} changes of file"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print the functions, too")
    options = parser.parse_args()
    if sys.version_info < (3, 11):
        parser.error("needs Python 3.11 or newer, for the qualified names of functions")
    calls = first_calls()
    public = [(file, name) for file, name in calls if is_public(name)]
    if options.list:
        for file, name in public:
            print(f"{file}: {name}")
    print(f"public functions: {counts(public)}")
    print(f"with methods and private ones: {counts(calls)}")


if __name__ == "__main__":
    main()
