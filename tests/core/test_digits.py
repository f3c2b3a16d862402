"""Distances by digits, which devices without fast float64 compute, against float64: forced here, on the CPU."""

import subprocess
import sys

import pytest
import torch

from cases import LOSSES
from nearkin import kernels, losses
from nearkin.core import devices, distances

KINDS = ("ordinary", "near", "equal", "pairs", "multiples", "large", "tiny", "mixed", "clusters", "zero rows")
MEASURES = (distances.squared_euclidean, distances.euclidean)


@pytest.fixture
def forced():
    kernels.set_float64_units(False)
    yield
    kernels.set_float64_units("auto")


def rows(kind, number=60, dim=40, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(number, dim, generator=g)
    if kind == "near":
        x = torch.randn(dim, generator=g) + 1e-4 * x
    if kind == "equal":
        x[1::2] = x[::2]
    if kind == "pairs":
        x[1::2] = x[::2] + 10.0 ** -torch.randint(1, 6, (number // 2, 1), generator=g) * x[1::2]
    if kind == "multiples":
        x[1::2] = x[::2] * (1 + 1e-4)
    if kind == "large":
        x *= 1e11
    if kind == "tiny":
        x *= 1e-18
    if kind == "mixed":
        x *= 10.0 ** torch.randint(-5, 6, (number, 1), generator=g)
    if kind == "clusters":
        x = 10 * torch.randn(6, dim, generator=g).repeat(number // 6, 1) + 0.1 * x
    if kind == "zero rows":
        x[4] = x[9] = 0
    return x


def outcome(measure, x, r, normalize):
    """The matrix, and the gradients by both sides under slopes of either sign, all in float64."""
    inputs = [t.clone().requires_grad_() for t in (x, r) if t is not None]
    matrix = measure(inputs[0], inputs[1] if r is not None else None, normalize=normalize)
    slopes = torch.randn(matrix.shape, generator=torch.Generator().manual_seed(1))
    (matrix * slopes.to(matrix.dtype) / matrix.detach().max()).sum().backward()
    return [matrix.detach().double(), *(t.grad.double() for t in inputs)]


@pytest.mark.parametrize("normalize", [True, False], ids=["unit", "raw"])
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "met"])
@pytest.mark.parametrize("kind", KINDS)
def test_as_exact_as_float64(kind, alone, normalize, forced):
    x = rows(kind)
    r = None if alone else torch.cat((x[3:20], rows(kind, seed=1)[:18]))
    for measure in MEASURES:
        kernels.set_float64_units("auto")
        exact = outcome(measure, x.double(), None if r is None else r.double(), normalize)
        plain = outcome(measure, x, r, normalize)
        kernels.set_float64_units(False)
        got = outcome(measure, x, r, normalize)
        for ours, theirs, true in zip(got, plain, exact, strict=True):
            error, allowed = (float((t - true).abs().max() / true.abs().max()) for t in (ours, theirs))
            assert error <= allowed + 1e-6, (measure.__name__, error, allowed)
        assert bool((got[0][plain[0] == 0] == 0).all())
        wide = [distances.unit(t.double()) if normalize else t.double() for t in (x, r) if t is not None]
        true = (wide[0][:, None] - wide[-1][None, :]).square().sum(2)  # a Gram matrix of float64 has fewer digits
        true = true.sqrt() if measure is distances.euclidean else true
        apart = plain[0] > 0
        assert float(((got[0] - true).abs() / true)[apart].max()) < 1e-6, measure.__name__  # of each, however near


def test_duplicates_are_at_distance_exactly_0(forced):
    x = rows("equal", dim=300)  # more than float32 sums of all digits hold
    for normalize in (True, False):
        distance = distances.euclidean(x, x.clone(), normalize=normalize)
        assert bool((distance[::2, ::2].diagonal() == 0).all()) and bool((distance[::2, 1::2].diagonal() == 0).all())
        assert int((distance == 0).sum()) == 120


PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_, torch.ops.aten.bmm)


class Products(torch.utils._python_dispatch.TorchDispatchMode):
    """Products of float64 that were made, as the shapes of their results."""

    def __init__(self):
        super().__init__()
        self.all, self.wide = 0, []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        if function.overloadpacket in PRODUCTS:
            self.all += 1
            if result.dtype == torch.float64:
                self.wide.append(tuple(result.shape))
        return result


@pytest.mark.parametrize("case", LOSSES, ids=str)
def test_no_product_of_float64_is_left(case, forced):
    """In a step of plain torch."""
    loss, (x, labels) = case.build(torch.float32), case.batch(torch.float32)
    with Products() as products:
        loss(x.requires_grad_(), labels).sum().backward()
    assert products.all and not products.wide


def test_float64_keeps_its_products(forced):
    with Products() as products:
        losses.contrastive_loss(rows("ordinary").double(), torch.arange(60) // 4)
    assert products.wide == [(60, 60)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # a compiler's own
@pytest.mark.parametrize("references", [False, True], ids=["alone", "references"])
@pytest.mark.parametrize("name", ["contrastive", "triplet", "logratio", "fastap"])
def test_compiled_losses_multiply_digits_too(name, references, forced):
    """One opaque operator each way: the numbers of eager mode, and no product in the compiled graph."""
    function = getattr(losses, f"{name}_loss")
    torch._dynamo.reset()
    targets = []

    def backend(graph, inputs):
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    def outcome(loss):
        x = rows("ordinary").requires_grad_()
        labels = torch.arange(60) // 4
        others = [rows("pairs")[:30].requires_grad_(), torch.arange(30) // 3] if references else []
        value = loss(x, labels.float() if name == "logratio" else labels, *others)
        value.backward()
        return [value.detach(), x.grad, *(t.grad for t in others[:1])]

    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for got, eager in zip(outcome(compiled), outcome(function), strict=True):
        torch.testing.assert_close(got, eager, rtol=1e-6, atol=1e-7)
    assert any("digit_distances" in target for target in targets)
    assert not any("matmul" in target for target in targets)


@pytest.mark.parametrize("shape", [(0, None, 3), (0, 4, 3), (4, 0, 3), (1, None, 1), (3, 2, 0)], ids=str)
def test_empty_batches(shape, forced):
    number, num_references, dim = shape
    x = torch.randn(number, dim).requires_grad_()
    r = None if num_references is None else torch.randn(num_references, dim)
    for measure in MEASURES:
        matrix = measure(x, r)
        matrix.sum().backward()
        assert matrix.shape == (number, number if r is None else num_references)
    assert x.grad.shape == x.shape


def test_a_second_derivative(forced):
    x = rows("ordinary")[:6, :3].requires_grad_()

    def slope(x):
        (slope,) = torch.autograd.grad(distances.squared_euclidean(x).square().sum(), x, create_graph=True)
        return slope

    (forced_curve,) = torch.autograd.grad(slope(x).square().sum(), x)
    (exact,) = torch.autograd.grad(slope(x.double()).square().sum(), x)
    torch.testing.assert_close(forced_curve, exact.to(x.dtype), rtol=1e-5, atol=1e-5)


def test_the_setting():
    assert kernels.float64_units() == "auto" and devices.has_float64_units(torch.empty(0))
    with pytest.raises(ValueError, match="float64_units"):
        kernels.set_float64_units("off")
    kernels.set_float64_units(False)
    try:
        assert not devices.has_float64_units(torch.empty(0)) and not kernels.has_float64_units(torch.empty(0))
    finally:
        kernels.set_float64_units("auto")


@pytest.mark.parametrize("word", ["0", "no"])
def test_the_setting_of_the_environment(word, monkeypatch):
    monkeypatch.setenv("NEARKIN_FLOAT64_UNITS", word)
    code = "from nearkin import kernels; print(kernels.float64_units())"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.stdout == ("False\n" if word == "0" else "")
    assert ("NEARKIN_FLOAT64_UNITS" in process.stderr) == (word != "0")
