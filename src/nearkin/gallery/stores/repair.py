"""Whether an SQLite gallery is whole, and what can be saved of one that is not."""

import os
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearkin.gallery.facts import Facts
from nearkin.gallery.schema import checksum, picture_checksum
from nearkin.gallery.stores import hnsw as graphs
from nearkin.gallery.stores import sqlite_read
from nearkin.gallery.stores.contract import Report

if TYPE_CHECKING:
    from nearkin.gallery.stores.sqlite import SqliteStore

__all__ = ["check", "finish_repair", "repair"]


def check(store: "SqliteStore", progress: Callable[[int, int], None] | None = None) -> Report:
    """Reads everything: SQLite's own check, every row, every thumbnail, both copies of the facts, the index."""
    facts, notes, bad, sound = _facts(store), [], {}, 0
    with store.reading:
        reader = store.connection(False)
        try:
            lines = [line for (line,) in reader.execute("PRAGMA integrity_check(20)")]
            notes += [f"SQLite: {' '.join(line.split())}" for line in lines if line != "ok"]
        except sqlite3.DatabaseError as error:
            notes.append(f"SQLite: {error}")
        for done, (row, why, id) in enumerate(sqlite_read.each(reader, facts.next_id), 1):
            sound += row is not None
            if row is None:
                bad[id] = why
            if progress is not None and done % sqlite_read.LOADED == 0:
                progress(done, facts.rows)
        notes += _rest(store, reader) + _index(store.follower.index_path, facts)
    return Report(facts.rows, sound, bad, facts.rows - sound - len(bad), notes)


def _rest(store: "SqliteStore", reader: Any) -> list[str]:
    notes = []
    try:
        wrong = [i for (i,) in reader.execute("SELECT id FROM thumbnails").fetchall() if not store.thumbnail(i)]
        notes += [f"{len(wrong)} thumbnails are damaged, the first of id {wrong[0]}"] if wrong else []
        copies = {said for (said,) in reader.execute("SELECT said FROM facts")}
        notes += ["one copy of what the gallery says of itself is damaged"] if len(copies) != 1 else []
    except (ValueError, sqlite3.DatabaseError) as error:
        notes.append(f"SQLite: {error}")
    return notes


def _index(path: Path, facts: Facts) -> list[str]:
    if not path.exists() or graphs.missing() is not None:
        return []
    try:
        graphs.load(path, facts.gallery)
    except ValueError as error:
        return [f"{path} is {error}; it is not used, and nearkin gallery reindex makes it again"]
    return []


def repair(store: "SqliteStore") -> tuple[int, Path]:
    """All sound rows into a new file that takes the place of the old, which is kept beside it.

    Meant for a gallery that nobody else has open: others are told that the file was replaced.
    """
    from nearkin.gallery.stores.sqlite import SqliteStore

    facts, path = _facts(store), store.path
    part = path.with_name(f".{path.name}.repair-{os.getpid()}")
    _unlink(part)
    fresh = SqliteStore(part, store.timeout)
    try:
        with store.reading, store.writing:
            saved = _copied(store, fresh, facts)
            fresh.close()
            store.release()
            os.replace(part, _repaired(path))  # from here on the repair is finished, now or at the next opening
            aside = finish_repair(path, store.timeout)
    finally:
        fresh.close()
        _unlink(part)
    return saved, aside or path


def finish_repair(path: Path, timeout: float) -> Path | None:
    """Puts a repaired file in its place, where there is one, also after a kill in the midst of that: where the old is.

    The log goes aside before its file, under the same number: a file without its log is never opened.
    """
    repaired = _repaired(path)
    if not repaired.exists():
        return None
    lock = path.with_name(f".{path.name}.repair-lock")
    alone = sqlite3.connect(lock, timeout=timeout, isolation_level=None)
    try:
        alone.execute("BEGIN EXCLUSIVE")  # freed by a kill, on every system
        if not repaired.exists():
            return None
        names = (path.with_name(f"{path.name}.damaged-{n}") for n in range(1, 10_000))
        aside = next(name for name in names if not name.exists())
        for ending in ("-wal", "-shm", ""):
            with suppress(FileNotFoundError):
                os.replace(f"{path}{ending}", f"{aside}{ending}")
        os.replace(repaired, path)
        return aside
    except sqlite3.OperationalError as error:
        if "locked" not in str(error):
            raise ValueError(f"{path}: its repair cannot be finished ({error})") from None
        raise TimeoutError(f"{path}: another process is repairing it; waited {timeout:g} s, try again later") from None
    finally:
        alone.close()
        with suppress(OSError):
            lock.unlink()


def _repaired(path: Path) -> Path:
    return path.with_name(f"{path.name}.repaired")


def _copied(store: "SqliteStore", fresh: "SqliteStore", facts: Facts) -> int:
    fresh.create(facts.but(rows=0))
    saved = 0
    with fresh.transaction() as (writer, _):
        for row, _, _ in sqlite_read.each(store.connection(False), facts.next_id):
            if row is None or sqlite_read.known(writer, [row.content]):
                continue
            writer.execute("INSERT INTO items VALUES (?, ?, ?, ?, ?, ?, ?)", (*row, checksum(*row)))
            with suppress(ValueError):
                if picture := store.thumbnail(row.id):
                    kept = (row.id, picture, picture_checksum(row.id, picture))
                    writer.execute("INSERT INTO thumbnails VALUES (?, ?, ?)", kept)
            saved += 1
        fresh.write_facts(writer, facts.but(rows=saved))
    return saved


def _facts(store: "SqliteStore") -> Facts:
    facts = store.facts()
    if facts is None:
        raise ValueError(f"{store.where}: no such gallery")
    return facts


def _unlink(path: Path) -> None:
    for ending in ("", "-wal", "-shm"):
        with suppress(FileNotFoundError):
            os.unlink(f"{path}{ending}")
