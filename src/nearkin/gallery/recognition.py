"""What a gallery has learned of itself to answer "who is this?": kept as a note with its rows, so that every machine
and process answers alike. It is learned again when a tenth of the labels have changed."""

import base64
import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearkin.evaluation.recognition import Recogniser, events, fit
from nearkin.evaluation.recognition.simulation import Part, Queries
from nearkin.gallery.bridge_scale import Scale
from nearkin.gallery.schema import UNLABELLED, Facts, Floats, Row, row_encoder, unpack
from nearkin.gallery.stores import Store
from nearkin.gallery.stores.hnsw import EXACT

__all__ = ["CHANGED", "KEY", "Recognition", "described", "learn_gallery", "load", "made", "save"]

KEY = "recognition"
MADE = "recognition.made"  # a short note beside it: which one it is
FORMAT = 1
PART = 4096  # rows at a time
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


def learn_gallery(
    store: Store,
    facts: Facts,
    scales: Mapping[str, Scale] | None = None,
    asked: tuple[Floats, Sequence[str], Sequence[int]] | None = None,
    of: str = "its own labels",
) -> Recognition:
    """scales: of rows that earlier encoders made. asked: vectors, labels, and ids of own rows (0: none) of items that
    are asked in place of the gallery's own rows; of: their description."""
    counted = {label: count for label, count in store.counts().items() if label != UNLABELLED}
    number = {label: i for i, label in enumerate(sorted(counted))}
    counts = np.array([counted[label] for label in sorted(counted)], np.int64)
    queries = None
    if asked is not None:
        codes = np.array([number.get(label, -1) for label in asked[1]], np.int64)
        queries = Queries(np.asarray(asked[0], np.float32), codes, np.array(asked[2], np.int64))
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
    """As JSON has it, without the arrays."""
    far = recognition.recogniser.far
    rates = {f"{rate:g}": far.at(rate) is not None for rate in (0.1, 0.01, 0.001)}
    names = ("encoder", "labels", "items", "date", "of")
    return {name: getattr(recognition, name) for name in names} | {"classes": far.classes, "fars": rates}


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
        curve = events.Far(score, expected, at_most, int(far["classes"]))
        fields = (str(plain["key"]), plain["encoder"], plain["state"], plain["labels"], plain["items"])
        return Recognition(Recogniser(**arrays, far=curve), *fields, plain["date"], plain["of"])
    except (ValueError, KeyError, TypeError):
        return None


def _text(array: NDArray[Any]) -> list[Any]:
    return [list(array.shape), base64.b64encode(np.ascontiguousarray(array, "<f4").tobytes()).decode()]


def _array(plain: Any) -> NDArray[np.float64]:
    shape, text = plain
    array = np.frombuffer(base64.b64decode(text, validate=True), "<f4").reshape(shape).astype(np.float64)
    if not np.isfinite(array).all():
        raise ValueError("not finite")
    return array
