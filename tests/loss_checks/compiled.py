"""Compiled, traced and functional losses equal eager ones: values, every gradient, and what a step leaves behind."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases import CLASSES, DIM, Case
from loss_checks.around import several
from loss_checks.outcome import assert_same, least_room, odd_batch, room, run
from loss_checks.properties import holds
from loss_checks.waiting import Watch, nothing_read

# 19 rows fill no vector register. Classes of one member, a class that is missing, an item of no class;
# then everybody alike, and everybody different as far as there are classes.
MIXED = [0, 0, 3, 3, 3, 1, -1, 3, 0, 3, 0, 0, 3, 3, -1, 0, 3, 0, 0]
LABELS = {"mixed": MIXED, "equal": [2] * 19, "single": [0, 1, 2, 3, *[-1] * 15]}
assert max(map(max, LABELS.values())) < CLASSES


def batches(case: Case, dtype: torch.dtype = torch.float32, rows: int = 19, device: str = "cpu") -> Iterator[Any]:
    """Embeddings and labels of this many rows, one for each kind of labels."""
    g = torch.Generator().manual_seed(3)
    for ids in LABELS.values():
        x = torch.randn(rows, DIM, generator=g, dtype=torch.float64).to(dtype)
        labels = torch.tensor((ids * 2)[:rows])
        if case.graded:
            labels = labels.double() + 0.1 * torch.arange(rows).double() * (len(set(ids)) > 1)
        yield x.to(device), labels.to(device)


def as_eager(
    case: Case,
    compile: Callable[[nn.Module], Any],
    tolerance: float = 1e-5,
    dtype: torch.dtype = torch.float32,
    sizes: tuple[int, ...] = (19,),
    device: str = "cpu",
) -> None:
    """Two equal modules, one compiled, through the same batches: what a step leaves behind is compared too."""
    eager, module = (case.build(dtype).to(device) for _ in range(2))
    compiled = compile(module)
    for rows in sizes:
        for x, labels in batches(case, dtype, rows, device):
            wanted = run(eager, eager, x, labels)
            assert_same(run(compiled, module, x, labels), wanted, tolerance, "all")
    for a, b in zip(module.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def compiles(case: Case) -> bool:
    return case.compiles


def plain(case: Case) -> bool:
    """One variant of each loss, to save minutes, and those whose code has been wrong."""
    return case.compiles and ("-" not in case.name or case.name in ("QuadrupletLoss-plain", "TripletLoss-batch-hard"))


@holds(compiles)
def what_a_compiler_traces_equals_the_gradient_by_hand(case: Case) -> None:
    """The plain formula in place of a hand-written gradient, which is refused there."""

    def as_if_compiling(module: nn.Module) -> Any:
        def forward(*inputs: Any) -> Any:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.compiler, "is_compiling", lambda: True)
                return module(*inputs)

        return forward

    as_eager(case, as_if_compiling, 1e-10, torch.float64)
    as_eager(case, as_if_compiling)


@holds(compiles)
def torch_func_sees_the_plain_formula(case: Case) -> None:
    """`torch.func.grad`, `jacrev` and `vmap` over batches."""
    module = case.build().eval()
    every_batch = [*batches(case, torch.float64)]
    x, labels = every_batch[0]
    slope = run(module, module, x, labels)[1] / 2.5
    for taken in (torch.func.grad, torch.func.jacrev):
        assert_same([taken(lambda y: module(y, labels))(x).detach()], [slope], 1e-10, "all")
    several = torch.stack([x for x, _ in every_batch])
    wanted = torch.stack([module(x, labels) for x in several]).detach()
    torch.testing.assert_close(torch.func.vmap(lambda y: module(y, labels))(several).detach(), wanted)


@holds()
def has_a_shape_on_the_meta_device(case: Case) -> None:
    """And nothing else: no value is there to be read."""
    x, labels = next(batches(case))
    value = case.build().float().to("meta")(x.to("meta"), labels.to("meta"))
    assert value.is_meta and value.shape == () and value.dtype == torch.float32


@holds(compiles)
def nothing_waits_for_a_device(case: Case) -> None:
    """As on an accelerator: no value is read, alone and with references, in training; the numbers are the same."""
    module, (x, labels) = case.build(), case.batch()
    for rest in ((), case.references(x, labels))[: 1 + case.pairs]:
        wanted = run(*[case.build()] * 2, x, labels, *rest)
        with nothing_read():
            run(*[case.build()] * 2, x, labels, *rest)  # torch itself prepares
            y = x.clone().requires_grad_()
            with Watch():
                value = module(y, labels, *rest)
                (2.5 * value).backward()
        assert_same([value.detach(), y.grad], wanted[:2], 1e-12)


@holds(compiles, slow=True)
def is_one_graph_for_any_number_of_rows(case: Case) -> None:
    """Traced once, with the sizes as symbols."""
    torch._dynamo.reset()
    compile_once = {"fullgraph": True, "backend": "aot_eager", "dynamic": True}
    as_eager(case, lambda module: torch.compile(module, **compile_once), sizes=(19, 26))


@contextmanager
def vectors_of(bits: int) -> Iterator[None]:
    """Machine code as a CPU with registers of this width gets it, or of this machine's."""
    from torch._inductor import config

    torch._dynamo.reset()
    if shutil.which("c++") is None and shutil.which("g++") is None:
        pytest.skip("torch.compile needs a C++ compiler on this machine")
    if bits and torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("not an x86 CPU with AVX2")
    with config.patch({"cpp.simdlen": bits or None, "force_disable_caches": bool(bits)}):
        yield


@holds(plain, slow=True)
def machine_code_equals_eager(case: Case) -> None:
    """In vectors of this machine's width; of one loss at any number of rows, which takes up to four times as long."""
    how: dict[str, Any] = {"dynamic": True} if case.name == "TripletLoss" else {}
    with vectors_of(0):
        as_eager(case, lambda module: torch.compile(module, fullgraph=True, **how), sizes=(19, 26, 7) if how else (19,))


@holds(plain, slow=True)
def machine_code_of_256_bits_equals_eager(case: Case) -> None:
    """At one size: of these vectors inductor's code has been wrong where that for 512 was right."""
    with vectors_of(256):
        as_eager(case, lambda module: torch.compile(module, fullgraph=True))


BLOCKS = ("MarginLoss-classes", "TripletLoss", "LiftedStructureLoss", "NPairLoss", "LogRatioLoss")  # kinds of passes
LENGTHS = ("SupConLoss", "MarginLoss", "SiameseLoss", "LogRatioLoss", "ArcFaceLoss", "AdaCosLoss", "CenterLoss")
LENGTHS += ("HeatedSoftmaxLoss-batch", "SphereFaceLoss", "SoftTripleLoss")  # kinds of learned tensors and of state


@holds(lambda case: case.name in BLOCKS, slow=True)
def blocks_are_one_graph(case: Case) -> None:
    """In float64, to 1e-12."""
    torch._dynamo.reset()
    module, (x, labels) = case.build(), odd_batch(case)
    module.max_memory = max(room(5, x), least_room(case, x, x))
    wanted = run(module, module, x, labels)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert_same(run(compiled, module, x, labels), wanted, 1e-12)


@holds(lambda case: case.name in LENGTHS, slow=True)
def several_lengths_compile(case: Case) -> None:
    """With the state of each length."""
    torch._dynamo.reset()
    wrapper, compiled = several(case, torch.float32), several(case, torch.float32)
    function, (x, labels) = torch.compile(compiled, backend="aot_eager"), case.batch(torch.float32)
    for step in range(2):
        assert_same(run(function, compiled, x + step, labels), run(wrapper, wrapper, x + step, labels), 1e-4)
    for name, value in wrapper.state_dict().items():
        torch.testing.assert_close(compiled.state_dict()[name], value)


def one_graph_under_autocast(case: Case, device: str, kind: torch.dtype) -> None:
    """A training step of encoder and loss, compiled as one graph, equals the step: but for the encoder's rounding."""
    torch._dynamo.reset()
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        encoder = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, DIM)).to(device)
        loss = case.build(torch.float32).to(device)

        def step(x: Tensor, labels: Tensor, encoder: nn.Module = encoder, loss: nn.Module = loss) -> Any:
            with torch.autocast(device, dtype=kind):
                return loss(encoder(x), labels)

        function = torch.compile(step, fullgraph=True) if compiled else step
        _, labels = next(batches(case, device=device))
        module = nn.ModuleList([encoder, loss])
        results.append(run(function, module, torch.randn(19, 5, device=device), labels))
    assert_same(results[1], results[0], 5e-2, "all")
    assert bool(results[1][2].any())


@holds(lambda case: case.name in ("SupConLoss", "ArcFaceLoss"), slow=True)
def encoder_and_loss_are_one_graph_under_autocast(case: Case) -> None:
    """As people write a step."""
    one_graph_under_autocast(case, "cpu", torch.bfloat16)
