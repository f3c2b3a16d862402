"""What to do, in plain words, and why: every sentence is read off the table."""

import shlex
from collections.abc import Mapping
from typing import Any

from nearkin.evaluation.statistics import binomial, cluster_bootstrap

__all__ = ["flag_words", "recommended"]

MAIN = "map@r"
_SHORT_OF_STEPS = 0.5  # of the models at their best at the very end
_FEW_CLASSES = 20


def recommended(said: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """{"loss", "sentences": reasons, "cautions": what the table cannot tell, "train": the command to go on with}.

    flags: what that command has to say beside the loss and its setting.
    """
    rows = said["table"]
    best = rows[0]
    tied = [row["loss"] for row in rows[1:] if row["separated"]["against"]["verdict"] == "undecided"]
    worse = [row["loss"] for row in rows[1:] if row["separated"]["against"]["verdict"] == "worse"]
    reasons = [_first(said, best), *_others(best, tied, worse), *_tied(said, best["loss"], tied)]
    reasons += [*_tuning(best), *_joined(said, best)]
    return {
        "loss": best["loss"],
        "tied": tied,
        "sentences": reasons,
        "cautions": _cautions(said, best, tied),
        "train": _command(said, best, flags),
    }


def _first(said: Mapping[str, Any], best: Mapping[str, Any]) -> str:
    figure, test = best["separated"][MAIN], said["protocol"]["test"]
    inside = "" if figure["low"] is None else f" (95 % interval {_points(figure['low'])} to {_points(figure['high'])})"
    untrained = next(row for row in said["references"] if row["loss"] == "untrained")["separated"][MAIN]["value"]
    return (
        f"{best['loss']} is the best of {_count(len(said['table']), 'loss', 'losses')} on {test['classes']:,} unseen "
        f"classes: MAP@R {_points(figure['value'])} %{inside}; the untrained encoder has {_points(untrained)} %."
    )


def _others(best: Mapping[str, Any], tied: list[str], worse: list[str]) -> list[str]:
    found = []
    if worse:
        found.append(f"It is better than {_listed(worse)}, over test classes and over trainings alike.")
    if tied:
        verb = "is" if len(tied) == 1 else "are"
        found.append(f"{_listed(tied)} {verb} not shown to be worse: the difference may be chance.")
    return found


def _tied(said: Mapping[str, Any], best: str, tied: list[str]) -> list[str]:
    """Where several are as good as each other, what else speaks for one of them."""
    if not tied:
        return []
    level, steps = said["reach"]["levels"][-1], said["reach"]["steps"]
    quick = [loss for loss in (best, *tied) if steps[loss][-1] is not None]
    first = min(quick, key=lambda loss: steps[loss][-1], default=best)
    if first != best and (steps[best][-1] is None or steps[first][-1] < steps[best][-1]):
        own = "never does" if steps[best][-1] is None else f"takes {steps[best][-1]:,}"
        return [
            f"Of these {first} learns fastest: it reaches a validation MAP@R of {_points(level)} % after "
            f"{steps[first][-1]:,} steps, {best} {own}."
        ]
    return [f"None of these learns faster than {best}."] if steps[best][-1] is not None else []


def _tuning(best: Mapping[str, Any]) -> list[str]:
    gain = 100 * (best["validation"] - best["validation_default"])
    if not best["tuned"]:
        return ["Its default setting was the best of those searched."]
    return [f"The search gained it {gain:.1f} points of validation MAP@R over its default setting."]


def _joined(said: Mapping[str, Any], best: Mapping[str, Any]) -> list[str]:
    separated, joined = best["separated"][MAIN]["value"], best["concatenated"][MAIN]["value"]
    folds = said["protocol"]["folds"]
    if joined > separated:
        return [
            f"With {folds} times the dimensions, the embeddings of its {folds} fold models side by side reach "
            f"{_points(joined)} %."
        ]
    return []


def _cautions(said: Mapping[str, Any], best: Mapping[str, Any], tied: list[str]) -> list[str]:
    plan, found = said["protocol"], []
    rising = [loss for loss, share in said["rising"].items() if share > _SHORT_OF_STEPS]
    if rising:
        verb = "was" if len(rising) == 1 else "were"
        found.append(
            f"{_listed(rising)} {verb} still getting better at step {plan['steps']:,}: with more --steps the order may "
            f"change."
        )
    for row in said["references"]:
        figure = (row.get("separated") or row["concatenated"])[MAIN]
        if figure["value"] >= best["separated"][MAIN]["value"]:
            name = "the untrained encoder" if row["loss"] == "untrained" else plan["baseline"]
            found.append(f"No loss beats {name} ({_points(figure['value'])} %): train longer before choosing one.")
    classes = plan["test"]["classes"]
    if classes < binomial.MIN_CLASSES:
        found.append(f"{cluster_bootstrap.too_few(classes).capitalize()}.")
    elif classes < _FEW_CLASSES:
        found.append(f"{classes} test classes are few: intervals are wide, and most differences stay undecided.")
    if plan["seeds"] == 1:
        found.append("One seed a fold: how much the luck of a training matters is known from the folds alone.")
    if plan["trials"] < 8:
        found.append(
            f"{_count(plan['trials'], 'setting', 'settings')} a loss is a short search; more --trials may move a loss."
        )
    for row in (row for row in said["table"] if row["broken"]):
        many = _count(len(row["broken"]), "final training", "final trainings")
        found.append(f"{many} of {row['loss']} broke off ({row['broken'][0]}): what had been learned by then counts.")
    if said["unfinished"]:
        found.append(f"The budget ended before {_listed(said['unfinished'])} could be trained: not in the table.")
    if tied and len(tied) + 1 == len(said["table"]):
        found.append("No loss is shown to be worse than another here: more classes, or more --seeds, would tell more.")
    return found


def _command(said: Mapping[str, Any], best: Mapping[str, Any], flags: Mapping[str, Any]) -> str:
    words = ["nearkin", "train", said["source"], "--loss", best["loss"], *flag_words(flags)]
    for key, value in best["setting"].items():
        words += ["--set", f"{key}={value}"]
    return shlex.join(words)


def flag_words(flags: Mapping[str, Any]) -> list[str]:
    """{"set": ["a.b=1"], "partial": True} → --set a.b=1 --partial"""
    words = []
    for name, value in flags.items():
        for one in value if isinstance(value, (list, tuple)) else [value]:
            words += [f"--{name}"] if one is True else [f"--{name}", str(one)]
    return words


def _points(share: float) -> str:
    return f"{100 * share:.1f}"


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
