"""Settles [unlabelled]: what a pretraining on pictures without labels leaves open, and what would have no effect."""

from dataclasses import replace
from typing import Any

from nearkin.core import checks
from nearkin.data import augment
from nearkin.data.item_set import Items
from nearkin.training.config.recipe import KEYS, Recipe, no_effect
from nearkin.training.config.registry import augmentation_of

__all__ = ["check_unlabelled", "settle_unlabelled", "stage_recipe", "view_augmentation", "without_labels"]

_OF = {"temperature": "infonce", "queue": "infonce"} | dict.fromkeys(("invariance", "variance", "covariance"), "vicreg")
METHOD = "vicreg"  # what gained more on glyphs, the only set of two that gained: docs/measured/training.md
_QUEUE = 4096
_DEFAULTS = {"temperature": 0.2, "queue": _QUEUE, "invariance": 25.0, "variance": 25.0, "covariance": 1.0}
_PROJECTORS = {"infonce": [512, 128], "vicreg": [1024, 1024]}
_STEPS, _LEAST, _MOST = 1500, 5, 200  # steps of a pretraining on a GPU, about, and the bounds of its epochs
_PRETRAINED_RATE = 0.2  # of the training's, for weights that have learned already; better by validation on birds
_CPU_STEPS = {False: 1000, True: 300}  # of an encoder without, and with, pretrained weights
# What has an effect in a run that ends with its pretraining; sections that are not named here have one as a whole.
_ALONE: dict[str, set[str]] = {
    "loss": set(),
    "compatible": set(),
    "levels": set(),
    "memory": set(),
    "sampler": set(),
    "evaluation": set(),
}
# What a saved recipe has written out, of keys that are chosen by the data where they are left open.
_WRITTEN_OUT: dict[tuple[str, str], Any] = {("data", "closed"): False, ("training", "ema"): 0.0}
_ALONE["data"] = {"source", "size", "stored", "fit", "channels", "unreadable", "max_pixels", "cache"}
_ALONE["schedule"] = {"warmup"}
_ALONE["training"] = {"chunk", "precision", "seed", "device", "workers", "deterministic", "graphs", "strategy"}
_ALONE["training"] |= {"sync_norms", "save_minutes", "log_steps", "on_collapse"}
_ALONE["optimizer"] = {"name", "lr", "weight_decay", "momentum", "betas", "eps", "backbone_scale", "head_scale", "clip"}
_ALONE["finetune"] = {"train", "layer_decay", "lora_rank", "lora_alpha", "lora_layers", "projection"}


def without_labels(recipe: Recipe) -> Recipe:
    """The recipe with its pictures without labels as the source, where it names no other: pretraining only."""
    options = recipe.unlabelled
    alone = options.folder is not None and "data.source" not in recipe.explicit_keys
    if options.only and not alone and recipe.data.source != options.folder:
        raise ValueError(
            f"unlabelled.only must be left out where there is a labelled source: data.source is {recipe.data.source}, "
            f"unlabelled.folder is {options.folder}"
        )
    if options.only is False and alone:
        raise ValueError("unlabelled.only=false needs a labelled source: name it (data.source)")
    if not alone:
        return recipe
    return recipe.with_("data", source=options.folder).with_("unlabelled", only=True)


def check_unlabelled(recipe: Recipe, items: Items | None) -> None:
    """Refuses keys of [unlabelled] that would have no effect. items: of the labelled source; None: not pictures."""
    options = recipe.unlabelled
    if not recipe.pretrains:
        for key in KEYS["unlabelled"]:
            if getattr(options, key) is not None:
                no_effect(f"unlabelled.{key}", "unlabelled.folder is not set")
        return
    key = "folder" if options.folder is not None else "own_part"
    if items is None or items.pictures is None:
        raise ValueError(f"unlabelled.{key} needs a source of pictures, which are seen in two views each")
    method = options.method or METHOD
    for name, of in _OF.items():
        if getattr(options, name) is not None and of != method:
            no_effect(f"unlabelled.{name}", f"unlabelled.method is {method}")
    if options.preset is not None:
        checks.one_of("unlabelled.preset", options.preset, augment.PRESETS)
    if view_augmentation(recipe).still:
        raise ValueError('unlabelled.preset must change pictures, or both views are the same, got "none"')
    if method == "vicreg" and not (options.invariance is None or options.invariance > 0):
        raise ValueError("unlabelled.invariance must be > 0, or the views are not compared, got 0")
    if options.only:
        _refuse_training_keys(recipe)


def _refuse_training_keys(recipe: Recipe) -> None:
    """Refuses what only a training on labels would read; a recipe that was saved has its defaults written out."""
    for name in ("own_part", "held_out"):
        if getattr(recipe.unlabelled, name) is not None:
            no_effect(f"unlabelled.{name}", "there is no labelled source")
    for section, known in _ALONE.items():
        part = getattr(recipe, section)
        fields = {} if isinstance(part, dict) else type(part).model_fields
        values = part if isinstance(part, dict) else {name: getattr(part, name) for name in fields}
        for name, value in values.items():
            unset = [fields[name].default, _WRITTEN_OUT.get((section, name))] if name in fields else []
            if name not in known and value not in unset:
                no_effect(f"{section}.{name}", "there is no labelled source, and the run ends with its pretraining")


def settle_unlabelled(recipe: Recipe, count: int) -> Recipe:
    """What [unlabelled] leaves open. count: of the pictures, all told."""
    options = recipe.unlabelled
    if count < 2:
        raise ValueError(f"unlabelled.folder must hold at least 2 different pictures to train on, got {count}")
    method = options.method or METHOD
    batch = options.batch or min(count, 128 if recipe.pretrained else 256)
    if batch > count:
        raise ValueError(f"unlabelled.batch must be at most the {count} pictures without labels, got {batch}")
    batches = options.batches or max(1, min(500, count // batch))
    settled: dict[str, Any] = {"method": method, "batch": batch, "batches": batches}
    steps = _STEPS if recipe.device.type == "cuda" else _CPU_STEPS[recipe.pretrained]
    settled["epochs"] = options.epochs or max(_LEAST, min(_MOST, round(steps / batches)))
    settled["projector"] = _PROJECTORS[method] if options.projector is None else options.projector
    assert recipe.optimizer.lr is not None
    settled["lr"] = options.lr or recipe.optimizer.lr * (_PRETRAINED_RATE if recipe.pretrained else 1.0)
    if not options.only:
        settled |= {"own_part": options.own_part is not False, "held_out": options.held_out or "drop"}
    for name, of in _OF.items():
        if of == method:
            value = getattr(options, name)
            settled[name] = _DEFAULTS[name] if value is None else value
    if method == "infonce" and options.queue is None:
        settled["queue"] = min(_QUEUE, count)  # of fewer pictures the same ones would come again, long outdated
    return recipe.with_("unlabelled", **settled)


def view_augmentation(recipe: Recipe) -> augment.Augmentation:
    """How the two views of a picture are made."""
    if recipe.unlabelled.preset is None:
        augmentation = augmentation_of(recipe.with_("augment", preset=recipe.augment.get("preset", "photo")))
    else:
        augmentation = replace(augment.PRESETS[recipe.unlabelled.preset])
    assert augmentation is not None
    return augmentation


def stage_recipe(recipe: Recipe) -> Recipe:
    """The settled recipe as the trainer of the pretraining reads it."""
    options = recipe.unlabelled
    length: dict[str, Any] = {"epochs": options.epochs, "batches": options.batches, "patience": None}
    recipe = recipe.with_("training", **length, ema=0.0, tensorboard=False, log=[])
    recipe = recipe.model_copy(
        update={"loss": {"name": options.method}, "sampler": {"batch": 2 * (options.batch or 0)}}
    )
    recipe = recipe.with_("optimizer", lr=options.lr, class_weights=None, loss_scale=None)
    recipe = recipe.with_("schedule", decay="cosine", floor=0.0, frozen_epochs=0)
    return recipe.with_("memory", size=0).with_("levels", weights=None)
