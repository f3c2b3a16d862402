"""Compiling what is no property of every loss: gradients by hand, many classes, what torch.func cannot follow."""

import re
from pathlib import Path

import pytest
import torch

import nearkin
from cases import DIM
from loss_checks.outcome import assert_same, run
from nearkin import losses
from nearkin.core import autograd

pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("UserWarning", "DeprecationWarning")]


def test_a_gradient_by_hand_is_refused_while_compiling(monkeypatch):
    class Twice(autograd.HandGradient):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, slope):
            return 2 * slope

    x = torch.ones(3, requires_grad=True)
    Twice.call(x).sum().backward()
    assert x.grad.tolist() == [2, 2, 2]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    message = r"Twice has a hand-written gradient, which torch.compile may get wrong; compile"
    with pytest.raises(RuntimeError, match=message):
        Twice.call(x)


def test_no_gradient_by_hand_goes_another_way():
    """Nobody in the package calls `apply`, past the guard."""
    for path in Path(nearkin.__file__).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if path.name != "autograd.py":
            assert "autograd.Function" not in text and not re.search(r"\b_[A-Z]\w*\.apply\(", text), path


@pytest.mark.slow
def test_many_classes_compile_in_bounded_time_and_memory():
    """A hundred blocks of classes are one node."""
    torch._dynamo.reset()
    results, (x, labels) = [], (torch.randn(8, 4), torch.arange(8) * 100)
    for compiled in (False, True):
        torch.manual_seed(0)
        module = losses.CosFaceLoss(1000, 4, max_memory=8 * 4 * 64 + 10 * (12 * 8 + 4 * 64))
        function = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module
        results.append(run(function, module, x, labels))
    assert_same(results[1], results[0], 1e-6, "all")


@pytest.mark.parametrize(
    "module",
    [
        losses.CenterLoss(4, DIM),
        losses.AdaCosLoss(4, DIM),
        losses.HeatedSoftmaxLoss(4, DIM, norm="batch"),
        nearkin.memory.CrossBatchMemory(losses.SupConLoss(), 8, DIM),
        losses.FacilityLocationLoss(),
    ],
    ids=lambda module: type(module).__name__,
)
def test_what_torch_func_cannot_follow_is_refused(module):
    """Its tensors would stay behind in buffers."""
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(RuntimeError, match=r", which torch.func cannot follow; call"):
        torch.func.grad(lambda y: module(y, torch.arange(4)))(torch.randn(4, DIM))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
