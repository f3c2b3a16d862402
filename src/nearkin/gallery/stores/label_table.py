"""Sums of rows per label, in coordinates that a model gives them, kept in step with rows in memory."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nearkin.gallery.schema import Floats

__all__ = ["LabelTable", "Project", "RowSums"]

BLOCK = 4096
Project = Callable[[Floats], Floats]  # (n, D) → (n, K)


class LabelTable(NamedTuple):
    """Every label that has rows: how many, and the sum of their coordinates (C, K). The same object: no change."""

    labels: list[str]
    counts: NDArray[np.int64]
    sums: NDArray[np.float64]


class RowSums:
    """The sums by the code of a label. key: names the model. Rows from `done` on are not in them yet."""

    def __init__(self, key: str, project: Project) -> None:
        self.key, self.done = key, 0
        self._table: LabelTable | None = None
        self._project = project
        self._sums = np.zeros((0, 0))

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
        self._table = None

    def table(self, labels: dict[str, int], counts: NDArray[np.int64]) -> LabelTable:
        """labels: their codes; counts: rows by code."""
        if self._table is None:
            names = [label for label, code in labels.items() if counts[code]]
            codes = np.array([labels[label] for label in names], np.int64)
            self._table = LabelTable(names, counts[codes], self._sums[codes])
        return self._table
