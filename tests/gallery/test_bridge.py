"""Bridges between encoders, the scale of bridged rows, error rates across, and the search among both kinds of rows."""

import numpy as np
import pytest

from calibrations import embeddings
from nearkin.gallery import Gallery, bridge, bridge_scale
from nearkin.gallery.bridge_scale import Scale
from nearkin.gallery.mixed_search import MixedRows
from nearkin.gallery.schema import bridged_metadata, checksum, pack, parse_filter, unit


def world(items=400, old_dim=10, new_dim=14, bend=0.0, seed=0):
    """Old and new embeddings of the same items: another basis, and with `bend` another shape."""
    draw = np.random.default_rng(seed)
    hidden = draw.normal(size=(items, 6))
    curved = hidden + bend * np.sin(3 * hidden)
    old = hidden @ draw.normal(size=(6, old_dim)) + 0.02 * draw.normal(size=(items, old_dim))
    new = curved @ draw.normal(size=(6, new_dim)) + 0.02 * draw.normal(size=(items, new_dim))
    return unit(old), unit(new)


@pytest.mark.parametrize("kind", [kind for kind in bridge.KINDS if kind != "identity"])
@pytest.mark.parametrize("dims", [(10, 14), (14, 10), (12, 12)])
def test_every_kind_maps_items_that_it_was_not_fitted_on(kind, dims):
    old, new = world(600, *dims)
    mapped = bridge.fit(kind, bridge.KINDS[kind][0], old[:400], new[:400])(old[400:])
    assert mapped.dtype == np.float32 and mapped.shape == (200, dims[1])
    np.testing.assert_allclose(np.linalg.norm(mapped, axis=1), 1, atol=1e-5)
    own, other = (mapped * new[400:]).sum(1), (mapped * np.roll(new[400:], 1, 0)).sum(1)
    assert own.mean() > 0.8 and own.mean() > other.mean() + 0.5
    assert bridge.fit(kind, bridge.KINDS[kind][0], old[:400], new[:400])(old[:0]).shape == (0, dims[1])


def test_ridge_and_kernel_are_those_of_the_formulas():
    old, new = world(60)
    x, y = (rows.astype(np.float64) - rows.astype(np.float64).mean(0) for rows in (old, new))
    penalty = 0.3 * np.trace(x.T @ x) / x.shape[1]
    rows = np.vstack([x, np.sqrt(penalty) * np.eye(x.shape[1])])  # the penalty as more rows of least squares
    weights = np.linalg.lstsq(rows, np.vstack([y, np.zeros((x.shape[1], y.shape[1]))]), rcond=None)[0]
    expected = unit(x @ weights + new.astype(np.float64).mean(0))
    np.testing.assert_allclose(bridge.fit("ridge", (0.3,), old, new)(old), expected, atol=1e-5)
    wide = old.astype(np.float64)
    square = np.array([[((a - b) ** 2).sum() for b in wide] for a in wide])
    width = np.median([square[i, j] for i in range(60) for j in range(i + 1, 60)])
    gram = np.exp(-1.0 / width * square)
    weights = np.linalg.solve(gram + 0.3 * np.eye(60), y)  # all pairs are landmarks
    expected = unit(gram @ weights + new.astype(np.float64).mean(0))
    np.testing.assert_allclose(bridge.fit("kernel", (1.0, 0.3), old, new)(old), expected, atol=1e-3)


def test_procrustes_is_a_rotation_between_whitened_rows():
    old, new = world(500, 12, 12)
    bridged = bridge.fit("procrustes", (0.01,), old, new)
    x, y = old.astype(np.float64), new.astype(np.float64)
    mapped = np.asarray(bridged.apply(x)) - y.mean(0)
    _, back = bridge._whitening(y - y.mean(0), 0.01)
    into, _ = bridge._whitening(x - x.mean(0), 0.01)
    rotated, before = mapped @ np.linalg.inv(back), (x - x.mean(0)) @ into
    np.testing.assert_allclose(np.linalg.norm(rotated, axis=1), np.linalg.norm(before, axis=1), rtol=1e-6)


def test_a_bent_space_wants_a_kernel_and_the_choice_sees_it():
    old, new = world(1500, bend=1.0)
    classes = np.arange(1500) // 5
    chosen = bridge.choose(old[:1000], new[:1000], classes[:1000], labelled=False)
    assert chosen.bridge.kind in ("kernel", "mlp") and set(chosen.tried) == set(bridge.KINDS) - {"identity"}
    straight = bridge.fit("ridge", (0.1,), old[:1000], new[:1000])
    better, worse = ((one(old[1000:]) * new[1000:]).sum(1).mean() for one in (chosen.bridge, straight))
    assert better > worse + 0.02


def test_compatible_embeddings_need_no_bridge():
    rows, labels = embeddings(60, 6, seed=6)
    near = unit(rows + 0.02 * np.random.default_rng(0).normal(size=rows.shape))
    chosen = bridge.choose(rows, near, labels)
    assert chosen.bridge.kind == "identity" and (chosen.bridge(rows) == unit(rows)).all()
    with pytest.raises(ValueError, match="of one length, got 24 and 23"):
        bridge.fit("identity", (), rows, near[:, 1:])


def test_the_choice_is_judged_by_classes_that_it_was_not_fitted_on(monkeypatch):
    old, new = world(300)
    classes = np.arange(300) // 6
    position = {row.tobytes(): i for i, row in enumerate(old)}
    fitted, judged, plain_fit = [], [], bridge.fit

    def fit(kind, settings, x, y, seed=0):
        fitted.append({int(classes[position[row.tobytes()]]) for row in x})
        made = plain_fit(kind, settings, x, y, seed)

        def apply(rows):
            judged.append({int(classes[position[row.astype(np.float32).tobytes()]]) for row in rows})
            return made.apply(rows)

        return bridge.Bridge(kind, made.settings, apply)

    monkeypatch.setattr(bridge, "fit", fit)
    monkeypatch.setattr(bridge, "KINDS", {"ridge": ((0.1,), (1.0,))})
    bridge.choose(old, new, classes)
    assert len(judged) == 2 and all(a.isdisjoint(b) and a and b for a, b in zip(fitted, judged, strict=False))
    assert fitted[-1] == set(range(50))  # then on all


def test_quality_is_that_of_plain_loops():
    rows, labels = embeddings(9, 4, seed=1)
    queries = unit(rows + 0.4 * np.random.default_rng(0).normal(size=rows.shape))
    first, precision, places = bridge.per_query(queries, rows, labels)
    for value, mean, i in zip(first, precision, places, strict=True):
        others = [j for j in range(len(rows)) if j != i]
        order = sorted(others, key=lambda j: -float(queries[i] @ rows[j]))
        positives = sum(labels[j] == labels[i] for j in others)
        hits = [labels[j] == labels[i] for j in order[:positives]]
        assert value == float(labels[order[0]] == labels[i])
        expected = sum(sum(hits[: k + 1]) / (k + 1) for k in range(positives) if hits[k]) / positives
        assert mean == pytest.approx(expected)
    first, precision, _ = bridge.per_query(queries, rows, None)
    for i in range(len(rows)):
        place = sum(float(queries[i] @ row) > float(queries[i] @ rows[i]) for row in rows)
        assert (first[i], precision[i]) == (float(place == 0), pytest.approx(1 / (1 + place)))


def test_bad_pairs_are_one_sentence():
    old, new = world(20)
    with pytest.raises(ValueError, match="as many old as new embeddings, got 20 and 19"):
        bridge.fit("ridge", (0.1,), old, new[:-1])
    with pytest.raises(ValueError, match='"linear"'):
        bridge.fit("linear", (0.1,), old, new)


# --- the scale


def test_a_scale_keeps_the_order_and_makes_shares_equal():
    rows, _ = embeddings(120, 8, seed=2)
    shrunk = unit(rows + 0.8 * np.random.default_rng(1).normal(size=rows.shape) / rows.shape[1] ** 0.5)
    scale = bridge_scale.measure_scale(rows[:480], shrunk[:480])
    grid = np.linspace(-1, 1, 2001)
    assert (np.diff(scale(grid)) >= 0).all() and scale(np.array(1.0)) < 1
    other = ~np.eye(480, dtype=bool)
    cosine, plain = (rows[480:] @ shrunk[480:].T)[other], (rows[480:] @ rows[480:].T)[other]
    for share in (0.5, 0.9, 0.99, 0.999):  # of other classes
        reached = (scale(cosine) >= np.quantile(plain, share)).mean()
        assert reached == pytest.approx(1 - share, rel=0.6)
    assert (cosine >= np.quantile(plain, 0.999)).mean() < 0.0003  # not so without a scale
    same = bridge_scale.measure_scale(rows, rows)
    inner = grid[(grid > -0.3) & (grid < 0.9)]
    np.testing.assert_allclose(same(inner), inner, atol=1e-5)


# --- the search


@pytest.mark.parametrize("seed", range(4))
def test_a_mixed_search_has_the_order_of_a_full_comparison(tmp_path, seed):
    draw = np.random.default_rng(seed)
    vectors = unit(draw.normal(size=(300, 6)))
    with Gallery.open(tmp_path / "g", dim=6) as gallery:
        gallery.enrol(vectors, [f"c{i % 9}" for i in range(300)], [{"n": i % 4} for i in range(300)])
        marks = {}
        with gallery._store.transaction() as (writer, facts):
            for row in list(gallery._store.scan()):
                if mark := ("", "", "a", "b")[draw.integers(4)]:
                    new = row._replace(metadata=bridged_metadata(row.metadata, mark))
                    fields = (new.metadata, checksum(*new), row.id)
                    writer.execute("UPDATE items SET metadata = ?, sum = ? WHERE id = ?", fields)
                    marks[row.id] = mark
            gallery._store.write_facts(writer, facts.replace(changes=facts.changes + 1))
        scales = {
            "a": Scale((-1.0, 0.0, 0.3, 1.0), (-1.0, 0.4, 0.9, 0.99)),
            "b": Scale((-1.0, 0.5, 1.0), (-1.0, -0.5, 0.5)),
        }
        mixed = MixedRows(gallery._store, scales)
        for filter in (None, {"n": 2}):
            query = unit(draw.normal(size=(1, 6)))[0]
            near = mixed.nearest(query, 7, parse_filter(filter))
            expected = []
            for i, vector in enumerate(vectors):
                cosine = float((vector.astype(np.float64) * query).sum())
                scale = scales.get(marks.get(i + 1, ""))
                if filter is None or i % 4 == 2:
                    expected.append((-(cosine if scale is None else float(scale(np.array(cosine)))), i + 1))
            expected.sort()
            assert [row.id for row, _ in near] == [id for _, id in expected[:7]]
            np.testing.assert_allclose([s for _, s in near], [-s for s, _ in expected[:7]], atol=1e-6)
        assert len(mixed.nearest(vectors[0], 500, None)) == 300
        assert pack(vectors[:1])[0] == next(iter(gallery._store.rows([1]).values())).vector
