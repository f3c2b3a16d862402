"""The rows of an SQLite gallery in memory, following the file: what others write is seen at the next look."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearkin.gallery import graph as graphs
from nearkin.gallery import reading
from nearkin.gallery.columns import Columns
from nearkin.gallery.facts import Facts
from nearkin.gallery.matrix import Matrix
from nearkin.gallery.rows import Filter, Floats, unpacked
from nearkin.gallery.store import said_damaged, said_lost

__all__ = ["Follower"]

HOLES = 1000  # removed rows that are not worth closing up


class Follower:
    """Matrix, metadata and search index of one gallery. Its caller holds a lock."""

    def __init__(self, where: str, index_path: Path) -> None:
        self.where, self.index_path = where, index_path
        self.damaged: dict[int, str] = {}
        self.lost = 0
        self.index_state = ""
        self.matrix: Matrix | None = None
        self._columns = Columns()
        self._graph: graphs.Graph | None = None
        self._version, self._change, self._next = -1, 0, 1

    def look(self, reader: Any, facts_of: Callable[[Any], Facts]) -> Matrix:
        """The rows as the file has them now."""
        version = reader.execute("PRAGMA data_version").fetchone()[0]
        if self.matrix is not None and version == self._version:
            return self.matrix
        reader.execute("BEGIN")
        try:
            facts = facts_of(reader)
            if self.matrix is None:
                self.matrix, self._change = Matrix(facts.dim), facts.changes
            self._take_over(reader, self.matrix, facts)
        finally:
            reader.execute("COMMIT")
        self._version = version
        return self.matrix

    def look_again(self) -> None:
        self._version = -1

    def _take_over(self, reader: Any, matrix: Matrix, facts: Facts) -> None:
        query = "SELECT DISTINCT id FROM changes WHERE seq > ? AND id < ?"
        touched = [i for (i,) in reader.execute(query, (self._change, self._next))]
        rows, bad = reading.fetch(reader, touched)
        for i in touched:
            if i in rows:
                matrix.relabel(i, rows[i].label)
            elif i not in bad:
                matrix.drop(i)
                self.damaged.pop(i, None)
        last: int | None = self._next - 1
        while last is not None and facts.next_id > self._next:
            found, worse, last = reading.after(reader, last)
            vectors = unpacked([row.vector for row in found], facts.dim)
            matrix.append([row.id for row in found], [row.label for row in found], vectors)
            self._columns.append([row.metadata for row in found])
            bad |= worse
        self._next, self._change = facts.next_id, facts.changes
        self.put_aside(bad)
        self._count(matrix, facts)
        if matrix.dead > max(HOLES, matrix.count // 4):
            self._columns.keep(np.flatnonzero(matrix.alive[: matrix.count]).tolist())
            matrix.close_holes()

    def _count(self, matrix: Matrix, facts: Facts) -> None:
        lost = facts.rows - (matrix.count - matrix.dead) - len(self.damaged)
        if lost != self.lost:
            self.lost = lost
            if lost:
                said_lost(self.where, lost)

    def put_aside(self, bad: dict[int, str]) -> None:
        """Damaged rows are not searched, and that is said, once a row."""
        new = {i: why for i, why in bad.items() if i not in self.damaged}
        self.damaged |= new
        if self.matrix is not None:
            for i in new:
                self.matrix.drop(i)
        if new:
            said_damaged(self.where, list(new))

    def nearest(self, matrix: Matrix, query: Floats, k: int, filter: Filter | None) -> tuple[Any, NDArray[np.float64]]:
        """Ids and similarities, nearest first. A filter makes the search exact, whatever index there is."""
        if filter is not None:
            allowed = np.ones(matrix.count, bool) if filter.labels is None else matrix.having(filter.labels)
            for key, values in filter.keys.items():
                allowed &= self._columns.having(key, values)
            places = matrix.search(query, k, allowed)
        elif self._graph is not None:
            places = self._graph.search(matrix, query, k)
        else:
            places = matrix.search(query, k)
        return matrix.best(query, k, places)

    def warm(self, matrix: Matrix, facts: Facts, progress: graphs.Progress | None) -> None:
        """Beyond 100,000 rows: the index from its file, or made again where that is of no use."""
        if matrix.count - matrix.dead <= graphs.EXACT:
            self._graph, self.index_state = None, f"exact, up to {graphs.EXACT:,} rows"
            return
        if (why := graphs.missing()) is not None:
            self._graph, self.index_state = None, f"exact; {why}"
            return
        state = ""
        if self._graph is None:
            try:
                self._graph = graphs.load(self.index_path, facts.gallery)
            except ValueError as error:
                state = f"; the file was {error} and is made again"
        if self._graph is None or self._graph.stale(matrix):
            self._graph = graphs.build(matrix, progress)
            if self._graph is None:
                self.index_state = f"exact: HNSW stays below a recall@10 of {graphs.WANTED} among these rows"
                return
            graphs.save(self.index_path, self._graph, facts.gallery)
        self.index_state = f"HNSW, recall@10 {self._graph.recall:.3f} when it was built{state}"

    def forget_index(self) -> None:
        self._graph = None
        with suppress(FileNotFoundError):
            self.index_path.unlink()
