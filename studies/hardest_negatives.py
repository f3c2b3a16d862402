"""Claim 1: triplets with the hardest negatives collapse where semi-hard ones do not.

    python studies/hardest_negatives.py [--data FOLDER] [--device auto] [--quick] [--out FOLDER]

The triplet loss on unit embeddings, every positive with its anchor's hardest or its semi-hard negative, all else equal:
Fashion-MNIST and Omniglot, squared distances (as FaceNet) and plain ones, several margins and learning rates. Collapse
shows in two numbers: all embeddings move to one point, and the loss stays at the margin, its value when all distances
are 0. MAP@R is that of the test pictures of Fashion-MNIST and of Omniglot's unseen half.

A run falls if at some time its distances, mean over a batch, are below a third of what they were before the first
step while its loss is at 90 % of the margin or above; it is stuck if that is so in the mean of its last tenth.
"""

from collections.abc import Sequence
from typing import Any

import ground
import showing
import torch
from torch.nn.functional import normalize

from nearkin import losses

STEPS = 250
SETTINGS = {  # margin, learning rate, seeds
    "margin 0.2, rate 1e-3": (0.2, 1e-3, (0, 1)),
    "margin 0.2, rate 1e-4": (0.2, 1e-4, (0,)),
    "margin 0.5, rate 1e-3": (0.5, 1e-3, (0,)),
}
SELECTIONS = {"hard": "hardest negative", "semihard": "semi-hard negative"}
FORMS = {"squared": True, "plain": False}


def run(
    options: ground.Options, parts: Any, batch: tuple[int, int], steps: int, loss: Any, lr: float, seed: int
) -> dict[str, Any]:
    """Loss over margin and mean distance of the batch, every few steps, and the outcome."""
    seen, judge = parts
    shown: list[torch.Tensor] = []

    def record(step: int, value: torch.Tensor, embeddings: torch.Tensor) -> None:
        apart = torch.pdist(normalize(embeddings, dim=1)).mean()
        shown.append(torch.stack([torch.tensor(float(step), device=value.device), value, apart]))

    model = ground.encoder(options, seen.size, seed=seed)
    places = ground.balanced(seen, *batch, steps, seed)
    ground.train(model, loss, seen, places, lr=lr, decay=False, callback=record, every=max(1, steps // 50))
    at, value, apart = torch.stack(shown).T.cpu()
    value = value / loss.settings["margin"]
    down = (apart < apart[0] / 3) & (value >= 0.9)
    late = slice(-max(1, len(at) // 10), None)
    stuck = bool(apart[late].mean() < apart[0] / 3 and value[late].mean() >= 0.9)
    curve = {"step": at.tolist(), "loss": value.tolist(), "distance": apart.tolist()}
    return {"fell": bool(down.any()), "stuck": stuck, **ground.scores(model, judge), "curve": curve}


def main(argv: Sequence[str] | None = None) -> None:
    options = ground.options(__doc__, argv)
    train, test = ground.fashion(options)
    sets = {
        "Fashion-MNIST": ((train, ground.some(test, 300)), (10, 3) if options.quick else (10, 12)),
        "Omniglot": (ground.halves(ground.omniglot(options)), (12, 4) if options.quick else (32, 4)),
    }
    steps = 2 if options.quick else STEPS
    runs = {}
    for name, (parts, batch) in sets.items():
        for form, squared in FORMS.items():
            for setting, (margin, lr, seeds) in list(SETTINGS.items())[: 1 if options.quick else None]:
                for seed in seeds[: 1 if options.quick else None]:
                    for selection in SELECTIONS:
                        loss = losses.TripletLoss(margin, squared=squared, selection=selection)
                        outcome = run(options, parts, batch, steps, loss, lr, seed)
                        runs[name, form, setting, seed, selection] = outcome
    showing.save(options, "hardest_negatives", draw(runs), numbers(runs), verdict(runs))


def share(runs: dict[Any, Any], what: str, *words: str) -> float:
    """The mean over the runs whose description has all these words."""
    values = [outcome[what] for key, outcome in runs.items() if set(words) <= set(key)]
    return sum(map(float, values)) / len(values)


def numbers(runs: dict[Any, Any]) -> dict[str, Any]:
    shares = {
        f"{selection}, {form}": {
            "fell": share(runs, "fell", selection, form),
            "stuck": share(runs, "stuck", selection, form),
            **{f"map@r {name}": share(runs, "map@r", selection, form, name) for name in ("Fashion-MNIST", "Omniglot")},
        }
        for selection in SELECTIONS
        for form in FORMS
    }
    return {"in all": shares, "runs": {", ".join(map(str, key)): outcome for key, outcome in runs.items()}}


def verdict(runs: dict[Any, Any]) -> dict[str, bool]:
    worse = [
        outcome["map@r"] < runs[(*key[:-1], "semihard")]["map@r"] for key, outcome in runs.items() if "hard" in key
    ]
    return {
        "hardest negatives fall into one point in at least 3 of 4 runs": share(runs, "fell", "hard") >= 0.75,
        "semi-hard negatives do so in no run": share(runs, "fell", "semihard") == 0,
        "with hardest negatives and squared distances at least 3 of 4 runs are stuck there at the end": (
            share(runs, "stuck", "hard", "squared") >= 0.75
        ),
        "and with plain distances as well": share(runs, "stuck", "hard", "plain") >= 0.75,
        "hardest negatives end with the lower MAP@R in every pair of runs": all(worse),
    }


def draw(runs: dict[Any, Any]) -> Any:
    figure, panels = showing.figure(
        f"Do embeddings come together in one point? Lines: {next(iter(SETTINGS))}, two seeds; dots: every run",
        (2, 3),
        (13, 7.2),
    )
    colours = {"hard": showing.INK[3], "semihard": showing.INK[0]}
    styles = {"squared": "-", "plain": (0, (4, 2))}
    main_setting = next(iter(SETTINGS))
    for row, name in zip(panels, ("Fashion-MNIST", "Omniglot"), strict=True):
        showing.panel(row[0], f"{name}: distance between embeddings", "step", "mean over the batch")
        showing.panel(row[1], f"{name}: loss over margin (1 = one point)", "step", "loss / margin")
        showing.panel(row[2], f"{name}: MAP@R at the end, every run", "", "MAP@R")
        for selection, words in SELECTIONS.items():
            for form, style in styles.items():
                chosen = [r["curve"] for k, r in runs.items() if {name, form, main_setting, selection} <= set(k)]
                for axes, what in zip(row[:2], ("distance", "loss"), strict=True):
                    ys = [curve[what] for curve in chosen]
                    label = f"{words}, {form}"
                    showing.band(axes, chosen[0]["step"], ys, colours[selection], label, linestyle=style)
        row[1].axhline(1, color=showing.SOFT, linewidth=1)
        row[0].set_ylim(0, 1.5)
        row[1].set_ylim(0, 1.8)
        places = [(s, f) for s in SELECTIONS for f in FORMS]
        for x, (selection, form) in enumerate(places):
            chosen = [r["map@r"] for k, r in runs.items() if {name, form, selection} <= set(k)]
            shift = [x + 0.08 * (i - (len(chosen) - 1) / 2) for i in range(len(chosen))]
            row[2].plot(shift, chosen, "o", color=colours[selection], alpha=0.8, markeredgewidth=0)
        labels = [f"{'hardest' if s == 'hard' else 'semi-hard'}\n{f}" for s, f in places]
        row[2].set(xticks=range(4), xticklabels=labels, ylim=(0, 1.1 * row[2].get_ylim()[1]), xlim=(-0.6, 3.6))
    showing.legend(panels[0][1], loc="upper right")
    return figure


if __name__ == "__main__":
    main()
