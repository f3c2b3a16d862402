"""Losses of distances that nearkin itself does not have: ranked lists, histograms, PNP, dynamic soft margin, TCM."""

import warnings
from typing import Any

import torch
from torch import Tensor

from nearkin.compat.pml.distances import BaseDistance, CosineSimilarity, LpDistance
from nearkin.compat.pml.losses.base_loss import (
    BaseMetricLossFunction,
    already_reduced,
    element_terms,
    refuse_distance,
)
from nearkin.compat.pml.recording import same_labels
from nearkin.compat.pml.reducers import Terms
from nearkin.compat.pml.utils import loss_and_miner_utils as indexing
from nearkin.core.errors import RefusedArguments

__all__ = ["DynamicSoftMarginLoss", "HistogramLoss", "PNPLoss", "RankedListLoss", "ThresholdConsistentMarginLoss"]


class _CosineLoss(BaseMetricLossFunction):
    """Of cosines alone."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if type(self.distance) is not CosineSimilarity or self.distance.power != 1:
            refuse_distance(self, self.distance, "CosineSimilarity()")

    def get_default_distance(self) -> BaseDistance:
        """Cosines."""
        return CosineSimilarity()


class RankedListLoss(BaseMetricLossFunction):
    """Positives within alpha - margin, negatives beyond alpha, each side weighed by e^(T · its excess).

    Wang et al. 2019, arXiv:1903.03238. A negative at distance 0 counts; the original leaves it out.
    """

    def __init__(
        self,
        margin: float,
        Tn: float,
        imbalance: float = 0.5,
        alpha: float | None = None,
        Tp: float = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if not 0 <= imbalance <= 1:
            raise RefusedArguments(f"imbalance must be in [0, 1], got {imbalance}")
        if max(Tp, Tn) > 5:
            warnings.warn(f"Tp and Tn above 5 may overflow, got {Tp} and {Tn}", stacklevel=2)
        self.margin, self.imbalance, self.Tp, self.Tn = margin, imbalance, Tp, Tn
        self.alpha = 1 + margin / 2 if alpha is None else alpha

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Tensor, ref_labels: Any
    ) -> Terms:
        """One term per item."""
        self.need(labels=labels)
        self.need_batch_alone(embeddings, ref_emb)
        self.need_no_indices(indices_tuple)
        distance, same = self.distance(embeddings), same_labels(labels, labels)
        itself = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
        pull = self._weighed(distance - (self.alpha - self.margin), same & ~itself, self.Tp)
        push = self._weighed(self.alpha - distance, ~same, self.Tn)
        return element_terms((1 - self.imbalance) * pull + self.imbalance * push)

    @staticmethod
    def _weighed(excess: Tensor, mask: Tensor, temperature: float) -> Tensor:
        active = mask & (excess > 0)
        excess = torch.where(active, excess, 0.0)
        weight = torch.where(active, (temperature * excess).exp(), 0.0)
        return (weight * excess).sum(1) / (weight + 1e-5).sum(1)


class ThresholdConsistentMarginLoss(_CosineLoss):
    """Mean of margin_plus - s over the positive pairs below it, and of s - margin_minus over the negatives above.

    Zhang et al. 2023, arXiv:2307.04047.
    """

    def __init__(
        self,
        lambda_plus: float = 1.0,
        lambda_minus: float = 1.0,
        margin_plus: float = 0.9,
        margin_minus: float = 0.5,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.lambda_plus, self.lambda_minus = lambda_plus, lambda_minus
        self.margin_plus, self.margin_minus = margin_plus, margin_minus

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Tensor, ref_labels: Any
    ) -> Terms:
        """One number."""
        if indices_tuple is None:
            self.need(labels=labels)
        a1, p, a2, n = indexing.convert_to_pairs(indices_tuple, labels, None if ref_emb is embeddings else ref_labels)
        similarity = self.distance(embeddings, ref_emb)
        total: Any = 0.0
        for weight, excess in (
            (self.lambda_plus, self.margin_plus - similarity[a1, p]),
            (self.lambda_minus, similarity[a2, n] - self.margin_minus),
        ):
            total = total + weight * excess.clamp(min=0).sum() / (excess >= 0).sum().clamp(min=1)
        return {"loss": already_reduced(total)}


class HistogramLoss(BaseMetricLossFunction):
    """How likely a negative pair is more similar than a positive one, by soft histograms. Ustinova, Lempitsky 2016."""

    def __init__(self, n_bins: int | None = None, delta: float | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if delta is not None and n_bins is not None and delta != 2 / n_bins:
            raise RefusedArguments(f"delta must be 2 / n_bins = {2 / n_bins}, got {delta}")
        self.delta = delta if delta is not None else 2 / (100 if n_bins is None else n_bins)

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Tensor, ref_labels: Any
    ) -> Terms:
        """One number."""
        self.need_batch_alone(embeddings, ref_emb)
        if indices_tuple is None:
            self.need(labels=labels)
            positive, negative = indexing.get_matches_and_diffs(labels, None)
            anchors = (positive.any(1) & negative.any(1))[:, None]
            masks = [mask.bool() & anchors for mask in (positive, negative)]
        else:
            a, p, n = indexing.convert_to_triplets(indices_tuple, labels, t_per_anchor="all")
            masks = [torch.zeros(len(embeddings), len(embeddings), dtype=torch.bool, device=a.device) for _ in "pn"]
            masks[0][a, p], masks[1][a, n] = True, True
        if not masks[0].any() or not masks[1].any():
            return self.zero_losses()
        matrix = self.distance(embeddings)
        pulled, pushed = (self._density(matrix[(mask | mask.T).triu(1)]) for mask in masks)
        return {"loss": already_reduced((pushed * pulled.cumsum(0)).sum())}

    def _density(self, similarity: Tensor) -> Tensor:
        """Each value shared by the two nodes around it, (nodes,); a cosine of 1 belongs to the last two."""
        nodes = round(1 + 2 / self.delta)
        place = (similarity + 1) / self.delta
        below = place.detach().floor().long().clamp(0, nodes - 2)
        density = similarity.new_zeros(nodes)
        density = density.index_add(0, below, below + 1 - place)
        return density.index_add(0, below + 1, place - below) / len(similarity)

    def get_default_distance(self) -> BaseDistance:
        """Cosines."""
        return CosineSimilarity()


class PNPLoss(_CosineLoss):
    """The number of negatives before each positive, softly counted; `variant` penalises it. arXiv:2102.04640."""

    VARIANTS = ("Ds", "Dq", "Iu", "Ib", "O")

    def __init__(self, b: float = 2, alpha: float = 1, anneal: float = 0.01, variant: str = "O", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if variant not in self.VARIANTS:
            raise ValueError(f"variant must be one of {', '.join(self.VARIANTS)}, got {variant!r}")
        self.b, self.alpha, self.anneal, self.variant = b, alpha, anneal, variant

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Tensor, ref_labels: Any
    ) -> Terms:
        """One number: the mean over the items that have a positive, each one's own row among its positives."""
        self.need(labels=labels)
        self.need_batch_alone(embeddings, ref_emb)
        self.need_no_indices(indices_tuple)
        same = same_labels(labels, labels)
        number = same.sum(1)
        query, positive = (same & (number > 1)[:, None]).nonzero(as_tuple=True)
        if not len(query):
            return self.zero_losses()
        similarity = self.distance(embeddings)
        before = ((similarity[query] - similarity[query, positive][:, None]) / self.anneal).sigmoid()
        values = self._penalty((before * ~same[query]).sum(1)) / number[query]
        mean = values.sum() / (number > 1).sum()
        return {"loss": already_reduced(1 - mean if self.variant == "Dq" else mean)}

    def _penalty(self, count: Tensor) -> Tensor:
        b = self.b
        if self.variant == "Ds":
            return (1 + count).log()
        if self.variant == "Dq":
            return (1 + count) ** -self.alpha
        if self.variant == "Iu":
            return (1 + count) * (1 + count).log()
        return (b * count - (1 + b * count).log()) / b**2 if self.variant == "Ib" else count


class DynamicSoftMarginLoss(BaseMetricLossFunction):
    """d_ap - d_an, weighed by its share in a running histogram of such differences. Zhang, Rusinkiewicz 2019.

    The weights have no gradient, as in the paper. Without labels row i of `ref_emb` is the positive of row i.
    """

    hist_: Tensor

    def __init__(self, min_val: float = -2.0, num_bins: int = 10, momentum: float = 0.01, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        distance = self.distance
        if type(distance) is not LpDistance or not distance.normalize_embeddings or distance.p != 2:
            refuse_distance(self, distance, "LpDistance() of unit rows")
        self.min_val, self.num_bins, self.momentum = min_val, int(num_bins), momentum
        self.delta = 2 * abs(min_val) / num_bins
        self.register_buffer("hist_", torch.zeros(self.num_bins), persistent=False)

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Tensor, ref_labels: Any
    ) -> Terms:
        """One number."""
        matrix = self.distance(embeddings, ref_emb)
        if labels is None:
            differences = self._of_views(matrix)
        else:
            own = None if ref_emb is embeddings else ref_labels
            a, p, n = indexing.convert_to_triplets(indices_tuple, labels, own, t_per_anchor="all")
            differences = matrix[a, p] - matrix[a, n]
        if not len(differences):
            return self.zero_losses()
        place = (differences.detach() - self.min_val) / self.delta
        below = place.floor().long().clamp(0, self.num_bins - 1)
        self._count(place - below, below)
        return {"loss": already_reduced((self.hist_.cumsum(0)[below] * differences).mean())}

    @staticmethod
    def _of_views(matrix: Tensor) -> Tensor:
        """Row i of both is a pair; the nearest other row of either is its negative."""
        pairs = min(matrix.shape)
        others = matrix.masked_fill(torch.eye(*matrix.shape, dtype=torch.bool, device=matrix.device), torch.inf)
        return matrix.diagonal() - torch.minimum(others.amin(0)[:pairs], others.amin(1)[:pairs])

    def _count(self, above: Tensor, below: Tensor) -> None:
        """A value is shared by its bin and the next; the last bin keeps all of its own."""
        hist = self.hist_.to(above)
        share = self.momentum if hist.any() else 1.0
        hist = ((1 - share) * hist).index_add(0, below, share * (1 - above))
        hist = hist.index_add(0, (below + 1).clamp(max=self.num_bins - 1), share * above)
        self.hist_ = hist / hist.sum()
