"""Triplet losses: an anchor's positives nearer than its negatives, in every selection of `mining`.

`max_memory` (bytes) is what a loss may hold beside its arguments and gradients, in blocks of rows: `core/blockwise.py`.
`impl`: "torch" runs anywhere, "triton" is one kernel per pass (`kernels/triplet_ops.py`; its draws differ, from the
same distribution), "auto" takes it where it serves.
"""

from __future__ import annotations  # torch 2.6 compiles no function within one whose annotations it evaluates

from collections.abc import Callable

import torch
from torch import Tensor

from nearkin import mining
from nearkin.core import blockwise, checks, distances, reduce
from nearkin.core.relations import Labels, Relation
from nearkin.losses import sampling_dim as sampling_dims
from nearkin.losses.call import PairCall, Plan
from nearkin.losses.module import LossModule
from nearkin.losses.sampling_dim import SamplingDim

__all__ = ["LosslessTripletLoss", "TripletLoss", "lossless_triplet_loss", "triplet_loss"]


def triplet_loss(
    embeddings: Tensor,
    labels: Labels,
    references: Tensor | None = None,
    reference_labels: Labels | None = None,
    *,
    margin: float | None = 0.2,
    squared: bool = True,
    swap: bool = False,
    selection: mining.Selection = "semihard",
    normalize: bool = True,
    reduction: str = "mean",
    sampling_dim: SamplingDim = None,
    generator: torch.Generator | None = None,
    max_memory: int | None = None,
    impl: str = "auto",
) -> Tensor:
    r"""A positive nearer than a negative by a margin, or softly without one.

    l_apn = [d_ap - d_an + margin]_+   or, with margin=None,   log(1 + e^{d_ap - d_an});   d = D² or D (squared=False)

    embeddings (B, D), labels (B,) or any relation of `relations.of`. Needs two items per class. The mean is over the
    selected triplets, "active" over those above 0. selection="all" sums every triplet exactly by sorting, in
    O(B² log B) time and O(B²) memory; it needs a margin, and no `swap` (d_an replaced by the smaller of d_an and d_pn).
    `sampling_dim`: as in `margin_loss`. The margin of selection="random_semihard" is this one, between these d.
    Schroff et al. 2015, arXiv:1503.03832, eq. 2-4: squared, unit length, margin 0.2, semi-hard. Hermans et al. 2017,
    arXiv:1703.07737, is margin=None, squared=False, normalize=False, selection="batch_hard".
    """
    call = PairCall(embeddings, labels, references, reference_labels, reduction, max_memory, impl)
    if margin is not None:
        checks.at_least("margin", margin, 0)
    check_selection(selection, margin, swap, normalize)
    dim = sampling_dims.resolve(sampling_dim, selection, embeddings, labels)
    mining.check_generator(selection, generator)
    if isinstance(selection, str) and not swap:
        link = "soft" if margin is None else "hinge"
        plan = Plan(selection, link, margin or 0.0, squared, normalize, reduction)
        if (value := call.triplet_kernel(plan, dim, generator=generator)) is not None:
            return value
    measure = distances.squared_euclidean if squared else distances.euclidean

    def rows(x: Tensor, references: Tensor | None, relation: Relation) -> tuple[Tensor, ...]:
        distance = measure(x, references, normalize=normalize)  # (B, R)
        if selection == "all":
            assert margin is not None
            return all_triplets(distance, relation, margin)
        plain = distance.detach().sqrt() if squared else distance
        chosen = mining.select(selection, plain, relation, dim=dim, generator=generator, margin=margin, squared=squared)
        if isinstance(chosen, mining.Pairs):
            raise TypeError("selection must return Triplets for a triplet loss, got Pairs")
        near, far = mining.pick(distance, chosen.positive), mining.pick(distance, chosen.negative)  # (B, T)
        if swap and distance.shape[1]:
            between = distance if references is None else measure(references, normalize=normalize)  # (R, R)
            far = torch.minimum(far, between[chosen.positive, chosen.negative])
        if margin is None:
            return blockwise.sums_and_counts(reduce.softplus(near - far), chosen.valid, reduction)
        return blockwise.hinges(near - far, chosen.valid, reduction, start=-margin)

    all_rows = "swap=True takes the distances of references" if swap else None
    return call.total(*call.run(rows, selection=selection, generator=generator, all_rows=all_rows))


def check_selection(selection: mining.Selection, margin: float | None, swap: bool, normalize: bool) -> None:
    """Refuses a selection that a triplet loss cannot use with these settings."""
    if not isinstance(selection, str):
        return
    because = dict.fromkeys(mining.PAIR_SELECTIONS, "it selects pairs")
    if margin is None or swap:
        because["all"] = "every triplet is summed by sorting, which needs a margin and no swap"
    if not normalize:
        because["distance_weighted"] = "it needs unit vectors, normalize=True"
    possible = [name for name in ("all", *mining.TRIPLET_SELECTIONS) if name not in because]
    if selection in because:
        checks.impossible("selection", selection, because[selection], possible)
    checks.one_of("selection", selection, possible)


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


def lossless_triplet_loss(
    embeddings: Tensor,
    labels: Labels,
    references: Tensor | None = None,
    reference_labels: Labels | None = None,
    *,
    sigmoid: bool = True,
    epsilon: float = 1e-8,
    reduction: str = "mean",
    max_memory: int | None = None,
    impl: str = "auto",
) -> Tensor:
    r"""A triplet loss whose slope never dies, on embeddings inside the unit cube.

    l_apn = -ln(1 - d_ap/N + ε) - ln(1 - (N - d_an)/N + ε),   d = squared Euclidean distance, N = dimensions

    `sigmoid=True` maps raw outputs into the cube; set it False where the encoder ends in a sigmoid (values are then
    clamped to [0, 1]). Over all triplets: the terms split into pairs, so it takes O(B²); to tell those above 0
    ("active") O(B² log B), without a kernel. A term is 0 or below only within ε of d_ap = 0 and d_an = N. Needs two
    items per class. Arsenault 2018 (blog); β = N and ε 1e-8 from there.
    """
    call = PairCall(embeddings, labels, references, reference_labels, reduction, max_memory, impl)
    checks.positive("epsilon", epsilon)
    if reduction != "active":
        numbers = (1 / embeddings.shape[1], epsilon)
        if (value := call.pair_kernel("lossless", numbers, flag=sigmoid, normalize=False)) is not None:
            return value

    def rows(x: Tensor, references: Tensor | None, relation: Relation) -> tuple[Tensor, ...]:
        others = None if references is None else _into_cube(references, sigmoid)
        share = distances.squared_euclidean(_into_cube(x, sigmoid), others) / x.shape[1]  # (B, R) in [0, 1]
        rest = 1 - share
        pull = -(torch.where(rest < 0, 0.0, rest) + epsilon).log()
        push = -(share + epsilon).log()
        positives, negatives = relation.positive.sum(1), relation.negative.sum(1)
        if reduction == "active":
            with torch.no_grad():
                of_positive, of_negative = _count_active(
                    torch.where(relation.negative, -push, torch.inf),
                    lambda: pull.masked_fill(~relation.positive, -torch.inf),
                )
            sums = (pull * of_positive).sum(1) + torch.where(relation.negative, push * of_negative, 0.0).sum(1)
            return sums, positives * negatives, of_positive.sum(1)
        pulled = torch.where(relation.positive, pull, 0.0).sum(1) * negatives
        pushed = torch.where(relation.negative, push, 0.0).sum(1) * positives
        return pulled + pushed, positives * negatives, positives * negatives

    return call.total(*call.run(rows))


def _into_cube(x: Tensor, sigmoid: bool) -> Tensor:
    x = distances.upcast(x)
    if sigmoid:
        return x.sigmoid()
    return torch.where(
        x < 0, 0.0, torch.where(x > 1, 1.0, x)
    )  # with a slope at 0 and 1, where torch 2.15's clamp has none


class TripletLoss(LossModule, function=triplet_loss):
    """Holds the settings of `triplet_loss`; computes nothing itself."""

    def __init__(
        self,
        margin: float | None = 0.2,
        *,
        squared: bool = True,
        swap: bool = False,
        selection: mining.Selection = "semihard",
        normalize: bool = True,
        reduction: str = "mean",
        sampling_dim: int | str | None = None,
        generator: torch.Generator | None = None,
        max_memory: int | None = None,
        impl: str = "auto",
    ) -> None:
        super().__init__()
        self.margin, self.squared, self.swap, self.selection = margin, squared, swap, selection
        self.sampling_dim = sampling_dim
        self.normalize, self.reduction, self.generator = normalize, reduction, generator
        self.max_memory, self.impl = max_memory, impl
        self.finish_init()


class LosslessTripletLoss(LossModule, function=lossless_triplet_loss):
    """Holds the settings of `lossless_triplet_loss`; computes nothing itself."""

    def __init__(
        self,
        *,
        sigmoid: bool = True,
        epsilon: float = 1e-8,
        reduction: str = "mean",
        max_memory: int | None = None,
        impl: str = "auto",
    ) -> None:
        super().__init__()
        self.sigmoid, self.epsilon = sigmoid, epsilon
        self.reduction, self.max_memory, self.impl = reduction, max_memory, impl
        self.finish_init()
