"""Galleries whose index is on the disk: the answers are those of float64 over all rows, or say that they may not be."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import numpy as np
import pytest

from nearkin.core import files
from nearkin.gallery import Gallery
from nearkin.gallery.schema import unit
from nearkin.gallery.stores import disk_index, index_build, list_search, matrix, stored_forms

FORMS = ("float32", "int8", "binary", "short:8")
DIM = 20


def rows_in_classes(count: int, spread: float = 0.35, dim: int = DIM, seed: int = 0) -> np.ndarray:
    """Classes of ten rows around centres on the sphere."""
    draw = np.random.default_rng(seed)
    centres = unit(draw.normal(size=(-(-count // 10), dim)))
    return unit(centres[np.arange(count) // 10] + spread * draw.normal(size=(count, dim)) / dim**0.5)


def by_float64(rows: np.ndarray, ids: np.ndarray, query: np.ndarray, k: int) -> list[int]:
    """Ids of the nearest rows, ties by id: a loop over all of them."""
    score = [float(sum(float(a) * float(b) for a, b in zip(row, query, strict=True))) for row in rows]
    return [int(ids[i]) for i in sorted(range(len(rows)), key=lambda i: (-score[i], ids[i]))[:k]]


def fast_float64(rows: np.ndarray, query: np.ndarray, k: int) -> list[int]:
    score = rows.astype(np.float64) @ query.astype(np.float64)
    return [int(i) + 1 for i in np.lexsort((np.arange(len(rows)), -score))[:k]]


@pytest.fixture
def few_exact(monkeypatch):
    """Lists, and an approximate search, already among a few thousand rows."""
    monkeypatch.setattr(index_build, "EXACT", 1000)
    monkeypatch.setattr(index_build, "QUERIES", 60)


@pytest.fixture(params=FORMS)
def stored(request):
    return request.param


def enrolled(place: Path, rows: np.ndarray, stored: str) -> Gallery:
    gallery = Gallery.open(place, dim=rows.shape[1], stored=stored)
    labels = [f"class {i // 10}" for i in range(len(rows))]
    gallery.enrol(rows, labels, [{"two": i % 2, "n": i % 7} for i in range(len(rows))])
    return gallery


def ids_of(hits) -> list[int]:
    return [hit.id for hit in hits]


# --- forms


@pytest.mark.parametrize("kind,dim", [("float32", DIM), ("int8", DIM), ("binary", DIM), ("short", 8)])
@pytest.mark.parametrize("fast", [True, False])
def test_no_score_is_farther_from_the_cosine_than_its_bound(kind, dim, fast):
    rows = np.concatenate([rows_in_classes(300), unit(np.eye(DIM)), unit(-np.ones((1, DIM)))])
    coded = stored_forms.Coded(kind, dim, stored_forms.encode(rows, kind, dim))
    coded._int8 = coded._int8 and fast
    for query in (*rows[::37], *unit(np.random.default_rng(3).normal(size=(20, DIM)))):
        near, error = coded.scores(coded.query(query), slice(0, len(rows)))
        cosine = rows.astype(np.float64) @ query.astype(np.float64)
        assert (np.abs(near - cosine) <= error).all()
        chosen = np.array([5, 300, 17])
        assert np.allclose(coded.scores(coded.query(query), chosen)[0], near[chosen], atol=1e-6)


def test_bounds_are_not_empty():
    """A bound of 2 would always hold."""
    rows, query = rows_in_classes(300), rows_in_classes(10, seed=5)[0]
    widths = {}
    for kind, dim in (("float32", DIM), ("int8", DIM), ("short", 16), ("binary", DIM)):
        coded = stored_forms.Coded(kind, dim, stored_forms.encode(rows, kind, dim))
        widths[kind] = float(coded.scores(coded.query(query), slice(0, 300))[1].mean())
    assert widths["float32"] < 1e-4 < widths["int8"] < 0.05 < widths["short"] < widths["binary"] < 0.8


@pytest.mark.parametrize("text", ["int4", "short:0", "short:20", "short:x", "", 8])
def test_an_unknown_form_is_one_sentence(text, tmp_path):
    with pytest.raises(ValueError, match="stored"):
        Gallery.open(tmp_path / "g", dim=DIM, stored=text)
    assert not (tmp_path / "g").exists()


# --- answers


@pytest.mark.parametrize("count", [0, 1, 7, 300])
def test_small_galleries_answer_as_a_loop_over_all_rows(stored, count, tmp_path):
    rows = rows_in_classes(count)
    queries = unit(np.random.default_rng(1).normal(size=(5, DIM)))
    with Gallery.open(tmp_path / "g", dim=DIM, stored=stored) as gallery:
        if count:
            gallery.enrol(rows, [f"class {i // 10}" for i in range(count)])
        for query in queries:
            hits = gallery.search(query, 10)
            assert ids_of(hits) == by_float64(rows, np.arange(1, count + 1), query, 10)
            assert hits.proved is True
        gallery.reindex()
        hits = gallery.search(queries[0], 10)
        assert ids_of(hits) == by_float64(rows, np.arange(1, count + 1), queries[0], 10)
        assert gallery.stats()["rows"] == count
        assert gallery.labels() == {f"class {i}": min(10, count - 10 * i) for i in range(-(-count // 10))}


def test_exact_is_exact_and_what_is_proved_is_exact(stored, tmp_path, few_exact):
    """Among rows with structure and without; an answer that is not proved says what recall was measured."""
    rows = np.concatenate([rows_in_classes(5000, 0.2), unit(np.random.default_rng(9).normal(size=(150, DIM)))])
    draw = np.random.default_rng(2)
    queries = unit(rows[draw.integers(0, len(rows), 60)] + 0.3 * draw.normal(size=(60, DIM)) / DIM**0.5)
    with enrolled(tmp_path / "g", rows, stored) as gallery:
        gallery.warm()
        unproved, hits_found = 0, 0
        for query in queries:
            truth = fast_float64(rows, query, 10)
            exact = gallery.search(query, 10, exact=True)
            assert ids_of(exact) == truth and exact.proved is True and exact.recall is None
            near = gallery.search(query, 10)
            hits_found += len(set(ids_of(near)) & set(truth))
            if near.proved:
                assert ids_of(near) == truth
            else:
                unproved += 1
                assert 0.9 < near.recall <= 1
        assert unproved  # or the approximate search was never used
        assert hits_found / 600 > 0.95
        assert "recall@10" in gallery.stats()["index"] and gallery.stats()["stored"] == stored


def test_every_group_of_near_rows_gets_a_centroid():
    """Begun at random rows and never moved, one in four has none, and a search must read many lists for its rows."""
    draw = np.random.default_rng(3)
    centres = draw.standard_normal((200, 64))
    rows = unit((centres[np.arange(10_000) % 200] + 0.5 * draw.standard_normal((10_000, 64))).astype(np.float32))
    centroids = index_build._train(rows, 260)
    nearest = (unit(centres.astype(np.float32)) @ centroids.T).max(1)
    assert (nearest < 0.95).sum() <= 4


def test_tight_classes_are_proved_without_reading_all_lists(tmp_path, few_exact, monkeypatch):
    """The bound by angles reaches where lists are tight and far apart."""
    draw = np.random.default_rng(4)
    centres = unit(draw.normal(size=(40, 64)))
    rows = unit(centres[np.arange(4000) // 100] + 0.05 * draw.normal(size=(4000, 64)) / 8)
    with enrolled(tmp_path / "g", rows, "int8") as gallery:
        gallery.warm()
        lists = gallery._store.index._lists
        assert lists.probes < len(lists.centroids) / 2
        proved = 0
        for query in rows[::160]:
            hits = gallery.search(query, 5)
            assert ids_of(hits) == fast_float64(rows, query, 5) or not hits.proved
            proved += bool(hits.proved)
        assert proved >= 20


def test_a_bound_that_lies_is_seen(tmp_path, few_exact, monkeypatch):
    """The test above fails where the bound claims too much: an approximate search with every answer called proved."""
    rows = unit(np.random.default_rng(9).normal(size=(3000, DIM)))
    with enrolled(tmp_path / "g", rows, "int8") as gallery:
        gallery.warm()
        lists = gallery._store.index._lists
        lists.head["exact"], lists.probes = False, 2
        truth = [fast_float64(rows, query, 10) for query in rows[:40]]
        answers = [gallery.search(query, 10) for query in rows[:40]]
        assert any(ids_of(hits) != wanted for hits, wanted in zip(answers, truth, strict=True))
        assert all(ids_of(hits) == wanted for hits, wanted in zip(answers, truth, strict=True) if hits.proved)
        near_lists = list_search.Lists.near_lists
        monkeypatch.setattr(
            list_search.Lists,
            "near_lists",
            lambda self, q, n: (near_lists(self, q, n)[0], near_lists(self, q, n)[1] - 2),
        )
        wrong = [gallery.search(query, 10) for query in rows[:40]]
        assert any(hits.proved and ids_of(hits) != wanted for hits, wanted in zip(wrong, truth, strict=True))


@pytest.mark.parametrize("filter", [{"label": "class 3"}, {"two": 1}, {"n": [2, 5], "two": 0}, {"n": 99}, {"x": 1}])
def test_filters_are_exact(stored, filter, tmp_path, few_exact):
    rows = rows_in_classes(3000)
    i = np.arange(3000)
    masks = {"two": i % 2, "n": i % 7, "label": np.array([f"class {j // 10}" for j in i]), "x": np.full(3000, -1)}
    allowed = np.ones(3000, bool)
    for key, value in filter.items():
        allowed &= np.isin(masks[key], value)
    with enrolled(tmp_path / "g", rows[:2500], stored) as gallery:
        gallery.warm()
        labels = [f"class {j // 10}" for j in range(2500, 3000)]
        gallery.enrol(rows[2500:], labels, [{"two": j % 2, "n": j % 7} for j in range(2500, 3000)])
        for query in rows[::500]:
            hits = gallery.search(query, 10, filter)
            near = np.flatnonzero(allowed)
            truth = [int(near[j - 1]) + 1 for j in fast_float64(rows[near], query, 10)] if len(near) else []
            assert ids_of(hits) == truth and hits.proved


def test_equal_rows_are_ordered_by_id(stored, tmp_path, few_exact):
    """Names make them different items."""
    vector = rows_in_classes(1)[0]
    other = rows_in_classes(1200, seed=3)
    with Gallery.open(tmp_path / "g", dim=DIM, stored=stored) as gallery:
        seen = gallery.see(list(np.repeat(vector[None], 200, 0)))
        items = [item._replace(content=bytes([i]) * 32) for i, item in enumerate(seen)]
        gallery.enrol(items, "same")
        gallery.enrol(other, "other")
        gallery.warm()
        assert ids_of(gallery.search(vector, 50, exact=True)) == list(range(1, 51))


def test_more_keys_than_columns_are_still_filtered(tmp_path, monkeypatch):
    monkeypatch.setattr("nearkin.gallery.stores.filter_columns.MAX_COLUMNS", 2)
    rows = rows_in_classes(60)
    with Gallery.open(tmp_path / "g", dim=DIM, stored="int8") as gallery:
        gallery.enrol(rows, "a", [{f"key {i % 5}": i} for i in range(60)])
        gallery.warm()
        assert ids_of(gallery.search(rows[0], 3, {"key 4": [9, 14]})) in ([10, 15], [15, 10])
        assert gallery.search(rows[0], 3, {"key 4": 8}) == []


# --- changes


def test_rows_added_removed_and_relabelled_are_seen_at_once(stored, tmp_path, few_exact):
    rows = rows_in_classes(2200)
    place = tmp_path / "g"
    with enrolled(place, rows[:2000], stored) as gallery, Gallery.open(place) as reader:
        reader.warm()
        gallery.enrol(rows[2000:], "late")
        assert ids_of(reader.search(rows[2100], 1)) == [2101]
        gallery.remove([2101, 5])
        assert ids_of(reader.search(rows[2100], 1, exact=True)) != [2101]
        assert 5 not in ids_of(reader.search(rows[4], 20, exact=True))
        gallery.relabel([1, 2002], "renamed")
        assert sorted(ids_of(reader.search(rows[0], 5, {"label": "renamed"}))) == [1, 2002]
        assert 1 not in ids_of(reader.search(rows[0], 20, {"label": "class 0"}))
        gallery.relabel(1, "again")
        gallery.remove(2002)
        assert reader.search(rows[0], 5, {"label": "renamed"}) == []
        assert ids_of(reader.search(rows[0], 5, {"label": "again"})) == [1]
        counts = reader.labels()
        assert counts["again"] == 1 and counts["class 0"] == 8 and "renamed" not in counts and counts["late"] == 198
        assert reader.stats()["rows"] == sum(counts.values()) == 2197 and reader.stats()["lost"] == 0
        assert reader._store.counts_of(["again", "class 0", "none"]) == {"again": 1, "class 0": 8}
        assert reader._store.label_sizes() == _sizes(counts)
    with Gallery.open(place) as opened:  # the file and what changed since
        assert opened.labels() == counts
        opened.reindex()
        assert opened.labels() == counts and opened.stats()["changed_since_index"] == 0


def _sizes(counts: dict[str, int]) -> dict[int, int]:
    return {size: sum(count == size for count in counts.values()) for size in set(counts.values())}


def test_many_changes_make_the_file_stale(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_index, "FEW", 10)
    rows = rows_in_classes(200)
    with enrolled(tmp_path / "g", rows[:100], "int8") as gallery:
        gallery.warm()
        gallery.enrol(rows[100:105], "late")
        gallery.warm()
        assert gallery.stats()["changed_since_index"] == 5
        gallery.enrol(rows[105:], "late")
        gallery.warm()
        assert gallery.stats()["changed_since_index"] == 0


def test_another_reader_takes_over_a_newer_file(tmp_path):
    rows = rows_in_classes(200)
    with enrolled(tmp_path / "g", rows[:100], "int8") as gallery, Gallery.open(tmp_path / "g") as reader:
        reader.warm()
        gallery.enrol(rows[100:], "late")
        gallery.reindex()
        gallery.remove(1)
        assert ids_of(reader.search(rows[150], 1)) == [151]
        assert reader.stats()["changed_since_index"] == 1


# --- damage


@pytest.mark.parametrize("stored", ["int8", "binary"])
def test_a_damaged_file_is_built_again_with_a_word(stored, tmp_path):
    rows = rows_in_classes(1500)
    place, codes = tmp_path / "g", tmp_path / "g.codes"
    enrolled(place, rows, stored).close()
    with Gallery.open(place) as gallery:
        gallery.warm()
    content = codes.read_bytes()
    draw = np.random.default_rng(0)
    places = [0, len(content) - 1, len(content) - 300, *draw.integers(0, len(content), 12).tolist()]
    for at in places:
        codes.write_bytes(content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :])
        with Gallery.open(place) as gallery, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert ids_of(gallery.search(rows[7], 5, exact=True)) == fast_float64(rows, rows[7], 5)
        padding = codes.read_bytes() != content or not caught  # a byte between two arrays is no damage
        assert padding or "made again" in str(caught[0].message)
    for cut in (0, 10, len(content) // 2, len(content) - 1):
        codes.write_bytes(content[:cut])
        with Gallery.open(place) as gallery, pytest.warns(RuntimeWarning, match="damaged, and is made again"):
            assert ids_of(gallery.search(rows[7], 5, exact=True)) == fast_float64(rows, rows[7], 5)


def test_a_file_of_another_gallery_or_form_is_built_again(tmp_path):
    rows, others = rows_in_classes(50), rows_in_classes(50, seed=8)
    enrolled(tmp_path / "a", rows, "int8").close()
    enrolled(tmp_path / "b", others, "int8").close()
    for name in "ab":
        with Gallery.open(tmp_path / name) as gallery:
            gallery.warm()
    (tmp_path / "a.codes").write_bytes((tmp_path / "b.codes").read_bytes())
    with Gallery.open(tmp_path / "a") as gallery, pytest.warns(RuntimeWarning, match="of another gallery"):
        assert ids_of(gallery.search(rows[7], 5)) == fast_float64(rows, rows[7], 5)


def test_a_restored_older_copy_is_noticed(tmp_path):
    rows, others = rows_in_classes(100), rows_in_classes(100, seed=8)
    place = tmp_path / "g"
    enrolled(place, rows[:60], "int8").close()
    copy = place.read_bytes()
    with Gallery.open(place) as gallery:
        gallery.enrol(rows[60:], "late")
        gallery.warm()
    place.write_bytes(copy)
    with Gallery.open(place) as gallery:
        gallery.enrol(others[60:], "other")
        with pytest.warns(RuntimeWarning, match="of another state"):
            hits = gallery.search(others[70], 5)
        expected = np.concatenate([rows[:60], others[60:]])
        assert ids_of(hits) == fast_float64(expected, others[70], 5)


def test_a_damaged_row_is_left_out_and_the_next_one_found(stored, tmp_path):
    import sqlite3
    from contextlib import closing

    rows = rows_in_classes(100)
    place = tmp_path / "g"
    enrolled(place, rows, stored).close()
    with Gallery.open(place) as gallery:
        gallery.warm()
    with closing(sqlite3.connect(place)) as connection, connection:
        connection.execute("UPDATE items SET vector = zeroblob(?) WHERE id = 8", (4 * DIM,))
        connection.execute("DELETE FROM items WHERE id = 9")
    with Gallery.open(place) as gallery:
        with pytest.warns(RuntimeWarning):
            hits = gallery.search(rows[7], 10)
        kept = [i for i in range(100) if i not in (7, 8)]
        truth = [kept[j - 1] + 1 for j in fast_float64(rows[kept], rows[7], 10)]
        assert ids_of(hits) == truth
        assert gallery.stats()["damaged"] == [8] and gallery.stats()["lost"] == 1
        gallery.reindex()
        assert ids_of(gallery.search(rows[7], 10)) == truth
    with Gallery.open(place) as gallery:
        gallery.repair()
        assert ids_of(gallery.search(rows[7], 10)) == truth
        assert gallery.stats()["damaged"] == [] and gallery.stats()["lost"] == 0


def test_check_reads_the_file(tmp_path):
    enrolled(tmp_path / "g", rows_in_classes(50), "int8").close()
    with Gallery.open(tmp_path / "g") as gallery:
        gallery.warm()
        assert gallery.check().whole
        content = bytearray((tmp_path / "g.codes").read_bytes())
        content[3] ^= 1
        (tmp_path / "g.codes").write_bytes(content)
        assert "damaged" in gallery.check().notes[0]


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root writes everywhere")
def test_in_a_read_only_folder_the_index_is_temporary(tmp_path):
    enrolled(tmp_path / "g", rows := rows_in_classes(50), "int8").close()
    tmp_path.chmod(0o500)
    try:
        with Gallery.open(tmp_path / "g") as gallery, pytest.warns(RuntimeWarning, match="temporary"):
            assert ids_of(gallery.search(rows[7], 5)) == fast_float64(rows, rows[7], 5)
    finally:
        tmp_path.chmod(0o700)


def test_where_the_file_cannot_be_written_the_index_is_temporary(tmp_path, monkeypatch):
    from nearkin.core import files

    enrolled(tmp_path / "g", rows := rows_in_classes(50), "int8").close()

    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "replacing", full)
    with Gallery.open(tmp_path / "g") as gallery, pytest.warns(RuntimeWarning, match="temporary file"):
        assert ids_of(gallery.search(rows[7], 5)) == fast_float64(rows, rows[7], 5)


# --- kills


KILLED = """
    import sys
    import numpy as np
    from nearkin.gallery import Gallery
    from nearkin.gallery.stores import index_build
    index_build.EXACT, index_build.QUERIES = 100, 10
    rows = np.load(sys.argv[2])
    with Gallery.open(sys.argv[1], dim=rows.shape[1], stored="int8") as gallery:
        for start in range(0, len(rows), 50):
            ids = gallery.enrol(rows[start : start + 50], "a").ids
            print(" ".join(map(str, ids)), flush=True)
            gallery.reindex()
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_a_kill_while_enrolling_and_building_loses_nothing(tmp_path):
    rows = rows_in_classes(2000)
    np.save(tmp_path / "rows.npy", rows)
    script = tmp_path / "killed.py"
    script.write_text(textwrap.dedent(KILLED))
    draw = np.random.default_rng(0)
    for kill in range(5):
        place = tmp_path / f"g{kill}"
        command = [sys.executable, str(script), str(place), str(tmp_path / "rows.npy")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            lines = [process.stdout.readline() for _ in range(int(draw.integers(2, 12)))]
            try:
                process.wait(float(draw.uniform(0, 0.3)))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
            lines += process.stdout.read().splitlines()
        acknowledged = {int(i) for line in lines for i in line.split()}
        assert acknowledged
        with Gallery.open(place) as gallery:
            count = gallery.stats()["rows"]
            assert acknowledged <= set(range(1, count + 1))
            for query in rows[:count:97]:
                assert ids_of(gallery.search(query, 5, exact=True)) == fast_float64(rows[:count], query, 5)
            assert gallery.check().whole
        assert not [name for name in os.listdir(tmp_path) if name.endswith(".lock")]


def test_what_a_killed_builder_left_is_removed_and_a_living_ones_file_is_not(tmp_path):
    left, living, foreign = (tmp_path / name for name in (".g.codes.0123abcd", ".g.codes.4567abcd", ".g.codes.x"))
    for path in (left, living, foreign):
        path.write_bytes(b"half")
    with living.open("r+b") as file:
        files.hold(file)
        enrolled(tmp_path / "g", rows_in_classes(50), "int8").search(rows_in_classes(50)[3], 1)
        assert not left.exists() and living.exists() and foreign.exists()


# --- conversion


def test_a_gallery_is_converted_there_and_back(tmp_path):
    rows = rows_in_classes(120)
    place = tmp_path / "g"
    with Gallery.open(place, dim=DIM) as gallery, Gallery.open(place) as reader:
        gallery.enrol(rows, "a")
        before = gallery.search(rows[3], 10)
        assert reader.search(rows[3], 10) == before
        for form in (*FORMS, None):
            gallery.store_as(form)
            assert reader.search(rows[3], 10) == gallery.search(rows[3], 10) == before
            assert gallery.stats().get("stored") == form
            assert (tmp_path / "g.codes").exists() == (form is not None)
    with pytest.raises(ValueError, match="nearkin gallery convert"):
        Gallery.open(place, stored="int8")


def test_a_conversion_builds_the_new_form_alone_and_leaves_no_file_of_the_old_one(tmp_path, monkeypatch):
    """In a gallery that was just opened, as `nearkin gallery convert` does."""
    place, built = tmp_path / "g", []
    enrolled(place, rows_in_classes(50), "int8").close()
    build = index_build.build
    monkeypatch.setattr(index_build, "build", lambda *a, **b: (built.append(a[2].text), build(*a, **b))[1])
    for form in ("binary", "short:8", None):
        with Gallery.open(place) as gallery:
            gallery.store_as(form)
        assert (tmp_path / "g.codes").exists() == (form is not None)
    assert built == ["binary", "short:8"]


def test_the_encoding_of_a_row_is_the_same_in_any_company():
    rows = rows_in_classes(100)
    for kind, dim in (("int8", DIM), ("binary", DIM), ("short", 8)):
        together = stored_forms.encode(rows, kind, dim)["codes"]
        alone = np.concatenate([stored_forms.encode(row[None], kind, dim)["codes"] for row in rows])
        assert (together == alone).all()


def test_the_description_of_the_file_is_plain_json(tmp_path):
    enrolled(tmp_path / "g", rows_in_classes(50), "binary").close()
    with Gallery.open(tmp_path / "g") as gallery:
        gallery.warm()
    with (tmp_path / "g.codes").open("rb") as file:
        head = disk_index.index_file.read_head(file)
    assert json.loads(json.dumps(head))["stored"] == "binary" and head["recall"] == 1.0
    assert matrix.has_int8_matmul() in (True, False)
