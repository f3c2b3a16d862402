"""Losses in blocks of rows: the same numbers as in one piece, in the given memory."""

import inspect
import re

import pytest
import torch
from torch.autograd import gradcheck

import nearkin
from cases import CLASSES, DIM, LOSSES, masks
from nearkin import losses, mining, relations
from nearkin.core import blockwise

WHOLE = ("ContrastiveLoss-hard", "TripletLoss-hard-swap")  # their selection looks at all rows
CASES = [
    case
    for case in LOSSES
    if case.pairs and "max_memory" in inspect.signature(type(case.build())).parameters and case.name not in WHOLE
]
IDS = [case for case in CASES if not case.graded]
PLAIN = [case for case in IDS if "classes" not in case.name and not case.by_class]
every = pytest.mark.parametrize("case", CASES, ids=str)
every_relation = pytest.mark.parametrize("case", PLAIN, ids=str)
every_reduced = pytest.mark.parametrize("case", PLAIN + [case for case in IDS if case.by_class], ids=str)
SIZES = (1, 5, 12)  # rows a block, of 13


@pytest.fixture
def blocks(monkeypatch):
    """The first rows of the blocks that were made, in turn."""
    made = []
    plain = blockwise._parts

    def counting(*arguments):
        part, *rest = plain(*arguments)

        def counted(start, *more):
            made.append(start)
            return part(start, *more)

        return counted, *rest

    monkeypatch.setattr(blockwise, "_parts", counting)
    return made


def room(rows, x, references=None):
    """Bytes in which so many rows fit and no more."""
    others = x if references is None else references
    wide = torch.float64 in (x.dtype, others.dtype)
    return (len(x) + len(others)) * x.shape[1] * blockwise.ROW + rows * len(others) * blockwise.PAIR * (1 + wide)


def batch_of(case, dtype=torch.float64):
    """Thirteen items: four classes, one class of one."""
    x, labels = case.batch(dtype)
    extra = torch.full((1,), CLASSES - 1 if "classes" in case.name else CLASSES)
    return torch.cat([x, x[:1] * 0.5 - 0.3]), torch.cat([labels, extra.to(labels.dtype)])


def run(module, max_memory, x, labels, references=None, others=None, weight=None):
    """Value and gradients by embeddings, references and parameters, with an upstream gradient that is not 1."""
    module.max_memory = max_memory
    leaves = [t.detach().clone().requires_grad_() for t in (x, references) if t is not None]
    module.zero_grad()
    value = module(leaves[0], labels, *((leaves[1], others) if references is not None else ()))
    value.backward(torch.full_like(value, 2.5) if weight is None else weight)
    return [value.detach(), *(t.grad for t in (*leaves, *module.parameters()))]


def assert_equal(got, expected, tolerance=1e-12):
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert bool(a.isfinite().all())
        scale = max(float(b.double().abs().max()), 1e-3) if b.numel() else 1.0
        assert a.numel() == 0 or float((a.double() - b.double()).abs().max()) <= tolerance * scale


def test_all_that_should_be_are_covered():
    names = {type(case.build()).__name__ for case in CASES}
    expected = "Contrastive Margin MultiSimilarity Circle SupCon InfoNCE NPair LiftedStructure Triplet LosslessTriplet"
    expected += " GeneralizedLifted Sigmoid Quadruplet"
    assert names >= {f"{name}Loss" for name in (*expected.split(), "LogRatio", "FastAP", "SmoothAP")}


@every
@pytest.mark.parametrize("rows", SIZES)
def test_blocks_equal_one_piece(case, rows, blocks):
    module, (x, labels) = case.build(), batch_of(case)
    expected = run(module, None, x, labels)
    assert not blocks
    got = run(module, room(rows, x), x, labels)
    assert len(blocks) >= 13 / rows
    assert_equal(got, expected)


@every
def test_one_block_is_the_dense_form(case, blocks):
    module, (x, labels) = case.build(), batch_of(case)
    for a, b in zip(run(module, room(13, x), x, labels), run(module, None, x, labels), strict=True):
        assert torch.equal(a, b)
    assert not blocks


@every
@pytest.mark.parametrize("rows", SIZES)
def test_references(case, rows, blocks):
    module, (x, labels) = case.build(), batch_of(case)
    references = torch.cat([x.flip(0) * 1.1, x[:4]]) + 0.3 * torch.randn(17, DIM).double()
    others = torch.cat([labels.flip(0), labels[:4]]) + (0.05 if case.graded else 0)
    expected = run(module, None, x, labels, references, others)
    assert_equal(run(module, room(rows, x, references), x, labels, references, others), expected)
    assert blocks
    lone = room(rows, x, references[:1])  # one reference, and for the lifted loss one row of its anchors
    if "Lifted" in case.name or case.by_class:
        lone = max(lone, room(1, references[:1], x))
    assert_equal(
        run(module, lone, x, labels, references[:1], others[:1]),
        run(module, None, x, labels, references[:1], others[:1]),
    )


@every_reduced
@pytest.mark.parametrize("reduction", ["active", "sum", "none"])
def test_reductions_and_weights_of_each_anchor(case, reduction):
    module, (x, labels) = case.build(), batch_of(case)
    module.reduction = reduction
    weight = torch.linspace(-1, 2, 13).double() if reduction == "none" else None
    expected = run(module, None, x, labels, weight=weight)
    assert_equal(run(module, room(3, x), x, labels, weight=weight), expected)


@every_relation
def test_every_kind_of_relation(case):
    """Rows of labels, explicit masks that are not symmetric, unknown items: with and without references."""
    module, (x, labels) = case.build(), batch_of(case)
    size = room(4, x)
    rows = torch.nn.functional.one_hot(labels, CLASSES + 2).bool()
    rows[3, 0] = rows[7, 1] = True
    g = torch.Generator().manual_seed(5)
    positive = torch.rand(13, 13, generator=g) < 0.3
    negative = ~positive & (torch.rand(13, 13, generator=g) < 0.7)
    unknown = labels.clone()
    unknown[[2, 5]] = -1
    masks = relations.Relation(positive.clone(), negative.clone())
    for relation in (rows, masks, relations.explicit(positive), unknown, labels.int()):
        assert_equal(run(module, size, x, relation), run(module, None, x, relation))
    assert torch.equal(masks.positive, positive) and torch.equal(masks.negative, negative)  # the caller's own
    references = x.flip(0) + 0.1
    for relation, others in ((rows, rows.roll(1, 0)), (masks, None), (positive, None), (unknown, labels.roll(2))):
        expected = run(module, None, x, relation, references, others)
        assert_equal(run(module, size, x, relation, references, others), expected)


def test_a_boundary_a_class_with_a_relation():
    for name in ("MarginLoss-classes", "QuadrupletLoss"):
        case = next(c for c in CASES if c.name == name)
        module, (x, labels) = case.build(), batch_of(case)
        relation = relations.Relation(*masks(labels), ids=labels)
        assert_equal(run(module, room(4, x), x, relation), run(module, None, x, relation))


@pytest.mark.parametrize("ties", ["drop", "keep"])
def test_every_kind_of_target(ties):
    module = losses.LogRatioLoss(ties=ties).double()
    x = torch.randn(11, DIM, dtype=torch.float64)
    columns = torch.randint(0, 3, (11, 2)).double()
    label_distance = relations.LabelDistance(torch.rand(11, 11).double())  # its diagonal is ignored
    for targets in (columns, columns[:, 0].long(), columns[:, 0].float(), label_distance):
        assert_equal(run(module, room(3, x), x, targets), run(module, None, x, targets))
    expected = run(module, None, x, columns, x + 1, columns + 0.5)
    assert_equal(run(module, room(3, x), x, columns, x + 1, columns + 0.5), expected)
    assert_equal(run(module, room(3, x), x, label_distance, x + 1), run(module, None, x, label_distance, x + 1))


@every
@pytest.mark.parametrize("situation", ["one item", "no kin", "no strangers", "nobody known", "nobody", "equal"])
def test_degenerate_batches(case, situation):
    module, (x, labels) = case.build(), batch_of(case)
    if situation == "one item":
        x, labels = x[:1], labels[:1]
    elif situation == "nobody":
        x, labels = x[:0], labels[:0]
    elif situation == "equal":
        x = x[:1].expand_as(x)
    elif situation == "no kin" and not case.graded:
        x, labels = x[:CLASSES], torch.arange(CLASSES)
    elif situation == "no strangers":
        labels = labels * 0
    elif not case.graded:
        labels = torch.full_like(labels, -1)
    assert_equal(run(module, max(room(1, x), 1), x, labels), run(module, None, x, labels), 1e-11)


@every
def test_float32_is_as_near_to_float64(case):
    module, (x, labels) = case.build(torch.float32), batch_of(case, torch.float32)
    exact = run(case.build(), None, x.double(), labels)
    dense, tiled = run(module, None, x, labels), run(module, room(2, x), x, labels)
    for a, b, c in zip(tiled, dense, exact, strict=True):
        assert a.dtype == torch.float32
        size = float(c.abs().max())
        assert float((a - c).abs().max()) <= float((b - c).abs().max()) + 2e-7 * size


@every
def test_half_precision(case):
    """Gradients of blocks are summed before they are rounded: as exact as in one piece."""
    dtype = torch.bfloat16
    module, (x, labels) = case.build(torch.float32), batch_of(case, dtype)
    dense, tiled = run(module, None, x, labels), run(module, room(1, x), x, labels)
    torch.testing.assert_close(tiled[0], dense[0], rtol=1e-6, atol=1e-6)
    assert tiled[1].dtype == dtype
    step = torch.finfo(dtype).eps * float(dense[1].abs().max())
    assert float((tiled[1].float() - dense[1].float()).abs().max()) <= step


@every
def test_under_autocast(case):
    module, (x, labels) = case.build(torch.float32), batch_of(case, torch.float32)
    expected = run(module, room(2, x), x, labels)
    y = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        value = module(y, labels)
    (2.5 * value).backward()
    assert_equal([value.detach(), y.grad], expected[:2], 1e-6)


@pytest.mark.parametrize("name", ["MarginLoss-classes", "LiftedStructureLoss", "NPairLoss"])
def test_gradcheck(name):
    case = next(c for c in CASES if c.name == name)
    module, (x, labels) = case.build(), batch_of(case)
    module.max_memory = room(4, x)
    assert gradcheck(lambda y, *_: module(y, labels), (x.requires_grad_(), *module.parameters()), atol=1e-5)


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
        results.append(run(module, size, x, labels))
        results[-1].append(torch.rand(4, generator=generator))
    assert blocks
    assert_equal(results[1], results[0])


@every
def test_nan_is_never_hidden(case):
    module, (x, labels) = case.build(), batch_of(case)
    module.max_memory = room(2, x)
    x[5, 1] = torch.nan
    assert bool(module(x, labels).isnan())


@every
def test_without_a_graph(case):
    module, (x, labels) = case.build(), batch_of(case)
    with torch.no_grad():
        expected = module(x, labels)
        module.max_memory = room(2, x)
        torch.testing.assert_close(module(x, labels), expected, rtol=1e-12, atol=1e-12)


def test_large_batches_are_tiled_by_themselves(blocks, monkeypatch):
    module, (x, labels) = losses.SupConLoss(), batch_of(CASES[0])
    module(x, labels)
    assert not blocks
    monkeypatch.setattr(blockwise, "AUTOMATIC", 13 * blockwise.PAIR * 2 * 3)  # three rows
    value = module(x, labels)
    assert blocks == [0, 3, 6, 9, 12]
    module.max_memory = 2**30
    torch.testing.assert_close(value, module(x, labels))
    assert len(blocks) == 5


def test_no_block_makes_the_whole_relation(monkeypatch):
    shapes = []
    plain = relations.Relation.__new__

    def seen(kind, positive, negative, ids=None):
        shapes.append(tuple(positive.shape))
        return plain(kind, positive, negative, ids)

    monkeypatch.setattr(relations.Relation, "__new__", seen)
    for case in IDS:
        module, (x, labels) = case.build(), batch_of(case)
        shapes.clear()
        run(module, room(3, x), x, labels)
        assert shapes and max(rows for rows, _ in shapes) <= 3, case


def test_sentences():
    x, labels = torch.randn(8, DIM), torch.arange(8) // 2
    need = room(1, x)
    message = f"max_memory must be at least what one row of anchors × references takes in bytes: {need}, got {need - 1}"
    with pytest.raises(ValueError, match=re.escape(message)):
        losses.supcon_loss(x, labels, max_memory=need - 1)
    with pytest.raises(ValueError, match="max_memory must be >= 1, got 0"):
        losses.SupConLoss(max_memory=0)
    with pytest.raises(TypeError, match=r"max_memory must be a whole number, got 1\.5"):
        losses.TripletLoss(max_memory=1.5)
    with pytest.raises(ValueError, match=r"max_memory must be at least what all rows at once \(selection=\"hard_neg"):
        losses.contrastive_loss(x, labels, selection="hard_negatives", max_memory=need)
    with pytest.raises(ValueError, match=r"all rows at once \(swap=True"):
        losses.triplet_loss(x, labels, swap=True, max_memory=need)
    with pytest.raises(ValueError, match=r"all rows at once \(a selection of your own"):
        losses.triplet_loss(x, labels, selection=nearkin.mining.hard, max_memory=need)
    losses.contrastive_loss(x, labels, selection="hard_negatives", max_memory=room(8, x))


def test_a_module_says_its_bound():
    assert "max_memory=1000000" in repr(losses.SupConLoss(max_memory=1_000_000))
    assert "max_memory" not in repr(losses.SupConLoss())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_queue_may_move_on_before_the_gradient_comes_by(dtype):
    """References and their labels are overwritten in place after the loss, as a momentum queue does."""
    case = next(c for c in CASES if c.name == "SupConLoss")
    module, (x, labels) = case.build(dtype), batch_of(case, dtype)
    queue, queued = x.flip(0) + 0.1, labels.flip(0)
    x.requires_grad_()
    results = []
    for size in (None, room(3, x)):
        module.max_memory = size
        references, others, own = queue.clone(), queued.clone(), labels.clone()
        value = module(x, own, references if size else queue, others)
        if size:
            for tensor in (references, others, own):
                tensor.zero_()
        results.append(torch.autograd.grad(value, x)[0])
    torch.testing.assert_close(results[1], results[0])


def test_a_mask_may_not_where_blocks_are_made_again():
    case = next(c for c in CASES if c.name == "SupConLoss")
    module, (x, labels) = case.build(), batch_of(case)
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


@every_reduced
def test_a_number_to_train_on_computes_each_block_once(case, blocks):
    module, (x, labels) = case.build(), batch_of(case)
    run(module, room(5, x), x, labels)
    single = sorted(set(blocks))
    passes = {"LiftedStructureLoss": 2, "LiftedStructureLoss-max": 2, "NPairLoss": 1, "QuadrupletLoss": 2}
    assert single == [0, 5, 10] and len(blocks) <= 3 * 4, passes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["MarginLoss-classes", "LiftedStructureLoss", "NPairLoss", "LogRatioLoss"])
def test_blocks_compile_whole(name):
    case = next(c for c in CASES if c.name == name)
    module, (x, labels) = case.build(), batch_of(case)
    expected = run(module, room(5, x), x, labels)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    y = x.clone().requires_grad_()
    value = compiled(y, labels)
    value.backward(torch.full_like(value, 2.5))
    assert_equal([value.detach(), y.grad], expected[:2])
