"""ArcFace wins with much data, triplet with little.

    python studies/data_and_loss.py

MAP@R against the amount of training data. Omniglot: characters never seen, against the number of characters learned
and of drawings of each. Fashion-MNIST: the official test pictures, against the number of training pictures of a class.
Each loss gets two settings and takes, at every amount, the one that is better on separate validation data (other
characters, other training pictures), so that neither suffers from a margin or scale made for another size. Every seed
draws other training items; both losses get the same ones, from the same start, for as many steps with as many items:
the triplet loss a few classes with several items of each, ArcFace as many classes as fit, as each needs.

The claim is the conclusion of a survey and names no experiment. Deng et al. 2019 (ArcFace), Schroff et al. 2015.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ground
import showing
import torch
from torch import nn

from nearkin import losses
from nearkin.data import augment

FULL, QUICK = (4, 200, 96), (2, 2, 16)  # seeds, steps, items in a batch
DIM = 64
STUDENT = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365}  # 97.5 % points by degrees of freedom
SETTINGS: dict[str, dict[str, Callable[[int], nn.Module]]] = {
    "ArcFace": {
        "m 0.2, s 8": lambda classes: losses.ArcFaceLoss(classes, DIM, margin=0.2, scale=8.0),
        "m 0.4, s 16": lambda classes: losses.ArcFaceLoss(classes, DIM, margin=0.4, scale=16.0),
    },
    "triplet": {
        "semi-hard, m 0.2": lambda classes: losses.TripletLoss(0.2),
        "batch-hard, soft margin": lambda classes: losses.TripletLoss(
            None, squared=False, selection="batch_hard", normalize=False
        ),
    },
}
NAMES = tuple(SETTINGS)


class Amount(NamedTuple):
    """How much to learn from: classes (None: all there are) and pictures of each."""

    classes: int | None
    pictures: int


class Task(NamedTuple):
    """learn: what may be trained on; validate: what chooses a setting; test: what is reported."""

    title: str
    learn: ground.Part
    validate: ground.Part
    test: ground.Part
    augmentation: augment.Augmentation
    sweeps: dict[str, list[Amount]]


def drawn(part: ground.Part, amount: Amount, seed: int) -> ground.Part:
    """Classes and pictures at random, smaller amounts within the larger ones of the same seed."""
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.randperm(part.classes, generator=generator)[: amount.classes].to(part.labels.device)
    order = torch.randperm(len(part.labels), generator=generator).to(part.labels.device)
    mixed = part.where(order[torch.isin(part.labels[order], kinds)])
    return ground.some(mixed, amount.pictures)


def trained(
    options: ground.Options, task: Task, amount: Amount, make: Callable[[int], nn.Module], seed: int
) -> nn.Module:
    _, steps, size = QUICK if options.quick else FULL
    part = drawn(task.learn, amount, seed)
    torch.manual_seed(seed)  # the class weights
    loss = make(part.classes)
    each = min(amount.pictures, max(4, size // part.classes))
    if isinstance(loss, losses.ArcFaceLoss):  # more classes at once: with a few, the weights chase the last batch
        loss.lr_scale, each = 10.0, min(amount.pictures, max(1, size // part.classes))
    batches = ground.balanced(part, min(part.classes, size // each), each, steps, seed)
    model = ground.Distorted(ground.encoder(options, part.size, DIM, seed), task.augmentation, seed)
    ground.train(model, loss, part, batches, lr=3e-3)
    return model


def compared(options: ground.Options, task: Task, amount: Amount) -> dict[str, Any]:
    """MAP@R of both losses, seed by seed, each with the setting that was better on validation data with seed 0."""
    seeds = (QUICK if options.quick else FULL)[0]
    result: dict[str, Any] = {}
    for name, settings in SETTINGS.items():
        first = {key: trained(options, task, amount, make, 0) for key, make in settings.items()}
        valued = {key: ground.scores(model, task.validate)["map@r"] for key, model in first.items()}
        chosen = max(valued, key=valued.__getitem__)
        rest = (trained(options, task, amount, settings[chosen], seed) for seed in range(1, seeds))
        runs = [ground.scores(model, task.test)["map@r"] for model in (first[chosen], *rest)]
        result[name] = {"setting": chosen, "map@r": runs}
    gain = [a - b for a, b in zip(*(result[name]["map@r"] for name in NAMES), strict=True)]
    mean = sum(gain) / len(gain)
    half = STUDENT[seeds - 1] * math.sqrt(sum((g - mean) ** 2 for g in gain) / (seeds - 1) / seeds)
    return result | {"ArcFace less triplet": {"mean": mean, "low": mean - half, "high": mean + half}}


def tasks(options: ground.Options) -> list[Task]:
    signs, (clothes, clothes_test) = ground.omniglot(options), ground.fashion(options)
    kinds = signs.labels % 8  # every eighth character to validate, two in eight to test, of all alphabets
    learn, validate, test = (signs.where(m) for m in (kinds < 5, kinds == 5, kinds > 5))
    validation_size = 10 if options.quick else 200
    places = [20] if options.quick else [2, 5, 20]
    counts = [5, learn.classes] if options.quick else [20, learn.classes]
    amounts = [20] if options.quick else [5, 100, 5000]
    glyph, still = augment.preset("glyph"), augment.preset("none")
    return [
        Task(
            "Omniglot, unseen characters",
            *(learn, validate, test, glyph),
            {
                f"drawings of each of {learn.classes} characters": [Amount(None, n) for n in places],
                "characters, 20 drawings of each": [Amount(n, 20) for n in counts],
            },
        ),
        Task(
            "Fashion-MNIST, unseen pictures",
            *(
                ground.some(clothes, 5000, skip=validation_size),
                ground.some(clothes, validation_size),
                ground.some(clothes_test, 2 * validation_size),
                still,
            ),
            {"pictures of each of 10 classes": [Amount(None, n) for n in amounts]},
        ),
    ]


def draw(numbers: dict[str, Any]) -> Any:
    sweeps = [
        (task, sweep, cells) for task, sweeps_of_task in numbers.items() for sweep, cells in sweeps_of_task.items()
    ]
    figure, panels = showing.figure(
        "How much there is to learn from, and which loss does better", (2, len(sweeps)), (4.3 * len(sweeps), 7)
    )
    for (above, below), (task, sweep, cells) in zip(panels.T, sweeps, strict=True):
        amounts = [int(amount) for amount in cells]
        for colour, name in zip(showing.INK, NAMES, strict=False):
            runs = list(zip(*(cell[name]["map@r"] for cell in cells.values()), strict=True))
            showing.band(above, amounts, runs, colour, name, marker="o", markersize=4)
        showing.panel(above, task, "", "MAP@R, mean and range of seeds" if above is panels[0, 0] else "")
        gain = [cell["ArcFace less triplet"] for cell in cells.values()]
        middle = [100 * g["mean"] for g in gain]
        error = [[100 * (g["mean"] - g["low"]) for g in gain], [100 * (g["high"] - g["mean"]) for g in gain]]
        below.axhline(0, color=showing.SOFT, linewidth=1)
        below.errorbar(amounts, middle, error, fmt="o-", color=showing.TEXT, capsize=3, linewidth=1.2)
        showing.panel(below, "", sweep, "ArcFace less triplet, points, 95 %" if below is panels[1, 0] else "")
        reach = 1.35 * max(abs(value) for g in gain for value in (100 * g["low"], 100 * g["high"]))
        below.set_ylim(-reach, reach)
        for words, height, place in (("ArcFace better", 0.97, "top"), ("triplet better", 0.03, "bottom")):
            below.text(
                0.5, height, words, transform=below.transAxes, ha="center", va=place, color=showing.SOFT, fontsize=9
            )
        for axes in (above, below):
            axes.set(xscale="log", xticks=amounts, xticklabels=[f"{n:,}" for n in amounts])
            axes.minorticks_off()
    showing.legend(panels[0, -1], loc="lower right")
    return figure


def judge(numbers: dict[str, Any]) -> dict[str, bool]:
    """Both ends of every sweep; the 95 % interval of the paired difference over seeds must lie on the claimed side."""
    parts = {}
    for task, sweeps in numbers.items():
        for sweep, cells in sweeps.items():
            least, *_, most = cells if len(cells) > 1 else [*cells, *cells]
            name = f"{task}, {sweep}"
            parts[f"{name}: triplet is better at {least}, 95 %"] = cells[least]["ArcFace less triplet"]["high"] < 0
            parts[f"{name}: ArcFace is better at {most}, 95 %"] = cells[most]["ArcFace less triplet"]["low"] > 0
    return parts


def main(argv: Sequence[str] | None = None) -> None:
    options = ground.options(__doc__, argv)
    numbers: dict[str, Any] = {}
    known: dict[tuple[str, int, int], dict[str, Any]] = {}
    for task in tasks(options):
        numbers[task.title] = {}
        for sweep, amounts in task.sweeps.items():
            cells = numbers[task.title][sweep] = {}
            for amount in amounts:
                classes = amount.classes or task.learn.classes
                place = task.title, classes, amount.pictures  # the largest amount ends two sweeps
                known[place] = known.get(place) or compared(options, task, amount)
                cells[str(classes if "characters," in sweep else amount.pictures)] = known[place]
    showing.save(options, "data_and_loss", draw(numbers), numbers, judge(numbers))


if __name__ == "__main__":
    main()
