"""The index of a gallery that need not fit in memory: a file of coded rows beside it, and in memory what changed since.

The rows of the gallery are the truth. The file has all rows of one state of it; rows that were added or changed since
are in memory and searched exactly, rows that were removed or changed are left out of the file's. So every search sees
the gallery as it is, and a file that is missing, damaged or of another state is built again.
"""

import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from nearkin.core import files
from nearkin.gallery.schema import Facts, Filter, Floats, Row, unpack
from nearkin.gallery.stores import Neighbours, index_build, index_file, sqlite_file, warn_damaged, warn_lost
from nearkin.gallery.stores.filter_columns import LABEL, matches, passing
from nearkin.gallery.stores.list_search import Candidates, Lists
from nearkin.gallery.stores.matrix import Ids, Matrix
from nearkin.gallery.stores.memory_index import Columns, FactsOf, LoadedRows, has_changes
from nearkin.gallery.stores.rescoring import Scored, rescore
from nearkin.gallery.stores.stored_forms import parse_form

__all__ = ["DiskIndex", "load"]

COMPARED = 64  # rows that are compared with the gallery's when a file is opened
STALE, FEW, MANY = 0.2, 20_000, 200_000  # share of rows that changed since, within these numbers of rows
TRANSACTIONS = 10_000_000  # at most, between building and opening a file
OTHER_FORM = "of another form"  # the gallery was converted
FIELDS: dict[str, Any] = dict.fromkeys(("next_id", "changes", "version", "queries"), int)
FIELDS |= {"damaged": list, "other_keys": bool, "exact": bool, "recall": int | float}
WAIT = 0.2  # seconds between two looks at a lock


class DiskIndex:
    """Has the methods of `MemoryIndex`. The caller holds a lock, and a snapshot of the gallery."""

    def __init__(self, where: str, index_path: Path, stored: str) -> None:
        self.where, self.index_path, self.stored = where, index_path, stored
        self.damaged: dict[int, str] = {}
        self.lost = 0
        self._lists: Lists | None = None  # complete with what follows, or None
        self._file: sqlite_file.FileId | None = None
        self._version, self._rows, self._next, self._change = -1, 0, 1, 0
        self._transaction: sqlite_file.Transaction = (0, None)
        self.dim = 0
        self._word, self._rebuild, self._built = "", False, False
        self._progress: index_build.Progress | None = None

    # --- following the gallery

    def refresh(self, reader: Any, facts_of: FactsOf) -> "DiskIndex":
        """The rows as the gallery has them now."""
        version = reader.execute("PRAGMA data_version").fetchone()[0]
        if self._lists is not None and version == self._version:
            return self
        facts = facts_of(reader)
        lists, self._lists = self._lists, None  # if this is interrupted, the next call opens the file again
        if lists is not None and (not self._continues(reader, facts) or self._replaced()):
            lists = None
        if lists is None:
            lists = self._open(reader, facts)
            self._begin(lists)
        damaged = self._apply_changes(reader, lists, facts)
        if facts.rows < self._count(lists) and not self._built:  # rows are gone without a record, as after a repair
            self._warn_rebuilt("of another state of the gallery")
            lists = self._build(reader, facts)
            self._begin(lists)
            damaged = self._apply_changes(reader, lists, facts)
        self._next, self._change, self._rows, self._version = facts.next_id, facts.changes, facts.rows, version
        self._transaction = sqlite_file.last_transaction(reader)
        self._lists = lists
        self._exclude_rows(damaged)
        return self

    def _continues(self, reader: Any, facts: Facts) -> bool:
        ahead = facts.next_id >= self._next and facts.changes >= self._change
        ahead = ahead and sqlite_file.follows(reader, self._transaction)
        return ahead and has_changes(reader, self._change, facts.changes)

    def _replaced(self) -> bool:
        """Whether another process has built a newer file."""
        now = sqlite_file.file_id(self.index_path)
        return now is not None and self._file is not None and now != self._file

    def _begin(self, lists: Lists) -> None:
        """As of the file's state."""
        self._next, self._change = lists.head["next_id"], lists.head["changes"]
        self.dim = lists.dim
        self._edited: dict[int, Row] = {}
        self._added = LoadedRows(Matrix(lists.dim), Columns(), 0)
        self._edited_rows = LoadedRows(Matrix(lists.dim), Columns(), 0)
        self._label_counts = np.diff(lists.columns[LABEL].offsets)
        self.damaged = {i: why for i, why in self.damaged.items() if i in lists.head["damaged"]}

    def _apply_changes(self, reader: Any, lists: Lists, facts: Facts) -> dict[int, str]:
        query = "SELECT DISTINCT id FROM changes WHERE seq > ? AND id < ?"
        touched = [i for (i,) in reader.execute(query, (self._change, self._next))]
        changed, damaged = sqlite_file.fetch(reader, touched)
        if touched:
            self._remove(lists, touched)
            self.damaged = {i: why for i, why in self.damaged.items() if i not in touched}
            self._edited |= changed
            self._edited_rows = LoadedRows(Matrix(lists.dim), Columns(), 0)
            self._edited_rows.append([self._edited[i] for i in sorted(self._edited)])
        if facts.next_id > self._next:
            for rows, damaged_part in sqlite_file.read_batches(reader, self._next - 1):
                self._added.append(rows)
                damaged |= damaged_part
        return damaged | {i: "not as it was written" for i in lists.head["damaged"] if i not in touched}

    def _remove(self, lists: Lists, ids: Sequence[int]) -> None:
        positions = lists.remove(np.array(ids, np.int64))
        np.subtract.at(self._label_counts, lists.columns[LABEL].codes[positions], 1)
        for i in ids:
            self._added.matrix.remove(i)
            if self._edited.pop(i, None) is not None:
                self._edited_rows.matrix.remove(i)

    def exclude(self, damaged: dict[int, str], lost: Sequence[int] = ()) -> None:
        """Damaged rows, and rows that the gallery does not return, are not searched; each is warned about once."""
        self._exclude_rows(damaged, lost)

    def _exclude_rows(self, damaged: dict[int, str], lost: Sequence[int] = ()) -> None:
        new = {i: why for i, why in damaged.items() if i not in self.damaged}
        self.damaged |= new
        lost_before = self.lost
        if self._lists is not None:
            self._remove(self._lists, [*damaged, *lost])
            self.lost = self._rows - self._count(self._lists) - len(self.damaged)
        if new:
            warn_damaged(self.where, list(new))
        if self.lost not in (0, lost_before):
            warn_lost(self.where, self.lost)

    def _count(self, lists: Lists) -> int:
        parts = (self._added.matrix, self._edited_rows.matrix)
        return len(lists) - lists.dead_count + sum(part.count - part.removed for part in parts)

    # --- the file

    def _open(self, reader: Any, facts: Facts) -> Lists:
        """From the file, or built again with a word."""
        files.remove_abandoned(self.index_path)  # as large as the file
        if self._rebuild:
            return self._build(reader, facts)
        with self._only_builder():
            try:
                lists = load(self.index_path, facts, self.stored)
                self._check_rows(reader, lists, facts)
                self._file, self._word, self._built = sqlite_file.file_id(self.index_path), "", False
                return lists
            except ValueError as error:
                if str(error) not in ("missing", OTHER_FORM):
                    self._warn_rebuilt(str(error))
            return self._build(reader, facts)

    def _warn_rebuilt(self, why: str) -> None:
        self._word = f"; the file was {why} and is made again"
        sentence = f"{self.where}: {self.index_path.name} was {why}, and is made again"
        warnings.warn(sentence, RuntimeWarning, stacklevel=2)

    @contextmanager
    def _only_builder(self) -> Iterator[None]:
        """Of several processes one builds, and the others wait for its file."""
        lock: files.Lock | None = None
        with suppress(OSError):  # as in a read-only folder
            while lock is None and not self._usable():
                with suppress(ValueError):
                    lock = files.Lock(self.index_path.with_name(f".{self.index_path.name}.lock"), "taken")
                if lock is None:
                    time.sleep(WAIT)
        try:
            yield
        finally:
            if lock is not None:
                lock.close()

    def _usable(self) -> bool:
        """Whether there seems to be a file: to read it needs no lock."""
        if files.is_link(self.index_path):
            return True  # it is neither read nor written
        with suppress(OSError, ValueError), self.index_path.open("rb") as file:
            return bool(index_file.read_head(file))
        return False

    def _build(self, reader: Any, facts: Facts) -> Lists:
        form = parse_form(self.stored, facts.dim)
        way_out = "it is in a temporary file, and made again at the next opening"
        arguments = (self.index_path.parent, self._progress)
        try:
            with files.explained(f"{self.index_path}: the index", way_out):
                files.refuse_link(self.index_path)
                with files.replacing(self.index_path) as file:
                    files.hold(file)
                    lists = index_build.build(reader, facts, form, file, *arguments)
            self._file = sqlite_file.file_id(self.index_path)
        except ValueError as error:
            if way_out not in str(error):
                raise
            warnings.warn(str(error), RuntimeWarning, stacklevel=2)
            with tempfile.TemporaryFile() as scratch:
                folder = Path(tempfile.gettempdir())
                lists = index_build.build(reader, facts, form, scratch, folder, self._progress)
            self._file = None
        self._rebuild, self._built = False, True
        return lists

    def _check_rows(self, reader: Any, lists: Lists, facts: Facts) -> None:
        """Compares the last rows of the file with the gallery's: those of an older copy that was restored differ."""
        head, version = lists.head, reader.execute("PRAGMA user_version").fetchone()[0]
        ahead = (version - head["version"]) % 2**31 < TRANSACTIONS  # a restored copy counts from another number
        if facts.next_id < head["next_id"] or facts.changes < head["changes"] or not ahead:
            raise ValueError("of another state of the gallery")
        if not has_changes(reader, head["changes"], facts.changes):
            raise ValueError("of an older state, whose later changes are not recorded any more")
        query = "SELECT DISTINCT id FROM changes WHERE seq > ?"
        touched = {i for (i,) in reader.execute(query, (head["changes"],))}
        last = lists.sorted_ids[-COMPARED - len(touched) :]
        ids = [i for i in last.tolist() if i not in touched][-COMPARED:]
        rows, damaged = sqlite_file.fetch(reader, ids)
        if [i for i in ids if i not in rows and i not in damaged] or not _agree(lists, list(rows.values())):
            raise ValueError("of another state of the gallery")

    # --- searching

    def nearest(
        self,
        reader: Any,
        facts_of: FactsOf,
        query: Floats,
        k: int,
        filter: Filter | None,
        exact: bool = False,
    ) -> Neighbours:
        """exact: also without a filter, and beyond 100,000 rows."""
        near = self._nearest(reader, query, k, filter, exact, strict=True)
        if near is None:
            self.forget_graph()
            self._warn_rebuilt("of other rows than the gallery's")
            self.refresh(reader, facts_of)
            near = self._nearest(reader, query, k, filter, exact, strict=False)
        assert near is not None
        return near

    def _nearest(
        self, reader: Any, query: Floats, k: int, filter: Filter | None, exact: bool, strict: bool
    ) -> Neighbours | None:
        """Rows that are damaged or gone are excluded, and the search is repeated: this ends, however many there are.
        strict: None where the file has other rows than the gallery; otherwise these are excluded too."""
        lists = self._lists
        assert lists is not None
        while True:
            others, sound = self._among_changed(reader, query, k, filter)
            floor = others[k - 1][1] if len(others) >= k else -np.inf
            candidates = self._candidates(reader, lists, query, k, filter, exact, floor)
            answer = rescore(reader, lists, query, k, filter, candidates, others)
            if answer.changed and strict:
                return None
            if sound and not (answer.damaged or answer.gone or answer.changed):
                if len(answer.rows) < k and not answer.proved:
                    exact = True  # the lists that were searched have too few rows
                    continue
                return Neighbours(answer.rows, answer.proved, None if answer.proved else lists.head["recall"])
            self._exclude_rows(answer.damaged, [*answer.gone, *answer.changed])

    def _among_changed(self, reader: Any, query: Floats, k: int, filter: Filter | None) -> tuple[list[Scored], bool]:
        """The nearest of the rows in memory, and whether all of them are as they were."""
        scored: list[Scored] = []
        wrong: list[int] = []
        damaged: dict[int, str] = {}
        for part in (self._edited_rows, self._added):
            if not part.matrix.count:
                continue
            positions = part.matrix.propose(query, k, None if filter is None else part.allowed(filter))
            ids, cosines = part.matrix.top_k(query, k, positions)
            rows, damaged_part = sqlite_file.fetch(reader, ids.tolist())
            damaged |= damaged_part
            for i, cosine in zip(ids.tolist(), cosines.tolist(), strict=True):
                if i in rows and part.agrees(rows[i]):
                    scored.append((rows[i], cosine))
                elif i not in damaged_part:
                    wrong.append(i)
        if damaged or wrong:
            self._exclude_rows(damaged, wrong)
        scored.sort(key=lambda one: (-one[1], one[0].id))
        return scored[:k], not (damaged or wrong)

    def _candidates(
        self, reader: Any, lists: Lists, query: Floats, k: int, filter: Filter | None, exact: bool, floor: float
    ) -> Candidates:
        if filter is not None:
            return lists.among(query, k, floor, self._passing(reader, lists, filter))
        if exact or lists.head["exact"]:
            return lists.exact(query, k, floor)
        return lists.probe(query, k, floor, lists.probes, lists.keep)

    def _passing(self, reader: Any, lists: Lists, filter: Filter) -> Ids:
        unknown = any(key not in lists.columns for key in filter.keys)
        if not (unknown and lists.head["other_keys"]):
            return passing(lists.columns, filter)
        # More keys than columns: every row is read.
        ids = [row.id for rows, _ in sqlite_file.read_batches(reader, 0) for row in rows if matches(filter, row)]
        return np.sort(lists.positions(np.array(ids, np.int64)))

    # --- labels

    def _changed_counts(self) -> Counter[str]:
        return Counter(self._added.matrix.counts()) + Counter(self._edited_rows.matrix.counts())

    def counts(self) -> dict[str, int]:
        lists = self._lists
        assert lists is not None
        text, ends = lists.label_text, lists.label_offsets.tolist()
        counts = Counter(
            {
                bytes(text[ends[code] : ends[code + 1]]).decode("utf-8", "surrogateescape"): count
                for code, count in enumerate(self._label_counts.tolist())
                if count
            }
        )
        return dict(counts + self._changed_counts())

    def counts_of(self, labels: Sequence[str]) -> dict[str, int]:
        assert self._lists is not None
        column, changed, counts = self._lists.columns[LABEL], self._changed_counts(), dict[str, int]()
        for label in labels:
            code = column.code(label)
            count = changed[label] + (0 if code is None else int(self._label_counts[code]))
            if count or code is not None or label in changed:
                counts[label] = count
        return counts

    def label_sizes(self) -> dict[int, int]:
        """How many labels have 1, 2, … rows."""
        assert self._lists is not None
        column, totals, new = self._lists.columns[LABEL], self._label_counts.copy(), list[int]()
        for label, count in self._changed_counts().items():
            code = column.code(label)
            if code is None:
                new.append(count)
            else:
                totals[code] += count
        sizes = np.bincount(np.concatenate([totals, np.array(new, np.int64)]))
        return {int(rows): int(sizes[rows]) for rows in np.flatnonzero(sizes) if rows}

    # --- maintenance

    @property
    def index_state(self) -> str:
        if self._lists is None:
            return ""
        head = self._lists.head
        if head["exact"]:
            rows = len(self._lists)
            return f"{self.stored} on disk, exact" + (
                f", up to {index_build.EXACT:,} rows{self._word}"
                if rows <= index_build.EXACT
                else f": half of its lists would not reach a recall@10 of {index_build.TARGET}{self._word}"
            )
        return (
            f"{self.stored} on disk, {self._lists.probes:,} of {len(self._lists.centroids):,} lists; where the bound "
            f"does not prove an answer, recall@10 {head['recall']:.4f} on {head['queries']} queries like new items"
            f"{self._word}"
        )

    def figures(self) -> dict[str, Any]:
        """What `stats` shows of it."""
        lists = self._lists
        size = self.index_path.stat().st_size if self.index_path.exists() else None
        recall = None if lists is None else lists.head["recall"]
        since = None if lists is None else self._changed()
        return {"stored": self.stored, "index_bytes": size, "recall@10": recall, "changed_since_index": since}

    def _changed(self) -> int:
        assert self._lists is not None
        return self._added.matrix.count + len(self._edited) + self._lists.dead_count

    def warm(self, reader: Any, facts_of: FactsOf, progress: index_build.Progress | None) -> None:
        """Builds the file where there is none that can be used, or where too many rows have changed since."""
        self._progress = progress
        try:
            self.refresh(reader, facts_of)
            assert self._lists is not None
            if self._changed() > min(max(STALE * len(self._lists), FEW), MANY):
                self.forget_graph()
                self.refresh(reader, facts_of)
        finally:
            self._progress = None

    def forget_graph(self) -> None:
        """Builds the file again at the next call; the old one stays until then."""
        self._lists, self._rebuild = None, True


def load(path: Path, facts: Facts, stored: str) -> Lists:
    """The file, read and verified, or a ValueError that says in a word why it cannot be used."""
    if files.is_link(path):
        raise ValueError("a link, which is not followed,")
    try:
        with path.open("rb") as file:
            head = index_file.read_head(file)
            if head.get("gallery") != facts.gallery or head.get("dim") != facts.dim:
                raise ValueError("of another gallery")
            if head.get("stored") != stored:
                raise ValueError(OTHER_FORM)
            index_file.verify(file, head)
            if not all(isinstance(head[key], kinds) for key, kinds in FIELDS.items()):
                raise ValueError("damaged")
            return Lists(head, index_file.mapped(file, head["sections"]))
    except (LookupError, TypeError, AttributeError, OverflowError):  # its checksum matches, and it is not ours
        raise ValueError("damaged") from None
    except FileNotFoundError:
        raise ValueError("missing") from None
    except OSError as error:
        raise ValueError(f"unreadable ({error.strerror or error})") from None


def _agree(lists: Lists, rows: Sequence[Row]) -> bool:
    if not rows:
        return True
    positions = np.array([lists.by_id[np.searchsorted(lists.sorted_ids, row.id)] for row in rows], np.int64)
    return bool(lists.fine.agree(unpack([row.vector for row in rows], lists.dim), positions).all())
