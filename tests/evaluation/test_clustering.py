"""k-means and the agreement of partitions, against loops, exact fractions and scikit-learn."""

import math
import sys
from collections import Counter
from itertools import combinations, pairwise, permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_mutual_info_score, normalized_mutual_info_score

from nearkin.evaluation.clustering import agreement, clustering, kmeans

module = sys.modules[kmeans.__module__]  # in the package this name is the function


def entropy(ids):
    return -math.fsum(n / len(ids) * math.log(n / len(ids)) for n in Counter(ids).values())


def information(a, b):
    n, left, right = len(a), Counter(a), Counter(b)
    cells = Counter(zip(a, b, strict=True)).items()
    return math.fsum(m / n * math.log(n * m / (left[i] * right[j])) for (i, j), m in cells)


def expected_information(a, b):
    """The hypergeometric sum with whole binomials, which are exact."""
    n, terms = len(a), []
    for p in Counter(a).values():
        for q in Counter(b).values():
            for m in range(max(1, p + q - n), min(p, q) + 1):
                chance = math.comb(p, m) * math.comb(n - p, q - m) / math.comb(n, q)
                terms.append(chance * m / n * math.log(n * m / (p * q)))
    return math.fsum(terms)


def oracle(a, b):
    pairs = list(combinations(range(len(a)), 2))
    same, result = ({(i, j) for i, j in pairs if ids[i] == ids[j]} for ids in (a, b))
    both = len(same & result)
    if len(set(zip(a, b, strict=True))) == len(set(a)) == len(set(b)):
        return dict.fromkeys(("nmi", "nmi_geometric", "ami", "f1", "precision", "recall"), 1.0)
    scores = {"nmi": 0.0, "nmi_geometric": 0.0, "ami": 0.0}
    if len(set(a)) > 1 and len(set(b)) > 1:
        first, second, shared, by_chance = entropy(a), entropy(b), information(a, b), expected_information(a, b)
        mean = (first + second) / 2
        scores = {
            "nmi": shared / mean,
            "nmi_geometric": shared / math.sqrt(first * second),
            "ami": (shared - by_chance) / (mean - by_chance),
        }
    scores["precision"] = both / len(result) if result else 0.0
    scores["recall"] = both / len(same) if same else 0.0
    return {**scores, "f1": 2 * both / (len(result) + len(same))}


@st.composite
def partitions(draw):
    """Two partitions of 1 … 24 items into up to 25 blocks each: one block, singletons and anything between."""
    n = draw(st.integers(1, 24))
    tops = draw(st.tuples(st.integers(1, 25), st.integers(1, 25)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    return tuple((rng.permutation(n) if top > n else rng.integers(0, top, n)).tolist() for top in tops)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None)
@given(partitions())
def test_agreement_equals_the_loop(case):
    a, b = case
    ours, theirs = agreement(torch.tensor(a), torch.tensor(b)), oracle(a, b)
    assert ours == pytest.approx(theirs, abs=1e-12, rel=0)


@settings(max_examples=200, deadline=None)
@given(partitions())
def test_agreement_equals_scikit_learn(case):
    a, b = case
    ours = agreement(torch.tensor(a), torch.tensor(b))
    assert ours["nmi"] == pytest.approx(normalized_mutual_info_score(a, b), abs=1e-12)
    geometric = normalized_mutual_info_score(a, b, average_method="geometric")
    assert ours["nmi_geometric"] == pytest.approx(geometric, abs=1e-12)
    equal = len(set(zip(a, b, strict=True))) == len(set(a)) == len(set(b))
    theirs = 1.0 if equal else adjusted_mutual_info_score(a, b)  # before 1.5 it calls equal ones of single items 0
    assert ours["ami"] == pytest.approx(theirs, abs=1e-12)


def test_expectation_is_the_mean_over_all_orders():
    """AMI from its definition: every order of the second partition, one by one."""
    a, b = [0, 0, 0, 1, 1, 2, 2], [0, 0, 1, 1, 1, 1, 2]
    orders = list(permutations(b))
    by_chance = np.mean([information(a, order) for order in orders])
    mean = (entropy(a) + entropy(b)) / 2
    expected = (information(a, b) - by_chance) / (mean - by_chance)
    assert agreement(torch.tensor(a), torch.tensor(b))["ami"] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("skew", [1, 4])
def test_large_partitions_equal_scikit_learn(skew):
    """scikit-learn subtracts log-factorials near 1e5 here, and keeps about 10 decimals."""
    rng = np.random.default_rng(0)
    a = (40 * rng.random(20_000) ** skew).astype(int)
    b = np.where(rng.random(20_000) < 0.7, a // 2, rng.integers(0, 90, 20_000))
    ours = agreement(torch.tensor(a), torch.tensor(b))
    assert ours["nmi"] == pytest.approx(normalized_mutual_info_score(a, b), abs=1e-12)
    assert ours["ami"] == pytest.approx(adjusted_mutual_info_score(a, b), abs=1e-9)


def test_expectation_keeps_its_digits():
    a, b = [i % 7 for i in range(3000)], [i * i % 13 for i in range(3000)]
    counts_a, counts_b, n = Counter(a), Counter(b), 3000
    exact = math.fsum(
        math.comb(p, m) * math.comb(n - p, q - m) / math.comb(n, q) * (m / n) * math.log(n * m / (p * q)) * s * t
        for p, s in Counter(counts_a.values()).items()
        for q, t in Counter(counts_b.values()).items()
        for m in range(max(1, p + q - n), min(p, q) + 1)
    )
    mean, shared = (entropy(a) + entropy(b)) / 2, information(a, b)
    ours = agreement(torch.tensor(a), torch.tensor(b))["ami"]
    assert ours == pytest.approx((shared - exact) / (mean - exact), abs=1e-13)


def test_independent_partitions_share_nothing():
    grid = torch.arange(12)
    assert agreement(grid // 4, grid % 4)["nmi"] == 0


def test_pairs_of_a_million_do_not_overflow():
    a = torch.arange(1_000_000) % 2
    single_cluster = agreement(a, torch.zeros(1_000_000, dtype=torch.int64))
    pairs = 2 * math.comb(500_000, 2) / math.comb(1_000_000, 2)
    assert single_cluster["precision"] == pytest.approx(pairs) and single_cluster["recall"] == 1
    assert (
        single_cluster["f1"] == pytest.approx(2 * pairs / (1 + pairs))
        and single_cluster["nmi"] == single_cluster["ami"] == 0
    )


def test_a_hand_worked_f1():
    """Classes aab bb, clusters 11122: pairs of a class 1 + 3, of a cluster 3 + 1, in both 1 + 1."""
    result = agreement(torch.tensor([0, 0, 1, 1, 1]), torch.tensor([5, 5, 5, 8, 8]))
    assert (result["f1"], result["precision"], result["recall"]) == (0.5, 0.5, 0.5)


def blobs(classes, each, dim=8, noise=0.1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(classes * each) % classes
    centres = torch.randn(classes, dim, generator=generator)
    return centres[labels] + noise * torch.randn(classes * each, dim, generator=generator), labels


def test_separated_classes_are_found():
    x, y = blobs(30, 12)
    result = clustering(x, y)
    assert result["nmi"] == result["nmi_geometric"] == result["ami"] == result["f1"] == 1
    assert result["clusters"] == 30


def test_as_good_as_scikit_learn():
    x, _ = blobs(60, 10, noise=0.8)
    ours = np.mean([kmeans(x, 60, seed=s, normalize=False, iterations=100).inertia for s in range(5)])
    theirs = np.mean([KMeans(60, n_init=1, random_state=s, max_iter=100).fit(x.numpy()).inertia_ for s in range(5)])
    assert ours < theirs * 1.02


def test_the_result_is_a_fixed_point():
    x, _ = blobs(12, 20, noise=0.7)
    result = kmeans(x, 12, normalize=False, iterations=200)
    assert result.iterations < 200
    wide, centroids = x.double(), result.centroids.double()
    means = torch.stack([wide[result.assignment == c].mean(0) for c in range(12)])
    torch.testing.assert_close(means, centroids, atol=1e-6, rtol=0)
    away = (wide[:, None] - centroids).square().sum(-1)
    assert torch.equal(away.argmin(1), result.assignment)
    assert result.inertia == pytest.approx(float(away.min(1).values.sum()), rel=1e-6)


def test_more_updates_never_cost_more():
    x, _ = blobs(40, 10, noise=0.9)
    inertia = [kmeans(x, 40, iterations=i).inertia for i in range(8)]
    assert all(b <= a * (1 + 1e-6) for a, b in pairwise(inertia))


def test_several_starts_keep_the_best():
    x, _ = blobs(40, 6, noise=0.9)
    single = kmeans(x, 40, trials=1).inertia
    several = [kmeans(x, 40, trials=1, starts=n).inertia for n in (2, 6)]
    assert single >= several[0] >= several[1] and several[1] < single


def test_seed_and_tiles():
    x, y = blobs(25, 8, noise=0.9)
    first = kmeans(x, 25, seed=3)
    assert torch.equal(first.assignment, kmeans(x, 25, seed=3).assignment)
    assert not torch.equal(first.assignment, kmeans(x, 25, seed=4).assignment)
    tiled = kmeans(x, 25, seed=3, budget=5000)
    assert tiled.inertia == pytest.approx(first.inertia, rel=1e-6)
    assert clustering(x, y, 3) == clustering(x, y, seed=3)


def test_far_from_the_origin_and_small():
    """Squares of coordinates near 1000 would drown distances of 1e-4 in float32."""
    x, y = blobs(10, 10, noise=0.01)
    assert clustering(x.double() * 1e-4 + 1000, y, normalize=False)["nmi"] == 1
    assert clustering(x * 1e-30, y, normalize=False)["nmi"] == 1
    assert clustering(x * 1e8, y, normalize=False)["nmi"] == 1


def test_normalising_forgets_lengths():
    x, y = blobs(10, 10, noise=0.05)
    stretched = x * torch.rand(100, 1).add(0.1) * 20
    assert clustering(stretched, y)["nmi"] == 1
    assert torch.equal(kmeans(stretched, 10).assignment, kmeans(x, 10).assignment)


def test_first_seeds_are_drawn_by_squared_distance():
    """Points at 0, 1 and 3; after a seed at 0 the others follow with chances 1 : 9."""
    x = torch.tensor([[0.0], [1.0], [3.0]])
    counts = Counter()
    for seed in range(900):
        centroids = kmeans(x, 2, iterations=0, trials=1, seed=seed, normalize=False).centroids.round()
        if float(centroids[0]) == 0:
            counts[float(centroids[1])] += 1
    total = counts[1.0] + counts[3.0]
    assert total > 240 and counts[1.0] / total == pytest.approx(0.1, abs=0.05)


def test_fewer_distinct_rows_than_clusters():
    x = torch.randn(3, 4).repeat(5, 1)
    result = kmeans(x, 9)
    assert result.assignment.unique().numel() == 3 and result.inertia == pytest.approx(0, abs=1e-10)
    assert clustering(torch.ones(6, 3), torch.arange(6) % 3)["nmi"] == 0
    assert clustering(torch.zeros(6, 3), torch.zeros(6, dtype=torch.int64))["nmi"] == 1
    assert clustering(torch.rand(5, 3), torch.arange(5))["f1"] == 1


def test_no_duplicate_becomes_a_second_seed():
    """300 dimensions in float32: products of duplicates differ in their last digits."""
    x = torch.randn(20, 300).repeat(40, 1)
    for seed in range(5):
        assert kmeans(x, 60, seed=seed).centroids.shape == (20, 300)


def test_an_empty_cluster_goes_to_the_farthest_point():
    points = torch.tensor([[0.0], [0.1], [0.9], [0.2]])
    centroids = torch.tensor([[0.1], [50.0]])
    assignment, squared = module._assign(points, centroids, 2**20)
    assert assignment.tolist() == [0, 0, 0, 0]
    moved = module._update(points, centroids, assignment, squared, 2**20)
    torch.testing.assert_close(moved, torch.tensor([[0.3], [0.9]]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_repeats_itself_and_is_as_good():
    x, y = blobs(500, 8, dim=32, noise=0.8)
    on_cpu, there = kmeans(x, 500), [kmeans(x.cuda(), 500) for _ in range(3)]
    assert all(torch.equal(there[0].assignment, again.assignment) for again in there[1:])
    assert there[0].inertia == pytest.approx(on_cpu.inertia, rel=0.02)
    assert clustering(x.cuda(), y.cuda())["nmi"] == pytest.approx(clustering(x, y)["nmi"], abs=0.02)


def test_memory_stays_within_the_budget():
    """3,000 × 1,500 distances are 18 MB in float32; the budget is 1 MB, and tiles are counted as they are made."""
    x, y = blobs(1500, 2, dim=4)
    largest = 0
    product = module._product

    def watched(added, *rest):
        nonlocal largest
        result = product(added, *rest)
        largest = max(largest, result.numel() * 4)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_product", watched)
        clustering(x, y, iterations=2, trials=1, budget=2**20)
    assert 0 < largest <= 2**20


def test_unknown_items_are_left_out():
    x, y = blobs(6, 10)
    mixed = torch.cat([x, torch.randn(20, 8) * 50])
    labels = torch.cat([y, torch.full((20,), -1)])
    assert clustering(mixed, labels) == clustering(x, y)


@pytest.mark.parametrize(
    "change, sentence",
    [
        (
            {"embeddings": torch.tensor([[1.0], [torch.nan], [2.0]])},
            "embeddings must be finite, got NaN or Inf in 1 rows",
        ),
        ({"labels": torch.ones(3)}, "labels must be integer class ids"),
        ({"labels": torch.tensor([-1, -1, -1])}, "at least one class id other than -1"),
        ({"clusters": 4}, "embeddings must be at least as many rows as clusters: 4, got 3"),
        ({"clusters": 0}, "clusters must be >= 1, got 0"),
        ({"starts": 0}, "starts must be >= 1, got 0"),
        ({"trials": 0}, "trials must be >= 1, got 0"),
        ({"iterations": 1.5}, "iterations must be a whole number, got 1.5"),
        ({"seed": -1}, "seed must be >= 0, got -1"),
    ],
)
def test_bad_input_is_named(change, sentence):
    arguments = {"embeddings": torch.rand(3, 1), "labels": torch.tensor([0, 1, 1]), **change}
    with pytest.raises((TypeError, ValueError), match=sentence):
        clustering(**arguments)


def test_partitions_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="same N >= 1"):
        agreement(torch.arange(3), torch.arange(4))


def test_intervals_leave_out_classes():
    g = torch.Generator().manual_seed(0)
    labels = torch.arange(60).repeat_interleave(10)
    x = torch.randn(60, 16, generator=g)[labels] + 1.5 * torch.randn(600, 16, generator=g)
    result = clustering(x, labels, interval=True)
    assert clustering(x, labels).intervals == {}
    assert set(result.intervals) == {"nmi", "nmi_geometric", "ami", "f1", "precision", "recall"}
    for name, (low, high) in result.intervals.items():
        assert low < result[name] < high and high - low < 0.3
    # by hand, one class at a time: 40 parts of 40 classes
    few = labels < 40
    ours = clustering(x[few], labels[few], interval=True)
    assignment = kmeans(x[few], 40).assignment
    left = [agreement(y[y != c], assignment[y != c])["f1"] for y in [labels[few]] for c in range(40)]
    reach = stats.t.ppf(0.975, 39) * math.sqrt(39 / 40 * sum((v - np.mean(left)) ** 2 for v in left))
    assert ours.intervals["f1"] == pytest.approx((ours["f1"] - reach, ours["f1"] + reach), abs=1e-12)
    for few in (10, 40):  # one class, four classes
        alone = clustering(x[:few], labels[:few], interval=True)
        assert all(math.isnan(end) for ends in alone.intervals.values() for end in ends)
    perfect = clustering(torch.eye(8).repeat_interleave(4, 0), torch.arange(8).repeat_interleave(4), interval=True)
    assert perfect["nmi"] == 1 and perfect.intervals["nmi"] == pytest.approx((0.05 ** (1 / 8), 1.0))
