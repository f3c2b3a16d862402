"""Quadruplet loss: a triplet, and items of two further classes that must be farther apart than the positive pair.

`max_memory` (bytes) is what a loss may hold beside its arguments and gradients, in blocks of rows: `core/blockwise.py`.
"""

from __future__ import annotations  # torch 2.6 compiles no function within one whose annotations it evaluates

from typing import NamedTuple

import torch
from torch import Tensor

from nearkin import mining
from nearkin.core import blockwise, checks, distances, reduce
from nearkin.core.relations import Labels, Relation
from nearkin.losses import sampling_dim as sampling_dims
from nearkin.losses.call import PairCall
from nearkin.losses.module import LossModule
from nearkin.losses.sampling_dim import SamplingDim
from nearkin.losses.triplet import all_triplets, check_selection

__all__ = ["QuadrupletLoss", "quadruplet_loss"]


def quadruplet_loss(
    embeddings: Tensor,
    labels: Labels,
    references: Tensor | None = None,
    reference_labels: Labels | None = None,
    *,
    margin: float = 0.2,
    second_margin: float = 0.1,
    squared: bool = True,
    selection: mining.Selection = "semihard",
    normalize: bool = True,
    reduction: str = "mean",
    sampling_dim: SamplingDim = None,
    generator: torch.Generator | None = None,
    max_memory: int | None = None,
) -> Tensor:
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
    call = PairCall(embeddings, labels, references, reference_labels, reduction, max_memory)
    checks.at_least("margin", margin, 0)
    checks.at_least("second_margin", second_margin, 0)
    check_selection(selection, margin, False, normalize)
    dim = sampling_dims.resolve(sampling_dim, selection, embeddings, labels)
    mining.check_generator(selection, generator)
    own = _classes(labels)
    measure = distances.squared_euclidean if squared else distances.euclidean
    rivals = _rivals(call.batch, own, squared, normalize, max_memory)

    def rows(x: Tensor, references: Tensor | None, relation: Relation, ids: Tensor) -> tuple[Tensor, ...]:
        distance = measure(x, references, normalize=normalize)  # (B, R)
        if selection == "all":
            gap, exists = rivals.of(ids)  # (B, R): each negative's distance to its l
            pairs = Relation(relation.positive, relation.negative & exists)
            return *all_triplets(distance, relation, margin), *all_triplets(distance, pairs, second_margin, gap)
        plain = distance.detach().sqrt() if squared else distance
        chosen = mining.select(selection, plain, relation, dim=dim, generator=generator, margin=margin, squared=squared)
        if isinstance(chosen, mining.Pairs):
            raise TypeError("selection must return Triplets for a quadruplet loss, got Pairs")
        near, far = mining.pick(distance, chosen.positive), mining.pick(distance, chosen.negative)  # (B, T)
        gap, exists = rivals.of(ids, chosen.negative)
        first = blockwise.hinges(near - far, chosen.valid, reduction, start=-margin)
        return *first, *blockwise.hinges(near - gap, chosen.valid & exists, reduction, start=-second_margin)

    sums, counts, active, *second = call.run(rows, own, selection=selection, generator=generator)
    return reduce.total(sums, counts, active, reduction) + call.total(*second)


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


def _rivals(batch: blockwise.Batch, own: Tensor, squared: bool, normalize: bool, max_memory: int | None) -> _Rivals:
    swapped = blockwise.transposed(batch)

    def rows(x: Tensor, anchors: Tensor | None, relation: Relation) -> tuple[Tensor, ...]:
        distance = distances.euclidean(x, anchors, normalize=normalize)  # (R, B)
        _, first = reduce.largest(-distance, relation.negative)
        if not distance.shape[1]:
            return first, first, first > 0, first > 0  # none
        beyond = relation.negative & (own[None, :] != own[first][:, None])
        _, second = reduce.largest(-distance, beyond)
        return first, second, reduce.any_in_row(relation.negative), reduce.any_in_row(beyond)

    with torch.no_grad():
        first, second, has_first, has_second = blockwise.run(rows, swapped, max_memory=max_memory)
    if not own.shape[0]:
        gap = swapped.embeddings.sum() + torch.zeros_like(has_first, dtype=swapped.embeddings.dtype)
        return _Rivals(gap, gap, first, has_first, has_second)
    anchors, references = _wide(batch.embeddings, normalize), _wide(swapped.embeddings, normalize)
    kind = torch.promote_types(torch.promote_types(batch.embeddings.dtype, swapped.embeddings.dtype), torch.float32)

    def gap_to(nearest: Tensor) -> Tensor:
        gap = (anchors[nearest] - references).square().sum(1)
        if not squared:
            gap = torch.where(gap > 0, torch.where(gap > 0, gap, 1.0).sqrt(), 0.0)
        return gap.to(kind)

    return _Rivals(gap_to(first), gap_to(second), own[first], has_first, has_second)


def _wide(x: Tensor, normalize: bool) -> Tensor:
    """Rows in the widest type of the device, in which their differences keep their digits."""
    return distances.units(x, distances.wide(x))[0] if normalize else distances.upcast(x).to(distances.wide(x))


class QuadrupletLoss(LossModule, function=quadruplet_loss):
    """Holds the settings of `quadruplet_loss`; computes nothing itself."""

    def __init__(
        self,
        margin: float = 0.2,
        second_margin: float = 0.1,
        *,
        squared: bool = True,
        selection: mining.Selection = "semihard",
        normalize: bool = True,
        reduction: str = "mean",
        sampling_dim: int | str | None = None,
        generator: torch.Generator | None = None,
        max_memory: int | None = None,
    ) -> None:
        super().__init__()
        self.sampling_dim = sampling_dim
        self.margin, self.second_margin, self.squared, self.selection = margin, second_margin, squared, selection
        self.normalize, self.reduction, self.generator, self.max_memory = normalize, reduction, generator, max_memory
        self.finish_init()
