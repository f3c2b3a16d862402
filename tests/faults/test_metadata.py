"""What is enrolled with an item is bounded where it comes in, so that no row can spoil the answers to others."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from nearkin.gallery import Gallery, schema

pytestmark = pytest.mark.slow

ROW = np.arange(1.0, 5.0)


def nested(depth: int) -> dict:
    inner: dict = {"end": 1}
    for _ in range(depth - 1):
        inner = {"in": inner}
    return inner


@pytest.fixture
def gallery(tmp_path):
    with Gallery.open(tmp_path / "g", dim=4) as opened:
        yield opened


@pytest.mark.parametrize("metadata, words", [
    (nested(900), "metadata must be at most 16 deep"),
    (nested(200_000), "metadata must be at most 16 deep"),
    (nested(17), "metadata must be at most 16 deep"),
    ({"a": [[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]}, "metadata must be at most 16 deep"),
    ({"text": "x" * 5_000_000}, r"metadata must have at most 16,384 bytes as JSON, got 5,000,011"),
    ({"text": "ж" * 9000}, "at most 16,384 bytes as JSON, got 18,011"),
    ({"list": [0] * 20_000}, "metadata must have at most 16,384 parts"),
], ids=["900 deep", "200,000 deep", "17 deep", "lists", "5 MB", "bytes count", "many parts"])  # fmt: skip
def test_metadata_beyond_the_bounds_are_refused_in_one_sentence(gallery, metadata, words):
    with pytest.raises(ValueError, match=words):
        gallery.enrol(ROW, "a", metadata)
    with pytest.raises(ValueError, match=words):
        gallery.enrol(np.stack([ROW, -ROW]), "a", [None, metadata])
    assert gallery.stats()["rows"] == 0


def test_metadata_that_hold_themselves_are_refused_at_once(gallery):
    twice: list = []
    for _ in range(60):  # 2^60 entries, if each were counted
        twice = [twice, twice]
    ring: dict = {}
    ring["ring"] = ring
    for metadata in ({"twice": twice}, ring):
        with pytest.raises(ValueError, match="metadata must"):
            gallery.enrol(ROW, "a", metadata)


def test_what_is_within_the_bounds_is_kept(gallery):
    metadata = nested(16) | {"text": "x" * 16_000}
    gallery.enrol(ROW, "a", metadata, names="n" * 10_000)
    assert gallery.get(1).metadata == metadata and gallery.get(1).name == "n" * 4096


def test_a_deep_label_or_filter_is_a_sentence(gallery):
    gallery.enrol(ROW, "a")
    deep = nested(100_000)
    for wrong in (lambda: gallery.enrol(ROW, [deep]), lambda: gallery.search(ROW, 1, {"key": deep})):
        with pytest.raises(TypeError, match=r"must be text.*got a deep dict"):
            wrong()


def test_a_row_of_before_does_not_spoil_the_answers_of_the_service(gallery, monkeypatch):
    pytest.importorskip("fastapi", reason="the service needs pip install 'nearkin[serve]'")
    from test_web import client_of

    monkeypatch.setattr(schema, "MAX_DEPTH", 10**6)
    gallery.enrol(np.stack([ROW, -ROW]), "a", [nested(900), {"place": "pond"}])
    monkeypatch.undo()
    with client_of(gallery) as client:
        response = client.post("/api/vectors/search", json={"item": ROW.tolist()})
        assert response.status_code == 200, response.text
        first, second = (hit["metadata"] for hit in response.json()["hits"])
        assert "16 deep" in first["left out"] and second == {"place": "pond"}
        assert client.get("/api/items/1").status_code == 200


def test_the_service_refuses_deep_json_everywhere(gallery):
    pytest.importorskip("fastapi", reason="the service needs pip install 'nearkin[serve]'")
    from test_web import client_of

    gallery.enrol(ROW, "a")
    deep = json.dumps(nested(900))
    with client_of(gallery) as client:
        vector = json.dumps(ROW[::-1].tolist())
        requests = [
            ("/api/vectors/enrol", f'{{"items": [{vector}], "label": "b", "metadata": {deep}}}'),
            ("/api/vectors/enrol", f'{{"items": [{vector}], "label": {deep}}}'),
            ("/api/vectors/search", f'{{"item": {deep}}}'),
            ("/api/remove", f'{{"ids": {deep}}}'),
            ("/api/remove", "[" * 100_000),
            ("/api/relabel", f'{{"ids": [1], "label": {deep}}}'),
            ("/api/neighbours", f'{{"ids": [1], "k": {deep}}}'),
            (f"/api/vectors/search?filter={{{json.dumps('a')}: {'[' * 800}1{']' * 800}}}", f'{{"item": {vector}}}'),
        ]
        for path, body in requests:
            answer = client.post(path, content=body, headers={"content-type": "application/json"})
            assert answer.status_code in (400, 422) and len(answer.text) < 1000, (path, answer.text[:300])
        assert client.get("/api/stats").json()["rows"] == 1


def test_the_command_refuses_them_in_one_sentence(tmp_path):
    from typer.testing import CliRunner

    from nearkin.cli import app

    for option, words in (("[" * 100_000, "must be JSON"), ("[" * 9 + "]" * 9, "must be a JSON object")):
        command = ["enrol", str(tmp_path), "glyphs", "--gallery", str(tmp_path / "g"), "--metadata", option]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 2 and words in result.output and len(result.output) < 600
