"""Calibrates a run: probabilities and error rates of similarities, measured on its validation part."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nearkin import training
from nearkin.core import files
from nearkin.core.versions import version_of
from nearkin.data.sources import PLAIN, Reading
from nearkin.evaluation.arrays import Floats
from nearkin.evaluation.verification import class_rates, likelihood, score_calibration
from nearkin.evaluation.verification.class_rates import Rates
from nearkin.evaluation.verification.likelihood import LogRatio
from nearkin.evaluation.verification.roc import FARS
from nearkin.gallery import results
from nearkin.gallery.items import encoder_info
from nearkin.gallery.schema import unit

__all__ = ["calibrate", "measure"]

Groups = list[NDArray[np.int64]]
CONFIDENCE = 0.95  # of every bound in the file
CLASSES, ITEMS = 2000, 20_000  # at most; of more a random subset
FEWEST = 5  # classes: fewer cannot bound even a rate of one in three
STEPS = 160  # thresholds along the impostor scores, and a third as many along the genuine ones
PAIRS = 2_000_000  # scores from which the thresholds are chosen


def calibrate(
    run: str | Path,
    *,
    part: str = "val",
    dim: int | None = None,
    device: str = "auto",
    progress: Any = None,
    reading: Reading = PLAIN,
) -> dict[str, Any]:
    """Writes calibration.json into the folder of a run: probabilities of similarities, and thresholds per FAR.

    part: whose classes, "val" by default: the encoder has not learned from them, and the test stays untouched. "test"
    is for sources with few validation classes. dim: of embeddings cut to a length that the run was trained for; their
    file is calibration-DIM.json. Pairs of the same class and group (bursts, cameras), where the run's source has
    groups, are left out. reading: how the run's source is read, see `data.load`. Returns what was written.
    """
    info = encoder_info(run, dim)
    folder = info.run
    if info.frozen is not None:
        raise ValueError(
            f"{info.frozen}: an encoder's name has no validation part; calibrate a gallery made with it, by its own "
            f"labels: nearkin gallery calibrate G"
        )
    embedded = training.embed_source(folder, part=part, dim=dim, device=device, progress=progress, reading=reading)
    if embedded.labels is None:
        raise ValueError(f"{run}: its source has no class labels, so there are no same and different pairs to measure")
    try:
        measured = measure(embedded.embeddings, torch.from_numpy(embedded.labels), groups=embedded.groups)
    except ValueError as error:
        raise ValueError(f"{error}" + ("; --part test may have more" if part == "val" else "")) from None
    plain = measured | {
        "format": results.FORMAT,
        "nearkin": version_of("nearkin"),
        "encoder": info.fingerprint,
        "part": part,
        "items": len(embedded.labels),
    }
    plain[results.CHECKSUM] = files.digest(plain)
    path = results.calibration_file(folder, info.short)
    with files.explained(f"{path}", "make room, or let it be written there"):
        files.refuse_link(path)
        files.write_json(path, plain)
    return plain


def measure(
    embeddings: torch.Tensor, labels: torch.Tensor, seed: int = 0, groups: Sequence[str] | None = None
) -> dict[str, Any]:
    """The content of calibration.json, from the embeddings of classes that the encoder has not learned from.

    groups: of the items; pairs of the same class and group are left out.
    """
    bursts = None if groups is None else _numbers(groups)
    rows, classes = _select(embeddings.numpy(), labels.numpy(), seed, bursts)
    thresholds = _thresholds(rows, classes, seed, bursts)
    able = [group for group in classes if class_rates.most_others(group, bursts)]
    rates = class_rates.impostor_rates(class_rates.accepts(rows, able, thresholds), CONFIDENCE)
    scores = class_rates.genuine_groups(rows, able, bursts)
    tar = class_rates.true_accepts(scores, thresholds)
    sizes = np.array([len(group) for group in classes])
    return {
        "similarity": "cosine",
        "confidence": CONFIDENCE,
        "classes": len(classes),
        "genuine": sum(len(_genuine_scores(rows, group, bursts)) for group in able),
        "impostors": int((sizes.sum() ** 2 - (sizes**2).sum()) // 2),
        "error": _error(rows, able, thresholds, bursts),
        "largest_impostor": float(thresholds[rates.far > 0].max(initial=-1.0)),
        "thresholds": thresholds.tolist(),
        "examples": {
            "1": {
                "far": rates.far.tolist(),
                "far_bound": rates.bound.tolist(),
                "tar": tar.mean(0).tolist(),
                "log_ratio": _log_ratio(rates.far, scores, thresholds, len(able))._asdict(),
            }
        },
        "operating_points": _operating_points(rates, tar, thresholds, len(classes)),
        "note": _limit(float(rates.bound[-1]), len(classes)),
    }


def _numbers(groups: Sequence[str]) -> NDArray[np.int64]:
    """A number per row, equal where the groups are; "" is a group of its own."""
    numbers = np.unique(np.array(groups, dtype=str), return_inverse=True)[1].astype(np.int64)
    alone = len(groups) + np.arange(len(groups))
    return np.where(np.array(groups, dtype=str) == "", alone, numbers)


def _limit(least: float, classes: int) -> str:
    """The strictest FAR that so many classes can show, and how many the next one needs."""
    below = next((far for far in FARS if far < least), FARS[-1] / 10)
    needed = class_rates.classes_needed(below, CONFIDENCE)
    return (
        f"{classes:,} classes can show a FAR of {results.rounded_up(least):g} per pair at the strictest; "
        f"{below:g} needs {needed:,} classes or more"
    )


def _operating_points(rates: Rates, tar: Floats, thresholds: Floats, classes: int) -> list[dict[str, Any]]:
    """The usual FARs that so many classes can show."""
    points = []
    for far in FARS:
        if rates.bound[-1] > far:
            break
        at = int(np.argmax(rates.bound <= far))
        points.append(
            {
                "far": far,
                "threshold": float(thresholds[at]),
                "measured_far": float(rates.far[at]),
                "far_interval": [float(rates.low[at]), float(rates.high[at])],
                "tar": float(tar[:, at].mean()),
                "tar_interval": list(class_rates.mean_interval(tar[:, at], CONFIDENCE)),
                "classes": classes,
            }
        )
    return points


def _select(
    rows: NDArray[np.floating], labels: NDArray[np.int64], seed: int, bursts: NDArray[np.int64] | None
) -> tuple[NDArray[np.float32], Groups]:
    """Unit rows, and the row numbers per class in random order; of many a subset, equally many per class."""
    draw = np.random.default_rng(seed)
    _, codes = np.unique(labels, return_inverse=True)
    order = draw.permutation(len(codes))
    order = order[np.argsort(codes[order], kind="stable")]
    groups = np.split(order, np.cumsum(np.bincount(codes))[:-1])
    genuine = sum(class_rates.most_others(group, bursts) > 0 for group in groups)
    if len(groups) < FEWEST or genuine < 4:
        what = "items" if bursts is None or len(np.unique(bursts)) == len(bursts) else "groups"
        raise ValueError(
            f"calibration needs at least {FEWEST} classes, 4 of them of 2 {what} or more, "
            f"got {len(groups)} and {genuine}"
        )
    if len(groups) > CLASSES:
        groups = [groups[i] for i in draw.permutation(len(groups))[:CLASSES]]
    most = max(2, ITEMS // len(groups))
    return unit(rows), [group[:most] for group in groups]


def _thresholds(rows: NDArray[np.float32], groups: Groups, seed: int, bursts: NDArray[np.int64] | None) -> Floats:
    """Ascending similarities: quantiles of both kinds of pairs, dense at rare ones; the last exceeds all impostors."""
    draw = np.random.default_rng([seed, 1])
    owner = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    queries = rows[np.concatenate(groups)]
    scores, nearest = [], -1.0
    share = min(1.0, PAIRS / len(queries) ** 2)
    for a, group in enumerate(groups):
        near = (rows[group] @ queries.T)[:, owner != a].ravel()
        nearest = max(nearest, float(near.max()))
        scores.append(near if share == 1 else near[draw.random(len(near)) < share])
    impostors = np.concatenate(scores)
    genuine = np.concatenate([_genuine_scores(rows, group, bursts) for group in groups if len(group) > 1])
    rare = np.geomspace(0.6, 1 / len(impostors), STEPS)
    quantiles = [np.quantile(impostors, 1 - rare), np.quantile(genuine, np.linspace(0.005, 0.995, STEPS // 3))]
    above = [nearest + 1e-6, 1.0]
    thresholds = np.unique(np.concatenate([*quantiles, above]).astype(np.float64))
    return thresholds[thresholds <= 1.0]


def _genuine_scores(rows: NDArray[np.float32], group: NDArray[np.int64], bursts: NDArray[np.int64] | None) -> Floats:
    upper = np.triu_indices(len(group), 1)
    scores = np.asarray((rows[group] @ rows[group].T)[upper], np.float64)
    return scores if bursts is None else scores[bursts[group][upper[0]] != bursts[group][upper[1]]]


def _log_ratio(far: Floats, scores: Sequence[Floats], thresholds: Floats, classes: int) -> LogRatio:
    """Each class weighs the same, and every query is compared with its own class and all others.

    Knots: quantiles of both kinds of scores, of impostors no rarer than so many classes can show; beyond, the slope is
    constant.
    """
    edges = np.concatenate([[-1.0], thresholds, [1.0]])
    middle = (edges[1:] + edges[:-1]) / 2
    other = -np.diff(np.concatenate([[1.0], far, [0.0]])) * (classes - 1)
    same = np.mean([np.histogram(one, np.append(edges[:-1], 1.1))[0] / len(one) for one in scores], axis=0)
    pooled = np.concatenate(scores)
    rare = [q for q in (0.1, 0.03, 0.01, 1e-3, 1e-4) if q >= class_rates.smallest_far(classes)]
    knots = [*np.quantile(pooled, (0.02, 0.1, 0.25, 0.5, 0.75, 0.9)), *(thresholds[np.argmax(far <= q)] for q in rare)]
    apart: list[float] = []
    for knot in sorted(knots):
        if not apart or knot - apart[-1] > 0.02 * (thresholds[-1] - thresholds[0]):
            apart.append(float(knot))
    return likelihood.fit(middle, same * classes, np.maximum(other, 0) * classes, apart)  # a class is one observation


def _error(rows: NDArray[np.float32], groups: Groups, thresholds: Floats, bursts: NDArray[np.int64] | None) -> float:
    """Expected error of P(same) on the half of the classes that it was not fitted on, both kinds weighing the same."""
    half = len(groups) // 2
    fitted, judged = groups[:half], groups[half:]
    far = class_rates.accepts(rows, fitted, thresholds).sum(1) / (2 * half * (half - 1))
    ratio = _log_ratio(far, class_rates.genuine_groups(rows, fitted, bursts), thresholds, half)
    edges = np.concatenate([[-1.0], thresholds, [1.0]])
    chance = results.sigmoid(ratio.at((edges[1:] + edges[:-1]) / 2))
    count = len(judged)
    strange = class_rates.accepts(rows, judged, thresholds).sum(1) / (2 * count * (count - 1))
    other = -np.diff(np.concatenate([[1.0], strange, [0.0]]))
    tar = class_rates.true_accepts(class_rates.genuine_groups(rows, judged, bursts), thresholds).mean(0)
    same = -np.diff(np.concatenate([[1.0], tar, [0.0]]))
    return score_calibration.expected_error(chance, same, other, 2)
