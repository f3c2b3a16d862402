"""Whether training helped: the trained encoder against what is to be had without training, query by query."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nearkin.evaluation.graded import per_query as graded_per_query
from nearkin.evaluation.retrieval import retrieval_metrics
from nearkin.evaluation.statistics import cluster_bootstrap
from nearkin.training import validation

__all__ = ["verdict"]

_SAMPLES = 1000  # resamples of the test classes
_SAID = {"map@r": "MAP@R", "ndcg@10": "nDCG@10"}


def verdict(
    rows: Mapping[str, Tensor], held: validation.Held, graded: bool, device: torch.device, *, baseline: str, seed: int
) -> dict[str, Any]:
    """Compares rows["trained"] with rows["untrained"] and rows["baseline"] by the main metric on the test items.

    "helped": True where training is better than both, False where it is worse than one of them, None where neither can
    be shown; better and worse as `uncertainty.compare` has them, resampling test classes. "against": its figures for
    each of the two, differences as trained less the other. "sentence": the same for people. baseline: its name.
    """
    metric = validation.main_metric(graded)
    values = {name: _per_query(x, held, graded, device, metric) for name, x in rows.items()}
    known = held.labels is not None and not graded
    groups = torch.from_numpy(held.labels) if known else torch.arange(len(held.indices))
    names = {"untrained": "the untrained encoder", "baseline": f"the {baseline}"}
    against: dict[str, Any] = {}
    for who in names:
        found = cluster_bootstrap.compare(values["trained"], values[who], groups.long(), samples=_SAMPLES, seed=seed)
        low, high = found["interval"] or (None, None)
        word = {"a": "better", "b": "worse"}.get(found["verdict"], "undecided")
        against[who] = {"trained": found["a"], "other": found["b"], "difference": found["difference"]}
        against[who] |= {"low": low, "high": high, "p": found["p"]}
        against[who] = {key: validation.number(one) for key, one in against[who].items()}
        against[who] |= {"classes": found["classes"], "verdict": word}
    words = [one["verdict"] for one in against.values()]
    helped = False if "worse" in words else True if set(words) == {"better"} else None
    wanted = {True: "better", False: "worse", None: "undecided"}[helped]
    decides = max((who for who in names if against[who]["verdict"] == wanted), key=lambda who: _or_zero(against, who))
    sentence = _sentence(helped, _SAID[metric], against[decides], names[decides], "classes" if known else "items")
    return {"helped": helped, "metric": metric, "sentence": sentence, "against": against}


def _per_query(rows: Tensor, held: validation.Held, graded: bool, device: torch.device, metric: str) -> Tensor:
    if graded:
        queries, targets, options = validation.graded_sides(rows, held, device)
        return graded_per_query(queries, targets, (10,), **options)[metric]
    return retrieval_metrics.per_query(*validation.sides(rows, held, device), metrics=(metric,))[metric]


def _or_zero(against: Mapping[str, Any], who: str) -> float:
    """The metric of what training is compared with; 0 where no query has one."""
    return float(against[who]["other"] or 0)


def _sentence(helped: bool | None, metric: str, found: Mapping[str, Any], other: str, unit: str) -> str:
    if found["difference"] is None:
        return f"It cannot be told whether training helped: no test item has anything to find, so there is no {metric}."
    low, high = found["low"], found["high"]
    inside = f" (95 % interval {_points(low)} to {_points(high)})" if low is not None and high is not None else ""
    values = f"{metric} {100 * found['trained']:.1f} % beside {100 * found['other']:.1f} % of {other}"
    values += f", a difference of {_points(found['difference'])} points{inside}"
    if helped is None:
        few = f"; {found['classes']} test {unit} are too few to tell" if found["classes"] < 6 else ""
        return f"It cannot be told whether training helped: {values}{few}."
    return f"Training {'helped' if helped else 'did not help'}: {values}."


def _points(difference: float) -> str:
    return f"{100 * difference:+.1f}".replace("-", "−")
