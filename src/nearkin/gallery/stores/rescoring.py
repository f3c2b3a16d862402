"""Decides among the rows that an index file proposes, by the float32 rows of the gallery itself, each verified."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from nearkin.gallery.schema import Filter, Floats, Row, unpack
from nearkin.gallery.stores import sqlite_file
from nearkin.gallery.stores.filter_columns import matches
from nearkin.gallery.stores.list_search import Candidates, Lists
from nearkin.gallery.stores.matrix import similarities

__all__ = ["Rescored", "Scored", "nearest_of", "rescore"]

SPARE = 16  # rows read at first, beyond k
MOST = 4096  # rows read at a time
Scored = tuple[Row, float]


class Rescored(NamedTuple):
    """rows: nearest first, ties by id. damaged, gone, changed: rows that do not match their checksum, that the gallery
    does not return, that are other rows than the file's. proved: no row outside could have changed the answer."""

    rows: list[Scored]
    damaged: dict[int, str]
    gone: list[int]
    changed: list[int]
    proved: bool


def nearest_of(scored: Sequence[Scored], k: int) -> list[Scored]:
    return sorted(scored, key=lambda one: (-one[1], one[0].id))[:k]


def rescore(
    reader: Any,
    lists: Lists,
    query: Floats,
    k: int,
    filter: Filter | None,
    candidates: Candidates,
    others: Sequence[Scored] = (),
) -> Rescored:
    """Reads candidates, the likeliest first, until no further one can be among the k nearest. others: rows that are
    scored already."""
    best, damaged = nearest_of(others, k), dict[int, str]()
    gone: list[int] = []
    changed: list[int] = []
    # What any candidate from here on has at most.
    later = np.maximum.accumulate(candidates.upper[::-1])[::-1]
    start, size = 0, k + SPARE
    while start < len(later) and (len(best) < k or later[start] >= best[-1][1]):
        part = slice(start, start + size)
        positions = candidates.positions[part]
        if len(best) == k:
            positions = positions[candidates.upper[part] >= best[-1][1]]
        start, size = start + size, min(2 * size, MOST)
        ids = lists.ids[positions].tolist()
        rows, damaged_part = sqlite_file.fetch(reader, ids)
        damaged |= damaged_part
        gone += [i for i in ids if i not in rows and i not in damaged_part]
        read = [(rows[i], position) for i, position in zip(ids, positions, strict=True) if i in rows]
        if not read:
            continue
        vectors = unpack([row.vector for row, _ in read], lists.dim)
        same = lists.fine.agree(vectors, np.array([position for _, position in read], np.int64))
        changed += [row.id for (row, _), equal in zip(read, same, strict=True) if not equal]
        scored = zip(read, same, similarities(vectors, query).tolist(), strict=True)
        best += [(row, cosine) for (row, _), equal, cosine in scored if equal and matches(filter, row)]
        best = nearest_of(best, k)
    # Below every cosine, or below the k-th that was read.
    proved = candidates.rest == -np.inf or (len(best) == k and candidates.rest < best[-1][1])
    return Rescored(best, damaged, gone, changed, bool(proved))
