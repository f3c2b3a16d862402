"""From [encoder] and [augment] of a recipe to the things themselves."""

from dataclasses import replace
from typing import Any

from nearkin import models
from nearkin.core import checks
from nearkin.data import augment
from nearkin.training.config.recipe import Recipe
from nearkin.training.config.registry import Setting, accepts, settings_of
from nearkin.training.own_objects import NONE, Own, is_own

__all__ = ["augmentation_of", "encoder_given", "encoder_keys", "encoder_settings", "new_encoder"]

_ENCODER_FILLED = {"name", "channels", "size", "features", "seed", "config"}
_PLACES = {"channels": "data.", "size": "data.", "features": ""}  # where a recipe has them; the others: encoder


def encoder_keys(family: str) -> dict[str, Setting]:
    """What a recipe may set of an encoder; `family` as `models.encoders` lists it."""
    listed = {one.name: one for one in models.encoders()}
    checks.one_of("encoder", family, listed)
    kinds = settings_of(models.build)
    known = {
        key: Setting(key, kinds[key].kind if key in kinds else Any, default)
        for key, default in listed[family].parameters.items()
        if key not in _ENCODER_FILLED
    }
    return known | {key: Setting(key, bool, False) for key in ("freeze_backbone", "freeze_norms")}


def encoder_given(recipe: Recipe) -> dict[str, Any]:
    """What [encoder] says beside the name."""
    for key in sorted({"size", "channels"} & set(recipe.encoder)):
        raise ValueError(f'unknown key "encoder.{key}"; in a recipe it is "data.{key}"')
    return {key: value for key, value in recipe.encoder.items() if key != "name"}


def encoder_settings(recipe: Recipe) -> dict[str, Any]:
    """The settings of [encoder] for `models.build`, all of them and typed; freezing is the trainer's."""
    name = str(recipe.encoder["name"])
    if is_own(name):
        return accepts("encoder", encoder_given(recipe), {}, f'encoder "{name}", which has its own')
    known = encoder_keys(f"{name.partition(':')[0]}:NAME" if name.startswith(("timm:", "hf:")) else name)
    typed = accepts("encoder", encoder_given(recipe), known, f'encoder "{name}"')
    return {key: setting.default for key, setting in known.items() if setting.default is not None} | typed


def new_encoder(recipe: Recipe, shape: tuple[int, ...] | None, own: Own = NONE) -> models.Encoder:
    """The encoder of a settled recipe, before it has seen an item. shape: of an item, None for stored pictures."""
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
        raise ValueError(f"{_PLACES.get(key, 'encoder.') if key in settings else ''}{error}") from None
    encoder.freeze_backbone(backbone)
    encoder.freeze_norms(norms)
    return encoder


def augmentation_of(recipe: Recipe) -> augment.Augmentation | None:
    """What [augment] asks for: a preset, single numbers of it replaced; None for vectors."""
    if recipe.data.size is None:
        return None
    name = str(recipe.augment["preset"])
    checks.one_of("augment.preset", name, augment.PRESETS)
    given = {key: value for key, value in recipe.augment.items() if key != "preset"}
    typed = accepts("augment", given, settings_of(augment.Augmentation), "augment")
    try:
        return replace(augment.PRESETS[name], **typed)
    except ValueError as error:
        raise ValueError(f"augment.{error}") from None
