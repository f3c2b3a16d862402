"""The kernels of Smooth-AP and FastAP on a GPU, against the plain losses in float64."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import test_rank_kernels as judge

import kernel_cases
from nearkin import kernels, losses
from nearkin.kernels import rank_ops as fused
from nearkin.kernels import smooth_ap_ops

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and kernels.installed()), reason="no CUDA device or no triton on this machine"
)


@pytest.mark.parametrize(
    "shape", [(1, 0, 3), (4, 1, 3), (19, 0, 5), (130, 0, 64), (3, 8192, 16), (1030, 0, 128)], ids=str
)
@pytest.mark.parametrize("form", judge.FORMS)
def test_as_exact_as_the_plain_loss(form, shape, monkeypatch):
    function, settings = judge.FORMS[form]
    served = []
    for name in ("precisions", "histogram_misses"):
        kernel = getattr(fused, name)
        monkeypatch.setattr(fused, name, lambda *inputs, kernel=kernel: served.append(1) or kernel(*inputs))
    inputs = [t.cuda() for t in judge.batch(shape)]
    wide = [t.double() if t.is_floating_point() else t for t in inputs]
    exact = judge.outcome(function, wide, impl="torch", **settings)
    plain = judge.errors(judge.outcome(function, inputs, impl="torch", **settings), exact)
    assert not served
    kernel_errors = judge.errors(judge.outcome(function, inputs, **settings), exact)
    assert served
    for ours, theirs in zip(kernel_errors, plain, strict=True):
        assert ours <= theirs + 1e-6, (kernel_errors, plain)


def few_classes(shape, classes):
    x, labels, references, reference_ids = kernel_cases.batch(shape)
    ids = [t if t is None else torch.where(t < 0, t, t % classes) for t in (labels, reference_ids)]
    return tuple(t if t is None else t.cuda() for t in (x, ids[0], references, ids[1]))


def exact_enough(verdict):
    assert verdict["served"] == 1
    for ours, theirs in zip(verdict["kernel"], verdict["torch"], strict=True):
        assert ours <= theirs + 1e-6, verdict


@pytest.mark.parametrize(
    ("shape", "narrow"), [((600, None, 128), False), ((600, None, 128), True), ((150, 300, 128), True)], ids=str
)
def test_classes_of_hundreds(shape, narrow, monkeypatch):
    if narrow:
        monkeypatch.setattr(smooth_ap_ops, "room", lambda batch, max_memory: 1)  # tables of 16 positives, the fewest
    for name in ("Smooth-AP", "Smooth-AP, soft"):
        exact_enough(kernel_cases.judged(kernel_cases.PAIR_CASES[name], few_classes(shape, 2)))


@pytest.mark.parametrize("name", kernel_cases.BIN_CASES)
def test_any_number_of_bins(name):
    inputs = tuple(t if t is None else t.cuda() for t in kernel_cases.batch((333, None, 128)))
    exact_enough(kernel_cases.judged(kernel_cases.BIN_CASES[name], inputs))


def test_more_positives_than_the_bound_are_nan():
    x, labels = torch.randn(64, 32, device="cuda", requires_grad=True), torch.arange(64, device="cuda") // 4
    for reduction in ("mean", "active", "sum"):
        assert bool(losses.smooth_ap_loss(x, labels, max_positives=2, reduction=reduction).isnan())
        assert bool(losses.smooth_ap_loss(x, labels, max_positives=3, reduction=reduction).isfinite())


@pytest.mark.parametrize(("make", "mib"), [(losses.SmoothAPLoss, 300), (losses.FastAPLoss, 128)])
def test_memory_does_not_grow_with_the_pairs(make, mib):
    """B = 65,536: one (B, B) matrix of float32 would be 16 GiB."""
    x = torch.randn(65536, 128, device="cuda", requires_grad=True)
    labels = torch.arange(65536, device="cuda") // 4
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    make()(x, labels).backward()
    assert torch.cuda.max_memory_allocated() - before < mib * 2**20
