"""The search of one loss: rounds of settings (optuna's TPE) on the folds, then the best setting with several seeds.

`search` is a generator: it yields jobs, is sent their results in the same order, and returns a `LossResult`. Its next
jobs depend on these results alone, so all losses can run at once in any number of processes, and a search that was
killed asks for the same jobs again. Suggestions are a function of (seed, loss, round, results of earlier rounds); no
state of a sampler has to survive.
"""

import hashlib
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

from nearkin.compare import trial
from nearkin.compare.plan import Plan, rounds
from nearkin.compare.protocol import Job
from nearkin.losses.settings import Choices, Range, Searched, ranges_of
from nearkin.training.config.recipe import Recipe
from nearkin.training.config.registry import LOSSES

__all__ = [
    "JobGenerator",
    "LossResult",
    "Observation",
    "Trial",
    "default_setting",
    "require_optuna",
    "search",
    "search_space",
    "suggest",
]

RATE = Range(0.2, 5.0, log=True)  # times the encoder's default learning rate
_RANDOM_TRIALS = 4  # before TPE has enough results to model
_DIGITS = 4
_MIN_PROGRESS = 0.3  # share of a training before it can be called hopeless

Result = dict[str, Any]
JobGenerator = Generator[list[Job], list[Result], "LossResult"]


class Trial(NamedTuple):
    """One setting and its result on each fold it was trained on. Number 0 is the default."""

    number: int
    setting: dict[str, Any]
    folds: dict[int, Result]

    @property
    def value(self) -> float:
        """Mean best validation MAP@R over its folds."""
        return float(sum(self.folds[f]["value"] for f in sorted(self.folds)) / len(self.folds))


class LossResult(NamedTuple):
    """All trials of a loss, the best of those trained on every fold, and its final trainings by (seed, fold)."""

    loss: str
    trials: list[Trial]
    best: Trial
    finals: dict[tuple[int, int], Result]


class Observation(NamedTuple):
    """A setting and its mean gain over the default, on the folds that it was trained on."""

    setting: dict[str, Any]
    score: float


def search(loss: str, space: dict[str, Searched], default: dict[str, Any], plan: Plan) -> JobGenerator:
    """The jobs of a loss, round by round. default: the setting of the first trial."""
    trials: list[Trial] = []
    for number, (count, survivors) in enumerate(rounds(plan.trials)):
        settings = _round_settings(loss, space, default, trials, count, plan)
        first = number % plan.folds  # each round is screened on another fold
        bar = _bar(trials, first, plan)
        new = [Trial(len(trials) + i, setting, {}) for i, setting in enumerate(settings)]
        results = yield [_job(loss, one, first, plan, None if one.number == 0 else bar) for one in new]
        for one, result in zip(new, results, strict=True):
            one.folds[first] = result
        best = sorted(new, key=lambda one: (one.number != 0, -one.folds[first]["value"], one.number))[:survivors]
        rest = [(one, fold) for one in best for fold in range(plan.folds) if fold != first]
        results = yield [_job(loss, one, fold, plan, None) for one, fold in rest]
        for (one, fold), result in zip(rest, results, strict=True):
            one.folds[fold] = result
        trials += new
    chosen = _best_trial(trials, plan.folds)
    places = [(seed, fold) for seed in range(1, plan.seeds + 1) for fold in range(plan.folds)]
    results = yield _final_jobs(loss, chosen.setting, plan)
    return LossResult(loss, trials, chosen, dict(zip(places, results, strict=True)))


def _best_trial(trials: list[Trial], folds: int) -> Trial:
    """The best mean over all folds; of equals the first."""
    return max((one for one in trials if len(one.folds) == folds), key=lambda one: (one.value, -one.number))


def _final_jobs(loss: str, setting: dict[str, Any], plan: Plan) -> list[Job]:
    """With seeds that the search has not used, so that the search's luck does not count."""
    return [
        Job("final", loss, setting, plan.seed * 1000 + seed, fold, plan.folds, plan.steps)
        for seed in range(1, plan.seeds + 1)
        for fold in range(plan.folds)
    ]


def _job(loss: str, one: Trial, fold: int, plan: Plan, bar: list[float] | None) -> Job:
    return Job("search", loss, one.setting, plan.seed * 1000, fold, plan.folds, plan.steps, bar)


def _round_settings(
    loss: str, space: dict[str, Searched], default: dict[str, Any], trials: list[Trial], count: int, plan: Plan
) -> list[dict[str, Any]]:
    """The settings of a round; the first round begins with the default."""
    if not trials:
        return [default, *suggest(loss, space, [], count - 1, plan.seed)]
    base = {fold: result["value"] for fold, result in trials[0].folds.items()}
    observations = []
    for one in trials:  # against the default on the same folds: some folds are easier than others
        gains = [result["value"] - base[fold] for fold, result in sorted(one.folds.items())]
        observations.append(Observation(one.setting, sum(gains) / len(gains)))
    return suggest(loss, space, observations, count, plan.seed)


def _bar(trials: list[Trial], fold: int, plan: Plan) -> list[float] | None:
    """Per validation the lowest best-so-far of the settings that passed earlier rounds; 0 while it is early."""
    passed = [one.folds[fold]["curve"] for one in trials if len(one.folds) == plan.folds and one.folds[fold]["curve"]]
    if not passed:
        return None
    bar = []
    for i, step in enumerate(trial.validation_steps(plan.steps)):
        so_far = [max(value for _, value in curve[: i + 1]) for curve in passed]
        bar.append(min(so_far) if step >= _MIN_PROGRESS * plan.steps else 0.0)
    return bar


def require_optuna() -> None:
    """Raises in one sentence where it is missing."""
    from importlib.util import find_spec

    if find_spec("optuna") is None:
        raise ModuleNotFoundError("nearkin compare needs optuna: pip install 'nearkin[compare]'")


def search_space(loss: str, recipe: Recipe, lr: float) -> dict[str, Searched]:
    """What is searched for a loss, by recipe keys; learning rates that the user has set are not searched."""
    space: dict[str, Searched] = {}
    for name, searched in ranges_of(LOSSES[loss].make).items():
        if name != "loss_scale":
            space[f"loss.{name}"] = searched
        elif recipe.optimizer.loss_scale is None:
            space["optimizer.loss_scale"] = searched
    if recipe.optimizer.lr is None:
        space["optimizer.lr"] = Range(_rounded(lr * RATE.low), _rounded(lr * RATE.high), log=True)
    return space


def default_setting(loss: str, space: dict[str, Searched], lr: float) -> dict[str, Any]:
    """The defaults of everything that is searched."""
    choice = LOSSES[loss]
    known = {f"loss.{name}": setting.default for name, setting in choice.settings.items()}
    known |= {"optimizer.loss_scale": float(getattr(choice.make, "lr_scale", 1.0)), "optimizer.lr": lr}
    return {key: known[key] for key in space}


def suggest(
    loss: str, space: dict[str, Searched], observations: Sequence[Observation], count: int, seed: int
) -> list[dict[str, Any]]:
    """The next `count` settings of a loss, from the results of all earlier rounds."""
    import optuna

    if not space:
        return [{} for _ in range(count)]
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    words = hashlib.sha256(f"{seed} {loss} {len(observations)}".encode()).digest()
    sampler = optuna.samplers.TPESampler(seed=int.from_bytes(words[:4], "big"), n_startup_trials=_RANDOM_TRIALS)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    distributions = {key: _distribution(searched) for key, searched in space.items()}
    for setting, score in observations:
        params = _clipped(setting, space)
        study.add_trial(optuna.trial.create_trial(params=params, distributions=distributions, value=score))
    return [{key: _rounded(value) for key, value in study.ask(distributions).params.items()} for _ in range(count)]


def _distribution(searched: Searched) -> Any:
    """As optuna's."""
    import optuna

    if isinstance(searched, Choices):
        return optuna.distributions.CategoricalDistribution(searched.values)
    return optuna.distributions.FloatDistribution(searched.low, searched.high, log=searched.log)


def _clipped(setting: dict[str, Any], space: dict[str, Searched]) -> dict[str, Any]:
    """A default may lie outside of its range; optuna then gets the nearest value inside."""
    return {
        key: setting[key] if isinstance(one, Choices) else min(max(setting[key], one.low), one.high)
        for key, one in space.items()
    }


def _rounded(value: Any) -> Any:
    """Numbers with four significant digits."""
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value
