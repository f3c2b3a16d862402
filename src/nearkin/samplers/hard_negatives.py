"""Batches of positive pairs with the hard negatives of both items, mined from embeddings passed between epochs."""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin.core import checks
from nearkin.core.random import Ints, Stream, shuffled, words
from nearkin.samplers import arguments
from nearkin.samplers.arguments import Embeddings, Labels
from nearkin.samplers.hard_classes import Refreshed
from nearkin.samplers.schedule import Groups, counted


class HardNegatives(Refreshed):
    """Random positive pairs and hard negatives of both their items: the batch of the lifted structure loss.

    `pairs` random positive pairs, then items of other classes until the batch is full: the items of the pairs take
    turns, each adding the nearest negative, by cosine, that is not in the batch yet. `refresh` between epochs, from the
    current encoder, defines what is near; before the first refresh negatives are random. Refresh all ranks with the
    same rows. Negatives are sought

    - with neighbours=k in the whole set: `refresh(embeddings, lists)` also takes the k nearest negatives of every item,
      as `evaluation.nearest_negatives` finds them. A batch is chosen from the lists of its pairs and `batch_size`
      random items, for the turns that they leave open.
    - with neighbours=0 among `candidates` random items of each batch, so that a batch costs (2 pairs × candidates)
      products however many items there are.

    guard: negatives nearer than s_ap - guard |s_ap|, s_ap the cosine of the pair, may be positives with a wrong label:
    they are left out. An item of two pairs has the lower bound. None: no negative is left out.

    Every item of a class of two or more is in one pair per pass, or in two where the class is odd or the last batch is
    filled up; how often it is a negative depends on its neighbours. Items of one-item classes are negatives only. An
    item is in a batch once. pairs=None: a quarter of `batch_size`, so one negative for each item of a pair.

    labels: integers, one per item; -1 is unknown and never drawn. Order: pair after pair, then the negatives. Ranks
    take every `world_size`-th item: gather the batch before the loss. The state holds the embeddings as (N, D) int16,
    and the lists as (N, k) int32. Song et al. 2016, arXiv:1511.06452: random positive pairs, then the difficult
    neighbours of both items. guard 0.05: Moreira et al. 2024, arXiv:2407.15831 ("TopK-PercPos", 95 %).
    """

    _name = "item_embeddings"
    _lists: NDArray[np.int32] | None = None

    def __init__(
        self,
        labels: Labels,
        batch_size: int = 128,
        pairs: int | None = None,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        *,
        candidates: int = 8192,
        neighbours: int = 0,
        guard: float | None = None,
        batches: int | None = None,
    ) -> None:
        known = arguments.labels(labels)
        checks.integer("batch_size", batch_size, 2)
        pairs = max(1, batch_size // 4) if pairs is None else pairs
        checks.integer("pairs", pairs, 1)
        checks.integer("neighbours", neighbours, 0)
        checks.integer("candidates", candidates, 1 if neighbours else batch_size)
        if guard is not None:
            checks.at_least("guard", guard, 0)
        self._groups, self._labels = Groups(known), known
        counts = self._groups.counts
        if len(counts) < 2 or counts.max() < 2:
            received = f"{len(counts)} classes, the largest of {counts.max()} items"
            raise ValueError(f"labels must hold at least 2 classes, one of them with 2 items or more, got {received}")
        self._turns: Ints = np.where(counts > 1, -(-counts // 2), 0)
        turns = int(self._turns.sum())
        checks.no_more("batch_size", batch_size, len(self._groups.items), "the number of items of known classes")
        checks.no_more("pairs", pairs, batch_size // 2, "half of batch_size")
        checks.no_more("pairs", pairs, turns, "the positive pairs of a pass")
        arguments.ranks(rank, world_size, "items", {"items": ("batch_size", batch_size)})
        super().__init__(known, -(-turns // pairs), batches, seed, rank, world_size, "items")
        self._add_to_fingerprint(batch_size, pairs, candidates)
        if neighbours or guard is not None:  # states of samplers without them stay valid
            self._add_to_fingerprint(neighbours, repr(guard))
        self.batch_size, self.pairs, self.candidates = batch_size, pairs, max(candidates, batch_size)
        self.neighbours, self.guard = neighbours, guard

    def refresh(self, embeddings: Embeddings, neighbours: Ints | Tensor | None = None) -> None:
        """embeddings (N, D), one row per item as in `labels`; rows of unknown items are not read.

        neighbours (N, k): the k = `neighbours` nearest negatives of each item, -1 where there are fewer.
        """
        rows = arguments.class_rows("embeddings", embeddings, len(self._labels), "item")
        rows = torch.where(torch.from_numpy(self._labels >= 0).to(rows.device)[:, None], rows, 0)
        lists = arguments.negatives(neighbours, self._labels, self.neighbours)
        self._keep("embeddings", rows, "items")
        self._lists = lists

    def state_dict(self, batches_done: int | None = None) -> dict[str, Tensor]:
        state = super().state_dict(batches_done)
        if self._lists is not None:
            state["neighbours"] = torch.from_numpy(self._lists)  # (N, k) int32
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        super().load_state_dict(state)
        lists = state.get("neighbours")
        self._lists = None if lists is None else lists.cpu().numpy()

    def _global_batch(self, pass_index: int, position: int) -> tuple[Ints, Ints]:
        if self._pass != pass_index:
            self._paired, self._pass = self._pairs_of(pass_index), pass_index
        places = np.arange(position * self.pairs, (position + 1) * self.pairs) % len(self._paired)
        drawn = self._paired[places]
        ends, first, place = np.unique(drawn.ravel(), return_index=True, return_inverse=True)
        order = np.argsort(first)  # as drawn; the last pair of an odd class repeats an item
        ends = ends[order]
        bound = self._bounds(drawn, np.argsort(order)[place.ravel()], len(ends))
        negatives = self._negatives(ends, bound, pass_index, position)
        return np.concatenate([ends, negatives]), np.ones(self.batch_size, np.int64)

    def _bounds(self, drawn: Ints, place: Ints, ends: int) -> NDArray[np.float64] | None:
        """The largest similarity (E,) that a negative of each item may have; None without a guard.

        drawn (T, 2): the pairs; place (2 T,): which of the items each of their ends is.
        """
        if self.guard is None or self._unit is None:
            return None
        similarity = (self._unit[drawn[:, 0]] * self._unit[drawn[:, 1]]).sum(1).astype(np.float64)  # whole numbers
        bound = np.full(ends, np.inf)
        np.minimum.at(bound, place, np.repeat(similarity - self.guard * np.abs(similarity), 2))
        return bound

    def _pairs_of(self, pass_index: int) -> Ints:
        """All positive pairs (T, 2) of a pass in a random order: each class in a random order, two by two."""
        turn, classes = counted(self._turns), np.repeat(np.arange(len(self._turns)), self._turns)
        order = self._groups.shuffled(self.seed, pass_index)
        pairs = order.take(classes, 2 * turn, np.full_like(turn, 2)).reshape(-1, 2)
        return pairs[shuffled(words(len(pairs), self.seed, Stream.PAIRS, pass_index))]

    def _negatives(self, ends: Ints, bound: NDArray[np.float64] | None, pass_index: int, position: int) -> Ints:
        """Fills the batch: for each item of the pairs in turn the nearest candidate of another class not yet in it."""
        items = self._groups.items
        size = min(self.candidates, len(items))
        pool = items[self._window(len(items), size, Stream.NEGATIVES, pass_index, position)]
        if self._lists is not None:
            near = self._lists[ends]
            pool = np.union1d(near[near >= 0], pool[: self.batch_size])
        pool = pool[~np.isin(pool, ends)]
        same = self._labels[ends][:, None] == self._labels[pool]  # (E, M)
        if self._unit is None:
            similarity = np.broadcast_to(-np.arange(len(pool), dtype=np.float32), same.shape)  # in pool order
        else:
            similarity = self._unit[ends] @ self._unit[pool].T
        if bound is not None:
            same |= similarity > bound[:, None]
        similarity = np.where(same, -np.inf, similarity)
        chosen: list[int] = []
        for place in range(self.batch_size - len(ends)):
            row = similarity[place % len(ends)]
            best = int(row.argmax())
            if row[best] == -np.inf:  # this item has no negative left: any negative of the others, then any item
                best = int(similarity.max(0).argmax())
            if best in chosen:
                best = next(other for other in range(len(pool)) if other not in chosen)
            similarity[:, best] = -np.inf
            chosen.append(best)
        return pool[chosen]
