"""The plan: how many steps, trials, folds and seeds. Made once, before anything is trained, and kept in the study.

A time budget and a table that can be made again do not go together, unless the clock is asked only once: the rate of
each loss is measured, the plan that fits is chosen, and from there on only counted things decide. The plan is printed
as the command that asks for it without a clock.
"""

import re
import shlex
from collections.abc import Mapping
from typing import Any, NamedTuple

from nearkin.compare import trial
from nearkin.compare.recommendation import flag_words
from nearkin.core import checks

__all__ = ["FOLDS", "Plan", "command", "fitted", "predicted", "rounds", "seconds", "trainings"]

ROUND = 4  # trials whose settings are chosen together
TRIALS, FOLDS, SEEDS = 8, 4, 3  # without a budget
LEAST_STEPS = 20
SHARE = 0.8  # of the budget that a plan may be expected to use
# What a budget buys, dearest first: trials, folds, seeds; and the share of the usual steps that must remain for it.
_LADDER = (
    (48, 4, 5, 0.5),
    (32, 4, 5, 0.5),
    (24, 4, 4, 0.5),
    (16, 4, 3, 0.4),
    (12, 4, 3, 0.4),
    (8, 4, 3, 0.3),
    (8, 3, 2, 0.25),
    (4, 3, 2, 0.2),
    (4, 2, 2, 0.15),
    (2, 2, 1, 0.0),
)
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class Plan(NamedTuple):
    """Everything that decides the table beside the recipe, the data and the losses."""

    steps: int
    trials: int
    folds: int
    seeds: int
    seed: int


def seconds(text: str) -> float:
    """20m, 90s, 1.5h or 1h30m."""
    parts = re.findall(r"(\d+(?:\.\d+)?)([smhd])", text.strip().lower())
    if not parts or "".join(n + unit for n, unit in parts) != text.strip().lower():
        raise ValueError(f'budget must be a time as 90s, 20m or 1h30m, got "{text}"')
    found = sum(float(n) * _UNITS[unit] for n, unit in parts)
    checks.positive("budget", found)
    return found


def rounds(trials: int) -> list[tuple[int, int]]:
    """Of each round of the search: how many settings are tried on one fold, and how many go on to the others.

    The better half; in the first round the default, and the better half of the others.
    """
    sizes = [min(ROUND, trials - start) for start in range(0, trials, ROUND)]
    return [(size, -(-size // 2) if i else 1 + size // 2) for i, size in enumerate(sizes)]


def trainings(plan: Plan) -> int:
    """How many trainings a loss has at the most."""
    search = sum(tried + kept * (plan.folds - 1) for tried, kept in rounds(plan.trials))
    return search + plan.seeds * plan.folds


def predicted(plan: Plan, rates: Mapping[str, Mapping[str, float]], jobs: int) -> float:
    """Seconds that the whole plan takes at the most, nothing stopped early.

    rates: of each loss {"setup", "step", "validation"} as measured, and "test", of one model.
    """
    total = 0.0
    for rate in rates.values():
        once = rate["setup"] + plan.steps * rate["step"] + len(trial.marks(plan.steps)) * rate["validation"]
        total += trainings(plan) * once + plan.seeds * plan.folds * rate["test"]
    return total / jobs


def fitted(
    budget: float,
    usual: Plan,
    given: Mapping[str, int | None],
    rates: Mapping[str, Mapping[str, float]],
    jobs: int,
    spent: float = 0.0,
) -> Plan:
    """The dearest plan that the budget allows. usual: what would be done without one; given: what the user fixed;
    spent: seconds that reading and measuring have taken already.

    What has to become less becomes so by turns: the length of a search is worth little if nothing is learned in it, and
    the other way round.
    """
    steps, smallest = given.get("steps"), usual
    for trials, folds, seeds, share in _LADDER:
        numbers = {"trials": trials, "folds": min(folds, usual.folds), "seeds": seeds}
        smallest = usual._replace(**{name: given.get(name) or number for name, number in numbers.items()})
        most = _affordable(smallest, SHARE * (budget - spent), rates, jobs)
        if most >= (max(LEAST_STEPS, share * usual.steps) if steps is None else steps):
            return smallest._replace(steps=min(usual.steps, most) if steps is None else steps)
    needed = predicted(smallest._replace(steps=steps or LEAST_STEPS), rates, jobs) / SHARE + spent
    raise ValueError(
        f"budget must be at least {_spelled(needed)} for these losses on this machine, got {_spelled(budget)}"
    )


def _affordable(plan: Plan, budget: float, rates: Mapping[str, Mapping[str, float]], jobs: int) -> int:
    """The most steps, by bisection; 0 where not even one is possible."""
    low, high = 0, 1_000_000
    while high - low > max(1, low // 50):  # two digits are exact enough
        middle = (low + high) // 2
        low, high = (middle, high) if predicted(plan._replace(steps=middle), rates, jobs) <= budget else (low, middle)
    digits = int(10 ** max(0, len(str(low)) - 2))
    return low // digits * digits


def _spelled(much: float) -> str:
    return f"{much:.0f}s" if much < 120 else f"{much / 60:.1f}m"


def command(source: str, losses: list[str], plan: Plan, more: Mapping[str, Any]) -> str:
    """What asks for this plan, and so gives this table, without a clock. more: other flags as they were given."""
    words = ["nearkin", "compare", source, "--losses", ",".join(losses)]
    for name, value in plan._asdict().items():
        if name != "seed" or value:
            words += [f"--{name}", str(value)]
    return shlex.join([*words, *flag_words(more)])
