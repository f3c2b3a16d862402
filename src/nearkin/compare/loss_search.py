"""What one loss goes through: rounds of a search on the folds, the best setting, then several seeds of it.

A generator: it yields jobs, is sent their results in the same order, and returns what it has found. What it asks for
next depends on these results alone, so all losses can be worked on at once, in any number of processes.
"""

from collections.abc import Generator
from typing import Any, NamedTuple

from nearkin.compare import settings_search, trial
from nearkin.compare.plan import Plan, rounds
from nearkin.compare.protocol import Job
from nearkin.compare.settings_search import Tried
from nearkin.losses.search_ranges import Searched

__all__ = ["Found", "Trial", "chosen", "finals", "searched"]

_PATIENT = 0.3  # part of a training before it can be called hopeless

Result = dict[str, Any]
Jobs = Generator[list[Job], list[Result], "Found"]


class Trial(NamedTuple):
    """One setting: what each fold gave that it was trained on. Number 0 is the default."""

    number: int
    setting: dict[str, Any]
    folds: dict[int, Result]

    @property
    def value(self) -> float:
        """Mean best validation MAP@R over its folds."""
        return float(sum(self.folds[f]["value"] for f in sorted(self.folds)) / len(self.folds))


class Found(NamedTuple):
    """All trials of a loss, the best of those that saw every fold, and its final trainings as (seed, fold)."""

    loss: str
    trials: list[Trial]
    best: Trial
    finals: dict[tuple[int, int], Result]


def searched(loss: str, space: dict[str, Searched], start: dict[str, Any], plan: Plan) -> Jobs:
    """The whole road of a loss. start: its default setting, the first trial."""
    trials: list[Trial] = []
    for number, (count, kept) in enumerate(rounds(plan.trials)):
        asked = _asked(loss, space, start, trials, count, plan)
        first = number % plan.folds  # each round is screened on another fold
        bar = _bar(trials, first, plan)
        new = [Trial(len(trials) + i, setting, {}) for i, setting in enumerate(asked)]
        results = yield [_job(loss, one, first, plan, None if one.number == 0 else bar) for one in new]
        for one, result in zip(new, results, strict=True):
            one.folds[first] = result
        going_on = sorted(new, key=lambda one: (one.number != 0, -one.folds[first]["value"], one.number))[:kept]
        others = [(one, fold) for one in going_on for fold in range(plan.folds) if fold != first]
        results = yield [_job(loss, one, fold, plan, None) for one, fold in others]
        for (one, fold), result in zip(others, results, strict=True):
            one.folds[fold] = result
        trials += new
    best = chosen(trials, plan.folds)
    places = [(seed, fold) for seed in range(1, plan.seeds + 1) for fold in range(plan.folds)]
    results = yield finals(loss, best.setting, plan)
    return Found(loss, trials, best, dict(zip(places, results, strict=True)))


def chosen(trials: list[Trial], folds: int) -> Trial:
    """The best mean over all folds; of equals the first."""
    return max((one for one in trials if len(one.folds) == folds), key=lambda one: (one.value, -one.number))


def finals(loss: str, setting: dict[str, Any], plan: Plan) -> list[Job]:
    """Seeds that the search has not used, so that its luck is not carried on."""
    return [
        Job("final", loss, setting, plan.seed * 1000 + seed, fold, plan.folds, plan.steps)
        for seed in range(1, plan.seeds + 1)
        for fold in range(plan.folds)
    ]


def _job(loss: str, one: Trial, fold: int, plan: Plan, bar: list[float] | None) -> Job:
    return Job("search", loss, one.setting, plan.seed * 1000, fold, plan.folds, plan.steps, bar)


def _asked(
    loss: str, space: dict[str, Searched], start: dict[str, Any], trials: list[Trial], count: int, plan: Plan
) -> list[dict[str, Any]]:
    """The settings of a round; the first round begins with the default."""
    if not trials:
        return [start, *settings_search.suggested(loss, space, [], count - 1, plan.seed)]
    usual = {fold: result["value"] for fold, result in trials[0].folds.items()}
    tried = []
    for one in trials:  # against the default on the same folds: some folds are easier than others
        gains = [result["value"] - usual[fold] for fold, result in sorted(one.folds.items())]
        tried.append(Tried(one.setting, sum(gains) / len(gains)))
    return settings_search.suggested(loss, space, tried, count, plan.seed)


def _bar(trials: list[Trial], fold: int, plan: Plan) -> list[float] | None:
    """At each validation the worst best-so-far of the settings that earlier rounds let through; 0 while it is early."""
    before = [one.folds[fold]["curve"] for one in trials if len(one.folds) == plan.folds and one.folds[fold]["curve"]]
    if not before:
        return None
    places = trial.marks(plan.steps)
    bar = []
    for i, step in enumerate(places):
        so_far = [max(value for _, value in curve[: i + 1]) for curve in before]
        bar.append(min(so_far) if step >= _PATIENT * plan.steps else 0.0)
    return bar
