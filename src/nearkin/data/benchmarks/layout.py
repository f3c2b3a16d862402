"""Shared by the readers of benchmark sets: finds a set under a root, checks its counts, reports what is missing."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from nearkin.data.file_tree import COMPRESSED, KINDS, Archive, Tree

__all__ = ["Facts", "Matches", "absent", "by_mark", "by_pattern", "counted", "present", "trees"]


class Facts(NamedTuple):
    """A set as its publisher describes it."""

    name: str
    line: str  # one line for `nearkin sources`
    files: str  # what to download
    page: str  # the publisher's page
    layout: str  # of the files under the root
    counts: Mapping[str, int]  # of the complete set


class Matches(NamedTuple):
    """Files of one tree that match a pattern: their names, and the pattern's groups."""

    tree: Tree
    names: list[str]
    groups: list[tuple[str, ...]]


def absent(facts: Facts, root: Path | None, missing: str = "") -> ValueError:
    """The message for a missing set."""
    if root is None:
        what = f"{facts.name} needs a root, the folder it is in (--root)"
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
    """The root, then the archives in it and one folder below; or the root as an archive."""
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
    """The tree with one of the marks (`images.txt`) at its top, and that mark; the shallowest such tree."""
    if root is None or not root.exists():
        raise absent(facts, root)
    for tree in trees(root):
        for mark in marks:
            fitting = [name for name in tree.files if name == mark or name.endswith(f"/{mark}")]
            if fitting:
                shallow = min(fitting, key=lambda name: name.count("/"))
                return tree.inside(shallow[: -len(mark)]), mark
    raise absent(facts, root, f"no {' or '.join(marks)}")


def by_pattern(facts: Facts, root: Path | None, pattern: str, example: str) -> Matches:
    """The files whose ends match the pattern, all in one folder: the one with most of them."""
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
            return Matches(tree, [match.group(0) for match in chosen], [match.groups()[1:] for match in chosen])
    raise absent(facts, root, f"no {example}")


def present(facts: Facts, tree: Tree, names: Sequence[str], partial: bool) -> list[int]:
    """The positions of the listed pictures that exist: all of them, or, with `partial`, at least one."""
    available = [i for i, name in enumerate(names) if tree.has(name)]
    if len(available) < len(names) and not (partial and available):
        first = next(name for name in names if not tree.has(name))
        raise absent(
            facts, Path(str(tree)), f"{len(names) - len(available):,} of {len(names):,} pictures, such as {first}"
        )
    return available


def counted(facts: Facts, counts: Mapping[str, int], partial: bool) -> str:
    """The counts in words, for a note; counts that differ from the published ones are an error unless `partial`."""
    wrong = [key for key, expected in facts.counts.items() if counts.get(key, 0) != expected]
    listed = ", ".join(f"{number:,} {key}" for key, number in counts.items())
    if not wrong:
        return f"{facts.name}: {listed}, as published"
    published = ", ".join(f"{number:,} {key}" for key, number in facts.counts.items())
    if not partial:
        raise ValueError(
            f"{facts.name}: it must have {published}, found {listed}; "
            "the download is incomplete (partial=True or --partial reads what there is)"
        )
    return f"{facts.name}, in part: {listed}; published are {published}"
