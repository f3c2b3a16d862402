"""Batches by class: a number of classes, and a number of items of each."""

import zlib

import numpy as np
from numpy.typing import NDArray

from nearkin.core import checks
from nearkin.core.random import Ints, Stream, shuffled, words
from nearkin.samplers import arguments
from nearkin.samplers.arguments import Labels, Split
from nearkin.samplers.base import EpochSampler
from nearkin.samplers.schedule import Groups, PickedBatches, RandomBatches, SpreadItems, fill_turns, turns_needed


class ClassSampler(EpochSampler):
    """Batches of `classes` different classes and `batch_size` items; a subclass decides how many of each."""

    def __init__(
        self,
        labels: Labels,
        classes: int,
        batch_size: int,
        seed: int,
        rank: int,
        world_size: int,
        split: Split,
        batches: int | None,
        names: tuple[str, str] = ("classes", "classes * per_class"),
        groups: Labels | None = None,
    ) -> None:
        known = arguments.labels(labels)
        of = None if groups is None else arguments.groups(groups, len(known))
        self._groups = Groups(known) if of is None else SpreadItems(known, of, batch_size // classes)
        checks.no_more(names[0], classes, len(self._groups.ids), "the number of classes with items")
        shared = {"classes": (names[0], classes), "items": (names[1], batch_size)}
        arguments.ranks(rank, world_size, split, shared)
        self.classes, self.batch_size, self._size = classes, batch_size, len(known)
        self._turns, pass_batches = turns_needed(self._groups.counts, classes, batch_size)
        super().__init__(known, pass_batches, batches, seed, rank, world_size, split)
        self._add_to_fingerprint(classes, batch_size)
        if of is not None:
            self._add_to_fingerprint("groups", zlib.crc32(of.astype("<i8").tobytes()))
        self._pass = -1  # the pass that is planned

    @property
    def class_ids(self) -> Ints:
        """The labels drawn from, ascending: row c of anything per class belongs to class_ids[c]."""
        return self._groups.ids

    def _global_batch(self, pass_index: int, position: int) -> tuple[Ints, Ints]:
        if self._pass != pass_index:
            turns = fill_turns(self._turns, self.classes, self._pass_batches, self.seed, pass_index)
            self._plan(turns, pass_index)
            if isinstance(self._groups, SpreadItems):
                self._order = self._groups.dealt(self.seed, pass_index, turns)
            else:
                self._order = self._groups.shuffled(self.seed, pass_index)
            self._pass = pass_index
        order = shuffled(words(self.classes, self.seed, Stream.ORDER, pass_index, position))
        classes, offsets, sizes = (part[order] for part in self._column(position))
        return self._order.take(classes, offsets, sizes), sizes

    def _plan(self, turns: Ints, pass_index: int) -> None:
        """Prepares `_column` for pass `pass_index`."""
        raise NotImplementedError

    def _column(self, position: int) -> tuple[Ints, Ints, Ints]:
        """Classes, where in the order of each to begin, and how many items to take."""
        raise NotImplementedError


class ClassBalanced(ClassSampler):
    """P = `classes` different classes and K = `per_class` items of each: the P × K batch.

    An epoch is the shortest in which every item is drawn: class c comes ceil(n_c / K) times, so large classes come
    more often and an item is drawn once, or twice where n_c is no multiple of K, rarely more where n_c is below it.
    Items of a batch differ, except in classes smaller than K: they are repeated, with one warning. A class
    with more than 1/P of all turns is in every batch and sets the length of the epoch; the others then come more often,
    evenly.

    labels: integers, one per item; -1 is unknown and never drawn. Order: class after class.
    groups: of the items (camera, burst, writer), -1 for an item that shares its group with none. The K items of a class
    are then of different groups as far as its items allow, so that positives are not near-copies; where a class comes
    more often than its items need, those of small groups are drawn again first. A class of one group contributes items
    of that group, with one warning.
    Hermans, Beyer, Leibe 2017, arXiv:1703.07737, section 2; P = 32, K = 4 from the authors' code.
    """

    def __init__(
        self,
        labels: Labels,
        classes: int = 32,
        per_class: int = 4,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        *,
        split: Split = "classes",
        batches: int | None = None,
        groups: Labels | None = None,
    ) -> None:
        checks.integer("classes", classes, 1)
        checks.integer("per_class", per_class, 1)
        super().__init__(labels, classes, classes * per_class, seed, rank, world_size, split, batches, groups=groups)
        self.per_class = per_class
        counts = self._groups.counts
        small = int((counts < per_class).sum())
        words = f"fewer than {per_class} items; their items are repeated in a batch"
        arguments.warn(small, len(counts), words, rank)
        if isinstance(self._groups, SpreadItems):
            words = "items of one group only; their positives are of the same group"
            arguments.warn(self._groups.single(), len(counts), words, rank)

    def _plan(self, turns: Ints, pass_index: int) -> None:
        self._schedule: RandomBatches | PickedBatches = RandomBatches(
            turns, self.classes, self._pass_batches, self.seed, pass_index
        )

    def _column(self, position: int) -> tuple[Ints, Ints, Ints]:
        classes, turn = self._schedule.column(position)
        return classes, turn * self.per_class, np.full_like(turn, self.per_class)


class ClassRatio(ClassSampler):
    """`batch_size` items of C = `ratio` × `batch_size` different classes (rounded, at least 1), filled at random.

    Each class contributes one item; the rest are drawn at random from the same C classes, so exactly C classes are in a
    batch and their sizes vary. Over an epoch a class comes as often as its items need and brings, in its last turn,
    those not drawn yet, as far as the batch has room: about 1 item in 100 may miss an epoch. One item of a class is
    drawn at most once more than another. Items of a batch differ unless its classes have fewer than `batch_size` items
    together. ratio 0.25 suits classes of many items, 0.75 of few.

    labels and the length of an epoch as in `ClassBalanced`. With `split="classes"` ranks hold as many classes each, but
    not always as many items.
    Song et al. 2017, arXiv:1612.01213: m = 128, C/m in {0.25, 0.5, 0.75}.
    """

    def __init__(
        self,
        labels: Labels,
        batch_size: int = 128,
        ratio: float = 0.25,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        *,
        split: Split = "classes",
        batches: int | None = None,
    ) -> None:
        checks.integer("batch_size", batch_size, 1)
        checks.positive("ratio", ratio)
        checks.at_most("ratio", ratio, 1, "it is a share of batch_size")
        classes = max(1, int(ratio * batch_size + 0.5))
        names = ("ratio * batch_size", "batch_size")
        super().__init__(labels, classes, batch_size, seed, rank, world_size, split, batches, names)
        self.ratio = ratio

    def _plan(self, turns: Ints, pass_index: int) -> None:
        self._grid = RandomBatches(turns, self.classes, self._pass_batches, self.seed, pass_index)
        self._left, self._taken = turns.copy(), np.zeros_like(turns)
        self._owed = -(-self._groups.counts * turns // self._turns)
        self._columns: list[tuple[Ints, Ints, Ints]] = []

    def _column(self, position: int) -> tuple[Ints, Ints, Ints]:
        for following in range(len(self._columns), position + 1):
            classes, _ = self._grid.column(following)
            share = np.maximum(-(-self._owed[classes] // self._left[classes]), 1)
            sizes = self._fill(share, self._left[classes] == 1, self._groups.counts[classes], following)
            self._columns.append((classes, self._taken[classes], sizes))
            self._taken[classes] += sizes
            self._owed[classes] = np.maximum(self._owed[classes] - sizes, 0)
            self._left[classes] -= 1
        return self._columns[position]

    def _fill(self, share: Ints, last: NDArray[np.bool_], counts: Ints, position: int) -> Ints:
        """Random sizes (C,) of one batch around each class's share, `batch_size` in all.

        From level to level classes may contribute more: one item; what is owed in a last turn; up to twice the share;
        all items; items again. The first level that reaches the batch size is filled at random.
        """
        most = np.minimum(counts, self.batch_size)
        due, upper = np.where(last, share, 1), np.where(last, share, 2 * share - 1)
        low = np.ones_like(share)
        for high in (np.minimum(due, most), np.minimum(upper, most), most, np.full_like(share, self.batch_size)):
            if high.sum() >= self.batch_size:
                break
            low = high
        slots = np.repeat(np.arange(len(share)), high - low)
        order = shuffled(words(len(slots), self.seed, Stream.SIZES, self._pass, position))
        drawn = order[: self.batch_size - low.sum()]
        return low + np.bincount(slots[drawn], minlength=len(share))
