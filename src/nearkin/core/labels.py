"""What the labels of a batch may be: class ids, multi-label rows, a `Relation`, a `LabelDistance`, or `BatchFirst`."""

from typing import NamedTuple, TypeAlias

from torch import Tensor

__all__ = ["UNKNOWN", "BatchFirst", "LabelDistance", "Labels", "Relation"]

UNKNOWN = -1  # a class id that makes no positive and no negative pair


class Relation(NamedTuple):
    """Explicit positive and negative pairs of anchors with references, each (B, R) bool; a pair in neither is ignored.

    ids: the class of each anchor (B,), where a loss keeps something for each class.
    """

    positive: Tensor
    negative: Tensor
    ids: Tensor | None = None


class LabelDistance(NamedTuple):
    """Precomputed real-valued label distances of anchors with references, (B, R), for graded losses."""

    distance: Tensor


class BatchFirst(NamedTuple):
    """Class ids (R,) of references whose first B rows are the anchors: an anchor's pair with itself is left out.

    Only as reference_labels, beside class ids. It says in R numbers what a `Relation` says in two (B, R) matrices.
    """

    ids: Tensor


Labels: TypeAlias = Tensor | Relation | LabelDistance | BatchFirst
