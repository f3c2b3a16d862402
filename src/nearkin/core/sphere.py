"""How many dimensions unit vectors fill: those of the sphere whose uniform points have their mean squared cosine.

For u and v uniform on the unit sphere of n dimensions E<u, v>² = 1/n exactly: Σ_i E u_i² = 1, and by symmetry each of
the n directions has the same share, that of v too. The cosines of different pairs are pairwise independent, so a mean
over M pairs has a relative deviation of √(2 (n - 1) / ((n + 2) M)), below √(2 / M), whatever space the sphere lies in.
A squared cosine is at most 1: one near-duplicate among M pairs moves the mean by 1/M at most, where the likelihood of
the density of distances, whose statistic is log(1 - cos²), would let it decide alone.
"""

import torch
from torch import Tensor

__all__ = ["LEAST", "filled_dim", "mean_squared_cosine"]

LEAST = 2.0  # dimensions; of fewer there is no density of distances


def mean_squared_cosine(cosine: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of cos² over the pairs that count, (), and whether it is one: some pair counts, and all are finite."""
    number = counts.sum()
    mean = torch.where(counts, cosine.square(), 0.0).sum() / number.clamp(min=1)
    valid = (number > 0) & mean.isfinite()
    return torch.where(valid, mean, 0.5), valid


def filled_dim(mean: Tensor, most: float) -> Tensor:
    """1 / E cos² as a number of dimensions, (), between 2 and `most`."""
    return 1 / mean.clamp(min=1 / max(most, LEAST), max=1 / LEAST)
