"""The comparison: plan, search, final trainings; then, when nothing is left to be chosen, the test."""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearkin.compare import loss_search, settings_search, table
from nearkin.compare import plan as plans
from nearkin.compare.begun import Begun, asked_of, keep, plan_of
from nearkin.compare.executor import Hands, Here, hands
from nearkin.compare.plan import Plan
from nearkin.compare.protocol import Bench, Job, Opened, open_bench, refuse
from nearkin.compare.schedule_trials import Schedule, each
from nearkin.compare.study import Study
from nearkin.compare.test_stage import BASELINE, UNTRAINED
from nearkin.core import checks
from nearkin.training.config import defaults
from nearkin.training.config.recipe import Recipe
from nearkin.training.loop import Callback

__all__ = ["Comparison", "compare"]

_STOP = 0.92  # of the budget: what is not trained by then is left out, so that test and report have their time
_MEASURED = 10_000  # steps of the schedule in whose first ones the rate is measured


@dataclass(frozen=True)
class Comparison:
    """What a comparison has come to: its folder, and everything that its files say."""

    folder: Path
    results: dict[str, Any]


def compare(
    recipe: Recipe,
    losses: list[str],
    out: str | Path,
    *,
    budget: float | None = None,
    steps: int | None = None,
    trials: int | None = None,
    folds: int | None = None,
    seeds: int | None = None,
    seed: int = 0,
    jobs: int | None = None,
    flags: dict[str, Any] | None = None,
    callback: Callback = lambda _: None,
) -> Comparison:
    """Compares losses on the source of a recipe, into a folder; a comparison that was begun there goes on.

    budget: seconds that the whole may take. steps: of a training; trials: settings searched a loss; seeds: final
    trainings a fold; jobs: trainings at a time. Writes study.db, comparison.json, comparison.csv and models/ of the
    best loss. flags: what else the command that asks for this table has to say.
    """
    began = time.monotonic()
    settings_search.needs_optuna()
    refuse(recipe)
    given = {"steps": steps, "trials": trials, "folds": folds, "seeds": seeds, "seed": seed}
    _check(given, jobs)
    folder = _folder(out)
    bench = open_bench(recipe, callback)
    usual = _usual(bench, given)  # too few classes are said before there is a folder
    with _opened(folder) as study:
        begun = Begun(asked_of(recipe, losses), bench.fingerprint)
        plan = plan_of(study, begun, given)
        workers, count = hands(bench, folder / "models", jobs)
        try:
            if plan is None:
                plan = usual
                if budget is not None:
                    plan = _fitted(bench, study, workers, count, losses, usual, given, budget, began, callback)
                keep(study, begun, plan)
            said = plans.command(recipe.data.source, losses, plan, flags or {})
            notes = [*bench.notes, *_batches_note(losses)]
            callback(
                {"event": "planned", "plan": plan, "command": said, "losses": losses, "jobs": count, "notes": notes}
            )
            schedule = Schedule(_roads(bench, losses, plan), study, plans.trainings(plan) * len(losses), callback)
            if not schedule.run(workers, None if budget is None else began + _STOP * budget):
                workers.close()
                workers = Here(bench, folder / "models")
                _out_of_time(schedule, folder, callback)
            opened, figures = _tested(study, bench, workers, plan, schedule.found, callback)
        finally:
            workers.close()
        settings_search.write_studies(
            study.path, schedule.found, {loss: _space(bench, loss) for loss in schedule.found}
        )
        results = table.results(bench, opened, plan, schedule.found, figures, losses)
        results |= table.said(results, said, notes, flags or {})
        table.write(folder, results)
        if not results["unfinished"]:
            _drop_models(folder / "models", results["recommendation"]["loss"])
        callback({"event": "compared", "results": results, "seconds": time.monotonic() - began})
        return Comparison(folder, results)


def _check(given: dict[str, int | None], jobs: int | None) -> None:
    least = {"steps": 1, "trials": 1, "folds": 2, "seeds": 1, "seed": 0, "jobs": 1}
    for name, value in (given | {"jobs": jobs}).items():
        if value is not None:
            checks.integer(name, value, least[name])


def _folder(out: str | Path) -> Path:
    folder = Path(out)
    strange = folder.is_dir() and any(folder.iterdir()) and not (folder / "study.db").exists()
    if strange or folder.is_file():
        what = "is a file" if folder.is_file() else "is not empty and holds no comparison"
        raise ValueError(f"{folder}: {what}; choose another --out")
    return folder


@contextmanager
def _opened(folder: Path) -> Iterator[Study]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        study = Study(folder)
    except OSError as error:
        raise ValueError(f"{folder}: cannot be written ({error.strerror})") from None
    try:
        yield study
    finally:
        study.close()


def _usual(bench: Bench, given: dict[str, int | None]) -> Plan:
    """What is done where no budget says otherwise."""
    most = max(2, min(plans.FOLDS, bench.classes() // 2))
    numbers = {"steps": bench.usual()[0], "trials": plans.TRIALS, "folds": most, "seeds": plans.SEEDS, "seed": 0}
    plan = Plan(**{name: given[name] or number for name, number in numbers.items()})
    bench.shared(plan.folds)
    return plan


def _fitted(
    bench: Bench,
    study: Study,
    workers: Hands,
    jobs: int,
    losses: list[str],
    usual: Plan,
    given: dict[str, int | None],
    budget: float,
    began: float,
    callback: Callback,
) -> Plan:
    """What a budget allows by the rates measured now."""
    callback({"event": "measuring", "losses": losses})
    wanted = [Job("measure", loss, {}, 0, 0, usual.folds, _MEASURED) for loss in losses]
    # Each model is tested by itself and joined with others; ranking grows with the square of the items.
    larger = bench.tested["items"] / len(bench.shared(usual.folds).parts[0].val)
    rates = {
        job.loss: rate | {"test": rate["validation"] * (larger + larger**2)} for job, rate in each(workers, wanted)
    }
    study.note("rates", rates)
    plan = plans.fitted(budget, usual, given, rates, jobs, time.monotonic() - began)
    callback({"event": "fitted", "takes": plans.predicted(plan, rates, jobs), "budget": budget})
    return plan


def _space(bench: Bench, loss: str) -> dict[str, Any]:
    return settings_search.space(loss, bench.recipe, bench.usual()[1])


def _roads(bench: Bench, losses: list[str], plan: Plan) -> dict[str, loss_search.Jobs]:
    rate, found = bench.usual()[1], {}
    for loss in losses:
        space = settings_search.space(loss, bench.recipe, rate)
        found[loss] = loss_search.searched(loss, space, settings_search.default(loss, space, rate), plan)
    return found


def _batches_note(losses: list[str]) -> list[str]:
    """Losses that `nearkin train` gives other batches than they get here."""
    own = [f"{loss} ({defaults.SAMPLERS_OF[loss]})" for loss in losses if loss in defaults.SAMPLERS_OF]
    if not own:
        return []
    return [f"{' and '.join(own)} would have batches of another kind by default; here every loss has the same ones"]


def _out_of_time(schedule: Schedule, folder: Path, callback: Callback) -> None:
    """Goes on with the losses that are through, if there are any."""
    missing = [loss for loss in schedule.roads if loss not in schedule.found]
    way_out = "the same command with a larger --budget, or without one, goes on"
    kept = f"{schedule.done} of at most {schedule.total} trainings are kept in {folder}"
    if not schedule.found:
        raise ValueError(f"the budget was used up before any loss was through; {kept}: {way_out}")
    callback({"event": "note", "text": f"the budget was used up: {', '.join(missing)} not finished; {way_out}"})


def _tested(
    study: Study, bench: Bench, workers: Hands, plan: Plan, found: dict[str, loss_search.Found], callback: Callback
) -> tuple[Opened, dict[str, list[dict[str, Any]]]]:
    """The test items, opened now, and of every loss and reference its figures, seed by seed."""
    callback({"event": "testing"})
    opened = bench.opened()
    if (before := study.fact("test items")) not in (None, opened.fingerprint):
        raise ValueError(f"{study.path.parent}: the test items are not what they were; choose another --out")
    if before is None:
        study.note("test items", opened.fingerprint)
    seeds = [plan.seed * 1000 + number for number in range(1, plan.seeds + 1)]
    wanted = [
        Job("test", loss, one.best.setting, seed, 0, plan.folds, plan.steps, None, opened.fingerprint)
        for loss, one in found.items()
        for seed in seeds
    ]
    wanted += [Job("test", UNTRAINED, {}, seed, 0, plan.folds, plan.steps, None, opened.fingerprint) for seed in seeds]
    wanted += [Job("test", BASELINE, {}, seeds[0], 0, plan.folds, plan.steps, None, opened.fingerprint)]
    for job, figures in each(workers, [job for job in wanted if study.tested(job) is None]):
        study.keep_test(job, figures)
        callback({"event": "tested", "job": job})
    kept: dict[str, list[dict[str, Any]]] = {}
    for job in wanted:
        kept.setdefault(job.loss, []).append(study.tested(job) or {})
    return opened, kept


def _drop_models(home: Path, best: str) -> None:
    """Of all models those of the best loss are kept; the others would fill the disk, and can be trained again."""
    for folder in home.iterdir() if home.is_dir() else ():
        if folder.name != best:
            shutil.rmtree(folder, ignore_errors=True)
