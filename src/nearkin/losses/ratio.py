"""Log-ratio loss: distances in proportion to real-valued label distances."""

from typing import Any

import torch
from torch import Tensor, nn

from nearkin.core import checks, distances, reduce, relations
from nearkin.core.relations import Labels
from nearkin.losses.settings import hold, show

__all__ = ["LogRatioLoss", "logratio_loss"]


def logratio_loss(
    embeddings: Tensor,
    labels: Labels,
    references: Tensor | None = None,
    reference_labels: Labels | None = None,
    *,
    epsilon: float = 1e-6,
    ties: str = "drop",
    normalize: bool = False,
    reduction: str = "mean",
) -> Tensor:
    r"""Ratios of distances equal ratios of label distances, for every two references of an anchor.

    l_a = mean_{i,j} ( log(D_ai/D_aj) - log(Y_ai/Y_aj) )²,   D, Y: squared distances of embeddings and of targets

    labels: real-valued targets (B,) or (B, K), or a `LabelDistance` of plain distances. With
    x_i = log(D_ai + ε) - log Y_ai the mean over pairs is twice the unbiased variance of x: O(B²) for all anchors.
    References at label distance 0 are left out: they say nothing of a ratio. ties="drop" leaves out two references at
    the same label distance, as the paper's strict order does; "keep" takes them, as its code does.
    Kim et al. 2019, arXiv:1904.09626, eq. 3; ε 1e-6 stands for the official 1e-4/128.
    """
    references, reference_labels = checks.batch(embeddings, labels, references, reference_labels, graded=True)
    checks.positive("epsilon", epsilon)
    checks.one_of("ties", ties, ("drop", "keep"))
    if normalize:
        squared = distances.squared_euclidean(
            distances.unit(embeddings), None if references is None else distances.unit(references)
        )
    else:
        squared = distances.squared_euclidean(embeddings, references)  # (B, R)
    gaps = relations.label_distances(labels, reference_labels)
    valid = gaps > 0
    if references is None:
        valid = valid & ~torch.eye(embeddings.shape[0], dtype=torch.bool, device=embeddings.device)
    log_gaps = 2 * torch.where(valid, gaps, 1.0).log().to(squared.dtype)
    ratio = (squared + epsilon).log() - log_gaps  # (B, R)
    sums, pairs = _between(ratio, valid, gaps if ties == "drop" else None)
    value = sums / pairs.clamp(min=1)
    spoilt = reduce.taint(embeddings, references, gaps.detach())
    return reduce.terms(value, pairs > 0, reduction) + spoilt


def _between(x: Tensor, valid: Tensor, groups: Tensor | None) -> tuple[Tensor, Tensor]:
    """Σ_{i<j} (x_i - x_j)² over the valid entries of each row, and the number of pairs, both (B,).

    n Σ (x - mean)² counts every pair; pairs of equal `groups` value are taken off by the same formula for each group.
    """
    number = valid.sum(1)
    sums = _spread(x, valid, number)
    pairs = number * (number - 1) // 2
    if groups is None or x.shape[1] == 0:
        return sums, pairs
    key, order = groups.masked_fill(~valid, torch.inf).sort(1)
    member = torch.cat([torch.zeros_like(key[:, :1], dtype=torch.long), (key.diff(dim=1) > 0).long()], 1).cumsum(1)
    size = torch.zeros_like(member).scatter_add_(1, member, valid.gather(1, order).long())  # (B, groups)
    x = torch.where(valid, x, 0.0).gather(1, order)
    mean = torch.zeros_like(x).scatter_add(1, member, x) / size.clamp(min=1)
    apart = torch.where(valid.gather(1, order), x - mean.gather(1, member), 0.0)
    within = (apart.square() * size.gather(1, member)).sum(1)
    return sums - within, pairs - (size * (size - 1) // 2).sum(1)


def _spread(x: Tensor, valid: Tensor, number: Tensor) -> Tensor:
    mean = reduce.mean(x, valid)[:, None]
    return torch.where(valid, x - mean, 0.0).square().sum(1) * number


class LogRatioLoss(nn.Module):
    """Holds the settings of `logratio_loss`; computes nothing itself."""

    lr_scale = 1.0
    settings: dict[str, Any]

    def __init__(
        self, *, epsilon: float = 1e-6, ties: str = "drop", normalize: bool = False, reduction: str = "mean"
    ) -> None:
        super().__init__()
        hold(self, logratio_loss, epsilon=epsilon, ties=ties, normalize=normalize, reduction=reduction)

    extra_repr = show

    def forward(
        self,
        embeddings: Tensor,
        labels: Labels,
        references: Tensor | None = None,
        reference_labels: Labels | None = None,
    ) -> Tensor:
        return logratio_loss(embeddings, labels, references, reference_labels, **self.settings)
