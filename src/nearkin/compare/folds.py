"""Folds: the training classes shared out, so that each is validated on once and no fold's model has seen its own."""

import hashlib

import numpy as np
from numpy.typing import NDArray

from nearkin.core import checks
from nearkin.data.item_set import Items
from nearkin.data.splits import LEAST, Parts

__all__ = ["MOST", "folds"]

MOST = 64  # a training's seed is seed · 64 + fold


def folds(items: Items, of: NDArray[np.int64], count: int, seed: int) -> list[Parts]:
    """`count` ways to divide the items at the places `of` into training and validation classes; no test part.

    Classes go by a hash of (seed, name), so that their order in the source, or one class more, changes little. Every
    class validates in exactly one fold (Musgrave et al. 2020, section 3.2).
    """
    checks.integer("folds", count, 2)
    if count > MOST:
        raise ValueError(f"folds must be at most {MOST}, got {count}")
    assert items.labels is not None
    labels = items.labels[of]
    order = sorted(np.unique(labels).tolist(), key=lambda c: _hash(seed, items.classes[c]))
    needed = max(LEAST * count, 2 * LEAST)
    if len(order) < needed:
        most = len(order) // LEAST
        way_out = f"use --folds {most}" if most >= 2 else "a comparison needs 4 training classes at the least"
        raise ValueError(
            f"{items.name}: {count} folds need at least {needed} training classes, {LEAST} to validate each, "
            f"got {len(order)}; {way_out}"
        )
    found = []
    for fold in range(count):
        held = np.isin(labels, order[fold::count])
        nothing = np.empty(0, np.int64)
        found.append(Parts(np.sort(of[~held]), np.sort(of[held]), nothing, note=f"fold {fold + 1} of {count}"))
    return found


def _hash(seed: int, name: str) -> bytes:
    return hashlib.sha256(f"fold {seed} {name}".encode("utf-8", "surrogatepass")).digest()
