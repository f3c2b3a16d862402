"""Retrieval metrics against loops over rational similarities, hand-worked tables, and a peer."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_knn import grids, order_of

from nearkin.core import relations
from nearkin.evaluation import retrieval
from nearkin.evaluation.retrieval import by_counting, by_sorting, knn, relevance, retrieval_metrics
from nearkin.evaluation.retrieval.exact import Space

ALL = retrieval_metrics.METRICS


def metrics_of(hits, ks):
    """From a query's complete ranking as a list of booleans, by the definitions."""
    total = sum(hits)
    precision = [sum(hits[: i + 1]) / (i + 1) for i in range(len(hits))]
    expected = {
        "precision@1": float(hits[0]),
        "r_precision": sum(hits[:total]) / total,
        "map@r": sum(p for p, hit in zip(precision[:total], hits, strict=False) if hit) / total,
        "map": sum(p for p, hit in zip(precision, hits, strict=True) if hit) / total,
        "mrr": 1 / (hits.index(True) + 1),
        "minp": total / (len(hits) - hits[::-1].index(True)),
    }
    for k in ks:
        gain = sum(1 / math.log2(i + 2) for i, hit in enumerate(hits[:k]) if hit)
        expected[f"recall@{k}"] = expected[f"cmc@{k}"] = float(any(hits[:k]))
        expected[f"ndcg@{k}"] = gain / sum(1 / math.log2(i + 2) for i in range(min(k, total)))
    return expected


def whole_orders(x, gallery, kind):
    """`order_of` for small whole numbers, of which float64 rounds nothing but one quotient."""
    a, b = x.double(), (x if gallery is None else gallery).double()
    dot, left, right = a @ b.T, a.square().sum(1)[:, None], b.square().sum(1)[None, :]
    lengths = left * right
    score = {
        "dot": lambda: dot,
        "euclidean": lambda: 2 * dot - left - right,
        "cosine": lambda: torch.where(lengths > 0, dot * dot.abs() / lengths.clamp(min=1), 0.0),
    }[kind]()
    order = score.sort(dim=1, descending=True, stable=True).indices.tolist()
    return [[j for j in row if gallery is not None or i != j] for i, row in enumerate(order)]


@settings(max_examples=100, deadline=None)
@given(grids(), st.booleans(), st.sampled_from(knn.SIMILARITIES))
def test_whole_numbers_need_no_fractions(x, self_search, kind):
    gallery = None if self_search else x.flip(0)
    assert whole_orders(x, gallery, kind) == order_of(x, gallery, kind)


def naive(x, positive, negative, gallery, kind, ks, rule):
    """Means over queries; positive and negative (Q, G) are the pairs that are ranked."""
    rows, without, positive, negative = [], [], positive.tolist(), negative.tolist()
    for i, order in enumerate(whole_orders(x, gallery, kind)):
        hits = [positive[i][j] for j in order if positive[i][j] or negative[i][j]]
        if any(hits):
            rows.append(metrics_of(hits, ks))
        else:
            without.append(i)
    names = metrics_of([True], ks)
    count = len(rows) + (len(without) if rule == "miss" else 0)
    return {n: sum(r[n] for r in rows) / count if count else math.nan for n in names}, without


def same(result, expected):
    for name, value in expected.items():
        assert result[name] == pytest.approx(value, abs=1e-12, nan_ok=True), name


cases = st.tuples(
    grids(), st.booleans(), st.sampled_from(knn.SIMILARITIES), st.sampled_from(["skip", "miss"]), st.integers(1, 8)
)
KS = (1, 2, 5, 30)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(cases, st.integers(1, 6), st.integers(0, 2**31), st.booleans())
def test_class_ids_equal_the_loops(case, classes, seed, unknowns):
    x, self_search, kind, rule, rows = case
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(-1 if unknowns else 0, classes, (len(x),), generator=generator)
    gallery, gallery_labels = (
        (None, None) if self_search else (x.flip(0), labels[torch.randperm(len(x), generator=generator)])
    )
    truth = relations.of(labels, gallery, gallery_labels)
    expected, without = naive(x, truth.positive, truth.negative, gallery, kind, KS, "skip")
    without = [i for i in without if labels[i] >= 0]
    known = int((labels >= 0).sum())
    if rule == "miss":
        expected = {n: v * (known - len(without)) / known if len(without) < known else 0.0 for n, v in expected.items()}
    if not known or (rule == "skip" and len(without) == known):
        expected = dict.fromkeys(expected, math.nan)
    result = retrieval(
        x,
        labels,
        gallery,
        gallery_labels,
        ks=KS,
        metrics=ALL,
        without_positives=rule,
        similarity=kind,
        budget=rows * len(x) * 200 + 100,
    )
    same(result, expected)
    assert result.without_positives == without and result["without_positives"] == len(without)
    assert result["queries"] == known and result["unknown"] == len(x) - known
    few = retrieval(x, labels, gallery, gallery_labels, ks=(1, 2), without_positives=rule, similarity=kind)
    same(few, {n: v for n, v in expected.items() if n in few})


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(cases, st.integers(0, 2**31), st.booleans())
def test_relations_and_multi_label_rows_equal_the_loops(case, seed, explicit):
    x, self_search, kind, rule, _ = case
    generator = torch.Generator().manual_seed(seed)
    gallery, gallery_labels = (
        (None, None) if self_search else (x.flip(0), torch.rand(len(x), 3, generator=generator) < 0.3)
    )
    if explicit:
        draw = torch.rand(len(x), len(x), generator=generator)
        labels, gallery_labels = relations.Relation(draw < 0.3, draw > 0.5), None
    elif self_search:
        labels = relations.multilabel(torch.rand(len(x), 3, generator=generator) < 0.3)
    else:
        labels = torch.rand(len(x), 3, generator=generator) < 0.3
    truth = relations.of(labels, gallery, gallery_labels)
    expected, without = naive(x, truth.positive, truth.negative, gallery, kind, KS, rule)
    result = retrieval(x, labels, gallery, gallery_labels, ks=KS, metrics=ALL, without_positives=rule, similarity=kind)
    same(result, expected)
    assert result.without_positives == without


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    cases,
    st.integers(0, 2**31),
    st.sampled_from([(1,), (2, 5), (30,)]),
    st.sampled_from([retrieval_metrics.DEFAULT, ALL]),
    st.sampled_from([40 * 130 + 400, 2**18, 2**18, 2**18, 2**18, 2**18, 2**18, 2**18]),
)
def test_counting_by_tiles_equals_the_loops(case, seed, ks, metrics, budget):
    """Few positives among many items, in tiles of 16 × 16: rows and columns, rising floors, lists that are cut."""
    x, self_search, kind, _, _ = case
    generator = torch.Generator().manual_seed(seed)
    x = x[torch.randint(0, len(x), (40,), generator=generator)]  # duplicates
    labels = torch.randint(0, 20, (len(x),), generator=generator)
    gallery, gallery_labels = (None, None) if self_search else (x.flip(0), labels.flip(0).roll(3))
    truth = relations.of(labels, gallery, gallery_labels)
    expected, _ = naive(x, truth.positive, truth.negative, gallery, kind, ks, "skip")
    sets, index = relevance.with_known_labels(x, labels, gallery, gallery_labels)
    space = Space(sets.queries, sets.gallery, kind, budget)
    space.blocks()
    limits = retrieval_metrics._limits(40, ks, metrics)
    relation = relevance.Relevance(sets, space)
    if metrics != ALL:
        space.drop_duplicates(max(*limits, int(relation.counts.max())))
    sums = dict.fromkeys(retrieval_metrics._names(ks, metrics), 0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(by_counting, "_SIDE", {"cpu": 16})
        for rows, positions in by_counting.positions(space, relation, limits):
            result = retrieval_metrics._metrics(positions, relation.counts[rows], ks, metrics)
            sums = {name: sums[name] + float(value.nansum()) for name, value in result.items()}
    some = int((relation.counts > 0).sum())
    assert len(index) == 40
    same({name: value / some if some else math.nan for name, value in sums.items()}, {n: expected[n] for n in sums})


def test_kin_beyond_their_limit_stand_behind_the_first(monkeypatch):
    """With random embeddings most positives are given up early, long before the limit of the first one is reached."""
    monkeypatch.setattr(by_counting, "_SIDE", {"cpu": 64})
    x, labels = torch.randn(1500, 8), torch.randint(0, 300, (1500,))
    expected = retrieval(x, labels, ks=(1, 10, 100, 400), metrics=ALL)
    few = retrieval(x, labels, ks=(1, 10, 100, 400))
    assert few == {name: expected[name] for name in few}


def blurred(items, dim=16):
    """Distinct rows closer together than float32 products can tell apart."""
    return torch.randn(1, dim) + 1e-7 * torch.randn(items, dim)


@pytest.mark.parametrize("kind", knn.SIMILARITIES)
@pytest.mark.parametrize("collapsed", ["equal", "nearly", "half"])
def test_collapsed_embeddings(kind, collapsed):
    x = {"equal": torch.randn(1, 16).repeat(700, 1), "nearly": blurred(700), "half": torch.randn(700, 16)}[collapsed]
    x[: 350 if collapsed == "half" else 0] = 1.0
    labels = torch.randint(0, 100, (700,))
    expected = retrieval(x, labels, metrics=ALL, similarity=kind)  # every position, by counting
    few = retrieval(x, labels, similarity=kind)
    assert few == {name: expected[name] for name in few}
    space = Space(x, None, kind, knn.BUDGET)
    relation = relevance.Relevance(relevance.with_known_labels(x, labels, None, None)[0], space)
    for rows, positions in by_sorting.positions(space, relation, 700):  # and by sorting
        again = retrieval_metrics._metrics(positions, relation.counts[rows], (8,), ("map", "ndcg"))
        alone = retrieval_metrics.per_query(x, labels, ks=(8,), metrics=("map", "ndcg"), similarity=kind)
        for name, value in again.items():
            torch.testing.assert_close(value, alone[name][rows], rtol=0, atol=0, equal_nan=True)


def line(hits):
    """A query and a gallery on a line that give this ranking."""
    gallery = torch.arange(1.0, len(hits) + 1)[:, None]
    return torch.zeros(1, 1), torch.tensor([1]), gallery, torch.tensor([int(h) for h in hits])


@pytest.mark.parametrize(
    "right, r_precision, map_at_r", [([1], 0.1, 0.1), ([1, 10], 0.2, 0.12), ([1, 2], 0.2, 0.2), (range(1, 11), 1, 1)]
)
def test_map_at_r_by_hand(right, r_precision, map_at_r):
    """METHODS section 14: R = 10."""
    hits = [i in right for i in range(1, 21)] + [True] * (10 - len(right))
    x, labels, gallery, gallery_labels = line(hits)
    result = retrieval(x, labels, gallery, gallery_labels, similarity="euclidean")
    assert result["r_precision"] == pytest.approx(r_precision, abs=1e-15)
    assert result["map@r"] == pytest.approx(map_at_r, abs=1e-15)
    assert result["recall@1"] == result["precision@1"] == 1


def test_a_duplicate_of_the_query_does_not_stand_for_it():
    """Dropping the first neighbour would drop item 0 for query 1, and let query 1 find itself."""
    x = torch.tensor([[1.0, 0], [1.0, 0], [0, 1.0], [0.1, 1.0]])
    values = retrieval_metrics.per_query(x, torch.tensor([0, 1, 0, 1]), ks=(1, 2, 3))
    assert values["recall@1"].tolist() == [0, 0, 0, 0]
    assert values["recall@2"].tolist() == [0, 1, 1, 0]  # query 1: 0, then 3; query 2: 3, then 0 before its equal 1
    assert values["recall@3"].tolist() == [1, 1, 1, 1]


def clustered(items=400, dim=24):
    labels = torch.arange(items) % 37
    x = torch.randn(37, dim)[labels] + 1.5 * torch.randn(items, dim)
    x[items // 2 :: 7] = x[: items // 2 : 7][: len(x[items // 2 :: 7])]  # duplicates across classes
    return x, labels


@pytest.mark.parametrize("kind", knn.SIMILARITIES)
def test_nothing_but_the_embeddings_changes_a_metric(kind):
    x, labels = clustered()
    expected = retrieval(x, labels, metrics=ALL, similarity=kind)
    for rows in (1, 3, 50):
        assert retrieval(x, labels, metrics=ALL, similarity=kind, budget=rows * 400 * 120) == expected
    torch.set_num_threads(2)
    try:
        assert retrieval(x, labels, metrics=ALL, similarity=kind) == expected
    finally:
        torch.set_num_threads(1)
    few = retrieval(x, labels, similarity=kind)  # a limit to the positions that are computed
    assert few == {name: expected[name] for name in few}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.parametrize("kind", knn.SIMILARITIES)
def test_the_device_changes_no_metric(kind):
    x, labels = clustered(3000)
    on_cpu, there = (retrieval(a, b, metrics=ALL, similarity=kind) for a, b in ((x, labels), (x.cuda(), labels.cuda())))
    assert on_cpu == there


@pytest.mark.parametrize("kind", knn.SIMILARITIES)
def test_faiss_changes_no_metric(kind):
    pytest.importorskip("faiss", reason="faiss is an extra and is not installed")
    x, labels = clustered()
    for metrics in (retrieval_metrics.DEFAULT, ALL):
        expected = retrieval(x, labels, metrics=metrics, similarity=kind)
        assert retrieval(x, labels, metrics=metrics, similarity=kind, backend="faiss") == expected
    gallery, gallery_labels = x[200:], labels[200:]
    expected = retrieval(x[:200], labels[:200], gallery, gallery_labels, similarity=kind)
    assert retrieval(x[:200], labels[:200], gallery, gallery_labels, similarity=kind, backend="faiss") == expected


def test_shift_and_rescaling_of_similarities_change_nothing():
    x, labels = clustered()
    queries, gallery = x[:150], x[150:]
    expected = retrieval(queries, labels[:150], gallery, labels[150:], metrics=ALL, similarity="dot")
    for scale in (2.0**-20, 0.5, 2.0**30):
        result = retrieval(queries * scale, labels[:150], gallery, labels[150:], metrics=ALL, similarity="dot")
        assert result == expected
    for shift in (-1000.0, 8.0):  # of every inner product, through one more column
        constant, far = torch.ones(150, 1), torch.full((250, 1), shift)
        moved = [torch.cat(p, 1).double() for p in ((queries, constant), (gallery, far))]
        assert retrieval(moved[0], labels[:150], moved[1], labels[150:], metrics=ALL, similarity="dot") == expected


@pytest.mark.parametrize("self_search", [True, False])
def test_agrees_with_the_peer_where_it_is_right(self_search):
    """Distinct distances, lone queries skipped, k the largest class."""
    from pytorch_metric_learning.distances import LpDistance
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
    from pytorch_metric_learning.utils.inference import CustomKNN

    x, labels = torch.nn.functional.normalize(torch.randn(300, 16)), torch.randint(0, 60, (300,))
    labels[0] = 1000  # alone
    peer = AccuracyCalculator(
        include=("precision_at_1", "r_precision", "mean_average_precision_at_r"),
        k="max_bin_count",
        knn_func=CustomKNN(LpDistance(normalize_embeddings=False)),
        device=torch.device("cpu"),
    )
    if self_search:
        theirs, ours = peer.get_accuracy(x, labels), retrieval(x, labels)
        assert ours["without_positives"] >= 1 and 0 in ours.without_positives
    else:
        theirs = peer.get_accuracy(x[:100], labels[:100], x[100:], labels[100:], False)
        ours = retrieval(x[:100], labels[:100], gallery=x[100:], gallery_labels=labels[100:])
    assert ours["precision@1"] == pytest.approx(theirs["precision_at_1"], abs=1e-12)
    assert ours["r_precision"] == pytest.approx(theirs["r_precision"], abs=1e-12)
    assert ours["map@r"] == pytest.approx(theirs["mean_average_precision_at_r"], abs=1e-12)


def test_per_query_values_are_what_is_averaged():
    x, labels = clustered()
    labels = labels.clone()
    labels[5], labels[9] = 1000, -1
    values, result = retrieval_metrics.per_query(x, labels, metrics=ALL), retrieval(x, labels, metrics=ALL)
    assert values["positives"][9] == -1 and values["positives"][5] == 0 and result.without_positives == [5]
    assert bool(values["map@r"][[5, 9]].isnan().all())
    assert result["map@r"] == pytest.approx(float(values["map@r"].nanmean()), abs=1e-12)


def test_nobody_and_no_kin():
    nobody = retrieval(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long), metrics=ALL)
    assert nobody["queries"] == 0 and math.isnan(nobody["map@r"])
    x = torch.randn(4, 3)
    alone = torch.arange(4)
    assert math.isnan(retrieval(x, alone)["recall@1"])
    missed = retrieval(x, alone, without_positives="miss")
    assert missed["recall@8"] == missed["map@r"] == 0 and missed.without_positives == [0, 1, 2, 3]
    empty = retrieval(x, alone, gallery=torch.zeros(0, 3), gallery_labels=torch.zeros(0, dtype=torch.long))
    assert empty["without_positives"] == 4


@pytest.mark.parametrize(
    "change, error, sentence",
    [
        ({"metrics": ("map@k",)}, ValueError, 'unknown metrics "map@k"'),
        ({"ks": (0,)}, ValueError, "ks must be >= 1, got 0"),
        ({"ks": ()}, ValueError, "ks must name at least one k for recall, ndcg and cmc, got none"),
        (
            {"ks": (3,), "metrics": ("map@r",)},
            ValueError,
            "ks would have no effect: of the metrics only recall, ndcg, cmc have a k, got map@r; leave it out",
        ),
        ({"without_positives": "drop"}, ValueError, 'unknown without_positives "drop"; known: skip, miss'),
        ({"labels": torch.zeros(4, dtype=torch.long)}, ValueError, "labels must have one entry per row"),
        ({"gallery": torch.ones(2, 3)}, ValueError, "gallery_labels must be given with gallery, got None"),
        ({"gallery_labels": torch.ones(2)}, ValueError, "gallery_labels need gallery, got None"),
        ({"embeddings": torch.full((5, 3), torch.nan)}, ValueError, "embeddings must be finite .* got 5 rows"),
        ({"labels": torch.zeros(5)}, TypeError, "labels must be integer class ids"),
    ],
)
def test_error_sentences(change, error, sentence):
    arguments = {"embeddings": torch.randn(5, 3), "labels": torch.arange(5), **change}
    with pytest.raises(error, match=sentence):
        retrieval(**arguments)


@pytest.mark.parametrize("spread", [1.0, 1e-3, 1e-6, 0.0])
@pytest.mark.parametrize("similarity", knn.SIMILARITIES)
def test_close_embeddings_of_few_classes_are_ranked_the_same_either_way(spread, similarity, monkeypatch):
    """Proposed in float32 or float64, decided pair by pair or by scoring every cell once: the same positions."""
    x = torch.ones(1, 6) + spread * torch.randn(120, 6).round(decimals=1)
    x[100:] = x[:20]
    y = torch.arange(120) % 3
    result = []
    for doubts in (-1, 10**9):
        for worth in (-1, 10**9):
            monkeypatch.setattr(by_sorting, "_DOUBTS", doubts)
            monkeypatch.setattr(by_sorting, "_WORTH", worth)
            result.append(dict(retrieval(x, y, ks=(1, 5), metrics=ALL, similarity=similarity)))
    assert result[0] == result[1] == result[2] == result[3]


def overlapping(items, dim, classes):
    """Pooled features of few, large classes: a common mean, directions in which classes overlap, ReLU."""
    y, base, own = torch.arange(items) % classes, torch.randn(dim).abs() * 1.2, torch.randn(classes, dim) * 0.12
    within = torch.randn(items, 24) @ torch.randn(24, dim) * (0.35 / 24**0.5)
    return torch.relu(base + own[y] + within + 0.1 * torch.randn(items, dim)), y


@pytest.mark.parametrize("similarity", knn.SIMILARITIES)
@pytest.mark.parametrize("classes", [3, 20])
def test_few_large_overlapping_classes_leave_little_to_decide(classes, similarity, monkeypatch):
    """Pairs that are scored one by one cost a hundred times a product: 0.3 to 0.6 of all pairs made retrieval slow."""
    x, y = overlapping(600, 640, classes)
    worked, exact = [], Space.exact
    monkeypatch.setattr(Space, "exact", lambda self, rows, items: worked.append(len(rows)) or exact(self, rows, items))
    result = retrieval(x, y, metrics=ALL, similarity=similarity)
    assert sum(worked) < 600 * 600 // 200
    for budget in (600 * 112 + 64 * 300, 2**20):  # no copy of the rows, copies of float32 alone
        assert retrieval(x, y, metrics=ALL, similarity=similarity, budget=budget) == result
    wide = x.double()
    unit = torch.nn.functional.normalize(wide)
    score = {"cosine": unit @ unit.T, "dot": wide @ wide.T, "euclidean": -torch.cdist(wide, wide)}[similarity]
    order = score.fill_diagonal_(-torch.inf).argsort(dim=1, descending=True)[:, :-1]
    hits = y[order] == y[:, None]
    rows = [metrics_of(row, (1, 2, 4, 8)) for row in hits.tolist()]
    same(result, {name: sum(row[name] for row in rows) / 600 for name in rows[0]})


@pytest.mark.parametrize("similarity", knn.SIMILARITIES)
@pytest.mark.parametrize("spread", [1.0, 1e-4])
def test_the_bound_of_float64_holds_and_is_narrow(spread, similarity):
    for dim in (3, 640):
        x = 1 + spread * torch.randn(200, dim)
        space = Space(x, None, similarity, knn.BUDGET)
        space.sharpen(0)
        rows = torch.arange(200)
        row, item = (part.flatten() for part in torch.meshgrid(rows, rows, indexing="ij"))
        low, high = space.range_of(row, knn.proposed_rows(space, rows).fill_diagonal_(torch.nan).flatten())
        exact, other = space.exact(row, item), row != item
        assert bool(((low <= exact) & (exact <= high))[other].all())
        assert float((high - low)[other].max()) < 1e-11 * float(exact.abs().max().clamp(min=dim))
