"""What is wrong with a recipe, refused before an image is decoded.

`check_recipe` needs no data. `check_build` knows the items and their split, as they are if every image can be read: it
builds encoder, loss and sampler once and drops them.
"""

import warnings
from pathlib import Path
from typing import Any

import numpy as np

from nearkin import models
from nearkin.data.items import Items
from nearkin.data.splits import Parts
from nearkin.training import build
from nearkin.training.config import defaults
from nearkin.training.config.recipe import Recipe
from nearkin.training.config.registry import LOSSES, SAMPLERS, Setting, accepts
from nearkin.training.metrics_log import MetricsLog
from nearkin.training.optimizers import parameter_groups
from nearkin.training.own_objects import NONE, Own

__all__ = ["check_build", "check_recipe"]

_MANY = 100_000  # classes; weights for more are not built twice


def check_recipe(recipe: Recipe) -> None:
    """Names, keys, types and required packages; where a name is left open, any key that one of them has."""
    defaults.device(recipe)
    MetricsLog(Path(), recipe.training.tensorboard)
    if "name" in recipe.loss:
        build.loss_settings(recipe)
    else:
        _check_keys("loss", recipe.loss, [choice.settings for choice in LOSSES.values()])
    if "name" in recipe.sampler:
        build.sampler_settings(recipe)
    else:
        options = {key: value for key, value in recipe.sampler.items() if key != "batch"}
        _check_keys("sampler", options, [choice.settings for choice in SAMPLERS.values()])
    defaults.check_encoder_name(recipe)
    # Not those of the encoder that is named: whether it fits the source, known a moment later, is the better sentence.
    families = [build.encoder_keys(encoder.name) for encoder in models.encoders()]
    _check_keys("encoder", build.encoder_options(recipe), families)
    preset = {"preset": "light", **recipe.augment}
    build.augmentation_of(recipe.with_("data", size=recipe.data.size or 8).with_("augment", **preset))


def check_build(recipe: Recipe, items: Items, parts: Parts, own: Own = NONE) -> None:
    """recipe: settled on these parts. Raises what `run.assemble` would raise after the images are decoded."""
    encoder = build.new_encoder(recipe, None if items.vectors is None else items.vectors.shape[1:], own)
    labels = classes = targets = None
    if build.takes_targets(recipe):
        assert items.targets is not None  # `defaults.settle` has refused it otherwise
        targets = items.targets[parts.train]
    elif items.labels is not None:
        present, labels = np.unique(items.labels[parts.train], return_inverse=True)
        labels, classes = labels.astype(np.int64), len(present)
    width = None if targets is None else (1 if targets.ndim == 1 else targets.shape[1])
    unsharded = {key: value for key, value in recipe.loss.items() if key != "shard"}  # ranks prepare one by one
    alone = recipe.model_copy(update={"loss": unsharded})
    few = classes and min(classes, _MANY)
    loss = build.build_loss(alone, few, encoder.dim, recipe.training.seed, width, len(parts.train), own)
    parameter_groups(recipe, encoder.backbone, encoder.head, loss)
    with warnings.catch_warnings():  # noted when the sampler is built for the run
        warnings.simplefilter("ignore")
        build.build_sampler(recipe, labels, targets)


def _check_keys(section: str, options: dict[str, Any], choices: list[dict[str, Setting]]) -> None:
    """A key that no choice has is unknown; one that has several types is checked when the name is known."""
    known: dict[str, Setting] = {}
    for settings in choices:
        for key, setting in settings.items():
            same = key not in known or known[key].kind == setting.kind
            known[key] = Setting(key, setting.kind if same else Any, setting.default)
    accepts(section, options, known, f"any {section}")
