"""Claim 6: lifted structure and N-pair make better use of the batch than triplets do.

    python studies/batch_use.py [--data FOLDER] [--device auto] [--quick] [--out FOLDER]

If a loss uses all pairs of a batch, a larger batch gives each picture more to be compared with: for the same number of
pictures, larger batches (and so fewer steps) should cost it less, or gain more, than a loss that takes one
negative for each positive. Omniglot, 121 characters to learn from, MAP@R on 121 others; batches of 32 to 256 with 4
per class. The learning rate of a loss is the best of three for batches of 128, on characters of neither part, and
grows with the root of the batch size, as is usual with Adam.
"""

from collections.abc import Callable, Sequence
from typing import Any

import ground
import numpy as np
import showing
import torch
from torch import nn

from nearkin import losses

IMAGES, SIZES, BASE, RATES, SEEDS = 16_384, (32, 64, 128, 256), 128, (1e-3, 3e-3, 1e-2), (1, 2)
LOSSES: dict[str, Callable[[], nn.Module]] = {
    "triplet, random": lambda: losses.TripletLoss(0.2, selection="random"),
    "triplet, semi-hard": lambda: losses.TripletLoss(0.2),
    "lifted": lambda: losses.LiftedStructureLoss(),
    "N-pair": lambda: losses.NPairLoss(),
}
INK = dict(zip(LOSSES, (showing.INK[9], showing.INK[3], showing.INK[0], showing.INK[2]), strict=True))
TRIPLETS, BATCHWISE = ("triplet, random", "triplet, semi-hard"), ("lifted", "N-pair")


def quality(options: ground.Options, parts: Any, size: int, images: int, loss: str, lr: float, seed: int) -> float:
    learn, judge = parts
    torch.manual_seed(seed)  # random negatives use PyTorch's generator
    model = ground.encoder(options, learn.size, seed=seed)
    places = ground.balanced(learn, size // 4, 4, images // size, seed)
    ground.train(model, LOSSES[loss](), learn, places, lr=lr * (size / BASE) ** 0.5, clip=1.0)
    return ground.scores(model, judge)["map@r"]


def main(argv: Sequence[str] | None = None) -> None:
    options = ground.options(__doc__, argv)
    images, sizes, base = (96, (16, 32), 16) if options.quick else (IMAGES, SIZES, BASE)
    rates, seeds = (RATES[:1], SEEDS[:1]) if options.quick else (RATES, SEEDS)
    every, unseen = ground.halves(ground.omniglot(options))
    validation = every.labels >= every.classes - every.classes // 4  # for choosing rates
    tuned = every.where(~validation), every.where(validation)
    rate, quality_of = {}, {}
    for loss in LOSSES:
        tried = {lr: quality(options, tuned, base, images, loss, lr, 0) for lr in rates}
        rate[loss] = best = max(tried, key=tried.__getitem__)
        for size in sizes:
            quality_of[loss, size] = [
                quality(options, (every, unseen), size, images, loss, best, seed) for seed in seeds
            ]
    low, high = sizes[0], sizes[-1]
    gain = {loss: float(np.mean(quality_of[loss, high]) - np.mean(quality_of[loss, low])) for loss in LOSSES}
    noise = max(max(values) - min(values) for values in quality_of.values())
    numbers = {
        "rate": rate,
        **{loss: {str(size): showing.spread(quality_of[loss, size]) for size in sizes} for loss in LOSSES},
        f"gain from {low} to {high}": gain,
        "seeds": {"largest range of one setting": noise},
    }
    showing.save(options, "batch_use", draw(quality_of, sizes, gain), numbers, verdict(quality_of, sizes, gain))


def verdict(quality_of: Any, sizes: Sequence[int], gain: dict[str, float]) -> dict[str, bool]:
    parts = {}
    for loss in BATCHWISE:
        for other in TRIPLETS:
            text = f"{loss} gains more, or loses less, from the smallest to the largest batch than {other}"
            parts[text] = gain[loss] > gain[other]
    for loss in BATCHWISE:
        ahead = all(min(quality_of[loss, sizes[-1]]) > max(quality_of[other, sizes[-1]]) for other in TRIPLETS)
        parts[f"in the largest batch every seed of {loss} is above every seed of both triplets"] = ahead
    return parts


def draw(quality_of: Any, sizes: Sequence[int], gain: dict[str, float]) -> Any:
    figure, panels = showing.figure("What a larger batch gives, at the same number of pictures seen", (1, 2), (11, 4.6))
    showing.panel(panels[0], "MAP@R on unseen characters, mean and range of seeds", "pictures in a batch", "MAP@R")
    for loss, colour in INK.items():
        runs = np.array([quality_of[loss, size] for size in sizes]).T
        showing.band(panels[0], sizes, runs, colour, loss, marker="o")
    panels[0].set(xscale="log", xticks=sizes, xticklabels=sizes)
    panels[0].minorticks_off()
    showing.legend(panels[0], loc="best")
    showing.panel(panels[1], f"Change from batches of {sizes[0]} to {sizes[-1]}, any two seeds", "", "change of MAP@R")
    low, high = ([quality_of[loss, size] for loss in gain] for size in (sizes[0], sizes[-1]))
    mean = list(gain.values())
    ends = [(m - min(b) + max(a), max(b) - min(a) - m) for m, a, b in zip(mean, low, high, strict=True)]
    look = {"ecolor": showing.TEXT, "elinewidth": 1.2, "capsize": 3}
    ink = [INK[loss] for loss in gain]
    panels[1].bar(range(len(gain)), mean, 0.6, color=ink, yerr=np.array(ends).T, error_kw=look)
    panels[1].axhline(0, color=showing.SOFT, linewidth=1)
    panels[1].set(xticks=range(len(gain)), xticklabels=[name.replace(", ", ",\n") for name in gain])
    return figure


if __name__ == "__main__":
    main()
