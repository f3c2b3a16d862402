"""The softmax over many classes by its kernel, beside float64: in Triton's interpreter, and on a GPU where one is."""

import json

import pytest
import torch
import torch.nn.functional as F

from interpreter import interpreted

SHAPES = [(20, 300, 24, True), (70, 515, 40, True), (70, 515, 40, False), (130, 700, 64, True)]


def batch(anchors, classes, dim, kind, device):
    """Anchors near their class, one of no class here, some of the same one; class weights, one of them all zero."""
    g = torch.Generator().manual_seed(anchors)
    weight = 0.1 * torch.randn(classes, dim, generator=g)
    ids = torch.randint(classes, (anchors,), generator=g)
    x = torch.randn(anchors, dim, generator=g) + 20 * weight[ids]
    ids[5:9] = 7
    weight[3] = 0
    ids = torch.where(ids == 3, 4, ids)
    ids[2] = classes
    return x.to(kind).to(device), weight.to(kind).to(device), ids.to(device)


def exact(x, weight, ids, normalize, lost, upstream, by_own):
    """The log-sum-exp of the others and the gradients by scaled anchors and weights, in float64."""
    scaled = (4 * F.normalize(x.double())).requires_grad_()
    weight = weight.double().requires_grad_()
    alive = weight.detach().any(1)
    rows = torch.where(alive[:, None], F.normalize(torch.where(alive[:, None], weight, 1.0)), 0.0)
    scores = scaled @ (rows if normalize else weight).T + torch.where(alive, 0.0, lost)
    own = ids[:, None] == torch.arange(len(weight), device=x.device)
    rest = torch.logsumexp(torch.where(own, -torch.inf, scores), 1)
    here = ids < len(weight)
    ((rest * upstream).sum() + (weight[ids[here]] * by_own[here]).sum()).backward()
    return rest.detach(), scaled.grad, weight.grad


def judged(shape, kind, device, run=256):
    """The largest error of value and gradients, by the size of the largest entry."""
    from nearkin.kernels import many_classes

    *sizes, normalize = shape
    lost = -30.0 if normalize else 0.0
    x, weight, ids = batch(*sizes, kind, device)
    g = torch.Generator().manual_seed(1)
    upstream = torch.randn(len(x), generator=g, dtype=torch.float64).to(device)
    by_own = torch.randn(x.shape, generator=g, dtype=torch.float64).to(device)
    wanted = exact(x, weight, ids, normalize, lost, upstream, by_own)
    scaled = (4 * F.normalize(x.double())).float().requires_grad_()
    learned = weight.clone().requires_grad_()
    peak, rest, own, taint = many_classes.rivals(x, scaled, learned, ids, normalize, lost, run)
    here = (ids < len(weight))[:, None]
    ((rest * upstream).sum() + (own * torch.where(here, by_own, 0.0)).sum()).backward()
    got = (peak + rest).detach(), scaled.grad, learned.grad
    assert float(taint) == 0 and learned.grad.dtype == kind
    return [float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(got, wanted, strict=True)]


def lengths(kind, device):
    from nearkin.kernels import many_classes

    rows = torch.tensor([1e-30, 0, 1e25, torch.inf, 1e-36, 3]).repeat(32, 1).T.contiguous().to(kind).to(device)
    return (many_classes.lengths(rows).double() * rows[:, 0].double() * 32**0.5).tolist()


def in_the_interpreter():
    from nearkin.kernels import many_classes

    many_classes.H, many_classes.W, many_classes.D = 64, 32, 16  # several tiles in a small test
    print(json.dumps([[judged(s, torch.float32, "cpu") for s in SHAPES], lengths(torch.float32, "cpu")]))


def assert_lengths(got):
    assert torch.tensor(got).nan_to_num(7).tolist() == pytest.approx([1, 0, 1, 7, 0, 1], abs=1e-2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU itself judges the kernel")
def test_equals_float64_in_the_interpreter():
    errors, of_lengths = interpreted(__file__, "in_the_interpreter")
    assert max(map(max, errors)) < 2e-6, errors
    assert_lengths(of_lengths)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.parametrize("shape", [*SHAPES, (300, 5000, 96, True)], ids=str)
def test_equals_float64_on_a_gpu(shape):
    value, by_scaled, by_weight = judged(shape, torch.bfloat16, "cuda", 1024)
    assert value < 1e-6 and by_scaled < 4e-3 and by_weight < 8e-3
    assert judged(shape, torch.bfloat16, "cuda", 1024) == [value, by_scaled, by_weight]  # the same every time
    assert_lengths(lengths(torch.bfloat16, "cuda"))
