"""The service answers who it is by what the gallery has learned of its labels, which it learns behind the queries."""

import io
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from calibrations import embeddings
from nearkin.gallery import Gallery, answers, recognition
from nearkin.gallery.schema import UNLABELLED
from nearkin.gallery.stores.matrix import Matrix
from nearkin.web import learner as learners
from nearkin.web.learner import Learner
from nearkin.web.reload import _close
from nearkin.web.request_log import request_logger

pytest.importorskip("fastapi", reason="the service needs pip install 'nearkin[serve]'")
pytest.importorskip("httpx2", reason="its tests need httpx2")
from starlette.testclient import TestClient

from nearkin.web import build
from nearkin.web.access import Access
from nearkin.web.app import build_version
from nearkin.web.metrics import Metrics
from nearkin.web.middleware import Limits

ROWS, CODES = embeddings(60, 8, dim=24, seed=1, spread=0.45)
ENROLLED = (CODES < 30) & (np.arange(len(CODES)) % 8 < 6)  # six rows of each of 30 labels
LABELS = [f"c{code}" for code in CODES]
NEW = [row for row, code, mine in zip(ROWS, CODES, ENROLLED, strict=True) if code < 30 and not mine]
STRANGERS = list(ROWS[CODES >= 30])


@pytest.fixture(autouse=True)
def only_looks(monkeypatch):
    """Without its half minute the learner wakes for a change of the gallery alone."""
    monkeypatch.setattr(learners, "EVERY", 600.0)


def filled(place):
    gallery = Gallery.open(place, dim=24)
    gallery.enrol(ROWS[ENROLLED], [label for label, mine in zip(LABELS, ENROLLED, strict=True) if mine])
    return gallery


@pytest.fixture
def gallery(tmp_path):
    with filled(tmp_path / "g.gallery") as opened:
        yield opened


@contextmanager
def client_of(gallery, stream=None):
    app = build(gallery, log=request_logger(stream or io.StringIO()), pictures=False)
    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        yield client


def ask(client, row, settings=""):
    answer = client.post(f"/api/vectors/identify{settings}", json={"item": [float(x) for x in row]})
    assert answer.status_code == 200, answer.text
    return answer.json()


def wait_until(true, seconds=60):
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until
        time.sleep(0.01)


def plain(value):
    """As JSON has it, with named tuples as objects."""
    if hasattr(value, "_asdict"):
        return {key: plain(one) for key, one in value._asdict().items()}
    return [plain(one) for one in value] if isinstance(value, list) else value


# ---- what is answered


def test_an_answer_has_every_field_of_the_library(gallery):
    gallery.calibrate()
    verdicts = set()
    with client_of(gallery) as client:
        settings = {"": {}, "?far=0.1&hits=3": {"far": 0.1}, "?far=0.3&strict=true": {"far": 0.3, "strict": True}}
        settings |= {"?unknown_prior=0.9&hits=2": {"unknown_prior": 0.9}, "?sure=0.999": {"sure": 0.999}}
        for row in [*NEW[::12], *STRANGERS[::60], ROWS[0]]:
            for text, options in settings.items():
                k = int(text.partition("hits=")[2] or 0)
                one, hits = gallery.identify_with_hits(row, k, asked=answers.Asked(**options))
                answer = ask(client, row, text)
                assert answer == json.loads(json.dumps(plain(one) | {"hits": plain(hits)})), text
                verdicts.add(answer["verdict"])
                assert (answer["far"] is None) == ("far" not in options)
        few = ask(client, STRANGERS[0], "?far=0.01")
        assert few["far"]["proven"] is False and few["note"].startswith("not proven: 30 labels can show 3.2 %")
        refusal = client.post("/api/vectors/identify?far=0.01&strict=1", json={"item": ROWS[0].tolist()})
        assert refusal.status_code == 422 and "30 labels can show" in refusal.json()["error"]
    assert verdicts == {"named", "unsure", "unknown"}


def test_the_description_names_every_setting_and_field(gallery):
    with client_of(gallery) as client:
        described = client.get("/openapi.json").json()
    for path in ("/api/identify", "/api/vectors/identify"):
        settings = {one["name"]: one["schema"] for one in described["paths"][path]["post"]["parameters"]}
        assert set(settings) == {"far", "unknown_prior", "sure", "strict", "filter", "hits"}
        assert settings["unknown_prior"]["default"] == answers.PRIOR and settings["sure"]["default"] == answers.SURE
        assert settings["unknown_prior"]["exclusiveMinimum"] == 0 and settings["sure"]["minimum"] == 0.5
    fields = described["components"]["schemas"]["Identity"]["properties"]
    assert set(fields) == {*answers.Identity._fields, "hits"}
    assert set(described["components"]["schemas"]["FarStatement"]["properties"]) == set(answers.FarStatement._fields)


def test_a_next_candidate_is_never_likelier_than_the_best(gallery):
    """Between two labels that are equally near, what is left for others would go to one of them."""
    gallery.calibrate()
    for one, other in zip(NEW[:20], NEW[20:40], strict=True):
        answer = gallery.identify((one + other) / 2)
        assert answer.p_right == max(candidate.confidence for candidate in answer.candidates)


# ---- when it is learned


@pytest.fixture
def held(monkeypatch):
    """Learning waits until `go` is set; where it took place is in `threads`."""
    learn, held = recognition.learn_gallery, SimpleNamespace(go=threading.Event(), threads=[])

    def slow(*options):
        held.threads.append(threading.current_thread().name)
        assert held.go.wait(60)
        return learn(*options)

    monkeypatch.setattr(recognition, "learn_gallery", slow)
    yield held
    held.go.set()


def test_queries_are_answered_while_it_learns_and_never_learn_themselves(gallery, held):
    with client_of(gallery) as client:
        wait_until(lambda: held.threads)
        with ThreadPoolExecutor(8) as pool:
            early = list(pool.map(lambda row: ask(client, row), NEW[:24]))
        for answer in early:
            assert answer["verdict"] == "unsure" and answer["label"] is None and answer["p_right"] is None
            assert answer["candidates"] and answer["note"] == "nothing is learned from its labels yet"
        assert ask(client, ROWS[0])["label"] == "c0", "what is enrolled is known"
        assert client.get("/api/stats").json()["learned"] is None
        held.go.set()
        wait_until(lambda: ask(client, NEW[0])["p_right"] is not None)
        assert client.get("/api/stats").json()["learned"]["labels"] == 30
        assert [ask(client, row)["verdict"] for row in NEW].count("named") > 20
    assert held.threads == ["learner"], "once, and in no thread of a query"


def test_threads_that_share_a_gallery_learn_once(gallery, held):
    held.go.set()
    with ThreadPoolExecutor(8) as pool:
        assert all(answer.p_right is not None for answer in pool.map(gallery.identify, NEW[:16]))
    assert len(held.threads) == 1


def test_it_learns_again_when_a_tenth_of_the_rows_has_changed(gallery):
    gallery.calibrate()
    with client_of(gallery) as client:
        key = recognition.made(gallery._store)
        assert client.post("/api/relabel", json={"ids": list(range(1, 18)), "label": "c0"}).json() == {"rows": 17}
        time.sleep(0.3)
        assert recognition.made(gallery._store) == key and gallery._learned.key == key
        for path, body in (
            ("/api/relabel", {"ids": [18], "label": "c0"}),
            ("/api/remove", {"ids": list(range(1, 20))}),
            ("/api/vectors/enrol", {"items": [row.tolist() for row in STRANGERS[:30]], "label": "new"}),
        ):
            assert client.post(path, json=body).status_code == 200
            wait_until(lambda key=key: gallery._learned.key != key)
            key = gallery._learned.key
        assert ask(client, STRANGERS[30])["classes"] == 28 and gallery.calibration_is_current


def test_a_service_that_does_not_learn_takes_what_another_has_learned(tmp_path, gallery):
    """As a worker does: its supervisor learns."""
    with Gallery.open(tmp_path / "g.gallery") as other:
        told = []
        options = {"pictures": False, "written": lambda: told.append("changed")}
        log = request_logger(io.StringIO())
        version = build_version(other, Access(None), Limits(), log, Metrics(), **options)
        time.sleep(0.3)
        assert other._learned is None
        gallery.calibrate()
        version.service.learner.look()
        wait_until(lambda: other._learned is not None)
        assert other._learned.key == recognition.made(gallery._store)
        assert other.identify_with_hits(NEW[0], 0, learn=False)[0] == gallery.identify(NEW[0])
        version.service.close(10)
        assert version.service.ended


def test_what_was_learned_is_there_from_the_first_query_on(gallery):
    gallery.calibrate()
    with client_of(gallery) as client:
        assert ask(client, NEW[0])["p_right"] is not None


def test_a_new_model_is_prepared_in_parts_between_searches(gallery, monkeypatch):
    """Its coordinates of all rows take seconds in a large gallery; a query finds them made."""
    monkeypatch.setattr("nearkin.gallery.gallery.PROJECTED", 16)
    parts, before = [], Matrix.project_labels

    def counted(self, key, project, most=None):
        parts.append((most, threading.current_thread().name))
        return before(self, key, project, most)

    monkeypatch.setattr(Matrix, "project_labels", counted)
    gallery.calibrate()
    gallery.take_learned()
    assert len([most for most, _ in parts if most == 16]) == -(-180 // 16)
    for change in (lambda: gallery.relabel(range(1, 40), "c1"), lambda: gallery.remove(range(50, 90))):
        change()
        gallery.calibrate()
        gallery.take_learned()
        done = gallery._store.label_table(gallery._learned.key, gallery._learned.recogniser.rows)
        with Gallery.open(gallery.place) as fresh:
            again = fresh._store.label_table("fresh", gallery._learned.recogniser.rows)
        for label in gallery.labels():
            one, other = done.sums[done.numbers[label]], again.sums[again.numbers[label]]
            assert abs(one - other).max() < 1e-4, label


# ---- what cannot be learned


def test_too_few_labels_are_logged_once_and_the_next_one_teaches(tmp_path):
    stream = io.StringIO()
    with Gallery.open(tmp_path / "few.gallery", dim=24) as gallery:
        gallery.enrol(ROWS[:16], LABELS[:16])  # two labels
        with client_of(gallery, stream) as client:
            wait_until(lambda: "not learned" in stream.getvalue())
            answer = ask(client, ROWS[40])
            assert answer["p_right"] is None and "yet: at least 3 labels are needed" in answer["note"]
            assert client.post("/api/vectors/enrol", json={"items": [ROWS[300].tolist()], "label": UNLABELLED})
            time.sleep(0.3)
            assert stream.getvalue().count("not learned") == 1 and "at least 3 labels" in stream.getvalue()
            assert client.post("/api/vectors/enrol", json={"items": [ROWS[16].tolist()], "label": "c2"})
            wait_until(lambda: ask(client, ROWS[40])["p_right"] is not None)


def test_what_failed_is_not_tried_again_before_the_rows_have_changed(gallery, monkeypatch):
    tried = []

    def full(*_):
        tried.append(1)
        raise OSError("no space left")

    monkeypatch.setattr(recognition, "save", full)
    assert gallery.calibrate_if_changed() == "nothing is learned from its labels yet: no space left"
    assert gallery.calibrate_if_changed().endswith("no space left") and len(tried) == 1
    gallery.remove(1)
    assert gallery.calibrate_if_changed() and len(tried) == 2
    monkeypatch.setattr(recognition, "save", lambda *_: (_ for _ in ()).throw(TimeoutError("another is writing")))
    gallery.remove(2)
    assert "another is writing" in gallery.calibrate_if_changed()
    monkeypatch.undo()
    assert gallery.calibrate_if_changed() == "", "a moment later"


def test_the_thread_survives_any_error_and_looks_by_itself(monkeypatch):
    monkeypatch.setattr(learners, "EVERY", 0.01)
    stream, calls = io.StringIO(), []

    def learn():
        calls.append(1)
        raise [ValueError("a sentence"), KeyError("a fault"), OSError("a sentence")][min(len(calls), 3) - 1]

    learner = Learner(learn, request_logger(stream))
    learner.start()
    wait_until(lambda: len(calls) > 5)
    learner.close(10)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["level"] for line in lines] == ["info", "error", "info"], "each once"
    assert "trace" in lines[1] and "trace" not in lines[0] and not learner.is_alive()


def test_a_gallery_is_not_closed_under_what_learns_from_it(gallery, held):
    version = build_version(gallery, Access(None), Limits(), request_logger(io.StringIO()), Metrics(), pictures=False)
    wait_until(lambda: held.threads)
    closing = threading.Thread(target=_close, args=(version,))
    closing.start()
    closing.join(0.3)
    assert closing.is_alive() and not version.service.ended
    held.go.set()
    closing.join(60)
    assert version.service.ended
    with pytest.raises(ValueError, match="closed"):
        gallery.labels()
