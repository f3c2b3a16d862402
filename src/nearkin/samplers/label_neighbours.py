"""Batches by nearness of a real-valued label."""

from bisect import bisect_left, bisect_right

import numpy as np

from nearkin.core import checks
from nearkin.core.random import Ints, Stream, closest
from nearkin.samplers import arguments
from nearkin.samplers.arguments import Targets
from nearkin.samplers.base import EpochSampler


class LabelNeighbours(EpochSampler):
    """A = `anchors` random items, the k = `neighbours` nearest of each by label, and a random rest: for log-ratio.

    Order: the anchors, then the neighbours of the first from the nearest on, of the second, and so on, then the rest;
    an item is in a batch once. So each of the first A rows has its k nearest labels in the batch, which is what
    `LogRatioLoss(anchors=A)` learns from. Every item is an anchor once per pass (a few twice where A does not divide
    the number of items). A = 1 is the paper's batch. The rest is drawn without repetition and evenly: from shuffled
    orders of all items, used up piece by piece.

    Nearest is exact Euclidean distance of the targets, (N,) or (N, K); of equally near items the lowest index; never
    the anchor itself. No N × N matrix is stored: 1-D targets are sorted once, others take one pass over N per anchor.

    Ranks take every `world_size`-th item, so the anchors and their neighbours lie on different ranks: gather the batch
    before the loss, in its order (`GlobalBatch`, `order=`).
    Kim et al. 2019, arXiv:1904.09626; batch 150, k = 5 from the authors' code.
    """

    def __init__(
        self,
        targets: Targets,
        batch_size: int = 150,
        neighbours: int = 5,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        *,
        anchors: int = 1,
        batches: int | None = None,
    ) -> None:
        self._columns = arguments.targets(targets)  # (K, N)
        self._items = self._columns.shape[1]
        checks.integer("batch_size", batch_size, 1)
        checks.integer("neighbours", neighbours, 0)
        checks.integer("anchors", anchors, 1)
        checks.no_more("batch_size", batch_size, self._items, "the number of items")
        checks.no_more("anchors", anchors, batch_size, "batch_size")
        beside = "the anchor" if anchors == 1 else f"each of {anchors} anchors"
        checks.no_more("neighbours", neighbours, batch_size // anchors - 1, f"what batch_size leaves beside {beside}")
        arguments.ranks(rank, world_size, "items", {"items": ("batch_size", batch_size)})
        super().__init__(self._columns, -(-self._items // anchors), batches, seed, rank, world_size, "items")
        self._add_to_fingerprint(batch_size, neighbours)
        if anchors > 1:  # states of one anchor stay valid
            self._add_to_fingerprint(anchors)
        self.batch_size, self.neighbours, self.anchors = batch_size, neighbours, anchors
        if len(self._columns) == 1:
            self._ascending = np.argsort(self._columns[0], kind="stable")
            self._sorted = self._columns[0][self._ascending]

    def nearest(self, item: int) -> Ints:
        """The k items nearest to this one by label, nearest first."""
        if self.neighbours == 0:
            return np.empty(0, np.int64)
        with np.errstate(over="ignore"):
            if len(self._columns) == 1:
                return self._nearest_sorted(item)
            distance = np.zeros(self._items)
            for column in self._columns:  # one by one: a sum over an axis is rounded differently on other machines
                difference = column - column[item]
                distance += difference * difference
        distance[item] = np.nan
        return closest(distance, self.neighbours)

    def _nearest_sorted(self, item: int) -> Ints:
        values, value, k = self._sorted, self._columns[0][item], self.neighbours
        place = int(np.searchsorted(values, value))
        near = np.abs(values[max(place - k, 0) : place + k + 1] - value)
        edge = np.partition(near, k)[k]  # one more than k, for the item itself
        # All that are as near as the k-th, so that ties go to the lowest index.
        first = bisect_left(range(place), True, key=lambda i: bool(value - values[i] <= edge))
        end = bisect_right(range(place, len(values)), False, key=lambda i: bool(values[i] - value > edge)) + place
        among: Ints = np.sort(self._ascending[first:end])
        among = among[among != item]
        return among[closest(np.abs(self._columns[0][among] - value), k)]

    def _global_batch(self, pass_index: int, position: int) -> tuple[Ints, Ints]:
        turns = np.arange(position * self.anchors, (position + 1) * self.anchors) % self._items
        anchors = self._shuffled(self._items, Stream.ANCHORS, pass_index)[turns]
        members = np.concatenate([anchors, *(self.nearest(int(anchor)) for anchor in anchors)])
        head = members[np.sort(np.unique(members, return_index=True)[1])]  # neighbourhoods may overlap
        window = self._window(self._items, self.batch_size, Stream.REST, pass_index, position)  # head and rest at most
        rest = window[~np.isin(window, head)][: self.batch_size - len(head)]
        return np.concatenate([head, rest]), np.ones(self.batch_size, np.int64)
