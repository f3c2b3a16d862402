"""Labels of every kind become masks of positive and negative pairs, or label distances; losses compare no labels."""

from typing import Any

import torch
from torch import Tensor

from nearkin.core import distances
from nearkin.core.autograd import full_precision, traced
from nearkin.core.labels import UNKNOWN, BatchFirst, LabelDistance, Labels, Relation

__all__ = ["UNKNOWN", "LabelDistance", "Labels", "Relation", "explicit", "label_distances", "multilabel", "of"]


def __dir__() -> list[str]:
    return __all__


def explicit(positive: Tensor, negative: Tensor | None = None) -> Relation:
    """A relation from a (B, R) bool matrix of positive pairs; without `negative`, all other pairs are negative."""
    return Relation(positive, ~positive if negative is None else negative)


def multilabel(labels: Tensor, reference_labels: Tensor | None = None) -> Relation:
    """Positive where two (K,) bool rows share a label, (B, R); negative otherwise."""
    other = labels if reference_labels is None else reference_labels
    with full_precision(labels):
        shared = labels.float() @ other.float().T > 0  # counts of shared labels: exact in float32
    return Relation(shared, ~shared)


def of(labels: Labels, references: Tensor | None = None, reference_labels: Labels | None = None) -> Relation:
    """The relation of a batch, in the order of a loss's arguments; a batch is its own reference, without self-pairs.

    labels: class ids (B,), where -1 is unknown; multi-label rows (B, K) bool; a `Relation`; or, with references and
    without reference_labels, a (B, R) bool matrix of positive pairs. Of a `BatchFirst` self-pairs are left out too.
    """
    batch_first = isinstance(labels, BatchFirst) or isinstance(reference_labels, BatchFirst)
    relation = _plain(_ids(labels), references, _ids(reference_labels))
    if references is not None and not batch_first:
        return relation
    if traced():  # an older compiler knows no diagonal of a size that is a symbol
        others = ~torch.eye(*relation.positive.shape, dtype=torch.bool, device=relation.positive.device)
        return Relation(relation.positive & others, relation.negative & others)
    if isinstance(labels, Relation):  # the caller's own masks stay as they are
        relation = Relation(relation.positive.clone(), relation.negative.clone())
    return Relation(relation.positive.fill_diagonal_(False), relation.negative.fill_diagonal_(False))


def _ids(labels: Any) -> Any:
    return labels.ids if isinstance(labels, BatchFirst) else labels


def label_distances(targets: Labels, reference_targets: Labels | None = None) -> Tensor:
    """(B, R) distances of real-valued targets, (B,) or (B, K): Euclidean, in float64 where the device has it."""
    if isinstance(targets, LabelDistance):
        return targets.distance
    other = targets if reference_targets is None else reference_targets
    assert isinstance(targets, Tensor) and isinstance(other, Tensor)
    a, b = targets.to(distances.wide(targets)), other.to(distances.wide(targets))
    if a.dim() == 1:
        return (a[:, None] - b[None, :]).abs()
    total = a.new_zeros(a.shape[0], b.shape[0])
    for k in range(a.shape[1]):  # a target has few columns; differences are exact where a Gram matrix is not
        total = total + (a[:, k, None] - b[None, :, k]).square()
    return total.sqrt()


def _plain(labels: Labels, references: Tensor | None, reference_labels: Labels | None) -> Relation:
    if isinstance(labels, Relation):
        return labels
    assert isinstance(labels, Tensor)
    if labels.dtype == torch.bool:
        if references is not None and reference_labels is None:
            return explicit(labels)
        assert reference_labels is None or isinstance(reference_labels, Tensor)
        return multilabel(labels, reference_labels)
    ids = labels.long()
    other = ids
    if reference_labels is not None:
        assert isinstance(reference_labels, Tensor)
        other = reference_labels.long()
    same = ids[:, None] == other[None, :]
    if distances.freely_read(ids) and not bool((ids == UNKNOWN).any() or (other == UNKNOWN).any()):
        return Relation(same, ~same)  # the common case: every class is known
    known_ids = ids != UNKNOWN
    known = known_ids[:, None] & (known_ids if other is ids else other != UNKNOWN)[None, :]
    positive = same & known
    return Relation(positive, known ^ positive)
