"""Scores the labels of a gallery for one query: all labels where rows are in memory, else those of the nearest rows."""

from collections.abc import Sequence
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
from nearkin.gallery.stores.label_table import LabelTable

__all__ = ["LabelScorer"]

ROWS = 1000  # of the nearest labels, at most


class _Scored(NamedTuple):
    table: LabelTable
    labels: list[str]
    scores: LabelScores


class LabelScorer:
    """Of one gallery. The scores of all labels are kept until its rows change."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._last: _Scored | None = None

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
        scored = self._all_labels(recognition) if filter is None else None
        if scored is None:
            scored = _near_labels(rows, recogniser, vector, hits, filter)
        number = {label: i for i, label in enumerate(scored.labels)}
        known = [hit for hit in hits if hit.label in number]  # one may have been enrolled meanwhile
        near = Hits(np.array([[hit.similarity for hit in known]]), np.array([[number[hit.label] for hit in known]]))
        found = recogniser.answer(
            recogniser.rows(vector[None]).astype(np.float64), near, scored.scores, asked.unknown_prior
        )
        best = scored.labels[int(found.best[0])]
        if all(hit.label != best for hit in hits):  # its nearest row is not among the nearest of all
            only = Filter((best,), {} if filter is None else filter.keys)
            hits = [*hits, *(hit_of(row, cosine) for row, cosine in rows.nearest(vector, 1, only))]
        return answers.compose(found, scored.labels, hits, recogniser.far, asked, itself)

    def _all_labels(self, recognition: Recognition) -> _Scored | None:
        table = self._store.label_table(recognition.key, recognition.recogniser.rows)
        if table is None:
            return None
        if self._last is None or self._last.table is not table:
            keep = np.array([label != UNLABELLED for label in table.labels], bool)
            labels = [label for label in table.labels if label != UNLABELLED]
            scores = recognition.recogniser.scores(table.counts[keep], table.sums[keep])
            self._last = _Scored(table, labels, scores)
        return self._last


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
    return _Scored(LabelTable(labels, *sums), labels, recogniser.scores(*sums))
