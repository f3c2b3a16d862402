"""A no to what would be ignored, and to an encoder that nothing can teach: said before anything long begins."""

from torch import nn

from nearkin.data.augment import Augmentation
from nearkin.data.benchmarks import BENCHMARKS
from nearkin.data.item_set import Items
from nearkin.data.splits import Parts, source_split
from nearkin.training.config.recipe import Recipe

__all__ = ["check_augment", "check_data", "check_encoder", "check_learning", "no_effect"]


def no_effect(key: str, because: str) -> None:
    raise ValueError(f"{key} would have no effect: {because}; leave it out")


def check_data(recipe: Recipe, items: Items, parts: Parts) -> None:
    """Keys that choose the items and their parts."""
    options = recipe.data
    if options.partial and options.source not in BENCHMARKS:
        no_effect("data.partial", f"{items.name} is no benchmark set")
    if not options.official and source_split(items, options.closed) is None:
        no_effect("data.official", f"{items.name} has no split of its own")
    for key in ("closed", "skip_single"):
        if getattr(options, key) and items.labels is None:
            no_effect(f"data.{key}", f"{items.name} has no classes")
    for part in ("val", "test"):
        if part in parts.official and getattr(options, part) is not None:
            no_effect(f"data.{part}", f"{items.name} has its own {part} part, which data.official=false would ignore")
    if options.seed and {"val", "test"} <= set(parts.official):
        no_effect("data.seed", f"{items.name} has its own parts, which data.official=false would ignore")


def check_augment(recipe: Recipe, augmentation: Augmentation | None) -> None:
    """Numbers of an augmentation that meet nothing they could change."""
    if augmentation is not None and augmentation.erase == 0 and "erase_area" in recipe.augment:
        no_effect("augment.erase_area", "augment.erase is 0")
    for key in ("saturation", "grey"):
        if recipe.data.channels == 1 and key in recipe.augment:
            no_effect(f"augment.{key}", "the pictures are grey")


def check_encoder(recipe: Recipe) -> None:
    """Settings of the encoder for vectors that need layers, or layers that learn; and of several ranks."""
    options = recipe.encoder
    if recipe.training.sync_norms and (options["name"] == "mlp" or options.get("freeze_norms")):
        frozen = options["name"] != "mlp"
        no_effect("training.sync_norms", "encoder.freeze_norms is true" if frozen else "mlp has no batch norm")
    if recipe.training.strategy == "fsdp" and recipe.schedule.frozen_epochs:
        raise ValueError("schedule.frozen_epochs must be 0 with training.strategy=fsdp, which holds what learns fixed")
    if options["name"] != "mlp":
        return
    if options.get("freeze_norms"):
        no_effect("encoder.freeze_norms", "mlp has no batch norm")
    if options.get("dropout") and options.get("freeze_backbone"):
        no_effect("encoder.dropout", "encoder.freeze_backbone is true")
    if options.get("dropout") and options.get("hidden") in ([], ()):
        no_effect("encoder.dropout", "encoder.hidden is empty")


def check_learning(recipe: Recipe, backbone: nn.Module, head: nn.Module, loss: nn.Module) -> None:
    """Every part that is spoken of has weights, and some of the encoder's can move."""
    options, frozen = recipe.optimizer, bool(recipe.encoder.get("freeze_backbone"))
    has = {name: any(True for _ in p.parameters()) for name, p in (("backbone", backbone), ("head", head))}
    learned = any(True for _ in loss.parameters())
    spoken = {
        "optimizer.backbone_scale": ("backbone", options.backbone_scale not in (None, 1.0)),
        "optimizer.head_scale": ("head", options.head_scale != 1.0),
        "encoder.freeze_backbone": ("backbone", frozen),
        "schedule.frozen_epochs": ("backbone", recipe.schedule.frozen_epochs > 0),
    }
    for key, (part, asked) in spoken.items():
        if asked and not has[part]:
            no_effect(key, f"the {part} has no weights")
    if options.loss_scale is not None and not learned:
        no_effect("optimizer.loss_scale", f"loss {recipe.loss.get('name')} has no weights")
    if not has["head"] and (frozen or not has["backbone"]):
        why = "the backbone is frozen" if frozen else "the backbone has no weights"
        raise ValueError(f"nothing of the encoder can learn: {why} and encoder.dim is 0; give encoder.dim")
    if not has["head"] and not learned and recipe.schedule.frozen_epochs:
        raise ValueError("nothing but the backbone can learn, so schedule.frozen_epochs must be 0; or give encoder.dim")
