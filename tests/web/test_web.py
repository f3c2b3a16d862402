"""The service: every address with good and bad requests, its middleware, its queues, and a real server under load."""

import asyncio
import http.client
import io
import itertools
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from calibrations import calibration_by_hand
from nearkin import models, web
from nearkin.core.errors import QueueFull
from nearkin.data import glyphs
from nearkin.gallery import Gallery, results
from nearkin.gallery.items import encoder_info
from nearkin.web import app, demo
from nearkin.web.access import Access, is_loopback
from nearkin.web.explore import Explorer, flat_by_pca, hues
from nearkin.web.middleware import Limits
from nearkin.web.queue import BatchQueue
from nearkin.web.request_log import request_logger

pytest.importorskip("fastapi", reason="the service needs pip install 'nearkin[serve]'")
pytest.importorskip("httpx2", reason="its tests need httpx2")
from starlette.testclient import TestClient

from nearkin.web import build

ROOT = "http://127.0.0.1"


def a_run(folder: Path) -> Path:
    """A run folder with an untrained encoder, calibrated by hand so that only identical pictures are the same."""
    encoder = models.build("small-cnn", channels=1, size=16, width=4, dim=8, seed=0)
    preparation = {"kind": "pictures", "size": 16, "stored": 16, "fit": "crop", "channels": 1, "flip": False}
    models.save(encoder, folder, preparation)
    calibration = {"encoder": encoder_info(folder).fingerprint} | calibration_by_hand(
        {0.9: (0.005, 0.9), 0.999: (0.001, 0.5)}, {0.0: -20, 0.99: -4, 0.999: 9, 1.0: 14}
    )
    (folder / results.FILE).write_text(json.dumps(calibration))
    return folder


def picture(n: int, kind: str = "PNG", size: tuple[int, int] = (24, 20)) -> bytes:
    """A blob on noise, different for each n."""
    draw = np.random.default_rng(n)
    pixels = draw.integers(0, 80, (size[1], size[0]), dtype=np.uint8)
    x, y = draw.integers(0, size[0] - 8), draw.integers(0, size[1] - 8)
    pixels[y : y + 7, x : x + 7] = draw.integers(120, 255)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind)
    return out.getvalue()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return a_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def gallery(run, tmp_path):
    with Gallery.open(tmp_path / "g.gallery", run, device="cpu", max_pixels=Limits().pixels) as opened:
        opened.enrol([picture(n) for n in range(12)], [f"kind {n // 3}" for n in range(12)], {"place": "pond"})
        yield opened


def client_of(gallery, token=None, limits=None, stream=None, **options):
    app = build(gallery, access=Access(token), limits=limits, log=request_logger(stream or io.StringIO()), **options)
    return TestClient(app, base_url=ROOT, raise_server_exceptions=False)


@pytest.fixture
def client(gallery):
    with client_of(gallery) as opened:
        yield opened


def item(content, name="new.png"):
    return {"item": (name, content, "image/png")}


def refused(answer, status, words=""):
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"error"} and words in answer.json()["error"], answer.text
    assert "\n" not in answer.json()["error"]
    return answer


# ---- answers


def test_search_gives_what_the_gallery_gives(client, gallery):
    answer = client.post("/api/search?k=5", files=item(picture(7)))
    assert answer.status_code == 200
    assert answer.json()["hits"] == [json.loads(json.dumps(hit._asdict())) for hit in gallery.search(picture(7), 5)]
    assert answer.json()["hits"][0]["id"] == 8 and answer.json()["hits"][0]["metadata"] == {"place": "pond"}
    filtered = client.post("/api/search", params={"filter": '{"label": ["kind 0", "kind 1"]}'}, files=item(picture(7)))
    assert {hit["label"] for hit in filtered.json()["hits"]} == {"kind 0", "kind 1"}


def test_search_can_be_reranked(client, gallery):
    answer = client.post("/api/search?k=5&rerank=k-reciprocal:k1=3", files=item(picture(7))).json()["hits"]
    expected = gallery.search(picture(7), 5, rerank="k-reciprocal:k1=3")
    assert answer == [json.loads(json.dumps(hit._asdict())) for hit in expected]
    vector = gallery.vectors([5])[0].tolist()
    assert client.post("/api/vectors/search?k=1&rerank=alpha-qe", json={"item": vector}).json()["hits"][0]["id"] == 5
    refused(client.post("/api/search?rerank=best", files=item(picture(7))), 422, 'unknown rerank "best"')
    refused(client.post("/api/search?rerank=k-reciprocal:k1=101", files=item(picture(7))), 422, "k1 must be <= 100")
    refused(client.post(f"/api/search?rerank={'x' * 200}", files=item(picture(7))), 422, "100 characters")


def test_identify_says_who_or_unknown(client, gallery):
    identity = client.post("/api/identify?hits=3", files=item(picture(4))).json()
    assert identity["label"] == "kind 1" and identity["confidence"] > 0.9 and len(identity["hits"]) == 3
    assert {k: v for k, v in identity.items() if k != "hits"} == json.loads(
        json.dumps(
            gallery.identify(picture(4))._asdict()
            | {"candidates": [c._asdict() for c in gallery.identify(picture(4)).candidates]}
        )
    )
    blank = io.BytesIO()
    Image.new("L", (16, 16), 255).save(blank, "PNG")
    unknown = client.post("/api/identify", files=item(blank.getvalue())).json()
    assert unknown["label"] is None and unknown["confidence"] > 0.3 and unknown["hits"] == []
    assert [one["label"] for one in unknown["candidates"]] and unknown["classes"] == 60
    assert client.post("/api/identify?far=0.1", files=item(picture(4))).json()["far"] == 0.1
    assert client.post("/api/identify?far=0.02", files=item(picture(4))).json()["threshold"] == 0.999
    refused(
        client.post("/api/identify?far=0.0001", files=item(picture(4))), 422, "per query with 4 labels: 60 calibration"
    )


def test_verify(client):
    same = client.post("/api/verify", files={"a": picture(1), "b": picture(1)})
    assert same.json()["same"] is True and same.json()["probability"] > 0.99 and same.json()["far"] == 0.001
    other = client.post("/api/verify", files={"a": picture(1), "b": picture(200)}).json()
    assert other["same"] is False and other["probability"] == 1 - other["same_probability"] and other["classes"] == 60
    refused(client.post("/api/verify", files={"a": picture(1)}), 400, "b is missing")


def test_a_new_label_is_recognised_at_once_and_can_be_changed_and_removed(client):
    files = [("items", ("../../etc/passwd", picture(50), "image/png")), ("items", ("b.jpg", picture(51, "JPEG")))]
    made = client.post("/api/enrol", files=files, data={"label": "new one", "metadata": '{"by": "me"}'})
    assert made.json() == {"ids": [13, 14], "added": 2, "known": 0}
    again = client.post("/api/enrol", files=files[:1], data={"label": "new one"})
    assert again.json() == {"ids": [13], "added": 0, "known": 1}
    refused(client.post("/api/enrol", files=files[:1], data={"label": "other"}), 409, "relabel or remove")
    assert client.post("/api/identify", files=item(picture(50))).json()["label"] == "new one"
    row = client.get("/api/items/13").json()
    assert row["name"] == "passwd" and row["metadata"] == {"by": "me"} and row["similarity"] == 1
    shown = client.get("/api/items/13/thumbnail")
    assert shown.headers["content-type"] == "image/png" and Image.open(io.BytesIO(shown.content)).size == (16, 16)
    assert client.post("/api/relabel", json={"ids": [13, 99], "label": "kind 0"}).json() == {"rows": 1}
    assert client.post("/api/identify", files=item(picture(50))).json()["label"] == "kind 0"
    assert client.post("/api/remove", json={"ids": [13, 14]}).json() == {"rows": 2}
    refused(client.get("/api/items/13"), 404, "no row has the id 13")
    refused(client.get("/api/items/13/thumbnail"), 404, "no row has the id 13")


def test_vectors_in_json(client, gallery):
    vector = gallery.vectors([5])[0].tolist()
    assert client.post("/api/vectors/search?k=1", json={"item": vector}).json()["hits"][0]["id"] == 5
    assert client.post("/api/vectors/verify", json={"a": vector, "b": vector}).json()["same"] is True
    made = client.post("/api/vectors/enrol", json={"items": [vector, vector[::-1]], "label": "v", "metadata": {"n": 1}})
    assert made.json()["added"] == 2
    refused(client.get("/api/items/13/thumbnail"), 404, "has no picture")
    refused(client.post("/api/vectors/search", json={"item": vector[:3]}), 422, "8 dimensions")
    refused(client.post("/api/vectors/search", json={"item": [0.0] * 8}), 422, "all 0")


def test_enroll_is_enrol(client, gallery):
    made = client.post("/api/enroll", files=[("items", ("a.png", picture(50)))], data={"label": "new"})
    assert made.json() == {"ids": [13], "added": 1, "known": 0}
    vector = (-gallery.vectors([5])[0]).tolist()
    made = client.post("/api/vectors/enroll", json={"items": [vector], "label": "new"})
    assert made.json() == {"ids": [14], "added": 1, "known": 0}


def test_no_upload_is_written_to_disk(client, gallery, monkeypatch):
    """Files of a form stay in memory up to the limit of a body, far beyond Starlette's 1 MiB."""
    import tempfile

    monkeypatch.setattr(tempfile.SpooledTemporaryFile, "rollover", lambda *_: 1 / 0)
    large = picture(7, "BMP", (1600, 1500))
    assert len(large) > 2 * 2**20
    assert client.post("/api/search?k=1", files=item(large)).status_code == 200


def test_stats_labels_health(client):
    assert client.get("/api/stats").headers["cache-control"] == "no-store"
    stats = client.get("/api/stats").json()
    assert stats["rows"] == 12 and stats["labels"] == 4 and stats["calibrated"] and "place" not in stats
    assert client.get("/api/labels?starts=KIND&most=2").json()["labels"][0] == {"label": "kind 0", "rows": 3}
    assert len(client.get("/api/labels?most=2").json()["labels"]) == 2
    assert client.get("/api/health").json() == {"status": "ok", "waiting": 0}


def test_map_diagnosis_neighbours(client, gallery):
    map = client.get("/api/map").json()
    assert map["ids"] == list(range(1, 13)) and map["labels"] == [f"kind {n}" for n in range(4)]
    assert all(0 <= v <= 1 for v in map["x"] + map["y"]) and len(map["hues"]) == 4
    assert client.get("/api/map?method=tsne").status_code in (200, 422)  # 422 where openTSNE is not installed
    refused(client.get("/api/map?method=umap"), 422, "method")
    around = client.post("/api/neighbours", json={"ids": [1, 2, 3], "k": 4}).json()
    assert [one["id"] for one in around["chosen"]] == [1, 2, 3] and len(around["hits"]) == 4
    middle = gallery.vectors([1, 2, 3]).astype(np.float64).mean(0)
    nearest = [hit.id for hit in gallery.search(middle, 12) if hit.id > 3][:4]
    assert [one["id"] for one in around["hits"]] == nearest
    refused(client.post("/api/neighbours", json={"ids": [77]}), 404)
    diagnosis = client.get("/api/diagnosis").json()
    assert diagnosis["looked_at"] == 12 and diagnosis["confusions"]


def test_a_wrong_label_is_suspected_and_gone_after_relabelling(run, tmp_path):
    with Gallery.open(tmp_path / "v.gallery", run) as gallery:
        draw = np.random.default_rng(0)
        vectors = draw.normal(size=(3, 8))[np.repeat(np.arange(3), 8)] + 0.05 * draw.normal(size=(24, 8))
        labels = [f"c{i // 8}" for i in range(24)]
        labels[3], labels[20] = "c2", "c0"
        gallery.enrol(vectors, labels)
        with client_of(gallery) as client:
            suspects = client.get("/api/diagnosis").json()["suspects"]
            assert [(one["id"], one["label"], one["suggested"]) for one in suspects] == [
                (4, "c2", "c0"),
                (21, "c0", "c2"),
            ]
            for one in suspects:  # as many rows of each label as before
                client.post("/api/relabel", json={"ids": [one["id"]], "label": one["suggested"]})
            assert client.get("/api/diagnosis").json()["suspects"] == []
            assert client.get("/api/map").json()["label"][3] == 0


def test_an_empty_gallery_answers(run, tmp_path):
    with Gallery.open(tmp_path / "e.gallery", run) as gallery, client_of(gallery) as client:
        assert client.post("/api/search", files=item(picture(1))).json() == {"hits": [], "quality": None}
        identity = client.post("/api/identify", files=item(picture(1))).json()
        assert identity["label"] is None and identity["note"] == "nothing is enrolled"
        assert client.get("/api/map").json()["ids"] == []
        assert "two labels" in client.get("/api/diagnosis").json()["note"]


def test_the_page_is_served_whole_and_asks_nobody_else(client):
    page = client.get("/")
    assert page.status_code == 200 and "default-src 'none'" in page.headers["content-security-policy"]
    addresses = re.findall(r'(?:src|href)="(/[^"]+)"', page.text)
    folder = Path(app.__file__).with_name("page")
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*.*")} - {"index.html"}
    assert names == set(app.PAGE), "every file of the page is in the fixed list, and nothing else"
    texts = {f"/page/{name}" for name in names if name.startswith("texts/")}
    assert {*addresses, *texts} == {"/page/report.css", *(f"/page/{name}" for name in names)}
    for address in (*addresses, *texts):
        answer = client.get(address)
        assert answer.status_code == 200 and answer.content
        assert not re.search(r"https?://|@import|\bstyle=", answer.text), address
    assert not re.search(r"https?://|<script>|\bstyle=", page.text)
    for path in ("/page/..%2f..%2fapp.py", "/page/../app.py", "/page//etc/passwd", "/page/index.html", "/etc/passwd"):
        refused(client.get(path), 404)


# ---- refusals


def png_header(width: int, height: int) -> bytes:
    """A complete, tiny PNG file whose header claims that size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")


BAD_PICTURES = [
    (png_header(50_000, 50_000), 422, "50000 x 50000 pixels"),
    (picture(1)[:150], 422, "truncated"),
    (picture(1, "JPEG")[:300], 422, ""),
    (b"", 400, "empty"),
    (b"%!PS-Adobe-3.0 EPSF-3.0", 415, "no supported format"),
    (b"GIF89a" + b"\xff" * 40, 422, ""),
    (b"<svg xmlns='http://www.w3.org/2000/svg'/>", 415, "PNG"),
]


@pytest.mark.parametrize("content, status, words", BAD_PICTURES, ids=range(len(BAD_PICTURES)))
def test_bad_pictures_are_one_sentence_and_spare_the_others(client, content, status, words):
    for path in ("/api/search", "/api/identify"):
        refused(client.post(path, files=item(content)), status, words)
    two = [("items", ("a.png", picture(60))), ("items", ("b.png", content))]
    refused(client.post("/api/enrol", files=two, data={"label": "x"}), status, words)
    assert client.get("/api/stats").json()["rows"] == 12  # all or none


JSON = {"content-type": "application/json"}
BAD_REQUESTS = [
    ("/api/search", {}, 415, "multipart/form-data, got no type; /api/vectors/… takes vectors as application/json"),
    ("/api/search", {"content": b"x", "headers": {"content-type": "text/plain"}}, 415, "text/plain"),
    ("/api/search", {"content": b"x", "headers": {"content-type": "multipart/form-data"}}, 400, "boundary"),
    ("/api/search", {"content": b"x", "headers": {"content-type": b"multipart/form-data; boundary=\xe9"}}, 400, ""),
    ("/api/search", {"content": b"junk", "headers": {"content-type": "multipart/form-data; boundary=q"}}, 400, ""),
    ("/api/search", {"files": {"other": picture(1)}}, 400, "unknown part 'other'; known: item"),
    ("/api/search", {"files": [("item", picture(1)), ("item", picture(2))]}, 400, "got 2"),
    ("/api/search", {"data": {"item": "text"}, "files": {"x": b"1"}}, 415, ""),
    ("/api/search", {"files": [("item", picture(1))] * 40}, 400, "Too many files"),
    ("/api/vectors/search", {"content": b"{", "headers": JSON}, 400, "must be JSON"),
    ("/api/vectors/search", {"content": b"[" * 99_999, "headers": JSON}, 400, "must be JSON"),
    ("/api/vectors/search", {"json": [1, 2]}, 400, "JSON object"),
    ("/api/vectors/search", {"json": {"item": "abc"}}, 400, "numbers"),
    ("/api/vectors/search", {"json": {"item": [1, True]}}, 400, "numbers only"),
    ("/api/vectors/search", {"json": {"item": [10**400] * 8}}, 400, "float64"),
    ("/api/vectors/search", {"content": b'{"item": [1e999]}', "headers": JSON}, 422, ""),
    ("/api/search?k=0", {"files": item(picture(1))}, 422, "k: "),
    ("/api/search?k=99999999999999999999", {"files": item(picture(1))}, 422, "k: "),
    ("/api/search?filter=[1]", {"files": item(picture(1))}, 400, "filter must be a JSON object"),
    ('/api/search?filter={"label":3}', {"files": item(picture(1))}, 422, "filter label"),
    ("/api/identify?far=nan", {"files": item(picture(1))}, 422, "far: "),
    ("/api/identify?far=2", {"files": item(picture(1))}, 422, "far: "),
    ("/api/enrol", {"files": {"items": picture(70)}}, 400, "label is missing"),
    ("/api/enrol", {"files": {"items": picture(70)}, "data": {"label": "  "}}, 422, "label must have 1 to 500"),
    ("/api/enrol", {"files": {"items": picture(70)}, "data": {"label": "a\0b"}}, 422, "without NUL"),
    ("/api/enrol", {"files": {"items": picture(70)}, "data": {"label": "x" * 70_000}}, 400, ""),
    ("/api/enrol", {"files": {"items": picture(70)}, "data": {"label": "a", "metadata": "3"}}, 400, "metadata"),
    ("/api/vectors/enrol", {"json": {"items": [[1.0] * 8], "label": 7}}, 422, "label: "),
    ("/api/vectors/enrol", {"json": {"items": [[1.0] * 8] * 33, "label": "a"}}, 400, "at most 32 vectors, got 33"),
    ("/api/relabel", {"json": {"ids": [1], "label": ""}}, 422, "label: "),
    (
        "/api/relabel",
        {"content": b'{"ids": [1], "label": "\\ud800"}', "headers": {"content-type": "application/json"}},
        422,
        "",
    ),
    ("/api/relabel", {"json": {"ids": [], "label": "a"}}, 422, "ids: "),
    ("/api/relabel", {"json": {"ids": ["1"], "label": "a"}}, 422, "ids.0: "),
    ("/api/remove", {"json": {"ids": [2**63]}}, 422, "ids.0: "),
    ("/api/remove", {"json": {"ids": [1], "all": True}}, 422, "all: "),
    ("/api/remove", {"content": b"\xff\xfe", "headers": {"content-type": "application/json"}}, 400, ""),
]


@pytest.mark.parametrize("path, options, status, words", BAD_REQUESTS, ids=range(len(BAD_REQUESTS)))
def test_bad_requests_are_one_sentence(client, path, options, status, words):
    refused(client.post(path, **options), status, words)
    assert client.get("/api/stats").json()["rows"] == 12


def test_bad_addresses(client):
    refused(client.get("/api/nothing"), 404, "/openapi.json")
    assert "POST" in refused(client.get("/api/search"), 405).headers["allow"]
    for id in ("0", "-1", "x", str(2**63), "1.5"):
        refused(client.get(f"/api/items/{id}"), 422, "id: ")
    refused(client.get("/api/items/99"), 404, "no row has the id 99")


def test_a_request_has_the_id_that_it_was_sent_with(gallery):
    stream = io.StringIO()
    with client_of(gallery, stream=stream) as client:
        good = ["trace-1", "A.b_c-9", "x" * 64]
        for sent_id in good:
            assert client.get("/api/health", headers={"x-request-id": sent_id}).headers["x-request-id"] == sent_id
        refused(client.get("/api/stats", headers={"x-request-id": "evil", "origin": "https://evil.example"}), 403)
        for bad in ("", "a b", "x" * 65, 'a"b', "{}", "ä".encode()):
            ours = client.get("/api/health", headers={"x-request-id": bad}).headers["x-request-id"]
            assert re.fullmatch("[0-9a-f]{12}", ours), bad
    logged = [json.loads(line)["id"] for line in stream.getvalue().splitlines()]
    assert logged[:4] == [*good, "evil"] and all(len(one) == 12 for one in logged[4:])


def test_metrics_count_what_was_answered(client):
    for n in range(3):
        assert client.post("/api/search", files=item(picture(n))).status_code == 200
    made = client.post("/api/enrol", files=[("items", ("a.png", picture(60)))], data={"label": "new"}).json()
    client.get(f"/api/items/{made['ids'][0]}")
    client.get("/api/items/99")
    client.get("/nothing/here")
    answer = client.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    for line in (
        'nearkin_requests_total{route="/api/search",status="200"} 3',
        'nearkin_request_seconds_count{route="/api/search"} 3',
        'nearkin_requests_total{route="/api/items/{id}",status="404"} 1',
        'nearkin_requests_total{route="other",status="404"} 1',
        "nearkin_enrolled_rows_total 1",
        "nearkin_gallery_rows 13",
        "nearkin_requests_active 1",
        "nearkin_processes 1",
    ):
        assert f"\n{line}\n" in answer.text, line
    refused(client.post("/api/reload"), 409, "was not started by nearkin serve")


OPERATIONS = [
    ("POST", f"/api/{name}") for name in ("search", "identify", "verify", "enrol", "remove", "relabel", "neighbours")
]
OPERATIONS += [("POST", "/api/explain")]
OPERATIONS += [("POST", f"/api/vectors/{name}") for name in ("search", "identify", "verify", "enrol")]
OPERATIONS += [
    ("GET", f"/api/{name}")
    for name in ("items/1", "items/1/thumbnail", "labels", "stats", "health", "map", "diagnosis")
]
OPERATIONS += [("POST", f"/api/groups/{name}") for name in ("propose", "name", "merge", "split", "undo")]
OPERATIONS += [("GET", "/api/groups"), ("GET", "/api/groups/1")]
OPERATIONS += [("POST", "/api/reload"), ("GET", "/metrics")]
OPERATIONS += [("GET", "/openapi.json")]


def test_every_operation_is_known_to_the_token_test(client):
    paths = client.get("/openapi.json").json()["paths"]
    known = {(method, re.sub(r"/1\b", "/{id}", path)) for method, path in OPERATIONS[:-1]}
    assert {(method.upper(), path) for path, one in paths.items() for method in one} == known


def test_the_token_is_needed_everywhere(gallery):
    with client_of(gallery, token="s3cret-token") as client:
        for method, path in OPERATIONS:
            for headers in (
                {},
                {"Authorization": "Bearer wrong"},
                {"Authorization": "Basic s3cret-token"},
                {"Authorization": "Bearer"},
            ):
                answer = refused(client.request(method, path, headers=headers), 401, "token")
                assert answer.headers["www-authenticate"] == "Bearer" and "s3cret" not in answer.text
            good = client.request(method, path, headers={"Authorization": "Bearer s3cret-token"})
            assert good.status_code not in (401, 403)
        refused(client.get("/api/stats?token=s3cret-token"), 401)
        assert client.get("/").status_code == 200  # the page holds no data, and asks for the token
        assert client.get("/", headers={"host": "gallery.example"}).status_code == 200
        scheme = client.get("/openapi.json", headers={"Authorization": "Bearer s3cret-token"}).json()
        assert scheme["security"] == [{"token": []}]


def test_other_pages_and_names_are_refused(client):
    refused(client.get("/api/stats", headers={"origin": "https://evil.example"}), 403, "other web pages")
    refused(client.post("/api/remove", json={"ids": [1]}, headers={"origin": "null"}), 403)
    refused(client.get("/api/stats", headers={"sec-fetch-site": "cross-site"}), 403)
    refused(client.get("/api/stats", headers={"host": "evil.example"}), 403, "evil.example")
    assert client.get("/api/stats", headers={"origin": ROOT, "sec-fetch-site": "same-origin"}).status_code == 200
    assert client.get("/api/stats", headers={"host": "localhost:8765"}).status_code == 200
    assert client.get("/api/stats", headers={"host": "[::1]:8765"}).status_code == 200


def test_hosts():
    assert is_loopback("127.0.0.1") and is_loopback("::1") and is_loopback("localhost") and is_loopback("127.9.9.9")
    assert not is_loopback("0.0.0.0") and not is_loopback("example.org") and not is_loopback("::")
    with pytest.raises(ValueError, match="a token is needed: --token T, or --host 127"):
        Access(None, "0.0.0.0").check()
    Access("t", "0.0.0.0").check()
    with pytest.raises(ValueError, match="without spaces"):
        Access("a b").check()


def test_bodies_are_counted_as_they_arrive(gallery):
    limits = Limits(body=100_000, json=1000)
    with client_of(gallery, limits=limits) as client:
        refused(client.post("/api/search", files=item(picture(1) + bytes(200_000))), 413, "100,000 bytes")
        sent = []

        def endless():
            while True:
                sent.append(10_000)
                yield bytes(10_000)
                assert sum(sent) < 10**6

        headers = {"content-type": "multipart/form-data; boundary=q"}
        refused(client.post("/api/search", content=endless_form(endless), headers=headers), 413)
        refused(client.post("/api/relabel", json={"ids": [1], "label": "x" * 2000}), 413, "1,000 bytes")
        assert client.post("/api/search", files=item(picture(1))).status_code == 200


def test_uploads_together_are_bounded(gallery):
    with client_of(gallery, limits=Limits(total_body=1000)) as client:
        busy = refused(client.post("/api/search", files=item(picture(1, "BMP", (64, 64)))), 503, "try again later")
        assert busy.headers["retry-after"] == "1"
        assert client.post("/api/search", files=item(picture(1))).status_code == 200  # their memory is free again
    with client_of(gallery, limits=Limits(requests=1)) as client:
        assert client.get("/api/health").status_code == 200


def test_a_body_that_does_not_come_is_not_waited_for(gallery):
    sent = []

    async def main():
        async def receive():
            await asyncio.sleep(60)

        async def send(message):
            sent.append(message)

        headers = [(b"host", b"localhost"), (b"content-type", b"multipart/form-data; boundary=q")]
        scope = {"type": "http", "method": "POST", "path": "/api/search", "headers": headers, "query_string": b""}
        guarded = build(gallery, limits=Limits(seconds=0.05), log=request_logger(io.StringIO()))
        await guarded(scope | {"http_version": "1.1", "scheme": "http", "client": ("x", 1)}, receive, send)
        assert guarded.active == 0 and guarded.total_body == 0

    asyncio.run(main())
    assert sent[0]["status"] == 408 and b"0.05 seconds" in sent[1]["body"]


def endless_form(endless):
    """TestClient collects all of a generator, so it ends after 300,000 bytes; the real server gets more."""
    yield b'--q\r\nContent-Disposition: form-data; name="item"; filename="a"\r\n\r\n'
    for n, part in enumerate(endless()):
        if n > 30:
            return
        yield part


def test_logs_are_lines_of_json_without_secrets(gallery):
    stream = io.StringIO()
    with client_of(gallery, token="s3cret-token", stream=stream) as client:
        client.post("/api/search?k=3", files=item(picture(1)), headers={"Authorization": "Bearer s3cret-token"})
        client.get("/api/items/%0A{evil}")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["status"] for line in lines] == [200, 401] and lines[0]["bytes"] > 100
    assert {"time", "level", "event", "id", "method", "path", "status", "ms", "client"} <= set(lines[0])
    assert "s3cret" not in stream.getvalue() and "k=3" not in stream.getvalue()


def test_a_fault_of_ours_is_500_with_an_id_that_is_in_the_log(gallery, monkeypatch):
    stream = io.StringIO()
    with client_of(gallery, stream=stream) as client:
        monkeypatch.setattr(gallery, "stats", lambda: 1 / 0)
        answer = client.get("/api/stats")
        assert answer.status_code == 500 and "ZeroDivision" not in answer.text
        assert answer.json()["error"].split()[-1] in stream.getvalue() and "ZeroDivisionError" in stream.getvalue()
        monkeypatch.setattr(gallery, "stats", lambda: (_ for _ in ()).throw(TimeoutError("another writes")))
        assert refused(client.get("/api/stats"), 503, "another writes").headers["retry-after"] == "1"


# ---- queues


def test_a_line_batches_in_order_and_gives_each_its_own():
    sizes, gate = [], threading.Event()

    def process(items):
        gate.wait()
        sizes.append(len(items))
        return [ValueError(f"{one} is bad") if one < 0 else one * 10 for one in items]

    async def main():
        queue = BatchQueue("test", process, batch=8, queue=100)
        tasks = [asyncio.create_task(queue.submit(sum, [n, n])) for n in (1, 2, -3, 4, 5, 6)]
        await asyncio.sleep(0.05)
        gate.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        queue.close()
        return results

    results = asyncio.run(main())
    assert [one for one in results if not isinstance(one, ValueError)] == [20, 40, 80, 100, 120]
    assert str(results[2]) == "-3 is bad"
    assert sum(sizes) == 12 and max(sizes) == 8  # several jobs per call, never more than a batch


def test_a_full_line_sends_away_at_once_and_recovers():
    gate = threading.Event()

    async def main():
        queue = BatchQueue("test", queue=3)
        first = asyncio.create_task(queue.submit(lambda _: gate.wait(10)))
        await asyncio.sleep(0.05)  # it is running, no longer waiting
        others = [asyncio.create_task(queue.submit(lambda _: 7)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await asyncio.wait_for(queue.submit(lambda _: 8), 2)
        others[0].cancel()
        gate.set()
        assert await first and await asyncio.gather(*others[1:]) == [7, 7]
        assert await queue.submit(lambda _: 9) == 9
        queue.close()
        with pytest.raises(QueueFull):
            await queue.submit(lambda _: 8)

    asyncio.run(main())


def test_a_full_service_says_when_to_come_again(gallery, monkeypatch):
    gate, entered, before = threading.Event(), threading.Event(), gallery.see
    monkeypatch.setattr(gallery, "see", lambda *arguments: (entered.set(), gate.wait(), before(*arguments))[2])
    with client_of(gallery, limits=Limits(queue=2, batch=1)) as client:
        answers = []
        threads = [
            threading.Thread(target=lambda: answers.append(client.post("/api/search", files=item(picture(1)))))
            for _ in range(12)
        ]
        threads[0].start()
        entered.wait()  # one is being encoded, two may wait
        for thread in threads[1:]:
            thread.start()
        while len(answers) < 9:
            time.sleep(0.01)
        gate.set()
        for thread in threads:
            thread.join()
        statuses = [one.status_code for one in answers]
        assert statuses.count(200) == 3 and statuses.count(503) == 9
        assert all(one.headers["retry-after"] == "1" for one in answers if one.status_code == 503)
        assert client.post("/api/search", files=item(picture(1))).status_code == 200


# ---- exploring


def test_pca_is_the_plane_of_most_variance():
    draw = np.random.default_rng(0)
    x = draw.normal(size=(50, 6)) * [5, 3, 1, 0.1, 0.1, 0.1]
    flat = flat_by_pca(x)
    assert flat.min() == 0 and flat.max() == 1
    assert abs(np.corrcoef(flat[:, 0], x[:, 0])[0, 1]) > 0.98 and abs(np.corrcoef(flat[:, 1], x[:, 1])[0, 1]) > 0.98
    assert (flat_by_pca(np.ones((4, 3))) == 0.5).all() and flat_by_pca(np.ones((2, 1))).shape == (2, 2)


def test_labels_side_by_side_have_other_hues():
    flat = np.stack([np.linspace(0, 1, 40), np.zeros(40)], axis=1)
    made = hues(flat, np.arange(40), 40)
    assert set(made) == set(range(10)) and all(a != b for a, b in itertools.pairwise(made))


def test_large_galleries_are_looked_at_evenly(run, tmp_path):
    with Gallery.open(tmp_path / "v.gallery", run) as gallery:
        gallery.enrol(np.random.default_rng(0).normal(size=(95, 8)), [f"c{i % 7}" for i in range(95)])
        map = Explorer(gallery, most=20).map("pca")
        assert map["rows"] == 95 and map["ids"] == list(range(1, 96, 5))


@pytest.mark.parametrize("kept", ["all", "even ids", "the last"])
def test_a_map_of_a_large_gallery_reads_a_sample(run, tmp_path, kept, monkeypatch):
    count, left = 3000, {"all": 3000, "even ids": 1500, "the last": 600}[kept]
    with Gallery.open(tmp_path / "v.gallery", run) as gallery:
        gallery.enrol(np.random.default_rng(0).normal(size=(count, 8)), "a")
        gallery.remove({"all": [], "even ids": range(1, count, 2), "the last": range(1, 2401)}[kept])
        read, before = [], gallery._store.rows
        monkeypatch.setattr(gallery._store, "rows", lambda ids: read.extend(rows := before(ids)) or rows)
        monkeypatch.setattr(gallery, "rows", lambda: pytest.fail("all rows are read"))
        map = Explorer(gallery, most=200).map("pca")
        assert map["rows"] == left and map["ids"] == sorted(map["ids"]) and len(read) == len(map["ids"])
        assert 0.6 * 200 <= len(read) <= 1.4 * 200 and (kept != "even ids" or not any(id % 2 for id in read))
        quarters = np.histogram(read, 4, (count - left if kept == "the last" else 0, count))[0]
        assert quarters.min() > 0.6 * len(read) / 4


# ---- the demo


def test_the_demo_enrols_characters_once(run, tmp_path, monkeypatch):
    names = ["A", "Ж", "÷", "5"]
    images = np.stack([glyphs.draw(name, n) for name in names for n in range(20)])
    few = glyphs.Glyphs(images, np.repeat(np.arange(4), 20), names)
    monkeypatch.setattr(demo.glyphs, "load", lambda **_: few)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="make demo"):
        demo.prepared()
    shutil.copytree(run, tmp_path / "runs" / "glyphs-2")
    folder, place = demo.prepared()
    assert folder == Path("runs/glyphs-2")
    with Gallery.open(place, folder) as gallery:
        assert gallery.labels() == dict.fromkeys(names, demo.PER_CHARACTER)
        assert "cyrillic capital letter zhe" in gallery.get(5).name and gallery.get(5).metadata["half"]
        gallery.remove(1)
    demo.prepared()
    with Gallery.open(place, folder) as gallery:
        assert gallery.stats()["rows"] == 15  # what was removed stays removed


# ---- a real server


@pytest.fixture(scope="module")
def served(run, tmp_path_factory):
    """`nearkin serve` in its own process: address, process, log."""
    folder = tmp_path_factory.mktemp("served")
    with Gallery.open(folder / "g.gallery", run) as gallery:
        gallery.enrol([picture(n) for n in range(30)], [f"kind {n // 3}" for n in range(30)])
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "nearkin", "serve", run, "--gallery", folder / "g.gallery", "--port", "0"],
            stdout=subprocess.PIPE, stderr=log, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        try:
            address = process.stdout.readline().split()[0]
            yield address, process, folder / "log"
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


@contextmanager
def connect(address):
    host, port = address.removeprefix("http://").strip("/").split(":")
    with closing(http.client.HTTPConnection(host, int(port), timeout=30)) as connection:
        yield connection


def form_of(content: bytes, field: str = "item") -> tuple[bytes, dict[str, str]]:
    head = f'--q\r\nContent-Disposition: form-data; name="{field}"; filename="a.png"\r\n\r\n'.encode()
    return head + content + b"\r\n--q--\r\n", {"Content-Type": "multipart/form-data; boundary=q"}


def sent(connection, body, headers, path="/api/identify?hits=5"):
    connection.request("POST", path, body, headers)
    answer = connection.getresponse()
    return answer.status, answer.read()


def ask(address, content=None):
    with connect(address) as connection:
        return sent(connection, *form_of(content or picture(4)))


def resident(process) -> int:
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())[1]) * 1024


def crowd(address, clients, seconds):
    """Clients that send requests without pause: statuses, seconds, and errors."""
    statuses, times, broken, until = [], [], [], time.monotonic() + seconds

    def one(n):
        with connect(address) as connection:
            while time.monotonic() < until:
                start = time.perf_counter()
                try:
                    statuses.append(sent(connection, *form_of(picture(n)))[0])
                except (OSError, http.client.HTTPException) as error:
                    broken.append(error)
                    connection.close()
                times.append(time.perf_counter() - start)

    threads = [threading.Thread(target=one, args=(n,)) for n in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statuses, np.array(times), broken


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_bombs_do_not_cost_memory(served):
    address, process, _ = served
    ask(address)
    before = resident(process)
    for _ in range(5):
        status, body = ask(address, png_header(50_000, 50_000))
        assert status == 422 and b"pixels" in body
        parts = b"".join(b'--q\r\nContent-Disposition: form-data; name="f%d"\r\n\r\nx\r\n' % n for n in range(10_000))
        with connect(address) as connection:
            status, body = sent(connection, parts + b"--q--\r\n", form_of(b"")[1])
        assert status == 400 and b"Too many fields" in body
    assert resident(process) - before < 64 * 2**20


def test_an_endless_body_is_refused_while_it_comes(served):
    address, process, _ = served
    host, port = address.removeprefix("http://").strip("/").split(":")
    before = resident(process)
    with socket.create_connection((host, int(port)), timeout=20) as line:
        line.sendall(
            f"POST /api/search HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: multipart/form-data; boundary=q\r\n"
            "Transfer-Encoding: chunked\r\n\r\n".encode()
        )
        head = b'--q\r\nContent-Disposition: form-data; name="item"; filename="a"\r\n\r\n'
        gone = 0
        try:
            while gone < 200 * 2**20:
                part = head if not gone else bytes(2**16)
                line.sendall(b"%x\r\n%s\r\n" % (len(part), part))
                gone += len(part)
        except OSError:
            pass  # the server has closed
        try:
            answer = line.recv(4096)
        except ConnectionResetError:
            answer = b""  # it was sent long before we stopped
    assert answer == b"" or b" 413 " in answer.splitlines()[0]
    assert gone < 200 * 2**20 and resident(process) - before < 64 * 2**20
    assert ask(address)[0] == 200


def test_a_refused_upload_hears_why(served):
    """The answer reaches a client that is still sending: the connection is not reset."""
    with connect(served[0]) as connection:
        status, body = sent(connection, bytes(20 * 2**20), form_of(b"")[1])
    assert status == 413 and b"16,777,216 bytes" in body


def test_many_clients_at_once_without_an_error(served):
    statuses, times, broken = crowd(served[0], 32, 2.0)
    assert not broken and set(statuses) == {200} and len(statuses) > 60, (broken[:3], set(statuses))
    print(
        f"{len(statuses) / 2.0:.0f}/s, p50 {np.median(times) * 1e3:.0f} ms, p99 {np.quantile(times, 0.99) * 1e3:.0f} ms"
    )


def test_overload_is_503_only_and_passes(served):
    statuses, _, broken = crowd(served[0], 280, 1.0)
    assert not broken and set(statuses) <= {200, 503} and 200 in statuses, (broken[:3], set(statuses))
    assert [ask(served[0])[0] for _ in range(5)] == [200] * 5


def test_a_second_process_sees_and_is_seen(served, run):
    address, _, log = served
    with Gallery.open(log.parent / "g.gallery", run) as gallery:
        gallery.enrol([picture(500)], "from elsewhere")
    assert json.loads(ask(address, picture(500))[1])["label"] == "from elsewhere"


@pytest.mark.slow
def test_sigterm_ends_it_in_order(run, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "nearkin", "serve", run, "--gallery", tmp_path / "g.gallery", "--port", "0"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    address = process.stdout.readline().split()[0]
    assert ask(address)[0] == 200
    process.send_signal(signal.SIGTERM)
    _, logged = process.communicate(timeout=20)
    assert process.returncode == 0
    lines = [json.loads(line) for line in logged.splitlines()]
    assert lines[-1]["event"] == "stopped" and any(line["event"] == "request" for line in lines)


def test_what_other_libraries_log_is_json_too():
    code = "import logging; from nearkin.web.request_log import capture_server_logs; capture_server_logs();"
    code += "logging.getLogger('a.parser').warning('odd data')"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert json.loads(process.stderr)["text"] == "odd data"


def test_the_command_refuses_in_one_sentence(run, tmp_path):
    from typer.testing import CliRunner

    from nearkin.cli import app

    def refusal(*arguments):
        result = CliRunner().invoke(app, ["serve", *map(str, arguments)])
        assert result.exit_code == 2, result.output
        return result.output

    assert "a token is needed" in refusal(run, "--gallery", tmp_path / "g", "--host", "0.0.0.0")
    assert "serve needs a run and a gallery" in refusal(run)
    assert "not a finished run" in refusal(tmp_path, "--gallery", tmp_path / "g")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert "choose another with --port" in refusal(run, "--gallery", tmp_path / "g", "--port", port)
    assert "port must be from 0 to 65,535, got 99999" in refusal(run, "--gallery", tmp_path / "g", "--port", 99999)
    assert "leave --gallery and --dim out" in refusal("--demo", "--gallery", "x")


def test_nothing_sleeps_on_the_event_loop():
    """Every request would wait for it."""
    for path in Path(web.__file__).parent.glob("*.py"):
        assert "time.sleep" not in path.read_text(encoding="utf-8"), path.name


@pytest.mark.slow
def test_schemathesis_finds_no_fault(served, tmp_path):
    """Thousands of odd requests from the OpenAPI description: no 5xx but 503, every answer as described."""
    tool = Path(sys.executable).with_name("schemathesis")
    if not tool.exists():
        pytest.skip("no schemathesis here: pip install schemathesis")
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    options = ["--phases", "coverage,fuzzing", "--max-examples", "3", "--max-time", "7", "--no-color", "--seed", "1"]
    options += ["--generation-database", "none"]
    result = subprocess.run(
        [tool, "run", served[0] + "openapi.json", "--checks", checks, *options],
        capture_output=True, text=True, cwd=tmp_path, timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
    assert "28 selected" in result.stdout
