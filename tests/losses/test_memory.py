"""Cross-batch memory: the ring, what is stored and what is refused, and how a run resumes.

That a loss with a memory is the loss with the same references is a property of every loss: `loss_checks/around.py`.
"""

import gc
import shutil
import weakref
from collections import deque

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import nearkin
from cases import CLASSES, DIM, LOSSES, masks
from loss_checks.around import stream
from nearkin import losses, relations
from nearkin.memory import CrossBatchMemory

GRADED = [case for case in LOSSES if case.graded]
BUFFERS = ("embeddings", "labels", "known", "cursor", "filled", "steps")


def without_self(positive, negative):
    apart = ~torch.eye(*positive.shape, dtype=torch.bool)
    return relations.Relation(positive & apart, negative & apart)


def by_hand(loss, x, labels, past):
    """The loss with the batch and the past rows as references, an item's pair with itself left out."""
    references = torch.cat([x, *(row[None] for row, _ in past)])
    others = torch.cat([labels, *(label[None] for _, label in past)])
    return loss(x, without_self(*masks(labels, others))._replace(ids=labels), references)


def gradients(value, x, module):
    value.backward()
    grads = [x.grad, *(p.grad for p in module.parameters())]
    x.grad = None
    module.zero_grad()
    return grads


def assert_same_step(memory, x, wanted, *rest):
    """One step costs what `wanted(x)` says, with the same gradients by the batch and by what the loss learns."""
    x = x.detach().clone().requires_grad_()
    hand = wanted(x)
    value = memory(x, *rest)
    torch.testing.assert_close(value, hand, rtol=1e-9, atol=1e-12)
    for a, b in zip(gradients(value, x, memory), gradients(hand, x, memory), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-11)
    return float(value.detach())


def state(memory):
    return {name: getattr(memory, name).clone() for name in BUFFERS}


def assert_equal_state(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


# ---------------------------------------------------------------- the same as by hand


@pytest.mark.parametrize("case", GRADED, ids=str)
def test_targets_of_two_columns_equal_the_label_distances_given_by_hand(case):
    memory = CrossBatchMemory(case.build(), 25, DIM, label_kind="targets", label_dim=2).double()
    past = deque(maxlen=25)
    for x, labels in stream(5, unknown=False):
        targets = torch.stack([labels, labels.roll(1)], 1).double() / 3
        others = torch.stack([*targets, *(target for _, target in past)])
        apart = torch.stack([((a - others) ** 2).sum(1).sqrt() for a in targets])
        references = torch.stack([row for row, _ in past]) if past else x[:0]

        def hand(x, apart=apart, references=references):
            return memory.loss(x, relations.LabelDistance(apart), torch.cat([x, references]))

        assert_same_step(memory, x, hand, targets)
        past.extend(zip(x, targets, strict=True))


def test_a_target_met_again_is_the_same_target():
    """Kept in float32, 0.1 would lie beside 0.1: a label distance of 1e-9 instead of none."""
    memory = CrossBatchMemory(losses.LogRatioLoss(), 8, DIM, label_kind="targets")
    targets = torch.tensor([0.1, 0.2, 0.3, 0.7], dtype=torch.float64)
    for _ in range(3):
        assert float(memory(torch.randn(4, DIM), targets)) < 50


def test_multilabel_rows_equal_the_relation_given_by_hand():
    memory = CrossBatchMemory(losses.SupConLoss(), 25, DIM, label_kind="rows", label_dim=10).double()
    past = deque(maxlen=25)
    for x, _ in stream(5):
        rows = torch.rand(10, 10) < 0.2  # square, and still rows: a memory keeps nothing else
        others = torch.stack([*rows, *(row for _, row in past)])
        masks = without_self(*relations.multilabel(rows, others)[:2])
        references = torch.stack([row for row, _ in past]) if past else x[:0]

        def hand(x, masks=masks, references=references):
            return memory.loss(x, masks, torch.cat([x, references]))

        assert_same_step(memory, x, hand, rows)
        past.extend(zip(x, rows, strict=True))


# ---------------------------------------------------------------- the ring


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(1, 7), st.lists(st.lists(st.integers(-1, 3), max_size=9), max_size=8))
def test_property_the_ring_is_a_list_of_the_last(size, batches):
    """Batches of any size, none and more than fit among them, against slots written one at a time."""
    memory = CrossBatchMemory(losses.SupConLoss(), size, 2)
    slots, cursor, count, last = [(torch.zeros(2), -1, False)] * size, 0, 0, deque(maxlen=size)
    for step, batch in enumerate(batches):
        labels = torch.tensor(batch, dtype=torch.long)
        x = torch.arange(2.0 * len(batch)).view(-1, 2) + 100 * step + 1
        memory(x, labels)
        for row, label in zip(x, batch, strict=True):
            slots[cursor] = (row, label, True)
            cursor, count = (cursor + 1) % size, count + 1
            last.append(row)
        assert torch.equal(memory.embeddings, torch.stack([row for row, _, _ in slots]))
        assert memory.labels.tolist() == [label for _, label, _ in slots]
        assert memory.known.tolist() == [filled for _, _, filled in slots]
        assert [int(memory.cursor), int(memory.filled), int(memory.steps)] == [cursor, min(count, size), step + 1]
        oldest = torch.cat([memory.embeddings[cursor:], memory.embeddings[:cursor]])[size - len(last) :]
        assert torch.equal(oldest, torch.stack(list(last)) if last else oldest[:0])


def test_npair_takes_every_item_for_an_anchor():
    memory = CrossBatchMemory(losses.NPairLoss(), 8, DIM)
    (x, labels) = next(stream(1, dtype=torch.float32, unknown=False))
    wanted = memory.loss(x, without_self(*masks(labels, labels)), x.clone())
    torch.testing.assert_close(memory(x, labels), wanted)
    assert not torch.allclose(wanted, memory.loss(x, labels))


def test_reset_forgets():
    for kind, labels in (("ids", torch.tensor([0, 1])), ("targets", torch.tensor([0.5, 1.5]))):
        memory = CrossBatchMemory(
            losses.SupConLoss() if kind == "ids" else losses.LogRatioLoss(), 3, DIM, label_kind=kind
        )
        before = state(memory)
        for _ in range(2):
            memory(torch.randn(2, DIM), labels)
        assert int(memory.steps) == 2
        memory.reset()
        assert_equal_state(state(memory), before)


# ---------------------------------------------------------------- what is stored, and how


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", ["ids", "rows", "targets"])
def test_poison_is_not_remembered(poison, kind):
    loss = losses.LogRatioLoss() if kind == "targets" else losses.SupConLoss()
    memory = CrossBatchMemory(loss, 30, DIM, label_kind=kind, label_dim=3 if kind == "rows" else None)
    to_kind = {"ids": lambda y: y, "rows": lambda y: y[:, None] == torch.arange(3), "targets": lambda y: y.float()}[
        kind
    ]
    clean = CrossBatchMemory(loss, 30, DIM, label_kind=kind, label_dim=3 if kind == "rows" else None)
    for step, (x, labels) in enumerate(stream(3, dtype=torch.float32)):
        clean(x, to_kind(labels))
        if step == 1:
            x = x.clone()
            x[2, 1] = poison
        value = memory(x, to_kind(labels))
        assert bool(value.isnan()) == (step == 1)
    assert not memory.known[12] and int(memory.known.sum()) == 29 and int(memory.filled) == 30
    assert bool((memory.embeddings[12] == 0).all()) and memory.labels[12].sum() == (-1 if kind == "ids" else 0)
    clean.known[12] = False
    torch.testing.assert_close(memory.eval()(x, to_kind(labels)), clean.eval()(x, to_kind(labels)))


def test_a_poisoned_target_is_not_remembered(monkeypatch):
    """Where values are not read, a bad target passes the door."""
    monkeypatch.setattr(nearkin.core.checks, "reads_values", lambda tensor: False)
    for columns in (None, 2):
        memory = CrossBatchMemory(losses.LogRatioLoss(), 5, DIM, label_kind="targets", label_dim=columns)
        targets = torch.tensor([1.0, float("nan"), 2.0])
        memory(torch.randn(3, DIM), targets if columns is None else torch.stack([targets, targets + 1], 1))
        assert memory.known.tolist() == [True, False, True, False, False]
        assert bool(memory.labels.isfinite().all())


def test_what_float32_cannot_hold_is_not_remembered():
    memory = CrossBatchMemory(losses.SupConLoss(), 4, DIM)
    x = torch.ones(2, DIM, dtype=torch.float64)
    x[0] = 1e300
    assert bool(memory(x, torch.tensor([0, 0])).isfinite())
    assert memory.known.tolist() == [False, True, False, False]


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "autocast"])
def test_half_precision_is_kept_in_float32(kind):
    memory, past = CrossBatchMemory(losses.TripletLoss(), 25, DIM), []
    for x, labels in stream(4, dtype=torch.float32):
        if kind == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                half = torch.nn.functional.linear(x, torch.eye(DIM)).requires_grad_()
                value = memory(half, labels)
        else:
            half = x.to(getattr(torch, kind)).requires_grad_()
            value = memory(half, labels)
        assert half.dtype != torch.float32 and value.dtype == memory.embeddings.dtype == torch.float32
        torch.testing.assert_close(value, by_hand(memory.loss, half.float(), labels, past))
        value.backward()
        assert half.grad.dtype == half.dtype and bool(half.grad.isfinite().all())
        past = [*past, *zip(half.detach().float(), labels, strict=True)][-25:]
    assert sorted(memory.embeddings.tolist()) == sorted(row.tolist() for row, _ in past)


@pytest.mark.slow
def test_nothing_grows_and_no_graph_is_kept():
    size, dim = 37, 5
    memory = CrossBatchMemory(losses.SupConLoss(), size, dim)
    shapes = {name: tensor.shape for name, tensor in state(memory).items()}
    alive = []
    for x, labels in stream(8, dim=dim, dtype=torch.float32):
        x.requires_grad_()
        value = memory(x, labels)
        value.backward()
        ghost = weakref.ref(x)
        del x, value
        gc.collect()
        assert ghost() is None  # the batch itself is let go
        alive.append(sum(type(o) is torch.Tensor and o.shape == (size, dim) for o in gc.get_objects()))
        for name, buffer in memory.named_buffers():
            assert buffer.shape == shapes[name] and not buffer.requires_grad and buffer.grad_fn is None
            assert buffer.untyped_storage().nbytes() == buffer.nbytes
    assert set(alive) == {1}


def test_earlier_losses_still_have_their_gradients():
    """Two steps before the first backward: storing changes nothing that a graph will read."""
    memory = CrossBatchMemory(losses.SupConLoss(), 15, DIM).double()
    batches, past = [(x.requires_grad_(), labels) for x, labels in stream(4)], deque(maxlen=15)
    values = [memory(x, labels) for x, labels in batches]
    for value, (x, labels) in zip(values, batches, strict=True):
        (got,) = torch.autograd.grad(value, x)
        (wanted,) = torch.autograd.grad(by_hand(memory.loss, x, labels, past), x)
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)
        past.extend(zip(x.detach(), labels, strict=True))


# ---------------------------------------------------------------- a module among modules


def test_a_run_resumes_exactly():
    def start():
        memory = CrossBatchMemory(losses.MarginLoss(selection="semihard"), 25, DIM, warmup=2)
        return memory, torch.optim.SGD(memory.parameters(), lr=0.1 * memory.lr_scale)

    def go_on(memory, optimizer, batches):
        values = []
        for x, labels in batches:
            optimizer.zero_grad()
            value = memory(x, labels)
            value.backward()
            optimizer.step()
            values.append(value.detach())
        return values

    batches = list(stream(8, dtype=torch.float32))
    memory, optimizer = start()
    go_on(memory, optimizer, batches[:4])
    saved = {name: tensor.clone() for name, tensor in memory.state_dict().items()}
    assert set(saved) == {*BUFFERS, "loss.beta"} and int(saved["cursor"]) == 15 and int(saved["filled"]) == 25
    resumed, again = start()
    resumed.load_state_dict(saved)
    wanted = go_on(memory, optimizer, batches[4:])
    assert all(torch.equal(a, b) for a, b in zip(go_on(resumed, again, batches[4:]), wanted, strict=True))
    assert_equal_state(dict(resumed.state_dict()), dict(memory.state_dict()))


def test_it_is_its_loss_to_a_trainer():
    memory = CrossBatchMemory(losses.MarginLoss(), 100, 16, warmup=7)
    assert [name for name, _ in memory.named_parameters()] == ["loss.beta"]
    assert memory.lr_scale == losses.MarginLoss.lr_scale
    assert "size=100, dim=16, warmup=7, label_kind='ids'" in repr(memory) and "MarginLoss" in repr(memory)
    assert memory.double().embeddings.dtype == torch.float64 and memory.labels.dtype == torch.long


COMPILED = [case for case in LOSSES if case.name in ("SupConLoss", "TripletLoss", "MarginLoss", "LogRatioLoss")]
BACKENDS = [pytest.param(case, "aot_eager", id=f"{case}-aot_eager") for case in COMPILED]
BACKENDS += [pytest.param(case, "inductor", id=f"{case}-inductor") for case in COMPILED if case.name == "SupConLoss"]


@pytest.mark.slow
@pytest.mark.parametrize("case, backend", BACKENDS)
def test_compiles_whole_and_equals_eager(case, backend):
    if backend == "inductor" and shutil.which("c++") is None and shutil.which("g++") is None:
        pytest.skip("torch.compile needs a C++ compiler on this machine")
    torch._dynamo.reset()
    kind = "targets" if case.graded else "ids"
    eager, twin = (CrossBatchMemory(case.build(torch.float32), 25, DIM, warmup=1, label_kind=kind) for _ in range(2))
    compiled = torch.compile(twin, fullgraph=True, backend=backend)
    for x, labels in stream(4, dtype=torch.float32, unknown=False):
        labels = case.targets(labels).float() if case.graded else labels
        grads = []
        for module, memory in ((eager, eager), (compiled, twin)):
            y = x.clone().requires_grad_()
            value = module(y, labels)
            grads.append((value.detach(), *gradients(value, y, memory)))
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        assert_equal_state(state(twin), state(eager))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_it_follows_the_embeddings_to_their_device():
    memory, twin = (CrossBatchMemory(losses.SupConLoss(), 25, DIM) for _ in range(2))
    for step, (x, labels) in enumerate(stream(5, dtype=torch.float32)):
        there, labels_there = x.cuda(), labels.cuda()
        torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")
        value = memory(there, labels_there)
        torch.cuda.set_sync_debug_mode("default")
        torch.testing.assert_close(value.cpu(), twin(x, labels), rtol=1e-4, atol=1e-5)
    assert all(buffer.is_cuda for buffer in memory.buffers())
    assert_equal_state({name: t.cpu() for name, t in state(memory).items()}, state(twin))


# ---------------------------------------------------------------- what it refuses


@pytest.mark.parametrize("case", [c for c in LOSSES if not c.pairs], ids=str)
def test_a_loss_without_references_is_refused(case):
    with pytest.raises(TypeError, match=r"loss must take references, as the pair losses do: forward\(.*got \w+Loss"):
        CrossBatchMemory(case.build(), 10, DIM)


def test_bad_settings_fail_when_it_is_made():
    loss = losses.SupConLoss()
    for make, error, words in [
        (lambda: CrossBatchMemory(losses.supcon_loss, 10, 4), TypeError, "loss must take references.*got function"),
        (lambda: CrossBatchMemory(CrossBatchMemory(loss, 9, 4), 9, 4), TypeError, "got CrossBatchMemory"),
        (lambda: CrossBatchMemory(loss, 0, 4), ValueError, "size must be >= 1, got 0"),
        (lambda: CrossBatchMemory(loss, 4, 0), ValueError, "dim must be >= 1, got 0"),
        (lambda: CrossBatchMemory(loss, 4, 4, warmup=-1), ValueError, "warmup must be >= 0, got -1"),
        (
            lambda: CrossBatchMemory(loss, 4, 4, label_kind="row"),
            ValueError,
            'unknown label_kind "row"; did you mean "rows"',
        ),
        (
            lambda: CrossBatchMemory(loss, 4, 4, label_kind="rows"),
            ValueError,
            'label_dim must be given .*"rows", got None',
        ),
        (lambda: CrossBatchMemory(loss, 4, 4, label_dim=3), ValueError, 'label_dim must be left out .*"ids", got 3'),
    ]:
        with pytest.raises(error, match=words):
            make()


def test_bad_batches_are_told_and_not_stored():
    memory = CrossBatchMemory(losses.SupConLoss(), 10, DIM)
    x, labels = next(stream(1, dtype=torch.float32))
    before = state(memory)
    for batch, error, words in [
        ((x[:, :2], labels), ValueError, f"embeddings must have {DIM} dimensions as the memory has, got 2"),
        ((x.long(), labels), TypeError, "embeddings must be floating point"),
        ((x.tolist(), labels), TypeError, "embeddings must be a torch tensor"),
        ((x, labels[:3]), ValueError, "labels must have one entry per row of embeddings: 10 rows, 3 labels"),
        ((x, labels.to("meta")), ValueError, "labels must be on the device of embeddings"),
        (
            (x, labels.float()),
            TypeError,
            r"labels must be ids of shape \(rows\) as the memory keeps them, got torch.float32",
        ),
        ((x, labels > 0), TypeError, "labels must be ids"),
        ((x, labels[:, None]), TypeError, "labels must be ids"),
        ((x, labels.tolist()), TypeError, "labels must be ids .* got list"),
        ((x, relations.of(labels)), TypeError, "labels must be ids .* got Relation"),
        ((x, labels, x[:3]), ValueError, r"stored must have the shape of embeddings: \(10, 6\), got \(3, 6\)"),
        ((x, labels, labels), TypeError, "stored must be floating point"),
        ((x, labels, x.to("meta")), ValueError, "stored must be on the device of embeddings"),
    ]:
        with pytest.raises(error, match=words):
            memory(*batch)
    rows = CrossBatchMemory(losses.SupConLoss(), 10, DIM, label_kind="rows", label_dim=3)
    with pytest.raises(TypeError, match=r"labels must be rows of shape \(rows, 3\) .* got torch.bool \(10, 4\)"):
        rows(x, torch.zeros(10, 4, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"labels must be rows of shape \(rows, 3\)"):
        rows(x, labels)
    assert_equal_state(state(memory), before)


def test_a_boundary_for_each_class_is_that_of_the_anchor():
    memory = CrossBatchMemory(losses.MarginLoss(num_classes=CLASSES, selection="all"), 10, DIM)
    with torch.no_grad():
        memory.loss.beta.copy_(torch.linspace(0.5, 1.5, CLASSES))
    batches = list(stream(2, dtype=torch.float32, unknown=False))
    memory(*batches[0])
    x, y = batches[1]
    past, old = batches[0][0][-10:], batches[0][1][-10:]
    wanted = 0.0
    active = 0
    for a in range(len(x)):
        for other, label, same in [
            *((r, q, b == a) for b, (r, q) in enumerate(zip(x, y, strict=True))),
            *((r, q, False) for r, q in zip(past, old, strict=True)),
        ]:
            if same:
                continue
            d = (torch.nn.functional.normalize(x[a], dim=0) - torch.nn.functional.normalize(other, dim=0)).norm()
            beta = memory.loss.beta[y[a]]
            term = (0.2 + (d - beta if label == y[a] else beta - d)).clamp(min=0).item()
            wanted, active = wanted + term, active + (term > 0)
    assert memory(x, y).item() == pytest.approx(wanted / active, rel=1e-4)
