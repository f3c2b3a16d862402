"""Scores the labels of a gallery for one query: all labels where rows are in memory, else those of the nearest rows."""

import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from nearkin.evaluation.recognition import Hits, LabelScores, LabelSums, Recogniser
from nearkin.gallery import answers
from nearkin.gallery.answers import Asked, Identity
from nearkin.gallery.mixed_search import Searched
from nearkin.gallery.recognition import Recognition
from nearkin.gallery.results import Hit, hit_of
from nearkin.gallery.schema import UNLABELLED, Filter, Floats, unpack
from nearkin.gallery.stores import Store

__all__ = ["LabelScorer"]

ROWS = 1000  # of the nearest labels, at most


class _Scored(NamedTuple):
    key: str
    version: int
    labels: list[str]
    numbers: Mapping[str, int]
    scores: LabelScores


class LabelScorer:
    """Of one gallery. The scores of all labels are kept until its rows change."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._last: _Scored | None = None
        self._lock = threading.Lock()  # the scores are changed in place

    def answer(
        self,
        rows: Searched,
        recognition: Recognition,
        vector: Floats,
        hits: Sequence[Hit],
        filter: Filter | None,
        asked: Asked,
        itself: str | None,
    ) -> Identity:
        """hits: labelled rows, nearest first. itself: see `answers.compose`."""
        recogniser = recognition.recogniser
        query = recogniser.rows(vector[None]).astype(np.float64)
        with self._lock:
            scored = self._all_labels(recognition) if filter is None else None
            if scored is None:
                scored = _near_labels(rows, recogniser, vector, hits, filter)
            numbers, count = scored.numbers, len(scored.labels)
            known = [hit for hit in hits if numbers.get(hit.label, count) < count]  # one may be new this moment
            codes = np.array([[numbers[hit.label] for hit in known]])
            near = Hits(np.array([[hit.similarity for hit in known]]), codes)
            found = recogniser.answer(query, near, scored.scores, asked.unknown_prior)
        best = scored.labels[int(found.best[0])]
        if all(hit.label != best for hit in hits):  # without a filter: its nearest row is not among those of all
            hits = [*hits, *(hit_of(row, cosine) for row, cosine in rows.nearest(vector, 1, Filter((best,), {})))]
        return answers.compose(found, numbers, hits, best, recogniser.far, asked, itself)

    def prepare(self, recognition: Recognition) -> None:
        """Makes the scores of another model, while queries are answered by the one before."""
        scored = self._changed(recognition, None)
        with self._lock:
            self._last = scored

    def _all_labels(self, recognition: Recognition) -> _Scored | None:
        last = self._last
        self._last = self._changed(recognition, last if last is not None and last.key == recognition.key else None)
        return self._last

    def _changed(self, recognition: Recognition, last: _Scored | None) -> _Scored | None:
        """The scores of the labels as they are now, made from those before where there are some."""
        recogniser, since = recognition.recogniser, None if last is None else last.version
        table = self._store.label_table(recognition.key, recogniser.rows, since)
        if table is None:
            return None
        if last is not None and table.changed is not None and not len(table.changed):
            return last
        counts = table.counts.copy()
        if UNLABELLED in table.numbers:
            counts[table.numbers[UNLABELLED]] = 0
        if last is not None and table.changed is not None:
            scores = last.scores
            scores.update(counts, table.sums, table.changed)
        else:
            scores = recogniser.scores(counts, table.sums)
        return _Scored(recognition.key, table.version, list(table.numbers), table.numbers, scores)


def _near_labels(
    rows: Searched, recogniser: Recogniser, vector: Floats, hits: Sequence[Hit], filter: Filter | None
) -> _Scored:
    """Those of the hits, by their rows that pass the filter."""
    labels = list(dict.fromkeys(hit.label for hit in hits))
    only = Filter(tuple(labels), {} if filter is None else filter.keys)
    found = [row for row, _ in rows.nearest(vector, ROWS, only)]
    number = {label: i for i, label in enumerate(labels)}
    codes = np.array([number[row.label] for row in found], np.int64)
    coordinates = recogniser.rows(unpack([row.vector for row in found], len(vector)))
    sums = LabelSums.of(coordinates, codes, len(labels))
    return _Scored("", 0, labels, number, recogniser.scores(*sums))
