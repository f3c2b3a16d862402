"""The schedule of a pass: how many turns each class takes, and in which batches.

A pass has `batches` batches of `classes` different classes. A class takes as many turns as its items need, so every
item is drawn at least once; turns that are left over go to further complete rounds of some classes.
"""

from bisect import bisect_right
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from nearkin.core.random import Ints, Stream, shuffled, words


class Order(NamedTuple):
    """The items of a pass, class after class: those of class c are items[starts[c] : starts[c] + counts[c]]."""

    items: Ints
    starts: Ints
    counts: Ints

    def take(self, classes: Ints, offsets: Ints, sizes: Ints) -> Ints:
        """The next `sizes` items of each class from `offsets` on, in cyclic order."""
        place = (np.repeat(offsets, sizes) + counted(sizes)) % np.repeat(self.counts[classes], sizes)
        taken: Ints = self.items[np.repeat(self.starts[classes], sizes) + place]
        return taken


def counted(sizes: Ints) -> Ints:
    """0 … size - 1 of each size, one after the other."""
    return np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)


class Groups:
    """Items by class, one array for all: those of class c are items[starts[c] : starts[c] + counts[c]]."""

    def __init__(self, labels: Ints) -> None:
        known = np.flatnonzero(labels >= 0)
        self.ids, inverse, self.counts = np.unique(labels[known], return_inverse=True, return_counts=True)
        order = np.argsort(inverse, kind="stable")
        self.items: Ints = known[order]
        self.class_of: Ints = inverse[order]
        self.starts = np.cumsum(self.counts) - self.counts

    def shuffled(self, seed: int, pass_index: int) -> Order:
        """`items` with every class in its own random order for this pass."""
        order = np.lexsort((words(len(self.items), seed, Stream.ITEMS, pass_index), self.class_of))
        return Order(self.items[order], self.starts, self.counts)


class SpreadItems(Groups):
    """Items by class whose turns, of `per_class` items each, have as many different groups (N,) as possible.

    The items of a class, group after group, are dealt out over its turns like cards: a group that is drawn no more
    often than there are turns is in none of them twice. Draws beyond one per item go to groups that are not in every
    turn yet, then to any.
    """

    def __init__(self, labels: Ints, groups: Ints, per_class: int) -> None:
        super().__init__(labels)
        self.of, self.per_class = np.where(groups < 0, groups.max() + 1 + np.arange(len(groups)), groups), per_class

    def single(self) -> int:
        """How many classes have more than one item, and all of one group."""
        pairs = np.unique(np.stack([self.class_of, self.of[self.items]]), axis=1)
        return int(((np.bincount(pairs[0]) == 1) & (self.counts > 1)).sum())

    def dealt(self, seed: int, pass_index: int, turns: Ints) -> Order:
        """The items turn after turn, for the turns (C,) of each class in this pass; random for the pass."""
        items, starts, counts = self.shuffled(seed, pass_index)
        dealt, ends = np.empty(int(turns.sum()) * self.per_class, np.int64), np.cumsum(turns) * self.per_class
        for c, number in enumerate(turns.tolist()):
            some, size = items[starts[c] : starts[c] + counts[c]], number * self.per_class
            _, first, group = np.unique(self.of[some], return_index=True, return_inverse=True)
            order = np.argsort(first[group], kind="stable")  # group after group, in random order
            if size > len(some):
                order = np.repeat(order, _draws(np.bincount(group)[np.argsort(first)], number, size))
            dealt[ends[c] - size : ends[c]] = some[order].reshape(self.per_class, number).T.ravel()
        return Order(dealt, ends - turns * self.per_class, turns * self.per_class)


def _draws(sizes: Ints, turns: int, total: int) -> Ints:
    """Returns how often to draw each item, group after group of these sizes: at least once, `total` times in all.

    No group is drawn more often than once a turn while another has room; within that as evenly as possible.
    """
    most = np.maximum(sizes, turns)
    drawn = most
    if most.sum() > total:
        rounds = bisect_right(range(1, turns + 1), total, key=lambda r: int(np.minimum(sizes * r, most).sum()))
        drawn = np.minimum(sizes * rounds, most)
        room = np.minimum(sizes * (rounds + 1), most) - drawn
        drawn = drawn + np.clip(total - drawn.sum() - (np.cumsum(room) - room), 0, room)
    draws: Ints = np.repeat(drawn // sizes, sizes) + (counted(sizes) < np.repeat(drawn % sizes, sizes))
    if draws.sum() < total:
        level = bisect_right(range(1, total + 1), total, key=lambda r: int(np.maximum(draws, r).sum()))
        draws = np.maximum(draws, level)
        draws[np.flatnonzero(draws == level)[: total - int(draws.sum())]] += 1
    return draws


def turns_needed(counts: Ints, classes: int, batch_size: int) -> tuple[Ints, int]:
    """Turns (C,) that reach every item, and the batches of a pass.

    A class is in a batch once: a class with more than its share of the turns sets the length of the pass.
    """
    turns = -(-counts * classes // batch_size)
    return turns, int(max(-(-turns.sum() // classes), turns.max()))


def fill_turns(turns: Ints, classes: int, batches: int, seed: int, pass_index: int) -> Ints:
    """The turns (C,) of pass `pass_index`: `classes` × `batches` in all, none above `batches`.

    All classes get as many complete rounds of their least turns as fit, and an even share of the next round.
    """
    total = classes * batches
    rounds = bisect_right(range(1, batches + 1), total, key=lambda r: int(np.minimum(turns * r, batches).sum()))
    full = np.minimum(turns * rounds, batches)
    room = np.minimum(turns * (rounds + 1), batches) - full
    order = shuffled(words(len(turns), seed, Stream.CLASSES, pass_index))
    room_so_far = np.cumsum(room[order])
    share_so_far = room_so_far * (total - full.sum()) // max(int(room_so_far[-1]), 1)
    full[order] += np.diff(share_so_far, prepend=0)
    return full


class RandomBatches:
    """Random batches: column b of `at` (classes, batches) has the classes of batch b.

    The turns of a class lie side by side, row after row, and each row is shuffled over the batches. A class that
    continues in the next row takes batches there that do not have it yet.
    """

    def __init__(self, turns: Ints, classes: int, batches: int, seed: int, pass_index: int) -> None:
        order = shuffled(words(len(turns), seed, Stream.CLASSES, pass_index, 1))
        flat = np.repeat(order.astype(np.int32), turns[order]).reshape(classes, batches)
        begins = np.empty_like(turns)
        begins[order] = np.cumsum(turns[order]) - turns[order]
        self.at, self._turn = np.empty_like(flat), np.empty_like(flat)
        for row, row_classes in enumerate(flat):
            columns = shuffled(words(batches, seed, Stream.COLUMNS, pass_index, row))
            if row and row_classes[0] == flat[row - 1, -1]:
                free = columns[self.at[row - 1, columns] != row_classes[0]]
                first = free[: np.count_nonzero(row_classes == row_classes[0])]
                columns = np.concatenate([first, columns[~np.isin(columns, first)]])
            self.at[row, columns] = row_classes
            self._turn[row, columns] = np.arange(row * batches, (row + 1) * batches) - begins[row_classes]

    def column(self, position: int) -> tuple[Ints, Ints]:
        """The classes of a batch, and which of its turns each of them takes."""
        return self.at[:, position].astype(np.int64), self._turn[:, position].astype(np.int64)


class PickedBatches:
    """Batches chosen one after the other by `pick(left, due, position)`, as far as they are needed.

    `left` (C,) are the turns still to take, `due` the classes that must be in every remaining batch to take them all.
    So every class gets its turns, whatever is picked.
    """

    def __init__(self, turns: Ints, batches: int, pick: Callable[[Ints, Ints, int], Ints]) -> None:
        self._turns, self._left, self._batches, self._pick = turns, turns.copy(), batches, pick
        self._columns: list[tuple[Ints, Ints]] = []

    def column(self, position: int) -> tuple[Ints, Ints]:
        while len(self._columns) <= position:
            due = np.flatnonzero(self._left == self._batches - len(self._columns))
            classes = self._pick(self._left, due, len(self._columns))
            self._columns.append((classes, self._turns[classes] - self._left[classes]))
            self._left[classes] -= 1
        return self._columns[position]
