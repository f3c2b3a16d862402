"""Facility location's search against greedy and exchange by hand, and against what it has chosen before."""

import math

import pytest
import torch

import reference
from nearkin import losses
from nearkin.core import devices, distances, facility

TIE = 1e-9


def items(seed, size=None, dtype=torch.float64):
    """Rows and labels; every other seed on a small grid, so full of ties, every third with unknown labels."""
    g = torch.Generator().manual_seed(seed)
    size = int(torch.randint(1, 14, (), generator=g)) if size is None else size
    classes = int(torch.randint(1, 6, (), generator=g))
    labels = torch.randint(-1 if seed % 3 == 0 else 0, classes, (size,), generator=g)
    if seed % 2:
        x = torch.randn(size, 3, generator=g, dtype=torch.float64)
    else:
        x = torch.randint(0, 3, (size, 2), generator=g).double()
    return x.to(dtype), labels


def batch(seed, size=None, dtype=torch.float64):
    """Distances and labels of `items`."""
    x, labels = items(seed, size, dtype)
    return distances.euclidean(x), labels


# Items per class, how far the classes lie apart, and how many rows are copies of others.
STRUCTURED = {
    "classes of 4": (4, 0.3, 0),
    "classes of 8": (8, 1.0, 0),
    "classes of 32": (32, 0.5, 0),
    "no structure": (4, 0.0, 0),
    "copies": (4, 0.3, 20),
    "all equal": (8, 0.0, 2**20),
}


def structured(name, size, seed=0):
    """Unit rows and labels; the last five rows in a class of their own, some labels unknown."""
    per_class, spread, copies = STRUCTURED[name]
    g = torch.Generator().manual_seed(seed)
    labels = torch.arange(size) // per_class
    x = torch.randn(size, 16, generator=g) + spread * torch.randn(size, 16, generator=g)[labels]
    order = torch.randperm(size, generator=g)
    x, labels = x[order], labels[order]
    labels[-5:] = size
    labels[::17] = -1
    x[torch.randint(size, (copies,), generator=g)] = x[0].clone()
    return distances.unit(x.double()), labels


def by_hand(distance, labels, gamma, sweeps):
    return reference.facility_search(distance.tolist(), labels, gamma, sweeps, TIE)


def chosen(result):
    return result.chosen.nonzero().squeeze(1).tolist()


def same(a, b):
    return all(map(torch.equal, a, b))


@pytest.mark.parametrize("gamma", [0.0, 1.0, 4.0])
def test_the_choice_is_that_of_greedy_and_exchange(gamma):
    for seed in range(40):
        d, labels = batch(seed)
        for sweeps in (0, 2):
            result = losses.facility_location(d, labels, gamma=gamma, sweeps=sweeps)
            assert chosen(result) == by_hand(d, labels, gamma, sweeps), (seed, sweeps)


# Medoids, value and the gradient's sum weighted from -1 to 1, of a batch and its γ, by the search of versions before.
PINNED = {
    (0, 1.0): ([0, 1, 3, 8], 4.052929667629385, -0.11670154952633843),
    (1, 1.0): ([8], 0.0, 0.0),
    (2, 4.0): ([0, 1, 6, 7], 8.94898790037571, 0.9896735529921312),
    (3, 1.0): ([11, 14], 4.283915843119601, 0.25631921466389274),
    (4, 0.0): ([4], 0.0, 0.0),
    (5, 2.0): ([3, 11], 5.422907740366734, -2.7204180777247364),
    (6, 1.0): ([1], 0.0, 0.0),
    (8, 4.0): ([0, 1, 9, 12], 7.413637079573647, -0.6495253046831149),
    (9, 0.0): ([18], 0.0, 0.0),
    ("classes of 4", 1.0): ([9, 10, 11, 12, 13, 14, 15, 20, 21, 28, 30, 44, 46], 9.467894926949697, 2.52115470295752),
    ("classes of 4", 30.0): ([2, 3, 4, 13, 16, 20, 21, 30, 32, 35, 39, 45, 47], 23.20104588624046, -1.3410673690020474),
    ("classes of 8", 1.0): ([2, 5, 23, 26, 30, 33, 37], 3.9646696855284773, 0.3045849958704547),
    ("classes of 8", 30.0): ([5, 13, 21, 29, 36, 40, 46], 17.831174975411102, -0.15727571441110544),
    ("classes of 32", 1.0): ([12, 21, 25], 5.219010293717005, -1.5704702461140065),
    ("classes of 32", 30.0): ([14, 25, 33], 32.31546496632702, -0.4354742223456418),
    ("no structure", 1.0): (
        [1, 4, 10, 12, 13, 14, 27, 28, 30, 32, 41, 43, 47],
        11.210364996097464,
        -2.8405954366025092,
    ),
    ("no structure", 30.0): ([3, 4, 12, 19, 20, 21, 23, 30, 32, 33, 41, 43, 47], 26.76830944911388, 0.526388363423949),
    ("copies", 1.0): ([1, 2, 8, 9, 12, 26, 28, 30, 38, 41, 43, 46, 47], 15.884874731612602, 0.3746234740576251),
    ("copies", 30.0): ([2, 8, 9, 10, 12, 20, 21, 30, 31, 38, 41, 43, 47], 30.859825888432894, -0.9050336954231675),
    ("all equal", 1.0): ([1, 2, 3, 4, 8, 9, 16], 0.7743004125522234, 0.0),
    ("all equal", 30.0): ([1, 2, 3, 4, 8, 9, 16], 23.2290123765667, 0.0),
}


@pytest.mark.parametrize(("name", "gamma"), PINNED)
def test_medoids_values_and_gradients_are_those_of_before(name, gamma):
    medoids, value, slope = PINNED[name, gamma]
    got = outcome(name, gamma)
    assert got[0] == medoids
    assert got[1:] == pytest.approx((value, slope), rel=1e-9, abs=1e-9)


def outcome(name, gamma):
    x, labels = items(name, 13 + name) if isinstance(name, int) else structured(name, 48)
    x.requires_grad_()
    loss = losses.FacilityLocationLoss(gamma=gamma)
    value = loss(x, labels)
    value.backward()
    weights = torch.linspace(-1, 1, x.numel(), dtype=x.dtype)
    medoids = loss.medoids.nonzero().squeeze(1).tolist()
    return medoids, value.item(), float(x.grad.flatten() @ weights)


@pytest.mark.parametrize("weight", [-2.0, math.inf, -math.inf, math.nan])
def test_odd_weights_end(weight):
    x, labels = structured("copies", 40)
    gamma = torch.tensor(weight, dtype=torch.float64)
    result = losses.facility_location(distances.euclidean(x), labels, gamma=gamma, num_clusters=9)
    assert int(result.chosen.sum()) == (1 if math.isnan(weight) else 9)
    assert math.isfinite(weight) == bool(result.score.isfinite())


def test_parts_are_as_the_whole(monkeypatch):
    """Large batches are scored in parts."""
    x, labels = structured("classes of 4", 60)
    whole = losses.facility_location(distances.euclidean(x), labels)
    for entries in (1, 7 * 60):
        monkeypatch.setattr(facility, "TOGETHER", entries)
        assert same(whole, losses.facility_location(distances.euclidean(x), labels))


def test_the_end_of_a_quiet_search_is_the_end(monkeypatch):
    """Nothing changed since each medoid was last tried: more rounds change nothing."""
    tried = []
    scores = facility._Search._scores
    monkeypatch.setattr(facility._Search, "_scores", lambda *arguments: tried.append(1) or scores(*arguments))
    d, labels = batch(25, 40)
    long = losses.facility_location(d, labels, sweeps=100)
    assert len(tried) <= 6 * int(long.chosen.sum())
    assert same(long, losses.facility_location(d, labels, sweeps=5))


def test_sums_equal_on_paper_are_equal():
    table = facility.entropy_table(3000).tolist()
    assert table[4] == 4 * table[2] and 6 * table[2] * 3 + 6 * table[3] * 2 == 6 * table[6]
    assert max(abs(v / facility.FINE - n * math.log(n)) for n, v in enumerate(table) if n) < 1e-8


def test_items_are_nearest_to_columns():
    """distance[item, medoid], should the two ways differ."""
    d = torch.tensor([[0.0, 1.0, 5.0], [9.0, 0.0, 9.0], [1.0, 2.0, 0.0]])
    result = losses.facility_location(d, torch.tensor([0, 0, 0]), gamma=0.0)
    assert chosen(result) == [1] and result.score == -3


def test_sums_that_differ_by_rounding_are_equal():
    d = 1 - torch.eye(3, dtype=torch.float64)
    for excess, wanted in ((1e-9, 0), (1e-8, 1)):  # less than 3 · 2⁻³¹, and more
        d[1, 0] = 1 + excess
        assert chosen(losses.facility_location(d, torch.zeros(3, dtype=torch.long), gamma=0.0)) == [wanted]


@pytest.mark.parametrize("scale", [0.0, 1e-300, 1e-30, 1e30, 1e300])
def test_any_unit_of_distance(scale):
    d, labels = batch(7)
    usual, result = (losses.facility_location(x, labels, gamma=0.0) for x in (d, d * scale))
    if scale in (1e-30, 1e30, 1e300):
        assert torch.equal(result.chosen, usual.chosen)
    assert int(result.chosen.sum()) == int(usual.chosen.sum()) and math.isfinite(result.score)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_poison_ends_and_is_never_a_plausible_number(poison):
    x, labels = torch.randn(8, 3), torch.arange(8) % 3
    spoilt = x.clone()
    spoilt[3, 1] = poison
    assert bool(losses.facility_location_loss(spoilt, labels).isnan())
    assert not bool(losses.facility_location_loss(x, labels, gamma=torch.tensor(math.nan)).isfinite())


def test_gamma_has_a_gradient():
    x, labels = items(3, 13)
    gamma = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    losses.facility_location_loss(x, labels, gamma=gamma).backward()
    loss = losses.FacilityLocationLoss(gamma=2.0)
    loss(x, labels)
    found = losses.facility_location(distances.euclidean(x, normalize=True), labels, gamma=2.0)
    assert torch.equal(found.chosen, loss.medoids) and gamma.grad == found.disagreement > 0


def test_settings_and_sentences(monkeypatch):
    x, labels = torch.randn(8, 3), torch.arange(8) % 3
    loss = losses.FacilityLocationLoss(2.0, 3)
    assert repr(loss) == "FacilityLocationLoss(gamma=2.0, sweeps=3, decay=0.94, decay_steps=1000, normalize=True)"
    loss.gamma = 4.0
    assert loss.gamma == 4.0 and torch.equal(loss(x, labels), losses.facility_location_loss(x, labels, gamma=4.0))
    with pytest.raises(TypeError, match="impl has left FacilityLocationLoss with its kernels"):
        losses.FacilityLocationLoss(impl="torch")
    with pytest.raises(ValueError, match="gamma must be >= 0, got -1"):
        loss.gamma = -1.0
    with pytest.raises(ValueError, match="sweeps must be >= 0, got -1"):
        losses.facility_location(torch.zeros(3, 3), labels[:3], sweeps=-1)
    monkeypatch.setattr(devices, "is_capturing", lambda tensor: True)
    with pytest.raises(RuntimeError, match="on the host, so a CUDA graph cannot capture it; run it without"):
        loss(x, labels)
