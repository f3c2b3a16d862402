"""Distances by products of float32 and differences of near pairs, for devices without fast float64: forced here."""

from contextlib import contextmanager

import pytest
import torch

from loss_checks.devices import Products
from nearkin import losses
from nearkin.core import devices, distances, near

MEASURES = (distances.squared_euclidean, distances.euclidean)
EXACT = 7e-7  # largest error of a squared distance, by that distance


@pytest.fixture
def forced(monkeypatch):
    monkeypatch.setattr(devices, "has_float64_units", lambda tensor: False)


@contextmanager
def unforced():
    """Products of float64 within a test that is forced."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "has_float64_units", lambda tensor: True)
        yield


def hard(kind, number=768, dim=128):
    """Rows in float32 that try the digits of a distance."""
    g = torch.Generator().manual_seed(3)
    x, classes = torch.randn(number, dim, generator=g), torch.arange(number) // 4
    centres = torch.randn(number, dim, generator=g)
    unit = torch.nn.functional.normalize
    if kind == "random":
        return unit(x)
    if kind == "clustered":
        return unit(unit(centres)[classes] + 0.1 * dim**-0.5 * x)
    if kind == "near duplicates":
        return unit(unit(centres)[classes] + 1e-3 * dim**-0.5 * x)
    if kind == "collapsed":
        return unit(unit(centres)[:1] + 0.01 * dim**-0.5 * x)
    if kind == "lengths":
        return x * 10.0 ** (6 * torch.rand(number, 1, generator=g) - 3)
    if kind == "offset":
        return 100 + x
    return 100 * unit(centres)[torch.arange(number) % 2] + 0.1 * x  # two tight clusters, far apart


HARD = ("random", "clustered", "near duplicates", "collapsed", "lengths", "offset", "two clusters")


def differences(x, r=None):
    """Squared distances in float64, row by row."""
    x, r = x.double(), (x if r is None else r).double()
    return torch.stack([(row - r).square().sum(1) for row in x])


def worst(got, true):
    """The largest error of any pair, by its own squared distance; of pairs that are equal, which must be 0."""
    apart = true > 0
    assert not got[~apart].any()
    return float(((got.double() - true).abs() / true)[apart].max())


@pytest.mark.parametrize("dim", [128, 512])
@pytest.mark.parametrize("kind", HARD)
def test_exact_in_seven_hard_sets(kind, dim, forced):
    x = hard(kind, dim=dim)
    assert worst(distances.squared_euclidean(x), differences(x)) <= EXACT
    assert worst(distances.squared_euclidean(x[:300], x[200:]), differences(x[:300], x[200:])) <= EXACT


@pytest.mark.parametrize("kind", HARD)
def test_exact_on_a_device_that_has_no_float64(kind, forced, monkeypatch):
    """Its differences are of float32 too."""
    monkeypatch.setattr(devices, "has_float64", lambda device: False)
    monkeypatch.setattr(distances, "freely_read", lambda x: False)
    x = hard(kind)
    assert worst(distances.squared_euclidean(x), differences(x)) <= EXACT


def test_plain_products_of_float32_are_not_exact():
    """What the near pairs and the centre are for."""
    errors = {}
    for kind in HARD:
        x = hard(kind)
        lengths = x.square().sum(1)
        plain = (lengths[:, None] + lengths - 2 * x @ x.T).fill_diagonal_(0)
        errors[kind] = float(((plain - differences(x)).abs() / differences(x).clamp(min=1e-30)).max())
    assert errors["random"] < EXACT
    assert min(errors[kind] for kind in HARD if kind not in ("random", "lengths")) > 1e-5, errors


KINDS = ("ordinary", "near", "equal", "pairs", "multiples", "large", "tiny", "mixed", "clusters", "zero rows")


def rows(kind, number=60, dim=40, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(number, dim, generator=g)
    if kind == "near":
        x = torch.randn(dim, generator=g) + 1e-4 * x
    if kind == "equal":
        x[1::2] = x[::2]
    if kind == "pairs":
        x[1::2] = x[::2] + 10.0 ** -torch.randint(1, 6, (number // 2, 1), generator=g) * x[1::2]
    if kind == "multiples":
        x[1::2] = x[::2] * (1 + 1e-4)
    if kind == "large":
        x *= 1e11
    if kind == "tiny":
        x *= 1e-18
    if kind == "mixed":
        x *= 10.0 ** torch.randint(-5, 6, (number, 1), generator=g)
    if kind == "clusters":
        x = 10 * torch.randn(6, dim, generator=g).repeat(number // 6, 1) + 0.1 * x
    if kind == "zero rows":
        x[4] = x[9] = 0
    return x


def outcome(measure, x, r, normalize):
    """The matrix, and the gradients by both sides under slopes of either sign, all in float64."""
    inputs = [t.clone().requires_grad_() for t in (x, r) if t is not None]
    matrix = measure(inputs[0], inputs[1] if r is not None else None, normalize=normalize)
    slopes = torch.randn(matrix.shape, generator=torch.Generator().manual_seed(1))
    (matrix * slopes.to(matrix.dtype) / matrix.detach().max()).sum().backward()
    return [matrix.detach().double(), *(t.grad.double() for t in inputs)]


@pytest.mark.parametrize("normalize", [True, False], ids=["unit", "raw"])
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "met"])
@pytest.mark.parametrize("kind", KINDS)
def test_distances_and_gradients_are_those_of_float64(kind, alone, normalize, forced):
    x = rows(kind)
    r = None if alone else torch.cat((x[3:20], rows(kind, seed=1)[:18]))
    for measure in MEASURES:
        with unforced():
            exact = outcome(measure, x.double(), None if r is None else r.double(), normalize)
            plain = outcome(measure, x, r, normalize)
        got = outcome(measure, x, r, normalize)
        for ours, theirs, true in zip(got, plain, exact, strict=True):
            error, allowed = (float((t - true).abs().max() / true.abs().max()) for t in (ours, theirs))
            assert error <= allowed + 1e-6, (measure.__name__, error, allowed)
        assert bool((got[0][plain[0] == 0] == 0).all())
        wide = [distances.unit(t.double()) if normalize else t.double() for t in (x, r) if t is not None]
        true = differences(wide[0], wide[-1])
        true = true.sqrt() if measure is distances.euclidean else true
        apart = plain[0] > 0
        assert float(((got[0] - true).abs() / true)[apart].max()) < 1e-6, measure.__name__  # of each, however near


def test_duplicates_are_at_distance_exactly_0(forced):
    x = rows("equal", dim=300)
    for normalize in (True, False):
        distance = distances.euclidean(x, x.clone(), normalize=normalize)
        assert bool((distance[::2, ::2].diagonal() == 0).all()) and bool((distance[::2, 1::2].diagonal() == 0).all())
        assert int((distance == 0).sum()) == 120
        alone = distances.euclidean(x, normalize=normalize)
        assert torch.equal(alone, alone.T) and int((alone == 0).sum()) == 120


def test_near_pairs_are_compared_in_slices(forced, monkeypatch):
    x = rows("clusters")
    whole = [outcome(distances.euclidean, x, r, False) for r in (None, x[:20])]
    monkeypatch.setattr(near, "LISTED", 7 * 40)  # seven pairs of a few rows
    monkeypatch.setattr(near, "NEAR", 1e9)  # every pair
    for one, r in zip(whole, (None, x[:20]), strict=True):
        for a, b in zip(one, outcome(distances.euclidean, x, r, False), strict=True):
            assert float((a - b).abs().max()) <= 1e-6 * float(a.abs().max())


def test_an_offset_that_all_rows_share_makes_no_pair_near(forced, monkeypatch):
    """It is taken off first: else all pairs would be compared by their differences."""
    listed = []
    plain = near._listed
    monkeypatch.setattr(near, "_listed", lambda mask, dim: listed.append(int(mask.sum())) or plain(mask, dim))
    for kind in HARD:
        x = hard(kind, 256).requires_grad_()
        distances.squared_euclidean(x).sum().backward()
    per_kind = dict(zip(HARD, zip(listed[::2], listed[1::2], strict=True), strict=True))
    assert per_kind["offset"] == per_kind["collapsed"] == per_kind["random"] == (0, 0)
    assert per_kind["clustered"] == (6 * 64, 12 * 64)  # of each class of four, once and from both sides


def test_squares_that_float32_hardly_holds(forced):
    x = 1e-20 * rows("ordinary")
    got, true = distances.euclidean(x).double(), differences(x).sqrt()
    assert float(((got - true).abs() / true.clamp(min=1e-30)).max()) < 1e-6


def test_what_is_not_a_number_taints_its_own_distances(forced):
    x = rows("ordinary")
    x[7, 2] = torch.nan  # one of the rows whose mean is the centre
    matrix = distances.euclidean(x)
    assert bool(matrix[7, torch.arange(60) != 7].isnan().all())
    keep = torch.arange(60) != 7
    assert worst(matrix[keep][:, keep].square(), differences(x[keep])) < 1e-6


def test_float64_keeps_its_products(forced):
    with Products() as products:
        losses.contrastive_loss(rows("ordinary").double(), torch.arange(60) // 4)
    assert products.kinds == [torch.float64]


class OnAGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


def test_capture_and_rounded_products_take_float64(monkeypatch):
    x = torch.randn(3, 2).as_subclass(OnAGpu)
    monkeypatch.setattr(devices, "has_float64_units", lambda tensor: False)
    monkeypatch.setattr(devices, "is_capturing", lambda tensor: False)
    assert near.serves(x)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert not near.serves(x) and near.serves(torch.randn(3, 2))
    monkeypatch.undo()
    monkeypatch.setattr(devices, "has_float64_units", lambda tensor: False)
    monkeypatch.setattr(devices, "is_capturing", lambda tensor: True)
    assert not near.serves(x)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # a compiler's own
@pytest.mark.parametrize(
    ("name", "references", "has_float64"),  # every two of these values
    [
        *(
            ("contrastive", False, True),
            ("contrastive", True, False),
            ("triplet", False, False),
            ("triplet", True, True),
        ),
        *(("logratio", False, True), ("logratio", True, False), ("fastap", False, False), ("fastap", True, True)),
    ],
)
def test_compiled_losses_are_as_exact(name, references, has_float64, forced, monkeypatch):
    """By products of float64, and where there are none by differences: a compiler can list no near pairs."""
    monkeypatch.setattr(devices, "has_float64", lambda device: has_float64)
    monkeypatch.setattr(distances, "freely_read", lambda x: False)
    function = getattr(losses, f"{name}_loss")
    torch._dynamo.reset()

    def outcome(loss):
        x = rows("ordinary").requires_grad_()
        labels = torch.arange(60) // 4
        others = [rows("pairs")[:30].requires_grad_(), torch.arange(30) // 3] if references else []
        value = loss(x, labels.float() if name == "logratio" else labels, *others)
        value.backward()
        return [value.detach(), x.grad, *(t.grad for t in others[:1])]

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for got, eager in zip(outcome(compiled), outcome(function), strict=True):
        assert float((got - eager).abs().max()) <= 1e-6 * max(1.0, float(eager.abs().max()))


@pytest.mark.parametrize("shape", [(0, None, 3), (0, 4, 3), (4, 0, 3), (1, None, 1), (3, 2, 0)], ids=str)
def test_empty_batches(shape, forced):
    number, num_references, dim = shape
    x = torch.randn(number, dim).requires_grad_()
    r = None if num_references is None else torch.randn(num_references, dim)
    for measure in MEASURES:
        matrix = measure(x, r)
        matrix.sum().backward()
        assert matrix.shape == (number, number if r is None else num_references)
    assert x.grad.shape == x.shape


def test_a_second_derivative(forced):
    x = rows("ordinary")[:6, :3].requires_grad_()

    def slope(x):
        (slope,) = torch.autograd.grad(distances.squared_euclidean(x).square().sum(), x, create_graph=True)
        return slope

    (forced_curve,) = torch.autograd.grad(slope(x).square().sum(), x)
    (exact,) = torch.autograd.grad(slope(x.double()).square().sum(), x)
    torch.testing.assert_close(forced_curve, exact.to(x.dtype), rtol=1e-5, atol=1e-5)


def test_which_devices_have_units_for_float64(monkeypatch):
    assert devices.has_float64_units(torch.empty(0))  # a CPU
    card = torch.empty(0).as_subclass(OnAGpu)
    for capability, units in (((8, 0), True), ((9, 0), True), ((8, 6), False), ((8, 9), False), ((12, 0), False)):
        monkeypatch.setattr(devices, "capability", lambda device, capability=capability: capability)
        assert devices.has_float64_units(card) is units
    monkeypatch.setattr(devices, "has_float64", lambda device: False)
    assert not devices.has_float64_units(torch.empty(0))
