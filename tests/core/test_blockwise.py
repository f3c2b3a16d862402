"""Losses in blocks of rows: random draws, batches that are tiled by themselves, what is refused.

That the numbers are those of one piece, in the given memory, is a property of every loss: `loss_checks/blocks.py`.
"""

import re

import pytest
import torch

import nearkin
from cases import DIM, LOSSES, masks
from loss_checks.blocks import counted
from loss_checks.outcome import assert_same, odd_batch, room, run
from nearkin import losses, mining, relations
from nearkin.core import blockwise

SUPCON = next(case for case in LOSSES if case.name == "SupConLoss")


@pytest.fixture
def blocks():
    """The first rows of the blocks that were made, in turn."""
    with counted() as made:
        yield made


@pytest.mark.parametrize("name", ["MarginLoss", "TripletLoss"])
@pytest.mark.parametrize("selection", mining.DRAWN)
@pytest.mark.parametrize("own", [False, True])
def test_a_block_draws_again_what_it_drew(name, selection, own, blocks):
    """On the CPU, where draws are one sequence, even what the dense form draws; the generator ends where it ended."""
    x = torch.randn(24, DIM, dtype=torch.float64)
    labels = torch.arange(24) // 4
    results = []
    for size in (None, room(7, x)):
        torch.manual_seed(3)
        generator = torch.Generator().manual_seed(3) if own else None
        module = getattr(losses, name)(selection=selection, generator=generator).double()
        module.max_memory = size
        results.append(run(module, module, x, labels))
        results[-1].append(torch.rand(4, generator=generator))
    assert blocks
    assert_same(results[1], results[0], 1e-12)


def test_large_batches_are_tiled_by_themselves(blocks, monkeypatch):
    module, (x, labels) = losses.SupConLoss(), odd_batch(SUPCON)
    module(x, labels)
    assert not blocks
    monkeypatch.setattr(blockwise, "AUTOMATIC", 13 * blockwise.PAIR * 2 * 3)  # three rows
    value = module(x, labels)
    assert blocks == [0, 3, 6, 9, 12]
    module.max_memory = 2**30
    torch.testing.assert_close(value, module(x, labels))
    assert len(blocks) == 5


def test_a_mask_may_not_where_blocks_are_made_again():
    module, (x, labels) = SUPCON.build(), odd_batch(SUPCON)
    module.max_memory = room(3, x)
    relation = relations.Relation(*(mask.clone() for mask in masks(labels)))
    value = module(x.requires_grad_(), relation)
    [expected] = torch.autograd.grad(module(x, labels), x)
    module.reduction = "none"
    each = module(x, relation)
    relation.positive.zero_()
    assert torch.equal(torch.autograd.grad(value, x)[0], expected), "made with the value"
    with pytest.raises(RuntimeError, match="labels must not change in place between a loss and its backward"):
        each.sum().backward()


def test_sentences():
    x, labels = torch.randn(8, DIM), torch.arange(8) // 2
    need = room(1, x)
    message = f"max_memory must be at least what one row of anchors × references takes in bytes: {need}, got {need - 1}"
    with pytest.raises(ValueError, match=re.escape(message)):
        losses.supcon_loss(x, labels, max_memory=need - 1)
    with pytest.raises(ValueError, match=r"max_memory must be at least what all rows at once \(selection=\"hard_neg"):
        losses.contrastive_loss(x, labels, selection="hard_negatives", max_memory=need)
    with pytest.raises(ValueError, match=r"all rows at once \(swap=True"):
        losses.triplet_loss(x, labels, swap=True, max_memory=need)
    with pytest.raises(ValueError, match=r"all rows at once \(a selection of your own"):
        losses.triplet_loss(x, labels, selection=nearkin.mining.hard, max_memory=need)
    losses.contrastive_loss(x, labels, selection="hard_negatives", max_memory=room(8, x))
