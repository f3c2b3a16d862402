"""The fitted projection: distances of what the items span are kept, and the rest is random but fair."""

import pytest
import torch

from nearkin import models
from nearkin.models import projection
from nearkin.models.projection import FLOOR, POWER, fit_projection, principal_directions


def spread(rows, width, rank, seed=0, shift=3.0):
    """Features (rows, width) that fill `rank` directions around a mean."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.randn(rank, width, generator=generator, dtype=torch.float64)
    return torch.randn(rows, rank, generator=generator, dtype=torch.float64) @ basis + shift


def test_the_leading_directions_are_those_of_the_covariance():
    x = spread(200, 12, 12) * torch.linspace(3, 0.1, 12)
    weight, bias = principal_directions(x, 5)
    variances = torch.linalg.svdvals(x - x.mean(0))[:5] ** 2 / len(x)
    floored = variances + FLOOR * variances.mean()
    scales = (floored[0] / floored) ** POWER
    assert scales[0] == 1 and scales[4] > 1.2
    assert torch.allclose(weight @ weight.T, torch.diag(scales**2), atol=1e-9)
    projected = x @ weight.T + bias
    assert torch.allclose(projected.mean(0), torch.zeros(5, dtype=torch.float64), atol=1e-10)
    # Each explains as much as it can.
    assert torch.allclose(projected.square().mean(0).sqrt(), variances.sqrt() * scales, rtol=1e-8)
    largest = weight[torch.arange(5), weight.abs().argmax(1)]
    assert (largest > 0).all()


def test_distances_are_kept_where_the_directions_suffice(monkeypatch):
    monkeypatch.setattr(projection, "POWER", 0.0)
    x = spread(50, 40, 6)
    weight, bias = principal_directions(x, 6)
    before, after = ((rows[:, None] - rows[None]).norm(dim=2) for rows in (x, x @ weight.T))
    assert torch.allclose(before, after, atol=1e-8)
    assert weight.shape == (6, 40) and bias.shape == (6,)


@pytest.mark.parametrize("rows, dim", [(5, 16), (2, 8), (40, 16)])
def test_few_items_leave_random_directions(rows, dim, monkeypatch):
    monkeypatch.setattr(projection, "POWER", 0.0)
    x = spread(rows, 64, 8)
    weight, _ = principal_directions(x, dim, seed=3)
    rank = min(rows // 2, 8, dim)
    assert weight.shape == (dim, 64)
    gram = weight @ weight.T
    expected = torch.diag(torch.cat([torch.ones(rank), torch.full((dim - rank,), (64 - rank) / (dim - rank))]))
    assert torch.allclose(gram, expected.double(), atol=1e-9)
    assert torch.equal(weight, principal_directions(x, dim, seed=3)[0])
    assert not torch.equal(weight, principal_directions(x, dim, seed=4)[0])


def test_more_dimensions_than_features():
    assert principal_directions(spread(50, 8, 8), 20)[0].shape == (8, 8)


def test_identical_items_give_a_finite_projection():
    weight, bias = principal_directions(torch.ones(6, 16), 4)
    assert weight.isfinite().all() and bias.isfinite().all() and weight.shape == (4, 16)


@pytest.mark.parametrize(
    "features, dim, sentence",
    [
        (torch.ones(1, 4), 2, r"features must have shape \(items, features\) with at least 2 items, got \(1, 4\)"),
        (torch.ones(4), 2, r"features must have shape"),
        (torch.tensor([[1.0, float("nan")], [0.0, 1.0]]), 2, "features"),
        (torch.ones(4, 4), 0, "dim must be"),
    ],
)
def test_what_cannot_be_fitted_is_refused(features, dim, sentence):
    with pytest.raises(ValueError, match=sentence):
        principal_directions(features, dim)


def test_a_fitted_head_ranks_as_the_features_do(monkeypatch):
    monkeypatch.setattr(projection, "POWER", 0.0)
    encoder = models.build("efficientnet-lite0", dim=35, size=32, pretrained=False).eval()
    pictures = torch.rand(24, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        features = encoder.features(pictures)
        fit_projection(encoder, features.repeat(3, 1))  # so that they show as many directions as they span
        centred = torch.nn.functional.normalize(features - features.mean(0), dim=1)
        rows = encoder(pictures)
    assert torch.allclose(rows @ rows.T, centred @ centred.T, atol=1e-4)


@pytest.mark.parametrize("layer_norm", [False, True, "plain"])
def test_free_lengths_stay_as_long_as_with_a_random_head(layer_norm):
    encoder = models.build("mlp", features=20, hidden=(24,), dim=8, normalize=False, layer_norm=layer_norm).eval()
    x = torch.randn(100, 20, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before = encoder(x).square().sum(1).mean()
        fit_projection(encoder, encoder.features(x))
        after = encoder(x).square().sum(1).mean()
    assert torch.allclose(before, after, rtol=1e-4)


def test_without_a_projection_there_is_nothing_to_fit():
    encoder = models.build("mlp", features=20, dim=0)
    with pytest.raises(ValueError, match="no projection to fit"):
        fit_projection(encoder, torch.randn(5, 512))
