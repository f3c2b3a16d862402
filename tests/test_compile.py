"""Compiled losses equal eager ones: values, and gradients of embeddings and of everything learned."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import nearkin
from cases import CLASSES, DIM, LOSSES
from nearkin import losses
from nearkin.core import autograd, class_blocks
from test_contract import value_and_gradients

COMPILED = [case for case in LOSSES if case.compiles]
every = pytest.mark.parametrize("case", COMPILED, ids=str)
# Compilers of every version have something to say of themselves.
pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("UserWarning", "DeprecationWarning")]
pytestmark += [pytest.mark.slow]
# 19 rows fill no vector register. Classes of one member, a class that is missing, an item of no class;
# then everybody alike, and everybody different as far as there are classes.
MIXED = [0, 0, 3, 3, 3, 1, -1, 3, 0, 3, 0, 0, 3, 3, -1, 0, 3, 0, 0]
LABELS = {"mixed": MIXED, "equal": [2] * 19, "single": [0, 1, 2, 3, *[-1] * 15]}


def batches(case, dtype=torch.float32, rows=19):
    """Embeddings and labels of this many rows, one for each kind of labels."""
    g = torch.Generator().manual_seed(3)
    for ids in LABELS.values():
        x = torch.randn(rows, DIM, generator=g, dtype=torch.float64).to(dtype)
        labels = torch.tensor((ids * 2)[:rows])
        if case.graded:
            labels = labels.double() + 0.1 * torch.arange(rows).double() * (len(set(ids)) > 1)
        yield x, labels


def assert_close(got, wanted, tolerance):
    """Within rounding: of the value by its own size, of gradients by that of the largest of them."""
    (value, gradients), (twin, twin_gradients) = got, wanted
    assert float((value - twin).abs().max()) <= tolerance * max(float(twin.abs().max()), 1.0)
    scale = max([float(g.abs().max()) for g in twin_gradients], default=0.0)
    for a, b in zip(gradients, twin_gradients, strict=True):
        assert float((a - b).abs().max()) <= tolerance * max(scale, 1e-2)


def assert_as_eager(case, compile, tolerance=1e-5, dtype=torch.float32, sizes=(19,)):
    """Two equal modules, one compiled, through the same batches: what a step leaves behind is compared too."""
    eager, module = case.build(), case.build()
    eager, module = (m.to(torch.float64 if dtype == torch.float64 else torch.float32) for m in (eager, module))
    compiled = compile(module)
    for rows in sizes:
        for x, labels in batches(case, dtype, rows):
            wanted = value_and_gradients(eager, eager, x, labels)
            assert_close(value_and_gradients(compiled, module, x, labels), wanted, tolerance)
    for a, b in zip(module.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.fixture
def avx2():
    """Machine code as a CPU without AVX-512 gets it, whatever this one has."""
    from torch._inductor import config

    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("not an x86 CPU with AVX2")
    with config.patch({"cpp.simdlen": 256, "force_disable_caches": True}):
        yield


@pytest.fixture
def compiler():
    torch._dynamo.reset()
    if shutil.which("c++") is None and shutil.which("g++") is None:
        pytest.skip("torch.compile needs a C++ compiler on this machine")


@every
def test_plain_twins_equal_gradients_by_hand(case, monkeypatch):
    """What a compiler traces instead of a gradient by hand; a gradient by hand is refused there."""

    def as_if_compiling(module):
        def forward(*inputs):
            with monkeypatch.context() as patch:
                patch.setattr(torch.compiler, "is_compiling", lambda: True)
                return module(*inputs)

        return forward

    assert_as_eager(case, as_if_compiling, 1e-10, torch.float64)
    assert_as_eager(case, as_if_compiling)


def test_a_gradient_by_hand_is_refused_while_compiling(monkeypatch):
    class Twice(autograd.HandGradient):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, slope):
            return 2 * slope

    x = torch.ones(3, requires_grad=True)
    Twice.call(x).sum().backward()
    assert x.grad.tolist() == [2, 2, 2]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    message = r"Twice has a hand-written gradient, which torch.compile may get wrong; compile"
    with pytest.raises(RuntimeError, match=message):
        Twice.call(x)


def test_no_gradient_by_hand_goes_another_way():
    """Nobody in the package calls `apply`, past the guard."""
    for path in Path(nearkin.__file__).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if path.name != "autograd.py":
            assert "autograd.Function" not in text and not re.search(r"\b_[A-Z]\w*\.apply\(", text), path


@every
def test_graph_equals_eager(case):
    """One graph for any number of rows."""
    torch._dynamo.reset()
    assert_as_eager(case, lambda m: torch.compile(m, fullgraph=True, backend="aot_eager", dynamic=True), sizes=(19, 26))


# One variant of each loss, to save minutes, and those whose code has been wrong.
EACH = [case for case in COMPILED if "-" not in case.name or case.name == "QuadrupletLoss-plain"]
NARROW = EACH + [case for case in COMPILED if case.name == "TripletLoss-batch-hard"]


@pytest.mark.parametrize("case", EACH, ids=str)
def test_machine_code_equals_eager(case, compiler):
    assert_as_eager(case, lambda m: torch.compile(m, fullgraph=True))


@pytest.mark.parametrize("case", NARROW, ids=str)
def test_machine_code_without_avx512(case, compiler, avx2):
    """In vectors of 256 bits, of which inductor's code has been wrong where that for 512 was right."""
    assert_as_eager(case, lambda m: torch.compile(m, fullgraph=True))


def test_any_number_of_rows(compiler):
    (case,) = [c for c in COMPILED if c.name == "TripletLoss"]
    assert_as_eager(case, lambda m: torch.compile(m, fullgraph=True, dynamic=True), sizes=(19, 26, 7))


@pytest.mark.parametrize("name", ["SupConLoss", "ArcFaceLoss"])
def test_encoder_and_loss_in_one_graph_under_autocast(name, compiler):
    """A training step compiled as one graph, as people write it."""
    (case,) = [c for c in COMPILED if c.name == name]
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        encoder, loss = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, DIM)), case.build(torch.float32)

        def step(x, labels, encoder=encoder, loss=loss):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return loss(encoder(x), labels)

        step = torch.compile(step, fullgraph=True) if compiled else step
        x, labels = torch.randn(19, 5), torch.tensor(MIXED)
        value = step(x, labels)
        value.backward()
        results.append((value.detach(), [p.grad for p in (*encoder.parameters(), *loss.parameters())]))
    assert_close(results[1], results[0], 2e-2)  # the encoder's own rounding in bfloat16, which a compiler may leave out
    assert bool(results[1][1][0].any())


@pytest.mark.parametrize("name", ["NormalizedSoftmaxLoss", "ArcFaceLoss-sub", "ProxyNCALoss", "ProxyAnchorLoss"])
def test_classes_that_pass_by_in_blocks(name, monkeypatch):
    """Losses that never hold their logits: the same passes, as operators that a compiler does not look into."""
    (case,) = [c for c in COMPILED if c.name == name]
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        torch._dynamo.reset()
        results = []
        for blocks in (False, True):
            module = case.build(dtype)
            if blocks:
                monkeypatch.setattr(class_blocks, "fits", lambda *_: False)
            function = torch.compile(module, fullgraph=True, backend="aot_eager") if blocks else module
            results.append([value_and_gradients(function, module, *batch) for batch in batches(case, dtype)])
        monkeypatch.undo()
        for got, wanted in zip(*results, strict=True):
            assert_close(got, wanted, tolerance)


def test_many_classes_compile_in_bounded_time_and_memory():
    """A hundred blocks of classes are one node."""
    torch._dynamo.reset()
    results, (x, labels) = [], (torch.randn(8, 4), torch.arange(8) * 100)
    for compiled in (False, True):
        torch.manual_seed(0)
        module = losses.CosFaceLoss(1000, 4, max_memory=8 * 4 * 64 + 10 * (12 * 8 + 4 * 64))
        function = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module
        results.append(value_and_gradients(function, module, x, labels))
    assert_close(results[1], results[0], 1e-6)


@every
def test_torch_func_sees_the_plain_formula(case):
    """`torch.func.grad`, `jacrev` and `vmap` over batches."""
    module = case.build().eval()
    every_batch = [(x, labels) for x, labels in batches(case, torch.float64)]
    x, labels = every_batch[0]
    _, (gradient, *_) = value_and_gradients(module, module, x, labels)
    for taken in (torch.func.grad, torch.func.jacrev):
        assert_close((taken(lambda y: module(y, labels))(x).detach(), []), (gradient, []), 1e-10)
    several = torch.stack([x for x, _ in every_batch])
    wanted = torch.stack([module(x, labels) for x in several]).detach()
    torch.testing.assert_close(torch.func.vmap(lambda y: module(y, labels))(several).detach(), wanted)


@pytest.mark.parametrize(
    "module",
    [
        losses.CenterLoss(4, DIM),
        losses.AdaCosLoss(4, DIM),
        losses.HeatedSoftmaxLoss(4, DIM, norm="batch"),
        nearkin.memory.CrossBatchMemory(losses.SupConLoss(), 8, DIM),
        losses.FacilityLocationLoss(),
    ],
    ids=lambda module: type(module).__name__,
)
def test_what_torch_func_cannot_follow_is_refused(module):
    """Its tensors would stay behind in buffers."""
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(RuntimeError, match=r", which torch.func cannot follow; call"):
        torch.func.grad(lambda y: module(y, torch.arange(4)))(torch.randn(4, DIM))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


@pytest.mark.parametrize("case", LOSSES, ids=str)
def test_shapes_without_values(case):
    """On the meta device a loss has a shape and nothing else."""
    x, labels = next(batches(case))
    value = case.build().float().to("meta")(x.to("meta"), labels.to("meta"))
    assert value.is_meta and value.shape == () and value.dtype == torch.float32


def test_constants_of_the_cases():
    """The labels above are of the classes that the cases have."""
    assert max(map(max, LABELS.values())) < CLASSES
