"""What goes around a loss: a memory of past batches, several lengths of an embedding, levels of classes."""

from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

import reference
from cases import CLASSES, DIM, Case, gaps, masks
from loss_checks.outcome import assert_same, batch_of, covering, run
from loss_checks.properties import holds
from loss_checks.waiting import Watch, nothing_read
from nearkin import relations
from nearkin.losses import HierarchyLoss, MatryoshkaLoss
from nearkin.memory import CrossBatchMemory

SIZE = 25
DIMS, WEIGHTS = (DIM, 4, 2), (1.0, 0.5, 2.0)
ALONG = {"SiameseLoss": ("weight",), "HeatedSoftmaxLoss": ("weight", "running_mean", "running_var")}


def remembers(case: Case) -> bool:
    """Goes into a memory, whose pairs are a relation: not with something kept for each class."""
    return case.pairs and case.name != "MarginLoss-classes"


def stream(number: int, rows: int = 10, dim: int = DIM, dtype: Any = torch.float64, unknown: bool = True) -> Any:
    """Batches whose classes overlap, with an unknown item now and then."""
    generator = torch.Generator().manual_seed(number)
    means = torch.randn(CLASSES, dim, generator=generator, dtype=torch.float64)
    for _ in range(number):
        labels = torch.randint(-1 if unknown else 0, CLASSES, (rows,), generator=generator)
        yield (means[labels] + torch.randn(rows, dim, generator=generator, dtype=torch.float64)).to(dtype), labels


def memory_of(case: Case, size: int = SIZE, warmup: int = 0) -> CrossBatchMemory:
    kind = "targets" if case.graded else "ids"
    return CrossBatchMemory(case.build(), size, DIM, warmup=warmup, label_kind=kind).double()


def by_hand(case: Case, loss: nn.Module, x: Tensor, labels: Tensor, past: Any, keys: Tensor | None = None) -> Tensor:
    """The loss with the batch, or its keys, and the past rows as references: no item with itself, but with its key."""
    references = torch.stack([*(x if keys is None else keys), *(row for row, _ in past)])
    others = torch.stack([*labels, *(label for _, label in past)])
    if case.graded:
        return loss(x, relations.LabelDistance(gaps(labels, others)), references)  # type: ignore[no-any-return]
    if keys is not None:
        return loss(x, labels, references, others)  # type: ignore[no-any-return]
    apart = ~torch.eye(len(x), len(others), dtype=torch.bool)
    positive, negative = (mask & apart for mask in masks(labels, others))
    return loss(x, relations.Relation(positive, negative, ids=labels), references)  # type: ignore[no-any-return]


@holds(remembers)
def a_memory_is_its_references_by_hand(case: Case) -> None:
    """While it warms up, fills, is full and goes round; then with the keys of another encoder met and stored."""
    memory, past, says = memory_of(case, warmup=0 if case.ordered else 1), deque(maxlen=SIZE), []
    for step, (x, labels) in enumerate(stream(6, unknown=not case.graded)):
        labels = labels.double() / 3 if case.graded else labels
        keys = (x + 0.2 * torch.randn_like(x)).requires_grad_() if step > 3 and not case.graded else None
        rest = () if keys is None else (keys,)
        met = past if step or case.ordered else ()

        def hand(y: Tensor, labels: Tensor, met: Any = met, keys: Any = keys) -> Tensor:
            return by_hand(case, memory.loss, y, labels, met, None if keys is None else keys.detach())

        wanted = run(hand, memory, x, labels)
        y = x.clone().requires_grad_()
        memory.zero_grad()
        value = memory(y, labels, *rest)
        (2.5 * value).backward()
        learned = [torch.zeros_like(p) if p.grad is None else p.grad for p in memory.parameters()]
        assert_same([value.detach(), y.grad, *learned], wanted, 1e-9)
        assert keys is None or keys.grad is None
        alone = by_hand(case, memory.loss, x, labels, (), None if keys is None else keys.detach())
        says.append(not torch.isclose(value, alone, rtol=1e-9))
        past.extend(zip((x if keys is None else keys).detach(), labels, strict=True))
    stored = {tuple(row.tolist()) for row, _ in past}
    assert not says[0] and sum(says) >= 3
    assert {tuple(row) for row in memory.embeddings.tolist()} == stored and int(memory.filled) == SIZE


@holds(remembers)
def empty_places_of_a_memory_have_no_influence(case: Case) -> None:
    """Whatever lies there; and evaluation stores nothing."""
    memory = memory_of(case, 40)
    (past, old), (x, labels) = ((x, y.double() if case.graded else y) for x, y in stream(2, unknown=not case.graded))
    memory(past, old)
    memory.eval()
    before = {name: value.clone() for name, value in memory.state_dict().items()}
    wanted = memory(x, labels)
    assert int(memory.filled) == len(past) and int(memory.steps) == 1
    assert all(torch.equal(value, before[name]) for name, value in memory.state_dict().items())
    torch.testing.assert_close(wanted, by_hand(case, memory.loss, x, labels, [*zip(past, old, strict=True)]))
    for name, garbage in (("embeddings", torch.randn(40, DIM).double()), ("labels", torch.randint(0, 4, (40,)))):
        known = memory.known[:, None] if name == "embeddings" else memory.known
        kept = getattr(memory, name)
        setattr(memory, name, torch.where(known, kept, garbage.to(kept.dtype)))
    torch.testing.assert_close(memory(x, labels), wanted, rtol=1e-9, atol=1e-12)


@holds(remembers)
def a_memory_reads_nothing_back(case: Case) -> None:
    """As on an accelerator: no value is read, and no step costs more calls than another."""
    memory, other = memory_of(case, warmup=1), memory_of(case, warmup=1)
    calls = set()
    with nothing_read():
        for x, labels in stream(1, unknown=not case.graded):  # torch itself imports and prepares at its first step
            other(x.requires_grad_(), labels.double() if case.graded else labels).backward()
        for x, labels in stream(4, unknown=not case.graded):
            memory.zero_grad()  # the first gradient of a parameter costs other calls than the sum of two
            with Watch() as watch:
                memory(x.requires_grad_(), labels.double() if case.graded else labels).backward()
            calls.add(watch.calls)
    assert len(calls) == 1


class Cut:
    """A loss as a loop sees it at one length: the first columns of its tensors, and the buffers of that length."""

    def __init__(self, wrapper: MatryoshkaLoss, dim: int) -> None:
        self._module, self._wrapper, self._dim = wrapper.loss, wrapper, dim
        usual = [name for name, tensor in wrapper.loss.named_parameters() if tensor.dim() == 2]
        self._along = ALONG.get(type(wrapper.loss).__name__, usual)

    def __getattr__(self, name: str) -> Any:
        module, dim = self._module, self._dim
        if name in dict(module.named_buffers()) and dim != DIM:
            return getattr(self._wrapper, f"{name}_{dim}")
        value = getattr(module, name)
        return value[..., :dim] if name in self._along and isinstance(value, nn.Parameter) else value


def several(case: Case, dtype: torch.dtype = torch.float64, normalize: bool = True) -> MatryoshkaLoss:
    """The case's loss at three lengths."""
    loss = case.build(dtype)
    return MatryoshkaLoss(loss, DIMS, WEIGHTS, normalize=normalize and not loss.reads_length).to(dtype)


def lengths_by_loops(case: Case, wrapper: MatryoshkaLoss, x: Tensor, labels: Any, *met: Any) -> Tensor:
    """Σ_m c_m L(z[:m] / |z[:m]|), by loops."""
    total = x.new_zeros(())
    for dim, weight in zip(DIMS, WEIGHTS, strict=True):
        cut = [reference.units(rows[:, :dim]) if wrapper.normalize else rows[:, :dim] for rows in (x, *met[:1])]
        total = total + weight * case.twin(Cut(wrapper, dim), cut[0], labels, *cut[1:], *met[1:])
    return total


@holds()
def several_lengths_are_the_sum_of_their_loops(case: Case) -> None:
    """In float64 and a narrower type, normalised and not, alone and with references; autocast changes nothing."""
    kinds = {torch.float64: (1e-8, 1e-8), torch.float32: (2e-5, 2e-4), torch.bfloat16: (2e-5, 2e-2)}
    lower = (torch.float32, torch.bfloat16)[len(case.name) % 2]
    for row in covering(
        case, dtype=(torch.float64, lower), normalize=(True, False), met=(False, True)[: 1 + case.pairs]
    ):
        dtype, met = row["dtype"], row["met"]
        wrapper = several(case, torch.float64 if dtype == torch.float64 else torch.float32, row["normalize"])
        double = several(case, normalize=row["normalize"])
        wanted = run(
            lambda *batch, double=double: lengths_by_loops(case, double, *batch),
            double,
            *batch_of(case, torch.float64, dtype, met),
        )
        batch = batch_of(case, dtype, met=met)
        got = run(wrapper, wrapper, *batch)
        assert got[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert_same(got[:1], wanted[:1], kinds[dtype][0])  # in two dimensions some angle is near 0 or π:
        assert_same(got, wanted, kinds[dtype][1])  # acos of the loops has 1e-8 there
        if dtype == torch.float32:
            value = wrapper.eval()(*batch)
            if case.pairs and not case.ordered:  # its own references
                torch.testing.assert_close(wrapper(*batch[:2], *batch[:2]), wrapper(*batch[:2]))
            with torch.autocast("cpu", torch.bfloat16):
                torch.testing.assert_close(wrapper(*batch), value)


@holds()
def several_lengths_have_a_state_each(case: Case) -> None:
    """Three steps, then a copy from the state dict: the next two are the same; evaluation changes nothing."""
    wrapper, (x, labels) = several(case), case.batch()
    for step in range(3):
        wrapper(x + step, labels)
    copy = several(case)
    copy.load_state_dict(wrapper.state_dict())
    for step in (3, 4):
        torch.testing.assert_close(copy(x + step, labels), wrapper(x + step, labels), rtol=0, atol=0)
    before = {name: value.clone() for name, value in wrapper.state_dict().items()}
    wrapper.eval()(x, labels)
    assert all(torch.equal(value, before[name]) for name, value in wrapper.state_dict().items())


@holds()
def several_lengths_of_nothing_to_learn_from_are_finite(case: Case) -> None:
    """No item, one, one class, classes of one, zero rows."""
    wrapper = several(case)
    singles = torch.arange(3).double() if case.graded else torch.arange(3)
    for rows, labels in ((0, singles[:0]), (1, singles[:1]), (3, singles * 0), (3, singles)):
        for x in (torch.randn(rows, DIM).double(), torch.zeros(rows, DIM).double()):
            assert all(bool(t.isfinite().all()) for t in run(wrapper, wrapper, x, labels))


@holds(lambda case: not case.graded and "-" not in case.name)
def two_levels_are_the_sum_of_their_loops(case: Case) -> None:
    """Classes of classes: value and every gradient, alone and with references; of no item and of one too."""
    for row in covering(case, dtype=(torch.float64, torch.float32), met=(False, True)[: 1 + case.pairs]):
        x, fine, *met = batch_of(case, torch.float64, row["dtype"], row["met"])
        levels = [torch.stack([ids, ids % 2], 1) for ids in (fine, *met[1:])]
        loss = HierarchyLoss([case.build(row["dtype"]) for _ in range(2)], WEIGHTS[1:]).to(row["dtype"])
        exact = HierarchyLoss([case.build() for _ in range(2)], WEIGHTS[1:])

        def loops(y: Tensor, labels: Tensor, *met: Any, exact: HierarchyLoss = exact) -> Tensor:
            of_level = [(labels[:, n], *met[:1], *(others[:, n] for others in met[1:])) for n in range(2)]
            first, second = (case.twin(m, y, *batch) for m, batch in zip(exact.losses, of_level, strict=True))
            return WEIGHTS[1] * first + WEIGHTS[2] * second

        wanted = run(loops, exact, x, levels[0], *met[:1], *levels[1:])
        got = run(loss, loss, x.to(row["dtype"]), levels[0], *(r.to(row["dtype"]) for r in met[:1]), *levels[1:])
        assert_same(got, wanted, 1e-10 if row["dtype"] == torch.float64 else 2e-5)
        for rows in (0, 1):
            assert all(bool(t.isfinite().all()) for t in run(exact, exact, x[:rows], levels[0][:rows]))
