"""FAISS's HNSW over the rows in memory, kept in a file beside the gallery: derived, so a wrong file is made again.

The file: one line of JSON (of which gallery, how deep to search, the sha256 of the rest), the ids, then FAISS's bytes.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from nearkin.core import files
from nearkin.gallery.schema import Floats, unit
from nearkin.gallery.stores.matrix import TOGETHER, Ids, Matrix

__all__ = ["EXACT", "Graph", "build", "load", "save"]

EXACT = 100_000  # rows up to which every search is exact
LINKS, WIDTH = 32, 200  # of HNSW: links a row, candidates while building
DEPTHS = (64, 128, 256, 512, 1024)
WANTED, TRIED = 0.995, 200  # recall@10 against exact, on so many queries, that decides the depth
COMPARED, ALIKE = 64, 0.9  # rows that tell whether a graph is of this gallery's present; cosine of a rounded row
STALE = 0.2  # share of rows that came or went
FORMAT = 1
Progress: TypeAlias = Callable[[int, int], None]


class Graph(NamedTuple):
    """Over rows by id, whose vectors never change. depth: candidates a search keeps. recall: measured with it."""

    index: Any
    ids: Ids
    depth: int
    recall: float

    def near(self, query: Floats, k: int, dead: int) -> Ids:
        """Ids of the k nearest and more, in no order; those that are gone are left to the caller."""
        wanted = min(len(self.ids), max(2 * k, k + 32) + min(dead, self.depth))
        settings = _faiss().SearchParametersHNSW(efSearch=max(self.depth, wanted))
        # A package that has loaded faiss.contrib.torch_utils has put a search in its place that knows no settings.
        search = getattr(self.index, "search_numpy", None) or self.index.search
        _, found = search(query[None], wanted, params=settings)
        return np.asarray(self.ids[found[0][found[0] >= 0]])

    def tail(self, matrix: Matrix) -> int:
        """The first place of the matrix that is not in the graph."""
        return int(np.searchsorted(matrix.ids[: matrix.count], self.ids[-1], "right"))

    def stale(self, matrix: Matrix) -> bool:
        """Whether so many rows came or went that it costs more than it saves."""
        inside = self.tail(matrix)
        return (
            matrix.count - inside > len(self.ids) * STALE
            or len(self.ids) - inside + matrix.dead > len(self.ids) * STALE
        )

    def fits(self, matrix: Matrix) -> bool:
        """Whether the last rows it should have are in it: not so where an older copy of the gallery was put back, and
        other rows got the same ids since."""
        places = np.flatnonzero(matrix.alive[: self.tail(matrix)])[-COMPARED:]
        at = np.searchsorted(self.ids, matrix.ids[places])
        if self.index.d != matrix.dim or (self.ids[at] != matrix.ids[places]).any():
            return False
        rows = [self.index.reconstruct(int(n)) for n in at]
        return not rows or bool((unit(np.stack(rows)) * matrix.rows[places]).sum(1).min() > ALIKE)

    def search(self, matrix: Matrix, query: Floats, k: int) -> Ids:
        """Places that hold the k nearest: the graph's, and exactly those of later rows."""
        gone = len(self.ids) - self.tail(matrix) + matrix.dead
        near = matrix.places(self.near(query, k, gone))
        return np.concatenate([near, matrix.search(query, k, start=self.tail(matrix))])


def build(matrix: Matrix, progress: Progress | None = None) -> Graph | None:
    """Over all rows. None where no depth reaches the wanted recall, as among rows without any structure."""
    faiss = _faiss()
    index = faiss.IndexHNSWSQ(matrix.dim, faiss.ScalarQuantizer.QT_8bit, LINKS, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = WIDTH
    places = np.flatnonzero(matrix.alive[: matrix.count])
    index.train(matrix.rows[places[:: max(1, len(places) // 65536)]])
    for start in range(0, len(places), TOGETHER):
        index.add(matrix.rows[places[start : start + TOGETHER]])
        if progress is not None:
            progress(min(start + TOGETHER, len(places)), len(places))
    return _deepened(index, matrix, matrix.ids[places])


def _deepened(index: Any, matrix: Matrix, ids: Ids) -> Graph | None:
    """With the least depth that finds what exact search finds."""
    draw = np.random.default_rng(0)
    chosen = matrix.rows[matrix.places(draw.choice(ids, min(TRIED, len(ids)), replace=False))]
    noise = draw.normal(size=chosen.shape) / matrix.dim**0.5
    queries = unit(chosen + 0.3 * noise)  # near the rows, as what is asked of a gallery is, but none of them
    right = [set(matrix.best(q, 10, matrix.search(q, 10))[0].tolist()) for q in queries]
    for depth in DEPTHS:
        graph = Graph(index, ids, depth, 0.0)
        found = [matrix.best(q, 10, graph.search(matrix, q, 10))[0].tolist() for q in queries]
        recall = sum(len(a & set(b)) for a, b in zip(right, found, strict=True)) / sum(map(len, right))
        if recall >= WANTED:
            return graph._replace(recall=recall)
    return None


def save(path: Path, graph: Graph, gallery: str) -> None:
    content = graph.ids.tobytes() + _faiss().serialize_index(graph.index).tobytes()
    head = {
        "format": FORMAT,
        "gallery": gallery,
        "count": len(graph.ids),
        "depth": graph.depth,
        "recall": graph.recall,
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    way_out = "the gallery is whole, and searched without it"
    with files.explained(f"{path}: the search index", way_out), files.replacing(path) as file:
        file.write(json.dumps(head).encode() + b"\n")
        file.write(content)


def load(path: Path, gallery: str) -> Graph:
    """The graph of the file, or a ValueError that says in a word why it is of no use."""
    try:
        line, _, rest = path.read_bytes().partition(b"\n")
    except FileNotFoundError:
        raise ValueError("missing") from None
    except OSError as error:
        raise ValueError(f"unreadable ({error.strerror or error})") from None
    try:
        head = json.loads(line)
        count, depth, recall = int(head["count"]), int(head["depth"]), float(head["recall"])
        sound = hashlib.sha256(rest).hexdigest() == head["sha256"] and depth in DEPTHS
        known = head["format"] == FORMAT and head["gallery"] == gallery
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise ValueError("damaged") from None
    if not sound:
        raise ValueError("damaged")
    if not known:
        raise ValueError("of another gallery")
    faiss = _faiss()
    try:
        index = faiss.deserialize_index(np.frombuffer(rest[8 * count :], np.uint8))
    except Exception:  # as its author wrote it, so another FAISS did
        raise ValueError(f"unreadable for this FAISS ({faiss.__version__})") from None
    if index.ntotal != count or not isinstance(index, faiss.IndexHNSWSQ):
        raise ValueError("damaged")
    return Graph(index, np.frombuffer(rest[: 8 * count], np.int64), depth, recall)


def missing() -> str | None:
    """Why there is no HNSW here, or None."""
    try:
        import faiss  # noqa: F401
    except ImportError:
        return "HNSW needs faiss: pip install 'nearkin[ann]'"
    return None


def _faiss() -> Any:
    try:
        import faiss
    except ImportError:
        raise ModuleNotFoundError("HNSW needs faiss: pip install 'nearkin[ann]'") from None
    return faiss
