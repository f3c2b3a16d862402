"""Every input-error sentence of the package: the argument, what is allowed, what was received.

Shapes, types and devices are always checked. Checks that read values (label range, finiteness) run on the CPU; on an
accelerator they would wait for its queue, so there a bad row becomes NaN instead, unless `strict()` is on.
"""

import difflib
import math
from collections.abc import Iterable
from contextvars import ContextVar
from inspect import signature
from types import TracebackType
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from nearkin.core.autograd import traced
from nearkin.core.labels import UNKNOWN, BatchFirst, LabelDistance, Labels, Relation

__all__ = [
    "angle",
    "at_least",
    "at_most",
    "batch",
    "between",
    "class_batch",
    "class_ids",
    "classes",
    "device",
    "dimensions",
    "enough",
]
__all__ += [
    "finite",
    "impossible",
    "in_range",
    "indices",
    "integer",
    "no_effect",
    "no_more",
    "number",
    "one_of",
    "positive",
    "reads_values",
    "rows",
]
__all__ += ["has_references", "rows", "same_device", "same_shape", "strict", "takes_references"]

_strict = ContextVar("strict", default=False)


class strict:
    """Turns on full checks of values, on every device, at the price of one synchronisation per call.

    `nearkin.strict()` for the rest of this thread, `nearkin.strict(False)` to end it, `with nearkin.strict():` for a
    block; other threads and tasks have their own. Besides label ranges it refuses NaN and Inf in embeddings, which
    otherwise give a NaN loss. It changes no value: only which errors are raised.
    """

    def __init__(self, on: bool = True) -> None:
        self._before = _strict.get()
        _strict.set(on)

    def __enter__(self) -> "strict":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        _strict.set(self._before)


def reads_values(tensor: Tensor) -> bool:
    """Whether a check may read the values of this tensor now; a choice of path asks `distances.freely_read`."""
    if traced():
        return False
    return tensor.device.type == "cpu" or (tensor.device.type != "meta" and _strict.get())


def number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not -math.inf < value < math.inf:  # math.isfinite stops a compiler
        raise ValueError(f"{name} must be finite, got {value}")


def positive(name: str, value: float) -> None:
    number(name, value)
    if value <= 0:
        raise ValueError(f"{name} must be > 0, got {value}")


def at_least(name: str, value: float, low: float) -> None:
    number(name, value)
    if value < low:
        raise ValueError(f"{name} must be >= {low}, got {value}")


def at_most(name: str, value: float, high: float, because: str) -> None:
    if value > high:
        raise ValueError(f"{name} must be <= {high:g} ({because}), got {value}")


def between(name: str, value: float, low: float, high: float) -> None:
    number(name, value)
    if not low < value < high:
        raise ValueError(f"{name} must be > {low} and < {high}, got {value}")


def integer(name: str, value: int, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    if value < low:
        raise ValueError(f"{name} must be >= {low}, got {value}")


def angle(name: str, value: float) -> None:
    number(name, value)
    if not 0 <= value < math.pi:
        raise ValueError(f"{name} must be an angle in [0, π) radians, got {value}")


def enough(name: str, value: int, needed: int, what: str) -> None:
    if value < needed:
        raise ValueError(f"{name} must be at least {what}: {needed}, got {value}")


def no_more(name: str, value: int, most: int, what: str) -> None:
    if value > most:
        raise ValueError(f"{name} must be at most {what}: {most}, got {value}")


def one_of(name: str, value: object, allowed: Iterable[str]) -> None:
    known = list(allowed)
    if value not in known:
        near = difflib.get_close_matches(str(value), known, 1)
        hint = f'; did you mean "{near[0]}"?' if near else ";"
        raise ValueError(f'unknown {name} "{value}"{hint} known: {", ".join(known)}')


def impossible(name: str, value: object, because: str, possible: Iterable[str]) -> NoReturn:
    """For a choice that exists but cannot be made here."""
    raise ValueError(f'{name}="{value}" is not possible here: {because}; possible: {", ".join(possible)}')


def no_effect(name: str, because: str) -> NoReturn:
    """Refuses a setting that would be ignored."""
    raise ValueError(f"{name} would have no effect: {because}; leave it out")


def device(choice: str, name: str = "device", instead: str = "--device cpu") -> torch.device:
    """The device that "auto", "cpu", "cuda" or "mps" stands for on this machine; auto is cuda or cpu."""
    one_of(name, choice, ("auto", "cpu", "cuda", "mps"))
    missing = (choice == "cuda" and not torch.cuda.is_available()) or (
        choice == "mps" and not torch.backends.mps.is_available()
    )
    if missing:
        raise ValueError(f"{name} {choice} is not available here; use {instead}")
    if choice == "mps":
        return torch.device("mps")
    return torch.device("cuda" if choice != "cpu" and torch.cuda.is_available() else "cpu")


def rows(name: str, value: object) -> Tensor:
    """A matrix of floats, one row per item."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch tensor, got {type(value).__name__}")
    if not value.is_floating_point():
        raise TypeError(f"{name} must be floating point, got {value.dtype}")
    if value.dim() != 2 or value.shape[1] == 0:
        raise ValueError(f"{name} must have shape (rows, dimensions), got {tuple(value.shape)}")
    if reads_values(value) and _strict.get():
        finite(name, value)
    return value


def finite(name: str, value: Tensor, what: str = "rows") -> None:
    """Refuses NaN and Inf; reads the values, on any device, in slices of rows. what: a row stands for."""
    bad = 0
    for part in torch.split(value, 8192):
        bad += int((~part.isfinite()).any(1).sum())
    if bad:
        raise ValueError(f"{name} must be finite, got NaN or Inf in {bad} {what}")


def dimensions(name: str, value: Tensor, dim: int, owner: str) -> None:
    """The rows have as many dimensions as their counterpart, `owner`."""
    if value.shape[1] != dim:
        raise ValueError(f"{name} must have {dim} dimensions as {owner}, got {value.shape[1]}")


def same_shape(name: str, value: Tensor, of: Tensor, of_name: str) -> None:
    if value.shape != of.shape:
        raise ValueError(f"{name} must have the shape of {of_name}: {tuple(of.shape)}, got {tuple(value.shape)}")


def same_device(name: str, value: Tensor, of: Tensor, of_name: str = "embeddings") -> None:
    if value.device != of.device:
        raise ValueError(f"{name} must be on the device of {of_name}: {of.device}, got {value.device}")


def indices(values: ArrayLike, count: int) -> NDArray[np.int64]:
    """Positions from 0 to count - 1 as int64, also from a mask of `count` booleans."""
    chosen = np.asarray(values)
    if chosen.dtype == np.bool_:
        if chosen.shape != (count,):
            raise ValueError(f"a mask must have one entry per item: {count} items, got shape {chosen.shape}")
        return np.flatnonzero(chosen).astype(np.int64)
    if chosen.size == 0:
        return np.empty(0, np.int64)
    if chosen.ndim != 1 or chosen.dtype.kind not in "iu":
        raise TypeError(f"indices must be whole numbers, (n,), got {chosen.dtype} of shape {chosen.shape}")
    if chosen.min() < 0 or chosen.max() >= count:
        outside = int(chosen.min() if chosen.min() < 0 else chosen.max())
        raise IndexError(f"indices must be from 0 to {count - 1}, got {outside}")
    return chosen.astype(np.int64)


def has_references(loss: object) -> bool:
    """Whether a loss takes references: as it says itself, or by its arguments."""
    said = getattr(loss, "takes_references", None)  # of a module around a loss, whose arguments would fit either kind
    if said is not None:
        return bool(said)
    return callable(getattr(loss, "forward", None)) and "references" in signature(loss.forward).parameters  # type: ignore[attr-defined]


def takes_references(loss: object) -> None:
    if not has_references(loss):
        raise TypeError(
            "loss must take references, as the pair losses do: "
            f"forward(embeddings, labels, references, reference_labels), got {type(loss).__name__}"
        )


def class_ids(name: str, labels: object, embeddings: Tensor, of_name: str = "embeddings") -> Tensor:
    """Integer class ids, one per row of `embeddings`."""
    if not isinstance(labels, Tensor):
        raise TypeError(f"{name} must be a torch tensor of class ids, got {type(labels).__name__}")
    if labels.dtype == torch.bool or labels.is_floating_point() or labels.is_complex():
        raise TypeError(f"{name} must be integer class ids of shape (rows,), got {labels.dtype} {tuple(labels.shape)}")
    if labels.dim() != 1:
        raise ValueError(f"{name} must have shape (rows,), got {tuple(labels.shape)}")
    _one_per_row(name, labels, embeddings, of_name)
    return labels


def in_range(labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Class ids as int64 that are safe to index with, which of them are known, and a taint to add to a row's loss.

    -1 is unknown. The taint is 0, or NaN for an id out of range if values are not read.
    """
    ids = labels.long()
    known = ids != UNKNOWN
    if reads_values(ids) and ids.numel():
        low, high = (int(end) for end in torch.aminmax(ids))
        if low < -1 or high >= num_classes:
            worst = int(ids[(ids < -1) | (ids >= num_classes)][0])
            raise ValueError(f"labels must be in 0..{num_classes - 1} (or -1 for unknown), got {worst}")
        return (ids if low >= 0 else ids.clamp(min=0)), known, torch.zeros_like(ids, dtype=torch.float32)
    safe = ids.clamp(0, num_classes - 1)
    return safe, known, torch.where((safe != ids) & known, torch.nan, 0.0)


def classes(embeddings: Tensor, labels: Labels, num_classes: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same for losses over class weights of `dim` dimensions; checks the rest of the batch too."""
    dimensions("embeddings", rows("embeddings", embeddings), dim, "the class weights have")
    return in_range(class_ids("labels", labels, embeddings), num_classes)


def class_batch(embeddings: Tensor, labels: Labels, num_classes: int, dim: int) -> None:
    """The checks of `classes` alone."""
    dimensions("embeddings", rows("embeddings", embeddings), dim, "the class weights have")
    if reads_values(class_ids("labels", labels, embeddings)):
        in_range(labels, num_classes)  # type: ignore[arg-type]


def batch(
    embeddings: Tensor, labels: Labels, references: Tensor | None, reference_labels: Labels | None, graded: bool = False
) -> tuple[Tensor | None, Labels | None]:
    """Checks that anchors, references and their labels fit together.

    Returns the references and their labels; (None, None) if the batch is its own reference.
    """
    rows("embeddings", embeddings)
    if references is embeddings and (reference_labels is None or reference_labels is labels):
        references = reference_labels = None
    if references is None:
        if reference_labels is not None:
            raise ValueError("reference_labels need references, got None")
    else:
        rows("references", references)
        same_device("references", references, embeddings)
        dimensions("references", references, embeddings.shape[1], "embeddings have")
    if graded:
        _targets(embeddings, labels, references, reference_labels)
    else:
        _relation(embeddings, labels, references, reference_labels)
    return references, reference_labels


def _relation(embeddings: Tensor, labels: Labels, references: Tensor | None, reference_labels: Labels | None) -> None:
    if isinstance(labels, LabelDistance):
        raise TypeError("labels must be class ids, multi-label rows or a Relation, got a LabelDistance")
    if isinstance(labels, Relation):
        for part in ("positive", "negative"):
            _matrix(f"labels.{part}", getattr(labels, part), embeddings, references)
        if labels.ids is not None:
            class_ids("labels.ids", labels.ids, embeddings)
        if reference_labels is not None:
            raise ValueError("reference_labels must be left out where labels is a Relation, which covers both")
        return
    if isinstance(labels, Tensor) and labels.dtype == torch.bool and labels.dim() == 2:
        _multilabel(embeddings, labels, references, reference_labels)
        return
    class_ids("labels", labels, embeddings)
    if references is not None:
        if reference_labels is None:
            raise ValueError("reference_labels must be given with references, got None")
        if isinstance(reference_labels, BatchFirst):
            reference_labels = reference_labels.ids
            if references.shape[0] < embeddings.shape[0]:
                rule = f"start with the {embeddings.shape[0]} embeddings where reference_labels is a BatchFirst"
                raise ValueError(f"references must {rule}, got {references.shape[0]} rows")
        class_ids("reference_labels", reference_labels, references, "references")


def _multilabel(embeddings: Tensor, labels: Tensor, references: Tensor | None, reference_labels: Labels | None) -> None:
    _one_per_row("labels", labels, embeddings, "embeddings")
    if references is None and labels.shape[0] == labels.shape[1] and labels.shape[0] > 0:
        raise ValueError(
            f"labels of shape {tuple(labels.shape)} may be multi-label rows or a relation; "
            "say which: relations.multilabel(labels) or relations.explicit(labels)"
        )
    if references is None:
        return
    if reference_labels is None:
        _matrix("labels (a relation, since there are no reference_labels)", labels, embeddings, references)
        return
    if not isinstance(reference_labels, Tensor) or reference_labels.dtype != torch.bool or reference_labels.dim() != 2:
        raise TypeError("reference_labels must be bool rows as labels are")
    _one_per_row("reference_labels", reference_labels, references, "references")
    if reference_labels.shape[1] != labels.shape[1]:
        raise ValueError(
            f"reference_labels must have as many columns as labels: {labels.shape[1]}, got {reference_labels.shape[1]}"
        )


def _targets(embeddings: Tensor, targets: Labels, references: Tensor | None, reference_targets: Labels | None) -> None:
    if isinstance(targets, LabelDistance):
        _matrix("labels.distance", targets.distance, embeddings, references, torch.is_floating_point)
        if reference_targets is not None:
            raise ValueError("reference_labels must be left out where labels is a LabelDistance, which covers both")
        return
    _numbers("labels", targets, embeddings, "embeddings")
    if references is None:
        return
    if reference_targets is None:
        raise ValueError("reference_labels must be given with references, got None")
    _numbers("reference_labels", reference_targets, references, "references")
    assert isinstance(targets, Tensor) and isinstance(reference_targets, Tensor)
    if targets.shape[1:] != reference_targets.shape[1:]:
        raise ValueError(
            f"reference_labels must have the columns of labels: {tuple(targets.shape[1:])}, "
            f"got {tuple(reference_targets.shape[1:])}"
        )


def _numbers(name: str, targets: object, items: Tensor, of_name: str) -> None:
    if not isinstance(targets, Tensor) or targets.dtype == torch.bool or targets.is_complex():
        got = targets.dtype if isinstance(targets, Tensor) else type(targets).__name__
        raise TypeError(f"{name} must be real-valued targets, (rows,) or (rows, K), got {got}")
    if targets.dim() not in (1, 2):
        raise ValueError(f"{name} must have shape (rows,) or (rows, K), got {tuple(targets.shape)}")
    _one_per_row(name, targets, items, of_name)
    if reads_values(targets) and targets.is_floating_point() and not bool(targets.isfinite().all()):
        raise ValueError(f"{name} must be finite, got NaN or Inf")


def _one_per_row(name: str, labels: Tensor, items: Tensor, of_name: str) -> None:
    if labels.shape[0] != items.shape[0]:
        raise ValueError(
            f"{name} must have one entry per row of {of_name}: {items.shape[0]} rows, {labels.shape[0]} labels"
        )
    same_device(name, labels, items, of_name)


def _matrix(name: str, value: object, embeddings: Tensor, references: Tensor | None, kind: object = None) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch tensor, got {type(value).__name__}")
    shape = (embeddings.shape[0], (embeddings if references is None else references).shape[0])
    if value.shape != shape:
        raise ValueError(f"{name} must have shape (anchors, references) = {shape}, got {tuple(value.shape)}")
    if kind is None and value.dtype != torch.bool:
        raise TypeError(f"{name} must be bool, got {value.dtype}")
    if kind is not None and not value.is_floating_point():
        raise TypeError(f"{name} must be floating point, got {value.dtype}")
    same_device(name, value, embeddings)
    if kind is not None and reads_values(value) and not bool((value >= 0).all() & value.isfinite().all()):
        raise ValueError(f"{name} must be finite and >= 0, got {float(value.min())} at least")
