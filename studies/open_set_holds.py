"""Whether the intervals and verdicts of open-set identification hold on new classes.

    python studies/open_set_holds.py [--quick]

Synthetic classes of several widths. For each number of classes, samples of new classes: how often the 95 % intervals of
FNIR at FPIR 0.1 and 0.02 (where so few searches can show it) and of AUROC contain the truth, which 150 other samples of
the same size give; and how often one of two equally good embeddings of the same items is called better at FPIR 0.1.
Then the same of `identification`: its gain, OSCR and calibration errors, whose truth is their mean over the other
samples, and how often a rate of 0.3 is called exceeded or below.
"""

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from nearkin.evaluation.open_set import method_choice, search_rates
from nearkin.evaluation.open_set.identification import identification
from nearkin.evaluation.open_set.label_scores import Method
from nearkin.evaluation.open_set.open_set_metrics import classes_of, searches
from nearkin.evaluation.open_set.search_rates import Trials

FPIRS = (0.1, 0.02)
EACH = 8


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args(arguments).quick
    print("classes | FNIR at 0.1 | FNIR at 0.02 | AUROC covered | one of two equals decided")
    for classes in (10,) if quick else (10, 30, 100):
        samples, others = (6, 10) if quick else (200, 150)
        truth = pooled([trials(classes, 10_000 + seed)[0] for seed in range(others)])
        covered: dict[str, list[bool]] = {"0.1": [], "0.02": [], "auroc": []}
        decided = []
        for seed in range(samples):
            a, b = trials(classes, seed)
            shown = [f for f in FPIRS if f >= search_rates.smallest_fpir(int((~a.mated).sum()) // 4)]
            ends = search_rates.intervals(a, shown, seed=0)
            for f, (low, high) in zip(shown, ends.fnir, strict=True):
                if not np.isnan(low):
                    covered[f"{f:g}"].append(low <= search_rates.operating_point(truth, f).fnir <= high)
            covered["auroc"].append(ends.auroc[0] <= search_rates.auroc(truth) <= ends.auroc[1])
            fnirs = {"nearest": ends.fnirs, "template": search_rates.intervals(b, shown, seed=0).fnirs}
            both = {"nearest": a, "template": b}
            choice = method_choice.choose(both, fnirs, shown, 0.1, seed=0)
            decided.append(choice["against"]["template"]["verdict"] != "undecided")
        cells = [f"{np.mean(part):.1%} of {len(part)}" if part else "not offered" for part in covered.values()]
        print(f"{classes} | {' | '.join(cells)} | {np.mean(decided):.1%} of {len(decided)}", flush=True)
    print("classes | gain | OSCR | ECE of unknown | ECE of named covered | a rate exceeded | below")
    for classes in (10,) if quick else (10, 30, 100):
        print(f"{classes} | {identified(classes, *((4, 4) if quick else (100, 60)))}", flush=True)


def identified(classes: int, samples: int, others: int) -> str:
    """The shares of samples whose intervals contain the truth, and those whose rate is not called kept."""
    names = ("gain", "oscr", "ece_unknown", "ece_named")
    truth = {
        name: np.nanmean([one[name] for one in map(answers_of(classes), range(1000, 1000 + others))]) for name in names
    }
    covered: dict[str, list[bool]] = {name: [] for name in names}
    verdicts = []
    for found in map(answers_of(classes), range(samples)):
        for name, (low, high) in ((name, found["intervals"][name]) for name in names):
            if not np.isnan(low):
                covered[name].append(low <= truth[name] <= high)
        verdicts.append(found["far"][0]["verdict"])
    cells = [f"{np.mean(part):.1%} of {len(part)}" if part else "not offered" for part in covered.values()]
    cells += [f"{verdicts.count(verdict) / samples:.1%}" for verdict in ("exceeded", "below")]
    return " | ".join(cells)


def answers_of(classes: int) -> Callable[[int], dict[str, Any]]:
    def answers(seed: int) -> dict[str, Any]:
        rows, labels = world(classes, seed)
        return dict(identification(rows(), labels, examples=(2,), fars=(0.3,), repeats=4)["examples"][0])

    return answers


def trials(classes: int, seed: int, dim: int = 12) -> tuple[Trials, Trials]:
    """The searches of new classes by two equally good embeddings of the same items."""
    rows, labels = world(classes, seed, dim)
    return _searched(rows(), labels), _searched(rows(), labels)


def world(classes: int, seed: int, dim: int = 12) -> tuple[Callable[[], np.ndarray], np.ndarray]:
    """Embeddings of new items of new classes at each call, and their labels."""
    draw = np.random.default_rng(seed)
    labels = np.repeat(np.arange(classes), EACH)
    centres = draw.normal(size=(classes, dim))[labels]
    width = 0.45 * np.exp(0.4 * draw.normal(size=classes))[labels, None]
    return lambda: centres + width * draw.normal(size=centres.shape), labels


def _searched(rows: np.ndarray, labels: np.ndarray) -> Trials:
    x, method = torch.from_numpy(rows), Method("nearest")
    return searches(x, classes_of(x, torch.from_numpy(labels)), 2, [method], 4, 0)[method.name]


def pooled(parts: list[Trials]) -> Trials:
    return Trials(*(np.concatenate(column) for column in zip(*parts, strict=True)))


if __name__ == "__main__":
    main()
