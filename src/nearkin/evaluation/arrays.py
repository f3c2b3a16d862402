"""What the evaluation functions take and return: NumPy arrays and lists in place of tensors, scores with intervals."""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin.core.relations import UNKNOWN, LabelDistance, Relation

__all__ = ["Array", "Counts", "Ends", "Floats", "Ids", "Progress", "Scores", "Values", "group_numbers", "takes_arrays"]
__all__ += ["tensor"]

if TYPE_CHECKING:  # the bodies of the functions have tensors
    Array: TypeAlias = Any
    Ids: TypeAlias = Any
else:
    Array = Tensor | np.ndarray  # numbers
    Ids = Tensor | np.ndarray | list  # class ids: whole numbers, or names of classes

Floats: TypeAlias = NDArray[np.float64]
Counts: TypeAlias = NDArray[np.int64]
Values: TypeAlias = Tensor | NDArray[Any]
Ends: TypeAlias = tuple[float, float]  # of an interval
Progress: TypeAlias = Callable[[int, int], None]  # done, in all

P = ParamSpec("P")
R = TypeVar("R")
V = TypeVar("V")

_ROWS = ("embeddings", "embeddings_a", "embeddings_b", "queries", "gallery", "pairs", "cohort", "validation")
_NUMBERS = (*_ROWS, "targets", "gallery_targets", "values", "a", "b")
_IDS = (
    ("labels", "gallery_labels", "cohort_labels", "validation_labels", "classes", "assignment"),
    ("groups", "gallery_groups"),
)  # numbered together


class Scores(dict[str, V]):
    """Metrics by name; `intervals`: (low, high) by the same names, where they were requested.

    notes: sentences on what could not be measured, such as why intervals are (nan, nan).
    """

    intervals: dict[str, Ends]
    notes: list[str]

    def __init__(self, values: Mapping[str, V] | None = None) -> None:
        super().__init__(values or {})
        self.intervals, self.notes = {}, []


def takes_arrays(function: Callable[P, R]) -> Callable[P, R]:
    """The function with NumPy arrays in place of tensors; class ids also as lists, and as names of classes.

    An array is moved to the device of the tensors beside it. Names become the indices of the classes in sorted order,
    the same for all arguments of a call; a result that names classes (`diagnose`) then has their names.
    """
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if all(isinstance(value, _PLAIN) for value in (*args, *kwargs.values())):
            return function(*args, **kwargs)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return function(*args, **kwargs)  # Python's own message
        names = _convert(bound.arguments)
        result = function(*bound.args, **bound.kwargs)
        return result if names is None or function.__name__ != "diagnose" else _with_names(result, names)

    return call


def tensor(name: str, value: Any, on: torch.device | None = None) -> Any:
    """An array of numbers as a tensor; anything else unchanged, for the check that reports it."""
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


def group_numbers(groups: Tensor) -> Tensor:
    """Numbers (N,) from 0 to 2 N, equal where the groups are; an item of unknown group (-1) has one of its own."""
    number = torch.unique(groups.long(), return_inverse=True)[1]
    alone = len(groups) + torch.arange(len(groups), device=groups.device)
    return torch.where(groups == UNKNOWN, alone, number)


_PLAIN = (Tensor, str, bool, int, float, type(None))


def _convert(arguments: dict[str, Any]) -> list[str] | None:
    """Converts in place; returns the names of the classes, where labels are names."""
    device = next((value.device for value in arguments.values() if isinstance(value, Tensor)), None)
    for name in _NUMBERS:
        if name in arguments:
            arguments[name] = tensor(name, arguments[name], device)
    names = [
        _convert_ids({name: arguments[name] for name in kind if name in arguments}, arguments, device) for kind in _IDS
    ]
    return names[0]


def _convert_ids(given: dict[str, Any], arguments: dict[str, Any], device: torch.device | None) -> list[str] | None:
    """Converts ids that are numbered together, in `arguments`; returns their names, where they are names."""
    ids = {name: _id_array(name, value) for name, value in given.items()}
    texts = [value for value in ids.values() if isinstance(value, np.ndarray) and value.dtype.kind == "U"]
    numbers = [value for value in ids.values() if isinstance(value, np.ndarray) and value.dtype.kind != "U"]
    if texts and (numbers or any(isinstance(value, Tensor) for value in ids.values())):
        raise ValueError(f"{' and '.join(ids)} must be of one kind, got names of classes and numbers")
    classes = np.unique(np.concatenate([value.ravel() for value in texts])) if texts else None
    for name, value in ids.items():
        if isinstance(value, np.ndarray):
            value = value if classes is None else np.searchsorted(classes, value)
            value = value.astype(np.int64) if value.dtype.kind in "iu" else value
        arguments[name] = _relation(tensor(name, value, device), device)
    return None if classes is None else [str(name) for name in classes]


def _id_array(name: str, value: Any) -> Any:
    """Lists and arrays of ids as arrays, names as one string type; relations and tensors unchanged."""
    plain = isinstance(value, list | tuple) and not hasattr(value, "_fields") and name != "classes"  # those are (M, 2)
    if not plain and not isinstance(value, np.ndarray):
        return value
    if not isinstance(value, np.ndarray) and {isinstance(id_, str | np.str_) for id_ in value} == {True, False}:
        raise TypeError(f"{name} must be whole numbers or names of classes, got a mixture")
    try:
        ids = np.asarray(value)
    except ValueError:
        raise TypeError(f"{name} must have one entry per row, got rows of several lengths") from None
    if ids.dtype.kind == "O" and all(isinstance(id_, str) for id_ in ids.ravel()):
        return ids.astype(str)  # as pandas has them
    return ids.astype(str) if ids.dtype.kind == "S" else ids


def _relation(value: Any, device: torch.device | None) -> Any:
    """A relation whose masks are arrays."""
    if isinstance(value, Relation | LabelDistance):
        return type(value)(*(tensor("a relation", part, device) for part in value))
    return value


def _with_names(diagnosis: Any, names: list[str]) -> Any:
    """The lists of a diagnosis with names in place of ids."""
    result = dict(diagnosis)
    for key in ("worst_classes", "label_errors"):
        result[key] = [
            {field: names[v] if field in ("class", "suggested") else v for field, v in entry.items()}
            for entry in result[key]
        ]
    result["confused_pairs"] = [
        entry | {"classes": [names[index] for index in entry["classes"]]} for entry in result["confused_pairs"]
    ]
    return result
