"""How the properties run a loss and compare what came out: its value, then every gradient, in one list."""

import zlib
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from cases import CLASSES, Case
from nearkin.core import blockwise

Outcome = list[Tensor]
REDUCTIONS = ("mean", "active", "sum", "none")


def covering(case: Case, **axes: Any) -> Iterator[dict[str, Any]]:
    """Rows of one value per axis: every value with each case, and every two values with each other over the cases."""
    number = zlib.crc32(case.name.encode())
    for row in range(max(map(len, axes.values()))):
        shift, chosen = number, {}
        for name, values in axes.items():
            chosen[name] = values[(row + shift) % len(values)]
            shift //= len(values)
        yield chosen


def run(function: Callable[..., Tensor], module: nn.Module, x: Tensor, labels: Any, *rest: Any) -> Outcome:
    """Value, and gradients by embeddings, references and what is learned, under an upstream that is not 1."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, *rest[:1])]
    module.zero_grad()
    value = function(leaves[0], labels, *leaves[1:], *rest[1:])
    upstream = torch.linspace(-1, 2, len(value), dtype=value.dtype, device=x.device) if value.dim() else 2.5
    value.backward(torch.as_tensor(upstream, dtype=value.dtype, device=value.device))
    assert all(leaf.grad is not None for leaf in leaves)
    learned = [torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters()]
    return [value.detach(), *(leaf.grad for leaf in leaves), *learned]  # type: ignore[list-item]


def assert_same(got: Outcome, wanted: Outcome, tolerance: float, by: str = "each") -> None:
    """Within the tolerance of the largest entry: of each tensor by its own, or of gradients by that of "all"."""
    assert len(got) == len(wanted)
    sizes = [max(float(t.double().abs().max()) if t.numel() else 0.0, 1e-3) for t in wanted]
    if by == "all" and len(sizes) > 1:
        sizes[1:] = [max(*sizes[1:], 1e-2)] * len(sizes[1:])
    for i, (a, b, size) in enumerate(zip(got, wanted, sizes, strict=True)):
        assert a.shape == b.shape and bool(a.isfinite().all()), f"{i}: {a}"
        error = float((a.double() - b.double()).abs().max()) if a.numel() else 0.0
        assert error <= tolerance * size, f"{'gradient' if i else 'value'} {i}: off by {error / size:.1e}"


@cache
def loop(case: Case, dtype: torch.dtype = torch.float64, met: bool = False, reduction: str | None = None) -> Outcome:
    """The float64 loop of the case at its batch in this type, alone or met with references: made once."""
    module = case.build()
    if reduction is not None:
        module.reduction = reduction
    return run(lambda *batch: case.twin(module, *batch), module, *batch_of(case, torch.float64, dtype, met))


def batch_of(case: Case, dtype: torch.dtype, rounded: torch.dtype | None = None, met: bool = False) -> tuple[Any, ...]:
    """The case's batch, and its references where they are met, as `rounded` holds them."""
    x, labels = case.batch(rounded or dtype)
    if not met:
        return x.to(dtype), labels
    references, others = case.references(x, labels)
    return x.to(dtype), labels, references.to(dtype), others


def odd_batch(case: Case, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Thirteen items: four classes, and one class of one."""
    x, labels = case.batch(dtype)
    extra = torch.full((1,), CLASSES - 1 if "classes" in case.name else CLASSES)
    return torch.cat([x, x[:1] * 0.5 - 0.3]), torch.cat([labels, extra.to(labels.dtype)])


def room(rows: int, x: Tensor, references: Tensor | None = None) -> int:
    """Bytes in which so many rows fit and no more."""
    others = x if references is None else references
    wide = torch.float64 in (x.dtype, others.dtype)
    return (len(x) + len(others)) * x.shape[1] * blockwise.ROW + rows * len(others) * blockwise.PAIR * (1 + wide)


def least_room(case: Case, x: Tensor, references: Tensor) -> int:
    """Bytes in which one row fits, also of the references as anchors where the loss passes over these."""
    least = room(1, x, references)
    across = "Lifted" in case.name or "VICReg" in case.name or case.by_class
    return max(least, room(1, references, x) if across else 0, 1)
