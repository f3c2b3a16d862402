"""Bounded memory: in blocks of rows the same numbers as in one piece, each block made once and nothing whole kept."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from cases import CLASSES, Case
from loss_checks.outcome import REDUCTIONS, assert_same, covering, least_room, odd_batch, room, run
from loss_checks.properties import has_ids, holds, in_blocks
from loss_checks.waiting import Watch
from nearkin import relations
from nearkin.core import blockwise

SIZES = (1, 5, 12)  # rows a block, of 13


@contextmanager
def counted() -> Iterator[list[int]]:
    """The first rows of the blocks that are made, in turn."""
    made: list[int] = []
    plain = blockwise._parts

    def counting(*arguments: Any) -> Any:
        part, *rest = plain(*arguments)
        return lambda start, *more: made.append(start) or part(start, *more), *rest  # type: ignore[func-returns-value]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockwise, "_parts", counting)
        yield made


def twice(case: Case, size: int, batch: tuple[Any, ...], reduction: str | None) -> tuple[Any, ...]:
    """What comes out in blocks and in one piece, and the blocks."""
    outcomes, module = [], case.build(batch[0].dtype)
    if reduction:
        module.reduction = reduction
    for module.max_memory in (None, size):
        with counted() as made:
            outcomes.append(run(module, module, *batch))
    return outcomes[1], outcomes[0], made


def related(case: Case, kind: str, met: bool) -> tuple[Any, ...]:
    """The odd batch, alone or met with references, with labels of a kind."""
    x, labels = odd_batch(case)
    references, others = case.references(x, labels)
    g, shape = torch.Generator().manual_seed(5), (13, 17 if met else 13)
    positive = torch.rand(shape, generator=g) < 0.3  # not symmetric
    needs_ids = case.by_class or "classes" in case.name
    both: Any
    match kind:
        case "ids":
            both = labels, others
        case "int":
            both = (10 * labels).long() if case.graded else labels.int(), others.to(torch.int32)
        case "unknown":
            both = [torch.where(torch.arange(len(ids)) % 5 == 2, -1, ids) for ids in (labels, others)]
        case "rows":
            both = [one_hot(ids.long(), CLASSES + 2).bool() for ids in (labels, others)]
            both[0][3, 0] = both[0][7, 1] = True
        case "masks":
            negative = ~positive & (torch.rand(shape, generator=g) < 0.7)
            both = relations.Relation(positive, negative, ids=labels if needs_ids else None), None
        case "kin":
            both = relations.explicit(positive), None
        case "columns":
            both = [torch.randint(0, 3, (len(ids), 2), generator=g).double() for ids in (labels, others)]
        case "gaps":  # the diagonal of a batch alone says something, and is not heard
            both = relations.LabelDistance(torch.rand(shape, generator=g, dtype=torch.float64)), None
    return (x, both[0], references, both[1]) if met else (x, both[0])


@holds(in_blocks)
def blocks_are_one_piece(case: Case) -> None:
    """At three sizes, alone and with references, in each reduction, of every kind of label: to 1e-12."""
    kinds = ["ids", "unknown", "int", "masks", "rows", "kin"]
    kinds = ["ids", "int", "columns", "gaps"] if case.graded else kinds
    kinds = kinds[:4] if case.by_class or "classes" in case.name else kinds
    reductions = REDUCTIONS if "reduction" in case.build().settings else (None,)
    sizes_and_sides = [(rows, met) for rows in SIZES for met in (False, True)]
    for row in covering(case, at=sizes_and_sides, kind=kinds, reduction=reductions):
        rows, met = row["at"]
        batch = related(case, row["kind"], met)
        references = batch[2] if met else batch[0]
        size = max(room(rows, batch[0], references), least_room(case, batch[0], references))
        got, wanted, made = twice(case, size, batch, row["reduction"])
        assert_same(got, wanted, 1e-12)
        assert [t.dtype for t in got] == [t.dtype for t in wanted]
        assert len(made) >= 13 / rows, row


@holds(in_blocks)
def what_fits_is_one_piece(case: Case) -> None:
    """To the bit, and no block is made; without a graph too."""
    x, labels = odd_batch(case)
    got, wanted, made = twice(case, room(13, x), (x, labels), None)
    assert not made and all(map(torch.equal, got, wanted))
    module = case.build()
    with torch.no_grad():
        value = module(x, labels)
        module.max_memory = least_room(case, x, x)
        torch.testing.assert_close(module(x, labels), value, rtol=1e-12, atol=1e-12)


@holds(in_blocks)
def blocks_are_as_exact_in_less_precision(case: Case) -> None:
    """float32 as near to float64 as in one piece, halves rounded once, autocast without effect."""
    x, labels = odd_batch(case, torch.float32)
    exact, module, tiled = run(*[case.build()] * 2, x.double(), labels), case.build(torch.float32), []
    for module.max_memory in (None, least_room(case, x, x)):
        tiled.append(run(module, module, x, labels))
    for dense, blocks, true in zip(*tiled, exact, strict=True):
        allowed = float((dense - true).abs().max()) + 2e-7 * float(true.abs().max())
        assert blocks.dtype == torch.float32 and float((blocks - true).abs().max()) <= allowed

    def under_autocast(*batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return module(*batch)  # type: ignore[no-any-return]

    assert_same(run(under_autocast, module, x, labels), tiled[1], 1e-6)
    half = x.bfloat16()
    blocks = run(module, module, half, labels)
    module.max_memory = None
    dense = run(module, module, half, labels)
    assert_same(blocks[:1], dense[:1], 1e-6)
    step = torch.finfo(torch.bfloat16).eps * float(dense[1].abs().max())
    assert blocks[1].dtype == torch.bfloat16 and float((blocks[1].float() - dense[1].float()).abs().max()) <= step


@holds(in_blocks)
def blocks_keep_nothing_whole(case: Case) -> None:
    """No half of a matrix for 64 items in blocks of 4, forward or backward, each block once for each of few passes."""
    g = torch.Generator().manual_seed(3)
    ids = torch.arange(64) // 4 if "classes" not in case.name else torch.arange(64) % CLASSES
    x, labels = torch.randn(64, 6, generator=g), case.targets(ids)
    for most, few in ((room(4, x), True), (None, False)):
        module = case.build(torch.float32)
        module.max_memory = most
        with Watch(stalls=True) as watch, counted() as made:
            module(x.clone().requires_grad_(), labels).backward()
        assert (watch.largest <= 64 * 64 / 2) == (few or case.ordered), watch.largest
        passes = 2 if case.ordered or case.graded or case.name.startswith("Contrastive") else 1
        passes = 4 if "Lifted" in case.name or case.by_class else passes
        assert 16 * few <= len(made) <= 16 * passes * few


@holds(in_blocks)
def a_queue_may_move_on_before_the_gradient_comes_by(case: Case) -> None:
    """References and all labels are overwritten in place after the loss, as a momentum queue does."""
    x, labels = odd_batch(case)
    references, others = case.references(x, labels)
    for reduction in ("mean", "none") if "reduction" in case.build().settings else (None,):
        slopes = []
        for most in (None, max(room(3, x, references), least_room(case, x, references))):
            module, y = case.build(), x.clone().requires_grad_()
            module.max_memory = most
            if reduction:
                module.reduction = reduction
            batch = [labels.clone(), references.clone(), others.clone()]
            value = module(y, *batch)
            if most:
                for tensor in batch:
                    tensor.zero_()
            slopes += torch.autograd.grad(value.sum(), y)
        torch.testing.assert_close(slopes[1], slopes[0])


def bounded(case: Case, most: float) -> nn.Module:
    """The case's loss within these bytes."""
    module = case.build()
    module.max_memory = most  # type: ignore[assignment]
    return module


@holds(lambda case: in_blocks(case) and has_ids(case) and "VICReg" not in case.name)
def too_little_memory_gets_a_sentence(case: Case) -> None:
    """It names what is enough; and what is no number of bytes."""
    x, labels = case.batch()
    for most, error, sentence in (
        (room(1, x) - 1, ValueError, f"max_memory must be at least what .* takes in bytes: {room(1, x)}, got"),
        (0, ValueError, "max_memory must be >= 1, got 0"),
        (1.5, TypeError, r"max_memory must be a whole number, got 1\.5"),
    ):
        with pytest.raises(error, match=sentence):
            bounded(case, most)(x, labels)
    assert "max_memory" not in repr(case.build()) and "max_memory=9" in repr(bounded(case, 9))
