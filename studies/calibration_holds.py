"""Whether the promises of a calibration hold on classes that it has not seen.

    python studies/calibration_holds.py far|confidence|strangers [--embeddings FILE.npz] [--quick]

FILE.npz: embeddings (N, D) and labels (N,) of classes that the encoder has not learned from, as `nearkin embed` writes
them; without it, two synthetic worlds: classes of very different widths with heavy tails, and classes in families.

    far         200 times C classes are drawn to calibrate on, all others are the truth: how often an offered FAR per
                pair holds on them, and how often the 95 % interval of the FAR covers the truth
    confidence  galleries of 10 to 10,000 labels, half of the queries from enrolled classes: the largest difference
                between confidence and accuracy in a tenth of confidence with 100 answers; how often known or unknown
                is right, and the same with the plain threshold of `verify`
    strangers   how many queries of unknown classes are accepted, and the stated maximum
"""

import argparse
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from nearkin.evaluation.verification import class_rates
from nearkin.gallery import calibration
from nearkin.gallery.results import Calibrator, Hit, Identity

Floats = NDArray[np.float32]
Labels = NDArray[np.int64]
World = tuple[str, Floats, Labels]  # rows of length 1, by class
Rounds = list[tuple[Calibrator, Labels]]
NEAREST = 50  # rows that a gallery weighs


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("what", choices=("far", "confidence", "strangers"))
    parser.add_argument("--embeddings")
    parser.add_argument("--quick", action="store_true")
    chosen = parser.parse_args(arguments)
    for world in worlds(chosen.embeddings, chosen.what, chosen.quick):
        {"far": far, "confidence": confidence, "strangers": strangers}[chosen.what](*world, chosen.quick)


def worlds(path: str | None, what: str, quick: bool) -> Iterator[World]:
    if path is not None:
        with np.load(path, allow_pickle=False) as file:
            labels = np.unique(file["labels"], return_inverse=True)[1]
            order = np.argsort(labels, kind="stable")
            rows = file["embeddings"].astype(np.float64)[order]
        yield path, (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32), labels[order]
        return
    classes, each = (600, 8) if quick or what != "confidence" else (13_000, 8)
    for name in ("heavy tails", "families"):
        yield name, *made_up(name, classes, each)


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


def confidence(name: str, rows: Floats, labels: Labels, quick: bool) -> None:
    print(f"{name} | labels | examples | largest error | answers | known or not, right | plain threshold")
    for calibrated in (48, 200):
        rounds = calibrations(rows, labels, calibrated, 2 if quick else 6)
        for count in (10, 100, 300) if len(labels) < 50_000 else (10, 100, 1000, 10_000):
            for examples in (1, 5):
                galleries = Asked(rows, labels, rounds, count, examples, 500 if quick else 6000)
                worst, judged = galleries.worst()
                plain = f"{galleries.accuracy():.1%} | {galleries.plain_accuracy():.1%}"
                print(f"{calibrated} | {count} | {examples} | {worst:.3f} | {judged} | {plain}", flush=True)


def strangers(name: str, rows: Floats, labels: Labels, quick: bool) -> None:
    print(f"{name} | classes | labels | examples | FAR per query | strangers that passed")
    for calibrated in (48, 150):
        rounds = calibrations(rows, labels, calibrated, 2 if quick else 6)
        for count in (20, 200, 300):
            for examples in (1, 4):
                for far_per_query in (None, 0.01, 0.1, 0.3):
                    try:
                        galleries = Asked(rows, labels, rounds, count, examples, 300 if quick else 3000, far_per_query)
                    except ValueError as error:
                        print(f"{calibrated} | {count} | {examples} | {far_per_query:g} | refused: {error}", flush=True)
                        continue
                    stated = "none" if galleries.far is None else f"{galleries.far:.3g}"
                    asked_for = "likeliest" if far_per_query is None else "asked"
                    line = f"{stated} ({asked_for}) | {galleries.passed():.2%}, known found {galleries.found():.1%}"
                    print(f"{calibrated} | {count} | {examples} | {line}", flush=True)


def calibrations(rows: Floats, labels: Labels, classes: int, rounds: int) -> Rounds:
    """Calibrations on several samples of `classes` classes, each with the classes that it has not seen."""
    result = []
    for seed in range(rounds):
        order = np.random.default_rng([classes, seed]).permutation(int(labels.max()) + 1)
        inside = np.isin(labels, order[:classes])
        plain = calibration.measure(torch.from_numpy(rows[inside]), torch.from_numpy(labels[inside]))
        result.append((Calibrator(plain), order[classes:]))
    return result


class Asked:
    """Several galleries of `count` labels, and answered queries of known and unknown classes, in equal numbers."""

    def __init__(
        self,
        rows: Floats,
        labels: Labels,
        rounds: Rounds,
        count: int,
        examples: int,
        most: int,
        far: float | None = None,
    ) -> None:
        draw = np.random.default_rng([count, examples])
        self.sure: list[float] = []
        self.right: list[bool] = []
        self.known: list[bool] = []
        self.stranger: list[bool] = []
        self.near: list[bool] = []
        self.far: float | None = None
        start = np.searchsorted(labels, np.arange(labels.max() + 2))
        for calibrator, unseen in rounds:
            order = draw.permutation(unseen)
            enrolled = order[:count]
            others = order[count:][: max(count, 200)]
            items = [draw.permutation(np.arange(start[c], start[c + 1])) for c in enrolled]
            here = np.concatenate([one[:examples] for one in items])
            asking = draw.permutation(np.concatenate([one[examples:] for one in items]))
            strange = draw.permutation(np.concatenate([np.arange(start[c], start[c + 1]) for c in others]))
            number = min(len(asking), len(strange), most // (2 * len(rounds)))
            self._ask(calibrator, rows, labels, here, asking[:number], strange[:number], examples, far)

    def _ask(
        self,
        calibrator: Calibrator,
        rows: Floats,
        labels: Labels,
        here: Labels,
        asking: Labels,
        strange: Labels,
        examples: int,
        far: float | None,
    ) -> None:
        names = [str(label) for label in labels[here]]
        sizes = {examples: len(here) // examples}
        plain = calibrator.verify(0.0, None).threshold
        for query, stranger in [(i, False) for i in asking] + [(i, True) for i in strange]:
            scores = rows[here] @ rows[query]
            most = min(NEAREST, len(scores))
            order = np.argpartition(-scores, most - 1)[:most]
            order = order[np.argsort(-scores[order], kind="stable")]
            hits = [Hit(int(n), names[n], float(scores[n]), "", {}) for n in order]
            found: Identity = calibrator.identify(hits, sizes, far, {hit.label: examples for hit in hits})
            self.far = found.far
            self.sure.append(found.confidence or 0.0)
            self.right.append(found.label == (None if stranger else str(labels[query])))
            self.known.append(not found.unknown)
            self.stranger.append(stranger)
            self.near.append(plain is not None and hits[0].similarity >= plain)

    def worst(self) -> tuple[float, int]:
        sure, right = np.array(self.sure), np.array(self.right)
        place = np.minimum((sure * 10).astype(int), 9)
        gaps = [abs(sure[place == b].mean() - right[place == b].mean()) for b in range(10) if (place == b).sum() >= 100]
        return max(gaps, default=float("nan")), len(sure)

    def accuracy(self) -> float:
        return float((np.array(self.known) != np.array(self.stranger)).mean())

    def plain_accuracy(self) -> float:
        return float((np.array(self.near) != np.array(self.stranger)).mean())

    def passed(self) -> float:
        return float(np.array(self.known)[np.array(self.stranger)].mean())

    def found(self) -> float:
        return float(np.array(self.known)[~np.array(self.stranger)].mean())


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
