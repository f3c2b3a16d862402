"""Objects on a turntable: COIL-20, whose pose is a continuous label."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearkin.data import matlab
from nearkin.data.benchmarks.layout import Facts, absent, by_mark, by_pattern, counted, trees
from nearkin.data.item_set import Arrays, Items

__all__ = ["COIL20", "coil20"]

COIL20 = Facts(
    "coil20",
    "20 objects on a turntable, 72 poses each: the object is the class, the pose a continuous label",
    "coil-20-proc.zip",
    "https://cave.cs.columbia.edu/repository/COIL-20",
    "ROOT/coil-20-proc.zip or ROOT/coil-20-proc/obj1__0.png … (or COIL20_32x32.mat with X and Y, or COIL20.mat)",
    {"pictures": 1440, "objects": 20},
)
STEP = 5.0  # degrees from one pose to the next
MATLAB = ("COIL20_32x32.mat", "COIL20.mat")


def coil20(root: Path | None, partial: bool = False) -> Items:
    """Targets are (cos, sin) of the angle, so that 355 degrees are next to 0."""
    if root is None or not root.exists():
        raise absent(COIL20, root)
    if any(name.split("/")[-1] in MATLAB for tree in trees(root) for name in tree.files):
        tree, mark = by_mark(COIL20, root, *MATLAB)
        pixels, objects = _matlab(tree.read(mark), mark)
        poses = _places(objects)
        names, pictures = [f"obj{o}__{p}" for o, p in zip(objects, poses, strict=True)], Arrays(pixels)
        return _items(names, objects, poses, pictures, partial, f" ({pixels.shape[1]} px, poses by their order)")
    matches = by_pattern(COIL20, root, r"obj(\d+)__(\d+)\.(?:png|pgm)", "obj1__0.png")
    order = sorted(range(len(matches.names)), key=lambda i: tuple(map(int, matches.groups[i])))
    objects, poses = (np.array([int(matches.groups[i][g]) for i in order], np.int64) for g in range(2))
    names = [matches.names[i] for i in order]
    return _items(names, objects, poses, matches.tree.pictures(names), partial, "")


def _items(
    names: list[str], objects: NDArray[np.int64], poses: NDArray[np.int64], pictures: Any, partial: bool, how: str
) -> Items:
    kinds, labels = np.unique(objects, return_inverse=True)
    angle = np.radians(STEP * poses)
    note = counted(COIL20, {"pictures": len(names), "objects": len(kinds)}, partial)
    return Items(
        name="coil20",
        names=names,
        classes=[f"obj{kind}" for kind in kinds],
        labels=labels.reshape(-1).astype(np.int64),
        targets=np.stack([np.cos(angle), np.sin(angle)], axis=1),
        pictures=pictures,
        note=f"{note}{how}; targets are (cos, sin) of the pose; no split of its own",
    )


def _matlab(content: bytes, source: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Rows of square pictures, stored column by column, and the object of each, from 1."""
    stored = matlab.read(content, source)
    rows, kinds = stored.get("X", stored.get("fea")), stored.get("Y", stored.get("gnd"))
    side = 0 if rows is None or rows.ndim != 2 else round(rows.shape[1] ** 0.5)
    if rows is None or kinds is None or side == 0 or side * side != rows.shape[1] or kinds.size != len(rows):
        raise ValueError(f"coil20: {source} must have square pictures X (N, side²) and objects Y (N,), or fea and gnd")
    if rows.dtype != np.uint8:
        scale = 255.0 if float(rows.max()) <= 1.0 else 1.0
        rows = np.clip(np.rint(rows * scale), 0, 255).astype(np.uint8)
    pixels = np.ascontiguousarray(rows.reshape(-1, side, side).transpose(0, 2, 1))
    return pixels, kinds.astype(np.int64).ravel()


def _places(objects: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, 1, 2, … within each object: the poses of an object are in the order of the turntable."""
    places = np.zeros(len(objects), np.int64)
    for kind in np.unique(objects):
        inside = objects == kind
        places[inside] = np.arange(inside.sum())
    return places
