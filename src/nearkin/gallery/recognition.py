"""What a gallery has learned of itself to answer "who is this?": kept as a note with its rows, so that every machine
and process answers alike. It is learned again when a tenth of the labels have changed."""

import base64
import json
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import date
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearkin.core.errors import LabelConflict
from nearkin.evaluation.recognition import FEWEST, Recogniser, events, fit
from nearkin.evaluation.recognition.simulation import Part, Queries
from nearkin.gallery.bridge_scale import Scale
from nearkin.gallery.items import Seen
from nearkin.gallery.schema import UNLABELLED, Facts, Floats, Row, row_encoder, shortened, unpack
from nearkin.gallery.stores import Store
from nearkin.gallery.stores.hnsw import EXACT

__all__ = ["CHANGED", "KEY", "OUTDATED", "OWN_LABELS", "OtherDay", "Recognition", "check_labels", "described"]
__all__ += ["learn_gallery", "load", "made", "other_day", "save"]

KEY = "recognition"
MADE = "recognition.made"  # a short note beside it: which one it is
FORMAT = 1
PART = 4096  # rows at a time
OWN_LABELS = "its own labels"
OUTDATED = f"{OWN_LABELS}, as its rows have changed since photographs of another day were asked"
CHANGED = 0.1  # of the rows, from which on it is learned again
OWN = 0.2  # of the rows: fewer of today's encoder are too few to be asked alone
ARRAYS = ("mean", "basis", "between", "strangers", "weights")


class Recognition(NamedTuple):
    """recogniser, and how it came about. state: of the gallery then. of: what was asked."""

    recogniser: Recogniser
    key: str
    encoder: str
    state: list[Any]
    labels: int
    items: int
    date: str
    of: str

    def changed(self, facts: Facts) -> float:
        """The share of the rows that are new, gone or relabelled since; a copy of the gallery has the same."""
        rows, next_id, changes = self.state
        return float((abs(facts.next_id - next_id) + abs(facts.changes - changes)) / max(rows, 1))


class OtherDay(NamedTuple):
    """Items of another day: vectors, their labels, and the ids of those that are enrolled, 0 for the others."""

    vectors: Floats
    labels: list[str]
    ids: list[int]

    def described(self, known: Collection[str]) -> str:
        strangers = sum(label not in known for label in self.labels)
        return f"{len(self.ids):,} items of another day" + (f", {strangers:,} of them strangers'" if strangers else "")


def other_day(store: Store, seen: Sequence[Seen], labels: list[str]) -> OtherDay:
    enrolled, ids = store.look_up([one.content for one in seen]), list[int]()
    for one, label in zip(seen, labels, strict=True):
        id, known = enrolled.get(one.content, (0, UNLABELLED))
        if known not in (UNLABELLED, label):
            raise LabelConflict(one.name, id, known, label)
        ids.append(0 if known == UNLABELLED else id)
    return OtherDay(np.stack([one.vector for one in seen]), labels, ids)


def check_labels(labels: Sequence[str], known: Collection[str]) -> None:
    """Of items of another day, before they are encoded."""
    if len(set(labels)) < FEWEST:
        raise ValueError(f"labels must be {FEWEST} different ones or more, got {len(set(labels))}")
    if known and set(known).isdisjoint(labels):
        example, got = next(iter(known), ""), shortened(sorted(set(labels)))
        raise ValueError(
            f"labels must be the gallery's, as {example!r}, or others for strangers; none of these is: {got}"
        )


def learn_gallery(
    store: Store,
    facts: Facts,
    scales: Mapping[str, Scale] | None = None,
    asked: OtherDay | None = None,
    of: str = OWN_LABELS,
) -> Recognition:
    """scales: of rows that earlier encoders made. asked: in place of the gallery's own rows; of: what that is, in
    words."""
    counted = {label: count for label, count in store.stored_counts().items() if label != UNLABELLED}
    number = {label: i for i, label in enumerate(sorted(counted))}
    counts = np.array([counted[label] for label in sorted(counted)], np.int64)
    queries = None
    if asked is not None:
        strangers = sorted(set(asked.labels) - set(number))
        number_of = number | {label: -1 - i for i, label in enumerate(strangers)}
        codes = np.array([number_of[label] for label in asked.labels], np.int64)
        queries = Queries(np.asarray(asked.vectors, np.float32), codes, np.array(asked.ids, np.int64))
    recogniser = fit(
        lambda: _parts(store, facts, number, scales or {}),
        counts,
        only_near=store.kind != "sqlite" or facts.rows > EXACT or bool(facts.beyond.get("stored")),
        queries=queries,
    )
    state = [facts.rows, facts.next_id, facts.changes]
    today = date.today().isoformat()
    return Recognition(
        recogniser, uuid.uuid4().hex, facts.fingerprint or "", state, len(number), int(counts.sum()), today, of
    )


def _parts(store: Store, facts: Facts, number: Mapping[str, int], scales: Mapping[str, Scale]) -> Iterator[Part]:
    """Labelled rows of one encoder at a time; those that are enrolled meanwhile are left out. Rows that today's encoder
    made are asked, as new items resemble these; where they are few, all are."""
    few = sum(store.encoders().values()) > (1 - OWN) * facts.rows if scales else False
    known = (row for row in store.scan() if row.label in number and row.id < facts.next_id)
    for _, rows in groupby(enumerate(known), key=lambda pair: pair[0] // PART):
        by_encoder: dict[str, list[Row]] = {}
        for _, row in rows:
            by_encoder.setdefault(row_encoder(row.metadata), []).append(row)
        for mark, same in by_encoder.items():
            codes = np.array([number[row.label] for row in same], np.int64)
            ids = np.array([row.id for row in same], np.int64)
            vectors = unpack([row.vector for row in same], facts.dim)
            scale: Any = scales.get(mark)
            yield Part(vectors, codes, ids, scale, asked=few or not mark)


def save(store: Store, recognition: Recognition) -> None:
    recogniser = recognition.recogniser
    plain = {
        "format": FORMAT,
        **{name: getattr(recognition, name) for name in ("key", "encoder", "state", "labels", "items", "date", "of")},
        **{name: _text(getattr(recogniser, name)) for name in ARRAYS},
        "far": {name: np.asarray(getattr(recogniser.far, name)).tolist() for name in recogniser.far._fields},
    }
    text = json.dumps(plain, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    store.edit(KEY, lambda _, labels_of: ({}, text))
    store.edit(MADE, lambda _, labels_of: ({}, recognition.key))


def described(recognition: Recognition) -> dict[str, Any]:
    """As JSON has it, without the arrays. rates: what strangers can be held to, of the usual ones."""
    far = recognition.recogniser.far
    found = ((rate, far.at(rate)) for rate in (0.5, 0.2, 0.1, 0.05, 0.01, 0.001))
    rates = [
        {"far": rate, "expected": float(far.expected[at]), "at_most": float(far.at_most[at])}
        for rate, at in found
        if at is not None
    ]
    names = ("encoder", "labels", "items", "date", "of")
    least = {"least_far": float(far.expected[-1])}
    return {name: getattr(recognition, name) for name in names} | {"classes": far.classes, "rates": rates} | least


def made(store: Store) -> str:
    """Which recognition the gallery has; "" for none. Cheap: asked at every query."""
    return store.note(MADE)


def load(store: Store, facts: Facts) -> Recognition | None:
    """The one that the gallery keeps; None where there is none for its encoder, or it is damaged."""
    try:
        plain = json.loads(store.note(KEY) or "null")
        if plain is None or plain["format"] != FORMAT or plain["encoder"] != (facts.fingerprint or ""):
            return None
        arrays = {name: _array(plain[name]) for name in ARRAYS}
        dim, size = arrays["basis"].shape
        features = len(events.FEATURES)
        shapes = {"mean": (dim,), "between": (size,), "strangers": (2, features), "weights": (1 + features, 3)}
        if dim != facts.dim or any(arrays[name].shape != shape for name, shape in shapes.items()):
            return None
        far = plain["far"]
        score, expected, at_most = (np.array(far[name], float) for name in ("score", "expected", "at_most"))
        if not score.size or not np.isfinite([score, expected, at_most]).all():
            return None
        curve = events.Far(score, expected, at_most, int(far["classes"]))
        rows, next_id, changes, labels, items = np.array(
            [*plain["state"], plain["labels"], plain["items"]], int
        ).tolist()
        texts = str(plain["date"]), str(plain["of"])
        fields = str(plain["key"]), plain["encoder"], [rows, next_id, changes], labels, items
        return Recognition(Recogniser(**arrays, far=curve), *fields, *texts)
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def _text(array: NDArray[Any]) -> list[Any]:
    return [list(array.shape), base64.b64encode(np.ascontiguousarray(array, "<f4").tobytes()).decode()]


def _array(plain: Any) -> NDArray[np.float64]:
    shape, text = plain
    array = np.frombuffer(base64.b64decode(text, validate=True), "<f4").reshape(shape).astype(np.float64)
    if not np.isfinite(array).all():
        raise ValueError("not finite")
    return array
