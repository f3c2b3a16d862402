"""What every loss here shares: the call form, distance, reducer and regularizer, and the choice of a path.

A loss has two paths. `native` hands the batch to nearkin's own loss, with its kernels and bounded memory, where that
computes the same number. `compute_loss` lists the terms, as the original does: with a miner's indices, with other
distances and with reducers that nearkin's losses do not have.
"""

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nearkin.compat.pml.distances import BaseDistance, LpDistance
from nearkin.compat.pml.recording import Recording, device_of, own_ids
from nearkin.compat.pml.reducers import (
    AvgNonZeroReducer,
    BaseReducer,
    DoNothingReducer,
    MeanReducer,
    MultipleReducers,
    SumReducer,
    Terms,
)

__all__ = ["BaseMetricLossFunction", "Batch", "element_terms", "refuse_distance", "segment_logsumexp"]

REDUCTIONS = {MeanReducer: "mean", AvgNonZeroReducer: "active", SumReducer: "sum"}


class Batch(NamedTuple):
    """What a loss was called with, for nearkin: no references where the batch is its own."""

    embeddings: Tensor
    labels: Tensor
    references: Tensor | None
    reference_labels: Tensor | None


class BaseMetricLossFunction(Recording):
    """`loss(embeddings, labels, indices_tuple, ref_emb, ref_labels)`. A subclass has `compute_loss`, maybe `native`."""

    def __init__(
        self,
        distance: BaseDistance | None = None,
        reducer: nn.Module | None = None,
        embedding_regularizer: nn.Module | None = None,
        embedding_reg_weight: float = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.embedding_regularizer, self.embedding_reg_weight = embedding_regularizer, embedding_reg_weight
        self.distance = self.get_default_distance() if distance is None else distance
        self.set_reducer(reducer)

    def get_default_distance(self) -> BaseDistance:
        """Where none is given."""
        return LpDistance(p=2)

    def get_default_reducer(self) -> BaseReducer:
        """Where none is given."""
        return MeanReducer()

    def set_reducer(self, reducer: nn.Module | None) -> None:
        """One reducer per kind of terms, unless it takes several."""
        if isinstance(reducer, MultipleReducers | DoNothingReducer):
            self.reducer: nn.Module = reducer
            return
        names = self.sub_loss_names()
        each = {k: self.get_default_reducer() if reducer is None else copy.deepcopy(reducer) for k in names}
        self.reducer = next(iter(each.values())) if len(each) == 1 else MultipleReducers(each)

    def _sub_loss_names(self) -> list[str]:
        return ["loss"]

    def sub_loss_names(self) -> list[str]:
        """The kinds of terms of this loss, its regularizers among them."""
        extra = [] if self.embedding_regularizer is None else ["embedding_reg_loss"]
        return [*self._sub_loss_names(), *extra]

    def zero_loss(self) -> dict[str, Any]:
        """No terms."""
        return {"losses": 0, "indices": None, "reduction_type": "already_reduced"}

    def zero_losses(self) -> Terms:
        """No terms of any kind."""
        return {name: self.zero_loss() for name in self.sub_loss_names()}

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        indices_tuple: Any = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Any:
        """The loss: a number, or the terms with `DoNothingReducer`."""
        labels = _checked("labels", labels, embeddings)
        own = ref_emb is None or ref_emb is embeddings
        if own:
            ref_emb, ref_labels = embeddings, labels
        else:
            assert ref_emb is not None
            ref_labels = _checked("ref_labels", ref_labels, ref_emb)
            if ref_labels is labels and labels is not None:
                ref_labels = labels.clone()  # other rows: row i is no copy of itself
        if indices_tuple is None and labels is not None and ref_labels is not None and self._native_reducer():
            references = (None, None) if own else (ref_emb, own_ids(ref_labels))
            value = self.native(Batch(embeddings, own_ids(labels), *references), self._native_reducer())
            if value is not None:
                return value + self._regularization(embeddings)
        if indices_tuple is not None:
            indices_tuple = tuple(index.to(embeddings.device) for index in indices_tuple)
        terms = self.compute_loss(embeddings, labels, indices_tuple, ref_emb, ref_labels)
        if self.embedding_regularizer is not None:
            terms["embedding_reg_loss"] = already_reduced(self._regularization(embeddings))
        return self.reducer(terms, embeddings, labels)

    def native(self, batch: Batch, reduction: str) -> Tensor | None:
        """The loss by nearkin's own function, or None where that has not these settings."""
        return None

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Tensor, ref_labels: Any
    ) -> Terms:
        """The terms."""
        raise NotImplementedError

    def _native_reducer(self) -> str:
        """The name of nearkin's reduction that is this loss's reducer, or ""."""
        if not isinstance(self.reducer, MultipleReducers):
            return REDUCTIONS.get(type(self.reducer), "")
        kinds = {type(self.reducer.reducers[k]) for k in self._sub_loss_names() if k in self.reducer.reducers}
        complete = all(name in self.reducer.reducers for name in self._sub_loss_names())
        if len(kinds) != 1 or not complete or type(self.reducer) is not MultipleReducers:
            return ""
        return REDUCTIONS.get(kinds.pop(), "")

    def _regularization(self, embeddings: Tensor) -> Any:
        if self.embedding_regularizer is None:
            return 0.0
        return self.embedding_regularizer(embeddings) * self.embedding_reg_weight

    def need(self, **arguments: Any) -> None:
        """Refuses None for arguments without which this loss is not defined."""
        for name, value in arguments.items():
            if value is None:
                raise ValueError(f"{type(self).__name__} needs {name}, got None")

    def need_no_indices(self, indices_tuple: Any) -> None:
        """Refuses a miner's indices."""
        if indices_tuple is not None:
            raise ValueError(f"{type(self).__name__} takes no indices_tuple, got one")

    def need_batch_alone(self, embeddings: Tensor, ref_emb: Tensor | None) -> None:
        """Refuses references."""
        if ref_emb is not None and ref_emb is not embeddings:
            raise ValueError(f"{type(self).__name__} takes no ref_emb; put all rows into one batch")


def _checked(name: str, labels: Any, rows: Tensor) -> Tensor | None:
    if labels is None:
        return None
    on_device = device_of(labels, rows)
    if on_device.dim() != 1 or len(on_device) != len(rows):
        raise ValueError(f"{name} must have one entry per row: {len(rows)} rows, shape {tuple(on_device.shape)}")
    return on_device


def already_reduced(value: Any) -> dict[str, Any]:
    """A number as an entry of terms."""
    return {"losses": value, "indices": None, "reduction_type": "already_reduced"}


def element_terms(losses: Tensor, indices: Tensor | None = None) -> Terms:
    """One term per item as terms."""
    if indices is None:
        indices = torch.arange(len(losses), device=losses.device)
    return {"loss": {"losses": losses, "indices": indices, "reduction_type": "element"}}


def segment_logsumexp(values: Tensor, rows: Tensor, number: int) -> Tensor:
    """log Σ exp of the values of each of `number` rows, (number,); -inf for a row without any."""
    if values.numel() == 0:
        return values.new_full((number,), -torch.inf)
    top = values.detach().new_full((number,), -torch.inf).scatter_reduce(0, rows, values.detach(), "amax")
    shift = torch.where(top == -torch.inf, 0.0, top)
    total = values.new_zeros(number).index_add(0, rows, (values - shift[rows]).exp())
    present = top != -torch.inf
    return torch.where(present, torch.where(present, total, 1.0).log() + shift, -torch.inf)


def refuse_distance(loss: nn.Module, distance: Any, allowed: str) -> None:
    """One sentence about a distance that a loss cannot take."""
    settings = {name: getattr(distance, name, None) for name in ("normalize_embeddings", "p", "power")}
    shown = ", ".join(f"{k}={v}" for k, v in settings.items())
    raise ValueError(f"{type(loss).__name__}: distance must be {allowed}, got {type(distance).__name__}({shown})")
