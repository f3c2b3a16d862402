"""Losses of pairs, triplets and ranks on a GPU: the loops' numbers, the same every time, without waiting, in a graph.

Skipped where there is no GPU.
"""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from cases import DIM, LOSSES
from nearkin import losses
from nearkin.core import devices
from nearkin.memory import CrossBatchMemory
from test_contract import assert_same, twin_of, value_and_gradients

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
PAIRS = [case for case in LOSSES if case.pairs]
every = pytest.mark.parametrize("case", PAIRS, ids=str)
plain = pytest.mark.parametrize("case", [case for case in PAIRS if "-" not in case.name], ids=str)


def on_cpu(outcome):
    return outcome[0].cpu(), [gradient.cpu() for gradient in outcome[1]]


def larger(case, number=512):
    """A batch on the GPU."""
    g = torch.Generator().manual_seed(3)
    x, labels = torch.randn(number, DIM, generator=g), torch.arange(number) // 4
    return x.cuda(), case.targets(labels).cuda()


@pytest.fixture(params=["float64", "float32 and differences"])
def products(request, monkeypatch):
    """Both ways to a distance: as this GPU takes it, and as one whose float64 is slow."""
    monkeypatch.setattr(devices, "has_float64_units", lambda tensor: request.param == "float64")


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_the_loop(case, dtype, products):
    module = case.build(torch.float32)
    x, labels = case.batch(dtype)
    others = (x.flip(0) + 0.25, labels.flip(0))
    for rest in ((labels,), (labels, *others)):
        wanted = twin_of(case, module.cpu(), x, *(t.double() if t.is_floating_point() else t for t in rest))
        module.cuda()
        got = value_and_gradients(module, module, x.cuda(), *(part.cuda() for part in rest))
        assert_same(on_cpu(got), wanted, 2e-5 if dtype == torch.float32 else 2e-2)


@every
def test_as_exact_as_the_cpu_where_pairs_are_near(case, products):
    x, labels = case.batch(torch.float32)
    x = x[:1] + 1e-2 * x
    module = case.build(torch.float32)
    exact = twin_of(case, module, x, labels)
    value, gradients = value_and_gradients(module, module, x, labels)
    cpu = value.clone(), [gradient.clone() for gradient in gradients]  # the module takes its own with it
    gpu = on_cpu(value_and_gradients(module.cuda(), module, x.cuda(), labels.cuda()))
    for ours, theirs, true in zip((gpu[0], *gpu[1]), (cpu[0], *cpu[1]), (exact[0], *exact[1]), strict=True):
        scale = max(float(true.abs().max()), 1e-3)
        mine, others = (float((t.double() - true).abs().max()) / scale for t in (ours, theirs))
        assert mine <= 2 * others + 1e-5, (mine, others)


@plain
def test_same_numbers_every_time_and_no_waiting(case):
    x, labels = larger(case)
    module = case.build(torch.float32).cuda()
    module(x.clone().requires_grad_(), labels).backward()  # libraries wait where they start
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    # Asked for beforehand, since the histograms of Fast-AP are faster otherwise; `nearkin train` asks for it.
    torch.use_deterministic_algorithms(case.name == "FastAPLoss", warn_only=True)
    try:
        runs = [value_and_gradients(module, module, x, labels) for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
        torch.cuda.set_sync_debug_mode("default")
    (value, gradients), (again, others) = runs
    assert torch.equal(value, again) and all(map(torch.equal, gradients, others))


@plain
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # of learned tensors, first used on the side
def test_in_a_graph_whatever_the_device(case, products):
    """Captured and replayed, with other rows in place: under capture no near pairs can be listed."""
    x, labels = larger(case, 96)
    x.requires_grad_()
    module = case.build(torch.float32).cuda()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            x.grad = None
            module(x, labels).backward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    x.grad = None
    module.zero_grad()
    with torch.cuda.graph(graph):
        value = module(x, labels)
        value.backward()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    got = value.detach().clone(), [x.grad.clone()]
    wanted = value_and_gradients(module, module, x.detach(), labels)
    assert_same(got, (wanted[0].double(), wanted[1][:1]), 1e-5)


@plain
def test_poison_is_never_hidden(case):
    x, labels = larger(case, 64)
    module = case.build(torch.float32).cuda()
    for poison in (torch.nan, torch.inf):
        rows = x.clone()
        rows[5, 1] = poison
        assert bool(module(rows, labels).isnan())


@pytest.mark.parametrize("make", [losses.SupConLoss, losses.ContrastiveLoss, losses.TripletLoss, losses.LogRatioLoss])
def test_a_large_batch_takes_blocks_of_a_gib(make):
    """B = 16,384: some twenty matrices of all pairs in float32 would be 20 GiB."""
    x = torch.randn(16_384, 128, device="cuda", requires_grad=True)
    labels = torch.arange(16_384, device="cuda") // 4
    labels = labels.float() if make is losses.LogRatioLoss else labels
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    make()(x, labels).backward()
    assert torch.cuda.max_memory_allocated() - before < 1.25 * 2**30


@pytest.mark.parametrize("make", [losses.SupConLoss, losses.MarginLoss, losses.TripletLoss], ids=lambda m: m.__name__)
def test_a_long_memory_takes_blocks_of_a_gib(make):
    """65,536 items beside a batch of 512."""
    size, rows = 65_536, 512
    memory = CrossBatchMemory(make().cuda(), size, 128).cuda()
    g = torch.Generator("cuda").manual_seed(0)
    memory.embeddings = torch.randn(size, 128, device="cuda", generator=g)
    memory.labels = torch.randint(size // 4, (size,), device="cuda", generator=g)
    memory.known = torch.ones(size, dtype=torch.bool, device="cuda")
    x = torch.randn(rows, 128, device="cuda", generator=g, requires_grad=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    value = memory(x, torch.arange(rows, device="cuda") // 4)
    value.backward()
    assert bool(value.isfinite()) and bool(x.grad.any())
    assert torch.cuda.max_memory_allocated() - before < 1.5 * 2**30
