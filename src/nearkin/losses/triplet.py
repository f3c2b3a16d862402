"""Triplet losses: an anchor's positives nearer than its negatives, in every selection of `mining`."""

from __future__ import annotations  # torch 2.6 compiles no function within one whose annotations it evaluates

from collections.abc import Callable

import torch
from torch import Tensor

from nearkin import mining
from nearkin.core import blockwise, distances, reduce
from nearkin.core.labels import Relation
from nearkin.losses.engine import Call, Costs, PairLoss, Rows, function_of
from nearkin.losses.selecting import SelectingLoss
from nearkin.losses.settings import Choices, Range, setting

__all__ = ["LosslessTripletLoss", "TripletLoss", "lossless_triplet_loss", "triplet_loss"]

TRIPLETS = Choices(("semihard", "batch_hard", "distance_weighted", "all"))
WHICH = 'which triplets count: "all", a triplet selection of `nearkin.mining`, or your own function'


class TripletLoss(SelectingLoss):
    r"""A positive nearer than a negative by a margin, or softly without one.

    l_apn = [d_ap - d_an + margin]_+   or, with margin=None,   log(1 + e^{d_ap - d_an});   d = D² or D (squared=False)

    embeddings (B, D), labels (B,) or any relation of `relations.of`. Needs two items per class. The mean is over the
    selected triplets, "active" over those above 0. selection="all" sums every triplet exactly by sorting, in
    O(B² log B) time and O(B²) memory; it needs a margin, and no `swap` (d_an replaced by the smaller of d_an and d_pn).
    The margin of selection="random_semihard" is this one, between these d.
    Schroff et al. 2015, arXiv:1503.03832, eq. 2-4: squared, unit length, margin 0.2, semi-hard. Hermans et al. 2017,
    arXiv:1703.07737, is margin=None, squared=False, normalize=False, selection="batch_hard".
    """

    margin: float | None = setting(
        default=0.2,
        at_least=0,
        optional=True,
        kw_only=False,
        search=Range(0.02, 0.6),
        text="how much nearer than the negative the positive must be; 0.2: FaceNet's. None: softplus instead",
    )
    squared: bool = setting(default=True, text="squared distances, as in FaceNet; False: plain, as in Hermans et al.")
    swap: bool = setting(
        default=False, text="the negative's distance to the positive counts where it is the smaller one"
    )
    selection: mining.Selection = SelectingLoss.states("semihard", search=TRIPLETS, text=WHICH)
    normalize: bool = setting(default=True, text="embeddings are scaled to unit length first")

    def impossible(self) -> dict[str, str]:
        because = super().impossible()
        if self.margin is None or self.swap:
            because["all"] = "every triplet is summed by sorting, which needs a margin and no swap"
        return because

    @property
    def triplet_margin(self) -> float | None:
        return self.margin

    def value(self, call: Call) -> Tensor:
        measure = "squared" if self.squared else "distance"
        how = self.drawing()
        how["all_rows"] = how["all_rows"] or ("swap=True takes the distances of references" if self.swap else None)
        if self.selection == "all":
            assert self.margin is not None
            margin = self.margin
            return call.reduced(lambda rows: all_triplets(rows.all(measure), rows.relation, margin), **how)
        select = self.selector(call)

        def rows(rows: Rows) -> Costs:
            distance = rows.all(measure)
            near, far, chosen = picked(rows, measure, distance, select)
            if self.swap and distance.shape[1]:
                references = rows.x if rows.references is None else rows.references
                others = Rows(references, None, None, measure, self.normalize)
                between = distance if rows.references is None else others.all()  # (R, R)
                far = torch.minimum(far, between[chosen.positive, chosen.negative])
            if self.margin is None:
                return blockwise.sums_and_counts(reduce.softplus(near - far), chosen.valid, self.reduction)
            return blockwise.hinges(near - far, chosen.valid, self.reduction, start=-self.margin)

        return call.reduced(rows, **how)


def picked(
    rows: Rows, measure: str, distance: Tensor, select: Callable[..., mining.Triplets | mining.Pairs]
) -> tuple[Tensor, Tensor, mining.Triplets]:
    """The measure of the chosen triplets' positives and negatives, (B, T) each, and the triplets.

    The search has no gradient. That of the loss goes through the matrix, or, where the triplets are few, through the
    rows that were picked alone: whichever is less.
    """
    plain = distance.detach().sqrt() if measure == "squared" else distance.detach()
    chosen = select(rows, plain, squared=measure == "squared")
    assert isinstance(chosen, mining.Triplets)
    if rows.few(chosen.positive):
        both = rows.pick(torch.cat([chosen.positive, chosen.negative], 1), measure)
        number = chosen.positive.shape[1]
        return both[:, :number], both[:, number:], chosen
    return mining.pick(distance, chosen.positive), mining.pick(distance, chosen.negative), chosen


def all_triplets(
    distance: Tensor, relation: Relation, margin: float, far: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum of the hinge over all triplets of each anchor, their number, and how many are active, each (B,).

    far (B, R): what replaces the distances of negatives, where it is not these themselves.

    The hinge is linear where active: Σ_p k_p (d_p + m) - Σ_n c_n d_n, with k_p the negatives nearer than d_p + m and
    c_n the positives whose d_p + m is beyond d_n. k comes from a binary search in the sorted negatives; a positive
    covers the first k of them, so c at position r is the number of positives with k > r. Neither has a gradient, and
    what is left is linear in the distances: autograd's gradient is exact.
    """
    with torch.no_grad():
        beaten, beating = _count_active(
            (distance if far is None else far).masked_fill(~relation.negative, torch.inf),
            lambda: (distance + margin).masked_fill_(~relation.positive, -torch.inf),
        )
        # Both sides hold each active triplet once, so any constant may be taken off both: less to cancel.
        middle = distance.mean(1, keepdim=True) if distance.shape[1] else distance.sum(1, keepdim=True)
        active = beaten.sum(1)
        shift = active.to(distances.wide(distance)) * margin
    weight = beaten.to(distance.dtype)
    weight = weight.sub_(beating) if far is None else weight
    sums = ((distance - middle) * weight).sum(1, dtype=distances.wide(distance)) + shift
    if far is not None:
        sums = sums - ((far - middle) * beating).sum(1, dtype=distances.wide(distance))
    return sums.to(distance.dtype), relation.positive.sum(1) * relation.negative.sum(1), active


def _count_active(thresholds: Tensor, reach: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """How many thresholds of negatives each positive's reach is above, (B, R) int32; and how many reaches are above
    each threshold, (B, R). thresholds: inf where not a negative. reach, made when it is needed: -inf where not a
    positive."""
    thresholds, order = thresholds.sort(1)
    beaten = torch.searchsorted(thresholds, reach(), out_int32=True)
    kind = thresholds.dtype
    del thresholds
    last = beaten.long().sub_(1).clamp_(min=0)
    ends = torch.zeros_like(last, dtype=kind).scatter_add_(1, last, (beaten > 0).to(kind))
    del last
    covered = ends.flip(1).cumsum(1).flip(1)  # in sorted order: positives that end here or later
    return beaten, torch.empty_like(covered).scatter_(1, order, covered)


class LosslessTripletLoss(PairLoss):
    r"""A triplet loss whose slope never dies, on embeddings inside the unit cube.

    l_apn = -ln(1 - d_ap/N + ε) - ln(1 - (N - d_an)/N + ε),   d = squared Euclidean distance, N = dimensions

    `sigmoid=True` maps raw outputs into the cube; set it False where the encoder ends in a sigmoid (values are then
    clamped to [0, 1]). Over all triplets: the terms split into pairs, so it takes O(B²); to tell those above 0
    ("active") O(B² log B). A term is 0 or below only within ε of d_ap = 0 and d_an = N. Needs two items per class.
    Arsenault 2018 (blog); β = N and ε 1e-8 from there.
    """

    sigmoid: bool = setting(
        default=True, text="maps embeddings into the unit cube; False where the encoder ends in a sigmoid"
    )
    epsilon: float = setting(
        default=1e-8, above=0, search=Range(1e-8, 1e-2, log=True), text="ε inside the logarithms; 1e-8: the blog's"
    )

    def rows(self, rows: Rows) -> Costs:
        others = None if rows.references is None else _into_cube(rows.references, self.sigmoid)
        x = _into_cube(rows.x, self.sigmoid)
        share = distances.squared_euclidean(x, others) / x.shape[1]  # (B, R) in [0, 1]
        rest = 1 - share
        pull = -(torch.where(rest < 0, 0.0, rest) + self.epsilon).log()
        push = -(share + self.epsilon).log()
        positives, negatives = rows.positive.sum(1), rows.negative.sum(1)
        if self.reduction == "active":
            with torch.no_grad():
                of_positive, of_negative = _count_active(
                    torch.where(rows.negative, -push, torch.inf),
                    lambda: pull.masked_fill(~rows.positive, -torch.inf),
                )
            sums = (pull * of_positive).sum(1) + torch.where(rows.negative, push * of_negative, 0.0).sum(1)
            return sums, positives * negatives, of_positive.sum(1)
        pulled = torch.where(rows.positive, pull, 0.0).sum(1) * negatives
        pushed = torch.where(rows.negative, push, 0.0).sum(1) * positives
        return pulled + pushed, positives * negatives, positives * negatives


triplet_loss = function_of(TripletLoss, "triplet_loss")
lossless_triplet_loss = function_of(LosslessTripletLoss, "lossless_triplet_loss")


def _into_cube(x: Tensor, sigmoid: bool) -> Tensor:
    x = distances.upcast(x)
    if sigmoid:
        return x.sigmoid()
    return torch.where(
        x < 0, 0.0, torch.where(x > 1, 1.0, x)
    )  # with a slope at 0 and 1, where torch 2.15's clamp has none
