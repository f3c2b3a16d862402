"""Who is kin to whom: labels of every kind become masks, or label distances. No loss compares labels itself."""

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from nearkin.core import distances
from nearkin.core.autograd import device_type, traced

__all__ = [
    "UNKNOWN",
    "LabelDistance",
    "Labels",
    "Relation",
    "explicit",
    "label_distances",
    "multilabel",
    "of",
]


def __dir__() -> list[str]:
    return __all__


UNKNOWN = -1  # a class id that is neither kin nor stranger to anyone


class Relation(NamedTuple):
    """Explicit kinship of anchors with references, each (B, R) bool; a pair in neither mask is left out.

    ids: the class of each anchor (B,), where a loss keeps something for each class.
    """

    positive: Tensor
    negative: Tensor
    ids: Tensor | None = None


class LabelDistance(NamedTuple):
    """Precomputed real-valued label distances of anchors with references, (B, R), for graded losses."""

    distance: Tensor


Labels: TypeAlias = Tensor | Relation | LabelDistance


def explicit(positive: Tensor, negative: Tensor | None = None) -> Relation:
    """A relation from a (B, R) bool matrix; strangers are all others unless given."""
    return Relation(positive, ~positive if negative is None else negative)


def multilabel(labels: Tensor, reference_labels: Tensor | None = None) -> Relation:
    """Kin if two (K,) bool rows share a label, (B, R); strangers otherwise."""
    other = labels if reference_labels is None else reference_labels
    with torch.autocast(device_type(labels), enabled=False):
        shared = labels.float() @ other.float().T > 0  # counts of shared labels: exact in float32
    return Relation(shared, ~shared)


def of(labels: Labels, references: Tensor | None = None, reference_labels: Labels | None = None) -> Relation:
    """The relation of a batch, in the order of a loss's arguments; a batch meets itself without its self-pairs.

    labels: class ids (B,), where -1 is unknown; multi-label rows (B, K) bool; a `Relation`; or, with references and
    without reference_labels, a (B, R) bool matrix of kinship.
    """
    kin = _plain(labels, references, reference_labels)
    if references is not None:
        return kin
    if traced():  # an older compiler knows no diagonal of a size that is a symbol
        others = ~torch.eye(kin.positive.shape[0], dtype=torch.bool, device=kin.positive.device)
        return Relation(kin.positive & others, kin.negative & others)
    if isinstance(labels, Relation):  # the caller's own masks stay as they are
        kin = Relation(kin.positive.clone(), kin.negative.clone())
    return Relation(kin.positive.fill_diagonal_(False), kin.negative.fill_diagonal_(False))


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
    if distances.freely_read(ids) and not bool(
        (ids == UNKNOWN).any() or (other == UNKNOWN).any()
    ):  # mostly nobody is unknown
        return Relation(same, ~same)
    known = (ids != UNKNOWN)[:, None] & (other != UNKNOWN)[None, :]
    return Relation(same & known, ~same & known)
