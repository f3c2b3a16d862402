"""A loss of several lengths on a GPU: by the kernels that each length alone takes."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from cases import CLASSES
from nearkin import kernels, losses
from nearkin.kernels import launch
from nearkin.losses import MatryoshkaLoss

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")


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
