"""Facility location on a GPU: the host finds the medoids, from the distances made there; a CUDA graph is refused."""

import pytest
import torch

from nearkin import losses

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_loss_and_gradient_are_those_of_the_cpu(dtype):
    g = torch.Generator().manual_seed(5)
    x, labels = torch.randn(60, 8, generator=g).to(dtype), torch.randint(-1, 9, (60,), generator=g)
    outcomes = []
    for device in ("cpu", "cuda"):
        inputs = x.clone().to(device).requires_grad_()
        loss = losses.FacilityLocationLoss(gamma=3.0).to(device)
        value = loss(inputs, labels.to(device))
        (1.7 * value).backward()
        assert loss.medoids.device == loss.assignment.device == inputs.device
        outcomes.append([t.detach().double().cpu() for t in (value, inputs.grad, loss.medoids, loss.assignment)])
    for ours, theirs in zip(*outcomes, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def test_a_module_that_was_not_moved_serves_a_batch_on_the_gpu():
    x, labels = torch.randn(40, 8, device="cuda", requires_grad=True), torch.arange(40, device="cuda") // 4
    value = losses.FacilityLocationLoss(gamma=3.0)(x, labels)
    value.backward()
    assert torch.equal(value, losses.FacilityLocationLoss(gamma=3.0).cuda()(x, labels))


def test_a_graph_cannot_capture_the_search():
    x, labels = torch.randn(40, 8, device="cuda"), torch.arange(40, device="cuda") // 4
    loss = losses.FacilityLocationLoss().cuda()
    loss(x, labels)
    torch.cuda.synchronize()
    refused = pytest.raises(RuntimeError, match="searches on the host, so a CUDA graph cannot capture it")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        loss(x, labels)
    assert bool(loss(x, labels).isfinite())
