"""The numbers of a loss: its float64 loop, its derivatives, who is related to whom, what must not matter."""

import re

import pytest
import torch
from torch import Tensor, nn

import reference
from cases import CLASSES, DIM, Case, masks
from loss_checks.outcome import REDUCTIONS, assert_same, batch_of, covering, least_room, loop, run
from loss_checks.properties import has_ids, holds, in_blocks
from nearkin import losses, relations

HALF = (torch.bfloat16, torch.float16)


@holds()
def equals_its_loop(case: Case) -> None:
    """Value and every gradient of the float64 loop: in each type, alone and with references, in each reduction."""
    reduced = "reduction" in case.build().settings
    rows = [{"dtype": torch.float64, "met": met, "reduction": None} for met in (False, True)[: 1 + case.pairs]]
    types, met = (torch.float64, torch.float32, *HALF), (False, True)[: 1 + case.pairs]
    rows += [*covering(case, dtype=types, met=met, reduction=REDUCTIONS if reduced else (None,))]
    for row in rows:
        module = case.build(torch.float32 if row["dtype"] in HALF else row["dtype"])
        if row["reduction"]:
            module.reduction = row["reduction"]
        wanted = loop(case, **row)
        got = run(module, module, *batch_of(case, row["dtype"], met=row["met"]))
        assert got[0].dtype == (torch.float64 if row["dtype"] == torch.float64 else torch.float32)
        if row["dtype"] in HALF:  # the value is computed in float32 from the halves as given; gradients are rounded
            assert_same(got[:1], wanted[:1], 1e-5)
        assert_same(got, wanted, {torch.float64: 1e-10, torch.float32: 1e-5}.get(row["dtype"], 1e-2))


@holds(lambda case: has_ids(case) and not case.ordered)
def meets_itself_as_its_copy(case: Case) -> None:
    """A batch alone is a batch that meets its own copy, less the diagonal; named as its own references, it is alone."""
    module, (x, labels) = case.build(), case.batch()
    value, gradient, *learned = run(module, module, x, labels)
    relation = relations.Relation(*masks(labels), ids=labels)
    copied, by_batch, by_copy, *of_copy = run(module, module, x, relation, x, None)
    assert_same([copied, by_batch + by_copy, *of_copy], [value, gradient, *learned], 1e-10)
    assert torch.equal(module(x, labels), module(x, labels, x, labels))


def loop_at(case: Case, module: nn.Module, x: Tensor, labels: Tensor, at: Tensor) -> Tensor:
    """The loop of a loss at x, with what has no gradient computed at `at`."""
    if case.name == "CircleLoss":  # its weights
        return reference.circle(x, *masks(labels), at=at, **module.settings)
    assert case.name.startswith("AdaFaceLoss")  # its lengths
    learned = {"mean": float(module.mean), "std": float(module.std)}
    settings = {name: value for name, value in module.settings.items() if name != "kernel"}
    return reference.adaface(x, labels, module.weight.detach(), at=at, **learned, **settings)


@holds()
def slopes_are_those_of_its_value(case: Case) -> None:
    """Central differences along five directions of the embeddings and of what is learned."""
    module, (x, labels) = case.build().eval(), case.batch()
    g = torch.Generator().manual_seed(5)
    _, *gradients = run(module, module, x, labels)
    leaves = [x.clone(), *module.parameters()]
    if not case.smooth:  # part of it has no gradient: the loop is evaluated with that part as it was
        gradients, leaves = gradients[:1], leaves[:1]
    for _ in range(5):
        steps = [torch.randn(leaf.shape, generator=g, dtype=leaf.dtype) for leaf in leaves]
        sides = []
        for move in (1e-6, -2e-6, 1e-6):
            with torch.no_grad():
                for leaf, step in zip(leaves, steps, strict=True):
                    leaf.add_(step, alpha=move)
            sides.append(module(leaves[0], labels) if case.smooth else loop_at(case, module, leaves[0], labels, x))
        along = sum((slope * step).sum() for slope, step in zip(gradients, steps, strict=True)) / 2.5
        torch.testing.assert_close(along, ((sides[0] - sides[1]) / 2e-6).detach(), rtol=1e-5, atol=1e-6)


def routes(case: Case, x: Tensor, labels: Tensor) -> list[dict[str, object]]:
    """Settings by which a loss is computed in another way: in blocks."""
    module = case.build().eval()
    found: list[dict[str, object]] = [{}]
    if hasattr(module, "max_memory"):
        least: int | None = 1
        while least is not None:
            try:
                module.max_memory = least
                module(x, labels)
                found.append({"max_memory": least})
                break
            except ValueError as error:  # what is enough stands in it, or that there are no blocks
                enough = re.search(r": (\d+), got", str(error))
                least = int(enough[1]) if enough else None
    return found


def penalty(module: nn.Module, encoder: Tensor, x: Tensor, labels: Tensor, graph: bool = True) -> Tensor:
    """The squared gradient of a loss by the inputs of an encoder and by what the loss has learned."""
    value = module(torch.tanh(x @ encoder), labels)
    slopes = torch.autograd.grad(value, (x, *module.parameters()), create_graph=graph)
    return torch.stack([slope.square().sum() for slope in slopes]).sum()


@holds()
def second_derivatives_are_right_or_refused(case: Case) -> None:
    """Of a loss behind an encoder: autograd would silently take for a constant what a gradient by hand has not said."""
    x, labels = case.batch()
    g = torch.Generator().manual_seed(2)
    encoder = torch.randn(DIM, DIM, generator=g, dtype=torch.float64) / 4
    for settings in routes(case, x, labels):
        module = case.build().eval()
        for name, value in settings.items():
            setattr(module, name, value)
        leaves = (x.clone().requires_grad_(), *module.parameters())
        if not case.smooth:  # part of it is a constant in the gradient
            with pytest.raises(RuntimeError, match=r"has no second derivative; take its gradient"):
                penalty(module, encoder, leaves[0], labels)
            continue
        try:
            curve = penalty(module, encoder, leaves[0], labels)
        except RuntimeError as error:  # blocks of classes are not differentiated twice
            if case.pairs or "max_memory" not in settings or "has no second derivative" not in str(error):
                raise
            continue
        slopes = torch.autograd.grad(curve, leaves)
        steps = [torch.randn(leaf.shape, generator=g, dtype=leaf.dtype) for leaf in leaves]
        sides = []
        for move in (1e-5, -2e-5):
            with torch.no_grad():
                for leaf, step in zip(leaves, steps, strict=True):
                    leaf.add_(step, alpha=move)
            sides.append(penalty(module, encoder, leaves[0], labels, graph=False))
        along = torch.stack([(slope * step).sum() for slope, step in zip(slopes, steps, strict=True)]).sum()
        torch.testing.assert_close(along, (sides[0] - sides[1]) / 2e-5, rtol=1e-4, atol=1e-5, msg=str(settings))


@holds()
def a_solved_batch_costs_less_than_a_swapped_one(case: Case) -> None:
    """Descending the loss brings items of a class together."""
    module, (_, labels) = case.build().eval(), case.batch()
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
        assert float(module(x, labels)) < float(module(x, labels.sort().values)) - 1e-3


@holds()
def order_and_layout_do_not_matter(case: Case) -> None:
    """Items in another order, and views with strides in no usual order, cost the same."""
    module, (x, labels) = case.build().eval(), case.batch()
    order = torch.randperm(len(labels))
    if case.ordered:  # classes change places, items within one do not
        order = torch.cat([(labels == c).nonzero().squeeze(1) for c in (2, 0, 3, 1)])
    value, gradient, *learned = run(module, module, x, labels)
    moved, by_moved, *of_moved = run(module, module, x[order], labels[order])
    assert_same([moved, by_moved, *of_moved], [value, gradient[order], *learned], 1e-10)
    view = torch.stack([x, x + 1], 2).transpose(0, 1)[:, :, 0].T
    strided = torch.stack([labels, labels], 1)[:, 0]
    assert not view.is_contiguous() and not strided.is_contiguous()
    assert_same(run(module, module, view, strided), [value, gradient, *learned], 1e-12)


@holds(lambda case: not case.graded)
def unknown_items_are_as_good_as_absent(case: Case) -> None:
    """Labels of -1: no pair, no term, no gradient; among references too."""
    module, (x, labels) = case.build().eval(), case.batch()
    more = torch.cat([x, torch.randn(2, DIM, dtype=torch.float64)])
    unknown = torch.cat([labels, torch.tensor([-1, -1])])
    for met in (False, True)[: 1 + case.pairs]:
        rest = case.references(x, labels) if met else ()
        with_unknown = (torch.cat([rest[0], more[-2:]]), torch.cat([rest[1], unknown[-2:]])) if met else ()
        wanted, got = run(module, module, x, labels, *rest), run(module, module, more, unknown, *with_unknown)
        assert torch.equal(module(more, unknown.int(), *with_unknown), got[0])
        assert not any(bool(t[len(t) - 2 :].any()) for t in got[1 : 2 + met])
        got[1 : 2 + met] = [t[:-2] for t in got[1 : 2 + met]]
        assert_same(got, wanted, 1e-10)


@holds(has_ids)
def every_kind_of_label_says_the_same(case: Case) -> None:
    """Ids of any type, multi-label rows, masks of kin and relations; what needs ids says so."""
    module, (x, labels) = case.build().eval(), case.batch()
    wanted = module(x, labels)
    for kind in (torch.int32, torch.uint8):
        torch.testing.assert_close(module(x, labels.to(kind)), wanted)
    if "classes" in case.name or case.by_class:
        with pytest.raises(TypeError, match="labels must be integer class ids"):
            module(x, relations.Relation(*masks(labels)))
        return
    rows = nn.functional.one_hot(labels, CLASSES + 1).bool()
    kin = relations.explicit(labels[:, None] == labels[None, :])
    for same in (rows, relations.multilabel(rows), kin):
        torch.testing.assert_close(module(x, same), wanted)
    if in_blocks(case):
        module.max_memory = least_room(case, x, x)
        torch.testing.assert_close(module(x, kin), wanted)
        module.max_memory = None
    assert bool(kin.positive.diagonal().all()), "the caller's own masks stay as they are"
    references, others = case.references(x, labels)
    wanted = module(x, labels, references, others)
    torch.testing.assert_close(module(x, labels[:, None] == others[None, :], references), wanted)
    other_rows = nn.functional.one_hot(others, CLASSES + 1).bool()
    torch.testing.assert_close(module(x, rows, references, other_rows), wanted)


@holds(lambda case: "reduction" in case.build().settings)
def reductions_agree(case: Case) -> None:
    """One value per anchor with "none", which sum to "sum"; one number otherwise; no other word."""
    module, (x, labels), results = case.build().eval(), case.batch(), {}
    for module.reduction in REDUCTIONS:
        results[module.reduction] = module(x, labels)
    assert results["none"].shape == (min(module.settings.get("anchors") or len(x), len(x)),)
    torch.testing.assert_close(results["none"].sum(), results["sum"])
    assert results["mean"].shape == results["active"].shape == ()
    with pytest.raises(ValueError, match=r'unknown reduction "average"; known: mean, active, sum, none'):
        module.reduction = "average"


def function_of(module: nn.Module | type) -> object:
    """The function beside a Module, by the house's names."""
    names = {name.replace("_", ""): name for name in losses.__all__ if name.endswith("_loss")}
    kind = module if isinstance(module, type) else type(module)
    return getattr(losses, names[kind.__name__.lower()])


@holds(lambda case: type(case.build()).__name__ in losses.__all__)
def the_module_is_its_function(case: Case) -> None:
    """To the bit, with the module's settings and what it has learned as arguments."""
    module, (x, labels) = case.build().eval(), case.batch()
    function = function_of(module)
    settings = {name: value for name, value in module.settings.items() if not name.startswith("decay")}  # γ is given
    tensors = dict(module.named_parameters()) | {"centers": getattr(module, "centers", None)}
    learned = [tensors[name] for name in ("weight", "bias", "centers") if tensors.get(name) is not None]
    if case.pairs:
        settings |= dict(module.named_parameters())
        learned = []
    for name in ("gamma", "annealing", "scale", "mean", "std"):
        if hasattr(module, name) and name not in settings:
            settings[name] = getattr(module, name)
    if case.name == "HeatedSoftmaxLoss-batch":
        x = nn.functional.batch_norm(x, module.running_mean, module.running_var)
        settings |= {"normalize": False, "scale": module.scale / DIM**0.5}
        torch.testing.assert_close(module(case.batch()[0], labels), function(x, labels, *learned, **settings))
        return
    torch.testing.assert_close(module(x, labels), function(x, labels, *learned, **settings), rtol=0, atol=0)


@holds()
def its_state_dict_is_all_of_it(case: Case) -> None:
    """After three steps a fresh loss with the state dict goes on to the bit; evaluation changes nothing of it."""
    module, x, labels = case.build(), *case.batch()
    for _ in range(3):
        module(x, labels)
    copy = case.build()
    copy.load_state_dict(module.state_dict())
    torch.testing.assert_close(copy(x, labels), module(x, labels), rtol=0, atol=0)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    module.eval()(x, labels)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert isinstance(module.lr_scale, float) and module.lr_scale >= 1
