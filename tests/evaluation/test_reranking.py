"""Re-ranking from neighbour lists against the dense algorithm, loop by loop; and through `retrieval`."""

import math

import numpy as np
import pytest
import torch
from dense_reranking import expanded, k_reciprocal, ranking
from hypothesis import given, settings
from hypothesis import strategies as st
from test_knn import grids
from test_retrieval import metrics_of, same

from nearkin.core import relations
from nearkin.evaluation import DBA, AlphaQE, KReciprocal, rerank, retrieval
from nearkin.evaluation.retrieval import k_reciprocal as sparse
from nearkin.evaluation.retrieval import rerank_settings, retrieval_metrics
from nearkin.evaluation.retrieval.level_metrics import by_level

KS = (1, 2, 5, 30)
ALL = retrieval_metrics.METRICS


def clustered(items=60, dim=6, classes=9, seed=0, spread=0.7):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(items) % classes
    x = torch.randn(classes, dim, generator=generator)[labels] + spread * torch.randn(items, dim, generator=generator)
    x[items // 2 :: 7] = x[: items // 2 : 7][: len(x[items // 2 :: 7])]  # duplicates
    return x, labels


def check(x, gallery, method, kind, k=None, budget=2**29):
    """All d* to 1e-9 and the order, with ties, of the first k."""
    final, d = k_reciprocal(x, gallery, method.k1, method.k2, method.lambda_, kind)
    order = ranking(final, d, gallery is None)
    size = len(x) if gallery is None else len(gallery)
    result = rerank(x, gallery, k=k or size, method=method, similarity=kind, budget=budget)
    for i, expected in enumerate(order):
        items = [j for j in result.indices[i].tolist() if j >= 0]
        assert items == expected[: k or size]
        values = -result.similarity[i, : len(items)].numpy()
        assert np.abs(values - final[i, items]).max(initial=0) < 1e-9
        assert torch.isinf(result.similarity[i, len(items) :]).all()


@pytest.mark.parametrize("kind", ["cosine", "euclidean"])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(
    "method",
    [KReciprocal(20, 6), KReciprocal(6, 2, 0.3), KReciprocal(5, 1, 0.0), KReciprocal(3, 4, 1.0), KReciprocal(1, 1)],
)
def test_lists_give_the_published_distances(kind, apart, method):
    x, _ = clustered()
    queries, gallery = (x[:25], x[25:]) if apart else (x, None)
    check(queries, gallery, method, kind)
    check(queries, gallery, method, kind, k=4)


@settings(max_examples=100, deadline=None)
@given(
    grids(), st.booleans(), st.sampled_from(["cosine", "euclidean"]), st.integers(1, 9), st.integers(1, 4),
    st.sampled_from([0.0, 0.3, 1.0]), st.integers(1, 6),
)  # fmt: skip
def test_small_whole_numbers_with_many_ties(x, self_search, kind, k1, k2, share, k):
    gallery = None if self_search else x.flip(0)
    check(x, gallery, KReciprocal(k1, min(k2, k1 + 1), share), kind, k)


@pytest.mark.parametrize("apart", [False, True])
def test_equal_rows_tie_and_fewer_items_than_neighbours(apart):
    x = torch.ones(7, 3)
    queries, gallery = (x[:2], x[2:]) if apart else (x, None)
    for method in (KReciprocal(2, 2), KReciprocal(20, 6)):
        check(queries, gallery, method, "cosine")
    check(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), None, KReciprocal(20), "euclidean")


def test_a_budget_of_many_blocks_changes_nothing(monkeypatch):
    """Blocks of the gallery, of rows and of pairs: every sum has the same order of additions."""
    x, _ = clustered(300, 8, 20)
    for queries, gallery in ((x, None), (x[:100], x[100:])):
        expected = rerank(queries, gallery, k=30, method=KReciprocal(12, 4))
        small = rerank(queries, gallery, k=30, method=KReciprocal(12, 4), budget=2**17)
        assert torch.equal(small.indices, expected.indices) and torch.equal(small.similarity, expected.similarity)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sparse, "_ENTRY", 2**20)  # one row at a time, piece by piece
            tiny = rerank(queries, gallery, k=30, method=KReciprocal(12, 4), budget=2**24)
        assert torch.equal(tiny.indices, expected.indices) and torch.equal(tiny.similarity, expected.similarity)


def naive(x, labels, gallery, gallery_labels, order, left_out=None):
    """Means over queries of all metrics, from complete rankings."""
    rows = []
    other = labels if gallery is None else gallery_labels
    for i, items in enumerate(order):
        hits = [bool(labels[i] == other[j]) for j in items if left_out is None or not left_out[i][j]]
        if any(hits):
            rows.append(metrics_of(hits, KS))
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]} if rows else {}


METHODS = [KReciprocal(8, 3), AlphaQE(4, 3.0), DBA(4, 1.5)]


def orders(x, gallery, method):
    """Complete rankings by the dense algorithms."""
    if isinstance(method, KReciprocal):
        return ranking(*k_reciprocal(x, gallery, method.k1, method.k2, method.lambda_), gallery is None)
    database = x.numpy() if gallery is None else gallery.numpy()
    if isinstance(method, AlphaQE):
        a, b = expanded(x, gallery, method.neighbours, method.alpha), database
    else:
        a, b = x.numpy(), expanded(database, None, method.neighbours, method.alpha)
    a, b = (y / np.linalg.norm(y, axis=1, keepdims=True) for y in (a, b))
    distance = 1 - a @ b.T
    return ranking(distance, distance, gallery is None)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("metrics", [retrieval_metrics.DEFAULT, ALL])
def test_retrieval_measures_the_new_order(method, apart, metrics):
    x, labels = clustered(90, classes=15)
    x = x.double()
    sides = (x[:30], labels[:30], x[30:], labels[30:]) if apart else (x, labels, None, None)
    expected = naive(*sides, orders(sides[0], sides[2], method))
    result = retrieval(*sides, ks=KS, metrics=metrics, rerank=method)
    same(result, {name: value for name, value in expected.items() if name in result})
    plain = retrieval(*sides, ks=KS, metrics=metrics)
    assert result != plain and result["queries"] == plain["queries"]


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
@pytest.mark.parametrize("apart", [False, True])
def test_groups_are_left_out_of_the_ranking_only(method, apart):
    """Items of the query's class and group take part as neighbours, as in public code, and have no position."""
    x, labels = clustered(90, classes=15)
    x, groups = x.double(), torch.arange(90) // 15 % 3
    sides = (x[:30], labels[:30], x[30:], labels[30:]) if apart else (x, labels, None, None)
    of = (groups[:30], groups[30:]) if apart else (groups, groups)
    other = labels[30:] if apart else labels
    left_out = (sides[1][:, None] == other) & (of[0][:, None] == of[1])
    expected = naive(*sides, orders(sides[0], sides[2], method), left_out.tolist())
    beside = {"groups": of[0], "gallery_groups": of[1]} if apart else {"groups": of[0]}
    for metrics in (retrieval_metrics.DEFAULT, ALL):
        result = retrieval(*sides, ks=KS, metrics=metrics, rerank=method, **beside)
        same(result, {name: value for name, value in expected.items() if name in result})


def test_unknown_items_levels_and_relations():
    x, labels = clustered(90, classes=15)
    labels[::10] = -1
    known = labels >= 0
    for method in METHODS:
        result = retrieval(x, labels, rerank=method)
        alone = retrieval(x[known], labels[known], rerank=method)
        assert all(result[name] == alone[name] for name in alone if name != "unknown")
        levels = by_level(x[known], labels[known], {"half": labels[known] % 5}, rerank=method)["half"]
        assert levels["map@r"] == retrieval(x[known], labels[known] % 5, rerank=method)["map@r"]
    x, labels = x[known], labels[known]
    for method in METHODS:
        assert retrieval(x, relations.of(labels), rerank=method) == retrieval(x, labels, rerank=method)
    both = relations.of(labels)
    ranked = both.positive | (both.negative & (torch.rand(both.negative.shape) < 0.5))
    expected = naive(x, labels, None, None, orders(x, None, METHODS[0]), (~ranked).tolist())
    result = retrieval(
        x, relations.Relation(both.positive, both.negative & ranked), rerank=METHODS[0], metrics=ALL, ks=KS
    )
    same(result, {name: value for name, value in expected.items() if name in result})


def test_expansion_adds_what_the_formula_says():
    """One neighbour with cosine 0.6: q + 0.6^2 y."""
    q, y = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.6, 0.8], [-1.0, 0.0]])
    found = rerank(q, y, k=2, method=AlphaQE(1, 2.0))
    row = torch.tensor([1 + 0.36 * 0.6, 0.36 * 0.8], dtype=torch.float64)
    assert found.indices.tolist() == [[0, 1]]
    expected = (row / row.norm()) @ torch.tensor([0.6, 0.8], dtype=torch.float64)
    assert float(found.similarity[0, 0]) == pytest.approx(float(expected), abs=1e-6)
    beyond = rerank(q, y, k=2, method=AlphaQE(2, 2.0))  # a negative cosine weighs 0
    assert torch.equal(beyond.similarity, found.similarity)


def test_names_and_settings():
    assert rerank_settings.settings_of("k-reciprocal:k1=10,lambda=0.5") == KReciprocal(10, 3, 0.5)
    assert rerank_settings.settings_of("alpha-qe") == AlphaQE() and rerank_settings.settings_of("dba:alpha=0") == DBA(
        alpha=0
    )
    assert KReciprocal(20).k2 == 6 and KReciprocal(1).k2 == 1
    x, labels = clustered()
    assert retrieval(x, labels, rerank="k-reciprocal:k1=8,k2=3") == retrieval(x, labels, rerank=KReciprocal(8, 3))
    assert retrieval(x.numpy(), labels.numpy(), rerank=AlphaQE(3)) == retrieval(x, labels, rerank=AlphaQE(3))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: KReciprocal(0), "k1 must be >= 1, got 0"),
        (lambda: KReciprocal(3, 5), "k2 must be <= 4"),
        (lambda: KReciprocal(lambda_=1.5), "lambda must be <= 1"),
        (lambda: KReciprocal(lambda_=math.nan), "lambda must be finite"),
        (lambda: AlphaQE(alpha=-1), "alpha must be >= 0"),
        (lambda: DBA(neighbours=2.5), "neighbours must be a whole number"),
        (
            lambda: rerank_settings.settings_of("k-reciprocl"),
            'unknown rerank "k-reciprocl"; did you mean "k-reciprocal"',
        ),
        (lambda: rerank_settings.settings_of("k-reciprocal:k3=1"), 'unknown setting of k-reciprocal "k3"'),
        (lambda: rerank_settings.settings_of("dba:neighbours=x"), "neighbours must be a whole number"),
        (lambda: retrieval(torch.randn(9, 2), torch.arange(9) % 3, rerank=20), "rerank must be a KReciprocal"),
        (
            lambda: retrieval(torch.randn(9, 2), torch.arange(9) % 3, rerank="dba", similarity="dot"),
            'similarity="dot" is not possible here: dba re-ranks by others; possible: cosine',
        ),
        (
            lambda: retrieval(torch.randn(9, 2), torch.arange(9) % 3, rerank="dba", backend="faiss"),
            'backend="faiss" is not possible here',
        ),
        (lambda: rerank(torch.randn(9, 2), k=0), "k must be >= 1"),
        (lambda: rerank(torch.randn(9, 2), torch.randn(3, 4), k=1), "gallery must have 2 dimensions"),
        (lambda: rerank(torch.full((9, 2), math.nan), k=1), "must be finite"),
        (lambda: rerank(torch.randn(900, 2), k=1, budget=1000), "budget must hold one query"),
    ],
)
def test_bad_input_is_one_sentence(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()
