"""Objects of the user's own in a training: a dataset, an encoder or a loss, in place of what a recipe names.

A recipe names them "own:" and their class. They are plain PyTorch: dataset[i] = (tensor, label);
encoder(B, …) → (B, D); loss(embeddings, labels) → one number.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from nearkin.core import files
from nearkin.data.item_set import Items
from nearkin.models.encoder import PREFIX, OwnEncoder
from nearkin.training.config.recipe import Recipe

__all__ = ["NONE", "PREFIX", "DatasetRows", "Own", "how_to_resume", "items_of", "own_objects"]

INITIAL = "untrained.safetensors"  # weights at the start of a run, against which the trained ones are measured
_SECTIONS = {"dataset": ("data", "source"), "encoder": ("encoder", "name"), "loss": ("loss", "name")}


@dataclass(frozen=True)
class Own:
    """The user's objects; None where the recipe names one of ours. wrapped: the encoder, once the data are known."""

    dataset: Any = None
    encoder: nn.Module | None = None
    loss: nn.Module | None = None
    wrapped: OwnEncoder | None = None

    def name(self, role: str) -> str | None:
        """As a recipe has it. role: dataset, encoder or loss."""
        value = getattr(self, role)
        return None if value is None else f"{PREFIX}{type(value).__name__}"

    def check(self, recipe: Recipe, where: str = "") -> None:
        """Refuses a missing object that the recipe names, one of another class, and one that it does not name."""
        for role, (section, key) in _SECTIONS.items():
            part = getattr(recipe, section)
            named = part.get(key, "") if isinstance(part, dict) else getattr(part, key)
            name = str(named).removeprefix(PREFIX)
            if recipe.is_own(section) and getattr(self, role) is None:
                raise ValueError(
                    f"{where}the {role} is an object of the user's own ({name}); give it again in Python: "
                    f"training.resume(folder, {role}=…), or training.train for a new run"
                )
            if recipe.is_own(section) and self.name(role) != named:
                raise ValueError(f"{where}the {role} was a {name}, got a {type(getattr(self, role)).__name__}")
            if getattr(self, role) is not None and not recipe.is_own(section):
                raise ValueError(f"{where}the {role} is {named!r}, by name; leave the object out")

    def wrap(self, example: Tensor) -> "Own":
        """With the encoder as the trainer takes it; example: two items as it will see them."""
        return self if self.encoder is None else replace(self, wrapped=OwnEncoder(self.encoder, example))

    def write_initial(self, folder: Path) -> None:
        """Writes the initial weights, for a run that is stopped and resumed with newly made objects."""
        from safetensors.torch import save

        state = {key: value.contiguous() for key, value in self._state().items()}
        if state:
            files.write_bytes(folder / INITIAL, save(state))

    def read_initial(self, folder: Path) -> None:
        """Reads the initial weights from the folder of a run; an object with other names or shapes is refused."""
        from safetensors.torch import load

        if not (folder / INITIAL).is_file():
            return
        initial, current = load((folder / INITIAL).read_bytes()), self._state()
        for role in ("encoder", "loss"):
            before, now = (
                {key: tuple(value.shape) for key, value in state.items() if key.startswith(f"{role}.")}
                for state in (initial, current)
            )
            if before != now:
                name = sorted(before.items() ^ now.items())[0][0]
                raise ValueError(f"{folder}: the {role} is not the one that the run started with: {name} differs")
        if self.wrapped is not None:
            weights = {k.removeprefix("encoder."): v for k, v in initial.items() if k.startswith("encoder.")}
            self.wrapped.initial = weights

    def _state(self) -> dict[str, Tensor]:
        encoder = {} if self.wrapped is None else self.wrapped.initial
        loss = {} if self.loss is None else self.loss.state_dict()
        state = {f"encoder.{key}": value for key, value in encoder.items()}
        return state | {f"loss.{key}": value.detach().clone().cpu() for key, value in loss.items()}


NONE = Own()


def how_to_resume(recipe: Recipe, folder: Path) -> str:
    """How a stopped run is resumed."""
    if any(recipe.is_own(section) for section, _ in _SECTIONS.values()):
        return f"training.resume({str(folder)!r}, …) and the same objects"
    return f"nearkin train --resume {folder}"


def own_objects(source: Any, encoder: Any, loss: Any) -> Own:
    """The objects among the arguments of `training.train`."""
    for role, value in (("encoder", encoder), ("loss", loss)):
        if value is not None and not isinstance(value, str | nn.Module):
            raise TypeError(f"{role} must be a name or a torch.nn.Module, got {type(value).__name__}")
    if source is None or isinstance(source, str | Path | Recipe):
        dataset = None
    elif hasattr(source, "__getitem__") and hasattr(source, "__len__") and not isinstance(source, list | tuple | dict):
        dataset = source
    else:
        raise TypeError(
            f"source must be a path, a name, a Recipe or a dataset with a length and dataset[i] = (tensor, label), got "
            f"{type(source).__name__}"
        )
    return Own(
        dataset,
        encoder if isinstance(encoder, nn.Module) else None,
        loss if isinstance(loss, nn.Module) else None,
    )


class DatasetRows:
    """The items of a dataset as rows, read when they are needed."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.shape: tuple[int, ...] = (len(dataset), *self._item(0).shape)

    def __len__(self) -> int:
        return self.shape[0]

    def take(self, indices: NDArray[np.int64]) -> Tensor:
        """(n, …) in that order."""
        rows = [self._item(int(i)) for i in indices]
        for i, row in zip(indices, rows, strict=True):
            if row.shape != self.shape[1:]:
                raise ValueError(
                    f"all items of the dataset must have one shape: {tuple(self.shape[1:])} of item 0, item {i} has "
                    f"{tuple(row.shape)}"
                )
        return torch.stack(rows)

    def pixels(self, i: int) -> NDArray[np.uint8] | None:
        """Item i as a report shows it, (H, W) or (H, W, 3); None where it is no image."""
        if len(self.shape) != 4 or self.shape[1] not in (1, 3):
            return None
        picture = self._item(i).float()
        low, high = float(picture.min()), float(picture.max())
        if high > 255 or low < 0 or (high > 1 and self._item(i).is_floating_point()):  # normalised by the dataset
            picture = (picture - low) / max(high - low, 1e-12)
        elif high > 1:
            picture = picture / 255
        pixels: NDArray[np.uint8] = (255 * picture).round().byte().permute(1, 2, 0).numpy()
        return pixels[:, :, 0] if pixels.shape[2] == 1 else pixels

    def _item(self, i: int) -> Tensor:
        return _pair(self.dataset, i)[0]


def items_of(dataset: Any, name: str) -> Items:
    """The items of a dataset; labels from its `targets` or `labels`, or else item by item."""
    if len(dataset) == 0:
        raise ValueError(f"{name}: the dataset has no items")
    _pair(dataset, 0)
    labels = _labels(dataset)
    names = [f"item {i}" for i in range(len(dataset))]
    if labels.dtype.kind == "f":
        if not np.isfinite(labels).all():
            raise ValueError(f"{name}: targets must be finite, got NaN or Inf")
        return Items(name=name, names=names, targets=labels.astype(np.float64), note=f"{name}: no split of its own")
    present, ids = np.unique(labels, return_inverse=True)
    listed = getattr(dataset, "classes", None)
    class_names = [str(label) for label in present.tolist()]
    if isinstance(listed, list | tuple) and labels.dtype.kind != "U" and present[0] >= 0 and present[-1] < len(listed):
        class_names = [str(listed[label]) for label in present]
    return Items(
        name=name, names=names, classes=class_names, labels=ids.astype(np.int64), note=f"{name}: no split of its own"
    )


def _labels(dataset: Any) -> NDArray[Any]:
    known = next((getattr(dataset, key) for key in ("targets", "labels") if hasattr(dataset, key)), None)
    if known is None or len(known) != len(dataset):
        known = [_pair(dataset, i)[1] for i in range(len(dataset))]
    if isinstance(known, Tensor):
        known = known.detach().cpu().numpy()
    labels = np.asarray([label.tolist() if isinstance(label, Tensor) else label for label in known])
    several = labels.ndim > 2 or (labels.ndim == 2 and labels.dtype.kind != "f")
    if labels.dtype.kind not in "iufU" or several:
        raise ValueError(
            f"labels of the dataset must be whole numbers, names or (continuous) floats, one per item, got "
            f"{labels.dtype} of shape {labels.shape}"
        )
    return labels


def _pair(dataset: Any, i: int) -> tuple[Tensor, Any]:
    pair = dataset[i]
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise ValueError(f"dataset[{i}] must be (tensor, label), got {type(pair).__name__}")
    item, label = pair
    if isinstance(item, np.ndarray):
        item = torch.from_numpy(np.ascontiguousarray(item))
    if not isinstance(item, Tensor):
        hint = "; torchvision's transforms.ToTensor() makes one" if hasattr(item, "convert") else ""
        raise TypeError(f"dataset[{i}] must be (tensor, label), got a {type(item).__name__}{hint}")
    return item.detach(), label
