"""The kernels of triplet selections against plain torch and float64, by Triton's interpreter.

In a separate process: the interpreter is chosen when triton is imported. The checks are in `triplet_cases`.
"""

import json
import traceback

import pytest
import torch

import triplet_cases
from interpreter import interpreted
from nearkin import kernels, losses

pytestmark = pytest.mark.slow


def judge():
    """The checks' verdicts as JSON: nothing, or what went wrong."""
    verdicts = {}
    for name, check in triplet_cases.CHECKS.items():
        torch.manual_seed(0)
        try:
            check("cpu")
            verdicts[name] = ""
        except Exception:
            verdicts[name] = traceback.format_exc()
    print(json.dumps(verdicts))


@pytest.fixture(scope="module")
def verdicts():
    return interpreted(__file__, "judge")


@pytest.mark.parametrize("name", triplet_cases.CHECKS)
def test_kernels(name, verdicts):
    assert not verdicts[name], verdicts[name]


def test_modules_hold_the_choice(monkeypatch):
    assert "impl" not in losses.TripletLoss().settings
    assert "impl='torch'" in repr(losses.TripletLoss(impl="torch"))
    x, labels, _, _ = triplet_cases.batch((20, None, 6))
    assert torch.equal(losses.TripletLoss(impl="torch")(x, labels), losses.triplet_loss(x, labels))
    with pytest.raises(ValueError, match='unknown impl "tritn"; did you mean "triton"\\? known: auto, torch, triton'):
        losses.triplet_loss(x, labels, impl="tritn", swap=True)
    monkeypatch.setattr(kernels, "installed", lambda: False)
    monkeypatch.setattr(kernels, "RECENT", True)
    with pytest.raises(ValueError, match=r'impl="triton" is not possible here: triton is not installed'):
        losses.TripletLoss(impl="triton")
