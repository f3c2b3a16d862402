"""Small pictures of signs and clothes: Omniglot and Fashion-MNIST."""

import gzip
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nearkin.data.benchmarks.layout import Facts, absent, by_mark, counted
from nearkin.data.file_tree import Archive, Tree, by_bytes, is_image
from nearkin.data.folders import numbered
from nearkin.data.item_set import Arrays, Items, Several

__all__ = ["FASHION_MNIST", "OMNIGLOT", "fashion_mnist", "omniglot"]

OMNIGLOT = Facts(
    "omniglot",
    "handwriting: 32,460 drawings of 1,623 characters, official background to train, evaluation to test",
    "images_background.zip and images_evaluation.zip",
    "https://github.com/brendenlake/omniglot",
    "ROOT/images_background.zip, images_evaluation.zip, or the folders they unpack to, ROOT/images_background/Greek/…",
    {"train drawings": 19280, "test drawings": 13180, "train classes": 964, "test classes": 659},
)
# The publisher's two small background sets share two alphabets; they are read as their union.
SMALL = {"images_background_small1": 136, "images_background_small2": 156}
FASHION_MNIST = Facts(
    "fashion-mnist",
    "clothes: 70,000 pictures of 28 px, 10 classes, official closed-set split",
    "the four files train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz, t10k-images-idx3-ubyte.gz, "
    "t10k-labels-idx1-ubyte.gz",
    "https://github.com/zalandoresearch/fashion-mnist",
    "ROOT/train-images-idx3-ubyte.gz … (also unpacked)",
    {"train pictures": 60000, "test pictures": 10000, "classes": 10},
)
GARMENTS = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


def omniglot(root: Path | None, partial: bool = False) -> Items:
    """A class is a character of an alphabet. Without both full sets, the small background sets are read."""
    if root is None or not root.exists():
        raise absent(OMNIGLOT, root)
    full = {name: tree for name in ("images_background", "images_evaluation") if (tree := _set(root, name))}
    small = {name: tree for name in SMALL if (tree := _set(root, name))}
    if len(full) == 2 or (partial and full):
        marks = {"images_background": "train", "images_evaluation": "test"}
        return _drawings(full, marks, lambda counts: counted(OMNIGLOT, counts, partial) + "; official split")
    if small and not full:
        _small_are_whole(small, partial)
        sets = " and ".join(name.removeprefix("images_") for name in small)
        return _drawings(small, {}, lambda counts: f"omniglot, in part: the union of {sets}; no split of its own")
    missing = "images_evaluation" if "images_background" in full else "images_background"
    raise absent(OMNIGLOT, root, f"no {missing} as a folder or .zip")


def _small_are_whole(small: dict[str, Tree], partial: bool) -> None:
    for name, tree in small.items():
        kinds = len({file.rsplit("/", 1)[0] for file in tree.files if is_image(file)})
        if kinds != SMALL[name] and not partial:
            raise ValueError(f"omniglot: {name} must have {SMALL[name]} characters, found {kinds}; it is incomplete")


def _set(root: Path, name: str) -> Tree | None:
    """`name` as a folder at the root or one below, or as a .zip there, or as the root itself."""
    for path in [root, root / name, *sorted(root.glob(f"*/{name}"))]:
        if path.name == name and path.is_dir():
            return Tree(path)
    for path in [root, root / f"{name}.zip", *sorted(root.glob(f"*/{name}.zip"))]:
        if path.name == f"{name}.zip" and path.is_file():
            return Tree(Archive(path), f"{name}/")
    return None


def _drawings(sets: dict[str, Tree], marks: dict[str, str], note: Callable[[dict[str, int]], str]) -> Items:
    """The union of the sets by alphabet, character and file: a drawing in two of them is read once."""
    place_of: dict[str, tuple[str, str]] = {}  # alphabet/character/file → set, name in it
    for key, tree in sets.items():
        for name in tree.files:
            if is_image(name) and name.count("/") == 2:
                place_of.setdefault(name, (key, name))
    names = sorted(place_of, key=by_bytes)
    classes, labels = numbered([name.rsplit("/", 1)[0] for name in names])
    homes = [place_of[name][0] for name in names]
    keys = list(sets)
    parts = [[name for name, home in zip(names, homes, strict=True) if home == key] for key in keys]
    place = {(key, name): (k, i) for k, key in enumerate(keys) for i, name in enumerate(parts[k])}
    pictures = Several(
        [sets[key].pictures(part) for key, part in zip(keys, parts, strict=True)],
        [place[home, name] for home, name in zip(homes, names, strict=True)],
    )
    split = [marks[home] for home in homes] if marks else None
    counts: dict[str, int] = {}
    for mark in dict.fromkeys(split or []):
        counts[f"{mark} drawings"] = (split or []).count(mark)
        inside = np.array([s == mark for s in split or []])
        counts[f"{mark} classes"] = len(np.unique(labels[inside]))
    return Items("omniglot", names, classes, labels, split=split, pictures=pictures, note=note(counts))


def fashion_mnist(root: Path | None, partial: bool = False) -> Items:
    """The four idx files, packed or not. Train and test share their classes."""
    marks = ("train-images-idx3-ubyte.gz", "train-images-idx3-ubyte")
    tree, mark = by_mark(FASHION_MNIST, root, *marks)
    ending = mark.removeprefix("train-images-idx3-ubyte")
    images, labels, split = [], [], []
    for part, prefix in (("train", "train"), ("test", "t10k")):
        pixels = _idx(tree, f"{prefix}-images-idx3-ubyte{ending}", 3)
        kinds = _idx(tree, f"{prefix}-labels-idx1-ubyte{ending}", 1)
        if len(pixels) != len(kinds) or (len(kinds) and kinds.max() > 9):
            raise ValueError(f"fashion-mnist: the {part} labels do not fit its pictures: {len(pixels)}, {len(kinds)}")
        images.append(pixels)
        labels.append(kinds.astype(np.int64))
        split += [part] * len(kinds)
    every = np.concatenate(labels)
    counts = {f"{part} pictures": split.count(part) for part in ("train", "test")} | {"classes": len(np.unique(every))}
    note = counted(FASHION_MNIST, counts, partial) + "; official split, closed-set"
    return Items(
        name="fashion-mnist",
        names=[
            f"{part} {i}" for part, size in zip(("train", "test"), map(len, labels), strict=True) for i in range(size)
        ],
        classes=list(GARMENTS),
        labels=every,
        split=split,
        pictures=Arrays(np.concatenate(images)),
        note=note,
    )


def _idx(tree: Tree, name: str, axes: int) -> NDArray[np.uint8]:
    """An idx file of bytes: two zeros, type 8, the number of axes, their lengths, the values."""
    if not tree.has(name):
        raise absent(FASHION_MNIST, Path(str(tree)), f"no {name}")
    content = tree.read(name)
    try:
        if name.endswith(".gz"):
            content = gzip.decompress(content)
        zeros, kind, depth = struct.unpack_from(">HBB", content)
        shape = struct.unpack_from(f">{axes}I", content, 4)
        values = np.frombuffer(content, np.uint8, offset=4 + 4 * axes)
        if (zeros, kind, depth) != (0, 8, axes) or values.size != int(np.prod(shape, dtype=np.int64)):
            raise ValueError("its size does not fit its heading")
    except (OSError, EOFError, zlib.error, struct.error, ValueError) as error:
        raise ValueError(f"fashion-mnist: {name} is corrupt ({error})") from None
    return values.reshape(shape)
