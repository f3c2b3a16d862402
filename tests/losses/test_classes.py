"""Losses over class weights: whole and in blocks of classes they are the same; sampled, shared, compiled, at the edges.

`test_contract.py` judges each by its float64 loop, `test_pinned_classes.py` by what earlier versions gave.
"""

import math
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import nearkin
from nearkin import kernels, losses
from nearkin.core import class_blocks
from nearkin.training.checkpoint import checkpoints, state


def anchor(x, labels, weight, *, reduction="mean", **settings):
    """It has one value per batch."""
    return losses.proxy_anchor_loss(x, labels, weight, **settings)


def biased(function, **more):
    """A loss with biases, and centres where it has them, made from the class weights."""

    def loss(x, labels, weight, **settings):
        steps = torch.linspace(-0.7, 0.9, weight.numel(), dtype=weight.dtype, device=weight.device)
        centers = [steps.view(weight.shape)] if function is losses.center_loss else []
        return function(x, labels, weight, weight.sum(1) / 3, *centers, **more, **settings)

    return loss


FORMS = {
    "normalized": (losses.normalized_softmax_loss, {}, 1),
    "normalized, tensor": (losses.normalized_softmax_loss, {"scale": torch.tensor(7.0)}, 1),
    "cosface": (losses.cosface_loss, {}, 1),
    "arcface": (losses.arcface_loss, {}, 1),
    "arcface, wide": (losses.arcface_loss, {"margin": 2.5, "scale": 8.0}, 1),
    "arcface, straight through": (losses.arcface_loss, {"straight_through": True}, 1),
    "arcface, 3 centres": (losses.arcface_loss, {"sub_centers": 3}, 3),
    "sphereface": (losses.sphereface_loss, {"annealing": 0.5}, 1),
    "sphereface, tensor": (losses.sphereface_loss, {"annealing": torch.tensor(3.0), "margin": 3}, 1),
    "adaface": (losses.adaface_loss, {"mean": 4.0, "std": torch.tensor(3.0), "concentration": 0.7}, 1),
    "magface": (losses.magface_loss, {"lower_length": 1.0, "upper_length": 9.0}, 1),
    "adacos": (losses.adacos_loss, {"scale": 9.0}, 1),
    "heated": (biased(losses.heated_softmax_loss), {}, 1),
    "heated, raw": (biased(losses.heated_softmax_loss, normalize=False), {"scale": 1.5}, 1),
    "center": (biased(losses.center_loss), {}, 1),
    "proxy-nca": (losses.proxy_nca_loss, {}, 1),
    "proxy-nca, original": (losses.proxy_nca_loss, {"form": "original", "scale": 2.0}, 1),
    "proxy-nca, 3 proxies": (losses.proxy_nca_loss, {"proxies_per_class": 3}, 3),
    "proxy-anchor": (anchor, {}, 1),
    "soft-triple": (losses.soft_triple_loss, {"centers_per_class": 3, "margin": 0.1}, 3),
    "soft-triple, 1 centre": (losses.soft_triple_loss, {"centers_per_class": 1}, 1),
}
CONSTANTS = {"arcface, straight through", "adaface"}  # part of their gradient is a constant
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


def outcome(function, x, labels, weight, **settings):
    """Values an anchor, and the gradients under an upstream that is nowhere 1."""
    x, weight = (t.detach().clone().requires_grad_() for t in (x, weight))
    value = function(x, labels, weight, reduction="none", **settings)
    upstream = torch.linspace(0.3, 2.1, value.numel(), dtype=value.dtype, device=value.device)
    value.backward(upstream.view(value.shape))
    return [value.detach(), x.grad, weight.grad]


def errors(got, exact):
    """The largest error of each tensor, by the size of the largest entry."""
    pairs = zip(got, exact, strict=True)
    return [float((a.double() - b).abs().max() / b.abs().max().clamp(min=1e-3)) for a, b in pairs]


def blocks_of(monkeypatch, number):
    """From now on that many classes pass by at a time."""
    monkeypatch.setattr(class_blocks, "fits", lambda *_: False)
    monkeypatch.setattr(class_blocks, "block", lambda x, weight, form, max_memory: number * form.centers)


@every_form
@pytest.mark.parametrize("block", [1, 3, 10**6])
def test_blocks_equal_the_whole(form, block, monkeypatch):
    function, settings, centers = FORMS[form]
    for shape in SHAPES:
        if (form == "adacos" and shape[1] < 3) or shape[1] > 300 * block:
            continue
        x, labels, weight = batch(shape, centers)
        with monkeypatch.context() as patch:
            whole = outcome(function, x, labels, weight, **settings)
            blocks_of(patch, block)
            for ids in (labels, labels.int()):
                assert max(errors(outcome(function, x, ids, weight, **settings), whole)) <= 1e-12, shape


@every_form
@pytest.mark.parametrize("kinds", [("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16")], ids=str)
def test_blocks_are_as_exact_as_the_whole(form, kinds, monkeypatch):
    function, settings, centers = FORMS[form]
    x, labels, weight = batch((24, 300, 32), centers)
    x, weight = x.to(getattr(torch, kinds[0])), weight.to(getattr(torch, kinds[1]))
    exact = outcome(function, x.double(), labels, weight.double(), **settings)
    whole = outcome(function, x, labels, weight, **settings)
    blocks_of(monkeypatch, 64)
    got = outcome(function, x, labels, weight, **settings)
    assert [t.dtype for t in got] == [t.dtype for t in whole]
    rounded = 2 if form.startswith(("heated", "center")) else 1  # biases here are a function of the weights
    for ours, theirs in zip(errors(got, exact), errors(whole, exact), strict=True):
        assert ours <= rounded * theirs + ULP


@every_form
def test_derivatives(form, monkeypatch):
    """The first one whole and in blocks; the second whole, and refused in blocks."""
    function, settings, centers = FORMS[form]
    if form == "adaface":
        settings = settings | {"concentration": 0.0}  # else lengths count, which test_contract.py holds fixed
    for shape in ((4, 5, 3), (1, 1, 2)):
        if form == "adacos" and shape[1] < 3:
            continue
        x, labels, weight = batch(shape, centers, seed=3)
        inputs = (x.requires_grad_(), weight.requires_grad_())
        step = partial(lambda a, b, labels: function(a, labels, b, reduction="mean", **settings), labels=labels)
        if form not in CONSTANTS:
            assert gradcheck(step, inputs) and gradgradcheck(step, inputs), shape
        with monkeypatch.context() as patch:
            blocks_of(patch, 2)
            assert form == "arcface, straight through" or gradcheck(step, inputs), shape
            with pytest.raises(RuntimeError, match=r"has no second derivative; take its gradient without"):
                torch.autograd.grad(step(*inputs), inputs, create_graph=True)


def test_a_learned_scale_learns(monkeypatch):
    x, labels, weight = batch((6, 9, 4))
    slopes = []
    for _ in range(2):
        scale = torch.tensor(11.0, dtype=torch.float64, requires_grad=True)
        losses.normalized_softmax_loss(x, labels, weight, scale=scale).backward()
        slopes.append(scale.grad)
        blocks_of(monkeypatch, 2)
    torch.testing.assert_close(*slopes, rtol=1e-12, atol=0)
    scale = torch.tensor(11.0, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda s: losses.normalized_softmax_loss(x, labels, weight, scale=s), scale)


def test_adacos_scale_in_blocks_is_that_of_the_whole(monkeypatch):
    x, labels, weight = batch((12, 30, 6))
    scales = []
    for _ in range(2):
        scales.append(losses.adacos_scale(x, labels, weight, torch.tensor(5.0).double()))
        blocks_of(monkeypatch, 4)
    torch.testing.assert_close(*scales, rtol=1e-12, atol=0)
    assert float(losses.adacos_scale(x[:0], labels[:0], weight, torch.tensor(5.0))) == 5.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("blocks", [False, True])
def test_extremes_are_finite(blocks, dtype, monkeypatch):
    """Cosines of exactly ±1 at scale 64, zero rows, norms from 1e-30 to 1e30, nobody known, nobody there."""
    if blocks:
        blocks_of(monkeypatch, 2)
    weight = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0], [1e-30, 0.0], [0.0, 1e30]], dtype=dtype)
    x = torch.tensor([[2.0, 0.0], [-3.0, 0.0], [0.0, 0.0], [1e-30, 1e-30], [1e30, 0.0]], dtype=dtype)
    for labels in (torch.arange(5), torch.tensor([1, 0, 3, 4, 2]), torch.full((5,), -1)):
        for form, (function, settings, centers) in FORMS.items():
            if centers > 1 or form in ("heated, raw", "center"):  # whose logits grow with the lengths
                continue
            got = outcome(function, x, labels, weight, **settings)
            assert all(bool(t.isfinite().all()) for t in got), form
            if bool((labels < 0).all()) and "nca" not in form:
                assert not any(bool(t.any()) for t in got)
    nobody = outcome(losses.arcface_loss, x[:0], torch.arange(0), weight)
    assert nobody[0].shape == (0,) and not bool(nobody[2].any())
    empty = losses.proxy_anchor_loss(x[:0].requires_grad_(), torch.arange(0), weight.requires_grad_())
    empty.backward()
    assert float(empty.detach()) == 0 and not bool(weight.grad.any())


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("blocks", [False, True])
@every_form
def test_poison_is_never_a_plausible_number(form, blocks, poison, monkeypatch):
    if blocks:
        blocks_of(monkeypatch, 2)
    function, settings, centers = FORMS[form]
    x, labels, weight = batch((5, 9, 4), centers, dtype=torch.float32)
    for tensor, row in ((x, 0), (x, 2), (weight, 0), (weight, 8)):
        poisoned = tensor.clone()
        poisoned[row, 1] = poison
        x_, w_ = (poisoned, weight) if tensor is x else (x, poisoned)
        assert bool(function(x_, labels, w_, **settings).isnan())


@pytest.mark.parametrize("blocks", [False, True])
def test_out_of_range_is_nan_where_values_are_not_read(blocks, monkeypatch):
    if blocks:
        blocks_of(monkeypatch, 2)
    x, labels, weight = batch((5, 9, 4))
    labels[0] = 9
    with pytest.raises(ValueError, match=r"labels must be in 0\.\.8"):
        losses.arcface_loss(x, labels, weight)
    monkeypatch.setattr(nearkin.core.checks, "reads_values", lambda tensor: False)
    for function in (losses.arcface_loss, losses.proxy_anchor_loss, losses.proxy_nca_loss):
        assert bool(function(x, labels, weight).isnan())


@pytest.mark.parametrize("blocks", [False, True])
@every_form
def test_autocast_changes_nothing(form, blocks, monkeypatch):
    if blocks:
        blocks_of(monkeypatch, 4)
    function, settings, centers = FORMS[form]
    x, labels, weight = batch((8, 30, 6), centers, dtype=torch.float32)
    plain = outcome(function, x, labels, weight, **settings)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, outcome(function, x, labels, weight, **settings), plain))


def test_a_half_weight_may_keep_a_float32_gradient(monkeypatch):
    blocks_of(monkeypatch, 4)
    x, labels, weight = batch((8, 30, 6), dtype=torch.float32)
    if not hasattr(weight, "grad_dtype"):
        pytest.skip("this torch keeps gradients in the type of the weight")
    half = weight.bfloat16().requires_grad_()
    half.grad_dtype = torch.float32
    losses.cosface_loss(x, labels, half).backward()
    exact = half.detach().double().requires_grad_()
    losses.cosface_loss(x.double(), labels, exact).backward()
    assert half.grad.dtype == torch.float32
    assert errors([half.grad], [exact.grad])[0] < 1e-5


@pytest.mark.parametrize("blocks", [False, True])
@every_form
def test_compiles_whole(form, blocks, monkeypatch):
    function, settings, centers = FORMS[form]
    x, labels, weight = batch((8, 10, 6), centers, dtype=torch.float32)
    if blocks:
        settings = settings | {"max_memory": 8_000}
        assert not class_blocks.fits(x, weight, 8_000)
    torch._dynamo.reset()
    eager = outcome(function, x, labels, weight, **settings)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(outcome(compiled, x, labels, weight, **settings), eager, rtol=1e-5, atol=1e-5)


def test_the_road_is_chosen_by_size(monkeypatch):
    x, labels, weight = batch((8, 30, 6))
    calls = []
    scan = class_blocks.scan
    monkeypatch.setattr(class_blocks, "scan", lambda *task: calls.append(task[-1]) or scan(*task))
    whole = losses.arcface_loss(x, labels, weight)
    assert not calls
    needed = 2 * class_blocks.PAIR * 8 * 30 + class_blocks.COORDINATE * 6 * 38
    losses.arcface_loss(x, labels, weight, max_memory=needed)
    assert not calls
    torch.testing.assert_close(losses.arcface_loss(x, labels, weight, max_memory=needed - 1), whole)
    assert calls == [needed - 1]
    monkeypatch.setattr(class_blocks, "WHOLE", needed - 1)
    losses.arcface_loss(x, labels, weight)
    assert calls[1:] == [None]
    with pytest.raises(ValueError, match="max_memory must be at least what the anchors and one class take in bytes: "):
        losses.arcface_loss(x, labels, weight, max_memory=1000)
    with pytest.raises(TypeError, match=r"max_memory must be a whole number, got 1\.5"):
        losses.ArcFaceLoss(3, 4, max_memory=1.5)


def test_the_kernel_is_taken_where_it_serves(monkeypatch):
    monkeypatch.setattr(kernels, "installed", lambda: True)
    monkeypatch.setattr(kernels, "FROM", 64_000)

    def tensor(rows, **more):
        facts = {"shape": (rows, 8), "is_cuda": True, "dtype": torch.bfloat16} | more
        return SimpleNamespace(**facts, is_contiguous=lambda: True, data_ptr=lambda: 64)

    x, weight = tensor(64), tensor(1000)
    assert kernels.run(x, weight, None) == kernels.RUN
    assert kernels.run(x, weight, 64 * 8 * 64 + 160 * 300) == 256  # whole steps of what the memory holds
    assert kernels.run(x, weight, 64 * 8 * 64 + 160 * 100) == 0
    for other in (tensor(64, dtype=torch.float32), tensor(64, is_cuda=False), tensor(63), tensor(64, shape=(64, 9))):
        assert kernels.run(other, weight, None) == 0
    for refused in ("HeatedSoftmaxLoss", "CenterLoss", "ProxyAnchorLoss", "SoftTripleLoss"):
        with pytest.raises(TypeError, match='unknown setting "kernel"'):
            getattr(losses, refused)(5, 3, kernel=False)
    assert losses.ArcFaceLoss(5, 3, kernel=False).kernel is False


@pytest.mark.parametrize("form", ["proxy-nca", "proxy-nca, 3 proxies", "proxy-anchor", "cosface", "sphereface"])
def test_zero_rows_in_blocks_are_those_of_the_whole(form, monkeypatch):
    function, settings, centers = FORMS[form]
    x, labels, weight = batch((9, 8, 4), centers)
    weight[[0, 5]], x[[1, 8]] = 0, 0
    whole = outcome(function, x, labels, weight, **settings)
    blocks_of(monkeypatch, 3)
    assert max(errors(outcome(function, x, labels, weight, **settings), whole)) <= 1e-12


@every_form
def test_frozen_weights_and_frozen_anchors(form, monkeypatch):
    function, settings, centers = FORMS[form]
    x, labels, weight = batch((9, 8, 4), centers)
    _, by_x, by_weight = outcome(function, x, labels, weight, **settings)
    blocks_of(monkeypatch, 3)
    upstream = torch.linspace(0.3, 2.1, 9, dtype=torch.float64)
    for learns, expected in ((x, by_x), (weight, by_weight)):
        learns.requires_grad_()
        value = function(x, labels, weight, reduction="none", **settings)
        (value * (upstream if value.dim() else 0.3)).sum().backward()
        torch.testing.assert_close(learns.grad, expected, rtol=1e-11, atol=1e-12)
        learns.requires_grad_(False)


@pytest.mark.parametrize("form", ["normalized", "cosface", "arcface", "proxy-nca", "proxy-nca, original"])
def test_the_digits_of_a_small_loss_are_kept(form):
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


def test_modified_softmax_is_sphereface_of_margin_1():
    """A-Softmax without its margin (Liu et al. 2017, eq. 5): weights of length 1, embeddings as long as they are."""
    x, labels, weight = batch((9, 7, 5))
    logits = x @ torch.nn.functional.normalize(weight).T
    wanted = torch.nn.functional.cross_entropy(logits, labels, ignore_index=-1)
    for annealing in (0.0, 5.0):
        torch.testing.assert_close(losses.sphereface_loss(x, labels, weight, margin=1, annealing=annealing), wanted)


def test_a_renamed_class_weight_is_answered_and_states_of_before_are_read():
    x, labels, weight = batch((6, 5, 4))
    for name, was, rows in (("ProxyNCA", "proxies", 5), ("ProxyAnchor", "proxies", 5), ("SoftTriple", "centers", 50)):
        function = {"ProxyNCA": "proxy_nca_loss", "ProxyAnchor": "proxy_anchor_loss", "SoftTriple": "soft_triple_loss"}
        with pytest.raises(TypeError, match=f"^{was} of {function[name]} is weight now$"):
            getattr(losses, function[name])(x, labels, **{was: weight})
        module, state = getattr(losses, f"{name}Loss")(5, 4), torch.randn(rows, 4)
        torch.nn.ModuleDict({"a": module}).load_state_dict({f"a.{was}": state})
        assert torch.equal(module.weight, state)
    heated = losses.HeatedSoftmaxLoss(5, 4)
    assert set(heated.state_dict()) == {"weight", "bias", "steps"}
    before = heated.state_dict() | {"running_mean": torch.zeros(4), "running_var": torch.ones(4)}
    heated.load_state_dict(before)
    assert "running_mean" in losses.HeatedSoftmaxLoss(5, 4, norm="batch").state_dict()


def test_a_margin_per_class_is_arcface_of_each_margin():
    x, labels, weight = batch((9, 5, 4))
    counts = torch.tensor([1, 16, 81, 10_000, 2])
    margins = losses.class_margins(counts)
    assert margins.tolist() == pytest.approx([0.55, 0.3, 0.5 / 3 + 0.05, 0.1, 0.5 * 2**-0.25 + 0.05])
    got = losses.arcface_loss(x, labels, weight, margin=margins, reduction="none")
    for c, margin in enumerate(margins.tolist()):
        alone = losses.arcface_loss(x, labels, weight, margin=margin, reduction="none")
        torch.testing.assert_close(got[labels == c], alone[labels == c], rtol=1e-6, atol=1e-9)
    module = losses.ArcFaceLoss(5, 4, margins).double()
    module.weight.data.copy_(weight)
    torch.testing.assert_close(module(x, labels), losses.arcface_loss(x, labels, weight, margin=margins))
    assert module.margin.dtype == torch.float64 and "margin" in module.state_dict()
    sampled = losses.ArcFaceLoss(100, 4, torch.linspace(0.1, 0.9, 100), sample_rate=0.1)
    torch.manual_seed(0)
    value = sampled(x.float(), labels.clamp(min=0) * 20)
    assert bool(value.isfinite())
    for wrong, words in (
        (torch.ones(4), "margin must have one entry per class: 5, got 4"),
        (torch.ones(5, 1), r"margin must be an angle, or a tensor \(C,\) of them, got torch.float32 \(5, 1\)"),
        (torch.full((5,), 4.0), r"margin must be angles in \[0, π\) radians"),
    ):
        with pytest.raises(ValueError, match=words):
            losses.ArcFaceLoss(5, 4, wrong)
    for wrong in (torch.tensor([3, 0]), torch.ones(2, 2), [1, 2]):
        with pytest.raises(ValueError, match="counts must be a tensor"):
            losses.class_margins(wrong)


def test_centers_begin_at_zero_or_in_the_middle_of_their_first_items():
    x, labels, _ = batch((7, 5, 4))
    loss = losses.CenterLoss(5, 4, 1.0, start="first").double()
    plain = losses.CenterLoss(5, 4, 1.0).double()
    assert "seen" not in plain.state_dict() and not plain.centers.any()
    loss(x, labels)
    for c in range(5):
        own = x[labels == c]
        wanted = own.mean(0) if len(own) else torch.zeros(4).double()
        torch.testing.assert_close(loss.centers[c], wanted)
        assert bool(loss.seen[c]) == bool(len(own))
    before = loss.centers.clone()
    loss(x + 1, labels)  # from here on by the paper's rule
    torch.testing.assert_close(loss.centers, losses.center_update(x + 1, labels, before))
    twin = losses.CenterLoss(5, 4, 1.0, start="first").double()
    twin.load_state_dict(loss.state_dict())
    assert torch.equal(twin(x, labels), loss(x, labels))


def test_sharded_checkpoints_of_before_are_read(monkeypatch):
    """By the names that their tensors had; each process copies its rows."""
    for make, stored, rows in (
        (losses.ProxyAnchorLoss, "a.proxies", {"a.weight"}),
        (losses.HeatedSoftmaxLoss, "a.weight", {"a.weight", "a.bias", "a.steps"}),
    ):
        loss = torch.nn.ModuleDict({"a": make(5, 4)})
        targets = {name: tensor.detach() for name, tensor in loss.state_dict().items()}
        assert set(targets) == rows
        values = {name: torch.rand(tensor.shape).to(tensor) for name, tensor in targets.items()}
        old = {f"loss.{name}": value for name, value in values.items() if name != "a.weight"}
        old |= {f"loss.{stored}": values["a.weight"]}
        old |= {"loss.a.running_mean": torch.zeros(4)} if make is losses.HeatedSoftmaxLoss else {}
        local = dict(targets) | {"a.weight": checkpoints.LocalRows(targets["a.weight"], 0, 5)}
        monkeypatch.setattr(state, "local_state", lambda module, group, local=local: local)
        state._load_module(loss, checkpoints.CheckpointTensors(old), "loss", None)
        assert all(torch.equal(loss.state_dict()[name], value) for name, value in values.items())


# Sampled classes.

SAMPLED = {
    "normalized": losses.NormalizedSoftmaxLoss,
    "cosface": losses.CosFaceLoss,
    "sphereface": losses.SphereFaceLoss,
    "arcface, 3 centres": partial(losses.ArcFaceLoss, sub_centers=3),
    "proxy-nca, 2 proxies": partial(losses.ProxyNCALoss, proxies_per_class=2),
    "proxy-anchor": losses.ProxyAnchorLoss,
    "soft-triple": partial(losses.SoftTripleLoss, centers_per_class=3),
    "heated": losses.HeatedSoftmaxLoss,
    "center": losses.CenterLoss,
}


@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.parametrize("blocks", [False, True])
def test_sampled_classes_keep_the_batch(name, blocks, monkeypatch):
    if blocks:
        blocks_of(monkeypatch, 7)
    x, labels, _ = batch((6, 100, 5))
    module, full = (SAMPLED[name](100, 5, sample_rate=rate).double() for rate in (0.2, 1.0))
    full.load_state_dict(module.state_dict())
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
    full.load_state_dict(module.state_dict())
    rows, per_class = torch.tensor(draws[3]), module.per_class
    part = module.weight.detach().view(100, per_class, -1)[rows].flatten(0, 1)
    positions = torch.tensor([draws[3].index(c) if c >= 0 else -1 for c in labels.tolist()])
    names = {n.replace("_", ""): n for n in losses.__all__ if n.endswith("_loss")}
    function = getattr(losses, names[type(module).__name__.lower()])
    tensors = [part] + ([module.bias.detach()[rows]] if "bias" in module.tensors else [])
    tensors += [module.centers[rows]] if name == "center" else []
    given = {"annealing": module.annealing} if name == "sphereface" else {}
    torch.manual_seed(2)
    expected = function(x, positions, *tensors, **full.settings, **given)
    torch.testing.assert_close(module(x, labels), expected)
    full.load_state_dict(module.state_dict())
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
    assert bool(module(x[:2], torch.tensor([4, -1])).isfinite())
    with pytest.raises(ValueError, match=r"labels must be in 0\.\.99 \(or -1 for unknown\), got 100"):
        module(x, torch.tensor([0, 1, 100]))
    for rate in (0, -0.1, 1.5):
        with pytest.raises(ValueError, match=f"sample_rate must be > 0 and <= 1, got {rate}"):
            losses.ArcFaceLoss(5, 3, sample_rate=rate)
    monkeypatch.setattr(nearkin.core.checks, "reads_values", lambda tensor: False)
    for bad in (100, -2, 10**12):
        assert bool(module(x, torch.tensor([0, 1, bad])).isnan())


MEASURE = """
import sys, torch
sys.path.insert(0, sys.argv[1])
import measure
from nearkin import losses
torch.set_num_threads(1)
def step(classes, size):
    x, w = torch.randn(size, 64, requires_grad=True), weight[:classes].detach().requires_grad_()
    losses.arcface_loss(x, torch.arange(size) % classes, w, max_memory=2**25).backward()
weight = torch.randn(200_000, 64)
step(10_000, 128)
step(10_000, 128)
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
    assert float(done.stdout) < gradient + class_blocks.AUTOMATIC / 2**20 + 16


EVERY_SIZE = {
    "normalized": losses.NormalizedSoftmaxLoss,
    "heated": losses.HeatedSoftmaxLoss,
    "adacos": losses.AdaCosLoss,
    "cosface": losses.CosFaceLoss,
    "arcface": losses.ArcFaceLoss,
    "arcface, 3 centres": partial(losses.ArcFaceLoss, sub_centers=3),
    "sphereface": losses.SphereFaceLoss,
    "adaface": losses.AdaFaceLoss,
    "magface": losses.MagFaceLoss,
    "center": losses.CenterLoss,
    "proxy-nca": losses.ProxyNCALoss,
    "proxy-nca, 3 proxies": partial(losses.ProxyNCALoss, proxies_per_class=3),
    "proxy-anchor": losses.ProxyAnchorLoss,
    "soft-triple": losses.SoftTripleLoss,
    "soft-triple, 1 centre": partial(losses.SoftTripleLoss, centers_per_class=1),
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 1), (2, 5), (3, 1), (1000, 2), (10_000, 128), (1_000_000, 1)], ids=str)
@pytest.mark.parametrize("name", EVERY_SIZE)
def test_every_number_of_classes_and_dimensions(name, shape):
    """Built, learned from, and the same loss in float32 as in float64."""
    classes, dim = shape
    if name == "adacos" and classes < 3:
        pytest.skip("two classes give scale 0, which is refused")
    if classes * dim > 10**5 and name.endswith("proxies"):
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
