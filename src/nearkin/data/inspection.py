"""An overview of a set before training: sizes, unreadable files, duplicate pictures."""

from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearkin.data.item_set import Items
from nearkin.data.splits import Parts

__all__ = ["inspect", "lines"]

SHOWN = 20  # pairs of duplicates that are listed; all are counted


def inspect(
    items: Items, parts: Parts, digests: Sequence[str] | None = None, bad: Sequence[tuple[int, str]] = ()
) -> dict[str, Any]:
    """A report of plain values (JSON): counts in total and per part, unreadable items, exact duplicates.

    digests: a hash of each item's content, to find duplicates by; bad: (position, reason) of unreadable items.
    An item that is in no part counts only in the total.
    """
    if digests is not None and len(digests) != len(items):
        raise ValueError(f"digests must have one entry per item: {len(items)} items, {len(digests)} digests")
    places = {"train": parts.train, "val": parts.val, "test": parts.test}
    if parts.gallery is not None:
        places["gallery"] = parts.gallery
    report: dict[str, Any] = {
        "source": items.name,
        "note": items.note,
        "split": parts.note,
        **_sizes(items, np.arange(len(items))),
        "parts": {part: _sizes(items, of) for part, of in places.items()},
        "ignored": list(items.ignored),
        "unreadable": [{"name": items.names[i], "reason": reason} for i, reason in bad],
    }
    if digests is not None:
        report["duplicates"] = _duplicates(items, places, digests, {i for i, _ in bad})
    return report


def lines(report: dict[str, Any]) -> list[str]:
    """The report as lines to print."""
    out = [f"{report['source']}: {_counts(report)}"]
    out += [f"  {part}: {_counts(sizes)}" for part, sizes in report["parts"].items()]
    out += [f"  split: {report['split'].split(':')[0]}"] if report["split"] else []
    out += [f"  ignored: {line}" for line in report["ignored"]]
    bad = report["unreadable"]
    if bad:
        out.append(f"  {_count_of(len(bad), 'item')} cannot be read:")
        out += [f"    {entry['name']}: {entry['reason']}" for entry in bad[:SHOWN]]
        out += [f"    … and {len(bad) - SHOWN} more"] if len(bad) > SHOWN else []
    for where in ("across", "within"):
        duplicates = report.get("duplicates", {}).get(where)
        if duplicates and duplicates["pairs"]:
            kind = "different parts" if where == "across" else "the same part"
            out.append(f"  {_count_of(duplicates['pairs'], 'pair')} of exact duplicates in {kind}:")
            out += [f"    {a} ({in_a}) = {b} ({in_b})" for a, in_a, b, in_b in duplicates["shown"][:3]]
    out += _left_out_lines(report)
    other = report.get("duplicates", {}).get("other_class", 0)
    if other:
        out.append(
            f"  {_count_of(other, 'pair')} of exact duplicates with different classes: one of the two labels is wrong"
        )
    return out


def _left_out_lines(report: dict[str, Any]) -> list[str]:
    """What a run has left out, and the near-duplicates that it has found."""
    out, near, left = [], report.get("near_duplicates"), report.get("left_out")
    if near and near["pairs"]:
        gone = f", {_count_of(near['dropped'], 'picture')} dropped" if near["dropped"] else ""
        out.append(f"  {_count_of(near['pairs'], 'pair')} of near-duplicates in different parts{gone}:")
        out += [f"    {e['path']} ({e['part']}) ≈ {e['copy']} ({e['copy_part']})" for e in near["shown"][:3]]
    if left:
        where = ", ".join(f"{number:,} in {part}" for part, number in left["parts"].items())
        why = ", ".join(f"{number:,} {reason}" for reason, number in left["by"].items())
        alone = f", {left['alone']:,} alone in their class then" if left["alone"] else ""
        out.append(f"  left out: {_count_of(len(left['items']), 'item')} ({where or 'in no part'}): {why}{alone}")
    return out


def _sizes(items: Items, of: NDArray[np.int64]) -> dict[str, Any]:
    counts: dict[str, Any] = {"items": len(of)}
    if items.labels is not None and len(of):
        kinds, sizes = np.unique(items.labels[of], return_counts=True)
        counts["classes"] = len(kinds)
        for word, place in (("smallest", int(sizes.argmin())), ("largest", int(sizes.argmax()))):
            counts[word] = {"class": items.classes[kinds[place]], "items": int(sizes[place])}
    if items.groups is not None:
        groups = Counter(items.groups[i] for i in of)
        counts["groups"] = len(groups) + max(groups[""] - 1, 0)  # "": each in a group of its own
    return counts


def _duplicates(
    items: Items, places: dict[str, NDArray[np.int64]], digests: Sequence[str], bad: set[int]
) -> dict[str, Any]:
    """Pairs of items with the same content: n copies make n(n-1)/2 pairs, so they are counted, not listed."""
    part_of = {int(i): part for part, of in places.items() for i in of}
    groups: dict[str, list[int]] = {}
    for i in sorted(part_of):
        if i not in bad:
            groups.setdefault(digests[i], []).append(i)
    pairs: dict[str, Any] = {word: {"pairs": 0, "shown": []} for word in ("across", "within")}
    other = 0
    for group in groups.values():
        if len(group) == 1:
            continue
        every = _pairs(len(group))
        within = sum(_pairs(n) for n in _tally([part_of[i] for i in group]))
        pairs["across"]["pairs"] += every - within
        pairs["within"]["pairs"] += within
        if items.labels is not None:
            other += every - sum(_pairs(n) for n in _tally(items.labels[group].tolist()))
        examples = [i for part in places for i in [i for i in group if part_of[i] == part][:3]]  # a few of every part
        for a, b in combinations(examples, 2):
            shown = pairs["within" if part_of[a] == part_of[b] else "across"]["shown"]
            if len(shown) < SHOWN:
                shown.append([items.names[a], part_of[a], items.names[b], part_of[b]])
    return {**pairs, "other_class": other}


def _pairs(n: int) -> int:
    return n * (n - 1) // 2


def _tally(values: list[Any]) -> list[int]:
    return list(Counter(values).values())


def _counts(sizes: dict[str, Any]) -> str:
    text = _count_of(sizes["items"], "item")
    if "groups" in sizes:
        text += f", {_count_of(sizes['groups'], 'group')}"
    if "classes" in sizes:
        small, large = sizes["smallest"], sizes["largest"]
        text += f", {_count_of(sizes['classes'], 'class', 'classes')}"
        if small["items"] == large["items"]:
            return f"{text} of {small['items']:,} each"
        text += f" of {small['items']:,} ({small['class']}) to {large['items']:,} ({large['class']})"
    return text


def _count_of(number: int, singular: str, plural: str = "") -> str:
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"
