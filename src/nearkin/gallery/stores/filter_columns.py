"""Labels and metadata of the rows of an index file, so that a filter finds its rows without reading the others.

A value is known by 64 bits of its sha256. A column has the value of each row (`codes`), and per value the positions of
its rows (`order`, cut at `offsets`). Two values with the same 64 bits would share an entry; every row is compared with
the filter again when it is read from the gallery, so that costs time and no mistake.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearkin.gallery.schema import Filter, Row, parse_metadata, scalar_json
from nearkin.gallery.stores.matrix import Ids, isin

__all__ = ["ABSENT", "LABEL", "Column", "ColumnBuilder", "matches", "passing", "value_hash"]

LABEL = ""  # the name of the labels' column: no key of metadata is empty
ABSENT = 0  # the value of rows without the key
MAX_COLUMNS = 64
PARTS = ("values", "offsets", "order", "codes")
Hashes = NDArray[np.uint64]


def value_hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "little") | 1


def scalars(metadata: str) -> dict[str, str]:
    """The values that a filter can name, as JSON."""
    if metadata == "{}":
        return {}
    items = parse_metadata(metadata).items()
    return {key: scalar_json(value) for key, value in items if not isinstance(value, list | dict)}


def matches(filter: Filter | None, row: Row) -> bool:
    if filter is None:
        return True
    if filter.labels is not None and row.label not in filter.labels:
        return False
    values = scalars(row.metadata) if filter.keys else {}
    return all(values.get(key) in allowed for key, allowed in filter.keys.items())


class Column:
    """One column of the file."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self.values, self.offsets, self.order, self.codes = (arrays[part] for part in PARTS)

    def code(self, text: str) -> int | None:
        value = np.uint64(value_hash(text))
        at = int(np.searchsorted(self.values, value))
        return at if at < len(self.values) and self.values[at] == value else None

    def codes_of(self, texts: Sequence[str]) -> list[int]:
        return [code for code in dict.fromkeys(map(self.code, texts)) if code is not None]

    def count(self, codes: Sequence[int]) -> int:
        return sum(int(self.offsets[code + 1] - self.offsets[code]) for code in codes)

    def positions(self, codes: Sequence[int]) -> Ids:
        """Ascending."""
        parts = [self.order[self.offsets[code] : self.offsets[code + 1]] for code in codes]
        if len(parts) == 1:
            return parts[0].astype(np.int64)
        return np.sort(np.concatenate(parts)).astype(np.int64) if parts else np.empty(0, np.int64)


def passing(columns: Mapping[str, Column], filter: Filter) -> Ids:
    """Positions of the rows that pass, ascending: those of the rarest condition, checked by the others."""
    conditions = [] if filter.labels is None else [(LABEL, filter.labels)]
    parts = []
    for key, texts in [*conditions, *filter.keys.items()]:
        if key not in columns:
            return np.empty(0, np.int64)
        codes = columns[key].codes_of(texts)
        parts.append((columns[key].count(codes), columns[key], codes))
    parts.sort(key=lambda part: part[0])
    positions = parts[0][1].positions(parts[0][2])
    for _, column, codes in parts[1:]:
        positions = positions[isin(column.codes[positions], codes)] if codes and len(positions) else positions[:0]
    return positions


class ColumnBuilder:
    """Collects the values of rows, in the order in which they come; 8 bytes per row and key."""

    def __init__(self) -> None:
        self.count, self.left_out = 0, False  # whether there are more keys than columns
        self._parts: dict[str, list[tuple[int, Hashes]]] = {LABEL: []}  # with the number of the first row
        self._hashes: dict[str, int] = {}  # of recent values

    def append(self, rows: Sequence[Row]) -> None:
        block: dict[str, Hashes] = {LABEL: np.array([self._hash(row.label) for row in rows], np.uint64)}
        for i, row in enumerate(rows):
            for key, value in scalars(row.metadata).items():
                if key not in self._parts and len(self._parts) > MAX_COLUMNS:
                    self.left_out = True
                    continue
                self._parts.setdefault(key, [])
                if key not in block:
                    block[key] = np.zeros(len(rows), np.uint64)
                block[key][i] = self._hash(value)
        for key, hashes in block.items():
            self._parts[key].append((self.count, hashes))
        self.count += len(rows)

    def _hash(self, text: str) -> int:
        found = self._hashes.get(text)
        if found is None:
            if len(self._hashes) >= 1 << 16:
                self._hashes.clear()
            found = self._hashes[text] = value_hash(text)
        return found

    @property
    def keys(self) -> list[str]:
        return list(self._parts)

    def column(self, key: str, order: Ids) -> dict[str, NDArray[Any]]:
        """The arrays of a column, for rows that are written in this order."""
        hashes = np.full(self.count, ABSENT, np.uint64)
        for start, part in self._parts[key]:
            hashes[start : start + len(part)] = part
        values, codes = np.unique(hashes[order], return_inverse=True)
        codes = codes.reshape(-1).astype(np.int32)
        offsets = np.concatenate([[0], np.cumsum(np.bincount(codes, minlength=len(values)))]).astype(np.int64)
        return {
            "values": values,
            "offsets": offsets,
            "order": np.argsort(codes, kind="stable").astype(np.int32),
            "codes": codes,
        }
