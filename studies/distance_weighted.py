"""Claim 2: distance-weighted sampling spreads the chosen distances, lowers the gradient's variance, helps every loss.

    python studies/distance_weighted.py [--data FOLDER] [--device auto] [--quick] [--out FOLDER]

Omniglot, 121 characters to learn from and 121 never seen. Contrastive, triplet and margin loss, each with the same ways
to choose a negative for every positive: random, semi-hard, hardest, distance-weighted for the 128 dimensions of the
embedding, and, beside the claim, distance-weighted for as many as the embeddings really fill. Three measurements:

    distances  of the chosen negatives, on one network half way through a training: how wide is the middle 90 %
    variance   of the gradient by all weights, over batches at those same weights: the trace of its covariance over the
               squared length of its mean, so that a loss that is merely smaller gains nothing by it
    MAP@R      on the unseen characters; the learning rate of each pair of loss and choice is the better of two on
               characters that belong to neither part, then other seeds

Wu et al. 2017, arXiv:1706.07567.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ground
import numpy as np
import showing
import torch
from torch import Tensor, nn

from nearkin import losses, mining, relations
from nearkin.core import distances

DIM, STEPS, RATES, SEEDS, BATCHES = 128, 130, (1e-3, 5e-3), (1, 2), 64
SELECTIONS = {
    "random": "random",
    "semihard": "semi-hard",
    "hard": "hardest",
    "distance_weighted": "distance-weighted",
    "fitted": "distance-weighted, fitted dimension",
}
OTHERS = "random", "semihard", "hard"
CUTOFFS = {"contrastive": 1.0, "triplet": 1.4, "margin": 1.4}  # no loss beyond, as each has it by default
LOSSES: dict[str, Callable[[Any], nn.Module]] = {
    "contrastive": lambda selection: losses.ContrastiveLoss(1.0, normalize=True, selection=selection),
    "triplet": lambda selection: losses.TripletLoss(0.2, selection=selection),
    "margin": lambda selection: losses.MarginLoss(0.2, selection=selection),
}
INK = dict(
    zip(SELECTIONS, (showing.INK[9], showing.INK[2], showing.INK[3], showing.INK[0], showing.INK[5]), strict=True)
)


def loss_of(name: str, selection: str, fitted: int) -> nn.Module:
    """The loss with this selection; "fitted" supposes a sphere in as many dimensions as the embeddings really fill."""
    own = partial(mining.distance_weighted, dim=fitted, cutoff=CUTOFFS[name])
    return LOSSES[name](own if selection == "fitted" else selection)


def trained(
    options: ground.Options, part: ground.Part, places: Tensor, loss: nn.Module, lr: float, seed: int
) -> nn.Module:
    torch.manual_seed(seed)  # random selections use PyTorch's generator
    model = ground.encoder(options, part.size, DIM, seed)
    ground.train(model, loss, part, places, lr=lr)
    return model


@torch.no_grad()
def chosen(model: nn.Module, part: ground.Part, places: Tensor) -> tuple[dict[str, Any], int]:
    """Distances of the negatives that each selection picks, those of all negative pairs, and the fitted dimension.

    That is the dimension of the sphere on which uniform points would have the same mean squared cosine.
    """
    picked_distances: dict[str, list[Any]] = {name: [] for name in (*SELECTIONS, "all")}
    units = [distances.unit(model(part.images[batch])) for batch in places]
    all_relations = [relations.of(part.labels[batch]) for batch in places]
    squares = [(x @ x.T)[relation.negative].square().mean() for x, relation in zip(units, all_relations, strict=True)]
    fitted = max(2, round(1 / float(torch.stack(squares).mean())))
    for x, relation in zip(units, all_relations, strict=True):
        distance = distances.euclidean(x)
        picked_distances["all"].append(distance[relation.negative].cpu().numpy())
        for name in SELECTIONS:
            setting = ("distance_weighted", fitted) if name == "fitted" else (name, DIM)
            picked = mining.select(setting[0], distance, relation, dim=setting[1])
            assert isinstance(picked, mining.Triplets)
            anchor, _, negative = picked.indices()
            picked_distances[name].append(distance[anchor, negative].cpu().numpy())
    return {name: np.concatenate(parts) for name, parts in picked_distances.items()}, fitted


def noise(model: nn.Module, loss: nn.Module, part: ground.Part, places: Tensor) -> float:
    """Trace of the covariance of the gradient over batches / squared length of its mean, both without bias.

    A mean that is lost in the noise, whose unbiased square is 0 or less, is taken as a tenth of the measured one.
    """
    weights, loss = list(model.parameters()), loss.to(part.images.device)
    total, squares = torch.zeros((), device=part.images.device), torch.zeros((), device=part.images.device)
    for batch in places:
        value = loss(model(part.images[batch]), part.labels[batch])
        slope = torch.cat([g.flatten() for g in torch.autograd.grad(value, weights)])
        total, squares = total + slope, squares + slope.square().sum()
    count, mean = len(places), (total / len(places)).square().sum()
    variance = (squares / count - mean) * count / (count - 1)
    return float(variance / torch.maximum(mean - variance / count, mean / 10))


def main(argv: Sequence[str] | None = None) -> None:
    options = ground.options(__doc__, argv)
    every, unseen = ground.halves(ground.omniglot(options))
    steps, seeds, repeats, tries = (2, SEEDS[:1], 2, RATES[:1]) if options.quick else (STEPS, SEEDS, BATCHES, RATES)
    batch = (6, 4) if options.quick else (32, 4)
    validation_classes = every.classes // 4  # for choosing rates
    learn, check = (
        every.where(every.labels < every.classes - validation_classes),
        every.where(every.labels >= every.classes - validation_classes),
    )

    half = ground.encoder(options, every.size, DIM, seed=0)
    torch.manual_seed(0)
    ground.train(
        half, losses.MarginLoss(0.2, selection="random"), every, ground.balanced(every, *batch, steps), lr=1e-3
    )
    fresh = ground.balanced(every, *batch, repeats, seed=7)
    picked, fitted = chosen(half, every, fresh)
    unsteady = {n: {s: noise(half, loss_of(n, s, fitted), every, fresh) for s in SELECTIONS} for n in LOSSES}

    quality: dict[str, dict[str, list[float]]] = {name: {} for name in LOSSES}
    rates: dict[str, dict[str, float]] = {name: {} for name in LOSSES}
    for name in LOSSES:
        for selection in SELECTIONS:

            def run(parts: Sequence[ground.Part], lr: float, seed: int, loss: Any = (name, selection)) -> float:
                places = ground.balanced(parts[0], *batch, steps, seed)
                model = trained(options, parts[0], places, loss_of(*loss, fitted), lr, seed)
                return ground.scores(model, parts[1])["map@r"]

            tried = {lr: run((learn, check), lr, 0) for lr in tries}
            rates[name][selection] = best = max(tried, key=tried.__getitem__)
            quality[name][selection] = [run((every, unseen), best, seed) for seed in seeds]
    middle = {name: np.quantile(d, (0.05, 0.5, 0.95)) for name, d in picked.items()}
    numbers = {
        "fitted dimension": {"dimensions": fitted},
        "chosen distances": {n: {"5 %": q[0], "median": q[1], "95 %": q[2]} for n, q in middle.items()},
        "variance of the gradient over its squared mean": unsteady,
        "map@r": {n: {s: showing.spread(v) for s, v in q.items()} for n, q in quality.items()},
        "chosen rate": rates,
    }
    width = {name: q[2] - q[0] for name, q in middle.items()}
    figure = draw(picked, unsteady, quality)
    showing.save(options, "distance_weighted", figure, numbers, verdict(width, unsteady, quality))


def verdict(width: dict[str, float], unsteady: Any, quality: Any) -> dict[str, bool]:
    name_of_it = "distance_weighted"
    parts = {
        "the middle 90 % of its distances is wider than that of every other choice": (
            all(width[name_of_it] > width[other] for other in OTHERS)
        )
    }
    for name in LOSSES:
        lowest = all(unsteady[name][name_of_it] < unsteady[name][other] for other in OTHERS)
        parts[f"{name}: its gradient varies least, relative to its mean"] = lowest
    for name in LOSSES:
        best = all(np.mean(quality[name][name_of_it]) >= max(quality[name][other]) for other in OTHERS)
        parts[f"{name}: its mean MAP@R is at least the best seed of every other choice"] = bool(best)
    return parts


def draw(picked: Any, unsteady: Any, quality: Any) -> Any:
    title = "Which negatives are chosen, how steady the gradient is, what is learned"
    figure, panels = showing.figure(title, (1, 3), (14, 5))
    edges = np.linspace(0, 2, 61)
    showing.panel(panels[0], "Distances of the chosen negatives", "distance from anchor to negative", "density")
    panels[0].hist(picked["all"], edges, density=True, color=showing.RULE, label="all negative pairs")
    for name in SELECTIONS:
        style = "--" if name == "distance_weighted" else "-"  # it may lie on that of the hardest
        panels[0].hist(
            picked[name], edges, density=True, histtype="step", linewidth=2, color=INK[name], linestyle=style
        )
    panels[0].set(xlim=(0, 2))
    showing.legend(panels[0], loc="upper right")
    showing.panel(panels[1], "Variance of the gradient over its squared mean", "", "log scale; lower is steadier")
    showing.panel(panels[2], "MAP@R on unseen characters", "", "mean and range of seeds")
    bars = []
    for i, (selection, words) in enumerate(SELECTIONS.items()):
        xs = np.arange(len(LOSSES)) + (i - 2) * 0.17
        panels[1].bar(xs, [unsteady[name][selection] for name in LOSSES], 0.15, color=INK[selection])
        values = [quality[name][selection] for name in LOSSES]
        means = np.array([np.mean(v) for v in values])
        ends = np.array([[m - min(v), max(v) - m] for m, v in zip(means, values, strict=True)]).T
        look = {"ecolor": showing.TEXT, "elinewidth": 1.2}
        bars.append(panels[2].bar(xs, means, 0.15, yerr=ends, color=INK[selection], label=words, error_kw=look))
    panels[1].set_yscale("log")
    for axes in panels[1:]:
        axes.set(xticks=range(len(LOSSES)), xticklabels=list(LOSSES))
    figure.legend(handles=bars, loc="outside lower center", ncols=5, frameon=False, labelcolor=showing.TEXT)
    return figure


if __name__ == "__main__":
    main()
