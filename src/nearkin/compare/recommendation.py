"""The recommendation in words; every sentence follows from the table."""

import shlex
from collections.abc import Mapping
from typing import Any

from nearkin.evaluation.statistics import binomial, cluster_bootstrap

__all__ = ["flag_words", "recommend"]

MAIN = "map@r"
_SHORT_OF_STEPS = 0.5  # of the models have their best value at the last step
_FEW_CLASSES = 20


def recommend(results: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """{"loss", "sentences": reasons, "cautions": what the table cannot tell, "train": the next command, or None where
    no loss is better than what is to be had without training}.

    flags: of that command, besides the loss and its setting.
    """
    rows = results["table"]
    best = rows[0]
    tied = [row["loss"] for row in rows[1:] if row["separated"]["against"]["verdict"] == "undecided"]
    worse = [row["loss"] for row in rows[1:] if row["separated"]["against"]["verdict"] == "worse"]
    reasons = [_first(results, best), *_others(best, tied, worse), *_tied(results, best["loss"], tied)]
    reasons += [*_tuning(best), *_joined(results, best)]
    return {
        "loss": best["loss"],
        "tied": tied,
        "sentences": reasons,
        "cautions": _cautions(results, best, tied),
        "train": None if _unbeaten(results, best) else _command(results, best, flags),
    }


def _first(results: Mapping[str, Any], best: Mapping[str, Any]) -> str:
    figure, test = best["separated"][MAIN], results["protocol"]["test"]
    tested = f"new items of {test['classes']:,} known" if test.get("known") else f"{test['classes']:,} unseen"
    inside = "" if figure["low"] is None else f" (95 % interval {_points(figure['low'])} to {_points(figure['high'])})"
    untrained = next(row for row in results["references"] if row["loss"] == "untrained")["separated"][MAIN]["value"]
    return (
        f"{best['loss']} is the best of {_count(len(results['table']), 'loss', 'losses')} on {tested} "
        f"classes: MAP@R {_points(figure['value'])} %{inside}; the untrained encoder has {_points(untrained)} %."
    )


def _others(best: Mapping[str, Any], tied: list[str], worse: list[str]) -> list[str]:
    sentences = []
    if worse:
        sentences.append(f"It is better than {_listed(worse)}, over test classes and over trainings alike.")
    if tied:
        verb = "is" if len(tied) == 1 else "are"
        sentences.append(f"{_listed(tied)} {verb} not shown to be worse: the difference may be chance.")
    return sentences


def _tied(results: Mapping[str, Any], best: str, tied: list[str]) -> list[str]:
    """What else speaks for one of several losses that are equally good."""
    if not tied:
        return []
    level, steps = results["reach"]["levels"][-1], results["reach"]["steps"]
    quick = [loss for loss in (best, *tied) if steps[loss][-1] is not None]
    first = min(quick, key=lambda loss: steps[loss][-1], default=best)
    if first != best and (steps[best][-1] is None or steps[first][-1] < steps[best][-1]):
        reached = "never does" if steps[best][-1] is None else f"takes {steps[best][-1]:,}"
        return [
            f"Of these {first} learns fastest: it reaches a validation MAP@R of {_points(level)} % after "
            f"{steps[first][-1]:,} steps, {best} {reached}."
        ]
    return [f"None of these learns faster than {best}."] if steps[best][-1] is not None else []


def _tuning(best: Mapping[str, Any]) -> list[str]:
    gain = 100 * (best["validation"] - best["validation_default"])
    if not best["tuned"]:
        return ["Its default setting was the best of those searched."]
    return [f"The search gained it {gain:.1f} points of validation MAP@R over its default setting."]


def _joined(results: Mapping[str, Any], best: Mapping[str, Any]) -> list[str]:
    separated, joined = best["separated"][MAIN]["value"], best["concatenated"][MAIN]["value"]
    folds = results["protocol"]["folds"]
    if joined > separated:
        return [
            f"With {folds} times the dimensions, the embeddings of its {folds} fold models side by side reach "
            f"{_points(joined)} %."
        ]
    return []


def _cautions(results: Mapping[str, Any], best: Mapping[str, Any], tied: list[str]) -> list[str]:
    plan, cautions = results["protocol"], []
    rising = [loss for loss, share in results["rising"].items() if share > _SHORT_OF_STEPS]
    if rising:
        verb = "was" if len(rising) == 1 else "were"
        cautions.append(
            f"{_listed(rising)} {verb} still improving at step {plan['steps']:,}: with more --steps the order may "
            f"change."
        )
    cautions += _without_gain(results, best)
    classes = plan["test"]["classes"]
    if classes < binomial.MIN_CLASSES:
        cautions.append(f"{cluster_bootstrap.too_few(classes).capitalize()}.")
    elif classes < _FEW_CLASSES:
        cautions.append(f"{classes} test classes are few: intervals are wide, and most differences stay undecided.")
    if plan["seeds"] == 1:
        cautions.append("One seed per fold: the chance of a training is known from the folds alone.")
    if plan["trials"] < 8:
        cautions.append(
            f"{_count(plan['trials'], 'setting', 'settings')} per loss is a short search; "
            "more --trials may change the order."
        )
    for row in (row for row in results["table"] if row["broken"]):
        many = _count(len(row["broken"]), "final training", "final trainings")
        cautions.append(f"{many} of {row['loss']} failed ({row['broken'][0]}): their best model until then counts.")
    if results["unfinished"]:
        cautions.append(f"The budget ended before {_listed(results['unfinished'])} could be trained: not in the table.")
    if tied and len(tied) + 1 == len(results["table"]):
        cautions.append("No loss is shown to be worse than the best: more classes or more --seeds would help.")
    return cautions


def _unbeaten(results: Mapping[str, Any], best: Mapping[str, Any]) -> list[str]:
    """What no loss beats, with its figure: the untrained encoder, the baseline."""
    unbeaten = []
    for row in results["references"]:
        value = (row.get("separated") or row["concatenated"])[MAIN]["value"]
        if value >= best["separated"][MAIN]["value"]:
            name = "the untrained encoder" if row["loss"] == "untrained" else f"the {results['protocol']['baseline']}"
            unbeaten.append(f"{name} ({_points(value)} %)")
    return unbeaten


def _without_gain(results: Mapping[str, Any], best: Mapping[str, Any]) -> list[str]:
    unbeaten, plan = _unbeaten(results, best), results["protocol"]
    if not unbeaten:
        return []
    ways = ["more --steps", "more items of each class" if plan["test"].get("known") else "more classes"]
    if not plan["test"].get("known"):
        ways.append("--closed, which asks about new items of known classes")
    if plan["baseline"] == "pixels":
        ways.append("a pretrained encoder (nearkin encoders)")
    names = _listed(unbeaten)
    return [f"No loss beats {names}, so no command is suggested. What may help: {'; '.join(ways)}."]


def _command(results: Mapping[str, Any], best: Mapping[str, Any], flags: Mapping[str, Any]) -> str:
    words = ["nearkin", "train", results["source"], "--loss", best["loss"], *flag_words(flags)]
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
