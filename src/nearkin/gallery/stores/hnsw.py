"""FAISS's HNSW over the rows in memory, saved in a file beside the gallery: derived, so a bad file is rebuilt.

The file: one line of JSON (the gallery, the search depth, the sha256 of the rest), the ids, then FAISS's bytes.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from nearkin.core import files
from nearkin.gallery.schema import Floats, unit
from nearkin.gallery.stores.matrix import BLOCK, Ids, Matrix
from nearkin.gallery.stores.recall_queries import NEAR, like_new_items

__all__ = ["EXACT", "TARGET_RECALL", "WIDTH", "Graph", "Progress", "build", "load", "load_faiss", "save", "unavailable"]

EXACT = 100_000  # rows up to which every search is exact
LINKS, WIDTH = 32, 200  # of HNSW: links per row, candidates while building
DEPTHS = (64, 128, 256, 512, 1024)
TARGET_RECALL, QUERIES = 0.995, 200  # recall@10 against exact search, on so many queries, decides the depth
COMPARED, ALIKE = 64, 0.9  # rows that are compared with the gallery's; least cosine of a row and its rounded copy
STALE = 0.2  # share of rows added or removed
FORMAT = 1
Progress: TypeAlias = Callable[[int, int], None]


class Graph(NamedTuple):
    """Over rows by id, whose vectors never change. depth: candidates of a search. recall: measured with it."""

    index: Any
    ids: Ids
    depth: int
    recall: float

    def _neighbours(self, query: Floats, k: int, removed: int) -> Ids:
        """Ids that include the k nearest, unordered; the caller leaves out those that are gone."""
        count = min(len(self.ids), max(2 * k, k + 32) + min(removed, self.depth))
        settings = load_faiss().SearchParametersHNSW(efSearch=max(self.depth, count))
        # A package that has loaded faiss.contrib.torch_utils has replaced search by one without these settings.
        search = getattr(self.index, "search_numpy", None) or self.index.search
        _, neighbours = search(query[None], count, params=settings)
        return np.asarray(self.ids[neighbours[0][neighbours[0] >= 0]])

    def first_new(self, matrix: Matrix) -> int:
        """The first position of the matrix that is not in the graph."""
        return int(np.searchsorted(matrix.ids[: matrix.count], self.ids[-1], "right"))

    def stale(self, matrix: Matrix) -> bool:
        """Whether so many rows were added or removed that it costs more than it saves."""
        inside = self.first_new(matrix)
        return (
            matrix.count - inside > len(self.ids) * STALE
            or len(self.ids) - inside + matrix.removed > len(self.ids) * STALE
        )

    def fits(self, matrix: Matrix) -> bool:
        """Whether the last rows it should have are in it: not so where an older copy of the gallery was restored, and
        other rows got the same ids since."""
        positions = np.flatnonzero(matrix.alive[: self.first_new(matrix)])[-COMPARED:]
        at = np.searchsorted(self.ids, matrix.ids[positions])
        if self.index.d != matrix.dim or (self.ids[at] != matrix.ids[positions]).any():
            return False
        rows = [self.index.reconstruct(int(n)) for n in at]
        return not rows or bool((unit(np.stack(rows)) * matrix.rows[positions]).sum(1).min() > ALIKE)

    def propose(self, matrix: Matrix, query: Floats, k: int) -> Ids:
        """Positions that include the k nearest: those of the graph, and of later rows by exact search."""
        removed = len(self.ids) - self.first_new(matrix) + matrix.removed
        near = matrix.positions(self._neighbours(query, k, removed))
        return np.concatenate([near, matrix.propose(query, k, start=self.first_new(matrix))])


def build(matrix: Matrix, progress: Progress | None = None) -> Graph | None:
    """Over all rows. None where no depth reaches the target recall, as among rows without any structure."""
    faiss = load_faiss()
    index = faiss.IndexHNSWSQ(matrix.dim, faiss.ScalarQuantizer.QT_8bit, LINKS, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = WIDTH
    positions = np.flatnonzero(matrix.alive[: matrix.count])
    index.train(matrix.rows[positions[:: max(1, len(positions) // 65536)]])
    for start in range(0, len(positions), BLOCK):
        index.add(matrix.rows[positions[start : start + BLOCK]])
        if progress is not None:
            progress(min(start + BLOCK, len(positions)), len(positions))
    return _with_depth(index, matrix, matrix.ids[positions])


def _with_depth(index: Any, matrix: Matrix, ids: Ids) -> Graph | None:
    """With the smallest depth that reaches the target recall."""
    draw = np.random.default_rng(0)
    chosen = matrix.rows[matrix.positions(draw.choice(ids, min(QUERIES, len(ids)), replace=False))]

    def nearest(row: Floats) -> Floats:
        return matrix.rows[matrix.positions(matrix.top_k(row, NEAR, matrix.propose(row, NEAR))[0])]

    queries = like_new_items(chosen, nearest, draw)
    exact = [set(matrix.top_k(q, 10, matrix.propose(q, 10))[0].tolist()) for q in queries]
    for depth in DEPTHS:
        graph = Graph(index, ids, depth, 0.0)
        approximate = [matrix.top_k(q, 10, graph.propose(matrix, q, 10))[0].tolist() for q in queries]
        recall = sum(len(a & set(b)) for a, b in zip(exact, approximate, strict=True)) / sum(map(len, exact))
        if recall >= TARGET_RECALL:
            return graph._replace(recall=recall)
    return None


def save(path: Path, graph: Graph, gallery: str) -> None:
    content = graph.ids.tobytes() + load_faiss().serialize_index(graph.index).tobytes()
    head = {
        "format": FORMAT,
        "gallery": gallery,
        "count": len(graph.ids),
        "depth": graph.depth,
        "recall": graph.recall,
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    way_out = "the gallery is complete, and searched without it"
    with files.explained(f"{path}: the search index", way_out):
        files.refuse_link(path)
        with files.replacing(path) as file:
            file.write(json.dumps(head).encode() + b"\n")
            file.write(content)


def load(path: Path, gallery: str) -> Graph:
    """The graph of the file, or a ValueError that says in a word why it cannot be used."""
    if files.is_link(path):
        raise ValueError("a link, which is not followed,")
    try:
        line, _, rest = path.read_bytes().partition(b"\n")
    except FileNotFoundError:
        raise ValueError("missing") from None
    except OSError as error:
        raise ValueError(f"unreadable ({error.strerror or error})") from None
    try:
        head = json.loads(line)
        count, depth, recall = int(head["count"]), int(head["depth"]), float(head["recall"])
        intact = hashlib.sha256(rest).hexdigest() == head["sha256"] and depth in DEPTHS
        matches = head["format"] == FORMAT and head["gallery"] == gallery
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise ValueError("damaged") from None
    if not intact:
        raise ValueError("damaged")
    if not matches:
        raise ValueError("of another gallery")
    faiss = load_faiss()
    try:
        index = faiss.deserialize_index(np.frombuffer(rest[8 * count :], np.uint8))
    except Exception:  # its checksum is right, so another FAISS wrote it
        raise ValueError(f"unreadable for this FAISS ({faiss.__version__})") from None
    if index.ntotal != count or not isinstance(index, faiss.IndexHNSWSQ):
        raise ValueError("damaged")
    return Graph(index, np.frombuffer(rest[: 8 * count], np.int64), depth, recall)


def unavailable() -> str | None:
    """Why there is no HNSW on this machine, or None."""
    try:
        load_faiss()
    except ModuleNotFoundError as error:
        return str(error)
    return None


def load_faiss() -> Any:
    """The package, or a ModuleNotFoundError with the pip command."""
    try:
        import faiss
    except ImportError:
        raise ModuleNotFoundError("an index of FAISS needs faiss: pip install 'nearkin[ann]'") from None
    return faiss
