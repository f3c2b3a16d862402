"""Checksums and counts of the rows in PostgreSQL: before rows are first searched, on request, and for a repair."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nearkin.gallery.schema import Facts
from nearkin.gallery.stores import Report, hnsw, postgres_recall, warn_lost
from nearkin.gallery.stores.postgres_search import IndexFacts

if TYPE_CHECKING:
    from nearkin.gallery.stores.postgres import PostgresStore

__all__ = ["Verified", "check", "repair", "state_of", "verify_new_rows"]

# The checksums of `schema.checksum` and `schema.thumbnail_checksum`, computed by the server.
THUMBNAIL_CHECKSUM = "substring(sha256(int8send(id) || bytes) from 1 for 8)"
CHECKSUM = (
    "substring(sha256(int8send(id) || int4send(octet_length(label)) || int4send(octet_length(name)) ||"
    " int4send(octet_length(metadata)) || convert_to(label, 'UTF8') || convert_to(name, 'UTF8') ||"
    " convert_to(metadata, 'UTF8') || content || vector_send(vector)) from 1 for 8)"
)
DAMAGE = "not as it was written"


@dataclass
class Verified:
    """Rows below `end` were verified, `count` of all rows were there, in this state of the facts."""

    end: int = 0
    count: int = 0
    state: tuple[int, int, int] = (-1, -1, -1)


def state_of(facts: Facts) -> tuple[int, int, int]:
    return facts.next_id, facts.rows, facts.changes


def verify_new_rows(store: "PostgresStore", cursor: Any, facts: Facts, verified: Verified) -> None:
    """The server verifies the checksum of every row before it is first searched, and the number of rows."""
    state = state_of(facts)
    if state == verified.state:
        return
    query = f"SELECT id FROM {store.table} WHERE id >= %s AND sum <> {CHECKSUM}"
    store.exclude({i: DAMAGE for (i,) in cursor.execute(query, (verified.end,)).fetchall()})
    if store.damaged:
        query = f"SELECT id FROM {store.table} WHERE id = ANY(%s)"
        present = {i for (i,) in cursor.execute(query, (list(store.damaged),))}
        store.damaged = {i: why for i, why in store.damaged.items() if i in present}
    # Where rows were only added, the older ones need not be counted again.
    added_only = facts.changes == verified.state[2]
    first = verified.end if added_only else 0
    count = cursor.execute(f"SELECT count(*) FROM {store.table} WHERE id >= %s", (first,)).fetchone()[0]
    verified.count = count + (verified.count if added_only else 0)
    if facts.rows - verified.count != store.lost:
        store.connections.check_exchanged(cursor)  # of other tables no row is seen
        store.lost = facts.rows - verified.count
        if store.lost:
            warn_lost(store.where, store.lost)
    verified.end, verified.state = facts.next_id, state


def check(store: "PostgresStore") -> Report:
    """See `stores.Store.check`."""
    with store.connections.reading() as cursor:
        facts = store.existing_facts(cursor)
        count = cursor.execute(f"SELECT count(*) FROM {store.table}").fetchone()[0]
        wrong = cursor.execute(f"SELECT id FROM {store.table} WHERE sum <> {CHECKSUM} ORDER BY id").fetchall()
        bad = {i: DAMAGE for (i,) in wrong}
        query = f"SELECT count(*) FROM {store.schema}.thumbnails WHERE sum <> {THUMBNAIL_CHECKSUM}"
        thumbnails = cursor.execute(query).fetchone()[0]
        notes = [f"{thumbnails} thumbnails are damaged"] if thumbnails else []
        copies = cursor.execute(f"SELECT DISTINCT said FROM {store.schema}.facts").fetchall()
        notes += ["one copy of the gallery's description is damaged"] if len(copies) != 1 else []
    index = IndexFacts.of(facts)
    if index is not None and postgres_recall.measured_recall(store, facts, index) < hnsw.TARGET_RECALL - 0.01:
        notes.append("the index finds less than it should; nearkin gallery reindex makes it again")
    return Report(facts.rows, count - len(bad), bad, facts.rows - count, notes)


def repair(store: "PostgresStore") -> tuple[int, str]:
    """Rows that are left, and the table of the damaged ones."""
    with store.transaction() as (cursor, facts):
        cursor.execute(f"CREATE TABLE IF NOT EXISTS {store.schema}.damaged (LIKE {store.table})")
        wrong = f"FROM {store.table} WHERE sum <> {CHECKSUM}"
        cursor.execute(f"INSERT INTO {store.schema}.damaged SELECT * {wrong}")
        cursor.execute(f"DELETE {wrong}")
        cursor.execute(f"DELETE FROM {store.schema}.thumbnails WHERE sum <> {THUMBNAIL_CHECKSUM}")
        count = cursor.execute(f"SELECT count(*) FROM {store.table}").fetchone()[0]
        store.write_facts(cursor, facts.replace(rows=count, changes=facts.changes + 1))
    return int(count), f"{store.schema}.damaged"
