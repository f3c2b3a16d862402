"""What every public loss keeps to, each against its float64 twin."""

import re

import pytest
import torch
from torch.autograd import gradcheck

import reference
from cases import CLASSES, DIM, LOSSES, masks
from nearkin import losses, relations
from nearkin.losses.classes import ClassLoss

PAIRS = [case for case in LOSSES if case.pairs]
IDS = [case for case in PAIRS if not case.graded]
every = pytest.mark.parametrize("case", LOSSES, ids=str)
every_pair = pytest.mark.parametrize("case", PAIRS, ids=str)


def value_and_gradients(function, module, x, *rest):
    """The loss, its gradient by the embeddings, and by each learned parameter."""
    x = x.detach().clone().requires_grad_()
    module.zero_grad()
    value = function(x, *rest)
    assert value.requires_grad
    value.backward()
    return value.detach(), [x.grad, *(p.grad for p in module.parameters() if p.grad is not None)]


def assert_same(got, wanted, tolerance):
    (value, gradients), (twin, twin_gradients) = got, wanted
    assert len(gradients) == len(twin_gradients)
    for a, b in zip([value, *gradients], [twin, *twin_gradients], strict=True):
        scale = max(float(b.double().abs().max()), 1e-3)
        assert float((a.double() - b.double()).abs().max()) <= tolerance * scale


def twin_of(case, module, x, labels, *rest):
    """Value and gradients of the float64 loop at the same inputs and parameters."""
    double = case.build().double()
    double.load_state_dict(module.state_dict())
    return value_and_gradients(lambda y: case.twin(double, y, labels, *rest), double, x.double())


@every
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_equals_the_loop(case, dtype):
    half = dtype in (torch.bfloat16, torch.float16)
    module = case.build(torch.float32 if half else dtype)
    x, labels = case.batch(dtype)
    wanted = twin_of(case, module, x, labels)
    got = value_and_gradients(module, module, x, labels)
    assert got[0].dtype == (torch.float32 if half else dtype)
    if half:  # the value is computed in float32 from the halves as given; only the gradient is rounded again
        assert_same((got[0], []), (wanted[0], []), 1e-5)
    assert_same(got, wanted, {torch.float64: 1e-10, torch.float32: 1e-5}.get(dtype, 1e-2))


@every_pair
def test_references_equal_the_loop(case):
    module = case.build()
    x, labels = case.batch()
    references = torch.cat([x.flip(0) * 1.1, x[:3]]) + 0.3 * torch.randn(len(x) + 3, DIM).double()
    others = torch.cat([labels.flip(0), labels[:3]])
    if case.graded:
        others = others + 0.05
    wanted = twin_of(case, module, x, labels, references, others)
    assert_same(value_and_gradients(module, module, x, labels, references, others), wanted, 1e-10)


@pytest.mark.parametrize("case", [c for c in IDS if not c.ordered], ids=str)
def test_references_are_a_concatenation(case):
    """A batch that meets itself is a batch that meets its own copy, less the diagonal."""
    module = case.build()
    x, labels = case.batch()
    alone = value_and_gradients(module, module, x, labels)
    y = x.clone().requires_grad_()
    value = module(y, relations.Relation(*masks(labels), ids=labels), y.clone())
    value.backward()
    assert_same((value.detach(), [y.grad]), (alone[0], alone[1][:1]), 1e-10)
    assert torch.equal(module(x, labels), module(x, labels, x, labels))  # a batch named as its own reference


def loop_at(case, module, x, labels, at):
    """The loop of a loss at x, with what has no gradient computed at `at`."""
    if case.name == "CircleLoss":  # its weights
        return reference.circle(x, *masks(labels), at=at, **module.settings)
    assert case.name.startswith("AdaFaceLoss")  # its lengths
    learned = {"mean": float(module.mean), "std": float(module.std)}
    return reference.adaface(x, labels, module.weight.detach(), at=at, **learned, **module.settings)


def frozen_differences(case, module, x, labels, step=1e-6):
    """Central differences of a loop by the embeddings, with what has no gradient fixed at x."""
    gradient = torch.zeros_like(x)
    for i, j in torch.cartesian_prod(torch.arange(len(x)), torch.arange(DIM)).tolist():
        sides = []
        for sign in (1, -1):
            moved = x.clone()
            moved[i, j] += sign * step
            sides.append(loop_at(case, module, moved, labels, x))
        gradient[i, j] = (sides[0] - sides[1]) / (2 * step)
    return gradient


@pytest.mark.slow
@every
def test_gradcheck(case):
    module = case.build().eval()
    x, labels = case.batch()
    if not case.smooth:  # part of it has no gradient: the loop is evaluated with that part frozen
        _, (gradient, *_) = value_and_gradients(module, module, x, labels)
        assert_same((gradient, []), (frozen_differences(case, module, x, labels), []), 1e-6)
        return
    inputs = (x.requires_grad_(), *module.parameters())
    assert gradcheck(lambda y, *_: module(y, labels), inputs, eps=1e-6, atol=1e-5)


def needs(module, x, labels, bytes):
    """What is enough memory, if these bytes are not: the error names it."""
    try:
        module.max_memory = bytes
        module(x, labels)
    except ValueError as error:
        return int(re.search(r": (\d+), got", str(error))[1])
    return bytes


def takes_blocks(module, x, labels):
    """Whether there are blocks of classes under these settings; otherwise `max_memory` is refused with a sentence."""
    try:
        module.max_memory = 1
        module(x, labels)
    except ValueError as error:
        return "must be left out" not in str(error)
    finally:
        module.max_memory = None
    return True


def routes(module, x, labels):
    """Settings by which a loss is computed in another way: in blocks."""
    yield {}
    if hasattr(module, "max_memory") and takes_blocks(module, x, labels):
        least = 1
        while (needed := needs(module, x, labels, least)) > least:
            least = needed
        yield {"max_memory": least}


def penalty(module, encoder, x, *rest, graph=True):
    """The squared gradient of a loss by the inputs of an encoder and by what the loss has learned."""
    value = module(torch.tanh(x @ encoder), *rest)
    slopes = torch.autograd.grad(value, (x, *module.parameters()), create_graph=graph)
    return sum(slope.square().sum() for slope in slopes)


@every
def test_second_derivatives_are_right_or_refused(case):
    """Of a loss behind an encoder: autograd would silently take for a constant what a gradient by hand has not said."""
    x, labels = case.batch()
    g = torch.Generator().manual_seed(2)
    encoder = torch.randn(DIM, DIM, generator=g, dtype=torch.float64) / 4
    for settings in routes(case.build().eval(), x, labels):
        module = case.build().eval()
        for name, value in settings.items():
            setattr(module, name, value)
        leaves = (x.clone().requires_grad_(), *module.parameters())
        if not case.smooth:  # part of it is a constant in the gradient
            with pytest.raises(RuntimeError, match=r"has no second derivative; take its gradient"):
                penalty(module, encoder, leaves[0], labels)
            continue
        if settings and isinstance(module, ClassLoss):
            with pytest.raises(RuntimeError, match=r"over class weights in blocks of .* has no second derivative"):
                penalty(module, encoder, leaves[0], labels)
            continue
        slopes = torch.autograd.grad(penalty(module, encoder, leaves[0], labels), leaves)
        steps = [torch.randn(leaf.shape, generator=g, dtype=leaf.dtype) for leaf in leaves]
        sides = []
        for move in (1e-5, -2e-5):
            with torch.no_grad():
                for leaf, step in zip(leaves, steps, strict=True):
                    leaf.add_(step, alpha=move)
            sides.append(penalty(module, encoder, leaves[0], labels, graph=False))
        along = sum((slope * step).sum() for slope, step in zip(slopes, steps, strict=True))
        torch.testing.assert_close(along, (sides[0] - sides[1]) / 2e-5, rtol=1e-4, atol=1e-5, msg=str(settings))


@every
def test_solved_batch_costs_less_than_swapped(case):
    module = case.build().eval()
    _, labels = case.batch()
    ids = torch.arange(CLASSES).repeat(len(labels) // CLASSES)
    if case.graded:
        x = torch.zeros(len(labels), DIM, dtype=torch.float64)
        x[:, 0] = labels
        x = x + 1e-3 * torch.randn_like(x)
    else:
        x = 3 * torch.eye(CLASSES, DIM, dtype=torch.float64)[ids] + 0.05 * torch.randn(len(ids), DIM).double()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() == 2:  # class weights where the classes are
                each = parameter.shape[0] // CLASSES
                parameter.copy_(torch.eye(CLASSES, DIM).double().repeat_interleave(each, 0))
                parameter.add_(0.01 * torch.randn_like(parameter))
            assert parameter.dim() <= 2, name
    swapped = labels.sort().values
    with torch.no_grad():
        assert float(module(x, labels)) < float(module(x, swapped)) - 1e-3


@every
def test_order_of_the_batch_does_not_matter(case):
    module = case.build().eval()
    x, labels = case.batch()
    order = torch.randperm(len(labels))
    if case.ordered:  # classes change places, items within one do not
        order = torch.cat([(labels == c).nonzero().squeeze(1) for c in (2, 0, 3, 1)])
    torch.testing.assert_close(module(x[order], labels[order]), module(x, labels), rtol=1e-10, atol=1e-10)


@every
def test_a_view_costs_what_its_copy_costs(case):
    module = case.build().eval()
    x, labels = case.batch()
    wide = torch.stack([x, x + 1], 2).transpose(0, 1)  # strides in no usual order
    strided = torch.stack([labels, labels], 1)[:, 0]
    view = wide[:, :, 0].T
    assert not view.is_contiguous() and not strided.is_contiguous()
    assert_same(
        value_and_gradients(module, module, view, strided), value_and_gradients(module, module, x, labels), 1e-12
    )


@pytest.mark.parametrize("case", [c for c in LOSSES if not c.graded], ids=str)
def test_unknown_items_are_as_good_as_absent(case):
    module = case.build().eval()
    x, labels = case.batch()
    more = torch.cat([x, torch.randn(2, DIM, dtype=torch.float64)])
    unknown = torch.cat([labels, torch.tensor([-1, -1])])
    torch.testing.assert_close(module(more, unknown), module(x, labels), rtol=1e-10, atol=1e-10)
    y = more.clone().requires_grad_()
    module(y, unknown).backward()
    assert bool((y.grad[-2:] == 0).all())


@pytest.mark.parametrize("case", IDS, ids=str)
def test_every_kind_of_relation(case):
    module = case.build().eval()
    x, labels = case.batch()
    wanted = module(x, labels)
    torch.testing.assert_close(module(x, labels.int()), wanted)
    torch.testing.assert_close(module(x, labels.to(torch.uint8)), wanted)
    if "classes" in case.name or case.by_class:
        with pytest.raises(TypeError, match="labels must be integer class ids"):
            module(x, relations.Relation(*masks(labels)))
        return
    rows = torch.nn.functional.one_hot(labels, CLASSES + 1).bool()
    torch.testing.assert_close(module(x, rows), wanted)
    torch.testing.assert_close(module(x, relations.multilabel(rows)), wanted)
    torch.testing.assert_close(module(x, relations.explicit(labels[:, None] == labels[None, :])), wanted)
    references, others = x + 0.1, labels.roll(1)
    wanted = module(x, labels, references, others)
    torch.testing.assert_close(module(x, labels[:, None] == others[None, :], references), wanted)
    other_rows = torch.nn.functional.one_hot(others, CLASSES + 1).bool()
    torch.testing.assert_close(module(x, rows, references, other_rows), wanted)


@every
def test_reductions_agree(case):
    module = case.build().eval()
    if "reduction" not in module.settings:
        pytest.skip("one value per batch: nothing to reduce")
    x, labels = case.batch()
    results = {}
    for module.reduction in ("mean", "active", "sum", "none"):
        results[module.reduction] = module(x, labels)
    assert results["none"].shape == (len(x),)
    torch.testing.assert_close(results["none"].sum(), results["sum"])
    assert results["mean"].shape == results["active"].shape == ()
    with pytest.raises(ValueError, match=r'unknown reduction "average"; known: mean, active, sum, none'):
        module.reduction = "average"


def function_of(module):
    """The function beside a Module, by the house's names."""
    names = {name.replace("_", ""): name for name in losses.__all__ if name.endswith("_loss")}
    kind = module if isinstance(module, type) else type(module)
    return getattr(losses, names[kind.__name__.lower()])


@every
def test_module_is_its_function(case):
    module = case.build().eval()
    x, labels = case.batch()
    function = function_of(module)
    settings = {name: value for name, value in module.settings.items() if not name.startswith("decay")}  # γ is given
    tensors = dict(module.named_parameters()) | {"centers": getattr(module, "centers", None)}
    learned = [tensors[name] for name in ("weight", "bias", "centers") if tensors.get(name) is not None]
    if case.name.startswith(("Margin", "Siamese", "Sigmoid")):
        settings |= dict(module.named_parameters())
        learned = []
    for name in ("gamma", "annealing", "scale", "mean", "std"):
        if hasattr(module, name) and name not in settings:
            settings[name] = getattr(module, name)
    if case.name == "HeatedSoftmaxLoss-batch":
        x = torch.nn.functional.batch_norm(x, module.running_mean, module.running_var)
        settings |= {"normalize": False, "scale": module.scale / DIM**0.5}
        wanted = function(x, labels, *learned, **settings)
        torch.testing.assert_close(module(case.batch()[0], labels), wanted)
        return
    torch.testing.assert_close(module(x, labels), function(x, labels, *learned, **settings), rtol=0, atol=0)


@every
def test_state_travels_in_the_state_dict(case):
    module, x, labels = case.build(), *case.batch()
    for _ in range(3):
        module(x, labels)
    copy = case.build()
    copy.load_state_dict(module.state_dict())
    torch.testing.assert_close(copy(x, labels), module(x, labels), rtol=0, atol=0)
    assert isinstance(module.lr_scale, float) and module.lr_scale >= 1
