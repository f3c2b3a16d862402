"""Whether the promises of a calibration hold on classes that it has not seen.

    python studies/calibration_holds.py [--embeddings FILE.npz] [--quick]

FILE.npz: embeddings (N, D) and labels (N,) of classes that the encoder has not learned from, as `nearkin embed` writes
them; without it, two synthetic worlds: classes of very different widths with heavy tails, and classes in families.

200 times C classes are drawn to calibrate on, all others are the truth: how often an offered FAR per pair holds on
them, and how often the 95 % interval of the FAR covers the truth.
"""

import argparse
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from nearkin.evaluation.verification import class_rates
from nearkin.gallery import calibration

Floats = NDArray[np.float32]
Labels = NDArray[np.int64]
World = tuple[str, Floats, Labels]  # rows of length 1, by class


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--embeddings")
    parser.add_argument("--quick", action="store_true")
    chosen = parser.parse_args(arguments)
    for world in worlds(chosen.embeddings):
        far(*world, chosen.quick)


def worlds(path: str | None) -> Iterator[World]:
    if path is not None:
        with np.load(path, allow_pickle=False) as file:
            labels = np.unique(file["labels"], return_inverse=True)[1]
            order = np.argsort(labels, kind="stable")
            rows = file["embeddings"].astype(np.float64)[order]
        yield path, (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32), labels[order]
        return
    for name in ("heavy tails", "families"):
        yield name, *made_up(name, 600, 8)


def made_up(name: str, classes: int, each: int, dim: int = 32, seed: int = 0) -> tuple[Floats, Labels]:
    draw = np.random.default_rng(seed)
    labels = np.repeat(np.arange(classes), each)
    centres, width, tails = draw.normal(size=(classes, dim)), 0.5 * np.ones(classes), np.ones((len(labels), 1))
    if name == "families":
        centres = draw.normal(size=(max(2, classes // 6), dim))[draw.integers(max(2, classes // 6), size=classes)]
        centres = centres + 0.6 * draw.normal(size=(classes, dim))
        width = 0.5 * np.exp(0.4 * draw.normal(size=classes))
    else:
        width = 0.5 * np.exp(0.7 * draw.normal(size=classes))
        tails = np.sqrt(3 / draw.chisquare(3, size=(len(labels), 1)))
    rows = centres[labels] + width[labels, None] * tails * draw.normal(size=(len(labels), dim))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32), labels


def far(name: str, rows: Floats, labels: Labels, quick: bool) -> None:
    draw = np.random.default_rng(0)
    number = int(labels.max()) + 1
    groups = np.split(np.arange(len(labels)), np.flatnonzero(np.diff(labels)) + 1)
    thresholds = calibration._thresholds(rows, groups, 0, None)
    table = _table(rows, groups, thresholds)  # (T, C, C)
    lines, total = table.sum(2), table.sum((1, 2))
    print(f"{name}: {number} classes | classes calibrated on | FAR | offered | held | median of truth / FAR | covered")
    for classes in (24, 48, 80, 100, 150):
        outcomes: dict[float, list[tuple[bool, float, bool]]] = {}
        for _ in range(40 if quick else 200):
            inside = draw.permutation(number)[:classes]
            part = table[:, inside[:, None], inside]
            rates = class_rates.impostor_rates(part.sum(1) + part.sum(2))
            outside = number - classes
            truth = (total - 2 * lines[:, inside].sum(1) + part.sum((1, 2))) / (outside * (outside - 1))
            for wanted in (1e-1, 1e-2, 1e-3):
                at = int(np.argmax(rates.bound <= wanted))
                offered = bool(rates.bound[-1] <= wanted)
                covered = bool(rates.low[at] <= truth[at] <= rates.high[at])
                outcomes.setdefault(wanted, []).append((offered, float(truth[at]), covered))
        for wanted, draws in outcomes.items():
            offered_draws = [(true, covered) for offered, true, covered in draws if offered]
            if offered_draws:
                within, ratio = (
                    np.mean([true <= wanted for true, _ in offered_draws]),
                    np.median([t for t, _ in offered_draws]) / wanted,
                )
                cover = np.mean([covered for _, covered in offered_draws])
                share = len(offered_draws) / len(draws)
                print(f"{classes} | {wanted:g} | {share:.0%} | {within:.1%} | {ratio:.2f} | {cover:.1%}", flush=True)
            else:
                print(f"{classes} | {wanted:g} | not offered", flush=True)


def _table(rows: Floats, groups: list[Labels], thresholds: NDArray[np.float64]) -> Floats:
    """(T, C, C): the share of pairs of items of two classes at or above each threshold; 0 within a class."""
    owner = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    size, places = np.bincount(owner), len(thresholds) + 1
    table = np.zeros((len(thresholds), len(groups), len(groups)), np.float32)
    for a, group in enumerate(groups):
        reached = np.searchsorted(thresholds, rows[group] @ rows.T, side="right") + owner * places
        counts = np.bincount(reached.ravel(), minlength=len(groups) * places).reshape(-1, places)
        table[:, a] = (counts[:, :0:-1].cumsum(1)[:, ::-1] / (len(group) * size)[:, None]).T
        table[:, a, a] = 0
    return table


if __name__ == "__main__":
    main()
