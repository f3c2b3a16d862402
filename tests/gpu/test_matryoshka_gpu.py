"""A loss of several lengths on a GPU: the values of float64 on the CPU, by the kernels that each length alone takes."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "losses"))

from test_matryoshka import build, double_of

from cases import CLASSES, LOSSES
from nearkin import kernels, losses
from nearkin.kernels import launch
from nearkin.losses import MatryoshkaLoss
from test_contract import assert_same, value_and_gradients

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")


@pytest.mark.parametrize("case", LOSSES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_float64_on_the_cpu(case, dtype):
    x, labels = case.batch(dtype)
    wrapper = build(case, torch.float32).cuda()
    double = double_of(case, wrapper.cpu())
    wrapper.cuda()
    for _ in range(2):  # the second with the statistics of the first
        wanted = value_and_gradients(double, double, x.double(), labels)
        got = value_and_gradients(wrapper, wrapper, x.cuda(), labels.cuda())
        value, gradients = got[0].cpu(), [gradient.cpu() for gradient in got[1]]
        assert_same((value, gradients), wanted, 2e-4 if dtype == torch.float32 else 2e-2)
    for name, buffer in double.named_buffers():
        torch.testing.assert_close(wrapper.get_buffer(name).cpu().double(), buffer.double(), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not kernels.installed(), reason="no triton on this machine")
@pytest.mark.parametrize(
    "make",
    [
        lambda: losses.ArcFaceLoss(CLASSES, 32),
        lambda: losses.ProxyAnchorLoss(CLASSES, 32),
        lambda: losses.SoftTripleLoss(CLASSES, 32),
        lambda: losses.CenterLoss(CLASSES, 32),
    ],
    ids=["arcface", "proxy-anchor", "soft-triple", "center"],
)
def test_every_length_takes_its_kernels(make, monkeypatch):
    """As many launches as the losses of each length alone."""
    launches = []
    call = launch.CachedLauncher.__call__

    def counted(self, *arguments, **settings):
        launches.append(self)
        return call(self, *arguments, **settings)

    monkeypatch.setattr(launch.CachedLauncher, "__call__", counted)
    x = torch.randn(24, 32, device="cuda", requires_grad=True)
    labels = (torch.arange(24) % CLASSES).cuda()
    loss = make().cuda()
    loss(x, labels).backward()
    alone = len(launches)
    assert alone > 0
    launches.clear()
    MatryoshkaLoss(loss, (32, 16, 8))(x, labels).backward()
    assert len(launches) == 3 * alone
