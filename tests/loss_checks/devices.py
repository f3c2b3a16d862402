"""Other devices: without float64 and without fast float64 played by the CPU, and on a GPU where one is."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from cases import DIM, Case
from loss_checks.around import several
from loss_checks.batches import knows_its_classes
from loss_checks.compiled import as_eager, one_graph_under_autocast
from loss_checks.outcome import Outcome, assert_same, batch_of, loop, run
from loss_checks.properties import holds, pairs
from nearkin import strict
from nearkin.core import devices, distances

PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_, torch.ops.aten.bmm)


class NoFloat64(TorchDispatchMode):
    """Raises where an operation returns float64 numbers of at least one axis: a single one may be Python's own."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for part in _pytree.tree_leaves(result):
            if isinstance(part, Tensor) and part.dtype == torch.float64 and part.dim():
                raise AssertionError(f"{func} returns float64 {tuple(part.shape)}")
        return result


class Products(TorchDispatchMode):
    """Products that were made, by type."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: list[torch.dtype] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket in PRODUCTS:
            self.kinds.append(result.dtype)
        return result


@holds()
def needs_no_float64(case: Case) -> None:
    """As Apple's GPUs (mps): no operation returns float64, and value and gradient are near those that do."""
    x, labels = case.batch()
    if case.graded:  # exact in float32, so that the same targets are equally far apart
        labels = (64 * labels).round() / 64
    y, module = x.float().requires_grad_(), case.build(torch.float32)
    with pytest.MonkeyPatch.context() as patch, NoFloat64():
        patch.setattr(devices, "has_float64", lambda device: False)
        patch.setattr(distances, "freely_read", lambda x: False)
        value = module(y, labels.float() if case.graded else labels)
        value.backward()
    exact = x.clone().requires_grad_()
    expected = case.build()(exact, labels)
    expected.backward()
    assert value.item() == pytest.approx(expected.item(), rel=2e-4, abs=1e-5)
    assert (y.grad.double() - exact.grad).abs().max() <= 1e-3 * exact.grad.abs().max() + 1e-6


@holds()
def makes_no_product_of_float64_where_it_is_slow(case: Case) -> None:
    """As consumer cards: a step of float32."""
    loss, (x, labels) = case.build(torch.float32), case.batch(torch.float32)
    with pytest.MonkeyPatch.context() as patch, Products() as products:
        patch.setattr(devices, "has_float64_units", lambda tensor: False)
        loss(x.requires_grad_(), labels).sum().backward()
    assert products.kinds and torch.float64 not in products.kinds


# ---- on a GPU: tests/gpu/test_contract_gpu.py


@contextmanager
def products_of(units: bool) -> Iterator[None]:
    """Distances as a GPU with units for float64 takes them, or as one whose float64 is slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "has_float64_units", lambda tensor: units)
        yield


def on_gpu(case: Case, *batch: Any) -> Outcome:
    module = case.build(torch.float32).cuda()
    return [t.cpu() for t in run(module, module, *(t.cuda() for t in batch))]


def larger(case: Case, number: int = 256) -> tuple[Tensor, Tensor]:
    """A batch on the GPU."""
    g = torch.Generator().manual_seed(3)
    x, labels = torch.randn(number, DIM, generator=g), torch.arange(number) // (4 if case.pairs else number // 4)
    return x.cuda(), case.targets(labels % 4 if "classes" in case.name else labels).cuda()


@holds(on_gpu=True)
def equals_its_loop_on_a_gpu(case: Case) -> None:
    """In float32 and halves, alone and with references, by both kinds of distances."""
    for units in (True, False):
        for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2), (torch.float16, 2e-2)):
            for met in (False, True)[: 1 + case.pairs]:
                with products_of(units):
                    got = on_gpu(case, *batch_of(case, dtype, met=met))
                assert_same(got, loop(case, dtype, met), 2e-5 if case.pairs and dtype == torch.float32 else tolerance)


@holds(pairs, on_gpu=True)
def is_as_exact_on_a_gpu_where_pairs_are_near(case: Case) -> None:
    """As the CPU, by both kinds of distances."""
    x, labels = case.batch(torch.float32)
    x = x[:1] + 1e-2 * x
    exact, cpu = run(*[case.build()] * 2, x.double(), labels), run(*[case.build(torch.float32)] * 2, x, labels)
    for units in (True, False):
        with products_of(units):
            gpu = on_gpu(case, x, labels)
        for ours, theirs, true in zip(gpu, cpu, exact, strict=True):
            scale = max(float(true.abs().max()), 1e-3)
            mine, others = (float((t.double() - true).abs().max()) / scale for t in (ours, theirs))
            assert mine <= 2 * others + 1e-5, (mine, others)


@holds(on_gpu=True)
def nobody_waits_for_a_gpu_that_gives_the_same_numbers(case: Case) -> None:
    """A step under torch's own watch for waiting; pair losses give the same numbers every time, to the bit."""
    x, labels = larger(case)
    module = case.build(torch.float32).cuda()
    run(module, module, x, labels)  # libraries wait where they start
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("default" if "Facility" in case.name else "error")  # that one says that it waits
    # Asked for beforehand, since the histograms of Fast-AP are faster otherwise; `nearkin train` asks for it.
    torch.use_deterministic_algorithms(case.name.startswith("FastAP"), warn_only=True)
    try:
        runs = [run(module, module, x, labels) for _ in range(2)]  # what is kept by step moves on
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.use_deterministic_algorithms(False)
    assert not case.pairs or all(map(torch.equal, *runs))


@holds(lambda case: case.pairs and "-" not in case.name, on_gpu=True)
def is_captured_in_a_graph(case: Case) -> None:
    """And replayed with other rows in place, by both kinds of distances: under capture no near pairs are listed."""
    for units in (True, False):
        x, labels = larger(case, 96)
        x.requires_grad_()
        module, side = case.build(torch.float32).cuda(), torch.cuda.Stream()
        with products_of(units):
            with torch.cuda.stream(side):
                for _ in range(3):
                    x.grad = None
                    module(x, labels).backward()
            torch.cuda.synchronize()
            graph, x.grad = torch.cuda.CUDAGraph(), None
            module.zero_grad()
            with torch.cuda.graph(graph):
                value = module(x, labels)
                (2.5 * value).backward()
            with torch.no_grad():
                x.copy_(torch.randn_like(x))
            graph.replay()
            got = [value.detach().clone(), x.grad.clone()]
            assert_same(got, run(module, module, x.detach(), labels)[:2], 1e-5)


@holds(on_gpu=True)
def poison_and_bad_labels_are_nan_on_a_gpu(case: Case) -> None:
    """Where no value is read; and a sentence if strict."""
    x, labels = (t.cuda() for t in case.batch(torch.float32))
    for poison in (torch.nan, torch.inf):
        spoilt = x.clone()
        spoilt[5, 1] = poison
        assert bool(case.build(torch.float32).cuda()(spoilt, labels).isnan())
    if knows_its_classes(case):
        wrong = torch.where(torch.arange(len(labels), device="cuda") == 1, 7, labels)
        assert bool(case.build(torch.float32).cuda()(x, wrong).isnan())
        with strict(), pytest.raises(ValueError, match="labels must be in"):
            case.build(torch.float32).cuda()(x, wrong)


@holds(on_gpu=True)
def strict_changes_no_value_on_a_gpu(case: Case) -> None:
    """It reads values to say what is wrong with them, and takes the same way."""
    outcomes = []
    for on in (False, True):
        with strict(on):
            outcomes.append(on_gpu(case, *case.batch(torch.float32)))
    assert all(map(torch.equal, *outcomes))


@holds(lambda case: case.compiles, on_gpu=True, slow=True)
def compiles_on_a_gpu(case: Case) -> None:
    """Whole, at any number of rows; and to its own code where it is one of the plain variants."""
    torch._dynamo.reset()
    how: dict[str, Any] = {"fullgraph": True, "backend": "aot_eager", "dynamic": True}
    as_eager(case, lambda module: torch.compile(module, **how), sizes=(19, 26, 7), device="cuda")
    if "-" not in case.name:
        torch._dynamo.reset()
        as_eager(case, lambda module: torch.compile(module, fullgraph=True), device="cuda")
        for kind in (torch.bfloat16, torch.float16):
            one_graph_under_autocast(case, "cuda", kind)


@holds(on_gpu=True)
def several_lengths_on_a_gpu_are_those_of_float64(case: Case) -> None:
    """Two steps, the second with the statistics of the first."""
    for dtype, tolerance in ((torch.float32, 2e-4), (torch.bfloat16, 2e-2)):
        x, labels = case.batch(dtype)
        wrapper, double = several(case, torch.float32).cuda(), several(case)
        for _ in range(2):
            wanted = run(double, double, x.double(), labels)
            assert_same([t.cpu() for t in run(wrapper, wrapper, x.cuda(), labels.cuda())], wanted, tolerance)
        for name, buffer in double.named_buffers():
            torch.testing.assert_close(wrapper.get_buffer(name).cpu().double(), buffer.double(), rtol=1e-4, atol=1e-5)
