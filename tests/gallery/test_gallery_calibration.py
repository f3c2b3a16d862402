"""What a calibration of pairs promises, measured on classes it has not seen: FARs and probabilities."""

import json
import math

import numpy as np
import pytest
import torch

from calibrations import calibration_by_hand, embeddings
from nearkin.evaluation.verification import class_rates, likelihood
from nearkin.gallery import calibration, results
from nearkin.gallery.results import Calibrator


def measured(rows, labels, seed=0):
    plain = calibration.measure(torch.from_numpy(rows), torch.from_numpy(labels), seed)
    return json.loads(json.dumps(plain, allow_nan=False))


# ---- rates of new classes


@pytest.mark.slow
def test_a_far_holds_on_classes_that_were_not_calibrated_on():
    """Forty times 48 of 400 classes: at most one in twenty may be wrong, and it was two in three."""
    rows, labels = embeddings(400, 4, seed=1)
    scores = rows.astype(np.float64) @ rows.T.astype(np.float64)
    different = labels[:, None] != labels
    draws_within = {0.1: 0, 0.01: 0}
    for seed in range(40):
        inside = np.isin(labels, np.random.default_rng(seed).permutation(400)[:48])
        points = measured(rows[inside], labels[inside])["operating_points"]
        assert [point["far"] for point in points] == [0.1, 0.01], "48 classes cannot show 0.001"
        unseen = np.ix_(~inside, ~inside)
        for point in points:
            draws_within[point["far"]] += (scores[unseen] >= point["threshold"])[different[unseen]].mean() <= point[
                "far"
            ]
            assert point["measured_far"] < point["far"] and point["classes"] == 48
            low, high = point["far_interval"]
            assert low <= point["measured_far"] <= high
    assert min(draws_within.values()) >= 38


def test_bounds_are_of_classes_and_end_at_the_rule_of_three():
    rows, labels = embeddings(12, 5, seed=2)
    groups = [np.flatnonzero(labels == c) for c in range(12)]
    thresholds = np.array([-0.2, 0.1, 0.4, 1.0])
    sums = class_rates.accepts(rows, groups, thresholds)
    slow = np.zeros_like(sums)
    for a in range(12):
        for b in set(range(12)) - {a}:
            pair_rate = ((rows[groups[a]] @ rows[groups[b]].T)[..., None] >= thresholds).mean((0, 1))
            slow[:, a] += pair_rate
            slow[:, b] += pair_rate
    np.testing.assert_allclose(sums, slow, atol=1e-9)
    rates = class_rates.impostor_rates(sums)
    assert (np.diff(rates.bound) <= 0).all() and (rates.bound > rates.high * 0.8).all()
    assert (rates.low <= rates.far).all() and (rates.far < rates.bound).all()
    assert rates.far[-1] == 0 and rates.bound[-1] == pytest.approx(-math.log(0.05) / 66)
    assert class_rates.smallest_far(12) == pytest.approx(-math.log(0.05) / 66)
    for far in (1e-2, 1e-3, 1e-5):
        needed = class_rates.classes_needed(far)
        assert class_rates.smallest_far(needed) <= far < class_rates.smallest_far(needed - 1)


def test_one_bad_class_widens_the_bound():
    even, uneven = np.full((1, 40), 2.0), np.zeros((1, 40))
    uneven[0, 0], uneven[0, 1:] = 40.0, 40.0 / 39
    assert even.sum() == pytest.approx(uneven.sum())
    assert class_rates.impostor_rates(uneven).bound > 2 * class_rates.impostor_rates(even).bound


def test_what_cannot_be_held_is_refused_in_one_sentence():
    rows, labels = embeddings(48, 4, seed=3)
    calibrator = Calibrator(measured(rows, labels))
    assert calibrator.fars == [0.1, 0.01]
    with pytest.raises(ValueError, match=r"at least 0.0027 per pair: 48 calibration classes .* 78 may; got 0.001"):
        calibrator.verify(0.5, 0.001)
    assert calibrator.verify(0.5, 0.0027).far == 0.0027 and calibrator.verify(0.5, 0.05).far == 0.05
    default = calibrator.verify(0.5, None)
    assert default.far == 0.01 and default.classes == 48 and "cannot hold a FAR of 0.001 per pair" in default.note
    with pytest.raises(ValueError, match="far must be > 0 and < 1"):
        calibrator.verify(0.5, 2.0)
    with pytest.raises(ValueError, match="needs at least 5 classes, 4 of them of 2 items or more, got 3 and 3"):
        measured(*embeddings(3, 4))


# ---- probabilities


def test_log_odds_rise_and_go_on_beyond_what_was_seen():
    at = np.linspace(-0.5, 0.8, 60)
    same, other = np.exp(-(((at - 0.6) / 0.15) ** 2) / 2), np.exp(-((at / 0.15) ** 2) / 2)
    ratio = likelihood.fit(at, 1000 * same / same.sum(), 9000 * other / other.sum(), [0.2, 0.4])
    truth = (at - 0.3) * 0.6 / 0.15**2
    assert np.abs(ratio.at(at) - truth)[(at > 0) & (at < 0.6)].max() < 0.5
    values = ratio.at(np.linspace(-1, 1, 200))
    assert (np.diff(values) > 0).all() and values[-1] > ratio.at(0.8) + 2
    assert ratio.at(ratio.reaches(3.0)) == pytest.approx(3.0) and ratio.reaches(1e9) == math.inf


def test_probabilities_come_true_on_other_classes():
    rows, labels = embeddings(240, 6, seed=4)
    half = labels < 120
    plain = measured(rows[half], labels[half])
    calibrator = Calibrator(plain)
    assert plain["error"] < 0.05
    unseen_rows, unseen_labels = rows[~half].astype(np.float64), labels[~half]
    one, two = np.triu_indices(len(unseen_rows), 1)
    score, same = (unseen_rows @ unseen_rows.T)[one, two], (unseen_labels[:, None] == unseen_labels)[one, two]
    draw = np.random.default_rng(0)
    pairs = np.concatenate([np.flatnonzero(same), draw.choice(np.flatnonzero(~same), same.sum(), replace=False)])
    verifications = [calibrator.verify(float(s), None) for s in score[pairs]]
    probability = np.array([one.same_probability for one in verifications])
    for low in np.arange(0, 1, 0.25):
        inside = (probability >= low) & (probability <= low + 0.25)
        assert same[pairs][inside].mean() == pytest.approx(probability[inside].mean(), abs=0.1)
    for one in verifications:
        assert one.probability == (one.same_probability if one.same else 1 - one.same_probability)
    assert any(one.note for one in verifications if not one.same and one.same_probability > 0.5)


def test_verify_says_the_probability_of_what_it_says():
    calibrator = Calibrator(calibration_by_hand({0.5: (0.01, 0.8), 0.8: (1e-3, 0.4)}, {-1.0: -6, 0.5: 0, 1.0: 6}))
    low, middle, high = calibrator.verify(0.0, None), calibrator.verify(0.7, None), calibrator.verify(0.9, None)
    assert high.same and high.probability == high.same_probability > 0.5 and high.far == 1e-3 and high.tar == 0.4
    assert not low.same and low.probability == 1 - low.same_probability > 0.5 and low.note == ""
    assert not middle.same and middle.probability < 0.5 and "likelier the same than not" in middle.note
    assert calibrator.verify(0.7, 0.01).same
    bare = Calibrator(calibration_by_hand({0.5: (0.3, 0.8)}, {-1.0: -6, 1.0: 6})).verify(0.9, None)
    assert bare.same is None and bare.probability is None and "too few to hold any FAR" in bare.note


def test_a_calibration_file_that_is_not_right_is_said(tmp_path):
    calibrator, note = results.load_calibration(tmp_path, "me")
    assert calibrator is None and "nearkin gallery calibrate" in note and "only a similarity" in note
    path = tmp_path / results.FILE
    hand = calibration_by_hand({0.5: (0.1, 0.9)}, {-1.0: -1, 1.0: 1}) | {"encoder": "you"}
    for text in ("{", "[]", json.dumps(hand | {"thresholds": [0.5, 0.4]}), json.dumps(hand | {"examples": {}})):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"damaged .*; nearkin gallery calibrate .* makes it again"):
            results.load_calibration(tmp_path, "me")
    path.write_text(json.dumps({"format": 1, "encoder": "me", "calibration": {}, "shots": {}, "operating_points": []}))
    with pytest.raises(ValueError, match=r"of format 1, this version reads 2; nearkin gallery calibrate"):
        results.load_calibration(tmp_path, "me")
    path.write_text(json.dumps(hand))
    calibrator, note = results.load_calibration(tmp_path, "me")
    assert calibrator is None and "another encoder" in note
    assert results.load_calibration(tmp_path, "you")[0].fars == [0.1]


def test_a_far_that_nothing_can_show_is_refused_in_a_sentence():
    calibrator = Calibrator(calibration_by_hand({0.5: (0.01, 0.8), 0.8: (1e-3, 0.4)}, {-1.0: -6, 0.5: 0, 1.0: 6}))
    for far in (1e-9, 1e-300, 5e-324):
        with pytest.raises(ValueError, match=r"far must be at least .* per pair"):
            calibrator.verify(0.9, far)


def test_pairs_of_one_class_and_group_are_left_out():
    """Bursts of near-copies in classes that are otherwise alike: the true-accept rate falls to what it is."""
    generator = np.random.default_rng(0)
    centres = generator.normal(size=(40, 1, 1, 16)) + 1.2 * generator.normal(size=(40, 4, 1, 16))
    rows = (centres + 0.05 * generator.normal(size=(40, 4, 3, 16))).reshape(-1, 16).astype(np.float32)
    labels, bursts = np.repeat(np.arange(40), 12), [f"burst {i // 3}" for i in range(480)]
    sides = torch.from_numpy(rows), torch.from_numpy(labels)
    plain, grouped = calibration.measure(*sides), calibration.measure(*sides, groups=bursts)
    alone = calibration.measure(*sides, groups=[str(i) for i in range(480)])
    assert alone == plain
    assert plain["genuine"] == 40 * 66 and grouped["genuine"] == 40 * (66 - 12)
    assert grouped["impostors"] == plain["impostors"]
    point, other = (next(p for p in m["operating_points"] if p["far"] == 0.1) for m in (plain, grouped))
    assert other["tar"] < point["tar"] - 0.05
    with pytest.raises(ValueError, match="4 of them of 2 groups or more, got 40 and 0"):
        calibration.measure(*sides, groups=[str(label) for label in labels])
