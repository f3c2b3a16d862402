"""Trainings on few classes: what more items per class in a batch are worth, and what a training is worth at all.

    python studies/few_classes.py DATA [--out studies/results/few_classes.csv] [--jobs N] [--encoder efficientnet-lite0]

DATA holds fashion-mnist/, coil20/, omniglot/ and CUB_200_2011/ as published. Folders of 5, 10 and 30 classes are made
of it: 100 pictures of each digit of scikit-learn at 32 px, the first 100 test pictures of each kind of clothes, 72 of
each object, 20 drawings of each character, about 60 photos of each bird. Each is trained on with 2, 4, 8 and 16 items
of each class in a batch, `data.seed` and `training.seed` 0, 1 and 2, with items of every class held out and, from ten
classes on, with classes. small-cnn trains on all but the birds, a pretrained encoder (128 px) on these. A row has
MAP@R of the trained encoder, which is saved whatever validation finds, of the untrained one and of the baseline, on
validation and test, in per cent. A row that the file has already is not computed again.
"""

import argparse
import csv
import gzip
import io
import multiprocessing
import tarfile
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from nearkin import training
from nearkin.data import matlab

KEY = ("folder", "closed", "per_class", "seed")
FIVE = ("digits5", "clothes5", "birds5")
TEN = ("digits10", "clothes10", "objects10", "birds10")
THIRTY = ("characters30", "birds30")
EACH, SEEDS = (2, 4, 8, 16), (0, 1, 2)
SIDE = 32

Picture = tuple[str, Image.Image]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "few_classes.csv")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--encoder", choices=("small-cnn", "efficientnet-lite0"), default="small-cnn")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--set", action="append", default=[], help="further keys of the recipe, to try others")
    chosen = parser.parse_args(arguments)
    cells = [(f, True) for f in (*FIVE, *TEN)] + [(f, False) for f in (*TEN, *THIRTY)]
    cells = [cell for cell in cells if cell[0].startswith("birds") == (chosen.encoder != "small-cnn")]
    done: set[tuple[str, ...]] = set()
    if chosen.out.exists():
        with chosen.out.open(newline="") as file:
            done = {tuple(row[name] for name in KEY) for row in csv.DictReader(file)}
    jobs = [(*cell, each, seed) for each in reversed(EACH) for cell, seed in product(cells, SEEDS)]
    jobs = [job for job in jobs if tuple(map(str, job)) not in done]
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as home, ProcessPoolExecutor(chosen.jobs, context) as pool:
        write_folders(chosen.data, Path(home))
        options = (home, chosen.encoder, chosen.device, chosen.set)
        for future in as_completed([pool.submit(run, *job, *options) for job in jobs]):
            add(chosen.out, future.result())


def add(path: Path, row: dict[str, Any]) -> None:
    print(row, flush=True)
    fresh = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        if fresh:
            writer.writeheader()
        writer.writerow(row)


def run(
    folder: str, closed: bool, each: int, seed: int, home: str, encoder: str, device: str, sets: list[str]
) -> dict[str, Any]:
    """One training on one thread."""
    torch.set_num_threads(1)
    settings = [f"data.closed={str(closed).lower()}", f"data.seed={seed}", f"training.seed={seed}", *sets]
    settings += [f"sampler.per_class={each}", f"encoder.name={encoder}", f"training.device={device}"]
    settings += ["data.cache=false", "training.workers=0"]
    settings += ["training.keep_start=false"] if encoder == "small-cnn" else ["finetune.interpolate=false"]
    settings += [] if encoder == "small-cnn" else ["data.size=128"]
    with tempfile.TemporaryDirectory() as out:
        outcome = training.train(f"{home}/{folder}", f"{out}/run", settings=settings, report=False)
    results, start = outcome.results, outcome.results["start"]
    row = dict(zip(KEY, (folder, closed, each, seed), strict=True))
    row |= {"batch": outcome.recipe.sampler["batch"], "steps": results["steps"], "epoch": results["val"]["epoch"]}
    row |= {f"val_{who}": percent(start[who]) for who in ("trained", "start", "baseline")}
    row |= {f"test_{who}": percent(of["map@r"]["value"]) for who, of in results["test"].items()}
    row |= {"low": percent(start["gain"]["low"]), "helped": results["verdict"]["helped"]}
    return row | {"seconds": round(results["seconds"], 1)}


def percent(share: float) -> float:
    return round(100 * share, 2)


# --- the folders


def write_folders(source: Path, home: Path) -> None:
    """Each set's classes in their order; a folder has the first 5, 10 or 30."""
    sets = {"digits": digits(), "clothes": clothes(source), "objects": objects(source)}
    sets |= {"characters": characters(source), "birds": birds(source)}
    for name, pictures in sets.items():
        sizes = [int(folder.removeprefix(name)) for folder in (*FIVE, *TEN, *THIRTY) if folder.startswith(name)]
        seen: Counter[str] = Counter()
        for label, picture in pictures:
            place = list(seen).index(label) if label in seen else len(seen)
            for size in (size for size in sizes if place < size):
                file = home / f"{name}{size}" / label / f"{label}_{seen[label]:03d}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                picture.save(file)
            seen[label] += 1


def digits() -> Iterator[Picture]:
    from sklearn.datasets import load_digits

    content, seen = load_digits(), Counter[int]()
    for pixels, label in zip(content.images, content.target.tolist(), strict=True):
        if seen[label] < 100:
            picture = Image.fromarray((pixels * 255 / 16).round().astype(np.uint8))
            yield str(label), picture.resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        seen[label] += 1


def clothes(source: Path) -> Iterator[Picture]:
    home, seen = source / "fashion-mnist", Counter[int]()
    pixels = np.frombuffer(gzip.decompress((home / "t10k-images-idx3-ubyte.gz").read_bytes()), np.uint8, offset=16)
    labels = np.frombuffer(gzip.decompress((home / "t10k-labels-idx1-ubyte.gz").read_bytes()), np.uint8, offset=8)
    for picture, label in zip(pixels.reshape(-1, 28, 28), labels.tolist(), strict=True):
        if seen[label] < 100:
            yield str(label), Image.fromarray(picture)
        seen[label] += 1


def objects(source: Path) -> Iterator[Picture]:
    path = source / "coil20" / "COIL20_32x32.mat"
    content = matlab.read(path.read_bytes(), str(path))
    for row, label in zip(content["X"], np.ravel(content["Y"]).tolist(), strict=True):
        yield f"object{int(label):02d}", Image.fromarray(np.asarray(row, np.uint8).reshape(32, 32).T)


def characters(source: Path) -> Iterator[Picture]:
    """30 of all characters, drawn by a seed."""
    drawings: dict[str, list[bytes]] = {}
    for name in ("images_background_small1.zip", "images_background_small2.zip"):
        with zipfile.ZipFile(source / "omniglot" / name) as archive:
            for entry in sorted(name for name in archive.namelist() if name.endswith(".png")):
                label = "-".join(entry.split("/")[-3:-1])
                if len(drawings.setdefault(label, [])) < 20:
                    drawings[label].append(archive.read(entry))
    names = sorted(drawings)
    for i in np.random.default_rng(0).permutation(len(names))[:30]:
        for content in drawings[names[i]]:
            picture = Image.open(io.BytesIO(content)).convert("L")
            yield names[i], picture.resize((SIDE, SIDE), Image.Resampling.BOX)


def birds(source: Path) -> Iterator[Picture]:
    """30 of the species, drawn by a seed."""
    species = (np.random.default_rng(0).permutation(200)[:30] + 1).tolist()
    photos: dict[int, list[tuple[str, bytes]]] = {number: [] for number in species}
    with tarfile.open(source / "CUB_200_2011" / "cub200_2011_small.tar") as archive:
        for member in sorted((one for one in archive if one.name.endswith(".jpg")), key=lambda one: one.name):
            label = member.name.split("/")[-2]
            file = archive.extractfile(member) if int(label.partition(".")[0]) in photos else None
            if file is not None:
                photos[int(label.partition(".")[0])].append((label, file.read()))
    for number in species:
        for label, content in photos[number]:
            yield label, Image.open(io.BytesIO(content)).convert("RGB")


if __name__ == "__main__":
    main()
