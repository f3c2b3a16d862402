"""Who is this, or nobody we know: what a gallery has learned of itself, and its answers."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearkin.evaluation.arrays import Counts, Floats
from nearkin.evaluation.recognition import events
from nearkin.evaluation.recognition.events import FARTHEST, NONE, RIGHT, Far
from nearkin.evaluation.recognition.label_model import Directions, LabelScores
from nearkin.evaluation.recognition.simulation import (
    Codes,
    Hits,
    Queries,
    Questions,
    Rows,
    best_labels,
    folds_of,
    learn,
    only_these,
)

__all__ = ["FEWEST", "TOO_FEW", "Answers", "Recogniser", "fit", "relative"]

FEWEST = 3  # labels
TOO_FEW = f"at least {FEWEST} labels are needed to tell a known item from an unknown one"


class Answers(NamedTuple):
    """best (Q,): the best label's number. shares (Q, 3): of the events at the prior. score (Q,): log P(right) / P(none)
    at prior ½, which the far curve is of. scores (Q, C): of the labels."""

    best: Codes
    shares: Floats
    score: Floats
    scores: Floats


class Recogniser(NamedTuple):
    """mean (D,), basis (D, K), between (K,): the model of the labels, for signed roots of rows. strangers (2, F): mean
    and spread of their features. weights (F, 3): of the events. far: what strangers reach."""

    mean: Floats
    basis: Floats
    between: Floats
    strangers: Floats
    weights: Floats
    far: Far

    def rows(self, rows: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
        """(n, K) coordinates of rows (n, D) of unit length."""
        return Directions(self.mean, self.basis).rows(rows)

    def scores(self, counts: Counts, sums: Floats) -> LabelScores:
        """sums (C, K): of the coordinates of each label's rows."""
        return LabelScores(self.between, counts, sums)

    def answer(
        self, queries: Floats, hits: Hits, scores: LabelScores, prior: float = 0.5, only_near: bool = False
    ) -> Answers:
        """queries (Q, K): coordinates; hits: their nearest rows; prior: the share of strangers among the queries."""
        values = scores(queries)
        if only_near:
            values = only_these(values, hits.codes)
        best, first, second = best_labels(values)
        x = relative(events.features(first, second, *hits.labels(best)), self.strangers)
        logits = x @ self.weights
        shares = events.softmax(logits + np.log([1 - prior, 1 - prior, prior]))
        return Answers(best, shares, logits[:, RIGHT] - logits[:, NONE], values)


def fit(
    rows: Rows, counts: Counts, *, only_near: bool = False, queries: Queries | None = None, seed: int = 0
) -> Recogniser:
    """Learns from a gallery's own rows, or from queries to it; see `simulation.learn`."""
    if (counts > 0).sum() < FEWEST:
        raise ValueError(TOO_FEW)
    learned = learn(rows, counts, only_near=only_near, queries=queries, seed=seed)
    asked = learned.questions
    stranger = asked.event == NONE
    of_strangers = asked.features[stranger]
    strangers = np.stack([of_strangers.mean(0), of_strangers.std(0) + 1e-6])
    x = relative(asked.features, strangers)
    weights = _fitted(x, asked, np.ones(len(x), bool))
    score = np.empty(len(x))
    folds = folds_of(int(asked.classes.max()) + 1, int(counts.sum()), seed)
    for fold in np.unique(folds[asked.classes]):  # strangers are judged by weights that have not seen their label
        mine = folds[asked.classes] == fold
        logits = x[mine] @ _fitted(x, asked, ~mine)
        score[mine] = logits[:, RIGHT] - logits[:, NONE]
    far = events.far_curve(score[stranger], asked.classes[stranger])
    model = learned.model
    directions = learned.directions
    basis = directions.basis @ model.basis
    mean = directions.mean + directions.basis @ model.mean
    return Recogniser(mean, basis, model.between, strangers, weights, far)


def _fitted(x: Floats, asked: Questions, which: Counts) -> Floats:
    """Each label weighs the same, and all strangers as much as all known items."""
    event, classes = asked.event[which], asked.classes[which]
    known = event != NONE
    if not known.any() or known.all():
        return events.DEFAULT if known.any() else events.SINGLE
    weight = np.empty(len(event))
    for some in (known, ~known):
        size = np.bincount(classes[some])[classes[some]]
        weight[some] = 1 / size / (1 / size).sum()
    return events.fit_events(x[which], event, weight * len(event) / 2, events.DEFAULT)


def relative(features: Floats, strangers: Floats) -> Floats:
    """(n, 1 + F): a constant, and each feature in standard deviations of those of strangers (2, F)."""
    x = np.clip((features - strangers[0]) / strangers[1], -FARTHEST, FARTHEST)
    return np.asarray(np.c_[np.ones(len(x)), x])
