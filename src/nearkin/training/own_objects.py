"""Objects of the user's own in a training: a dataset, an encoder, a loss, any of them beside what a recipe names.

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
from nearkin.models.own_encoder import PREFIX, OwnEncoder
from nearkin.training.config.recipe import Recipe

__all__ = ["NONE", "PREFIX", "DatasetRows", "Own", "is_own", "items_of", "own_of", "way_on"]

BEGUN = "untrained.safetensors"  # weights at the start of a run, against which the trained ones are measured
_SECTIONS = {"dataset": ("data", "source"), "encoder": ("encoder", "name"), "loss": ("loss", "name")}


@dataclass(frozen=True)
class Own:
    """What the user has brought; None where the recipe names one of ours. encoder: wrapped once the data are known."""

    dataset: Any = None
    encoder: nn.Module | None = None
    loss: nn.Module | None = None
    wrapped: OwnEncoder | None = None

    def name(self, what: str) -> str | None:
        """As a recipe has it."""
        thing = getattr(self, what)
        return None if thing is None else f"{PREFIX}{type(thing).__name__}"

    def check(self, recipe: Recipe, where: str = "") -> None:
        """Every object that the recipe speaks of is here, and is of the class that it names."""
        for what, (section, key) in _SECTIONS.items():
            part = getattr(recipe, section)
            wanted = part.get(key, "") if isinstance(part, dict) else getattr(part, key)
            name = str(wanted).removeprefix(PREFIX)
            if is_own(wanted) and getattr(self, what) is None:
                raise ValueError(
                    f"{where}the {what} is an object of the user's own ({name}); give it again in Python: "
                    f"training.resume(folder, {what}=…), or training.train for a new run"
                )
            if is_own(wanted) and self.name(what) != wanted:
                raise ValueError(f"{where}the {what} was a {name}, got a {type(getattr(self, what)).__name__}")
            if getattr(self, what) is not None and not is_own(wanted):
                raise ValueError(f"{where}the {what} is {wanted!r}, by name; leave the object out")

    def wrap(self, example: Tensor) -> "Own":
        """With the encoder as the trainer takes it; example: two items as it will see them."""
        return self if self.encoder is None else replace(self, wrapped=OwnEncoder(self.encoder, example))

    def write(self, folder: Path) -> None:
        """The weights of the start, for a run that is stopped and goes on with objects that were made anew."""
        from safetensors.torch import save

        state = {key: value.contiguous() for key, value in self._state().items()}
        if state:
            files.write_bytes(folder / BEGUN, save(state))

    def begin_with(self, folder: Path) -> None:
        """The weights of the start from the folder of a run; other ones than those it began with are refused."""
        from safetensors.torch import load

        if not (folder / BEGUN).is_file():
            return
        begun, mine = load((folder / BEGUN).read_bytes()), self._state()
        for what in ("encoder", "loss"):
            was, now = ({k: tuple(v.shape) for k, v in s.items() if k.startswith(f"{what}.")} for s in (begun, mine))
            if was != now:
                other = sorted(was.items() ^ now.items())[0][0]
                raise ValueError(f"{folder}: the {what} is not the one that the run began with: {other} differs")
        if self.wrapped is not None:
            weights = {k.removeprefix("encoder."): v for k, v in begun.items() if k.startswith("encoder.")}
            self.wrapped.begin_with(weights)

    def _state(self) -> dict[str, Tensor]:
        encoder = {} if self.wrapped is None else self.wrapped.initial
        loss = {} if self.loss is None else self.loss.state_dict()
        kept = {f"encoder.{key}": value for key, value in encoder.items()}
        return kept | {f"loss.{key}": value.detach().clone().cpu() for key, value in loss.items()}


NONE = Own()


def is_own(name: object) -> bool:
    return str(name).startswith(PREFIX)


def way_on(recipe: Recipe, folder: Path) -> str:
    """How a run that was stopped goes on."""
    if any(is_own(name) for name in (recipe.data.source, recipe.encoder.get("name"), recipe.loss.get("name"))):
        return f"training.resume({str(folder)!r}, …) and the same objects"
    return f"nearkin train --resume {folder}"


def own_of(source: Any, encoder: Any, loss: Any) -> Own:
    """The objects among what `training.train` was given."""
    for what, thing in (("encoder", encoder), ("loss", loss)):
        if thing is not None and not isinstance(thing, str | nn.Module):
            raise TypeError(f"{what} must be a name or a torch.nn.Module, got {type(thing).__name__}")
    if source is None or isinstance(source, str | Path | Recipe):
        dataset = None
    elif hasattr(source, "__getitem__") and hasattr(source, "__len__") and not isinstance(source, list | tuple | dict):
        dataset = source
    else:
        raise TypeError(
            f"source must be a path, a name, a Recipe or a dataset with a length and dataset[i] = (tensor, label), got "
            f"{type(source).__name__}"
        )
    module = {"encoder": encoder, "loss": loss}
    own = {what: one if isinstance(one, nn.Module) else None for what, one in module.items()}
    return Own(dataset, own["encoder"], own["loss"])


class DatasetRows:
    """The items of a dataset as rows, asked for when they are needed."""

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
        """Item i as a report shows it, (H, W) or (H, W, 3); None where it is no picture."""
        if len(self.shape) != 4 or self.shape[1] not in (1, 3):
            return None
        picture = self._item(i).float()
        low, high = float(picture.min()), float(picture.max())
        if high > 255 or low < 0 or (high > 1 and self._item(i).is_floating_point()):  # normalised by the dataset
            picture = (picture - low) / max(high - low, 1e-12)
        elif high > 1:
            picture = picture / 255
        shown = (255 * picture).round().byte().permute(1, 2, 0).numpy()
        found: NDArray[np.uint8] = shown[:, :, 0] if shown.shape[2] == 1 else shown
        return found

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
    called = [str(label) for label in present.tolist()]
    if isinstance(listed, list | tuple) and labels.dtype.kind != "U" and present[0] >= 0 and present[-1] < len(listed):
        called = [str(listed[label]) for label in present]
    return Items(
        name=name, names=names, classes=called, labels=ids.astype(np.int64), note=f"{name}: no split of its own"
    )


def _labels(dataset: Any) -> NDArray[Any]:
    known = next((getattr(dataset, key) for key in ("targets", "labels") if hasattr(dataset, key)), None)
    if known is None or len(known) != len(dataset):
        known = [_pair(dataset, i)[1] for i in range(len(dataset))]
    if isinstance(known, Tensor):
        known = known.detach().cpu().numpy()
    found = np.asarray([one.tolist() if isinstance(one, Tensor) else one for one in known])
    several = found.ndim > 2 or (found.ndim == 2 and found.dtype.kind != "f")
    if found.dtype.kind not in "iufU" or several:
        raise ValueError(
            f"labels of the dataset must be whole numbers, names or (continuous) floats, one an item, got "
            f"{found.dtype} of shape {found.shape}"
        )
    return found


def _pair(dataset: Any, i: int) -> tuple[Tensor, Any]:
    found = dataset[i]
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise ValueError(f"dataset[{i}] must be (tensor, label), got {type(found).__name__}")
    item, label = found
    if isinstance(item, np.ndarray):
        item = torch.from_numpy(np.ascontiguousarray(item))
    if not isinstance(item, Tensor):
        hint = "; torchvision's transforms.ToTensor() makes one" if hasattr(item, "convert") else ""
        raise TypeError(f"dataset[{i}] must be (tensor, label), got a {type(item).__name__}{hint}")
    return item.detach(), label
