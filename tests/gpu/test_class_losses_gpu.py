"""Losses over class weights on a GPU, each beside the loops of float64 on the CPU: whole, in blocks, in the kernel."""

import pytest
import torch

from cases import LOSSES
from loss_checks.outcome import assert_same, loop, run
from nearkin import kernels, losses
from nearkin.core import class_blocks
from nearkin.losses.classes import ClassLoss

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")

CASES = [case for case in LOSSES if isinstance(case.build(), ClassLoss)]
every = pytest.mark.parametrize("case", CASES, ids=str)
KINDS = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-2}


def on_the_gpu(case, dtype):
    module = case.build(torch.float32 if dtype == torch.bfloat16 else dtype)
    x, labels = case.batch(dtype)
    return module.cuda(), x.cuda(), labels.cuda(), loop(case, dtype)


def home(got):
    return [tensor.cpu() for tensor in got]


@every
@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("blocks", [False, True])
def test_equals_the_loop(case, blocks, dtype, monkeypatch):
    if blocks:
        monkeypatch.setattr(class_blocks, "fits", lambda *_: False)
        monkeypatch.setattr(class_blocks, "block", lambda x, weight, form, max_memory: 2 * form.centers)
    module, x, labels, wanted = on_the_gpu(case, dtype)
    assert_same(home(run(module, module, x, labels)), wanted, KINDS[dtype])


@every
def test_compiled_equals_the_loop(case):
    torch._dynamo.reset()
    module, x, labels, wanted = on_the_gpu(case, torch.float32)
    compiled = torch.compile(module, fullgraph=True)
    assert_same(home(run(compiled, module, x, labels)), wanted, 1e-5)


@every
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # of learned tensors, first used on the side
def test_in_a_graph(case):
    module = case.build(torch.float32).eval()
    x, labels = case.batch(torch.float32)
    module, x, labels = module.cuda(), x.cuda().requires_grad_(), labels.cuda()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            x.grad = None
            module(x, labels).backward()
    torch.cuda.synchronize()
    wanted = run(module, module, x.detach(), labels)
    graph = torch.cuda.CUDAGraph()
    x.grad = None
    module.zero_grad()
    with torch.cuda.graph(graph):
        value = module(x, labels)
        (2.5 * value).backward()
    graph.replay()
    assert_same([value.detach(), x.grad], wanted[:2], 1e-5)


@pytest.mark.parametrize("name", ["NormalizedSoftmaxLoss", "CosFaceLoss", "ArcFaceLoss", "ProxyNCALoss"])
def test_the_kernel_equals_plain_torch(name, monkeypatch):
    """Many classes in bfloat16: errors by float64 are those of plain torch, whose float32 rounds less."""
    monkeypatch.setattr(kernels, "FROM", 1)
    g = torch.Generator().manual_seed(1)
    weight, labels = torch.randn(1000, 64, generator=g).bfloat16(), torch.randint(1000, (96,), generator=g)
    x, found = (weight[labels] + torch.randn(96, 64, generator=g)).bfloat16(), []
    for kernel, kind in ((True, torch.bfloat16), (False, torch.bfloat16), (False, torch.float64)):
        loss = getattr(losses, name)(1000, 64, kernel=kernel).to(kind).cuda()
        loss.weight.data.copy_(weight)
        y = x.to(kind).cuda().requires_grad_()
        value = loss(y, labels.cuda())
        value.backward()
        found.append([t.double() for t in (value.detach(), y.grad, loss.weight.grad)])
    ours, plain, exact = ([*map(_error, each, found[2])] for each in found)
    assert not any(exact) and all(a <= b + 8e-3 for a, b in zip(ours, plain, strict=True)), (ours, plain)


def _error(a, b):
    return float((a - b).abs().max() / b.abs().max())
