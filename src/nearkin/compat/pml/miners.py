"""The original's miners; three of them by nearkin's, on exact distances."""

from typing import Any

import torch
from torch import Tensor

from nearkin import mining
from nearkin.compat.pml import original
from nearkin.compat.pml.distances import CosineSimilarity, LpDistance
from nearkin.compat.pml.native import is_ours
from nearkin.core.labels import Relation

_theirs: Any = original("miners")
_indexing: Any = original("utils.loss_and_miner_utils")


def __getattr__(name: str) -> Any:
    return getattr(_theirs, name)


class _Miner:
    """Asks `native` first; where that gives None, or this is a subclass of a user's, the original mines."""

    def get_default_distance(self) -> Any:
        """Euclidean, of unit rows."""
        return LpDistance(p=2)

    def mine(self: Any, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor) -> tuple[Tensor, ...]:
        """The indices."""
        mined = None  # of one tensor of labels beside other rows the original pairs in a way of its own
        if is_ours(self) and (ref_emb is embeddings) == (ref_labels is labels):
            positive, negative = (mask.bool() for mask in _indexing.get_matches_and_diffs(labels, ref_labels))
            distance = self.distance(embeddings, ref_emb)
            far = -distance if self.distance.is_inverted else distance
            mined = self.native(far, Relation(positive, negative), embeddings.shape[1], labels, ref_labels)
        if mined is None:
            mined = super().mine(embeddings, labels, ref_emb, ref_labels)  # type: ignore[misc]
        return tuple(mined)


class BatchHardMiner(_Miner, _theirs.BatchHardMiner):
    """One triplet per anchor: its farthest positive and its nearest negative."""

    def native(self, far: Tensor, relation: Relation, *_: Any) -> tuple[Tensor, ...] | None:
        """`nearkin.mining.batch_hard`."""
        if self.allowed_pos_range is not None or self.allowed_neg_range is not None:
            return None
        return mining.batch_hard(far, relation).indices()


class MultiSimilarityMiner(_Miner, _theirs.MultiSimilarityMiner):
    """Pairs within epsilon of the anchor's hardest pair of the other kind."""

    def get_default_distance(self) -> Any:
        """Cosines."""
        return CosineSimilarity()

    def native(self, far: Tensor, relation: Relation, *_: Any) -> tuple[Tensor, ...]:
        """`nearkin.mining.multi_similarity`, in order of anchor and other."""
        pairs = mining.multi_similarity(far, relation, epsilon=self.epsilon)
        return *pairs.positive.nonzero(as_tuple=True), *pairs.negative.nonzero(as_tuple=True)


class DistanceWeightedMiner(_Miner, _theirs.DistanceWeightedMiner):
    """Negatives by 1 / density of their distance on the sphere, as many triplets per anchor as its class has items."""

    def native(
        self, far: Tensor, relation: Relation, dim: int, labels: Tensor, ref_labels: Tensor
    ) -> tuple[Tensor, ...]:
        """The original's draw, by `odds`."""
        odds = self.odds(far, relation.negative, dim)
        mined: tuple[Tensor, ...] = _indexing.get_random_triplet_indices(labels, ref_labels, weights=odds)
        return mined

    def odds(self, distance: Tensor, negative: Tensor, dim: int) -> Tensor:
        """(B, R), 0 for what is no negative or too far to cost; scaled by the largest of each anchor.

        The original scales by the largest of the batch, so that one near pair leaves most anchors without odds.
        """
        clamped = distance.double().clamp(min=self.cutoff)
        inner = 1 - clamped.square() / 4
        log_odds = (2.0 - dim) * clamped.log() - (dim - 3) / 2 * inner.clamp(min=1e-12).log()
        usable = negative & (clamped < self.nonzero_loss_cutoff) & (inner > 0)
        log_odds = torch.where(usable, log_odds, -torch.inf)
        top = log_odds.amax(1, keepdim=True)
        return torch.where(usable, (log_odds - torch.where(top == -torch.inf, 0.0, top)).exp(), 0.0)
