"""Whether `identify` keeps the FAR that it states, on classes that its calibration has not seen."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nearkin import training
from nearkin.core import random
from nearkin.core.relations import UNKNOWN
from nearkin.data.sources import PLAIN, Reading
from nearkin.data.vectors import Vectors, class_ids
from nearkin.evaluation.arrays import Floats, Progress
from nearkin.evaluation.open_set import draws
from nearkin.evaluation.open_set.label_scores import Method
from nearkin.evaluation.open_set.open_set_metrics import Classes, classes_of, searches
from nearkin.evaluation.open_set.search_rates import Trials
from nearkin.evaluation.retrieval.knn import BUDGET
from nearkin.evaluation.statistics.cluster_bootstrap import share_interval
from nearkin.gallery import calibration, results
from nearkin.gallery.items import encoder_info
from nearkin.gallery.results import Calibrator, Hit

__all__ = ["calibrator_of", "check_far", "of_vectors"]

REPEATS = 5
SMALL = 20  # labels of a small gallery, which is tested beside one of half of the classes


class _Tested(NamedTuple):
    """Searches of classes that a calibration has not seen, in galleries of `labels` labels of `examples` items."""

    calibrator: Calibrator
    labels: int
    trials: Trials


_Part = tuple[Classes, Calibrator, int]  # classes to test, a calibration that has not seen them, number of draws


def calibrator_of(
    run: str | Path, dim: int | None = None, device: str = "auto", reading: Reading = PLAIN
) -> tuple[Calibrator | None, str]:
    """The calibration of a run, from its file or measured on its validation part; or None. And a note, which it is."""
    folder = Path(run)
    try:
        info = encoder_info(folder, dim)
        calibrator, _ = results.load_calibration(folder, info.fingerprint, info.short)
        if calibrator is not None:
            return calibrator, f"as identify uses it: {results.calibration_file(folder, info.short).name} of the run"
        part = training.embed_source(folder, part="val", dim=dim, device=device, reading=reading)
        if part.labels is None:
            return None, ""
        measured = calibration.measure(part.embeddings, torch.from_numpy(part.labels), groups=part.groups)
    except ValueError:
        return None, ""
    return Calibrator(measured), "measured on the validation part of the run, which has no calibration.json"


def of_vectors(
    vectors: Vectors,
    run: Path | None,
    *,
    dim: int | None = None,
    device: str = "auto",
    reading: Reading = PLAIN,
    **options: Any,
) -> dict[str, Any]:
    """`check_far` of embeddings as `nearkin evaluate` has them, ready for JSON. run: the one that made them."""
    assert vectors.labels is not None
    (labels,), _ = class_ids(vectors.labels)
    groups = None
    if vectors.groups is not None:
        names = vectors.groups.astype(str)
        numbers = np.unique(names, return_inverse=True)[1].astype(np.int64)
        groups = torch.from_numpy(np.where(np.isin(names, ("", str(UNKNOWN))), UNKNOWN, numbers))
    calibrator, note = (None, "") if run is None else calibrator_of(run, dim, device, reading)
    note = note or "made on half of these classes and tested on the other half, five times"
    checked = check_far(vectors.embeddings, labels, calibrator, groups=groups, **options)
    plain = [row | {"interval": _ends(row["interval"])} for row in checked["rates"]]
    return checked | {"rates": plain, "calibration": note}


def _ends(interval: tuple[float, float] | None) -> list[float | None] | None:
    return None if interval is None else [None if math.isnan(end) else end for end in interval]


def check_far(
    embeddings: Tensor,
    labels: Tensor,
    calibrator: Calibrator | None = None,
    *,
    examples: Sequence[int] = (1, 2, 5),
    fars: Sequence[float] = (0.1, 0.01, 0.001),
    seed: int = 0,
    groups: Tensor | None = None,
    budget: int = BUDGET,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """The FAR per query that `identify` states, and the share of unknown items that it accepts.

    Half of the classes are enrolled, or 20 of them, the others are unknown, in 5 seeded draws. calibrator: made on
    other classes. None: in each draw half of the classes is calibrated on, and the other half tested.

    Returns "calibration_classes", "kept", "sentence" and "rates": per number of examples and FAR requested (None: the
    likeliest answer) {"examples", "labels", "requested", "stated", "observed", "interval", "recognised", "verdict",
    "note"}. verdict: "kept" where no more than stated were accepted, "exceeded" where the 95 % interval over classes
    lies above it, else "not shown"; None where there is nothing to keep: a FAR that is refused, or not stated.
    """
    known = classes_of(embeddings, labels, groups)
    rows: list[dict[str, Any]] = []
    try:
        if calibrator is None:
            parts = _halves(embeddings, known, examples, seed)
        else:
            parts = [(known, calibrator, REPEATS)]
        possible = draws.check_classes(parts[0][0].classes, parts[0][0].bursts, examples)[0]
        for at, number in enumerate(possible):
            for small in (True, False):
                tested = _tests(embeddings, parts, number, SMALL if small else None, seed, budget)
                if small and tested[0].labels < SMALL:
                    continue  # half of the classes are no more
                rows += [_rate(tested, number, far) for far in (None, *fars)]
            if progress is not None:
                progress(at + 1, len(possible))
    except ValueError as error:
        sentence = f"Whether identify keeps its FAR was not measured: {error}."
        return {"calibration_classes": None, "kept": None, "sentence": sentence, "rates": []}
    stated = [row for row in rows if row["verdict"] is not None]
    classes = parts[0][1].classes
    return {
        "calibration_classes": classes,
        "test_classes": len(np.unique(parts[0][0].classes)),
        "kept": None if not stated else all(row["verdict"] == "kept" for row in stated),
        "sentence": _sentence(stated, classes),
        "rates": rows,
    }


def _halves(embeddings: Tensor, known: Classes, examples: Sequence[int], seed: int) -> list[_Part]:
    """A calibration on half of the classes, and the other half, in each draw."""
    number, parts = int(known.classes.max()) + 1, []
    for repeat in range(REPEATS):
        order = random.shuffled(random.words(number, seed, random.Stream.OPEN_SET_CALIBRATION, repeat))
        used = np.isin(known.classes, order[: number // 2])
        rest = Classes(known.rows[~used], known.classes[~used], known.bursts[~used])
        parts.append((rest, Calibrator(_measured(embeddings, known, used, examples)), 1))
    return parts


def _tests(
    embeddings: Tensor, parts: Sequence[_Part], examples: int, most: int | None, seed: int, budget: int
) -> list[_Tested]:
    method, results = Method("nearest"), []
    for at, (on, by, repeats) in enumerate(parts):
        kinds, numbered = np.unique(on.classes, return_inverse=True)
        part = Classes(on.rows, numbered.astype(np.int64), on.bursts)
        able = len(draws.enrollable(part.classes, part.bursts, examples)) // 2
        found = searches(embeddings, part, examples, [method], repeats, seed + at, None, budget, None, most)
        trials = found[method.name]
        trials = trials._replace(classes=kinds[trials.classes])  # the same class of several draws is one class
        results.append(_Tested(by, min(able, most or able), trials))
    return results


def _measured(embeddings: Tensor, known: Classes, used: Any, examples: Sequence[int]) -> dict[str, Any]:
    """On up to twice as many items of a class as are enrolled: what is measured for more examples is not asked for."""
    order = np.flatnonzero(used)[np.argsort(known.classes[used], kind="stable")]
    place = np.arange(len(order)) - np.searchsorted(known.classes[order], known.classes[order])
    order = order[place < max(4, 2 * max(examples))]
    rows = embeddings.cpu()[torch.from_numpy(known.rows[order])].float()
    bursts = [str(burst) for burst in known.bursts[order]]
    return calibration.measure(rows, torch.from_numpy(known.classes[order]), groups=bursts)


def _rate(tested: Sequence[_Tested], examples: int, far: float | None) -> dict[str, Any]:
    stated: list[float] = []
    accepted: list[Floats] = []
    classes, recognised, note = [], [], ""
    for by, labels, trials in tested:
        try:
            answer = by.identify([Hit(1, "", 0.0, "", {})], {examples: labels}, far, {"": examples})
        except ValueError as error:
            note = str(error)
            continue
        bound = answer.far
        reached = trials.score >= (math.inf if answer.threshold is None else answer.threshold)
        recognised.append((reached & trials.first)[trials.mated])
        if bound is None:
            note = answer.note
            continue
        stated.append(bound)
        accepted.append(reached[~trials.mated].astype(np.float64))
        classes.append(trials.classes[~trials.mated])
    row: dict[str, Any] = {"examples": examples, "labels": tested[0].labels, "requested": far, "note": note}
    row["recognised"] = float(np.concatenate(recognised).mean()) if recognised else None
    if not stated:
        return row | {"stated": None, "observed": None, "interval": None, "verdict": None}
    values = torch.from_numpy(np.concatenate(accepted))
    low, high = share_interval(values, torch.from_numpy(np.concatenate(classes)))
    observed, most = float(values.mean()), float(np.mean(stated))
    verdict = "kept" if observed <= most else "exceeded" if low > most else "not shown"
    return row | {"stated": most, "observed": observed, "interval": (low, high), "verdict": verdict}


def _sentence(kept: Sequence[dict[str, Any]], classes: int) -> str:
    by = f"by a calibration on {classes:,} other classes"
    if not kept:
        return f"identify states no FAR {by}, so there is none to keep."
    worst = max(kept, key=lambda row: float(row["observed"] / row["stated"]))
    ratio = f"{worst['observed']:.2g} observed of {worst['stated']:.2g} stated"
    if all(row["verdict"] == "kept" for row in kept):
        return f"identify keeps all {len(kept)} FARs that it states {by}; nearest to its limit: {ratio}."
    exceeded = sum(row["verdict"] == "exceeded" for row in kept)
    if exceeded:
        return f"identify does not keep {exceeded} of {len(kept)} FARs that it states {by}; worst: {ratio}."
    return f"identify exceeds a FAR that it states {by} within the interval only: {ratio}."
