"""Intervals of rates over pairs: weighted counts against lists with copies, and coverage of known truths."""

import importlib
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nearkin.evaluation import all_pairs, verification
from nearkin.evaluation.statistics.binomial import share
from nearkin.evaluation.statistics.cluster_bootstrap import resamples
from nearkin.evaluation.verification import pair_bootstrap, pair_scan
from nearkin.evaluation.verification.all_pairs import _CELLS
from nearkin.evaluation.verification.pair_bootstrap import Cells, SortedPairs, by_classes

sys.path.insert(0, str(Path(__file__).parents[2] / "studies"))
coverage = importlib.import_module("interval_coverage")
FARS = (0.5, 0.3, 0.1, 0.01)


@st.composite
def weighted(draw):
    size = draw(st.integers(2, 14))
    scores = draw(st.lists(st.integers(-3, 3), min_size=size, max_size=size))
    same = draw(st.lists(st.booleans(), min_size=size, max_size=size).filter(lambda mask: 0 < sum(mask) < len(mask)))
    weights = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    return np.array(scores) / 4, np.array(same), np.array(weights)


@settings(max_examples=500, deadline=None)
@given(weighted(), st.integers(-3, 4))
def test_weights_count_as_copies_do(case, threshold):
    """A pair of weight 3 is three pairs: the rates equal those of the list with copies."""
    scores, same, weights = case
    pairs = SortedPairs(scores, same)
    cut = pairs.cut(threshold / 4)
    result = pairs.rates(weights[pairs.genuine] * 1.0, weights[pairs.impostors] * 1.0, FARS, [cut])
    copies, is_same = np.repeat(scores, weights), np.repeat(same, weights)
    if not is_same.any() or is_same.all():
        assert all(map(math.isnan, result))
        return
    expected = verification(copies, is_same, fars=FARS)
    assert result[:2] == pytest.approx([expected["eer"], expected["auc"]], abs=1e-12)
    for far, value in zip(FARS, result[2:6], strict=True):
        # What cannot be measured is None in a report; a resample takes the threshold that rejects every impostor.
        none_let_in = (copies[is_same] > copies[~is_same].max()).mean()
        assert value == pytest.approx(none_let_in if expected[f"tar@far={far}"] is None else expected[f"tar@far={far}"])
    accepted = copies >= threshold / 4
    assert result[6:] == pytest.approx([accepted[~is_same].mean(), accepted[is_same].mean()], abs=1e-12)


def people(classes, rng, alpha, eps, each=4):
    """All pairs of classes once, and `each` genuine pairs per class; the scores of a class move together."""
    i, j = np.triu_indices(classes, 1)
    shift, shared = rng.normal(0, 0.6, classes), rng.normal(0, alpha, classes)
    c = np.repeat(np.arange(classes), each)
    scores = np.concatenate(
        [2 + shift[c] + rng.normal(0, 0.6, len(c)), shared[i] + shared[j] + rng.normal(0, eps, len(i))]
    )
    same = np.arange(len(scores)) < len(c)
    return scores, same, np.concatenate([np.stack([c, c], 1), np.stack([i, j], 1)])


def test_intervals_have_the_variance_of_lists_with_copies():
    """One interval by hand: the classes the package draws, and a list with copies for each."""
    scores, same, ids = people(7, np.random.default_rng(3), 0.5, 0.5, each=2)
    scores = scores.round(1)
    result = verification(scores, same, classes=ids, interval=True, samples=60, seed=5, fars=(0.2,))
    eers, tars, taken = [], [], np.concatenate(list(resamples(7, 60, 5)))
    for times in taken.astype(int):
        copies = np.where(same, times[ids[:, 0]], times[ids[:, 0]] * times[ids[:, 1]])
        if copies[same].any() and copies[~same].any():
            listed = verification(np.repeat(scores, copies), np.repeat(same, copies), fars=(0.2,))
            eers.append(listed["eer"])
            tars.append(listed["tar@far=0.2"])
    wide = share(result["eer"], np.var(eers), freedom=1, classes=7)
    narrow = share(result["eer"], np.var(eers) / 3, freedom=6, classes=7)  # a third of the variance is left at least
    low, high = result.intervals["eer"]
    assert wide[0] <= low <= narrow[0] < result["eer"] < narrow[1] <= high <= wide[1]
    expected = share(result["tar@far=0.2"], np.var(tars), freedom=6, classes=7)
    assert result.intervals["tar@far=0.2"] == pytest.approx(expected, abs=1e-12)
    assert result.intervals.keys() == {"eer", "auc", "accuracy", "tar@far=0.2"}
    for name, (a, b) in result.intervals.items():
        assert 0 <= a <= result[name] <= b <= 1


def drawn(trial, alpha, eps, sparse):
    rng = np.random.default_rng(trial)
    scores, same, ids = people(160 if sparse else 40, rng, alpha, eps, each=1 if sparse else 4)
    keep = same | (rng.random(len(same)) < (2 / 160 if sparse else 1))  # sparse: about as many impostors as classes
    return scores[keep], same[keep], ids[keep]


@pytest.mark.parametrize("alpha, eps, sparse", [(0.5, 0.6, False), (0.0, 0.8, False), (0.3, 0.8, True)])
def test_width_is_the_spread_of_new_classes(alpha, eps, sparse):
    """Where impostors of a class move together, where they do not, and where hardly two share a class.

    The mean width of intervals is that of a normal variable with the spread of the area over 400 draws of classes.
    """
    values = []
    for trial in range(400):
        pairs = SortedPairs(*drawn(trial, alpha, eps, sparse)[:2])
        values.append(pairs.rates(np.ones(len(pairs.genuine)), np.ones(len(pairs.impostors)), [], [])[1])
    widths, alone = [], []
    for trial in range(12):
        scores, same, ids = drawn(trial, alpha, eps, sparse)
        for intervals, known in ((widths, ids), (alone, None)):
            result = verification(scores, same, classes=known, interval=True, samples=100, seed=trial, fars=(0.1,))
            intervals.append(np.diff(result.intervals["auc"]))
    spread = 3.92 * np.std(values)
    assert 0.8 < np.mean(widths) / spread < 1.25
    if not sparse:  # pairs are not independent, and resampling them promises too much
        assert np.mean(alone) < 0.75 * np.mean(widths)


def test_without_own_variance_nothing_is_drawn_in_and_with_it_alone_a_third_is_left():
    """The mean of x_ab over pairs of classes: a sum of class values, or independent noise of each pair."""
    rng, classes = np.random.default_rng(0), 60
    pairs = np.stack(np.triu_indices(classes, 1), 1)
    cells = Cells(classes, np.arange(classes), pairs, np.arange(len(pairs)))
    settings_ = {"samples": 2000, "seed": 1, "confidence": 0.95}
    noise = rng.random(len(pairs))
    noise += 0.5 - noise.mean()
    value = rng.random(classes)
    shared = (value[pairs[:, 0]] + value[pairs[:, 1]]) / 2
    for x, truth in ((noise, noise.std() / math.sqrt(len(pairs))), (shared, value.std() / math.sqrt(classes))):
        ((low, high),) = by_classes(lambda _, w, x=x: (w @ x / w.sum(1))[:, None], cells, **settings_)
        assert (high - low) / 3.92 == pytest.approx(truth, rel=0.2)


def blobs(classes, seed, each=5, hub=1.0):
    g = torch.Generator().manual_seed(seed)
    labels = torch.arange(classes).repeat_interleave(each)
    centres = torch.randn(classes, 8, generator=g) + torch.tensor([hub] + [0.0] * 7)
    noise = 0.4 + 0.5 * torch.rand(classes, 1, generator=g)
    return centres[labels] + noise[labels] * torch.randn(len(labels), 8, generator=g), labels


@pytest.mark.parametrize("hub", [0.0, 1.0])
def test_all_pairs_hold_the_truth_of_other_classes(hub):
    truth = all_pairs(*blobs(600, 99, hub=hub), fars=(0.1,))
    inside = dict.fromkeys(("eer", "auc", "balanced_accuracy", "tar@far=0.1"), 0)
    for trial in range(15):
        result = all_pairs(*blobs(40, trial, hub=hub), fars=(0.1,), interval=True, samples=200, seed=trial)
        assert result.intervals.keys() == inside.keys()
        for name, (low, high) in result.intervals.items():
            assert 0 <= low < high <= 1
            inside[name] += low <= truth[name] <= high
    assert all(number >= 12 for number in inside.values()), inside


def test_tar_at_a_far_that_few_pairs_of_classes_show_has_no_interval():
    """60 classes are 1,770 pairs of classes: enough for 4 / 0.01, not for 4 / 0.001, though pairs are."""
    result = all_pairs(*blobs(60, 3), fars=(1e-2, 1e-3, 1e-4), interval=True, samples=50)
    assert result["not_measurable"] == [] and result["notes"] == [
        "no interval of the TAR at FAR 0.001, 0.0001: it takes 4 / FAR pairs of different classes, got 1,770"
    ]
    assert not any(map(math.isnan, result.intervals["tar@far=0.01"]))
    assert all(map(math.isnan, result.intervals["tar@far=0.001"] + result.intervals["tar@far=0.0001"]))
    assert all_pairs(*blobs(60, 3), fars=(1e-2,), interval=True, samples=50)["notes"] == []


@pytest.mark.slow
def test_tar_at_a_low_far_holds_the_truth_of_new_classes():
    """A small form of studies/interval_coverage.py."""
    truth = all_pairs(*coverage.verified("families", 800, 10**6), fars=(1e-3,))
    assert coverage.pair_coverage("families", 100, 1e-3, 15, truth)["tar@far=0.001"] >= 0.9


def test_all_pairs_agree_with_the_list_of_the_same_pairs():
    """Every class a group of its own: the same classes are drawn, and only the grid differs."""
    x, labels = blobs(20, 3)
    i, j = torch.triu_indices(len(labels), len(labels), 1)
    result = all_pairs(x.double(), labels, interval=True, samples=400, fars=(0.1,))
    pairs = torch.stack([i, j], 1)
    listed = verification(embeddings=x.double(), pairs=pairs, labels=labels, interval=True, samples=400, fars=(0.1,))
    for name in ("eer", "auc", "tar@far=0.1"):
        assert result.intervals[name] == pytest.approx(listed.intervals[name], abs=0.02)
    (point,), (other,) = result["operating_points"], listed["operating_points"]
    assert point.far_interval == pytest.approx(other.far_interval, abs=0.01)
    assert point.far_interval[0] < point.far < point.far_interval[1]
    plain = all_pairs(x.double(), labels, fars=(0.1,))["operating_points"][0]
    assert point.far_interval[0] <= plain.far_interval[0] and point.far_interval[1] >= plain.far_interval[1]


def test_all_pairs_with_more_classes_than_groups_and_the_least_budget():
    x, labels = blobs(150, 5)
    least = pair_scan.tile_bytes(8) + pair_scan.TABLE + _CELLS
    result, uncut = (all_pairs(x, labels, interval=True, samples=50, budget=b) for b in (least, 2**30))
    assert result == uncut and result.intervals == uncut.intervals
    assert result.intervals != all_pairs(x, labels, interval=True, samples=50, seed=1).intervals
    with pytest.raises(ValueError, match="budget must be at least a tile, a table and the counts of the groups"):
        all_pairs(x, labels, interval=True, budget=least - 1)


def test_progress_reaches_its_end():
    calls = []
    all_pairs(*blobs(30, 0), interval=True, samples=20, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1] and [done for done, _ in calls] == sorted(done for done, _ in calls)
    calls.clear()
    scores, same, ids = people(8, np.random.default_rng(0), 0.3, 0.5)
    verification(scores, same, classes=ids, interval=True, samples=10, progress=lambda *both: calls.append(both))
    assert calls[-1] == (28, 28)  # 10 resamples of classes, 10 of their pairs, 8 classes left out


def test_two_classes_say_nothing_of_their_spread():
    scores, same, ids = (
        np.array([0.1, 0.9, 0.8, 0.2]),
        np.array([False, True, True, False]),
        [[0, 1], [0, 0], [1, 1], [0, 1]],
    )
    result = verification(scores, same, classes=np.array(ids), interval=True, fars=(0.5,))
    assert all(math.isnan(end) for ends in result.intervals.values() for end in ends)
    assert not any(math.isnan(end) for point in result["operating_points"] for end in point.far_interval)


def test_identities_come_from_labels_and_same_too():
    x, labels = blobs(6, 1)
    pairs = torch.randint(30, (200, 2))
    same = labels[pairs[:, 0]] == labels[pairs[:, 1]]
    result = verification(embeddings=x, pairs=pairs, labels=labels, interval=True, samples=50)
    again = verification(embeddings=x, pairs=pairs, same=same, classes=labels[pairs], interval=True, samples=50)
    assert result == again and result.intervals == again.intervals
    dot = verification(embeddings=x, pairs=pairs, labels=labels, similarity="dot")
    assert dot["auc"] == pytest.approx(verification((x[pairs[:, 0]] * x[pairs[:, 1]]).sum(1), same)["auc"])


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"classes": [[0, 0], [0, 1]]}, "classes must be a torch tensor or a NumPy array, got list"),
        ({"classes": torch.rand(2, 2)}, "classes must be whole numbers, got float32"),
        ({"classes": torch.tensor([0, 1])}, r"classes must have shape \(pairs, 2\) = \(2, 2\), got \(2,\)"),
        ({"classes": torch.tensor([[0, 1], [0, 1]])}, "equal where pairs are the same and only there, got 1 pairs"),
        ({"classes": torch.tensor([[0, -1], [1, 1]])}, r"got -1 \(unknown\) in 1 of 2 pairs"),
    ],
)
def test_bad_identities_are_named(change, sentence):
    with pytest.raises((TypeError, ValueError), match=sentence):
        verification(torch.tensor([0.1, 0.9]), torch.tensor([False, True]), interval=True, **change)


def test_chunks_do_not_matter(monkeypatch):
    scores, same, ids = people(12, np.random.default_rng(1), 0.3, 0.5)
    uncut = verification(scores, same, classes=ids, interval=True, samples=40).intervals
    monkeypatch.setattr(pair_bootstrap, "_CELLS", 1)
    assert verification(scores, same, classes=ids, interval=True, samples=40).intervals == uncut
