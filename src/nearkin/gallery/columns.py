"""Metadata of the rows in memory, a column a key that was asked for: a filter costs one comparison a row."""

import json
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nearkin.gallery.matrix import among
from nearkin.gallery.rows import scalar

__all__ = ["Columns"]


class Columns:
    """Aligned with the places of a matrix."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._codes: dict[str, NDArray[np.int32]] = {}
        self._values: dict[str, dict[str, int]] = {}

    def append(self, texts: Sequence[str]) -> None:
        self.texts.extend("{}" if text == "{}" else text for text in texts)  # one object for all that are empty

    def keep(self, places: Sequence[int]) -> None:
        self.texts = [self.texts[place] for place in places]
        self._codes.clear()

    def having(self, key: str, values: Sequence[str]) -> NDArray[np.bool_]:
        """Which places have one of these values, given as JSON, under the key."""
        known = self._codes.get(key, np.empty(0, np.int32))
        names = self._values.setdefault(key, {})
        if len(known) < len(self.texts):
            new = [names.setdefault(one, len(names)) for one in self._read(key, len(known))]
            known = self._codes[key] = np.concatenate([known, np.array(new, np.int32)])
        return among(known, [names[value] for value in values if value in names])

    def _read(self, key: str, start: int) -> list[str]:
        """The value of each text from `start` on, as JSON; "" where it has none that a filter could name."""
        found = []
        for text in self.texts[start:]:
            value = json.loads(text).get(key, self) if text != "{}" else self
            found.append("" if value is self or isinstance(value, list | dict) else scalar(value))
        return found
