"""A gallery looked at as a whole: its map in two dimensions, whom it confuses, which labels are likely wrong."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nearkin import evaluation
from nearkin.gallery import Gallery, Hit, Seen
from nearkin.report import maps

__all__ = ["Explorer", "flat_by_pca", "hues"]

Floats = NDArray[np.float64]
MOST = 4000  # rows looked at; of larger galleries every second, third, …
TSNE = 4000  # rows of a t-SNE
FRESH = 30.0  # seconds after which rows that another process wrote are seen
SUSPECTS = 24
EXAMPLES = 3


class _Rows(NamedTuple):
    """Some rows of the gallery. kinds: the place of each label in `labels`."""

    hits: list[Hit]
    vectors: NDArray[np.float32]  # (N, D)
    labels: list[str]
    kinds: NDArray[np.int64]  # (N,)
    total: int


class Explorer:
    """Keeps what it computed until the gallery is written to. One thread at a time."""

    def __init__(self, gallery: Gallery, most: int = MOST) -> None:
        self._gallery, self._most = gallery, most
        self._kept: dict[Any, Any] = {}
        self._rows: tuple[Any, float, _Rows] | None = None
        self.changes = 0  # raised by whoever writes to the gallery

    def map(self, method: str) -> dict[str, Any]:
        """method: "pca", at once, or "tsne", which takes seconds and keeps neighbours together."""
        rows = self._read()
        if method == "tsne" and not _has_tsne():
            raise ValueError("method tsne needs openTSNE: pip install 'nearkin[report]'; pca needs nothing")
        ids = [hit.id for hit in rows.hits]
        key = method, tuple(ids)
        if key not in self._kept:
            self._kept = {k: v for k, v in self._kept.items() if k[0] != method} | {key: _flat(rows.vectors, method)}
        flat = self._kept[key]
        return {
            "method": method,
            "methods": ["pca", *(["tsne"] if _has_tsne() and len(ids) >= maps.FEWEST else [])],
            "rows": rows.total,
            "ids": ids,
            "x": flat[:, 0].round(4).tolist(),
            "y": flat[:, 1].round(4).tolist(),
            "label": rows.kinds.tolist(),
            "labels": rows.labels,
            "hues": hues(flat, rows.kinds, len(rows.labels)),
        }

    def diagnosis(self) -> dict[str, Any]:
        rows = self._read()
        said = {"rows": rows.total, "looked_at": len(rows.hits), "confusions": [], "suspects": [], "note": ""}
        if len(rows.hits) < 2 or len(rows.labels) < 2:
            return said | {"note": "two labels with a few rows each are needed before one can be confused with another"}
        key = "diagnosis", tuple((hit.id, hit.label) for hit in rows.hits)
        if key not in self._kept:
            found = evaluation.diagnose(torch.from_numpy(rows.vectors), torch.from_numpy(rows.kinds))
            self._kept = {k: v for k, v in self._kept.items() if k[0] != "diagnosis"} | {key: _told(rows, found)}
        told: dict[str, Any] = self._kept[key]
        return said | told

    def neighbours(self, ids: Sequence[int], k: int) -> dict[str, Any]:
        """The rows nearest to the middle of these, without themselves."""
        unique = list(dict.fromkeys(ids))
        vectors = self._gallery.vectors(unique).astype(np.float64)
        middle = vectors.mean(0)
        length = float(np.sqrt((middle**2).sum()))
        if length < 1e-9:
            raise ValueError("the chosen rows point in all directions, so they have no middle; choose fewer")
        unit = (middle / length).astype(np.float32)
        chosen = [
            self._gallery.get(id)._replace(similarity=float(row @ (middle / length)))
            for id, row in zip(unique, vectors, strict=True)
        ]
        found = self._gallery.search(Seen(unit, b"", "", b""), k + len(unique))
        own = set(unique)
        return {"chosen": chosen, "hits": [hit for hit in found if hit.id not in own][:k]}

    def _read(self) -> _Rows:
        """The rows, read again after a change; those of large galleries evenly from the first to the last."""
        now, counts = time.monotonic(), self._gallery.labels()
        state = self.changes, hash(tuple(sorted(counts.items())))
        if self._rows is not None and self._rows[0] == state and now - self._rows[1] < FRESH:
            return self._rows[2]
        total = sum(counts.values())
        step = max(1, -(-total // self._most))
        kept = [found for n, found in enumerate(self._gallery.rows()) if n % step == 0]
        hits = [hit for hit, _ in kept]
        vectors = np.stack([vector for _, vector in kept]) if kept else np.empty((0, self._gallery.dim), np.float32)
        labels = sorted({hit.label for hit in hits})
        place = {label: i for i, label in enumerate(labels)}
        kinds = np.array([place[hit.label] for hit in hits], np.int64)
        self._rows = state, now, _Rows(hits, vectors, labels, kinds, total)
        return self._rows[2]


def flat_by_pca(vectors: NDArray[Any]) -> Floats:
    """The two main directions, (N, 2) in the unit square; the side of the largest coordinate is the positive one."""
    wide = np.asarray(vectors, np.float64)
    if not len(wide):
        return np.empty((0, 2))
    centred = wide - wide.mean(0)
    main = np.linalg.eigh(centred.T @ centred)[1][:, ::-1][:, :2]  # (D, 2), or (D, 1)
    largest = np.abs(main).argmax(0)
    main = main * np.sign(main[largest, np.arange(main.shape[1])])
    flat = np.zeros((len(wide), 2))
    flat[:, : main.shape[1]] = centred @ main
    low, span = flat.min(0), np.ptp(flat, axis=0)
    return np.where(span > 1e-12, (flat - low) / np.where(span > 1e-12, span, 1.0), 0.5)


def hues(flat: Floats, kinds: NDArray[np.int64], count: int) -> list[int]:
    """A hue a label, each time the one whose nearest bearer so far is farthest: labels side by side differ."""
    if not count:
        return []
    sizes = np.bincount(kinds, minlength=count)[:, None]
    middles = np.stack([np.bincount(kinds, flat[:, axis], count) for axis in (0, 1)], axis=1) / sizes  # (C, 2)
    nearest = np.full((count, maps.HUES), np.inf)
    chosen = []
    for i in range(count):
        hue = int(nearest[i].argmax())
        chosen.append(hue)
        away = np.sqrt(((middles - middles[i]) ** 2).sum(1))
        nearest[:, hue] = np.minimum(nearest[:, hue], away)
    return chosen


def _flat(vectors: NDArray[np.float32], method: str) -> Floats:
    if method == "pca" or len(vectors) < maps.FEWEST:
        return flat_by_pca(vectors)
    return maps.plane(torch.from_numpy(vectors), seed=0)[0]


def _has_tsne() -> bool:
    from importlib.util import find_spec

    return find_spec("openTSNE") is not None


def _told(rows: _Rows, found: dict[str, Any]) -> dict[str, Any]:
    """What `diagnose` found, by labels and ids."""
    members: dict[int, list[int]] = {}
    for hit, kind in zip(rows.hits, rows.kinds.tolist(), strict=True):
        members.setdefault(kind, []).append(hit.id)
    confusions = [
        {
            "labels": [rows.labels[c] for c in row["classes"]],
            "share": row["share"],
            "neighbours": row["neighbours"],
            "examples": [members[c][:EXAMPLES] for c in row["classes"]],
        }
        for row in found["confused_pairs"]
    ]
    suspects = [
        {
            "id": rows.hits[row["item"]].id,
            "name": rows.hits[row["item"]].name,
            "label": rows.labels[row["class"]],
            "suggested": rows.labels[row["suggested"]],
            "agreement": row["agreement"],
            "examples": members[row["suggested"]][:EXAMPLES],
        }
        for row in found["label_errors"][:SUSPECTS]
    ]
    return {"confusions": confusions, "suspects": suspects}
