"""Losses with one term per item, from its row of the matrix: multi-similarity, circle, SupCon, FastAP, NCA."""

from typing import Any

import torch
from torch import Tensor

from nearkin import losses
from nearkin.compat.pml.distances import BaseDistance, CosineSimilarity, LpDistance
from nearkin.compat.pml.losses.base_loss import BaseMetricLossFunction, element_terms, refuse_distance
from nearkin.compat.pml.recording import own_ids, same_labels
from nearkin.compat.pml.reducers import AvgNonZeroReducer, BaseReducer, MeanReducer, Terms
from nearkin.compat.pml.utils import loss_and_miner_utils as indexing
from nearkin.core import reduce
from nearkin.core.relations import Relation

__all__ = [
    "CircleLoss",
    "FastAPLoss",
    "GeneralizedLiftedStructureLoss",
    "MultiSimilarityLoss",
    "NCALoss",
    "SmoothAPLoss",
    "SupConLoss",
    "VICRegLoss",
]


class _ItemLoss(BaseMetricLossFunction):
    """`by_nearkin` of cosines; `by_matrix` of any other distance. A miner's pairs become a `Relation`."""

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Tensor, ref_labels: Any
    ) -> Terms:
        if indices_tuple is None:
            self.need(labels=labels)
        references = None if ref_emb is embeddings else ref_emb
        if type(self.distance) is CosineSimilarity and self.distance.power == 1:
            if indices_tuple is None:
                reference_labels = None if references is None else own_ids(ref_labels)
                batch: tuple[Any, ...] = (embeddings, own_ids(labels), references, reference_labels)
            else:
                batch = (embeddings, self._relation(indices_tuple, embeddings, ref_emb), references, None)
            values = self.by_nearkin(*batch)
            if values is not None:
                return element_terms(values)
        if indices_tuple is None:
            relation = Relation(*indexing.get_matches_and_diffs(labels, None if references is None else ref_labels))
        else:
            relation = self._relation(indices_tuple, embeddings, ref_emb)
        return element_terms(self.by_matrix(self.distance(embeddings, ref_emb), relation))

    def _relation(self, indices_tuple: Any, embeddings: Tensor, ref_emb: Tensor) -> Relation:
        a1, p, a2, n = indexing.convert_to_pairs(indices_tuple, None)
        positive = torch.zeros(len(embeddings), len(ref_emb), dtype=torch.bool, device=embeddings.device)
        negative = torch.zeros_like(positive)
        positive[a1, p], negative[a2, n] = True, True
        return Relation(positive, negative)

    def by_nearkin(self, *batch: Any) -> Tensor | None:
        """One value per item by nearkin's own loss, or None where it has none."""
        return None

    def by_matrix(self, matrix: Tensor, relation: Relation) -> Tensor:
        """One value per item from its distances."""
        refuse_distance(self, self.distance, "CosineSimilarity()")
        raise AssertionError

    def get_default_distance(self) -> BaseDistance:
        """Cosines."""
        return CosineSimilarity()


class MultiSimilarityLoss(_ItemLoss):
    """1/α log(1 + Σ_p e^{α (d_p - base)}) + 1/β log(1 + Σ_n e^{β (base - d_n)}); for mining, pass a miner's indices."""

    def __init__(self, alpha: float = 2, beta: float = 50, base: float = 0.5, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.alpha, self.beta, self.base = alpha, beta, base

    def by_nearkin(self, *batch: Any) -> Tensor:
        """Over all pairs that are given."""
        options: dict[str, Any] = {"alpha": self.alpha, "beta": self.beta, "base": self.base}
        return losses.multi_similarity_loss(*batch, **options, selection="all", reduction="none")

    def by_matrix(self, matrix: Tensor, relation: Relation) -> Tensor:
        """The same of another distance."""
        pull, push = self.distance.margin(matrix, self.base), self.distance.margin(self.base, matrix)
        positive = reduce.softplus(reduce.logsumexp(self.alpha * pull, relation.positive)) / self.alpha
        return positive + reduce.softplus(reduce.logsumexp(self.beta * push, relation.negative)) / self.beta


class CircleLoss(_ItemLoss):
    """`nearkin.losses.circle_loss`; m is its margin, gamma its scale."""

    def __init__(self, m: float = 0.4, gamma: float = 80, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if type(self.distance) is not CosineSimilarity or self.distance.power != 1:
            refuse_distance(self, self.distance, "CosineSimilarity()")
        self.m, self.gamma = m, gamma

    def by_nearkin(self, *batch: Any) -> Tensor:
        """Over all pairs that are given."""
        return losses.circle_loss(*batch, margin=self.m, scale=self.gamma, reduction="none")  # type: ignore[misc]

    def get_default_reducer(self) -> BaseReducer:
        """Over the terms above 0."""
        return AvgNonZeroReducer()


class SupConLoss(_ItemLoss):
    """`nearkin.losses.supcon_loss`: the positives of an item against all that it is compared with."""

    def __init__(self, temperature: float = 0.1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.temperature = temperature

    def by_nearkin(self, *batch: Any) -> Tensor:
        """Over all pairs that are given."""
        return losses.supcon_loss(*batch, temperature=self.temperature, reduction="none")  # type: ignore[misc]

    def by_matrix(self, matrix: Tensor, relation: Relation) -> Tensor:
        """The same of another distance."""
        logits = (matrix if self.distance.is_inverted else -matrix) / self.temperature
        share = logits - reduce.logsumexp(logits, relation.positive | relation.negative)[:, None]
        return -reduce.mean(share, relation.positive)

    def get_default_reducer(self) -> BaseReducer:
        """Over the terms above 0."""
        return AvgNonZeroReducer()


class GeneralizedLiftedStructureLoss(_ItemLoss):
    """[log Σ_p e^{d_p - pos_margin} + log Σ_n e^{neg_margin - d_n}]₊ (Hermans et al. 2017, eq. 4)."""

    def __init__(self, neg_margin: float = 1, pos_margin: float = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.neg_margin, self.pos_margin = neg_margin, pos_margin

    def by_matrix(self, matrix: Tensor, relation: Relation) -> Tensor:
        """One value per item; an empty side counts 0, as in the original."""
        pull = indexing.logsumexp(self.distance.margin(matrix, self.pos_margin), relation.positive, add_one=False)
        push = indexing.logsumexp(self.distance.margin(self.neg_margin, matrix), relation.negative, add_one=False)
        return (pull + push).relu().squeeze(1)

    def get_default_distance(self) -> BaseDistance:
        """Euclidean, of unit rows."""
        return LpDistance(p=2)


class _RankLoss(BaseMetricLossFunction):
    """Over items with a positive in the batch, each times how often a miner took it."""

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Tensor, ref_labels: Any
    ) -> Terms:
        self.need(labels=labels)
        self.need_batch_alone(embeddings, ref_emb)
        present = indexing.get_matches_and_diffs(labels)[0].any(1).nonzero().squeeze(1)
        if not present.numel():
            return self.zero_losses()
        values = self.per_item(embeddings, own_ids(labels))
        values = values * indexing.convert_to_weights(indices_tuple, labels, values.dtype)
        return element_terms(values[present], present)

    def per_item(self, embeddings: Tensor, ids: Tensor) -> Tensor:
        """One value per item."""
        raise NotImplementedError


class FastAPLoss(_RankLoss):
    """`nearkin.losses.fastap_loss`; num_bins is its bins."""

    def __init__(self, num_bins: int = 10, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        squares = type(self.distance) is LpDistance and (self.distance.p, self.distance.power) == (2, 2)
        if not squares or not self.distance.normalize_embeddings:
            refuse_distance(self, self.distance, "LpDistance(power=2)")
        self.num_bins = int(num_bins)

    def per_item(self, embeddings: Tensor, ids: Tensor) -> Tensor:
        """By nearkin."""
        return losses.fastap_loss(embeddings, ids, bins=self.num_bins, reduction="none")

    def get_default_distance(self) -> BaseDistance:
        """Squared, of unit rows."""
        return LpDistance(power=2)


class SmoothAPLoss(_RankLoss):
    """`nearkin.losses.smooth_ap_loss` with each item among its own positives, as the paper's code counts; any batch."""

    def __init__(self, temperature: float = 0.01, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if type(self.distance) is not CosineSimilarity or self.distance.power != 1:
            refuse_distance(self, self.distance, "CosineSimilarity()")
        self.temperature = temperature

    def per_item(self, embeddings: Tensor, ids: Tensor) -> Tensor:
        """By nearkin, the batch once more as references."""
        return losses.smooth_ap_loss(
            embeddings, ids, embeddings.clone(), ids, temperature=self.temperature, reduction="none"
        )

    def get_default_distance(self) -> BaseDistance:
        """Cosines."""
        return CosineSimilarity()


class NCALoss(BaseMetricLossFunction):
    """-log of the share of an item's own class among all that it is compared with, by softmax of -scale · d²."""

    def __init__(self, softmax_scale: float = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.softmax_scale = softmax_scale

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Tensor, ref_labels: Any
    ) -> Terms:
        """One term per item that has a positive; a share too small for a float counts too."""
        self.need(labels=labels)
        return self.shares(embeddings, labels, indices_tuple, ref_emb, ref_labels)

    def shares(
        self, embeddings: Tensor, labels: Tensor, indices_tuple: Any, ref_emb: Tensor, ref_labels: Tensor
    ) -> Terms:
        """The terms, in logarithms throughout."""
        matrix = self.distance(embeddings, ref_emb)
        logits = self.softmax_scale * (matrix if self.distance.is_inverted else -matrix)
        others, own = torch.ones_like(logits, dtype=torch.bool), ref_emb is embeddings
        if own:
            others.fill_diagonal_(False)
        same = same_labels(labels, ref_labels) & others
        present = same.any(1).nonzero().squeeze(1)
        if not present.numel():
            return self.zero_losses()
        values = (reduce.logsumexp(logits, others) - reduce.logsumexp(logits, same))[present]
        weights = indexing.convert_to_weights(indices_tuple, labels, values.dtype, using_ref=not own)
        return element_terms(values * weights[present], present)

    def get_default_distance(self) -> BaseDistance:
        """Squared, of unit rows."""
        return LpDistance(power=2)


class VICRegLoss(BaseMetricLossFunction):
    """`nearkin.losses.vicreg_loss` of two views, `loss(embeddings, ref_emb=view)`, without labels."""

    def __init__(
        self,
        invariance_lambda: float = 25,
        variance_mu: float = 25,
        covariance_v: float = 1,
        eps: float = 1e-4,
        **kwargs: Any,
    ) -> None:
        for name in ("distance", "embedding_regularizer"):
            if kwargs.get(name) is not None:
                raise ValueError(f"VICRegLoss: {name} must be None, got {type(kwargs[name]).__name__}")
        super().__init__(**kwargs)
        if type(self.reducer) is not MeanReducer:
            raise ValueError(f"VICRegLoss: reducer must be MeanReducer(), got {type(self.reducer).__name__}")
        self.invariance_lambda, self.variance_mu, self.covariance_v = invariance_lambda, variance_mu, covariance_v
        self.eps = eps

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Tensor, ref_labels: Any
    ) -> Terms:
        """One number."""
        for name, value in (("labels", labels), ("ref_labels", ref_labels), ("indices_tuple", indices_tuple)):
            if value is not None:
                raise ValueError(f"VICRegLoss: {name} must be None: row i of ref_emb is the other view of row i")
        ids = torch.arange(len(embeddings), device=embeddings.device)
        value = losses.vicreg_loss(
            embeddings,
            ids,
            ref_emb,
            ids,
            invariance_weight=self.invariance_lambda,
            variance_weight=self.variance_mu,
            covariance_weight=self.covariance_v,
            epsilon=self.eps,
        )
        return {"loss": {"losses": value, "indices": None, "reduction_type": "already_reduced"}}
