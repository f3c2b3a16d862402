"""Is `nearkin train` ever worse than the frozen encoder? Four sets, each with all, a quarter and a twentieth of its
training classes.

    python studies/finetune_rule.py --data DATA --out OUT [--device cuda] [--jobs 12] [--train auto] [--size 128]

A cell is a set and a share of its training classes, at least 4: two to learn and two to validate, the fewest that the
command takes. The test classes are those of the publisher (CUB-200), the last five (Fashion-MNIST, the first 1,000
pictures per class), or a quarter by a hash of their names (ORL, Omniglot); no cell learns or validates on them. A cell
is one `nearkin train TABLE --encoder efficientnet-lite0`, all else as the command settles it; --train head,lora,all
also runs the cells with what is trained fixed and the trained weights as they are. Finished cells are skipped: the same
command goes on where it was stopped. OUT/finetune_rule.csv and .json have a row per cell, and the exit code is 1 where
a default cell is below the frozen features by more than the paired 95 % interval.
"""

import argparse
import csv
import hashlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from nearkin import data
from nearkin.core import files, toml
from nearkin.data.item_set import Items

SETS = {"cub200": "CUB_200_2011", "fashion-mnist": "fashion-mnist", "orl": "orl-faces", "omniglot": "omniglot"}
SHARES = {"all": 1.0, "quarter": 0.25, "twentieth": 0.05}
LEAST = 4  # classes: two to learn, two to validate
PER_CLASS = 1000  # pictures of a class of Fashion-MNIST
AUTO = "auto"
FIGURES = ("frozen", "tested", "difference", "low", "high", "frozen_r1", "tested_r1")


class Cell(NamedTuple):
    """One training: a set, a share of its training classes, and what of the encoder learns."""

    source: str
    share: str
    train: str = AUTO

    @property
    def name(self) -> str:
        return f"{self.source}-{self.share}" + ("" if self.train == AUTO else f"-{self.train}")


def by_hash(classes: Sequence[int], names: Sequence[str], seed: int) -> list[int]:
    return sorted(classes, key=lambda c: hashlib.sha256(f"{seed} {names[c]}".encode()).digest())


def divided(items: Items) -> tuple[list[int], list[int]]:
    """(training classes, test classes) of a set; the former in the order in which smaller shares take them."""
    assert items.labels is not None
    every = np.unique(items.labels).tolist()
    if items.name == "cub200":
        assert items.split is not None
        tested = set(items.labels[np.array(items.split) == "test"].tolist())
    elif items.name == "fashion-mnist":
        tested = set(every[5:])
    else:
        tested = set(by_hash(every, items.classes, 0)[: round(0.25 * len(every))])
    return by_hash([c for c in every if c not in tested], items.classes, 1), sorted(tested)


def pictures(items: Items, folder: Path) -> list[str | None]:
    """Writes the pictures as files; the name of each, None for those that are left out."""
    assert items.pictures is not None and items.labels is not None
    folder.mkdir(parents=True, exist_ok=True)
    used, names = np.zeros(len(items.classes), int), list[str | None]()
    for i, label in enumerate(items.labels.tolist()):
        used[label] += 1
        if items.name == "fashion-mnist" and used[label] > PER_CLASS:
            names.append(None)
            continue
        content = items.pictures.read(i)
        if not isinstance(content, bytes):
            file = io.BytesIO()
            Image.fromarray(content).save(file, "PNG")
            content, ending = file.getvalue(), ".png"
        else:
            ending = Path(items.names[i]).suffix
        names.append(f"{i}{ending}")
        (folder / f"{i}{ending}").write_bytes(content)  # complete when the tables are there
    return names


def tables(source: str, root: Path, out: Path) -> None:
    """One table per share, OUT/tables/SOURCE-SHARE.csv, over the same pictures."""
    paths = {share: out / "tables" / f"{source}-{share}.csv" for share in SHARES}
    if all(path.exists() for path in paths.values()):
        return
    items = data.load(source, root=root / SETS[source])
    assert items.labels is not None
    names = pictures(items, out / "pictures" / source)
    learned, tested = divided(items)
    for share, part in SHARES.items():
        count = max(LEAST, round(part * len(learned)))
        start = 1 if source == "fashion-mnist" and share == "twentieth" else 0  # other classes than the quarter's
        marks = dict.fromkeys(tested, "test") | dict.fromkeys(learned[start : start + count], "train")
        rows = ["path,label,split"]
        for name, label in zip(names, items.labels.tolist(), strict=True):
            if name is not None and label in marks:
                rows.append(f"../pictures/{source}/{name},c{label:04},{marks[label]}")
        paths[share].parent.mkdir(parents=True, exist_ok=True)
        files.write_bytes(paths[share], ("\n".join(rows) + "\n").encode())


def command(cell: Cell, options: argparse.Namespace) -> list[str]:
    table, run = options.out / "tables" / f"{cell.source}-{cell.share}.csv", options.out / "runs" / cell.name
    settings = [*options.set]
    if cell.source == "omniglot":
        settings.append("augment.preset=glyph")  # as for the set by its name
    if cell.train != AUTO:
        settings += [f"finetune.train={cell.train}", "finetune.interpolate=false"]
    if options.size:
        settings.append(f"data.size={options.size}")
    words = [sys.executable, "-m", "nearkin", "train", str(table), "--encoder", "efficientnet-lite0", "--quiet"]
    words += ["--out", str(run)] if not run.exists() else []
    words += ["--device", options.device, *(word for setting in settings for word in ("--set", setting))]
    return words if not run.exists() else [*words[:3], "train", "--resume", str(run), "--quiet"]


def run(cell: Cell, options: argparse.Namespace) -> dict[str, Any]:
    """Trains a cell, unless it is done, and reads its figures."""
    folder, began = options.out / "runs" / cell.name, time.monotonic()
    if not (folder / "results.json").exists():
        threads = str(max(1, (os.cpu_count() or 1) // options.jobs))
        environment = os.environ | {"OMP_NUM_THREADS": threads, "XDG_CACHE_HOME": str(options.out / "cache")}
        log = options.out / f"{cell.name}.log"
        with log.open("ab") as file:
            code = subprocess.run(command(cell, options), env=environment, stdout=file, stderr=file).returncode
        if code:
            return {"cell": cell.name, "failed": f"exit code {code}: {log.read_text()[-300:]}"}
    row = figures(cell, folder)
    values = f"{row['tested']:.1f} beside {row['frozen']:.1f}, difference {row['difference']:+.1f}"
    print(f"{cell.name}: MAP@R {values} ({row['kept']}), {time.monotonic() - began:.0f} s", flush=True)
    return row


def figures(cell: Cell, run: Path) -> dict[str, Any]:
    """Of a finished cell, in per cent: the test of the saved encoder beside that of the frozen pooled features."""
    results = json.loads((run / "results.json").read_text())
    test, against = results["test"], results["verdict"]["against"]["baseline"]
    recipe = toml.read_file(run / "recipe.toml")
    interpolation = results.get("interpolation") or {}
    saved = interpolation.get("chosen")
    row: dict[str, Any] = {"cell": cell.name, "source": cell.source, "share": cell.share, "asked": cell.train}
    row |= {"trained": recipe.get("finetune", {}).get("train"), "classes": results["classes"]["train"]}
    row["kept"] = "as trained" if saved is None else saved if saved == "frozen" else f"a = {interpolation['a']:g}"
    values = [against["other"], against["trained"], against["difference"], against["low"], against["high"]]
    values += [test[name]["recall@1"]["value"] for name in ("baseline", "trained")]
    row |= {name: None if value is None else round(100 * value, 2) for name, value in zip(FIGURES, values, strict=True)}
    row["below"] = row["high"] is not None and row["high"] < 0
    return row


def write(rows: list[dict[str, Any]], out: Path) -> None:
    """The finished cells as JSON and CSV, after each of them: what was done is there when the rest is cut off."""
    rows = [row for row in rows if "failed" not in row]
    if rows:
        files.write_json(out / "finetune_rule.json", rows)
        text = io.StringIO()
        table = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
        files.write_text(out / "finetune_rule.csv", text.getvalue())


def show(rows: list[dict[str, Any]]) -> None:
    print("\n| set | training classes | trained | saved | frozen MAP@R | tested MAP@R | difference | R@1 |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        interval = "" if row["low"] is None else f" ({row['low']:+.1f} to {row['high']:+.1f})"
        text = f"| {row['source']} | {row['classes']} ({row['share']}) | {row['trained']} | {row['kept']} "
        text += f"| {row['frozen']:.1f} | {row['tested']:.1f} | {row['difference']:+.1f}{interval} "
        print(f"{text}| {row['frozen_r1']:.1f} → {row['tested_r1']:.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, required=True, help="holds CUB_200_2011, fashion-mnist, orl-faces, omniglot"
    )
    parser.add_argument("--out", type=Path, default=Path("out/finetune_rule"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time")
    parser.add_argument("--cells", default=",".join(f"{s}-{h}" for h in SHARES for s in SETS), help="as cub200-quarter")
    parser.add_argument("--train", default=AUTO, help="what learns: of auto, head, lora, all, with commas")
    parser.add_argument("--size", type=int, help="side of the pictures that the encoder sees; by default the command's")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any key of a recipe")
    options = parser.parse_args()
    options.data, options.out = options.data.resolve(), options.out.resolve()
    known = {f"{source}-{share}": (source, share) for source in SETS for share in SHARES}
    if unknown := [name for name in options.cells.split(",") if name not in known]:
        raise SystemExit(f"--cells must be of {', '.join(known)}, got {unknown[0]}")
    cells = [Cell(*known[name], what) for what in options.train.split(",") for name in options.cells.split(",")]
    for source in dict.fromkeys(cell.source for cell in cells):
        tables(source, options.data, options.out)
    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for done in as_completed([pool.submit(run, cell, options) for cell in cells]):
            rows.append(done.result())
            write(rows, options.out)
    order = [cell.name for cell in cells]
    rows.sort(key=lambda row: order.index(row["cell"]))
    write(rows, options.out)
    show([row for row in rows if "failed" not in row])
    failed = [f"{row['cell']}: {row['failed']}" for row in rows if "failed" in row]
    below = [row["cell"] for row in rows if row.get("below") and row["asked"] == AUTO]
    print(*failed, sep="\n")
    print(f"{len(rows) - len(failed)} of {len(rows)} cells; below the frozen encoder: {', '.join(below) or 'none'}")
    sys.exit(1 if failed or below else 0)


if __name__ == "__main__":
    main()
