"""Answers with what they mean: the same or not, at which FAR; which label, how surely, from a run's calibration."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nearkin.core import checks, files
from nearkin.data import decode
from nearkin.evaluation.arrays import Floats
from nearkin.evaluation.verification import class_rates
from nearkin.evaluation.verification.likelihood import LogRatio
from nearkin.evaluation.verification.roc import FARS
from nearkin.gallery.items import Encoding, Seen, encode_items, hash_items
from nearkin.gallery.stores.matrix import similarities

__all__ = [
    "CHECKSUM",
    "FAR",
    "FILE",
    "FORMAT",
    "Calibrator",
    "Candidate",
    "Hit",
    "Hits",
    "Identity",
    "Verification",
    "calibration_file",
    "identify_uncalibrated",
    "identify_unlabelled",
    "load_calibration",
    "read_calibration",
    "rounded_up",
    "sigmoid",
    "verify",
    "verify_items",
    "verify_with",
]

FILE = "calibration.json"  # in the folder of a run
FORMAT = 2
CHECKSUM = "sha256"  # the key of the checksum of all others
FAR = 1e-3  # per pair: the default of `verify`, or the strictest usual one that the calibration can guarantee
PRIOR_KNOWN = 0.5  # the probability that a query is of an enrolled label, before its similarities are known
OWN_LABELS = "a gallery made with it is calibrated by its own labels"
UNINFORMATIVE = 0.95  # an upper bound of a false-accept rate from which on it is not reported
SAME_ITEM = 1 - 1e-6  # similarity from which on two embeddings are of one and the same item


class Hit(NamedTuple):
    """A row of a search result; similarity is the cosine.

    quality: the length of its embedding, larger is better; None where its encoder scales to unit length, for vectors,
    and in rows of galleries that were written before there was one. bridged: the row was made by an earlier encoder and
    mapped; its similarity is the one that is as rare among rows of the encoder of today.
    """

    id: int
    label: str
    similarity: float
    name: str
    metadata: dict[str, Any]
    quality: float | None = None
    bridged: bool = False


class Hits(list[Hit]):
    """The hits of a search, nearest first. proved: whether they are proved to be those of the exact search; None where
    the store does not tell. recall: where they are not, the share of the exact answer that such a search finds, as it
    was measured when the index was built."""

    proved: bool | None = None
    recall: float | None = None


class Candidate(NamedTuple):
    """A label with its nearest row. confidence: the probability of this label; None without a calibration."""

    label: str
    similarity: float
    confidence: float | None
    id: int


class Identity(NamedTuple):
    """The label of a query. label: None is "unknown". confidence: that the label is right, or that no label is.

    threshold: from this similarity on the nearest label is accepted. far: the upper bound of the share of queries of
    classes that are not enrolled which reach it in this gallery (per query, whatever the number of labels), with 95 %
    confidence on new classes, measured on `classes` calibration classes; None where they are too few. candidates: the
    likeliest labels, also of "unknown". note: what is missing for a full answer, one sentence, or "". quality: of the
    query, as of a `Hit`.
    """

    label: str | None
    confidence: float | None
    similarity: float | None
    threshold: float | None
    far: float | None
    candidates: list[Candidate]
    note: str
    classes: int | None = None
    quality: float | None = None

    @property
    def unknown(self) -> bool:
        return self.label is None


class Verification(NamedTuple):
    """Whether two items are the same: similarity >= threshold; same is None without a calibration.

    probability: of the answer in `same`; same_probability: that they are the same; both for pairs of which half are the
    same. far: the upper bound of the share of pairs of different classes that pass (per pair), with 95 % confidence on
    new classes, measured on `classes` calibration classes. tar: the measured share of pairs of one class that pass.
    qualities: of both items, as of a `Hit`.
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
    qualities: tuple[float | None, float | None] = (None, None)


class Curves(NamedTuple):
    """For labels with one number of examples: upper bound of the FAR per label and TAR per threshold; log ratio."""

    bound: Floats
    tar: Floats
    ratio: LogRatio


class Calibrator:
    """The calibration of a run: turns similarities into probabilities and decisions."""

    def __init__(self, plain: Mapping[str, Any]) -> None:
        self.thresholds = _ascending("thresholds", plain["thresholds"], 1.0)
        curves = {int(n): _curves(part, len(self.thresholds)) for n, part in plain["examples"].items()}
        self.curves = dict(sorted(curves.items()))  # by the number of examples
        # Of a gallery's own labels: the curves without each fold of them, and the fold of a label.
        self.folds = [
            {int(n): _curves(part, len(self.thresholds)) for n, part in fold.items()} for fold in plain.get("folds", ())
        ]
        self.fold_of = {str(label): int(fold) for label, fold in plain.get("fold_of", {}).items()}
        if any(1 not in fold for fold in self.folds) or not set(self.fold_of.values()) <= set(range(len(self.folds))):
            raise ValueError("its folds do not fit together")
        # Of queries against rows that an earlier encoder made.
        self.bridged = {int(n): _curves(part, len(self.thresholds)) for n, part in plain.get("bridged", {}).items()}
        if self.bridged and self.bridged.keys() != self.curves.keys():
            raise ValueError("its bridged curves do not fit the others")
        self.classes, self.confidence = int(plain["classes"]), float(plain["confidence"])
        self.impostors, self.largest_impostor = int(plain["impostors"]), float(plain["largest_impostor"])
        if 1 not in self.curves or self.classes < 3 or self.impostors < 1:
            raise ValueError("not as this version writes it")

    @property
    def fars(self) -> list[float]:
        """The usual FARs per pair that the calibration can guarantee."""
        return [far for far in FARS if self.curves[1].bound[-1] <= far]

    # --- two items

    def verify(self, similarity: float, far: float | None) -> Verification:
        target, note = self._pair_far(far)
        curves = self.curves[1]
        same_probability = float(sigmoid(curves.ratio.at(similarity)))
        if target is None:
            return Verification(None, None, similarity, None, None, None, note, self.classes, same_probability)
        at = int(np.argmax(curves.bound <= target))
        same = similarity >= self.thresholds[at]
        if not same and same_probability > 0.5:
            note = note or "likelier the same than not, but not near enough for this FAR"
        probability = same_probability if same else 1 - same_probability
        threshold, tar = float(self.thresholds[at]), float(curves.tar[at])
        decision = (bool(same), probability, similarity, threshold, target, tar)
        return Verification(*decision, note, self.classes, same_probability)

    def similarity_at(self, far: float) -> float:
        """From which similarity on this false-accept rate per pair is guaranteed."""
        threshold = self.verify(1.0, far).threshold
        assert threshold is not None
        return threshold

    def _pair_far(self, far: float | None) -> tuple[float | None, str]:
        """The FAR per pair to guarantee, and the note that belongs to it."""
        strictest = float(self.curves[1].bound[-1])
        if far is not None:
            checks.between("far", far, 0, 1)
            if far < strictest:
                raise ValueError(
                    f"far must be at least {rounded_up(strictest):g} per pair: {self.classes} calibration classes "
                    f"cannot show less, {class_rates.classes_needed(far, self.confidence):,} may; got {far:g}"
                )
            return far, ""
        usual = [rate for rate in self.fars if rate >= FAR]
        if not usual:
            return None, f"{self.classes} calibration classes are too few to hold any FAR, so there is no decision"
        note = f"{self.classes} calibration classes cannot hold a FAR of {FAR:g} per pair"
        return usual[-1], "" if usual[-1] == FAR else note

    # --- one item and a gallery

    def identify(
        self,
        nearest: Sequence[Hit],
        sizes: Mapping[int, int],
        far: float | None,
        examples: Mapping[str, int] | None = None,
        same_id: int | None = None,
    ) -> Identity:
        """The label of a query, by Bayes: a priori all labels share `PRIOR_KNOWN` evenly, the rest is "unknown".

        sizes: how many labels have 1, 2, … examples. examples: the number of examples of the labels in `nearest` (1
        where it is missing). Each label is scored by its nearest enrolled item: by the likelihood ratio of that
        similarity between the right label and a wrong one with as many examples. Labels that are not in `nearest` have
        a lower similarity than all of these: theirs is the ratio of that event. same_id: the row of this very item.
        """
        if not nearest:
            return Identity(None, None, None, None, None, [], "nothing is enrolled", self.classes)
        counts, best = examples or {}, _nearest_per_label(nearest)
        labels = max(sum(sizes.values()), len(best))
        shares, unknown = self._posterior(nearest, best, sizes, counts, labels)
        same = np.array([hit.id == same_id or self._is_same_item(hit) for hit in best])
        if same.any():  # all other answers share the probability of an event that no impostor pair has shown
            rest = 1 / (self.impostors + 2)
            shares, unknown = np.where(same, (1 - rest) / same.sum(), rest * shares), rest * unknown
        order = sorted(range(len(best)), key=lambda i: (-shares[i], -best[i].similarity, best[i].id))
        candidates = [Candidate(best[i].label, best[i].similarity, float(shares[i]), best[i].id) for i in order]
        first = best[order[0]]
        threshold, guaranteed = self._threshold(labels, sizes, counts.get(first.label, 1), far, first)
        known = same.any() or first.similarity >= threshold
        label, confidence = (first.label, float(shares[order[0]])) if known else (None, float(unknown))
        if threshold > 1:
            note = f"by {self.classes} calibration classes, no similarity below 1 is enough among {labels:,} labels"
            return Identity(label, confidence, first.similarity, None, None, candidates, note, self.classes)
        note = "" if guaranteed is not None else f"{self.classes} calibration classes are too few to bound the FAR"
        return Identity(label, confidence, first.similarity, threshold, guaranteed, candidates, note, self.classes)

    def _posterior(
        self,
        nearest: Sequence[Hit],
        best: Sequence[Hit],
        sizes: Mapping[int, int],
        counts: Mapping[str, int],
        labels: int,
    ) -> tuple[Floats, float]:
        """The probability of each label in `best`, and that of none."""
        examples = [counts.get(hit.label, 1) for hit in best]
        log_ratios = [
            self._curves_for(n, hit.label, hit.bridged).ratio.at(hit.similarity)
            for n, hit in zip(examples, best, strict=True)
        ]
        ratios = np.exp(np.minimum(np.array(log_ratios), 600.0))
        rest = self._ratios_below(nearest[-1].similarity, sizes, len(best)) if labels > len(best) else 0.0
        total = (1 - PRIOR_KNOWN) + PRIOR_KNOWN / labels * (ratios.sum() + rest)
        return PRIOR_KNOWN / labels * ratios / total, float((1 - PRIOR_KNOWN) / total)

    def _threshold(
        self, labels: int, sizes: Mapping[int, int], examples: int, far: float | None, first: Hit
    ) -> tuple[float, float | None]:
        """The similarity from which on the nearest label is likelier than none, or that which guarantees `far`."""
        ratio = self._curves_for(examples, first.label, first.bridged).ratio
        likelier = ratio.reaches(math.log(labels * (1 - PRIOR_KNOWN) / PRIOR_KNOWN))
        rate = self.query_far(sizes)
        if far is None:
            at = int(np.searchsorted(self.thresholds, likelier, side="right")) - 1
            bound = float(rate[at]) if at >= 0 else 1.0
            return likelier, bound if bound < UNINFORMATIVE else None
        checks.between("far", far, 0, 1)
        if far < rate[-1]:
            lowest = f"at least {rounded_up(rate[-1]):g} per query" if rate[-1] < UNINFORMATIVE else "left out"
            needed = class_rates.classes_needed(-math.expm1(math.log1p(-far) / labels), self.confidence)
            raise ValueError(
                f"far must be {lowest} with {labels:,} labels: {self.classes} calibration classes cannot show less, "
                f"{needed:,} may; got {far:g}"
            )
        return max(likelier, float(self.thresholds[np.argmax(rate <= far)])), far

    def query_far(self, sizes: Mapping[int, int]) -> Floats:
        """Per threshold the upper bound of the FAR per query: of the unknown queries that reach it with any label.

        1 - Π (1 - bound of a label). Labels that are alike for one query are alike for others too, so the true share is
        smaller. Of folds the largest bound counts.
        """
        log_none = np.zeros(len(self.thresholds))
        for examples, labels in sizes.items():
            enough = [n for n in self.curves if n >= examples]
            n = enough[0] if enough else max(self.curves)
            bounds = [curves[n].bound for curves in (self.curves, self.bridged, *self.folds) if n in curves]
            bound = np.minimum(np.maximum.reduce(bounds) * max(1.0, examples / n), 1 - 1e-12)
            log_none += labels * np.log1p(-bound)
        return np.asarray(-np.expm1(log_none))

    def _curves_for(self, examples: int, label: str | None = None, bridged: bool = False) -> Curves:
        """label: one that took part in the calibration is judged by the others."""
        if bridged and self.bridged:
            return self.bridged[max(n for n in self.bridged if n <= max(examples, 1))]
        fold = None if label is None else self.fold_of.get(label)
        curves = self.curves if fold is None else self.folds[fold]
        return curves[max(n for n in curves if n <= max(examples, 1))]

    def _ratios_below(self, similarity: float, sizes: Mapping[int, int], seen: int) -> float:
        """The sum of the likelihood ratios of all labels below this similarity: that the right one is among them."""
        labels = max(sum(sizes.values()), 1)
        missed = sum(count * self._miss_rate(similarity, n) for n, count in sizes.items()) / labels
        return min(missed * labels, float(labels - seen))

    def _miss_rate(self, similarity: float, examples: int) -> float:
        tar = self._curves_for(examples).tar
        return float(np.interp(similarity, np.append(-1.0, self.thresholds), np.append(0.0, 1 - tar)))

    def _is_same_item(self, hit: Hit) -> bool:
        return hit.similarity >= SAME_ITEM > self.largest_impostor


def verify(
    run: str | Path,
    a: Any,
    b: Any,
    *,
    far: float | None = None,
    device: str = "auto",
    max_pixels: int = decode.MAX_PIXELS,
) -> Verification:
    """Whether two items are the same, as in `Gallery.verify`, with the encoder of a run and without a gallery."""
    return verify_with(Encoding(run, device, max_pixels), a, b, far)


def verify_with(encoding: Encoding, a: Any, b: Any, far: float | None = None) -> Verification:
    """`verify` with an open encoder."""
    info = encoding.info
    if info.frozen is None:
        calibrator, note = load_calibration(info.run, info.fingerprint)
    else:
        calibrator, note = None, f"{info.frozen} alone has no calibration, so there is only a similarity; {OWN_LABELS}"
    left, right = encode_items(hash_items([a, b], encoding, encoding.dim), encoding)
    assert left is not None and right is not None
    return verify_items(calibrator, note, left, right, far)


def verify_items(calibrator: Calibrator | None, note: str, a: Seen, b: Seen, far: float | None) -> Verification:
    """With a calibration or without one; note: why there is none."""
    similarity = float(similarities(a.vector[None], b.vector)[0])
    if calibrator is None and far is not None:
        raise ValueError(f"far needs a calibration: {note}")
    answer = Verification(None, None, similarity, None, None, None, note)
    if calibrator is not None:
        answer = calibrator.verify(similarity, far)
    return answer._replace(qualities=(a.quality, b.quality))


def identify_uncalibrated(hits: Sequence[Hit], note: str, far: float | None) -> Identity:
    """The nearest label with its similarity only."""
    if far is not None:
        raise ValueError(f"far needs a calibration: {note}")
    candidates = [Candidate(hit.label, hit.similarity, None, hit.id) for hit in _nearest_per_label(hits)]
    if not candidates:
        return Identity(None, None, None, None, None, [], "nothing is enrolled")
    return Identity(candidates[0].label, None, candidates[0].similarity, None, None, candidates, note)


def identify_unlabelled(nearest: Hit, note: str, far: float | None) -> Identity:
    """Where no item near the query has a label: the similarity of the nearest one."""
    if far is not None:
        raise ValueError(f"far needs labels: {note}")
    return Identity(None, None, nearest.similarity, None, None, [], note)


def calibration_file(run: Path, short: int | None = None) -> Path:
    """Where the calibration of a run is; embeddings that are cut have their own per length."""
    return run / (FILE if short is None else f"calibration-{short}.json")


def load_calibration(run: Path, fingerprint: str, short: int | None = None) -> tuple[Calibrator | None, str]:
    """The calibration in the folder of a run; or None, and a sentence that says why. short: the length of embeddings
    that are cut."""
    path, again = calibration_file(run, short), f"nearkin gallery calibrate {run}"
    again += "" if short is None else f" --dim {short}"
    return read_calibration(
        path, fingerprint, again, f"{run} has no {path.name}, so there is only a similarity; {again} makes it"
    )


def read_calibration(path: Path, fingerprint: str, again: str, missing: str) -> tuple[Calibrator | None, str]:
    """The calibration in a file; or None, and why: `missing` where there is no file. again: the command to make it."""
    if files.is_link(path):
        return None, f"{path} is a link, which is not followed, so there is only a similarity; put a copy in its place"
    if not path.is_file():
        return None, missing
    try:
        plain = files.read_json(path)
        if CHECKSUM in plain and plain.pop(CHECKSUM) != files.digest(plain):  # older files have none
            raise ValueError("it does not match its checksum")
        format = plain["format"]
        calibrator = Calibrator(plain) if format == FORMAT else None
        encoder = plain["encoder"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{path}: damaged ({error}); {again} makes it again") from None
    if calibrator is None:
        raise ValueError(f"{path}: of format {format}, this version reads {FORMAT}; {again} makes it again")
    if encoder != fingerprint:
        return None, f"{path} is of another encoder, so there is only a similarity; {again} renews it"
    return calibrator, ""


def _nearest_per_label(hits: Sequence[Hit]) -> list[Hit]:
    best: dict[str, Hit] = {}
    for hit in hits:
        best.setdefault(hit.label, hit)
    return list(best.values())


def _curves(plain: Mapping[str, Any], count: int) -> Curves:
    bound, tar = np.array(plain["far_bound"], np.float64), np.array(plain["tar"], np.float64)
    for name, rates in (("far_bound", bound), ("tar", tar)):
        if rates.shape != (count,) or not ((rates >= 0) & (rates <= 1)).all() or (np.diff(rates) > 1e-12).any():
            raise ValueError(f"{name} must have one rate per threshold, not rising")
    ratio = plain["log_ratio"]
    x, y = _ascending("similarity", ratio["similarity"], 1.0), _ascending("value", ratio["value"], np.inf)
    if x.shape != y.shape:
        raise ValueError("a log ratio must have one value per similarity")
    return Curves(bound, tar, LogRatio(tuple(x.tolist()), tuple(y.tolist())))


def _ascending(name: str, values: Any, most: float) -> Floats:
    array = np.array(values, np.float64)
    if array.ndim != 1 or not array.size or not np.isfinite(array).all() or (np.diff(array) < 0).any():
        raise ValueError(f"{name} must be finite and ascending")
    if array[-1] > most:
        raise ValueError(f"{name} must be at most {most:g}")
    return array


def sigmoid(log_ratio: Floats) -> Floats:
    return np.asarray(1 / (1 + np.exp(-np.clip(log_ratio, -700, 700))))


def rounded_up(rate: float) -> float:
    """Two digits, rounded up, so that the rate in a message is accepted."""
    unit = 10.0 ** (math.floor(math.log10(rate)) - 1)
    return math.ceil(rate / unit - 1e-9) * unit
