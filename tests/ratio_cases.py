"""Batches of the log-ratio loss with ties of every kind, and how its kernels are judged: by float64, as plain torch is.

The interpreter's tests and those on a GPU use the same table.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nearkin import losses
from nearkin.core.labels import LabelDistance
from nearkin.kernels import ratio_ops

Draw = torch.Generator


def _mirrored(n: int, g: Draw) -> Tensor:
    """Labels about a few centres, as many on either side: tied across their anchors, in float64 to the last bit."""
    steps = torch.randint(1, 9, (n,), generator=g) * torch.randint(0, 2, (n,), generator=g).mul(2).sub(1)
    return torch.where(torch.arange(n) % 5 == 0, 0.0, steps * 0.125)


def _merged(n: int, g: Draw) -> Tensor:
    """Labels whose differences float64 cannot hold: seen from far away, different ones are at the same distance."""
    near = torch.randint(0, 6, (n,), generator=g).double() * 1e-9
    return torch.where(torch.arange(n) % 3 == 0, torch.randint(1, 4, (n,), generator=g) * 1e8, near)


def _turned(n: int, g: Draw) -> Tensor:
    """Points whose coordinates are exchanged or negated: the same sums of squares, if no product is fused."""
    numbers = torch.tensor([0.1, 0.2, 0.3, 0.7], dtype=torch.float64)
    signs = torch.randint(0, 2, (n, 2), generator=g) * 2.0 - 1.0
    points = numbers[torch.randint(0, 4, (n, 2), generator=g)] * signs
    points[::4] = 0
    return points


LABELS: dict[str, Callable[[int, Draw], Tensor]] = {
    "all equal": lambda n, g: torch.ones(n),
    "two values": lambda n, g: torch.arange(n) % 2,
    "few integers": lambda n, g: torch.randint(0, 6, (n,), generator=g),
    "four of each": lambda n, g: (torch.arange(n) // 4).float(),
    "continuous": lambda n, g: torch.randn(n, generator=g),
    "mirrored": _mirrored,
    "merged by rounding": _merged,
    "tiny": lambda n, g: torch.randint(0, 50, (n,), generator=g).double() * 5e-324,
    "huge": lambda n, g: torch.randn(n, generator=g, dtype=torch.float64) * 1e300,
    "vectors": lambda n, g: torch.randint(0, 3, (n, 3), generator=g).float(),
    "vectors, turned": _turned,
    "vectors, continuous": lambda n, g: torch.randn(n, 2, generator=g),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "each anchor": {"reduction": "none"},
    "active, of unit rows": {"reduction": "active", "normalize": True, "epsilon": 1e-3},
    "sum, ties kept": {"reduction": "sum", "ties": "keep"},
    "few anchors": {"anchors": 5},
}
Shape = tuple[int, int | None, int]  # (B, R, D): R = None is a batch alone


def batch(shape: Shape, labels: str = "few integers", kind: torch.dtype = torch.float32, seed: int = 0) -> list[Any]:
    """Embeddings and labels, and references with theirs where there are any; among them duplicates and a zero row."""
    number, num_references, dim = shape
    g = torch.Generator().manual_seed(seed)
    total = number + (num_references or 0)
    x, y = torch.randn(total, dim, generator=g), LABELS[labels](total, g)
    if total > 8:
        x[5], x[7] = x[4], 0
    order = torch.randperm(total, generator=g)
    x, y = x[order].to(kind), y[order]
    if num_references is None:
        return [x, y, None, None]
    return [x[:number], y[:number], x[number:], y[number:]]


def near(number: int, dim: int, scale: float = 1e-4) -> list[Any]:
    """A collapsed batch: all items within `scale` of one point."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(dim, generator=g) + scale * torch.randn(number, dim, generator=g)
    return [x, torch.randint(0, 9, (number,), generator=g), None, None]


def clusters(number: int, dim: int) -> list[Any]:
    """Items of which three at a time are nearly the same."""
    g = torch.Generator().manual_seed(4)
    centres = torch.randn(-(-number // 3), dim, generator=g).repeat_interleave(3, 0)[:number]
    x = centres + 1e-4 * torch.randn(number, dim, generator=g)
    return [x, torch.randint(0, 9, (number,), generator=g), None, None]


def matrix(number: int, num_references: int | None, dim: int) -> list[Any]:
    """Label distances of their own, many of them tied; some 0, which leaves a reference out."""
    x, _, references, _ = batch((number, num_references, dim))
    g = torch.Generator().manual_seed(2)
    apart = torch.randint(0, 5, (number, number if references is None else len(references)), generator=g) * 0.3
    return [x, LabelDistance(apart), references, None]


def outcome(arguments: list[Any], impl: str, wide: bool = False, **settings: Any) -> list[Tensor]:
    """Value and gradients, under an upstream that is nowhere 1."""
    x, labels, references, reference_labels = arguments
    leaves = [None if t is None else (t.double() if wide else t).detach().clone() for t in (x, references)]
    inputs = [t.requires_grad_() for t in leaves if t is not None]
    value = losses.logratio_loss(leaves[0], labels, leaves[1], reference_labels, impl=impl, **settings)
    upstream = torch.linspace(0.3, 2.1, max(1, value.numel()), dtype=value.dtype, device=value.device)
    value.backward(upstream.reshape(value.shape))
    return [value.detach(), *(t.grad for t in inputs)]


def errors(got: list[Tensor], exact: list[Tensor]) -> list[float]:
    """The largest error of each tensor, by the size of its largest entry."""
    pairs = zip(got, exact, strict=True)
    return [float((a.double() - b).abs().max() / b.abs().max().clamp(min=1e-6)) for a, b in pairs]


def judged(arguments: list[Any], impl: str = "triton", **settings: Any) -> dict[str, Any]:
    """Errors of the kernels and of plain torch against float64, and how often the kernels served."""
    exact = outcome(arguments, "torch", wide=True, **settings)
    plain = outcome(arguments, "torch", **settings)
    served: list[int] = []
    original = ratio_ops.loss
    ratio_ops.loss = lambda *rest: served.append(1) or original(*rest)  # type: ignore
    try:
        got = outcome(arguments, impl, **settings)
    finally:
        ratio_ops.loss = original
    assert [t.dtype for t in got] == [t.dtype for t in plain]
    return {"kernel": errors(got, exact), "torch": errors(plain, exact), "served": len(served)}
