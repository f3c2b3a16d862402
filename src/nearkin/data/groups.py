"""Groups beside classes: which items come from one burst, camera, session, video, writer or day.

Items of one class and group are near-copies of one another or share a background: in evaluation they are neither
positive nor negative for each other. A group comes from a column, or from a pattern of the items' names:

    *_c{group}s*               the part of the file name where {group} stands; * is any text, both as short as possible
    {group}/*                  with a "/" the pattern describes the last folders too
    (?P<group>.+)-\\d+\\.jpg$    or a regular expression with a group of that name, searched in the whole name
"""

import re
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from nearkin.core.labels import UNKNOWN
from nearkin.data.item_set import Items

__all__ = ["IGNORED", "SCOPES", "UNUSED", "by_pattern", "class_blocks", "group_ids", "spanning"]

IGNORED = "none"  # as a column: the groups of the file are not used
UNUSED = ""  # the same, whether it has groups or not: a pattern finds others
SCOPES = ("set", "class")

Ints = NDArray[np.int64]


def by_pattern(items: Items, pattern: str) -> Items:
    """The items with the groups that the pattern finds in their names; it must match all of them."""
    expression = _expression(pattern)
    template = "(?P<group>" not in pattern
    found = [
        expression.fullmatch(_tail(name, pattern)) if template else expression.search(name) for name in items.names
    ]
    missing = [name for name, match in zip(items.names, found, strict=True) if match is None or not match["group"]]
    if missing:
        few = f"only {len(items) - len(missing)}" if len(missing) < len(items) else "none"
        shown = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        raise ValueError(
            f'{items.name}: group_pattern "{pattern}" must match the names of all items, it matches {few} of '
            f"{len(items)}; not {shown}"
        )
    groups = [match["group"] for match in found if match is not None]
    if len(set(groups)) == len(groups) and len(groups) > 1:
        raise ValueError(
            f'{items.name}: group_pattern "{pattern}" would have no effect: it gives each of the {len(groups)} items a '
            f"group of its own, as {groups[0]} for {items.names[0]}"
        )
    return replace(items, groups=groups)


def _expression(pattern: str) -> re.Pattern[str]:
    if "(?P<group>" in pattern:
        try:
            return re.compile(pattern)
        except re.error as error:
            raise ValueError(f'group_pattern must be a regular expression, got "{pattern}" ({error})') from None
    if pattern.count("{group}") != 1 or set("{}") & set(pattern.replace("{group}", "")):
        raise ValueError(
            f"group_pattern must have {{group}} once, and * for any other text, as *_c{{group}}_*, "
            f'or be a regular expression with (?P<group>…), got "{pattern}"'
        )
    parts = re.split(r"(\*|\{group\})", pattern)
    written = {"*": "[^/]*?", "{group}": "(?P<group>[^/]+?)"}
    return re.compile("".join(written.get(part, re.escape(part)) for part in parts), re.DOTALL)


def _tail(name: str, pattern: str) -> str:
    """The end of a path that a pattern describes: the file's name, and as many folders as it has slashes."""
    return "/".join(name.split("/")[-1 - pattern.count("/") :])


def group_ids(items: Items) -> Ints | None:
    """(N,) numbers of the groups; -1 for an item that shares its group with none."""
    if items.groups is None:
        return None
    names = np.array(items.groups, dtype=object)
    ids = np.unique(np.array(items.groups, dtype=str), return_inverse=True)[1].astype(np.int64)
    ids[names == ""] = UNKNOWN
    return ids


def spanning(items: Items, of: Ints) -> tuple[str, int] | None:
    """A group with items of the most classes among these, and how many; None where no group has two."""
    groups, labels = group_ids(items), items.labels
    if groups is None or labels is None:
        return None
    of = of[groups[of] != UNKNOWN]
    pairs = np.unique(np.stack([groups[of], labels[of]]), axis=1)
    count = np.bincount(pairs[0]) if len(of) else np.zeros(1, np.int64)
    if count.max() < 2:
        return None
    widest = int(count.argmax())
    assert items.groups is not None
    return items.groups[int(np.flatnonzero(groups == widest)[0])], int(count[widest])


def class_blocks(items: Items, of: Ints, scope: str) -> list[list[int]]:
    """The classes of these items, those that share a group in one block; scope "class": every class by itself."""
    assert items.labels is not None
    labels, groups = items.labels[of], group_ids(items)
    kinds = np.unique(labels)
    block = {kind: kind for kind in kinds.tolist()}

    def root(kind: int) -> int:
        while block[kind] != kind:
            block[kind] = block[block[kind]]
            kind = block[kind]
        return kind

    if groups is not None and scope == "set":
        first: dict[int, int] = {}
        pairs = np.unique(np.stack([groups[of], labels]), axis=1)
        for group, kind in pairs[:, pairs[0] != UNKNOWN].T.tolist():
            block[root(kind)] = root(first.setdefault(group, kind))
    blocks: dict[int, list[int]] = {}
    for kind in kinds.tolist():
        blocks.setdefault(root(kind), []).append(kind)
    return list(blocks.values())
