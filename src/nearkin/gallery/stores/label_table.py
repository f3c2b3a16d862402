"""Sums of rows per label, in coordinates that a model gives them, kept in step with rows in memory."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nearkin.gallery.schema import Floats

__all__ = ["LabelTable", "Project", "RowSums"]

BLOCK = 4096
REMEMBERED = 1000  # changed labels, beyond which all count as changed
Project = Callable[[Floats], Floats]  # (n, D) → (n, K)


class LabelTable(NamedTuple):
    """numbers: of the labels, some of which may have no row any more. counts (C,), sums (C, K): of their rows. changed:
    the numbers of those that are not as they were in `version` before; None: of all."""

    numbers: Mapping[str, int]
    counts: NDArray[np.int64]
    sums: NDArray[np.float64]
    version: int
    changed: NDArray[np.int64] | None


class RowSums:
    """The sums by the number of a label. key: names the model. Rows from `done` on are not in them yet."""

    def __init__(self, key: str, project: Project) -> None:
        self.key, self.done, self.version = key, 0, 0
        self._project = project
        self._sums = np.zeros((0, 0))
        self._log: list[tuple[int, NDArray[np.int64]]] = []  # what changed in each version

    def add(self, vectors: Floats, codes: NDArray[np.int32], sign: int = 1) -> None:
        for start in range(0, len(codes), BLOCK):
            part = slice(start, start + BLOCK)
            coordinates = self._project(vectors[part])
            size = max(len(self._sums), int(codes[part].max()) + 1)
            if size > len(self._sums):
                grown = np.zeros((size + size // 4, coordinates.shape[1]))
                if len(self._sums):
                    grown[: len(self._sums)] = self._sums
                self._sums = grown
            where, wide = torch.from_numpy(codes[part].astype(np.int64)), torch.from_numpy(coordinates).double()
            torch.from_numpy(self._sums).index_add_(0, where, wide, alpha=sign)
        self.version += 1
        changed = np.unique(codes).astype(np.int64)
        self._log.append((self.version, changed))
        while len(self._log) > 1 and sum(len(codes) for _, codes in self._log) > REMEMBERED:
            del self._log[0]

    def table(self, labels: Mapping[str, int], counts: NDArray[np.int64], since: int | None) -> LabelTable:
        """counts: by number, with room for more. since: the version that the caller knows."""
        changed = None
        if since is not None and (since == self.version or (self._log and self._log[0][0] <= since + 1)):
            parts = [codes for version, codes in self._log if version > since]
            changed = np.unique(np.concatenate(parts)) if parts else np.zeros(0, np.int64)
        size = len(labels)
        return LabelTable(labels, counts[:size], self._sums[:size], self.version, changed)
