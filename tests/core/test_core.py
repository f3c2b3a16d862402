"""Distances, relations and reductions: exact at the corners where the usual code is not."""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import nearkin
from nearkin.core import distances, reduce, relations

MATRICES = [distances.squared_euclidean, distances.euclidean, distances.cosine, distances.dot]


def exact(function, x, r):
    """The same matrix from float64 differences."""
    x, r = x.double(), r.double()
    if function is distances.dot:
        return (x[:, None] * r[None]).sum(2)
    if function is distances.cosine:
        return torch.nn.functional.cosine_similarity(x[:, None], r[None], dim=2)
    squared = (x[:, None] - r[None]).square().sum(2)
    return squared if function is distances.squared_euclidean else squared.sqrt()


@pytest.mark.parametrize("function", MATRICES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_matrices_equal_float64_differences(function, dtype):
    x, r = torch.randn(17, 33).to(dtype), torch.randn(9, 33).to(dtype)
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            got, alone = function(x, r), function(x)
        assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        tolerance = 1e-12 if dtype == torch.float64 else 3e-6
        torch.testing.assert_close(got.double(), exact(function, x, r), rtol=tolerance, atol=tolerance * 10)
        torch.testing.assert_close(alone.double(), exact(function, x, x), rtol=tolerance, atol=tolerance * 10)


@pytest.mark.parametrize("dim", [2, 64, 512])
def test_zero_distance_is_zero(dim):
    """torch.cdist and n_i + n_j - 2<x_i, x_j> in float32 are 1e-3 off here."""
    x = distances.unit(torch.randn(200, dim))
    x = torch.cat([x, x])  # every row has a duplicate
    d = distances.euclidean(x)
    assert bool((d.diagonal() == 0).all())
    assert bool((d.diagonal(200) == 0).all())
    assert bool((distances.squared_euclidean(x).diagonal() == 0).all())
    assert bool((distances.euclidean(x[:200], x[200:]).diagonal() == 0).all())


def test_near_duplicates_keep_their_digits():
    x = distances.unit(torch.randn(50, 128))
    for gap in (1e-1, 1e-2, 1e-3, 1e-4, 1e-5):
        y = x + gap * distances.unit(torch.randn(50, 128))
        expected = (x.double() - y.double()).norm(dim=1)
        got = distances.euclidean(x, y).diagonal().double()
        assert float(((got - expected) / expected).abs().max()) < (1e-6 if gap >= 1e-4 else 2e-5)


def test_gradient_at_and_near_zero():
    x = torch.randn(6, 8)
    x = torch.cat([x, x, x[:1] + 1e-4 * torch.randn(1, 8)]).requires_grad_()
    upstream = torch.randn(13, 13)
    distances.euclidean(x).backward(upstream)
    expected = torch.zeros(13, 8, dtype=torch.float64)
    rows = x.detach().double()
    for i in range(13):
        for j in range(13):
            difference = rows[i] - rows[j]
            if i != j and float(difference.norm()) > 0:  # duplicates pull nowhere
                pull = float(upstream[i, j]) * difference / difference.norm()
                expected[i] += pull
                expected[j] -= pull
    torch.testing.assert_close(x.grad.double(), expected, rtol=1e-5, atol=1e-5)


def test_unit_and_length_over_the_whole_range_of_floats():
    x = distances.unit(torch.randn(5, 7))
    for scale in (1e-30, 1e-20, 1.0, 1e10, 1e30):
        y = (x * scale).requires_grad_()
        u = distances.unit(y)
        torch.testing.assert_close(u, x if scale <= 1e12 else u.detach(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(u.norm(dim=1), torch.ones(5))
        u.sum().backward()
        assert bool(y.grad.isfinite().all())
        if scale <= 1e12:
            torch.testing.assert_close(distances.length(y.detach()), torch.full((5,), scale), rtol=1e-6, atol=0)
    zero = torch.zeros(2, 7, requires_grad=True)
    (distances.unit(zero).sum() + distances.length(zero).sum()).backward()
    assert bool((zero.grad == 0).all()) and bool((distances.unit(zero) == 0).all())


def test_relations_of_every_kind():
    labels = torch.tensor([3, 3, -1, 5])
    relation = relations.of(labels)
    t, f = True, False
    assert relation.positive.tolist() == [[f, t, f, f], [t, f, f, f], [f, f, f, f], [f, f, f, f]]
    assert relation.negative.tolist() == [[f, f, f, t], [f, f, f, t], [f, f, f, f], [t, t, f, f]]
    met = relations.of(labels, torch.zeros(2, 1), torch.tensor([5, -1]))
    assert met.positive.tolist() == [[f, f], [f, f], [f, f], [t, f]]
    assert met.negative.tolist() == [[t, f], [t, f], [f, f], [f, f]]
    rows = torch.tensor([[t, f, t], [f, t, t], [f, t, f], [f, f, f]])
    relation = relations.of(rows)
    assert relation.positive.tolist() == [[f, t, f, f], [t, f, t, f], [f, t, f, f], [f, f, f, f]]
    assert relation.negative.tolist() == [[f, f, t, t], [f, f, f, t], [t, f, f, t], [t, t, t, f]]
    relation = relations.of(relations.explicit(rows.new_ones(4, 4)))
    assert not bool(relation.positive.diagonal().any()) and not bool(relation.negative.any())
    assert bool(relations.of(rows.new_ones(4, 2), torch.zeros(2, 1)).positive.all())


def test_unsigned_labels_have_no_unknown():
    """-1 must not wrap around to 255."""
    relation = relations.of(torch.tensor([255, 255, 1], dtype=torch.uint8))
    assert bool(relation.positive[0, 1])


def test_label_distances():
    a, b = torch.randn(5, 3), torch.randn(4, 3)
    expected = (a.double()[:, None] - b.double()[None]).norm(dim=2)
    torch.testing.assert_close(relations.label_distances(a, b), expected)
    line = torch.tensor([1, 4, -2])
    assert relations.label_distances(line).tolist() == [[0, 3, 3], [3, 0, 6], [3, 6, 0]]
    label_distance = relations.LabelDistance(expected)
    assert relations.label_distances(label_distance) is expected


def test_masked_sums():
    values = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [1e4, -1e4, 0.0]], requires_grad=True)
    mask = torch.tensor([[True, False, True], [False, False, False], [False, True, True]])
    assert reduce.mean(values, mask).tolist() == [2, 0, -5000]
    lse = reduce.logsumexp(values, mask)
    assert lse[0].item() == pytest.approx(math.log(math.e + math.e**3))
    assert lse[1].item() == reduce.log_zero(values) and lse[2].item() == 0
    lse[[0, 2]].sum().backward()
    assert bool(values.grad.isfinite().all()) and values.grad[1].tolist() == [0, 0, 0]
    top, index = reduce.largest(values, mask)
    assert top.tolist() == [3, reduce.log_zero(values), 0] and index.tolist() == [2, 0, 2]
    _, index = reduce.largest(torch.tensor([[1.0, 2.0, 2.0]]), torch.ones(1, 3, dtype=torch.bool))
    assert index.item() == 1


def test_log_sum_exp_survives_what_it_leaves_out():
    values = torch.tensor([[1e30, 0.0, -1e30]], requires_grad=True)
    value = reduce.logsumexp(values, torch.tensor([[False, True, True]]))
    value.sum().backward()
    assert value.item() == 0 and values.grad.tolist() == [[0, 1, 0]]


def test_softplus_is_exact():
    x = torch.linspace(-60, 60, 241, dtype=torch.float64)
    expected = [math.log1p(math.exp(v)) if v < 0 else v + math.log1p(math.exp(-v)) for v in x.tolist()]
    torch.testing.assert_close(reduce.softplus(x), torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=0)


def test_reductions():
    values = torch.tensor([[1.0, 0.0, 5.0], [2.0, -1.0, 7.0]])
    mask = torch.tensor([[True, True, False], [True, True, False]])
    expected = {"mean": 0.5, "active": 1.5, "sum": 2.0}
    for name, value in expected.items():
        assert reduce.terms(values, mask, name).item() == value
    assert reduce.terms(values, mask, "none").tolist() == [1, 1]
    nobody = torch.zeros_like(mask)
    for name in reduce.REDUCTIONS:
        x = values.clone().requires_grad_()
        value = reduce.terms(x, nobody, name).sum()
        value.backward()  # no signal is 0, on the graph
        assert value.item() == 0 and bool((x.grad == 0).all())
    assert math.isnan(reduce.terms(torch.tensor([1.0, math.nan]), torch.tensor([True, True]), "active").item())


def test_strict_is_a_switch_and_a_block():
    checks = nearkin.core.checks
    strict = checks._strict.get
    with nearkin.strict():
        assert strict()
        with nearkin.strict(False):
            assert not strict()
        assert strict()
    assert not strict()
    nearkin.strict()
    assert strict()
    nearkin.strict(False)
    assert not strict()


def test_strict_is_of_one_thread():
    x, labels = torch.tensor([[math.nan, 1.0], [1.0, 2.0]]), torch.tensor([0, 0])
    with nearkin.strict(), ThreadPoolExecutor(1) as pool:
        assert pool.submit(nearkin.losses.contrastive_loss, x, labels).result().isnan()
        with pytest.raises(ValueError, match="embeddings must be finite"):
            nearkin.losses.contrastive_loss(x, labels)
        with pytest.raises(ValueError, match="embeddings must be finite"):
            pool.submit(lambda: nearkin.strict() and nearkin.losses.contrastive_loss(x, labels)).result()
    assert nearkin.losses.contrastive_loss(x, labels).isnan()


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e13, 1e30, 3e38])
def test_a_unit_row_keeps_its_direction_whatever_its_length(kind, size):
    x = (torch.randn(8, 4, dtype=torch.float64).clamp(-1, 1) * size).to(kind).requires_grad_()
    wanted = x.detach().double() / x.detach().double().norm(dim=1, keepdim=True)
    rows = distances.unit(x)
    assert float((rows.detach().double() - wanted).abs().max()) < 1e-6
    rows.sum().backward()
    assert bool(x.grad.isfinite().all())
