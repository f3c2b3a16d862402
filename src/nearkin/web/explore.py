"""Exploration of a gallery: its map in two dimensions, confused labels, likely label errors."""

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
MAX_ROWS = 4000  # of larger galleries every second, third, … row
MAX_AGE = 30.0  # seconds after which rows written by other processes appear
MAX_SUSPECTS = 24
EXAMPLES = 3


class _Rows(NamedTuple):
    """Some rows of the gallery. label_ids: indices into `labels`."""

    hits: list[Hit]
    vectors: NDArray[np.float32]  # (N, D)
    labels: list[str]
    label_ids: NDArray[np.int64]  # (N,)
    total: int


class Explorer:
    """Caches its results until the gallery changes. Not thread-safe."""

    def __init__(self, gallery: Gallery, most: int = MAX_ROWS) -> None:
        self._gallery, self._most = gallery, most
        self._cache: dict[Any, Any] = {}
        self._rows: tuple[Any, float, _Rows] | None = None
        self.changes = 0  # incremented after every write to the gallery

    def map(self, method: str) -> dict[str, Any]:
        """method: "pca", immediate, or "tsne", which takes seconds and preserves neighbourhoods."""
        rows = self._read()
        if method == "tsne" and not _has_tsne():
            raise ValueError("method tsne needs openTSNE: pip install 'nearkin[report]'; pca needs no extra")
        ids = [hit.id for hit in rows.hits]
        key = method, tuple(ids)
        if key not in self._cache:
            self._cache = {k: v for k, v in self._cache.items() if k[0] != method} | {key: _flat(rows.vectors, method)}
        flat = self._cache[key]
        return {
            "method": method,
            "methods": ["pca", *(["tsne"] if _has_tsne() and len(ids) >= maps.MIN_TSNE else [])],
            "rows": rows.total,
            "ids": ids,
            "x": flat[:, 0].round(4).tolist(),
            "y": flat[:, 1].round(4).tolist(),
            "label": rows.label_ids.tolist(),
            "labels": rows.labels,
            "hues": hues(flat, rows.label_ids, len(rows.labels)),
        }

    def diagnosis(self) -> dict[str, Any]:
        rows = self._read()
        diagnosis = {"rows": rows.total, "looked_at": len(rows.hits), "confusions": [], "suspects": [], "note": ""}
        if len(rows.hits) < 2 or len(rows.labels) < 2:
            return diagnosis | {"note": "confusions need at least two labels with a few rows each"}
        key = "diagnosis", tuple((hit.id, hit.label) for hit in rows.hits)
        if key not in self._cache:
            raw = evaluation.diagnose(torch.from_numpy(rows.vectors), torch.from_numpy(rows.label_ids))
            self._cache = {k: v for k, v in self._cache.items() if k[0] != "diagnosis"} | {key: _by_label(rows, raw)}
        lists: dict[str, Any] = self._cache[key]
        return diagnosis | lists

    def neighbours(self, ids: Sequence[int], k: int) -> dict[str, Any]:
        """The rows nearest to the mean of these, without themselves."""
        unique = list(dict.fromkeys(ids))
        vectors = self._gallery.vectors(unique).astype(np.float64)
        mean = vectors.mean(0)
        length = float(np.sqrt((mean**2).sum()))
        if length < 1e-9:
            raise ValueError("the mean of the chosen rows is 0; choose fewer rows")
        unit = (mean / length).astype(np.float32)
        chosen = [
            self._gallery.get(id)._replace(similarity=float(row @ (mean / length)))
            for id, row in zip(unique, vectors, strict=True)
        ]
        hits = self._gallery.search(Seen(unit, b"", "", b""), k + len(unique))
        return {"chosen": chosen, "hits": [hit for hit in hits if hit.id not in set(unique)][:k]}

    def _read(self) -> _Rows:
        """The rows, read again after a change; an even sample of a large gallery."""
        now, counts = time.monotonic(), self._gallery.labels()
        state = self.changes, hash(tuple(sorted(counts.items())))
        if self._rows is not None and self._rows[0] == state and now - self._rows[1] < MAX_AGE:
            return self._rows[2]
        total = sum(counts.values())
        sample = list(self._gallery.sample(self._most))
        hits = [hit for hit, _ in sample]
        vectors = np.stack([vector for _, vector in sample]) if sample else np.empty((0, self._gallery.dim), np.float32)
        labels = sorted({hit.label for hit in hits})
        index = {label: i for i, label in enumerate(labels)}
        label_ids = np.array([index[hit.label] for hit in hits], np.int64)
        self._rows = state, now, _Rows(hits, vectors, labels, label_ids, total)
        return self._rows[2]


def flat_by_pca(vectors: NDArray[Any]) -> Floats:
    """The first two principal components, (N, 2) in the unit square."""
    if not len(vectors):
        return np.empty((0, 2))
    return maps.fit_square(maps.pca(torch.as_tensor(vectors, dtype=torch.float64)))


def hues(flat: Floats, label_ids: NDArray[np.int64], count: int) -> list[int]:
    """One hue per label; neighbouring labels differ."""
    if not count:
        return []
    sizes = np.bincount(label_ids, minlength=count)[:, None]
    sums = np.stack([np.bincount(label_ids, flat[:, axis], count) for axis in (0, 1)], axis=1)  # (C, 2)
    return maps.hues(sums / sizes)


def _flat(vectors: NDArray[np.float32], method: str) -> Floats:
    if method == "pca" or len(vectors) < maps.MIN_TSNE:
        return flat_by_pca(vectors)
    return maps.plane(torch.from_numpy(vectors), seed=0)[0]


def _has_tsne() -> bool:
    from importlib.util import find_spec

    return find_spec("openTSNE") is not None


def _by_label(rows: _Rows, diagnosis: dict[str, Any]) -> dict[str, Any]:
    """The result of `diagnose` with labels and ids instead of indices."""
    members: dict[int, list[int]] = {}
    for hit, label_id in zip(rows.hits, rows.label_ids.tolist(), strict=True):
        members.setdefault(label_id, []).append(hit.id)
    confusions = [
        {
            "labels": [rows.labels[c] for c in row["classes"]],
            "share": row["share"],
            "neighbours": row["neighbours"],
            "examples": [members[c][:EXAMPLES] for c in row["classes"]],
        }
        for row in diagnosis["confused_pairs"]
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
        for row in diagnosis["label_errors"][:MAX_SUSPECTS]
    ]
    return {"confusions": confusions, "suspects": suspects}
