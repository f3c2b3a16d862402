"""A folder of class folders: `photos/heron/1.jpg`, also divided into `photos/train/heron/1.jpg` and so on."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nearkin.data import folder_layout as layout
from nearkin.data.file_tree import Tree, by_bytes, is_image, open_tree, printable
from nearkin.data.folder_layout import SPLIT_NAMES
from nearkin.data.item_set import Items
from nearkin.data.levels import levels_of

__all__ = ["SPLIT_NAMES", "WITHOUT", "numbered", "read"]

WITHOUT = ", since "  # in the note of items whose class folders are not read: why


def read(
    path: Path,
    name: str,
    labelled: bool = True,
    levels: Sequence[str] = (),
    split_folders: Sequence[str] | None = None,
    leaf_classes: bool = False,
) -> Items:
    """The class of an image is its first folder, or the first within a part, where folders are train, val, test.

    levels: names of the folders around a class folder, from the inside out; then a class is a folder in so many others.
    labelled=False: also takes images outside class folders; then no image has a class.
    split_folders: the parts, all else is left out; ("none",): there are none. None: by their names; what may be read in
    two ways is refused. leaf_classes: a class is a folder that holds images, named by its path.
    """
    if levels and leaf_classes:
        raise ValueError(f"{name}: levels and leaf_classes exclude each other, got both")
    tree = open_tree(path)
    files = tree.files
    every = [file for file in files if is_image(file)]
    if not every:
        what = "holds no files" if not files else f"holds no images: {len(files)} files, such as {printable(files[0])}"
        hint = "; a class is a folder of images, as in photos/heron/1.jpg" if labelled else ""
        raise ValueError(f"{name}: it {what}{hint}")
    top = _common(every) if not path.is_dir() else ""  # archives often have one folder for everything
    folders = _Folders(name, every, top, 1 + len(levels), split_folders, leaf_classes)
    images, steps, inside = folders.images, folders.steps, folders.inside
    if not labelled and (len(inside) < len(images) or (split_folders is None and layout.flat_split(steps))):
        return _unlabelled(tree, name, folders, files)
    if not inside:
        example = "/".join(["photos", *(f"{level.upper()}" for level in reversed(levels)), "heron", "1.jpg"])
        raise ValueError(
            f"{name}: its {len(images)} images are in no class folder; a class is a folder of images, as in {example}"
        )
    if split_folders is None:
        layout.check_layout(name, steps, folders.parts, inside)
    elif tuple(split_folders) != layout.AS_BEFORE:
        layout.check_depth(name, steps, folders.parts, inside)
    chosen = [images[i] for i in inside]
    classes, labels = numbered(["/".join(folders.class_folder(i)) for i in inside])
    if (
        labelled
        and not levels
        and not leaf_classes
        and len(classes) == 1
        and all(len(folders.within(i)) > 2 for i in inside)
    ):
        deeper = os.path.join(name, top, *folders.part_folder(inside[0]), classes[0])
        raise ValueError(
            f'{name}: its one class folder "{classes[0]}" holds folders; did you mean "{printable(deeper)}"?'
        )
    marks = [folders.parts[folders.part_folder(i)] for i in inside] if folders.parts else None
    return Items(
        name=name,
        names=[printable(image) for image in chosen],
        classes=[printable(kind) for kind in classes],
        labels=labels,
        split=marks,
        pictures=tree.pictures(chosen),
        note=f"{name}: " + (f"its own split ({', '.join(sorted(set(marks)))})" if marks else "no split of its own"),
        ignored=_ignored(files, folders, tree.hidden, folders.outside),
        levels=levels_of(
            name,
            [printable(kind) for kind in classes],
            labels,
            {
                level: [printable("/".join(folders.within(i)[: 1 + len(levels) - number])) for i in inside]
                for number, level in enumerate(levels, 1)
            },
        ),
    )


class _Folders:
    """Images by the folders around them: in which part, and in which class folder, they are.

    depth: of class folders within a part, or None where they are the folders that hold images.
    """

    def __init__(
        self,
        name: str,
        images: list[str],
        top: str,
        depth: int,
        split_folders: Sequence[str] | None,
        leaf_classes: bool,
    ) -> None:
        steps = [image[len(top) :].split("/") for image in images]
        named = split_folders is None or tuple(split_folders) == layout.AS_BEFORE
        self.parts = layout.named_parts(steps) if named else layout.explicit_parts(name, steps, split_folders or ())
        of = [layout.part_folder(step, self.parts) for step in steps]
        kept = [i for i, part in enumerate(of) if part or named or not self.parts]
        self.images = [images[i] for i in kept]
        self.steps = [steps[i] for i in kept]
        self._part = [of[i] for i in kept]
        self.left_out = [image for image, part in zip(images, of, strict=True) if not (part or named or not self.parts)]
        self._depth = None if leaf_classes else depth
        self.inside = [i for i in range(len(self.images)) if len(self.within(i)) > (self._depth or 1)]

    @property
    def outside(self) -> list[str]:
        """Images in no class folder."""
        inside = set(self.inside)
        return [image for i, image in enumerate(self.images) if i not in inside]

    def part_folder(self, i: int) -> tuple[str, ...]:
        """The folder of the part that image i is in; () where there are no parts."""
        return self._part[i]

    def within(self, i: int) -> list[str]:
        """The folders of image i within its part, and its file name."""
        return self.steps[i][len(self._part[i]) :]

    def class_folder(self, i: int) -> list[str]:
        return self.within(i)[: -1 if self._depth is None else self._depth]


def _unlabelled(tree: Tree, name: str, folders: _Folders, files: list[str]) -> Items:
    images, outside = folders.images, folders.outside
    why = ""
    if 0 < len(outside) < len(images):
        why = f"{WITHOUT}{len(outside):,} of {len(images):,} are in no class folder, such as {printable(outside[0])}"
    return Items(
        name=name,
        names=[printable(image) for image in images],
        pictures=tree.pictures(images),
        note=f"{name}: images without classes{why}",
        ignored=_ignored(files, folders, tree.hidden, []),
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


def _ignored(files: list[str], folders: _Folders, hidden: int, outside: list[str]) -> list[str]:
    lines = [f"{hidden} hidden or system file{'s' * (hidden > 1)}"] if hidden else []
    for skipped, what in (
        ([file for file in files if not is_image(file)], "file{s} that are no images"),
        (folders.left_out, "image{s} outside the folders of the parts"),
        (outside, "image{s} outside class folders"),
    ):
        if skipped:
            plural = what.format(s="s" * (len(skipped) > 1))
            lines.append(f"{len(skipped)} {plural}, such as {printable(skipped[0])}")
    return lines
