"""Files of a gallery beside SQLite."""

import numpy as np
import pytest

from nearkin.gallery import Gallery, backup, copy, restore
from nearkin.gallery.stores import sqlite_file


def test_files_that_sqlite_has_open_are_not_read_beside_it(tmp_path, monkeypatch):
    """Closing them again would end SQLite's locks, and another process would cut what this one has mapped (SIGBUS)."""
    read = []
    monkeypatch.setattr(sqlite_file.wal_repair, "repair_log", lambda path: read.append(path) or "")
    path = tmp_path / "new"
    with Gallery.open(path, dim=4) as gallery:
        gallery.enrol(np.eye(4), "one")
        assert read == []  # it was made here
    with Gallery.open(path) as gallery, Gallery.open(path) as again:
        assert len(gallery.labels()) == len(again.labels()) == 1
    assert read == [path]


def page_bytes(path):
    return int.from_bytes(path.read_bytes()[16:18], "big")


@pytest.mark.parametrize(
    "dim, size", [(1, 4096), (128, 4096), (256, 4096), (257, 8192), (512, 8192), (768, 16384), (16_000, 65_536)]
)
def test_a_page_has_room_for_a_few_rows(dim, size):
    assert sqlite_file.page_size(dim) == size


def test_every_way_to_a_new_file_chooses_its_pages_by_the_length_of_rows(tmp_path):
    path = tmp_path / "made"
    rows = np.random.default_rng(0).normal(size=(50, 512))
    with Gallery.open(path, dim=512) as gallery:
        gallery.enrol(rows, "one")
    backup(path, tmp_path / "kept")
    copy(path, tmp_path / "copied")
    restore(tmp_path / "kept", tmp_path / "restored")
    assert [page_bytes(tmp_path / name) for name in ("made", "copied", "restored")] == [8192] * 3
    with Gallery.open(path) as gallery:
        gallery.repair()
        gallery.vacuum()
    assert page_bytes(path) == 8192
    assert path.stat().st_size < 50 * 4096  # in pages of 4 KiB each row has one to itself


def test_a_gallery_keeps_the_pages_it_has(tmp_path, monkeypatch):
    """As those that were made before pages followed the length of rows."""
    path = tmp_path / "old"
    rows = np.random.default_rng(0).normal(size=(40, 512))
    with monkeypatch.context() as patch:
        patch.setattr(sqlite_file, "page_size", lambda dim: 4096)
        with Gallery.open(path, dim=512) as gallery:
            gallery.enrol(rows[:20], "one")
    with Gallery.open(path, dim=512) as gallery:
        gallery.enrol(rows[20:], "two")
        gallery.vacuum()
        assert gallery.check().whole and gallery.labels() == {"one": 20, "two": 20}
    assert page_bytes(path) == 4096


def test_an_enrolment_after_reading_copies_none_of_the_rows(tmp_path):
    rows = np.random.default_rng(0).normal(size=(1501, 4)).astype(np.float32)
    with Gallery.open(tmp_path / "g", dim=4) as gallery:
        gallery.enrol(rows[:1500], "a")
    with Gallery.open(tmp_path / "g") as gallery:
        gallery.search(rows[0])
        before = gallery._store.index._loaded.matrix.rows
        gallery.enrol(rows[1500], "b")
        assert gallery.search(rows[1500], 1)[0].label == "b"
        assert gallery._store.index._loaded.matrix.rows is before
