"""Blurred and darkened pictures have shorter embeddings, where the margin followed the length in training.

    python studies/quality.py

ORL faces and reduced CUB birds: the first half of the classes is learned, the others are tested. The features are those
of EfficientNet-Lite0 with ImageNet weights, frozen and not centred; a linear head of free length learns with MagFace,
AdaFace and, as a control whose loss does not see the length, ArcFace. Heads learn from the pictures as they are
("clean"), or from these with one blurred and one darkened copy of each, of random strength ("mixed"), under the same
labels. The figure is the area under the ROC curve by which the length tells a test picture from degraded test pictures:
the probability that the clean one of a random pair is longer, 0.5 by chance. The length of the frozen features
themselves is beside it.

Meng et al. 2021 (MagFace), Kim et al. 2022 (AdaFace); both show it on faces of the web, for networks trained on
millions of them, and neither names this experiment.
"""

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ground
import numpy as np
import showing
import torch
from matplotlib.figure import Figure
from PIL import Image, ImageFilter
from torch import Tensor, nn

from nearkin import data, losses, models
from nearkin.data.decode import square

FULL, QUICK = (3, 500), (2, 3)  # seeds, steps
SIDE, DIM, CLASSES, EACH, RATE = 112, 128, 16, 4, 1e-3
BLUR, DARK = (1.0, 2.0, 4.0), (0.5, 0.25, 0.1)  # deviation in pixels of 112; factor of the brightness
STRONG = ("blur 4", "dark 0.1")
ENOUGH = 0.7  # of the area, in every seed
SETS = {"ORL": ("orl", "orl-faces", 10, 10), "CUB": ("cub200", "CUB_200_2011", 10, 5)}  # pictures of a class
LOSSES: dict[str, Callable[[int], nn.Module]] = {
    "MagFace": lambda classes: losses.MagFaceLoss(classes, DIM),
    "AdaFace": lambda classes: losses.AdaFaceLoss(classes, DIM),
    "ArcFace": lambda classes: losses.ArcFaceLoss(classes, DIM),
}


class Task(NamedTuple):
    """Features: to learn from, clean or mixed; of clean test pictures; and of the same, degraded, by name."""

    learn: dict[str, ground.Part]
    test: ground.Part
    degraded: dict[str, Tensor]


def blurred(pixels: np.ndarray, deviation: float) -> np.ndarray:
    return np.asarray(Image.fromarray(pixels).filter(ImageFilter.GaussianBlur(deviation)))


def darkened(pixels: np.ndarray, factor: float) -> np.ndarray:
    return np.round(pixels * factor).astype(np.uint8)


@torch.inference_mode()
def features(encoder: models.Encoder, pictures: Sequence[np.ndarray], device: torch.device) -> Tensor:
    """Pooled features, (N, 1280)."""
    parts = []
    for start in range(0, len(pictures), 64):
        batch = torch.from_numpy(np.stack(pictures[start : start + 64])).to(device)
        parts.append(encoder.features(batch.permute(0, 3, 1, 2).float() / 255))
    return torch.cat(parts).clone()


def load(options: ground.Options, encoder: models.Encoder, name: str) -> Task:
    source, folder, learned, tested = SETS[name]
    items = data.load(source, root=options.data / folder)
    assert items.labels is not None and items.pictures is not None
    number = len(items.classes) if not options.quick else 8
    first = number // 2
    pixels: dict[bool, list[np.ndarray]] = {True: [], False: []}
    labels: dict[bool, list[int]] = {True: [], False: []}
    for kind in range(number):
        most = (learned if kind < first else tested) if not options.quick else 4
        for i in np.flatnonzero(items.labels == kind)[:most].tolist():
            pixels[kind < first].append(square(items.pictures.read(i), side=SIDE))
            labels[kind < first].append(kind)
    draw = np.random.default_rng(0)
    learn, test = pixels[True], pixels[False]
    hard = [blurred(p, float(draw.uniform(0.5, 5))) for p in learn]
    hard += [darkened(p, float(draw.uniform(0.08, 0.8))) for p in learn]
    clean, worse, tested_rows = (features(encoder, part, options.device) for part in (learn, hard, test))
    scale = math.sqrt(clean.shape[1]) / float(clean.norm(dim=1).mean())  # one number: lengths keep their order

    def part(rows: Tensor, of: list[int]) -> ground.Part:
        return ground.Part(rows * scale, torch.tensor(of, device=rows.device).unique(return_inverse=True)[1])

    every = {f"blur {s:g}": [blurred(p, s) for p in test] for s in BLUR}
    every |= {f"dark {f:g}": [darkened(p, f) for p in test] for f in DARK}
    degraded = {key: scale * features(encoder, pictures, options.device) for key, pictures in every.items()}
    known = {"clean": part(clean, labels[True]), "mixed": part(torch.cat([clean, worse]), labels[True] * 3)}
    return Task(known, part(tested_rows, labels[False]), degraded)


def area(clean: Tensor, worse: Tensor) -> float:
    """Probability that a clean picture's embedding is longer than a degraded one's; ties count half."""
    a, b = clean.double().norm(dim=1), worse.double().norm(dim=1)
    return float(((a[:, None] > b).double() + 0.5 * (a[:, None] == b).double()).mean())


def run(task: Task, arm: str, kind: str, steps: int, seed: int) -> dict[str, float]:
    part = task.learn[kind]
    head = models.build("mlp", features=part.images.shape[1], hidden=(), dim=DIM, normalize=False, seed=seed)
    head, loss = head.to(part.images.device), LOSSES[arm](part.classes)
    loss.lr_scale = 10.0  # class weights of few classes learn faster, as in the other studies
    batches = ground.balanced(part, min(CLASSES, part.classes), EACH, steps, seed)
    ground.train(head, loss, part, batches, lr=RATE)
    clean = ground.embed(head, task.test)
    result = {"recall@1": ground.judged(clean, task.test.labels)["recall@1"]}
    for key, rows in task.degraded.items():
        result[key] = area(clean, ground.embed(head, ground.Part(rows, task.test.labels)))
    return result


def frozen(task: Task) -> dict[str, float]:
    clean, labels = task.test
    result = {"recall@1": ground.judged(clean, labels)["recall@1"]}
    return result | {key: area(clean, rows) for key, rows in task.degraded.items()}


def draw(numbers: dict[str, Any]) -> Figure:
    figure, panels = showing.figure("Can the length of an embedding tell degraded pictures?", (1, 2), (11, 4.4))
    keys = [f"blur {s:g}" for s in BLUR] + [f"dark {f:g}" for f in DARK]
    for axes, name in zip(panels, SETS, strict=True):
        showing.panel(axes, f"{name}, classes never seen", "deviation of the blur, px; brightness", "area under ROC")
        for place, arm in enumerate(LOSSES):
            for kind, line in (("clean", "--"), ("mixed", "-")):
                arms = numbers[name][arm][kind]
                for part in (keys[:3], keys[3:]):
                    runs = np.array([arms[key]["runs"] for key in part]).T
                    at = [keys.index(key) for key in part]
                    label = f"{arm}, {kind}" if part == keys[:3] else "_"
                    showing.band(axes, at, runs, showing.INK[place], label, linestyle=line, marker="o", markersize=4)
        for part in (keys[:3], keys[3:]):
            at, values = [keys.index(key) for key in part], [numbers[name]["frozen features"][key] for key in part]
            axes.plot(at, values, color=showing.SOFT, linestyle=":", label="frozen features" if 0 in at else "_")
        axes.axhline(0.5, color=showing.RULE)
        axes.set(xticks=range(len(keys)), xticklabels=keys, ylim=(0, 1.02))
    showing.legend(panels[0], loc="lower right", ncols=2)
    return figure


def judge(numbers: dict[str, Any]) -> dict[str, bool]:
    return {
        f"{name}, {arm}, {kind}: {key}, area at least {ENOUGH:g} in every seed": (
            numbers[name][arm][kind][key]["low"] >= ENOUGH
        )
        for name in SETS
        for arm in ("MagFace", "AdaFace")
        for kind in ("clean", "mixed")
        for key in STRONG
    }


def main(argv: Sequence[str] | None = None) -> None:
    options = ground.options(__doc__, argv)
    seeds, steps = QUICK if options.quick else FULL
    encoder = models.build("efficientnet-lite0", size=SIDE, pretrained=not options.quick).to(options.device).eval()
    numbers: dict[str, Any] = {}
    for name in SETS:
        if not Path(options.data / SETS[name][1]).is_dir():
            sys.exit(f"{options.data / SETS[name][1]}: no such folder\nSet the folder of the data sets with --data.")
        task = load(options, encoder, name)
        numbers[name] = {"frozen features": frozen(task)}
        for arm in LOSSES:
            numbers[name][arm] = {}
            for kind in task.learn:
                runs = [run(task, arm, kind, steps, seed) for seed in range(seeds)]
                cell = {key: showing.spread(r[key] for r in runs) | {"runs": [r[key] for r in runs]} for key in runs[0]}
                numbers[name][arm][kind] = cell
                print(name, arm, kind, {key: round(value["mean"], 3) for key, value in cell.items()}, flush=True)
        pictures = {kind: len(part.labels) for kind, part in task.learn.items()}
        numbers[name]["settings"] = {"test pictures": len(task.test.labels), "learned": pictures, "seeds": seeds}
    showing.save(options, "quality", draw(numbers), numbers, judge(numbers))


if __name__ == "__main__":
    main()
