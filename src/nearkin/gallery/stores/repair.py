"""Checks an SQLite gallery, and saves the undamaged rows of a damaged one."""

import os
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearkin.gallery.schema import Facts, checksum, thumbnail_checksum
from nearkin.gallery.stores import Report, disk_index, hnsw, sqlite_file

if TYPE_CHECKING:
    from nearkin.gallery.stores.sqlite import SqliteStore

__all__ = ["check", "finish_replacement", "repair", "replacement_path", "unlink"]

REPLACED = {"repaired": "damaged", "restored": "previous"}  # names of new files, and of those that they replace


def check(store: "SqliteStore", progress: Callable[[int, int], None] | None = None) -> Report:
    """SQLite's own check, then every row, every thumbnail, both copies of the facts, the index."""
    facts, notes, bad, sound = _existing_facts(store), [], {}, 0
    with store.read_lock:
        reader = store.connection(False)
        try:
            lines = [line for (line,) in reader.execute("PRAGMA integrity_check(20)")]
            notes += [f"SQLite: {' '.join(line.split())}" for line in lines if line != "ok"]
        except sqlite3.DatabaseError as error:
            notes.append(f"SQLite: {error}")
        for done, (row, why, id) in enumerate(sqlite_file.salvage(reader, facts.next_id), 1):
            sound += row is not None
            if row is None:
                bad[id] = why
            if progress is not None and done % sqlite_file.BATCH == 0:
                progress(done, facts.rows)
        notes += _check_thumbnails_and_facts(store, reader) + _check_index(store.index.index_path, facts)
    return Report(facts.rows, sound, bad, facts.rows - sound - len(bad), notes)


def _check_thumbnails_and_facts(store: "SqliteStore", reader: Any) -> list[str]:
    notes = []
    try:
        wrong = [i for (i,) in reader.execute("SELECT id FROM thumbnails").fetchall() if not store.thumbnail(i)]
        notes += [f"{len(wrong)} thumbnails are damaged, the first of id {wrong[0]}"] if wrong else []
        copies = {text for (text,) in reader.execute("SELECT said FROM facts")}
        notes += ["one copy of the gallery's description is damaged"] if len(copies) != 1 else []
    except (ValueError, sqlite3.DatabaseError) as error:
        notes.append(f"SQLite: {error}")
    return notes


def _check_index(path: Path, facts: Facts) -> list[str]:
    stored = facts.beyond.get("stored")
    if not path.exists() or (stored is None and hnsw.unavailable() is not None):
        return []
    try:
        if stored is None:
            hnsw.load(path, facts.index_id)
        else:
            disk_index.load(path, facts, stored)
    except ValueError as error:
        return [f"{path} is {error}; it is not used, and nearkin gallery reindex makes it again"]
    return []


def repair(store: "SqliteStore") -> tuple[int, Path]:
    """Writes all undamaged rows to a new file that replaces the old one, which stays beside it.

    For a gallery that no other process has open: others get an error that the file was replaced.
    """
    from nearkin.gallery.stores.sqlite import SqliteStore

    facts, path = _existing_facts(store), store.path
    part = path.with_name(f".{path.name}.repair-{os.getpid()}")
    unlink(part)
    fresh = SqliteStore(part, store.timeout)
    try:
        with store.read_lock, store.write_lock:
            saved = _copy_rows(store, fresh, facts)
            fresh.close()
            store.release()
            os.replace(
                part, replacement_path(path, "repaired")
            )  # from here on the repair is finished, now or at the next opening
            aside = finish_replacement(path, store.timeout)
            path.with_name(f"{path.name}.codes").unlink(missing_ok=True)  # of the rows before
    finally:
        fresh.close()
        unlink(part)
    return saved, aside or path


def finish_replacement(path: Path, timeout: float) -> Path | None:
    """Moves a repaired or restored file, if there is one, into place, also after a kill during that; returns where the
    old one is: in NAME.damaged-N or NAME.previous-N.

    The log is moved away before its file, under the same number: a file without its log is never opened.
    """
    waiting = [(replacement_path(path, kind), aside) for kind, aside in REPLACED.items()]
    replaced = [_finish(path, new, aside, timeout) for new, aside in waiting if new.exists()]
    return replaced[-1] if replaced else None


def _finish(path: Path, repaired: Path, called: str, timeout: float) -> Path | None:
    lock = path.with_name(f".{path.name}.repair-lock")
    exclusive = sqlite3.connect(lock, timeout=timeout, isolation_level=None)
    try:
        exclusive.execute("BEGIN EXCLUSIVE")  # freed by a kill, on every system
        if not repaired.exists():
            return None
        names = (path.with_name(f"{path.name}.{called}-{n}") for n in range(1, 10_000))
        aside = next(name for name in names if not name.exists())
        for ending in ("-wal", "-shm", ""):
            with suppress(FileNotFoundError):
                os.replace(f"{path}{ending}", f"{aside}{ending}")
        os.replace(repaired, path)
        return aside
    except sqlite3.OperationalError as error:
        if "locked" not in str(error):
            raise ValueError(f"{path}: its replacement cannot be finished ({error})") from None
        raise TimeoutError(f"{path}: another process is replacing it; waited {timeout:g} s, try again later") from None
    finally:
        exclusive.close()
        with suppress(OSError):
            lock.unlink()


def replacement_path(path: Path, kind: str) -> Path:
    """Where a complete file waits to take the place of another."""
    return path.with_name(f"{path.name}.{kind}")


def _copy_rows(store: "SqliteStore", fresh: "SqliteStore", facts: Facts) -> int:
    fresh.create(facts.replace(rows=0))
    saved = 0
    with fresh.transaction() as (writer, _):
        for row, _, _ in sqlite_file.salvage(store.connection(False), facts.next_id):
            if row is None or sqlite_file.look_up(writer, [row.content]):
                continue
            writer.execute("INSERT INTO items VALUES (?, ?, ?, ?, ?, ?, ?)", (*row, checksum(*row)))
            with suppress(ValueError):
                if thumbnail := store.thumbnail(row.id):
                    fields = (row.id, thumbnail, thumbnail_checksum(row.id, thumbnail))
                    writer.execute("INSERT INTO thumbnails VALUES (?, ?, ?)", fields)
            saved += 1
        fresh.write_facts(writer, facts.replace(rows=saved))
    return saved


def _existing_facts(store: "SqliteStore") -> Facts:
    facts = store.facts()
    if facts is None:
        raise ValueError(f"{store.where}: no such gallery")
    return facts


def unlink(path: Path) -> None:
    for ending in ("", "-wal", "-shm"):
        with suppress(FileNotFoundError):
            os.unlink(f"{path}{ending}")
