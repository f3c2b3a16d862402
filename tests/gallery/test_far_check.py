"""The check of `identify`'s FAR: its decisions are those of `identify`, and it notices a calibration that lies."""

import json

import numpy as np
import pytest
import torch

from calibrations import embeddings
from nearkin.data.vectors import Vectors
from nearkin.evaluation.open_set import draws
from nearkin.gallery import calibration, far_check
from nearkin.gallery.results import Calibrator, Hit


def tensors(classes, each, seed, spread=0.5):
    rows, labels = embeddings(classes, each, seed=seed, spread=spread)
    return torch.from_numpy(rows), torch.from_numpy(labels)


def calibrator_on(classes, seed, spread=0.5):
    return Calibrator(calibration.measure(*tensors(classes, 4, seed, spread)))


def identified(calibrator, rows, draw, far):
    """Per probe the label that `identify` gives, or None: one nearest row at a time."""
    labels, each = draw.enrolled.shape
    items, owner = rows[draw.enrolled.ravel()].double(), np.repeat(np.arange(labels), each)
    answers = []
    for probe in draw.probes:
        near = (items @ rows[probe].double()).numpy()
        hits = [Hit(int(i) + 1, str(owner[i]), float(near[i]), "", {}) for i in np.argsort(-near)[:50]]
        counts = {str(label): each for label in range(labels)}
        answers.append(calibrator.identify(hits, {each: labels}, far, counts).label)
    return answers


@pytest.mark.parametrize("examples", [1, 2])
@pytest.mark.parametrize("far", [None, 0.3])
def test_it_counts_what_identify_accepts(examples, far):
    rows, labels = tensors(30, 5, seed=3, spread=1.0)  # so wide that some items are taken for a wrong label
    calibrator = calibrator_on(80, seed=4, spread=1.0)
    checked = far_check.check_far(rows, labels, calibrator, examples=(examples,), fars=(0.3,))
    (rate,) = (rate for rate in checked["rates"] if rate["requested"] == far)
    accepted, found, wrong = [], [], 0
    for repeat in range(far_check.REPEATS):
        draw = draws.draw(labels.numpy(), np.arange(len(labels)), examples, repeat, seed=0)
        for mate, answer in zip(draw.mate, identified(calibrator, rows, draw, far), strict=True):
            (accepted if mate < 0 else found).append(answer is not None if mate < 0 else answer == str(mate))
            wrong += mate >= 0 and answer not in (None, str(mate))
    assert wrong > 0 or far is not None
    assert rate["observed"] == pytest.approx(np.mean(accepted), abs=1e-12)
    assert rate["recognised"] == pytest.approx(np.mean(found), abs=1e-12)
    assert rate["labels"] == 15 and rate["stated"] == (far or pytest.approx(rate["stated"]))


def test_a_calibration_on_other_classes_is_kept_and_one_that_lies_is_noticed():
    rows, labels = tensors(60, 6, seed=5)
    honest = far_check.check_far(rows, labels, calibrator_on(80, seed=6), examples=(1,), fars=(0.3,))
    assert honest["kept"] is True and honest["calibration_classes"] == 80 and honest["test_classes"] == 60
    assert honest["sentence"].startswith("identify keeps all ")
    far_apart = torch.randn(80, 24, generator=torch.Generator().manual_seed(0)).repeat_interleave(6, 0)
    wide = torch.cat([far_apart, torch.zeros(480, 400)], 1)
    wide[:, 24:] = torch.nn.functional.one_hot(torch.arange(80).repeat_interleave(6), 400) * 30.0
    noise = 0.1 * torch.randn(480, 424, generator=torch.Generator().manual_seed(1))
    lying = Calibrator(calibration.measure(wide + noise, torch.arange(80).repeat_interleave(6)))
    found = far_check.check_far(rows, labels, lying, examples=(1,), fars=(0.3,))
    assert found["kept"] is False and any(rate["verdict"] == "exceeded" for rate in found["rates"])
    assert "does not keep" in found["sentence"]


def test_without_a_calibration_half_of_the_classes_makes_one():
    rows, labels = tensors(60, 6, seed=7)
    checked = far_check.check_far(rows, labels, examples=(1, 2), fars=(0.5, 0.001))
    assert checked["calibration_classes"] == 30 and checked["test_classes"] == 30 and checked["kept"] is True
    refused = [rate for rate in checked["rates"] if rate["requested"] == 0.001]
    assert refused and all(rate["verdict"] is None and "far must be" in rate["note"] for rate in refused)
    assert {rate["labels"] for rate in checked["rates"]} == {15}


def test_a_small_gallery_is_tested_beside_a_large_one_and_too_few_classes_are_a_sentence():
    rows, labels = tensors(90, 3, seed=8)
    checked = far_check.check_far(rows, labels, calibrator_on(60, seed=9), examples=(1,), fars=())
    assert [rate["labels"] for rate in checked["rates"]] == [20, 45]
    few = far_check.of_vectors(Vectors("few", rows[:18], np.array([f"c{i}" for i in labels[:18].tolist()])), None)
    assert few["kept"] is None and few["sentence"].startswith(
        "Whether identify keeps its FAR was not measured: calibration needs at least 5 classes, 4 of them of 2 items"
    )
    assert "--part" not in few["sentence"]
    json.dumps(few, allow_nan=False)


def test_groups_and_no_nan_in_json():
    rows, labels = tensors(40, 6, seed=10)
    groups = np.array([f"g{i // 2}" for i in range(len(rows))])
    vectors = Vectors("file", rows, np.array([f"c{i}" for i in labels.tolist()]), groups=groups)
    checked = far_check.of_vectors(vectors, None, examples=(1,))
    json.dumps(checked, allow_nan=False)
    assert checked["rates"] and "half of these classes" in checked["calibration"]
