"""Claim 14: distance-weighted sampling does better when it is told the dimension that the data fill.

    python studies/fitted_dimension.py [--data FOLDER] [--device auto] [--quick] [--out FOLDER]

Reduced CUB as frozen features with a head, glyphs and Omniglot with a small CNN; 128 dimensions; batches of 32 × 4. The
contrastive, triplet and margin loss, each with distance-weighted sampling for the 128 dimensions of the vector and for
those that the embeddings fill, estimated from the batches (`sampling_dim="fitted"`). The rate of each pair of loss and
choice is the better of two by classes that belong to neither part; then other seeds, in as many steps.

The fitted dimension becomes the default if it wins on all three sets with the margin loss, whose default selection this
is: a higher mean MAP@R on the unseen classes. Wu et al. 2017, arXiv:1706.07567.
"""

from collections.abc import Callable, Sequence
from typing import Any

import ground
import numpy as np
import showing
import three_sets
from torch import Tensor, nn

from nearkin import losses, samplers

SEEDS = 1, 2
RATES = {"reduced CUB, frozen features": (3e-4, 1e-3), "glyphs": (1e-3, 5e-3), "Omniglot": (1e-3, 5e-3)}
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
    scores: dict[str, dict[str, dict[str, list[float]]]] = {}
    rates: dict[str, Any] = {}
    dims: dict[str, dict[str, list[float]]] = {}

    def balanced(labels: Tensor, seed: int) -> samplers.EpochSampler:
        return samplers.ClassBalanced(labels, 6 if options.quick else 32, 4, seed)

    for chosen in three_sets.load(options):
        scores[chosen.name], rates[chosen.name], dims[chosen.name] = {}, {}, {}
        tries, seeds = (RATES[chosen.name][:1], SEEDS[:1]) if options.quick else (RATES[chosen.name], SEEDS)
        for name, make in LOSSES.items():
            scores[chosen.name][name], rates[chosen.name][name] = {}, {}
            made: list[nn.Module] = []
            for choice in CHOICES:

                def loss(of: three_sets.Set, whole: bool, make: Any = make, choice: str = choice) -> nn.Module:
                    made.append(make(None if choice == "own" else "fitted"))  # noqa: B023
                    return made[-1]  # noqa: B023

                best, values = three_sets.best_of(chosen, loss, balanced, tries, seeds)
                scores[chosen.name][name][choice], rates[chosen.name][name][choice] = values, best
            dims[chosen.name][name] = [filled(loss) for loss in made[-len(seeds) :]]
    numbers = {
        "map@r": {
            s: {n: {k: showing.spread(v) for k, v in q.items()} for n, q in p.items()} for s, p in scores.items()
        },
        "map@r of each seed": scores,
        "fitted dimension at the end": dims,
        "chosen rate": rates,
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
