"""Miners of pytorch-metric-learning: `miner(embeddings, labels, ref_emb, ref_labels)` gives an index tuple for a loss.

Distances are nearkin's, exact at 0. Random miners draw by torch's generator, as in the original.
"""

import math
from typing import Any

import torch
from torch import Tensor

from nearkin import mining
from nearkin.compat.pml.distances import BaseDistance, CosineSimilarity, LpDistance
from nearkin.compat.pml.recording import Recording, device_of
from nearkin.compat.pml.utils import loss_and_miner_utils as indexing
from nearkin.core import distances
from nearkin.core.relations import Relation

__all__ = [
    "AngularMiner",
    "BaseMiner",
    "BatchEasyHardMiner",
    "BatchHardMiner",
    "DistanceWeightedMiner",
    "EmbeddingsAlreadyPackagedAsTriplets",
    "HDCMiner",
    "MultiSimilarityMiner",
    "PairMarginMiner",
    "TripletMarginMiner",
    "UniformHistogramMiner",
]


def __dir__() -> list[str]:
    return __all__


class BaseMiner(Recording):
    """A subclass has `mine`; the numbers of pairs and triplets of the last call are attributes."""

    def __init__(self, distance: BaseDistance | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.distance = self.get_default_distance() if distance is None else distance
        self.num_pos_pairs = self.num_neg_pairs = self.num_triplets = 0

    def get_default_distance(self) -> BaseDistance:
        """Where none is given."""
        return LpDistance(p=2)

    def mine(self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor) -> tuple[Tensor, ...]:
        """The indices."""
        raise NotImplementedError

    @torch.no_grad()
    def forward(
        self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor | None = None, ref_labels: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Checks, mines and counts."""
        labels = device_of(labels, embeddings)
        if ref_emb is None or ref_emb is embeddings:
            ref_emb, ref_labels = embeddings, labels
        elif ref_labels is None:
            raise ValueError("ref_labels must be given with ref_emb, got None")
        else:
            same = ref_labels is labels
            ref_labels = labels.clone() if same else device_of(ref_labels, ref_emb)
        for name, rows, values in (("labels", embeddings, labels), ("ref_labels", ref_emb, ref_labels)):
            if values.dim() != 1 or len(values) != len(rows):
                raise ValueError(f"{name} must have one entry per row: {len(rows)} rows, shape {tuple(values.shape)}")
        mined = self.mine(embeddings, labels, ref_emb, ref_labels)
        self.num_pos_pairs, self.num_neg_pairs = (len(mined[0]), len(mined[2])) if len(mined) == 4 else (0, 0)
        self.num_triplets = len(mined[0]) if len(mined) == 3 else 0
        return mined

    def nearness(self, embeddings: Tensor, ref_emb: Tensor) -> Tensor:
        """(B, R), larger is farther, whatever the distance."""
        matrix: Tensor = self.distance(embeddings, ref_emb)
        return -matrix if self.distance.is_inverted else matrix

    def _unit_euclidean(self) -> None:
        d = self.distance
        if type(d) is not LpDistance or (d.p, d.power, d.normalize_embeddings) != (2, 1, True):
            raise ValueError(f"{type(self).__name__}: distance must be LpDistance(), got {type(d).__name__}")


class TripletMarginMiner(BaseMiner):
    """Triplets within the margin: "all", "hard" (negative nearer), "semihard" (negative farther); "easy": the rest."""

    def __init__(self, margin: float = 0.2, type_of_triplets: str = "all", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        kinds = ("all", "hard", "semihard", "easy")
        if type_of_triplets not in kinds:
            raise ValueError(f"type_of_triplets must be one of {', '.join(kinds)}, got {type_of_triplets!r}")
        self.margin, self.type_of_triplets = margin, type_of_triplets

    def mine(self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor) -> tuple[Tensor, ...]:
        """Of every triplet, those of the kind."""
        a, p, n = indexing.get_all_triplets_indices(labels, ref_labels)
        matrix = self.nearness(embeddings, ref_emb)
        gap = matrix[a, n] - matrix[a, p]
        chosen = gap > self.margin if self.type_of_triplets == "easy" else gap <= self.margin
        if self.type_of_triplets == "hard":
            chosen = chosen & (gap <= 0)
        elif self.type_of_triplets == "semihard":
            chosen = chosen & (gap > 0)
        return a[chosen], p[chosen], n[chosen]


class AngularMiner(BaseMiner):
    """Triplets of raw rows whose angle atan(|a - p| / (2 |n - (a + p) / 2|)) is above `angle` degrees."""

    def __init__(self, angle: float = 20, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._unit_euclidean()
        self.angle = math.radians(angle)

    def mine(self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor) -> tuple[Tensor, ...]:
        """Of every triplet, those above the angle."""
        a, p, n = indexing.get_all_triplets_indices(labels, ref_labels)
        anchors, positives = embeddings[a], ref_emb[p]
        across = self.distance.pairwise_distance(anchors, positives)
        height = self.distance.pairwise_distance(ref_emb[n], (anchors + positives) / 2)
        chosen = (across / (2 * height)).atan() > self.angle
        return a[chosen], p[chosen], n[chosen]


class PairMarginMiner(BaseMiner):
    """Positives beyond `pos_margin` and negatives within `neg_margin`."""

    def __init__(self, pos_margin: float = 0.2, neg_margin: float = 0.8, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.pos_margin, self.neg_margin = pos_margin, neg_margin

    def mine(self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor) -> tuple[Tensor, ...]:
        """The pairs, in order."""
        a1, p, a2, n = indexing.get_all_pairs_indices(labels, ref_labels)
        matrix = self.distance(embeddings, ref_emb)
        near = self.distance.margin(matrix[a1, p], self.pos_margin) > 0
        far = self.distance.margin(self.neg_margin, matrix[a2, n]) > 0
        return a1[near], p[near], a2[far], n[far]


class MultiSimilarityMiner(BaseMiner):
    """`nearkin.mining.multi_similarity`: what lies within epsilon of the anchor's hardest pair of the other kind."""

    def __init__(self, epsilon: float = 0.1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.epsilon = epsilon

    def mine(self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor) -> tuple[Tensor, ...]:
        """The pairs, in order."""
        relation = Relation(*indexing.get_matches_and_diffs(labels, ref_labels))
        pairs = mining.multi_similarity(self.nearness(embeddings, ref_emb), relation, epsilon=self.epsilon)
        return *pairs.positive.nonzero(as_tuple=True), *pairs.negative.nonzero(as_tuple=True)

    def get_default_distance(self) -> BaseDistance:
        """Cosines."""
        return CosineSimilarity()


class BatchEasyHardMiner(BaseMiner):
    """The hardest, easiest or all positives and negatives of each anchor; "semihard": only beyond the other's distance.

    allowed_pos_range, allowed_neg_range: (least, most) distance or similarity that is considered.
    """

    HARD, SEMIHARD, EASY, ALL = "hard", "semihard", "easy", "all"
    all_batch_mining_strategies = (HARD, SEMIHARD, EASY, ALL)

    def __init__(
        self,
        pos_strategy: str = EASY,
        neg_strategy: str = SEMIHARD,
        allowed_pos_range: tuple[float, float] | None = None,
        allowed_neg_range: tuple[float, float] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        strategies = self.all_batch_mining_strategies
        for name, value in (("pos_strategy", pos_strategy), ("neg_strategy", neg_strategy)):
            if value not in strategies:
                raise ValueError(f"{name} must be one of {', '.join(strategies)}, got {value!r}")
        if {pos_strategy, neg_strategy} in ({"semihard"}, {"semihard", "all"}):
            raise ValueError(
                f"semihard needs one pair of the other kind to compare with: pos_strategy={pos_strategy!r}, "
                f"neg_strategy={neg_strategy!r}"
            )
        self.pos_strategy, self.neg_strategy = pos_strategy, neg_strategy
        self.allowed_pos_range, self.allowed_neg_range = allowed_pos_range, allowed_neg_range

    def mine(self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor) -> tuple[Tensor, ...]:
        """One pair of each kind per anchor that has both, or all of a kind."""
        matrix = self.distance(embeddings, ref_emb)
        far = -matrix if self.distance.is_inverted else matrix
        every = indexing.get_matches_and_diffs(labels, ref_labels)
        positive, negative = (
            mask if limits is None else mask & (matrix >= limits[0]) & (matrix <= limits[1])
            for mask, limits in zip(every, (self.allowed_pos_range, self.allowed_neg_range), strict=True)
        )
        hard_positive = self.pos_strategy in (self.HARD, self.SEMIHARD)
        hard_negative = self.neg_strategy in (self.HARD, self.SEMIHARD)
        if self.pos_strategy == self.SEMIHARD:  # nearer than the chosen negative
            n, n_distance, has_n = _extreme(far, negative, largest=not hard_negative)
            p, _, has_p = _extreme(far, positive & (far < n_distance[:, None]), largest=True)
        else:
            p, p_distance, has_p = _extreme(far, positive, largest=hard_positive)
            beyond = negative & (far > p_distance[:, None]) if self.neg_strategy == self.SEMIHARD else negative
            n, _, has_n = _extreme(far, beyond, largest=not hard_negative)
        rows = torch.arange(len(far), device=far.device)
        if self.ALL not in (self.pos_strategy, self.neg_strategy):
            keep = has_p & has_n
            return rows[keep], p[keep], rows[keep], n[keep]
        near = every[0].nonzero(as_tuple=True) if self.pos_strategy == self.ALL else (rows[has_p], p[has_p])
        away = every[1].nonzero(as_tuple=True) if self.neg_strategy == self.ALL else (rows[has_n], n[has_n])
        return *near, *away


def _extreme(far: Tensor, mask: Tensor, largest: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Column and value of each row's farthest or nearest masked entry, and whether there is one."""
    empty = -torch.inf if largest else torch.inf
    masked = torch.where(mask, far, empty)
    value, column = masked.max(1) if largest else masked.min(1)
    return column, value, mask.any(1)


class BatchHardMiner(BatchEasyHardMiner):
    """One triplet per anchor: its farthest positive and its nearest negative."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(pos_strategy=self.HARD, neg_strategy=self.HARD, **kwargs)

    def mine(self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor) -> tuple[Tensor, ...]:
        """The triplets."""
        a, p, _, n = super().mine(embeddings, labels, ref_emb, ref_labels)
        return a, p, n


class DistanceWeightedMiner(BaseMiner):
    """Negatives by 1 / density of their distance on the sphere; each anchor's odds are scaled by its own largest.

    The original scales by the largest of the batch, so that one near pair leaves most anchors without odds.
    """

    def __init__(self, cutoff: float = 0.5, nonzero_loss_cutoff: float = 1.4, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._unit_euclidean()
        self.cutoff, self.nonzero_loss_cutoff = float(cutoff), float(nonzero_loss_cutoff)

    def mine(self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor) -> tuple[Tensor, ...]:
        """As many triplets per anchor as its class has items."""
        weights = self.odds(embeddings, labels, ref_emb, ref_labels)
        return indexing.get_random_triplet_indices(labels, ref_labels, weights=weights)

    def odds(self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor) -> Tensor:
        """(B, R), 0 for what is no negative or too far to cost."""
        matrix = distances.euclidean(embeddings, None if ref_emb is embeddings else ref_emb, normalize=True)
        dim = embeddings.shape[1]
        clamped = matrix.double().clamp(min=self.cutoff)
        inner = 1 - clamped.square() / 4
        log_odds = (2.0 - dim) * clamped.log() - (dim - 3) / 2 * inner.clamp(min=1e-12).log()
        _, negative = indexing.get_matches_and_diffs(labels, ref_labels)
        usable = negative & (clamped < self.nonzero_loss_cutoff) & (inner > 0)
        log_odds = torch.where(usable, log_odds, -torch.inf)
        top = log_odds.amax(1, keepdim=True)
        return torch.where(usable, (log_odds - torch.where(top == -torch.inf, 0.0, top)).exp(), 0.0)


class HDCMiner(BaseMiner):
    """The hardest `filter_percentage` (a share) of all positive pairs, and of all negative pairs."""

    def __init__(self, filter_percentage: float = 0.5, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.filter_percentage = filter_percentage
        self.reset_idx()

    def reset_idx(self) -> None:
        """Mines all pairs of the batch."""
        self._external: tuple[Tensor, ...] | None = None

    def set_idx_externally(self, external_indices_tuple: Any, labels: Tensor) -> None:
        """Mines these pairs until `reset_idx`."""
        self._external = indexing.convert_to_pairs(external_indices_tuple, labels)

    def mine(self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor) -> tuple[Tensor, ...]:
        """The pairs, hardest first."""
        pairs = indexing.get_all_pairs_indices(labels, ref_labels) if self._external is None else self._external
        far = self.nearness(embeddings, ref_emb)
        mined: list[Tensor] = []
        for anchor, other, largest in ((pairs[0], pairs[1], True), (pairs[2], pairs[3], False)):
            number = math.ceil(self.filter_percentage * len(anchor))
            order = far[anchor, other].topk(number, largest=largest).indices
            mined += [anchor[order], other[order]]
        return tuple(mined)


class UniformHistogramMiner(BaseMiner):
    """Pairs drawn evenly over the range of distances: `pos_per_bin` and `neg_per_bin` from each bin that has any."""

    def __init__(self, num_bins: int = 100, pos_per_bin: int = 10, neg_per_bin: int = 10, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_bins, self.pos_per_bin, self.neg_per_bin = num_bins, pos_per_bin, neg_per_bin

    def mine(self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor) -> tuple[Tensor, ...]:
        """The pairs, bin by bin."""
        a1, p, a2, n = indexing.get_all_pairs_indices(labels, ref_labels)
        matrix = self.distance(embeddings, ref_emb)
        near = self._drawn(matrix[a1, p], self.pos_per_bin)
        far = self._drawn(matrix[a2, n], self.neg_per_bin)
        return a1[near], p[near], a2[far], n[far]

    def _drawn(self, values: Tensor, per_bin: int) -> Tensor:
        if not values.numel():
            return torch.empty(0, dtype=torch.long, device=values.device)
        edges = torch.linspace(values.min(), values.max(), self.num_bins + 1, device=values.device, dtype=values.dtype)
        bins = (torch.bucketize(values, edges, right=True) - 1).clamp(0, self.num_bins - 1)
        used, order = torch.unique(bins), bins.argsort(stable=True)
        count = bins.bincount(minlength=self.num_bins)[used]
        first = count.cumsum(0) - count
        place = (torch.rand(len(used), per_bin, device=values.device) * count[:, None]).long()
        return order[first[:, None] + torch.minimum(place, count[:, None] - 1)].flatten()


class EmbeddingsAlreadyPackagedAsTriplets(BaseMiner):
    """Rows 0, 1, 2 are an anchor, its positive and its negative, rows 3, 4, 5 the next, and so on."""

    def mine(self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor, ref_labels: Tensor) -> tuple[Tensor, ...]:
        """The triplets."""
        rows = torch.arange(len(embeddings), device=embeddings.device)
        return rows[0::3], rows[1::3], rows[2::3]
