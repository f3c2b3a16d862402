"""The kernels of Smooth-AP and FastAP on a GPU, against the plain losses in float64."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import test_rank_kernels as judge

from nearkin import kernels
from nearkin.kernels import rank_ops as fused

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
