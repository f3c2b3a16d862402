"""The kernels of triplet selections on a GPU, by the checks that run under the interpreter. Skipped without a GPU."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import triplet_cases
from nearkin import kernels, losses
from triplet_cases import CASES, DRAWN

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and kernels.installed()), reason="no CUDA device or no triton on this machine"
)
SHAPES = [(64, None, 128), (333, None, 70), (1000, None, 128), (200, 777, 33), (129, 65, 300), (256, None, 1030)]


@pytest.fixture(autouse=True)
def _a_device_that_serves():
    """NEARKIN_FLOAT64_UNITS=0 runs all of this by digits; `test_digit_kernels_gpu` has some of it always."""
    if not kernels.can_split(torch.empty(0, device="cuda")):
        pytest.skip("this GPU has no matrix units for the kernels")


@pytest.mark.parametrize("name", triplet_cases.CHECKS)
def test_kernels(name):
    triplet_cases.CHECKS[name]("cuda")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_exact_as_plain_torch(name, shape):
    triplet_cases.as_exact(CASES[name], triplet_cases.batch(shape, "cuda", classes=shape[0] // 4))


@pytest.mark.parametrize("name", CASES | DRAWN)
def test_deterministic_without_waiting(name):
    inputs = triplet_cases.batch((2048, None, 128), "cuda", classes=7)
    function, settings = (CASES | DRAWN)[name]
    # Copied to the device beforehand: that waits.
    case = (
        function,
        {key: value.cuda() if isinstance(value, torch.Tensor) else value for key, value in settings.items()},
    )
    results = []
    for _ in range(3):
        generator_setting = {"generator": torch.Generator("cuda").manual_seed(1)} if name in DRAWN else {}
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if results else "default")
        try:
            results.append(triplet_cases.served(case, inputs, **generator_setting))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for again in results[1:]:
        assert all(map(torch.equal, again, results[0]))


@pytest.mark.parametrize("name", ["semihard", "batch_hard", "all", "random", "margin"])
def test_in_a_graph(name):
    """Captured and replayed, with other rows in place."""
    function, settings = (CASES | DRAWN)[name]
    settings = settings | ({"beta": 1.2} if "beta" in settings else {})
    x, labels, _, _ = triplet_cases.batch((256, None, 64), "cuda", classes=64)
    x.requires_grad_()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            x.grad = None
            function(x, labels, impl="triton", **settings).backward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    x.grad = None
    with torch.cuda.graph(graph):
        value = function(x, labels, impl="triton", **settings)
        value.backward()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    if name in CASES:
        expected = triplet_cases.outcome((function, settings), (x, labels, None, None), impl="torch")
        torch.testing.assert_close([value.detach(), x.grad * 1.7], expected, rtol=1e-5, atol=1e-7)
    assert bool(value.isfinite())


def test_memory_grows_with_the_batch():
    """B = 65,536, D = 128: a (B, B) matrix of float32 would be 16 GiB."""
    x = torch.randn(65_536, 128, device="cuda", requires_grad=True)
    labels = torch.arange(65_536, device="cuda") // 4
    for selection in ("semihard", "batch_hard"):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        losses.triplet_loss(x, labels, selection=selection, impl="triton").backward()
        assert torch.cuda.max_memory_allocated() - before < 2**29
        x.grad = None
