"""Does pretraining on pictures without labels help? Glyphs and birds with 5 %, 20 % and 100 % of the training labels.

    python studies/unlabelled_pretraining.py --data DATA --out OUT [--device cuda] [--jobs 8] [--cells A,B,…]

A cell is a set, a share of the labels, an arm and a seed. The labelled part is that share of the training pictures, at
least two per class: as many classes as it fills with two, all of them from 2 · classes pictures on. The arms: "none"
trains on the labelled part; "infonce" and "vicreg" first pretrain on all training pictures (`--unlabelled`), as the
command settles it. The test classes are the publisher's (birds) or the source's (glyphs), and no picture of them is in
the folder without labels. `cub` is EfficientNet-Lite0 with ImageNet weights at 96 px, `scratch` the same birds and
small-cnn from random weights at 64 px. The learning rate of the pretraining is the command's or a fifth of it,
whichever gives the better validation MAP@R at 20 % of the labels and the first seed; OUT/search.jsonl has both.

OUT/cells.jsonl gets a line per finished cell, and OUT/values/CELL.npz MAP@R of every test query; finished cells are
skipped. --table FOLDER reads both and writes studies/results/unlabelled.json: means over seeds, and the difference to
"none" with its paired 95 % interval over test classes. With --recorded the rates are those of that file instead of a
search, and --table leaves the rows of which FOLDER has fewer seeds: the way to run what is missing there.
"""

import argparse
import hashlib
import io
import json
import multiprocessing
import os
import time
import traceback
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from nearkin import data
from nearkin.core import files
from nearkin.data.item_set import Items

SHARES, ARMS, SEEDS = (5, 20, 100), ("none", "infonce", "vicreg"), (0, 1)
SETS = {"glyphs": "glyphs", "cub": "cub200", "scratch": "cub200"}
SETTINGS = {
    "glyphs": ["encoder.name=small-cnn", "augment.preset=glyph", "data.near=off"],
    "cub": ["encoder.name=efficientnet-lite0", "data.size=96", "data.stored=112", "data.near=off"],
    "scratch": ["encoder.name=small-cnn", "data.size=64", "data.stored=72", "data.near=off"],
}


RATES = {"glyphs": (5e-3, 1e-3), "cub": (5e-4, 1e-4), "scratch": (5e-3, 1e-3)}
SEARCHED = 20, 0  # share and seed
RESULTS = Path(__file__).parent / "results" / "unlabelled.json"


class Cell(NamedTuple):
    """One run. lr: of its pretraining; None: the command's."""

    subject: str
    share: int
    arm: str
    seed: int
    lr: float | None = None

    @property
    def name(self) -> str:
        return f"{self.subject}-{self.share}-{self.arm}-{self.seed}"

    @property
    def run_name(self) -> str:
        return self.name if self.lr is None else f"{self.name}-lr{self.lr:g}"


def every_cell() -> list[Cell]:
    """All cells, those that matter most first."""
    order = [(seed, subject) for subject in ("glyphs", "cub") for seed in SEEDS] + [(s, "scratch") for s in SEEDS]
    order.sort(key=lambda pair: (pair[1] == "scratch", pair[0]))
    return [Cell(subject, share, arm, seed) for seed, subject in order for share in SHARES for arm in ARMS]


# --- pictures and tables


def labelled(labels: np.ndarray, names: list[str], share: int, seed: int) -> np.ndarray:
    """Which training pictures have a label: `share` per cent of them, two per class at least, spread evenly."""
    count, kinds = round(share / 100 * len(labels)), np.unique(labels)
    order = sorted(kinds.tolist(), key=lambda c: hashlib.sha256(f"{seed} class {c}".encode()).digest())
    order = order[: max(1, min(len(order), count // 2))]
    of_class = {
        c: sorted(
            np.flatnonzero(labels == c).tolist(),
            key=lambda i: hashlib.sha256(f"{seed} {names[i]}".encode()).digest(),
        )
        for c in order
    }
    chosen: list[int] = []
    for turn in range(int(np.bincount(labels).max())):
        chosen += [of_class[c][turn] for c in order if turn < len(of_class[c])]
        if turn >= 1 and len(chosen) >= count:
            break
    return np.sort(np.array(chosen[: max(count, 2 * len(order))]))


def write_set(source: str, root: Path, out: Path, limit: int | None) -> None:
    """Training pictures and test pictures as files in folders of their own, and a list of both."""
    folder = out / "pictures" / source
    if (folder / "list.json").exists():
        return
    items: Items = data.load(source, root=None if source == "glyphs" else root / "CUB_200_2011")
    assert items.labels is not None and items.split is not None and items.pictures is not None
    rows = []
    for i, (label, part) in enumerate(zip(items.labels.tolist(), items.split, strict=True)):
        if limit is not None and label % limit:
            continue
        content = items.pictures.read(i)
        ending = ".jpg"
        if not isinstance(content, bytes):
            file = io.BytesIO()
            Image.fromarray(content).save(file, "PNG")
            content, ending = file.getvalue(), ".png"
        path = folder / part / f"{i:05}{ending}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        rows.append([f"{part}/{path.name}", label, part])
    files.write_json(folder / "list.json", rows)


def table_of(cell: Cell, out: Path) -> Path:
    """The table of a cell's labelled pictures and of all test pictures."""
    folder = out / "pictures" / SETS[cell.subject]
    path = folder / f"labels-{cell.share}-{cell.seed}.csv"
    if path.exists():
        return path
    rows = json.loads((folder / "list.json").read_text())
    train = [row for row in rows if row[2] == "train"]
    names, labels = [row[0] for row in train], np.array([row[1] for row in train])
    chosen = [train[i] for i in labelled(labels, names, cell.share, cell.seed)]
    lines = [f"{name},c{label:04},{part}" for name, label, part in [*chosen, *(r for r in rows if r[2] == "test")]]
    files.write_text(path, "\n".join(["path,label,split", *lines]) + "\n")
    return path


# --- runs


def run(cell: Cell, out: Path, device: str, sets: list[str]) -> dict[str, Any]:
    """Trains a cell, unless it is done, and returns its line."""
    from nearkin import training
    from nearkin.training.validation import main_per_query

    began = time.monotonic()
    folder, table = out / "runs" / cell.run_name, table_of(cell, out)
    settings = [*SETTINGS[cell.subject], f"training.device={device}", f"training.seed={cell.seed}", *sets]
    if cell.arm != "none":
        unlabelled = json.dumps(str(out / "pictures" / SETS[cell.subject] / "train"))
        settings += [f"unlabelled.folder={unlabelled}", f"unlabelled.method={cell.arm}"]
        settings += [] if cell.lr is None else [f"unlabelled.lr={cell.lr:g}"]
    else:
        settings = [text for text in settings if not text.startswith("unlabelled.")]
    if (folder / "recipe.toml").exists():
        outcome = training.resume(folder)
    else:
        outcome = training.train(str(table), folder, settings=settings, report=False)
    import torch

    values = main_per_query(outcome.embeddings, outcome.test, False, torch.device("cpu"))
    (out / "values").mkdir(exist_ok=True)
    np.savez(out / "values" / f"{cell.run_name}.npz", values=np.asarray(values), labels=outcome.test.labels)
    results, pretraining = outcome.results, outcome.results.get("pretraining", {})
    line: dict[str, Any] = {
        **cell._asdict(),
        "cell": cell.name,
        "device": results["device"],
        "val": results["val"]["map@r"],
    }
    line |= {"labels": results["items"]["train"] + results["items"]["val"], "classes": results["classes"]}
    line |= {"trains": outcome.recipe.finetune.train, "steps": results["steps"], "seconds": results["seconds"]}
    tests = {"untrained": results["test"]["untrained"], "baseline": results["test"]["baseline"]}
    tests |= {"trained": results["test"]["trained"], "pretrained": pretraining.get("test")}
    names = ("recall@1", "map@r")
    line |= {who: None if test is None else {name: test[name] for name in names} for who, test in tests.items()}
    if pretraining:
        line["pretraining"] = {key: value for key, value in pretraining.items() if key not in ("test", "loss")}
        line["pretraining"]["loss"] = [pretraining["loss"][0], pretraining["loss"][-1]]
    return line | {"wall": round(time.monotonic() - began, 1)}


class Book:
    """The lines of finished cells, in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []

    def add(self, line: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def finish(future: Future[dict[str, Any]], cell: Cell) -> dict[str, Any] | None:
    """The line of a finished run, printed; None where it failed."""
    try:
        line = future.result()
    except Exception:
        print(f"{cell.run_name} failed: {traceback.format_exc()}", flush=True)
        return None
    value = 100 * line["trained"]["map@r"]["value"]
    before = line["pretrained"] and f" (pretrained {100 * line['pretrained']['map@r']['value']:.2f})"
    print(
        f"{cell.run_name}: MAP@R {value:.2f}{before or ''}, val {100 * line['val']:.2f}, {line['wall']} s", flush=True
    )
    return line


def choose(subject: str, arm: str, search: Book, cells: Book) -> float | None:
    """The better rate by validation, whose run becomes that of its cell; None while not all were tried."""
    lines = [line for line in search.lines() if (line["subject"], line["arm"]) == (subject, arm)]
    if len(lines) < len(RATES[subject]):
        return None
    best = max(lines, key=lambda line: line["val"])
    rate, cell = float(best["lr"]), Cell(subject, SEARCHED[0], arm, SEARCHED[1])
    if cell.name not in {line["cell"] for line in cells.lines()}:
        cells.add(best)
    return rate


def recorded_rates() -> dict[tuple[str, str], float]:
    """Of each set and method, the rate of pretraining in the results of the repository."""
    return {(row["set"], row["arm"]): row["lr"] for row in json.loads(RESULTS.read_text()) if row.get("lr")}


def run_all(wanted: list[Cell], options: argparse.Namespace) -> None:
    cells, search, out = Book(options.out / "cells.jsonl"), Book(options.out / "search.jsonl"), options.out
    done = {line["cell"] for line in cells.lines()}
    for source in dict.fromkeys(SETS[cell.subject] for cell in wanted):
        write_set(source, options.data, out, options.every)
    todo = [cell for cell in wanted if cell.name not in done]
    for cell in [*todo, *(cell._replace(share=SEARCHED[0], seed=SEARCHED[1]) for cell in todo)]:
        table_of(cell, out)  # before several processes would write the same one
    os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // options.jobs))
    os.environ["XDG_CACHE_HOME"] = str(out / "cache")
    recorded = recorded_rates() if options.recorded else {}
    rates = {
        (c.subject, c.arm): recorded.get((c.subject, c.arm)) or choose(c.subject, c.arm, search, cells)
        for c in todo
        if c.arm != "none"
    }
    tried = {(line["cell"], line["lr"]) for line in search.lines()}
    pending: list[Cell] = []

    def add_pretrained(subject: str, arm: str, rate: float) -> None:
        ours = [cell for cell in todo if (cell.subject, cell.arm) == (subject, arm)]
        pending.extend(cell._replace(lr=rate) for cell in ours if recorded or (cell.share, cell.seed) != SEARCHED)

    for (subject, arm), rate in rates.items():
        if rate is not None:
            add_pretrained(subject, arm, rate)
        else:
            searched = [Cell(subject, SEARCHED[0], arm, SEARCHED[1], lr) for lr in RATES[subject]]
            pending.extend(cell for cell in searched if (cell.name, cell.lr) not in tried)
    pending.extend(cell for cell in todo if cell.arm == "none")
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        running: dict[Future[dict[str, Any]], Cell] = {}
        while running or pending:
            pending.sort(key=lambda cell: (cell.subject == "scratch", cell.seed, (cell.share, cell.seed) != SEARCHED))
            while pending and len(running) < options.jobs:
                cell = pending.pop(0)
                running[pool.submit(run, cell, out, options.device, options.set)] = cell
            future = next(as_completed(running))
            cell = running.pop(future)
            line = finish(future, cell)
            if line is None:
                continue
            if recorded or cell.arm == "none" or (cell.share, cell.seed) != SEARCHED:
                cells.add(line)
                continue
            search.add(line)
            rate = choose(cell.subject, cell.arm, search, cells)
            if rate is not None:
                print(f"{cell.subject}, {cell.arm}: lr {rate:g}", flush=True)
                add_pretrained(cell.subject, cell.arm, rate)


# --- the table


def _file(line: dict[str, Any]) -> str:
    """The values of a cell that was not searched are under the name of its run."""
    cell = Cell(line["subject"], line["share"], line["arm"], line["seed"], line["lr"])
    return f"{cell.run_name}.npz"


def table(folder: Path) -> list[dict[str, Any]]:
    """Per set, share and arm: means over the seeds that were run, and the paired difference to "none" over these."""
    by_name = {line["cell"]: line for line in Book(folder / "cells.jsonl").lines()}
    rows = []
    for subject in SETS:
        for share in SHARES:
            for arm in ARMS:
                names = {s: (Cell(subject, share, arm, s).name, Cell(subject, share, "none", s).name) for s in SEEDS}
                seeds = [s for s, pair in names.items() if all(name in by_name for name in pair)]
                row: dict[str, Any] = {"set": subject, "share": share, "arm": arm, "seeds": seeds}
                rows.append(row | (figures(folder, by_name, [names[s] for s in seeds]) if seeds else {}))
    return rows


def figures(folder: Path, by_name: dict[str, Any], pairs: list[tuple[str, str]]) -> dict[str, Any]:
    """Of the cells of an arm and those of "none" beside them."""
    from nearkin.evaluation.statistics import cluster_bootstrap

    ours, plain = ([by_name[pair[side]] for pair in pairs] for side in (0, 1))
    row: dict[str, Any] = {key: ours[0][key] for key in ("labels", "trains", "device", "lr")}
    for who in ("baseline", "untrained", "pretrained", "trained"):
        for name in ("recall@1", "map@r"):
            every = [100 * cell[who][name]["value"] for cell in ours if cell[who]]
            row[f"{who} {name}"] = round(float(np.mean(every)), 2) if every else None
    row["map@r by seed"] = [round(100 * cell["trained"]["map@r"]["value"], 2) for cell in ours]
    if ours[0]["arm"] == "none":
        return row
    loaded = [[np.load(folder / "values" / _file(line)) for line in lines] for lines in (ours, plain)]
    mean, other = (np.mean([one["values"] for one in side], axis=0) for side in loaded)
    test = cluster_bootstrap.compare(mean, other, loaded[0][0]["labels"], samples=2000, seed=0)
    ends = test["interval"] or ()
    row["difference"] = [round(100 * float(value), 2) for value in (test["difference"], *ends)]
    row["verdict"] = {"a": "better", "b": "worse"}.get(test["verdict"], "undecided")
    return row


def show(rows: list[dict[str, Any]]) -> None:
    print("| set | labels | arm | pretrained MAP@R | trained R@1 | trained MAP@R (by seed) | difference to none |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        if not row["seeds"]:
            print(f"| {row['set']} | {row['share']} % | {row['arm']} | not run | | | |")
            continue
        text = "" if "difference" not in row else "{:+.2f} ({:+.2f} to {:+.2f})".format(*row["difference"])
        seeds = ", ".join(f"{value:.2f}" for value in row["map@r by seed"])
        before = row["pretrained map@r"] if row["arm"] != "none" else row["untrained map@r"]
        print(
            f"| {row['set']} | {row['share']} % ({row['labels']:,}) | {row['arm']} | {before:.2f} "
            f"| {row['trained recall@1']:.2f} | {row['trained map@r']:.2f} ({seeds}) | {text} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="holds CUB_200_2011")
    parser.add_argument("--out", type=Path, default=Path("out/unlabelled"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--cells", default="", help="as glyphs-5-none-0,cub-20-infonce-1; by default all")
    parser.add_argument("--every", type=int, help="only the classes whose number this divides, to try the study")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any key of a recipe")
    parser.add_argument("--recorded", action="store_true", help="go on from studies/results/unlabelled.json")
    parser.add_argument("--table", type=Path, metavar="FOLDER", help="read a finished OUT instead")
    options = parser.parse_args()
    if options.table is not None:
        rows = table(options.table)
        if options.recorded:
            former = json.loads(RESULTS.read_text())
            rows = [b if len(b["seeds"]) > len(a["seeds"]) else a for a, b in zip(rows, former, strict=True)]
        show(rows)
        files.write_json(RESULTS, rows)
        return
    if options.data is None:
        parser.error("--data is missing")
    options.data, options.out = options.data.resolve(), options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    known = {cell.name: cell for cell in every_cell()}
    if unknown := [name for name in options.cells.split(",") if name and name not in known]:
        raise SystemExit(f"--cells must be of {', '.join(known)}, got {unknown[0]}")
    run_all([known[name] for name in options.cells.split(",") if name] or list(known.values()), options)


if __name__ == "__main__":
    main()
