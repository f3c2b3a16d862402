"""Short cuts on the CPU and hand-written gradients, compared with the plain computation."""

from functools import partial

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from nearkin import losses, mining, relations
from nearkin.core import checks, distances, reduce
from nearkin.core.autograd import gradients_again


def batch(items=64, dim=5, unknown=False):
    g = torch.Generator().manual_seed(items)
    labels = torch.randint(items // 3, (items,), generator=g)
    if unknown:
        labels[::7] = -1
    x = torch.randn(items, dim, generator=g, dtype=torch.float64)
    x[-1] = x[2]  # duplicates, so ties
    return x, labels


@pytest.fixture
def unread(monkeypatch):
    """As on a device, where nothing may be read."""
    monkeypatch.setattr(checks, "reads_values", lambda tensor: False)


def rows(chosen):
    return set(zip(*(part.tolist() for part in chosen.indices()), strict=True))


@pytest.mark.parametrize("name", ["hard", "semihard", *mining.DRAWN])
@pytest.mark.parametrize("unknown", [False, True])
def test_few_positives_give_the_same_triplets(name, unknown, monkeypatch):
    x, labels = batch(unknown=unknown)
    relation = relations.of(labels)
    distance = distances.euclidean(x, normalize=True)
    results = []
    for read in (True, False):
        if not read:
            monkeypatch.setattr(checks, "reads_values", lambda tensor: False)
        generator = torch.Generator().manual_seed(1)
        results.append(mining.select(name, distance, relation, dim=5, generator=generator))
    few, all_columns = results
    assert few.valid.shape[1] < 9 < all_columns.valid.shape[1]
    assert rows(few) == rows(all_columns) and rows(few)


def test_npair_without_positives_is_nothing():
    x, _ = batch(6)
    value = losses.npair_loss(x.requires_grad_(), torch.arange(6))
    value.backward()
    assert value.item() == 0 and not x.grad.any()


def test_relations_do_not_depend_on_being_read(unread):
    _, labels = batch(unknown=True)
    long_way = relations.of(labels)
    assert not long_way.positive[labels == -1].any() and not long_way.negative[:, labels == -1].any()
    known = labels.abs()
    assert torch.equal(relations.of(known).negative, known[:, None] != known[None, :])


def test_upcast_holds_what_no_square_survives():
    x = torch.tensor([[1e30, 1.0], [2.0, -1e30]], requires_grad=True)
    clamped = distances.upcast(x)
    clamped.sum().backward()
    assert clamped.abs().max() < 1e13 and x.grad.tolist() == [[0, 1], [1, 0]]


@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize("falling", [False, True])
@pytest.mark.parametrize("start", [0.0, 0.3])
def test_hinges(squared, falling, start):
    g = torch.Generator().manual_seed(0)
    values = torch.randn(5, 7, generator=g, dtype=torch.float64).requires_grad_()
    mask = torch.rand(5, 7, generator=g) < 0.6
    mask[3] = False

    def plain(v):
        hinged = torch.where(mask, (start - v if falling else v - start).relu(), 0.0)
        return (hinged.square() if squared else hinged).sum(1)

    def ours(v):
        return reduce.hinges(v, mask, start=start, falling=falling, squared=squared)[0]

    weight = torch.arange(1.0, 6.0, dtype=torch.float64)
    torch.testing.assert_close(ours(values), plain(values))
    slopes = [torch.autograd.grad((f(values) * weight).sum(), values)[0] for f in (ours, plain)]
    torch.testing.assert_close(*slopes)
    assert gradcheck(ours, values) and gradgradcheck(ours, values)


@pytest.mark.parametrize("dim", [0, 1])
def test_gradients_of_gradients(dim):
    g = torch.Generator().manual_seed(2)
    x = torch.randn(6, 3, generator=g, dtype=torch.float64).requires_grad_()
    r = torch.randn(4, 3, generator=g, dtype=torch.float64).requires_grad_()
    mask = torch.rand(6, 6, generator=g) < 0.6
    mask.fill_diagonal_(True)
    assert gradgradcheck(lambda a: reduce.logsumexp(distances.cosine(a), mask, dim), x)
    for normalize in (False, True):
        for measure in (distances.euclidean, distances.squared_euclidean):
            assert gradcheck(lambda a, f=measure, n=normalize: f(a, normalize=n), x)
            assert gradgradcheck(lambda a, f=measure, n=normalize: f(a, normalize=n), x)
            assert gradgradcheck(lambda a, b, f=measure, n=normalize: f(a, b, normalize=n), (x, r))


CLASS_LOSSES = {
    "normalised softmax": losses.normalized_softmax_loss,
    "CosFace": losses.cosface_loss,
    "SoftTriple": partial(losses.soft_triple_loss, centers_per_class=3),
}


@pytest.mark.parametrize("name", CLASS_LOSSES)
def test_gradients_of_losses_over_class_weights(name):
    """Rows of any length: they are scaled to 1 within the node."""
    g = torch.Generator().manual_seed(3)
    x = (3 * torch.randn(6, 4, generator=g, dtype=torch.float64)).requires_grad_()
    w = (0.2 * torch.randn(9, 4, generator=g, dtype=torch.float64)).requires_grad_()
    labels, loss = torch.tensor([0, 1, 2, 1, 0, -1]), CLASS_LOSSES[name]
    assert gradcheck(lambda a, b: loss(a, labels, b), (x, w)) and gradgradcheck(lambda a, b: loss(a, labels, b), (x, w))


def test_a_class_softmax_of_zero_rows_and_huge_rows_has_finite_gradients():
    x, w = torch.randn(4, 3, generator=torch.Generator().manual_seed(4)), torch.eye(3)
    x[0], x[1], w[2] = 0.0, x[1] * 1e30, 0.0
    x, w = x.requires_grad_(), w.requires_grad_()
    value = losses.normalized_softmax_loss(x, torch.tensor([0, 1, 2, 0]), w)
    value.backward()
    assert value.isfinite() and x.grad.isfinite().all() and w.grad.isfinite().all()
    assert not x.grad[0].any() and not w.grad[2].any()


def test_second_gradients_at_duplicates_are_finite():
    x, _ = batch(12)
    x.requires_grad_()
    (slope,) = torch.autograd.grad(distances.euclidean(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(slope.square().sum(), x)
    assert bool(second.isfinite().all())


def test_distances_of_any_scale():
    """Of a square only the root may fit the type, and rows of very different lengths stand side by side."""
    x, _ = batch(8)
    x = x.float()
    for scale in (1e-30, 1e-12, 1.0, 1e10):
        expected = torch.cdist(x.double() * scale, x.double() * scale, compute_mode="donot_use_mm_for_euclid_dist")
        torch.testing.assert_close(distances.euclidean(x * scale).double(), expected, rtol=1e-6, atol=0)
    mixed = torch.cat([x, x * 1e-20, torch.zeros(1, 5)])
    expected = torch.cdist(mixed.double(), mixed.double(), compute_mode="donot_use_mm_for_euclid_dist")
    torch.testing.assert_close(distances.euclidean(mixed).double(), expected, rtol=1e-6, atol=0)


def test_counts_of_masks():
    mask = torch.rand(5, 9) < 0.3
    mask[2] = False
    assert torch.equal(reduce.count_in_row(mask), mask.sum(1)) and torch.equal(reduce.any_in_row(mask), mask.any(1))
    assert (
        torch.equal(reduce.any_in_row(mask.T), mask.any(0)) and reduce.any_in_row(mask[:, :0]).tolist() == [False] * 5
    )
    values = torch.randn(5, 9)
    assert torch.equal(reduce.highest(values, mask), reduce.largest(values, mask)[0])


CONSTANTS = {  # losses in whose gradient something is a constant that is none
    "AdaCos in training": losses.AdaCosLoss(5, 4),
    "ArcFace, straight through": losses.ArcFaceLoss(5, 4),
    "ArcFace, straight through, in blocks": losses.ArcFaceLoss(5, 4, max_memory=3000),
}


@pytest.mark.parametrize("near", [False, True])
@pytest.mark.parametrize("name", CONSTANTS)
def test_a_gradient_made_of_constants_is_not_differentiated_again(name, near):
    module, labels = CONSTANTS[name].double(), torch.arange(5)
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    x = (module.weight.detach() + 1e-9 * x if near else x).requires_grad_()
    loss = module
    if "straight" in name:
        loss = partial(losses.arcface_loss, weight=module.weight, straight_through=True, max_memory=module.max_memory)
    loss(x, labels).backward()
    with pytest.raises(RuntimeError, match=r"has no second derivative; take its gradient without create_graph=True"):
        torch.autograd.grad(loss(x, labels), module.weight, create_graph=True)


def test_torch_func_takes_one_derivative_of_them():
    x, labels = batch(12)

    def loss(y):
        return losses.circle_loss(y, labels)

    slope = torch.func.grad(loss)(x)
    assert slope.any() and torch.func.jacrev(loss)(x).equal(slope)
    for twice in (torch.func.hessian(loss), torch.func.grad(lambda y: torch.func.grad(loss)(y).sum())):
        with pytest.raises(RuntimeError, match=r"CircleLoss.* has no second derivative; .* by one torch.func.grad"):
            twice(x)


def test_a_path_from_one_input_to_another_is_counted_once():
    """As from anchors to the score of their own class."""
    x = torch.randn(3, generator=torch.Generator().manual_seed(7), dtype=torch.float64).requires_grad_()
    y = x * x
    by = gradients_again(lambda a, b, _: (a * b).sum(), (x, y, None), (True, True, False), torch.ones(()).double())
    assert torch.equal(by[0], y) and torch.equal(by[1], x) and by[2] is None
    assert torch.equal(torch.autograd.grad(by[0].sum(), x)[0], 2 * x)
