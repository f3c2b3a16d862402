"""Pair losses that have a kernel, and how a kernel is judged: by float64, beside plain torch in the same type.

The interpreter's tests and those on a GPU use the same table.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearkin import kernels, losses
from nearkin.core.labels import BatchFirst
from nearkin.kernels import pair_ops, smooth_ap_ops


class Case(NamedTuple):
    function: Callable[..., Tensor]
    settings: dict[str, Any]
    beta: str | None = None  # the margin loss's: one for all ("scalar"), or one per class
    scalars: tuple[str, ...] = ()  # settings that are learned


PAIR_CASES = {
    "contrastive": Case(losses.contrastive_loss, {"margin": 1.4}),
    "contrastive, raw": Case(losses.contrastive_loss, {"margin": 3.0, "normalize": False, "reduction": "active"}),
    "contrastive, linear": Case(
        losses.contrastive_loss, {"margin": 1.3, "positive_margin": 0.6, "squared": False, "normalize": True}
    ),
    "contrastive, sum": Case(losses.contrastive_loss, {"positive_margin": 0.2, "normalize": True, "reduction": "sum"}),
    "contrastive, all pairs": Case(losses.contrastive_loss, {"margin": 1.4, "balance": False}),
    "contrastive, all pairs, active": Case(
        losses.contrastive_loss, {"margin": 1.4, "balance": False, "normalize": True, "reduction": "active"}
    ),
    "margin": Case(losses.margin_loss, {"selection": "all"}, "scalar"),
    "margin, a class": Case(losses.margin_loss, {"selection": "all", "nu": 0.1, "reduction": "mean"}, "class"),
    "margin, a number": Case(losses.margin_loss, {"selection": "all", "beta": 1.1, "normalize": False}),
    "multi-similarity": Case(losses.multi_similarity_loss, {}),
    "multi-similarity, all": Case(
        losses.multi_similarity_loss, {"selection": "all", "beta": 20.0, "reduction": "active"}
    ),
    "circle": Case(losses.circle_loss, {}),
    "circle, faces": Case(losses.circle_loss, {"margin": 0.25, "scale": 256.0, "reduction": "sum"}),
    "lifted": Case(losses.lifted_structure_loss, {}),
    "lifted, unit": Case(losses.lifted_structure_loss, {"normalize": True, "margin": 0.5, "reduction": "active"}),
    "N-pair": Case(losses.npair_loss, {}),
    "N-pair, active": Case(losses.npair_loss, {"penalty": 0.3, "reduction": "active"}),
    "SupCon": Case(losses.supcon_loss, {}),
    "SupCon, active": Case(losses.supcon_loss, {"temperature": 0.4, "reduction": "active"}),
    "InfoNCE": Case(losses.infonce_loss, {}),
    "InfoNCE, sum": Case(losses.infonce_loss, {"temperature": 0.5, "reduction": "sum"}),
    "sigmoid": Case(losses.sigmoid_loss, {"log_scale": 2.3, "bias": -10.0}, None, ("log_scale", "bias")),
    "sigmoid, active": Case(
        losses.sigmoid_loss, {"log_scale": 1.0, "bias": 0.5, "reduction": "active"}, None, ("log_scale", "bias")
    ),
    "sigmoid, sum": Case(losses.sigmoid_loss, {"log_scale": 0.3, "bias": -1.0, "reduction": "sum"}, None, ("bias",)),
    "Smooth-AP": Case(losses.smooth_ap_loss, {}),
    "Smooth-AP, soft": Case(losses.smooth_ap_loss, {"temperature": 0.1, "reduction": "sum"}),
    "Smooth-AP, active": Case(losses.smooth_ap_loss, {"temperature": 0.03, "reduction": "active"}),
    "Fast-AP": Case(losses.fastap_loss, {}),
    "lossless": Case(losses.lossless_triplet_loss, {}),
    "lossless, clamped": Case(losses.lossless_triplet_loss, {"sigmoid": False, "reduction": "sum"}),
}
BIN_CASES = {  # kernels are compiled for each number: not part of every test
    "Fast-AP, 1 bin": Case(losses.fastap_loss, {"bins": 1}),
    "Fast-AP, 3 bins": Case(losses.fastap_loss, {"bins": 3, "reduction": "sum"}),
    "Fast-AP, most bins": Case(losses.fastap_loss, {"bins": pair_ops.MOST_BINS, "reduction": "active"}),
}
# (B, R, D): R = None is a batch alone
PAIR_SHAPES = [(1, None, 3), (1, 1, 1), (2, None, 4), (5, 40, 3), (37, None, 17), (33, 50, 70), (50, 7, 5)]


def batch(shape: tuple[int, int | None, int], kind: torch.dtype = torch.float32, seed: int = 0) -> tuple[Any, ...]:
    """Items around class means, labels mixed and one unknown; among them duplicates, a zero row and a large one."""
    number, num_references, dim = shape
    g = torch.Generator().manual_seed(seed)
    total = number + (num_references or 0)
    labels = torch.randint(max(1, total // 4), (total,), generator=g)
    means = torch.randn(int(labels.max()) + 1, dim, generator=g, dtype=torch.float64)
    x = means[labels] + 0.5 * torch.randn(total, dim, generator=g, dtype=torch.float64)
    if total > 8:
        x[1], labels[1] = x[0], labels[0]
        x[3] = x[2]
        x[4] = 0
        x[5] *= 30
        labels[6] = -1
    order = torch.randperm(total, generator=g)
    x, labels = x[order].to(kind), labels[order]
    if num_references is None:
        return x, labels, None, None
    return x[:number], labels[:number], x[number:], labels[number:]


def batch_first(
    shape: tuple[int, int | None, int], kind: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Any, ...]:
    """A batch and a memory; its references are both."""
    x, labels, memory, memory_labels = batch(shape, kind, seed)
    return x, labels, memory, BatchFirst(torch.cat([labels, memory_labels]))


def near(number: int, dim: int, apart: float) -> tuple[Any, ...]:
    """A collapsed batch: all items within `apart` of one point, in float32."""
    g = torch.Generator().manual_seed(1)
    place = torch.randn(dim, generator=g)
    x = place + apart * torch.randn(number, dim, generator=g)
    return x, torch.arange(number) % max(1, number // 4), None, None


KINDS = ("pairs", "equal", "multiples", "mixed", "clusters", "tiny", "large")


def rows(kind: str, number: int, dim: int) -> tuple[Any, ...]:
    """Batches that try the numbers of a distance: near and equal pairs, multiples, lengths of all sizes, clusters."""
    g = torch.Generator().manual_seed(2)
    labels = torch.arange(number) // 4
    x = torch.randn(number, dim, generator=g)
    if kind == "pairs":
        x[1::2] = x[::2] + 10.0 ** -torch.randint(1, 5, (number // 2, 1), generator=g) * x[1::2]
    elif kind == "equal":
        x[1::2] = x[::2]
    elif kind == "multiples":
        x[1::2] = x[::2] * (1 + 1e-4)
    elif kind == "mixed":
        x *= 10.0 ** torch.randint(-4, 5, (number, 1), generator=g)
    elif kind == "clusters":
        x = 10 * torch.randn(int(labels.max()) + 1, dim, generator=g)[labels] + 0.1 * x
    else:
        x *= {"tiny": 1e-18, "large": 1e11}[kind]
    return x, labels, None, None


def outcome(case: Case, arguments: tuple[Any, ...], impl: str, wide: bool = False, both: bool = True) -> list[Tensor]:
    """Value and gradients, by references too if there are and `both`, under an upstream that is not 1."""
    x, labels, references, reference_labels = arguments
    x = (x.double() if wide else x).detach().clone().requires_grad_()
    inputs, settings = [x], dict(case.settings)
    if isinstance(reference_labels, BatchFirst):
        references = torch.cat([x, references.double() if wide else references])
    elif references is not None:
        references = (references.double() if wide else references).detach().clone().requires_grad_(both)
        inputs += [references] if both else []
    if case.beta is not None:
        number = int(labels.max().clamp(min=0)) + 1
        beta = torch.tensor(1.15) if case.beta == "scalar" else torch.linspace(0.9, 1.3, number)
        settings["beta"] = beta.to(device=x.device, dtype=torch.float64 if wide else torch.float32).requires_grad_()
        inputs.append(settings["beta"])
    for name in case.scalars:
        kind = torch.float64 if wide else torch.float32
        settings[name] = torch.tensor(settings[name], device=x.device, dtype=kind, requires_grad=True)
        inputs.append(settings[name])
    value = case.function(x, labels, references, reference_labels, impl=impl, **settings)
    value.backward(torch.full_like(value, 0.7))
    return [value.detach(), *(t.grad for t in inputs)]


def errors(got: list[Tensor], exact: list[Tensor]) -> list[float]:
    """The largest error of each tensor, by the size of its largest entry."""
    largest = []
    for a, b in zip(got, exact, strict=True):
        assert a.shape == b.shape
        largest.append(float((a.double() - b).abs().max() / b.abs().max().clamp(min=1e-6)))
    return largest


def judged(case: Case, arguments: tuple[Any, ...], both: bool = True) -> dict[str, Any]:
    """Errors of the kernel and of plain torch against float64, and how often the kernel served.

    Plain torch has float64 inside, whatever `kernels.set_float64_units` has set for the kernel."""
    setting = kernels.float64_units()
    kernels.set_float64_units("auto")
    try:
        exact = outcome(case, arguments, "torch", wide=True, both=both)
        plain = outcome(case, arguments, "torch", both=both)
    finally:
        kernels.set_float64_units(setting)
    served: list[str] = []
    originals = {module: module.loss for module in (pair_ops, smooth_ap_ops)}
    for module, original in originals.items():
        module.loss = lambda *rest, original=original, **named: served.append("") or original(*rest, **named)  # type: ignore
    try:
        got = outcome(case, arguments, "triton", both=both)
    finally:
        for module, original in originals.items():
            module.loss = original  # type: ignore
    assert [t.dtype for t in got] == [t.dtype for t in plain]
    return {"kernel": errors(got, exact), "torch": errors(plain, exact), "served": len(served)}
