"""What a similarity means, from what a run has measured: the same or not, at which error; who it is, how surely."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nearkin.core import checks
from nearkin.evaluation import Calibration

__all__ = ["FAR", "FILE", "Candidate", "Hit", "Identity", "Meaning", "Verification", "read"]

FILE = "calibration.json"  # in the folder of a run
FORMAT = 1
FAR = 1e-3  # what is taken where the caller does not say, or the strictest that could be measured
KNOWN = 0.5  # how likely somebody enrolled is asked for, before anything is seen of him


class Hit(NamedTuple):
    """A row that was found; similarity is the cosine."""

    id: int
    label: str
    similarity: float
    name: str
    metadata: dict[str, Any]


class Candidate(NamedTuple):
    """A label with its nearest row. confidence: the probability that it is this one; None without a calibration."""

    label: str
    similarity: float
    confidence: float | None
    id: int


class Identity(NamedTuple):
    """Who it is. label: None is "unknown". confidence: that the label is right, or that it is none of the enrolled.

    threshold: from this similarity on two items are the same, at this far (share of false acceptances). note: what is
    missing for a full answer, one sentence, or "".
    """

    label: str | None
    confidence: float | None
    similarity: float | None
    threshold: float | None
    far: float | None
    candidates: list[Candidate]
    note: str

    @property
    def unknown(self) -> bool:
        return self.label is None


class Verification(NamedTuple):
    """Whether two items are the same: similarity >= threshold, chosen for this far; same is None without a calibration.

    probability: that they are, if kin and strangers were equally likely beforehand. tar: the share of kin that this
    threshold accepts, as it was measured.
    """

    same: bool | None
    probability: float | None
    similarity: float
    threshold: float | None
    far: float | None
    tar: float | None
    note: str


class Meaning:
    """The calibration of a run, put to similarities."""

    def __init__(
        self,
        calibration: Calibration,
        points: Sequence[Mapping[str, float]],
        shots: Mapping[int, Calibration] | None = None,
    ) -> None:
        self.points = sorted(points, key=lambda point: -point["far"])
        curves = {1: calibration, **(shots or {})}
        self._curves = {n: (np.array(c.scores), np.array(c.probabilities)) for n, c in sorted(curves.items())}

    @property
    def fars(self) -> list[float]:
        return [point["far"] for point in self.points]

    def point(self, far: float | None) -> tuple[Mapping[str, float], str]:
        """The operating point of this FAR, and what must be said with it."""
        if far is not None:
            checks.between("far", far, 0, 1)
        within = [point for point in self.points if point["far"] <= (FAR if far is None else far)]
        if within:
            return within[0], ""
        strictest = self.points[-1]
        if far is not None:
            raise ValueError(
                f"far must be one the run could measure, {strictest['far']:g} at the strictest, got {far:g}"
            )
        return strictest, f"the run had too few pairs to measure a FAR below {strictest['far']:g}"

    def probability(self, similarity: float) -> float:
        """That a pair of this similarity is the same, as `Calibration.probability` has it."""
        return float(np.interp(similarity, *self._curves[1]))

    def verify(self, similarity: float, far: float | None) -> Verification:
        point, note = self.point(far)
        same = similarity >= point["threshold"]
        chance = self.probability(similarity)
        return Verification(same, chance, similarity, point["threshold"], point["far"], point["tar"], note)

    def identify(
        self, nearest: Sequence[Hit], labels: int, far: float | None, examples: Mapping[str, int] | None = None
    ) -> Identity:
        """Who it is, by Bayes: before anything is seen, `KNOWN` is shared evenly by all labels, and the rest is nobody.

        The similarity to the nearest row of a label speaks for it by the ratio p / (1 - p) of the curve for as many
        `examples` as the label has (1 where that is not said). Labels that are not among the nearest get the ratio of
        the farthest that is, which is more than theirs.
        """
        point, note = self.point(far)
        best: dict[str, Hit] = {}
        for hit in nearest:
            best.setdefault(hit.label, hit)
        if not best:
            return Identity(None, None, None, point["threshold"], point["far"], [], "nothing is enrolled")
        counts = examples or {}
        ratios = np.array([self._ratio(hit.similarity, counts.get(hit.label, 1)) for hit in best.values()])
        others = max(0, labels - len(best)) * min(self._ratio(nearest[-1].similarity, 1), 1.0)
        share = KNOWN / max(labels, len(best))
        total = (1 - KNOWN) + share * (ratios.sum() + others)
        candidates = [
            Candidate(label, hit.similarity, float(share * ratio / total), hit.id)
            for (label, hit), ratio in zip(best.items(), ratios, strict=True)
        ]
        candidates.sort(key=lambda one: (-(one.confidence or 0.0), -one.similarity, one.id))
        first, nobody = candidates[0], float((1 - KNOWN) / total)
        known = first.similarity >= point["threshold"] and (first.confidence or 0.0) >= nobody
        label, confidence = (first.label, first.confidence) if known else (None, nobody)
        return Identity(label, confidence, first.similarity, point["threshold"], point["far"], candidates, note)

    def _ratio(self, similarity: float, examples: int) -> float:
        """How much likelier this similarity is of the right label than of a wrong one."""
        shots = max(n for n in self._curves if n <= max(examples, 1))
        p = min(max(float(np.interp(similarity, *self._curves[shots])), 1e-12), 1 - 1e-12)
        return p / (1 - p)


def verified(meaning: Meaning | None, note: str, similarity: float, far: float | None) -> Verification:
    """With or without a calibration."""
    if meaning is not None:
        return meaning.verify(similarity, far)
    if far is not None:
        raise ValueError(f"far needs a calibration: {note}")
    return Verification(None, None, similarity, None, None, None, note)


def nearest_label(hits: Sequence[Hit], note: str, far: float | None) -> Identity:
    """Who it is without a calibration: the nearest, with its similarity only."""
    if far is not None:
        raise ValueError(f"far needs a calibration: {note}")
    best: dict[str, Hit] = {}
    for hit in hits:
        best.setdefault(hit.label, hit)
    candidates = [Candidate(hit.label, hit.similarity, None, hit.id) for hit in best.values()]
    if not candidates:
        return Identity(None, None, None, None, None, [], "nothing is enrolled")
    return Identity(candidates[0].label, None, candidates[0].similarity, None, None, candidates, note)


def read(run: Path, fingerprint: str) -> tuple[Meaning | None, str]:
    """What the run has measured, or None and the sentence to say instead."""
    path = run / FILE
    if not path.is_file():
        return None, f"{run} has no {FILE}, so there is a similarity only; nearkin gallery calibrate {run} makes it"
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        calibration, points = Calibration.from_dict(said["calibration"]), list(said["operating_points"])
        shots = {int(n): Calibration.from_dict(plain) for n, plain in said["shots"].items()}
        keys = ("far", "threshold", "tar")
        if said["format"] != FORMAT or not points or not all(np.isfinite([p[k] for k in keys]).all() for p in points):
            raise ValueError("not as this version writes it")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: damaged ({error}); nearkin gallery calibrate {run} makes it again") from None
    if said["encoder"] != fingerprint:
        return (
            None,
            f"{path} is of another encoder, so there is a similarity only; nearkin gallery calibrate {run} renews it",
        )
    return Meaning(calibration, points, shots), ""
