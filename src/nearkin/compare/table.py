"""The table, and everything else that the files and the page of a comparison say, as plain values."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nearkin.compare import learning_curves, recommendation, trial
from nearkin.compare.loss_search import Found
from nearkin.compare.plan import Plan
from nearkin.compare.protocol import Bench, Job, Opened
from nearkin.compare.significance import (
    FORMS,
    Floats,
    against_best,
    by_model,
    figures_of,
    mean_of,
    plain_mean,
    ranks,
    spread,
)
from nearkin.compare.test_stage import BASELINE, METRICS, UNTRAINED
from nearkin.core import files
from nearkin.core.versions import version_of

__all__ = ["results", "said", "write"]


def results(
    bench: Bench,
    opened: Opened,
    plan: Plan,
    found: Mapping[str, Found],
    figures: Mapping[str, list[dict[str, Floats]]],
    losses: Sequence[str],
) -> dict[str, Any]:
    """All numbers that the files and the page show, as plain values."""
    assert opened.held.labels is not None
    groups = torch.from_numpy(opened.held.labels)
    values = {loss: {form: mean_of(figures[loss], form) for form in FORMS} for loss in found}  # (Q, M) each
    order = sorted(found, key=lambda loss: (-plain_mean(values[loss]["separated"][:, 0]), loss))
    rows = [_row(loss, found[loss], values[loss], figures[loss], groups) for loss in order]
    for form in FORMS:
        ranks(rows, [values[loss][form][:, 0] for loss in order], groups, form)
        against_best(rows, {loss: values[loss][form][:, 0] for loss in order}, figures, groups, form)
    level = learning_curves.levels(found, order)
    return {
        "versions": {name: version_of(name) for name in ("nearkin", "torch", "optuna")},
        "source": bench.recipe.data.source,
        "protocol": _protocol(bench, opened, plan, found),
        "table": rows,
        "references": _references(figures, groups),
        "curves": learning_curves.means(found, plan),
        "reach": {"levels": level, "steps": learning_curves.reached(found, plan, level)},
        "rising": {loss: learning_curves.still_rising(one, plan) for loss, one in found.items()},
        "choices": {loss: _choices(one) for loss, one in found.items()},
        "trials": {loss: [_trial(one_trial, plan) for one_trial in one.trials] for loss, one in found.items()},
        "timing": {loss: learning_curves.timing(one) for loss, one in found.items()},
        "unfinished": [loss for loss in losses if loss not in found],
    }


def said(results: dict[str, Any], command: str, notes: Sequence[str], flags: Mapping[str, Any]) -> dict[str, Any]:
    """What is said beside the numbers: how to get them again, what to note, what to do."""
    return {"command": command, "notes": list(notes), "recommendation": recommendation.recommended(results, flags)}


def write(folder: Path, results: dict[str, Any]) -> None:
    """comparison.json and comparison.csv; the CSV holds nothing that a clock decides."""
    with files.explained(f"{folder}: the comparison", "make room, then the same command goes on"):
        files.write_json(folder / "comparison.json", results)
        files.write_text(folder / "comparison.csv", _csv(results))


def _csv(found: dict[str, Any]) -> str:
    ends = ("", "_low", "_high")
    names = [f"{form}_{metric}{end}" for form in FORMS for metric in METRICS for end in ends]
    head = ["loss", "rank", "rank_low", "rank_high", *names, "models_low", "models_high"]
    head += [f"{form}_{what}" for form in FORMS for what in ("difference", "p", "verdict")]
    head += [
        "validation",
        "validation_default",
        *(f"steps_to_{level:.4f}" for level in found["reach"]["levels"]),
        "setting",
    ]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    for row in found["table"]:
        numbers = [row[form][m][end] for form in FORMS for m in METRICS for end in ("value", "low", "high")]
        line = [row["loss"], row["separated"]["rank"], *row["separated"]["ranks"], *numbers, *row["models"]]
        for form in FORMS:
            against = row[form]["against"]
            line += [against["difference"], against["p"], against["verdict"]]
        line += [row["validation"], row["validation_default"], *found["reach"]["steps"][row["loss"]]]
        writer.writerow(["" if one is None else one for one in line] + [setting_words(row["setting"])])
    for row in found["references"]:
        numbers = [
            row[form][m][end] if form in row else ""
            for form in FORMS
            for m in METRICS
            for end in ("value", "low", "high")
        ]
        blank = [""] * (len(head) - 4 - len(numbers))
        writer.writerow([row["loss"], "", "", "", *("" if one is None else one for one in numbers), *blank])
    return text.getvalue()


def setting_words(setting: Mapping[str, Any]) -> str:
    """loss.margin=0.2 optimizer.lr=0.001"""
    return " ".join(f"{key}={value}" for key, value in setting.items())


def _row(
    loss: str, one: Found, values: Mapping[str, Floats], tests: Sequence[Mapping[str, Floats]], groups: torch.Tensor
) -> dict[str, Any]:
    row: dict[str, Any] = {"loss": loss, "setting": one.best.setting}
    row |= {form: dict(figures_of(values[form], groups)) for form in FORMS}
    row["models"] = spread(by_model(tests, "separated"))
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


def _choices(one: Found) -> dict[str, Any]:
    """Everything that was chosen: no test item had a part in it."""
    steps = {f"seed {seed}, fold {fold + 1}": result["step"] for (seed, fold), result in one.finals.items()}
    return {"trial": one.best.number, "setting": one.best.setting, "steps": steps}


def _trial(one: Any, plan: Plan) -> dict[str, Any]:
    return {
        "number": one.number,
        "setting": one.setting,
        "value": one.value,
        "folds": {str(fold + 1): result["value"] for fold, result in sorted(one.folds.items())},
        "ended": [result["ended"] for _, result in sorted(one.folds.items())],
        "complete": len(one.folds) == plan.folds,
    }


def _protocol(bench: Bench, opened: Opened, plan: Plan, found: Mapping[str, Found]) -> dict[str, Any]:
    shared = bench.shared(plan.folds)
    some = shared.recipe
    folds = [{"train": _size(bench, fold.train), "validation": _size(bench, fold.val)} for fold in shared.parts]
    return plan._asdict() | {
        "encoder": some.encoder["name"],
        "sampler": some.sampler,
        "split": bench.protocol.partition(":")[0],
        "fold_sizes": folds,
        "test": bench.tested,
        "queries": len(opened.held.indices),
        "losses": len(found),
        "baseline": bench.prepared(_any_job(plan)).baseline,
    }


def _any_job(plan: Plan) -> Job:
    return Job("search", "contrastive", {}, 0, 0, plan.folds, plan.steps)


def _size(bench: Bench, of: NDArray[np.int64]) -> dict[str, int]:
    return {"items": len(of), "classes": len(np.unique(bench.labels[of]))}
