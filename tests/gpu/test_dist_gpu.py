"""Two ranks that share a GPU and exchange over gloo: norms, batches and digests are those of one process."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import worlds
from nearkin import dist, losses
from nearkin.dist import collectives, sync_batchnorm

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")


def agree(rank, size):
    """Both synced norms, and a loss of the global batch, beside one process; in float64."""
    make, device = torch.Generator().manual_seed(1), torch.device("cuda")
    x, by = (torch.randn(9, 3, 4, 4, generator=make, dtype=torch.float64).to(device) for _ in range(2))
    labels, local = torch.arange(9, device=device) % 3, slice(0, 5) if rank == 0 else slice(5, 9)

    def step(norm, loss, rows):
        own = x[rows].clone().requires_grad_()
        y = norm(own)
        value = loss(y.flatten(1), labels[rows])
        (value + (y * by[rows]).sum()).backward()
        return value, y, own.grad, norm

    with dist.ProcessGroup() as group:
        plain = nn.Sequential(nn.BatchNorm2d(3).double().to(device))
        value, y, gradient, whole = step(copy.deepcopy(plain), losses.SupConLoss(), slice(None))
        for kind in ("cuda", "cpu"):  # torch's own norm, and ours
            synced = copy.deepcopy(plain)
            sync_batchnorm.sync(synced, torch.device(kind), group)
            assert isinstance(synced[0], nn.SyncBatchNorm if kind == "cuda" else sync_batchnorm.SyncedNorm)
            loss = dist.GlobalBatch(losses.SupConLoss(), group.world, averaged=False)
            values = step(synced, loss, local)
            for got, expected in zip(values[:3], (value, y[local], gradient[local]), strict=True):
                torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
            torch.testing.assert_close(synced[0].running_var, whole[0].running_var, rtol=0, atol=1e-12)
        group.agree(x=x)
        assert torch.equal(group.rows(x[local]), x) and group.rows(x[local]).is_cuda
    return collectives.same(x) and torch.equal(collectives.digest(x), collectives.digest(x.cpu()))


def test_two_ranks_on_one_gpu_are_one_process():
    assert worlds.run(2, agree, timeout=120) == [True, True]
