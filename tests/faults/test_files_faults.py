"""Files of every kind under faults: damage is seen, a full disk costs nothing old, clocks jump, two processes write.

NEARKIN_FAULTS=10 damages ten times as often.
"""

import errno
import json
import multiprocessing
import os
import random
import re
import shutil
import sqlite3
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
import nearkin
from calibrations import calibration_by_hand
from commands import noisy_vectors
from commands import run as call
from nearkin import training
from nearkin.core import files
from nearkin.data import cache_store, image_cache
from nearkin.gallery import Gallery, calibrate, results
from nearkin.training.config.recipe import read

pytestmark = pytest.mark.slow

FAULTS = int(os.environ.get("NEARKIN_FAULTS", "1"))
NONSENSE = [b"", b"null", b"[]", b"7", b'"x"', b"{}", b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe{", bytes(64)]
SMALL = ["training.epochs=2", "training.batches=4", "sampler.batch=16", "sampler.per_class=4", "encoder.hidden=[16]"]
SMALL += ["encoder.dim=8", "training.log_steps=1", "training.workers=0", "evaluation.interval=false"]


def damaged(chance: random.Random, original: bytes) -> tuple[str, bytes]:
    """Other bytes than before, and how they came about."""
    content, at = bytearray(original), chance.randrange(len(original))
    how = chance.choice(["bit", "byte", "zeros", "cut", "longer", "inserted", "removed", "nonsense"])
    if how == "bit":
        content[at] ^= 1 << chance.randrange(8)
    elif how == "byte":
        content[at] = (content[at] + chance.randrange(1, 256)) % 256
    elif how == "zeros":
        content[at : at + 32] = bytes(len(content[at : at + 32]))
    elif how == "cut":
        del content[at:]
    elif how == "longer":
        content += chance.randbytes(chance.randrange(1, 64))
    elif how == "inserted":
        content[at:at] = chance.randbytes(8)
    elif how == "removed":
        del content[at : at + chance.randrange(1, 64)]
    else:
        content = bytearray(chance.choice(NONSENSE))
    return how, bytes(content)


def tried(call, *arguments):
    """What a call returns, or (None, None), and the sentence of its ValueError, or ""."""
    try:
        return call(*arguments), ""
    except ValueError as error:
        return (None, None), str(error)


def everything(place):
    return {path.relative_to(place): path.read_bytes() for path in place.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Vectors of classes, and a finished run."""
    place = tmp_path_factory.mktemp("runs")
    noisy_vectors(place / "vectors.npz", 40)
    train(place, "done")
    return place


def train(home, out, callback=lambda event: None):
    return training.train(read(None, [f'data.source="{home}/vectors.npz"', *SMALL]), home / out, callback)


# --- the picture cache


class Arrays:
    """Pictures in memory that have not changed."""

    def __init__(self, pixels):
        self.pixels = pixels

    def __len__(self):
        return len(self.pixels)

    def read(self, i):
        return self.pixels[i]

    def stamp(self, i):
        return str(i)


@pytest.fixture
def pictures(tmp_path, monkeypatch):
    monkeypatch.setenv("NEARKIN_CACHE", str(tmp_path / "cache"))
    return Arrays(np.random.default_rng(0).integers(0, 256, (20, 12, 12, 3)).astype(np.uint8))


def store(pictures, progress=None):
    names = [f"picture {i}" for i in range(len(pictures))]
    return image_cache.store(pictures, names, side=8, workers=1, progress=progress)


def test_a_damaged_picture_cache_never_gives_other_pixels(pictures):
    """Any of its files: it is made again, and the next start finds it intact."""
    pixels, chance, made_again = np.array(store(pictures).pixels), random.Random(0), 0
    before = everything(cache_store.folder())
    assert len(before) == 3
    for _ in range(60 * FAULTS):
        name = chance.choice(sorted(before))
        how, content = damaged(chance, before[name])
        (cache_store.folder() / name).write_bytes(content)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            cache = store(pictures)
        np.testing.assert_array_equal(cache.pixels, pixels, f"{name} {how}")
        cache.verify()
        made_again += bool(warned)
        assert all("is corrupt" in str(one.message) and "is rebuilt" in str(one.message) for one in warned)
        del cache
        after = everything(cache_store.folder())
        assert after.keys() == before.keys()  # nothing half-made is left
        assert name.name.startswith("names") or after[name] == before[name], how
    assert made_again > 20 * FAULTS


def test_a_damaged_beginning_of_a_picture_cache_never_gives_other_pixels(pictures):
    """Rows of a cache that was stopped while it was made are used only where they are intact."""
    pixels, chance = np.array(store(pictures).pixels), random.Random(1)
    cache_store.clear()
    for _ in range(20 * FAULTS):
        with pytest.raises(KeyboardInterrupt):
            store(pictures, interrupt)
        path = chance.choice(sorted(cache_store.folder().iterdir()))
        how, content = damaged(chance, path.read_bytes())
        path.write_bytes(content)
        np.testing.assert_array_equal(store(pictures).pixels, pixels, f"{path} {how}")
        cache_store.clear()
        for left in cache_store.folder().iterdir():
            left.unlink()


def interrupt(done, total):
    raise KeyboardInterrupt


# --- the calibration


def test_a_damaged_calibration_is_one_sentence_or_says_the_same(home):
    calibrate(home / "done", part="train", device="cpu")
    path, chance, refused = home / "done" / results.FILE, random.Random(2), 0
    original = path.read_bytes()
    encoder = json.loads(original)["encoder"]
    undamaged = results.load_calibration(home / "done", encoder)[0]
    for _ in range(200 * FAULTS):
        how, content = damaged(chance, original)
        path.write_bytes(content)
        (calibrator, note), sentence = tried(results.load_calibration, home / "done", encoder)
        if sentence:
            assert str(path) in sentence and "\n" not in sentence and len(sentence) < 600, (how, sentence)
            refused += 1
            continue
        assert calibrator is not None and note == "", how
        assert vars(calibrator).keys() == vars(undamaged).keys()
        assert (
            str(vars(calibrator)) == str(vars(undamaged)) and (calibrator.thresholds == undamaged.thresholds).all()
        ), how
    path.write_bytes(original)
    assert refused > 150 * FAULTS


@pytest.mark.parametrize("value", [None, True, "x", [], {}, -1, 1e999, [1e999], {"a": 1}, [[1]]])
def test_a_calibration_of_wrong_types_is_one_sentence(value, tmp_path):
    """Also of a file without a checksum, as it was written before."""
    plain = calibration_by_hand({0.5: (0.1, 0.9)}, {-1.0: -1, 1.0: 1}) | {"encoder": "me"}
    (tmp_path / results.FILE).write_text(json.dumps(plain))
    assert results.load_calibration(tmp_path, "me")[0] is not None
    inside = ["far_bound", "tar", "log_ratio"]
    for key in ["format", "classes", "thresholds", "examples", *inside]:
        curves = plain["examples"]["1"]
        other = plain | ({"examples": {"1": curves | {key: value}}} if key in inside else {key: value})
        (tmp_path / results.FILE).write_text(json.dumps(other))
        with pytest.raises(ValueError, match=rf"{results.FILE}: (damaged|of format).*makes it again"):
            results.load_calibration(tmp_path, "me")


# --- a full disk


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("at", ["fsync", "replace"])
@pytest.mark.parametrize("verb", ["calibrate", "embed", "evaluate", "export"])
def test_a_full_disk_leaves_the_old_file_and_no_other(verb, at, home, tmp_path, monkeypatch):
    place = Path(shutil.copytree(home, tmp_path / "home"))
    vectors, gallery = place / "vectors.npz", place / "g.gallery"
    with Gallery.open(gallery, dim=12) as made:
        made.enrol(np.eye(12), "x")
    out = {"calibrate": "done/calibration.json", "embed": "out.npz", "evaluate": "out.json", "export": "out.jsonl"}
    (place / out[verb]).write_bytes(b"old")
    before = everything(place)
    words = {
        "calibrate": ["gallery", "calibrate", place / "done", "--part", "train", "--device", "cpu"],
        "embed": ["embed", place / "done", vectors, "--out", place / "out.npz", "--device", "cpu", "--quiet"],
        "evaluate": ["evaluate", vectors, "--json", place / "out.json"],
        "export": ["gallery", "export", gallery, "--out", place / "out.jsonl"],
    }[verb]
    monkeypatch.setattr(files.os, at, full)
    result = call(*words)
    monkeypatch.undo()
    assert result.exit_code == 2, result.output + repr(result.exception)
    assert "could not be written (No space left on device)" in result.output and "Traceback" not in result.output
    assert everything(place) == before


def test_a_gallery_on_a_full_disk_keeps_what_it_has(tmp_path):
    rows = np.random.default_rng(0).normal(size=(400, 12))
    with Gallery.open(tmp_path / "g.gallery", dim=12) as gallery:
        gallery.enrol(rows[:200], "old")
        connection = gallery._store.connection(True)
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages + 1}")  # SQLite's own error of a full disk
        with pytest.raises(ValueError, match=r"g.gallery: cannot be used \(database or disk is full\)"):
            gallery.enrol(rows[200:], "new")
        assert gallery.labels() == {"old": 200} and gallery.search(rows[3], 1)[0].id == 4
        connection.execute(f"PRAGMA max_page_count = {2**30}")
        assert gallery.enrol(rows[200:], "new").added == 200
        assert gallery.search(rows[300], 1)[0].label == "new" and gallery.check().whole


def test_a_training_on_a_disk_that_is_full_at_any_moment_goes_on_to_the_same_weights(home, tmp_path, monkeypatch):
    """The message names the file that cannot be written; with room again, the run ends with the same weights."""
    real, count = files.os.replace, 0
    weights = (home / "done" / "model.safetensors").read_bytes()

    def at(number):
        def replace(source, target):
            nonlocal count
            count += 1
            if count == number:
                full()
            real(source, target)

        return replace

    monkeypatch.setattr(files.os, "replace", at(0))
    train(home, tmp_path / "counted")
    total, sentences = count, set()
    assert total > 6
    for number in range(1, total + 1) if FAULTS > 1 else sorted({1, 2, 3, total // 2, total - 1, total}):
        count, out = 0, tmp_path / str(number)
        monkeypatch.setattr(files.os, "replace", at(number))
        sentence = tried(train, home, out)[1]
        assert "No space left on device" in sentence and "\n" not in sentence, number
        sentences.add(sentence.partition("could not")[0].partition(": ")[2])
        assert not [path for path in out.rglob(".*.*") if re.fullmatch(r"\..*\.[0-9a-f]{8}", path.name)], number
        monkeypatch.setattr(files.os, "replace", real)
        training.resume(out) if out.exists() else train(home, out)
        assert (out / "model.safetensors").read_bytes() == weights, number
    assert len(sentences) > 2


@pytest.mark.parametrize("name", ["report.html", "results.json"])
def test_a_report_that_finds_no_room_is_made_by_a_resume(name, home, tmp_path, monkeypatch):
    real, run = files.os.replace, tmp_path / "run"
    monkeypatch.setattr(files.os, "replace", lambda part, final: full() if final.name == name else real(part, final))
    sets = [word for one in SMALL for word in ("--set", one)]
    result = call("train", home / "vectors.npz", "--out", run, *sets, "--quiet")
    assert result.exit_code == 2, result.output + repr(result.exception)
    message = (
        f"{name} could not be written (No space left on device); training is done and saved: make room, then nearkin"
    )
    assert f"{message} train --resume {run}" in result.output
    assert not (run / name).exists() and not list(run.rglob(f".{name}.*"))
    monkeypatch.undo()
    assert call("train", "--resume", run, "--quiet").exit_code == 0
    assert (run / name).stat().st_size > 100
    assert (run / "model.safetensors").read_bytes() == (home / "done" / "model.safetensors").read_bytes()


# --- a clock that jumps


def test_a_training_does_not_look_at_the_clock_of_the_wall(home, tmp_path, monkeypatch):
    """An hour ahead, two days back: the same weights, no rate, time or remaining time below 0."""
    real, jumps = time.time, random.Random(0)
    monkeypatch.setattr(time, "time", lambda: real() + jumps.choice([-2e5, -1.0, 0.0, 3600.0, 1e9]))
    events = []
    train(home, tmp_path / "run", events.append)
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == (home / "done" / "model.safetensors").read_bytes()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    numbers = [
        (key, value) for one in [*lines, *events] for key, value in one.items() if isinstance(value, int | float)
    ]
    timed = [(key, value) for key, value in numbers if re.search("second|rate|time|left|eta", key)]
    assert timed and all(value >= 0 for _, value in timed), timed


def test_a_gallery_and_a_picture_cache_do_not_care_for_the_clock(pictures, tmp_path, monkeypatch):
    pixels = np.array(store(pictures).pixels)
    rows = np.random.default_rng(0).normal(size=(20, 12))
    real = time.time
    with Gallery.open(tmp_path / "g.gallery", dim=12, timeout=5) as gallery:
        for n, jump in enumerate([0.0, 1e9, -1e9, 0.0]):
            monkeypatch.setattr(time, "time", lambda jump=jump: real() + jump)
            gallery.enrol(rows[5 * n : 5 * n + 5], f"{jump:g}")
            assert [gallery.search(row, 1)[0].id for row in rows[: 5 * n + 5]] == list(range(1, 5 * n + 6))
            np.testing.assert_array_equal(store(pictures).pixels, pixels)
            os.utime(tmp_path / "g.gallery", (max(0, real() + jump),) * 2)  # as a file written before the jump
        assert gallery.check().whole


def test_waits_and_rates_are_measured_by_a_clock_that_does_not_jump():
    """time.time() is for the age of abandoned files, and for the date that a tracker shows."""
    source = Path(nearkin.__file__).parent
    users = {path.relative_to(source) for path in source.rglob("*.py") if "time.time()" in path.read_text("utf-8")}
    assert users == {Path("data/cache_store.py"), Path("training/tracking.py")}


# --- two writers


def enrol_some(path, writer, batches):
    """In a process of its own: batches of 1 to 6 rows, every third gets another label."""
    with Gallery.open(path, dim=12) as gallery:
        for number in range(batches):
            rows = np.random.default_rng([writer, number]).normal(size=(1 + number % 6, 12))
            enrolled = gallery.enrol(rows, f"{writer} {number}", {"writer": writer})
            if number % 3 == 2:
                gallery.relabel(enrolled.ids, f"{writer} moved")


def test_two_processes_that_enrol_into_one_gallery_lose_nothing(tmp_path):
    path, batches = tmp_path / "g.gallery", 24 * FAULTS
    context = multiprocessing.get_context("spawn")
    with context.Pool(2) as pool:
        pool.starmap(enrol_some, [(path, writer, batches) for writer in (1, 2)], chunksize=1)
    with Gallery.open(path) as gallery:
        expected: dict[str, int] = {}
        for writer in (1, 2):
            for number in range(batches):
                label = f"{writer} moved" if number % 3 == 2 else f"{writer} {number}"
                expected[label] = expected.get(label, 0) + 1 + number % 6
                for row in np.random.default_rng([writer, number]).normal(size=(1 + number % 6, 12)):
                    hit, *others = gallery.search(row, 2)
                    assert (hit.label, hit.metadata) == (label, {"writer": writer}) and hit.similarity > 0.999999
                    assert others[0].similarity < 0.999999
        assert gallery.labels() == expected and gallery.check().whole
    connection = sqlite3.connect(path)
    ids = [one for (one,) in connection.execute("SELECT id FROM items")]
    connection.close()
    assert len(ids) == len(set(ids)) == sum(expected.values())
