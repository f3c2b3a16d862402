"""Who is this: the best candidate always, how surely, and whether that is sure enough to name it."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from nearkin.core import checks
from nearkin.evaluation.recognition import NONE, NOTHING, PRIOR, RIGHT, SURE, Answers, Far, softmax
from nearkin.gallery.results import Calibrator, Hit

__all__ = ["PRIOR", "SURE", "Asked", "Candidate", "FarStatement", "Identity", "by_pairs", "compose"]

SAME = 1e-6  # probability that an enrolled item is another one


class Candidate(NamedTuple):
    """A label with its nearest row. confidence: the probability of this label; None where there is none."""

    label: str
    similarity: float
    confidence: float | None
    id: int


class FarStatement(NamedTuple):
    """The false-accept rate per query. asked: the rate. expected: the share of strangers that are expected to be named;
    at_most: its bound, with 95 % confidence if strangers are like the gallery's labels. classes: behind both. proven:
    whether so many labels can show the rate at all."""

    asked: float
    expected: float
    at_most: float
    classes: int
    proven: bool


class Identity(NamedTuple):
    """Who a query is. verdict: "named", "unsure" or "unknown". label: None unless it is named; the best candidate is
    `candidates[0]` whatever the verdict. p_right: that the best candidate is right; p_unknown: that no label of the
    gallery is; the rest: that another label is. confidence: that of a named label, else p_unknown.

    similarity: of the best candidate's nearest row. score: log P(right) / P(unknown) at even prior; with `far` the
    label is named where it is above `threshold`. prior: the share of strangers that the probabilities assume. classes:
    labels that the gallery has learned from. note: what is missing for a full answer, one sentence, or "". quality: of
    the query, as of a `Hit`. Probabilities are None where the gallery has learned nothing yet.
    """

    label: str | None
    confidence: float | None
    similarity: float | None
    threshold: float | None
    far: FarStatement | None
    candidates: list[Candidate]
    note: str
    classes: int | None = None
    quality: float | None = None
    verdict: str = "unsure"
    p_right: float | None = None
    p_unknown: float | None = None
    score: float | None = None
    prior: float | None = None

    @property
    def unknown(self) -> bool:
        """Whether no label is named."""
        return self.label is None


class Asked(NamedTuple):
    """What a caller wants to know. far: the share of strangers that may be named; strict: as a bound, or refused.
    unknown_prior: the share of strangers among the queries. sure: the probability that names a label."""

    far: float | None = None
    unknown_prior: float = PRIOR
    sure: float = SURE
    strict: bool = False

    def check(self) -> None:
        if self.far is not None:
            checks.between("far", self.far, 0, 1)
        checks.between("unknown_prior", self.unknown_prior, 0, 1)
        if not 0.5 <= self.sure < 1:
            raise ValueError(f"sure must be at least 0.5 and below 1, got {self.sure:g}")
        if self.strict and self.far is None:
            raise ValueError("strict needs far, the rate that must not be exceeded")


def compose(
    answers: Answers,
    numbers: Mapping[str, int],
    hits: Sequence[Hit],
    best: str,
    far: Far,
    asked: Asked,
    itself: str | None,
) -> Identity:
    """The answer to one query. numbers: of labels in `answers`; best: the best one. hits: labelled, nearest first, with
    one of the best label. itself: the label of this very item, where it is enrolled."""
    nearest: dict[str, Hit] = {}
    for hit in hits:
        nearest.setdefault(hit.label, hit)
    right, none = float(answers.shares[0, RIGHT]), float(answers.shares[0, NONE])
    scores = answers.scores[0].copy()
    scores[int(answers.best[0])] = -np.inf
    others = softmax(scores[None])[0] if (scores > NOTHING).any() else np.zeros_like(scores)
    competing = [label for label in nearest if numbers.get(label, len(others)) < len(others)]
    rest = np.minimum((1 - right - none) * others, right)  # of the others none is likelier than the best
    probability = {label: float(rest[numbers[label]]) for label in competing}
    probability[best] = right
    if itself is not None:
        right, none = 1 - SAME, SAME / 2
        probability = {label: SAME / 2 * p for label, p in probability.items()} | {itself: right}
    first = best if itself is None else itself
    order = sorted(
        nearest, key=lambda label: (label != first, -probability.get(label, 0.0), -nearest[label].similarity)
    )
    candidates = [
        Candidate(label, nearest[label].similarity, probability.get(label, 0.0), nearest[label].id) for label in order
    ]
    score = float(answers.score[0])
    if asked.far is None:
        verdict = _verdict(right, none, asked.sure)
        threshold, statement, note = None, None, ""
    else:
        threshold, statement, note = _threshold(far, asked.far, asked.strict)
        verdict = "named" if score > threshold or itself is not None else "unknown"
    named = verdict == "named"
    return Identity(
        first if named else None,
        right if named else none,
        candidates[0].similarity,
        threshold,
        statement,
        candidates,
        note,
        verdict=verdict,
        p_right=right,
        p_unknown=none,
        score=score,
        prior=asked.unknown_prior,
    )


def _verdict(right: float, none: float, sure: float) -> str:
    return "named" if right >= sure else "unknown" if none >= sure else "unsure"


def _threshold(far: Far, asked: float, strict: bool) -> tuple[float, FarStatement, str]:
    """The smallest score whose expected rate, or bound where it is strict, is within the asked one."""
    rates = far.at_most if strict else far.expected
    within = np.flatnonzero(rates <= asked)
    at = int(within[0]) if len(within) else len(rates) - 1
    proven, note = bool(len(within)), ""
    least = f"{far.classes:,} labels can show {_percent(float(rates[-1]))} at the least; you asked {_percent(asked)}"
    if not proven and strict:
        raise ValueError(
            f"far must be a rate that the labels can bound: {least}; ask without strict for an expectation"
        )
    if not proven:
        note = f"not proven: {least}"
    statement = FarStatement(asked, float(far.expected[at]), float(far.at_most[at]), far.classes, proven)
    return float(far.score[at]), statement, note


def _percent(rate: float) -> str:
    return f"{100 * rate:.2g} %"


def by_pairs(
    hits: Sequence[Hit], note: str, asked: Asked, calibrator: Calibrator | None, itself: str | None
) -> Identity:
    """The answer of a gallery that has learned nothing of its labels: the nearest of each, by what a calibration of
    pairs makes of the similarities, where there is one. note: why it has not."""
    statement = None
    if asked.far is not None:  # no rate can be shown, so nothing is named but what is enrolled
        if asked.strict:
            raise ValueError(f"far must be a rate that the labels can bound, got {asked.far:g}: {note}")
        statement = FarStatement(asked.far, 1.0, 1.0, 0, False)
    nearest: dict[str, Hit] = {}
    for hit in hits:
        nearest.setdefault(hit.label, hit)
    if not nearest:
        return Identity(None, None, None, None, statement, [], note)
    labels, shares, none = list(nearest), None, None
    if itself is not None:
        none, shares = SAME / 2, [1 - SAME if label == itself else 0.0 for label in labels]
    elif calibrator is not None:  # each label equally probable beforehand
        ratios = np.exp([min(calibrator.log_ratio(nearest[label].similarity), 600.0) for label in labels])
        weights = (1 - asked.unknown_prior) / len(labels) * ratios
        none = asked.unknown_prior / float(weights.sum() + asked.unknown_prior)
        shares = (weights / (weights.sum() + asked.unknown_prior)).tolist()
    order = sorted(range(len(labels)), key=lambda i: (-(shares[i] if shares else 0.0), -nearest[labels[i]].similarity))
    candidates = [
        Candidate(labels[i], nearest[labels[i]].similarity, shares[i] if shares else None, nearest[labels[i]].id)
        for i in order
    ]
    first = candidates[0]
    verdict = "unsure"
    if none is not None and (statement is None or itself is not None):
        verdict = _verdict(first.confidence or 0.0, none, asked.sure)
    named = verdict == "named"
    return Identity(
        first.label if named else None,
        first.confidence if named else none,
        first.similarity,
        None,
        statement,
        candidates,
        note,
        verdict=verdict,
        p_right=first.confidence,
        p_unknown=none,
        prior=None if none is None else asked.unknown_prior,
    )
