"""Damage in the write-ahead log of a gallery: nothing is lost, or a sentence says what; never without a word.

NEARKIN_FAULTS=10 damages ten times as often.
"""

import multiprocessing
import os
import shutil
import struct
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from nearkin.gallery import Gallery
from nearkin.gallery.stores import sqlite_file, wal_repair

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="the log is corrected where a file can be locked by fcntl"),
]

FAULTS = int(os.environ.get("NEARKIN_FAULTS", "1"))
LONG = 400  # dimensions whose rows get larger pages


class Left:
    """What a killed process left: a file, its log and, if asked for, the shared memory file. states: one per call."""

    def __init__(self, folder: Path, dim: int = 12, checkpointed: bool = False) -> None:
        self.folder, rows = folder, np.random.default_rng(0).normal(size=(300, dim))
        self.states, self.frame = [{}], 24 + sqlite_file.page_size(dim)
        with Gallery.open(folder / "origin", dim=dim) as gallery:
            for n in range(12):
                gallery.enrol(rows[20 * n : 20 * n + 20], f"label {n}", {"n": n})
                self.states.append(dict(visible(gallery)))
                if n % 3 == 2:
                    gallery.relabel([5 * n, 7 * n], f"moved {n}")
                    self.states.append(dict(visible(gallery)))
                    gallery.remove([11 * n])
                    self.states.append(dict(visible(gallery)))
            if checkpointed:
                gallery._store._writer.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
            for ending in ("", "-wal", "-shm"):
                shutil.copy(folder / f"origin{ending}", folder / f"left{ending}")
        self.log, self.final = (folder / "left-wal").read_bytes(), self.states[-1]
        self.frames = (len(self.log) - 32) // self.frame

    def opened(self, log: bytes, shared: bool):
        """Rows (or the error) and warnings of a gallery with this log."""
        for path in self.folder.glob("g*"):
            path.unlink()
        shutil.copy(self.folder / "left", self.folder / "g")
        (self.folder / "g-wal").write_bytes(log)
        if shared:
            shutil.copy(self.folder / "left-shm", self.folder / "g-shm")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                with Gallery.open(self.folder / "g", timeout=5) as gallery:
                    rows = dict(visible(gallery))
                    whole = gallery.check().whole
            except ValueError as error:
                rows, whole = str(error), False
        return rows, whole, " ".join(str(warning.message) for warning in caught)


def visible(gallery):
    return [(hit.id, (hit.label, vector.tobytes())) for hit, vector in gallery.rows()]


@pytest.fixture(scope="module", params=[12, LONG], ids=["pages of 4 KiB", "larger pages"])
def left(request, tmp_path_factory):
    return Left(tmp_path_factory.mktemp("left"), request.param)


def test_the_checksum_is_that_of_sqlite(left):
    """As SQLite's file format describes it, in a loop."""
    assert struct.unpack(">I", left.log[:4])[0] == wal_repair.MAGIC
    a = b = 0
    words = struct.unpack("<6I", left.log[:24])
    for x, y in zip(words[::2], words[1::2], strict=True):
        a = (a + x + b) % 2**32
        b = (b + y + a) % 2**32
    assert (a, b) == struct.unpack(">2I", left.log[24:32]) == wal_repair._header_sum(left.log[:32])
    for n in range(3):
        frame = left.log[32 + n * left.frame :][: left.frame]
        covered = frame[:8] + frame[24:]
        words = np.frombuffer(covered, "<u4").astype(np.uint32)
        continued = wal_repair._continued((a, b), wal_repair._products(words[None])[0], len(words))
        for x, y in zip(words[::2].tolist(), words[1::2].tolist(), strict=True):
            a = (a + x + b) % 2**32
            b = (b + y + a) % 2**32
        assert (a, b) == continued == struct.unpack(">2I", frame[16:24])


@pytest.mark.parametrize("shared", [False, True], ids=["log alone", "with -shm"])
def test_a_sound_log_is_left_alone(left, shared):
    rows, whole, said = left.opened(left.log, shared)
    assert rows == left.final and whole and not said and not list(left.folder.glob("g-wal.damaged*"))


@pytest.mark.parametrize("shared", [False, True], ids=["log alone", "with -shm"])
@pytest.mark.parametrize("checkpointed", [False, True], ids=["not written back", "written back"])
@pytest.mark.parametrize("dim", [12, LONG])
def test_no_flipped_bit_drops_a_transaction_without_a_word(tmp_path, dim, checkpointed, shared):
    left = Left(tmp_path, dim, checkpointed)
    draw, corrected = np.random.default_rng(7), 0
    heads = [32 + left.frame * n + at for n in (0, 2, left.frames // 2, left.frames - 1) for at in range(0, 24, 3)]
    places = [*range(0, 32, 3), *heads, *draw.integers(0, len(left.log), 40 * FAULTS).tolist()]
    for position in places:
        log = bytearray(left.log)
        log[position] ^= 1 << int(draw.integers(8))
        rows, whole, said = left.opened(bytes(log), shared)
        assert "its write-ahead log" in said, position
        assert (left.folder / "g-wal.damaged-1").read_bytes() == log
        if "nothing is lost; the damaged log is kept in g-wal.damaged-1" in said:
            corrected += 1
            assert rows == left.final and whole, (position, said)
        elif "transaction is lost" in said:
            assert rows == left.states[-2] and whole, (position, said)
        else:  # a page stays damaged: its rows are said to be damaged or missing
            assert isinstance(rows, str) or rows == left.final or not whole, (position, said)
            assert "cannot be read as written" in said and not (checkpointed and shared), (position, said)
            ever = {(i, row) for state in left.states for i, row in state.items()}
            assert isinstance(rows, str) or set(rows.items()) <= ever, (position, said)
    assert corrected > 0.75 * len(places)


@pytest.mark.parametrize("shared", [False, True], ids=["log alone", "with -shm"])
def test_larger_damage_is_said_and_the_transactions_after_it_are_kept(left, shared):
    draw = np.random.default_rng(3)
    for n in range(12 * FAULTS):
        log, size = bytearray(left.log), int(draw.choice([2, 16, 512, 4096]))
        start = 32 + int(draw.integers(0, (left.frames - 12) * left.frame))
        log[start : start + size] = bytes(size) if n % 2 else draw.bytes(size)
        if log == left.log:
            continue
        rows, whole, said = left.opened(bytes(log), shared)
        assert "write-ahead log" in said and (left.folder / "g-wal.damaged-1").read_bytes() == log
        if isinstance(rows, dict):
            later = {i for i, (label, _) in left.final.items() if label == "label 11"}
            assert later <= set(rows), "rows of the last transactions"
            assert rows == left.final or not whole or "cannot be read as written" in said


def test_a_torn_end_is_no_damage(left):
    """A process that is killed while it writes leaves frames of a transaction that has not ended."""
    before, whole_frames = left.states[-2], left.frames
    sizes = [struct.unpack(">I", left.log[32 + n * left.frame + 4 :][:4])[0] for n in range(whole_frames)]
    last_ends = [n for n, size in enumerate(sizes) if size][-2:]
    for end in (last_ends[0] + 1, last_ends[1]):
        for extra in (0, 5, 24, 2000):
            torn = left.log[: 32 + end * left.frame + extra]
            rows, whole, said = left.opened(torn, False)
            assert rows == before and whole and not said, (end, extra)


def test_a_log_that_is_cut_short_is_said_where_it_can_be_known(left):
    cut = left.log[: 32 + (left.frames - 9) * left.frame]
    rows, _, said = left.opened(cut, True)
    assert "its write-ahead log is cut short, and 9 pages of committed transactions are lost" in said
    assert isinstance(rows, dict) and rows in left.states


def test_an_emptied_head_is_made_again(left):
    for content in (bytes(32), bytes(range(32)), bytes(24) + left.log[24:32]):
        rows, whole, said = left.opened(content + left.log[32:], False)
        assert rows == left.final and whole and "write-ahead log" in said


def test_a_kill_between_copy_and_correction_is_made_good(left, monkeypatch):
    log = bytearray(left.log)
    log[32 + 3 * left.frame + 200] ^= 1

    def killed(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(wal_repair._Log, "repaired", killed)
        with pytest.raises(KeyboardInterrupt):
            left.opened(bytes(log), False)
    assert (left.folder / "g-wal").read_bytes() == log
    with pytest.warns(RuntimeWarning, match="nothing is lost"), Gallery.open(left.folder / "g") as gallery:
        assert dict(visible(gallery)) == left.final
    assert [path.name for path in left.folder.glob("g-wal.damaged-*")] == ["g-wal.damaged-1"]


def _hold(path, ready, done):
    with Gallery.open(path) as gallery:
        gallery.labels()
        ready.set()
        done.wait(60)


def test_the_log_of_a_living_process_is_not_touched(left):
    left.opened(left.log, False)
    context = multiprocessing.get_context("spawn")
    ready, done = context.Event(), context.Event()
    process = context.Process(target=_hold, args=(left.folder / "g", ready, done))
    process.start()
    try:
        assert ready.wait(120)
        log = left.folder / "g-wal"
        content = bytearray(left.log)
        content[32 + 2 * left.frame + 100] ^= 1
        log.write_bytes(content)
        assert wal_repair.repair_log(left.folder / "g") == "" and log.read_bytes() == content
    finally:
        done.set()
        process.join(60)


def test_no_room_for_the_copy_is_one_sentence(left, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    log = bytearray(left.log)
    log[5000] ^= 1
    monkeypatch.setattr("nearkin.gallery.stores.wal_repair.files.write_bytes", full)
    rows, _, _ = left.opened(bytes(log), False)
    assert "g-wal: is damaged; a copy of it could not be written (No space left on device); make room" in rows
    assert (left.folder / "g-wal").read_bytes() == log
