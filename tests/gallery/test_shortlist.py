"""Re-ranking in a gallery: the order among the shortlist is that of `evaluation.rerank`, similarities stay."""

import numpy as np
import pytest
import torch

from nearkin import evaluation
from nearkin.evaluation import DBA, AlphaQE, KReciprocal
from nearkin.gallery import Gallery, shortlist
from nearkin.gallery.schema import unit

LABELS = [f"class {i // 5}" for i in range(200)]


@pytest.fixture(scope="module")
def vectors():
    draw = np.random.default_rng(0)
    return unit(draw.normal(size=(40, 12))[np.repeat(np.arange(40), 5)] + 0.8 * draw.normal(size=(200, 12)))


@pytest.fixture(scope="module")
def gallery(vectors, tmp_path_factory):
    with Gallery.open(tmp_path_factory.mktemp("g") / "g.gallery", dim=12) as opened:
        opened.enrol(vectors[:160], LABELS[:160], [{"n": i % 2} for i in range(160)])
        yield opened


@pytest.mark.parametrize("method", [KReciprocal(6, 2), DBA(3), AlphaQE(3)], ids=lambda m: m.name)
def test_the_order_is_that_of_rerank(gallery, vectors, method, monkeypatch):
    monkeypatch.setattr(shortlist, "TIMES", 1000)  # the shortlist is the gallery
    changed = 0
    for query in vectors[160:180]:
        hits = gallery.search(query, 9, rerank=method)
        expected = evaluation.rerank(torch.from_numpy(query)[None], torch.from_numpy(vectors[:160]), k=9, method=method)
        assert [hit.id - 1 for hit in hits] == expected.indices[0].tolist()
        plain = {hit.id: hit.similarity for hit in gallery.search(query, 160)}
        assert all(hit.similarity == pytest.approx(plain[hit.id], abs=1e-12) for hit in hits)
        changed += [hit.id for hit in hits] != list(plain)[:9]
    assert changed > 5


def test_a_shortlist_and_a_filter_limit_what_is_seen(gallery, vectors):
    method, query = KReciprocal(3, 1), vectors[170]
    near = [hit.id - 1 for hit in gallery.search(query, 30)]
    hits = gallery.search(query, 5, rerank=method)
    among = evaluation.rerank(torch.from_numpy(query)[None], torch.from_numpy(vectors[near]), k=5, method=method)
    assert [hit.id - 1 for hit in hits] == [near[i] for i in among.indices[0].tolist()]
    filtered = gallery.search(query, 200, {"n": 1}, rerank="dba")
    assert len(filtered) == 80 and all(hit.metadata["n"] == 1 for hit in filtered)
    for method in ("k-reciprocal", "dba", "alpha-qe"):
        assert gallery.search(query, 3, {"label": "nobody"}, rerank=method) == []
        assert len(gallery.search(query, 500, rerank=method)) == 160


def test_settings_follow_the_rows_per_label(gallery):
    assert shortlist.method_for("k-reciprocal", {5: 32}) == KReciprocal(5)
    assert shortlist.method_for("alpha-qe", {4: 1, 40: 3}) == AlphaQE(10)
    assert shortlist.method_for("k-reciprocal", {1000: 9}) == KReciprocal(100)
    assert shortlist.method_for("dba", {1: 5}) == DBA(1) and shortlist.method_for("dba", {}) == DBA()
    assert shortlist.method_for("k-reciprocal:k1=7", {5: 32}) == KReciprocal(7)
    with pytest.raises(ValueError, match="k1 must be <= 100"):
        gallery.search(np.ones(12), rerank=KReciprocal(101))
    with pytest.raises(ValueError, match='unknown rerank "best"'):
        gallery.search(np.ones(12), rerank="best")
