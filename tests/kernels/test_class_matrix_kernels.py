"""The kernels of Proxy-Anchor, SoftTriple and softmax + center, through Triton's interpreter, against the plain losses.

Tests on a GPU use the same table.
"""

import json
import math

import pytest
import torch

from interpreter import interpreted
from nearkin import losses
from nearkin.core import checks
from nearkin.kernels import center_ops, class_dense_ops, proxy_anchor_ops, soft_triple_ops

pytestmark = pytest.mark.slow

OPS = (proxy_anchor_ops, soft_triple_ops, center_ops)


# function, settings, rows per class; softmax + center learns a bias and has centres too
FORMS = {
    "anchor": (losses.proxy_anchor_loss, {}, 1),
    "anchor, sharp": (losses.proxy_anchor_loss, {"margin": 0.2, "scale": 80.0}, 1),
    "triple": (losses.soft_triple_loss, {}, 10),
    "triple, sum": (losses.soft_triple_loss, {"centers_per_class": 3, "reduction": "sum", "tau": 1.0}, 3),
    "triple, active": (losses.soft_triple_loss, {"centers_per_class": 2, "reduction": "active", "gamma": 0.03}, 2),
    "triple, no tau": (losses.soft_triple_loss, {"centers_per_class": 4, "tau": 0.0, "margin": 0.2}, 4),
    "triple, one": (losses.soft_triple_loss, {"centers_per_class": 1, "reduction": "active"}, 1),
    "center": (losses.center_loss, {}, 1),
    "center, sum": (losses.center_loss, {"pull": 0.7, "reduction": "sum"}, 1),
    "center, active": (losses.center_loss, {"pull": 0.0, "reduction": "active"}, 1),
}
SHAPES = [(1, 1, 3), (5, 3, 4), (19, 6, 20), (7, 40, 130)]  # B, C, D
HALVES = (torch.bfloat16, torch.float16)


def batch(form, shape, seed=0, device="cpu"):
    """Anchors, some near their class, one unknown and one zero where there are several; labels; the loss's tensors."""
    number, classes, dim = shape
    g = torch.Generator().manual_seed(seed)
    each = FORMS[form][2]
    weight = torch.randn(classes * each, dim, generator=g)
    labels = torch.randint(classes, (number,), generator=g)
    x = weight[labels * each] + torch.randn(number, dim, generator=g)
    if number > 3:
        labels[2], x[3] = -1, 0.0
    others = []
    if FORMS[form][0] is losses.center_loss:
        others = [torch.randn(classes, generator=g), torch.randn(classes, dim, generator=g)]
    return [t.to(device) for t in (x, labels, weight, *others)]


def outcome(form, inputs, upstream=0.7, **settings):
    """The value, and the gradients by anchors, weights and biases."""
    function, own, _ = FORMS[form]
    x, labels, weight, *others = (t.detach().clone() for t in inputs)
    learned = [t.requires_grad_() for t in (x, weight, *others[:1])]
    value = function(x, labels, weight, *others, **(own | settings))
    value.backward(torch.full_like(value, upstream))
    return [value.detach(), *(t.grad for t in learned)]


def typed(inputs, kind):
    return [t.to(kind) if t.is_floating_point() else t for t in inputs]


def errors(got, exact):
    """The largest error of each tensor, by the size of its largest entry."""
    pairs = zip(got, exact, strict=True)
    return [float((a.double() - b).abs().max() / b.abs().max().clamp(min=1e-3)) for a, b in pairs]


def compared(form, shape, seeds=1, device="cpu", impl="triton", kind=torch.float32):
    """Mean errors of the kernel and of plain torch against float64."""
    each = []
    for seed in range(seeds):
        inputs = typed(batch(form, shape, seed, device), kind)
        exact = outcome(form, typed(inputs, torch.float64), impl="torch")
        got, plain = outcome(form, inputs, impl=impl), outcome(form, inputs, impl="torch")
        assert [t.dtype for t in got] == [t.dtype for t in plain]
        each.append([errors(got, exact), errors(plain, exact)])
    return torch.tensor(each).mean(0).tolist()


def count_served():
    """A list that grows with each loss that the kernels compute."""
    served = []
    for module in OPS:
        apply = module._Loss.apply
        module._Loss.apply = lambda *arguments, apply=apply: served.append(1) or apply(*arguments)
    return served


def judge_kernels():
    """What the tests below read, as JSON."""
    served, cases, facts = count_served(), {}, {}
    for form in FORMS:
        for shape in SHAPES if "," not in form else SHAPES[1:3]:
            for few in (0, class_dense_ops.FEW_WEIGHTS):  # products by torch, and within the kernels
                class_dense_ops.FEW_WEIGHTS = few
                served.clear()
                seeds = 3 if shape[0] <= 5 else 1  # few numbers are close by luck, or not
                cases[f"{form} {shape} {few}"] = [*compared(form, shape, seeds), len(served) / seeds]
    for form in ("anchor", "triple, sum", "center"):
        for kind in HALVES:
            served.clear()
            cases[f"{form} {kind}"] = [*compared(form, SHAPES[1], 3, kind=kind), len(served) / 3]
        facts |= {f"{form}: {name}": bool(sound) for name, sound in edges(form, served).items()}
    facts |= center_facts(served)
    print(json.dumps([cases, facts]))


def edges(form, served, device="cpu", impl="triton"):
    """What must hold at the edges, by name."""
    function, settings, _ = FORMS[form]
    inputs = batch(form, SHAPES[1], device=device)
    x, labels, weight, *others = inputs
    first = outcome(form, inputs, impl=impl)
    sound = {"int32 labels": all(map(torch.equal, outcome(form, [x, labels.int(), *inputs[2:]], impl=impl), first))}
    unknown = outcome(form, [x, torch.full_like(labels, -1), *inputs[2:]], impl=impl)
    sound["no known label is exactly 0"] = not any(bool(t.any()) for t in unknown)
    apart = [t.repeat_interleave(2, t.dim() - 1)[..., ::2] for t in inputs]
    sound["not contiguous"] = all(map(torch.equal, outcome(form, apart, impl=impl), first))
    for poison in (math.nan, math.inf):
        for place, tensor in enumerate(inputs):
            if place == 1 or (place == 4 and poison == math.inf):  # a far centre is far
                continue
            for row in (0, 2) if place == 0 else (int(labels[0]) * FORMS[form][2],):
                poisoned = tensor.clone()
                poisoned.view(len(tensor), -1)[row, -1] = poison
                arguments = [*inputs[:place], poisoned, *inputs[place + 1 :]]
                sound[f"{poison} in {place}, row {row}"] = function(*arguments, impl=impl, **settings).isnan()
    for size in (1e-30, 1e30, 3e38):
        got = outcome(form, [x.sign() * size, labels, weight.sign() * size, *others], impl=impl)
        sound[f"finite at {size}"] = all(bool(t.isfinite().all()) for t in got)
    learned, fixed = x.clone().requires_grad_(), weight.clone().requires_grad_()
    value = function(learned, labels, weight, *others, impl=impl, **settings)
    value.backward(retain_graph=True)
    once = learned.grad.clone()
    value.backward()
    sound["backward twice"] = torch.equal(learned.grad, 2 * once)
    function(x, labels, fixed, *others, impl=impl, **settings).backward()
    sound["gradients of one input"] = all(
        torch.allclose(grad, each / 0.7, rtol=1e-5) for grad, each in ((once, first[1]), (fixed.grad, first[2]))
    )
    with torch.no_grad():
        sound["without a gradient"] = torch.equal(function(*inputs, impl=impl, **settings), first[0])
    with torch.autocast(x.device.type, torch.bfloat16):
        sound["autocast"] = all(map(torch.equal, outcome(form, inputs, impl=impl), first))
    sound["second derivative"] = second_derivatives(form, inputs, impl) < 1e-4
    served.clear()
    outcome(form, typed(inputs, torch.float64), impl=impl)
    function(x, labels, weight, *others, impl="torch", **settings)
    function(x[:0], labels[:0], weight, *others, impl=impl, **settings)
    sound["not for the kernels"] = not served
    return sound | out_of_range(form, inputs, impl)


def second_derivatives(form, inputs, impl):
    """The error of a derivative of the gradient by the anchors, by float64."""
    function, settings, _ = FORMS[form]
    results = []
    for kind, choice in ((torch.float32, impl), (torch.float64, "auto")):
        x, labels, *others = typed(inputs, kind)
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(function(x, labels, *others, impl=choice, **settings), x, create_graph=True)
        results.append(torch.autograd.grad((slope * slope.detach().sign()).sum(), x))
    return max(errors(*results))


def out_of_range(form, inputs, impl):
    """An id out of range is an error where values are read, else NaN."""
    function, settings, _ = FORMS[form]
    x, labels, *others = inputs
    reads, sound = checks.reads_values, {}
    try:
        checks.reads_values = lambda tensor: True
        function(x, labels + 2, *others, impl=impl, **settings)
        sound["out of range is an error"] = False
    except ValueError as error:
        sound["out of range is an error"] = "labels" in str(error)
    checks.reads_values = lambda tensor: False
    sound["out of range is NaN"] = function(x, labels + 2, *others, impl=impl, **settings).isnan()
    checks.reads_values = reads
    return sound


def center_facts(served, device="cpu", impl="triton"):
    """The step of the centres, and memory bounds of SoftTriple."""
    sound = {}
    x, labels, _, _, centers = batch("center", (40, 6, 20), device=device)
    x[7, 3], x[9, 2], x[11, 1] = math.nan, math.inf, 1e30
    exact = losses.center_update(x.double(), labels, centers.double(), alpha=0.3)
    errors = [
        float((losses.center_update(x, labels, centers, alpha=0.3, impl=each) - exact).abs().max() / 1e13)
        for each in (impl, "torch")
    ]
    sound["step with extremes"] = errors[0] <= errors[1] + 1e-6
    x, labels, _, _, centers = batch("center", (70, 3, 140), device=device)
    exact = losses.center_update(x.double(), labels, centers.double())
    got = losses.center_update(x, labels, centers, impl=impl)
    sound["step"] = float((got - exact).abs().max()) < 2e-6 and not torch.equal(got, centers)
    module = losses.CenterLoss(3, 140, impl=impl).to(device)
    served.clear()
    module(x, labels)
    sound["module"] = len(served) == 1 and torch.equal(
        module.centers, losses.center_update(x, labels, torch.zeros_like(centers), impl=impl)
    )
    served.clear()
    x, labels, centers = batch("triple", (19, 30, 4), device=device)
    blocks = losses.soft_triple_loss(x, labels, centers, impl=impl, max_memory=2**15)
    sound["blocks"] = not served and torch.allclose(blocks, losses.soft_triple_loss(x, labels, centers, impl=impl))
    return sound


@pytest.fixture(scope="module")
def judged():
    return interpreted(__file__, "judge_kernels")


def test_kernels_are_as_exact_as_plain_torch(judged):
    assert len(judged[0]) == 2 * (3 * len(SHAPES) + (len(FORMS) - 3) * 2) + 3 * len(HALVES)
    for name, (got, plain, served) in judged[0].items():
        assert served == 1, name
        for ours, theirs in zip(got, plain, strict=True):
            assert ours <= theirs + 1e-6, (name, got, plain)


def test_kernels_mind_the_edges(judged):
    assert not [name for name, sound in judged[1].items() if not sound]


def test_modules_keep_the_choice():
    for make in (losses.SoftTripleLoss, losses.CenterLoss):
        assert "impl" not in make(3, 4).settings
        assert "impl='torch'" in repr(make(3, 4, impl="torch"))
        with pytest.raises(ValueError, match='unknown impl "tritn"; did you mean "triton"'):
            make(3, 4, impl="tritn")
