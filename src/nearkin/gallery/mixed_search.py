"""Search among rows of several encoders: each cosine on the scale of its row, and the exact order on that scale.

A store finds rows by cosine. Those that it did not return have no larger cosine than the last one it did, so on no
scale more than that cosine means there: once the k-th row is at least that, no other can come before it.
"""

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from nearkin.gallery import stored_as
from nearkin.gallery.bridge_scale import Scale
from nearkin.gallery.schema import Filter, Floats, Row, row_encoder
from nearkin.gallery.stores import Neighbours, Store

__all__ = ["MixedRows", "Searched"]

SPARE = 16  # rows asked for beyond k at first


class Searched(Protocol):
    """What a search needs of a store."""

    def nearest(self, query: Floats, k: int, filter: Filter | None) -> list[tuple[Row, float]]: ...


class MixedRows:
    """Searches a store whose rows may be of several encoders. scales: of the earlier ones."""

    def __init__(self, store: Store, scales: Mapping[str, Scale]) -> None:
        self._store, self._scales = store, scales

    def similarity(self, row: Row, cosine: float) -> float:
        scale = self._scales.get(row_encoder(row.metadata))
        return cosine if scale is None else float(scale(np.array(cosine)))

    def nearest(self, query: Floats, k: int, filter: Filter | None, exact: bool = False) -> list[tuple[Row, float]]:
        """Nearest first, ties by id; see `stores.Store.nearest`."""
        count = k + SPARE
        while True:
            found = stored_as.nearest(self._store, query, count, filter, exact)
            near = sorted(
                ((row, self.similarity(row, cosine)) for row, cosine in found), key=lambda x: (-x[1], x[0].id)
            )
            if len(found) < count or near[k - 1][1] > self._most(found[-1][1]):
                proved = isinstance(found, Neighbours) and (found.proved, found.recall)
                return Neighbours(near[:k], *proved) if proved else near[:k]
            count *= 2

    def _most(self, cosine: float) -> float:
        """The largest similarity that this cosine means for any row."""
        return max([cosine, *(float(scale(np.array(cosine))) for scale in self._scales.values())])
