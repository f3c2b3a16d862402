"""What a recipe can name: losses, samplers, encoders, augmentations, with the typed settings of each."""

import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, get_type_hints

from nearkin import losses, models, samplers
from nearkin.core import checks
from nearkin.data import augment
from nearkin.losses.matryoshka import check_lengths
from nearkin.losses.settings import Loss
from nearkin.training.config.recipe import Recipe, no_effect

__all__ = ["BY_LENGTH", "LOSSES", "SAMPLERS", "Choice", "Setting", "augmentation_of", "check_keys", "encoder_settings"]
__all__ += ["loss_settings", "matryoshka_dims", "matryoshka_weights", "sampler_settings", "settings_of"]

BY_LENGTH = {"adaface", "magface"}  # losses whose margins follow the length of embeddings
# Set by the trainer, which knows the data, the encoder and the ranks.
_FILLED = {"self", "labels", "targets", "num_classes", "dim", "generator", "seed", "rank", "world_size", "batches"}
_FILLED |= {"split", "classes", "batch_size"}
_ENCODER_FILLED = {"name", "channels", "size", "features", "seed", "config"}  # by the data and other sections


class Setting(NamedTuple):
    """A setting: its name, its annotated type, its default (`inspect.Parameter.empty`: none)."""

    name: str
    kind: Any
    default: Any


class Choice(NamedTuple):
    """A loss or sampler."""

    name: str
    make: Callable[..., Any]
    settings: dict[str, Setting]
    described: Callable[..., Any]

    @property
    def line(self) -> str:
        """The first sentence of its description."""
        text = inspect.getdoc(self.described) or ""
        return re.split(r"(?<=[.:]) |\n\n", text.replace("\n", " "), maxsplit=1)[0].rstrip(":").replace("`", "")


def settings_of(make: Callable[..., Any], without: Iterable[str] = _FILLED) -> dict[str, Setting]:
    """The arguments of a function or class that a recipe may set."""
    stated = inspect.isclass(make) and issubclass(make, Loss)
    hints = get_type_hints(make.__init__ if inspect.isclass(make) and not stated else make)
    return {
        name: Setting(name, hints.get(name, Any), parameter.default)
        for name, parameter in inspect.signature(make).parameters.items()
        if name not in without and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }


def _accepts(section: str, options: Mapping[str, Any], known: Mapping[str, Setting], of: str) -> dict[str, Any]:
    """The options in the annotated types; an unknown one is answered with the nearest."""
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    typed: dict[str, Any] = {}
    for name, value in options.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f'; did you mean "{near[0]}"?' if near else ";"
            raise ValueError(f'unknown key "{section}.{name}" of {of}{hint} known: {", ".join(known)}')
        kind = known[name].kind
        if value == "none" and _optional(kind):
            typed[name] = None
            continue
        try:
            adapter: TypeAdapter[Any] = TypeAdapter(kind, config=ConfigDict(arbitrary_types_allowed=True))
            typed[name] = adapter.validate_python(tuple(value) if isinstance(value, list) else value, strict=True)
        except ValidationError:
            raise ValueError(f"{section}.{name} must be {_type_in_words(kind)}, got {value!r}") from None
    return typed


def _type_in_words(kind: Any) -> str:
    """A type as an error sentence has it."""
    text = re.sub(
        r"(collections\.abc\.|typing\.|<class '|'>)", "", kind.__name__ if inspect.isclass(kind) else str(kind)
    )
    for part, words in (
        ("NoneType", '"none"'),
        ("None", '"none"'),
        ("bool", "true or false"),
        ("int", "a whole number"),
    ):
        text = re.sub(rf"\b{part}\b", words, text)
    text = re.sub(r"\bfloat\b", "a number", text)
    text = re.sub(r"Callable\[.*\]", "", text)
    text = re.sub(r"\bstr\b", "text", text)
    return " or ".join(part.strip() for part in text.split("|") if part.strip())


def _optional(kind: Any) -> bool:
    return type(None) in getattr(kind, "__args__", ())


def _losses() -> dict[str, Choice]:
    functions = {name.replace("_", ""): name for name in losses.__all__ if name.endswith("_loss")}
    choices = {}
    for class_name in losses.__all__:
        make = getattr(losses, class_name)
        if inspect.isclass(make) and class_name.lower() in functions:  # others go around a loss
            function = functions[class_name.lower()]
            name = function.removesuffix("_loss").replace("_", "-")
            known = settings_of(make)
            if "num_classes" in inspect.signature(make).parameters:
                optional = inspect.signature(make).parameters["num_classes"].default is None
                if optional:  # learned per class on request: "all" stands for the number of training classes
                    known["num_classes"] = Setting("num_classes", int | str | None, None)
            if "num_items" in known:  # likewise, of the training items
                known["num_items"] = Setting("num_items", int | str | None, None)
            choices[name] = Choice(name, make, known, getattr(losses, function))
    return dict(sorted(choices.items()))


def _samplers() -> dict[str, Choice]:
    choices = {}
    for class_name in samplers.__all__:
        if class_name != "EpochSampler":
            name = re.sub(r"(?<!^)(?=[A-Z])", "-", class_name).lower()
            make = getattr(samplers, class_name)
            settings = settings_of(make)
            if hasattr(make, "refresh"):
                settings["every"] = Setting("every", int, 1)  # epochs between two refreshes, which the trainer makes
            if "groups" in settings:
                settings["groups"] = Setting("groups", bool, None)  # whether to use those of the source
            choices[name] = Choice(name, make, settings, make)
    return dict(sorted(choices.items()))


# Settings of [loss] that go around any loss.
AROUND = {
    "matryoshka": Setting("matryoshka", tuple[int, ...] | None, None),
    "matryoshka_weights": Setting("matryoshka_weights", tuple[float | int, ...] | None, None),
}
LOSSES = _losses()
SAMPLERS = _samplers()


# --- the typed settings of a section, with errors as one sentence


def loss_settings(recipe: Recipe) -> dict[str, Any]:
    """The settings of [loss] for its class, typed; not those that go around any loss."""
    options = {name: value for name, value in recipe.loss.items() if name != "name" and name not in AROUND}
    name = str(recipe.loss.get("name"))
    if recipe.is_own("loss"):
        known = {"targets": Setting("targets", bool, False)}
        return _accepts("loss", options, known, f'loss "{name}", which has its own')
    checks.one_of("loss", name, LOSSES)
    if options.get("reduction") == "none":
        raise ValueError('loss.reduction must give one number to train on, got "none"')
    if "impl" in options and "impl" not in LOSSES[name].settings:  # of recipes from before its kernels left
        if options["impl"] != "auto" and not recipe.is_recorded:
            raise ValueError(f"loss.impl has left {name} with its kernels: leave it out, got {options['impl']!r}")
        del options["impl"]
    for was, now in renamed(name).items():
        if was in options and not recipe.is_recorded:
            raise ValueError(f"loss.{was} of {name} is loss.{now} now, got {options[was]!r}")
        if was in options:
            options[now] = options.pop(was)
    return _accepts("loss", options, LOSSES[name].settings, f'loss "{name}"')


def renamed(loss: str) -> dict[str, str]:
    """Settings of a loss that had another name when runs were recorded: old name → present one."""
    fields = getattr(LOSSES[loss].make, "fields", {})
    return {s.was: now for now, s in fields.items() if s.was is not None}


def matryoshka_dims(recipe: Recipe, dim: int | None = None) -> tuple[int, ...] | None:
    """The lengths of `loss.matryoshka`, longest first, with the full one where it is not among them; None without.

    dim: of the embeddings, None where it is not known yet.
    """
    dims, weights = _around(recipe)
    if dims is None:
        if weights is not None:
            no_effect("loss.matryoshka_weights", "loss.matryoshka is not set")
        return None
    lengths = check_lengths("loss.matryoshka", list(dims))
    if dim is None:
        return lengths
    if lengths[0] > dim:
        raise ValueError(f"loss.matryoshka must be at most the {dim} dimensions of encoder.dim, got {list(lengths)}")
    lengths = lengths if lengths[0] == dim else (dim, *lengths)
    if len(lengths) == 1:
        raise ValueError(f"loss.matryoshka would have no effect: {dim} is the full length; name shorter ones, as 32")
    return lengths


def matryoshka_weights(recipe: Recipe, dims: tuple[int, ...]) -> tuple[float, ...]:
    """What the loss of each length is multiplied by. dims: of `matryoshka_dims`.

    By default the length's share of the full one: with equal weights the short lengths, whose gradients are larger,
    cost the full one more (docs/measured/losses.md).
    """
    weights = _around(recipe)[1]
    if weights is None:
        return tuple(dim / dims[0] for dim in dims)
    if len(weights) != len(dims):
        raise ValueError(f"loss.matryoshka_weights must have one entry per length {list(dims)}, got {list(weights)}")
    return weights


def _around(recipe: Recipe) -> tuple[tuple[int, ...] | None, tuple[float, ...] | None]:
    options = {name: value for name, value in recipe.loss.items() if name in AROUND}
    typed = _accepts("loss", options, AROUND, "any loss")
    return typed.get("matryoshka"), typed.get("matryoshka_weights")


def sampler_settings(recipe: Recipe) -> dict[str, Any]:
    """The settings of [sampler] beside its name and the batch size, typed."""
    name = str(recipe.sampler.get("name"))
    checks.one_of("sampler", name, SAMPLERS)
    options = {key: value for key, value in recipe.sampler.items() if key not in ("name", "batch")}
    return _accepts("sampler", options, SAMPLERS[name].settings, f'sampler "{name}"')


def _encoder_keys(family: str) -> dict[str, Setting]:
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


def _encoder_options(recipe: Recipe) -> dict[str, Any]:
    """The keys of [encoder] beside the name."""
    for key in sorted({"size", "channels"} & set(recipe.encoder)):
        raise ValueError(f'unknown key "encoder.{key}"; in a recipe it is "data.{key}"')
    return {key: value for key, value in recipe.encoder.items() if key != "name"}


def encoder_settings(recipe: Recipe) -> dict[str, Any]:
    """All settings of [encoder], typed, with defaults: those of `models.build`, and what to freeze."""
    name = str(recipe.encoder["name"])
    if recipe.is_own("encoder"):
        return _accepts("encoder", _encoder_options(recipe), {}, f'encoder "{name}", which has its own')
    known = _encoder_keys(f"{name.partition(':')[0]}:NAME" if name.startswith(("timm:", "hf:")) else name)
    typed = _accepts("encoder", _encoder_options(recipe), known, f'encoder "{name}"')
    return {key: setting.default for key, setting in known.items() if setting.default is not None} | typed


def augmentation_of(recipe: Recipe) -> augment.Augmentation | None:
    """The preset of [augment] with its other keys replaced; None for vectors."""
    if recipe.data.size is None:
        return None
    name = str(recipe.augment["preset"])
    checks.one_of("augment.preset", name, augment.PRESETS)
    options = {key: value for key, value in recipe.augment.items() if key != "preset"}
    typed = _accepts("augment", options, settings_of(augment.Augmentation), "augment")
    try:
        return replace(augment.PRESETS[name], **typed)
    except ValueError as error:
        raise ValueError(f"augment.{error}") from None


def check_keys(recipe: Recipe) -> None:
    """Names, keys and types, before anything is known of the data; where a name is open, any key that a choice has."""
    matryoshka_dims(recipe)
    if "name" in recipe.loss:
        loss_settings(recipe)
    else:
        _check_any("loss", recipe.loss, [AROUND, *(choice.settings for choice in LOSSES.values())])
    if "name" in recipe.sampler:
        sampler_settings(recipe)
    else:
        options = {key: value for key, value in recipe.sampler.items() if key != "batch"}
        _check_any("sampler", options, [choice.settings for choice in SAMPLERS.values()])
    name = str(recipe.encoder.get("name", "mlp"))
    if not recipe.is_own("encoder") and not name.startswith(("timm:", "hf:")):
        checks.one_of("encoder", name, [encoder.name for encoder in models.encoders()])
    # Not those of the encoder that is named: whether it fits the source, known a moment later, is the better sentence.
    _check_any("encoder", _encoder_options(recipe), [_encoder_keys(encoder.name) for encoder in models.encoders()])
    preset = {"preset": "light", **recipe.augment}
    augmentation_of(recipe.with_("data", size=recipe.data.size or 8).with_("augment", **preset))


def _check_any(section: str, options: dict[str, Any], choices: list[dict[str, Setting]]) -> None:
    """A key that no choice has is unknown; one that has several types is checked when the name is known."""
    known: dict[str, Setting] = {}
    for settings in choices:
        for key, setting in settings.items():
            same = key not in known or known[key].kind == setting.kind
            known[key] = Setting(key, setting.kind if same else Any, setting.default)
    _accepts(section, options, known, f"any {section}")
