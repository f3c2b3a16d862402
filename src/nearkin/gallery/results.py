"""Hits of a search, and what the similarity of two items means: the same or not, at which FAR, by a calibration."""

import math
from collections.abc import Mapping
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
from nearkin.gallery.schema import Row, read_metadata, row_encoder
from nearkin.gallery.stores.matrix import similarities

__all__ = [
    "CHECKSUM",
    "FAR",
    "FILE",
    "FORMAT",
    "Calibrator",
    "Hit",
    "Hits",
    "Verification",
    "calibration_file",
    "hit_of",
    "load_calibration",
    "parse_calibration",
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
OWN_LABELS = "a gallery made with it is calibrated by its own labels"


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


def hit_of(row: Row, similarity: float) -> Hit:
    metadata, quality = read_metadata(row.metadata)
    return Hit(row.id, row.label, similarity, row.name, metadata, quality, bool(row_encoder(row.metadata)))


class Hits(list[Hit]):
    """The hits of a search, nearest first. proved: whether they are proved to be those of the exact search; None where
    the store does not tell. recall: where they are not, the share of the exact answer that such a search finds, as it
    was measured when the index was built."""

    proved: bool | None = None
    recall: float | None = None


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
    """Of pairs: upper bound of the FAR and TAR per threshold; log ratio."""

    bound: Floats
    tar: Floats
    ratio: LogRatio


class Calibrator:
    """The calibration of a run: turns similarities into probabilities and decisions."""

    def __init__(self, plain: Mapping[str, Any]) -> None:
        self.thresholds = _ascending("thresholds", plain["thresholds"], 1.0)
        self.curves = _curves(plain["examples"]["1"], len(self.thresholds))
        self.classes, self.confidence = int(plain["classes"]), float(plain["confidence"])
        self.impostors, self.largest_impostor = int(plain["impostors"]), float(plain["largest_impostor"])
        if self.classes < 3 or self.impostors < 1:
            raise ValueError("not as this version writes it")

    @property
    def fars(self) -> list[float]:
        """The usual FARs per pair that the calibration can guarantee."""
        return [far for far in FARS if self.curves.bound[-1] <= far]

    def verify(self, similarity: float, far: float | None) -> Verification:
        target, note = self._pair_far(far)
        curves = self.curves
        same_probability = float(sigmoid(np.array(self.log_ratio(similarity))))
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

    def log_ratio(self, similarity: float) -> float:
        """Of this similarity between items of one class and of two."""
        return float(self.curves.ratio.at(similarity))

    def similarity_at(self, far: float) -> float:
        """From which similarity on this false-accept rate per pair is guaranteed."""
        threshold = self.verify(1.0, far).threshold
        assert threshold is not None
        return threshold

    def _pair_far(self, far: float | None) -> tuple[float | None, str]:
        """The FAR per pair to guarantee, and the note that belongs to it."""
        strictest = float(self.curves.bound[-1])
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
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: damaged ({error}); {again} makes it again") from None
    return parse_calibration(plain, str(path), fingerprint, again)


def parse_calibration(plain: Any, where: str, fingerprint: str, again: str) -> tuple[Calibrator | None, str]:
    """The calibration in what was read; or None, and why."""
    try:
        if CHECKSUM in plain and plain.pop(CHECKSUM) != files.digest(plain):  # older files have none
            raise ValueError("it does not match its checksum")
        format = plain["format"]
        calibrator = Calibrator(plain) if format == FORMAT else None
        encoder = plain["encoder"]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{where}: damaged ({error}); {again} makes it again") from None
    if calibrator is None:
        raise ValueError(f"{where}: of format {format}, this version reads {FORMAT}; {again} makes it again")
    if encoder != fingerprint:
        return None, f"{where} is of another encoder, so there is only a similarity; {again} renews it"
    return calibrator, ""


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
