"""What of a pretrained encoder is trained: the rule for small data, and the keys of [finetune]."""

from typing import Any, NamedTuple

from nearkin.models import adapt
from nearkin.training.config.recipe import Recipe, no_effect
from nearkin.training.config.registry import BY_LENGTH

__all__ = ["HEAD_EPOCHS", "Choice", "settle_finetune", "what_to_train"]

# The rule, as measured (docs/benchmarks.md, "What to train on few classes"). Below so many training classes nothing
# that was tried gains, so little is trained; from there on all weights gain as much as LoRA or more. Fewer pictures per
# class than these were not measured: LoRA, which moves less, is a precaution.
HEAD_CLASSES = 5
LORA_IMAGES = 8
# The usual settings of the other keys.
LAYER_DECAY = 1.0  # of learning rates, from layer to layer; 1: none
HEAD_EPOCHS = 0  # in which the head learns alone, before the rest does

WORDS = {"head": "the head alone", "lora": "LoRA layers and the head", "all": "all weights"}
_LORA_KEYS = ("lora_rank", "lora_alpha", "lora_layers")


class Choice(NamedTuple):
    """What is trained: "head", "lora" or "all"; and why, as a part of a sentence."""

    train: str
    why: str


def what_to_train(num_classes: int | None, images_per_class: float) -> Choice:
    """What of a pretrained encoder a training part of that size should change.

    num_classes: None for continuous targets. images_per_class: of the training part, on average.
    """
    if num_classes is None:
        return Choice("all", "continuous targets")
    size = f"{num_classes} training classes of {images_per_class:.3g} pictures on average"
    if num_classes < HEAD_CLASSES:
        return Choice("head", f"{size} are few")
    if images_per_class < LORA_IMAGES:
        return Choice("lora", f"{size} are not many")
    return Choice("all", f"{size} are enough")


def settle_finetune(recipe: Recipe, num_classes: int | None, items: int) -> tuple[Recipe, str | None]:
    """[finetune] of a settled encoder; and the sentence that says what was chosen, where the recipe left it open."""
    options = recipe.finetune
    set_keys = [key for key in type(options).model_fields if getattr(options, key) is not None]
    if not recipe.pretrained:
        for key in set_keys:
            no_effect(f"finetune.{key}", _why_not(recipe))
        return recipe, None
    if recipe.encoder.get("freeze_backbone"):
        raise ValueError(
            "encoder.freeze_backbone must be false for an encoder with pretrained weights; use finetune.train=head"
        )
    sentence, train = None, str(options.train)
    if options.train in (None, "auto"):
        train, why = _choice(recipe, num_classes, items)
        sentence = f"trains {WORDS[train]}: {why} (finetune.train chooses otherwise)"
    compatible = recipe.compatible.run is not None
    if compatible and options.interpolate:
        raise ValueError(
            "finetune.interpolate must be false with compatible.run: other weights than the trained ones would not "
            "search the old rows"
        )
    settled: dict[str, Any] = {"train": train, "interpolate": options.interpolate is not False and not compatible}
    if not recipe.encoder.get("dim") and options.projection is not None:
        no_effect("finetune.projection", "encoder.dim is 0, so there is no projection")
    if recipe.encoder.get("dim"):
        # Principal directions are centred: what is far from the usual picture, as a blurred one, would be long.
        usual = "random" if recipe.loss.get("name") in BY_LENGTH else "pca"
        settled["projection"] = options.projection or usual
    for key in (*_LORA_KEYS, "layer_decay"):
        if key in set_keys and (train == "head" or (key in _LORA_KEYS and train != "lora")):
            no_effect(f"finetune.{key}", f"finetune.train is {train}")
    if train != "all" and not recipe.encoder.get("freeze_norms", True):
        no_effect("encoder.freeze_norms=false", f"finetune.train is {train}, which leaves batch norm as it is")
    if train != "head":
        settled["layer_decay"] = options.layer_decay or LAYER_DECAY
    if train == "lora":
        settled["lora_rank"] = options.lora_rank or adapt.RANK
        settled["lora_alpha"] = options.lora_alpha or adapt.ALPHA
        settled["lora_layers"] = options.lora_layers or adapt.AUTO
    return recipe.with_("finetune", **settled), sentence


def _why_not(recipe: Recipe) -> str:
    name = recipe.encoder["name"]
    if recipe.is_own("encoder"):
        return "the encoder is an object of your own"
    if name in ("small-cnn", "mlp"):
        return f"{name} has no pretrained weights"
    return "encoder.pretrained is false"


def _choice(recipe: Recipe, num_classes: int | None, items: int) -> Choice:
    """The rule's, or what other keys ask for."""
    options = recipe.finetune
    for key in _LORA_KEYS:
        if getattr(options, key) is not None:
            return Choice("lora", f"finetune.{key} is set")
    choice = what_to_train(num_classes, items / max(1, num_classes or 1))
    backbone_keys = {
        "finetune.layer_decay": options.layer_decay,
        "optimizer.backbone_scale": recipe.optimizer.backbone_scale,
        "schedule.frozen_epochs": recipe.schedule.frozen_epochs or None,
    }
    for key, value in backbone_keys.items():
        if choice.train == "head" and value is not None:
            return Choice("all", f"{key} is set")
    if choice.train != "all" and recipe.encoder.get("freeze_norms") is False:
        return Choice("all", "encoder.freeze_norms is false")
    if choice.train == "head" and not recipe.encoder.get("dim"):
        return Choice("lora", f"{choice.why}, and encoder.dim is 0, so there is no head to train")
    return choice
