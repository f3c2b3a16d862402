"""The schedule of a pass: how many turns each class takes, and in which batches.

A pass has `batches` batches of `classes` different classes. A class takes as many turns as its items need, so every
item is drawn at least once; turns that are left over go to further complete rounds of some classes.
"""

from bisect import bisect_right
from collections.abc import Callable

import numpy as np

from nearkin.core.random import Ints, Stream, shuffled, words

__all__ = ["Groups", "PickedBatches", "RandomBatches", "SpreadItems", "fill_turns", "turns_needed"]


class Groups:
    """Items by class, one array for all: those of class c are items[starts[c] : starts[c] + counts[c]]."""

    def __init__(self, labels: Ints) -> None:
        known = np.flatnonzero(labels >= 0)
        self.ids, inverse, self.counts = np.unique(labels[known], return_inverse=True, return_counts=True)
        order = np.argsort(inverse, kind="stable")
        self.items: Ints = known[order]
        self.class_of: Ints = inverse[order]
        self.starts = np.cumsum(self.counts) - self.counts

    def shuffled(self, seed: int, pass_index: int) -> Ints:
        """`items` with every class in its own random order for this pass."""
        order: Ints = np.lexsort((words(len(self.items), seed, Stream.ITEMS, pass_index), self.class_of))
        return self.items[order]

    def take(self, order: Ints, classes: Ints, offsets: Ints, sizes: Ints) -> Ints:
        """The next `sizes` items of each class from `offsets` on, in cyclic order."""
        within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        place = (np.repeat(offsets, sizes) + within) % np.repeat(self.counts[classes], sizes)
        taken: Ints = order[np.repeat(self.starts[classes], sizes) + place]
        return taken


class SpreadItems(Groups):
    """Items by class whose turns, of `per_class` items each, have as many different groups (N,) as possible.

    The items of a class, group after group, are dealt out over its turns: a group of fewer items than turns is in none
    of them twice. The last turn is filled up with items of groups that it does not have, then with any.
    """

    def __init__(self, labels: Ints, groups: Ints, per_class: int) -> None:
        super().__init__(labels)
        self.of, self.per_class = np.where(groups < 0, groups.max() + 1 + np.arange(len(groups)), groups), per_class
        self._turns = -(-self.counts // per_class)
        self._starts = (np.cumsum(self._turns) - self._turns) * per_class

    def single(self) -> int:
        """How many classes have more than one item, and all of one group."""
        pairs = np.unique(np.stack([self.class_of, self.of[self.items]]), axis=1)
        return int(((np.bincount(pairs[0]) == 1) & (self.counts > 1)).sum())

    def shuffled(self, seed: int, pass_index: int) -> Ints:
        """The items turn after turn, each class filled up to whole turns; random for this pass."""
        order, starts, size = super().shuffled(seed, pass_index), self.starts, self.per_class
        dealt: Ints = np.empty(int(self._turns.sum()) * size, np.int64)
        for c, (count, turns) in enumerate(zip(self.counts.tolist(), self._turns.tolist(), strict=True)):
            items = order[starts[c] : starts[c] + count]
            _, first, group = np.unique(self.of[items], return_index=True, return_inverse=True)
            items = items[np.argsort(first[group], kind="stable")]  # group after group, in random order
            last = count - (turns - 1) * size  # items of the last turn before it is filled up
            place = np.arange(count)
            late = place - last * turns
            early = late < 0
            turn = np.where(early, place % turns, late % max(turns - 1, 1))
            slot = np.where(early, place // turns, last + late // max(turns - 1, 1))
            part = dealt[self._starts[c] : self._starts[c] + turns * size]
            part[turn * size + slot] = items
            if last < size:
                part[len(part) - size + last :] = self._others(part[len(part) - size :][:last], items, size - last)
        return dealt

    def _others(self, turn: Ints, items: Ints, missing: int) -> list[int]:
        """So many items to fill up a turn with: of groups that it lacks, then any, then again."""
        chosen, used = turn.tolist(), {int(self.of[i]) for i in turn}
        for new_groups in (True, False):
            for i in items.tolist():
                if len(chosen) < len(turn) + missing and i not in chosen and (not new_groups or self.of[i] not in used):
                    chosen.append(i)
                    used.add(int(self.of[i]))
        return [chosen[at % len(chosen)] for at in range(len(turn), len(turn) + missing)]

    def take(self, order: Ints, classes: Ints, offsets: Ints, sizes: Ints) -> Ints:
        within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        place = (np.repeat(offsets, sizes) + within) % np.repeat(self._turns[classes] * self.per_class, sizes)
        taken: Ints = order[np.repeat(self._starts[classes], sizes) + place]
        return taken


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
