"""The results of a comparison as plain values, and its files comparison.json and comparison.csv."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nearkin.compare import recommendation, trial
from nearkin.compare.final_evaluation import BASELINE, METRICS, UNTRAINED
from nearkin.compare.loss_search import LossResult, Trial
from nearkin.compare.plan import Plan
from nearkin.compare.protocol import Job, Setup, TestSet
from nearkin.compare.significance import (
    FORMS,
    Floats,
    against_best,
    by_model,
    figures_of,
    mean_of,
    plain_mean,
    ranks,
    student_interval,
)
from nearkin.core import files
from nearkin.core.spreadsheet import csv_text
from nearkin.core.versions import version_of

__all__ = ["build_results", "commentary", "write"]

_LEVELS = (0.5, 0.8, 0.95)  # shares of the best loss's final value


def build_results(
    setup: Setup,
    test_set: TestSet,
    plan: Plan,
    finished: Mapping[str, LossResult],
    figures: Mapping[str, list[dict[str, Floats]]],
    losses: Sequence[str],
) -> dict[str, Any]:
    """All numbers that the files and the page show, as plain values."""
    assert test_set.held_out.labels is not None
    groups = torch.from_numpy(test_set.held_out.labels)
    values = {loss: {form: mean_of(figures[loss], form) for form in FORMS} for loss in finished}  # (Q, M) each
    order = sorted(finished, key=lambda loss: (-plain_mean(values[loss]["separated"][:, 0]), loss))
    rows = [_row(loss, finished[loss], values[loss], figures[loss], groups) for loss in order]
    for form in FORMS:
        ranks(rows, [values[loss][form][:, 0] for loss in order], groups, form)
        against_best(rows, {loss: values[loss][form][:, 0] for loss in order}, figures, groups, form)
    levels, curves = _levels(finished), _mean_curves(finished, plan)
    return {
        "versions": {name: version_of(name) for name in ("nearkin", "torch", "optuna")},
        "source": setup.recipe.data.source,
        "protocol": _protocol(setup, test_set, plan, len(finished)),
        "table": rows,
        "references": _references(figures, groups),
        "curves": curves,
        "reach": {"levels": levels, "steps": _steps_to(levels, curves)},
        "rising": {loss: _still_rising(one, plan) for loss, one in finished.items()},
        "choices": {loss: _choices(one) for loss, one in finished.items()},
        "trials": {loss: [_trial(one_trial, plan) for one_trial in one.trials] for loss, one in finished.items()},
        "timing": {loss: _timing(one) for loss, one in finished.items()},
        "unfinished": [loss for loss in losses if loss not in finished],
    }


def commentary(results: dict[str, Any], command: str, notes: Sequence[str], flags: Mapping[str, Any]) -> dict[str, Any]:
    """The text beside the numbers: the command that reproduces them, notes, the recommendation."""
    return {"command": command, "notes": list(notes), "recommendation": recommendation.recommend(results, flags)}


def write(folder: Path, results: dict[str, Any]) -> None:
    """comparison.json and comparison.csv; the CSV contains nothing that depends on time."""
    with files.explained(f"{folder}: the comparison", "make room, then the same command continues"):
        files.write_json(folder / "comparison.json", results)
        files.write_text(folder / "comparison.csv", _csv(results))


def _csv(results: dict[str, Any]) -> str:
    ends = ("", "_low", "_high")
    names = [f"{form}_{metric}{end}" for form in FORMS for metric in METRICS for end in ends]
    head = ["loss", "rank", "rank_low", "rank_high", *names, "models_low", "models_high"]
    head += [f"{form}_{what}" for form in FORMS for what in ("difference", "p", "verdict")]
    head += [
        "validation",
        "validation_default",
        *(f"steps_to_{level:.4f}" for level in results["reach"]["levels"]),
        "setting",
    ]
    lines: list[list[Any]] = [head]
    for row in results["table"]:
        numbers = [row[form][m][end] for form in FORMS for m in METRICS for end in ("value", "low", "high")]
        line = [row["loss"], row["separated"]["rank"], *row["separated"]["ranks"], *numbers, *row["models"]]
        for form in FORMS:
            against = row[form]["against"]
            line += [against["difference"], against["p"], against["verdict"]]
        line += [row["validation"], row["validation_default"], *results["reach"]["steps"][row["loss"]]]
        lines.append(["" if one is None else one for one in line] + [setting_words(row["setting"])])
    for row in results["references"]:
        numbers = [
            row[form][m][end] if form in row else ""
            for form in FORMS
            for m in METRICS
            for end in ("value", "low", "high")
        ]
        blank = [""] * (len(head) - 4 - len(numbers))
        lines.append([row["loss"], "", "", "", *("" if one is None else one for one in numbers), *blank])
    return csv_text(lines)


def setting_words(setting: Mapping[str, Any]) -> str:
    """loss.margin=0.2 optimizer.lr=0.001"""
    return " ".join(f"{key}={value}" for key, value in setting.items())


def _row(
    loss: str,
    one: LossResult,
    values: Mapping[str, Floats],
    tests: Sequence[Mapping[str, Floats]],
    groups: torch.Tensor,
) -> dict[str, Any]:
    row: dict[str, Any] = {"loss": loss, "setting": one.best.setting}
    row |= {form: dict(figures_of(values[form], groups)) for form in FORMS}
    row["models"] = student_interval(by_model(tests, "separated"))
    row["validation"], row["validation_default"] = one.best.value, one.trials[0].value
    row["tuned"] = one.best.number > 0
    row["broken"] = [result["ended"] for result in one.finals.values() if result["ended"] not in trial.ENDS]
    return row


def _references(figures: Mapping[str, list[dict[str, Floats]]], groups: torch.Tensor) -> list[dict[str, Any]]:
    rows = []
    for name in (UNTRAINED, BASELINE):
        forms = [form for form in FORMS if form in figures[name][0]]
        rows.append({"loss": name} | {form: figures_of(mean_of(figures[name], form), groups) for form in forms})
    return rows


def _choices(one: LossResult) -> dict[str, Any]:
    """Everything that was chosen without test items."""
    steps = {f"seed {seed}, fold {fold + 1}": result["step"] for (seed, fold), result in one.finals.items()}
    return {"trial": one.best.number, "setting": one.best.setting, "steps": steps}


def _trial(one: Trial, plan: Plan) -> dict[str, Any]:
    return {
        "number": one.number,
        "setting": one.setting,
        "value": one.value,
        "folds": {str(fold + 1): result["value"] for fold, result in sorted(one.folds.items())},
        "ended": [result["ended"] for _, result in sorted(one.folds.items())],
        "complete": len(one.folds) == plan.folds,
    }


def _protocol(setup: Setup, test_set: TestSet, plan: Plan, losses: int) -> dict[str, Any]:
    folds = setup.folds(plan.folds)
    sizes = [{"train": _size(setup, fold.train), "validation": _size(setup, fold.val)} for fold in folds.parts]
    return plan._asdict() | {
        "encoder": folds.recipe.encoder["name"],
        "sampler": folds.recipe.sampler,
        "split": setup.split.partition(":")[0],
        "fold_sizes": sizes,
        "test": setup.test_size,
        "queries": len(test_set.held_out.indices),
        "losses": losses,
        "baseline": setup.prepared(Job("search", "contrastive", {}, 0, 0, plan.folds, plan.steps)).baseline,
    }


def _size(setup: Setup, of: NDArray[np.int64]) -> dict[str, int]:
    return {"items": len(of), "classes": len(np.unique(setup.labels[of]))}


def _mean_curves(finished: Mapping[str, LossResult], plan: Plan) -> dict[str, list[list[float]]]:
    """[[step, best so far], …]: means over the final trainings; a stopped training keeps its best value."""
    curves = {}
    for loss, one in finished.items():
        lines = [_best_so_far(result["curve"], plan) for result in one.finals.values()]
        steps = trial.validation_steps(plan.steps)
        curves[loss] = [[step, sum(line[i] for line in lines) / len(lines)] for i, step in enumerate(steps)]
    return curves


def _levels(finished: Mapping[str, LossResult]) -> list[float]:
    """Levels of validation MAP@R: shares of the final value of the best loss."""
    ends = [sum(r["value"] for r in one.finals.values()) / len(one.finals) for one in finished.values()]
    return [round(share * max(ends), 4) for share in _LEVELS]


def _steps_to(levels: Sequence[float], curves: Mapping[str, list[list[float]]]) -> dict[str, list[int | None]]:
    """The step of the first validation whose mean reaches each level; None if it never does."""
    return {
        loss: [next((int(step) for step, value in curve if value >= level), None) for level in levels]
        for loss, curve in curves.items()
    }


def _still_rising(one: LossResult, plan: Plan) -> float:
    """The share of final trainings with their best value at the last step: more steps may help these."""
    late = [int(result["step"]) == plan.steps for result in one.finals.values()]
    return sum(late) / len(late)


def _timing(one: LossResult) -> dict[str, float | None]:
    """Milliseconds per step (median of the final trainings), and seconds per training."""
    rates = [1000 * r["seconds"] / r["steps"] for r in one.finals.values() if r["steps"]]
    seconds = [r["seconds"] for r in one.finals.values()]
    return {"ms_per_step": median(rates) if rates else None, "seconds": sum(seconds) / len(seconds)}


def _best_so_far(curve: Sequence[Sequence[float]], plan: Plan) -> list[float]:
    line, best = [], 0.0
    values = {int(step): value for step, value in curve}
    for step in trial.validation_steps(plan.steps):
        best = max(best, values.get(step, best))
        line.append(best)
    return line
