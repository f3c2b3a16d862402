"""Which settings to try next: optuna's TPE, asked in rounds, so that the order in which trainings end changes nothing.

A suggestion is a function of (seed, loss, round, what earlier rounds found). No state of a sampler has to survive: a
study that was killed asks the same questions again and gets the same answers.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nearkin.losses.search_ranges import RANGES, Choices, Range, Searched
from nearkin.training.config.recipe import Recipe
from nearkin.training.config.registry import LOSSES

__all__ = ["Tried", "default", "needs_optuna", "space", "suggested", "write_studies"]

RATE = Range(0.2, 5.0, log=True)  # times the encoder's usual learning rate
_RANDOM = 4  # settings tried before TPE has something to go by
_DIGITS = 4


class Tried(NamedTuple):
    """A setting and how much better than the default it was, over the folds that it was trained on."""

    setting: dict[str, Any]
    score: float


def needs_optuna() -> None:
    """Says so in one sentence where it is missing."""
    from importlib.util import find_spec

    if find_spec("optuna") is None:
        raise ModuleNotFoundError("nearkin compare needs optuna: pip install 'nearkin[compare]'")


def space(loss: str, base: Recipe, lr: float) -> dict[str, Searched]:
    """What is searched for a loss, by the keys of a recipe. A rate that the user has set is not."""
    found: dict[str, Searched] = {}
    for name, searched in RANGES[loss].items():
        if name != "loss_scale":
            found[f"loss.{name}"] = searched
        elif base.optimizer.loss_scale is None:
            found["optimizer.loss_scale"] = searched
    if base.optimizer.lr is None:
        found["optimizer.lr"] = Range(_short(lr * RATE.low), _short(lr * RATE.high), log=True)
    return found


def default(loss: str, searched: dict[str, Searched], lr: float) -> dict[str, Any]:
    """The setting that everybody uses who has not searched, written out."""
    choice = LOSSES[loss]
    known = {f"loss.{name}": setting.default for name, setting in choice.settings.items()}
    known |= {"optimizer.loss_scale": float(getattr(choice.make, "lr_scale", 1.0)), "optimizer.lr": lr}
    return {key: known[key] for key in searched}


def suggested(
    loss: str, searched: dict[str, Searched], tried: Sequence[Tried], count: int, seed: int
) -> list[dict[str, Any]]:
    """The next `count` settings of a loss, given all that earlier rounds have tried."""
    import optuna

    if not searched:
        return [{} for _ in range(count)]
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    words = hashlib.sha256(f"{seed} {loss} {len(tried)}".encode()).digest()
    sampler = optuna.samplers.TPESampler(seed=int.from_bytes(words[:4], "big"), n_startup_trials=_RANDOM)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    kinds = {key: distribution(one) for key, one in searched.items()}
    for one in tried:
        study.add_trial(
            optuna.trial.create_trial(params=_inside(one.setting, searched), distributions=kinds, value=one.score)
        )
    return [{key: _short(value) for key, value in study.ask(kinds).params.items()} for _ in range(count)]


def distribution(searched: Searched) -> Any:
    """As optuna has it."""
    import optuna

    if isinstance(searched, Choices):
        return optuna.distributions.CategoricalDistribution(searched.values)
    return optuna.distributions.FloatDistribution(searched.low, searched.high, log=searched.log)


def write_studies(path: Path, found: Mapping[str, Any], spaces: Mapping[str, dict[str, Searched]]) -> None:
    """Beside our own tables, the trials of each loss as a study that optuna and its dashboard open.

    Nothing is read back from it, so it is simply written anew. A trial that did not see every fold is pruned.
    """
    import optuna
    from sqlalchemy import URL

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = optuna.storages.RDBStorage(URL.create("sqlite", database=str(path)).render_as_string())
    try:
        _write_studies(storage, found, spaces)
    except optuna.exceptions.StorageInternalError as error:
        way_out = "make room, then the same command goes on"
        raise ValueError(f"{path}: optuna could not write into it ({error.__cause__ or error}); {way_out}") from None
    finally:
        storage.remove_session()
        storage.engine.dispose()


def _write_studies(storage: Any, found: Mapping[str, Any], spaces: Mapping[str, dict[str, Searched]]) -> None:
    import optuna

    old = {study.study_name for study in optuna.get_all_study_summaries(storage)}
    for loss, one in found.items():
        if loss in old:
            optuna.delete_study(study_name=loss, storage=storage)
        study = optuna.create_study(storage=storage, study_name=loss, direction="maximize")
        kinds = {key: distribution(searched) for key, searched in spaces[loss].items()}
        study.add_trials([_as_optuna(trial, len(one.best.folds), kinds, spaces[loss]) for trial in one.trials])


def _as_optuna(trial: Any, folds: int, kinds: dict[str, Any], searched: dict[str, Searched]) -> Any:
    import optuna

    states, whole = optuna.trial.TrialState, len(trial.folds) == folds
    return optuna.trial.create_trial(
        state=states.COMPLETE if whole else states.PRUNED,
        params=_inside(trial.setting, searched),
        distributions=kinds,
        value=trial.value if whole else None,
        intermediate_values={fold: result["value"] for fold, result in trial.folds.items()},
        user_attrs={"setting": trial.setting, "ended": [result["ended"] for result in trial.folds.values()]},
    )


def _inside(setting: dict[str, Any], searched: dict[str, Searched]) -> dict[str, Any]:
    """A default may lie outside of a range; optuna then learns of the nearest value inside."""
    return {
        key: setting[key] if isinstance(one, Choices) else min(max(setting[key], one.low), one.high)
        for key, one in searched.items()
    }


def _short(value: Any) -> Any:
    """Numbers as one would write them: four digits."""
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value
