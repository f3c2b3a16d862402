"""The SQLite gallery under attack: no call hangs, no wrong row is returned, no file is mixed with another.

NEARKIN_FAULTS=10 damages ten times as often.
"""

import os
import shutil
import sqlite3
import tempfile
import threading
import tracemalloc
import warnings
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from nearkin.gallery import Gallery, StoreUnavailable
from nearkin.gallery.schema import unit
from nearkin.gallery.stores import hnsw, memory_index, repair, sqlite, sqlite_file
from nearkin.gallery.stores.matrix import Matrix
from nearkin.gallery.stores.memory_index import Columns

pytestmark = pytest.mark.slow

FAULTS = int(os.environ.get("NEARKIN_FAULTS", "1"))
LABELS = [f"class {i // 5}" for i in range(200)]


@pytest.fixture
def vectors():
    return np.random.default_rng(0).normal(size=(200, 12))


@pytest.fixture
def path(tmp_path, vectors):
    """A gallery of 200 rows that no process has open."""
    with Gallery.open(tmp_path / "g", dim=12) as gallery:
        gallery.enrol(vectors, LABELS, [{"n": i % 7} for i in range(200)])
    return tmp_path / "g"


def finish(call, seconds=60):
    """What a call returns or raises; a call that hangs fails the test and not the machine."""
    outcome = {}

    def run():
        try:
            outcome["result"] = call()
        except BaseException as error:
            outcome["error"] = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "the call hangs"
    if "error" in outcome:
        raise outcome["error"]
    return outcome["result"]


def near(rows, query, k, left_out=()):
    """A slow reference: ids of the nearest, from 1."""
    score = unit(rows).astype(np.float64) @ unit(query[None])[0].astype(np.float64)
    return [i + 1 for i in np.argsort(-score, kind="stable").tolist() if i + 1 not in left_out][:k]


def search_ids(gallery, query, k=300, **filter):
    return [hit.id for hit in finish(lambda: gallery.search(query, k, filter or None))]


def execute_elsewhere(path, sql):
    """By another program, which knows nothing of galleries."""
    connection = sqlite3.connect(path)
    connection.execute(sql)
    connection.commit()
    connection.close()


def backup(source, target):
    """By SQLite's own API."""
    one, other = sqlite3.connect(source), sqlite3.connect(target)
    one.backup(other)
    one.close()
    other.close()


# ---- a search ends


@pytest.mark.parametrize("gone", ["id = 7", "id > 3", "id > 0"])
def test_rows_that_another_program_deletes_are_missed_and_the_rest_is_found(path, vectors, gone):
    with Gallery.open(path, timeout=5) as gallery:
        gallery.search(vectors[0])
        execute_elsewhere(path, f"DELETE FROM items WHERE {gone}")
        left_out = {"id = 7": {7}, "id > 3": set(range(4, 201)), "id > 0": set(range(1, 201))}[gone]
        with pytest.warns(RuntimeWarning, match="rows are missing"):
            assert search_ids(gallery, vectors[6], 10) == near(vectors, vectors[6], 10, left_out)
        if gone == "id = 7":
            assert finish(gallery.stats)["lost"] == 1 and len(search_ids(gallery, vectors[0])) == 199
            assert sorted(search_ids(gallery, vectors[0], n=6)) == list(range(14, 201, 7))
            assert finish(lambda: gallery.enrol(-vectors[0], "new")).added == 1
            assert search_ids(gallery, -vectors[0], 1) == [201]


def test_a_damaged_key_of_an_inner_page_costs_its_rows_only(path, vectors):
    """A scan returns rows that a lookup by id does not: they are excluded."""
    connection = sqlite3.connect(path)
    (page,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'items'").fetchone()
    connection.close()
    content, start = bytearray(path.read_bytes()), (page - 1) * 4096
    assert content[start] == 5, "the root of the table is an inner page"
    cell = start + int.from_bytes(content[start + 14 : start + 16], "big")
    key = content[cell + 4]
    assert 4 < key < 128
    content[cell + 4] = key & ~4 if key & 4 else key & ~1
    path.write_bytes(content)
    lost = set(range(content[cell + 4] + 1, key + 1))
    with Gallery.open(path, timeout=5) as gallery:
        with pytest.warns(RuntimeWarning, match="missing"):
            answers = {i: search_ids(gallery, vectors[i - 1], 1) for i in lost}
        assert answers == {i: near(vectors, vectors[i - 1], 1, lost) for i in lost}
        assert finish(gallery.stats)["lost"] == len(lost)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert search_ids(gallery, vectors[0]) == near(vectors, vectors[0], 300, lost), "warned once"


def test_an_older_copy_that_is_put_back_underneath_is_searched_as_it_is(tmp_path, path, vectors):
    more = np.random.default_rng(1).normal(size=(60, 12))
    backup(path, tmp_path / "copy")
    with Gallery.open(path, timeout=5) as gallery, Gallery.open(path, timeout=5) as other:
        gallery.enrol(more[:30], "more")
        assert len(search_ids(gallery, vectors[0])) == 230
        backup(tmp_path / "copy", path)
        assert search_ids(gallery, vectors[0]) == near(vectors, vectors[0], 300)
        gallery.enrol(more[:30], "more")
        assert len(search_ids(gallery, vectors[0])) == 230
        backup(tmp_path / "copy", path)
        other.enrol(more[30:], "others")  # the same ids and more of them, other rows
        assert search_ids(gallery, more[5]) == near(np.concatenate([vectors, more[30:]]), more[5], 300)
        assert {hit.label for hit in gallery.search(more[40], 300, {"label": ["more", "others"]})} == {"others"}
        assert gallery.check().whole


@pytest.mark.parametrize("stored", [None, "int8"])
def test_a_restore_by_sqlite_into_the_open_file_is_noticed(tmp_path, path, vectors, stored):
    """A row that another program deleted is found once the copy with it is back, and so is a row that another process
    enrols after a restore under an id that this one knows as another row's."""
    with Gallery.open(path, timeout=5) as gallery:
        gallery._store.store_as(stored)
    backup(path, tmp_path / "copy")
    new = np.random.default_rng(1).normal(size=(2, 12))
    with Gallery.open(path, timeout=5) as gallery, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert search_ids(gallery, vectors[6], 1) == [7]
        execute_elsewhere(path, "DELETE FROM items WHERE id = 7")
        assert search_ids(gallery, vectors[6], 1) == near(vectors, vectors[6], 1, {7})
        backup(tmp_path / "copy", path)
        assert search_ids(gallery, vectors[6], 1) == [7] and gallery.stats()["lost"] == 0
        gallery.enrol(new[:1], "one")
        assert search_ids(gallery, new[0], 1) == [201]
        backup(tmp_path / "copy", path)
        with Gallery.open(path) as other:
            other.enrol(new[1:], "other")
        assert search_ids(gallery, new[1], 1) == [201] and gallery.search(new[1], 1)[0].label == "other"
        assert search_ids(gallery, new[0]) == near(np.concatenate([vectors, new[1:]]), new[0], 300)


def test_the_record_of_changes_is_bounded_and_who_missed_some_reads_all(path, vectors, monkeypatch):
    monkeypatch.setattr(sqlite, "FEW_CHANGES", 10)
    monkeypatch.setattr(sqlite_file, "TRANSACTIONS", 20)
    with Gallery.open(path) as gallery, Gallery.open(path) as late, Gallery.open(path) as close:
        assert len(search_ids(late, vectors[0])) == len(search_ids(close, vectors[0])) == 200
        reads = count_loads(close, monkeypatch)
        for n in range(25):
            gallery.relabel(list(range(1, 101)), f"round {n}")
            assert close.search(vectors[0], 1)[0].label == f"round {n}"
        assert not reads, "who follows does not read all rows"
        counts = [f"SELECT count(*) FROM {table}" for table in ("changes", "transactions")]
        with closing(sqlite3.connect(path)) as connection:
            assert [connection.execute(count).fetchone()[0] for count in counts] == [210, 20]
        assert late.labels() == close.labels() == gallery.labels() and late.labels()["round 24"] == 100


def count_loads(gallery, monkeypatch):
    """Grows with every reading of all rows."""
    loads, before = [], gallery._store.index._load
    monkeypatch.setattr(gallery._store.index, "_load", lambda *words: loads.append(1) or before(*words))
    return loads


def test_another_gallery_that_is_put_there_underneath_is_refused(tmp_path, path, vectors):
    with Gallery.open(tmp_path / "other", dim=12) as gallery:
        gallery.enrol(-vectors, "other")
    with Gallery.open(path, timeout=5) as gallery:
        gallery.search(vectors[0])
        backup(tmp_path / "other", path)
        for call in (lambda: gallery.search(vectors[0]), lambda: gallery.enrol(2 + vectors, "x"), gallery.stats):
            with pytest.raises(StoreUnavailable, match="holds another gallery"):
                finish(call)
    with Gallery.open(path) as gallery:
        assert set(gallery.labels()) == {"other"} and gallery.check().whole


def test_nothing_waits_for_a_call_that_does_not_end(path, vectors):
    with Gallery.open(path, timeout=0.2) as gallery:
        gallery.search(vectors[0])
        gallery._store.read_lock.__enter__()
        try:
            for call in (lambda: gallery.search(vectors[0]), gallery.stats, gallery.labels):
                with pytest.raises(TimeoutError, match=r"busy with another call of this process; waited 0.2 s"):
                    finish(call)
        finally:
            gallery._store.read_lock.__exit__(None, None, None)
        assert search_ids(gallery, vectors[0], 1) == [1]


def damage(draw, content):
    """One of: a bit anywhere, of a page's head, of an inner page's key; a page of zeros, a page twice, a torn end."""
    kind, pages = int(draw.integers(0, 6)), len(content) // 4096
    page = 4096 * int(draw.integers(0, pages))
    if kind == 0:
        content[int(draw.integers(0, len(content)))] ^= 1 << int(draw.integers(0, 8))
    elif kind == 1:
        content[page + int(draw.integers(0, 64))] ^= 1 << int(draw.integers(0, 8))
    elif kind == 2:
        content[page : page + 4096] = bytes(4096)
    elif kind == 3:
        other = 4096 * int(draw.integers(0, pages))
        content[page : page + 4096] = content[other : other + 4096]
    elif kind == 4:
        page = int(draw.choice([at for at in range(0, len(content), 4096) if content[at] in (2, 5)]))
        cells = int.from_bytes(content[page + 5 : page + 7], "big")
        content[page + int(draw.integers(cells, 4096))] ^= 1 << int(draw.integers(0, 8))
    else:
        del content[int(draw.integers(0, len(content))) :]
    return f"kind {kind}, page {page // 4096}"


@pytest.mark.parametrize("opened", [False, True], ids=["closed", "open"])
def test_any_damage_is_said_or_harmless_and_nothing_hangs(tmp_path, path, vectors, opened, monkeypatch):
    """Half of them under an open gallery, which has everything or nothing of the file in memory."""
    monkeypatch.setattr(sqlite_file, "BATCH", 16)
    monkeypatch.setattr("nearkin.gallery.stores.sqlite_file.PRAGMAS", ("journal_mode = WAL", "cache_size = 1"))
    original = path.read_bytes()
    with Gallery.open(path) as gallery:
        truth = {hit.id: hit for hit, _ in gallery.rows()}
    draw, noticed = np.random.default_rng(int(opened)), 0
    for n in range(20 * FAULTS):
        content, place = bytearray(original), tmp_path / f"torn-{n}"
        what = damage(draw, content)
        place.write_bytes(original if opened else content)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                with Gallery.open(place, timeout=5) as gallery:
                    if opened:
                        gallery.search(vectors[0]) if n % 2 else gallery.stats()
                        place.write_bytes(content)
                    hits = finish(lambda: gallery.search(vectors[0], 300), 30)
                    assert all(truth[hit.id]._replace(similarity=hit.similarity) == hit for hit in hits), what
                    assert len({hit.id for hit in hits}) == len(hits), what
                    assert len(hits) == 200 or warned, f"{what}: rows are missing without a warning"
                    finish(gallery.stats, 30)
                    finish(gallery.check, 30)
                    finish(lambda: gallery.enrol(vectors[:5] + 1, "new"), 30)
            except (ValueError, OSError):
                noticed += 1
            try:
                with Gallery.open(place, timeout=5) as gallery:
                    saved, _ = finish(gallery.repair, 30)
                    assert len(finish(lambda: gallery.search(vectors[0], 300), 30)) == saved, what
            except (ValueError, OSError):
                noticed += 1
            noticed += bool(warned)
    assert noticed > 5 * FAULTS


# ---- a refresh that is interrupted


CUTS = [(Matrix, "append", 3), (Columns, "append", 2), (sqlite_file, "read_after", 4)]


@pytest.mark.parametrize("where, name, nth", CUTS, ids=[f"{name}-{nth}" for _, name, nth in CUTS])
@pytest.mark.parametrize("later", [False, True], ids=["first refresh", "later refresh"])
def test_a_look_that_is_cut_short_leaves_nothing(path, vectors, monkeypatch, where, name, nth, later):
    monkeypatch.setattr(sqlite_file, "BATCH", 40)
    more = np.random.default_rng(2).normal(size=(100, 12))
    with Gallery.open(path, timeout=5) as gallery:
        if later:
            gallery.search(vectors[0])
            with Gallery.open(path) as other:
                other.enrol(more, "more")
                other.remove(5)
                other.relabel(6, "six")
        calls, old = [], getattr(where, name)

        def cut(*arguments):
            calls.append(None)
            if len(calls) == min(nth, 2 if later else nth):
                raise KeyboardInterrupt
            return old(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(where, name, cut)
            with pytest.raises(KeyboardInterrupt):
                gallery.search(vectors[0])
        everything = np.concatenate([vectors, more]) if later else vectors
        assert search_ids(gallery, vectors[0], 400) == near(everything, vectors[0], 400, {5} if later else ())
        assert finish(gallery.stats)["rows"] == (299 if later else 200) and finish(gallery.stats)["lost"] == 0
        assert (finish(gallery.labels).get("six") == 1) == later


def test_searches_that_fail_leave_no_rows_in_memory(path, vectors, monkeypatch):
    monkeypatch.setattr(sqlite_file, "BATCH", 40)
    original = path.read_bytes()
    damaged_bytes = bytearray(original)
    damaged_bytes[-3 * 4096 : -3 * 4096 + 8] = bytes(8)
    path.write_bytes(damaged_bytes)
    with Gallery.open(path, timeout=5) as gallery:
        for _ in range(3):
            with pytest.raises(ValueError, match="the file is damaged"):
                gallery.search(vectors[0])
        path.write_bytes(original)
        gallery._store.release()
        assert search_ids(gallery, vectors[0]) == near(vectors, vectors[0], 300)


# ---- a file that is replaced or deleted


posix = pytest.mark.skipif(os.name == "nt", reason="Windows does not let an open file be replaced")


@posix
@pytest.mark.parametrize("how", ["replaced", "deleted"])
@pytest.mark.parametrize("wrote", [False, True], ids=["read before", "wrote before"])
def test_a_file_that_is_replaced_or_deleted_underneath_is_not_written(tmp_path, path, vectors, how, wrote):
    with Gallery.open(tmp_path / "new", dim=12) as gallery:
        gallery.enrol(-vectors[:50], "new")
    with Gallery.open(path, timeout=5) as gallery:
        gallery.search(vectors[0])
        if wrote:
            gallery.enrol(3 + vectors[:9], "in the log")
        os.replace(tmp_path / "new", path) if how == "replaced" else path.unlink()
        for call in (
            lambda: gallery.enrol(9 + vectors, "nowhere"),
            lambda: gallery.remove(1),
            lambda: gallery.search(vectors[0]),
            gallery.stats,
            lambda: gallery.get(1),
        ):
            with pytest.raises(StoreUnavailable, match="the file was replaced or deleted while the gallery was open"):
                finish(call)
    if how == "deleted":
        assert not path.exists()
        return
    for ending in ("-wal", "-shm"):
        Path(f"{path}{ending}").unlink(missing_ok=True)
    with Gallery.open(path) as gallery:
        assert gallery.labels() == {"new": 50} and gallery.check().whole
        assert gallery.enrol(9 + vectors, "now").added == 200


@posix
def test_a_file_that_is_replaced_while_it_is_written_is_not_acknowledged(tmp_path, path, vectors, monkeypatch):
    shutil.copy(path, tmp_path / "new")
    with Gallery.open(path, timeout=5) as gallery:
        gallery.search(vectors[0])
        old = type(gallery._store).write_facts

        def replaced(writer, facts):
            old(writer, facts)
            os.replace(tmp_path / "new", path)

        monkeypatch.setattr(gallery._store, "write_facts", replaced)
        with pytest.raises(StoreUnavailable, match="went into the file that is gone"):
            gallery.enrol(-vectors[0], "x")


@pytest.mark.parametrize("which", ["another gallery", "older", "newer", "its own"])
def test_a_log_is_never_mixed_into_another_file(tmp_path, path, vectors, which):
    """A process was killed, its log is left, and the file is replaced."""
    older, newer, other = tmp_path / "older", tmp_path / "newer", tmp_path / "other"
    shutil.copy(path, older)
    with Gallery.open(other, dim=12) as gallery:
        gallery.enrol(-vectors, "other")
    left = tmp_path / "left"
    with Gallery.open(path) as gallery:
        gallery.enrol(1 + vectors[:20], "a")
        gallery._store._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        gallery.enrol(2 + vectors[:20], "b")
        gallery.enrol(3 + vectors[:20], "c")
        for ending in ("", "-wal"):
            shutil.copy(f"{path}{ending}", f"{left}{ending}")
        gallery.enrol(4 + vectors[:20], "d")
    shutil.copy(path, newer)
    if which != "its own":
        shutil.copy({"another gallery": other, "older": older, "newer": newer}[which], left)
        with pytest.raises(ValueError, match=r"left-wal is not the log of this file.*Move left-wal and left-shm away"):
            Gallery.open(left)
        Path(f"{left}-wal").unlink()
    with Gallery.open(left) as gallery:
        assert gallery.check().whole
        assert len(gallery.labels()) == {"another gallery": 1, "older": 40, "newer": 44, "its own": 43}[which]


@posix
def test_the_service_answers_503_where_the_file_is_gone(path, vectors):
    pytest.importorskip("fastapi", reason="the service needs pip install 'nearkin[serve]'")
    pytest.importorskip("httpx2", reason="its tests need httpx2")
    from starlette.testclient import TestClient

    from nearkin.web import build

    with Gallery.open(path) as gallery:
        app = build(gallery, pictures=False)
        with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
            request = {"item": vectors[0].tolist()}
            assert client.post("/api/vectors/search", json=request).status_code == 200
            path.unlink()
            assert client.post("/api/vectors/search", json=request).status_code == 503
            new = {"items": [(-vectors[0]).tolist()], "label": "x"}
            assert client.post("/api/vectors/enrol", json=new).status_code == 503
    assert not path.exists()


@posix
def test_closing_a_gallery_whose_file_was_replaced_leaves_the_new_log_alone(tmp_path, path, vectors):
    shutil.copy(path, tmp_path / "new")
    gallery = Gallery.open(path)
    gallery.enrol(1 + vectors[:9], "old")
    os.replace(tmp_path / "new", path)
    for ending in ("-wal", "-shm"):
        Path(f"{path}{ending}").unlink()
    with Gallery.open(path) as new:
        new.enrol(2 + vectors[:20], "new")
        gallery.close()
        assert Path(f"{path}-wal").stat().st_size and new.check().whole
    with Gallery.open(path) as new:
        assert new.check().whole and new.labels()["new"] == 20 and "old" not in new.labels()


@pytest.mark.parametrize("log", [False, True], ids=["without a log", "with a log"])
@pytest.mark.parametrize("which", ["another gallery", "older"])
def test_a_copy_into_the_open_file_is_noticed_before_anything_is_written(tmp_path, path, vectors, which, log):
    """As `cp` does it, which keeps the file's own number."""
    new = tmp_path / "new"
    shutil.copy(path, new)
    if which == "another gallery":
        new.unlink()
        with Gallery.open(new, dim=12) as gallery:
            gallery.enrol(-vectors, "new")
    with Gallery.open(path) as gallery:
        gallery.enrol(1 + vectors[:20], "a")
        gallery._store._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        gallery.search(vectors[0])
        if log:
            gallery.enrol(2 + vectors[:20], "b")
        path.write_bytes(new.read_bytes())
        for call in (lambda: gallery.enrol(3 + vectors, "c"), lambda: gallery.search(vectors[0]), gallery.stats):
            with pytest.raises(StoreUnavailable, match="other bytes were copied into the file"):
                finish(call)


def test_a_file_that_is_written_back_and_copied_by_sqlite_stays_the_same(tmp_path, path, vectors):
    """What SQLite itself does to a file is no reason to refuse it, nor is a log that a kill leaves after it."""
    backup(path, tmp_path / "copy")
    with Gallery.open(path) as gallery, Gallery.open(path) as other:
        for n in range(6):
            gallery.enrol(n + 1 + vectors[:5], "more")
            other.enrol(n + 10 + vectors[:5], "others")
            if n % 2:
                other._store._writer.execute("PRAGMA wal_checkpoint(PASSIVE)" if n == 1 else "PRAGMA wal_checkpoint")
            assert len(search_ids(gallery, vectors[0])) == len(search_ids(other, vectors[0])) == 210 + 10 * n
        gallery._store._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        backup(tmp_path / "copy", path)
        gallery.enrol(-vectors[:5], "after")
        for ending in ("", "-wal"):
            shutil.copy(f"{path}{ending}", f"{tmp_path / 'left'}{ending}")
        assert len(search_ids(other, vectors[0])) == 205
    with Gallery.open(tmp_path / "left") as gallery:
        assert gallery.check().whole and len(search_ids(gallery, vectors[0])) == 205


def test_a_log_whose_file_is_gone_does_not_come_back(tmp_path, path, vectors):
    with Gallery.open(path) as gallery:
        gallery.enrol(-vectors, "x")
        shutil.copy(f"{path}-wal", tmp_path / "left-wal")
    with Gallery.open(tmp_path / "left", dim=12) as gallery:
        gallery.enrol(vectors[:5], "y")
        assert gallery.labels() == {"y": 5} and gallery.check().whole


# ---- what filters keep


def test_keys_that_no_row_has_cost_nothing_and_others_are_bounded(tmp_path, vectors, monkeypatch):
    monkeypatch.setattr(memory_index, "MAX_COLUMNS", 4)
    many = np.random.default_rng(3).normal(size=(2000, 12))
    metadata = [{f"key {n}": i % (n + 2) for n in range(12)} for i in range(2000)]
    with Gallery.open(tmp_path / "many", dim=12) as gallery:
        gallery.enrol(many, "x", metadata)
        gallery.search(many[0], 1, {"key 0": 1, "unknown": 2})
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        for n in range(200):
            assert search_ids(gallery, many[0], 1, **{f"unknown {n}": n}) == []
        after = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert after - before < 100_000
        for n in [*range(12), 3, 0]:
            right = [i + 1 for i in range(2000) if metadata[i][f"key {n}"] == 1]
            assert sorted(search_ids(gallery, many[0], 2000, **{f"key {n}": 1})) == right
        assert len(gallery._store.index._loaded.columns._columns) == 4
        gallery.enrol(-many[0], "x", {"unknown 7": 1})
        assert search_ids(gallery, many[0], 5, **{"unknown 7": 1}) == [2001]


# ---- the rest


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="permissions of folders are those of POSIX here")
def test_a_gallery_in_a_folder_that_may_only_be_read_is_searched(path, vectors):
    folder = Path(tempfile.mkdtemp())
    user = os.geteuid()
    try:
        shutil.copy(path, folder / "g")
        (folder / "g").chmod(0o444)
        folder.chmod(0o555)
        os.seteuid(65534 if user == 0 else user)
        with Gallery.open(folder / "g", timeout=5) as gallery:
            assert search_ids(gallery, vectors[3], 10) == near(vectors, vectors[3], 10)
            gallery.warm()
            assert gallery.stats()["rows"] == 200 and gallery.check().whole
            with pytest.raises(ValueError, match="read"):
                gallery.enrol(-vectors[0], "x")
    finally:
        os.seteuid(user)
        folder.chmod(0o755)
        assert [one.name for one in folder.iterdir()] == ["g"]
        shutil.rmtree(folder)


@pytest.mark.parametrize("what", ["unreadable", "another state", "no room"])
def test_an_index_that_is_of_no_use_is_made_again(tmp_path, path, vectors, monkeypatch, what):
    faiss = pytest.importorskip("faiss")
    monkeypatch.setattr(hnsw, "EXACT", 90)
    others = np.random.default_rng(4).normal(size=(100, 12))
    shutil.copy(path, tmp_path / "copy")
    with Gallery.open(path) as gallery:
        gallery.enrol(others[:50], "x")
        gallery.warm()
    rows = np.concatenate([vectors, others[:50]])
    if what == "unreadable":  # its checksum is right: FAISS wrote it, another one than this

        class Strange:
            def tobytes(self):
                return b"IHN9" + bytes(1000)

        with monkeypatch.context() as patch:
            patch.setattr(faiss, "serialize_index", lambda index: Strange())
            with Gallery.open(path) as gallery:
                gallery.reindex()
    elif what == "another state":
        shutil.copy(tmp_path / "copy", path)
        with Gallery.open(path) as gallery:
            gallery.enrol(others[50:80], "x")
        rows = np.concatenate([vectors, others[50:80]])
    else:
        Path(f"{path}.hnsw").unlink()
        Path(f"{path}.hnsw").mkdir()
    with Gallery.open(path) as gallery:
        if what == "no room":
            with pytest.warns(RuntimeWarning, match="could not be written.*it is in memory"):
                gallery.warm()
        else:
            gallery.warm()
            assert f"the file was {'of ' if what != 'unreadable' else ''}{what}" in gallery.stats()["index"]
            assert gallery.check().whole
        assert "HNSW, recall@10" in gallery.stats()["index"]
        assert search_ids(gallery, rows[-1], 5) == near(rows, rows[-1], 5)


@pytest.mark.parametrize("nth", [1, 2, 3, 4, 5])
def test_a_repair_that_is_killed_between_its_renames_is_finished_at_the_next_opening(path, vectors, monkeypatch, nth):
    execute_elsewhere(path, "UPDATE items SET label = 'x' WHERE id = 7")
    calls, replace = [], os.replace

    def killed(source, target):
        calls.append(None)
        if len(calls) >= nth:
            raise KeyboardInterrupt
        replace(source, target)

    with Gallery.open(path) as gallery, monkeypatch.context() as patch:
        patch.setattr(repair.os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            gallery.repair()
        patch.undo()
        if nth > 1:
            assert len(search_ids(gallery, vectors[0])) == 199
    with Gallery.open(path, create=False) as gallery:
        if nth == 1:
            gallery.repair()
        assert search_ids(gallery, vectors[0]) == near(vectors, vectors[0], 300, {7}) and gallery.check().whole
    names = {one.name for one in path.parent.iterdir()}
    assert names == {"g", "g.damaged-1"}
    with closing(sqlite3.connect(path.with_name("g.damaged-1"))) as damaged:
        assert damaged.execute("SELECT count(*) FROM items").fetchone() == (200,)


@pytest.mark.parametrize("scale", [2.0**660, 1e200, 1e-200, 5e-324])
def test_vectors_of_any_size_are_normalised(tmp_path, vectors, scale):
    rows = np.sign(vectors) if scale == 5e-324 else vectors
    with Gallery.open(tmp_path / "scaled", dim=12) as gallery:
        gallery.enrol(rows * scale, LABELS)
        assert [hit.id for hit in gallery.search(vectors[3] * 1e200, 5)] == near(rows, vectors[3], 5)
        np.testing.assert_allclose(gallery.vectors([1])[0], unit(rows[:1])[0], rtol=3e-7)
        with pytest.raises(ValueError, match="must be finite, got NaN or Inf in 1 of 1"):
            gallery.search(np.full(12, np.inf))
        with pytest.raises(ValueError, match="must not be all 0"):
            gallery.search(np.zeros(12))
