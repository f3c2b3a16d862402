"""Regularizers of pytorch-metric-learning: one number from rows of embeddings or of class weights."""

from typing import Any

import torch
from torch import Tensor, nn

from nearkin.compat.pml.distances import BaseDistance, CosineSimilarity, LpDistance
from nearkin.compat.pml.recording import Recording
from nearkin.compat.pml.reducers import BaseReducer, DivisorReducer, MeanReducer

__all__ = [
    "BaseRegularizer",
    "CenterInvariantRegularizer",
    "LpRegularizer",
    "RegularFaceRegularizer",
    "SparseCentersRegularizer",
    "ZeroMeanRegularizer",
]


def __dir__() -> list[str]:
    return __all__


class BaseRegularizer(Recording):
    """A subclass has `per_row`, (N,) of rows (N, D); the reducer makes it one number."""

    def __init__(self, distance: BaseDistance | None = None, reducer: nn.Module | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.distance = self.get_default_distance() if distance is None else distance
        self.reducer = self.get_default_reducer() if reducer is None else reducer

    def get_default_distance(self) -> BaseDistance:
        """Where none is given."""
        return LpDistance(p=2)

    def get_default_reducer(self) -> BaseReducer:
        """Where none is given."""
        return MeanReducer()

    def per_row(self, rows: Tensor) -> Tensor:
        """One value per row."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Any:
        """The number."""
        values = self.per_row(x)
        places = torch.arange(len(values), device=x.device)
        terms = {"losses": values, "indices": places, "reduction_type": "element", "divisor": 2 * len(values)}
        return self.reducer({"loss": terms}, x, torch.arange(len(x), device=x.device))


class LpRegularizer(BaseRegularizer):
    """The p-norm of each row, to the power of `power`."""

    def __init__(self, p: float = 2, power: float = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.p, self.power = p, power

    def per_row(self, rows: Tensor) -> Tensor:
        """The norms."""
        norms: Tensor = torch.linalg.vector_norm(rows, ord=self.p, dim=1)
        return norms if self.power == 1 else norms**self.power


class ZeroMeanRegularizer(BaseRegularizer):
    """|Σ of the coordinates| of each row."""

    def per_row(self, rows: Tensor) -> Tensor:
        """The sums."""
        return rows.sum(1).abs()


class CenterInvariantRegularizer(BaseRegularizer):
    """(|w|² - mean |w|²)² / 4: class weights of one length."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if type(self.distance) is not LpDistance or self.distance.power != 1 or self.distance.normalize_embeddings:
            raise ValueError("CenterInvariantRegularizer: distance must be LpDistance(normalize_embeddings=False)")

    def get_default_distance(self) -> BaseDistance:
        """Of raw rows."""
        return LpDistance(normalize_embeddings=False)

    def per_row(self, rows: Tensor) -> Tensor:
        """The deviations."""
        squared = self.distance.get_norm(rows) ** 2
        return (squared - squared.mean()).square() / 4


class RegularFaceRegularizer(BaseRegularizer):
    """The similarity of each class weight with the nearest other one."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not self.distance.is_inverted:
            raise ValueError("RegularFaceRegularizer: distance must be a similarity such as CosineSimilarity()")

    def get_default_distance(self) -> BaseDistance:
        """Cosines."""
        return CosineSimilarity()

    def per_row(self, rows: Tensor) -> Tensor:
        """The largest of each row, without the diagonal."""
        matrix: Tensor = self.distance(rows)
        own = torch.eye(len(rows), dtype=torch.bool, device=rows.device)
        return matrix.masked_fill(own, -torch.inf).amax(1)


class SparseCentersRegularizer(BaseRegularizer):
    """√(2 - 2 cos) between the centers of each class, over twice their number: they merge where they can."""

    def __init__(self, num_classes: int, centers_per_class: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if centers_per_class < 2:
            raise ValueError(f"centers_per_class must be at least 2, got {centers_per_class}")
        if not isinstance(self.distance, CosineSimilarity):
            raise ValueError("SparseCentersRegularizer: distance must be CosineSimilarity()")
        self.num_classes, self.centers_per_class = num_classes, centers_per_class

    def get_default_distance(self) -> BaseDistance:
        """Cosines."""
        return CosineSimilarity()

    def get_default_reducer(self) -> BaseReducer:
        """Over twice the number of pairs."""
        return DivisorReducer()

    def per_row(self, rows: Tensor) -> Tensor:
        """One value per pair of centers of a class; two that coincide have gradient 0."""
        unit = self.distance.normalize(rows).view(self.num_classes, self.centers_per_class, -1)
        first, second = torch.triu_indices(self.centers_per_class, self.centers_per_class, 1, device=rows.device)
        squared = (2 - 2 * (unit[:, first] * unit[:, second]).sum(2)).flatten()
        apart = squared > 0
        return torch.where(apart, torch.where(apart, squared, 1.0).sqrt(), 0.0)
