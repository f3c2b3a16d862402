"""Losses and samplers by the name a recipe has for them, with the settings each takes."""

import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, get_type_hints

from nearkin import losses, samplers

__all__ = ["LOSSES", "SAMPLERS", "Choice", "Setting", "accepts", "settings_of"]

# Set by the trainer, which knows the data, the encoder and the ranks.
_FILLED = {"self", "labels", "targets", "num_classes", "dim", "generator", "seed", "rank", "world_size", "batches"}
_FILLED |= {"split", "classes", "batch_size"}


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
    hints = get_type_hints(make.__init__ if inspect.isclass(make) else make)
    return {
        name: Setting(name, hints.get(name, Any), parameter.default)
        for name, parameter in inspect.signature(make).parameters.items()
        if name not in without and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }


def accepts(section: str, options: Mapping[str, Any], known: Mapping[str, Setting], of: str) -> dict[str, Any]:
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
            raise ValueError(f"{section}.{name} must be {type_in_words(kind)}, got {value!r}") from None
    return typed


def type_in_words(kind: Any) -> str:
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
        if inspect.isclass(make):
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
            choices[name] = Choice(name, make, settings_of(make), make)
    return dict(sorted(choices.items()))


LOSSES = _losses()
SAMPLERS = _samplers()
