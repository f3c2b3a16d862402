"""`max_positives`: the same loss with a triplet per positive as with one per column, where no value may be read."""

import pytest
import torch

from nearkin import losses, mining
from nearkin.core import checks, distances

LABELS = torch.arange(48) // 4


def value_and_gradient(loss, *references):
    torch.manual_seed(1)
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    value = loss(x, LABELS, *references)
    return value.detach(), torch.autograd.grad(value, x)[0]


@pytest.fixture
def unread(monkeypatch):
    """As on a device whose values are not read."""
    monkeypatch.setattr(distances, "freely_read", lambda tensor: False)
    monkeypatch.setattr(checks, "reads_values", lambda tensor: False)


@pytest.mark.parametrize("selection", mining.PER_POSITIVE)
@pytest.mark.parametrize("make", [losses.TripletLoss, losses.QuadrupletLoss, losses.MarginLoss])
def test_equals_the_loss_without(make, selection, unread):
    value, gradient = value_and_gradient(make(selection=selection))
    bounded, bounded_gradient = value_and_gradient(make(selection=selection, max_positives=3))
    torch.testing.assert_close(bounded, value)
    torch.testing.assert_close(bounded_gradient, gradient, rtol=1e-5, atol=1e-7)


def test_against_references_all_of_a_class_count(unread):
    others = torch.randn(48, 8, generator=torch.Generator().manual_seed(2)), LABELS
    value, _ = value_and_gradient(losses.TripletLoss(), *others)
    assert value_and_gradient(losses.TripletLoss(max_positives=4), *others)[0] == value
    assert value_and_gradient(losses.TripletLoss(max_positives=3), *others)[0].isnan()


def test_more_positives_are_nan_where_unread(unread):
    assert value_and_gradient(losses.TripletLoss(max_positives=2))[0].isnan()


def test_sentences():
    with pytest.raises(ValueError, match="max_positives must be at least the most positives of an anchor: 3, got 2"):
        value_and_gradient(losses.TripletLoss(max_positives=2))
    with pytest.raises(ValueError, match="max_positives must be left out unless selection is one of"):
        losses.TripletLoss(selection="batch_hard", max_positives=3)
    with pytest.raises(TypeError, match="unless labels are class ids"):
        losses.TripletLoss(max_positives=3)(torch.randn(6, 4), torch.rand(6, 5) > 0.5)
