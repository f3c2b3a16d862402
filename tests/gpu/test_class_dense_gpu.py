"""Losses over class weights with all scores in memory, by kernels on a GPU: errors by float64 beside plain torch's."""

import pytest
import torch

from class_cases import CLASS_CASES, batch, counted, errors, judged, outcome, without_kernels
from nearkin import losses
from nearkin.kernels import class_dense_ops

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
F32, BF16, F16, MIXED = ("float32",) * 2, ("bfloat16",) * 2, ("float16",) * 2, ("bfloat16", "float32")


# Of losses that run the same kernels one.
NAMES = [name for name in CLASS_CASES if name not in ("arcface, 2 centres", "arcface, 7 centres")]


@pytest.mark.parametrize("name", NAMES)
def test_errors_are_those_of_plain_torch(name):
    """Of many scores, which cuBLAS multiplies, and of few, which kernels do."""
    for shape in ((300, 2500, 128), (200, 301, 128)):
        case = judged(name, shape, F32, "mean", "cuda")
        assert case["served"] == 1
        for ours, theirs in zip(case["kernel"], case["torch"], strict=True):
            assert ours <= theirs + 1e-6, (shape, case)


@pytest.mark.parametrize("shape", [(1, 1, 4), (1, 7, 256), (63, 700, 72), (40, 300, 600)], ids=str)
@pytest.mark.parametrize("reduction", ["active", "sum"])
def test_odd_shapes(shape, reduction):
    case = judged("arcface, 3 centres", shape, F32, reduction, "cuda")
    for ours, theirs in zip(case["kernel"], case["torch"], strict=True):
        assert ours <= theirs + 1e-6, case


@pytest.mark.parametrize("kinds", [BF16, F16, MIXED], ids=str)
def test_half_precision(kinds):
    for shape in ((300, 2500, 128), (200, 301, 128)):
        case = judged("heated", shape, kinds, "mean", "cuda")
        assert case["served"] == 1
        for ours, theirs in zip(case["kernel"], case["torch"], strict=True):
            assert ours <= theirs + 1e-6, (shape, case)


@pytest.mark.parametrize("name", ["cosface", "arcface, 3 centres", "proxy-nca, original"])
def test_it_is_the_same_twice(name):
    for shape in ((1000, 3000, 128), (1000, 600, 128)):
        arguments = tuple(t.cuda() for t in batch(shape, CLASS_CASES[name].centers, dtype=torch.float32))
        runs = [outcome(CLASS_CASES[name], arguments, "mean") for _ in range(3)]
        assert all(map(torch.equal, runs[0], runs[1])) and all(map(torch.equal, runs[0], runs[2]))


def test_auto_takes_them_unless_memory_is_short():
    x, labels, weight, bias = (t.cuda() for t in batch((128, 1000, 128), dtype=torch.float32))
    with counted() as served:
        losses.cosface_loss(x, labels, weight)
        losses.heated_softmax_loss(x, labels, weight, bias)
        losses.SphereFaceLoss(1000, 128).cuda()(x, labels)
        losses.AdaFaceLoss(1000, 128).cuda()(x, labels)
        losses.MagFaceLoss(1000, 128).cuda()(x, labels)
        assert len(served) == 5
        served.clear()
        losses.cosface_loss(x, labels, weight, max_memory=2**21)
        losses.cosface_loss(x, labels, weight, reduction="none")
        losses.cosface_loss(x, labels, weight, impl="torch")
        assert not served


def test_memory_stays_within_the_bound():
    x, labels, weight, _ = (t.cuda() for t in batch((512, 20_000, 128), dtype=torch.float32))
    x, weight = x.requires_grad_(), weight.requires_grad_()
    needed = 4 * 512 * 20_015 + (12 * 128 + 64) * 20_512 + 2048
    assert class_dense_ops.fits(x, weight, needed)
    losses.cosface_loss(x, labels, weight, max_memory=needed).backward()
    x.grad = weight.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    losses.cosface_loss(x, labels, weight, max_memory=needed).backward()
    assert torch.cuda.max_memory_allocated() - before <= needed + 2**22  # the allocator rounds large blocks up


def test_adacos_adapts_as_plain_torch_does():
    torch.manual_seed(0)
    ours, twin = (losses.AdaCosLoss(2500, 128).cuda() for _ in range(2))
    twin.load_state_dict(ours.state_dict())
    for size in (1001, 64, 1):
        x = torch.randn(size, 128, device="cuda", requires_grad=True)
        labels = torch.randint(-1, 2500, (size,), device="cuda")
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
    arguments = tuple(t.cuda() for t in batch((128, 1000, 128), dtype=torch.float32))
    for case in (CLASS_CASES["arcface"], CLASS_CASES["heated"]):
        outcome(case, arguments, "mean")
        torch.cuda.set_sync_debug_mode("error")
        try:
            outcome(case, arguments, "mean")
        finally:
            torch.cuda.set_sync_debug_mode("default")
