"""The parts under a gallery: exact search in memory, HNSW beside the file, rows and filters."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearkin import gallery as room
from nearkin.gallery import schema
from nearkin.gallery.stores import hnsw, matrix
from nearkin.gallery.stores.matrix import Matrix
from nearkin.gallery.stores.memory_index import Columns


def filled(vectors, ids=None, labels=None):
    memory = Matrix(vectors.shape[1])
    ids = list(range(1, len(vectors) + 1)) if ids is None else ids
    memory.append(ids, labels or ["a"] * len(vectors), vectors)
    return memory


def slow(vectors, query, k, ids, allowed=None):
    """Every cosine in float64, one by one."""
    wide = [
        (-float((row.astype(np.float64) * query.astype(np.float64)).sum()), i)
        for n, (row, i) in enumerate(zip(vectors, ids, strict=True))
        if allowed is None or allowed[n]
    ]
    return [i for _, i in sorted(wide)[:k]]


# ---- exact search


@given(
    count=st.integers(0, 300),
    dim=st.integers(1, 40),
    k=st.integers(1, 30),
    crowd=st.floats(0, 1),
    seed=st.integers(0, 2**20),
    int8=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_search_finds_what_a_loop_finds(count, dim, k, crowd, seed, int8):
    draw = np.random.default_rng(seed)
    around = draw.normal(size=dim)
    vectors = schema.unit(crowd * around + (1 - crowd) * draw.normal(size=(count, dim)) + 1e-3) if count else None
    vectors = np.empty((0, dim), np.float32) if vectors is None else vectors
    if count > 4:
        vectors[count // 2 :][:3] = vectors[:3]  # equals stand in the order of their ids
    memory = filled(vectors)
    memory._int8 = memory._int8 and int8
    allowed, rare = draw.random(count) < 0.6, draw.random(count) < 0.12
    query = schema.unit(around[None] + 0.1)[0]
    few, matrix.FEW = matrix.FEW, 2  # so that proposals are made
    try:
        for mask in (None, allowed, rare):
            ids, similarity = memory.top_k(query, k, memory.propose(query, k, mask))
            assert ids.tolist() == slow(vectors, query, k, range(1, count + 1), mask)
            assert (np.diff(similarity) <= 0).all()
    finally:
        matrix.FEW = few


def test_rounded_products_stay_within_their_bound():
    draw = np.random.default_rng(0)
    vectors = schema.unit(draw.normal(size=(5000, 48)) * draw.choice([1, 30], size=(5000, 48)))
    query = schema.unit(draw.normal(size=(1, 48)))[0]
    rounded, scale, error = matrix.round_rows(vectors)
    rounded_query, query_scale, query_error = matrix.round_rows(query[None])
    near = (
        rounded.astype(np.int64) @ rounded_query[0].astype(np.int64) * scale.astype(np.float64) * float(query_scale[0])
    )
    exact = vectors.astype(np.float64) @ query
    assert (np.abs(near - exact) <= error + query_error[0] * (1 + error)).all()
    assert np.abs(near - exact).max() > 1e-4, "the bound is put to the test"


def test_rows_come_go_and_change_their_label():
    draw = np.random.default_rng(1)
    vectors = schema.unit(draw.normal(size=(4000, 8)))
    memory = filled(vectors[:3000])
    memory.append(range(3001, 4001), ["b"] * 1000, vectors[3000:])
    for i in (5, 77, 3500):
        memory.remove(i)
    memory.relabel(9, "c")
    alive = np.ones(4000, bool)
    alive[[4, 76, 3499]] = False
    for _ in range(2):
        query = vectors[76]
        assert memory.top_k(query, 7, memory.propose(query, 7))[0].tolist() == slow(
            vectors, query, 7, range(1, 4001), alive
        )
        assert memory.counts() == {"a": 2997, "b": 999, "c": 1}
        assert (
            memory.position(77) is None
            and memory.position(4001) is None
            and memory.positions(np.array([9, 77, 4000])).size == 2
        )
        assert memory.top_k(query, 7, memory.propose(query, 7, memory.has_label(["c", "none"])))[0].tolist() == [9]
        memory.compact()
    assert memory.count == 3997 and memory.removed == 0


# ---- HNSW


@pytest.fixture
def grouped(monkeypatch):
    pytest.importorskip("faiss")
    monkeypatch.setattr(hnsw, "EXACT", 500)
    draw = np.random.default_rng(2)
    centres = draw.normal(size=(60, 16))
    return schema.unit(centres[draw.integers(0, 60, 4000)] + 0.4 * draw.normal(size=(4000, 16)))


def test_the_index_finds_what_exact_search_finds(grouped, tmp_path):
    memory = filled(grouped[:3500])
    index = hnsw.build(memory)
    assert index.recall >= hnsw.TARGET_RECALL and not index.stale(memory)
    hnsw.save(tmp_path / "g.hnsw", index, "me")
    index = hnsw.load(tmp_path / "g.hnsw", "me")
    memory.append(range(3501, 4001), ["b"] * 500, grouped[3500:])  # later rows are searched too
    for i in range(1, 3500, 7):
        memory.remove(i)
    alive = memory.alive[:4000]
    hits = 0
    for query in schema.unit(grouped[::40] + 0.1):
        exact = slow(grouped, query, 10, range(1, 4001), alive)
        ids, _ = memory.top_k(query, 10, index.propose(memory, query, 10))
        assert alive[ids - 1].all()
        hits += len(set(exact) & set(ids.tolist()))
    assert hits >= 0.99 * 1000
    memory.append(range(4001, 6001), ["b"] * 2000, np.concatenate([grouped[:2000]]))
    assert index.stale(memory)


def test_an_index_that_is_not_right_is_not_read(grouped, tmp_path):
    path = tmp_path / "g.hnsw"
    index = hnsw.build(filled(grouped[:1000]))
    hnsw.save(path, index, "me")
    original = path.read_bytes()
    for offset in (3, 60, len(original) // 2, len(original) - 1):
        damaged = bytearray(original)
        damaged[offset] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"damaged|another"):
            hnsw.load(path, "me")
    for length in (0, 10, len(original) - 5):
        path.write_bytes(original[:length])
        with pytest.raises(ValueError, match="damaged"):
            hnsw.load(path, "me")
    path.write_bytes(original)
    with pytest.raises(ValueError, match="another"):
        hnsw.load(path, "you")
    path.unlink()
    with pytest.raises(ValueError, match="missing"):
        hnsw.load(path, "me")


def test_rows_without_structure_stay_exact(monkeypatch):
    pytest.importorskip("faiss")
    monkeypatch.setattr(hnsw, "DEPTHS", (1,))
    monkeypatch.setattr(hnsw, "TARGET_RECALL", 1.1)
    assert hnsw.build(filled(schema.unit(np.random.default_rng(0).normal(size=(800, 32))))) is None


# ---- rows, metadata, filters


def test_any_changed_field_changes_the_checksum():
    row = (7, b"c" * 32, "label", "name", "{}", b"\0" * 16)
    total = schema.checksum(*row)
    changed_rows = [(8, *row[1:])]
    for field, new in enumerate([b"d" * 32, "labe", "lname", '{"a":1}', b"\0" * 15 + b"\1"], 1):
        changed_rows.append((*row[:field], new, *row[field + 1 :]))
    changed_rows.append((7, b"c" * 32, "labelname", "", "{}", b"\0" * 16))
    assert total not in {schema.checksum(*other) for other in changed_rows}


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=3, max_size=3))
def test_vectors_survive_packing(values):
    if not any(values):
        values[0] = 1.0
    unit = schema.unit(np.array([values], np.float64))
    assert (schema.unpack(schema.pack(unit), 3) == unit).all()
    assert np.linalg.norm(unit) == pytest.approx(1, abs=1e-6)


def test_values_are_equal_as_json_has_it():
    columns = Columns()
    texts = [
        schema.metadata_json(m)
        for m in ({"a": 1}, {"a": 1.0}, {"a": True}, {"a": "1"}, {"a": None}, {"b": 2}, {}, {"a": [1]})
    ]
    columns.append(texts)

    def positions(value):
        return np.flatnonzero(columns.has_value("a", schema.parse_filter({"a": value}).keys["a"])).tolist()

    assert positions(1) == positions(1.0) == [0, 1]
    assert positions(True) == [2] and positions("1") == [3] and positions(None) == [4] and positions(2) == []
    assert positions([True, "1"]) == [2, 3]
    columns.append([schema.metadata_json({"a": 1})])
    assert positions(1) == [0, 1, 8]
    columns.take([1, 3, 8])
    assert positions(1) == [0, 2]


@pytest.mark.parametrize(
    "call, sentence",
    [
        (lambda: schema.check_label(3), "label must be text, got 3"),
        (lambda: schema.check_label("  "), "label must have 1 to 500 characters, got 0"),
        (lambda: schema.check_label("a\0b"), "without NUL"),
        (lambda: schema.check_label("\ud800"), "broken characters"),
        (lambda: schema.metadata_json([1]), "metadata must be a dict"),
        (lambda: schema.metadata_json({1: 2}), "keys are text"),
        (lambda: schema.metadata_json({"label": "x"}), 'must not have the key "label"'),
        (lambda: schema.metadata_json({"x": float("nan")}), "plain JSON values"),
        (lambda: schema.metadata_json({"x": object()}), "plain JSON values"),
        (lambda: schema.metadata_json({"x": "\0"}), "without NUL"),
        (lambda: schema.parse_filter(["label"]), "filter must be a dict"),
        (lambda: schema.parse_filter({"label": 3}), "filter label must be text"),
        (lambda: schema.parse_filter({"x": {"y": 1}}), 'filter "x" must be text, a number'),
        (lambda: schema.parse_filter({"x": float("inf")}), 'filter "x" must be finite'),
        (lambda: schema.unit(np.zeros((2, 3))), "must not be all 0"),
        (lambda: schema.unit(np.array([[np.nan, 1.0]])), "must be finite"),
    ],
)
def test_what_cannot_be_kept_is_one_sentence(call, sentence):
    with pytest.raises((ValueError, TypeError), match=sentence):
        call()


def test_public_names_are_documented():
    import inspect

    assert all(inspect.getdoc(getattr(room, name)) for name in room.__all__)
    for name, method in inspect.getmembers(room.Gallery, inspect.isfunction):
        if not name.startswith("_") and name != "close":
            assert inspect.getdoc(method), name
