"""NumPy arrays and lists where tensors are wanted: converted once, where a user's call comes in."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from nearkin.core.relations import LabelDistance, Relation

__all__ = ["Array", "Ids", "takes_arrays", "tensor"]

if TYPE_CHECKING:  # the bodies of the functions have tensors
    Array: TypeAlias = Any
    Ids: TypeAlias = Any
else:
    Array = Tensor | np.ndarray  # numbers
    Ids = Tensor | np.ndarray | list  # class ids: whole numbers, or names of classes

P = ParamSpec("P")
R = TypeVar("R")

_ROWS = ("embeddings", "embeddings_a", "embeddings_b", "queries", "gallery", "pairs")
_NUMBERS = (*_ROWS, "targets", "gallery_targets", "values", "a", "b")
_IDS = ("labels", "gallery_labels", "groups", "classes", "assignment")


def takes_arrays(function: Callable[P, R]) -> Callable[P, R]:
    """The function with NumPy arrays in place of tensors; class ids also as lists, and as names of classes.

    An array comes to the device of the tensors beside it. Names become the places of the classes in their sorted order,
    the same for all arguments of a call; what a result says of class ids it says of names then (`diagnose`).
    """
    known = inspect.signature(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        given = [*args, *kwargs.values()]
        if all(isinstance(one, _PLAIN) for one in given):
            return function(*args, **kwargs)
        try:
            bound = known.bind(*args, **kwargs)
        except TypeError:
            return function(*args, **kwargs)  # its sentence is Python's own
        names = _converted(bound.arguments)
        found = function(*bound.args, **bound.kwargs)
        return found if names is None or function.__name__ != "diagnose" else _named(found, names)

    return call


def tensor(name: str, value: Any, on: torch.device | None = None) -> Any:
    """An array of numbers as a tensor; anything else as it is, for the check that has the sentence for it."""
    if isinstance(value, np.generic):
        value = np.asarray(value)
    if isinstance(value, list | tuple) and name in _ROWS:
        raise TypeError(f"{name} must be a torch tensor or a NumPy array, got {type(value).__name__}")
    if not isinstance(value, np.ndarray):
        return value
    kind = value.dtype
    if kind.kind not in "biuf" or (kind.kind == "f" and kind.itemsize > 8):
        what = "Python objects" if kind.kind == "O" else f"{kind}"
        raise TypeError(f"{name} must be a torch tensor or a NumPy array of numbers, got an array of {what}")
    if kind.kind == "u" and kind.itemsize > 1:
        value = value.astype(np.int64)
    return torch.from_numpy(np.require(value, value.dtype.newbyteorder("="), ["C", "W"])).to(on)


_PLAIN = (Tensor, str, bool, int, float, type(None))


def _converted(arguments: dict[str, Any]) -> list[str] | None:
    """Converts in place; the names of the classes, where labels are names."""
    device = next((one.device for one in arguments.values() if isinstance(one, Tensor)), None)
    for name in _NUMBERS:
        if name in arguments:
            arguments[name] = tensor(name, arguments[name], device)
    ids = {name: _listed(name, arguments[name]) for name in _IDS if name in arguments}
    texts = [value for value in ids.values() if isinstance(value, np.ndarray) and value.dtype.kind == "U"]
    others = [value for value in ids.values() if isinstance(value, np.ndarray) and value.dtype.kind != "U"]
    if texts and (others or any(isinstance(value, Tensor) for value in ids.values())):
        raise ValueError(f"{' and '.join(ids)} must be of one kind, got names of classes and numbers")
    classes = np.unique(np.concatenate([value.ravel() for value in texts])) if texts else None
    for name, value in ids.items():
        if isinstance(value, np.ndarray):
            value = value if classes is None else np.searchsorted(classes, value)
            value = value.astype(np.int64) if value.dtype.kind in "iu" else value
        arguments[name] = _relation(tensor(name, value, device), device)
    return None if classes is None else [str(name) for name in classes]


def _listed(name: str, value: Any) -> Any:
    """Lists and arrays of ids as arrays, whose names are of one type; relations and tensors as they are."""
    plain = isinstance(value, list | tuple) and not hasattr(value, "_fields") and name != "classes"  # those are (M, 2)
    if not plain and not isinstance(value, np.ndarray):
        return value
    if not isinstance(value, np.ndarray) and {isinstance(one, str | np.str_) for one in value} == {True, False}:
        raise TypeError(f"{name} must be whole numbers or names of classes, got a mixture")
    try:
        found = np.asarray(value)
    except ValueError:
        raise TypeError(f"{name} must have one entry per row, got rows of several lengths") from None
    if found.dtype.kind == "O" and all(isinstance(one, str) for one in found.ravel()):
        return found.astype(str)  # as pandas has them
    return found.astype(str) if found.dtype.kind == "S" else found


def _relation(value: Any, device: torch.device | None) -> Any:
    """A relation whose masks are arrays."""
    if isinstance(value, Relation | LabelDistance):
        return type(value)(*(tensor("a relation", part, device) for part in value))
    return value


def _named(found: Any, names: list[str]) -> Any:
    """The lists of a diagnosis with names in place of ids."""
    said = dict(found)
    for key in ("worst_classes", "label_errors"):
        said[key] = [
            {what: names[v] if what in ("class", "suggested") else v for what, v in one.items()} for one in said[key]
        ]
    said["confused_pairs"] = [
        one | {"classes": [names[place] for place in one["classes"]]} for one in said["confused_pairs"]
    ]
    return said
