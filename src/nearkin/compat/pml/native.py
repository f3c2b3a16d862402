"""The choice between nearkin's functions and the original's own computation, inside a loss of the original.

A loss here is the original's class with a method `native`. Where nearkin computes the same number, `native` gives it;
everywhere else, and in a subclass of a user's, whose changes `native` cannot know, the original computes. Reducers,
regularizers and wrappers see the original's terms either way.
"""

from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from nearkin.compat.pml import original
from nearkin.compat.pml.distances import CosineSimilarity, LpDistance, is_cosine
from nearkin.core.labels import UNKNOWN, Relation

_reducers: Any = original("reducers")
_indexing: Any = original("utils.loss_and_miner_utils")
REDUCTIONS = {_reducers.MeanReducer: "mean", _reducers.AvgNonZeroReducer: "active", _reducers.SumReducer: "sum"}
HALF = (torch.float16, torch.bfloat16)

Terms: TypeAlias = dict[str, dict[str, Any]]


class Call(NamedTuple):
    """What the original hands to `compute_loss`: references are the batch itself where none were given."""

    embeddings: Tensor
    labels: Any
    indices_tuple: Any
    ref_emb: Tensor
    ref_labels: Any

    def alone(self) -> bool:
        """Whether the batch is compared with itself, under classes that are whole numbers."""
        own = self.ref_emb is self.embeddings and self.ref_labels is self.labels
        return own and self.labels is not None and not self.labels.is_floating_point()

    def pairs(self) -> tuple[Any, ...] | None:
        """Every pair, as nearkin takes a batch; None where the original pairs in a way of its own.

        It leaves out pairs of row i with reference i wherever both labels are one tensor, and a lone pair of each kind.
        """
        if self.labels is None or self.ref_labels is None or len(self.embeddings) * len(self.ref_emb) <= 2:
            return None
        if self.alone():
            return self.embeddings, ids_of(self.labels), None, None
        fraction = self.labels.is_floating_point() or self.ref_labels.is_floating_point()
        if fraction or self.ref_emb is self.embeddings or self.ref_labels is self.labels:
            return None
        return self.embeddings, ids_of(self.labels), self.ref_emb, ids_of(self.ref_labels)

    def mined(self) -> tuple[Any, ...] | None:
        """The pairs of a miner, as nearkin takes a batch; None where the original drops a lone pair of each kind."""
        a1, p, a2, n = _indexing.convert_to_pairs(self.indices_tuple, self.labels, self.ref_labels)
        if len(a1) <= 1 and len(a2) <= 1:
            return None
        shape = len(self.embeddings), len(self.ref_emb)
        positive, negative = torch.zeros(2, *shape, dtype=torch.bool, device=self.embeddings.device)
        positive[a1, p], negative[a2, n] = True, True
        if (positive & negative).any():
            return None  # the original refuses a pair of both kinds
        references = None if self.ref_emb is self.embeddings else self.ref_emb
        return self.embeddings, Relation(positive, negative), references, None


class InFloat32:
    """Computes half precision in float32, on either path."""

    def forward(
        self,
        embeddings: Tensor,
        labels: Any = None,
        indices_tuple: Any = None,
        ref_emb: Tensor | None = None,
        ref_labels: Any = None,
    ) -> Any:
        """The loss: a number, or the terms with `DoNothingReducer`."""
        wide = embeddings.float() if embeddings.dtype in HALF else embeddings
        if ref_emb is embeddings:
            ref_emb = wide
        elif ref_emb is not None and ref_emb.dtype in HALF:
            ref_emb = ref_emb.float()
        return super().forward(wide, labels, indices_tuple, ref_emb, ref_labels)  # type: ignore[misc]


class Native(InFloat32):
    """A loss over pairs or triplets, or of items."""

    def compute_loss(self: Any, *arguments: Any) -> Terms:
        """Asks `terms` first; where that gives None the original computes."""
        terms: Terms | None = self.terms(Call(*arguments)) if is_ours(self) else None
        return super().compute_loss(*arguments) if terms is None else terms  # type: ignore[misc]


class Reduced(Native):
    """A loss over pairs or triplets, which nearkin reduces itself, without a list of them."""

    def get_default_distance(self) -> Any:
        """Euclidean, of unit rows."""
        return LpDistance(p=2)

    def terms(self: Any, call: Call) -> Terms | None:
        """One number, as the first kind of terms; the others are 0."""
        reduction, pairs = reduction_of(self), call.pairs()
        if call.indices_tuple is not None or reduction is None or pairs is None:
            return None
        return one_number(self, self.native(*pairs, reduction=reduction))


class PerItem(Native):
    """A loss with one term per item, from its row of cosines; a miner's pairs become a `Relation`."""

    def get_default_distance(self) -> Any:
        """Cosines."""
        return CosineSimilarity()

    def terms(self: Any, call: Call) -> Terms | None:
        """One term per item, 0 for one without pairs."""
        if not is_cosine(self.distance):
            return None
        pairs = call.pairs() if call.indices_tuple is None else call.mined()
        return None if pairs is None else element(self.native(*pairs))


def is_ours(module: Any) -> bool:
    """Whether nearkin may compute: the class is one of ours itself, and no statistics are collected."""
    collects = any(getattr(part, "collect_stats", False) for part in module.modules())
    return "native" in vars(type(module)) and not collects


def ids_of(labels: Tensor) -> Tensor:
    """The same classes without nearkin's -1, which means unknown there and is a class like any other here."""
    return torch.where(labels == UNKNOWN, torch.iinfo(torch.int64).min, labels.long())


def reduction_of(loss: Any) -> str | None:
    """The name of nearkin's reduction that is this loss's reducer of all its terms, if there is one."""
    kinds = {type(loss.reducer)}
    if kinds == {_reducers.MultipleReducers}:
        own = dict(loss.reducer.reducers.items())
        kinds = {type(own.get(name, loss.reducer.default_reducer)) for name in loss._sub_loss_names()}
    return REDUCTIONS.get(kinds.pop()) if len(kinds) == 1 else None


def one_number(loss: Any, value: Tensor | None) -> Terms | None:
    """A number as the first kind of a loss's terms; the others are 0."""
    if value is None:
        return None
    first, *others = loss._sub_loss_names()
    reduced = {"losses": value, "indices": None, "reduction_type": "already_reduced"}
    return {first: reduced, **{name: loss.zero_loss() for name in others}}


def element(values: Tensor, indices: Tensor | None = None, name: str = "loss") -> Terms:
    """One term per item, or per item of `indices`."""
    if indices is None:
        indices = torch.arange(len(values), device=values.device)
    return {name: {"losses": values, "indices": indices, "reduction_type": "element"}}
