"""Where the rows of a gallery are kept and searched: SQLite with an index in memory, or PostgreSQL."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nearkin.core.errors import EncoderChanged, LabelConflict
from nearkin.gallery.schema import (
    Facts,
    Filter,
    Floats,
    KnownRows,
    NewRow,
    Renewed,
    Row,
    StoredRow,
    bytes_checksum,
    checksum,
    note_checksum,
    thumbnail_checksum,
)
from nearkin.gallery.stores.label_table import LabelTable, Project

__all__ = ["Added", "Decide", "IdArray", "Loader", "Neighbours", "Report", "RowBatch", "Snapshot", "Store", "SumArray"]
__all__ += ["Rewrite", "check_encoder"]
__all__ += ["merge_sources", "plan_insert", "sound_notes", "stored_rows", "sum_array", "warn_damaged", "warn_lost"]

IdArray: TypeAlias = NDArray[np.int64]
SumArray: TypeAlias = NDArray[np.uint64]
Decide = Callable[[str, Callable[[Sequence[int]], dict[int, str]]], tuple[Mapping[int, str], str]]


class Added(NamedTuple):
    """The row of an enrolled item. new: added by this call; otherwise it was enrolled before, under this label."""

    id: int
    new: bool
    label: str


class InsertPlan(NamedTuple):
    """What a transaction inserts: items with id and checksum, their thumbnails, and the next free id."""

    added: list[Added]
    items: list[tuple[int, bytes, str, str, str, bytes, bytes]]
    thumbnails: list[tuple[int, bytes, bytes]]
    next_id: int


class Report(NamedTuple):
    """The result of a check. rows: how many there should be; bad: id → what is wrong; lost: neither sound nor bad."""

    rows: int
    sound: int
    bad: dict[int, str]
    lost: int
    notes: list[str]

    @property
    def whole(self) -> bool:
        return not (self.bad or self.lost or self.notes)


class Neighbours(list[tuple[Row, float]]):
    """Rows and cosines, nearest first. proved: whether the answer equals that of the exact search; otherwise recall is
    the share of that answer which such a search finds, as it was measured when the index was built."""

    def __init__(
        self, rows: Iterable[tuple[Row, float]] = (), proved: bool = True, recall: float | None = None
    ) -> None:
        super().__init__(rows)
        self.proved, self.recall = proved, recall


class RowBatch(NamedTuple):
    """Rows that match their checksums, the ids of those that do not, and of rows whose thumbnail does not."""

    rows: list[StoredRow]
    damaged: list[int]
    without_thumbnail: list[int]


class Rewrite(NamedTuple):
    """All rows in the space of another encoder. source: the encoder that the gallery must have now. rows: each with its
    new vector and metadata, for some rows at a time. note: key and text, written with them."""

    source: str
    fingerprint: str
    run: str
    dim: int
    rows: Callable[[Sequence[Row]], list[Row]]
    note: tuple[str, str]


class Snapshot(Protocol):
    """One state of a gallery, read while others write to it; memory is bounded by a batch."""

    facts: Facts
    notes: dict[str, str]  # those that match their checksums

    def sums(self) -> Iterator[tuple[IdArray, SumArray]]:
        """Id and checksum of every row as it is stored, by ascending id; 0 for a checksum that is none."""

    def rows(self) -> Iterator[RowBatch]:
        """Every row, by ascending id."""

    def fetch(self, ids: Sequence[int]) -> RowBatch:
        """These rows, by ascending id; those that do not exist are left out."""


class Loader(Protocol):
    """Writes a whole gallery that nobody sees before it is finished."""

    count: int

    def remove(self, ids: Sequence[int]) -> None: ...
    def add(self, rows: Sequence[StoredRow]) -> None: ...

    def finish(self, facts: Facts, notes: Mapping[str, str]) -> None:
        """The last call: on leaving the context the gallery is visible, complete and on the disk."""


class Store(Protocol):
    """Every writing call is one transaction: when it returns, the change is durable. Thread-safe."""

    @property
    def kind(self) -> str: ...
    @property
    def where(self) -> str:
        """For messages; without a password."""

    @property
    def damaged(self) -> dict[int, str]:
        """Rows that are left out of every search: id → what is wrong."""

    @property
    def lost(self) -> int:
        """How many rows are missing."""

    @property
    def index_state(self) -> str:
        """How it is searched, in words."""

    @property
    def fingerprint(self) -> str | None:
        """Of the encoder, as it was when the facts were last read."""

    def facts(self) -> Facts | None:
        """None where there is no gallery yet."""

    def create(self, facts: Facts) -> None: ...
    def close(self) -> None: ...

    def look_up(self, contents: Sequence[bytes]) -> KnownRows:
        """Id and label of those that are enrolled."""

    def add(
        self, rows: Sequence[NewRow], keep: bool, sources: Sequence[str] = (), encoder: str | None = None
    ) -> list[Added]:
        """All or none. keep: an item enrolled under another label keeps it; otherwise that is a `LabelConflict`.

        encoder: that made the vectors; an `EncoderChanged` where it is not the gallery's any more.
        """

    def rewrite(self, plan: Rewrite, progress: Callable[[int, int], None] | None = None) -> str:
        """All or nothing; returns where the gallery as it was is kept."""

    def bridged(self, after: int, limit: int) -> list[Row]:
        """The next rows, by id, that an earlier encoder made."""

    def renew(self, rows: Sequence[Renewed], encoder: str) -> int:
        """Replaces the vectors of rows that an earlier encoder made; returns how many there still were."""

    def encoders(self) -> dict[str, int]:
        """How many rows each earlier encoder made."""

    def remove(self, ids: Sequence[int]) -> int: ...
    def relabel(self, ids: Sequence[int], label: str) -> int: ...

    def note(self, key: str) -> str:
        """A text that is kept with the rows; "" where there is none, or it is damaged."""

    def edit(self, key: str, decide: "Decide") -> None:
        """Labels and a note in one transaction.

        decide(note, labels_of) returns new labels by id, and the new note; labels_of(ids) has the labels of those that
        exist. What it raises leaves everything as it was.
        """

    def adopt(self, fingerprint: str, run: str) -> None:
        """Makes an empty gallery of vectors that of an encoder."""

    def nearest(self, query: Floats, k: int, filter: Filter | None) -> list[tuple[Row, float]]:
        """Nearest first, ties by id; only rows that match their checksum. A file's store has `exact` too, and returns
        `Neighbours`."""

    def rows(self, ids: Sequence[int]) -> dict[int, Row]: ...

    def thumbnail(self, id: int) -> bytes:
        """Empty where there is none, or it is damaged."""

    def counts(self) -> dict[str, int]:
        """Rows per label."""

    def label_sizes(self) -> dict[int, int]:
        """How many labels have 1, 2, … rows."""

    def label_table(self, key: str, project: Project, since: int | None = None) -> LabelTable | None:
        """Every label's sum of rows in the coordinates of `project`, which `key` names. since: the caller's version.
        None where rows are on a server, on the disk, or more than an exact search reads."""

    def project_labels(self, key: str, project: Project, most: int) -> bool:
        """Makes at most so many rows ready for `label_table`; whether all are: searches go on between two calls."""

    def stored_counts(self) -> dict[str, int]:
        """Rows per label, also damaged ones; it reads no rows into memory."""

    def counts_of(self, labels: Sequence[str]) -> dict[str, int]:
        """Rows of these labels."""

    def scan(self) -> Iterator[Row]: ...

    def warm(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Loads everything a search needs; an index that is missing, stale or damaged is rebuilt."""

    def reindex(
        self, progress: Callable[[int, int], None] | None = None, filter_keys: Sequence[str] | None = None
    ) -> None:
        """filter_keys: of the metadata, or "label": their frequent values get indexes of their own from now on, and
        what is up to date stays. PostgreSQL only."""

    def check(self, progress: Callable[[int, int], None] | None = None) -> Report: ...

    def repair(self) -> tuple[int, Any]:
        """How many rows were saved, and where the damaged ones are."""

    def vacuum(self) -> tuple[int, int]:
        """Frees the space of removed rows; bytes before and after."""

    def migrate(self, number: int, changed: Callable[[Facts], tuple[list[str], Facts]]) -> None:
        """To format `number`: keeps a copy, executes the statements and writes the facts; all or nothing."""

    def snapshot(self) -> AbstractContextManager[Snapshot]: ...

    def load(self, facts: Facts, overwrite: bool) -> AbstractContextManager[Loader]:
        """For a gallery that does not exist, or, with overwrite, in the place of one, which is kept under another
        name. Leaving the context without `finish`, or by an error or a kill, changes nothing."""


def check_encoder(where: str, facts: Facts, encoder: str | None) -> None:
    """encoder: that made the vectors at hand; None: not known."""
    if encoder is not None and facts.fingerprint != encoder:
        raise EncoderChanged(where)


def plan_insert(rows: Sequence[NewRow], known: KnownRows, next_id: int, keep: bool) -> InsertPlan:
    """Which rows are new and which are `known` by their content; a row that occurs twice is inserted once."""
    plan, known = InsertPlan([], [], [], 0), dict(known)
    for row in rows:
        if row.content in known:
            id, label = known[row.content]
            if label != row.label and not keep:
                raise LabelConflict(row.name, id, label, row.label)
            plan.added.append(Added(id, False, label))
            continue
        known[row.content] = next_id, row.label
        fields = (next_id, row.content, row.label, row.name, row.metadata, row.vector)
        plan.items.append((*fields, checksum(*fields)))
        if row.thumbnail:
            plan.thumbnails.append((next_id, row.thumbnail, thumbnail_checksum(next_id, row.thumbnail)))
        plan.added.append(Added(next_id, True, row.label))
        next_id += 1
    return plan._replace(next_id=next_id)


def stored_rows(fetched: Iterable[Sequence[Any]]) -> RowBatch:
    """Fields of `StoredRow` and the checksum of the thumbnail, each checked."""
    batch = RowBatch([], [], [])
    for id, content, label, name, metadata, vector, total, thumbnail, thumbnail_total in fetched:
        try:
            intact = bytes_checksum(id, content, label, name, metadata, vector) == total
        except Exception:  # a flipped type, or a number beyond its range
            intact = False
        if not intact:
            batch.damaged.append(id)
            continue
        if thumbnail is not None and not (
            isinstance(thumbnail, bytes) and thumbnail_checksum(id, thumbnail) == thumbnail_total
        ):
            batch.without_thumbnail.append(id)
            thumbnail = None
        batch.rows.append(StoredRow(id, content, label, name, metadata, vector, total, thumbnail or b""))
    return batch


def sound_notes(fetched: Iterable[Sequence[Any]]) -> dict[str, str]:
    """Of keys, texts and checksums."""
    return {key: text for key, text, total in fetched if note_checksum(key, text) == total}


def sum_array(sums: Sequence[Any]) -> SumArray:
    """Checksums as numbers; 0 for what is no checksum."""
    eight = [total if isinstance(total, bytes) and len(total) == 8 else bytes(8) for total in sums]
    return np.frombuffer(b"".join(eight), ">u8").astype(np.uint64)


def merge_sources(sources: Sequence[str], added: Sequence[str]) -> list[str]:
    return list(dict.fromkeys([*sources, *added]))


def warn_damaged(where: str, ids: Sequence[int]) -> None:
    """Once per row, when it is read."""
    listed = ", ".join(map(str, ids[:5])) + (", …" if len(ids) > 5 else "")
    count = "1 row is" if len(ids) == 1 else f"{len(ids)} rows are"
    sentence = f"{where}: {count} damaged and left out (id {listed}); see nearkin gallery check {where}"
    warnings.warn(sentence, RuntimeWarning, stacklevel=2)


def warn_lost(where: str, lost: int) -> None:
    state = "missing" if lost > 0 else "too many"
    sentence = f"{where}: {abs(lost)} rows are {state}; see nearkin gallery check {where}"
    warnings.warn(sentence, RuntimeWarning, stacklevel=2)
