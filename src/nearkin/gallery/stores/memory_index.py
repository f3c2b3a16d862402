"""The rows of an SQLite gallery in memory, following the file: what others write is seen at the next look."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nearkin.gallery.facts import Facts
from nearkin.gallery.schema import Filter, Floats, Row, packed, unpacked
from nearkin.gallery.stores import hnsw as graphs
from nearkin.gallery.stores import sqlite_read
from nearkin.gallery.stores.columns import Columns
from nearkin.gallery.stores.contract import said_damaged, said_lost, told
from nearkin.gallery.stores.matrix import Matrix

__all__ = ["Follower"]

HOLES = 1000  # removed rows that are not worth closing up
FactsOf: TypeAlias = Callable[[Any], Facts]


@dataclass
class Held:
    """Rows in memory as one state of the file has them; places of the matrix and the columns agree."""

    matrix: Matrix
    columns: Columns
    change: int  # the last one that is in here
    next: int = 1  # the first id that is not
    rows: int = 0  # how many there should be
    version: int = -1

    def follows(self, facts: Facts) -> bool:
        """Whether the file went on from here; not so where an older copy was put back into it."""
        return facts.next_id >= self.next and facts.changes >= self.change and facts.dim == self.matrix.dim

    def append(self, rows: Sequence[Row]) -> None:
        vectors = unpacked([row.vector for row in rows], self.matrix.dim)
        self.matrix.append([row.id for row in rows], [row.label for row in rows], vectors)
        self.columns.append([row.metadata for row in rows])

    def agrees(self, row: Row) -> bool:
        """Whether a row of the file is what was searched."""
        place, matrix = self.matrix.place(row.id), self.matrix
        return (
            place is not None
            and packed(matrix.rows[place : place + 1])[0] == row.vector
            and matrix.labels.get(row.label) == matrix.codes[place]
            and self.columns.texts[place] == row.metadata
        )

    def close_holes(self) -> None:
        if self.matrix.dead > max(HOLES, self.matrix.count // 4):
            self.columns.keep(np.flatnonzero(self.matrix.alive[: self.matrix.count]).tolist())
            self.matrix.close_holes()


class Follower:
    """Matrix, metadata and search index of one gallery. Its caller holds a lock, and a snapshot of the file."""

    def __init__(self, where: str, index_path: Path) -> None:
        self.where, self.index_path = where, index_path
        self.damaged: dict[int, str] = {}
        self.lost = 0
        self.index_state = ""
        self._held: Held | None = None  # whole or not there
        self._graph: graphs.Graph | None = None

    def look(self, reader: Any, facts_of: FactsOf) -> Matrix:
        """The rows as the file has them now."""
        version = reader.execute("PRAGMA data_version").fetchone()[0]
        held = self._held
        if held is not None and version == held.version:
            return held.matrix
        facts = facts_of(reader)
        if held is not None and held.follows(facts):
            bad = self._go_on(reader, held, facts)
        else:
            if held is not None:
                self._graph = None
            held, bad = self._read_all(reader, facts)
        held.next, held.change, held.rows, held.version = facts.next_id, facts.changes, facts.rows, version
        held.close_holes()
        self._held = held
        self.put_aside(bad)
        return held.matrix

    def _read_all(self, reader: Any, facts: Facts) -> tuple[Held, dict[int, str]]:
        """Aside: what stops it half-way leaves nothing."""
        self._held = None
        size = reader.execute("PRAGMA page_count").fetchone()[0] * reader.execute("PRAGMA page_size").fetchone()[0]
        held = Held(Matrix(facts.dim, min(facts.rows, size // (4 * facts.dim))), Columns(), facts.changes)
        bad: dict[int, str] = {}
        for rows, worse in sqlite_read.parts(reader, 0):
            held.append(rows)
            bad |= worse
        self.damaged = {i: why for i, why in self.damaged.items() if i in bad}
        return held, bad

    def _go_on(self, reader: Any, held: Held, facts: Facts) -> dict[int, str]:
        """Everything is read before anything in memory changes; what stops that change makes the next look read all."""
        query = "SELECT DISTINCT id FROM changes WHERE seq > ? AND id < ?"
        touched = [i for (i,) in reader.execute(query, (held.change, held.next))]
        changed, bad = sqlite_read.fetch(reader, touched)
        new = list(sqlite_read.parts(reader, held.next - 1)) if facts.next_id > held.next else []
        self._held = None
        for i in touched:
            if i in changed:
                held.matrix.relabel(i, changed[i].label)
            elif i not in bad:
                held.matrix.drop(i)
                self.damaged.pop(i, None)
        for rows, worse in new:
            held.append(rows)
            bad |= worse
        return bad

    def put_aside(self, bad: dict[int, str], lost: Sequence[int] = ()) -> None:
        """Damaged rows and rows that cannot be found are not searched, and that is said, once."""
        new = {i: why for i, why in bad.items() if i not in self.damaged}
        self.damaged |= new
        before, held = self.lost, self._held
        if held is not None:
            for i in (*bad, *lost):
                held.matrix.drop(i)
            self.lost = held.rows - (held.matrix.count - held.matrix.dead) - len(self.damaged)
        if new:
            said_damaged(self.where, list(new))
        if self.lost not in (0, before):
            said_lost(self.where, self.lost)

    def nearest(
        self, reader: Any, facts_of: FactsOf, query: Floats, k: int, filter: Filter | None
    ) -> list[tuple[Row, float]]:
        """Rows and similarities, nearest first, each as the file has it now.

        An id that the file does not give (a damaged key, a row that another program deleted) is put aside, and twice as
        many are proposed: it ends, however many are gone. A row that is another than the one that was searched (an
        older copy was put back) makes everything be read again, once.
        """
        wanted, again = k, True
        while True:
            ids, similarity = self._proposed(query, wanted, filter, wanted == k)
            rows, bad = sqlite_read.fetch(reader, ids.tolist())
            held = self._held
            assert held is not None
            other = [row.id for row in rows.values() if not held.agrees(row)]
            if other and again:
                self._held, self._graph, wanted, again = None, None, k, False
                self.look(reader, facts_of)
                continue
            self.put_aside(bad, [i for i in ids.tolist() if i in other or (i not in rows and i not in bad)])
            right = [
                (rows[i], s)
                for i, s in zip(ids.tolist(), similarity.tolist(), strict=True)
                if i in rows and i not in other
            ]
            if len(right) == len(ids) or len(right) >= k or wanted > held.matrix.count:
                return right[:k]
            wanted *= 2

    def _proposed(
        self, query: Floats, k: int, filter: Filter | None, by_graph: bool
    ) -> tuple[Any, NDArray[np.float64]]:
        """Ids and similarities, nearest first. A filter makes the search exact, whatever index there is."""
        assert self._held is not None
        matrix = self._held.matrix
        if filter is not None:
            allowed = np.ones(matrix.count, bool) if filter.labels is None else matrix.having(filter.labels)
            for key, values in filter.keys.items():
                allowed &= self._held.columns.having(key, values)
            places = matrix.search(query, k, allowed)
        elif self._graph is not None and by_graph:
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
                graph = graphs.load(self.index_path, facts.gallery)
                if not graph.fits(matrix):
                    raise ValueError("of another state of the gallery")
                self._graph = graph
            except ValueError as error:
                state = f"; the file was {error} and is made again"
        if self._graph is None or self._graph.stale(matrix):
            self._graph = graphs.build(matrix, progress)
            if self._graph is None:
                self.index_state = f"exact: HNSW stays below a recall@10 of {graphs.WANTED} among these rows"
                return
            try:
                graphs.save(self.index_path, self._graph, facts.gallery)
            except ValueError as error:  # as in a folder that may only be read
                told(f"{error}; it is in memory, and made again at the next opening")
        self.index_state = f"HNSW, recall@10 {self._graph.recall:.3f} when it was built{state}"

    def forget_index(self) -> None:
        self._graph = None
        with suppress(FileNotFoundError):
            self.index_path.unlink()
