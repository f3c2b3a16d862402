"""From the settings of a recipe to objects: encoder, augmentation, loss with its memory, sampler."""

import inspect
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from nearkin import models
from nearkin.core import checks
from nearkin.data import augment
from nearkin.memory import CrossBatchMemory
from nearkin.samplers import EpochSampler
from nearkin.training.config.recipe import Recipe
from nearkin.training.config.registry import LOSSES, SAMPLERS, Setting, accepts, settings_of
from nearkin.training.own_objects import NONE, Own, is_own

__all__ = ["augmentation_of", "build_loss", "build_sampler", "encoder_keys", "encoder_options", "encoder_settings"]
__all__ += ["loss_settings", "new_encoder", "sampler_settings", "takes_targets"]

_ENCODER_FILLED = {"name", "channels", "size", "features", "seed", "config"}  # by the data and other sections
_SECTIONS = {"channels": "data.", "size": "data.", "features": ""}  # where a recipe has them; others: [encoder]
_PER_CLASS = {"class-balanced": 0, "hard-classes": 0, "pair-per-class": 2}  # items per class; 0: sampler.per_class


# --- [encoder]


def encoder_keys(family: str) -> dict[str, Setting]:
    """The settings of an encoder that a recipe may have; `family` as `models.encoders` lists it."""
    known = {encoder.name: encoder for encoder in models.encoders()}
    checks.one_of("encoder", family, known)
    kinds = settings_of(models.build)
    settings = {
        key: Setting(key, kinds[key].kind if key in kinds else Any, default)
        for key, default in known[family].parameters.items()
        if key not in _ENCODER_FILLED
    }
    return settings | {key: Setting(key, bool, False) for key in ("freeze_backbone", "freeze_norms")}


def encoder_options(recipe: Recipe) -> dict[str, Any]:
    """The keys of [encoder] beside the name."""
    for key in sorted({"size", "channels"} & set(recipe.encoder)):
        raise ValueError(f'unknown key "encoder.{key}"; in a recipe it is "data.{key}"')
    return {key: value for key, value in recipe.encoder.items() if key != "name"}


def encoder_settings(recipe: Recipe) -> dict[str, Any]:
    """All settings of [encoder], typed, with defaults: those of `models.build`, and what to freeze."""
    name = str(recipe.encoder["name"])
    if is_own(name):
        return accepts("encoder", encoder_options(recipe), {}, f'encoder "{name}", which has its own')
    known = encoder_keys(f"{name.partition(':')[0]}:NAME" if name.startswith(("timm:", "hf:")) else name)
    typed = accepts("encoder", encoder_options(recipe), known, f'encoder "{name}"')
    return {key: setting.default for key, setting in known.items() if setting.default is not None} | typed


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


# --- [augment]


def augmentation_of(recipe: Recipe) -> augment.Augmentation | None:
    """The preset of [augment] with its other keys replaced; None for vectors."""
    if recipe.data.size is None:
        return None
    name = str(recipe.augment["preset"])
    checks.one_of("augment.preset", name, augment.PRESETS)
    options = {key: value for key, value in recipe.augment.items() if key != "preset"}
    typed = accepts("augment", options, settings_of(augment.Augmentation), "augment")
    try:
        return replace(augment.PRESETS[name], **typed)
    except ValueError as error:
        raise ValueError(f"augment.{error}") from None


# --- [loss] and [memory]


def takes_targets(recipe: Recipe) -> bool:
    """Whether the loss learns from continuous labels."""
    return recipe.loss.get("name") == "logratio" or recipe.loss.get("targets") is True  # the latter: own losses


def loss_settings(recipe: Recipe) -> dict[str, Any]:
    """The settings of [loss] for its class, typed."""
    options = {name: value for name, value in recipe.loss.items() if name != "name"}
    name = str(recipe.loss.get("name"))
    if is_own(name):
        known = {"targets": Setting("targets", bool, False)}
        return accepts("loss", options, known, f'loss "{name}", which has its own')
    checks.one_of("loss", name, LOSSES)
    if options.get("reduction") == "none":
        raise ValueError('loss.reduction must give one number to train on, got "none"')
    return accepts("loss", options, LOSSES[name].settings, f'loss "{name}"')


def build_loss(
    recipe: Recipe,
    classes: int | None,
    dim: int,
    seed: int,
    targets: int | None = None,
    items: int | None = None,
    own: Own = NONE,
) -> nn.Module:
    """The loss, its learned parameters drawn from `seed`, inside a cross-batch memory if the recipe has one.

    classes, items: how many the training part has. targets: width of a continuous label, where the loss takes these.
    """
    settings = loss_settings(recipe)
    if own.loss is not None:
        return _with_memory(own.loss, recipe, dim, targets)
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
    return _with_memory(loss, recipe, dim, targets)


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


# --- [sampler]


def sampler_settings(recipe: Recipe) -> dict[str, Any]:
    """The settings of [sampler] beside its name and the batch size, typed."""
    name = str(recipe.sampler.get("name"))
    checks.one_of("sampler", name, SAMPLERS)
    options = {key: value for key, value in recipe.sampler.items() if key not in ("name", "batch")}
    return accepts("sampler", options, SAMPLERS[name].settings, f'sampler "{name}"')


def build_sampler(
    recipe: Recipe, labels: NDArray[np.int64] | None, targets: NDArray[np.float64] | None
) -> EpochSampler:
    """The sampler over the training items, with `sampler.batch` items per batch."""
    settings, name = sampler_settings(recipe), str(recipe.sampler["name"])
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
