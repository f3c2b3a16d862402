"""A setting of a loss is stated once: its default, what is allowed, what it means, where `nearkin compare` searches it.

    class SupConLoss(PairLoss):
        temperature: float = setting(default=0.1, above=0, search=…, text="t, divides the cosines")

The signature, `help`, the checks at construction and at `loss.temperature = 0.2`, the recipe's section and the searched
range are read from it.
"""

import difflib
import inspect
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, ParamSpec, TypeAlias

from torch import Tensor, nn
from typing_extensions import dataclass_transform

from nearkin.core import checks, reduce
from nearkin.losses.compiling import compiled_call

__all__ = ["REDUCTION", "REQUIRED", "Choices", "Loss", "Range", "Searched", "Setting", "ranges_of", "setting"]

P = ParamSpec("P")
REQUIRED: Any = inspect.Parameter.empty
GONE = "impl"  # a setting that all losses had


class Range(NamedTuple):
    """From `low` to `high`, both included; log: even in the exponent, for what spans powers of ten."""

    low: float
    high: float
    log: bool = False


class Choices(NamedTuple):
    """One of several names or numbers."""

    values: tuple[str | int | float, ...]


Searched: TypeAlias = Range | Choices
_losses_with: Counter[str] = Counter()  # how many of our loss classes have a setting of this name


def count(loss: type, names: Iterable[str]) -> None:
    """Notes the settings of a loss class of this library; a user's own class changes nothing."""
    if loss.__module__.startswith(__package__ or ""):
        _losses_with.update(list(names))


def ranges_of(loss: Any) -> dict[str, Searched]:
    """Where `nearkin compare` looks for better values of a loss class: settings, and "loss_scale", its learning rate.

    Around the values of the papers and those of the search of Musgrave et al. 2020 (arXiv:2003.08505). A setting that
    states none stays at its default. "loss_scale", how many times faster than the encoder: of a loss that learns.
    """
    ranges = {key: s.search for key, s in loss.fields.items() if s.search is not None}
    return ranges if loss.search_rate is None else ranges | {"loss_scale": loss.search_rate}


def shared(name: str) -> bool:
    """Whether several losses have a setting of this name: on a loss that has it not, it would be ignored."""
    return _losses_with[name] > 1


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is known of a setting; `check` raises the sentence about a value that is not allowed.

    A number above 0 (`above=0`), `at_least` a bound, any finite one without either; a `whole` number; one of the names
    in `choices`; a switch where the default is True or False; or what `rule(name, value)` does not refuse.
    """

    default: Any = REQUIRED
    text: str
    above: float | None = None
    at_least: float | None = None
    whole: bool = False
    choices: Sequence[str] | None = None
    rule: Callable[[str, Any], None] | None = None
    optional: bool = False  # None is allowed too
    fixed: bool = False  # cannot change after construction
    shapes: bool = False  # nor can this: it decides the shapes of parameters, and the function form has none
    learned: bool = False  # where a parameter of this name starts
    tensor: bool = False  # a scalar tensor is taken too
    kw_only: bool = True  # False: may be given by its place
    was: str | None = None  # its name before, which is answered with this one
    only: str | None = None  # "class": of training steps, the function form has none; "function": what these tell it
    now: Callable[[Any], Any] | None = None  # what is read where it changes by step; what is set is its start
    search: Searched | None = None  # where `nearkin compare` looks for a better value

    def check(self, name: str, value: Any) -> None:
        if (value is None and self.optional) or (isinstance(value, Tensor) and (self.learned or self.tensor)):
            return
        if self.rule is not None:
            self.rule(name, value)
        elif self.choices is not None:
            checks.one_of(name, value, self.choices)
        elif self.whole:
            checks.integer(name, value, 1)
        elif isinstance(self.default, bool):
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be True or False, got {value!r}")
        elif self.above is not None:
            checks.positive(name, value)
        elif self.at_least is not None:
            checks.at_least(name, value, self.at_least)
        else:
            checks.number(name, value)


def _states(make: Callable[P, Setting]) -> Callable[P, Any]:
    return make


setting = _states(Setting)  # as a class states one; to a type checker the value is that of the annotation
REDUCTION = setting(
    default="mean",
    choices=reduce.REDUCTIONS,
    text='"mean" over all terms, "active" over those above 0, "sum", or "none": one value per anchor',
)


@dataclass_transform(kw_only_default=True, field_specifiers=(setting,))
class Loss(nn.Module):
    """Holds settings as attributes: `loss.margin` reads one, `loss.margin = 0.3` checks and changes it."""

    lr_scale = 1.0
    search_rate: ClassVar[Range | None] = None  # how much faster than the encoder its parameters learn, for compare
    compiles: ClassVar[bool] = True  # False: it reads values, which no compiler follows
    along_dim: tuple[str, ...] | None = None  # tensors whose last axis is the embedding's; None: all with two axes
    reads_length = False  # the margin depends on the embedding's length: scaled to 1 it would have no effect
    takes_batch_first = True  # reference_labels may be a `BatchFirst`, as `CrossBatchMemory` gives them
    fields: ClassVar[Mapping[str, Setting]] = MappingProxyType({})
    given: ClassVar[Mapping[str, Setting]] = MappingProxyType({})  # those of the function form alone
    _ready = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        stated = {name: value for name, value in vars(cls).items() if isinstance(value, Setting)}
        own = {name: s for name, s in stated.items() if s.only != "function"}
        cls.given = MappingProxyType({name: s for name, s in stated.items() if name not in own} | dict(cls.given))
        without = {name for name in cls.fields if vars(cls).get(name, own) is None}  # set to None: not of this loss
        for name, s in stated.items():
            if s.now is None:
                delattr(cls, name)  # else it would hide a parameter of the same name
            else:
                setattr(cls, name, property(s.now))
        inherited = {name: s for name, s in cls.fields.items() if name not in own and name not in without}
        fields = (own | inherited).items()
        cls.fields = MappingProxyType(dict(sorted(fields, key=lambda item: item[1].default is not REQUIRED)))
        count(cls, cls.fields)
        if "__init__" in vars(cls):  # a variant with arguments of its own
            cls.__signature__ = None  # type: ignore[attr-defined]
            return
        order = sorted(cls.fields.items(), key=lambda item: item[1].kw_only)
        kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
        cls.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(name, kinds[s.kw_only], default=s.default, annotation=_annotation(cls, name))
                for name, s in order
            ]
        )
        if own and cls.__doc__:  # none under python -OO
            cls.__doc__ = f"{inspect.cleandoc(cls.__doc__)}\n\nSettings\n\n{_described(cls.fields)}"

    def __init__(self, *values: Any, **named: Any) -> None:
        self.settle(*values, **named)
        self.make()
        self.check_together()
        self._ready = True

    def settle(self, *values: Any, **named: Any) -> None:
        """Checks and keeps the settings."""
        super().__init__()
        loss, fields = type(self).__name__, self.fields
        places = [name for name, s in fields.items() if not s.kw_only]
        if len(values) > len(places):
            raise TypeError(f"{loss} takes {len(places)} settings by their place ({', '.join(places)}), got {values!r}")
        for name, value in zip(places, values, strict=False):
            if name in named:
                raise TypeError(f"{name} of {loss} is given twice, got {value!r} and {named[name]!r}")
            named[name] = value
        for name in named:
            if name not in fields:
                raise TypeError(_unknown(name, type(self)))
        for name, s in fields.items():
            value = named.get(name, s.default)
            if value is REQUIRED:
                raise TypeError(f"{loss} needs {name}: {s.text}")
            s.check(name, value)
            self.__dict__[name] = value

    def compile(self, *how: Any, **options: Any) -> None:
        """Compiles the loss with torch.compile, whose arguments it takes, from the next call on.

        Numbers that change from call to call, as a scheduled temperature, and other sizes of batches compile it anew
        once, not each time; losses of one class share what was compiled where only their numbers differ. Where no
        compiler is, or it fails, the loss goes on uncompiled, with a warning that names the reason. A loss that has
        hooks runs uncompiled, with them.
        """
        self._compiled_call_impl = compiled_call(self, how, options)

    def make(self) -> None:
        """Makes parameters and buffers from the settings, once."""

    def check_together(self) -> None:
        """Refuses settings that exclude each other, at construction and whenever one has changed."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings as they are now, without choices left open. To change one, set it."""
        free = (name for name, s in self.fields.items() if not (s.shapes or s.learned or s.only))
        named = {name: getattr(self, name) for name in free}
        return MappingProxyType({k: v for k, v in named.items() if v is not None or self.fields[k].default is not None})

    def extra_repr(self) -> str:
        """Every setting, as `print(module)` shows them; of a parameter the value at its start."""
        values = {name: self.__dict__[name] for name in self.fields if name in self.__dict__}
        shown = [(k, v) for k, v in values.items() if v is not None or self.fields[k].default is not None]
        return ", ".join(f"{name}={value!r}" for name, value in shown)

    def __setattr__(self, name: str, value: Any) -> None:
        if not self._ready or name in self._buffers:  # before `fields`, into which no compiler looks after a change
            super().__setattr__(name, value)
            return
        s = self.fields.get(name)
        if s is None and name in self._parameters:
            super().__setattr__(name, value)
        elif s is None:
            self._refuse_misspelt(name)
            super().__setattr__(name, value)
        else:
            self._change(name, value, s)

    def _change(self, name: str, value: Any, s: Setting) -> None:
        if s.fixed or s.shapes:
            loss = type(self).__name__
            raise AttributeError(f"{name} cannot change after construction: make a new {loss}, got {value!r}")
        if s.learned:
            if not isinstance(value, nn.Parameter):
                raise AttributeError(f"{name} is learned: fill it in place, with torch.no_grad(), got {value!r}")
            super().__setattr__(name, value)
            return
        s.check(name, value)
        before = self.__dict__[name]
        self.__dict__[name] = value
        try:
            self.check_together()
        except Exception:
            self.__dict__[name] = before
            raise

    def _refuse_misspelt(self, name: str) -> None:
        """Attributes of your own are welcome; what looks like a setting would be ignored, so it is refused."""
        if name.startswith("_") or hasattr(self, name) or "__init__" in vars(type(self)):
            return
        was = {s.was for s in self.fields.values()}
        if name == GONE or name in was or shared(name) or difflib.get_close_matches(name, self.fields, 1, 0.8):
            raise AttributeError(_unknown(name, type(self)))


def _unknown(name: str, kind: type[Loss]) -> str:
    loss, fields = kind.__name__, kind.fields
    for now, s in fields.items():
        if name == s.was:
            return f"{name} of {loss} is {now} now"
    if name == GONE:
        instead = "; loss.compile() makes it fast on a GPU" if kind.compiles else ""
        return f"{name} has left {loss} with its kernels: leave it out{instead}"
    near = difflib.get_close_matches(name, fields, 1, 0.8)
    hint = f'; did you mean "{near[0]}"?' if near else ";"
    return f'unknown setting "{name}"{hint} known: {", ".join(fields)}'


def _annotation(cls: type, name: str) -> Any:
    for owner in cls.__mro__:
        if name in vars(owner).get("__annotations__", {}):
            return inspect.get_annotations(owner, eval_str=True)[name]
    return inspect.Parameter.empty


def _described(fields: Mapping[str, Setting]) -> str:
    lines = []
    for name, s in fields.items():
        default = "" if s.default is REQUIRED else f"={s.default!r}"
        lines.append(textwrap.fill(f"{name}{default}: {s.text}", 116, initial_indent="  ", subsequent_indent="      "))
    return "\n".join(lines)
