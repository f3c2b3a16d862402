"""How often an item is looked up and a gallery is searched."""

from collections import Counter

import numpy as np
import pytest
from PIL import Image

import worlds
from nearkin import dist, models
from nearkin import gallery as room
from nearkin.gallery import Gallery, items
from nearkin.gallery.stores import sqlite_file
from nearkin.gallery.stores.sqlite import SqliteStore


class Lookups:
    """Counts, per content, the lookups outside a transaction and those inside one, and the rows fetched by id."""

    def __init__(self, patch):
        self.outside, self.everywhere, self.fetched = Counter(), Counter(), 0
        look_up, in_table, rows = SqliteStore.look_up, sqlite_file.look_up, SqliteStore.rows

        def outside(store, contents):
            self.outside.update(contents)
            return look_up(store, contents)

        def everywhere(connection, contents):
            self.everywhere.update(contents)
            return in_table(connection, contents)

        def fetch(store, ids):
            self.fetched += len(ids)
            return rows(store, ids)

        patch.setattr(SqliteStore, "look_up", outside)
        patch.setattr(sqlite_file, "look_up", everywhere)
        patch.setattr(SqliteStore, "rows", fetch)

    def most(self):
        """The most lookups of any item, outside and inside; the counts start again."""
        inside = self.everywhere - self.outside
        most = max(self.outside.values(), default=0), max(inside.values(), default=0), self.fetched
        self.outside.clear()
        self.everywhere.clear()
        self.fetched = 0
        return most


@pytest.fixture
def photos(tmp_path):
    """A folder of 3 classes of 4 pictures, and a run beside it."""
    draw = np.random.default_rng(0)
    for name in ("a", "b", "c"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(4):
            path = tmp_path / "photos" / name / f"{i}.png"
            Image.fromarray(draw.integers(0, 256, (20, 20), dtype=np.uint8)).save(path)
    encoder = models.build("small-cnn", channels=1, size=16, width=4, dim=8, seed=0)
    how = {"kind": "pictures", "size": 16, "stored": 16, "fit": "crop", "channels": 1, "flip": False}
    models.save(encoder, tmp_path / "run", how)
    return tmp_path / "photos"


def test_a_source_is_looked_up_once_outside_the_transaction_and_once_inside(photos, monkeypatch):
    lookups = Lookups(monkeypatch)
    with Gallery.open(photos.parent / "g", photos.parent / "run", device="cpu") as gallery:
        assert room.enrol_source(gallery, str(photos)).added == 12
        assert lookups.most() == (1, 1, 0)
        assert room.enrol_source(gallery, str(photos)).known == 12
        assert lookups.most() == (1, 0, 0), "what is enrolled needs no transaction"
        assert room.enrol_source(gallery, str(photos), label="x")[:3] == (0, 12, 12)
        assert lookups.most() == (1, 0, 0)


def test_items_are_looked_up_once_outside_the_transaction_and_once_inside(photos, monkeypatch):
    paths = sorted(photos.rglob("*.png"))
    lookups = Lookups(monkeypatch)
    with Gallery.open(photos.parent / "g", photos.parent / "run", device="cpu") as gallery:
        assert gallery.enrol(paths[:6], "x").added == 6
        assert lookups.most() == (1, 1, 0)
        assert gallery.enrol(gallery.see(paths), "x").added == 6
        assert lookups.most() == (1, 1, 0)
        assert gallery.enrol(np.eye(8), "vectors").added == 8
        assert lookups.most() == (0, 1, 0), "vectors need no encoder: the transaction finds those that are enrolled"


def enrol_counted(rank, world, folder, place):
    with pytest.MonkeyPatch.context() as patch, dist.ProcessGroup() as group:
        if rank:
            encoding = items.Encoding(f"{folder}/run", "cpu")
            return [list(room.enrol_source(encoding, f"{folder}/photos", group=group))[:3] for _ in range(2)]
        lookups, counts = Lookups(patch), []
        with Gallery.open(place, f"{folder}/run", device="cpu") as gallery:
            for _ in range(2):
                result = room.enrol_source(gallery, f"{folder}/photos", group=group)
                counts.append((list(result)[:3], lookups.most()))
    return counts


def test_ranks_look_items_up_once_outside_the_transaction_and_once_inside(photos, tmp_path):
    counts = worlds.run(2, enrol_counted, str(photos.parent), str(tmp_path / "shared"))
    assert counts[0] == [([12, 0, 0], (1, 1, 0)), ([0, 12, 0], (1, 0, 0))]
    assert counts[1] == [[12, 0, 0], [0, 12, 0]]


def test_identify_with_hits_searches_once(tmp_path, monkeypatch):
    pytest.importorskip("fastapi", reason="the service needs pip install 'nearkin[serve]'")
    from test_web import client_of

    searches, nearest = [], SqliteStore.nearest

    def counted(store, query, k, filter):
        searches.append(k)
        return nearest(store, query, k, filter)

    monkeypatch.setattr(SqliteStore, "nearest", counted)
    rows = np.random.default_rng(0).normal(size=(80, 12))
    with Gallery.open(tmp_path / "g", dim=12) as gallery:
        gallery.enrol(rows, [f"l{i % 9}" for i in range(80)])
        with client_of(gallery) as client:
            for k in (3, 70):
                expected = gallery.search(rows[5] + 0.1, k)
                alone = gallery.identify(rows[5] + 0.1)
                searches.clear()
                answer = client.post(f"/api/vectors/identify?hits={k}", json={"item": (rows[5] + 0.1).tolist()}).json()
                assert len(searches) == 1
                assert [hit["id"] for hit in answer["hits"]] == [hit.id for hit in expected]
                assert [candidate["id"] for candidate in answer["candidates"]] == [
                    candidate.id for candidate in alone.candidates
                ]
