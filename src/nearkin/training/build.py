"""From a settled recipe to objects: encoder, loss with its memory, sampler."""

import inspect
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from nearkin import losses, models
from nearkin.core import checks
from nearkin.memory import CrossBatchMemory
from nearkin.samplers import EpochSampler
from nearkin.training.config.defaults import FREE_LENGTH
from nearkin.training.config.recipe import Recipe
from nearkin.training.config.registry import (
    LOSSES,
    SAMPLERS,
    encoder_settings,
    loss_settings,
    matryoshka_dims,
    matryoshka_weights,
    sampler_settings,
)
from nearkin.training.own_objects import NONE, Own

__all__ = ["adapted", "build_loss", "build_sampler", "new_encoder"]

_SECTIONS = {"channels": "data.", "size": "data.", "features": ""}  # where a recipe has them; others: [encoder]
_PER_CLASS = {"class-balanced": 0, "hard-classes": 0, "pair-per-class": 2}  # items per class; 0: sampler.per_class


def new_encoder(recipe: Recipe, shape: tuple[int, ...] | None, own: Own = NONE) -> models.Encoder:
    """The encoder of a settled recipe, before it has seen an item. shape: of an item, None for stored images."""
    if own.wrapped is not None:
        return own.wrapped
    settings = encoder_settings(recipe)
    backbone, norms = settings.pop("freeze_backbone", False), settings.pop("freeze_norms", False)
    if shape is None:
        settings |= {"channels": recipe.data.channels, "size": recipe.data.size}
    elif len(shape) == 1:
        settings["features"] = int(shape[0])
    elif len(shape) == 3 and shape[1] == shape[2]:
        settings |= {"channels": int(shape[0]), "size": int(shape[1])}
    else:
        raise ValueError(
            f"items of shape {shape} need an encoder of your own; ours take (F,) or (channels, side, side)"
        )
    try:
        encoder = models.build(recipe.encoder["name"], seed=recipe.training.seed, **settings)
    except ValueError as error:
        key = str(error).partition(" must be ")[0]
        raise ValueError(f"{_SECTIONS.get(key, 'encoder.') if key in settings else ''}{error}") from None
    encoder.freeze_backbone(backbone)
    encoder.freeze_norms(norms)
    return encoder


def adapted(recipe: Recipe, encoder: models.Encoder) -> models.Encoder:
    """The encoder as it is trained: with LoRA layers, in place, if the recipe asks for them."""
    options = recipe.finetune
    if options.train != "lora":
        return encoder
    assert options.lora_rank and options.lora_alpha and options.lora_layers
    try:
        return models.add_lora(
            encoder, options.lora_rank, options.lora_alpha, options.lora_layers, seed=recipe.training.seed
        )
    except ValueError as error:
        raise ValueError(f"finetune.lora_{error}") from None


def build_loss(
    recipe: Recipe,
    classes: int | None,
    dim: int,
    seed: int,
    targets: int | None = None,
    items: int | None = None,
    own: Own = NONE,
) -> nn.Module:
    """The loss, its learned parameters drawn from `seed`, of several lengths and inside a cross-batch memory if the
    recipe says so.

    classes, items: how many the training part has. targets: width of a continuous label, where the loss takes these.
    """
    settings = loss_settings(recipe)
    if own.loss is not None:
        return _with_memory(_of_lengths(own.loss, recipe, dim), recipe, dim, targets)
    make = LOSSES[recipe.loss["name"]].make
    parameters = inspect.signature(make).parameters
    required = "num_classes" in parameters and parameters["num_classes"].default is inspect.Parameter.empty
    if required or settings.get("num_classes") == "all":
        settings["num_classes"] = classes
    elif isinstance(settings.get("num_classes"), str):
        raise ValueError(f'loss.num_classes must be a whole number, "all" or "none", got {settings["num_classes"]!r}')
    if settings.get("num_items") is not None:
        number = settings["num_items"]
        if number != "all" and (isinstance(number, str) or items is None or number < items):
            least = "" if items is None else f" of at least the {items} training items"
            raise ValueError(f'loss.num_items must be a whole number{least}, "all" or "none", got {number!r}')
        settings["num_items"] = items if number == "all" else number
    if "dim" in parameters:
        settings["dim"] = dim
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            loss: nn.Module = make(**settings)
        except (TypeError, ValueError) as error:
            raise type(error)(f"loss.{error}") from None
    return _with_memory(_of_lengths(loss, recipe, dim), recipe, dim, targets)


def _of_lengths(loss: nn.Module, recipe: Recipe, dim: int) -> nn.Module:
    """The loss of each length of `loss.matryoshka`, scaled to unit length where the embeddings are."""
    dims = matryoshka_dims(recipe, dim)
    if dims is None:
        return loss
    normalize = bool(recipe.encoder.get("normalize", recipe.loss["name"] not in FREE_LENGTH))
    try:
        return losses.MatryoshkaLoss(loss, dims, matryoshka_weights(recipe, dims), normalize=normalize)
    except (TypeError, ValueError) as error:
        raise type(error)(f"loss.matryoshka_{error}" if str(error).startswith("weights") else str(error)) from None


def _with_memory(loss: nn.Module, recipe: Recipe, dim: int, targets: int | None) -> nn.Module:
    if not recipe.memory.size:
        return loss
    try:
        checks.takes_references(loss)
    except TypeError:
        name = recipe.loss["name"]
        raise ValueError(f"memory.size needs a loss that takes references, as pair losses do, got {name}") from None
    options: dict[str, Any] = {"warmup": recipe.memory.warmup or 0}
    if targets is not None:
        options |= {"label_kind": "targets", "label_dim": targets if targets > 1 else None}
    return CrossBatchMemory(loss, recipe.memory.size, dim, **options)


def build_sampler(
    recipe: Recipe,
    labels: NDArray[np.int64] | None,
    targets: NDArray[np.float64] | None,
    groups: NDArray[np.int64] | None = None,
) -> EpochSampler:
    """The sampler over the training items, with `sampler.batch` items per batch; groups: of the items, or None."""
    settings, name = sampler_settings(recipe), str(recipe.sampler["name"])
    every = settings.pop("every", 1)  # the trainer's
    if every < 1:
        raise ValueError(f"sampler.every must be >= 1, got {every}")
    batch = recipe.sampler.get("batch")
    if not isinstance(batch, int) or isinstance(batch, bool) or batch < 2:
        raise ValueError(f"sampler.batch must be a whole number >= 2, got {batch!r}")
    settings |= {"seed": recipe.training.seed, "batches": recipe.training.batches}
    if name == "label-neighbours" and targets is None:
        raise ValueError('sampler "label-neighbours" needs continuous targets, the source has none')
    if name != "label-neighbours" and labels is None:
        raise ValueError(f'sampler "{name}" needs class labels, the source has none; use label-neighbours')
    if labels is not None and name in _PER_CLASS:
        settings["classes"] = _classes_per_batch(batch, _PER_CLASS[name] or settings.get("per_class", 4), labels)
    else:
        settings["batch_size"] = batch
    if settings.pop("groups", False):
        if groups is None:
            raise ValueError("sampler.groups needs groups, the source has none; see data.group_pattern")
        settings["groups"] = groups
    try:
        sampler: EpochSampler = SAMPLERS[name].make(targets if name == "label-neighbours" else labels, **settings)
    except (TypeError, ValueError) as error:
        raise type(error)(f"sampler.{error}") from None
    return sampler


def _classes_per_batch(batch: int, per_class: int, labels: NDArray[np.int64]) -> int:
    if batch % per_class:
        raise ValueError(f"sampler.batch must be a multiple of the {per_class} items per class, got {batch}")
    classes = len(np.unique(labels))
    if batch // per_class > classes:
        raise ValueError(
            f"sampler.batch must hold at most all {classes} training classes, {per_class} items each: "
            f"{classes * per_class}, got {batch}"
        )
    return batch // per_class
