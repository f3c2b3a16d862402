"""Near classes in one batch: mined offline, from embeddings passed between epochs."""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin.core import checks
from nearkin.core.random import Ints, Stream, closest, words
from nearkin.samplers import arguments
from nearkin.samplers.arguments import Embeddings, Labels, Split
from nearkin.samplers.base import EpochSampler
from nearkin.samplers.class_balanced import ClassBalanced
from nearkin.samplers.schedule import PickedBatches

# Unit vectors are rounded to multiples of 1/2048. Sums of products are then integers below 2^24: float32 holds
# them exactly in any order of addition, so every BLAS on every machine sorts classes alike.
_GRID = 2048
_ROWS = 16_384  # rows in float64 at a time


def on_grid(directions: Tensor) -> NDArray[np.float32]:
    """Unit vectors of the rows, rounded to multiples of 1/2048; a zero row stays zero."""
    unit = np.empty(directions.shape, np.float32)
    for start in range(0, len(unit), _ROWS):
        rows = directions[start : start + _ROWS].to("cpu", torch.float64)
        rows = rows / rows.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
        rows /= torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp_min(1)
        unit[start : start + _ROWS] = (rows * _GRID).round_().numpy()
    return unit


class Refreshed(EpochSampler):
    """A sampler that keeps embeddings, passed between epochs, as unit vectors on the grid, also in its state."""

    _name: str  # of the embeddings in the state
    _unit: NDArray[np.float32] | None = None  # (M, D) unit vectors × 2048
    _pass = -1  # the pass that is planned

    def state_dict(self, batches_done: int | None = None) -> dict[str, Tensor]:
        state = super().state_dict(batches_done)
        if self._unit is not None:
            state[self._name] = torch.from_numpy(self._unit).to(torch.int16)
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        super().load_state_dict(state)
        stored = state.get(self._name)
        self._unit, self._pass = None if stored is None else stored.to("cpu", torch.float32).numpy(), -1

    def _keep(self, name: str, directions: Tensor, what: str) -> None:
        """directions (M, D): only the direction of each row counts."""
        epoch, drawn = self._epoch, self._drawn
        if 0 < drawn < len(self):
            raise ValueError(
                f"refresh must come between epochs, got it after batch {drawn} of {len(self)} of epoch {epoch}; "
                f"call set_epoch({epoch + 1}) first to leave this epoch, or set batches= for shorter epochs"
            )
        checks.finite(name, directions, what)
        self._unit, self._pass = on_grid(directions), -1


class MinedClasses(Refreshed, ClassBalanced):
    """A `ClassBalanced` whose batches are picked by the similarity of classes once it has embeddings."""

    _name = "class_embeddings"

    def _plan(self, turns: Ints, pass_index: int) -> None:
        if self._unit is None:
            super()._plan(turns, pass_index)
            return
        self._schedule = PickedBatches(turns, self._pass_batches, self._pick)

    def _pick(self, left: Ints, due: Ints, position: int) -> Ints:
        """`classes` different classes that have turns left, all that are due among them."""
        raise NotImplementedError

    def _turns_drawn(self, count: int, left: Ints, position: int) -> Ints:
        """The classes of `count` random turns of those left."""
        ends = np.cumsum(left)
        drawn = words(count, self.seed, Stream.MINING, self._pass, position) % np.uint64(ends[-1])
        return np.searchsorted(ends, drawn.astype(np.int64), side="right")


class HardClasses(MinedClasses):
    """A `ClassBalanced` that puts near classes into the same batch.

    `refresh(embeddings)` between epochs, from the current encoder: a batch is then a random class and the `classes` - 1
    nearest to it, by the cosine of class means, that have turns left. Every class takes its turns as in
    `ClassBalanced`, so items are drawn as evenly; the classes left towards the end of an epoch lie further apart.
    Before the first refresh classes are random: the batches of `ClassBalanced`. Refresh all ranks with the same rows.

    A batch costs one product of the (C, D) class means with a vector; the state holds the means as (C, D) int16.
    """

    def refresh(self, embeddings: Embeddings) -> None:
        """embeddings (N, D), one row per item as in `labels`; rows of unknown items are not read."""
        stored = arguments.class_rows("embeddings", embeddings, self._size, "item")
        sums = torch.zeros(len(self.class_ids), stored.shape[1], dtype=torch.float64)
        items, class_of = torch.from_numpy(self._groups.items), torch.from_numpy(self._groups.class_of)
        for start in range(0, len(items), _ROWS):
            rows = items[start : start + _ROWS].to(stored.device)
            sums.index_add_(0, class_of[start : start + _ROWS], stored[rows].to("cpu", torch.float64))
        self._keep("embeddings", sums, "classes")

    def _pick(self, left: Ints, due: Ints, position: int) -> Ints:
        assert self._unit is not None
        seed = self._turns_drawn(1, left, position)[0]
        distance = -(self._unit @ self._unit[seed])  # (C,)
        distance[left == 0] = np.inf
        distance[due] = distance[seed] = -np.inf
        return closest(distance, self.classes)


class PairPerClass(MinedClasses):
    """Two items of each of N = `classes` different classes, with hard class mining: the N-pair batch.

    `refresh(class_embeddings)` between epochs: a batch then begins with a random class and takes, one after the other,
    the class that violates most: max over chosen i of cos(f_i, f_j), the triplet (i, i, j) furthest from satisfied.
    Candidates are the classes of `candidates` random turns among those left. Every class takes its ceil(n_c / 2) turns
    per epoch, so mining changes which items meet, never how often an item is drawn. Before the first refresh classes
    are random. Refresh all ranks with the same rows.

    labels and groups as in `ClassBalanced`; a class of one item is paired with itself, with one warning. Order: pair
    after pair.
    Sohn 2016, "Improved Deep Metric Learning with Multi-class N-pair Loss Objective" (hard negative class mining).
    """

    def __init__(
        self,
        labels: Labels,
        classes: int = 64,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        *,
        candidates: int = 1024,
        split: Split = "classes",
        batches: int | None = None,
        groups: Labels | None = None,
    ) -> None:
        checks.integer("candidates", candidates, classes)
        super().__init__(labels, classes, 2, seed, rank, world_size, split=split, batches=batches, groups=groups)
        self.candidates = candidates
        self._add_to_fingerprint(candidates)

    def refresh(self, class_embeddings: Embeddings) -> None:
        """class_embeddings (C, D), one row per class in the order of `class_ids`: one of its items, or a mean."""
        rows = arguments.class_rows("class_embeddings", class_embeddings, len(self.class_ids), "class")
        self._keep("class_embeddings", rows, "classes")

    def _pick(self, left: Ints, due: Ints, position: int) -> Ints:
        assert self._unit is not None
        drawn = self._turns_drawn(self.candidates, left, position)
        open_classes = np.union1d(due, drawn)
        if open_classes.size < self.classes:
            open_classes = np.flatnonzero(left)
        first = np.union1d(due, drawn[:1])
        rows = self._unit[open_classes]  # (M, D)
        nearest = (rows @ self._unit[first].T).max(1)  # (M,) similarity to the nearest chosen class
        chosen = np.isin(open_classes, first)
        for _ in range(self.classes - len(first)):
            nearest[chosen] = -np.inf
            worst = int(nearest.argmax())
            chosen[worst] = True
            np.maximum(nearest, rows @ rows[worst], out=nearest)
        return open_classes[chosen]
