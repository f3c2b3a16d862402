"""Intervals by resampling classes, and the paired comparison, against loops, enumeration and known truths."""

import itertools
import math

import numpy as np
import pytest
import torch

from nearkin.core import relations
from nearkin.evaluation import bootstrap, compare, ranking, retrieval, uncertainty

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
    for drawn in np.concatenate(list(uncertainty.resamples(len(classes), samples, seed))):
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
    at = [(1 - confidence) / 2 * 199, (1 + confidence) / 2 * 199]
    wanted = [means[int(p)] + (p - int(p)) * (means[min(int(p) + 1, 199)] - means[int(p)]) for p in at]
    assert (low, high) == pytest.approx(tuple(wanted), abs=1e-12)


def test_resamples_draw_every_class_alike():
    drawn = np.concatenate(list(uncertainty.resamples(6, 5000, 0)))
    assert drawn.shape == (5000, 6) and (drawn.sum(1) == 6).all()
    assert np.abs(drawn.mean(0) - 1).max() < 0.06  # 5 standard errors
    assert np.abs(drawn.var(0) - 5 / 6).max() < 0.1  # binomial(6, 1/6)


def test_chunks_do_not_matter(monkeypatch):
    values, groups = clustered(40, 3, 2)
    whole = bootstrap(values, groups), uncertainty.compare(values, -values, groups, samples=500)
    monkeypatch.setattr(uncertainty, "_CELLS", 90)
    parts = bootstrap(values, groups), uncertainty.compare(values, -values, groups, samples=500)
    assert parts[0] == pytest.approx(whole[0], abs=1e-12)
    assert parts[1]["p"] == whole[1]["p"] and parts[1]["interval"] == pytest.approx(whole[1]["interval"], abs=1e-12)


def test_seed_decides():
    values, groups = clustered(20, 4, 3)
    assert bootstrap(values, groups, seed=1) == bootstrap(values, groups, seed=1)
    assert bootstrap(values, groups, seed=1) != bootstrap(values, groups, seed=2)


@pytest.mark.parametrize("classes, low, high", [(10, 0.85, 0.95), (30, 0.89, 0.98)])
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


def test_nothing_is_known_of_fewer_than_two_classes():
    assert all(map(math.isnan, bootstrap(torch.tensor([1.0, 2.0]), torch.tensor([3, 3]))))
    assert all(map(math.isnan, bootstrap(torch.tensor([NAN, 2.0]), torch.tensor([0, 1]))))
    found = uncertainty.compare(torch.ones(4), torch.zeros(4), torch.zeros(4, dtype=torch.long))
    assert found["p"] == 1 and found["verdict"] == "undecided"


@pytest.mark.parametrize("classes", [1, 2, 5, 9])
def test_exact_p_by_enumeration(classes):
    a, groups = clustered(classes, 3, classes)
    b = clustered(classes, 3, 100 + classes)[0] - 0.5
    sums = [float((a - b)[groups == c].sum()) for c in range(classes)]
    signs = itertools.product((1, -1), repeat=classes)
    flipped = [abs(sum(s * d for s, d in zip(sign, sums, strict=True))) for sign in signs]
    wanted = sum(f >= abs(sum(sums)) - 1e-9 for f in flipped) / len(flipped)
    assert uncertainty.compare(a, b, groups)["p"] == pytest.approx(wanted)


def test_sampled_p_is_near_the_exact_one(monkeypatch):
    a, groups = clustered(14, 3, 8)
    b = clustered(14, 3, 9)[0] - 0.4
    exact = uncertainty.compare(a, b, groups)["p"]
    monkeypatch.setattr(uncertainty, "_EXACT", 2)
    assert uncertainty.compare(a, b, groups)["p"] == pytest.approx(exact, abs=0.025)


def test_false_alarms_are_rare_with_few_and_many_classes():
    for classes in (3, 6, 30):
        alarms = 0
        for trial in range(200):
            a, groups = clustered(classes, 4, trial)
            b = clustered(classes, 4, trial + 1000)[0]
            alarms += uncertainty.compare(a, b, groups, samples=200, seed=trial)["verdict"] != "undecided"
        assert alarms / 200 <= 0.1


def test_compare_decides_a_clear_case_either_way():
    good, labels = blobs(20, 5, 0.15)
    bad = blobs(20, 5, 0.6)[0]
    found = compare(good, bad, labels, samples=1000)
    assert found["verdict"] == "a" and found["p"] < 0.01 and found["interval"][0] > 0
    assert found["a"] == pytest.approx(retrieval(good, labels)["map@r"])
    assert found["b"] == pytest.approx(retrieval(bad, labels)["map@r"])
    assert found["difference"] == pytest.approx(found["a"] - found["b"])
    assert (found["classes"], found["queries"]) == (20, 100)
    turned = compare(bad, good, labels, samples=1000)
    assert turned["verdict"] == "b" and turned["difference"] == pytest.approx(-found["difference"])
    assert turned["p"] == found["p"]


def test_compare_leaves_identical_embeddings_undecided():
    x, labels = blobs(20, 5, 0.4)
    found = compare(x, 3 * x, labels, samples=500)
    assert (found["verdict"], found["difference"], found["interval"], found["p"]) == ("undecided", 0, (0, 0), 1)


@pytest.mark.parametrize("metric", ["recall@2", "ndcg@5", "mrr", "map", "precision@1", "r_precision"])
def test_compare_takes_every_metric(metric):
    x, labels = blobs(8, 4, 0.4)
    y = blobs(8, 4, 0.5, dim=5)[0]  # another dimension is fine
    labels[:2] = -1
    found = compare(x, y, labels, metric=metric, samples=100)
    assert found["a"] == pytest.approx(retrieval(x, labels, ks=(2, 5), metrics=ranking.METRICS)[metric])
    assert found == compare(x, y, labels, metric=metric, samples=100)


def test_retrieval_carries_intervals():
    x, labels = blobs(25, 4, 0.5)
    labels[0], labels[1] = 99, -1  # one without kin, one unknown
    plain = retrieval(x, labels)
    assert plain.intervals == {}
    for rule in ("skip", "miss"):
        found = retrieval(x, labels, interval=True, without_kin=rule, seed=3)
        assert dict(found) == dict(retrieval(x, labels, without_kin=rule))
        assert found.intervals.keys() == found.keys() - {"queries", "without_kin", "unknown"}
        values = ranking.per_query(x, labels)["map@r"]
        if rule == "miss":
            values[0] = 0.0
        assert found.intervals["map@r"] == bootstrap(values, labels, seed=3)
        for name, (low, high) in found.intervals.items():
            assert 0 <= low <= found[name] <= high <= 1


def test_without_classes_queries_are_resampled():
    x, labels = blobs(10, 4, 0.5)
    rows = torch.nn.functional.one_hot(labels).bool()
    kin = relations.explicit(labels[:, None] == labels)
    values = ranking.per_query(x, labels)["map@r"]
    wanted = bootstrap(values, torch.arange(40))
    assert retrieval(x, rows, interval=True).intervals["map@r"] == wanted
    assert retrieval(x, kin, interval=True).intervals["map@r"] == wanted
    known = retrieval(x, kin._replace(ids=labels), interval=True).intervals["map@r"]
    assert known == bootstrap(values, labels) != wanted


def test_bad_input_is_named():
    values, groups = clustered(3, 2, 0)
    x, labels = blobs(3, 2, 0.1)
    for call, words in [
        (lambda: bootstrap(values.long(), groups), "values must be a floating point tensor"),
        (lambda: bootstrap(values, groups[:2]), "groups must have one entry a row of values: 6 rows, 2 labels"),
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
