"""Coarser levels of classes: the family of a species, the script of a letter."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["FINEST", "Level", "check_names", "levels_of", "refuse"]

Ints = NDArray[np.int64]
FINEST = "class"  # the name of the level that the classes themselves are


class Level(NamedTuple):
    """A coarser level of a set's classes.

    name      of the level: "family"
    classes   its classes
    of_class  (C,) to which of them each class of the set belongs
    """

    name: str
    classes: list[str]
    of_class: Ints


def check_names(source: str, names: Sequence[str]) -> None:
    """Refuses names of levels that are empty, equal, or that of the classes themselves."""
    for number, name in enumerate(names):
        if not isinstance(name, str) or not name.strip():
            raise ValueError(f"{source}: the name of a level must be text, got {name!r}")
        if name.lower() in (FINEST, "label"):
            raise ValueError(f'{source}: levels are those above the classes themselves, got "{name}"; leave it out')
        if name in names[:number]:
            raise ValueError(f'{source}: levels must have different names, got "{name}" twice')


def refuse(source: str, levels: Sequence[str], known: Sequence[str] = ()) -> None:
    """Refuses levels that a source does not have."""
    for name in levels:
        if name not in known:
            there = f"it has {', '.join(known)}" if known else "it has none"
            raise ValueError(f'{source}: no level "{name}"; {there}')


def levels_of(source: str, classes: Sequence[str], labels: Ints, columns: Mapping[str, Sequence[str]]) -> list[Level]:
    """The levels of a set from columns with one entry per item, the finest first.

    Each class must be in one class of the first column only, each of those in one of the second, and so on.
    """
    levels: list[Level] = []
    finer, of_item, finer_name = list(classes), np.asarray(labels), FINEST
    for name, column in columns.items():
        coarser, ids = np.unique(np.array(column, dtype=str), return_inverse=True)
        ids = ids.astype(np.int64)
        above = np.full(len(finer), -1, np.int64)  # of each class of the finer level
        above[of_item] = ids
        wrong = np.flatnonzero(above[of_item] != ids)
        if len(wrong):
            item = int(wrong[0])
            kind, both = finer[of_item[item]], sorted((str(coarser[ids[item]]), str(coarser[above[of_item[item]]])))
            raise ValueError(
                f'{source}: a {finer_name} must be in one {name}, "{kind}" is in "{both[0]}" and in "{both[1]}"'
            )
        if len(coarser) < 2:
            raise ValueError(f'{source}: level "{name}" must have at least 2 classes, got "{coarser[0]}" only')
        below = levels[-1].of_class if levels else np.arange(len(classes))
        levels.append(Level(name, [str(kind) for kind in coarser], above[below]))
        finer, of_item, finer_name = levels[-1].classes, ids, name
    return levels
