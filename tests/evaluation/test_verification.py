"""Verification against loops, scikit-learn, scipy and tables worked by hand."""

import json
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import beta
from sklearn.isotonic import IsotonicRegression
from sklearn.metrics import roc_auc_score, roc_curve

from nearkin.core import distances
from nearkin.evaluation.retrieval import duplicate_rows
from nearkin.evaluation.statistics.binomial import binomial
from nearkin.evaluation.verification import pair_scan
from nearkin.evaluation.verification.all_pairs import all_pairs
from nearkin.evaluation.verification.score_calibration import Calibration, calibrate, expected_error, isotonic
from nearkin.evaluation.verification.verification_metrics import (
    OperatingPoint,
    operating_point,
    pair_scores,
    roc,
    verification,
)

FARS = (0.9, 0.5, 0.3, 0.25, 0.1, 0.01, 1e-3)


# --- slow twins -------------------------------------------------------------------------------------------------------


def slow_rates(scores, same, t):
    """FAR and TAR of accepting at score >= t, by counting."""
    genuine = [s for s, is_same in zip(scores, same, strict=True) if is_same]
    impostors = [s for s, is_same in zip(scores, same, strict=True) if not is_same]
    return sum(s >= t for s in impostors) / len(impostors), sum(s >= t for s in genuine) / len(genuine)


def slow_eer(scores, same):
    far0, frr0 = 0.0, 1.0
    for t in sorted(set(scores), reverse=True):
        far1, tar1 = slow_rates(scores, same, t)
        frr1 = 1 - tar1
        if far1 >= frr1:
            part = (frr0 - far0) / ((frr0 - far0) + (far1 - frr1))
            return far0 + part * (far1 - far0)
        far0, frr0 = far1, frr1
    raise AssertionError("the curve ends at FAR 1, FRR 0")


def slow_tar(scores, same, far):
    """The best TAR over every threshold, one above all scores among them, whose FAR is within."""
    if far < 1 / sum(not is_same for is_same in same):
        return None
    rates = [slow_rates(scores, same, t) for t in [*set(scores), math.inf]]
    return max(t for f, t in rates if f <= far)


def slow_threshold(scores, same):
    """The middle of the most accurate cuts between neighbouring scores."""
    levels = sorted(set(scores), reverse=True)
    cuts = [math.nextafter(levels[0], math.inf)]
    cuts += [(a + b) / 2 if b < (a + b) / 2 else a for a, b in pairwise(levels)]
    cuts += [levels[-1]]
    right = [sum((s >= t) == is_same for s, is_same in zip(scores, same, strict=True)) for t in cuts]
    best = [t for t, r in zip(cuts, right, strict=True) if r == max(right)]
    return best[(len(best) - 1) // 2]


def slow_folds(scores, same, folds):
    rates = []
    for name in sorted(set(folds)):
        rest = [i for i, f in enumerate(folds) if f != name]
        test = [i for i, f in enumerate(folds) if f == name]
        t = slow_threshold([scores[i] for i in rest], [same[i] for i in rest])
        rates.append(sum((scores[i] >= t) == same[i] for i in test) / len(test))
    mean = sum(rates) / len(rates)
    return mean, math.sqrt(sum((r - mean) ** 2 for r in rates) / (len(rates) - 1) / len(rates))


# --- generated cases --------------------------------------------------------------------------------------------------

LEVELS = st.sampled_from([i / 8 for i in range(-8, 9)])  # few, exact in binary: many ties, exact midpoints
MANY = settings(max_examples=500, deadline=None)


@st.composite
def pair_lists(draw, level=LEVELS):
    size = draw(st.integers(2, 30))
    scores = draw(st.lists(level, min_size=size, max_size=size))
    same = draw(st.lists(st.booleans(), min_size=size, max_size=size).filter(lambda mask: 0 < sum(mask) < len(mask)))
    return scores, same


anything = pair_lists(st.floats(-1e6, 1e6) | st.sampled_from([0.0, -0.0, 1.0, 5e-324]))


def tensors(case):
    return torch.tensor(case[0], dtype=torch.float64), torch.tensor(case[1])


@MANY
@given(pair_lists() | anything)
def test_rates_equal_the_loops(case):
    result = verification(*tensors(case), fars=FARS)
    assert result["eer"] == pytest.approx(slow_eer(*case), abs=1e-12)
    for far in FARS:
        assert result[f"tar@far={far}"] == slow_tar(*case, far)
    assert result["not_measurable"] == [far for far in FARS if slow_tar(*case, far) is None]
    for point in result["operating_points"]:
        assert (point.far, point.tar) == slow_rates(*case, point.threshold)
        below = math.nextafter(point.threshold, -math.inf)
        assert point.far <= point.wanted_far < slow_rates(*case, below)[0]


@MANY
@given(pair_lists() | anything, st.data())
def test_accuracy_over_folds_equals_the_loop(case, data):
    size = len(case[0])
    folds = data.draw(st.lists(st.integers(0, 4), min_size=size, max_size=size).filter(lambda f: len(set(f)) > 1))
    result = verification(*tensors(case), folds=torch.tensor(folds))
    mean, error = slow_folds(*case, folds)
    assert result["accuracy"] == pytest.approx(mean, abs=1e-12)
    assert result["accuracy_error"] == pytest.approx(error, abs=1e-12)
    assert result["threshold"] == pytest.approx(slow_threshold(*case), rel=1e-12)


@pytest.mark.slow
@MANY
@given(pair_lists() | anything)
def test_curve_and_area_equal_sklearn(case):
    curve = roc(*tensors(case))
    far, tar, threshold = roc_curve(case[1], case[0], drop_intermediate=False)
    np.testing.assert_allclose(curve.far, far, atol=1e-12)
    np.testing.assert_allclose(curve.tar, tar, atol=1e-12)
    np.testing.assert_array_equal(curve.threshold, threshold)
    assert verification(*tensors(case))["auc"] == pytest.approx(roc_auc_score(case[1], case[0]), abs=1e-12)


@MANY
@given(pair_lists(), st.sampled_from([0.25, 1.0, 8.0]), st.integers(-64, 64))
def test_shift_and_rescaling_move_only_the_thresholds(case, scale, shift):
    scores, same = tensors(case)
    before, after = verification(scores, same, fars=FARS), verification(scores * scale + shift, same, fars=FARS)
    assert after.pop("threshold") == pytest.approx(before.pop("threshold") * scale + shift, abs=1e-12)
    moved = [t * scale + shift for t in before.pop("fold_thresholds")]
    assert after.pop("fold_thresholds") == pytest.approx(moved, abs=1e-12)
    for old, new in zip(before.pop("operating_points"), after.pop("operating_points"), strict=True):
        assert new.threshold == pytest.approx(old.threshold * scale + shift, abs=1e-12)
        assert new._replace(threshold=0.0) == old._replace(threshold=0.0)
    assert before == after


@st.composite
def labelled_sets(draw):
    size, dim = draw(st.integers(3, 14)), draw(st.integers(1, 3))
    rows = draw(st.lists(st.lists(st.integers(-2, 2), min_size=dim, max_size=dim), min_size=size, max_size=size))
    labels = draw(st.lists(st.integers(-1, 3), min_size=size, max_size=size))
    return torch.tensor(rows), torch.tensor(labels)


def brute(scores, labels):
    i, j = torch.triu_indices(len(labels), len(labels), 1)
    known = (labels[i] >= 0) & (labels[j] >= 0)
    return scores[i, j][known], (labels[i] == labels[j])[known]


def slow_area(scores, same):
    """The share of genuine and impostor scores that are in order, one pair of them at a time."""
    genuine = [s for s, is_same in zip(scores, same, strict=True) if is_same]
    impostors = [s for s, is_same in zip(scores, same, strict=True) if not is_same]
    return sum((g > i) + (g == i) / 2 for g in genuine for i in impostors) / len(genuine) / len(impostors)


def slow_balanced(scores, same):
    """The best (TAR + 1 - FAR) / 2 and the highest score that reaches it, in fractions."""
    rates = {t: slow_rates(scores, same, t) for t in set(scores)}
    best = max((1 + tar - far) / 2 for far, tar in rates.values())
    return best, max(t for t, (far, tar) in rates.items() if (1 + tar - far) / 2 > best - 1e-12)


@pytest.mark.slow
@settings(max_examples=600, deadline=None)
@given(
    labelled_sets(), st.sampled_from([torch.float32, torch.float64]), st.sampled_from([2, 3, 5, 1024]),
    st.sampled_from([1, 2, 3, 10**6]), st.sampled_from([2, 7, 60]),
)  # fmt: skip
def test_all_pairs_equal_the_list_of_pairs(case, kind, tile, capacity, points):
    """Dot products of small whole numbers are exact and full of ties, zeros and duplicates; ranges are cut anywhere."""
    x, labels = case[0].to(kind), case[1]
    scores, same = brute(x @ x.T, labels)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pair_scan, "TILE", tile)
        sweep = pair_scan.sweep
        patch.setattr(pair_scan, "sweep", lambda scan, _, levels: sweep(scan, capacity, levels))
        if len(same) in (0, int(same.sum())) or not bool(same.any()):
            with pytest.raises(ValueError, match="at least one genuine and one impostor"):
                all_pairs(x, labels, similarity="dot")
            return
        result = all_pairs(x, labels, similarity="dot", fars=FARS, points=points)
    expected, plain = verification(scores, same, fars=FARS), (scores.tolist(), same.tolist())
    curve = result.pop("roc")
    assert result.pop("auc") == pytest.approx(slow_area(*plain), abs=1e-12) == pytest.approx(expected["auc"], abs=1e-12)
    balanced, threshold = slow_balanced(*plain)
    assert result.pop("balanced_accuracy") == pytest.approx(balanced, abs=1e-12)
    assert result.pop("balanced_threshold") == threshold
    for name, value in result.items():
        assert value == expected[name], name
    assert (curve.threshold[0], curve.far[0], curve.tar[0], curve.tar[-1]) == (math.inf, 0, 0, 1)
    assert len(curve.tar) <= points + 1 and (np.diff(curve.threshold[1:]) < 0).all()
    for t, far, tar in zip(*curve, strict=True):
        assert (far, tar) == pytest.approx(slow_rates(*plain, t), abs=1e-15)


def test_the_curve_of_all_pairs_is_dense_where_it_matters():
    labels = torch.arange(600) % 60
    x = torch.randn(60, 8)[labels] + 0.7 * torch.randn(600, 8)
    curve = all_pairs(x, labels, points=200)["roc"]
    assert np.diff(curve.tar).max() < 0.011 and 150 < len(curve.tar) <= 201
    low = curve.far[(curve.far > 1e-4) & (curve.far < 0.5)]
    assert (low[1:] / low[:-1]).max() < 1.35
    area = float(np.dot(np.diff(curve.far), curve.tar[1:] + curve.tar[:-1]) / 2 + (1 - curve.far[-1]))
    assert area == pytest.approx(all_pairs(x, labels)["auc"], abs=2e-3)


@pytest.mark.parametrize("kind", [torch.float16, torch.float32, torch.float64])
def test_all_pairs_by_cosine_on_real_numbers(kind):
    labels = torch.arange(300) % 30 - 1
    x = (torch.randn(30, 8)[labels] + 0.7 * torch.randn(300, 8)).to(kind)
    x[5] = 0
    wide = torch.nn.functional.normalize(x.double(), dim=1)
    expected = verification(*brute(wide @ wide.T, labels))
    result = all_pairs(x, labels)
    assert result["genuine"] == expected["genuine"] and result["impostors"] == expected["impostors"] > 10_000
    assert result["eer"] == pytest.approx(expected["eer"], abs=1e-12 if kind == torch.float64 else 1e-4)
    for far in (0.1, 0.01, 1e-3, 1e-4):
        assert result[f"tar@far={far}"] == pytest.approx(expected[f"tar@far={far}"], abs=2e-3)
    assert result["not_measurable"] == [1e-5, 1e-6]
    assert result["auc"] == pytest.approx(expected["auc"], abs=1e-12 if kind == torch.float64 else 1e-6)


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("tile", [7, 16, 1024])
def test_equal_rows_tie_wherever_they_lie(tile, similarity, monkeypatch):
    """Rounded by its place in a tile, one score stood above or below the score of an equal pair."""
    monkeypatch.setattr(pair_scan, "TILE", tile)
    pairs = torch.combinations(torch.arange(60))
    for seed in range(6):
        g = torch.Generator().manual_seed(seed)
        labels = torch.randint(0, 7, (60,), generator=g)
        x = (torch.randn(60, 6, generator=g) + 1.5 * torch.randn(7, 6, generator=g)[labels]).double()
        x[3], x[10:15], x[30], x[31:34] = x[4], x[20:25], 2 * x[31], 0  # across classes, and rows of one direction
        copies = duplicate_rows.first_copies(x, distances.unit if similarity == "cosine" else distances.upcast)
        wide = distances.unit(x) if similarity == "cosine" else x
        table = (wide @ wide.T)[copies][:, copies]  # one number for equal pairs
        table = table.triu() + table.triu(1).T
        if similarity == "cosine":
            table[(copies[:, None] == copies) & (table > 0.5)] = 1.0
        expected = verification(*brute(table, labels), fars=(0.1, 0.01))
        listed = verification(embeddings=x, pairs=pairs, labels=labels, similarity=similarity, fars=(0.1, 0.01))
        every = all_pairs(x, labels, similarity=similarity, fars=(0.1, 0.01))
        for name in ("auc", "eer", "tar@far=0.1", "tar@far=0.01"):
            assert every[name] == listed[name] == expected[name]
        tied = (copies[pairs[:, 0]] == copies[pairs[:, 1]]) & (wide[pairs[:, 0]] != 0).any(1)
        scores = pair_scores(x, pairs, similarity)[tied]
        assert len(scores) > 5 and (similarity == "dot" or bool((scores == 1).all()))


def test_copies_of_one_row_cost_no_more_tiles(monkeypatch):
    """A collapsed set is one row, of which all pairs have the score."""
    products, dot = [], distances.dot
    monkeypatch.setattr(distances, "dot", lambda *sides: products.append(1) or dot(*sides))
    monkeypatch.setattr(pair_scan, "TILE", 16)
    done: list = []
    labels = torch.arange(100) % 10
    result = all_pairs(torch.ones(100, 4), labels, fars=(0.1,), progress=lambda *at: done.append(at))
    assert (result["auc"], result["eer"], result["tar@far=0.1"]) == (0.5, 0.5, 0.0)
    assert len(products) <= 4 and done[-1][0] == done[-1][1] and done[-1][0] % (100 * 99 // 2) == 0


def test_all_pairs_do_not_depend_on_the_budget():
    labels = torch.arange(1100) % 100
    x = torch.randn(100, 16)[labels] + torch.randn(1100, 16)
    least = pair_scan.tile_bytes(16) + pair_scan.TABLE
    assert all_pairs(x, labels, budget=least) == all_pairs(x, labels)
    with pytest.raises(ValueError, match="budget must be at least a tile and a table, in bytes"):
        all_pairs(x, labels, budget=least - 1)


# --- worked by hand ---------------------------------------------------------------------------------------------------


def test_table_worked_by_hand():
    scores = torch.tensor([0.9, 0.8, 0.7, 0.6, 0.5, 0.5, 0.3, 0.2, 0.1])
    same = torch.tensor([1, 1, 0, 1, 1, 0, 0, 0, 0])
    result = verification(scores, same, fars=(0.4, 0.2, 0.1))
    # Accepting from 0.6 on: FAR 1/5, FRR 1/4; from 0.5 on: FAR 2/5, FRR 0. They cross a ninth of the way: 1/5 + 1/45.
    assert result["eer"] == pytest.approx(2 / 9, abs=1e-15)
    # Of 20 pairs of one genuine and one impostor: 5 + 5 + 4 + (3 + 1/2) are in order.
    assert result["auc"] == pytest.approx(17.5 / 20, abs=1e-15)
    assert result["tar@far=0.4"] == 1.0  # two impostors: 0.7 and the tied 0.5
    assert result["tar@far=0.2"] == 0.75  # one; the tie at 0.5 would accept a second
    assert result["tar@far=0.1"] is None and result["not_measurable"] == [0.1]
    # Genuine less impostors accepted from 0.9, 0.8, 0.7, 0.6, 0.5 on: 1, 2, 1, 2, 2. Of the three best, the middle one.
    assert result["threshold"] == pytest.approx(0.55)
    assert [p.threshold for p in result["operating_points"]] == [
        float(np.nextafter(np.float32(0.3), np.float32(1))),
        float(np.nextafter(np.float32(0.5), np.float32(1))),
    ]


def test_lfw_threshold_comes_from_the_other_folds():
    """Two folds whose scores are 1 apart: each is tested with the other's threshold."""
    scores = torch.tensor([1.0, 0.0, 2.0, 1.0])
    same = torch.tensor([True, False, True, False])
    result = verification(scores, same, folds=torch.tensor([0, 0, 1, 1]))
    assert result["fold_thresholds"] == [1.5, 0.5]
    assert result["accuracy"] == 0.5 and result["accuracy_error"] == 0.0


def test_separated_and_reversed_pairs():
    scores, same = torch.tensor([0.9, 0.8, 0.2, 0.1]), torch.tensor([True, True, False, False])
    good, bad = verification(scores, same, fars=(0.5,)), verification(-scores, same, fars=(0.5,))
    assert (good["eer"], good["auc"], good["accuracy"], good["tar@far=0.5"]) == (0.0, 1.0, 1.0, 1.0)
    assert (bad["eer"], bad["auc"], bad["tar@far=0.5"]) == (1.0, 0.0, 0.0)
    constant = verification(torch.ones(4), same, fars=(0.5,))
    assert (constant["eer"], constant["auc"], constant["tar@far=0.5"]) == (0.5, 0.5, 0.0)


def test_far_at_exactly_one_impostor_is_measurable():
    scores, same = torch.linspace(0, 1, 1001), torch.zeros(1001, dtype=torch.bool)
    same[500] = True
    result = verification(scores, same)
    assert result["impostors"] == 1000
    assert result["tar@far=0.001"] == 0.0 and result["tar@far=0.0001"] is None
    assert result["not_measurable"] == [1e-4, 1e-5, 1e-6]
    assert [p.far for p in result["operating_points"]] == [0.1, 0.01, 0.001]


def test_embeddings_with_a_pair_list_and_every_form_of_input():
    x = torch.randn(20, 6).half()
    pairs = torch.randint(20, (50, 2))
    same = torch.arange(50) % 3 == 0
    scores = torch.nn.functional.cosine_similarity(x.double()[pairs[:, 0]], x.double()[pairs[:, 1]])
    torch.testing.assert_close(pair_scores(x, pairs), scores, atol=1e-12, rtol=0)
    expected = verification(pair_scores(x, pairs), same)
    assert verification(embeddings=x, pairs=pairs, same=same) == expected
    frozen = pair_scores(x, pairs).numpy()
    frozen.flags.writeable = False
    assert verification(frozen, same.long().numpy()) == expected
    assert verification(pair_scores(x, pairs), same, seed=1)["fold_thresholds"] != expected["fold_thresholds"]
    verification(scores.bfloat16().requires_grad_(), same)


@pytest.mark.parametrize("rows, dim", [(400, 12_544), (50, 200_000)])
def test_few_long_rows_fit_the_default_budget(rows, dim):
    """Unrolled pixels: tiles hold fewer rows where these are long, and the counts are those of all pairs."""
    g = torch.Generator().manual_seed(0)
    labels = torch.arange(rows) % (rows // 5)
    x = torch.randn(rows // 5, dim, generator=g)[labels] + 2 * torch.randn(rows, dim, generator=g)
    result = all_pairs(x, labels, fars=(0.1,), interval=True, samples=20)
    i, j = torch.triu_indices(rows, rows, 1)
    unit = torch.nn.functional.normalize(x.double(), dim=1)
    listed = verification((unit @ unit.T)[i, j], labels[i] == labels[j], fars=(0.1,))
    for name in ("genuine", "impostors", "auc", "eer", "tar@far=0.1"):
        assert result[name] == pytest.approx(listed[name], abs=1e-3)
    assert pair_scan.tile_bytes(dim) < 300 << 20


# --- intervals and calibration ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 7, 100, 5000, 10**6])
@pytest.mark.parametrize("confidence", [0.9, 0.99])
def test_interval_is_clopper_pearson(n, confidence):
    tail = (1 - confidence) / 2
    for k in sorted({0, 1, 2, n // 100, n // 2, n - 1, n} & set(range(n + 1))):
        low = 0.0 if k == 0 else beta.ppf(tail, k, n - k + 1)
        high = 1.0 if k == n else beta.ppf(1 - tail, k + 1, n - k)
        near = (high - low) * (2e-3 if min(k, n - k) >= 10_000 else 1e-6)
        assert binomial(k, n, confidence) == pytest.approx((low, high), abs=near, rel=0)


def test_interval_of_a_rate_among_a_million_million():
    low, high = binomial(1000, 10**12)  # as Poisson: 1000 events
    assert low == pytest.approx(938.97e-12, rel=1e-4) and high == pytest.approx(1063.96e-12, rel=1e-4)


def test_shipped_threshold_keeps_its_promise_on_new_impostors():
    """The interval of the FAR covers the true FAR of the chosen threshold about as often as it says."""
    same, covered = torch.arange(1100) >= 1000, 0
    for _ in range(200):
        point = operating_point(torch.rand(1100) + same, same, 0.01)
        low, high = point.far_interval
        covered += low <= 1 - point.threshold <= high
        assert isinstance(point, OperatingPoint) and point.far <= 0.01
    assert 182 <= covered <= 200


@pytest.mark.slow
@MANY
@given(pair_lists())
def test_isotonic_equals_sklearn(case):
    x, y = isotonic(np.array(case[0]), np.array(case[1]))
    peer = IsotonicRegression(out_of_bounds="clip").fit(case[0], case[1])
    at = np.linspace(-1.25, 1.25, 41)
    np.testing.assert_allclose(np.interp(at, x, y), peer.predict(at), atol=1e-12)
    assert (np.diff(x) > 0).all() and (np.diff(y) >= 0).all()


def test_calibration_learns_the_probability_and_survives_json():
    true = torch.rand(20_000, dtype=torch.float64)
    same = torch.rand(20_000) < true
    fitted = calibrate(true.logit(), same)
    at = torch.linspace(0.05, 0.95, 19, dtype=torch.float64)
    assert float((fitted.probability(at.logit()) - at).abs().max()) < 0.08
    assert fitted.error < 0.03 and fitted.fitted_on + fitted.judged_on == 20_000
    again = Calibration.from_dict(json.loads(json.dumps(fitted.to_dict())))
    assert again == fitted == calibrate(true.logit(), same)
    assert fitted.probability(torch.zeros(2, 3, dtype=torch.float16)).shape == (2, 3)


def test_calibration_error_worked_by_hand():
    scores, same = torch.tensor([0.0] * 8 + [1.0] * 8), torch.tensor([False] * 8 + [True] * 8)
    assert calibrate(scores, same).error == 0.0
    level = calibrate(torch.zeros(16), same)
    assert level.probabilities == (0.5,) and level.error == 0.0
    # Confidence .9, .8 with one of the two right, and .1 with none: 2/3 · |.85 - .5| + 1/3 · .1
    same = np.array([True, False, False])
    error = expected_error(np.array([0.9, 0.8, 0.1]), same, ~same, 3, 2)
    assert error == pytest.approx((0.7 + 0.1) / 3, abs=1e-15)


# --- what is refused --------------------------------------------------------------------------------------------------

SCORES, SAME = torch.tensor([0.1, 0.9]), torch.tensor([False, True])


@pytest.mark.parametrize(
    "call, sentence",
    [
        (lambda: verification(SCORES, SAME[:1]), "same must have one entry per score: 2 scores, 1 entries"),
        (lambda: verification(SCORES, ~SAME & SAME), "one genuine and one impostor pair, got 0 genuine and 2"),
        (lambda: verification(SCORES / 0, SAME), "scores must be finite, got NaN or Inf in 2 of 2 pairs"),
        (lambda: verification(SCORES[None], SAME), r"scores must have shape \(pairs,\), got \(1, 2\)"),
        (lambda: verification(SCORES, SAME + 1), "same must be bool or 0/1 whole numbers, got 2"),
        (lambda: verification(SCORES, SAME, fars=(0.0,)), "fars must be > 0 and < 1, got 0.0"),
        (lambda: verification(SCORES, SAME, folds=1), "folds must be >= 2, got 1"),
        (
            lambda: verification(SCORES, SAME, samples=9),
            "samples would have no effect: interval is False; leave it out",
        ),
        (lambda: verification(SCORES, SAME, classes=SAME), "classes would have no effect: interval is False"),
        (
            lambda: verification(
                embeddings=torch.eye(3),
                pairs=torch.tensor([[0, 1], [0, 2]]),
                labels=torch.arange(3) // 2,
                classes=torch.zeros(2, 2, dtype=torch.int64),
                interval=True,
            ),
            "classes are taken from labels; pass one of them, got both",
        ),
        (lambda: verification(SCORES, SAME, labels=torch.arange(3)), "labels need embeddings and pairs; beside scores"),
        (lambda: verification(SCORES, SAME, interval=True, samples=0), "samples must be >= 1, got 0"),
        (
            lambda: all_pairs(torch.eye(3), torch.arange(3) // 2, samples=9),
            "samples would have no effect: interval is Fal",
        ),
        (lambda: all_pairs(torch.eye(3), torch.arange(3) // 2, seed=0), "seed would have no effect: interval is False"),
        (lambda: all_pairs(torch.eye(3), torch.arange(3) // 2, seed=-1, interval=True), "seed must be >= 0, got -1"),
        (lambda: verification(SCORES, SAME, folds=torch.zeros(2).long()), "at least 2 folds, got 1"),
        (lambda: verification(SCORES, SAME, folds=torch.zeros(3).long()), "whole number per pair: 2 pairs, got 3"),
        (lambda: verification(SCORES, SAME, embeddings=torch.ones(2, 2)), "either scores, or embeddings and pairs"),
        (lambda: pair_scores(torch.ones(2, 2), torch.tensor([[0, 2]])), r"rows 0\.\.1 of embeddings, got 2"),
        (lambda: pair_scores(torch.ones(2, 2), torch.tensor([0, 1])), r"shape \(pairs, 2\), got \(2,\)"),
        (lambda: operating_point(SCORES, SAME, 0.1), "far must be >= 1/impostors = 1/1 to be measurable, got 0.1"),
        (lambda: calibrate(SCORES, SAME), "at least 2 genuine and 2 impostor pairs, got 1 and 1"),
        (lambda: binomial(3, 2), "successes must be at most trials: 2, got 3"),
        (lambda: Calibration.from_dict({"scores": []}), "a calibration must have scores, probabilities, error"),
        (lambda: all_pairs(torch.ones(2, 2), SAME.long(), similarity="l2"), 'unknown similarity "l2"'),
        (lambda: all_pairs(torch.ones(2, 2) / 0, SAME.long()), "embeddings must be finite, got NaN or Inf in 2 rows"),
    ],
)
def test_bad_input_is_answered_in_one_sentence(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()


@pytest.mark.parametrize(
    "call, sentence",
    [
        (lambda: verification(), "scores must be a torch tensor or a NumPy array, got NoneType"),
        (lambda: verification(SAME, SAME), "scores must be floating point, got torch.bool"),
        (lambda: verification(SCORES, SCORES), "same must be bool or 0/1 whole numbers, got torch.float32"),
        (lambda: pair_scores(torch.ones(2, 2), SAME), "pairs must be a torch tensor of row numbers, got torch.bool"),
        (lambda: calibrate(SCORES.repeat(2), SAME.repeat(2)).probability(0.5), "torch tensor of floats, got float"),
    ],
)
def test_wrong_types_are_answered_in_one_sentence(call, sentence):
    with pytest.raises(TypeError, match=sentence):
        call()
