"""Claim 13: negatives mined from the whole training set teach more than those that a random batch happens to hold.

    python studies/whole_set_negatives.py [--data FOLDER] [--device auto] [--quick] [--out FOLDER]

Reduced CUB as frozen features with a head, and glyphs with a small CNN. Batches of 128 in as many steps, by four
samplers:

    32 × 4      class-balanced
    64 × 2      class-balanced: as many positive pairs as the two below, or more
    mined       32 pairs, and the nearest negatives of each item in the whole set, mined anew four times in a run,
                without those nearer than s_ap - 0.05 |s_ap|
    unguarded   the same with those

each with a triplet loss and a loss with proxies, two seeds. The first fifth of every run has random negatives.
Moreira et al. 2024, arXiv:2407.15831, for the guard; Xiong et al. 2020, arXiv:2007.00808, for mining by the present
encoder during training.
"""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import ground
import numpy as np
import showing
import three_sets
from torch import Tensor, nn

from nearkin import losses, samplers

SEEDS, PARTS = (1, 2), 5  # of a run, with mining between them
SAMPLERS = {"32 × 4": "class-balanced 32 × 4", "64 × 2": "class-balanced 64 × 2"}
SAMPLERS |= {"mined": "mined, guard 0.05", "unguarded": "mined, no guard"}
LOSSES: dict[str, Callable[[int], nn.Module]] = {
    "triplet": lambda classes: losses.TripletLoss(0.2),
    "proxy-anchor": lambda classes: losses.ProxyAnchorLoss(classes, three_sets.DIM),
}


def sampler_of(name: str, steps: int, quick: bool) -> Callable[[Tensor, int], samplers.EpochSampler]:
    epoch = max(1, steps // PARTS)

    def make(labels: Tensor, seed: int) -> samplers.EpochSampler:
        if name in ("32 × 4", "64 × 2"):
            classes, each = (32, 4) if name == "32 × 4" else (64, 2)
            return samplers.ClassBalanced(labels, 6 if quick else classes, each, seed, batches=epoch)
        size = {"batch_size": 24 if quick else 128, "pairs": 6 if quick else 32, "neighbours": 32}
        guard = 0.05 if name == "mined" else None
        return samplers.HardNegatives(labels, seed=seed, guard=guard, batches=epoch, **size)

    return make


def main(argv: Sequence[str] | None = None) -> None:
    options = ground.options(__doc__, argv)
    seeds = SEEDS[:1] if options.quick else SEEDS
    kept = three_sets.Kept(options, "whole_set_negatives")
    sets = list(three_sets.load(options, ("cub", "glyphs")))
    scores: dict[str, Any] = {chosen.name: {n: {kind: [] for kind in SAMPLERS} for n in LOSSES} for chosen in sets}
    for name, chosen, seed, kind in product(LOSSES, sets, seeds, SAMPLERS):

        def measure(name: str = name, kind: str = kind, seed: int = seed, chosen: Any = chosen) -> float:
            loss = LOSSES[name](chosen.train.classes)
            return three_sets.run(chosen, loss, sampler_of(kind, chosen.steps, options.quick), seed)

        scores[chosen.name][name][kind].append(kept(f"{chosen.name}, {name}, {kind}, {seed}", measure))
    options = kept.done(options)
    numbers = {
        "map@r": {
            s: {n: {k: showing.spread(v) for k, v in q.items()} for n, q in p.items()} for s, p in scores.items()
        },
        "map@r of each seed": scores,
    }
    figure = three_sets.draw("Negatives of a random batch and of the whole training set", scores, SAMPLERS)
    showing.save(options, "whole_set_negatives", figure, numbers, verdict(scores))


def verdict(scores: dict[str, dict[str, dict[str, list[float]]]]) -> dict[str, bool]:
    parts = {}
    for set_name, of_loss in scores.items():
        for name, of_sampler in of_loss.items():
            mean = {kind: float(np.mean(values)) for kind, values in of_sampler.items()}
            better = mean["mined"] > max(mean["32 × 4"], mean["64 × 2"])
            parts[f"{set_name}, {name}: mined negatives are better than both class-balanced batches"] = better
    guard = [np.mean(k["mined"]) >= np.mean(k["unguarded"]) for p in scores.values() for k in p.values()]
    parts["the guard is no loss in any of these"] = all(guard)
    return parts


if __name__ == "__main__":
    main()
