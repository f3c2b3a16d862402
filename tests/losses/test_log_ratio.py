"""Log-ratio: chosen anchors, and labels that are vectors, on every road: blocks, references, memory, compiled."""

import pytest
import torch

import reference
from nearkin import losses, memory, relations, samplers
from nearkin.core import blockwise

ITEMS, DIM, COLUMNS = 7, 5, 20


def batch(seed=0, items=ITEMS, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    x, targets = (torch.randn(items, n, generator=g, dtype=torch.float64) for n in (DIM, COLUMNS))
    return x.to(dtype), targets


def gaps(targets, others=None):
    """Plain label distances by a loop over pairs."""
    others = targets if others is None else others
    return torch.tensor([[float((a - b).square().sum().sqrt()) for b in others] for a in targets], dtype=torch.float64)


def loop(x, apart, references=None, anchors=None, **settings):
    """The float64 loop over the first anchors; a batch meets itself, less the pairs of an item with itself."""
    n = len(x) if anchors is None else anchors
    if references is None:
        references, apart = x, apart.clone().fill_diagonal_(0)
    return reference.logratio(x[:n], apart[:n], references, **settings)


def value_and_gradient(function, x):
    y = x.clone().requires_grad_()
    value = function(y)
    value.backward()
    return value.detach(), y.grad


def assert_same(function, wanted, x, accuracy=1e-10):
    for got, want in zip(value_and_gradient(function, x), value_and_gradient(wanted, x.double()), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=accuracy, atol=accuracy)


def few_rows(x, references=None, rows=2):
    """Bytes in which so many rows of anchors fit."""
    others = x if references is None else references
    return (len(x) + len(others)) * DIM * blockwise.ROW + rows * len(others) * blockwise.PAIR * 2


chosen = pytest.mark.parametrize("anchors", [None, 1, 3, ITEMS + 5])


@chosen
@pytest.mark.parametrize("ties", ["drop", "keep"])
def test_the_first_rows_are_the_anchors(anchors, ties):
    x, targets = batch()
    targets[2] = targets[5]  # at the same label distance from everyone
    loss = losses.LogRatioLoss(anchors=anchors, ties=ties)
    n = None if anchors is None else min(anchors, ITEMS)
    assert_same(lambda y: loss(y, targets), lambda y: loop(y, gaps(targets), anchors=n, ties=ties), x)
    single = x.float()
    assert_same(lambda y: loss(y, targets), lambda y: loop(y, gaps(targets), anchors=n, ties=ties), single, 1e-5)


def test_one_anchor_is_every_pair_of_the_others():
    """The paper's dense triplet mining, written out: the anchor, and any two of the others in label order."""
    x, targets = batch()
    away, apart = (x[0] - x).square().sum(1), (targets[0] - targets).square().sum(1)
    pairs = [(i, j) for i in range(1, ITEMS) for j in range(1, ITEMS) if apart[i] < apart[j]]
    terms = [((away[i] / away[j]).log() - (apart[i] / apart[j]).log()) ** 2 for i, j in pairs]
    wanted = torch.stack(terms).mean()
    torch.testing.assert_close(losses.logratio_loss(x, targets, anchors=1, epsilon=1e-12), wanted, rtol=1e-8, atol=0)


@chosen
def test_targets_of_twenty_numbers_on_every_road(anchors):
    """In the batch, against references, against label distances, in blocks of a few rows and in one piece."""
    x, targets = batch()
    references, others = batch(1, 5)
    n = ITEMS if anchors is None else min(anchors, ITEMS)
    far = gaps(targets, others)
    label_gaps = gaps(targets) + torch.eye(ITEMS, dtype=torch.float64)  # its diagonal says something, and is not heard
    for bytes_ in (None, few_rows(x[:n], x)):
        loss = losses.LogRatioLoss(anchors=anchors, max_memory=bytes_)
        assert_same(lambda y, loss=loss: loss(y, targets), lambda y: loop(y, gaps(targets), anchors=n), x)
        assert_same(
            lambda y, loss=loss: loss(y, relations.LabelDistance(label_gaps)),
            lambda y: loop(y, label_gaps, anchors=n),
            x,
        )
        assert_same(
            lambda y, loss=loss: loss(y, targets, references, others),
            lambda y: loop(y, far, references, anchors=n),
            x,
        )
        assert_same(
            lambda y, loss=loss: loss(y, relations.LabelDistance(far), references),
            lambda y: loop(y, far, references, anchors=n),
            x,
        )
    assert bool((label_gaps.diagonal() == 1).all()), "the caller's own matrix stays as it is"


@chosen
def test_a_memory_of_targets_of_twenty_numbers(anchors):
    loss = losses.LogRatioLoss(anchors=anchors)
    remembering = memory.CrossBatchMemory(loss, ITEMS + 3, DIM, label_kind="targets", label_dim=COLUMNS).double()
    past, past_targets = torch.empty(0, DIM).double(), torch.empty(0, COLUMNS).double()
    for step in range(3):
        x, targets = batch(step)
        apart = gaps(targets, torch.cat([targets, past_targets]))
        n = None if anchors is None else min(anchors, ITEMS)

        def wanted(y, apart=apart, past=past, n=n):
            return loop(y, apart, torch.cat([y, past]), anchors=n)

        y = x.clone().requires_grad_()
        value = remembering(y, targets)
        value.backward()
        by_hand = value_and_gradient(wanted, x)
        torch.testing.assert_close(value.detach(), by_hand[0], rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(y.grad, by_hand[1], rtol=1e-8, atol=1e-9)
        past, past_targets = torch.cat([past, x])[-(ITEMS + 3) :], torch.cat([past_targets, targets])[-(ITEMS + 3) :]


def test_chosen_anchors_compile_whole():
    torch._dynamo.reset()
    x, targets = batch(dtype=torch.float32)
    loss = losses.LogRatioLoss(anchors=3)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for got, want in zip(
        value_and_gradient(lambda y: compiled(y, targets), x),
        value_and_gradient(lambda y: loss(y, targets), x),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        assert bool((want != 0).any())


@pytest.mark.parametrize("anchors, sentence", [(0, "anchors must be >= 1, got 0"), (1.5, "a whole number, got 1.5")])
def test_bad_anchors_are_one_sentence(anchors, sentence):
    with pytest.raises((ValueError, TypeError), match=sentence):
        losses.LogRatioLoss(anchors=anchors)


def test_sampler_and_loss_agree_on_who_is_an_anchor():
    """Every anchor of the loss meets its five nearest labels: what dense triplet mining is for."""
    _, targets = batch(items=400)
    sampler = samplers.LabelNeighbours(targets, 60, 5, anchors=10)
    for index in range(5):
        rows = torch.tensor(sampler.batch(0, index))
        apart = gaps(targets[rows[:10]], targets)
        nearest = apart.argsort(1)[:, 1:6]
        assert bool(torch.isin(nearest, rows).all())
