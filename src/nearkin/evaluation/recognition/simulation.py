"""Questions to a gallery whose answers are known: each drawn item left out, and each with its whole label.

The evidence of a question is taken against the whole gallery, less what is left out; the model that weighs it has seen
none of the items, or of the labels, that are left out with it. At most 4,000 items are drawn, evenly of all labels.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nearkin.evaluation.arrays import Floats
from nearkin.evaluation.recognition.events import NONE, OTHER, RIGHT, features
from nearkin.evaluation.recognition.label_model import (
    NOTHING,
    Directions,
    LabelFit,
    LabelModel,
    LabelSums,
    Scatter,
)

__all__ = [
    "ITEMS",
    "NEAREST",
    "Hits",
    "Learned",
    "Part",
    "Queries",
    "Questions",
    "Rows",
    "best_labels",
    "folds_of",
    "learn",
    "only_these",
]

NEAREST = 50  # rows whose labels and cosines count
FOLDS, ROWS = (5, 20), 8000  # fewest and most; in small galleries more: a model must know almost all labels
ITEMS = 4000  # drawn at most
STRANGERS = 30  # given ones, from which on no label is left out to be one: an encoder may have learned the labels
SCATTERED = 2**18  # rows from which on some are enough for the principal directions
PRODUCTS = 10**9  # cosines at most: fewer items of a large gallery
CELLS = 2**22  # scores at a time

Codes = NDArray[np.int64]
Vectors = NDArray[np.float32]


class Part(NamedTuple):
    """Some rows of a gallery: vectors (n, D) of unit length, the numbers of their labels, and their ids. scale: what a
    cosine with them means, where that differs. asked: whether some of them are drawn as questions."""

    vectors: Vectors
    codes: Codes
    ids: Codes
    scale: Callable[..., Any] | None = None
    asked: bool = True


Rows = Callable[[], Iterator[Part]]


class Queries(NamedTuple):
    """Items whose labels are known: vectors (Q, D), the numbers of their labels, -1, -2, … for those that are not in
    the gallery, and the ids of their own rows in it, 0 where an item has none."""

    vectors: Vectors
    codes: Codes
    ids: Codes


class Hits(NamedTuple):
    """The nearest rows of queries: cosines (Q, n), descending, and the numbers of their labels; -1 for no row."""

    cosines: Floats
    codes: Codes

    def labels(self, best: Codes) -> tuple[Floats, Floats]:
        """(Q,) cosines of the nearest row of the best label, and of that of any other label; where it is not among the
        hits, of the last of them."""
        known = self.codes >= 0
        last = np.take_along_axis(self.cosines, np.maximum(known.sum(1, keepdims=True) - 1, 0), 1)[:, 0]
        mine = self.codes == best[:, None]
        near, next_ = (np.where(some, self.cosines, -2.0).max(1) for some in (mine & known, ~mine & known))
        return np.where(near < -1.5, last, near), np.where(next_ < -1.5, last, next_)


class Questions(NamedTuple):
    """features (n, F) of `events`, the event that took place, and the class of each question."""

    features: Floats
    event: Codes
    classes: Codes


class Learned(NamedTuple):
    """From a gallery: the directions and the model of its labels, and the questions that were asked."""

    directions: Directions
    model: LabelModel
    questions: Questions


def learn(
    rows: Rows, counts: Codes, *, only_near: bool = False, queries: Queries | None = None, seed: int = 0
) -> Learned:
    """rows: called twice. counts (C,): rows of each label. only_near: the labels of the nearest rows alone compete, as
    in a gallery that is too large for all of them. queries: asked in place of rows of the gallery; where they have
    enough strangers, these alone are."""
    total, drawn = int(counts.sum()), _Drawn(counts, queries, seed)
    scatter: Scatter | None = None
    every = max(1, total // SCATTERED)
    for number, part in enumerate(rows()):
        scatter = scatter or Scatter(part.vectors.shape[1])
        if number % every == 0:
            scatter.add(part.vectors)
        drawn.take(part)
    if scatter is None:
        raise ValueError("the gallery has no labelled rows")
    directions, asked_of = scatter.directions(), drawn.items()
    near = _Nearest(asked_of, min(NEAREST, max(total - 1, 1)))
    folds, size = folds_of(len(counts), total, seed), directions.basis.shape[1]
    labels = LabelSums.none(len(counts), size)
    squares = np.zeros((folds.max() + 1, size, size))
    for part in rows():
        coordinates = directions.rows(part.vectors)
        labels.add(coordinates, part.codes)
        for fold in np.unique(folds[part.codes]):
            some = coordinates[folds[part.codes] == fold]
            squares[fold] += some.T @ some
        near.add(part)
    fit = LabelFit(labels, squares.sum(0))
    world = _World(labels, directions.rows(asked_of.vectors), directions.rows(asked_of.rows), asked_of, only_near)
    own, code = asked_of.codes >= 0, np.maximum(asked_of.codes, 0)
    asked = []
    left_out = own & (len(np.unique(asked_of.codes[~own])) < STRANGERS)
    for fold in np.unique(folds[code[left_out]]):  # each label left out, by models without those of its fold
        mine, model = own & (folds[code] == fold), fit.without(np.flatnonzero(folds == fold), squares[fold])
        asked.append(_asked(world, model, np.flatnonzero(mine), near.others, False))
    enrolled = asked_of.ids > 0
    able = own & (labels.counts[code] > enrolled)
    items = np.where(enrolled, _item_folds(asked_of.codes, _fold_count(total), seed), -1)
    for fold in np.unique(items[able]):  # each item left out; what is in no fold has no row of its own
        left = items == fold
        model = fit.less(world.rows[left], asked_of.codes[left]) if fold >= 0 else fit.model()
        asked.append(_asked(world, model, np.flatnonzero(left & able), near.all, True))
    if not own.all():
        asked.append(_asked(world, fit.model(), np.flatnonzero(~own), near.all, False))
    return Learned(directions, fit.model(), Questions(*(np.concatenate(parts) for parts in zip(*asked, strict=True))))


def best_labels(scores: Floats) -> tuple[Codes, Floats, Floats]:
    """(Q,) the best label, its score and that of the second; of equal scores the lowest number."""
    order = np.arange(len(scores))
    best = scores.argmax(1)
    first = scores[order, best]
    rest = scores.copy()
    rest[order, best] = -np.inf
    return best, first, np.maximum(rest.max(1), NOTHING) if scores.shape[1] > 1 else np.full(len(scores), NOTHING)


class _Items(NamedTuple):
    """What is asked: vectors, labels and own rows' ids as in `Queries`, and the own rows (Q, D), 0 without one."""

    vectors: Vectors
    codes: Codes
    ids: Codes
    rows: Vectors


class _World(NamedTuple):
    """The labels of a gallery, and what is asked of it, in principal directions."""

    labels: LabelSums
    queries: Vectors
    rows: Vectors
    items: _Items
    only_near: bool


def _asked(world: _World, model: LabelModel, which: Codes, hits: Hits, known: bool) -> Questions:
    """The questions `which`. known: their label stays, less their own row; otherwise it goes."""
    used = np.arange(len(world.labels.counts))
    if world.only_near:  # a fraction of many labels
        used = np.unique(np.r_[hits.codes[which].ravel(), world.items.codes[which]])
        used = used[used >= 0]
    score, found = model.scores(world.labels.take(used)), []
    step = max(1, CELLS // len(used))
    for some in (which[i : i + step] for i in range(0, len(which), step)):
        queries, own = model.rows(world.queries[some]), world.items.codes[some]
        values, there = score(queries), np.flatnonzero(own >= 0)
        at = np.searchsorted(used, own[there])
        enrolled = world.items.ids[some] > 0
        if known:
            mine = LabelSums(enrolled.astype(np.int64), np.where(enrolled[:, None], model.rows(world.rows[some]), 0))
            values[there, at] = score.without(queries, at, mine)
        else:
            values[there, at] = NOTHING
        near = Hits(hits.cosines[some], hits.codes[some])
        places = np.where(near.codes >= 0, np.searchsorted(used, near.codes), -1)
        if world.only_near:
            values = only_these(values, places)
        place, first, second = best_labels(values)
        best = used[place]
        event = np.where(best == own, RIGHT, OTHER) if known else np.full(len(some), NONE)
        classes = np.where(own >= 0, own, len(world.labels.counts) - 1 - own)
        found.append(Questions(features(first, second, *near.labels(best)), event, classes))
    return Questions(*(np.concatenate(parts) for parts in zip(*found, strict=True)))


def only_these(values: Floats, codes: Codes) -> Floats:
    """Scores of the labels in `codes` (Q, n), the others as if they had no rows."""
    allowed = np.zeros((len(values), values.shape[1] + 1), bool)
    np.put_along_axis(allowed, codes, True, 1)  # -1, for no row, is the column beyond
    return np.where(allowed[:, :-1], values, NOTHING)


class _Drawn:
    """Items drawn evenly of all labels, taken as the rows go by; or given queries, with their own rows."""

    def __init__(self, counts: Codes, queries: Queries | None, seed: int) -> None:
        draw = np.random.default_rng([seed, 4])
        most = min(ITEMS, max(PRODUCTS // max(int(counts.sum()), 1), 200))
        self._given = queries
        self._places: dict[int, set[int]] = {}
        self._found: dict[int, tuple[Vectors, int]] = {}
        self._seen = np.zeros(len(counts), np.int64)
        if queries is not None:
            some = np.sort(draw.permutation(len(queries.codes))[:most])
            self._given = Queries(queries.vectors[some], queries.codes[some], queries.ids[some])
            self._wanted = set(self._given.ids.tolist()) - {0}
            return
        live = draw.permutation(np.flatnonzero(counts))[:most]
        each = 1
        while np.minimum(counts[live], each + 1).sum() <= most and each < counts.max():
            each += 1
        self._places = {int(c): set(draw.permutation(int(counts[c]))[:each].tolist()) for c in live}

    def take(self, part: Part) -> None:
        if self._given is None and not part.asked:
            return
        for i, (code, id) in enumerate(zip(part.codes.tolist(), part.ids.tolist(), strict=True)):
            if self._given is not None:
                wanted = id in self._wanted
            else:
                wanted = self._seen[code] in self._places.get(code, ())
                self._seen[code] += 1
            if wanted:
                self._found[id] = (part.vectors[i].copy(), code)

    def items(self) -> _Items:
        if self._given is None:
            rows = np.stack([vector for vector, _ in self._found.values()])
            codes = np.array([code for _, code in self._found.values()])
            return _Items(rows, codes, np.array(list(self._found)), rows)
        vectors = self._given.vectors
        ids = np.array([id if id in self._found else 0 for id in self._given.ids.tolist()])
        rows = np.stack([self._found[id][0] if id else np.zeros_like(vectors[0]) for id in ids.tolist()])
        return _Items(vectors, self._given.codes, ids, rows)


class _Nearest:
    """The nearest rows of what is asked: of all rows but its own, and of those of other labels."""

    def __init__(self, items: _Items, k: int) -> None:
        self._queries, self._k = torch.from_numpy(items.vectors), k
        self._codes, self._ids = torch.from_numpy(items.codes), torch.from_numpy(items.ids)
        empty = torch.full((len(items.codes), k), -2.0), torch.full((len(items.codes), k), -1)
        self._all, self._others = empty, empty

    def add(self, part: Part) -> None:
        cosines = self._queries @ torch.from_numpy(part.vectors).T
        if part.scale is not None:
            cosines = torch.from_numpy(np.asarray(part.scale(cosines.numpy()), np.float32))
        kinds = torch.from_numpy(part.codes)
        cosines.masked_fill_(self._ids[:, None] == torch.from_numpy(part.ids), -2.0)
        self._all = self._merged(self._all, cosines, kinds)
        cosines.masked_fill_(self._codes[:, None] == kinds, -2.0)
        self._others = self._merged(self._others, cosines, kinds)

    def _merged(
        self, before: tuple[torch.Tensor, torch.Tensor], cosines: torch.Tensor, kinds: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        top, at = cosines.topk(min(self._k, cosines.shape[1]), dim=1)
        values, codes = torch.cat([before[0], top], 1), torch.cat([before[1], kinds[at]], 1)
        best, order = values.topk(self._k, dim=1)
        return best, torch.where(best > -1.5, codes.gather(1, order), -1)

    @property
    def all(self) -> Hits:
        return Hits(self._all[0].double().numpy(), self._all[1].numpy())

    @property
    def others(self) -> Hits:
        return Hits(self._others[0].double().numpy(), self._others[1].numpy())


def folds_of(labels: int, rows: int, seed: int) -> Codes:
    """The fold of each label."""
    return np.random.default_rng([seed, 5]).permutation(labels) % min(_fold_count(rows), labels)


def _fold_count(rows: int) -> int:
    return min(max(ROWS // max(rows, 1), FOLDS[0]), FOLDS[1])


def _item_folds(classes: Codes, count: int, seed: int) -> Codes:
    """Of each item: those of a label are spread over the folds."""
    order = np.random.default_rng([seed, 6]).permutation(len(classes))
    order = order[np.argsort(classes[order], kind="stable")]
    folds = np.empty(len(classes), np.int64)
    folds[order] = np.arange(len(classes)) % count
    return folds
