"""Rank losses: average precision itself, made smooth."""

from __future__ import annotations  # torch 2.6 compiles no function within one whose annotations it evaluates

import torch
from torch import Tensor

from nearkin.core import checks, distances
from nearkin.core.autograd import recomputed, traced
from nearkin.losses.engine import Costs, PairLoss, Rows, function_of
from nearkin.losses.settings import Choices, Range, setting

__all__ = ["FastAPLoss", "SmoothAPLoss", "fastap_loss", "smooth_ap_loss"]


class SmoothAPLoss(PairLoss):
    r"""One minus average precision, with a sigmoid for "ranks before".

    l_i = 1 - 1/|P_i| Σ_{p in P_i} (1 + Σ_{q in P_i, q != p} σ(s_iq - s_ip)) / (1 + Σ_{r != p} σ(s_ir - s_ip))

    s = cosine, σ(x) = 1/(1 + e^{-x/t}), r over all positives and negatives of i. Anchors without positives do not
    count. Time O(B² |P|); the comparisons are made a few positives at a time and made again for the gradient, so memory
    is O(B²). The largest |P| is read off on the CPU. Elsewhere reading would stall the device: without `max_positives`
    (items per class less one) the time is O(B² R). More positives are an error, or NaN where not read. Needs two items
    per class. Brown et al. 2020, arXiv:2007.12163, eq. 7; temperature 0.01 from there.
    """

    temperature: float = setting(
        default=0.01,
        above=0,
        kw_only=False,
        search=Range(0.003, 0.1, log=True),
        text="t of the sigmoid; 0.01: the paper's",
    )
    max_positives: int | None = setting(
        default=None,
        optional=True,
        whole=True,
        text="most positives of an anchor, where they cannot be counted without waiting; None: any",
    )

    def rows(self, rows: Rows) -> Costs:
        scores = rows.all() / self.temperature  # (B, R), larger is closer
        number = rows.positive.sum(1)
        slots = _slots(number, scores.shape[1], self.max_positives)
        # Columns with an anchor's positives first, so that only as many slots are visited as there may be positives.
        order = rows.positive.to(torch.uint8).sort(dim=1, descending=True, stable=True).indices
        precision = scores.sum(1) * 0  # on the graph even where no anchor has positives
        # Positives compared with all references at once: what fills 4M comparisons, where memory is not bounded.
        tile = 2 if self.max_memory is not None else max(2, 2**22 // max(scores.numel(), 1))
        for start in range(0, slots, tile):
            columns = order[:, start : min(start + tile, slots)]
            precision = precision + recomputed(_precisions, scores, rows.positive, rows.negative, columns)
        value = 1 - precision / number.clamp(min=1)
        return torch.where(number > slots, torch.nan, value), number > 0


class FastAPLoss(PairLoss):
    r"""One minus average precision, estimated from soft histograms of distance.

    l_i = 1 - 1/|P_i| Σ_l h⁺_l H⁺_l / H_l,   h⁺: histogram of positives, H⁺, H: cumulative, of positives and of all

    Summed as 1/|P_i| Σ_l h⁺_l H⁻_l / H_l, H⁻ of negatives: exactly 0 for an anchor whose positives all come first.
    Squared distances of unit vectors, in [0, 4], fall into the two nearest of bins + 1 equidistant centres by linear
    interpolation. Anchors without positives do not count. Needs two items per class. Cakir et al. 2019, eq. 5 and 9; 10
    bins from its released code.
    """

    measure, normalize = "squared", True

    bins: int = setting(
        default=10,
        whole=True,
        kw_only=False,
        search=Choices((5, 10, 20, 40)),
        text="intervals of the distance histogram; 10: the released code's",
    )

    def rows(self, rows: Rows) -> Costs:
        place = rows.all().clamp(0, 4) * (self.bins / 4)  # (B, R)
        positives, negatives = (_cumulative(place, mask, self.bins) for mask in (rows.positive, rows.negative))
        here = torch.diff(positives, dim=1, prepend=torch.zeros_like(positives[:, :1]))
        among_all = positives + negatives
        hit = among_all > 0
        missed = torch.where(hit, here * negatives, 0.0) / torch.where(hit, among_all, 1.0)
        number = rows.positive.sum(1)
        return missed.sum(1) / number.clamp(min=1), number > 0


smooth_ap_loss = function_of(SmoothAPLoss, "smooth_ap_loss")
fastap_loss = function_of(FastAPLoss, "fastap_loss")


def _slots(number: Tensor, most: int, max_positives: int | None) -> int:
    """How many positives of an anchor must be looked at, (B,) having `number` of them, without waiting for a device."""
    if max_positives is not None:
        most = min(most, max_positives)
    if not checks.reads_values(number) or number.numel() == 0:
        return most
    largest = int(number.max())
    if max_positives is not None:
        checks.enough("max_positives", max_positives, largest, "the most positives of an anchor")
    return largest if distances.freely_read(number) else most


def _precisions(scores: Tensor, positive: Tensor, negative: Tensor, columns: Tensor) -> Tensor:
    """Sum over these columns, where positive, of (rank among positives) / (rank among all), (B,)."""
    own = scores.gather(1, columns)
    before = (scores[:, None, :] - own[:, :, None]).sigmoid()  # (B, T, R)
    # The column itself is a positive and contributes σ(0) = 1/2 to both sums; the other half makes its 1.
    among_positives = (before * positive[:, None, :]).sum(2) + 0.5
    among_all = among_positives + (before * negative[:, None, :]).sum(2)
    return torch.where(positive.gather(1, columns), among_positives / among_all, 0.0).sum(1)


def _cumulative(place: Tensor, mask: Tensor, bins: int) -> Tensor:
    """How much of each row's entries lies at each centre or before it, (B, bins + 1)."""
    lower = place.detach().floor().clamp(max=bins - 1)
    index, share = lower.long(), place - lower  # the share of the upper of the two centres
    near, far = torch.where(mask, 1 - share, 0.0), torch.where(mask, share, 0.0)
    # A GPU adds scattered numbers in another order every time. A sum for each bin is fast only where it is compiled.
    if traced() or (torch.are_deterministic_algorithms_enabled() and not place.is_cpu):
        parts = (torch.where(index == k, near, torch.where(index == k - 1, far, 0.0)) for k in range(bins + 1))
        return torch.stack([part.sum(1) for part in parts], 1).cumsum(1)
    empty = share.new_zeros(share.shape[0], bins + 1)
    return empty.scatter_add(1, index, near).scatter_add(1, index + 1, far).cumsum(1)
