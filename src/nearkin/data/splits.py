"""Train, validation and test: split by classes, so that test classes are unseen; by items on request."""

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearkin.core import checks
from nearkin.data.file_tree import by_bytes, printable
from nearkin.data.item_set import Items

__all__ = ["Parts", "divide", "leave_out", "source_split"]

Ints = NDArray[np.int64]
LEAST = 2  # classes in a part, and items of a class in it: fewer cannot be ranked


class Parts(NamedTuple):
    """Positions of the items of each part, ascending; `gallery` if test items are searched in another set.

    official: of "val" and "test", the parts that the source itself has defined.
    """

    train: Ints
    val: Ints
    test: Ints
    gallery: Ints | None = None
    note: str = ""
    official: tuple[str, ...] = ()

    def among(self, places: Ints) -> "Parts":
        """The same parts in a larger set, in which these items are at `places`, ascending."""
        gallery = None if self.gallery is None else places[self.gallery]
        return self._replace(train=places[self.train], val=places[self.val], test=places[self.test], gallery=gallery)


def divide(
    items: Items,
    *,
    seed: int = 0,
    closed: bool = False,
    val: float = 0.2,
    test: float = 0.25,
    skip_single: bool = False,
    official: bool = True,
) -> Parts:
    """Parts that share no class, the official ones if there are any; `val` is a share of what is not test.

    Classes are ordered by a hash of (seed, name): one class more or less moves few others. closed=True divides the
    items of every class instead, and so does an official split whose parts share classes; items without classes are
    divided one by one. skip_single drops classes with a single item, in total or in their part. official=False ignores
    the source's split.
    """
    checks.integer("seed", seed, 0)
    checks.between("val", val, 0, 1)
    checks.between("test", test, 0, 1)
    if len(items) == 0:
        raise ValueError(f"{items.name}: it has no items")
    if items.labels is None and items.targets is None:
        raise ValueError(f"{items.name}: it has neither classes nor targets, so there is nothing to learn")
    usable = np.arange(len(items), dtype=np.int64)
    if items.labels is not None:
        _require_two_classes(items)
        usable = _without_singles(items, usable, skip_single)
        _require_two_classes(items.take(usable))
    column = source_split(items, closed) if official else None
    if column is not None:
        return _official(items, usable, column, seed, val, skip_single)
    if items.labels is None:
        rest, tested = _hold_out_items(items, usable, seed, test, then=LEAST)
        train, validation = _hold_out_items(items, rest, seed, val)
        return _parts(items, train, validation, tested, None, f"seeded, item by item (seed {seed})")
    if closed:
        return _closed(items, usable, seed, val, test)
    rest, tested = _hold_out_classes(items, usable, seed, test, then=LEAST)
    train, validation = _hold_out_classes(items, rest, seed, val)
    return _parts(items, train, validation, tested, None, f"seeded, no class in two parts (seed {seed})")


def leave_out(items: Items, parts: Parts, indices: Ints) -> Parts:
    """The parts without the items at `indices`; one that is then alone in its class in its part goes too.

    Nothing moves from one part to another. A test item with a gallery needs no other item of its class beside it.
    """
    remaining: dict[str, Ints] = {}
    for part in ("train", "val", "test", "gallery"):
        places = getattr(parts, part)
        if places is None:
            continue
        kept = places[~np.isin(places, indices)]
        searched = part == "gallery" or (part == "test" and parts.gallery is not None)
        if items.labels is not None and len(kept) < len(places) and not searched:
            sizes = np.bincount(items.labels[kept], minlength=len(items.classes))
            kept = kept[sizes[items.labels[kept]] > 1]
        least = len(kept) if items.labels is None else len(np.unique(items.labels[kept]))
        if len(places) and least < LEAST:
            what = "items" if items.labels is None else "classes of 2 or more items"
            raise ValueError(
                f"{items.name}: without the {len(indices):,} items that are left out, the {part} part has {least} "
                f"{what}, and needs at least {LEAST}"
            )
        remaining[part] = kept
    whose = parts.note.partition(":")[0]
    train, validation, tested = (remaining[part] for part in ("train", "val", "test"))
    changed = _parts(items, train, validation, tested, remaining.get("gallery"), whose)
    return changed._replace(official=parts.official)


def source_split(items: Items, closed: bool) -> list[str] | None:
    """The source's split that fits `closed`, if there is one with more than a training part."""
    for column in (items.closed_split, items.split) if closed else (items.split,):
        if column is not None and set(column) != {"train"} and not (closed and not _shares_classes(items, column)):
            return column
    return None


def _shares_classes(items: Items, column: list[str]) -> bool:
    """Whether validation or test parts have training classes; True for items without classes."""
    if items.labels is None:
        return True
    marks = np.array(column)
    return bool(np.isin(items.labels[marks != "train"], items.labels[marks == "train"]).any())


def _official(items: Items, usable: Ints, column: list[str], seed: int, share: float, skip_single: bool) -> Parts:
    marks = np.array(column)
    of = {mark: usable[marks[usable] == mark] for mark in ("train", "val", "test", "query", "gallery")}
    tested = np.sort(np.concatenate([of["test"], of["query"]]))
    gallery = of["gallery"] if len(of["gallery"]) else None
    train, validation = of["train"], of["val"]
    whose, official = "official split", ("val", "test") if len(of["val"]) and len(tested) else ("test",)
    if not len(tested) and len(validation):  # two parts: the one held out is the test
        validation, tested, whose = tested, validation, "official split, its val part as the test"
    for part, places in (("train", train), ("test", tested)):
        if not len(places):
            raise ValueError(
                f"{items.name}: its split has no {part} items; its parts are {', '.join(sorted(set(column)))}"
            )
    if len(of["query"]) and gallery is None:
        raise ValueError(f"{items.name}: its split has query items and no gallery to search")
    if items.labels is not None:
        train = _without_singles(items, train, skip_single, " in training")
        validation = _without_singles(items, validation, skip_single, " in validation")
        tested = tested if gallery is not None else _without_singles(items, tested, skip_single, " in the test part")
    if not len(validation):
        if items.labels is None:
            train, validation = _hold_out_items(items, train, seed, share)
        elif np.isin(items.labels[tested], items.labels[train]).any():
            train, validation = _hold_out_of_each_class(items, train, seed, share)
            whose += f", train and test share classes; validation items out of training (seed {seed})"
        else:
            train, validation = _hold_out_classes(items, train, seed, share)
            whose += f"; validation classes out of training (seed {seed})"
    for part, places in (("training", train), ("validation", validation), ("test", tested)):
        if items.labels is not None and len(kinds := np.unique(items.labels[places])) < LEAST:
            raise ValueError(f"{items.name}: the {part} part of its split needs at least 2 classes, got {len(kinds)}")
    return _parts(items, train, validation, tested, gallery, whose)._replace(official=official)


def _closed(items: Items, usable: Ints, seed: int, val: float, test: float) -> Parts:
    rest, tested = _hold_out_of_each_class(items, usable, seed, test, then=LEAST)
    train, validation = _hold_out_of_each_class(items, rest, seed, val, only=np.unique(_labels(items)[tested]))
    return _parts(items, train, validation, tested, None, f"seeded, every class in every part (seed {seed})")


def _hold_out_classes(items: Items, of: Ints, seed: int, share: float, then: int = 0) -> tuple[Ints, Ints]:
    """Holds out whole classes: (rest, held out); `then` more classes must remain for a later part."""
    labels = _labels(items)[of]
    kinds = np.unique(labels)
    order = sorted(kinds.tolist(), key=lambda c: _hash(seed, items.classes[c]))
    needed = 2 * LEAST + then
    if len(order) < needed:
        parts = "training, validation and test" if then else "training and validation"
        raise ValueError(
            f"{items.name}: {parts} need at least {needed} classes to share out, got {len(order)}. "
            "Use --closed to divide the images of every class instead"
        )
    count = min(max(LEAST, round(share * len(order))), len(order) - LEAST - then)
    chosen = np.isin(labels, order[:count])
    return of[~chosen], of[chosen]


def _hold_out_of_each_class(
    items: Items, of: Ints, seed: int, share: float, then: int = 0, only: Ints | None = None
) -> tuple[Ints, Ints]:
    """Holds out some items of every class: (rest, held out); a class too small for that stays in the rest."""
    labels = _labels(items)[of]
    chosen: list[int] = []
    kinds = 0
    for kind, members in _members(labels):
        if len(members) < 2 * LEAST + then or (only is not None and kind not in only):
            continue
        count = min(max(LEAST, round(share * len(members))), len(members) - LEAST - then)
        order = sorted(of[members].tolist(), key=lambda i: _hash(seed, items.names[i]))
        chosen += order[:count]
        kinds += 1
    if kinds < LEAST:
        raise ValueError(
            f"{items.name}: dividing the items of every class needs at least {LEAST} classes "
            f"of {2 * LEAST + then} items or more, got {kinds}"
        )
    apart = np.isin(of, chosen)
    return of[~apart], of[apart]


def _hold_out_items(items: Items, of: Ints, seed: int, share: float, then: int = 0) -> tuple[Ints, Ints]:
    """Holds out single items: (rest, held out)."""
    if len(of) < 2 * LEAST + then:
        raise ValueError(f"{items.name}: it needs at least {2 * LEAST + then} items to be divided, got {len(of)}")
    order = sorted(of.tolist(), key=lambda i: _hash(seed, items.names[i]))
    chosen = np.isin(of, order[: min(max(LEAST, round(share * len(of))), len(of) - LEAST - then)])
    return of[~chosen], of[chosen]


def _members(labels: Ints) -> Iterable[tuple[int, Ints]]:
    """Each class with the positions of its items."""
    order = np.argsort(labels, kind="stable")
    kinds, starts = np.unique(labels[order], return_index=True)
    return zip(kinds.tolist(), np.split(order, starts[1:]), strict=True)


def _require_two_classes(items: Items) -> None:
    kinds = np.unique(_labels(items))
    if len(kinds) < 2:
        only = f"one class ({items.classes[kinds[0]]})" if len(kinds) else "no class"
        raise ValueError(f"{items.name}: it has {only} that can be used; at least 2 classes are needed to tell apart")


def _without_singles(items: Items, of: Ints, skip: bool, where: str = "") -> Ints:
    """Drops classes with a single item, or raises an error that names them."""
    labels = _labels(items)[of]
    sizes = np.bincount(labels, minlength=len(items.classes))
    single = np.flatnonzero(sizes == 1)
    if not len(single):
        return of
    what = "item" if items.pictures is None else "image"
    if not (sizes > 1).any():
        raise ValueError(
            f"{items.name}: each of its {len(single)} classes has a single {what}{where}; each needs at least 2"
        )
    if skip:
        return of[sizes[labels] > 1]
    names = ", ".join(items.classes[c] for c in single[:3]) + (", …" if len(single) > 3 else "")
    have = "1 class has" if len(single) == 1 else f"{len(single)} classes have"
    raise ValueError(
        f"{items.name}: {have} a single {what}{where} ({names}); training needs at least 2 per class. "
        f"Use --skip-single to leave {'it' if len(single) == 1 else 'them'} out"
    )


def _parts(items: Items, train: Ints, validation: Ints, tested: Ints, gallery: Ints | None, whose: str) -> Parts:
    sizes = {"train": train, "val": validation, "test": tested} | ({} if gallery is None else {"gallery": gallery})
    if items.labels is None:
        counts = ", ".join(f"{name} {len(of):,} items" for name, of in sizes.items())
    else:
        kinds = {name: len(np.unique(items.labels[of])) for name, of in sizes.items()}
        counts = ", ".join(f"{name} {len(of):,} items of {kinds[name]:,} classes" for name, of in sizes.items())
    return Parts(np.sort(train), np.sort(validation), np.sort(tested), gallery, f"{whose}: {counts}")


def _labels(items: Items) -> Ints:
    assert items.labels is not None
    return items.labels


def _hash(seed: int, name: str) -> bytes:
    return hashlib.sha256(f"{seed} ".encode() + by_bytes(printable(name))).digest()
