"""Quadruplet loss: a triplet, and items of two further classes that must be farther apart than the positive pair."""

from __future__ import annotations  # torch 2.6 compiles no function within one whose annotations it evaluates

from typing import NamedTuple

import torch
from torch import Tensor

from nearkin import mining
from nearkin.core import blockwise, distances, reduce
from nearkin.core.labels import Labels, Relation
from nearkin.losses.engine import Call, Rows, function_of
from nearkin.losses.selecting import SelectingLoss
from nearkin.losses.settings import Range, setting
from nearkin.losses.triplet import TRIPLETS, WHICH, all_triplets, picked

__all__ = ["QuadrupletLoss", "quadruplet_loss"]


class QuadrupletLoss(SelectingLoss):
    r"""A positive pair closer than its anchor's negative, and closer than a pair of two other classes.

    L = mean_{(a,p,n)} [d_ap - d_an + margin]_+  +  mean_{(a,p,n,l)} [d_ap - d_ln + second_margin]_+

    d = D² or D (squared=False). (a, p, n): the triplets of `selection`, as in `triplet_loss`. l is of a third class,
    neither a's nor n's: of the anchors of such classes the nearest to n, where the paper sums over every l. So nothing
    of size B³ is made: "all" takes O(B² log B) time, the other selections O(B²), and O(B²) memory. `reduction` applies
    to each half; a triplet without a third class has no second term. labels (B,) class ids, or a `Relation` with `ids`.
    Needs two items per class, and three classes for the second half. `sampling_dim`: as in `margin_loss`.
    Chen et al. 2017, arXiv:1704.01719, eq. 6, there with a learned metric; the second margin is the smaller one, as the
    paper demands. margin 0.2 on squared distances of unit vectors as in FaceNet, second_margin half of it: ours.
    """

    margin: float = setting(
        default=0.2,
        at_least=0,
        kw_only=False,
        search=Range(0.02, 0.6),
        text="how much nearer than its anchor's negative a positive must be; 0.2: FaceNet's",
    )
    second_margin: float = setting(
        default=0.1,
        at_least=0,
        kw_only=False,
        search=Range(0.01, 0.3),
        text="the same against a pair of two other classes; 0.1, half of the first: ours",
    )
    squared: bool = setting(default=True, text="squared distances (or hinges) instead of plain ones")
    selection: mining.Selection = SelectingLoss.states("semihard", search=TRIPLETS, text=WHICH)
    normalize: bool = setting(default=True, text="embeddings are scaled to unit length first")

    @property
    def triplet_margin(self) -> float | None:
        return self.margin

    def value(self, call: Call) -> Tensor:
        own = _classes(call.batch.labels)
        rivals = _rivals(call, own, self.squared, self.normalize)
        measure, select = "squared" if self.squared else "distance", self.selector(call)

        def rows(rows: Rows, ids: Tensor) -> tuple[Tensor, ...]:
            distance = rows.all(measure)  # (B, R)
            if self.selection == "all":
                gap, exists = rivals.of(ids)  # (B, R): each negative's distance to its l
                pairs = Relation(rows.positive, rows.negative & exists)
                first = all_triplets(distance, rows.relation, self.margin)
                return *first, *all_triplets(distance, pairs, self.second_margin, gap)
            near, far, chosen = picked(rows, measure, distance, select)
            gap, exists = rivals.of(ids, chosen.negative)
            first = blockwise.hinges(near - far, chosen.valid, self.reduction, start=-self.margin)
            second = blockwise.hinges(near - gap, chosen.valid & exists, self.reduction, start=-self.second_margin)
            return *first, *second

        sums, counts, active, *second = call.run(rows, own, **self.drawing())
        return reduce.total(sums, counts, active, self.reduction) + call.total(*second)


quadruplet_loss = function_of(QuadrupletLoss, "quadruplet_loss")


class _Rivals(NamedTuple):
    """Of each reference the nearest anchor of another class, and the next one, of yet another class.

    Whatever the anchor of a triplet, one of the two is of a third class, if there is such an anchor at all. All are
    (R,) and chosen from by an equality: in the code of inductor the sums of a gradient over (2, R) are read before they
    are complete (torch 2.13), and a choice by an inequality of int64 is wrong on CPUs without AVX-512.
    """

    gap: Tensor  # distance to the nearest, with gradient
    next_gap: Tensor
    classes: Tensor  # class id of the nearest
    exists: Tensor  # bool
    next_exists: Tensor

    def of(self, own: Tensor, columns: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Of references, all or (B, T) columns: the distance to the nearest anchor that is neither of their class nor
        of class `own` (B,), and whether there is one; each (B, R) or (B, T)."""
        if columns is not None and not len(self.classes):
            return self.gap.sum().expand(columns.shape), torch.zeros_like(columns, dtype=torch.bool)
        if columns is None:
            taken = self.classes == own[:, None]
            return torch.where(taken, self.next_gap, self.gap), torch.where(taken, self.next_exists, self.exists)
        # One gather for both, whose place is a sum: inductor refuses the gradients of two on several threads.
        index = columns + len(self.classes) * (self.classes[columns] == own[:, None])
        return torch.cat([self.gap, self.next_gap])[index], torch.cat([self.exists, self.next_exists])[index]


def _classes(labels: Labels) -> Tensor:
    """Class ids of the anchors, (B,)."""
    ids = labels.ids if isinstance(labels, Relation) else labels
    if not isinstance(ids, Tensor) or ids.dim() != 1 or ids.dtype == torch.bool:
        raise TypeError("labels must be integer class ids, or a Relation with ids: a quadruplet is of three classes")
    return ids.long()


def _rivals(call: Call, own: Tensor, squared: bool, normalize: bool) -> _Rivals:
    swapped = blockwise.transposed(call.batch)

    def rows(rows: Rows) -> tuple[Tensor, ...]:
        distance = rows.all("distance")  # (R, B)
        first = reduce.argmax(-distance, rows.negative)
        if not distance.shape[1]:
            return first, first, first > 0, first > 0  # none
        beyond = rows.negative & (own[None, :] != own[first][:, None])
        second = reduce.argmax(-distance, beyond)
        return first, second, reduce.any_in_row(rows.negative), reduce.any_in_row(beyond)

    with torch.no_grad():
        first, second, has_first, has_second = call.across(rows)
    if not own.shape[0]:
        gap = swapped.embeddings.sum() + torch.zeros_like(has_first, dtype=swapped.embeddings.dtype)
        return _Rivals(gap, gap, first, has_first, has_second)
    wide = distances.wide_rows(swapped.embeddings, swapped.references, normalize)
    gaps = distances.picked(wide, torch.stack([first, second], 1), root=not squared)
    return _Rivals(gaps[:, 0], gaps[:, 1], own[first], has_first, has_second)
