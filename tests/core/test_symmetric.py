"""A set with itself: symmetric to the bit on every machine, here with products that are not."""

import pytest
import torch
from test_facility import batch, chosen

import reference
from nearkin import losses
from nearkin.core import devices, distances

MEASURES = {
    "euclidean": distances.euclidean,
    "euclidean of unit rows": lambda *sets: distances.euclidean(*sets, normalize=True),
    "squared": distances.squared_euclidean,
    "squared of unit rows": lambda *sets: distances.squared_euclidean(*sets, normalize=True),
    "cosine": distances.cosine,
    "dot": distances.dot,
}

EXACT = {seed: batch(seed) for seed in (*range(0, 40, 2), 39, 153, 161)}  # of products as this machine makes them


@pytest.fixture(params=range(3))
def rough(request, monkeypatch):
    """Products that are rounded in each place as it comes, as some machines do."""
    g = torch.Generator().manual_seed(request.param)
    add, multiply = torch.Tensor.addmm_, torch.Tensor.__matmul__

    def shaken(exact):
        noise = torch.randint(-1, 2, exact.shape, generator=g).to(exact.dtype)
        return exact * (1 + noise * torch.finfo(exact.dtype).eps)

    monkeypatch.setattr(torch.Tensor, "addmm_", lambda *rows, **how: shaken(add(*rows, **how)))
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: shaken(multiply(a, b)))
    return shaken


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MEASURES)
def test_a_set_with_itself_is_symmetric_to_the_bit(name, dtype, rough):
    x = torch.randn(21, 6, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[3] = x[17]
    across = MEASURES[name](x, x.clone())
    matrix = MEASURES[name](x)
    assert torch.equal(matrix, matrix.T)
    torch.testing.assert_close(matrix, across, rtol=1e-6, atol=1e-6)
    if name not in ("cosine", "dot"):
        assert not matrix.diagonal().any() and matrix[3, 17] == 0
    if dtype == torch.float64:
        assert not torch.equal(across, across.T)  # so the product is rough


def test_distances_by_differences_of_near_pairs_are_symmetric(rough, monkeypatch):
    """As on a device without fast float64."""
    monkeypatch.setattr(devices, "has_float64_units", lambda tensor: False)
    square = torch.Tensor.square
    monkeypatch.setattr(torch.Tensor, "square", lambda x: rough(square(x)))
    x = torch.randn(12, 5, generator=torch.Generator().manual_seed(2))
    x = torch.cat([x, x + 1e-4 * x.roll(1, 0)])
    matrix = distances.euclidean(x)
    assert torch.equal(matrix, matrix.T) and not matrix.diagonal().any()
    across = distances.euclidean(x, x.clone())
    assert not torch.equal(across, across.T)  # so the squares are rough


@pytest.mark.parametrize("name", MEASURES)
def test_a_compiler_sees_the_same(name, monkeypatch):
    x = torch.randn(9, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    results = []
    for compiling in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda compiling=compiling: compiling)
        own = x.clone().requires_grad_()
        matrix = MEASURES[name](own)
        (slope,) = torch.autograd.grad((matrix * torch.arange(81.0).view(9, 9)).sum(), own)
        results.append((matrix, slope))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_products_with_oneself_have_gradients():
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64).requires_grad_()
    weight = torch.arange(25.0, dtype=torch.float64).view(5, 5)
    for measure in (distances.dot, distances.cosine):
        assert torch.autograd.gradcheck(lambda a, f=measure: (f(a) * weight).square(), x)
        assert torch.autograd.gradgradcheck(lambda a, f=measure: (f(a) * weight).square(), x)


@pytest.mark.parametrize("gamma", [0.0, 1.0])
def test_equal_medoids_are_chosen_by_the_lowest_index(gamma, rough):
    """Whatever the rounding of distances: by the loss from rough products, and of a matrix that is not symmetric."""
    g = torch.Generator().manual_seed(5)
    for seed, (d, labels) in EXACT.items():
        wanted = reference.facility_search(d.tolist(), labels, gamma, 2, 1e-9)
        noise = 1 + 1e-14 * torch.randn(d.shape, generator=g, dtype=torch.float64)
        for given in (batch(seed)[0], d * noise):
            assert chosen(losses.facility_location(given, labels, gamma=gamma, sweeps=2)) == wanted, seed


def test_the_true_medoid_is_the_first_of_equals(rough):
    """So the gradient goes to the same items on every machine: here the corners of a square."""
    x = torch.tensor([[1.0, 0.1], [0.1, 1.0], [-1.0, 0.1], [0.1, -1.0], [5.0, 5.0], [5.1, 5.2]], dtype=torch.float64)
    x = torch.cat([x, x + 7])
    labels = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 0, 1])
    slopes = []
    for _ in range(4):
        own = x.clone().requires_grad_()
        losses.facility_location_loss(own, labels, gamma=100.0, normalize=False).backward()
        slopes.append(own.grad)
    for slope in slopes[1:]:
        torch.testing.assert_close(slope, slopes[0], rtol=0, atol=1e-9)
