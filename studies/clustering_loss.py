"""Claim 5: the facility-location loss gains NMI over pair losses; how many classes share a batch, C/m, matters.

    python studies/clustering_loss.py [--data FOLDER] [--device auto] [--quick] [--out FOLDER]

NMI of k-means with as many clusters as classes, on classes never seen in training: Omniglot, 121 characters and 121
others, and Fashion-MNIST, five classes and five others. The learning rate of each loss is the better of two on Omniglot
characters of neither part, and serves both sets. Then facility location and semi-hard triplets with m = 128 items of C
classes, C/m from 1/16 to 3/4, sampled as in the paper. All losses get the same batches, steps and encoder. The
untrained encoder is the baseline, since a loss may also score well by changing little.

Song et al. 2017, arXiv:1612.01213, whose claim is about classes of birds, cars and products.
"""

from collections.abc import Callable, Sequence
from typing import Any

import ground
import numpy as np
import showing
from torch import Tensor, nn

from nearkin import losses, samplers

STEPS, RATES, SEEDS, SIZE, RATIOS = 150, (1e-3, 5e-3), (1, 2, 3), 128, (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4)
OWN = "facility location"
LOSSES: dict[str, Callable[[], nn.Module]] = {
    "contrastive": lambda: losses.ContrastiveLoss(1.0, normalize=True),
    "triplet, semi-hard": lambda: losses.TripletLoss(0.2),
    "lifted": lambda: losses.LiftedStructureLoss(),
    "N-pair": lambda: losses.NPairLoss(),
    OWN: lambda: losses.FacilityLocationLoss(),
}
INK = dict(zip(LOSSES, (showing.INK[9], showing.INK[3], showing.INK[1], showing.INK[2], showing.INK[0]), strict=True))
SWEPT = "triplet, semi-hard", OWN


def quality(
    options: ground.Options, learn: ground.Part, judge: ground.Part, places: Tensor, loss: str, lr: float, seed: int
) -> dict[str, float]:
    model = ground.encoder(options, learn.size, seed=seed)
    ground.train(model, LOSSES[loss](), learn, places, lr=lr, clip=1.0)
    return ground.scores(model, judge, nmi=True)


def drawn(part: ground.Part, ratio: float, size: int, steps: int, seed: int) -> Tensor:
    """Batches of `size` items of ratio · size classes."""
    return ground.batches(samplers.ClassRatio(part.labels.cpu(), size, ratio, seed, batches=steps), part)


def main(argv: Sequence[str] | None = None) -> None:
    options = ground.options(__doc__, argv)
    rates, seeds, steps, size = (RATES[:1], SEEDS[:1], 2, 16) if options.quick else (RATES, SEEDS, STEPS, SIZE)
    ratios = RATIOS[2:4] if options.quick else RATIOS
    every, unseen = ground.halves(ground.omniglot(options))
    validation = every.labels >= every.classes - every.classes // 4  # for choosing rates
    learn, check = every.where(~validation), every.where(validation)
    train, test = ground.fashion(options)
    clothes, test_clothes = ground.halves(train)[0], ground.some(ground.halves(test)[1], 300)

    judged = {"Omniglot": unseen, "Fashion-MNIST": test_clothes}
    before = {
        name: [ground.scores(ground.encoder(options, part.size, seed=seed), part, nmi=True)["nmi"] for seed in seeds]
        for name, part in judged.items()
    }
    rate, runs_of = {}, {}
    for loss in LOSSES:
        places = drawn(learn, 0.25, size, steps, 0)
        tried = {lr: quality(options, learn, check, places, loss, lr, 0)["nmi"] for lr in rates}
        rate[loss] = max(tried, key=tried.__getitem__)
        for name, part, ratio in (("Omniglot", every, 0.25), ("Fashion-MNIST", clothes, clothes.classes / size)):
            runs_of[name, loss] = [
                quality(options, part, judged[name], drawn(part, ratio, size, steps, seed), loss, rate[loss], seed)
                for seed in seeds
            ]
    swept: dict[str, dict[float, list[float]]] = {}
    for loss in SWEPT:
        swept[loss] = {}
        for ratio in ratios:
            # The quarter has just been trained.
            trained = runs_of["Omniglot", loss][:2] if ratio == 0.25 else None
            swept[loss][ratio] = [
                run["nmi"]
                for run in trained
                or [
                    quality(options, every, unseen, drawn(every, ratio, size, steps, seed), loss, rate[loss], seed)
                    for seed in seeds[:2]
                ]
            ]
    numbers = {
        "rate": rate,
        **{f"{name}, untrained": {"nmi": showing.spread(values)} for name, values in before.items()},
        **{
            f"{name}, {loss}": {what: showing.spread(run[what] for run in runs) for what in ("nmi", "map@r")}
            for (name, loss), runs in runs_of.items()
        },
        **{f"C/m, {loss}": {f"{r:g}": showing.spread(v) for r, v in by.items()} for loss, by in swept.items()},
    }
    showing.save(options, "clustering_loss", draw(runs_of, swept, before), numbers, verdict(runs_of, swept, before))


def verdict(runs_of: Any, swept: Any, before: Any) -> dict[str, bool]:
    parts = {}
    for name in ("Omniglot", "Fashion-MNIST"):
        nmi = {loss: [run["nmi"] for run in runs_of[name, loss]] for loss in LOSSES}
        ahead = all(np.mean(nmi[OWN]) >= max(nmi[loss]) for loss in LOSSES if loss != OWN)
        parts[f"{name}: mean NMI of facility location is at least the best seed of every pair loss"] = bool(ahead)
        parts[f"{name}: every seed of it is above the untrained encoder"] = min(nmi[OWN]) > max(before[name])
        beaten = sum(float(np.mean(nmi[OWN])) > float(np.mean(nmi[loss])) for loss in LOSSES if loss != OWN)
        parts[f"{name}: it is above at least two of the four pair losses in the mean"] = beaten >= 2
    means = [float(np.mean(values)) for values in swept[OWN].values()]
    ranges = [max(values) - min(values) for values in swept[OWN].values()]
    text = "C/m matters to facility location: best and worst ratio differ by more than 0.02 NMI and than any two seeds"
    return parts | {text: max(means) - min(means) > max(0.02, *ranges)}


def draw(runs_of: Any, swept: Any, before: Any) -> Any:
    figure, panels = showing.figure("NMI on unseen classes: facility location and pair losses", (1, 3), (14, 4.6))
    for axes, name in zip(panels, ("Omniglot", "Fashion-MNIST"), strict=False):
        classes = "121 unseen characters" if name == "Omniglot" else "five unseen classes"
        showing.panel(axes, f"{name}, {classes}", "NMI, every seed and the mean", "")
        for y, (loss, colour) in enumerate(INK.items()):
            values = [run["nmi"] for run in runs_of[name, loss]]
            axes.plot(values, [y] * len(values), "o", color=colour, alpha=0.6, markersize=7, markeredgewidth=0)
            axes.plot([np.mean(values)] * 2, [y - 0.3, y + 0.3], color=colour, linewidth=2.5)
        axes.axvline(np.mean(before[name]), color=showing.SOFT, linestyle=":", linewidth=1.5, label="untrained")
        axes.set(yticks=range(len(INK)), yticklabels=list(INK), ylim=(len(INK) - 0.5, -0.5))
        axes.grid(axis="y", visible=False)
        axes.grid(axis="x", color=showing.RULE, linewidth=0.8)
    showing.legend(panels[0], loc="best")
    last = showing.panel(panels[2], "Omniglot: classes in a batch of 128", "C/m, classes over items of a batch", "NMI")
    for loss, by in swept.items():
        showing.band(last, list(by), np.array(list(by.values())).T, INK[loss], loss, marker="o")
    ratios = list(next(iter(swept.values())))
    names = {1 / 16: "1/16", 1 / 8: "1/8", 1 / 4: "1/4", 1 / 2: "1/2", 3 / 4: "3/4"}
    last.set_xscale("log")
    last.set(xticks=ratios, xticklabels=[names[ratio] for ratio in ratios])
    last.minorticks_off()
    showing.legend(last, loc="best")
    return figure


if __name__ == "__main__":
    main()
