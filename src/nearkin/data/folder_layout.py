"""Which folders of a source are the parts of a split and which are classes; a layout that may mean both is refused.

train, val, test            the first folders, all with the name of a part: a split
train, val, test, extra     refused: `split_folders` names the parts, or says that there are none
data/train …, docs          refused too, as are training_set and test_set
"""

import re
from collections import Counter
from collections.abc import Collection, Sequence

from nearkin.data.file_tree import printable

__all__ = ["AS_BEFORE", "SPLIT_NAMES", "check_depth", "check_layout", "explicit_parts", "flat_split", "named_parts"]
__all__ += ["part_folder"]

_ALIASES = {"train": "training", "val": "valid validation dev", "test": "testing", "query": "queries", "gallery": ""}
SPLIT_NAMES = {name: part for part, others in _ALIASES.items() for name in (part, *others.split())}
NONE = ("none",)  # of split_folders: no folder is a part
AS_BEFORE = ("auto",)  # of split_folders: parts by their names alone, and nothing is refused
DEEPEST = 3  # folders within folders in which parts are looked for
SHOWN = 8

_FILLERS = re.compile("set|data|images?|imgs?|pictures?|photos?|folder|split")

Parts = dict[tuple[str, ...], str]  # folder → part
Steps = Sequence[Sequence[str]]  # of each image its folders and its file name


def part_of(folder: str) -> str | None:
    """The part that the name of a folder speaks of: of training_set, trainset or train2017 it is train."""
    words = [_FILLERS.sub("", word) for word in re.split(r"[\W\d_]+", folder.lower())]
    parts = {SPLIT_NAMES[word] for word in words if word in SPLIT_NAMES}
    return parts.pop() if len(parts) == 1 else None


def named_parts(steps: Steps) -> Parts:
    """The first folders, where all of them have the very name of a part, and contain folders; else {}."""
    first = {step[0] for step in steps if len(step) > 1}
    deep = any(len(step) > 2 for step in steps)
    parts: Parts = {(folder,): SPLIT_NAMES.get(folder.lower(), "") for folder in first}
    return parts if deep and "train" in parts.values() and all(parts.values()) else {}


def explicit_parts(name: str, steps: Steps, chosen: Sequence[str]) -> Parts:
    """The parts that `split_folders` names: "data/train", or "fold1=train"."""
    if tuple(chosen) == NONE:
        return {}
    if tuple(chosen) == AS_BEFORE:
        return named_parts(steps)
    known = {tuple(step[:depth]) for step in steps for depth in range(1, len(step))}
    parts: Parts = {}
    for text in chosen:
        place, equals, part = text.rpartition("=") if "=" in text else (text, "", "")
        folder = tuple(place.strip().strip("/").split("/"))
        found = SPLIT_NAMES.get(part.strip().lower()) if equals else part_of(folder[-1])
        if folder not in known:
            raise ValueError(
                f'{name}: split_folders: "{place}" is no folder with images; its folders are {_listed(known)}'
            )
        if found is None:
            raise ValueError(
                f'{name}: split_folders: of which part is "{text}"? {place}=train, or '
                f"{', '.join(part for part in _ALIASES if part != 'train')}"
            )
        if any(folder[: len(other)] == other or other[: len(folder)] == folder for other in parts):
            raise ValueError(f'{name}: split_folders: "{place}" is named twice, or within another one')
        parts[folder] = found
    return parts


def flat_split(steps: Steps) -> bool:
    """Whether the first folders are parts of a split, all without class folders."""
    first = {step[0] for step in steps if len(step) > 1}
    parts = {part_of(folder) for folder in first}
    return all(len(step) == 2 for step in steps) and None not in parts and {"train"} < parts


def check_layout(name: str, steps: Steps, parts: Parts, inside: Collection[int]) -> None:
    """Refuses folders that may be read in two ways, and those whose images would all be left out.

    parts: as they are read; {}: none. inside: the images that are in class folders.
    """
    if not parts:
        _refuse_look_alikes(name, steps)
        if flat_split(steps):
            raise ValueError(
                f"{name}: its folders {_listed({step[0] for step in steps})} are parts of a split by their names, and "
                "hold no class folders, as in train/heron/1.jpg; if they are the classes: --split-folders none"
            )
    check_depth(name, steps, parts, inside)


def check_depth(name: str, steps: Steps, parts: Parts, inside: Collection[int]) -> None:
    """Refuses a part, or with levels a first folder, of whose images none is deep enough; and most images so."""
    sizes: Counter[str] = Counter()
    example: dict[str, str] = {}
    for step in steps:
        if len(step) > 1:
            folder = _part_or_first(step, parts)
            sizes[folder] += 1
            example.setdefault(folder, "/".join(step))
    kept = {_part_or_first(steps[i], parts) for i in inside}
    if kept and (lost := sorted(set(sizes) - kept)):
        count = sum(sizes[folder] for folder in lost)
        way_out = (
            f"--split-folders {','.join(sorted(kept))} leaves {_listed(lost)} out"
            if parts
            else "without --levels a class is a first folder, with --leaf-classes a folder that holds images"
        )
        raise ValueError(
            f"{name}: {_listed(lost)} hold{'s' * (len(lost) == 1)} {count:,} image{'s' * (count > 1)} in no class "
            f"folder, such as {example[lost[0]]}; {_listed(kept)} {'has' if len(kept) == 1 else 'have'} class folders; "
            f"{way_out}"
        )
    outside = len(steps) - len(inside)
    if inside and outside > len(inside):
        among = set(inside)
        loose = next("/".join(step) for i, step in enumerate(steps) if i not in among)
        raise ValueError(
            f"{name}: {outside:,} of its {len(steps):,} images are in no class folder, such as {loose}; class folders "
            f"are in {_listed(kept)}: move the other images into folders, or name the folder that is meant"
        )


def _refuse_look_alikes(name: str, steps: Steps) -> None:
    """Refuses siblings of which several have names of parts, with class folders in one of them."""
    direct = Counter(tuple(step[:-1]) for step in steps)  # images in a folder itself
    deeper: Counter[tuple[str, ...]] = Counter()  # and in those within
    for place, images in direct.items():
        for depth in range(1, min(len(place), DEEPEST + 1)):
            deeper[place[:depth]] += images
    parents: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for folder in {*direct, *deeper}:
        if 0 < len(folder) <= DEEPEST and part_of(folder[-1]) is not None:
            parents.setdefault(folder[:-1], []).append(folder)
    parts = [
        folder
        for folders in parents.values()
        if len({part_of(folder[-1]) for folder in folders}) > 1 and any(deeper[f] > direct[f] for f in folders)
        for folder in folders
    ]
    if not parts:
        return
    least = min(map(len, parts))
    parts = sorted((folder for folder in parts if len(folder) == least), key=_by_part)
    others = {step[0] for step in steps if len(step) > 1} - {folder[0] for folder in parts}
    beside = f", beside {_listed(others)}" if others else ""
    paths = ["/".join(folder) for folder in parts]
    flag = printable(",".join(paths[:SHOWN]) + (",…" if len(paths) > SHOWN else ""))
    raise ValueError(
        f"{name}: its folders {_listed(paths)} may be the parts of a split{beside}. Choose: --split-folders {flag} "
        "(the parts; all else is left out), --split-folders none (a class is a first folder), or none with "
        "--leaf-classes (a class is a leaf folder: one that holds images)"
    )


def part_folder(step: Sequence[str], parts: Parts) -> tuple[str, ...]:
    """The folder of the part that an image is in; () where it is in none."""
    depths = {len(part) for part in parts}
    return next((folder for depth in depths if (folder := tuple(step[:depth])) in parts), ())


def _part_or_first(step: Sequence[str], parts: Parts) -> str:
    return "/".join(part_folder(step, parts) or step[:1])


def _by_part(folder: tuple[str, ...]) -> tuple[int, tuple[str, ...]]:
    return list(_ALIASES).index(part_of(folder[-1]) or ""), folder


def _listed(folders: Collection[str] | Collection[tuple[str, ...]]) -> str:
    names = [folder if isinstance(folder, str) else "/".join(folder) for folder in folders]
    names = [printable(name) for name in (names if isinstance(folders, list) else sorted(names))]
    return ", ".join(names[:SHOWN]) + (f", … ({len(names)})" if len(names) > SHOWN else "")
