"""Pictures: decoding into the cache, reading from it, the warp: python benchmarks/images.py [--out FILE]

Each row stands beside what it replaces, timed in turns in one process, one thread each; on the CPU in processor time,
which neighbours on the machine do not lengthen, but which leaves out waiting for the disk:
- store: pictures decoded, resized, hashed, checked and written, beside a bare loop of Pillow's decoding and resizing;
- start: the same set when its cache is there, beside the first time;
- rows: 128 random rows from the mapped file, beside the same from memory, and beside decoding 128 JPEGs again;
- warp: 128 pictures with everything that photos get, beside a bare F.grid_sample of floats that are there already.
Photos are drawn here, 500 x 375 at JPEG quality 90; real ones come from the archive of birds where it is present.
"""

import argparse
import io
import os
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

import measure
from nearkin.data import augment, image_cache

BIRDS = Path(__file__).parents[2] / "shared" / "data" / "CUB_200_2011" / "cub200_2011_small.tar"
HEADER = ["what", "device", "size", "ms", "rate_per_s", "beside", "beside_ms", "ratio"]
B = 128


class Bytes:
    """Encoded pictures in memory, so that no disk is measured but the cache's."""

    def __init__(self, data: list[bytes]) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def read(self, i: int) -> bytes:
        return self.data[i]

    def stamp(self, i: int) -> str:
        return f"{i} {len(self.data[i])}"


def drawn(count: int) -> Bytes:
    rng = np.random.default_rng(0)
    data = []
    for _ in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (30, 40, 3), np.uint8))
        buffer = io.BytesIO()
        coarse.resize((500, 375), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
        data.append(buffer.getvalue())
    return Bytes(data)


def birds(count: int) -> Bytes:
    with tarfile.open(BIRDS) as archive:
        members = [m for m in archive.getmembers() if m.name.endswith(".jpg")][:count]
        return Bytes([archive.extractfile(m).read() for m in members])


def plain_decoding(data: list[bytes], side: int) -> None:
    """What a data loader does every epoch: the picture, short side to `side`, the middle of it."""
    for content in data:
        image = Image.open(io.BytesIO(content)).convert("RGB")
        short = min(image.size)
        size = (max(side, image.width * side // short), max(side, image.height * side // short))
        left, top = (size[0] - side) // 2, (size[1] - side) // 2
        np.asarray(image.resize(size, Image.Resampling.BICUBIC).crop((left, top, left + side, top + side)))


def in_turns(
    ours: Callable[[], object], other: Callable[[], object], device: str, times: int
) -> tuple[float, float, float]:
    """Median ms of each, and the median of their ratio turn by turn, so that a neighbour's load hits both."""
    each: list[tuple[float, float]] = []
    for _ in range(times + 1):
        row = []
        for step in (ours, other):
            if device == "cuda":
                torch.cuda.synchronize()
            clock = time.perf_counter if device == "cuda" else time.process_time
            begun = clock()
            step()
            if device == "cuda":
                torch.cuda.synchronize()
            row.append((clock() - begun) * 1e3)
        each.append((row[0], row[1]))
    each = each[1:]  # the first is the warm-up
    return (
        statistics.median(a for a, _ in each),
        statistics.median(b for _, b in each),
        statistics.median(a / b for a, b in each),
    )


def of_the_cache(add: Callable[..., None], name: str, pictures: Bytes, side: int) -> None:
    names = [str(i) for i in range(len(pictures))]

    def first() -> None:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["NEARKIN_CACHE"] = folder
            image_cache.store(pictures, names, side=side, workers=1)

    count = len(pictures)
    size = f"{count} {name} to {side} px"
    add(
        "store",
        "cpu",
        size,
        count,
        "Pillow alone",
        *in_turns(first, lambda: plain_decoding(pictures.data, side), "cpu", 3),
    )
    with tempfile.TemporaryDirectory() as folder:
        os.environ["NEARKIN_CACHE"] = folder
        begun = time.process_time()
        cache = image_cache.store(pictures, names, side=side, workers=1)
        took = (time.process_time() - begun) * 1e3
        again, _, _ = in_turns(lambda: image_cache.store(pictures, names, side=side), lambda: None, "cpu", 5)
        add("start", "cpu", size, count, "first time", again, took, again / took)
        memory, rng = np.array(cache.pixels), np.random.default_rng(0)
        size = f"{B} of {count}, {side} px"

        def chosen() -> np.ndarray:
            return rng.integers(0, count, B)

        figures = in_turns(lambda: cache.rows(chosen()), lambda: memory[chosen()], "cpu", 50)
        add("rows", "cpu", size, B, "memory", *figures)
        some = pictures.data[:B]
        figures = in_turns(lambda: cache.rows(chosen()), lambda: plain_decoding(some, side), "cpu", 5)
        add("rows", "cpu", size, B, "decoding again", *figures)


def of_the_warp(add: Callable[..., None], device: str, hardware: str, side: int, size: int) -> None:
    images = torch.randint(0, 256, (B, side, side, 3), dtype=torch.uint8).to(device)
    keys = augment.keys(0, 0, torch.arange(B))
    floats = images.permute(0, 3, 1, 2).float().contiguous()
    plain = augment.Augmentation()
    affine = augment._affine(augment.uniforms(0, keys, augment.NUMBERS), plain).to(device)
    grid = F.affine_grid(affine, [B, 3, size, size], align_corners=False)
    figures = in_turns(
        lambda: augment.warp(images, keys, size=size, augmentation=plain),
        lambda: F.grid_sample(floats, grid, padding_mode="reflection", align_corners=False),
        device,
        15,
    )
    add("warp", hardware, f"{B} of {side} px to {size}", B, "bare grid_sample", *figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "images.csv")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[list[object]] = []
    print("".join(f"{title:>20}" for title in HEADER))

    def add(what: str, device: str, size: str, count: int, beside: str, ms: float, other: float, ratio: float) -> None:
        where = "cpu, 1 thread" if device == "cpu" else device
        rows.append([what, where, size, f"{ms:.2f}", f"{count / ms * 1e3:.0f}", beside, f"{other:.2f}", f"{ratio:.3g}"])
        print("".join(f"{cell!s:>20}" for cell in rows[-1]), flush=True)

    for side in (64, 224):
        of_the_cache(add, "photos", drawn(400), side)
    if BIRDS.exists():
        of_the_cache(add, "birds", birds(2000), 64)
    devices = [("cpu", "cpu"), *([("cuda", torch.cuda.get_device_name())] if torch.cuda.is_available() else [])]
    for device, hardware in devices:
        for side, size in ((72, 64), (256, 224)):
            of_the_warp(add, device, hardware, side, size)
    measure.write_csv(arguments.out, HEADER, rows)


if __name__ == "__main__":
    main()
