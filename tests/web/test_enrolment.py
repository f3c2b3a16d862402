"""`nearkin serve photos/`: a folder is enrolled while the service answers."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest
from PIL import Image

import tiny_vit
from commands import output_of, photos, run
from nearkin.gallery import Gallery
from nearkin.gallery.embedder import gallery_beside
from nearkin.gallery.schema import UNLABELLED
from nearkin.web import app, request_log
from nearkin.web import enrolment as enrolments
from nearkin.web.enrolment import Enrolment, read_source

testclient = pytest.importorskip("fastapi.testclient", reason="extra serve is not installed")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The current folder, with photos/ of eight classes and the encoder hf:vit."""
    monkeypatch.setenv("NEARKIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    tiny_vit.save(tmp_path / "vit")
    photos(tmp_path / "photos", classes=8, each=5)
    return tmp_path


def _png(level):
    """A picture of one grey."""
    out = io.BytesIO()
    Image.new("L", (16, 16), level).save(out, "PNG")
    return out.getvalue()


def client_of(gallery, enrolment):
    log = request_log.request_logger(io.StringIO())
    return testclient.TestClient(app.build(gallery, log=log, enrolment=enrolment), base_url="http://localhost")


def test_the_page_answers_from_what_is_enrolled_so_far(place, monkeypatch):
    monkeypatch.setattr(enrolments, "STEP", 10)
    waiting, seen = threading.Event(), threading.Event()

    def progress(done, total):
        if done == 20:
            seen.set()
            assert waiting.wait(30)

    ended = []
    with Gallery.open("g", "hf:vit") as gallery:
        enrolment = Enrolment(gallery, "photos", read_source("photos"), progress, ended.append)
        with client_of(gallery, enrolment) as client:
            assert client.get("/api/stats").json()["enrolling"]["done"] == 0
            enrolment.start()
            assert seen.wait(30)
            stats = client.get("/api/stats").json()
            assert stats["rows"] == 20 and not stats["calibrated"]
            assert stats["enrolling"] == {"done": 20, "total": 40, "running": True, "unreadable": 0, "note": ""}
            picture = {"item": ("a.png", (place / "photos" / "class1" / "2.png").read_bytes())}
            answer = client.post("/api/identify?hits=3", files=picture).json()
            assert answer["label"] == "class1" and answer["hits"][0]["similarity"] == pytest.approx(1), "it is enrolled"
            strange = {"item": ("b.png", _png(0))}
            answer = client.post("/api/identify?hits=3", files=strange).json()
            assert answer["verdict"] == "unsure" and answer["p_right"] is None and answer["candidates"]
            assert "confidences follow" in answer["note"]
            pair = {"a": picture["item"], "b": strange["item"]}
            assert "confidences follow" in client.post("/api/verify", files=pair).json()["note"]
            waiting.set()
            enrolment.join(60)
            stats = client.get("/api/stats").json()
            assert stats["rows"] == 40 and stats["calibrated"] and not stats["enrolling"]["running"]
            assert client.post("/api/identify", files=strange).json()["p_right"] is not None
            assert client.post("/api/verify", files=pair).json()["same_probability"] is not None
            assert len(client.get("/api/map").json()["ids"]) == 40
    assert ended == [enrolment] and enrolment.counts.added == 40


def test_a_stop_in_the_middle_loses_nothing_and_the_next_start_goes_on(place, monkeypatch):
    monkeypatch.setattr(enrolments, "STEP", 10)
    seen = threading.Event()

    def progress(done, total):
        seen.set()
        time.sleep(0.2)

    with Gallery.open("g", "hf:vit") as gallery:
        enrolment = Enrolment(gallery, "photos", read_source("photos"), progress)
        enrolment.start()
        assert seen.wait(30) and enrolment.stop(30)
        rows = gallery.stats()["rows"]
        assert 10 <= rows < 40 and not enrolment.state["running"] and not gallery.stats()["calibrated"]
    photos(place / "more", classes=9, each=2, seed=5)
    shutil.move(place / "more" / "class8", place / "photos" / "class8")
    with Gallery.open("g", "hf:vit") as gallery:
        encoded = []
        embed = gallery._encoding.embed
        monkeypatch.setattr(gallery._encoding, "embed", lambda rows: encoded.append(len(rows)) or embed(rows))
        enrolment = Enrolment(gallery, "photos", read_source("photos"))
        enrolment.run()
        assert sum(encoded) == 42 - rows, "only what is new is embedded"
        assert enrolment.counts.known == rows and enrolment.counts.added == 42 - rows
        assert gallery.stats()["calibration_classes"] == 9


def test_bad_pictures_are_left_out_and_counted(place):
    (place / "photos" / "class2" / "9.png").write_bytes(b"no picture")
    (place / "photos" / "class3" / "9.png").write_bytes(b"")
    with Gallery.open("g", "hf:vit") as gallery:
        enrolment = Enrolment(gallery, "photos", read_source("photos"))
        enrolment.run()
        assert gallery.stats()["rows"] == 40
    assert enrolment.state["unreadable"] == 2 and enrolment.state["note"] == ""
    assert any("class2/9.png is not a picture" in line for line in enrolment.counts.unreadable)


def test_a_folder_without_labels_is_searched(place):
    photos(place / "one", classes=1, each=6)
    with Gallery.open("g", "hf:vit") as gallery:
        enrolment = Enrolment(gallery, "one/class0", read_source("one/class0"))
        with client_of(gallery, enrolment) as client:
            enrolment.run()
            assert "at least 3 labels are needed" in enrolment.state["note"]
            picture = {"item": ("a.png", (place / "one" / "class0" / "2.png").read_bytes())}
            answer = client.post("/api/identify?hits=3", files=picture).json()
            assert answer["label"] is None and "only similarities" in answer["note"]
            assert [hit["label"] for hit in answer["hits"]] == [UNLABELLED] * 3
            assert client.get("/api/diagnosis").json()["note"]


def test_a_failed_enrolment_ends_in_a_sentence_and_the_service_goes_on(place, monkeypatch):
    with Gallery.open("g", "hf:vit") as gallery:
        monkeypatch.setattr(gallery._store, "add", lambda *_: (_ for _ in ()).throw(ValueError("no\nroom")))
        enrolment = Enrolment(gallery, "photos", read_source("photos"))
        with client_of(gallery, enrolment) as client:
            enrolment.run()
            assert client.get("/api/stats").json()["enrolling"]["note"] == "enrolment ended at 0 of 40: no room"


def test_the_gallery_is_beside_the_folder(place, monkeypatch):
    assert gallery_beside("photos/") == gallery_beside("photos") == place / "photos.gallery"
    assert gallery_beside(place / "photos.zip") == place / "photos.zip.gallery"
    monkeypatch.chdir(place / "photos")
    assert gallery_beside(".") == place / "photos.gallery"
    assert gallery_beside("..") == place.with_name(place.name + ".gallery")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["empty"], "not a finished run: there is no encoder.json in it; nor pictures: empty: it holds no files"),
        (["phots"], 'unknown source "phots"; did you mean "photos"?'),
        (["./phots/"], 'no such folder or file; did you mean "photos"?'),
        (["efficientnet-lte0", "--gallery", "x"], 'did you mean "efficientnet-lite0"?'),
        (["hf:vit"], "serve needs a run and a gallery"),
        (["hf:vit", "--gallery", "x", "--run", "hf:vit"], "--run is for a folder of pictures"),
        (["photos", "--run", "small-cnn"], "random ones answer nothing"),
        (["photos", "--run", "timm:resnet18"], "pip install 'nearkin[vision]'"),
        (["photos", "--run", "hf:vit", "--host", "0.0.0.0"], "a token is needed"),
        (["vectors.npz", "--run", "hf:vit"], "the run's encoder takes pictures"),
    ],
)
def test_bad_input_is_one_sentence_and_nothing_is_left(place, arguments, words):
    import numpy as np

    (place / "empty").mkdir()
    np.savez(place / "vectors.npz", embeddings=np.ones((3, 4), np.float32), labels=np.arange(3))
    if "timm:resnet18" in arguments:
        try:
            import timm  # noqa: F401
        except ImportError:
            pass
        else:
            pytest.skip("timm is installed")
    said = " ".join(output_of(run("serve", *arguments, "--port", "0"), 2).split())
    assert words in said
    assert not (place / "photos.gallery").exists() and not (place / "x").exists()


@pytest.mark.slow
def test_one_command_stopped_and_started_again(place):
    """The whole of it: Ctrl-C in the middle, a second start that goes on, an answer over HTTP."""
    photos(place / "many", classes=12, each=100)

    def start():
        command = [sys.executable, "-m", "nearkin", "serve", "many/", "--run", "hf:vit", "--port", "0", "--no-open"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        return process, process.stdout.readline().split()[0]

    def stats(address):
        return json.load(urllib.request.urlopen(f"{address}api/stats"))

    process, address = start()
    while stats(address)["rows"] == 0:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 0 and Path("many.gallery").is_file()
    with Gallery.open("many.gallery", "hf:vit") as gallery:
        rows = gallery.stats()["rows"]
    process, address = start()
    while stats(address)["enrolling"]["running"]:
        time.sleep(0.05)
    after = stats(address)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0 and after["rows"] == 1200 and after["calibration_classes"] == 12
    assert f"{1200 - rows:,} enrolled, {rows:,} already enrolled" in out, (rows, out, err)
    assert "enrolled 1,200 of 1,200" in err or os.isatty(2)
