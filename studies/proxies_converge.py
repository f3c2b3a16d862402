"""Claim 4: proxies converge much faster than triplets on Fashion-MNIST.

    python studies/proxies_converge.py [--data FOLDER] [--device auto] [--quick] [--out FOLDER]

Proxy-NCA and Proxy-Anchor beside triplets with random and with semi-hard negatives: same encoder, same batches of 120.
Two tasks: all ten classes, new pictures; and five classes (trouser, dress, sandal, sneaker, boot), pictures of the five
others. (The other way round, and with the first five, no loss improves on the untrained network for unseen classes:
there is nothing to converge to.) Each loss takes, of four settings, two learning rates and two values
of its margin or scale, the one with the highest mean validation curve over all steps, which is what fast means;
validation pictures are of the training classes and not trained on. Then other seeds, measured on test pictures.

Fast is counted in steps, and in seconds of training alone, up to a target: 90 % of the way from the untrained network
to the highest MAP@R of semi-hard triplets, both in the mean of the seeds. Much faster is half of it or less.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import ground
import numpy as np
import showing
import torch
from torch import Tensor, nn

from nearkin import losses

DIM, STEPS, EVERY, RATES, SEEDS, FASTER = 64, 120, 5, (1e-3, 5e-3), (1, 2, 3), 2.0
LOSSES: dict[str, tuple[tuple[float, float], Callable[[int, float], nn.Module]]] = {  # with two margins or scales
    "triplet, random": ((0.2, 0.5), lambda classes, margin: losses.TripletLoss(margin, selection="random")),
    "triplet, semi-hard": ((0.2, 0.5), lambda classes, margin: losses.TripletLoss(margin)),
    "Proxy-NCA": ((3.0, 1.0), lambda classes, scale: losses.ProxyNCALoss(classes, DIM, scale)),
    "Proxy-Anchor": ((32.0, 8.0), lambda classes, scale: losses.ProxyAnchorLoss(classes, DIM, scale=scale)),
}
TRIPLETS, PROXIES = ("triplet, random", "triplet, semi-hard"), ("Proxy-NCA", "Proxy-Anchor")
INK = dict(zip(LOSSES, (showing.INK[9], showing.INK[3], showing.INK[2], showing.INK[0]), strict=True))
TASKS = {"new pictures": "new pictures of the ten classes", "unseen classes": "pictures of five unseen classes"}


class Tracker:
    """MAP@R of a part during training, and the seconds spent on training alone."""

    def __init__(self, model: nn.Module, part: ground.Part) -> None:
        self.model, self.part = model, part
        self.steps, self.seconds, self.quality = list[int](), list[float](), list[float]()
        self.spent, self.since = 0.0, time.perf_counter()

    def __call__(self, step: int, value: Tensor, embeddings: Tensor) -> None:
        value.item()  # waits for the device
        self.spent += time.perf_counter() - self.since
        self.steps.append(step)
        self.seconds.append(self.spent)
        self.quality.append(ground.scores(self.model, self.part)["map@r"])
        self.since = time.perf_counter()


def curve(
    options: ground.Options, parts: Sequence[ground.Part], loss: str, setting: tuple[float, float], seed: int
) -> Tracker:
    """A training run with (margin or scale, learning rate), evaluated every few steps."""
    learn, judge = parts
    model = ground.encoder(options, learn.size, DIM, seed)
    size, steps = (30, 3) if options.quick else (120, STEPS)
    places = ground.balanced(learn, learn.classes, size // learn.classes, steps, seed)
    torch.manual_seed(seed)  # initial proxies and random negatives
    tracker = Tracker(model, judge)
    loss_module = LOSSES[loss][1](learn.classes, setting[0])
    ground.train(model, loss_module, learn, places, lr=setting[1], decay=False, callback=tracker, every=EVERY)
    return tracker


def reached(xs: Sequence[float], ys: Sequence[float], target: float) -> float | None:
    """Where the curve first reaches the target, linear between two measurements; None if never."""
    for i, y in enumerate(ys):
        if y >= target:
            before = max(i - 1, 0)
            part = 1.0 if i == before or y == ys[before] else (target - ys[before]) / (y - ys[before])
            return xs[before] + part * (xs[i] - xs[before])
    return None


def tasks(options: ground.Options) -> dict[str, tuple[ground.Part, ground.Part, ground.Part]]:
    """Training, validation (which chooses the rate) and test part."""
    train, test = ground.fashion(options)
    each = 5 if options.quick else 200
    odd, even = train.where(train.labels % 2 == 1), test.where(test.labels % 2 == 0)
    return {
        name: (ground.some(part, 10**6, skip=each), ground.some(part, each), ground.some(judge, most))
        for name, part, judge, most in (("new pictures", train, test, each), ("unseen classes", odd, even, 2 * each))
    }


def main(argv: Sequence[str] | None = None) -> None:
    options = ground.options(__doc__, argv)
    rates, seeds = (RATES[:1], SEEDS[:1]) if options.quick else (RATES, SEEDS)
    numbers: dict[str, Any] = {}
    runs: dict[Any, list[Tracker]] = {}
    targets = {}
    for task, (learn, check, judge) in tasks(options).items():
        chosen = {}
        for loss, (values, _) in LOSSES.items():
            settings = [(value, lr) for value in values[: 1 if options.quick else None] for lr in rates]
            tried = {
                setting_: np.mean(curve(options, (learn, check), loss, setting_, 0).quality) for setting_ in settings
            }
            chosen[loss] = max(tried, key=tried.__getitem__)
            runs[task, loss] = [curve(options, (learn, judge), loss, chosen[loss], seed) for seed in seeds]
        mean = np.mean([run.quality for run in runs[task, TRIPLETS[1]]], 0)
        targets[task] = float(mean[0] + 0.9 * (mean.max() - mean[0]))
        for loss in LOSSES:
            setting = {"margin or scale": chosen[loss][0], "rate": chosen[loss][1]}
            numbers[f"{task}, {loss}"] = setting | summary(runs[task, loss], targets[task])
    numbers = {"target": targets, **numbers}
    showing.save(options, "proxies_converge", draw(runs, targets), numbers, verdict(numbers))


def summary(runs: Sequence[Tracker], target: float) -> dict[str, Any]:
    """Means over the seeds; a target that one of them misses is missed."""
    steps = [reached(run.steps, run.quality, target) for run in runs]
    seconds = [reached(run.seconds, run.quality, target) for run in runs]
    return {
        "steps": None if None in steps else float(np.mean(steps)),  # type: ignore[arg-type]
        "seconds": None if None in seconds else float(np.mean(seconds)),  # type: ignore[arg-type]
        "steps of each seed": steps,
        "ms a step": 1000 * float(np.mean([run.seconds[-1] / run.steps[-1] for run in runs])),
        "map@r after 25": float(np.mean([np.interp(25, run.steps, run.quality) for run in runs])),
        "map@r, highest": showing.spread(max(run.quality) for run in runs),
        "map@r at the end": showing.spread(run.quality[-1] for run in runs),
        "map@r by step": {"step": list(runs[0].steps), "each seed": [list(run.quality) for run in runs]},
    }


def verdict(numbers: dict[str, Any]) -> dict[str, bool]:
    def faster(task: str, unit: str, than: str) -> bool:
        slow = numbers[f"{task}, {than}"][unit]
        fast = [numbers[f"{task}, {loss}"][unit] for loss in PROXIES]
        return all(value is not None and (slow is None or slow >= FASTER * value) for value in fast)

    cases = [("steps", TRIPLETS[0]), ("steps", TRIPLETS[1]), ("seconds", TRIPLETS[1])]
    text = "{}: both proxy losses reach the target in at most half the {} of {}"
    return {text.format(task, unit, than): faster(task, unit, than) for task in TASKS for unit, than in cases}


def draw(runs: dict[Any, list[Tracker]], targets: dict[str, float]) -> Any:
    figure, panels = showing.figure("How fast MAP@R rises: proxies and triplets on Fashion-MNIST", (1, 2), (11, 4.6))
    for axes, (task, words) in zip(panels, TASKS.items(), strict=True):
        showing.panel(axes, words[0].upper() + words[1:], "step (120 pictures each)", "MAP@R")
        for loss, colour in INK.items():
            tracks = runs[task, loss]
            showing.band(axes, tracks[0].steps, [run.quality for run in tracks], colour, loss)
            at = reached(tracks[0].steps, np.mean([run.quality for run in tracks], 0), targets[task])
            if at is not None:
                axes.plot([at], [targets[task]], "o", color=colour, markersize=7, markeredgecolor="white", zorder=5)
        axes.axhline(targets[task], color=showing.SOFT, linewidth=1, linestyle=":")
        axes.annotate(
            " target",
            (1, targets[task]),
            xycoords=("axes fraction", "data"),
            va="center",
            annotation_clip=False,
            color=showing.SOFT,
            fontsize=9,
        )
        axes.set_xlim(0, tracks[0].steps[-1])
    showing.legend(panels[0], loc="lower right")
    return figure


if __name__ == "__main__":
    main()
