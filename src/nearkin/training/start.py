"""The start of a training as a contender: where validation does not find more by training, it is saved."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nearkin.evaluation.statistics import cluster_bootstrap
from nearkin.models import Encoder
from nearkin.training import pretraining
from nearkin.training.config.recipe import Recipe
from nearkin.training.final_test import raw
from nearkin.training.prepare import Prepared, build_encoder
from nearkin.training.trainer import Trainer
from nearkin.training.validation import MAIN, chance_units, main_per_query, number, quick_metrics
from nearkin.training.verdict import START, TRAINED

__all__ = ["choose_start", "is_asked", "judge"]

_FEW = 3  # validation classes; of fewer, which class they are decides who wins: docs/measured/training.md


def is_asked(recipe: Recipe) -> bool:
    """Whether validation compares the trained weights with the start; `interpolation.choose` has done so otherwise.

    Weights that are to search the rows of an old run are compared with that run.
    """
    return not recipe.finetune.interpolate and recipe.compatible.run is None


def choose_start(trainer: Trainer, prepared: Prepared, trained: Encoder) -> tuple[Encoder, dict[str, Any]]:
    """The encoder to save, and what results.json says of the choice (see `judge`).

    trained: the best weights, as `models.build` makes an encoder. A function of them and of the validation items: a
    run that is stopped here and resumed makes the same choice, on any number of ranks.
    """
    before, everything = _start(trainer, prepared), trainer.held_out.everything
    rows = {TRAINED: trainer.embed(everything, trained), START: trainer.embed(everything, before)}
    rows["baseline"] = _baseline(trainer, prepared)

    def measure() -> dict[str, Any]:
        values = {name: _per_query(trainer, x) for name, x in rows.items()}
        groups, unit = chance_units(trainer.held_out, trainer.graded)
        facts = judge(values, groups, MAIN[trainer.graded], unit)
        if facts["chosen"] == START and not trainer.recipe.training.keep_start:
            facts["chosen"] = TRAINED
        if facts["chosen"] == START:
            facts["val"] = quick_metrics(rows[START], trainer.held_out, trainer.graded, trainer.device)
        return facts

    facts = trainer.group.on_rank0("choosing", measure)
    return before if facts["chosen"] == START else trained, facts


def judge(values: Mapping[str, Tensor], groups: Tensor, metric: str, unit: str = "classes") -> dict[str, Any]:
    """Chooses by the metric of each validation query (Q,), the classes `groups` (Q,) being the unit of chance.

    values: of TRAINED, START and the baseline. The start is chosen where it has the higher mean. With fewer than 3
    classes a mean tells little of new ones: there the trained weights have to prove themselves, with a 95 % paired
    interval of their gain above 0. "gain": with that interval. Without a value to compare, the trained weights.
    """
    facts: dict[str, Any] = {"metric": metric, "unit": unit, "chosen": TRAINED}
    facts |= {name: number(x.nanmean()) for name, x in values.items()}
    facts["classes"] = len(torch.unique(groups[values[START].isfinite() & values[TRAINED].isfinite()]))
    if facts[START] is None:
        return facts
    test = cluster_bootstrap.compare(
        values[TRAINED], values[START], groups, fewest=2, samples=1
    )  # its sign flips are not used
    gain, (low, high) = test["difference"], test["interval"]
    facts["gain"] = {"value": number(gain), "low": number(low), "high": number(high)}
    kept = not gain >= 0 or (facts["classes"] < _FEW and not low > 0)
    return facts | {"chosen": START if kept else TRAINED}


def _start(trainer: Trainer, prepared: Prepared) -> Encoder:
    """The encoder as it was at the first step, after a pretraining if there was one."""
    if prepared.recipe.pretrains:
        return pretraining.pretrained_encoder(prepared, trainer.out, trainer.group).to(trainer.device)
    return build_encoder(prepared).to(trainer.device)


def _baseline(trainer: Trainer, prepared: Prepared) -> Tensor:
    everything = trainer.held_out.everything
    if prepared.baseline == "frozen backbone":
        return trainer.embed(everything, build_encoder(prepared).pooled().to(trainer.device))
    return raw(trainer.store, everything)


def _per_query(trainer: Trainer, rows: Tensor) -> Tensor:
    """The metric of each validation query; NaN of rows that are not finite: there is nothing to choose them by."""
    if not bool(rows.isfinite().all()):
        return torch.full((len(trainer.held_out.indices),), math.nan)
    return main_per_query(rows, trainer.held_out, trainer.graded, trainer.device).cpu()
