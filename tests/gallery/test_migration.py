"""Galleries of version 0.1.0 open; an older format is brought up to date with a copy of it kept."""

import sqlite3
from contextlib import closing
from hashlib import sha256

import numpy as np
import pytest
from test_gallery import STORES, place_of

from nearkin import gallery as room
from nearkin.gallery import Gallery, migration, schema
from nearkin.gallery.stores import sqlite_file

# As version 0.1.0 writes it; never to be changed.
SQLITE_0_1_0 = (
    "CREATE TABLE facts (copy INTEGER PRIMARY KEY, said TEXT NOT NULL, sum BLOB NOT NULL)",
    "CREATE TABLE items (id INTEGER PRIMARY KEY, content BLOB NOT NULL UNIQUE, label TEXT NOT NULL, name TEXT NOT NULL,"
    " metadata TEXT NOT NULL, vector BLOB NOT NULL, sum BLOB NOT NULL)",
    "CREATE TABLE thumbnails (id INTEGER PRIMARY KEY, bytes BLOB NOT NULL, sum BLOB NOT NULL)",
    "CREATE TABLE changes (seq INTEGER PRIMARY KEY, id INTEGER NOT NULL)",
    "PRAGMA application_id = 1852532529",
    "PRAGMA user_version = 77",
    "PRAGMA journal_mode = WAL",
)
FACTS_0_1_0 = (
    '{"beyond": {}, "changes": 1, "dim": 2, "fingerprint": null, "format": 1, "gallery": '
    '"0123456789abcdef0123456789abcdef", "next_id": 4, "rows": 2, "run": null, "sources": ["old.npz"]}'
)
# Of each row: id, content, label, name, metadata, vector and its checksum, as 0.1.0 computes it.
ROWS_0_1_0 = (
    (1, "11" * 32, "heron", "a.jpg", "{}", "3f80000000000000", "b4df8c1100bc581f"),
    (3, "33" * 32, "égret", "", '{"n":1}', "000000003f800000", "bc4b315118e6e0eb"),
)


def gallery_of_0_1_0(path):
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in SQLITE_0_1_0:
            connection.execute(statement).fetchall()
        total = sha256(FACTS_0_1_0.encode()).digest()[:8]
        connection.executemany("INSERT INTO facts VALUES (?, ?, ?)", [(copy, FACTS_0_1_0, total) for copy in (1, 2)])
        for id, content, label, name, metadata, vector, total in ROWS_0_1_0:
            values = (id, bytes.fromhex(content), label, name, metadata, bytes.fromhex(vector), bytes.fromhex(total))
            connection.execute("INSERT INTO items VALUES (?, ?, ?, ?, ?, ?, ?)", values)
        connection.execute("INSERT INTO changes VALUES (1, 2)")
    return path


def check_rows(place):
    with Gallery.open(place) as gallery:
        assert [hit[:2] for hit in gallery.search(np.array([1.0, 0.1]), 2)] == [(1, "heron"), (3, "égret")]
        assert gallery.get(3).metadata == {"n": 1} and gallery.check().whole and gallery.dim == 2
        assert gallery.stats()["sources"] == ["old.npz"]


def test_a_gallery_of_0_1_0_opens(tmp_path):
    place = gallery_of_0_1_0(tmp_path / "old.gallery")
    check_rows(place)
    with Gallery.open(place) as gallery:
        assert gallery.enrol(np.array([[0.6, 0.8]]), "new").ids == [4]
        assert gallery.remove([1]) == 1 and len(gallery.search(np.ones(2), 9)) == 2
    assert sqlite_file.APPLICATION_ID == 1852532529 and {path.name for path in tmp_path.iterdir()} == {"old.gallery"}


@pytest.fixture
def old(request, tmp_path):
    """A gallery of format 1, on one of the stores."""
    first = gallery_of_0_1_0(tmp_path / "g.gallery")
    if request.param == "sqlite":
        return str(first)
    place = place_of("postgres", tmp_path)
    room.copy(first, place)
    first.unlink()
    return place


def newer(monkeypatch, statements=None):
    """A nearkin whose format 3 has a table and a field of its own."""
    sqlite = statements or ("CREATE TABLE colours (id INTEGER PRIMARY KEY, colour TEXT NOT NULL)",)
    postgres = statements or ("CREATE TABLE {schema}.colours (id bigint PRIMARY KEY, colour text NOT NULL)",)
    steps = {
        1: migration.Step(sqlite, postgres),
        2: migration.Step((), (), lambda fields: fields | {"sources": [*fields["sources"], "migrated"]}),
    }
    monkeypatch.setattr(migration, "STEPS", steps)
    monkeypatch.setattr(schema, "FORMAT", 3)


def kept_copy(place):
    return f"{place}.format-1" if "://" not in place else f"{place}_format_1_1"


@pytest.mark.parametrize("old", STORES, indirect=True)
def test_an_older_format_is_brought_up_to_date_and_a_copy_kept(old, monkeypatch):
    with monkeypatch.context() as patch:
        newer(patch)
        for _ in range(2):
            with Gallery.open(old) as gallery:
                assert gallery._store.facts().format == 3 and gallery.stats()["sources"] == ["old.npz", "migrated"]
                assert gallery.check().whole and len(gallery.search(np.ones(2), 5)) == 2
                read = "SELECT count(*) FROM {}colours"
                if gallery._store.kind == "sqlite":
                    assert gallery._store.connection(False).execute(read.format("")).fetchone() == (0,)
                else:
                    with gallery._store.connections.reading() as cursor:
                        assert cursor.execute(read.format(gallery._store.schema + ".")).fetchone() == (0,)
    check_rows(kept_copy(old))  # by the older version
    with pytest.raises(ValueError, match="has format 3, this version of nearkin reads format 1"):
        Gallery.open(old)


@pytest.mark.parametrize("old", STORES, indirect=True)
def test_a_migration_that_fails_leaves_the_old_format(old, monkeypatch, tmp_path):
    before = {path.name for path in tmp_path.iterdir()}
    with monkeypatch.context() as patch:
        newer(patch, ("CREATE TABLE no good",))
        with pytest.raises((ValueError, OSError), match="syntax error"):
            Gallery.open(old)
    check_rows(old)
    assert {path.name for path in tmp_path.iterdir()} - before <= {"g.gallery.format-1"}


@pytest.mark.parametrize("old", STORES, indirect=True)
def test_backup_and_copy_bring_it_up_to_date_too(old, monkeypatch, tmp_path):
    newer(monkeypatch)
    room.backup(old, tmp_path / "kept")
    assert room.restore(tmp_path / "kept", tmp_path / "restored").rows == 2
    with Gallery.open(tmp_path / "restored") as gallery:
        assert gallery._store.facts().format == 3


def test_a_full_disk_before_a_migration_is_one_sentence(tmp_path, monkeypatch):
    place = gallery_of_0_1_0(tmp_path / "g.gallery")

    def full(handle):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        newer(patch)
        patch.setattr("nearkin.gallery.stores.sqlite_bulk.os.fsync", full)
        with pytest.raises(ValueError, match=r"format-1, a copy .* could not be written \(No space left on device\)"):
            Gallery.open(place)
    check_rows(place)
    assert {path.name for path in tmp_path.iterdir()} == {"g.gallery"}


def test_a_format_without_a_step_is_refused(tmp_path, monkeypatch):
    place = gallery_of_0_1_0(tmp_path / "g.gallery")
    monkeypatch.setattr(schema, "FORMAT", 2)
    with pytest.raises(ValueError, match="has format 1, which no version of nearkin has written"):
        Gallery.open(place)
