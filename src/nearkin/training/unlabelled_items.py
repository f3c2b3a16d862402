"""The pictures without labels of a run: read, decoded, and told apart from those that are held out."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearkin import data
from nearkin.data.item_set import Items
from nearkin.data.sources import AS_BEFORE
from nearkin.data.splits import Parts
from nearkin.training.config.recipe import Recipe

__all__ = ["StackedRows", "UnlabelledItems", "gather_items", "load_folder", "note"]

SHOWN = 1000  # left-out pictures that data.json lists; all are counted


class StackedRows:
    """Chosen rows of several arrays (N, S, S, C) one after the other, without a copy of them."""

    def __init__(self, parts: Sequence[tuple[NDArray[Any], NDArray[np.int64]]]) -> None:
        self.parts = [(rows, indices) for rows, indices in parts if len(indices)]
        self.starts = np.cumsum([0, *(len(indices) for _, indices in self.parts)])
        first = self.parts[0][0]
        self.dtype, self.shape = first.dtype, (int(self.starts[-1]), *first.shape[1:])
        self.nbytes = int(np.prod(self.shape)) * first.dtype.itemsize

    def __len__(self) -> int:
        return int(self.starts[-1])

    def take(self, indices: NDArray[np.int64], *_: Any, **__: Any) -> NDArray[Any]:
        """Those rows, copied; `np.take` calls it, with its other arguments."""
        taken = np.empty((len(indices), *self.shape[1:]), self.dtype)
        part = np.searchsorted(self.starts, indices, side="right") - 1
        for number, (rows, chosen) in enumerate(self.parts):
            places = np.flatnonzero(part == number)
            if len(places):
                taken[places] = np.take(rows, chosen[indices[places] - self.starts[number]], axis=0)
        return taken

    def __getitem__(self, part: slice) -> NDArray[Any]:
        return self.take(np.arange(len(self))[part])


@dataclass(frozen=True)
class UnlabelledItems:
    """What a pretraining sees."""

    rows: StackedRows
    record: dict[str, Any]  # what data.json says of them, with their fingerprint


def load_folder(recipe: Recipe) -> Items:
    """The items of `unlabelled.folder`, whatever their labels."""
    folder = recipe.unlabelled.folder
    assert folder is not None
    recipe.check_typed("unlabelled.folder", "the run")
    try:
        options: dict[str, Any] = {"split_folders": AS_BEFORE, "allow_outside": recipe.allow_outside}
        items = data.load(folder, labelled=False, **options)  # its labels are not read
    except ValueError as error:
        raise ValueError(f"unlabelled.folder: {error}") from None
    if items.pictures is None:
        raise ValueError(f"unlabelled.folder must hold pictures, got vectors: {folder}")
    return items


def gather_items(
    recipe: Recipe,
    folder: tuple[Items, NDArray[Any], list[str], list[tuple[int, str]]] | None,
    labelled: tuple[Items, Parts, NDArray[Any], list[str]] | None,
) -> UnlabelledItems:
    """The distinct pictures of the folder and of the training part, without those that are held out.

    folder: items, pixels, digests of the files, and which could not be read; None: the training part alone.
    labelled: items, parts, pixels and digests of the labelled source; None: there is none. Pictures are compared by
    their files: of equal ones the first counts, and one that is also in validation, test or gallery is left out, unless
    `unlabelled.held_out` is "keep".
    """
    options = recipe.unlabelled
    seen: dict[str, None] = {}  # digests, in the order of the pictures
    held: dict[str, str] = {}
    parts: list[tuple[NDArray[Any], NDArray[np.int64]]] = []
    record: dict[str, Any] = {"folder": options.folder, "pictures": 0, "of_training_part": 0}
    digest = hashlib.sha256()
    if labelled is not None:
        items, split, pixels, digests = labelled
        for name in ("val", "test", "gallery"):
            indices = getattr(split, name)
            held |= {digests[i]: items.names[i] for i in (() if indices is None else indices.tolist())}
        if options.own_part is not False:
            own = _distinct(split.train.tolist(), digests, seen, set() if options.held_out == "keep" else set(held))
            parts.append((pixels, own))
            record["of_training_part"] = len(own)
    left: list[dict[str, str]] = []
    if folder is not None:
        items, pixels, digests, bad = folder
        unread = {i for i, _ in bad}
        readable = [i for i in range(len(items)) if i not in unread]
        left = [{"path": items.names[i], "same_as": held[digests[i]]} for i in readable if digests[i] in held]
        drop = set() if options.held_out == "keep" else set(held)
        chosen = _distinct(readable, digests, seen, drop)
        parts.append((pixels, chosen))
        same = len(readable) - len(chosen) - (len(left) if drop else 0)
        record |= {"files": len(items), "unreadable": len(bad), "duplicates": same}
    for text in seen:
        digest.update(text.encode())
    record["pictures"] = sum(len(indices) for _, indices in parts)
    record["held_out"] = {"files": len(left), "kept": options.held_out == "keep", "shown": left[:SHOWN]}
    if not record["pictures"]:
        raise ValueError(
            f"{options.folder}: no picture is left to pretrain on: all {len(left)} are also in validation or test"
        )
    return UnlabelledItems(StackedRows(parts), record | {"fingerprint": digest.hexdigest()})


def _distinct(
    indices: Sequence[int], digests: Sequence[str], seen: dict[str, None], drop: set[str]
) -> NDArray[np.int64]:
    """Those whose file was not seen before and is not to be dropped; the seen ones grow by them."""
    chosen = []
    for i in indices:
        if digests[i] not in seen and digests[i] not in drop:
            seen[digests[i]] = None
            chosen.append(i)
    return np.array(chosen, np.int64)


def note(record: Mapping[str, Any], pretrained: bool) -> str:
    """What a pretraining sees, in one sentence. pretrained: the encoder has learned from other pictures before."""
    own, held = record.get("of_training_part", 0), record.get("held_out") or {}
    text = f"pretrains on {record['pictures']:,} pictures without labels"
    text += f", of which {own:,} are those of the training part" if own else ""
    if held.get("files"):
        what = "are taken all the same" if held["kept"] else "are left out"
        text += f"; {held['files']:,} files that are also in validation or test {what} (data.json lists them)"
    if pretrained:
        text += "; on birds this cost an encoder with ImageNet weights accuracy: compare with a run without it"
    return text
