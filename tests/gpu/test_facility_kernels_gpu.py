"""Facility location's kernel on a GPU: the medoids are those that the CPU finds from the same distances."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))

import test_facility as judge

from nearkin import kernels, losses
from nearkin.kernels import facility_ops as fused

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and kernels.installed()), reason="no CUDA device or no triton on this machine"
)


def assert_same(distance, labels, **settings):
    plain = losses.facility_location(distance, labels, impl="torch", **settings)
    ours = losses.facility_location(distance.cuda(), labels.cuda(), **settings)
    assert torch.equal(ours.chosen.cpu(), plain.chosen)
    assert torch.equal(ours.assignment.cpu(), plain.assignment)
    assert torch.allclose(ours.score.cpu(), plain.score) and torch.allclose(ours.disagreement.cpu(), plain.disagreement)


@pytest.mark.parametrize("size", [1, 13])
def test_small_batches_with_ties_and_unknown_labels(size):
    for seed in range(12):
        distance, labels = judge.batch(seed, size)
        for settings in ({"gamma": float(seed % 3)}, {"sweeps": 0}, {"num_clusters": 2, "gamma": 4.0}):
            assert_same(distance, labels, **settings)


@pytest.mark.parametrize("size", [60, 256])
@pytest.mark.parametrize("name", judge.STRUCTURED)
def test_structured_batches(name, size):
    for gamma in (0.0, 1.0, 20.0):
        assert_same(*judge.structured(name, size), gamma=gamma)


def test_the_largest_batch_that_is_served():
    labels = torch.arange(fused.LARGEST) % 2
    distance = judge.distances.euclidean(torch.randn(fused.LARGEST, 8, generator=torch.Generator().manual_seed(0)))
    assert_same(distance, labels, sweeps=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_loss_and_gradient_are_those_of_the_cpu(dtype):
    g = torch.Generator().manual_seed(5)
    x, labels = torch.randn(60, 8, generator=g).to(dtype), torch.randint(-1, 9, (60,), generator=g)
    outcomes = []
    for device in ("cpu", "cuda"):
        inputs = x.clone().to(device).requires_grad_()
        loss = losses.FacilityLocationLoss(gamma=3.0).to(device)(inputs, labels.to(device))
        (1.7 * loss).backward()
        outcomes.append([t.detach().double().cpu() for t in (loss, inputs.grad)])
    for ours, theirs in zip(*outcomes, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def test_a_module_that_was_not_moved_serves_a_batch_on_the_gpu():
    x, labels = torch.randn(40, 8, device="cuda", requires_grad=True), torch.arange(40, device="cuda") // 4
    value = losses.FacilityLocationLoss(gamma=3.0)(x, labels)
    value.backward()
    assert torch.equal(value, losses.FacilityLocationLoss(gamma=3.0).cuda()(x, labels))


def test_a_captured_graph_replays_the_search():
    size = 60
    distance, labels = (t.cuda() for t in judge.structured("classes of 4", size))
    losses.facility_location(distance, labels)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = losses.facility_location(distance, labels)
    for name in ("classes of 4", "no structure"):
        other, _ = judge.structured(name, size)
        distance.copy_(other)
        labels.copy_(judge.structured("classes of 4", size)[1])
        graph.replay()
        plain = losses.facility_location(other, labels.cpu(), impl="torch")
        assert torch.equal(result.chosen.cpu(), plain.chosen)
