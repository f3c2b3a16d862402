"""The ranges in which `nearkin compare` searches the settings of each loss.

Around the values of the papers and those of the search of Musgrave et al. 2020 (arXiv:2003.08505). A setting that
is not listed stays at its default. A loss whose own parameters learn (proxies, class weights, β) also has the rate of
these searched, `loss_scale`: how many times faster than the encoder.
"""

from typing import NamedTuple, TypeAlias

__all__ = ["RANGES", "Choices", "Range", "Searched"]


class Range(NamedTuple):
    """From `low` to `high`, both included; log: even in the exponent, for what spans powers of ten."""

    low: float
    high: float
    log: bool = False


class Choices(NamedTuple):
    """One of several names or numbers."""

    values: tuple[str | int | float, ...]


Searched: TypeAlias = Range | Choices

_TRIPLETS = Choices(("semihard", "batch_hard", "distance_weighted", "all"))
_WEIGHTS = Range(1.0, 100.0, log=True)  # how much faster than the encoder class weights learn
_PROXIES = Range(5.0, 1000.0, log=True)

# "loss_scale" is of the optimiser; every other key is an argument of the loss.
RANGES: dict[str, dict[str, Searched]] = {
    "adacos": {"loss_scale": _WEIGHTS},
    "adaface": {
        "margin": Range(0.05, 0.6),
        "scale": Range(8.0, 256.0, log=True),
        "concentration": Range(0.1, 1.0, log=True),
        "loss_scale": _WEIGHTS,
    },
    "arcface": {"margin": Range(0.05, 0.6), "scale": Range(8.0, 256.0, log=True), "loss_scale": _WEIGHTS},
    "center": {"pull": Range(1e-4, 0.1, log=True), "loss_scale": _WEIGHTS},
    "circle": {"margin": Range(0.1, 0.6), "scale": Range(8.0, 256.0, log=True)},
    "contrastive": {"margin": Range(0.3, 1.5), "positive_margin": Range(0.0, 0.5)},
    "cosface": {"margin": Range(0.02, 0.65), "scale": Range(8.0, 256.0, log=True), "loss_scale": _WEIGHTS},
    "facility-location": {"gamma": Range(0.05, 5.0, log=True)},
    "fastap": {"bins": Choices((5, 10, 20, 40))},
    "heated-softmax": {
        "scale": Range(8.0, 64.0, log=True),
        "heated_scale": Range(1.0, 16.0, log=True),
        "loss_scale": _WEIGHTS,
    },
    "infonce": {"temperature": Range(0.005, 0.5, log=True)},
    "lifted-structure": {"margin": Range(0.3, 2.0), "form": Choices(("smooth", "max"))},
    "logratio": {"epsilon": Range(1e-8, 1e-2, log=True)},
    "lossless-triplet": {"epsilon": Range(1e-8, 1e-2, log=True)},
    "magface": {
        "lower_margin": Range(0.05, 0.5),
        "upper_margin": Range(0.5, 1.0),
        "scale": Range(8.0, 256.0, log=True),
        "penalty": Range(3.0, 100.0, log=True),
        "loss_scale": _WEIGHTS,
    },
    "margin": {
        "margin": Range(0.05, 0.5),
        "beta": Range(0.6, 1.4),
        "selection": Choices(("distance_weighted", "all")),
        "loss_scale": _WEIGHTS,
    },
    "multi-similarity": {
        "alpha": Range(0.5, 20.0, log=True),
        "beta": Range(10.0, 100.0, log=True),
        "base": Range(0.2, 0.9),
        "epsilon": Range(0.02, 0.3),
    },
    "normalized-softmax": {"scale": Range(5.0, 100.0, log=True), "loss_scale": _WEIGHTS},
    "npair": {"penalty": Range(1e-4, 0.1, log=True)},
    "proxy-anchor": {"margin": Range(0.02, 0.5), "scale": Range(8.0, 64.0, log=True), "loss_scale": _PROXIES},
    "proxy-nca": {"scale": Range(1.0, 30.0, log=True), "loss_scale": _PROXIES},
    "quadruplet": {
        "margin": Range(0.02, 0.6),
        "second_margin": Range(0.01, 0.3),
        "selection": _TRIPLETS,
    },
    "siamese": {"loss_scale": _WEIGHTS},
    "sigmoid": {"log_scale": Range(1.0, 4.0), "bias": Range(-20.0, 0.0), "loss_scale": _WEIGHTS},
    "smooth-ap": {"temperature": Range(0.003, 0.1, log=True)},
    "soft-triple": {
        "margin": Range(0.001, 0.2, log=True),
        "scale": Range(8.0, 64.0, log=True),
        "gamma": Range(0.03, 0.5, log=True),
        "loss_scale": _PROXIES,
    },
    "sphereface": {"margin": Choices((2, 3, 4)), "floor": Range(1.0, 20.0, log=True), "loss_scale": _WEIGHTS},
    "supcon": {"temperature": Range(0.02, 0.5, log=True)},
    "triplet": {"margin": Range(0.02, 0.6), "selection": _TRIPLETS},
    "vicreg": {
        "invariance": Range(1.0, 100.0, log=True),
        "variance": Range(1.0, 100.0, log=True),
        "covariance": Range(0.1, 10.0, log=True),
    },
}
