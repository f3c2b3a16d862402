"""What a gallery asks of the place where its rows are kept; `sqlite` and `postgres` do it."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from nearkin.core.errors import LabelConflict
from nearkin.gallery.facts import Facts
from nearkin.gallery.schema import Fields, Filter, Floats, Row, checksum, picture_checksum

__all__ = [
    "Added",
    "Plan",
    "Report",
    "Store",
    "merged",
    "planned",
    "proved",
    "said_damaged",
    "said_lost",
]


class Added(NamedTuple):
    """What became of a row: new, or there before under this label."""

    id: int
    new: bool
    label: str


class Plan(NamedTuple):
    """What a transaction writes: items with id and checksum, thumbnails likewise, and the id that is free then."""

    added: list[Added]
    items: list[tuple[int, bytes, str, str, str, bytes, bytes]]
    thumbnails: list[tuple[int, bytes, bytes]]
    next_id: int


class Report(NamedTuple):
    """How whole a gallery is. rows: how many there should be; bad: id → what is wrong; lost: neither sound nor bad."""

    rows: int
    sound: int
    bad: dict[int, str]
    lost: int
    notes: list[str]

    @property
    def whole(self) -> bool:
        return not (self.bad or self.lost or self.notes)


class Store(Protocol):
    """Every writing call is one transaction: it has returned, so it is kept. Safe to call from several threads."""

    @property
    def kind(self) -> str: ...
    @property
    def where(self) -> str:
        """For sentences; without a password."""

    @property
    def damaged(self) -> dict[int, str]:
        """Rows that are left out of every search: id → what is wrong."""

    @property
    def lost(self) -> int:
        """How many rows are missing altogether."""

    @property
    def index_state(self) -> str:
        """How it is searched, in words."""

    def facts(self) -> Facts | None:
        """What the gallery says of itself; None where there is none yet."""

    def create(self, facts: Facts) -> None: ...
    def close(self) -> None: ...

    def known(self, contents: Sequence[bytes]) -> dict[bytes, tuple[int, str]]:
        """Id and label of those that are enrolled."""

    def add(self, rows: Sequence[Fields], keep: bool, sources: Sequence[str] = ()) -> list[Added]:
        """All or none. keep: a row that is there under another label stays so; else that is a `LabelConflict`."""

    def remove(self, ids: Sequence[int]) -> int: ...
    def relabel(self, ids: Sequence[int], label: str) -> int: ...

    def adopt(self, fingerprint: str, run: str) -> None:
        """An empty gallery of vectors becomes that of an encoder."""

    def nearest(self, query: Floats, k: int, filter: Filter | None) -> list[tuple[Row, float]]:
        """The nearest first, equals by id; only rows that proved whole."""

    def rows(self, ids: Sequence[int]) -> dict[int, Row]: ...

    def thumbnail(self, id: int) -> bytes:
        """Empty where there is none, or it is damaged."""

    def counts(self) -> dict[str, int]:
        """Rows of each label."""

    def sizes(self) -> dict[int, int]:
        """How many labels have so many rows."""

    def examples(self, labels: Sequence[str]) -> dict[str, int]:
        """Rows of these labels."""

    def scan(self) -> Iterator[Row]: ...

    def warm(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Everything a search needs is at hand; an index that is missing, stale or damaged is made again."""

    def reindex(self, progress: Callable[[int, int], None] | None = None) -> None: ...
    def check(self, progress: Callable[[int, int], None] | None = None) -> Report: ...

    def repair(self) -> tuple[int, Any]:
        """Rows saved, and where the damaged ones went."""


def planned(rows: Sequence[Fields], there: dict[bytes, tuple[int, str]], next_id: int, keep: bool) -> Plan:
    """Who is new among rows, some of which are `there` by their content; a row that comes twice is new once."""
    plan, there = Plan([], [], [], 0), dict(there)
    for row in rows:
        found = there.get(row.content)
        if found is not None:
            if found[1] != row.label and not keep:
                raise LabelConflict(row.name, found[0], found[1], row.label)
            plan.added.append(Added(found[0], False, found[1]))
            continue
        there[row.content] = next_id, row.label
        content = (next_id, row.content, row.label, row.name, row.metadata, row.vector)
        plan.items.append((*content, checksum(*content)))
        if row.thumbnail:
            plan.thumbnails.append((next_id, row.thumbnail, picture_checksum(next_id, row.thumbnail)))
        plan.added.append(Added(next_id, True, row.label))
        next_id += 1
    return plan._replace(next_id=next_id)


def merged(sources: Sequence[str], more: Sequence[str]) -> list[str]:
    return list(dict.fromkeys([*sources, *more]))


def proved(found: Iterable[Sequence[Any]]) -> tuple[list[Row], dict[int, str]]:
    """Rows whose checksum, their last column, is right, and what is wrong with the others."""
    whole, bad = [], {}
    for *fields, total in found:
        if why := differing(fields, total):
            bad[int(fields[0])] = why
        else:
            whole.append(Row(*fields))
    return whole, bad


def said_damaged(where: str, ids: Sequence[int]) -> None:
    """Once a row, when it is found."""
    listed = ", ".join(map(str, ids[:5])) + (", …" if len(ids) > 5 else "")
    count = "1 row is" if len(ids) == 1 else f"{len(ids)} rows are"
    told(f"{where}: {count} damaged and left out (id {listed}); see nearkin gallery check {where}")


def said_lost(where: str, lost: int) -> None:
    told(f"{where}: {abs(lost)} rows are {'missing' if lost > 0 else 'too many'}; see nearkin gallery check {where}")


def differing(fields: Sequence[Any], total: object) -> str:
    """Why a row as it was read is not the row that was written, or ""."""
    try:
        return "" if checksum(*fields) == total else "not as it was written"
    except Exception as error:  # a flipped type: text where bytes were, a number beyond its range
        return f"not as it was written ({type(error).__name__})"


def told(sentence: str) -> None:
    warnings.warn(sentence, RuntimeWarning, stacklevel=2)
