"""POST /api/explain: heat maps over a query and a row, and every refusal in one sentence."""

import base64
import io
import threading

import numpy as np
import pytest
from PIL import Image
from test_web import a_run, client_of, item, picture, refused

from nearkin.gallery import Gallery
from nearkin.web.middleware import Limits

pytest.importorskip("fastapi", reason="the service needs pip install 'nearkin[serve]'")


@pytest.fixture
def gallery(tmp_path):
    (tmp_path / "run").mkdir()
    with Gallery.open(tmp_path / "g.gallery", a_run(tmp_path / "run"), device="cpu") as opened:
        for n in range(4):
            path = tmp_path / f"{n}.png"
            path.write_bytes(picture(n))
            opened.enrol(path, f"kind {n // 2}")
        yield opened


@pytest.fixture
def client(gallery):
    with client_of(gallery) as opened:
        yield opened


def pixels_of(address):
    kind, _, content = address.partition(";base64,")
    assert kind in ("data:image/png", "data:image/jpeg")
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(content))))


def test_explains_what_a_search_has_found(client, gallery):
    answer = client.post("/api/explain?id=2", files=item(picture(7)))
    assert answer.status_code == 200, answer.text
    explained = answer.json()
    assert set(explained) == {"similarity", "query", "row", "exact", "source", "row_similarity", "note"}
    hits = client.post("/api/search", files=item(picture(7))).json()["hits"]
    assert explained["similarity"] == pytest.approx(next(h["similarity"] for h in hits if h["id"] == 2), abs=1e-5)
    assert explained["exact"] and explained["source"] == "original" and explained["note"] == ""
    for side in (explained["query"], explained["row"]):
        heat = np.array(side["heat"])
        assert heat.sum() == pytest.approx(side["sum"]) and abs(side["missing"]) < 1e-5
        assert side["sum"] + side["missing"] == pytest.approx(explained["similarity"], abs=1e-12)
        colours = pixels_of(side["overlay"])
        assert colours.shape == (*heat.shape, 4)
        adds = colours[..., 0] > colours[..., 2]
        assert (adds == (heat >= 0))[colours[..., 3] > 0].all()
        assert max(pixels_of(side["picture"]).shape[:2]) <= 96


def test_uploads_are_explained_from_their_thumbnails(client, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # has 0.png, which the upload's name must not open
    new = client.post("/api/enrol", files=[("items", ("0.png", picture(30), "image/png"))], data={"label": "new"})
    explained = client.post(f"/api/explain?id={new.json()['ids'][0]}", files=item(picture(30))).json()
    assert explained["source"] == "thumbnail" and explained["similarity"] > 0.99
    assert "its thumbnail is shown" in explained["note"]


def test_a_lost_original(client, tmp_path):
    (tmp_path / "1.png").unlink()
    explained = client.post("/api/explain?id=2", files=item(picture(7))).json()
    assert explained["source"] == "thumbnail" and str(tmp_path) not in explained["note"]


def test_refusals(client, gallery):
    refused(client.post("/api/explain?id=99", files=item(picture(1))), 404, "no row has the id 99")
    (id,) = gallery.enrol(np.arange(1.0, 9.0), "vector").ids
    refused(client.post(f"/api/explain?id={id}", files=item(picture(1))), 404, f"row {id} has no picture")
    refused(client.post("/api/explain", files=item(picture(1))), 422, "id: ")
    refused(client.post("/api/explain?id=0", files=item(picture(1))), 422, "id: ")
    refused(client.post("/api/explain?id=x", files=item(picture(1))), 422, "id: ")
    refused(client.post("/api/explain?id=1"), 415, "multipart/form-data")
    refused(client.post("/api/explain?id=1", files={"other": picture(1)}), 400, "unknown part 'other'; known: item")
    refused(client.post("/api/explain?id=1", files=item(b"text")), 415, "no supported format")
    refused(client.post("/api/explain?id=1", files=item(picture(1)[:60])), 422, "new.png is ")
    refused(client.post("/api/explain?id=1&path=/etc/passwd", files={"path": b"x"}), 415)


def test_a_gallery_of_vectors_is_refused(tmp_path):
    with Gallery.open(tmp_path / "v.gallery", dim=4) as opened:
        opened.enrol(np.eye(4)[:1], "a")
        with client_of(opened, pictures=False) as client:
            refused(client.post("/api/explain?id=1", files=item(picture(1))), 422, "needs an encoder")


def test_an_original_beyond_the_limits_is_left_alone(gallery, tmp_path):
    with client_of(gallery, limits=Limits(decoded=2000, pixels=1000)) as client:
        (tmp_path / "1.png").write_bytes(picture(1, size=(200, 200)))
        explained = client.post("/api/explain?id=2", files=item(picture(7))).json()
        assert explained["source"] == "thumbnail"


def test_many_at_once_get_the_same_answer_or_are_told_to_wait(gallery):
    with client_of(gallery) as client:
        alone = client.post("/api/explain?id=2", files=item(picture(7))).json()
        answers = []

        def ask(path):
            answers.append((path, client.post(path, files=item(picture(7)))))

        paths = ["/api/explain?id=2", "/api/search"] * 8
        threads = [threading.Thread(target=ask, args=(path,)) for path in paths]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(answers) == len(paths)
        for path, answer in answers:
            assert answer.status_code in (200, 503)
            if answer.status_code == 200 and "explain" in path:
                assert np.allclose(answer.json()["row"]["heat"], alone["row"]["heat"], atol=1e-6)
        assert sum(answer.status_code == 200 for _, answer in answers) >= 4
