"""Intervals by resampling classes, and the paired comparison, against loops, enumeration and known truths."""

import importlib
import itertools
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from nearkin import evaluation
from nearkin.core import relations
from nearkin.evaluation import bootstrap, compare, retrieval
from nearkin.evaluation.retrieval import retrieval_metrics
from nearkin.evaluation.statistics import binomial, cluster_bootstrap
from nearkin.evaluation.statistics.cluster_bootstrap import share_interval

sys.path.insert(0, str(Path(__file__).parents[2] / "studies"))
coverage = importlib.import_module("interval_coverage")
NAN = math.nan


def clustered(classes, size, seed, spread=1.0, noise=0.5):
    """Values whose mean over a class varies about 0."""
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(classes), size)
    values = rng.normal(0, spread, classes)[groups] + rng.normal(0, noise, classes * size)
    return torch.tensor(values), torch.tensor(groups)


def blobs(classes, size, noise, seed=0, dim=8):
    rng = torch.Generator().manual_seed(seed)
    labels = torch.arange(classes).repeat_interleave(size)
    centres = torch.nn.functional.normalize(torch.randn(classes, dim, generator=rng), dim=1)
    return centres[labels] + noise * torch.randn(classes * size, dim, generator=rng), labels


def resampled_means(values, groups, samples, seed):
    """The mean of each resample from concatenated lists of values, for the classes the package draws."""
    members = {}
    for value, group in zip(values.tolist(), groups.tolist(), strict=True):
        if not math.isnan(value) and group != -1:
            members.setdefault(group, []).append(value)
    classes = sorted(members)
    means = []
    for drawn in np.concatenate(list(cluster_bootstrap.resamples(len(classes), samples, seed))):
        pool = [v for c, times in zip(classes, drawn, strict=True) for v in members[c] * int(times)]
        means.append(math.fsum(pool) / len(pool))
    return means


@pytest.mark.parametrize("confidence", [0.5, 0.95])
def test_bootstrap_is_the_percentiles_of_resampled_lists(confidence):
    values, groups = clustered(7, 3, 1)
    groups = groups * 10 - 3
    values[[0, 5]] = NAN
    groups[4] = -1
    values[groups == 17] = NAN  # a class without a value
    means = sorted(resampled_means(values, groups, 200, 5))
    low, high = bootstrap(values, groups, samples=200, seed=5, confidence=confidence)
    tail = stats.norm.sf(stats.t.ppf((1 + confidence) / 2, 5) * math.sqrt(6 / 5))  # of 6 classes, as Student has them
    at = [tail * 199, (1 - tail) * 199]
    expected = [means[int(p)] + (p - int(p)) * (means[min(int(p) + 1, 199)] - means[int(p)]) for p in at]
    assert (low, high) == pytest.approx(tuple(expected), abs=1e-11)  # means of up to 200 numbers of size 1


def test_resamples_draw_every_class_alike():
    drawn = np.concatenate(list(cluster_bootstrap.resamples(6, 5000, 0)))
    assert drawn.shape == (5000, 6) and (drawn.sum(1) == 6).all()
    assert np.abs(drawn.mean(0) - 1).max() < 0.06  # 5 standard errors
    assert np.abs(drawn.var(0) - 5 / 6).max() < 0.1  # binomial(6, 1/6)


def test_chunks_do_not_matter(monkeypatch):
    values, groups = clustered(40, 3, 2)
    once = bootstrap(values, groups), cluster_bootstrap.compare(values, -values, groups, samples=500)
    monkeypatch.setattr(cluster_bootstrap, "_CELLS", 90)
    parts = bootstrap(values, groups), cluster_bootstrap.compare(values, -values, groups, samples=500)
    assert parts[0] == pytest.approx(once[0], abs=1e-12)
    assert parts[1]["p"] == once[1]["p"] and parts[1]["interval"] == pytest.approx(once[1]["interval"], abs=1e-12)


def test_seed_decides():
    values, groups = clustered(20, 4, 3)
    assert bootstrap(values, groups, seed=1) == bootstrap(values, groups, seed=1)
    assert bootstrap(values, groups, seed=1) != bootstrap(values, groups, seed=2)


@pytest.mark.parametrize("classes, low, high", [(6, 0.91, 0.99), (10, 0.92, 0.98), (30, 0.92, 0.98)])
def test_coverage_of_the_true_mean(classes, low, high):
    inside = 0
    for trial in range(400):
        a, b = bootstrap(*clustered(classes, 5, trial), samples=300, seed=trial)
        inside += a <= 0 <= b
    assert low <= inside / 400 <= high


def test_items_resampled_instead_of_classes_would_promise_too_much():
    values, groups = clustered(20, 30, 4)
    classes, items = bootstrap(values, groups), bootstrap(values, torch.arange(len(values)))
    assert classes[1] - classes[0] > 2.5 * (items[1] - items[0])


def test_nothing_is_known_of_fewer_than_five_classes():
    assert all(map(math.isnan, bootstrap(torch.tensor([1.0, 2.0]), torch.tensor([3, 3]))))
    assert all(map(math.isnan, bootstrap(torch.tensor([NAN, 2.0]), torch.tensor([0, 1]))))
    four, five = (clustered(number, 4, 0) for number in (4, 5))
    for method in (bootstrap, share_interval):
        assert all(map(math.isnan, method(four[0].sigmoid(), four[1])))
        assert not any(map(math.isnan, method(five[0].sigmoid(), five[1])))
    assert all(map(math.isnan, cluster_bootstrap.compare(four[0], -four[0], four[1])["interval"]))
    result = cluster_bootstrap.compare(torch.ones(4), torch.zeros(4), torch.zeros(4, dtype=torch.long))
    assert result["p"] == 1 and result["verdict"] == "undecided"


@pytest.mark.parametrize("classes", [1, 2, 5, 9])
def test_exact_p_by_enumeration(classes):
    a, groups = clustered(classes, 3, classes)
    b = clustered(classes, 3, 100 + classes)[0] - 0.5
    sums = [float((a - b)[groups == c].sum()) for c in range(classes)]
    signs = itertools.product((1, -1), repeat=classes)
    flipped = [abs(sum(s * d for s, d in zip(sign, sums, strict=True))) for sign in signs]
    expected = sum(f >= abs(sum(sums)) - 1e-9 for f in flipped) / len(flipped)
    assert cluster_bootstrap._sign_flips(np.array(sums), 1000, 0) == pytest.approx(expected)
    p = cluster_bootstrap.compare(a, b, groups)["p"]
    assert p == pytest.approx(expected) if classes < 5 else p >= expected - 1e-12


def test_sampled_p_is_near_the_exact_one(monkeypatch):
    sums = np.random.default_rng(8).normal(0.4, 1, 14)
    exact = cluster_bootstrap._sign_flips(sums, 10_000, 0)
    monkeypatch.setattr(cluster_bootstrap, "_EXACT", 2)
    assert cluster_bootstrap._sign_flips(sums, 10_000, 0) == pytest.approx(exact, abs=0.025)


def test_false_alarms_are_rare_with_few_and_many_classes():
    for classes in (3, 6, 30):
        alarms = 0
        for trial in range(200):
            a, groups = clustered(classes, 4, trial)
            b = clustered(classes, 4, trial + 1000)[0]
            alarms += cluster_bootstrap.compare(a, b, groups, samples=200, seed=trial)["verdict"] != "undecided"
        assert alarms / 200 <= 0.1


def test_compare_decides_a_clear_case_either_way():
    good, labels = blobs(20, 5, 0.15)
    bad = blobs(20, 5, 0.6)[0]
    result = compare(good, bad, labels, samples=1000)
    assert result["verdict"] == "a" and result["p"] < 0.01 and result["interval"][0] > 0
    assert result["a"] == pytest.approx(retrieval(good, labels)["map@r"])
    assert result["b"] == pytest.approx(retrieval(bad, labels)["map@r"])
    assert result["difference"] == pytest.approx(result["a"] - result["b"])
    assert (result["classes"], result["queries"]) == (20, 100)
    turned = compare(bad, good, labels, samples=1000)
    assert turned["verdict"] == "b" and turned["difference"] == pytest.approx(-result["difference"])
    assert turned["p"] == result["p"]


def test_compare_leaves_identical_embeddings_undecided():
    x, labels = blobs(20, 5, 0.4)
    result = compare(x, 3 * x, labels, samples=500)
    assert (result["verdict"], result["difference"], result["interval"], result["p"]) == ("undecided", 0, (0, 0), 1)


@pytest.mark.parametrize("metric", ["recall@2", "ndcg@5", "mrr", "map", "precision@1", "r_precision"])
def test_compare_takes_every_metric(metric):
    x, labels = blobs(8, 4, 0.4)
    y = blobs(8, 4, 0.5, dim=5)[0]  # another dimension is fine
    labels[:2] = -1
    result = compare(x, y, labels, metric=metric, samples=100)
    assert result["a"] == pytest.approx(retrieval(x, labels, ks=(2, 5), metrics=retrieval_metrics.METRICS)[metric])
    assert result == compare(x, y, labels, metric=metric, samples=100)


def test_retrieval_carries_intervals():
    x, labels = blobs(25, 4, 0.5)
    labels[0], labels[1] = 99, -1  # one without positives, one unknown
    plain = retrieval(x, labels)
    assert plain.intervals == {}
    for rule in ("skip", "miss"):
        result = retrieval(x, labels, interval=True, without_positives=rule)
        assert dict(result) == dict(retrieval(x, labels, without_positives=rule))
        assert result.intervals.keys() == result.keys() - {"queries", "without_positives", "unknown"}
        values = retrieval_metrics.per_query(x, labels)["map@r"]
        if rule == "miss":
            values[0] = 0.0
        assert result.intervals["map@r"] == share_interval(values, labels)
        for name, (low, high) in result.intervals.items():
            assert 0 <= low <= result[name] <= high <= 1


def test_without_classes_queries_are_resampled():
    x, labels = blobs(10, 4, 0.5)
    rows = torch.nn.functional.one_hot(labels).bool()
    relation = relations.explicit(labels[:, None] == labels)
    values = retrieval_metrics.per_query(x, labels)["map@r"]
    expected = share_interval(values, torch.arange(40))
    assert retrieval(x, rows, interval=True).intervals["map@r"] == expected
    assert retrieval(x, relation, interval=True).intervals["map@r"] == expected
    known = retrieval(x, relation._replace(ids=labels), interval=True).intervals["map@r"]
    assert known == share_interval(values, labels) != expected


def by_hand(values, groups):
    """Mean, variance and degrees of freedom from leaving out one class at a time, in loops."""
    classes = sorted(set(groups))
    left = [np.mean([v for v, g in zip(values, groups, strict=True) if g != c]) for c in classes]
    off = np.array(left) - np.mean(values)
    size = len(classes)
    kurtosis = np.mean(off**4) / np.mean(off**2) ** 2
    return np.mean(values), 1.2 * (size - 1) / size * sum(off**2), min(size - 1, 2 * size / (kurtosis - 1))


def test_an_interval_of_shares_is_clopper_pearson_with_effective_trials():
    rng = np.random.default_rng(2)
    groups = np.repeat(np.arange(12), rng.integers(1, 9, 12))
    values = rng.beta(6 * rng.random(12)[groups] + 0.3, 2)
    mean, variance, freedom = by_hand(values, groups)
    variance = max(variance, mean * (1 - mean) / len(values))
    trials = mean * (1 - mean) / variance * (stats.norm.ppf(0.975) / stats.t.ppf(0.975, freedom)) ** 2
    low = stats.beta.ppf(0.025, mean * trials, trials - mean * trials + 1)
    high = stats.beta.ppf(0.975, mean * trials + 1, trials - mean * trials)
    assert share_interval(torch.tensor(values), torch.tensor(groups)) == pytest.approx((low, high), abs=1e-9)
    a, b = torch.tensor(values), torch.tensor(values[::-1].copy())
    difference, variance, freedom = by_hand((a - b).numpy(), groups)
    half = stats.t.ppf(0.975, freedom) * math.sqrt(variance)
    result = cluster_bootstrap.compare(a, b, torch.tensor(groups))
    assert result["interval"] == pytest.approx((difference - half, difference + half), abs=1e-9)
    assert result["p"] >= 2 * stats.t.sf(abs(difference) / math.sqrt(variance), freedom) - 1e-9


@pytest.mark.parametrize("freedom", [1, 2.5, 7, 40.3, 5000])
def test_student_is_students(freedom):
    assert binomial.student(freedom, 0.9) == pytest.approx(stats.t.ppf(0.95, freedom), rel=1e-8)
    assert binomial.student_p(-2.2, freedom) == pytest.approx(2 * stats.t.sf(2.2, freedom), rel=1e-8)


def test_all_right_or_all_wrong_has_a_one_sided_interval():
    """As many classes as there are, all of them right: with 20, in 95 of 100 draws 86 % of classes are."""
    x, labels = blobs(20, 4, 0.001, dim=16)
    result = retrieval(x, labels, interval=True)
    assert result["recall@1"] == result["map@r"] == 1
    assert all(ends == pytest.approx((0.05 ** (1 / 20), 1.0)) for ends in result.intervals.values())
    wrong = torch.zeros(80)
    assert share_interval(wrong, labels) == pytest.approx((0.0, 1 - 0.05 ** (1 / 20)))
    better = cluster_bootstrap.compare(wrong + 1, wrong, labels)
    assert better["verdict"] == "a" and 0 < better["interval"][0] < better["interval"][1] == 1
    half = share_interval(wrong + 0.5, labels)  # classes that agree to the last digit prove little
    assert half[0] < 0.4 and half[1] > 0.6


@pytest.mark.parametrize("kind, classes", [("spread", 10), ("unequal", 10), ("hubs", 30)])
def test_intervals_hold_the_truth_of_new_classes_and_galleries(kind, classes):
    """A small form of studies/interval_coverage.py; percentiles of resampled query classes cover 60 to 90 in 100."""
    result = coverage.retrieval_coverage(kind, classes, 120)
    _, ours, percentiles = np.mean(list(result.values()), axis=0)
    assert ours >= 0.94 and percentiles < 0.92, result
    assert min(coverage for _, coverage, _ in result.values()) >= 0.9, result


@pytest.mark.parametrize("kind", ["skewed", "spread"])
def test_comparison_finds_no_difference_where_none_is(kind):
    """5 % of 300 and two standard errors; coin flips alone decided 7.5 % where differences are skewed."""
    assert coverage.false_verdicts(kind, 20, 300)["map@r"] <= 0.075


def test_study_ranks_as_the_library_does():
    x, labels = coverage.drawn("unequal", 30, np.random.default_rng(0))
    ours = retrieval_metrics.per_query(x, labels, ks=(1,))
    for name, values in coverage.per_query(x, labels).items():
        assert values.tolist() == pytest.approx(ours[name].tolist())


def test_two_classes_get_a_sentence_in_place_of_an_interval():
    assert cluster_bootstrap.too_few(2) == (
        "no 95 % intervals: they take at least 5 classes, which show how classes differ; got 2 classes"
    )
    assert "got 7 classes, too few of them with something to find" in cluster_bootstrap.too_few(7)


@pytest.mark.parametrize("classes", [4, 5])
def test_results_without_intervals_say_why(classes):
    x, labels = blobs(classes, 6, 0.6)
    pairs = torch.combinations(torch.arange(len(x)))
    measured = {
        "retrieval": lambda **on: retrieval(x, labels, **on),
        "clustering": lambda **on: evaluation.clustering(x, labels, **on),
        "all_pairs": lambda **on: evaluation.all_pairs(x, labels, fars=(0.5,), **on),
        "verification": lambda **on: evaluation.verification(
            embeddings=x, pairs=pairs, labels=labels, fars=(0.5,), **on
        ),
        "one_shot": lambda **on: evaluation.one_shot(x, labels, ways=2, episodes=9, **on),
        "graded": lambda **on: evaluation.graded(x, x[:, 0], **on, **({"classes": labels} if on else {})),
        "bcubed": lambda **on: evaluation.bcubed(labels, labels % 3, **on),
    }
    for name, function in measured.items():
        result, plain = function(interval=True), function()
        missing = [math.isnan(low) for low, _ in result.intervals.values()]
        assert missing == [classes < 5] * len(missing) and missing, name
        assert result.notes == ([cluster_bootstrap.too_few(4)] if classes < 5 else []), name
        assert plain.notes == [] and result.get("notes", result.notes) == result.notes


def test_few_pairs_without_classes_have_no_interval_and_say_why():
    scores, same = torch.rand(24), torch.arange(24) < 3
    result = evaluation.verification(scores, same, fars=(0.2,), interval=True)
    assert all(math.isnan(low) for low, _ in result.intervals.values())
    assert result.notes == ["no intervals: they take at least 5 pairs of each kind; got 3 genuine and 21 impostors"]


def test_bad_input_is_named():
    values, groups = clustered(3, 2, 0)
    x, labels = blobs(3, 2, 0.1)
    for call, words in [
        (lambda: bootstrap(values.long(), groups), "values must be a floating point tensor"),
        (lambda: bootstrap(values, groups[:2]), "groups must have one entry per row of values: 6 rows, 2 labels"),
        (lambda: bootstrap(values, groups, samples=0), "samples must be >= 1, got 0"),
        (lambda: bootstrap(values, groups, seed=-1), "seed must be >= 0, got -1"),
        (lambda: bootstrap(values, groups, confidence=95), "confidence must be > 0 and < 1, got 95"),
        (lambda: compare(x, x[:4], labels), "embeddings_b must have the items of embeddings_a: 6 rows, got 4"),
        (lambda: compare(x, x, labels, metric="map@R"), 'unknown metric "map@R"; did you mean "map@r"?'),
        (lambda: compare(x, x, labels, metric="recall"), 'unknown metric "recall"'),
        (lambda: compare(x, x, labels, metric="recall@0"), 'unknown metric "recall@0"'),
    ]:
        with pytest.raises((TypeError, ValueError)) as error:
            call()
        assert words in str(error.value)
