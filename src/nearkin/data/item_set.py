"""The items of a set, and sequences of pictures that any thread can read one by one."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nearkin.core import checks
from nearkin.data.levels import Level

__all__ = ["PARTS", "Arrays", "Items", "Pairs", "Pictures", "Several"]

Picture: TypeAlias = bytes | NDArray[np.uint8]
PARTS = ("train", "val", "test", "query", "gallery")


class Pictures(Protocol):
    """A sequence of pictures: random access, safe to read from several threads and processes."""

    def __len__(self) -> int: ...

    def read(self, i: int) -> Picture:
        """The bytes of an image file, or pixels (H, W) or (H, W, 3); an OSError or ValueError if unreadable."""

    def stamp(self, i: int) -> str:
        """Changes when the picture does, without decoding it: for files, path, size and time."""

    def take(self, indices: ArrayLike) -> "Pictures":
        """Those pictures, in that order."""


class Pairs(NamedTuple):
    """Pairs to verify: positions of two items (M, 2), whether they match (M,), and the fold of the protocol (M,)."""

    items: NDArray[np.int64]
    same: NDArray[np.bool_]
    fold: NDArray[np.int64]


class Arrays:
    """Pictures in memory: uint8, (N, H, W) or (N, H, W, 3)."""

    def __init__(self, pixels: NDArray[np.uint8]) -> None:
        if pixels.dtype != np.uint8 or not (pixels.ndim == 3 or (pixels.ndim == 4 and pixels.shape[3] == 3)):
            raise ValueError(
                f"pixels must be uint8 of shape (N, H, W) or (N, H, W, 3), got {pixels.dtype} {pixels.shape}"
            )
        self.pixels = pixels

    def __len__(self) -> int:
        return len(self.pixels)

    def read(self, i: int) -> NDArray[np.uint8]:
        picture: NDArray[np.uint8] = self.pixels[i]
        return picture

    def stamp(self, i: int) -> str:
        picture = np.ascontiguousarray(self.pixels[i])
        return f"{hashlib.sha256(picture.tobytes()).hexdigest()} {picture.shape}"

    def take(self, indices: ArrayLike) -> "Arrays":
        return Arrays(self.pixels[checks.indices(indices, len(self))])


class Several:
    """Several sequences of pictures as one: those of the first, then those of the second, …"""

    def __init__(self, parts: Sequence[Pictures], where: Sequence[tuple[int, int]] | None = None) -> None:
        self.parts = list(parts)
        every = [(p, i) for p, part in enumerate(self.parts) for i in range(len(part))]
        self.where = every if where is None else list(where)  # of each picture: its part, and its position there

    def __len__(self) -> int:
        return len(self.where)

    def read(self, i: int) -> Picture:
        part, place = self.where[i]
        return self.parts[part].read(place)

    def stamp(self, i: int) -> str:
        part, place = self.where[i]
        return self.parts[part].stamp(place)

    def take(self, indices: ArrayLike) -> "Several":
        return Several(self.parts, [self.where[i] for i in checks.indices(indices, len(self))])


@dataclass(frozen=True, eq=False)
class Items:
    """A set of N items: pictures or vectors, with classes, continuous targets or both.

    name          of the source, as the user wrote it: "glyphs", "photos/"
    names         (N,) of the items, for messages: a relative path, "row 17"; no two are equal
    classes       label c is classes[c]; [] where there are only targets
    labels        (N,) class ids, or None
    targets       (N,) or (N, K) continuous labels, or None
    split         (N,) of `PARTS`: the publisher's or the user's split, or None
    closed_split  (N,) the publisher's other split, in which every class is in every part, or None
    pictures      the images; None for vectors
    vectors       (N, D) float32; None for images
    groups        (N,) names of the bursts, cameras, writers, … of the items; "" for an item that shares its group with
                  none; None where there are no groups
    pairs         the pairs of a verification protocol, or None
    note          one line for reports: what was read, and with which split
    ignored       what was skipped, one line per reason
    levels        coarser levels of the classes, the finest first; [] where none was asked for
    """

    name: str
    names: list[str]
    classes: list[str] = field(default_factory=list)
    labels: NDArray[np.int64] | None = None
    targets: NDArray[np.float64] | None = None
    split: list[str] | None = None
    pictures: Pictures | None = None
    vectors: NDArray[np.float32] | None = None
    pairs: Pairs | None = None
    note: str = ""
    closed_split: list[str] | None = None
    ignored: list[str] = field(default_factory=list)
    groups: list[str] | None = None

    levels: list[Level] = field(default_factory=list)

    def __post_init__(self) -> None:
        columns: dict[str, Any] = {
            key: getattr(self, key)
            for key in ("labels", "targets", "split", "closed_split", "pictures", "vectors", "groups")
        }
        for key, column in columns.items():
            if column is not None and len(column) != len(self.names):
                raise ValueError(f"{key} must have one entry per item: {len(self.names)} items, {len(column)} {key}")
        parts = set(self.split or ()) | set(self.closed_split or ())
        if parts - set(PARTS):
            raise ValueError(f"{self.name}: split must be {', '.join(PARTS)}, got {sorted(parts - set(PARTS))[0]!r}")
        if (
            self.labels is not None
            and len(self.labels)
            and not 0 <= self.labels.min() <= self.labels.max() < len(self.classes)
        ):
            raise ValueError(f"{self.name}: labels must be from 0 to {len(self.classes) - 1}, got {self.labels.max()}")
        for level in self.levels:
            if len(level.of_class) != len(self.classes):
                raise ValueError(
                    f'{self.name}: level "{level.name}" must have one entry per class: {len(self.classes)} classes, '
                    f"{len(level.of_class)} entries"
                )

    def __len__(self) -> int:
        return len(self.names)

    def take(self, indices: ArrayLike) -> "Items":
        """Those items, in that order; labels and classes stay, pairs that lose an item are dropped."""
        chosen = checks.indices(indices, len(self))

        def pick(column: list[str] | None) -> list[str] | None:
            return None if column is None else [column[i] for i in chosen]

        return replace(
            self,
            names=[self.names[i] for i in chosen],
            labels=None if self.labels is None else self.labels[chosen],
            targets=None if self.targets is None else self.targets[chosen],
            split=pick(self.split),
            closed_split=pick(self.closed_split),
            groups=pick(self.groups),
            pictures=None if self.pictures is None else self.pictures.take(chosen),
            vectors=None if self.vectors is None else self.vectors[chosen],
            pairs=None if self.pairs is None else _pairs_among(self.pairs, chosen, len(self)),
        )


def _pairs_among(pairs: Pairs, chosen: NDArray[np.int64], count: int) -> Pairs:
    place = np.full(count, -1, np.int64)  # old place → new place
    place[chosen] = np.arange(len(chosen))
    moved = place[pairs.items].reshape(-1, 2)
    both = (moved >= 0).all(1)
    return Pairs(moved[both], pairs.same[both], pairs.fold[both])
