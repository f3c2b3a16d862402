"""Log-ratio loss: distances in proportion to real-valued label distances."""

from __future__ import annotations  # torch 2.6 compiles no function within one whose annotations it evaluates

import torch
from torch import Tensor

from nearkin.core import blockwise, reduce
from nearkin.core.labels import LabelDistance, Labels
from nearkin.losses.engine import Call, PairLoss, Rows, function_of
from nearkin.losses.settings import Range, setting

__all__ = ["LogRatioLoss", "logratio_loss"]


class LogRatioLoss(PairLoss):
    r"""Ratios of distances equal ratios of label distances, for every two references of an anchor.

    l_a = mean_{i,j} ( log(D_ai/D_aj) - log(Y_ai/Y_aj) )²,   D, Y: squared distances of embeddings and of targets

    labels: real-valued targets (B,) or (B, K), or a `LabelDistance` of plain distances. With
    x_i = log(D_ai + ε) - log Y_ai the mean over pairs is twice the unbiased variance of x: O(B²) for all anchors.
    anchors: only the first so many rows are anchors, as `samplers.LabelNeighbours` puts them, and all rows are their
    references; None: every row. anchors=1 is the paper's dense triplet mining: one anchor and all pairs of the others.
    References at label distance 0 are left out: they have no ratio. ties="drop" leaves out two references at
    the same label distance, as the paper's strict order does; "keep" takes them, as its code does.
    Kim et al. 2019, arXiv:1904.09626, eq. 3; ε 1e-6 stands for the official 1e-4/128.
    """

    measure, graded = "squared", True

    anchors: int | None = setting(
        default=None,
        optional=True,
        whole=True,
        text="how many of the first rows are anchors; None: all, 1: dense triplet mining as in the paper",
    )
    epsilon: float = setting(
        default=1e-6,
        above=0,
        search=Range(1e-8, 1e-2, log=True),
        text="ε, added to squared distances; 1e-6: stands for the official code's 1e-4/128",
    )
    ties: str = setting(
        default="drop",
        choices=("drop", "keep"),
        text='"drop": references at the same label distance are not compared, as in the paper; "keep": they are',
    )
    normalize: bool = setting(default=False, text="embeddings are scaled to unit length first")

    def value(self, call: Call) -> Tensor:
        taint = call.taint()
        call.batch = _first(self.anchors, call.batch)
        value, counts, addend = call.run(self.costs)
        return reduce.terms(value, counts, self.reduction) + taint + reduce.taint(addend)

    def costs(self, rows: Rows) -> tuple[Tensor, ...]:
        squared = rows.all()  # (B, R)
        kind = torch.promote_types(rows.x.dtype, torch.float32)
        gaps, valid = rows.related()
        log_gaps, valid, groups, addend = _log_gaps(gaps, valid, self.ties, kind)
        ratio = (squared + self.epsilon).log() - log_gaps  # (B, R)
        sums, pairs = _between(ratio, valid, groups)
        return sums / pairs.clamp(min=1), pairs > 0, addend


logratio_loss = function_of(LogRatioLoss, "logratio_loss")


def _first(anchors: int | None, batch: blockwise.Batch) -> blockwise.Batch:
    """The batch of the first anchors with all its references, themselves left out."""
    x, labels, references, reference_labels = batch
    if anchors is None or anchors >= x.shape[0]:
        return batch
    if isinstance(labels, LabelDistance):
        distance = labels.distance[:anchors].clone()
        few: Labels = LabelDistance(distance if references is not None else distance.fill_diagonal_(0))  # 0: left out
    else:
        assert isinstance(labels, Tensor)
        few = labels[:anchors]
        reference_labels = labels if references is None else reference_labels
    # A copy: what is saved for the gradient must not be a view of the references.
    return blockwise.Batch(x[:anchors].clone(), few, x if references is None else references, reference_labels)


@torch.no_grad()
def _log_gaps(
    gaps: Tensor, valid: Tensor, ties: str, kind: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """log Y, which entries count, and groups of tied references, (B, R) each; 0 or NaN per anchor, (B,).

    The label distances themselves, in float64 the largest matrix of the loss, are freed here.
    """
    groups = _tied(gaps, valid) if ties == "drop" else None
    log_gaps = 2 * torch.where(valid, gaps, 1.0).log().to(kind)
    return log_gaps, valid, groups, (gaps * 0).sum(1)


@torch.no_grad()
def _tied(gaps: Tensor, valid: Tensor) -> Tensor:
    """A group number for each reference of a row, (B, R), shared by those at exactly the same label distance."""
    if gaps.shape[1] == 0:
        return valid.long()
    key, order = gaps.masked_fill(~valid, torch.inf).sort(1)
    steps = torch.zeros_like(order)
    steps[:, 1:] = key[:, 1:] > key[:, :-1]
    del key
    return torch.empty_like(order).scatter_(1, order, steps.cumsum(1))


def _between(x: Tensor, valid: Tensor, groups: Tensor | None) -> tuple[Tensor, Tensor]:
    """Σ_{i<j} (x_i - x_j)² over the valid entries of each row, and the number of pairs, both (B,).

    With a = x - mean it is n Σ a². Pairs within one of the `groups`, n_g Σ_g a² - (Σ_g a)² of each, are left out, which
    gives Σ (n - n_g) a² + Σ_g (Σ_g a)²: a sum of squares, nothing to cancel.
    """
    number = valid.sum(1)
    apart = torch.where(valid, x - reduce.mean(x, valid)[:, None], 0.0)
    pairs = number * (number - 1) // 2
    if groups is None:
        return apart.square().sum(1) * number, pairs
    size = torch.zeros_like(x).scatter_add_(1, groups, valid.to(x.dtype))  # (B, groups), integers
    others = number[:, None] - size.gather(1, groups)
    sums = (apart.square() * others).sum(1) + torch.zeros_like(x).scatter_add(1, groups, apart).square().sum(1)
    return sums, pairs - (size * (size - 1)).sum(1).long() // 2
