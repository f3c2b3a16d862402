"""The dimension that embeddings fill: recovered, robust, finite, running, resumed, equal on ranks, without a wait."""

import math

import pytest
import torch

import worlds
from nearkin import losses, memory, mining, relations
from nearkin.core import distances
from nearkin.dist.global_batch import GlobalBatch
from nearkin.losses import sampling_dim
from nearkin.losses.sampling_dim import RunningDim

LABELS = torch.arange(32).repeat_interleave(4)
TAKERS = {
    "margin": lambda **how: losses.MarginLoss(**how),
    "triplet": lambda **how: losses.TripletLoss(selection="distance_weighted", **how),
    "quadruplet": lambda **how: losses.QuadrupletLoss(selection="distance_weighted", **how),
    "contrastive": lambda **how: losses.ContrastiveLoss(selection="distance_weighted", normalize=True, **how),
}
takers = pytest.mark.parametrize("name", TAKERS)


def on_sphere(dims, number=128, inside=128, seed=0):
    """Uniform points of a sphere in `dims` dimensions, turned into a space of `inside`."""
    g = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(inside, inside, generator=g, dtype=torch.float64))[0][:dims]
    points = distances.unit(torch.randn(number, dims, generator=g, dtype=torch.float64))
    return (points @ turn * 3).float()  # of any length: the loss normalises


def fitted(x, labels=LABELS):
    return float(sampling_dim.resolve("fitted", "distance_weighted", x, labels))


def number(value):
    return float(value.detach())


def by_loops(x, labels):
    """1 / mean cos² over pairs of different known classes, in float64."""
    x = [[float(v) for v in row] for row in x]
    squares = []
    for i, a in enumerate(x):
        for j, b in enumerate(x):
            if i != j and -1 not in (int(labels[i]), int(labels[j])) and labels[i] != labels[j]:
                dot = sum(p * q for p, q in zip(a, b, strict=True))
                squares.append(dot**2 / (sum(p * p for p in a) * sum(q * q for q in b)))
    return min(max(len(squares) / sum(squares), 2), len(x[0]))


# --- the estimate


@pytest.mark.parametrize("dims", [2, 3, 5, 9, 16, 32, 64, 128])
def test_the_dimension_of_a_sphere_is_recovered(dims):
    """Within 6 % by one batch of 128, four deviations; the running mean of twenty batches within 2 %."""
    assert fitted(on_sphere(dims)) == pytest.approx(dims, rel=0.06)
    running = RunningDim()
    for seed in range(20):
        value = float(running(on_sphere(dims, seed=seed), LABELS))
    assert value == pytest.approx(dims, rel=0.02)


def test_the_estimate_is_the_loop_s():
    torch.manual_seed(0)
    x, labels = torch.randn(40, 12) + 0.4, torch.randint(-1, 6, (40,))
    assert fitted(x, labels) == pytest.approx(by_loops(x, labels), rel=1e-5)
    relation = relations.of(labels)
    assert fitted(x, relation) == pytest.approx(by_loops(x, labels), rel=1e-5)
    distance = distances.euclidean(x, normalize=True)
    torch.manual_seed(1)
    drawn = mining.distance_weighted(distance, relation, dim="fitted")
    torch.manual_seed(1)
    told = mining.distance_weighted(distance, relation, dim=torch.tensor(by_loops(x, labels)))
    assert torch.equal(drawn.negative, told.negative)


def test_clusters_and_near_duplicates_move_it_little():
    """Points of a class close together; and two of different classes that are the same picture."""
    centres = on_sphere(9, 32)
    noise = torch.randn(128, 128, generator=torch.Generator().manual_seed(5)) * 0.01
    clustered = centres.repeat_interleave(4, 0) + noise
    assert fitted(clustered) == pytest.approx(9, rel=0.25)  # 496 pairs of classes: a deviation of 6 %
    running = RunningDim()
    for seed in range(20):
        value = float(running(on_sphere(9, 32, seed=seed).repeat_interleave(4, 0) + noise, LABELS))
    assert value == pytest.approx(9, rel=0.08)
    same = on_sphere(9)
    same[4] = same[0]
    assert fitted(same) == pytest.approx(fitted(on_sphere(9)), rel=0.01)


@pytest.mark.parametrize(
    "x, expected",
    [
        (torch.ones(8, 6), 2.0),  # collapsed
        (torch.zeros(8, 6), 6.0),
        (torch.eye(8), 8.0),  # orthogonal: more than any sphere of 8
        (torch.full((8, 6), math.nan), 2.0),
        (torch.full((8, 6), 1e30), 2.0),
        (torch.ones(8, 1), 2.0),
    ],
)
def test_it_is_finite_always(x, expected):
    assert fitted(x, torch.arange(8)) == pytest.approx(expected)
    assert fitted(x, torch.zeros(8, dtype=torch.long)) == 2.0  # no negatives
    assert fitted(x[:0], torch.zeros(0, dtype=torch.long)) == 2.0


def test_a_large_batch_is_judged_by_some_of_its_items(monkeypatch):
    sizes, plain = [], sampling_dim.sphere.mean_squared_cosine
    monkeypatch.setattr(
        sampling_dim.sphere, "mean_squared_cosine", lambda c, m: sizes.append(tuple(c.shape)) or plain(c, m)
    )
    assert fitted(on_sphere(9, 5000), torch.arange(5000) // 4) == pytest.approx(9, rel=0.05)
    assert sizes == [(1000, 1000)]


# --- in the losses


@takers
def test_a_number_is_its_tensor_and_decides_the_draws(name):
    x = on_sphere(9)
    values = {}
    for dim in (None, 128, 9, torch.tensor(9.0), "fitted"):
        loss = TAKERS[name](sampling_dim=dim)
        torch.manual_seed(3)
        values[str(dim)] = number(loss(x, LABELS))
    assert values["None"] == values["128"] and values["9"] == values["tensor(9.)"]
    assert values["9"] != values["128"]
    assert values["fitted"] == pytest.approx(values["9"], abs=0.05)


def test_drawn_distances_spread_where_the_dimension_fits():
    """The middle half of the drawn distances is wider, on a sphere of 9 dimensions in 128."""
    x = on_sphere(9, 512)
    distance, relation = distances.euclidean(x, normalize=True), relations.of(torch.arange(512) // 4)
    widths = []
    for dim in (128, "fitted"):
        anchor, _, negative = mining.distance_weighted(distance, relation, dim=dim).indices()
        quarters = distance[anchor, negative].quantile(torch.tensor([0.25, 0.75]))
        widths.append(float(quarters[1] - quarters[0]))
    assert widths[1] > 2 * widths[0]


@takers
def test_the_buffer_runs_in_training_only_and_is_resumed(name):
    torch.manual_seed(0)
    loss = TAKERS[name](sampling_dim="fitted")
    batches = [on_sphere(dims, seed=dims) for dims in (4, 9, 30)]
    loss(batches[0], LABELS)
    once = loss.running_dim.moments.clone()
    assert float(once[1]) == pytest.approx(0.1) and float(once[0]) == pytest.approx(0.1 / 4, rel=0.1)
    loss.eval()
    loss(batches[1], LABELS)
    assert torch.equal(loss.running_dim.moments, once)
    loss.train()
    torch.manual_seed(7)
    straight = [number(loss(x, LABELS)) for x in batches]
    again = TAKERS[name](sampling_dim="fitted")
    state = loss.state_dict() | {"running_dim.moments": once}
    again.load_state_dict(state)
    torch.manual_seed(7)
    assert [number(again(x, LABELS)) for x in batches] == straight
    assert torch.equal(again.running_dim.moments, loss.running_dim.moments)
    assert "running_dim.moments" not in TAKERS[name]().state_dict()
    assert loss.settings["sampling_dim"] == "fitted" and "sampling_dim='fitted'" in repr(loss)


def test_batches_without_negatives_or_with_nan_leave_it_alone():
    running = RunningDim()
    running(on_sphere(9), LABELS)
    before = running.moments.clone()
    running(on_sphere(9), torch.zeros(128, dtype=torch.long))
    bad = on_sphere(9)
    bad[3, 3] = math.nan
    assert math.isfinite(float(running(bad, LABELS)))
    assert torch.equal(running.moments, before)


def test_it_works_with_a_memory_and_in_blocks():
    loss = memory.CrossBatchMemory(losses.MarginLoss(sampling_dim="fitted"), 64, 128)
    for seed in range(3):
        value = loss(on_sphere(9, seed=seed).requires_grad_(), LABELS)
        value.backward()
    assert math.isfinite(number(value)) and float(loss.loss.running_dim.moments[1]) > 0.2
    x = on_sphere(9)
    values = []
    for most in (None, 1_700_000):
        torch.manual_seed(0)
        values.append(float(losses.triplet_loss(
            x, LABELS, selection="distance_weighted", sampling_dim="fitted", max_memory=most
        )))  # fmt: skip
    assert values[0] == pytest.approx(values[1], rel=0.2)  # other draws of the same distribution


def test_it_compiles_and_reads_nothing_back():
    """On "meta" there is no value to read: a synchronisation would be an error."""
    x, labels = torch.empty(32, 8, device="meta"), torch.empty(32, dtype=torch.long, device="meta")
    assert RunningDim()(x, labels).device.type == "meta"
    loss = RunningDim()
    compiled = torch.compile(loss, backend="eager", fullgraph=True)
    assert float(compiled(on_sphere(9), LABELS)) == pytest.approx(9, rel=0.06)
    assert float(loss.moments[1]) == pytest.approx(0.1)


def rank_values(rank, size):
    torch.manual_seed(rank)
    loss = GlobalBatch(losses.MarginLoss(sampling_dim="fitted"))
    part = slice(128 * rank // size // 4 * 4, 128 * (rank + 1) // size // 4 * 4)
    for seed in range(3):
        loss(on_sphere(9, seed=seed)[part], LABELS[part])
    return loss.loss.running_dim.moments.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_have_the_dimension_of_one_process(size):
    expected = losses.MarginLoss(sampling_dim="fitted")
    for seed in range(3):
        expected(on_sphere(9, seed=seed), LABELS)
    for moments in worlds.run(size, rank_values):
        assert moments == expected.running_dim.moments.tolist()


@pytest.mark.parametrize(
    "call, sentence",
    [
        (lambda: losses.MarginLoss(sampling_dim=1), "sampling_dim must be >= 2, got 1"),
        (lambda: losses.MarginLoss(sampling_dim="own"), 'unknown sampling_dim "own"; known: fitted'),
        (lambda: losses.MarginLoss(sampling_dim=2.5), "sampling_dim must be a whole number, got 2.5"),
        (
            lambda: losses.TripletLoss(sampling_dim="fitted"),
            "sampling_dim must be left out unless selection=\"distance_weighted\", got 'fitted'",
        ),
        (
            lambda: losses.margin_loss(torch.ones(4, 2), torch.arange(4), sampling_dim=torch.ones(2)),
            r"sampling_dim must be a scalar of a float type, got torch.float32 \(2,\)",
        ),
        (
            lambda: setattr(losses.MarginLoss(), "sampling_dim", "fitted"),
            "sampling_dim cannot change after construction: make a new MarginLoss, got 'fitted'",
        ),
        (
            lambda: mining.distance_weighted(torch.ones(2, 2), relations.of(torch.arange(2)), dim="own"),
            'unknown dim "own"; known: fitted',
        ),
    ],
)
def test_bad_settings_are_answered_in_one_sentence(call, sentence):
    with pytest.raises((ValueError, TypeError, AttributeError), match=f"^{sentence}$"):
        call()
