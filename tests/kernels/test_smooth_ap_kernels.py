"""The kernels of Smooth-AP where an anchor's positives do not fit into one table, through Triton's interpreter.

What all pair losses share is judged in `test_pair_kernels.py`.
"""

import json
import math

import pytest
import torch

import kernel_cases
from interpreter import interpreted
from kernel_cases import PAIR_CASES
from nearkin import kernels, losses
from nearkin.core import blockwise
from nearkin.kernels import smooth_ap_ops

pytestmark = pytest.mark.slow

SHAPES = [(45, None, 5), (20, 50, 40)]  # D = 40 comes in two chunks


def large_classes(shape, classes, kind=torch.float32):
    """A batch of few classes."""
    x, labels, references, reference_ids = kernel_cases.batch(shape, kind)
    few = [t if t is None else torch.where(t < 0, t, t % classes) for t in (labels, reference_ids)]
    return x, few[0], references, few[1]


def judge_kernels():
    """What the tests below read, as JSON."""
    from nearkin.kernels import smooth_ap_passes

    smooth_ap_ops.room = lambda batch, max_memory: 1  # tables of 16 positives, the fewest
    verdicts = {}
    for shape in SHAPES:
        for name in ("Smooth-AP", "Smooth-AP, soft"):
            verdicts[f"{name} {shape}"] = kernel_cases.judged(PAIR_CASES[name], large_classes(shape, 2))
    half = large_classes((40, None, 5), 2, torch.bfloat16)
    verdicts["half precision"] = kernel_cases.judged(PAIR_CASES["Smooth-AP, soft"], half)
    verdicts["windows"] = [len(smooth_ap_passes.Task((45, 45, 5), True, False, 0.1, 45, "mean", 1).windows[1])]
    verdicts["twice"] = twice()
    verdicts["max_positives"] = [bounded(most) for most in (2, 3)]
    print(json.dumps(verdicts))


def twice():
    """The gradient, and the same from a graph that was kept."""
    x, labels, _, _ = large_classes((40, None, 5), 2)
    x.requires_grad_()
    value = losses.smooth_ap_loss(x, labels, impl="triton", temperature=0.1)
    return torch.equal(*(torch.autograd.grad(value, x, retain_graph=True)[0] for _ in range(2)))


def bounded(most):
    """Value, and whether the gradient is finite, of classes of 4."""
    x, labels = torch.randn(12, 5, generator=torch.Generator().manual_seed(0)), torch.arange(12) // 4
    x.requires_grad_()
    values = []
    for reduction in ("mean", "active"):
        value = losses.smooth_ap_loss(x, labels, impl="triton", max_positives=most, reduction=reduction)
        value.backward()
        values.append(value.item())
    return values, bool(x.grad.isfinite().all())


def test_tables_stay_within_max_memory():
    if not kernels.installed():
        pytest.skip("triton 3.4 or newer is not installed (pip install triton)")
    from nearkin.kernels import smooth_ap_passes

    batch = blockwise.Batch(torch.zeros(2048, 128), torch.zeros(2048).long(), None, None)
    for bound in (None, 2**25, 2**26, 2**30):
        room = smooth_ap_ops.room(batch, bound)
        task = smooth_ap_passes.Task((2048, 2048, 128), True, False, 0.1, 2048, "mean", room)
        kept, later, width = task.windows
        tables = kept + (width if later else 0)
        assert 0 < 20 * 2048 * tables <= room < (bound or smooth_ap_ops.AUTOMATIC) - 8 * 2048 * 132
        assert bool(later) == (bound in (2**25, 2**26))
    assert smooth_ap_ops.room(batch, 2**21) == 0


@pytest.fixture(scope="module")
def verdicts():
    return interpreted(__file__, "judge_kernels")


def test_any_number_of_positives_is_as_exact_as_plain_torch(verdicts):
    judged = {name: case for name, case in verdicts.items() if isinstance(case, dict)}
    assert len(judged) == 2 * len(SHAPES) + 1 and verdicts["windows"] == [2]
    for name, case in judged.items():
        assert case["served"] == 1, name
        for ours, theirs in zip(case["kernel"], case["torch"], strict=True):
            assert ours <= theirs + 1e-6, (name, case)


def test_a_kept_graph_gives_the_same_gradient_again(verdicts):
    assert verdicts["twice"]


def test_more_positives_than_the_bound_are_nan(verdicts):
    (too_many, finite), (enough, _) = verdicts["max_positives"]
    assert all(map(math.isnan, too_many)) and finite and all(map(math.isfinite, enough))
