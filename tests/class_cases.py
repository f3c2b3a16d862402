"""Losses over class weights that are one node of the graph, and how their kernels are judged: by float64, beside plain
torch in the same type.

The interpreter's tests and those on a GPU use the same table.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearkin import losses
from nearkin.kernels import class_dense_ops
from nearkin.losses import call


class Case(NamedTuple):
    function: Callable[..., Tensor]
    settings: dict[str, Any] = {}  # noqa: RUF012
    centers: int = 1
    bias: bool = False


CLASS_CASES = {
    "normalized": Case(losses.normalized_softmax_loss),
    "normalized, scale on the device": Case(losses.normalized_softmax_loss, {"scale": torch.tensor(7.0)}),
    "cosface": Case(losses.cosface_loss),
    "arcface": Case(losses.arcface_loss),
    "arcface, wide": Case(losses.arcface_loss, {"margin": 2.5, "scale": 8.0}),
    "arcface, straight through": Case(losses.arcface_loss, {"straight_through": True}),
    "arcface, 2 centres": Case(losses.arcface_loss, {"sub_centers": 2}, 2),
    "arcface, 3 centres": Case(losses.arcface_loss, {"sub_centers": 3}, 3),
    "arcface, 7 centres": Case(losses.arcface_loss, {"sub_centers": 7, "scale": 16.0}, 7),
    "sphereface": Case(losses.sphereface_loss, {"annealing": 0.5}),
    "sphereface, annealed": Case(losses.sphereface_loss, {"annealing": torch.tensor(3.0), "margin": 3}),
    "adaface": Case(losses.adaface_loss, {"mean": 9.0, "std": torch.tensor(8.0), "concentration": 0.9}),
    "adaface, wide": Case(losses.adaface_loss, {"mean": 4.0, "std": 0.5, "margin": 1.3, "scale": 8.0}),
    "magface": Case(losses.magface_loss, {"lower_length": 2.0, "upper_length": 20.0}),
    "magface, bare": Case(losses.magface_loss, {"lower_length": 5.0, "upper_length": 17.0, "penalty": 0.0}),
    "adacos": Case(losses.adacos_loss, {"scale": 9.0}),
    "heated": Case(losses.heated_softmax_loss, {}, 1, True),
    "heated, raw": Case(losses.heated_softmax_loss, {"normalize": False, "scale": 1.5}, 1, True),
    "proxy-nca": Case(losses.proxy_nca_loss),
    "proxy-nca, original": Case(losses.proxy_nca_loss, {"form": "original", "scale": 2.0}),
}


def batch(
    shape: tuple[int, int, int], centers: int = 1, seed: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Anchors, some near their class, one unknown, a zero row and a large one where there are several;
    labels; class weights, one of them zero; biases."""
    number, classes, dim = shape
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(classes * centers, dim, generator=g, dtype=torch.float64)
    labels = torch.randint(classes, (number,), generator=g)
    x = weight[labels * centers] + torch.randn(number, dim, generator=g, dtype=torch.float64)
    if number > 5:
        labels[2] = -1
        x[4] = 0
        x[5] *= 30
    if classes > 9:
        weight[7] = 0
    bias = torch.randn(classes, generator=g, dtype=torch.float64)
    return x.to(dtype), labels, weight.to(dtype), bias.to(dtype)


@contextmanager
def without_kernels() -> Iterator[None]:
    """The plain road, also where a kernel would serve."""
    kernel = call.ClassCall.kernel
    call.ClassCall.kernel = lambda *arguments, **keywords: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        call.ClassCall.kernel = kernel  # type: ignore[method-assign]


def outcome(case: Case, arguments: tuple[Tensor, ...], reduction: str, **keywords: Any) -> list[Tensor]:
    """Value and gradients, under an upstream that is not 1."""
    x, labels, weight, bias = arguments
    learned = [t.detach().clone().requires_grad_() for t in ((x, weight, bias) if case.bias else (x, weight))]
    settings = {k: v.to(x.device) if isinstance(v, Tensor) else v for k, v in case.settings.items()}
    value = case.function(learned[0], labels, *learned[1:], reduction=reduction, **settings, **keywords)
    value.backward(torch.full_like(value, -1.7))
    return [value.detach(), *(t.grad for t in learned)]  # type: ignore[misc]


def errors(got: list[Tensor], exact: list[Tensor]) -> list[float]:
    """The largest error of each tensor, by the size of its largest entry."""
    pairs = zip(got, exact, strict=True)
    return [float((a.double() - b).abs().max() / b.abs().max().clamp(min=1e-3)) for a, b in pairs]


def judged(
    name: str, shape: tuple[int, int, int], kinds: tuple[str, str], reduction: str, device: str = "cpu", seed: int = 0
) -> dict[str, Any]:
    """Errors of the kernels and of plain torch against float64, and how often the kernels served."""
    case = CLASS_CASES[name]
    x, labels, weight, bias = (t.to(device) for t in batch(shape, case.centers, seed))
    x, weight = x.to(getattr(torch, kinds[0])), weight.to(getattr(torch, kinds[1]))
    bias = bias.float()
    with without_kernels():
        exact = outcome(case, (x.double(), labels, weight.double(), bias.double()), reduction)
        plain = outcome(case, (x, labels, weight, bias), reduction)
    with counted() as served:
        got = outcome(case, (x, labels, weight, bias), reduction, impl="triton")
    assert [t.dtype for t in got] == [t.dtype for t in plain]
    return {"kernel": errors(got, exact), "torch": errors(plain, exact), "served": len(served)}


@contextmanager
def counted() -> Iterator[list[int]]:
    """A list that grows with each loss that the kernels serve."""
    served: list[int] = []
    original = class_dense_ops.loss
    class_dense_ops.loss = lambda *arguments: served.append(1) or original(*arguments)  # type: ignore[func-returns-value]
    try:
        yield served
    finally:
        class_dense_ops.loss = original
