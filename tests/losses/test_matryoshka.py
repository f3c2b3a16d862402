"""A loss of several lengths: statistics of each, what goes around what, what is refused, ranks.

That it is the sum of its loops is a property of every loss: `loss_checks/around.py`.
"""

import pytest
import torch
from torch import nn

import worlds
from cases import CLASSES, DIM
from loss_checks.around import DIMS
from nearkin import losses
from nearkin.core import distances
from nearkin.dist.global_batch import GlobalBatch, average_gradients
from nearkin.losses import MatryoshkaLoss, class_shards
from nearkin.memory import CrossBatchMemory


def test_statistics_of_a_length_are_those_of_a_loss_of_that_length():
    """AdaCos's scale, Center's centres, and Heated's statistics, after some steps."""
    torch.manual_seed(0)
    batches = [(torch.randn(12, DIM), torch.arange(12) % CLASSES) for _ in range(4)]
    for make in (losses.AdaCosLoss, losses.CenterLoss, lambda c, d: losses.HeatedSoftmaxLoss(c, d, norm="batch")):
        whole = make(CLASSES, DIM)
        wrapper = MatryoshkaLoss(whole, DIMS)
        short = make(CLASSES, 4)
        with torch.no_grad():
            short.weight.copy_(whole.weight[:, :4])
        for x, labels in batches:
            wrapper(x, labels)
            short(distances.unit(x[:, :4]), labels)
        for name, buffer in short.named_buffers():
            torch.testing.assert_close(getattr(wrapper, f"{name}_4"), buffer)


def test_the_dimension_that_the_data_fill_is_that_of_each_length():
    torch.manual_seed(0)
    wrapper = MatryoshkaLoss(losses.MarginLoss(sampling_dim="fitted"), DIMS)
    short = losses.MarginLoss(sampling_dim="fitted")
    labels = torch.arange(12) % CLASSES
    for _ in range(3):
        x = torch.randn(12, DIM)
        wrapper(x, labels)
        short(distances.unit(x[:, :4]), labels)
    torch.testing.assert_close(wrapper.running_dim_moments_4, short.running_dim.moments)
    assert not torch.equal(wrapper.running_dim_moments_4, wrapper.loss.running_dim.moments)


def test_the_parts_of_a_loss_that_a_trainer_asks_for():
    loss = losses.ProxyAnchorLoss(CLASSES, DIM)
    wrapper = MatryoshkaLoss(loss, DIMS)
    assert wrapper.lr_scale == loss.lr_scale == 100 and [*wrapper.parameters()] == [loss.weight]
    assert wrapper.dims == DIMS and wrapper.weights == (1.0, 1.0, 1.0) and wrapper.normalize
    assert not wrapper.takes_references and MatryoshkaLoss(losses.SupConLoss(), DIMS).takes_references
    assert "dims=[6, 4, 2]" in repr(wrapper) and "weights=[1.0, 3.0]" in repr(MatryoshkaLoss(loss, (6, 2), (1.0, 3.0)))
    with pytest.raises(AttributeError):
        wrapper.dims = (6, 3)
    wrapper(torch.randn(4, DIM), torch.arange(4)).backward()
    assert (loss.weight.grad != 0).all()


def test_unused_columns_learn_from_the_longest_alone():
    loss = losses.ArcFaceLoss(CLASSES, DIM)
    x, labels = torch.randn(8, DIM), torch.arange(8) % CLASSES
    wrapper = MatryoshkaLoss(loss, (DIM, 2))
    wrapper(x, labels).backward()
    both, loss.weight.grad = loss.weight.grad, None
    loss(distances.unit(x), labels).backward()
    torch.testing.assert_close(both[:, 2:], loss.weight.grad[:, 2:])
    assert not torch.allclose(both[:, :2], loss.weight.grad[:, :2])


def test_items_and_selections_reach_the_loss():
    loss = losses.MarginLoss(num_items=9)
    x, labels = torch.randn(8, DIM), torch.arange(8) % CLASSES
    wrapper = MatryoshkaLoss(loss, DIMS)
    torch.manual_seed(3)
    wrapper(x, labels, items=torch.arange(8)).backward()
    assert loss.item_beta.grad.abs().sum() > 0 and loss.item_beta.grad[8] == 0


def test_a_memory_goes_around():
    torch.manual_seed(0)
    wrapper = MatryoshkaLoss(losses.SupConLoss(), DIMS)
    memory = CrossBatchMemory(wrapper, 16, DIM)
    first, second = torch.randn(2, 8, DIM)
    labels = torch.arange(8) % CLASSES
    memory(first, labels)
    value = memory(second, labels)
    wanted = 0.0
    for dim in DIMS:
        alone = CrossBatchMemory(losses.SupConLoss(), 16, dim)
        alone(distances.unit(first[:, :dim]), labels)
        wanted = wanted + alone(distances.unit(second[:, :dim]), labels)
    torch.testing.assert_close(value, wanted)
    with pytest.raises(TypeError, match="loss must take references"):
        CrossBatchMemory(MatryoshkaLoss(losses.ArcFaceLoss(CLASSES, DIM), DIMS), 16, DIM)
    with pytest.raises(TypeError, match=r"a memory goes around: CrossBatchMemory\(MatryoshkaLoss"):
        MatryoshkaLoss(CrossBatchMemory(losses.SupConLoss(), 16, DIM), DIMS)


class OwnLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(CLASSES, DIM))

    def forward(self, embeddings, labels):
        return nn.functional.cross_entropy(embeddings @ self.weight.T, labels)


def test_a_loss_of_your_own_says_what_is_cut():
    x, labels = torch.randn(8, DIM), torch.arange(8) % CLASSES
    with pytest.raises(TypeError, match=r"loss must say which of its tensors \(weight\) .* in along_dim, got OwnLoss"):
        MatryoshkaLoss(OwnLoss(), DIMS)
    loss = OwnLoss()
    loss.along_dim = ("weight",)
    value = MatryoshkaLoss(loss, DIMS, normalize=False)(x, labels)
    wanted = sum(nn.functional.cross_entropy(x[:, :m] @ loss.weight[:, :m].T, labels) for m in DIMS)
    torch.testing.assert_close(value, wanted)


@pytest.mark.parametrize("dims", [(), 8, "128", (6, 6), (2, 6), (6, 0), (6, 2.5), (6, True)])
def test_bad_lengths(dims):
    with pytest.raises(
        ValueError, match=r"dims must be whole numbers >= 1, strictly decreasing, as \[128, 64, 32, 16\]"
    ):
        MatryoshkaLoss(losses.SupConLoss(), dims)


def test_bad_input_is_one_sentence():
    pair, by_class = losses.SupConLoss(), losses.ArcFaceLoss(CLASSES, DIM)
    x, labels = torch.randn(4, DIM), torch.arange(4)
    for make, sentence in (
        (lambda: MatryoshkaLoss("arcface", DIMS), "loss must be a torch module, got str"),
        (lambda: MatryoshkaLoss(by_class, (8, 4)), "dims must begin with the loss's own dim: ArcFaceLoss has 6, got 8"),
        (lambda: MatryoshkaLoss(pair, DIMS, (1, 2)), "weights must have one entry per length: 3 lengths, 2 weights"),
        (lambda: MatryoshkaLoss(pair, DIMS, (1, 0, 1)), "weights must be > 0, got 0"),
        (lambda: MatryoshkaLoss(pair, DIMS, normalize=1), "normalize must be True or False, got 1"),
        (lambda: MatryoshkaLoss(losses.AdaFaceLoss(CLASSES, DIM), DIMS), "normalize must be False for AdaFaceLoss"),
        (lambda: MatryoshkaLoss(GlobalBatch(pair), DIMS), "got GlobalBatch, which goes around"),
        (lambda: MatryoshkaLoss(MatryoshkaLoss(pair, DIMS), DIMS), "got MatryoshkaLoss, which goes around"),
        (
            lambda: MatryoshkaLoss(pair, (8, 4))(x, labels),
            r"embeddings must have 8 dimensions as dims\[0\] says, got 6",
        ),
        (lambda: MatryoshkaLoss(pair, DIMS)(x, labels, x[:, :2]), "references must have 6 dimensions"),
        (lambda: MatryoshkaLoss(by_class, DIMS)(x, labels, x, labels), "loss must take references"),
        (lambda: MatryoshkaLoss(by_class, DIMS)(x, labels + 9), "labels"),
    ):
        with pytest.raises((TypeError, ValueError), match=sentence):
            make()
    bad = x.clone()
    bad[0, -1] = torch.nan  # in no length but the longest
    assert MatryoshkaLoss(pair, DIMS)(bad, labels % 2).isnan()


# --- several ranks

NAMES = ("arcface", "center", "supcon")


def ranked(name, shard):
    torch.manual_seed(5)
    make = {
        "arcface": lambda: losses.ArcFaceLoss(5, DIM, scale=8.0, shard=shard),
        "center": lambda: losses.CenterLoss(5, DIM, center_weight=0.5, shard=shard),
        "supcon": losses.SupConLoss,
    }[name]
    return MatryoshkaLoss(make().double(), DIMS).double()


def rows_of_all():
    g = torch.Generator().manual_seed(2)
    return torch.randn(12, DIM, generator=g, dtype=torch.float64), torch.arange(12) % 5


def steps_of(loss, wrapped, rank, world):
    """Two steps: values, the gradient of the rank's rows, that of the class weights, the statistics."""
    x, labels = rows_of_all()
    mine = slice(rank * 12 // world, (rank + 1) * 12 // world)
    value = None
    for _ in range(2):
        part = x[mine].clone().requires_grad_()
        loss.zero_grad()
        value = wrapped(part, labels[mine])
        value.backward()
    average_gradients(loss)
    gradients = {name: p.grad.numpy() for name, p in loss.named_parameters()}
    buffers = {name: buffer.numpy() for name, buffer in loss.named_buffers()}
    return float(value.detach()), (part.grad / world).numpy(), gradients, buffers, class_shards.layout(loss)


def on_a_rank(rank, world, name, shard):
    loss = ranked(name, shard)
    return steps_of(loss, GlobalBatch(loss), rank, world)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shard"), [(name, shard) for name in NAMES for shard in (False, True)][:-1])
def test_two_ranks_compute_what_one_does(name, shard):
    loss = ranked(name, False)
    value, by_rows, gradients, buffers, _ = steps_of(loss, loss, 0, 1)
    answers = worlds.run(2, on_a_rank, name, shard)
    for rank, (got, rows, by_weights, statistics, layout) in enumerate(answers):
        assert got == pytest.approx(value, rel=1e-9)
        torch.testing.assert_close(torch.tensor(rows), torch.tensor(by_rows[6 * rank : 6 * rank + 6]))
        assert shard == bool(layout)
        for wanted, own in ((gradients, by_weights), (buffers, statistics)):
            assert wanted.keys() == own.keys()
            for key, tensor in wanted.items():
                first, last, _ = layout.get(key, (0, len(tensor) if tensor.ndim else 1, 0))
                part = tensor[first:last] if key in layout else tensor
                torch.testing.assert_close(torch.tensor(own[key]), torch.tensor(part), msg=f"{key} on rank {rank}")
