"""A folder of class folders: `photos/heron/1.jpg`, also divided into `photos/train/heron/1.jpg` and so on."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nearkin.data.file_tree import Tree, by_bytes, is_image, open_tree, printable
from nearkin.data.item_set import Items
from nearkin.data.levels import levels_of

__all__ = ["SPLIT_NAMES", "numbered", "read"]

_ALIASES = {"train": "training", "val": "valid validation dev", "test": "testing", "query": "queries", "gallery": ""}
SPLIT_NAMES = {name: part for part, others in _ALIASES.items() for name in (part, *others.split())}


def read(path: Path, name: str, labelled: bool = True, levels: Sequence[str] = ()) -> Items:
    """The class of an image is its first folder, or the second where the first ones are train, val, test.

    levels: names of the folders around a class folder, from the inside out; then a class is a folder in so many others.
    labelled=False: also takes images outside class folders; then no image has a class.
    """
    tree = open_tree(path)
    files = tree.files
    images = [file for file in files if is_image(file)]
    if not images:
        what = "holds no files" if not files else f"holds no images: {len(files)} files, such as {printable(files[0])}"
        raise ValueError(f"{name}: it {what}; a class is a folder of images, as in photos/heron/1.jpg")
    top = _common(images) if not path.is_dir() else ""  # archives often have one folder for everything
    steps = [image[len(top) :].split("/") for image in images]
    split = _is_split(steps)
    first = 1 if split else 0  # of the folders that name classes
    depth = first + 1 + len(levels)
    inside = [i for i, step in enumerate(steps) if len(step) > depth]
    if not labelled and len(inside) < len(images):
        return _unlabelled(tree, name, images)
    if not inside:
        example = "/".join(["photos", *(f"{level.upper()}" for level in reversed(levels)), "heron", "1.jpg"])
        raise ValueError(
            f"{name}: its {len(images)} images are in no class folder; a class is a folder of images, as in {example}"
        )
    chosen = [images[i] for i in inside]
    classes, labels = numbered(["/".join(steps[i][first:depth]) for i in inside])
    if labelled and not levels and len(classes) == 1 and all(len(steps[i]) > depth + 1 for i in inside):
        deeper = os.path.join(name, top, *steps[inside[0]][:depth])
        raise ValueError(
            f'{name}: its one class folder "{classes[0]}" holds folders; did you mean "{printable(deeper)}"?'
        )
    marks = [SPLIT_NAMES[steps[i][0].lower()] for i in inside] if split else None
    return Items(
        name=name,
        names=[printable(image) for image in chosen],
        classes=[printable(kind) for kind in classes],
        labels=labels,
        split=marks,
        pictures=tree.pictures(chosen),
        note=f"{name}: " + (f"its own split ({', '.join(sorted(set(marks)))})" if marks else "no split of its own"),
        ignored=_ignored(files, images, inside, tree.hidden),
        levels=levels_of(
            name,
            [printable(kind) for kind in classes],
            labels,
            {
                level: [printable("/".join(steps[i][first : depth - number])) for i in inside]
                for number, level in enumerate(levels, 1)
            },
        ),
    )


def _unlabelled(tree: Tree, name: str, images: list[str]) -> Items:
    return Items(
        name=name,
        names=[printable(image) for image in images],
        pictures=tree.pictures(images),
        note=f"{name}: images without classes",
        ignored=_ignored(tree.files, images, list(range(len(images))), tree.hidden),
    )


def numbered(kinds: list[str]) -> tuple[list[str], NDArray[np.int64]]:
    """The classes, sorted by the bytes of their names, and the class id of each item."""
    classes = sorted(set(kinds), key=by_bytes)
    number = {kind: c for c, kind in enumerate(classes)}
    return classes, np.array([number[kind] for kind in kinds], np.int64)


def _common(images: list[str]) -> str:
    """The one folder that contains all class folders, with its "/"; "" if there is none."""
    first = images[0].split("/")[0] + "/"
    deep = all(image.startswith(first) and image.count("/") >= 2 for image in images)
    return first if deep and first[:-1].lower() not in SPLIT_NAMES else ""


def _is_split(steps: list[list[str]]) -> bool:
    """Whether the first folders are parts of a split: all have the name of a part, and contain folders."""
    first = {step[0].lower() for step in steps if len(step) > 1}
    deep = any(len(step) > 2 for step in steps)
    return deep and "train" in {SPLIT_NAMES.get(part) for part in first} and first <= SPLIT_NAMES.keys()


def _ignored(files: list[str], images: list[str], inside: list[int], hidden: int) -> list[str]:
    lines = [f"{hidden} hidden or system file{'s' * (hidden > 1)}"] if hidden else []
    other_files = len(files) - len(images)
    if other_files:
        example = next(file for file in files if not is_image(file))
        lines.append(f"{other_files} file{'s' * (other_files > 1)} that are no images, such as {printable(example)}")
    outside = len(images) - len(inside)
    if outside:
        among = set(inside)
        example = next(image for i, image in enumerate(images) if i not in among)
        lines.append(f"{outside} image{'s' * (outside > 1)} outside class folders, such as {printable(example)}")
    return lines
