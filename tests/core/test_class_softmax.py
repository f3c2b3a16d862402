"""Softmax over many classes without logits: the plain pass and the kernel against the dense losses, sampled classes."""

import json
import math
import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import nearkin
from interpreter import interpreted
from nearkin import kernels, losses
from nearkin.core import angles, class_softmax
from nearkin.kernels import class_anchor_ops as fused_anchors
from nearkin.kernels import class_dense_ops, class_loss_ops
from nearkin.kernels import class_softmax_ops as fused
from nearkin.losses import angular, call, soft_triple


def proxy_anchor(x, labels, weight, *, reduction, **overrides):
    """It has one value per batch."""
    return losses.proxy_anchor_loss(x, labels, weight, **overrides)


FORMS = {
    "normalized": (losses.normalized_softmax_loss, {}, 1),
    "normalized, learned scale": (losses.normalized_softmax_loss, {"scale": torch.tensor(7.0)}, 1),
    "cosface": (losses.cosface_loss, {}, 1),
    "arcface": (losses.arcface_loss, {}, 1),
    "arcface, wide": (losses.arcface_loss, {"margin": 2.5, "scale": 8.0}, 1),
    "arcface, straight through": (losses.arcface_loss, {"straight_through": True}, 1),
    "arcface, 3 centres": (losses.arcface_loss, {"sub_centers": 3}, 3),
    "sphereface": (losses.sphereface_loss, {"annealing": 0.5}, 1),
    "sphereface, annealed": (losses.sphereface_loss, {"annealing": torch.tensor(3.0), "margin": 3}, 1),
    "adaface": (losses.adaface_loss, {"mean": 4.0, "std": torch.tensor(3.0), "concentration": 0.7}, 1),
    "magface": (losses.magface_loss, {"lower_length": 1.0, "upper_length": 9.0}, 1),
    "adacos": (losses.adacos_loss, {"scale": 9.0}, 1),
    "proxy-nca": (losses.proxy_nca_loss, {}, 1),
    "proxy-nca, original": (losses.proxy_nca_loss, {"form": "original", "scale": 2.0}, 1),
    "proxy-anchor": (proxy_anchor, {}, 1),
}
ULP = 2.0**-18  # of a float32 logit below 64: what rounding it once more moves the gradient by, relative to itself
SHAPES = [(1, 1, 4), (1, 7, 3), (5, 2, 4), (13, 7, 5), (6, 1000, 17)]
every_form = pytest.mark.parametrize("form", FORMS)


def batch(shape, centers=1, dtype=torch.float64, seed=0):
    """Anchors (some near their class, one unknown where there are several), labels and class weights."""
    number, classes, dim = shape
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(classes * centers, dim, generator=g, dtype=torch.float64)
    labels = torch.randint(classes, (number,), generator=g)
    x = weight[labels * centers] + torch.randn(number, dim, generator=g, dtype=torch.float64)
    if number > 3:
        labels[2] = -1
    return x.to(dtype), labels, weight.to(dtype)


def outcome(function, x, labels, weight, **keywords):
    """Values an anchor, and the gradients under an upstream that is nowhere 1."""
    x, weight = (t.detach().clone().requires_grad_() for t in (x, weight))
    value = function(x, labels, weight, reduction="none", **keywords)
    upstream = torch.linspace(0.3, 2.1, value.numel(), dtype=value.dtype, device=value.device)
    value.backward(upstream.view(value.shape))
    return [value.detach(), x.grad, weight.grad]


def errors(got, exact):
    """The largest error of each tensor, by the size of the largest entry."""
    pairs = zip(got, exact, strict=True)
    return [float((a.double() - b).abs().max() / b.abs().max().clamp(min=1e-3)) for a, b in pairs]


def blocks_of(monkeypatch, number):
    monkeypatch.setattr(class_softmax, "block", lambda x, weight, centers, max_memory: number * centers)


@every_form
@pytest.mark.parametrize("block", [1, 3, 10**6])
def test_equals_the_dense_loss(form, block, monkeypatch):
    function, settings, centers = FORMS[form]
    blocks_of(monkeypatch, block)
    for shape in SHAPES:
        if (function is losses.adacos_loss and shape[1] < 3) or shape[1] > 300 * block:
            continue
        x, labels, weight = batch(shape, centers)
        dense = outcome(function, x, labels, weight, **settings)
        for ids in (labels, labels.int()):
            got = outcome(function, x, ids, weight, impl="torch", **settings)
            assert max(errors(got, dense)) <= 1e-12, shape


@every_form
@pytest.mark.parametrize("kinds", [("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16")], ids=str)
def test_is_as_exact_as_the_dense_loss(form, kinds, monkeypatch):
    function, settings, centers = FORMS[form]
    blocks_of(monkeypatch, 64)
    x, labels, weight = batch((24, 300, 32), centers)
    x, weight = x.to(getattr(torch, kinds[0])), weight.to(getattr(torch, kinds[1]))
    exact = outcome(function, x.double(), labels, weight.double(), **settings)
    dense = outcome(function, x, labels, weight, **settings)
    got = outcome(function, x, labels, weight, impl="torch", **settings)
    assert [t.dtype for t in got] == [t.dtype for t in dense]
    for ours, theirs in zip(errors(got, exact), errors(dense, exact), strict=True):
        assert ours <= theirs + ULP


@every_form
def test_gradcheck(form, monkeypatch):
    function, settings, centers = FORMS[form]
    blocks_of(monkeypatch, 2)
    x, labels, weight = batch((4, 5, 3), centers, seed=3)
    if settings.get("straight_through"):
        pytest.skip("its gradient is not that of its value, on purpose")
    inputs = (x.requires_grad_(), weight.requires_grad_())
    keywords = {"impl": "torch", "reduction": "mean", **settings}
    if form == "adaface":
        keywords["concentration"] = 0.0  # else lengths count, which have no gradient; test_contract.py holds them fixed
    assert torch.autograd.gradcheck(lambda x, w: function(x, labels, w, **keywords), inputs)


def test_a_learned_scale_learns(monkeypatch):
    blocks_of(monkeypatch, 2)
    x, labels, weight = batch((6, 9, 4))
    slopes = []
    for impl in ("auto", "torch"):
        scale = torch.tensor(11.0, dtype=torch.float64, requires_grad=True)
        losses.normalized_softmax_loss(x, labels, weight, scale=scale, impl=impl).backward()
        slopes.append(scale.grad)
    torch.testing.assert_close(*slopes, rtol=1e-12, atol=0)


def test_adacos_scale_is_the_dense_one(monkeypatch):
    blocks_of(monkeypatch, 4)
    x, labels, weight = batch((12, 30, 6))
    scales = [losses.adacos_scale(x, labels, weight, torch.tensor(5.0).double(), impl=i) for i in ("auto", "torch")]
    torch.testing.assert_close(*scales, rtol=1e-12, atol=0)
    empty = losses.adacos_scale(x[:0], labels[:0], weight, torch.tensor(5.0), impl="torch")
    assert float(empty) == 5.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_extremes_are_finite(dtype, monkeypatch):
    """Cosines of exactly ±1 at scale 64, zero rows, norms from 1e-30 to 1e30, nobody known, nobody there."""
    blocks_of(monkeypatch, 2)
    weight = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0], [1e-30, 0.0], [0.0, 1e30]], dtype=dtype)
    x = torch.tensor([[2.0, 0.0], [-3.0, 0.0], [0.0, 0.0], [1e-30, 1e-30], [1e30, 0.0]], dtype=dtype)
    for labels in (torch.arange(5), torch.tensor([1, 0, 3, 4, 2]), torch.full((5,), -1)):
        for function, settings, centers in FORMS.values():
            if centers == 1:
                got = outcome(function, x, labels, weight, impl="torch", **settings)
                assert all(bool(t.isfinite().all()) for t in got), function.__name__
                if bool((labels < 0).all()):
                    assert not any(bool(t.any()) for t in got)
    nobody = outcome(losses.arcface_loss, x[:0], labels[:0], weight, impl="torch")
    assert nobody[0].shape == (0,) and not bool(nobody[2].any())


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_poison_is_never_a_plausible_number(poison, monkeypatch):
    blocks_of(monkeypatch, 2)
    x, labels, weight = batch((5, 9, 4), dtype=torch.float32)
    for tensor, row in ((x, 0), (x, 2), (weight, 0), (weight, 8)):
        poisoned = tensor.clone()
        poisoned[row, 1] = poison
        x_, w_ = (poisoned, weight) if tensor is x else (x, poisoned)
        assert bool(losses.cosface_loss(x_, labels, w_, impl="torch").isnan())


def test_out_of_range_is_nan_where_values_are_not_read(monkeypatch):
    x, labels, weight = batch((5, 9, 4))
    labels[0] = 9
    with pytest.raises(ValueError, match=r"labels must be in 0\.\.8"):
        losses.arcface_loss(x, labels, weight, impl="torch")
    monkeypatch.setattr(nearkin.core.checks, "reads_values", lambda tensor: False)
    assert bool(losses.arcface_loss(x, labels, weight, impl="torch").isnan())


def test_autocast_changes_nothing(monkeypatch):
    blocks_of(monkeypatch, 4)
    x, labels, weight = batch((8, 30, 6), dtype=torch.float32)
    plain = outcome(losses.cosface_loss, x, labels, weight, impl="torch")
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, outcome(losses.cosface_loss, x, labels, weight, impl="torch"), plain))


def test_a_half_weight_may_keep_a_float32_gradient():
    x, labels, weight = batch((8, 30, 6), dtype=torch.float32)
    if not hasattr(weight, "grad_dtype"):
        pytest.skip("this torch keeps gradients in the type of the weight")
    half = weight.bfloat16().requires_grad_()
    half.grad_dtype = torch.float32
    losses.cosface_loss(x, labels, half, impl="torch").backward()
    exact = half.detach().double().requires_grad_()
    losses.cosface_loss(x.double(), labels, exact).backward()
    assert half.grad.dtype == torch.float32
    assert errors([half.grad], [exact.grad])[0] < 1e-5


def test_the_pass_compiles_whole(monkeypatch):
    blocks_of(monkeypatch, 4)
    torch._dynamo.reset()
    x, labels, weight = batch((8, 10, 6), dtype=torch.float32)
    eager = outcome(losses.arcface_loss, x, labels, weight, impl="torch")
    compiled = torch.compile(losses.arcface_loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(outcome(compiled, x, labels, weight, impl="torch"), eager, rtol=1e-5, atol=1e-5)


def test_the_road_is_chosen_by_size(monkeypatch):
    x, labels, weight = batch((8, 30, 6))
    calls = []
    plain = class_softmax.class_softmax
    monkeypatch.setattr(class_softmax, "class_softmax", lambda *a, **k: calls.append(k["max_memory"]) or plain(*a, **k))
    dense = losses.arcface_loss(x, labels, weight)
    assert not calls
    needed = 2 * class_softmax.PAIR * 8 * 30 + class_softmax.COORDINATE * 6 * 38
    losses.arcface_loss(x, labels, weight, max_memory=needed)
    assert not calls
    torch.testing.assert_close(losses.arcface_loss(x, labels, weight, max_memory=needed - 1), dense)
    assert calls == [needed - 1]
    monkeypatch.setattr(class_softmax, "DENSE", needed - 1)
    losses.arcface_loss(x, labels, weight)
    assert calls[1:] == [None]
    with pytest.raises(ValueError, match="max_memory must be at least what the anchors and one class take in bytes: "):
        losses.arcface_loss(x, labels, weight, max_memory=1000)
    with pytest.raises(TypeError, match=r"max_memory must be a whole number, got 1\.5"):
        losses.ArcFaceLoss(3, 4, max_memory=1.5)


def test_modules_take_the_road(monkeypatch):
    x, labels, _ = batch((8, 30, 6))
    several = (losses.NormalizedSoftmaxLoss, losses.CosFaceLoss, losses.ArcFaceLoss, losses.AdaCosLoss)
    for make in (*several, losses.ProxyNCALoss, losses.ProxyAnchorLoss):
        torch.manual_seed(1)
        dense = make(30, 6).double()
        assert "impl" not in dense.settings and "max_memory" not in dense.settings
        torch.manual_seed(1)
        module = make(30, 6, impl="torch", max_memory=2**16).double()
        torch.testing.assert_close(module(x, labels), dense(x, labels), rtol=1e-12, atol=0)
        assert "impl='torch', max_memory=65536" in repr(module) or "max_memory=65536, impl='torch'" in repr(module)
        assert module.state_dict().keys() == dense.state_dict().keys()
    module, dense = losses.SphereFaceLoss(30, 6, impl="torch").double(), losses.SphereFaceLoss(30, 6).double()
    dense.load_state_dict(module.state_dict())
    torch.testing.assert_close(module(x, labels), dense(x, labels), rtol=1e-12, atol=0)


@pytest.mark.parametrize("form", ["proxy-nca", "proxy-nca, original", "proxy-anchor", "cosface"])
def test_zero_rows_are_what_the_dense_loss_has_them_be(form, monkeypatch):
    blocks_of(monkeypatch, 3)
    function, settings, _ = FORMS[form]
    x, labels, weight = batch((9, 8, 4))
    weight[[0, 5]], x[[1, 8]] = 0, 0
    dense = outcome(function, x, labels, weight, **settings)
    assert max(errors(outcome(function, x, labels, weight, impl="torch", **settings), dense)) <= 1e-12


def test_frozen_weights_and_frozen_anchors(monkeypatch):
    blocks_of(monkeypatch, 3)
    for form in ("cosface", "proxy-anchor"):
        function, settings, _ = FORMS[form]
        x, labels, weight = batch((9, 8, 4))
        _, by_x, by_weight = outcome(function, x, labels, weight, **settings)
        upstream = torch.linspace(0.3, 2.1, 9, dtype=torch.float64)
        for learns, expected in ((x, by_x), (weight, by_weight)):
            learns.requires_grad_()
            value = function(x, labels, weight, reduction="none", impl="torch", **settings)
            (value * (upstream if value.dim() else 0.3)).sum().backward()
            torch.testing.assert_close(learns.grad, expected, rtol=1e-11, atol=1e-13)
            learns.requires_grad_(False)


def test_proxies_without_a_pass_are_dense(monkeypatch):
    """Several proxies a class and the dynamic assignment take `impl`, and refuse `max_memory`: they have no blocks."""
    monkeypatch.setattr(class_softmax, "class_softmax", None)
    x, labels, weight = batch((9, 8, 4))
    for overrides in ({"proxies_per_class": 2}, {"assignment": "dynamic"}):
        labels = labels % 4
        dense = losses.proxy_nca_loss(x, labels, weight, **overrides)
        assert torch.equal(losses.proxy_nca_loss(x, labels, weight, impl="torch", **overrides), dense)
        with pytest.raises(ValueError, match="max_memory must be left out"):
            losses.proxy_nca_loss(x, labels, weight, max_memory=2**20, **overrides)
    with pytest.raises(ValueError, match='unknown impl "cuda"'):
        losses.proxy_nca_loss(x, labels, weight, assignment="dynamic", impl="cuda")


@pytest.mark.parametrize("centers", [1, 3])
@pytest.mark.parametrize("block", [1, 2, 100])
def test_soft_triple_in_blocks_is_the_dense_one(centers, block, monkeypatch):
    blocks_of(monkeypatch, block)
    calls = []
    blocks = soft_triple._soft_triple_blocks
    monkeypatch.setattr(soft_triple, "_soft_triple_blocks", lambda *arguments: calls.append(1) or blocks(*arguments))
    for shape in SHAPES[:4]:
        x, labels, weight = batch(shape, centers)
        keywords = {"centers_per_class": centers, "margin": 0.1}
        dense = outcome(losses.soft_triple_loss, x, labels, weight, **keywords)
        assert not calls
        got = outcome(losses.soft_triple_loss, x, labels, weight, max_memory=1, **keywords)
        assert calls.pop() and max(errors(got, dense)) <= 1e-12, shape
    module = losses.SoftTripleLoss(7, 5, centers_per_class=centers, max_memory=2**20)
    assert "max_memory=1048576" in repr(module)


def test_auto_takes_the_kernel_where_it_has_been_measured(monkeypatch):
    """The choice alone; no GPU is needed."""
    x, weight = torch.empty(64, 8), torch.empty(1000, 8)
    monkeypatch.setattr(call, "_kernel_wins", lambda x, w: call.KERNEL_FROM is not None and call.KERNEL_FROM <= 64_000)
    monkeypatch.setattr(kernels, "can_run", lambda tensor: True)
    monkeypatch.setattr(call, "KERNEL_FROM", 64_000)
    assert call.class_path("auto", x, weight, None) == "triton"
    assert call.class_path("auto", x, weight, 2**40) == "dense"  # said to fit, so dense
    assert call.class_path("auto", x, weight, 2**16) == "torch"  # a run of the kernel takes more
    assert call.class_path("auto", x.double(), weight, None) == "dense"
    assert call.class_path("auto", x, weight, None, 3) == "dense"
    assert call.class_path("auto", x, weight, None, dense_first=True) == "dense"
    monkeypatch.setattr(class_softmax, "DENSE", 2**10)
    assert call.class_path("auto", x, weight, None, dense_first=True) == "triton"
    monkeypatch.undo()
    monkeypatch.setattr(kernels, "can_run", lambda tensor: True)
    monkeypatch.setattr(call, "KERNEL_FROM", 64_001)
    assert call.class_path("auto", x, weight, None) == "dense"


@pytest.mark.parametrize("form", ["normalized", "cosface", "arcface", "arcface, 3 centres", "sphereface", "proxy-nca"])
def test_dense_form_can_be_differentiated_twice(form):
    function, settings, centers = FORMS[form]
    for shape in ((5, 4, 3), (1, 1, 2)):
        x, labels, weight = batch(shape, centers)
        arguments = (x.requires_grad_(), weight.requires_grad_())
        step = partial(lambda a, b, labels: function(a, labels, b, **settings), labels=labels)
        assert gradcheck(step, arguments) and gradgradcheck(step, arguments), shape


@pytest.mark.parametrize("form", ["normalized", "cosface", "arcface", "proxy-nca", "proxy-nca, original"])
def test_dense_form_keeps_the_digits_of_a_small_loss(form):
    """Solved to 1e-5 and less, where 1 less the own class's part would have lost them in float32."""
    function, settings, _ = FORMS[form]
    weight = torch.eye(6, dtype=torch.float64)
    labels = torch.arange(6)
    x = weight + 0.05 * torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    x, weight = x.float(), weight.float()
    exact = outcome(function, x.double(), labels, weight.double(), **settings)
    got = outcome(function, x, labels, weight, **settings)
    for a, b in zip(got, exact, strict=True):
        assert float((a.double() - b).abs().max() / b.abs().max()) < 2e-5
    assert form not in ("normalized", "cosface") or 0 < float(exact[0].max()) < 1e-5


def test_arcface_has_one_value_near_the_poles_and_far_from_them(monkeypatch):
    x, labels, weight = batch((9, 7, 5))
    poles = torch.cat([weight, -weight, weight + 1e-9])
    assert losses.arcface_loss(poles, torch.arange(21) % 7, weight).isfinite()
    for straight in (False, True):
        outcomes = []
        for near_pole in (0.0, torch.inf):
            monkeypatch.setattr(angular, "NEAR_POLE", near_pole)
            outcomes.append(outcome(losses.arcface_loss, x, labels, weight, margin=2.0, straight_through=straight))
        assert max(errors(*outcomes)) < 1e-12


def test_bad_choices_are_one_sentence(monkeypatch):
    x, labels, weight = batch((4, 5, 3))
    with pytest.raises(ValueError, match='unknown impl "tritn"; did you mean "triton"\\? known: auto, torch, triton'):
        losses.cosface_loss(x, labels, weight, impl="tritn")
    monkeypatch.setattr(kernels, "installed", lambda: False)
    monkeypatch.setattr(kernels, "RECENT", True)
    words = r'impl="triton" is not possible here: triton is not installed \(pip install triton\); possible: auto, torch'
    for ask in (
        lambda: losses.CosFaceLoss(5, 3, impl="triton"),
        lambda: losses.sphereface_loss(x, labels, weight, impl="triton"),
    ):
        with pytest.raises(ValueError, match=words):
            ask()
    for rate in (0, -0.1, 1.5):
        with pytest.raises(ValueError, match=f"sample_rate must be > 0 and <= 1, got {rate}"):
            losses.ArcFaceLoss(5, 3, sample_rate=rate)


MEASURE = """
import sys, torch
sys.path.insert(0, sys.argv[1])
import measure
from nearkin import losses
torch.set_num_threads(1)
def step(classes, size):
    x, w = torch.randn(size, 64, requires_grad=True), weight[:classes].detach().requires_grad_()
    losses.arcface_loss(x, torch.arange(size) % classes, w, impl="torch").backward()
weight = torch.randn(200_000, 64)
step(100, 8)
step(100, 8)
print(measure.peak_mib(lambda: step(200_000, 256), "cpu"))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux's /proc")
def test_memory_is_the_gradient_and_a_block():
    """C = 200,000, B = 256, D = 64: one (B, C) matrix alone would be 195 MiB."""
    folder = Path(__file__).parents[2] / "benchmarks"
    frugal = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run([sys.executable, "-c", MEASURE, str(folder)], capture_output=True, text=True, env=frugal)
    assert done.returncode == 0, done.stderr
    gradient = 200_000 * 64 * 4 / 2**20
    assert float(done.stdout) < gradient + class_softmax.AUTOMATIC / 2**20 + 16


SAMPLED = {
    "normalized": losses.NormalizedSoftmaxLoss,
    "cosface": losses.CosFaceLoss,
    "arcface": losses.ArcFaceLoss,
    "arcface, 3 centres": lambda *size, **overrides: losses.ArcFaceLoss(*size, sub_centers=3, **overrides),
}


@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.parametrize("impl", ["auto", "torch"])
def test_sampled_classes_keep_the_batch(name, impl):
    x, labels, _ = batch((6, 100, 5))
    module = SAMPLED[name](100, 5, sample_rate=0.2, impl=impl).double()
    full = SAMPLED[name](100, 5, impl=impl).double()
    full.load_state_dict(module.state_dict())
    assert "sample_rate=0.2" in repr(module) and "sample_rate" not in repr(full)
    present = set(labels[labels >= 0].tolist())
    draws = []
    for seed in (0, 0, 1, 2):
        torch.manual_seed(seed)
        module.zero_grad()
        module(x, labels).backward()
        touched = module.weight.grad.view(100, -1).any(1).nonzero().squeeze(1).tolist()
        assert present <= set(touched) and len(touched) == 20
        draws.append(touched)
    assert draws[0] == draws[1] and draws[1] != draws[2] != draws[3]
    rows = torch.tensor(draws[3])
    each = module.weight.shape[0] // 100
    part = module.weight.detach().view(100, each, -1)[rows].flatten(0, 1)
    positions = torch.tensor([draws[3].index(c) if c >= 0 else -1 for c in labels.tolist()])
    function = getattr(
        losses, type(full).__name__.replace("Loss", "").lower() + "_loss", losses.normalized_softmax_loss
    )
    torch.manual_seed(2)
    torch.testing.assert_close(module(x, labels), function(x, positions, part, **full.settings))
    assert torch.equal(module.eval()(x, labels), full.eval()(x, labels))


def test_sampling_is_exact_at_rate_one_and_with_more_rows_than_classes():
    x, labels, _ = batch((60, 30, 5))
    full = losses.ArcFaceLoss(30, 5).double()
    for rate in (1.0, 0.1):  # 60 rows may hold all 30 classes: all are kept
        module = losses.ArcFaceLoss(30, 5, sample_rate=rate).double()
        module.load_state_dict(full.state_dict())
        before = torch.get_rng_state()
        assert torch.equal(module(x, labels), full(x, labels))
        assert torch.equal(before, torch.get_rng_state())


def test_sampling_reads_labels_as_the_whole_does(monkeypatch):
    module = losses.CosFaceLoss(100, 5, sample_rate=0.1)
    x = torch.randn(3, 5)
    assert float(module(x, torch.tensor([-1, -1, -1])).detach()) == 0
    torch.testing.assert_close(module(x[:2], torch.tensor([4, -1])).isfinite(), torch.tensor(True))
    with pytest.raises(ValueError, match=r"labels must be in 0\.\.99 \(or -1 for unknown\), got 100"):
        module(x, torch.tensor([0, 1, 100]))
    monkeypatch.setattr(nearkin.core.checks, "reads_values", lambda tensor: False)
    for bad in (100, -2, 10**12):
        assert bool(module(x, torch.tensor([0, 1, bad])).isnan())


# The kernel, through Triton's interpreter, in a separate process: the interpreter is chosen when triton is imported.

KERNEL_SHAPES = [(1, 1, 4), (1, 7, 3), (5, 2, 4), (33, 40, 16), (17, 97, 50), (2, 150, 8)]
WHOLE = [form for form in FORMS if form != "arcface, 3 centres"]
KERNEL_KINDS = [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "bfloat16")]


def plain_torch(form, x, labels, weight, *, reduction, annealing=0.5):
    """What one writes without a library, in the same type: how exact bfloat16 has to be."""
    normal, ids = torch.nn.functional.normalize, labels.clamp(min=0)
    cosine = normal(x) @ normal(weight).T
    own_cosine, length, cost = cosine.gather(1, ids[:, None]), x.norm(dim=1, keepdim=True), 0.0
    if form in ("normalized", "cosface", "proxy-nca"):
        scale = {"normalized": 20, "cosface": 64, "proxy-nca": 18}[form]
        logits, target = scale * cosine, scale * (own_cosine - 0.35 * (form == "cosface"))
    elif form.startswith("arcface"):
        if "2 centres" in form:
            every = cosine.view(len(x), -1, 2)
            cosine, own_cosine = every.amax(2), every.amax(2).gather(1, ids[:, None])
        angle = own_cosine.clamp(-0.999, 0.999).acos()
        wide = torch.where(angle < math.pi - 0.5, (angle + 0.5).cos(), own_cosine - 0.5 * math.sin(0.5))
        logits, target = 64 * cosine, 64 * wide
    elif form == "adaface":
        quality = (0.7 * (length.detach() - 4) / 3.001).clamp(-1, 1)
        angle = (own_cosine.clamp(-0.999, 0.999).acos() - 0.4 * quality).clamp(1e-3, math.pi - 1e-3)
        logits, target = 64 * cosine, 64 * (angle.cos() - 0.4 * quality - 0.4)
    elif form == "magface":
        size, angle = length.clamp(1, 9), own_cosine.clamp(-0.999, 0.999).acos()
        margin = 0.45 + 0.35 / 8 * (size - 1)
        wide = torch.where(angle < math.pi - margin, (angle + margin).cos(), own_cosine - margin * margin.sin())
        cost = 35 * (size / 81 + 1 / size + (1 / 81 - 1) * (length - 1).clamp(max=0)).squeeze(1) * (labels >= 0)
        logits, target = 64 * cosine, 64 * wide
    else:
        logits = length * cosine
        target = length * (annealing * own_cosine + angles.psi_and_slope(own_cosine, 4)[0]) / (1 + annealing)
    logits = logits.scatter(1, ids[:, None], target)
    return torch.nn.functional.cross_entropy(logits.float(), ids, reduction="none") * (labels >= 0) + cost


def plain_anchor(x, labels, weight):
    """The same of Proxy-Anchor."""
    normal = torch.nn.functional.normalize
    cosine, own = (normal(x) @ normal(weight).T).float(), torch.nn.functional.one_hot(labels.clamp(min=0), len(weight))
    own, known = own.bool(), (labels >= 0)[:, None]
    pull = torch.where(own & known, -32 * (cosine - 0.1), -torch.inf).logsumexp(0)
    push = torch.where(~own & known, 32 * (cosine + 0.1), -torch.inf).logsumexp(0)
    pulls, pushes = (torch.nn.functional.softplus(side) for side in (pull, push))
    return pulls.sum() / (own & known).any(0).sum() + pushes.mean()


def kernel_cases():
    """How the pass is cut, shape, types, form: every form once, every type, odd shapes, all ways to cut."""
    f32, bf16, _, mixed = KERNEL_KINDS
    for form in [*FORMS, "arcface, 2 centres"]:
        yield {"walk": 64}, (17, 37, 12), f32, form
    for cut in ({}, {"walk": 64}, {"copies": False}, {"FUSED": False}):
        yield cut, KERNEL_SHAPES[4], bf16, "sphereface" if not cut else "arcface"
    for shape in KERNEL_SHAPES:
        for kinds in KERNEL_KINDS if shape == KERNEL_SHAPES[3] else (f32, bf16):
            yield {"copies": False} if kinds == f32 else {}, shape, kinds, "cosface"
    yield {}, (33, 40, 16), mixed, "proxy-anchor"


def compared(form, shape, kinds, seed=0, device="cpu"):
    """Errors of the kernel, and of what it must be as exact as: the dense loss, or of bfloat16 plain torch."""
    function, settings, centers = FORMS.get(form, (losses.arcface_loss, {"sub_centers": 2}, 2))
    x, labels, weight = (t.to(device) for t in batch(shape, centers, seed=seed))
    x, weight = x.to(getattr(torch, kinds[0])), weight.to(getattr(torch, kinds[1]))
    settings = {key: s.to(device) if isinstance(s, torch.Tensor) else s for key, s in settings.items()}
    exact = outcome(function, x.double(), labels, weight.double(), **settings)
    got = outcome(function, x, labels, weight, impl="triton", **settings)
    if kinds[0] == kinds[1] == "bfloat16":
        expected = outcome(
            lambda *arguments, **overrides: plain_torch(form, *arguments, **overrides), x, labels, weight
        )
    else:
        expected = outcome(function, x, labels, weight, **settings)
    assert [t.dtype for t in got] == [t.dtype for t in expected]
    return errors(got, exact), errors(expected, exact)


def whole_cases():
    """Shape, types, form and reduction of the losses that are one node of the graph."""
    f32, bf16, f16, mixed = KERNEL_KINDS
    for place, form in enumerate([*WHOLE, "arcface, 2 centres"]):
        yield (17, 37, 12), f32, form, ("mean", "active", "sum")[place % 3]
    halves = ("normalized", "cosface", "arcface", "arcface, 2 centres", "sphereface", "proxy-nca", "adaface", "magface")
    for form in halves:
        yield (33, 40, 16), bf16, form, "mean"
    for shape in KERNEL_SHAPES:
        for kinds in (f16, mixed) if shape == KERNEL_SHAPES[3] else (f32,):
            yield shape, kinds, "arcface", "sum"
    for shape, kinds in (
        ((33, 40, 16), bf16),
        ((33, 40, 16), mixed),
        (KERNEL_SHAPES[0], f32),
        (KERNEL_SHAPES[4], bf16),
    ):
        yield shape, kinds, "proxy-anchor", "mean"
    yield (5, 1, 4), f32, "proxy-nca, original", "mean"  # no other class
    yield KERNEL_SHAPES[4], bf16, "cosface", "active"


def loss_outcome(function, x, labels, weight, reduction, **keywords):
    """One value, and the gradients under an upstream that is not 1."""
    x, weight = (t.detach().clone().requires_grad_() for t in (x, weight))
    value = function(x, labels, weight, reduction=reduction, **keywords)
    value.backward(torch.full_like(value, -1.7))
    return [value.detach(), x.grad, weight.grad]


def loss_compared(form, shape, kinds, reduction, seed=0, device="cpu"):
    """Errors of the kernels that compute a complete loss, and of the dense loss, or of bfloat16 plain torch."""
    function, settings, centers = FORMS.get(form, (losses.arcface_loss, {"sub_centers": 2}, 2))
    x, labels, weight = (t.to(device) for t in batch(shape, centers, seed=seed))
    x, weight = x.to(getattr(torch, kinds[0])), weight.to(getattr(torch, kinds[1]))
    settings = {key: s.to(device) if isinstance(s, torch.Tensor) else s for key, s in settings.items()}
    exact = loss_outcome(function, x.double(), labels, weight.double(), reduction, **settings)
    got = loss_outcome(function, x, labels, weight, reduction, impl="triton", **settings)
    if kinds[0] == kinds[1] == "bfloat16":

        def plainly(*arguments, reduction):
            if form == "proxy-anchor":
                return plain_anchor(*arguments)
            value = plain_torch(form, *arguments, reduction=reduction)
            return value.sum() / ((labels >= 0).sum() if reduction == "mean" else (value > 0).sum().clamp(min=1))

        expected = loss_outcome(plainly, x, labels, weight, reduction)
    else:
        expected = loss_outcome(function, x, labels, weight, reduction, **settings)
    assert [t.dtype for t in got] == [t.dtype for t in expected]
    return errors(got, exact), errors(expected, exact)


def judge_loss():
    """What the tests of the fused losses read, as JSON."""
    class_dense_ops.MOST = 0  # the scores are not stored
    served, results = [], {}
    for module in (class_loss_ops, fused_anchors):
        apply = module._Loss.apply
        module._Loss.apply = lambda *arguments, apply=apply: served.append(1) or apply(*arguments)
    for shape, kinds, form, reduction in whole_cases():
        seeds = range(3 if shape[0] <= 5 else 1)
        served.clear()
        tried = [loss_compared(form, shape, kinds, reduction, seed) for seed in seeds]
        got, expected = (torch.tensor(each).mean(0).tolist() for each in zip(*tried, strict=True))
        results[f"{shape} {kinds} {form} {reduction}"] = [got, expected, len(served) / len(seeds)]
    x, labels, weight = batch((9, 11, 4), dtype=torch.float32)
    value = FORMS["arcface"][0]
    anchor = FORMS["proxy-anchor"][0]
    nobody = loss_outcome(anchor, x, torch.full_like(labels, -1), weight, "mean", impl="triton")
    results["no known label is exactly 0 of Proxy-Anchor"] = not any(bool(t.any()) for t in nobody)
    facts = {
        "unknown": loss_outcome(value, x, torch.full_like(labels, -1), weight, "mean", impl="triton"),
        "int32": loss_outcome(value, x, labels.int(), weight, "mean", impl="triton"),
        "int64": loss_outcome(value, x, labels, weight, "mean", impl="triton"),
    }
    results["no known label is exactly 0"] = not any(bool(t.any()) for t in facts["unknown"])
    results["labels of 32 bits are the same"] = all(map(torch.equal, facts["int32"], facts["int64"]))
    for poison in (math.nan, math.inf):
        for tensor, row in ((x, 0), (x, 2), (weight, 0), (weight, 10)):
            poisoned = tensor.clone()
            poisoned[row, 1] = poison
            arguments = (poisoned, labels, weight) if tensor is x else (x, labels, poisoned)
            name = f"{poison} in {'x' if tensor is x else 'weight'} {row}"
            results[name] = math.isnan(float(value(*arguments, impl="triton")))
            results[f"{name}, Proxy-Anchor"] = math.isnan(float(losses.proxy_anchor_loss(*arguments, impl="triton")))
    pair = weight[:10].repeat_interleave(2, 0)  # the second of two equal centres never speaks
    pair[5, 1] = math.nan
    results["a silent centre"] = math.isnan(float(value(x, labels % 10, pair, sub_centers=2, impl="triton")))
    far = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0], [1e-30, 0.0], [0.0, 1e30], [2.0, 1e-7]])
    for kind in (torch.float32, torch.bfloat16):
        for name in ("arcface", "sphereface", "proxy-nca", "proxy-anchor"):
            function, settings, _ = FORMS[name]
            for ids in (torch.arange(6), torch.tensor([1, 0, 3, 4, 2, 0])):
                got = loss_outcome(function, far.to(kind), ids, far.to(kind), "mean", impl="triton", **settings)
                results[f"extremes {kind} {name} {ids.tolist()}"] = all(bool(t.isfinite().all()) for t in got)
    x, labels, weight = batch((9, 8, 4), dtype=torch.float32)
    weight[[0, 5]], x[[1, 8]] = 0, 0
    for name in ("arcface", "sphereface", "proxy-nca", "proxy-nca, original", "proxy-anchor"):
        function, settings, _ = FORMS[name]
        exact = loss_outcome(function, x.double(), labels, weight.double(), "mean", **settings)
        got = loss_outcome(function, x, labels, weight, "mean", impl="triton", **settings)
        results[f"zeros {name}"] = max(errors(got, exact)) < 1e-5
    served.clear()
    module = losses.AdaCosLoss(8, 4, impl="triton")
    module(x, labels).backward()
    frozen = losses.CosFaceLoss(8, 4, impl="triton").requires_grad_(False)
    frozen(x.requires_grad_(), labels).backward()
    results["modules"] = len(served) == 2 and frozen.weight.grad is None and bool(x.grad.any())
    served.clear()
    learned = torch.tensor(7.0, requires_grad=True)
    losses.normalized_softmax_loss(x, labels, weight, scale=learned, impl="triton").backward()
    results["a scale that learns goes another way"] = not served and bool(learned.grad)
    nearkin.core.checks.reads_values = lambda tensor: False
    results["out of range"] = math.isnan(float(losses.cosface_loss(x, labels + 5, weight, impl="triton").detach()))
    results["out of range was whole"] = len(served) == 1
    print(json.dumps(results))


def judge_kernel():
    """What the tests below read, as JSON: errors of the kernel and of who it must match, by float64; who served."""
    from nearkin.kernels import class_kernels

    class_dense_ops.MOST = 0  # the scores are not stored
    served, results, tile = [], {}, class_kernels.INTERPRETED
    call.ClassCall.proxy_anchor_kernel = lambda *_: None  # the pass alone, as shards take it
    for module in (fused, fused_anchors):
        apply = module._Pass.apply
        module._Pass.apply = lambda *arguments, apply=apply: served.append(1) or apply(*arguments)
    for cut, shape, kinds, form in kernel_cases():
        walk = cut.get("walk", 32)
        fused._part_size = lambda rows, weight, max_memory, walk=walk: walk
        fused.FUSED = cut.get("FUSED", True)
        class_kernels.INTERPRETED = tile._replace(copies=cut.get("copies", True))
        seeds = range(3 if shape[0] <= 5 else 1)  # few numbers are close by luck, or not
        served.clear()
        tried = [compared(form, shape, kinds, seed) for seed in seeds]
        got, expected = (torch.tensor(each).mean(0).tolist() for each in zip(*tried, strict=True))
        results[f"{cut} {shape} {kinds} {form}"] = [got, expected, len(served) / len(seeds)]
    x, labels, weight = batch((5, 9, 4), dtype=torch.float32)
    for poison in (math.nan, math.inf):
        poisoned = weight.clone()
        poisoned[8, 1] = poison
        for name in ("cosface", "proxy-anchor"):
            value = FORMS[name][0](x, labels, poisoned, impl="triton", reduction="sum")
            results[f"poison {poison} {name}"] = math.isnan(float(value))
    far = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0], [1e-30, 0.0], [0.0, 1e30]])
    for dtype in (torch.float32, torch.bfloat16):
        for name in ("arcface", "proxy-nca", "proxy-anchor"):
            function, settings, _ = FORMS[name]
            turned = torch.tensor([1, 0, 3, 4, 2])
            got = outcome(function, far.to(dtype), turned, far.to(dtype), impl="triton", **settings)
            results[f"extremes {dtype} {name}"] = all(bool(t.isfinite().all()) for t in got)
    x, labels, weight = batch((9, 8, 4), dtype=torch.float32)
    weight[[0, 5]], x[[1, 8]] = 0, 0
    for kind in (torch.float32, torch.bfloat16):
        bound = 1e-5 if kind == torch.float32 else 2e-2
        for name in ("proxy-nca", "proxy-anchor", "sphereface"):
            function, settings, _ = FORMS[name]
            exact = outcome(function, x.to(kind).double(), labels, weight.to(kind).double(), **settings)
            got = outcome(function, x.to(kind), labels, weight.to(kind), impl="triton", **settings)
            results[f"zeros {kind} {name}"] = max(errors(got, exact)) < bound
    half = weight.bfloat16().requires_grad_()
    half.grad_dtype = torch.float32
    losses.cosface_loss(x.bfloat16(), labels, half, impl="triton").backward()
    results["extremes, float32 gradient of bfloat16"] = half.grad.dtype == torch.float32
    served.clear()
    outcome(losses.cosface_loss, x.double(), labels, weight.double(), impl="triton")
    outcome(losses.cosface_loss, x, labels, weight, impl="triton", max_memory=2**13)  # too little for a run
    results["not for a kernel"] = len(served)
    print(json.dumps(results))


@pytest.fixture(scope="module")
def kernel():
    return judged_by("judge_kernel")


@pytest.fixture(scope="module")
def fused_loss():
    return judged_by("judge_loss")


def judged_by(judge):
    return interpreted(__file__, judge)


@pytest.mark.slow
def test_kernel_is_as_exact_as_torch(kernel):
    """As the dense loss; of bfloat16, whose derivatives are rounded once, as plain torch in that type."""
    cases = {name: case for name, case in kernel.items() if isinstance(case, list)}
    assert len(cases) == len(list(kernel_cases()))
    for name, (got, expected, _) in cases.items():
        for ours, theirs in zip(got, expected, strict=True):
            assert ours <= theirs + ULP, (name, got, expected)


def test_kernel_serves_or_falls_back(kernel):
    for name, case in kernel.items():
        if isinstance(case, list):
            assert case[2] == (0 if "3 centres" in name else 1), name
    assert kernel["not for a kernel"] == 0


def test_kernel_is_finite_or_tainted(kernel):
    judged = [name for name in kernel if name.startswith(("poison", "extremes", "zeros"))]
    assert len(judged) == 17
    assert not [name for name in judged if kernel[name] is not True]


@pytest.mark.slow
def test_whole_losses_are_as_exact_as_torch(fused_loss):
    cases = {name: case for name, case in fused_loss.items() if isinstance(case, list)}
    assert len(cases) == len(list(whole_cases()))
    for name, (got, expected, served) in cases.items():
        assert served == 1, name
        for ours, theirs in zip(got, expected, strict=True):
            assert ours <= theirs + ULP, (name, got, expected)


def test_whole_losses_at_the_edges(fused_loss):
    facts = {name: case for name, case in fused_loss.items() if not isinstance(case, list)}
    assert len(facts) == 45
    assert not [name for name, fact in facts.items() if fact is not True]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kinds", KERNEL_KINDS, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 4), (1, 700, 64), (63, 1037, 72), (257, 40_001, 512)], ids=str)
def test_whole_losses_on_a_gpu(shape, kinds, monkeypatch):
    monkeypatch.setattr(class_dense_ops, "MOST", 0)
    half = kinds[0] == kinds[1] == "bfloat16"
    forms = (
        ("normalized", "cosface", "arcface", "sphereface", "adaface", "magface", "proxy-anchor")
        if half
        else (*WHOLE, "arcface, 2 centres")
    )
    for place, form in enumerate(forms):
        reduction = ("mean", "active")[place % 2] if half else ("mean", "active", "sum")[place % 3]
        if "adacos" in form and shape[1] < 3:
            continue
        got, expected = loss_compared(form, shape, kinds, reduction, device="cuda")
        for ours, theirs in zip(got, expected, strict=True):
            assert ours <= theirs + 1e-6, (form, got, expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_pass_on_a_gpu_starts_in_a_new_thread():
    """As autograd's threads do, for a form that was compiled in another: no launch has made a context there."""
    from nearkin.kernels import class_kernels

    rows, weight = (torch.randn(n, 64, device="cuda").bfloat16() for n in (128, 1000))
    ids = torch.zeros(128, device="cuda", dtype=torch.int32)
    operands = class_kernels.Operands(rows, torch.ones(128, device="cuda"), weight, class_kernels.lengths(weight), ids)
    results = [class_kernels.scan(operands, 256) for _ in range(2)]
    thread = threading.Thread(target=lambda: results.append(class_kernels.scan(operands, 256)))
    thread.start()
    thread.join()
    assert len(results) == 3 and all(map(torch.equal, results[0], results[2]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kinds", KERNEL_KINDS, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 1, 4), (1, 700, 64), (63, 1037, 72), (257, 40_001, 512), (1024, 70_000, 128)], ids=str
)
def test_kernel_on_a_gpu(shape, kinds, monkeypatch):
    monkeypatch.setattr(class_dense_ops, "MOST", 0)
    half = kinds[0] == kinds[1] == "bfloat16"
    forms = ("cosface", "arcface", "sphereface") if half else ("cosface", "sphereface", "proxy-nca", "proxy-anchor")
    for form in forms if half else (*forms, "arcface, 2 centres"):
        got, expected = compared(form, shape, kinds, device="cuda")
        for ours, theirs in zip(got, expected, strict=True):
            assert ours <= theirs + 1e-6, (form, got, expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_kernel_is_the_same_twice_on_a_gpu(monkeypatch):
    monkeypatch.setattr(class_dense_ops, "MOST", 0)
    x, labels, weight = (t.cuda() for t in batch((300, 50_001, 256), dtype=torch.bfloat16))
    runs = [outcome(losses.arcface_loss, x, labels, weight, impl="triton") for _ in range(2)]
    assert all(map(torch.equal, *runs))
    runs = [loss_outcome(losses.arcface_loss, x, labels, weight, "mean", impl="triton") for _ in range(2)]
    assert all(map(torch.equal, *runs))


EVERY_SIZE = {
    "normalized": losses.NormalizedSoftmaxLoss,
    "heated": losses.HeatedSoftmaxLoss,
    "adacos": losses.AdaCosLoss,
    "cosface": losses.CosFaceLoss,
    "arcface": losses.ArcFaceLoss,
    "arcface, 3 centres": partial(losses.ArcFaceLoss, sub_centers=3),
    "arcface, 7 centres": partial(losses.ArcFaceLoss, sub_centers=7),
    "sphereface": losses.SphereFaceLoss,
    "adaface": losses.AdaFaceLoss,
    "magface": losses.MagFaceLoss,
    "center": losses.CenterLoss,
    "proxy-nca": losses.ProxyNCALoss,
    "proxy-nca, 3 proxies": partial(losses.ProxyNCALoss, proxies_per_class=3),
    "proxy-anchor": losses.ProxyAnchorLoss,
    "soft-triple": losses.SoftTripleLoss,
    "soft-triple, 1 centre": partial(losses.SoftTripleLoss, centers_per_class=1),
    "soft-triple, 2 centres": partial(losses.SoftTripleLoss, centers_per_class=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 1), (2, 5), (3, 1), (1000, 2), (10_000, 128), (1_000_000, 1)], ids=str)
@pytest.mark.parametrize("name", EVERY_SIZE)
def test_every_number_of_classes_and_dimensions(name, shape):
    """Built, learned from, and the same loss in float32 as in float64."""
    classes, dim = shape
    if name == "adacos" and classes < 3:
        pytest.skip("two classes give scale 0, which is refused")
    if classes * dim > 10**5 and name.endswith(("proxies", "7 centres")):
        pytest.skip("as with fewer rows per class, to save seconds")
    torch.manual_seed(1)
    module, x = EVERY_SIZE[name](classes, dim), torch.randn(4, dim)
    labels = torch.tensor([0, classes - 1, classes // 2, -1])
    x.requires_grad_()
    value = module(x, labels)
    value.backward()
    assert all(bool(t.grad.isfinite().all()) for t in (x, *module.parameters()))
    twin = EVERY_SIZE[name](classes, dim)
    twin.load_state_dict({key: t.detach() for key, t in module.state_dict().items()})
    if classes < 10**5 and not any(True for _ in module.buffers()):  # a buffer has moved on
        torch.testing.assert_close(value.double(), twin.double()(x.detach().double(), labels), rtol=1e-4, atol=1e-6)
