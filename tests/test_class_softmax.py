"""Softmax over many classes without logits: the plain pass and the kernel against the dense losses, sampled classes."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import nearkin
from nearkin import kernels, losses
from nearkin.core import class_softmax
from nearkin.kernels import class_softmax as fused

FORMS = {
    "normalized": (losses.normalized_softmax_loss, {}, 1),
    "normalized, learned scale": (losses.normalized_softmax_loss, {"scale": torch.tensor(7.0)}, 1),
    "cosface": (losses.cosface_loss, {}, 1),
    "arcface": (losses.arcface_loss, {}, 1),
    "arcface, wide": (losses.arcface_loss, {"margin": 2.5, "scale": 8.0}, 1),
    "arcface, straight through": (losses.arcface_loss, {"straight_through": True}, 1),
    "arcface, 3 centres": (losses.arcface_loss, {"sub_centers": 3}, 3),
    "sphereface": (losses.sphereface_loss, {"annealing": 0.5}, 1),
    "sphereface, annealed": (losses.sphereface_loss, {"annealing": torch.tensor(3.0), "margin": 3}, 1),
    "adacos": (losses.adacos_loss, {"scale": 9.0}, 1),
}
SHAPES = [(1, 1, 4), (1, 7, 3), (5, 2, 4), (13, 7, 5), (6, 1000, 17)]
every_form = pytest.mark.parametrize("form", FORMS)


def batch(shape, centers=1, dtype=torch.float64, seed=0):
    """Anchors (some near their class, one unknown where there are several), labels and class weights."""
    number, classes, dim = shape
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(classes * centers, dim, generator=g, dtype=torch.float64)
    labels = torch.randint(classes, (number,), generator=g)
    x = weight[labels * centers] + torch.randn(number, dim, generator=g, dtype=torch.float64)
    if number > 3:
        labels[2] = -1
    return x.to(dtype), labels, weight.to(dtype)


def outcome(function, x, labels, weight, **way):
    """Values an anchor, and the gradients under an upstream that is nowhere 1."""
    x, weight = (t.detach().clone().requires_grad_() for t in (x, weight))
    value = function(x, labels, weight, reduction="none", **way)
    upstream = torch.linspace(0.3, 2.1, len(value), dtype=value.dtype)
    value.backward(upstream)
    return [value.detach(), x.grad, weight.grad]


def errors(got, exact):
    """The largest error of each tensor, by the size of the largest entry."""
    pairs = zip(got, exact, strict=True)
    return [float((a.double() - b).abs().max() / b.abs().max().clamp(min=1e-3)) for a, b in pairs]


def blocks_of(monkeypatch, number):
    monkeypatch.setattr(class_softmax, "block", lambda x, weight, centers, max_memory: number * centers)


@every_form
@pytest.mark.parametrize("block", [1, 3, 10**6])
def test_equals_the_dense_loss(form, block, monkeypatch):
    function, settings, centers = FORMS[form]
    blocks_of(monkeypatch, block)
    for shape in SHAPES:
        if (function is losses.adacos_loss and shape[1] < 3) or shape[1] > 300 * block:
            continue
        x, labels, weight = batch(shape, centers)
        dense = outcome(function, x, labels, weight, **settings)
        for ids in (labels, labels.int()):
            got = outcome(function, x, ids, weight, impl="torch", **settings)
            assert max(errors(got, dense)) <= 1e-12, shape


@every_form
@pytest.mark.parametrize("kinds", [("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16")], ids=str)
def test_is_as_exact_as_the_dense_loss(form, kinds, monkeypatch):
    function, settings, centers = FORMS[form]
    blocks_of(monkeypatch, 64)
    x, labels, weight = batch((24, 300, 32), centers)
    x, weight = x.to(getattr(torch, kinds[0])), weight.to(getattr(torch, kinds[1]))
    exact = outcome(function, x.double(), labels, weight.double(), **settings)
    dense = outcome(function, x, labels, weight, **settings)
    got = outcome(function, x, labels, weight, impl="torch", **settings)
    assert [t.dtype for t in got] == [t.dtype for t in dense]
    for ours, theirs in zip(errors(got, exact), errors(dense, exact), strict=True):
        assert ours <= theirs + 1e-6


@every_form
def test_gradcheck(form, monkeypatch):
    function, settings, centers = FORMS[form]
    blocks_of(monkeypatch, 2)
    x, labels, weight = batch((4, 5, 3), centers, seed=3)
    if settings.get("straight_through"):
        pytest.skip("its gradient is not that of its value, on purpose")
    inputs = (x.requires_grad_(), weight.requires_grad_())
    assert torch.autograd.gradcheck(lambda x, w: function(x, labels, w, impl="torch", **settings), inputs)


def test_a_learned_scale_learns(monkeypatch):
    blocks_of(monkeypatch, 2)
    x, labels, weight = batch((6, 9, 4))
    slopes = []
    for impl in ("auto", "torch"):
        scale = torch.tensor(11.0, dtype=torch.float64, requires_grad=True)
        losses.normalized_softmax_loss(x, labels, weight, scale=scale, impl=impl).backward()
        slopes.append(scale.grad)
    torch.testing.assert_close(*slopes, rtol=1e-12, atol=0)


def test_adacos_scale_is_the_dense_one(monkeypatch):
    blocks_of(monkeypatch, 4)
    x, labels, weight = batch((12, 30, 6))
    scales = [losses.adacos_scale(x, labels, weight, torch.tensor(5.0).double(), impl=i) for i in ("auto", "torch")]
    torch.testing.assert_close(*scales, rtol=1e-12, atol=0)
    empty = losses.adacos_scale(x[:0], labels[:0], weight, torch.tensor(5.0), impl="torch")
    assert float(empty) == 5.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_extremes_are_finite(dtype, monkeypatch):
    """Cosines of exactly ±1 at scale 64, zero rows, norms from 1e-30 to 1e30, nobody known, nobody there."""
    blocks_of(monkeypatch, 2)
    weight = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0], [1e-30, 0.0], [0.0, 1e30]], dtype=dtype)
    x = torch.tensor([[2.0, 0.0], [-3.0, 0.0], [0.0, 0.0], [1e-30, 1e-30], [1e30, 0.0]], dtype=dtype)
    for labels in (torch.arange(5), torch.tensor([1, 0, 3, 4, 2]), torch.full((5,), -1)):
        for function, settings, centers in FORMS.values():
            if centers == 1:
                got = outcome(function, x, labels, weight, impl="torch", **settings)
                assert all(bool(t.isfinite().all()) for t in got), function.__name__
                if bool((labels < 0).all()):
                    assert not any(bool(t.any()) for t in got)
    nobody = outcome(losses.arcface_loss, x[:0], labels[:0], weight, impl="torch")
    assert nobody[0].shape == (0,) and not bool(nobody[2].any())


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_poison_is_never_a_plausible_number(poison, monkeypatch):
    blocks_of(monkeypatch, 2)
    x, labels, weight = batch((5, 9, 4), dtype=torch.float32)
    for tensor, row in ((x, 0), (x, 2), (weight, 0), (weight, 8)):
        spoilt = tensor.clone()
        spoilt[row, 1] = poison
        x_, w_ = (spoilt, weight) if tensor is x else (x, spoilt)
        assert bool(losses.cosface_loss(x_, labels, w_, impl="torch").isnan())


def test_out_of_range_is_nan_where_values_are_not_read(monkeypatch):
    x, labels, weight = batch((5, 9, 4))
    labels[0] = 9
    with pytest.raises(ValueError, match=r"labels must be in 0\.\.8"):
        losses.arcface_loss(x, labels, weight, impl="torch")
    monkeypatch.setattr(nearkin.core.checks, "reads_values", lambda tensor: False)
    assert bool(losses.arcface_loss(x, labels, weight, impl="torch").isnan())


def test_autocast_changes_nothing(monkeypatch):
    blocks_of(monkeypatch, 4)
    x, labels, weight = batch((8, 30, 6), dtype=torch.float32)
    plain = outcome(losses.cosface_loss, x, labels, weight, impl="torch")
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, outcome(losses.cosface_loss, x, labels, weight, impl="torch"), plain))


def test_a_half_weight_may_keep_a_float32_gradient():
    x, labels, weight = batch((8, 30, 6), dtype=torch.float32)
    if not hasattr(weight, "grad_dtype"):
        pytest.skip("this torch keeps gradients in the type of the weight")
    half = weight.bfloat16().requires_grad_()
    half.grad_dtype = torch.float32
    losses.cosface_loss(x, labels, half, impl="torch").backward()
    exact = half.detach().double().requires_grad_()
    losses.cosface_loss(x.double(), labels, exact).backward()
    assert half.grad.dtype == torch.float32
    assert errors([half.grad], [exact.grad])[0] < 1e-5


def test_the_pass_compiles_whole(monkeypatch):
    blocks_of(monkeypatch, 4)
    torch._dynamo.reset()
    x, labels, weight = batch((8, 10, 6), dtype=torch.float32)
    eager = outcome(losses.arcface_loss, x, labels, weight, impl="torch")
    compiled = torch.compile(losses.arcface_loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(outcome(compiled, x, labels, weight, impl="torch"), eager, rtol=1e-5, atol=1e-5)


def test_the_road_is_chosen_by_size(monkeypatch):
    x, labels, weight = batch((8, 30, 6))
    seen = []
    plain = class_softmax.class_softmax
    monkeypatch.setattr(class_softmax, "class_softmax", lambda *a, **k: seen.append(k["max_memory"]) or plain(*a, **k))
    dense = losses.arcface_loss(x, labels, weight)
    assert not seen
    needed = 2 * class_softmax.PAIR * 8 * 30 + class_softmax.COORDINATE * 6 * 38
    losses.arcface_loss(x, labels, weight, max_memory=needed)
    assert not seen
    torch.testing.assert_close(losses.arcface_loss(x, labels, weight, max_memory=needed - 1), dense)
    assert seen == [needed - 1]
    monkeypatch.setattr(class_softmax, "DENSE", needed - 1)
    losses.arcface_loss(x, labels, weight)
    assert seen[1:] == [None]
    with pytest.raises(ValueError, match="max_memory must be at least what the anchors and one class take in bytes: "):
        losses.arcface_loss(x, labels, weight, max_memory=1000)
    with pytest.raises(TypeError, match=r"max_memory must be a whole number, got 1\.5"):
        losses.ArcFaceLoss(3, 4, max_memory=1.5)


def test_modules_take_the_road(monkeypatch):
    x, labels, _ = batch((8, 30, 6))
    for make in (losses.NormalizedSoftmaxLoss, losses.CosFaceLoss, losses.ArcFaceLoss, losses.AdaCosLoss):
        torch.manual_seed(1)
        dense = make(30, 6).double()
        assert "impl" not in dense.settings and "max_memory" not in dense.settings
        torch.manual_seed(1)
        module = make(30, 6, impl="torch", max_memory=2**16).double()
        torch.testing.assert_close(module(x, labels), dense(x, labels), rtol=1e-12, atol=0)
        assert "impl='torch', max_memory=65536" in repr(module) or "max_memory=65536, impl='torch'" in repr(module)
        assert module.state_dict().keys() == dense.state_dict().keys()
    module, dense = losses.SphereFaceLoss(30, 6, impl="torch").double(), losses.SphereFaceLoss(30, 6).double()
    dense.load_state_dict(module.state_dict())
    torch.testing.assert_close(module(x, labels), dense(x, labels), rtol=1e-12, atol=0)


def test_bad_choices_are_one_sentence(monkeypatch):
    x, labels, weight = batch((4, 5, 3))
    with pytest.raises(ValueError, match='unknown impl "tritn"; did you mean "triton"\\? known: auto, torch, triton'):
        losses.cosface_loss(x, labels, weight, impl="tritn")
    monkeypatch.setattr(kernels, "installed", lambda: False)
    words = r'impl="triton" is not possible here: triton is not installed \(pip install triton\); possible: auto, torch'
    for ask in (
        lambda: losses.CosFaceLoss(5, 3, impl="triton"),
        lambda: losses.sphereface_loss(x, labels, weight, impl="triton"),
    ):
        with pytest.raises(ValueError, match=words):
            ask()
    for rate in (0, -0.1, 1.5):
        with pytest.raises(ValueError, match=f"sample_rate must be > 0 and <= 1, got {rate}"):
            losses.ArcFaceLoss(5, 3, sample_rate=rate)


MEASURE = """
import sys, torch
sys.path.insert(0, sys.argv[1])
import measure
from nearkin import losses
torch.set_num_threads(1)
def step(classes, size):
    x, w = torch.randn(size, 64, requires_grad=True), weight[:classes].detach().requires_grad_()
    losses.arcface_loss(x, torch.arange(size) % classes, w, impl="torch").backward()
weight = torch.randn(200_000, 64)
step(100, 8)
step(100, 8)
print(measure.peak_mib(lambda: step(200_000, 256), "cpu"))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux's /proc")
def test_memory_is_the_gradient_and_a_block():
    """C = 200,000, B = 256, D = 64: one (B, C) matrix alone would be 195 MiB."""
    folder = Path(__file__).parents[1] / "benchmarks"
    frugal = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run([sys.executable, "-c", MEASURE, str(folder)], capture_output=True, text=True, env=frugal)
    assert done.returncode == 0, done.stderr
    gradient = 200_000 * 64 * 4 / 2**20
    assert float(done.stdout) < gradient + class_softmax.AUTOMATIC / 2**20 + 16


SAMPLED = {
    "normalized": losses.NormalizedSoftmaxLoss,
    "cosface": losses.CosFaceLoss,
    "arcface": losses.ArcFaceLoss,
    "arcface, 3 centres": lambda *size, **more: losses.ArcFaceLoss(*size, sub_centers=3, **more),
}


@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.parametrize("impl", ["auto", "torch"])
def test_sampled_classes_keep_the_batch(name, impl):
    x, labels, _ = batch((6, 100, 5))
    module = SAMPLED[name](100, 5, sample_rate=0.2, impl=impl).double()
    full = SAMPLED[name](100, 5, impl=impl).double()
    full.load_state_dict(module.state_dict())
    assert "sample_rate=0.2" in repr(module) and "sample_rate" not in repr(full)
    present = set(labels[labels >= 0].tolist())
    draws = []
    for seed in (0, 0, 1, 2):
        torch.manual_seed(seed)
        module.zero_grad()
        module(x, labels).backward()
        touched = module.weight.grad.view(100, -1).any(1).nonzero().squeeze(1).tolist()
        assert present <= set(touched) and len(touched) == 20
        draws.append(touched)
    assert draws[0] == draws[1] and draws[1] != draws[2] != draws[3]
    rows = torch.tensor(draws[3])
    each = module.weight.shape[0] // 100
    part = module.weight.detach().view(100, each, -1)[rows].flatten(0, 1)
    here = torch.tensor([draws[3].index(c) if c >= 0 else -1 for c in labels.tolist()])
    function = getattr(
        losses, type(full).__name__.replace("Loss", "").lower() + "_loss", losses.normalized_softmax_loss
    )
    torch.manual_seed(2)
    torch.testing.assert_close(module(x, labels), function(x, here, part, **full.settings))
    assert torch.equal(module.eval()(x, labels), full.eval()(x, labels))


def test_sampling_is_exact_at_rate_one_and_with_more_rows_than_classes():
    x, labels, _ = batch((60, 30, 5))
    full = losses.ArcFaceLoss(30, 5).double()
    for rate in (1.0, 0.1):  # 60 rows may hold all 30 classes: all are kept
        module = losses.ArcFaceLoss(30, 5, sample_rate=rate).double()
        module.load_state_dict(full.state_dict())
        before = torch.get_rng_state()
        assert torch.equal(module(x, labels), full(x, labels))
        assert torch.equal(before, torch.get_rng_state())


def test_sampling_reads_labels_as_the_whole_does(monkeypatch):
    module = losses.CosFaceLoss(100, 5, sample_rate=0.1)
    x = torch.randn(3, 5)
    assert float(module(x, torch.tensor([-1, -1, -1])).detach()) == 0
    torch.testing.assert_close(module(x[:2], torch.tensor([4, -1])).isfinite(), torch.tensor(True))
    with pytest.raises(ValueError, match=r"labels must be in 0\.\.99 \(or -1 for unknown\), got 100"):
        module(x, torch.tensor([0, 1, 100]))
    monkeypatch.setattr(nearkin.core.checks, "reads_values", lambda tensor: False)
    for bad in (100, -2, 10**12):
        assert bool(module(x, torch.tensor([0, 1, bad])).isnan())


# The kernel, through Triton's interpreter, in a process of its own: the interpreter is chosen when triton is imported.

KERNEL_SHAPES = [(1, 1, 4), (1, 7, 3), (5, 2, 4), (33, 40, 16), (17, 37, 50), (2, 1000, 8)]
KERNEL_KINDS = [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "bfloat16")]


def judge_kernel():
    """What the tests below read, as JSON: errors of kernel and dense form against float64, and who served."""
    served = []
    apply = fused._Pass.apply
    fused._Pass.apply = lambda *given: served.append(1) or apply(*given)
    fused.WHOLE_DIM = 32  # rows of 50 come in chunks
    found = {}
    for parts in (1, 3):
        fused._splits = lambda asked, max_memory, parts=parts: parts
        for shape in KERNEL_SHAPES:
            for kinds in KERNEL_KINDS if shape[1] in (37, 40) and parts == 3 else KERNEL_KINDS[:2]:
                whole = shape == KERNEL_SHAPES[4] and parts == 3 and kinds == KERNEL_KINDS[0]
                forms = FORMS if whole else ["arcface", "sphereface"] if shape == KERNEL_SHAPES[4] else ["cosface"]
                for form in forms:
                    function, settings, centers = FORMS[form]
                    x, labels, weight = batch(shape, centers)
                    x, weight = x.to(getattr(torch, kinds[0])), weight.to(getattr(torch, kinds[1]))
                    exact = outcome(function, x.double(), labels, weight.double(), **settings)
                    dense = errors(outcome(function, x, labels, weight, **settings), exact)
                    served.clear()
                    got = errors(outcome(function, x, labels, weight, impl="triton", **settings), exact)
                    found[f"{parts} {shape} {kinds} {form}"] = [got, dense, len(served)]
    x, labels, weight = batch((5, 9, 4), dtype=torch.float32)
    for poison in (math.nan, math.inf):
        spoilt = weight.clone()
        spoilt[8, 1] = poison
        found[f"poison {poison}"] = math.isnan(float(losses.cosface_loss(x, labels, spoilt, impl="triton")))
    far = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0], [1e-30, 0.0], [0.0, 1e30]])
    for dtype in (torch.float32, torch.bfloat16):
        got = outcome(losses.arcface_loss, far.to(dtype), torch.tensor([1, 0, 3, 4, 2]), far.to(dtype), impl="triton")
        found[f"extremes {dtype}"] = all(bool(t.isfinite().all()) for t in got)
    served.clear()
    outcome(losses.cosface_loss, x.double(), labels, weight.double(), impl="triton")
    found["float64 served"] = len(served)
    print(json.dumps(found))


@pytest.fixture(scope="module")
def kernel():
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed (pip install triton)")
    code = "import test_class_softmax; test_class_softmax.judge_kernel()"
    way = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    here = Path(__file__).parent
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=way, cwd=here)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_kernel_is_as_exact_as_the_dense_loss(kernel):
    cases = {name: case for name, case in kernel.items() if isinstance(case, list)}
    assert len(cases) >= 2 * len(KERNEL_SHAPES) + len(FORMS)
    for name, (got, dense, _) in cases.items():
        for ours, theirs in zip(got, dense, strict=True):
            assert ours <= theirs + 1e-6, name


def test_kernel_serves_or_falls_back(kernel):
    for name, case in kernel.items():
        if isinstance(case, list):
            assert case[2] == (0 if "3 centres" in name else 1), name
    assert kernel["float64 served"] == 0


def test_kernel_is_finite_or_tainted(kernel):
    assert all(kernel[name] is True for name in kernel if name.startswith(("poison", "extremes")))
