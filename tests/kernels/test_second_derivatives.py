"""Second derivatives behind an encoder, with every kind of kernel, by Triton's interpreter: right, or refused."""

import json

import pytest
import torch

from interpreter import interpreted
from nearkin import losses
from nearkin.kernels import class_dense_ops

pytestmark = pytest.mark.slow

DIM, CLASSES = 5, 4
REFUSED = 'a gradient by Triton kernels has no second derivative; impl="torch" computes the loss without them'
BY_CLASS = {
    "CosFace": lambda **how: losses.CosFaceLoss(CLASSES, DIM, **how),
    "ArcFace, sub-centres": lambda **how: losses.ArcFaceLoss(CLASSES, DIM, sub_centers=2, **how),
    "SphereFace": lambda **how: losses.SphereFaceLoss(CLASSES, DIM, **how).eval(),
    "MagFace": lambda **how: losses.MagFaceLoss(CLASSES, DIM, **how),
    "Proxy-NCA": lambda **how: losses.ProxyNCALoss(CLASSES, DIM, **how),
    "Proxy-Anchor": lambda **how: losses.ProxyAnchorLoss(CLASSES, DIM, **how),
}
DENSE = BY_CLASS | {
    "SoftTriple": lambda **how: losses.SoftTripleLoss(CLASSES, DIM, 3, **how),
    "center": lambda **how: losses.CenterLoss(CLASSES, DIM, **how).eval(),
    "heated-up": lambda **how: losses.HeatedSoftmaxLoss(CLASSES, DIM, **how).eval(),
}


def judge():
    """What becomes of each kind, as JSON: the sentence, or the error beside plain torch in float64."""
    verdicts = {f"dense {name}": tried(make) for name, make in DENSE.items()}
    class_dense_ops.MOST = 0  # the scores are not stored
    verdicts |= {f"streamed {name}": tried(make) for name, make in BY_CLASS.items()}
    print(json.dumps(verdicts))


def tried(make):
    slopes = []
    for impl, kind in (("torch", torch.float64), ("triton", torch.float32)):
        torch.manual_seed(4)
        module = make(impl=impl).to(kind)
        g = torch.Generator().manual_seed(3)
        labels = torch.arange(12) % CLASSES
        encoder = torch.randn(DIM, DIM, generator=g).to(kind)
        x = torch.randn(12, DIM, generator=g).to(kind).requires_grad_()
        value = module(torch.tanh(x @ encoder), labels).sum()
        try:
            (slope,) = torch.autograd.grad(value, x, create_graph=True)
            slopes.append(torch.autograd.grad(slope.square().sum(), x)[0].double())
        except RuntimeError as error:
            slopes.append(str(error))
    exact, got = slopes
    if isinstance(got, str):
        return got
    return float((got - exact).abs().max() / exact.abs().max())


def test_second_derivatives_are_right_or_refused():
    verdicts = interpreted(__file__, "judge")
    assert len(verdicts) == len(DENSE) + len(BY_CLASS)
    for name, verdict in verdicts.items():
        right = name.startswith("dense")
        assert verdict <= 1e-4 if right else verdict == REFUSED, (name, verdict)
