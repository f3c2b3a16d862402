"""Losses over class weights with all scores in memory, by kernels, through Triton's interpreter."""

import json
import math

import pytest
import torch

import nearkin
from class_cases import CLASS_CASES, batch, counted, errors, judged, outcome, without_kernels
from interpreter import interpreted
from nearkin import kernels, losses
from nearkin.kernels import class_dense_ops

F32, BF16, F16, MIXED = ("float32",) * 2, ("bfloat16",) * 2, ("float16",) * 2, ("bfloat16", "float32")
ULP = 2.0**-18  # of a float32 logit below 64: what rounding it once more moves the gradient by, relative to itself


def exact_cases():
    """Name, shape, types, reduction: every loss, every type, odd shapes."""
    for place, name in enumerate(CLASS_CASES):
        reduction = "mean" if "raw" in name else ("mean", "active", "sum")[place % 3]  # beyond 1e-8 plain torch has 0
        yield name, (13, 21, 12), F32, reduction
    for shape in ((1, 1, 4), (1, 7, 3), (5, 2, 4), (20, 40, 300)):
        for name in ("arcface, 3 centres", "sphereface", "proxy-nca, original", "heated"):
            yield name, shape, F32, "mean"
    for kinds in (BF16, F16, MIXED):
        for name in ("arcface", "sphereface", "magface", "heated, raw"):
            yield name, (9, 11, 8), kinds, "mean"


def judge_exact():
    """By few scores, which kernels multiply, and by many, which torch does."""
    cases = {}
    for few in (class_dense_ops.FEW_WEIGHTS, 0):
        class_dense_ops.FEW_WEIGHTS = few
        cases |= {f"{few} {' '.join(map(str, case))}": judged(*case) for case in exact_cases()}
    kernels.has_float64_units = lambda tensor: False
    cases |= {f"without float64, {name}": judged(name, (70, 21, 12), F32, "mean") for name in ("arcface", "heated")}
    print(json.dumps(cases))


def judge_edges():
    """Facts by name, each True."""
    facts = {}
    x, labels, weight, bias = batch((9, 11, 4), dtype=torch.float32)
    case, arguments = CLASS_CASES["arcface"], (x, labels, weight, bias)
    base = outcome(case, arguments, "mean", impl="triton")
    for kind in (torch.int32, torch.int16, torch.int8):
        got = outcome(case, (x, labels.to(kind), weight, bias), "mean", impl="triton")
        facts[f"labels of {kind}"] = all(map(torch.equal, got, base))
    strided = (x.repeat(1, 2)[:, :4], labels.repeat_interleave(2)[::2], weight.T.contiguous().T, bias)
    facts["not contiguous"] = all(map(torch.equal, outcome(case, strided, "mean", impl="triton"), base))
    with torch.autocast("cpu", torch.bfloat16):
        facts["autocast"] = all(map(torch.equal, outcome(case, arguments, "mean", impl="triton"), base))
    unknown = (x, torch.full_like(labels, -1), weight, bias)
    for name in ("arcface", "heated", "proxy-nca, original"):
        got = outcome(CLASS_CASES[name], unknown, "mean", impl="triton")
        facts[f"no known label is exactly 0, {name}"] = not any(bool(t.any()) for t in got)
    facts |= poisoned(arguments) | graph(arguments) | choices(arguments)
    for few in (class_dense_ops.FEW_WEIGHTS, 0):
        class_dense_ops.FEW_WEIGHTS = few
        facts |= {f"{name}, few: {few}": fact for name, fact in (extremes() | modules()).items()}
    print(json.dumps(facts))


def poisoned(arguments):
    facts = {}
    for poison in (math.nan, math.inf, -math.inf):
        for place, row in ((0, 0), (0, 2), (2, 0), (2, 10), (3, 10)):
            changed = [t.clone() for t in arguments]
            changed[place].view(len(changed[place]), -1)[row, -1] = poison
            got = outcome(CLASS_CASES["heated"], tuple(changed), "mean", impl="triton")
            facts[f"{poison} in {place}, row {row}"] = math.isnan(float(got[0]))
    x, labels, weight, _ = arguments
    pair = weight[:10].repeat_interleave(2, 0)  # the second of two equal centres never scores
    pair[5, 1] = math.nan
    facts["NaN in a centre that never scores"] = math.isnan(
        float(losses.arcface_loss(x, labels % 10, pair, sub_centers=2, impl="triton"))
    )
    reads, nearkin.core.checks.reads_values = nearkin.core.checks.reads_values, lambda tensor: False
    facts["out of range"] = math.isnan(float(losses.cosface_loss(x, labels + 9, weight, impl="triton")))
    nearkin.core.checks.reads_values = reads
    try:
        losses.cosface_loss(x, labels + 9, weight, impl="triton")
    except ValueError as error:
        facts["out of range where values are read"] = "labels must be in 0..10" in str(error)
    return facts


def extremes():
    """Cosines of exactly ±1, zero rows, lengths from 1e-30 to 1e30."""
    far = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0], [1e-30, 0.0], [0.0, 1e30], [2.0, 1e-7]])
    facts = {}
    for name in ("arcface", "sphereface", "proxy-nca", "heated, raw"):
        for ids in (torch.arange(6), torch.tensor([1, 0, 3, 4, 2, 0])):
            got = outcome(CLASS_CASES[name], (far, ids, far, torch.zeros(6)), "mean", impl="triton")
            facts[f"finite: {name} {ids.tolist()}"] = all(bool(t.isfinite().all()) for t in got)
    # Solved to 1e-5 and less, where 1 less the own class's part would have lost them in float32.
    g = torch.Generator().manual_seed(3)
    weight, labels = torch.eye(6), torch.arange(6)
    x = weight + 0.05 * torch.randn(6, 6, generator=g)
    for name in ("normalized", "cosface", "proxy-nca"):
        with without_kernels():
            wide = (x.double(), labels, weight.double(), weight)
            exact = outcome(CLASS_CASES[name], wide, "sum")
        got = outcome(CLASS_CASES[name], (x, labels, weight, weight), "sum", impl="triton")
        relative = [float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(got, exact, strict=True)]
        facts[f"digits of a small loss: {name}"] = max(relative) < 2e-5
    return facts


def graph(arguments):
    """What autograd may ask for."""
    x, labels, weight, bias = arguments
    base = outcome(CLASS_CASES["heated"], arguments, "mean", impl="triton")
    facts = {}
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    value = losses.heated_softmax_loss(leaves[0], labels, *leaves[1:], impl="triton")
    value.backward(torch.tensor(-1.0), retain_graph=True)
    value.backward(torch.tensor(-0.7))
    facts["twice through the same graph"] = max(errors([t.grad for t in leaves], [g.double() for g in base[1:]])) < 1e-6
    for learns in range(3):
        leaves = [t.clone().requires_grad_(place == learns) for place, t in enumerate((x, weight, bias))]
        losses.heated_softmax_loss(leaves[0], labels, *leaves[1:], impl="triton").backward(torch.tensor(-1.7))
        others = [t.grad for place, t in enumerate(leaves) if place != learns]
        facts[f"only {learns} learns"] = others == [None, None] and torch.equal(leaves[learns].grad, base[1 + learns])
    facts["nothing learns"] = torch.equal(losses.heated_softmax_loss(x, labels, weight, bias, impl="triton"), base[0])
    for name in ("normalized", "arcface", "sphereface", "magface", "heated", "proxy-nca"):
        facts[f"twice differentiable: {name}"] = second(name, arguments)
    half = weight.bfloat16().requires_grad_()
    if hasattr(half, "grad_dtype"):
        half.grad_dtype = torch.float32
        losses.cosface_loss(x, labels, half, impl="triton").backward()
        facts["a float32 gradient of bfloat16"] = half.grad.dtype == torch.float32
    return facts


def second(name, arguments):
    """Whether a gradient of the gradient is that of the plain road."""
    case, outcomes = CLASS_CASES[name], []
    for plain in (False, True):
        learned = [
            t.clone().requires_grad_() for t in (arguments if case.bias else arguments[:3]) if t is not arguments[1]
        ]
        with without_kernels() if plain else counted() as served:
            value = case.function(
                learned[0], arguments[1], *learned[1:], **case.settings, impl="triton" if not plain else "auto"
            )
            slopes = torch.autograd.grad(value, learned, create_graph=True)
        sum(slope.square().sum() for slope in slopes).backward()
        outcomes.append([t.grad.double() for t in learned])
        assert plain or len(served) == 1
    return max(errors(*outcomes)) < 1e-4


def modules():
    """The modules' own state beside the plain road, over three steps."""
    facts = {}
    for make in (
        lambda: losses.AdaCosLoss(8, 4, impl="triton"),
        lambda: losses.HeatedSoftmaxLoss(8, 4, heat_after=1, impl="triton"),
        lambda: losses.HeatedSoftmaxLoss(8, 4, norm="batch", impl="triton"),
        lambda: losses.SphereFaceLoss(8, 4, impl="triton"),
        lambda: losses.AdaFaceLoss(8, 4, momentum=0.4, impl="triton"),
        lambda: losses.MagFaceLoss(8, 4, lower_length=1.0, upper_length=4.0, impl="triton"),
        lambda: losses.ArcFaceLoss(8, 4, sub_centers=3, sample_rate=0.5, impl="triton"),
    ):
        ours, twin = make(), make()
        twin.load_state_dict(ours.state_dict())
        sound = True
        for step in range(3):
            x, labels, _, _ = batch((9 + step, 8, 4), seed=step, dtype=torch.float32)
            states = []
            for module in (ours, twin):
                torch.manual_seed(step)
                for parameter in module.parameters():
                    parameter.grad = None
                leaf = x.clone().requires_grad_()
                if module is ours:
                    with counted() as served:
                        value = module(leaf, labels)
                    sound = sound and len(served) == 1
                else:
                    with without_kernels():
                        value = module(leaf, labels)
                value.backward()
                gradients = [leaf.grad, *(p.grad for p in module.parameters())]
                states.append([value.detach(), *gradients, *(b.double() for b in module.buffers())])
            sound = sound and max(errors(states[0], [t.double() for t in states[1]])) < 1e-5
        facts[f"three steps of {ours}"] = sound
    adacos = losses.AdaCosLoss(8, 4, impl="triton")
    before = float(adacos.scale)
    adacos(x, torch.full((len(x),), -1)), adacos(x * math.nan, labels)
    facts["a batch that tells nothing leaves the scale"] = float(adacos.scale) == before
    return facts


def choices(arguments):
    """Where the kernels do not serve."""
    x, labels, weight, _ = arguments
    facts = {}
    needed = next(m for m in range(1, 10**5) if class_dense_ops.fits(x, weight, m))
    with counted() as served:
        losses.cosface_loss(x, labels, weight, impl="triton", max_memory=needed)
        facts["within max_memory"] = len(served) == 1
        losses.cosface_loss(x, labels, weight, impl="torch")
        losses.cosface_loss(x, labels, weight)  # on a CPU
        losses.cosface_loss(x, labels, weight, reduction="none", impl="triton")
        losses.cosface_loss(x.double(), labels, weight.double(), impl="triton")
        scale = torch.tensor(7.0, requires_grad=True)
        losses.normalized_softmax_loss(x, labels, weight, scale=scale, impl="triton").backward()
        losses.cosface_loss(x[:0], labels[:0], weight, impl="triton")
        facts["others go another way"] = len(served) == 1 and bool(scale.grad)
    return facts


@pytest.mark.slow
def test_kernels_are_as_exact_as_torch():
    cases = interpreted(__file__, "judge_exact")
    assert len(cases) == 2 * len(list(exact_cases())) + 2
    for name, case in cases.items():
        assert case["served"] == 1, name
        for ours, theirs in zip(case["kernel"], case["torch"], strict=True):
            assert ours <= theirs + ULP, (name, case)


@pytest.mark.slow
def test_kernels_at_the_edges():
    facts = interpreted(__file__, "judge_edges")
    assert len(facts) >= 70
    assert not [name for name, fact in facts.items() if fact is not True]
