"""The kernels of Proxy-Anchor, SoftTriple and softmax + center on a GPU, against the plain losses in float64."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

import test_class_matrix_kernels as judge

from nearkin import kernels, losses
from nearkin.kernels import class_dense_ops

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and kernels.installed()), reason="no CUDA device or no triton on this machine"
)
MAIN = ("anchor", "triple", "center")
# form, shape, and whether the kernels multiply; few cases, since each is compiled
CASES = [(form, shape, False) for form in MAIN for shape in [(128, 1001, 128), (300, 3000, 520), (4100, 70, 32)]]
CASES += [(form, shape, True) for form in MAIN for shape in [(1, 1, 3), (2050, 10, 128)]]
CASES += [(form, (130, 40, 64), "," in form) for form in judge.FORMS]


@pytest.fixture(scope="module")
def served():
    before = [module._Loss.apply for module in judge.OPS]
    yield judge.count_served()
    for module, apply in zip(judge.OPS, before, strict=True):
        module._Loss.apply = apply


@pytest.mark.parametrize(("form", "shape", "few"), CASES, ids=str)
def test_as_exact_as_the_plain_loss(form, shape, few, served, monkeypatch):
    if not few:
        monkeypatch.setattr(class_dense_ops, "FEW_WEIGHTS", 0)
    seeds = 3 if shape[0] <= 5 else 1
    served.clear()
    got, plain = judge.compared(form, shape, seeds, "cuda", "auto")
    assert len(served) == seeds
    for ours, theirs in zip(got, plain, strict=True):
        assert ours <= theirs + 1e-6, (got, plain)


@pytest.mark.parametrize("kind", judge.HALVES, ids=str)
@pytest.mark.parametrize("form", ["anchor", "triple", "center"])
def test_half_precision(form, kind, served):
    got, plain = judge.compared(form, (130, 40, 64), 1, "cuda", "auto", kind)
    for ours, theirs in zip(got, plain, strict=True):
        assert ours <= theirs + 1e-6, (got, plain)


@pytest.mark.parametrize("form", ["anchor", "triple, sum", "center"])
def test_edges(form, served):
    sound = judge.edges(form, served, "cuda", "auto")
    assert not [name for name, fact in sound.items() if not fact]


def test_centers_and_memory(served):
    sound = judge.center_facts(served, "cuda", "auto")
    assert not [name for name, fact in sound.items() if not fact]


@pytest.mark.parametrize("make", [losses.ProxyAnchorLoss, losses.SoftTripleLoss, losses.CenterLoss])
def test_the_same_twice(make):
    """No sum depends on the order in which programs run."""
    x, labels = torch.randn(515, 96, device="cuda"), torch.randint(700, (515,), device="cuda")
    torch.manual_seed(1)
    loss, results = make(700, 96).cuda(), []
    start = [buffer.clone() for buffer in loss.buffers()]
    for _ in range(2):
        for name, buffer in zip(dict(loss.named_buffers()), start, strict=True):
            setattr(loss, name, buffer.clone())
        y = x.clone().requires_grad_()
        loss.zero_grad()
        value = loss(y, labels)
        value.backward()
        results.append([value.detach(), y.grad, *(p.grad.clone() for p in loss.parameters()), *loss.buffers()])
    assert all(map(torch.equal, *results))


def test_soft_triple_of_ten_thousand_classes():
    loss = losses.SoftTripleLoss(10_000, 128).cuda()
    x = torch.randn(256, 128, device="cuda", requires_grad=True)
    loss(x, torch.randint(10_000, (256,), device="cuda")).backward()
    assert bool(x.grad.any()) and bool(loss.centers.grad.isfinite().all())
