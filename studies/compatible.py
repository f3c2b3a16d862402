"""Backward-compatible training: old, new–old and new–new retrieval, with and without it, on glyphs and birds.

    python studies/compatible.py --out FOLDER [--data FOLDER] [--sets glyphs birds] [--seeds 2] [--device cuda]
                                 [--choose] [--quick]

The old run has seen half of the training classes; the new one sees all, with a larger encoder:

- glyphs: small-cnn of width 8, then of width 12, both from scratch with ArcFace and 128 dimensions;
- birds: frozen features of efficientnet-lite0 for reduced photos of CUB-200-2011 in FOLDER/CUB_200_2011, as in
  short_embeddings.py, under an MLP without a hidden layer, then one of 512, both with SupCon and 64 dimensions;
- narrow: the same, but the old run has read the first 160 of the 1280 features only: a weaker backbone;
- better: the old run has read the features of efficientnet-lite0 at 128 px, the new one those of efficientnet-lite2 at
  192 px beside them: a better backbone;
- long: glyphs again, the new run three times as long, of the default width;
- photos: the reduced photos themselves, efficientnet-lite0 at 112 px, then efficientnet-lite2 at 192 px, fine-tuned
  with Proxy-Anchor and 128 dimensions (wants a GPU).

--choose trains with every method and weight of `CHOICES`, and prints what validation says of each, which is how the
defaults were found; test figures are not looked at. Without it the default is compared with a new run that knows
nothing of the old one ("plain"): R@1 and MAP@R on test classes with 95 % intervals, and paired differences from old
among old. "plain" new queries among old rows are those of an unrelated network. Writes compatible.json (with --choose,
compatible_choice.json) into the folder of --out.
"""

import argparse
import csv
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from short_embeddings import birds

from nearkin import models, training
from nearkin.core import files
from nearkin.training.compatible_test import PAIRS, compatible_results
from nearkin.training.config.recipe import read
from nearkin.training.cross_retrieval import cross_metrics
from nearkin.training.old_rows import FILE
from nearkin.training.prepare import prepare

SETS: dict[str, dict[str, dict[str, Any]]] = {
    "glyphs": {
        "both": {"loss.name": "arcface", "loss.margin": 0.2, "loss.scale": 16.0, "encoder.dim": 128},
        "old": {"encoder.width": 8, "training.epochs": 5, "training.batches": 50},
        "new": {"encoder.width": 12, "training.epochs": 6, "training.batches": 60},
    },
    "birds": {
        "both": {"loss.name": "supcon", "encoder.name": "mlp", "encoder.dim": 64, "training.patience": 100},
        "old": {"encoder.hidden": [], "training.epochs": 6, "training.batches": 50},
        "new": {"encoder.hidden": [512], "training.epochs": 8, "training.batches": 50},
    },
}
SETS["narrow"] = SETS["better"] = SETS["birds"]
SETS["long"] = SETS["glyphs"] | {"new": {"training.epochs": 18}}
SETS["photos"] = {
    "both": {"loss.name": "proxy-anchor", "encoder.dim": 128, "finetune.train": "all", "finetune.interpolate": False},
    "old": {"encoder.name": "efficientnet-lite0", "data.size": 112, "training.epochs": 6},
    "new": {"encoder.name": "efficientnet-lite2", "data.size": 192, "training.epochs": 12},
}
NARROW = {"narrow": 160, "better": 1280}  # features that the old run has read
BETTER = "efficientnet-lite2", 192
CHOICES: list[dict[str, Any]] = [
    {"method": "regression", "weight": 10.0, "class_share": 0.0},
    {"method": "regression", "weight": 10.0, "class_share": 0.5},
    {"method": "classes", "weight": 1.0, "scale": 16.0},
    {"method": "items", "weight": 1.0, "scale": 16.0},
    {"method": "regression", "weight": 30.0, "class_share": 0.5},
    {"method": "regression", "weight": 3.0, "class_share": 0.5},
    {"method": "regression", "weight": 10.0, "class_share": 1.0},
    {"method": "classes", "weight": 3.0, "scale": 16.0},
    {"method": "items", "weight": 3.0, "scale": 16.0},
]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder with CUB_200_2011, for birds")
    parser.add_argument("--out", type=Path, required=True, help="where features, runs and figures are written")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--choose", action="store_true", help="compare methods and weights on validation")
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it runs")
    options = parser.parse_args(argv)
    if set(options.sets) - {"glyphs", "long"} and options.data is None:
        parser.error("birds need --data, the folder with CUB_200_2011")
    options.out.mkdir(parents=True, exist_ok=True)
    started, results = time.monotonic(), dict[str, list[dict[str, Any]]]()
    for name in options.sets:
        source = source_of(name, options)
        results[name] = []
        for seed in range(options.seeds):
            old = old_run(name, source, seed, options)
            if options.choose:
                results[name] += [chosen(name, source, seed, old, options, choice) for choice in CHOICES]
            else:
                results[name].append(measured(name, source, seed, old, options))
                print(table(name, results[name][-1]), flush=True)
    content = {"study": "compatible", "quick": options.quick, "sets": results}
    file = "compatible_choice.json" if options.choose else "compatible.json"
    files.write_json(options.out / file, content | {"seconds": round(time.monotonic() - started)})


def source_of(name: str, options: argparse.Namespace) -> str:
    if name in ("glyphs", "long"):
        return "glyphs"
    if name == "photos":
        return "cub200"
    weak = birds(options.data, options.out, options.quick)
    return str(weak if name != "better" else beside(weak, birds(options.data, options.out, options.quick, *BETTER)))


def beside(weak: Path, strong: Path) -> Path:
    """The features of two encoders in one file."""
    path = strong.with_name(f"beside-{strong.name}")
    with np.load(weak) as first, np.load(strong) as second:
        both = np.concatenate([first["embeddings"], second["embeddings"]], 1)
        np.savez(path, **{**first, "embeddings": both})
    return path


def settings_of(name: str, which: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    settings = {**SETS[name]["both"], **SETS[name][which], "training.seed": seed, "training.device": options.device}
    settings |= root_of(name, options)
    return settings | ({"training.epochs": 1, "training.batches": 4} if options.quick else {})


def root_of(name: str, options: argparse.Namespace) -> dict[str, str]:
    return {"data.root": str(options.data / "CUB_200_2011")} if name == "photos" else {}


def old_run(name: str, source: str, seed: int, options: argparse.Namespace) -> Path:
    """A run that has seen every other training class, made once."""
    folder = options.out / f"{name}-old-{seed}"
    if (folder / "encoder.json").is_file():
        return folder
    settings = settings_of(name, "old", seed, options)
    root = [f"{key}={value}" for key, value in root_of(name, options).items()]
    prepared = prepare(read(None, [f"data.source={source}", *root]))
    labels = prepared.items.labels
    assert labels is not None
    train = prepared.parts.train
    unseen = train[np.isin(labels[train], np.unique(labels[train])[1::2])]
    path = options.out / f"{name}-unseen.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["path"], *([prepared.items.names[i]] for i in unseen)])
    settings["data.without"] = str(path)
    if name not in NARROW:
        training.train(source, folder, settings=settings, report=False)
        return folder
    part = options.out / f"{name}.npz"
    with np.load(source) as file:
        np.savez(part, **{**file, "embeddings": file["embeddings"][:, : NARROW[name]]})
    narrow = training.train(str(part), options.out / f"{name}-part-{seed}", settings=settings, report=False)
    return widened(narrow.folder, folder, prepared.items.vectors)


def widened(narrow: Path, folder: Path, rows: Any) -> Path:
    """The linear encoder of a run as one that takes all features, and gives those it has not learned no weight."""
    encoder, _ = models.load(narrow)
    features, read = rows.shape[1], encoder.settings["features"]
    wide = models.build(**encoder.settings | {"features": features})
    state = {
        key: torch.nn.functional.pad(x, (0, features - read), value=float(key == "std")) if "bias" not in key else x
        for key, x in encoder.state_dict().items()
    }
    wide.load_state_dict(state)
    some = torch.from_numpy(rows[:50])
    with torch.no_grad():
        torch.testing.assert_close(wide.eval()(some), encoder(some[:, :read]), rtol=0, atol=1e-5)
    models.save(wide, folder, {"kind": "vectors", "features": features})
    return folder


def new_run(
    name: str, source: str, seed: int, options: argparse.Namespace, how: str, compatible: dict[str, Any]
) -> training.Outcome:
    """A new run; one that was begun before goes on."""
    folder = options.out / f"{name}-{how}-{seed}"
    if (folder / "recipe.toml").is_file():
        return training.resume(folder)
    settings = settings_of(name, "new", seed, options) | compatible
    return training.train(source, folder, settings=settings, report=False)


def chosen(
    name: str, source: str, seed: int, old: Path, options: argparse.Namespace, choice: dict[str, Any]
) -> dict[str, Any]:
    """What validation says of a method with its settings, beside old queries among old rows."""
    keys = {"compatible.run": str(old)} | {f"compatible.{key}": value for key, value in choice.items()}
    outcome = new_run(name, source, seed, options, "-".join(map(str, choice.values())), keys)
    held_out = outcome.prepared.held_out("val")
    rows = old_rows(outcome.folder)[torch.from_numpy(held_out.everything)]
    old_old = cross_metrics(rows, rows, held_out, False, torch.device("cpu"))
    val = {key: outcome.results["val"][key] for key in ("map@r", "old_map@r", "recall@1", "old_recall@1")}
    print(name, seed, choice, {k: round(100 * v, 2) for k, v in val.items()}, old_old, flush=True)
    return {"seed": seed, **choice, "val": val, "old_old": old_old}


def measured(name: str, source: str, seed: int, old: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The test figures of the default and of a plain new run, with the paired differences from old among old."""
    compatible = new_run(name, source, seed, options, "compatible", {"compatible.run": str(old)})
    plain = new_run(name, source, seed, options, "plain", {})
    rows = old_rows(compatible.folder)[torch.from_numpy(plain.test.everything)]
    record = compatible.results["compatible"]
    alone = compatible_results(plain.embeddings, rows, plain.test, record, plain.recipe, torch.device("cpu"))
    return {"seed": seed, "compatible": record, "plain": alone}


def old_rows(folder: Path) -> torch.Tensor:
    from safetensors.torch import load_file

    return load_file(folder / FILE)["rows"]


def table(name: str, one: dict[str, Any]) -> str:
    """One seed as Markdown."""
    lines = [f"{name}, seed {one['seed']}", "", "| queries–rows | R@1 % | MAP@R % | MAP@R against old–old |"]
    lines += ["|---|--:|--:|--:|"]
    for how, pairs in (("compatible", PAIRS), ("plain", PAIRS[1:])):
        for pair in pairs:
            cells = [_cell(one[how]["test"][pair][metric]) for metric in ("recall@1", "map@r")]
            gain = one[how]["against"].get(pair)
            shown = "" if gain is None else f"{_cell(gain, '+.1f')} {gain['verdict']}"
            who = pair.replace("_", "–") + ("" if pair == "old_old" else f", {how}")
            lines.append(f"| {who} | {cells[0]} | {cells[1]} | {shown} |")
    return "\n".join(lines)


def _cell(figure: dict[str, Any], form: str = ".1f") -> str:
    value, low, high = (format(100 * figure[key], form) for key in ("value", "low", "high"))
    return f"{value} ({low} to {high})"


if __name__ == "__main__":
    main()
