"""On an accelerator: losses and selections equal the CPU, and none makes the host wait. Skipped where there is none."""

import pytest
import torch

import nearkin
from cases import CLASSES, DIM, LOSSES, SELECTIONS
from nearkin import mining
from nearkin.core import distances, relations

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")


@pytest.fixture
def no_waiting():
    """torch raises whenever an operation would make the host wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def step(module, x, labels):
    x = x.detach().requires_grad_()
    value = module(x, labels)
    value.backward()
    return value.detach(), x.grad


@pytest.mark.parametrize("case", LOSSES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_losses_equal_the_cpu_without_waiting(case, dtype, no_waiting):
    torch.cuda.set_sync_debug_mode("default")
    x, labels = case.batch(dtype)
    expected = step(case.build(torch.float32), x, labels)
    module, on_device, labels = case.build(torch.float32).cuda(), x.cuda(), labels.cuda()
    step(case.build(torch.float32).cuda(), on_device, labels)  # libraries load on the first call
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode(
        "default" if case.name == "FacilityLocationLoss" else "error"
    )  # it says that it waits
    value, gradient = step(module, on_device, labels)
    torch.cuda.set_sync_debug_mode("default")
    assert value.dtype == torch.float32
    torch.testing.assert_close(value.cpu(), expected[0], rtol=1e-4, atol=1e-5)
    loose = {torch.float32: 1e-4}.get(dtype, 2e-2)
    torch.testing.assert_close(gradient.cpu(), expected[1], rtol=loose, atol=loose * float(expected[1].abs().max()))


@pytest.mark.parametrize("case", [c for c in LOSSES if not c.pairs or "classes" in c.name], ids=str)
def test_a_bad_label_is_nan_there_and_an_error_when_strict(case):
    if "Facility" in case.name or "dynamic" in case.name:
        pytest.skip("any id is a class here")
    x, labels = case.batch(torch.float32)
    labels = torch.where(torch.arange(len(labels)) == 1, CLASSES + 3, labels).cuda()
    assert bool(case.build(torch.float32).cuda()(x.cuda(), labels).isnan())
    with nearkin.strict(), pytest.raises(ValueError, match="labels must be in"):
        case.build(torch.float32).cuda()(x.cuda(), labels)


@pytest.mark.parametrize("case", LOSSES, ids=str)
def test_strict_changes_no_value(case):
    x, labels = (t.cuda() for t in case.batch(torch.float32))
    outcomes = []
    for on in (False, True):
        with nearkin.strict(on):
            outcomes.append(step(case.build(torch.float32).cuda(), x, labels))
    assert all(map(torch.equal, *outcomes))


@pytest.mark.parametrize("name", SELECTIONS)
def test_selections_equal_the_cpu_without_waiting(name, no_waiting):
    torch.cuda.set_sync_debug_mode("default")
    x, labels = distances.unit(torch.randn(96, DIM)), torch.arange(96) % 8
    d, relation = distances.euclidean(x), relations.of(labels)
    on_device, relation_there = d.cuda(), relations.of(labels.cuda())
    mining.select(name, on_device, relation_there, dim=DIM)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    got = mining.select(name, on_device, relation_there, dim=DIM)
    torch.cuda.set_sync_debug_mode("default")
    if name not in mining.DRAWN:  # these draw from another generator there
        expected = mining.select(name, d, relation, dim=DIM)
        if isinstance(got, mining.Triplets):  # listed in fewer slots where reading is free
            assert isinstance(expected, mining.Triplets)
            got_rows, wanted_rows = (torch.stack(t.indices()).cpu() for t in (got, expected))
            assert torch.equal(got_rows, wanted_rows)
        else:
            assert all(torch.equal(a.cpu(), b) for a, b in zip(got, expected, strict=True))
    if isinstance(got, mining.Triplets):
        anchor, positive, negative = (t.cpu() for t in got.indices())
        assert bool(relation.positive[anchor, positive].all()) and bool(relation.negative[anchor, negative].all())
        assert len(anchor) > 0
