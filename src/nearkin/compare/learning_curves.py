"""How fast each loss learns: validation MAP@R over steps, the steps to a given value, the time of a step."""

from collections.abc import Mapping, Sequence
from statistics import median

from nearkin.compare import trial
from nearkin.compare.loss_search import Found
from nearkin.compare.plan import Plan

__all__ = ["levels", "means", "reached", "still_rising", "timing"]

_SHARES = (0.5, 0.8, 0.95)  # of the best loss's final value


def means(found: Mapping[str, Found], plan: Plan) -> dict[str, list[list[float]]]:
    """[[step, best so far], …]: means over the final trainings; one that stopped early keeps its best."""
    curves = {}
    for loss, one in found.items():
        lines = [_best_so_far(result["curve"], plan) for result in one.finals.values()]
        places = trial.marks(plan.steps)
        curves[loss] = [[step, sum(line[i] for line in lines) / len(lines)] for i, step in enumerate(places)]
    return curves


def levels(found: Mapping[str, Found], order: Sequence[str]) -> list[float]:
    """Values worth reaching: shares of what the best loss ends with on the validation classes."""
    ends = [sum(r["value"] for r in found[loss].finals.values()) / len(found[loss].finals) for loss in order]
    return [round(share * max(ends), 4) for share in _SHARES]


def reached(found: Mapping[str, Found], plan: Plan, level: Sequence[float]) -> dict[str, list[int | None]]:
    """The step of the first validation whose mean is at each level; None where it never is."""
    curves = means(found, plan)
    return {
        loss: [next((int(step) for step, value in curves[loss] if value >= one), None) for one in level]
        for loss in found
    }


def still_rising(one: Found, plan: Plan) -> float:
    """The share of final trainings whose best validation was the last possible one: more steps may help these."""
    late = [int(result["step"]) == plan.steps for result in one.finals.values()]
    return sum(late) / len(late)


def timing(one: Found) -> dict[str, float | None]:
    """Milliseconds a step (median of the final trainings), and seconds of a whole one."""
    rates = [1000 * r["seconds"] / r["steps"] for r in one.finals.values() if r["steps"]]
    whole = [r["seconds"] for r in one.finals.values()]
    return {"ms_per_step": median(rates) if rates else None, "seconds": sum(whole) / len(whole)}


def _best_so_far(curve: Sequence[Sequence[float]], plan: Plan) -> list[float]:
    found, best = [], 0.0
    values = {int(step): value for step, value in curve}
    for step in trial.marks(plan.steps):
        best = max(best, values.get(step, best))
        found.append(best)
    return found
