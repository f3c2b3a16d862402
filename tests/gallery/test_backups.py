"""Backup, restore, copy and vacuum on both stores: every point comes back as it was, whole, or not at all."""

import json
import os
import random
import shutil
import threading
from contextlib import closing
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from test_gallery import STORES, a_run, execute_directly, pictures, place_of

from nearkin import gallery as room
from nearkin.core import files
from nearkin.gallery import Gallery, backup_points, backups, opening
from nearkin.gallery.schema import Facts, new_row, pack, unit
from nearkin.gallery.stores import repair, sqlite_bulk

DIM = 6


@pytest.fixture(params=STORES)
def place(request, tmp_path):
    return place_of(request.param, tmp_path)


@pytest.fixture(params=STORES)
def target(request, tmp_path):
    (tmp_path / "target").mkdir()
    return place_of(request.param, tmp_path / "target")


@pytest.fixture
def vectors():
    return np.random.default_rng(0).normal(size=(60, DIM))


def content_of(place) -> dict:
    """Every row with everything that is stored of it."""
    with closing(opening.store_at(place, 30)) as store, store.snapshot() as snapshot:
        batches = list(snapshot.rows())
        assert not any(batch.damaged or batch.without_thumbnail for batch in batches)
        rows = {row.id: row for batch in batches for row in batch.rows}
        assert snapshot.facts.rows == len(rows)
        return rows


def rows_with_thumbnails(numbers):
    draws = [np.random.default_rng(n).normal(size=(1, DIM)) for n in numbers]
    return [
        new_row(sha256(b"%d" % n).digest(), f"label {n}", f"é{n}", {"n": n}, pack(unit(draw))[0], b"\x89PNG%d" % n)
        for n, draw in zip(numbers, draws, strict=True)
    ]


def changed(gallery, chance, step):
    """One random change of a gallery."""
    ids = [hit.id for hit, _ in gallery.rows()]
    kind = chance.choice(["add", "add", "remove", "relabel", "pictures"]) if ids else "add"
    if kind == "add":
        gallery.enrol(np.random.default_rng(100 + step).normal(size=(chance.randint(1, 9), DIM)), f"added {step}")
    elif kind == "pictures":
        gallery._store.add(rows_with_thumbnails(range(10 * step, 10 * step + 3)), False, [f"source {step}"])
    else:
        some = chance.sample(ids, min(len(ids), chance.randint(1, 5)))
        gallery.remove(some) if kind == "remove" else gallery.relabel(some, f"moved {step}")


# ---- points


def test_every_point_comes_back_as_it_was(place, target, tmp_path):
    chance, states = random.Random(3), {}
    with Gallery.open(place, dim=DIM) as gallery:
        for step in range(12):
            for _ in range(chance.randint(1, 4)):
                changed(gallery, chance, step)
            result = room.backup(place, tmp_path / "kept", full=step == 7)
            assert result.new and result.number == step + 1 and not result.damaged and not result.missing
            states[result.number] = content_of(place)
            assert result.rows == len(states[result.number])
        again = room.backup(place, tmp_path / "kept")
        assert not again.new and again.number == 12 and len(list((tmp_path / "kept").glob("point-*"))) == 12
    listed = room.check_backup(tmp_path / "kept")
    assert [state.rows for state in listed] == [len(rows) for rows in states.values()]
    assert [state.number for state in listed if state.full] == [1, 8] and not any(state.problem for state in listed)
    with closing(opening.store_at(place, 30)) as store:
        facts = store.facts()
    for number in (1, 5, 8, 12, 7, 11):
        result = room.restore(tmp_path / "kept", target, point=number, overwrite=True)
        assert result.point == number and content_of(target) == states[number]
    assert room.restore(tmp_path / "kept", target, overwrite=True).rows == len(states[12])
    with Gallery.open(target) as gallery:
        assert gallery.check().whole
        restored = gallery._store.facts()
        assert restored == facts.replace(beyond={})
        assert gallery.enrol(np.full((1, DIM), 0.5), "after").ids == [facts.next_id], "ids are not used again"
    result = room.backup(target, tmp_path / "kept")
    assert result.new and result.added == 1 and result.removed == 0, "the restored gallery continues the backup"


def test_a_point_has_what_changed_only(place, tmp_path):
    with Gallery.open(place, dim=DIM) as gallery:
        gallery.enrol(np.random.default_rng(1).normal(size=(3000, DIM)), "a")
        first = room.backup(place, tmp_path / "kept")
        gallery.relabel([5], "b")
        gallery.remove([6, 7])
        gallery.enrol(np.ones(DIM), "c")
        second = room.backup(place, tmp_path / "kept")
    assert (second.added, second.changed, second.removed, second.rows) == (1, 1, 2, 2999)
    assert first.path.stat().st_size > 3000 * 4 * DIM and second.path.stat().st_size < 2000


def test_a_point_is_one_state_while_others_write(place, tmp_path, vectors, monkeypatch):
    """Between any two batches that are read, another connection adds, removes and relabels."""
    monkeypatch.setattr("nearkin.gallery.stores.sqlite_file.BATCH", 7)
    monkeypatch.setattr("nearkin.gallery.stores.postgres_bulk.ROWS", 7)
    monkeypatch.setattr(backups, "FETCHED", 7)
    chance, steps = random.Random(5), iter(range(1000))
    with Gallery.open(place, dim=DIM) as other:
        other.enrol(vectors, [f"label {i % 7}" for i in range(60)])
        add = backup_points.PointWriter.add

        def meanwhile(writer, rows):
            changed(other, chance, next(steps))
            add(writer, rows)

        for n in range(4):
            other.enrol(np.random.default_rng(50 + n).normal(size=(30, DIM)), f"round {n}")
            other.relabel([hit.id for hit, _ in other.rows()][::3], f"moved in round {n}")
            before = content_of(place)
            with monkeypatch.context() as patch:
                patch.setattr(backup_points.PointWriter, "add", meanwhile)
                room.backup(place, tmp_path / "kept")
            assert content_of(place) != before
            room.restore(tmp_path / "kept", tmp_path / f"restored {n}")
            assert content_of(tmp_path / f"restored {n}") == before
            if n == 3:
                room.copy(place, tmp_path / "copy")
                assert content_of(tmp_path / "copy") == content_of(place)


def test_a_damaged_row_keeps_its_last_intact_state(place, tmp_path, vectors):
    with Gallery.open(place, dim=DIM) as gallery:
        gallery.enrol(vectors[:20], "a")
    room.backup(place, tmp_path / "kept")
    intact = content_of(place)
    for one, other in (
        ("UPDATE items SET label = 'b' WHERE id = 3",) * 2,
        ("UPDATE items SET sum = x'00' WHERE id = 4", r"UPDATE items SET sum = '\x00' WHERE id = 4"),
        ("DELETE FROM items WHERE id = 9",) * 2,
    ):
        execute_directly(place, one, other)
    with Gallery.open(place, dim=DIM) as gallery:
        gallery.enrol(vectors[20:21], "c")
    result = room.backup(place, tmp_path / "kept")
    # Row 3 has its old checksum, which is why it is not read at all.
    assert result.damaged == [4] and result.missing == 1 and (result.added, result.removed) == (1, 1)
    room.restore(tmp_path / "kept", tmp_path / "restored")
    restored = content_of(tmp_path / "restored")
    assert {i: row for i, row in restored.items() if i < 21} == {i: row for i, row in intact.items() if i != 9}
    copied = room.copy(place, tmp_path / "copy")
    assert copied.damaged == [3, 4] and copied.rows == 18 and sorted(content_of(tmp_path / "copy"))[:3] == [1, 2, 5]


# ---- damage


@pytest.fixture
def kept(tmp_path, vectors):
    """A backup of four points: full, part, full, part."""
    with Gallery.open(tmp_path / "g", dim=DIM) as gallery:
        for n in range(4):
            gallery.enrol(vectors[3 * n : 3 * n + 3], f"label {n}")
            gallery.relabel([1], f"first {n}")
            room.backup(tmp_path / "g", tmp_path / "kept", full=n == 2)
    return tmp_path / "kept"


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_every_flipped_bit_of_a_backup_is_noticed(kept, number):
    path = next(kept.glob(f"point-00000{number}.*"))
    original = path.read_bytes()
    draw = np.random.default_rng(number)
    for position in range(len(original)):
        damaged = bytearray(original)
        damaged[position] ^= 1 << int(draw.integers(8))
        path.write_bytes(damaged)
        problems = {state.number for state in room.check_backup(kept) if state.problem}
        assert problems == ({number, number + 1} if number in (1, 3) else {number}), position


def test_a_damaged_backup_is_refused_by_name_and_the_latest_whole_point_restored(kept, tmp_path, target):
    last = kept / "point-000004.part"
    last.write_bytes(last.read_bytes()[:-40])
    sentence = (
        r"point-000004.part: is damaged or cut short.*nothing was restored, the latest whole point is 3: --point 3"
    )
    with pytest.raises(ValueError, match=sentence):
        room.restore(kept, target)
    with pytest.raises(ValueError, match="no such gallery"), Gallery.open(target, create=False):
        pass
    assert room.restore(kept, target, latest_whole=True).point == 3
    assert len(content_of(target)) == 9
    with pytest.raises(ValueError, match=r"point-000004.part: is damaged.*begin anew with --full"):
        room.backup(tmp_path / "g", kept)
    assert room.backup(tmp_path / "g", kept, full=True).number == 5
    third = kept / "point-000003.full"
    content = bytearray(third.read_bytes())
    content[200] ^= 1
    third.write_bytes(content)
    with pytest.raises(ValueError, match=r"point-000003.full: is damaged between bytes .* latest whole point is 5"):
        room.restore(kept, target, point=3, overwrite=True)
    assert len(content_of(target)) == 9, "the gallery that was there is untouched"


def test_points_that_do_not_belong_together_are_refused(kept, tmp_path, vectors):
    other = tmp_path / "other"
    shutil.copytree(kept, other)
    (other / "point-000003.full").unlink()
    with pytest.raises(ValueError, match=r"point-000004.part: point 3, which it continues, is missing.*point is 2"):
        room.restore(other, tmp_path / "r")
    shutil.copy(kept / "point-000001.full", other / "point-000003.full")
    with pytest.raises(ValueError, match=r"point-000004.part: is damaged between bytes"):
        room.restore(other, tmp_path / "r")
    with Gallery.open(tmp_path / "another", dim=DIM) as gallery:
        gallery.enrol(vectors, "x")
    with pytest.raises(ValueError, match="is the backup of another gallery"):
        room.backup(tmp_path / "another", kept)
    for point in kept.iterdir():
        point.write_bytes(b"x" * 500)
    with pytest.raises(ValueError, match="no point of this backup is whole"):
        room.restore(kept, tmp_path / "r", latest_whole=True)
    assert not (tmp_path / "r").exists()


# ---- places


def test_nothing_is_overwritten_unless_told(kept, tmp_path, target, vectors):
    with Gallery.open(target, dim=DIM) as gallery:
        gallery.enrol(vectors[:2], "present")
    present = content_of(target)
    for call in (lambda: room.restore(kept, target), lambda: room.copy(tmp_path / "g", target)):
        with pytest.raises(ValueError, match=r"exists already; choose another place, or --overwrite"):
            call()
        assert content_of(target) == present
    room.restore(kept, target, overwrite=True)
    assert len(content_of(target)) == 12
    previous = f"{target}.previous-1" if "://" not in target else f"{target}_previous_1"
    assert content_of(previous) == present


def test_a_file_that_is_no_gallery_is_not_overwritten(kept, tmp_path):
    (tmp_path / "letter").write_text("dear")
    with pytest.raises(ValueError, match="letter: is no gallery, and is not overwritten"):
        room.restore(kept, tmp_path / "letter", overwrite=True)
    (tmp_path / "new-wal").write_bytes(b"left")
    with pytest.raises(ValueError, match="new-wal lies there without its file"):
        room.restore(kept, tmp_path / "new")
    assert (tmp_path / "letter").read_text() == "dear" and (tmp_path / "new-wal").read_bytes() == b"left"


BAD = [
    (lambda p: room.backup(p / "none", p / "b"), "none: no such gallery"),
    (lambda p: room.backup(p / "g", p / "g"), "g: a backup is a folder, this is a file"),
    (lambda p: room.backup(p / "g", p), "has other files and no backup"),
    (lambda p: room.backup(p / "g", p / "a" / "b"), "the folder .*a does not exist"),
    (lambda p: room.backup(p / "g", p / "b", timeout=0), "timeout must be > 0"),
    (lambda p: room.restore(p / "none", p / "r"), "none: no such folder; nearkin gallery backup"),
    (lambda p: room.restore(p / "empty", p / "r"), "empty: has no backup"),
    (lambda p: room.restore(p / "kept", p / "r", point=9), "point must be one of 1, 2, 3, 4, got 9"),
    (lambda p: room.restore(p / "kept", p / "r", point=0), "point must be >= 1, got 0"),
    (lambda p: room.restore(p / "kept", p / "r", point=True), "point must be a whole number, got True"),
    (lambda p: room.restore(p / "kept", p / "r", point=1, latest_whole=True), "exclude each other"),
    (lambda p: room.restore(p / "kept", p / "empty"), "a gallery is a file, this is a folder"),
    (lambda p: room.restore(p / "kept", p / "a" / "r"), "the folder .*a does not exist"),
    (lambda p: room.restore(p / "kept", "mysql://x"), "must be a file or postgresql"),
    (lambda p: room.copy(p / "none", p / "r"), "none: no such gallery"),
    (lambda p: room.copy(p / "g", p / "g", overwrite=True), "target must be another place than the source"),
    (lambda p: room.check_backup(p / "empty"), "empty: has no backup"),
    (lambda p: room.check_backup(p / "g"), "g: a backup is a folder, this is a file"),
]


@pytest.mark.parametrize("call, sentence", BAD, ids=[sentence for _, sentence in BAD])
def test_bad_input_is_one_sentence(kept, tmp_path, call, sentence):
    (tmp_path / "empty").mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises((ValueError, TypeError), match=sentence) as refused:
        call(tmp_path)
    assert "\n" not in str(refused.value) and sorted(tmp_path.rglob("*")) == before


# ---- interrupted


def interrupting(nth):
    calls = []

    def progress(done, total):
        calls.append(done)
        if len(calls) == nth:
            raise KeyboardInterrupt

    return progress


def test_ctrl_c_leaves_nothing_behind(place, target, tmp_path, vectors, monkeypatch):
    monkeypatch.setattr("nearkin.gallery.stores.sqlite_file.BATCH", 7)
    monkeypatch.setattr("nearkin.gallery.stores.postgres_bulk.ROWS", 7)
    monkeypatch.setattr(backup_points, "ROW_BYTES", 1000)
    with Gallery.open(place, dim=DIM) as gallery:
        gallery.enrol(vectors, "a")
        expected = content_of(place)
        for nth in (1, 2, 5):
            with pytest.raises(KeyboardInterrupt):
                room.backup(place, tmp_path / "kept", progress=interrupting(nth))
            assert not list((tmp_path / "kept").iterdir())
        room.backup(place, tmp_path / "kept")
        for nth in (1, 2, 5):
            for call in (
                lambda p: room.restore(tmp_path / "kept", target, progress=p),
                lambda p: room.copy(place, target, progress=p),
            ):
                with pytest.raises(KeyboardInterrupt):
                    call(interrupting(nth))
                with pytest.raises(ValueError, match="no such gallery"), Gallery.open(target, create=False):
                    pass
    assert not list((tmp_path / "target").iterdir())
    room.restore(tmp_path / "kept", target)
    assert content_of(target) == expected


@pytest.mark.parametrize("lock", [False, True], ids=["at the flush", "from the first byte on"])
def test_a_full_disk_is_one_sentence(kept, tmp_path, monkeypatch, lock):
    """Also where there is no room for who holds the lock: the sentence names the file that was asked for."""

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    if lock:
        monkeypatch.setattr(os, "write", full)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=r"point-000005.full could not be written \(No space left on device\)"):
        room.backup(tmp_path / "g", kept, full=True)
    for call in (lambda: room.restore(kept, tmp_path / "r"), lambda: room.copy(tmp_path / "g", tmp_path / "r")):
        with pytest.raises(ValueError, match=r"r could not be written \(No space left on device\); make room"):
            call()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("nth", [1, 2, 3, 4, 5])
def test_an_overwriting_restore_that_is_killed_between_its_renames_is_finished(kept, tmp_path, monkeypatch, nth):
    place, calls, replace = tmp_path / "target", [], os.replace
    with Gallery.open(place, dim=DIM) as gallery:
        gallery.enrol(np.eye(DIM), "old")
        old = content_of(place)

        def killed(source, target):
            calls.append(None)
            if len(calls) >= nth:
                raise KeyboardInterrupt
            replace(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", killed)
            with pytest.raises(KeyboardInterrupt):
                room.restore(kept, place, overwrite=True)
    assert (content_of(place) == old) == (nth == 1)
    if nth > 1:
        assert len(content_of(place)) == 12 and content_of(f"{place}.previous-1") == old
    assert {path.name for path in tmp_path.iterdir()} - {"target.previous-1"} == {"g", "kept", "target"}


def test_what_killed_processes_leave_is_removed(kept, tmp_path):
    (kept / ".point-000005.part.0123abcd").write_bytes(b"half")
    (tmp_path / ".r.load").write_bytes(b"half")
    with Gallery.open(tmp_path / "g") as gallery:
        gallery.relabel([2], "x")
    room.backup(tmp_path / "g", kept)
    room.restore(kept, tmp_path / "r")
    assert not list(kept.glob(".*")) and not list(tmp_path.glob(".*"))
    assert content_of(tmp_path / "r") == content_of(tmp_path / "g")


def test_a_gallery_that_is_not_finished_does_not_exist(target, vectors):
    facts = Facts(DIM)
    with closing(opening.store_at(target, 30)) as store:
        with store.load(facts, False) as loader:
            loader.remove([1])
            loader.add([])
        assert store.facts() is None
        with store.load(facts, False) as loader:
            loader.finish(facts, {})
        assert store.facts() == facts
        with store.load(facts.replace(dim=3), True):
            pass
        assert store.facts() == facts


def test_two_at_once_are_refused(kept, tmp_path):
    with (
        closing(files.Lock(kept / ".lock", "")),
        pytest.raises(ValueError, match="another process is writing a backup"),
    ):
        room.backup(tmp_path / "g", kept)
    lock = files.Lock(tmp_path / ".r.load-lock", "")
    with closing(lock), pytest.raises(ValueError, match="another process is writing a gallery there"):
        room.restore(kept, tmp_path / "r")


# ---- copies


def rounded(answer):
    """A server's labels are summed in another order."""
    identity, hits = answer
    candidates = [one._replace(confidence=round(one.confidence, 6)) for one in identity.candidates]
    numbers = {name: round(getattr(identity, name), 6) for name in ("confidence", "p_right", "p_unknown", "score")}
    return identity._replace(candidates=candidates, **numbers), hits


def test_copies_answer_alike_in_both_directions(tmp_path):
    run = a_run(tmp_path / "run", 0)
    first, second = str(tmp_path / "first"), place_of("postgres", tmp_path)
    paths = pictures(tmp_path / "photos", 12)
    with Gallery.open(first, run) as gallery:
        gallery.enrol(paths[:9], [f"label {i % 3}" for i in range(9)], [{"n": i} for i in range(9)])
        gallery.remove([4])
        gallery.relabel([5], "moved")
        gallery.calibrate()  # what it has learned goes along
    room.copy(first, second)
    room.copy(second, tmp_path / "third")
    answers = []
    for place in (first, second, tmp_path / "third"):
        with Gallery.open(place, run) as gallery:
            assert gallery.check().whole
            answers.append(
                [rounded(gallery.identify_with_hits(path, 5)) for path in paths]
                + [gallery.search(paths[0], 9, {"n": [1, 2, 8]}), gallery.thumbnail(1), gallery.fingerprint]
                + [gallery.labels(), gallery.stats()["sources"], gallery.stats()["calibrated"], gallery.get(5)]
                + [gallery.known(paths)]
            )
    assert answers[0] == answers[1] == answers[2]
    assert answers[0][0][0].confidence is not None and answers[0][13].startswith(b"\x89PNG")
    assert content_of(first) == content_of(second) == content_of(tmp_path / "third")
    with Gallery.open(first) as one, Gallery.open(tmp_path / "third") as other:
        assert one._store.facts().gallery != other._store.facts().gallery, "two galleries, whose backups are separate"


def test_the_stored_form_goes_with_a_copy_and_comes_back_from_postgres(tmp_path, vectors):
    first, second, third = str(tmp_path / "first"), place_of("postgres", tmp_path), str(tmp_path / "third")
    with Gallery.open(first, dim=len(vectors[0]), stored="int8") as gallery:
        gallery.enrol(vectors, "a")
    room.copy(first, second)
    room.copy(second, third)
    answers = []
    for place in (first, second, third):
        with Gallery.open(place) as gallery:
            answers.append(list(gallery.search(vectors[3], 5)))
            assert gallery.stats().get("stored") == (None if place == second else "int8")
    assert answers[0] == answers[1] == answers[2]
    with pytest.raises(ValueError, match="is for galleries in a file; PostgreSQL has its own index"):
        Gallery.open(second, stored="int8")


def test_notes_go_with_the_rows(place, target, tmp_path, vectors):
    with Gallery.open(place, dim=DIM) as gallery:
        gallery.enrol(vectors, "a")
        room.backup(place, tmp_path / "kept")
        gallery._store.edit("groups", lambda text, labels_of: ({}, '{"é": 1}'))
        assert room.backup(place, tmp_path / "kept").new and not room.backup(place, tmp_path / "kept").new
    room.copy(place, target)
    for overwritten in (False, True):
        if overwritten:
            room.restore(tmp_path / "kept", target, overwrite=True)
        with Gallery.open(target) as gallery:
            assert gallery._store.note("groups") == '{"é": 1}' and gallery._store.note("other") == ""
    room.restore(tmp_path / "kept", target, point=1, overwrite=True)
    with Gallery.open(target) as gallery:
        assert gallery._store.note("groups") == ""


# ---- vacuum


def test_vacuum_frees_space_and_no_reader_misses_a_change(place, vectors):
    many = np.random.default_rng(2).normal(size=(3000, DIM))
    with Gallery.open(place, dim=DIM) as gallery, Gallery.open(place, dim=DIM) as reader:
        gallery.enrol(many, "a")
        assert len(reader.search(many[0], 3000)) == 3000
        gallery.remove(list(range(1, 2901)))
        gallery.relabel([2950], "b")
        expected = content_of(place)
        before, after = gallery.vacuum()
        assert after < before / 4 if "://" not in place else after <= before
        assert len(reader.search(many[0], 3000)) == 100 and reader.labels() == {"a": 99, "b": 1}
        assert content_of(place) == expected and gallery.check().whole
        gallery.remove([2951])
        assert len(reader.search(many[0], 3000)) == 99
        gallery.enrol(vectors, "c")
        assert len(reader.search(many[0], 3000)) == 159


def test_a_vacuum_waits_for_the_writer_and_says_so(tmp_path, vectors):
    with (
        Gallery.open(tmp_path / "g", dim=DIM, timeout=0.2) as gallery,
        Gallery.open(tmp_path / "g", timeout=0.2) as other,
    ):
        gallery.enrol(vectors, "a")
        with other._store.transaction(), pytest.raises(TimeoutError, match="another process is writing to it"):
            gallery.vacuum()
        thread = threading.Thread(target=gallery.vacuum)
        thread.start()
        thread.join(30)
        assert not thread.is_alive() and gallery.check().whole


def test_a_reader_in_the_middle_of_a_vacuum_sees_one_state(tmp_path, vectors):
    with Gallery.open(tmp_path / "g", dim=DIM) as gallery, closing(opening.store_at(tmp_path / "g", 5)) as store:
        gallery.enrol(vectors, "a")
        gallery.remove(list(range(1, 31)))
        with store.snapshot() as snapshot:
            rows = snapshot.rows()
            gallery.vacuum()
            assert sum(len(batch.rows) for batch in rows) == 30
        assert gallery.check().whole and sqlite_bulk._size(tmp_path / "g") > 0 and repair.REPLACED


# ---- export


def test_parquet_has_everything(place, tmp_path, vectors):
    pytest.importorskip("pyarrow")
    from pyarrow import parquet

    from nearkin.data import vector_files

    with Gallery.open(place, dim=DIM) as gallery:
        gallery.enrol(vectors[:20], [f"label {i % 4}" for i in range(20)], [{"n": i} for i in range(20)])
        gallery._store.add(rows_with_thumbnails([5, 6]), False)
        gallery.remove([3])
        assert gallery.export(tmp_path / "all.parquet") == 21
        rows, hits = parquet.read_table(tmp_path / "all.parquet").to_pylist(), list(gallery.rows())
    assert [(row["id"], row["label"], json.loads(row["metadata"])) for row in rows] == [
        (hit.id, hit.label, hit.metadata) for hit, _ in hits
    ]
    np.testing.assert_array_equal(np.array([row["embedding"] for row in rows]), np.stack([row for _, row in hits]))
    assert rows[-1]["thumbnail"] == b"\x89PNG6" and rows[0]["thumbnail"] is None and rows[0]["quality"] is None
    assert rows[-1]["name"] == "é6"
    read = vector_files.contents(tmp_path / "all.parquet")
    assert read["embeddings"].shape == (21, DIM) and read["labels"].tolist()[:2] == ["label 0", "label 1"]


def test_faiss_finds_what_the_gallery_finds(place, tmp_path, vectors):
    faiss = pytest.importorskip("faiss")
    with Gallery.open(place, dim=DIM) as gallery:
        gallery.enrol(vectors, [f"label {i % 4}" for i in range(60)], [{"n": i} for i in range(60)])
        gallery.remove([3, 4])
        assert gallery.export(tmp_path / "all.faiss") == 58
        index = faiss.read_index(str(tmp_path / "all.faiss"))
        lines = [json.loads(line) for line in (tmp_path / "all.faiss.jsonl").read_text("utf-8").splitlines()]
        assert [(one["id"], one["label"], one["metadata"]) for one in lines] == [
            (hit.id, hit.label, hit.metadata) for hit, _ in gallery.rows()
        ]
        for query in np.random.default_rng(4).normal(size=(10, DIM)):
            scores, ids = getattr(index, "search_numpy", index.search)(unit(query[None]), 10)
            hits = gallery.search(query, 10)
            assert ids[0].tolist() == [hit.id for hit in hits]
            np.testing.assert_allclose(scores[0], [hit.similarity for hit in hits], atol=1e-6)
    assert sorted(path.name for path in tmp_path.glob("all*")) == ["all.faiss", "all.faiss.jsonl"]


@pytest.mark.parametrize("ending", ["jsonl", "parquet", "faiss"])
def test_an_export_that_fails_leaves_no_file(tmp_path, vectors, monkeypatch, ending):
    pytest.importorskip({"parquet": "pyarrow", "faiss": "faiss", "jsonl": "json"}[ending])

    def full(handle):
        raise OSError(28, "No space left on device")

    with Gallery.open(tmp_path / "g", dim=DIM) as gallery:
        gallery.enrol(vectors, "a")
        monkeypatch.setattr(files.os, "fsync", full)
        with pytest.raises(
            ValueError, match=rf"all.{ending} could not be written \(No space left on device\); make room"
        ):
            gallery.export(tmp_path / f"all.{ending}")
        assert not list(tmp_path.glob("*all*"))
        with pytest.raises(ValueError, match=r"the folder .* does not exist"):
            gallery.export(tmp_path / "none" / f"all.{ending}")


# ---- kills


@pytest.mark.slow
@pytest.mark.parametrize("during", ["backup", "restore", "copy", "vacuum", "migration"])
def test_killed_meanwhile(during, tmp_path, monkeypatch):
    """Four of the kills of `studies/backup_kills.py`, on SQLite."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "studies"))
    import backup_kills

    monkeypatch.setattr("nearkin.gallery.schema.FORMAT", 1)
    case = backup_kills.Case(during, str(tmp_path / "g"), str(tmp_path / "other"), tmp_path / "kept")
    assert backup_kills.study(case, 4, 2, None) == 0
