"""`loss.compile()`: what stays compiled, and what is said where nothing compiles."""

import copy

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from nearkin import losses, memory


def batch(rows=16):
    g = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 8, generator=g, requires_grad=True), torch.arange(rows) // 4


@pytest.fixture
def counter():
    torch._dynamo.reset()
    return CompileCounter()


def equal(loss, x, labels):
    plain = copy.deepcopy(loss)
    assert plain._compiled_call_impl is None
    torch.testing.assert_close(loss(x, labels), plain(x, labels), rtol=1e-5, atol=1e-6)


def test_a_schedule_of_a_hundred_temperatures_stays_compiled(counter):
    loss, (x, labels) = losses.SupConLoss(), batch()
    loss.compile(backend=counter)
    for step in range(100):
        loss.temperature = 0.1 + 0.01 * step
        equal(loss, x, labels)
    assert counter.frame_count <= 2


def test_twenty_losses_of_two_kinds_stay_compiled(counter):
    x, labels = batch()
    for number in range(10):
        for loss in (losses.SupConLoss(0.05 * (number + 1)), losses.InfoNCELoss(0.05 * (number + 1))):
            loss.compile(backend=counter)
            equal(loss, x, labels)
    assert counter.frame_count <= 4


def test_every_selection_stays_compiled(counter):
    """More kinds of one class than the compiler's limit of eight."""
    x, labels = batch()
    for squared in (True, False):
        for selection in ("semihard", "semihard_or_hardest", "semihard_or_skip", "batch_hard", "easy_positive", "all"):
            loss = losses.TripletLoss(selection=selection, squared=squared)
            loss.compile(backend=counter)
            equal(loss, x, labels)
            seen = counter.frame_count
            equal(loss, x, labels)
            assert counter.frame_count == seen
    assert counter.frame_count >= 12


def test_thirty_sizes_of_a_batch_stay_compiled(counter):
    loss = losses.MultiSimilarityLoss()
    loss.compile(backend=counter)
    for rows in range(8, 128, 4):
        equal(loss, *batch(rows))
    assert counter.frame_count <= 3


def test_a_compiler_that_fails_is_named_once_and_the_loss_goes_on():
    def broken(graph, inputs):
        raise RuntimeError("no compiler here")

    torch._dynamo.reset()
    loss, (x, labels) = losses.SupConLoss(), batch()
    loss.compile(backend=broken)
    with pytest.warns(RuntimeWarning, match="SupConLoss is not compiled: .*no compiler here"):
        value = loss(x, labels)
    assert torch.equal(value, losses.SupConLoss()(x, labels))
    loss.temperature = 0.3
    assert torch.equal(loss(x, labels), losses.SupConLoss(0.3)(x, labels))


def test_a_bad_batch_is_refused_in_the_same_words(counter):
    loss = losses.SupConLoss()
    loss.compile(backend=counter)
    with pytest.raises(ValueError, match="labels must have one entry per row of embeddings: 16 rows, 3 labels"):
        loss(batch()[0], torch.arange(3))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # of the compiler, about tensors that are no leaves
@pytest.mark.parametrize("name", ["SupConLoss", "TripletLoss", "SigmoidLoss"])
def test_inside_a_memory_and_of_several_lengths(name):
    """What goes around a compiled loss gets the same numbers as around an uncompiled one."""
    torch._dynamo.reset()
    (x, labels), make = batch(24), getattr(losses, name)
    for around in (lambda loss: memory.CrossBatchMemory(loss, 16, 8), lambda loss: losses.MatryoshkaLoss(loss, [8, 4])):
        plain, compiled = make(), make()
        compiled.compile(backend="aot_eager")
        ours, theirs = around(compiled), around(plain)
        for step in range(2):
            sides = []
            for loss in (ours, theirs):
                y = (x.detach() + step).requires_grad_()
                value = loss(y, labels)
                sides.append([value, *torch.autograd.grad(value, [y, *loss.parameters()])])
            for a, b in zip(*sides, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        assert compiled._compiled_call_impl is not None


def test_hooks_run_whenever_they_were_added(counter):
    loss, (x, labels), seen = losses.SupConLoss(), batch(), []
    loss.compile(backend=counter)
    equal(loss, x, labels)
    handle = loss.register_forward_hook(lambda module, inputs, value: seen.append(float(value.detach())))
    value = loss(x, labels)
    assert seen == [float(value.detach())]
    handle.remove()
    equal(loss, x, labels)
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", ["CosFaceLoss", "SphereFaceLoss", "HeatedSoftmaxLoss", "AdaCosLoss", "CenterLoss"])
def test_losses_over_class_weights_stay_compiled(name, counter):
    """Through numbers that are set, numbers that training steps change, and sizes of batches."""
    settings = {"heat_after": 5} if name == "HeatedSoftmaxLoss" else {}
    loss, (x, labels) = getattr(losses, name)(4, 8, **settings), batch()
    loss.compile(backend=counter)
    for step in range(30):
        if name == "CosFaceLoss":
            loss.margin = 0.1 + 0.01 * step
        equal(loss, x, labels)
    assert counter.frame_count <= 2
    for rows in (8, 12, 16):  # of four to a class
        equal(loss, *batch(rows))
    assert counter.frame_count <= 4
