"""The rows of an SQLite gallery in memory, kept in step with the file: a search sees what other processes wrote."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nearkin.gallery.schema import Facts, Filter, Floats, Row, pack, parse_metadata, scalar_json, unpack
from nearkin.gallery.stores import Neighbours, hnsw, sqlite_file, warn_damaged, warn_lost
from nearkin.gallery.stores.matrix import Mask, Matrix, isin

__all__ = ["Columns", "LoadedRows", "MemoryIndex", "has_changes"]

MAX_HOLES = 1000  # removed rows below which compacting is not worth it
MAX_COLUMNS = 32
MAX_VALUES = 1_000_000  # distinct values of all columns together
FactsOf: TypeAlias = Callable[[Any], Facts]


class _Column(NamedTuple):
    codes: NDArray[np.int32]
    code_of: dict[str, int]


class Columns:
    """Metadata by position of the matrix, with one column per key that a filter uses: a filter costs one comparison per
    row. The least recently used columns are dropped; a key that no row has costs nothing."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._keys: set[str] = set()
        self._keys_read = 0  # texts whose keys are in the set
        self._columns: dict[str, _Column] = {}  # the most recently used last

    def append(self, texts: Sequence[str]) -> None:
        self.texts.extend("{}" if text == "{}" else text for text in texts)  # one object for all empty ones

    def take(self, positions: Sequence[int]) -> None:
        self.texts = [self.texts[position] for position in positions]
        self._keys, self._keys_read, self._columns = set(), 0, {}

    def replace(self, position: int, text: str) -> None:
        self.texts[position] = text
        self._keys_read, self._columns = 0, {}

    def has_value(self, key: str, values: Sequence[str]) -> Mask:
        """Which positions have one of these values, as JSON, under the key."""
        for text in self.texts[self._keys_read :]:
            if text != "{}":
                self._keys.update(parse_metadata(text))
        self._keys_read = len(self.texts)
        if key not in self._keys:
            return np.zeros(len(self.texts), bool)
        column = self._columns.pop(key, None) or _Column(np.empty(0, np.int32), {})
        if len(column.codes) < len(self.texts):
            code_of = column.code_of
            new = [code_of.setdefault(value, len(code_of)) for value in self._read(key, len(column.codes))]
            column = _Column(np.concatenate([column.codes, np.array(new, np.int32)]), code_of)
        self._columns[key] = column
        self._drop_unused()
        return isin(column.codes, [column.code_of[value] for value in values if value in column.code_of])

    def _drop_unused(self) -> None:
        while len(self._columns) > 1 and (
            len(self._columns) > MAX_COLUMNS
            or sum(len(column.code_of) for column in self._columns.values()) > MAX_VALUES
        ):
            del self._columns[next(iter(self._columns))]

    def _read(self, key: str, start: int) -> list[str]:
        """The value of each text from `start` on, as JSON; "" where it has none that a filter could name."""
        values = []
        for text in self.texts[start:]:
            value = parse_metadata(text).get(key, self) if text != "{}" else self
            values.append("" if value is self or isinstance(value, list | dict) else scalar_json(value))
        return values


@dataclass
class LoadedRows:
    """The rows of one state of the file; positions of the matrix and the columns agree."""

    matrix: Matrix
    columns: Columns
    change: int  # the last one that is applied
    next: int = 1  # the first id that is not loaded
    rows: int = 0  # how many there should be
    version: int = -1
    transaction: sqlite_file.Transaction = (0, None)

    def precedes(self, reader: Any, facts: Facts) -> bool:
        """Whether the file continued from here; not so after an older copy was restored into it."""
        ahead = facts.next_id >= self.next and facts.changes >= self.change and facts.dim == self.matrix.dim
        return ahead and sqlite_file.follows(reader, self.transaction)

    def append(self, rows: Sequence[Row]) -> None:
        vectors = unpack([row.vector for row in rows], self.matrix.dim)
        self.matrix.append([row.id for row in rows], [row.label for row in rows], vectors)
        self.columns.append([row.metadata for row in rows])

    def allowed(self, filter: Filter) -> Mask:
        """Which positions pass."""
        matrix = self.matrix
        allowed = np.ones(matrix.count, bool) if filter.labels is None else matrix.has_label(filter.labels)
        for key, values in filter.keys.items():
            allowed &= self.columns.has_value(key, values)
        return allowed

    def update(self, row: Row) -> bool:
        """Takes a changed row; whether its vector or its metadata are new."""
        self.matrix.relabel(row.id, row.label)
        at = self.matrix.position(row.id)
        if at is None or self.agrees(row):
            return False
        self.matrix.replace(at, unpack([row.vector], self.matrix.dim))
        self.columns.replace(at, row.metadata)
        return True

    def agrees(self, row: Row) -> bool:
        """Whether a row of the file is the one that was searched."""
        at, matrix = self.matrix.position(row.id), self.matrix
        return (
            at is not None
            and pack(matrix.rows[at : at + 1])[0] == row.vector
            and matrix.labels.get(row.label) == matrix.label_codes[at]
            and self.columns.texts[at] == row.metadata
        )

    def compact(self) -> None:
        if self.matrix.removed > max(MAX_HOLES, self.matrix.count // 4):
            self.columns.take(np.flatnonzero(self.matrix.alive[: self.matrix.count]).tolist())
            self.matrix.compact()


class MemoryIndex:
    """Vectors, metadata and search index of one gallery. The caller holds a lock, and a snapshot of the file."""

    stored = None  # no form on the disk

    def __init__(self, where: str, index_path: Path) -> None:
        self.where, self.index_path = where, index_path
        self.damaged: dict[int, str] = {}
        self.lost = 0
        self.index_state = ""
        self._loaded: LoadedRows | None = None  # complete, or None
        self._graph: hnsw.Graph | None = None

    def refresh(self, reader: Any, facts_of: FactsOf) -> Matrix:
        """The rows as the file has them now."""
        version = reader.execute("PRAGMA data_version").fetchone()[0]
        loaded = self._loaded
        if loaded is not None and version == loaded.version:
            return loaded.matrix
        facts = facts_of(reader)
        if loaded is not None and loaded.precedes(reader, facts) and has_changes(reader, loaded.change, facts.changes):
            damaged = self._apply_changes(reader, loaded, facts)
        else:
            if loaded is not None:
                self._graph = None
            loaded, damaged = self._load(reader, facts)
        loaded.next, loaded.change, loaded.rows, loaded.version = facts.next_id, facts.changes, facts.rows, version
        loaded.transaction = sqlite_file.last_transaction(reader)
        loaded.compact()
        self._loaded = loaded
        self.exclude(damaged)
        return loaded.matrix

    def _load(self, reader: Any, facts: Facts) -> tuple[LoadedRows, dict[int, str]]:
        """Reads all rows; if it is interrupted, nothing stays in memory."""
        self._loaded = None
        size = reader.execute("PRAGMA page_count").fetchone()[0] * reader.execute("PRAGMA page_size").fetchone()[0]
        rows = min(facts.rows, size // (4 * facts.dim))
        room = rows + rows // 4 + 1  # the first rows that are enrolled after this find it
        loaded = LoadedRows(Matrix(facts.dim, room), Columns(), facts.changes)
        damaged: dict[int, str] = {}
        for rows, damaged_part in sqlite_file.read_batches(reader, 0):
            loaded.append(rows)
            damaged |= damaged_part
        self.damaged = {i: why for i, why in self.damaged.items() if i in damaged}
        return loaded, damaged

    def _apply_changes(self, reader: Any, loaded: LoadedRows, facts: Facts) -> dict[int, str]:
        """Reads everything before it changes memory; if that change is interrupted, the next refresh reads all rows."""
        query = "SELECT DISTINCT id FROM changes WHERE seq > ? AND id < ?"
        touched = [i for (i,) in reader.execute(query, (loaded.change, loaded.next))]
        changed, damaged = sqlite_file.fetch(reader, touched)
        new = list(sqlite_file.read_batches(reader, loaded.next - 1)) if facts.next_id > loaded.next else []
        self._loaded = None
        for i in touched:
            if i in changed:
                if loaded.update(changed[i]):
                    self._graph, self.index_state = None, "exact, until it is warmed: rows were renewed"
            elif i not in damaged:
                loaded.matrix.remove(i)
                self.damaged.pop(i, None)
        for rows, damaged_part in new:
            loaded.append(rows)
            damaged |= damaged_part
        return damaged

    def exclude(self, damaged: dict[int, str], lost: Sequence[int] = ()) -> None:
        """Damaged rows, and rows that the file does not return, are not searched; each is warned about once."""
        new = {i: why for i, why in damaged.items() if i not in self.damaged}
        self.damaged |= new
        lost_before, loaded = self.lost, self._loaded
        if loaded is not None:
            for i in (*damaged, *lost):
                loaded.matrix.remove(i)
            self.lost = loaded.rows - (loaded.matrix.count - loaded.matrix.removed) - len(self.damaged)
        if new:
            warn_damaged(self.where, list(new))
        if self.lost not in (0, lost_before):
            warn_lost(self.where, self.lost)

    def nearest(
        self, reader: Any, facts_of: FactsOf, query: Floats, k: int, filter: Filter | None, exact: bool = False
    ) -> Neighbours:
        """Rows and similarities, nearest first, each as the file has it now.

        An id that the file does not return (a damaged key, a row that another program deleted) is excluded, and twice
        as many are proposed: this ends, however many are gone. A row that differs from the one that was searched (an
        older copy was restored) makes everything be read again, once.
        """
        count, may_reload = k, True
        while True:
            by_graph = self._graph is not None and filter is None and count == k and not exact
            ids, similarity = self._propose(query, count, filter, by_graph)
            rows, damaged = sqlite_file.fetch(reader, ids.tolist())
            loaded = self._loaded
            assert loaded is not None
            changed = [row.id for row in rows.values() if not loaded.agrees(row)]
            if changed and may_reload:
                self._loaded, self._graph, count, may_reload = None, None, k, False
                self.refresh(reader, facts_of)
                continue
            self.exclude(damaged, [i for i in ids.tolist() if i in changed or (i not in rows and i not in damaged)])
            hits = [
                (rows[i], s)
                for i, s in zip(ids.tolist(), similarity.tolist(), strict=True)
                if i in rows and i not in changed
            ]
            if len(hits) == len(ids) or len(hits) >= k or count > loaded.matrix.count:
                recall = self._graph.recall if by_graph and self._graph is not None else None
                return Neighbours(hits[:k], not by_graph, recall)
            count *= 2

    def _propose(self, query: Floats, k: int, filter: Filter | None, by_graph: bool) -> tuple[Any, NDArray[np.float64]]:
        """Ids and similarities, nearest first. With a filter the search is exact, whatever index there is."""
        assert self._loaded is not None
        matrix = self._loaded.matrix
        if filter is not None:
            positions = matrix.propose(query, k, self._loaded.allowed(filter))
        elif by_graph and self._graph is not None:
            positions = self._graph.propose(matrix, query, k)
        else:
            positions = matrix.propose(query, k)
        return matrix.top_k(query, k, positions)

    def warm(self, matrix: Matrix, facts: Facts, progress: hnsw.Progress | None) -> None:
        """Beyond 100,000 rows: the index from its file, or rebuilt if that cannot be used."""
        if matrix.count - matrix.removed <= hnsw.EXACT:
            self._graph, self.index_state = None, f"exact, up to {hnsw.EXACT:,} rows"
            return
        if (reason := hnsw.unavailable()) is not None:
            self._graph, self.index_state = None, f"exact; {reason}"
            return
        rebuilt = ""
        if self._graph is None:
            try:
                graph = hnsw.load(self.index_path, facts.index_id)
                if not graph.fits(matrix):
                    raise ValueError("of another state of the gallery")
                self._graph = graph
            except ValueError as error:
                rebuilt = f"; the file was {error} and is made again"
        if self._graph is None or self._graph.stale(matrix):
            self._graph = hnsw.build(matrix, progress)
            if self._graph is None:
                self.index_state = f"exact: HNSW stays below a recall@10 of {hnsw.TARGET_RECALL} among these rows"
                return
            try:
                hnsw.save(self.index_path, self._graph, facts.index_id)
            except ValueError as error:  # as in a read-only folder
                sentence = f"{error}; it is in memory, and made again at the next opening"
                warnings.warn(sentence, RuntimeWarning, stacklevel=2)
        self.index_state = f"HNSW, recall@10 {self._graph.recall:.3f} when it was built{rebuilt}"

    def forget_graph(self) -> None:
        self._graph = None
        with suppress(FileNotFoundError):
            self.index_path.unlink()


def has_changes(reader: Any, since: int, until: int) -> bool:
    """Whether the file still has the record of every change since; not so after it was vacuumed."""
    if until == since:
        return True
    query = "SELECT count(*) FROM changes WHERE seq > ? AND seq <= ?"
    return bool(reader.execute(query, (since, until)).fetchone()[0] == until - since)
