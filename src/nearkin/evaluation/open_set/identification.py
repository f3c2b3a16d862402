"""Who is this, or nobody we know: the answers of galleries of half of the classes, beside the truth."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nearkin.evaluation.arrays import Array, Floats, Ids, Progress, takes_arrays
from nearkin.evaluation.open_set import draws, event_rates, search_rates
from nearkin.evaluation.open_set.learned_gallery import LearnedGallery
from nearkin.evaluation.open_set.open_set_metrics import EXAMPLES, FPIRS, Classes, check_lists, classes_of, in_part
from nearkin.evaluation.open_set.search_rates import Trials
from nearkin.evaluation.recognition import FEWEST, PRIOR, SURE, Far
from nearkin.evaluation.retrieval.knn import BUDGET

__all__ = ["FARS", "identification"]

FARS = (0.1, 0.01)
REPEATS, SEARCHES = 5, 200_000  # fewer halves for large sets


class _Answers(NamedTuple):
    """Of all draws: the searches, by the score of the event model; shares (n, 3) of the events at even prior; above
    (n, F): whether the score exceeds the threshold of each rate; far: the curve of each draw."""

    trials: Trials
    shares: Floats
    above: NDArray[np.bool_]
    far: list[Far]


@takes_arrays
def identification(
    embeddings: Array,
    labels: Ids,
    *,
    examples: Sequence[int] = EXAMPLES,
    fpirs: Sequence[float] = FPIRS,
    fars: Sequence[float] = FARS,
    repeats: int | None = None,
    seed: int = 0,
    interval: bool = True,
    budget: int = BUDGET,
    progress: Progress | None = None,
    groups: Ids | None = None,
) -> dict[str, Any]:
    """How right the answers of `identify` are: a label, unsure, or nobody that is enrolled.

    Draws and searches are those of `open_set`: half of the classes is enrolled with `examples` items each. What answers
    has learned from these rows alone, as a gallery does, and nothing else. Per number of examples ("examples"):
      gain         share of right decisions where half of the searches has a mate and the likeliest of the three events
                   decides: the best label is right, another one is, none is. A search with a mate must be given its
                   label, one without must be called unknown. "oracle": the best gain of any threshold on the score
      dir@fpir=…   as in `open_set`, by the score log P(right) / P(none); also fnir@fpir=…, "auroc", "oscr", "curve"
      ece_unknown  expected calibration error of P(none), over 10 bins, half of the searches without a mate;
      ece_named    of P(right), where that is the likeliest event; "reliability" has the bins of both
      known        shares of the searches with a mate by verdict: "right", "wrong", "unsure", "unknown"; "strangers":
                   those without one: "named", "unsure", "unknown". At the defaults: named or unknown from a probability
                   of 0.7 on, where 30 % of the searches are expected to have no mate
      far          per rate of `fars`, which `identify` takes as `far`: {"asked", "expected" (what so many labels show),
                   "proven", "observed" (share of searches without a mate that are named), "interval", "right" (share of
                   the others that are named rightly), "verdict", "note"}. "kept": the interval holds the expected
                   rate; "exceeded", "below": it lies above, below; None without an interval
    An FPIR that so few searches cannot show is None, as is an ECE where nothing is named.

    repeats: 5, or fewer for large sets. interval: 95 % intervals over classes ("intervals"), by resampling them.
    groups, budget, progress: as in `open_set`; beyond the budget what a gallery of the enrolled rows learns from.
    """
    known = classes_of(embeddings, labels, groups)
    check_lists({"examples": examples, "fpirs": fpirs, "fars": fars}, repeats, seed, budget)
    possible, notes = draws.check_classes(known.classes, known.bursts, examples)
    repeats = repeats or max(2, min(REPEATS, SEARCHES // len(known.rows)))
    entries = []
    for at, number in enumerate(possible):
        enrolled = len(draws.enrollable(known.classes, known.bursts, number)) // 2
        if enrolled < FEWEST:
            some = f"{number} example{'s' * (number > 1)}"
            notes.append(f"{some}: identify is not measured, {enrolled} labels are enrolled, {FEWEST} are needed")
            continue
        report = None if progress is None else in_part(progress, at, len(possible))
        answers = _answers(embeddings, known, number, fars, repeats, seed, budget, report)
        entries.append(_entry(number, enrolled, answers, fpirs, fars, seed, interval, notes))
    return {
        "repeats": repeats,
        "prior": PRIOR,
        "sure": SURE,
        "examples": entries,
        "sentence": _rates_sentence(entries),
        "notes": list(dict.fromkeys(notes)),
    }


def _answers(
    embeddings: Tensor,
    known: Classes,
    examples: int,
    fars: Sequence[float],
    repeats: int,
    seed: int,
    budget: int,
    progress: Progress | None,
) -> _Answers:
    parts, curves = [], []
    for repeat in range(repeats):
        draw = draws.draw(known.classes, known.bursts, examples, repeat, seed)
        classes = known.classes[draw.probes]
        draw = draw._replace(enrolled=known.rows[draw.enrolled], probes=known.rows[draw.probes])
        gallery = LearnedGallery(embeddings, draw)
        best, shares, score = gallery.answers(embeddings, draw.probes, budget)
        curve = gallery.recogniser.far
        thresholds = np.array([curve.score[_place(curve, rate)] for rate in fars], np.float64)
        trials = Trials(score, best == draw.mate, draw.mate >= 0, classes)
        parts.append((*trials, shares, score[:, None] > thresholds))
        curves.append(curve)
        if progress is not None:
            progress((repeat + 1) * len(draw.probes), repeats * len(draw.probes))
    score, first, mated, classes, shares, above = (np.concatenate(column) for column in zip(*parts, strict=True))
    return _Answers(Trials(score, first, mated, classes), shares, above, curves)


def _place(curve: Far, rate: float) -> int:
    """The threshold of a rate; the strictest where so few labels cannot show it."""
    at = curve.at(rate)
    return len(curve.score) - 1 if at is None else at


def _entry(
    examples: int,
    labels: int,
    answers: _Answers,
    fpirs: Sequence[float],
    fars: Sequence[float],
    seed: int,
    interval: bool,
    notes: list[str],
) -> dict[str, Any]:
    """The figures of one number of examples."""
    trials, repeats = answers.trials, len(answers.far)
    nonmated = int((~trials.mated).sum()) // repeats
    quoted, note = search_rates.quotable(fpirs, nonmated)
    notes += [note] if note else []
    smallest = search_rates.smallest_fpir(nonmated)
    figures, _ = search_rates.figures(trials, fpirs, quoted, smallest, seed, interval)
    events = event_rates.event_figures(trials, answers.shares, seed, interval)
    ends = events.pop("intervals")
    if interval:
        figures["intervals"] |= ends
    entry = {
        "examples": examples,
        "labels": labels,
        "mated": int(trials.mated.sum()) // repeats,
        "nonmated": nonmated,
        "smallest_fpir": smallest,
        **figures,
        **events,
        **event_rates.verdict_shares(trials, answers.shares, PRIOR, SURE, interval),
        "far": [_far(answers, column, rate, interval) for column, rate in enumerate(fars)],
    }
    return entry | {"sentence": _sentence(entry)}


def _far(answers: _Answers, column: int, asked: float, interval: bool) -> dict[str, Any]:
    trials, above = answers.trials, answers.above[:, column]
    expected = float(np.mean([curve.expected[_place(curve, asked)] for curve in answers.far]))
    strange = ~trials.mated
    observed, low, high = float(above[strange].mean()), np.nan, np.nan
    if interval:
        low, high = event_rates.share_of(above[strange], trials.classes[strange])
    proven = all(curve.at(asked) is not None for curve in answers.far)
    note = (
        f"{answers.far[0].classes:,} labels can show {100 * expected:.2g} % at the least; {100 * asked:.2g} % was asked"
    )
    verdict = None if np.isnan(low) else "exceeded" if low > expected else "below" if high < expected else "kept"
    return {
        "asked": asked,
        "expected": expected,
        "proven": proven,
        "observed": observed,
        "interval": (low, high),
        "right": float((above & trials.first)[trials.mated].mean()),
        "verdict": verdict,
        "note": "" if proven else note,
    }


def _sentence(entry: dict[str, Any]) -> str:
    right, wrong, unsure = (_percent(entry["known"][verdict]) for verdict in ("right", "wrong", "unsure"))
    named, unsure_too = (_percent(entry["strangers"][verdict]) for verdict in ("named", "unsure"))
    return (
        f"Of {entry['labels']:,} labels identify names {right} of the known rightly, {wrong} wrongly, and {named} of "
        f"strangers; it is unsure of {unsure} of the known and {unsure_too} of strangers."
    )


def _rates_sentence(entries: Sequence[dict[str, Any]]) -> str:
    """Whether the rates hold."""
    rates = [rate for entry in entries for rate in entry["far"] if rate["verdict"] is not None]
    if not rates:
        return "Whether a rate asked of identify holds was not measured."
    worst = max(rates, key=lambda rate: float(rate["observed"] / rate["expected"]))
    figures = f"{_percent(worst['observed'])} of strangers named where {_percent(worst['expected'])} are expected"
    exceeded = sum(rate["verdict"] == "exceeded" for rate in rates)
    if exceeded:
        return f"identify names more strangers than expected at {exceeded} of {len(rates)} rates; worst: {figures}."
    some = "the rate" if len(rates) == 1 else f"all {len(rates)} rates"
    return f"identify names no more strangers than expected, at {some} asked; nearest to it: {figures}."


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
