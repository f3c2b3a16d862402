"""Another encoder for a gallery in PostgreSQL: all vectors mapped into new tables that take the place of the old."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from nearkin.gallery import schema
from nearkin.gallery.schema import Renewed, Row, StoredRow
from nearkin.gallery.stores import Rewrite, check_encoder, postgres_bulk
from nearkin.gallery.stores.postgres_bulk import PostgresSnapshot
from nearkin.gallery.stores.sqlite_rewrite import renewed_rows

if TYPE_CHECKING:
    from nearkin.gallery.stores.postgres import PostgresStore

__all__ = ["bridged", "encoders", "renew", "rewrite"]

MARKED = f"position('\"{schema.ENCODER}\"' in metadata) > 0"  # a superset: a value may hold this text too


def rewrite(store: "PostgresStore", plan: Rewrite, progress: Callable[[int, int], None] | None = None) -> str:
    """See `stores.Store.rewrite`. The old tables are readable until it is committed, and stay as NAME_previous_N.

    Damaged rows stay behind, in the old tables.
    """
    before = store.facts()
    if before is None:
        raise ValueError(f"{store.where}: no such gallery")
    with postgres_bulk.load(store, before.replace(dim=plan.dim), overwrite=True) as loader:
        cursor = loader.cursor
        snapshot = PostgresSnapshot(cursor, store)  # under the lock of writers
        facts = snapshot.facts
        check_encoder(store.where, facts, plan.source)
        for batch in snapshot.rows():
            loader.add(_stored(batch.rows, plan))
            if progress is not None:
                progress(loader.count, max(loader.count, facts.rows))
        new = facts.replace(
            dim=plan.dim,
            fingerprint=plan.fingerprint,
            run=plan.run,
            rows=loader.count,
            changes=facts.changes + facts.rows + 1,
            beyond={key: value for key, value in facts.beyond.items() if key != "hnsw"}
            | {plan.note[0]: bool(plan.note[1])},
        )
        loader.finish(new, snapshot.notes | dict([plan.note]))
    return loader.previous


def _stored(rows: Sequence[StoredRow], plan: Rewrite) -> list[StoredRow]:
    plain = [
        Row(row.id, row.content, row.label.decode(), row.name.decode(), row.metadata.decode(), row.vector)
        for row in rows
    ]
    return [
        old._replace(vector=new.vector, metadata=new.metadata.encode(), sum=schema.checksum(*new))
        for old, new in zip(rows, plan.rows(plain), strict=True)
    ]


def renew(store: "PostgresStore", rows: Sequence[Renewed], encoder: str) -> int:
    """See `stores.Store.renew`. A row that was removed, or renewed by another process, is left alone."""
    update = f"UPDATE {store.table} SET vector = %s::vector, metadata = %s, sum = %s WHERE id = %s"
    with store.transaction() as (cursor, facts):
        check_encoder(store.where, facts, encoder)
        current, _ = store.fetch(cursor, [row.id for row in rows])
        changed = renewed_rows(current, rows)
        for row in changed:
            numbers = schema.unpack([row.vector], facts.dim)[0].tolist()
            text = "[" + ",".join(f"{number:.9g}" for number in numbers) + "]"
            cursor.execute(update, (text, row.metadata, schema.checksum(*row), row.id))
        if changed:
            store.write_facts(cursor, facts.replace(changes=facts.changes + len(changed)))
    return len(changed)


def bridged(store: "PostgresStore", cursor: Any, after: int, limit: int) -> list[Row]:
    """See `stores.Store.bridged`."""
    query = f"SELECT id FROM {store.table} WHERE id > %s AND {MARKED} ORDER BY id LIMIT %s"
    ids = [id for (id,) in cursor.execute(query, (after, limit)).fetchall()]
    rows, _ = store.fetch(cursor, ids)
    return [row for row in sorted(rows.values()) if schema.row_encoder(row.metadata)]


def encoders(store: "PostgresStore", cursor: Any) -> dict[str, int]:
    """See `stores.Store.encoders`."""
    counts: dict[str, int] = {}
    query = f"SELECT metadata, count(*) FROM {store.table} WHERE {MARKED} GROUP BY metadata"
    for metadata, count in cursor.execute(query).fetchall():
        if encoder := schema.row_encoder(metadata):
            counts[encoder] = counts.get(encoder, 0) + count
    return counts
