"""Settings of the loss modules: they read, they take effect, they are refused; and they are those of the function."""

import copy
import inspect

import pytest
import torch

from cases import CLASSES, DIM, LOSSES
from loss_checks.values import function_of
from nearkin import losses, mining
from nearkin.losses.settings import Loss

MODULES = {name: getattr(losses, name) for name in losses.__all__ if inspect.isclass(getattr(losses, name))}
for _name in ("HierarchyLoss", "MatryoshkaLoss"):  # around other losses, whose settings remain theirs
    del MODULES[_name]
SIZES = {"num_classes": CLASSES, "dim": DIM}
# What only the module has: shapes, schedules, and what its learned tensors do.
MODULE_ONLY = {"num_classes", "dim", "num_items", "sample_rate", "momentum"}
MODULE_ONLY |= {"dynamic", "alpha", "heated_scale", "heat_after", "norm", "start", "decay", "floor", "decay_steps"}
# What only the function has, because the module learns it, counts it, or gets it in `forward`.
FUNCTION_ONLY = {
    "MarginLoss": {"item_beta", "items"},
    "SiameseLoss": {"weight", "bias"},
    "SphereFaceLoss": {"annealing"},
    "HeatedSoftmaxLoss": {"normalize"},
    "AdaCosLoss": {"scale"},
    "AdaFaceLoss": {"mean", "std"},
}
FIXED = {
    "num_classes",
    "dim",
    "shard",
    "num_items",
    "sub_centers",
    "proxies_per_class",
    "centers_per_class",
    "sampling_dim",
    "norm",
}
FIXED_IN = {("CenterLoss", "start")}
LEARNED = {("MarginLoss", "beta"), ("SigmoidLoss", "log_scale"), ("SigmoidLoss", "bias")}

# For each setting another legal value and an illegal one with its sentence; a class may have its own.
FREE_SETTINGS = {
    "margin": (0.3, "x", "margin must be a number"),
    "second_margin": (0.4, -1, "second_margin must be >= 0, got -1"),
    "positive_margin": (0.5, -1.0, r"positive_margin must be >= 0, got -1\.0"),
    "lower_margin": (0.3, -1, r"lower_margin must be an angle in \[0, π\) radians, got -1"),
    "upper_margin": (0.9, 0.1, r"upper_margin must be >= 0\.45, got 0\.1"),
    "lower_length": (2.0, 0, "lower_length must be > 0, got 0"),
    "upper_length": (30.0, 10.0, "upper_length must be > lower_length = 10, got 10"),
    "concentration": (0.8, -1, "concentration must be >= 0, got -1"),
    "momentum": (0.5, 1.5, r"momentum must be in \[0, 1\], got 1\.5"),
    "scale": (7.0, 0, "scale must be > 0, got 0"),
    "heated_scale": (2.5, -4.0, r"heated_scale must be > 0, got -4\.0"),
    "heat_after": (0, -1, "heat_after must be >= 0, got -1"),
    "temperature": (0.5, 0.0, r"temperature must be > 0, got 0\.0"),
    "alpha": (3.0, -1, "alpha must be >"),
    "beta": (20.0, 0, "beta must be > 0, got 0"),
    "base": (0.2, "x", "base must be a number"),
    "epsilon": (0.3, "x", "epsilon must be a number"),
    "beta_weight": (0.5, -0.1, r"beta_weight must be >= 0, got -0\.1"),
    "length_weight": (0.5, -1, "length_weight must be >= 0"),
    "gamma": (0.7, -1, "gamma must be >"),
    "spread_weight": (0.9, -1, "spread_weight must be >= 0"),
    "center_weight": (0.9, -1, "center_weight must be >= 0"),
    "start": (3.0, -1, "start must be >= 0"),
    "decay": (0.5, "x", "decay must be a number"),
    "decay_steps": (2, 0, "decay_steps must be >= 1"),
    "floor": (0.1, -1, "floor must be >= 0"),
    "sweeps": (0, -1, "sweeps must be >= 0"),
    "num_clusters": (3, 0, "num_clusters must be >= 1"),
    "bins": (4, 0, "bins must be >= 1"),
    "max_positives": (5, 0, "max_positives must be >= 1"),
    "anchors": (3, 0, "anchors must be >= 1"),
    "sample_rate": (0.9, 0, "sample_rate must be > 0 and <= 1"),
    "selection": ("batch_hard", "hardest_of_all", "selection"),
    "form": ("max", "round", 'unknown form "round"'),
    "assignment": ("dynamic", "static-ish", 'unknown assignment "static-ish"'),
    "ties": ("keep", "lose", 'unknown ties "lose"'),
    "reduction": ("sum", "average", 'unknown reduction "average"'),
    "max_memory": (2**20, 0, "max_memory must be >= 1, got 0"),
    "invariance_weight": (3.0, -1, "invariance_weight must be >= 0, got -1"),
    "variance_weight": (3.0, -1, "variance_weight must be >= 0, got -1"),
    "covariance_weight": (3.0, -1, "covariance_weight must be >= 0, got -1"),
    "deviation": (2.0, 0, "deviation must be > 0, got 0"),
    "balance": (False, "yes", "balance must be True or False"),
}
OWN = {
    ("ContrastiveLoss", "margin"): (4.0, "x", "margin must be a number"),
    ("SphereFaceLoss", "margin"): (2, 0, "margin must be >= 1"),
    ("ProxyNCALoss", "form"): ("original", "round", 'unknown form "round"'),
    ("MultiSimilarityLoss", "selection"): ("all", "hardest_of_all", "selection"),
    ("VICRegLoss", "epsilon"): (0.3, 0, "epsilon must be > 0, got 0"),
}
# Any value does for a switch, and a generator is checked by torch when it draws.
UNCHECKED = {"squared", "swap", "normalize", "sigmoid", "straight_through", "dynamic", "kernel", "generator"}


def make(name, **settings):
    torch.manual_seed(7)
    sizes = {key: value for key, value in SIZES.items() if _needs(name, key)}
    return MODULES[name](**{**sizes, **settings})


def _needs(name, setting):
    parameter = inspect.signature(MODULES[name]).parameters.get(setting)
    return parameter is not None and parameter.default is parameter.empty


def batch(name):
    case = next(case for case in LOSSES if case.name == name)
    return case.batch(torch.float32)


def settings_of(name):
    return {key: p.default for key, p in inspect.signature(MODULES[name]).parameters.items()}


every = pytest.mark.parametrize("name", MODULES)
PAIRS = [(name, setting) for name in MODULES for setting in settings_of(name)]
FREE = [pair for pair in PAIRS if pair[1] not in FIXED and pair not in LEARNED | FIXED_IN]


def another(name, setting):
    if setting in UNCHECKED:
        return torch.Generator().manual_seed(5) if setting == "generator" else not settings_of(name)[setting]
    return OWN.get((name, setting), FREE_SETTINGS.get(setting))[0]


@every
def test_signature_is_that_of_the_function(name):
    """Same settings, same defaults, keyword-only ones in the same order."""
    module, function = (inspect.signature(f).parameters for f in (MODULES[name], function_of(MODULES[name])))
    keyword = {key: p for key, p in function.items() if p.kind is p.KEYWORD_ONLY}
    assert set(module) - set(keyword) <= MODULE_ONLY
    assert set(keyword) - set(module) == FUNCTION_ONLY.get(name, set())
    shared = [key for key in module if key in keyword]
    for key in shared:
        if key != "shard":  # True or False to the module, which makes the function's Shard of it
            assert module[key].default == keyword[key].default, key
    ordered = [key for key in shared if module[key].kind is inspect.Parameter.KEYWORD_ONLY]
    assert ordered == [key for key in keyword if key in ordered]
    assert issubclass(MODULES[name], Loss)


@every
def test_reading_gives_what_was_constructed(name):
    for setting, default in settings_of(name).items():
        value = getattr(make(name), setting)
        if default is inspect.Parameter.empty:
            assert value == SIZES[setting]
        elif isinstance(value, torch.Tensor):  # learned, or the present value of a schedule
            assert float(value.detach()) == pytest.approx(default), setting
        else:
            assert value == default and type(value) is type(default), setting


@every
def test_a_changed_setting_is_as_good_as_a_constructed_one(name):
    for setting in (own for loss, own in FREE if loss == name):
        value = another(name, setting)
        base = {"selection": "all"} if (name, setting) == ("MarginLoss", "normalize") else {}
        drawn = setting == "generator" or (setting == "max_positives" and "selection" in settings_of(name))
        base |= {"selection": "random"} if drawn else {}
        constructed, changed = make(name, **base, **{setting: copy.deepcopy(value)}), make(name, **base)
        setattr(changed, setting, copy.deepcopy(value))
        assert repr(changed) == repr(constructed) or setting == "generator"
        if setting != "generator":
            read = getattr(changed, setting)
            assert (float(read) if isinstance(read, torch.Tensor) else read) == pytest.approx(value), setting
        results = []
        for module in (constructed, changed):
            torch.manual_seed(3)
            results.append([module(*batch(name)) for _ in range(2)])  # a schedule has moved on by the second
        assert all(map(torch.equal, *results)), setting


@every
def test_an_illegal_value_is_refused_and_the_old_one_stays(name):
    for setting in (own for loss, own in FREE if loss == name and own not in UNCHECKED):
        _, illegal, sentence = OWN.get((name, setting), FREE_SETTINGS.get(setting))
        module = make(name)
        before, shown = getattr(module, setting), repr(module)
        with pytest.raises((TypeError, ValueError), match=sentence) as changed:
            setattr(module, setting, illegal)
        with pytest.raises((TypeError, ValueError)) as constructed:
            make(name, **{setting: illegal})
        assert str(changed.value) == str(constructed.value)
        after = getattr(module, setting)
        assert torch.equal(after, before) if isinstance(after, torch.Tensor) else after == before, setting
        assert repr(module) == shown
        assert bool(module(*batch(name)).isfinite().all())


@every
def test_a_changed_setting_changes_the_loss(name):
    """Of every loss at least one number."""
    numbers = [
        s
        for n, s in FREE
        if n == name
        and s in ("invariance_weight", "margin", "temperature", "scale", "epsilon", "center_weight", "length_weight")
    ]
    setting = (numbers or [s for n, s in FREE if n == name and s in ("bins", "gamma", "reduction")])[0]
    module = make(name).eval()
    before = module(*batch(name))
    setattr(module, setting, another(name, setting))
    assert not torch.equal(module(*batch(name)), before), setting


@every
def test_shapes_cannot_change(name):
    module = make(name)
    for setting in (own for loss, own in PAIRS if loss == name and (own in FIXED or (loss, own) in FIXED_IN)):
        before = getattr(module, setting)
        sentence = f"{setting} cannot change after construction: make a new {name}, got 3"
        with pytest.raises(AttributeError, match=sentence):
            setattr(module, setting, 3)
        assert getattr(module, setting) == before


def test_a_learned_boundary_is_filled_and_not_replaced_by_a_number():
    module = losses.MarginLoss()
    with pytest.raises(AttributeError, match=r"beta is learned: fill it in place, with torch.no_grad\(\), got 0\.8"):
        module.beta = 0.8
    module.beta = torch.nn.Parameter(torch.tensor(0.8))
    assert float(module.beta.detach()) == pytest.approx(0.8)


@every
def test_a_misspelt_setting_is_refused_and_an_attribute_of_your_own_is_not(name):
    module = make(name)
    for setting in settings_of(name):
        if len(setting) < 4:
            continue
        misspelt = setting[:-2] + setting[-1]
        with pytest.raises(AttributeError, match=f'unknown setting "{misspelt}"; did you mean "{setting}"'):
            setattr(module, misspelt, 1)
    module.note, module._margn, module.sub = "warm-up", 1, torch.nn.Identity()
    assert module.note == "warm-up" and module.sub in module.children()


def test_a_setting_of_another_loss_is_refused():
    with pytest.raises(AttributeError, match=r'unknown setting "margin"; known: temperature, reduction, max_memory$'):
        losses.SupConLoss().margin = 0.3
    with pytest.raises(AttributeError, match='unknown setting "temperature"; known: num_classes'):
        losses.ArcFaceLoss(3, 2).temperature = 0.3
    losses.SupConLoss().floor = 12.5  # of SphereFaceLoss alone: an attribute of your own


def test_a_variant_of_your_own_has_attributes_of_its_own():
    class Mine(losses.SupConLoss):
        def __init__(self, margin):
            super().__init__(temperature=0.2)
            self.margin = margin

    mine = Mine(0.5)
    mine.temperature = 0.3
    x, labels = batch("SupConLoss")
    assert torch.equal(mine(x, labels), losses.SupConLoss(0.3)(x, labels)) and mine.margin == 0.5
    with pytest.raises(ValueError, match="temperature must be > 0"):
        mine.temperature = -1


def test_settings_are_read_only():
    module = losses.TripletLoss()
    assert dict(module.settings) == {
        "margin": 0.2,
        "squared": True,
        "swap": False,
        "selection": "semihard",
        "normalize": True,
        "reduction": "mean",
    }
    with pytest.raises(TypeError, match="does not support item assignment"):
        module.settings["margin"] = 0.3


def test_two_settings_that_exclude_each_other():
    module = losses.TripletLoss(selection="distance_weighted")
    with pytest.raises(ValueError, match="it needs unit vectors, normalize=True"):
        module.normalize = False
    module.selection = "batch_hard"
    module.normalize = False
    assert (module.selection, module.normalize) == ("batch_hard", False)
    module.selection = lambda distance, relation: mining.batch_hard(distance, relation)
    assert bool(module(*batch("TripletLoss")).isfinite())


@pytest.mark.parametrize("name", [name for name in MODULES if "selection" in settings_of(name)])
def test_settings_beside_a_selection_of_your_own_are_checked_without_calling_it(name):
    module = make(name, selection=lambda distance, relation: None)
    setting = "alpha" if name == "MultiSimilarityLoss" else "margin"
    with pytest.raises(ValueError, match=f"{setting} must be >"):
        setattr(module, setting, -1)
    setattr(module, setting, 0.7)
    for switch in ("normalize", "squared", "swap"):
        if switch in settings_of(name):
            setattr(module, switch, not getattr(module, switch))


DRAWN = r'generator must be left out unless selection is "random", "random_semihard" or "distance_weighted", which draw'
BLOCKS = r'{} must be left out unless assignment="static", of which alone there are blocks .*, got {}'
EPSILON = 'epsilon must be left out unless selection="multi_similarity", got 9'
IGNORED = [
    ("MultiSimilarityLoss", {"selection": "all", "epsilon": 9}, EPSILON),
    ("MultiSimilarityLoss", {"selection": "hard_negatives", "epsilon": 9}, EPSILON),
    ("ContrastiveLoss", {"generator": torch.Generator()}, DRAWN),
    ("TripletLoss", {"generator": torch.Generator()}, DRAWN),
    ("TripletLoss", {"selection": mining.hard, "generator": torch.Generator()}, DRAWN),
    ("QuadrupletLoss", {"selection": "all", "generator": torch.Generator()}, DRAWN),
    ("MarginLoss", {"selection": "all", "generator": torch.Generator()}, DRAWN),
    ("ProxyNCALoss", {"assignment": "dynamic", "max_memory": 1}, BLOCKS.format("max_memory", "1")),
    ("ProxyNCALoss", {"assignment": "dynamic", "sample_rate": 0.5}, BLOCKS.format("sample_rate", "0.5")),
]


@pytest.mark.parametrize(("name", "settings", "sentence"), IGNORED)
def test_a_setting_without_an_effect_is_refused(name, settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        make(name, **settings)
    *others, last = settings
    module = make(name, **{setting: settings[setting] for setting in others})
    with pytest.raises(ValueError, match=sentence):  # what is set later too
        setattr(module, last, settings[last])


def test_checking_draws_no_random_numbers():
    generator = torch.Generator().manual_seed(1)
    module = losses.MarginLoss(generator=generator)
    before, default = generator.get_state(), torch.get_rng_state()
    module.margin, module.selection = 0.3, "random"
    assert torch.equal(generator.get_state(), before) and torch.equal(torch.get_rng_state(), default)


@every
def test_copies_state_dicts_and_moves(name):
    kwargs = {"selection": "all"} if name == "MarginLoss" else {}  # its own draws
    module, (x, labels) = make(name, **kwargs), batch(name)
    setting, value = ("reduction", "sum") if "reduction" in settings_of(name) else ("scale", 7.0)
    if name == "FacilityLocationLoss":
        setting, value = "sweeps", 1
    if name == "VICRegLoss":
        setting, value = "invariance_weight", 7.0
    setattr(module, setting, value)
    twin = copy.deepcopy(module)
    assert getattr(twin, setting) == value and repr(twin) == repr(module)
    setattr(twin, setting, settings_of(name)[setting])
    assert getattr(module, setting) == value  # a copy of its own
    with pytest.raises(AttributeError, match="did you mean"):
        setattr(twin, setting + "s", 1)
    other = make(name, **kwargs)
    other.load_state_dict(module.state_dict())
    setattr(other, setting, value)
    assert torch.equal(other(x, labels), module(x, labels))
    assigned = make(name, **kwargs, **{setting: value})
    assigned.load_state_dict({k: v.clone() for k, v in module.state_dict().items()}, assign=True)
    assert torch.equal(assigned(x, labels), module(x, labels))
    assert getattr(module.double(), setting) == value
    assert module(x.double(), labels).dtype == torch.float64


@pytest.mark.parametrize("name", ["MarginLoss", "ArcFaceLoss", "CenterLoss"])
def test_functional_call(name):
    module, (x, labels) = make(name, **({"selection": "all"} if name == "MarginLoss" else {})).eval(), batch(name)
    tensors = {key: value.detach() - 0.1 for key, value in module.state_dict().items()}
    value = torch.func.functional_call(module, tensors, (x, labels))
    other = copy.deepcopy(module)
    other.load_state_dict(tensors)
    assert torch.equal(value, other(x, labels)) and not torch.equal(value, module(x, labels))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "setting"), [("TripletLoss", "margin"), ("SupConLoss", "temperature"),
                                               ("SphereFaceLoss", "floor"), ("HeatedSoftmaxLoss", "scale"),
                                               ("ArcFaceLoss", "margin"), ("ContrastiveLoss", "squared")])  # fmt: skip
def test_a_compiled_loss_sees_a_changed_setting(name, setting):
    torch._dynamo.reset()
    module, (x, labels) = make(name).eval(), batch(name)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, labels), module(x, labels))
    values = (True, False) if setting == "squared" else (0.3, 0.6, 1.2)
    for value in values:
        setattr(module, setting, value)
        torch.testing.assert_close(compiled(x, labels), module(x, labels))
    setattr(compiled, setting, values[0])  # through the wrapper too
    assert float(getattr(module, setting)) == pytest.approx(float(values[0]))
    torch.testing.assert_close(compiled(x, labels), module(x, labels))
