"""The kernels of the log-ratio loss through Triton's interpreter, against plain torch and float64; whom they serve."""

import json
import math

import pytest
import torch

import ratio_cases
import reference
from interpreter import interpreted
from nearkin import kernels, losses
from nearkin.core import blockwise
from nearkin.core.labels import LabelDistance
from nearkin.kernels import eligible, ratio_ops
from ratio_cases import LABELS, SETTINGS

pytestmark = pytest.mark.slow

ALONE, MET = (21, None, 5), (6, 40, 20)  # several tiles with ragged ends; D = 20 comes in two chunks
DIGITS = ("few integers", "continuous", "huge", "vectors")
ODD = [(1, None, 3), (2, None, 4), (1, 1, 1), (4, 1, 3)]


def judge_kernels():
    """What the tests below read, as JSON."""
    verdicts = {f"{name} {ALONE}": ratio_cases.judged(ratio_cases.batch(ALONE, name)) for name in LABELS}
    for name in ("few integers", "mirrored", "merged by rounding", "vectors"):
        verdicts[f"{name} {MET}"] = ratio_cases.judged(ratio_cases.batch(MET, name, seed=3))
    for name, settings in list(SETTINGS.items())[1:]:
        for labels, shape in (("mirrored", ALONE), ("vectors", (9, 12, 3))):
            verdicts[f"{name}, {labels}"] = ratio_cases.judged(ratio_cases.batch(shape, labels), **settings)
    for shape in ODD:
        verdicts[str(shape)] = ratio_cases.judged(ratio_cases.batch(shape))
    for kind in (torch.bfloat16, torch.float16):
        verdicts[str(kind)] = ratio_cases.judged(ratio_cases.batch((9, 12, 6), kind=kind))
    verdicts["near"] = ratio_cases.judged(ratio_cases.near(12, 16))
    verdicts["matrix"] = ratio_cases.judged(ratio_cases.matrix(12, None, 4))
    verdicts["matrix, each anchor"] = ratio_cases.judged(ratio_cases.matrix(5, 20, 4), reduction="none")
    for name in ("few integers", "vectors"):
        verdicts[f"blocks, {name}"] = ratio_cases.judged(ratio_cases.batch((9, None, 4), name), max_memory=6000)
    verdicts["edges"] = edges()
    verdicts |= in_many_pieces()
    print(json.dumps(verdicts))


def judge_digits():
    """As on a GPU without float64 on its matrix units: judged by plain torch with float64 inside."""
    kernels.set_float64_units(False)
    verdicts = {f"{name} {ALONE}": ratio_cases.judged(ratio_cases.batch(ALONE, name)) for name in DIGITS}
    for name in ("mirrored", "vectors"):
        verdicts[f"{name} {MET}"] = ratio_cases.judged(ratio_cases.batch(MET, name, seed=3))
    verdicts["each anchor"] = ratio_cases.judged(ratio_cases.batch((9, 12, 3)), reduction="none")
    verdicts["unit rows"] = ratio_cases.judged(ratio_cases.batch((21, None, 40)), normalize=True)
    verdicts["bfloat16"] = ratio_cases.judged(ratio_cases.batch((9, 12, 6), kind=torch.bfloat16))
    for scale in (1e-2, 1e-4, 1e-6):
        verdicts[f"within {scale}"] = ratio_cases.judged(ratio_cases.near(12, 40, scale))
    verdicts["near ones among far ones"] = ratio_cases.judged(ratio_cases.clusters(21, 20))
    verdicts["matrix"] = ratio_cases.judged(ratio_cases.matrix(12, None, 4))
    print(json.dumps(verdicts | in_many_pieces()))


def in_many_pieces():
    """Slopes of a few anchors, ties of fewer, and several programs to a row, as with a large batch."""
    from nearkin.kernels import ratio_pass

    ratio_pass.SLOPES, ratio_pass.PAIRS, ratio_pass.SORTED_PAIRS, ratio_pass.SHORT = 300, 90, 60, 16
    verdicts = {}
    for name in ("mirrored", "vectors"):
        ratio_pass.SEGMENT["spans"] = 2
        verdicts[f"pieces, {name}"] = ratio_cases.judged(ratio_cases.batch((70, None, 4), name))
        ratio_pass.SEGMENT["spans"] = 1
        verdicts[f"pieces, {name}, met"] = ratio_cases.judged(ratio_cases.batch((9, 70, 4), name), reduction="none")
    return verdicts


def edges():
    x, labels, *_ = ratio_cases.batch((9, None, 4))
    judged = {}
    for kind, y in (("numbers", labels.double()), ("vectors", torch.stack([labels, labels], 1).double())):
        for poison in (math.nan, math.inf):
            rows, targets = x.clone(), y.clone()
            rows[2, 1] = targets[3] = poison
            judged[f"{kind}: a row is {poison}"] = math.isnan(losses.logratio_loss(rows, y, impl="triton"))
            # On the CPU such a label is an error of its own: only the kernels are asked.
            settings = ratio_ops.Settings(1e-6, True, False, "mean")
            tainted = ratio_ops.loss(blockwise.Batch(x, targets, None, None), settings)
            judged[f"{kind}: a label is {poison}"] = math.isnan(tainted)
        silent = x.clone().requires_grad_()
        value = losses.logratio_loss(silent, torch.zeros_like(y), impl="triton")
        value.backward()
        judged[f"{kind}: nobody"] = float(value.detach()) == 0 and not bool(silent.grad.any())
    return judged | {"moves on": moved_on(), "twice": twice(), "one side": one_side(), "the loop": loop()}


def loop():
    """Against the loop over pairs, which knows nothing of groups, runs or orders."""
    near = True
    for name in ("mirrored", "few integers", "merged by rounding"):
        x, labels, references, others = ratio_cases.batch((4, 11, 3), name)
        gaps = (labels.double()[:, None] - others.double()[None, :]).abs()
        exact = reference.logratio(x.double(), gaps, references.double())
        got = losses.logratio_loss(x, labels, references, others, impl="triton")
        near = near and math.isclose(float(got), float(exact), rel_tol=1e-6)
    return near


def moved_on():
    """References and labels are overwritten after the loss, as a momentum queue does: the gradient does not change."""
    gradients = []
    for moves in (False, True):
        x, labels, references, others = (t.clone() for t in ratio_cases.batch((5, 12, 3)))
        x.requires_grad_()
        value = losses.logratio_loss(x, labels, references, others, impl="triton")
        if moves:
            for tensor in (labels, references, others):
                tensor.fill_(5)
        value.backward()
        gradients.append(x.grad)
    return torch.equal(*gradients)


def twice():
    """The same gradient again from a graph that is retained."""
    x, labels, *_ = ratio_cases.batch((9, None, 4))
    x.requires_grad_()
    value = losses.logratio_loss(x, labels, impl="triton")
    first, second = (torch.autograd.grad(value, x, retain_graph=True)[0] for _ in range(2))
    return torch.equal(first, second)


def one_side():
    """A gradient by one side alone is the same as beside the other's; none is made where none is wanted."""
    both = ratio_cases.outcome(ratio_cases.batch((5, 12, 3)), "triton")
    sound = []
    for side in (0, 1):
        x, labels, references, others = ratio_cases.batch((5, 12, 3))
        leaf = (x, references)[side].requires_grad_()
        value = losses.logratio_loss(x, labels, references, others, impl="triton")
        value.backward(torch.full_like(value, 0.3))
        sound.append(torch.equal(leaf.grad, both[1 + side]))
    return all(sound) and not losses.logratio_loss(x.detach(), labels, impl="triton").requires_grad


@pytest.fixture(scope="module")
def verdicts():
    return interpreted(__file__, "judge_kernels")


def test_as_exact_as_plain_torch(verdicts):
    judged = {name: case for name, case in verdicts.items() if name != "edges"}
    assert len(judged) == len(LABELS) + 4 + 2 * (len(SETTINGS) - 1) + len(ODD) + 2 + 3 + 2 + 4
    for name, case in judged.items():
        assert case["served"] == 1, name
        for ours, theirs in zip(case["kernel"], case["torch"], strict=True):
            assert ours <= theirs + 1e-6, (name, case)


def test_digits_are_as_exact_as_float64():
    judged = interpreted(__file__, "judge_digits")
    assert len(judged) == len(DIGITS) + 2 + 3 + 3 + 2 + 4
    for name, case in judged.items():
        assert case["served"] == 1, name
        for ours, theirs in zip(case["kernel"], case["torch"], strict=True):
            assert ours <= theirs + 1e-6, (name, case)


def test_edges(verdicts):
    assert len(verdicts["edges"]) == 14
    assert not [name for name, good in verdicts["edges"].items() if not good]


def test_who_is_served(monkeypatch):
    if not kernels.installed():
        pytest.skip("triton 3.4 or newer is not installed (pip install triton)")
    monkeypatch.setattr(eligible, "possible", lambda device, interpreted: True)
    x, y = torch.randn(6, 4), torch.randn(6)

    def served(impl="triton", reduction="mean", x=x, labels=y, references=None, reference_labels=None, max_memory=None):
        batch = blockwise.Batch(x, labels, references, reference_labels)
        return ratio_ops.serves(impl, batch, reduction, max_memory)

    assert served() and served(references=x.half(), reference_labels=y) and served(reduction="none")
    assert served(labels=torch.randn(6, 3)) and served(labels=LabelDistance(torch.rand(6, 6)))
    assert not served("torch") and not served("auto")  # "auto" wants a GPU
    assert not served(reduction="men")
    assert not served(x=x.double()) and not served(references=x.double(), reference_labels=y)
    assert not served(x=x[:0], labels=y[:0]) and not served(references=x[:0], reference_labels=y[:0])
    with pytest.raises(ValueError, match="max_memory must be at least"):
        served(max_memory=10)
    results = []
    torch.func.grad(lambda t: results.append(served(x=t)) or t.sum())(x)
    assert results == [False]
    monkeypatch.setattr(eligible, "possible", lambda device, interpreted: False)
    assert not served()


def test_the_module_keeps_the_choice():
    assert "impl" not in losses.LogRatioLoss().settings
    assert "impl='torch'" in repr(losses.LogRatioLoss(impl="torch"))
    with pytest.raises(ValueError, match='unknown impl "tritn"; did you mean "triton"'):
        losses.LogRatioLoss(impl="tritn")
