"""The kernels of pair losses through Triton's interpreter, against plain torch and float64; which batches they serve.

The interpreter is chosen when triton is imported, so its tests run in a separate process and are read here.
"""

import json
import math

import pytest
import torch

import kernel_cases
from interpreter import interpreted
from kernel_cases import BIN_CASES, PAIR_CASES
from nearkin import kernels, losses
from nearkin.core import blockwise, relations
from nearkin.kernels import eligible, pair_ops

pytestmark = pytest.mark.slow

ALONE, MET = (37, None, 17), (20, 35, 40)  # several tiles with ragged ends; D = 40 comes in two chunks
FIRST = [name for name in PAIR_CASES if "," not in name]  # a case of each kind
ODD = [(1, None, 3), (1, 1, 1), (2, None, 4), (50, 7, 5)]


def judge_kernels():
    """What the tests below read, as JSON."""
    torch.set_num_threads(1)
    verdicts = {
        f"{name} {ALONE}": kernel_cases.judged(case, kernel_cases.batch(ALONE)) for name, case in PAIR_CASES.items()
    }
    for name in FIRST:
        verdicts[f"{name} {MET}"] = kernel_cases.judged(PAIR_CASES[name], kernel_cases.batch(MET, seed=3))
    for name, case in PAIR_CASES.items():
        verdicts[f"{name} batch first"] = kernel_cases.judged(case, kernel_cases.batch_first(MET, seed=5))
    for shape in ODD:
        for name in ("contrastive", "lifted", "N-pair", "SupCon"):
            verdicts[f"{name} {shape}"] = kernel_cases.judged(PAIR_CASES[name], kernel_cases.batch(shape))
    for kind in (torch.bfloat16, torch.float16):
        x, labels, references, reference_ids = kernel_cases.batch((9, 12, 6), kind)
        for name in ("margin", "N-pair", "InfoNCE", "lossless"):
            case = PAIR_CASES[name]
            verdicts[f"{name} {kind}"] = kernel_cases.judged(
                case, (x, labels.int(), references, reference_ids.int()), both=False
            )
    for name, case in BIN_CASES.items():
        verdicts[name] = kernel_cases.judged(case, kernel_cases.batch(ALONE))
    picky = kernel_cases.Case(losses.multi_similarity_loss, {"alpha": 1.0, "beta": 2.0, "epsilon": -0.2})
    verdicts["multi-similarity, few selected"] = kernel_cases.judged(picky, kernel_cases.batch(ALONE))
    for name in ("contrastive", "margin", "lifted"):
        verdicts[f"{name} near"] = kernel_cases.judged(PAIR_CASES[name], kernel_cases.near(12, 16, 1e-4))
    x, labels, _, _ = kernel_cases.batch((9, None, 4))
    for name in FIRST:
        function, settings, *_ = PAIR_CASES[name]
        poisoned = x.clone()
        poisoned[labels == -1] = math.inf  # in no pair
        verdicts[f"{name} poison"] = math.isnan(float(function(poisoned, labels, impl="triton", **settings)))
        silent = x.clone().requires_grad_()
        value = function(silent, torch.full_like(labels, -1), impl="triton", **settings)
        value.backward()
        verdicts[f"{name} silence"] = float(value.detach()) == 0 and not bool(silent.grad.any())
    verdicts["queue moves on"] = moved_on()
    print(json.dumps(verdicts))


def moved_on():
    """References and labels are overwritten after the loss, as a momentum queue does: the gradient does not change."""
    x, labels, references, reference_ids = kernel_cases.batch((9, 12, 6))
    gradients = []
    for moves in (False, True):
        leaf, ids, queue, queued = x.clone().requires_grad_(), labels.clone(), references.clone(), reference_ids.clone()
        value = losses.contrastive_loss(leaf, ids, queue, queued, impl="triton")
        if moves:
            for tensor in (ids, queue, queued):
                tensor.fill_(5)
        value.backward()
        gradients.append(leaf.grad)
    return torch.equal(*gradients)


@pytest.fixture(scope="module")
def verdicts():
    return interpreted(__file__, "judge_kernels")


def test_as_exact_as_plain_torch(verdicts):
    judged = {name: case for name, case in verdicts.items() if isinstance(case, dict)}
    assert len(judged) == 2 * len(PAIR_CASES) + len(FIRST) + 4 * len(ODD) + 8 + len(BIN_CASES) + 3 + 1
    for name, case in judged.items():
        assert case["served"] == 1, name
        for ours, theirs in zip(case["kernel"], case["torch"], strict=True):
            assert ours <= theirs + 1e-6, (name, case)


def test_poison_is_nan_and_silence_is_zero(verdicts):
    heard = [name for name in verdicts if name.endswith(("poison", "silence"))]
    assert len(heard) == 2 * len(FIRST)
    assert all(verdicts[name] for name in heard)


def test_a_queue_may_move_on_before_the_gradient_comes_by(verdicts):
    assert verdicts["queue moves on"]


def test_who_is_served(monkeypatch):
    if not kernels.installed():
        pytest.skip("triton 3.4 or newer is not installed (pip install triton)")
    monkeypatch.setattr(eligible, "possible", lambda device, interpreted: True)
    x, ids = torch.randn(6, 4), torch.arange(6) // 2

    def served(impl="triton", reduction="mean", x=x, labels=ids, references=None, reference_ids=None, max_memory=None):
        return pair_ops.serves(impl, blockwise.Batch(x, labels, references, reference_ids), reduction, max_memory)

    assert served() and served(references=x.half(), reference_ids=ids.int()) and served(reduction="active")
    assert served(labels=ids.to(torch.uint8)) and served(x=x.t().contiguous().t())
    assert not served("torch") and not served("auto")  # "auto" wants a GPU
    assert not served(reduction="none") and not served(reduction="men")
    assert not served(x=x.double()) and not served(references=x.double(), reference_ids=ids)
    assert not served(x=x[:0], labels=ids[:0]) and not served(references=x[:0], reference_ids=ids[:0])
    assert not served(labels=relations.of(ids)) and not served(labels=torch.ones(6, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="max_memory must be at least"):
        served(max_memory=10)
    results = []
    torch.func.grad(lambda t: results.append(served(x=t)) or t.sum())(x)
    assert results == [False]
    monkeypatch.setattr(eligible, "possible", lambda device, interpreted: False)
    assert not served()


@pytest.mark.parametrize("name", PAIR_CASES)
def test_what_is_not_served_is_plain_torch(name):
    if kernels.interpreted():
        pytest.skip("the interpreter serves")
    case, inputs = PAIR_CASES[name], kernel_cases.batch((12, None, 5))
    if not kernels.installed():
        pytest.skip("triton 3.4 or newer is not installed (pip install triton)")
    for impl in ("auto", "triton"):
        got = kernel_cases.outcome(case, inputs, impl)
        assert all(map(torch.equal, got, kernel_cases.outcome(case, inputs, "torch")))


MODULES = [
    losses.ContrastiveLoss,
    losses.MarginLoss,
    losses.MultiSimilarityLoss,
    losses.CircleLoss,
    losses.LiftedStructureLoss,
    losses.NPairLoss,
    losses.SupConLoss,
    losses.InfoNCELoss,
    losses.LosslessTripletLoss,
]


@pytest.mark.parametrize("make", MODULES, ids=lambda make: make.__name__)
def test_modules_hold_the_choice(make, monkeypatch):
    assert "impl" not in make().settings
    assert make(impl="torch").settings["impl"] == "torch" and "impl='torch'" in repr(make(impl="torch"))
    x, labels = torch.randn(8, 5), torch.arange(8) // 2
    torch.manual_seed(1)
    plain = make()(x, labels)
    torch.manual_seed(1)
    assert torch.equal(make(impl="torch")(x, labels), plain)
    with pytest.raises(ValueError, match='unknown impl "tritn"; did you mean "triton"\\? known: auto, torch, triton'):
        make(impl="tritn")
    monkeypatch.setattr(kernels, "installed", lambda: False)
    monkeypatch.setattr(kernels, "RECENT", True)
    with pytest.raises(ValueError, match=r'impl="triton" is not possible here: triton is not installed'):
        make(impl="triton")
