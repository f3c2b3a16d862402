"""Weight interpolation after fine-tuning (WiSE-FT, Wortsman et al. 2022, arXiv:2109.01903), decided on validation.

θ(a) = (1 - a) θ0 + a θ1, from the pretrained backbone θ0 to the trained one θ1, a of `SHARES`, all with the trained
head: that of θ0 is untrained. The encoder as it was is a candidate of its own, "frozen": the pooled features of θ0,
without a head. BatchNorm's running statistics are interpolated as weights are, so that nothing depends on further
passes over the training items; pretrained encoders freeze them by default, and then both ends have the same ones.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from nearkin.core.errors import UnfittingWeights
from nearkin.evaluation.statistics import cluster_bootstrap
from nearkin.models import Encoder
from nearkin.training.prepare import Prepared, build_encoder
from nearkin.training.trainer import Trainer
from nearkin.training.validation import MAIN, WRITTEN, chance_units, main_per_query, points

__all__ = ["FROZEN", "SHARES", "choose", "interpolated", "judge"]

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
FROZEN, UNTRAINED = "frozen", "untrained"
_NAMES: dict[str | float, str] = {FROZEN: "frozen features", UNTRAINED: "untrained head"}
# Of the interval of a gain, which has to lie above 0. docs/measured/training.md has what 95 % costs; with few classes,
# of whose spread little is known, it stays.
_CONFIDENCE, _FEW_CONFIDENCE, _FEW = 0.8, 0.95, 6

Weights = Mapping[str, Tensor]
Values = Mapping[str | float, Tensor]
Callback = Callable[[dict[str, Any]], None]


def interpolated(start: Weights, end: Weights, a: float) -> dict[str, Tensor]:
    """(1 - a) start + a end, tensor by tensor, computed in float64: exact at both ends and where these are equal.

    Whole numbers, as BatchNorm's count of batches, are those of `end`.
    """
    if start.keys() != end.keys():
        name = sorted(start.keys() ^ end.keys())[0]
        raise UnfittingWeights(f"the trained backbone is not the pretrained one: {name} is only in one of them")

    def between(first: Tensor, last: Tensor) -> Tensor:
        return ((1 - a) * first.double() + a * last.double()).to(last.dtype) if last.is_floating_point() else last

    return {name: between(start[name], last) for name, last in end.items()}


def choose(
    trainer: Trainer, prepared: Prepared, trained: Encoder, callback: Callback
) -> tuple[Encoder, dict[str, Any]]:
    """The encoder to save, on the trainer's device, and what results.json says of the choice (see `judge`).

    trained: the best weights of the training, an encoder as `models.build` makes it. A function of it and of the
    validation items alone: a run that is stopped here and resumed makes the same choice, on any number of ranks.
    """
    encoder = build_encoder(prepared).to(trainer.device)
    start, end = (
        {name: tensor.detach().to("cpu", copy=True) for name, tensor in each.state_dict().items()}
        for each in (encoder, trained)
    )  # on the CPU: not every device has float64
    values = _measured(trainer, encoder, start, end, callback)
    groups, unit = chance_units(trainer.held_out, trainer.graded)
    metric = MAIN[trainer.graded]
    facts = trainer.group.on_rank0("interpolation", lambda: judge(values, groups, metric, unit))
    if facts["chosen"] == FROZEN:
        encoder.load_state_dict(start)
        encoder = encoder.pooled()
    else:
        encoder.load_state_dict(_between(start, end, 1.0 if facts["a"] is None else facts["a"]))
    facts |= {"dim": encoder.dim, "sentence": _sentence(facts, WRITTEN[metric], trained.dim, encoder.dim)}
    callback({"event": "interpolated", "interpolation": facts})
    return encoder, facts


def _measured(trainer: Trainer, encoder: Encoder, start: Weights, end: Weights, callback: Callback) -> Values:
    """The main metric of each validation query with every candidate, on rank 0; `encoder` is left with any weights."""
    held_out, values = trainer.held_out, {}
    moved = not all(torch.equal(start[name], tensor) for name, tensor in _backbone(end).items())
    shares = SHARES if moved else SHARES[-1:]  # of a backbone that was not trained, all are the same
    candidates = [FROZEN, UNTRAINED, *shares] if len(held_out.indices) else []
    for done, name in enumerate(candidates):
        what = _NAMES.get(name, f"a = {name}")
        callback({"event": "interpolating", "what": what, "done": done, "total": len(candidates)})
        if isinstance(name, float):
            encoder.load_state_dict(_between(start, end, name))
        rows = trainer.embed(held_out.everything, encoder.pooled() if name == FROZEN else encoder)

        def measure(name: str | float = name, rows: Tensor = rows) -> None:
            values[name] = torch.full((len(held_out.indices),), math.nan)
            if bool(rows.isfinite().all()):  # else there is nothing to choose these weights by
                values[name] = main_per_query(rows, held_out, trainer.graded, trainer.device).cpu()

        trainer.group.on_rank0("interpolation", measure)
    return values


def judge(values: Values, groups: Tensor, metric: str, unit: str = "classes") -> dict[str, Any]:
    """Chooses by the metric of each validation query (Q,), the classes `groups` (Q,) being the unit of chance.

    values: of FROZEN, of UNTRAINED, and of each a. A candidate can be chosen only if the 80 % paired interval of its
    gain over the frozen features lies above 0 (95 % with fewer than 6 classes). Of those, the highest mean is chosen,
    of equal ones the smallest a; if there are none, the frozen features. So training has to prove itself: a gain that
    may be chance is no reason to give up an encoder that is known. Among candidates that have proved themselves nothing
    is at risk, and the highest mean is the best guess.
    """
    facts: dict[str, Any] = {"metric": metric, "chosen": None, "a": None, "unit": unit}
    if not values or not bool(values[FROZEN].isfinite().any()):
        return facts | {"classes": 0}
    classes = len(torch.unique(groups[values[FROZEN].isfinite()]))
    facts |= {"classes": classes, "confidence": _CONFIDENCE if classes >= _FEW else _FEW_CONFIDENCE}
    options: dict[str, Any] = {
        "confidence": facts["confidence"],
        "fewest": 2,
        "samples": 1,
    }  # its sign flips are not used
    tests = {
        a: cluster_bootstrap.compare(one, values[FROZEN], groups, **options)
        for a, one in values.items()
        if isinstance(a, float)
    }
    better = [a for a, test in tests.items() if test["interval"][0] > 0]
    best = min(better, key=lambda a: (-tests[a]["a"], a), default=None)
    facts |= {"chosen": FROZEN if best is None else "finetuned", "a": 0.0 if best is None else best}
    facts |= {name: _figure(values[name], groups) for name in (FROZEN, UNTRAINED)}
    facts["curve"] = []
    for a, test in sorted(tests.items()):
        gain = dict(zip(("value", "low", "high"), (test["difference"], *test["interval"]), strict=True))
        point = {"a": a, **_figure(values[a], groups), "gain": {key: _number(value) for key, value in gain.items()}}
        facts["curve"].append(point | {"better": a in better})
    return facts


def _figure(values: Tensor, groups: Tensor) -> dict[str, float | None]:
    """The mean of a metric over the queries, with its 95 % interval."""
    counted = values[~values.isnan()].double()
    low, high = cluster_bootstrap.share_interval(values, groups)
    mean = math.fsum(counted.tolist()) / len(counted) if len(counted) else math.nan
    return {"value": _number(mean), "low": _number(low), "high": _number(high)}


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _backbone(state: Weights) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if name.startswith("backbone.")}


def _between(start: Weights, end: Weights, a: float) -> dict[str, Tensor]:
    """The state of an encoder with an interpolated backbone; everything else is the trained one's."""
    return {**end, **interpolated(_backbone(start), _backbone(end), a)}


def _sentence(facts: Mapping[str, Any], metric: str, trained_dim: int, dim: int) -> str:
    """What was gained, in words."""
    if facts["chosen"] is None:
        return (
            f"The trained weights are saved as they are: no validation item has anything to find, so there is no "
            f"{metric} to compare them with the frozen encoder by."
        )
    many = f"{facts['classes']:,} validation {facts['unit']}"
    if facts["chosen"] == FROZEN:
        measured = [point for point in facts["curve"] if point["value"] is not None]
        best = max(measured, key=lambda point: point["value"], default=None)
        at_best = f" (at best {_beside(best, metric, facts)})" if best is not None else ""
        few = ""
        if facts["classes"] < _FEW:
            few = "; of so few only a large gain is proof, and finetune.interpolate=false saves the trained weights"
        wide = f"; its embeddings have {dim:,} dimensions, not {trained_dim:,}" if dim != trained_dim else ""
        return (
            f"The frozen encoder is kept: on {many} no trained weights are better than its pooled features beyond "
            f"chance{at_best}{few}{wide}."
        )
    point = next(point for point in facts["curve"] if point["a"] == facts["a"])
    kind = {0.0: "the pretrained backbone under the trained head", 1.0: "the trained weights as they are"}
    which = kind.get(facts["a"], f"the weights at a = {facts['a']:g} between the pretrained and the trained ones")
    alone = facts["curve"][-1]
    beside = "" if facts["a"] == 1 else f"; the trained weights alone have {_percent(alone['value'])}"
    return f"Fine-tuning gained on {many}, with {which}: {_beside(point, metric, facts)}{beside}."


def _beside(point: Mapping[str, Any], metric: str, facts: Mapping[str, Any]) -> str:
    gain = point["gain"]
    ends = gain["low"], gain["high"]
    inside = (
        "" if None in ends else f", {100 * facts['confidence']:.0f} % interval {points(ends[0])} to {points(ends[1])}"
    )
    difference = f"a difference of {points(gain['value'])} points{inside}"
    frozen = _percent(facts[FROZEN]["value"])
    return f"{metric} {_percent(point['value'])} beside {frozen} of the frozen encoder, {difference}"


def _percent(value: float | None) -> str:
    return "no value" if value is None else f"{100 * value:.1f} %"
