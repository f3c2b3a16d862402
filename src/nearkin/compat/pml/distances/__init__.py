"""The original's distances; `LpDistance` with p = 2 and `CosineSimilarity` by nearkin's exact matrices.

Equal rows are at distance exactly 0, and half precision is computed in float32.
"""

from typing import Any

from torch import Tensor

from nearkin.compat.pml import original
from nearkin.core import distances

_theirs: Any = original("distances")


def __getattr__(name: str) -> Any:
    return getattr(_theirs, name)


class _Exact:
    """Asks `native` first; where that gives None the original computes."""

    def forward(self: Any, query_emb: Tensor, ref_emb: Tensor | None = None) -> Tensor:
        """The (B, R) matrix, to the power of `power`."""
        self.check_shapes(query_emb, ref_emb)
        matrix = None
        if not self.collect_stats and self.p == 2:
            matrix = self.native(query_emb, None if ref_emb is query_emb else ref_emb)
        computed: Tensor = super().forward(query_emb, ref_emb) if matrix is None else matrix  # type: ignore[misc]
        return computed


class LpDistance(_Exact, _theirs.LpDistance):
    """Distance of p-norm; of unit rows unless `normalize_embeddings=False`."""

    def native(self, query_emb: Tensor, ref_emb: Tensor | None) -> Tensor | None:
        """Euclidean distances."""
        if self.power == 2:
            return distances.squared_euclidean(query_emb, ref_emb, normalize=self.normalize_embeddings)
        matrix = distances.euclidean(query_emb, ref_emb, normalize=self.normalize_embeddings)
        return matrix if self.power == 1 else matrix**self.power


class CosineSimilarity(_Exact, _theirs.CosineSimilarity):
    """Inner product of unit rows."""

    def native(self, query_emb: Tensor, ref_emb: Tensor | None) -> Tensor | None:
        """Cosines."""
        matrix = distances.cosine(query_emb, ref_emb)
        return matrix if self.power == 1 else matrix**self.power


_EUCLIDEAN = (LpDistance, _theirs.LpDistance)
_PRODUCTS = (CosineSimilarity, _theirs.CosineSimilarity, _theirs.DotProductSimilarity)


def is_euclidean(distance: Any, *powers: float, unit: bool = False) -> bool:
    """Whether this is the Euclidean distance to one of these powers; `unit`: of unit rows."""
    plain = type(distance) in _EUCLIDEAN and distance.p == 2 and distance.power in powers
    return plain and (distance.normalize_embeddings or not unit)


def is_product(distance: Any) -> bool:
    """Whether this is the inner product of rows, as they are or of length 1."""
    return type(distance) in _PRODUCTS and distance.p == 2 and distance.power == 1


def is_cosine(distance: Any) -> bool:
    """Whether this is the inner product of unit rows."""
    return is_product(distance) and distance.normalize_embeddings
