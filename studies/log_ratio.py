"""Log-ratio loss beats binarised triplets on continuous labels, and neighbours in the batch speed it up.

    python studies/log_ratio.py [--parts coil|cub]

Two sets with real-valued labels. COIL-20: the pose as (cos, sin); learns every fourth pose of 20 objects and is tested
on the poses between. CUB-200-2011: the 312 attributes of a bird's class; learns 75 classes from frozen ImageNet
features of EfficientNet-Lite0 through a small MLP and is tested on 100 others. Metrics by evaluation.graded: nDCG@10
and the mean label distance of the ten nearest. A part that is not run is taken from the numbers of the last run.

Every batch has 60 items, of one of five kinds (samplers.LabelNeighbours):

    one anchor           an item, its 5 nearest by label, 54 random ones; the loss of that one item: as published
    ten anchors          ten items, each with its 5 nearest; the loss of those ten
    half groups          five items with their 5 nearest, and 30 random ones; the loss of all 60
    groups               ten items, each with its 5 nearest; the loss of all 60
    random batches       60 random items; the loss of all 60

    log-ratio            distances in proportion to label distances (length free, no margin)
    binarised triplet    the 30 nearest by label are positives, the others negatives; semi-hard, margin 0.2
    dense triplet        every two items in the order of their label distance, margin 0.03

Items of the same label count as half the smallest label distance, so that the log-ratio loss can use them as well. Each
method takes the better of two learning rates by validation data (other poses, other classes); rates stay constant, so
that a curve can be read at any step. Kim et al. 2019, arXiv:1904.09626; margins and batches from the authors' code.
"""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import ground
import numpy as np
import showing
import torch
from torch import Tensor, nn

from nearkin import data, evaluation, losses, models, samplers
from nearkin.core.distances import squared_euclidean
from nearkin.core.relations import LabelDistance, Relation, label_distances
from nearkin.data.file_tree import Archive
from nearkin.data.image_cache import store

FULL, QUICK = (3, 240, 60), (1, 2, 24)  # seeds, steps, items in a batch
RATES, NEIGHBOURS, POSITIVES, DIM, WIDTH, K, LOOKS = (1e-3, 3e-3), 5, 30, 64, 12, 10, 6


class Arm(NamedTuple):
    """What is learned and from which batches."""

    kind: str
    share: float = 0.0  # of the batch that is groups of an item and its neighbours; tiny: one group
    first: bool = False  # only the first item of each group is an anchor

    def groups(self, batch: int) -> int:
        return max(1, int(self.share * batch) // (1 + NEIGHBOURS))


ARMS = {
    "log-ratio, one anchor": Arm("log-ratio", 0.01, first=True),
    "log-ratio, ten anchors": Arm("log-ratio", 1.0, first=True),
    "log-ratio, half groups": Arm("log-ratio", 0.5),
    "log-ratio, groups": Arm("log-ratio", 1.0),
    "log-ratio, random batches": Arm("log-ratio"),
    "binarised triplet, random batches": Arm("binarised"),
    "dense triplet, groups": Arm("dense", 1.0),
}


class Set(NamedTuple):
    """Parts whose "classes" number the distinct labels; targets (kinds, K): the value of each."""

    learn: ground.Part
    validate: ground.Part
    test: ground.Part
    targets: Tensor
    encoder: Callable[[int], nn.Module]


class Graded(nn.Module):
    """The loss of an arm. Labels are indices of items; kinds (N,): the row of each in the table of distances."""

    def __init__(self, arm: Arm, kinds: Tensor, table: Tensor, reach: float) -> None:
        super().__init__()
        self.arm, self.kinds, self.table, self.reach = arm, kinds, table.float(), reach
        self.least = float(table[table > 0].min()) / 2

    def forward(self, x: Tensor, items: Tensor) -> Tensor:
        kinds = self.kinds[items]
        gaps, other = self.table[kinds][:, kinds], items[:, None] != items  # (B, B)
        if self.arm.kind == "log-ratio":  # a label distance of 0 is left out
            label_distance = LabelDistance(torch.where(other, gaps.clamp(min=self.least), 0.0))
            return losses.logratio_loss(x, label_distance, anchors=self.arm.groups(len(x)) if self.arm.first else None)
        if self.arm.kind == "binarised":
            return losses.triplet_loss(x, Relation((gaps <= self.reach) & other, gaps > self.reach), margin=0.2)
        away = squared_euclidean(x, normalize=True)
        ordered = (gaps[:, :, None] < gaps[:, None, :]) & (other[:, :, None] & other[:, None, :])  # (anchor, near, far)
        hinge = (away[:, :, None] - away[:, None, :] + 0.03).clamp(min=0)
        return torch.where(ordered, hinge, 0.0).sum() / ordered.sum().clamp(min=1)


def coil(options: ground.Options) -> Set:
    part = ground.coil(options)
    part = part.where(part.labels < 4) if options.quick else part
    pose = torch.arange(len(part.labels), device=part.labels.device) % 72  # rows of an object run in steps of 5 degrees
    angle = torch.arange(72, device=pose.device) * (2 * math.pi / 72)
    targets = torch.stack([angle.cos(), angle.sin()], 1)
    parts = (ground.Part(part.images[m], pose[m]) for m in (pose % 4 == 0, pose % 4 == 2, pose % 2 == 1))
    return Set(
        *parts, targets, lambda seed: ground.encoder(options, part.size, DIM, seed, width=4 if options.quick else WIDTH)
    )


def cub(options: ground.Options) -> Set:
    home = options.data / "CUB_200_2011"
    items = data.load("cub200", root=home)
    assert items.labels is not None and items.pictures is not None
    labels = np.asarray(items.labels)
    place = np.concatenate([np.arange(n) for n in np.bincount(labels)])  # photos of a class are adjacent
    ends, each = ((10, 14, 24), (4, 4)) if options.quick else ((75, 100, 200), (60, 12))
    chosen = np.flatnonzero(np.where(labels < ends[0], place < each[0], (labels < ends[2]) & (place < each[1])))
    stored = store(items.pictures.take(chosen), [items.names[i] for i in chosen], side=112, channels=3, cache=False)
    features = described(torch.from_numpy(stored.rows(range(len(chosen)))), options)
    kinds = torch.from_numpy(labels[chosen]).to(options.device)
    targets = torch.tensor(attributes(home), dtype=torch.float32, device=options.device) / 100
    cuts = (kinds < ends[0], (kinds >= ends[0]) & (kinds < ends[1]), kinds >= ends[1])
    parts = [ground.Part(features[m], kinds[m]) for m in cuts]

    def encoder(seed: int) -> nn.Module:
        network = models.build("mlp", features=features.shape[1], hidden=(512,), dim=DIM, normalize=False, seed=seed)
        return network.standardize(parts[0].images.cpu()).to(options.device)

    return Set(*parts, targets, encoder)


@torch.no_grad()
def described(pixels: Tensor, options: ground.Options) -> Tensor:
    """(N, 1280) features of photos uint8 (N, 112, 112, 3); in a quick run their 12 × 12 pixels instead."""
    pictures = pixels.permute(0, 3, 1, 2)
    if options.quick:
        return nn.functional.adaptive_avg_pool2d(pictures / 255, 12).flatten(1).to(options.device)
    model = models.build("efficientnet-lite0", dim=0, size=112).to(options.device).eval()
    return torch.cat([model.features(some.to(options.device) / 255) for some in pictures.split(256)])


def attributes(home: Path) -> Any:
    """(200, 312): how often, in per cent, people saw each attribute in photos of each class."""
    name = "attributes/class_attribute_labels_continuous.txt"
    if (home / name).is_file():
        return np.loadtxt(home / name)
    for path in sorted(home.glob("*.tar")):
        archive = Archive(path)
        inside = [member for member in archive.names() if member.endswith(name)]
        if inside:
            return np.loadtxt(archive.read(inside[0]).decode().splitlines())
    raise SystemExit(f"{home} has no {name}, neither as a file nor in a .tar")


def run(
    dataset: Set, arm: Arm, batches: Tensor, table: Tensor, rate: float, seed: int, shown: int = 0
) -> dict[str, Any]:
    """Validation nDCG at the end, the curves of the test items, and the items nearest to the first `shown` of them."""
    model = dataset.encoder(seed)
    away = "euclidean" if arm.kind == "log-ratio" else "cosine"
    nearest = label_distances(dataset.targets[dataset.learn.labels.unique()]).sort(1).values
    each = len(dataset.learn.labels) / len(nearest)
    reach = float(nearest[:, min(int(POSITIVES / each), nearest.shape[1] - 1)].median()) * 1.0001
    curve: list[dict[str, float]] = []

    def judged(part: ground.Part) -> dict[str, float]:
        graded = evaluation.graded(ground.embed(model, part), dataset.targets[part.labels], ks=(K,), distance=away)
        return {"ndcg": graded[f"ndcg@{K}"], "distance": graded[f"label_distance@{K}"]}

    def record(step: int, value: Tensor, embeddings: Tensor) -> None:
        curve.append({"step": step, **judged(dataset.test)})

    loss, part = Graded(arm, dataset.learn.labels, table, reach), dataset.learn
    part = ground.Part(part.images, torch.arange(len(part.labels), device=part.labels.device))
    ground.train(model, loss, part, batches, lr=rate, decay=False, callback=record, every=max(1, len(batches) // LOOKS))
    rows = ground.embed(model, dataset.test)
    nearest = squared_euclidean(rows[:shown], rows, normalize=away == "cosine").argsort(1)[:, 1:6]
    return {"rate": rate, "validation": judged(dataset.validate)["ndcg"], "curve": curve, "nearest": nearest.tolist()}


def drawn(dataset: Set, arm: Arm, steps: int, batch: int, seed: int) -> Tensor:
    """(steps, batch) places of the items of every batch."""
    rows = dataset.targets[dataset.learn.labels].cpu()
    # Of equally near items the sampler takes the first ones: a little noise varies the choice.
    rows = rows + 1e-3 * torch.randn(rows.shape, generator=torch.Generator().manual_seed(seed))
    near = NEIGHBOURS if arm.share else 0
    sampler = samplers.LabelNeighbours(rows, batch, near, seed, anchors=arm.groups(batch), batches=steps)
    return ground.batches(sampler, dataset.learn)


def measured(dataset: Set, options: ground.Options, arms: dict[str, Arm] = ARMS, shown: int = 0) -> dict[str, Any]:
    seeds, steps, size = QUICK if options.quick else FULL
    table = label_distances(dataset.targets)
    result: dict[str, Any] = {}
    for name, arm in arms.items():
        batches = [drawn(dataset, arm, steps, size, seed) for seed in range(seeds)]
        rates = RATES[: 1 if options.quick else None]
        first = [run(dataset, arm, batches[0], table, rate, 0, shown) for rate in rates]
        best = max(first, key=lambda run_: run_["validation"])
        runs = [best] + [run(dataset, arm, batches[seed], table, best["rate"], seed) for seed in range(1, seeds)]
        curves = {key: [[point[key] for point in run_["curve"]] for run_ in runs] for key in ("ndcg", "distance")}
        ends = {key: showing.spread(curve[-1] for curve in every) for key, every in curves.items()}
        validation = showing.spread(run_["validation"] for run_ in runs)
        result[name] = {"rate": best["rate"], **ends, "validation": validation, "curves": curves}
        if shown:
            result[name]["nearest"] = best["nearest"]
        print(f"{name}: nDCG@{K} {ends['ndcg']['mean']:.3f}", flush=True)
    result["steps"] = [point["step"] for point in best["curve"]]
    result["learned from"], result["asked"] = len(dataset.learn.labels), len(dataset.test.labels)
    return result


def reached(steps: Sequence[float], curve: Sequence[float], goal: float) -> float:
    """The first step at which the curve, linear between its points, reaches the goal; infinite where it never does."""
    for (a, b), (low, high) in zip(pairwise(steps), pairwise(curve), strict=True):
        if high >= goal:
            return a + (b - a) * max(0.0, goal - low) / max(high - low, 1e-9)
    return math.inf


def sooner(result: dict[str, Any]) -> float:
    """Steps with neighbours up to the final score of random batches, as a share of their steps; median of seeds."""
    near, random = (result[f"log-ratio, {how}"]["curves"]["ndcg"] for how in ("half groups", "random batches"))
    parts = [reached(result["steps"], a, b[-1]) / result["steps"][-1] for a, b in zip(near, random, strict=True)]
    return sorted(parts)[len(parts) // 2]


def judge(numbers: dict[str, Any]) -> dict[str, bool]:
    parts = {}
    for name, result in numbers.items():

        def above(arm_a: str, arm_b: str, result: dict[str, Any] = result) -> bool:
            a, b = (result[arm]["curves"]["ndcg"] for arm in (arm_a, arm_b))
            return all(x[-1] > y[-1] for x, y in zip(a, b, strict=True))

        for how in ("half groups", "random batches"):
            won = above(f"log-ratio, {how}", "binarised triplet, random batches")
            parts[f"{name}, {how}: log-ratio ends above the binarised triplet in nDCG@{K}, every seed"] = won
        won = above("log-ratio, one anchor", "log-ratio, random batches")
        parts[f"{name}: one anchor a batch, as published, ends above all items as anchors, every seed"] = won
        part = f"{name}: with half groups it takes at most 0.8 of the steps to where random batches end"
        parts[part] = sooner(result) <= 0.8
    return parts


def draw(numbers: dict[str, Any]) -> Any:
    figure, panels = showing.figure(
        "Learning from real-valued labels: the ten nearest of an item", (len(numbers), 2), (11, 4.4 * len(numbers))
    )
    inks = {kind: showing.INK[i] for i, kind in enumerate(("log-ratio", "binarised", "dense"))}
    lines = {"one anchor": (0, (1, 4)), "ten anchors": "-.", "half groups": "--", "groups": "-", "random batches": ":"}
    heads = {"COIL-20": "COIL-20, poses not learned", "CUB-200": "CUB-200, classes not learned"}
    metrics = {
        "ndcg": (f"nDCG@{K}", "higher is better"),
        "distance": (f"label distance of the nearest {K}", "lower is better"),
    }
    for row, (name, result) in zip(np.atleast_2d(panels), numbers.items(), strict=True):
        for axes, (key, (words, better)) in zip(row, metrics.items(), strict=True):
            for name_of_arm, arm in ARMS.items():
                line = {"linestyle": lines[name_of_arm.split(", ")[1]]}
                curves = result[name_of_arm]["curves"][key]
                showing.band(axes, result["steps"], curves, inks[arm.kind], name_of_arm, **line)
            showing.panel(axes, f"{heads[name]}; {better}", "training step", words)
    handles, names = np.atleast_2d(panels)[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3, frameon=False, labelcolor=showing.TEXT)
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--parts", choices=("coil", "cub", "both"), default="both")
    chosen, rest = parser.parse_known_args(argv)
    options = ground.options(__doc__, rest)
    last = options.numbers / "log_ratio.json"
    numbers: dict[str, Any] = json.loads(last.read_text(encoding="utf-8"))["numbers"] if last.is_file() else {}
    for key, name, load in (("coil", "COIL-20", coil), ("cub", "CUB-200", cub)):
        if chosen.parts in (key, "both"):
            numbers[name] = showing.rounded(measured(load(options), options))
            numbers[name]["part of the steps with neighbours"] = showing.rounded(sooner(numbers[name]))
    complete = [name for name in ("COIL-20", "CUB-200") if set(ARMS) <= set(numbers.get(name, ()))]
    numbers = {name: numbers[name] for name in complete}
    showing.save(options, "log_ratio", draw(numbers), numbers, judge(numbers))


if __name__ == "__main__":
    main()
