"""Rank losses: average precision itself, made smooth.

`max_memory` (bytes) is what a loss may hold beside its arguments and gradients, in blocks of rows: `core/blockwise.py`.
"""

from __future__ import annotations  # torch 2.6 compiles no function within one whose annotations it evaluates

import torch
from torch import Tensor

from nearkin.core import checks, distances
from nearkin.core.autograd import recomputed
from nearkin.core.relations import Labels, Relation
from nearkin.losses.call import PairCall
from nearkin.losses.module import LossModule, without_impl

__all__ = ["FastAPLoss", "SmoothAPLoss", "fastap_loss", "smooth_ap_loss"]


@without_impl
def smooth_ap_loss(
    embeddings: Tensor,
    labels: Labels,
    references: Tensor | None = None,
    reference_labels: Labels | None = None,
    *,
    temperature: float = 0.01,
    max_positives: int | None = None,
    reduction: str = "mean",
    max_memory: int | None = None,
) -> Tensor:
    r"""One minus average precision, with a sigmoid for "ranks before".

    l_i = 1 - 1/|P_i| Σ_{p in P_i} (1 + Σ_{q in P_i, q != p} σ(s_iq - s_ip)) / (1 + Σ_{r != p} σ(s_ir - s_ip))

    s = cosine, σ(x) = 1/(1 + e^{-x/t}), r over all positives and negatives of i. Anchors without positives do not
    count. Time O(B² |P|); the comparisons are made a few positives at a time and made again for the gradient, so memory
    is O(B²). The largest |P| is read off on the CPU. Reading it would stall a GPU: there, without `max_positives`
    (items per class less one), the time is O(B² R). More positives are an error, or NaN where not read. Needs two items
    per class. Brown et al. 2020, arXiv:2007.12163, eq. 7; temperature 0.01 from there.
    """
    call = PairCall(embeddings, labels, references, reference_labels, reduction, max_memory)
    checks.positive("temperature", temperature)
    if max_positives is not None:
        checks.integer("max_positives", max_positives, 1)

    def rows(x: Tensor, references: Tensor | None, relation: Relation) -> tuple[Tensor, ...]:
        scores = distances.cosine(x, references) / temperature  # (B, R), larger is closer
        number = relation.positive.sum(1)
        slots = _slots(number, scores.shape[1], max_positives)
        # Columns with an anchor's positives first, so that only as many slots are visited as there may be positives.
        order = relation.positive.to(torch.uint8).sort(dim=1, descending=True, stable=True).indices
        precision = scores.sum(1) * 0  # on the graph even where no anchor has positives
        # Positives compared with all references at once: what fills 4M comparisons, where memory is not bounded.
        tile = 2 if max_memory is not None else max(2, 2**22 // max(scores.numel(), 1))
        for start in range(0, slots, tile):
            part = order[:, start : min(start + tile, slots)]
            precision = precision + recomputed(_precisions, scores, relation.positive, relation.negative, part)
        value = 1 - precision / number.clamp(min=1)
        return torch.where(number > slots, torch.nan, value), number > 0

    return call.terms(*call.run(rows))


def _slots(number: Tensor, most: int, max_positives: int | None) -> int:
    """How many positives of an anchor must be looked at, (B,) having `number` of them, without waiting for a device."""
    if max_positives is not None:
        most = min(most, max_positives)
    if not checks.reads_values(number) or number.numel() == 0:
        return most
    largest = int(number.max())
    if max_positives is not None:
        checks.enough("max_positives", max_positives, largest, "the most positives of an anchor")
    return largest


def _precisions(scores: Tensor, positive: Tensor, negative: Tensor, columns: Tensor) -> Tensor:
    """Sum over these columns, where positive, of (rank among positives) / (rank among all), (B,)."""
    own = scores.gather(1, columns)
    before = (scores[:, None, :] - own[:, :, None]).sigmoid()  # (B, T, R)
    # The column itself is a positive and contributes σ(0) = 1/2 to both sums; the other half makes its 1.
    among_positives = (before * positive[:, None, :]).sum(2) + 0.5
    among_all = among_positives + (before * negative[:, None, :]).sum(2)
    return torch.where(positive.gather(1, columns), among_positives / among_all, 0.0).sum(1)


@without_impl
def fastap_loss(
    embeddings: Tensor,
    labels: Labels,
    references: Tensor | None = None,
    reference_labels: Labels | None = None,
    *,
    bins: int = 10,
    reduction: str = "mean",
    max_memory: int | None = None,
) -> Tensor:
    r"""One minus average precision, estimated from soft histograms of distance.

    l_i = 1 - 1/|P_i| Σ_l h⁺_l H⁺_l / H_l,   h⁺: histogram of positives, H⁺, H: cumulative, of positives and of all

    Summed as 1/|P_i| Σ_l h⁺_l H⁻_l / H_l, H⁻ of negatives: exactly 0 for an anchor whose positives all come first.
    Squared distances of unit vectors, in [0, 4], fall into the two nearest of bins + 1 equidistant centres by linear
    interpolation. Anchors without positives do not count. Needs two items per class. Cakir et al. 2019, eq. 5 and 9; 10
    bins from its released code.
    """
    call = PairCall(embeddings, labels, references, reference_labels, reduction, max_memory)
    checks.integer("bins", bins, 1)

    def rows(x: Tensor, references: Tensor | None, relation: Relation) -> tuple[Tensor, ...]:
        place = distances.squared_euclidean(x, references, normalize=True).clamp(0, 4) * (bins / 4)  # (B, R)
        number = relation.positive.sum(1)
        lower = place.detach().floor().clamp(max=bins - 1)
        index, share = lower.long(), place - lower  # the share of the upper of the two centres
        positives = _histogram(index, share, relation.positive, bins)  # (B, bins + 1)
        negatives = _histogram(index, share, relation.negative, bins).cumsum(1)
        among_all = positives.cumsum(1) + negatives
        hit = among_all > 0
        missed = torch.where(hit, positives * negatives, 0.0) / torch.where(hit, among_all, 1.0)
        return missed.sum(1) / number.clamp(min=1), number > 0

    return call.terms(*call.run(rows))


def _histogram(index: Tensor, share: Tensor, mask: Tensor, bins: int) -> Tensor:
    empty = share.new_zeros(share.shape[0], bins + 1)
    lower = empty.scatter_add(1, index, torch.where(mask, 1 - share, 0.0))
    return lower.scatter_add(1, index + 1, torch.where(mask, share, 0.0))


class SmoothAPLoss(LossModule, function=smooth_ap_loss):
    """Holds the settings of `smooth_ap_loss`; computes nothing itself."""

    def __init__(
        self,
        temperature: float = 0.01,
        *,
        max_positives: int | None = None,
        reduction: str = "mean",
        max_memory: int | None = None,
    ) -> None:
        super().__init__()
        self.temperature, self.max_positives = temperature, max_positives
        self.reduction, self.max_memory = reduction, max_memory
        self.finish_init()


class FastAPLoss(LossModule, function=fastap_loss):
    """Holds the settings of `fastap_loss`; computes nothing itself."""

    def __init__(self, bins: int = 10, *, reduction: str = "mean", max_memory: int | None = None) -> None:
        super().__init__()
        self.bins, self.reduction, self.max_memory = bins, reduction, max_memory
        self.finish_init()
