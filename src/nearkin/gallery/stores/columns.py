"""Metadata of the rows in memory, a column a key that was asked for: a filter costs one comparison a row."""

import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearkin.gallery.schema import scalar
from nearkin.gallery.stores.matrix import among

__all__ = ["Columns"]

KEYS = 32  # columns kept
VALUES = 1_000_000  # different values that they may have together


class _Column(NamedTuple):
    codes: NDArray[np.int32]
    names: dict[str, int]


class Columns:
    """Aligned with the places of a matrix. Columns that were not asked for lately are let go; a key that no row has
    costs nothing."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._keys: set[str] = set()
        self._keyed = 0  # texts whose keys are among them
        self._columns: dict[str, _Column] = {}  # the last asked for stands last

    def append(self, texts: Sequence[str]) -> None:
        self.texts.extend("{}" if text == "{}" else text for text in texts)  # one object for all that are empty

    def keep(self, places: Sequence[int]) -> None:
        self.texts = [self.texts[place] for place in places]
        self._keys, self._keyed, self._columns = set(), 0, {}

    def having(self, key: str, values: Sequence[str]) -> NDArray[np.bool_]:
        """Which places have one of these values, given as JSON, under the key."""
        for text in self.texts[self._keyed :]:
            if text != "{}":
                self._keys.update(json.loads(text))
        self._keyed = len(self.texts)
        if key not in self._keys:
            return np.zeros(len(self.texts), bool)
        column = self._columns.pop(key, None) or _Column(np.empty(0, np.int32), {})
        if len(column.codes) < len(self.texts):
            names = column.names
            new = [names.setdefault(one, len(names)) for one in self._read(key, len(column.codes))]
            column = _Column(np.concatenate([column.codes, np.array(new, np.int32)]), names)
        self._columns[key] = column
        self._let_go()
        return among(column.codes, [column.names[value] for value in values if value in column.names])

    def _let_go(self) -> None:
        while len(self._columns) > 1 and (
            len(self._columns) > KEYS or sum(len(column.names) for column in self._columns.values()) > VALUES
        ):
            del self._columns[next(iter(self._columns))]

    def _read(self, key: str, start: int) -> list[str]:
        """The value of each text from `start` on, as JSON; "" where it has none that a filter could name."""
        found = []
        for text in self.texts[start:]:
            value = json.loads(text).get(key, self) if text != "{}" else self
            found.append("" if value is self or isinstance(value, list | dict) else scalar(value))
        return found
