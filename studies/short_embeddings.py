"""Short embeddings: how much 64, 32 and 16 of 128 dimensions keep, trained for them (`loss.matryoshka`) and not.

    python studies/short_embeddings.py --out FOLDER [--data FOLDER] [--sets glyphs birds] [--seeds 2] [--epochs 6]
                                       [--equal] [--set finetune.projection=random] [--device cpu] [--quick]

Three sets, each trained plainly and with `loss.matryoshka = [128, 64, 32, 16]`, all else equal, and tested on classes
that were not trained on:

- glyphs: small-cnn from scratch, ArcFace (the default recipe with dim 128);
- birds: an MLP of one hidden layer (the default recipe for vectors with dim 128, SupCon) on frozen features, pooled,
  1280 numbers, of efficientnet-lite0 for reduced photos of CUB-200-2011 in FOLDER/CUB_200_2011, the first 12 per class,
  at 128 px. The features are kept in the folder of --out;
- photos: the whole of efficientnet-lite0 fine-tuned on the same photos, all of them, at 160 px, ProxyAnchor, its head
  started with principal directions. Wants a GPU: not among the default sets.

A length keeps the share MAP@R(length) / MAP@R(128) of its own run. The full lengths of both runs are compared by a
paired bootstrap over test classes. Prints the tables and writes short_embeddings.json into the folder of --out.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearkin import data, evaluation, models, training
from nearkin.core import files
from nearkin.data import augment, image_cache
from nearkin.evaluation.retrieval import retrieval_metrics
from nearkin.evaluation.statistics import cluster_bootstrap

DIMS = (128, 64, 32, 16)
EACH, SIZE, BATCH = 12, 128, 64  # photos per class, their side, how many are encoded at a time
COMMON = {"encoder.dim": DIMS[0], "training.patience": 100}
SETS: dict[str, dict[str, Any]] = {
    "glyphs": {"loss.name": "arcface", "loss.margin": 0.2, "loss.scale": 16.0},
    "birds": {"loss.name": "supcon", "encoder.name": "mlp"},
    "photos": {
        "data.size": 160,
        "data.val": 0.1,
        "encoder.name": "efficientnet-lite0",
        "encoder.pooling": "gem",
        "encoder.freeze_norms": True,
        "augment.preset": "photo",
        "loss.name": "proxy-anchor",
        "optimizer.lr": 5e-4,
        "optimizer.backbone_scale": 0.3,
        "finetune.train": "all",
        "finetune.projection": "pca",
        "finetune.interpolate": False,  # what training itself brings
        "training.ema": 0.99,
    },
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder with CUB_200_2011, for birds")
    parser.add_argument("--out", type=Path, required=True, help="where features, runs and figures are written")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=["glyphs", "birds"])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=6, help="of 100 steps; photos: over all of them")
    parser.add_argument("--equal", action="store_true", help="all lengths weigh 1, not their share of the full one")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of both runs")
    parser.add_argument("--device", default="cpu", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--quick", action="store_true", help="a few steps on a few birds, to see that it runs")
    options = parser.parse_args(argv)
    if set(options.sets) - {"glyphs"} and options.data is None:
        parser.error("birds and photos need --data, the folder with CUB_200_2011")
    options.out.mkdir(parents=True, exist_ok=True)
    started, results = time.monotonic(), {}
    for name in options.sets:
        source = {"glyphs": "glyphs", "photos": "cub200"}.get(name) or str(
            birds(options.data, options.out, options.quick)
        )
        results[name] = [compared(name, source, seed, options) for seed in range(options.seeds)]
        print(table(name, results[name]), flush=True)
    content = {"study": "short_embeddings", "quick": options.quick, "epochs": options.epochs, "sets": results}
    files.write_json(options.out / "short_embeddings.json", content | {"seconds": round(time.monotonic() - started)})


def birds(root: Path, out: Path, quick: bool, encoder_name: str = "efficientnet-lite0", size: int = SIZE) -> Path:
    """The frozen features of the photos with their classes and CUB's split of these, made once."""
    which = "" if (encoder_name, size) == ("efficientnet-lite0", SIZE) else f"-{encoder_name}-{size}"
    path = out / f"birds{which}{'-quick' if quick else ''}.npz"
    if path.is_file():
        return path
    items = data.load("cub200", root=root / "CUB_200_2011")
    assert items.pictures is not None and items.labels is not None and items.split is not None
    position = np.arange(len(items)) - np.searchsorted(items.labels, items.labels)  # within its class
    items = items.take(np.flatnonzero((position < 5) & (items.labels % 20 == 0) if quick else position < EACH))
    stored = image_cache.store(items.pictures, items.names, side=size * 8 // 7, channels=3, cache=False)
    encoder = models.build(encoder_name, size=size, channels=3).eval()
    parts = []
    for start in range(0, len(items), BATCH):
        pixels = torch.from_numpy(np.array(stored.pixels[start : start + BATCH]))
        with torch.inference_mode():
            parts.append(encoder.features(augment.centre(pixels, size)))
        print(f"\r{start + len(pixels)} of {len(items)} photos", end="", file=sys.stderr)
    names = np.array([items.classes[label] for label in items.labels])
    with files.replacing(path) as file:
        np.savez(file, embeddings=torch.cat(parts).numpy(), labels=names, split=np.array(items.split))
    return path


def compared(name: str, source: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One seed of a set: both runs at every length, and their full lengths against each other."""
    runs, quick = {}, options.quick
    weights = {"loss.matryoshka_weights": [1.0] * len(DIMS)} if options.equal else {}
    for how, lengths in (("plain", {}), ("matryoshka", {"loss.matryoshka": list(DIMS), **weights})):
        settings = {**COMMON, **SETS[name], **lengths, "training.seed": seed, "training.device": options.device}
        settings |= {"training.epochs": 1 if quick else options.epochs}
        if name != "photos" or quick:
            settings["training.batches"] = 5 if quick else 100
        if name == "photos":
            settings["data.root"] = str(options.data / "CUB_200_2011")
        settings |= {key: _value(text) for key, _, text in (pair.partition("=") for pair in options.set)}
        folder = options.out / f"{name}-{how}-{seed}{'-quick' if quick else ''}"
        runs[how] = tested(source, folder, settings)
    test = cluster_bootstrap.compare(
        runs["matryoshka"].pop("queries"), runs["plain"].pop("queries"), runs["plain"].pop("labels"), seed=seed
    )
    full = {"difference": test["difference"], "interval": test["interval"], "p": test["p"]}
    return {"seed": seed, **{how: run["lengths"] for how, run in runs.items()}, "full": full}


def tested(source: str, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """R@1 and MAP@R with 95 % intervals at every length; and per query at the full one."""
    outcome = training.train(source, folder, settings=settings, report=False)
    labels = torch.from_numpy(outcome.test.labels)
    lengths = {str(dim): _measured(outcome.embeddings[:, :dim], labels) for dim in DIMS}
    queries = retrieval_metrics.per_query(outcome.embeddings, labels, metrics=("map@r",))["map@r"]
    return {"lengths": lengths, "queries": queries, "labels": labels}


def _measured(rows: Tensor, labels: Tensor) -> dict[str, list[float]]:
    metrics: Any = evaluation.retrieval(rows, labels, ks=(1,), metrics=("recall", "map@r"), interval=True)
    return {name: [float(metrics[name]), *map(float, metrics.intervals[name])] for name in ("recall@1", "map@r")}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def table(name: str, seeds: list[dict[str, Any]]) -> str:
    """As Markdown; the interval is that of the first seed, all else the mean over the seeds."""
    lines = [f"{name}, mean of {len(seeds)} seeds", ""]
    lines += [
        "| trained | dimensions | R@1 % | MAP@R % (95 % interval, first seed) | keeps of MAP@R |",
        "|---|--:|--:|--:|--:|",
    ]
    for how in ("plain", "matryoshka"):
        for dim in map(str, DIMS):
            recall = np.mean([one[how][dim]["recall@1"][0] for one in seeds])
            value = np.mean([one[how][dim]["map@r"][0] for one in seeds])
            kept = np.mean([one[how][dim]["map@r"][0] / one[how][str(DIMS[0])]["map@r"][0] for one in seeds])
            _, low, high = seeds[0][how][dim]["map@r"]
            figures = f"{100 * recall:.1f} | {100 * value:.1f} ({100 * low:.1f}–{100 * high:.1f}) | {100 * kept:.1f} %"
            lines.append(f"| {how} | {dim} | {figures} |")
    for one in seeds:
        full, (low, high) = 100 * one["full"]["difference"], (100 * bound for bound in one["full"]["interval"])
        points = f"{full:+.2f} points of MAP@R ({low:+.2f} to {high:+.2f})"
        lines.append(f"\nfull length, matryoshka minus plain, seed {one['seed']}: {points}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
