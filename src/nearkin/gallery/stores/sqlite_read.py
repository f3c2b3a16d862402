"""Rows out of an SQLite gallery, each proved by its checksum."""

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from nearkin.gallery.schema import Row, bytes_checksum

__all__ = ["after", "each", "fetch", "known", "parts"]

LOADED = 4096  # rows read at a time
ASKED = 500  # ids or hashes a statement
# Texts as bytes: they are proved before they are read as texts, and SQLite hands them over faster so.
COLUMNS = "id, content, CAST(label AS BLOB), CAST(name AS BLOB), CAST(metadata AS BLOB), vector, sum"


def known(connection: Any, contents: Sequence[bytes]) -> dict[bytes, tuple[int, str]]:
    """Id and label by content, of those that are there."""
    found: dict[bytes, tuple[int, str]] = {}
    for start in range(0, len(contents), ASKED):
        some = contents[start : start + ASKED]
        query = f"SELECT content, id, label FROM items WHERE content IN ({','.join('?' * len(some))})"
        found.update((content, (i, label)) for content, i, label in connection.execute(query, some))
    return found


def fetch(connection: Any, ids: Sequence[int]) -> tuple[dict[int, Row], dict[int, str]]:
    """Whole rows by id, and why others are not."""
    rows: dict[int, Row] = {}
    bad: dict[int, str] = {}
    for start in range(0, len(ids), ASKED):
        some = ids[start : start + ASKED]
        query = f"SELECT {COLUMNS} FROM items WHERE id IN ({','.join('?' * len(some))})"
        whole, worse, _ = _proved(connection.execute(query, some))
        rows.update((row.id, row) for row in whole)
        bad |= worse
    return rows, bad


def after(connection: Any, last: int) -> tuple[list[Row], dict[int, str], int | None]:
    """Some rows whose ids follow, ascending, and the last id looked at; None at the end."""
    query = f"SELECT {COLUMNS} FROM items WHERE id > ? ORDER BY id LIMIT {LOADED}"
    whole, bad, count = _proved(connection.execute(query, (last,)))
    whole = _ascending(whole, last)
    if count < LOADED:
        return whole, bad, None
    reached = max([row.id for row in whole] or bad)  # a damaged row may have a damaged id
    if reached <= last:
        raise sqlite3.DatabaseError("rows come in no order")
    return whole, bad, reached


def parts(connection: Any, last: int) -> Iterator[tuple[list[Row], dict[int, str]]]:
    """All rows whose ids follow, some at a time."""
    end: int | None = last
    while end is not None:
        rows, bad, end = after(connection, end)
        yield rows, bad


def _proved(found: Iterable[Sequence[Any]]) -> tuple[list[Row], dict[int, str], int]:
    """Rows whose checksum is right, what is wrong with the others, and how many there were together."""
    whole: list[Row] = []
    bad: dict[int, str] = {}
    count = 0
    for id, content, label, name, metadata, vector, total in found:
        count += 1
        try:
            if bytes_checksum(id, content, label, name, metadata, vector) == total:
                whole.append(Row(id, content, label.decode(), name.decode(), metadata.decode(), vector))
            else:
                bad[id] = "not as it was written"
        except Exception as error:
            # A flipped type, as a number where text was, or one beyond its range: it costs this row only.
            bad[id] = f"not as it was written ({type(error).__name__})"
    return whole, bad, count


def _ascending(rows: list[Row], last: int) -> list[Row]:
    """Without rows that come again, as those of a page do that a damaged tree names twice."""
    kept = []
    for row in rows:
        if row.id > last:
            kept.append(row)
            last = row.id
    return kept


def each(connection: Any, next_id: int) -> Iterator[tuple[Row | None, str, int]]:
    """Every row, whole or why not; where the file breaks off, each id that is left is tried by itself."""
    last: int | None = 0
    while last is not None:
        try:
            rows, bad, end = after(connection, last)
        except sqlite3.DatabaseError:
            break
        yield from ((row, "", row.id) for row in rows)
        yield from ((None, why, i) for i, why in bad.items())
        last = end
    for i in range(last + 1, next_id) if last is not None else ():
        try:
            by_id, bad = fetch(connection, [i])
        except sqlite3.DatabaseError as error:
            by_id, bad = {}, {i: str(error)}
        yield from ((row, "", i) for row in by_id.values())
        yield from ((None, why, i) for why in bad.values())
