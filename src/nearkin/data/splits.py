"""Train, validation and test: split by classes, so that test classes are unseen; by items on request.

Where items have groups (bursts, cameras, writers), a group is in one part: see `divide`.
"""

import hashlib
from collections.abc import Iterable
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearkin.core import checks
from nearkin.data import groups
from nearkin.data.file_tree import by_bytes, printable
from nearkin.data.item_set import Items

__all__ = ["FEW", "LEAST", "Parts", "class_units", "closed_by_default", "divide", "leave_out", "shares_classes"]
__all__ += ["source_split", "units"]

Ints = NDArray[np.int64]
LEAST = 2  # classes in a part, and items of a class in it: fewer cannot be ranked
FEW = 20  # classes; of fewer, those held out are too few to measure on and those left too few to learn from


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
    group_scope: str = "set",
) -> Parts:
    """Parts that share no class, the official ones if there are any; `val` is a share of what is not test.

    Classes are ordered by a hash of (seed, name): one class more or less moves few others. closed=True divides the
    items of every class instead, and so does an official split whose parts share classes; items without classes are
    divided one by one. skip_single drops classes with a single item, in total or in their part. official=False ignores
    the source's split.

    Items with groups: no group is in two parts. Classes that share a group stay together; where groups connect nearly
    all classes, as cameras do, there is no such split by classes, and group_scope="class" keeps a group whole within
    each class only: a class is in one part anyway. closed=True divides the groups of every class instead of its items,
    or, where a group has items of several classes, all groups at once.
    """
    checks.integer("seed", seed, 0)
    checks.one_of("group_scope", group_scope, groups.SCOPES)
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
        parts = _official(items, usable, column, seed, val, skip_single, group_scope)
    elif items.labels is None:
        rest, tested = _hold_out_items(items, usable, seed, test, then=LEAST)
        train, validation = _hold_out_items(items, rest, seed, val)
        unit = "item by item" if items.groups is None else "group by group"
        parts = _parts(items, train, validation, tested, None, f"seeded, {unit} (seed {seed})")
    elif closed:
        parts = _closed(items, usable, seed, val, test, group_scope)
    else:
        rest, tested = _hold_out_classes(items, usable, seed, test, then=LEAST, scope=group_scope)
        train, validation = _hold_out_classes(items, rest, seed, val, scope=group_scope)
        parts = _parts(items, train, validation, tested, None, f"seeded, no class in two parts (seed {seed})")
    return parts if items.groups is None else _with_groups(items, parts, group_scope)


def closed_by_default(items: Items, **options: Any) -> bool:
    """Whether items of every class are to be held out where nobody has said what: of fewer than `FEW` classes, if most
    of them have enough items (or groups) for that, and the source has no split of its own.

    options: of `divide`, all but `closed`.
    """
    if items.labels is None or (options.get("official", True) and source_split(items, False) is not None):
        return False
    sizes = np.bincount(items.labels)
    total = int((sizes > 1).sum())
    if total >= FEW:
        return False
    try:
        tested = divide(items, closed=True, **options).test
    except ValueError:  # too few items or groups in a class, or what is wrong with any division
        return False
    return 2 * len(np.unique(items.labels[tested])) > total


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
        if column is not None and set(column) != {"train"} and not (closed and not shares_classes(items, column)):
            return column
    return None


def shares_classes(items: Items, column: list[str]) -> bool:
    """Whether validation or test parts have training classes; True for items without classes."""
    if items.labels is None:
        return True
    marks = np.array(column)
    return bool(np.isin(items.labels[marks != "train"], items.labels[marks == "train"]).any())


def _official(
    items: Items, usable: Ints, column: list[str], seed: int, share: float, skip_single: bool, scope: str
) -> Parts:
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
            whole = scope == "set" and groups.spanning(items, train) is not None
            train, validation = (_hold_out_items if whole else _hold_out_of_each_class)(items, train, seed, share)
            whose += f", train and test share classes; validation items out of training (seed {seed})"
        else:
            train, validation = _hold_out_classes(items, train, seed, share, scope=scope)
            whose += f"; validation classes out of training (seed {seed})"
    for part, places in (("training", train), ("validation", validation), ("test", tested)):
        if items.labels is not None and len(kinds := np.unique(items.labels[places])) < LEAST:
            raise ValueError(f"{items.name}: the {part} part of its split needs at least 2 classes, got {len(kinds)}")
    return _parts(items, train, validation, tested, gallery, whose)._replace(official=official)


def _closed(items: Items, usable: Ints, seed: int, val: float, test: float, scope: str) -> Parts:
    if scope == "set" and groups.spanning(items, usable) is not None:  # a group is in one part with all its classes
        rest, tested = _hold_out_items(items, usable, seed, test, then=LEAST)
        train, validation = _hold_out_items(items, rest, seed, val)
        return _parts(items, train, validation, tested, None, f"seeded, group by group (seed {seed})")
    rest, tested = _hold_out_of_each_class(items, usable, seed, test, then=LEAST)
    train, validation = _hold_out_of_each_class(items, rest, seed, val, only=np.unique(_labels(items)[tested]))
    return _parts(items, train, validation, tested, None, f"seeded, every class in every part (seed {seed})")


def _hold_out_classes(
    items: Items, of: Ints, seed: int, share: float, then: int = 0, scope: str = "set"
) -> tuple[Ints, Ints]:
    """Holds out whole classes: (rest, held out); `then` more classes must remain for a later part."""
    labels = _labels(items)[of]
    blocks = groups.class_blocks(items, of, scope)
    order = sorted(((min(_hash(seed, items.classes[c]) for c in block), block) for block in blocks), key=lambda b: b[0])
    total = len(np.unique(labels))
    needed = 2 * LEAST + then
    if total < needed:
        parts = "training, validation and test" if then else "training and validation"
        raise ValueError(
            f"{items.name}: {parts} need at least {needed} classes to share out, got {total}. "
            f"Use --closed to divide the images of every class instead, {3 * LEAST} or more in each"
        )
    most = total - LEAST - then
    count = min(max(LEAST, round(share * total)), most)
    held: list[int] = []
    for _, block in order:
        if len(held) < count and len(held) + len(block) <= most:
            held += block
    if len(held) < LEAST:
        group, classes = groups.spanning(items, of) or ("", 0)
        raise ValueError(
            f'{items.name}: its groups connect its classes (group "{group}" has items of {classes} of {total}), so '
            "no division by classes keeps every group whole. data.group_scope=class keeps them whole within each class "
            "only; --closed divides groups instead of classes"
        )
    chosen = np.isin(labels, held)
    return of[~chosen], of[chosen]


def _hold_out_of_each_class(
    items: Items, of: Ints, seed: int, share: float, then: int = 0, only: Ints | None = None
) -> tuple[Ints, Ints]:
    """Holds out some items of every class: (rest, held out); a class too small for that stays in the rest.

    Whole groups of items, where there are groups.
    """
    chosen: list[int] = []
    kinds = 0
    for kind, ordered in class_units(items, of, seed):
        if len(ordered) < 2 * LEAST + then or (only is not None and kind not in only):
            continue
        count = min(max(LEAST, round(share * len(ordered))), len(ordered) - LEAST - then)
        chosen += [i for unit in ordered[:count] for i in unit]
        kinds += 1
    if kinds < LEAST:
        what = "items" if items.groups is None else "groups"
        raise ValueError(
            f"{items.name}: dividing the {what} of every class needs at least {LEAST} classes "
            f"of {2 * LEAST + then} {what} or more, got {kinds}"
        )
    apart = np.isin(of, chosen)
    return of[~apart], of[apart]


def _hold_out_items(items: Items, of: Ints, seed: int, share: float, then: int = 0) -> tuple[Ints, Ints]:
    """Holds out single items, or whole groups: (rest, held out)."""
    ordered = units(items, of, seed)
    if len(ordered) < 2 * LEAST + then:
        what = "items" if items.groups is None else "groups"
        raise ValueError(f"{items.name}: it needs at least {2 * LEAST + then} {what} to be divided, got {len(ordered)}")
    count = min(max(LEAST, round(share * len(ordered))), len(ordered) - LEAST - then)
    chosen = np.isin(of, [i for unit in ordered[:count] for i in unit])
    return of[~chosen], of[chosen]


def units(items: Items, of: Ints, seed: int) -> list[list[int]]:
    """What is divided, by a hash of (seed, name): the items, or their groups by the smallest hash of their items."""
    members: dict[tuple[str, int], list[int]] = {}
    for i in sorted(of.tolist(), key=lambda i: _hash(seed, items.names[i])):
        group = "" if items.groups is None else items.groups[i]
        members.setdefault((group, -1 if group else i), []).append(i)
    return list(members.values())


def class_units(items: Items, of: Ints, seed: int) -> list[tuple[int, list[list[int]]]]:
    """Each class with its `units`."""
    return [(kind, units(items, of[members], seed)) for kind, members in _members(_labels(items)[of])]


def _with_groups(items: Items, parts: Parts, scope: str) -> Parts:
    """Checks that no group is in two parts and that held-out items have something to find; completes the note."""
    ids = groups.group_ids(items)
    assert ids is not None
    tested = parts.test if parts.gallery is None else np.union1d(parts.test, parts.gallery)
    number = ids if scope == "set" or items.labels is None else ids * (len(items.classes) + 1) + items.labels
    for (first, a), (second, b) in combinations((("train", parts.train), ("val", parts.val), ("test", tested)), 2):
        shared = np.intersect1d(number[a[ids[a] >= 0]], number[b[ids[b] >= 0]])
        if len(shared):
            assert items.groups is not None
            example = items.groups[int(np.flatnonzero((number == shared[0]) & (ids >= 0))[0])]
            hint = "; data.group_scope=class counts a group within its class only" if scope == "set" else ""
            raise ValueError(
                f"{items.name}: a group must be in one part, {len(shared)} are in {first} and in {second}, such as "
                f'"{example}"{hint}'
            )
    if items.labels is not None:
        for part, queries, searched in (("validation", parts.val, parts.val), ("test", parts.test, parts.gallery)):
            if not _finds(items.labels, ids, queries, queries if searched is None else searched):
                raise ValueError(
                    f"{items.name}: no {part} item has an item of its class in another group, and those of the same "
                    "group are left out, so there is nothing to find"
                )
    whose, colon, counts = parts.note.partition(": ")
    whole = "no group in two parts" if scope == "set" else "groups whole within each class"
    return parts._replace(note=f"{whose}, {whole}{colon}{counts}")


def _finds(labels: Ints, ids: Ints, queries: Ints, searched: Ints) -> bool:
    """Whether a query has an item of its class in another group."""
    alone = ids < 0
    number = np.where(alone, ids.max() + 1 + np.arange(len(ids)), ids)
    pairs = np.unique(np.stack([labels[searched], number[searched]]), axis=1)
    several = np.bincount(pairs[0], minlength=labels.max() + 1)
    only = np.full(labels.max() + 1, -1, np.int64)
    only[pairs[0]] = pairs[1]
    of = labels[queries]
    return bool(((several[of] > 1) | ((several[of] == 1) & (only[of] != number[queries]))).any())


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
