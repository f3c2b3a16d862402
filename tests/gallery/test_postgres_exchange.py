"""Other tables take the place of a gallery's in PostgreSQL while it is read: an upgrade, a restore, a copy over it.

A transaction of PostgreSQL sees the rows of its beginning, but looks up names as they are now: it would find the new
tables, and none of their rows.
"""

import warnings
from contextlib import closing, contextmanager

import numpy as np
import pytest
from test_gallery import place_of

from nearkin import gallery as room
from nearkin.core.errors import TablesExchanged
from nearkin.gallery import Gallery, opening
from nearkin.gallery.stores import postgres_bulk, postgres_index, postgres_recall
from nearkin.gallery.stores.postgres import PostgresStore
from nearkin.gallery.stores.postgres_connection import Connections

COUNT = 60
ROWS = np.random.default_rng(0).standard_normal((COUNT, 6)).astype(np.float32)
QUERY = ROWS[7] / np.linalg.norm(ROWS[7])

READS = {
    "facts": lambda store: store.facts().rows,
    "look_up": lambda store: len(store.look_up([row.content for row in store.rows([1, 2]).values()])),
    "note": lambda store: store.note("key"),
    "bridged": lambda store: [row.id for row in store.bridged(0, 10)],
    "encoders": lambda store: store.encoders(),
    "nearest": lambda store: [row.id for row, _ in store.nearest(QUERY, 3, None)],
    "rows": lambda store: list(store.rows([3, 4])),
    "counts": lambda store: store.counts(),
    "label_sizes": lambda store: store.label_sizes(),
    "counts_of": lambda store: store.counts_of(["a"]),
    "scan": lambda store: [row.id for row in store.scan()],
    "check": lambda store: store.check(),
    "index": lambda store: store.warm(),
}

ONE_STATEMENT = ["look_up", "rows", "counts_of"]  # which sees one state by itself


@pytest.fixture
def place(tmp_path):
    place = place_of("postgres", tmp_path)
    with Gallery.open(place, dim=6) as gallery:
        gallery.enrol(ROWS, [*"ab" * (COUNT // 2)])
        gallery._store.edit("key", lambda *_: ({}, "text"))
    return place


@pytest.fixture
def store(place):
    with closing(opening.store_at(place, 30)) as store, warnings.catch_warnings():
        warnings.simplefilter("error")  # no row is lost
        yield store


def exchange(place):
    """The same rows in new tables."""
    with (
        closing(opening.store_at(place, 30)) as store,
        store.snapshot() as snapshot,
        store.load(snapshot.facts, True) as loader,
    ):
        for batch in snapshot.rows():
            loader.add(batch.rows)
        loader.finish(snapshot.facts, snapshot.notes)


def once(monkeypatch, owner, name, place, mine, before=True):
    """Exchanges the tables in the first call of a method by one store; returns a list that is filled then."""
    original, done = getattr(owner, name), []

    def replacement(self, *args, **kwargs):
        def exchange_now():
            if mine(self) and not done:
                done.append(name)
                exchange(place)

        if before:
            exchange_now()
        result = original(self, *args, **kwargs)
        if not before:
            exchange_now()
        return result

    monkeypatch.setattr(owner, name, replacement)
    return done


def at_the_beginning(monkeypatch, place, store):
    """Of the first transaction that reads."""
    original, done = Connections.reading, []

    @contextmanager
    def reading(self, *args, **kwargs):
        with original(self, *args, **kwargs) as cursor:
            if self is store.connections and not done:
                done.append("reading")
                cursor.execute("SELECT 1")  # from here on it sees the rows of now
                exchange(place)
            yield cursor

    monkeypatch.setattr(Connections, "reading", reading)
    return done


@pytest.mark.parametrize("name", [name for name in READS if name not in ONE_STATEMENT])
def test_a_call_that_an_exchange_came_into_answers_as_before_it(name, place, store, monkeypatch):
    with closing(opening.store_at(place, 30)) as other:
        expected = READS[name](other)
    done = at_the_beginning(monkeypatch, place, store)
    assert READS[name](store) == expected and done
    assert READS[name](store) == expected and store.lost == 0


@pytest.mark.parametrize("name", ["nearest", "counts", "label_sizes", "check"])
def test_so_does_one_that_has_read_the_description_before(name, place, store, monkeypatch):
    with closing(opening.store_at(place, 30)) as other:
        expected = READS[name](other)
    done = once(monkeypatch, PostgresStore, "existing_facts", place, lambda it: it is store, before=False)
    assert READS[name](store) == expected and done
    assert READS[name](store) == expected and store.lost == 0


def counted(monkeypatch, name):
    """Calls of a method of connections."""
    original, calls = getattr(Connections, name), []
    monkeypatch.setattr(Connections, name, lambda self, *args, **kwargs: calls.append(1) or original(self, *args))
    return calls


def test_a_search_in_a_known_state_takes_one_round_trip(store, monkeypatch):
    expected = READS["nearest"](store)
    transactions, together = counted(monkeypatch, "reading"), counted(monkeypatch, "read_together")
    assert READS["nearest"](store) == expected and (len(transactions), len(together)) == (0, 1)
    with store.connections.reading():  # within another call of this thread
        assert READS["nearest"](store) == expected
    assert READS["nearest"](store) == expected and len(transactions) == 2


@pytest.mark.parametrize("name", ["nearest", "label_sizes", *ONE_STATEMENT])
def test_a_call_without_a_transaction_finds_the_rows_of_now_after_an_exchange(name, place, store, monkeypatch):
    expected = READS[name](store)
    done = once(monkeypatch, Connections, "read_together", place, lambda it: it is store.connections)
    assert READS[name](store) == expected and done
    assert READS[name](store) == expected and store.lost == 0


def changed_after(monkeypatch, store, count, change):
    """After so many statements of the next search something changes; the rest see the new state."""
    original = Connections.read_together

    def one_by_one(self, statements):
        selected = []
        for number, statement in enumerate(statements):
            if number == count and self is store.connections:
                monkeypatch.setattr(Connections, "read_together", original)
                change()
            selected += original(self, [statement]) or [[]]
        return selected

    monkeypatch.setattr(Connections, "read_together", one_by_one)


@pytest.mark.parametrize("count", [0, 1], ids=["before it", "between its rows and the description"])
def test_a_change_in_the_middle_of_a_search_is_noticed(count, place, store, monkeypatch):
    first = READS["nearest"](store)[0]
    with closing(opening.store_at(place, 30)) as other:
        changed_after(monkeypatch, store, count, lambda: other.relabel([first], "changed"))
        assert store.nearest(QUERY, 3, None)[0][0].label == "changed"
        changed_after(monkeypatch, store, count, lambda: other.remove([first]))
        assert first not in READS["nearest"](store)
    assert store.lost == 0


def test_a_statement_that_the_server_refuses_leaves_the_connection_usable(store):
    assert store.connections.read_together([("SELECT 1", ()), ("SELECT 1 / 0", ()), ("SELECT 2", ())]) is None
    assert store.connections.read_together([("SELECT 1", ()), ("SELECT %s::int", (2,))]) == [[(1,)], [(2,)]]


def test_an_interrupted_search_leaves_no_answer_to_the_next(store, monkeypatch):
    expected = READS["nearest"](store)
    connection = store.connections._reader
    with monkeypatch.context() as patch:

        def interrupted(*_):
            raise KeyboardInterrupt

        patch.setattr(type(connection), "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.connections.read_together([("SELECT 1", ())])
    assert READS["nearest"](store) == expected


def test_a_call_is_not_repeated_for_ever(place, store, monkeypatch):
    original = PostgresStore.existing_facts

    def existing_facts(self, cursor):
        facts = original(self, cursor)
        if self is store:
            exchange(place)
        return facts

    monkeypatch.setattr(PostgresStore, "existing_facts", existing_facts)
    with pytest.raises(TablesExchanged, match="was replaced while it was read; try again"):
        store.counts()


def test_a_copy_and_a_backup_are_whole_whatever_is_exchanged_meanwhile(place, tmp_path, monkeypatch):
    monkeypatch.setattr(postgres_bulk, "ROWS", 16)
    exchanged = []

    def progress(*_):
        exchanged.append(1)
        exchange(place)

    assert room.copy(place, tmp_path / "copy", progress=progress).rows == COUNT and len(exchanged) >= 3
    with Gallery.open(tmp_path / "copy") as gallery:
        assert [hit.id for hit, _ in gallery.rows()] == list(range(1, COUNT + 1)) and gallery._store.note("key")
    room.backup(place, tmp_path / "points", progress=progress)
    room.restore(tmp_path / "points", tmp_path / "restored")
    with Gallery.open(tmp_path / "restored") as gallery:
        assert gallery.check().whole and gallery.row_count == COUNT


def test_a_table_that_the_new_ones_do_not_have_is_an_exchange_too(place, store):
    assert store.note("key") == "text"
    query = f"SELECT * FROM {store.schema}.words"
    with pytest.raises(ValueError, match="no such gallery"), store.connections.reading() as cursor:
        cursor.execute(query)
    exchange(place)
    with pytest.raises(TablesExchanged), store.connections.reading() as cursor:
        cursor.execute(query)
    assert store.note("key") == "text"


def test_an_index_of_the_tables_before_is_not_taken_for_one_of_the_new(place, store, monkeypatch):
    monkeypatch.setattr(postgres_index, "EXACT", 20)
    original, done = postgres_recall.measured, []

    def measured(*args):
        result = original(*args)
        if not done:
            done.append(1)
            exchange(place)
        return result

    monkeypatch.setattr(postgres_recall, "measured", measured)
    store.warm()
    with store.connections.reading() as cursor:
        facts = store.existing_facts(cursor)
        assert done and facts.beyond["hnsw"] and postgres_index.is_current(cursor, store, facts)
