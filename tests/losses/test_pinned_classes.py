"""Pinned losses over class weights: values and gradients in float64 and float32 are those of version 0.1 before its
kernels left, whole and in blocks of classes. `pinned_classes.npz` holds them.
"""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from nearkin import losses

PINS = Path(__file__).parent / "pinned_classes.npz"
ROWS, CLASSES, DIM = 14, 7, 5
BLOCKS = {"max_memory": 2 * 64 * DIM * ROWS + 3000}  # some classes at a time

# The function, its settings, class weights per class.
FORMS = {
    "normalized": ("normalized_softmax_loss", {}, 1),
    "normalized, tensor": ("normalized_softmax_loss", {"scale": torch.tensor(7.0)}, 1),
    "cosface": ("cosface_loss", {}, 1),
    "arcface": ("arcface_loss", {}, 1),
    "arcface, wide": ("arcface_loss", {"margin": 2.5, "scale": 8.0}, 1),
    "arcface, straight through": ("arcface_loss", {"straight_through": True}, 1),
    "arcface, 3 centres": ("arcface_loss", {"sub_centers": 3, "scale": 20.0}, 3),
    "sphereface": ("sphereface_loss", {"annealing": 0.5}, 1),
    "sphereface, tensor": ("sphereface_loss", {"annealing": torch.tensor(3.0), "margin": 3}, 1),
    "adaface": ("adaface_loss", {"mean": 4.0, "std": torch.tensor(3.0), "concentration": 0.7}, 1),
    "magface": ("magface_loss", {"lower_length": 1.0, "upper_length": 4.0}, 1),
    "magface, bare": ("magface_loss", {"lower_length": 1.0, "upper_length": 4.0, "length_weight": 0.0}, 1),
    "adacos": ("adacos_loss", {}, 1),
    "heated": ("heated_softmax_loss", {}, 1),
    "heated, raw": ("heated_softmax_loss", {"normalize": False, "scale": 1.5}, 1),
    "center": ("center_loss", {"center_weight": 0.5}, 1),
    "proxy-nca": ("proxy_nca_loss", {}, 1),
    "proxy-nca, original": ("proxy_nca_loss", {"form": "original", "scale": 2.0}, 1),
    "proxy-nca, 3 proxies": ("proxy_nca_loss", {"proxies_per_class": 3}, 3),
    "proxy-nca, 3 proxies, original": ("proxy_nca_loss", {"proxies_per_class": 3, "form": "original"}, 3),
    "proxy-nca, dynamic": ("proxy_nca_loss", {"assignment": "dynamic"}, 1),
    "proxy-anchor": ("proxy_anchor_loss", {}, 1),
    "soft-triple": ("soft_triple_loss", {"centers_per_class": 3}, 3),
    "soft-triple, 1 centre": ("soft_triple_loss", {"centers_per_class": 1}, 1),
}
# The class, its settings; three training steps, whose buffers move.
STEPS = {
    "SphereFaceLoss": {"start": 30.0},
    "HeatedSoftmaxLoss": {"heat_after": 1},
    "HeatedSoftmaxLoss, batch": {"norm": "batch"},
    "AdaCosLoss": {},
    "AdaCosLoss, fixed": {"dynamic": False},
    "AdaFaceLoss": {"momentum": 0.3},
    "MagFaceLoss": {"lower_length": 1.0, "upper_length": 4.0},
    "CenterLoss": {"center_weight": 0.4},
    "ArcFaceLoss, sampled": {"sub_centers": 2, "sample_rate": 0.1, "scale": 8.0},
    "CosFaceLoss, sampled": {"sample_rate": 0.1, "scale": 8.0},
    "ProxyNCALoss": {},
    "ProxyAnchorLoss": {},
    "SoftTripleLoss": {},
}
KINDS = {"float64": (torch.float64, 1e-12), "float32": (torch.float32, 1e-6)}


def numbers(*shape, seed=1):
    """Numbers between -1.5 and 1.5 that are the same everywhere."""
    words = np.random.Philox(seed).random_raw(int(np.prod(shape)))
    return torch.from_numpy((words >> 11).astype(np.float64) / 2**53 * 3 - 1.5).view(*shape)


def batch(centers=1):
    """Items of which some are unknown, some are equal to a class weight, one is 0; a class weight that is 0."""
    x, weight = numbers(ROWS, DIM), numbers(CLASSES * centers, DIM, seed=2)
    labels = torch.arange(ROWS) * 5 % CLASSES
    labels[2] = labels[9] = -1
    x[5], x[6], x[4] = 0, 2 * weight[labels[6] * centers], -weight[labels[4] * centers]
    weight[3 * centers] = 0
    return x, labels, weight


def outcome(form, kind, reduction, **more):
    name, settings, centers = FORMS[form]
    x, labels, weight = batch(centers)
    tensors = [x.to(kind).requires_grad_(), weight.to(kind).requires_grad_()]
    if name in ("heated_softmax_loss", "center_loss"):
        tensors.append(numbers(CLASSES, seed=3).to(kind).requires_grad_())
    others = [numbers(CLASSES, DIM, seed=4).to(kind)] if name == "center_loss" else []
    if name != "proxy_anchor_loss":
        more["reduction"] = reduction
    elif reduction != "mean":
        return []
    value = getattr(losses, name)(tensors[0], labels, *tensors[1:], *others, **settings, **more)
    value.backward(torch.linspace(0.3, 2.1, value.numel(), dtype=value.dtype).view(value.shape))
    return [value.detach(), *(t.grad for t in tensors)]


def steps(name, kind, **more):
    settings = STEPS[name] | more
    classes = 19 if "sampled" in name else CLASSES
    loss = getattr(losses, name.split(",")[0])(classes, DIM, **settings).to(kind)
    found = []
    with torch.no_grad():
        for number, parameter in enumerate(loss.parameters()):
            parameter.copy_(numbers(*parameter.shape, seed=10 + number))
    for step in range(3):
        x = numbers(ROWS, DIM, seed=20 + step).to(kind).requires_grad_()
        torch.manual_seed(step)
        loss.zero_grad()
        value = loss(x, torch.arange(ROWS) * (step + 2) % CLASSES)
        value.backward()
        found += [value.detach(), x.grad, *(p.grad for p in loss.parameters())]
    named = {key: value for key, value in loss.named_buffers() if not key.startswith("running_") or "batch" in name}
    return [*found, *(named[key].double() for key in sorted(named))]


def same(key, found, tolerance):
    with np.load(PINS) as pins:
        wanted = torch.from_numpy(pins[key]).double().split([tensor.numel() for tensor in found])
    for a, b in zip(found, wanted, strict=True):
        assert float((a.double().flatten() - b).abs().max()) <= tolerance * max(1.0, float(b.abs().max())), key


def blocks_of(form):
    if "dynamic" in form:
        pytest.skip("refused: it has no blocks of classes")
    return BLOCKS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduction", ["none", "mean", "active", "sum"])
@pytest.mark.parametrize("form", FORMS)
def test_whole(form, reduction, kind):
    same(f"{form}/{reduction}/{kind}", outcome(form, KINDS[kind][0], reduction), KINDS[kind][1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
def test_in_blocks(form, kind):
    for reduction in ("none", "mean"):
        same(f"{form}/{reduction}/{kind}", outcome(form, KINDS[kind][0], reduction, **blocks_of(form)), KINDS[kind][1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", STEPS)
def test_steps(name, kind):
    same(f"{name}/{kind}", steps(name, KINDS[kind][0]), KINDS[kind][1])


def write():
    """Made once, by the version before: `python test_pinned_classes.py`."""
    pins = {}
    every = {f"{f}/{r}/{k}": partial(outcome, f, KINDS[k][0], r)
             for f in FORMS for r in ("none", "mean", "active", "sum") for k in KINDS}  # fmt: skip
    every |= {f"{name}/{k}": partial(steps, name, KINDS[k][0]) for name in STEPS for k in KINDS}
    for key, make in every.items():
        pins[key] = torch.cat([tensor.flatten() for tensor in make()] or [torch.zeros(0)]).numpy()
    np.savez_compressed(PINS, **pins)


if __name__ == "__main__":
    write()
