"""What a similarity means, from what a run has measured: the same or not, at which error; who it is, how surely."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nearkin.core import checks, files
from nearkin.evaluation.arrays import Floats
from nearkin.evaluation.verification import class_rates
from nearkin.evaluation.verification.likelihood import LogRatio
from nearkin.evaluation.verification.roc import FARS

__all__ = ["FAR", "FILE", "Candidate", "Hit", "Identity", "Meaning", "Verification", "read"]

FILE = "calibration.json"  # in the folder of a run
FORMAT = 2
SUM = "sha256"  # the key of the checksum of all others
FAR = 1e-3  # per pair, what `verify` takes where the caller does not say, or the strictest usual one that holds
KNOWN = 0.5  # how likely somebody enrolled is asked for, before anything is seen of him
VAGUE = 0.95  # a bound of the share of strangers from which on nothing is said
EQUAL = 1 - 1e-6  # similarity from which on two embeddings are those of one and the same item


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

    threshold: from this similarity on the nearest label is taken. far: at most this share of the queries by strangers
    pass it in this gallery, whatever their number of labels (per query, not per pair), with 95 % confidence on new
    classes, as `classes` calibration classes show it; None where they cannot. candidates: the likeliest labels, also of
    "unknown". note: what is missing for a full answer, one sentence, or "".
    """

    label: str | None
    confidence: float | None
    similarity: float | None
    threshold: float | None
    far: float | None
    candidates: list[Candidate]
    note: str
    classes: int | None = None

    @property
    def unknown(self) -> bool:
        return self.label is None


class Verification(NamedTuple):
    """Whether two items are the same: similarity >= threshold; same is None without a calibration.

    probability: of what `same` says; same_probability: that they are the same; both if same and not were equally likely
    beforehand. far: at most this share of pairs of strangers pass (per pair), with 95 % confidence on new classes, as
    `classes` calibration classes show it. tar: the share of pairs of the same class that pass, as it was measured.
    """

    same: bool | None
    probability: float | None
    similarity: float
    threshold: float | None
    far: float | None
    tar: float | None
    note: str
    classes: int | None = None
    same_probability: float | None = None


class Measured(NamedTuple):
    """Of labels of so many examples: bound of the FAR per label and share found at each threshold; log ratio."""

    bound: Floats
    tar: Floats
    ratio: LogRatio


class Meaning:
    """The calibration of a run, put to similarities."""

    def __init__(self, plain: Mapping[str, Any]) -> None:
        self.thresholds = _rising("thresholds", plain["thresholds"], 1.0)
        found = {int(n): _measured(one, len(self.thresholds)) for n, one in plain["examples"].items()}
        self.measured = dict(sorted(found.items()))
        self.classes, self.confidence = int(plain["classes"]), float(plain["confidence"])
        self.impostors, self.largest_impostor = int(plain["impostors"]), float(plain["largest_impostor"])
        if 1 not in self.measured or self.classes < 3 or self.impostors < 1:
            raise ValueError("not as this version writes it")

    @property
    def fars(self) -> list[float]:
        """The usual FARs per pair that the classes can hold."""
        return [far for far in FARS if self.measured[1].bound[-1] <= far]

    # --- two items

    def verify(self, similarity: float, far: float | None) -> Verification:
        wanted, note = self._wanted(far)
        one = self.measured[1]
        chance = float(_share(one.ratio.at(similarity)))
        if wanted is None:
            return Verification(None, None, similarity, None, None, None, note, self.classes, chance)
        at = int(np.argmax(one.bound <= wanted))
        same = similarity >= self.thresholds[at]
        if not same and chance > 0.5:
            note = note or "likelier the same than not, but not near enough for this FAR"
        said = chance if same else 1 - chance
        threshold, tar = float(self.thresholds[at]), float(one.tar[at])
        return Verification(bool(same), said, similarity, threshold, wanted, tar, note, self.classes, chance)

    def _wanted(self, far: float | None) -> tuple[float | None, str]:
        """The FAR per pair to hold, and what must be said with it."""
        strictest = float(self.measured[1].bound[-1])
        if far is not None:
            checks.between("far", far, 0, 1)
            if far < strictest:
                raise ValueError(
                    f"far must be at least {rounded_up(strictest):g} per pair: {self.classes} calibration classes "
                    f"cannot show less, {class_rates.classes_needed(far, self.confidence):,} may; got {far:g}"
                )
            return far, ""
        offered = [one for one in self.fars if one >= FAR]
        if not offered:
            return None, f"{self.classes} calibration classes are too few to hold any FAR, so same or not is not said"
        few = "" if offered[-1] == FAR else f"{self.classes} calibration classes cannot hold a FAR of {FAR:g} per pair"
        return offered[-1], few

    # --- one item and a gallery

    def identify(
        self,
        nearest: Sequence[Hit],
        sizes: Mapping[int, int],
        far: float | None,
        examples: Mapping[str, int] | None = None,
        equal: int | None = None,
    ) -> Identity:
        """Who it is, by Bayes: before anything is seen, `KNOWN` is shared evenly by all labels, and the rest is nobody.

        sizes: how many labels have so many examples. examples: those of the labels among the nearest (1 where that is
        not said). A label is spoken for by the similarity to its nearest row, by the ratio of how likely that is of the
        right label and of a wrong one with as many examples. Labels that are not among the nearest lie below them all:
        theirs is the ratio of how likely that is. equal: the id of the row that is this very item.
        """
        if not nearest:
            return Identity(None, None, None, None, None, [], "nothing is enrolled", self.classes)
        counts, best = examples or {}, _nearest_of_labels(nearest)
        labels = max(sum(sizes.values()), len(best))
        ratios = np.exp(np.minimum(self._log_ratios(best, counts), 600.0))
        rest = self._below(nearest[-1].similarity, sizes, len(best)) if labels > len(best) else 0.0
        total = (1 - KNOWN) + KNOWN / labels * (ratios.sum() + rest)
        shares, nobody = KNOWN / labels * ratios / total, (1 - KNOWN) / total
        same = np.array([hit.id == equal or self._equal(hit) for hit in best])
        if same.any():  # this very item is enrolled: whoever else it could be shares what no stranger was seen to do
            left = 1 / (self.impostors + 2)
            shares, nobody = np.where(same, (1 - left) / same.sum(), left * shares), left * nobody
        order = sorted(range(len(best)), key=lambda i: (-shares[i], -best[i].similarity, best[i].id))
        candidates = [Candidate(best[i].label, best[i].similarity, float(shares[i]), best[i].id) for i in order]
        first = best[order[0]]
        threshold, held = self._threshold(labels, sizes, counts.get(first.label, 1), far)
        known = same.any() or first.similarity >= threshold
        label, confidence = (first.label, float(shares[order[0]])) if known else (None, float(nobody))
        if threshold > 1:
            note = f"by {self.classes} calibration classes, no similarity below 1 is enough among {labels:,} labels"
            return Identity(label, confidence, first.similarity, None, None, candidates, note, self.classes)
        note = "" if held is not None else f"{self.classes} calibration classes cannot show how many strangers pass"
        return Identity(label, confidence, first.similarity, threshold, held, candidates, note, self.classes)

    def _log_ratios(self, hits: Sequence[Hit], counts: Mapping[str, int]) -> Floats:
        near, number = np.array([hit.similarity for hit in hits]), [counts.get(hit.label, 1) for hit in hits]
        curves = {n: self._of(n).ratio.at(near) for n in set(number)}
        return np.array([curves[n][i] for i, n in enumerate(number)])

    def _threshold(
        self, labels: int, sizes: Mapping[int, int], examples: int, far: float | None
    ) -> tuple[float, float | None]:
        """The similarity from which on the nearest label is likelier than nobody, or that which holds `far`."""
        likelier = self._of(examples).ratio.reaches(math.log(labels * (1 - KNOWN) / KNOWN))
        rate = self.strangers(sizes)
        if far is None:
            at = int(np.searchsorted(self.thresholds, likelier, side="right")) - 1
            held = float(rate[at]) if at >= 0 else 1.0
            return likelier, held if held < VAGUE else None
        checks.between("far", far, 0, 1)
        if far < rate[-1]:
            lowest = f"at least {rounded_up(rate[-1]):g} per query" if rate[-1] < VAGUE else "left out"
            each = class_rates.classes_needed(-math.expm1(math.log1p(-far) / labels), self.confidence)
            raise ValueError(
                f"far must be {lowest} with {labels:,} labels: {self.classes} calibration classes cannot show less, "
                f"{each:,} may; got {far:g}"
            )
        return max(likelier, float(self.thresholds[np.argmax(rate <= far)])), far

    def strangers(self, sizes: Mapping[int, int]) -> Floats:
        """At each threshold a bound of the share of strangers that reach it with any label: the largest of so many.

        1 - Π (1 - bound of a label). Labels alike for one query are so for the others as well, so the true share is
        smaller.
        """
        log_none = np.zeros(len(self.thresholds))
        for examples, labels in sizes.items():
            near = [n for n in self.measured if n >= examples]
            n = near[0] if near else max(self.measured)
            bound = np.minimum(self.measured[n].bound * max(1.0, examples / n), 1 - 1e-12)
            log_none += labels * np.log1p(-bound)
        return np.asarray(-np.expm1(log_none))

    def _of(self, examples: int) -> Measured:
        return self.measured[max(n for n in self.measured if n <= max(examples, 1))]

    def _below(self, similarity: float, sizes: Mapping[int, int], seen: int) -> float:
        """The ratios of all labels that lie below this similarity: that the right one does, and that so many do."""
        labels = max(sum(sizes.values()), 1)
        missed = sum(count * self._missed(similarity, n) for n, count in sizes.items()) / labels
        return min(missed * labels, float(labels - seen))

    def _missed(self, similarity: float, examples: int) -> float:
        tar = self._of(examples).tar
        return float(np.interp(similarity, np.append(-1.0, self.thresholds), np.append(0.0, 1 - tar)))

    def _equal(self, hit: Hit) -> bool:
        return hit.similarity >= EQUAL > self.largest_impostor


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
    candidates = [Candidate(hit.label, hit.similarity, None, hit.id) for hit in _nearest_of_labels(hits)]
    if not candidates:
        return Identity(None, None, None, None, None, [], "nothing is enrolled")
    return Identity(candidates[0].label, None, candidates[0].similarity, None, None, candidates, note)


def read(run: Path, fingerprint: str) -> tuple[Meaning | None, str]:
    """What the run has measured, or None and the sentence to say instead."""
    path, again = run / FILE, f"nearkin gallery calibrate {run}"
    if not path.is_file():
        return None, f"{run} has no {FILE}, so there is a similarity only; {again} makes it"
    try:
        said = files.read_json(path)
        if SUM in said and said.pop(SUM) != files.digest(said):  # files of before have none
            raise ValueError("it does not match its checksum")
        written = said["format"]
        meaning = Meaning(said) if written == FORMAT else None
        maker = said["encoder"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{path}: damaged ({error}); {again} makes it again") from None
    if meaning is None:
        raise ValueError(f"{path}: of format {written}, this version reads {FORMAT}; {again} makes it again")
    if maker != fingerprint:
        return None, f"{path} is of another encoder, so there is a similarity only; {again} renews it"
    return meaning, ""


def _nearest_of_labels(hits: Sequence[Hit]) -> list[Hit]:
    best: dict[str, Hit] = {}
    for hit in hits:
        best.setdefault(hit.label, hit)
    return list(best.values())


def _measured(plain: Mapping[str, Any], count: int) -> Measured:
    bound, tar = np.array(plain["far_bound"], np.float64), np.array(plain["tar"], np.float64)
    for name, one in (("far_bound", bound), ("tar", tar)):
        if one.shape != (count,) or not ((one >= 0) & (one <= 1)).all() or (np.diff(one) > 1e-12).any():
            raise ValueError(f"{name} must be one share for each threshold, and not rise")
    ratio = plain["log_ratio"]
    x, y = _rising("similarity", ratio["similarity"], 1.0), _rising("value", ratio["value"], np.inf)
    if x.shape != y.shape:
        raise ValueError("a log ratio must have one value for each similarity")
    return Measured(bound, tar, LogRatio(tuple(x.tolist()), tuple(y.tolist())))


def _rising(name: str, values: Any, most: float) -> Floats:
    found = np.array(values, np.float64)
    if found.ndim != 1 or not found.size or not np.isfinite(found).all() or (np.diff(found) < 0).any():
        raise ValueError(f"{name} must be finite and rise")
    if found[-1] > most:
        raise ValueError(f"{name} must be at most {most:g}")
    return found


def _share(log_ratio: Floats) -> Floats:
    return np.asarray(1 / (1 + np.exp(-np.clip(log_ratio, -700, 700))))


def rounded_up(rate: float) -> float:
    """Two digits, rounded up, so that what a sentence offers is accepted."""
    unit = 10.0 ** (math.floor(math.log10(rate)) - 1)
    return math.ceil(rate / unit - 1e-9) * unit
