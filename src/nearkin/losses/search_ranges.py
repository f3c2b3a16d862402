"""The ranges in which `nearkin compare` searches the settings of each loss.

Around the values of the papers and those of the search of Musgrave et al. 2020 (arXiv:2003.08505). A setting that
is not listed stays at its default. A loss whose own parameters learn (proxies, class weights, β) also has the rate of
these searched, `loss_scale`: how many times faster than the encoder.
"""

from typing import Any

from nearkin.losses.settings import Choices, Loss, Range, Searched

__all__ = ["RANGES", "ranges_of"]

_WEIGHTS = Range(1.0, 100.0, log=True)  # how much faster than the encoder class weights learn
_PROXIES = Range(5.0, 1000.0, log=True)

# Of losses over class weights; the others state theirs. "loss_scale" is of the optimiser, the rest arguments.
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
    "cosface": {"margin": Range(0.02, 0.65), "scale": Range(8.0, 256.0, log=True), "loss_scale": _WEIGHTS},
    "heated-softmax": {
        "scale": Range(8.0, 64.0, log=True),
        "heated_scale": Range(1.0, 16.0, log=True),
        "loss_scale": _WEIGHTS,
    },
    "magface": {
        "lower_margin": Range(0.05, 0.5),
        "upper_margin": Range(0.5, 1.0),
        "scale": Range(8.0, 256.0, log=True),
        "penalty": Range(3.0, 100.0, log=True),
        "loss_scale": _WEIGHTS,
    },
    "normalized-softmax": {"scale": Range(5.0, 100.0, log=True), "loss_scale": _WEIGHTS},
    "proxy-anchor": {"margin": Range(0.02, 0.5), "scale": Range(8.0, 64.0, log=True), "loss_scale": _PROXIES},
    "proxy-nca": {"scale": Range(1.0, 30.0, log=True), "loss_scale": _PROXIES},
    "soft-triple": {
        "margin": Range(0.001, 0.2, log=True),
        "scale": Range(8.0, 64.0, log=True),
        "gamma": Range(0.03, 0.5, log=True),
        "loss_scale": _PROXIES,
    },
    "sphereface": {"margin": Choices((2, 3, 4)), "floor": Range(1.0, 20.0, log=True), "loss_scale": _WEIGHTS},
}


def ranges_of(name: str, loss: Any) -> dict[str, Searched]:
    """What is searched of a loss, by its name in a recipe and its class: settings, and "loss_scale"."""
    if not issubclass(loss, Loss):
        return RANGES[name]
    ranges = {key: s.search for key, s in loss.fields.items() if s.search is not None}
    return ranges if loss.search_rate is None else ranges | {"loss_scale": loss.search_rate}
