"""The plan: numbers of steps, trials, folds and seeds, fixed before the first training and saved in the study.

A time budget is reproducible only if the clock decides once: the speed of each loss is measured, the plan that fits is
chosen, and from then on only counts decide. The plan is printed as the command that gives it without a clock.
"""

import re
import shlex
from collections.abc import Mapping
from typing import Any, NamedTuple

from nearkin.compare import trial
from nearkin.compare.recommendation import flag_words
from nearkin.core import checks

__all__ = ["FOLDS", "Plan", "command", "fit_to_budget", "predicted_seconds", "rounds", "seconds", "training_count"]

ROUND = 4  # trials whose settings are chosen together
TRIALS, FOLDS, SEEDS = 8, 4, 3  # without a budget
MIN_STEPS = 20
SHARE = 0.8  # of the budget that the plan should use
# What a budget buys, most expensive first: trials, folds, seeds, and the minimum share of the default steps.
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
    """Everything that determines the table besides the recipe, the data and the losses."""

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
    total = sum(float(n) * _UNITS[unit] for n, unit in parts)
    checks.positive("budget", total)
    return total


def rounds(trials: int) -> list[tuple[int, int]]:
    """Per round of the search: how many settings are tried on one fold, and how many continue on the others.

    The better half; in the first round the default, and the better half of the others.
    """
    sizes = [min(ROUND, trials - start) for start in range(0, trials, ROUND)]
    return [(size, -(-size // 2) if i else 1 + size // 2) for i, size in enumerate(sizes)]


def training_count(plan: Plan) -> int:
    """Maximum number of trainings per loss."""
    search = sum(tried + survivors * (plan.folds - 1) for tried, survivors in rounds(plan.trials))
    return search + plan.seeds * plan.folds


def predicted_seconds(plan: Plan, rates: Mapping[str, Mapping[str, float]], jobs: int) -> float:
    """Seconds that the plan takes at most, if nothing stops early.

    rates: per loss {"setup", "step", "validation"} as measured, and "test", per model.
    """
    total = 0.0
    for rate in rates.values():
        once = rate["setup"] + plan.steps * rate["step"] + len(trial.validation_steps(plan.steps)) * rate["validation"]
        total += training_count(plan) * once + plan.seeds * plan.folds * rate["test"]
    return total / jobs


def fit_to_budget(
    budget: float,
    default: Plan,
    numbers: Mapping[str, int | None],
    rates: Mapping[str, Mapping[str, float]],
    jobs: int,
    spent: float = 0.0,
) -> Plan:
    """The most expensive plan that the budget allows. default: the plan without a budget; numbers: those fixed by the
    user; spent: seconds already used for reading and measuring.

    Trials, folds, seeds and steps shrink in turns: many trials are worth little without steps, and the reverse.
    """
    steps, smallest = numbers.get("steps"), default
    for trials, folds, seeds, share in _LADDER:
        rung = {"trials": trials, "folds": min(folds, default.folds), "seeds": seeds}
        smallest = default._replace(**{name: numbers.get(name) or number for name, number in rung.items()})
        most = _affordable(smallest, SHARE * (budget - spent), rates, jobs)
        if most >= (max(MIN_STEPS, share * default.steps) if steps is None else steps):
            return smallest._replace(steps=min(default.steps, most) if steps is None else steps)
    needed = predicted_seconds(smallest._replace(steps=steps or MIN_STEPS), rates, jobs) / SHARE + spent
    raise ValueError(
        f"budget must be at least {_duration(needed)} for these losses on this machine, got {_duration(budget)}"
    )


def _affordable(plan: Plan, budget: float, rates: Mapping[str, Mapping[str, float]], jobs: int) -> int:
    """The maximum number of steps, by bisection; 0 where not even one is possible."""
    low, high = 0, 1_000_000
    while high - low > max(1, low // 50):  # two digits are enough
        middle = (low + high) // 2
        low, high = (
            (middle, high) if predicted_seconds(plan._replace(steps=middle), rates, jobs) <= budget else (low, middle)
        )
    digits = int(10 ** max(0, len(str(low)) - 2))
    return low // digits * digits


def _duration(seconds: float) -> str:
    return f"{seconds:.0f}s" if seconds < 120 else f"{seconds / 60:.1f}m"


def command(source: str, losses: list[str], plan: Plan, flags: Mapping[str, Any]) -> str:
    """The command that gives this plan, and so this table, without a clock. flags: all other flags."""
    words = ["nearkin", "compare", source, "--losses", ",".join(losses)]
    for name, value in plan._asdict().items():
        if name != "seed" or value:
            words += [f"--{name}", str(value)]
    return shlex.join([*words, *flag_words(flags)])
