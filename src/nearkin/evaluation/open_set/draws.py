"""Which classes are enrolled and which are unknown: seeded halves of the test classes."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from nearkin.core import random
from nearkin.evaluation.arrays import Counts

__all__ = ["FEWEST", "Draw", "check_classes", "draw", "enrollable"]

FEWEST = 4  # classes: two enrolled ones, so that rank 1 means something, and two unknown ones


class Draw(NamedTuple):
    """One half: enrolled (L, m) rows, one line per label; probes (P,) rows; mate (P,): their line, -1 where unknown."""

    enrolled: Counts
    probes: Counts
    mate: Counts


def enrollable(classes: Counts, bursts: Counts, examples: int) -> Counts:
    """The classes that have an item left to search for when `examples` items of different bursts are enrolled."""
    pairs = np.unique(np.stack([classes, bursts]), axis=1)
    return np.flatnonzero(np.bincount(pairs[0], minlength=int(classes.max()) + 1) > examples).astype(np.int64)


def check_classes(classes: Counts, bursts: Counts, examples: Sequence[int]) -> tuple[list[int], list[str]]:
    """The numbers of examples that can be measured, and a sentence for each that cannot; ValueError where none can."""
    number, possible, notes = int(classes.max()) + 1, [], []
    if number < FEWEST:
        raise ValueError(
            f"open-set identification needs at least {FEWEST} classes, half of them enrolled, got {number}"
        )
    for m in examples:
        able = len(enrollable(classes, bursts, m))
        if able >= FEWEST:
            possible.append(m)
            if able < number:
                notes.append(
                    f"{_examples(m)}: {able:,} of {number:,} classes have an item beside them and can be enrolled; "
                    "the others are searched for as unknown only"
                )
        else:
            notes.append(f"{_examples(m)}: not measured, {able} classes have an item beside them, {FEWEST} are needed")
    if not possible:
        sizes = np.bincount(classes)
        raise ValueError(
            f"open-set identification needs at least {FEWEST} classes with more than {_examples(min(examples))} "
            f"(one is enrolled, another searched for), got {len(enrollable(classes, bursts, min(examples)))} of "
            f"{number} classes; the largest has {_items(int(sizes.max()))}"
        )
    return possible, notes


def draw(classes: Counts, bursts: Counts, examples: int, repeat: int, seed: int) -> Draw:
    """Half of the enrollable classes, `examples` items each; all items of the others are searches without a mate.

    classes (N,): from 0. bursts (N,): items of one class and burst are not compared, so enrolled items are of different
    bursts, and a mated search is of another one. A function of its arguments alone: the order of classes and of items
    is the same for all numbers of examples.
    """
    number = int(classes.max()) + 1
    able = enrollable(classes, bursts, examples)
    order = random.shuffled(random.words(number, seed, random.Stream.OPEN_SET_CLASSES, repeat))
    chosen = order[np.isin(order, able)][: len(able) // 2]
    line = np.full(number, -1, np.int64)
    line[chosen] = np.arange(len(chosen))
    items = random.shuffled(random.words(len(classes), seed, random.Stream.OPEN_SET_ITEMS, repeat))
    of_enrolled = items[line[classes[items]] >= 0]
    pair = np.unique(np.stack([classes[of_enrolled], bursts[of_enrolled]]), axis=1, return_inverse=True)[1].ravel()
    first = np.zeros(len(of_enrolled), bool)
    first[np.unique(pair, return_index=True)[1]] = True  # the first item of each burst of a class
    leaders = of_enrolled[first]
    leaders = leaders[np.argsort(line[classes[leaders]], kind="stable")]
    place = np.arange(len(leaders)) - np.searchsorted(line[classes[leaders]], line[classes[leaders]])
    enrolled = leaders[place < examples].reshape(len(chosen), examples)
    used = np.isin(pair, pair[np.isin(of_enrolled, enrolled)])
    probes = np.sort(np.concatenate([of_enrolled[~used], items[line[classes[items]] < 0]]))
    return Draw(enrolled, probes, line[classes[probes]])


def _examples(number: int) -> str:
    return f"{number} example{'' if number == 1 else 's'}"


def _items(number: int) -> str:
    return f"{number} item{'' if number == 1 else 's'}"
