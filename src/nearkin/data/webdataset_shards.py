"""WebDataset shards: `webdataset:FOLDER`, `webdataset:train-{000..012}.tar` or a pattern with * — read in place.

A sample is the members of one key: heron01.jpg with heron01.cls (the class: a number or a name), or heron01.json with a
"label". Other entries of the JSON may name groups and levels. Shards of a folder called train…, val…, test… are its
split. Uncompressed tar only: single pictures are read at random, which a compressed one does not allow.
"""

import glob
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nearkin.data.file_tree import ENDINGS, Archive, Members, by_bytes, printable
from nearkin.data.folders import SPLIT_NAMES, numbered
from nearkin.data.groups import UNUSED
from nearkin.data.item_set import Items, Several
from nearkin.data.levels import levels_of

__all__ = ["PREFIX", "read", "shards"]

PREFIX = "webdataset:"
TEXT = 2**20  # bytes of a .cls or .json at most
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


class Sample(NamedTuple):
    """A picture and what stands beside it."""

    picture: str
    label: str | None
    facts: dict[str, Any]


def read(source: str, labelled: bool = True, levels: Sequence[str] = (), group_column: str | None = None) -> Items:
    """One item per sample that has a picture; a ValueError names the first one without a class."""
    paths = shards(source)
    archives = [Archive(path) for path in paths]
    samples, skipped = [], 0
    for archive in archives:
        found, others = _samples(source, archive)
        samples.append(found)
        skipped += others
    every = [sample for part in samples for sample in part]
    if not every:
        raise ValueError(f"{source}: its {len(paths)} shards hold no pictures; a sample is 1.jpg with 1.cls")
    names = [f"{path.name}/{sample.picture}" for path, part in zip(paths, samples, strict=True) for sample in part]
    unlabelled = [name for name, sample in zip(names, every, strict=True) if sample.label is None]
    if labelled and unlabelled:
        raise ValueError(
            f"{source}: {len(unlabelled)} pictures have no class, the first {printable(unlabelled[0])}; "
            'it is in KEY.cls, or "label" of KEY.json'
        )
    known = not unlabelled
    classes, labels = numbered([str(sample.label) for sample in every]) if known else ([], None)
    group = None if group_column == UNUSED else group_column
    columns = {c: [_fact(source, name, s, c) for name, s in zip(names, every, strict=True)] for c in levels}
    split = _split(paths, [len(part) for part in samples])
    return Items(
        name=source,
        names=[printable(name) for name in names],
        classes=[printable(kind) for kind in classes],
        labels=labels,
        split=split,
        pictures=Several([Members(a, [s.picture for s in part]) for a, part in zip(archives, samples, strict=True)]),
        groups=None if group is None else [str(sample.facts.get(group, "")) for sample in every],
        note=f"{source}: {len(paths)} shards, " + ("their own split" if split else "no split of their own"),
        ignored=[f"{skipped} samples without a picture"] if skipped else [],
        levels=[] if labels is None else levels_of(source, classes, labels, columns),
    )


def shards(source: str) -> list[Path]:
    """The files that a source names: of a folder its .tar files, {a..b} every number, * any text."""
    text = os.path.expanduser(source.removeprefix(PREFIX))
    if not text:
        raise ValueError(f"{source}: a folder or a pattern of .tar files must follow {PREFIX}")
    if os.path.isdir(text):
        text = os.path.join(glob.escape(text), "*.tar")
    names = [text]
    while match := _RANGE.search(names[0]):
        first, last = match.groups()
        numbers = range(int(first), int(last) + 1)
        names = [_RANGE.sub(str(n).zfill(len(first)), name, count=1) for name in names for n in numbers]
        if not names:
            raise ValueError(f"{source}: {{{first}..{last}}} is empty: the first number must not be the larger")
    missing = [name for name in names if not glob.has_magic(name) and not os.path.isfile(name)]
    if missing:
        raise ValueError(f"{source}: {len(missing)} of its {len(names)} shards are not there, the first {missing[0]}")
    files = [
        path for name in names for path in (sorted(glob.glob(name), key=by_bytes) if glob.has_magic(name) else [name])
    ]
    if not files:
        raise ValueError(f"{source}: no .tar files there")
    return [Path(file) for file in files]


def _samples(source: str, archive: Archive) -> tuple[list[Sample], int]:
    """The samples of a shard by key, and how many have no picture."""
    by_key: dict[str, dict[str, str]] = {}
    for name in archive.names():
        folder, _, file = name.rpartition("/")
        key, _, ending = file.partition(".")
        if key and ending:
            by_key.setdefault(f"{folder}/{key}", {})[ending.lower()] = name
    samples, without = [], 0
    for members in by_key.values():
        pictures = [name for ending, name in members.items() if f".{ending.rpartition('.')[2]}" in ENDINGS]
        if not pictures:
            without += 1
            continue
        facts = _facts(source, archive, members["json"]) if "json" in members else {}
        label = facts.get("label")
        if "cls" in members:
            label = archive.read(members["cls"], TEXT).decode("utf-8", "replace").strip()
        samples.append(Sample(pictures[0], None if label in (None, "") else str(label), facts))
    return samples, without


def _facts(source: str, archive: Archive, name: str) -> dict[str, Any]:
    try:
        facts = json.loads(archive.read(name, TEXT))
    except ValueError as error:
        raise ValueError(f"{source}: {archive.path.name}/{name} is no readable JSON ({error})") from None
    return facts if isinstance(facts, dict) else {"label": facts}


def _fact(source: str, name: str, sample: Sample, column: str) -> str:
    if column not in sample.facts:
        raise ValueError(f'{source}: {printable(name)} has no "{column}" in its .json')
    return str(sample.facts[column])


def _split(paths: list[Path], counts: list[int]) -> list[str] | None:
    """By the first word of each shard's name, where each is a part and there are several."""
    words = [re.split(r"[^A-Za-z]", path.name)[0].lower() for path in paths]
    if not all(word in SPLIT_NAMES for word in words) or len(set(words)) < 2:
        return None
    return [SPLIT_NAMES[word] for word, count in zip(words, counts, strict=True) for _ in range(count)]
