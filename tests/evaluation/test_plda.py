"""PLDA: its evidence against Gaussian densities, its fit against known scatter, and the groups it finds."""

import itertools

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal

from nearkin import evaluation
from nearkin.evaluation import plda


def world(seed, classes=30, per_class=8, dim=12, noise=0.5, first=0):
    """Classes whose items scatter most in the first dimensions, in which the classes hardly differ."""
    draw = np.random.default_rng([seed, 0])
    inner = noise * np.geomspace(3, 0.3, dim)
    outer = np.geomspace(0.3, 1.5, dim)
    labels = np.repeat(np.arange(first, first + classes), per_class)
    means = np.random.default_rng([seed, 1]).normal(size=(first + classes, dim)) * outer
    return (means[labels] + draw.normal(size=(len(labels), dim)) * inner + 4).astype(np.float32), labels


def test_the_evidence_is_the_ratio_of_gaussian_densities():
    draw = np.random.default_rng(0)
    between = np.array([0.2, 3.0, 11.0])
    model = plda.PLDA(np.zeros(3), np.eye(3), between, 1.0, [])
    for n in (1, 2, 5):
        rows = draw.normal(size=(n, 3)) * 2
        expected = 0.0
        for k, b in enumerate(between):
            one_class = multivariate_normal(np.zeros(n), np.eye(n) + b)
            expected += one_class.logpdf(rows[:, k]) - multivariate_normal(np.zeros(n), np.eye(n)).logpdf(rows[:, k])
        assert model.evidence(np.array([float(n)]), rows.sum(0)[None])[0] == pytest.approx(expected, abs=1e-9)


def test_the_fit_whitens_the_classes_and_finds_their_scatter():
    rows, labels = world(0, classes=400, per_class=10)
    model = evaluation.fit_plda(rows, labels, shrink=1e-9)
    unit = rows.astype(np.float64) / np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
    z = model.rows(unit)
    means = np.stack([z[labels == c].mean(0) for c in range(400)])
    inner = z - means[labels]
    within = inner.T @ inner / (len(z) - 400)
    assert np.allclose(within, np.eye(len(within)) / 2, atol=1e-6)  # spread 2 without validation classes
    outer = np.cov(means.T) - within / 10
    assert np.allclose(outer, np.diag(model.between), atol=1e-6)


def test_groups_are_found_where_cosines_mislead():
    rows, labels = world(1, first=30)
    known, known_labels = world(1)
    model = evaluation.fit_plda(
        known[:160], known_labels[:160], validation=known[160:], validation_labels=known_labels[160:]
    )
    assert [spread for spread, _ in model.tried] == list(plda.SPREADS) and model.spread in plda.SPREADS
    ours = evaluation.bcubed(labels, evaluation.group(rows, method="plda", model=model).assignment)["f"]
    best = max(
        evaluation.bcubed(labels, evaluation.group(rows - rows.mean(0), similarity=t).assignment)["f"]
        for t in np.arange(0.1, 1, 0.1)
    )
    assert ours > best + 0.1


def test_no_two_groups_would_gain_by_joining():
    rows, _ = world(2, classes=12, per_class=6)
    model = evaluation.fit_plda(*world(3))
    groups = evaluation.group(rows, method="plda", model=model, neighbours=len(rows) - 1)
    assert groups.capped == 0 and groups.edges == len(rows) * (len(rows) - 1) // 2
    z = model.rows(rows.astype(np.float64) / np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True))
    parts = [np.flatnonzero(groups.assignment.numpy() == g) for g in range(int(groups.assignment.max()) + 1)]
    assert 3 < len(parts) < len(rows)

    def evidence(part):
        return model.evidence(np.array([float(len(part))]), z[part].sum(0)[None])[0]

    for a, b in itertools.combinations(parts, 2):
        assert evidence(np.append(a, b)) < evidence(a) + evidence(b) + 1e-9
    again = evaluation.group(torch.from_numpy(rows), method="plda", model=model, neighbours=len(rows) - 1, budget=2**22)
    assert torch.equal(again.assignment, groups.assignment)


def test_one_item_equal_items_and_zero_rows():
    model = evaluation.fit_plda(*world(4))
    assert evaluation.group(np.ones((1, 12)), method="plda", model=model).assignment.tolist() == [0]
    assert evaluation.group(np.ones((5, 12)), method="plda", model=model).assignment.tolist() == [0] * 5
    assert len(evaluation.group(np.zeros((4, 12)), method="plda", model=model).assignment) == 4


def test_items_without_a_label_are_left_out():
    rows, labels = world(5)
    more = np.concatenate([rows, 50 * np.random.default_rng(0).normal(size=(20, 12)).astype(np.float32)])
    ours = evaluation.fit_plda(more, np.concatenate([labels, np.full(20, -1)]))
    assert np.array_equal(ours.basis, evaluation.fit_plda(rows, labels).basis)


def test_bad_input_is_one_sentence():
    rows, labels = world(6)
    model = evaluation.fit_plda(rows, labels)
    for options, sentence in (
        ({}, 'model must be given for method "plda"'),
        ({"model": model, "similarity": 0.5}, '"plda" has none, got 0.5'),
        ({"model": model, "least": 3}, 'least is for method "hdbscan"'),
    ):
        with pytest.raises(ValueError, match=sentence):
            evaluation.group(rows, method="plda", **options)
    with pytest.raises(ValueError, match='model is for method "plda"'):
        evaluation.group(rows, similarity=0.5, model=model)
    with pytest.raises(ValueError, match="must have 12 dimensions as the model has, got 5"):
        evaluation.group(rows[:, :5], method="plda", model=model)
    with pytest.raises(ValueError, match="two classes"):
        evaluation.fit_plda(rows, np.zeros(len(rows), int))
    with pytest.raises(ValueError, match="two classes"):
        evaluation.fit_plda(rows, np.arange(len(rows)))
    with pytest.raises(ValueError, match="shrink must be > 0"):
        evaluation.fit_plda(rows, labels, shrink=0.0)
    with pytest.raises(ValueError, match="validation"):
        evaluation.fit_plda(rows, labels, validation=rows[:, :5], validation_labels=labels)
