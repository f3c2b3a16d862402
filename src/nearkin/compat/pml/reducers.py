"""Reducers of pytorch-metric-learning: from the terms of a loss to one number.

Terms: name → {"losses", "indices", "reduction_type", "divisor"}; the type is "element" (one per item), "pos_pair",
"neg_pair", "triplet" or "already_reduced". A batch without terms is 0 with a working gradient.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from nearkin.compat.pml.recording import Recording

__all__ = [
    "AvgNonZeroReducer",
    "BaseReducer",
    "ClassWeightedReducer",
    "DivisorReducer",
    "DoNothingReducer",
    "MeanReducer",
    "MultipleReducers",
    "PerAnchorReducer",
    "SumReducer",
    "ThresholdReducer",
]

Terms: TypeAlias = dict[str, dict[str, Any]]


def __dir__() -> list[str]:
    return __all__


class BaseReducer(Recording):
    """One kind of terms to one number: a subclass says how for "element"; pairs and triplets follow unless it says."""

    def forward(self, loss_dict: Terms, embeddings: Tensor, labels: Tensor | None) -> Any:
        """The number for the one entry of `loss_dict`."""
        if len(loss_dict) != 1:
            raise ValueError(
                f"{type(self).__name__} takes one kind of terms, got {sorted(loss_dict)}: MultipleReducers"
            )
        (info,) = loss_dict.values()
        losses, kind = info["losses"], info["reduction_type"]
        if not isinstance(losses, Tensor):  # 0: no terms
            return self.zero_loss(embeddings)
        return getattr(self, f"{kind}_reduction")(losses, info["indices"], embeddings, labels, **self.options(info))

    def options(self, info: Mapping[str, Any]) -> dict[str, Any]:
        """What the reduction takes beside the terms."""
        return {}

    def already_reduced_reduction(self, losses: Tensor, *_: Any, **__: Any) -> Tensor:
        """A number is left as it is."""
        return losses.sum()

    def element_reduction(self, losses: Tensor, indices: Any, embeddings: Tensor, labels: Tensor) -> Tensor:
        """From one term per item to one number."""
        raise NotImplementedError

    def pos_pair_reduction(self, *args: Any, **kwargs: Any) -> Tensor:
        """From one term per positive pair to one number."""
        return self.element_reduction(*args, **kwargs)

    def neg_pair_reduction(self, *args: Any, **kwargs: Any) -> Tensor:
        """From one term per negative pair to one number."""
        return self.element_reduction(*args, **kwargs)

    def triplet_reduction(self, *args: Any, **kwargs: Any) -> Tensor:
        """From one term per triplet to one number."""
        return self.element_reduction(*args, **kwargs)

    def zero_loss(self, embeddings: Tensor) -> Tensor:
        """0, with a gradient of zeros."""
        return (embeddings * 0).sum()


class MeanReducer(BaseReducer):
    """The mean over all terms."""

    def element_reduction(self, losses: Tensor, indices: Any, embeddings: Tensor, labels: Any) -> Tensor:
        """The mean."""
        return losses.mean() if losses.numel() else self.zero_loss(embeddings)


class SumReducer(BaseReducer):
    """The sum over all terms."""

    def element_reduction(self, losses: Tensor, indices: Any, embeddings: Tensor, labels: Any) -> Tensor:
        """The sum."""
        return losses.sum()


class ThresholdReducer(BaseReducer):
    """The mean over the terms above `low` and below `high`."""

    def __init__(self, low: float | None = None, high: float | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if low is None and high is None:
            raise ValueError("ThresholdReducer: low or high must be a number, got None for both")
        self.low, self.high = low, high

    def element_reduction(self, losses: Tensor, indices: Any, embeddings: Tensor, labels: Any) -> Tensor:
        """The mean over what passes."""
        passed = torch.ones_like(losses, dtype=torch.bool)
        if self.low is not None:
            passed = passed & ~(losses <= self.low)  # a NaN is not hidden
        if self.high is not None:
            passed = passed & ~(losses >= self.high)
        kept = losses[passed]
        return kept.mean() if kept.numel() else self.zero_loss(embeddings)


class AvgNonZeroReducer(ThresholdReducer):
    """The mean over the terms above 0."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(low=0, **kwargs)


class ClassWeightedReducer(BaseReducer):
    """The mean over all terms, each times the weight of its anchor's class."""

    def __init__(self, weights: Tensor, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.weights = weights

    def element_reduction(self, losses: Tensor, indices: Any, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The weighted terms, over their number."""
        anchors = indices if isinstance(indices, Tensor) else indices[0]
        weights = self.weights.to(losses)[labels[anchors]]
        return (losses * weights).mean() if losses.numel() else self.zero_loss(embeddings)


class DivisorReducer(BaseReducer):
    """The sum over all terms, over a number that the loss gives."""

    def options(self, info: Mapping[str, Any]) -> dict[str, Any]:
        """The divisor."""
        return {} if info["reduction_type"] == "already_reduced" else {"divisor": info["divisor"]}

    def element_reduction(
        self, losses: Tensor, indices: Any, embeddings: Tensor, labels: Any, divisor: Any = 1
    ) -> Tensor:
        """The sum over the divisor; 0 where that is 0."""
        return losses.sum() / divisor if divisor != 0 else self.zero_loss(embeddings)


def row_means(terms: Tensor, count: Tensor) -> Tensor:
    """Each row's sum over its number of terms, (B,); 0 for a row without any."""
    return torch.where(count > 0, terms.sum(1) / count.clamp(min=1), 0.0)


class PerAnchorReducer(BaseReducer):
    """The terms of each anchor to one by `aggregation_func(terms (B, R), count (B,))`, these to one by `reducer`."""

    def __init__(
        self,
        reducer: BaseReducer | None = None,
        aggregation_func: Callable[[Tensor, Tensor], Tensor] = row_means,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.reducer = MeanReducer() if reducer is None else reducer
        self.aggregation_func = aggregation_func

    def element_reduction(self, losses: Tensor, indices: Any, embeddings: Tensor, labels: Any) -> Any:
        """One term per item already."""
        terms = {"loss": {"losses": losses, "indices": indices, "reduction_type": "element"}}
        return self.reducer(terms, embeddings, labels)

    def pos_pair_reduction(self, losses: Tensor, indices: Any, embeddings: Tensor, labels: Any) -> Any:
        """The pairs of each anchor to one term; of a pair given twice the last counts, as in the original."""
        anchors, others = indices
        width = max(len(embeddings), int(others.max()) + 1 if others.numel() else 0)
        rows = losses.new_zeros(len(embeddings), width)
        present = torch.zeros_like(rows, dtype=torch.bool)
        present[anchors, others] = True
        rows = rows.index_put((anchors, others), losses)
        values = self.aggregation_func(rows, present.sum(1))
        return self.element_reduction(values, torch.arange(len(values), device=values.device), embeddings, labels)

    def neg_pair_reduction(self, *args: Any, **kwargs: Any) -> Any:
        """The same."""
        return self.pos_pair_reduction(*args, **kwargs)

    def triplet_reduction(self, *args: Any, **kwargs: Any) -> Tensor:
        """Refused, as in the original."""
        raise NotImplementedError("PerAnchorReducer takes terms of items or pairs, got triplets; use MeanReducer")


class DoNothingReducer(BaseReducer):
    """The terms themselves."""

    def forward(self, loss_dict: Terms, embeddings: Tensor, labels: Tensor | None) -> Terms:
        """The terms."""
        return loss_dict


class MultipleReducers(BaseReducer):
    """A reducer for each kind of terms by name, else `default_reducer`; the numbers are summed."""

    def __init__(
        self, reducers: Mapping[str, nn.Module], default_reducer: BaseReducer | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.reducers = nn.ModuleDict(reducers)
        self.default_reducer = MeanReducer() if default_reducer is None else default_reducer

    def forward(self, loss_dict: Terms, embeddings: Tensor, labels: Tensor | None) -> Tensor:
        """The sum of the numbers."""
        own, numbers = dict(self.reducers.items()), []
        for name, info in loss_dict.items():
            reducer = own.get(name, self.default_reducer)
            numbers.append(reducer({name: info}, embeddings, labels))
        return self.sub_loss_reduction(torch.stack(numbers), embeddings, labels)

    def sub_loss_reduction(self, sub_losses: Tensor, embeddings: Any = None, labels: Any = None) -> Tensor:
        """The sum."""
        return sub_losses.sum()
