"""The original's losses; nineteen of them by nearkin's functions wherever these give the same number."""

from typing import Any

import torch
from torch import Tensor

from nearkin import losses
from nearkin.compat.pml import class_losses, original
from nearkin.compat.pml.distances import CosineSimilarity, is_cosine, is_euclidean, is_product
from nearkin.compat.pml.native import Call, Native, PerItem, Reduced, Terms, element, ids_of, one_number
from nearkin.core import distances
from nearkin.core.labels import Relation

_theirs: Any = original("losses")
_indexing: Any = original("utils.loss_and_miner_utils")
_mean_reducer: Any = original("reducers").MeanReducer


def __getattr__(name: str) -> Any:
    return getattr(class_losses if name in class_losses.__all__ else _theirs, name)


class ContrastiveLoss(Reduced, _theirs.ContrastiveLoss):
    """[d - pos_margin]₊ of positive pairs and [neg_margin - d]₊ of negative ones, each reduced by itself, summed."""

    def native(self, *batch: Any, reduction: str) -> Tensor | None:
        """Twice nearkin's, which halves the sum."""
        if not is_euclidean(self.distance, 1) or min(self.pos_margin, self.neg_margin) < 0:
            return None
        return 2 * losses.contrastive_loss(  # type: ignore[misc]
            *batch,
            margin=self.neg_margin,
            positive_margin=self.pos_margin,
            squared=False,
            normalize=self.distance.normalize_embeddings,
            reduction=reduction,
        )


class TripletMarginLoss(Reduced, _theirs.TripletMarginLoss):
    """[d_ap - d_an + margin]₊ over triplets."""

    def native(self, *batch: Any, reduction: str) -> Tensor | None:
        """Every triplet, by sorting: no list of triplets is made."""
        other = self.swap or self.smooth_loss or self.triplets_per_anchor != "all" or self.margin < 0
        if other or not is_euclidean(self.distance, 1, 2):
            return None
        return losses.triplet_loss(  # type: ignore[misc]
            *batch,
            margin=self.margin,
            squared=self.distance.power == 2,
            selection="all",
            normalize=self.distance.normalize_embeddings,
            reduction=reduction,
        )


class LiftedStructureLoss(Reduced, _theirs.LiftedStructureLoss):
    """½ [log(Σ_n e^{m - d_an} + Σ_n e^{m - d_pn}) + d_ap]₊², m = neg_margin - pos_margin."""

    def native(self, *batch: Any, reduction: str) -> Tensor | None:
        """Only the difference of the margins counts."""
        if not is_euclidean(self.distance, 1) or self.neg_margin < self.pos_margin:
            return None
        return losses.lifted_structure_loss(  # type: ignore[misc]
            *batch,
            margin=self.neg_margin - self.pos_margin,
            normalize=self.distance.normalize_embeddings,
            reduction=reduction,
        )


class NTXentLoss(Reduced, _theirs.NTXentLoss):
    """-log of the share of a positive pair among itself and the negatives of its anchor, at a temperature."""

    def get_default_distance(self) -> Any:
        """Cosines."""
        return CosineSimilarity()

    def native(self, *batch: Any, reduction: str) -> Tensor | None:
        """InfoNCE."""
        if not is_cosine(self.distance):
            return None
        return losses.infonce_loss(*batch, temperature=self.temperature, reduction=reduction)  # type: ignore[misc]


class MultiSimilarityLoss(PerItem, _theirs.MultiSimilarityLoss):
    """1/α log(1 + Σ_p e^{α (base - s_p)}) + 1/β log(1 + Σ_n e^{β (s_n - base)}); for mining, pass a miner's indices."""

    def native(self, *batch: Any) -> Tensor:
        """Over all pairs that are given."""
        settings: dict[str, Any] = {"alpha": self.alpha, "beta": self.beta, "base": self.base}
        return losses.multi_similarity_loss(*batch, **settings, selection="all", reduction="none")


class CircleLoss(PerItem, _theirs.CircleLoss):
    """Circle loss; m is nearkin's margin, gamma its scale."""

    def native(self, *batch: Any) -> Tensor:
        """Over all pairs that are given."""
        return losses.circle_loss(*batch, margin=self.m, scale=self.gamma, reduction="none")  # type: ignore[misc]


class SupConLoss(PerItem, _theirs.SupConLoss):
    """The positives of an item against all that it is compared with."""

    def native(self, embeddings: Tensor, labels: Any, references: Tensor | None, reference_labels: Any) -> Tensor:
        """Over all pairs that are given; 0 where none of them is negative, as in the original."""
        values = losses.supcon_loss(
            embeddings, labels, references, reference_labels, temperature=self.temperature, reduction="none"
        )
        if isinstance(labels, Relation):
            return torch.where(labels.negative.any(), values, 0.0)
        every = labels if reference_labels is None else torch.cat([labels, reference_labels.to(labels.device)])
        return torch.where((every != every[0]).any(), values, 0.0)


class NPairsLoss(Native, _theirs.NPairsLoss):
    """The first two items of each class, each pair against the positives of all others."""

    def terms(self, call: Call) -> Terms | None:
        """One term per class."""
        if not call.alone() or not is_product(self.distance):
            return None
        anchor, positive = _indexing.convert_to_pos_pairs_with_unique_labels(call.indices_tuple, call.labels)
        if len(anchor) < 2:
            return None
        return element(self.native(call.embeddings[anchor], call.embeddings[positive]), anchor)

    def native(self, left: Tensor, right: Tensor) -> Tensor:
        """Row i of one with row i of the other, without a penalty on their length."""
        if self.distance.normalize_embeddings:
            left, right = distances.unit(left), distances.unit(right)
        ids = torch.arange(len(left), device=left.device)
        return losses.npair_loss(left, ids, right, ids, length_weight=0, reduction="none")


class _Ranked(Native):
    """Over items with a positive in the batch, each times how often a miner took it."""

    name = "loss"

    def terms(self: Any, call: Call) -> Terms | None:
        """One term per item that has a positive."""
        if not call.alone():
            return None
        _, place, count = torch.unique(call.labels, return_inverse=True, return_counts=True)
        present = (count[place] > 1).nonzero().squeeze(1)
        values = self.native(call.embeddings, ids_of(call.labels)) if len(present) else None
        if values is None:
            return None
        values = values * _indexing.convert_to_weights(call.indices_tuple, call.labels, values.dtype)
        return element(values[present], present, self.name)


class FastAPLoss(_Ranked, _theirs.FastAPLoss):
    """FastAP; num_bins is nearkin's bins."""

    def native(self, embeddings: Tensor, ids: Tensor) -> Tensor | None:
        """Of squared distances of unit rows."""
        if not is_euclidean(self.distance, 2, unit=True):
            return None
        return losses.fastap_loss(embeddings, ids, bins=self.num_bins, reduction="none")


class SmoothAPLoss(_Ranked, _theirs.SmoothAPLoss):
    """Smooth-AP with each item among its own positives, as the paper's code counts; of any batch in any order."""

    name = "ap_loss"

    def native(self, embeddings: Tensor, ids: Tensor) -> Tensor | None:
        """The batch once more as references."""
        if not is_cosine(self.distance):
            return None
        settings: dict[str, Any] = {"temperature": self.temperature, "reduction": "none"}
        return losses.smooth_ap_loss(embeddings, ids, embeddings.clone(), ids, **settings)


class VICRegLoss(Native, _theirs.VICRegLoss):
    """Two views, `loss(embeddings, ref_emb=view)`, without labels."""

    def terms(self, call: Call) -> Terms | None:
        """One number, as the first kind of terms, where each kind is averaged."""
        kinds = {type(part) for part in getattr(self.reducer, "reducers", {}).values()}
        if kinds != {_mean_reducer} or any(x is not None for x in (call.labels, call.indices_tuple, call.ref_labels)):
            return None
        return one_number(self, self.native(call.embeddings, call.ref_emb))

    def native(self, one: Tensor, other: Tensor) -> Tensor:
        """Row i of one is the other view of row i."""
        ids = torch.arange(len(one), device=one.device)
        settings: dict[str, Any] = {"variance_weight": self.variance_mu, "covariance_weight": self.covariance_v}
        settings |= {"invariance_weight": self.invariance_lambda, "epsilon": self.eps}
        return losses.vicreg_loss(one, ids, other, ids, **settings)
