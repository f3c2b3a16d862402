"""Distances and similarities of pytorch-metric-learning, by nearkin's exact matrices where it has them.

Half precision is computed in float32 and returns float32; equal rows are at distance exactly 0.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from nearkin.compat.pml.recording import Recording
from nearkin.core import distances

__all__ = ["BaseDistance", "BatchedDistance", "CosineSimilarity", "DotProductSimilarity", "LpDistance", "SNRDistance"]


def __dir__() -> list[str]:
    return __all__


class BaseDistance(Recording):
    """A (B, R) matrix of queries with references; `is_inverted`: larger is closer. A subclass has `compute_mat`."""

    def __init__(
        self,
        normalize_embeddings: bool = True,
        p: float = 2,
        power: float = 1,
        is_inverted: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.normalize_embeddings, self.p, self.power, self.is_inverted = normalize_embeddings, p, power, is_inverted

    def forward(self, query_emb: Tensor, ref_emb: Tensor | None = None) -> Tensor:
        """The matrix, to the power of `power`."""
        self.check_shapes(query_emb, ref_emb)
        query = self.maybe_normalize(query_emb)
        references = query if ref_emb is None or ref_emb is query_emb else self.maybe_normalize(ref_emb)
        return self.raised(self.compute_mat(query, references))

    def raised(self, matrix: Tensor) -> Tensor:
        """The matrix to the power of `power`."""
        return matrix if self.power == 1 else matrix**self.power

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """(B, R) of normalised rows."""
        raise NotImplementedError

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """(B,) of row with row."""
        raise NotImplementedError

    def smallest_dist(self, *args: Any, **kwargs: Any) -> Any:
        """The nearest: torch.max where larger is closer, else torch.min."""
        return torch.max(*args, **kwargs) if self.is_inverted else torch.min(*args, **kwargs)

    def largest_dist(self, *args: Any, **kwargs: Any) -> Any:
        """The farthest: torch.min where larger is closer, else torch.max."""
        return torch.min(*args, **kwargs) if self.is_inverted else torch.max(*args, **kwargs)

    def margin(self, x: Any, y: Any) -> Any:
        """How much farther x is than y."""
        return y - x if self.is_inverted else x - y

    def normalize(self, embeddings: Tensor, dim: int = 1, **kwargs: Any) -> Tensor:
        """Rows of p-norm 1."""
        if self.p == 2 and dim == 1 and embeddings.dim() == 2 and not kwargs:
            return distances.unit(embeddings)
        return functional.normalize(embeddings, p=self.p, dim=dim, **kwargs)

    def maybe_normalize(self, embeddings: Tensor, dim: int = 1, **kwargs: Any) -> Tensor:
        """Rows of p-norm 1, where `normalize_embeddings` asks for it."""
        return self.normalize(embeddings, dim=dim, **kwargs) if self.normalize_embeddings else embeddings

    def get_norm(self, embeddings: Tensor, dim: int = 1, **kwargs: Any) -> Tensor:
        """p-norm of each row."""
        norm: Tensor = torch.linalg.vector_norm(embeddings, ord=self.p, dim=dim, **kwargs)
        return norm

    def check_shapes(self, query_emb: Tensor, ref_emb: Tensor | None) -> None:
        """Refuses what is not rows of embeddings."""
        for name, rows in (("query_emb", query_emb), ("ref_emb", ref_emb)):
            if rows is not None and rows.dim() != 2:
                raise ValueError(f"{name} must have shape (rows, embedding size), got {tuple(rows.shape)}")


class LpDistance(BaseDistance):
    """Distance of p-norm; of unit rows unless `normalize_embeddings=False`."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if self.is_inverted:
            raise ValueError("LpDistance: is_inverted must be False, got True; use CosineSimilarity")

    def forward(self, query_emb: Tensor, ref_emb: Tensor | None = None) -> Tensor:
        """The matrix, to the power of `power`."""
        if self.p != 2:
            return super().forward(query_emb, ref_emb)
        self.check_shapes(query_emb, ref_emb)
        references = None if ref_emb is query_emb else ref_emb
        root = distances.squared_euclidean if self.power == 2 else distances.euclidean
        matrix = root(query_emb, references, normalize=self.normalize_embeddings)
        return matrix if self.power == 2 else self.raised(matrix)

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """(B, R) distances."""
        if self.p == 2:
            return distances.euclidean(query_emb, None if ref_emb is query_emb else ref_emb)
        query_emb, ref_emb = (
            x.float() if x.dtype in (torch.float16, torch.bfloat16) else x for x in (query_emb, ref_emb)
        )
        return torch.cdist(query_emb, ref_emb, p=self.p)

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """(B,) distances of row with row."""
        return functional.pairwise_distance(query_emb, ref_emb, p=self.p)


class DotProductSimilarity(BaseDistance):
    """Inner product; of unit rows unless `normalize_embeddings=False`."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(is_inverted=True, **kwargs)

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """(B, R) inner products."""
        return distances.dot(query_emb, ref_emb) if query_emb.dim() == 2 else query_emb @ ref_emb.transpose(-1, -2)

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """(B,) inner products of row with row."""
        return (query_emb * ref_emb).sum(1)


class CosineSimilarity(DotProductSimilarity):
    """Inner product of unit rows."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(normalize_embeddings=True, **kwargs)


class SNRDistance(BaseDistance):
    """Variance of the difference of two rows over the variance of the first."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if self.is_inverted:
            raise ValueError("SNRDistance: is_inverted must be False, got True")

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """(B, R), without a (B, R, D): the variance of a difference is a squared distance of centred rows."""
        query, references = (x - x.mean(1, keepdim=True) for x in (query_emb, ref_emb))
        same = None if ref_emb is query_emb else references
        return distances.squared_euclidean(query, same) / query.square().sum(1, keepdim=True)

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """(B,) of row with row."""
        return (query_emb - ref_emb).var(1) / query_emb.var(1)


class BatchedDistance(torch.nn.Module):
    """Hands `iter_fn(matrix, start, end)` the matrix of `batch_size` queries at a time."""

    def __init__(self, distance: BaseDistance, iter_fn: Any = None, batch_size: int = 32) -> None:
        super().__init__()
        self.distance, self.iter_fn, self.batch_size = distance, iter_fn, batch_size

    def forward(self, query_emb: Tensor, ref_emb: Tensor | None = None) -> None:
        """Calls `iter_fn` for each block of queries, in order."""
        references = query_emb if ref_emb is None else ref_emb
        for start in range(0, len(query_emb), self.batch_size):
            end = start + self.batch_size
            self.iter_fn(self.distance(query_emb[start:end], references), start, end)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.distance, name)
