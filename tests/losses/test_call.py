"""A call of a loss: what it checks, and what is said of settings that have left or have another name."""

import inspect
import re
from functools import partial
from pathlib import Path

import pytest
import torch

import nearkin
from nearkin import losses
from nearkin.losses.engine import Call

ROOM = Path(nearkin.__file__).parent / "losses"


def test_one_file_asks_for_the_kernel():
    asks = {
        path.name for path in ROOM.glob("*.py") if re.search(r"import.* kernels|nearkin\.kernels", path.read_text())
    }
    assert asks == {"classes.py"}


LEFT = (
    "Contrastive",
    "Margin",
    "MultiSimilarity",
    "Circle",
    "LiftedStructure",
    "NPair",
    "SupCon",
    "InfoNCE",
    "Sigmoid",
)
LEFT += ("Triplet", "LosslessTriplet", "SmoothAP", "FastAP", "LogRatio")
LEFT += ("NormalizedSoftmax", "AdaCos", "CosFace", "ArcFace", "SphereFace", "AdaFace", "MagFace")
LEFT += ("HeatedSoftmax", "Center", "ProxyNCA", "ProxyAnchor", "SoftTriple")


def over_classes(name):
    return len(getattr(getattr(losses, f"{name}Loss"), "tensors", ()))


@pytest.mark.parametrize("name", LEFT)
def test_impl_is_answered_by_a_sentence_where_it_has_left(name):
    x, labels = torch.randn(6, 4), torch.arange(6) // 2
    (function,) = [f for f in losses.__all__ if f.endswith("_loss") and f.replace("_", "") == f"{name.lower()}loss"]
    way = r"with its kernels: leave it out; loss\.compile\(\) makes it fast on a GPU"
    for impl in ("auto", "torch", "triton"):
        tensors = [torch.ones(3, 4), torch.zeros(3), torch.ones(3, 4)][: over_classes(name)]
        with pytest.raises(TypeError, match=f"^impl has left {name}Loss {way}$"):
            getattr(losses, function)(x, labels, *tensors, impl=impl)
        with pytest.raises(TypeError, match=f"^impl has left {name}Loss {way}$"):
            getattr(losses, f"{name}Loss")(*([3, 4] if tensors else []), impl=impl)
    for settings in (getattr(losses, function), getattr(losses, f"{name}Loss")):
        assert "impl" not in inspect.signature(settings).parameters


def test_a_variant_of_your_own_answers_too():
    class Mine(losses.SupConLoss):
        pass

    with pytest.raises(TypeError, match="impl has left Mine"):
        Mine(impl="torch")


def test_a_batch_that_is_its_own_reference_is_the_batch_alone():
    x, labels = torch.randn(6, 4), torch.arange(6) // 2
    call = Call(losses.SupConLoss(), x, labels, x, labels)
    assert call.alone and call.batch.reference_labels is None and call.fits()


def test_terms_and_totals_are_tainted_by_what_is_not_finite():
    x, labels = torch.randn(6, 4), torch.arange(6) // 2
    value, counts = torch.arange(6.0), torch.arange(6) > 0
    mean, total = losses.SupConLoss(), losses.SupConLoss(reduction="sum")
    assert float(Call(mean, x, labels).total(value, counts)) == 3
    assert float(Call(total, x, labels).total(value, counts, counts)) == 15
    x[2, 1] = torch.inf
    assert bool(Call(total, x, labels).total(value, counts, counts).isnan())
    assert bool(Call(mean, torch.ones(6, 4), labels, x, labels).total(value, counts).isnan())


WAS = [
    ("NPairLoss", "penalty", "length_weight"),
    ("MarginLoss", "nu", "beta_weight"),
    ("VICRegLoss", "invariance", "invariance_weight"),
    ("VICRegLoss", "variance", "variance_weight"),
    ("VICRegLoss", "covariance", "covariance_weight"),
    ("MagFaceLoss", "penalty", "length_weight"),
    ("CenterLoss", "pull", "center_weight"),
    ("SoftTripleLoss", "tau", "spread_weight"),
    ("SoftTripleLoss", "gamma", "temperature"),
]


@pytest.mark.parametrize(("name", "was", "now"), WAS)
def test_a_setting_that_was_renamed_is_answered_with_its_name(name, was, now):
    make, sentence = getattr(losses, name), f"^{was} of {name} is {now} now$"
    make = partial(make, 3, 4) if over_classes(name.removesuffix("Loss")) else make
    with pytest.raises(TypeError, match=sentence):
        make(**{was: 0.5})
    with pytest.raises(AttributeError, match=sentence):
        setattr(make(), was, 0.5)
    assert getattr(make(**{now: 0.5}), now) == 0.5


def test_learned_losses_load_states_from_before():
    """The names and shapes that state dicts of earlier versions have."""
    keys = {
        losses.MarginLoss(num_classes=3, num_items=7): {"beta": (3,), "item_beta": (7,)},
        losses.MarginLoss(sampling_dim="fitted"): {"beta": (), "running_dim.moments": (2,)},
        losses.SigmoidLoss(): {"log_scale": (), "bias": ()},
        losses.SiameseLoss(5): {"weight": (5,), "bias": ()},
        losses.SupConLoss(): {},
    }
    for loss, shapes in keys.items():
        assert {name: tuple(tensor.shape) for name, tensor in loss.state_dict().items()} == shapes
        loss.load_state_dict({name: torch.full(shape, 0.25) for name, shape in shapes.items()})
        assert all(float(tensor.flatten()[0]) == 0.25 for tensor in loss.state_dict().values())
