"""Another encoder for an SQLite gallery: all vectors mapped in one transaction, then rows renewed a batch at a time."""

import os
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearkin.core import files
from nearkin.gallery import schema
from nearkin.gallery.schema import Renewed, Row
from nearkin.gallery.stores import Rewrite, check_encoder, repair, sqlite_file

if TYPE_CHECKING:
    from nearkin.gallery.stores.sqlite import SqliteStore

__all__ = ["bridged", "encoders", "renew", "rewrite"]

UPDATE = "UPDATE items SET vector = ?, metadata = ?, sum = ? WHERE id = ?"
MARKED = f"instr(metadata, '\"{schema.ENCODER}\"') > 0"  # a superset: a value may hold this text too


def rewrite(store: "SqliteStore", plan: Rewrite, progress: Callable[[int, int], None] | None = None) -> str:
    """See `stores.Store.rewrite`. Others read the old state until it is committed; a kill leaves that state.

    Damaged rows stay as they are, left out of every search.
    """
    with store.transaction() as (writer, facts):
        check_encoder(store.where, facts, plan.source)
        kept = _keep_copy(store, plan.source)
        last: int | None = 0
        done = 0
        while last is not None:
            rows, _, last = sqlite_file.read_after(writer, last)
            _update(writer, plan.rows(rows) if rows else [])
            done += len(rows)
            if progress is not None:
                progress(done, max(done, facts.rows))
        from nearkin.gallery.stores.sqlite import NOTES

        writer.execute(NOTES)
        key, text = plan.note
        writer.execute("INSERT OR REPLACE INTO notes VALUES (?, ?, ?)", (key, text, schema.note_checksum(key, text)))
        writer.execute("DELETE FROM changes")  # so that every reader reads all rows again
        new = facts.replace(
            dim=plan.dim,
            fingerprint=plan.fingerprint,
            run=plan.run,
            changes=facts.changes + facts.rows + 1,
            beyond=facts.beyond | {key: bool(text)},
        )
        store.write_facts(writer, new.rewritten())
    return str(kept)


def _keep_copy(store: "SqliteStore", source: str) -> Path:
    """The gallery before, with its vectors: NAME.before-ENCODER. Nobody writes while the transaction is open."""
    kept = store.path.with_name(f"{store.path.name}.before-{source[:8]}")
    part = kept.with_name(f".{kept.name}")
    with files.explained(f"{kept}, a copy of the gallery before the upgrade,", "make room"):
        repair.unlink(part)
        try:
            with closing(sqlite3.connect(part)) as target:
                store.connection(False).backup(target)
            handle = os.open(part, os.O_RDWR | getattr(os, "O_BINARY", 0))
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
            os.replace(part, kept)
            files.flush_folder(kept.resolve().parent)
        finally:
            repair.unlink(part)
    return kept


def renew(store: "SqliteStore", rows: Sequence[Renewed], encoder: str) -> int:
    """See `stores.Store.renew`. A row that was removed, or renewed by another process, is left alone."""
    with store.transaction() as (writer, facts):
        check_encoder(store.where, facts, encoder)
        current, _ = sqlite_file.fetch(writer, [row.id for row in rows])
        changed = renewed_rows(current, rows)
        _update(writer, changed)
        if changed:
            store.record_changes(writer, facts.rewritten(), [row.id for row in changed])
    return len(changed)


def renewed_rows(current: dict[int, Row], rows: Sequence[Renewed]) -> list[Row]:
    """Those that an earlier encoder made, as they are to be."""
    still = [
        (current[row.id], row)
        for row in rows
        if row.id in current and current[row.id].content == row.content and schema.row_encoder(current[row.id].metadata)
    ]
    return [
        old._replace(vector=row.vector, metadata=schema.renewed_metadata(old.metadata, row.quality))
        for old, row in still
    ]


def _update(writer: Any, rows: Sequence[Row]) -> None:
    values = [(row.vector, row.metadata, schema.checksum(*row), row.id) for row in rows]
    writer.executemany(UPDATE, values)


def bridged(reader: Any, after: int, limit: int) -> list[Row]:
    """See `stores.Store.bridged`."""
    ids = reader.execute(f"SELECT id FROM items WHERE id > ? AND {MARKED} ORDER BY id LIMIT ?", (after, limit))
    rows, _ = sqlite_file.fetch(reader, [id for (id,) in ids])
    return [row for row in sorted(rows.values()) if schema.row_encoder(row.metadata)]


def encoders(reader: Any) -> dict[str, int]:
    """See `stores.Store.encoders`."""
    counts: dict[str, int] = {}
    for metadata, count in reader.execute(f"SELECT metadata, count(*) FROM items WHERE {MARKED} GROUP BY metadata"):
        if encoder := schema.row_encoder(metadata):
            counts[encoder] = counts.get(encoder, 0) + count
    return counts
