"""The kernels as on a GPU without float64 on its matrix units, forced, against plain code with float64 inside.

A few cases, since each form takes seconds to compile; NEARKIN_FLOAT64_UNITS=0 runs all tests of this folder so.
"""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import kernel_cases
import ratio_cases
import triplet_cases
from kernel_cases import PAIR_CASES
from nearkin import kernels, losses

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and kernels.installed()), reason="no CUDA device or no triton on this machine"
)


@pytest.fixture(autouse=True)
def _forced():
    if not kernels.can_split(torch.empty(0, device="cuda")):
        pytest.skip("this GPU has no matrix units for the kernels")
    before = kernels.float64_units()
    kernels.set_float64_units(False)
    yield
    kernels.set_float64_units(before)


def on_gpu(inputs):
    return tuple(None if t is None else t.cuda() for t in inputs)


def judge(name, inputs):
    verdict = kernel_cases.judged(PAIR_CASES[name], on_gpu(inputs))
    assert verdict["served"] == 1
    for ours, theirs in zip(verdict["kernel"], verdict["torch"], strict=True):
        assert ours <= theirs + 1e-6, (name, verdict)


@pytest.mark.parametrize("name", ["contrastive", "SupCon"])
def test_pairs(name):
    for inputs in (kernel_cases.batch((1000, None, 128)), kernel_cases.near(200, 128, 1e-4)):
        judge(name, inputs)


@pytest.mark.parametrize("name", ["contrastive, raw", "contrastive, linear"])
def test_near_and_far(name):
    for kind in kernel_cases.KINDS:
        judge(name, kernel_cases.rows(kind, 332, 70))


@pytest.mark.parametrize(
    "name, kind", [("semihard, raw", "pairs"), ("semihard, raw", "clusters"), ("all, raw", "pairs")]
)
def test_triplets(name, kind):
    triplet_cases.as_exact(triplet_cases.CASES[name], on_gpu(kernel_cases.rows(kind, 332, 70)))


def test_same_numbers_every_time():
    case, inputs = PAIR_CASES["contrastive, raw"], on_gpu(kernel_cases.rows("pairs", 332, 70))
    first = kernel_cases.outcome(case, inputs, "triton")
    assert all(map(torch.equal, first, kernel_cases.outcome(case, inputs, "triton")))


@pytest.mark.parametrize("labels", ["few integers", "continuous", "vectors"])
def test_log_ratio(labels):
    batches = [ratio_cases.batch((700, None, 128), labels), ratio_cases.batch((190, 1111, 70), labels)]
    for inputs in [*batches, ratio_cases.near(300, 128), ratio_cases.clusters(300, 128)]:
        verdict = ratio_cases.judged(list(on_gpu(inputs)), "auto")
        assert verdict["served"] == 1
        for ours, theirs in zip(verdict["kernel"], verdict["torch"], strict=True):
            assert ours <= theirs + 1e-6, (labels, verdict)


def test_log_ratio_in_blocks_of_anchors(monkeypatch):
    from nearkin.kernels import ratio_pass

    for name, value in (("SLOPES", 2**17), ("PAIRS", 2**15), ("SHORT", 64)):
        monkeypatch.setattr(ratio_pass, name, value)
    for inputs in (ratio_cases.batch((777, None, 128), "mirrored"), ratio_cases.clusters(300, 128)):
        verdict = ratio_cases.judged(list(on_gpu(inputs)), "auto")
        for ours, theirs in zip(verdict["kernel"], verdict["torch"], strict=True):
            assert ours <= theirs + 1e-6, verdict


@pytest.mark.filterwarnings("ignore")  # a compiler's own
@pytest.mark.parametrize("name", ["contrastive", "logratio"])
def test_compiled_losses(name):
    function = getattr(losses, f"{name}_loss")
    x, labels = torch.randn(300, 64, device="cuda"), torch.arange(300, device="cuda") // 4
    labels = labels.float() if name == "logratio" else labels
    torch._dynamo.reset()
    outcomes = []
    for loss, kind in ((torch.compile(function), torch.float32), (function, torch.float64)):
        rows = x.to(kind, copy=True).requires_grad_()
        value = loss(rows, labels)
        value.backward()
        outcomes.append([value.detach().double(), rows.grad.double()])
    for got, exact in zip(*outcomes, strict=True):
        assert float((got - exact).abs().max()) <= 1e-6 * float(exact.abs().max())
