"""A loss summed over levels: its settings, its state, and what it refuses; its numbers: `loss_checks/around.py`."""

import re

import pytest
import torch

import cases
from nearkin import losses
from nearkin.losses import HierarchyLoss
from nearkin.memory import CrossBatchMemory

DIM, FINE, COARSE = cases.DIM, cases.CLASSES, 2
CASES = {case.name: case for case in cases.LOSSES}
WEIGHTS = (1.0, 0.3)


def batch(dtype=torch.float64):
    """Items, and their labels at two levels: fine classes 0 and 2 are coarse class 0."""
    x, fine = CASES["SupConLoss"].batch(dtype)
    return x, torch.stack([fine, fine % COARSE], 1)


def levels_of(name):
    """The loss of each level, with the classes of its level."""
    torch.manual_seed(3)
    return [getattr(losses, name)(classes, DIM).double() for classes in (FINE, COARSE)]


def test_one_loss_serves_all_levels_if_it_keeps_nothing():
    x, labels = batch()
    one, two = losses.SupConLoss(), HierarchyLoss([losses.SupConLoss(), losses.SupConLoss()], WEIGHTS)
    assert torch.equal(HierarchyLoss(one, WEIGHTS)(x, labels), two(x, labels))
    for loss in (losses.MarginLoss(), losses.ArcFaceLoss(FINE, DIM), CrossBatchMemory(one, 8, DIM)):
        with pytest.raises(ValueError, match=f"losses must be one {type(loss).__name__} per level"):
            HierarchyLoss(loss, WEIGHTS)


def test_a_memory_per_level_is_the_sum_of_two_memories():
    memories = [CrossBatchMemory(losses.SupConLoss(), 16, DIM).double() for _ in range(4)]
    loss = HierarchyLoss(memories[:2], WEIGHTS)
    for step in range(3):
        x, labels = batch()
        x = x + 0.1 * step
        parts = [memories[2 + level](x, labels[:, level]) for level in range(2)]
        torch.testing.assert_close(loss(x, labels), WEIGHTS[0] * parts[0] + WEIGHTS[1] * parts[1])


def test_unknown_coarse_classes_take_no_part():
    x, labels = batch()
    loss, known = HierarchyLoss(losses.SupConLoss(), WEIGHTS), labels.clone()
    known[:, 1] = -1
    torch.testing.assert_close(loss(x, known), losses.SupConLoss()(x, labels[:, 0]))


def test_state_travels_and_the_parameters_are_those_of_the_losses():
    modules = levels_of("ArcFaceLoss")
    loss, other = HierarchyLoss(modules, WEIGHTS), HierarchyLoss(levels_of("ArcFaceLoss"), WEIGHTS)
    with torch.no_grad():
        next(other.parameters()).zero_()
    other.load_state_dict(loss.state_dict())
    x, labels = batch()
    assert torch.equal(other(x, labels), loss(x, labels))
    assert [tuple(p.shape) for p in loss.parameters()] == [(FINE, DIM), (COARSE, DIM)]
    assert loss.lr_scale == modules[0].lr_scale and HierarchyLoss(losses.SupConLoss(), WEIGHTS).lr_scale == 1.0


def test_compiled_it_is_the_same():
    modules = levels_of("ArcFaceLoss")
    loss = HierarchyLoss(modules, WEIGHTS)
    x, labels = batch()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    values = []
    for function in (loss, compiled):
        leaf = x.clone().requires_grad_()
        value = function(leaf, labels)
        value.backward()
        values.append((value.detach(), leaf.grad))
    torch.testing.assert_close(values[1], values[0])


def test_weights_are_a_setting():
    loss = HierarchyLoss(losses.SupConLoss(), WEIGHTS)
    x, labels = batch()
    before = loss(x, labels)
    loss.weights = (2.0, 0.6)
    torch.testing.assert_close(loss(x, labels), 2 * before)
    with pytest.raises(ValueError, match="weights must be one per level: 2 levels, 3 weights"):
        loss.weights = (1, 1, 1)
    assert "(2.0, 0.6)" in repr(loss)


@pytest.mark.parametrize(
    "make, error, sentence",
    [
        (lambda: HierarchyLoss(losses.SupConLoss(), (1.0,)), ValueError, "weights must be at least 2, one per level"),
        (lambda: HierarchyLoss(losses.SupConLoss(), (1.0, 0)), ValueError, "weights must be > 0, got 0"),
        (lambda: HierarchyLoss(losses.SupConLoss(), (1.0, float("nan"))), ValueError, "weights must be finite"),
        (lambda: HierarchyLoss(losses.SupConLoss(), ("a", 1)), TypeError, "weights must be a number, got 'a'"),
        (lambda: HierarchyLoss(losses.SupConLoss(), 1.0), TypeError, "weights must be a list of numbers"),
        (lambda: HierarchyLoss([losses.SupConLoss()], (1, 1)), ValueError, "one per weight: 2 weights, 1 losses"),
        (lambda: HierarchyLoss(["supcon", "supcon"], (1, 1)), TypeError, "losses must be torch modules, got str"),
    ],
)
def test_bad_settings_are_one_sentence(make, error, sentence):
    with pytest.raises(error, match=re.escape(sentence)):
        make()


@pytest.mark.parametrize(
    "labels, error, sentence",
    [
        (torch.zeros(12, dtype=torch.long), ValueError, "labels must have shape (rows, 2), one column per level"),
        (torch.zeros(12, 3, dtype=torch.long), ValueError, "labels must have shape (rows, 2)"),
        (torch.zeros(12, 2), TypeError, "labels must be integer class ids"),
        (torch.zeros(5, 2, dtype=torch.long), ValueError, "labels must have one entry per row of embeddings"),
        ([[0, 1]] * 12, TypeError, "labels must be a torch tensor of class ids (rows, 2), got list"),
    ],
)
def test_bad_labels_are_one_sentence(labels, error, sentence):
    with pytest.raises(error, match=re.escape(sentence)):
        HierarchyLoss(losses.SupConLoss(), WEIGHTS)(batch()[0], labels)


def test_references_need_a_loss_that_takes_them():
    modules = levels_of("ArcFaceLoss")
    x, labels = batch()
    with pytest.raises(TypeError, match="loss must take references"):
        HierarchyLoss(modules, WEIGHTS)(x, labels, x.clone(), labels)
    with pytest.raises(ValueError, match=r"labels must be in 0\.\.1"):
        HierarchyLoss(modules, WEIGHTS)(x, labels.flip(1))


def test_memories_take_another_view_as_their_references():
    x, labels = torch.randn(6, 4), torch.stack([torch.arange(6) // 2, torch.arange(6) // 3], 1)
    view = x + 0.1
    loss = HierarchyLoss([CrossBatchMemory(losses.SupConLoss(), 8, 4) for _ in range(2)], (1.0, 0.3))
    single = [CrossBatchMemory(losses.SupConLoss(), 8, 4) for _ in range(2)]
    wanted = single[0](x, labels[:, 0], view) + 0.3 * single[1](x, labels[:, 1], view)
    assert torch.allclose(loss(x, labels, view), wanted)
