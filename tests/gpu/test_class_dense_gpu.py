"""Losses over class weights with all scores in memory, by kernels on a GPU: errors by float64 beside plain torch's."""

import pytest
import torch

from class_cases import CLASS_CASES, batch, counted, errors, judged, outcome, without_kernels
from nearkin import losses
from nearkin.kernels import class_dense_ops

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
F32, BF16, F16, MIXED = ("float32",) * 2, ("bfloat16",) * 2, ("float16",) * 2, ("bfloat16", "float32")


@pytest.mark.parametrize("name", CLASS_CASES)
def test_errors_are_those_of_plain_torch(name):
    for place, shape in enumerate([(300, 5000, 128), (63, 1037, 72), (1, 1, 4), (2048, 100, 128)]):
        if "adacos" in name and shape[1] < 3:
            continue
        case = judged(name, shape, F32, ("mean", "active", "sum")[place % 3], "cuda")
        assert case["served"] == 1
        for ours, theirs in zip(case["kernel"], case["torch"], strict=True):
            assert ours <= theirs + 1e-6, (shape, case)


@pytest.mark.parametrize("kinds", [BF16, F16, MIXED], ids=str)
@pytest.mark.parametrize("name", ["cosface", "arcface, 3 centres", "sphereface", "heated"])
def test_half_precision(name, kinds):
    case = judged(name, (257, 700, 600), kinds, "mean", "cuda")
    assert case["served"] == 1
    for ours, theirs in zip(case["kernel"], case["torch"], strict=True):
        assert ours <= theirs + 1e-6, case


@pytest.mark.parametrize("name", ["cosface", "arcface, 3 centres", "proxy-nca, original"])
def test_it_is_the_same_twice(name):
    centers = CLASS_CASES[name].centers
    arguments = tuple(t.cuda() for t in batch((1000, 3000, 96), centers, dtype=torch.float32))
    runs = [outcome(CLASS_CASES[name], arguments, "mean") for _ in range(3)]
    assert all(map(torch.equal, runs[0], runs[1])) and all(map(torch.equal, runs[0], runs[2]))


def test_auto_takes_them_unless_memory_is_short():
    x, labels, weight, bias = (t.cuda() for t in batch((128, 1000, 64), dtype=torch.float32))
    with counted() as served:
        for case in CLASS_CASES.values():
            if case.centers == 1:
                outcome(case, (x, labels, weight, bias), "mean")
        assert len(served) == sum(case.centers == 1 for case in CLASS_CASES.values())
        served.clear()
        losses.cosface_loss(x, labels, weight, max_memory=2**18)
        losses.cosface_loss(x, labels, weight, reduction="none")
        losses.cosface_loss(x, labels, weight, impl="torch")
        assert not served


def test_memory_stays_within_the_bound():
    x, labels, weight, _ = (t.cuda() for t in batch((512, 20_000, 64), dtype=torch.float32))
    x, weight = x.requires_grad_(), weight.requires_grad_()
    needed = 4 * 512 * 20_000 + (12 * 64 + 64) * 20_600
    assert class_dense_ops.fits(x, weight, needed)
    losses.cosface_loss(x, labels, weight, max_memory=needed).backward()
    x.grad = weight.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    losses.cosface_loss(x, labels, weight, max_memory=needed).backward()
    assert torch.cuda.max_memory_allocated() - before <= needed


def test_adacos_adapts_as_plain_torch_does():
    torch.manual_seed(0)
    ours, twin = (losses.AdaCosLoss(500, 64).cuda() for _ in range(2))
    twin.load_state_dict(ours.state_dict())
    for size in (1001, 64, 1):
        x = torch.randn(size, 64, device="cuda", requires_grad=True)
        labels = torch.randint(-1, 500, (size,), device="cuda")
        labels[0] = 3
        with counted() as served:
            value = ours(x, labels)
        assert len(served) == 1
        with without_kernels():
            expected = twin(x, labels)
        torch.testing.assert_close(ours.scale, twin.scale, rtol=1e-5, atol=0)
        (got,), (exact,) = (torch.autograd.grad(v, x) for v in (value, expected))
        assert errors([value.detach(), got], [expected.detach().double(), exact.double()])[1] < 1e-4


def test_nothing_waits_for_the_device():
    arguments = tuple(t.cuda() for t in batch((128, 1000, 64), dtype=torch.float32))
    for case in (CLASS_CASES["arcface"], CLASS_CASES["heated"]):
        outcome(case, arguments, "mean")
        torch.cuda.set_sync_debug_mode("error")
        try:
            outcome(case, arguments, "mean")
        finally:
            torch.cuda.set_sync_debug_mode("default")
