"""Everything that can be wrong with a recipe, said before a picture is decoded.

`check_recipe` needs no data. `rehearse` knows the items and their parts, as they are if every picture can be read: it
builds encoder, loss and sampler once and lets them go again.
"""

import warnings
from pathlib import Path
from typing import Any

import numpy as np

from nearkin import models
from nearkin.data.item_set import Items
from nearkin.data.splits import Parts
from nearkin.training.build import augmentation_of, encoder_given, encoder_keys, new_encoder
from nearkin.training.config import defaults
from nearkin.training.config.recipe import Recipe
from nearkin.training.config.registry import LOSSES, SAMPLERS, Setting, accepts
from nearkin.training.metrics_log import Journal
from nearkin.training.objective import build_loss, build_sampler, loss_settings, sampler_settings, takes_targets
from nearkin.training.optimizers import groups
from nearkin.training.own_objects import NONE, Own

__all__ = ["check_recipe", "rehearse"]

_MANY = 100_000  # classes for which class weights are built twice without a thought


def check_recipe(recipe: Recipe) -> None:
    """Names, keys, types and what must be installed; where a name is left open, any key that one of them has."""
    defaults.device(recipe)
    Journal(Path(), recipe.training.tensorboard)
    if "name" in recipe.loss:
        loss_settings(recipe)
    else:
        _any_of("loss", recipe.loss, [choice.settings for choice in LOSSES.values()], "any loss")
    if "name" in recipe.sampler:
        sampler_settings(recipe)
    else:
        given = {key: value for key, value in recipe.sampler.items() if key != "batch"}
        _any_of("sampler", given, [choice.settings for choice in SAMPLERS.values()], "any sampler")
    defaults.check_encoder_name(recipe)
    # Not those of the encoder that is named: whether it fits the source, known a moment later, is the better sentence.
    _any_of("encoder", encoder_given(recipe), [encoder_keys(one.name) for one in models.encoders()], "any encoder")
    augmentation_of(recipe.with_("data", size=recipe.data.size or 8).with_("augment", **_preset(recipe)))


def rehearse(recipe: Recipe, items: Items, parts: Parts, own: Own = NONE) -> None:
    """recipe: settled on these parts. Raises what `run.assemble` would raise after the pictures are decoded."""
    encoder = new_encoder(recipe, None if items.vectors is None else items.vectors.shape[1:], own)
    labels = classes = targets = None
    if takes_targets(recipe):
        assert items.targets is not None  # `prepare.settled` has refused it otherwise
        targets = items.targets[parts.train]
    elif items.labels is not None:
        present, labels = np.unique(items.labels[parts.train], return_inverse=True)
        labels, classes = labels.astype(np.int64), len(present)
    width = None if targets is None else (1 if targets.ndim == 1 else targets.shape[1])
    whole = {key: value for key, value in recipe.loss.items() if key != "shard"}  # ranks prepare one by one
    alone = recipe.model_copy(update={"loss": whole})
    few = classes and min(classes, _MANY)
    loss = build_loss(alone, few, encoder.dim, recipe.training.seed, width, len(parts.train), own)
    groups(recipe, encoder.backbone, encoder.head, loss)
    with warnings.catch_warnings():  # heard when the sampler is built to stay
        warnings.simplefilter("ignore")
        build_sampler(recipe, labels, targets)


def _preset(recipe: Recipe) -> dict[str, Any]:
    return {"preset": "light", **recipe.augment}


def _any_of(section: str, given: dict[str, Any], several: list[dict[str, Setting]], of: str) -> None:
    """Keys that nothing has are unknown; one that several have with different types is typed when the name is known."""
    known: dict[str, Setting] = {}
    for settings in several:
        for key, setting in settings.items():
            same = key not in known or known[key].kind == setting.kind
            known[key] = Setting(key, setting.kind if same else Any, setting.default)
    accepts(section, given, known, of)
