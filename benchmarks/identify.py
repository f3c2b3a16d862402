"""How right `identify` is on photographs by a frozen encoder: the table of docs/measured/evaluation.md.

    python benchmarks/identify.py [birds characters faces] [--data FOLDER] [--keep FOLDER]

Reduced CUB-200 (16 photographs of each of 200 classes), Omniglot (16 drawings of each of 242 characters) and ORL faces
(10 photographs of each of 40 people), by the pretrained efficientnet-lite0 as it is; five draws of `identification`,
each with half of the classes enrolled, and beside it the nearest item by cosine. --data: by default NEARKIN_DATA or
../shared/data. --keep: where embeddings are kept and read again.
"""

import argparse
import io
import os
import tarfile
import zipfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import nearkin
from nearkin import evaluation

FPIRS, FARS = (0.01, 0.05, 0.1), (0.05, 0.1, 0.2, 0.5)
DRAWS = 5
Find = Callable[[str], Path]  # the folder of a set, by its name
Pictures = tuple[list[Image.Image], list[str]]


def birds(find: Find) -> Pictures:
    draw, by_class = np.random.default_rng(0), defaultdict(list)
    with tarfile.open(find("CUB_200_2011") / "cub200_2011_small.tar") as file:
        for member in file.getmembers():
            if member.name.endswith(".jpg"):
                by_class[member.name.split("/")[-2]].append(member)
        chosen = [(c, by_class[c][i]) for c in sorted(by_class) for i in draw.permutation(len(by_class[c]))[:16]]
        pictures = [Image.open(io.BytesIO(file.extractfile(m).read())).convert("RGB") for _, m in chosen]  # type: ignore
    return pictures, [c for c, _ in chosen]


def characters(find: Find) -> Pictures:
    found = {}
    for name in ("images_background_small1.zip", "images_background_small2.zip"):
        with zipfile.ZipFile(find("omniglot") / name) as file:
            for path in sorted(n for n in file.namelist() if n.endswith(".png")):
                alphabet, character, drawing = path.split("/")[-3:]
                found.setdefault((alphabet + character, drawing), file.read(path))
    kept = [key for key in found if int(key[1].split("_")[1][:2]) <= 16]
    return [Image.open(io.BytesIO(found[key])).convert("RGB") for key in kept], [key[0] for key in kept]


def faces(find: Find) -> Pictures:
    with tarfile.open(find("orl-faces") / "orl_faces.tar") as file:
        members = sorted((m for m in file.getmembers() if m.name.endswith(".pgm")), key=lambda m: m.name)
        pictures = [Image.open(io.BytesIO(file.extractfile(m).read())).convert("RGB") for m in members]  # type: ignore
    return pictures, [m.name.split("/")[-2] for m in members]


SETS = {"birds": (birds, 8), "characters": (characters, 8), "faces": (faces, 5)}  # and items enrolled per label


def embedded(pictures: list[Image.Image], labels: Any) -> tuple[Any, Any]:
    """Embeddings (N, D), and classes (N,) from 0."""
    encoder = nearkin.open("efficientnet-lite0")
    parts = [encoder.embed(pictures[i : i + 64]) for i in range(0, len(pictures), 64)]
    return np.concatenate(parts), np.unique(labels, return_inverse=True)[1]


def measured(rows: Any, labels: Any, examples: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The figures of the nearest item, and those of identify."""
    options: dict[str, Any] = {"examples": (examples,), "fpirs": FPIRS, "repeats": DRAWS}
    plain = evaluation.open_set(rows, labels, **options, scorings=("nearest",), normalizations=("none",))
    (entry,) = evaluation.identification(rows, labels, **options, fars=FARS)["examples"]
    return plain["examples"][0]["methods"]["nearest"], entry


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("sets", nargs="*", choices=[*SETS, []], default=[])
    home = Path(os.environ.get("NEARKIN_DATA") or Path(__file__).parents[2] / "shared" / "data")
    parser.add_argument("--data", type=Path, default=home)
    parser.add_argument("--keep", type=Path)
    chosen = parser.parse_args(arguments)
    print(
        "| set (labels × enrolled) | rank 1 | DIR at FPIR 1 / 5 / 10 % | OSCR | gain (best threshold) | "
        "ECE of unknown, named | known: right / wrong / unsure / unknown · strangers named | "
        "strangers named at far .05 / .1 / .2 / .5 |\n|---|---|---|---|---|---|---|---|"
    )
    for name in chosen.sets or SETS:
        kept = None if chosen.keep is None else chosen.keep / f"{name}.npz"
        if kept is not None and kept.exists():
            with np.load(kept, allow_pickle=False) as file:
                rows, labels = file["embeddings"], file["labels"]
        else:
            rows, labels = embedded(*SETS[name][0](lambda folder: chosen.data / folder))
            if kept is not None:
                np.savez(kept, embeddings=rows, labels=labels)
        print(line(name, SETS[name][1], *measured(rows, labels, SETS[name][1])), flush=True)


def line(name: str, examples: int, plain: dict[str, Any], entry: dict[str, Any]) -> str:
    known, strangers = entry["known"], entry["strangers"]
    rates = " / ".join(f"{rate['observed']:.3f}" for rate in entry["far"])
    dirs = [" ".join(share(one[f"dir@fpir={fpir:g}"]) for fpir in FPIRS) for one in (plain, entry)]
    return (
        f"| {name} ({entry['labels']} × {examples}) | {share(plain['identification'])} → "
        f"{share(entry['identification'])} | {dirs[0]} → {dirs[1]} | {share(plain['oscr'])} → {share(entry['oscr'])} | "
        f"{entry['gain']:.3f} ({entry['oracle']:.3f}) | {entry['ece_unknown']:.3f}, {entry['ece_named']:.3f} | "
        f"{' / '.join(share(known[verdict]) for verdict in ('right', 'wrong', 'unsure', 'unknown'))} · "
        f"{share(strangers['named'])} | {rates} |"
    )


def share(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}".removeprefix("0")


if __name__ == "__main__":
    main()
