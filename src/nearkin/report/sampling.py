"""What of a run is looked at and shown: bounded, the same for the same seed, and never only the good cases.

All indices are of the findings' items.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearkin.core import random
from nearkin.core.random import Stream
from nearkin.evaluation import diagnose
from nearkin.evaluation.retrieval import knn
from nearkin.report.findings import Findings, usable

__all__ = ["Choice", "Group", "Row", "choose"]

Ints = NDArray[np.int64]

DIAGNOSED = 10_000  # items whose pairs are all looked at: some seconds
ASKED = 1_024  # queries that search everything
NEIGHBOURS = 8
ROWS = 4  # queries a group of the grid
MAP_CLASSES, MAP_ITEMS = 40, 2_000


@dataclass(frozen=True)
class Row:
    """A query and its nearest, nearest first; with targets, how far their labels are."""

    query: int
    neighbours: list[int]
    similarity: list[float]
    label_distance: list[float]


@dataclass(frozen=True)
class Group:
    """Some rows of the grid, and what they have in common."""

    title: str
    rows: list[Row]


@dataclass(frozen=True)
class Choice:
    """`items` can be shown; of them `diagnosed` were looked at in pairs and `mapped` stand on the map."""

    items: Ints
    diagnosed: Ints
    diagnosis: dict[str, Any] | None  # its items numbered as the findings'
    groups: list[Group]
    mapped: Ints


def choose(findings: Findings, seed: int) -> Choice:
    items = usable(findings).numpy()
    kinds = None if findings.labels is None else findings.labels.cpu().numpy().astype(np.int64)
    looked, diagnosis = items[:0], None
    if kinds is not None and len(items) > 1:
        looked = _whole_classes(items, kinds[items], DIAGNOSED, len(findings.classes), seed, Stream.DIAGNOSIS)
        place = torch.from_numpy(looked)
        diagnosis = diagnose(findings.embeddings[place].cpu(), torch.from_numpy(kinds[looked]))
        for row in diagnosis["label_errors"] + diagnosis["hubs"]:
            row["item"] = int(looked[row["item"]])
    if kinds is not None:
        mapped = _whole_classes(items, kinds[items], MAP_ITEMS, MAP_CLASSES, seed, Stream.MAP)
    else:
        mapped = _some(items, MAP_ITEMS, seed, Stream.MAP)
    return Choice(items, looked, diagnosis, _grid(findings, items, kinds, diagnosis, seed), mapped)


def _some(items: Ints, most: int, seed: int, stream: Stream) -> Ints:
    """At most so many of the items, in their order."""
    order = random.shuffled(random.words(len(items), seed, stream))
    return items[np.sort(order[:most])]


def _whole_classes(items: Ints, kinds: Ints, most: int, most_classes: int, seed: int, stream: Stream) -> Ints:
    """Classes drawn by chance until the items are enough, whole where that is possible; in the order of the items."""
    order = random.shuffled(random.words(len(items), seed, stream))
    ids, place = np.unique(kinds, return_inverse=True)
    if len(items) <= most and len(ids) <= most_classes:
        return items
    turn = np.empty(len(ids), np.int64)
    turn[random.shuffled(random.words(len(ids), seed, stream, 1))] = np.arange(len(ids))
    sizes = np.bincount(place)
    cap = max(2, most // min(most_classes, len(ids))) if most_classes < len(ids) else most
    kept = np.minimum(sizes, cap)
    upto = np.cumsum(kept[np.argsort(turn)])
    chosen = max(1, min(most_classes, int(np.searchsorted(upto, most, side="right"))))
    by_class = order[np.argsort(place[order], kind="stable")]  # items by class, in random order within
    rank = np.empty(len(items), np.int64)
    rank[by_class] = np.arange(len(items)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    if sizes.max() > most:  # not even one class fits: a part of each of several
        cap, chosen = max(2, most // min(len(ids), most_classes)), min(len(ids), most_classes)
    return items[(turn[place] < chosen) & (rank < cap)]


def _grid(
    findings: Findings, items: Ints, kinds: Ints | None, diagnosis: dict[str, Any] | None, seed: int
) -> list[Group]:
    if len(items) < 2:
        return []
    asked = _some(items, ASKED, seed, Stream.QUERIES)
    order = random.shuffled(random.words(len(asked), seed, Stream.QUERIES, 1)).tolist()
    if kinds is None:
        rows = _ask(findings, items, asked)
        return _by_label_distance(rows, order) if findings.targets is not None else [_random(rows, order)]
    worst = [one["class"] for one in diagnosis["worst_classes"]] if diagnosis else []
    extra = {c: _some(items[kinds[items] == c], 50, seed, Stream.WORST) for c in worst[:ROWS]}
    rows = _ask(findings, items, np.unique(np.concatenate([asked, *extra.values()])))
    by_query = {row.query: row for row in rows}

    def right(row: Row) -> bool:
        return bool(kinds[row.neighbours[0]] == kinds[row.query])

    drawn = [by_query[int(asked[i])] for i in order]
    has_kin = np.isin(kinds, np.flatnonzero(np.bincount(kinds[items], minlength=1) > 1))
    drawn = [row for row in drawn if has_kin[row.query]]  # alone in its class there is nothing to find
    good = [row for row in drawn if right(row)]
    bad = [row for row in drawn if not right(row)]
    total = max(len(drawn), 1)
    of = "of the queries" if len(asked) == len(items) else f"of {len(drawn):,} queries drawn"
    groups = [
        Group(f"Nearest is right: {100 * len(good) / total:.1f} % {of}", _distinct(good, kinds)),
        Group(f"Nearest is wrong: {100 * len(bad) / total:.1f} % {of}", _distinct(bad, kinds)),
    ]
    taken = {row.query for group in groups for row in group.rows}
    poor = []
    for members in extra.values():
        found = [by_query[int(i)] for i in members if int(i) not in taken]
        found.sort(key=lambda row: (right(row), float(np.mean(kinds[row.neighbours] == kinds[row.query]))))
        poor += found[len(found) // 4 : len(found) // 4 + 1]  # poor, but not the very worst of the worst
    groups.append(Group("From the worst classes", poor))
    return [group for group in groups if group.rows]


def _ask(findings: Findings, items: Ints, queries: Ints) -> list[Row]:
    """Queries against all items that can be shown, themselves left out."""
    place = torch.from_numpy(items)
    x = findings.embeddings[place].cpu()
    similarity = "cosine" if findings.labels is not None or findings.targets is None else "euclidean"  # as measured
    width = min(NEIGHBOURS, len(items) - 1)
    asked = findings.embeddings[torch.from_numpy(queries)].cpu()
    found = knn.nearest(asked, x, k=width + 1, similarity=similarity)
    targets = None
    if findings.targets is not None and findings.labels is None:
        targets = findings.targets.reshape(len(findings.embeddings), -1).double().cpu()
    rows = []
    for query, near, close in zip(queries.tolist(), items[found.indices.numpy()], found.similarity, strict=True):
        kept = [(int(i), float(s)) for i, s in zip(near, close, strict=True) if int(i) != query][:width]
        apart = [] if targets is None else _apart(targets, query, [i for i, _ in kept])
        rows.append(Row(query, [i for i, _ in kept], [s for _, s in kept], apart))
    return rows


def _apart(targets: Tensor, query: int, others: list[int]) -> list[float]:
    apart: list[float] = (targets[others] - targets[query]).norm(dim=1).tolist()
    return apart


def _distinct(rows: list[Row], kinds: Ints) -> list[Row]:
    """The first rows whose queries are of different classes; of the same ones where there are not enough."""
    first: dict[int, Row] = {}
    for row in rows:
        first.setdefault(int(kinds[row.query]), row)
    different = list(first.values())
    chosen = {row.query for row in different}
    return (different + [row for row in rows if row.query not in chosen])[:ROWS]


def _random(rows: list[Row], order: list[int]) -> Group:
    return Group("Queries drawn by chance", [rows[i] for i in order[: 2 * ROWS]])


def _by_label_distance(rows: list[Row], order: list[int]) -> list[Group]:
    """Some of the best fifth, of the middle and of the worst fifth by the mean label distance of the nearest."""
    far = np.array([float(np.mean(row.label_distance)) for row in rows])
    rank = np.empty(len(rows), np.int64)
    rank[np.argsort(far, kind="stable")] = np.arange(len(rows))
    fifth = rank * 5 // len(rows)
    titles = (("Closest labels: the best fifth", (0,)), ("The middle", (1, 2, 3)), ("The worst fifth", (4,)))
    groups = [Group(title, [rows[i] for i in order if fifth[i] in part][:ROWS]) for title, part in titles]
    return [group for group in groups if group.rows]
