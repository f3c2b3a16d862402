"""Groups without labels, against loops over all pairs and scikit-learn; and their agreement with classes."""

import itertools
import sys
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.cluster.hierarchy import fcluster, linkage

import reference
from nearkin import evaluation


def world(seed, classes=12, per_class=8, dim=16, noise=0.6):
    draw = np.random.default_rng(seed)
    labels = np.repeat(np.arange(classes), per_class)
    centres = draw.normal(size=(classes, dim))
    return (centres[labels] + noise * draw.normal(size=(len(labels), dim))).astype(np.float32), labels


def sets(assignment):
    groups = {}
    for item, number in enumerate(np.asarray(assignment).tolist()):
        groups.setdefault(number, set()).add(item)
    return {frozenset(group) for group in groups.values()}


@pytest.mark.parametrize("similarity", [-0.2, 0.1, 0.3, 0.5, 0.7, 0.95])
@pytest.mark.parametrize("seed", [0, 1])
def test_average_groups_are_those_of_all_pairs(seed, similarity):
    rows, _ = world(seed, classes=6, per_class=5)
    groups = evaluation.group(rows, similarity=similarity)
    assert groups.capped == 0
    assert sets(groups.assignment) == reference.average_linkage_groups(rows, similarity)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 24), st.floats(-0.5, 0.99))
def test_average_groups_of_small_sets(seed, size, similarity):
    rows = np.random.default_rng(seed).normal(size=(size, 3))
    assert sets(evaluation.group(rows, similarity=similarity).assignment) == reference.average_linkage_groups(
        rows, similarity
    )


def test_average_groups_of_many_items_are_those_of_scipy():
    rows, _ = world(3, classes=40, per_class=15, dim=24, noise=0.9)
    unit = rows.astype(np.float64) / np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
    tree = linkage(1 - (unit @ unit.T)[np.triu_indices(len(unit), 1)], "average")
    for similarity in (0.3, 0.45, 0.6):
        groups = evaluation.group(rows, similarity=similarity, neighbours=len(rows) - 1)
        assert sets(groups.assignment) == sets(fcluster(tree, 1 - similarity, "distance"))


@pytest.mark.parametrize("similarity", [0.1, 0.4, 0.7, 0.9])
def test_components_are_those_of_a_search(similarity):
    rows, _ = world(5, classes=8, per_class=6)
    groups = evaluation.group(rows, similarity=similarity, method="components")
    assert sets(groups.assignment) == reference.graph_components(rows, similarity)


def test_a_long_chain_is_one_component_and_many_groups():
    angles = np.linspace(0, np.pi, 400)  # neighbours are near, the ends opposite
    rows = np.random.default_rng(0).permutation(np.stack([np.cos(angles), np.sin(angles)], 1))
    chain = evaluation.group(rows, similarity=0.95, method="components")
    assert int(chain.assignment.max()) == 0
    groups = evaluation.group(rows, similarity=0.95, neighbours=399)
    assert int(groups.assignment.max()) > 3
    for members in sets(groups.assignment):
        at = list(members)
        assert (rows[at] @ rows[at].T).mean() >= 0.95


def test_groups_are_numbered_by_size_and_first_item():
    rows = torch.eye(4)[[3, 1, 1, 2, 2, 2, 0]]
    assert evaluation.group(rows, similarity=0.9).assignment.tolist() == [2, 1, 1, 0, 0, 0, 3]


def test_equal_rows_are_one_group_at_similarity_one():
    rows, _ = world(0, classes=5, per_class=1)
    groups = evaluation.group(np.repeat(rows, 30, 0), similarity=1.0)
    assert sets(groups.assignment) == {frozenset(range(30 * i, 30 * i + 30)) for i in range(5)}


def test_a_zero_row_is_alone_and_huge_rows_are_not():
    rows = np.array([[0.0, 0.0], [1e30, 0.0], [3e-30, 0.0], [0.0, 1.0]])
    assert sets(evaluation.group(rows, similarity=0.5).assignment) == {
        frozenset({0}), frozenset({1, 2}), frozenset({3}),
    }  # fmt: skip


@pytest.mark.parametrize("size", [0, 1])
def test_few_items_are_groups_by_themselves(size):
    for method in ("average", "components", "hdbscan"):
        similarity = None if method == "hdbscan" else 0.5
        assert len(evaluation.group(torch.zeros(size, 3), similarity=similarity, method=method).assignment) == size


def test_items_with_more_neighbours_than_listed_are_counted():
    rows, labels = world(0, classes=3, per_class=20, noise=0.05)
    groups = evaluation.group(rows, similarity=0.9, neighbours=10)
    assert groups.capped == 60
    assert sets(groups.assignment) == sets(labels)
    assert evaluation.group(rows, similarity=0.9, neighbours=19).capped == 60  # the last listed one is near too
    assert evaluation.group(rows, similarity=0.9, neighbours=20).capped == 0


def test_order_of_items_and_budget_change_nothing():
    rows, _ = world(2)
    order = np.random.default_rng(1).permutation(len(rows))
    plain = sets(evaluation.group(rows, similarity=0.6).assignment)
    shuffled = evaluation.group(rows[order], similarity=0.6, budget=40_000).assignment
    assert {frozenset(int(order[i]) for i in group) for group in sets(shuffled)} == plain


def test_no_matrix_of_items_by_items_is_in_memory():
    rows, _ = world(0, classes=500, per_class=8, dim=8, noise=0.2)
    tracemalloc.start()
    evaluation.group(rows, similarity=0.97, neighbours=8, budget=4 * 2**20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4000 * 4000  # one byte per pair, of NumPy's own; torch's is bounded by the budget


@pytest.mark.parametrize(("neighbours", "rounds"), [(1, 1), (4, 2), (7, 3), (200, 1)])
def test_smoothed_rows_are_those_of_loops(neighbours, rounds):
    rows, _ = world(7, classes=6, per_class=7)
    expected = reference.smoothed(rows, min(neighbours, len(rows) - 1), rounds)
    np.testing.assert_allclose(evaluation.smoothed(rows, neighbours=neighbours, rounds=rounds), expected, atol=1e-6)


def test_smoothing_finds_groups_that_a_plain_threshold_does_not():
    rows, labels = world(1, classes=40, per_class=10, dim=16, noise=0.75)
    rows += 3.0  # as features that are all positive
    told = evaluation.bcubed(labels, module_kmeans(rows, 40))["f"]
    plain = max(
        evaluation.bcubed(labels, evaluation.group(rows, similarity=t).assignment)["f"] for t in np.linspace(0.8, 1, 41)
    )
    smooth = evaluation.bcubed(labels, evaluation.group(evaluation.smoothed(rows), similarity=0.8).assignment)["f"]
    assert smooth > plain
    assert smooth > told


def module_kmeans(rows, clusters):
    from nearkin.evaluation.kmeans import kmeans

    return kmeans(torch.from_numpy(rows), clusters).assignment


def test_few_items_are_smoothed_by_a_twentieth_of_them():
    rows, _ = world(7, classes=6, per_class=10)
    assert torch.equal(evaluation.smoothed(rows), evaluation.smoothed(rows, neighbours=3))
    assert evaluation.smoothed(rows[:1]).shape == (1, 16)
    assert evaluation.smoothed(rows[:0]).shape == (0, 16)


def test_hdbscan_is_that_of_scikit_learn():
    from sklearn.cluster import HDBSCAN

    rows, labels = world(0, noise=0.2)
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    peer = HDBSCAN(min_cluster_size=3, copy=True).fit_predict(unit.astype(np.float64))
    groups = evaluation.group(rows, method="hdbscan", least=3)
    assert groups.edges is None
    noise = frozenset(np.flatnonzero(peer < 0).tolist())
    assert {g for g in sets(groups.assignment) if not g & noise} == sets(peer) - {noise}
    assert all(len(g) == 1 for g in sets(groups.assignment) if g & noise)
    assert evaluation.bcubed(labels, groups.assignment)["f"] > 0.9


def test_hdbscan_without_scikit_learn_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.cluster", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs scikit-learn 1.3: pip install 'nearkin\[report\]'"):
        evaluation.group(torch.eye(5), method="hdbscan")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, 'similarity must be given for method "average"'),
        ({"similarity": 1.5}, "similarity must be between -1 and 1, a cosine, got 1.5"),
        ({"similarity": float("nan")}, "similarity must be"),
        ({"similarity": 0.5, "method": "single"}, 'method "single"'),
        ({"similarity": 0.5, "neighbours": 0}, "neighbours must be"),
        ({"similarity": 0.5, "least": 3}, 'least is for method "hdbscan"'),
        ({"method": "hdbscan", "least": 1}, "least must be"),
        ({"method": "hdbscan", "similarity": 0.5}, "similarity is for the other methods"),
    ],
)
def test_bad_settings_are_one_sentence(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        evaluation.group(torch.eye(4), **options)


# --- agreement with classes


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=30))
def test_bcubed_and_pairwise_are_those_of_loops(pairs):
    labels, groups = (np.array(part) for part in zip(*pairs, strict=True))
    expected = reference.bcubed(labels, groups)
    assert evaluation.bcubed(labels, groups) == pytest.approx(expected, abs=1e-12)
    precision, recall = evaluation.bcubed_values(labels, groups)
    assert (precision.mean(), recall.mean()) == pytest.approx((expected["precision"], expected["recall"]), abs=1e-12)
    both = sum(a == b and c == d for (a, c), (b, d) in itertools.combinations(pairs, 2))
    same = sum(a == b for (a, _), (b, _) in itertools.combinations(pairs, 2))
    grouped = sum(c == d for (_, c), (_, d) in itertools.combinations(pairs, 2))
    counted = evaluation.pairwise(labels, groups)
    assert counted["precision"] == (both / grouped if grouped else 1.0)
    assert counted["recall"] == (both / same if same else 1.0)
    assert counted["f"] == pytest.approx(2 * both / (same + grouped) if same + grouped else 1.0)


def test_bcubed_of_a_worked_table():
    """Three of a and one b together, one a alone: P = (3 · 3/4 + 1/4 + 1) / 5, R = (3 · 3/4 + 1/4 + 1) / 5."""
    scores = evaluation.bcubed(["a", "a", "a", "b", "a"], ["x", "x", "x", "x", "y"])
    assert scores == pytest.approx({"precision": 3.5 / 5, "recall": (3 * 0.75 + 1 + 0.25) / 5, "f": 0.7})


def test_items_of_unknown_class_are_left_out():
    labels, groups = torch.tensor([0, 0, 1, -1, -1]), torch.tensor([0, 0, 1, 0, 1])
    assert evaluation.bcubed(labels, groups)["f"] == evaluation.pairwise(labels, groups)["f"] == 1.0
    assert np.isnan(evaluation.bcubed_values(labels, groups)[0]).tolist() == [False] * 3 + [True] * 2
    with pytest.raises(ValueError, match="at least one class id other than -1"):
        evaluation.bcubed(torch.tensor([-1]), torch.tensor([0]))
    with pytest.raises(ValueError, match="one entry per label: 3 labels, 2 entries"):
        evaluation.pairwise([0, 1, 2], [0, 1])
    with pytest.raises(TypeError, match="assignment must be whole numbers"):
        evaluation.bcubed(torch.tensor([0]), torch.tensor([0.5]))


@pytest.mark.slow
@pytest.mark.parametrize("measure", [evaluation.bcubed, evaluation.pairwise])
def test_intervals_hold_the_value_of_new_classes(measure):
    """Classes of random spread are drawn anew each time, grouped and measured; the truth is the mean over all draws."""

    def drawn(seed, classes=40):
        draw = np.random.default_rng(seed)
        labels = np.repeat(np.arange(classes), draw.integers(4, 12, classes))
        centres, spread = draw.normal(size=(classes, 8)), draw.uniform(0.2, 0.9, classes)
        rows = centres[labels] + spread[labels, None] * draw.normal(size=(len(labels), 8))
        return measure(labels, evaluation.group(rows, similarity=0.7).assignment, interval=True)

    scores = [drawn(seed) for seed in range(300)]
    for name in ("precision", "recall", "f"):
        truth = np.mean([score[name] for score in scores])
        share = np.mean([score.intervals[name][0] <= truth <= score.intervals[name][1] for score in scores])
        assert share >= 0.9, (name, share)
