"""What the readers of benchmark sets share: finding a set under a root, checking its counts, saying what is missing."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from nearkin.data.file_tree import COMPRESSED, KINDS, Archive, Tree

__all__ = ["Facts", "Found", "absent", "by_mark", "by_pattern", "counted", "present", "trees"]


class Facts(NamedTuple):
    """A set as its publisher describes it."""

    name: str
    line: str  # one line for `nearkin sources`
    files: str  # what to download
    page: str  # where the publisher offers it
    layout: str  # what stands under the root then
    counts: Mapping[str, int]  # what a whole set holds


class Found(NamedTuple):
    """Files of one tree that fit a pattern: their names, and what the pattern's groups said."""

    tree: Tree
    names: list[str]
    groups: list[tuple[str, ...]]


def absent(facts: Facts, root: Path | None, missing: str = "") -> ValueError:
    """The one message for a set that is not there."""
    if root is None:
        what = f"{facts.name} needs a root, the folder it lies in (--root)"
    elif not root.exists():
        what = f"{facts.name}: root {root} does not exist"
    else:
        what = f"{facts.name}: not found in {root}" + (f" ({missing})" if missing else "")
    packed = sorted(path.name for path in root.iterdir() if _packed(path)) if root is not None and root.is_dir() else []
    if packed:
        what += f"; {packed[0]} is there: unpack it (a compressed archive gives no single pictures)"
    return ValueError(f"{what}. Download {facts.files} from {facts.page}; layout: {facts.layout}")


def _packed(path: Path) -> bool:
    return path.name.lower().endswith(COMPRESSED) and not path.name.lower().endswith("ubyte.gz") and path.is_file()


def trees(root: Path) -> Iterator[Tree]:
    """The root itself, then the archives in it and one folder below; or the archive that the root is."""
    if root.is_dir():
        yield Tree(root)
        for depth in ("*", "*/*"):
            for path in sorted(root.glob(depth)):
                if path.suffix.lower() in KINDS and path.is_file() and not path.name.startswith("."):
                    yield Tree(Archive(path))
    elif root.name.lower().endswith((*KINDS, *COMPRESSED)):
        yield Tree(Archive(root))
    else:
        raise ValueError(f"root must be a folder, a .zip or an uncompressed .tar, got {root}")


def by_mark(facts: Facts, root: Path | None, *marks: str) -> tuple[Tree, str]:
    """The tree in which one of the marks (`images.txt`) stands at the top, and which; the least deep one."""
    if root is None or not root.exists():
        raise absent(facts, root)
    for tree in trees(root):
        for mark in marks:
            fitting = [name for name in tree.files if name == mark or name.endswith(f"/{mark}")]
            if fitting:
                shallow = min(fitting, key=lambda name: name.count("/"))
                return tree.inside(shallow[: -len(mark)]), mark
    raise absent(facts, root, f"no {' or '.join(marks)}")


def by_pattern(facts: Facts, root: Path | None, pattern: str, example: str) -> Found:
    """The files that end as the pattern says, all in one folder: the one that holds most of them."""
    if root is None or not root.exists():
        raise absent(facts, root)
    ending = re.compile(f"^(|.*/){pattern}$")
    for tree in trees(root):
        by_folder: dict[str, list[re.Match[str]]] = {}
        for match in filter(None, map(ending.match, tree.files)):
            by_folder.setdefault(match.group(1), []).append(match)
        if by_folder:
            most = max(by_folder, key=lambda folder: len(by_folder[folder]))
            chosen = by_folder[most]
            return Found(tree, [match.group(0) for match in chosen], [match.groups()[1:] for match in chosen])
    raise absent(facts, root, f"no {example}")


def present(facts: Facts, tree: Tree, names: Sequence[str], partial: bool) -> list[int]:
    """Which of the listed pictures are there; all, or, where a part is enough, those that are."""
    here = [i for i, name in enumerate(names) if tree.has(name)]
    if len(here) < len(names) and not (partial and here):
        first = next(name for name in names if not tree.has(name))
        raise absent(facts, Path(str(tree)), f"{len(names) - len(here):,} of {len(names):,} pictures, such as {first}")
    return here


def counted(facts: Facts, found: Mapping[str, int], partial: bool) -> str:
    """The counts as words for a note; other counts than the published ones are an error, or, in part, said."""
    wrong = [key for key, expected in facts.counts.items() if found.get(key, 0) != expected]
    said = ", ".join(f"{number:,} {key}" for key, number in found.items())
    if not wrong:
        return f"{facts.name}: {said}, as published"
    published = ", ".join(f"{number:,} {key}" for key, number in facts.counts.items())
    if not partial:
        raise ValueError(
            f"{facts.name}: it must have {published}, found {said}; "
            "the download is not whole (partial=True or --partial reads what there is)"
        )
    return f"{facts.name}, in part: {said}; published are {published}"
