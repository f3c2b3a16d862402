"""Which items of a run are diagnosed and shown: bounded, a function of the seed, and never only the good cases.

All indices refer to the items of the findings.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nearkin.core import random
from nearkin.evaluation import diagnose
from nearkin.evaluation.retrieval import knn
from nearkin.report.findings import Findings, usable

__all__ = ["Group", "Row", "Sample", "draw"]

Ints = NDArray[np.int64]

MAX_DIAGNOSED = 10_000  # items whose pairs are all compared: some seconds
MAX_QUERIES = 1_024  # queries that search everything
NEIGHBOURS = 8
ROWS = 4  # queries per group of the grid
MAP_CLASSES, MAP_ITEMS = 40, 2_000


@dataclass(frozen=True)
class Row:
    """A query and its neighbours, nearest first; with targets, their label distances."""

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
class Sample:
    """`items` can be shown; of them `diagnosed` were compared in pairs and `mapped` are on the map."""

    items: Ints
    diagnosed: Ints
    diagnosis: dict[str, Any] | None  # with indices of the findings
    groups: list[Group]
    mapped: Ints


def draw(findings: Findings, seed: int) -> Sample:
    items = usable(findings).numpy()
    kinds = None if findings.labels is None else findings.labels.cpu().numpy().astype(np.int64)
    diagnosed, diagnosis = items[:0], None
    if kinds is not None and len(items) > 1:
        diagnosed = _by_class(items, kinds[items], MAX_DIAGNOSED, len(findings.classes), seed, random.Stream.DIAGNOSIS)
        embeddings = findings.embeddings[torch.from_numpy(diagnosed)].cpu()
        diagnosis = diagnose(embeddings, torch.from_numpy(kinds[diagnosed]))
        for row in diagnosis["label_errors"] + diagnosis["hubs"]:
            row["item"] = int(diagnosed[row["item"]])
    if kinds is not None:
        mapped = _by_class(items, kinds[items], MAP_ITEMS, MAP_CLASSES, seed, random.Stream.MAP)
    else:
        mapped = _subset(items, MAP_ITEMS, seed, random.Stream.MAP)
    return Sample(items, diagnosed, diagnosis, _grid(findings, items, kinds, diagnosis, seed), mapped)


def _subset(items: Ints, most: int, seed: int, stream: random.Stream) -> Ints:
    """At most `most` of the items, drawn at random, in their order."""
    order = random.shuffled(random.words(len(items), seed, stream))
    return items[np.sort(order[:most])]


def _by_class(items: Ints, kinds: Ints, most: int, most_classes: int, seed: int, stream: random.Stream) -> Ints:
    """All items of classes drawn at random until there are enough; in the order of the items."""
    order = random.shuffled(random.words(len(items), seed, stream))
    ids, class_index = np.unique(kinds, return_inverse=True)
    if len(items) <= most and len(ids) <= most_classes:
        return items
    turn = np.empty(len(ids), np.int64)
    turn[random.shuffled(random.words(len(ids), seed, stream, 1))] = np.arange(len(ids))
    sizes = np.bincount(class_index)
    cap = max(2, most // min(most_classes, len(ids))) if most_classes < len(ids) else most
    used = np.minimum(sizes, cap)
    upto = np.cumsum(used[np.argsort(turn)])
    chosen = max(1, min(most_classes, int(np.searchsorted(upto, most, side="right"))))
    by_class = order[np.argsort(class_index[order], kind="stable")]  # items by class, in random order within
    position = np.empty(len(items), np.int64)  # within its class
    position[by_class] = np.arange(len(items)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    if sizes.max() > most:  # not even one class fits: some items of several
        cap, chosen = max(2, most // min(len(ids), most_classes)), min(len(ids), most_classes)
    return items[(turn[class_index] < chosen) & (position < cap)]


def _grid(
    findings: Findings, items: Ints, kinds: Ints | None, diagnosis: dict[str, Any] | None, seed: int
) -> list[Group]:
    if len(items) < 2:
        return []
    queries = _subset(items, MAX_QUERIES, seed, random.Stream.QUERIES)
    order = random.shuffled(random.words(len(queries), seed, random.Stream.QUERIES, 1)).tolist()
    if kinds is None:
        rows = _search(findings, items, queries)
        return _by_label_distance(rows, order) if findings.targets is not None else [_random_group(rows, order)]
    worst = [row["class"] for row in diagnosis["worst_classes"]] if diagnosis else []
    extra = {c: _subset(items[kinds[items] == c], 50, seed, random.Stream.WORST) for c in worst[:ROWS]}
    rows = _search(findings, items, np.unique(np.concatenate([queries, *extra.values()])))
    by_query = {row.query: row for row in rows}

    def correct(row: Row) -> bool:
        return bool(kinds[row.neighbours[0]] == kinds[row.query])

    drawn = [by_query[int(queries[i])] for i in order]
    has_positive = np.isin(kinds, np.flatnonzero(np.bincount(kinds[items], minlength=1) > 1))
    drawn = [row for row in drawn if has_positive[row.query]]  # without positives there is nothing to find
    good = [row for row in drawn if correct(row)]
    bad = [row for row in drawn if not correct(row)]
    total = max(len(drawn), 1)
    of = "of the queries" if len(queries) == len(items) else f"of {len(drawn):,} queries drawn"
    groups = [
        Group(f"Nearest neighbour correct: {100 * len(good) / total:.1f} % {of}", _distinct(good, kinds)),
        Group(f"Nearest neighbour wrong: {100 * len(bad) / total:.1f} % {of}", _distinct(bad, kinds)),
    ]
    taken = {row.query for group in groups for row in group.rows}
    poor = []
    for members in extra.values():
        rest = [by_query[int(i)] for i in members if int(i) not in taken]
        rest.sort(key=lambda row: (correct(row), float(np.mean(kinds[row.neighbours] == kinds[row.query]))))
        poor += rest[len(rest) // 4 : len(rest) // 4 + 1]  # poor, but not the very worst
    groups.append(Group("From the worst classes", poor))
    return [group for group in groups if group.rows]


def _search(findings: Findings, items: Ints, queries: Ints) -> list[Row]:
    """Queries against all items that can be shown, without themselves."""
    gallery = findings.embeddings[torch.from_numpy(items)].cpu()
    similarity = "cosine" if findings.labels is not None or findings.targets is None else "euclidean"  # as measured
    width = min(NEIGHBOURS, len(items) - 1)
    embeddings = findings.embeddings[torch.from_numpy(queries)].cpu()
    neighbours = knn.nearest(embeddings, gallery, k=width + 1, similarity=similarity)
    targets = None
    if findings.targets is not None and findings.labels is None:
        targets = findings.targets.reshape(len(findings.embeddings), -1).double().cpu()
    rows = []
    indices = items[neighbours.indices.numpy()]
    for query, near, similarities in zip(queries.tolist(), indices, neighbours.similarity, strict=True):
        pairs = [(int(i), float(s)) for i, s in zip(near, similarities, strict=True) if int(i) != query][:width]
        others = [i for i, _ in pairs]
        distances = [] if targets is None else (targets[others] - targets[query]).norm(dim=1).tolist()
        rows.append(Row(query, others, [s for _, s in pairs], distances))
    return rows


def _distinct(rows: list[Row], kinds: Ints) -> list[Row]:
    """The first rows whose queries are of different classes; of the same ones where there are not enough."""
    first: dict[int, Row] = {}
    for row in rows:
        first.setdefault(int(kinds[row.query]), row)
    different = list(first.values())
    chosen = {row.query for row in different}
    return (different + [row for row in rows if row.query not in chosen])[:ROWS]


def _random_group(rows: list[Row], order: list[int]) -> Group:
    return Group("Queries drawn at random", [rows[i] for i in order[: 2 * ROWS]])


def _by_label_distance(rows: list[Row], order: list[int]) -> list[Group]:
    """Some of the best fifth, of the middle and of the worst fifth by the mean label distance of the neighbours."""
    far = np.array([float(np.mean(row.label_distance)) for row in rows])
    position = np.empty(len(rows), np.int64)
    position[np.argsort(far, kind="stable")] = np.arange(len(rows))
    fifth = position * 5 // len(rows)
    titles = (("Closest labels: the best fifth", (0,)), ("The middle", (1, 2, 3)), ("The worst fifth", (4,)))
    groups = [Group(title, [rows[i] for i in order if fifth[i] in part][:ROWS]) for title, part in titles]
    return [group for group in groups if group.rows]
