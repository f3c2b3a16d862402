"""Losses over pairs and triplets: contrastive, triplet margin, margin, lifted structure, NT-Xent, N-pairs."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from nearkin import losses
from nearkin.compat.pml.distances import BaseDistance, CosineSimilarity, DotProductSimilarity, LpDistance, SNRDistance
from nearkin.compat.pml.losses.base_loss import (
    BaseMetricLossFunction,
    Batch,
    already_reduced,
    element_terms,
    refuse_distance,
    segment_logsumexp,
)
from nearkin.compat.pml.recording import own_ids
from nearkin.compat.pml.reducers import AvgNonZeroReducer, BaseReducer, DivisorReducer, Terms
from nearkin.compat.pml.utils import loss_and_miner_utils as indexing
from nearkin.core import distances, reduce

__all__ = [
    "AngularLoss",
    "ContrastiveLoss",
    "IntraPairVarianceLoss",
    "LiftedStructureLoss",
    "MarginLoss",
    "NPairsLoss",
    "NTXentLoss",
    "SignalToNoiseRatioContrastiveLoss",
    "TripletMarginLoss",
    "TupletMarginLoss",
]


def _pair_terms(kind: str, values: Tensor, anchors: Tensor, others: Tensor) -> dict[str, Any]:
    return {"losses": values if values.numel() else 0, "indices": (anchors, others), "reduction_type": kind}


def _euclidean(distance: BaseDistance, *powers: float) -> bool:
    return type(distance) is LpDistance and distance.p == 2 and distance.power in powers


class ContrastiveLoss(BaseMetricLossFunction):
    """[d - pos_margin]₊ of positive pairs and [neg_margin - d]₊ of negative ones, each reduced by itself, summed."""

    def __init__(self, pos_margin: float = 0, neg_margin: float = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.pos_margin, self.neg_margin = pos_margin, neg_margin

    def native(self, batch: Batch, reduction: str) -> Tensor | None:
        """Twice nearkin's, which halves the sum."""
        if not _euclidean(self.distance, 1) or min(self.pos_margin, self.neg_margin) < 0:
            return None
        return 2 * losses.contrastive_loss(
            *batch,
            margin=self.neg_margin,
            positive_margin=self.pos_margin,
            squared=False,
            normalize=self.distance.normalize_embeddings,
            reduction=reduction,
        )

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Tensor, ref_labels: Any
    ) -> Terms:
        """One term per pair."""
        a1, p, a2, n = self.pairs(labels, indices_tuple, ref_labels)
        matrix = self.distance(embeddings, ref_emb)
        pull = self.distance.margin(matrix[a1, p], self.pos_margin).relu()
        push = self.distance.margin(self.neg_margin, matrix[a2, n]).relu()
        return {"pos_loss": _pair_terms("pos_pair", pull, a1, p), "neg_loss": _pair_terms("neg_pair", push, a2, n)}

    def pairs(self, labels: Any, indices_tuple: Any, ref_labels: Any) -> tuple[Tensor, ...]:
        """The pairs of the batch or of a miner."""
        if indices_tuple is None:
            self.need(labels=labels)
        return indexing.convert_to_pairs(indices_tuple, labels, ref_labels)

    def get_default_reducer(self) -> BaseReducer:
        """Over the terms above 0."""
        return AvgNonZeroReducer()

    def _sub_loss_names(self) -> list[str]:
        return ["pos_loss", "neg_loss"]


class SignalToNoiseRatioContrastiveLoss(ContrastiveLoss):
    """The contrastive loss of `SNRDistance`."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not isinstance(self.distance, SNRDistance):
            refuse_distance(self, self.distance, "SNRDistance()")

    def get_default_distance(self) -> BaseDistance:
        """Variance of the difference over the variance of the anchor."""
        return SNRDistance()


class IntraPairVarianceLoss(ContrastiveLoss):
    """Squares of how far similarities lie on the wrong side of their own mean, times 1 ∓ eps."""

    def __init__(self, pos_eps: float = 0.01, neg_eps: float = 0.01, **kwargs: Any) -> None:
        BaseMetricLossFunction.__init__(self, **kwargs)
        self.pos_eps, self.neg_eps = pos_eps, neg_eps

    def native(self, batch: Batch, reduction: str) -> Tensor | None:
        """Not a loss of nearkin."""
        return None

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Tensor, ref_labels: Any
    ) -> Terms:
        """One term per pair."""
        a1, p, a2, n = self.pairs(labels, indices_tuple, ref_labels)
        matrix = self.distance(embeddings, ref_emb)
        near, far = matrix[a1, p], matrix[a2, n]
        if self.distance.is_inverted:
            pull, push = (1 - self.pos_eps) * near.mean() - near, far - (1 + self.neg_eps) * far.mean()
        else:
            pull, push = near - (1 + self.pos_eps) * near.mean(), (1 - self.neg_eps) * far.mean() - far
        pos, neg = pull.relu().square(), push.relu().square()
        return {"pos_loss": _pair_terms("pos_pair", pos, a1, p), "neg_loss": _pair_terms("neg_pair", neg, a2, n)}

    def get_default_reducer(self) -> BaseReducer:
        """Over all pairs."""
        return BaseMetricLossFunction.get_default_reducer(self)

    def get_default_distance(self) -> BaseDistance:
        """Cosines."""
        return CosineSimilarity()


class TripletMarginLoss(BaseMetricLossFunction):
    """[d_ap - d_an + margin]₊ over triplets; softly with `smooth_loss`; with `swap` d_pn where that is nearer."""

    def __init__(
        self,
        margin: float = 0.05,
        swap: bool = False,
        smooth_loss: bool = False,
        triplets_per_anchor: int | str = "all",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.margin, self.swap, self.smooth_loss = margin, swap, smooth_loss
        self.triplets_per_anchor = triplets_per_anchor

    def native(self, batch: Batch, reduction: str) -> Tensor | None:
        """Every triplet, by sorting: no list of triplets is made."""
        other = self.swap or self.smooth_loss or self.triplets_per_anchor != "all" or self.margin < 0
        if other or not _euclidean(self.distance, 1, 2):
            return None
        return losses.triplet_loss(
            *batch,
            margin=self.margin,
            squared=self.distance.power == 2,
            selection="all",
            normalize=self.distance.normalize_embeddings,
            reduction=reduction,
        )

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Tensor, ref_labels: Any
    ) -> Terms:
        """One term per triplet."""
        if indices_tuple is None:
            self.need(labels=labels)
        a, p, n = indexing.convert_to_triplets(indices_tuple, labels, ref_labels, self.triplets_per_anchor)
        if len(a) == 0:
            return self.zero_losses()
        matrix = self.distance(embeddings, ref_emb)
        near, far = matrix[a, p], matrix[a, n]
        if self.swap:  # between references: positive and negative are rows of them
            between = matrix if ref_emb is embeddings else self.distance(ref_emb, ref_emb)
            far = self.distance.smallest_dist(far, between[p, n])
        violation = self.distance.margin(near, far) + self.margin
        values = reduce.softplus(violation) if self.smooth_loss else violation.relu()
        return {"loss": {"losses": values, "indices": (a, p, n), "reduction_type": "triplet"}}

    def get_default_reducer(self) -> BaseReducer:
        """Over the terms above 0."""
        return AvgNonZeroReducer()


class MarginLoss(BaseMetricLossFunction):
    """Positives nearer than a boundary β by a margin, negatives farther, over triplets; β fixed or learned."""

    def __init__(
        self,
        margin: float = 0.2,
        nu: float = 0,
        beta: float = 1.2,
        triplets_per_anchor: int | str = "all",
        learn_beta: bool = False,
        num_classes: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.margin, self.nu, self.learn_beta = margin, nu, learn_beta
        self.triplets_per_anchor = triplets_per_anchor
        start = torch.full((num_classes or 1,), float(beta))
        self.beta: Tensor
        if learn_beta:
            self.beta = nn.Parameter(start)
        else:
            self.register_buffer("beta", start, persistent=False)

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Tensor, ref_labels: Any
    ) -> Terms:
        """One term per triplet, over the active pairs; and the pull on β."""
        if indices_tuple is None or len(self.beta) > 1:
            self.need(labels=labels)
        a, p, n = indexing.convert_to_triplets(indices_tuple, labels, ref_labels, self.triplets_per_anchor)
        if len(a) == 0:
            return self.zero_losses()
        matrix = self.distance(embeddings, ref_emb)
        edge = (self.beta if len(self.beta) == 1 else self.beta[labels[a]]).to(matrix)
        pull = (self.distance.margin(matrix[a, p], edge) + self.margin).relu()
        push = (self.distance.margin(edge, matrix[a, n]) + self.margin).relu()
        active = (pull > 0).sum() + (push > 0).sum()
        terms = {"losses": pull + push, "indices": (a, p, n), "reduction_type": "triplet", "divisor": active}
        held = self.zero_loss()
        if self.learn_beta and len(self.beta) == 1:
            held = already_reduced(edge * self.nu)
        elif self.learn_beta:
            held = {"losses": edge * self.nu, "indices": a, "reduction_type": "element", "divisor": active}
        return {"margin_loss": terms, "beta_reg_loss": held}

    def _sub_loss_names(self) -> list[str]:
        return ["margin_loss", "beta_reg_loss"]

    def get_default_reducer(self) -> BaseReducer:
        """Over the active pairs."""
        return DivisorReducer()


class _PairAgainstNegatives(ContrastiveLoss):
    """Losses whose terms are positive pairs, each against the negatives of its anchor."""

    def _sub_loss_names(self) -> list[str]:
        return ["loss"]

    def get_default_reducer(self) -> BaseReducer:
        return BaseMetricLossFunction.get_default_reducer(self)

    def native(self, batch: Batch, reduction: str) -> Tensor | None:
        return None

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Tensor, ref_labels: Any
    ) -> Terms:
        a1, p, a2, n = self.pairs(labels, indices_tuple, ref_labels)
        if len(a1) == 0 or len(a2) == 0:
            return self.zero_losses()
        matrix = self.distance(embeddings, ref_emb)
        values = self.against(matrix[a1, p], matrix[a2, n], (a1, p, a2, n), matrix.shape)
        return {"loss": _pair_terms("pos_pair", values, a1, p)}

    def against(self, near: Tensor, far: Tensor, pairs: tuple[Tensor, ...], shape: tuple[int, ...]) -> Tensor:
        """One value per positive pair."""
        raise NotImplementedError


class NTXentLoss(_PairAgainstNegatives):
    """-log of the share of a positive pair among itself and the negatives of its anchor, at a temperature."""

    def __init__(self, temperature: float = 0.07, **kwargs: Any) -> None:
        BaseMetricLossFunction.__init__(self, **kwargs)
        self.temperature = temperature

    def native(self, batch: Batch, reduction: str) -> Tensor | None:
        """InfoNCE."""
        if type(self.distance) is not CosineSimilarity or self.distance.power != 1:
            return None
        return losses.infonce_loss(*batch, temperature=self.temperature, reduction=reduction)

    def against(self, near: Tensor, far: Tensor, pairs: tuple[Tensor, ...], shape: tuple[int, ...]) -> Tensor:
        """log(1 + Σ_n e^{(s_n - s_p) / t})."""
        sign = 1 if self.distance.is_inverted else -1
        rivals = segment_logsumexp(sign * far / self.temperature, pairs[2], shape[0])
        return reduce.softplus(rivals[pairs[0]] - sign * near / self.temperature)

    def get_default_distance(self) -> BaseDistance:
        """Cosines."""
        return CosineSimilarity()


class TupletMarginLoss(_PairAgainstNegatives):
    """log(1 + Σ_n e^{scale (cos θ_n - cos(θ_p - margin))}), margin in degrees."""

    def __init__(self, margin: float = 5.73, scale: float = 64, **kwargs: Any) -> None:
        BaseMetricLossFunction.__init__(self, **kwargs)
        if not isinstance(self.distance, CosineSimilarity):
            refuse_distance(self, self.distance, "CosineSimilarity()")
        self.margin, self.scale = math.radians(margin), scale

    def against(self, near: Tensor, far: Tensor, pairs: tuple[Tensor, ...], shape: tuple[int, ...]) -> Tensor:
        """Without acos, whose gradient is infinite at 1: cos(θ - m) = c cos m + √(1 - c²) sin m."""
        sine = (1 - near.square()).clamp(min=1e-7).sqrt()
        target = near * math.cos(self.margin) + sine * math.sin(self.margin)
        rivals = segment_logsumexp(self.scale * far, pairs[2], shape[0])
        return reduce.softplus(rivals[pairs[0]] - self.scale * target)

    def get_default_distance(self) -> BaseDistance:
        """Cosines."""
        return CosineSimilarity()


class LiftedStructureLoss(_PairAgainstNegatives):
    """½ [log(Σ_n e^{m - d_an} + Σ_n e^{m - d_pn}) + d_ap]₊², m = neg_margin - pos_margin."""

    def __init__(self, neg_margin: float = 1, pos_margin: float = 0, **kwargs: Any) -> None:
        super().__init__(pos_margin=pos_margin, neg_margin=neg_margin, **kwargs)

    def native(self, batch: Batch, reduction: str) -> Tensor | None:
        """Only the difference of the margins counts."""
        if not _euclidean(self.distance, 1) or self.neg_margin < self.pos_margin:
            return None
        return losses.lifted_structure_loss(
            *batch,
            margin=self.neg_margin - self.pos_margin,
            normalize=self.distance.normalize_embeddings,
            reduction=reduction,
        )

    def against(self, near: Tensor, far: Tensor, pairs: tuple[Tensor, ...], shape: tuple[int, ...]) -> Tensor:
        """The negatives of both ends; of a reference, the anchors to which it is a negative."""
        a1, p, a2, n = pairs
        left = self.distance.margin(self.neg_margin, far)
        rows = segment_logsumexp(left, a2, shape[0])
        ends = segment_logsumexp(left, n, shape[1]) if self.references else rows
        both = torch.logaddexp(rows[a1], ends[p])
        alone = both == -torch.inf
        value = torch.where(alone, 0.0, both) + self.distance.margin(near, self.pos_margin)
        return torch.where(alone, 0.0, value.relu().square() / 2)

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Tensor, ref_labels: Any
    ) -> Terms:
        """One term per positive pair."""
        self.references = ref_emb is not embeddings
        return super().compute_loss(embeddings, labels, indices_tuple, ref_emb, ref_labels)


class NPairsLoss(BaseMetricLossFunction):
    """The first pair of each class: its positive against those of all other classes."""

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Tensor, ref_labels: Any
    ) -> Terms:
        """One term per class; nearkin's N-pair loss of anchors with references where inner products are asked for."""
        self.need(labels=labels)
        self.need_batch_alone(embeddings, ref_emb)
        anchor, positive = indexing.convert_to_pos_pairs_with_unique_labels(indices_tuple, labels)
        if len(anchor) == 0:
            return self.zero_losses()
        left, right = embeddings[anchor], embeddings[positive]
        if type(self.distance) in (CosineSimilarity, DotProductSimilarity) and self.distance.power == 1:
            if self.distance.normalize_embeddings:
                left, right = distances.unit(left), distances.unit(right)
            ids = own_ids(labels[anchor])
            values = losses.npair_loss(left, ids, right, ids, length_weight=0, reduction="none")
        else:
            matrix = self.distance(left, right)
            logits = matrix if self.distance.is_inverted else -matrix
            values = logits.logsumexp(1) - logits.diagonal()
        return element_terms(values, anchor)

    def get_default_distance(self) -> BaseDistance:
        """Inner products of unit rows."""
        return DotProductSimilarity()


class AngularLoss(BaseMetricLossFunction):
    """log(1 + Σ_n e^{4 tan²α (x_a + x_p)·x_n - 2 (1 + tan²α) x_a·x_p}), α in degrees; anchor and positive unit rows.

    As in the original, the negatives are raw rows: normalise the embeddings yourself.
    """

    def __init__(self, alpha: float = 40, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not _euclidean(self.distance, 1) or not self.distance.normalize_embeddings:
            refuse_distance(self, self.distance, "LpDistance()")
        self.alpha = math.radians(alpha)

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Tensor, ref_labels: Any
    ) -> Terms:
        """One term per positive pair, against every item of another class."""
        self.need(labels=labels)
        a, p, a2, _ = indexing.convert_to_pairs(indices_tuple, labels, ref_labels)
        if len(a) == 0 or len(a2) == 0:
            return self.zero_losses()
        anchors, positives = distances.unit(embeddings[a]), distances.unit(ref_emb[p])
        tangent = math.tan(self.alpha) ** 2
        across = 4 * tangent * distances.dot(anchors + positives, ref_emb)
        values = across - 2 * (1 + tangent) * (anchors * positives).sum(1, keepdim=True)
        terms = reduce.softplus(reduce.logsumexp(values, labels[a][:, None] != ref_labels[None, :]))
        return {"loss": _pair_terms("pos_pair", terms, a, p)}
