"""The properties of `loss_checks` that need a GPU, with every public loss; and memory at sizes that only a GPU takes.

Skipped where there is no GPU.
"""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from cases import DIM, LOSSES, SELECTIONS
from loss_checks import every
from nearkin import losses, mining, relations
from nearkin.core import distances
from nearkin.memory import CrossBatchMemory

pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("UserWarning", "DeprecationWarning")]
pytestmark += [pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")]


@pytest.mark.parametrize(("check", "case"), every(LOSSES, on_gpu=True))
def test_loss(check, case):
    check(case)


@pytest.mark.parametrize("name", SELECTIONS)
def test_selections_equal_the_cpu_without_waiting(name):
    x, labels = distances.unit(torch.randn(96, DIM)), torch.arange(96) % 8
    d, relation = distances.euclidean(x), relations.of(labels)
    on_device, relation_there = d.cuda(), relations.of(labels.cuda())
    mining.select(name, on_device, relation_there, dim=DIM)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = mining.select(name, on_device, relation_there, dim=DIM)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    if name not in mining.DRAWN:  # these draw from another generator there
        expected = mining.select(name, d, relation, dim=DIM)
        if isinstance(got, mining.Triplets):  # listed in fewer slots where reading is free
            assert isinstance(expected, mining.Triplets)
            assert torch.equal(*(torch.stack(t.indices()).cpu() for t in (got, expected)))
        else:
            assert all(torch.equal(a.cpu(), b) for a, b in zip(got, expected, strict=True))
    if isinstance(got, mining.Triplets):
        anchor, positive, negative = (t.cpu() for t in got.indices())
        assert bool(relation.positive[anchor, positive].all()) and bool(relation.negative[anchor, negative].all())
        assert len(anchor) > 0


@pytest.mark.parametrize("make", [losses.SupConLoss, losses.ContrastiveLoss, losses.TripletLoss, losses.LogRatioLoss])
def test_a_large_batch_takes_blocks_of_a_gib(make):
    """B = 16,384: some twenty matrices of all pairs in float32 would be 20 GiB."""
    x = torch.randn(16_384, 128, device="cuda", requires_grad=True)
    labels = torch.arange(16_384, device="cuda") // 4
    labels = labels.float() if make is losses.LogRatioLoss else labels
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    make()(x, labels).backward()
    assert torch.cuda.max_memory_allocated() - before < 1.25 * 2**30


@pytest.mark.parametrize("make", [losses.SupConLoss, losses.MarginLoss, losses.TripletLoss], ids=lambda m: m.__name__)
def test_a_long_memory_takes_blocks_of_a_gib(make):
    """65,536 items beside a batch of 512."""
    size, rows = 65_536, 512
    memory = CrossBatchMemory(make().cuda(), size, 128).cuda()
    g = torch.Generator("cuda").manual_seed(0)
    memory.embeddings = torch.randn(size, 128, device="cuda", generator=g)
    memory.labels = torch.randint(size // 4, (size,), device="cuda", generator=g)
    memory.known = torch.ones(size, dtype=torch.bool, device="cuda")
    x = torch.randn(rows, 128, device="cuda", generator=g, requires_grad=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    value = memory(x, torch.arange(rows, device="cuda") // 4)
    value.backward()
    assert bool(value.isfinite()) and bool(x.grad.any())
    assert torch.cuda.max_memory_allocated() - before < 1.5 * 2**30
