"""What a run leaves out of the items it was given: those that a list names, and near-duplicates across its parts.

A run records the names in data.json under "left_out", and the pairs under "near_duplicates"; a run that resumes, and
the evaluation of a finished one, take them from there, whatever has become of the list since.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearkin.data import left_out, near_duplicates
from nearkin.data.item_set import Items
from nearkin.data.splits import Parts, leave_out
from nearkin.training.config.recipe import Recipe

__all__ = ["COLUMNS", "Left", "again", "exclude", "listed", "near_setting"]

LISTED = 10_000  # pictures up to which near-duplicates are looked for by default, in seconds
SHOWN = 10_000  # pairs that are recorded; all are counted
COLUMNS = ("path", "part", "copy", "copy_part", "similarity", "dropped")
_ORDER = ("train", "val", "test")  # of two copies in different parts the one in the earlier part goes


class Left(NamedTuple):
    """The parts that remain, and what data.json records."""

    parts: Parts
    record: dict[str, Any]  # {} where nothing was looked for or left out


def near_setting(recipe: Recipe, pictures: int) -> str:
    """off, list or drop: what to do about near-duplicates."""
    return recipe.data.near or ("list" if pictures <= LISTED else "off")


def exclude(
    recipe: Recipe,
    items: Items,
    parts: Parts,
    pixels: NDArray[np.uint8] | None,
    digests: Sequence[str],
    callback: Any = lambda _: None,
) -> Left:
    """Leaves out what the recipe says. pixels: None where the items are no pictures."""
    record: dict[str, Any] = {}
    gone: dict[str, NDArray[np.int64]] = {}
    whole = parts
    if recipe.data.without is not None:
        gone["listed"] = _listed(recipe, items)
        parts = leave_out(items, parts, gone["listed"])
    if pixels is not None and recipe.data.near in ("list", "drop"):
        pairs = _near(recipe, parts, pixels, digests, callback)
        dropped = np.unique(pairs.pairs[:, 0]) if recipe.data.near == "drop" else np.empty(0, np.int64)
        record["near_duplicates"] = _near_record(items, parts, pairs, dropped)
        if len(dropped):
            gone["near-duplicates"] = dropped
            parts = leave_out(items, parts, dropped)
    if gone:
        record["left_out"] = _record(recipe, items, whole, parts, gone)
    return Left(parts, record)


def listed(recipe: Recipe, items: Items, parts: Parts) -> Parts:
    """The parts without the items that the recipe's list names."""
    return parts if recipe.data.without is None else leave_out(items, parts, _listed(recipe, items))


def again(items: Items, parts: Parts, start: Mapping[str, Any]) -> Left | None:
    """The same as a run has recorded when it began; None where it has recorded nothing."""
    record = {key: start[key] for key in ("left_out", "near_duplicates") if isinstance(start.get(key), dict)}
    if "left_out" not in record:
        return Left(parts, record) if record else None
    names = record["left_out"].get("items")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError('data.json: "left_out" must list its items by name; start a new run')
    known = set(items.names)
    present = left_out.positions(items, [name for name in names if name in known], "data.json")  # else it has changed
    return Left(leave_out(items, parts, present), record)


def _listed(recipe: Recipe, items: Items) -> NDArray[np.int64]:
    assert recipe.data.without is not None
    return left_out.positions(items, left_out.read(recipe.data.without), recipe.data.without)


def _near(
    recipe: Recipe, parts: Parts, pixels: NDArray[np.uint8], digests: Sequence[str], callback: Any
) -> near_duplicates.NearPairs:
    tested = parts.test if parts.gallery is None else np.concatenate([parts.test, parts.gallery])
    known = digests if recipe.data.cache is not False and digests else None

    def progress(done: int, total: int) -> None:
        callback({"event": "near", "done": done, "total": total})

    callback({"event": "near", "done": 0, "total": 0})
    return near_duplicates.find(pixels, [parts.train, parts.val, tested], digests=known, progress=progress)


def _part_names(parts: Parts) -> dict[int, str]:
    names = {int(i): part for part in _ORDER for i in getattr(parts, part)}
    return names if parts.gallery is None else names | {int(i): "gallery" for i in parts.gallery}


def _near_record(
    items: Items, parts: Parts, found: near_duplicates.NearPairs, dropped: NDArray[np.int64]
) -> dict[str, Any]:
    part_of, gone = _part_names(parts), set(dropped.tolist())
    pairs = [
        dict(
            zip(
                COLUMNS,
                (items.names[a], part_of[a], items.names[b], part_of[b], round(float(value), 4), a in gone),
                strict=True,
            )
        )
        for (a, b), value in zip(found.pairs[:SHOWN].tolist(), found.similarity[:SHOWN].tolist(), strict=True)
    ]
    counts: dict[str, int] = {}
    for a, b in found.pairs.tolist():
        both = f"{part_of[a]}-{part_of[b]}"
        counts[both] = counts.get(both, 0) + 1
    return {
        "threshold": near_duplicates.THRESHOLD,
        "pairs": len(found.pairs),
        "between": counts,
        "dropped": len(dropped),
        "shown": pairs,
    }


def _record(
    recipe: Recipe, items: Items, before: Parts, after: Parts, gone: Mapping[str, NDArray[np.int64]]
) -> dict[str, Any]:
    """Every item that is in no part any more, by name; those alone in their class, which went too, are counted."""
    part_of = _part_names(before)
    missing = sorted(set(part_of) - set(_part_names(after)))
    asked = np.unique(np.concatenate(list(gone.values())))
    by_part: dict[str, int] = {}
    for i in missing:
        by_part[part_of[i]] = by_part.get(part_of[i], 0) + 1
    return {
        "file": recipe.data.without,
        "by": {why: len(places) for why, places in gone.items()},
        "alone": len(set(missing) - set(asked.tolist())),
        "parts": by_part,
        "items": [items.names[i] for i in missing],
    }
