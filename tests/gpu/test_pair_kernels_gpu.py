"""The kernels of pair losses on a GPU, judged as the interpreter's tests judge them. Skipped where there is none."""

import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import kernel_cases
from kernel_cases import PAIR_CASES
from nearkin import kernels, losses
from nearkin.core.labels import BatchFirst
from nearkin.memory import CrossBatchMemory

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and kernels.installed()), reason="no CUDA device or no triton on this machine"
)
SHAPES = [(64, None, 128), (333, None, 70), (1000, None, 128), (200, 777, 33), (129, 65, 300), (256, None, 520)]
every_case = pytest.mark.parametrize("name", PAIR_CASES)


def on_gpu(inputs):
    return tuple(
        BatchFirst(t.ids.cuda()) if isinstance(t, BatchFirst) else None if t is None else t.cuda() for t in inputs
    )


def exact_enough(verdict, name="", luck=0.0):
    for ours, theirs in zip(verdict["kernel"], verdict["torch"], strict=True):
        assert ours <= theirs + 1e-6 + luck, (name, verdict)


@pytest.fixture(autouse=True)
def _a_device_that_serves():
    """NEARKIN_FLOAT64_UNITS=0 runs all of this by digits; `test_digit_kernels_gpu` has some of it always."""
    if not kernels.can_split(torch.empty(0, device="cuda")):
        pytest.skip("this GPU has no matrix units for the kernels")


@every_case
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_exact_as_plain_torch(name, shape):
    verdict = kernel_cases.judged(PAIR_CASES[name], on_gpu(kernel_cases.batch(shape)))
    assert verdict["served"] == 1
    exact_enough(verdict)


@every_case
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(name, kind):
    inputs = on_gpu(kernel_cases.batch((150, 90, 64), kind))
    verdict = kernel_cases.judged(PAIR_CASES[name], (inputs[0], inputs[1].int(), inputs[2], inputs[3].int()))
    assert verdict["served"] == 1
    exact_enough(verdict)


@every_case
@pytest.mark.parametrize("shape", [(200, 777, 33), (64, 4000, 128)], ids=str)
def test_references_that_start_with_the_batch(name, shape):
    verdict = kernel_cases.judged(PAIR_CASES[name], on_gpu(kernel_cases.batch_first(shape)))
    assert verdict["served"] == 1
    exact_enough(verdict)


MODULES = (losses.ContrastiveLoss, losses.MarginLoss, losses.MultiSimilarityLoss, losses.CircleLoss)
MODULES += (losses.LiftedStructureLoss, losses.NPairLoss, losses.SupConLoss, losses.InfoNCELoss)
MODULES += (losses.LosslessTripletLoss, losses.TripletLoss, losses.SmoothAPLoss, losses.FastAPLoss)


@pytest.mark.parametrize("make", MODULES, ids=lambda make: make.__name__)
def test_a_long_memory_takes_little(make):
    """65,536 items beside a batch of 512, D = 128: under 200 MiB beyond the queue itself."""
    size, rows = 65_536, 512
    memory = CrossBatchMemory(make().cuda(), size, 128).cuda()
    g = torch.Generator("cuda").manual_seed(0)
    memory.embeddings = torch.randn(size, 128, device="cuda", generator=g)
    memory.labels = torch.randint(size // 4, (size,), device="cuda", generator=g)
    memory.known = torch.ones(size, dtype=torch.bool, device="cuda")
    labels = torch.arange(rows, device="cuda") // 4
    for step in range(2):
        x = torch.randn(rows, 128, device="cuda", generator=g, requires_grad=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        value = memory(x, labels)
        value.backward()
        peak = torch.cuda.max_memory_allocated() - before
        assert bool(value.isfinite()) and bool(x.grad.any())
        assert step == 0 or peak < 200 * 2**20, peak / 2**20


@every_case
def test_odd_shapes(name):
    # Smooth-AP divides similarities by a temperature of 0.01: float32 is off by 2^-24 / 0.01 on either side, and with a
    # handful of references it is chance which of both is nearer.
    luck = 2**-24 / 0.01 if name == "Smooth-AP" else 0.0
    for shape in kernel_cases.PAIR_SHAPES:
        exact_enough(kernel_cases.judged(PAIR_CASES[name], on_gpu(kernel_cases.batch(shape))), str(shape), luck)


@every_case
def test_near_duplicates(name):
    exact_enough(kernel_cases.judged(PAIR_CASES[name], on_gpu(kernel_cases.near(200, 128, 1e-4))))


@every_case
def test_poison_and_silence(name):
    function, settings, *_ = PAIR_CASES[name]
    x, labels, _, _ = on_gpu(kernel_cases.batch((70, None, 20)))
    for poison in (math.nan, math.inf):
        poisoned = x.clone()
        poisoned[labels == -1] = poison  # in no pair
        assert bool(function(poisoned, labels, impl="triton", **settings).isnan())
    silent = x.clone().requires_grad_()
    value = function(silent, torch.full_like(labels, -1), impl="triton", **settings)
    value.backward()
    assert float(value.detach()) == 0 and not bool(silent.grad.any())


@every_case
def test_same_numbers_every_time_and_no_waiting(name):
    case, inputs = PAIR_CASES[name], on_gpu(kernel_cases.batch((500, None, 128)))
    first = kernel_cases.outcome(case, inputs, "triton")
    assert all(map(torch.equal, first, kernel_cases.outcome(case, inputs, "triton")))
    x = inputs[0].clone().requires_grad_()
    settings = {k: v for k, v in case.settings.items() if k != "beta"}
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        case.function(x, inputs[1], **settings).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["contrastive", "margin", "lifted", "SupCon", "InfoNCE", "multi-similarity"])
def test_memory_does_not_grow_with_the_pairs(name):
    """B = 16,384: one (B, B) matrix of float32 would be 1 GiB."""
    function, settings, *_ = PAIR_CASES[name]
    x = torch.randn(16384, 128, device="cuda", requires_grad=True)
    labels = torch.arange(16384, device="cuda") // 4
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function(x, labels, **settings).backward()
    assert torch.cuda.max_memory_allocated() - before < 2**26


def test_what_cannot_be_served_falls_back():
    x, labels, _, _ = on_gpu(kernel_cases.batch((40, None, 8)))
    for inputs, overrides in (((x.double(), labels), {}), ((x, labels), {"reduction": "none"})):
        plain = losses.supcon_loss(*inputs, impl="torch", **overrides)
        torch.testing.assert_close(losses.supcon_loss(*inputs, impl="triton", **overrides), plain)
