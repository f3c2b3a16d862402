"""The cached launcher on a GPU: a kernel launched by its compiled form does what it does launched by triton."""

import pytest
import torch

from class_cases import CLASS_CASES, batch, outcome
from nearkin import kernels
from nearkin.kernels import launch

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and kernels.installed()), reason="no CUDA device or no triton on this machine"
)
SHAPES = [(1, 1, 1), (17, 16, 16), (64, 301, 128), (48, 65, 33)]  # ones, multiples of 16, and neither


def test_this_triton_was_tested_or_is_probed():
    from nearkin.kernels import launch_probe

    assert launch_probe.succeeds()
    assert launch._compiled_forms_launch()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["cosface", "arcface, 3 centres", "heated", "proxy-nca, original"])
def test_losses_are_the_same_by_search_and_by_compiled_form(name, shape, monkeypatch):
    case = CLASS_CASES[name]
    x, *rest = (t.cuda() for t in batch(shape, case.centers, dtype=torch.float32))
    shifted = torch.empty(x.numel() + 1, device="cuda")[1:].view_as(x).copy_(x)  # an address that 16 does not divide
    for rows in (x, shifted):
        # The first launch of a form is a search.
        cached = [outcome(case, (rows, *rest), "mean", impl="triton") for _ in range(3)]
        with monkeypatch.context() as patch:
            patch.setattr(launch.CachedLauncher, "__call__", search)
            searched = outcome(case, (rows, *rest), "mean", impl="triton")
        for got in cached:
            assert all(map(torch.equal, got, searched))


def search(self, grid, *arguments, key=None):
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
