"""The kernels as on a GPU without float64 on its matrix units, by Triton's interpreter, against plain float64 code."""

import json
import traceback

import pytest
import torch

import kernel_cases
import triplet_cases
from interpreter import interpreted
from kernel_cases import PAIR_CASES
from nearkin import kernels, losses

pytestmark = pytest.mark.slow

ALONE, MET = (37, None, 17), (20, 35, 40)
FIRST = [name for name in PAIR_CASES if "," not in name]  # a case of each kind
CHECKS = ("many_positives", "ties")  # the rest does not depend on how distances are made


def judge_pairs():
    kernels.set_float64_units(False)
    verdicts = {}
    for place, name in enumerate(FIRST):
        inputs = kernel_cases.batch(MET, seed=3) if place % 2 else kernel_cases.batch(ALONE)
        verdicts[name] = kernel_cases.judged(PAIR_CASES[name], inputs)
    for name in ("lifted", "SupCon", "circle"):
        verdicts[f"{name}, collapsed"] = kernel_cases.judged(PAIR_CASES[name], kernel_cases.near(12, 16, 1e-4))
    for kind in kernel_cases.KINDS:
        for name in ("contrastive, raw", "contrastive, linear"):
            verdicts[f"{name}, {kind}"] = kernel_cases.judged(PAIR_CASES[name], kernel_cases.rows(kind, 20, 24))
    x = torch.randn(10, 300).repeat_interleave(2, 0).requires_grad_()  # only duplicates are positive
    value = losses.contrastive_loss(x, torch.arange(20) // 2, margin=1e-9, squared=False, impl="triton")
    value.backward()
    verdicts["duplicates"] = float(value.detach()) == 0 and not bool(x.grad.any())
    print(json.dumps(verdicts))


def judge_triplets():
    kernels.set_float64_units(False)
    checks = {name: check for name, check in triplet_cases.CHECKS.items() if name in CHECKS}
    checks["near and far"] = near_and_far
    checks["some selections"] = some_selections
    verdicts = {}
    for name, check in checks.items():
        torch.manual_seed(0)
        try:
            check("cpu")
            verdicts[name] = ""
        except Exception:
            verdicts[name] = traceback.format_exc()
    print(json.dumps(verdicts))


def near_and_far(_device):
    """Where lengths are mixed, hinges are decided by the last digit of a distance."""
    for name, kind in (("all, raw", "pairs"), ("all, raw", "mixed"), ("batch_hard, Hermans", "equal")):
        triplet_cases.as_exact(triplet_cases.CASES[name], kernel_cases.rows(kind, 20, 24))


def some_selections(_device):
    for place, name in enumerate(list(triplet_cases.CASES)[::4]):
        triplet_cases.as_exact(
            triplet_cases.CASES[name], triplet_cases.batch(((17, 37, 50), (33, None, 16))[place % 2])
        )


@pytest.fixture(scope="module")
def pairs():
    return interpreted(__file__, "judge_pairs")


@pytest.fixture(scope="module")
def triplets():
    return interpreted(__file__, "judge_triplets")


def test_pairs_are_as_exact_as_with_float64(pairs):
    judged = {name: verdict for name, verdict in pairs.items() if isinstance(verdict, dict)}
    assert len(judged) == len(FIRST) + 3 + 2 * len(kernel_cases.KINDS)
    for name, verdict in judged.items():
        assert verdict["served"] == 1, name
        for ours, theirs in zip(verdict["kernel"], verdict["torch"], strict=True):
            assert ours <= theirs + 1e-6, (name, verdict)


def test_duplicates_are_at_distance_exactly_0(pairs):
    assert pairs["duplicates"]


def test_triplets(triplets):
    assert len(triplets) == len(CHECKS) + 2
    assert not any(triplets.values()), "\n".join(triplets.values())
