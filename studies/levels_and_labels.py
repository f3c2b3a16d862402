"""Two studies on glyphs: a coarse term in the loss, and training without likely label errors.

    python studies/levels_and_labels.py levels --out results.json
    python studies/levels_and_labels.py labels --out results.json

levels: 300 letters and signs of eleven scripts in a table, a quarter of them unseen; ArcFace of the letters alone, and
with a term of the scripts. labels: the same letters as a folder, one in twenty training pictures in the folder of
another training letter; the run's own list of likely label errors of its training part, against what was planted; then
a run without that list. Two seeds each, on the CPU.
"""

import argparse
import csv
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from nearkin import data, training
from nearkin.data import glyphs
from nearkin.data.vectors import class_ids
from nearkin.evaluation import diagnose

SHORT = {"training.epochs": 3, "training.batches": 150, "training.workers": 1}
SEEDS, NOISE, LETTERS = (0, 1), 0.05, 300
WEIGHTS: tuple[list[float] | None, ...] = (None, [1.0, 0.3])


def levels(folder: Path) -> list[dict[str, Any]]:
    letters, _ = _noisy_folder(folder / "letters", 0)
    table = letters / "letters.csv"
    files = sorted(path.relative_to(letters) for path in (letters / "clean").rglob("*.png"))
    scripts = {path.parent.name: glyphs.script(chr(int(path.parent.name[2:], 16))) for path in files}
    rows = [f"{path},{path.parent.name},{scripts[path.parent.name]}" for path in files]
    table.write_text("\n".join(["path,label,script", *rows]) + "\n", encoding="utf-8")
    lines = []
    for seed in SEEDS:
        for weights in WEIGHTS:
            settings = SHORT | {"training.epochs": 2, "data.levels": ["script"], "data.near": "off"}
            settings |= {"training.every": 2, "training.seed": seed}
            settings |= {} if weights is None else {"levels.weights": weights}
            outcome = training.train(str(table), folder / f"levels-{seed}-{weights}", settings=settings, report=False)
            figures = {entry["name"]: entry["test"]["trained"] for entry in outcome.results["levels"]}
            lines.append({"study": "levels", "seed": seed, "weights": weights, **figures})
            print(json.dumps(lines[-1]), flush=True)
    return lines


def labels(folder: Path) -> list[dict[str, Any]]:
    lines = []
    for seed in SEEDS:
        photos, planted = _noisy_folder(folder / f"letters-{seed}", seed)
        for kind in ("clean", "wrong labels", "without the list"):
            settings: dict[str, Any] = SHORT | {"training.seed": seed, "data.near": "off"}
            if kind == "without the list":
                settings["data.without"] = str(folder / f"errors-{seed}.csv")
            source = photos / ("clean" if kind == "clean" else "noisy")
            run = folder / f"labels-{seed}-{kind.replace(' ', '-')}"
            outcome = training.train(str(source), run, settings=settings, report=False)
            tested = outcome.results["test"]["trained"]
            line = {"study": "labels", "seed": seed, "run": kind, "items": outcome.results["items"]}
            line |= {name: tested[name] for name in ("recall@1", "map@r")}
            if kind == "wrong labels":
                line["list"] = _list_errors(run, folder / f"errors-{seed}.csv", planted)
            lines.append(line)
            print(json.dumps(lines[-1]), flush=True)
    return lines


def _noisy_folder(folder: Path, seed: int) -> tuple[Path, set[str]]:
    """The letters as clean/U+0041/3.png and noisy/…, and the names of the pictures that are in a wrong folder there."""
    items = data.load("glyphs")
    kinds = np.random.default_rng(0).choice(len(items.classes), LETTERS, replace=False)
    few = items.take(np.isin(items.labels, kinds))
    names = [f"U+{ord(few.classes[label]):04X}" for label in few.labels]
    files = [f"{i % 20}.png" for i in range(len(few))]
    for name, file, i in zip(names, files, range(len(few)), strict=True):
        _write(folder / "clean" / name / file, few.pictures.read(i))
    clean = data.load(folder / "clean")
    train = data.divide(clean, seed=0, val=0.1 if LETTERS >= 300 else 0.2).train
    rng = np.random.default_rng(seed + 1)
    wrong = rng.choice(train, round(NOISE * len(train)), replace=False)
    others = np.unique(clean.labels[train])
    planted = set()
    for i in range(len(clean)):
        name, file = clean.names[i].split("/")
        if i in set(wrong.tolist()):
            other = clean.classes[rng.choice(others[others != clean.labels[i]])]
            name, file = other, f"{name}-{file}"
            planted.add(f"{name}/{file}")
        _write(folder / "noisy" / name / file, clean.pictures.read(i))
    return folder, planted


def _write(path: Path, picture: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(picture, bytes):
        path.write_bytes(picture)
    else:
        Image.fromarray(picture).save(path)


def _list_errors(run: Path, file: Path, planted: set[str]) -> dict[str, Any]:
    """What `nearkin evaluate RUN --part train --label-errors FILE` writes, and how much of it was planted."""
    vectors, _ = training.vectors_of(run, part="train", device="cpu")
    (ids,), names = class_ids(vectors.labels)
    errors = diagnose(vectors.embeddings, ids)["label_errors"]
    assert vectors.names is not None
    with file.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(["path", "label", "suggested", "score"])
        for error in errors:
            label, suggested = names[error["class"]], names[error["suggested"]]
            writer.writerow([vectors.names[error["item"]], label, suggested, error["agreement"]])
    listed = {vectors.names[error["item"]] for error in errors}
    hits = len(listed & planted)
    counts = {"listed": len(listed), "planted": len(planted), "training items": len(vectors.names)}
    return counts | {"precision": hits / max(1, len(listed)), "recall": hits / len(planted)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("study", choices=("levels", "labels"))
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lines = (levels if arguments.study == "levels" else labels)(Path(folder))
    arguments.out.write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main()
