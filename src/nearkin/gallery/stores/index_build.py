"""Builds the index file of a gallery: k-means on a sample, then one pass over the rows, in bounded memory; at the end
the search is measured against the exact one.

How many lists are searched is chosen on one half of the queries, and the stated recall is that of the other half.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray

from nearkin.gallery.schema import Facts, Floats, Row, unit, unpack
from nearkin.gallery.stores import sqlite_file
from nearkin.gallery.stores.filter_columns import LABEL, ColumnBuilder
from nearkin.gallery.stores.index_file import IndexWriter, mapped
from nearkin.gallery.stores.list_search import Lists
from nearkin.gallery.stores.matrix import Ids, has_int8_matmul, one_thread, round_rows
from nearkin.gallery.stores.recall_queries import NEAR, like_new_items
from nearkin.gallery.stores.rescoring import rescore
from nearkin.gallery.stores.stored_forms import Form, encode

__all__ = ["EXACT", "Progress", "build"]

EXACT = 100_000  # rows up to which every search is exact
LISTS = 1.3  # lists per square root of the rows, up to a million
LONGEST, MOST_LISTS = 770, 32_768  # beyond: rows per list, so that it has no more groups of near rows than before
TRAINED = 40  # rows per list that train the centroids
# The share of lists, the smallest, that begins again elsewhere after each round of k-means. Fewer and fewer: two small
# lists that share a group may both be taken from it.
MOVED = (0.2, 0.2, 0.1, 0.05, 0.0, 0.0)
READ = 4096  # rows read at a time
ASSIGNED = 256  # rows assigned at a time: their cosines with all centroids stay in the processor's cache
WRITTEN = 32_768  # rows written at a time
TARGET, QUERIES, NEAREST = 0.995, 200, 10
KEEPS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # rows that a coarse form may leave to the fine one
Progress = Callable[[int, int], None]


def build(
    reader: Any, facts: Facts, form: Form, file: IO[bytes], folder: Path, progress: Progress | None = None
) -> Lists:
    """Writes the file; the caller has a snapshot of the gallery. folder: for temporary files."""
    centroids = _train(_sample(reader, facts, TRAINED * _list_count(facts.rows)), _list_count(facts.rows))
    with _Rows(facts.dim, form, centroids, folder) as rows:
        for part, damaged in sqlite_file.read_batches(reader, 0):
            rows.append(part, damaged)
            if progress is not None and facts.rows:
                progress(min(rows.count, facts.rows), facts.rows)
        writer = IndexWriter(file)
        head = rows.write(writer)
    version = reader.execute("PRAGMA user_version").fetchone()[0]
    head |= {"gallery": facts.gallery, "next_id": facts.next_id, "changes": facts.changes, "version": version}
    file.flush()
    with _readable(file) as source:
        arrays = mapped(source, writer.sections)
    lists = Lists(head, arrays)
    lists.head = writer.finish(head | _measured(reader, lists))
    lists.probes, lists.keep = lists.head["probes"], lists.head["keep"]
    return lists


def _readable(file: IO[bytes]) -> IO[bytes]:
    """The same file, opened for reading."""
    if isinstance(file.name, str):
        return open(file.name, "rb")
    return os.fdopen(os.dup(file.fileno()), "rb")


def _list_count(rows: int) -> int:
    if rows < 2048:
        return 1
    return max(int(LISTS * rows**0.5), min(rows // LONGEST, MOST_LISTS))


# --- centroids


def _sample(reader: Any, facts: Facts, count: int) -> Floats:
    """Rows by evenly spread random ids."""
    if not facts.rows:
        return np.zeros((0, facts.dim), np.float32)
    draw = np.random.default_rng(0)
    spread = max(count, int(count * (facts.next_id - 1) / facts.rows))  # where rows were removed
    ids = np.unique(draw.integers(1, max(2, facts.next_id), spread)) if spread < facts.next_id else None
    wanted = np.arange(1, facts.next_id) if ids is None else ids
    parts = []
    for start in range(0, len(wanted), READ):
        rows, _ = sqlite_file.fetch(reader, wanted[start : start + READ].tolist())
        parts.append(unpack([rows[i].vector for i in sorted(rows)], facts.dim))
    return np.concatenate(parts)[:count] if parts else np.zeros((0, facts.dim), np.float32)


def _train(rows: Floats, count: int) -> Floats:
    """Unit centroids by spherical k-means.

    Random rows leave some groups of near rows without a centroid: theirs lie scattered over many lists, and a search
    must read them all. So the smallest lists begin again at rows that are far from every centroid.
    """
    draw = np.random.default_rng(0)
    if len(rows) <= count:
        mean = rows.sum(0, keepdims=True) if len(rows) else np.ones((1, rows.shape[1]), np.float32)
        return unit(mean) if np.abs(mean).max() > 0 else unit(np.ones_like(mean))
    centroids = rows[draw.choice(len(rows), count, replace=False)]
    for share in MOVED if count > 1 else (0.0,):
        nearest = _assign(rows, centroids)
        sums = np.zeros((count, rows.shape[1]), np.float32)
        torch.from_numpy(sums).index_add_(0, torch.from_numpy(nearest), torch.from_numpy(rows))
        sizes = np.bincount(nearest, minlength=count)
        moved = np.argsort(sizes, kind="stable")[: int(share * count)]
        moved = np.union1d(moved, np.flatnonzero(np.abs(sums).max(1) < 1e-6))
        if len(moved):
            near = np.einsum("nd,nd->n", rows, centroids[nearest])
            sums[moved] = rows[_far_rows(near, len(moved), draw)]
        centroids = unit(sums)
    return centroids


def _far_rows(near: Floats, count: int, draw: np.random.Generator) -> Ids:
    """So many different rows, the farther from its centroid the likelier. near: cosines with the centroid."""
    # The power prefers rows without a centroid of their own to the outer rows of those that have one.
    weights = np.clip(1 - near.astype(np.float64), 1e-6, None) ** 8
    return draw.choice(len(near), count, replace=False, p=weights / weights.sum())


def _assign(rows: Floats, centroids: Floats) -> Ids:
    """The centroid of each row, by a product of 8-bit integers where there is one: any choice is correct."""
    if len(centroids) == 1:
        return np.zeros(len(rows), np.int64)
    fast = has_int8_matmul()
    codes, scales, _ = round_rows(centroids)
    scale = torch.from_numpy(scales)
    columns = torch.from_numpy(codes if fast else centroids).t().contiguous()
    nearest = np.empty(len(rows), np.int64)
    with one_thread():  # two that wait for one another after every product take longer on a busy machine
        for start in range(0, len(rows), ASSIGNED):
            part = rows[start : start + ASSIGNED]
            if fast:
                near = torch._int_mm(torch.from_numpy(round_rows(part)[0]), columns).float().mul_(scale)
            else:
                near = torch.from_numpy(part) @ columns
            nearest[start : start + len(part)] = near.numpy().argmax(1)
    return nearest


# --- rows


class _Spool:
    """An array that grows in a temporary file, which has no name: a kill leaves nothing behind."""

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self.count, self._dtype, self._shape = 0, np.dtype(np.uint8), ()

    def append(self, array: NDArray[Any]) -> None:
        self._dtype, self._shape = array.dtype, array.shape[1:]
        self._file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data if array.size else b"")
        self.count += len(array)

    def array(self) -> NDArray[Any]:
        self._file.flush()
        shape = (self.count, *self._shape)
        if not self.count or 0 in shape:
            return np.zeros(shape, self._dtype)
        return np.memmap(self._file, self._dtype, "r", shape=shape)

    def close(self) -> None:
        with suppress(OSError):
            self._file.close()


class _Rows:
    """The rows in the order of their ids; `write` puts them into lists."""

    def __init__(self, dim: int, form: Form, centroids: Floats, folder: Path) -> None:
        self.dim, self.form, self.centroids, self.count = dim, form, centroids, 0
        self.columns, self.damaged = ColumnBuilder(), dict[int, str]()
        self._folder = folder
        self._spools: dict[str, _Spool] = {}
        self._pieces: dict[str, list[NDArray[Any]]] = {"ids": [], "lists": [], "label_sizes": []}
        self._angles = np.tile([np.inf, -np.inf], (len(centroids), 1))
        self._spool("label_text").append(np.empty(0, np.uint8))
        self.append([], {})

    def __enter__(self) -> "_Rows":
        return self

    def __exit__(self, *_: object) -> None:
        for spool in self._spools.values():
            spool.close()

    def _spool(self, name: str) -> _Spool:
        if name not in self._spools:
            self._spools[name] = _Spool(self._folder)
        return self._spools[name]

    def append(self, rows: list[Row], damaged: dict[int, str]) -> None:
        self.damaged |= damaged
        vectors = unpack([row.vector for row in rows], self.dim)
        coded = {"fine": encode(vectors, self.form.fine, self.dim)} if rows else {}
        if self.form.coarse and rows:
            coded["coarse"] = encode(vectors, self.form.coarse, self.form.dim)
        for name, arrays in coded.items():
            for part, array in arrays.items():
                self._spool(f"{name}/{part}").append(array)
        lists = _assign(vectors, self.centroids) if rows else np.empty(0, np.int64)
        near = (vectors.astype(np.float64) * self.centroids[lists]).sum(1)
        angle = np.arccos(np.clip(near, -1, 1))
        np.minimum.at(self._angles[:, 0], lists, angle)
        np.maximum.at(self._angles[:, 1], lists, angle)
        labels = [row.label.encode("utf-8", "surrogateescape") for row in rows]
        self._spool("label_text").append(np.frombuffer(b"".join(labels), np.uint8))
        self._pieces["ids"].append(np.array([row.id for row in rows], np.int64))
        self._pieces["lists"].append(lists.astype(np.int32))
        self._pieces["label_sizes"].append(np.array([len(label) for label in labels], np.int64))
        self.columns.append(rows)
        self.count += len(rows)

    def write(self, writer: IndexWriter) -> dict[str, Any]:
        """All arrays; returns the description so far."""
        whole = {name: np.concatenate(parts) for name, parts in self._pieces.items()}
        order = np.argsort(whole["lists"], kind="stable")
        counts = np.bincount(whole["lists"], minlength=len(self.centroids))
        writer.array("ids", whole["ids"][order])
        writer.array("sorted_ids", whole["ids"])
        by_id = np.empty(self.count, np.int32)
        by_id[order] = np.arange(self.count, dtype=np.int32)
        writer.array("by_id", by_id)
        writer.array("starts", np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))
        writer.array("centroids", self.centroids)
        writer.array("angles", np.where(np.isfinite(self._angles), self._angles, 0.0))
        for name, spool in self._spools.items():
            if "/" in name:
                array = spool.array()
                writer.parts(name, array.dtype, array.shape, _permuted(array, order))
        if not self.count:
            self._write_empty(writer)
        for number, key in enumerate(self.columns.keys):
            column = self.columns.column(key, order)
            for part, array in column.items():
                writer.array(f"column {number}/{part}", array)
            if key == LABEL:
                self._write_labels(writer, column, order, whole["label_sizes"])
        return {
            "dim": self.dim,
            "stored": self.form.text,
            "keys": self.columns.keys,
            "other_keys": self.columns.left_out,
            "damaged": sorted(self.damaged),
            "probes": len(self.centroids),
            "keep": self.count,
        }

    def _write_empty(self, writer: IndexWriter) -> None:
        none = np.zeros((0, self.dim), np.float32)
        for name, kind, dim in (("fine", self.form.fine, self.dim), ("coarse", self.form.coarse, self.form.dim)):
            for part, array in (encode(none + 0, kind, dim) if kind else {}).items():
                writer.array(f"{name}/{part}", array)

    def _write_labels(
        self, writer: IndexWriter, column: dict[str, NDArray[Any]], order: Ids, sizes: NDArray[np.int64]
    ) -> None:
        """The text of each label: that of its first row."""
        ends, text = np.cumsum(sizes), self._spools["label_text"].array()
        first = order[column["order"][column["offsets"][:-1]]] if self.count else np.empty(0, np.int64)
        texts = [text[ends[i] - sizes[i] : ends[i]] for i in first.tolist()]
        writer.array("labels/offsets", np.concatenate([[0], np.cumsum([len(t) for t in texts])]).astype(np.int64))
        writer.array("labels/text", np.concatenate([np.empty(0, np.uint8), *texts]))


def _permuted(array: NDArray[Any], order: Ids) -> Iterator[NDArray[Any]]:
    for start in range(0, len(order), WRITTEN):
        yield array[order[start : start + WRITTEN]]


# --- how well it finds


def _measured(reader: Any, lists: Lists) -> dict[str, Any]:
    """The search depth, and its recall@10 on queries that had no part in choosing it."""
    every = {"probes": len(lists.centroids), "keep": len(lists), "recall": 1.0, "queries": 0, "exact": True}
    if len(lists) <= EXACT:
        return every
    queries = _queries(reader, lists)
    found = [_exact(reader, lists, query) for query in queries]
    half = len(queries) // 2
    chosen: list[int] = []  # how many lists are nearer than the one of each neighbour
    for query, positions in zip(queries[:half], found[:half], strict=True):
        order, _ = lists.near_lists(query, len(lists.centroids))
        chosen += np.argsort(order)[np.searchsorted(lists.starts, positions, "right") - 1].tolist()
    target = (1 + TARGET) / 2 if lists.coarse is not None else TARGET
    reached = 1 + int(np.sort(chosen)[max(0, int(np.ceil(target * len(chosen))) - 1)])
    probes = 2 * reached + 2  # the neighbours of one query are in the same lists: few queries promise too much
    if probes > len(lists.centroids) // 2:
        return every
    keep = 0
    if lists.coarse is not None:
        for keep in KEEPS:
            if _recall(reader, lists, queries[:half], found[:half], probes, keep) >= TARGET:
                break
    recall = _recall(reader, lists, queries[half:], found[half:], probes, keep)
    return {"probes": probes, "keep": keep, "recall": recall, "queries": len(queries) - half, "exact": False}


def _queries(reader: Any, lists: Lists) -> Floats:
    draw = np.random.default_rng(1)
    chosen = np.sort(draw.choice(len(lists), QUERIES, replace=False))
    rows, _ = sqlite_file.fetch(reader, lists.ids[chosen].tolist())
    vectors = unpack([row.vector for row in rows.values()], lists.dim)

    def nearest(row: Floats) -> Floats:
        near = rescore(reader, lists, row, NEAR, None, lists.exact(row, NEAR, -np.inf)).rows
        return unpack([one.vector for one, _ in near], lists.dim)

    queries = like_new_items(vectors, nearest, draw)
    return queries[draw.permutation(len(queries))]


def _exact(reader: Any, lists: Lists, query: Floats) -> Ids:
    rows = rescore(reader, lists, query, NEAREST, None, lists.exact(query, NEAREST, -np.inf)).rows
    return lists.positions(np.array([row.id for row, _ in rows], np.int64))


def _recall(reader: Any, lists: Lists, queries: Floats, found: list[Ids], probes: int, keep: int) -> float:
    hits = 0
    for query, positions in zip(queries, found, strict=True):
        candidates = lists.probe(query, NEAREST, -np.inf, probes, keep)
        rows = rescore(reader, lists, query, NEAREST, None, candidates).rows
        hits += len(set(lists.ids[positions].tolist()) & {row.id for row, _ in rows})
    return hits / sum(map(len, found))
