"""Files of a gallery beside SQLite."""

import numpy as np

from nearkin.gallery import Gallery
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
