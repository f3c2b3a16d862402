"""Claim 14: distance-weighted sampling does better when it is told the dimension that the data fill.

    python studies/fitted_dimension.py [--data FOLDER] [--device auto] [--quick] [--out FOLDER]

Reduced CUB as frozen features with a head, glyphs and Omniglot with a small CNN; 128 dimensions; batches of 32 × 4. The
margin loss, on Omniglot also the contrastive and the triplet loss, with distance-weighted sampling for the 128
dimensions of the vector and for those that the embeddings fill, estimated from the batches (`sampling_dim="fitted"`);
two seeds, as many steps.

The fitted dimension becomes the default if it wins on all three sets with the margin loss, whose default selection this
is: a higher mean MAP@R on the unseen classes. Wu et al. 2017, arXiv:1706.07567.
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

SEEDS = 1, 2
CHOICES = {"own": "the vector's own 128 dimensions", "fitted": "fitted to the batches"}
LOSSES: dict[str, Callable[[Any], nn.Module]] = {
    "contrastive": lambda dim: losses.ContrastiveLoss(
        1.0, normalize=True, selection="distance_weighted", sampling_dim=dim
    ),
    "triplet": lambda dim: losses.TripletLoss(0.2, selection="distance_weighted", sampling_dim=dim),
    "margin": lambda dim: losses.MarginLoss(0.2, sampling_dim=dim),
}


def main(argv: Sequence[str] | None = None) -> None:
    options = ground.options(__doc__, argv)
    seeds = SEEDS[:1] if options.quick else SEEDS
    scores: dict[str, dict[str, dict[str, list[float]]]] = {}
    dims: dict[str, dict[str, list[float]]] = {}

    def balanced(labels: Tensor, seed: int) -> samplers.EpochSampler:
        return samplers.ClassBalanced(labels, 6 if options.quick else 32, 4, seed)

    kept = three_sets.Kept(options, "fitted_dimension")
    for chosen in three_sets.load(options):
        names = LOSSES if chosen.name == "Omniglot" else ("margin",)
        scores[chosen.name] = {name: {choice: [] for choice in CHOICES} for name in names}
        dims[chosen.name] = {name: [] for name in names}
        for name, choice, seed in product(names, CHOICES, seeds):

            def measure(name: str = name, choice: str = choice, seed: int = seed, chosen: Any = chosen) -> Any:
                loss = LOSSES[name](None if choice == "own" else "fitted")
                score = three_sets.run(chosen, loss, balanced, seed)
                return score, filled(loss) if choice == "fitted" else None

            score, dim = kept(f"{chosen.name}, {name}, {choice}, {seed}", measure)
            scores[chosen.name][name][choice].append(score)
            dims[chosen.name][name] += [] if dim is None else [dim]
    options = kept.done(options)
    numbers = {
        "map@r": {
            s: {n: {k: showing.spread(v) for k, v in q.items()} for n, q in p.items()} for s, p in scores.items()
        },
        "map@r of each seed": scores,
        "fitted dimension at the end": dims,
    }
    figure = three_sets.draw("Distance-weighted sampling by two dimensions", scores, CHOICES)
    showing.save(options, "fitted_dimension", figure, numbers, verdict(scores))


def filled(loss: nn.Module) -> float:
    """The dimension that a loss has fitted at the end."""
    total, weight = loss.running_dim.moments.tolist()  # type: ignore[union-attr, operator]
    return float(weight / total)


def verdict(scores: dict[str, dict[str, dict[str, list[float]]]]) -> dict[str, bool]:
    return {
        f"{set_name}, {name}: the fitted dimension has the higher mean MAP@R": bool(
            np.mean(of_choice["fitted"]) > np.mean(of_choice["own"])
        )
        for set_name, of_loss in scores.items()
        for name, of_choice in of_loss.items()
    }


if __name__ == "__main__":
    main()
