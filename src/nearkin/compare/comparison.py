"""The comparison: plan, search, final trainings; then, when everything is chosen, the test."""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearkin.compare import loss_search, table
from nearkin.compare import plan as plans
from nearkin.compare.executor import Executor, InProcess, Schedule, make_executor, run_all
from nearkin.compare.final_evaluation import BASELINE, UNTRAINED
from nearkin.compare.plan import Plan
from nearkin.compare.protocol import Job, Setup, TestSet, check_comparable, open_setup
from nearkin.compare.study import Request, Study, load_plan, requested_settings, save_plan
from nearkin.core import checks
from nearkin.training.config import defaults
from nearkin.training.config.recipe import Recipe
from nearkin.training.loop import Callback

__all__ = ["Comparison", "compare"]

_STOP = 0.92  # of the budget: losses not trained by then are left out, so that there is time for test and report
_MEASURED_STEPS = 10_000  # length of the schedule in whose first steps the speed is measured


@dataclass(frozen=True)
class Comparison:
    """A finished comparison: its folder, and the content of its comparison.json."""

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
    """Compares losses on the source of a recipe; a comparison that was begun in the folder `out` continues.

    budget: seconds for everything. steps: per training; trials: settings searched per loss; seeds: final trainings per
    fold; jobs: trainings at a time. Writes study.db, comparison.json, comparison.csv and models/ of the best loss.
    flags: other flags of the command that reproduces this table.
    """
    began = time.monotonic()
    loss_search.require_optuna()
    check_comparable(recipe)
    numbers = {"steps": steps, "trials": trials, "folds": folds, "seeds": seeds, "seed": seed}
    _check(numbers, jobs)
    folder = _check_folder(out)
    setup = open_setup(recipe, callback)
    default = _default_plan(setup, numbers)  # what cannot be divided is refused before the folder is made
    with _open_study(folder) as study:
        request = Request(requested_settings(recipe, losses), setup.fingerprint)
        plan = load_plan(study, request, numbers)
        executor, count = make_executor(setup, folder / "models", jobs)
        try:
            if plan is None:
                plan = default
                if budget is not None:
                    plan = _fit_plan(setup, study, executor, count, losses, default, numbers, budget, began, callback)
                save_plan(study, request, plan)
            command = plans.command(recipe.data.source, losses, plan, flags or {})
            notes = [*setup.notes, *_batches_note(losses)]
            planned = {"event": "planned", "plan": plan, "command": command, "losses": losses, "jobs": count}
            callback(planned | {"notes": notes, "sampler": setup.folds(plan.folds).recipe.sampler})
            schedule = Schedule(
                _searches(setup, losses, plan), study, plans.training_count(plan) * len(losses), callback
            )
            if not schedule.run(executor, None if budget is None else began + _STOP * budget):
                executor.close()
                executor = InProcess(setup, folder / "models")
                _out_of_time(schedule, folder, callback)
            test_set, figures = _test(study, setup, executor, plan, schedule.finished, callback)
        finally:
            executor.close()
        results = table.build_results(setup, test_set, plan, schedule.finished, figures, losses)
        results |= table.commentary(results, command, notes, flags or {})
        table.write(folder, results)
        if not results["unfinished"]:
            _drop_models(folder / "models", results["recommendation"]["loss"])
        callback({"event": "compared", "results": results, "seconds": time.monotonic() - began})
        return Comparison(folder, results)


def _check(numbers: dict[str, int | None], jobs: int | None) -> None:
    minimum = {"steps": 1, "trials": 1, "folds": 2, "seeds": 1, "seed": 0, "jobs": 1}
    for name, value in (numbers | {"jobs": jobs}).items():
        if value is not None:
            checks.integer(name, value, minimum[name])


def _check_folder(out: str | Path) -> Path:
    folder = Path(out)
    foreign = folder.is_dir() and any(folder.iterdir()) and not (folder / "study.db").exists()
    if foreign or folder.is_file():
        what = "is a file" if folder.is_file() else "is not empty and contains no comparison"
        raise ValueError(f"{folder}: {what}; choose another --out")
    return folder


@contextmanager
def _open_study(folder: Path) -> Iterator[Study]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        study = Study(folder)
    except OSError as error:
        raise ValueError(f"{folder}: cannot be written ({error.strerror})") from None
    try:
        yield study
    finally:
        study.close()


def _default_plan(setup: Setup, numbers: dict[str, int | None]) -> Plan:
    """The plan without a budget."""
    defaults = {
        "steps": setup.default_steps_and_lr()[0],
        "trials": plans.TRIALS,
        "folds": setup.most_folds(plans.FOLDS),
        "seeds": plans.SEEDS,
        "seed": 0,
    }
    plan = Plan(**{name: numbers[name] or number for name, number in defaults.items()})
    setup.folds(plan.folds)
    return plan


def _fit_plan(
    setup: Setup,
    study: Study,
    executor: Executor,
    jobs: int,
    losses: list[str],
    default: Plan,
    numbers: dict[str, int | None],
    budget: float,
    began: float,
    callback: Callback,
) -> Plan:
    """The plan that fits into the budget, by the speeds measured now."""
    callback({"event": "measuring", "losses": losses})
    measured = [Job("measure", loss, {}, 0, 0, default.folds, _MEASURED_STEPS) for loss in losses]
    # Each model is tested by itself and concatenated with others; ranking is quadratic in the number of items.
    larger = setup.test_size["items"] / len(setup.folds(default.folds).parts[0].val)
    rates = {
        job.loss: rate | {"test": rate["validation"] * (larger + larger**2)}
        for job, rate in run_all(executor, measured)
    }
    study.set_fact("rates", rates)
    plan = plans.fit_to_budget(budget, default, numbers, rates, jobs, time.monotonic() - began)
    callback({"event": "fitted", "takes": plans.predicted_seconds(plan, rates, jobs), "budget": budget})
    return plan


def _searches(setup: Setup, losses: list[str], plan: Plan) -> dict[str, loss_search.JobGenerator]:
    lr, searches = setup.default_steps_and_lr()[1], {}
    for loss in losses:
        space = loss_search.search_space(loss, setup.recipe, lr)
        searches[loss] = loss_search.search(loss, space, loss_search.default_setting(loss, space, lr), plan)
    return searches


def _batches_note(losses: list[str]) -> list[str]:
    """Losses that have other batches by default in `nearkin train`."""
    other = [f"{loss} ({defaults.SAMPLERS_OF[loss]})" for loss in losses if loss in defaults.SAMPLERS_OF]
    if not other:
        return []
    return [
        f"{' and '.join(other)} would have other batches by default; in a comparison every loss has the same batches"
    ]


def _out_of_time(schedule: Schedule, folder: Path, callback: Callback) -> None:
    """Continues with the finished losses, if there are any."""
    missing = [loss for loss in schedule.searches if loss not in schedule.finished]
    way_out = "the same command with a larger --budget, or without one, continues"
    saved = f"{schedule.done} of at most {schedule.total} trainings are saved in {folder}"
    if not schedule.finished:
        raise ValueError(f"the budget was used up before any loss was finished; {saved}: {way_out}")
    callback({"event": "note", "text": f"the budget was used up: {', '.join(missing)} not finished; {way_out}"})


def _test(
    study: Study,
    setup: Setup,
    executor: Executor,
    plan: Plan,
    finished: dict[str, loss_search.LossResult],
    callback: Callback,
) -> tuple[TestSet, dict[str, list[dict[str, Any]]]]:
    """The test items, read now, and the figures of every loss and reference by seed."""
    callback({"event": "testing"})
    test_set = setup.open_test_set()
    if (before := study.fact("test items")) not in (None, test_set.fingerprint):
        raise ValueError(f"{study.path.parent}: the test items have changed; choose another --out")
    if before is None:
        study.set_fact("test items", test_set.fingerprint)
    seeds = [plan.seed * 1000 + number for number in range(1, plan.seeds + 1)]

    def test_job(loss: str, setting: dict[str, Any], seed: int) -> Job:
        return Job("test", loss, setting, seed, 0, plan.folds, plan.steps, None, test_set.fingerprint)

    jobs = [test_job(loss, one.best.setting, seed) for loss, one in finished.items() for seed in seeds]
    jobs += [test_job(UNTRAINED, {}, seed) for seed in seeds]
    jobs += [test_job(BASELINE, {}, seeds[0])]
    for job, figures in run_all(executor, [job for job in jobs if study.test_figures(job) is None]):
        study.add_test(job, figures)
        callback({"event": "tested", "job": job})
    by_loss: dict[str, list[dict[str, Any]]] = {}
    for job in jobs:
        by_loss.setdefault(job.loss, []).append(study.test_figures(job) or {})
    return test_set, by_loss


def _drop_models(home: Path, best: str) -> None:
    """Deletes all models but those of the best loss; the others would fill the disk and can be trained again."""
    for folder in home.iterdir() if home.is_dir() else ():
        if folder.name != best:
            shutil.rmtree(folder, ignore_errors=True)
