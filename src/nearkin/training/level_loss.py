"""The levels of a recipe: which labels its loss learns from, and the loss summed over them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from nearkin.data.item_set import Items
from nearkin.losses import HierarchyLoss
from nearkin.training.build import build_loss
from nearkin.training.config.recipe import Recipe, no_effect

__all__ = ["check_levels", "loss_of_levels", "training_labels"]

_STEP = 0x9E3779B97F4A7C15  # between the seeds of two levels: none is a seed that a user would choose


def check_levels(recipe: Recipe, items: Items) -> None:
    """Refuses weights that do not fit the levels of the items, or the loss."""
    weights, levels = recipe.levels.weights, items.levels
    if weights is None:
        return
    if not levels:
        no_effect("levels.weights", "data.levels names no level")
    if len(weights) != 1 + len(levels):
        names = ", ".join(["the classes", *(level.name for level in levels)])
        raise ValueError(
            f"levels.weights must be {1 + len(levels)} numbers, of {names}, the finest first, got {len(weights)}"
        )
    if weights[0] == 0:
        raise ValueError("levels.weights must be > 0 for the classes themselves, which come first, got 0")
    if not any(weights[1:]):
        no_effect("levels.weights", "only the classes themselves have a weight")
    if recipe.is_own("loss"):
        raise ValueError("levels.weights need a loss by its name, got one of your own; use losses.HierarchyLoss")
    if recipe.takes_targets:
        no_effect("levels.weights", f"loss {recipe.loss['name']} learns from continuous targets")
    if recipe.loss.get("shard"):
        raise ValueError("loss.shard must be false with levels.weights: the classes of one level are few")


def training_labels(recipe: Recipe, items: Items, train: NDArray[np.int64]) -> NDArray[np.int64]:
    """Class ids from 0 of the training items at the levels that have a weight, (n, L), the finest first."""
    assert items.labels is not None and recipe.levels.weights is not None
    kinds = items.labels[train]
    columns = [kinds, *(level.of_class[kinds] for level in items.levels)]
    chosen = [column for column, weight in zip(columns, recipe.levels.weights, strict=True) if weight]
    ids = [np.unique(column, return_inverse=True)[1].astype(np.int64) for column in chosen]
    return np.stack(ids, axis=1)


def loss_of_levels(recipe: Recipe, labels: NDArray[np.int64], dim: int, seed: int, **options: Any) -> nn.Module:
    """The loss of each level, with the class weights or memory of its own, summed; labels as `training_labels`.

    The finest level starts from the weights that it has without the others. options: those of `build_loss`.
    """
    weights: Sequence[float] = [weight for weight in recipe.levels.weights or () if weight]
    modules = [
        build_loss(recipe, int(column.max()) + 1, dim, (seed + level * _STEP) % 2**63, **options)
        for level, column in enumerate(labels.T)
    ]
    return HierarchyLoss(modules, weights)
