"""Facility location's search: the blind one, the reading one and the kernel against greedy and exchange by hand."""

import json
import math

import pytest
import torch

import reference
from interpreter import interpreted
from nearkin import kernels, losses
from nearkin.core import checks, distances, facility, facility_cpu
from nearkin.kernels import facility_ops as fused

TIE = 1e-9


def batch(seed, size=None, dtype=torch.float64):
    """Distances and labels; every other seed on a small grid, so full of ties, every third with unknown labels."""
    g = torch.Generator().manual_seed(seed)
    size = int(torch.randint(1, 14, (), generator=g)) if size is None else size
    classes = int(torch.randint(1, 6, (), generator=g))
    labels = torch.randint(-1 if seed % 3 == 0 else 0, classes, (size,), generator=g)
    if seed % 2:
        x = torch.randn(size, 3, generator=g, dtype=torch.float64)
    else:
        x = torch.randint(0, 3, (size, 2), generator=g).double()
    return distances.euclidean(x.to(dtype)), labels


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
    """Distances and labels of unit rows; the last five rows in a class of their own, some labels unknown."""
    per_class, spread, copies = STRUCTURED[name]
    g = torch.Generator().manual_seed(seed)
    labels = torch.arange(size) // per_class
    x = torch.randn(size, 16, generator=g) + spread * torch.randn(size, 16, generator=g)[labels]
    order = torch.randperm(size, generator=g)
    x, labels = x[order], labels[order]
    labels[-5:] = size
    labels[::17] = -1
    x[torch.randint(size, (copies,), generator=g)] = x[0].clone()
    return distances.euclidean(x, normalize=True), labels


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


def blind(monkeypatch, *arguments, **more):
    """What a device that must not be read runs."""
    with monkeypatch.context() as m:
        m.setattr(checks, "reads_values", lambda tensor: False)
        return losses.facility_location(*arguments, **more)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_reading_values_changes_nothing(dtype, monkeypatch):
    for seed in range(30):
        d, labels = batch(seed, 30 if seed > 24 else None, dtype)
        for more in ({}, {"gamma": 3.0, "sweeps": 1}, {"num_clusters": 2}):
            assert same(losses.facility_location(d, labels, **more), blind(monkeypatch, d, labels, **more)), seed


@pytest.mark.parametrize("gamma", [0.0, 1.0, 30.0])
@pytest.mark.parametrize("name", STRUCTURED)
def test_bounds_drop_no_exchange(name, gamma, monkeypatch):
    """The CPU, which scores few exchanges, against the search that scores all; with and without few medoids."""
    d, labels = structured(name, 48)
    every = blind(monkeypatch, d, labels, gamma=gamma, num_clusters=12)
    for few in (0, 100):
        monkeypatch.setattr(facility_cpu, "FEW", few)
        assert same(losses.facility_location(d, labels, gamma=gamma, num_clusters=12), every)


@pytest.mark.parametrize("seed", range(4))
def test_many_medoids_are_tried_at_once(seed, monkeypatch):
    d, labels = structured("classes of 4", 100, seed)
    assert same(losses.facility_location(d, labels), blind(monkeypatch, d, labels, num_clusters=26))


def test_all_exchanges_at_once():
    """Distance of all items and number of movers, for each row in place of each medoid, against one by one."""
    d, _ = structured("copies", 30)
    p = facility.problem(d, torch.arange(30) // 3)
    picks = [3, 17, 8, 29, 11]
    state = facility_cpu._State(picks, *facility_cpu._two_nearest(p.keys, picks), p.unit)
    owner = state.near & (2**p.bits - 1)
    slot = torch.tensor([picks.index(medoid) for medoid in owner.tolist()])
    cost, moved = facility_cpu._moves(p, state, p.keys, slot)
    for place in range(5):
        others = p.keys[picks[:place] + picks[place + 1 :]].amin(0)
        by_row = (torch.minimum(p.keys, others) >> p.bits).clamp(min=0).sum(1)
        assert torch.equal(cost[:, place], by_row)
        assert torch.equal(moved[:, place], (p.keys < others).sum(1))


@pytest.mark.parametrize("weight", [-2.0, math.inf, -math.inf, math.nan])
def test_bounds_hold_for_odd_weights(weight, monkeypatch):
    d, labels = structured("copies", 40)
    gamma = torch.tensor(weight, dtype=torch.float64)
    every = blind(monkeypatch, d, labels, gamma=gamma, num_clusters=9)
    result = losses.facility_location(d, labels, gamma=gamma, num_clusters=9)
    assert same(result[:2], every[:2]) or (math.isnan(weight) and result.score.isnan())


def test_parts_are_as_the_whole(monkeypatch):
    """Large batches are scored in parts."""
    d, labels = structured("classes of 4", 60)
    whole = losses.facility_location(d, labels)
    for entries in (1, 7 * 60):
        monkeypatch.setattr(facility_cpu, "TOGETHER", entries)
        monkeypatch.setattr(facility_cpu, "ONE_THREAD", entries)
        assert same(whole, losses.facility_location(d, labels))


def test_the_end_of_a_quiet_search_is_the_end(monkeypatch):
    """Nothing changed since each medoid was last tried: more rounds change nothing."""
    tried = []
    few = facility_cpu._scores
    monkeypatch.setattr(facility_cpu, "_scores", lambda *arguments: tried.append(1) or few(*arguments))
    d, labels = batch(25, 40)
    long = losses.facility_location(d, labels, sweeps=100)
    number = int(long.chosen.sum())
    assert len(tried) <= 6 * number
    assert same(long, losses.facility_location(d, labels, sweeps=5))


def test_sums_equal_on_paper_are_equal():
    table = facility.entropy_table(3000, torch.device("cpu")).tolist()
    assert table[4] == 4 * table[2] and 6 * table[2] * 3 + 6 * table[3] * 2 == 6 * table[6]
    assert max(abs(v / facility.FINE - n * math.log(n)) for n, v in enumerate(table) if n) < 1e-8


def test_items_are_nearest_to_columns():
    """distance[item, medoid], should the two ways differ."""
    d = torch.tensor([[0.0, 1.0, 5.0], [9.0, 0.0, 9.0], [1.0, 2.0, 0.0]])
    result = losses.facility_location(d, torch.tensor([0, 0, 0]), gamma=0.0)
    assert chosen(result) == [1] and result.score == -3


@pytest.mark.parametrize("scale", [0.0, 1e-300, 1e-30, 1e30, 1e300])
def test_any_unit_of_distance(scale):
    d, labels = batch(7)
    usual, result = (losses.facility_location(x, labels, gamma=0.0) for x in (d, d * scale))
    if scale in (1e-30, 1e30, 1e300):
        assert torch.equal(result.chosen, usual.chosen)
    assert int(result.chosen.sum()) == int(usual.chosen.sum()) and math.isfinite(result.score)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_poison_ends_and_is_never_a_plausible_number(poison, monkeypatch):
    x, labels = torch.randn(8, 3), torch.arange(8) % 3
    spoilt = x.clone()
    spoilt[3, 1] = poison
    for read in (True, False):
        if not read:
            monkeypatch.setattr(checks, "reads_values", lambda tensor: False)
        assert bool(losses.facility_location_loss(spoilt, labels).isnan())
        assert not bool(losses.facility_location_loss(x, labels, gamma=torch.tensor(math.nan)).isfinite())


def test_settings_and_sentences(monkeypatch):
    x, labels = torch.randn(8, 3), torch.arange(8) % 3
    assert "impl" not in losses.FacilityLocationLoss().settings
    module = losses.FacilityLocationLoss(impl="torch")
    assert "impl='torch'" in repr(module)
    assert torch.equal(module(x, labels), losses.facility_location_loss(x, labels))
    with pytest.raises(ValueError, match='unknown impl "tritn"; did you mean "triton"'):
        losses.facility_location_loss(x, labels, impl="tritn")
    monkeypatch.setattr(kernels, "installed", lambda: False)
    monkeypatch.setattr(kernels, "RECENT", True)
    with pytest.raises(ValueError, match=r'impl="triton" is not possible here: triton is not installed'):
        losses.FacilityLocationLoss(impl="triton")


# The kernel, through Triton's interpreter, in a process of its own: the interpreter is chosen when triton is imported.


def judge_kernel():
    """What the tests below read, as JSON: for each case whether the kernel served and found the same."""
    served = []
    solve = fused.solve
    fused.solve = lambda *arguments: served.append(1) or solve(*arguments)
    cases = {f"batch {seed}": (*batch(seed), {"gamma": float(seed % 3)}) for seed in range(8)}
    cases["float32, 17 items"] = (*batch(11, 17, torch.float32), {"sweeps": 2})
    cases["no sweeps"] = (*batch(3), {"sweeps": 0})
    cases["one item"] = (*batch(1, 1), {})
    cases["two medoids at most"] = (*batch(5, 12), {"num_clusters": 2})
    cases["exchanges together"] = (*structured("classes of 4", 24, 9), {})
    cases["copies"] = (*structured("copies", 17), {"gamma": 5.0})
    d, labels = batch(4, 9)
    cases["int32"] = (d, labels.int(), {})
    cases["one class"] = (d, torch.zeros_like(labels), {})
    cases["all apart"] = (d[:6, :6], torch.arange(6), {})
    cases["nobody known"] = (d, torch.full_like(labels, -1), {})
    cases["no symmetry"] = (d * torch.linspace(1, 2, 9), labels, {})
    cases["nan weight"] = (d, labels, {"gamma": torch.tensor(math.nan)})
    result = {}
    for name, (d, labels, more) in cases.items():
        served.clear()
        got = losses.facility_location(d, labels, impl="triton", **more)
        plain = losses.facility_location(d, labels, impl="torch", **more)
        result[name] = [
            len(served),
            same(got[:2], plain[:2]) and torch.allclose(*map(torch.stack, (got[2:], plain[2:])), equal_nan=True),
        ]
    x, labels = torch.randn(10, 3), torch.arange(10) % 3
    results = []
    for impl in ("torch", "triton"):
        x_ = x.clone().requires_grad_()
        (1.7 * losses.FacilityLocationLoss(impl=impl)(x_, labels)).backward()
        results.append(x_.grad)
    result |= {name: [1, equal] for name, equal in derivatives().items()}
    served.clear()
    losses.FacilityLocationLoss()(x, labels)
    result["gradient; a CPU alone chooses plain torch"] = [1 - len(served), torch.equal(*results)]
    print(json.dumps(result))


def derivatives():
    """Whether loss, clustering and derivatives are those of plain torch: by embeddings, by gamma, and second ones."""
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    labels = torch.tensor([0, 1, 2, 0, 1, 2, -1, 3, 3, 0, 5, -1])
    outcomes = []
    for impl in ("torch", "triton"):
        x_, gamma = x.clone().requires_grad_(), torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
        loss = losses.facility_location_loss(x_, labels, gamma=gamma, num_clusters=4, impl=impl)
        by_x, by_gamma = torch.autograd.grad(1.7 * loss**2, (x_, gamma), create_graph=True)
        (second,) = torch.autograd.grad(by_x.square().sum(), x_)
        module = losses.FacilityLocationLoss(impl=impl)
        module(x.float().T.contiguous().T, labels.int())
        assert module.medoids.dtype == torch.bool and loss > 0
        outcomes.append([loss, by_x, by_gamma, second, module.medoids, module.assignment])
    names = ["loss", "gradient", "gradient of gamma", "second derivative", "medoids", "assignment"]
    return {name: torch.allclose(a, b, atol=1e-12) for name, a, b in zip(names, *outcomes, strict=True)}


@pytest.mark.slow
def test_kernel_finds_the_same():
    result = interpreted(__file__, "judge_kernel")
    assert len(result) > 15
    for name, case in result.items():
        assert case == [1, True], name
