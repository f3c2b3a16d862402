"""The cached launcher on a GPU: a kernel launched by its compiled form does what it does launched by triton."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import kernel_cases
import triplet_cases
from kernel_cases import PAIR_CASES
from nearkin import kernels
from nearkin.kernels import launch

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and kernels.installed()), reason="no CUDA device or no triton on this machine"
)
SHAPES = [(1, None, 1), (17, None, 16), (64, None, 128), (48, 65, 33)]  # ones, multiples of 16, and neither


def test_this_triton_was_tested_or_is_probed():
    from nearkin.kernels import launch_probe

    assert launch_probe.succeeds()
    assert launch._compiled_forms_launch()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pair_losses_are_the_same_by_search_and_by_compiled_form(shape, monkeypatch):
    inputs = tuple(None if t is None else t.cuda() for t in kernel_cases.batch(shape))
    cases = [case for case in PAIR_CASES.values() for _ in range(3)]  # the first launch of a form is a search
    cached = [kernel_cases.outcome(case, inputs, "triton") for case in cases]
    with monkeypatch.context() as patch:
        patch.setattr(launch.CachedLauncher, "__call__", search)
        searched = [kernel_cases.outcome(case, inputs, "triton") for case in cases]
    for a, b in zip(cached, searched, strict=True):
        assert all(map(torch.equal, a, b))


@pytest.mark.parametrize("name", triplet_cases.CASES)
def test_triplet_losses_are_the_same_by_search_and_by_compiled_form(name, monkeypatch):
    inputs = triplet_cases.batch((33, 47, 20), "cuda")
    x, labels, r, other = inputs
    shifted = torch.empty(x.numel() + 1, device="cuda")[1:].view_as(x).copy_(x)  # an address that 16 does not divide
    for rows in (x, shifted):
        case = (triplet_cases.CASES[name], (rows, labels, r, other))
        cached = [triplet_cases.served(*case) for _ in range(2)]
        with monkeypatch.context() as patch:
            patch.setattr(launch.CachedLauncher, "__call__", search)
            searched = triplet_cases.served(*case)
        for outcome in cached:
            assert all(map(torch.equal, outcome, searched))


def search(self, grid, *arguments):
    self.kernel[grid](*arguments, **self.choices)


def test_an_unknown_version_searches_where_the_probe_fails(monkeypatch):
    from nearkin.kernels import launch_probe

    launch._compiled_forms_launch.cache_clear()
    monkeypatch.setattr(launch, "TESTED", ())
    monkeypatch.setattr(launch_probe, "succeeds", lambda: False)
    try:
        assert not launch._compiled_forms_launch()
        launcher = launch.CachedLauncher(launch_probe._affine, SCALE=3.0, N=16)
        x, y = torch.ones(2, 16, device="cuda")
        for _ in range(2):
            launcher((1, 1, 1), x, y, 16, 1, 0.5)
        assert not launcher.compiled and torch.equal(y, x * 3.5)
    finally:
        launch._compiled_forms_launch.cache_clear()
