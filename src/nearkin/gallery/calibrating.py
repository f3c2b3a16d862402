"""What the similarities of a run's encoder mean, measured on its validation part and kept in its folder."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nearkin import evaluation, training
from nearkin.core import files
from nearkin.core.versions import version_of
from nearkin.evaluation import Calibration
from nearkin.evaluation.calibration import isotonic
from nearkin.evaluation.curves import Floats, deal
from nearkin.gallery import answers, encoding
from nearkin.gallery.rows import unit

__all__ = ["calibrate", "curve", "measured"]

Mask = NDArray[np.bool_]
PAIRS = 300_000  # scores a curve is made from, at most
SHOTS = (1, 2, 4, 8, 16, 32)  # examples of a label that have a curve of their own
ENOUGH = 50  # scores of kin below which it has none


def calibrate(run: str | Path, *, part: str = "val", device: str = "auto", progress: Any = None) -> dict[str, Any]:
    """Writes calibration.json into the folder of a run: P(same | cosine) and thresholds for several FARs.

    part: whose pairs, "val" by default: the encoder has not learned from them, and the test stays untouched. "test" is
    for sources whose validation classes are few. Returns what was written.
    """
    folder = Path(run)
    fingerprint = encoding.described(folder).fingerprint
    found = training.embed_source(folder, part=part, device=device, progress=progress)
    if found.labels is None:
        raise ValueError(f"{run}: its source has no class labels, so there is no same and other to calibrate on")
    plain = measured(found.embeddings, torch.from_numpy(found.labels)) | {
        "format": answers.FORMAT,
        "nearkin": version_of("nearkin"),
        "encoder": fingerprint,
        "part": part,
        "items": len(found.labels),
        "classes": len(np.unique(found.labels)),
    }
    with files.explained(f"{folder / answers.FILE}", "make room, or let it be written there"):
        files.write_json(folder / answers.FILE, plain)
    return plain


def measured(embeddings: torch.Tensor, labels: torch.Tensor, seed: int = 0) -> dict[str, Any]:
    """Thresholds from all pairs; the curve of one pair, and those of the nearest of 2, 4, 8, … examples of a class."""
    verified = evaluation.all_pairs(embeddings, labels)
    points = [
        {
            "far": point.wanted_far,
            "threshold": point.threshold,
            "measured_far": point.far,
            "far_interval": list(point.far_interval),
            "tar": point.tar,
            "tar_interval": list(point.tar_interval),
        }
        for point in verified["operating_points"]
    ]
    if not points:
        raise ValueError(f"calibration needs at least 10 pairs of strangers, got {verified['impostors']}")
    curves = {}
    for shots in SHOTS:
        scores, same = _asked(embeddings.numpy(), labels.numpy(), shots, seed)
        if min(int(same.sum()), int((~same).sum())) < (2 if shots == 1 else ENOUGH):
            break
        curves[str(shots)] = curve(scores, same, seed).to_dict()
    return {
        "similarity": "cosine",
        "calibration": curves.pop("1"),
        "shots": curves,
        "operating_points": points,
        "genuine": verified["genuine"],
        "impostors": verified["impostors"],
        "eer": verified["eer"],
    }


def curve(scores: Floats, same: Mask, seed: int = 0) -> Calibration:
    """P(same | score) if kin and strangers were equally likely, fitted on half of the pairs and judged on the others.

    Fitted as the pairs come, since strangers are many and only many show how rarely they are near; then the odds are
    brought to one half each. Where no stranger, or no kin, was seen, one more is assumed to come (Laplace).
    """
    order, kin = deal(same, seed), int(same.sum())
    fit = np.zeros(len(same), bool)
    for kind in (order[:kin], order[kin:]):
        fit[kind[: max(1, len(kind) // 2)]] = True
    x, y = isotonic(scores[fit], same[fit])
    ahead = int((same[fit] & (scores[fit] >= x[y == 1].min(initial=np.inf))).sum())
    behind = int((~same[fit] & (scores[fit] <= x[y == 0].max(initial=-np.inf))).sum())
    y = np.clip(y, 1 / (behind + 2), (ahead + 1) / (ahead + 2))
    odds = y / (1 - y) * (int((~same[fit]).sum()) / int(same[fit].sum()))
    p = odds / (1 + odds)
    error = _expected_error(np.interp(scores[~fit], x, p), same[~fit])
    return Calibration(tuple(x.tolist()), tuple(p.tolist()), error, int(fit.sum()), int((~fit).sum()))


def _expected_error(chance: Floats, same: Mask, bins: int = 15) -> float:
    """Expected calibration error where kin weigh as much as strangers (Guo et al. 2017, eq. 3)."""
    weight = np.where(same, 0.5 / same.sum(), 0.5 / (~same).sum())
    place = np.minimum((chance * bins).astype(np.int64), bins - 1)
    return float(np.abs(np.bincount(place, weights=weight * (chance - same), minlength=bins)).sum())


def _asked(rows: Floats, labels: NDArray[np.int64], shots: int, seed: int) -> tuple[Floats, Mask]:
    """Items ask classes: the cosine of each with the nearest of `shots` other examples of each class, and whose it is.

    Some items where there are many, so that there are at most `PAIRS` scores.
    """
    draw, classes = np.random.default_rng([seed, shots]), np.unique(labels)
    unit_rows = unit(rows).astype(np.float64)
    groups = [np.flatnonzero(labels == label) for label in classes]
    groups = [draw.permutation(group) for group in groups if len(group) > shots]
    if len(groups) < 2:
        return np.empty(0), np.empty(0, bool)
    each = max(1, PAIRS // len(groups))
    asking = draw.permutation(np.concatenate(groups))[:each]
    scores, same = [], []
    for group in groups:
        near = unit_rows[asking] @ unit_rows[group[: shots + 1]].T  # (asking, shots + 1)
        own = asking[:, None] == group[: shots + 1]
        near[own] = -np.inf  # nobody is an example of himself
        near[~own.any(1), shots] = -np.inf  # and the others meet no more examples than he does
        scores.append(near.max(1))
        same.append(labels[asking] == labels[group[0]])
    return np.concatenate(scores), np.concatenate(same)
