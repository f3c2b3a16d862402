"""The kernels of Smooth-AP and FastAP, through Triton's interpreter, against the plain losses."""

import json
import math

import pytest
import torch

from interpreter import interpreted
from nearkin import losses
from nearkin.kernels import rank_ops as fused

pytestmark = pytest.mark.slow


FORMS = {
    "smooth": (losses.smooth_ap_loss, {"temperature": 0.1}),
    "smooth, sharp": (losses.smooth_ap_loss, {}),
    "fast": (losses.fastap_loss, {}),
    "fast, 3 bins": (losses.fastap_loss, {"bins": 3}),
}
SHAPES = {"1 item": (1, 0, 3), "19": (19, 0, 5), "3 of 40": (3, 40, 3), "4 of 1": (4, 1, 3)}


def batch(shape, dtype=torch.float32, seed=0):
    """Embeddings and labels, some unknown, and references with theirs where there are any; one pair of duplicates."""
    number, num_references, dim = shape
    g = torch.Generator().manual_seed(seed)
    inputs = []
    for size in (number, num_references) if num_references else (number,):
        x, labels = torch.randn(size, dim, generator=g), torch.randint(4, (size,), generator=g)
        if size > 8:
            x[5], labels[3] = x[4], -1
        inputs += [x.to(dtype), labels]
    return inputs


def outcome(function, inputs, **settings):
    """Values an anchor and the gradients, with an upstream that is nowhere 1."""
    inputs = [t.detach().clone().requires_grad_() if t.is_floating_point() else t for t in inputs]
    value = function(*inputs, reduction="none", **settings)
    value.backward(torch.linspace(0.3, 2.1, len(value), dtype=value.dtype, device=value.device))
    return [value.detach(), *(t.grad for t in inputs if t.is_floating_point())]


def errors(got, exact):
    pairs = zip(got, exact, strict=True)
    return [float((a.double() - b).abs().max() / b.abs().max().clamp(min=1e-3)) for a, b in pairs]


def judge_kernel():
    """What the test below reads, as JSON: errors of kernel and plain form against float64, and who served."""
    served = []
    for name in ("_Precisions", "_Histograms"):
        apply = getattr(fused, name).apply
        getattr(fused, name).apply = lambda *inputs, apply=apply: served.append(1) or apply(*inputs)
    errors_by_case = {}
    for form, (function, settings) in FORMS.items():
        for size, shape in SHAPES.items():
            if settings and size in ("1 item", "4 of 1"):
                continue
            for dtype in (torch.float32, torch.bfloat16) if size == "3 of 40" else (torch.float32,):
                inputs = batch(shape, dtype)
                wide = [t.double() if t.is_floating_point() else t for t in inputs]
                exact = outcome(function, wide, **settings)
                plain = errors(outcome(function, inputs, impl="torch", **settings), exact)
                served.clear()
                got = errors(outcome(function, inputs, impl="triton", **settings), exact)
                errors_by_case[f"{form}, {size}, {dtype}"] = [got, plain, len(served)]
    x, labels = batch((9, 0, 3))
    edges = {}
    for form, (function, settings) in FORMS.items():
        poisoned = x.clone()
        poisoned[2, 1] = math.nan
        edges[f"{form}: NaN"] = math.isnan(function(poisoned, labels, impl="triton", **settings))
        edges[f"{form}: nobody"] = float(function(x, torch.full_like(labels, -1), impl="triton", **settings)) == 0
        blocks = function(x, labels, impl="triton", max_memory=2**13, **settings)
        edges[f"{form}: blocks"] = torch.allclose(blocks, function(x, labels, impl="torch", **settings))
        served.clear()
        function(x, labels, **settings)
        function(x.double(), labels, impl="triton", **settings)
        edges[f"{form}: a CPU, or float64"] = not served
    print(json.dumps([errors_by_case, edges]))


@pytest.fixture(scope="module")
def kernel():
    return interpreted(__file__, "judge_kernel")


def test_kernel_is_as_exact_as_the_plain_loss(kernel):
    assert len(kernel[0]) == 2 * 5 + 2 * 3
    for name, (got, plain, served) in kernel[0].items():
        assert served == 1, name
        for ours, theirs in zip(got, plain, strict=True):
            assert ours <= theirs + 1e-6, (name, got, plain)


def test_kernel_minds_the_edges(kernel):
    assert len(kernel[1]) == 4 * len(FORMS)
    assert not [name for name, good in kernel[1].items() if not good]


def test_modules_keep_the_choice():
    for make in (losses.SmoothAPLoss, losses.FastAPLoss):
        assert "impl" not in make().settings
        assert "impl='torch'" in repr(make(impl="torch"))
        with pytest.raises(ValueError, match='unknown impl "tritn"; did you mean "triton"'):
            make(impl="tritn")
