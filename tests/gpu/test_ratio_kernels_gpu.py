"""The kernels of the log-ratio loss on a GPU, judged as those of the interpreter are; skipped where there is none."""

import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import ratio_cases
from nearkin import kernels, losses
from nearkin.core.labels import LabelDistance
from nearkin.kernels import ratio_pass
from ratio_cases import LABELS, SETTINGS

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and kernels.installed()), reason="no CUDA device or no triton on this machine"
)
SHAPES = [(1, None, 3), (4, 1, 3), (333, None, 70), (1030, None, 128), (3, 9000, 128), (129, 65, 300)]


@pytest.fixture(autouse=True)
def _a_device_that_serves():
    if not kernels.has_float64_units(torch.empty(0, device="cuda")):
        pytest.skip("this GPU does not multiply float64 on its matrix units")


def on_gpu(arguments):
    def moved(t):
        return LabelDistance(t.distance.cuda()) if isinstance(t, LabelDistance) else t.cuda()

    return [None if t is None else moved(t) for t in arguments]


def exact_enough(arguments, **settings):
    verdict = ratio_cases.judged(on_gpu(arguments), "auto", **settings)
    assert verdict["served"] == 1
    for ours, theirs in zip(verdict["kernel"], verdict["torch"], strict=True):
        assert ours <= theirs + 1e-6, verdict


@pytest.mark.parametrize("labels", LABELS)
def test_ties_of_every_kind(labels):
    exact_enough(ratio_cases.batch((700, None, 128), labels))
    exact_enough(ratio_cases.batch((190, 1111, 128), labels))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape):
    exact_enough(ratio_cases.batch(shape, "mirrored"))


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name):
    exact_enough(ratio_cases.batch((300, None, 128), "four of each"), **SETTINGS[name])
    exact_enough(ratio_cases.matrix(300, None, 128), **SETTINGS[name])


def test_half_precision_and_near_duplicates():
    for kind in (torch.bfloat16, torch.float16):
        exact_enough(ratio_cases.batch((150, 90, 64), kind=kind))
    exact_enough(ratio_cases.near(300, 128))
    exact_enough(ratio_cases.near(300, 128), normalize=True)


@pytest.mark.parametrize("labels", ["mirrored", "vectors"])
def test_blocks_of_anchors(labels, monkeypatch):
    for name, value in (("SLOPES", 2**17), ("PAIRS", 2**15), ("SORTED_PAIRS", 2**15), ("SHORT", 64)):
        monkeypatch.setattr(ratio_pass, name, value)
    exact_enough(ratio_cases.batch((777, None, 128), labels))
    exact_enough(ratio_cases.batch((100, 700, 128), labels), max_memory=2**23)


def test_poison_and_silence():
    x, labels, _, _ = on_gpu(ratio_cases.batch((70, None, 20)))
    for y in (labels.double(), torch.stack([labels, labels], 1).double()):
        for poison in (math.nan, math.inf):
            rows, targets = x.clone(), y.clone()
            rows[3, 3] = targets[4] = poison
            assert bool(losses.logratio_loss(rows, y).isnan()) and bool(losses.logratio_loss(x, targets).isnan())
        silent = x.clone().requires_grad_()
        value = losses.logratio_loss(silent, torch.zeros_like(y))
        value.backward()
        assert float(value.detach()) == 0 and not bool(silent.grad.any())


@pytest.mark.parametrize("labels", ["four of each", "vectors"])
def test_same_numbers_every_time_and_no_waiting(labels):
    arguments = on_gpu(ratio_cases.batch((500, None, 128), labels))
    first = ratio_cases.outcome(arguments, "auto")
    assert all(map(torch.equal, first, ratio_cases.outcome(arguments, "auto")))
    x = arguments[0].clone().requires_grad_()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        losses.logratio_loss(x, arguments[1]).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_memory_does_not_grow_with_the_pairs():
    """B = 16,384: one (B, B) matrix of float32 would be 1 GiB."""
    x = torch.randn(16384, 128, device="cuda", requires_grad=True)
    labels = torch.arange(16384, device="cuda") // 4
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    losses.logratio_loss(x, labels).backward()
    assert torch.cuda.max_memory_allocated() - before < 2**28
