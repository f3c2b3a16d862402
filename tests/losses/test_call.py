"""The call object of the losses: it alone chooses a kernel, and it checks what every loss must."""

import re
from pathlib import Path

import pytest
import torch

import nearkin
from nearkin import losses
from nearkin.losses.call import PairCall

ROOM = Path(nearkin.__file__).parent / "losses"


def test_kernels_are_chosen_in_one_file():
    for path in ROOM.glob("*.py"):
        if path.name != "call.py":
            asks = re.findall(r"\b(?:serves\(|takes\(|can_run|has_float64_units|is_cuda)", path.read_text())
            assert not asks, f"{path.name} decides about kernels: {asks}"


@pytest.mark.parametrize("selection", ["all", "semihard", "distance_weighted"])
def test_an_unknown_impl_is_refused_whatever_the_selection(selection):
    x, labels = torch.randn(6, 4), torch.arange(6) // 2
    for function in (losses.contrastive_loss, losses.margin_loss, losses.triplet_loss):
        with pytest.raises(ValueError, match='unknown impl "cuda"; known: auto, torch, triton'):
            function(x, labels, selection=selection, normalize=True, impl="cuda")


def test_a_batch_that_is_its_own_reference_is_the_batch_alone():
    x, labels = torch.randn(6, 4), torch.arange(6) // 2
    call = PairCall(x, labels, x, labels, "mean")
    assert call.batch.references is None and call.batch.reference_labels is None
    assert call.pair_kernel("supcon", (0.1,)) is None and call.fits()


def test_terms_and_totals_are_tainted_by_what_is_not_finite():
    x, labels = torch.randn(6, 4), torch.arange(6) // 2
    value, counts = torch.arange(6.0), torch.arange(6) > 0
    assert float(PairCall(x, labels, None, None, "mean").terms(value, counts)) == 3
    assert float(PairCall(x, labels, None, None, "sum").total(value, counts, counts)) == 15
    x[2, 1] = torch.inf
    assert bool(PairCall(x, labels, None, None, "sum").total(value, counts, counts).isnan())
    assert bool(PairCall(torch.ones(6, 4), labels, x, labels, "mean").terms(value, counts).isnan())
