"""The parent of the losses over class weights: settings are attributes, checked when they are set.

A loss class writes its `__init__` out in full, sets each argument as an attribute of the same name and ends with
`finish_init()`. `class ArcFaceLoss(LossModule, function=arcface_loss)` names the function that computes it; its
`forward` hands it the settings that the function takes by keyword.
"""

import difflib
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from nearkin.losses import class_sampling
from nearkin.losses.class_shards import Shard
from nearkin.losses.settings import count, shared

__all__ = ["LossModule"]

# What decides the shapes of parameters and buffers, and so cannot change after construction.
_PER_CLASS = ("sub_centers", "proxies_per_class", "centers_per_class")
_FIXED = ("num_classes", "dim", "shard", *_PER_CLASS)
# Choices left open are not shown.
_UNSET = {"impl": "auto", "max_memory": None, "sample_rate": 1.0, "shard": None}


class LossModule(nn.Module):
    """Holds the settings of a loss function; `loss.margin` reads one, `loss.margin = 0.3` checks and changes it."""

    lr_scale = 1.0
    along_dim: tuple[str, ...] | None = None  # tensors whose last axis is the embedding's; None: all with two axes
    reads_length = False  # the margin depends on the embedding's length: scaled to 1 it would have no effect
    function: ClassVar[Callable[..., Tensor]]
    _settings: ClassVar[tuple[str, ...]] = ()  # arguments of __init__
    _by_keyword: ClassVar[tuple[str, ...]] = ()  # those that the function takes too
    _learned: ClassVar[tuple[str, ...]] = ()  # tensors that the function takes after the labels
    _ready = False

    def __init_subclass__(cls, function: Callable[..., Tensor] | None = None, learned: tuple[str, ...] = ()) -> None:
        super().__init_subclass__()
        if function is None:  # a user's own variant of a loss
            return
        cls.function = staticmethod(function)
        parameters = inspect.signature(function).parameters.values()
        keywords = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
        cls._settings = tuple(inspect.signature(cls.__init__).parameters)[1:]
        scheduled = {name for name in cls._settings if isinstance(getattr(cls, name, None), property)}
        keywords -= {"shard", *scheduled, *learned}  # these the class's own `forward` hands on
        cls._by_keyword = tuple(name for name in cls._settings if name in keywords)
        required = [p.name for p in parameters if p.default is p.empty and p.kind is not p.KEYWORD_ONLY]
        cls._learned = tuple(required[2:])
        count(cls, cls._settings)

    def finish_init(self) -> None:
        """Checks the settings; from now on a change of one is checked too."""
        self.check_settings()
        self._ready = True

    def check_settings(self) -> None:
        """Raises the error of a bad setting: tries all of them on an empty batch with three classes."""
        if "sample_rate" in self._settings:
            class_sampling.check_rate(self.__dict__["sample_rate"])
        arguments = self.arguments()
        rows = 3 * next((arguments[name] for name in _PER_CLASS if name in arguments), 1)
        learned = [torch.zeros(rows) if name == "bias" else torch.zeros(rows, 2) for name in self._learned]
        with torch.no_grad():
            self._try(torch.empty(0, 2), torch.empty(0, dtype=torch.long), *learned, **arguments)

    def _try(self, *tensors: Any, **arguments: Any) -> Tensor:
        return type(self).function(*tensors, **arguments)

    def arguments(self) -> dict[str, Any]:
        """What the function takes by keyword: its settings, and in some losses learned tensors."""
        return {name: getattr(self, name) for name in self._by_keyword}

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings that the function takes, as they are now, without choices left open. To change one, set it."""
        arguments = {name: getattr(self, name) for name in self._by_keyword}
        return MappingProxyType({k: v for k, v in arguments.items() if k not in _UNSET or v != _UNSET[k]})

    def extra_repr(self) -> str:
        """Every setting, as `print(module)` shows them; of a schedule the value at its start."""
        values = {name: self.__dict__.get(name, self.__dict__.get(f"_{name}", _UNSET)) for name in self._settings}
        shown = [(k, v) for k, v in values.items() if v is not _UNSET and (k not in _UNSET or v != _UNSET[k])]
        return ", ".join(f"{name}={True if name == 'shard' else value!r}" for name, value in shown)

    def __setattr__(self, name: str, value: Any) -> None:
        if not self._ready or name in self._buffers or (name in self._parameters and name not in self._settings):
            super().__setattr__(name, value)
        elif name in self._settings:
            self._change(name, value)
        else:
            self._refuse_misspelt(name)
            super().__setattr__(name, value)

    def _change(self, name: str, value: Any) -> None:
        loss = type(self).__name__
        if name in _FIXED and not isinstance(value, Shard):  # that of a global batch knows its process group
            raise AttributeError(f"{name} cannot change after construction: make a new {loss}, got {value!r}")
        if name in self._parameters and not isinstance(value, nn.Parameter):
            raise AttributeError(f"{name} is learned: fill it in place, with torch.no_grad(), got {value!r}")
        before = self.__dict__.copy()
        super().__setattr__(name, value)
        try:
            self.check_settings()
        except Exception:
            self.__dict__.update(before)
            raise

    def _refuse_misspelt(self, name: str) -> None:
        """Attributes of your own are welcome; what looks like a setting would be ignored, so it is refused."""
        if name.startswith("_") or hasattr(self, name) or "function" not in type(self).__dict__:
            return
        near = difflib.get_close_matches(name, self._settings, 1, 0.8)
        if near or shared(name):  # of other losses, as margin or temperature
            hint = f'; did you mean "{near[0]}"?' if near else ";"
            raise AttributeError(f'unknown setting "{name}"{hint} known: {", ".join(self._settings)}')
