"""From names to things: the loss with its memory, and the sampler, as a recipe asks for them."""

import inspect
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from nearkin.core import checks
from nearkin.memory import CrossBatchMemory
from nearkin.samplers import EpochSampler
from nearkin.training.config.recipe import Recipe
from nearkin.training.config.registry import LOSSES, SAMPLERS, Setting, accepts
from nearkin.training.own_objects import NONE, Own, is_own

__all__ = ["build_loss", "build_sampler", "loss_settings", "sampler_settings", "takes_targets"]

_BATCHES = {"class-balanced": 0, "hard-classes": 0, "pair-per-class": 2}  # items a class; 0: the recipe's per_class


def takes_targets(recipe: Recipe) -> bool:
    """Whether the loss learns from continuous labels."""
    return recipe.loss.get("name") == "logratio" or recipe.loss.get("targets") is True  # the latter of an own loss


def loss_settings(recipe: Recipe) -> dict[str, Any]:
    """The settings of [loss] for its class, typed."""
    given = {name: value for name, value in recipe.loss.items() if name != "name"}
    name = str(recipe.loss.get("name"))
    if is_own(name):
        return accepts("loss", given, {"targets": Setting("targets", bool, False)}, f'loss "{name}", which has its own')
    checks.one_of("loss", name, LOSSES)
    if given.get("reduction") == "none":
        raise ValueError('loss.reduction must give one number to train on, got "none"')
    return accepts("loss", given, LOSSES[name].settings, f'loss "{name}"')


def build_loss(
    recipe: Recipe,
    classes: int | None,
    dim: int,
    seed: int,
    targets: int | None = None,
    items: int | None = None,
    own: Own = NONE,
) -> nn.Module:
    """The loss, its learned parameters drawn from `seed`, inside a cross-batch memory if the recipe wants one.

    classes, items: how many the training part has. targets: how many numbers a continuous label has, where the loss
    takes these.
    """
    settings = loss_settings(recipe)
    if own.loss is not None:
        return _remembering(own.loss, recipe, dim, targets) if recipe.memory.size else own.loss
    make = LOSSES[recipe.loss["name"]].make
    wanted = inspect.signature(make).parameters
    needed = "num_classes" in wanted and wanted["num_classes"].default is inspect.Parameter.empty
    if needed or settings.get("num_classes") == "all":
        settings["num_classes"] = classes
    elif isinstance(settings.get("num_classes"), str):
        raise ValueError(f'loss.num_classes must be a whole number, "all" or "none", got {settings["num_classes"]!r}')
    if settings.get("num_items") is not None:
        number = settings["num_items"]
        if number != "all" and (isinstance(number, str) or items is None or number < items):
            least = "" if items is None else f" of at least the {items} training items"
            raise ValueError(f'loss.num_items must be a whole number{least}, "all" or "none", got {number!r}')
        settings["num_items"] = items if number == "all" else number
    if "dim" in wanted:
        settings["dim"] = dim
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            loss: nn.Module = make(**settings)
        except (TypeError, ValueError) as error:
            raise type(error)(f"loss.{error}") from None
    return _remembering(loss, recipe, dim, targets) if recipe.memory.size else loss


def _remembering(loss: nn.Module, recipe: Recipe, dim: int, targets: int | None) -> nn.Module:
    try:
        checks.takes_references(loss)
    except TypeError:
        name = recipe.loss["name"]
        raise ValueError(f"memory.size needs a loss that takes references, as pair losses do, got {name}") from None
    more: dict[str, Any] = {"warmup": recipe.memory.warmup or 0}
    if targets is not None:
        more |= {"label_kind": "targets", "label_dim": targets if targets > 1 else None}
    return CrossBatchMemory(loss, recipe.memory.size, dim, **more)


def sampler_settings(recipe: Recipe) -> dict[str, Any]:
    """The settings of [sampler] beside its name and the size of a batch, typed."""
    name = str(recipe.sampler.get("name"))
    checks.one_of("sampler", name, SAMPLERS)
    given = {key: value for key, value in recipe.sampler.items() if key not in ("name", "batch")}
    return accepts("sampler", given, SAMPLERS[name].settings, f'sampler "{name}"')


def build_sampler(
    recipe: Recipe, labels: NDArray[np.int64] | None, targets: NDArray[np.float64] | None
) -> EpochSampler:
    """The sampler over the training items; `sampler.batch` items a batch."""
    settings, name = sampler_settings(recipe), str(recipe.sampler["name"])
    batch = recipe.sampler.get("batch")
    if not isinstance(batch, int) or isinstance(batch, bool) or batch < 2:
        raise ValueError(f"sampler.batch must be a whole number >= 2, got {batch!r}")
    settings |= {"seed": recipe.training.seed, "batches": recipe.training.batches}
    if name == "label-neighbours":
        if targets is None:
            raise ValueError('sampler "label-neighbours" needs continuous targets, the source has none')
        data: Any = targets
        settings["batch_size"] = batch
    else:
        if labels is None:
            raise ValueError(f'sampler "{name}" needs class labels, the source has none; use label-neighbours')
        data = labels
        if name in _BATCHES:
            each = _BATCHES[name] or settings.get("per_class", 4)
            if batch % each:
                raise ValueError(f"sampler.batch must be a multiple of the {each} items a class, got {batch}")
            settings["classes"] = batch // each
            classes = len(np.unique(labels))
            if settings["classes"] > classes:
                raise ValueError(
                    f"sampler.batch must hold at most all {classes} training classes, {each} items each: "
                    f"{classes * each}, got {batch}"
                )
        else:
            settings["batch_size"] = batch
    try:
        sampler: EpochSampler = SAMPLERS[name].make(data, **settings)
    except (TypeError, ValueError) as error:
        raise type(error)(f"sampler.{error}") from None
    return sampler
